#include <rapidcheck/state.h>
#include <weir/node/engine/engine.h>
#include <weir/storage/test_util.h>

#include <atomic>
#include <cerrno>
#include <deque>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "generators.h"
#include "law.h"

/// Real LMDB on a temporary directory, and the engine on top of it. A crash here is that of the
/// process: what was not committed is gone. storage/lmdb_crash_test kills real ones, and the
/// simulator has disks that tear and reorder.
namespace weir::laws {
namespace {

using storage::testing::TempDir;
using storage::testing::Watch;

crdt::Incarnation fresh_incarnation() {
  static std::uint64_t boots = 0;
  return {0xF00D, ++boots};
}

/// A store, by itself.
struct Rig {
  TempDir dir;
  std::unique_ptr<storage::Store> store;
  std::unique_ptr<Watch> watch;
  std::atomic<int> fail_before{0};  // the next commit's error, of which nothing is written
  std::atomic<int> fail_after{0};   // all is written, but not known to be
  storage::Recovered recovered;
  crdt::WriteId last = 0;

  ~Rig() { store.reset(); }

  bool open(const crdt::Incarnation& fresh, std::string& error, Nanos now = kStart) {
    storage::LmdbHooks hooks;
    hooks.before_commit = [this] { return fail_before.exchange(0); };
    hooks.after_commit = [this] { return fail_after.exchange(0); };
    storage::LmdbTuning tuning = storage::testing::eager();
    tuning.fold_records = 4;
    tuning.fold_step_cells = 3;
    store = storage::make_lmdb_store(storage::testing::options_for(dir.path()), tuning, hooks);
    watch = std::make_unique<Watch>();
    recovered = {};
    return store->open(fresh, now, watch->events(), recovered, error);
  }
  void open() {
    std::string error;
    if (!open(fresh_incarnation(), error)) RC_FAIL(error);
  }
};

/// What a store may and must hold.
struct Books {
  std::map<crdt::CellId, crdt::Cell> written;
  std::map<crdt::CellId, crdt::Cell> acknowledged;
  std::map<crdt::CellId, crdt::Cell> waiting;  // written by this boot, not acknowledged
  std::map<crdt::CellId, Nanos> first_expiry;  // of buckets: when a store may begin to forget
  Nanos floor = 0;
  bool open = false;

