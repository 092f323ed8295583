#include <weir/limits/escrow/escrow_agent.h>

#include <gtest/gtest.h>

#include <memory>

namespace weir {
namespace {

constexpr Nanos kNow = 500'000 * kHour;
const crdt::Member kSelf{"eu", "a"};
const crdt::Member kPeer{"us", "a"};

Rule escrow_rule(std::uint64_t limit) {
  Rule rule;
  rule.domain = "api";
  rule.name = "quota";
  rule.key = {"key"};
  rule.limit = limit;
  rule.window = kMinute;
  rule.enforcement = Enforcement::escrow;
  return rule;
}

std::shared_ptr<const RuleSet> rule_set(Rule rule) {
  std::vector<RuleError> errors;
  auto set = RuleSet::make({std::move(rule)}, errors);
  EXPECT_TRUE(errors.empty());
  return set;
}

std::shared_ptr<const crdt::ShareTable> two_shares() {
  return std::make_shared<const crdt::ShareTable>(
      std::vector<crdt::Shareholder>{{kSelf, {{}}}, {kPeer, {{}}}});
}

Decision ask(Limiter& limiter, std::uint64_t hits, Nanos now = kNow) {
  std::vector<Entry> entries{{"key", "k"}};
  return limiter.check({"api", entries, hits}, now);
}

/// One node, whose disk is told when to commit, and what its peer says.
struct Node {
  crdt::Incarnation incarnation{1, 1};
  crdt::Incarnation peer_incarnation{2, 1};
  std::unique_ptr<Limiter> limiter;
  std::unique_ptr<crdt::Replica> replica;
  std::unique_ptr<EscrowAgent> agent;
  std::vector<crdt::Envelope> sent;
  std::vector<crdt::Write> writes;
  crdt::Delta disk;
  Nanos now = kNow;

  explicit Node(std::uint64_t limit, Durability durability = Durability::async) {
    Rule rule = escrow_rule(limit);
    rule.durability = durability;
    start(rule_set(rule), 0);
  }

  void start(std::shared_ptr<const RuleSet> rules, Nanos time_floor) {
    crdt::ReplicaOptions options;
    options.self = kSelf;
    options.incarnation = incarnation;
    options.peers = {kPeer};
    LimiterOptions limiter_options;
    limiter_options.replicated = true;
    limiter_options.incarnation = incarnation;
    limiter_options.shares = two_shares();
    limiter_options.self = kSelf;
    limiter_options.max_series = 1000;
    agent.reset();
    replica = std::make_unique<crdt::Replica>(options, false);
    limiter = std::make_unique<Limiter>(std::move(rules), limiter_options);
    agent = std::make_unique<EscrowAgent>(EscrowAgentOptions{two_shares()}, *replica, *limiter);
    replica->restore(disk, now);
    agent->begin(true, time_floor, false, now);
    replica->peer_up(0, peer_incarnation, now);
    pump();
  }

