#include <weir/node/fronts/capnp/capnp_front.h>
#include <weir/node/fronts/capnp/test_service.h>

#include <capnp/rpc.capnp.h>
#include <capnp/serialize.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <random>

#include <weir/rpc/net/connection.h>
#include <weir/rpc/net/test_util.h>
#include <weir/rpc/wire.h>

namespace weir::node {
namespace {

using namespace rpc;
using test::ServiceHandler;
namespace net = rpc::test;

class Handler : public ServiceHandler {
 public:
  kj::Promise<void> check(std::span<const weir::Request> requests,
                          std::span<Reply> replies) override {
    ++calls;
    seen += requests.size();
    for (std::size_t i = 0; i < requests.size(); ++i) {
      Reply& reply = replies[i];
      descriptors = std::max(descriptors, requests[i].descriptors());
      reply.allowed = requests[i].hits < 10;
      reply.deciding = 0;
      Status status;
      status.rule = std::string(requests[i].domain);
      if (!requests[i].id.empty()) status.rule += "#" + std::string(requests[i].id);
      for (const auto& entry : requests[i].descriptor) {
        status.rule += "|" + std::string(entry.key) + "=" + std::string(entry.value);
      }
      status.limit = requests[i].hits;
      status.allowed = reply.allowed;
      for (std::size_t n = 0; n < statuses; ++n) reply.statuses.push_back(status);
    }
    if (fail) kj::throwFatalException(KJ_EXCEPTION(FAILED, "the handler failed"));
    if (!hold) return kj::READY_NOW;
    auto paf = kj::newPromiseAndFulfiller<void>();
    held.push_back(kj::mv(paf.fulfiller));
    return kj::mv(paf.promise);
  }
  kj::Promise<void> reserve(const weir::Request& request, Nanos timeout,
                            ReserveReply& reply) override {
    reply.decision.allowed = request.hits < 10;
    reply.ticket = reply.decision.allowed
                       ? "ticket of " + std::string(request.domain) + "/" +
                             std::string(request.id) + " for " + std::to_string(timeout)
                       : "";
    return kj::READY_NOW;
  }
  kj::Promise<void> settle(std::string_view ticket, std::uint64_t hits,
                           SettleReply& reply) override {
    reply.settled = ticket == "good";
    reply.reserved = hits + 1;
    reply.lapsed = reply.degraded = hits == 3;
    return kj::READY_NOW;
  }
  std::string status_json() override { return "{\"ok\":true}"; }

  int calls = 0;
  std::size_t seen = 0;
  std::size_t descriptors = 0;
  bool hold = false;
  bool fail = false;
  std::size_t statuses = 1;
  std::deque<kj::Own<kj::PromiseFulfiller<void>>> held;
};

using Response = capnp::Response<schema::Service::CheckResults>;

class ServiceTest : public ::testing::Test {
 protected:
  ~ServiceTest() noexcept override {}
  void start(CapnpLimits limits = {}) {
    server_ = std::make_unique<CapnpFront>(loop_, service_, limits);
    std::string error;
    ASSERT_TRUE(server_->start("127.0.0.1:0", Sharing::alone, error)) << error;
  }
  kj::Own<Connection> dial() {
    auto stream =
        connect(loop_, net::local(server_->port()), 5 * kj::SECONDS).wait(loop_.wait_scope());
    return kj::heap<Connection>(loop_, kj::mv(stream), ConnectionLimits{});
  }
  static schema::Service::Client service(Connection& connection) {
    return connection.bootstrap().castAs<schema::Service>();
  }
  /// A check of `n` plain requests.
  static kj::Promise<Response> check(schema::Service::Client service, capnp::uint n = 1) {
    auto request = service.checkRequest();
    auto list = request.initRequests(n);
    for (capnp::uint i = 0; i < n; ++i) {
      list[i].setDomain("api");
      auto entries = list[i].initEntries(1);
      entries[0].setKey("key");
      entries[0].setValue("v");
      list[i].setHits(i);
    }
    return request.send();
  }
  std::string error_of(kj::Promise<Response> promise) {
    std::string out;
    promise.then([](Response&&) {}, [&](kj::Exception&& e) { out = reason(e); })
        .wait(loop_.wait_scope());
    return out;
  }
  bool eventually(const std::function<bool()>& condition) {
    return net::eventually(loop_, condition);
  }

