#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace weir::crdt {

/// One boot of one node: 128 random bits, never used again (a reused id would let max-merge
/// swallow increments of a node that came back from an older disk). Zero means "none".
struct Incarnation {
  std::uint64_t hi = 0;
  std::uint64_t lo = 0;
  friend auto operator<=>(const Incarnation&, const Incarnation&) = default;
  explicit operator bool() const { return hi != 0 || lo != 0; }
};

/// One rule's one key: a keyed 128-bit hash of the rule's identity and the descriptor values.
struct SeriesId {
  std::uint64_t hi = 0;
  std::uint64_t lo = 0;
  friend auto operator<=>(const SeriesId&, const SeriesId&) = default;
};

/// A slot's global name. `birth` is 0 in a windowed cell, or says which row of an escrow rule this
/// is (escrow.h). In a bucket cell it is the instant at
/// which the writer made the slot: a bucket that was dropped and comes back gets a new slot, so an
/// old copy at a peer cannot mask it.
struct SlotId {
  Incarnation writer;
  std::uint64_t birth = 0;
  friend auto operator<=>(const SlotId&, const SlotId&) = default;
};

inline constexpr std::size_t kMaxMemberName = 255;  ///< bytes of a region's or a node's name

/// Who an incarnation belongs to. Describes it; never decides a merge.
struct Member {
  std::string region;
  std::string node;
  friend auto operator<=>(const Member&, const Member&) = default;
};

/// "3f0c…" in 32 hexadecimal digits, for logs and status.
std::string to_string(const Incarnation& id);
std::string to_string(const SeriesId& id);

/// Mixes words into 64 well-spread bits. Not keyed: for tables and digests, never against attackers
/// (series ids are keyed before they get here).
std::uint64_t mix64(std::uint64_t seed, std::uint64_t value);

}  // namespace weir::crdt

template <>
struct std::hash<weir::crdt::SeriesId> {
  std::size_t operator()(const weir::crdt::SeriesId& id) const noexcept { return id.lo; }
};

template <>
struct std::hash<weir::crdt::Incarnation> {
  std::size_t operator()(const weir::crdt::Incarnation& id) const noexcept { return id.lo; }
};