  void take() {
    crdt::Outbox out = replica->take();
    for (crdt::Write& write : out.writes) writes.push_back(std::move(write));
    for (const crdt::OwnCount& count : out.durable) agent->mark_durable(count);
    for (const crdt::CellId& id : out.changed) agent->changed(id);
    for (crdt::Envelope& each : agent->take()) sent.push_back(std::move(each));
  }
  void pump() {
    agent->pump(now);
    std::vector<crdt::OwnCount> counts;
    limiter->replica_side().drain(counts, 1000);
    if (!counts.empty()) replica->count(counts, now);
    take();
  }
  void commit() {
    for (const crdt::Write& write : writes) {
      for (const crdt::Cell& cell : write.delta.cells) {
        auto held = std::find_if(disk.cells.begin(), disk.cells.end(),
                                 [&](const crdt::Cell& each) { return each.id == cell.id; });
        if (held == disk.cells.end()) {
          disk.cells.push_back(cell);
        } else {
          crdt::join(*held, cell);
        }
      }
    }
    disk.members.emplace(incarnation, kSelf);
    if (!writes.empty()) replica->persisted(writes.back().id, now);
    writes.clear();
    take();
    pump();
  }
  void hear(const crdt::Message& message) {
    agent->heard(0, peer_incarnation, now);
    agent->receive(0, peer_incarnation, message, now);
    replica->receive(0, peer_incarnation, message, now);
    take();
  }
  /// The peer answers, having nothing of this member but what it can hear from it.
  void confirmed(std::uint64_t rows = 0) {
    commit();
    hear(crdt::RejoinConfirmation{incarnation, now, now, rows});
    commit();
  }
  template <typename Kind>
  std::vector<Kind> of_kind() const {
    std::vector<Kind> out;
    for (const crdt::Envelope& each : sent) {
      if (const auto* message = std::get_if<Kind>(&each.message)) out.push_back(*message);
    }
    return out;
  }
};

TEST(Escrow, AloneALimiterHasTheWholeLimit) {
  Limiter limiter(rule_set(escrow_rule(3)), {});
  EXPECT_EQ(ask(limiter, 2).statuses[0].remaining, 1u);
  Decision denied = ask(limiter, 2);
  EXPECT_FALSE(denied.allowed);
  EXPECT_FALSE(denied.statuses[0].exhausted_locally);
  EXPECT_EQ(denied.statuses[0].retry_after, kMinute);
  EXPECT_TRUE(ask(limiter, 1).allowed);
  EXPECT_EQ(ask(limiter, 4).statuses[0].retry_after, kNever);
  EXPECT_TRUE(ask(limiter, 3, kNow + kMinute).allowed);
}

TEST(Escrow, NothingIsSpentBeforeAPeerKnowsOfThisIncarnation) {
  Node node(10);
  node.commit();
  EXPECT_FALSE(ask(*node.limiter, 1).allowed);
  ASSERT_EQ(node.of_kind<crdt::RejoinRequest>().size(), 1u);
  EXPECT_EQ(node.of_kind<crdt::RejoinRequest>()[0].incarnation, node.incarnation);
  // A confirmation that knows rows that are not here yet is none.
  node.hear(crdt::RejoinConfirmation{node.incarnation, node.now, node.now, 77});
  EXPECT_FALSE(node.agent->grant_state().open);
  node.hear(crdt::RejoinConfirmation{{9, 9}, node.now, node.now, 0});
  EXPECT_FALSE(node.agent->grant_state().open);
  node.confirmed();
  EXPECT_TRUE(node.agent->grant_state().open);
  EXPECT_TRUE(node.agent->whole());
  EXPECT_TRUE(ask(*node.limiter, 5).allowed);
  Decision over = ask(*node.limiter, 1);
  EXPECT_FALSE(over.allowed);
  EXPECT_TRUE(over.statuses[0].exhausted_locally);
  EXPECT_LT(over.statuses[0].retry_after, kSecond);
}

TEST(Escrow, OnlyTheFirstUseWaitsForTheDisk) {
  Node node(2000);
  node.confirmed();
  EXPECT_TRUE(ask(*node.limiter, 1).wants_commit);
  node.pump();
  EXPECT_TRUE(ask(*node.limiter, 1).wants_commit);  // handed over, and not yet durable
  node.commit();
  for (int i = 0; i < 15; ++i) EXPECT_FALSE(ask(*node.limiter, 1).wants_commit);
  // What is ahead is a hundredth of the limit: 20.
  EXPECT_TRUE(ask(*node.limiter, 20).wants_commit);
  Node commit(2000, Durability::commit);
  commit.confirmed();
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(ask(*commit.limiter, 1).wants_commit);
    commit.pump();
    commit.commit();
  }
}

TEST(Escrow, AsksThePeerForWhatItLacksAndSpendsWhatComes) {
  Node node(10);
  node.confirmed();
  crdt::Cell registry{crdt::registry_cell(kPeer, node.now), {}, {}};
  registry.raise({node.peer_incarnation, crdt::kFenceRow}, 1);
  registry.raise({node.peer_incarnation, crdt::kFirstRow}, 1);
  node.hear(crdt::Repair{{{registry}, {{node.peer_incarnation, kPeer}}}, {}});
  EXPECT_TRUE(ask(*node.limiter, 4).allowed);
  EXPECT_FALSE(ask(*node.limiter, 3).allowed);
  node.pump();
  auto requests = node.of_kind<crdt::RightsRequest>();
  ASSERT_FALSE(requests.empty());
  EXPECT_GE(requests[0].wanted, 2u);
  EXPECT_LE(requests[0].wanted, 5u);
  crdt::Cell row{requests[0].cell, {}, {}};
  row.raise({node.peer_incarnation, crdt::transfer_row(node.incarnation)}, requests[0].wanted);
  node.hear(
      crdt::Push{node.peer_incarnation, 0, 1, true, {{row}, {{node.peer_incarnation, kPeer}}}});
  EXPECT_TRUE(ask(*node.limiter, 3).allowed);
}

TEST(Escrow, GivesWhatItHasAndNoMore) {
  Node node(10);
  node.confirmed();
  EXPECT_TRUE(ask(*node.limiter, 1).allowed);
  node.commit();
  node.now += 5 * kSecond;  // what was asked for then says nothing of what is needed now
  crdt::SeriesId series;
  crdt::SeriesId rule;
  crdt::Epoch epoch;
  // What it would ask for itself names rule and window.
  std::vector<RightsNeed> needs;
  ask(*node.limiter, 9, node.now);
  node.limiter->replica_side().rights_needed(node.now, 0, needs);
  ASSERT_EQ(needs.size(), 1u);
  rule = needs[0].rule;
  series = needs[0].cell.series;
  epoch = needs[0].cell.epoch;
  node.now += 5 * kSecond;
  node.hear(crdt::RightsRequest{rule, {series, {epoch.start, epoch.expiry + 1}}, 3});  // no window
  node.hear(crdt::RightsRequest{{1, 2}, {series, epoch}, 3});                          // no rule
  EXPECT_EQ(node.agent->counters().requests_refused, 2u);
  node.hear(crdt::RightsRequest{rule, {series, epoch}, 3});
  node.hear(crdt::RightsRequest{rule, {series, epoch}, 3});
  EXPECT_EQ(node.agent->counters().requests_served, 1u);
  EXPECT_EQ(ask(*node.limiter, 0, node.now).statuses[0].remaining, 1u);
  node.hear(crdt::RightsRequest{rule, {series, epoch}, 100});
  EXPECT_EQ(ask(*node.limiter, 0, node.now).statuses[0].remaining, 0u);
  node.pump();
  node.commit();
  const std::optional<crdt::Cell> cell = node.replica->find({series, epoch});
  ASSERT_TRUE(cell.has_value());
  EXPECT_EQ(cell->value_of({node.incarnation, crdt::transfer_row(node.peer_incarnation)}), 4u);
}

TEST(Escrow, GivesNothingOfAWindowThatALaterIncarnationHasAShareOf) {
  Node node(10);
  node.confirmed();
  EXPECT_TRUE(ask(*node.limiter, 1).allowed);
  node.commit();
  std::vector<RightsNeed> needs;
  ask(*node.limiter, 9, node.now);
  node.limiter->replica_side().rights_needed(node.now, 0, needs);
  ASSERT_EQ(needs.size(), 1u);
  crdt::CellId far = needs[0].cell;
  Nanos length = 2 * (far.epoch.expiry - far.epoch.start);  // nothing is known of its demand
  far.epoch = {far.epoch.start + length, far.epoch.expiry + length};
  Nanos skew = node.replica->options().max_skew;
  node.now = far.epoch.start - 2 * skew - 1;
  node.hear(crdt::RightsRequest{needs[0].rule, far, 3});
  EXPECT_EQ(node.agent->counters().requests_served, 0u);
  node.now = far.epoch.start - 2 * skew;
  node.hear(crdt::RightsRequest{needs[0].rule, far, 3});
  EXPECT_EQ(node.agent->counters().requests_served, 1u);
}

TEST(Escrow, AnIncarnationOnTheSameDiskTakesOver) {
  Node node(20);
  node.confirmed();
  EXPECT_TRUE(ask(*node.limiter, 8).allowed);
  node.pump();
  node.commit();
  node.incarnation = {1, 2};
  node.start(rule_set(escrow_rule(20)), 0);
  node.commit();
  EXPECT_EQ(ask(*node.limiter, 0).statuses[0].remaining, 0u);
  // The peer has not heard all of the first incarnation yet; then it has, and this one has its
  // rest.
  node.hear(crdt::RejoinConfirmation{node.incarnation, node.now, node.now, 0});
  EXPECT_FALSE(node.agent->grant_state().open);
  node.confirmed(digest_of_incarnations(*node.replica, kSelf, node.incarnation, node.now));
  EXPECT_TRUE(node.agent->whole());
  // Eight are used, and one was kept in reserve: that counts as used after a crash.
  EXPECT_EQ(ask(*node.limiter, 0).statuses[0].remaining, 1u);
}

TEST(Escrow, OfAScarceLimitNothingIsKeptInReserve) {
  Node node(10);
  node.confirmed();
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(ask(*node.limiter, 1).wants_commit);
    node.pump();
    node.commit();
  }
  const crdt::CellId cell = node.disk.cells.back().id;
  EXPECT_EQ(node.replica->find(cell)->value_of({node.incarnation, crdt::kUsedRow}), 3u);
}

