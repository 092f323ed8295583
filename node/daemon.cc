#include <weir/node/daemon.h>

#include <kj/async.h>
#include <uv.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <deque>
#include <utility>
#include <vector>

#include <weir/node/access/access.h>
#include <weir/node/control/access_control.h>
#include <weir/node/control/certificates.h>
#include <weir/node/control/rules_control.h>
#include <weir/node/control/rules_watch.h>
#include <weir/node/engine/engine.h>
#include <weir/node/fronts/factory.h>
#include <weir/node/kj_log.h>
#include <weir/node/log_limit.h>
#include <weir/node/report/clock_watch.h>
#include <weir/node/report/report.h>
#include <weir/node/service/coordinator.h>
#include <weir/node/setup.h>
#include <weir/node/time_share.h>
#include <weir/node/uv_handle.h>
#include <weir/node/version.h>
#include <weir/node/worker.h>
#include <weir/rpc/net/background.h>
#include <weir/rpc/net/event_loop.h>
#include <weir/rpc/net/turn_meter.h>
#include <weir/rpc/peers/peers.h>
#include <weir/storage/store.h>

namespace weir::node {
namespace {

/// Time for clients to go once listeners are closed, while they are still answered.
constexpr std::uint64_t kLetGoMs = 250;
/// A stop waits so long for peers to take over rights and the last counts.
constexpr std::uint64_t kHandOverMs = 1000;
/// Time for the last answers to leave before connections close.
constexpr std::uint64_t kFarewellMs = 50;

/// What the messages of one peer may take of the main loop: a part of the time, and so much at
/// once.
constexpr Nanos kPeerPercent = 75;
constexpr Nanos kPeerBurst = 500 * kMillisecond;
/// Calls of one caller for the status, at the client port.
constexpr std::size_t kReportsPerSecond = 100;

/// What the main loop's thread does, for the metric of its longest turns.
using Turn = rpc::TurnMeter::Scope;

Nanos in_nanos(const timespec& time) {
  return static_cast<Nanos>(time.tv_sec) * kSecond + time.tv_nsec;
}

std::string peer_name(const crdt::Member& member) {
  return member.region + "/" + member.node;
}

}  // namespace

/// Wires the rooms of a node: store, engine, service, fronts, peers, control. What they do is
/// theirs.
struct Daemon::Impl final : rpc::PeerHandler, MemberLinks, rpc::Flushable {
  NodeConfig config;
  Log& log;
  LogLimit others{log};  // what others cause
  rpc::EventLoop loop;
  RulesControl control;
  std::unique_ptr<storage::Store> store;
  std::unique_ptr<Engine> engine;
  std::unique_ptr<Coordinator> coordinator;
  CallerBudgets budgets;
  rpc::Background background{loop};
  Certificates certificates;
  Access access;
  AccessControl access_control;
  std::unique_ptr<rpc::PeerNetwork> peers;
  std::unique_ptr<NodeReport> report;
  ClockWatch clocks;
  const Nanos restart_not_before;  // on the monotonic clock
  Nanos links_looked_at = 0;
  std::vector<TimeShare> shares;  // by peer: of the main loop, for its messages
  Nanos conditions_looked_at = 0;
  std::vector<bool> two_of_name;  // by peer: it was logged
  bool namesake = false;          // the same of this node's name
  MainLoopAnswers answers;
  std::unique_ptr<Worker::Shared> shared;
  std::vector<std::unique_ptr<Worker>> workers;
  std::vector<std::unique_ptr<Front>> fronts;  // on the main loop
  std::unique_ptr<RulesWatch> watch;
  std::unique_ptr<UvHandle<uv_timer_t>> pump_timer;
  std::unique_ptr<UvHandle<uv_timer_t>> stage_timer;
  std::function<void()> next_stage;  // what it is set for
  std::vector<std::unique_ptr<UvHandle<uv_signal_t>>> signals;
  std::vector<kj::Own<kj::PromiseFulfiller<void>>> held_peers;
  bool pump_soon = false;
  bool leaving = false;               // it was told to stop
  bool stopping = false;              // nothing is decided any more
  bool closed = false;                // the engine is
  bool set_back = false;              // why it stops
  std::uint64_t hand_over_until = 0;  // on libuv's clock, ms

