#include <weir/proptests/sim/world.h>

#include <algorithm>
#include <cstdlib>
#include <optional>

#include <fmt/format.h>

#include <weir/limits/algorithms/window.h>
#include <weir/proptests/sim/lmdb_backing.h>

namespace weir::sim {
namespace {

constexpr Nanos kDetectCut = 3 * kSecond;
constexpr Nanos kConvergeWithin = 60 * kSecond;  // times the scenario's scale
/// Law 46: so long may a whole limit take to reach one node.
constexpr Nanos kSatisfiedWithin = 40 * kSecond;
constexpr std::uint64_t kInspectEvery = 200;  // events
constexpr std::size_t kMaxHeld = 64;          // messages that wait for a node behind its disk

HashKey hash_key(std::uint64_t seed) {
  Random random(seed, 2);
  HashKey key{};
  for (std::uint8_t& byte : key) byte = static_cast<std::uint8_t>(random.next());
  return key;
}

std::string_view kind_of(const crdt::Message& message) {
  constexpr std::string_view kKinds[] = {
      "push",   "ack",    "offer",          "inventory",
      "repair", "rights", "rejoin request", "rejoin confirmation"};
  return kKinds[message.index()];
}

std::uint64_t weigh(const crdt::Message& message) {
  const crdt::Delta* delta = nullptr;
  std::uint64_t hash = message.index();
  if (const auto* push = std::get_if<crdt::Push>(&message)) {
    delta = &push->delta;
    hash = crdt::mix64(hash, push->upto);
  } else if (const auto* repair = std::get_if<crdt::Repair>(&message)) {
    delta = &repair->delta;
    for (const crdt::GroupWant& want : repair->wants) hash = crdt::mix64(hash, want.keys.size());
  } else if (const auto* offer = std::get_if<crdt::DigestOffer>(&message)) {
    for (const crdt::GroupDigest& group : offer->groups) hash = crdt::mix64(hash, group.digest);
  } else if (const auto* inventory = std::get_if<crdt::Inventory>(&message)) {
    for (const crdt::GroupInventory& group : inventory->groups) {
      for (const crdt::CellDigest& cell : group.cells) hash = crdt::mix64(hash, cell.digest);
    }
  } else if (const auto* request = std::get_if<crdt::RightsRequest>(&message)) {
    hash = crdt::mix64(crdt::mix64(hash, request->cell.series.lo), request->wanted);
  } else if (const auto* rejoin = std::get_if<crdt::RejoinRequest>(&message)) {
    hash = crdt::mix64(hash, rejoin->incarnation.lo);
  } else if (const auto* confirmation = std::get_if<crdt::RejoinConfirmation>(&message)) {
    hash = crdt::mix64(crdt::mix64(hash, confirmation->incarnation.lo), confirmation->rows);
  } else {
    hash = crdt::mix64(hash, std::get<crdt::Ack>(message).upto);
  }
  if (delta == nullptr) return hash;
  for (const crdt::Cell& cell : delta->cells) {
    hash = crdt::mix64(hash, cell.id.series.lo);
    for (const crdt::Slot& slot : cell.slots) hash = crdt::mix64(hash, slot.value);
  }
  return hash;
}

std::string summary(const crdt::Message& message) {
  if (const auto* push = std::get_if<crdt::Push>(&message)) {
    std::string text = fmt::format("push ({}, {}]{} {} cells:", push->after, push->upto,
                                   push->base ? " base" : "", push->delta.cells.size());
    for (const crdt::Cell& cell : push->delta.cells) {
      std::uint64_t own = 0;
      for (const crdt::Slot& slot : cell.slots)
        own = slot.id.writer == push->pusher ? slot.value : own;
      text += fmt::format(" {:08x} {} of {}", static_cast<std::uint32_t>(cell.id.series.lo), own,
                          cell.total());
    }
    return text;
  }
  if (const auto* ack = std::get_if<crdt::Ack>(&message)) return fmt::format("ack {}", ack->upto);
  if (const auto* offer = std::get_if<crdt::DigestOffer>(&message)) {
    return fmt::format("offer of {} digests", offer->groups.size());
  }
  if (const auto* inventory = std::get_if<crdt::Inventory>(&message)) {
    return fmt::format("inventory of {} differing groups", inventory->groups.size());
  }
  if (const auto* request = std::get_if<crdt::RightsRequest>(&message)) {
    return fmt::format("request for {} of {:08x}", request->wanted,
                       static_cast<std::uint32_t>(request->cell.series.lo));
  }
  if (const auto* rejoin = std::get_if<crdt::RejoinRequest>(&message)) {
    return "rejoin request of " + crdt::to_string(rejoin->incarnation).substr(0, 8);
  }
  if (const auto* confirmation = std::get_if<crdt::RejoinConfirmation>(&message)) {
    return "rejoin confirmation of " + crdt::to_string(confirmation->incarnation).substr(0, 8);
  }
  const auto& repair = std::get<crdt::Repair>(message);
  return fmt::format("repair with {} cells, wants {} groups", repair.delta.cells.size(),
                     repair.wants.size());
}

struct Link {                 // a directed session: `from` dialled `to` and sends on it
  std::uint64_t session = 0;  // 0: none; as the dialler sees it
  crdt::Incarnation theirs;   // proved by the other side
  bool dialling = false;
  std::uint64_t accepted = 0;  // the session the other side reads from
  crdt::Incarnation dialler;   // proved on the accepted one
  int cuts = 0;
  std::vector<unsigned> extra_loss;
  std::vector<std::int64_t> slower;
};

struct Node {
  Disk disk;
  std::unique_ptr<SimStore> store;
  std::unique_ptr<node::Engine> engine;
  std::uint64_t boot = 0;
  bool up = false;
  bool should_run = true;
  bool die_after_commit = false;
  std::size_t rules = 0;
  Nanos offset = 0;
  std::int64_t drift = 0;  // ppm
  Nanos drift_since = 0;
  Nanos up_since = 0;
  Nanos pump_due = kNever;
  std::uint64_t pump_ticket = 0;
  int bursts = 0;
  std::size_t held = 0;
  crdt::Incarnation first;  // sabotage: the id that is used again
};

class World {
 public:
  explicit World(const RunOptions& options)
      : options_(options),
        scenario_(make_scenario(options.seed)),
        trace_(options.trace, options.tail),
        checker_(scenario_.nodes, scenario_.max_series < 1000),
        traffic_(options.seed, 3),
        network_(options.seed, 4),
        disk_(options.seed, 5),
        timing_(options.seed, 6),
        ids_(options.seed, 7) {
    chaos_ = std::min(scenario_.chaos, options.cut_off);
    nodes_.resize(scenario_.nodes);
    links_.assign(scenario_.nodes, std::vector<Link>(scenario_.nodes));
    for (std::uint32_t i = 0; i < scenario_.nodes; ++i) {
      nodes_[i].offset = scenario_.skew[i];
      checker_.nodes[i].disk = &nodes_[i].disk;
      if (!options.lmdb_dir.empty()) {
        nodes_[i].disk.backing = make_lmdb_backing(
            fmt::format("{}/{:016x}-{}", options.lmdb_dir, options.seed, i), member(i));
      }
    }
  }

