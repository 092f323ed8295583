// A node's workers decide on threads of their own, on what they share: what they admit together,
// and what each of their clients is told.

#include <weir/node/service/worker_service.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <weir/node/service/service_test_util.h>

#include "generators.h"
#include "law.h"

namespace weir::laws {
namespace {

using node::WorkerService;
using node::test::kAnyone;
using node::test::ServiceNode;

/// Reached only where a call is never answered.
constexpr auto kPatience = std::chrono::seconds(10);

/// Small limits, so that requests are denied now and then.
Rule drawn_rule(std::size_t number, Durability durability) {
  Rule rule;
  rule.domain = "api";
  rule.name = fmt::format("r{}", number);
  rule.key = *one_of<std::vector<std::string>>({{"key"}, {"key"}, {"user"}, {}}).as("key");
  rule.window = kHour;
  rule.algorithm =
      *one_of<Algorithm>({Algorithm::fixed_window, Algorithm::fixed_window, Algorithm::token_bucket,
                          Algorithm::sliding_window, Algorithm::sliding_log})
           .as("algorithm");
  rule.limit = *one_of<std::uint64_t>({1, 3, 10, 40, 1000}).as("limit");
  rule.burst = is_bucket(rule.algorithm) ? rule.limit : 0;
  rule.durability = durability;
  rule.on_failure = *one_of<OnFailure>({OnFailure::open, OnFailure::closed}).as("on_failure");
  return rule;
}

rpc::CheckItem drawn_item() {
  const auto entries = [] {
    return std::vector<std::pair<std::string, std::string>>{
        {"key", fmt::format("k{}", *choice(3))}, {"user", fmt::format("u{}", *choice(2))}};
  };
  const auto hits = [] {
    return *rc::gen::weightedElement<std::uint64_t>({{8, 1}, {2, 2}, {1, 0}, {1, 5}});
  };
  rpc::CheckItem item{"api", entries(), hits()};
  for (int i = *rc::gen::weightedElement<int>({{8, 0}, {2, 1}, {1, 2}}); i > 0; --i) {
    item.more.push_back({entries(), hits()});
  }
  return item;
}

/// The value of the rule's key in one descriptor.
std::string series_of(const Rule& rule,
                      const std::vector<std::pair<std::string, std::string>>& entries) {
  if (rule.key.empty()) return {};
  return entries[rule.key[0] == "key" ? 0 : 1].second;
}

using Units = std::map<std::pair<std::size_t, std::string>, std::uint64_t>;  // by rule and series

/// What a request consumes if it passes.
Units units_of(const RuleSet& rules, const rpc::CheckItem& item) {
  Units units;
  for (std::size_t r = 0; r < rules.rules().size(); ++r) {
    const Rule& rule = rules.rules()[r];
    units[{r, series_of(rule, item.entries)}] += item.hits;
    for (const rpc::CheckDescriptor& more : item.more) {
      units[{r, series_of(rule, more.entries)}] += more.hits;
    }
  }
  return units;
}

std::uint64_t sum_of(const Units& units) {
  std::uint64_t sum = 0;
  for (const auto& [series, count] : units) sum += count;
  return sum;
}

/// One call of a worker's service. What is told is the worker's until all calls are answered.
struct Call {
  std::size_t worker = 0;
  std::vector<std::vector<rpc::CheckItem>> parts;
  std::vector<std::vector<Reply>> replies;  // by part
  std::vector<int> told;                    // how often, by part
  bool waited = false;                      // some part was told in a later turn
};

Call drawn_call(std::size_t workers) {
  Call call;
  call.worker = *between<std::size_t>(0, workers - 1);
  for (int parts = *between(1, 4); parts > 0; --parts) {
    std::vector<rpc::CheckItem> part;
    for (int i = *between(0, 3); i > 0; --i) part.push_back(drawn_item());
    call.parts.push_back(std::move(part));
  }
  return call;
}

/// `with(item, reply, worker)` for everything that was asked.
template <typename With>
void each_reply(const std::vector<Call>& calls, With with) {
  for (const Call& call : calls) {
    for (std::size_t p = 0; p < call.parts.size(); ++p) {
      for (std::size_t i = 0; i < call.parts[p].size(); ++i) {
        with(call.parts[p][i], call.replies[p][i], call.worker);
      }
    }
  }
}

/// A node whose workers are asked all at once. The calls outlive it.
class Rig {
 public:
  explicit Rig(node::test::ServiceNodeOptions options) : rules(options.rules) {
    options.start = kStart;
    node = std::make_unique<ServiceNode>(std::move(options));
  }

