// Hot series: several threads decide on one, in an order that is known, and are told what one
// thread alone would have been told.

#include <weir/limits/limiter.h>

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <semaphore>
#include <thread>

#include <weir/limits/lanes.h>

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
    // Fast enough to run dry while a lane is open.
    if (*chance(50)) rule.window = kSecond / 10;
  }
  return rule;
}

std::uint64_t drained(Limiter& limiter) {
  std::vector<crdt::OwnCount> counts;
  limiter.drain(counts, 100);
  std::uint64_t units = 0;
  for (const crdt::OwnCount& count : counts) units = std::max(units, count.value);
  return units;
}

LAW(42, "threads that decide on one series in turn are told what one thread alone would be",
    "a lane", "a lane of a bucket", "a lane in a window", "a bucket drained dry", "denied",
    "denied once lanes were taken back", "passed once lanes were taken back",
    "drained while lanes were open", "a window later", "the rules changed", "held and settled",
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
  std::uint64_t behind = 0;  // units that lanes hold
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
    // Units in lanes are few; and who has a lane is told what it knew when it took it.
    std::uint64_t most = should.remaining;
    while (!recent.empty() && recent.front().first < now - Lanes::kLife) recent.pop_front();
    for (const auto& [at, remaining] : recent) most = std::max(most, remaining);
    recent.push_back({now, should.remaining});
    RC_ASSERT(is.remaining <= most);
    RC_ASSERT(is.remaining + largest / 16 >= should.remaining);
    if (!got.allowed) {
      RC_ASSERT(is.remaining == should.remaining);
      reached("denied");
    }
    behind = should.remaining - std::min(should.remaining, is.remaining);
    reached("a lane", behind > 0);
    reached("a lane of a bucket", behind > 0 && bucket);
    reached("a lane in a window", behind > 0 && !bucket);
    return got.allowed;
  };
  for (int steps = *one_of<int>({2, 6, 12}).as("steps"); steps > 0; --steps) {
    switch (behind > 0 && *chance(40) ? *one_of<int>({0, 1, 2, 3}) : *choice(9)) {
      case 0:
        now += *one_of<Nanos>({kMicrosecond, 900 * kMicrosecond, 3 * kMillisecond, rule.window / 50,
                               rule.window - 1, 2 * rule.window, 3 * rule.window});
        reached("a window later", behind > 0 && !bucket);
        reached("a bucket drained dry", behind > 0 && bucket && plain.used(0, request, now) == 0);
        break;
      case 1:
        if (options.replicated) {
          reached("drained while lanes were open", behind > 0);
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
            // What becomes of a debt depends on the last touch, which lanes are no part of.
            now += 2 * Lanes::kLife;
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
        // All that is left, part of it in lanes; or one more.
        request.hits = 0;
        std::uint64_t left = plain.check(request, now).statuses[0].remaining;
        bool passes = *chance(50);
        reached("passed once lanes were taken back", behind > 0 && passes);
        reached("denied once lanes were taken back", behind > 0 && !passes);
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

LAW(42, "threads that race for one series admit its limit, neither a unit more nor one less",
    "a bucket", "a window", "used up", "threads without lanes") {
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
  reached("threads without lanes", threads > 2);
}

}  // namespace
}  // namespace weir::laws
