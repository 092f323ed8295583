#include <weir/limits/replica_side.h>

#include <atomic>
#include <map>
#include <string>
#include <thread>

#include <weir/limits/algorithms/log_window.h>

#include "law.h"
#include "schedules.h"

namespace weir::laws {
namespace {

using crdt::Cell;

constexpr crdt::Incarnation kSelf{1, 1};
constexpr crdt::Incarnation kOther{2, 2};

struct Ask {
  std::vector<Entry> entries;
  Request request;
  explicit Ask(std::string_view key, std::uint64_t hits = 1) : entries{{"key", key}} {
    request = {"api", entries, hits};
  }
};

LimiterOptions replicated() {
  LimiterOptions options;
  options.replicated = true;
  options.incarnation = kSelf;
  return options;
}

LAW(41, "more merged counts never turn a deny into an allow", "a window", "a bucket", "a ring",
    "a log", "a leaky bucket", "a calendar", "an allow that became a deny",
    "news of the window before", "a later touch", "counts that saturate", "older news again") {
  Rule rule = *rules_named("r").as("rule");
  rule.shadow = false;
  rule.default_cost = 1;
  rule.cost_by_method.clear();
  auto rules = rule_set({rule});
  rule = rules->rules()[0];
  Limiter limiter(rules, replicated());
  crdt::SeriesId series = limiter.series_of(0, Ask("k").request);
  bool bucket = is_bucket(rule.algorithm);
  bool log = rule.algorithm == Algorithm::sliding_log;
  Nanos now = kStart;
  for (int i = *between(0, 6).as("own requests"); i > 0; --i) {
    now += *between<Nanos>(0, rule.window / 4);
    limiter.check(Ask("k", *between<std::uint64_t>(1, 3)).request, now);
  }
  std::vector<crdt::OwnCount> counts;
  limiter.replica_side().drain(counts, 100);
  Cell cell;
  cell.id.series = series;
  if (bucket) {
    if (!counts.empty()) {
      cell.raise({kSelf, counts[0].birth}, counts[0].value);
      cell.bucket = counts[0].bucket;
    } else {
      cell.bucket.touched = now;
      cell.bucket.expiry = now + kMinute;
    }
  } else if (log) {
    cell.id.epoch = log_epoch(rule.window, now - *between<Nanos>(0, rule.window - 1));
  } else {
    WindowShape shape = window_shape(rule, series);
    std::int64_t index = shape.index(now) - *between<std::int64_t>(0, shape.previous);
    cell.id.epoch = shape.epoch(index);
    reached("news of the window before", index < shape.index(now));
  }
  bool denied = false;
  Nanos wait = 0;
  std::uint64_t cost = *costs(bucket ? rule.burst : rule.limit).as("cost");
  if (cost == 0) cost = 1;
  for (int i = 0; i < 5; ++i) {
    std::uint64_t remaining = limiter.check(Ask("k", 0).request, now).statuses.at(0).remaining;
    bool fits = cost <= remaining;
    RC_ASSERT(!(denied && fits));
    if (!fits) {
      Decision decision = limiter.check(Ask("k", cost).request, now);
      RC_ASSERT(!decision.allowed);
      // Nor does it shorten the wait.
      RC_ASSERT(decision.statuses[0].retry_after >= wait);
      wait = decision.statuses[0].retry_after;
    }
    reached("an allow that became a deny", i > 0 && !fits && !denied);
    denied = !fits;
    Cell before = cell;
    crdt::SlotId slot{kOther, bucket ? 1u : 0u};
    std::uint64_t held = cell.value_of(slot);
    std::uint64_t more = *rc::gen::weightedOneOf<std::uint64_t>(
        {{4, between<std::uint64_t>(0, 3)},
         {1, rc::gen::just(std::max(rule.limit, rule.burst))},
         {1, rc::gen::just(kMax)}});
    cell.raise(slot, add_saturated(held, more));
    reached("counts that saturate", cell.total() == kMax);
    // More counts under the same checkpoint: a better checkpoint is other knowledge, of when.
    if (bucket && *chance(40)) {
      cell.bucket.touched += *between<Nanos>(0, kSecond);
      cell.bucket.expiry = std::max(cell.bucket.expiry, cell.bucket.touched);
      reached("a later touch", more > 0);
    }
    if (cell.slots.empty()) continue;
    limiter.replica_side().absorb(cell);
    if (before.slots.empty() || !*chance(40)) continue;
    // Older news that comes again takes nothing back.
    std::uint64_t left = limiter.check(Ask("k", 0).request, now).statuses.at(0).remaining;
    limiter.replica_side().absorb(before);
    RC_ASSERT(limiter.check(Ask("k", 0).request, now).statuses.at(0).remaining == left);
    reached("older news again", before.total() < cell.total());
  }
  reached("a window", rule.algorithm == Algorithm::fixed_window);
  reached("a bucket", bucket);
  reached("a ring", rule.algorithm == Algorithm::sliding_window && rule.slots > 1);
  reached("a log", log);
  reached("a leaky bucket", rule.algorithm == Algorithm::leaky_bucket);
  reached("a calendar", rule.calendar.has_value());
}

LAW(42, "a deny consumes nothing, and a check of several rules is all or nothing",
    "one of several denied", "all allowed", "a shadow rule that would deny",
    "the deciding rule has the longest wait") {
  std::vector<Rule> rules;
  std::size_t n = *between<std::size_t>(1, 4).as("rules");
  for (std::size_t i = 0; i < n; ++i) {
    rules.push_back(*rules_named("r" + std::to_string(i)));
    if (i % 2 == 1) rules.back().key = {};
  }
  Limiter limiter(rule_set(rules), {});
  Nanos now = kStart;
  for (int i = *between(1, 25).as("requests"); i > 0; --i) {
    now += *between<Nanos>(0, kSecond / 2);
    std::string key(1, static_cast<char>('a' + *between(0, 2)));
    std::uint64_t hits = *between<std::uint64_t>(1, 4);
    Decision before = limiter.check(Ask(key, 0).request, now);
    std::size_t series = limiter.series_count();
    Decision decision = limiter.check(Ask(key, hits).request, now);
    Decision after = limiter.check(Ask(key, 0).request, now);
    RC_ASSERT(decision.statuses.size() == n);
    int denying = 0;
    Nanos longest = 0;
    for (std::size_t r = 0; r < n; ++r) {
      const RuleStatus& status = decision.statuses[r];
      std::uint64_t cost = mul_saturated(rules[r].default_cost, hits);
      RC_ASSERT(status.allowed == (cost <= before.statuses[r].remaining));
      bool consumed = decision.allowed && status.allowed;
      RC_ASSERT(after.statuses[r].remaining ==
                before.statuses[r].remaining - (consumed ? cost : 0));
      RC_ASSERT(status.remaining == after.statuses[r].remaining);
      if (!consumed) RC_ASSERT(after.statuses[r].reset == before.statuses[r].reset);
      reached("a shadow rule that would deny", status.shadow && !status.allowed);
      if (status.allowed || status.shadow) continue;
      ++denying;
      longest = std::max(longest, status.retry_after);
    }
    RC_ASSERT(decision.allowed == (denying == 0));
    if (!decision.allowed) {
      RC_ASSERT(limiter.series_count() == series);
      RC_ASSERT(decision.decider() != nullptr);
      RC_ASSERT(!decision.decider()->allowed);
      RC_ASSERT(decision.decider()->retry_after == longest);
      reached("the deciding rule has the longest wait", denying > 1);
    }
    reached("one of several denied", denying > 0 && denying < static_cast<int>(n));
    reached("all allowed", decision.allowed);
  }
}

LAW(42, "all or nothing also under concurrency", "a full wide rule", "a full narrow rule",
    "buckets", "windows") {
  // Two threads ask for keys of their own and a common one, all at one instant.
  auto algorithm =
      *one_of<Algorithm>({Algorithm::fixed_window, Algorithm::sliding_window,
                          Algorithm::token_bucket, Algorithm::leaky_bucket, Algorithm::sliding_log})
           .as("algorithm");
  auto made = [&](std::string name, std::uint64_t limit, std::vector<std::string> key) {
    Rule rule;
    rule.domain = "api";
    rule.name = std::move(name);
    rule.key = std::move(key);
    rule.limit = limit;
    rule.algorithm = algorithm;
    return rule;
  };
  std::uint64_t wide = *between<std::uint64_t>(1, 300).as("wide limit");
  std::uint64_t narrow = *between<std::uint64_t>(1, 200).as("narrow limit");
  Limiter limiter(rule_set({made("wide", wide, {}), made("narrow", narrow, {"key"})}), {});
  static constexpr std::string_view kKeys[] = {"a", "b", "common"};
  std::uint64_t admitted[2][3] = {};
  auto run = [&](std::size_t thread) {
    Decision decision;
    for (std::uint64_t i = 0; i < 150; ++i) {
      std::size_t key = i % 3 == 0 ? 2 : thread;
      std::uint64_t hits = 1 + i % 2;
      limiter.check(Ask(kKeys[key], hits).request, kStart, decision);
      if (decision.allowed) admitted[thread][key] += hits;
    }
  };
  std::thread other(run, 1);
  run(0);
  other.join();
  std::uint64_t all = 0;
  for (std::size_t key = 0; key < 3; ++key) {
    std::uint64_t units = admitted[0][key] + admitted[1][key];
    RC_ASSERT(limiter.used(1, Ask(kKeys[key]).request, kStart) == units);
    RC_ASSERT(units <= narrow);
    reached("a full narrow rule", units == narrow);
    all += units;
  }
  RC_ASSERT(limiter.used(0, Ask("a").request, kStart) == all);
  RC_ASSERT(all <= wide);
  reached("a full wide rule", all == wide);
  reached("buckets", is_bucket(algorithm));
  reached("windows", !is_bucket(algorithm));
}

LAW(44, "merged over-admission stays within what the others admitted since their last exchange",
    "over the limit", "denied at the limit", "a bucket", "a window", "a partition") {
  MeshOptions options = *mesh_options(2, 3).as("mesh");
  options.loss_percent = 0;
  options.max_delay = std::min(options.max_delay, 50 * kMillisecond);
  options.max_commit = std::min(options.max_commit, 10 * kMillisecond);
  Rule rule;
  rule.domain = "api";
  rule.name = "r";
  rule.key = {"key"};
  rule.algorithm =
      *one_of<Algorithm>({Algorithm::fixed_window, Algorithm::token_bucket}).as("algorithm");
  rule.limit = *between<std::uint64_t>(3, 40).as("limit");
  rule.window = kHour;
  options.rules = rule_set({rule});
  Mesh mesh(options);
  bool bucket = rule.algorithm == Algorithm::token_bucket;
  // Hand-over, commit, tick, network, and all of it once more where pushes were held back.
  constexpr Nanos kExchange = kSecond;
  // While a link is cut, and until the resend after it, nothing is exchanged.
  Nanos partition_from = kNever;
  bool partition = *chance(30);
  reached("a partition", partition);
  int steps = *between(1, 50).as("steps");
  for (int step = 0; step < steps; ++step) {
    mesh.advance(*rc::gen::weightedOneOf<Nanos>(
                     {{3, between<Nanos>(0, 100)}, {1, between<Nanos>(0, 1500)}}) *
                 kMillisecond);
    if (partition && step == steps / 2) {
      mesh.cut(0, 1);
      partition_from = mesh.now() - kExchange;
    }
    std::size_t node = *between<std::size_t>(0, mesh.size() - 1);
    bool allowed = mesh.check(node, "k", *between<std::uint64_t>(1, 3)).allowed;
    reached("denied at the limit", !allowed);
    if (!allowed) continue;
    std::uint64_t total = 0;
    std::uint64_t unseen = 0;
    for (const Admission& each : mesh.admissions()) {
      total += each.units;
      bool recent = each.at > std::min(mesh.now() - kExchange, partition_from);
      if (each.node != node && recent) unseen += each.units;
    }
    // A bucket gives back `limit` in an hour: one unit at most in what a case lasts.
    RC_ASSERT(total <= rule.limit + unseen + (bucket ? 1 : 0));
    reached("over the limit", total > rule.limit);
  }
  reached("a bucket", bucket);
  reached("a window", !bucket);
}

LAW(45, "a strict ring never exceeds the limit in any window", "full", "across an edge",
    "a costly request", "a spread phase", "one slot") {
  Rule rule;
  rule.domain = "api";
  rule.name = "r";
  rule.key = {"key"};
  rule.algorithm = Algorithm::sliding_window;
  rule.strict = true;
  rule.window = *one_of<Nanos>({kMinute, 6 * kMillisecond, kDay}).as("window");
  rule.slots = *one_of<std::uint32_t>({6, 1, 2, 12}).as("slots");
  rule.limit = *between<std::uint64_t>(1, 12).as("limit");
  rule.phase = *chance(50) ? Phase::spread : Phase::aligned;
  Limiter limiter(rule_set({rule}), {});
  WindowShape shape = window_shape(rule, limiter.series_of(0, Ask("k").request));
  Nanos now = kStart;
  std::vector<std::pair<Nanos, std::uint64_t>> admitted;
  for (int i = *between(1, 80).as("requests"); i > 0; --i) {
    Nanos edge = shape.start(shape.index(now) + 1);
    now = *rc::gen::weightedOneOf<Nanos>({{2, between<Nanos>(now, now + shape.sub / 3)},
                                          {1, one_of<Nanos>({edge, edge - 1, now})},
                                          {1, between<Nanos>(now, now + shape.sub)}});
    std::uint64_t hits = *rc::gen::weightedElement<std::uint64_t>({{3, 1}, {1, 3}});
    if (!limiter.check(Ask("k", hits).request, now).allowed) continue;
    admitted.emplace_back(now, hits);
    // The windows that can be fullest end at an admission.
    std::uint64_t sum = 0;
    for (const auto& [at, units] : admitted) sum += at > now - rule.window ? units : 0;
    RC_ASSERT(sum <= rule.limit);
    reached("full", sum == rule.limit);
    reached("across an edge", sum > hits && shape.index(admitted.front().first) < shape.index(now));
    reached("a costly request", hits > 1);
  }
  reached("a spread phase", shape.phase > 0);
  reached("one slot", rule.slots == 1);
}

/// Probes a verdict: the wait is the first instant at which the cost passes.
template <typename AllowedAt>
void assert_tight(Nanos now, Nanos retry_after, const AllowedAt& allowed_at) {
  RC_ASSERT(retry_after > 0);
  Nanos horizon = retry_after == kNever ? kMaxTime - now : retry_after;
  if (retry_after != kNever) {
    RC_ASSERT(allowed_at(now + retry_after));
    RC_ASSERT(!allowed_at(now + retry_after - 1));
  }
  for (int probe = 0; probe < 8; ++probe) {
    RC_ASSERT(!allowed_at(now + *between<Nanos>(0, horizon - 1)));
  }
}

LAW(47, "retry_after is tight, for windows", "the weighted decay", "the edge of a window",
    "a strict ring", "counts of a faster clock", "never", "a limit below what was used",
    "less than a nanosecond's worth") {
  WindowShape shape = *window_shapes().as("shape");
  std::uint64_t limit = *one_of<std::uint64_t>({10, 1, 0, 100, 7, kMax / 2, kMax}).as("limit");
  Nanos now = *instants(shape).as("now");
  std::int64_t current = shape.index(now);
  std::map<std::int64_t, std::uint64_t> counts;
  std::int64_t ahead = *rc::gen::weightedElement<std::int64_t>({{3, 0}, {1, 1}});
  for (std::int64_t i = current - shape.previous; i <= current + ahead; ++i) {
    counts[i] = *rc::gen::weightedOneOf<std::uint64_t>(
        {{3, between<std::uint64_t>(0, std::min<std::uint64_t>(limit, 40))},
         {1, between<std::uint64_t>(0, limit == kMax ? limit - 1 : limit)},
         {1, one_of<std::uint64_t>({0, limit, add_saturated(limit, 5)})}});
  }
  std::uint64_t cost = *costs(limit).as("cost");
  auto ask = [&](Nanos then, std::uint64_t units) {
    return evaluate_window(shape, limit, then, units, current + ahead, [&](std::int64_t index) {
      auto at = counts.find(index);
      return at == counts.end() ? std::uint64_t{0} : at->second;
    });
  };
  Verdict verdict = ask(now, cost);
  RC_ASSERT(verdict.remaining <= limit);
  // A peek is denied where more is used than the limit allows.
  RC_ASSERT(cost == 0 || verdict.allowed == (cost <= verdict.remaining));
  if (verdict.allowed) {
    RC_ASSERT(verdict.retry_after == 0);
    return;
  }
  RC_ASSERT((verdict.retry_after == kNever) == (cost > limit));
  assert_tight(now, verdict.retry_after, [&](Nanos then) { return ask(then, cost).allowed; });
  reached("never", cost > limit);
  reached("a limit below what was used", counts[current] > limit);
  reached("a strict ring", shape.strict);
  reached("counts of a faster clock", ahead > 0 && counts[current + 1] > 0);
  if (verdict.retry_after == kNever) return;
  bool edge = (now + verdict.retry_after + shape.phase) % shape.sub == 0;
  reached("the edge of a window", edge);
  reached("the weighted decay", !edge && shape.previous > 0);
  reached("less than a nanosecond's worth",
          counts[current - shape.previous] > static_cast<std::uint64_t>(shape.sub));
}

LAW(47, "retry_after is tight, for buckets", "a wait", "never", "units no checkpoint has counted",
    "a clock behind the last touch", "a wait below a microsecond", "debt beyond the burst",
    "full by other numbers first") {
  BucketShape shape = *bucket_shapes().as("shape");
  Nanos now = kStart;
  crdt::BucketState state;
  std::uint64_t total = 0;
  if (*chance(90)) {
    std::uint64_t counted = *between<std::uint64_t>(
        1, std::max<std::uint64_t>(std::min<std::uint64_t>(2 * (shape.burst / 2), 100), 1));
    Nanos full = std::min(refill_time(shape), kDay);
    state.checkpoint = {counted, now - *between<Nanos>(0, full), shape.ticks(counted)};
    state.checkpoint.debt -=
        std::min<crdt::DebtTicks>(state.checkpoint.debt, *between<std::uint64_t>(0, 1000));
    state.touched =
        *rc::gen::weightedOneOf<Nanos>({{2, between<Nanos>(state.checkpoint.at, now)},
                                        {1, between<Nanos>(now, now + std::min(full, kSecond))}});
    // It may have been touched last when the bucket was another one.
    Nanos lifetime = *chance(80) ? shape.fill_time() : *between<Nanos>(0, shape.fill_time());
    state.expiry = state.touched + lifetime;
    total = counted + *rc::gen::weightedOneOf<std::uint64_t>({{1, rc::gen::just<std::uint64_t>(0)},
                                                              {2, between<std::uint64_t>(0, 5)}});
  }
  std::uint64_t cost = *costs(shape.burst).as("cost");
  auto ask = [&](Nanos then) { return evaluate_bucket(shape, state, total, then, cost); };
  Verdict verdict = ask(now);
  RC_ASSERT(verdict.remaining <= shape.burst);
  if (verdict.allowed) {
    RC_ASSERT(verdict.retry_after == 0);
    return;
  }
  RC_ASSERT((verdict.retry_after == kNever) == (cost > shape.burst));
  assert_tight(now, verdict.retry_after, [&](Nanos then) { return ask(then).allowed; });
  reached("never", cost > shape.burst);
  reached("a wait", verdict.retry_after != kNever);
  reached("a wait below a microsecond", verdict.retry_after < kMicrosecond);
  reached("units no checkpoint has counted", total > state.checkpoint.counted);
  reached("a clock behind the last touch", state.touched > now);
  reached("debt beyond the burst",
          bucket_debt(shape, state, total, now) > shape.ticks(shape.burst));
  reached("full by other numbers first", verdict.retry_after != kNever &&
                                             now + verdict.retry_after == state.expiry &&
                                             state.expiry < state.touched + shape.fill_time());
}

LAW(47, "retry_after is tight, for a request that meets several rules", "a wait", "several deny",
    "never") {
  std::vector<Rule> rules;
  for (std::size_t i = *between<std::size_t>(1, 3).as("rules"); i > 0; --i) {
    rules.push_back(*rules_named("r" + std::to_string(i)));
  }
  Limiter limiter(rule_set(rules), {});
  Nanos now = kStart;
  for (int i = *between(1, 15).as("requests"); i > 0; --i) {
    now += *between<Nanos>(0, kSecond / 10);
    std::uint64_t hits = *between<std::uint64_t>(1, 3);
    Decision decision = limiter.check(Ask("k", hits).request, now);
    if (decision.allowed) continue;
    Nanos wait = decision.decider()->retry_after;
    int denying = 0;
    for (const RuleStatus& status : decision.statuses) denying += !status.allowed && !status.shadow;
    reached("several deny", denying > 1);
    reached("never", wait == kNever);
    if (wait == kNever) continue;
    reached("a wait");
    RC_ASSERT(!limiter.check(Ask("k", hits).request, now + wait - 1).allowed);
    RC_ASSERT(limiter.check(Ask("k", hits).request, now + wait).allowed);
    now += wait;
  }
}

LAW(47, "retry_after is tight for a thread whose time is behind another's", "a wait",
    "a bucket touched later than now") {
  Rule rule = *rules_named("r");
  Limiter limiter(rule_set({rule}), {});
  Ask ask("k", 1);
  Nanos base = kStart;
  for (int i = *between(1, 8).as("rounds"); i > 0; --i) {
    base += *between<Nanos>(1, 50) * kMillisecond;
    limiter.check(ask.request,
                  base);  // from here on other threads know this time, and no later one
    Nanos touch = base + *between<Nanos>(1, kMillisecond - 1);
    for (int hits = *between(1, 4); hits > 0; --hits) limiter.check(ask.request, touch);
    Nanos now = *between<Nanos>(base, touch);
    Decision decision;
    std::thread([&] { limiter.check(ask.request, now, decision); }).join();
    if (decision.allowed || decision.statuses[0].retry_after == kNever) continue;
    Nanos passes = now + decision.statuses[0].retry_after;
    reached("a wait");
    reached("a bucket touched later than now", is_bucket(rule.algorithm) && now < touch);
    if (passes - 1 >= touch) RC_ASSERT(!limiter.check(ask.request, passes - 1).allowed);
    RC_ASSERT(limiter.check(ask.request, passes).allowed);
    base = passes;
  }
}

LAW(42, "no key spends another's quota, nor one rule's key another rule's", "denied",
    "a long key") {
  // Keys that differ little, more of them than a thread remembers the series of.
  std::vector<std::string> keys;
  std::size_t size = *one_of<std::size_t>({12, 3, 8, 36, 37, 200});
  for (int i = 0; i < 300; ++i) {
    std::string key(size + (*chance(10) ? 1 : 0), 'x');
    key.replace(*between<std::size_t>(0, key.size() - 3), 3, std::to_string(100 + i));
    keys.push_back(key);
  }
  std::vector<Rule> rules(2);
  for (std::size_t i = 0; i < rules.size(); ++i) {
    rules[i].domain = "api";
    rules[i].name = "r" + std::to_string(i);
    rules[i].key = {"key" + std::to_string(i)};
    rules[i].limit = *between<std::uint64_t>(1, 3);
    rules[i].window = kHour;
  }
  Limiter limiter(rule_set(rules), {});
  std::map<std::pair<std::size_t, std::string>, std::uint64_t> used;
  for (int i = 0; i < 1000; ++i) {
    std::size_t rule = *between<std::size_t>(0, 1);
    const std::string& key = keys[*between<std::size_t>(0, keys.size() - 1)];
    Entry entry{rules[rule].key[0], key};
    std::uint64_t& count = used[{rule, key}];
    bool allowed = limiter.check({"api", {&entry, 1}, 1}, kStart).allowed;
    RC_ASSERT(allowed == (count < rules[rule].limit));
    count += allowed;
    reached("denied", !allowed);
  }
  reached("a long key", size > 36);
}

LAW(42, "a full table never admits more, whatever leaves it meanwhile", "counted in the sketch",
    "a place became free", "an idle series gave its place", "a series came back") {
  Rule rule = *rules_named("r");
  rule.limit = std::min<std::uint64_t>(rule.limit, 5);
  rule.burst = std::min<std::uint64_t>(rule.burst, 5);
  rule.on_failure = *one_of<OnFailure>({OnFailure::open, OnFailure::closed});
  rule.default_cost = 1;
  rule.cost_by_method.clear();
  LimiterOptions options;
  options.max_series = *between<std::size_t>(1, 3);
  Limiter small(rule_set({rule}), options);
  Limiter large(rule_set({rule}), {});
  Nanos now = kStart;
  std::map<std::string, bool> seen;
  // Of each key, what has been admitted is replayed to a limiter that has room: it must never say
  // no to what the small one lets pass.
  for (int i = *between(5, 60).as("requests"); i > 0; --i) {
    now += *one_of<Nanos>({0, 1, kMillisecond, kSecond, rule.window / 2, 3 * rule.window});
    std::string key = std::to_string(*between(0, 5));
    if (*chance(20)) {
      std::size_t gone = small.sweep(now);
      large.sweep(now);
      reached("a place became free", gone > 0);
    }
    Ask ask(key, *between<std::uint64_t>(1, 3));
    Decision decision = small.check(ask.request, now);
    const RuleStatus& status = decision.statuses[0];
    reached("counted in the sketch", status.degraded && decision.allowed);
    bool full = seen.size() >= options.max_series;
    reached("an idle series gave its place", full && !seen.contains(key) && !status.degraded);
    reached("a series came back", full && seen.contains(key) && !status.degraded);
    if (!status.degraded) seen[key] = true;
    if (decision.allowed) RC_ASSERT(large.check(ask.request, now).allowed);
  }
}

LAW(42, "series that are swept while threads begin to use them show in no answer", "allowed",
    "denied", "degraded", "swept") {
  // Of three rules one denies again and again, so that series are made for requests that then use
  // none of them; in a table of few places.
  auto made = [](std::string name, std::uint64_t limit, std::vector<std::string> key) {
    Rule rule;
    rule.domain = "api";
    rule.name = std::move(name);
    rule.key = std::move(key);
    rule.limit = limit;
    rule.window = kSecond;
    return rule;
  };
  std::uint64_t wide = *between<std::uint64_t>(1, 4).as("wide limit");
  LimiterOptions options;
  options.max_series = *between<std::size_t>(2, 12).as("places");
  Limiter limiter(rule_set({made("wide", wide, {}), made("a", 3, {"a"}), made("b", 3, {"b"})}),
                  options);
  constexpr std::uint64_t kRequests = 600;
  std::atomic<Nanos> newest{kStart};
  std::atomic<int> running{2};
  std::atomic<std::uint64_t> allowed{0};
  std::atomic<std::uint64_t> wrong{0};
  auto ask = [&](int thread) {
    Decision decision;
    for (std::uint64_t i = 0; i < kRequests; ++i) {
      std::string key = std::to_string(thread) + "-" + std::to_string(i / 2);
      Entry entries[] = {{"a", key}, {"b", key}};
      Nanos now = newest.fetch_add(kSecond / 8);
      limiter.check({"api", entries}, now, decision);
      bool all = decision.statuses.size() == 3;
      for (const RuleStatus& status : decision.statuses) all &= status.allowed;
      wrong += all != decision.allowed || decision.statuses.size() != 3;
      allowed += decision.allowed;
    }
    --running;
  };
  std::thread first(ask, 0);
  std::thread second(ask, 1);
  std::size_t swept = 0;
  // Once for each time that is new: who sweeps on and on keeps the others from the locks.
  for (Nanos seen = 0; running > 0; std::this_thread::yield()) {
    if (Nanos now = newest; now != seen) swept += limiter.sweep((seen = now) - 3 * kSecond);
  }
  first.join();
  second.join();
  RC_ASSERT(wrong == 0u);
  std::uint64_t degraded = 0;
  for (std::uint32_t rule = 0; rule < 3; ++rule) {
    RuleCounters counters = limiter.counters(rule);
    RC_ASSERT(counters.allowed + counters.denied == 2 * kRequests);
    RC_ASSERT(counters.allowed >= allowed);
    degraded += counters.degraded;
  }
  reached("allowed", allowed > 0);
  reached("denied", allowed < 2 * kRequests);
  reached("degraded", degraded > 0);
  reached("swept", swept > 0);
}

}  // namespace
}  // namespace weir::laws
