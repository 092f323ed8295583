#include <weir/rpc/peers/skew_filter.h>

#include <gtest/gtest.h>

namespace weir::rpc {
namespace {

constexpr Nanos kNow = 1'700'000'000 * kSecond;

TEST(SkewFilter, KnowsNothingBeforeAnAnswer) {
  EXPECT_FALSE(SkewFilter().skew());
}

TEST(SkewFilter, TakesTheQuickestOfTheLastFew) {
  SkewFilter filter;
  const Nanos ahead = 3 * kSecond;
  // The answer waited for 90 ms on the way back, or on the way there.
  filter.add(kNow, 100 * kMillisecond, kNow + ahead - 95 * kMillisecond);
  ASSERT_TRUE(filter.skew());
  EXPECT_LE(std::abs(filter.skew()->ahead - ahead), filter.skew()->error);
  filter.add(kNow, 2 * kMillisecond, kNow + ahead - kMillisecond);
  EXPECT_EQ(filter.skew()->ahead, ahead);
  EXPECT_EQ(filter.skew()->error, kMillisecond + 1);
  filter.add(kNow, 100 * kMillisecond, kNow + ahead - 5 * kMillisecond);
  EXPECT_EQ(filter.skew()->ahead, ahead);
}

TEST(SkewFilter, AClockThatWasSetShowsAtOnce) {
  SkewFilter filter;
  filter.add(kNow, 2 * kMillisecond, kNow + kHour - kMillisecond);
  EXPECT_EQ(filter.skew()->ahead, kHour);
  filter.add(kNow, 20 * kMillisecond, kNow - 10 * kMillisecond);
  EXPECT_EQ(filter.skew()->ahead, 0);
}

TEST(SkewFilter, WhatIsToldIsBounded) {
  SkewFilter filter;
  filter.add(kNow, -5, std::numeric_limits<Nanos>::max());
  EXPECT_EQ(filter.skew()->ahead, kMaxTime - kNow);
  filter.add(kNow, 0, std::numeric_limits<Nanos>::min());
  EXPECT_EQ(filter.skew()->ahead, -kNow);
}

}  // namespace
}  // namespace weir::rpc
