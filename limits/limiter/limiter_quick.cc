// Decisions the quick way: of series that are known and small. What is rare is a call away.

#include <weir/limits/limiter/limiter_impl.h>

#include <algorithm>
#include <array>

#include <weir/limits/algorithms/sync_thresholds.h>
#include <weir/limits/limiter/rule_status.h>

namespace weir {
namespace {

/// A credit takes at most this part of the units that are left.
constexpr std::uint64_t kCreditShare = 64;

/// The one rule that a request meets, if it has no matchers, and the text that it counts by.
struct SingleMatch {
  const CompiledRule* compiled = nullptr;
  const std::string_view* value = nullptr;
};

[[gnu::noinline]] SingleMatch single_match(const Program& program, const Request& request) {
  SingleMatch single;
  bool domain = false;
  if (!request.rule_filter.empty()) return {};
  for (const Prefilter& prefilter : program.prefilters) {
    if (!prefilter.same_domain) domain = internal::same_text(prefilter.domain, request.domain);
    if (!domain) continue;
    if (!prefilter.one_entry) return {};
    const std::string_view* value = request.find(prefilter.key);
    if (value == nullptr) continue;
    if (single.compiled != nullptr) return {};
    single = {prefilter.compiled, value};
  }
  return single;
}

[[gnu::always_inline]] inline bool has_one(const std::vector<RuleStatus>& statuses) {
  return !statuses.empty() && statuses.begin() + 1 == statuses.end();  // size() divides
}

[[gnu::noinline]] void make_one(std::vector<RuleStatus>& statuses) {
  statuses.resize(1);
}

[[gnu::noinline]] bool leave(std::span<Item> items, const Item* by_credit) {
  for (Item& item : items) {
    if (&item != by_credit) SeriesTable::unlock(*item.entry);
  }
  return false;
}

[[gnu::always_inline]] inline bool wants_credit(const SeriesEntry& entry, const Local& work) {
  return entry.last() != work.stripe && work.alone();
}

Item item_alone(const CompiledRule& compiled, const SeriesId& id, std::uint64_t cost,
                SeriesEntry& entry, Credit& credit, Nanos now) {
  Item item;
  item.compiled = &compiled;
  item.entry = &entry;
  item.credit = &credit;
  item.id = id;
  item.cost = cost;
  if (!compiled.bucket_cell) item.window = window_at(compiled, id, now);
  return item;
}

[[gnu::always_inline]] inline bool has_credit(const Credit& credit, const SeriesId& id,
                                              std::uint64_t cost, const Program& program,
                                              Nanos now) {
  return credit.id == id && now <= credit.until.load(std::memory_order_relaxed) &&
         credit.version == program.version && cost > 0 && credit.left() >= cost;
}

[[gnu::always_inline]] inline Verdict verdict_by(const Credit& credit, Nanos now) {
  Verdict verdict;
  verdict.allowed = true;
  verdict.remaining = credit.beyond + credit.left();
  verdict.reset = credit.reset_at - now;
  return verdict;
}

}  // namespace

void Limiter::Impl::check(const Request& request, Nanos given, Decision& out) {
  Local& work = local();
  work.program = rules.kept(work.stripe);
  // In one branch.
  bool plain =
      (request.id.size() | request.more.size() | static_cast<std::size_t>(request.kind)) == 0;
  if (work.single && work.program != nullptr && plain) [[likely]] {
    SingleMatch single = single_match(*work.program, request);
    if (single.compiled != nullptr && single.compiled->small) [[likely]] {
      const SeriesId id = id_of(*single.compiled, *single.value, work);
      if (decide_alone(*single.compiled, id, cost_of(*single.compiled, request), table.first(id),
                       table.credit(work.stripe, id), work, time.clamp(given, work.stripe), out))
          [[likely]] {
        return;
      }
    }
  }
  check_any(request, work, given, out);
}

bool Limiter::Impl::decide_alone(const Item& item, Local& work, Nanos now, Decision& out) {
  return item.compiled->small &&
         decide_alone(*item.compiled, item.id, item.cost, item.first, *item.credit, work, now, out);
}

inline bool Limiter::Impl::decide_alone(const CompiledRule& compiled, const SeriesId id,
                                        const std::uint64_t cost, SeriesEntry* first,
                                        Credit& credit, Local& work, Nanos now, Decision& out) {
  if (!has_one(out.statuses)) [[unlikely]]
    make_one(out.statuses);
  Verdict verdict;
  if (has_credit(credit, id, cost, *work.program, now) && credit.spend(cost)) {
    verdict = verdict_by(credit, now);
  } else {
    SeriesEntry* entry = table.find_and_lock(id, first);
    if (entry == nullptr) [[unlikely]]
      return false;
    if (entry->has(SeriesEntry::kCredits)) [[unlikely]]
      close_ended_credits(*entry, cost, now);
    if (compiled.bucket_cell) {
      Owed owed;
      if (!assess_bucket_alone(compiled, *entry, cost, now, owed, verdict)) [[unlikely]]
        return false;
      const bool consumes = verdict.allowed && cost > 0;
      if (consumes) [[likely]] {
        consume_compact(compiled, *entry, owed, cost, now);
        if (options.replicated) [[unlikely]]
          count_own(compiled, *entry, cost, verdict.remaining);
        if (wants_credit(*entry, work)) [[unlikely]] {
          open_credit(compiled, id, cost, *entry, credit, work, now, verdict);
        }
      }
      SeriesTable::unlock(*entry, work.stripe);
      finish_compact(compiled, owed, cost, consumes, verdict);
    } else {
      const WindowAt window = window_at(compiled, id, now);
      if (!assess_window_alone(compiled, *entry, cost, now, window, verdict)) [[unlikely]] {
        return false;
      }
      const bool consumes = verdict.allowed && cost > 0;
      if (consumes) [[likely]] {
        if (fits_in_window(*entry, cost, window.start) && !options.replicated) [[likely]] {
          entry->count[0] += static_cast<std::uint32_t>(cost);
        } else {
          consume_window_alone(compiled, id, cost, *entry, credit, now, verdict);
        }
        if (wants_credit(*entry, work)) [[unlikely]] {
          open_credit(compiled, id, cost, *entry, credit, work, now, verdict);
        }
      }
      SeriesTable::unlock(*entry, work.stripe);
      if (consumes) verdict.reset = reset_of_windows(window, verdict.reset, now);
    }
    if (verdict.allowed) [[likely]]
      verdict.remaining -= cost;
  }
  RuleStatus& status = *out.statuses.data();
  fill(status, compiled, 0, verdict);
  out.allowed = verdict.allowed || compiled.shadow;
  out.deciding = compiled.shadow ? -1 : 0;
  out.wants_commit = verdict.allowed && cost > 0 && compiled.commit;
  out.repeated = false;
  out.version = work.program->version;
  work.count(status);
  return true;
}

bool Limiter::Impl::decide_few(std::span<Item> items, Local& work, Nanos now, Decision& out) {
  Item* by_credit = nullptr;
  if (!lock_small(items, *work.program, now, by_credit)) return false;
  bool allowed = true;
  for (Item& item : items) {
    if (&item == by_credit) {
      item.verdict = verdict_by(*item.credit, now);
    } else if (!assess_small(item, now)) [[unlikely]] {
      return leave(items, by_credit);
    }
    allowed &= item.verdict.allowed || item.compiled->shadow;
  }
  // With this, if there is a credit, all of it happens.
  if (by_credit != nullptr && allowed && !by_credit->credit->spend(by_credit->cost)) {
    return leave(items, by_credit);
  }
  if (out.statuses.size() != items.size()) out.statuses.resize(items.size());
  RuleStatus* const statuses = out.statuses.data();
  RuleStatus* status = statuses;
  bool wants_commit = false;
  RuleStatus* deciding = nullptr;
  for (Item& item : items) {
    const CompiledRule& compiled = *item.compiled;
    Verdict verdict = item.verdict;
    bool consumes = allowed && verdict.allowed && item.cost > 0;
    if (&item != by_credit) {
      if (consumes) {
        consume_small(compiled, item, now);
        if (wants_credit(*item.entry, work)) [[unlikely]] {
          open_credit(compiled, item.id, item.cost, *item.entry, *item.credit, work, now, verdict);
        }
      }
      SeriesTable::unlock(*item.entry, work.stripe);
      if (compiled.bucket_cell) {
        finish_compact(compiled, item.owed, item.cost, consumes, verdict);
      } else if (consumes) {
        verdict.reset = reset_of_windows(item.window, verdict.reset, now);
      }
    }
    if (consumes) {
      verdict.remaining -= item.cost;
      wants_commit |= compiled.commit;
    }
    fill(*status, compiled, item.descriptor, verdict);
    if (!compiled.shadow && decides(*status, deciding, allowed)) deciding = status;
    work.count(*status);
    ++status;
  }
  out.allowed = allowed;
  out.deciding = deciding == nullptr ? -1 : static_cast<int>(deciding - statuses);
  out.wants_commit = wants_commit;
  out.repeated = false;
  out.version = work.program->version;
  return true;
}

inline bool Limiter::Impl::lock_small(std::span<Item> items, const Program& program, Nanos now,
                                      Item*& by_credit) {
  std::array<Item*, kScannedRules> order;
  std::size_t count = 0;
  if (items.empty() || items.size() > order.size()) return false;
  for (Item& item : items) {
    if (!item.compiled->small) return false;
    if (by_credit == nullptr && has_credit(*item.credit, item.id, item.cost, program, now)) {
      by_credit = &item;
      continue;
    }
    SeriesEntry* entry = table.find(item.id, item.first);
    if (entry == nullptr) return false;
    item.entry = entry;
    std::size_t at = count++;
    for (; at > 0 && entry < order[at - 1]->entry; --at) order[at] = order[at - 1];
    order[at] = &item;
  }
  for (std::size_t i = 0; i < count; ++i) {
    if (table.lock_with_credits(*order[i]->entry, order[i]->id)) [[likely]]
      continue;
    order[i]->entry = nullptr;
    while (i > 0) SeriesTable::unlock(*order[--i]->entry);
    return false;
  }
  return true;
}

inline bool Limiter::Impl::assess_small(Item& item, Nanos now) {
  const CompiledRule& compiled = *item.compiled;
  SeriesEntry& entry = *item.entry;
  if (entry.has(SeriesEntry::kCredits)) [[unlikely]]
    close_ended_credits(entry, item.cost, now);
  for (;;) {
    bool assessed = false;
    if (compiled.bucket_cell) {
      assessed = is_small_bucket(compiled, entry, item.cost, now);
      if (assessed) item.owed = assess_compact(compiled, entry, item.cost, now, item.verdict);
    } else {
      assessed = entry.form() == Form::window && entry.time <= item.window.start &&
                 assess_small_windows(compiled, entry, item.cost, now, item.window, item.verdict);
    }
    if ((assessed && item.verdict.allowed) || !entry.has(SeriesEntry::kCredits)) [[likely]]
      return assessed;
    table.close_credits(entry);
  }
}

inline void Limiter::Impl::consume_small(const CompiledRule& compiled, Item& item, Nanos now) {
  SeriesEntry& entry = *item.entry;
  if (compiled.bucket_cell) {
    consume_compact(compiled, entry, item.owed, item.cost, now);
    if (options.replicated) [[unlikely]]
      count_own(compiled, entry, item.cost, item.verdict.remaining);
  } else if (fits_in_window(entry, item.cost, item.window.start) && !options.replicated) {
    entry.count[0] += static_cast<std::uint32_t>(item.cost);
  } else {
    consume_window(compiled, item, now);
  }
}

inline bool Limiter::Impl::assess_bucket_alone(const CompiledRule& compiled, SeriesEntry& entry,
                                               std::uint64_t cost, Nanos now, Owed& owed,
                                               Verdict& verdict) {
  while (is_small_bucket(compiled, entry, cost, now)) [[likely]] {
      owed = assess_compact(compiled, entry, cost, now, verdict);
      if (verdict.allowed || !entry.has(SeriesEntry::kCredits)) [[likely]]
        return true;
      table.close_credits(entry);
    }
  SeriesTable::unlock(entry);
  return false;
}

inline bool Limiter::Impl::assess_window_alone(const CompiledRule& compiled, SeriesEntry& entry,
                                               std::uint64_t cost, Nanos now,
                                               const WindowAt& window, Verdict& verdict) {
  for (;;) {
    bool assessed = entry.form() == Form::window && entry.time <= window.start &&
                    assess_small_windows(compiled, entry, cost, now, window, verdict);
    if (assessed && verdict.allowed) [[likely]]
      return true;
    if (!entry.has(SeriesEntry::kCredits)) {
      if (!assessed) SeriesTable::unlock(entry);
      return assessed;
    }
    table.close_credits(entry);
  }
}

void Limiter::Impl::consume_window_alone(const CompiledRule& compiled, SeriesId id,
                                         std::uint64_t cost, SeriesEntry& entry, Credit& credit,
                                         Nanos now, Verdict before) {
  Item item = item_alone(compiled, id, cost, entry, credit, now);
  item.verdict = before;
  consume_window(compiled, item, now);
}

void Limiter::Impl::consume_window(const CompiledRule& compiled, Item& item, Nanos now) {
  if (!fits_in_window(*item.entry, item.cost, item.window.start)) table.close_credits(*item.entry);
  consume(compiled, item, now);
}

void Limiter::Impl::close_ended_credits(SeriesEntry& entry, std::uint64_t cost, Nanos now) {
  Credits::Open credits = table.open_credits(entry);
  if (cost == 0 || credits.units == 0 || credits.until < std::max(now, entry.time)) {
    table.close_credits(entry);
  }
}

void Limiter::Impl::open_credit(const CompiledRule& compiled, SeriesId id, std::uint64_t cost,
                                SeriesEntry& entry, Credit& credit, const Local& work, Nanos now,
                                Verdict before) {
  if (!Credits::is_hot(credit, id)) return;
  // What others are told of a bucket is when its units were consumed.
  if (compiled.bucket_cell && options.replicated) return;
  if (compiled.bucket.queue || !table.may_have_credits(entry)) return;
  if (entry.form() == Form::general) return;  // which it may have become just now
  const Item item = item_alone(compiled, id, cost, entry, credit, now);
  std::uint64_t block = Credits::kFirstBlock;
  if (credit.id == item.id) {
    bool quiet = credit.left() > credit.block / 2;
    if (credit.left() > 0) table.close_credits(entry);
    if (quiet) {
      credit.id = {};
      credit.score = 0;
      return;
    }
    block = std::min(2 * credit.block, Credits::kMaxBlock);
  } else if (credit.left() > 0) {
    return;  // another series'
  }
  std::uint64_t room = before.remaining - item.cost;
  // All credits together stay a small part of what is left.
  block = std::min(std::max(block, 8 * item.cost), room / kCreditShare);
  if (block < 4 * item.cost) return;
  Nanos until = now + Credits::kLifetime;
  std::uint64_t per_unit = 1;
  if (compiled.bucket_cell) {
    per_unit = compiled.compact.unit.value();
    std::uint64_t sure = entry.bucket.debt - table.open_credits(entry).units * per_unit;
    until = std::min(until, entry.time + compiled.compact.drain_time(sure) - 1);
    if (until < now + Credits::kMinLifetime) {
      credit.score = 0;  // it is no more than looked at now and then
      return;
    }
    entry.bucket.debt += block * per_unit;
    credit.reset_at = entry.time + compiled.compact.drain_time(entry.bucket.debt);
  } else {
    if (block > kMaxSmall - entry.count[0]) return;
    until = std::min(until, item.window.start + item.window.shape.sub - 1);
    std::uint64_t used = compiled.limit - std::min(compiled.limit, room);
    if (options.replicated &&
        crosses_sync_threshold(used, add_saturated(used, block), compiled.limit)) {
      entry.set(SeriesEntry::kUrgent);
    }
    entry.count[0] += static_cast<std::uint32_t>(block);
    credit.reset_at = now + reset_after(compiled, item, before.reset, now);
  }
  credit.id = item.id;
  credit.version = work.program->version;
  credit.beyond = room - block;
  credit.block = static_cast<std::uint32_t>(block);
  table.open_credit(entry, credit, credit.block, per_unit, until);
}

}  // namespace weir
