#include <weir/node/engine/engine.h>

#include <gtest/gtest.h>

#include <map>
#include <set>

namespace weir::node {
namespace {

constexpr Nanos kNow = 1'000'000 * kMinute;

/// A disk in memory: holds writes until commit(), and what was committed across engines.
class ModelStore final : public storage::Store {
 public:
  bool open(const crdt::Incarnation& fresh, Nanos now, storage::StoreEvents events,
            storage::Recovered& out, std::string& error) override {
    if (!used.insert(fresh).second) {
      error = "incarnation used before";
      return false;
    }
    events_ = std::move(events);
    queue_.clear();
    for (const auto& [id, cell] : cells) out.state.cells.push_back(cell);
    out.time_floor = ceiling;
    ceiling = std::max(ceiling, now);
    return true;
  }
  bool adopt(const crdt::Incarnation& fresh, Nanos, std::string&) override {
    return used.insert(fresh).second;
  }
  void reopen(const crdt::Incarnation& fresh, Nanos) override {
    queue_.clear();
    reopened = fresh;
  }
  void append(crdt::Write write) override { queue_.push_back(std::move(write)); }
  void expire(Nanos) override {}
  void reserve_time(Nanos to) override {
    wanted = to;
    if (!stalled) reach(to);
  }
  void reach(Nanos to) {
    ceiling = to;
    events_.reserved(to);
  }
  std::uint64_t backlog() const override { return queue_.size(); }
  void close(Nanos now) override {
    if (broken) {
      queue_.clear();
      events_.failed("disk full");
      return;
    }
    flush();
    ceiling = now;
  }
  storage::StoreCounters counters() const override { return said; }

  crdt::WriteId flush() {
    crdt::WriteId last = 0;
    for (crdt::Write& write : queue_) {
      for (const crdt::Cell& cell : write.delta.cells) {
        EXPECT_TRUE(crdt::valid(cell));
        auto [at, fresh] = cells.try_emplace(cell.id, cell);
        if (!fresh) crdt::join(at->second, cell);
      }
      last = write.id;
    }
    queue_.clear();
    return last;
  }

  std::map<crdt::CellId, crdt::Cell> cells;
  std::set<crdt::Incarnation> used;
  Nanos ceiling = 0;
  Nanos wanted = 0;
  bool stalled = false;  // reservations wait for reach()
  bool broken = false;
  crdt::Incarnation reopened;
  storage::StoreCounters said;

 private:
  storage::StoreEvents events_;
  std::vector<crdt::Write> queue_;
};

std::shared_ptr<const RuleSet> rules(Durability durability, Algorithm algorithm) {
  Rule rule;
  rule.domain = "api";
  rule.name = "per-key";
  rule.key = {"key"};
  rule.limit = 100;
  rule.window = kHour;
  rule.algorithm = algorithm;
  rule.durability = durability;
  std::vector<RuleError> errors;
  return RuleSet::make({rule}, errors);
}

struct Node {
  explicit Node(ModelStore* store, std::uint64_t id = 1,
                Algorithm algorithm = Algorithm::fixed_window,
                Durability durability = Durability::commit, std::size_t max_series = 1u << 20)
      : disk(store) {
    EngineOptions options;
    options.max_series = max_series;
    options.replica.self = {"eu", "eu-" + std::to_string(id)};
    options.replica.peers = {{"us", "us-1"}};
    options.rules = rules(durability, algorithm);
    options.fresh_incarnation = [id] {
      static std::uint64_t boots = 0;
      return crdt::Incarnation{id, ++boots};
    };
    static std::uint8_t starts = 0;
    options.ticket_key[0] = ++starts;
    EngineEvents events;
    events.send = [this](crdt::PeerIndex, const crdt::Message& m) { sent.push_back(m); };
    events.reincarnated = [this](const crdt::Incarnation& fresh) { renewed = fresh; };
    events.log = [this](const std::string& event, const std::string&) { logged.insert(event); };
    engine = std::make_unique<Engine>(options, store, events);
    std::string error;
    started = engine->start(kNow, {}, error);
  }

  bool hit(std::uint64_t hits = 1, Nanos at = kNow, std::string_view key = "k") {
    std::vector<Entry> entries{{"key", key}};
    engine->check({"api", entries, hits}, at, decision);
    return decision.allowed;
  }
  std::uint64_t used(Nanos at = kNow) {
    std::vector<Entry> entries{{"key", "k"}};
    return engine->limiter().used(0, {"api", entries, 1}, at);
  }
  void commit(Nanos at = kNow) { engine->committed(disk->flush(), at); }

