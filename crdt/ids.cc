#include <weir/crdt/ids.h>

#include <cinttypes>
#include <cstdio>

#include <weir/crdt/time.h>

namespace weir::crdt {
namespace {

std::string hex(std::uint64_t hi, std::uint64_t lo) {
  char text[33];
  std::snprintf(text, sizeof text, "%016" PRIx64 "%016" PRIx64, hi, lo);
  return text;
}

}  // namespace

std::string to_string(const Incarnation& id) {
  return hex(id.hi, id.lo);
}
std::string to_string(const SeriesId& id) {
  return hex(id.hi, id.lo);
}

std::uint64_t mix64(std::uint64_t seed, std::uint64_t value) {
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
