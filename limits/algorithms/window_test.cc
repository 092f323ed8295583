#include <weir/limits/algorithms/window.h>

#include <gtest/gtest.h>

#include <map>

namespace weir {
namespace {

using Counts = std::map<std::int64_t, std::uint64_t>;

Verdict ask(const WindowShape& shape, std::uint64_t limit, Nanos now, std::uint64_t cost,
            const Counts& counts) {
  std::int64_t newest = counts.empty() ? 0 : counts.rbegin()->first;
  return evaluate_window(shape, limit, now, cost, newest, [&](std::int64_t index) {
    auto at = counts.find(index);
    return at == counts.end() ? std::uint64_t{0} : at->second;
  });
}

TEST(FixedWindow, BoundaryBelongsToTheNewWindow) {
  WindowShape shape{kMinute, 0, false, 0};
  Counts full{{0, 10}};
  Verdict before = ask(shape, 10, kMinute - 1, 1, full);
  EXPECT_FALSE(before.allowed);
  EXPECT_EQ(before.retry_after, 1);
  EXPECT_TRUE(ask(shape, 10, kMinute, 1, full).allowed);
}

TEST(FixedWindow, RemainingAndResetAreThoseBeforeTheCost) {
  WindowShape shape{kMinute, 0, false, 0};
  Verdict verdict = ask(shape, 10, 20 * kSecond, 3, {{0, 4}});
  EXPECT_TRUE(verdict.allowed);
  EXPECT_EQ(verdict.remaining, 6u);
  EXPECT_EQ(verdict.reset, 40 * kSecond);
  EXPECT_EQ(ask(shape, 10, 20 * kSecond, 0, {}).reset, 0);
}

TEST(FixedWindow, AFullNextWindowOfAFasterClockIsWaitedFor) {
  WindowShape shape{kMinute, 0, false, 0};
  Verdict verdict = ask(shape, 10, 59 * kSecond, 1, {{0, 10}, {1, 10}});
  EXPECT_EQ(verdict.retry_after, 61 * kSecond);
}

TEST(SlidingWindow, WeightsThePreviousWindowByItsOverlap) {
  WindowShape shape{kMinute, 1, false, 0};
  Counts counts{{0, 100}, {1, 30}};
  // 15 s into the window three quarters of 100 still count.
  EXPECT_EQ(ask(shape, 200, 75 * kSecond, 1, counts).remaining, 95u);
  Verdict denied = ask(shape, 100, 75 * kSecond, 1, counts);
  EXPECT_FALSE(denied.allowed);
  // 100 * (60 - e) / 60 <= 69 at e = 18.6 s
  EXPECT_EQ(denied.retry_after, 3'600 * kMillisecond);
  EXPECT_TRUE(ask(shape, 100, 75 * kSecond + denied.retry_after, 1, counts).allowed);
  EXPECT_FALSE(ask(shape, 100, 75 * kSecond + denied.retry_after - 1, 1, counts).allowed);
}

TEST(SlidingWindow, StrictRingCountsTheOldestWhole) {
  WindowShape shape{10 * kSecond, 6, true, 0};
  Counts counts{{0, 10}};
  EXPECT_FALSE(ask(shape, 10, 69 * kSecond, 1, counts).allowed);
  EXPECT_TRUE(ask(shape, 10, 70 * kSecond, 1, counts).allowed);
}

TEST(Window, ACostAboveTheLimitNeverPasses) {
  WindowShape shape{kMinute, 1, false, 0};
  EXPECT_EQ(ask(shape, 10, kSecond, 11, {}).retry_after, kNever);
  EXPECT_EQ(ask(shape, 0, kSecond, 1, {}).retry_after, kNever);
}

TEST(Window, ALimitBelowUsageLeavesNothingAndDoesNotWrap) {
  WindowShape shape{kMinute, 0, false, 0};
  Verdict verdict = ask(shape, 5, kSecond, 1, {{0, ~std::uint64_t{0}}});
  EXPECT_FALSE(verdict.allowed);
  EXPECT_EQ(verdict.remaining, 0u);
}

TEST(Window, EpochLivesUntilNoDecisionReadsIt) {
  WindowShape shape{10 * kSecond, 6, false, 3 * kSecond};
  EXPECT_EQ(shape.start(5), 47 * kSecond);
  EXPECT_EQ(shape.epoch(5), (crdt::Epoch{47 * kSecond, 117 * kSecond}));
  EXPECT_EQ(shape.index(47 * kSecond), 5);
  EXPECT_EQ(shape.index(47 * kSecond - 1), 4);
}

}  // namespace
}  // namespace weir
