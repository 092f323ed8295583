#include <weir/rpc/client/retry_after.h>

#include <gtest/gtest.h>

namespace weir {
namespace {

constexpr Nanos kNow = 784'111'777 * kSecond;  // Sun, 06 Nov 1994 08:49:37 GMT

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
