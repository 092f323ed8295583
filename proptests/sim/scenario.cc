#include <weir/proptests/sim/scenario.h>

#include <algorithm>

#include <fmt/format.h>

#include <weir/proptests/sim/random.h>

namespace weir::sim {
namespace {

constexpr std::string_view kNames[kFaultKinds] = {
    "crash",         "crash_mid_commit", "stop",        "limit_change", "disk_lost",
    "disk_restored", "disk_cloned",      "disk_slow",   "disk_fails",   "disk_full",
    "cut",           "partition",        "partial_cut", "lossy",        "slow_link",
    "session_reset", "clock_jump",       "clock_drift", "forged",       "burst"};

constexpr unsigned kWeights[kFaultKinds] = {10, 8, 6, 3, 4, 4, 4, 6, 3, 2,
                                            8,  8, 6, 5, 4, 5, 8, 2, 3, 4};

Rule make_rule(Random& random, std::uint32_t index, bool scarce_only) {
  constexpr Nanos kWindows[] = {
      100 * kMillisecond, 250 * kMillisecond, kSecond, 2 * kSecond,  5 * kSecond,
      10 * kSecond,       30 * kSecond,       kMinute, 10 * kMinute, kHour,
      6 * kHour};
  const std::vector<std::string> keys[] = {{"user"}, {"path"}, {"user", "path"}, {}};
  Rule rule;
  rule.domain = "sim";
  rule.name = fmt::format("rule-{}", index);
  rule.key = keys[index == 0 ? 0 : random.below(4)];
  rule.window = random.pick(kWindows);
  rule.limit = static_cast<std::uint64_t>(random.log_between(1, scarce_only ? 64 : 1000));
  if (random.chance(20)) rule.limit = 0;
  switch (random.below(5)) {
    case 0:
    case 1:
      rule.algorithm = Algorithm::fixed_window;
      break;
    case 2:
      rule.algorithm = Algorithm::sliding_window;
      if (random.chance(500)) rule.slots = random.chance(500) ? 5 : 10;
      rule.strict = random.chance(400);
      break;
    default:
      rule.algorithm = Algorithm::token_bucket;
      if (random.chance(600) && rule.limit > 0) {
        rule.burst = static_cast<std::uint64_t>(random.log_between(1, 300));
      }
      rule.max_debt = static_cast<std::uint32_t>(random.below(3));
  }
  if (random.chance(300)) rule.phase = Phase::spread;
  rule.durability = random.chance(400) ? Durability::commit : Durability::async;
  rule.on_failure = random.chance(500) ? OnFailure::open : OnFailure::closed;
  rule.shadow = random.chance(100);
  if (random.chance(300)) rule.cost_by_method = {{"POST", 1 + random.below(7)}};
  if (random.chance(100)) rule.default_cost = random.below(4);
  if (random.chance(200)) rule.match.push_back({"method", MatchExact{"POST"}});
  return rule;
}

std::shared_ptr<const RuleSet> rule_set(std::vector<Rule> rules) {
  std::vector<RuleError> errors;
  return RuleSet::make(std::move(rules), errors);
}

void make_rules(Random& random, Scenario& scenario) {
  bool scarce_only = random.chance(500);
  auto count = static_cast<std::uint32_t>(random.between(1, 4));
  std::vector<Rule> rules;
  for (std::uint32_t i = 0; i < count; ++i) rules.push_back(make_rule(random, i, scarce_only));
  // From a stream of its own, so that what else a seed decides stays.
  Random rights(scenario.seed, 8);
  bool escrow = rights.chance(400);
  for (Rule& rule : rules) {
    bool fixed = rule.algorithm == Algorithm::fixed_window;
    if (fixed && escrow && rights.chance(700)) {
      rule.enforcement = Enforcement::escrow;
      if (rule.durability == Durability::async) rule.durability = Durability::reserve;
    } else if ((fixed || rule.algorithm == Algorithm::sliding_window) && rights.chance(150)) {
      rule.durability = Durability::reserve;
    }
  }
  for (std::uint32_t i = 0; i < scenario.nodes; ++i) {
    scenario.weights.push_back(rights.chance(700) ? 1
                                                  : static_cast<std::uint32_t>(rights.below(4)));
  }
  Random parts(scenario.seed, 9);
  for (Rule& rule : rules) {
    if (!escrow || rule.algorithm != Algorithm::token_bucket || !parts.chance(700)) continue;
    rule.enforcement = Enforcement::escrow;
    rule.durability = Durability::async;
    rule.on_failure = OnFailure::closed;
    rule.max_debt = 1;
    // Its own, so that what follows changes the rate alone: nodes that split another burst may
    // together have more of the rate (docs/escrow.md).
    if (rule.burst == 0) rule.burst = rule.limit;
  }
  Random candidates(scenario.seed, 10);
  for (Rule& rule : rules) {
    if (rule.enforcement == Enforcement::escrow || !candidates.chance(150)) continue;
    // Which decides in the general way what is else decided in the quick one.
    rule.candidate = Candidate{candidates.below(2 * rule.limit + 1), 0};
  }
  scenario.rules.push_back(rule_set(rules));
  for (Rule& rule : rules) {
    rule.limit = random.chance(500) ? rule.limit / 2 : rule.limit * 2;
    if (rule.algorithm == Algorithm::token_bucket && rule.limit == 0) rule.burst = 0;
  }
  scenario.rules.push_back(rule_set(std::move(rules)));
}

void make_links(Random& random, Scenario& scenario) {
  Nanos delay = random.log_between(100 * kMicrosecond, 150 * kMillisecond);
  unsigned loss = random.chance(400) ? static_cast<unsigned>(random.below(150)) : 0;
  unsigned duplicate = random.chance(400) ? static_cast<unsigned>(random.below(100)) : 0;
  scenario.links.assign(scenario.nodes, std::vector<LinkShape>(scenario.nodes));
  bool sparse = scenario.nodes > 2 && random.chance(200);
  for (std::uint32_t a = 0; a < scenario.nodes; ++a) {
    for (std::uint32_t b = a + 1; b < scenario.nodes; ++b) {
      // A chain always stays, so the graph is connected.
      bool exists = !sparse || b == a + 1 || random.chance(400);
      for (LinkShape* link : {&scenario.links[a][b], &scenario.links[b][a]}) {
        link->exists = exists;
        link->delay =
            delay / 2 + static_cast<Nanos>(random.below(static_cast<std::uint64_t>(delay) + 1));
        link->jitter = random.log_between(50 * kMicrosecond, 2 * delay + kMillisecond);
        link->loss = loss;
        link->duplicate = duplicate;
      }
    }
  }
}

FaultKind pick_kind(Random& random) {
  unsigned sum = 0;
  for (unsigned weight : kWeights) sum += weight;
  auto at = static_cast<unsigned>(random.below(sum));
  for (std::size_t i = 0; i < kFaultKinds; ++i) {
    if (at < kWeights[i]) return static_cast<FaultKind>(i);
    at -= kWeights[i];
  }
  return FaultKind::crash;
}

std::int64_t pick_amount(Random& random, const Scenario& scenario, FaultKind kind) {
  switch (kind) {
    case FaultKind::disk_slow:
      return random.log_between(10, 3000);
    case FaultKind::partition:
      return random.between(1, (std::int64_t{1} << scenario.nodes) - 2);
    case FaultKind::lossy:
      return random.between(100, 900);
    case FaultKind::slow_link:
      return random.log_between(5, 100);
    case FaultKind::clock_jump: {
      Nanos longest = random.chance(60)    ? 3650 * kDay
                      : random.chance(100) ? kHour
                      : random.chance(300) ? kMinute
                                           : 3 * kSecond;
      Nanos jump = random.log_between(10 * kMillisecond, longest);
      return random.chance(500) ? jump : -jump;
    }
    case FaultKind::clock_drift:
      return random.between(-50'000, 50'000);
    case FaultKind::forged:
      return random.log_between(1, 1000);
    default:
      return 0;
  }
}

void make_faults(Random& random, Scenario& scenario) {
  std::int64_t count = random.chance(60) ? 0 : random.log_between(1, 24);
  for (std::int64_t i = 0; i < count; ++i) {
    Fault fault;
    fault.kind = pick_kind(random);
    fault.at = random.between(scenario.chaos / 50, scenario.chaos - 1);
    fault.length = random.log_between(20 * kMillisecond,
                                      std::max<Nanos>(scenario.chaos / 3, 50 * kMillisecond));
    fault.node = static_cast<std::uint32_t>(random.below(scenario.nodes));
    fault.other = static_cast<std::uint32_t>(random.below(scenario.nodes - 1));
    if (fault.other >= fault.node) ++fault.other;
    fault.amount = pick_amount(random, scenario, fault.kind);
    scenario.faults.push_back(fault);
    // Trouble likes company: the next fault often falls into this one.
    if (random.chance(400) && i + 1 < count) {
      Fault next = fault;
      next.kind = pick_kind(random);
      next.at = std::min(scenario.chaos - 1,
                         fault.at + random.between(0, std::min(fault.length, 2 * kSecond)));
      next.amount = pick_amount(random, scenario, next.kind);
      scenario.faults.push_back(next);
      ++i;
    }
  }
  std::stable_sort(scenario.faults.begin(), scenario.faults.end(),
                   [](const Fault& a, const Fault& b) { return a.at < b.at; });
}

}  // namespace

std::string_view to_string(FaultKind kind) {
  return kNames[static_cast<std::size_t>(kind)];
}

std::string to_string(const Fault& fault) {
  std::string text = fmt::format("{:10.6f}s n{} {}", static_cast<double>(fault.at) / 1e9,
                                 fault.node, to_string(fault.kind));
  auto length = static_cast<double>(fault.length) / 1e9;
  switch (fault.kind) {
    case FaultKind::disk_cloned:
      return text + fmt::format(" from n{}, back after {:.3f}s", fault.other, length);
    case FaultKind::cut:
    case FaultKind::partial_cut:
      return text + fmt::format(" n{} for {:.3f}s", fault.other, length);
    case FaultKind::session_reset:
      return text + fmt::format(" to n{}", fault.other);
    case FaultKind::partition:
      return text + fmt::format(" nodes {:#b} from the others for {:.3f}s", fault.amount, length);
    case FaultKind::lossy:
      return text + fmt::format(" to n{}: {}/1000 for {:.3f}s", fault.other, fault.amount, length);
    case FaultKind::slow_link:
      return text + fmt::format(" with n{}: x{} for {:.3f}s", fault.other, fault.amount, length);
    case FaultKind::disk_slow:
      return text + fmt::format(" x{} for {:.3f}s", fault.amount, length);
    case FaultKind::clock_jump:
      return text + fmt::format(" by {:+.3f}s", static_cast<double>(fault.amount) / 1e9);
    case FaultKind::clock_drift:
      return text + fmt::format(" {:+} ppm for {:.3f}s", fault.amount, length);
    case FaultKind::forged:
      return text + fmt::format(" by n{}: +{}", fault.other, fault.amount);
    default:
      return text + fmt::format(" for {:.3f}s", length);
  }
}

Scenario make_scenario(std::uint64_t seed) {
  Random random(seed, 1);
  Scenario scenario;
  scenario.seed = seed;
  constexpr std::uint32_t kNodes[] = {2, 2, 3, 3, 3, 3, 4, 4, 5, 6, 7};
  constexpr std::int64_t kScales[] = {1, 1, 1, 1, 1, 1, 1, 8, 8, 60};
  scenario.nodes = random.pick(kNodes);
  scenario.scale = random.pick(kScales);
  scenario.start_wall = 1'700'000'000 * kSecond + random.between(0, 30 * kDay);
  scenario.chaos = scenario.scale * random.log_between(4 * kSecond, 40 * kSecond);
  scenario.sync_interval = scenario.scale * random.pick({100 * kMillisecond, 250 * kMillisecond,
                                                         250 * kMillisecond, kSecond});
  scenario.anti_entropy_interval = scenario.scale * random.pick({kSecond, 5 * kSecond});
  scenario.resend_after = scenario.scale * random.pick({500 * kMillisecond, 2 * kSecond});
  if (random.chance(400)) scenario.max_backlog = 1 + random.below(4);
  if (random.chance(40)) scenario.max_series = 4 + random.below(20);
  if (random.chance(400)) scenario.repair_piece = 1 + random.below(8);
  if (random.chance(400)) scenario.sweep_piece = 1 + random.below(3000);
  make_rules(random, scenario);
  make_links(random, scenario);
  scenario.ghosts = random.chance(150);
  scenario.users = static_cast<std::uint32_t>(random.log_between(1, 200));
  scenario.paths = static_cast<std::uint32_t>(random.between(1, 6));
  Nanos gap = scenario.scale * random.log_between(15 * kMillisecond, 600 * kMillisecond);
  for (std::uint32_t i = 0; i < scenario.nodes; ++i) {
    scenario.request_gap.push_back(gap * random.between(1, 4));
    scenario.skew.push_back(random.chance(300)
                                ? random.between(-2 * kSecond, 2 * kSecond)
                                : random.between(-100 * kMillisecond, 100 * kMillisecond));
  }
  scenario.disk_latency = random.log_between(100 * kMicrosecond, 16 * kMillisecond);
  scenario.tell_delay = random.log_between(10 * kMicrosecond, 4 * kMillisecond);
  scenario.disk_reorders = random.chance(300);
  make_faults(random, scenario);
  if (random.chance(300)) scenario.enter_piece = 1 + random.below(8);
  return scenario;
}

std::string describe(const Scenario& scenario) {
  std::string text = fmt::format(
      "{} nodes, {:.1f}s of chaos (x{}), sync {}ms, {} users, {} paths, backlog {}{}{}; rules:",
      scenario.nodes, static_cast<double>(scenario.chaos) / 1e9, scenario.scale,
      scenario.sync_interval / kMillisecond, scenario.users, scenario.paths, scenario.max_backlog,
      scenario.max_series < 1000 ? fmt::format(", {} series", scenario.max_series) : "",
      scenario.ghosts ? ", ghosts" : "");
  for (const Rule& rule : scenario.rules[0]->rules()) {
    text += fmt::format(" [{} {}/{}ms burst {} slots {}{} {}{}{}]", to_string(rule.algorithm),
                        rule.limit, rule.window / kMillisecond, rule.burst, rule.slots,
                        rule.strict ? " strict" : "", to_string(rule.durability),
                        rule.enforcement == Enforcement::escrow ? " escrow" : "",
                        rule.shadow ? " shadow" : "");
  }
  return text;
}

}  // namespace weir::sim
