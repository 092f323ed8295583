#include <weir/node/service/forwarder_test_util.h>

#include <map>
#include <string>

#include "law.h"
#include "schedules.h"

/// Rules that one node decides for all.
namespace weir::laws {
namespace {

using node::test::HomeCluster;
using Fault = HomeCluster::Fault;

LAW(42,
    "a request of local and home rules consumes from all or none, and a home that fails closed "
    "never exceeds the limit",
    "denied at home", "denied here", "sent again", "answer lost", "not sent", "several homes",
    "one home", "fails open", "everything arrived", "allowed after a lost answer", "a peek",
    "slow homes") {
  std::vector<Rule> rules;
  const bool open = *chance(25).as("open");
  const bool slow = *chance(30);
  // What one home holds has to stand while all others are asked: that takes several.
  const std::size_t homes = *between<std::size_t>(slow ? 2 : 1, 3).as("home rules");
  for (std::size_t i = 0; i <= homes; ++i) {
    Rule rule;
    rule.domain = "api";
    rule.name = "r" + std::to_string(i);
    rule.key = {i == 2 ? "user" : "key"};
    if (i == 3) rule.key.push_back("user");
    rule.limit = *one_of<std::uint64_t>({4, 15, 40});
    rule.window = kDay;
    rule.algorithm = *one_of<Algorithm>({Algorithm::fixed_window, Algorithm::sliding_window});
    if (i > 0) {
      rule.enforcement = Enforcement::home;
      rule.on_failure = open ? OnFailure::open : OnFailure::closed;
    }
    rules.push_back(std::move(rule));
  }
  auto set = rule_set(rules);
  std::vector<crdt::Member> members = {{"a", "1"}, {"b", "1"}, {"b", "2"}, {"c", "1"}};
  const Nanos deadline = *one_of<Nanos>({500 * kMillisecond, 6 * kSecond, 10 * kSecond});
  HomeCluster cluster(members, set, {{"b", *between<unsigned>(0, 2)}}, kStart, deadline);
  if (slow) cluster.answer_time = deadline - kMillisecond;
  reached("slow homes", slow);
  const int loss = *one_of<int>({0, slow ? 0 : 10, 40});
  bool arrived = true;
  bool lost_answer = false;
  cluster.fault = [&](std::size_t, std::size_t) {
    if (!*chance(loss)) return Fault::none;
    arrived = false;
    bool lost = *chance(50);
    reached("answer lost", lost);
    reached("not sent", !lost);
    lost_answer |= lost;
    return lost ? Fault::answer_lost : Fault::not_sent;
  };
  std::map<std::string, std::uint64_t> passed;  // by key: units of requests that were let pass
  // Units that a home may have counted of requests that were not let pass: by key, and by id.
  std::map<std::string, std::uint64_t> unknown;
  std::map<std::string, std::pair<std::string, std::uint64_t>> unknown_ids;
  std::map<std::string, std::pair<std::size_t, rpc::CheckItem>> open_ids;  // denied, or not known
  int ids = 0;
  for (int step = *between(1, 60).as("steps"); step > 0; --step) {
    std::size_t at = *between<std::size_t>(0, members.size() - 1);
    std::string key(*chance(70) ? "x" : "y");
    rpc::CheckItem item{"api", {{"key", key}, {"user", "u" + key}}, 1};
    item.hits = *rc::gen::weightedElement<std::uint64_t>({{6, 1}, {2, 3}, {1, 0}});
    if (*chance(40)) item.id = "id" + std::to_string(++ids);
    const bool again = !open_ids.empty() && *chance(30);
    if (again) std::tie(at, item) = open_ids.begin()->second;
    key = item.entries[0].second;
    lost_answer = false;
    Reply reply = cluster.check(at, item);
    reached("a peek", item.hits == 0);
    reached("sent again", again);
    reached("fails open", open && !arrived);
    if (again) open_ids.erase(item.id);
    if (reply.error.empty() && reply.allowed) {
      RC_ASSERT(item.hits == 0 || !reply.repeated || again);
      passed[key] += item.hits;
      reached("allowed after a lost answer", unknown_ids.erase(item.id) > 0);
      continue;
    }
    reached("denied here", reply.error.empty() && reply.decider()->rule == "r0");
    reached("denied at home", reply.error.empty() && reply.decider()->rule != "r0");
    if (lost_answer && item.id.empty()) unknown[key] += item.hits;
    if (lost_answer && !item.id.empty()) unknown_ids[item.id] = {key, item.hits};
    if (!item.id.empty() && item.hits > 0) open_ids[item.id] = {at, item};
  }
  for (const auto& [id, what] : unknown_ids) unknown[what.first] += what.second;
  // Reservations whose settlement was lost are charged.
  cluster.now += 5 * kMinute;
  for (std::size_t i = 0; i < cluster.size(); ++i) cluster.engine(i).pump(cluster.now);
  for (const char* key : {"x", "y"}) {
    rpc::CheckItem item{"api", {{"key", key}, {"user", "u" + std::string(key)}}, 1};
    // Here exactly what passed is counted: at whichever nodes were asked.
    RC_ASSERT(cluster.used(0, item) == passed[key]);
    for (std::uint32_t r = 1; r <= homes; ++r) {
      std::uint64_t counted = cluster.used(r, item);
      if (!open) {
        RC_ASSERT(counted >= passed[key]);
        RC_ASSERT(passed[key] <= rules[r].limit);
        RC_ASSERT(counted <= rules[r].limit);
      }
      if (arrived) RC_ASSERT(counted == passed[key]);
      if (homes == 1 && !open) RC_ASSERT(counted <= passed[key] + unknown[key]);
    }
  }
  reached("several homes", homes > 1);
  reached("one home", homes == 1);
  reached("everything arrived", arrived);
}

Rule escrow_rule(std::string name, std::string key, std::uint64_t limit) {
  Rule rule;
  rule.domain = "api";
  rule.name = std::move(name);
  rule.key = {std::move(key)};
  rule.limit = limit;
  rule.window = kHour;
  rule.enforcement = Enforcement::escrow;
  return rule;
}

LAW(46,
    "where one node asks, each unit of a scarce limit passes at the first try, and those that "
    "decide for it want none",
    "had its share", "decided elsewhere", "rights had come", "at once", "with a name") {
  const std::uint64_t limit =
      *(*chance(70) ? between<std::uint64_t>(3, 5) : between<std::uint64_t>(1, 31)).as("limit");
  std::vector<crdt::Member> members = {{"a", "1"}, {"b", "1"}, {"b", "2"}, {"c", "1"}};
  HomeCluster cluster(members, rule_set({escrow_rule("r", "key", limit)}), {}, kStart);
  cluster.give_shares();
  const std::size_t node = *between<std::size_t>(0, members.size() - 1).as("who asks");
  rpc::CheckItem item{"api", {{"key", *one_of<std::string>({"x", "y", "z"})}}, 1};
  for (std::uint64_t i = 0; i <= limit; ++i) {
    if (*chance(30)) item.id = "id" + std::to_string(i);
    reached("with a name", !item.id.empty());
    Reply reply = cluster.check(node, item);
    RC_ASSERT(reply.error.empty());
    RC_ASSERT(reply.allowed == (i < limit));
    item.id.clear();
    const Nanos pause = *one_of<Nanos>({0, 10, 20, 20, 400}) * kMillisecond;
    cluster.exchange(pause);
    reached("at once", pause == 0);
  }
  for (std::size_t i = 0; i < members.size(); ++i) {
    RC_ASSERT(i == node || cluster.engine(i).escrow().counters().requests_sent == 0);
  }
  reached("had its share", cluster.forwarder(node).passed_on().requests < limit);
  reached("decided elsewhere", cluster.forwarder(node).passed_on().admitted > 0);
  reached("rights had come", cluster.engine(node).escrow().counters().units_received > 0);
}

LAW(23,
    "requests that others decide, as rights are missing here, never exceed the limit, consume from "
    "all of their rules or none, and count once",
    "decided elsewhere", "a second holder", "suppressed", "denied here", "sent again", "told again",
    "answer lost", "not sent", "two rules of rights", "all used", "allowed after a lost answer",
    "rights had come", "everything arrived") {
  std::vector<Rule> rules{escrow_rule("r1", "key", *between<std::uint64_t>(1, 31).as("limit"))};
  const bool two = *chance(30).as("two rules");
  if (two) rules.push_back(escrow_rule("r2", "user", *between<std::uint64_t>(1, 31)));
  Rule local = escrow_rule("r0", "key", *one_of<std::uint64_t>({5, 1000}));
  local.enforcement = Enforcement::merged;
  rules.insert(rules.begin(), local);
  std::vector<crdt::Member> members = {{"a", "1"}, {"b", "1"}, {"b", "2"}, {"c", "1"}};
  HomeCluster cluster(members, rule_set(rules), {}, kStart);
  cluster.give_shares();
  const int loss = *one_of<int>({0, 0, 10, 40, 70});
  bool arrived = true;
  bool lost_answer = false;
  cluster.fault = [&](std::size_t, std::size_t) {
    if (!*chance(loss)) return Fault::none;
    arrived = false;
    bool lost = *chance(70);
    lost_answer |= lost;
    reached("answer lost", lost);
    reached("not sent", !lost);
    return lost ? Fault::answer_lost : Fault::not_sent;
  };
  std::uint64_t passed = 0;
  std::uint64_t unknown = 0;  // units that a holder may have counted and nobody was told of
  std::map<std::string, std::uint64_t> unknown_ids;
  std::map<std::string, std::pair<std::size_t, rpc::CheckItem>> open_ids;
  std::map<std::string, std::pair<std::size_t, rpc::CheckItem>> passed_ids;
  const std::size_t favourite = *between<std::size_t>(0, members.size() - 1);
  int ids = 0;
  for (int step = *between(1, 60).as("steps"); step > 0; --step) {
    if (*chance(20)) cluster.exchange(*one_of<Nanos>({20, 300, 2500}) * kMillisecond);
    std::size_t at = *chance(70) ? favourite : *between<std::size_t>(0, members.size() - 1);
    rpc::CheckItem item{"api", {{"key", "x"}, {"user", "u"}}, 1};
    item.hits = *rc::gen::weightedElement<std::uint64_t>({{8, 1}, {2, 2}, {1, 0}});
    if (*chance(40)) item.id = "id" + std::to_string(++ids);
    bool again = !open_ids.empty() && *chance(30);
    bool told = !again && !passed_ids.empty() && *chance(10);
    if (again) std::tie(at, item) = open_ids.begin()->second;
    if (told) std::tie(at, item) = passed_ids.begin()->second;
    lost_answer = false;
    Reply reply = cluster.check(at, item);
    RC_ASSERT(reply.error.empty());
    reached("sent again", again);
    open_ids.erase(item.id);
    if (told) {
      RC_ASSERT(reply.allowed && reply.repeated);
      reached("told again");
      continue;
    }
    if (reply.allowed) {
      passed += item.hits;
      reached("allowed after a lost answer", unknown_ids.erase(item.id) > 0);
      if (!item.id.empty() && item.hits > 0) passed_ids[item.id] = {at, item};
    } else {
      reached("denied here", reply.decider()->rule == "r0");
      if (lost_answer && item.id.empty()) unknown += item.hits;
      if (lost_answer && !item.id.empty()) unknown_ids[item.id] = item.hits;
      if (!item.id.empty() && item.hits > 0) open_ids[item.id] = {at, item};
    }
    for (const Rule& rule : rules) RC_ASSERT(rule.name == "r0" || passed <= rule.limit);
  }
  for (const auto& [id, hits] : unknown_ids) unknown += hits;
  const bool held_back = rules[0].limit < 1000;
  if (loss == 0 && !two && !held_back) {
    // Whatever is left passes here, and soon.
    for (int tries = 0; tries < 100 && passed < rules[1].limit; ++tries) {
      passed += cluster.check(favourite, {"api", {{"key", "x"}, {"user", "u"}}, 1}).allowed;
      cluster.exchange(100 * kMillisecond);
    }
    RC_ASSERT(passed == rules[1].limit);
    reached("all used");
  }
  cluster.fault = [](std::size_t, std::size_t) { return Fault::none; };
  cluster.exchange(20 * kSecond);
  rpc::CheckItem item{"api", {{"key", "x"}, {"user", "u"}}, 1};
  for (std::size_t i = 0; i < cluster.size(); ++i) {
    RC_ASSERT(cluster.used(i, 0, item) == passed);
    for (std::uint32_t r = 1; r < rules.size(); ++r) {
      std::uint64_t counted = cluster.used_rows(i, r, item);
      RC_ASSERT(counted >= passed);
      RC_ASSERT(counted <= rules[r].limit);
      if (arrived) RC_ASSERT(counted == passed);
      if (!two) RC_ASSERT(counted <= passed + unknown);
    }
    const node::PassedOnCounters& asked = cluster.forwarder(i).passed_on();
    reached("decided elsewhere", asked.admitted > 0);
    reached("a second holder", asked.asked > asked.requests);
    reached("suppressed", asked.suppressed > 0);
    reached("rights had come", cluster.engine(i).escrow().counters().units_received > 0);
  }
  reached("two rules of rights", two);
  reached("everything arrived", arrived);
}

}  // namespace
}  // namespace weir::laws