  Impl(NodeConfig given, LoadedRules loaded, Log& out, Nanos no_restart_before)
      : config(std::move(given)),
        log(out),
        control(
            std::move(loaded), [this](const RuleSet& set) { return unsuitable(set, config); }, out,
            wall_clock()),
        budgets(EngineOptions{}.max_waiting * config.caller_percent / 100, kReportsPerSecond),
        certificates(config, out, background),
        access(&out),
        access_control(config, access, out, background),
        clocks(config.max_skew, out),
        restart_not_before(no_restart_before),
        shares(config.peers.size(), TimeShare(kPeerPercent, kPeerBurst)) {
    if (config.threads == 0) config.threads = usable_cores();
    loop.measure_turns();
  }

  ~Impl() noexcept override {
    workers.clear();
    if (pump_soon) loop.forget(*this);
  }

  /// Any thread.
  Nanos wall_clock() const {
    timespec now{};
    clock_gettime(CLOCK_REALTIME, &now);
    return in_nanos(now) + clock_offset();
  }

  static Nanos monotonic() {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return in_nanos(now);
  }

  Nanos clock_offset() const {
    const bool always = config.clock_offset_until == kNever && config.clock_flaps == 0;
    if (config.clock_offset == 0 || always) return config.clock_offset;
    const Nanos now = monotonic();
    const bool on = config.clock_flaps == 0 || now / config.clock_flaps % 2 == 0;
    return on && now < config.clock_offset_until ? config.clock_offset : 0;
  }

  // The start.

  bool start(std::string& error) {
    error = unsuitable(*control.rules(), config);
    if (!error.empty()) return false;
    if (error = certificates.error(); !error.empty()) return false;
    if (error = access_control.error(); !error.empty()) return false;
    std::signal(SIGPIPE, SIG_IGN);
    std::signal(SIGXFSZ,
                SIG_IGN);  // a file that may not grow is the store's failure, as a full disk
    if (config.storage) {
      store = storage::make_lmdb_store(lmdb_options(config));
    }
    make_engine();
    if (!engine->start(wall_clock(), store_events(), error)) return false;
    make_coordinator();
    if (!start_peers(error) || !start_fronts(error)) {
      workers.clear();
      engine->stop(wall_clock());
      return false;
    }
    start_timers();
    for (const std::string& file : readable_secrets(config)) {
      log.warn("secret_readable_by_all", {{"file", file}});
    }
    log.info("started", {{"version", kVersion},
                         {"region", config.self.region},
                         {"node", config.self.node},
                         {"incarnation", crdt::to_string(engine->replica().incarnation())},
                         {"cells", engine->replica().cell_count()},
                         {"threads", config.threads},
                         {"peers", peers ? peers->port() : 0}});
    for (const ListenConfig& listen : config.fronts) {
      log.info("listening", {{"front", listen.front}, {"address", listen.address}});
    }
    warn_of_listeners(config, *access.table(), log);
    return true;
  }

  void make_engine() {
    EngineEvents events;
    events.send = [this](crdt::PeerIndex peer, const crdt::Message& message) {
      if (peers) peers->send(peer, message);
    };
    events.reincarnated = [this](const crdt::Incarnation& fresh) {
      log.warn("reincarnated", {{"incarnation", crdt::to_string(fresh)}});
      if (peers) peers->set_incarnation(fresh);
    };
    events.step = [this](std::string_view what) { loop.meter()->step(what); };
    events.log = [this](const std::string& event, const std::string& detail) {
      const bool good = event == "storage_recovered" || event == "series_room";
      log.write(good ? LogLevel::info : LogLevel::error, event, {{"detail", detail}});
    };
    engine = std::make_unique<Engine>(engine_options(config, control.rules()), store.get(),
                                      std::move(events));
  }

  void make_coordinator() {
    auto wall = [this] { return wall_clock(); };
    coordinator = std::make_unique<Coordinator>(*engine, home_options(config), *this, wall,
                                                [this] { pump_at_end_of_turn(); });
    coordinator->rules_changed(*control.rules());
  }

