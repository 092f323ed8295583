#include <weir/node/engine/engine.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "generators.h"
#include "law.h"

/// An engine over a disk that is slow or stands still, in virtual time.
namespace weir::laws {
namespace {

/// What a process leaves behind.
struct Platter {
  std::map<crdt::CellId, crdt::Cell> cells;
  std::map<crdt::Incarnation, crdt::Member> members;
  std::vector<crdt::Incarnation> incarnations;
  Nanos ceiling = 0;
};

/// One process' way to it: commits one after the other, each of all that was queued when it began.
class VirtualStore final : public storage::Store {
 public:
  explicit VirtualStore(Platter& platter) : platter_(platter) {}

  bool open(const crdt::Incarnation& fresh, Nanos now, storage::StoreEvents events,
            storage::Recovered& out, std::string& error) override {
    if (platter_.incarnations.end() !=
        std::find(platter_.incarnations.begin(), platter_.incarnations.end(), fresh)) {
      error = "incarnation used before";
      return false;
    }
    events_ = std::move(events);
    out = attach(fresh, now);
    return true;
  }
  void reopen(const crdt::Incarnation& fresh, Nanos now) override {
    queue_.clear();
    reopening_ = {fresh, now};
  }
  bool adopt(const crdt::Incarnation& fresh, Nanos, std::string&) override {
    platter_.incarnations.push_back(fresh);
    return true;
  }
  void append(crdt::Write write) override {
    if (!failed_) queue_.push_back(std::move(write));
  }
  void expire(Nanos) override {}
  void reserve_time(Nanos ceiling) override { wanted_ = std::max(wanted_, ceiling); }
  std::uint64_t backlog() const override { return queue_.size() + batch_.size(); }
  void close(Nanos now) override {
    hold(std::exchange(batch_, {}), 0);
    hold(std::exchange(queue_, {}), now);
  }
  storage::StoreCounters counters() const override { return {}; }

  /// What happens until `now`. Returns the last write that became durable, or 0.
  crdt::WriteId advance(Nanos now) {
    crdt::WriteId upto = 0;
    if (failed_ && reopening_.first) {
      const auto [fresh, then] = std::exchange(reopening_, {});
      if (broken) {
        events_.failed("still broken");
        return 0;
      }
      failed_ = false;
      events_.opened(std::make_shared<storage::Recovered>(attach(fresh, then)));
    }
    while (!failed_) {
      if (!done_at_) {
        if (queue_.empty() && wanted_ <= platter_.ceiling) return upto;
        batch_ = std::exchange(queue_, {});
        batch_ceiling_ = wanted_;
        done_at_ = now + latency;
      }
      if (*done_at_ > now) return upto;
      done_at_.reset();
      if (broken) {
        if (keeps) hold(batch_, batch_ceiling_);
        failed_ = true;
        queue_.clear();
        batch_.clear();
        events_.failed("broken");
        return upto;
      }
      if (!batch_.empty()) upto = batch_.back().id;
      hold(std::exchange(batch_, {}), batch_ceiling_);
      events_.reserved(batch_ceiling_);
    }
    return upto;
  }

  Nanos latency = kMillisecond;
  bool broken = false;
  bool keeps = false;  // what it reported as failed

 private:
  storage::Recovered attach(const crdt::Incarnation& fresh, Nanos now) {
    storage::Recovered out;
    for (const auto& [id, cell] : platter_.cells) out.state.cells.push_back(cell);
    out.state.members = platter_.members;
    out.incarnations = platter_.incarnations;
    out.time_floor = platter_.ceiling;
    platter_.incarnations.push_back(fresh);
    platter_.ceiling = wanted_ = std::max(platter_.ceiling, now);
    return out;
  }
  void hold(const std::vector<crdt::Write>& writes, Nanos ceiling) {
    for (const crdt::Write& write : writes) {
      for (const crdt::Cell& cell : write.delta.cells) {
        auto [at, added] = platter_.cells.try_emplace(cell.id, cell);
        if (!added) crdt::join(at->second, cell);
      }
      platter_.members.insert(write.delta.members.begin(), write.delta.members.end());
    }
    platter_.ceiling = std::max(platter_.ceiling, ceiling);
  }

