#include <weir/limits/limiter.h>

#include <weir/limits/limiter/limiter_impl.h>

#include <algorithm>
#include <limits>
#include <utility>

namespace weir {
namespace {

/// From a status for each item to one for each rule of each descriptor.
[[gnu::noinline]] void split_joined(const Items& items, Local& work, Decision& out) {
  items.split_joined(out);
  for (std::size_t i = 0; i < out.statuses.size(); ++i) {
    if (items.repeats(i)) work.count(out.statuses[i]);
  }
}

/// Of a rule of whose key some entry is not counted as it is.
SeriesId formed_series_of(const CompiledRule& compiled, const Request& request, std::string& key) {
  const Rule& rule = *compiled.rule;
  thread_local std::string value;
  key.clear();
  for (std::size_t i = 0; i < rule.key.size(); ++i) {
    const std::string_view* given = request.find(rule.key[i]);
    value.clear();
    if (given != nullptr) append_key_value(rule.key_form(i), *given, value);
    append_text(key, value);
  }
  return hash_with(compiled.hash_key, key);
}

}  // namespace

SeriesId Limiter::Impl::series_of(const CompiledRule& compiled, const Request& request,
                                  std::string& key) const {
  const std::vector<std::string>& names = compiled.rule->key;
  if (compiled.formed) [[unlikely]]
    return formed_series_of(compiled, request, key);
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
  items.warmed = request.warmed;
  items.kind = request.kind;
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
  if (compiled.special) [[unlikely]]
    return add_special(compiled, request, now, work, items);
  add(compiled, series_of(compiled, request, work.key), request, now, work, items);
}

void Limiter::Impl::add_special(const CompiledRule& compiled, const Request& request, Nanos now,
                                Local& work, Items& items) {
  if (compiled.rule->unlimited) {
    items.note_exempt(compiled.index);
    return;
  }
  AskedRulePtr asked;
  const CompiledRule& as_asked = in_place_of(compiled, request.limit, asked);
  items.keep(std::move(asked));
  add(as_asked, series_of(as_asked, request, work.key), request, now, work, items);
}

const CompiledRule& Limiter::Impl::in_place_of(const CompiledRule& base, const RequestLimit& asked,
                                               AskedRulePtr& keep) const {
  if (!base.special || base.rule->unlimited) return base;
  const RequestLimit numbers = numbers_of(*base.rule, asked);
  keep = local().asked.find(base, numbers, [&] {
    auto made = std::make_shared<AskedRule>(*base.rule);
    made->rule.limit = numbers.limit;
    made->rule.window = numbers.window;
    made->rule.burst = numbers.burst;
    made->compiled = compile(made->rule, base.number, rules.identity_of(made->rule));
    made->compiled.index = base.index;
    made->compiled.commit = base.commit;
    made->compiled.may_have_lost = base.may_have_lost;
    return AskedRulePtr(std::move(made));
  });
  return keep->compiled;
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
  item.id = id;
  item.cost = cost_of(compiled, request);
  item.demand_counted = request.demand_counted;
  if (!compiled.bucket_cell && !compiled.log) item.window = window_at(compiled, id, now);
}

void Limiter::Impl::check_any(const Request& request, Local& work, Nanos given, Decision& out) {
  RulesInForce::Use program = use(work);
  work.program = &*program;
  Nanos now = time.clamp(given, work.stripe);
  Items& items = work.items[0];
  prepare(request, now, work, items);
  if (request.more.empty()) work.single = items.size() == 1;
  decide_prepared(request, items, work, now, out);
}

void Limiter::Impl::decide_prepared(const Request& request, Items& items, Local& work, Nanos now,
                                    Decision& out) {
  if (items.exempt()) [[unlikely]]
    work.count_exempt(items);
  // The quick way for one item knows no descriptor but the first.
  if (request.id.empty() && request.kind == RequestKind::check) {
    std::span<Item> all = items.all();
    bool decided = all.size() == 1 && request.more.empty() ? decide_alone(all[0], work, now, out)
                                                           : decide_few(all, work, now, out);
    if (decided && items.joined()) [[unlikely]]
      split_joined(items, work, out);
    if (decided) return;
  }
  decide_once(request, items, work, now, out);
}

void Limiter::Impl::check(std::span<const Request> requests, Nanos given, std::span<Decision> out) {
  Local& work = local();
  RulesInForce::Use program = use(work);
  work.program = &*program;
  Nanos now = time.clamp(given, work.stripe);
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
  if (items.size() == 0 && !items.exempt()) [[unlikely]]
    unmet.note(*work.program, request);
  if (request.id.empty()) {
    decide(items, work, now, out);
  } else {
    by_id(request, items, *work.program, now, out, [&] {
      decide(items, work, now, out);
      return Ticket{};
    });
  }
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

Ticket Limiter::reserve(const Request& request, Nanos now, Nanos timeout, Decision& out,
                        TicketHolder holder) {
  return impl_->reserve(request, now, timeout, out, holder);
}

std::uint64_t Limiter::may_lease(std::uint32_t rule, const Request& request,
                                 std::uint64_t caller) const {
  RulesInForce::Use program = impl_->use(local());
  if (rule >= program->compiled_rules.size()) return 0;
  AskedRulePtr asked;
  const CompiledRule& compiled =
      impl_->in_place_of(program->compiled_rules[rule], request.limit, asked);
  if (caller == 0) return compiled.limit;
  std::string key;
  const std::uint64_t has =
      impl_->reservations.leased(caller, impl_->series_of(compiled, request, key));
  const std::uint64_t most = impl_->part_of_one(compiled.limit);
  return most - std::min(most, has);
}

Settled Limiter::settle(Ticket ticket, std::uint64_t actual, Nanos now, std::uint64_t caller) {
  return settle(ticket, {&actual, 1}, now, caller);
}

Settled Limiter::settle(Ticket ticket, std::span<const std::uint64_t> actual, Nanos now,
                        std::uint64_t caller) {
  now = impl_->time.clamp(now, local().stripe);
  return impl_->reservations.settle(ticket, actual, impl_->settling(now), caller);
}

std::size_t Limiter::settle_due(Nanos now, std::size_t max) {
  now = impl_->time.clamp(now, local().stripe);
  return impl_->reservations.settle_due(now, max, impl_->settling(now));
}

void Limiter::settle_all(Nanos now) {
  impl_->reservations.settle_all(impl_->settling(impl_->time.clamp(now, local().stripe)));
}

void Limiter::forget_id(std::string_view domain, std::string_view id) {
  impl_->ids.forget(domain, id);
}

RequestIdCounters Limiter::request_ids() const {
  return {impl_->ids.size(), impl_->ids.repeated(), impl_->ids.evicted()};
}

TicketCounters Limiter::tickets() const {
  return impl_->reservations.counters();
}

UnmetCounters Limiter::unmet() const {
  return impl_->unmet.counters();
}

void Limiter::reload(std::shared_ptr<const RuleSet> rules) {
  impl_->reload(impl_->rules.prepare(std::move(rules)));
}

std::shared_ptr<PreparedRules> Limiter::prepare(std::shared_ptr<const RuleSet> rules) const {
  return std::make_shared<PreparedRules>(impl_->rules.prepare(std::move(rules)));
}

void Limiter::reload(std::shared_ptr<PreparedRules> prepared) {
  impl_->reload(std::move(prepared->program));
}

std::shared_ptr<const RuleSet> Limiter::rules() const {
  return impl_->rules.rules();
}

std::shared_ptr<const RuleSet> Limiter::rules(std::uint64_t version) const {
  return impl_->rules.rules(version);
}

crdt::SeriesId Limiter::series_of(std::uint32_t rule, const Request& request) const {
  RulesInForce::Use program = impl_->use(local());
  if (rule >= program->compiled_rules.size()) return {};
  AskedRulePtr asked;
  std::string key;
  return impl_->series_of(impl_->in_place_of(program->compiled_rules[rule], request.limit, asked),
                          request, key);
}

crdt::SeriesId Limiter::rule_identity(std::uint32_t rule) const {
  return impl_->rules.identity(rule);
}

RuleCounters Limiter::counters(std::uint32_t rule) const {
  return impl_->rules.counters(rule);
}

SeriesUsage Limiter::series_usage(std::uint32_t rule) const {
  const SeriesShares::Usage usage = impl_->table.shares().of(impl_->rules.identity(rule));
  return {usage.series, usage.guaranteed, usage.refused};
}

std::uint64_t Limiter::series_refused() const {
  return impl_->table.shares().refused();
}

std::size_t Limiter::series_count() const {
  return impl_->table.size();
}

std::uint64_t Limiter::used(std::uint32_t index, const Request& request, Nanos now) {
  RulesInForce::Use program = impl_->use(local());
  if (index >= program->compiled_rules.size()) return 0;
  AskedRulePtr asked;
  const CompiledRule& compiled =
      impl_->in_place_of(program->compiled_rules[index], request.limit, asked);
  std::string key;
  return impl_->used(compiled, impl_->series_of(compiled, request, key), now);
}

bool Limiter::would_wait(std::uint32_t index, const Request& request, Nanos now) {
  RulesInForce::Use program = impl_->use(local());
  if (index >= program->compiled_rules.size()) return false;
  AskedRulePtr asked;
  const CompiledRule& compiled =
      impl_->in_place_of(program->compiled_rules[index], request.limit, asked);
  std::string key;
  const std::uint64_t cost = mul_saturated(compiled.rule->cost_of(request), request.hits);
  return impl_->would_wait(compiled, impl_->series_of(compiled, request, key), cost, now);
}

std::size_t Limiter::sweep(Nanos floor) {
  return impl_->sweep(floor);
}

std::optional<Limiter::Swept> Limiter::sweep_some(Nanos floor, std::size_t most) {
  return impl_->sweep_some(floor, most);
}

ReplicaSide Limiter::replica_side() {
  return ReplicaSide(*impl_);
}

}  // namespace weir