  EventLoop loop_;
  Handler handler_;
  test::TestService service_{handler_};
  std::unique_ptr<CapnpFront> server_;
};

TEST_F(ServiceTest, RequestIds) {
  start();
  auto connection = dial();
  auto request = service(*connection).checkRequest();
  auto list = request.initRequests(2);
  list[0].setDomain("api");
  list[0].setId(std::string(kMaxRequestId, 'x').c_str());
  list[1].setDomain("api");
  list[1].setId(std::string(kMaxRequestId + 1, 'x').c_str());
  auto response = request.send().wait(loop_.wait_scope());
  Reply reply;
  ASSERT_TRUE(decode(response.getResults()[0], reply));
  EXPECT_EQ(reply.statuses.at(0).rule, "api#" + std::string(kMaxRequestId, 'x'));
  ASSERT_TRUE(decode(response.getResults()[1], reply));
  EXPECT_EQ(reply.error, (Error{ErrorKind::invalid, "id is longer than 128 bytes"}));
}

TEST_F(ServiceTest, ReservesAndSettles) {
  start();
  auto connection = dial();
  auto client = service(*connection);
  auto reserve = [&](const std::string& id, std::uint64_t hits, Nanos timeout) {
    auto request = client.reserveRequest();
    request.getRequest().setDomain("llm");
    request.getRequest().setId(id.c_str());
    request.getRequest().setHits(hits);
    request.setTimeoutNs(timeout);
    return request.send().wait(loop_.wait_scope());
  };
  EXPECT_EQ(reserve("r1", 5, 77).getTicket(), "ticket of llm/r1 for 77");
  EXPECT_TRUE(reserve("r1", 5, 77).getResult().getAllowed());
  EXPECT_FALSE(reserve("r1", 50, 77).getResult().getAllowed());
  EXPECT_EQ(reserve("r1", 5, -1).getResult().getError(), "timeout is not within 0 and a day");
  EXPECT_EQ(reserve("r1", 5, kDay + 1).getResult().getError(), "timeout is not within 0 and a day");
  EXPECT_EQ(reserve(std::string(129, 'x'), 5, 1).getResult().getError(),
            "id is longer than 128 bytes");
  auto settle = [&](const std::string& ticket, std::uint64_t hits) {
    auto request = client.settleRequest();
    request.setTicket(ticket.c_str());
    request.setHits(hits);
    return request.send().wait(loop_.wait_scope());
  };
  EXPECT_TRUE(settle("good", 3).getResult().getSettled());
  EXPECT_TRUE(settle("good", 3).getResult().getLapsed());
  EXPECT_EQ(settle("good", 3).getResult().getReserved(), 4u);
  EXPECT_FALSE(settle("other", 3).getResult().getSettled());
  EXPECT_EQ(settle(std::string(129, 'x'), 3).getResult().getError(),
            "ticket is longer than 128 bytes");
  EXPECT_EQ(server_->counters().malformed, 4u);
}

TEST_F(ServiceTest, ChecksAndStatus) {
  start();
  auto connection = dial();
  auto client = service(*connection);
  auto response = check(client, 20).wait(loop_.wait_scope());
  auto results = response.getResults();
  ASSERT_EQ(results.size(), 20u);
  for (capnp::uint i = 0; i < 20; ++i) {
    Reply reply;
    ASSERT_TRUE(decode(results[i], reply));
    EXPECT_TRUE(reply.error.empty());
    EXPECT_EQ(reply.allowed, i < 10);
    ASSERT_EQ(reply.statuses.size(), 1u);
    EXPECT_EQ(reply.statuses[0].rule, "api|key=v");
    EXPECT_EQ(reply.statuses[0].limit, i);
  }
  EXPECT_EQ(client.statusRequest().send().wait(loop_.wait_scope()).getJson(), "{\"ok\":true}");
  EXPECT_EQ(server_->counters().requests, 20u);
  EXPECT_EQ(server_->connections(), 1u);
  connection = nullptr;
  EXPECT_TRUE(eventually([&] { return server_->connections() == 0; }));
}

TEST_F(ServiceTest, MalformedRequestsAreAnsweredWithoutTheOthersSuffering) {
  start();
  auto connection = dial();
  auto request = service(*connection).checkRequest();
  auto list = request.initRequests(5);
  std::string longest(kMaxText, 'x');
  std::string too_long(kMaxText + 1, 'x');
  list[0].setDomain(too_long.c_str());
  list[1].setDomain("a");
  list[1].initEntries(kMaxEntries + 1);
  list[2].setDomain("b");
  list[2].initEntries(kMaxEntries)[63].setValue(longest.c_str());
  list[3].setDomain("c");
  list[3].initEntries(1)[0].setKey(too_long.c_str());
  list[4].setDomain("d");
  auto response = request.send().wait(loop_.wait_scope());
  auto results = response.getResults();
  ASSERT_EQ(results.size(), 5u);
  EXPECT_NE(std::string(results[0].getError().cStr()).find("domain is longer"), std::string::npos);
  EXPECT_NE(std::string(results[1].getError().cStr()).find("more than 64"), std::string::npos);
  EXPECT_EQ(results[2].getError(), "");
  EXPECT_NE(std::string(results[3].getError().cStr()).find("longer than 4096"), std::string::npos);
  EXPECT_EQ(results[4].getError(), "");
  EXPECT_EQ(std::string(results[4].getStatuses()[0].getRule().cStr()), "d");
  EXPECT_EQ(server_->counters().malformed, 3u);
}

TEST_F(ServiceTest, TooManyRequestsInACall) {
  start();
  auto connection = dial();
  auto client = service(*connection);
  EXPECT_EQ(error_of(check(client, kMaxRequestsPerCall)), "");
  EXPECT_EQ(error_of(check(client, kMaxRequestsPerCall + 1)), "more than 1024 requests in a call");
  EXPECT_EQ(handler_.calls, 1);
  EXPECT_EQ(error_of(check(client, 0)), "");
}

TEST_F(ServiceTest, CallsBeyondTheBoundAreShed) {
  CapnpLimits limits;
  limits.calls_per_connection = 2;
  limits.calls = 3;
  start(limits);
  handler_.hold = true;
  auto one = dial();
  auto two = dial();
  auto client_one = service(*one);
  auto client_two = service(*two);
  auto first = check(client_one).eagerlyEvaluate(nullptr);
  auto second = check(client_one).eagerlyEvaluate(nullptr);
  ASSERT_TRUE(eventually([&] { return handler_.held.size() == 2; }));
  EXPECT_NE(error_of(check(client_one)).find("on this connection"), std::string::npos);
  auto third = check(client_two).eagerlyEvaluate(nullptr);
  ASSERT_TRUE(eventually([&] { return handler_.held.size() == 3; }));
  EXPECT_NE(error_of(check(client_two)).find("on this server"), std::string::npos);
  EXPECT_EQ(server_->counters().shed, 2u);
  for (auto& f : handler_.held) f->fulfill();
  first.wait(loop_.wait_scope());
  second.wait(loop_.wait_scope());
  third.wait(loop_.wait_scope());
  handler_.hold = false;
  EXPECT_EQ(error_of(check(client_one)), "");
}

TEST_F(ServiceTest, HeldRequestsCountAgainstTheReadBudget) {
  CapnpLimits limits;
  limits.read_bytes = 1u << 20;
  start(limits);
  handler_.hold = true;
  auto connection = dial();
  auto client = service(*connection);
  std::vector<kj::Promise<void>> calls;
  std::string text(4000, 'x');
  std::size_t shed = 0;
  for (int i = 0; i < 20; ++i) {
    auto request = client.checkRequest();
    auto list = request.initRequests(20);
    for (auto r : list) {
      r.setDomain("d");
      r.initEntries(1)[0].setValue(text.c_str());
    }
    calls.push_back(request.send()
                        .ignoreResult()
                        .catch_([&](kj::Exception&&) { ++shed; })
                        .eagerlyEvaluate(nullptr));
  }
  ASSERT_TRUE(eventually([&] { return shed > 0 && !handler_.held.empty(); }));
  net::turn(loop_, 20);
  EXPECT_LT(handler_.held.size(), 14u);
  for (auto& f : handler_.held) f->fulfill();
  for (auto& call : calls) call.wait(loop_.wait_scope());
  handler_.hold = false;
  auto fresh = dial();  // everything was given back
  EXPECT_EQ(error_of(check(service(*fresh), 500)), "");
}

TEST_F(ServiceTest, ErrorsGoOutWithTheirKind) {
  start();
  handler_.fail = true;
  auto connection = dial();
  auto response = check(service(*connection)).wait(loop_.wait_scope());
  Reply reply;
  ASSERT_TRUE(decode(response.getResults()[0], reply));
  EXPECT_EQ(reply.error, (Error{ErrorKind::unknown, "the handler failed"}));
}

TEST_F(ServiceTest, SeveralDescriptors) {
  start();
  auto connection = dial();
  auto request = service(*connection).checkRequest();
  auto list = request.initRequests(2);
  list[0].setDomain("api");
  list[0].initMore(kMaxDescriptors - 1)[0].initEntries(1)[0].setKey("second");
  list[1].setDomain("api");
  list[1].initMore(kMaxDescriptors);
  auto response = request.send().wait(loop_.wait_scope());
  Reply reply;
  ASSERT_TRUE(decode(response.getResults()[0], reply));
  EXPECT_TRUE(reply.error.empty());
  EXPECT_EQ(handler_.descriptors, kMaxDescriptors);
  ASSERT_TRUE(decode(response.getResults()[1], reply));
  EXPECT_EQ(reply.error, (Error{ErrorKind::invalid, "more than 16 descriptors"}));
}

TEST_F(ServiceTest, WhatIsForMembersIsRefused) {
  start();
  auto connection = dial();
  auto request = service(*connection).checkRequest();
  request.initRequests(1)[0].initRuleFilter(1).set(0, "rule");
  auto response = request.send().wait(loop_.wait_scope());
  Reply reply;
  ASSERT_TRUE(decode(response.getResults()[0], reply));
  EXPECT_EQ(reply.error.kind, ErrorKind::invalid);
  EXPECT_EQ(handler_.seen, 0u);
}

TEST_F(ServiceTest, AnAnswerTooLargeToSendIsAnError) {
  start();
  handler_.statuses = 200;
  auto connection = dial();
  EXPECT_NE(error_of(check(service(*connection), 1024)).find("too large"), std::string::npos);
}

TEST_F(ServiceTest, AClientThatLeavesDoesNotDisturbItsCalls) {
  start();
  handler_.hold = true;
  auto connection = dial();
  auto call = check(service(*connection)).eagerlyEvaluate(nullptr);
  ASSERT_TRUE(eventually([&] { return handler_.held.size() == 1; }));
  connection = nullptr;
  ASSERT_TRUE(eventually([&] { return server_->connections() == 0; }));
  EXPECT_TRUE(handler_.held[0]->isWaiting()) << "a commit is not undone by a lost connection";
  handler_.held[0]->fulfill();
  net::turn(loop_, 5);
}

TEST_F(ServiceTest, CloseDropsUnfinishedCalls) {
  start();
  handler_.hold = true;
  auto connection = dial();
  auto call = check(service(*connection)).eagerlyEvaluate(nullptr);
  ASSERT_TRUE(eventually([&] { return handler_.held.size() == 1; }));
  server_->stop();
  handler_.held[0]->fulfill();
  net::turn(loop_, 5);
  EXPECT_NE(error_of(kj::mv(call)), "");
  auto port = server_->port();
  net::RawSocket late(net::local(port));
  EXPECT_FALSE(late.connected());
  server_.reset();
}

TEST_F(ServiceTest, ConnectionsAreBounded) {
  CapnpLimits limits;
  limits.max_connections = 2;
  start(limits);
  auto one = dial();
  auto two = dial();
  ASSERT_TRUE(eventually([&] { return server_->connections() == 2; }));
  net::RawSocket three(net::local(server_->port()));
  EXPECT_TRUE(eventually([&] { return three.ended(); }));
  EXPECT_EQ(server_->counters().turned_away, 1u);
  EXPECT_EQ(error_of(check(service(*one))), "");
}

TEST_F(ServiceTest, WhoSaysNothingMakesRoom) {
  CapnpLimits limits;
  limits.max_connections = 8;
  limits.evict_after = 20 * kMillisecond;
  start(limits);
  auto known = dial();
  EXPECT_EQ(error_of(check(service(*known))), "");
  std::vector<std::unique_ptr<net::RawSocket>> silent;
  for (int i = 0; i < 7; ++i) {
    silent.push_back(std::make_unique<net::RawSocket>(net::local(server_->port())));
  }
  ASSERT_TRUE(eventually([&] { return server_->connections() == 8; }));
  net::turn(loop_, 40);
  auto other = dial();
  EXPECT_EQ(error_of(check(service(*other))), "");
  EXPECT_TRUE(eventually([&] { return silent[0]->ended(); }));
  EXPECT_FALSE(silent[1]->ended());
  EXPECT_EQ(error_of(check(service(*known))), "");
  EXPECT_EQ(server_->counters().evicted, 1u);
}

TEST_F(ServiceTest, AnAddressHasItsPartOfTheConnections) {
  CapnpLimits limits;
  limits.max_connections = 4;
  limits.address_percent = 50;
  start(limits);
  auto one = dial();
  auto two = dial();
  EXPECT_EQ(error_of(check(service(*one))), "");
  EXPECT_EQ(error_of(check(service(*two))), "");
  net::RawSocket three(net::local(server_->port()));
  EXPECT_TRUE(eventually([&] { return three.ended(); }));
  EXPECT_EQ(server_->counters().turned_away, 1u);
}

// ---- Hostile bytes ----

class HostileTest : public ServiceTest {
 protected:
  ~HostileTest() noexcept override {}
  void expect_alive() {
    auto connection = dial();
    EXPECT_EQ(error_of(check(service(*connection))), "");
  }
  void expect_ended(const std::vector<unsigned char>& bytes) {
    net::RawSocket socket(net::local(server_->port()));
    ASSERT_TRUE(socket.connected());
    ASSERT_TRUE(socket.send(bytes));
    EXPECT_TRUE(eventually([&] { return socket.ended(); }));
  }
};

TEST_F(HostileTest, BadFramingEndsTheConnection) {
  start();
  expect_ended({0xff, 0xff, 0xff, 0xff, 1, 0, 0, 0});  // segment count wraps
  expect_ended({0xff, 0xff, 0xff, 0x7f, 1, 0, 0, 0});  // billions of segments
  expect_ended({0, 2, 0, 0, 1, 0, 0, 0});              // 513 segments
  expect_ended({0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff});  // 32 GiB
  expect_ended({0, 0, 0, 0, 1, 0, 0x10, 0});           // one word over the limit
  expect_ended({1, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0});
  expect_ended({0, 0, 0, 0, 0, 0, 0, 0});  // no root
  expect_ended({0, 0, 0, 0, 1, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff});
  expect_ended({'G', 'E', 'T', ' ', '/', ' ', 'H', 'T', 'T', 'P', '/', '1', '.', '1', '\r', '\n'});
  EXPECT_TRUE(eventually([&] { return server_->connections() == 0; }));
  expect_alive();
}

TEST_F(HostileTest, RandomGarbageNeverKills) {
  start();
  std::mt19937 random(11);
  for (int i = 0; i < 200; ++i) {
    net::RawSocket socket(net::local(server_->port()));
    std::vector<unsigned char> bytes(1 + random() % 400);
    for (auto& b : bytes) b = static_cast<unsigned char>(random());
    if (i % 2 == 0) {  // good framing, bad content
      std::size_t words = bytes.size() / 8;
      bytes.resize(8 + words * 8);
      std::fill(bytes.begin(), bytes.begin() + 8, 0);
      bytes[4] = static_cast<unsigned char>(words);
    }
    socket.send(bytes);
    ::shutdown(socket.fd(), SHUT_WR);
    ASSERT_TRUE(eventually([&] { return socket.ended(); })) << i;
  }
  EXPECT_TRUE(eventually([&] { return server_->connections() == 0; }));
  expect_alive();
}

/// A well-formed call with bytes of its content changed at random.
TEST_F(HostileTest, MutatedCallsNeverKill) {
  start();
  // What a client says in its first two messages, recorded.
  std::vector<unsigned char> recorded;
  {
    int fds[2];
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds), 0);
    Connection client(loop_, kj::heap<UvStream>(loop_, kj::AutoCloseFd(fds[0])),
                      ConnectionLimits{});
    auto call = check(service(client), 3).eagerlyEvaluate(nullptr);
    net::turn(loop_, 10);
    char buffer[4096];
    ssize_t n = ::recv(fds[1], buffer, sizeof buffer, MSG_DONTWAIT);
    ASSERT_GT(n, 100);
    recorded.assign(buffer, buffer + n);
    ::close(fds[1]);
  }
  std::mt19937 random(12);
  for (int i = 0; i < 300; ++i) {
    auto bytes = recorded;
    for (auto n = 1 + random() % 4; n > 0; --n) {
      bytes[8 + random() % (bytes.size() - 8)] = static_cast<unsigned char>(random());
    }
    net::RawSocket socket(net::local(server_->port()));
    socket.send(bytes);
    ::shutdown(socket.fd(), SHUT_WR);
    ASSERT_TRUE(eventually([&] { return socket.ended(); })) << i;
  }
  EXPECT_GT(handler_.calls, 0) << "some mutations are harmless";
  expect_alive();
}

