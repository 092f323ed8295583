#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

#include <weir/limits/algorithms/bucket.h>
#include <weir/limits/algorithms/window.h>
#include <weir/limits/limiter/program.h>
#include <weir/limits/limiter/rule_numbers.h>
#include <weir/limits/limiter/small_series.h>
#include <weir/limits/series/overflow_sketch.h>
#include <weir/limits/series/series_table.h>

namespace weir {

/// Counts the series for which the table has no room, and those that gave their place to others, in
/// a sketch: it may say too much of one and never too little. Series are named by as much of their
/// ids as an entry has (SeriesTable::short_id).
///
/// A rule's units are counted by periods of time: those of a fixed window are its windows, and of
/// any other algorithm it takes two neighbouring ones to cover whatever the algorithm looks at.
///
/// Thread-safe. One mutex guards the sketch; it is taken with series' locks held, never the other
/// way, and nothing else is locked while it is held. Where nothing that was counted is alive it is
/// not taken at all.
class Overflow {
 public:
  struct Period {
    std::int64_t number = 0;
    bool neighbour = false;  ///< the one before counts too
    Nanos end = 0;
    Nanos expiry = 0;  ///< from then on no decision reads it
  };
  /// Of what a request consumes. `window` is what the request finds, of rules that have windows.
  static Period period_of(const CompiledRule& compiled, const WindowAt& window, Nanos now);

  /// A thread's turn to decide and to count: until it ends, no other thread does either.
  class Turn {
   public:
    explicit Turn(Overflow& overflow) : overflow_(overflow), lock_(overflow.mutex_) {}
    /// As evaluate_window() and evaluate_bucket(), but perhaps too early a denial, and an estimate
    /// of when it ends.
    Verdict evaluate(const CompiledRule& compiled, const SeriesId& id, const WindowAt& window,
                     std::uint64_t cost, Nanos now) const;
    void count(const CompiledRule& compiled, const SeriesId& id, const WindowAt& window,
               std::uint64_t units, Nanos now);

   private:
    Overflow& overflow_;
    std::lock_guard<std::mutex> lock_;
  };

  /// Units counted of a series that a request is about to consume from.
  std::uint64_t used(const CompiledRule& compiled, const SeriesId& id, const WindowAt& window,
                     Nanos now);
  /// Counts what an entry in a small form says, so that it may go. `kept` is what its number stands
  /// for.
  void move_out(const SeriesEntry& entry, const SeriesId& id, const RuleNumbers::Kept& kept,
                Nanos now);

 private:
  static Period period_at(Nanos length, Nanos now);
  static Nanos drain_length(const BucketShape& bucket);

  // With the mutex.

  std::uint64_t estimate(const SeriesId& id, const Period& period, Nanos now) const;
  void lasts(const Period& period);

  std::mutex mutex_;
  OverflowSketch sketch_;
  std::atomic<Nanos> over_{0};  // when all that it counts is; changed with the mutex held
};

}  // namespace weir