  RunResult run() {
    RunResult result;
    try {
      chaos();
      heal();
      recover();
      converge();
      rest();
      hunger();
    } catch (const Violation& violation) {
      result.violated = true;
      result.law = violation.law;
      result.what = violation.what;
      trace_.event(now_, Trace::kWorld, "VIOLATION", static_cast<std::uint64_t>(violation.law), 0,
                   [&] { return fmt::format("law {}: {}", violation.law, violation.what); });
    }
    for (Node& node : nodes_) {
      if (node.up) stats_.node_seconds += static_cast<double>(now_ - node.up_since) / 1e9;
      // A crash, so that no late call reaches what is already gone.
      if (node.up && node.disk.backing) node.disk.backing->crash();
    }
    result.at = now_;
    result.hash = trace_.hash();
    stats_.simulated = now_;
    stats_.decisions = checker_.decisions();
    stats_.admitted = checker_.admitted();
    stats_.over_admitted = checker_.over_admitted();
    stats_.escrow_admitted = checker_.escrow_admitted();
    stats_.escrow_denied = checker_.escrow_denied();
    stats_.escrow_given = checker_.escrow_given();
    result.stats = stats_;
    result.scenario = scenario_;
    result.tail.assign(trace_.tail().begin(), trace_.tail().end());
    return result;
  }

 private:
  // Events.

  struct Event {
    Nanos at = 0;
    std::uint64_t number = 0;
    std::function<void()> call;
  };
  struct Later {
    bool operator()(const Event& a, const Event& b) const {
      return a.at != b.at ? a.at > b.at : a.number > b.number;
    }
  };

  void after(Nanos delay, std::function<void()> call) {
    events_.push_back({now_ + std::max<Nanos>(delay, 0), ++event_number_, std::move(call)});
    std::push_heap(events_.begin(), events_.end(), Later{});
  }

  /// Only if the process that asked for it still runs.
  void after(std::uint32_t n, Nanos delay, std::function<void()> call) {
    after(delay, [this, n, boot = nodes_[n].boot, call = std::move(call)] {
      if (nodes_[n].up && nodes_[n].boot == boot) call();
    });
  }

  void advance(Nanos until) {
    while (!events_.empty() && events_.front().at <= until) {
      std::pop_heap(events_.begin(), events_.end(), Later{});
      Event event = std::move(events_.back());
      events_.pop_back();
      now_ = event.at;
      event.call();
      if (++stats_.events % kInspectEvery == 0) {
        checker_.inspect(
            static_cast<std::uint32_t>(stats_.events / kInspectEvery % scenario_.nodes));
      }
    }
    now_ = until;
  }

  template <typename Text>
  void note(int node, std::string_view what, std::uint64_t a, std::uint64_t b, Text text) {
    trace_.event(now_, node, what, a, b, text);
  }
  template <typename Text>
  void note(std::uint32_t node, std::string_view what, std::uint64_t a, std::uint64_t b,
            Text text) {
    note(static_cast<int>(node), what, a, b, text);
  }

  // Clocks.

  Nanos wall(std::uint32_t n) const {
    const Node& node = nodes_[n];
    return scenario_.start_wall + now_ + node.offset +
           (now_ - node.drift_since) / 1'000'000 * node.drift;
  }

  void set_drift(std::uint32_t n, std::int64_t ppm) {
    Node& node = nodes_[n];
    node.offset += (now_ - node.drift_since) / 1'000'000 * node.drift;
    node.drift_since = now_;
    node.drift = ppm;
  }

  // Nodes.

  static crdt::Member member(std::uint32_t n) {
    return {fmt::format("region-{}", n), fmt::format("node-{}", n)};
  }
  static crdt::PeerIndex index_of(std::uint32_t at, std::uint32_t of) {
    return of < at ? of : of - 1;
  }
  static std::uint32_t node_of(std::uint32_t at, crdt::PeerIndex index) {
    return index < at ? index : index + 1;
  }

  crdt::Incarnation fresh_incarnation(std::uint32_t n) {
    crdt::Incarnation fresh{ids_.next(), ids_.next()};
    Node& node = nodes_[n];
    if (options_.sabotage == Sabotage::reused_incarnation) {
      if (!node.first) node.first = fresh;
      fresh = node.first;
    }
    checker_.made_incarnation(fresh);
    return fresh;
  }

  node::EngineOptions engine_options(std::uint32_t n) {
    node::EngineOptions options;
    options.replica.self = member(n);
    for (std::uint32_t i = 0; i < scenario_.nodes; ++i) {
      if (i != n) options.replica.peers.push_back(member(i));
    }
    options.replica.sync_interval = scenario_.sync_interval;
    options.replica.anti_entropy_interval = scenario_.anti_entropy_interval;
    options.replica.resend_after = scenario_.resend_after;
    options.replica.repair_piece = scenario_.repair_piece;
    options.replica.enter_piece = scenario_.enter_piece;
    options.replica.seed = timing_.next();
    options.rules = scenario_.rules[nodes_[n].rules];
    for (std::uint32_t i = 0; i < scenario_.nodes; ++i) {
      options.shareholders.push_back({member(i), {{0, scenario_.weights[i]}}});
    }
    options.hash_key = hash_key(scenario_.seed);
    options.max_series = scenario_.max_series;
    options.sweep_interval = scenario_.scale * kSecond;
    options.sweep_piece = scenario_.sweep_piece;
    options.max_backlog = scenario_.max_backlog;
    options.fresh_incarnation = [this, n] { return fresh_incarnation(n); };
    return options;
  }