  static void join(std::map<crdt::CellId, crdt::Cell>& into, const crdt::Cell& cell) {
    auto [at, added] = into.try_emplace(cell.id, cell);
    if (!added) crdt::join(at->second, cell);
  }
  void write(const crdt::Delta& delta) {
    for (const crdt::Cell& cell : delta.cells) {
      join(written, cell);
      join(waiting, cell);
      if (!cell.id.is_bucket()) continue;
      auto [at, added] = first_expiry.try_emplace(cell.id, cell.bucket.expiry);
      at->second = std::min(at->second, cell.bucket.expiry);
    }
  }
  void acknowledge() {
    for (const auto& [id, cell] : waiting) join(acknowledged, cell);
    waiting.clear();
  }
  bool over(const crdt::CellId& id) const {
    if (id.is_bucket()) return first_expiry.at(id) <= floor;
    return crdt::generation_of(id.epoch).end() <= floor;
  }
  void check(const storage::Recovered& recovered) const {
    std::map<crdt::CellId, crdt::Cell> held;
    for (const crdt::Cell& cell : recovered.state.cells) held[cell.id] = cell;
    for (const auto& [id, cell] : acknowledged) {
      if (over(id)) continue;
      auto at = held.find(id);
      RC_ASSERT(at != held.end());
      for (const crdt::Slot& slot : cell.slots)
        RC_ASSERT(at->second.value_of(slot.id) >= slot.value);
      RC_ASSERT(at->second.bucket.checkpoint.counted >= cell.bucket.checkpoint.counted);
    }
    for (const auto& [id, cell] : held) {
      auto at = written.find(id);
      RC_ASSERT(at != written.end());
      for (const crdt::Slot& slot : cell.slots)
        RC_ASSERT(slot.value <= at->second.value_of(slot.id));
    }
  }
};

using StoreCommand = rc::state::Command<Books, Rig>;

/// Few cells, so that they meet; some are over soon, some never within a test.
crdt::Cell draw_cell() {
  std::vector<crdt::CellId> ids;
  for (std::uint64_t series = 1; series <= 2; ++series) {
    for (Nanos hour = 0; hour < 3; ++hour) {
      ids.push_back({{series, series}, {kStart + hour * kHour, kStart + (hour + 1) * kHour}});
    }
    ids.push_back({{series, 7}, crdt::kBucketEpoch});
  }
  crdt::Cell cell = *cells_of(*one_of(ids));
  if (cell.slots.empty()) cell.raise({*writers(), 0}, 1);
  return cell;
}

struct Append : StoreCommand {
  crdt::Delta delta;
  bool wait = *chance(50);
  Append() {
    for (std::size_t i = *between<std::size_t>(1, 4); i > 0; --i)
      delta.cells.push_back(draw_cell());
  }
  void apply(Books& books) const override {
    books.write(delta);
    if (wait) books.acknowledge();
  }
  void run(const Books&, Rig& rig) const override {
    rig.store->append({++rig.last, delta});
    if (!wait) return;
    if (!rig.watch->wait_committed(rig.last)) RC_FAIL("not committed");
    RC_ASSERT(rig.watch->ordered());
  }
  void show(std::ostream& os) const override {
    os << (wait ? "commit " : "append "), showValue(delta, os);
  }
};

struct Expire : StoreCommand {
  Nanos floor = kStart + *between<Nanos>(0, 3) * kHour;
  void apply(Books& books) const override { books.floor = std::max(books.floor, floor); }
  void run(const Books&, Rig& rig) const override { rig.store->expire(floor); }
  void show(std::ostream& os) const override { os << "expire " << floor - kStart; }
};

struct Restart : StoreCommand {
  enum class How {
    crash,
    stop,
    unwritten,
    unknown
  } how = *one_of<How>({How::crash, How::crash, How::stop, How::unwritten, How::unknown});
  void apply(Books& books) const override {
    if (how == How::stop) books.acknowledge();
    books.waiting.clear();
  }
  void run(const Books& before, Rig& rig) const override {
    if (how == How::unwritten || how == How::unknown) {
      (how == How::unwritten ? rig.fail_before : rig.fail_after) = EIO;
      crdt::Delta empty;
      rig.store->append({++rig.last, empty});
      RC_ASSERT(rig.watch->wait_failed());
      RC_ASSERT(rig.watch->ordered());
    }
    if (how == How::stop) rig.store->close(kStart);
    rig.store.reset();
    // Left over: a failure that nothing met.
    rig.fail_before = rig.fail_after = 0;
    rig.open();
    RC_ASSERT(rig.recovered.clean == (how == How::stop));
    Books books = before;
    apply(books);
    books.check(rig.recovered);
    reached("a crash with writes on their way", how == How::crash && !before.waiting.empty());
    reached("a clean stop", how == How::stop);
    reached("a failed sync", how == How::unwritten);
    reached("a sync that failed although all was written", how == How::unknown);
    reached("cells that are over", before.floor > kStart);
    reached("many cells", before.acknowledged.size() > 4);
  }
  void show(std::ostream& os) const override { os << "restart " << static_cast<int>(how); }
};

LAW(28, "what a store acknowledged is there after any restart, and nothing that nobody wrote",
    "a crash with writes on their way", "a clean stop", "a failed sync",
    "a sync that failed although all was written", "cells that are over", "many cells") {
  Rig rig;
  rig.open();
  rc::state::check(Books{}, rig,
                   rc::state::gen::execOneOfWithArgs<Append, Append, Append, Restart, Expire>());
}

LAW(30, "a store takes no incarnation twice, adopted ones and those of a crash included",
    "one of an earlier boot", "one that was adopted", "the present one", "after a crash",
    "a restored backup") {
  Rig rig;
  std::vector<crdt::Incarnation> used;  // by what is on the disk
  std::vector<crdt::Incarnation> adopted;
  TempDir backup;
  std::vector<crdt::Incarnation> used_then;
  bool has_backup = false;
  auto boot = [&] {
    crdt::Incarnation fresh = fresh_incarnation();
    std::string error;
    RC_ASSERT(rig.open(fresh, error));
    RC_ASSERT(rig.recovered.incarnations == used);
    used.push_back(fresh);
  };
  boot();
  namespace fs = std::filesystem;
  for (int step = *between(1, 12).as("steps"); step > 0; --step) {
    crdt::Incarnation old = *one_of(used);
    bool was_adopted = std::find(adopted.begin(), adopted.end(), old) != adopted.end();
    std::string error;
    switch (*choice(5)) {
      case 0: {
        crdt::Incarnation fresh = fresh_incarnation();
        RC_ASSERT(rig.store->adopt(fresh, kStart, error));
        used.push_back(fresh);
        adopted.push_back(fresh);
        break;
      }
      case 1:
        RC_ASSERT(!rig.store->adopt(old, kStart, error));
        RC_ASSERT(error.find("used before") != std::string::npos);
        reached("the present one", old == used.back());
        break;
      case 2: {
        bool crash = *chance(50);
        if (!crash) rig.store->close(kStart);
        rig.store.reset();
        RC_ASSERT(!rig.open(old, error));
        RC_ASSERT(error.find("used before") != std::string::npos);
        reached("one of an earlier boot", !was_adopted);
        reached("one that was adopted", was_adopted);
        reached("after a crash", crash);
        rig.store.reset();
        boot();
        break;
      }
      case 3:
        rig.store.reset();
        fs::remove_all(backup.path());
        fs::copy(rig.dir.path(), backup.path(), fs::copy_options::recursive);
        used_then = used;
        has_backup = true;
        boot();
        break;
      default:
        if (!has_backup) break;
        rig.store.reset();
        fs::remove_all(rig.dir.path());
        fs::copy(backup.path(), rig.dir.path(), fs::copy_options::recursive);
        used = used_then;
        boot();
        reached("a restored backup");
    }
  }
}

/// An engine on a store, with the store's events brought to this thread.
class Node {
 public:
  explicit Node(Algorithm algorithm) {
    Rule rule;
    rule.domain = "api";
    rule.name = "r";
    rule.key = {"key"};
    rule.algorithm = algorithm;
    rule.durability = Durability::commit;
    rule.limit = 1000;
    rule.window = 365 * kDay;  // a bucket drains nothing to speak of
    rules_ = rule_set({rule});
    start();
  }
  ~Node() {
    store_.reset();
    engine_.reset();
  }

