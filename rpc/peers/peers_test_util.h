#pragma once

#include <gtest/gtest.h>

#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <weir/rpc/net/connection.h>
#include <weir/rpc/net/test_util.h>
#include <weir/rpc/peers/handshake.h>
#include <weir/rpc/peers/peers.h>
#include <weir/rpc/wire.h>

namespace weir::rpc::test {

inline constexpr const char* kSecret = "a secret of the test cluster";

inline crdt::Incarnation incarnation(std::uint64_t n) {
  return {n, n};
}

struct Received {
  crdt::PeerIndex peer;
  crdt::Incarnation from;
  crdt::Message message;
};

class Recorder : public PeerHandler {
 public:
  void peer_up(crdt::PeerIndex peer, const crdt::Incarnation& id) override {
    ups.push_back({peer, id});
    if (on_up) on_up();
  }
  void peer_down(crdt::PeerIndex peer) override { downs.push_back(peer); }
  kj::Promise<void> receive(crdt::PeerIndex peer, const crdt::Incarnation& from,
                            crdt::Message message) override {
    received.push_back({peer, from, std::move(message)});
    if (on_receive) on_receive();
    if (!hold) return kj::READY_NOW;
    auto paf = kj::newPromiseAndFulfiller<void>();
    held.push_back(kj::mv(paf.fulfiller));
    return kj::mv(paf.promise);
  }
  void refused(const std::string& who, const std::string& why) override {
    refusals.push_back(who + ": " + why);
  }
  // Requests wait to be answered with answer_all(), unless `at_once`.
  void serve(crdt::PeerIndex, std::vector<CheckItem> items,
             std::function<void(std::vector<Reply>)> done) override {
    calls.push_back(items.size());
    std::vector<Reply> replies;
    for (const CheckItem& item : items) replies.push_back(reply_to(item));
    for (CheckItem& item : items) asked.push_back(std::move(item));
    later([done = std::move(done), replies = std::move(replies)] { done(replies); });
    if (on_serve) on_serve();
  }
  void serve_reserve(crdt::PeerIndex, CheckItem item, Nanos timeout,
                     std::function<void(ReserveReply)> done) override {
    ReserveReply reply{reply_to(item), "ticket of " + item.domain};
    timeouts.push_back(timeout);
    asked.push_back(std::move(item));
    later([done = std::move(done), reply = std::move(reply)] { done(reply); });
  }
  void serve_settle(crdt::PeerIndex, std::string ticket, std::uint64_t hits,
                    std::function<void(SettleReply)> done) override {
    settled.emplace_back(std::move(ticket), hits);
    later([done = std::move(done), hits] { done({{}, true, hits + 1, true, false}); });
  }
  void later(std::function<void()> answer) {
    if (at_once) return answer();
    unanswered.push_back(std::move(answer));
  }
  void answer_all() {
    for (auto& answer : std::exchange(unanswered, {})) answer();
  }
  /// Allows what asks for less than 100.
  static Reply reply_to(const CheckItem& item) {
    Reply reply;
    reply.allowed = item.hits < 100;
    for (const std::string& rule : item.rule_filter) {
      Status status;
      status.rule = rule;
      status.limit = 99;
      status.allowed = reply.allowed;
      reply.statuses.push_back(std::move(status));
    }
    reply.deciding = reply.statuses.empty() ? -1 : 0;
    return reply;
  }

  bool has_refusal(const std::string& part) const {
    for (const auto& r : refusals) {
      if (r.find(part) != std::string::npos) return true;
    }
    return false;
  }

  std::vector<std::pair<crdt::PeerIndex, crdt::Incarnation>> ups;
  std::vector<crdt::PeerIndex> downs;
  std::vector<Received> received;
  std::vector<std::string> refusals;
  std::function<void()> on_up;
  std::function<void()> on_receive;
  bool hold = false;
  std::deque<kj::Own<kj::PromiseFulfiller<void>>> held;

  bool at_once = true;
  std::function<void()> on_serve;
  std::vector<CheckItem> asked;
  std::vector<std::size_t> calls;  // requests in each
  std::vector<Nanos> timeouts;
  std::vector<std::pair<std::string, std::uint64_t>> settled;
  std::vector<std::function<void()>> unanswered;
};

/// Takes a free port and gives it up again, for a node that others must know in advance.
inline std::uint16_t free_port() {
  DeafServer server;
  return server.port();
}

inline std::string at(std::uint16_t port) {
  return "127.0.0.1:" + std::to_string(port);
}

inline PeerOptions options(const std::string& name, std::uint16_t port, std::uint64_t id) {
  PeerOptions out;
  out.self = {"test", name};
  out.incarnation = incarnation(id);
  out.cluster = "cluster";
  out.secret = kSecret;
  out.listen = at(port);
  out.backoff_min = 5 * kMillisecond;
  out.backoff_max = 40 * kMillisecond;
  return out;
}

inline PeerAddress peer(const std::string& name, std::uint16_t port) {
  return {{"test", name}, at(port)};
}

struct Node {
  Node(EventLoop& loop, PeerOptions o) : network(loop, std::move(o), handler) {
    std::string error;
    started = network.start(error);
    EXPECT_TRUE(started) << error;
  }
  Recorder handler;
  PeerNetwork network;
  bool started = false;
};

class PeersTest : public ::testing::Test {
 protected:
  PeersTest() : port_a_(free_port()), port_b_(free_port()) {
    a_options_ = options("a", port_a_, 1);
    b_options_ = options("b", port_b_, 2);
    a_options_.peers = {peer("b", port_b_)};
    b_options_.peers = {peer("a", port_a_)};
  }
  void start() {
    a_.emplace(loop_, a_options_);
    b_.emplace(loop_, b_options_);
  }
  ~PeersTest() noexcept override {}
  bool both_up() {
    return test::eventually(loop_,
                            [&] { return a_->network.status(0).up && b_->network.status(0).up; });
  }
  bool eventually(const std::function<bool()>& condition) {
    return test::eventually(loop_, condition);
  }

