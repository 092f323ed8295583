#include <weir/limits/algorithms/bucket.h>

#include <algorithm>

namespace weir {
namespace {

/// Nanoseconds in which `debt` drains, rounded up; kNever if that is not within kMaxTime.
Nanos time_to_drain(crdt::DebtTicks debt, std::uint64_t rate) {
  if (debt == 0) return 0;
  if (rate == 0) return kNever;
  crdt::DebtTicks time = (debt + rate - 1) / rate;
  return time > static_cast<crdt::DebtTicks>(kMaxTime) ? kNever : static_cast<Nanos>(time);
}

}  // namespace

Nanos BucketShape::fill_time() const {
  return std::min(time_to_drain(cap(), rate), crdt::kMaxLifetime);
}

BucketShape bucket_shape(const Rule& rule) {
  return {rule.limit, rule.window, rule.burst, rule.max_debt,
          rule.algorithm == Algorithm::leaky_bucket};
}

crdt::DebtTicks bucket_debt(const BucketShape& shape, const crdt::BucketState& state,
                            std::uint64_t total, Nanos now) {
  if (shape.rate != 0 && now >= state.expiry) return 0;
  return crdt::debt_at(state, total, now, shape.rate, shape.unit, shape.cap());
}

Verdict evaluate_bucket(const BucketShape& shape, const crdt::BucketState& state,
                        std::uint64_t total, Nanos now, std::uint64_t cost) {
  Verdict verdict;
  crdt::DebtTicks capacity = shape.ticks(shape.burst);
  auto debt_then = [&](Nanos then) { return bucket_debt(shape, state, total, then); };
  crdt::DebtTicks debt = debt_then(now);
  if (debt <= capacity) {
    verdict.remaining =
        static_cast<std::uint64_t>((capacity - debt) / static_cast<std::uint64_t>(shape.unit));
  }
  verdict.allowed = debt <= capacity && shape.ticks(cost) <= capacity - debt;
  // Up to the last touch the debt falls by what the checkpoint drains, behind it by everything.
  Nanos straight = std::max(now, state.touched);
  crdt::DebtTicks later = debt_then(straight);
  auto until_at_most = [&](crdt::DebtTicks most) -> Nanos {
    if (debt <= most) return 0;
    if (later > most) {
      if (shape.rate == 0) return kNever;
      return straight - now +
             std::min(time_to_drain(later - most, shape.rate), state.expiry - straight);
    }
    Nanos above = now;
    Nanos passes = straight;
    while (passes - above > 1) {
      Nanos middle = above + (passes - above) / 2;
      (debt_then(middle) > most ? above : passes) = middle;
    }
    return passes - now;
  };
  verdict.reset = until_at_most(0);
  if (verdict.allowed) {
    if (shape.queue) verdict.delay = verdict.reset;
    return verdict;
  }
  if (cost > shape.burst) {
    verdict.retry_after = kNever;
    return verdict;
  }
  verdict.retry_after = until_at_most(capacity - shape.ticks(cost));
  return verdict;
}

crdt::BucketState consume_bucket(const BucketShape& shape, const crdt::BucketState& state,
                                 std::uint64_t total_before, Nanos now, std::uint64_t cost) {
  crdt::BucketState after;
  crdt::DebtTicks debt = bucket_debt(shape, state, total_before, now);
  after.touched = std::max(now, state.touched);
  after.checkpoint = {add_saturated(total_before, cost), after.touched, debt + shape.ticks(cost)};
  after.expiry = std::max(state.expiry, after.touched + shape.fill_time());
  return after;
}

}  // namespace weir
