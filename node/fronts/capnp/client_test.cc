#include <weir/rpc/client/client.h>

#include <gtest/gtest.h>
#include <kj/debug.h>

#include <atomic>
#include <future>
#include <map>
#include <mutex>
#include <thread>

#include <weir/limits/lease.h>
#include <weir/limits/limiter.h>
#include <weir/limits/rules/rules_text.h>
#include <weir/limits/test_util.h>
#include <weir/node/fronts/capnp/capnp_front.h>
#include <weir/node/fronts/capnp/test_service.h>
#include <weir/rpc/net/test_util.h>

namespace weir {
namespace {

using test::set;

using SteadyClock = std::chrono::steady_clock;

Rule rule(std::string name, std::uint64_t limit) {
  Rule out = test::rule(std::move(name), limit);
  out.window = kHour;
  return out;
}

Nanos wall() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

/// A limiter behind the wire, and what can go wrong with it.
class Handler : public node::test::ServiceHandler {
 public:
  Handler(rpc::EventLoop& loop, std::shared_ptr<const RuleSet> rules)
      : limiter(std::move(rules), {}), loop_(loop) {}

  kj::Promise<void> check(std::span<const Request> requests, std::span<Reply> replies) override {
    ++calls;
    if (shed) return KJ_EXCEPTION(OVERLOADED, "shedding: a test");
    for (std::size_t i = 0; i < requests.size(); ++i) {
      ++seen;
      if (unavailable) {
        replies[i].error = {ErrorKind::unavailable, "stopping"};
        continue;
      }
      Decision decision;
      limiter.check(requests[i], wall(), decision);
      replies[i] = reply_of(decision);
    }
    return answer();
  }
  kj::Promise<void> reserve(const Request& request, Nanos timeout, ReserveReply& reply) override {
    ++calls;
    Decision decision;
    Ticket ticket = limiter.reserve(request, wall(), timeout, decision);
    reply.decision = reply_of(decision);
    if (ticket) reply.ticket = std::to_string(ticket.number);
    return answer();
  }
  kj::Promise<void> settle(std::string_view ticket, std::uint64_t hits,
                           SettleReply& reply) override {
    ++calls;
    Settled settled = limiter.settle({std::stoull(std::string(ticket))}, hits, wall());
    reply.settled = settled.known;
    reply.reserved = settled.hits;
    return answer();
  }
  kj::Promise<void> lease(const Request& request, const LeaseTerms& terms,
                          LeaseReply& reply) override {
    ++calls;
    ++leases;
    Decision decision;
    Lease lease = grant_lease(limiter, request, terms, wall(), wall(), decision);
    reply.decision = reply_of(decision);
    if (lease.ticket) reply.ticket = std::to_string(lease.ticket.number);
    reply.hits = lease.hits;
    reply.term = lease.term;
    return answer();
  }
  std::string status_json() override { return "{}"; }
  std::string rules_yaml() override { return rules_text(*limiter.rules()); }

  Limiter limiter;
  std::atomic<int> calls{0};
  std::atomic<int> leases{0};
  std::atomic<int> seen{0};
  std::atomic<bool> mute{false};
  std::atomic<bool> shed{false};
  std::atomic<bool> unavailable{false};
  std::atomic<int> delay_ms{0};

 private:
  kj::Promise<void> answer() {
    if (mute) return kj::NEVER_DONE;
    if (int ms = delay_ms; ms > 0) return loop_.timer().afterDelay(ms * kj::MILLISECONDS);
    return kj::READY_NOW;
  }
  rpc::EventLoop& loop_;
  Reply reply_of(const Decision& decision) const {
    Reply reply;
    tell(decision, *limiter.rules(), reply);
    return reply;
  }
};

class Node {
 public:
  explicit Node(std::shared_ptr<const RuleSet> rules, std::uint16_t port = 0) {
    std::promise<void> ready;
    thread_ = std::thread([&, rules, port] {
      rpc::EventLoop loop;
      Handler handler(loop, rules);
      node::test::TestService service(handler);
      node::CapnpFront server(loop, service);
      std::string error;
      EXPECT_TRUE(server.start("127.0.0.1:" + std::to_string(port), rpc::Sharing::alone, error))
          << error;
      loop_ = &loop;
      handler_ = &handler;
      port_ = server.port();
      ready.set_value();
      loop.run();
    });
    ready.get_future().wait();
  }
  ~Node() {
    loop_->stop();
    thread_.join();
  }
  std::string address() const { return "127.0.0.1:" + std::to_string(port_); }
  std::uint16_t port() const { return port_; }
  Handler& operator*() { return *handler_; }
  Handler* operator->() { return handler_; }

