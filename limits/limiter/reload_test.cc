#include <gtest/gtest.h>
#include <weir/limits/limiter/published.h>
#include <weir/limits/replica_side.h>
#include <weir/limits/test_util.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace weir {
namespace {

using test::set;

constexpr Nanos kNow = 1'000'000 * kMinute;

Rule rule(std::uint64_t limit, Algorithm algorithm = Algorithm::fixed_window) {
  return test::rule("r", limit, algorithm);
}

Rule named(std::string name, std::uint64_t limit) {
  return test::rule(std::move(name), limit);
}

struct Under {
  Limiter limiter;
  Decision decision;
  explicit Under(Rule first, bool replicated = false)
      : limiter(set({first}), options(replicated)) {}
  static LimiterOptions options(bool replicated) {
    LimiterOptions made;
    made.replicated = replicated;
    made.incarnation = {1, 1};
    return made;
  }
  bool check(std::uint64_t hits, Nanos now = kNow, std::string_view id = {}) {
    Entry entry{"key", "k"};
    limiter.check({"api", {&entry, 1}, hits, id}, now, decision);
    return decision.allowed;
  }
  std::uint64_t left(Nanos now = kNow) {
    check(0, now);
    return decision.statuses.empty() ? ~std::uint64_t{0} : decision.statuses[0].remaining;
  }
  void reload(std::vector<Rule> rules) { limiter.reload(set(std::move(rules))); }
};

class EveryAlgorithm : public testing::TestWithParam<std::tuple<Algorithm, bool>> {
 protected:
  Algorithm algorithm() const { return std::get<0>(GetParam()); }
  Under under{rule(10, algorithm()), std::get<1>(GetParam())};
};

INSTANTIATE_TEST_SUITE_P(
    Reload, EveryAlgorithm,
    testing::Combine(testing::Values(Algorithm::fixed_window, Algorithm::sliding_window,
                                     Algorithm::sliding_log, Algorithm::token_bucket,
                                     Algorithm::leaky_bucket),
                     testing::Bool()),
    [](const auto& one) {
      return std::string(to_string(std::get<0>(one.param))) +
             (std::get<1>(one.param) ? "_replicated" : "_alone");
    });

TEST_P(EveryAlgorithm, RaisingGivesTheDifferenceAtOnce) {
  EXPECT_TRUE(under.check(10));
  EXPECT_FALSE(under.check(1));
  under.reload({rule(15, algorithm())});
  EXPECT_EQ(under.left(), 5u);
  EXPECT_TRUE(under.check(5));
  EXPECT_FALSE(under.check(1));
  EXPECT_EQ(under.decision.decider()->limit, 15u);
}

TEST_P(EveryAlgorithm, LoweringBelowWhatIsUsedDeniesUntilEnoughHasGone) {
  EXPECT_TRUE(under.check(8));
  under.reload({rule(6, algorithm())});
  EXPECT_EQ(under.left(), 0u);
  EXPECT_FALSE(under.check(3));
  Nanos wait = under.decision.decider()->retry_after;
  ASSERT_GT(wait, 0);
  ASSERT_LT(wait, 3 * kMinute);
  EXPECT_FALSE(under.check(3, kNow + wait - 1));
  EXPECT_TRUE(under.check(3, kNow + wait));
}

TEST_P(EveryAlgorithm, ALimitOfZeroDeniesEverythingAndBackIsWhatWasLeft) {
  EXPECT_TRUE(under.check(4));
  under.reload({rule(0, algorithm())});
  EXPECT_FALSE(under.check(1));
  EXPECT_EQ(under.decision.decider()->retry_after, kNever);
  under.reload({rule(10, algorithm())});
  EXPECT_EQ(under.left(), 6u);
}

TEST_P(EveryAlgorithm, ARuleThatGoesLeavesItsCountsForWhenItComesBack) {
  EXPECT_TRUE(under.check(7));
  under.reload({});
  EXPECT_TRUE(under.check(100));
  EXPECT_TRUE(under.decision.statuses.empty());
  under.limiter.sweep(kNow - kSecond);
  under.reload({rule(10, algorithm())});
  EXPECT_EQ(under.left(), 3u);
  EXPECT_EQ(under.limiter.counters(0).allowed, 2u);  // the first check and the peek
  under.reload({});
  std::vector<crdt::OwnCount> drained;
  under.limiter.replica_side().drain(drained, 10);
  under.limiter.sweep(kNow + kHour);
  EXPECT_EQ(under.limiter.series_count(), 0u);
  under.reload({rule(10, algorithm())});
  EXPECT_EQ(under.left(kNow + kHour), 10u);
}

TEST_P(EveryAlgorithm, AReservationIsSettledByTheRulesThatAreInForceThen) {
  Entry entry{"key", "k"};
  Ticket ticket = under.limiter.reserve({"api", {&entry, 1}, 8}, kNow, kMinute / 2, under.decision);
  ASSERT_TRUE(ticket);
  under.reload({rule(20, algorithm())});
  EXPECT_EQ(under.left(), 12u);
  EXPECT_TRUE(under.limiter.settle(ticket, 5, kNow).known);
  EXPECT_EQ(under.left(), 15u);
  ticket = under.limiter.reserve({"api", {&entry, 1}, 2}, kNow, kMinute / 2, under.decision);
  under.reload({});
  EXPECT_TRUE(under.limiter.settle(ticket, 1, kNow).known);
  under.reload({rule(20, algorithm())});
  EXPECT_EQ(under.left(), 14u);
}

TEST(Reload, InTheMiddleOfAWindowTheWindowStays) {
  Under under(rule(10));
  Nanos middle = kNow + 20 * kSecond;
  EXPECT_TRUE(under.check(10, middle));
  under.reload({rule(12)});
  EXPECT_TRUE(under.check(2, middle));
  EXPECT_FALSE(under.check(1, middle));
  EXPECT_EQ(under.decision.decider()->retry_after, 40 * kSecond);
}

TEST(Reload, AnotherWindowStartsAnew) {
  Under under(rule(10));
  EXPECT_TRUE(under.check(10));
  Rule longer = rule(10);
  longer.window = kHour;
  under.reload({longer});
  EXPECT_EQ(under.left(), 10u);
}

TEST(Reload, ABucketsDebtStandsExactlyWhenItsRateChanges) {
  Under under(rule(600, Algorithm::token_bucket));  // a token in 100 ms
  EXPECT_TRUE(under.check(600));
  Rule slower = rule(7, Algorithm::token_bucket);  // one in 60/7 s: no multiple of either's ticks
  slower.burst = 600;
  under.reload({slower});
  EXPECT_FALSE(under.check(1));
  EXPECT_EQ(under.decision.decider()->retry_after, (kMinute + 6) / 7);
  under.reload({rule(600, Algorithm::token_bucket)});
  EXPECT_FALSE(under.check(1));
  EXPECT_EQ(under.decision.decider()->retry_after, 100 * kMillisecond);
}

TEST(Reload, ABucketIsFullAtTheLatestWhenItWouldHaveBeen) {
  Rule quick = rule(10, Algorithm::token_bucket);
  quick.window = kSecond;
  Under under(quick);
  EXPECT_TRUE(under.check(10));
  Rule slow = quick;
  slow.limit = 1;
  slow.burst = 10;
  under.reload({slow});
  // Twice the burst, as max_debt allows, would have drained in 2 s.
  EXPECT_EQ(under.left(kNow + 2 * kSecond - 1), 1u);
  EXPECT_EQ(under.left(kNow + 2 * kSecond), 10u);
}

TEST(Reload, CostShadowAndMatchChangeWithTheNextDecision) {
  Under under(rule(10));
  EXPECT_TRUE(under.check(1));
  Rule dear = rule(10);
  dear.default_cost = 4;
  under.reload({dear});
  EXPECT_TRUE(under.check(2));
  EXPECT_FALSE(under.check(1));
  dear.shadow = true;
  under.reload({dear});
  EXPECT_TRUE(under.check(1));
  dear.match.push_back({"plan", MatchExact{"free"}});
  under.reload({dear});
  EXPECT_TRUE(under.check(1));
  EXPECT_TRUE(under.decision.statuses.empty());
}

TEST(Reload, CountersFollowTheRuleToAnotherPlaceInTheFile) {
  Under under(named("a", 2));
  under.check(1);
  under.check(1);
  under.check(1);
  under.reload({named("b", 5), named("a", 2)});
  under.check(1);
  EXPECT_EQ(under.limiter.counters(1).allowed, 2u);
  EXPECT_EQ(under.limiter.counters(1).denied, 2u);
  EXPECT_EQ(under.limiter.counters(0).allowed, 1u);
  EXPECT_EQ(under.limiter.counters(7).allowed, 0u);
}

TEST(Reload, AVersionNamesTheRulesOfADecision) {
  Under under(named("first", 2));
  under.check(1);
  EXPECT_EQ(under.decision.version, 1u);
  under.reload({named("second", 2)});
  EXPECT_EQ(under.limiter.rules(1)->rules()[0].name, "first");
  EXPECT_EQ(under.limiter.rules(2), under.limiter.rules());
  EXPECT_EQ(under.limiter.rules(3), nullptr);
  EXPECT_EQ(under.limiter.rules(0), nullptr);
  for (int i = 0; i < 8; ++i) under.reload({named("second", 2)});
  EXPECT_EQ(under.limiter.rules(2), nullptr);
}

TEST(Reload, ARepeatedRequestIsToldOfRulesThatAreStillThere) {
  Under under(rule(1));
  under.reload({named("a", 10), named("b", 5)});
  EXPECT_TRUE(under.check(2, kNow, "id"));
  EXPECT_EQ(under.decision.deciding, 1);
  under.reload({named("c", 7), named("a", 10)});
  EXPECT_TRUE(under.check(2, kNow, "id"));
  EXPECT_TRUE(under.decision.repeated);
  ASSERT_EQ(under.decision.statuses.size(), 1u);
  EXPECT_EQ(under.decision.statuses[0].rule, 1u);
  EXPECT_EQ(under.decision.statuses[0].remaining, 8u);
  EXPECT_EQ(under.decision.deciding, 0);
  EXPECT_EQ(under.decision.version, 3u);
}

TEST(Reload, MemoryIsBoundedOverTenThousand) {
  Under under(rule(10));
  std::vector<std::weak_ptr<const RuleSet>> seen;
  for (int i = 0; i < 10'000; ++i) {
    // Every other time a rule that never was before, with a series of its own.
    std::vector<Rule> rules{rule(static_cast<std::uint64_t>(i + 1), Algorithm::token_bucket)};
    if (i % 2 == 0) rules.push_back(named("r" + std::to_string(i), 5));
    auto fresh = set(rules);
    seen.push_back(fresh);
    under.limiter.reload(std::move(fresh));
    under.check(1, kNow + i * kSecond);
    if (i % 10 == 0) under.limiter.sweep(kNow + i * kSecond);
  }
  auto alive =
      std::count_if(seen.begin(), seen.end(), [](const auto& one) { return !one.expired(); });
  EXPECT_LE(alive, 8 + 17);
  EXPECT_LE(under.limiter.series_count(), 50u);
}

TEST(Reload, WhileThreadsDecide) {
  Rule first = rule(1'000'000'000);
  Limiter limiter(set({first}), {});
  std::atomic<bool> stop{false};
  constexpr int kThreads = 20;  // more than have a place of their own
  std::vector<std::thread> threads;
  std::atomic<std::uint64_t> admitted{0};
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      Entry entry{"key", "k"};
      Decision decision;
      std::uint64_t mine = 0;
      while (!stop) {
        limiter.check({"api", {&entry, 1}, 1}, kNow, decision);
        // Whatever the version, the rule is in it or was taken out.
        mine += decision.allowed && !decision.statuses.empty();
      }
      admitted += mine;
    });
  }
  std::vector<std::weak_ptr<const RuleSet>> seen;
  for (std::uint64_t i = 0; i < 300; ++i) {
    Rule changed = first;
    changed.limit += i;
    std::vector<Rule> rules{named("other", 1'000'000'000), changed};
    if (i % 3 == 0) rules.erase(rules.begin());
    auto fresh = set(rules);
    seen.push_back(fresh);
    limiter.reload(std::move(fresh));
    if (i % 16 == 0) limiter.sweep(kNow - kHour);
    std::this_thread::yield();
  }
  limiter.reload(set({first}));
  stop = true;
  for (std::thread& thread : threads) thread.join();
  Entry entry{"key", "k"};
  EXPECT_EQ(limiter.used(0, {"api", {&entry, 1}, 1}, kNow), admitted);
  EXPECT_EQ(limiter.counters(0).allowed, admitted);
  limiter.sweep(kNow - kHour);
  limiter.sweep(kNow - kHour);
  auto alive =
      std::count_if(seen.begin(), seen.end(), [](const auto& one) { return !one.expired(); });
  EXPECT_LE(alive, 8 + 17);
}

TEST(Prepared, ChangesNothingUntilItIsLoaded) {
  Under under(rule(10));
  EXPECT_TRUE(under.check(4));
  auto prepared = under.limiter.prepare(set({rule(20)}));
  EXPECT_EQ(under.left(), 6u);
  under.limiter.reload(std::move(prepared));
  EXPECT_EQ(under.left(), 16u) << "goes on with its counts";
  EXPECT_EQ(under.limiter.counters(0).allowed, 3u);
}

TEST(Prepared, MayBeOvertaken) {
  Under under(rule(10));
  auto first = under.limiter.prepare(set({named("a", 5), rule(20)}));
  auto second = under.limiter.prepare(set({rule(30)}));
  EXPECT_TRUE(under.check(4));
  under.reload({named("b", 7)});
  under.limiter.sweep(kNow + kDay);  // which forgets the numbers of rules that are gone
  under.limiter.reload(std::move(second));
  EXPECT_TRUE(under.check(1));
  under.limiter.reload(std::move(first));
  EXPECT_EQ(under.limiter.rules()->rules().size(), 2u);
  under.check(0);
  ASSERT_EQ(under.decision.statuses.size(), 2u);
  EXPECT_EQ(under.decision.statuses[0].remaining, 5u);
}

TEST(Prepared, OnAnyThreadWhileOthersDecideAndReload) {
  Under under(rule(1'000'000));
  std::atomic<bool> stop{false};
  std::thread preparing([&] {
    for (std::uint64_t i = 0; !stop; ++i) under.limiter.prepare(set({rule(1'000'000 + i % 3)}));
  });
  for (std::uint64_t i = 0; i < 300; ++i) {
    auto prepared = under.limiter.prepare(set({rule(1'000'000 + i % 5)}));
    ASSERT_TRUE(under.check(1));
    under.limiter.reload(std::move(prepared));
    under.limiter.sweep(kNow - kMinute);
  }
  stop = true;
  preparing.join();
  EXPECT_EQ(under.limiter.counters(0).allowed, 300u);
}

struct Watched {
  explicit Watched(int number, std::atomic<int>& count) : value(number), alive(count) { ++alive; }
  ~Watched() {
    value = -1;
    --alive;
  }
  int value;
  std::atomic<int>& alive;
};

TEST(Published, AReaderKeepsWhatItReads) {
  std::atomic<int> alive{0};
  Published<Watched, 3> published(std::make_unique<Watched>(1, alive));
  auto reclaim = [&] {
    published.reclaim([](Watched&) {});
    published.reclaim([](Watched&) {});
  };
  {
    auto own = published.use(0);
    auto shared = published.use(2);
    published.replace(std::make_unique<Watched>(2, alive));
    auto newer = published.use(2);
    reclaim();
    EXPECT_EQ(own->value, 1);
    EXPECT_EQ(shared->value, 1);
    EXPECT_EQ(newer->value, 2);
    EXPECT_EQ(alive, 2);
  }
  reclaim();
  EXPECT_EQ(alive, 2);  // the slot has read nothing newer
  EXPECT_EQ(published.use(0)->value, 2);
  reclaim();
  EXPECT_EQ(alive, 1);
  EXPECT_EQ(published.current().value, 2);
}

TEST(Published, TheSharedSlotIsLeftEventuallyHoweverBusyItIs) {
  std::atomic<int> alive{0};
  Published<Watched, 1> published(std::make_unique<Watched>(0, alive));
  std::atomic<bool> stop{false};
  std::vector<std::thread> readers;
  for (int i = 0; i < 2; ++i) {
    readers.emplace_back([&] {
      while (!stop) {
        auto one = published.use(0);
        if (one->value < 0) std::abort();
      }
    });
  }
  for (int i = 1; i <= 2000; ++i) {
    published.replace(std::make_unique<Watched>(i, alive));
    published.reclaim([](Watched&) {});
    if (i % 50 == 0) std::this_thread::yield();
  }
  for (int i = 0; i < 100'000 && alive > 1; ++i) {
    published.reclaim([](Watched&) {});
    std::this_thread::yield();
  }
  EXPECT_EQ(alive, 1);
  stop = true;
  for (std::thread& reader : readers) reader.join();
}

TEST(SweepInPieces, EndsWithWhatASweepWouldHaveForgotten) {
  Under under(rule(10));
  constexpr int kKeys = 20'000;
  for (int i = 0; i < kKeys; ++i) {
    std::string key = std::to_string(i);
    Entry entry{"key", key};
    under.limiter.check({"api", {&entry, 1}, 1}, kNow + (i < kKeys / 2 ? 0 : kHour),
                        under.decision);
  }
  ASSERT_EQ(under.limiter.series_count(), static_cast<std::size_t>(kKeys));
  int calls = 1;
  // The floor is that of the first call.
  std::optional<Limiter::Swept> swept = under.limiter.sweep_some(kNow + kHour / 2, 2000);
  for (; !swept; ++calls) swept = under.limiter.sweep_some(kNow + kDay, 2000);
  EXPECT_GE(calls, kKeys / 3000);
  EXPECT_EQ(swept->floor, kNow + kHour / 2);
  EXPECT_EQ(swept->forgotten, static_cast<std::size_t>(kKeys / 2));
  EXPECT_EQ(under.limiter.series_count(), static_cast<std::size_t>(kKeys / 2));
  while (!under.limiter.sweep_some(kNow + kDay, 2000)) {
  }
  EXPECT_EQ(under.limiter.series_count(), 0u);
}

/// A rule that comes, is used and goes while a pass is under way has series that the pass has not
/// seen: their number must not become another rule's.
TEST(SweepInPieces, KeepsTheNumbersOfRulesThatCameInBetween) {
  Under under(rule(1000));
  for (std::uint64_t i = 0; i < 40; ++i) {
    under.reload({rule(1000), test::rule("old", 5 + i, Algorithm::token_bucket)});
    under.check(1);
  }
  under.reload({rule(1000)});
  ASSERT_FALSE(under.limiter.sweep_some(kNow - kHour, 1));
  under.reload({rule(1000), test::rule("brief", 7, Algorithm::token_bucket)});
  ASSERT_TRUE(under.check(3));
  under.reload({rule(1000)});
  under.check(1);
  while (!under.limiter.sweep_some(kNow - kHour, 1)) {
  }
  // Numbers that were forgotten are given to these.
  std::vector<Rule> many = {rule(1000)};
  for (int i = 0; i < 100; ++i) {
    many.push_back(test::rule("new" + std::to_string(i), 1000, Algorithm::token_bucket));
  }
  under.reload(many);
  under.check(1);
  under.reload({rule(1000), test::rule("brief", 7, Algorithm::token_bucket)});
  under.check(0);
  ASSERT_EQ(under.decision.statuses.size(), 2u);
  EXPECT_EQ(under.decision.statuses[1].remaining, 4u);
}

TEST(Reload, AKeyEntryCalledEscrowMakesNoEscrowRule) {
  Rule merged = rule(10);
  merged.key = {"escrow", "key"};
  Under under{merged};
  std::vector<Entry> entries{{"escrow", "e"}, {"key", "k"}};
  Ticket ticket = under.limiter.reserve({"api", entries, 4}, kNow, kMinute / 2, under.decision);
  ASSERT_TRUE(ticket);
  Rule escrow = rule(10);
  escrow.enforcement = Enforcement::escrow;
  const crdt::SeriesId before = under.limiter.rule_identity(0);
  under.reload({escrow});
  EXPECT_NE(under.limiter.rule_identity(0), before);
  EXPECT_TRUE(under.limiter.settle(ticket, 3, kNow).known);
}

}  // namespace
}  // namespace weir