  void start(std::uint32_t n) {
    Node& node = nodes_[n];
    if (node.up) return;
    ++node.boot;
    node.die_after_commit = false;
    node.held = 0;
    node.pump_due = kNever;
    node.up = true;
    node.store = std::make_unique<SimStore>(node.disk, store_host(n));
    node::EngineEvents events;
    events.send = [this, n](crdt::PeerIndex peer, const crdt::Message& message) {
      send(n, node_of(n, peer), message);
    };
    events.reincarnated = [this, n](const crdt::Incarnation& fresh) { reincarnated(n, fresh); };
    events.log = [this, n](const std::string& event, const std::string& detail) {
      note(n, event, 0, 0, [&] { return detail; });
    };
    node.engine = std::make_unique<node::Engine>(engine_options(n), &checked_store(n), events);
    storage::StoreEvents store_events;
    store_events.committed = [this, n](crdt::WriteId upto) { committed(n, upto); };
    store_events.failed = [this, n](const std::string& reason) { store_failed(n, reason); };
    store_events.opened = [this, n](std::shared_ptr<storage::Recovered> recovered) {
      store_opened(n, std::move(recovered));
    };
    std::string error;
    if (!node.engine->start(wall(n), std::move(store_events), error)) {
      note(n, "no start", 0, 0, [&] { return error; });
      node.engine.reset();
      node.store.reset();
      node.up = false;
      if (error.find("no space") == std::string::npos) throw Violation{28, error};
      after(scenario_.scale * kSecond, [this, n] {
        if (nodes_[n].should_run) start(n);
      });
      return;
    }
    ++stats_.boots;
    node.up_since = now_;
    checker_.nodes[n].engine = node.engine.get();
    note(n, "boot", node.engine->replica().incarnation().lo, node.engine->replica().cell_count(),
         [&] {
           return fmt::format("as {} with {} cells, clock {:+.3f}s",
                              crdt::to_string(node.engine->replica().incarnation()).substr(0, 8),
                              node.engine->replica().cell_count(),
                              static_cast<double>(wall(n) - scenario_.start_wall - now_) / 1e9);
         });
    checker_.booted(n, true);
    plan_pump(n, timing_.between(1, 5) * kMillisecond);
    for (std::uint32_t i = 0; i < scenario_.nodes; ++i) {
      if (i == n) continue;
      dial_later(n, i);
    }
  }

  /// Lets the checker see what the engine hands over, before the store does.
  class CheckedStore final : public storage::Store {
   public:
    CheckedStore(World& world, std::uint32_t n) : world_(world), n_(n) {}
    bool open(const crdt::Incarnation& fresh, Nanos now, storage::StoreEvents events,
              storage::Recovered& out, std::string& error) override {
      return under().open(fresh, now, std::move(events), out, error);
    }
    bool adopt(const crdt::Incarnation& fresh, Nanos now, std::string& error) override {
      return under().adopt(fresh, now, error);
    }
    void reopen(const crdt::Incarnation& fresh, Nanos now) override { under().reopen(fresh, now); }
    void append(crdt::Write write) override {
      world_.checker_.appended(n_, write);
      under().append(std::move(write));
    }
    void expire(Nanos floor) override { under().expire(floor); }
    void reserve_time(Nanos ceiling) override { under().reserve_time(ceiling); }
    std::uint64_t backlog() const override { return world_.nodes_[n_].store->backlog(); }
    void close(Nanos now) override { under().close(now); }
    storage::StoreCounters counters() const override { return world_.nodes_[n_].store->counters(); }

   private:
    SimStore& under() { return *world_.nodes_[n_].store; }
    World& world_;
    std::uint32_t n_;
  };

  CheckedStore& checked_store(std::uint32_t n) {
    while (checked_.size() < scenario_.nodes) {
      checked_.push_back(
          std::make_unique<CheckedStore>(*this, static_cast<std::uint32_t>(checked_.size())));
    }
    return *checked_[n];
  }

  StoreHost store_host(std::uint32_t n) {
    StoreHost host;
    host.after = [this, n](Nanos delay, std::function<void()> call) {
      after(n, delay, std::move(call));
    };
    host.durable = [this, n](const crdt::Write& write) {
      checker_.durable(n, write);
      note(n, "durable", write.id, write.delta.cells.size(), [&] {
        return fmt::format("write {} with {} cells", write.id, write.delta.cells.size());
      });
    };
    host.dies_after_commit = [this, n] {
      if (!nodes_[n].die_after_commit) return false;
      // Not from within the store, which still runs.
      after(n, 0, [this, n] { crash(n, "crash between a commit and hearing of it"); });
      return true;
    };
    host.random = &disk_;
    host.latency = scenario_.disk_latency;
    host.tell_delay = scenario_.tell_delay;
    host.reorders = scenario_.disk_reorders;
    host.sabotage = options_.sabotage;
    return host;
  }

  Nanos tell_delay() { return disk_.between(1, scenario_.tell_delay); }

  void committed(std::uint32_t n, crdt::WriteId upto) {
    ++stats_.commits;
    after(n, tell_delay(), [this, n, upto] {
      checker_.nodes[n].expired_to = nodes_[n].store->expired_to();
      note(n, "committed", upto, 0, [&] { return fmt::format("up to write {}", upto); });
      nodes_[n].engine->committed(upto, wall(n));
    });
  }

  void store_failed(std::uint32_t n, const std::string& reason) {
    checker_.store_failed(n);
    note(n, "disk fail", 0, 0, [&] { return reason; });
    after(n, tell_delay(), [this, n, reason] { nodes_[n].engine->store_failed(reason, wall(n)); });
  }

  void store_opened(std::uint32_t n, std::shared_ptr<storage::Recovered> recovered) {
    checker_.store_opened(n);
    note(n, "disk again", recovered->state.cells.size(), 0,
         [] { return "the store is open again"; });
    after(n, tell_delay(), [this, n, recovered = std::move(recovered)] {
      nodes_[n].engine->store_opened(recovered, wall(n));
    });
  }

  void reincarnated(std::uint32_t n, const crdt::Incarnation& fresh) {
    ++stats_.reincarnations;
    checker_.reincarnated(n, fresh);
    note(n, "reborn", fresh.lo, 0,
         [&] { return "goes on as " + crdt::to_string(fresh).substr(0, 8); });
    // The engine has forgotten its sessions already; the peers notice a little later.
    for (std::uint32_t i = 0; i < scenario_.nodes; ++i) {
      if (i == n) continue;
      links_[n][i].session = 0;
      links_[i][n].accepted = 0;
      lose_session(i, n, timing_.between(0, 200) * kMillisecond);
      dial_later(n, i);
    }
  }

  void go_down(std::uint32_t n) {
    Node& node = nodes_[n];
    stats_.node_seconds += static_cast<double>(now_ - node.up_since) / 1e9;
    node.up = false;
    checker_.nodes[n].engine = nullptr;
    checker_.nodes[n].expired_to = 0;
    node.engine.reset();
    node.store.reset();
    for (std::uint32_t i = 0; i < scenario_.nodes; ++i) {
      if (i == n) continue;
      links_[n][i].session = 0;
      links_[n][i].dialling = false;
      links_[i][n].accepted = 0;
      // A process that dies resets its connections; a machine that dies says nothing.
      bool quiet = timing_.chance(300);
      lose_session(i, n, timing_.between(0, quiet ? kDetectCut : 50 * kMillisecond));
    }
  }

  void crash(std::uint32_t n, const char* why) {
    Node& node = nodes_[n];
    if (!node.up) return;
    note(n, "crash", 0, 0, [&] { return why; });
    node.store->crash();
    checker_.crashed(n);
    go_down(n);
  }