  ModelStore* disk;
  std::unique_ptr<Engine> engine;
  bool started = false;
  Decision decision;
  std::vector<crdt::Message> sent;
  crdt::Incarnation renewed;
  std::set<std::string> logged;
};

TEST(Engine, AnAnswerThatWantsACommitWaitsForIt) {
  ModelStore disk;
  Node node(&disk);
  ASSERT_TRUE(node.started);
  ASSERT_TRUE(node.hit());
  EXPECT_TRUE(node.decision.wants_commit);
  std::vector<bool> answers;
  node.engine->when_durable([&](bool durable) { answers.push_back(durable); });
  node.engine->pump(kNow);
  EXPECT_TRUE(answers.empty());
  node.commit();
  EXPECT_EQ(answers, std::vector<bool>{true});
}

TEST(Engine, WhoWouldWaitForAStalledDiskIsTurnedAway) {
  ModelStore disk;
  Node node(&disk);
  ASSERT_TRUE(node.started);
  std::vector<Entry> entries{{"key", "k"}};
  Request commit{"api", entries, 1};
  Request other{"elsewhere", entries, 1};
  node.engine->pump(kNow);
  EXPECT_EQ(node.engine->shed(commit, kNow + kHour).to_string(), "");
  ASSERT_TRUE(node.hit());
  node.engine->when_durable([](bool) {}, 100);
  node.engine->pump(kNow + 10);
  EXPECT_EQ(node.engine->status().waiting, 100u);
  EXPECT_EQ(node.engine->shed(commit, kNow + kSecond - 1).to_string(), "");
  EXPECT_EQ(node.engine->shed(commit, kNow + kSecond).to_string(),
            "overloaded: the disk has committed nothing for 1000 ms");
  EXPECT_EQ(node.engine->shed(other, kNow + kSecond).to_string(), "") << "needs no disk";
  node.engine->when_durable([](bool) {}, 99'900);
  EXPECT_EQ(node.engine->shed(commit, kNow + 10).to_string(),
            "overloaded: 100000 requests wait for the disk");
  EXPECT_EQ(node.engine->status().shed, 2u);
  node.engine->pump(kNow + 20);
  node.commit();
  node.engine->pump(kNow + 30);
  node.commit();
  EXPECT_EQ(node.engine->status().waiting, 0u);
  EXPECT_EQ(node.engine->shed(commit, kNow + kHour).to_string(), "");
}

TEST(Engine, OfAReserveRuleWhatIsAheadOnTheDiskNeedsNotWaitForIt) {
  ModelStore disk;
  Node node(&disk, 1, Algorithm::fixed_window, Durability::reserve);
  ASSERT_TRUE(node.hit());
  node.engine->pump(kNow);
  node.commit();
  node.engine->pump(kNow);
  EXPECT_EQ(disk.cells.begin()->second.total(), 2u);  // one more than was used

  Entry known{"key", "k"};
  Entry fresh{"key", "first use"};
  const Descriptor second{{&fresh, 1}, 1};
  ASSERT_TRUE(node.hit(1, kNow, "another"));
  node.engine->when_durable([](bool) {}, 100'000);
  const auto shed = [&](const Request& request) {
    return !node.engine->shed(request, kNow).empty();
  };
  EXPECT_FALSE(shed({"api", {&known, 1}, 1}));
  EXPECT_TRUE(shed({"api", {&known, 1}, 2}));
  EXPECT_TRUE(shed({"api", {&fresh, 1}, 1}));
  EXPECT_FALSE(shed({"api", {&fresh, 1}, 0}));
  Request both{"api", {&known, 1}, 1};
  both.more = {&second, 1};
  EXPECT_TRUE(shed(both));
}

TEST(Engine, AReservationIsDurableOnceItIsSettled) {
  ModelStore disk;
  Node node(&disk);
  Entry entry{"key", "k"};
  Ticket ticket = node.engine->reserve({"api", {&entry, 1}, 40}, kNow, kMinute, node.decision);
  ASSERT_TRUE(ticket);
  EXPECT_FALSE(node.decision.wants_commit);
  EXPECT_EQ(node.used(), 40u);
  node.engine->pump(kNow);
  node.commit();
  EXPECT_TRUE(disk.cells.empty());

  Settled settled = node.engine->settle(ticket, 25, kNow);
  EXPECT_TRUE(settled.wants_commit);
  std::vector<bool> answers;
  node.engine->when_durable([&](bool durable) { answers.push_back(durable); });
  node.engine->pump(kNow);
  EXPECT_TRUE(answers.empty());
  node.commit();
  EXPECT_EQ(answers, std::vector<bool>{true});
  ASSERT_EQ(disk.cells.size(), 1u);
  EXPECT_EQ(disk.cells.begin()->second.total(), 25u);
}

TEST(Engine, WhatWasGivenBackStaysSoAfterARestart) {
  ModelStore disk;
  {
    Node node(&disk);
    ASSERT_TRUE(node.hit(10));
    node.engine->pump(kNow);
    node.commit();
    Entry entry{"key", "k"};
    Request refund{"api", {&entry, 1}, 4};
    refund.kind = RequestKind::refund;
    node.engine->check(refund, kNow, node.decision);
    EXPECT_EQ(node.decision.given_back, 4u);
    EXPECT_EQ(node.used(), 6u);
    node.engine->pump(kNow);
    node.commit();
    node.engine->stop(kNow);
  }
  ASSERT_EQ(disk.cells.size(), 1u);
  EXPECT_EQ(disk.cells.begin()->second.given_back(), 4u);
  Node again(&disk, 2);
  EXPECT_EQ(again.used(), 6u);
  // What another incarnation counted is not this one's to give.
  Entry entry{"key", "k"};
  Request refund{"api", {&entry, 1}, 4};
  refund.kind = RequestKind::refund;
  again.engine->check(refund, kNow, again.decision);
  EXPECT_EQ(again.decision.given_back, 0u);
  EXPECT_EQ(again.used(), 6u);
}

TEST(Engine, ReservationsTimeOutInAPumpAndEndWithACleanStop) {
  ModelStore disk;
  {
    Node node(&disk);
    Entry entry{"key", "k"};
    node.engine->reserve({"api", {&entry, 1}, 10}, kNow, kSecond, node.decision);
    node.engine->reserve({"api", {&entry, 1}, 20}, kNow, kMinute, node.decision);
    node.engine->pump(kNow + kSecond);
    EXPECT_EQ(node.engine->limiter().tickets().timed_out, 1u);
    node.commit(kNow + kSecond);
    EXPECT_EQ(disk.cells.begin()->second.total(), 10u);
    node.engine->stop(kNow + kSecond);
  }
  EXPECT_EQ(disk.cells.begin()->second.total(), 30u);
}

TEST(Engine, AfterARestartWithoutRoomForAllKeysEachFindsItsCount) {
  for (Algorithm algorithm : {Algorithm::fixed_window, Algorithm::token_bucket}) {
    constexpr int kKeys = 60;
    ModelStore disk;
    {
      Node node(&disk, 1, algorithm);
      for (int i = 0; i < kKeys; ++i) node.hit(30, kNow, "k" + std::to_string(i));
      node.engine->stop(kNow);
    }
    Node node(&disk, 1, algorithm, Durability::commit, 20);
    EXPECT_GT(node.engine->status().unabsorbed, 0u);
    int decided = 0;
    for (int i = 0; i < kKeys; ++i) {
      const std::string key = "k" + std::to_string(i);
      Entry entry{"key", key};
      Request request{"api", {&entry, 1}, 1};
      node.engine->check(request, kNow, node.decision);
      if (node.decision.version == 0) {
        node.engine->warm(request, kNow);
        node.engine->check(request, kNow, node.decision);
      }
      ASSERT_EQ(node.decision.statuses.size(), 1u);
      const RuleStatus& status = node.decision.statuses[0];
      if (status.degraded) continue;
      ++decided;
      EXPECT_EQ(status.limit - status.remaining, 31u) << key;
    }
    EXPECT_GE(decided, 10);
    node.engine->pump(kNow);
    EXPECT_TRUE(node.logged.contains("series_full"));
  }
}

TEST(Engine, IdleSeriesMakeRoomAndComeBackWithTheirCounts) {
  for (Algorithm algorithm : {Algorithm::fixed_window, Algorithm::token_bucket}) {
    constexpr int kKeys = 300;
    ModelStore disk;
    Node node(&disk, 1, algorithm, Durability::commit, 100);
    Nanos now = kNow;
    auto ask = [&](int i, std::uint64_t hits) {
      const std::string key = "k" + std::to_string(i);
      Entry entry{"key", key};
      Request request{"api", {&entry, 1}, hits};
      node.engine->warm(request, now);
      node.engine->check(request, now, node.decision);
      EXPECT_FALSE(node.decision.statuses.at(0).degraded) << i;
      return node.decision.statuses.at(0).remaining;
    };
    for (int round = 0; round < 2; ++round) {
      for (int i = 0; i < kKeys; ++i) {
        const std::uint64_t left = ask(i, 10);
        if (algorithm == Algorithm::fixed_window) {
          EXPECT_EQ(left, round == 0 ? 90u : 80u) << i;
        } else {
          EXPECT_LE(left, 90u) << i;  // it drains by one in 36 s
        }
        for (int pump = 0; pump < 3; ++pump) {
          now += kSecond / 3;
          node.engine->pump(now);
          node.commit(now);
        }
      }
    }
    EXPECT_LE(node.engine->limiter().series_count(), 100u);
    EXPECT_FALSE(node.logged.contains("series_full"));
  }
}

TEST(Engine, ACrashLosesWhatIsHeld) {
  ModelStore disk;
  Ticket ticket;
  std::string name;
  {
    Node node(&disk);
    Entry entry{"key", "k"};
    node.hit(5);
    ticket = node.engine->reserve({"api", {&entry, 1}, 10}, kNow, kMinute, node.decision);
    name = node.engine->ticket_name(ticket);
    EXPECT_EQ(node.engine->ticket_named(name), ticket);
    node.engine->pump(kNow);
    node.commit();
  }
  Node node(&disk);
  EXPECT_EQ(node.used(), 5u);
  EXPECT_FALSE(node.engine->ticket_named(name));
}

TEST(Engine, NamesOfTickets) {
  ModelStore disk;
  Node node(&disk);
  std::string name = node.engine->ticket_name({7});
  EXPECT_EQ(node.engine->ticket_named(name).number, 7u);
  for (const std::string& wrong :
       {std::string(), std::string("7"), name + "x", name + "99999999999999999999", "-" + name,
        name.substr(0, name.size() - 1), name.substr(0, name.size() - 2)}) {
    EXPECT_FALSE(node.engine->ticket_named(wrong)) << wrong;
  }
  EXPECT_EQ(node.engine->ticket_name({}), "");
  // Whoever has one ticket cannot name the next: no digit stays as it was.
  const std::string next = node.engine->ticket_name({8});
  const std::string guess = name.substr(0, name.find('-')) + "-8";
  EXPECT_NE(next, guess);
  EXPECT_FALSE(node.engine->ticket_named(guess));
  EXPECT_EQ(node.engine->ticket_named(next).number, 8u);
  std::string upper = name;
  for (char& c : upper) c = static_cast<char>(std::toupper(c));
  EXPECT_FALSE(upper != name && node.engine->ticket_named(upper));
  EXPECT_FALSE(node.engine->ticket_named(name.substr(0, name.find('-')) + "-07"));
}

TEST(Engine, CallersAreToldApartByTheirAddresses) {
  Node node(nullptr);
  const std::uint64_t one = node.engine->caller_of("192.0.2.1");
  EXPECT_NE(one, 0u);
  EXPECT_EQ(one, node.engine->caller_of("192.0.2.1"));
  EXPECT_NE(one, node.engine->caller_of("192.0.2.2"));
  EXPECT_EQ(node.engine->caller_of(""), 0u);
}

TEST(Engine, ARepeatedRequestWaitsForACommitToo) {
  ModelStore disk;
  Node node(&disk);
  Entry entry{"key", "k"};
  for (bool repeated : {false, true}) {
    node.engine->check({"api", {&entry, 1}, 3, "id"}, kNow, node.decision);
    EXPECT_EQ(node.decision.repeated, repeated);
    EXPECT_TRUE(node.decision.wants_commit);
  }
  EXPECT_EQ(node.used(), 3u);
}

TEST(Engine, AReservationOutlivesAChangeOfIncarnation) {
  ModelStore disk;
  Node node(&disk);
  Entry entry{"key", "k"};
  Ticket ticket = node.engine->reserve({"api", {&entry, 1}, 10}, kNow, kMinute, node.decision);
  std::string name = node.engine->ticket_name(ticket);
  node.engine->store_failed("disk full", kNow);
  EXPECT_EQ(node.used(), 10u);
  EXPECT_EQ(node.engine->ticket_named(name), ticket);
  EXPECT_TRUE(node.engine->settle(ticket, 4, kNow).known);
  EXPECT_EQ(node.used(), 4u);
}

TEST(Engine, ARestartFindsWhatWasAcknowledgedAndCountsOn) {
  for (Algorithm algorithm : {Algorithm::fixed_window, Algorithm::token_bucket}) {
    ModelStore disk;
    {
      Node node(&disk, 1, algorithm);
      node.hit(7);
      node.engine->pump(kNow);
      node.commit();
      node.hit(5);  // never becomes durable
    }
    Node node(&disk, 1, algorithm);
    EXPECT_EQ(node.used(), 7u);
    node.hit(2);
    EXPECT_EQ(node.used(), 9u);
    node.engine->pump(kNow);
    node.commit();
    Node again(&disk, 1, algorithm);
    EXPECT_EQ(again.used(), 9u);
  }
}

TEST(Engine, TimeResumesAtTheReservedCeiling) {
  ModelStore disk;
  {
    Node node(&disk);
    node.engine->pump(kNow + kMinute);
  }
  Node node(&disk);
  EXPECT_GE(node.engine->clock(kNow), kNow + kMinute);
}

TEST(Engine, TimeWaitsForTheDiskThatMustRememberIt) {
  ModelStore disk;
  {
    Node node(&disk);  // starts with a second reserved
    disk.stalled = true;
    node.engine->pump(kNow + kMinute);
    EXPECT_EQ(node.engine->clock(kNow + kMinute), kNow + kSecond);
    disk.reach(disk.wanted);
    EXPECT_EQ(node.engine->clock(kNow + kMinute), kNow + kMinute);
    node.engine->pump(kNow + kHour);
    EXPECT_EQ(node.engine->clock(kNow + kHour), kNow + kMinute + kSecond);
  }
  Node node(&disk);
  EXPECT_EQ(node.engine->clock(kNow), kNow + kMinute + kSecond);
  node.engine->store_failed("sync failed", kNow);
  EXPECT_EQ(node.engine->clock(kNow + kHour), kNow + kHour);
}

TEST(Engine, ACleanStopCommitsEverything) {
  ModelStore disk;
  {
    Node node(&disk);
    node.hit(7);
    bool durable = false;
    node.engine->when_durable([&](bool yes) { durable = yes; });
    node.engine->stop(kNow);
    EXPECT_TRUE(durable);
  }
  Node node(&disk);
  EXPECT_EQ(node.used(), 7u);
  EXPECT_EQ(node.engine->clock(kNow), kNow);
}

TEST(Engine, ACleanStopCommitsEverythingHoweverFarTheDiskIsBehind) {
  ModelStore disk;
  Node node(&disk);
  for (int i = 0; i < 70; ++i) {
    node.hit();
    node.engine->pump(kNow);
  }
  ASSERT_GE(disk.backlog(), 64u);
  for (int i = 0; i < 5000; ++i) node.hit(1, kNow, std::to_string(i));
  node.engine->stop(kNow);
  EXPECT_EQ(disk.cells.size(), 5001u);
}

TEST(Engine, AStopThatCannotCommitAcknowledgesNothing) {
  ModelStore disk;
  Node node(&disk);
  node.hit(7);
  std::vector<bool> answers;
  node.engine->when_durable([&](bool durable) { answers.push_back(durable); });
  disk.broken = true;
  node.engine->stop(kNow);
  EXPECT_EQ(answers, std::vector<bool>{false});
}

TEST(Engine, AFailedStoreAcknowledgesNothingAndKeepsEveryCount) {
  ModelStore disk;
  Node node(&disk);
  node.hit(7);
  node.engine->pump(kNow);
  node.commit();
  node.hit(5);
  std::vector<bool> answers;
  node.engine->when_durable([&](bool durable) { answers.push_back(durable); });
  node.engine->pump(kNow);
  crdt::Incarnation before = node.engine->replica().incarnation();
  node.engine->store_failed("disk full", kNow);
  EXPECT_EQ(answers, std::vector<bool>{false});
  EXPECT_NE(node.engine->replica().incarnation(), before);
  EXPECT_EQ(node.renewed, node.engine->replica().incarnation());
  EXPECT_EQ(node.used(), 12u);
  node.engine->pump(kNow);
  std::uint64_t total = 0;
  node.engine->replica().for_each([&](const crdt::Cell& cell) { total += cell.total(); });
  EXPECT_EQ(total, 12u);
  node.engine->when_durable([&](bool durable) { answers.push_back(durable); });
  EXPECT_EQ(answers.back(), false);
  EXPECT_FALSE(node.engine->status().durable);
  EXPECT_EQ(node.engine->status().storage_failure, "disk full");
}

TEST(Engine, ASlowDiskHoldsTheDrainNotTheMemory) {
  ModelStore disk;
  Node node(&disk);
  for (int i = 0; i < 500; ++i) {
    Nanos at = kNow + i * 5 * kMillisecond;
    node.hit(0 + (i < 90), at);
    node.engine->pump(at);
  }
  EXPECT_LE(disk.backlog(), 64u);
  EXPECT_FALSE(node.engine->ready_for_more());
  Nanos later = kNow + 3 * kSecond;
  node.commit(later);
  node.engine->pump(later);
  node.commit(later);
  Node again(&disk);
  EXPECT_EQ(again.used(later), 90u);
}

TEST(Engine, ATripwireMovesToAFreshIncarnationOnceEverythingIsDurable) {
  ModelStore disk;
  Node node(&disk);
  node.hit(7);
  node.engine->pump(kNow);
  node.commit();
  node.hit(5);
  node.engine->pump(kNow);
  crdt::Incarnation own = node.engine->replica().incarnation();
  crdt::Cell ahead;
  ahead.id = disk.cells.begin()->first;
  ahead.raise({own, 0}, 40);
  node.engine->receive(0, {9, 9}, crdt::Repair{{{ahead}, {}}, {}}, kNow);
  EXPECT_TRUE(node.logged.contains("identity_alarm"));
  EXPECT_EQ(node.engine->replica().incarnation(), own);
  node.commit();
  node.engine->pump(kNow);
  EXPECT_NE(node.engine->replica().incarnation(), own);
  node.hit(1);
  node.engine->pump(kNow);
  node.commit();
  EXPECT_EQ(node.used(), 13u);
  Node again(&disk);
  EXPECT_EQ(again.used(), 13u);
}

TEST(Engine, ADiskThatIsNearlyFullIsForOwnCounts) {
  ModelStore disk;
  Node node(&disk);
  disk.said.map_bytes = 1000;
  disk.said.map_used_bytes = 900;
  disk.said.map_free_bytes = 200;
  const auto peer_counts = [&](std::uint64_t series, Nanos now) {
    crdt::Cell cell{{{series, 1}, {now, now + kHour}}, {{{{9, 9}, 0}, 1}}, {}};
    node.engine->receive(0, {9, 9}, crdt::Repair{{{cell}, {}}, {}}, now);
    node.commit(now);
    return disk.cells.contains(cell.id);
  };
  Nanos now = kNow;
  node.engine->pump(now);
  EXPECT_TRUE(peer_counts(1, now));
  disk.said.map_free_bytes = 100;
  node.engine->pump(now += kSecond);
  EXPECT_TRUE(node.logged.contains("storage_nearly_full"));
  EXPECT_FALSE(peer_counts(2, now));
  EXPECT_EQ(node.engine->replica().cell_count(), 2u);
  node.hit(7, now);
  node.engine->pump(now);
  node.commit(now);
  EXPECT_EQ(disk.cells.size(), 2u);
  disk.said.map_free_bytes = 300;
  node.engine->pump(now += kSecond);
  EXPECT_TRUE(node.logged.contains("storage_room"));
  EXPECT_TRUE(peer_counts(3, now));
}

TEST(Engine, MemoryOnlyNeverPromisesDurability) {
  Node node(nullptr);
  node.hit(7);
  bool durable = true;
  node.engine->when_durable([&](bool yes) { durable = yes; });
  EXPECT_FALSE(durable);
  node.engine->pump(kNow);
  EXPECT_EQ(node.engine->replica().cell_count(), 1u);
}

TEST(Engine, ADrainedBucketIsForgottenEverywhereAndStartsAnew) {
  ModelStore disk;
  Node node(&disk, 1, Algorithm::token_bucket);
  node.hit(50);
  node.engine->pump(kNow);
  node.commit();
  // Full again after two hours at most (burst 100, max_debt 1).
  Nanos later = kNow + 3 * kHour;
  for (int i = 0; i < 200; ++i) {
    node.engine->pump(later);
    node.commit(later);
    later += 50 * kMillisecond;
  }
  EXPECT_EQ(node.engine->limiter().series_count(), 0u);
  EXPECT_EQ(node.engine->replica().cell_count(), 0u);
  node.hit(10, later);
  node.engine->pump(later);
  node.commit(later);
  EXPECT_EQ(node.used(later), 10u);
}

}  // namespace
}  // namespace weir::node
