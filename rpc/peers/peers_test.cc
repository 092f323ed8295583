#include <weir/rpc/peers/peers.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <future>
#include <optional>
#include <random>
#include <thread>

#include <weir/rpc/net/connection.h>
#include <weir/rpc/net/test_util.h>
#include <weir/rpc/net/tls_test_util.h>
#include <weir/rpc/peers/handshake.h>
#include <weir/rpc/peers/peers_test_util.h>
#include <weir/rpc/wire.h>

namespace weir::rpc {
namespace {

using test::ack;
using test::at;
using test::DialerTest;
using test::incarnation;
using test::Node;
using test::peer;
using test::PeersTest;
using test::Recorder;

TEST_F(PeersTest, MessagesArriveInOrderUnderTheProvenIncarnation) {
  start();
  ASSERT_TRUE(both_up());
  EXPECT_EQ(a_->handler.ups[0].second, incarnation(2));
  EXPECT_EQ(b_->handler.ups[0].second, incarnation(1));
  for (std::uint64_t i = 0; i < 10; ++i) EXPECT_TRUE(a_->network.send(0, ack(i)));
  EXPECT_TRUE(b_->network.send(0, ack(77)));
  ASSERT_TRUE(eventually(
      [&] { return b_->handler.received.size() == 10 && a_->handler.received.size() == 1; }));
  for (std::uint64_t i = 0; i < 10; ++i) {
    EXPECT_TRUE(b_->handler.received[i].message == ack(i));
    EXPECT_EQ(b_->handler.received[i].from, incarnation(1));
    EXPECT_EQ(b_->handler.received[i].peer, 0u);
  }
  EXPECT_TRUE(a_->handler.received[0].message == ack(77));
  ASSERT_TRUE(eventually([&] { return a_->network.status(0).in_flight == 0; }));
  EXPECT_EQ(a_->network.status(0).sent, 10u);
  EXPECT_EQ(a_->network.status(0).dropped, 0u);
  EXPECT_TRUE(a_->network.status(0).heard);
}

TEST_F(PeersTest, LargeMessagesPass) {
  start();
  ASSERT_TRUE(both_up());
  crdt::DigestOffer offer;
  offer.groups.resize(crdt::kMaxOfferGroups);
  EXPECT_TRUE(a_->network.send(0, offer));
  ASSERT_TRUE(eventually([&] { return b_->handler.received.size() == 1; }));
  EXPECT_TRUE(b_->handler.received[0].message == crdt::Message(offer));
}

TEST_F(PeersTest, WithoutASessionMessagesAreDropped) {
  a_.emplace(loop_, a_options_);
  EXPECT_FALSE(a_->network.send(0, ack(1)));
  EXPECT_FALSE(a_->network.send(5, ack(1)));
  EXPECT_EQ(a_->network.status(0).dropped, 1u);
  ASSERT_TRUE(eventually([&] { return !a_->network.status(0).last_error.empty(); }));
  EXPECT_NE(a_->network.status(0).last_error.find("refused"), std::string::npos);
  EXPECT_TRUE(a_->handler.refusals.empty()) << "a node that is away refuses nobody";
}

TEST_F(PeersTest, OutOfBoundsMessagesAreNotSent) {
  start();
  ASSERT_TRUE(both_up());
  crdt::DigestOffer offer;
  offer.groups.resize(crdt::kMaxOfferGroups + 1);
  EXPECT_FALSE(a_->network.send(0, offer));
  EXPECT_EQ(a_->network.status(0).dropped, 1u);
  EXPECT_EQ(a_->network.status(0).in_flight, 0u);
  EXPECT_NE(a_->network.status(0).last_error.find("too many groups"), std::string::npos);
}

TEST_F(PeersTest, ReconnectsAfterThePeerRestarts) {
  start();
  ASSERT_TRUE(both_up());
  b_.reset();
  ASSERT_TRUE(eventually([&] { return a_->handler.downs.size() == 1; }));
  EXPECT_FALSE(a_->network.status(0).up);
  b_options_.incarnation = incarnation(3);
  b_.emplace(loop_, b_options_);
  ASSERT_TRUE(both_up());
  EXPECT_EQ(a_->handler.ups.back().second, incarnation(3));
  EXPECT_TRUE(a_->network.send(0, ack(1)));
  EXPECT_TRUE(b_->network.send(0, ack(2)));
  ASSERT_TRUE(eventually(
      [&] { return b_->handler.received.size() == 1 && a_->handler.received.size() == 1; }));
  EXPECT_EQ(a_->handler.received[0].from, incarnation(3));
}

TEST_F(PeersTest, InFlightIsBoundedByCountAndRecovers) {
  a_options_.max_in_flight = 4;
  start();
  ASSERT_TRUE(both_up());
  b_->handler.hold = true;
  for (std::uint64_t i = 0; i < 4; ++i) EXPECT_TRUE(a_->network.send(0, ack(i)));
  EXPECT_FALSE(a_->network.send(0, ack(4)));
  EXPECT_EQ(a_->network.status(0).in_flight, 4u);
  EXPECT_EQ(a_->network.status(0).dropped, 1u);
  ASSERT_TRUE(eventually([&] { return b_->handler.held.size() == 4; }));
  EXPECT_FALSE(a_->network.send(0, ack(5))) << "received is not yet answered";
  b_->handler.held.front()->fulfill();
  ASSERT_TRUE(eventually([&] { return a_->network.status(0).in_flight == 3; }));
  EXPECT_TRUE(a_->network.send(0, ack(6)));
}

TEST_F(PeersTest, InFlightIsBoundedBySize) {
  a_options_.max_in_flight_bytes = 100'000;
  start();
  ASSERT_TRUE(both_up());
  b_->handler.hold = true;
  crdt::DigestOffer offer;
  offer.groups.resize(3000);
  int sent = 0;
  while (sent < 100 && a_->network.send(0, offer)) ++sent;
  EXPECT_GE(sent, 1);
  EXPECT_LE(sent, 2);
  // One that is larger than the bound passes alone.
  ASSERT_TRUE(eventually([&] { return b_->handler.held.size() == static_cast<size_t>(sent); }));
  while (!b_->handler.held.empty()) {
    b_->handler.held.front()->fulfill();
    b_->handler.held.pop_front();
  }
  ASSERT_TRUE(eventually([&] { return a_->network.status(0).in_flight_bytes == 0; }));
  offer.groups.resize(20000);
  EXPECT_TRUE(a_->network.send(0, offer));
}

TEST_F(PeersTest, AFreshIncarnationMakesNewSessions) {
  start();
  ASSERT_TRUE(both_up());
  auto a_ups = a_->handler.ups.size();
  a_->network.set_incarnation(incarnation(9));
  EXPECT_FALSE(a_->network.send(0, ack(1))) << "nothing may be sent under the old one";
  ASSERT_TRUE(eventually([&] {
    return a_->handler.ups.size() > a_ups && !b_->handler.ups.empty() &&
           b_->handler.ups.back().second == incarnation(9) && both_up();
  }));
  EXPECT_EQ(a_->handler.downs.size(), 1u);
  ASSERT_TRUE(eventually([&] {
    a_->network.send(0, ack(2));
    return !b_->handler.received.empty();
  }));
  EXPECT_EQ(b_->handler.received.back().from, incarnation(9));
}

TEST_F(PeersTest, AFreshIncarnationFromInsideReceive) {
  start();
  ASSERT_TRUE(both_up());
  bool done = false;
  b_->handler.on_receive = [&] {
    if (!std::exchange(done, true)) b_->network.set_incarnation(incarnation(12));
  };
  a_->network.send(0, ack(1));
  ASSERT_TRUE(eventually([&] {
    return !a_->handler.ups.empty() && a_->handler.ups.back().second == incarnation(12) &&
           both_up();
  }));
}

TEST_F(PeersTest, AFreshIncarnationFromInsidePeerUp) {
  a_.emplace(loop_, a_options_);
  bool done = false;
  a_->handler.on_up = [&] {
    if (!std::exchange(done, true)) a_->network.set_incarnation(incarnation(13));
  };
  b_.emplace(loop_, b_options_);
  ASSERT_TRUE(eventually([&] {
    return !b_->handler.ups.empty() && b_->handler.ups.back().second == incarnation(13) &&
           both_up();
  }));
}

TEST_F(PeersTest, StopFromInsideReceive) {
  start();
  ASSERT_TRUE(both_up());
  b_->handler.on_receive = [&] { b_->network.stop(); };
  a_->network.send(0, ack(1));
  ASSERT_TRUE(eventually([&] { return b_->handler.downs.size() == 1; }));
  ASSERT_TRUE(eventually([&] { return !a_->network.status(0).up; }));
  EXPECT_FALSE(b_->network.send(0, ack(1)));
}

TEST_F(PeersTest, StopDropsWhatTheHandlerHolds) {
  start();
  ASSERT_TRUE(both_up());
  b_->handler.hold = true;
  a_->network.send(0, ack(1));
  ASSERT_TRUE(eventually([&] { return b_->handler.held.size() == 1; }));
  b_->network.stop();
  test::turn(loop_, 5);
  EXPECT_FALSE(b_->handler.held[0]->isWaiting());
  ASSERT_TRUE(eventually([&] { return a_->handler.downs.size() == 1; }));
}

TEST_F(PeersTest, ASilentPeerIsGivenUp) {
  // Nobody accepts there: the connection is made, and nothing ever answers.
  test::DeafServer deaf;
  a_options_.peers = {peer("b", deaf.port())};
  a_options_.handshake_timeout = 50 * kMillisecond;
  a_.emplace(loop_, a_options_);
  ASSERT_TRUE(eventually([&] { return !a_->network.status(0).last_error.empty(); }));
  EXPECT_NE(a_->network.status(0).last_error.find("timed out"), std::string::npos)
      << a_->network.status(0).last_error;
}

TEST_F(PeersTest, AFrozenPeerIsGivenUp) {
  std::promise<void> thaw;
  std::promise<EventLoop*> running;
  std::thread other([&] {
    EventLoop loop;
    Node b(loop, b_options_);
    running.set_value(&loop);
    loop.run();
  });
  EventLoop* b_loop = running.get_future().get();
  a_options_.ping_interval = 20 * kMillisecond;
  a_options_.dead_after = 200 * kMillisecond;
  a_.emplace(loop_, a_options_);
  EXPECT_TRUE(eventually([&] { return a_->network.status(0).up; }));
  test::turn(loop_, 400);
  EXPECT_EQ(a_->network.status(0).sessions, 1u) << "while it answers, it lives";

  b_loop->post([&] { thaw.get_future().wait(); });
  EXPECT_TRUE(eventually([&] { return a_->handler.downs.size() == 1; }));
  EXPECT_EQ(a_->network.status(0).last_error, "no answer for too long");
  thaw.set_value();
  EXPECT_TRUE(eventually([&] { return a_->network.status(0).up; }));
  b_loop->stop();
  other.join();
}

// ---- Handshakes that must be refused ----

TEST_F(PeersTest, AnotherSecretIsRefusedOnBothSides) {
  b_options_.secret = "some other secret of 16+";
  start();
  for (Recorder* side : {&a_->handler, &b_->handler}) {  // as acceptor, and as dialer
    EXPECT_TRUE(eventually([&] { return side->has_refusal(" from 127.0.0.1"); }));
    EXPECT_TRUE(eventually([&] { return side->has_refusal("refused us: wrong secret"); }));
  }
  EXPECT_TRUE(a_->handler.has_refusal("test/b at 127.0.0.1"));
  EXPECT_TRUE(a_->handler.has_refusal("test/b from 127.0.0.1"));
  EXPECT_TRUE(a_->handler.ups.empty());
  EXPECT_TRUE(b_->handler.ups.empty());
  EXPECT_FALSE(a_->network.status(0).heard);
}

// One node after the other gets the new secret, and later loses the old one: they find each other
// at each step.
TEST_F(PeersTest, ASecretIsReplacedWhileBothAreGood) {
  const std::string fresh = "the next secret of the test cluster";
  a_options_.secret = fresh;
  a_options_.previous_secret = test::kSecret;
  start();
  EXPECT_TRUE(both_up());
  EXPECT_FALSE(a_->handler.has_refusal("refused us"))
      << "it tries the other secret before it says so";
  b_.reset();
  b_options_.secret = fresh;
  b_options_.previous_secret = test::kSecret;
  b_options_.incarnation = incarnation(3);
  b_.emplace(loop_, b_options_);
  EXPECT_TRUE(both_up());
  a_.reset();
  a_options_.previous_secret.clear();
  a_options_.incarnation = incarnation(4);
  a_.emplace(loop_, a_options_);
  EXPECT_TRUE(both_up());
  b_.reset();
  b_options_.secret = test::kSecret;
  b_options_.previous_secret.clear();
  b_options_.incarnation = incarnation(5);
  b_.emplace(loop_, b_options_);
  EXPECT_TRUE(eventually([&] { return a_->handler.has_refusal("refused us: wrong secret"); }));
  EXPECT_TRUE(eventually([&] { return b_->handler.has_refusal("refused us: wrong secret"); }));
}

// ---- Mutual TLS ----

class TlsPeersTest : public PeersTest {
 protected:
  TlsPeersTest() {
    ca_.issue("a", {"weir://cluster/test/a"});
    ca_.issue("b", {"weir://cluster/test/b", "b.example"});
    a_options_.secret.clear();
    b_options_.secret.clear();
    a_options_.tls = context("a");
    b_options_.tls = context("b");
  }
  ~TlsPeersTest() noexcept override {}

