#include <gtest/gtest.h>

#include <future>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <weir/rpc/net/connection.h>
#include <weir/rpc/net/listener.h>
#include <weir/rpc/net/test_util.h>
#include <weir/rpc/peers/circuit.h>
#include <weir/rpc/peers/forward_wire.h>
#include <weir/rpc/peers/handshake.h>
#include <weir/rpc/peers/peers.h>
#include <weir/rpc/peers/peers_test_util.h>
#include <weir/rpc/wire.h>

// What one node asks another to decide.

namespace weir::rpc {
namespace {

using test::DialerTest;
using test::incarnation;
using test::PeersTest;

constexpr Nanos kLong = 20 * kSecond;

CheckItem item(const std::string& domain = "api") {
  CheckItem out;
  out.domain = domain;
  out.entries = {{"key", "alice"}, {"path", "/v1"}};
  out.rule_filter = {"per-key"};
  return out;
}

bool starts_with(const std::string& text, const std::string& with) {
  return text.compare(0, with.size(), with) == 0;
}

class ForwardTest : public PeersTest {
 protected:
  ~ForwardTest() noexcept override {
    a_.reset();  // tells who still waits
    b_.reset();
  }
  void go() {
    start();
    ASSERT_TRUE(both_up());
  }
  /// Has b asked; the reply goes to replies_.
  void ask(CheckItem what = item(), Nanos patience = kLong) {
    a_->network.ask(0, std::move(what), patience,
                    [this](Reply reply) { replies_.push_back(std::move(reply)); });
  }
  bool have(std::size_t replies) {
    return eventually([&] { return replies_.size() >= replies; });
  }
  bool b_was_asked(std::size_t requests) {
    return eventually([&] { return b_->handler.asked.size() >= requests; });
  }
  std::string last_error() {
    return replies_.empty() ? "no reply" : replies_.back().error.to_string();
  }

