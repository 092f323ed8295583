#include <gtest/gtest.h>
#include <weir/limits/replica_side.h>
#include <weir/limits/test_util.h>

namespace weir {
namespace {

using test::rule;
using test::set;

constexpr Nanos kNow = 1'000'000 * kMinute;
constexpr crdt::Incarnation kSelf{7, 1};

struct Under {
  Limiter limiter;
  Decision decision;

  explicit Under(std::vector<Rule> rules, LimiterOptions options = replicated())
      : limiter(set(std::move(rules)), options) {}
  static LimiterOptions replicated() {
    LimiterOptions options;
    options.replicated = true;
    options.incarnation = kSelf;
    return options;
  }
  Ticket reserve(std::uint64_t hits, Nanos now = kNow, std::string_view id = {}) {
    Entry entry{"key", "k"};
    return limiter.reserve({"api", {&entry, 1}, hits, id}, now, kMinute, decision);
  }
  bool check(std::uint64_t hits, Nanos now = kNow) {
    Entry entry{"key", "k"};
    limiter.check({"api", {&entry, 1}, hits}, now, decision);
    return decision.allowed;
  }
  std::uint64_t used(std::uint32_t rule, Nanos now = kNow) {
    Entry entry{"key", "k"};
    return limiter.used(rule, {"api", {&entry, 1}, 1}, now);
  }
  std::vector<crdt::OwnCount> drain() {
    std::vector<crdt::OwnCount> out;
    limiter.replica_side().drain(out, 100);
    return out;
  }
};

TEST(Reserve, WhatIsHeldCountsAtOnceAndIsNotDrained) {
  for (Algorithm algorithm : {Algorithm::fixed_window, Algorithm::sliding_window,
                              Algorithm::sliding_log, Algorithm::token_bucket}) {
    Under node({rule("r", 10, algorithm)});
    Ticket ticket = node.reserve(8);
    ASSERT_TRUE(ticket);
    EXPECT_EQ(node.decision.decider()->remaining, 2u);
    EXPECT_EQ(node.used(0), 8u);
    EXPECT_FALSE(node.check(3));
    EXPECT_TRUE(node.drain().empty());
    Settled settled = node.limiter.settle(ticket, 5, kNow);
    EXPECT_TRUE(settled.known);
    EXPECT_EQ(settled.hits, 8u);
    EXPECT_FALSE(settled.lapsed);
    EXPECT_EQ(node.used(0), 5u);
    std::vector<crdt::OwnCount> drained = node.drain();
    ASSERT_EQ(drained.size(), 1u);
    EXPECT_EQ(drained[0].value, 5u);
    EXPECT_TRUE(node.check(5));
    EXPECT_EQ(node.limiter.tickets().open, 0u);
  }
}

TEST(Reserve, MoreThanReservedIsCountedBeyondTheLimitToo) {
  for (Algorithm algorithm : {Algorithm::fixed_window, Algorithm::sliding_log}) {
    Under node({rule("r", 10, algorithm)});
    Ticket ticket = node.reserve(1);
    ASSERT_TRUE(node.check(9));
    node.drain();
    node.limiter.settle(ticket, 8, kNow);
    EXPECT_EQ(node.used(0), 17u);
    EXPECT_FALSE(node.check(1));
    EXPECT_EQ(node.drain().back().value, 17u);
  }
}

TEST(Reserve, SettlesOnce) {
  Under node({rule("r", 10)});
  Ticket ticket = node.reserve(2);
  EXPECT_TRUE(node.limiter.settle(ticket, 1, kNow).known);
  EXPECT_FALSE(node.limiter.settle(ticket, 9, kNow).known);
  EXPECT_FALSE(node.limiter.settle({}, 9, kNow).known);
  EXPECT_FALSE(node.limiter.settle({ticket.number + 16}, 9, kNow).known);
  EXPECT_EQ(node.used(0), 1u);
}

TEST(Reserve, ATimeoutSettlesInFull) {
  Under node({rule("r", 10)});
  Ticket ticket = node.reserve(4);
  EXPECT_EQ(node.limiter.settle_due(kNow + kMinute - 1, 100), 0u);
  EXPECT_EQ(node.limiter.tickets().open, 1u);
  // Its window is over by then; nothing remains but that it is settled.
  EXPECT_EQ(node.limiter.settle_due(kNow + kMinute, 100), 1u);
  EXPECT_FALSE(node.limiter.settle(ticket, 1, kNow + kMinute).known);
  EXPECT_EQ(node.limiter.tickets().timed_out, 1u);

  Under bucket({rule("r", 10, Algorithm::token_bucket)});
  bucket.reserve(4);
  bucket.limiter.settle_due(kNow + kMinute, 100);
  EXPECT_EQ(bucket.used(0, kNow + kMinute), 4u);
  EXPECT_EQ(bucket.drain().at(0).value, 4u);
}

TEST(Reserve, WorkOfATimeoutIsBounded) {
  Under node({rule("r", 1000)});
  for (int i = 0; i < 50; ++i) node.reserve(1);
  EXPECT_EQ(node.limiter.settle_due(kNow + kMinute, 20), 20u);
  EXPECT_EQ(node.limiter.tickets().open, 30u);
  node.limiter.settle_all(kNow);
  EXPECT_EQ(node.limiter.tickets().open, 0u);
  EXPECT_EQ(node.limiter.tickets().timed_out, 20u);
}

TEST(Reserve, IsAllOrNothing) {
  Under node({rule("wide", 10), rule("narrow", 3, Algorithm::token_bucket)});
  EXPECT_FALSE(node.reserve(4));
  EXPECT_FALSE(node.decision.allowed);
  EXPECT_EQ(node.used(0), 0u);
  Ticket ticket = node.reserve(3);
  EXPECT_FALSE(node.check(1));
  node.limiter.settle(ticket, 0, kNow);
  EXPECT_EQ(node.used(0), 0u);
  EXPECT_EQ(node.used(1), 0u);
  EXPECT_TRUE(node.drain().empty());
}

TEST(Reserve, CountsEachRulesCost) {
  Rule costly = rule("costly", 100);
  costly.default_cost = 5;
  Under node({rule("plain", 100), costly});
  Ticket ticket = node.reserve(2);
  EXPECT_EQ(node.used(1), 10u);
  node.limiter.settle(ticket, 7, kNow);
  EXPECT_EQ(node.used(0), 7u);
  EXPECT_EQ(node.used(1), 35u);
}

TEST(Reserve, CountsInTheWindowOfTheReservation) {
  Rule sliding = rule("r", 10, Algorithm::sliding_window);
  Under node({sliding});
  Ticket ticket = node.reserve(6);
  EXPECT_FALSE(node.limiter.settle(ticket, 8, kNow + kMinute).lapsed);
  EXPECT_EQ(node.used(0, kNow + kMinute), 8u);
  EXPECT_EQ(node.used(0, kNow + kMinute + kMinute / 2), 4u);
  ASSERT_EQ(node.drain().size(), 1u);
}

TEST(Reserve, AfterItsWindowNothingIsCountedByARuleThatDrops) {
  Rule dropping = rule("r", 10);
  dropping.late = Late::drop;
  Under node({dropping, rule("bucket", 10, Algorithm::token_bucket)});
  Ticket ticket = node.reserve(6);
  Settled settled = node.limiter.settle(ticket, 8, kNow + kMinute);
  EXPECT_TRUE(settled.known);
  EXPECT_TRUE(settled.lapsed);
  EXPECT_EQ(node.used(0, kNow + kMinute), 0u);
  EXPECT_EQ(node.used(1, kNow + kMinute), 8u);
  EXPECT_EQ(node.drain().size(), 1u);
}

TEST(Reserve, AfterItsWindowTheCurrentOneIsCharged) {
  for (Algorithm algorithm :
       {Algorithm::fixed_window, Algorithm::sliding_window, Algorithm::sliding_log}) {
    Under node({rule("r", 10, algorithm)});
    const Nanos late = kNow + 5 * kMinute;
    Ticket settled_late = node.reserve(6);
    Ticket given_back = node.reserve(1);
    ASSERT_TRUE(node.reserve(2));
    EXPECT_FALSE(node.limiter.settle(settled_late, 5, late).lapsed);
    EXPECT_EQ(node.used(0, late), 5u);
    EXPECT_FALSE(node.limiter.settle(given_back, 0, late).lapsed);
    EXPECT_EQ(node.used(0, late), 5u);
    EXPECT_EQ(node.limiter.settle_due(late, 10), 1u);
    EXPECT_EQ(node.used(0, late), 7u);
    std::vector<crdt::OwnCount> drained = node.drain();
    ASSERT_EQ(drained.size(), 1u);
    EXPECT_EQ(drained[0].value, 7u);
    EXPECT_GT(drained[0].cell.epoch.expiry, late);
  }
}

TEST(Reserve, OfAnEscrowRuleNoMoreIsChargedLateThanThereAreRights) {
  Rule escrow = rule("r", 10);
  escrow.enforcement = Enforcement::escrow;
  Under node({escrow}, {});
  const Nanos late = kNow + kMinute;
  Ticket ticket = node.reserve(8);
  ASSERT_TRUE(ticket);
  ASSERT_TRUE(node.check(7, late));
  EXPECT_FALSE(node.limiter.settle(ticket, 8, late).lapsed);
  EXPECT_EQ(node.used(0, late), 10u);
}

TEST(Reserve, NoMoreThanTheLimitIsSettled) {
  Under node({rule("window", 100), rule("log", 20, Algorithm::sliding_log),
              rule("bucket", 30, Algorithm::token_bucket)});
  Ticket ticket = node.reserve(1);
  Settled settled = node.limiter.settle(ticket, std::uint64_t{1} << 63, kNow);
  EXPECT_TRUE(settled.known);
  EXPECT_EQ(node.used(0), 100u);
  EXPECT_EQ(node.used(1), 20u);
  EXPECT_EQ(node.used(2), 30u);
  EXPECT_TRUE(node.check(20, kNow + kHour));
}

TEST(Reserve, ASweepKeepsWhatIsHeld) {
  Rule window = rule("window", 10);
  window.late = Late::drop;
  Under node({window, rule("bucket", 10, Algorithm::token_bucket)});
  ASSERT_TRUE(node.check(1));
  node.drain();
  Ticket ticket = node.reserve(6);
  EXPECT_EQ(node.limiter.sweep(kNow + kDay), 0u);
  EXPECT_EQ(node.used(1, kNow + kDay), 6u);
  EXPECT_TRUE(node.limiter.settle(ticket, 2, kNow + kDay).known);
  EXPECT_EQ(node.used(1, kNow + kDay), 2u);
  // Under a new birth: the replica may have forgotten the old one.
  std::vector<crdt::OwnCount> drained = node.drain();
  ASSERT_EQ(drained.size(), 1u);
  EXPECT_EQ(drained[0].value, 2u);
  EXPECT_EQ(drained[0].birth, static_cast<std::uint64_t>(kNow + kDay));
  EXPECT_EQ(node.limiter.sweep(kNow + 2 * kDay), 2u);
  EXPECT_EQ(node.limiter.series_count(), 0u);
}

TEST(Reserve, CancelledReservationsLeaveNothingInALog) {
  Under node({rule("r", 10, Algorithm::sliding_log)});
  for (int i = 0; i < 1000; ++i) node.limiter.settle(node.reserve(1, kNow + i), 0, kNow + i);
  EXPECT_TRUE(node.drain().empty());
  EXPECT_EQ(node.limiter.sweep(kNow), 1u);
}

TEST(Reserve, TooManyOpenTicketsAreAnsweredByTheRulesPolicy) {
  for (OnFailure policy : {OnFailure::open, OnFailure::closed}) {
    Rule one = rule("r", 10);
    one.on_failure = policy;
    LimiterOptions options = Under::replicated();
    options.max_tickets = 1;
    Under node({one}, options);
    Ticket ticket = node.reserve(1);
    ASSERT_TRUE(ticket);
    EXPECT_FALSE(node.reserve(1));
    EXPECT_EQ(node.decision.allowed, policy == OnFailure::open);
    EXPECT_TRUE(node.decision.decider()->degraded);
    // What can't be held is counted at once.
    EXPECT_EQ(node.used(0), policy == OnFailure::open ? 2u : 1u);
    EXPECT_EQ(node.limiter.counters(0).degraded, 1u);
    EXPECT_EQ(node.limiter.tickets().refused, 1u);
    node.limiter.settle(ticket, 1, kNow);
    EXPECT_TRUE(node.reserve(1));
  }
}

TEST(Reserve, WithoutRoomForItsTicketASmallBucketSaysToComeAgainInASecond) {
  Rule one = rule("r", 10, Algorithm::token_bucket);
  one.on_failure = OnFailure::closed;
  LimiterOptions options;
  options.max_tickets = 0;
  Under node({one}, options);
  ASSERT_TRUE(node.check(1));  // a small bucket, by now
  EXPECT_FALSE(node.reserve(1));
  EXPECT_FALSE(node.decision.allowed);
  EXPECT_EQ(node.decision.decider()->retry_after, kSecond);
  EXPECT_EQ(node.decision.decider()->remaining, 9u);
}

TEST(Reserve, NothingHeldNoTicket) {
  Under node({rule("r", 10)});
  EXPECT_FALSE(node.reserve(0));
  EXPECT_TRUE(node.decision.allowed);
  EXPECT_FALSE(node.limiter.reserve({"elsewhere", {}, 1}, kNow, kMinute, node.decision));
  EXPECT_TRUE(node.decision.allowed);
  EXPECT_FALSE(node.reserve(11));
  EXPECT_EQ(node.limiter.tickets().open, 0u);
}

TEST(Reserve, OnlyASettlementWantsACommit) {
  Rule commit = rule("r", 10);
  commit.durability = Durability::commit;
  Under node({commit});
  Ticket ticket = node.reserve(3);
  EXPECT_FALSE(node.decision.wants_commit);
  EXPECT_TRUE(node.limiter.settle(ticket, 3, kNow).wants_commit);
  EXPECT_FALSE(node.limiter.settle(node.reserve(3), 0, kNow).wants_commit);
}

TEST(Reserve, ARepeatedReservationGetsItsTicketAgain) {
  Under node({rule("r", 10)});
  Ticket ticket = node.reserve(3, kNow, "id");
  EXPECT_EQ(node.reserve(3, kNow, "id"), ticket);
  EXPECT_TRUE(node.decision.repeated);
  EXPECT_EQ(node.used(0), 3u);
  EXPECT_EQ(node.limiter.tickets().open, 1u);
}

TEST(Reserve, HoldsAllDescriptorsAndSettlesEachByItsOwnHits) {
  for (Algorithm algorithm :
       {Algorithm::fixed_window, Algorithm::sliding_log, Algorithm::token_bucket}) {
    Rule costly = rule("r", 100, algorithm);
    costly.default_cost = 2;
    Under node({costly});
    Entry first{"key", "k"};
    Entry second{"key", "other"};
    const Descriptor more[] = {{{&second, 1}, 10}, {{&first, 1}, 5}};
    Request request{"api", {&first, 1}, 20};
    request.more = more;
    auto used = [&](const Entry& entry) {
      return node.limiter.used(0, {"api", {&entry, 1}, 1}, kNow);
    };
    auto reserve = [&] { return node.limiter.reserve(request, kNow, kMinute, node.decision); };
    Ticket ticket = reserve();
    ASSERT_TRUE(ticket);
    EXPECT_EQ(node.decision.statuses.size(), 3u);
    EXPECT_EQ(used(first), 50u);
    EXPECT_EQ(used(second), 20u);
    EXPECT_TRUE(node.drain().empty());
    // The first descriptor's hits; the others' stay as they were reserved.
    Settled settled = node.limiter.settle(ticket, 1, kNow);
    EXPECT_TRUE(settled.known);
    EXPECT_EQ(settled.hits, 20u);
    EXPECT_EQ(used(first), 2u + 10u);
    EXPECT_EQ(used(second), 20u);
    const std::uint64_t actual[] = {0, 3, 0};
    node.limiter.settle(reserve(), actual, kNow);
    EXPECT_EQ(used(first), 12u);
    EXPECT_EQ(used(second), 26u);
    reserve();
    EXPECT_EQ(node.limiter.settle_due(kNow, 10), 0u);
    node.limiter.settle_all(kNow);
    EXPECT_EQ(used(first), 62u);
    EXPECT_EQ(used(second), 46u);
    EXPECT_FALSE(reserve());
    EXPECT_EQ(used(second), 46u);
    EXPECT_EQ(node.limiter.tickets().open, 0u);
  }
}

TEST(Reserve, ADescriptorOfNoHitsHoldsNothingBesideOneThatDoes) {
  Under node({rule("r", 10)});
  Entry first{"key", "other"};
  Entry second{"key", "k"};
  Descriptor more{{&second, 1}, 4};
  Request request{"api", {&first, 1}, 0};
  request.more = {&more, 1};
  Ticket ticket = node.limiter.reserve(request, kNow, kMinute, node.decision);
  ASSERT_TRUE(ticket);
  EXPECT_EQ(node.used(0), 4u);
  node.limiter.settle(ticket, 9, kNow);
  EXPECT_EQ(node.used(0), 4u);
  EXPECT_EQ(node.limiter.series_count(), 1u);
}

TEST(Reserve, AFreshIncarnationKeepsWhatIsHeld) {
  for (Algorithm algorithm : {Algorithm::fixed_window, Algorithm::token_bucket}) {
    Under node({rule("r", 10, algorithm)});
    ASSERT_TRUE(node.check(2));
    Ticket ticket = node.reserve(5);
    node.drain();
    node.limiter.replica_side().rebase({7, 2},
                                       [](const crdt::CellId&, const crdt::SlotId&) { return 2; });
    EXPECT_EQ(node.used(0), 7u);
    node.limiter.settle(ticket, 4, kNow);
    EXPECT_EQ(node.used(0), 6u);
    EXPECT_EQ(node.drain().at(0).value, 4u);
  }
}

}  // namespace
}  // namespace weir
