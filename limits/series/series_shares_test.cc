#include <weir/limits/series/series_shares.h>

#include <gtest/gtest.h>

#include <thread>

namespace weir {
namespace {

constexpr std::uint32_t kNobody = ~std::uint32_t{0};

crdt::SeriesId rule(std::uint64_t i) {
  return {i, i};
}

std::uint64_t take_all(SeriesShares& shares, std::uint32_t number) {
  std::uint64_t taken = 0;
  while (shares.take(number)) ++taken;
  return taken;
}

TEST(SeriesShares, WithoutPartsAllIsForWhoeverComesFirst) {
  SeriesShares shares(10);
  EXPECT_EQ(take_all(shares, 3), 10u);
  EXPECT_FALSE(shares.take(kNobody));
  shares.give_back(3);
  EXPECT_TRUE(shares.take(kNobody));
}

TEST(SeriesShares, APartIsThereWhateverOthersHave) {
  SeriesShares shares(100);
  shares.set(std::vector<SeriesShares::Part>{{0, rule(1), 20}, {1, rule(2), 30}});
  EXPECT_EQ(take_all(shares, 0), 70u);  // 20 and what is in no part
  EXPECT_FALSE(shares.take(kNobody));
  EXPECT_EQ(take_all(shares, 1), 30u);
  EXPECT_EQ(shares.of(rule(1)).series, 70u);
  EXPECT_EQ(shares.of(rule(1)).guaranteed, 20u);
  EXPECT_EQ(shares.of(rule(1)).refused, 1u);
  EXPECT_EQ(shares.refused(), 2u);  // nobody's are no rule's
  // Room is made for whoever comes first once the flood goes, down to its part.
  for (int i = 0; i < 50; ++i) shares.give_back(0);
  EXPECT_EQ(take_all(shares, 1), 50u);
  EXPECT_FALSE(shares.take(0));
  shares.give_back(0);
  EXPECT_FALSE(shares.take(1));
  EXPECT_TRUE(shares.take(0));
}

TEST(SeriesShares, NumbersOfOneRuleShareItsPart) {
  SeriesShares shares(100);
  shares.set(std::vector<SeriesShares::Part>{{0, rule(1), 20}, {1, rule(2), 80}});
  EXPECT_EQ(take_all(shares, 0), 20u);
  shares.set(std::vector<SeriesShares::Part>{{5, rule(1), 20}, {1, rule(2), 80}});
  EXPECT_FALSE(shares.take(5));
  shares.give_back(0);
  EXPECT_TRUE(shares.take(5));
  EXPECT_EQ(shares.of(rule(1)).series, 20u);
}

TEST(SeriesShares, ASeriesWhoseRuleIsLearntCountsAgainstIt) {
  SeriesShares shares(100);
  shares.set(std::vector<SeriesShares::Part>{{0, rule(1), 20}, {1, rule(2), 30}});
  EXPECT_EQ(take_all(shares, kNobody), 50u);
  for (int i = 0; i < 30; ++i) shares.move(kNobody, 0);
  EXPECT_EQ(shares.of(rule(1)).series, 30u);
  EXPECT_EQ(take_all(shares, kNobody), 20u);
  EXPECT_FALSE(shares.take(0));
  EXPECT_EQ(take_all(shares, 1), 30u);
  // Where it must be, others' parts are used, too, but never more than there is.
  EXPECT_FALSE(shares.take(kNobody, true));
  shares.give_back(1);
  EXPECT_TRUE(shares.take(kNobody, true));
  EXPECT_FALSE(shares.take(1));
}

TEST(SeriesShares, ARuleThatGoesLosesItsPartAndKeepsItsSeries) {
  SeriesShares shares(100);
  shares.set(std::vector<SeriesShares::Part>{{0, rule(1), 60}, {1, rule(2), 40}});
  EXPECT_EQ(take_all(shares, 0), 60u);
  shares.set(std::vector<SeriesShares::Part>{{1, rule(2), 60}});
  EXPECT_EQ(shares.of(rule(1)).series, 60u);
  EXPECT_EQ(shares.of(rule(1)).guaranteed, 0u);
  // The part that has grown is there as far as the other's series have gone.
  EXPECT_EQ(take_all(shares, 1), 40u);
  for (int i = 0; i < 60; ++i) shares.give_back(0);
  EXPECT_EQ(take_all(shares, 1), 60u);
  shares.set({});
  EXPECT_EQ(shares.of(rule(1)).series, 0u);
  EXPECT_EQ(shares.of(rule(2)).series, 100u);
  EXPECT_FALSE(shares.take(7));
}

TEST(SeriesShares, ThreadsTakeAndGiveBackWithoutLosingCount) {
  SeriesShares shares(1000);
  shares.set(std::vector<SeriesShares::Part>{{0, rule(1), 300}, {1, rule(2), 300}});
  auto run = [&](std::uint32_t number) {
    std::uint64_t has = 0;
    for (int i = 0; i < 20'000; ++i) {
      if (i % 3 != 2) {
        has += shares.take(number);
      } else if (has > 0) {
        shares.give_back(number);
        --has;
      }
    }
    for (; has > 0; --has) shares.give_back(number);
  };
  std::thread other(run, 1);
  run(0);
  other.join();
  EXPECT_EQ(shares.of(rule(1)).series, 0u);
  EXPECT_EQ(take_all(shares, 0), 700u);
  EXPECT_EQ(take_all(shares, 1), 300u);
}

}  // namespace
}  // namespace weir
