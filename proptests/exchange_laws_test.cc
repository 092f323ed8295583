#include <weir/limits/replica_side.h>
#include <weir/node/engine/engine.h>

#include <array>
#include <memory>
#include <set>

#include "law.h"
#include "schedules.h"

/// What is told to the others at once, so that little is admitted beyond a limit.
namespace weir::laws {
namespace {

/// Counts at which the others are told at once, one by one.
std::set<std::uint64_t> thresholds_of(std::uint64_t limit) {
  std::set<std::uint64_t> thresholds{(limit + 1) / 2, (limit * 8 + 9) / 10, limit};
  std::uint64_t step = limit < 2048 ? 1 : limit / 1024;
  for (std::uint64_t threshold = (limit * 9 + 9) / 10; threshold <= limit; threshold += step)
    thresholds.insert(threshold);
  return thresholds;
}

LAW(44, "a series is exchanged at once at its thresholds, and near its limit at every step",
    "a threshold", "no threshold", "the last tenth", "used up", "others' counts", "a bucket",
    "a window", "a limit of one") {
  Rule rule;
  rule.domain = "api";
  rule.name = "r";
  rule.key = {"key"};
  rule.window = kDay;
  rule.algorithm = *one_of<Algorithm>({Algorithm::fixed_window, Algorithm::sliding_window,
                                       Algorithm::token_bucket})
                        .as("algorithm");
  rule.limit = *one_of<std::uint64_t>({10, 1, 3, 100, 1000, 2047, 5000}).as("limit");
  bool bucket = is_bucket(rule.algorithm);
  LimiterOptions options;
  options.replicated = true;
  options.incarnation = {1, 1};
  Limiter limiter(rule_set({rule}), options);
  std::set<std::uint64_t> thresholds = thresholds_of(rule.limit);
  std::vector<Entry> entries{{"key", "k"}};
  std::uint64_t used = 0;
  std::uint64_t own = 0;
  std::uint64_t others = 0;
  bool expected = false;
  bool counted = false;
  for (int step = *between(1, 40).as("steps"); step > 0; --step) {
    std::uint64_t hits = *rc::gen::weightedOneOf<std::uint64_t>(
        {{2, between<std::uint64_t>(1, 3)},
         {2, between<std::uint64_t>(1, std::max<std::uint64_t>(rule.limit / 8, 1))},
         {2, rc::gen::just(rule.limit * 93 / 100 - std::min(used, rule.limit * 93 / 100))},
         {1, rc::gen::just(rule.limit - std::min(used, rule.limit))}});
    if (*chance(15) && !bucket) {
      crdt::SeriesId id = limiter.series_of(0, {"api", entries, 1});
      WindowShape shape = window_shape(limiter.rules()->rules()[0], id);
      crdt::Cell cell;
      cell.id = {id, shape.epoch(shape.index(kStart))};
      others += *between<std::uint64_t>(1, rule.limit);
      cell.raise({{8, 8}, 0}, others);
      limiter.replica_side().absorb(cell);
      used = own + others;
      reached("others' counts");
    }
    if (limiter.check({"api", entries, hits}, kStart).allowed && hits > 0) {
      auto threshold = thresholds.upper_bound(used);
      expected |= threshold != thresholds.end() && *threshold <= used + hits;
      used += hits;
      own += hits;
      counted = true;
    }
    if (!*chance(60)) continue;
    std::vector<crdt::OwnCount> out;
    limiter.replica_side().drain(out, 10);
    RC_ASSERT(out.size() == (counted ? 1u : 0u));
    if (counted) {
      // The whole count travels, and how urgent that is; never what was decided.
      RC_ASSERT(out[0].value == own);
      RC_ASSERT(out[0].urgent == expected);
      reached("a threshold", expected);
      reached("no threshold", !expected);
      reached("the last tenth", expected && used * 10 >= rule.limit * 9 && used < rule.limit);
      reached("used up", used == rule.limit);
      reached("a bucket", bucket);
      reached("a window", !bucket);
      reached("a limit of one", rule.limit == 1);
    }
    counted = expected = false;
  }
}

/// Two engines in memory with a link that delivers at once, or not at all.
struct Pair {
  std::array<std::unique_ptr<node::Engine>, 2> engines;
  std::array<crdt::Incarnation, 2> ids{{{1, 1}, {2, 2}}};
  bool linked = true;
  Nanos now = kStart;
  std::vector<std::pair<std::size_t, crdt::Message>> sent;  // by whom