  void start() {
    storage::LmdbHooks hooks;
    hooks.before_commit = [this] { return fail_before.exchange(0); };
    hooks.after_commit = [this] { return fail_after.exchange(0); };
    store_ = storage::make_lmdb_store(storage::testing::options_for(dir_.path()),
                                      storage::testing::eager(), hooks);
    node::EngineOptions options;
    options.replica.self = {"eu", "node-1"};
    options.replica.peers = {{"us", "node-2"}};
    options.rules = rules_;
    // Time leaps here, and real disks take real time: that is no stall.
    options.max_time_wait = kDay;
    options.renew_wait = options.longest_renew_wait = 0;  // law 56 is about these
    options.fresh_incarnation = [this] {
      crdt::Incarnation fresh = fresh_incarnation();
      fresh_.insert(fresh);
      return fresh;
    };
    node::EngineEvents events;
    events.send = [](crdt::PeerIndex, const crdt::Message&) {};
    events.reincarnated = [](const crdt::Incarnation&) {};
    events.log = [](const std::string&, const std::string&) {};
    storage::StoreEvents told;
    told.committed = [this](crdt::WriteId upto) {
      tell([this, upto] { engine_->committed(upto, now); });
    };
    told.failed = [this](const std::string& reason) {
      tell([this, reason] { engine_->store_failed(reason, now); });
    };
    engine_ = std::make_unique<node::Engine>(options, store_.get(), events);
    std::string error;
    if (!engine_->start(now, told, error)) RC_FAIL(error);
    // Every process is one of its own.
    RC_ASSERT(fresh_.contains(engine_->replica().incarnation()));
    RC_ASSERT(incarnations_.insert(engine_->replica().incarnation()).second);
  }