TEST(Escrow, AnIncarnationThatHearsOfMoreThanItsDiskHeldTakesNothing) {
  Node node(10);
  node.confirmed();
  node.incarnation = {1, 3};
  node.start(rule_set(escrow_rule(10)), 0);
  node.commit();
  // An incarnation in between, of which its disk has nothing.
  crdt::Cell registry{crdt::registry_cell(kSelf, node.now), {}, {}};
  registry.raise({{1, 2}, crdt::kFenceRow}, static_cast<std::uint64_t>(node.now));
  node.hear(crdt::Repair{{{registry}, {{{1, 2}, kSelf}}}, {}});
  node.confirmed(digest_of_incarnations(*node.replica, kSelf, node.incarnation, node.now));
  EXPECT_TRUE(node.agent->grant_state().open);
  EXPECT_FALSE(node.agent->whole());
  EXPECT_FALSE(ask(*node.limiter, 1).allowed);
  // Shares of windows that begin later are its own.
  EXPECT_TRUE(ask(*node.limiter, 5, node.now + kMinute).allowed);
}

TEST(Escrow, TwoIncarnationsWithOneNameAreNotConfirmed) {
  Node node(10);
  node.confirmed();
  crdt::Cell registry{crdt::registry_cell(kPeer, node.now), {}, {}};
  crdt::Incarnation first = node.peer_incarnation;
  crdt::Incarnation second{2, 2};
  registry.raise({first, crdt::kFenceRow}, 1);
  registry.raise({second, crdt::kFenceRow}, 2);
  node.hear(crdt::Repair{{{registry}, {{first, kPeer}, {second, kPeer}}}, {}});
  node.commit();
  node.now += kMinute;  // long after this node began
  auto rejoin = [&](const crdt::Incarnation& incarnation) {
    node.sent.clear();
    node.agent->heard(0, incarnation, node.now);
    node.agent->receive(0, incarnation,
                        crdt::RejoinRequest{incarnation, node.now, two_shares()->version(node.now)},
                        node.now);
    node.pump();
    return !node.of_kind<crdt::RejoinConfirmation>().empty();
  };
  EXPECT_TRUE(rejoin(first));
  EXPECT_FALSE(rejoin(second));
  EXPECT_FALSE(rejoin(first));
  // Once one of them has been silent for long enough, the other may.
  node.now += 7 * kSecond;
  EXPECT_TRUE(rejoin(second));
  // One that nobody has written down may not, nor one that knows other shares.
  node.now += 7 * kSecond;
  EXPECT_FALSE(rejoin({2, 3}));
  node.now += 7 * kSecond;
  node.sent.clear();
  node.agent->receive(0, second, crdt::RejoinRequest{second, node.now, 1}, node.now);
  node.pump();
  EXPECT_TRUE(node.of_kind<crdt::RejoinConfirmation>().empty());
  EXPECT_EQ(node.agent->counters().versions_differ, 1u);
}

