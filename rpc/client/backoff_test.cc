#include <weir/rpc/client/backoff.h>

#include <gtest/gtest.h>

#include <random>

namespace weir {
namespace {

constexpr Nanos kNow = 784'111'777 * kSecond;  // Sun, 06 Nov 1994 08:49:37 GMT

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

TEST(RetryAfter, Seconds) {
  EXPECT_EQ(parse_retry_after("120", kNow), 120 * kSecond);
  EXPECT_EQ(parse_retry_after(" 0 ", kNow), 0);
  EXPECT_EQ(parse_retry_after("99999999999999999999999", kNow), kMaxTime);
}

TEST(RetryAfter, Dates) {
  for (const char* text : {"Sun, 06 Nov 1994 08:50:37 GMT", "Sunday, 06-Nov-94 08:50:37 GMT",
                           "Sun Nov  6 08:50:37 1994"}) {
    EXPECT_EQ(parse_retry_after(text, kNow), kMinute) << text;
  }
  EXPECT_EQ(parse_retry_after("Sun, 06 Nov 1994 08:00:00 GMT", kNow), 0);
  EXPECT_EQ(parse_retry_after("Thu, 29 Feb 1996 00:00:00 GMT", 825'552'000 * kSecond - 1), 1);
  EXPECT_EQ(parse_retry_after("Fri, 31 Dec 9999 23:59:59 GMT", kNow), kMaxTime - kNow);
}

TEST(RetryAfter, NothingElse) {
  for (const char* text :
       {"", " ", "-1", "1.5", "1s", "soon", "Sun", "Sun,", "Sun, 06 Nov 1994 08:49:37",
        "Sun, 06 Nov 1994 08:49:37 CET", "Sun, 6 Nov 1994 08:49:37 GMT",
        "Sun, 06 Noc 1994 08:49:37 GMT", "Sun, 06 Nov 1994 25:49:37 GMT",
        "Sun, 31 Nov 1994 08:49:37 GMT", "Sun, 06 Nov 1994 08:49:37 GMT+1"}) {
    EXPECT_EQ(parse_retry_after(text, kNow), std::nullopt) << text;
  }
}

}  // namespace
}  // namespace weir
