#include "law.h"
#include "schedules.h"

namespace weir::laws {
namespace {

using crdt::Cell;

const std::vector<Act> kLinks{Act::cut, Act::cut_one_way, Act::mend, Act::disconnect, Act::connect};
const std::vector<Act> kEverything{Act::cut,     Act::mend,       Act::disconnect, Act::connect,
                                   Act::crash,   Act::boot,       Act::lose_disk,  Act::stall,
                                   Act::unstall, Act::reincarnate};

LAW(34, "acknowledged means durable at the peer", "acknowledgements", "a lost message",
    "a slow disk", "writes lost in a crash", "messages out of order") {
  MeshOptions options = *mesh_options(2, 3).as("mesh");
  options.memory_only = false;
  auto schedule = *schedules(options.nodes, {Act::crash, Act::boot, Act::stall, Act::unstall,
                                             Act::cut_one_way, Act::mend})
                       .as("schedule");
  Mesh mesh(options);
  for (const Step& step : schedule) {
    play(mesh, step);
    for (const std::string& promise : mesh.broken()) RC_FAIL(promise);
  }
  RC_ASSERT(mesh.settle());
  assert_agreement(mesh);
  // At rest everything is acknowledged: then everything is on every disk.
  for (std::size_t i = 0; i < mesh.size(); ++i) RC_ASSERT(mesh.disk(i) == mesh.state(0));
  reached("acknowledgements", mesh.messages(1) > 0);
  reached("a lost message", mesh.messages_lost() > 0);
  reached("a slow disk", options.max_commit > 100 * kMillisecond && mesh.messages(1) > 0);
  reached("writes lost in a crash", mesh.writes_lost() > 0);
  reached("messages out of order", mesh.messages_overtaken() > 0);
}

LAW(34, "of a bucket that has not drained too", "acknowledgements", "a slow disk",
    "a push repeated with more of a third party's", "reset before it was acknowledged") {
  MeshOptions options = *mesh_options(3, 3).as("mesh");
  options.memory_only = false;
  options.loss_percent = 0;
  options.max_delay = std::min(options.max_delay, 50 * kMillisecond);
  // Else what a cut keeps back soon comes by a third node.
  options.anti_entropy_interval = *one_of<Nanos>({kMinute, kSecond});
  Rule rule;
  rule.domain = "api";
  rule.name = "bucket";
  rule.key = {"key"};
  rule.algorithm = Algorithm::token_bucket;
  rule.window = kSecond;
  rule.limit = *one_of<std::uint64_t>({20, 5, 2}).as("a second");
  rule.burst = *one_of<std::uint64_t>({3, 10}).as("burst");
  options.rules = rule_set({rule});
  Mesh mesh(options);
  auto pause = [&](Nanos least, Nanos most) {
    mesh.advance(*between<Nanos>(least, most) * kMillisecond);
  };
  int steps = *between(5, 25).as("steps");
  for (int step = 0; step < steps; ++step) {
    pause(0, 600);
    std::size_t node = *between<std::size_t>(0, 2);
    std::size_t other = (node + *between<std::size_t>(1, 2)) % 3;
    std::size_t third = 3 - node - other;
    mesh.check(node, "k", *between<std::uint64_t>(1, 3));
    int what = *one_of<int>({0, 1, 1, 1, 2, 2, 2, 3});
    if (what == 1) {
      // A slow disk keeps the acknowledgement back until the push is repeated.
      mesh.stall(other, true);
      for (int i = 0; i < 4; ++i) {
        pause(500, 600);
        mesh.check(third, "k", 1);
      }
      pause(0, 300);
      mesh.stall(other, false);
    } else if (what == 2) {
      // A cut keeps the push back until the bucket has drained, and is reset beyond it.
      mesh.cut(node, other);
      pause(100, 500);
      Nanos end = mesh.now();
      for (const auto& [id, cell] : mesh.state(node)) end = std::max(end, cell.bucket.expiry);
      mesh.advance(end - mesh.now());
      pause(0, 500);
      mesh.check(other, "k", 1);
      mesh.mend(node, other);
    } else if (what == 3) {
      mesh.cut(node, other, *chance(50));
      pause(0, 3000);
      mesh.mend(node, other);
    }
    for (const std::string& promise : mesh.broken()) RC_FAIL(promise);
  }
  RC_ASSERT(mesh.settle(5 * kMinute));
  assert_agreement(mesh);
  reached("acknowledgements", mesh.messages(1) > 0);
  reached("a slow disk", options.max_commit > 100 * kMillisecond && mesh.messages(1) > 0);
  reached("a push repeated with more of a third party's", mesh.relayed_later() > 0);
  reached("reset before it was acknowledged", mesh.acknowledged_drained() > 0);
}

LAW(34, "pushes alone bring a peer what it acknowledges, whatever the others have", "a push lost",
    "an acknowledgement lost", "a peer behind another one") {
  const crdt::Incarnation self{100, 1};
  crdt::ReplicaOptions options;
  options.incarnation = self;
  std::vector<std::unique_ptr<crdt::Replica>> there;
  for (std::uint64_t i = 0; i < 3; ++i) {
    options.peers.push_back({"there", std::to_string(i)});
    crdt::ReplicaOptions other;
    other.incarnation = {200, i + 1};
    other.peers = {{"here", "n"}};
    there.push_back(std::make_unique<crdt::Replica>(other, true));
    there[i]->peer_up(0, self, kStart);
  }
  crdt::Replica here(options, true);
  for (crdt::PeerIndex i = 0; i < 3; ++i) here.peer_up(i, there[i]->incarnation(), kStart);

  Nanos now = kStart;
  std::map<crdt::CellId, std::uint64_t> totals;
  // Nothing but pushes and their acknowledgements arrives: no anti-entropy mends what they break.
  auto exchange = [&](int lost) {
    here.tick(now);
    for (const crdt::Envelope& envelope : here.take().messages) {
      if (!std::holds_alternative<crdt::Push>(envelope.message)) continue;
      const bool push_lost = *chance(lost);
      if (push_lost) reached("a push lost");
      if (push_lost) continue;
      crdt::Replica& peer = *there[envelope.to];
      peer.receive(0, self, envelope.message, now);
      for (const crdt::Envelope& answer : peer.take().messages) {
        const bool answer_lost = *chance(lost);
        if (answer_lost) reached("an acknowledgement lost");
        if (!answer_lost) here.receive(envelope.to, peer.incarnation(), answer.message, now);
      }
    }
  };
  for (int step = *between(1, 30).as("steps"); step > 0; --step) {
    std::vector<crdt::OwnCount> counts;
    for (int n = *between(1, 3); n > 0; --n) {
      crdt::OwnCount count;
      count.cell = *window_ids();
      count.value = ++totals[count.cell];
      counts.push_back(count);
    }
    here.count(counts, now);
    now += *one_of<Nanos>({300 * kMillisecond, 3 * kSecond});
    exchange(30);
    const std::vector<crdt::PeerStatus> peers = here.peers();
    reached("a peer behind another one", peers[0].acked != peers[1].acked);
  }
  for (int round = 0; round < 3; ++round) {
    now += 3 * kSecond;
    exchange(0);
  }
  for (std::size_t i = 0; i < there.size(); ++i) {
    RC_ASSERT(here.peers()[i].unacked == 0u);
    for (const auto& [id, total] : totals) {
      const std::optional<crdt::Cell> cell = there[i]->find(id);
      RC_ASSERT(cell.has_value());
      RC_ASSERT(cell->value_of({self, 0}) == total);
    }
  }
}

LAW(35, "a fresh peer incarnation gets everything", "with an empty disk", "with its disk",
    "news while it was away", "it counts at once") {
  MeshOptions options = *mesh_options(2, 4).as("mesh");
  auto before = *schedules(options.nodes, {Act::stall, Act::unstall}).as("before");
  auto away = *schedules(options.nodes, {}).as("while it is away");
  bool lost = *chance(60).as("disk lost");
  Mesh mesh(options);
  play(mesh, before);
  RC_ASSERT(mesh.settle());
  mesh.crash(0);
  if (lost) mesh.lose_disk(0);
  std::uint64_t counted = 0;
  for (const Step& step : away) {
    play(mesh, step);
    counted += step.act == Act::count && step.node != 0;
  }
  mesh.boot(0);
  if (*chance(50)) {
    mesh.add(0, {{3, 3}, {kStart - kHour, kStart + kDay}}, 5);
    reached("it counts at once");
  }
  RC_ASSERT(mesh.settle());
  assert_agreement(mesh);
  auto state = mesh.state(0);
  if (!options.memory_only || !lost) {
    for (const auto& [slot, value] : mesh.durable()) {
      RC_ASSERT(state.contains(slot.first));
      RC_ASSERT(state.at(slot.first).value_of(slot.second) == value);
    }
  }
  for (std::size_t i = 1; i < mesh.size(); ++i) {
    RC_ASSERT(mesh.replica(i).peers().at(0).incarnation == mesh.replica(0).incarnation());
    RC_ASSERT(mesh.replica(i).peers().at(0).unacked == 0u);
  }
  reached("with an empty disk", lost && !state.empty());
  reached("with its disk", !lost && !state.empty());
  reached("news while it was away", counted > 0);
}

/// Two replicas that hear each other at once. What one was sent in a turn is bounded.
struct Repairing {
  Repairing(std::size_t repair_piece, const crdt::Delta& a, const crdt::Delta& b)
      : piece(repair_piece) {
    for (std::uint64_t i = 0; i < 2; ++i) {
      crdt::ReplicaOptions options;
      options.incarnation = {i + 1, 1};
      options.self = {"r", std::to_string(i)};
      options.peers = {{"r", std::to_string(1 - i)}};
      options.repair_piece = piece;
      replicas.push_back(std::make_unique<crdt::Replica>(options, true));
      replicas[i]->restore(i == 0 ? a : b, kStart);
    }
    for (std::uint64_t i = 0; i < 2; ++i) replicas[i]->peer_up(0, {2 - i, 1}, kStart);
  }

