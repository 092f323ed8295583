#include <weir/limits/rendezvous.h>

#include <gtest/gtest.h>

#include <map>
#include <string>

namespace weir {
namespace {

std::uint64_t key(int i) {
  return stable_hash("key" + std::to_string(i));
}

TEST(Rendezvous, EveryoneGetsItsShare) {
  std::vector<std::string> names = {"10.0.0.1:7401", "10.0.0.2:7401", "10.0.0.3:7401"};
  std::map<std::size_t, int> first;
  for (int i = 0; i < 30'000; ++i) ++first[rendezvous_order(names, key(i))[0]];
  for (auto [name, count] : first) EXPECT_NEAR(count, 10'000, 500) << names[name];
}

TEST(Rendezvous, OnlyTheKeysOfWhoLeavesMove) {
  std::vector<std::string> all = {"a", "b", "c", "d"};
  std::vector<std::string> left = {"a", "b", "d"};
  int moved = 0;
  for (int i = 0; i < 4000; ++i) {
    auto before = rendezvous_order(all, key(i));
    std::string now = left[rendezvous_order(left, key(i))[0]];
    if (all[before[0]] == "c") {
      ++moved;
      EXPECT_EQ(now, all[before[1]]);
    } else {
      EXPECT_EQ(now, all[before[0]]);
    }
  }
  EXPECT_NEAR(moved, 1000, 150);
}

TEST(Rendezvous, WeightsAreShares) {
  int heavy = 0;
  for (int i = 0; i < 40'000; ++i) {
    heavy += rendezvous_score("heavy", key(i), 3) > rendezvous_score("light", key(i), 1);
  }
  EXPECT_NEAR(heavy, 30'000, 600);
}

TEST(Rendezvous, TheOrderDoesNotDependOnTheListsOrder) {
  std::vector<std::string> one = {"x", "y", "z"};
  std::vector<std::string> other = {"z", "x", "y"};
  for (int i = 0; i < 100; ++i) {
    EXPECT_EQ(one[rendezvous_order(one, key(i))[0]], other[rendezvous_order(other, key(i))[0]]);
  }
  // All nodes must agree, also after an update: these values stay.
  EXPECT_EQ(stable_hash("key0"), stable_hash(std::string("key") + "0"));
  EXPECT_NE(stable_hash("key0"), stable_hash("key1"));
}

}  // namespace
}  // namespace weir
