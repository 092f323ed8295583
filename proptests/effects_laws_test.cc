#include <weir/node/engine/engine.h>

#include "law.h"
#include "schedules.h"

namespace weir::laws {
namespace {

using crdt::Cell;

/// A replica, a relay and a member of whose slots the relay speaks.
struct Relayed {
  static constexpr crdt::PeerIndex kRelay = 0;
  static constexpr crdt::PeerIndex kOwner = 1;
  const crdt::Incarnation self{100, 1};
  const crdt::Incarnation relay{200, 1};
  const crdt::Incarnation owner{300, 1};

  explicit Relayed(bool is_bucket) : bucket(is_bucket), replica(options(), true) {
    replica.peer_up(kRelay, relay, now);
    replica.peer_up(kOwner, owner, now);
  }
  crdt::ReplicaOptions options() const {
    crdt::ReplicaOptions made;
    made.incarnation = self;
    made.peers = {{"relay", "n"}, {"owner", "n"}};
    return made;
  }
  crdt::SlotId slot(const crdt::Incarnation& writer) const {
    return {writer, bucket ? static_cast<std::uint64_t>(kStart) : 0};
  }
  Cell cell(std::uint64_t number) const {
    Cell made;
    made.id = {{number << 61, number},
               bucket ? crdt::kBucketEpoch : crdt::Epoch{kStart - kHour, kStart + kDay}};
    if (bucket) made.bucket = {{}, now, now + kDay};
    return made;
  }
  std::uint64_t value(std::uint64_t number, const crdt::Incarnation& writer) const {
    const std::optional<Cell> held = replica.find(cell(number).id);
    return held ? held->value_of(slot(writer)) : 0;
  }

  bool bucket;
  Nanos now = kStart;
  crdt::Replica replica;
};

/// What the replica is to hold, as its peers speak.
struct RelayedHistory : Relayed {
  using Relayed::Relayed;
  const Nanos live_for = 3 * replica.options().anti_entropy_interval;
  const crdt::Incarnation elder{300, 7};  // of the owner: that is over
  std::map<std::pair<std::uint64_t, crdt::Incarnation>, std::uint64_t> known;
  std::map<std::uint64_t, std::uint64_t> withheld;  // by cell: of the owner's slot
  std::optional<Nanos> heard;                       // the owner, in a session that has not ended
  std::uint64_t stamp = 0;

  void take_in(std::uint64_t number, const crdt::Incarnation& writer, std::uint64_t value) {
    std::uint64_t& held = known[{number, writer}];
    held = std::max(held, value);
  }

  void owner_shows(std::uint64_t number, std::uint64_t value) {
    Cell shown = cell(number);
    shown.raise(slot(owner), value);
    replica.receive(kOwner, owner, crdt::Repair{{{shown}, {}}, {}}, now);
    take_in(number, owner, value);
    reached("confirmed", withheld[number] > 0 && value >= withheld[number]);
    heard = now;
  }

  /// Of the owner's slot, of its own, and perhaps of one of the owner's earlier incarnations.
  void relay_speaks(std::uint64_t number, std::uint64_t value) {
    const std::uint64_t own = *positive_counts();
    Cell said = cell(number);
    said.raise(slot(owner), value);
    said.raise(slot(relay), own);
    const bool of_elder = *chance(30);
    if (of_elder) said.raise(slot(elder), value);
    reached("an earlier incarnation", of_elder);
    if (bucket) said.bucket.checkpoint = {said.total(), now, 1};
    deliver(said);
    take_in(number, relay, own);
    if (of_elder) take_in(number, elder, value);
    const bool live = heard && now - *heard <= live_for;
    const bool higher = value > known[{number, owner}];
    const bool drains = bucket && value < crdt::kMostRelayedUnits;
    reached("of a bucket, as much as time drains", live && higher && drains);
    reached("above a live member", live && higher && !drains);
    reached("taken of a member that is away", heard && !live && higher);
    reached("taken once its session has ended", !heard && higher);
    if (live && higher && !drains) withheld[number] = value;
    if (!live || drains) take_in(number, owner, value);
  }