  void stop(std::uint32_t n) {
    Node& node = nodes_[n];
    if (!node.up) return;
    note(n, "stop", 0, 0, [] { return "clean"; });
    // Rights that it gives now may be known to nobody before it is back.
    node.engine->hand_over(wall(n));
    if (!node.up) return;
    checker_.stopping(n);
    node.engine->stop(wall(n));
    checker_.nodes[n].expired_to = node.store->expired_to();
    bool failed = node.store->failed();
    checker_.stopped(n);
    if (failed) node.store->crash();
    go_down(n);
  }

  void plan_pump(std::uint32_t n, Nanos delay) {
    Node& node = nodes_[n];
    Nanos due = now_ + delay;
    if (node.pump_due <= due) return;
    node.pump_due = due;
    after(n, delay, [this, n, ticket = ++node.pump_ticket] {
      if (nodes_[n].pump_ticket == ticket) pump(n);
    });
  }

  void pump(std::uint32_t n) {
    Node& node = nodes_[n];
    node.pump_due = kNever;
    node.engine->pump(wall(n));
    if (node.up && node.engine->clock_set_back()) {
      note(n, "set back", 0, 0, [] { return "the clock was ahead"; });
      stop(n);
      start(n);
      return;
    }
    if (!node.up) return;
    plan_pump(n, pump_gap_ / 2 + timing_.between(0, pump_gap_ / 2));
  }

  // Sessions.

  bool passes(std::uint32_t from, std::uint32_t to) const {
    return scenario_.links[from][to].exists && links_[from][to].cuts == 0;
  }

  Nanos delay(std::uint32_t from, std::uint32_t to) {
    const LinkShape& shape = scenario_.links[from][to];
    Nanos time = shape.delay + network_.between(0, shape.jitter);
    for (std::int64_t factor : links_[from][to].slower) time *= factor;
    return std::min(time, 20 * kSecond);
  }

  void dial_later(std::uint32_t from, std::uint32_t to) {
    Link& link = links_[from][to];
    if (link.dialling || !scenario_.links[from][to].exists) return;
    link.dialling = true;
    Nanos wait = network_.between(1, 200) * kMillisecond;
    after(from, wait, [this, from, to] { dial(from, to); });
  }

  void dial(std::uint32_t from, std::uint32_t to) {
    Link& link = links_[from][to];
    link.dialling = false;
    if (link.session != 0) return;
    if (!passes(from, to) || !passes(to, from) || !nodes_[to].up) {
      link.dialling = true;
      Nanos wait = network_.between(100, 1500) * kMillisecond;
      after(from, wait, [this, from, to] { dial(from, to); });
      return;
    }
    link.dialling = true;
    std::uint64_t session = ++sessions_;
    crdt::Incarnation mine = nodes_[from].engine->replica().incarnation();
    after(delay(from, to), [this, from, to, session, mine] { accept(from, to, session, mine); });
    // The whole handshake may get lost.
    after(from, 2 * kSecond * scenario_.scale, [this, from, to, session] {
      Link& waiting = links_[from][to];
      if (waiting.dialling && waiting.session == 0 && session == last_dial_[from * 16 + to]) {
        dial(from, to);
      }
    });
    last_dial_[from * 16 + to] = session;
  }

  void accept(std::uint32_t from, std::uint32_t to, std::uint64_t session,
              const crdt::Incarnation& mine) {
    if (!nodes_[to].up || !passes(from, to)) return;
    if (last_dial_[from * 16 + to] != session) return;  // the dialler has given this one up
    Link& link = links_[from][to];
    link.accepted = session;
    link.dialler = mine;
    crdt::Incarnation theirs = nodes_[to].engine->replica().incarnation();
    after(from, delay(to, from), [this, from, to, session, theirs, mine] {
      Link& dialled = links_[from][to];
      if (last_dial_[from * 16 + to] != session || dialled.session != 0 || !passes(to, from))
        return;
      if (nodes_[from].engine->replica().incarnation() != mine) return;
      dialled.dialling = false;
      dialled.session = session;
      dialled.theirs = theirs;
      note(from, "session", to, session,
           [&] { return fmt::format("to n{} as {}", to, crdt::to_string(theirs).substr(0, 8)); });
      // It may have died meanwhile; then the connection does as well.
      if (dialled.accepted != session) lose_session(from, to, network_.between(0, kSecond));
      nodes_[from].engine->peer_up(index_of(from, to), theirs, wall(from));
    });
  }

  /// The session on which `from` sends ends, if it is still the same one, after `delay`.
  void lose_session(std::uint32_t from, std::uint32_t to, Nanos delay) {
    std::uint64_t session = links_[from][to].session;
    if (session == 0) return;
    after(from, delay, [this, from, to, session] {
      Link& link = links_[from][to];
      if (link.session != session) return;
      link.session = 0;
      note(from, "lost", to, session, [&] { return fmt::format("session to n{}", to); });
      nodes_[from].engine->peer_down(index_of(from, to));
      dial_later(from, to);
    });
  }

  // Messages.

  void send(std::uint32_t from, std::uint32_t to, const crdt::Message& message) {
    Link& link = links_[from][to];
    checker_.sent(from, to, link.theirs, message);
    ++stats_.messages;
    sent_[message.index()] += 1;
    if (link.session == 0) return;
    if (options_.sabotage == Sabotage::early_ack && std::holds_alternative<crdt::Push>(message)) {
      const auto& push = std::get<crdt::Push>(message);
      if (nodes_[to].up) {
        checker_.sent(to, from, push.pusher, crdt::Ack{push.pusher, incarnation(to), push.upto});
      }
    }
    const LinkShape& shape = scenario_.links[from][to];
    unsigned loss = healed_ ? 0 : shape.loss;
    for (unsigned extra : link.extra_loss) loss += extra;
    int copies = !healed_ && network_.chance(shape.duplicate) ? 2 : 1;
    auto shared = std::make_shared<crdt::Message>(message);
    if (options_.sabotage == Sabotage::inflating_network && network_.chance(50)) inflate(*shared);
    for (int i = 0; i < copies; ++i) {
      if (network_.chance(std::min(loss, 1000u)) || !passes(from, to)) continue;
      Nanos takes = delay(from, to);
      if (copies == 2 && network_.chance(200)) takes += network_.between(0, 5 * kSecond);
      last_arrival_ = std::max(last_arrival_, now_ + takes);
      after(takes, [this, from, to, session = link.session, sender = incarnation(from), shared] {
        deliver(from, to, session, sender, shared);
      });
    }
  }

  crdt::Incarnation incarnation(std::uint32_t n) const {
    return nodes_[n].engine->replica().incarnation();
  }

