#include <weir/limits/limiter.h>

#include <weir/limits/limiter/limiter_impl.h>

#include <weir/limits/algorithms/sync_thresholds.h>

namespace weir {

SeriesId Limiter::Impl::identity_of(const Rule& rule) const {
  return hash_with(internal::KeyedHash(options.hash_key), identity(rule));
}

std::unique_ptr<const Program> Limiter::Impl::make_program(std::shared_ptr<const RuleSet> rules,
                                                           std::uint64_t version) {
  auto program = std::make_unique<Program>();
  program->version = version;
  program->rules = std::move(rules);
  for (const Rule& rule : program->rules->rules()) {
    SeriesId id = identity_of(rule);
    program->by_identity.emplace(id, static_cast<std::uint32_t>(program->compiled_rules.size()));
    CompiledRule compiled = compile(rule, numbers.number_of(id, rule), id);
    compiled.index = static_cast<std::uint32_t>(program->compiled_rules.size());
    compiled.commit = compiled.commit && options.replicated;
    if (compiled.escrow) {
      compiled.name = hash_with(internal::KeyedHash(options.hash_key), "name of " + identity(rule));
      program->escrow.emplace(compiled.name,
                              static_cast<std::uint32_t>(program->compiled_rules.size()));
    }
    program->compiled_rules.push_back(compiled);
  }
  for (auto& stripe : program->counters) {
    stripe = std::make_unique<AtomicCounters[]>(program->compiled_rules.size());
  }
  if (program->compiled_rules.size() <= kScannedRules)
    program->prefilters = prefilters_of(program->compiled_rules);
  versions.push_back(program->rules);
  if (versions.size() > kVersionsKept) versions.erase(versions.begin());
  return program;
}

void Limiter::Impl::reload(std::shared_ptr<const RuleSet> rules) {
  std::lock_guard lock(reload_mutex);
  programs.replace(make_program(std::move(rules), programs.current().version + 1));
  forget_programs();
  if (numbers.size() < 2 * programs.current().compiled_rules.size() + kManyNumbers) return;
  std::vector<bool> used = used_numbers();
  table.visit_all([&](SeriesEntry& entry) {
    note_number(entry, used);
    return false;
  });
  forget_numbers(used);
}

void Limiter::Impl::forget_programs() {
  programs.reclaim([&](const Program& gone) {
    for (const auto& [id, rule] : gone.by_identity) {
      RuleCounters& sum = past[id];
      RuleCounters more = gone.count(rule);
      sum.allowed += more.allowed;
      sum.denied += more.denied;
      sum.degraded += more.degraded;
      sum.exhausted_locally += more.exhausted_locally;
    }
  });
}

std::vector<bool> Limiter::Impl::used_numbers() const {
  std::vector<bool> used(numbers.end());
  programs.for_each([&](const Program& program) {
    for (const CompiledRule& compiled : program.compiled_rules) used[compiled.number] = true;
  });
  return used;
}

void Limiter::Impl::note_number(const SeriesEntry& entry, std::vector<bool>& used) const {
  std::uint32_t number = table.rule(entry);
  if (number != SeriesTable::kNoRule) used[number] = true;
}

void Limiter::Impl::forget_numbers(const std::vector<bool>& used) {
  numbers.keep_only(used);
  std::erase_if(past, [&](const auto& one) { return !numbers.knows(one.first); });
}

RuleCounters Limiter::Impl::counters(std::uint32_t rule) {
  std::lock_guard lock(reload_mutex);
  RuleCounters sum;
  if (rule >= programs.current().compiled_rules.size()) return sum;
  SeriesId id = identity_of(*programs.current().compiled_rules[rule].rule);
  if (auto before = past.find(id); before != past.end()) sum = before->second;
  programs.for_each([&](const Program& program) {
    auto found = program.by_identity.find(id);
    if (found == program.by_identity.end()) return;
    RuleCounters more = program.count(found->second);
    sum.allowed += more.allowed;
    sum.denied += more.denied;
    sum.degraded += more.degraded;
    sum.exhausted_locally += more.exhausted_locally;
  });
  return sum;
}

std::shared_ptr<const RuleSet> Limiter::Impl::rules_of(std::uint64_t version) {
  std::lock_guard lock(reload_mutex);
  std::uint64_t behind = programs.current().version - version;
  return behind < versions.size() ? versions[versions.size() - 1 - behind] : nullptr;
}

void Limiter::Impl::translate(const Program& program, const RuleSet& told_by, Decision& out) const {
  out.deciding = -1;
  out.version = program.version;
  std::erase_if(out.statuses, [&](RuleStatus& status) {
    auto found = program.by_identity.find(identity_of(told_by.rules()[status.rule]));
    if (found == program.by_identity.end()) return true;
    status.rule = found->second;
    return false;
  });
  std::sort(out.statuses.begin(), out.statuses.end(), [](const RuleStatus& a, const RuleStatus& b) {
    return std::pair(a.descriptor, a.rule) < std::pair(b.descriptor, b.rule);
  });
  for (std::size_t i = 0; i < out.statuses.size(); ++i) {
    if (!out.statuses[i].shadow) pick_decider(out, static_cast<int>(i));
  }
}

SeriesId Limiter::Impl::series_of(const CompiledRule& compiled, const Request& request,
                                  std::string& key) const {
  const std::vector<std::string>& names = compiled.rule->key;
  if (names.size() == 1) {
    const std::string_view* value = request.find(names[0]);
    return hash_with(compiled.hash_key, value == nullptr ? std::string_view{} : *value);
  }
  key.clear();
  for (const std::string& name : names) {
    const std::string_view* value = request.find(name);
    append_text(key, value == nullptr ? std::string_view{} : *value);
  }
  return hash_with(compiled.hash_key, key);
}

void Limiter::Impl::prepare(const Request& request, Nanos now, Local& work, Items& items) {
  items.clear();
  if (request.more.empty()) [[likely]] {
    prepare_one(request, now, work, items);
  } else {
    prepare_several(request, now, work, items);
  }
}

void Limiter::Impl::prepare_several(const Request& request, Nanos now, Local& work, Items& items) {
  constexpr std::size_t kLast = std::numeric_limits<std::uint16_t>::max();
  for (std::size_t i = 0; i < request.descriptors(); ++i) {
    std::size_t first = items.size();
    prepare_one(request.part(i), now, work, items);
    for (Item& item : items.all().subspan(first)) {
      item.descriptor = static_cast<std::uint16_t>(std::min(i, kLast));
    }
  }
  items.join_series();
}

void Limiter::Impl::prepare_one(const Request& request, Nanos now, Local& work, Items& items) {
  const Program& program = *work.program;
  if (program.prefilters.empty() || !request.rule_filter.empty()) {
    prepare_by_index(request, now, work, items);
    return;
  }
  bool domain = false;
  for (const Prefilter& prefilter : program.prefilters) {
    if (!prefilter.same_domain) domain = internal::same_text(prefilter.domain, request.domain);
    if (!domain) continue;
    const CompiledRule& compiled = *prefilter.compiled;
    if (prefilter.one_entry) {
      const std::string_view* value = request.find(prefilter.key);
      if (value != nullptr) add(compiled, id_of(compiled, *value, work), request, now, work, items);
    } else if (compiled.rule->matches(request)) {
      add_any(compiled, request, now, work, items);
    }
  }
}

void Limiter::Impl::prepare_by_index(const Request& request, Nanos now, Local& work, Items& items) {
  work.matched.clear();
  work.program->rules->match(request, work.matched);
  for (std::uint32_t index : work.matched) {
    add_any(work.program->compiled_rules[index], request, now, work, items);
  }
}

void Limiter::Impl::add_any(const CompiledRule& compiled, const Request& request, Nanos now,
                            Local& work, Items& items) {
  add(compiled, series_of(compiled, request, work.key), request, now, work, items);
}

inline void Limiter::Impl::add(const CompiledRule& compiled, const SeriesId& known,
                               const Request& request, Nanos now, const Local& work, Items& items) {
  const SeriesId id = known;
  Item& item = items.next();
  item.first = table.first(id);
  // A thread with a credit leaves the entry's cache line to others.
  item.credit = &table.credit(work.stripe, id);
  if (item.credit->id != id) __builtin_prefetch(item.first, 1);
  item.compiled = &compiled;
  item.rule = compiled.index;
  item.id = id;
  // No small form spares looking at the rule, see consume().
  if (compiled.bucket_cell && options.replicated) table.prefetch_rule(*item.first);
  item.cost = cost_of(compiled, request);
  item.demand_counted = request.demand_counted;
  if (!compiled.bucket_cell && !compiled.log) find_window(compiled, item, now);
}

void Limiter::Impl::check(const Request& request, Nanos given, Decision& out) {
  Local& work = local();
  work.program = programs.kept(work.stripe);
  bool plain = (request.id.size() | request.more.size()) == 0;  // in one branch
  if (work.single && work.program != nullptr && plain) [[likely]] {
    SingleMatch single = single_match(*work.program, request);
    if (single.compiled != nullptr && single.compiled->small) [[likely]] {
      const SeriesId id = id_of(*single.compiled, *single.value, work);
      if (decide_alone(*single.compiled, id, cost_of(*single.compiled, request), table.first(id),
                       table.credit(work.stripe, id), work, clamp(given, work.stripe), out))
          [[likely]] {
        return;
      }
    }
  }
  check_any(request, work, given, out);
}

void Limiter::Impl::check_any(const Request& request, Local& work, Nanos given, Decision& out) {
  Programs::Use program = use(work);
  work.program = &*program;
  Nanos now = clamp(given, work.stripe);
  Items& items = work.items[0];
  prepare(request, now, work, items);
  if (request.more.empty()) work.single = items.size() == 1;
  decide_prepared(request, items, work, now, out);
}

Limiter::Impl::SingleMatch Limiter::Impl::single_match(const Program& program,
                                                       const Request& request) {
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

void Limiter::Impl::decide_prepared(const Request& request, Items& items, Local& work, Nanos now,
                                    Decision& out) {
  // The quick way for one item knows no descriptor but the first.
  if (request.id.empty()) {
    std::span<Item> all = items.all();
    bool decided = all.size() == 1 && request.more.empty() ? decide_alone(all[0], work, now, out)
                                                           : decide_few(all, work, now, out);
    if (decided && items.joined()) [[unlikely]]
      tell_joined(items, work, out);
    if (decided) return;
  }
  decide_once(request, items, work, now, out);
}

void Limiter::Impl::tell_joined(const Items& items, Local& work, Decision& out) {
  items.tell_joined(out);
  for (std::size_t i = 0; i < out.statuses.size(); ++i) {
    if (items.tells_again(i)) count(out.statuses[i], work);
  }
}

void Limiter::Impl::check(std::span<const Request> requests, Nanos given, std::span<Decision> out) {
  Local& work = local();
  Programs::Use program = use(work);
  work.program = &*program;
  Nanos now = clamp(given, work.stripe);
  for (std::size_t i = 0; i < requests.size() + kAhead; ++i) {
    Items& items = work.items[i % kAhead];
    if (i >= kAhead && i - kAhead < requests.size()) {
      decide_prepared(requests[i - kAhead], items, work, now, out[i - kAhead]);
    }
    if (i < requests.size()) prepare(requests[i], now, work, items);
  }
}

void Limiter::Impl::decide_once(const Request& request, Items& items, Local& work, Nanos now,
                                Decision& out) {
  if (request.id.empty()) {
    decide(items, work, now, out);
  } else {
    by_id(request, items, *work.program, now, out, [&] {
      decide(items, work, now, out);
      return Ticket{};
    });
  }
}

void Limiter::Impl::decide(Items& all, Local& work, Nanos now, Decision& out) {
  std::span<Item> items = all.all();
  for (bool again = false;; again = true) {
    for (Item& item : items) {
      if (item.entry == nullptr) item.entry = table.find(item.id, item.first);
    }
    if (!lock_all(items, work.locked) || !decide_locked(items, now, out)) continue;
    for (Item& item : items) {
      // One that was made may be gone again: others remove what nobody used.
      if (again && item.made && item.entry != nullptr) {
        table.remove_unused(*item.entry, item.id);
      }
    }
    break;
  }
  if (all.joined()) all.tell_joined(out);
  out.version = work.program->version;
  for (const RuleStatus& status : out.statuses) count_any(status, work);
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
  RuleStatus& status = *out.statuses.data();
  status.limit = compiled.limit;
  bool consumes = true;
  if (has_credit(credit, id, cost, *work.program, now) && credit.spend(cost)) {
    tell_of_credit(credit, now, status);
  } else {
    SeriesEntry* entry = table.find_and_lock(id, first);
    if (entry == nullptr) [[unlikely]]
      return false;
    if (entry->has(SeriesEntry::kCredits)) [[unlikely]]
      close_ended_credits(*entry, cost, now);
    if (compiled.bucket_cell) {
      Owed owed;
      if (!assess_bucket_alone(compiled, *entry, cost, now, owed, status)) [[unlikely]]
        return false;
      consumes = status.allowed && cost > 0;
      if (consumes) [[likely]] {
        consume_compact(compiled, *entry, owed, cost, now);
        if (wants_credit(*entry, work)) [[unlikely]] {
          open_credit(compiled, id, cost, *entry, credit, work, now, status);
        }
      }
      SeriesTable::unlock(*entry, work.stripe);
      finish(compiled, owed, cost, consumes, status);
    } else {
      WindowShape shape;
      std::int64_t index = 0;
      Nanos start = 0;
      find_window(compiled, id, now, shape, index, start);
      if (!assess_window_alone(compiled, *entry, cost, now, shape, start, status)) [[unlikely]] {
        return false;
      }
      consumes = status.allowed && cost > 0;
      if (consumes) [[likely]] {
        if (fits_in_window(*entry, cost, start) && !options.replicated) [[likely]] {
          entry->count[0] += static_cast<std::uint32_t>(cost);
        } else {
          consume_window_alone(compiled, id, cost, *entry, credit, now, status);
        }
        if (wants_credit(*entry, work)) [[unlikely]] {
          open_credit(compiled, id, cost, *entry, credit, work, now, status);
        }
      }
      SeriesTable::unlock(*entry, work.stripe);
      if (consumes) status.reset = reset_of_windows(shape, start, status, now);
    }
    if (consumes) [[likely]]
      status.remaining -= cost;
  }
  status.rule = compiled.index;
  status.descriptor = 0;
  status.shadow = compiled.shadow;
  status.degraded = status.exhausted_locally = false;
  out.allowed = status.allowed || compiled.shadow;
  out.deciding = compiled.shadow ? -1 : 0;
  out.wants_commit = consumes && compiled.commit;
  out.repeated = false;
  out.version = work.program->version;
  count(status, work);
  return true;
}

bool Limiter::Impl::decide_few(std::span<Item> items, Local& work, Nanos now, Decision& out) {
  Item* by_credit = nullptr;
  if (!lock_small(items, *work.program, now, by_credit)) return false;
  if (out.statuses.size() != items.size()) out.statuses.resize(items.size());
  RuleStatus* const statuses = out.statuses.data();
  RuleStatus* status = statuses;
  bool allowed = true;
  for (Item& item : items) {
    status->limit = item.compiled->limit;
    if (&item == by_credit) {
      tell_of_credit(*item.credit, now, *status);
    } else if (!assess_small(item, now, *status)) [[unlikely]] {
      return leave(items, by_credit);
    }
    allowed &= status->allowed || item.compiled->shadow;
    ++status;
  }
  // With this, if there is a credit, all of it happens.
  if (by_credit != nullptr && allowed && !by_credit->credit->spend(by_credit->cost)) {
    return leave(items, by_credit);
  }
  bool wants_commit = false;
  RuleStatus* deciding = nullptr;
  status = statuses;
  for (Item& item : items) {
    const CompiledRule& compiled = *item.compiled;
    bool consumes = allowed && status->allowed && item.cost > 0;
    if (&item != by_credit) {
      if (consumes) {
        consume_small(compiled, item, now, *status);
        if (wants_credit(*item.entry, work)) [[unlikely]] {
          open_credit(compiled, item.id, item.cost, *item.entry, *item.credit, work, now, *status);
        }
      }
      SeriesTable::unlock(*item.entry, work.stripe);
      if (compiled.bucket_cell) {
        finish(compiled, item.owed, item.cost, consumes, *status);
      } else if (consumes) {
        status->reset = reset_of_windows(item.shape, item.start, *status, now);
      }
    }
    if (consumes) {
      status->remaining -= item.cost;
      wants_commit |= compiled.commit;
    }
    status->rule = item.rule;
    status->descriptor = item.descriptor;
    status->shadow = compiled.shadow;
    status->degraded = status->exhausted_locally = false;
    if (!compiled.shadow && decides(*status, deciding, allowed)) deciding = status;
    count(*status, work);
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

bool Limiter::Impl::leave(std::span<Item> items, const Item* by_credit) {
  for (Item& item : items) {
    if (&item != by_credit) SeriesTable::unlock(*item.entry);
  }
  return false;
}

inline bool Limiter::Impl::assess_small(Item& item, Nanos now, RuleStatus& status) {
  const CompiledRule& compiled = *item.compiled;
  SeriesEntry& entry = *item.entry;
  auto assess = [&] {
    if (compiled.bucket_cell) {
      if (!is_compact(compiled, entry)) return false;
      item.owed = assess_compact(compiled, entry, item.cost, now, status);
      return true;
    }
    return entry.form() == Form::window && entry.time <= item.start &&
           assess_small_windows(compiled, entry, item.cost, now, item.shape, item.start, status);
  };
  if (!entry.has(SeriesEntry::kCredits)) [[likely]]
    return assess();
  close_ended_credits(entry, item.cost, now);
  if (assess() && status.allowed) return true;
  table.close_credits(entry);
  return assess();
}

inline void Limiter::Impl::consume_small(const CompiledRule& compiled, Item& item, Nanos now,
                                         const RuleStatus& status) {
  SeriesEntry& entry = *item.entry;
  if (compiled.bucket_cell) {
    consume_compact(compiled, entry, item.owed, item.cost, now);
  } else if (fits_in_window(entry, item.cost, item.start) && !options.replicated) {
    entry.count[0] += static_cast<std::uint32_t>(item.cost);
  } else {
    consume_window(compiled, item, now, status);
  }
}

inline bool Limiter::Impl::has_one(const std::vector<RuleStatus>& statuses) {
  return !statuses.empty() && statuses.begin() + 1 == statuses.end();  // size() divides
}

void Limiter::Impl::make_one(std::vector<RuleStatus>& statuses) {
  statuses.resize(1);
}

inline bool Limiter::Impl::assess_bucket_alone(const CompiledRule& compiled, SeriesEntry& entry,
                                               std::uint64_t cost, Nanos now, Owed& owed,
                                               RuleStatus& status) {
  if (is_compact(compiled, entry)) [[likely]] {
    owed = assess_compact(compiled, entry, cost, now, status);
    if (status.allowed || !entry.has(SeriesEntry::kCredits)) [[likely]]
      return true;
    table.close_credits(entry);
    owed = assess_compact(compiled, entry, cost, now, status);
    return true;
  }
  SeriesTable::unlock(entry);
  return false;
}

inline bool Limiter::Impl::assess_window_alone(const CompiledRule& compiled, SeriesEntry& entry,
                                               std::uint64_t cost, Nanos now,
                                               const WindowShape& shape, Nanos start,
                                               RuleStatus& status) {
  auto assess = [&] {
    return entry.form() == Form::window && entry.time <= start &&
           assess_small_windows(compiled, entry, cost, now, shape, start, status);
  };
  bool assessed = assess();
  if ((!assessed || !status.allowed) && entry.has(SeriesEntry::kCredits)) [[unlikely]] {
    table.close_credits(entry);
    assessed = assess();
  }
  if (!assessed) [[unlikely]]
    SeriesTable::unlock(entry);
  return assessed;
}

inline bool Limiter::Impl::wants_credit(const SeriesEntry& entry, const Local& work) {
  return entry.last() != work.stripe && work.alone();
}

void Limiter::Impl::consume_window_alone(const CompiledRule& compiled, SeriesId id,
                                         std::uint64_t cost, SeriesEntry& entry, Credit& credit,
                                         Nanos now, const RuleStatus& status) {
  Item item = item_alone(compiled, id, cost, entry, credit, now);
  consume_window(compiled, item, now, status);
}

inline bool Limiter::Impl::fits_in_window(const SeriesEntry& entry, std::uint64_t cost,
                                          Nanos start) {
  return entry.time == start && cost <= kMaxSmall - entry.count[0];
}

void Limiter::Impl::consume_window(const CompiledRule& compiled, Item& item, Nanos now,
                                   const RuleStatus& status) {
  if (!fits_in_window(*item.entry, item.cost, item.start)) table.close_credits(*item.entry);
  consume(compiled, item, now, status);
}

Item Limiter::Impl::item_alone(const CompiledRule& compiled, const SeriesId& id, std::uint64_t cost,
                               SeriesEntry& entry, Credit& credit, Nanos now) {
  Item item;
  item.compiled = &compiled;
  item.rule = compiled.index;
  item.entry = &entry;
  item.credit = &credit;
  item.id = id;
  item.cost = cost;
  if (!compiled.bucket_cell) find_window(compiled, item, now);
  return item;
}

inline bool Limiter::Impl::has_credit(const Credit& credit, const SeriesId& id, std::uint64_t cost,
                                      const Program& program, Nanos now) {
  return credit.id == id && now <= credit.until.load(std::memory_order_relaxed) &&
         credit.version == program.version && cost > 0 && credit.left() >= cost;
}

inline void Limiter::Impl::tell_of_credit(const Credit& credit, Nanos now, RuleStatus& status) {
  status.allowed = true;
  status.remaining = credit.beyond + credit.left();
  status.reset = credit.reset_at - now;
  status.retry_after = status.delay = 0;
}

void Limiter::Impl::close_ended_credits(SeriesEntry& entry, std::uint64_t cost, Nanos now) {
  Credits::Open credits = table.open_credits(entry);
  if (cost == 0 || credits.units == 0 || credits.until < std::max(now, entry.time)) {
    table.close_credits(entry);
  }
}

void Limiter::Impl::open_credit(const CompiledRule& compiled, SeriesId id, std::uint64_t cost,
                                SeriesEntry& entry, Credit& credit, const Local& work, Nanos now,
                                const RuleStatus& status) {
  if (!Credits::is_hot(credit, id)) return;
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
  std::uint64_t room = status.remaining - item.cost;
  // All credits together stay a small part of what is left.
  block = std::min(std::max(block, 8 * item.cost), room / kCreditShare);
  if (block < 4 * item.cost) return;
  Nanos until = now + Credits::kLifetime;
  std::uint64_t per_unit = 1;
  if (compiled.bucket_cell) {
    per_unit = compiled.compact.unit.value();
    std::uint64_t sure = entry.word[0] - table.open_credits(entry).units * per_unit;
    until = std::min(until, entry.time + compiled.compact.drain_time(sure) - 1);
    if (until < now + Credits::kMinLifetime) {
      credit.score = 0;  // it is no more than looked at now and then
      return;
    }
    entry.word[0] += block * per_unit;
    credit.reset_at = entry.time + compiled.compact.drain_time(entry.word[0]);
  } else {
    if (block > kMaxSmall - entry.count[0]) return;
    until = std::min(until, item.start + item.shape.sub - 1);
    std::uint64_t used = compiled.limit - std::min(compiled.limit, room);
    if (options.replicated &&
        crosses_sync_threshold(used, add_saturated(used, block), compiled.limit)) {
      entry.set(SeriesEntry::kUrgent);
    }
    entry.count[0] += static_cast<std::uint32_t>(block);
    credit.reset_at = now + reset_after(compiled, item, status, now);
  }
  credit.id = item.id;
  credit.version = work.program->version;
  credit.beyond = room - block;
  credit.block = static_cast<std::uint32_t>(block);
  table.open_credit(entry, credit, credit.block, per_unit, until);
}

Limiter::Limiter(std::shared_ptr<const RuleSet> rules, LimiterOptions options)
    : impl_(std::make_unique<Impl>(std::move(rules), options)) {}

Limiter::~Limiter() = default;

void Limiter::check(const Request& request, Nanos now, Decision& out) {
  impl_->check(request, now, out);
}

void Limiter::check(std::span<const Request> requests, Nanos now, std::span<Decision> out) {
  impl_->check(requests, now, out);
}

Decision Limiter::check(const Request& request, Nanos now) {
  Decision decision;
  impl_->check(request, now, decision);
  return decision;
}

Ticket Limiter::reserve(const Request& request, Nanos now, Nanos timeout, Decision& out) {
  return impl_->reserve(request, now, timeout, out);
}

Settled Limiter::settle(Ticket ticket, std::uint64_t actual, Nanos now) {
  return settle(ticket, {&actual, 1}, now);
}

Settled Limiter::settle(Ticket ticket, std::span<const std::uint64_t> actual, Nanos now) {
  std::optional<OpenTicket> open = impl_->tickets.take(ticket.number);
  if (!open) return {};
  return impl_->settle_ticket(*open, actual, impl_->clamp(now, local().stripe));
}

std::size_t Limiter::settle_due(Nanos now, std::size_t max) {
  return impl_->settle_due(impl_->clamp(now, local().stripe), max);
}

void Limiter::settle_all(Nanos now) {
  impl_->settle_all(impl_->clamp(now, local().stripe));
}

void Limiter::forget_id(std::string_view domain, std::string_view id) {
  impl_->ids.forget(domain, id);
}

RequestIdCounters Limiter::request_ids() const {
  return {impl_->ids.size(), impl_->ids.repeated(), impl_->ids.evicted()};
}

TicketCounters Limiter::tickets() const {
  return {impl_->tickets.size(), impl_->options.max_tickets,
          impl_->timed_out.load(std::memory_order_relaxed), impl_->tickets.refused()};
}

void Limiter::reload(std::shared_ptr<const RuleSet> rules) {
  impl_->reload(std::move(rules));
}

std::shared_ptr<const RuleSet> Limiter::rules() const {
  std::lock_guard lock(impl_->reload_mutex);
  return impl_->programs.current().rules;
}

std::shared_ptr<const RuleSet> Limiter::rules(std::uint64_t version) const {
  return impl_->rules_of(version);
}

crdt::SeriesId Limiter::series_of(std::uint32_t rule, const Request& request) const {
  Impl::Programs::Use program = impl_->use(local());
  std::string key;
  if (rule >= program->compiled_rules.size()) return {};
  return impl_->series_of(program->compiled_rules[rule], request, key);
}

crdt::SeriesId Limiter::rule_identity(std::uint32_t rule) const {
  std::lock_guard lock(impl_->reload_mutex);
  const std::vector<CompiledRule>& compiled_rules = impl_->programs.current().compiled_rules;
  return rule < compiled_rules.size() ? impl_->identity_of(*compiled_rules[rule].rule) : SeriesId{};
}

RuleCounters Limiter::counters(std::uint32_t rule) const {
  return impl_->counters(rule);
}

std::size_t Limiter::series_count() const {
  return impl_->table.size();
}

std::uint64_t Limiter::used(std::uint32_t index, const Request& request, Nanos now) {
  Impl::Programs::Use program = impl_->use(local());
  if (index >= program->compiled_rules.size()) return 0;
  const CompiledRule& compiled = program->compiled_rules[index];
  std::string key;
  return impl_->used(compiled, impl_->series_of(compiled, request, key), now);
}

std::size_t Limiter::sweep(Nanos floor) {
  return impl_->sweep(floor);
}

ReplicaSide Limiter::replica_side() {
  return ReplicaSide(*impl_);
}

}  // namespace weir