  EventLoop loop_;
  std::uint16_t port_a_;
  std::uint16_t port_b_;
  PeerOptions a_options_;
  PeerOptions b_options_;
  std::optional<Node> a_;
  std::optional<Node> b_;
};

inline crdt::Message ack(std::uint64_t n) {
  return crdt::Ack{incarnation(1), incarnation(2), n};
}

/// A dialler that plays by its own rules, towards `a`.
class DialerTest : public PeersTest {
 protected:
  DialerTest() {
    a_options_.peers = {peer("b", port_b_), peer("c", port_b_)};
    a_options_.backoff_min = a_options_.backoff_max = kMinute;  // it should not dial meanwhile
    a_options_.stranger_timeout = 300 * kMillisecond;
    a_.emplace(loop_, a_options_);
  }
  ~DialerTest() noexcept override {}

  struct Dialled {
    kj::Own<Connection> connection;
    Party self{{"test", "b"}, incarnation(2), fresh_nonce()};
    Party acceptor;
    std::string refused;
    kj::Maybe<schema::Link::Client> link;
  };

  struct Deviations {
    std::uint32_t version = kProtocolVersion;
    std::uint32_t oldest = kOldestProtocolVersion;
    std::size_t nonce_bytes = kNonceBytes;
    bool reflect = false;  // proves with the other role's MAC
    bool cut_mac = false;
    bool skip_hello = false;
  };

  kj::Own<Connection> dial() {
    auto stream = connect(loop_, test::local(port_a_), 5 * kj::SECONDS).wait(loop_.wait_scope());
    return kj::heap<Connection>(loop_, kj::mv(stream), ConnectionLimits{});
  }

  void handshake(Dialled& d) { handshake(d, Deviations()); }
  void handshake(Dialled& d, const Deviations& odd) {
    d.connection = dial();
    auto gate = d.connection->bootstrap().castAs<schema::Gate>();
    std::uint32_t version = kProtocolVersion;
    if (!odd.skip_hello) {
      auto request = gate.helloRequest();
      auto hello = request.initHello();
      hello.setVersion(odd.version);
      hello.setOldestVersion(odd.oldest);
      hello.setCluster("cluster");
      write(d.self.member, hello.initMember());
      write(d.self.incarnation, hello.initIncarnation());
      hello.setNonce(kj::arrayPtr(d.self.nonce.data(), odd.nonce_bytes));
      auto response = request.send().wait(loop_.wait_scope());
      d.refused = response.getRefused().cStr();
      if (!d.refused.empty()) return;
      auto welcome = response.getWelcome();
      version = welcome.getVersion();
      read(welcome.getMember(), d.acceptor.member);
      d.acceptor.incarnation = read(welcome.getIncarnation());
      auto nonce = welcome.getNonce();
      ASSERT_EQ(nonce.size(), kNonceBytes);
      std::copy(nonce.begin(), nonce.end(), d.acceptor.nonce.begin());
    }
    auto mac = prove(derive_key(kSecret), odd.reflect ? Role::acceptor : Role::dialer, version,
                     "cluster", d.self, d.acceptor);
    auto request = gate.proveRequest();
    request.setMac(kj::arrayPtr(mac.data(), odd.cut_mac ? mac.size() - 1 : mac.size()));
    auto response = request.send().wait(loop_.wait_scope());
    d.refused = response.getRefused().cStr();
    if (response.hasLink()) d.link = response.getLink();
  }

  std::string refusal_of(const Deviations& odd,
                         const Party& self = {{"test", "b"}, incarnation(2), {}}) {
    Dialled d;
    d.self = self;
    handshake(d, odd);
    EXPECT_TRUE(d.link == nullptr);
    EXPECT_FALSE(d.refused.empty());
    EXPECT_TRUE(a_->handler.has_refusal(d.refused));
    return d.refused;
  }

  kj::Promise<void> send(Dialled& d, const crdt::Message& message) {
    auto request = KJ_ASSERT_NONNULL(d.link).sendRequest();
    std::string error;
    EXPECT_TRUE(encode(message, request.initMessage(), error)) << error;
    return request.send().ignoreResult();
  }
};

}  // namespace weir::rpc::test