  /// Whether it is acknowledged as durable is added to `answers` later.
  void hit(const std::string& key, std::uint64_t hits) {
    std::vector<Entry> entries{{"key", key}};
    Decision decision;
    engine_->check({"api", entries, hits}, now, decision);
    RC_ASSERT(decision.allowed);
    engine_->when_durable([this, key, hits](bool durable) {
      if (durable) acknowledged[key] += hits;
      ++(durable ? good_answers : bad_answers);
    });
  }

  std::uint64_t used(const std::string& key) {
    std::vector<Entry> entries{{"key", key}};
    Decision decision;
    engine_->check({"api", entries, 0}, now, decision);
    return decision.statuses[0].limit - decision.statuses[0].remaining;
  }

  void pump() { engine_->pump(now); }
  /// Until the disk has nothing left to do, or has failed.
  void settle(bool to_failure = false) {
    for (int i = 0; i < 20'000; ++i) {
      pump();
      deliver();
      bool failed = !engine_->status().durable;
      bool idle = !to_failure && store_->backlog() == 0;
      if (!engine_->has_waiters() && (failed || idle)) return;
      ::usleep(200);
    }
    RC_FAIL("the disk is not done");
  }
  /// Until the disk has made the present time good.
  void await_time() {
    for (int i = 0; i < 20'000 && engine_->clock(now) < now; ++i) {
      pump();
      ::usleep(200);
    }
    RC_ASSERT(engine_->clock(now) >= now);
  }
  void deliver() {
    std::deque<std::function<void()>> calls;
    {
      std::lock_guard lock(mutex_);
      calls.swap(calls_);
    }
    for (auto& call : calls) call();
  }
  void stop() {
    engine_->stop(now);
    end();
  }
  void crash() { end(); }
  /// A peer shows this node a count of its own that it never made. Needs one that is durable.
  void trip() {
    crdt::Repair forged;
    const crdt::Incarnation& incarnation = engine_->replica().incarnation();
    engine_->replica().for_each([&](const crdt::Cell& held) {
      crdt::Cell cell = held;
      for (crdt::Slot& slot : cell.slots) {
        if (slot.id.writer != incarnation) continue;
        ++slot.value;
        forged.delta.cells = {cell};
      }
    });
    if (forged.delta.cells.empty()) return;
    engine_->peer_up(0, {9, 9}, now);
    engine_->receive(0, {9, 9}, forged, now);
  }

  node::Engine& engine() { return *engine_; }

  Nanos now = kStart;
  std::atomic<int> fail_before{0};
  std::atomic<int> fail_after{0};
  std::map<std::string, std::uint64_t> acknowledged;
  int good_answers = 0;
  int bad_answers = 0;

 private:
  void tell(std::function<void()> call) {
    std::lock_guard lock(mutex_);
    calls_.push_back(std::move(call));
  }
  void end() {
    store_.reset();
    engine_.reset();
    calls_.clear();
    fail_before = fail_after = 0;
  }

