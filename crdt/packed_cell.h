#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <weir/crdt/cell.h>
#include <weir/crdt/cell_arena.h>
#include <weir/crdt/lifetimes.h>
#include <weir/crdt/writers.h>

namespace weir::crdt {

/// A cell in a CellArena, in as few bytes as its numbers have:
///
///     8+8  series
///     8    from above: 48 bits of stamp, 8 which lifetime, 8 of flags
///     4+4  buckets only: the neighbours in the queue of what ends (bucket_queue.h)
///     the rest mostly in variable-length integers (LEB128): the epoch or the bucket's state, then
///     the slots, each a writer's number, a birth, and a value, as far as these say something
///
/// A window with one writer takes some 31 bytes, a bucket some 48. This is the form in memory: it
/// depends on Writers and Lifetimes, never leaves the process, and is trusted.
struct PackedHead {
  SeriesId series;
  std::uint64_t word = 0;
  RecordRef before = 0;
  RecordRef behind = 0;
};
inline constexpr unsigned kStampShift = 16;
/// Nine years of a million growths a second.
inline constexpr std::uint64_t kMaxStamp = ~std::uint64_t{0} >> kStampShift;

/// A cell that is held, taken out of its record.
struct HeldCell {
  Cell cell;
  SlotId own;  ///< buckets: the slot that this incarnation counts in, if one of these is it
};

/// Writes what stands behind the head to `out`, in place of what was there, and returns what stands
/// beside the stamp. Every writer gets a number.
std::uint16_t pack(const HeldCell& held, Writers& writers, Lifetimes& lifetimes,
                   std::vector<std::byte>& out);

/// From the whole record, head included. Keeps the room of `out`.
void unpack(const std::byte* record, const Writers& writers, const Lifetimes& lifetimes,
            HeldCell& out);
CellId packed_id(const std::byte* record, const Lifetimes& lifetimes);

inline constexpr std::size_t kWindowHead = 24;
inline constexpr std::size_t kBucketHead = 32;

// The head, in place. A record is aligned to 8 bytes.

inline constexpr std::uint8_t kPackedBucket = 1;  // of the flags

inline PackedHead& head_of(std::byte* record) {
  return *reinterpret_cast<PackedHead*>(record);
}
inline const PackedHead& head_of(const std::byte* record) {
  return *reinterpret_cast<const PackedHead*>(record);
}
inline bool is_packed_bucket(const std::byte* record) {
  return (head_of(record).word & kPackedBucket) != 0;
}
inline std::uint64_t packed_stamp(const std::byte* record) {
  return head_of(record).word >> kStampShift;
}
inline void set_packed_stamp(std::byte* record, std::uint64_t stamp) {
  PackedHead& head = head_of(record);
  head.word = stamp << kStampShift | (head.word & ((1u << kStampShift) - 1));
}

/// packed_id() == id, and faster.
inline bool is_packed(const std::byte* record, const Lifetimes& lifetimes, const CellId& id) {
  if (head_of(record).series != id.series) return false;
  bool bucket = is_packed_bucket(record);
  return bucket || id.is_bucket() ? bucket == id.is_bucket() : packed_id(record, lifetimes) == id;
}

}  // namespace weir::crdt
