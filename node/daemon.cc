#include <weir/node/daemon.h>

#include <fmt/format.h>
#include <kj/async.h>
#include <sodium.h>
#include <uv.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <map>
#include <utility>
#include <vector>

#include <weir/limits/rules/rules_text.h>
#include <weir/limits/rules/rules_yaml.h>
#include <weir/node/control/rules_watch.h>
#include <weir/node/engine/engine.h>
#include <weir/node/fronts/admin/metrics.h>
#include <weir/node/fronts/capnp/service.h>
#include <weir/node/fronts/http/http_front.h>
#include <weir/node/service/home.h>
#include <weir/node/version.h>
#include <weir/rpc/client/node_client.h>
#include <weir/rpc/net/event_loop.h>
#include <weir/rpc/peers/peers.h>
#include <weir/storage/store.h>

namespace weir::node {
namespace {

/// Above this, status leaves out what would have to be summed over every cell.
constexpr std::size_t kMaxSummedCells = 100'000;
/// A stop waits so long for peers to take rights over.
constexpr std::uint64_t kHandOverMs = 1000;
/// Time for the last answers to leave before connections close.
constexpr std::uint64_t kFarewellMs = 50;
/// Mistakes of a refused file that are logged.
constexpr std::ptrdiff_t kMaxReasons = 20;

crdt::Incarnation random_incarnation() {
  crdt::Incarnation id;
  randombytes_buf(&id, sizeof id);
  return id;
}

/// Series ids depend on the cluster's secret, and on its name where there is none.
HashKey hash_key(const NodeConfig& config) {
  HashKey key{};
  const std::string& secret = config.secret.empty() ? config.cluster : config.secret;
  constexpr std::string_view kPurpose = "weir series ids";
  crypto_generichash_state state;
  crypto_generichash_init(&state, nullptr, 0, key.size());
  auto add = [&state](std::string_view text) {
    crypto_generichash_update(&state, reinterpret_cast<const unsigned char*>(text.data()),
                              text.size());
  };
  add(kPurpose);
  add(secret);
  crypto_generichash_final(&state, key.data(), key.size());
  return key;
}

std::string peer_name(const crdt::Member& member) {
  return member.region + "/" + member.node;
}

/// A uv handle that its owner closes; the memory goes when libuv is done with it.
template <typename Handle>
class UvHandle {
 public:
  UvHandle() : handle_(new Handle{}) {}
  ~UvHandle() {
    uv_close(reinterpret_cast<uv_handle_t*>(handle_),
             [](uv_handle_t* closed) { delete reinterpret_cast<Handle*>(closed); });
  }
  UvHandle(const UvHandle&) = delete;
  UvHandle& operator=(const UvHandle&) = delete;
  Handle* get() { return handle_; }

