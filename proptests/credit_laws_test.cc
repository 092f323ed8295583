// Hot series: several threads decide on one, in an order that is known, and are told what one
// thread alone would have been told.

#include <weir/limits/replica_side.h>

#include <array>
#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <semaphore>
#include <thread>

#include <weir/limits/series/credits.h>

#include "generators.h"
#include "law.h"
#include "schedules.h"

namespace weir::laws {
namespace {

/// A thread that does what it is told, while the teller waits.
class Worker {
 public:
  Worker()
      : thread_([this] {
          for (;;) {
            told_.acquire();
            if (!what_) return;
            what_();
            done_.release();
          }
        }) {}
  ~Worker() {
    what_ = nullptr;
    told_.release();
    thread_.join();
  }
  void run(std::function<void()> what) {
    what_ = std::move(what);
    told_.release();
    done_.acquire();
  }

 private:
  std::function<void()> what_;
  std::binary_semaphore told_{0};
  std::binary_semaphore done_{0};
  std::thread thread_;
};

Rule hot_rule(std::uint64_t limit) {
  Rule rule;
  rule.domain = "api";
  rule.name = "hot";
  rule.key = {"key"};
  rule.window = *one_of<Nanos>({kSecond * 4, kMinute, kHour}).as("window");
  rule.algorithm =
      *one_of<Algorithm>({Algorithm::token_bucket, Algorithm::token_bucket, Algorithm::fixed_window,
                          Algorithm::sliding_window, Algorithm::leaky_bucket})
           .as("algorithm");
  rule.slots = 1;
  rule.limit = limit;
  if (is_bucket(rule.algorithm)) {
    rule.burst = limit;
    // Fast enough to run dry while a credit is open.
    if (*chance(50)) rule.window = kSecond / 10;
  }
  return rule;
}

std::uint64_t limit_of(const Rule& rule) {
  return is_bucket(rule.algorithm) ? rule.burst : rule.limit;
}

std::uint64_t drained(Limiter& limiter) {
  std::vector<crdt::OwnCount> counts;
  limiter.replica_side().drain(counts, 100);
  std::uint64_t units = 0;
  for (const crdt::OwnCount& count : counts) units = std::max(units, count.value);
  return units;
}

std::map<crdt::CellId, std::uint64_t> all_drained(Limiter& limiter) {
  std::vector<crdt::OwnCount> counts;
  limiter.replica_side().drain(counts, 1000);
  std::map<crdt::CellId, std::uint64_t> units;
  for (const crdt::OwnCount& count : counts) units[count.cell] = count.value;
  return units;
}

LAW(42, "threads that decide on one series in turn are told what one thread alone would be",
    "a credit", "a credit of a bucket", "a credit in a window", "a bucket drained dry", "denied",
    "denied once credits were taken back", "passed once credits were taken back",
    "drained while credits were open", "a window later", "the rules changed", "held and settled",
    "swept") {
  std::uint64_t limit = *one_of<std::uint64_t>({700, 2000, 5000, 20000}).as("limit");
  Rule rule = hot_rule(limit);
  std::uint64_t largest = limit;
  bool bucket = is_bucket(rule.algorithm);
  LimiterOptions options;
  options.max_series = 100;
  options.incarnation = {1, 1};
  options.replicated = *chance(40).as("replicated");
  Limiter limiter(rule_set({rule}), options);
  Limiter plain(rule_set({rule}), options);
  std::vector<std::unique_ptr<Worker>> workers;
  for (int i = *between(2, 3).as("threads"); i > 0; --i) {
    workers.push_back(std::make_unique<Worker>());
  }
  Entry entry{"key", "k"};
  Request request{"api", {&entry, 1}};
  Nanos now = kStart;
  std::uint64_t behind = 0;  // units that credits hold
  std::deque<std::pair<Nanos, std::uint64_t>> recent;
  auto agree = [&] {
    request.hits = 0;
    Decision wanted = plain.check(request, now);
    Decision got = limiter.check(request, now);
    RC_ASSERT(got.statuses[0].remaining == wanted.statuses[0].remaining);
    RC_ASSERT(got.statuses[0].reset == wanted.statuses[0].reset);
    RC_ASSERT(limiter.used(0, request, now) == plain.used(0, request, now));
    behind = 0;
  };
  auto decide = [&](std::size_t turn, std::uint64_t hits) {  // returns whether it passed
    request.hits = hits;
    Decision wanted = plain.check(request, now);
    Decision got;
    workers[turn % workers.size()]->run([&] { limiter.check(request, now, got); });
    const RuleStatus& is = got.statuses.at(0);
    const RuleStatus& should = wanted.statuses.at(0);
    RC_ASSERT(got.allowed == wanted.allowed);
    RC_ASSERT(is.retry_after == should.retry_after);
    RC_ASSERT(is.delay == should.delay);
    // Units in credits are few; and who has a credit is told what it knew when it took it.
    std::uint64_t most = should.remaining;
    while (!recent.empty() && recent.front().first < now - Credits::kLifetime) recent.pop_front();
    for (const auto& [at, remaining] : recent) most = std::max(most, remaining);
    recent.push_back({now, should.remaining});
    RC_ASSERT(is.remaining <= most);
    RC_ASSERT(is.remaining + largest / 16 >= should.remaining);
    if (!got.allowed) {
      RC_ASSERT(is.remaining == should.remaining);
      reached("denied");
    }
    behind = should.remaining - std::min(should.remaining, is.remaining);
    reached("a credit", behind > 0);
    reached("a credit of a bucket", behind > 0 && bucket);
    reached("a credit in a window", behind > 0 && !bucket);
    return got.allowed;
  };
  for (int steps = *one_of<int>({5, 10, 20}).as("steps"); steps > 0; --steps) {
    switch (behind > 0 && *chance(60) ? *one_of<int>({0, 0, 0, 1, 2, 3}) : *choice(9)) {
      case 0:
        now += *one_of<Nanos>({kMicrosecond, 900 * kMicrosecond, 3 * kMillisecond, rule.window / 50,
                               rule.window - 1, 2 * rule.window, 3 * rule.window});
        reached("a window later", behind > 0 && !bucket);
        reached("a bucket drained dry", behind > 0 && bucket && plain.used(0, request, now) == 0);
        break;
      case 1:
        if (options.replicated) {
          reached("drained while credits were open", behind > 0);
          RC_ASSERT(drained(limiter) == drained(plain));
          behind = 0;
        } else {
          agree();
        }
        break;
      case 2:
        if (*chance(50)) {
          reached("the rules changed", behind > 0);
          if (bucket) {
            // What becomes of a debt depends on the last touch, which credits are no part of.
            now += 2 * Credits::kLifetime;
            if (!decide(0, 1)) break;
          }
          (bucket ? rule.burst : rule.limit) = *one_of<std::uint64_t>({700, 2000, 5000, 20000});
          largest = std::max({largest, rule.limit, rule.burst});
          limiter.reload(rule_set({rule}));
          plain.reload(rule_set({rule}));
        } else if (*chance(50)) {
          reached("swept", behind > 0);
          std::size_t gone = plain.sweep(now);
          RC_ASSERT(limiter.sweep(now) == gone);
        } else {
          reached("held and settled", behind > 0);
          request.hits = *between<std::uint64_t>(1, 50);
          Decision decision;
          Ticket mine = limiter.reserve(request, now, kSecond, decision);
          Ticket others = plain.reserve(request, now, kSecond, decision);
          RC_ASSERT(static_cast<bool>(mine) == static_cast<bool>(others));
          std::uint64_t actual = *between<std::uint64_t>(0, 60);
          limiter.settle(mine, actual, now);
          plain.settle(others, actual, now);
        }
        break;
      case 3: {
        // All that is left, part of it in credits; or one more.
        request.hits = 0;
        std::uint64_t left = plain.check(request, now).statuses[0].remaining;
        bool passes = *chance(50);
        reached("passed once credits were taken back", behind > 0 && passes);
        reached("denied once credits were taken back", behind > 0 && !passes);
        RC_ASSERT(decide(0, passes ? std::max<std::uint64_t>(left, 1) : left + 1) ==
                  (passes && left > 0));
        break;
      }
      default: {
        Nanos step = *one_of<Nanos>({0, 100, kMicrosecond, 20 * kMicrosecond, 300 * kMicrosecond});
        std::uint64_t hits = *one_of<std::uint64_t>({1, 1, 2, 7, 40});
        int turns = *one_of<int>({1, 20, 50, 90});
        bool shuffled = *chance(50);
        for (int i = 0; i < turns; ++i) {
          now += step;
          decide(static_cast<std::size_t>(shuffled ? i + i / 5 : i), hits);
        }
      }
    }
  }
  agree();
  if (options.replicated) RC_ASSERT(drained(limiter) == drained(plain));
}

LAW(42, "threads whose requests meet several rules, some hot, are told what one thread would be",
    "a credit", "denied by another rule while there is a credit", "by a shadow rule alone",
    "two hot rules", "denied by the hot rule", "a peek", "a count beyond 32 bits") {
  constexpr std::uint64_t kHuge = std::uint64_t{1} << 34;
  const std::uint64_t limit = *one_of<std::uint64_t>({2000, 5000, 20000, kHuge}).as("limit");
  std::vector<Rule> rules{hot_rule(limit)};
  const bool two = *chance(30).as("two hot rules");
  if (two) {
    rules.push_back(hot_rule(*one_of<std::uint64_t>({2000, 5000, 20000})));
    rules.back().name = "hot, too";
  }
  const bool huge = limit == kHuge && !two;
  if (huge) {
    rules[0].algorithm = Algorithm::fixed_window;
    rules[0].window = kMinute;
    rules[0].burst = 0;
  }
  const std::uint64_t of_a_user = *one_of<std::uint64_t>({3, 30, 1000}).as("of a user");
  rules.push_back(hot_rule(huge ? kHuge : of_a_user));
  rules.back().name = "user";
  rules.back().key = {"user"};
  rules.back().shadow = *chance(20).as("shadow");
  std::swap(rules.back(), rules[*between<std::size_t>(0, rules.size() - 1)]);
  LimiterOptions options;
  options.max_series = 100;
  options.incarnation = {1, 1};
  options.replicated = *chance(30).as("replicated");
  Limiter limiter(rule_set(rules), options);
  Limiter plain(rule_set(rules), options);
  std::vector<std::unique_ptr<Worker>> workers;
  for (int i = *between(2, 3).as("threads"); i > 0; --i) {
    workers.push_back(std::make_unique<Worker>());
  }
  const std::array<std::string, 4> users{"u", "v", "w", "x"};
  std::array<Entry, 2> entries{Entry{"key", "k"}, Entry{"user", users[0]}};
  Request request{"api", entries};
  Nanos now = kStart;
  bool credits = false;
  std::deque<std::pair<Nanos, std::vector<RuleStatus>>> recent;
  auto decide = [&](std::size_t turn) {
    Decision wanted = plain.check(request, now);
    Decision got;
    workers[turn % workers.size()]->run([&] { limiter.check(request, now, got); });
    RC_ASSERT(got.allowed == wanted.allowed);
    RC_ASSERT(got.statuses.size() == rules.size());
    if (!got.allowed) RC_ASSERT(got.deciding == wanted.deciding);
    while (!recent.empty() && recent.front().first < now - Credits::kLifetime) recent.pop_front();
    recent.push_back({now, wanted.statuses});
    for (std::size_t i = 0; i < rules.size(); ++i) {
      const RuleStatus& is = got.statuses[i];
      const RuleStatus& should = wanted.statuses[i];
      RC_ASSERT(is.allowed == should.allowed);
      RC_ASSERT(is.rule == should.rule);
      RC_ASSERT(is.retry_after == should.retry_after);
      RC_ASSERT(is.delay == should.delay);
      std::uint64_t most = 0;
      for (const auto& [at, statuses] : recent) most = std::max(most, statuses[i].remaining);
      RC_ASSERT(is.remaining <= most);
      RC_ASSERT(is.remaining + is.limit / 16 >= should.remaining);
      credits |= is.remaining < should.remaining;
      bool denies = !is.allowed && !is.shadow;
      reached("denied by another rule while there is a credit",
              credits && denies && is.limit <= 1000);
      reached("denied by the hot rule", denies && is.limit > 1000);
      reached("by a shadow rule alone", got.allowed && !is.allowed);
    }
    reached("a credit", credits);
    reached("two hot rules", credits && two);
    reached("a count beyond 32 bits",
            credits && huge && wanted.statuses[0].remaining < kHuge - 0xFFFFFFFFu);
    reached("a peek", credits && request.hits == 0);
  };
  if (huge) {
    request.hits = 0xFFFFFFFFu - *between<std::uint64_t>(50, 1000).as("short of 32 bits");
    decide(0);
  }
  for (int steps = *one_of<int>({3, 6, 12}).as("steps"); steps > 0; --steps) {
    if (*chance(huge ? 3 : 20)) {
      now += *one_of<Nanos>({900 * kMicrosecond, 3 * kMillisecond, rules[0].window / 50,
                             rules[0].window - 1, 2 * rules[0].window});
    }
    Nanos step = *one_of<Nanos>({0, 100, kMicrosecond, 20 * kMicrosecond, 300 * kMicrosecond});
    request.hits = *one_of<std::uint64_t>({1, 1, 1, 2, 7, 40});
    int turns = *one_of<int>({20, 60, 120});
    for (int i = 0; i < turns; ++i) {
      now += step;
      entries[1].value = users[static_cast<std::size_t>(i) % *one_of<std::size_t>({1, 4})];
      decide(static_cast<std::size_t>(i + i / 5));
    }
    if (*chance(30)) {
      request.hits = *one_of<std::uint64_t>({0, 1500});
      decide(0);
    }
  }
  request.hits = 0;
  for (std::size_t i = 0; i < rules.size(); ++i) {
    for (const std::string& user : users) {
      entries[1].value = user;
      auto rule = static_cast<std::uint32_t>(i);
      RC_ASSERT(limiter.used(rule, request, now) == plain.used(rule, request, now));
    }
  }
  if (options.replicated) RC_ASSERT(all_drained(limiter) == all_drained(plain));
}

LAW(42, "threads that race for one series admit its limit, neither a unit more nor one less",
    "a bucket", "a window", "used up", "threads without credits") {
  std::uint64_t limit = *one_of<std::uint64_t>({1000, 20'000, 60'000}).as("limit");
  Rule rule = hot_rule(limit);
  Limiter limiter(rule_set({rule}), {});
  std::uint64_t hits = *one_of<std::uint64_t>({1, 3}).as("hits");
  // Beyond the fifteenth they have none.
  std::uint64_t threads = *one_of<std::uint64_t>({2, 2, 2, 18}).as("threads");
  std::uint64_t decisions = 20'000 / threads;
  std::atomic<std::uint64_t> admitted{0};
  auto run = [&] {
    Entry entry{"key", "k"};
    Decision decision;
    std::uint64_t mine = 0;
    for (std::uint64_t i = 0; i < decisions; ++i) {
      limiter.check({"api", {&entry, 1}, hits}, kStart, decision);
      if (decision.allowed) mine += hits;
    }
    admitted += mine;
  };
  std::vector<std::thread> all;
  for (std::uint64_t i = 0; i < threads; ++i) all.emplace_back(run);
  for (std::thread& one : all) one.join();
  std::uint64_t asked = threads * decisions;
  RC_ASSERT(admitted == std::min(asked, limit / hits) * hits);
  Entry entry{"key", "k"};
  RC_ASSERT(limiter.used(0, {"api", {&entry, 1}}, kStart) == admitted);
  reached("a bucket", is_bucket(rule.algorithm));
  reached("a window", !is_bucket(rule.algorithm));
  reached("used up", admitted + hits > limit);
  reached("threads without credits", threads > 2);
}

LAW(42, "threads that race for a hot rule and others consume from all of them or from none",
    "the hot rule is full", "a narrow rule is full", "all passed") {
  std::vector<Rule> rules{hot_rule(*one_of<std::uint64_t>({1000, 20'000, 60'000}).as("limit"))};
  rules.push_back(hot_rule(*one_of<std::uint64_t>({100, 4000, 100'000}).as("of a user")));
  rules.back().name = "user";
  rules.back().key = {"user"};
  Limiter limiter(rule_set(rules), {});
  constexpr int kDecisions = 10'000;
  const std::array<std::string, 4> users{"u", "v", "w", "x"};
  auto request = [&](std::array<Entry, 2>& entries, std::size_t user) {
    entries = {Entry{"key", "k"}, Entry{"user", users[user % users.size()]}};
    return Request{"api", entries};
  };
  std::atomic<std::uint64_t> admitted{0};
  auto run = [&](std::size_t from) {
    std::array<Entry, 2> entries;
    Decision decision;
    std::uint64_t mine = 0;
    for (std::size_t i = 0; i < kDecisions; ++i) {
      limiter.check(request(entries, from + i), kStart, decision);
      mine += decision.allowed;
    }
    admitted += mine;
  };
  std::thread other([&] { run(1); });
  run(0);
  other.join();
  std::array<Entry, 2> entries;
  std::uint64_t of_users = 0;
  bool full = false;
  for (std::size_t user = 0; user < users.size(); ++user) {
    std::uint64_t used = limiter.used(1, request(entries, user), kStart);
    full |= used == limit_of(rules[1]);
    of_users += used;
  }
  RC_ASSERT(limiter.used(0, request(entries, 0), kStart) == admitted);
  RC_ASSERT(of_users == admitted);
  // As every user asks as often, the limits alone say how many pass.
  std::uint64_t most = std::min<std::uint64_t>(2 * kDecisions, limit_of(rules[0]));
  RC_ASSERT(admitted == std::min(most, 4 * std::min<std::uint64_t>(limit_of(rules[1]), 5000)));
  reached("a narrow rule is full", full);
  reached("the hot rule is full", admitted == limit_of(rules[0]));
  reached("all passed", admitted == 2 * kDecisions);
}

}  // namespace
}  // namespace weir::laws
