// Escrow rules: every member spends rights of its own. EscrowCell has the arithmetic.

#include <weir/limits/limiter/limiter_impl.h>

namespace weir {

bool Limiter::Impl::takes_share(const crdt::Epoch& epoch) const {
  return open.load(std::memory_order_relaxed) &&
         epoch.start > fence_time.load(std::memory_order_relaxed);
}

EscrowCell& Limiter::Impl::place(const CompiledRule& compiled, const SeriesId& id,
                                 EscrowCell& cell) const {
  if (cell.placed) return cell;
  cell.placed = true;
  cell.share = options.shares == nullptr
                   ? compiled.limit
                   : options.shares->share(options.self, id, compiled.limit, cell.epoch.start);
  bool scarce = options.shares != nullptr && is_scarce(compiled.limit, *options.shares);
  cell.block = scarce ? 0 : compiled.reserve;
  cell.slice = std::clamp<Nanos>((cell.epoch.expiry - cell.epoch.start) / 16, 1, kSlice);
  return cell;
}

Verdict Limiter::Impl::evaluate_escrow(const CompiledRule& compiled, const Item& item,
                                       Series* series, std::uint64_t cost, Nanos now) const {
  crdt::Epoch epoch = item.window.epoch();
  EscrowCell* cell = series == nullptr ? nullptr : series->find_escrow(epoch);
  EscrowCell unused;
  unused.epoch = epoch;
  const EscrowCell& here = place(compiled, item.id, cell == nullptr ? unused : *cell);
  // A limit that was lowered leaves the rights of this window, but no more at a time; 0 none.
  crdt::Int128 left =
      std::min(here.left(takes_share(epoch)), static_cast<crdt::Int128>(compiled.limit));
  std::uint64_t used = add_saturated(here.spent, here.others.used_by_peers);
  Nanos until_end = epoch.expiry - now;
  Verdict verdict;
  if (left > 0) verdict.remaining = static_cast<std::uint64_t>(left);
  verdict.allowed = left >= static_cast<crdt::Int128>(cost);
  verdict.reset = used > 0 || here.held > 0 ? until_end : 0;
  if (verdict.allowed) return verdict;
  bool never = cost > compiled.limit;
  verdict.exhausted_locally =
      !never && options.shares != nullptr && add_saturated(used, cost) <= compiled.limit;
  verdict.retry_after = never ? kNever : until_end;
  if (verdict.exhausted_locally) verdict.retry_after = std::min(until_end, kAskAgain);
  return verdict;
}

void Limiter::Impl::spend(const CompiledRule& compiled, Item& item, EscrowCell& cell) {
  place(compiled, item.id, cell).spend(item.cost, takes_share(cell.epoch));
  if (!options.replicated) return;
  item.waits = disk.load(std::memory_order_relaxed) && cell.waits();
  if (cell.dirty) list(*item.entry);
}

void Limiter::Impl::consume_escrow(const CompiledRule& compiled, Item& item, Nanos now) {
  Series& series = general(*item.entry, item.id);
  if (compiled.bucket_cell) {
    bool fresh = series.escrow_bucket == nullptr;
    EscrowBucket& bucket = escrow_bucket(compiled, item.id, series, now);
    bucket.spend(compiled.escrow_bucket, item.cost);
    if (fresh) count_demand(compiled, item.id, series, item.cost, now);
    return;
  }
  series.forget_windows(item.window.start - kGrace);
  spend(compiled, item, series.escrow_cell(item.window.epoch()));
}

bool Limiter::Impl::settle_escrow(const CompiledRule& compiled, Item& item, const Hold& hold,
                                  Nanos now) {
  if (compiled.bucket_cell) {
    EscrowBucket& bucket = escrow_bucket(compiled, item.id, *item.entry->series, now);
    bucket.held -= std::min(bucket.held, hold.units);
    if (item.cost > 0) bucket.spend(compiled.escrow_bucket, item.cost);
    return true;
  }
  EscrowCell& cell = *item.entry->series->find_escrow(hold.epoch);
  cell.held -= hold.units;
  if (hold.epoch.expiry <= now) return false;
  if (item.cost > 0) spend(compiled, item, cell);
  return true;
}

void Limiter::Impl::count_demand(const CompiledRule& compiled, const Item& item, Nanos now) {
  const Verdict& verdict = item.verdict;
  if (item.cost == 0 || item.demand_counted || options.shares == nullptr) return;
  bool known = item.entry != nullptr && item.entry->form() == Form::general;
  if (compiled.bucket_cell) {
    if (known && item.entry->series->escrow_bucket != nullptr) {
      count_demand(compiled, item.id, *item.entry->series, item.cost, now);
    } else if (verdict.exhausted_locally) {
      // As below. What was allowed is counted once it is consumed.
      needs.note(compiled.name, compiled.limit, {item.id, period_after(item.id, now)}, item.cost,
                 true);
    }
    return;
  }
  CellId id{item.id, item.window.epoch()};
  EscrowCell* cell = known ? item.entry->series->find_escrow(id.epoch) : nullptr;
  if (cell == nullptr) {
    // Nothing was ever spent here, so nothing is known but this.
    if (verdict.exhausted_locally) needs.note(compiled.name, compiled.limit, id, item.cost);
    return;
  }
  if (cell->demanded == 0) {
    for (const EscrowCell& each : item.entry->series->escrow) {
      if (each.epoch.expiry == id.epoch.start) cell->demanded_before = each.demanded;
    }
  }
  cell->want(std::min(item.cost, compiled.limit), now);
  if (!cell->busy && cell->demanded > cell->share) {
    cell->busy = true;
    std::lock_guard lock(busy_mutex);
    if (busy.size() < EscrowNeeds::kMost) busy.emplace(id, compiled.name);
  }
  std::uint64_t lacking = cell->lacking(now, takes_share(id.epoch));
  if (verdict.exhausted_locally) {
    lacking = std::max(lacking, item.cost - std::min(item.cost, verdict.remaining));
  }
  if (lacking > 0) needs.note(compiled.name, compiled.limit, id, std::min(lacking, compiled.limit));
}

void Limiter::Impl::look_ahead(Nanos now, Nanos lead) {
  std::vector<std::pair<CellId, SeriesId>> ending;
  {
    std::lock_guard lock(busy_mutex);
    for (auto at = busy.begin(); at != busy.end();) {
      const crdt::Epoch& epoch = at->first.epoch;
      if (epoch.expiry <= now) {
        at = busy.erase(at);
        continue;
      }
      // Of a bucket the next period can be asked for only now.
      Nanos length = epoch.expiry - epoch.start;
      Nanos before = std::min(lead, length == kLendingPeriod ? length / 2 : length / 8);
      if (epoch.expiry - before <= now) ending.push_back(*at);
      ++at;
    }
  }
  if (ending.empty()) return;
  RulesInForce::Use program = use(local());
  for (const auto& [id, name] : ending) {
    const CompiledRule* compiled = program->find_escrow(name);
    if (compiled == nullptr) continue;
    if (compiled->bucket_cell) {
      look_ahead_in_bucket(*compiled, id, now);
    } else {
      look_ahead(*compiled, id, now);
    }
  }
}

void Limiter::Impl::look_ahead(const CompiledRule& compiled, const CellId& id, Nanos now) {
  with_entry(id.series, false, [&](SeriesEntry& entry) {
    if (entry.form() != Form::general) return;
    Series& series = *entry.series;
    EscrowCell* cell = series.find_escrow(id.epoch);
    // Who has become quiet needs nothing.
    if (cell == nullptr || cell->demand.forecast(cell->slice, now) == 0) return;
    WindowShape shape = window_shape(*compiled.rule, id.series);
    crdt::Epoch next = shape.epoch(shape.index(id.epoch.start) + 1);
    std::uint64_t likely = std::min(cell->likely(), compiled.limit);
    EscrowCell& then = place(compiled, id.series, series.escrow_cell(next));
    crdt::Int128 lacking = static_cast<crdt::Int128>(likely) - then.left(takes_share(next));
    if (lacking <= 0) return;
    lacking = std::min(lacking, static_cast<crdt::Int128>(compiled.limit));
    needs.note(compiled.name, compiled.limit, {id.series, next},
               static_cast<std::uint64_t>(lacking));
  });
}

std::uint64_t Limiter::Impl::give_rights(const SeriesId& name, const CellId& id,
                                         const crdt::Incarnation& to, std::uint64_t wanted,
                                         Nanos now, bool all) {
  RulesInForce::Use program = use(local());
  const CompiledRule* rule = program->find_escrow(name);
  if (rule == nullptr || stopped || id.epoch.expiry <= now) return 0;
  const CompiledRule& compiled = *rule;
  if (compiled.bucket_cell) return lend_rights(compiled, id, to, wanted, now);
  // A window that this rule has, and no other.
  WindowShape shape = window_shape(*compiled.rule, id.series);
  if (shape.epoch(shape.index(id.epoch.start)) != id.epoch) return 0;
  if (id.epoch.start - now > gives_ahead.load(std::memory_order_relaxed)) return 0;
  std::uint64_t gave = 0;
  with_entry(id.series, true, [&](SeriesEntry& entry) {
    Series& series = general(entry, id.series);
    table.set_rule(entry, compiled.number);
    EscrowCell& cell = place(compiled, id.series, series.escrow_cell(id.epoch));
    std::uint64_t kept = all ? 0 : cell.demand.forecast(cell.slice, now);
    if (!all && id.epoch.start > now) {
      // What this node itself will want of that window.
      for (const EscrowCell& each : series.escrow) {
        if (each.epoch.expiry == id.epoch.start) kept = each.likely();
      }
    }
    gave = cell.give(options.incarnation, to, wanted, kept, takes_share(id.epoch));
    if (gave == 0) return;
    entry.set(SeriesEntry::kUrgent);
    list(entry);
  });
  return gave;
}

std::vector<RightsLeft> Limiter::Impl::rights_left(Nanos now, std::size_t max) {
  std::vector<RightsLeft> found;
  auto busier = [](const RightsLeft& a, const RightsLeft& b) { return a.demand > b.demand; };
  RulesInForce::Use program = use(local());
  table.visit_all([&](SeriesEntry& entry) {
    std::uint32_t number = table.rule(entry);
    if (entry.form() != Form::general || number == SeriesTable::kNoRule) return false;
    for (const EscrowCell& cell : entry.series->escrow) {
      if (cell.epoch.start > now || cell.epoch.expiry <= now) continue;
      if (!cell.placed || cell.left(takes_share(cell.epoch)) <= 0) continue;
      const CompiledRule* rule = program->find(rules.number(number).identity);
      if (rule == nullptr) continue;
      found.push_back(
          {rule->name, {table.id(entry), cell.epoch}, cell.demand.forecast(cell.slice, now)});
    }
    if (found.size() >= 2 * max) {  // the rest is as busy at most
      std::nth_element(found.begin(), found.begin() + static_cast<std::ptrdiff_t>(max), found.end(),
                       busier);
      found.resize(max);
    }
    return false;
  });
  std::sort(found.begin(), found.end(), busier);
  if (found.size() > max) found.resize(max);
  return found;
}

std::optional<std::uint64_t> Limiter::Impl::absorb_rows(const CellId& id,
                                                        const EscrowOthers& others) {
  // Where others only used their own, nothing changes here.
  bool make = others.holding != crdt::Holding{};
  std::uint64_t more = 0;
  bool found = with_entry(id.series, make, [&](SeriesEntry& entry) {
    Series& series = general(entry, id.series);
    EscrowCell* cell = make ? &series.escrow_cell(id.epoch) : series.find_escrow(id.epoch);
    if (cell == nullptr) return;
    if (others.holding.received > cell->others.holding.received) {
      more = static_cast<std::uint64_t>(others.holding.received - cell->others.holding.received);
    }
    cell->others = others;
  });
  if (more > 0) needs.satisfied(id);
  if (!found && make) return std::nullopt;
  return more;
}

crdt::Epoch Limiter::Impl::period_at(const SeriesId& id, Nanos now) {
  WindowShape periods = lending_periods(id);
  return periods.epoch(periods.index(now));
}

crdt::Epoch Limiter::Impl::period_after(const SeriesId& id, Nanos now) {
  return period_at(id, period_at(id, now).expiry);
}

crdt::Epoch Limiter::Impl::period_from(const SeriesId& id, Nanos instant) {
  crdt::Epoch period = period_at(id, instant);
  return period.start == instant ? period : period_at(id, period.expiry);
}

std::uint64_t Limiter::Impl::share_of(const EscrowBucketShape& shape, const SeriesId& id,
                                      EscrowBucket& bucket, Nanos start) const {
  if (options.shares == nullptr) return shape.burst;
  if (start < bucket.share_from || start >= bucket.share_until ||
      bucket.share_burst != shape.burst) {
    bucket.share = options.shares->share(options.self, id, shape.burst, start);
    bucket.share_burst = shape.burst;
    bucket.share_from = start;
    bucket.share_until = options.shares->next_change(start);
  }
  return bucket.share;
}

std::uint64_t Limiter::Impl::part_of(const EscrowBucketShape& shape, const SeriesId& id,
                                     EscrowBucket& bucket, EscrowCell* cell,
                                     const crdt::Epoch& period) const {
  bool own = period.start > fence_time.load(std::memory_order_relaxed);
  if (cell == nullptr) return own ? share_of(shape, id, bucket, period.start) : 0;
  cell->share = share_of(shape, id, bucket, period.start);
  crdt::Int128 left = cell->left(own);
  return left <= 0
             ? 0
             : static_cast<std::uint64_t>(std::min(left, static_cast<crdt::Int128>(shape.burst)));
}

Nanos Limiter::Impl::same_until(const SeriesId& id, const Series* series,
                                const EscrowBucket& bucket, Nanos now) const {
  Nanos until = kNever;
  Nanos from = fence_time.load(std::memory_order_relaxed);
  if (period_at(id, now).start <= from) {
    if (from < kMaxTime) until = period_from(id, from + 1).start;
  } else if (bucket.share_until < kMaxTime) {
    until = period_from(id, bucket.share_until).start;
  }
  if (series == nullptr) return until;
  for (const EscrowCell& cell : series->escrow) {
    if (cell.epoch.start > now) until = std::min(until, cell.epoch.start);
  }
  return until;
}

std::uint64_t Limiter::Impl::advance(const EscrowBucketShape& shape, const SeriesId& id,
                                     Series* series, EscrowBucket& bucket, Nanos now) const {
  bucket.rescale(shape);
  now = std::max(now, bucket.at);
  Nanos filled_since =
      open.load(std::memory_order_relaxed) ? since.load(std::memory_order_relaxed) : kNever;
  if (options.shares == nullptr) {
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

EscrowBucket Limiter::Impl::unused_bucket(const EscrowBucketShape& shape, const SeriesId& id,
                                          Nanos now) const {
  EscrowBucket bucket;
  bucket.burst = shape.burst;
  Nanos from = since.load(std::memory_order_relaxed);
  if (from < 0) {
    bucket.level = shape.ticks(shape.burst);
  } else {
    // What an earlier incarnation lent for the periods up to then may have been forgotten here.
    bucket.at = std::min(now, period_from(id, from + kLentAhead).expiry);
  }
  return bucket;
}

EscrowBucket& Limiter::Impl::made_escrow_bucket(const CompiledRule& compiled, const SeriesId& id,
                                                Series& series, Nanos now) const {
  if (series.escrow_bucket == nullptr) {
    series.escrow_bucket =
        std::make_unique<EscrowBucket>(unused_bucket(compiled.escrow_bucket, id, now));
  }
  return *series.escrow_bucket;
}

EscrowBucket& Limiter::Impl::escrow_bucket(const CompiledRule& compiled, const SeriesId& id,
                                           Series& series, Nanos now) const {
  EscrowBucket& bucket = made_escrow_bucket(compiled, id, series, now);
  advance(compiled.escrow_bucket, id, &series, bucket, now);
  return bucket;
}

Verdict Limiter::Impl::evaluate_escrow_bucket(const CompiledRule& compiled, const Item& item,
                                              Series* series, std::uint64_t cost, Nanos now) {
  const EscrowBucketShape& shape = compiled.escrow_bucket;
  EscrowBucket unused;
  EscrowBucket* bucket = &unused;
  if (series == nullptr) {
    unused = unused_bucket(shape, item.id, now);
  } else {
    // From now on a sweep fills it by these numbers, too. (Or others lent to it before it was
    // ever used here.)
    if (table.rule(*item.entry) != compiled.number) table.set_rule(*item.entry, compiled.number);
    bucket = &made_escrow_bucket(compiled, item.id, *series, now);
  }
  std::uint64_t part = advance(shape, item.id, series, *bucket, now);
  Verdict verdict = bucket->evaluate(shape, part, cost);
  if (!open.load(std::memory_order_relaxed)) {
    verdict.allowed = cost == 0;
    verdict.remaining = 0;
    verdict.retry_after = kAskAgain;
  }
  if (verdict.allowed) {
    verdict.retry_after = 0;
    return verdict;
  }
  verdict.delay = 0;
  verdict.exhausted_locally =
      cost <= compiled.limit && options.shares != nullptr && part < shape.burst;
  if (verdict.exhausted_locally) verdict.retry_after = std::min(verdict.retry_after, kAskAgain);
  if (cost > compiled.limit) verdict.retry_after = kNever;
  return verdict;
}

std::uint64_t Limiter::Impl::owed_escrow(const CompiledRule& compiled, const SeriesId& id,
                                         Series* series, Nanos now) const {
  if (series == nullptr || series->escrow_bucket == nullptr) return 0;
  const EscrowBucketShape& shape = compiled.escrow_bucket;
  EscrowBucket& bucket = *series->escrow_bucket;
  std::uint64_t part = advance(shape, id, series, bucket, now);
  std::uint64_t left = bucket.left(shape);
  return part - std::min(part, left);
}

void Limiter::Impl::count_demand(const CompiledRule& compiled, const SeriesId& id, Series& series,
                                 std::uint64_t cost, Nanos now) {
  if (options.shares == nullptr) return;
  EscrowBucket& bucket = *series.escrow_bucket;
  now = std::max(now, bucket.at);
  bucket.want(std::min(cost, compiled.limit), now);
  if (now < bucket.listed_until) return;
  std::uint64_t left = bucket.left(compiled.escrow_bucket);
  bool enough = left / 2 >= bucket.likely(now) && left <= bucket.share;
  if (enough) return;
  crdt::Epoch period = period_at(id, now);
  bucket.listed_until = period.expiry;
  std::lock_guard lock(busy_mutex);
  if (busy.size() < EscrowNeeds::kMost) busy.emplace(CellId{id, period}, compiled.name);
}

void Limiter::Impl::look_ahead_in_bucket(const CompiledRule& compiled, const CellId& id,
                                         Nanos now) {
  with_entry(id.series, false, [&](SeriesEntry& entry) {
    if (entry.form() != Form::general || entry.series->escrow_bucket == nullptr) return;
    Series& series = *entry.series;
    const EscrowBucketShape& shape = compiled.escrow_bucket;
    EscrowBucket& bucket = escrow_bucket(compiled, id.series, series, now);
    crdt::Epoch next = period_at(id.series, id.epoch.expiry);
    if (next.start <= bucket.at) return;
    EscrowCell* cell = series.find_escrow(next);
    std::uint64_t part = part_of(shape, id.series, bucket, cell, next);
    Uint128 filled = cell == nullptr ? 0 : cell->others.holding.filled;
    auto coming = static_cast<std::uint64_t>(std::min<Uint128>(filled, shape.burst));
    std::uint64_t lacking = bucket.lacking(shape, part, coming, now);
    if (lacking > 0) needs.note(compiled.name, compiled.limit, {id.series, next}, lacking, true);
  });
}

std::uint64_t Limiter::Impl::lend_rights(const CompiledRule& compiled, const CellId& id,
                                         const crdt::Incarnation& to, std::uint64_t wanted,
                                         Nanos now) {
  const EscrowBucketShape& shape = compiled.escrow_bucket;
  if (period_at(id.series, id.epoch.start) != id.epoch || id.epoch.start > now + kLentAhead) {
    return 0;
  }
  std::uint64_t gave = 0;
  with_entry(id.series, true, [&](SeriesEntry& entry) {
    Series& series = general(entry, id.series);
    table.set_rule(entry, compiled.number);
    EscrowBucket& bucket = escrow_bucket(compiled, id.series, series, now);
    // What has begun here is spent already.
    if (id.epoch.start <= std::max(now, bucket.at)) return;
    EscrowCell& cell = series.escrow_cell(id.epoch);
    part_of(shape, id.series, bucket, &cell, id.epoch);
    bool own = takes_share(id.epoch);
    gave = cell.give(options.incarnation, to, wanted, bucket.kept(shape, now), own);
    if (gave == 0) return;
    // Only for the next period: what is on its way must be room of the part of now, and in the
    // next one that may be lent to somebody else.
    if (id.epoch.start == period_after(id.series, bucket.at).start) {
      std::uint64_t left = bucket.left(shape);
      left -= std::min(left, bucket.likely(now));
      bucket.lend(shape, cell.give_filled(to, left));
    }
    entry.set(SeriesEntry::kUrgent);
    list(entry);
  });
  return gave;
}

std::uint64_t Limiter::Impl::used_escrow(const CompiledRule& compiled, const SeriesId& id,
                                         Series* series, Nanos now) {
  WindowShape shape = window_shape(*compiled.rule, id);
  crdt::Epoch epoch = shape.epoch(shape.index(now));
  EscrowCell* cell = series == nullptr ? nullptr : series->find_escrow(epoch);
  if (cell == nullptr) return 0;
  return add_saturated(add_saturated(cell->spent, cell->held), cell->others.used_by_peers);
}

}  // namespace weir
