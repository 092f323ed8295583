#include <weir/limits/algorithms/window.h>

#include <algorithm>

namespace weir {
namespace {

/// The sums that decide in one sub-window.
struct Sums {
  std::uint64_t full = 0;    // counts whole
  std::uint64_t oldest = 0;  // weighted
};

Sums sums_at(const WindowShape& shape, std::int64_t index, const CountAt& count_at) {
  Sums sums;
  std::int64_t oldest = index - shape.previous;
  for (std::int64_t i = index; i > oldest; --i) sums.full = add_saturated(sums.full, count_at(i));
  if (shape.previous == 0) {
    sums.full = count_at(index);
  } else if (shape.strict) {
    sums.full = add_saturated(sums.full, count_at(oldest));
  } else {
    sums.oldest = count_at(oldest);
  }
  return sums;
}

Uint128 scaled(std::uint64_t units, Nanos by) {
  return static_cast<Uint128>(units) * static_cast<std::uint64_t>(by);
}

}  // namespace

crdt::Epoch WindowShape::epoch(std::int64_t index) const {
  Nanos first = start(index);
  if (calendar != nullptr) return {std::max<Nanos>(first, 0), calendar->start(index + 1)};
  return {std::max<Nanos>(first, 0), first + sub * (static_cast<Nanos>(previous) + 1)};
}

WindowShape window_shape(const Rule& rule, const crdt::SeriesId& series) {
  WindowShape shape;
  if (rule.calendar) {
    shape.calendar = rule.calendar->table.get();
  } else if (rule.algorithm == Algorithm::fixed_window) {
    shape.sub = rule.window;
  } else {
    shape.sub = rule.window / rule.slots;
    shape.previous = rule.slots;
    shape.strict = rule.strict;
  }
  if (rule.phase == Phase::spread) {
    shape.phase = static_cast<Nanos>(crdt::mix64(series.hi, series.lo) %
                                     static_cast<std::uint64_t>(shape.sub));
  }
  return shape;
}

std::uint64_t window_used(const WindowShape& shape, Nanos now, const CountAt& count_at) {
  std::int64_t index = shape.index(now);
  Sums sums = sums_at(shape, index, count_at);
  Nanos elapsed = now - shape.start(index);
  Uint128 weighted = scaled(sums.oldest, shape.length(index) - elapsed);
  auto sub = static_cast<std::uint64_t>(shape.length(index));
  return add_saturated(sums.full, static_cast<std::uint64_t>((weighted + sub - 1) / sub));
}

Verdict evaluate_window(const WindowShape& shape, std::uint64_t limit, Nanos now,
                        std::uint64_t cost, std::int64_t newest, const CountAt& count_at) {
  Verdict verdict;
  std::int64_t current = shape.index(now);
  Sums sums = sums_at(shape, current, count_at);
  Nanos elapsed = now - shape.start(current);
  Nanos sub = shape.length(current);
  Uint128 used = scaled(sums.full, sub) + scaled(sums.oldest, sub - elapsed);
  Uint128 room = scaled(limit, sub);
  if (used <= room) {
    verdict.remaining = static_cast<std::uint64_t>((room - used) / static_cast<std::uint64_t>(sub));
  }
  verdict.allowed = used <= room && scaled(cost, sub) <= room - used;
  for (std::int64_t i = std::max(newest, current); i >= current - shape.previous; --i) {
    if (count_at(i) == 0) continue;
    verdict.reset = shape.epoch(i).expiry - now;
    break;
  }
  if (verdict.allowed) return verdict;
  if (cost > limit) {
    verdict.retry_after = kNever;
    return verdict;
  }
  std::int64_t last = std::max(newest, current) + shape.previous + 1;
  for (std::int64_t index = current; index <= last; ++index) {
    Sums then = sums_at(shape, index, count_at);
    if (then.full > limit - cost) continue;
    sub = shape.length(index);
    Uint128 budget = scaled(limit - cost - then.full, sub);
    Nanos earliest = std::max<Nanos>(now - shape.start(index), 0);
    if (then.oldest > 0) {
      // oldest * (sub - elapsed) <= budget
      Uint128 kept = budget / then.oldest;
      if (kept < static_cast<Uint128>(sub)) {
        earliest = std::max(earliest, sub - static_cast<Nanos>(kept));
      }
    }
    if (earliest >= sub) continue;
    verdict.retry_after = shape.start(index) + earliest - now;
    return verdict;
  }
  verdict.retry_after = kNever;
  return verdict;
}

}  // namespace weir
