#include <weir/rpc/client/node_client.h>

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <optional>
#include <thread>

#include <weir/node/access/access_file.h>
#include <weir/node/fronts/capnp/capnp_front.h>
#include <weir/node/fronts/capnp/test_service.h>
#include <weir/rpc/net/test_util.h>
#include <weir/rpc/net/tls_test_util.h>

namespace weir::rpc {
namespace {

using Clock = std::chrono::steady_clock;

/// Allows below 100 hits, names the rule after the domain; can be made to answer late or never.
class Handler : public node::test::ServiceHandler {
 public:
  explicit Handler(EventLoop& loop) : loop_(loop) {}
  kj::Promise<void> check(std::span<const weir::Request> requests,
                          std::span<Reply> replies) override {
    ++calls;
    seen += requests.size();
    for (std::size_t i = 0; i < requests.size(); ++i) {
      Status status;
      status.rule = std::string(requests[i].domain);
      status.limit = requests[i].hits;
      status.allowed = replies[i].allowed = requests[i].hits < 100;
      status.retry_after = status.allowed ? 0 : kNever;
      status.delay = status.allowed ? 7 : 0;
      replies[i].deciding = 0;
      replies[i].statuses = {status};
    }
    if (mute) return kj::NEVER_DONE;
    for (const weir::Request& request : requests) {
      if (slow_domain && request.domain == "slow") {
        return loop_.timer().afterDelay(1 * kj::SECONDS);
      }
    }
    if (int ms = delay_ms; ms > 0) return loop_.timer().afterDelay(ms * kj::MILLISECONDS);
    return kj::READY_NOW;
  }
  kj::Promise<void> reserve(const weir::Request& request, Nanos timeout,
                            ReserveReply& reply) override {
    reply.decision.allowed = request.hits < 10;
    reply.decision.repeated = request.id == "again";
    if (reply.decision.allowed) reply.ticket = std::to_string(timeout);
    if (mute) return kj::NEVER_DONE;
    return kj::READY_NOW;
  }
  kj::Promise<void> settle(std::string_view ticket, std::uint64_t hits,
                           SettleReply& reply) override {
    reply.settled = ticket == "good";
    reply.reserved = hits + 1;
    reply.lapsed = reply.degraded = hits == 3;
    if (mute) return kj::NEVER_DONE;
    return kj::READY_NOW;
  }
  kj::Promise<void> lease(const weir::Request& request, const LeaseTerms& terms,
                          LeaseReply& reply) override {
    reply.decision.allowed = true;
    reply.ticket = "lease";
    reply.hits = request.hits == 99 ? terms.most + 1 : terms.most;
    reply.term = terms.term;
    return kj::READY_NOW;
  }
  std::string status_json() override { return R"({"ok":true})"; }

  std::atomic<int> calls{0};
  std::atomic<std::size_t> seen{0};
  std::atomic<bool> mute{false};
  std::atomic<bool> slow_domain{false};
  std::atomic<int> delay_ms{0};

 private:
  EventLoop& loop_;
};

/// A server in a thread of its own.
class ServerThread {
 public:
  explicit ServerThread(std::uint16_t port = 0, node::CapnpLimits limits = {},
                        std::shared_ptr<TlsContext> tls = nullptr, node::Access* access = nullptr) {
    std::promise<void> ready;
    thread_ = std::thread([&, port, limits, access] {
      EventLoop loop;
      Handler handler(loop);
      node::test::TestService service(handler);
      node::CapnpFront server(loop, service, limits, tls, access);
      std::string error;
      EXPECT_TRUE(server.start("127.0.0.1:" + std::to_string(port), Sharing::alone, error))
          << error;
      loop_ = &loop;
      front_ = &server;
      handler_ = &handler;
      port_ = server.port();
      ready.set_value();
      loop.run();
    });
    ready.get_future().wait();
  }
  ~ServerThread() {
    loop_->stop();
    thread_.join();
  }
  std::uint16_t port() const { return port_; }
  std::string address() const { return "127.0.0.1:" + std::to_string(port_); }
  Handler& handler() { return *handler_; }
  void drain() {
    loop_->post([this] { front_->drain(); });
  }

