#include <weir/node/service/caller_budgets.h>

#include <gtest/gtest.h>

#include <optional>
#include <utility>
#include <vector>

namespace weir::node {
namespace {

TEST(CallerBudgetsTest, WhatWaitsIsCountedByCaller) {
  CallerBudgets budgets(2, 10);
  auto one = budgets.hold(1);
  one.add();
  EXPECT_FALSE(budgets.any_full());
  one.add();
  EXPECT_TRUE(budgets.any_full());
  EXPECT_TRUE(budgets.full(1));
  EXPECT_FALSE(budgets.full(3));
  // Beyond: a call that was let in comes whole.
  std::optional<CallerBudgets::Hold> more = budgets.hold(1);
  more->add();
  auto moved = std::move(one);
  EXPECT_TRUE(budgets.full(1));
  moved = CallerBudgets::Hold();
  EXPECT_FALSE(budgets.full(1));
  EXPECT_FALSE(budgets.any_full());
  more.reset();
  auto again = budgets.hold(1);
  again.add();
  EXPECT_FALSE(budgets.any_full());
}

TEST(CallerBudgetsTest, NobodyHasNoBound) {
  CallerBudgets budgets(1, 0);
  auto hold = budgets.hold(0);
  for (int i = 0; i < 10; ++i) hold.add();
  EXPECT_FALSE(budgets.any_full());
  EXPECT_TRUE(budgets.take_report(0, 0));
}

TEST(CallerBudgetsTest, AHoldMayOutliveThem) {
  CallerBudgets::Hold hold;
  {
    CallerBudgets budgets(1, 10);
    hold = budgets.hold(1);
    hold.add();
  }
  hold.add();
}

TEST(CallerBudgetsTest, ReportsAreCountedBySecondAndCaller) {
  CallerBudgets budgets(1, 3);
  const auto taken = [&](std::uint64_t caller, Nanos at) {
    int count = 0;
    for (int i = 0; i < 5; ++i) count += budgets.take_report(caller, at) ? 1 : 0;
    return count;
  };
  EXPECT_EQ(taken(1, 10 * kSecond), 3);
  EXPECT_EQ(taken(3, 10 * kSecond + 1), 3);
  EXPECT_EQ(taken(1, 11 * kSecond - 1), 0);
  EXPECT_EQ(taken(1, 11 * kSecond), 3);
  // The clock was set back.
  EXPECT_EQ(taken(1, 5 * kSecond), 3);
  EXPECT_EQ(budgets.reports_refused(), 2u + 2u + 5u + 2u + 2u);
  // However many callers there are, what is kept of them is bounded.
  int told = 0;
  for (std::uint64_t caller = 1; caller <= 20'000; ++caller) {
    told += budgets.take_report(caller, 20 * kSecond) ? 1 : 0;
  }
  EXPECT_EQ(told, 4096);
}

}  // namespace
}  // namespace weir::node
