#include <weir/node/engine/engine.h>
#include <weir/storage/store.h>
#include <weir/storage/time_lived.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "generators.h"
#include "law.h"

/// One node whose wall clock leaps, by seconds or by years, forwards and back, with stops and
/// crashes in between. A driver does what the daemon does: it starts the engine again once that
/// says that its clock was set back. The simulator has the same with several nodes and real
/// networks of faults.
namespace weir::laws {
namespace {

/// What survives an engine; every write is durable at once.
class Disk final : public storage::Store {
 public:
  bool open(const crdt::Incarnation&, Nanos now, storage::StoreEvents events,
            storage::Recovered& out, std::string&) override {
    events_ = std::move(events);
    for (const auto& [id, cell] : cells_) out.state.cells.push_back(cell);
    out.state.members = members_;
    out.time_floor = ceiling_;
    out.lost = lost_;
    lived_.reached(out.time_floor);
    lived_.take_set_back(now, kSecond, out);
    lost_ = out.lost;
    ceiling_ = std::max(out.time_floor, now);
    lived_.reached(ceiling_);
    return true;
  }
  bool adopt(const crdt::Incarnation&, Nanos, std::string&) override { return true; }
  void reopen(const crdt::Incarnation&, Nanos) override {}
  void append(crdt::Write write) override {
    for (const crdt::Cell& cell : write.delta.cells) {
      auto [at, fresh] = cells_.try_emplace(cell.id, cell);
      if (!fresh) crdt::join(at->second, cell);
    }
    members_.insert(write.delta.members.begin(), write.delta.members.end());
    written_ = write.id;
  }
  /// As a real store: what is over is gone for good.
  void expire(Nanos floor) override {
    std::erase_if(cells_, [&](const auto& entry) {
      const crdt::Cell& cell = entry.second;
      return cell.id.is_bucket() ? cell.bucket.expiry <= floor
                                 : crdt::generation_of(cell.id.epoch).end() <= floor;
    });
  }
  void reserve_time(Nanos ceiling) override {
    ceiling_ = std::max(ceiling_, ceiling);
    lived_.reached(ceiling_);
    events_.reserved(ceiling_);
  }
  std::uint64_t backlog() const override { return 0; }
  void close(Nanos now) override { ceiling_ = now; }
  storage::StoreCounters counters() const override { return {}; }
  crdt::WriteId written() const { return written_; }

 private:
  storage::StoreEvents events_;
  std::map<crdt::CellId, crdt::Cell> cells_;
  std::map<crdt::Incarnation, crdt::Member> members_;
  Nanos ceiling_ = 0;
  crdt::LostWindows lost_;
  storage::TimeLived lived_;
  crdt::WriteId written_ = 0;
};

constexpr std::uint64_t kLimit = 10;
constexpr Nanos kTick = 100 * kMillisecond;

Rule rule_of(std::string name, Algorithm algorithm, Nanos window) {
  Rule rule;
  rule.domain = "api";
  rule.match = {{"rule", MatchExact{name}}};
  rule.name = std::move(name);
  rule.key = {"key"};
  rule.algorithm = algorithm;
  rule.limit = kLimit;
  if (is_bucket(algorithm)) rule.burst = kLimit;
  rule.window = window;
  return rule;
}

class ClockedNode {
 public:
  explicit ClockedNode(Nanos window) {
    Rule merged = rule_of("merged", Algorithm::fixed_window, window);
    Rule closed = rule_of("closed", Algorithm::fixed_window, window);
    closed.on_failure = OnFailure::closed;
    Rule escrow = rule_of("escrow", Algorithm::fixed_window, window);
    escrow.enforcement = Enforcement::escrow;
    Rule bucket = rule_of("bucket", Algorithm::token_bucket, window);
    rules_ = rule_set({merged, closed, escrow, bucket});
    start();
  }

  void start() {
    node::EngineOptions options;
    options.replica.self = {"eu", "node-1"};
    options.rules = rules_;
    options.fresh_incarnation = [this] { return crdt::Incarnation{0xC10C, ++boots_}; };
    node::EngineEvents events;
    events.send = [](crdt::PeerIndex, const crdt::Message&) {};
    events.reincarnated = [](const crdt::Incarnation&) {};
    events.log = [](const std::string&, const std::string&) {};
    engine_ = std::make_unique<node::Engine>(options, &disk_, events);
    std::string error;
    if (!engine_->start(wall, {}, error)) RC_FAIL(error);
    if (engine_->status().set_back > 0) ++set_back;
    settle();
  }

  void restart(bool clean) {
    if (clean) engine_->stop(wall);
    engine_.reset();
    start();
  }

  void settle() {
    if (lived.empty() || wall < lived.back().from ||
        wall - lived.back().to > storage::TimeLived::kPause)
      lived.push_back({wall, wall});
    lived.back().to = std::max(lived.back().to, wall);
    for (int i = 0; i < 3; ++i) {
      engine_->pump(wall);
      engine_->committed(disk_.written(), wall);
    }
  }

  /// The wall clock goes on by so much, step by step.
  void pass(Nanos time) {
    for (Nanos gone = 0; gone < time; gone += kTick) {
      wall += kTick;
      settle();
      if (engine_->clock_set_back()) restart(true);
    }
  }

  /// As many as pass, of up to `most`; counted to the window that the node's own clock shows.
  std::uint64_t ask(const std::string& rule, const std::string& key, std::uint64_t most) {
    const std::vector<Entry> entries{{"rule", rule}, {"key", key}};
    std::uint64_t passed = 0;
    Decision decision;
    while (passed < most) {
      engine_->check({"api", entries, 1}, wall, decision);
      if (!decision.allowed) break;
      ++passed;
    }
    const Nanos window = rules_->rules()[0].window;
    admitted[{rule, key, engine_->clock(wall) / window}] += passed;
    settle();  // each answer waits for the disk, which is quick
    return passed;
  }