  Platter& platter_;
  storage::StoreEvents events_;
  std::vector<crdt::Write> queue_;
  std::vector<crdt::Write> batch_;
  std::optional<Nanos> done_at_;
  Nanos batch_ceiling_ = 0;
  Nanos wanted_ = 0;
  bool failed_ = false;
  std::pair<crdt::Incarnation, Nanos> reopening_;
};

/// A node on such a disk.
class DiskNode {
 public:
  /// The first of `members` is the node itself.
  DiskNode(Platter& platter, Nanos now, std::shared_ptr<const RuleSet> rules,
           std::vector<crdt::Member> members = {{"eu", "node-1"}})
      : store(platter), now_(now) {
    static std::uint64_t boots = 0;
    node::EngineOptions options;
    options.replica.self = members[0];
    options.replica.peers.assign(members.begin() + 1, members.end());
    options.shareholders.reserve(members.size());
    for (const crdt::Member& member : members) options.shareholders.push_back({member});
    options.rules = std::move(rules);
    options.fresh_incarnation = [] { return crdt::Incarnation{0xD15C, ++boots}; };
    node::EngineEvents events;
    events.send = [this](crdt::PeerIndex peer, const crdt::Message& message) {
      sent.push_back({peer, message});
    };
    events.reincarnated = [](const crdt::Incarnation&) {};
    events.log = [this](const std::string& event, const std::string& detail) {
      if (event == "storage_recovered") counted_twice += std::stoull(detail);
    };
    engine = std::make_unique<node::Engine>(std::move(options), &store, std::move(events));
    storage::StoreEvents told;
    told.failed = [this](const std::string& reason) { engine->store_failed(reason, now_); };
    told.opened = [this](std::shared_ptr<storage::Recovered> recovered) {
      engine->store_opened(std::move(recovered), now_);
    };
    std::string error;
    if (!engine->start(now, told, error)) RC_FAIL(error);
  }

  /// A while later, with everything done that is due by then.
  void advance(Nanos time) {
    now_ += time;
    if (crdt::WriteId upto = store.advance(now_)) engine->committed(upto, now_);
    engine->pump(now_);
  }
  Decision check(const std::string& key, std::uint64_t hits = 1) {
    std::vector<Entry> entries{{"key", key}};
    Decision decision;
    engine->check({"api", entries, hits}, now_, decision);
    return decision;
  }
  Nanos time() const { return engine->clock(now_); }
  Nanos now() const { return now_; }

  VirtualStore store;
  std::unique_ptr<node::Engine> engine;
  std::vector<crdt::Envelope> sent;
  std::uint64_t counted_twice = 0;  // as it says

 private:
  Nanos now_;
};

Rule disk_rule(Durability durability) {
  Rule rule;
  rule.domain = "api";
  rule.name = "per-key";
  rule.key = {"key"};
  rule.limit = 1'000'000;
  rule.window = kSecond;
  rule.durability = durability;
  return rule;
}

/// The home of all keys and its peers. What they send arrives at the next step, unless they are
/// cut off.
class HomeMesh {
 public:
  HomeMesh(std::size_t nodes, std::shared_ptr<const RuleSet> rules)
      : rules_(std::move(rules)), platters_(nodes), nodes_(nodes), cut_(nodes) {
    for (std::size_t i = 0; i < nodes; ++i) boot(i);
  }

  bool up(std::size_t node) const { return nodes_[node] != nullptr; }
  DiskNode& home() { return *nodes_[0]; }
  void crash(std::size_t node) {
    if (!up(node)) return;
    nodes_[node].reset();
    for (std::size_t i = 0; i < nodes_.size(); ++i) {
      if (i != node && up(i)) nodes_[i]->engine->peer_down(index(i, node));
    }
  }
  void lose_disk(std::size_t node) { platters_[node] = {}; }
  void cut(std::size_t node, bool off) { cut_[node] = off; }
  void boot(std::size_t node) {
    if (up(node)) return;
    std::vector<crdt::Member> members{member(node)};
    for (std::size_t i = 0; i < nodes_.size(); ++i) {
      if (i != node) members.push_back(member(i));
    }
    nodes_[node] = std::make_unique<DiskNode>(platters_[node], now_, rules_, std::move(members));
  }
  void advance(Nanos time) {
    now_ += time;
    for (std::size_t a = 0; a < nodes_.size(); ++a) {
      if (!up(a)) continue;
      nodes_[a]->advance(time);
      for (std::size_t b = 0; b < nodes_.size(); ++b) meet(a, b);
      for (const crdt::Envelope& envelope : std::exchange(nodes_[a]->sent, {})) {
        const std::size_t b = envelope.to < a ? envelope.to : envelope.to + 1;
        if (!linked(a, b)) continue;
        nodes_[b]->engine->receive(index(b, a), incarnation(a), envelope.message, now_);
      }
    }
  }
  Nanos now() const { return now_; }