  std::vector<Reply> replies_;
};

// ---- Round trips ----

TEST_F(ForwardTest, ARequestIsDecidedByThePeer) {
  go();
  CheckItem asked = item();
  asked.hits = 7;
  asked.id = "request-1";
  asked.rule_filter = {"per-key", "per-path"};
  asked.wants_bound = true;
  asked.kind = RequestKind::report;
  asked.more = {{{{"key", "bob"}}, 3}, {{}, 0}};
  ask(asked);
  CheckItem denied = item();
  denied.hits = 100;
  ask(denied);
  ASSERT_TRUE(have(2));
  EXPECT_EQ(replies_[0], test::Recorder::reply_to(asked));
  EXPECT_EQ(replies_[1], test::Recorder::reply_to(denied));
  EXPECT_EQ(b_->handler.asked, (std::vector<CheckItem>{asked, denied}));
  EXPECT_EQ(a_->network.status(0).asked, 2u);
  EXPECT_EQ(a_->network.status(0).asking, 0u);
  EXPECT_EQ(b_->network.status(0).served, 2u);
  ASSERT_TRUE(eventually([&] { return b_->network.status(0).serving == 0; }));
}

TEST_F(ForwardTest, ReservationsAndSettlements) {
  go();
  std::optional<ReserveReply> reserved;
  a_->network.ask_reserve(0, item("costs"), 10 * kSecond, kLong,
                          [&](ReserveReply reply) { reserved = std::move(reply); });
  ASSERT_TRUE(eventually([&] { return reserved.has_value(); }));
  EXPECT_EQ(reserved->ticket, "ticket of costs");
  EXPECT_TRUE(reserved->decision.allowed);
  EXPECT_EQ(b_->handler.timeouts, (std::vector<Nanos>{10 * kSecond}));
  std::optional<SettleReply> settled;
  a_->network.ask_settle(0, reserved->ticket, 3, kLong,
                         [&](SettleReply reply) { settled = std::move(reply); });
  ASSERT_TRUE(eventually([&] { return settled.has_value(); }));
  EXPECT_EQ(*settled, (SettleReply{{}, true, 4, true, false}));
  EXPECT_EQ(b_->handler.settled[0].first, "ticket of costs");
  EXPECT_EQ(b_->handler.settled[0].second, 3u);
}

TEST_F(ForwardTest, BothDirectionsAtOnce) {
  go();
  std::size_t left = 0;
  for (int i = 0; i < 50; ++i) {
    left += 2;
    a_->network.ask(0, item("from a"), kLong, [&](const Reply& r) { left -= r.allowed; });
    b_->network.ask(0, item("from b"), kLong, [&](const Reply& r) { left -= r.allowed; });
  }
  EXPECT_TRUE(eventually([&] { return left == 0; }));
}

TEST_F(ForwardTest, WhatIsAskedInOneTurnTravelsTogetherAndInOrder) {
  go();
  constexpr std::size_t kMany = 3000;
  for (std::size_t i = 0; i < kMany; ++i) ask(item(std::to_string(i)));
  ASSERT_TRUE(have(kMany));
  ASSERT_EQ(b_->handler.asked.size(), kMany);
  for (std::size_t i = 0; i < kMany; ++i) EXPECT_EQ(b_->handler.asked[i].domain, std::to_string(i));
  EXPECT_EQ(b_->handler.calls, (std::vector<std::size_t>{1024, 1024, 952}));
}

TEST_F(ForwardTest, OrderHoldsAcrossKinds) {
  go();
  std::size_t told = 0;
  for (int i = 0; i < 60; ++i) {
    CheckItem next = item(std::to_string(i));
    if (i % 3 == 0) {
      a_->network.ask_reserve(0, next, kSecond, kLong, [&](const ReserveReply&) { ++told; });
    } else {
      a_->network.ask(0, next, kLong, [&](const Reply&) { ++told; });
    }
  }
  ASSERT_TRUE(eventually([&] { return told == 60; }));
  for (std::size_t i = 0; i < 60; ++i) EXPECT_EQ(b_->handler.asked[i].domain, std::to_string(i));
}

TEST_F(ForwardTest, MoreCallsThanMayBeInFlightWait) {
  go();
  std::size_t told = 0;
  for (int i = 0; i < 1000; ++i) {
    a_->network.ask_settle(0, std::to_string(i), 1, kLong,
                           [&](const SettleReply& reply) { told += reply.settled; });
  }
  ASSERT_TRUE(eventually([&] { return told == 1000; }));
  for (std::size_t i = 0; i < 1000; ++i) EXPECT_EQ(b_->handler.settled[i].first, std::to_string(i));
}

TEST_F(ForwardTest, LargeRequestsAreSplitOverCalls) {
  a_options_.max_asked_bytes = 16u << 20;
  go();
  CheckItem large = item();
  large.entries.assign(kMaxEntries, {std::string(kMaxText, 'k'), std::string(kMaxText, 'v')});
  large.rule_filter.assign(kMaxRuleFilter, std::string(128, 'r'));
  for (int i = 0; i < 10; ++i) ask(large);
  ASSERT_TRUE(have(10));
  for (const Reply& reply : replies_) EXPECT_EQ(reply, test::Recorder::reply_to(large));
  EXPECT_EQ(b_->handler.calls, std::vector<std::size_t>(10, 1));
}

TEST_F(ForwardTest, AHandlerThatServesNobodySaysSo) {
  class Mute final : public PeerHandler {
    void peer_up(crdt::PeerIndex, const crdt::Incarnation&) override {}
    void peer_down(crdt::PeerIndex) override {}
    kj::Promise<void> receive(crdt::PeerIndex, const crdt::Incarnation&, crdt::Message) override {
      return kj::READY_NOW;
    }
    void refused(const std::string&, const std::string&) override {}
  };
  Mute handler;
  PeerNetwork b(loop_, b_options_, handler);
  std::string error;
  ASSERT_TRUE(b.start(error)) << error;
  a_.emplace(loop_, a_options_);
  ASSERT_TRUE(eventually([&] { return a_->network.askable(0); }));
  std::vector<std::string> errors;
  a_->network.ask(0, item(), kLong, [&](const Reply& r) { errors.push_back(r.error.to_string()); });
  a_->network.ask_reserve(0, item(), kSecond, kLong, [&](const ReserveReply& r) {
    errors.push_back(r.decision.error.to_string());
  });
  a_->network.ask_settle(0, "t", 1, kLong,
                         [&](const SettleReply& r) { errors.push_back(r.error.to_string()); });
  ASSERT_TRUE(eventually([&] { return errors.size() == 3; }));
  for (const std::string& each : errors) {
    EXPECT_EQ(each, "unsupported: no rule is decided for other nodes here");
  }
}

TEST_F(ForwardTest, AHandlerThatDropsARequestLeavesItOpen) {
  go();
  b_->handler.at_once = false;
  ask();
  ASSERT_TRUE(b_was_asked(1));
  b_->handler.unanswered.clear();
  ASSERT_TRUE(have(1));
  EXPECT_TRUE(starts_with(last_error(), "unknown: ")) << last_error();
}

// ---- Deadlines ----

TEST_F(ForwardTest, EndsAtItsDeadlineAndALateAnswerIsIgnored) {
  go();
  b_->handler.at_once = false;
  const auto before = loop_.timer().now();
  ask(item(), 30 * kMillisecond);
  ask(item(), kLong);
  ASSERT_TRUE(have(1));
  EXPECT_EQ(last_error(), "deadline: no answer in time");
  EXPECT_GE(loop_.timer().now() - before, 30 * kj::MILLISECONDS);
  EXPECT_LT(loop_.timer().now() - before, 10 * kj::SECONDS);
  EXPECT_EQ(a_->network.status(0).asking, 1u);
  b_->handler.answer_all();
  ASSERT_TRUE(have(2));
  test::turn(loop_, 20);
  ASSERT_EQ(replies_.size(), 2u);
  EXPECT_EQ(last_error(), "");
  EXPECT_EQ(a_->network.status(0).ask_missed, 1u);
}

TEST_F(ForwardTest, DeadlinesComeInTheirOrderWhateverTheOrderOfAsking) {
  go();
  b_->handler.at_once = false;
  std::vector<int> ended;
  for (int i : {5, 1, 4, 2, 3}) {
    a_->network.ask(0, item(), i * 20 * kMillisecond, [&ended, i](const Reply& reply) {
      EXPECT_EQ(reply.error.to_string(), "deadline: no answer in time");
      ended.push_back(i);
    });
  }
  ASSERT_TRUE(eventually([&] { return ended.size() == 5; }));
  EXPECT_EQ(ended, (std::vector<int>{1, 2, 3, 4, 5}));
}

TEST_F(ForwardTest, WhatIsStillWaitingAtItsDeadlineWasNotCounted) {
  go();
  b_->handler.at_once = false;
  for (int i = 0; i < 300; ++i) {  // more than may be in flight
    a_->network.ask_settle(0, "t", 1, kLong, [](const SettleReply&) {});
  }
  ask(item(), 20 * kMillisecond);
  ASSERT_TRUE(have(1));
  EXPECT_EQ(last_error(), "unavailable: not sent within the deadline");
  ask(item(), 0);
  EXPECT_EQ(last_error(), "unavailable: no time is left");
  EXPECT_TRUE(b_->handler.asked.empty());
}

TEST_F(ForwardTest, APeerThatNeverAnswersIsAskedLessAndLess) {
  a_options_.ask_pause = 50 * kMillisecond;
  a_options_.ask_pause_max = 100 * kMillisecond;
  go();
  b_->handler.at_once = false;
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(a_->network.askable(0));
    ask(item(), 5 * kMillisecond);
    ask(item(), 5 * kMillisecond);  // under way together: one miss
    ASSERT_TRUE(have(static_cast<std::size_t>(2 * i + 2)));
    EXPECT_EQ(last_error(), "deadline: no answer in time");
    test::turn(loop_, 2);
  }
  EXPECT_FALSE(a_->network.askable(0));
  ask();
  EXPECT_EQ(last_error(), "unavailable: circuit open after missed deadlines");
  ASSERT_TRUE(eventually([&] { return a_->network.askable(0); }));
  replies_.clear();
  ask(item(), 5 * kMillisecond);  // the probe
  EXPECT_FALSE(a_->network.askable(0)) << "one at a time";
  ask();
  EXPECT_EQ(last_error(), "unavailable: circuit open after missed deadlines");
  ASSERT_TRUE(have(2));
  EXPECT_EQ(last_error(), "deadline: no answer in time");
  EXPECT_FALSE(a_->network.askable(0));
  ASSERT_TRUE(eventually([&] { return a_->network.askable(0); }));
  b_->handler.unanswered.clear();
  b_->handler.at_once = true;
  ask();
  ASSERT_TRUE(have(3));
  EXPECT_EQ(last_error(), "") << "a probe that is answered closes the circuit";
  EXPECT_TRUE(a_->network.askable(0));
  EXPECT_TRUE(a_->network.status(0).up) << "pings were answered all the while";
}

TEST(Circuit, OpensAfterMissesInARowAndProbes) {
  Circuit circuit({2, 10, 40});
  EXPECT_TRUE(circuit.passes(0));
  EXPECT_FALSE(circuit.begin());
  circuit.missed(0, 5, 5);
  circuit.missed(4, 6, 6);  // began before the first was missed
  EXPECT_TRUE(circuit.passes(6));
  circuit.answered();
  circuit.missed(6, 7, 7);
  EXPECT_TRUE(circuit.passes(7)) << "an answer came in between";
  circuit.missed(8, 9, 9);
  EXPECT_FALSE(circuit.passes(18));
  EXPECT_TRUE(circuit.passes(19));
  EXPECT_TRUE(circuit.begin());
  EXPECT_FALSE(circuit.passes(19)) << "a probe is under way";
  circuit.probe_failed(20);
  EXPECT_FALSE(circuit.passes(39));
  EXPECT_TRUE(circuit.passes(40));
  for (Nanos now : {100, 200, 300}) {
    EXPECT_TRUE(circuit.begin());
    circuit.probe_failed(now);
    EXPECT_FALSE(circuit.passes(now + 39));
    EXPECT_TRUE(circuit.passes(now + 40)) << "no pause is longer than the longest";
  }
  EXPECT_TRUE(circuit.begin());
  circuit.answered();
  EXPECT_TRUE(circuit.passes(340));
  EXPECT_FALSE(circuit.begin());
  Circuit never({0, 10, 40});
  for (Nanos now = 0; now < 100; ++now) never.missed(now, now, now);
  EXPECT_TRUE(never.passes(100));
}

// ---- Sessions ----

TEST_F(ForwardTest, WithoutASessionNothingIsSent) {
  a_.emplace(loop_, a_options_);
  EXPECT_FALSE(a_->network.askable(0));
  EXPECT_FALSE(a_->network.askable(5));
  ask();
  EXPECT_EQ(last_error(), "unavailable: not connected");
  std::optional<SettleReply> settled;
  a_->network.ask_settle(0, "t", 1, kLong, [&](SettleReply reply) { settled = std::move(reply); });
  EXPECT_EQ(settled->error.to_string(), "unavailable: not connected");
  EXPECT_EQ(a_->network.status(0).ask_unsent, 2u);
}

TEST_F(ForwardTest, WhatASessionLeavesUnansweredIsOpen) {
  go();
  b_->handler.at_once = false;
  ask();
  std::optional<ReserveReply> reserved;
  a_->network.ask_reserve(0, item(), kSecond, kLong,
                          [&](ReserveReply reply) { reserved = std::move(reply); });
  ASSERT_TRUE(b_was_asked(2));
  b_.reset();
  ASSERT_TRUE(have(1));
  EXPECT_EQ(last_error(), "unknown: connection lost");
  ASSERT_TRUE(reserved.has_value());
  EXPECT_EQ(reserved->decision.error.to_string(), "unknown: connection lost");
  EXPECT_EQ(a_->network.status(0).asking, 0u);
  EXPECT_EQ(a_->network.status(0).ask_failed, 2u);
  ask();
  EXPECT_EQ(last_error(), "unavailable: not connected");
  b_.emplace(loop_, b_options_);
  ASSERT_TRUE(both_up());
  ask();
  ASSERT_TRUE(have(3));
  EXPECT_EQ(last_error(), "");
}

TEST_F(ForwardTest, AFreshIncarnationEndsWhatIsUnderWay) {
  go();
  b_->handler.at_once = false;
  ask();
  ASSERT_TRUE(b_was_asked(1));
  ask();  // not sent before the session is muted
  a_->network.set_incarnation(incarnation(9));
  EXPECT_FALSE(a_->network.askable(0));
  ASSERT_TRUE(have(2));
  EXPECT_EQ(replies_[0].error.to_string(), "unknown: connection lost");
  EXPECT_EQ(replies_[1].error.to_string(), "unavailable: connection lost");
  test::turn(loop_, 5);
  EXPECT_EQ(b_->handler.asked.size(), 1u);
  b_->handler.at_once = true;
  ASSERT_TRUE(eventually([&] { return a_->network.askable(0); }));
  ask();
  ASSERT_TRUE(have(3));
  EXPECT_EQ(last_error(), "");
}

TEST_F(ForwardTest, StoppingEndsWhatIsUnderWay) {
  go();
  b_->handler.at_once = false;
  ask();
  ASSERT_TRUE(b_was_asked(1));
  ask();
  a_->network.stop();
  ASSERT_EQ(replies_.size(), 2u) << "told before stop() returns";
  EXPECT_EQ(replies_[0].error.to_string(), "unknown: this node is stopping");
  EXPECT_EQ(replies_[1].error.to_string(), "unavailable: this node is stopping");
  ask();
  EXPECT_EQ(last_error(), "unavailable: not connected");
  b_->network.stop();
  test::turn(loop_, 5);
  b_->handler.answer_all();  // has no effect
  test::turn(loop_, 5);
}

TEST_F(ForwardTest, WhoServesMayStop) {
  go();
  b_->handler.at_once = false;
  ask();
  ASSERT_TRUE(b_was_asked(1));
  b_->network.stop();
  ASSERT_TRUE(have(1));
  EXPECT_TRUE(starts_with(last_error(), "unknown: ")) << last_error();
}

TEST_F(ForwardTest, WhoServesMayStopFromInside) {
  go();
  b_->handler.on_serve = [&] { b_->network.stop(); };
  ask();
  ASSERT_TRUE(have(1));  // the answer may have left before
  ASSERT_TRUE(eventually([&] { return !a_->network.status(0).up; }));
}

TEST_F(ForwardTest, WhoIsToldMayAskAgainAndStop) {
  go();
  b_->handler.at_once = false;
  int told = 0;
  for (int i = 0; i < 3; ++i) {
    a_->network.ask(0, item(), kLong, [&](const Reply& first) {
      ++told;
      EXPECT_TRUE(starts_with(first.error.to_string(), "unknown: ")) << first.error.to_string();
      a_->network.ask(0, item(), kLong, [&](const Reply& again) {
        ++told;
        EXPECT_TRUE(again.error.surely_not_counted()) << again.error.to_string();
      });
      a_->network.stop();
    });
  }
  ASSERT_TRUE(b_was_asked(3));
  b_.reset();
  ASSERT_TRUE(eventually([&] { return told == 6; }));
  EXPECT_EQ(a_->handler.downs.size(), 1u);
  EXPECT_FALSE(a_->network.status(0).up);
}

// ---- Bounds of who asks ----

TEST_F(ForwardTest, RequestsWithoutAnAnswerAreBounded) {
  a_options_.max_asked = 10;
  go();
  b_->handler.at_once = false;
  for (int i = 0; i < 10; ++i) ask();
  EXPECT_TRUE(replies_.empty());
  EXPECT_FALSE(a_->network.askable(0));
  ask();
  EXPECT_EQ(last_error(), "overloaded: too many requests wait for an answer");
  ASSERT_TRUE(b_was_asked(10));
  b_->handler.answer_all();
  ASSERT_TRUE(have(11));
  EXPECT_TRUE(a_->network.askable(0));
  EXPECT_EQ(a_->network.status(0).asking, 0u);
}

TEST_F(ForwardTest, TheirSizeIsBounded) {
  a_options_.max_asked_bytes = 100'000;
  go();
  b_->handler.at_once = false;
  CheckItem large = item();
  large.entries.assign(10, {"key", std::string(kMaxText, 'v')});
  ask(large);
  ask(large);
  EXPECT_TRUE(replies_.empty());
  ask(large);
  EXPECT_EQ(last_error(), "overloaded: too many requests wait for an answer");
  ask();
  EXPECT_EQ(replies_.size(), 1u) << "a small one finds room";
  ASSERT_TRUE(b_was_asked(3));
  b_->handler.answer_all();
  ASSERT_TRUE(have(4));
  ask(large);
  ASSERT_TRUE(b_was_asked(4));
}

TEST_F(ForwardTest, WhatBreaksABoundIsNotSent) {
  go();
  CheckItem odd = item();
  odd.rule_filter.clear();
  ask(odd);
  EXPECT_EQ(last_error(), "invalid: no rule is named");
  odd = item(std::string(kMaxText + 1, 'd'));
  ask(odd);
  EXPECT_EQ(last_error(), "invalid: domain is longer than 4096 bytes");
  odd = item();
  odd.more.assign(kMaxDescriptors - 1, {});
  for (CheckDescriptor& each : odd.more) {
    each.entries.assign(kMaxEntries, {std::string(kMaxText, 'k'), std::string(kMaxText, 'v')});
  }
  ask(odd);
  EXPECT_EQ(last_error(), "unavailable: the request is too large for another node");
  std::optional<SettleReply> settled;
  a_->network.ask_settle(0, std::string(kMaxTicket + 1, 't'), 1, kLong,
                         [&](SettleReply reply) { settled = std::move(reply); });
  EXPECT_EQ(settled->error.to_string(), "invalid: ticket is too long");
  test::turn(loop_, 5);
  EXPECT_EQ(b_->network.status(0).served, 0u);
}

TEST_F(ForwardTest, MessagesAndRequestsDoNotTakeEachOthersRoom) {
  a_options_.max_in_flight = 4;
  a_options_.max_asked = 4;
  go();
  b_->handler.hold = true;
  for (std::uint64_t i = 0; i < 4; ++i) EXPECT_TRUE(a_->network.send(0, test::ack(i)));
  EXPECT_FALSE(a_->network.send(0, test::ack(4)));
  ask();
  ASSERT_TRUE(have(1));
  EXPECT_EQ(last_error(), "") << "messages are not answered, requests are";

  b_->handler.at_once = false;
  for (int i = 0; i < 4; ++i) ask();
  EXPECT_FALSE(a_->network.askable(0));
  ASSERT_TRUE(b_was_asked(5));
  while (!b_->handler.held.empty()) {
    b_->handler.held.front()->fulfill();
    b_->handler.held.pop_front();
  }
  ASSERT_TRUE(eventually([&] { return a_->network.status(0).in_flight == 0; }));
  b_->handler.hold = false;
  EXPECT_TRUE(a_->network.send(0, test::ack(9)));
  ASSERT_TRUE(eventually([&] { return b_->handler.received.size() == 5; }));
}

TEST_F(ForwardTest, ForAPeerThatDoesNotReadNothingPilesUp) {
  std::promise<void> thaw;
  std::promise<EventLoop*> running;
  std::thread other([&] {
    EventLoop loop;
    test::Node b(loop, b_options_);
    running.set_value(&loop);
    loop.run();
  });
  EventLoop* b_loop = running.get_future().get();
  a_options_.ask_misses = 0;
  a_options_.dead_after = kMinute;
  a_options_.max_in_flight_bytes = 200'000;
  a_options_.max_asked_bytes = 400'000;
  a_.emplace(loop_, a_options_);
  EXPECT_TRUE(eventually([&] { return a_->network.askable(0); }));
  b_loop->post([&] { thaw.get_future().wait(); });
  CheckItem large = item();
  large.entries.assign(kMaxEntries, {"key", std::string(kMaxText, 'v')});
  // The kernel takes some megabytes. Each request leaves its message behind when its time is over.
  std::size_t asked = 0;
  while (asked < 1000 && last_error() != "overloaded: too much waits to be sent") {
    ++asked;
    ask(large, 2 * kMillisecond);
    EXPECT_TRUE(have(asked));
  }
  EXPECT_EQ(last_error(), "overloaded: too much waits to be sent");
  EXPECT_FALSE(a_->network.askable(0));
  EXPECT_TRUE(a_->network.send(0, test::ack(1))) << "messages have room left";
  thaw.set_value();
  EXPECT_TRUE(eventually([&] { return a_->network.askable(0); }));
  replies_.clear();
  ask();
  EXPECT_TRUE(have(1));
  EXPECT_EQ(last_error(), "");
  b_loop->stop();
  other.join();
}

// ---- Bounds of who serves ----

/// A member that plays by its own rules asks `a`.
class OddMemberTest : public DialerTest {
 protected:
  OddMemberTest() {
    a_options_.max_served = 20;
    a_options_.max_served_bytes = 1u << 20;
    a_.reset();
    a_.emplace(loop_, a_options_);
    connect_anew();
  }
  ~OddMemberTest() noexcept override {}

