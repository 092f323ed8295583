#include <weir/node/report/report.h>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include <weir/node/version.h>

namespace weir::node {
namespace {

using nlohmann::json;

double seconds(Nanos length) {
  return static_cast<double>(length) / static_cast<double>(kSecond);
}

double seconds_since(Nanos then, Nanos now) {
  return seconds(std::max<Nanos>(0, now - then));
}

std::string peer_name(const crdt::Member& member) {
  return member.region + "/" + member.node;
}

json escrow_json(const EscrowAgent& escrow, const Forwarder* forwarder) {
  const EscrowAgentCounters& rights = escrow.counters();
  json out = {
      {"open", escrow.grant_state().open},           {"whole", escrow.whole()},
      {"requests_sent", rights.requests_sent},       {"requests_served", rights.requests_served},
      {"requests_refused", rights.requests_refused}, {"versions_differ", rights.versions_differ},
      {"units_given", rights.units_given},           {"units_received", rights.units_received}};
  if (forwarder == nullptr) return out;
  const PassedOnCounters& passed = forwarder->passed_on();
  out.update({{"forwarded", passed.requests},
              {"forwards", passed.asked},
              {"forwards_admitted", passed.admitted},
              {"forwards_failed", passed.failed},
              {"forwards_suppressed", passed.suppressed},
              {"forwards_served", passed.served}});
  return out;
}

json storage_json(const EngineStatus& status, const storage::Store* store) {
  json out{{"mode", store != nullptr ? "lmdb" : "none"},
           {"ok", store == nullptr || status.durable}};
  if (store == nullptr) return out;
  const storage::StoreCounters counters = store->counters();
  out["failure"] = status.storage_failure;
  out["commits"] = counters.commits;
  out["records"] = counters.records;
  out["bytes"] = counters.bytes;
  out["backlog"] = store->backlog();
  out["last_commit_us"] = counters.last_commit_time / kMicrosecond;
  return out;
}

/// The longest of late and what it was, and of every kind; since the start, too.
json loop_json(const rpc::TurnMeter& turns) {
  json lately = json::object();
  json ever = json::object();
  json out;
  for (const rpc::LongestTurn& one : turns.longest()) {
    const std::string what(one.what);
    lately[what] = seconds(one.lately);
    ever[what] = seconds(one.ever);
    if (one.what == rpc::TurnMeter::kTurn || out.contains("longest_turn")) continue;
    out["longest_turn"] = what;
    out["longest_turn_s"] = seconds(one.lately);
  }
  out["longest_turns_s"] = std::move(lately);
  out["longest_turns_since_start_s"] = std::move(ever);
  return out;
}

json conditions_json(const std::vector<Condition>& conditions) {
  json out = json::array();
  for (const Condition& one : conditions) {
    out.push_back(
        {{"name", one.name}, {"ready", one.ready}, {"alive", one.alive}, {"text", one.text}});
  }
  return out;
}

json rules_file_json(const RulesStatus& rules, const std::string& file, Nanos wall) {
  json out{{"file", file},
           {"version", rules.version},
           {"in_force_s", seconds_since(rules.since, wall)},
           {"reloads", rules.reloads},
           {"refused", rules.refused}};
  if (!rules.last_error.empty()) {
    out["last_error"] = rules.last_error;
    out["last_error_s"] = seconds_since(rules.refused_at, wall);
  }
  return out;
}

/// How one rule fares. On any thread.
struct RuleState {
  RuleCounters counters;
  SeriesUsage series;
  std::uint64_t over_admission = 0;
};

/// Of all rules in force, in their order; `rules` is set to these. On any thread: others may come
/// into force meanwhile, and then it begins anew, a few times.
std::vector<RuleState> rule_states(Engine& engine, Nanos wall,
                                   std::shared_ptr<const RuleSet>& rules) {
  constexpr int kTries = 8;
  std::vector<RuleState> out;
  for (int i = 0; i < kTries; ++i) {
    rules = engine.limiter().rules();
    out.assign(rules->rules().size(), {});
    for (std::uint32_t rule = 0; rule < out.size(); ++rule) {
      out[rule] = {engine.limiter().counters(rule), engine.limiter().series_usage(rule),
                   engine.over_admission(rule, wall)};
    }
    if (engine.limiter().rules() == rules) break;
  }
  return out;
}

json rules_json(Engine& engine, Nanos wall) {
  std::shared_ptr<const RuleSet> rules;
  const std::vector<RuleState> states = rule_states(engine, wall, rules);
  json out = json::array();
  for (std::size_t i = 0; i < states.size(); ++i) {
    const Rule& rule = rules->rules()[i];
    const RuleCounters& counters = states[i].counters;
    out.push_back({{"domain", rule.domain},
                   {"name", rule.name},
                   {"algorithm", to_string(rule.algorithm)},
                   {"enforcement", to_string(rule.enforcement)},
                   {"limit", rule.limit},
                   {"window", format_window(rule)},
                   {"shadow", rule.shadow},
                   {"allowed", counters.allowed},
                   {"denied", counters.denied},
                   {"degraded", counters.degraded},
                   {"series", states[i].series.series},
                   {"series_guaranteed", states[i].series.guaranteed},
                   {"series_refused", states[i].series.refused},
                   {"over_admission_worst_case", states[i].over_admission}});
    if (!rule.candidate) continue;
    out.back()["candidate"] = {{"limit", rule.candidate->limit},
                               {"denied", counters.candidate_denied}};
  }
  return out;
}

void collect_rules(Engine& engine, Nanos wall, NodeMetrics& out) {
  std::shared_ptr<const RuleSet> rules;
  const std::vector<RuleState> states = rule_states(engine, wall, rules);
  for (std::size_t i = 0; i < states.size(); ++i) {
    const Rule& rule = rules->rules()[i];
    const RuleCounters& counters = states[i].counters;
    out.rules.push_back({rule.domain, rule.name, counters.allowed, counters.denied,
                         counters.degraded, counters.exhausted_locally, rule.shadow,
                         states[i].over_admission, states[i].series.series,
                         states[i].series.guaranteed, states[i].series.refused});
    if (rule.candidate) out.rules.back().candidate_denied = counters.candidate_denied;
    out.rules.back().labels = rule.labels;
  }
}

json clock_json(const EngineStatus& status, const ClockWatch& clock) {
  return {{"wrong", clock.wrong()},
          {"set_back_s", seconds(status.set_back)},
          {"early_cells", status.early_cells}};
}

json peers_json(const crdt::Replica& replica, const rpc::PeerNetwork* peers, Nanos now) {
  json out = json::array();
  const std::vector<crdt::PeerStatus> links = replica.peers();
  for (crdt::PeerIndex i = 0; i < links.size(); ++i) {
    const crdt::PeerStatus& link = links[i];
    const rpc::LinkStatus session = peers->status(i);
    json peer{
        {"region", link.member.region},    {"node", link.member.node}, {"up", session.up},
        {"unacked", link.unacked},         {"agrees", link.agrees},    {"dropped", session.dropped},
        {"last_error", session.last_error}};
    if (link.caught_up_at != 0) peer["caught_up_s"] = seconds_since(link.caught_up_at, now);
    if (link.heard_at != 0) peer["heard_s"] = seconds_since(link.heard_at, now);
    peer["two_of_name"] = session.two_of_name;
    peer["sees_namesake"] = session.sees_namesake;
    if (session.skew) peer["clock_ahead_s"] = seconds(*session.skew);
    out.push_back(std::move(peer));
  }
  return out;
}

std::map<std::string, std::uint64_t> units_by_region(const crdt::Replica& replica) {
  std::map<std::string, std::uint64_t> units;
  replica.for_each_writer([&](const crdt::Incarnation& writer, std::uint64_t count) {
    auto member = replica.members().find(writer);
    std::uint64_t& sum = units[member == replica.members().end() ? "?" : member->second.region];
    sum = add_saturated(sum, count);
  });
  return units;
}

}  // namespace

NodeReport::NodeReport(Sources sources) : from_(std::move(sources)), started_at_(from_.wall()) {}

void NodeReport::status_json(Text done) {
  ask(status_, std::move(done));
}

void NodeReport::metrics(Text done) {
  ask(metrics_, std::move(done));
}

void NodeReport::ask(Kind& kind, Text done) {
  kind.waiting.push_back(std::move(done));
  if (!kind.making) make(kind);
}

void NodeReport::make(Kind& kind) {
  kind.making = true;
  auto told = std::exchange(kind.waiting, {});
  (this->*kind.make)([this, alive = std::weak_ptr(alive_), &kind,
                      told = std::move(told)](const std::string& text) {
    for (const Text& done : told) done(text);
    if (alive.expired()) return;
    kind.making = false;
    if (!kind.waiting.empty()) make(kind);
  });
}

void NodeReport::make_status(Text done) {
  Engine& engine = from_.engine;
  const Nanos wall = from_.wall();
  const Nanos now = engine.clock(wall);
  const EngineStatus status = engine.status();
  const crdt::Replica& replica = engine.replica();
  json out{{"version", kVersion},
           {"cluster", from_.config.cluster},
           {"region", from_.config.self.region},
           {"node", from_.config.self.node},
           {"incarnation", crdt::to_string(replica.incarnation())},
           {"uptime_s", seconds_since(started_at_, wall)},
           {"now_ns", now},
           {"threads", from_.threads},
           {"series", engine.limiter().series_count()},
           {"cells", replica.cell_count()},
           {"digest", fmt::format("{:016x}", replica.digest())},
           {"holding", status.holding},
           {"waiting_for_commit", status.waiting},
           {"shed", status.shed},
           {"unabsorbed", status.unabsorbed},
           {"reincarnations", status.reincarnations},
           {"clock", clock_json(status, from_.clock)}};
  const UnmetCounters unmet = engine.limiter().unmet();
  out["unmet"] = {{"no_rule", unmet.no_rule}, {"unknown_domain", unmet.unknown_domain}};
  if (unmet.unknown_domain > 0) out["unmet"]["last_unknown_domain"] = unmet.last_unknown_domain;
  const Forwarder* forwarder = from_.coordinator.forwarder();
  out["conditions"] = conditions_json(conditions());
  out["escrow"] = escrow_json(engine.escrow(), forwarder);
  out["loop"] = loop_json(from_.turns);
  out["storage"] = storage_json(status, from_.store);
  out["rules_file"] = rules_file_json(from_.control.status(), from_.config.rules, wall);
  out["peers"] = peers_json(replica, from_.peers, now);
  if (from_.coordinator.state().has_home_rules) {
    const HomeCounters& homes = forwarder->counters();
    out["home"] = {{"forwarded", homes.forwarded},
                   {"served", homes.served},
                   {"refused", homes.refused},
                   {"degraded", homes.degraded}};
  }
  const crdt::ReplicaCounters& counters = replica.counters();
  out["counters"] = {
      {"late", counters.late_cells},         {"future", counters.future_cells},
      {"invalid", counters.invalid_cells},   {"alarms", counters.alarms},
      {"repaired", counters.repaired_cells}, {"pushes", counters.pushes_sent},
      {"cells_sent", counters.cells_sent},   {"cells_received", counters.cells_received}};
  out["units_by_region"] = units_by_region(replica);
  auto whole = std::make_shared<json>(std::move(out));
  make_text(
      [&engine, wall, whole] {
        (*whole)["rules"] = rules_json(engine, wall);
        return whole->dump(-1, ' ', false, json::error_handler_t::replace);
      },
      std::move(done));
}

void NodeReport::make_metrics(Text done) {
  auto all = std::make_shared<NodeMetrics>(collect());
  make_text(
      [&engine = from_.engine, wall = from_.wall(), all] {
        collect_rules(engine, wall, *all);
        return render_metrics(*all);
      },
      std::move(done));
}

/// In the background, as it may be long.
void NodeReport::make_text(std::function<std::string()> make, Text done) {
  auto text = std::make_shared<std::string>();
  from_.background.run([make = std::move(make), text] { *text = make(); },
                       [done = std::move(done), text] { done(std::move(*text)); });
}

NodeMetrics NodeReport::collect() {
  NodeMetrics out;
  Engine& engine = from_.engine;
  const Nanos wall = from_.wall();
  const Nanos now = engine.clock(wall);
  out.version = kVersion;
  out.cluster = from_.config.cluster;
  out.region = from_.config.self.region;
  out.node = from_.config.self.node;
  out.start_time_seconds = seconds(started_at_);
  out.series = engine.limiter().series_count();
  out.max_series = from_.config.max_series;
  out.cells = engine.replica().cell_count();
  out.clock_ok = from_.clock.wrong().empty();
  out.clock_set_back_seconds = seconds(engine.status().set_back);
  const RulesStatus& file = from_.control.status();
  out.rules_file = {file.version, seconds(file.since), file.reloads, file.refused,
                    file.last_error.empty()};
  for (const rpc::LongestTurn& one : from_.turns.longest()) {
    out.turns.push_back({std::string(one.what), seconds(one.lately)});
  }
  const RequestIdCounters ids = engine.limiter().request_ids();
  out.request_ids = {ids.held, ids.repeated, ids.evicted};
  const TicketCounters tickets = engine.limiter().tickets();
  out.tickets = {tickets.open, tickets.timed_out, tickets.refused};
  const UnmetCounters unmet = engine.limiter().unmet();
  out.unmet = {unmet.no_rule, unmet.unknown_domain};
  collect_peers(out, now);
  for (std::size_t front = 0; front < kFronts.size(); ++front) {
    for (std::size_t reason = 0; reason < kDenialReasons.size(); ++reason) {
      out.denials.push_back({std::string(kFronts[front]), std::string(kDenialReasons[reason]),
                             from_.access.denials(front, static_cast<DenialReason>(reason))});
    }
  }
  out.requests_over_budget = from_.budgets.requests_refused();
  out.reports_over_budget = from_.budgets.reports_refused();
  if (!from_.config.access.empty()) out.access_current = from_.access_control.current();
  if (from_.certificates != nullptr) {
    for (const Certificates::Use& use : from_.certificates->uses()) {
      const rpc::TlsCounters& counted = use.counters;
      TlsMetrics one{use.use, counted.handshakes, counted.resumed, counted.failed, use.current, {}};
      for (const rpc::TlsCertificate& certificate : use.certificates) {
        one.certificates.push_back({certificate.file, seconds(certificate.expires - wall)});
      }
      out.tls.push_back(std::move(one));
    }
  }
  if (from_.store != nullptr) {
    const storage::StoreCounters counters = from_.store->counters();
    const EngineStatus status = engine.status();
    out.storage = StorageMetrics{status.durable,         counters.commits,
                                 counters.records,       counters.bytes,
                                 from_.store->backlog(), seconds(counters.last_commit_time),
                                 status.waiting,         status.shed};
  }
  if (from_.coordinator.state().has_home_rules) {
    const HomeCounters& homes = from_.coordinator.forwarder()->counters();
    out.home = HomeMetrics{homes.forwarded, homes.served, homes.refused, homes.degraded};
  }
  collect_rights(out);
  const crdt::ReplicaCounters& replica = engine.replica().counters();
  out.replica = {replica.late_cells, replica.future_cells, replica.invalid_cells, replica.alarms};
  return out;
}

void NodeReport::collect_peers(NodeMetrics& out, Nanos now) {
  const std::vector<crdt::PeerStatus> status = from_.engine.replica().peers();
  for (crdt::PeerIndex i = 0; i < status.size(); ++i) {
    PeerMetrics peer;
    peer.peer = peer_name(status[i].member);
    peer.up = static_cast<bool>(status[i].incarnation);
    peer.unacked = status[i].unacked;
    if (status[i].caught_up_at != 0) peer.lag = seconds_since(status[i].caught_up_at, now);
    const rpc::LinkStatus link = from_.peers->status(i);
    peer.dropped_messages = link.dropped;
    peer.withheld_slots = status[i].withheld_slots;
    peer.refused_cells = status[i].refused_cells;
    if (link.skew) peer.skew = seconds(*link.skew);
    peer.two_of_name = link.two_of_name;
    out.namesake |= link.sees_namesake;
    out.peers.push_back(std::move(peer));
  }
}

void NodeReport::collect_rights(NodeMetrics& out) {
  const std::vector<Rule>& rules = from_.control.rules()->rules();
  const bool has_rights = std::any_of(rules.begin(), rules.end(), [](const Rule& rule) {
    return rule.enforcement == Enforcement::escrow;
  });
  if (!has_rights) return;
  const EscrowAgent& escrow = from_.engine.escrow();
  const EscrowAgentCounters& rights = escrow.counters();
  out.escrow = EscrowMetrics{
      escrow.grant_state().open, escrow.whole(),     rights.requests_sent,  rights.requests_served,
      rights.requests_refused,   rights.units_given, rights.units_received, rights.versions_differ};
  if (from_.coordinator.forwarder() == nullptr) return;
  const PassedOnCounters& passed = from_.coordinator.forwarder()->passed_on();
  out.escrow->forwarded = passed.requests;
  out.escrow->forwards = passed.asked;
  out.escrow->forwards_admitted = passed.admitted;
  out.escrow->forwards_failed = passed.failed;
  out.escrow->forwards_suppressed = passed.suppressed;
  out.escrow->forwards_served = passed.served;
}

/// One place for all of them (docs/http.md): a condition is a name, what it stops, and why.
std::vector<Condition> NodeReport::conditions() {
  const EngineStatus status = from_.engine.status();
  const bool has_disk = from_.store != nullptr;
  Condition stopping{"stopping"};
  if (const SharedState& state = from_.coordinator.state(); state.stopping) {
    stopping = {"stopping", false, true, "stopping"};
  } else if (state.leaving) {
    stopping = {"stopping", false, true, "stopping soon, and still answering"};
  }

  // It is opened again by itself, and what only memory knows would not outlive a restart.
  Condition storage{"storage"};
  if (has_disk && status.writing && !status.durable) {
    storage = {"storage", false, true,
               "the disk is back, and gets what it lacks, after: " + status.storage_failure};
  } else if (has_disk && !status.durable) {
    storage = {"storage", false, true, "storage failed: " + status.storage_failure};
  }

  Condition disk{"disk_in_time"};
  if (status.stalled) {
    disk = {"disk_in_time", false, true,
            "the disk is so late that time goes on without it; requests that need it wait"};
  } else if (from_.engine.overloaded(from_.wall())) {
    disk = {"disk_in_time", false, true, "requests wait for the disk, and others are turned away"};
  }

  // Cut off it goes on; refused it is configured wrongly, and shares nothing with anybody.
  Condition peers{"peers"};
  bool any_up = false;
  for (crdt::PeerIndex i = 0; from_.peers != nullptr && i < from_.config.peers.size(); ++i) {
    const rpc::LinkStatus link = from_.peers->status(i);
    any_up |= link.up;
    if (!link.refuses) continue;
    if (!peers.text.empty()) peers.text += "; ";
    peers.text += peer_name(from_.config.peers[i].member) + ": " + link.last_error;
  }
  peers.ready = any_up || peers.text.empty();

  // Which of the two is the wrong one nobody here can tell.
  Condition names{"names"};
  for (crdt::PeerIndex i = 0; from_.peers != nullptr && i < from_.config.peers.size(); ++i) {
    const rpc::LinkStatus link = from_.peers->status(i);
    const std::string peer = peer_name(from_.config.peers[i].member);
    if (link.two_of_name) names.text += "two nodes run as " + peer + "; ";
    if (link.sees_namesake) {
      names.text += "another node runs as " + peer_name(from_.config.self) +
                    ", this node's name, and " + peer + " hears both; ";
    }
  }
  if (!names.text.empty()) names.text.resize(names.text.size() - 2);

  Condition clock{"clock"};
  clock.text = from_.clock.wrong();
  clock.ready = clock.text.empty();

  // The last good ones are in force: all nodes may have got the same bad file.
  Condition rules{"rules"};
  rules.text = from_.control.status().last_error;
  return {std::move(stopping), std::move(storage), std::move(disk), std::move(peers),
          std::move(names),    std::move(clock),   std::move(rules)};
}

}  // namespace weir::node