  void inflate(crdt::Message& message) {
    crdt::Delta* delta = nullptr;
    if (auto* push = std::get_if<crdt::Push>(&message)) delta = &push->delta;
    if (auto* repair = std::get_if<crdt::Repair>(&message)) delta = &repair->delta;
    if (delta == nullptr || delta->cells.empty()) return;
    crdt::Cell& cell = delta->cells[network_.below(delta->cells.size())];
    if (!cell.slots.empty()) cell.slots[network_.below(cell.slots.size())].value += 1;
  }

  void deliver(std::uint32_t from, std::uint32_t to, std::uint64_t session,
               const crdt::Incarnation& sender, const std::shared_ptr<crdt::Message>& message) {
    Node& node = nodes_[to];
    if (!node.up) return;
    if (links_[from][to].accepted != session && (!scenario_.ghosts || healed_)) return;
    if (!node.engine->ready_for_more()) {
      if (node.held >= kMaxHeld) return;
      ++node.held;
      after(to, 20 * kMillisecond, [this, from, to, session, sender, message] {
        --nodes_[to].held;
        deliver(from, to, session, sender, message);
      });
      return;
    }
    std::uint64_t weight = weigh(*message);
    note(to, kind_of(*message), from, weight,
         [&] { return fmt::format("from n{}: {}", from, summary(*message)); });
    // Whatever comes, it is taken in at a time that this node had already reached.
    node.engine->clock(wall(to));
    checker_.delivering(to, *message);
    node.engine->receive(index_of(to, from), sender, *message, wall(to));
    checker_.delivered(to, *message);
  }

  // Traffic.

  void request_later(std::uint32_t n) {
    const Node& node = nodes_[n];
    Nanos mean = scenario_.request_gap[n] / (node.bursts > 0 ? 20 : 1);
    // Close to exponential, without floating point.
    Nanos gap = 0;
    for (int i = 0; i < 2; ++i) gap += traffic_.between(0, mean);
    if (traffic_.chance(100)) gap *= 5;
    if (traffic_.chance(300)) gap /= 20;
    after(gap, [this, n] {
      if (healed_) return;
      if (nodes_[n].up) request(n);
      request_later(n);
    });
  }

  void request(std::uint32_t n) {
    Node& node = nodes_[n];
    std::uint64_t users = std::min(scenario_.users, options_.most_users);
    // Half of the traffic is of the first key, a quarter of the second…
    std::uint64_t user = traffic_.below(users);
    for (int i = 0; i < 3; ++i) user = std::min(user, traffic_.below(users));
    std::uint64_t path = traffic_.below(scenario_.paths);
    bool post = traffic_.chance(300);
    std::uint64_t hits = 1;
    std::uint64_t kind = traffic_.below(100);
    std::uint64_t many = static_cast<std::uint64_t>(traffic_.log_between(2, 200));
    if (kind < 10) hits = 0;
    if (kind >= 80 && !options_.no_bursts_of_hits) hits = kind < 95 ? 1 + many % 5 : many;
    bool nameless = traffic_.chance(50);
    std::string user_text = fmt::format("u{}", user);
    std::string path_text = fmt::format("/p{}", path);
    std::vector<Entry> entries{{"path", path_text}, {"method", post ? "POST" : "GET"}};
    if (!nameless) entries.push_back({"user", user_text});
    Request request{"sim", entries, hits};
    node.engine->warm(request, wall(n));
    node.engine->check(request, wall(n), decision_);
    Nanos at = node.engine->clock(0);
    note(n, decision_.allowed ? "allow" : "deny", user * 1000 + path, hits,
         [&] { return fmt::format("u{} p{} hits {}", user, path, hits); });
    checker_.decided(n, request, decision_, at);
    await_durable(n);
  }

  /// The answer of decision_ waits, if it must.
  void await_durable(std::uint32_t n) {
    Node& node = nodes_[n];
    if (decision_.allowed && decision_.wants_commit) {
      std::uint64_t number = checker_.asked(n);
      node.engine->when_durable([this, n, number](bool durable) {
        note(n, "answer", number, durable,
             [&] { return fmt::format("{} {}", number, durable ? "durable" : "not durable"); });
        checker_.answered(n, number, durable);
      });
    }
    plan_pump(n, timing_.between(1, 5) * kMillisecond);
  }

  // Faults.

  void inject(const Fault& fault) {
    ++stats_.faults[static_cast<std::size_t>(fault.kind)];
    const Nanos length = std::min(fault.length, chaos_ - now_);
    note(Trace::kWorld, "FAULT", static_cast<std::uint64_t>(fault.kind), fault.node,
         [&] { return to_string(fault); });
    switch (fault.kind) {
      case FaultKind::crash:
      case FaultKind::crash_mid_commit:
      case FaultKind::stop:
      case FaultKind::limit_change:
      case FaultKind::clock_jump:
      case FaultKind::clock_drift:
      case FaultKind::forged:
      case FaultKind::burst:
        return node_fault(fault, length);
      case FaultKind::disk_lost:
      case FaultKind::disk_restored:
      case FaultKind::disk_cloned:
        return disk_replaced(fault, length);
      case FaultKind::disk_slow:
      case FaultKind::disk_fails:
      case FaultKind::disk_full:
        return disk_trouble(fault, length);
      case FaultKind::cut:
      case FaultKind::partition:
      case FaultKind::partial_cut:
      case FaultKind::lossy:
      case FaultKind::slow_link:
      case FaultKind::session_reset:
        return link_fault(fault, length);
    }
  }

  /// `begin` now, `end` after `length`.
  template <class Begin, class End>
  void for_a_while(Nanos length, Begin begin, End end) {
    begin();
    after(length, end);
  }

  /// The node comes back after `delay`, if it is to run.
  void back(std::uint32_t n, Nanos delay) {
    after(delay, [this, n] {
      if (nodes_[n].should_run) start(n);
    });
  }

  void node_fault(const Fault& fault, Nanos length) {
    const std::uint32_t n = fault.node;
    Node& node = nodes_[n];
    switch (fault.kind) {
      case FaultKind::crash:
        crash(n, "power");
        back(n, length);
        break;
      case FaultKind::crash_mid_commit:
        node.die_after_commit = true;
        back(n, length);
        break;
      case FaultKind::stop:
        // So that there is something that the stop itself must save.
        for (int i = 0; i < 3 && node.up; ++i) request(n);
        stop(n);
        back(n, length);
        break;
      case FaultKind::limit_change:
        node.rules = 1 - node.rules;
        checker_.rates_differ = true;
        if (node.up) {
          node.engine->reload(scenario_.rules[node.rules]);
          checker_.rules_loaded(n);
        }
        break;
      case FaultKind::clock_jump:
        node.offset += fault.amount;
        break;
      case FaultKind::clock_drift:
        for_a_while(
            length, [&] { set_drift(n, fault.amount); }, [this, n] { set_drift(n, 0); });
        break;
      case FaultKind::forged:
        for (std::uint32_t owner = 0; owner < nodes_.size(); ++owner) {
          if (owner != n && owner != fault.other) inflate(n, fault.other, owner);
        }
        forge(n, fault.other, static_cast<std::uint64_t>(fault.amount));
        break;
      case FaultKind::burst:
        for_a_while(
            length, [&] { ++node.bursts; }, [this, n] { --nodes_[n].bursts; });
        break;
      default:
        break;
    }
  }