std::vector<unsigned char> framed(capnp::MessageBuilder& message) {
  auto words = capnp::messageToFlatArray(message);
  auto bytes = words.asBytes();
  return {bytes.begin(), bytes.end()};
}

/// A first message, and calls of check on its answer: `requests` of no size in each.
std::vector<unsigned char> calls_of_nothing(std::uint32_t calls, std::uint32_t requests) {
  capnp::MallocMessageBuilder first;
  first.initRoot<capnp::rpc::Message>().initBootstrap().setQuestionId(0);
  std::vector<unsigned char> out = framed(first);
  for (std::uint32_t id = 1; id <= calls; ++id) {
    capnp::MallocMessageBuilder message;
    auto call = message.initRoot<capnp::rpc::Message>().initCall();
    call.setQuestionId(id);
    call.setInterfaceId(capnp::typeId<schema::Service>());
    call.initTarget().initPromisedAnswer().setQuestionId(0);
    auto list = call.initParams().getContent().initAsAnyStruct(0, 1);
    list.getPointerSection()[0].initAsAnyList(capnp::ElementSize::VOID, requests);
    auto bytes = framed(message);
    out.insert(out.end(), bytes.begin(), bytes.end());
  }
  return out;
}

TEST_F(HostileTest, CallsThatTakeNoRoomAreNotDecidedAllAtOnce) {
  struct Sized final : Service {
    void check(std::span<const weir::Request> requests, std::span<const std::size_t> parts,
               const Caller&, CheckDone done) override {
      most = std::max(most, requests.size());
      all += requests.size();
      std::vector<Reply> replies(requests.size());
      auto rest = std::span(replies);
      for (std::size_t part = 0; part < parts.size(); rest = rest.subspan(parts[part++])) {
        done(part, rest.first(parts[part]));
      }
    }
    void reserve(const weir::Request&, Nanos, const Caller&, Done<ReserveReply>) override {}
    void settle(std::string_view, std::uint64_t, const Caller&, Done<SettleReply>) override {}
    void lease(const weir::Request&, const LeaseTerms&, const Caller&, Done<LeaseReply>) override {}
    void rules(std::string_view, const Caller&, Done<RulesReply>) override {}
    void status(const Caller&, Done<StatusReply>) override {}
    std::size_t most = 0;
    std::size_t all = 0;
  } sized;
  for (std::uint32_t requests : {0u, 3u, 1024u}) {
    sized.most = sized.all = 0;
    CapnpFront front(loop_, sized);
    std::string error;
    ASSERT_TRUE(front.start("127.0.0.1:0", Sharing::alone, error)) << error;
    net::RawSocket socket(net::local(front.port()));
    ASSERT_TRUE(socket.send(calls_of_nothing(200, requests)));
    // Lists of nothing read as more than their messages may hold: then the connection ends.
    EXPECT_TRUE(eventually([&] {
      return socket.ended() || (front.counters().calls == 200 && sized.all == 200 * requests);
    }));
    EXPECT_EQ(sized.all > 0, requests > 0);
    EXPECT_LE(sized.most, 256u + 1024u);
  }
}

