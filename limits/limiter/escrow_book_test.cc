#include <weir/limits/limiter/escrow_book.h>

#include <gtest/gtest.h>
#include <weir/limits/test_util.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace weir {
namespace {

constexpr Nanos kNow = 1'000'000 * kMinute;
constexpr SeriesId kSeries{3, 4};

Rule escrow_rule(std::uint64_t limit, Algorithm algorithm = Algorithm::fixed_window) {
  Rule made = test::rule("r", limit, algorithm);
  made.enforcement = Enforcement::escrow;
  made.durability = Durability::commit;
  if (is_bucket(algorithm)) made.burst = limit;
  return made;
}

crdt::Member member(std::uint64_t number) {
  return {"region", "node-" + std::to_string(number)};
}

LimiterOptions among(std::uint64_t members, std::uint64_t self) {
  LimiterOptions options;
  options.replicated = true;
  options.incarnation = {self, self};
  if (members > 0) {
    std::vector<crdt::Shareholder> holders;
    for (std::uint64_t i = 1; i <= members; ++i) holders.push_back({member(i)});
    options.shares = std::make_shared<const crdt::ShareTable>(std::move(holders));
  }
  options.self = member(self);
  return options;
}

/// One node's book, and what it holds of one series of one rule.
struct Node {
  Rule source;
  CompiledRule rule;
  EscrowBook book;
  Series series;
  bool used = false;  ///< else there is no series yet

