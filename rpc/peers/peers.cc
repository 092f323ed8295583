#include <weir/rpc/peers/peers.h>

#include <kj/debug.h>
#include <sodium.h>

#include <algorithm>
#include <array>
#include <list>
#include <set>
#include <string_view>
#include <utility>

#include <weir/rpc/net/backoff.h>
#include <weir/rpc/net/certificates.h>
#include <weir/rpc/net/connection.h>
#include <weir/rpc/net/listener.h>
#include <weir/rpc/net/tls_session.h>
#include <weir/rpc/peers/forward_queue.h>
#include <weir/rpc/peers/forward_server.h>
#include <weir/rpc/peers/handshake.h>
#include <weir/rpc/peers/skew_filter.h>
#include <weir/rpc/wire.h>

namespace weir::rpc {
namespace {

/// A stranger's messages are small; a member's may be as large as any.
constexpr std::size_t kStrangerWords = 4096;
constexpr std::size_t kMemberWords = 1u << 20;
/// Messages as the turn meter calls them, by Message::index().
constexpr std::array<std::string_view, crdt::kMessageKinds> kKinds = {
    "push",           "ack",
    "digest_offer",   "inventory",
    "repair",         "rights_request",
    "rejoin_request", "rejoin_confirmation"};
constexpr const char* kNotServed = "no rule is decided for other nodes here";
/// What all inbound connections may be reading at once.
constexpr std::size_t kReadBudget = 256u << 20;
constexpr auto kSweepInterval = 250 * kj::MILLISECONDS;
/// Connections that are over and not destroyed yet: those of one turn.
constexpr std::size_t kStillClosing = 256;
/// So long two nodes of one name are told of, after each was heard.
constexpr auto kTwoOfName = 60 * kj::SECONDS;
/// A session that lived so long starts its back-off anew.
constexpr auto kSettled = 10 * kj::SECONDS;
/// What is exported from a TLS connection for its handshake (docs/protocol.md).
constexpr std::string_view kExporter = "EXPORTER-weir-peer-handshake";

kj::Duration duration(Nanos n) {
  return n * kj::NANOSECONDS;
}

std::uint64_t random_below(std::uint64_t n) {
  std::uint64_t random = 0;
  randombytes_buf(&random, sizeof random);
  return random % n;
}

kj::Exception refusal(std::string why) {
  return kj::Exception(kj::Exception::Type::FAILED, __FILE__, __LINE__, kj::str(why.c_str()));
}

std::span<const std::uint8_t> bytes(capnp::Data::Reader data) {
  return {data.begin(), data.size()};
}

capnp::Data::Reader as_data(std::span<const std::uint8_t> in) {
  return kj::arrayPtr(in.data(), in.size());
}

bool read_nonce(capnp::Data::Reader in, Nonce& out) {
  if (in.size() != out.size()) return false;
  std::copy(in.begin(), in.end(), out.begin());
  return true;
}

ForwardLimits forward_limits(const PeerOptions& options) {
  return {options.max_asked,
          options.max_asked_bytes,
          {options.ask_misses, options.ask_pause, options.ask_pause_max}};
}

std::string label(const PeerAddress& peer) {
  return printable(peer.member) + " at " + printable(peer.address);
}

}  // namespace

struct PeerNetwork::Impl final : kj::TaskSet::ErrorHandler {
  class Inbound;
  class GateServer;
  class LinkServer;
  class Outgoing;

  Impl(EventLoop& l, PeerOptions o, PeerHandler& h);
  ~Impl();

  /// Who proved to be one member. An incarnation that was replaced by another, and is back, lives
  /// beside that one.
  struct Names {
    crdt::Incarnation last;
    crdt::Incarnation former;
    kj::Maybe<kj::TimePoint> two_at;
    void add(const crdt::Incarnation& incarnation, kj::TimePoint now) {
      if (incarnation == last) return;
      if (incarnation == former) two_at = now;
      former = std::exchange(last, incarnation);
    }
  };

  bool start(std::string& error);
  void stop();
  bool two_of_name(crdt::PeerIndex peer) const;
  void accept(kj::Own<UvStream> stream, const Address& from);
  void forget(Inbound& inbound);
  void drop_inbound();
  void make_room(const std::string& host);
  kj::Promise<void> sweep();
  int find(const crdt::Member& member) const;
  void report(const std::string& who, const std::string& why);
  bool room_to_ask(std::size_t peer);
  std::string certificate_of(std::size_t peer) const;
  PeerKey key_for(std::size_t secret, const UvStream& stream) const;
  void taskFailed(kj::Exception&& e) override { KJ_LOG(ERROR, "peer network task", e); }