TEST(Escrow, AChangedLimitCountsForLaterWindows) {
  Node node(10);
  node.confirmed();
  EXPECT_TRUE(ask(*node.limiter, 1).allowed);
  node.limiter->reload(rule_set(escrow_rule(100)));
  EXPECT_EQ(ask(*node.limiter, 0).statuses[0].remaining, 4u);
  EXPECT_EQ(ask(*node.limiter, 0, node.now + kMinute).statuses[0].remaining, 50u);
  node.limiter->reload(rule_set(escrow_rule(0)));
  Decision decision = ask(*node.limiter, 1);
  EXPECT_FALSE(decision.allowed);
  EXPECT_EQ(decision.statuses[0].remaining, 0u);
  EXPECT_EQ(decision.statuses[0].retry_after, kNever);
}

void expect_no_more_after_a_failed_disk(Node& node) {
  node.replica->reincarnate({1, 2}, true);
  node.limiter->replica_side().rebase({1, 2},
                                      [](const auto&, const auto&) { return std::uint64_t{0}; });
  node.agent->reset(true, node.now);
  Decision decision = ask(*node.limiter, 1, node.now + kHour);
  EXPECT_FALSE(decision.allowed);
  EXPECT_TRUE(decision.statuses[0].degraded);
}

TEST(Escrow, AFailedDiskEndsSpending) {
  Node node(10);
  node.confirmed();
  EXPECT_TRUE(ask(*node.limiter, 1).allowed);
  expect_no_more_after_a_failed_disk(node);
}