  storage::StoreEvents store_events() {
    storage::StoreEvents events;
    events.committed = [this](crdt::WriteId upto) {
      loop.post([this, upto] {
        Turn turn(loop.meter(), "commit");
        if (!closed) engine->committed(upto, wall_clock());
      });
    };
    events.failed = [this](const std::string& reason) {
      loop.post([this, reason] {
        Turn turn(loop.meter(), "store_failed");
        if (!closed) engine->store_failed(reason, wall_clock());
      });
    };
    events.opened = [this](std::shared_ptr<storage::Recovered> recovered) {
      loop.post([this, recovered = std::move(recovered)] {
        Turn turn(loop.meter(), "store_opened");
        if (!closed) engine->store_opened(recovered, wall_clock());
      });
    };
    return events;
  }

  bool start_peers(std::string& error) {
    if (config.peers.empty()) return true;
    rpc::PeerOptions options;
    options.self = config.self;
    options.incarnation = engine->replica().incarnation();
    options.cluster = config.cluster;
    options.secret = config.secret;
    options.previous_secret = config.previous_secret;
    options.tls = certificates.of("peers");
    options.listen = config.listen_peers;
    options.wall = [this] { return wall_clock(); };
    for (const PeerConfig& peer : config.peers) {
      options.peers.push_back({peer.member, peer.address, peer.certificate});
    }
    peers = std::make_unique<rpc::PeerNetwork>(loop, std::move(options), *this);
    if (peers->start(error)) return true;
    error = "listen.peers: " + error;
    return false;
  }

  bool start_fronts(std::string& error) {
    auto wall = [this] { return wall_clock(); };
    report = std::make_unique<NodeReport>(NodeReport::Sources{
        config, *engine, *coordinator, control, store.get(), peers.get(), clocks, wall,
        config.threads, *loop.meter(), background, config.tls.empty() ? nullptr : &certificates,
        access, access_control, budgets});
    answers.rules = [this](std::string_view known) { return control.answer(known); };
    answers.status = [this](std::function<void(std::string)> done) {
      Turn turn(loop.meter(), "status");
      report->status_json(std::move(done));
    };
    shared = std::make_unique<Worker::Shared>(Worker::Shared{
        config, loop, *engine, *coordinator, budgets, answers, wall, others, certificates, access});
    for (unsigned i = 0; i < config.threads; ++i) {
      workers.push_back(std::make_unique<Worker>(*shared));
    }
    return std::all_of(config.fronts.begin(), config.fronts.end(), [&](ListenConfig& listen) {
      if (start_front(listen, error)) return true;
      error = "listen." + listen.front + ": " + error;
      return false;
    });
  }

  /// On every worker, or on the main loop.
  bool start_front(ListenConfig& listen, std::string& error) {
    std::shared_ptr<void> among;
    if (place_of(listen.front) == FrontPlace::main_loop) {
      fronts.push_back(make_front(
          listen.front, {loop, config, nullptr, report.get(), [this] { return wall_clock(); },
                         among, certificates.of(listen.front), &access}));
      if (!fronts.back()->start(listen.address, rpc::Sharing::alone, error)) return false;
      listen.address = rpc::with_port(listen.address, fronts.back()->port());
      return true;
    }
    // The first one finds out whether the address is free, and which port it is.
    auto sharing = workers.size() == 1 ? rpc::Sharing::alone : rpc::Sharing::first;
    for (const auto& worker : workers) {
      if (!worker->start_front(listen, sharing, among, error)) return false;
      sharing = rpc::Sharing::further;
    }
    return true;
  }

  void start_timers() {
    pump_timer = std::make_unique<UvHandle<uv_timer_t>>();
    uv_timer_init(loop.uv(), pump_timer->get());
    pump_timer->get()->data = this;
    const auto interval =
        static_cast<std::uint64_t>(std::max<Nanos>(1, config.commit_interval / kMillisecond));
    pump_in(interval, interval);
    watch =
        std::make_unique<RulesWatch>(loop.uv(), config.rules, RulesWatchOptions{},
                                     [this](LoadedRules loaded) { take_rules(std::move(loaded)); });
    for (int number : {SIGTERM, SIGINT, SIGHUP}) {
      auto handle = std::make_unique<UvHandle<uv_signal_t>>();
      uv_signal_init(loop.uv(), handle->get());
      handle->get()->data = this;
      uv_signal_start(
          handle->get(),
          [](uv_signal_t* signal, int received) {
            auto* self = static_cast<Impl*>(signal->data);
            received == SIGHUP ? self->reread() : self->told_to_stop();
          },
          number);
      signals.push_back(std::move(handle));
    }
  }

