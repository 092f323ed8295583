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
  bool missing = false;
  std::unique_lock counting(overflow_mutex, std::defer_lock);
  for (Item& item : items) {
    const CompiledRule& compiled = *item.compiled;
    assess(compiled, item, now);
    item.degraded = false;
    if (compiled.escrow && stopped.load(std::memory_order_relaxed)) {
      deny_degraded(item);
    } else if (compiled.escrow) {
      count_demand(compiled, item, now);
    }
    if (item.verdict.allowed && item.cost > 0) {
      if (item.entry == nullptr && item.no_room) [[unlikely]] {
        if (!counting.owns_lock()) counting.lock();
        degrade(compiled, item, now);
      } else if (item.mode == Mode::no_ticket && compiled.rule->on_failure == OnFailure::closed)
          [[unlikely]] {
        deny_degraded(item);
      } else if (item.entry == nullptr) {
        missing = true;
      }
    }
    out.allowed &= item.verdict.allowed || compiled.shadow;
  }
  if (missing && out.allowed) {
    unlock_all(items);
    for (Item& item : items) make(item, now);
    return false;
  }
  out.wants_commit = false;
  out.repeated = false;
  out.statuses.resize(items.size());
  for (std::size_t i = 0; i < items.size(); ++i) {
    Item& item = items[i];
    const CompiledRule& compiled = *item.compiled;
    bool passes = out.allowed && item.verdict.allowed && item.cost > 0;
    if (passes && item.degraded) {
      count_in_overflow(compiled, item, now);
    } else if (passes) {
      Nanos before = item.verdict.reset;
      consume(compiled, item, now);
      out.wants_commit |= compiled.commit || item.waits;
      if (item.compact) {
        finish_compact(compiled, item.owed, item.cost, true, item.verdict);
      } else {
        item.verdict.reset = reset_after(compiled, item, before, now);
      }
      // It should have been held, and is counted at once.
      item.degraded = item.mode == Mode::no_ticket;
    }
    if (passes) item.verdict.remaining -= std::min(item.verdict.remaining, item.cost);
    fill(out.statuses[i], compiled, item.descriptor, item.verdict, item.degraded);
  }
  find_decider(out);
  unlock_all(items);
  return true;
}

Limiter::Impl::Period Limiter::Impl::period_of(const CompiledRule& compiled, const Item& item,
                                               Nanos now) {
  const WindowAt& window = item.window;
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
    begin_compact(compiled, entry, std::min(used, most), now);
    return true;
  }
  if (used > kMaxSmall) return false;
  entry.set_form(Form::window);
  entry.time = item.window.start;
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
    const Rule& rule = counted_by(entry).rule;
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
    const BucketShape& shape = counted_by(entry).bucket;
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

void Limiter::Impl::degrade(const CompiledRule& compiled, Item& item, Nanos now) {
  deny_degraded(item);
  if (compiled.rule->on_failure == OnFailure::closed) return;
  Period period = period_of(compiled, item, now);
  std::uint64_t used = overflow_used(item, period, now);
  Verdict& verdict = item.verdict;
  verdict.remaining = compiled.limit - std::min(compiled.limit, used);
  verdict.reset = used == 0 ? 0 : period.end - now;
  verdict.allowed = item.cost <= verdict.remaining;
  verdict.retry_after = verdict.allowed ? 0 : period.end - now;
}

void Limiter::Impl::count_in_overflow(const CompiledRule& compiled, const Item& item, Nanos now) {
  Period period = period_of(compiled, item, now);
  overflow.add(table.short_id(item.id), period.number, item.cost, period.expiry, now);
  overflow_lasts(period.expiry);
}

void Limiter::Impl::deny_degraded(Item& item) {
  item.degraded = true;
  item.verdict.delay = 0;
  item.verdict.allowed = false;
  item.verdict.retry_after = kSecond;
  item.verdict.exhausted_locally = false;
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
