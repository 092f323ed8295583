#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include <weir/crdt/time.h>

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

/// Mixes words into 64 well-spread bits. Keyed only if the first seed is secret (table_hash.h):
/// digests are not.
inline std::uint64_t mix64(std::uint64_t seed, std::uint64_t value) {
  // A multiply-fold round: both halves of the 128-bit product, so every input bit reaches all.
  Uint128 product =
      static_cast<Uint128>(value ^ 0x8BB84B93962EACC9ull) * (seed ^ 0x4B33A62ED433D4A3ull);
  auto low = static_cast<std::uint64_t>(product);
  auto high = static_cast<std::uint64_t>(product >> 64);
  std::uint64_t folded = low ^ high ^ seed;
  // A zero factor would forget the other one; this finish (from MurmurHash3) spreads what is left.
  folded += value * 0x9E3779B97F4A7C15ull;
  folded ^= folded >> 33;
  folded *= 0xFF51AFD7ED558CCDull;
  folded ^= folded >> 33;
  return folded;
}

}  // namespace weir::crdt

/// For ids that were made here, with a key (limits/series/keyed_hash.h). Where peers name cells:
/// table_hash.h.
template <>
struct std::hash<weir::crdt::SeriesId> {
  std::size_t operator()(const weir::crdt::SeriesId& id) const noexcept { return id.lo; }
};