  std::shared_ptr<TlsContext> context(const std::string& name, const test::TestCa* ca = nullptr) {
    TlsOptions options = (ca == nullptr ? &ca_ : ca)->options(name, ClientCertificate::required);
    options.on_failure = [this](const std::string& who, const std::string& why) {
      failures_.push_back(who + ": " + why);
    };
    return test::TestCa::make(options);
  }
  bool failed(const std::string& part) {
    return eventually([&] {
      for (const std::string& one : failures_) {
        if (one.find(part) != std::string::npos) return true;
      }
      return false;
    });
  }

  test::TestCa ca_;
  std::vector<std::string> failures_;
};

TEST_F(TlsPeersTest, ACertificateIsEnough) {
  start();
  ASSERT_TRUE(both_up());
  for (std::uint64_t i = 0; i < 10; ++i) EXPECT_TRUE(a_->network.send(0, ack(i)));
  crdt::DigestOffer offer;
  offer.groups.resize(crdt::kMaxOfferGroups);
  EXPECT_TRUE(b_->network.send(0, offer));
  ASSERT_TRUE(eventually(
      [&] { return b_->handler.received.size() == 10 && a_->handler.received.size() == 1; }));
  EXPECT_EQ(b_->handler.received[0].from, incarnation(1));
  EXPECT_TRUE(a_->handler.received[0].message == crdt::Message(offer));
  EXPECT_TRUE(failures_.empty());
}

TEST_F(TlsPeersTest, ASecretIsProvedBesidesWhereThereIsOne) {
  a_options_.secret = b_options_.secret = test::kSecret;
  start();
  EXPECT_TRUE(both_up());
  b_.reset();
  b_options_.secret = "some other secret of 16+";
  b_.emplace(loop_, b_options_);
  EXPECT_TRUE(eventually([&] { return a_->handler.has_refusal("refused us: wrong secret"); }));
}

TEST_F(TlsPeersTest, AMemberMayGoByAnotherName) {
  a_options_.peers[0].certificate = "b.example";
  start();
  EXPECT_TRUE(both_up());
}

TEST_F(TlsPeersTest, ACertificateSpeaksForItsMemberOnly) {
  // b has the key of c, a member as well, and calls itself b.
  ca_.issue("c", {"weir://cluster/test/c"});
  b_options_.tls = context("c");
  a_options_.peers.push_back(peer("c", test::free_port()));
  start();
  EXPECT_TRUE(eventually([&] {
    return a_->handler.has_refusal("test/b from 127.0.0.1") &&
           a_->handler.has_refusal(
               "its certificate is of weir://cluster/test/c, expected "
               "weir://cluster/test/b");
  }));
  EXPECT_TRUE(eventually([&] {
    return b_->handler.has_refusal("refused us: its certificate is of weir://cluster/test/c");
  }));
  // And where it answers.
  EXPECT_TRUE(failed("test/b at 127.0.0.1:" + std::to_string(port_b_) +
                     ": TLS: its certificate is of weir://cluster/test/c, expected "
                     "weir://cluster/test/b"));
  EXPECT_TRUE(failed("TLS: the other side refused: bad certificate"));
  EXPECT_TRUE(a_->handler.ups.empty());
  EXPECT_TRUE(b_->handler.ups.empty());
  EXPECT_FALSE(a_->network.status(0).heard);
}

TEST_F(TlsPeersTest, AnUnknownCaIsRefusedOnBothSides) {
  const test::TestCa other("another CA");
  other.issue("b", {"weir://cluster/test/b"});
  b_options_.tls = context("b", &other);
  start();
  EXPECT_TRUE(failed("its certificate of weir://cluster/test/b is of a CA that is unknown here"));
  EXPECT_TRUE(failed("its certificate of weir://cluster/test/a is of a CA that is unknown here"));
  EXPECT_TRUE(failed("the other side refused: unknown CA"));
  EXPECT_TRUE(eventually([&] { return a_->network.status(0).last_error.find("TLS: ") == 0; }))
      << a_->network.status(0).last_error;
  EXPECT_TRUE(a_->handler.ups.empty());
}

TEST_F(TlsPeersTest, WhoSpeaksNoTlsIsRefused) {
  a_options_.secret = b_options_.secret = test::kSecret;
  b_options_.tls = nullptr;
  start();
  EXPECT_TRUE(failed("TLS: it speaks no TLS"));
  EXPECT_TRUE(a_->handler.ups.empty());
  EXPECT_TRUE(b_->handler.ups.empty());
}

TEST_F(TlsPeersTest, SessionsOutliveNewCertificates) {
  start();
  ASSERT_TRUE(both_up());
  ca_.issue("a", {"weir://cluster/test/a"});
  std::string error;
  ASSERT_EQ(a_options_.tls->refresh(error), TlsContext::Refreshed::taken);
  EXPECT_TRUE(a_->network.send(0, ack(1)));
  EXPECT_TRUE(eventually([&] { return b_->handler.received.size() == 1; }));
  EXPECT_TRUE(a_->handler.downs.empty());
}

TEST_F(PeersTest, AnotherClusterIsRefused) {
  b_options_.cluster = "elsewhere";
  start();
  ASSERT_TRUE(
      eventually([&] { return a_->handler.has_refusal("another cluster: \"elsewhere\""); }));
  EXPECT_TRUE(a_->handler.ups.empty());
  EXPECT_TRUE(b_->handler.ups.empty());
}

TEST_F(PeersTest, AStrangerIsRefused) {
  b_options_.self = {"test", "stranger"};
  start();
  ASSERT_TRUE(eventually([&] { return a_->handler.has_refusal("test/stranger"); }));
  EXPECT_TRUE(a_->handler.has_refusal("is not a member"));
  // And the other way: who answers is not who was expected.
  ASSERT_TRUE(eventually([&] { return a_->handler.has_refusal("another member answers there"); }));
  EXPECT_TRUE(a_->handler.ups.empty());
}

TEST_F(PeersTest, ItsOwnNameIsRefused) {
  b_options_.self = {"test", "a"};
  b_options_.peers = {{{"test", "c"}, at(port_a_)}};
  start();
  ASSERT_TRUE(eventually([&] { return a_->handler.has_refusal("this node's own name"); }));
  EXPECT_TRUE(b_->handler.ups.empty());
}

TEST_F(PeersTest, ItsOwnIncarnationIsRefused) {
  b_options_.incarnation = a_options_.incarnation;
  start();
  ASSERT_TRUE(eventually([&] { return a_->handler.has_refusal("this node's own incarnation"); }));
  EXPECT_TRUE(a_->handler.ups.empty());
}

TEST_F(PeersTest, WrongOptionsAreSaid) {
  auto error_of = [&](PeerOptions o) {
    Recorder handler;
    PeerNetwork network(loop_, std::move(o), handler);
    std::string error;
    EXPECT_FALSE(network.start(error));
    return error;
  };
  auto o = a_options_;
  o.incarnation = {};
  EXPECT_NE(error_of(o).find("incarnation"), std::string::npos);
  o = a_options_;
  o.secret.clear();
  EXPECT_NE(error_of(o).find("secret"), std::string::npos);
  o = a_options_;
  test::TestCa ca;
  ca.issue("a", {"weir://cluster/test/a"});
  o.tls = ca.context("a", ClientCertificate::optional);
  EXPECT_NE(error_of(o).find("must be mutual"), std::string::npos);
  o = a_options_;
  o.peers[0].address = "nowhere";
  EXPECT_NE(error_of(o).find("test/b: expected an address"), std::string::npos);
  o = a_options_;
  o.peers[0].member = o.self;
  EXPECT_NE(error_of(o).find("named twice"), std::string::npos);
  o = a_options_;
  o.listen = "127.0.0.1:x";
  EXPECT_NE(error_of(o).find("expected an address"), std::string::npos);
}

// ---- A dialler that plays by its own rules ----

TEST_F(DialerTest, AnHonestOneGetsALink) {
  Dialled d;
  handshake(d);
  EXPECT_EQ(d.refused, "");
  EXPECT_EQ(d.acceptor.member, a_options_.self);
  EXPECT_EQ(d.acceptor.incarnation, a_options_.incarnation);
  send(d, ack(4)).wait(loop_.wait_scope());
  ASSERT_EQ(a_->handler.received.size(), 1u);
  EXPECT_EQ(a_->handler.received[0].from, incarnation(2));
  test::turn(loop_, 1200);  // longer than a handshake may take: a member stays
  EXPECT_TRUE(a_->network.status(0).heard);
}

TEST_F(DialerTest, DeviationsAreRefused) {
  EXPECT_NE(refusal_of({.version = kProtocolVersion + 1, .oldest = kProtocolVersion + 1})
                .find("protocol versions"),
            std::string::npos);
  EXPECT_NE(refusal_of({.version = kOldestProtocolVersion - 1, .oldest = 0}).find("protocol"),
            std::string::npos);
  EXPECT_EQ(refusal_of({.nonce_bytes = 8}), "nonce of wrong size");
  EXPECT_EQ(refusal_of({.reflect = true}), "wrong secret");
  EXPECT_EQ(refusal_of({.cut_mac = true}), "wrong secret");
  EXPECT_EQ(refusal_of({.skip_hello = true}), "proof out of turn");
  EXPECT_EQ(refusal_of(Deviations(), {{"test", "b"}, {}, {}}), "has no incarnation");
  EXPECT_EQ(refusal_of(Deviations(), {{"test", std::string(300, 'x')}, incarnation(2), {}}),
            "name is too long");
  EXPECT_EQ(refusal_of(Deviations(), {{"test", "b\n\x01"}, incarnation(2), {}}),
            "is not a member of this cluster");
  for (const auto& r : a_->handler.refusals) {
    for (char c : r) EXPECT_TRUE(c >= 0x20 && c <= 0x7e) << r;
  }
}

TEST_F(DialerTest, ANewerVersionThatStillSpeaksOursIsTaken) {
  Dialled d;
  handshake(d, {.version = kProtocolVersion + 5});
  EXPECT_EQ(d.refused, "");
  EXPECT_FALSE(d.link == nullptr);
}

TEST_F(DialerTest, TheNewestSessionOfAMemberWins) {
  Dialled first;
  handshake(first);
  Dialled second;
  second.self.incarnation = incarnation(7);
  handshake(second);
  ASSERT_EQ(second.refused, "");
  auto over = first.connection->closed();
  over.wait(loop_.wait_scope());
  send(second, ack(1)).wait(loop_.wait_scope());
  EXPECT_EQ(a_->handler.received.back().from, incarnation(7));

  Dialled again;  // the same incarnation: a reconnect
  again.self.incarnation = incarnation(7);
  handshake(again);
  ASSERT_EQ(again.refused, "");
  second.connection->closed().wait(loop_.wait_scope());
  send(again, ack(2)).wait(loop_.wait_scope());
  EXPECT_EQ(a_->handler.received.size(), 2u);
}

TEST_F(DialerTest, OneIncarnationCannotBeTwoMembers) {
  Dialled b;
  handshake(b);
  ASSERT_EQ(b.refused, "");
  EXPECT_EQ(refusal_of(Deviations(), {{"test", "c"}, incarnation(2), fresh_nonce()}),
            "has the incarnation of test/b");
  EXPECT_TRUE(a_->network.status(0).heard);
}

TEST_F(DialerTest, MalformedMessagesAreRefusedAndTheSessionStays) {
  Dialled d;
  handshake(d);
  auto request = KJ_ASSERT_NONNULL(d.link).sendRequest();
  request.initMessage().initPush().initDelta(1);
  std::string error;
  request.send()
      .ignoreResult()
      .catch_([&](kj::Exception&& e) { error = reason(e); })
      .wait(loop_.wait_scope());
  EXPECT_EQ(error, "message refused: delta of version 0, expected 2");
  EXPECT_TRUE(a_->handler.has_refusal("message refused"));
  EXPECT_EQ(a_->network.status(0).refused, 1u);
  EXPECT_TRUE(a_->handler.received.empty());
  send(d, ack(1)).wait(loop_.wait_scope());
  EXPECT_EQ(a_->handler.received.size(), 1u);
}

TEST_F(DialerTest, StrangersAreShownOutAfterAWhile) {
  auto silent = std::make_unique<test::RawSocket>(test::local(port_a_));
  auto greeted = dial();
  auto gate = greeted->bootstrap().castAs<schema::Gate>();
  ASSERT_TRUE(eventually([&] { return silent->ended(); }));
  EXPECT_TRUE(a_->handler.has_refusal("no handshake in time"));
  greeted->closed().wait(loop_.wait_scope());
}

TEST_F(DialerTest, StrangersTakeNoMembersPlace) {
  std::vector<std::unique_ptr<test::RawSocket>> silent;
  for (int i = 0; i < 200; ++i) {
    silent.push_back(std::make_unique<test::RawSocket>(test::local(port_a_)));
  }
  Dialled d;
  handshake(d);
  EXPECT_EQ(d.refused, "");
  const auto open = [&] {
    return std::count_if(silent.begin(), silent.end(), [](auto& one) { return !one->ended(); });
  };
  ASSERT_TRUE(eventually([&] { return open() <= 64; }));
  // The youngest stay, and a member is none of them.
  EXPECT_FALSE(silent.back()->ended());
  for (int i = 0; i < 100; ++i) {
    silent.push_back(std::make_unique<test::RawSocket>(test::local(port_a_)));
  }
  send(d, ack(4)).wait(loop_.wait_scope());
  EXPECT_EQ(a_->handler.received.size(), 1u);
}

TEST_F(DialerTest, WhoHasSpokenStaysThoughNobodyHasReadItYet) {
  // All of them wait to be accepted before anything is read.
  test::RawSocket speaker(test::local(port_a_));
  ASSERT_TRUE(speaker.send({0, 0, 0, 0}));
  std::vector<std::unique_ptr<test::RawSocket>> silent;
  for (int i = 0; i < 200; ++i) {
    silent.push_back(std::make_unique<test::RawSocket>(test::local(port_a_)));
  }
  ASSERT_TRUE(eventually([&] { return silent[100]->ended(); }));
  EXPECT_FALSE(speaker.ended());
}

TEST_F(DialerTest, TwoNodesOfOneNameAreFoundOut) {
  const auto says_namesake = [&](Dialled& d) {
    return KJ_ASSERT_NONNULL(d.link).pingRequest().send().wait(loop_.wait_scope()).getNamesake();
  };
  Dialled first;
  handshake(first);
  Dialled second;  // a restart, as far as anybody knows
  second.self.incarnation = incarnation(7);
  handshake(second);
  EXPECT_FALSE(a_->network.status(0).two_of_name);
  EXPECT_FALSE(says_namesake(second));
  Dialled back;  // nobody comes back from having been replaced
  handshake(back);
  ASSERT_EQ(back.refused, "");
  EXPECT_TRUE(a_->network.status(0).two_of_name);
  EXPECT_FALSE(a_->network.status(1).two_of_name);
  EXPECT_TRUE(says_namesake(back));
  Dialled again;
  again.self.incarnation = incarnation(7);
  handshake(again);
  EXPECT_TRUE(says_namesake(again));
}

TEST_F(DialerTest, ANodeThatRestartsIsOne) {
  for (std::uint64_t boot = 2; boot < 12; ++boot) {
    Dialled d;
    d.self.incarnation = incarnation(boot);
    handshake(d);
    Dialled reconnected;
    reconnected.self.incarnation = incarnation(boot);
    handshake(reconnected);
  }
  EXPECT_FALSE(a_->network.status(0).two_of_name);
}

TEST_F(DialerTest, StrangersCannotSendLargeMessages) {
  Dialled d;
  d.connection = dial();
  auto request = d.connection->bootstrap().castAs<schema::Gate>().helloRequest();
  request.initHello().setCluster(std::string(100'000, 'x').c_str());
  bool failed = false;
  request.send()
      .ignoreResult()
      .catch_([&](kj::Exception&&) { failed = true; })
      .wait(loop_.wait_scope());
  EXPECT_TRUE(failed);
}

TEST_F(DialerTest, GarbageClosesTheConnectionOnly) {
  test::KjLog log;
  std::mt19937 random(5);
  for (int i = 0; i < 50; ++i) {
    test::RawSocket socket(test::local(port_a_));
    std::vector<unsigned char> bytes(1 + random() % 300);
    for (auto& b : bytes) b = static_cast<unsigned char>(random());
    socket.send(bytes);
    ::shutdown(socket.fd(), SHUT_WR);
    ASSERT_TRUE(eventually([&] { return socket.ended(); })) << i;
  }
  Dialled d;
  handshake(d);
  EXPECT_EQ(d.refused, "");
}

}  // namespace
}  // namespace weir::rpc