 private:
  EventLoop* loop_ = nullptr;
  node::CapnpFront* front_ = nullptr;
  Handler* handler_ = nullptr;
  std::uint16_t port_ = 0;
  std::thread thread_;
};

NodeClientOptions patient(const std::string& address) {
  NodeClientOptions out;
  out.address = address;
  out.deadline = 20 * kSecond;
  out.status_deadline = 20 * kSecond;
  out.backoff_min = 5 * kMillisecond;
  out.backoff_max = 20 * kMillisecond;
  return out;
}

CheckItem item(std::uint64_t hits, const std::string& domain = "api") {
  return {domain, {{"key", "value"}}, hits};
}

bool wait_for(const std::function<bool()>& condition) {
  auto end = Clock::now() + test::kPatience;
  while (!condition()) {
    if (Clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return true;
}

TEST(Client, ChecksOneAndMany) {
  ServerThread server;
  NodeClient client(patient(server.address()));
  Reply reply = client.check(item(1));
  EXPECT_EQ(reply.error.to_string(), "");
  EXPECT_TRUE(reply.allowed);
  ASSERT_NE(reply.decider(), nullptr);
  EXPECT_EQ(reply.decider()->rule, "api");

  std::vector<CheckItem> items;
  for (std::uint64_t i = 0; i < 3000; ++i) items.push_back(item(i));  // more than one message takes
  auto replies = client.check(items);
  ASSERT_EQ(replies.size(), items.size());
  for (std::uint64_t i = 0; i < replies.size(); ++i) {
    EXPECT_EQ(replies[i].error.to_string(), "");
    EXPECT_EQ(replies[i].allowed, i < 100);
    ASSERT_EQ(replies[i].statuses.size(), 1u);
    EXPECT_EQ(replies[i].statuses[0].limit, i);
    EXPECT_EQ(replies[i].statuses[0].retry_after, i < 100 ? 0 : kNever);
    EXPECT_EQ(replies[i].delay(), i < 100 ? 7 : 0);
  }
  EXPECT_EQ(server.handler().seen, 3001u);
  EXPECT_TRUE(client.check(std::span<const CheckItem>{}).empty());
}

TEST(Client, IsToldToGoByAServerThatDrains) {
  for (int round = 0; round < 10; ++round) {
    auto server = std::make_unique<ServerThread>();
    server->handler().delay_ms = round % 3;
    const auto options = patient(server->address());
    std::vector<std::unique_ptr<NodeClient>> clients;
    for (int i = 0; i < 3; ++i) clients.push_back(std::make_unique<NodeClient>(options));
    std::atomic<std::size_t> answered{0};
    std::vector<std::thread> threads;
    for (const auto& client : clients) {
      threads.emplace_back([&answered, &client] {
        for (int i = 0;; ++i) {
          const Error error = i % 5 == 4 ? client->reserve(item(1), kSecond).decision.error
                                         : client->check(item(1)).error;
          if (error.empty()) {
            ++answered;
            continue;
          }
          // What was sent and not answered was surely not begun.
          EXPECT_EQ(error.kind, ErrorKind::unavailable) << error.to_string();
          break;
        }
      });
    }
    const NodeClient silent(options);
    EXPECT_TRUE(wait_for([&] { return answered >= 30 && silent.connected(); }));
    server->drain();
    for (std::thread& thread : threads) thread.join();
    EXPECT_TRUE(wait_for([&] { return !silent.connected(); }));
  }
}

TEST(Client, ReservesAndSettles) {
  ServerThread server;
  auto options = patient(server.address());
  {
    NodeClient client(options);
    CheckItem wanted = item(5);
    wanted.id = "again";
    ReserveReply reply = client.reserve(wanted, 77);
    EXPECT_EQ(reply.decision.error.to_string(), "");
    EXPECT_TRUE(reply.decision.allowed);
    EXPECT_TRUE(reply.decision.repeated);
    EXPECT_EQ(reply.ticket, "77");
    reply = client.reserve(item(50), 77);
    EXPECT_FALSE(reply.decision.allowed);
    EXPECT_FALSE(reply.decision.repeated);
    EXPECT_EQ(reply.ticket, "");
    wanted.id.assign(kMaxRequestId + 1, 'x');
    EXPECT_EQ(client.reserve(wanted, 77).decision.error.to_string(), "invalid: id is too long");
    EXPECT_EQ(client.check(wanted).error.to_string(), "invalid: id is too long");

    EXPECT_EQ(client.settle("good", 3), (SettleReply{{}, true, 4, true, true}));
    EXPECT_EQ(client.settle("other", 1), (SettleReply{{}, false, 2, false, false}));
    EXPECT_EQ(client.settle(std::string(kMaxTicket + 1, 'x'), 1).error.to_string(),
              "invalid: ticket is too long");
  }
  options.deadline = 20 * kMillisecond;
  server.handler().mute = true;
  NodeClient client(options);
  ASSERT_TRUE(wait_for([&] { return client.connected(); }));
  EXPECT_EQ(client.reserve(item(5), 77).decision.error.to_string(), "deadline: no answer in time");
  EXPECT_EQ(client.settle("good", 3).error.to_string(), "deadline: no answer in time");
  EXPECT_EQ(client.check(item(5)).error.to_string(), "deadline: no answer in time");
  // All three missed, so nothing more is sent for a while.
  EXPECT_TRUE(client.reserve(item(5), 77).decision.error.surely_not_counted());
  EXPECT_EQ(client.settle("good", 3).error.to_string().find("unavailable: circuit open"), 0u);
  NodeClient nobody(patient("127.0.0.1:1"));
  EXPECT_EQ(nobody.reserve(item(5), 77).decision.error.to_string().find("unavailable: "), 0u);
  EXPECT_EQ(nobody.settle("good", 3).error.to_string().find("unavailable: "), 0u);
}

TEST(Client, StatusAndItsErrors) {
  std::uint16_t port = 0;
  {
    ServerThread server;
    port = server.port();
    NodeClient client(patient(server.address()));
    Error error{ErrorKind::unknown, "stale"};
    EXPECT_EQ(client.status(&error), R"({"ok":true})");
    EXPECT_TRUE(error.empty());
  }
  auto options = patient("127.0.0.1:" + std::to_string(port));
  NodeClient client(options);
  Error error;
  EXPECT_EQ(client.status(&error), "");
  EXPECT_EQ(error.kind, ErrorKind::unavailable) << error.detail;
  EXPECT_EQ(client.status(), "");

  test::DeafServer deaf;
  options = patient(deaf.address());
  options.status_deadline = 20 * kMillisecond;
  NodeClient waiting(options);
  EXPECT_EQ(waiting.status(&error), "");
  EXPECT_EQ(error.kind, ErrorKind::deadline);
}

TEST(Client, ShowsItsTokenBeforeAnythingElse) {
  const std::string token = node::make_token();
  node::Access access;
  access.replace(node::parse_access("tokens: [{name: gate, hash: '" +
                                        node::to_string(node::hash_token(token)) +
                                        "', check: all}]",
                                    "access")
                     .table);
  ServerThread server(0, {}, nullptr, &access);
  NodeClientOptions options;
  options.address = server.address();
  options.deadline = options.status_deadline = 5 * kSecond;
  options.token = token;
  NodeClient known(options);
  EXPECT_EQ(known.check(item(1)).error.to_string(), "");
  options.token += "x";
  NodeClient unknown(options);
  EXPECT_EQ(unknown.check(item(1)).error.to_string(),
            "unavailable: unauthenticated: the token is not known");
  EXPECT_GE(access.denials(1, node::DenialReason::unknown), 1u);
}

TEST(Client, ConcurrentCallersShareMessages) {
  ServerThread server;
  NodeClient client(patient(server.address()));
  ASSERT_EQ(client.check(item(1)).error.to_string(), "");
  server.handler().delay_ms = 2;  // so that requests gather behind those in flight
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 50; ++i) {
        std::string domain = std::to_string(t) + "." + std::to_string(i);
        Reply reply = client.check(item(1, domain));
        if (!reply.error.empty() || reply.statuses.size() != 1 ||
            reply.statuses[0].rule != domain) {
          ++wrong;
        }
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(server.handler().seen, 401u);
}

TEST(Client, RequestsGatherIntoOneCall) {
  ServerThread server;
  NodeClient client(patient(server.address()));
  ASSERT_EQ(client.check(item(1)).error.to_string(), "");
  server.handler().delay_ms = 5;
  int before = server.handler().calls;
  std::vector<std::future<std::vector<Reply>>> answers;
  for (int i = 0; i < 2000; ++i) answers.push_back(client.check_async({item(1)}));
  for (auto& answer : answers) EXPECT_EQ(answer.get()[0].error.to_string(), "");
  EXPECT_LT(server.handler().calls - before, 1000);
}

TEST(Client, WhatGoesApartDelaysNobody) {
  ServerThread server;
  NodeClient client(patient(server.address()));
  ASSERT_EQ(client.check(item(1)).error.to_string(), "");
  server.handler().slow_domain = true;
  CheckItem slow = item(1, "slow");
  slow.isolated = true;
  auto later = client.check_async({slow});
  auto start = Clock::now();
  for (int i = 0; i < 10; ++i)
    EXPECT_EQ(client.check_async({item(1)}).get()[0].error.to_string(), "");
  EXPECT_NE(later.wait_for(std::chrono::seconds(0)), std::future_status::ready);
  EXPECT_LT(Clock::now() - start, std::chrono::milliseconds(900));
  EXPECT_EQ(later.get()[0].error.to_string(), "");
  EXPECT_GE(Clock::now() - start, std::chrono::milliseconds(900));
}

TEST(Client, WrongRequestsAreToldApartAndTheOthersAnswered) {
  ServerThread server;
  NodeClient client(patient(server.address()));
  std::vector<CheckItem> items(4, item(1));
  items[0].domain.assign(kMaxText + 1, 'x');
  items[1].entries.resize(kMaxEntries + 1);
  items[2].entries[0].second.assign(kMaxText + 1, 'x');
  auto replies = client.check(items);
  EXPECT_NE(replies[0].error.to_string().find("domain is too long"), std::string::npos);
  EXPECT_NE(replies[1].error.to_string().find("too many descriptor entries"), std::string::npos);
  EXPECT_NE(replies[2].error.to_string().find("entry is too long"), std::string::npos);
  EXPECT_EQ(replies[3].error.to_string(), "");
  EXPECT_EQ(server.handler().seen, 1u);
  EXPECT_NE(client.check(items[0]).error.to_string(), "") << "with nothing left to send";
}

TEST(Client, LargeTextIsSplitOverMessages) {
  ServerThread server;
  NodeClient client(patient(server.address()));
  CheckItem large = item(1);
  large.entries.assign(kMaxEntries, {std::string(kMaxText, 'k'), std::string(kMaxText, 'v')});
  std::vector<CheckItem> items(40, large);  // 20 MiB
  for (const auto& reply : client.check(items)) EXPECT_EQ(reply.error.to_string(), "");
}

TEST(Client, NobodyThere) {
  std::uint16_t port;
  {
    test::DeafServer gone;
    port = gone.port();
  }
  auto options = patient("127.0.0.1:" + std::to_string(port));
  options.backoff_min = options.backoff_max = kMinute;
  NodeClient client(options);
  std::string error = client.check(item(1)).error.to_string();
  EXPECT_EQ(error.find("unavailable: "), 0u) << error;
  auto start = Clock::now();
  error = client.check(item(1)).error.to_string();  // known to be down: fails at once
  EXPECT_NE(error.find("Connection refused"), std::string::npos) << error;
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(10));
  EXPECT_FALSE(client.connected());
}

TEST(Client, AWrongAddressIsAnError) {
  NodeClient client(patient("not an address"));
  EXPECT_NE(client.check(item(1)).error.to_string().find("expected an address"), std::string::npos);
}

TEST(Client, DeadlineAgainstAServerThatNeverAnswers) {
  test::DeafServer deaf;  // connects, and that is all
  auto options = patient(deaf.address());
  options.deadline = 30 * kMillisecond;
  options.breaker_misses = 0;
  NodeClient client(options);
  ASSERT_TRUE(wait_for([&] { return client.connected(); }));
  for (int i = 0; i < 5; ++i) {
    auto start = Clock::now();
    EXPECT_EQ(client.check(item(1)).error.to_string(), "deadline: no answer in time");
    auto took = Clock::now() - start;
    EXPECT_GE(took, std::chrono::milliseconds(30));
    EXPECT_LT(took, std::chrono::seconds(5));
  }
  EXPECT_EQ(client.check_async({item(1), item(2)}).get()[1].error.to_string(),
            "deadline: no answer in time");
}

TEST(Client, LateAnswersAreDroppedAndTheNextCallWorks) {
  ServerThread server;
  auto options = patient(server.address());
  options.deadline = 500 * kMillisecond;
  options.breaker_misses = 0;
  NodeClient client(options);
  ASSERT_TRUE(wait_for([&] { return client.check(item(1)).error.empty(); }));
  server.handler().delay_ms = 1000;
  EXPECT_EQ(client.check(item(2)).error.to_string(), "deadline: no answer in time");
  server.handler().delay_ms = 0;
  EXPECT_TRUE(wait_for([&] { return client.check(item(3)).error.empty(); }));
}

TEST(Client, ReconnectsToARestartedServer) {
  auto server = std::make_unique<ServerThread>();
  std::uint16_t port = server->port();
  NodeClient client(patient(server->address()));
  ASSERT_EQ(client.check(item(1)).error.to_string(), "");
  server.reset();
  ASSERT_TRUE(wait_for([&] { return !client.connected(); }));
  EXPECT_NE(client.check(item(1)).error.to_string(), "");
  server = std::make_unique<ServerThread>(port);
  ASSERT_TRUE(wait_for([&] { return client.check(item(1)).error.empty(); }));
}

TEST(Client, NeverSendsARequestTwice) {
  auto server = std::make_unique<ServerThread>();
  NodeClient client(patient(server->address()));
  ASSERT_EQ(client.check(item(1)).error.to_string(), "");
  std::uint16_t port = server->port();
  server->handler().mute = true;
  auto answer = client.check_async({item(1)});
  ASSERT_TRUE(wait_for([&] { return server->handler().seen == 2; }));
  server.reset();
  // It was sent: the server may have counted it.
  EXPECT_EQ(answer.get()[0].error.to_string(), "unknown: connection lost");
  ASSERT_TRUE(wait_for([&] { return !client.connected(); }));
  ServerThread next(port);
  ASSERT_TRUE(wait_for([&] { return client.connected(); }));
  EXPECT_EQ(client.check(item(5)).error.to_string(), "");
  EXPECT_EQ(next.handler().seen, 1u) << "only what was asked after the restart";
}

TEST(Client, CircuitOpensAndClosesAgain) {
  ServerThread server;
  auto options = patient(server.address());
  options.deadline = 300 * kMillisecond;
  options.breaker_misses = 2;
  options.breaker_open = 600 * kMillisecond;
  NodeClient client(options);
  ASSERT_TRUE(wait_for([&] { return client.check(item(1)).error.empty(); }));
  server.handler().mute = true;
  std::string error;
  ASSERT_TRUE(wait_for([&] {
    error = client.check(item(1)).error.to_string();
    return error.find("circuit open") != std::string::npos;
  })) << error;
  auto seen = server.handler().seen.load();
  EXPECT_NE(client.check(item(1)).error.to_string(), "");
  EXPECT_EQ(server.handler().seen, seen) << "an open circuit sends nothing";
  server.handler().mute = false;
  EXPECT_TRUE(wait_for([&] { return client.check(item(1)).error.empty(); }));
}

TEST(Client, AShedCallIsUnavailable) {
  node::CapnpLimits limits;
  limits.calls_per_connection = 0;
  ServerThread server(0, limits);
  NodeClient client(patient(server.address()));
  std::string error = client.check(item(1)).error.to_string();
  EXPECT_EQ(error, "overloaded: too many calls in flight on this connection");
}

TEST(Client, WhatWaitsIsBounded) {
  ServerThread server;
  auto options = patient(server.address());
  options.max_waiting = 10;
  NodeClient client(options);
  ASSERT_EQ(client.check(item(1)).error.to_string(), "");
  server.handler().mute = true;
  std::vector<CheckItem> items(8, item(1));
  auto first = client.check_async(items);
  auto second = client.check_async(items);
  EXPECT_EQ(second.get()[0].error.to_string(), "unavailable: too many requests wait for an answer");
}

TEST(Client, DestructionAnswersWhatWaits) {
  ServerThread server;
  std::future<std::vector<Reply>> answer;
  {
    NodeClient client(patient(server.address()));
    ASSERT_EQ(client.check(item(1)).error.to_string(), "");
    server.handler().mute = true;
    answer = client.check_async({item(1)});
  }
  EXPECT_EQ(answer.get()[0].error.to_string(), "unknown: client closed");
}

TEST(Client, LeasesAreBoundedByWhatWasAskedFor) {
  ServerThread server;
  NodeClient client(patient(server.address()));
  auto lease = [&](std::uint64_t hits, std::uint64_t most) {
    std::promise<LeaseReply> told;
    client.lease_async(item(hits), most, kSecond, [&](LeaseReply r) { told.set_value(r); });
    return told.get_future().get();
  };
  LeaseReply reply = lease(1, 50);
  EXPECT_EQ(reply.decision.error.to_string(), "");
  EXPECT_EQ(reply.ticket, "lease");
  EXPECT_EQ(reply.hits, 50u);
  EXPECT_EQ(reply.term, kSecond);
  EXPECT_EQ(lease(10, 3).ticket, "") << "less than the request itself";
  EXPECT_EQ(lease(99, 1000).ticket, "") << "more than was asked for";
}

TEST(Client, ACallMayHaveADeadlineOfItsOwn) {
  ServerThread server;
  auto options = patient(server.address());
  options.breaker_misses = 0;
  NodeClient client(options);
  ASSERT_EQ(client.check(item(1)).error.to_string(), "");
  server.handler().mute = true;
  std::promise<std::string> late;
  std::promise<std::string> soon;
  auto start = Clock::now();
  auto tell = [](std::promise<std::string>& told) {
    return [&told](std::vector<Reply> replies) { told.set_value(replies[0].error.to_string()); };
  };
  client.check_async({item(1)}, tell(late), start + std::chrono::milliseconds(300));
  client.check_async({item(1)}, tell(soon), start + std::chrono::milliseconds(20));
  EXPECT_EQ(soon.get_future().get(), "deadline: no answer in time");
  auto first = Clock::now() - start;
  EXPECT_EQ(late.get_future().get(), "deadline: no answer in time");
  EXPECT_GE(Clock::now() - start, std::chrono::milliseconds(300));
  EXPECT_GE(first, std::chrono::milliseconds(20));
  std::promise<std::string> past;
  client.check_async({item(1)}, tell(past), start);
  EXPECT_EQ(past.get_future().get(), "unavailable: no time is left");
}

TEST(Client, CallbacksMayThrowOrAskForTrouble) {
  ServerThread server;
  NodeClient client(patient(server.address()));
  std::promise<std::string> told;
  client.check_async({item(1)}, [&](std::vector<Reply>) {
    told.set_value(client.check(item(1)).error.to_string());
    throw std::runtime_error("from a callback");
  });
  EXPECT_NE(told.get_future().get().find("own thread"), std::string::npos);
  EXPECT_EQ(client.check(item(1)).error.to_string(), "");
}

class TlsNodeClientTest : public testing::Test {
 protected:
  TlsNodeClientTest() {
    ca_.issue("node", {"weir://demo/eu/eu-1", "127.0.0.1"});
    ca_.issue("web", {"weir://clients/web"});
    server_.emplace(0, node::CapnpLimits{}, ca_.context("node", ClientCertificate::required));
  }
  NodeClientOptions secure(const std::string& certificate) {
    NodeClientOptions out = patient(server_->address());
    out.tls = ca_.context(certificate);
    return out;
  }
  test::TestCa ca_;
  std::optional<ServerThread> server_;
};

TEST_F(TlsNodeClientTest, AsksOverTls) {
  NodeClient client(secure("web"));
  EXPECT_TRUE(client.check(item(1)).allowed);
  std::vector<CheckItem> many(1000, item(100));
  for (const Reply& reply : client.check(many)) EXPECT_EQ(reply.error.to_string(), "");
  EXPECT_EQ(client.status(), R"({"ok":true})");
  NodeClientOptions named = secure("web");
  named.tls_name = "weir://demo/eu/eu-1";
  EXPECT_TRUE(NodeClient(named).check(item(1)).allowed);
}

TEST_F(TlsNodeClientTest, SaysWhatIsWrong) {
  NodeClientOptions options = secure("web");
  options.tls_name = "weir://demo/eu/eu-2";
  options.deadline = kSecond;
  Error error = NodeClient(options).check(item(1)).error;
  EXPECT_EQ(error.kind, ErrorKind::unavailable);
  EXPECT_EQ(error.detail,
            "TLS: its certificate is of weir://demo/eu/eu-1, 127.0.0.1, expected "
            "weir://demo/eu/eu-2");
  error = NodeClient(secure("")).check(item(1)).error;
  EXPECT_EQ(error.kind, ErrorKind::unknown);
  EXPECT_EQ(error.detail, "TLS: the other side refused: certificate required");
  EXPECT_EQ(server_->handler().calls, 0);
}

// A certificate that is replaced while the client runs is shown on the next connection.
TEST_F(TlsNodeClientTest, ReadsFilesAgainWhenItConnectsAnew) {
  ca_.issue("late", {"weir://clients/late"}, test::wall_now() - 2 * kHour,
            test::wall_now() - kHour);
  NodeClient client(secure("late"));
  EXPECT_EQ(client.check(item(1)).error.detail, "TLS: the other side refused: certificate expired");
  ca_.issue("late", {"weir://clients/late"});
  EXPECT_TRUE(wait_for([&] { return client.check(item(1)).allowed; }));
}

}  // namespace
}  // namespace weir::rpc