  using Request = capnp::Request<schema::Link::CheckParams, schema::Link::CheckResults>;

  void connect_anew() {
    dialled_.emplace();
    handshake(*dialled_);
    EXPECT_EQ(dialled_->refused, "");
  }
  schema::Link::Client& link() { return KJ_ASSERT_NONNULL(dialled_->link); }

  /// A call whose requests `fill` makes. Its error comes to errors_, "" if it has none.
  template <typename Fill>
  void call(unsigned requests, Fill&& fill) {
    auto request = link().checkRequest();
    auto list = request.initRequests(requests);
    for (unsigned i = 0; i < requests; ++i) fill(list[i]);
    calls_->add(request.send().then([this](auto&&) { errors_.emplace_back(); },
                                    [this](kj::Exception&& e) { errors_.push_back(reason(e)); }));
  }
  void call(unsigned requests = 1) {
    call(requests, [](schema::ForwardedCheck::Builder b) { encode(item(), b); });
  }
  bool ended(std::size_t calls) {
    return eventually([&] { return errors_.size() >= calls; });
  }
  /// What is said of a request that `spoil` changed, in the middle of good ones.
  template <typename Spoil>
  std::string error_of(Spoil&& spoil) {
    auto request = link().checkRequest();
    auto list = request.initRequests(3);
    for (auto each : list) encode(item(), each);
    spoil(list[1]);
    auto response = request.send().wait(loop_.wait_scope());
    auto results = response.getResults();
    EXPECT_EQ(results.size(), 3u);
    for (capnp::uint i : {0u, 2u}) {
      Reply reply;
      EXPECT_TRUE(decode_answer(results[i], 1, reply));
      EXPECT_EQ(reply, test::Recorder::reply_to(item()));
    }
    EXPECT_EQ(results[1].getErrorKind() == schema::ErrorKind::INVALID,
              results[1].getError().size() > 0);
    return results[1].getError().cStr();
  }