  /// Each worker begins when all have come, with the first half of the calls. `in_turn` is called
  /// on the main thread, in each of its turns. Every part of every call has to be told, once, with
  /// a reply to each request.
  void run(std::vector<Call>& calls, const std::function<void(int turn)>& in_turn) {
    auto start = std::make_shared<std::barrier<>>(std::ssize(node->workers));
    for (auto& worker : node->workers) {
      worker->post([start](WorkerService&) { start->arrive_and_wait(); });
    }
    std::size_t parts = 0;
    for (std::size_t i = 0; i < calls.size(); ++i) {
      // The second half finds what the first has waiting.
      if (i > 0 && i == calls.size() / 2) {
        node->arrive();
        in_turn(0);
      }
      Call& call = calls[i];
      call.replies.resize(call.parts.size());
      call.told.resize(call.parts.size());
      parts += call.parts.size();
      node->workers[call.worker]->post([&](WorkerService& service) { ask(service, call); });
    }
    int turn = 1;
    const auto until = std::chrono::steady_clock::now() + kPatience;
    node->eventually([&] {
      in_turn(turn++);
      return answers_ >= parts || std::chrono::steady_clock::now() > until;
    });
    if (answers_ < parts) RC_FAIL("some calls were not answered");
    // What is told once more is told by now.
    node->pump();
    node->commit();
    node->arrive();
    for (auto& worker : node->workers) worker->run([](WorkerService&) {});
    for (const Call& call : calls) {
      reached("answered in a later turn", call.waited);
      for (std::size_t p = 0; p < call.parts.size(); ++p) {
        RC_ASSERT(call.told[p] == 1);
        RC_ASSERT(call.replies[p].size() == call.parts[p].size());
      }
    }
  }

  std::uint64_t used(std::size_t rule, const rpc::CheckItem& item) {
    const rpc::AsRequest as(item);
    return node->engine->limiter().used(static_cast<std::uint32_t>(rule), as.request, kStart);
  }

  std::shared_ptr<const RuleSet> rules;
  std::unique_ptr<ServiceNode> node;
  std::function<void(const Call&, std::size_t part)> on_told;  // on the worker's thread

 private:
  void ask(WorkerService& service, Call& call) {
    std::vector<std::unique_ptr<rpc::AsRequest>> kept;
    std::vector<Request> requests;
    std::vector<std::size_t> sizes;
    for (const auto& part : call.parts) {
      sizes.push_back(part.size());
      for (const rpc::CheckItem& item : part) {
        kept.push_back(std::make_unique<rpc::AsRequest>(item));
        requests.push_back(kept.back()->request);
      }
    }
    service.check(requests, sizes, kAnyone,
                  [this, &call](std::size_t part, std::span<Reply> replies) {
                    call.replies[part].assign(replies.begin(), replies.end());
                    ++call.told[part];
                    if (on_told) on_told(call, part);
                    ++answers_;
                  });
    call.waited = std::count(call.told.begin(), call.told.end(), 0) > 0;
  }

