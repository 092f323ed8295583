#include <weir/node/service/forwarder.h>

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <utility>

#include <weir/limits/rendezvous.h>

namespace weir::node {
namespace {

void keep_first(std::vector<std::size_t>& order) {
  if (order.size() > 1) order.erase(order.begin() + 1, order.end());
}

/// What is held elsewhere is settled within the deadlines of all that is still to be asked, and
/// this: for settlements that are late, and clocks that differ.
constexpr Nanos kHoldMargin = 10 * kSecond;
/// After which to try again whether others have rights.
constexpr Nanos kAskAgain = 200 * kMillisecond;
/// Of one request that is sent again while it is being decided, so many wait for the answer.
constexpr std::size_t kMostTheSame = 64;
/// In which a transfer of rights is committed, at least.
constexpr Nanos kTransfer = 50 * kMillisecond;

std::string name_of(const crdt::Member& member) {
  return member.region + "/" + member.node;
}

using rpc::AsRequest;
using rpc::item_of;

/// A decision with names.
Reply reply_of(const Decision& decision, const RuleSet& rules) {
  Reply reply;
  weir::tell(decision, rules, reply);
  return reply;
}

/// Under which a home knows a request: whichever node forwards it, and apart from what clients ask
/// that node itself.
std::string home_id(std::string_view domain, std::string_view id) {
  if (id.empty()) return {};
  std::string text = fmt::format("{}:{}{}", domain.size(), domain, id);
  return fmt::format("home-{:016x}{:016x}", stable_hash(text, 1), stable_hash(text, 2));
}

}  // namespace

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
  std::string formed;
  for (std::size_t i = 0; i < rule.key.size(); ++i) {
    const std::string_view* value = request.find(rule.key[i]);
    hash = stable_hash(rule.key[i], hash);
    formed.clear();
    // What is counted as one has one home.
    if (value != nullptr) append_key_value(rule.key_form(i), *value, formed);
    hash = stable_hash(formed, hash);
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
struct Forwarder::Job {
  rpc::CheckItem item;
  std::string id;  // under which the homes know it
  std::vector<Remote> remotes;
  std::size_t next = 0;         // of remotes, to be asked
  bool again = false;           // this one is being asked a second time
  bool uncertain = false;       // it may have counted
  Nanos until = 0;              // holders of rights have to answer
  Nanos wait_until = 0;         // for rights that are on their way; 0: not yet
  std::uint64_t received = 0;   // EscrowAgentCounters::units_received, when it was looked at last
  std::vector<Ticket> held;     // of what is decided here
  bool wants_commit = false;    // what was counted here at once
  Reply reply;                  // so far
  std::optional<Reply> denied;  // what was said here, before others were asked for rights
  std::function<void(Reply)> done;
};

Forwarder::Forwarder(Engine& engine, ForwardOptions options, ForwardDriver& driver)
    : engine_(engine),
      map_(std::move(options.members), options.weights),
      driver_(driver),
      deadline_(options.deadline),
      asked_(options.request_id_ttl) {}

Forwarder::Routing Forwarder::route(const Request& request) {
  Routing routing;
  const std::shared_ptr<const RuleSet> rules = engine_.limiter().rules();
  std::map<std::uint32_t, std::size_t> homes;  // of rules that were met before
  std::vector<std::uint32_t> matched;
  for (std::size_t i = 0; i < request.descriptors(); ++i) {
    const Request part = request.part(i);
    rules->match(part, matched);
    for (std::uint32_t index : matched) {
      const Rule& rule = rules->rules()[index];
      std::vector<std::size_t> order;
      if (rule.enforcement == Enforcement::home) order = map_.order(HomeMap::key_of(rule, part));
      // A second member of the region does not know what the first counted last.
      if (rule.on_failure == OnFailure::closed) keep_first(order);
      const std::size_t home = order.empty() ? 0 : order[0];
      const auto [before, first] = homes.emplace(index, home);
      if (first) {
        add(rule, std::move(order), routing);
      } else if (before->second != home) {
        routing.conflict = fmt::format(
            "descriptors of one request have different homes in rule \"{}\": ask for them apart",
            rule.name);
      }
    }
  }
  return routing;
}

void Forwarder::add(const Rule& rule, std::vector<std::size_t> order, Routing& routing) {
  if (order.empty() || order[0] == 0) {
    routing.local.push_back(rule.name);
    return;
  }
  auto same = std::find_if(routing.remotes.begin(), routing.remotes.end(), [&](const Remote& one) {
    return one.member == order[0] && one.others.empty() == (order.size() == 1);
  });
  if (same == routing.remotes.end()) {
    Remote remote;
    remote.member = order[0];
    remote.others.assign(order.begin() + 1, order.end());
    same = routing.remotes.insert(same, std::move(remote));
  }
  same->rules.push_back(rule.name);
}

bool Forwarder::concerns(const Request& request) {
  if (!request.rule_filter.empty()) return false;
  const Routing found = route(request);
  return !found.remotes.empty() || !found.conflict.empty();
}

std::string Forwarder::remote_home(const Request& request) {
  Routing found = route(request);
  if (found.remotes.empty()) return {};
  return fmt::format("rule \"{}\" is decided by its home {}", found.remotes[0].rules[0],
                     name_of(map_.members()[found.remotes[0].member]));
}

/// Empty, or why this node does not decide by that rule for the request.
std::string Forwarder::not_here(std::string_view name, const Request& request, bool& rights) {
  const std::shared_ptr<const RuleSet> rules = engine_.limiter().rules();
  std::vector<std::uint32_t> matched;
  bool applies = false;
  for (std::size_t i = 0; i < request.descriptors(); ++i) {
    const Request part = request.part(i);
    rules->match(part, matched);
    for (std::uint32_t index : matched) {
      const Rule& rule = rules->rules()[index];
      if (rule.name != name) continue;
      applies = true;
      if (rule.enforcement == Enforcement::escrow) {
        rights = true;
        continue;
      }
      std::vector<std::size_t> order;
      if (rule.enforcement == Enforcement::home) order = map_.order(HomeMap::key_of(rule, part));
      if (rule.on_failure == OnFailure::closed) keep_first(order);
      if (std::find(order.begin(), order.end(), std::size_t{0}) == order.end()) {
        return fmt::format("it is not the home of rule \"{}\"", name);
      }
    }
  }
  return applies ? "" : fmt::format("rule \"{}\" does not apply", name);
}

Error Forwarder::refuse(const Request& request) {
  std::string why;
  bool rights = false;
  for (std::string_view name : request.rule_filter) {
    why = not_here(name, request, rights);
    if (!why.empty()) break;
  }
  if (why.empty()) {
    ++(rights ? passed_on_.served : counters_.served);
    return {};
  }
  ++counters_.refused;
  return {ErrorKind::unavailable, fmt::format("{}: {} (do the nodes' configurations differ?)",
                                              name_of(map_.members()[0]), why)};
}

std::string Forwarder::unsure(const Request& request) {
  const std::shared_ptr<const RuleSet> rules = engine_.limiter().rules();
  std::vector<std::uint32_t> matched;
  for (std::size_t i = 0; i < request.descriptors(); ++i) {
    const Request part = request.part(i);
    rules->match(part, matched);
    for (std::uint32_t index : matched) {
      const Rule& rule = rules->rules()[index];
      const bool strict = rule.enforcement == Enforcement::home && !rule.shadow &&
                          rule.on_failure == OnFailure::closed;
      if (!strict) continue;
      const std::vector<std::size_t> order = map_.order(HomeMap::key_of(rule, part));
      const bool here = order.empty() || order[0] == 0;
      if (!here || engine_.knows_counts(index, part, driver_.wall())) continue;
      return fmt::format(
          "rule \"{}\" is on_failure: closed, and its home {} does not know what it counted before "
          "its start (its disk is new, and others have not confirmed yet that it had no other)",
          rule.name, name_of(map_.members()[0]));
    }
  }
  return {};
}

bool Forwarder::knows(const Request& request) {
  if (!request.rule_filter.empty() || request.id.empty() || (asked_.empty() && same_.empty()))
    return false;
  const std::string id = home_id(request.domain, request.id);
  return same_.contains(id) || asked_.find(id, driver_.wall()) != nullptr;
}

std::shared_ptr<Forwarder::Job> Forwarder::make_job(rpc::CheckItem item,
                                                    std::function<void(Reply)> done) {
  auto job = std::make_shared<Job>();
  job->item = std::move(item);
  job->done = std::move(done);
  job->id = home_id(job->item.domain, job->item.id);
  job->until = driver_.wall() + deadline_;
  job->reply.allowed = true;
  return job;
}

void Forwarder::decide(rpc::CheckItem item, std::function<void(Reply)> done) {
  std::shared_ptr<Job> job = make_job(std::move(item), std::move(done));
  if (auto same = same_.find(job->id); same != same_.end()) {
    if (same->second.size() < kMostTheSame) {
      same->second.push_back(std::move(job->done));
      return;
    }
    job->reply.error = {ErrorKind::unknown, "the same request is being decided"};
    return job->done(std::move(job->reply));
  }
  AsRequest as(job->item);
  Routing planned = route(as.request);
  if (!planned.conflict.empty()) {
    job->reply.fail(ErrorKind::unsupported, planned.conflict);
    return job->done(std::move(job->reply));
  }
  if (!planned.remotes.empty()) ++counters_.forwarded;
  if (recall(*job, as.request, planned)) return job->done(std::move(job->reply));
  job->remotes = std::move(planned.remotes);
  Decision decision;
  if (!reserve_here(*job, planned.local, false, decision)) {
    std::vector<Remote> rights = lacking(as.request, decision);
    if (rights.empty() || !pass_on(*job, planned, std::move(rights))) return tell(job);
  }
  ask(std::move(job));
}

bool Forwarder::pass_on(const Request& request, const Decision& denied,
                        std::function<void(Reply)> done) {
  if (denied.allowed || !request.rule_filter.empty()) return false;
  std::vector<Remote> rights = lacking(request, denied);
  if (rights.empty()) return false;
  std::shared_ptr<Job> job = make_job(item_of(request), std::move(done));
  Routing planned = route(request);
  job->reply = reply_of(denied, *engine_.limiter().rules());
  if (!pass_on(*job, planned, std::move(rights))) return false;
  ask(std::move(job));
  return true;
}

/// Takes rules out of `plan.local` that holders of `rights` are to decide, and reserves the rest
/// again. False: the denial stands, and nothing is held.
bool Forwarder::pass_on(Job& job, Routing& routing, std::vector<Remote> rights) {
  for (const Remote& remote : rights) std::erase(routing.local, remote.rules[0]);
  Reply said = std::move(job.reply);
  job.reply = {};
  job.reply.allowed = true;
  Decision decision;
  if (!reserve_here(job, routing.local, true, decision)) {
    drop(rights);
    return false;
  }
  job.denied = std::move(said);
  job.remotes.insert(job.remotes.begin(), rights.begin(), rights.end());
  ++passed_on_.requests;
  if (!job.id.empty()) same_[job.id];
  return true;
}

/// Has what is decided here held; false if it is denied.
bool Forwarder::reserve_here(Job& job, std::span<const std::string_view> rule_filter,
                             bool demand_counted, Decision& decision) {
  if (rule_filter.empty()) return true;
  AsRequest as(job.item);
  as.request.rule_filter = rule_filter;
  // One ticket a name: what is held later belongs to it.
  if (!job.held.empty()) as.request.id = {};
  as.request.demand_counted = demand_counted;
  engine_.warm(as.request, driver_.wall());
  Ticket ticket;
  if (job.item.kind == RequestKind::report) {
    engine_.check(as.request, driver_.wall(), decision);  // counts, whatever the others say
  } else {
    // However long the others take: conclude() settles it, of each job.
    ticket = engine_.reserve(as.request, driver_.wall(), Limiter::kMaxHold, decision);
  }
  Reply reply = reply_of(decision, *engine_.limiter().rules());
  if (!decision.allowed) {
    job.reply = std::move(reply);
    return false;
  }
  if (ticket) job.held.push_back(ticket);
  job.wants_commit |= decision.wants_commit;
  job.reply.repeated |= reply.repeated;
  for (Status& status : reply.statuses) job.reply.statuses.push_back(std::move(status));
  return true;
}

// Rights of escrow rules.

/// What others are to decide of a request that was denied: nothing if anything but rights is
/// missing, or there is nobody to ask, or not now.
std::vector<Forwarder::Remote> Forwarder::lacking(const Request& request, const Decision& denied) {
  std::vector<Remote> remotes;
  const std::shared_ptr<const RuleSet> rules = engine_.limiter().rules();
  if (request.hits == 0) return remotes;
  for (const RuleStatus& status : denied.statuses) {
    if (status.allowed || status.shadow) continue;
    const bool may = status.exhausted_locally && !status.degraded &&
                     status.rule < rules->rules().size() &&
                     engine_.escrow().scarce(rules->rules()[status.rule]);
    if (!may) return {};
  }
  for (const RuleStatus& status : denied.statuses) {
    if (status.allowed || status.shadow) continue;
    // Before anything that costs: there may be many like this one.
    Remote remote = rights_of(status.rule, request);
    const Nanos now = driver_.wall();
    remote.in_cache = negative_cache_.begin(remote.cell, remote.cost, remote.limit, now);
    passed_on_.suppressed += !remote.in_cache;
    if (remote.in_cache) remote.others = holders(remote);
    remotes.push_back(std::move(remote));
    if (remotes.back().others.empty()) {
      drop(remotes);
      return {};
    }
  }
  for (Remote& remote : remotes) {
    remote.member = remote.others.front();
    remote.others.erase(remote.others.begin());
  }
  return remotes;
}

Forwarder::Remote Forwarder::rights_of(std::uint32_t rule, const Request& request) {
  const std::shared_ptr<const RuleSet> rules = engine_.limiter().rules();
  Remote remote;
  remote.rights = true;
  remote.rules = {rules->rules()[rule].name};
  remote.limit = rules->rules()[rule].limit;
  EscrowWindow window = engine_.escrow_window(rule, request, driver_.wall());
  remote.cell = window.cell;
  remote.cost = window.cost;
  return remote;
}

std::vector<std::size_t> Forwarder::holders(const Remote& remote) {
  std::vector<std::size_t> members;
  const Nanos now = engine_.clock(driver_.wall());
  for (crdt::PeerIndex peer : engine_.escrow().holders(remote.cell, remote.limit, now)) {
    if (driver_.reachable(peer + 1)) members.push_back(peer + 1);
  }
  return members;
}

void Forwarder::drop(std::vector<Remote>& remotes) {
  for (Remote& remote : remotes) {
    if (remote.in_cache) negative_cache_.dropped(remote.cell, remote.cost);
    remote.in_cache = false;
  }
}

/// A request that came before, and of which another member was asked: true if it passed then, and
/// is told the same; else that member is asked again, as it may have counted it.
bool Forwarder::recall(Job& job, const Request& request, Routing& routing) {
  const AskedMembers::Asked* asked = asked_.find(job.id, driver_.wall());
  if (asked == nullptr) return false;
  if (asked->answer) {
    job.reply = *asked->answer;
    job.reply.repeated = true;
    return true;
  }
  const std::shared_ptr<const RuleSet> rules = engine_.limiter().rules();
  std::vector<std::uint32_t> matched;
  rules->match(request, matched);
  for (std::uint32_t index : matched) {
    const Rule& rule = rules->rules()[index];
    const bool was =
        std::find(asked->rules.begin(), asked->rules.end(), rule.name) != asked->rules.end();
    if (!was || rule.enforcement != Enforcement::escrow) continue;
    Remote remote = rights_of(index, request);
    remote.others = holders(remote);
    std::erase(remote.others, asked->member);
    remote.member = asked->member;
    remote.bound = true;
    std::erase(routing.local, std::string_view(rule.name));
    routing.remotes.push_back(std::move(remote));
    same_[job.id];
  }
  return false;
}

void Forwarder::holder_answered(std::shared_ptr<Job> job, const Reply& reply) {
  Remote& remote = job->remotes[job->next];
  const bool named = !job->id.empty() && job->next + 1 == job->remotes.size();
  const Nanos now = driver_.wall();
  if (!reply.error.empty()) {
    job->uncertain |= !reply.error.surely_not_counted();
    // As with a home: to be asked again is harmless with an id.
    if (job->uncertain && named && !job->again && reply.error.kind != ErrorKind::deadline &&
        now < job->until) {
      job->again = true;
      return ask(std::move(job));
    }
    if (job->uncertain || remote.bound) {
      ++passed_on_.failed;
      return deny(std::move(job));
    }
  } else {
    job->uncertain = remote.bound = false;
    const Status* status = reply.decider();
    remote.used_up = status != nullptr && !status->exhausted_locally && !status->degraded;
  }
  if (named) asked_.forget(job->id);
  if (!remote.others.empty() && remote.asked < kMostHolders && now + deadline_ / 4 < job->until) {
    remote.member = remote.others.front();
    remote.others.erase(remote.others.begin());
    return ask(std::move(job));
  }
  wait_for_rights(std::move(job));
}

/// This node itself has asked for rights, too: they take about as long as the answers did, and a
/// commit.
void Forwarder::wait_for_rights(std::shared_ptr<Job> job) {
  const bool first = job->wait_until == 0;
  const Nanos now = driver_.wall();
  if (first) job->wait_until = std::min(job->until, 2 * now - job->until + deadline_ + kTransfer);
  const std::uint64_t received = engine_.escrow().counters().units_received;
  if (first || received != job->received) {
    job->received = received;
    if (came_meanwhile(*job)) {
      job->again = false;
      job->wait_until = 0;
      ++job->next;
      return ask(std::move(job));
    }
  }
  // A wall clock that was set back ends the waiting, too.
  const bool over = now >= job->wait_until || now + deadline_ < job->until;
  if (job->remotes[job->next].used_up || over) return deny(std::move(job));
  waiting_.push_back(std::move(job));
}

void Forwarder::pump() {
  for (std::shared_ptr<Job>& job : std::exchange(waiting_, {})) wait_for_rights(std::move(job));
}

bool Forwarder::came_meanwhile(Job& job) {
  const Remote& remote = job.remotes[job.next];
  const std::string_view rule_filter[] = {remote.rules[0]};
  Reply so_far = job.reply;
  Decision decision;
  if (reserve_here(job, rule_filter, true, decision)) return true;
  job.reply = std::move(so_far);
  return false;
}

/// As it was denied here, or nearly so.
void Forwarder::deny(std::shared_ptr<Job> job) {
  Remote& remote = job->remotes[job->next];
  if (!job->denied) {  // it came again, and was not decided here
    AsRequest as(job->item);
    const std::string_view rule_filter[] = {remote.rules[0]};
    as.request.rule_filter = rule_filter;
    as.request.hits = 0;
    as.request.id = {};
    Decision peek;
    engine_.warm(as.request, driver_.wall());
    engine_.check(as.request, driver_.wall(), peek);
    job->denied = reply_of(peek, *engine_.limiter().rules());
    for (Status& status : job->denied->statuses) {
      status.allowed = false;
      status.exhausted_locally = true;
      status.retry_after = std::min(status.reset > 0 ? status.reset : kAskAgain, kAskAgain);
    }
  }
  if (remote.in_cache) {
    remote.in_cache = false;
    negative_cache_.denied(remote.cell, remote.cost, remote.used_up, driver_.wall());
  }
  if (remote.used_up) {
    for (Status& status : job->denied->statuses) {
      if (status.rule != remote.rules[0]) continue;
      status.exhausted_locally = false;
      status.retry_after = std::max<Nanos>(remote.cell.epoch.expiry - driver_.wall(), 1);
    }
  }
  job->reply = std::move(*job->denied);
  conclude(std::move(job), false);
}

// Homes, and whoever is asked like one.

/// For how long what the next one holds may have to stand until it is settled: those behind it are
/// asked one after the other, each may be asked twice, and so may whoever decides in its place.
Nanos Forwarder::hold_for(const Job& job) const {
  Nanos time = deadline_ + kHoldMargin;
  for (std::size_t i = job.next + 1; i < job.remotes.size(); ++i) {
    time += static_cast<Nanos>(2 + job.remotes[i].others.size()) * deadline_;
  }
  return std::min(time, Limiter::kMaxHold);
}

void Forwarder::ask(std::shared_ptr<Job> job) {
  if (job->next == job->remotes.size()) return conclude(std::move(job), true);
  Remote& remote = job->remotes[job->next];
  rpc::CheckItem item = job->item;
  item.rule_filter = remote.rules;
  item.id.clear();
  Nanos patience = deadline_;
  if (remote.rights) {
    ++remote.asked;
    ++passed_on_.asked;
    patience = std::clamp(job->until - driver_.wall(), kMillisecond, deadline_);
  }
  const bool counts_anyway = item.hits == 0 || item.kind == RequestKind::report;
  if (job->next + 1 == job->remotes.size() || counts_anyway) {
    item.id = job->id;
    if (remote.rights && !job->id.empty()) {
      asked_.remember(job->id, {remote.member, remote.rules, {}}, driver_.wall());
    }
    driver_.forward(remote.member, std::move(item), patience,
                    [this, job](Reply reply) { answered(job, std::move(reply)); });
    return;
  }
  driver_.forward_reserve(remote.member, std::move(item), hold_for(*job), patience,
                          [this, job](ReserveReply reply) {
                            job->remotes[job->next].ticket = reply.ticket;
                            answered(job, std::move(reply.decision));
                          });
}

void Forwarder::answered(std::shared_ptr<Job> job, Reply reply) {
  Remote& remote = job->remotes[job->next];
  const bool passed = reply.error.empty() && reply.allowed;
  if (remote.rights && !passed) return holder_answered(std::move(job), reply);
  if (!reply.error.empty()) {
    const bool counted = !reply.error.surely_not_counted();
    job->uncertain |= counted;
    // To be asked again is harmless with an id, at the same home.
    const bool last = job->next + 1 == job->remotes.size();
    if (counted && last && !job->id.empty() && !job->again &&
        reply.error.kind != ErrorKind::deadline) {
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
  // What is told again to this node itself, or to one that had no answer, is new to the client.
  job->reply.repeated |= reply.repeated && !job->again && !remote.bound;
  for (Status& status : reply.statuses) job->reply.statuses.push_back(std::move(status));
  if (!reply.allowed) return conclude(std::move(job), false);
  if (remote.in_cache) {
    remote.in_cache = false;
    negative_cache_.passed(remote.cell, remote.cost);
  }
  ++job->next;
  job->again = job->uncertain = false;
  ask(std::move(job));
}

/// A home did not answer: on_failure of its rules decides.
void Forwarder::unanswered(std::shared_ptr<Job> job, const Error& error) {
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
  std::vector<std::string_view> rule_filter(remote.rules.begin(), remote.rules.end());
  as.request.rule_filter = rule_filter;
  as.request.id = {};
  Fallback::Answer answer = fallback_->decide(as.request, driver_.wall());
  if (answer.closed) {
    job->reply = {};
    job->reply.error = {
        ErrorKind::closed,
        fmt::format("rule \"{}\" is on_failure: closed, and its home {} does not answer: {}",
                    remote.rules[0], name_of(map_.members()[remote.member]), error.to_string())};
    return conclude(std::move(job), false);
  }
  for (Status& status : reply_of(answer.decision, *rules_).statuses) {
    job->reply.statuses.push_back(std::move(status));
  }
  if (!answer.allowed) return conclude(std::move(job), false);
  ++job->next;
  job->again = job->uncertain = false;
  ask(std::move(job));
}

/// Settles what is held: in full if the request passes, else with nothing, as if it had not come.
void Forwarder::conclude(std::shared_ptr<Job> job, bool allowed) {
  const std::uint64_t hits = allowed ? job->item.hits : 0;
  job->reply.allowed = allowed;
  for (Ticket ticket : job->held) {
    Settled settled = engine_.settle(ticket, hits, driver_.wall());
    job->wants_commit |= settled.wants_commit;
  }
  drop(job->remotes);
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
                           [job, one_less](const SettleReply& reply) {
                             // Nobody settles it, so it is charged in full: by its timeout.
                             if (reply.error.empty() && !reply.degraded) return one_less();
                             for (Status& status : job->reply.statuses) {
                               status.degraded = true;
                             }
                             one_less();
                           });
  }
  one_less();
}

void Forwarder::tell(const std::shared_ptr<Job>& job) {
  if (job->reply.error.empty()) merge(job->item.domain, job->reply);
  if (!job->wants_commit || !job->reply.allowed) return finish(job);
  driver_.when_durable([this, job](bool durable) {
    if (durable) return finish(job);
    const std::shared_ptr<const RuleSet> set = engine_.limiter().rules();
    for (Status& status : job->reply.statuses) {
      const std::vector<Rule>& rules = set->rules();
      auto rule = std::find_if(rules.begin(), rules.end(), [&](const Rule& one) {
        return one.domain == job->item.domain && one.name == status.rule;
      });
      if (rule != rules.end() && rule->on_failure == OnFailure::closed && !rule->shadow &&
          rule->durability == Durability::commit) {
        job->reply.error = {ErrorKind::closed,
                            "storage has failed and the rule is on_failure: closed"};
      }
      status.degraded = true;
    }
    finish(job);
  });
}

void Forwarder::finish(const std::shared_ptr<Job>& job) {
  const bool passed = job->reply.error.empty() && job->reply.allowed;
  auto rights = std::find_if(job->remotes.rbegin(), job->remotes.rend(),
                             [](const Remote& remote) { return remote.rights; });
  if (passed && rights != job->remotes.rend()) {
    ++passed_on_.admitted;
    if (!job->id.empty()) {
      asked_.remember(job->id, {rights->member, rights->rules, job->reply}, driver_.wall());
    }
  }
  if (auto same = same_.find(job->id); same != same_.end()) {
    Reply again = job->reply;
    again.repeated |= passed;
    const auto waiting = same_.extract(same);
    for (const auto& done : waiting.mapped()) done(again);
  }
  job->done(std::move(job->reply));
}

/// Puts statuses in the order of rules, and finds the one that decides (Decision::deciding).
void Forwarder::merge(std::string_view domain, Reply& reply) const {
  const std::shared_ptr<const RuleSet> set = engine_.limiter().rules();
  const std::vector<Rule>& rules = set->rules();
  auto place = [&](const Status& status) {
    return std::find_if(rules.begin(), rules.end(),
                        [&](const Rule& rule) {
                          return rule.name == status.rule && rule.domain == domain;
                        }) -
           rules.begin();
  };
  std::stable_sort(reply.statuses.begin(), reply.statuses.end(),
                   [&](const Status& a, const Status& b) { return place(a) < place(b); });
  reply.deciding = -1;
  for (std::size_t i = 0; i < reply.statuses.size(); ++i) {
    const Status& status = reply.statuses[i];
    if (status.shadow || status.allowed != reply.allowed) continue;
    const Status* best = reply.decider();
    if (best == nullptr || (reply.allowed ? status.remaining < best->remaining
                                          : status.retry_after > best->retry_after)) {
      reply.deciding = static_cast<int>(i);
    }
  }
}

}  // namespace weir::node
