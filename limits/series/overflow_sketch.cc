#include <weir/limits/series/overflow_sketch.h>

#include <algorithm>
#include <limits>

namespace weir {

std::array<std::size_t, OverflowSketch::kRows> OverflowSketch::places(const crdt::SeriesId& id,
                                                                      std::int64_t period) const {
  // Ids are keyed hashes: who doesn't know the key cannot aim at a cell.
  std::uint64_t seed = crdt::mix64(crdt::mix64(id.hi, id.lo), static_cast<std::uint64_t>(period));
  std::array<std::size_t, kRows> out{};
  for (std::size_t row = 0; row < kRows; ++row) {
    out[row] = row * kColumns + (crdt::mix64(seed, row) & (kColumns - 1));
  }
  return out;
}

std::uint64_t OverflowSketch::estimate(const crdt::SeriesId& id, std::int64_t period,
                                       Nanos now) const {
  if (cells_.empty()) return 0;
  std::uint64_t least = std::numeric_limits<std::uint64_t>::max();
  for (std::size_t place : places(id, period)) {
    const Cell& cell = cells_[place];
    least = std::min(least, cell.expiry > now ? cell.count : 0);
  }
  return least;
}

void OverflowSketch::add(const crdt::SeriesId& id, std::int64_t period, std::uint64_t units,
                         Nanos expiry, Nanos now) {
  raise(id, period, add_saturated(estimate(id, period, now), units), expiry, now);
}

void OverflowSketch::raise(const crdt::SeriesId& id, std::int64_t period, std::uint64_t total,
                           Nanos expiry, Nanos now) {
  if (cells_.empty()) cells_.resize(kRows * kColumns);
  for (std::size_t place : places(id, period)) {
    Cell& cell = cells_[place];
    if (cell.expiry <= now) cell.count = 0;
    cell.count = std::max(cell.count, total);
    cell.expiry = std::max(cell.expiry, expiry);
  }
}

}  // namespace weir
