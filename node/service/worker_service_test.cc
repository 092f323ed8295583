#include <weir/node/service/worker_service.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <fmt/format.h>

#include <weir/limits/test_util.h>
#include <weir/node/service/service_test_util.h>

namespace weir::node {
namespace {

using test::call_on;
using test::CallPtr;
using test::check_on;
using test::check_parts_on;
using test::kAnyone;
using test::Replies;
using test::ServiceNode;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using weir::test::set;

constexpr Nanos kNow = 400'000 * kHour;

Rule rule(std::string name, std::uint64_t limit, Durability durability = Durability::async,
          OnFailure on_failure = OnFailure::closed) {
  Rule out = weir::test::rule(std::move(name), limit);
  out.window = kHour;
  out.durability = durability;
  out.on_failure = on_failure;
  return out;
}

/// In each rule's domain of its own, so that a request meets one rule.
Rule alone(Rule made) {
  made.domain = made.name;
  return made;
}

rpc::CheckItem item(const std::string& key, std::uint64_t hits = 1,
                    const std::string& domain = "api") {
  return {domain, {{"key", key}}, hits};
}

std::string text(const Reply& reply) {
  if (!reply.error.empty()) return reply.error.to_string();
  std::string out = reply.allowed ? "allowed" : "denied";
  for (const Status& status : reply.statuses) {
    out += fmt::format(" {} {}/{}", status.rule, status.remaining, status.limit);
    if (status.degraded) out += " degraded";
  }
  return out;
}

std::vector<std::string> texts(const Replies& replies) {
  std::vector<std::string> out;
  for (const Reply& reply : replies) out.push_back(text(reply));
  return out;
}

class WorkerServiceTest : public testing::Test {
 protected:
  ~WorkerServiceTest() noexcept override {}

  ServiceNode& start(std::vector<Rule> rules) {
    options_.rules = set(std::move(rules));
    options_.start = kNow;
    node_ = std::make_unique<ServiceNode>(options_);
    return *node_;
  }
  ServiceNode::Worker& worker(std::size_t i = 0) { return *node_->workers[i]; }
  /// Has been told, once, and on the thread that asked.
  template <typename Answer>
  testing::AssertionResult told(const CallPtr<Answer>& call, std::size_t by = 0) {
    node_->eventually([&] { return call->told > 0; });
    worker(by).run([](WorkerService&) {});
    if (call->told != 1) return testing::AssertionFailure() << "told " << call->told << " times";
    if (call->on != worker(by).id()) return testing::AssertionFailure() << "on another thread";
    return testing::AssertionSuccess();
  }
  std::string checked(const rpc::CheckItem& asked, std::size_t by = 0) {
    auto call = check_on(worker(by), {asked});
    if (!told(call, by)) return "untold";
    return text(call->answer[0]);
  }
  CallPtr<ReserveReply> reserve(std::size_t by, const rpc::CheckItem& asked) {
    return call_on<ReserveReply>(worker(by), [&](WorkerService& service, auto done) {
      const rpc::AsRequest as(asked);
      service.reserve(as.request, kMinute, kAnyone, std::move(done));
    });
  }
  CallPtr<SettleReply> settle(std::size_t by, const std::string& ticket, std::uint64_t hits) {
    return call_on<SettleReply>(worker(by), [&](WorkerService& service, auto done) {
      service.settle(ticket, hits, kAnyone, std::move(done));
    });
  }