  struct Ignore final : kj::TaskSet::ErrorHandler {
    void taskFailed(kj::Exception&&) override {}
  };
  std::optional<Dialled> dialled_;
  std::vector<std::string> errors_;
  Ignore ignore_;
  std::optional<kj::TaskSet> calls_{std::in_place, ignore_};
};

constexpr const char* kShedding = "shedding: too many requests of this member are being answered";

TEST_F(OddMemberTest, AFloodIsShed) {
  a_->handler.at_once = false;
  call(10);
  call(11);
  ASSERT_TRUE(ended(1));
  EXPECT_EQ(errors_[0], kShedding);
  call(10);
  call(1);
  ASSERT_TRUE(ended(2));
  EXPECT_EQ(errors_[1], kShedding);
  EXPECT_EQ(a_->network.status(0).serving, 20u);
  EXPECT_EQ(a_->network.status(0).serve_shed, 12u);
  a_->handler.answer_all();
  ASSERT_TRUE(ended(4));
  EXPECT_EQ(errors_[3], "");
  EXPECT_EQ(a_->network.status(0).serving, 0u);
  a_->handler.at_once = true;
  call(20);
  ASSERT_TRUE(ended(5));
  EXPECT_EQ(errors_[4], "");
}

TEST_F(OddMemberTest, ConnectingAnewGivesNoMoreRoom) {
  a_->handler.at_once = false;
  for (int i = 0; i < 5; ++i) {
    call(8);
    ASSERT_TRUE(eventually([&] {
      return a_->network.status(0).served + a_->network.status(0).serve_shed ==
             static_cast<std::uint64_t>(8 * i + 8);
    }));
    connect_anew();
  }
  EXPECT_EQ(a_->network.status(0).serving, 16u);
  EXPECT_EQ(a_->handler.asked.size(), 16u);
  a_->handler.answer_all();
  ASSERT_TRUE(eventually([&] { return a_->network.status(0).serving == 0; }));
}

TEST_F(OddMemberTest, GivingUpCallsGivesNoMoreRoom) {
  a_->handler.at_once = false;
  for (int i = 0; i < 50; ++i) {
    call(1);
    ASSERT_TRUE(eventually([&] {
      return a_->network.status(0).served + a_->network.status(0).serve_shed ==
             static_cast<std::uint64_t>(i + 1);
    }));
    calls_.emplace(ignore_);
  }
  EXPECT_EQ(a_->network.status(0).serving, 20u);
  EXPECT_EQ(a_->network.status(0).serve_shed, 30u);
}

TEST_F(OddMemberTest, MemoryIsBounded) {
  a_->handler.at_once = false;
  auto large = [](schema::ForwardedCheck::Builder out) {
    encode(item(), out);
    auto entries = out.getRequest().initEntries(kMaxEntries);
    for (auto entry : entries) entry.setValue(std::string(kMaxText, 'v').c_str());
  };
  for (int i = 0; i < 6; ++i) call(1, large);
  ASSERT_TRUE(ended(3));
  for (const std::string& error : errors_) EXPECT_EQ(error, kShedding);
  EXPECT_EQ(a_->network.status(0).serving, 3u);
  a_->handler.answer_all();
  ASSERT_TRUE(ended(6));
  call(1, large);
  ASSERT_TRUE(eventually([&] { return a_->network.status(0).serving == 1; }));
}

TEST_F(OddMemberTest, RequestsThatBreakABoundAreAnsweredInTheirPlace) {
  const std::string text(kMaxText + 1, 'x');
  using Builder = schema::ForwardedCheck::Builder;
  EXPECT_EQ(error_of([](Builder) {}), "");
  EXPECT_EQ(error_of([&](Builder b) { b.getRequest().setDomain(text.c_str()); }),
            "domain is longer than 4096 bytes");
  EXPECT_EQ(error_of([](Builder b) { b.getRequest().setId(std::string(129, 'x').c_str()); }),
            "id is longer than 128 bytes");
  EXPECT_EQ(error_of([](Builder b) { b.getRequest().initEntries(kMaxEntries + 1); }),
            "more than 64 descriptor entries");
  EXPECT_EQ(error_of([&](Builder b) { b.getRequest().getEntries()[0].setKey(text.c_str()); }),
            "a descriptor entry is longer than 4096 bytes");
  EXPECT_EQ(error_of([&](Builder b) { b.getRequest().getEntries()[1].setValue(text.c_str()); }),
            "a descriptor entry is longer than 4096 bytes");
  EXPECT_EQ(error_of([](Builder b) { b.getRequest().initRuleFilter(1).set(0, "per-key"); }),
            "ruleFilter is not for requests between nodes");
  EXPECT_EQ(error_of([](Builder b) { b.getRequest().initMore(kMaxDescriptors); }),
            "more than 16 descriptors");
  EXPECT_EQ(error_of([&](Builder b) {
              b.getRequest().initMore(2)[1].initEntries(1)[0].setValue(text.c_str());
            }),
            "a descriptor entry is longer than 4096 bytes");
  EXPECT_EQ(error_of([](Builder b) { b.initRules(0); }), "no rule is named");
  EXPECT_EQ(error_of([](Builder b) { b.initRules(kMaxRuleFilter + 1); }),
            "more than 64 rules are named");
  EXPECT_EQ(error_of([&](Builder b) { b.initRules(1).set(0, text.c_str()); }),
            "a rule's name is longer than 4096 bytes");
  EXPECT_EQ(a_->network.status(0).serve_malformed, 11u);
}

TEST_F(OddMemberTest, CallsThatBreakABoundFail) {
  call(kMaxRequestsPerCall + 1, [](auto) {});
  ASSERT_TRUE(ended(1));
  EXPECT_EQ(errors_[0], "more than 1024 requests in a call");

  for (Nanos timeout : {Nanos{-1}, kDay + 1}) {
    auto reserve = link().reserveRequest();
    encode(item(), reserve.initRequest());
    reserve.setTimeoutNs(timeout);
    auto reserved = reserve.send().wait(loop_.wait_scope());
    EXPECT_EQ(std::string(reserved.getResult().getError().cStr()),
              "timeout is not within 0 and a day");
  }
  auto settle = link().settleRequest();
  settle.setTicket(std::string(kMaxTicket + 1, 't').c_str());
  auto settled = settle.send().wait(loop_.wait_scope());
  EXPECT_EQ(std::string(settled.getResult().getError().cStr()), "ticket is too long");
  auto nothing = link().reserveRequest().send().wait(loop_.wait_scope());
  EXPECT_EQ(std::string(nothing.getResult().getError().cStr()), "no rule is named");
  EXPECT_TRUE(a_->handler.asked.empty());
  EXPECT_TRUE(a_->handler.settled.empty());
  EXPECT_EQ(a_->network.status(0).serving, 0u);
  call(1);  // and the session stays
  ASSERT_TRUE(ended(2));
  EXPECT_EQ(errors_[1], "");
}

TEST_F(OddMemberTest, WhatGrowsWhenItIsReadIsRefusedBefore) {
  a_options_.max_served = 8192;
  a_.reset();
  a_.emplace(loop_, a_options_);
  connect_anew();
  // Empty entries: a megabyte on the wire, seven in memory.
  call(kMaxRequestsPerCall, [](schema::ForwardedCheck::Builder out) {
    encode(item(), out);
    out.getRequest().initEntries(kMaxEntries);
  });
  ASSERT_TRUE(ended(1));
  EXPECT_EQ(errors_[0], kShedding);
  EXPECT_TRUE(a_->handler.asked.empty());
}

// ---- A peer that answers by its own rules ----

class OddServerTest : public PeersTest {
 protected:
  /// What `b` answers with. Null: it does not know the call.
  struct Answers {
    std::function<void(capnp::List<schema::CheckResult>::Builder)> check;
    std::function<void(schema::Link::ReserveResults::Builder)> reserve;
    std::function<void(schema::SettleResult::Builder)> settle;
    bool older = false;  // knows none of the calls
    bool fewer = false;  // answers one request less than it was asked
  };

