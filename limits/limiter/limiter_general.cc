// Any decision; and what becomes of series for which the table has no room.

#include <weir/limits/limiter/limiter_impl.h>

namespace weir {

bool Limiter::Impl::lock_all(std::span<Item> items, std::vector<Item*>& locked) {
  if (items.size() == 1) {
    Item& item = items[0];
    if (item.entry == nullptr || table.lock(*item.entry, item.id)) return true;
    item.entry = nullptr;
    return false;
  }
  locked.clear();
  for (Item& item : items) {
    if (item.entry != nullptr) locked.push_back(&item);
  }
  std::sort(locked.begin(), locked.end(),
            [](const Item* a, const Item* b) { return a->entry < b->entry; });
  for (std::size_t i = 0; i < locked.size(); ++i) {
    if (table.lock(*locked[i]->entry, locked[i]->id)) continue;
    locked[i]->entry = nullptr;
    for (std::size_t j = 0; j < i; ++j) SeriesTable::unlock(*locked[j]->entry);
    return false;
  }
  return true;
}

void Limiter::Impl::unlock_all(std::span<Item> items) {
  for (Item& item : items) {
    if (item.entry != nullptr) SeriesTable::unlock(*item.entry, local().stripe);
  }
}

bool Limiter::Impl::decide_locked(std::span<Item> items, Nanos now, Decision& out) {
  out.allowed = true;
  out.wants_commit = false;
  out.repeated = false;
  out.statuses.resize(items.size());
  bool missing = false;
  std::unique_lock counting(overflow_mutex, std::defer_lock);
  for (std::size_t i = 0; i < items.size(); ++i) {
    Item& item = items[i];
    const CompiledRule& compiled = *item.compiled;
    RuleStatus& status = out.statuses[i];
    status.rule = item.rule;
    status.descriptor = item.descriptor;
    status.shadow = compiled.shadow;
    status.degraded = false;
    status.exhausted_locally = false;
    status.limit = compiled.limit;
    assess(compiled, item, now, status);
    if (compiled.escrow && stopped.load(std::memory_order_relaxed)) {
      deny_degraded(status);
      status.exhausted_locally = false;
    } else if (compiled.escrow) {
      count_demand(compiled, item, status, now);
    }
    if (status.allowed && item.cost > 0 && (item.entry == nullptr || item.mode == Mode::no_ticket))
        [[unlikely]] {
      if (item.mode == Mode::no_ticket && compiled.rule->on_failure == OnFailure::closed) {
        deny_degraded(status);
      } else if (item.entry != nullptr) {
        // Counted at once.
      } else if (item.no_room) {
        if (!counting.owns_lock()) counting.lock();
        degrade(compiled, item, now, status);
      } else {
        missing = true;
      }
    }
    if (!status.shadow && !status.allowed) out.allowed = false;
  }
  if (missing && out.allowed) {
    unlock_all(items);
    for (Item& item : items) make(item, now);
    return false;
  }
  for (std::size_t i = 0; i < items.size(); ++i) {
    Item& item = items[i];
    RuleStatus& status = out.statuses[i];
    const CompiledRule& compiled = *item.compiled;
    bool consumes = out.allowed && status.allowed && !status.degraded && item.cost > 0;
    if (item.compact) finish(compiled, item.owed, item.cost, consumes, status);
    if (consumes) {
      consume(compiled, item, now, status);
      status.remaining -= std::min(status.remaining, item.cost);
      out.wants_commit |= compiled.commit || item.waits;
      if (!item.compact) status.reset = reset_after(compiled, item, status, now);
    } else if (status.degraded && out.allowed && status.allowed) {
      Period period = period_of(compiled, item, now);
      overflow.add(table.short_id(item.id), period.number, item.cost, period.expiry, now);
      overflow_lasts(period.expiry);
      status.remaining -= item.cost;
    }
  }
  find_decider(out);
  unlock_all(items);
  return true;
}

Limiter::Impl::Period Limiter::Impl::period_of(const CompiledRule& compiled, const Item& item,
                                               Nanos now) {
  if (!compiled.bucket_cell && !compiled.log && item.shape.previous == 0) {
    Nanos end = item.start + item.shape.length(item.index);
    return {item.index, false, end, end};
  }
  if (compiled.bucket_cell) {
    // In which a full bucket drains; no request passes one without a rate.
    return period_at(drain_length(compiled.bucket), now);
  }
  return period_at(compiled.rule->window, now);
}

Limiter::Impl::Period Limiter::Impl::period_at(Nanos length, Nanos now) {
  std::int64_t number = now / length;
  Nanos end = (number + 1) * length;
  return {number, true, end, end + length};
}

Nanos Limiter::Impl::drain_length(const BucketShape& bucket) {
  Uint128 time = bucket.ticks(bucket.burst) / std::max<std::uint64_t>(bucket.rate, 1) + 1;
  return static_cast<Nanos>(std::min(time, static_cast<Uint128>(crdt::kMaxLifetime)));
}

void Limiter::Impl::overflow_lasts(Nanos expiry) {
  overflow_over.store(std::max(overflow_over.load(std::memory_order_relaxed), expiry),
                      std::memory_order_relaxed);
}

std::uint64_t Limiter::Impl::overflow_used(const Item& item, const Period& period,
                                           Nanos now) const {
  SeriesId id = table.short_id(item.id);
  std::uint64_t used = overflow.estimate(id, period.number, now);
  if (!period.neighbour) return used;
  return add_saturated(used, overflow.estimate(id, period.number - 1, now));
}

bool Limiter::Impl::begin_with_overflow(const Item& item, Nanos now, SeriesEntry& entry) {
  if (now >= overflow_over.load(std::memory_order_relaxed)) return true;
  const CompiledRule& compiled = *item.compiled;
  std::uint64_t used = 0;
  {
    std::lock_guard counting(overflow_mutex);
    used = overflow_used(item, period_of(compiled, item, now), now);
  }
  if (used == 0) return true;
  if (options.replicated || !(compiled.compact.fits || compiled.small_windows)) return false;
  if (compiled.bucket_cell) {
    std::uint64_t most = mul_saturated(compiled.limit, 1 + std::uint64_t{compiled.bucket.max_debt});
    entry.set_form(Form::bucket);
    entry.time = now;
    entry.word[0] = std::min(used, most) * compiled.compact.unit.value();
    entry.word[1] = compiled.number;
    return true;
  }
  if (used > kMaxSmall) return false;
  entry.set_form(Form::window);
  entry.time = item.start;
  entry.count[1] = static_cast<std::uint32_t>(used);
  return true;
}

bool Limiter::Impl::make_room(Nanos now) {
  if (options.replicated) return false;
  std::size_t moved = 0;
  auto gives_way = [&](SeriesEntry& entry) {
    // Somebody is about to use an unused one.
    if (entry.form() == Form::unused) return false;
    if (is_over(entry, now - kGrace)) return true;
    if (moved == kMovedAtOnce || !move_out(entry, now)) return false;
    ++moved;
    return true;
  };
  for (int look = 0; look < kLooks; ++look) {
    if (table.make_room(gives_way) > 0) return true;
  }
  return false;
}

bool Limiter::Impl::move_out(SeriesEntry& entry, Nanos now) {
  if (entry.has(SeriesEntry::kUsed)) {
    entry.set(SeriesEntry::kUsed, false);
    return false;
  }
  Period period;
  std::uint64_t units = 0;
  if (entry.form() == Form::window) {
    const Rule& rule = rules.number(table.rule(entry)).rule;
    WindowShape shape = window_shape(rule, {});
    units = std::uint64_t{entry.count[0]} + entry.count[1];
    if (shape.previous == 0) {
      // Its phase is not known here, but is less than its length.
      period.number = shape.calendar != nullptr ? shape.index(entry.time)
                                                : (entry.time + shape.sub - 1) / shape.sub;
      period.expiry = entry.time + shape.length(period.number);
    } else {
      units += std::uint64_t{entry.count[2]} + entry.count[3];
      period = period_at(rule.window, now);
    }
  } else if (entry.form() == Form::bucket) {
    const BucketShape& shape = counted_by(entry);
    CompactBucket compact = CompactBucket::of(shape);
    units = compact.unit.ceil(compact.debt(entry, now));
    period = period_at(drain_length(shape), now);
  } else {
    return false;
  }
  std::lock_guard counting(overflow_mutex);
  overflow.raise(table.short_id(entry), period.number, units, period.expiry, now);
  overflow_lasts(period.expiry);
  return true;
}

void Limiter::Impl::degrade(const CompiledRule& compiled, const Item& item, Nanos now,
                            RuleStatus& status) {
  deny_degraded(status);
  if (compiled.rule->on_failure == OnFailure::closed) return;
  Period period = period_of(compiled, item, now);
  std::uint64_t used = overflow_used(item, period, now);
  status.remaining = compiled.limit - std::min(compiled.limit, used);
  status.reset = used == 0 ? 0 : period.end - now;
  status.allowed = item.cost <= status.remaining;
  status.retry_after = status.allowed ? 0 : period.end - now;
}

void Limiter::Impl::deny_degraded(RuleStatus& status) {
  status.degraded = true;
  status.delay = 0;
  status.allowed = false;
  status.retry_after = kSecond;
}

void Limiter::Impl::make(Item& item, Nanos now) {
  if (item.entry != nullptr || item.cost == 0 || item.no_room) return;
  SeriesEntry fresh{};
  if (begin_with_overflow(item, now, fresh)) {
    item.entry = table.insert(item.id, item.compiled->number, item.made, fresh);
    if (item.entry == nullptr && make_room(now)) {
      item.entry = table.insert(item.id, item.compiled->number, item.made, fresh);
    }
  }
  item.no_room = item.entry == nullptr;
}

}  // namespace weir
