#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include <weir/crdt/ids.h>
#include <weir/crdt/time.h>

namespace weir {

/// Counts series that a full table has no room for: a count-min sketch (Cormode and Muthukrishnan,
/// 2005) of units by series and period, with conservative update. It only ever over-counts: by at
/// most e/kColumns of everything that is live in it, with probability 1 - e^-kRows. Two sketches
/// join by the maximum (or, of disjoint traffic, the sum) of their cells.
///
/// Memory, 4 MiB, is taken with the first unit. Not thread-safe.
class OverflowSketch {
 public:
  static constexpr std::size_t kRows = 4;
  static constexpr std::size_t kColumns = 1u << 16;

  /// At least what add() and raise() were given of this series in this period.
  std::uint64_t estimate(const crdt::SeriesId& id, std::int64_t period, Nanos now) const;
  /// The units need not be known any more from `expiry` on.
  void add(const crdt::SeriesId& id, std::int64_t period, std::uint64_t units, Nanos expiry,
           Nanos now);
  /// The same for units of which some or all may have been added before: they are `total` in all.
  void raise(const crdt::SeriesId& id, std::int64_t period, std::uint64_t total, Nanos expiry,
             Nanos now);

 private:
  struct Cell {
    std::uint64_t count = 0;
    Nanos expiry = 0;
  };
  std::array<std::size_t, kRows> places(const crdt::SeriesId& id, std::int64_t period) const;

  std::vector<Cell> cells_;
};

}  // namespace weir