  class OddLink final : public schema::Link::Server {
   public:
    explicit OddLink(Answers& answers) : answers_(answers) {}
    kj::Promise<void> ping(PingContext) override { return kj::READY_NOW; }
    kj::Promise<void> check(CheckContext context) override {
      if (answers_.older) return schema::Link::Server::check(context);
      auto requests = context.getParams().getRequests();
      auto results = context.getResults().initResults(requests.size() - answers_.fewer);
      if (answers_.check) answers_.check(results);
      return kj::READY_NOW;
    }
    kj::Promise<void> reserve(ReserveContext context) override {
      if (answers_.older) return schema::Link::Server::reserve(context);
      if (answers_.reserve) answers_.reserve(context.getResults());
      return kj::READY_NOW;
    }
    kj::Promise<void> settle(SettleContext context) override {
      if (answers_.older) return schema::Link::Server::settle(context);
      if (answers_.settle) answers_.settle(context.getResults().initResult());
      return kj::READY_NOW;
    }

   private:
    Answers& answers_;
  };

  class OddGate final : public schema::Gate::Server {
   public:
    explicit OddGate(Answers& answers) : answers_(answers) {}
    kj::Promise<void> hello(HelloContext context) override {
      auto in = context.getParams().getHello();
      read(in.getMember(), dialer_.member);
      dialer_.incarnation = read(in.getIncarnation());
      std::copy(in.getNonce().begin(), in.getNonce().end(), dialer_.nonce.begin());
      auto welcome = context.getResults().initWelcome();
      welcome.setVersion(kProtocolVersion);
      write(self_.member, welcome.initMember());
      write(self_.incarnation, welcome.initIncarnation());
      welcome.setNonce(kj::arrayPtr(self_.nonce.data(), self_.nonce.size()));
      return kj::READY_NOW;
    }
    kj::Promise<void> prove(ProveContext context) override {
      Mac mac = rpc::prove(derive_key(test::kSecret), Role::acceptor, kProtocolVersion, "cluster",
                           dialer_, self_);
      context.getResults().setMac(kj::arrayPtr(mac.data(), mac.size()));
      context.getResults().setLink(kj::heap<OddLink>(answers_));
      return kj::READY_NOW;
    }

