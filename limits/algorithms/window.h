#pragma once

#include <cstdint>
#include <functional>

#include <weir/crdt/epoch.h>
#include <weir/limits/algorithms/calendar.h>
#include <weir/limits/rules/rule.h>

namespace weir {

/// What one algorithm says of one cost at one instant. Fields as in RuleStatus.
struct Verdict {
  bool allowed = false;
  std::uint64_t remaining = 0;  ///< before this cost is consumed
  Nanos reset = 0;              ///< before this cost is consumed
  Nanos retry_after = 0;
  Nanos delay = 0;
  bool exhausted_locally = false;  ///< escrow, denied: other members may have rights left
};

/// Fixed and sliding windows are one shape: sub-windows of length `sub`, of which the current one
/// and `previous` older ones count, the oldest weighted by how much of it still lies in the window.
///   fixed_window:              sub = window,     previous = 0
///   sliding_window, slots m:   sub = window / m, previous = m (m = 1: the usual two cells)
/// With `strict` the oldest counts whole: the cells then cover every window of that length.
/// With a `calendar` (previous = 0) windows begin where it says; they differ in length.
struct WindowShape {
  Nanos sub = kMinute;
  std::uint32_t previous = 0;
  bool strict = false;
  Nanos phase = 0;                          ///< in [0, sub): boundaries are early by this much
  const CalendarTable* calendar = nullptr;  ///< the rule's: it must outlive the shape

  /// Number of the sub-window that `now` lies in.
  std::int64_t index(Nanos now) const {
    return calendar != nullptr ? calendar->index(now) : (now + phase) / sub;
  }
  Nanos start(std::int64_t index) const {
    return calendar != nullptr ? calendar->start(index) : index * sub - phase;
  }
  Nanos length(std::int64_t index) const {
    return calendar != nullptr ? start(index + 1) - start(index) : sub;
  }
  /// The cell of a sub-window: from its start until no decision reads it.
  crdt::Epoch epoch(std::int64_t index) const;
};

/// The shape of a windowed rule of a RuleSet for one series (whose hash sets a spread phase). It
/// may point to the calendar that the rule holds.
WindowShape window_shape(const Rule& rule, const crdt::SeriesId& series);

/// Units counted in sub-window `index`. Called for any index; 0 where nothing is known.
using CountAt = std::function<std::uint64_t(std::int64_t index)>;

/// Units that count against the limit at `now`, rounded up.
std::uint64_t window_used(const WindowShape& shape, Nanos now, const CountAt& count_at);

/// Admits iff used + cost <= limit, in exact arithmetic. `newest` is the highest index with a
/// count (a peer's clock may be ahead). retry_after is the instant at which this cost passes if
/// nothing else comes: for the weighted cell its decay, not the window's edge.
Verdict evaluate_window(const WindowShape& shape, std::uint64_t limit, Nanos now,
                        std::uint64_t cost, std::int64_t newest, const CountAt& count_at);

}  // namespace weir
