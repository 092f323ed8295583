#include <weir/node/restart_backoff.h>

#include <gtest/gtest.h>

namespace weir::node {
namespace {

TEST(RestartBackoff, GrowsWhileTheClockFlaps) {
  RestartBackoff backoff;
  Nanos now = kMinute;
  Nanos wait = 0;
  for (Nanos expected : {5, 10, 20, 40, 80, 160, 300, 300}) {
    now += wait;
    wait = backoff.started_again(now) - now;
    EXPECT_EQ(wait, expected * kSecond);
  }
  now += RestartBackoff::kCalm;
  EXPECT_EQ(backoff.started_again(now) - now, RestartBackoff::kFirst);
}

}  // namespace
}  // namespace weir::node
