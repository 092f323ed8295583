#include <weir/node/service/rights_negative_cache.h>

#include <gtest/gtest.h>

namespace weir::node {
namespace {

constexpr Nanos kNow = 400'000 * kHour;

crdt::CellId cell(std::uint64_t series, Nanos end = kNow + kMinute) {
  return {{series, 1}, {kNow, end}};
}

TEST(RightsNegativeCache, NoMoreIsAskedForAtATimeThanTheLimitHas) {
  RightsNegativeCache cache;
  EXPECT_TRUE(cache.begin(cell(1), 2, 3, kNow));
  EXPECT_FALSE(cache.begin(cell(1), 2, 3, kNow));
  EXPECT_TRUE(cache.begin(cell(1), 1, 3, kNow));
  EXPECT_TRUE(cache.begin(cell(2), 3, 3, kNow));
  cache.passed(cell(1), 2);
  EXPECT_TRUE(cache.begin(cell(1), 2, 3, kNow));
  cache.dropped(cell(1), 2);
  EXPECT_TRUE(cache.begin(cell(1), 2, 3, kNow));
}

TEST(RightsNegativeCache, WhatWasDeniedIsAskedForEverMoreSeldom) {
  RightsNegativeCache cache;
  Nanos now = kNow;
  int asked = 0;
  for (; now < kNow + 10 * kSecond; now += 10 * kMillisecond) {
    if (!cache.begin(cell(1), 2, 3, now)) continue;
    ++asked;
    cache.denied(cell(1), 2, false, now);
  }
  // After 0, 100, 300, 700, 1500, 3100 ms, and then every 2 s.
  EXPECT_EQ(asked, 9);
  // Less may be there.
  EXPECT_TRUE(cache.begin(cell(1), 1, 3, now - 1));
  cache.passed(cell(1), 1);
  now += 2 * kSecond;
  EXPECT_TRUE(cache.begin(cell(1), 2, 3, now));
  cache.denied(cell(1), 2, false, now);
  EXPECT_FALSE(cache.begin(cell(1), 2, 3, now + 99 * kMillisecond));
  EXPECT_TRUE(cache.begin(cell(1), 2, 3, now + 100 * kMillisecond));
}

TEST(RightsNegativeCache, WhatIsUsedUpStaysSo) {
  RightsNegativeCache cache;
  EXPECT_TRUE(cache.begin(cell(1), 2, 3, kNow));
  cache.denied(cell(1), 2, true, kNow);
  EXPECT_FALSE(cache.begin(cell(1), 2, 3, kNow + 59 * kSecond));
  EXPECT_TRUE(cache.begin(cell(1), 1, 3, kNow + 59 * kSecond));
}

TEST(RightsNegativeCache, RoomIsForWindowsThatAreNotOver) {
  RightsNegativeCache cache;
  for (std::uint64_t i = 0; i < RightsNegativeCache::kMost; ++i) {
    ASSERT_TRUE(cache.begin(cell(i), 1, 3, kNow));
  }
  EXPECT_FALSE(cache.begin(cell(RightsNegativeCache::kMost), 1, 3, kNow));
  EXPECT_TRUE(cache.begin(cell(7), 1, 3, kNow));
  const Nanos later = kNow + kMinute;
  EXPECT_TRUE(cache.begin(cell(RightsNegativeCache::kMost, later + kMinute), 1, 3, later));
  EXPECT_EQ(cache.size(), 1u);
  cache.denied(cell(3), 1, false, later);  // its window is over
  EXPECT_EQ(cache.size(), 1u);
}

TEST(AskedMembers, TheOldestGoFirst) {
  AskedMembers asked(kMinute);
  for (std::size_t i = 0; i <= AskedMembers::kMost; ++i) {
    asked.remember("id" + std::to_string(i), {i, {"r"}, {}}, kNow);
  }
  EXPECT_EQ(asked.find("id0", kNow), nullptr);
  ASSERT_NE(asked.find("id1", kNow), nullptr);
  EXPECT_EQ(asked.find("id1", kNow)->member, 1u);
  EXPECT_EQ(asked.find("id1", kNow + kMinute), nullptr);
  // One that is told anew is as young as that.
  asked.remember("id1", {7, {"r"}, {}}, kNow + kSecond);
  asked.remember("more", {1, {"r"}, {}}, kNow + kSecond);
  EXPECT_EQ(asked.find("id2", kNow), nullptr);
  EXPECT_EQ(asked.find("id1", kNow + kMinute)->member, 7u);
  asked.forget("id1");
  EXPECT_EQ(asked.find("id1", kNow), nullptr);
  EXPECT_FALSE(asked.empty());
}

}  // namespace
}  // namespace weir::node