  EventLoop& loop;
  PeerOptions options;
  PeerHandler& handler;
  std::vector<PeerKey> keys;  // of the secrets, the present one first
  bool started = false;
  bool running = false;
  bool restarting = false;
  std::shared_ptr<ReadBudget> budget;
  Listener listener;
  kj::Canceler receiving;  // promises of handler.receive
  std::list<kj::Own<Inbound>> inbound;
  std::vector<Inbound*> sessions;  // by peer; null: none
  std::vector<kj::Own<Outgoing>> outgoing;
  std::vector<LinkStatus> counters;
  std::vector<Names> proved;  // by peer
  ForwardServer serving;
  std::vector<kj::Own<ForwardQueue>> asking;  // by peer
  kj::TaskSet tasks;
};

// ---- Inbound ----

/// An accepted connection, from stranger to session. The capabilities that its connection serves
/// hold references; `net` is null once it is over.
class PeerNetwork::Impl::Inbound : public kj::Refcounted {
 public:
  enum class Stage { connected, greeted, proved, refused };

  Inbound(Impl& network, const Address& remote)
      : net(&network), from(to_string(remote)), host(host_of(remote)) {}

  Impl* net;
  std::string from;
  std::string host;
  Stage stage = Stage::connected;
  kj::Own<Connection> connection;
  std::uint32_t version = 0;
  crdt::PeerIndex peer = 0;
  Party dialer;
  Party acceptor;

  kj::Own<Inbound> ref() { return kj::addRef(*this); }
  std::string who() const {
    return dialer.member == crdt::Member{} ? from : printable(dialer.member) + " from " + from;
  }
  std::string refuse(std::string why) {
    stage = Stage::refused;
    net->report(who(), why);
    return why;
  }
};

class PeerNetwork::Impl::LinkServer final : public schema::Link::Server {
 public:
  explicit LinkServer(kj::Own<Inbound> session) : session_(kj::mv(session)) {}

  kj::Promise<void> send(SendContext context) override {
    Impl* net = session_->net;
    if (net == nullptr) return KJ_EXCEPTION(DISCONNECTED, "this session is over");
    TurnMeter::Scope scope(net->loop.meter(), "message");
    LinkStatus& tally = net->counters[session_->peer];
    crdt::Message message;
    std::string error;
    if (!decode(context.getParams().getMessage(), message, error)) {
      ++tally.refused;
      net->report(session_->who(), "message refused: " + error);
      return refusal("message refused: " + error);
    }
    scope.rename(kKinds[message.index()]);
    context.releaseParams();
    ++tally.received;
    return net->receiving.wrap(kj::evalNow([&] {
      return net->handler.receive(session_->peer, session_->dialer.incarnation, std::move(message));
    }));
  }

  kj::Promise<void> ping(PingContext context) override {
    Impl* net = session_->net;
    if (net == nullptr) return KJ_EXCEPTION(DISCONNECTED, "this session is over");
    if (net->options.wall) context.getResults().setAtNs(net->options.wall());
    context.getResults().setNamesake(net->two_of_name(session_->peer));
    return kj::READY_NOW;
  }

  kj::Promise<void> check(CheckContext context) override {
    return serving().check(session_->peer, context);
  }
  kj::Promise<void> reserve(ReserveContext context) override {
    return serving().reserve(session_->peer, context);
  }
  kj::Promise<void> settle(SettleContext context) override {
    return serving().settle(session_->peer, context);
  }

 private:
  ForwardServer& serving() {
    if (session_->net == nullptr) {
      kj::throwFatalException(KJ_EXCEPTION(DISCONNECTED, "this session is over"));
    }
    return session_->net->serving;
  }

  kj::Own<Inbound> session_;
};

class PeerNetwork::Impl::GateServer final : public schema::Gate::Server {
 public:
  explicit GateServer(kj::Own<Inbound> inbound) : in_(kj::mv(inbound)) {}

  kj::Promise<void> hello(HelloContext context) override {
    if (in_->net == nullptr) return KJ_EXCEPTION(DISCONNECTED, "this session is over");
    auto results = context.getResults();
    std::string why = greet(context.getParams().getHello());
    if (!why.empty()) {
      results.setRefused(why.c_str());
      return kj::READY_NOW;
    }
    in_->stage = Inbound::Stage::greeted;
    auto welcome = results.initWelcome();
    welcome.setVersion(in_->version);
    write(in_->acceptor.member, welcome.initMember());
    write(in_->acceptor.incarnation, welcome.initIncarnation());
    welcome.setNonce(as_data(in_->acceptor.nonce));
    return kj::READY_NOW;
  }