  /// True once both are equal.
  bool within(Nanos time) {
    for (Nanos now = kStart; now < kStart + time; now += 5 * kMillisecond) {
      for (std::uint64_t i = 0; i < 2; ++i) replicas[i]->tick(now);
      for (bool said = true; said;) {
        said = false;
        for (std::uint64_t i = 0; i < 2; ++i) {
          for (const crdt::Envelope& envelope : replicas[i]->take().messages) {
            said = true;
            if (const auto* repair = std::get_if<crdt::Repair>(&envelope.message)) {
              RC_ASSERT(repair->delta.cells.size() <= piece);
              ++repairs;
            }
            replicas[1 - i]->receive(0, {i + 1, 1}, envelope.message, now);
          }
        }
      }
      if (replicas[0]->digest() == replicas[1]->digest()) return true;
    }
    return false;
  }

  std::size_t piece;
  std::size_t repairs = 0;
  std::vector<std::unique_ptr<crdt::Replica>> replicas;
};

LAW(35, "nor does it matter into how many pieces that is cut", "more than an allowance",
    "one side lacks everything", "both sides differ", "a group in many pieces") {
  auto piece = *between<std::size_t>(1, 6).as("piece");
  auto cells = *between<std::size_t>(0, 450).as("cells");
  bool empty = *chance(50).as("one side is empty");
  crdt::Delta sides[2];
  for (std::uint64_t i = 0; i < cells; ++i) {
    Cell cell;
    // One group, or several.
    cell.id = {{cells % 2 == 0 ? i << 62 : 0, i}, {kStart, kStart + kDay}};
    for (std::uint64_t side = 0; side < 2; ++side) {
      cell.slots = {{{{7, side}, 0}, 1 + i % 5}};
      if (side == 0 || (!empty && i % 3 == 0)) sides[side].cells.push_back(cell);
    }
  }
  Repairing pair(piece, sides[0], sides[1]);
  RC_ASSERT(pair.within(10 * kMinute));
  RC_ASSERT(pair.replicas[1]->cell_count() == cells);
  reached("more than an allowance", empty && cells > 64 * piece);
  reached("one side lacks everything", empty && cells > 0);
  reached("both sides differ", !empty && cells > 1);
  reached("a group in many pieces", cells % 2 == 1 && pair.repairs > 3);
}

LAW(36, "a stale acknowledgement moves no cursor", "another boot of the pusher",
    "another boot of the receiver", "from an old session", "beyond the head",
    "older than the last one", "before the stream's start", "a right one") {
  crdt::Incarnation self{100, 1};
  crdt::Incarnation old_self{100, 9};
  crdt::Incarnation peer{200, 1};
  crdt::Incarnation old_peer{200, 9};
  crdt::ReplicaOptions options;
  options.incarnation = self;
  options.peers = {{"other", "n"}};
  crdt::Replica replica(options, true);
  std::uint64_t head = 0;
  auto count = [&] {
    crdt::OwnCount own{{{1, 1}, {kStart - kHour, kStart + kHour}}, 0, ++head, {}, false};
    replica.count({&own, 1}, kStart);
  };
  for (int i = *between(0, 5).as("counted before the session"); i > 0; --i) count();
  std::uint64_t base = head;
  std::uint64_t acked = base;
  replica.peer_up(0, peer, kStart);
  for (int kind : *rc::gen::container<std::vector<int>>(choice(9)).as("kinds")) {
    if (kind >= 7) {
      count();
      replica.flush(kStart);
      RC_ASSERT(replica.peers()[0].unacked == head - acked);
      continue;
    }
    crdt::Ack ack{self, peer, *between<std::uint64_t>(base, head)};
    crdt::Incarnation from = peer;
    bool right = false;
    switch (kind) {
      case 0:
        ack.pusher = old_self;
        reached("another boot of the pusher");
        break;
      case 1:
        ack.receiver = old_peer;
        reached("another boot of the receiver");
        break;
      case 2:
        from = old_peer;
        ack.receiver = old_peer;
        reached("from an old session");
        break;
      case 3:
        ack.upto = head + *between<std::uint64_t>(1, 3);
        reached("beyond the head");
        break;
      case 4:
        reached("before the stream's start", base > 0);
        right = base == 0;
        ack.upto = base == 0 ? 0 : base - 1;
        break;
      default:
        right = true;
        reached("older than the last one", ack.upto < acked);
        reached("a right one", ack.upto > acked);
        acked = std::max(acked, ack.upto);
    }
    std::uint64_t stale = replica.counters().stale_acks;
    replica.receive(0, from, ack, kStart);
    RC_ASSERT(replica.counters().stale_acks == stale + !right);
    RC_ASSERT(replica.peers()[0].unacked == head - acked);
  }
}

LAW(37, "quiescent and connected: equal digests, no traffic, bounded buffers",
    "cells that expired unsent", "after faults", "a busy mesh") {
  MeshOptions options = *mesh_options(2, 4).as("mesh");
  auto schedule = *schedules(options.nodes, kEverything).as("schedule");
  Mesh mesh(options);
  if (*chance(40)) {
    // A window that opens and closes while nobody listens.
    crdt::CellId brief{{5, 5}, {kStart, kStart + kSecond}};
    for (std::size_t i = 1; i < mesh.size(); ++i) mesh.disconnect(0, i);
    mesh.add(0, brief, 3);
    mesh.advance(5 * kSecond);
    RC_ASSERT(mesh.replica(0).find(brief) == std::nullopt);
    reached("cells that expired unsent");
  }
  play(mesh, schedule);
  RC_ASSERT(mesh.settle());
  assert_agreement(mesh);
  std::vector<std::uint64_t> sent;
  for (std::size_t kind = 0; kind < 5; ++kind) sent.push_back(mesh.messages(kind));
  std::size_t cells = mesh.replica(0).cell_count();
  mesh.advance(10 * kSecond);
  RC_ASSERT(mesh.messages(0) == sent[0]);  // pushes
  RC_ASSERT(mesh.messages(1) == sent[1]);  // acknowledgements
  RC_ASSERT(mesh.messages(4) == sent[4]);  // repairs
  // Digests still go round, one offer a peer and interval at most.
  auto most =
      static_cast<std::uint64_t>(10 * kSecond / (options.anti_entropy_interval * 9 / 10)) + 1;
  RC_ASSERT(mesh.messages(2) > sent[2]);
  RC_ASSERT(mesh.messages(2) - sent[2] <= most * mesh.size() * (mesh.size() - 1));
  RC_ASSERT(mesh.at_rest());
  assert_agreement(mesh);
  RC_ASSERT(mesh.replica(0).cell_count() == cells);
  for (std::size_t i = 0; i < mesh.size(); ++i) {
    for (const crdt::PeerStatus& peer : mesh.replica(i).peers()) {
      RC_ASSERT(peer.unacked == 0u);
      RC_ASSERT(peer.agrees);
      RC_ASSERT(peer.caught_up_at >= mesh.now() - kSecond);
    }
  }
  reached("after faults", mesh.messages_lost() > 0);
  reached("a busy mesh", sent[0] > 20);
}

LAW(38, "equal digests mean equal states", "equal states", "one value off by one", "one slot more",
    "one cell less", "a checkpoint's debt differs", "a checkpoint's instant differs",
    "a bucket's times differ", "two values exchanged") {
  crdt::Delta one = *deltas().as("one");
  crdt::Delta other = one;
  std::reverse(other.cells.begin(), other.cells.end());
  auto fill = [](const crdt::Delta& delta) {
    crdt::ReplicaOptions options;
    options.incarnation = {100, 1};
    auto replica = std::make_unique<crdt::Replica>(options, true);
    replica->restore(delta, kStart);
    return replica;
  };
  RC_ASSERT(fill(one)->digest() == fill(other)->digest());
  reached("equal states");
  if (other.cells.empty()) return;
  int change = *choice(7).as("change");
  std::size_t chosen = *between<std::size_t>(0, other.cells.size() - 1).as("cell");
  for (std::size_t i = 0; change >= 3 && change <= 5 && i < other.cells.size(); ++i) {
    if (other.cells[i].bucket.checkpoint.counted > 0) chosen = i;
  }
  Cell& cell = other.cells[chosen];
  crdt::Slot& slot = cell.slots[*between<std::size_t>(0, cell.slots.size() - 1).as("slot")];
  switch (change) {
    case 0:
      if (slot.value == kMax) return;
      ++slot.value;
      reached("one value off by one");
      break;
    case 1:
      cell.raise({{77, 77}, cell.id.is_bucket() ? 1u : 0u}, *positive_counts());
      reached("one slot more");
      break;
    case 2:
      other.cells.erase(other.cells.begin() + (&cell - other.cells.data()));
      reached("one cell less");
      break;
    case 3:
      if (!cell.id.is_bucket() || cell.bucket.checkpoint.counted == 0) return;
      cell.bucket.checkpoint.debt +=
          *one_of<crdt::DebtTicks>({1, static_cast<crdt::DebtTicks>(1) << 64});
      reached("a checkpoint's debt differs");
      break;
    case 4:
      if (!cell.id.is_bucket() || cell.bucket.checkpoint.counted == 0) return;
      cell.bucket.checkpoint.at -= 1;
      reached("a checkpoint's instant differs");
      break;
    case 5:
      if (!cell.id.is_bucket()) return;
      (*chance(50) ? cell.bucket.expiry : cell.bucket.touched) += 1;
      cell.bucket.expiry = std::max(cell.bucket.expiry, cell.bucket.touched);
      reached("a bucket's times differ");
      break;
    default:
      if (cell.slots.size() < 2 || cell.slots[0].value == cell.slots[1].value) return;
      std::swap(cell.slots[0].value, cell.slots[1].value);
      reached("two values exchanged");
  }
  RC_ASSERT(fill(one)->digest() != fill(other)->digest());
}

LAW(39, "a connected graph with cut links still converges", "a line", "a star",
    "news from an end") {
  MeshOptions options = *mesh_options(3, 5).as("mesh");
  std::size_t n = options.nodes;
  Rule rule;
  rule.domain = "api";
  rule.name = "bucket";
  rule.key = {"key"};
  rule.limit = 100;
  rule.window = kDay;
  rule.algorithm = Algorithm::token_bucket;
  options.rules = rule_set({rule});
  Mesh mesh(options);
  // A random tree: node i hangs on one before it. Every other link is cut for good.
  std::vector<std::size_t> parent(n);
  std::vector<std::size_t> degree(n);
  for (std::size_t i = 1; i < n; ++i) {
    parent[i] = *between<std::size_t>(0, i - 1).as("parent");
    ++degree[i];
    ++degree[parent[i]];
  }
  for (std::size_t i = 0; i < n; ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      if (parent[i] != j) mesh.cut(i, j);
    }
  }
  auto schedule = *schedules(n, {Act::stall, Act::unstall}).as("schedule");
  play(mesh, schedule);
  crdt::CellId cell{{1u << 20, 1}, {kStart - kHour, kStart + kHour}};
  mesh.add(n - 1, cell, 7);
  reached("news from an end", degree[n - 1] == 1);
  reached("a line", *std::max_element(degree.begin(), degree.end()) == 2);
  reached("a star", *std::max_element(degree.begin(), degree.end()) == n - 1);
  mesh.check(n - 1, "k", 3);
  RC_ASSERT(mesh.settle(2 * kMinute, true));
  assert_agreement(mesh);
  auto state = mesh.state(0);
  for (const auto& [id, units] : mesh.counted()) RC_ASSERT(state.at(id).total() == units);
  std::vector<Entry> key{{"key", "k"}};
  crdt::CellId bucket{mesh.limiter(0).series_of(0, {"api", key, 1}), crdt::kBucketEpoch};
  RC_ASSERT(state.at(bucket).total() == 3u);
}

LAW(40, "who is no member changes nothing, and a relay that inflates another's slot is found out",
    "a session that is no peer's", "a message in another's name", "an invalid cell",
    "an inflated slot of ours", "a slot of ours as it is") {
  crdt::Incarnation self{100, 1};
  crdt::Incarnation peer{200, 1};
  crdt::ReplicaOptions options;
  options.incarnation = self;
  options.peers = {{"other", "n"}};
  crdt::Replica replica(options, true);
  replica.peer_up(0, peer, kStart);
  crdt::CellId id{{1, 1}, {kStart - kHour, kStart + kHour}};
  std::uint64_t own = *between<std::uint64_t>(1, 100).as("own");
  crdt::OwnCount count{id, 0, own, {}, false};
  replica.count({&count, 1}, kStart);
  std::uint64_t digest = replica.digest();
  replica.take();
  Cell news;
  news.id = id;
  news.raise({peer, 0}, *positive_counts().as("units"));
  bool as_push = *chance(50).as("as a push");
  auto give = [&](crdt::PeerIndex index, const crdt::Incarnation& from,
                  const crdt::Incarnation& pusher) {
    if (as_push) {
      replica.receive(index, from, crdt::Push{pusher, 0, 1, true, {{news}, {}}}, kStart);
    } else {
      replica.receive(index, from, crdt::Repair{{{news}, {}}, {}}, kStart);
    }
  };
  switch (*choice(5).as("what")) {
    case 0: {
      crdt::PeerIndex stranger = *one_of<crdt::PeerIndex>({1, 2, ~crdt::PeerIndex{0}});
      replica.peer_up(stranger, {300, 1}, kStart);
      give(stranger, {300, 1}, {300, 1});
      reached("a session that is no peer's");
      break;
    }
    case 1:
      as_push = true;
      give(0, peer, {300, 1});
      RC_ASSERT(replica.counters().invalid_cells == 1u);
      reached("a message in another's name");
      break;
    case 2:
      switch (*choice(4).as("how")) {
        case 0:
          news.slots.push_back(news.slots[0]);
          break;
        case 1:
          news.slots[0].id.birth = 5;
          break;
        case 2:
          news.id.epoch.expiry = news.id.epoch.start;
          break;
        default:
          news.slots[0].id.writer = {};
          break;
      }
      give(0, peer, peer);
      RC_ASSERT(replica.counters().invalid_cells == 1u);
      reached("an invalid cell");
      break;
    case 3:
      news.slots.clear();
      news.raise({self, 0}, own + *between<std::uint64_t>(1, 1000));
      give(0, peer, peer);
      RC_ASSERT(replica.take_alarms() ==
                (std::vector<crdt::Alarm>{{crdt::AlarmKind::own_slot_ahead, 0}}));
      reached("an inflated slot of ours");
      break;
    default:
      news.slots.clear();
      news.raise({self, 0}, *between<std::uint64_t>(1, own));
      give(0, peer, peer);
      reached("a slot of ours as it is");
  }
  RC_ASSERT(replica.digest() == digest);
  RC_ASSERT(replica.find(id)->total() == own);
  RC_ASSERT(replica.take_alarms().empty());
  RC_ASSERT(replica.take().changed.empty());
}

LAW(40, "an own bucket slot that was forgotten comes back as anybody's, without an alarm",
    "in two steps", "counted anew under a new slot", "without disks") {
  crdt::Incarnation self{100, 1};
  crdt::Incarnation peer{200, 1};
  crdt::ReplicaOptions options;
  options.incarnation = self;
  options.peers = {{"other", "n"}};
  bool memory_only = *chance(50).as("memory only");
  crdt::Replica replica(options, memory_only);
  replica.peer_up(0, peer, kStart);
  crdt::CellId id{{1, 1}, crdt::kBucketEpoch};
  auto count = [&](Nanos at, std::uint64_t value) {
    crdt::BucketState state{{value, at, 1}, at, at + kSecond};
    crdt::OwnCount own{id, static_cast<std::uint64_t>(at), value, state, false};
    crdt::WriteId write = replica.count({&own, 1}, at);
    replica.persisted(write, at);
  };
  std::uint64_t value = *between<std::uint64_t>(2, 100).as("value");
  count(kStart, value);
  Cell old = *replica.find(id);
  // The bucket drains, and a peer that knows nothing of it makes a slot.
  Nanos later = old.bucket.expiry + *between<Nanos>(0, kMinute).as("drained for");
  replica.tick(later);
  Cell news;
  news.id = id;
  news.raise({peer, static_cast<std::uint64_t>(later)}, 1);
  news.bucket = {{1, later, 1}, later, later + kHour};
  auto give = [&](const Cell& cell) {
    replica.receive(0, peer, crdt::Repair{{{cell}, {}}, {}}, later);
  };
  give(news);
  RC_ASSERT(*replica.find(id) == news);
  RC_ASSERT(replica.take().reset_buckets == (std::vector<crdt::ResetBucket>{{id, old.slots[0]}}));
  if (*chance(50)) {
    count(later + 1, 1);
    reached("counted anew under a new slot");
  }
  // Old copies come back from peers that have not forgotten, in any order.
  old.bucket.expiry = later + kHour;
  crdt::SlotId slot = old.slots[0].id;
  Cell part = old;
  part.slots[0].value = *between<std::uint64_t>(1, value).as("first copy");
  part.bucket.checkpoint.counted = part.slots[0].value;
  give(part);
  give(old);
  RC_ASSERT(replica.find(id)->value_of(slot) == value);
  RC_ASSERT(replica.take_alarms().empty());
  reached("in two steps", part.slots[0].value < value);
  reached("without disks", memory_only);
}

LAW(34, "a push of which something was refused is not acknowledged until it comes again whole",
    "a window", "a bucket", "with other cells", "without disks") {
  crdt::Incarnation self{100, 1};
  crdt::Incarnation peer{200, 1};
  crdt::ReplicaOptions options;
  options.incarnation = self;
  options.peers = {{"other", "n"}};
  bool memory_only = *chance(50).as("memory only");
  crdt::Replica replica(options, memory_only);
  replica.peer_up(0, peer, kStart);
  bool bucket = *chance(50).as("a bucket");
  crdt::CellId id{{1, 1}, bucket ? crdt::kBucketEpoch : crdt::Epoch{kStart, kStart + kHour}};
  std::uint64_t birth = bucket ? static_cast<std::uint64_t>(kStart) : 0;
  crdt::BucketState state;
  if (bucket) state = {{3, kStart, 1}, kStart, kStart + kHour};
  crdt::OwnCount own{id, birth, 3, state, false};
  replica.persisted(replica.count({&own, 1}, kStart), kStart);
  replica.take();

  // The peer's own count comes in a cell that shows ours too high.
  Cell cell = *replica.find(id);
  cell.slots[0].value += *between<std::uint64_t>(1, 5).as("too high by");
  cell.raise({peer, birth}, *between<std::uint64_t>(1, 9).as("units"));
  crdt::Push push{peer, 0, 1, true, {{cell}, {}}};
  if (*chance(50)) {
    Cell other;
    other.id = {{2, 2}, {kStart, kStart + kHour}};
    other.raise({peer, 0}, 1);
    push.delta.cells.push_back(other);
    reached("with other cells");
  }
  auto acknowledged = [&] {
    crdt::Outbox out = replica.take();
    for (const crdt::Write& write : out.writes) replica.persisted(write.id, kStart);
    crdt::Outbox later = replica.take();
    out.messages.insert(out.messages.end(), later.messages.begin(), later.messages.end());
    return std::any_of(out.messages.begin(), out.messages.end(), [](const crdt::Envelope& sent) {
      return std::holds_alternative<crdt::Ack>(sent.message);
    });
  };
  replica.receive(0, peer, push, kStart);
  RC_ASSERT(!acknowledged());
  RC_ASSERT(replica.find(id)->value_of({peer, birth}) == 0u);
  RC_ASSERT(!replica.take_alarms().empty());
  // Under another incarnation that slot is a stranger's, and all of it is taken in.
  replica.reincarnate({100, 2}, memory_only);
  replica.peer_up(0, peer, kStart);
  replica.receive(0, peer, push, kStart);
  RC_ASSERT(acknowledged());
  RC_ASSERT(replica.find(id)->value_of({peer, birth}) > 0u);
  reached("a window", !bucket);
  reached("a bucket", bucket);
  reached("without disks", memory_only);
}

}  // namespace
}  // namespace weir::laws