TEST_F(HostileTest, CallsThatArriveWhileItStops) {
  for (int i = 0; i < 20; ++i) {
    start();
    net::RawSocket socket(net::local(server_->port()));
    ASSERT_TRUE(eventually([&] { return server_->connections() == 1; }));
    ASSERT_TRUE(socket.send(calls_of_nothing(3, 1)));
    loop_.post([this] { server_->stop(); });
    EXPECT_TRUE(eventually([&] { return socket.ended(); }));
  }
}

TEST_F(HostileTest, SlowSendersAreCutOff) {
  CapnpLimits limits;
  limits.first_message = 200 * kMillisecond;
  limits.message_timeout = 200 * kMillisecond;
  start(limits);
  net::RawSocket silent(net::local(server_->port()));
  net::RawSocket slow(net::local(server_->port()));
  ASSERT_TRUE(slow.send({0, 0, 0, 0}));
  bool over = eventually([&] {
    slow.send({0});  // a byte at a time
    return silent.ended() && slow.ended();
  });
  EXPECT_TRUE(over);
  EXPECT_GE(server_->counters().timed_out, 1u);
  // One that has been served and then starts a message that it does not finish.
  auto connection = dial();
  EXPECT_EQ(error_of(check(service(*connection))), "");
  auto fd = KJ_ASSERT_NONNULL(connection->stream().getFd());
  unsigned char half[4] = {};
  ASSERT_EQ(::send(fd, half, sizeof half, MSG_NOSIGNAL), 4);
  connection->closed().wait(loop_.wait_scope());
  expect_alive();
}

