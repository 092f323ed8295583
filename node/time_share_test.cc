#include <weir/node/time_share.h>

#include <gtest/gtest.h>

namespace weir::node {
namespace {

TEST(TimeShareTest, ABurstIsFree) {
  TimeShare share(50, 100 * kMillisecond);
  EXPECT_EQ(share.charge(60 * kMillisecond, kSecond), 0);
  EXPECT_EQ(share.charge(40 * kMillisecond, kSecond), 0);
  EXPECT_EQ(share.charge(1 * kMillisecond, kSecond), 2 * kMillisecond);
}

TEST(TimeShareTest, WhoWaitsAsToldHasItsPart) {
  TimeShare share(25, 10 * kMillisecond);
  Nanos now = kSecond;
  const Nanos begin = now;
  Nanos had = 0;
  for (int i = 0; i < 1000; ++i) {
    const Nanos took = (1 + i % 7) * kMillisecond;
    now += took;
    had += took;
    now += share.charge(took, now);
  }
  EXPECT_NEAR(static_cast<double>(had) / static_cast<double>(now - begin), 0.25, 0.01);
}

TEST(TimeShareTest, WhoUsesLessIsNeverHeldUp) {
  TimeShare share(50, 5 * kMillisecond);
  Nanos now = 0;
  for (int i = 0; i < 1000; ++i) {
    now += 10 * kMillisecond;
    EXPECT_EQ(share.charge(4 * kMillisecond, now), 0);
  }
}

TEST(TimeShareTest, AClockThatStandsStillOrRunsBackCostsNobodyForever) {
  TimeShare share(50, 0);
  EXPECT_GT(share.charge(kSecond, kHour), 0);
  EXPECT_LE(share.charge(0, 0), 2 * kSecond);
  EXPECT_EQ(share.charge(0, 3 * kHour), 0);
}

}  // namespace
}  // namespace weir::node
