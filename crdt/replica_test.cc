#include <weir/crdt/cell_store.h>
#include <weir/crdt/escrow.h>
#include <weir/crdt/replica.h>

#include <gtest/gtest.h>

#include <chrono>

#include <algorithm>
#include <deque>
#include <memory>

namespace weir::crdt {
namespace {

constexpr Nanos kStart = 1'000'000 * kSecond;
const Epoch kEpoch{kStart, kStart + 10 * kMinute};

/// Replicas joined by a perfect network, and disks that commit when told.
struct Mesh {
  explicit Mesh(std::size_t n, bool memory_only = false) : memory(memory_only) {
    for (std::size_t i = 0; i < n; ++i) names.push_back({"r" + std::to_string(i), "n"});
    held.resize(n);
    cut.assign(n, std::vector<bool>(n, false));
    disk.resize(n);
    for (std::size_t i = 0; i < n; ++i) {
      nodes.emplace_back();
      boot(i);
    }
    for (std::size_t i = 0; i < n; ++i) link(i);
  }

  void boot(std::size_t i) {
    ReplicaOptions options;
    options.self = names[i];
    options.incarnation = {i + 1, ++boots};
    for (std::size_t j = 0; j < names.size(); ++j) {
      if (j != i) options.peers.push_back(names[j]);
    }
    nodes[i] = std::make_unique<Replica>(options, memory);
    nodes[i]->restore(disk[i], now);
    held[i].clear();
  }

  PeerIndex index(std::size_t at, std::size_t of) const {
    return static_cast<PeerIndex>(of < at ? of : of - 1);
  }

  void link(std::size_t i) {
    for (std::size_t j = 0; j < nodes.size(); ++j) {
      if (j == i) continue;
      nodes[i]->peer_up(index(i, j), nodes[j]->incarnation(), now);
      nodes[j]->peer_up(index(j, i), nodes[i]->incarnation(), now);
    }
  }

  WriteId count(std::size_t i, SeriesId series, std::uint64_t value) {
    OwnCount own{{series, kEpoch}, 0, value, {}, false};
    return nodes[i]->count({&own, 1}, now);
  }

  /// Moves messages and, unless the disk is held, writes, until nothing is left.
  void settle(std::optional<std::size_t> held_disk = {}) {
    for (int i = 0; i < 1000; ++i) {
      bool moved = false;
      for (std::size_t n = 0; n < nodes.size(); ++n) {
        Outbox out = nodes[n]->take();
        for (Write& write : out.writes) held[n].push_back(std::move(write));
        if (n != held_disk) {
          while (!held[n].empty()) {
            Write write = std::move(held[n].front());
            held[n].pop_front();
            store(n, write.delta);
            nodes[n]->persisted(write.id, now);
            moved = true;
          }
        }
        for (Envelope& envelope : out.messages) {
          std::size_t to = envelope.to < n ? envelope.to : envelope.to + 1;
          if (cut[n][to]) continue;
          ++messages;
          nodes[to]->receive(index(to, n), nodes[n]->incarnation(), envelope.message, now);
          moved = true;
        }
      }
      if (!moved) return;
    }
    FAIL() << "the mesh never comes to rest";
  }

  void store(std::size_t n, const Delta& delta) {
    disk[n].members.insert(delta.members.begin(), delta.members.end());
    for (const Cell& cell : delta.cells) {
      auto& cells = disk[n].cells;
      auto at = std::find_if(cells.begin(), cells.end(),
                             [&](const Cell& old) { return old.id == cell.id; });
      if (at == cells.end()) {
        cells.push_back(cell);
      } else {
        join(*at, cell);
      }
    }
  }

  void pass(Nanos time) {
    for (Nanos end = now + time; now < end; now += 50 * kMillisecond) {
      for (auto& node : nodes) node->tick(now);
      settle();
    }
  }

  std::uint64_t view(std::size_t i, SeriesId series) {
    const std::optional<Cell> cell = nodes[i]->find({series, kEpoch});
    return !cell ? 0 : cell->total();
  }