TEST_F(HostileTest, AnIdleClientMayStay) {
  CapnpLimits limits;
  limits.first_message = 100 * kMillisecond;
  limits.message_timeout = 100 * kMillisecond;
  start(limits);
  auto connection = dial();
  EXPECT_EQ(error_of(check(service(*connection))), "");
  net::turn(loop_, 1300);  // two sweeps
  EXPECT_EQ(error_of(check(service(*connection))), "");
}

/// Whoever sends calls and reads no answers is no longer read from, and in the end cut off.
TEST_F(HostileTest, AClientThatDoesNotReadIsHeldBack) {
  CapnpLimits limits;
  limits.message_timeout = 300 * kMillisecond;
  start(limits);
  handler_.statuses = 20;
  std::vector<unsigned char> bytes;
  {
    int fds[2];
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds), 0);
    Connection client(loop_, kj::heap<UvStream>(loop_, kj::AutoCloseFd(fds[0])),
                      ConnectionLimits{});
    std::vector<kj::Promise<void>> calls;
    for (int i = 0; i < 1000; ++i) {
      calls.push_back(check(service(client), 20).ignoreResult().eagerlyEvaluate(nullptr));
    }
    for (int i = 0; i < 200; ++i) {
      net::turn(loop_, 1);
      std::vector<char> buffer(1u << 20);
      ssize_t n = ::recv(fds[1], buffer.data(), buffer.size(), MSG_DONTWAIT);
      if (n > 0) bytes.insert(bytes.end(), buffer.begin(), buffer.begin() + n);
    }
    ::close(fds[1]);
  }
  ASSERT_GT(bytes.size(), 1'000'000u);
  net::RawSocket socket(net::local(server_->port()));
  int small = 4096;
  ::setsockopt(socket.fd(), SOL_SOCKET, SO_RCVBUF, &small, sizeof small);
  std::size_t sent = 0;
  bool over = eventually([&] {
    while (sent < bytes.size()) {
      ssize_t n = ::send(socket.fd(), bytes.data() + sent, bytes.size() - sent,
                         MSG_NOSIGNAL | MSG_DONTWAIT);
      if (n <= 0) break;
      sent += static_cast<std::size_t>(n);
    }
    return server_->counters().timed_out == 1;
  });
  EXPECT_TRUE(over);
  EXPECT_LT(handler_.calls, 1000) << "it was read from although its answers piled up";
  expect_alive();
}

}  // namespace
}  // namespace weir::node