   private:
    Answers& answers_;
    Party dialer_;
    Party self_{{"test", "b"}, incarnation(2), fresh_nonce()};
  };

  OddServerTest()
      : listener_(loop_, 4, [this](kj::Own<UvStream> stream, const Address&) {
          connection_ = kj::heap<Connection>(loop_, kj::mv(stream), kj::heap<OddGate>(answers_),
                                             ConnectionLimits{}, nullptr);
        }) {
    std::string error;
    EXPECT_TRUE(listener_.open(test::at(port_b_), error)) << error;
    a_.emplace(loop_, a_options_);
    EXPECT_TRUE(eventually([&] { return a_->network.askable(0); }));
  }
  ~OddServerTest() noexcept override { a_.reset(); }

  /// Asks two requests, and tells the error of the last one's answer.
  std::string check() {
    std::vector<Reply> replies;
    for (int i = 0; i < 2; ++i) {
      a_->network.ask(0, item(), kLong, [&](Reply r) { replies.push_back(std::move(r)); });
    }
    EXPECT_TRUE(eventually([&] { return replies.size() == 2; }));
    return replies.back().error.to_string();
  }
  std::string reserve() {
    std::optional<ReserveReply> reply;
    a_->network.ask_reserve(0, item(), kSecond, kLong,
                            [&](ReserveReply r) { reply = std::move(r); });
    EXPECT_TRUE(eventually([&] { return reply.has_value(); }));
    EXPECT_TRUE(reply->decision.error.empty() || reply->ticket.empty());
    return reply->decision.error.to_string();
  }
  std::string settle() {
    std::optional<SettleReply> reply;
    a_->network.ask_settle(0, "t", 1, kLong, [&](SettleReply r) { reply = std::move(r); });
    EXPECT_TRUE(eventually([&] { return reply.has_value(); }));
    return reply->error.to_string();
  }

