#include <weir/limits/algorithms/log_window.h>

#include <gtest/gtest.h>

#include <vector>

namespace weir {
namespace {

using Log = std::vector<LogEntry>;

TEST(SlidingLog, AUnitCountsForExactlyOneWindow) {
  Log log{{100 * kSecond, 3}};
  EXPECT_EQ(log_used(log, kMinute, 100 * kSecond), 3u);
  EXPECT_EQ(log_used(log, kMinute, 160 * kSecond - 1), 3u);
  EXPECT_EQ(log_used(log, kMinute, 160 * kSecond), 0u);
}

TEST(SlidingLog, TheWaitIsUntilEnoughOfTheOldestHaveLeft) {
  Log log{{100 * kSecond, 1}, {110 * kSecond, 2}, {130 * kSecond, 2}};
  Nanos now = 140 * kSecond;
  EXPECT_TRUE(evaluate_log(log, kMinute, 6, now, 1).allowed);
  EXPECT_EQ(evaluate_log(log, kMinute, 6, now, 1).remaining, 1u);
  EXPECT_EQ(evaluate_log(log, kMinute, 5, now, 1).retry_after, 20 * kSecond);
  EXPECT_EQ(evaluate_log(log, kMinute, 5, now, 2).retry_after, 30 * kSecond);
  EXPECT_EQ(evaluate_log(log, kMinute, 5, now, 3).retry_after, 30 * kSecond);
  EXPECT_EQ(evaluate_log(log, kMinute, 5, now, 4).retry_after, 50 * kSecond);
  EXPECT_EQ(evaluate_log(log, kMinute, 5, now, 6).retry_after, kNever);
  EXPECT_EQ(evaluate_log(log, kMinute, 5, now, 1).reset, 50 * kSecond);
}

TEST(SlidingLog, WhatAFasterClockAdmittedCountsAlready) {
  Log log{{100 * kSecond, 5}};
  Verdict verdict = evaluate_log(log, kMinute, 5, 99 * kSecond, 1);
  EXPECT_FALSE(verdict.allowed);
  EXPECT_EQ(verdict.retry_after, 61 * kSecond);
}

TEST(SlidingLog, MoreThanTheLimitLeavesNothingAndDoesNotWrap) {
  Log log{{100 * kSecond, 5}, {101 * kSecond, ~std::uint64_t{0}}};
  Verdict verdict = evaluate_log(log, kMinute, 5, 102 * kSecond, 0);
  EXPECT_FALSE(verdict.allowed);
  EXPECT_EQ(verdict.remaining, 0u);
  EXPECT_EQ(verdict.retry_after, 59 * kSecond);
  EXPECT_EQ(log_used(log, kMinute, 102 * kSecond), ~std::uint64_t{0});
}

TEST(SlidingLog, AnEmptyLogAndALimitOfNothing) {
  EXPECT_TRUE(evaluate_log({}, kMinute, 3, kMinute, 3).allowed);
  EXPECT_EQ(evaluate_log({}, kMinute, 3, kMinute, 3).reset, 0);
  EXPECT_TRUE(evaluate_log({}, kMinute, 0, kMinute, 0).allowed);
  EXPECT_EQ(evaluate_log({}, kMinute, 0, kMinute, 1).retry_after, kNever);
}

TEST(SlidingLog, TheCellIsNamedByItsInstant) {
  EXPECT_EQ(log_epoch(kMinute, 7), (crdt::Epoch{7, kMinute + 7}));
  EXPECT_TRUE(crdt::valid_epoch(log_epoch(366 * kDay, kMaxTime)));
  EXPECT_TRUE(crdt::valid_epoch(log_epoch(kMillisecond, 0)));
}

}  // namespace
}  // namespace weir