  /// Of `members` who share (0: nobody is known to), the one numbered `self`.
  Node(Rule given, std::uint64_t members, std::uint64_t self = 1)
      : source(std::move(given)), book(among(members, self)) {
    rule = compile(source, 0, {1, 1});
    rule.name = {9, 9};
  }
  Series* known() { return used ? &series : nullptr; }
  WindowAt window(Nanos now) const {
    return rule.bucket_cell ? WindowAt{} : window_at(rule, kSeries, now);
  }
  crdt::CellId cell(Nanos now) const {
    if (!rule.bucket_cell) return {kSeries, window(now).epoch()};
    WindowShape periods = lending_periods(kSeries);
    return {kSeries, periods.epoch(periods.index(now))};
  }
  Verdict ask(std::uint64_t cost, Nanos now = kNow) {
    Verdict verdict = book.evaluate(rule, kSeries, window(now), known(), cost, now);
    book.count_demand(rule, kSeries, window(now), known(), cost, verdict, now);
    return verdict;
  }
  EscrowBook::Spent spend(std::uint64_t cost, Nanos now = kNow) {
    used = true;
    return book.consume(rule, kSeries, window(now), series, cost, now);
  }
  bool take(std::uint64_t cost, Nanos now = kNow) {
    bool allowed = ask(cost, now).allowed;
    if (allowed) spend(cost, now);
    return allowed;
  }
  std::uint64_t left(Nanos now = kNow) {
    return book.evaluate(rule, kSeries, window(now), known(), 0, now).remaining;
  }
  std::uint64_t give(std::uint64_t to, std::uint64_t wanted, const crdt::CellId& id, Nanos now,
                     bool all = true) {
    if (!book.may_give(rule, id, now)) return 0;
    used = true;
    return book.give(rule, id, series, {to, to}, wanted, now, all);
  }
  std::uint64_t receive(std::uint64_t units, const crdt::CellId& id, std::uint64_t filled = 0) {
    used = true;
    EscrowOthers others;
    others.holding.received = units;
    others.holding.filled = filled;
    return book.absorb(id, series, others);
  }
  std::vector<RightsNeed> needs(Nanos now, Nanos lead = 0) {
    for (const auto& [id, name] : book.ending(now, lead)) {
      EXPECT_EQ(name, rule.name);
      book.look_ahead(rule, id, series, now);
    }
    std::vector<RightsNeed> out;
    book.take_needs(now, lead, out);
    return out;
  }
};

TEST(EscrowBook, AloneEveryLimitIsItsOwn) {
  Node node(escrow_rule(10), 0);
  EXPECT_TRUE(node.take(7));
  EXPECT_EQ(node.left(), 3u);
  Verdict denied = node.ask(4);
  EXPECT_FALSE(denied.allowed);
  EXPECT_FALSE(denied.exhausted_locally);
  EXPECT_EQ(denied.retry_after, node.cell(kNow).epoch.expiry - kNow);
  EXPECT_EQ(node.ask(11).retry_after, kNever);
  EXPECT_EQ(node.book.used(node.rule, kSeries, node.known(), kNow), 7u);
  EXPECT_TRUE(node.take(10, node.cell(kNow).epoch.expiry));
}

TEST(EscrowBook, MembersTogetherSpendTheLimitAndNoMore) {
  for (std::uint64_t limit : {0u, 1u, 2u, 3u, 10u, 101u}) {
    std::uint64_t spent = 0;
    for (std::uint64_t self : {1u, 2u, 3u}) {
      Node node(escrow_rule(limit), 3, self);
      while (node.take(1)) ++spent;
    }
    EXPECT_EQ(spent, limit);
  }
}

TEST(EscrowBook, WhoHasSpentItsShareIsToldToAskAgainAndNeedsMore) {
  Node node(escrow_rule(100), 2);
  EXPECT_TRUE(node.take(50));
  Verdict denied = node.ask(1);
  EXPECT_FALSE(denied.allowed);
  EXPECT_TRUE(denied.exhausted_locally);
  EXPECT_LT(denied.retry_after, kSecond);
  std::vector<RightsNeed> needs = node.needs(kNow);
  ASSERT_EQ(needs.size(), 1u);
  EXPECT_EQ(needs[0].cell, node.cell(kNow));
  EXPECT_EQ(needs[0].rule, node.rule.name);
  EXPECT_EQ(needs[0].limit, 100u);
  EXPECT_GE(needs[0].units, 1u);
}

TEST(EscrowBook, AShareIsSpentOnlyWhereTheGrantStateSaysSo) {
  Node node(escrow_rule(10), 2);
  EscrowGrantState state;
  state.open = false;
  node.book.set_grant_state(state);
  EXPECT_EQ(node.left(), 0u);
  state.open = true;
  state.fence_time = node.cell(kNow).epoch.start;
  node.book.set_grant_state(state);
  EXPECT_EQ(node.left(), 0u);
  EXPECT_EQ(node.left(node.cell(kNow).epoch.expiry), 5u);
  EXPECT_EQ(node.receive(3, node.cell(kNow)), 3u);  // what an incarnation was given is its own
  EXPECT_EQ(node.left(), 3u);
  EXPECT_FALSE(node.book.stopped());
  state.stopped = true;
  node.book.set_grant_state(state);
  EXPECT_TRUE(node.book.stopped());
  EXPECT_EQ(node.give(2, 1, node.cell(kNow), kNow), 0u);
}

TEST(EscrowBook, RightsThatAreGivenAreGoneHereAndThere) {
  Node giver(escrow_rule(10), 2, 1);
  Node taker(escrow_rule(10), 2, 2);
  crdt::CellId cell = giver.cell(kNow);
  ASSERT_TRUE(giver.take(1));
  EXPECT_EQ(giver.give(2, 3, cell, kNow), 3u);
  EXPECT_EQ(giver.give(2, 3, cell, kNow), 0u);  // a request that comes again asks for no more
  EXPECT_EQ(giver.left(), 1u);
  EXPECT_EQ(taker.receive(3, cell), 3u);
  EXPECT_EQ(taker.receive(3, cell), 0u);
  EXPECT_EQ(taker.left(), 8u);
  EXPECT_EQ(giver.give(2, 9, cell, kNow), 1u);  // as many as are left
  EXPECT_EQ(giver.left(), 0u);
  EXPECT_EQ(giver.give(1, 9, cell, kNow), 0u);  // not to oneself
}

TEST(EscrowBook, NothingIsGivenOfWindowsThatAreOverOrFarAheadOrNotTheRules) {
  Node node(escrow_rule(10), 2);
  EscrowGrantState state;
  state.ahead = kMinute;
  node.book.set_grant_state(state);
  crdt::CellId cell = node.cell(kNow);
  EXPECT_EQ(node.give(2, 1, node.cell(kNow - kMinute), kNow), 0u);
  EXPECT_EQ(node.give(2, 1, node.cell(kNow + 2 * kMinute), kNow), 0u);
  EXPECT_EQ(node.give(2, 1, node.cell(kNow + kMinute), kNow), 1u);
  cell.epoch.start += 1;
  EXPECT_EQ(node.give(2, 1, cell, kNow), 0u);
}

TEST(EscrowBook, WhatThisNodeIsAboutToNeedIsKept) {
  Node node(escrow_rule(100), 2);
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(node.take(1));
  // Of 50 it has 30 left, and forecasts what it was asked for since there is a cell.
  EXPECT_EQ(node.give(2, 100, node.cell(kNow), kNow, false), 11u);
  EXPECT_EQ(node.left(), 19u);
}

TEST(EscrowBook, AnAnswerWaitsUntilWhatItCoversIsDurable) {
  Node node(escrow_rule(100), 2);
  EscrowBook::Spent spent = node.spend(3);
  EXPECT_TRUE(spent.waits);
  EXPECT_TRUE(spent.dirty);
  std::vector<crdt::OwnCount> rows;
  node.book.drain(kSeries, node.series, rows);
  ASSERT_EQ(rows.size(), 1u);
  EXPECT_EQ(rows[0].birth, crdt::kUsedRow);
  EXPECT_EQ(rows[0].value, 3u);
  EscrowGrantState state;
  state.disk = false;
  node.book.set_grant_state(state);
  EXPECT_FALSE(node.spend(1).waits);
}

TEST(EscrowBook, ABusyWindowSaysWhatTheNextOneWillLack) {
  Node node(escrow_rule(100), 2);
  crdt::Epoch window = node.cell(kNow).epoch;
  EXPECT_TRUE(node.take(1, kNow));  // so that there is a cell
  for (Nanos now = kNow; now < window.expiry; now += kSecond) node.ask(2, now);
  node.needs(window.expiry - 20 * kSecond);
  std::vector<RightsNeed> needs = node.needs(window.expiry - kMillisecond, 5 * kSecond);
  auto next = std::find_if(needs.begin(), needs.end(), [&](const RightsNeed& need) {
    return need.cell == node.cell(window.expiry);
  });
  ASSERT_NE(next, needs.end());
  EXPECT_EQ(next->units, 50u);  // all that it has not
  EXPECT_TRUE(node.book.ending(window.expiry, kSecond).empty());
}

TEST(EscrowBook, AHoldCountsUntilItIsSettled) {
  for (Algorithm algorithm : {Algorithm::fixed_window, Algorithm::token_bucket}) {
    Node node(escrow_rule(10, algorithm), 0);
    crdt::Epoch epoch = node.rule.bucket_cell ? crdt::kBucketEpoch : node.cell(kNow).epoch;
    node.used = true;
    node.book.hold(node.rule, kSeries, epoch, node.series, 6, kNow);
    EXPECT_EQ(node.left(), 4u);
    EXPECT_EQ(node.book.used(node.rule, kSeries, &node.series, kNow), 6u);
    EXPECT_TRUE(node.book.settle(node.rule, kSeries, epoch, 6, node.series, 8, kNow));
    EXPECT_EQ(node.left(), 2u);
  }
  Node node(escrow_rule(10), 0);
  crdt::Epoch epoch = node.cell(kNow).epoch;
  node.book.hold(node.rule, kSeries, epoch, node.series, 6, kNow);
  EXPECT_FALSE(node.book.settle(node.rule, kSeries, epoch, 6, node.series, 8, epoch.expiry));
}

TEST(EscrowBook, RightsThatAreLeftAreFoundInOpenWindows) {
  Node node(escrow_rule(10), 2);
  std::vector<RightsLeft> found;
  node.spend(1);
  node.book.find_rights_left(node.rule, kSeries, node.series, kNow, found);
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].cell, node.cell(kNow));
  node.spend(4);
  node.book.find_rights_left(node.rule, kSeries, node.series, kNow, found);
  node.book.find_rights_left(node.rule, kSeries, node.series, node.cell(kNow).epoch.expiry, found);
  EXPECT_EQ(found.size(), 1u);
}

