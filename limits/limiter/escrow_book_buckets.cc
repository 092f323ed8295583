// Buckets of escrow rules.

#include <weir/limits/limiter/escrow_book.h>

#include <algorithm>

namespace weir {

crdt::Epoch EscrowBook::period_at(const SeriesId& id, Nanos now) {
  WindowShape periods = lending_periods(id);
  return periods.epoch(periods.index(now));
}

crdt::Epoch EscrowBook::period_after(const SeriesId& id, Nanos now) {
  return period_at(id, period_at(id, now).expiry);
}

crdt::Epoch EscrowBook::period_from(const SeriesId& id, Nanos instant) {
  crdt::Epoch period = period_at(id, instant);
  return period.start == instant ? period : period_at(id, period.expiry);
}

std::uint64_t EscrowBook::share_of(const EscrowBucketShape& shape, const SeriesId& id,
                                   EscrowBucket& bucket, Nanos start) const {
  if (shares_ == nullptr) return shape.burst;
  if (start < bucket.share_from || start >= bucket.share_until ||
      bucket.share_burst != shape.burst) {
    bucket.share = shares_->share(self_, id, shape.burst, start);
    bucket.share_burst = shape.burst;
    bucket.share_from = start;
    bucket.share_until = shares_->next_change(start);
  }
  return bucket.share;
}

std::uint64_t EscrowBook::part_of(const EscrowBucketShape& shape, const SeriesId& id,
                                  EscrowBucket& bucket, EscrowCell* cell,
                                  const crdt::Epoch& period) const {
  bool own = period.start > fence_time_.load(std::memory_order_relaxed) && !lost_.has(period);
  if (cell == nullptr) return own ? share_of(shape, id, bucket, period.start) : 0;
  cell->share = share_of(shape, id, bucket, period.start);
  crdt::Int128 left = cell->left(own);
  return left <= 0
             ? 0
             : static_cast<std::uint64_t>(std::min(left, static_cast<crdt::Int128>(shape.burst)));
}

Nanos EscrowBook::same_until(const SeriesId& id, const Series* series, const EscrowBucket& bucket,
                             Nanos now) const {
  Nanos until = kNever;
  Nanos from = fence_time_.load(std::memory_order_relaxed);
  const crdt::Epoch period = period_at(id, now);
  if (period.start <= from) {
    if (from < kMaxTime) until = period_from(id, from + 1).start;
  } else if (!lost_.has(period) && bucket.share_until < kMaxTime) {
    until = period_from(id, bucket.share_until).start;
  }
  auto edge = [&](Nanos instant) {
    for (Nanos start : {period_at(id, instant).start, period_after(id, instant).start}) {
      if (start > now) until = std::min(until, start);
    }
  };
  if (lost_.any()) edge(lost_.ended);
  for (const crdt::TimeRange& range : lost_.lived) {
    edge(range.from);
    edge(range.to);
  }
  if (series == nullptr) return until;
  for (const EscrowCell& cell : series->escrow) {
    if (cell.epoch.start > now) until = std::min(until, cell.epoch.start);
  }
  return until;
}

std::uint64_t EscrowBook::advance(const EscrowBucketShape& shape, const SeriesId& id,
                                  Series* series, EscrowBucket& bucket, Nanos now) const {
  bucket.rescale(shape);
  now = std::max(now, bucket.at);
  Nanos filled_since =
      open_.load(std::memory_order_relaxed) ? since_.load(std::memory_order_relaxed) : kNever;
  if (shares_ == nullptr) {
    bucket.fill(shape, shape.burst, 0, filled_since, now);
    return shape.burst;
  }
  for (;;) {
    crdt::Epoch period = period_at(id, bucket.at);
    EscrowCell* cell = series == nullptr ? nullptr : series->find_escrow(period);
    std::uint64_t part = part_of(shape, id, bucket, cell, period);
    bucket.enter(shape, period.start);
    Nanos until = period.expiry;
    if (cell == nullptr) {
      until = same_until(id, series, bucket, bucket.at);
    } else {
      std::uint64_t filled = static_cast<std::uint64_t>(
          std::min(cell->others.holding.filled, static_cast<Uint128>(shape.burst)));
      if (filled > cell->credited) {
        bucket.add(shape, filled - cell->credited, part);
        cell->credited = filled;
      }
    }
    std::uint64_t lent = 0;
    for (std::size_t i = 0; series != nullptr && i < series->escrow.size(); ++i) {
      const EscrowCell& each = series->escrow[i];
      if (each.epoch.start > bucket.at) lent = add_saturated(lent, each.given_filled());
    }
    bucket.fill(shape, part, lent, filled_since, std::min(until, now));
    if (now >= until) continue;
    if (series != nullptr) {
      std::erase_if(series->escrow, [&](const EscrowCell& each) {
        return each.epoch.expiry <= bucket.at && each.idle();
      });
    }
    return part;
  }
}

EscrowBucket EscrowBook::unused_bucket(const EscrowBucketShape& shape, const SeriesId& id,
                                       Nanos now) const {
  EscrowBucket bucket;
  bucket.burst = shape.burst;
  Nanos from = since_.load(std::memory_order_relaxed);
  if (from < 0) {
    bucket.level = shape.ticks(shape.burst);
  } else {
    // What an earlier incarnation lent for the periods up to then may have been forgotten here.
    bucket.at = std::min(now, period_from(id, from + kLentAhead).expiry);
  }
  return bucket;
}

EscrowBucket& EscrowBook::made_bucket(const EscrowBucketShape& shape, const SeriesId& id,
                                      Series& series, Nanos now) const {
  if (series.escrow_bucket == nullptr) {
    series.escrow_bucket = std::make_unique<EscrowBucket>(unused_bucket(shape, id, now));
  }
  return *series.escrow_bucket;
}

EscrowBucket& EscrowBook::bucket_at(const EscrowBucketShape& shape, const SeriesId& id,
                                    Series& series, Nanos now) const {
  EscrowBucket& bucket = made_bucket(shape, id, series, now);
  advance(shape, id, &series, bucket, now);
  return bucket;
}

Verdict EscrowBook::evaluate_bucket_rights(const CompiledRule& compiled, const SeriesId& id,
                                           Series* series, std::uint64_t cost, Nanos now) const {
  const EscrowBucketShape& shape = compiled.escrow_bucket;
  EscrowBucket unused;
  if (series == nullptr) unused = unused_bucket(shape, id, now);
  EscrowBucket& bucket = series == nullptr ? unused : made_bucket(shape, id, *series, now);
  std::uint64_t part = advance(shape, id, series, bucket, now);
  Verdict verdict = bucket.evaluate(shape, part, cost);
  if (!open_.load(std::memory_order_relaxed)) {
    verdict.allowed = cost == 0;
    verdict.remaining = 0;
    verdict.retry_after = kAskAgain;
  }
  if (verdict.allowed) {
    verdict.retry_after = 0;
    return verdict;
  }
  verdict.delay = 0;
  verdict.exhausted_locally = cost <= compiled.limit && shares_ != nullptr && part < shape.burst;
  if (verdict.exhausted_locally) verdict.retry_after = std::min(verdict.retry_after, kAskAgain);
  if (cost > compiled.limit) verdict.retry_after = kNever;
  return verdict;
}

void EscrowBook::count_bucket_demand(const CompiledRule& compiled, const SeriesId& id,
                                     Series& series, std::uint64_t cost, Nanos now) {
  if (shares_ == nullptr) return;
  EscrowBucket& bucket = *series.escrow_bucket;
  now = std::max(now, bucket.at);
  bucket.want(std::min(cost, compiled.limit), now);
  if (now < bucket.listed_until) return;
  std::uint64_t left = bucket.left(compiled.escrow_bucket);
  bool enough = left / 2 >= bucket.likely(now) && left <= bucket.share;
  if (enough) return;
  crdt::Epoch period = period_at(id, now);
  bucket.listed_until = period.expiry;
  note_busy({id, period}, compiled.name);
}

void EscrowBook::look_ahead_in_bucket(const CompiledRule& compiled, const crdt::CellId& id,
                                      Series& series, Nanos now) {
  const EscrowBucketShape& shape = compiled.escrow_bucket;
  EscrowBucket& bucket = bucket_at(shape, id.series, series, now);
  crdt::Epoch next = period_at(id.series, id.epoch.expiry);
  if (next.start <= bucket.at) return;
  EscrowCell* cell = series.find_escrow(next);
  std::uint64_t part = part_of(shape, id.series, bucket, cell, next);
  Uint128 filled = cell == nullptr ? 0 : cell->others.holding.filled;
  auto coming = static_cast<std::uint64_t>(std::min<Uint128>(filled, shape.burst));
  std::uint64_t lacking = bucket.lacking(shape, part, coming, now);
  if (lacking > 0) needs_.note(compiled.name, compiled.limit, {id.series, next}, lacking, true);
}

std::uint64_t EscrowBook::lend(const CompiledRule& compiled, const crdt::CellId& id, Series& series,
                               const crdt::Incarnation& to, std::uint64_t wanted, Nanos now) const {
  const EscrowBucketShape& shape = compiled.escrow_bucket;
  EscrowBucket& bucket = bucket_at(shape, id.series, series, now);
  // What has begun here is spent already.
  if (id.epoch.start <= std::max(now, bucket.at)) return 0;
  EscrowCell& cell = series.escrow_cell(id.epoch);
  part_of(shape, id.series, bucket, &cell, id.epoch);
  bool own = takes_share(id.epoch);
  std::uint64_t gave = cell.give(incarnation_, to, wanted, bucket.kept(shape, now), own);
  if (gave == 0) return 0;
  // Only for the next period: what is on its way must be room of the part of now, and in the next
  // one that may be lent to somebody else.
  if (id.epoch.start == period_after(id.series, bucket.at).start) {
    std::uint64_t left = bucket.left(shape);
    left -= std::min(left, bucket.likely(now));
    bucket.lend(shape, cell.give_filled(to, left));
  }
  return gave;
}

bool EscrowBook::is_over(const EscrowBucketShape& shape, const SeriesId& id, Series& series,
                         Nanos floor) const {
  EscrowBucket& bucket = *series.escrow_bucket;
  std::uint64_t part = advance(shape, id, &series, bucket, floor);
  return series.escrow.empty() && bucket.full(shape, part);
}

}  // namespace weir