  Nanos behind() { return engine_->clock(wall) - wall; }
  bool early() const { return engine_->status().early_cells > 0; }

  Nanos wall = kStart;
  std::uint64_t set_back = 0;
  std::vector<crdt::TimeRange> lived;
  struct Asked {
    std::string rule;
    std::string key;
    std::int64_t window = 0;
    friend auto operator<=>(const Asked&, const Asked&) = default;
  };
  std::map<Asked, std::uint64_t> admitted;

 private:
  Disk disk_;
  std::shared_ptr<const RuleSet> rules_;
  std::uint64_t boots_ = 0;
  std::unique_ptr<node::Engine> engine_;
};

const std::vector<std::string>& kinds() {
  static const std::vector<std::string> all{"merged", "closed", "escrow", "bucket"};
  return all;
}

/// True if it was forwards.
bool leap(ClockedNode& node) {
  const Nanos by = *one_of<Nanos>({kSecond, 3 * kSecond, kMinute, kHour, 20 * kDay, 3650 * kDay});
  const bool forward = *chance(60) || node.wall - by < kStart - kDay;
  node.wall += forward ? by : -by;
  reached("a leap of seconds", by <= 3 * kSecond);
  reached("a leap of years", by > 365 * kDay);
  return forward;
}

/// Ahead for a while, after which everything is as it was.
void be_ahead_once(ClockedNode& node) {
  const std::string kind = *one_of(kinds());
  const Nanos by = *one_of<Nanos>({3 * kSecond, kMinute, kHour, 20 * kDay});
  node.ask(kind, "a", *between<std::uint64_t>(1, kLimit));
  node.wall += by;
  if (*chance(50)) node.restart(*chance(50));
  node.pass(*between<Nanos>(1, 40) * kTick);
  node.ask(kind, "a", *between<std::uint64_t>(1, kLimit));
  node.wall -= by;
  if (*chance(50)) node.restart(*chance(50));
  node.pass(*between<Nanos>(1, 40) * kTick);
  node.ask(kind, "a", 2 * kLimit);
  if (by > kMinute) return;
  const bool early = node.early();
  node.pass(by);
  node.ask(kind, "a", 2 * kLimit);
  reached("windows to come have come", early);
}

/// The start of a window that begins in ten seconds at the earliest, and in which it has not lived.
Nanos new_window(const ClockedNode& node, Nanos window) {
  // What was reserved ahead, and peers' clocks.
  constexpr Nanos kSlack = 4 * kSecond;
  Nanos start = (node.wall + 10 * kSecond) / window * window + window;
  for (;;) {
    auto lived = std::find_if(node.lived.begin(), node.lived.end(), [&](const auto& range) {
      return start <= range.to + kSlack && start + window > range.from - kSlack;
    });
    if (lived == node.lived.end()) return start;
    start = (lived->to + kSlack) / window * window + window;
  }
}

LAW(54,
    "a clock that was set back is followed within seconds; no exact limit is exceeded for it, and "
    "a "
    "merged one by a limit each time",
    "a leap of seconds", "a leap of years", "a start while the clock is ahead",
    "a start after it was set back", "set back while it runs", "counts in windows to come",
    "windows to come have come", "a window that began before and ends later") {
  const Nanos window = *one_of<Nanos>({2 * kSecond, 10 * kSecond, kHour, 30 * kDay}).as("window");
  ClockedNode node(window);
  bool ahead = false;
  for (int step = *between(1, 14).as("steps"); step > 0; --step) {
    const int what = *choice(11);
    if (what < 2) {
      const std::string key = *one_of<std::string>({"a", "b"});
      node.ask(*one_of(kinds()), key, *between<std::uint64_t>(1, 2 * kLimit));
    } else if (what < 3) {
      node.pass(*between<Nanos>(1, 40) * kTick);
    } else if (what < 5) {
      ahead = leap(node);
    } else if (what < 6) {
      reached("a start while the clock is ahead", ahead);
      reached("a start after it was set back", node.behind() > storage::kMostTimeWaits);
      node.restart(*chance(50));
    } else if (what < 8) {
      be_ahead_once(node);
    } else {
      const std::uint64_t before = node.set_back;
      const Nanos late = node.behind();
      node.pass(4 * kSecond);
      reached("set back while it runs", node.set_back > before);
      reached("a window that began before and ends later",
              node.set_back > before && late < window / 2);
    }
    reached("counts in windows to come", node.early());
  }
  // It follows.
  node.pass(4 * kSecond);
  RC_ASSERT(node.behind() <= 0);
  for (const auto& [asked, count] : node.admitted) {
    if (asked.rule == "bucket") continue;
    RC_LOG() << asked.rule << " " << asked.key << " window " << asked.window << ": " << count
             << "\n";
    const bool exact = asked.rule != "merged";
    RC_ASSERT(count <= kLimit * (exact ? 1 : 1 + node.set_back));
  }
  // And it is alive: in a window of its own all of a limit passes, and no more.
  const Nanos start = new_window(node, window);
  if (start - node.wall > kMinute) node.wall = start - kTick;
  node.pass(start - node.wall);
  for (const std::string& kind : kinds()) {
    RC_LOG() << kind << " in a window of its own\n";
    RC_ASSERT(node.ask(kind, "new", 2 * kLimit) == kLimit);
  }
}

}  // namespace
}  // namespace weir::laws
