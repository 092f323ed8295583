// Any decision; and what becomes of series for which the table has no room.

#include <weir/limits/limiter/limiter_impl.h>

#include <algorithm>
#include <utility>

#include <weir/limits/limiter/rule_status.h>

namespace weir {
namespace {

/// Full table: so many idle series give their places at once, found in at most so many looks.
constexpr std::size_t kMovedAtOnce = 16;
constexpr int kLooks = 4;

void deny_degraded(Item& item) {
  item.degraded = true;
  item.verdict.delay = 0;
  item.verdict.allowed = false;
  item.verdict.retry_after = kSecond;
  item.verdict.exhausted_locally = false;
}

}  // namespace

void Limiter::Impl::decide(Items& all, Local& work, Nanos now, Decision& out) {
  std::span<Item> items = all.all();
  for (bool again = false;; again = true) {
    for (Item& item : items) {
      if (item.entry == nullptr) item.entry = table.find(item.id, item.first);
    }
    if (!lock_all(items, work.locked)) continue;
    if (!all.warmed && cold(now) && lacks_counts(items)) [[unlikely]] {
      unlock_all(items);
      out = {};
      out.allowed = false;
      return;
    }
    if (all.kind == RequestKind::refund) [[unlikely]] {
      give_back(items, now, out);
      break;
    }
    if (!decide_locked(all, items, now, out)) continue;
    for (Item& item : items) {
      // One that was made may be gone again: others remove what nobody used.
      if (again && item.made && item.entry != nullptr) {
        table.remove_unused(*item.entry, item.id);
      }
    }
    break;
  }
  if (all.joined()) all.split_joined(out);
  out.version = work.program->version;
  if (all.kind == RequestKind::refund) return;
  for (const RuleStatus& status : out.statuses) work.count_any(status);
}

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

bool Limiter::Impl::lacks_counts(std::span<const Item> items) const {
  return std::any_of(items.begin(), items.end(), [](const Item& item) {
    const bool unused = item.entry == nullptr || item.entry->form() == Form::unused;
    return unused && !item.compiled->escrow && !item.compiled->log;
  });
}

void Limiter::Impl::assess_whole(const CompiledRule& compiled, Item& item, Nanos now) {
  assess(compiled, item, now);
  item.degraded = false;
  item.beyond = 0;
  if (compiled.escrow && escrow.stopped()) {
    deny_degraded(item);
  } else if (Nanos until = compiled.may_have_lost ? lost_until(compiled, item, now) : 0;
             until > now) [[unlikely]] {
    deny_degraded(item);
    item.verdict.remaining = 0;
    item.verdict.retry_after = until - now;
  } else if (compiled.escrow && escrow.shared() && !item.demand_counted) {
    Series* series = general_form(item.entry);
    escrow.count_demand(compiled, item.id, item.window, series, item.cost, item.verdict, now);
  }
}

bool Limiter::Impl::decide_locked(const Items& all, std::span<Item> items, Nanos now,
                                  Decision& out) {
  out.allowed = true;
  const bool report = all.kind == RequestKind::report;
  bool missing = false;
  bool beyond = report;                // of some rule units may count that may not pass
  std::optional<Overflow::Turn> turn;  // from the first verdict by the sketch until all is counted
  for (Item& item : items) {
    const CompiledRule& compiled = *item.compiled;
    assess_whole(compiled, item, now);
    beyond |= compiled.count_denied;
    if (item.verdict.allowed && item.cost > 0) {
      if (item.entry == nullptr && item.no_room) [[unlikely]] {
        degrade(compiled, item, now, turn);
      } else if (item.mode == Mode::no_ticket && compiled.rule->on_failure == OnFailure::closed)
          [[unlikely]] {
        deny_degraded(item);
      } else if (item.entry == nullptr) {
        missing = true;
      }
    }
    out.allowed &= item.verdict.allowed || compiled.shadow;
  }
  bool make_them = missing && out.allowed;
  if (beyond) [[unlikely]]
    make_them |= find_beyond(all, items, out, now);
  if (make_them) {
    turn.reset();  // make() asks the sketch, too
    unlock_all(items);
    for (Item& item : items) make(item, all.warmed, now);
    return false;
  }
  out.wants_commit = false;
  out.repeated = false;
  out.statuses.resize(items.size());
  for (std::size_t i = 0; i < items.size(); ++i) {
    Item& item = items[i];
    const CompiledRule& compiled = *item.compiled;
    bool passes = out.allowed && item.verdict.allowed && item.cost > 0 && !report;
    if (compiled.candidate != nullptr) [[unlikely]]
      try_candidate(*compiled.candidate, item, report, now);
    if (item.beyond > 0) [[unlikely]] {
      consume_beyond(compiled, item, report, now, turn);
      out.wants_commit |= out.allowed && (compiled.commit || item.waits);
      passes = false;
    } else if (passes && item.degraded) {
      turn->count(compiled, table.short_id(item.id), item.window, item.cost, now);
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

bool Limiter::Impl::find_beyond(const Items& all, std::span<Item> items, Decision& out, Nanos now) {
  const bool report = all.kind == RequestKind::report;
  if (report) out.allowed = true;
  // Others may have the rights that are missing: whoever asks them decides it anew.
  const bool elsewhere = !out.allowed && std::any_of(items.begin(), items.end(), [](const Item& i) {
    return i.verdict.exhausted_locally;
  });
  bool missing = false;
  for (Item& item : items) {
    const bool denied = !out.allowed || !item.verdict.allowed;
    const bool counts = report || (item.compiled->count_denied && denied && !elsewhere);
    if (counts && item.cost > 0) item.beyond = units_beyond(*item.compiled, item, report, now);
    if (report) {
      item.verdict.allowed = true;
      item.verdict.retry_after = item.verdict.delay = 0;
      item.verdict.exhausted_locally = false;
    }
    missing |= item.beyond > 0 && item.entry == nullptr && !item.no_room;
  }
  return missing;
}

std::uint64_t Limiter::Impl::units_beyond(const CompiledRule& compiled, const Item& item,
                                          bool report, Nanos now) {
  const std::uint64_t most = std::min(item.cost, compiled.limit);
  // The sketch counts keys together: what is beyond its limit would be others'.
  const std::uint64_t fits = std::min(item.cost, item.verdict.remaining);
  if (item.degraded) {
    const bool sketch = item.no_room && compiled.rule->on_failure == OnFailure::open;
    return sketch ? fits : 0;
  }
  if (item.no_room) return 0;
  // It was another rule that denied.
  if (!report && item.verdict.allowed) return item.cost;
  // A log remembers no more than its limit, and nobody spends rights that it has not.
  if (compiled.escrow || (compiled.log && !compiled.first_hit)) return fits;
  if (compiled.bucket_cell) {
    const BucketShape& shape = compiled.bucket;
    crdt::DebtTicks cap = shape.cap();
    if (!report) {
      // Then it passes after a window.
      const std::uint64_t later = add_saturated(shape.burst - most, compiled.rule->limit);
      cap = std::min(cap, shape.ticks(later));
    }
    const crdt::DebtTicks debt = debt_of(compiled, item, now);
    const crdt::DebtTicks room =
        (cap - std::min(cap, debt)) / static_cast<std::uint64_t>(shape.unit);
    return room < most ? static_cast<std::uint64_t>(room) : most;
  }
  if (report) return most;
  if (compiled.first_hit) return fits;
  const std::uint64_t counted = counted_in(item);
  return std::min(item.cost, compiled.limit - std::min(compiled.limit, counted));
}

void Limiter::Impl::consume_beyond(const CompiledRule& compiled, Item& item, bool report, Nanos now,
                                   std::optional<Overflow::Turn>& turn) {
  if (item.degraded) {
    turn->count(compiled, table.short_id(item.id), item.window, item.beyond, now);
    item.verdict.remaining -= std::min(item.verdict.remaining, item.beyond);
    return;
  }
  const std::uint64_t cost = std::exchange(item.cost, item.beyond);
  item.mode = Mode::consume;
  consume(compiled, item, now);
  item.cost = cost;
  item.compact = false;
  const bool passes = item.verdict.allowed;
  const Nanos delay = item.verdict.delay;
  item.verdict = evaluate(compiled, item, passes ? 0 : cost, now);
  if (!passes) return;
  item.verdict.allowed = true;
  item.verdict.retry_after = 0;
  item.verdict.delay = report ? 0 : delay;
}

void Limiter::Impl::try_candidate(const CompiledCandidate& candidate, const Item& item, bool report,
                                  Nanos now) {
  if (report || item.cost == 0) return;
  if (evaluate(candidate.compiled, item, item.cost, now).allowed) return;
  candidate.denied.fetch_add(1, std::memory_order_relaxed);
}

bool Limiter::Impl::make_room(std::uint32_t number, Nanos now) {
  if (options.replicated) return false;
  std::size_t moved = 0;
  auto gives_way = [&](SeriesEntry& entry) {
    // Somebody is about to use an unused one.
    if (entry.form() == Form::unused) return false;
    if (is_over(entry, now - kGrace)) return true;
    const std::uint32_t its = table.rule(entry);
    const bool may_go = its == number || table.shares().beyond(its);
    if (!may_go || moved == kMovedAtOnce || !move_out(entry, now)) return false;
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
  if (entry.form() == Form::general) return false;
  overflow.move_out(entry, table.short_id(entry), counted_by(entry), now);
  return true;
}

void Limiter::Impl::degrade(const CompiledRule& compiled, Item& item, Nanos now,
                            std::optional<Overflow::Turn>& turn) {
  deny_degraded(item);
  if (compiled.rule->on_failure == OnFailure::closed) return;
  if (!turn) turn.emplace(overflow);
  item.verdict = turn->evaluate(compiled, table.short_id(item.id), item.window, item.cost, now);
}

void Limiter::Impl::make(Item& item, bool warmed, Nanos now) {
  if (item.entry != nullptr || item.cost == 0 || item.no_room) return;
  // warm() has made what there was room for, with what the replica has of it.
  if (warmed && cold(now)) {
    item.no_room = !item.compiled->escrow && !item.compiled->log;
    if (item.no_room) return;
  }
  const CompiledRule& compiled = *item.compiled;
  SeriesEntry fresh{};
  std::uint64_t used = overflow.used(compiled, table.short_id(item.id), item.window, now);
  if (used == 0 || (!options.replicated && begin_small(compiled, fresh, item.window, used, now))) {
    item.entry = table.insert(item.id, compiled.number, item.made, fresh);
    if (item.entry == nullptr && make_room(compiled.number, now)) {
      item.entry = table.insert(item.id, compiled.number, item.made, fresh);
    }
  }
  item.no_room = item.entry == nullptr;
}

void Limiter::Impl::share_out(const Program& program) {
  const std::uint64_t all = options.max_series;
  // What a rule says, and one series where it has no more: the others have equal parts of half of
  // what is left. The other half is for whoever comes first.
  const auto says = [](const Rule& rule) -> std::uint64_t {
    return rule.series == 0 && rule.key.empty() ? 1 : rule.series;
  };
  Uint128 said = 0;
  std::uint64_t silent = 0;
  for (const CompiledRule& compiled : program.compiled_rules) {
    if (compiled.rule->unlimited) continue;
    said += says(*compiled.rule);
    silent += says(*compiled.rule) == 0;
  }
  const std::uint64_t left = said < all ? all - static_cast<std::uint64_t>(said) : 0;
  const std::uint64_t fair = silent == 0 ? 0 : left / 2 / silent;
  std::vector<SeriesShares::Part> parts;
  for (const CompiledRule& compiled : program.compiled_rules) {
    std::uint64_t part = says(*compiled.rule);
    if (compiled.rule->unlimited) {
      part = 0;
    } else if (part == 0) {
      part = fair;
    } else if (said > all) {
      part = static_cast<std::uint64_t>(static_cast<Uint128>(part) * all / said);
    }
    parts.push_back({compiled.number, program.identities[compiled.index], part});
  }
  table.shares().set(parts);
}

}  // namespace weir