  kj::Promise<void> prove(ProveContext context) override {
    Impl* net = in_->net;
    if (net == nullptr) return KJ_EXCEPTION(DISCONNECTED, "this session is over");
    auto results = context.getResults();
    if (in_->stage != Inbound::Stage::greeted) {
      results.setRefused(in_->refuse("proof out of turn").c_str());
      return kj::READY_NOW;
    }
    const std::string& cluster = net->options.cluster;
    const auto mac = [&](std::size_t secret, Role role) {
      return weir::rpc::prove(net->key_for(secret, in_->connection->stream()), role, in_->version,
                              cluster, in_->dialer, in_->acceptor);
    };
    std::size_t secret = 0;
    while (secret < net->keys.size() &&
           !same(bytes(context.getParams().getMac()), mac(secret, Role::dialer))) {
      ++secret;
    }
    if (secret == net->keys.size()) {
      results.setRefused(in_->refuse("wrong secret").c_str());
      return kj::READY_NOW;
    }
    if (std::string why = conflict(); !why.empty()) {
      results.setRefused(in_->refuse(why).c_str());
      return kj::READY_NOW;
    }

    Inbound* former = std::exchange(net->sessions[in_->peer], in_.get());
    if (former != nullptr) net->forget(*former);
    in_->stage = Inbound::Stage::proved;
    net->proved[in_->peer].add(in_->dialer.incarnation, net->loop.timer().now());
    in_->connection->framing().set_message_words(kMemberWords);
    // By the secret that the dialer knows: another one would tell it nothing.
    results.setMac(as_data(mac(secret, Role::acceptor)));
    results.setLink(kj::heap<LinkServer>(in_->ref()));
    return kj::READY_NOW;
  }

 private:
  /// Empty, or why the stranger is refused.
  std::string greet(schema::Hello::Reader hello) {
    const PeerOptions& settings = in_->net->options;
    if (in_->stage != Inbound::Stage::connected) return in_->refuse("greeted twice");
    if (!read(hello.getMember(), in_->dialer.member)) return in_->refuse("name is too long");
    in_->version = common_version(hello.getVersion(), hello.getOldestVersion());
    if (in_->version == 0) {
      return in_->refuse("speaks protocol versions " + std::to_string(hello.getOldestVersion()) +
                         " to " + std::to_string(hello.getVersion()) + ", this node " +
                         std::to_string(kOldestProtocolVersion) + " to " +
                         std::to_string(kProtocolVersion));
    }
    auto cluster = hello.getCluster();
    if (std::string_view(cluster.cStr(), cluster.size()) != settings.cluster) {
      return in_->refuse(
          "belongs to another cluster: \"" +
          printable(std::string(cluster.cStr(), std::min<size_t>(cluster.size(), 128))) +
          "\", this is \"" + printable(settings.cluster) + "\"");
    }
    if (in_->dialer.member == settings.self) return in_->refuse("has this node's own name");
    int peer = in_->net->find(in_->dialer.member);
    if (peer < 0) return in_->refuse("is not a member of this cluster");
    in_->peer = static_cast<crdt::PeerIndex>(peer);
    if (const TlsSession* tls = in_->connection->stream().tls()) {
      const std::string name = in_->net->certificate_of(in_->peer);
      if (!tls->peer_is(name)) {
        const std::vector<std::string> names = tls->peer_names();
        return in_->refuse("its certificate is of " +
                           (names.empty() ? "nobody" : printable(names.front())) + ", expected " +
                           printable(name));
      }
    }
    in_->dialer.incarnation = read(hello.getIncarnation());
    if (!in_->dialer.incarnation) return in_->refuse("has no incarnation");
    if (!read_nonce(hello.getNonce(), in_->dialer.nonce)) return in_->refuse("nonce of wrong size");
    in_->acceptor = {settings.self, settings.incarnation, fresh_nonce()};
    return {};
  }

  /// Checked after the proof, so that strangers can neither probe for this nor cause it.
  std::string conflict() {
    Impl& net = *in_->net;
    if (in_->dialer.incarnation == net.options.incarnation)
      return "has this node's own incarnation";
    for (std::size_t i = 0; i < net.sessions.size(); ++i) {
      if (i == in_->peer || net.sessions[i] == nullptr) continue;
      if (net.sessions[i]->dialer.incarnation == in_->dialer.incarnation) {
        return "has the incarnation of " + printable(net.options.peers[i].member);
      }
    }
    return {};
  }

  kj::Own<Inbound> in_;
};

// ---- Outgoing ----

/// Keeps one session to one peer, for ever.
class PeerNetwork::Impl::Outgoing {
 public:
  Outgoing(Impl& network, crdt::PeerIndex index, Address address)
      : net_(network),
        index_(index),
        address_(address),
        backoff_({network.options.backoff_min, network.options.backoff_max}, random_below),
        running_(run().eagerlyEvaluate(nullptr)) {}
  ~Outgoing() { down(); }

  bool send(const crdt::Message& message);
  const Address& address() const { return address_; }