 private:
  rpc::EventLoop* loop_ = nullptr;
  Handler* handler_ = nullptr;
  std::uint16_t port_ = 0;
  std::thread thread_;
};

bool wait_for(const std::function<bool()>& condition) {
  auto end = SteadyClock::now() + rpc::test::kPatience;
  while (!condition()) {
    if (SteadyClock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return true;
}

CheckItem item(const std::string& key, std::uint64_t hits = 1) {
  return {"api", {{"key", key}}, hits};
}

ClientOptions patient(std::vector<std::string> nodes) {
  ClientOptions out;
  out.nodes = std::move(nodes);
  out.deadline = 20 * kSecond;
  out.rules_interval = 0;
  out.connection.backoff_min = 5 * kMillisecond;
  out.connection.backoff_max = 20 * kMillisecond;
  return out;
}

std::uint64_t used(Node& node, const std::string& key) {
  std::vector<Entry> entries{{"key", key}};
  Request request;
  request.domain = "api";
  request.descriptor = entries;
  return node->limiter.used(0, request, wall());
}

TEST(WeirClient, ARequestBringsItsLimit) {
  Rule from_request = rule("r", 1000);
  from_request.limit_from_request = true;
  Node node(set({from_request}));
  Client client(patient({node.address()}));
  ASSERT_TRUE(wait_for([&] { return client.connected() == 1; }));
  CheckItem asked = item("k");
  asked.limit = {2, kMinute, 0};
  EXPECT_TRUE(client.check(asked).allowed);
  EXPECT_TRUE(client.check(asked).allowed);
  EXPECT_FALSE(client.check(asked).allowed);
  asked.limit.limit = 3;
  EXPECT_TRUE(client.check(asked).allowed);
  EXPECT_FALSE(client.check(asked).allowed);
}

TEST(WeirClient, EachKeyHasItsNodeAndAnotherOneIfThatIsDown) {
  auto rules = set({rule("r", 1000)});
  auto a = std::make_unique<Node>(rules);
  Node b(rules);
  Node c(rules);
  Client client(patient({a->address(), b.address(), c.address()}));
  ASSERT_TRUE(wait_for([&] { return client.connected() == 3; }));
  for (int round = 0; round < 3; ++round) {
    for (int k = 0; k < 60; ++k) EXPECT_TRUE(client.check(item("k" + std::to_string(k))).allowed);
  }
  int shared = 0;
  std::vector<std::string> of_a;
  for (int k = 0; k < 60; ++k) {
    std::string key = "k" + std::to_string(k);
    std::uint64_t at_a = used(*a, key);
    if (at_a == 3) of_a.push_back(key);
    shared += at_a != 3 && used(b, key) != 3 && used(c, key) != 3;
  }
  EXPECT_EQ(shared, 0);
  EXPECT_GT(of_a.size(), 5u);
  EXPECT_LT(of_a.size(), 40u);
  EXPECT_EQ(client.counters().failovers, 0u);
  a.reset();
  ASSERT_TRUE(wait_for([&] { return client.connected() == 2; }));
  const std::uint64_t calls = client.counters().calls;
  for (const std::string& key : of_a) {
    ClientReply reply = client.check(item(key));
    EXPECT_TRUE(reply.allowed);
    EXPECT_EQ(reply.source, Source::node);
    EXPECT_FALSE(reply.degraded);
    EXPECT_EQ(used(b, key) + used(c, key), 1u);
  }
  EXPECT_EQ(client.counters().failovers, of_a.size());
  EXPECT_EQ(client.counters().calls, calls + of_a.size()) << "who is known to be down is not asked";
}

TEST(WeirClient, LeasesGoToAnotherNodeToo) {
  auto rules = set({rule("r", 1'000'000)});
  Node a(rules);
  Node b(rules);
  ClientOptions options = patient({a.address(), b.address(), "127.0.0.1:1"});
  options.leases.enabled = true;
  Client client(options);
  ASSERT_TRUE(wait_for([&] { return client.connected() == 2; }));
  for (int k = 0; k < 10; ++k) {
    for (int i = 0; i < 200; ++i) EXPECT_TRUE(client.check(item("k" + std::to_string(k))).allowed);
  }
  EXPECT_GT(client.counters().by_lease, 1700u);
  EXPECT_LT(client.counters().calls, 250u);
}

TEST(WeirClient, OneThatShedsOrStopsIsPassedOver) {
  auto rules = set({rule("r", 1000)});
  Node a(rules);
  Node b(rules);
  Client client(patient({a.address(), b.address()}));
  ASSERT_TRUE(wait_for([&] { return client.connected() == 2; }));
  a->shed = true;
  for (int k = 0; k < 20; ++k) EXPECT_TRUE(client.check(item("k" + std::to_string(k))).allowed);
  EXPECT_EQ(b->seen, 20);
  a->shed = false;
  a->unavailable = true;
  for (int k = 0; k < 20; ++k) EXPECT_TRUE(client.check(item("k" + std::to_string(k))).allowed);
  EXPECT_EQ(b->seen, 40);
  b->shed = true;
  ClientReply reply = client.check(item("k1"));
  EXPECT_EQ(reply.source, Source::fallback);
  EXPECT_TRUE(reply.error.surely_not_counted()) << "no rules were given";
}

TEST(WeirClient, WhatMayHaveCountedIsNotAskedElsewhere) {
  auto rules = set({rule("r", 1000)});
  auto a = std::make_unique<Node>(rules);
  std::uint16_t port = a->port();
  Node b(rules);
  // One node in the list twice would be no test: both orders are tried until `a` comes first.
  Client client(patient({a->address(), b.address()}));
  ASSERT_TRUE(wait_for([&] { return client.connected() == 2; }));
  (*a)->mute = b->mute = true;
  std::string key;
  std::future<ClientReply> plain;
  for (int k = 0; key.empty(); ++k) {
    auto answer = client.check_async(item("k" + std::to_string(k)));
    ASSERT_TRUE(wait_for([&] { return (*a)->seen + b->seen == k + 1; }));
    if ((*a)->seen == 1) {
      key = "k" + std::to_string(k);
      plain = std::move(answer);
    }
  }
  CheckItem named = item(key);
  named.id = "id";
  auto again = client.check_async(named);
  ASSERT_TRUE(wait_for([&] { return (*a)->seen == 2; }));
  int elsewhere = b->seen;
  a.reset();
  ClientReply reply = plain.get();
  EXPECT_EQ(reply.cause.to_string(), "unknown: connection lost");
  EXPECT_EQ(reply.source, Source::fallback);
  again.get();
  EXPECT_EQ(client.counters().retries, 1u) << "at the same node, as it has an id";
  EXPECT_EQ(b->seen, elsewhere);
  b->mute = false;
  Node back(rules, port);
}

TEST(WeirClient, RulesDecideWhenNobodyAnswers) {
  Rule closed = rule("closed", 1000);
  closed.match = {{"plan", MatchExact{"paid"}}};
  closed.on_failure = OnFailure::closed;
  ClientOptions options = patient({"127.0.0.1:1", "127.0.0.1:2"});
  options.deadline = 100 * kMillisecond;
  options.rules = set({rule("open", 10), closed});
  options.allowlist = {{"key", "probe"}};
  Client client(options);
  for (int i = 0; i < 6; ++i) {
    ClientReply reply = client.check(item("k"));
    EXPECT_TRUE(reply.allowed);
    EXPECT_EQ(reply.error.to_string(), "");
    EXPECT_TRUE(reply.degraded);
    EXPECT_EQ(reply.source, Source::fallback);
    EXPECT_EQ(reply.cause.to_string().find("unavailable: "), 0u) << reply.cause.to_string();
    ASSERT_NE(reply.decider(), nullptr);
    EXPECT_EQ(reply.decider()->rule, "open");
  }
  ClientReply denied = client.check(item("k"));  // 10 / 2 * 1.2
  EXPECT_FALSE(denied.allowed);
  EXPECT_EQ(denied.reason, "");
  EXPECT_GT(denied.decider()->retry_after, 0);
  CheckItem paid = item("other");
  paid.entries.push_back({"plan", "paid"});
  denied = client.check(paid);
  EXPECT_FALSE(denied.allowed);
  EXPECT_EQ(denied.reason, "limiter_unavailable");
  EXPECT_EQ(denied.error.to_string(), "");
  paid.entries[0].second = "probe";
  EXPECT_TRUE(client.check(paid).allowed);
  EXPECT_EQ(client.counters().degraded, 9u);
  EXPECT_EQ(client.counters().by_fallback, 9u);
  EXPECT_EQ(client.reserve(paid, kSecond).ticket, "");
}

TEST(WeirClient, RulesAreLearnedFromANode) {
  Rule closed = rule("closed", 1000);
  closed.match = {{"plan", MatchExact{"paid"}}};
  closed.on_failure = OnFailure::closed;
  auto node = std::make_unique<Node>(set({rule("open", 10), closed}));
  ClientOptions options = patient({"127.0.0.1:1", node->address()});
  options.deadline = 100 * kMillisecond;
  options.rules_interval = kSecond;
  Client client(options);
  EXPECT_FALSE(client.rules_known());
  ASSERT_TRUE(wait_for([&] { return client.rules_known(); }));
  node.reset();
  ASSERT_TRUE(wait_for([&] { return client.connected() == 0; }));
  for (int i = 0; i < 6; ++i) EXPECT_TRUE(client.check(item("k")).allowed);
  ClientReply denied = client.check(item("k"));
  EXPECT_FALSE(denied.allowed);
  EXPECT_EQ(denied.error.to_string(), "");
  CheckItem paid = item("other");
  paid.entries.push_back({"plan", "paid"});
  EXPECT_EQ(client.check(paid).reason, "limiter_unavailable");
}

TEST(WeirClient, NobodyWaitsLongerThanTheDeadline) {
  auto rules = set({rule("r", 1000)});
  Node node(rules);
  ClientOptions options = patient({node.address()});
  options.deadline = 50 * kMillisecond;
  options.rules = rules;
  Client client(options);
  ASSERT_TRUE(wait_for([&] { return client.connected() == 1; }));
  node->mute = true;
  for (int i = 0; i < 3; ++i) {
    auto start = SteadyClock::now();
    ClientReply reply = client.check(item("k"));
    EXPECT_LT(SteadyClock::now() - start, std::chrono::seconds(5));
    EXPECT_EQ(reply.cause.to_string(), "deadline: no answer in time");
    EXPECT_TRUE(reply.allowed);
  }
  auto start = SteadyClock::now();
  ClientReply reply = client.check(item("k"));
  EXPECT_TRUE(reply.cause.surely_not_counted()) << reply.cause.to_string();
  EXPECT_LT(SteadyClock::now() - start, std::chrono::milliseconds(40));
  reply.cause = {ErrorKind::unavailable, "circuit open after missed deadlines"};
  EXPECT_EQ(client.settle("1@" + node.address(), 1).error, reply.cause);
  EXPECT_EQ(client.reserve(item("k"), kSecond).decision.cause, reply.cause);
}

TEST(WeirClient, ReservationsAreSettledWhereTheyWereMade) {
  auto rules = set({rule("r", 1000)});
  Node a(rules);
  Node b(rules);
  Client client(patient({a.address(), b.address()}));
  ASSERT_TRUE(wait_for([&] { return client.connected() == 2; }));
  for (int k = 0; k < 10; ++k) {
    std::string key = "k" + std::to_string(k);
    Reservation held = client.reserve(item(key, 20), kMinute);
    EXPECT_TRUE(held.decision.allowed);
    EXPECT_EQ(used(a, key) + used(b, key), 20u);
    SettleReply settled = client.settle(held.ticket, 7);
    EXPECT_TRUE(settled.settled);
    EXPECT_EQ(settled.reserved, 20u);
    EXPECT_EQ(used(a, key) + used(b, key), 7u);
    EXPECT_FALSE(client.settle(held.ticket, 7).settled);
  }
  EXPECT_NE(client.settle("1", 7).error.to_string(), "");
  EXPECT_NE(client.settle("1@127.0.0.1:1", 7).error.to_string(), "");
}

TEST(WeirClient, AHotKeyIsLeasedAndNothingIsLostOrCountedTwice) {
  auto rules = set({rule("r", 100'000)});
  Node node(rules);
  ClientOptions options = patient({node.address()});
  options.leases.enabled = true;
  std::atomic<std::uint64_t> allowed{0};
  ClientCounters counters;
  {
    Client client(options);
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&] {
        for (int i = 0; i < 5000; ++i) allowed += client.check(item("hot")).allowed;
      });
    }
    for (auto& thread : threads) thread.join();
    counters = client.counters();
  }
  EXPECT_EQ(allowed, 20'000u);
  EXPECT_EQ(used(node, "hot"), 20'000u);
  EXPECT_EQ(node->limiter.tickets().open, 0u);
  EXPECT_LT(counters.calls, 1000u);  // 20 times fewer
  EXPECT_GT(counters.by_lease, 19'000u);
  EXPECT_EQ(counters.by_lease + counters.by_node, 20'000u);
}

TEST(WeirClient, LeasesNeverExceedTheLimitAndDenialsAreRemembered) {
  auto rules = set({rule("r", 3000)});
  Node node(rules);
  ClientOptions options = patient({node.address()});
  options.leases.enabled = true;
  std::uint64_t allowed = 0;
  {
    Client one(options);
    Client other(options);
    for (int i = 0; i < 4000; ++i) {
      Client& client = i % 2 == 0 ? one : other;
      allowed += client.check(item("hot")).allowed;
    }
    EXPECT_LE(allowed, 3000u);
    ClientReply reply = one.check(item("hot"));
    EXPECT_FALSE(reply.allowed);
    EXPECT_GT(one.counters().remembered + other.counters().remembered, 500u);
    EXPECT_EQ(reply.decider()->rule, "r");
    EXPECT_GT(reply.decider()->retry_after, 0);
  }
  EXPECT_EQ(used(node, "hot"), allowed);
  EXPECT_GE(allowed, 2990u);
}

TEST(WeirClient, ALeaseThatComesTooLateGoesBack) {
  auto rules = set({rule("r", 100'000)});
  Node node(rules);
  ClientOptions options = patient({node.address()});
  options.leases.enabled = true;
  options.deadline = 60 * kMillisecond;
  options.connection.breaker_misses = 0;
  Client client(options);
  ASSERT_TRUE(wait_for([&] { return client.connected() == 1; }));
  node->delay_ms = 150;
  for (int i = 0; i < 3; ++i) client.check(item("hot"));
  EXPECT_TRUE(wait_for([&] { return node->leases == 1; }));
  EXPECT_EQ(node->limiter.tickets().open, 1u);
  EXPECT_TRUE(wait_for([&] { return node->limiter.tickets().open == 0; }));
  EXPECT_EQ(used(node, "hot"), 3u) << "the third was counted, though nobody was told";
}

TEST(WeirClient, ALeaseIsReturnedWhenItIsNotUsed) {
  auto rules = set({rule("r", 100'000)});
  Node node(rules);
  ClientOptions options = patient({node.address()});
  options.leases.enabled = true;
  options.leases.term = 200 * kMillisecond;
  options.leases.return_ahead = 100 * kMillisecond;
  Client client(options);
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(client.check(item("hot")).allowed);
  EXPECT_TRUE(wait_for([&] { return node->leases > 0 && node->limiter.tickets().open == 0; }));
  EXPECT_EQ(used(node, "hot"), 5u);
  // What must be asked for is.
  CheckItem named = item("hot");
  named.id = "id";
  EXPECT_EQ(client.check(named).source, Source::node);
  EXPECT_EQ(client.check(item("hot", 0)).source, Source::node);
}

TEST(WeirClient, BatchesAndFutures) {
  auto rules = set({rule("r", 150)});
  Node a(rules);
  Node b(rules);
  Client client(patient({a.address(), b.address()}));
  std::vector<CheckItem> items(100, item("one"));
  items.resize(200, item("other"));
  items.push_back(item("one", 200));
  items.back().entries[0].second.assign(rpc::kMaxText + 1, 'x');
  auto replies = client.check(items);
  ASSERT_EQ(replies.size(), items.size());
  for (std::size_t i = 0; i < 200; ++i)
    EXPECT_TRUE(replies[i].allowed) << replies[i].error.to_string();
  EXPECT_NE(replies.back().error.to_string(), "");
  EXPECT_FALSE(replies.back().degraded);
  EXPECT_EQ(used(a, "one") + used(b, "one"), 100u);
  EXPECT_TRUE(client.check_async(item("one")).get().allowed);
  EXPECT_THROW(Client(ClientOptions{}), std::invalid_argument);
}

}  // namespace
}  // namespace weir