  bool memory;
  Nanos now = kStart;
  std::uint64_t boots = 0;
  std::uint64_t messages = 0;
  std::vector<Member> names;
  std::vector<std::unique_ptr<Replica>> nodes;
  std::vector<std::deque<Write>> held;
  std::vector<Delta> disk;
  std::vector<std::vector<bool>> cut;
};

TEST(Replica, CountsReachEveryPeerWithinATick) {
  Mesh mesh(3);
  mesh.count(0, {1, 1}, 5);
  mesh.count(1, {1, 1}, 7);
  mesh.settle();
  mesh.pass(kSecond);
  for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(mesh.view(i, {1, 1}), 12u);
  EXPECT_EQ(mesh.nodes[0]->digest(), mesh.nodes[2]->digest());
}

TEST(Replica, NothingIsShownBeforeItIsDurable) {
  Mesh mesh(2);
  mesh.count(0, {1, 1}, 5);
  mesh.settle(0);
  for (int i = 0; i < 40; ++i) {
    mesh.now += 50 * kMillisecond;
    for (auto& node : mesh.nodes) node->tick(mesh.now);
    mesh.settle(0);
  }
  EXPECT_EQ(mesh.view(0, {1, 1}), 0u);
  EXPECT_EQ(mesh.view(1, {1, 1}), 0u);
  mesh.settle();
  mesh.pass(kSecond);
  EXPECT_EQ(mesh.view(1, {1, 1}), 5u);
}

TEST(Replica, AcknowledgesOnlyWhatItsOwnDiskHolds) {
  Mesh mesh(2);
  mesh.count(0, {1, 1}, 5);
  mesh.settle(1);
  EXPECT_EQ(mesh.view(1, {1, 1}), 5u);
  EXPECT_EQ(mesh.nodes[0]->peers()[0].unacked, 1u);
  mesh.settle();
  EXPECT_EQ(mesh.nodes[0]->peers()[0].unacked, 0u);
}

TEST(Replica, QuiescentMeshIsSilentButForDigests) {
  Mesh mesh(3);
  mesh.count(0, {1, 1}, 5);
  mesh.pass(12 * kSecond);
  std::uint64_t pushes = mesh.nodes[0]->counters().pushes_sent;
  std::uint64_t repaired = mesh.nodes[1]->counters().repaired_cells;
  mesh.pass(12 * kSecond);
  EXPECT_EQ(mesh.nodes[0]->counters().pushes_sent, pushes);
  EXPECT_EQ(mesh.nodes[1]->counters().repaired_cells, repaired);
  for (const PeerStatus& peer : mesh.nodes[0]->peers()) EXPECT_TRUE(peer.agrees);
}

TEST(Replica, ACutLinkIsRepairedThroughAThirdParty) {
  Mesh mesh(3);
  mesh.pass(kSecond);
  mesh.cut[0][1] = mesh.cut[1][0] = true;
  mesh.count(0, {1, 1}, 5);
  mesh.pass(20 * kSecond);
  EXPECT_EQ(mesh.view(1, {1, 1}), 5u);
}

TEST(Replica, ARestartedNodeCountsOnBesideItsOldSlot) {
  Mesh mesh(2);
  mesh.count(0, {1, 1}, 5);
  mesh.pass(kSecond);
  mesh.boot(0);
  mesh.link(0);
  mesh.count(0, {1, 1}, 3);
  mesh.pass(kSecond);
  EXPECT_EQ(mesh.view(0, {1, 1}), 8u);
  EXPECT_EQ(mesh.view(1, {1, 1}), 8u);
}

TEST(Replica, APeerThatLostItsDiskGetsEverything) {
  Mesh mesh(2);
  for (std::uint64_t i = 1; i <= 9000; ++i) mesh.count(0, {i << 50, i}, i);
  mesh.pass(20 * kSecond);
  ASSERT_EQ(mesh.view(1, {9000ull << 50, 9000}), 9000u);
  mesh.disk[1] = {};
  mesh.boot(1);
  mesh.link(1);
  mesh.pass(20 * kSecond);
  EXPECT_EQ(mesh.nodes[1]->cell_count(), 9000u);
  EXPECT_EQ(mesh.nodes[0]->digest(), mesh.nodes[1]->digest());
}

TEST(Replica, LostPushesAreSentAgainAndStaleAcksMoveNothing) {
  Mesh mesh(2);
  mesh.pass(kSecond);
  mesh.cut[0][1] = true;
  mesh.count(0, {1, 1}, 5);
  mesh.pass(kSecond);
  EXPECT_EQ(mesh.nodes[0]->peers()[0].unacked, 1u);
  Incarnation old{9, 9};
  mesh.nodes[0]->receive(0, mesh.nodes[1]->incarnation(), Ack{old, mesh.nodes[1]->incarnation(), 1},
                         mesh.now);
  mesh.nodes[0]->receive(0, mesh.nodes[1]->incarnation(), Ack{mesh.nodes[0]->incarnation(), old, 1},
                         mesh.now);
  EXPECT_EQ(mesh.nodes[0]->peers()[0].unacked, 1u);
  EXPECT_EQ(mesh.nodes[0]->counters().stale_acks, 2u);
  mesh.cut[0][1] = false;
  mesh.pass(4 * kSecond);
  EXPECT_EQ(mesh.view(1, {1, 1}), 5u);
  EXPECT_EQ(mesh.nodes[0]->peers()[0].unacked, 0u);
}

TEST(Replica, AGapIsMergedButNotAcknowledged) {
  Mesh mesh(2);
  Incarnation pusher = mesh.nodes[0]->incarnation();
  Cell cell{{{1, 1}, kEpoch}, {{{pusher, 0}, 4}}, {}};
  mesh.nodes[1]->take();
  mesh.nodes[1]->receive(0, pusher, Push{pusher, 7, 9, false, {{cell}, {}}}, mesh.now);
  Outbox out = mesh.nodes[1]->take();
  EXPECT_EQ(mesh.view(1, {1, 1}), 4u);
  mesh.nodes[1]->persisted(out.writes.back().id, mesh.now);
  EXPECT_TRUE(mesh.nodes[1]->take().messages.empty());
}

TEST(Replica, ABucketThatDrainedIsResetAndTheDriverIsTold) {
  Mesh mesh(2);
  mesh.settle();
  CellId id{{1, 1}, kBucketEpoch};
  Incarnation peer = mesh.nodes[1]->incarnation();
  auto own = [&](std::uint64_t birth, std::uint64_t value, std::uint64_t counted, Nanos at) {
    BucketState state{{counted, at, 1}, at, at + kMinute};
    OwnCount count{id, birth, value, state, false};
    mesh.nodes[0]->count({&count, 1}, mesh.now);
  };
  own(kStart, 100, 100, kStart);
  mesh.settle();
  Nanos later = kStart + 2 * kMinute;
  Cell news{id,
            {{{peer, static_cast<std::uint64_t>(later)}, 3}},
            {{3, later, 1}, later, later + kMinute}};
  mesh.now = later;
  // What waits for the disk was counted on top of the old slots, so they stay.
  own(kStart, 101, 101, later - kSecond);
  mesh.nodes[0]->receive(0, peer, Repair{{{news}, {}}, {}}, later);
  EXPECT_TRUE(mesh.nodes[0]->take().reset_buckets.empty());
  EXPECT_EQ(mesh.nodes[0]->find(id)->total(), 103u);

  Mesh other(2);
  other.settle();
  OwnCount old{id, kStart, 100, {{100, kStart, 1}, kStart, kStart + kMinute}, false};
  other.nodes[0]->count({&old, 1}, kStart);
  other.settle();
  other.nodes[0]->receive(0, peer, Repair{{{news}, {}}, {}}, later);
  const Slot gone{{other.nodes[0]->incarnation(), kStart}, 100};
  EXPECT_EQ(other.nodes[0]->take().reset_buckets, (std::vector<ResetBucket>{{id, gone}}));
  EXPECT_EQ(*other.nodes[0]->find(id), news);
}

OwnCount bucket_count(std::uint64_t series, std::uint64_t value, Nanos at, Nanos end) {
  return {{{series << 48, series}, kBucketEpoch}, kStart, value, {{value, at, 1}, at, end}, false};
}

TEST(Replica, ABucketInUseOutlivesTheEndThatItHadFirst) {
  Mesh mesh(1);
  Replica& node = *mesh.nodes[0];
  Nanos end = kStart + kMinute;
  for (std::uint64_t use = 1; use <= 2; ++use) {
    OwnCount count = bucket_count(1, use, kStart, use * kMinute + kStart);
    node.count({&count, 1}, kStart);
    mesh.settle();
  }
  node.retire_buckets(end + 2 * kSecond);
  node.tick(end + 2 * kSecond);
  EXPECT_EQ(node.cell_count(), 1u);
  node.retire_buckets(end + kMinute + 2 * kSecond);
  node.tick(end + kMinute + 2 * kSecond);
  EXPECT_EQ(node.cell_count(), 0u);
  EXPECT_EQ(node.digest(), Mesh(1).nodes[0]->digest());
}

TEST(Replica, ABucketOfWhichACountWaitsForTheDiskStays) {
  Mesh mesh(1);
  Replica& node = *mesh.nodes[0];
  Nanos end = kStart + kMinute;
  OwnCount first = bucket_count(1, 1, kStart, end);
  node.count({&first, 1}, kStart);
  mesh.settle();
  OwnCount second = bucket_count(1, 2, kStart, end + kMinute);
  node.count({&second, 1}, kStart);
  node.retire_buckets(end + 2 * kSecond);
  node.tick(end + 2 * kSecond);
  EXPECT_EQ(node.cell_count(), 1u);
  mesh.settle();
  EXPECT_EQ(node.find(first.cell)->total(), 2u);
}

TEST(Replica, ManyBucketsThatEndAtOnceGoInPieces) {
  Mesh mesh(1);
  Replica& node = *mesh.nodes[0];
  std::vector<OwnCount> counts;
  for (std::uint64_t i = 1; i <= 3000; ++i) {
    counts.push_back(bucket_count(i, 1, kStart, kStart + kMinute));
  }
  node.count(counts, kStart);
  mesh.settle();
  Nanos later = kStart + 2 * kMinute;
  node.retire_buckets(later);
  node.tick(later);
  EXPECT_GT(node.cell_count(), 0u);
  EXPECT_LT(node.cell_count(), 3000u);
  for (int i = 0; i < 10; ++i) node.tick(later);
  EXPECT_EQ(node.cell_count(), 0u);
}

TEST(Replica, APeerThatComesBackIsSentWhatItMissedThoughOthersHaveIt) {
  Mesh mesh(3);
  for (std::uint64_t i = 1; i <= 10; ++i) mesh.count(0, {1, i}, 1);
  mesh.pass(kSecond);
  mesh.nodes[0]->peer_down(0);
  mesh.cut[0][1] = true;
  for (std::uint64_t i = 6; i <= 15; ++i) mesh.count(0, {1, i}, 2);
  mesh.pass(kSecond);
  for (std::uint64_t i = 16; i <= 20; ++i) mesh.count(0, {1, i}, 2);
  mesh.pass(kSecond);
  EXPECT_EQ(mesh.nodes[0]->peers()[0].unacked, 15u);
  EXPECT_EQ(mesh.nodes[0]->peers()[1].unacked, 0u);
  mesh.nodes[0]->peer_up(0, mesh.nodes[1]->incarnation(), mesh.now);
  mesh.nodes[0]->flush(mesh.now);
  Outbox out = mesh.nodes[0]->take();
  ASSERT_EQ(out.messages.size(), 1u);
  const auto& push = std::get<Push>(out.messages[0].message);
  EXPECT_EQ(push.after, 10u);
  EXPECT_EQ(push.upto, 25u);
  EXPECT_EQ(push.delta.cells.size(), 15u);
}

TEST(Replica, ALatePushOfAnEarlierBootDoesNotResetTheStream) {
  Mesh mesh(2);
  mesh.count(0, {1, 1}, 5);
  mesh.pass(kSecond);
  Incarnation old = mesh.nodes[0]->incarnation();
  mesh.boot(0);
  mesh.link(0);
  mesh.count(0, {1, 1}, 3);
  mesh.pass(kSecond);
  Cell cell{{{1, 1}, kEpoch}, {{{old, 0}, 5}}, {}};
  mesh.nodes[1]->receive(0, old, Push{old, 0, 1, true, {{cell}, {}}}, mesh.now);
  mesh.count(0, {1, 1}, 4);
  mesh.pass(kSecond);
  EXPECT_EQ(mesh.nodes[0]->peers()[0].unacked, 0u);
  EXPECT_EQ(mesh.view(1, {1, 1}), 9u);
}

TEST(Replica, LateAndEarlyNewsChangeNothing) {
  Mesh mesh(2);
  Incarnation pusher = mesh.nodes[0]->incarnation();
  Nanos now = mesh.now;
  mesh.nodes[1]->tick(now);
  Epoch past{now - 3 * kHour, now - 2 * kHour};
  Epoch future{now + 2 * kSecond, now + kMinute};
  Cell late{{{1, 1}, past}, {{{pusher, 0}, 4}}, {}};
  Cell early{{{1, 1}, future}, {{{pusher, 0}, 4}}, {}};
  Nanos floor = mesh.nodes[1]->floor();
  mesh.nodes[1]->take();
  mesh.nodes[1]->receive(0, pusher, Push{pusher, 0, 2, true, {{late, early}, {}}}, now);
  Outbox out = mesh.nodes[1]->take();
  EXPECT_TRUE(out.writes.empty());
  ASSERT_EQ(out.messages.size(), 1u);
  EXPECT_EQ(std::get<Ack>(out.messages[0].message).upto, 2u);
  EXPECT_EQ(mesh.nodes[1]->cell_count(), 0u);
  EXPECT_EQ(mesh.nodes[1]->floor(), floor);
  EXPECT_EQ(mesh.nodes[1]->counters().late_cells, 1u);
  EXPECT_EQ(mesh.nodes[1]->counters().future_cells, 1u);
}

TEST(Replica, AHigherValueOfTheOwnSlotIsAnAlarmAndIsNotTaken) {
  Mesh mesh(2);
  mesh.count(1, {1, 1}, 3);
  mesh.settle();
  Incarnation own = mesh.nodes[1]->incarnation();
  Incarnation pusher = mesh.nodes[0]->incarnation();
  Cell cell{{{1, 1}, kEpoch}, {{{own, 0}, 40}}, {}};
  mesh.nodes[1]->receive(0, pusher, Repair{{{cell}, {}}, {}}, mesh.now);
  EXPECT_EQ(mesh.view(1, {1, 1}), 3u);
  EXPECT_EQ(mesh.nodes[1]->take_alarms(), (std::vector<Alarm>{{AlarmKind::own_slot_ahead, 0}}));
  mesh.nodes[1]->reincarnate({77, 77}, false);
  mesh.nodes[1]->receive(0, pusher, Repair{{{cell}, {}}, {}}, mesh.now);
  EXPECT_EQ(mesh.view(1, {1, 1}), 40u);
}

TEST(Replica, APushThatRaisesAnAlarmIsNotAcknowledged) {
  Mesh mesh(2);
  mesh.count(1, {1, 1}, 3);
  mesh.settle();
  Incarnation own = mesh.nodes[1]->incarnation();
  Incarnation pusher = mesh.nodes[0]->incarnation();
  Cell cell{{{1, 1}, kEpoch}, {{{pusher, 0}, 2}, {{own, 0}, 40}}, {}};
  std::sort(cell.slots.begin(), cell.slots.end(),
            [](const Slot& a, const Slot& b) { return a.id < b.id; });
  mesh.nodes[1]->take();
  mesh.nodes[1]->receive(0, pusher, Push{pusher, 0, 1, true, {{cell}, {}}}, mesh.now);
  EXPECT_EQ(mesh.nodes[1]->take_alarms(), (std::vector<Alarm>{{AlarmKind::own_slot_ahead, 0}}));
  Outbox out = mesh.nodes[1]->take();
  EXPECT_TRUE(out.writes.empty());
  EXPECT_TRUE(out.messages.empty());
}

TEST(Replica, WhatOnlyMemoryHoldsIsNotAcknowledgedUntilItsNewDiskHasIt) {
  Mesh mesh(2);
  Incarnation pusher = mesh.nodes[0]->incarnation();
  Replica& replica = *mesh.nodes[1];
  const Push push{pusher, 0, 1, true, {{Cell{{{1, 1}, kEpoch}, {{{pusher, 0}, 2}}, {}}}, {}}};
  replica.reincarnate({77, 1}, true);
  replica.peer_up(0, pusher, mesh.now);
  replica.receive(0, pusher, push, mesh.now);
  replica.reincarnate({77, 2}, false);
  replica.peer_up(0, pusher, mesh.now);
  replica.take();
  replica.receive(0, pusher, push, mesh.now);
  EXPECT_TRUE(replica.take().messages.empty());
  Replica::Place place;
  while (!replica.rewrite_some(place, 1, [](const Cell&) { return true; })) {
  }
  replica.receive(0, pusher, push, mesh.now);
  EXPECT_TRUE(replica.take().messages.empty());
  replica.persisted(replica.written(), mesh.now);
  ASSERT_EQ(replica.take().messages.size(), 1u);
}

/// How long a replica takes for buckets that a peer begins anew, as their ids are.
std::chrono::nanoseconds time_of(const std::vector<CellId>& ids) {
  ReplicaOptions options;
  options.incarnation = {1, 1};
  options.peers = {{"eu", "b"}};
  Replica replica(options, false);
  const Incarnation peer{2, 1};
  const Nanos now = 1'000 * kDay;
  replica.peer_up(0, peer, now);
  const auto start = std::chrono::steady_clock::now();
  for (Nanos end : {now + kSecond, now + kDay}) {
    Repair repair;
    for (const CellId& id : ids) {
      Cell cell{id, {{{peer, static_cast<std::uint64_t>(end)}, 1}}, {{}, now, end}};
      repair.delta.cells.push_back(std::move(cell));
    }
    replica.receive(0, peer, repair, now);
  }
  const auto took = std::chrono::steady_clock::now() - start;
  EXPECT_EQ(replica.cell_count(), ids.size());
  EXPECT_EQ(replica.take().reset_buckets.size(), ids.size());
  return took;
}

TEST(Replica, CellsThatAPeerHasChosenTakeNoLongerThanOthers) {
  std::vector<CellId> chosen;
  std::vector<CellId> others;
  for (std::uint64_t i = 0; i < 40'000; ++i) {
    chosen.push_back({{i << 20, 1}, kBucketEpoch});
    others.push_back({{mix64(i, 1), mix64(i, 2)}, kBucketEpoch});
  }
  const auto of_others = time_of(others);
  EXPECT_LT(time_of(chosen), 6 * of_others + std::chrono::milliseconds(100));
}

/// A node, and a peer that sends what it likes.
struct Target {
  explicit Target(ReplicaOptions options = {}) {
    options.incarnation = {1, 1};
    options.peers = {{"eu", "b"}, {"eu", "c"}};
    options.max_peer_cells = 100;
    options.max_long_cells = 10;
    replica = std::make_unique<Replica>(options, false);
    replica->set_longest(kHour);
    replica->peer_up(0, peer, now);
  }
  /// Cells that nobody has sent before.
  Delta cells(std::size_t count, Nanos life, bool buckets = false) {
    Delta delta;
    for (std::size_t i = 0; i < count; ++i) {
      CellId id{{++named << 50, named}, Epoch{now - kSecond, now + life}};
      Cell cell{id, {{{peer, 0}, 1}}, {}};
      if (buckets) {
        cell.id.epoch = kBucketEpoch;
        cell.bucket = {{}, now, now + life};
      }
      delta.cells.push_back(std::move(cell));
    }
    return delta;
  }
  void send(const Delta& delta) { replica->receive(0, peer, Repair{delta, {}}, now); }

