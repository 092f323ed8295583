#pragma once

#include <compare>
#include <cstdint>
#include <vector>

#include <weir/crdt/ids.h>
#include <weir/crdt/time.h>

namespace weir::crdt {

/// Longest time a windowed cell may live: two leap years and some slack, for calendar windows.
inline constexpr Nanos kMaxLifetime = 800 * kDay;

/// One time window of one series, as the lattice sees it: counts from `start`, and after `expiry`
/// no decision reads it any more. Both are functions of the rule and the window's number, so every
/// region names the same window alike, and a replica that does not know the rule can still tell
/// when the cell is over. The epoch is part of a cell's key: windows cannot leak into each other.
struct Epoch {
  Nanos start = 0;
  Nanos expiry = 0;
  friend auto operator<=>(const Epoch&, const Epoch&) = default;
};

/// A bucket's cell has no epoch.
inline constexpr Epoch kBucketEpoch{-1, -1};

/// 0 <= start < expiry <= kMaxTime + kMaxLifetime, at most kMaxLifetime long.
bool valid_epoch(const Epoch& epoch);

/// From `from` up to `to`, both included.
struct TimeRange {
  Nanos from = 0;
  Nanos to = 0;
  friend bool operator==(const TimeRange&, const TimeRange&) = default;
};

/// Windows of which counts may be missing, after a clock was set back: in which this node has lived
/// by the clock of then, and which that took for over, so that their cells were dropped.
struct LostWindows {
  std::vector<TimeRange> lived;  ///< few
  Nanos ended = -1;              ///< what ends at or before this was over; -1: nothing is lost

  bool any() const { return ended >= 0; }
  bool has(const Epoch& epoch) const;
  /// Until when something that is remembered for `length` may be missing at `now`; `now` or
  /// earlier: nothing is.
  Nanos until(Nanos now, Nanos length) const;
  friend bool operator==(const LostWindows&, const LostWindows&) = default;
};

/// What is counted: a series in an epoch, or a series' bucket.
struct CellId {
  SeriesId series;
  Epoch epoch = kBucketEpoch;
  bool is_bucket() const { return epoch == kBucketEpoch; }
  friend auto operator<=>(const CellId&, const CellId&) = default;
};

/// Cells that expire together, in memory, in digests and on disk. A generation's grain is a power
/// of two of seconds, at least an eighth of the cell's lifetime; the generation ends at the first
/// multiple of the grain that is not before the cell's expiry. The bucket generation never ends.
struct Generation {
  std::int32_t grain_log2 = -1;  ///< -1: the buckets
  std::int64_t number = 0;
  Nanos end() const;
  bool is_bucket() const { return grain_log2 < 0; }
  friend auto operator<=>(const Generation&, const Generation&) = default;
};

inline constexpr Generation kBucketGeneration{};

/// The generation of a valid epoch, or kBucketGeneration of kBucketEpoch.
Generation generation_of(const Epoch& epoch);

}  // namespace weir::crdt
