#include <weir/limits/limiter/overflow.h>

#include <gtest/gtest.h>
#include <weir/limits/test_util.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <random>
#include <thread>
#include <vector>

namespace weir {
namespace {

using test::rule;

constexpr Nanos kNow = 1'000'000 * kMinute;

struct Compiled {
  Rule source;
  RuleNumbers numbers;
  CompiledRule rule;

  explicit Compiled(Rule given) : source(std::move(given)) {
    if (is_bucket(source.algorithm)) source.burst = source.limit;
    rule = compile(source, numbers.number_of({1, 1}, source), {1, 1});
  }
  WindowAt window(Nanos now) const {
    return rule.bucket_cell || rule.log ? WindowAt{} : window_at(rule, {}, now);
  }
  const RuleNumbers::Kept& kept() const { return numbers.at(rule.number); }
};

SeriesId id(std::uint64_t number) {
  return {number, number};
}

void count(Overflow& overflow, const Compiled& of, std::uint64_t series, std::uint64_t units,
           Nanos now) {
  Overflow::Turn(overflow).count(of.rule, id(series), of.window(now), units, now);
}

std::uint64_t used(Overflow& overflow, const Compiled& of, std::uint64_t series, Nanos now) {
  return overflow.used(of.rule, id(series), of.window(now), now);
}

class OverflowOf : public testing::TestWithParam<Algorithm> {
 protected:
  Compiled of{rule("r", 10, GetParam())};
  Overflow overflow;
};

INSTANTIATE_TEST_SUITE_P(Overflow, OverflowOf,
                         testing::Values(Algorithm::fixed_window, Algorithm::sliding_window,
                                         Algorithm::sliding_log, Algorithm::token_bucket),
                         [](const auto& one) { return std::string(to_string(one.param)); });

TEST_P(OverflowOf, NeverCountsLessThanOneWindowBackWhateverTheInstant) {
  std::mt19937_64 random(1);
  std::vector<std::pair<Nanos, std::uint64_t>> counted;  // of series 0
  Nanos now = kNow;
  for (int i = 0; i < 2'000; ++i) {
    now += static_cast<Nanos>(random() % static_cast<std::uint64_t>(kMinute / 8));
    std::uint64_t least = 0;
    Nanos since = GetParam() == Algorithm::fixed_window ? of.window(now).start : now - kMinute + 1;
    for (const auto& [at, units] : counted) least += at >= since ? units : 0;
    ASSERT_GE(used(overflow, of, 0, now), least) << i;
    std::uint64_t units = random() % 5;
    count(overflow, of, 0, units, now);
    counted.emplace_back(now, units);
    count(overflow, of, 1 + random() % 100, units, now);
  }
}

TEST_P(OverflowOf, WhatWasCountedIsOverAfterTwoPeriods) {
  EXPECT_EQ(used(overflow, of, 7, kNow), 0u);
  count(overflow, of, 7, 4, kNow);
  EXPECT_EQ(used(overflow, of, 7, kNow), 4u);
  EXPECT_EQ(used(overflow, of, 8, kNow), 0u);
  Overflow::Period period = Overflow::period_of(of.rule, of.window(kNow), kNow);
  EXPECT_GT(period.expiry, kNow);
  EXPECT_LE(period.expiry, kNow + 2 * kMinute + 2);
  EXPECT_EQ(used(overflow, of, 7, period.expiry - 1), 4u);
  EXPECT_EQ(used(overflow, of, 7, period.expiry), 0u);
}

TEST_P(OverflowOf, AVerdictIsOfWhatIsLeft) {
  count(overflow, of, 7, 4, kNow);
  Overflow::Turn turn(overflow);
  Verdict fits = turn.evaluate(of.rule, id(7), of.window(kNow), 6, kNow);
  EXPECT_TRUE(fits.allowed);
  EXPECT_EQ(fits.remaining, 6u);
  EXPECT_EQ(fits.retry_after, 0);
  Verdict denied = turn.evaluate(of.rule, id(7), of.window(kNow), 7, kNow);
  EXPECT_FALSE(denied.allowed);
  EXPECT_GT(denied.retry_after, 0);
  EXPECT_EQ(denied.retry_after, denied.reset);
}

TEST(Overflow, AMovedWindowIsCountedOnceHoweverOftenItMoves) {
  for (Algorithm algorithm : {Algorithm::fixed_window, Algorithm::sliding_window}) {
    Compiled of(rule("r", 10, algorithm));
    Overflow overflow;
    SeriesEntry entry{};
    entry.set_form(Form::window);
    entry.time = of.window(kNow).start;
    entry.count[0] = 3;
    entry.count[1] = 1;
    entry.count[2] = 2;  // of the window before, which a fixed one does not ask for
    for (int i = 0; i < 3; ++i) overflow.move_out(entry, id(7), of.kept(), kNow);
    EXPECT_EQ(used(overflow, of, 7, kNow), algorithm == Algorithm::fixed_window ? 4u : 6u);
    count(overflow, of, 7, 2, kNow);
    EXPECT_EQ(used(overflow, of, 7, kNow), algorithm == Algorithm::fixed_window ? 6u : 8u);
  }
}

TEST(Overflow, AMovedBucketCountsPartsOfAUnitAsWhole) {
  Compiled of(rule("r", 10, Algorithm::token_bucket));
  Overflow overflow;
  SeriesEntry entry{};
  begin_compact(of.rule, entry, 4, kNow);
  overflow.move_out(entry, id(7), of.kept(), kNow + 1);  // by then it owes a little less than 4
  EXPECT_EQ(used(overflow, of, 7, kNow + 1), 4u);
}

TEST(Overflow, NoTwoThreadsPassTheLimitTogether) {
  Compiled of(rule("r", 1000));
  Overflow overflow;
  std::atomic<int> passed{0};
  auto ask = [&] {
    for (int i = 0; i < 1000; ++i) {
      Overflow::Turn turn(overflow);
      if (!turn.evaluate(of.rule, id(7), of.window(kNow), 1, kNow).allowed) continue;
      turn.count(of.rule, id(7), of.window(kNow), 1, kNow);
      ++passed;
    }
  };
  std::thread other(ask);
  ask();
  other.join();
  EXPECT_EQ(passed, 1000);
}

}  // namespace
}  // namespace weir