  std::atomic<std::size_t> answers_{0};
};

std::vector<Rule> drawn_rules(std::vector<Durability> durabilities) {
  std::vector<Rule> rules;
  for (std::size_t i = *between<std::size_t>(1, 3).as("rules"); i > 0; --i) {
    rules.push_back(drawn_rule(i, *one_of(durabilities).as("durability")));
  }
  return rules;
}

/// It passed, and was counted. `closed` is what is told of one that could not be made durable.
bool consumed(const Reply& reply) {
  return reply.error.empty() ? reply.allowed && !reply.repeated
                             : reply.error.kind == ErrorKind::closed;
}

/// What is counted in each series is `expected`, which is within the limits.
void assert_used(Rig& rig, const Units& expected) {
  for (std::size_t r = 0; r < rig.rules->rules().size(); ++r) {
    const Rule& rule = rig.rules->rules()[r];
    for (int key = 0; key < 3; ++key) {
      for (int user = 0; user < 2; ++user) {
        const rpc::CheckItem item{
            "api", {{"key", fmt::format("k{}", key)}, {"user", fmt::format("u{}", user)}}};
        const auto units = expected.find({r, series_of(rule, item.entries)});
        const std::uint64_t wanted = units == expected.end() ? 0 : units->second;
        RC_ASSERT(rig.used(r, item) == wanted);
        RC_ASSERT(wanted <= rule.limit);
      }
    }
  }
}

LAW(42, "what workers on threads admit together is what was consumed, and each answers once",
    "answered in a later turn", "denied", "several descriptors", "two workers in one series",
    "a bucket", "shed", "the store failed meanwhile", "stopped meanwhile", "without a disk",
    "not durable") {
  node::test::ServiceNodeOptions options;
  options.rules = rule_set(drawn_rules({Durability::async, Durability::commit}));
  options.workers = *between<std::size_t>(2, 3).as("workers");
  options.durable = *chance(80).as("a disk");
  options.max_waiting = *one_of<std::size_t>({1000, 1}).as("most that wait");
  std::vector<Call> calls;
  for (int i = *between(1, 30).as("calls"); i > 0; --i)
    calls.push_back(drawn_call(options.workers));
  const int pace = *between(1, 3).as("turns a commit");
  const int fails = *chance(25).as("the store fails") ? *between(0, 3).as("in turn") : -1;
  const int stops = *chance(20).as("the node stops") ? *between(0, 1).as("in turn") : -1;
  Rig rig(options);
  rig.run(calls, [&](int turn) {
    rig.node->pump();
    if (turn == fails) rig.node->engine->store_failed("disk full", kStart);
    if (turn == stops) rig.node->coordinator->state().stopping = true;
    if (turn > 0 && turn % pace == 0) rig.node->commit();
  });

  Units sum;
  std::map<std::pair<std::size_t, std::string>, std::set<std::size_t>> workers;
  each_reply(calls, [&](const rpc::CheckItem& item, const Reply& reply, std::size_t worker) {
    const ErrorKind kind = reply.error.kind;
    if (kind == ErrorKind::overloaded) reached("shed");
    if (kind == ErrorKind::unavailable) reached("stopped meanwhile");
    if (kind == ErrorKind::closed) reached("not durable");
    RC_ASSERT(kind == ErrorKind::none || kind == ErrorKind::closed ||
              (kind == ErrorKind::overloaded && options.max_waiting == 1) ||
              (kind == ErrorKind::unavailable && stops >= 0));
    if (!consumed(reply)) return;
    reached("several descriptors", !item.more.empty());
    for (const auto& [series, units] : units_of(*rig.rules, item)) {
      sum[series] += units;
      if (units > 0) workers[series].insert(worker);
      reached("two workers in one series", workers[series].size() > 1);
      reached("a bucket", is_bucket(rig.rules->rules()[series.first].algorithm));
    }
  });
  assert_used(rig, sum);
  // Nothing was given back meanwhile: what did not fit then does not fit now.
  each_reply(calls, [&](const rpc::CheckItem& item, const Reply& reply, std::size_t) {
    if (!reply.error.empty() || reply.allowed) return;
    reached("denied");
    const Units units = units_of(*rig.rules, item);
    RC_ASSERT(std::any_of(units.begin(), units.end(), [&](const auto& one) {
      const std::uint64_t limit = rig.rules->rules()[one.first.first].limit;
      return one.second > 0 && sum[one.first] + one.second > limit;
    }));
  });
  reached("the store failed meanwhile", fails >= 0 && options.durable);
  reached("without a disk", !options.durable);
}

LAW(43, "of a request that is sent to several workers at once one counts",
    "answered in a later turn", "on two workers", "twice in a call", "denied", "repeated",
    "several descriptors") {
  node::test::ServiceNodeOptions options;
  options.rules = rule_set(drawn_rules({Durability::async, Durability::commit}));
  options.workers = *between<std::size_t>(2, 3).as("workers");
  std::vector<rpc::CheckItem> named;
  for (int i = *between(1, 5).as("ids"); i > 0; --i) {
    named.push_back(drawn_item());
    named.back().hits = std::max<std::uint64_t>(named.back().hits, 1);
    named.back().id = fmt::format("id{}", i);
  }
  std::vector<Call> calls;
  for (int i = *between(2, 20).as("calls"); i > 0; --i) {
    Call call = drawn_call(options.workers);
    for (auto& part : call.parts) {
      for (rpc::CheckItem& item : part) {
        if (*chance(70)) item = *one_of(named);
      }
    }
    calls.push_back(std::move(call));
  }
  Rig rig(options);
  rig.run(calls, [&](int turn) {
    rig.node->pump();
    if (turn > 0) rig.node->commit();
  });

  struct Seen {
    std::vector<const Reply*> replies;
    std::set<std::size_t> workers;
  };
  std::map<std::string, Seen> seen;
  Units sum;
  each_reply(calls, [&](const rpc::CheckItem& item, const Reply& reply, std::size_t worker) {
    RC_ASSERT(reply.error.empty());
    reached("repeated", reply.repeated);
    if (consumed(reply)) {
      for (const auto& [series, units] : units_of(*rig.rules, item)) sum[series] += units;
    }
    if (item.id.empty()) return;
    seen[item.id].replies.push_back(&reply);
    seen[item.id].workers.insert(worker);
    reached("several descriptors", !item.more.empty());
  });
  assert_used(rig, sum);
  for (const auto& [id, those] : seen) {
    // None that was denied passes later, as nothing is given back; so all are told the same.
    const Reply& first = **std::find_if(those.replies.begin(), those.replies.end(),
                                        [](const Reply* reply) { return !reply->repeated; });
    int counted = 0;
    for (const Reply* reply : those.replies) {
      RC_ASSERT(reply->allowed == first.allowed);
      counted += consumed(*reply) ? 1 : 0;
      if (first.allowed) RC_ASSERT(reply->statuses == first.statuses);
    }
    RC_ASSERT(counted == (first.allowed ? 1 : 0));
    reached("denied", !first.allowed);
    reached("on two workers", those.workers.size() > 1);
  }
  for (const Call& call : calls) {
    std::multiset<std::string> ids;
    for (const auto& part : call.parts) {
      for (const rpc::CheckItem& item : part) ids.insert(item.id);
    }
    reached("twice in a call", std::any_of(ids.begin(), ids.end(), [&](const std::string& id) {
              return !id.empty() && ids.count(id) > 1;
            }));
  }
}

LAW(28, "what a worker tells as passed, where a rule promises that, is on the disk",
    "answered in a later turn", "told before the store failed", "not durable", "degraded",
    "a repeat", "several parts", "commits that are slow") {
  node::test::ServiceNodeOptions options;
  options.rules = rule_set(drawn_rules({Durability::commit}));
  options.workers = *between<std::size_t>(2, 3).as("workers");
  std::vector<Call> calls;
  int names = 0;
  for (int i = *between(1, 20).as("calls"); i > 0; --i) {
    calls.push_back(drawn_call(options.workers));
    reached("several parts", calls.back().parts.size() > 1);
    for (auto& part : calls.back().parts) {
      for (rpc::CheckItem& item : part) {
        if (!*chance(25)) continue;
        // Or one that came before.
        if (names > 0 && *chance(60)) {
          item.id = fmt::format("id{}", *between(1, names));
        } else {
          item.id = fmt::format("id{}", ++names);
        }
      }
    }
  }
  // The same id is the same request.
  std::map<std::string, rpc::CheckItem> first;
  for (Call& call : calls) {
    for (auto& part : call.parts) {
      for (rpc::CheckItem& item : part) {
        if (!item.id.empty()) item = first.try_emplace(item.id, item).first->second;
      }
    }
  }
  const int pace = *between(1, 4).as("turns a commit");
  const int fails = *chance(40).as("the store fails") ? *between(0, 8).as("in turn") : -1;
  Rig rig(options);
  std::mutex mutex;  // of what follows
  std::uint64_t told = 0;
  std::set<std::string> told_ids;
  bool early = false;
  std::set<std::string> classes;
  std::atomic<bool> failed{false};
  rig.on_told = [&](const Call& call, std::size_t part) {
    std::lock_guard lock(mutex);
    for (std::size_t i = 0; i < call.parts[part].size(); ++i) {
      const rpc::CheckItem& item = call.parts[part][i];
      const Reply& reply = call.replies[part][i];
      const bool degraded = std::any_of(reply.statuses.begin(), reply.statuses.end(),
                                        [](const Status& status) { return status.degraded; });
      if (reply.error.kind == ErrorKind::closed) classes.insert("not durable");
      if (degraded) classes.insert("degraded");
      if (!reply.error.empty() || !reply.allowed || degraded) continue;
      if (reply.repeated) classes.insert("a repeat");
      if (!item.id.empty() && !told_ids.insert(item.id).second) continue;
      told += sum_of(units_of(*rig.rules, item));
      if (fails >= 0 && !failed) classes.insert("told before the store failed");
    }
    early |= told > rig.node->disk.units();
  };
  rig.run(calls, [&](int turn) {
    rig.node->pump();
    if (turn == fails) {
      failed = true;
      rig.node->engine->store_failed("disk full", kStart);
    }
    if (turn > 0 && turn % pace == 0 && !failed) rig.node->commit();
  });
  RC_ASSERT(!early);
  reached("commits that are slow", pace > 2);
  for (const std::string& each : classes) reached(each);
}

}  // namespace
}  // namespace weir::laws