TEST(Escrow, AHoldIsARightThatIsTaken) {
  Node node(10);
  node.confirmed();
  std::vector<Entry> entries{{"key", "k"}};
  Decision decision;
  Ticket ticket = node.limiter->reserve({"api", entries, 4}, node.now, kSecond, decision);
  ASSERT_TRUE(ticket);
  EXPECT_EQ(ask(*node.limiter, 0).statuses[0].remaining, 1u);
  Settled settled = node.limiter->settle(ticket, 2, node.now);
  EXPECT_TRUE(settled.wants_commit);
  EXPECT_EQ(ask(*node.limiter, 0).statuses[0].remaining, 3u);
}

/// 10 units a second, at most 8 of them at once.
Rule bucket_rule() {
  Rule rule = escrow_rule(10);
  rule.window = kSecond;
  rule.algorithm = Algorithm::token_bucket;
  rule.burst = 8;
  return rule;
}

TEST(EscrowBucket, AloneALimiterHasAllOfItAtOnce) {
  Limiter limiter(rule_set(bucket_rule()), {});
  EXPECT_EQ(ask(limiter, 5).statuses[0].remaining, 3u);
  Decision denied = ask(limiter, 4);
  EXPECT_FALSE(denied.allowed);
  EXPECT_FALSE(denied.statuses[0].exhausted_locally);
  EXPECT_EQ(denied.statuses[0].retry_after, 100 * kMillisecond);
  EXPECT_EQ(denied.statuses[0].reset, 500 * kMillisecond);
  EXPECT_TRUE(ask(limiter, 4, kNow + 100 * kMillisecond).allowed);
  EXPECT_EQ(ask(limiter, 9).statuses[0].retry_after, kNever);
  EXPECT_EQ(limiter.sweep(kNow + kMinute), 1u);
}

TEST(EscrowBucket, AnIncarnationBeginsWithAnEmptyOneOnceAPeerKnowsOfIt) {
  Node node(10);
  node.start(rule_set(bucket_rule()), 0);
  node.commit();
  EXPECT_FALSE(ask(*node.limiter, 1, node.now).allowed);
  EXPECT_TRUE(ask(*node.limiter, 1, node.now).statuses[0].exhausted_locally);
  // Whatever time goes by.
  node.now += kMinute;
  EXPECT_FALSE(ask(*node.limiter, 1, node.now).allowed);
  node.confirmed();
  ASSERT_TRUE(node.agent->grant_state().open);
  EXPECT_FALSE(ask(*node.limiter, 1, node.now).allowed);
  // Half of the burst is its own, and comes with half of the rate.
  EXPECT_EQ(ask(*node.limiter, 0, node.now + 5 * kSecond).statuses[0].remaining, 4u);
  Decision taken = ask(*node.limiter, 4, node.now + 5 * kSecond);
  EXPECT_TRUE(taken.allowed);
  EXPECT_FALSE(taken.wants_commit);
  EXPECT_EQ(ask(*node.limiter, 1, node.now + 5 * kSecond).statuses[0].retry_after,
            200 * kMillisecond);
}