 private:
  static crdt::Member member(std::size_t i) { return {"eu", "node-" + std::to_string(i)}; }
  static crdt::PeerIndex index(std::size_t at, std::size_t of) {
    return static_cast<crdt::PeerIndex>(of < at ? of : of - 1);
  }
  bool linked(std::size_t a, std::size_t b) const {
    return a != b && up(a) && up(b) && !cut_[a] && !cut_[b];
  }
  crdt::Incarnation incarnation(std::size_t i) const {
    return nodes_[i]->engine->replica().incarnation();
  }
  /// Idempotent for the same incarnation.
  void meet(std::size_t a, std::size_t b) {
    if (linked(a, b)) nodes_[a]->engine->peer_up(index(a, b), incarnation(b), now_);
  }

  std::shared_ptr<const RuleSet> rules_;
  std::vector<Platter> platters_;
  std::vector<std::unique_ptr<DiskNode>> nodes_;
  std::vector<char> cut_;
  Nanos now_ = kStart;
};

LAW(48,
    "of a key that one node decides for, no more than the limit passes in a window, whatever "
    "becomes of its disk",
    "a lost disk", "a disk lost twice", "a lost disk, and nobody to ask",
    "a lost disk of which nobody had heard", "all of a limit passed", "refused after a start",
    "a window that began after a lost disk", "a crash that kept the disk") {
  Rule rule = disk_rule(Durability::commit);
  rule.limit = *between<std::uint64_t>(1, 20).as("limit");
  rule.window = *one_of<Nanos>({20 * kSecond, kHour}).as("window");
  rule.enforcement = Enforcement::home;
  rule.on_failure = OnFailure::closed;
  HomeMesh mesh(*between<std::size_t>(2, 3).as("nodes"), rule_set({rule}));
  const std::vector<Entry> entries{{"key", "k"}};
  const Request request{"api", entries, 1};
  std::map<Nanos, std::uint64_t> passed;  // by the window's start
  int lost = 0;
  Nanos lost_at = 0;
  bool alone = false;
  const auto ask = [&] {
    if (!mesh.up(0)) return;
    DiskNode& home = mesh.home();
    if (!home.engine->knows_counts(0, request, home.now())) {
      reached("refused after a start");
      return;
    }
    const Nanos window = home.time() / rule.window * rule.window;
    if (!home.check("k").allowed) return;
    home.engine->when_durable([&, window](bool durable) {
      if (!durable) return;
      RC_ASSERT(++passed[window] <= rule.limit);
      reached("all of a limit passed", passed[window] == rule.limit);
      reached("a window that began after a lost disk", lost > 0 && window > lost_at);
    });
  };
  for (int step = *between(1, 14).as("steps"); step > 0; --step) {
    switch (*choice(5)) {
      case 0: {  // the home's power
        mesh.crash(0);
        if (*chance(60)) {
          mesh.lose_disk(0);
          ++lost;
          lost_at = mesh.now();
          reached("a lost disk");
          reached("a disk lost twice", lost > 1);
          reached("a lost disk, and nobody to ask", alone);
          reached("a lost disk of which nobody had heard", passed.empty());
        } else {
          reached("a crash that kept the disk");
        }
        mesh.boot(0);
        break;
      }
      case 1:
        alone = *chance(50);
        mesh.cut(0, alone);
        break;
      case 2:
        *chance(50) ? mesh.crash(1) : mesh.boot(1);
        break;
      default:
        break;
    }
    const Nanos until = mesh.now() + *one_of<Nanos>({50 * kMillisecond, 400 * kMillisecond,
                                                     4 * kSecond, 12 * kSecond});
    while (mesh.now() < until) {
      if (*chance(10)) ask();
      mesh.advance(25 * kMillisecond);
    }
  }
}

/// What a new process finds on the disk: of each key at least what was counted.
std::uint64_t held_after_a_restart(Platter& platter, Nanos now, const Rule& rule,
                                   const std::map<std::string, std::uint64_t>& counted) {
  DiskNode again(platter, now, rule_set({rule}));
  std::uint64_t held = 0;
  for (const auto& [key, units] : counted) {
    const std::vector<Entry> entries{{"key", key}};
    const std::uint64_t used = again.engine->limiter().used(0, {"api", entries, 0}, now);
    if (!is_bucket(rule.algorithm)) RC_ASSERT(used >= units);
    held += used;
  }
  return held;
}

LAW(49,
    "a node whose disk was broken promises again once it is not, and then its disk holds all that "
    "it "
    "counted",
    "a disk that broke", "a disk that broke again", "broken for longer than the longest wait",
    "a failed write that was there", "another disk in its place", "decided without a disk",
    "counted twice, and said so", "a bucket") {
  Platter platter;
  Rule rule = disk_rule(Durability::commit);
  rule.window = kHour;
  if (*chance(30)) {
    rule.algorithm = Algorithm::token_bucket;
    rule.burst = rule.limit;
    reached("a bucket");
  }
  auto node = std::make_unique<DiskNode>(platter, kStart, rule_set({rule}));
  std::map<std::string, std::uint64_t> counted;
  const auto run = [&](Nanos time, bool asks = true) {
    for (const Nanos until = node->now() + time; node->now() < until;) {
      if (asks && *chance(5)) {
        const std::string key(1, static_cast<char>('a' + *between(0, 3)));
        RC_ASSERT(node->check(key).allowed);
        ++counted[key];
        reached("decided without a disk", !node->engine->status().writing);
      }
      node->advance(20 * kMillisecond);
    }
  };
  const int faults = *between(1, 3).as("faults");
  for (int fault = 0; fault < faults; ++fault) {
    run(*between<Nanos>(0, kSecond));
    node->store.broken = true;
    node->store.keeps = *chance(40);
    const Nanos length = *one_of<Nanos>({kSecond, 5 * kSecond, 40 * kSecond});
    run(length);
    reached("a disk that broke");
    reached("a disk that broke again", fault > 0);
    reached("broken for longer than the longest wait", length == 40 * kSecond);
    reached("a failed write that was there", node->store.keeps);
    RC_ASSERT(!node->engine->status().durable);
    if (*chance(25)) {
      platter = {};
      reached("another disk in its place");
    }
    node->store.broken = false;
    run(node::Engine::kLongestReopenWait + kSecond);
    RC_ASSERT(node->engine->status().durable);
    RC_ASSERT(node->engine->status().storage_failure.empty());
  }
  bool durable = false;
  node->engine->when_durable([&](bool yes) { durable = yes; });
  run(kSecond / 10, false);
  RC_ASSERT(durable);
  std::uint64_t here = 0;
  std::uint64_t there = 0;
  const Nanos now = node->now();
  reached("counted twice, and said so", node->counted_twice > 0);
  if (!is_bucket(rule.algorithm)) {
    node->engine->replica().for_each([&](const crdt::Cell& cell) {
      if (!crdt::is_registry(cell.id)) here += cell.total();
    });
    for (const auto& [key, units] : counted) there += units;
    RC_ASSERT(here == there + node->counted_twice);
  }
  node.reset();
  const std::uint64_t held = held_after_a_restart(platter, now, rule, counted);
  if (!is_bucket(rule.algorithm)) RC_ASSERT(held == here);
}

LAW(50,
    "time waits for no disk longer than half a second, and no restart takes it to before a "
    "durable answer",
    "a disk that is slow", "a disk that is always late", "a disk that stands still",
    "time went on without it", "an answer of a time that the disk did not know then",
    "a clock set back at the restart") {
  Platter platter;
  Nanos answered = 0;  // the latest time of an answer that was durable
  auto node =
      std::make_unique<DiskNode>(platter, kStart, rule_set({disk_rule(Durability::commit)}));
  const Nanos step = *between<Nanos>(kMillisecond, 50 * kMillisecond).as("step");
  for (int phase = *between(1, 4).as("phases"); phase > 0; --phase) {
    node->store.latency = *one_of<Nanos>({kMillisecond, 300 * kMillisecond, 700 * kMillisecond,
                                          1500 * kMillisecond, 5 * kSecond, kHour})
                               .as("latency");
    reached("a disk that is slow", node->store.latency == 300 * kMillisecond);
    reached("a disk that is always late", node->store.latency == 1500 * kMillisecond);
    reached("a disk that stands still", node->store.latency == kHour);
    const Nanos until = node->now() + *between<Nanos>(0, 8 * kSecond).as("length");
    while (node->now() < until) {
      node->advance(step);
      const Nanos time = node->time();
      RC_ASSERT(node->now() - time <= kSecond / 2 + 2 * step);
      if (!*chance(10)) continue;
      const bool unknown = time > platter.ceiling;
      reached("time went on without it", unknown);
      node->check("k");
      node->engine->when_durable([&platter, &answered, time, unknown](bool durable) {
        if (!durable) return;
        RC_ASSERT(platter.ceiling >= time);
        answered = std::max(answered, time);
        reached("an answer of a time that the disk did not know then", unknown);
      });
    }
  }
  const Nanos back = *one_of<Nanos>({0, kSecond, kMinute}).as("set back");
  const Nanos wall = node->now() - back;
  node.reset();
  DiskNode again(platter, wall, rule_set({disk_rule(Durability::commit)}));
  RC_ASSERT(again.time() >= answered);
  reached("a clock set back at the restart", back > 0);
}

}  // namespace
}  // namespace weir::laws