  void reread() {
    audit(log, "signal", "SIGHUP", "reread", "done");
    if (watch) watch->reread();
    certificates.reread();
    access_control.reread();
  }

  /// Prepared beside the loop, in the order in which they were read.
  void take_rules(LoadedRules loaded) {
    struct Read {
      LoadedRules loaded;
      std::shared_ptr<PreparedRules> prepared;
    };
    auto read = std::make_shared<Read>(Read{std::move(loaded), nullptr});
    background.run(
        [this, read] {
          if (read->loaded.rules != nullptr) read->prepared = engine->prepare(read->loaded.rules);
        },
        [this, read] { bring_into_force(std::move(read->loaded), std::move(read->prepared)); });
  }

  void bring_into_force(LoadedRules loaded, std::shared_ptr<PreparedRules> prepared) {
    if (stopping) return;
    Turn turn(loop.meter(), "reload");
    const std::uint64_t reloads = control.status().reloads;
    const std::uint64_t refusals = control.status().refused;
    control.take(std::move(loaded), wall_clock(), [&](const std::shared_ptr<const RuleSet>& rules) {
      engine->reload(std::move(prepared));
      coordinator->rules_changed(*rules);
    });
    const RulesStatus& now = control.status();
    if (now.reloads != reloads) {
      audit(log, "file", config.rules, "rules", "done: version " + now.version);
    } else if (now.refused != refusals) {
      audit(log, "file", config.rules, "rules", "refused: " + now.last_error);
    }
  }

  /// The first time, and from then on, in milliseconds.
  void pump_in(std::uint64_t first, std::uint64_t each) {
    uv_timer_start(
        pump_timer->get(), [](uv_timer_t* timer) { static_cast<Impl*>(timer->data)->pump(); },
        first, each);
  }

  void pump() {
    if (closed) return;
    Turn turn(loop.meter(), "tick");
    engine->pump(wall_clock());
    if (engine->clock_set_back() && !stopping && monotonic() >= restart_not_before) {
      set_back = !leaving;
      return stop();
    }
    look_at_links();
    look_at_conditions();
    certificates.look(wall_clock());
    access_control.look(wall_clock());
    loop.meter()->step("forward");
    coordinator->pump();
    if (engine->ready_for_more()) {
      for (auto& held : std::exchange(held_peers, {})) held->fulfill();
    }
    // In a turn of its own: others come in between.
    if (engine->has_more() && pump_timer) pump_in(1, uv_timer_get_repeat(pump_timer->get()));
    if (stopping) close_once_told();
  }

  /// Every second: what peers' links say of clocks and names.
  void look_at_links() {
    const Nanos wall = wall_clock();
    if (std::abs(wall - links_looked_at) < kSecond) return;
    links_looked_at = wall;
    others.tell(monotonic());
    std::vector<ClockWatch::Peer> seen;
    two_of_name.resize(config.peers.size());
    std::string who_sees;
    for (crdt::PeerIndex i = 0; i < config.peers.size(); ++i) {
      const rpc::LinkStatus link = peers->status(i);
      const std::string name = peer_name(config.peers[i].member);
      seen.push_back({name, link.skew, link.skew_error});
      if (link.sees_namesake) who_sees = name;
      if (two_of_name[i] == link.two_of_name) continue;
      two_of_name[i] = link.two_of_name;
      if (link.two_of_name) log.warn("two_of_one_name", {{"member", name}});
    }
    // Its time stands still until it may start again.
    const Nanos wait = restart_not_before - monotonic();
    const bool waits = engine->clock_set_back() && wait > 0;
    clocks.look(wall, seen, waits ? std::optional(wait) : std::nullopt);
    if (!namesake && !who_sees.empty()) {
      log.warn("two_of_one_name", {{"member", peer_name(config.self)}, {"seen_by", who_sees}});
    }
    namesake = !who_sees.empty();
  }