  TempDir dir_;
  std::shared_ptr<const RuleSet> rules_;
  std::unique_ptr<storage::Store> store_;
  std::unique_ptr<node::Engine> engine_;
  std::mutex mutex_;
  std::deque<std::function<void()>> calls_;
  std::set<crdt::Incarnation> fresh_;
  std::set<crdt::Incarnation> incarnations_;
};

const std::vector<Algorithm> kAlgorithms{Algorithm::fixed_window, Algorithm::sliding_window,
                                         Algorithm::token_bucket, Algorithm::leaky_bucket,
                                         Algorithm::sliding_log};

LAW(28, "what an engine acknowledged as durable is counted after any restart", "after a crash",
    "after a clean stop", "a crash with answers on their way", "a bucket",
    "a crash after a crash") {
  Algorithm algorithm = *one_of(kAlgorithms).as("algorithm");
  Node node(algorithm);
  std::uint64_t attempted = 0;
  int crashes = 0;
  for (int step = *between(1, 25).as("steps"); step > 0; --step) {
    switch (*choice(4)) {
      case 0:
      case 1: {
        auto hits = *between<std::uint64_t>(1, 9);
        node.hit("k", hits);
        attempted += hits;
        if (*chance(30)) node.pump();
        break;
      }
      case 2:
        node.settle();
        break;
      default: {
        bool crash = *chance(70);
        if (crash && *chance(50)) node.pump();  // and the disk has hardly begun
        reached("a crash with answers on their way", crash && node.engine().has_waiters());
        crash ? node.crash() : node.stop();
        crashes += crash;
        node.start();
        RC_ASSERT(node.used("k") >= node.acknowledged["k"]);
        RC_ASSERT(node.used("k") <= attempted);
        reached("after a crash", crash);
        reached("after a clean stop", !crash);
        reached("a bucket", algorithm == Algorithm::token_bucket);
        reached("a crash after a crash", crashes > 1);
      }
    }
  }
  RC_ASSERT(node.bad_answers == 0);
}

LAW(30, "every boot and every fresh start of an engine has an incarnation of its own",
    "after a crash", "after a clean stop", "after an identity alarm") {
  Node node(*one_of(kAlgorithms).as("algorithm"));
  std::set<crdt::Incarnation> seen{node.engine().replica().incarnation()};
  for (int step = *between(1, 8).as("steps"); step > 0; --step) {
    node.hit("k", 1);
    node.settle();
    int how = *choice(3);
    if (how == 0) {
      node.trip();
      node.settle();
      node.pump();
      reached("after an identity alarm", node.engine().status().reincarnations > 0);
      RC_ASSERT(node.engine().status().reincarnations > 0);
    } else {
      how == 1 ? node.crash() : node.stop();
      node.start();
      reached("after a crash", how == 1);
      reached("after a clean stop", how == 2);
    }
    RC_ASSERT(seen.insert(node.engine().replica().incarnation()).second);
  }
}

LAW(32, "a clean stop and start counts nothing twice and forgets nothing", "not yet at the disk",
    "at the disk", "several stops", "a fresh incarnation in between",
    "a fresh incarnation with writes on their way", "a bucket", "counted under several boots") {
  Algorithm algorithm = *one_of(kAlgorithms).as("algorithm");
  Node node(algorithm);
  std::map<std::string, std::uint64_t> counted;
  int stops = 0;
  int boots_counted = 0;
  std::uint64_t renewals = 0;
  bool hit = false;
  bool settled = true;
  for (int step = *between(1, 25).as("steps"); step > 0; --step) {
    switch (*choice(5)) {
      case 0:
      case 1: {
        std::string key = *one_of<std::string>({"a", "b"});
        auto hits = *between<std::uint64_t>(1, 9);
        node.hit(key, hits);
        counted[key] += hits;
        hit = true;
        settled = false;
        break;
      }
      case 2:
        node.settle();
        settled = true;
        break;
      case 3: {
        node.hit("a", 1);
        node.settle();
        node.hit("a", 1);
        counted["a"] += 2;
        bool on_their_way = *chance(70);
        if (on_their_way) node.pump();
        node.trip();
        settled = *chance(50);
        if (settled) node.settle();
        hit = true;
        reached("a fresh incarnation with writes on their way", on_their_way && settled);
        break;
      }
      default:
        reached("not yet at the disk", !settled);
        reached("at the disk", settled && hit);
        boots_counted += hit;
        hit = false;
        renewals += node.engine().status().reincarnations;
        node.stop();
        node.start();
        ++stops;
        reached("several stops", stops > 1);
        reached("a fresh incarnation in between", renewals > 0);
        reached("a bucket", algorithm == Algorithm::token_bucket && boots_counted > 0);
        reached("counted under several boots", boots_counted > 1);
        settled = true;
    }
    for (const auto& [key, hits] : counted) RC_ASSERT(node.used(key) == hits);
  }
}

LAW(33, "after a failed sync nothing more is acknowledged", "nothing was written",
    "all was written", "answers waited", "asked after the failure", "acknowledged before it") {
  Node node(*one_of(kAlgorithms).as("algorithm"));
  auto hits = [&](int count) {
    for (; count > 0; --count) {
      node.hit("k", 1);
      if (*chance(30)) node.pump();
    }
  };
  hits(*between(0, 10).as("before"));
  node.settle();
  int good = node.good_answers;
  RC_ASSERT(node.bad_answers == 0);
  bool written = *chance(50);
  (written ? node.fail_after : node.fail_before) = *one_of<int>({EIO, ENOSPC});
  int at = *between(0, 5).as("at the failure");
  hits(at);
  node.now += kSecond;  // there is a time to reserve at least
  node.settle(true);
  // What the failing commit did not hold was never promised; what it held may be there or not.
  RC_ASSERT(node.good_answers == good);
  RC_ASSERT(node.bad_answers == at);
  RC_ASSERT(!node.engine().status().durable);
  int later = *between(0, 5).as("after the failure");
  hits(later);
  node.settle();
  RC_ASSERT(node.good_answers == good);
  RC_ASSERT(node.bad_answers == at + later);
  std::uint64_t total = static_cast<std::uint64_t>(good + at + later);
  RC_ASSERT(node.used("k") == total);  // nothing is lost while it lives
  node.crash();
  node.start();
  RC_ASSERT(node.used("k") >= node.acknowledged["k"]);
  RC_ASSERT(node.used("k") <= total);
  reached("nothing was written", !written);
  reached("all was written", written);
  reached("answers waited", at > 0);
  reached("asked after the failure", later > 0);
  reached("acknowledged before it", good > 0);
}

LAW(11,
    "no restart takes an engine to a time before one that it decided at, unless its clock is far "
    "behind",
    "after a crash", "after a clean stop", "a clock that went back", "a clock that leapt ahead",
    "decided before the disk knew the time", "a clock that was set back") {
  Node node(Algorithm::fixed_window);
  Nanos latest = 0;
  for (int step = *between(1, 20).as("steps"); step > 0; --step) {
    Nanos leap = *rc::gen::weightedOneOf<Nanos>({{4, between<Nanos>(0, 300 * kMillisecond)},
                                                 {2, between<Nanos>(-3 * kSecond, 0)},
                                                 {1, between<Nanos>(0, kHour)}});
    node.now += leap;
    if (*chance(50)) node.pump();
    if (*chance(40)) node.await_time();
    if (*chance(30)) {
      bool crash = *chance(70);
      crash ? node.crash() : node.stop();
      node.start();
      reached("after a crash", crash);
      reached("after a clean stop", !crash);
      if (const Nanos set_back = node.engine().status().set_back; set_back > 0) {
        RC_ASSERT(set_back > storage::kMostTimeWaits);
        latest = node.now;
        reached("a clock that was set back");
      }
    }
    Nanos time = node.engine().clock(node.now);
    RC_ASSERT(time >= latest);
    reached("a clock that went back", node.now < latest);
    reached("a clock that leapt ahead", leap > 2 * kSecond);
    reached("decided before the disk knew the time", time < node.now);
    latest = time;
  }
}

}  // namespace
}  // namespace weir::laws
