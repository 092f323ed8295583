#include <weir/node/service/forwarder.h>

#include <gtest/gtest.h>

#include <weir/limits/rendezvous.h>
#include <weir/limits/test_util.h>
#include <weir/node/service/forwarder_test_util.h>

namespace weir::node {
namespace {

using weir::test::set;

using test::HomeCluster;
using Fault = HomeCluster::Fault;

constexpr Nanos kNow = 400'000 * kHour;

Rule rule(std::string name, std::uint64_t limit, Enforcement enforcement,
          OnFailure on_failure = OnFailure::closed, std::vector<std::string> key = {"key"}) {
  Rule out = weir::test::rule(std::move(name), limit);
  out.key = std::move(key);
  out.window = kHour;
  out.enforcement = enforcement;
  out.on_failure = on_failure;
  return out;
}

std::vector<crdt::Member> members() {
  return {{"ap", "ap-1"}, {"eu", "eu-1"}, {"eu", "eu-2"}, {"us", "us-1"}};
}

rpc::CheckItem item(const std::string& key, std::uint64_t hits = 1, const std::string& id = "") {
  return {"api", {{"key", key}, {"user", "u" + key}}, hits, id};
}

/// The node that counts the key in `rule`, once asked.
std::size_t home_of(HomeCluster& cluster, std::uint32_t rule_index, const rpc::CheckItem& asked) {
  for (std::size_t i = 0; i < cluster.size(); ++i) {
    if (cluster.used(i, rule_index, asked) > 0) return i;
  }
  return cluster.size();
}

TEST(HomeMap, AllNodesAgreeAndWeightsAreShares) {
  std::vector<crdt::Member> all = members();
  std::vector<crdt::Member> turned = {all[3], all[2], all[0], all[1]};
  HomeMap one(all, {{"us", 2}});
  HomeMap other(turned, {{"us", 2}});
  std::map<std::string, int> regions;
  for (std::uint64_t i = 0; i < 8000; ++i) {
    const std::uint64_t key = stable_hash(std::to_string(i));
    auto order = one.order(key);
    auto same = other.order(key);
    ASSERT_EQ(order.size(), same.size());
    for (std::size_t k = 0; k < order.size(); ++k) EXPECT_EQ(all[order[k]], turned[same[k]]);
    for (std::size_t member : order) EXPECT_EQ(all[member].region, all[order[0]].region);
    ++regions[all[order[0]].region];
  }
  EXPECT_NEAR(regions["ap"], 2000, 150);
  EXPECT_NEAR(regions["eu"], 2000, 150);
  EXPECT_NEAR(regions["us"], 4000, 200);
  EXPECT_TRUE(HomeMap(all, {{"us", 0}, {"eu", 0}, {"ap", 0}}).order(1).empty());
}

TEST(HomeMap, RulesOfOneKeyHaveOneHome) {
  std::vector<Entry> entries{{"key", "k"}, {"user", "u"}};
  Request request;
  request.domain = "api";
  request.descriptor = entries;
  auto key = [&](std::vector<std::string> names) {
    return HomeMap::key_of(rule("r" + std::to_string(names.size()), 1, Enforcement::home,
                                OnFailure::closed, std::move(names)),
                           request);
  };
  EXPECT_EQ(key({"key"}), HomeMap::key_of(rule("other", 7, Enforcement::home), request));
  EXPECT_NE(key({"key"}), key({"user"}));
  EXPECT_NE(key({"key"}), key({"key", "user"}));
  EXPECT_NE(key({"user", "key"}), key({"key", "user"}));
}

TEST(Forwarder, OneNodeCountsAKeyWhoeverIsAsked) {
  HomeCluster cluster(members(), set({rule("r", 10, Enforcement::home)}), {}, kNow);
  for (int k = 0; k < 20; ++k) {
    rpc::CheckItem asked = item("k" + std::to_string(k));
    for (std::size_t i = 0; i < 12; ++i) {
      Reply reply = cluster.check(i % 4, asked);
      EXPECT_EQ(reply.error.to_string(), "");
      EXPECT_EQ(reply.allowed, i < 10);
      ASSERT_NE(reply.decider(), nullptr);
      EXPECT_EQ(reply.decider()->remaining, i < 10 ? 9 - i : 0);
    }
    EXPECT_EQ(cluster.used(home_of(cluster, 0, asked), 0, asked), 10u);
    EXPECT_EQ(cluster.used(0, asked), 10u);
    EXPECT_EQ(cluster.check(0, item("k" + std::to_string(k), 0)).decider()->remaining, 0u);
  }
}

TEST(Forwarder, LocalAndHomeRulesConsumeTogetherOrNotAtAll) {
  HomeCluster cluster(members(),
                      set({rule("local", 5, Enforcement::merged, OnFailure::open),
                           rule("home", 3, Enforcement::home),
                           rule("by-user", 100, Enforcement::home, OnFailure::closed, {"user"})}),
                      {}, kNow);
  for (int k = 0; k < 20; ++k) {
    rpc::CheckItem asked = item("k" + std::to_string(k));
    for (int i = 0; i < 4; ++i) {
      Reply reply = cluster.check(0, asked);
      EXPECT_EQ(reply.allowed, i < 3) << reply.error.to_string();
      ASSERT_GE(reply.statuses.size(), reply.allowed ? 3u : 2u);
      EXPECT_EQ(reply.statuses[0].rule, "local");
      EXPECT_EQ(reply.statuses[1].rule, "home");
      EXPECT_EQ(reply.decider()->rule, "home");
    }
    // Denied here: nobody else is asked.
    EXPECT_EQ(cluster.check(0, item("k" + std::to_string(k), 6)).decider()->rule, "local");
    for (std::uint32_t r = 0; r < 3; ++r) EXPECT_EQ(cluster.used(r, asked), 3u);
  }
  for (std::size_t i = 0; i < cluster.size(); ++i) {
    EXPECT_EQ(cluster.engine(i).limiter().tickets().open, 0u);
  }
}

TEST(Forwarder, ALaterDescriptorIsDecidedByItsHome) {
  Rule home = rule("home", 3, Enforcement::home);
  home.match = {{"scope", MatchAny{}}};
  HomeCluster cluster(members(), set({rule("local", 100, Enforcement::merged), home}), {}, kNow);
  const auto second = [](std::uint64_t hits, const std::string& key) {
    return rpc::CheckDescriptor{{{"key", key}, {"user", "u"}, {"scope", "all"}}, hits};
  };
  for (int k = 0; k < 12; ++k) {
    const std::string key = "k" + std::to_string(k);
    for (std::size_t node = 0, passed = 0; node < cluster.size(); ++node) {
      rpc::CheckItem asked = item("first");
      asked.more = {second(1, key)};
      for (int i = 0; i < 2; ++i) {
        const Reply reply = cluster.check(node, asked);
        EXPECT_EQ(reply.error.to_string(), "");
        EXPECT_EQ(reply.allowed, passed < 3) << key << " at " << node;
        passed += reply.allowed;
      }
    }
  }
  // Two keys of one rule with different homes: which do is up to the map.
  rpc::CheckItem both = item("first", 0);
  std::size_t refused = 0;
  for (int k = 0; k < 12; ++k) {
    both.more = {second(0, "a"), second(0, "k" + std::to_string(k))};
    const Reply reply = cluster.check(0, both);
    refused += reply.error.kind == ErrorKind::unsupported;
    EXPECT_TRUE(reply.error.empty() || reply.error.kind == ErrorKind::unsupported);
  }
  EXPECT_GT(refused, 0u);
  EXPECT_LT(refused, 12u);
}

TEST(Forwarder, HoldsOutlastHomesThatTakeTheirTime) {
  constexpr Nanos kDeadline = 10 * kSecond;
  HomeCluster cluster(members(),
                      set({rule("local", 1000, Enforcement::merged, OnFailure::open),
                           rule("one", 1000, Enforcement::home),
                           rule("two", 3, Enforcement::home, OnFailure::closed, {"user"})}),
                      {}, kNow, kDeadline);
  cluster.answer_time = kDeadline - kMillisecond;
  for (int k = 0; k < 7; ++k) {
    rpc::CheckItem asked = item("k" + std::to_string(k));
    for (int i = 0; i < 5; ++i) {
      const Reply reply = cluster.check(0, asked);
      EXPECT_EQ(reply.error.to_string(), "");
      EXPECT_EQ(reply.allowed, i < 3);
    }
    for (std::uint32_t r = 0; r < 3; ++r) EXPECT_EQ(cluster.used(r, asked), 3u) << k;
  }
}

TEST(Forwarder, StatusesStandInTheOrderOfTheirOwnDomainsRules) {
  std::vector<Rule> rules{rule("home", 3, Enforcement::home),
                          rule("local", 5, Enforcement::merged, OnFailure::open)};
  for (Rule& other : rules) other.domain = "other";
  rules.push_back(rule("local", 5, Enforcement::merged, OnFailure::open));
  rules.push_back(rule("home", 3, Enforcement::home));
  HomeCluster cluster(members(), set(rules), {}, kNow);
  for (int k = 0; k < 30; ++k) {
    const Reply reply = cluster.check(0, item("k" + std::to_string(k)));
    ASSERT_EQ(reply.statuses.size(), 2u);
    EXPECT_EQ(reply.statuses[0].rule, "local");
    EXPECT_EQ(reply.statuses[1].rule, "home");
  }
}

TEST(Forwarder, ARequestWithAnIdCountsOnceAlsoAfterALostAnswer) {
  HomeCluster cluster(
      members(), set({rule("local", 5, Enforcement::merged), rule("home", 3, Enforcement::home)}),
      {}, kNow);
  for (int k = 0; k < 20; ++k) {
    rpc::CheckItem asked = item("k" + std::to_string(k), 1, "id" + std::to_string(k));
    int lost = 2;  // also what is asked again at once
    cluster.fault = [&](std::size_t, std::size_t) {
      return lost-- > 0 ? Fault::answer_lost : Fault::none;
    };
    Reply first = cluster.check(0, asked);
    Reply second = cluster.check(0, asked);
    Reply third = cluster.check(0, asked);
    EXPECT_EQ(second.error.to_string(), "");
    EXPECT_TRUE(second.allowed);
    EXPECT_TRUE(third.allowed);
    EXPECT_TRUE(third.repeated);
    EXPECT_EQ(cluster.used(0, asked), 1u);
    EXPECT_EQ(cluster.used(1, asked), 1u);
    if (lost <= 0) {
      EXPECT_EQ(first.error.to_string().find("closed: rule \"home\""), 0u)
          << first.error.to_string();
    }
    // One that was denied may pass later: it is not remembered, here neither.
    for (int i = 0; i < 2; ++i)
      EXPECT_TRUE(cluster.check(0, item("k" + std::to_string(k))).allowed);
    rpc::CheckItem late = item("k" + std::to_string(k), 1, "late" + std::to_string(k));
    EXPECT_FALSE(cluster.check(0, late).allowed);
    cluster.now += kHour;
    EXPECT_TRUE(cluster.check(0, late).allowed);
    EXPECT_EQ(cluster.used(0, asked), 1u);
    EXPECT_EQ(cluster.used(1, asked), 1u);
  }
}

TEST(Forwarder, AHomeThatIsAwayIsTheRulesPolicy) {
  HomeCluster cluster(members(),
                      set({rule("local", 500, Enforcement::merged),
                           rule("open", 100, Enforcement::home, OnFailure::open)}),
                      {{"us", 0}, {"ap", 0}}, kNow);
  cluster.fault = [](std::size_t, std::size_t) { return Fault::not_sent; };
  int allowed = 0;
  for (int i = 0; i < 50; ++i) {
    Reply reply = cluster.check(0, item("k"));
    allowed += reply.allowed;
    EXPECT_EQ(reply.error.to_string(), "");
    EXPECT_TRUE(reply.statuses[1].degraded);
  }
  EXPECT_EQ(allowed, 30);  // 100 / 4 * 1.2
  EXPECT_EQ(cluster.used(0, item("k")), 30u);
  EXPECT_EQ(cluster.forwarder(0).counters().degraded, 50u);

  HomeCluster closed(members(),
                     set({rule("local", 500, Enforcement::merged),
                          rule("home", 100, Enforcement::home, OnFailure::closed)}),
                     {{"us", 0}, {"ap", 0}}, kNow);
  closed.fault = cluster.fault;
  Reply reply = closed.check(0, item("k"));
  EXPECT_FALSE(reply.allowed);
  EXPECT_EQ(reply.error.to_string().find("closed: rule \"home\" is on_failure: closed, and its "
                                         "home eu/eu-"),
            0u)
      << reply.error.to_string();
  EXPECT_EQ(closed.used(0, item("k")), 0u);
}

TEST(Forwarder, OnlyAnOpenRuleMovesToTheNextOfItsRegion) {
  for (OnFailure on_failure : {OnFailure::open, OnFailure::closed}) {
    HomeCluster cluster(members(), set({rule("r", 100, Enforcement::home, on_failure)}),
                        {{"us", 0}, {"ap", 0}}, kNow);
    cluster.check(0, item("k"));
    std::size_t home = home_of(cluster, 0, item("k"));
    ASSERT_TRUE(home == 1 || home == 2);
    cluster.fault = [home](std::size_t, std::size_t to) {
      return to == home ? Fault::not_sent : Fault::none;
    };
    Reply reply = cluster.check(0, item("k"));
    EXPECT_EQ(reply.allowed, on_failure == OnFailure::open);
    EXPECT_EQ(cluster.used(3 - home, 0, item("k")), on_failure == OnFailure::open ? 1u : 0u);
  }
}

TEST(Forwarder, AForwardedRequestGoesNoFurther) {
  HomeCluster cluster(
      members(), set({rule("local", 5, Enforcement::merged), rule("home", 3, Enforcement::home)}),
      {{"us", 0}, {"ap", 0}}, kNow);
  rpc::CheckItem asked = item("k");
  std::vector<Entry> entries{{"key", "k"}};
  std::vector<std::string_view> rule_filter{"home"};
  Request request{"api", entries, 1, {}, false, rule_filter};
  EXPECT_FALSE(cluster.forwarder(0).concerns(request));
  EXPECT_EQ(cluster.forwarder(0).refuse(request).to_string().find(
                "unavailable: ap/ap-1: it is not the home of rule "
                "\"home\""),
            0u);
  rule_filter[0] = "local";
  EXPECT_NE(cluster.forwarder(1).refuse(request).to_string(), "") << "that is no home rule";
  rule_filter[0] = "nonsense";
  EXPECT_NE(cluster.forwarder(1).refuse(request).to_string(), "");
  EXPECT_EQ(cluster.forwarder(0).counters().refused, 1u);
  rule_filter[0] = "home";
  EXPECT_NE(cluster.forwarder(1).refuse(request).empty(),
            cluster.forwarder(2).refuse(request).empty());
  request.rule_filter = {};
  EXPECT_EQ(
      cluster.forwarder(0).remote_home(request).find("rule \"home\" is decided by its home eu/"),
      0u);
}

TEST(Forwarder, ARequestThatComesAgainWhileRightsAreOnTheirWayCountsOnce) {
  HomeCluster cluster(members(), set({rule("few", 4, Enforcement::escrow)}), {}, kNow);
  cluster.give_shares();
  EXPECT_TRUE(cluster.check(0, item("k")).allowed);
  // Its share is used, and nobody can be asked: it waits for what it has asked for itself.
  cluster.fault = [](std::size_t, std::size_t) { return Fault::not_sent; };
  const rpc::CheckItem asked = item("k", 1, "id");
  std::vector<Entry> entries{{"key", "k"}, {"user", "uk"}};
  Request request{"api", entries, 1, asked.id};
  EXPECT_FALSE(cluster.forwarder(0).knows(request));
  Decision denied;
  cluster.engine(0).check(request, cluster.now, denied);
  ASSERT_FALSE(denied.allowed);
  std::vector<Reply> replies;
  auto told = [&](Reply reply) { replies.push_back(std::move(reply)); };
  ASSERT_TRUE(cluster.forwarder(0).pass_on(request, denied, told));
  ASSERT_TRUE(cluster.forwarder(0).knows(request));
  for (int i = 0; i < 70; ++i) cluster.forwarder(0).decide(asked, told);
  EXPECT_EQ(replies.size(), 6u);  // those that are too many
  for (const Reply& reply : replies) {
    EXPECT_EQ(reply.error.to_string(), "unknown: the same request is being decided");
  }
  replies.clear();
  cluster.fault = [](std::size_t, std::size_t) { return Fault::none; };
  cluster.exchange(100 * kMillisecond);
  ASSERT_EQ(replies.size(), 65u);
  for (const Reply& reply : replies) EXPECT_TRUE(reply.allowed) << reply.error.to_string();
  EXPECT_TRUE(replies.front().repeated);
  EXPECT_FALSE(replies.back().repeated);  // the one that came first
  EXPECT_EQ(cluster.used_rows(0, 0, asked), 2u);
}

}  // namespace
}  // namespace weir::node