  /// Every half second: whether requests may be sent here, for fronts that tell.
  void look_at_conditions() {
    const Nanos now = monotonic();
    if (now - conditions_looked_at < kSecond / 2) return;
    conditions_looked_at = now;
    const std::vector<Condition> all = report->conditions();
    coordinator->state().ready =
        std::all_of(all.begin(), all.end(), [](const Condition& one) { return one.ready; });
  }

  /// Someone waits for a commit: pump at the end of this turn, not at the next interval.
  void pump_at_end_of_turn() {
    if (pump_soon) return;
    pump_soon = true;
    loop.flush_later(*this);
  }

  void flush() noexcept override {
    pump_soon = false;
    pump();
  }

  // The end: it is not ready, then has clients go, then decides nothing more, and closes.

  void told_to_stop() {
    if (leaving) return stop_at_once();
    leaving = true;
    coordinator->state().leaving = true;
    set_back = false;  // if it stops for its clock already, it does not start again
    if (stopping) return;
    if (config.drain == 0) return stop();
    log.info("draining", {{"drain_ms", config.drain / kMillisecond}});
    go_on_after(static_cast<std::uint64_t>(config.drain / kMillisecond), [this] { let_go(); });
  }

  void go_on_after(std::uint64_t ms, std::function<void()> stage) {
    next_stage = std::move(stage);
    if (!stage_timer) {
      stage_timer = std::make_unique<UvHandle<uv_timer_t>>();
      uv_timer_init(loop.uv(), stage_timer->get());
      stage_timer->get()->data = this;
    }
    uv_timer_start(
        stage_timer->get(),
        [](uv_timer_t* timer) {
          auto* self = static_cast<Impl*>(timer->data);
          std::exchange(self->next_stage, nullptr)();
        },
        ms, 0);
  }

  void let_go() {
    if (stopping) return;
    for (const auto& worker : workers) worker->drain();
    go_on_after(kLetGoMs, [this] { stop(); });
  }

  /// Told again: what is left of the drain, and of the time for peers, is not waited for.
  void stop_at_once() {
    log.warn("stopping_at_once");
    signals.clear();  // the next one ends the process, however long the disk takes
    stop();
    if (!closed) close();
  }

  /// Peers get what they have not seen, and the rights that are left here, so that neither lies
  /// idle meanwhile.
  void stop() {
    if (stopping) return;
    Turn turn(loop.meter(), "stop");
    log.info("stopping");
    stopping = true;
    coordinator->state().stopping = true;
    watch.reset();
    // Once each has seen it, nothing is decided any more.
    for (const auto& worker : workers) worker->drain();
    hand_over_until = uv_now(loop.uv()) + kHandOverMs;
    const std::size_t windows = engine->hand_over(wall_clock());
    if (windows > 0) log.info("rights_handed_over", {{"windows", windows}});
    close_once_told();
  }

  void close_once_told() {
    if (engine->handed_over()) return close();
    if (uv_now(loop.uv()) < hand_over_until) return;
    std::string names;
    for (const crdt::PeerStatus& peer : engine->replica().peers()) {
      if (!peer.incarnation || peer.unacked == 0) continue;
      names.append(names.empty() ? "" : ", ").append(peer_name(peer.member));
    }
    log.warn("last_counts_unacknowledged", {{"peers", names}});
    close();
  }

  void close() {
    closed = true;
    engine->stop(wall_clock());
    go_on_after(kFarewellMs, [this] { end(); });
  }

  void end() {
    for (const auto& worker : workers) worker->stop();
    for (const auto& front : fronts) front->stop();
    if (peers) peers->stop();
    loop.stop();
  }

  void run() {
    const KjLog kj_log(others);
    loop.run();
    signals.clear();
    pump_timer.reset();
    stage_timer.reset();
    log.info("stopped");
  }

  // Peers.

  void peer_up(crdt::PeerIndex peer, const crdt::Incarnation& incarnation) override {
    Turn turn(loop.meter(), "peer_up");
    log.info("peer_up", {{"peer", peer_name(config.peers[peer].member)},
                         {"incarnation", crdt::to_string(incarnation)}});
    if (!closed) engine->peer_up(peer, incarnation, wall_clock());
  }

