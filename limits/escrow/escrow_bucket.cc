#include <weir/limits/escrow/escrow_bucket.h>

#include <algorithm>
#include <limits>

namespace weir {
namespace {

using crdt::Int128;

constexpr auto kMost = std::numeric_limits<std::uint64_t>::max();
/// Sums of two products stay below 2^127.
constexpr Int128 kMostTicks = Int128{1} << 124;

std::uint64_t clamped(Int128 units) {
  if (units <= 0) return 0;
  return units > static_cast<Int128>(kMost) ? kMost : static_cast<std::uint64_t>(units);
}

/// Nanoseconds in which `ticks` fill or drain, rounded up; kNever if that is not within kMaxTime.
Nanos time_for(Int128 ticks, Int128 per_ns) {
  if (ticks <= 0) return 0;
  if (per_ns == 0) return kNever;
  Int128 time = (ticks + per_ns - 1) / per_ns;
  return time > kMaxTime ? kNever : static_cast<Nanos>(time);
}

/// Rounded down.
Int128 scaled(Int128 ticks, std::uint64_t from, std::uint64_t to) {
  Int128 old = static_cast<Int128>(from);
  Int128 whole = ticks / old;
  Int128 rest = ticks % old;
  if (rest < 0) {
    rest += old;
    --whole;
  }
  return whole * static_cast<Int128>(to) + rest * static_cast<Int128>(to) / old;
}

bool below(Uint128 a, Uint128 b, Int128 most) {
  return b == 0 || a < static_cast<Uint128>(most) / b;
}

}  // namespace

WindowShape lending_periods(const crdt::SeriesId& series) {
  WindowShape shape;
  shape.sub = kLendingPeriod;
  shape.phase = static_cast<Nanos>(crdt::mix64(series.hi, series.lo) % kLendingPeriod);
  return shape;
}

EscrowBucketShape escrow_bucket_shape(const Rule& rule) {
  return {rule.limit, rule.window, rule.burst, rule.algorithm == Algorithm::leaky_bucket};
}

bool EscrowBucketShape::fits() const {
  auto length = static_cast<std::uint64_t>(std::max<Nanos>(unit, 1));
  return below(burst, length, kMostTicks) && below(Uint128{burst} * length, burst, kMostTicks) &&
         below(rate, burst, kMostTicks);
}

std::uint64_t EscrowBucketShape::per_period(std::uint64_t part) const {
  if (burst == 0) return 0;
  Int128 each = ticks_per_ns(part);
  Int128 whole = each / unit_ticks();
  Int128 rest = each % unit_ticks();
  // The rest is below 2^94 where that matters; where it is not, a period's part of it is no unit.
  Int128 more = rest < kMostTicks / kLendingPeriod ? rest * kLendingPeriod / unit_ticks() : 0;
  return clamped(std::min<Int128>(whole, static_cast<Int128>(kMost)) * kLendingPeriod + more);
}

std::uint64_t EscrowBucketShape::part_for(std::uint64_t units) const {
  if (burst == 0 || units == 0) return 0;
  std::uint64_t twice = add_saturated(units, units);
  std::uint64_t in_all = per_period(burst);
  Uint128 filling = static_cast<Uint128>(units) * burst;
  std::uint64_t part = in_all == 0 ? twice : clamped(static_cast<Int128>(filling / in_all) + 1);
  return std::min({part, twice, burst});
}

void EscrowBucket::rescale(const EscrowBucketShape& shape) {
  if (burst == shape.burst) return;
  level = burst == 0 ? 0 : scaled(level, burst, shape.burst);
  queued = burst == 0 ? 0 : scaled(queued, burst, shape.burst) + 1;
  burst = shape.burst;
  room = 0;
  room_part = burst;
}

void EscrowBucket::enter(const EscrowBucketShape& shape, Nanos start) {
  if (room_since >= start || at > start) return;
  room_since = start;
  room = shape.ticks(shape.burst);
  room_part = shape.burst;
}

void EscrowBucket::fill(const EscrowBucketShape& shape, std::uint64_t part, std::uint64_t lent,
                        Nanos since, Nanos until) {
  Int128 most = shape.ticks(part - std::min(part, lent));
  level = std::min(level, most);
  Nanos from = std::max(at, since);
  at = std::max(at, until);
  if (until > from) {
    Int128 each = shape.ticks_per_ns(part);
    // Compared first: the product need not fit.
    Nanos time = until - from;
    level = time >= time_for(most - level, each) ? most : level + each * time;
    queued = time >= time_for(queued, each) ? 0 : queued - each * time;
  }
  if (part > room_part) room += shape.ticks(part - room_part);
  room = std::min(room, most - level);
  room_part = part;
}

void EscrowBucket::add(const EscrowBucketShape& shape, std::uint64_t units, std::uint64_t part) {
  if (part > room_part) room += shape.ticks(part - room_part);
  room_part = std::max(part, room_part);
  Int128 good =
      std::clamp<Int128>(shape.ticks(std::min(units, shape.burst)), 0, std::max<Int128>(room, 0));
  level = std::min(level + good, shape.ticks(part));
  room -= good;
}

void EscrowBucket::spend(const EscrowBucketShape& shape, std::uint64_t units) {
  Int128 all = shape.ticks(shape.burst);
  Int128 ticks = shape.ticks(std::min(units, add_saturated(shape.burst, shape.burst)));
  level = std::max(level - ticks, -all);
  if (shape.queue) queued = std::min(queued + ticks, 2 * all);
}

void EscrowBucket::want(std::uint64_t units, Nanos now) {
  if (now / kLendingPeriod != demand.slice_of_last()) {
    bool next = now / kLendingPeriod == demand.slice_of_last() + 1;
    largest_before = next ? largest : 0;
    largest = 0;
  }
  largest = std::max(largest, units);
  demand.add(units, kLendingPeriod, now);
}

std::uint64_t EscrowBucket::left(const EscrowBucketShape& shape) const {
  if (shape.burst == 0 || level <= 0) return 0;
  std::uint64_t units = clamped(level / shape.unit_ticks());
  return units - std::min(units, held);
}

std::uint64_t EscrowBucket::kept(const EscrowBucketShape& shape, Nanos now) const {
  std::uint64_t next = likely(now);
  if (next == 0) return held;
  return add_saturated(held, std::max({shape.part_for(next), largest, largest_before}));
}

std::uint64_t EscrowBucket::lacking(const EscrowBucketShape& shape, std::uint64_t part,
                                    std::uint64_t coming, Nanos now) const {
  std::uint64_t next = likely(now);
  // Who has become quiet needs nothing.
  if (next == 0 && held == 0) return 0;
  std::uint64_t here = left(shape);
  std::uint64_t then =
      add_saturated(add_saturated(std::min(here, part), coming), shape.per_period(part));
  std::uint64_t twice = add_saturated(next, next);
  // What is here above the part would be lost.
  std::uint64_t wanted = add_saturated(here, held);
  if (twice > then) wanted = std::max(wanted, add_saturated(part, twice - then));
  wanted = std::min(wanted, shape.burst);
  return wanted - std::min(wanted, part);
}

bool EscrowBucket::full(const EscrowBucketShape& shape, std::uint64_t part) const {
  return held == 0 && queued == 0 && level >= shape.ticks(part);
}

Verdict EscrowBucket::evaluate(const EscrowBucketShape& shape, std::uint64_t part,
                               std::uint64_t cost) const {
  Verdict verdict;
  Int128 each = shape.ticks_per_ns(part);
  // As if what is held were spent now.
  Int128 taken = shape.ticks(std::min(held, shape.burst));
  Int128 here = std::max(level - taken, -shape.ticks(shape.burst));
  verdict.remaining = left(shape);
  verdict.allowed = cost <= verdict.remaining && here >= 0;
  verdict.reset = time_for(shape.ticks(part) - here, each);
  if (verdict.allowed) {
    if (shape.queue)
      verdict.delay = time_for(std::min(queued + taken, 2 * shape.ticks(shape.burst)), each);
    return verdict;
  }
  verdict.retry_after = cost > part ? kNever : time_for(shape.ticks(cost) - here, each);
  return verdict;
}

}  // namespace weir