  void disk_replaced(const Fault& fault, Nanos length) {
    const std::uint32_t n = fault.node;
    Node& node = nodes_[n];
    switch (fault.kind) {
      case FaultKind::disk_lost:
        crash(n, "power, and the disk is gone");
        checker_.disk_will_be(n, {}, wall(n));
        node.disk.image = {};
        if (node.disk.backing) node.disk.backing->wipe();
        checker_.disk_replaced(n);
        back(n, length);
        break;
      case FaultKind::disk_restored:
        // A consistent copy of a real store's files needs the store at rest.
        if (node.disk.backing) {
          crash(n, "for a copy of its disk");
          node.disk.backing->save_copy();
          back(n, 0);
        }
        node.disk.copy = node.disk.image;
        after(length, [this, n] { put_copy_back(n); });
        break;
      case FaultKind::disk_cloned:
        // A real store refuses the disk of another member.
        if (node.disk.backing) break;
        crash(n, "power, and the disk of another node is put in");
        checker_.disk_will_be(n, nodes_[fault.other].disk.image, wall(n));
        node.disk.image = nodes_[fault.other].disk.image;
        checker_.disk_replaced(n);
        back(n, length);
        break;
      default:
        break;
    }
  }

  void put_copy_back(std::uint32_t n) {
    if (healed_) return;
    Disk& disk = nodes_[n].disk;
    crash(n, "power, and an older copy of the disk is put back");
    checker_.disk_will_be(n, disk.copy, wall(n));
    disk.image = disk.copy;
    if (disk.backing) disk.backing->load_copy();
    checker_.disk_replaced(n);
    start(n);
  }

  void disk_trouble(const Fault& fault, Nanos length) {
    const std::uint32_t n = fault.node;
    auto& disk = nodes_[n].disk;
    switch (fault.kind) {
      case FaultKind::disk_slow:
        for_a_while(
            length, [&] { disk.slowness = fault.amount; },
            [this, n] { nodes_[n].disk.slowness = 1; });
        break;
      case FaultKind::disk_fails:
        for_a_while(
            length, [&] { disk.failing = true; }, [this, n] { nodes_[n].disk.failing = false; });
        break;
      case FaultKind::disk_full:
        for_a_while(
            length, [&] { disk.full = true; }, [this, n] { nodes_[n].disk.full = false; });
        break;
      default:
        break;
    }
  }

  void cut(std::uint32_t a, std::uint32_t b, int change) {
    links_[a][b].cuts += change;
    if (change <= 0) return;
    // Either side may notice, at its own time; the dialler alone acts on it here.
    lose_session(a, b, timing_.between(100 * kMillisecond, kDetectCut));
    lose_session(b, a, timing_.between(100 * kMillisecond, kDetectCut));
  }

  /// Between the nodes whose bit is set in `side` and the others.
  void cut_between(std::int64_t side, int change) {
    for (std::uint32_t a = 0; a < scenario_.nodes; ++a) {
      for (std::uint32_t b = 0; b < scenario_.nodes; ++b) {
        if (((side >> a) & 1) != ((side >> b) & 1)) cut(a, b, change);
      }
    }
  }

  void link_fault(const Fault& fault, Nanos length) {
    const std::uint32_t n = fault.node;
    const std::uint32_t other = fault.other;
    const auto amount = fault.amount;
    switch (fault.kind) {
      case FaultKind::cut:
        for_a_while(
            length, [&] { cut(n, other, 1); }, [=, this] { cut(n, other, -1); });
        break;
      case FaultKind::partition:
        for_a_while(
            length, [&] { cut_between(amount, 1); }, [=, this] { cut_between(amount, -1); });
        break;
      case FaultKind::partial_cut: {
        const auto both = [this, n, other](int change) {
          cut(n, other, change);
          cut(other, n, change);
        };
        for_a_while(
            length, [&] { both(1); }, [both] { both(-1); });
        break;
      }
      case FaultKind::lossy:
        for_a_while(
            length, [&] { links_[n][other].extra_loss.push_back(static_cast<unsigned>(amount)); },
            [this, n, other] { links_[n][other].extra_loss.pop_back(); });
        break;
      case FaultKind::slow_link:
        for_a_while(
            length,
            [&] {
              links_[n][other].slower.push_back(amount);
              links_[other][n].slower.push_back(amount);
            },
            [this, n, other] {
              links_[n][other].slower.pop_back();
              links_[other][n].slower.pop_back();
            });
        break;
      case FaultKind::session_reset:
        lose_session(n, other, 0);
        break;
      default:
        break;
    }
  }