  test::ServiceNodeOptions options_;
  std::unique_ptr<ServiceNode> node_;
};

// Decisions in place.

TEST_F(WorkerServiceTest, DecidesInPlace) {
  start({rule("r", 3)});
  // The main loop stands still.
  for (int i = 0; i < 4; ++i) {
    auto call = check_on(worker(static_cast<std::size_t>(i) % 2), {item("k")});
    EXPECT_TRUE(call->at_once);
    EXPECT_EQ(text(call->answer[0]), i < 3 ? fmt::format("allowed r {}/3", 2 - i) : "denied r 0/3");
  }
  EXPECT_THAT(texts(check_on(worker(), {item("a"), item("b", 4), item("k"), item("a")})->answer),
              ElementsAre("allowed r 2/3", "denied r 3/3", "denied r 0/3", "allowed r 1/3"));
  EXPECT_THAT(texts(check_on(worker(), {item("k", 1, "nowhere")})->answer), ElementsAre("allowed"));
  EXPECT_THAT(check_on(worker(), {})->answer, IsEmpty());
  EXPECT_EQ(node_->commits_wanted, 0);
}

TEST_F(WorkerServiceTest, SeveralDescriptorsAreOneRequest) {
  start({rule("r", 5)});
  rpc::CheckItem asked = item("a", 2);
  asked.more = {{{{"key", "b"}}, 3}, {{{"other", "c"}}, 9}};
  auto call = check_on(worker(), {asked, asked});
  EXPECT_TRUE(call->at_once);
  EXPECT_THAT(texts(call->answer), ElementsAre("allowed r 3/5 r 2/5", "denied r 3/5 r 2/5"));
  EXPECT_EQ(call->answer[0].statuses[1].descriptor, 1);
  EXPECT_EQ(checked(item("a", 0)), "allowed r 3/5");
}

TEST_F(WorkerServiceTest, ALargeCallLeavesNothingBehind) {
  start({rule("r", 1000)});
  std::vector<rpc::CheckItem> many(1000, item("k"));
  auto call = check_on(worker(), many);
  ASSERT_EQ(call->answer.size(), 1000u);
  EXPECT_EQ(text(call->answer.back()), "allowed r 0/1000");
  EXPECT_THAT(texts(check_on(worker(), {item("k"), item("j")})->answer),
              ElementsAre("denied r 0/1000", "allowed r 999/1000"));
}

TEST_F(WorkerServiceTest, SaysByHowMuchARuleMayBeOver) {
  start({rule("r", 5)});
  rpc::CheckItem asked = item("k");
  EXPECT_EQ(check_on(worker(), {asked})->answer[0].statuses[0].over_admission, std::nullopt);
  asked.wants_bound = true;
  EXPECT_EQ(check_on(worker(), {asked})->answer[0].statuses[0].over_admission, 0u);
}

TEST_F(WorkerServiceTest, CountsReportsAndGivesBack) {
  start({rule("r", 5)});
  rpc::CheckItem used = item("k", 4);
  used.kind = RequestKind::report;
  EXPECT_EQ(text(check_on(worker(), {used})->answer[0]), "allowed r 1/5");
  EXPECT_EQ(text(check_on(worker(), {used})->answer[0]), "allowed r 0/5");
  EXPECT_EQ(text(check_on(worker(), {item("k")})->answer[0]), "denied r 0/5");
  rpc::CheckItem back = item("k", 6);
  back.kind = RequestKind::refund;
  const Reply reply = check_on(worker(), {back})->answer[0];
  EXPECT_EQ(text(reply), "allowed r 3/5");
  EXPECT_EQ(reply.given_back, 6u);
  // A reply's memory is used again.
  EXPECT_EQ(check_on(worker(), {item("k")})->answer[0].given_back, 0u);
}

// Commits.

TEST_F(WorkerServiceTest, WhatATurnDecidesWaitsForOneCommit) {
  start({alone(rule("r", 10, Durability::commit)), alone(rule("async", 10))});
  std::vector<CallPtr<Replies>> calls;
  worker().run([&](WorkerService& service) {
    for (int i = 0; i < 3; ++i) {
      auto call = std::make_shared<test::Call<Replies>>();
      const rpc::CheckItem one = item("k", 1, "r");
      const rpc::CheckItem other = item("k", 1, "async");
      const rpc::AsRequest as[] = {rpc::AsRequest(one), rpc::AsRequest(other), rpc::AsRequest(one)};
      const Request requests[] = {as[0].request, as[1].request, as[2].request};
      const std::size_t part = 3;
      service.check(requests, {&part, 1}, kAnyone, [call](std::size_t, std::span<Reply> replies) {
        call->answer.assign(replies.begin(), replies.end());
        call->on = std::this_thread::get_id();
        ++call->told;
      });
      calls.push_back(call);
    }
  });
  node_->arrive();
  EXPECT_EQ(node_->commits_wanted, 1);
  EXPECT_EQ(node_->engine->status().waiting, 6u);
  for (const auto& call : calls) EXPECT_EQ(call->told, 0);
  node_->commit();
  for (std::size_t i = 0; i < 3; ++i) {
    ASSERT_TRUE(told(calls[i]));
    EXPECT_THAT(texts(calls[i]->answer), ElementsAre(fmt::format("allowed r {}/10", 9 - 2 * i),
                                                     fmt::format("allowed async {}/10", 9 - i),
                                                     fmt::format("allowed r {}/10", 8 - 2 * i)));
  }
  EXPECT_EQ(node_->disk.units(), 9u);
  EXPECT_EQ(node_->engine->status().waiting, 0u);
}

TEST_F(WorkerServiceTest, PartsWaitForThemselvesOnly) {
  start({alone(rule("r", 10, Durability::commit)), alone(rule("async", 10))});
  const auto async = item("k", 1, "async");
  const auto commit = item("k", 1, "r");
  const auto parts =
      check_parts_on(worker(), {{}, {async}, {async, commit}, {commit}, {}, {async}, {}});
  for (std::size_t i = 0; i < parts.size(); ++i) {
    EXPECT_EQ(parts[i]->at_once, i != 2 && i != 3) << i;
  }
  EXPECT_THAT(parts[0]->answer, IsEmpty());
  EXPECT_THAT(texts(parts[1]->answer), ElementsAre("allowed async 9/10"));
  EXPECT_THAT(texts(parts[5]->answer), ElementsAre("allowed async 7/10"));
  node_->arrive();
  EXPECT_EQ(node_->commits_wanted, 1);
  node_->commit();
  ASSERT_TRUE(told(parts[2]));
  ASSERT_TRUE(told(parts[3]));
  EXPECT_THAT(texts(parts[2]->answer), ElementsAre("allowed async 8/10", "allowed r 9/10"));
  EXPECT_THAT(texts(parts[3]->answer), ElementsAre("allowed r 8/10"));
  for (const auto& part : parts) EXPECT_EQ(part->told, 1);
  // Nothing is left of it in the next call.
  EXPECT_TRUE(check_on(worker(), {async})->at_once);
}

TEST_F(WorkerServiceTest, ADenialAndAnAsyncDecisionDoNotWait) {
  start({alone(rule("r", 1, Durability::commit)), alone(rule("async", 10))});
  auto first = check_on(worker(), {item("k", 1, "r")});
  EXPECT_FALSE(first->at_once);
  auto denied = check_on(worker(1), {item("k", 1, "r"), item("k", 1, "async")});
  EXPECT_TRUE(denied->at_once);
  EXPECT_THAT(texts(denied->answer), ElementsAre("denied r 0/1", "allowed async 9/10"));
  EXPECT_EQ(first->told, 0);
  node_->commits_at_once = true;
  EXPECT_TRUE(told(first));
}

TEST_F(WorkerServiceTest, ARepeatOnAnotherWorkerWaitsForTheSameCommit) {
  start({rule("r", 5, Durability::commit)});
  rpc::CheckItem asked = item("k");
  asked.id = "id";
  auto first = check_on(worker(0), {asked});
  auto second = check_on(worker(1), {asked});
  EXPECT_FALSE(second->at_once);
  node_->arrive();
  EXPECT_EQ(first->told + second->told, 0);
  node_->commit();
  ASSERT_TRUE(told(first, 0));
  node_->pump();
  node_->commit();
  ASSERT_TRUE(told(second, 1));
  EXPECT_EQ(text(first->answer[0]), "allowed r 4/5");
  EXPECT_EQ(text(second->answer[0]), "allowed r 4/5");
  EXPECT_TRUE(second->answer[0].repeated);
  EXPECT_EQ(node_->disk.units(), 1u);
}

TEST_F(WorkerServiceTest, ReservationsAreSettledOnAnyWorker) {
  start({rule("r", 10, Durability::commit)});
  auto held = reserve(0, item("k", 4));
  EXPECT_TRUE(held->at_once);  // what is held is not durable
  EXPECT_EQ(text(held->answer.decision), "allowed r 6/10");
  ASSERT_NE(held->answer.ticket, "");
  auto settled = settle(1, held->answer.ticket, 3);
  EXPECT_FALSE(settled->at_once);
  node_->commits_at_once = true;
  ASSERT_TRUE(told(settled, 1));
  EXPECT_TRUE(settled->answer.settled);
  EXPECT_EQ(settled->answer.reserved, 4u);
  EXPECT_FALSE(settled->answer.degraded);
  EXPECT_EQ(node_->disk.units(), 3u);

  auto again = settle(0, held->answer.ticket, 3);
  EXPECT_TRUE(again->at_once);
  EXPECT_FALSE(again->answer.settled);
  EXPECT_FALSE(settle(0, "nonsense", 3)->answer.settled);
  auto denied = reserve(1, item("k", 8));
  EXPECT_EQ(text(denied->answer.decision), "denied r 7/10");
  EXPECT_EQ(denied->answer.ticket, "");
}

TEST_F(WorkerServiceTest, AStoreThatFailedAnswersByOnFailure) {
  start({alone(rule("open", 10, Durability::commit, OnFailure::open)),
         alone(rule("closed", 10, Durability::commit, OnFailure::closed)),
         alone(rule("async", 10))});
  const std::vector<rpc::CheckItem> items = {item("k", 1, "open"), item("k", 1, "closed"),
                                             item("k", 1, "async")};
  const auto answers = [](int left) {
    return std::vector<std::string>{fmt::format("allowed open {}/10 degraded", left),
                                    "closed: storage has failed and the rule is on_failure: closed",
                                    fmt::format("allowed async {}/10", left)};
  };
  auto waiting = check_on(worker(), items);
  auto held = reserve(1, item("k", 1, "open"));
  node_->arrive();
  EXPECT_EQ(waiting->told, 0);
  node_->engine->store_failed("disk full", kNow);
  ASSERT_TRUE(told(waiting));
  EXPECT_EQ(texts(waiting->answer), answers(9));
  // And from now on.
  auto later = check_on(worker(), items);
  ASSERT_TRUE(told(later));
  EXPECT_EQ(texts(later->answer),
            (std::vector<std::string>{"allowed open 7/10 degraded", answers(8)[1], answers(8)[2]}));
  auto settled = settle(0, held->answer.ticket, 1);
  ASSERT_TRUE(told(settled));
  EXPECT_TRUE(settled->answer.settled);
  EXPECT_TRUE(settled->answer.degraded);
}

TEST_F(WorkerServiceTest, ANodeWithoutADiskHasNoneThatFailed) {
  options_.durable = false;
  start({rule("r", 10, Durability::commit, OnFailure::open)});
  EXPECT_EQ(checked(item("k")), "allowed r 9/10 degraded");
}

TEST_F(WorkerServiceTest, CommitsOfARealStore) {
  char path[] = "/tmp/weir-worker-service-XXXXXX";
  ASSERT_NE(::mkdtemp(path), nullptr);
  storage::LmdbOptions lmdb;
  lmdb.path = path;
  lmdb.cluster = "c";
  lmdb.self = {"eu", "eu-1"};
  lmdb.map_bytes = 64u << 20;
  for (int boot = 0; boot < 2; ++boot) {
    const auto store = storage::make_lmdb_store(lmdb);
    options_.store = store.get();
    options_.boot = static_cast<std::uint64_t>(boot);
    start({rule("r", 10, Durability::commit)});
    EXPECT_EQ(checked(item("k"), 1), fmt::format("allowed r {}/10", 9 - boot));
    node_->workers.clear();
    node_->stop();
    node_.reset();
  }
  std::filesystem::remove_all(path);
}

// What is not decided now.

TEST_F(WorkerServiceTest, TooManyThatWaitAreTurnedAway) {
  options_.max_waiting = 2;
  start({alone(rule("r", 10, Durability::commit)), alone(rule("async", 10))});
  auto first = check_on(worker(), {item("a", 1, "r"), item("b", 1, "r")});
  node_->arrive();
  // In one call, in its order, are those that are shed and those that need no disk.
  auto call = check_on(worker(1), {item("c", 1, "async"), item("c", 1, "r"), item("d", 1, "async"),
                                   item("d", 1, "r")});
  EXPECT_TRUE(call->at_once);
  const std::string shed = "overloaded: 2 requests wait for the disk";
  EXPECT_THAT(texts(call->answer),
              ElementsAre("allowed async 9/10", shed, "allowed async 9/10", shed));
  EXPECT_EQ(text(reserve(0, item("c", 1, "r"))->answer.decision), shed);
  EXPECT_EQ(node_->engine->status().shed, 3u);
  node_->commits_at_once = true;
  node_->pump();
  ASSERT_TRUE(told(first));
  EXPECT_EQ(checked(item("c", 1, "r"), 1), "allowed r 9/10");
}

TEST_F(WorkerServiceTest, OneCallerDoesNotWaitForAll) {
  options_.max_waiting_of_caller = 2;
  start({alone(rule("r", 100, Durability::commit)), alone(rule("async", 100))});
  const Caller greedy{.address = "192.0.2.1", .grant = &Grant::everything()};
  const Caller other{.address = "192.0.2.2", .grant = &Grant::everything()};
  auto first = check_on(worker(), {item("a", 1, "r"), item("b", 1, "r")}, greedy);
  // On any worker: what may wait, and nothing else.
  auto more = check_on(worker(1), {item("c", 1, "async"), item("c", 1, "r")}, greedy);
  EXPECT_TRUE(more->at_once);
  const std::string refused = "overloaded: 2 requests of this caller wait already";
  EXPECT_THAT(texts(more->answer), ElementsAre("allowed async 99/100", refused));
  const rpc::CheckItem held = item("c", 1, "r");
  auto reserved = call_on<ReserveReply>(worker(), [&](WorkerService& service, auto done) {
    const rpc::AsRequest as(held);
    service.reserve(as.request, kMinute, greedy, std::move(done));
  });
  EXPECT_EQ(text(reserved->answer.decision), refused);
  EXPECT_EQ(node_->budgets.requests_refused(), 2u);
  auto others = check_on(worker(1), {item("c", 1, "r")}, other);
  node_->arrive();
  node_->commit();
  ASSERT_TRUE(told(first));
  ASSERT_TRUE(told(others, 1));
  EXPECT_EQ(text(others->answer[0]), "allowed r 99/100");
  // Answered, it may wait again.
  auto again = check_on(worker(1), {item("c", 1, "r")}, greedy);
  EXPECT_EQ(again->told, 0);
  node_->arrive();
  node_->commit();
  ASSERT_TRUE(told(again, 1));
  EXPECT_EQ(text(again->answer[0]), "allowed r 98/100");
}

TEST_F(WorkerServiceTest, OneCallerHasAFewStatusCallsASecond) {
  start({rule("r", 1)});
  node_->answers.status = [](std::function<void(std::string)> done) { done("{}"); };
  const Caller greedy{.address = "192.0.2.1", .grant = &Grant::everything()};
  const Caller other{.address = "192.0.2.2", .grant = &Grant::everything()};
  const auto status = [&](const Caller& caller) {
    auto call = call_on<StatusReply>(worker(), [&](WorkerService& service, auto done) {
      service.status(caller, std::move(done));
    });
    EXPECT_TRUE(told(call));
    return call->answer.error.to_string();
  };
  for (int i = 0; i < 10; ++i) EXPECT_EQ(status(greedy), "");
  EXPECT_EQ(status(greedy), "overloaded: 10 calls of this caller in this second already");
  EXPECT_EQ(status(other), "");
  node_->now += kSecond;
  EXPECT_EQ(status(greedy), "");
}

TEST_F(WorkerServiceTest, ANodeThatStopsDecidesNothing) {
  start({rule("r", 10, Durability::commit)});
  auto waiting = check_on(worker(), {item("k")});
  auto held = reserve(1, item("h"));
  node_->arrive();
  node_->coordinator->state().stopping = true;
  auto call = check_on(worker(1), {item("k"), item("j")});
  EXPECT_TRUE(call->at_once);
  EXPECT_THAT(texts(call->answer), ElementsAre("unavailable: stopping", "unavailable: stopping"));
  EXPECT_EQ(text(reserve(0, item("k"))->answer.decision), "unavailable: stopping");
  EXPECT_EQ(settle(0, held->answer.ticket, 1)->answer.error.to_string(), "unavailable: stopping");
  auto lease = call_on<LeaseReply>(worker(), [&](WorkerService& service, auto done) {
    const rpc::CheckItem asked = item("k");
    const rpc::AsRequest as(asked);
    service.lease(as.request, {}, kAnyone, std::move(done));
  });
  ASSERT_TRUE(told(lease));
  EXPECT_EQ(text(lease->answer.decision), "unavailable: stopping");
  // What was decided before is answered, also when the engine has committed its last.
  EXPECT_EQ(waiting->told, 0);
  node_->stop();
  ASSERT_TRUE(told(waiting));
  EXPECT_EQ(text(waiting->answer[0]), "allowed r 9/10");
}

TEST_F(WorkerServiceTest, ADecisionJustBeforeTheStopIsAnswered) {
  start({rule("r", 10, Durability::commit)});
  auto call = check_on(worker(), {item("k")});
  // Its way to the main loop is longer than that of the stop.
  node_->coordinator->state().stopping = true;
  node_->stop();
  ASSERT_TRUE(told(call));
  EXPECT_EQ(text(call->answer[0]), "allowed r 9/10");
  EXPECT_EQ(node_->disk.units(), 1u);
}

// Other members.

class HomeRulesTest : public WorkerServiceTest {
 protected:
  HomeRulesTest() { options_.peers = {{"us", "us-1"}}; }
  static Rule home_rule(OnFailure on_failure = OnFailure::closed) {
    Rule made = rule("home", 10, Durability::commit, on_failure);
    made.enforcement = Enforcement::home;
    return made;
  }
  /// A key whose home is here, or not.
  std::string key(bool here, std::size_t skip = 0) {
    const HomeMap map({{"eu", "eu-1"}, {"us", "us-1"}}, {});
    for (int i = 0;; ++i) {
      const rpc::CheckItem asked = item(fmt::format("k{}", i));
      const rpc::AsRequest as(asked);
      if ((map.order(HomeMap::key_of(home_rule(), as.request))[0] == 0) != here) continue;
      if (skip-- == 0) return fmt::format("k{}", i);
    }
  }
  static Reply answer(const std::string& name, std::uint64_t remaining) {
    Reply reply;
    reply.allowed = true;
    reply.deciding = 0;
    reply.statuses.emplace_back();
    reply.statuses[0].rule = name;
    reply.statuses[0].limit = 10;
    reply.statuses[0].remaining = remaining;
    return reply;
  }
};

TEST_F(HomeRulesTest, ALaterDescriptorGoesToItsHome) {
  Rule scoped = home_rule();
  scoped.match = {{"scope", MatchAny{}}};
  start({scoped, rule("async", 10)});
  rpc::CheckItem asked = item(key(true));
  asked.more = {{{{"key", key(false)}, {"scope", "s"}}, 2}};
  auto call = check_on(worker(), {asked});
  ASSERT_TRUE(node_->eventually([&] { return !node_->links.asked.empty(); }));
  EXPECT_THAT(node_->links.asked[0].item.rule_filter, ElementsAre("home"));
  EXPECT_EQ(node_->links.asked[0].item.more.size(), 1u);
}

TEST_F(HomeRulesTest, WhatIsDecidedElsewhereCrossesAndComesBack) {
  start({home_rule(), alone(rule("async", 10))});
  auto call = check_on(worker(1), {item("x", 1, "async"), item(key(false), 2), item(key(true), 3),
                                   item("y", 1, "async"), item(key(false, 1), 4)});
  EXPECT_FALSE(call->at_once);
  ASSERT_TRUE(node_->eventually([&] { return node_->links.asked.size() == 2; }));
  const test::ModelLinks::Asked one = node_->links.asked[0];
  const test::ModelLinks::Asked two = node_->links.asked[1];
  EXPECT_EQ(one.member, 1u);
  EXPECT_EQ(one.item.entries[0].second, key(false));
  EXPECT_EQ(one.item.hits, 2u);
  EXPECT_THAT(one.item.rule_filter, ElementsAre("home"));
  EXPECT_EQ(two.item.hits, 4u);
  node_->commit();  // for the one whose home is here
  two.done(answer("home", 1));
  node_->arrive();
  EXPECT_EQ(call->told, 0);
  one.done(answer("home", 2));
  ASSERT_TRUE(told(call, 1));
  EXPECT_THAT(texts(call->answer),
              ElementsAre("allowed async 9/10", "allowed home 2/10", "allowed home 7/10",
                          "allowed async 9/10", "allowed home 1/10"));
}

TEST_F(HomeRulesTest, PartsCrossOnTheirOwn) {
  start({home_rule(), alone(rule("async", 10)), alone(rule("r", 10, Durability::commit))});
  const auto async = item("k", 1, "async");
  const auto parts = check_parts_on(
      worker(),
      {{item(key(false))}, {async, item("k", 1, "r")}, {async}, {item(key(false, 1)), async}});
  EXPECT_TRUE(parts[2]->at_once);
  ASSERT_TRUE(node_->eventually([&] { return node_->links.asked.size() == 2; }));
  node_->links.asked[1].done(answer("home", 5));
  ASSERT_TRUE(told(parts[3]));
  EXPECT_THAT(texts(parts[3]->answer), ElementsAre("allowed home 5/10", "allowed async 7/10"));
  EXPECT_EQ(parts[0]->told + parts[1]->told, 0);
  node_->commit();
  ASSERT_TRUE(told(parts[1]));
  EXPECT_THAT(texts(parts[1]->answer), ElementsAre("allowed async 9/10", "allowed r 9/10"));
  node_->links.asked[0].done(answer("home", 4));
  ASSERT_TRUE(told(parts[0]));
  EXPECT_THAT(texts(parts[0]->answer), ElementsAre("allowed home 4/10"));
}

TEST_F(HomeRulesTest, AHomeThatDoesNotAnswerIsTheRulesPolicy) {
  start({home_rule(OnFailure::open)});
  auto call = check_on(worker(), {item(key(false))});
  ASSERT_TRUE(node_->eventually([&] { return !node_->links.asked.empty(); }));
  Reply lost;
  lost.fail(ErrorKind::unavailable, "connection refused");
  node_->commits_at_once = true;
  node_->links.asked[0].done(lost);
  ASSERT_TRUE(told(call));
  EXPECT_TRUE(call->answer[0].allowed) << text(call->answer[0]);
  EXPECT_TRUE(call->answer[0].statuses[0].degraded);
}

TEST_F(HomeRulesTest, ReservationsAndLeasesOfOthersKeys) {
  start({home_rule()});
  auto held = reserve(0, item(key(false)));
  ASSERT_TRUE(told(held));
  EXPECT_EQ(held->answer.decision.error.kind, ErrorKind::unsupported);
  EXPECT_THAT(held->answer.decision.error.detail, HasSubstr("us/us-1: reserve there"));
  held = reserve(1, item(key(true), 4));
  ASSERT_TRUE(told(held, 1));
  EXPECT_EQ(text(held->answer.decision), "allowed home 6/10");
  EXPECT_NE(held->answer.ticket, "");

  auto lease = call_on<LeaseReply>(worker(), [&](WorkerService& service, auto done) {
    const rpc::CheckItem asked = item(key(false));
    const rpc::AsRequest as(asked);
    service.lease(as.request, {5, kSecond, kSecond, 1}, kAnyone, std::move(done));
  });
  ASSERT_TRUE(node_->eventually([&] { return !node_->links.asked.empty(); }));
  node_->links.asked[0].done(answer("home", 9));
  ASSERT_TRUE(told(lease));
  EXPECT_EQ(text(lease->answer.decision), "allowed home 9/10");
  EXPECT_EQ(lease->answer.ticket, "");
}

TEST_F(HomeRulesTest, RulesWithoutHomesAreDecidedInPlace) {
  start({home_rule()});
  node_->reload(set({rule("r", 10)}));
  auto call = check_on(worker(), {item(key(false))});
  EXPECT_TRUE(call->at_once);
  EXPECT_EQ(text(call->answer[0]), "allowed r 9/10");
  node_->reload(set({home_rule()}));
  call = check_on(worker(), {item(key(false))});
  EXPECT_FALSE(call->at_once);
  ASSERT_TRUE(node_->eventually([&] { return !node_->links.asked.empty(); }));
  node_->links.asked[0].done(answer("home", 3));
  ASSERT_TRUE(told(call));
}

/// With a peer that has half of the rights, and no disks.
class EscrowRulesTest : public HomeRulesTest {
 protected:
  void start_with_rights(std::vector<Rule> rules) {
    options_.durable = false;
    start(rules);
    EngineOptions options;
    options.replica.self = {"us", "us-1"};
    options.replica.peers = {{"eu", "eu-1"}};
    options.rules = set(std::move(rules));
    options.fresh_incarnation = [] { return kPeer; };
    EngineEvents events;
    events.send = [this](crdt::PeerIndex, const crdt::Message& m) { to_node_.push_back(m); };
    events.log = [](const std::string&, const std::string&) {};
    node_->send = [this](crdt::PeerIndex, const crdt::Message& m) { to_peer_.push_back(m); };
    peer_ = std::make_unique<Engine>(std::move(options), nullptr, std::move(events));
    std::string error;
    ASSERT_TRUE(peer_->start(kNow, {}, error)) << error;
    peer_->peer_up(0, node_->engine->replica().incarnation(), kNow);
    node_->engine->peer_up(0, kPeer, kNow);
    exchange(2 * kSecond);
    node_->now = kNow + kHour;  // shares are of windows that begin
    exchange(40 * kMillisecond);
  }
  void exchange(Nanos time) {
    for (const Nanos end = node_->now + time; node_->now < end;) {
      node_->now += 10 * kMillisecond;
      for (const crdt::Message& message : std::exchange(to_peer_, {})) {
        peer_->receive(0, node_->engine->replica().incarnation(), message, node_->now);
      }
      for (const crdt::Message& message : std::exchange(to_node_, {})) {
        node_->engine->receive(0, kPeer, message, node_->now);
      }
      peer_->pump(node_->now);
      node_->pump();
    }
  }

