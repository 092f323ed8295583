#include <weir/rpc/net/backoff.h>

#include <gtest/gtest.h>

#include <random>

namespace weir {
namespace {

Backoff::Random lowest() {
  return [](std::uint64_t) { return std::uint64_t{0}; };
}
Backoff::Random highest() {
  return [](std::uint64_t n) { return n - 1; };
}

TEST(Backoff, WaitsBetweenTheBaseAndThreeTimesTheWaitBefore) {
  BackoffOptions options;
  options.base = 100;
  options.cap = 2000;
  Backoff longest(options, highest());
  EXPECT_EQ(longest.next(), 300);
  EXPECT_EQ(longest.next(), 900);
  EXPECT_EQ(longest.next(), 2000);
  EXPECT_EQ(longest.next(), 2000);
  longest.reset();
  EXPECT_EQ(longest.next(), 300);
  Backoff shortest(options, lowest());
  EXPECT_EQ(shortest.next(), 100);
  EXPECT_EQ(shortest.next(), 100);
}

TEST(Backoff, SpreadsThoseThatWereDeniedTogether) {
  std::mt19937_64 random(1);
  Backoff::Random any = [&](std::uint64_t n) { return random() % n; };
  Nanos low = kNever;
  Nanos high = 0;
  for (int i = 0; i < 1000; ++i) {
    Backoff backoff({}, any);
    Nanos wait = backoff.next();
    low = std::min(low, wait);
    high = std::max(high, wait);
  }
  EXPECT_LT(low, 110 * kMillisecond);
  EXPECT_GT(high, 290 * kMillisecond);
}

TEST(Backoff, IsNeverShorterThanRetryAfter) {
  Backoff shortest({}, lowest());
  EXPECT_EQ(shortest.next(7 * kSecond), 7 * kSecond);
  EXPECT_EQ(shortest.next(-1), 0);
  Backoff longest({}, highest());
  EXPECT_EQ(longest.next(100 * kSecond), 110 * kSecond);
  EXPECT_EQ(longest.next(kNever), 11 * kMinute);  // cut
}

}  // namespace
}  // namespace weir
