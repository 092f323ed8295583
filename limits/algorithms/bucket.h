#pragma once

#include <cstdint>

#include <weir/crdt/cell.h>
#include <weir/limits/algorithms/window.h>
#include <weir/limits/rules/rule.h>

namespace weir {

/// A token bucket over the bucket cell (crdt/cell.h): admits iff debt + cost <= burst, in exact
/// integer arithmetic; with one writer this is GCRA. Debt is measured in ticks, of which a unit has
/// window_ns and of which `limit` drain each nanosecond, so no rate is ever rounded.
///
/// A leaky bucket is the same bucket seen from its other end: the debt is a queue of at most
/// `burst` units that leave one by one, and who is let in is told for how long to wait its turn.
struct BucketShape {
  std::uint64_t rate = 0;  ///< ticks drained per nanosecond: the rule's limit
  Nanos unit = kMinute;    ///< ticks per unit: the rule's window
  std::uint64_t burst = 1;
  std::uint32_t max_debt = 1;
  bool queue = false;  ///< leaky: an allowed cost has a delay

  crdt::DebtTicks ticks(std::uint64_t units) const {
    return static_cast<crdt::DebtTicks>(units) * static_cast<std::uint64_t>(unit);
  }
  /// Debt is never counted beyond this.
  crdt::DebtTicks cap() const { return ticks(burst) * (1 + static_cast<std::uint64_t>(max_debt)); }
  /// Longest time a bucket can take to fill, rounded up; at most crdt::kMaxLifetime.
  Nanos fill_time() const;
};

BucketShape bucket_shape(const Rule& rule);

/// What the bucket owes at `now`: crdt::debt_at and, where there is a rate, nothing from
/// state.expiry on. Where the shape was always the same that makes no difference. When it changes,
/// what is owed stands in ticks, time since the last touch drains by the new shape, and a bucket
/// that anybody may have forgotten is full.
crdt::DebtTicks bucket_debt(const BucketShape& shape, const crdt::BucketState& state,
                            std::uint64_t total, Nanos now);

/// `total` is the sum of the bucket's slots. With `queue`, an allowed cost's delay is the time in
/// which the debt before it drains.
Verdict evaluate_bucket(const BucketShape& shape, const crdt::BucketState& state,
                        std::uint64_t total, Nanos now, std::uint64_t cost);

/// The state after `cost` was consumed at `now` and added to a slot: a checkpoint that counts
/// everything. Time behind the last touch counts as the last touch (a peer's clock is ahead).
crdt::BucketState consume_bucket(const BucketShape& shape, const crdt::BucketState& state,
                                 std::uint64_t total_before, Nanos now, std::uint64_t cost);

}  // namespace weir