 private:
  Handle* handle_;
};

}  // namespace

struct Daemon::Impl final : rpc::PeerHandler,
                            rpc::ServiceHandler,
                            HttpHandler,
                            HomeDriver,
                            rpc::Flushable {
  NodeConfig config;
  std::shared_ptr<const RuleSet> rules;
  Log& log;
  rpc::EventLoop loop;
  std::unique_ptr<storage::Store> store;
  std::unique_ptr<Engine> engine;
  std::unique_ptr<HomeDesk> home;                    // null: no rule needed it yet
  bool has_homes = false;                            // some rule in force has one
  bool has_rights = false;                           // some rule in force is an escrow rule
  std::vector<std::unique_ptr<rpc::Client>> others;  // by peer, null: no address; for forwarding
  std::unique_ptr<rpc::PeerNetwork> peers;
  std::unique_ptr<rpc::ServiceServer> service;
  std::unique_ptr<HttpFront> http;
  std::unique_ptr<UvHandle<uv_timer_t>> pump_timer;
  std::unique_ptr<UvHandle<uv_timer_t>> farewell;
  std::vector<std::unique_ptr<UvHandle<uv_signal_t>>> signals;
  bool pump_soon = false;
  bool stopping = false;              // nothing is decided any more
  bool closed = false;                // the engine is
  std::uint64_t hand_over_until = 0;  // on libuv's clock, ms
  Nanos started_at = wall_clock();
  std::vector<kj::Own<kj::PromiseFulfiller<void>>> held_peers;
  struct RulesFile {
    std::string version;
    Nanos since = 0;
    std::uint64_t reloads = 0;
    std::uint64_t refused = 0;
    std::string last_error;  // of the file as it is, if that was refused
    Nanos refused_at = 0;
  };
  RulesFile rules_file;
  std::unique_ptr<RulesWatch> watch;
  std::shared_ptr<const RuleSet> told_rules;  // of which told_yaml is the text
  std::string told_yaml;

  Impl(NodeConfig given, LoadedRules loaded, Log& out)
      : config(std::move(given)), rules(loaded.rules), log(out) {
    rules_file.version = std::move(loaded.version);
  }

  ~Impl() noexcept override {
    if (pump_soon) loop.forget(*this);
  }

  Nanos wall_clock() const {
    timespec now{};
    clock_gettime(CLOCK_REALTIME, &now);
    return static_cast<Nanos>(now.tv_sec) * kSecond + now.tv_nsec + config.clock_offset;
  }

  /// What only this node knows to be wrong with rules.
  bool suits(const RuleSet& set, std::string& error) const {
    for (const Rule& rule : set.rules()) {
      // Rights that are kept in memory end with it: no more of them are spent than there are.
      bool in_memory =
          rule.durability == Durability::async ||
          (rule.enforcement == Enforcement::escrow && rule.durability == Durability::reserve);
      if (!config.storage && !in_memory) {
        error = fmt::format("rule \"{}\" wants {}, but storage is none", rule.name,
                            rule.enforcement == Enforcement::home
                                ? "enforcement: home, which is durable"
                                : fmt::format("durability: {}", to_string(rule.durability)));
        return false;
      }
    }
    const std::vector<ConfigError> missing = missing_for(set, config);
    if (!missing.empty()) error = missing.front().to_string();
    return missing.empty();
  }

  bool start(std::string& error) {
    if (!suits(*rules, error)) return false;
    if (config.storage) {
      storage::LmdbOptions options;
      options.path = config.storage->path;
      options.cluster = config.cluster;
      options.self = config.self;
      options.map_bytes = config.storage->map_size;
      store = storage::make_lmdb_store(std::move(options));
    }
    make_engine();
    if (!engine->start(wall_clock(), store_events(), error)) return false;
    make_home();
    if (!start_peers(error) || !start_service(error) || !start_http(error)) {
      engine->stop(wall_clock());
      return false;
    }
    start_timers();
    log.info("started", {{"version", kVersion},
                         {"region", config.self.region},
                         {"node", config.self.node},
                         {"incarnation", crdt::to_string(engine->replica().incarnation())},
                         {"cells", engine->replica().cell_count()},
                         {"peers", config.peers.empty() ? 0 : peers->port()},
                         {"clients", service->port()},
                         {"http", http->port()}});
    return true;
  }

  void make_engine() {
    EngineOptions options;
    options.replica.self = config.self;
    options.shareholders.push_back({config.self, config.weights});
    for (const PeerConfig& peer : config.peers) {
      options.replica.peers.push_back(peer.member);
      options.shareholders.push_back({peer.member, peer.weights});
    }
    options.replica.sync_interval = config.sync_interval;
    options.replica.anti_entropy_interval = config.anti_entropy_interval;
    options.replica.max_skew = config.max_skew;
    randombytes_buf(&options.replica.seed, sizeof options.replica.seed);
    options.rules = rules;
    options.hash_key = hash_key(config);
    options.max_series = config.max_series;
    options.populate = config.populate;
    options.max_request_ids = config.max_request_ids;
    options.request_id_ttl = config.request_id_ttl;
    options.max_tickets = config.max_tickets;
    options.max_commit_wait = config.max_commit_wait;
    options.fresh_incarnation = random_incarnation;
    EngineEvents events;
    events.send = [this](crdt::PeerIndex peer, const crdt::Message& message) {
      if (peers) peers->send(peer, message);
    };
    events.reincarnated = [this](const crdt::Incarnation& fresh) {
      log.warn("reincarnated", {{"incarnation", crdt::to_string(fresh)}});
      if (peers) peers->set_incarnation(fresh);
    };
    events.log = [this](const std::string& event, const std::string& detail) {
      log.error(event, {{"detail", detail}});
    };
    engine = std::make_unique<Engine>(std::move(options), store.get(), std::move(events));
  }

  /// For the rules in force. What was made once stays: requests may be on their way.
  void make_home() {
    const std::vector<Rule>& all = rules->rules();
    has_homes = std::any_of(all.begin(), all.end(),
                            [](const Rule& rule) { return rule.enforcement == Enforcement::home; });
    bool has_scarce = false;
    has_rights = false;
    for (const Rule& rule : all) {
      if (rule.enforcement != Enforcement::escrow) continue;
      has_rights = true;
      has_scarce |= engine->escrow().scarce(rule);
    }
    if ((!has_homes && !has_scarce) || home) return;
    HomeOptions options;
    options.members.push_back(config.self);
    options.weights = config.home.weights;
    options.deadline = config.home.deadline;
    options.request_id_ttl = config.request_id_ttl;
    for (const PeerConfig& peer : config.peers) {
      options.members.push_back(peer.member);
      if (peer.client.empty()) {
        others.push_back(nullptr);
        continue;
      }
      rpc::ClientOptions client;
      client.address = peer.client;
      client.deadline = config.home.deadline;
      client.backoff_max = kSecond;
      client.breaker_max = 10 * kSecond;
      others.push_back(std::make_unique<rpc::Client>(std::move(client)));
    }
    home = std::make_unique<HomeDesk>(*engine, std::move(options), *this);
  }

  storage::StoreEvents store_events() {
    storage::StoreEvents events;
    events.committed = [this](crdt::WriteId upto) {
      loop.post([this, upto] {
        if (!closed) engine->committed(upto, wall_clock());
      });
    };
    events.failed = [this](const std::string& reason) {
      loop.post([this, reason] {
        if (!closed) engine->store_failed(reason, wall_clock());
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
    options.listen = config.listen_peers;
    for (const PeerConfig& peer : config.peers) {
      options.peers.push_back({peer.member, peer.address});
    }
    peers = std::make_unique<rpc::PeerNetwork>(loop, std::move(options), *this);
    if (peers->start(error)) return true;
    error = "listen.peers: " + error;
    return false;
  }

  bool start_service(std::string& error) {
    service = std::make_unique<rpc::ServiceServer>(loop, config.listen_clients, *this);
    if (service->start(error)) return true;
    error = "listen.clients: " + error;
    return false;
  }

  bool start_http(std::string& error) {
    HttpOptions options;
    options.reset = config.http.reset;
    options.max_connections = config.http.max_connections;
    options.max_body = config.http.max_body;
    http = std::make_unique<HttpFront>(loop.uv(), config.listen_http, options, *this);
    if (http->start(error)) return true;
    error = "listen.http: " + error;
    return false;
  }

  void start_timers() {
    std::signal(SIGPIPE, SIG_IGN);
    pump_timer = std::make_unique<UvHandle<uv_timer_t>>();
    uv_timer_init(loop.uv(), pump_timer->get());
    pump_timer->get()->data = this;
    auto interval =
        static_cast<std::uint64_t>(std::max<Nanos>(1, config.commit_interval / kMillisecond));
    uv_timer_start(
        pump_timer->get(), [](uv_timer_t* timer) { static_cast<Impl*>(timer->data)->pump(); },
        interval, interval);
    watch =
        std::make_unique<RulesWatch>(loop.uv(), config.rules, RulesWatchOptions{},
                                     [this](LoadedRules loaded) { take_rules(std::move(loaded)); });
    rules_file.since = wall_clock();
    for (int number : {SIGTERM, SIGINT, SIGHUP}) {
      auto handle = std::make_unique<UvHandle<uv_signal_t>>();
      uv_signal_init(loop.uv(), handle->get());
      handle->get()->data = this;
      uv_signal_start(
          handle->get(),
          [](uv_signal_t* signal, int received) {
            auto* self = static_cast<Impl*>(signal->data);
            received == SIGHUP ? self->watch->reread() : self->stop();
          },
          number);
      signals.push_back(std::move(handle));
    }
  }

  void take_rules(LoadedRules loaded) {
    if (stopping) return;
    std::string error;
    if (loaded.rules == nullptr) {
      error = loaded.errors.empty() ? "unknown" : loaded.errors[0].to_string();
    } else {
      suits(*loaded.rules, error);
    }
    if (!error.empty()) {
      ++rules_file.refused;
      rules_file.last_error = error;
      rules_file.refused_at = wall_clock();
      for (const RuleError& each : loaded.errors) {
        log.error("rules_refused", {{"reason", each.to_string()}});
        if (&each - loaded.errors.data() >= kMaxReasons) break;
      }
      if (loaded.errors.empty()) log.error("rules_refused", {{"reason", error}});
      return;
    }
    rules_file.last_error.clear();
    if (loaded.version == rules_file.version) return;
    rules = loaded.rules;
    engine->reload(rules);
    make_home();
    ++rules_file.reloads;
    rules_file.version = std::move(loaded.version);
    rules_file.since = wall_clock();
    log.info("rules_loaded", {{"version", rules_file.version}, {"rules", rules->rules().size()}});
  }

  void pump() {
    if (closed) return;
    engine->pump(wall_clock());
    if (home) home->pump();
    if (engine->ready_for_more()) {
      for (auto& held : std::exchange(held_peers, {})) held->fulfill();
    }
    if (stopping && (engine->handed_over() || uv_now(loop.uv()) >= hand_over_until)) close();
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

  /// Peers get the rights that are left here, so that these do not lie idle meanwhile.
  void stop() {
    if (stopping) return;
    log.info("stopping");
    stopping = true;
    watch.reset();
    hand_over_until = uv_now(loop.uv()) + kHandOverMs;
    const std::size_t windows = engine->hand_over(wall_clock());
    if (windows == 0) return close();
    log.info("rights_handed_over", {{"windows", windows}});
  }

  void close() {
    closed = true;
    engine->stop(wall_clock());
    farewell = std::make_unique<UvHandle<uv_timer_t>>();
    uv_timer_init(loop.uv(), farewell->get());
    farewell->get()->data = this;
    uv_timer_start(
        farewell->get(),
        [](uv_timer_t* timer) {
          auto* self = static_cast<Impl*>(timer->data);
          self->http->stop();
          self->service->close();
          if (self->peers) self->peers->stop();
          self->loop.stop();
        },
        kFarewellMs, 0);
  }

  void run() {
    loop.run();
    signals.clear();
    pump_timer.reset();
    farewell.reset();
    log.info("stopped");
  }

  // Peers.

  void peer_up(crdt::PeerIndex peer, const crdt::Incarnation& incarnation) override {
    log.info("peer_up", {{"peer", peer_name(config.peers[peer].member)},
                         {"incarnation", crdt::to_string(incarnation)}});
    if (!closed) engine->peer_up(peer, incarnation, wall_clock());
  }

  void peer_down(crdt::PeerIndex peer) override {
    log.warn("peer_down", {{"peer", peer_name(config.peers[peer].member)},
                           {"reason", peers ? peers->status(peer).last_error : ""}});
    if (!closed) engine->peer_down(peer);
  }

  kj::Promise<void> receive(crdt::PeerIndex peer, const crdt::Incarnation& from,
                            crdt::Message message) override {
    if (closed) return kj::READY_NOW;
    engine->receive(peer, from, message, wall_clock());
    if (engine->ready_for_more()) return kj::READY_NOW;
    auto held = kj::newPromiseAndFulfiller<void>();
    held_peers.push_back(kj::mv(held.fulfiller));
    return kj::mv(held.promise);
  }

  void refused(const std::string& who, const std::string& why) override {
    log.warn("peer_refused", {{"who", who}, {"why", why}});
  }

  // Clients.

  /// A commit that was promised can't be kept: the rules' own policy answers.
  bool open_on_failure(const Decision& decision) const {
    return std::none_of(decision.statuses.begin(), decision.statuses.end(),
                        [this](const RuleStatus& status) {
                          const Rule& rule = rules->rules()[status.rule];
                          return !status.shadow && rule.durability != Durability::async &&
                                 rule.on_failure == OnFailure::closed;
                        });
  }

  static constexpr const char* kNotDurable =
      "limiter_unavailable: storage has failed and the rule is on_failure: closed";

  rpc::CheckReply reply_of(const Decision& decision, const Request& request) {
    rpc::CheckReply reply = node::reply_of(decision, *rules);
    for (std::size_t i = 0; request.wants_bound && i < reply.statuses.size(); ++i) {
      reply.statuses[i].over_admission =
          engine->over_admission(decision.statuses[i].rule, wall_clock());
    }
    return reply;
  }

  kj::Promise<void> check(std::span<const Request> requests,
                          std::span<rpc::CheckReply> replies) override {
    if (stopping) {
      for (rpc::CheckReply& reply : replies) reply.error = "unavailable: stopping";
      return kj::READY_NOW;
    }
    Nanos wall = wall_clock();
    Decision decision;
    std::vector<std::pair<std::size_t, bool>> waiting;  // reply, open on failure
    std::shared_ptr<Away> away;
    for (std::size_t i = 0; i < requests.size(); ++i) {
      replies[i].error = engine->shed(requests[i], wall);
      if (!replies[i].error.empty()) continue;
      Request request = requests[i];
      if (!request.only.empty()) {
        replies[i].error = refuse(request);
        if (!replies[i].error.empty()) continue;
        request.demand_noted = true;
      } else if (is_away(requests[i])) {
        if (!away) away = std::make_shared<Away>();
        decide_away(requests[i], i, away);
        continue;
      }
      engine->check(request, wall, decision);
      if (lacks_rights(decision)) {
        if (!away) away = std::make_shared<Away>();
        if (pass_on(requests[i], decision, i, away)) continue;
      }
      replies[i] = reply_of(decision, requests[i]);
      if (decision.wants_commit) waiting.emplace_back(i, open_on_failure(decision));
    }
    if (!away) return here(replies, std::move(waiting));
    return here(replies, std::move(waiting)).then([replies, away] {
      return all_of(away).then([replies, away] {
        for (auto& [index, reply] : away->replies) replies[index] = std::move(reply);
      });
    });
  }

  /// Some of its rules are decided by another node.
  bool is_away(const Request& request) {
    if (!home) return false;
    return (has_homes && home->concerns(request)) || home->knows(request);
  }

  /// Others may have what is missing here.
  bool lacks_rights(const Decision& decision) const {
    return home && !decision.allowed &&
           std::any_of(decision.statuses.begin(), decision.statuses.end(),
                       [](const RuleStatus& status) { return status.elsewhere; });
  }

  /// What is decided elsewhere of one call, and who waits for it.
  struct Away {
    std::size_t open = 0;
    std::vector<std::pair<std::size_t, rpc::CheckReply>> replies;  // by index in the call
    kj::Maybe<kj::Own<kj::PromiseFulfiller<void>>> done;
  };

  void decide_away(const Request& request, std::size_t index, const std::shared_ptr<Away>& away) {
    ++away->open;
    home->decide(item_of(request), answer_of(index, away));
  }
  bool pass_on(const Request& request, const Decision& denied, std::size_t index,
               const std::shared_ptr<Away>& away) {
    ++away->open;
    const bool passed = home->pass_on(request, denied, answer_of(index, away));
    if (!passed) --away->open;
    return passed;
  }
  static std::function<void(rpc::CheckReply)> answer_of(std::size_t index,
                                                        const std::shared_ptr<Away>& away) {
    return [index, away](rpc::CheckReply reply) {
      away->replies.emplace_back(index, std::move(reply));
      if (--away->open > 0) return;
      KJ_IF_MAYBE (done, away->done) {
        (*done)->fulfill();
      }
    };
  }

  static kj::Promise<void> all_of(const std::shared_ptr<Away>& away) {
    if (away->open == 0) return kj::READY_NOW;
    auto paf = kj::newPromiseAndFulfiller<void>();
    away->done = kj::mv(paf.fulfiller);
    return kj::mv(paf.promise);
  }

  /// Why this node does not decide what another one forwarded. Empty: it does.
  std::string refuse(const Request& request) {
    return home ? home->refuse(request) : "unavailable: no rule is decided for other nodes here";
  }

  kj::Promise<void> here(std::span<rpc::CheckReply> replies,
                         std::vector<std::pair<std::size_t, bool>> waiting) {
    if (waiting.empty()) return kj::READY_NOW;
    return durable(waiting.size()).then([replies, waiting = std::move(waiting)](bool yes) {
      if (yes) return;
      for (auto [index, open] : waiting) not_durable(replies[index], open);
    });
  }

  /// Once everything decided so far is durable (true) or can no longer become so.
  kj::Promise<bool> durable(std::size_t requests = 1) {
    auto durable = kj::newPromiseAndFulfiller<bool>();
    auto fulfiller =
        std::make_shared<kj::Own<kj::PromiseFulfiller<bool>>>(kj::mv(durable.fulfiller));
    engine->when_durable([fulfiller](bool yes) { (*fulfiller)->fulfill(kj::cp(yes)); }, requests);
    pump_at_end_of_turn();
    return kj::mv(durable.promise);
  }

  static void not_durable(rpc::CheckReply& reply, bool open) {
    if (!open) {
      reply = {};
      reply.error = kNotDurable;
      return;
    }
    for (rpc::CheckStatus& status : reply.statuses) status.degraded = true;
  }

  kj::Promise<void> reserve(const Request& request, Nanos timeout,
                            rpc::ReserveReply& reply) override {
    if (stopping) {
      reply.decision.error = "unavailable: stopping";
      return kj::READY_NOW;
    }
    reply.decision.error = engine->shed(request, wall_clock());
    if (reply.decision.error.empty()) {
      reply.decision.error = !request.only.empty() ? refuse(request) : reserved_elsewhere(request);
    }
    if (!reply.decision.error.empty()) return kj::READY_NOW;
    Request here = request;
    here.demand_noted = !request.only.empty();
    Decision decision;
    Ticket ticket = engine->reserve(here, wall_clock(), timeout, decision);
    reply.decision = reply_of(decision, request);
    reply.ticket = engine->ticket_name(ticket);
    // What is held is not durable; without a ticket it was counted, as by a check.
    if (!decision.wants_commit) return kj::READY_NOW;
    return durable().then([&reply, open = open_on_failure(decision)](bool yes) {
      if (!yes) not_durable(reply.decision, open);
    });
  }

  kj::Promise<void> lease(const Request& request, const LeaseTerms& terms,
                          rpc::LeaseReply& reply) override {
    if (stopping) {
      reply.decision.error = "unavailable: stopping";
      return kj::READY_NOW;
    }
    reply.decision.error = engine->shed(request, wall_clock());
    if (!reply.decision.error.empty()) return kj::READY_NOW;
    if (is_away(request)) {
      auto away = std::make_shared<Away>();
      decide_away(request, 0, away);
      return all_of(away).then(
          [&reply, away] { reply.decision = std::move(away->replies[0].second); });
    }
    Decision decision;
    Lease lease = engine->lease(request, terms, wall_clock(), decision);
    if (lacks_rights(decision)) {
      auto away = std::make_shared<Away>();
      if (pass_on(request, decision, 0, away)) {
        return all_of(away).then(
            [&reply, away] { reply.decision = std::move(away->replies[0].second); });
      }
    }
    reply.decision = reply_of(decision, request);
    reply.ticket = engine->ticket_name(lease.ticket);
    reply.hits = lease.hits;
    reply.term = lease.term;
    if (!decision.wants_commit) return kj::READY_NOW;
    return durable().then([&reply, open = open_on_failure(decision)](bool yes) {
      if (!yes) not_durable(reply.decision, open);
    });
  }

  kj::Promise<void> settle(std::string_view ticket, std::uint64_t hits,
                           rpc::SettleReply& reply) override {
    if (stopping) {
      reply.error = "unavailable: stopping";
      return kj::READY_NOW;
    }
    Settled settled = engine->settle(engine->ticket_named(ticket), hits, wall_clock());
    reply.settled = settled.known;
    reply.reserved = settled.hits;
    reply.lapsed = settled.lapsed;
    if (!settled.wants_commit) return kj::READY_NOW;
    return durable().then([&reply](bool yes) { reply.degraded = !yes; });
  }

  void check(const Request& request, std::function<void(const HttpAnswer&)> done) override {
    HttpAnswer shed;
    shed.error = engine->shed(request, wall_clock());
    if (!shed.error.empty()) {
      done(shed);
      return;
    }
    if (!stopping && is_away(request)) {
      home->decide(item_of(request), told_over_http(request, std::move(done)));
      return;
    }
    decide(request, done, [&](Nanos wall, Decision& decision, HttpAnswer&) {
      engine->check(request, wall, decision);
      return lacks_rights(decision) &&
             home->pass_on(request, decision, told_over_http(request, done));
    });
  }

  std::function<void(rpc::CheckReply)> told_over_http(const Request& request,
                                                      std::function<void(const HttpAnswer&)> done) {
    return [this, domain = std::string(request.domain), done = std::move(done)](
               const rpc::CheckReply& reply) { done(http_answer(reply, domain)); };
  }

  void reserve(const Request& request, Nanos timeout,
               std::function<void(const HttpAnswer&)> done) override {
    HttpAnswer refused;
    refused.error = engine->shed(request, wall_clock());
    if (refused.error.empty()) refused.error = reserved_elsewhere(request);
    if (!refused.error.empty()) {
      done(refused);
      return;
    }
    decide(request, std::move(done), [&](Nanos wall, Decision& decision, HttpAnswer& answer) {
      answer.ticket = engine->ticket_name(engine->reserve(request, wall, timeout, decision));
      return false;
    });
  }

  void settle(std::string_view ticket, std::uint64_t hits,
              std::function<void(const HttpSettled&)> done) override {
    HttpSettled answer;
    if (stopping) {
      answer.error = "the node is stopping";
      done(answer);
      return;
    }
    Settled settled = engine->settle(engine->ticket_named(ticket), hits, wall_clock());
    answer.known = settled.known;
    answer.reserved = settled.hits;
    answer.lapsed = settled.lapsed;
    if (!settled.wants_commit) {
      done(answer);
      return;
    }
    engine->when_durable([answer, done = std::move(done)](bool durable) mutable {
      answer.degraded = !durable;
      done(answer);
    });
    pump_at_end_of_turn();
  }

  /// `decide_now` returns true if others are asked, and will call `done`.
  template <typename Decide>
  void decide(const Request& request, std::function<void(const HttpAnswer&)> done,
              Decide decide_now) {
    HttpAnswer answer;
    if (stopping) {
      answer.error = "the node is stopping";
      done(answer);
      return;
    }
    Nanos wall = wall_clock();
    Decision decision;
    if (decide_now(wall, decision, answer)) return;
    fill(answer, decision, request, wall);
    if (!decision.wants_commit) {
      done(answer);
      return;
    }
    bool open = open_on_failure(decision);
    engine->when_durable(
        [answer = std::move(answer), open, done = std::move(done)](bool durable) mutable {
          if (!durable && !open) {
            answer = {};
            answer.error = kNotDurable;
          } else if (!durable) {
            for (HttpStatus& status : answer.statuses) status.degraded = true;
          }
          done(answer);
        });
    pump_at_end_of_turn();
  }

  std::string reserved_elsewhere(const Request& request) {
    std::string where = has_homes ? home->elsewhere(request) : std::string();
    return where.empty() ? where : where + ": reserve there";
  }

  HttpAnswer http_answer(const rpc::CheckReply& reply, const std::string& domain) {
    HttpAnswer answer;
    answer.error = reply.error;
    answer.allowed = reply.allowed;
    answer.deciding = reply.deciding;
    answer.repeated = reply.repeated;
    answer.now = wall_clock();
    for (const rpc::CheckStatus& status : reply.statuses) {
      HttpStatus out;
      out.rule = status.rule;
      out.allowed = status.allowed;
      out.shadow = status.shadow;
      out.degraded = status.degraded;
      out.limit = status.limit;
      out.remaining = status.remaining;
      out.reset = status.reset;
      out.retry_after = status.retry_after;
      out.delay = status.delay;
      out.elsewhere = status.elsewhere;
      for (const Rule& rule : rules->rules()) {
        if (rule.domain != domain || rule.name != status.rule) continue;
        out.quota = rule.limit;
        out.window = rule.calendar ? 0 : rule.window;
      }
      answer.statuses.push_back(std::move(out));
    }
    return answer;
  }

  // Homes. Answers come on the clients' threads.

  Nanos wall() override { return wall_clock(); }

  template <typename Reply>
  std::function<void(Reply)> on_loop(std::function<void(Reply)> done) {
    return [this, done = std::move(done)](Reply reply) {
      loop.post([this, done, reply = std::move(reply)]() mutable {
        if (!stopping) done(std::move(reply));
      });
    };
  }
  bool reachable(std::size_t member) override {
    return others[member - 1] && others[member - 1]->usable();
  }
  static rpc::Client::Deadline after(Nanos patience) {
    return std::chrono::steady_clock::now() + std::chrono::nanoseconds(patience);
  }
  void forward(std::size_t member, rpc::CheckItem item, Nanos patience,
               std::function<void(rpc::CheckReply)> done) override {
    auto on = on_loop(std::move(done));
    others[member - 1]->check_async(
        {std::move(item)},
        [on](std::vector<rpc::CheckReply> replies) { on(std::move(replies.front())); },
        after(patience));
  }
  void forward_reserve(std::size_t member, rpc::CheckItem item, Nanos timeout, Nanos patience,
                       std::function<void(rpc::ReserveReply)> done) override {
    others[member - 1]->reserve_async(std::move(item), timeout, on_loop(std::move(done)),
                                      after(patience));
  }
  void forward_settle(std::size_t member, std::string ticket, std::uint64_t hits,
                      std::function<void(rpc::SettleReply)> done) override {
    others[member - 1]->settle_async(std::move(ticket), hits, on_loop(std::move(done)));
  }
  void when_durable(std::function<void(bool)> done) override {
    engine->when_durable(std::move(done));
    pump_at_end_of_turn();
  }

  void fill(HttpAnswer& answer, const Decision& decision, const Request& request, Nanos wall) {
    answer.allowed = decision.allowed;
    answer.deciding = decision.deciding;
    answer.repeated = decision.repeated;
    answer.now = wall;
    for (const RuleStatus& status : decision.statuses) {
      const Rule& rule = rules->rules()[status.rule];
      HttpStatus out;
      out.rule = rule.name;
      out.allowed = status.allowed;
      out.shadow = status.shadow;
      out.degraded = status.degraded;
      out.elsewhere = status.elsewhere;
      out.limit = status.limit;
      out.remaining = status.remaining;
      out.reset = status.reset;
      out.retry_after = status.retry_after;
      out.delay = status.delay;
      out.quota = rule.limit;
      out.window = rule.calendar ? 0 : rule.window;
      if (request.wants_bound) out.over_admission = engine->over_admission(status.rule, wall);
      answer.statuses.push_back(std::move(out));
    }
  }

  // Operators.

  bool healthy(std::string& why) override {
    EngineStatus status = engine->status();
    if (!config.storage || status.durable) return true;
    why = "storage failed: " + status.storage_failure;
    return false;
  }

  bool ready(std::string& why) override {
    if (!stopping) return true;
    why = "stopping";
    return false;
  }

  static double seconds_since(Nanos then, Nanos now) {
    return static_cast<double>(std::max<Nanos>(0, now - then)) / static_cast<double>(kSecond);
  }

  std::string metrics() override {
    NodeMetrics out;
    Nanos now = engine->clock(wall_clock());
    out.version = kVersion;
    out.cluster = config.cluster;
    out.region = config.self.region;
    out.node = config.self.node;
    out.start_time_seconds = static_cast<double>(started_at) / static_cast<double>(kSecond);
    out.series = engine->limiter().series_count();
    out.max_series = config.max_series;
    out.cells = engine->replica().cell_count();
    out.rules_file = {rules_file.version,
                      static_cast<double>(rules_file.since) / static_cast<double>(kSecond),
                      rules_file.reloads, rules_file.refused, rules_file.last_error.empty()};
    RequestIdCounters ids = engine->limiter().request_ids();
    out.request_ids = {ids.held, ids.repeated, ids.evicted};
    TicketCounters tickets = engine->limiter().tickets();
    out.tickets = {tickets.open, tickets.timed_out, tickets.refused};
    for (std::uint32_t i = 0; i < rules->rules().size(); ++i) {
      const Rule& rule = rules->rules()[i];
      RuleCounters counters = engine->limiter().counters(i);
      out.rules.push_back({rule.domain, rule.name, counters.allowed, counters.denied,
                           counters.degraded, counters.elsewhere, rule.shadow,
                           engine->over_admission(i, wall_clock())});
    }
    std::vector<crdt::PeerStatus> status = engine->replica().peers();
    for (crdt::PeerIndex i = 0; i < status.size(); ++i) {
      PeerMetrics peer;
      peer.peer = peer_name(status[i].member);
      peer.up = static_cast<bool>(status[i].incarnation);
      peer.unacked = status[i].unacked;
      if (status[i].in_step_at != 0) peer.out_of_step = seconds_since(status[i].in_step_at, now);
      peer.dropped_messages = peers->status(i).dropped;
      out.peers.push_back(std::move(peer));
    }
    if (store) {
      storage::StoreCounters counters = store->counters();
      out.storage = StorageMetrics{
          engine->status().durable,
          counters.commits,
          counters.records,
          counters.bytes,
          store->backlog(),
          static_cast<double>(counters.last_commit_time) / static_cast<double>(kSecond),
          engine->status().waiting,
          engine->status().shed};
    }
    if (has_homes) {
      const HomeCounters& homes = home->counters();
      out.home = HomeMetrics{homes.forwarded, homes.served, homes.refused, homes.degraded};
    }
    if (has_rights) {
      const EscrowAgentCounters& rights = engine->escrow().counters();
      out.escrow = EscrowMetrics{engine->escrow().grant_state().open,
                                 engine->escrow().whole(),
                                 rights.requests_sent,
                                 rights.requests_served,
                                 rights.requests_refused,
                                 rights.units_given,
                                 rights.units_received,
                                 rights.versions_differ};
      if (home) {
        const PassedOnCounters& passed = home->passed_on();
        out.escrow->forwarded = passed.requests;
        out.escrow->forwards = passed.asked;
        out.escrow->forwards_admitted = passed.admitted;
        out.escrow->forwards_failed = passed.failed;
        out.escrow->forwards_withheld = passed.withheld;
        out.escrow->forwards_served = passed.served;
      }
    }
    const crdt::ReplicaCounters& replica = engine->replica().counters();
    out.replica = {replica.late_cells, replica.future_cells, replica.invalid_cells, replica.alarms};
    return render_metrics(out);
  }

  kj::Promise<std::string> rules_yaml() override {
    if (told_rules != rules) {
      told_rules = rules;
      told_yaml = rules_text(*rules);
    }
    return told_yaml;
  }

  std::string status_json() override {
    using nlohmann::json;
    Nanos now = engine->clock(wall_clock());
    EngineStatus status = engine->status();
    const crdt::Replica& replica = engine->replica();
    json out{{"version", kVersion},
             {"cluster", config.cluster},
             {"region", config.self.region},
             {"node", config.self.node},
             {"incarnation", crdt::to_string(replica.incarnation())},
             {"uptime_s", seconds_since(started_at, wall_clock())},
             {"now_ns", now},
             {"series", engine->limiter().series_count()},
             {"cells", replica.cell_count()},
             {"digest", fmt::format("{:016x}", replica.digest())},
             {"holding", status.holding},
             {"waiting_for_commit", status.waiting},
             {"shed", status.shed},
             {"unabsorbed", status.unabsorbed},
             {"reincarnations", status.reincarnations}};
    const EscrowAgentCounters& rights = engine->escrow().counters();
    out["escrow"] = {
        {"open", engine->escrow().grant_state().open}, {"whole", engine->escrow().whole()},
        {"requests_sent", rights.requests_sent},       {"requests_served", rights.requests_served},
        {"requests_refused", rights.requests_refused}, {"versions_differ", rights.versions_differ},
        {"units_given", rights.units_given},           {"units_received", rights.units_received}};
    if (home) {
      const PassedOnCounters& passed = home->passed_on();
      out["escrow"].update({{"forwarded", passed.requests},
                            {"forwards", passed.asked},
                            {"forwards_admitted", passed.admitted},
                            {"forwards_failed", passed.failed},
                            {"forwards_withheld", passed.withheld},
                            {"forwards_served", passed.served}});
    }
    json storage{{"mode", store ? "lmdb" : "none"}, {"ok", !store || status.durable}};
    if (store) {
      storage::StoreCounters counters = store->counters();
      storage["failure"] = status.storage_failure;
      storage["commits"] = counters.commits;
      storage["records"] = counters.records;
      storage["bytes"] = counters.bytes;
      storage["backlog"] = store->backlog();
      storage["last_commit_us"] = counters.last_commit_time / kMicrosecond;
    }
    out["storage"] = std::move(storage);
    Nanos wall = wall_clock();
    json file{{"file", config.rules},
              {"version", rules_file.version},
              {"in_force_s", seconds_since(rules_file.since, wall)},
              {"reloads", rules_file.reloads},
              {"refused", rules_file.refused}};
    if (!rules_file.last_error.empty()) {
      file["last_error"] = rules_file.last_error;
      file["last_error_s"] = seconds_since(rules_file.refused_at, wall);
    }
    out["rules_file"] = std::move(file);
    out["rules"] = json::array();
    for (std::uint32_t i = 0; i < rules->rules().size(); ++i) {
      const Rule& rule = rules->rules()[i];
      RuleCounters counters = engine->limiter().counters(i);
      out["rules"].push_back({{"domain", rule.domain},
                              {"name", rule.name},
                              {"algorithm", to_string(rule.algorithm)},
                              {"enforcement", to_string(rule.enforcement)},
                              {"limit", rule.limit},
                              {"window", format_window(rule)},
                              {"shadow", rule.shadow},
                              {"allowed", counters.allowed},
                              {"denied", counters.denied},
                              {"degraded", counters.degraded},
                              {"over_admission_worst_case", engine->over_admission(i, wall)}});
    }
    out["peers"] = json::array();
    std::vector<crdt::PeerStatus> links = replica.peers();
    for (crdt::PeerIndex i = 0; i < links.size(); ++i) {
      const crdt::PeerStatus& link = links[i];
      rpc::LinkStatus session = peers->status(i);
      json peer{{"region", link.member.region},
                {"node", link.member.node},
                {"up", session.up},
                {"unacked", link.unacked},
                {"agrees", link.agrees},
                {"dropped", session.dropped},
                {"last_error", session.last_error}};
      if (link.in_step_at != 0) peer["in_step_s"] = seconds_since(link.in_step_at, now);
      if (link.heard_at != 0) peer["heard_s"] = seconds_since(link.heard_at, now);
      out["peers"].push_back(std::move(peer));
    }
    if (has_homes) {
      const HomeCounters& homes = home->counters();
      out["home"] = {{"forwarded", homes.forwarded},
                     {"served", homes.served},
                     {"refused", homes.refused},
                     {"degraded", homes.degraded}};
    }
    const crdt::ReplicaCounters& counters = replica.counters();
    out["counters"] = {
        {"late", counters.late_cells},         {"future", counters.future_cells},
        {"invalid", counters.invalid_cells},   {"alarms", counters.alarms},
        {"repaired", counters.repaired_cells}, {"pushes", counters.pushes_sent},
        {"cells_sent", counters.cells_sent},   {"cells_received", counters.cells_received}};
    if (replica.cell_count() <= kMaxSummedCells) {
      std::map<std::string, std::uint64_t> units;
      replica.for_each([&](const crdt::Cell& cell) {
        for (const crdt::Slot& slot : cell.slots) {
          auto member = replica.members().find(slot.id.writer);
          std::uint64_t& sum =
              units[member == replica.members().end() ? "?" : member->second.region];
          sum = add_saturated(sum, slot.value);
        }
      });
      out["units_by_region"] = units;
    }
    return out.dump(-1, ' ', false, json::error_handler_t::replace);
  }
};

Daemon::Daemon(NodeConfig config, LoadedRules rules, Log& log)
    : impl_(std::make_unique<Impl>(std::move(config), std::move(rules), log)) {}

Daemon::~Daemon() = default;

bool Daemon::start(std::string& error) {
  return impl_->start(error);
}

void Daemon::run() {
  impl_->run();
}

}  // namespace weir::node