  Incarnation peer{2, 1};
  Nanos now = 1'000 * kDay;
  std::uint64_t named = 0;
  std::unique_ptr<Replica> replica;
};

TEST(Replica, APeerBringsNoMoreCellsThanItMay) {
  const std::vector<Alarm> alarm{{AlarmKind::too_many_cells, 0}};
  for (bool buckets : {false, true}) {
    Target node;
    Delta long_lived = node.cells(15, 700 * kDay, buckets);
    node.send(long_lived);
    EXPECT_EQ(node.replica->cell_count(), 10u);
    EXPECT_EQ(node.replica->peers()[0].refused_cells, 5u);
    EXPECT_EQ(node.replica->take_alarms(), alarm);
    node.send(node.cells(100, kMinute, buckets));
    EXPECT_EQ(node.replica->cell_count(), 110u);
    EXPECT_TRUE(node.replica->take_alarms().empty());
    node.send(node.cells(1, kMinute, buckets));
    EXPECT_EQ(node.replica->cell_count(), 110u);
    EXPECT_EQ(node.replica->take_alarms(), alarm);
    // What is held grows as it likes, and another peer has a part of its own.
    long_lived.cells[3].slots[0].value = 7;
    node.send({{long_lived.cells[3]}, {}});
    EXPECT_EQ(node.replica->find(long_lived.cells[3].id)->total(), 7u);
    Delta of_other = node.cells(1, kMinute, buckets);
    of_other.cells[0].slots[0].id.writer = {3, 1};
    node.replica->receive(1, {3, 1}, Repair{of_other, {}}, node.now);
    EXPECT_EQ(node.replica->cell_count(), 111u);
    // There is room again once they are over.
    node.now += 10 * kMinute;
    node.replica->retire_buckets(node.now - kSecond);
    node.replica->tick(node.now);
    EXPECT_EQ(node.replica->cell_count(), 10u);
    node.send(node.cells(100, kMinute, buckets));
    EXPECT_EQ(node.replica->cell_count(), 110u);
  }
}

TEST(Replica, WhatIsRefusedAsTooMuchIsAcknowledged) {
  Target node;
  node.replica->receive(0, node.peer, Push{node.peer, 0, 20, true, node.cells(20, 700 * kDay)},
                        node.now);
  node.replica->persisted(node.replica->written(), node.now);
  const Outbox out = node.replica->take();
  ASSERT_EQ(out.messages.size(), 1u);
  EXPECT_EQ(std::get<Ack>(out.messages[0].message).upto, 20u);
}

TEST(Replica, LongLivedCellsOfADiskCountAgainstEachPeer) {
  Target node;
  node.replica->restore(node.cells(8, 700 * kDay), node.now);
  node.send(node.cells(5, 700 * kDay));
  EXPECT_EQ(node.replica->cell_count(), 10u);
}

TEST(Replica, ARegistryOfAMemberIsNoForeignCell) {
  Target node;
  const Nanos now = node.now;
  for (const char* name : {"b", "c"}) {
    Cell cell{registry_cell({"eu", name}, now), {{{node.peer, 0}, 1}}, {}};
    node.send({{cell}, {}});
  }
  node.send(node.cells(10, 700 * kDay));
  EXPECT_EQ(node.replica->cell_count(), 12u);
  Cell other{registry_cell({"eu", "stranger"}, now), {{{node.peer, 0}, 1}}, {}};
  node.send({{other}, {}});
  EXPECT_EQ(node.replica->cell_count(), 12u);
}

TEST(Replica, ACellOfVeryManySlotsTakesNoMoreOfOthers) {
  Target node;
  Cell cell = node.cells(1, kMinute).cells[0];
  cell.slots.clear();
  for (std::uint64_t i = 0; i < 20'000; ++i) cell.slots.push_back({{{3, i + 1}, 0}, 1});
  node.send({{cell}, {}});
  EXPECT_EQ(node.replica->find(cell.id)->slots.size(), 16'384u);
  cell.slots = {{{node.peer, 0}, 5}};
  node.send({{cell}, {}});
  EXPECT_EQ(node.replica->find(cell.id)->value_of({node.peer, 0}), 5u);
}

TEST(Replica, AnInventoryThatRepeatsAGroupAndItselfIsAnsweredOnce) {
  Target node;
  node.send(node.cells(100, kMinute));
  Delta all;
  node.replica->for_each([&](const Cell& cell) { all.cells.push_back(cell); });
  node.replica->take();
  node.replica->tick(node.now);
  std::uint64_t round = 0;
  for (const Envelope& envelope : node.replica->take().messages) {
    if (auto* offer = std::get_if<DigestOffer>(&envelope.message)) round = offer->round;
  }
  Inventory inventory;
  inventory.round = round;
  const std::vector<CellDigest> unknown{{77, 1}};
  inventory.groups.assign(65'536, {group_of(all.cells[0].id), 0, ~std::uint64_t{0}, unknown});
  std::size_t sent = 0;
  std::size_t wanted = 0;
  for (int i = 0; i < 50; ++i) {
    node.replica->receive(0, node.peer, inventory, node.now);
    node.replica->tick(node.now);
    for (const Envelope& envelope : node.replica->take().messages) {
      const auto* repair = std::get_if<Repair>(&envelope.message);
      if (repair == nullptr) continue;
      sent += repair->delta.cells.size();
      for (const GroupWant& want : repair->wants) wanted += want.keys.size();
    }
  }
  EXPECT_LE(sent, 100u);
  EXPECT_LE(wanted, 1u);
}

TEST(Replica, WhatAPeerAsksForBeyondItsPartWaitsForTicks) {
  Target node;
  node.send(node.cells(100, kMinute));
  node.replica->take();
  for (int i = 0; i < 1000; ++i) node.replica->receive(0, node.peer, DigestOffer{}, node.now);
  EXPECT_LE(node.replica->take().messages.size(), 64u);
  node.replica->tick(node.now);
  EXPECT_FALSE(node.replica->take().messages.empty());
}

TEST(Replica, ADiskThatIsNearlyFullTakesOwnCountsAndRowsOnly) {
  Target node;
  node.replica->set_disk_short(true);
  Delta delta = node.cells(2, kMinute);
  delta.cells[1].slots[0].id.birth = 2;
  node.replica->receive(0, node.peer, Push{node.peer, 0, 2, true, delta}, node.now);
  Outbox out = node.replica->take();
  ASSERT_EQ(out.writes.size(), 1u);
  ASSERT_EQ(out.writes[0].delta.cells.size(), 1u);
  EXPECT_EQ(out.writes[0].delta.cells[0].id, delta.cells[1].id);
  EXPECT_EQ(node.replica->cell_count(), 2u);
  EXPECT_EQ(node.replica->counters().unwritten_cells, 1u);
  OwnCount own{delta.cells[0].id, 0, 3, {}, false};
  node.replica->count({&own, 1}, node.now);
  EXPECT_EQ(node.replica->take().writes.size(), 1u);
}

TEST(Replica, ExpiredCellsGoAndFreeTheirMembers) {
  Mesh mesh(2);
  mesh.count(0, {1, 1}, 5);
  mesh.pass(kSecond);
  EXPECT_EQ(mesh.nodes[1]->cell_count(), 1u);
  mesh.now = kEpoch.expiry + 5 * kMinute;
  mesh.pass(kSecond);
  EXPECT_EQ(mesh.nodes[0]->cell_count(), 0u);
  EXPECT_EQ(mesh.nodes[1]->cell_count(), 0u);
}

TEST(Replica, MemoryOnlyNodesShareAtOnceAndWriteNothing) {
  Mesh mesh(2, true);
  EXPECT_EQ(mesh.count(0, {1, 1}, 5), 0u);
  EXPECT_TRUE(mesh.nodes[0]->take().writes.empty());
  mesh.pass(kSecond);
  EXPECT_EQ(mesh.view(1, {1, 1}), 5u);
}

TEST(Replica, TwoSessionsWithOneIncarnationRaiseAnAlarm) {
  Mesh mesh(3);
  mesh.nodes[0]->peer_up(1, mesh.nodes[1]->incarnation(), mesh.now);
  EXPECT_EQ(mesh.nodes[0]->take_alarms(), (std::vector<Alarm>{{AlarmKind::duplicate_identity, 1}}));
}

}  // namespace
}  // namespace weir::crdt
