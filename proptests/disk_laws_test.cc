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
    for (const auto& [id, cell] : platter_.cells) out.state.cells.push_back(cell);
    out.state.members = platter_.members;
    out.incarnations = platter_.incarnations;
    out.time_floor = platter_.ceiling;
    platter_.incarnations.push_back(fresh);
    platter_.ceiling = wanted_ = std::max(platter_.ceiling, now);
    return true;
  }
  bool adopt(const crdt::Incarnation& fresh, Nanos, std::string&) override {
    platter_.incarnations.push_back(fresh);
    return true;
  }
  void append(crdt::Write write) override { queue_.push_back(std::move(write)); }
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
    while (true) {
      if (!done_at_) {
        if (queue_.empty() && wanted_ <= platter_.ceiling) return upto;
        batch_ = std::exchange(queue_, {});
        batch_ceiling_ = wanted_;
        done_at_ = now + latency;
      }
      if (*done_at_ > now) return upto;
      done_at_.reset();
      if (!batch_.empty()) upto = batch_.back().id;
      hold(std::exchange(batch_, {}), batch_ceiling_);
      events_.reserved(batch_ceiling_);
    }
  }

  Nanos latency = kMillisecond;

 private:
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
};

/// A node on such a disk.
class DiskNode {
 public:
  DiskNode(Platter& platter, Nanos now, std::shared_ptr<const RuleSet> rules)
      : store(platter), now_(now) {
    static std::uint64_t boots = 0;
    node::EngineOptions options;
    options.replica.self = {"eu", "node-1"};
    options.rules = std::move(rules);
    options.fresh_incarnation = [] { return crdt::Incarnation{0xD15C, ++boots}; };
    node::EngineEvents events;
    events.send = [](crdt::PeerIndex, const crdt::Message&) {};
    events.reincarnated = [](const crdt::Incarnation&) {};
    events.log = [](const std::string&, const std::string&) {};
    engine = std::make_unique<node::Engine>(std::move(options), &store, std::move(events));
    std::string error;
    if (!engine->start(now, {}, error)) RC_FAIL(error);
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