  void forge(std::uint32_t n, std::uint32_t by, std::uint64_t amount) {
    Node& node = nodes_[n];
    if (!node.up || !nodes_[by].up) return;
    crdt::SlotId own{incarnation(n), 0};
    std::optional<crdt::Cell> forged;
    node.engine->replica().for_each([&](const crdt::Cell& cell) {
      if (forged || cell.id.is_bucket() || cell.value_of(own) == 0) return;
      forged.emplace();
      forged->id = cell.id;
      forged->raise(own, cell.value_of(own) + amount + 100'000);
    });
    if (!forged) return;
    crdt::Repair repair;
    repair.delta.cells.push_back(*forged);
    node.engine->receive(index_of(n, by), incarnation(by), repair, wall(n));
  }

  /// `by` tells `n` more of a slot of `owner` than there is, of which `n` has just heard.
  void inflate(std::uint32_t n, std::uint32_t by, std::uint32_t owner) {
    Node& node = nodes_[n];
    if (!node.up || !nodes_[by].up || !nodes_[owner].up) return;
    node.engine->receive(index_of(n, owner), incarnation(owner), crdt::Ack{}, wall(n));
    const crdt::Incarnation writer = incarnation(owner);
    std::optional<crdt::Cell> inflated;
    nodes_[owner].engine->replica().for_each([&](const crdt::Cell& cell) {
      if (inflated) return;
      for (const crdt::Slot& slot : cell.slots) {
        if (slot.id.writer != writer) continue;
        inflated.emplace();
        inflated->id = cell.id;
        inflated->bucket = {{}, cell.bucket.touched, cell.bucket.expiry};
        inflated->raise(slot.id, ~std::uint64_t{0});
        return;
      }
    });
    if (!inflated) return;
    crdt::Repair repair;
    repair.delta.cells.push_back(*inflated);
    node.engine->receive(index_of(n, by), incarnation(by), repair, wall(n));
  }

  // Phases.

  void chaos() {
    pump_gap_ = scenario_.sync_interval / 5;
    for (std::size_t i = 0; i < scenario_.faults.size(); ++i) {
      const Fault& fault = scenario_.faults[i];
      if (options_.without.contains(i) || fault.at >= chaos_) continue;
      after(fault.at, [this, &fault] { inject(fault); });
    }
    for (std::uint32_t n = 0; n < scenario_.nodes; ++n) {
      start(n);
      request_later(n);
    }
    advance(chaos_);
  }

  /// Ends every fault that can be repaired: cuts, loss, disks, clocks; and the traffic.
  void heal() {
    healed_ = true;
    note(Trace::kWorld, "HEAL", 0, 0, [] { return "traffic and faults end"; });
    for (std::uint32_t n = 0; n < scenario_.nodes; ++n) {
      Node& node = nodes_[n];
      node.disk.slowness = 1;
      node.disk.failing = node.disk.full = false;
      node.die_after_commit = false;
      node.bursts = 0;
      set_drift(n, 0);
      node.offset = timing_.between(-100, 100) * kMillisecond;
      for (Link& link : links_[n]) {
        link.cuts = 0;
        link.extra_loss.assign(link.extra_loss.size(), 0);
        link.slower.assign(link.slower.size(), 1);
      }
    }
    // A node without a disk goes on, or is started again with one.
    for (std::uint32_t n = 0; n < scenario_.nodes; ++n) {
      if (nodes_[n].up && nodes_[n].store->failed() && timing_.chance(500)) crash(n, "for repair");
      start(n);
    }
    // A node whose clock was ahead waits for it a little, or notices and starts again.
    advance(now_ + storage::kMostTimeWaits + 2 * kSecond + 4 * pump_gap_);
    for (std::uint32_t n = 0; n < scenario_.nodes; ++n) {
      const Nanos ahead = nodes_[n].engine->clock(0) - wall(n);
      if (ahead <= kSecond) continue;
      throw Violation{54, fmt::format("n{}: time stands still {:.3f}s ahead of its clock", n,
                                      static_cast<double>(ahead) / 1e9)};
    }
    checker_.expect_from_here();
  }

  /// Every disk is good again, and so is every node: it finds out by itself.
  void recover() {
    const Nanos until = now_ + (node::Engine::kLongestReopenWait + 10 * kSecond) * scenario_.scale;
    for (std::uint32_t n = 0; n < scenario_.nodes; ++n) {
      while (!nodes_[n].engine->status().durable) {
        if (now_ >= until) {
          throw Violation{49, fmt::format("n{}: its disk is good, and it promises nothing: {}", n,
                                          nodes_[n].engine->status().storage_failure)};
        }
        advance(now_ + scenario_.sync_interval);
      }
    }
  }

  /// Nothing much happens for a while: nodes pump seldom.
  void sleep(Nanos time) {
    pump_gap_ = std::clamp(time / 200, scenario_.sync_interval / 5,
                           std::max(30 * kSecond, scenario_.sync_interval));
    advance(now_ + time);
    pump_gap_ = scenario_.sync_interval / 5;
    for (std::uint32_t n = 0; n < scenario_.nodes; ++n) plan_pump(n, pump_gap_);
  }

  void converge() {
    Nanos until = now_ + kConvergeWithin * scenario_.scale;
    // What is already on its way counts as seen, too.
    while (!checker_.converged()) {
      if (now_ >= until) {
        std::string states;
        for (std::uint32_t n = 0; n < scenario_.nodes; ++n) {
          const crdt::Replica& replica = nodes_[n].engine->replica();
          states += fmt::format(" n{}: {} cells, digest {:x};", n, replica.cell_count(),
                                replica.digest());
        }
        throw Violation{5, fmt::format("no convergence within {}s of quiet: {};{}",
                                       kConvergeWithin / kSecond * scenario_.scale,
                                       checker_.difference(), states)};
      }
      advance(now_ + scenario_.sync_interval);
    }
    note(Trace::kWorld, "CONVERGED", 0, 0, [] { return "all states are equal"; });
  }

  void rest() {
    const bool early = std::any_of(nodes_.begin(), nodes_.end(), [](const Node& node) {
      return node.engine->status().early_cells > 0;
    });
    // What was under way settles: messages on a slow way, resends, late rounds, buckets that are
    // full again.
    advance(std::max(now_, last_arrival_) + 2 * scenario_.resend_after +
            4 * scenario_.anti_entropy_interval + 70 * scenario_.sync_interval / 5 + 10 * kSecond);
    sent_ = {};
    advance(now_ + 3 * scenario_.anti_entropy_interval);
    if (sent_[0] != 0 || sent_[1] != 0) {
      throw Violation{37, fmt::format("{} pushes and {} acknowledgements, though nothing happens",
                                      sent_[0], sent_[1])};
    }
    if (!checker_.converged()) {
      // What was counted in windows to come is told when they come.
      if (!early) throw Violation{37, "converged states came apart again"};
      converge();
    }
    std::vector<std::vector<bool>> linked(scenario_.nodes, std::vector<bool>(scenario_.nodes));
    bool same_rules = true;
    for (std::uint32_t a = 0; a < scenario_.nodes; ++a) {
      same_rules &= nodes_[a].rules == nodes_[0].rules;
      for (std::uint32_t b = 0; b < scenario_.nodes; ++b) {
        linked[a][b] = a != b && scenario_.links[a][b].exists;
      }
      if (nodes_[a].store->backlog() != 0)
        throw Violation{37, "writes wait though nothing happens"};
    }
    checker_.at_rest(linked, same_rules);
    note(Trace::kWorld, "REST", 0, 0, [] { return "quiet, and all answers are equal"; });
    for (const Node& node : nodes_) trace_.fold(node.engine->replica().digest());
  }

  /// Nothing is broken any more: one node that asks for all of an escrow rule's limit gets it, in a
  /// window that has just begun, of a key that nobody has asked for before.
  void hunger() {
    auto n = static_cast<std::uint32_t>(timing_.below(scenario_.nodes));
    std::uint64_t weights = 0;
    for (std::uint32_t other = 0; other < scenario_.nodes; ++other) {
      const Node& node = nodes_[other];
      weights += scenario_.weights[other];
      // Who is not linked cannot be asked; a node whose disk failed spends no rights, nor gives
      // any.
      if (other != n && !scenario_.links[n][other].exists) return;
      if (node.store->failed() || node.rules != nodes_[n].rules) return;
    }
    if (weights == 0 || scenario_.max_series < 1000) return;
    const std::shared_ptr<const RuleSet> rules = nodes_[n].engine->limiter().rules();
    for (std::uint32_t i = 0; i < rules->rules().size(); ++i) {
      const Rule& rule = rules->rules()[i];
      if (rule.enforcement == Enforcement::escrow && !rule.shadow && hunger(n, i, rule)) return;
    }
  }

  bool hunger(std::uint32_t n, std::uint32_t index, const Rule& rule) {
    node::Engine& engine = *nodes_[n].engine;
    const std::vector<Entry> entries{{"path", "/h"}, {"method", "POST"}, {"user", "hungry"}};
    const std::string_view rule_filter[] = {rule.name};
    Request request{"sim", entries, 1, {}, false, rule_filter};
    const std::uint64_t cost = rule.cost_of(request);
    // A bucket's part comes a period later each time, and its rate may be as slow as one likes.
    if (is_bucket(rule.algorithm) || cost == 0 || cost > rule.limit) return false;
    const crdt::SeriesId series = engine.limiter().series_of(index, request);
    const WindowShape shape = window_shape(rule, series);
    const Nanos now = engine.clock(wall(n));
    const crdt::Epoch next = shape.epoch(shape.index(now) + 1);
    const Nanos patience = kSatisfiedWithin * scenario_.scale;
    // No history need be that long.
    if (next.expiry - next.start < patience + 2 * kSecond) return false;
    sleep(next.start - now);
    advance(now_ + kSecond);
    note(n, "HUNGRY", rule.limit, cost,
         [&] { return fmt::format("asks for {} of {}", rule.limit, rule.name); });
    std::uint64_t most = 1 + rule.limit / cost / 20;
    std::uint64_t left = rule.limit / cost;
    for (const Nanos until = now_ + patience; left > 0 && now_ < until;) {
      request.hits = std::min(most, left);
      engine.check(request, wall(n), decision_);
      checker_.decided(n, request, decision_, engine.clock(0));
      await_durable(n);
      if (decision_.allowed) left -= request.hits;
      // What comes in small parts is spent so.
      if (!decision_.allowed) most = std::max<std::uint64_t>(1, most / 2);
      advance(now_ + (decision_.allowed ? 20 : 200) * kMillisecond * scenario_.scale);
    }
    if (left == 0) {
      ++stats_.satisfied;
      return true;
    }
    throw Violation{
        46, fmt::format("n{} asked for all of {} for {}s, and {} of {} units did not come", n,
                        rule.name, patience / kSecond, left * cost, rule.limit)};
  }

  RunOptions options_;
  Scenario scenario_;
  Trace trace_;
  Checker checker_;
  Random traffic_;
  Random network_;
  Random disk_;
  Random timing_;
  Random ids_;
  RunStats stats_;
  Nanos now_ = 0;
  Nanos chaos_ = 0;
  bool healed_ = false;
  Nanos pump_gap_ = 50 * kMillisecond;
  std::vector<Event> events_;
  std::uint64_t event_number_ = 0;
  std::uint64_t sessions_ = 0;
  std::array<std::uint64_t, 256> last_dial_{};
  std::array<std::uint64_t, crdt::kMessageKinds> sent_{};
  Nanos last_arrival_ = 0;  // of what has been sent
  std::vector<std::unique_ptr<CheckedStore>> checked_;
  std::vector<Node> nodes_;
  std::vector<std::vector<Link>> links_;
  Decision decision_;
};

}  // namespace

RunResult run(const RunOptions& options) {
  return World(options).run();
}

RunOptions shrink(const RunOptions& failing, int attempts) {
  RunOptions best = failing;
  best.trace = nullptr;
  best.tail = 0;
  RunResult first = run(best);
  if (!first.violated) return failing;
  auto still_fails = [&](const RunOptions& candidate) {
    if (attempts-- <= 0) return false;
    RunResult result = run(candidate);
    return result.violated && result.law == first.law;
  };
  auto keep_if_fails = [&](auto change) {
    RunOptions candidate = best;
    change(candidate);
    if (!still_fails(candidate)) return false;
    best = std::move(candidate);
    return true;
  };
  const std::vector<Fault>& faults = first.scenario.faults;
  auto leave_out = [&](std::size_t from, std::size_t to) {
    return keep_if_fails([&](RunOptions& candidate) {
      for (std::size_t i = from; i < to; ++i) candidate.without.insert(i);
    });
  };
  // What comes after the violation first, then ever smaller groups of faults.
  Nanos longest = std::min(first.scenario.chaos, failing.cut_off);
  if (first.at < longest) {
    keep_if_fails([&](RunOptions& candidate) { candidate.cut_off = first.at + kMillisecond; });
  }
  for (std::size_t size = std::max<std::size_t>(faults.size(), 1); size > 0; size /= 2) {
    for (std::size_t from = 0; from < faults.size(); from += size) {
      leave_out(from, std::min(from + size, faults.size()));
    }
  }
  keep_if_fails([](RunOptions& candidate) { candidate.no_bursts_of_hits = true; });
  keep_if_fails([](RunOptions& candidate) { candidate.most_users = 1; });
  for (int i = 0; i < 6; ++i) {
    Nanos end = std::min(first.scenario.chaos, best.cut_off);
    if (!keep_if_fails([&](RunOptions& candidate) { candidate.cut_off = end * 3 / 4; })) break;
  }
  for (std::size_t i = 0; i < faults.size(); ++i) {
    if (!best.without.contains(i)) leave_out(i, i + 1);
  }
  return best;
}

std::string report(const RunOptions& options, const RunResult& result) {
  std::string text = fmt::format("seed {}: {}\n", options.seed, describe(result.scenario));
  if (result.violated) {
    text += fmt::format("VIOLATION of law {} at {:.6f}s: {}\n", result.law,
                        static_cast<double>(result.at) / 1e9, result.what);
  }
  std::size_t left = 0;
  for (std::size_t i = 0; i < result.scenario.faults.size(); ++i) {
    const Fault& fault = result.scenario.faults[i];
    if (options.without.contains(i) || fault.at >= options.cut_off) continue;
    ++left;
    text += fmt::format("  fault {:2}: {}\n", i, to_string(fault));
  }
  text += fmt::format("  {} of {} faults left", left, result.scenario.faults.size());
  if (options.cut_off != kNever) {
    text += fmt::format(", chaos cut off at {:.6f}s", static_cast<double>(options.cut_off) / 1e9);
  }
  if (options.most_users != ~0u) text += fmt::format(", {} user", options.most_users);
  if (options.no_bursts_of_hits) text += ", single hits";
  text += "\n";
  for (const std::string& line : result.tail) text += line + "\n";
  return text;
}

}  // namespace weir::sim