  void deliver(const Cell& said) {
    if (*chance(50)) {
      replica.receive(kRelay, relay, crdt::Repair{{{said}, {}}, {}}, now);
      return;
    }
    reached("in a push");
    replica.take();
    replica.receive(kRelay, relay, crdt::Push{relay, stamp, stamp + 1, stamp == 0, {{said}, {}}},
                    now);
    // The pusher's own slots are here, which is what it asks.
    const crdt::Outbox out = replica.take();
    RC_ASSERT(out.messages.size() == 1u);
    RC_ASSERT(std::get<crdt::Ack>(out.messages[0].message).upto == ++stamp);
  }
};

LAW(55, "of a live member's slot a relay is believed no further than that member itself has shown",
    "above a live member", "taken of a member that is away", "taken once its session has ended",
    "confirmed", "a bucket", "of a bucket, as much as time drains", "an earlier incarnation",
    "in a push") {
  RelayedHistory world(*chance(40).as("bucket"));
  reached("a bucket", world.bucket);
  for (int steps = *between(1, 30).as("steps"); steps > 0; --steps) {
    const std::uint64_t number = *between<std::uint64_t>(0, 3);
    std::uint64_t value = *positive_counts();
    if (world.bucket && *chance(60)) value += crdt::kMostRelayedUnits;
    switch (*choice(6)) {
      case 0:
        world.owner_shows(number, value);
        break;
      case 1:  // or is heard of
        world.replica.receive(Relayed::kOwner, world.owner, crdt::Ack{}, world.now);
        world.heard = world.now;
        break;
      case 2:
        world.replica.peer_down(Relayed::kOwner);
        world.heard.reset();
        break;
      case 3:
        world.now += *one_of<Nanos>({kSecond, world.live_for, world.live_for + 1, 2 * kMinute});
        break;
      default:
        world.relay_speaks(number, value);
    }
    for (const auto& [slot, held] : world.known) {
      RC_ASSERT(world.value(slot.first, slot.second) == held);
    }
    if (const std::optional<Cell> held = world.replica.find(world.cell(number).id)) {
      RC_ASSERT(crdt::valid(*held));
    }
  }
}

LAW(55, "a claim that its owner does not confirm is an alarm that names the relay, others are none",
    "never confirmed", "confirmed late", "the owner went away", "more each time") {
  Relayed world(*chance(40).as("bucket"));
  const Nanos interval = world.replica.options().anti_entropy_interval;
  const std::uint64_t least = world.bucket ? crdt::kMostRelayedUnits : 1;
  const std::uint64_t shown = least + *between<std::uint64_t>(0, 99).as("shown");
  std::uint64_t claimed = shown + *between<std::uint64_t>(1, 100).as("more");
  auto say = [&](crdt::PeerIndex by, const crdt::Incarnation& from, std::uint64_t value) {
    Cell cell = world.cell(1);
    cell.raise(world.slot(world.owner), value);
    world.replica.receive(by, from, crdt::Repair{{{cell}, {}}, {}}, world.now);
  };
  say(Relayed::kOwner, world.owner, shown);
  say(Relayed::kRelay, world.relay, claimed);
  RC_ASSERT(world.replica.peers()[Relayed::kRelay].withheld_slots == 1u);
  const int ends = *choice(3).as("ends");
  const bool more = *chance(50).as("more each time");
  for (int i = 0; i < 6; ++i) {
    world.now += interval;
    world.replica.tick(world.now);
    if (i < 5) RC_ASSERT(world.replica.take_alarms().empty());
    if (i == 3 && ends == 1) say(Relayed::kOwner, world.owner, claimed);
    if (i == 3 && ends == 2) world.replica.peer_down(Relayed::kOwner);
    if (i < 3 || ends != 2) {
      world.replica.receive(Relayed::kOwner, world.owner, crdt::Ack{}, world.now);
    }
    if (more && ends == 0) say(Relayed::kRelay, world.relay, ++claimed);
  }
  world.now += interval;
  world.replica.tick(world.now);
  const std::vector<crdt::Alarm> alarms = world.replica.take_alarms();
  const crdt::Alarm expected{crdt::AlarmKind::unconfirmed_relay, Relayed::kRelay};
  if (ends == 0) {
    RC_ASSERT(alarms == std::vector<crdt::Alarm>{expected});
  } else {
    RC_ASSERT(alarms.empty());
  }
  reached("never confirmed", ends == 0);
  reached("confirmed late", ends == 1);
  reached("the owner went away", ends == 2);
  reached("more each time", more && ends == 0);
}

LAW(56, "who forges a node's own slots has it take few incarnations, its own counts stay right",
    "forged again before its time", "renewed more than twice", "the longest wait") {
  std::vector<Nanos> renewed;
  std::vector<std::string> alarms;
  Nanos now = kStart;
  std::uint64_t boots = 0;
  node::EngineOptions options;
  Rule rule;
  rule.domain = "api";
  rule.name = "per-key";
  rule.key = {"key"};
  rule.limit = 1'000'000;
  rule.window = kDay;
  options.rules = rule_set({rule});
  options.replica.peers = {{"us", "b"}};
  options.fresh_incarnation = [&boots] { return crdt::Incarnation{1, ++boots}; };
  options.longest_renew_wait = kMinute;
  node::EngineEvents events;
  events.send = [](crdt::PeerIndex, const crdt::Message&) {};
  events.reincarnated = [&](const crdt::Incarnation&) { renewed.push_back(now); };
  events.log = [&](const std::string& event, const std::string& detail) {
    if (event == "identity_alarm") alarms.push_back(detail);
  };
  node::Engine engine(options, nullptr, events);
  std::string error;
  RC_ASSERT(engine.start(now, {}, error));
  const crdt::Incarnation peer{2, 1};
  engine.peer_up(0, peer, now);

  const std::vector<Entry> entries{{"key", "k"}};
  std::uint64_t admitted = 0;
  bool forged_early = false;
  Nanos last_told = -kHour;
  for (int steps = *between(1, 60).as("steps"); steps > 0; --steps) {
    Decision decision;
    const std::uint64_t hits = *between<std::uint64_t>(1, 5);
    engine.check({"api", entries, hits}, now, decision);
    RC_ASSERT(decision.allowed);
    admitted += hits;
    engine.pump(now);
    if (*chance(80)) {
      crdt::Cell cell;
      engine.replica().for_each([&](const Cell& each) { cell.id = each.id; });
      const crdt::Incarnation own = engine.replica().incarnation();
      cell.raise({own, 0}, kMax - *between<std::uint64_t>(0, 3));
      const std::size_t before = renewed.size();
      engine.receive(0, peer, crdt::Repair{{{cell}, {}}, {}}, now);
      forged_early |= renewed.size() == before;
      if (!alarms.empty()) {
        RC_ASSERT(alarms.size() == 1u);
        RC_ASSERT(alarms[0].starts_with("us/b "));
        RC_ASSERT(now - last_told >= kMinute);
        last_told = now;
        alarms.clear();
      }
    }
    now += *one_of<Nanos>({kMillisecond, kSecond, 9 * kSecond, 21 * kSecond});
    engine.pump(now);
    RC_ASSERT(engine.limiter().used(0, {"api", entries, 0}, now) == admitted);
  }
  Nanos wait = options.renew_wait;
  for (std::size_t i = 1; i < renewed.size(); ++i) {
    RC_ASSERT(renewed[i] - renewed[i - 1] >= wait);
    if (renewed[i] - renewed[i - 1] >= wait + options.longest_renew_wait) wait = 0;
    reached("the longest wait", wait == options.longest_renew_wait);
    wait = wait == 0 ? options.renew_wait : std::min(2 * wait, options.longest_renew_wait);
  }
  reached("forged again before its time", forged_early);
  reached("renewed more than twice", renewed.size() > 2);
}

}  // namespace
}  // namespace weir::laws