TEST(EscrowBucket, APartThatIsLentIsFullOnceItsPeriodBegins) {
  Node node(10);
  node.start(rule_set(bucket_rule()), 0);
  node.confirmed();
  crdt::Cell registry{crdt::registry_cell(kPeer, node.now), {}, {}};
  registry.raise({node.peer_incarnation, crdt::kFenceRow}, 1);
  registry.raise({node.peer_incarnation, crdt::kFirstRow}, 1);
  node.hear(crdt::Repair{{{registry}, {{node.peer_incarnation, kPeer}}}, {}});
  node.now += kMinute;
  EXPECT_TRUE(ask(*node.limiter, 4, node.now).allowed);
  EXPECT_FALSE(ask(*node.limiter, 4, node.now).allowed);
  std::vector<crdt::RightsRequest> requests;
  for (int i = 0; i < 100 && requests.empty(); ++i) {
    node.now += 10 * kMillisecond;
    node.pump();
    requests = node.of_kind<crdt::RightsRequest>();
  }
  ASSERT_FALSE(requests.empty());
  const crdt::Epoch& period = requests[0].cell.epoch;
  EXPECT_LE(period.start - node.now, kSecond / 2);
  EXPECT_EQ(requests[0].wanted, 4u);
  crdt::Cell rows{requests[0].cell, {}, {}};
  rows.raise({node.peer_incarnation, crdt::transfer_row(node.incarnation)}, 4);
  rows.raise({node.peer_incarnation, crdt::fill_row(node.incarnation)}, 3);
  std::uint64_t before = ask(*node.limiter, 0, period.start - 1).statuses[0].remaining;
  node.hear(
      crdt::Push{node.peer_incarnation, 0, 1, true, {{rows}, {{node.peer_incarnation, kPeer}}}});
  EXPECT_EQ(ask(*node.limiter, 0, period.start - 1).statuses[0].remaining, before);
  std::uint64_t after = ask(*node.limiter, 0, period.start).statuses[0].remaining;
  EXPECT_GE(after, before + 3);
  EXPECT_LE(after, before + 4);
  // Then it is the peer's again, and what is above the own part is lost.
  EXPECT_EQ(ask(*node.limiter, 0, period.expiry).statuses[0].remaining, 4u);
}

TEST(EscrowBucket, AFailedDiskEndsSpending) {
  Node node(10);
  node.start(rule_set(bucket_rule()), 0);
  node.confirmed();
  node.now += kMinute;
  EXPECT_TRUE(ask(*node.limiter, 1, node.now).allowed);
  expect_no_more_after_a_failed_disk(node);
}

TEST(EscrowBucket, AChangedRateHoldsAtOnceAndWhatIsThereStays) {
  Node node(10);
  node.start(rule_set(bucket_rule()), 0);
  node.confirmed();
  node.now += kMinute;
  EXPECT_TRUE(ask(*node.limiter, 3, node.now).allowed);
  Rule rule = bucket_rule();
  rule.limit = 40;
  rule.burst = 16;
  node.limiter->reload(rule_set(rule));
  EXPECT_EQ(ask(*node.limiter, 0, node.now).statuses[0].remaining, 1u);
  EXPECT_EQ(ask(*node.limiter, 0, node.now + 50 * kMillisecond).statuses[0].remaining, 2u);
  EXPECT_EQ(ask(*node.limiter, 0, node.now + kSecond).statuses[0].remaining, 8u);
  rule.burst = 4;
  node.limiter->reload(rule_set(rule));
  EXPECT_EQ(ask(*node.limiter, 0, node.now + kSecond).statuses[0].remaining, 2u);
  rule.limit = 0;
  node.limiter->reload(rule_set(rule));
  Decision none = ask(*node.limiter, 1, node.now + kSecond);
  EXPECT_FALSE(none.allowed);
  EXPECT_EQ(none.statuses[0].retry_after, kNever);
}

TEST(Reserve, AMergedRuleWaitsOnlyForItsFirstUse) {
  Rule rule = escrow_rule(1000);
  rule.enforcement = Enforcement::merged;
  rule.durability = Durability::reserve;
  LimiterOptions options;
  options.replicated = true;
  options.incarnation = {1, 1};
  Limiter limiter(rule_set(rule), options);
  EXPECT_TRUE(ask(limiter, 3).wants_commit);
  std::vector<crdt::OwnCount> counts;
  limiter.replica_side().drain(counts, 10);
  ASSERT_EQ(counts.size(), 1u);
  EXPECT_EQ(counts[0].value, 13u);  // a hundredth of the limit ahead
  EXPECT_TRUE(counts[0].tell);
  limiter.replica_side().mark_durable(counts[0]);
  EXPECT_FALSE(ask(limiter, 5).wants_commit);
  EXPECT_EQ(ask(limiter, 0).statuses[0].remaining, 992u);
  counts.clear();
  limiter.replica_side().drain(counts, 10);
  EXPECT_TRUE(counts.empty());  // enough is ahead
  EXPECT_FALSE(ask(limiter, 1).wants_commit);
  limiter.replica_side().drain(counts, 10);
  ASSERT_EQ(counts.size(), 1u);
  EXPECT_EQ(counts[0].value, 19u);
  // A crash now would find 13 on the disk, and all of them used.
  EXPECT_FALSE(ask(limiter, 4).wants_commit);
  EXPECT_TRUE(ask(limiter, 1).wants_commit);
}

}  // namespace
}  // namespace weir