TEST(EscrowBook, APartOfABucketFillsWithItsPartOfTheRate) {
  Node node(escrow_rule(60, Algorithm::token_bucket), 2);  // 60 a minute: half a unit a second
  ASSERT_EQ(node.left(), 30u);
  ASSERT_TRUE(node.take(30));
  EXPECT_EQ(node.left(kNow + 2 * kSecond - 1), 0u);
  EXPECT_EQ(node.left(kNow + 2 * kSecond), 1u);
  EXPECT_EQ(node.left(kNow + 20 * kSecond), 10u);
  EXPECT_FALSE(
      node.book.is_over(node.rule.escrow_bucket, kSeries, node.series, kNow + kMinute - 1));
  EXPECT_TRUE(node.book.is_over(node.rule.escrow_bucket, kSeries, node.series, kNow + kMinute));
}

TEST(EscrowBook, OverAnyTimePartsTogetherAdmitTheBurstAndTheRate) {
  std::uint64_t admitted = 0;
  for (std::uint64_t self : {1u, 2u, 3u}) {
    Node node(escrow_rule(60, Algorithm::token_bucket), 3, self);
    for (Nanos now = kNow; now <= kNow + 30 * kSecond; now += kSecond / 4) {
      while (node.take(1, now)) ++admitted;
    }
  }
  EXPECT_EQ(admitted, 90u);
}

