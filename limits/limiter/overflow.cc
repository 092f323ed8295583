#include <weir/limits/limiter/overflow.h>

#include <algorithm>

namespace weir {

Overflow::Period Overflow::period_of(const CompiledRule& compiled, const WindowAt& window,
                                     Nanos now) {
  if (!compiled.bucket_cell && !compiled.log && window.shape.previous == 0) {
    Nanos end = window.start + window.shape.length(window.index);
    return {window.index, false, end, end};
  }
  if (compiled.bucket_cell) {
    // In which a full bucket drains; no request passes one without a rate.
    return period_at(drain_length(compiled.bucket), now);
  }
  return period_at(compiled.rule->window, now);
}

Overflow::Period Overflow::period_at(Nanos length, Nanos now) {
  std::int64_t number = now / length;
  Nanos end = (number + 1) * length;
  return {number, true, end, end + length};
}

Nanos Overflow::drain_length(const BucketShape& bucket) {
  Uint128 time = bucket.ticks(bucket.burst) / std::max<std::uint64_t>(bucket.rate, 1) + 1;
  return static_cast<Nanos>(std::min(time, static_cast<Uint128>(crdt::kMaxLifetime)));
}

std::uint64_t Overflow::estimate(const SeriesId& id, const Period& period, Nanos now) const {
  std::uint64_t used = sketch_.estimate(id, period.number, now);
  if (!period.neighbour) return used;
  return add_saturated(used, sketch_.estimate(id, period.number - 1, now));
}

void Overflow::lasts(const Period& period) {
  over_.store(std::max(over_.load(std::memory_order_relaxed), period.expiry),
              std::memory_order_relaxed);
}

Verdict Overflow::Turn::evaluate(const CompiledRule& compiled, const SeriesId& id,
                                 const WindowAt& window, std::uint64_t cost, Nanos now) const {
  Period period = period_of(compiled, window, now);
  std::uint64_t used = overflow_.estimate(id, period, now);
  Verdict verdict;
  verdict.remaining = compiled.limit - std::min(compiled.limit, used);
  verdict.reset = used == 0 ? 0 : period.end - now;
  verdict.allowed = cost <= verdict.remaining;
  verdict.retry_after = verdict.allowed ? 0 : period.end - now;
  return verdict;
}

void Overflow::Turn::count(const CompiledRule& compiled, const SeriesId& id, const WindowAt& window,
                           std::uint64_t units, Nanos now) {
  Period period = period_of(compiled, window, now);
  overflow_.sketch_.add(id, period.number, units, period.expiry, now);
  overflow_.lasts(period);
}

std::uint64_t Overflow::used(const CompiledRule& compiled, const SeriesId& id,
                             const WindowAt& window, Nanos now) {
  if (now >= over_.load(std::memory_order_relaxed)) return 0;
  std::lock_guard lock(mutex_);
  return estimate(id, period_of(compiled, window, now), now);
}

void Overflow::move_out(const SeriesEntry& entry, const SeriesId& id, const RuleNumbers::Kept& kept,
                        Nanos now) {
  Period period;
  std::uint64_t units = 0;
  if (entry.form() == Form::bucket) {
    units = kept.compact.unit.ceil(kept.compact.debt(entry, now));
    period = period_at(drain_length(kept.bucket), now);
  } else {
    WindowShape shape = window_shape(kept.rule, {});
    units = std::uint64_t{entry.count[0]} + entry.count[1];
    if (shape.previous == 0) {
      // Its phase is not known here, but is less than its length.
      period.number = shape.calendar != nullptr ? shape.index(entry.time)
                                                : (entry.time + shape.sub - 1) / shape.sub;
      period.expiry = entry.time + shape.length(period.number);
    } else {
      units += std::uint64_t{entry.count[2]} + entry.count[3];
      period = period_at(kept.rule.window, now);
    }
  }
  std::lock_guard lock(mutex_);
  sketch_.raise(id, period.number, units, period.expiry, now);
  lasts(period);
}

}  // namespace weir