  explicit Pair(const std::shared_ptr<const RuleSet>& rules) {
    for (std::size_t i = 0; i < 2; ++i) {
      node::EngineOptions options;
      options.replica.self = {"r" + std::to_string(i), "n"};
      options.replica.peers = {{"r" + std::to_string(1 - i), "n"}};
      options.rules = rules;
      options.fresh_incarnation = [this, i] { return ids[i]; };
      node::EngineEvents events;
      events.send = [this, i](crdt::PeerIndex, const crdt::Message& message) {
        if (linked) sent.emplace_back(i, message);
      };
      events.reincarnated = [](const crdt::Incarnation&) {};
      events.log = [](const std::string&, const std::string&) {};
      engines[i] = std::make_unique<node::Engine>(std::move(options), nullptr, std::move(events));
      std::string error;
      RC_ASSERT(engines[i]->start(now, {}, error));
    }
    for (std::size_t i = 0; i < 2; ++i) engines[i]->peer_up(0, ids[1 - i], now);
  }
  std::uint64_t ask(std::size_t i, std::uint64_t hits) {
    std::vector<Entry> entries{{"key", "k"}};
    Decision decision;
    engines[i]->check({"api", entries, hits}, now, decision);
    return decision.allowed ? hits : 0;
  }
  void step(Nanos time) {
    now += time;
    for (auto& engine : engines) engine->pump(now);
    while (!sent.empty()) {
      auto messages = std::exchange(sent, {});
      for (auto& [from, message] : messages) {
        if (linked) engines[1 - from]->receive(0, ids[from], message, now);
      }
    }
  }
};

LAW(44, "the live bound of a rule covers what a peer at a steady rate admitted unseen", "cut off",
    "in touch", "a sliding window", "a window", "nothing unseen") {
  Rule rule;
  rule.domain = "api";
  rule.name = "r";
  rule.key = {"key"};
  rule.window = kDay;
  rule.algorithm =
      *one_of<Algorithm>({Algorithm::fixed_window, Algorithm::sliding_window}).as("algorithm");
  rule.limit = 1'000'000'000;
  Pair pair(rule_set({rule}));
  std::uint64_t units = *between<std::uint64_t>(1, 50).as("units each step");
  Nanos pause = *one_of<Nanos>({20, 50, 100}).as("step in ms") * kMillisecond;
  pair.ask(0, 1);  // it knows the rule of the series
  std::uint64_t admitted = 0;
  auto run = [&](Nanos time) {
    for (Nanos end = pair.now + time; pair.now < end;) {
      admitted += pair.ask(1, units);
      pair.step(pause);
    }
  };
  run(*between<Nanos>(2, 25) * kSecond);
  for (int round = *between(1, 3).as("rounds"); round > 0; --round) {
    if (*chance(60)) {
      pair.linked = false;
      run(*between<Nanos>(0, 60) * kSecond);
    } else {
      run(*between<Nanos>(0, 900) * kMillisecond);
    }
    std::vector<Entry> entries{{"key", "k"}};
    std::uint64_t known = pair.engines[0]->limiter().used(0, {"api", entries, 1}, pair.now) - 1;
    std::uint64_t unseen = admitted - std::min(admitted, known);
    std::uint64_t bound = pair.engines[0]->over_admission(0, pair.now);
    // One step may be on its way to the wire, and one was before the first message.
    RC_ASSERT(bound + 2 * units >= unseen);
    RC_ASSERT(bound <= 2 * unseen + kSecond / pause * units + units);
    reached("cut off", !pair.linked && unseen > 0);
    reached("in touch", pair.linked);
    reached("nothing unseen", unseen == 0);
    reached("a sliding window", rule.algorithm == Algorithm::sliding_window);
    reached("a window", rule.algorithm == Algorithm::fixed_window);
    if (!pair.linked) break;
  }
}

}  // namespace
}  // namespace weir::laws
