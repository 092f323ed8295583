#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <weir/crdt/cell.h>
#include <weir/crdt/cell_arena.h>
#include <weir/crdt/writers.h>

namespace weir::crdt {

/// A cell in a CellArena, in as few bytes as its numbers have:
///
///     8+8  series
///     8    stamp * 256 + flags
///     4+4  buckets only: the neighbours in the queue of what ends (bucket_queue.h)
///     the rest in variable-length integers (LEB128): the epoch or the bucket's state, then the
///     slots, each a writer's number, a birth where it says something, and a value
///
/// A window with one writer takes some 33 bytes, a bucket some 58. This is the form in memory: it
/// depends on Writers, never leaves the process, and is trusted.
struct PackedHead {
  SeriesId series;
  std::uint64_t word = 0;
  RecordRef before = 0;
  RecordRef behind = 0;
};
inline constexpr std::uint64_t kMaxStamp = ~std::uint64_t{0} >> 8;

/// A cell that is held, taken out of its record.
struct HeldCell {
  Cell cell;
  SlotId own;  ///< buckets: the slot that this incarnation counts in, if one of these is it
};

/// Writes what stands behind the head to `out`, in place of what was there, and returns the flags.
/// Every writer gets a number.
std::uint8_t pack(const HeldCell& held, Writers& writers, std::vector<std::byte>& out);

/// From the whole record, head included. Keeps the room of `out`.
void unpack(const std::byte* record, const Writers& writers, HeldCell& out);
CellId packed_id(const std::byte* record);

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
  return head_of(record).word >> 8;
}
inline void set_packed_stamp(std::byte* record, std::uint64_t stamp) {
  PackedHead& head = head_of(record);
  head.word = stamp << 8 | (head.word & 0xFF);
}

/// packed_id(record) == id, and faster.
inline bool is_packed(const std::byte* record, const CellId& id) {
  if (head_of(record).series != id.series) return false;
  bool bucket = is_packed_bucket(record);
  return bucket || id.is_bucket() ? bucket == id.is_bucket() : packed_id(record) == id;
}

}  // namespace weir::crdt
