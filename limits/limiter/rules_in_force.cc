#include <weir/limits/limiter/rules_in_force.h>

#include <algorithm>
#include <string>
#include <utility>

#include <weir/limits/limiter/rule_status.h>

namespace weir {
namespace {

void add(RuleCounters& sum, const RuleCounters& more) {
  sum.allowed += more.allowed;
  sum.denied += more.denied;
  sum.degraded += more.degraded;
  sum.exhausted_locally += more.exhausted_locally;
  sum.candidate_denied += more.candidate_denied;
}

}  // namespace

RulesInForce::RulesInForce(std::shared_ptr<const RuleSet> rules, const HashKey& key,
                           bool replicated, bool lost, Numbered numbered)
    : hash_(key),
      replicated_(replicated),
      lost_(lost),
      numbered_(std::move(numbered)),
      programs_(number_program(prepare(std::move(rules)), 1)) {}

SeriesId RulesInForce::identity_of(const Rule& rule) const {
  return hash_with(hash_, weir::identity(rule));
}

std::unique_ptr<Program> RulesInForce::prepare(std::shared_ptr<const RuleSet> rules) const {
  auto program = std::make_unique<Program>();
  program->rules = std::move(rules);
  const std::vector<Rule>& all = program->rules->rules();
  program->compiled_rules.reserve(all.size());
  program->by_identity.reserve(all.size());
  for (const Rule& rule : all) {
    SeriesId id = identity_of(rule);
    auto index = static_cast<std::uint32_t>(program->compiled_rules.size());
    CompiledRule compiled = compile(rule, 0, id);
    compiled.index = index;
    compiled.commit = compiled.commit && replicated_;
    compiled.may_have_lost = lost_ && !compiled.escrow && rule.on_failure == OnFailure::closed;
    compiled.small = compiled.small && !compiled.may_have_lost;
    if (compiled.escrow) {
      compiled.name = hash_with(hash_, "name of " + weir::identity(rule));
      program->by_name.emplace(compiled.name, index);
    }
    program->identities.push_back(id);
    program->domains.insert(rule.domain);
    program->by_identity.emplace(id, index);
    program->compiled_rules.push_back(compiled);
  }
  for (auto& stripe : program->counters) {
    stripe = std::make_unique<AtomicCounters[]>(program->compiled_rules.size());
  }
  if (program->compiled_rules.size() <= kScannedRules && program->rules->each_alone())
    program->prefilters = prefilters_of(program->compiled_rules);
  return program;
}

std::unique_ptr<const Program> RulesInForce::number_program(std::unique_ptr<Program> prepared,
                                                            std::uint64_t version) {
  prepared->version = version;
  for (CompiledRule& compiled : prepared->compiled_rules) {
    compiled.number = numbers_.number_of(prepared->identities[compiled.index], *compiled.rule);
  }
  if (numbered_) numbered_(*prepared);
  versions_.push_back(prepared->rules);
  if (versions_.size() > kVersionsKept) versions_.erase(versions_.begin());
  return prepared;
}

CompiledRule RulesInForce::compiled_for(const Program& program, std::uint32_t number) const {
  const RuleNumbers::Kept& kept = numbers_.at(number);
  const CompiledRule* in_force = program.find(kept.identity);
  return in_force != nullptr ? *in_force : compile(kept.rule, number, kept.identity);
}

void RulesInForce::translate(const Program& program, const RuleSet& before, Decision& out) const {
  out.version = program.version;
  std::erase_if(out.statuses, [&](RuleStatus& status) {
    const CompiledRule* now = program.find(identity_of(before.rules()[status.rule]));
    if (now != nullptr) status.rule = now->index;
    return now == nullptr;
  });
  std::sort(out.statuses.begin(), out.statuses.end(), [](const RuleStatus& a, const RuleStatus& b) {
    return std::pair(a.descriptor, a.rule) < std::pair(b.descriptor, b.rule);
  });
  find_decider(out);
}

std::shared_ptr<const RuleSet> RulesInForce::rules() const {
  std::lock_guard lock(mutex_);
  return programs_.current().rules;
}

std::shared_ptr<const RuleSet> RulesInForce::rules(std::uint64_t version) const {
  std::lock_guard lock(mutex_);
  std::uint64_t behind = programs_.current().version - version;
  return behind < versions_.size() ? versions_[versions_.size() - 1 - behind] : nullptr;
}

SeriesId RulesInForce::identity(std::uint32_t rule) const {
  std::lock_guard lock(mutex_);
  const std::vector<SeriesId>& identities = programs_.current().identities;
  return rule < identities.size() ? identities[rule] : SeriesId{};
}

RuleCounters RulesInForce::counters(std::uint32_t rule) const {
  std::lock_guard lock(mutex_);
  RuleCounters sum;
  if (rule >= programs_.current().compiled_rules.size()) return sum;
  SeriesId id = programs_.current().identities[rule];
  if (auto before = past_.find(id); before != past_.end()) sum = before->second;
  programs_.for_each([&](const Program& program) {
    const CompiledRule* then = program.find(id);
    if (then != nullptr) add(sum, program.count(then->index));
  });
  return sum;
}

void RulesInForce::reload(std::unique_ptr<Program> prepared, const VisitSeries& visit) {
  std::lock_guard lock(mutex_);
  programs_.replace(number_program(std::move(prepared), programs_.current().version + 1));
  free_programs();
  if (numbers_.size() < 2 * programs_.current().compiled_rules.size() + kManyNumbers) return;
  NumbersInUse in_use = numbers_of_programs();
  visit(&in_use);
  forget_numbers(in_use);
}

void RulesInForce::reclaim(const VisitSeries& visit) {
  std::lock_guard lock(mutex_);
  free_programs();
  // Those of rules that went are looked for in passing.
  if (numbers_.size() <= programs_.current().compiled_rules.size()) {
    visit(nullptr);
    return;
  }
  NumbersInUse in_use = numbers_of_programs();
  visit(&in_use);
  forget_numbers(in_use);
}

std::optional<NumbersInUse> RulesInForce::begin_reclaim(std::uint64_t& version) {
  std::lock_guard lock(mutex_);
  free_programs();
  version = programs_.current().version;
  if (numbers_.size() <= programs_.current().compiled_rules.size()) return std::nullopt;
  return numbers_of_programs();
}

void RulesInForce::end_reclaim(const NumbersInUse& in_use, std::uint64_t version) {
  std::lock_guard lock(mutex_);
  if (programs_.current().version == version) forget_numbers(in_use);
}

void RulesInForce::free_programs() {
  programs_.reclaim([&](const Program& gone) {
    // In the order in which their counters stand.
    for (std::uint32_t rule = 0; rule < gone.identities.size(); ++rule) {
      RuleCounters more = gone.count(rule);
      if (more != RuleCounters{}) add(past_[gone.identities[rule]], more);
    }
  });
}

NumbersInUse RulesInForce::numbers_of_programs() const {
  NumbersInUse in_use(numbers_.end());
  programs_.for_each([&](const Program& program) {
    for (const CompiledRule& compiled : program.compiled_rules) in_use.note(compiled.number);
  });
  return in_use;
}

void RulesInForce::forget_numbers(const NumbersInUse& in_use) {
  numbers_.keep_only(in_use);
  std::erase_if(past_, [&](const auto& one) { return !numbers_.knows(one.first); });
}

}  // namespace weir