  /// The session ends for the node at once; the object follows.
  void down() {
    if (session_.get() == nullptr) return;
    session_->current = false;
    session_ = nullptr;
    LinkStatus& tally = net_.counters[index_];
    tally.up = false;
    tally.incarnation = {};
    tally.in_flight = 0;
    tally.in_flight_bytes = 0;
    tally.skew.reset();
    tally.sees_namesake = false;
    Impl& net = net_;
    ForwardQueue& asked = *net.asking[index_];
    asked.mute();
    net.handler.peer_down(index_);
    asked.session_down(net.running ? "connection lost" : "this node is stopping");
  }
  /// Nothing more is sent; peer_down is yet to be called.
  void mute() {
    if (session_.get() == nullptr) return;
    session_->muted = true;
    net_.asking[index_]->mute();
  }
  /// Whatever requests leave behind when their time is over, messages still find room.
  bool room_to_ask() {
    const std::size_t most = 2 * net_.options.max_in_flight_bytes;  // as in send()
    return connection_->queued_bytes() <= most - std::min(most / 2, net_.options.max_asked_bytes);
  }

 private:
  /// Shared with the answers that are still to come.
  struct Session : kj::Refcounted {
    explicit Session(schema::Link::Client l) : link(kj::mv(l)) {}
    void settle(Impl& net, crdt::PeerIndex index, std::size_t size) {
      --in_flight;
      in_flight_bytes -= size;
      if (!current) return;
      net.counters[index].in_flight = in_flight;
      net.counters[index].in_flight_bytes = in_flight_bytes;
    }
    schema::Link::Client link;
    bool current = true;
    bool muted = false;
    bool ping_in_flight = false;
    SkewFilter skew;
    std::size_t in_flight = 0;
    std::size_t in_flight_bytes = 0;
  };

  const PeerAddress& peer() const { return net_.options.peers[index_]; }
  kj::Timer& timer() { return net_.loop.timer(); }

  kj::Promise<void> run();
  kj::Promise<void> attempt();
  kj::Promise<void> handshake();
  kj::Promise<void> greeted(schema::Gate::Client gate, schema::Welcome::Reader welcome);
  void up(const crdt::Incarnation& incarnation, schema::Link::Client link);
  kj::Promise<void> keep_alive();
  void ping();
  void failed(const kj::Exception& e);