  Answers answers_;
  Listener listener_;
  kj::Own<Connection> connection_;
};

TEST_F(OddServerTest, AnOlderPeerIsNotAskedAgain) {
  const char* kOlder = "unavailable: it is of an older version that decides for nobody";
  answers_.older = true;
  EXPECT_EQ(check(), kOlder);
  EXPECT_FALSE(a_->network.askable(0));
  EXPECT_EQ(a_->network.status(0).asked, 2u);
  EXPECT_EQ(reserve(), kOlder);
  EXPECT_EQ(settle(), kOlder);
  EXPECT_EQ(a_->network.status(0).asked, 2u);
  EXPECT_TRUE(a_->network.status(0).up);
}

TEST_F(OddServerTest, AnOlderPeerAskedToReserveOrSettle) {
  answers_.older = true;
  EXPECT_TRUE(starts_with(reserve(), "unavailable: "));
  EXPECT_FALSE(a_->network.askable(0));
}

TEST_F(OddServerTest, MalformedAnswersAreNone) {
  const std::string kMalformed = "unknown: malformed answer";
  const std::string text(kMaxText + 1, 'x');
  EXPECT_EQ(check(), "");
  answers_.fewer = true;
  EXPECT_EQ(check(), kMalformed);
  answers_.fewer = false;
  answers_.check = [](auto results) { results[1].initStatuses(2); };
  EXPECT_EQ(check(), kMalformed) << "one rule was named";
  answers_.check = [](auto results) { results[1].setDeciding(0); };
  EXPECT_EQ(check(), kMalformed);
  answers_.check = [&](auto results) { results[1].setError(text.c_str()); };
  EXPECT_EQ(check(), kMalformed);
  answers_.check = [&](auto results) { results[1].initStatuses(1)[0].setRule(text.c_str()); };
  EXPECT_EQ(check(), kMalformed);

  EXPECT_EQ(reserve(), "");
  answers_.reserve = [](auto results) {
    results.setTicket(std::string(kMaxTicket + 1, 't').c_str());
  };
  EXPECT_EQ(reserve(), kMalformed);
  answers_.reserve = [](auto results) {
    results.setTicket("t");
    results.initResult().initStatuses(2);
  };
  EXPECT_EQ(reserve(), kMalformed);

  EXPECT_EQ(settle(), "");
  answers_.settle = [&](auto result) { result.setError(text.c_str()); };
  EXPECT_EQ(settle(), kMalformed);
  EXPECT_TRUE(a_->network.askable(0));
}

}  // namespace
}  // namespace weir::rpc
