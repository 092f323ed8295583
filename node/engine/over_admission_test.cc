#include <weir/node/engine/over_admission.h>

#include <gtest/gtest.h>

namespace weir::node {
namespace {

constexpr Nanos kNow = 1'000'000 * kMinute;
constexpr crdt::SeriesId kRule{1, 2};

struct Reports {
  OverAdmission over{2};
  void tell(crdt::PeerIndex peer, std::uint64_t units, Nanos now, crdt::SeriesId rule = kRule) {
    over.heard(peer, now);
    over.grew(rule, units);
    over.done();
  }
};

TEST(OverAdmission, IsRateTimesSilence) {
  Reports reports;
  for (int i = 0; i <= 80; ++i) reports.tell(0, 25, kNow + i * kSecond / 4);  // 100 a second
  Nanos last = kNow + 20 * kSecond;
  EXPECT_EQ(reports.over.worst_case(kRule, last), 0u);
  EXPECT_NEAR(static_cast<double>(reports.over.worst_case(kRule, last + kSecond / 4)), 25, 2);
  // A peer that is cut off goes on, as far as anyone knows.
  EXPECT_NEAR(static_cast<double>(reports.over.worst_case(kRule, last + kMinute)), 6000, 400);
  reports.tell(0, 0, last + kMinute);
  EXPECT_EQ(reports.over.worst_case(kRule, last + kMinute), 0u);
}

TEST(OverAdmission, SumsPeersAndKeepsRulesApart) {
  Reports reports;
  for (int i = 0; i <= 20; ++i) {
    reports.tell(0, 10, kNow + i * kSecond / 2);
    reports.tell(1, 20, kNow + i * kSecond / 2);
    reports.tell(1, 1, kNow + i * kSecond / 2, {3, 4});
  }
  Nanos later = kNow + 12 * kSecond;
  EXPECT_NEAR(static_cast<double>(reports.over.worst_case(kRule, later)), 120, 15);
  EXPECT_NEAR(static_cast<double>(reports.over.worst_case({3, 4}, later)), 4, 2);
  EXPECT_EQ(reports.over.worst_case({5, 6}, later), 0u);
}

TEST(OverAdmission, ARateOfLongAgoIsForgotten) {
  Reports reports;
  reports.tell(0, 1000, kNow);
  reports.tell(0, 0, kNow + 6 * kSecond);
  reports.tell(0, 0, kNow + 12 * kSecond);
  reports.tell(0, 0, kNow + 18 * kSecond);
  reports.over.sweep();
  EXPECT_EQ(reports.over.worst_case(kRule, kNow + kMinute), 0u);
}

TEST(OverAdmission, WhatNobodyToldSaysNothingOfARate) {
  OverAdmission over(1);
  over.grew(kRule, 1000);
  EXPECT_EQ(over.worst_case(kRule, kNow), 0u);
}

}  // namespace
}  // namespace weir::node
