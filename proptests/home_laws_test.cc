#include <weir/node/home_test_util.h>

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
    "one home", "fails open", "everything arrived", "allowed after a lost answer", "a peek") {
  std::vector<Rule> rules;
  const bool open = *chance(25).as("open");
  const std::size_t homes = *between<std::size_t>(1, 2).as("home rules");
  for (std::size_t i = 0; i <= homes; ++i) {
    Rule rule;
    rule.domain = "api";
    rule.name = "r" + std::to_string(i);
    rule.key = {i == 2 ? "user" : "key"};
    rule.limit = *one_of<std::uint64_t>({4, 15, 40});
    rule.window = kHour;
    rule.algorithm = *one_of<Algorithm>({Algorithm::fixed_window, Algorithm::sliding_window});
    if (i > 0) {
      rule.enforcement = Enforcement::home;
      rule.on_failure = open ? OnFailure::open : OnFailure::closed;
    }
    rules.push_back(std::move(rule));
  }
  auto set = rule_set(rules);
  std::vector<crdt::Member> members = {{"a", "1"}, {"b", "1"}, {"b", "2"}, {"c", "1"}};
  HomeCluster cluster(members, set, {{"b", *between<unsigned>(0, 2)}}, kStart);
  const int loss = *one_of<int>({0, 10, 40});
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
    rpc::CheckReply reply = cluster.check(at, item);
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
  cluster.now += kMinute;
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

}  // namespace
}  // namespace weir::laws
