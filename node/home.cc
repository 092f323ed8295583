#include <weir/node/home.h>

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include <weir/limits/rendezvous.h>

namespace weir::node {
namespace {

/// Longer than any forwarded call: then nobody comes to settle it.
constexpr Nanos kHold = 10 * kSecond;

std::string name_of(const crdt::Member& member) {
  return member.region + "/" + member.node;
}

/// Views into an item.
struct AsRequest {
  explicit AsRequest(const rpc::CheckItem& item) {
    for (const auto& [key, value] : item.entries) entries.push_back({key, value});
    request = {item.domain, entries, item.hits, item.id, {}};
  }
  std::vector<Entry> entries;
  Request request;
};

/// Under which a home knows a request: whichever node forwards it, and apart from what clients ask
/// that node itself.
std::string home_id(const rpc::CheckItem& item) {
  if (item.id.empty()) return {};
  std::string text = std::to_string(item.domain.size()) + ":" + item.domain + item.id;
  return fmt::format("home-{:016x}{:016x}", stable_hash(text, 1), stable_hash(text, 2));
}

}  // namespace

rpc::CheckReply reply_of(const Decision& decision, const RuleSet& rules) {
  rpc::CheckReply reply;
  reply.allowed = decision.allowed;
  reply.deciding = decision.deciding;
  reply.repeated = decision.repeated;
  for (const RuleStatus& status : decision.statuses) {
    rpc::CheckStatus out;
    out.rule = rules.rules()[status.rule].name;
    out.limit = status.limit;
    out.remaining = status.remaining;
    out.reset = status.reset;
    out.retry_after = status.retry_after;
    out.delay = status.delay;
    out.allowed = status.allowed;
    out.shadow = status.shadow;
    out.degraded = status.degraded;
    out.elsewhere = status.elsewhere;
    reply.statuses.push_back(std::move(out));
  }
  return reply;
}

HomeMap::HomeMap(std::vector<crdt::Member> members, const std::map<std::string, unsigned>& weights)
    : members_(std::move(members)) {
  std::map<std::string, Region> by_name;
  for (std::size_t i = 0; i < members_.size(); ++i) {
    Region& region = by_name[members_[i].region];
    region.name = members_[i].region;
    region.members.push_back(i);
  }
  for (auto& [name, region] : by_name) {
    auto weight = weights.find(name);
    if (weight != weights.end()) region.weight = weight->second;
    if (region.weight > 0) regions_.push_back(std::move(region));
  }
}

std::uint64_t HomeMap::key_of(const Rule& rule, const Request& request) {
  std::uint64_t hash = stable_hash(rule.domain);
  for (const std::string& entry : rule.key) {
    const std::string_view* value = request.find(entry);
    hash = stable_hash(entry, hash);
    hash = stable_hash(value == nullptr ? std::string_view{} : *value, hash);
  }
  return hash;
}

std::vector<std::size_t> HomeMap::order(std::uint64_t key) const {
  const Region* best = nullptr;
  std::uint64_t best_score = 0;
  for (const Region& region : regions_) {  // in the order of names: the same everywhere
    std::uint64_t score = rendezvous_score(region.name, key, region.weight);
    if (best == nullptr || score > best_score) {
      best = &region;
      best_score = score;
    }
  }
  std::vector<std::size_t> out;
  if (best == nullptr) return out;
  std::vector<std::string> names;
  for (std::size_t member : best->members) names.push_back(members_[member].node);
  for (std::size_t i : rendezvous_order(names, ~key)) out.push_back(best->members[i]);
  return out;
}

/// One request on its way.
struct HomeDesk::Job {
  rpc::CheckItem item;
  std::string id;  // under which the homes know it
  std::vector<Remote> remotes;
  std::size_t next = 0;       // of remotes, to be asked
  bool again = false;         // this one is being asked a second time
  bool uncertain = false;     // it may have counted
  Ticket held;                // of what is decided here
  bool wants_commit = false;  // what was counted here at once
  rpc::CheckReply reply;      // so far
  std::function<void(rpc::CheckReply)> done;
};

HomeDesk::HomeDesk(Engine& engine, HomeOptions options, HomeDriver& driver)
    : engine_(engine), map_(std::move(options.members), options.weights), driver_(driver) {}

HomeDesk::Plan HomeDesk::plan(const Request& request) {
  Plan plan;
  const std::shared_ptr<const RuleSet> rules = engine_.limiter().rules();
  std::vector<std::uint32_t> matched;
  rules->match(request, matched);
  for (std::uint32_t index : matched) {
    const Rule& rule = rules->rules()[index];
    std::vector<std::size_t> order;
    if (rule.enforcement == Enforcement::home) order = map_.order(HomeMap::key_of(rule, request));
    if (order.empty() || order[0] == 0) {
      plan.local.push_back(rule.name);
      continue;
    }
    // A second member of the region does not know what the first counted last.
    if (rule.on_failure == OnFailure::closed) order.resize(1);
    auto same = std::find_if(plan.remotes.begin(), plan.remotes.end(), [&](const Remote& one) {
      return one.member == order[0] && one.others.empty() == (order.size() == 1);
    });
    if (same == plan.remotes.end()) {
      same = plan.remotes.insert(same, {order[0], {order.begin() + 1, order.end()}, {}, {}});
    }
    same->rules.push_back(rule.name);
  }
  return plan;
}

bool HomeDesk::concerns(const Request& request) {
  return request.only.empty() && !plan(request).remotes.empty();
}

std::string HomeDesk::elsewhere(const Request& request) {
  Plan found = plan(request);
  if (found.remotes.empty()) return {};
  return fmt::format("rule \"{}\" is decided by its home {}", found.remotes[0].rules[0],
                     name_of(map_.members()[found.remotes[0].member]));
}

std::string HomeDesk::refuse(const Request& request) {
  const std::shared_ptr<const RuleSet> rules = engine_.limiter().rules();
  std::vector<std::uint32_t> matched;
  rules->match(request, matched);
  std::string why;
  for (std::string_view name : request.only) {
    auto found = std::find_if(matched.begin(), matched.end(), [&](std::uint32_t index) {
      return rules->rules()[index].name == name;
    });
    if (found == matched.end()) {
      why = fmt::format("rule \"{}\" does not apply", name);
      break;
    }
    const Rule& rule = rules->rules()[*found];
    std::vector<std::size_t> order;
    if (rule.enforcement == Enforcement::home) order = map_.order(HomeMap::key_of(rule, request));
    if (rule.on_failure == OnFailure::closed && order.size() > 1) order.resize(1);
    if (std::find(order.begin(), order.end(), std::size_t{0}) == order.end()) {
      why = fmt::format("it is not the home of rule \"{}\"", name);
      break;
    }
  }
  if (why.empty()) {
    ++counters_.served;
    return {};
  }
  ++counters_.refused;
  return fmt::format("unavailable: {}: {} (do the nodes' configurations differ?)",
                     name_of(map_.members()[0]), why);
}

void HomeDesk::decide(rpc::CheckItem item, std::function<void(rpc::CheckReply)> done) {
  auto job = std::make_shared<Job>();
  job->item = std::move(item);
  job->done = std::move(done);
  AsRequest as(job->item);
  Plan planned = plan(as.request);
  job->remotes = std::move(planned.remotes);
  job->id = home_id(job->item);
  ++counters_.forwarded;
  job->reply.allowed = true;
  if (!planned.local.empty()) {
    as.request.only = planned.local;
    Decision decision;
    job->held = engine_.reserve(as.request, driver_.wall(), kHold, decision);
    job->wants_commit = decision.wants_commit;
    job->reply = reply_of(decision, *engine_.limiter().rules());
    if (!decision.allowed) return tell(job);
  }
  ask(std::move(job));
}

void HomeDesk::ask(std::shared_ptr<Job> job) {
  if (job->next == job->remotes.size()) return conclude(std::move(job), true);
  Remote& remote = job->remotes[job->next];
  rpc::CheckItem item = job->item;
  item.only = remote.rules;
  item.id.clear();
  if (job->next + 1 == job->remotes.size() || item.hits == 0) {
    item.id = job->id;
    driver_.forward(remote.member, std::move(item),
                    [this, job](rpc::CheckReply reply) { answered(job, std::move(reply)); });
    return;
  }
  driver_.forward_reserve(remote.member, std::move(item), kHold,
                          [this, job](rpc::ReserveReply reply) {
                            job->remotes[job->next].ticket = reply.ticket;
                            answered(job, std::move(reply.decision));
                          });
}

void HomeDesk::answered(std::shared_ptr<Job> job, rpc::CheckReply reply) {
  Remote& remote = job->remotes[job->next];
  if (!reply.error.empty()) {
    const bool counted = !rpc::surely_not_counted(reply.error);
    job->uncertain |= counted;
    // To be asked again is harmless with an id, at the same home.
    const bool last = job->next + 1 == job->remotes.size();
    if (counted && last && !job->id.empty() && !job->again && reply.error != "deadline") {
      job->again = true;
      return ask(std::move(job));
    }
    if (!job->uncertain && !remote.others.empty()) {
      remote.member = remote.others.front();
      remote.others.erase(remote.others.begin());
      return ask(std::move(job));
    }
    return unanswered(std::move(job), reply.error);
  }
  job->reply.repeated |= reply.repeated && !job->again;
  for (rpc::CheckStatus& status : reply.statuses) job->reply.statuses.push_back(std::move(status));
  if (!reply.allowed) return conclude(std::move(job), false);
  ++job->next;
  job->again = job->uncertain = false;
  ask(std::move(job));
}

/// A home did not answer: on_failure of its rules decides.
void HomeDesk::unanswered(std::shared_ptr<Job> job, const std::string& error) {
  ++counters_.degraded;
  const Remote& remote = job->remotes[job->next];
  std::shared_ptr<const RuleSet> rules = engine_.limiter().rules();
  if (fallback_ == nullptr || rules_ != rules) {
    FallbackOptions options;
    options.parts = static_cast<unsigned>(map_.members().size());
    rules_ = std::move(rules);
    fallback_ = std::make_unique<Fallback>(rules_, options);
  }
  AsRequest as(job->item);
  std::vector<std::string_view> only(remote.rules.begin(), remote.rules.end());
  as.request.only = only;
  as.request.id = {};
  Fallback::Answer answer = fallback_->decide(as.request, driver_.wall());
  if (answer.closed) {
    job->reply = {};
    job->reply.error = fmt::format(
        "limiter_unavailable: rule \"{}\" is on_failure: closed, and its home {} does "
        "not answer: {}",
        remote.rules[0], name_of(map_.members()[remote.member]), error);
    return conclude(std::move(job), false);
  }
  for (rpc::CheckStatus& status : reply_of(answer.decision, *rules_).statuses) {
    job->reply.statuses.push_back(std::move(status));
  }
  if (!answer.allowed) return conclude(std::move(job), false);
  ++job->next;
  job->again = job->uncertain = false;
  ask(std::move(job));
}

/// Settles what is held: in full if the request passes, else with nothing, as if it had not come.
void HomeDesk::conclude(std::shared_ptr<Job> job, bool allowed) {
  const std::uint64_t hits = allowed ? job->item.hits : 0;
  job->reply.allowed = allowed;
  if (job->held) {
    Settled settled = engine_.settle(job->held, hits, driver_.wall());
    job->wants_commit |= settled.wants_commit;
  }
  if (!allowed && !job->item.id.empty()) {
    engine_.limiter().forget_id(job->item.domain, job->item.id);
  }
  auto left = std::make_shared<std::size_t>(1);
  auto one_less = [this, job, left] {
    if (--*left == 0) tell(job);
  };
  for (Remote& remote : job->remotes) {
    if (remote.ticket.empty()) continue;
    ++*left;
    driver_.forward_settle(remote.member, remote.ticket, hits,
                           [job, one_less](const rpc::SettleReply& reply) {
                             // Nobody settles it, so it is charged in full: by its timeout.
                             if (reply.error.empty() && !reply.degraded) return one_less();
                             for (rpc::CheckStatus& status : job->reply.statuses) {
                               status.degraded = true;
                             }
                             one_less();
                           });
  }
  one_less();
}

void HomeDesk::tell(const std::shared_ptr<Job>& job) {
  if (job->reply.error.empty()) merge(job->reply);
  if (!job->wants_commit || !job->reply.allowed) return job->done(std::move(job->reply));
  driver_.when_durable([this, job](bool durable) {
    if (durable) return job->done(std::move(job->reply));
    const std::shared_ptr<const RuleSet> set = engine_.limiter().rules();
    for (rpc::CheckStatus& status : job->reply.statuses) {
      const std::vector<Rule>& rules = set->rules();
      auto rule = std::find_if(rules.begin(), rules.end(), [&](const Rule& one) {
        return one.domain == job->item.domain && one.name == status.rule;
      });
      if (rule != rules.end() && rule->on_failure == OnFailure::closed && !rule->shadow &&
          rule->durability == Durability::commit) {
        job->reply.error =
            "limiter_unavailable: storage has failed and the rule is on_failure: "
            "closed";
      }
      status.degraded = true;
    }
    job->done(std::move(job->reply));
  });
}

/// Puts statuses in the order of rules, and finds the one that decides (Decision::deciding).
void HomeDesk::merge(rpc::CheckReply& reply) const {
  const std::shared_ptr<const RuleSet> set = engine_.limiter().rules();
  const std::vector<Rule>& rules = set->rules();
  auto place = [&](const rpc::CheckStatus& status) {
    return std::find_if(rules.begin(), rules.end(),
                        [&](const Rule& rule) { return rule.name == status.rule; }) -
           rules.begin();
  };
  std::stable_sort(
      reply.statuses.begin(), reply.statuses.end(),
      [&](const rpc::CheckStatus& a, const rpc::CheckStatus& b) { return place(a) < place(b); });
  reply.deciding = -1;
  for (std::size_t i = 0; i < reply.statuses.size(); ++i) {
    const rpc::CheckStatus& status = reply.statuses[i];
    if (status.shadow || status.allowed != reply.allowed) continue;
    const rpc::CheckStatus* best = reply.decider();
    if (best == nullptr || (reply.allowed ? status.remaining < best->remaining
                                          : status.retry_after > best->retry_after)) {
      reply.deciding = static_cast<int>(i);
    }
  }
}

}  // namespace weir::node