  void peer_down(crdt::PeerIndex peer) override {
    Turn turn(loop.meter(), "peer_down");
    log.warn("peer_down", {{"peer", peer_name(config.peers[peer].member)},
                           {"reason", peers ? peers->status(peer).last_error : ""}});
    if (!closed) engine->peer_down(peer);
  }

  kj::Promise<void> receive(crdt::PeerIndex peer, const crdt::Incarnation& from,
                            crdt::Message message) override {
    if (closed) return kj::READY_NOW;
    const auto cpu = rpc::system_turn_clocks().cpu;
    const Nanos began = cpu();
    engine->receive(peer, from, message, wall_clock());
    const Nanos now = monotonic();
    const Nanos wait = shares[peer].charge(cpu() - began, now);
    if (wait == 0) return once_ready();
    others.warn(now, "peer_slowed",
                {{"peer", peer_name(config.peers[peer].member)}, {"wait_ms", wait / kMillisecond}});
    return loop.timer().afterDelay(wait * kj::NANOSECONDS).then([this] { return once_ready(); });
  }

  /// A message is answered, which lets its sender send another.
  kj::Promise<void> once_ready() {
    if (closed || engine->ready_for_more()) return kj::READY_NOW;
    auto held = kj::newPromiseAndFulfiller<void>();
    held_peers.push_back(kj::mv(held.fulfiller));
    return kj::mv(held.promise);
  }

  void refused(const std::string& who, const std::string& why) override {
    others.warn(monotonic(), "peer_refused", {{"who", who}, {"why", why}});
  }

  void serve(crdt::PeerIndex, std::vector<rpc::CheckItem> items,
             std::function<void(std::vector<Reply>)> done) override {
    Turn turn(loop.meter(), "serve");
    coordinator->serve(items, std::move(done));
  }
  void serve_reserve(crdt::PeerIndex, rpc::CheckItem item, Nanos timeout,
                     std::function<void(ReserveReply)> done) override {
    Turn turn(loop.meter(), "serve");
    coordinator->serve_reserve(item, timeout, std::move(done));
  }
  void serve_settle(crdt::PeerIndex, std::string ticket, std::uint64_t hits,
                    std::function<void(SettleReply)> done) override {
    Turn turn(loop.meter(), "serve");
    coordinator->serve_settle(ticket, hits, std::move(done));
  }

  // What the coordinator asks other members. The first one is this node itself.

  bool askable(std::size_t member) override {
    return peers->askable(static_cast<crdt::PeerIndex>(member - 1));
  }
  void ask(std::size_t member, rpc::CheckItem item, Nanos patience,
           std::function<void(Reply)> done) override {
    peers->ask(static_cast<crdt::PeerIndex>(member - 1), std::move(item), patience,
               std::move(done));
  }
  void ask_reserve(std::size_t member, rpc::CheckItem item, Nanos timeout, Nanos patience,
                   std::function<void(ReserveReply)> done) override {
    peers->ask_reserve(static_cast<crdt::PeerIndex>(member - 1), std::move(item), timeout, patience,
                       std::move(done));
  }
  void ask_settle(std::size_t member, std::string ticket, std::uint64_t hits, Nanos patience,
                  std::function<void(SettleReply)> done) override {
    peers->ask_settle(static_cast<crdt::PeerIndex>(member - 1), std::move(ticket), hits, patience,
                      std::move(done));
  }
};

Daemon::Daemon(NodeConfig config, LoadedRules rules, Log& log, Nanos no_restart_before)
    : impl_(std::make_unique<Impl>(std::move(config), std::move(rules), log, no_restart_before)) {}

Daemon::~Daemon() = default;

bool Daemon::start(std::string& error) {
  return impl_->start(error);
}

void Daemon::run() {
  impl_->run();
}

bool Daemon::set_back() const {
  return impl_->set_back;
}

LoadedRules Daemon::rules() const {
  LoadedRules loaded;
  loaded.rules = impl_->control.rules();
  loaded.version = impl_->control.status().version;
  return loaded;
}

const NodeConfig& Daemon::config() const {
  return impl_->config;
}

}  // namespace weir::node