  Impl& net_;
  crdt::PeerIndex index_;
  Address address_;
  Backoff backoff_;
  bool refused_ = false;           // what failed the attempt was a refusal, not the network
  std::size_t secret_ = 0;         // which one the peer knows, as far as is known
  std::size_t secrets_tried_ = 0;  // that it refused in a row
  Party self_;
  kj::Own<Connection> connection_;
  kj::Own<Session> session_;
  kj::TimePoint up_since_ = kj::origin<kj::TimePoint>();
  kj::Promise<void> running_;
};

kj::Promise<void> PeerNetwork::Impl::Outgoing::run() {
  return kj::evalLater([this] { return attempt(); })
      .then([] {}, [this](kj::Exception&& e) { failed(e); })
      .then([this] {
        if (session_.get() != nullptr && timer().now() - up_since_ > kSettled) {
          backoff_.reset();
        }
        down();
        connection_ = nullptr;
        return timer().afterDelay(duration(backoff_.next()));
      })
      .then([this] { return run(); });
}

kj::Promise<void> PeerNetwork::Impl::Outgoing::attempt() {
  refused_ = false;
  return connect(net_.loop, address_, duration(net_.options.connect_timeout))
      .then([this](kj::Own<UvStream>&& stream) -> kj::Promise<kj::Own<UvStream>> {
        if (net_.options.tls == nullptr) return kj::mv(stream);
        stream->start_tls(
            TlsSession::client(net_.options.tls, label(peer()), {net_.certificate_of(index_)}));
        auto secured = stream->secured();
        return timer()
            .timeoutAfter(duration(net_.options.handshake_timeout), kj::mv(secured))
            .then([stream = kj::mv(stream)]() mutable { return kj::mv(stream); });
      })
      .then([this](kj::Own<UvStream>&& stream) {
        connection_ = kj::heap<Connection>(net_.loop, kj::mv(stream), ConnectionLimits{});
        auto over = connection_->closed().then([this]() -> kj::Promise<void> {
          std::string why = connection_->stream().tls_failure();
          if (!why.empty()) return refusal(std::move(why));
          return KJ_EXCEPTION(DISCONNECTED, "connection closed by the peer");
        });
        auto session = timer()
                           .timeoutAfter(duration(net_.options.handshake_timeout), handshake())
                           .then([this] {
                             ping();
                             return keep_alive();
                           });
        return session.exclusiveJoin(kj::mv(over));
      });
}

kj::Promise<void> PeerNetwork::Impl::Outgoing::handshake() {
  self_ = {net_.options.self, net_.options.incarnation, fresh_nonce()};
  auto gate = connection_->bootstrap().castAs<schema::Gate>();
  auto request = gate.helloRequest();
  auto hello = request.initHello();
  hello.setVersion(kProtocolVersion);
  hello.setOldestVersion(kOldestProtocolVersion);
  hello.setCluster(net_.options.cluster.c_str());
  write(self_.member, hello.initMember());
  write(self_.incarnation, hello.initIncarnation());
  hello.setNonce(as_data(self_.nonce));
  return request.send().then(
      [this,
       gate](capnp::Response<schema::Gate::HelloResults>&& response) mutable -> kj::Promise<void> {
        auto why = response.getRefused();
        if (why.size() > 0) {
          refused_ = true;
          return refusal("refused us: " + printable(std::string(why.cStr())));
        }
        return greeted(kj::mv(gate), response.getWelcome());
      });
}

kj::Promise<void> PeerNetwork::Impl::Outgoing::greeted(schema::Gate::Client gate,
                                                       schema::Welcome::Reader welcome) {
  auto refuse = [this](std::string why) -> kj::Promise<void> {
    refused_ = true;
    return refusal(std::move(why));
  };
  std::uint32_t version = welcome.getVersion();
  if (version < kOldestProtocolVersion || version > kProtocolVersion) {
    return refuse("chose protocol version " + std::to_string(version));
  }
  Party acceptor;
  if (!read(welcome.getMember(), acceptor.member)) return refuse("name is too long");
  acceptor.incarnation = read(welcome.getIncarnation());
  if (acceptor.member != peer().member) {
    return refuse("another member answers there: " + printable(acceptor.member));
  }
  if (!acceptor.incarnation) return refuse("has no incarnation");
  if (acceptor.incarnation == self_.incarnation) return refuse("has this node's own incarnation");
  if (!read_nonce(welcome.getNonce(), acceptor.nonce)) return refuse("nonce of wrong size");

  auto request = gate.proveRequest();
  const PeerKey key = net_.key_for(secret_, connection_->stream());
  request.setMac(as_data(prove(key, Role::dialer, version, net_.options.cluster, self_, acceptor)));
  return request.send().then(
      [this, key, version, acceptor, refuse](
          capnp::Response<schema::Gate::ProveResults>&& response) mutable -> kj::Promise<void> {
        auto why = response.getRefused();
        if (why.size() > 0) {
          // The peer may know another secret yet, or still: the next attempt tries that one.
          secret_ = (secret_ + 1) % net_.keys.size();
          std::string refused = "refused us: " + printable(std::string(why.cStr()));
          if (++secrets_tried_ < net_.keys.size()) return refusal(std::move(refused));
          secrets_tried_ = 0;
          return refuse(std::move(refused));
        }
        secrets_tried_ = 0;
        Mac expected = prove(key, Role::acceptor, version, net_.options.cluster, self_, acceptor);
        if (!same(bytes(response.getMac()), expected)) return refuse("wrong secret");
        if (!response.hasLink()) return refuse("gave no link");
        up(acceptor.incarnation, response.getLink());
        return kj::READY_NOW;
      });
}

void PeerNetwork::Impl::Outgoing::up(const crdt::Incarnation& incarnation,
                                     schema::Link::Client link) {
  net_.asking[index_]->session_up(link);
  session_ = kj::refcounted<Session>(kj::mv(link));
  up_since_ = timer().now();
  LinkStatus& tally = net_.counters[index_];
  tally.up = true;
  tally.incarnation = incarnation;
  tally.last_error.clear();
  tally.refuses = false;
  ++tally.sessions;
  // Told as the incarnation that a set_incarnation() in this turn has replaced? Then it restarts.
  if (net_.restarting) mute();
  net_.handler.peer_up(index_, incarnation);
}

// Anything that arrives shows life: behind megabytes on a slow line an answer to a ping may be
// late.
kj::Promise<void> PeerNetwork::Impl::Outgoing::keep_alive() {
  return timer()
      .afterDelay(duration(net_.options.ping_interval))
      .then([this]() -> kj::Promise<void> {
        auto silent = timer().now() - connection_->stream().last_received();
        if (silent > duration(net_.options.dead_after)) {
          return KJ_EXCEPTION(DISCONNECTED, "no answer for too long");
        }
        if (session_.get() == nullptr) return KJ_EXCEPTION(DISCONNECTED, "session is over");
        ping();
        return keep_alive();
      });
}

void PeerNetwork::Impl::Outgoing::ping() {
  if (session_->ping_in_flight) return;
  session_->ping_in_flight = true;
  const kj::TimePoint asked = kj::systemPreciseMonotonicClock().now();
  auto answered = [this, s = kj::addRef(*session_), asked](auto&& response) mutable {
    s->ping_in_flight = false;
    if (s->current) net_.counters[index_].sees_namesake = response.getNamesake();
    if (!s->current || !net_.options.wall || response.getAtNs() == 0) return;
    const Nanos took = (kj::systemPreciseMonotonicClock().now() - asked) / kj::NANOSECONDS;
    s->skew.add(net_.options.wall(), took, response.getAtNs());
    LinkStatus& tally = net_.counters[index_];
    tally.skew = s->skew.skew()->ahead;
    tally.skew_error = s->skew.skew()->error;
  };
  net_.tasks.add(
      session_->link.pingRequest().send().then(kj::mv(answered), [](kj::Exception&&) {}));
}

void PeerNetwork::Impl::Outgoing::failed(const kj::Exception& e) {
  std::string why = reason(e);
  net_.counters[index_].last_error = why;
  net_.counters[index_].refuses = refused_;
  if (refused_) net_.report(label(peer()), why);
}

bool PeerNetwork::Impl::Outgoing::send(const crdt::Message& message) {
  LinkStatus& tally = net_.counters[index_];
  const PeerOptions& settings = net_.options;
  std::size_t size = encoded_size(message);
  bool alone = session_.get() != nullptr && session_->in_flight == 0;
  if (session_.get() == nullptr || session_->muted ||
      session_->in_flight >= settings.max_in_flight ||
      (!alone && session_->in_flight_bytes + size > settings.max_in_flight_bytes) ||
      connection_->queued_bytes() > 2 * settings.max_in_flight_bytes) {
    ++tally.dropped;
    return false;
  }
  bool sent = false;
  std::string error;
  auto exception = kj::runCatchingExceptions([&] {
    auto request =
        session_->link.sendRequest(capnp::MessageSize{size / sizeof(capnp::word) + 64, 0});
    if (!encode(message, request.initMessage(), error)) return;
    auto& session = *session_;
    ++session.in_flight;
    session.in_flight_bytes += size;
    // The answer may come after this object is gone, the network and the session are still there.
    Impl& net = net_;
    crdt::PeerIndex index = index_;
    net_.tasks.add(request.send().then(
        [&net, index, size, s = kj::addRef(session)](auto&&) mutable {
          s->settle(net, index, size);
        },
        [&net, index, size, s = kj::addRef(session)](kj::Exception&& e) mutable {
          s->settle(net, index, size);
          LinkStatus& c = net.counters[index];
          ++c.rejected;
          if (e.getType() == kj::Exception::Type::DISCONNECTED) return;
          c.last_error = reason(e);
          net.report(label(net.options.peers[index]), "refused a message: " + reason(e));
        }));
    tally.in_flight = session.in_flight;
    tally.in_flight_bytes = session.in_flight_bytes;
    ++tally.sent;
    sent = true;
  });
  KJ_IF_MAYBE (e, exception) {
    error = reason(*e);
  }
  if (!sent) {
    ++tally.dropped;
    tally.last_error = "not sent: " + error;
  }
  return sent;
}

// ---- Requests that nobody serves ----

void PeerHandler::serve(crdt::PeerIndex, std::vector<CheckItem> items,
                        std::function<void(std::vector<Reply>)> done) {
  std::vector<Reply> replies(items.size());
  for (Reply& reply : replies) reply.fail(ErrorKind::unsupported, kNotServed);
  done(std::move(replies));
}

void PeerHandler::serve_reserve(crdt::PeerIndex, CheckItem, Nanos,
                                std::function<void(ReserveReply)> done) {
  ReserveReply reply;
  reply.decision.fail(ErrorKind::unsupported, kNotServed);
  done(std::move(reply));
}

void PeerHandler::serve_settle(crdt::PeerIndex, std::string, std::uint64_t,
                               std::function<void(SettleReply)> done) {
  SettleReply reply;
  reply.error = {ErrorKind::unsupported, kNotServed};
  done(std::move(reply));
}

// ---- The network ----

PeerNetwork::Impl::Impl(EventLoop& l, PeerOptions o, PeerHandler& h)
    : loop(l),
      options(std::move(o)),
      handler(h),
      budget(std::make_shared<ReadBudget>(kReadBudget)),
      listener(
          l, options.peers.size() + options.max_strangers + kStillClosing,
          [this](kj::Own<UvStream> stream, const Address& from) { accept(kj::mv(stream), from); }),
      sessions(options.peers.size()),
      counters(options.peers.size()),
      proved(options.peers.size()),
      serving(handler, {options.max_served, options.max_served_bytes}, options.peers.size()),
      tasks(*this) {
  for (std::size_t i = 0; i < options.peers.size(); ++i) {
    asking.push_back(kj::heap<ForwardQueue>(loop.timer(), forward_limits(options),
                                            [this, i] { return room_to_ask(i); }));
  }
}

PeerNetwork::Impl::~Impl() {
  stop();
}

int PeerNetwork::Impl::find(const crdt::Member& member) const {
  for (std::size_t i = 0; i < options.peers.size(); ++i) {
    if (options.peers[i].member == member) return static_cast<int>(i);
  }
  return -1;
}

void PeerNetwork::Impl::report(const std::string& who, const std::string& why) {
  handler.refused(printable(who), why.substr(0, 512));
}

/// Whom a member's certificate is of.
std::string PeerNetwork::Impl::certificate_of(std::size_t peer) const {
  const PeerAddress& one = options.peers[peer];
  return one.certificate.empty() ? member_uri(options.cluster, one.member.region, one.member.node)
                                 : one.certificate;
}

PeerKey PeerNetwork::Impl::key_for(std::size_t secret, const UvStream& stream) const {
  const TlsSession* tls = stream.tls();
  return tls == nullptr ? keys[secret] : bind_key(keys[secret], tls->exporter(kExporter));
}

bool PeerNetwork::Impl::room_to_ask(std::size_t peer) {
  return peer < outgoing.size() && outgoing[peer]->room_to_ask();
}

bool PeerNetwork::Impl::start(std::string& error) {
  if (started) {
    error = "a peer network starts once";
    return false;
  }
  if (!options.incarnation) {
    error = "the incarnation must not be zero";
    return false;
  }
  if (options.self.region.size() > kMaxName || options.self.node.size() > kMaxName ||
      options.cluster.size() > kMaxName) {
    error = "a name is longer than " + std::to_string(kMaxName) + " bytes";
    return false;
  }
  if (options.secret.empty() && options.tls == nullptr) {
    error = "the secret must not be empty";
    return false;
  }
  if (options.tls != nullptr &&
      (options.tls->options().cert.empty() ||
       options.tls->options().client_certificate != ClientCertificate::required)) {
    error = "TLS between members must be mutual";
    return false;
  }
  std::vector<Address> addresses;
  std::set<crdt::Member> names{options.self};
  for (const PeerAddress& peer : options.peers) {
    if (!names.insert(peer.member).second) {
      error = "member " + printable(peer.member) + " is named twice";
      return false;
    }
    auto address = parse_address(peer.address, error);
    if (!address) {
      error = "peer " + printable(peer.member) + ": " + error;
      return false;
    }
    addresses.push_back(*address);
  }
  keys.push_back(derive_key(options.secret));
  if (!options.previous_secret.empty()) keys.push_back(derive_key(options.previous_secret));
  if (options.tls != nullptr) listener.accept_few();
  if (!listener.open(options.listen, error)) return false;
  started = running = true;
  tasks.add(sweep());
  for (std::size_t i = 0; i < addresses.size(); ++i) {
    outgoing.push_back(kj::heap<Outgoing>(*this, static_cast<crdt::PeerIndex>(i), addresses[i]));
  }
  return true;
}

void PeerNetwork::Impl::stop() {
  if (!running) return;
  running = false;
  listener.close();
  drop_inbound();
  for (auto& asked : asking) asked->mute();
  auto gone = std::move(outgoing);
  outgoing.clear();
  for (auto& out : gone) out->down();
  // Their promises, or one of the handler's, may be on the stack.
  tasks.add(kj::evalLater([this, gone = kj::mv(gone)] {
    receiving.cancel("this node is stopping");
    serving.stop();
  }));
  for (PeerKey& key : keys) sodium_memzero(key.data(), key.size());
}

bool PeerNetwork::Impl::two_of_name(crdt::PeerIndex peer) const {
  KJ_IF_MAYBE (at, proved[peer].two_at) {
    return loop.timer().now() - *at < kTwoOfName;
  }
  return false;
}

/// For one more stranger, from `host`. The oldest one goes that has said nothing: a member speaks
/// as soon as it is connected, and is not put out by however many come behind it and are silent.
/// Many may be accepted in one turn, before anything is read, so what waits in a socket counts as
/// said.
void PeerNetwork::Impl::make_room(const std::string& host) {
  struct Group {
    void add(Inbound& in) {
      ++size;
      if (oldest == nullptr) oldest = &in;
      if (oldest_silent == nullptr && !in.connection->stream().heard()) oldest_silent = &in;
    }
    Inbound& first_to_go() const { return oldest_silent != nullptr ? *oldest_silent : *oldest; }
    std::size_t size = 0;
    Inbound* oldest = nullptr;
    Inbound* oldest_silent = nullptr;
  };
  Group all;
  Group near;
  for (auto& in : inbound) {
    if (in->stage == Inbound::Stage::proved) continue;
    all.add(*in);
    if (in->host == host) near.add(*in);
  }
  if (near.size >= options.max_strangers_of_address) {
    forget(near.first_to_go());
  } else if (all.size >= options.max_strangers) {
    forget(all.first_to_go());
  }
}

void PeerNetwork::Impl::accept(kj::Own<UvStream> stream, const Address& from) {
  make_room(host_of(from));
  ConnectionLimits limits;
  limits.framing.message_words = kStrangerWords;
  auto in = kj::refcounted<Inbound>(*this, from);
  if (options.tls != nullptr) stream->start_tls(TlsSession::server(options.tls, in->from));
  in->connection =
      kj::heap<Connection>(loop, kj::mv(stream), kj::heap<GateServer>(in->ref()), limits, budget);
  tasks.add(in->connection->closed().then([this, in = in->ref()]() mutable {
    if (in->net != nullptr) forget(*in);
  }));
  inbound.push_back(kj::mv(in));
}

/// Ends a connection: no more calls are taken from it, and it is destroyed in a later event.
void PeerNetwork::Impl::forget(Inbound& in) {
  if (in.stage == Inbound::Stage::proved && sessions[in.peer] == &in) sessions[in.peer] = nullptr;
  in.net = nullptr;
  retire(tasks, kj::mv(in.connection));
  inbound.remove_if([&](const kj::Own<Inbound>& other) { return other.get() == &in; });
}

void PeerNetwork::Impl::drop_inbound() {
  while (!inbound.empty()) forget(*inbound.front());
}

/// Strangers that do not come to the point, and members that stop in the middle of a message.
kj::Promise<void> PeerNetwork::Impl::sweep() {
  return loop.timer().afterDelay(kSweepInterval).then([this]() -> kj::Promise<void> {
    if (!running) return kj::READY_NOW;
    auto now = loop.timer().now();
    std::vector<Inbound*> late;
    for (auto& in : inbound) {
      bool stranger = in->stage != Inbound::Stage::proved;
      if (stranger && now - in->connection->opened() > duration(options.stranger_timeout)) {
        late.push_back(in.get());
        continue;
      }
      KJ_IF_MAYBE (since, in->connection->framing().stalled_since()) {
        if (now - *since > duration(options.message_timeout)) late.push_back(in.get());
      }
    }
    for (Inbound* in : late) {
      if (in->stage == Inbound::Stage::connected || in->stage == Inbound::Stage::greeted) {
        report(in->who(), "no handshake in time");
      } else if (in->stage == Inbound::Stage::proved) {
        report(in->who(), "stalled inside a message");
      }
      forget(*in);
    }
    return sweep();
  });
}

PeerNetwork::PeerNetwork(EventLoop& loop, PeerOptions options, PeerHandler& handler)
    : impl_(std::make_unique<Impl>(loop, std::move(options), handler)) {}

PeerNetwork::~PeerNetwork() = default;

bool PeerNetwork::start(std::string& error) {
  return impl_->start(error);
}

std::uint16_t PeerNetwork::port() const {
  return impl_->listener.port();
}

bool PeerNetwork::send(crdt::PeerIndex peer, const crdt::Message& message) {
  if (peer >= impl_->outgoing.size()) {
    if (peer < impl_->counters.size()) ++impl_->counters[peer].dropped;
    return false;
  }
  return impl_->outgoing[peer]->send(message);
}

void PeerNetwork::ask(crdt::PeerIndex peer, CheckItem item, Nanos patience,
                      std::function<void(Reply)> done) {
  impl_->asking.at(peer)->check(std::move(item), patience, std::move(done));
}

void PeerNetwork::ask_reserve(crdt::PeerIndex peer, CheckItem item, Nanos timeout, Nanos patience,
                              std::function<void(ReserveReply)> done) {
  impl_->asking.at(peer)->reserve(std::move(item), timeout, patience, std::move(done));
}

void PeerNetwork::ask_settle(crdt::PeerIndex peer, std::string ticket, std::uint64_t hits,
                             Nanos patience, std::function<void(SettleReply)> done) {
  impl_->asking.at(peer)->settle(std::move(ticket), hits, patience, std::move(done));
}

bool PeerNetwork::askable(crdt::PeerIndex peer) const {
  return peer < impl_->asking.size() && impl_->asking[peer]->usable();
}

void PeerNetwork::set_incarnation(const crdt::Incarnation& fresh) {
  Impl& net = *impl_;
  net.options.incarnation = fresh;
  if (!net.running || net.restarting) return;
  net.restarting = true;
  net.drop_inbound();
  for (auto& out : net.outgoing) out->mute();
  // May be called from inside a session's own promise: it can only be replaced later.
  net.tasks.add(kj::evalLater([&net] {
    net.restarting = false;
    if (!net.running) return;
    // Each peer_down may end in stop().
    for (std::size_t i = 0; i < net.outgoing.size(); ++i) {
      Address address = net.outgoing[i]->address();
      net.outgoing[i]->down();
      if (!net.running) return;
      net.outgoing[i] = kj::heap<Impl::Outgoing>(net, static_cast<crdt::PeerIndex>(i), address);
    }
  }));
}

void PeerNetwork::stop() {
  impl_->stop();
}

LinkStatus PeerNetwork::status(crdt::PeerIndex peer) const {
  if (peer >= impl_->counters.size()) return {};
  LinkStatus out = impl_->counters[peer];
  out.heard = impl_->sessions[peer] != nullptr;
  out.two_of_name = impl_->two_of_name(peer);
  const ForwardCounters& asked = impl_->asking[peer]->counters();
  out.asked = asked.sent;
  out.ask_unsent = asked.unsent;
  out.ask_missed = asked.missed;
  out.ask_failed = asked.failed;
  out.asking = impl_->asking[peer]->open();
  const ServeCounters& served = impl_->serving.counters(peer);
  out.served = served.requests;
  out.serve_malformed = served.malformed;
  out.serve_shed = served.shed;
  out.serving = impl_->serving.serving(peer);
  return out;
}

}  // namespace weir::rpc