TEST(EscrowBook, AnIncarnationsBucketsWereEmptyWhenItsGrantsBegan) {
  Node node(escrow_rule(60, Algorithm::token_bucket), 2);
  EscrowGrantState state;
  state.since = kNow - 20 * kSecond;
  node.book.set_grant_state(state);
  std::uint64_t left = node.left();
  EXPECT_LE(left, 10u);
  EXPECT_GE(left, 7u);  // what earlier incarnations lent is over within four periods
}

TEST(EscrowBook, WhatIsLentOfABucketIsRoomOfAPeriodToCome) {
  Node lender(escrow_rule(60, Algorithm::token_bucket), 2, 1);
  Node taker(escrow_rule(60, Algorithm::token_bucket), 2, 2);
  ASSERT_TRUE(taker.take(30));
  crdt::CellId next = lender.cell(kNow + kLendingPeriod);
  EXPECT_EQ(lender.give(2, 10, lender.cell(kNow), kNow), 0u);  // has begun
  EXPECT_EQ(lender.give(2, 10, lender.cell(kNow + kMinute), kNow), 0u);
  EXPECT_EQ(lender.give(2, 10, next, kNow), 10u);
  EXPECT_EQ(lender.left(), 20u);
  std::vector<crdt::OwnCount> rows;
  lender.book.drain(kSeries, lender.series, rows);
  ASSERT_EQ(rows.size(), 2u);  // the rights, and that they are full
  EXPECT_EQ(rows[0].value, 10u);
  EXPECT_EQ(rows[1].value, 10u);
  taker.receive(10, next, 10);
  EXPECT_EQ(taker.left(next.epoch.start - 1), 0u);
  EXPECT_GE(taker.left(next.epoch.start), 10u);
  EXPECT_LE(taker.left(next.epoch.start), 11u);
  EXPECT_LE(lender.left(next.epoch.start), 21u);
}

}  // namespace
}  // namespace weir
