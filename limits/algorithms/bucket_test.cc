#include <weir/limits/algorithms/bucket.h>

#include <gtest/gtest.h>

namespace weir {
namespace {

/// One writer's bucket.
struct Bucket {
  BucketShape shape;
  crdt::BucketState state;
  std::uint64_t total = 0;

  Verdict ask(Nanos now, std::uint64_t cost) const {
    return evaluate_bucket(shape, state, total, now, cost);
  }
  bool take(Nanos now, std::uint64_t cost) {
    if (!ask(now, cost).allowed) return false;
    state = consume_bucket(shape, state, total, now, cost);
    total += cost;
    return true;
  }
};

TEST(TokenBucket, BurstThenTheRate) {
  Bucket bucket{{10, kSecond, 5, 1}, {}, 0};
  Nanos now = 1000 * kSecond;
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(bucket.take(now, 1));
  EXPECT_FALSE(bucket.take(now, 1));
  EXPECT_EQ(bucket.ask(now, 1).retry_after, 100 * kMillisecond);
  EXPECT_FALSE(bucket.take(now + 100 * kMillisecond - 1, 1));
  EXPECT_TRUE(bucket.take(now + 100 * kMillisecond, 1));
}

TEST(TokenBucket, TenMillionASecondAndOneAMonthKeepTheirRates) {
  Bucket fast{{10'000'000, kSecond, 1, 1}, {}, 0};
  Nanos now = 1000 * kSecond;
  int admitted = 0;
  for (Nanos t = 0; t < 10'000; ++t) admitted += fast.take(now + t, 1);
  EXPECT_EQ(admitted, 100);
  Bucket slow{{1, 30 * kDay, 1, 1}, {}, 0};
  EXPECT_TRUE(slow.take(now, 1));
  EXPECT_EQ(slow.ask(now, 1).retry_after, 30 * kDay);
}

TEST(TokenBucket, AnAwkwardRateIsExactAtItsBoundary) {
  Bucket bucket{{3, kSecond, 3, 1}, {}, 0};
  Nanos now = 1000 * kSecond;
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(bucket.take(now, 1));
  // A third of a second, rounded up to the nanosecond at which it is really there.
  EXPECT_EQ(bucket.ask(now, 1).retry_after, 333'333'334);
  EXPECT_EQ(bucket.ask(now, 3).retry_after, kSecond);
  EXPECT_TRUE(bucket.take(now + kSecond, 3));
}

TEST(TokenBucket, ACostAboveTheBurstNeverPasses) {
  Bucket bucket{{10, kSecond, 5, 1}, {}, 0};
  EXPECT_EQ(bucket.ask(kSecond, 6).retry_after, kNever);
  EXPECT_EQ(bucket.ask(kSecond, ~std::uint64_t{0}).retry_after, kNever);
}

TEST(TokenBucket, ARateOfZeroGivesTheBurstOnce) {
  Bucket bucket{{0, kSecond, 2, 1}, {}, 0};
  EXPECT_TRUE(bucket.take(kSecond, 2));
  EXPECT_EQ(bucket.ask(kSecond, 1).retry_after, kNever);
  EXPECT_FALSE(bucket.take(kMaxTime, 1));
}

TEST(TokenBucket, AClockBehindTheLastTouchWaitsExactly) {
  Bucket bucket{{1, kSecond, 10, 1}, {}, 0};
  Nanos now = 1000 * kSecond;
  bucket.state = {{4, now, static_cast<crdt::DebtTicks>(4 * kSecond)}, now + kSecond, now + kHour};
  bucket.total = 14;  // ten more, taken as consumed at now + 1 s
  Verdict denied = bucket.ask(now, 1);
  EXPECT_FALSE(denied.allowed);
  EXPECT_FALSE(bucket.ask(now + denied.retry_after - 1, 1).allowed);
  EXPECT_TRUE(bucket.ask(now + denied.retry_after, 1).allowed);
}

TEST(TokenBucket, ResetIsTheInstantAtWhichItIsFull) {
  Bucket bucket{{10, kSecond, 5, 1}, {}, 0};
  Nanos now = 1000 * kSecond;
  EXPECT_TRUE(bucket.take(now, 3));
  EXPECT_EQ(bucket.ask(now, 0).reset, 300 * kMillisecond);
  EXPECT_EQ(bucket.ask(now, 0).remaining, 2u);
  EXPECT_EQ(bucket.ask(now + 300 * kMillisecond, 0).reset, 0);
}

TEST(LeakyBucket, UnitsLeaveAtTheRateAndAFullQueueDenies) {
  // 10 a second, and at most 3 in the queue, the one that leaves next included.
  Bucket bucket{{10, kSecond, 3, 1, true}, {}, 0};
  Nanos now = 1000 * kSecond;
  for (Nanos turn : {0, 1, 2}) {
    EXPECT_EQ(bucket.ask(now, 1).delay, turn * 100 * kMillisecond);
    EXPECT_TRUE(bucket.take(now, 1));
  }
  Verdict full = bucket.ask(now, 1);
  EXPECT_FALSE(full.allowed);
  EXPECT_EQ(full.delay, 0);
  EXPECT_EQ(full.retry_after, 100 * kMillisecond);
  EXPECT_FALSE(bucket.take(now + 100 * kMillisecond - 1, 1));
  EXPECT_EQ(bucket.ask(now + 100 * kMillisecond, 1).delay, 200 * kMillisecond);
  EXPECT_EQ(bucket.ask(now + kSecond, 3).delay, 0);
}

TEST(LeakyBucket, ACostLeavesAtOnceAndTheNextWaitsForAllOfIt) {
  Bucket bucket{{10, kSecond, 8, 1, true}, {}, 0};
  Nanos now = 1000 * kSecond;
  EXPECT_TRUE(bucket.take(now, 5));
  EXPECT_EQ(bucket.ask(now + 1, 1).delay, 500 * kMillisecond - 1);
  EXPECT_EQ(bucket.ask(now + 1, 0).delay, 500 * kMillisecond - 1);
}

TEST(LeakyBucket, ADelayIsRoundedUp) {
  Bucket bucket{{3, kSecond, 3, 1, true}, {}, 0};
  Nanos now = 1000 * kSecond;
  EXPECT_TRUE(bucket.take(now, 1));
  EXPECT_EQ(bucket.ask(now, 1).delay, 333'333'334);
}

}  // namespace
}  // namespace weir
