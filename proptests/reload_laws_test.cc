#include <weir/limits/replica_side.h>

#include <atomic>
#include <set>
#include <thread>

#include "law.h"
#include "models.h"
#include "schedules.h"

/// Rules that change while they are in force.
namespace weir::laws {
namespace {

constexpr std::string_view kKeys[] = {"a", "b"};

struct Ask {
  std::vector<Entry> entries;
  Request request;
  explicit Ask(std::string_view key, std::uint64_t hits = 1, std::string_view id = {})
      : entries{{"key", key}} {
    request = {"api", entries, hits, id};
  }
};

Rule rule_to_change(std::string name) {
  Rule rule = *rules_named(std::move(name)).as("rule");
  rule.cost_by_method.clear();
  if (*chance(60) && !rule.calendar) rule.window = 10 * kSecond;
  if (is_bucket(rule.algorithm) && rule.limit > 0 && rule.limit < 1000) {
    rule.window = std::min(rule.window, kMinute);
  }
  return rule;
}

/// The same rule with other numbers: its counts stay.
Rule changed(Rule rule) {
  bool log = rule.algorithm == Algorithm::sliding_log;
  rule.limit = *one_of<std::uint64_t>({10, 1, 2, 5, 12, 20, 100, 0, 1'000'000}).as("limit");
  if (log) rule.limit = std::min<std::uint64_t>(rule.limit, 20);
  if (is_bucket(rule.algorithm)) {
    // From a bucket of a minute to one of a month of life, as the window allows.
    if (rule.limit > 0 && rule.limit < 1000 && rule.window > kMinute) rule.limit = 1'000'000;
    rule.burst = rule.limit == 0 ? 0 : *one_of<std::uint64_t>({0, 1, 5, 20}).as("burst");
    rule.max_debt = *one_of<std::uint32_t>({1, 0, 3});
  }
  rule.default_cost = *rc::gen::weightedElement<std::uint64_t>({{8, 1}, {2, 3}, {1, 0}});
  rule.shadow = *chance(15);
  return rule;
}

Nanos pause() {
  Nanos time = *rc::gen::weightedOneOf<Nanos>({{6, between<Nanos>(0, 300 * kMillisecond)},
                                               {3, between<Nanos>(0, 6 * kSecond)},
                                               {1, one_of<Nanos>({kMinute, 6 * kHour, 40 * kDay})},
                                               {1, between<Nanos>(-kSecond, 0)}});
  return time;
}

LAW(42, "a limiter whose rules change decides as a model that was given the same consumption",
    "raised", "lowered below what is used", "to zero and back", "gone and back",
    "a bucket's rate changed while it owed", "a small bucket in other numbers",
    "full by old numbers", "settled by other numbers", "settled while its rule was gone",
    "in another order", "denied", "swept", "replicated", "a fixed window", "a sliding window",
    "a log", "a token bucket", "a leaky bucket") {
  std::vector<Rule> all;
  for (std::size_t i = *between<std::size_t>(1, 5).as("rules"); i > 0; --i) {
    all.push_back(rule_to_change("r" + std::to_string(i)));
    Algorithm algorithm = all.back().algorithm;
    reached("a fixed window", algorithm == Algorithm::fixed_window);
    reached("a sliding window", algorithm == Algorithm::sliding_window);
    reached("a log", algorithm == Algorithm::sliding_log);
    reached("a token bucket", algorithm == Algorithm::token_bucket);
    reached("a leaky bucket", algorithm == Algorithm::leaky_bucket);
  }
  LimiterOptions options;
  options.replicated = *chance(50).as("replicated");
  options.incarnation = {1, 1};
  reached("replicated", options.replicated);
  Limiter limiter(rule_set(all), options);
  std::vector<std::map<std::string, Nanos>> phases(all.size());
  for (std::uint32_t i = 0; i < all.size(); ++i) {
    for (std::string_view key : kKeys) {
      phases[i][std::string(key)] =
          window_shape(limiter.rules()->rules()[i], limiter.series_of(i, Ask(key).request)).phase;
    }
  }
  limiter.check(Ask("other", 0).request, kStart);
  PlainLimiter model(all, phases, kStart);

  struct Open {
    Ticket ticket;
    int number;
    std::uint64_t hits;
    int reloads;
    std::set<std::string> rules;
  };
  std::vector<Rule> now_in_force = all;
  std::vector<Open> open;
  std::set<std::string> gone;
  std::set<std::string> zero;
  int numbers = 0;
  int reloads = 0;
  auto agree = [&] {
    for (std::string_view key : kKeys) {
      Decision peek = limiter.check(Ask(key, 0).request, model.now());
      RC_ASSERT(peek.statuses.size() == now_in_force.size());
      for (std::uint32_t i = 0; i < now_in_force.size(); ++i) {
        std::uint64_t left = model.left(i, std::string(key));
        RC_ASSERT(peek.statuses[i].remaining == left);
        std::uint64_t used = limiter.used(i, Ask(key).request, model.now());
        RC_ASSERT(std::min(used, peek.statuses[i].limit) + left == peek.statuses[i].limit);
      }
    }
  };
  auto reload = [&] {
    std::vector<std::uint64_t> before;
    for (std::size_t i = 0; i < now_in_force.size(); ++i) before.push_back(model.left(i, "a"));
    std::vector<Rule> old = now_in_force;
    std::vector<Rule> fresh;
    for (Rule& rule : all) {
      if (all.size() > 1 && *chance(20)) {
        gone.insert(rule.name);
        continue;
      }
      bool back = gone.erase(rule.name) > 0;
      Rule changed_rule = *chance(70) ? changed(rule) : rule;
      reached("to zero and back", zero.contains(rule.name) && changed_rule.limit > 0);
      if (changed_rule.limit == 0) zero.insert(rule.name);
      rule = changed_rule;
      fresh.push_back(rule);
      for (std::size_t i = 0; i < old.size(); ++i) {
        if (old[i].name != rule.name) continue;
        std::uint64_t used =
            std::min(old[i].limit, old[i].limit - std::min(old[i].limit, before[i]));
        bool bucket = is_bucket(rule.algorithm);
        reached("raised", rule.limit > old[i].limit && !bucket);
        reached("lowered below what is used", rule.limit < used && !bucket);
        bool owed = bucket &&
                    limiter.used(static_cast<std::uint32_t>(i), Ask("a").request, model.now()) > 0;
        reached("a bucket's rate changed while it owed", owed && rule.limit != old[i].limit);
        reached("a small bucket in other numbers",
                owed && rule.limit != old[i].limit && !options.replicated);
      }
      reached("gone and back", back);
    }
    if (fresh.empty()) return;
    if (fresh.size() > 1 && *chance(30)) {
      std::reverse(fresh.begin(), fresh.end());
      reached("in another order");
    }
    limiter.reload(rule_set(fresh));
    model.reload(fresh);
    now_in_force = fresh;
    ++reloads;
  };
  auto in_force = [&](const std::string& name) {
    return std::any_of(now_in_force.begin(), now_in_force.end(),
                       [&](const Rule& rule) { return rule.name == name; });
  };
  for (int step = *between(1, 40).as("steps"); step > 0; --step) {
    Nanos now = model.now() + pause();
    if (*chance(15)) now += kSecond - now % kSecond;
    std::string key(kKeys[*choice(2)]);
    std::uint64_t hits = *rc::gen::weightedElement<std::uint64_t>({{6, 1}, {3, 2}, {1, 0}, {2, 7}});
    switch (*choice(8)) {
      case 0:
      case 1:
      case 2: {
        PlainLimiter::Answer wanted = model.check(key, hits, false, now);
        Decision got = limiter.check(Ask(key, hits).request, now);
        RC_ASSERT(got.allowed == wanted.allowed);
        RC_ASSERT(got.statuses.size() == now_in_force.size());
        for (std::size_t i = 0; i < now_in_force.size(); ++i) {
          RC_ASSERT(got.statuses[i].allowed == wanted.rules[i]);
          RC_ASSERT(got.statuses[i].remaining == wanted.remaining[i]);
          RC_ASSERT(got.statuses[i].shadow == now_in_force[i].shadow);
        }
        reached("denied", !got.allowed);
        break;
      }
      case 3: {
        PlainLimiter::Answer wanted = model.reserve(++numbers, key, hits, now);
        Decision got;
        Ticket ticket = limiter.reserve(Ask(key, hits).request, now, kDay, got);
        RC_ASSERT(got.allowed == wanted.allowed);
        RC_ASSERT(static_cast<bool>(ticket) == model.holds(numbers));
        std::set<std::string> names;
        for (const Rule& rule : now_in_force) names.insert(rule.name);
        if (ticket) open.push_back({ticket, numbers, hits, reloads, names});
        break;
      }
      case 4: {
        if (open.empty()) break;
        Open one = open.back();
        open.pop_back();
        std::uint64_t actual = *between<std::uint64_t>(0, 2 * one.hits);
        bool counted = model.settle(one.number, actual, now);
        Settled got = limiter.settle(one.ticket, actual, now);
        RC_ASSERT(got.known);
        RC_ASSERT(got.lapsed == !counted);
        reached("settled by other numbers", one.reloads < reloads && actual > 0);
        reached("settled while its rule was gone",
                !std::all_of(one.rules.begin(), one.rules.end(), in_force));
        break;
      }
      case 5:
      case 6:
        reload();
        break;
      default:
        reached("swept", limiter.sweep(model.now() - kSecond) > 0);
    }
    agree();
    reached("full by old numbers", reloads > 0 && model.full_by_old_numbers("a"));
  }
}

/// Steps in which a rule's numbers change and units are consumed; then a request that is denied.
LAW(47, "retry_after is tight behind a change of numbers", "a wait", "never",
    "lowered below what is used", "a bucket", "a log", "a sliding window", "full by old numbers",
    "others' counts") {
  Rule rule = rule_to_change("r");
  if (*chance(50)) {
    rule = Rule{};
    rule.domain = "api";
    rule.name = "r";
    rule.key = {"key"};
    rule.algorithm = *one_of<Algorithm>({Algorithm::token_bucket, Algorithm::leaky_bucket});
    rule.window = *one_of<Nanos>({10 * kSecond, kMinute}).as("window");
    rule.limit = *one_of<std::uint64_t>({20, 100, 1000}).as("limit");
    rule.burst = 5;
  }
  LimiterOptions options;
  options.replicated = *chance(50).as("replicated");
  options.incarnation = {1, 1};
  Limiter limiter(rule_set({rule}), options);
  PlainLimiter model(
      {rule},
      {{{"a",
         window_shape(limiter.rules()->rules()[0], limiter.series_of(0, Ask("a").request)).phase}}},
      kStart);
  limiter.check(Ask("other", 0).request, kStart);
  Nanos now = kStart;
  std::uint64_t used = 0;
  bool others = false;
  for (int step = *between(1, 12).as("steps"); step > 0; --step) {
    now += *between<Nanos>(0, 2 * kSecond);
    std::uint64_t hits = *between<std::uint64_t>(0, 5);
    limiter.check(Ask("a", hits).request, now);
    model.check("a", hits, false, now);
    if (*chance(20) && !is_bucket(rule.algorithm) && rule.algorithm != Algorithm::sliding_log) {
      crdt::Cell cell;
      crdt::SeriesId id = limiter.series_of(0, Ask("a").request);
      WindowShape shape = window_shape(limiter.rules()->rules()[0], id);
      cell.id = {id, shape.epoch(shape.index(now))};
      cell.raise({{8, 8}, 0}, *between<std::uint64_t>(1, 20));
      limiter.replica_side().absorb(cell);
      others = true;
    }
    used = limiter.used(0, Ask("a").request, now);
    if (*chance(50)) {
      rule = changed(rule);
      rule.shadow = false;
      rule.default_cost = std::max<std::uint64_t>(rule.default_cost, 1);
      limiter.reload(rule_set({rule}));
      model.reload({rule});
    }
  }
  std::uint64_t hits = *between<std::uint64_t>(1, 8);
  Ask ask("a", hits);
  Decision denied = limiter.check(ask.request, now);
  if (denied.allowed || denied.statuses[0].shadow) return;
  Nanos wait = denied.statuses[0].retry_after;
  std::uint64_t capacity = denied.statuses[0].limit;
  RC_ASSERT((wait == kNever) == (mul_saturated(rule.default_cost, hits) > capacity));
  reached("never", wait == kNever);
  if (wait == kNever) return;
  RC_ASSERT(wait > 0);
  if (*chance(50)) limiter.sweep(now + wait - 1);
  RC_ASSERT(!limiter.check(ask.request, now + wait - 1).allowed);
  if (*chance(50)) limiter.sweep(now + wait);
  RC_ASSERT(limiter.check(ask.request, now + wait).allowed);
  reached("a wait");
  reached("lowered below what is used", used > rule.limit && !is_bucket(rule.algorithm));
  reached("a bucket", is_bucket(rule.algorithm));
  reached("a log", rule.algorithm == Algorithm::sliding_log);
  reached("a sliding window", rule.algorithm == Algorithm::sliding_window);
  reached("full by old numbers", is_bucket(rule.algorithm) && model.full_at("a") == now + wait);
  reached("others' counts", others);
}

LAW(43, "a request id counts once across a change of rules", "repeated", "its rule is gone",
    "another place in the file", "its numbers changed") {
  std::vector<Rule> rules{rule_to_change("r1"), rule_to_change("r2"), rule_to_change("r3")};
  for (Rule& rule : rules) {
    rule.limit = rule.algorithm == Algorithm::sliding_log ? 20 : 1000;
    rule.burst = 0;
    rule.shadow = false;
    rule.default_cost = 1;
    if (is_bucket(rule.algorithm)) rule.window = kMinute;
  }
  Limiter limiter(rule_set(rules), {});
  Decision first = limiter.check(Ask("a", 2, "id").request, kStart);
  RC_ASSERT(first.allowed && !first.repeated && first.version == 1);
  std::vector<Rule> fresh;
  bool changed_numbers = false;
  for (const Rule& rule : rules) {
    if (*chance(25)) continue;
    bool change = *chance(50);
    changed_numbers |= change;
    fresh.push_back(change ? changed(rule) : rule);
  }
  bool reversed = *chance(50);
  if (reversed) std::reverse(fresh.begin(), fresh.end());
  limiter.reload(rule_set(fresh));
  Decision again = limiter.check(Ask("a", 2, "id").request, kStart);
  RC_ASSERT(again.repeated && again.allowed);
  RC_ASSERT(again.version == 2);
  RC_ASSERT(again.statuses.size() == fresh.size());
  for (std::size_t i = 0; i < fresh.size(); ++i) {
    RC_ASSERT(again.statuses[i].rule == i);
    // What it was told then.
    RC_ASSERT(again.statuses[i].limit ==
              (fresh[i].algorithm == Algorithm::sliding_log ? 20 : 1000));
    RC_ASSERT(again.statuses[i].remaining == again.statuses[i].limit - 2);
    RC_ASSERT(limiter.used(static_cast<std::uint32_t>(i), Ask("a").request, kStart) <= 2u);
  }
  RC_ASSERT((again.deciding == -1) == fresh.empty());
  reached("repeated");
  reached("its rule is gone", fresh.size() < rules.size());
  reached("another place in the file", reversed && fresh.size() > 1);
  reached("its numbers changed", changed_numbers);
}

LAW(42, "nothing is admitted beyond the limit in force while threads decide and rules change",
    "denied", "allowed", "a bucket", "a window", "a log") {
  Rule rule = rule_to_change("r");
  rule.calendar.reset();
  rule.phase = Phase::aligned;
  rule.window = 30 * kDay;
  rule.slots = 1;
  rule.default_cost = 1;
  rule.shadow = false;
  rule.limit = *between<std::uint64_t>(1, 20).as("limit");
  rule.burst = 0;
  if (is_bucket(rule.algorithm)) rule.max_debt = 0;
  LimiterOptions options;
  options.replicated = *chance(50).as("replicated");
  options.incarnation = {1, 1};
  Limiter limiter(rule_set({rule}), options);
  std::uint64_t lowest = rule.limit;
  std::uint64_t highest = rule.limit;
  std::vector<std::shared_ptr<const RuleSet>> sets;
  for (int i = 0; i < 4; ++i) {
    Rule other = rule;
    other.limit = *between<std::uint64_t>(1, 20).as("another limit");
    lowest = std::min(lowest, other.limit);
    highest = std::max(highest, other.limit);
    sets.push_back(rule_set({other}));
  }
  // Time stands still, so that what was consumed stands in every algorithm.
  std::atomic<std::uint64_t> admitted{0};
  std::atomic<std::uint64_t> told{0};
  std::atomic<int> ready{0};
  auto decide = [&] {
    ++ready;
    while (ready < 3) std::this_thread::yield();
    Ask ask("a", 1);
    Decision decision;
    for (int i = 0; i < 30; ++i) {
      limiter.check(ask.request, kStart, decision);
      admitted += decision.allowed;
      told += decision.statuses[0].allowed;
    }
  };
  std::thread one(decide);
  std::thread two(decide);
  ++ready;
  while (ready < 3) std::this_thread::yield();
  for (const auto& set : sets) {
    limiter.reload(set);
    std::this_thread::yield();
  }
  one.join();
  two.join();
  RC_ASSERT(admitted == told);
  RC_ASSERT(admitted <= highest);
  RC_ASSERT(admitted >= lowest);
  RC_ASSERT(limiter.counters(0).allowed == told);
  RC_ASSERT(limiter.counters(0).allowed + limiter.counters(0).denied == 60u);
  // All of it is still there under the last rules.
  std::uint64_t last = sets.back()->rules()[0].limit;
  Decision peek = limiter.check(Ask("a", 0).request, kStart);
  RC_ASSERT(peek.statuses[0].remaining == last - std::min<std::uint64_t>(last, admitted));
  reached("denied", admitted < 60u);
  reached("allowed", admitted > 0u);
  reached("a bucket", is_bucket(rule.algorithm));
  reached("a window", rule.algorithm == Algorithm::fixed_window);
  reached("a log", rule.algorithm == Algorithm::sliding_log);
}

}  // namespace
}  // namespace weir::laws