  static constexpr crdt::Incarnation kPeer{7, 7};
  std::unique_ptr<Engine> peer_;
  std::vector<crdt::Message> to_peer_;
  std::vector<crdt::Message> to_node_;
};

TEST_F(EscrowRulesTest, WhatLacksRightsIsAskedOfThoseWhoHaveThem) {
  Rule few = rule("few", 2);
  few.enforcement = Enforcement::escrow;
  start_with_rights({few, alone(rule("async", 10))});
  EXPECT_EQ(checked(item("k")), "allowed few 0/2");
  auto call = check_on(worker(1), {item("x", 1, "async"), item("k"), item("y", 1, "async")});
  EXPECT_FALSE(call->at_once);
  ASSERT_TRUE(node_->eventually([&] { return !node_->links.asked.empty(); }));
  EXPECT_EQ(node_->links.asked[0].member, 1u);
  EXPECT_THAT(node_->links.asked[0].item.rule_filter, ElementsAre("few"));
  node_->links.asked[0].done(answer("few", 0));
  ASSERT_TRUE(told(call, 1));
  EXPECT_THAT(texts(call->answer),
              ElementsAre("allowed async 9/10", "allowed few 0/10", "allowed async 9/10"));

  // Nobody can be asked: it is denied as it was here.
  node_->links.reachable = false;
  EXPECT_THAT(checked(item("k"), 1), HasSubstr("denied few 0/2"));
  // Nor is anybody, where the node stops meanwhile.
  node_->links.reachable = true;
  auto last = check_on(worker(), {item("k")});
  node_->coordinator->state().stopping = true;
  ASSERT_TRUE(told(last));
  EXPECT_THAT(text(last->answer[0]), HasSubstr("denied few 0/2"));
}

// Rules, status, leases.

TEST_F(WorkerServiceTest, RulesAndStatusComeFromTheMainLoop) {
  start({rule("r", 10)});
  const std::thread::id main = std::this_thread::get_id();
  node_->answers.rules = [main](std::string_view known) {
    EXPECT_EQ(std::this_thread::get_id(), main);
    return RulesReply{{}, "v2", known == "v2", known == "v2" ? "" : "rules: []"};
  };
  node_->answers.status = [main](std::function<void(std::string)> done) {
    EXPECT_EQ(std::this_thread::get_id(), main);
    done("{}");
  };
  const auto rules = [&](const std::string& known) {
    auto call = call_on<RulesReply>(worker(1), [&](WorkerService& service, auto done) {
      service.rules(std::string(known), kAnyone, std::move(done));
    });
    EXPECT_TRUE(told(call, 1));
    return call->answer;
  };
  EXPECT_FALSE(rules("v1").same);
  EXPECT_EQ(rules("").yaml, "rules: []");
  EXPECT_TRUE(rules("v2").same);
  EXPECT_EQ(rules("v2").yaml, "");
  auto status = call_on<StatusReply>(worker(), [&](WorkerService& service, auto done) {
    service.status(kAnyone, std::move(done));
  });
  ASSERT_TRUE(told(status));
  EXPECT_EQ(status->answer.json, "{}");
}

TEST_F(WorkerServiceTest, WhoMayNotIsTold) {
  start({rule("r", 1000)});
  node_->answers.status = [](std::function<void(std::string)> done) { done("{}"); };
  Grant checker{.name = "checker", .proof = Proof::token, .check = {"other"}};
  Grant reader{.name = "reader", .proof = Proof::token, .read = true};
  const Caller nobody{.address = "192.0.2.1"};
  const Caller other{.address = "192.0.2.1", .identity = "=checker", .grant = &checker};
  const Caller reads{.address = "192.0.2.1", .identity = "=reader", .grant = &reader};
  const std::pair<const Caller*, std::string> denied[] = {
      {&nobody,
       "unauthenticated: who shows neither a token nor a certificate may not check \"api\""},
      {&other, "forbidden: checker may not check \"api\""},
      {&reads, "forbidden: reader may not check \"api\""}};
  rpc::CheckItem asked = item("k");
  for (const auto& [caller, why] : denied) {
    auto reserved = call_on<ReserveReply>(worker(), [&](WorkerService& service, auto done) {
      rpc::AsRequest as(asked);
      service.reserve(as.request, kMinute, *caller, std::move(done));
    });
    EXPECT_EQ(reserved->answer.decision.error.to_string(), why);
    auto leased = call_on<LeaseReply>(worker(), [&](WorkerService& service, auto done) {
      rpc::AsRequest as(asked);
      service.lease(as.request, {}, *caller, std::move(done));
    });
    EXPECT_EQ(leased->answer.decision.error.to_string(), why);
    std::string got;
    call_on<ReserveReply>(worker(), [&](WorkerService& service, auto) {
      rpc::AsRequest as(asked);
      const std::size_t part = 1;
      service.check(
          {&as.request, 1}, {&part, 1}, *caller,
          [&](std::size_t, std::span<Reply> replies) { got = replies[0].error.to_string(); });
    });
    EXPECT_EQ(got, why);
  }
  const auto status = [&](const Caller& caller) {
    auto call = call_on<StatusReply>(worker(), [&](WorkerService& service, auto done) {
      service.status(caller, std::move(done));
    });
    EXPECT_TRUE(told(call));
    return call->answer.error.kind;
  };
  EXPECT_EQ(status(nobody), ErrorKind::unauthenticated);
  EXPECT_EQ(status(other), ErrorKind::forbidden);
  EXPECT_EQ(status(reads), ErrorKind::none);
}

TEST_F(WorkerServiceTest, ATicketIsItsCallers) {
  start({rule("r", 1000)});
  const Grant& all = Grant::everything();
  const Caller owner{.address = "192.0.2.1", .identity = "=one", .grant = &all};
  const Caller moved{.address = "192.0.2.7", .identity = "=one", .grant = &all};
  const Caller other{.address = "192.0.2.1", .identity = "=two", .grant = &all};
  const Caller nobody{.address = "192.0.2.1", .grant = &all};
  auto held = call_on<ReserveReply>(worker(), [&](WorkerService& service, auto done) {
    const rpc::CheckItem asked = item("k", 4);
    rpc::AsRequest as(asked);
    service.reserve(as.request, kMinute, owner, std::move(done));
  });
  const auto settled = [&](const Caller& caller) {
    auto call = call_on<SettleReply>(worker(), [&](WorkerService& service, auto done) {
      service.settle(held->answer.ticket, 3, caller, std::move(done));
    });
    EXPECT_TRUE(told(call));
    return call->answer.settled;
  };
  EXPECT_FALSE(settled(other));
  EXPECT_FALSE(settled(nobody));
  EXPECT_TRUE(settled(moved));
}

TEST_F(WorkerServiceTest, LeasesAreHeldAndSettled) {
  start({rule("r", 1000)});
  auto lease = call_on<LeaseReply>(worker(), [&](WorkerService& service, auto done) {
    const rpc::CheckItem asked = item("k");
    const rpc::AsRequest as(asked);
    service.lease(as.request, {50, kSecond}, kAnyone, std::move(done));
  });
  ASSERT_TRUE(told(lease));
  EXPECT_EQ(lease->answer.hits, 50u);
  EXPECT_EQ(lease->answer.term, kSecond);
  EXPECT_EQ(checked(item("k", 0), 1), "allowed r 950/1000");
  auto settled = settle(1, lease->answer.ticket, 20);
  EXPECT_TRUE(settled->at_once);
  EXPECT_EQ(checked(item("k", 0), 1), "allowed r 980/1000");
}

TEST_F(WorkerServiceTest, AReplyNamesTheRulesThatDecidedIt) {
  const auto rules = [](const std::string& prefix, std::uint64_t limit, bool turned) {
    std::vector<Rule> made = {rule(prefix + "1", limit), rule(prefix + "2", limit + 1)};
    if (turned) std::swap(made[0], made[1]);
    made.push_back(rule(prefix + "3", limit + 2, Durability::commit));
    return made;
  };
  start(rules("a", 100'000, false));
  const auto one = set(rules("a", 100'000, true));
  const auto other = set(rules("b", 200'000, false));
  node_->commits_at_once = true;
  std::atomic<int> told{0};
  std::atomic<int> wrong{0};
  constexpr int kCalls = 400;
  for (std::size_t w = 0; w < 2; ++w) {
    for (int i = 0; i < kCalls; ++i) {
      worker(w).post([&, w](WorkerService& service) {
        const rpc::CheckItem asked = item(fmt::format("k{}", w));
        const rpc::AsRequest as(asked);
        const std::size_t part = 1;
        service.check(
            {&as.request, 1}, {&part, 1}, kAnyone, [&](std::size_t, std::span<Reply> replies) {
              bool good = replies[0].allowed && replies[0].statuses.size() == 3;
              for (const Status& status : replies[0].statuses) {
                const std::uint64_t base = status.rule[0] == 'a' ? 100'000 : 200'000;
                good &= status.rule[0] == replies[0].statuses[0].rule[0];
                good &= status.limit == base + static_cast<std::uint64_t>(status.rule[1] - '1');
              }
              // A thread that stood still while more rules were loaded than are kept says so.
              good |= replies[0].error.kind == ErrorKind::unknown;
              wrong += good ? 0 : 1;
              ++told;
            });
      });
    }
  }
  int loads = 0;
  EXPECT_TRUE(node_->eventually([&] {
    for (int i = 0; i < 5; ++i) node_->reload(++loads % 2 == 0 ? one : other);
    return told == 2 * kCalls;
  }));
  EXPECT_EQ(wrong, 0);
}

// The end.

/// Says on which thread it goes.
struct Witness {
  explicit Witness(std::shared_ptr<std::vector<std::thread::id>> to) : out(std::move(to)) {}
  ~Witness() { out->push_back(std::this_thread::get_id()); }
  Witness(const Witness&) = delete;
  Witness& operator=(const Witness&) = delete;
  std::shared_ptr<std::vector<std::thread::id>> out;
};

TEST_F(HomeRulesTest, WhatAFrontGaveGoesWhereItCameFrom) {
  start({home_rule(), alone(rule("commit", 10, Durability::commit)), alone(rule("async", 10))});
  node_->answers.status = [](std::function<void(std::string)> done) { done({}); };
  auto gone = std::make_shared<std::vector<std::thread::id>>();
  const auto ask = [&](const rpc::CheckItem& asked) {
    worker().run([&](WorkerService& service) {
      const rpc::AsRequest as(asked);
      const std::size_t part = 1;
      service.check({&as.request, 1}, {&part, 1}, kAnyone,
                    [witness = std::make_unique<Witness>(gone)](std::size_t, std::span<Reply>) {});
    });
  };
  // Answered at once, by another member, after a commit, by the main loop.
  ask(item("k", 1, "async"));
  ask(item(key(false)));
  ASSERT_TRUE(node_->eventually([&] { return !node_->links.asked.empty(); }));
  node_->links.asked[0].done(answer("home", 1));
  node_->links.asked.clear();
  node_->commits_at_once = true;
  ask(item("k", 1, "commit"));
  worker().run([&](WorkerService& service) {
    service.status(kAnyone, [witness = std::make_unique<Witness>(gone)](StatusReply&) {});
  });
  for (std::size_t count = 0; count < 4;) {
    rpc::test::turn(node_->loop, 1);
    worker().run([&](WorkerService&) { count = gone->size(); });
  }
  // Not answered at all, by a member, for want of a commit, as the main loop has ended.
  node_->commits_at_once = false;
  ask(item(key(false)));
  ask(item("k", 1, "commit"));
  node_->arrive();
  ASSERT_EQ(node_->links.asked.size(), 1u);
  worker().run([&](WorkerService& service) {
    service.status(kAnyone, [witness = std::make_unique<Witness>(gone)](StatusReply&) {});
  });
  const std::thread::id there = worker().id();
  worker().stop();
  EXPECT_THAT(*gone, testing::Each(there));
  EXPECT_EQ(gone->size(), 7u);
  // Their answers lead nowhere.
  node_->links.asked[0].done(answer("home", 1));
  node_->commits_at_once = true;
  node_->pump();
  rpc::test::turn(node_->loop, 5);
  EXPECT_EQ(checked(item("k", 1, "async"), 1), "allowed async 8/10");
}

}  // namespace
}  // namespace weir::node
