#include <weir/node/report/metrics.h>

#include <initializer_list>
#include <map>
#include <string>
#include <utility>

#include <prometheus/metric_family.h>
#include <prometheus/text_serializer.h>

#include <weir/limits/text/utf8.h>

namespace weir::node {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;

using Labels = std::initializer_list<std::pair<const char*, const std::string&>>;

class Page {
 public:
  // The family that add() fills next.
  void counter(const char* name, const char* help) { family(name, help, MetricType::Counter); }
  void gauge(const char* name, const char* help) { family(name, help, MetricType::Gauge); }

  void add(Labels labels, double value) {
    ClientMetric metric;
    for (const auto& [name, text] : labels)
      metric.label.push_back({name, internal::to_valid_utf8(text)});
    if (families_.back().type == MetricType::Counter) {
      metric.counter.value = value;
    } else {
      metric.gauge.value = value;
    }
    families_.back().metric.push_back(std::move(metric));
  }
  // Of the metric that add() added last.
  void label(const std::map<std::string, std::string>& more) {
    for (const auto& [name, text] : more) {
      families_.back().metric.back().label.push_back({name, internal::to_valid_utf8(text)});
    }
  }
  void add(Labels labels, std::uint64_t value) { add(labels, static_cast<double>(value)); }

  std::string text() const { return prometheus::TextSerializer().Serialize(families_); }

 private:
  void family(const char* name, const char* help, MetricType type) {
    families_.push_back({name, help, type, {}});
  }
  std::vector<MetricFamily> families_;
};

void add_rules(Page& page, const std::vector<RuleMetrics>& rules) {
  const std::string allowed = "allowed";
  const std::string denied = "denied";
  const std::string shadow = "shadow_denied";
  page.counter("weir_rule_decisions_total",
               "Requests a rule was asked about, by its verdict; shadow_denied would have been "
               "denied if the rule were enforced.");
  for (const RuleMetrics& rule : rules) {
    const auto one = [&](const std::string& verdict, std::uint64_t count) {
      page.add({{"domain", rule.domain}, {"rule", rule.rule}, {"verdict", verdict}}, count);
    };
    one(allowed, rule.allowed);
    one(denied, rule.shadow ? 0 : rule.denied);
    one(shadow, rule.shadow ? rule.denied : 0);
  }
  page.counter("weir_rule_candidate_denied_total",
               "Requests that the limit of a rule's candidate would have denied.");
  for (const RuleMetrics& rule : rules) {
    if (!rule.candidate_denied) continue;
    page.add({{"domain", rule.domain}, {"rule", rule.rule}}, *rule.candidate_denied);
  }
  page.counter("weir_rule_degraded_total",
               "Requests that a rule's on_failure answered because it could not count them.");
  for (const RuleMetrics& rule : rules) {
    page.add({{"domain", rule.domain}, {"rule", rule.rule}}, rule.degraded);
  }
  page.gauge(
      "weir_rule_info",
      "Always 1; of each rule with labels of its own, which these are. To be joined with the "
      "other metrics of a rule.");
  for (const RuleMetrics& rule : rules) {
    if (rule.labels.empty()) continue;
    page.add({{"domain", rule.domain}, {"rule", rule.rule}}, 1.0);
    page.label(rule.labels);
  }
  page.gauge("weir_rule_series", "Keys that are held of a rule.");
  for (const RuleMetrics& rule : rules) {
    page.add({{"domain", rule.domain}, {"rule", rule.rule}}, rule.series);
  }
  page.gauge("weir_rule_series_guaranteed",
             "Keys of a rule for which there is always room, whatever others hold.");
  for (const RuleMetrics& rule : rules) {
    page.add({{"domain", rule.domain}, {"rule", rule.rule}}, rule.series_guaranteed);
  }
  page.counter("weir_rule_series_refused_total",
               "New keys of a rule for which there was no room: its on_failure answered.");
  for (const RuleMetrics& rule : rules) {
    page.add({{"domain", rule.domain}, {"rule", rule.rule}}, rule.series_refused);
  }
  page.gauge("weir_over_admission_worst_case_units",
             "Units that peers may have admitted of a rule since they were last heard: by so much "
             "it may be over its limits at most.");
  for (const RuleMetrics& rule : rules) {
    page.add({{"domain", rule.domain}, {"rule", rule.rule}}, rule.over_admission);
  }
}

void add_peers(Page& page, const std::vector<PeerMetrics>& peers) {
  page.gauge("weir_peer_up", "1 while there is a session to the peer.");
  for (const PeerMetrics& peer : peers) page.add({{"peer", peer.peer}}, peer.up ? 1.0 : 0.0);

  page.gauge("weir_peer_unacked_changes", "Changes that the peer has not acknowledged.");
  for (const PeerMetrics& peer : peers) page.add({{"peer", peer.peer}}, peer.unacked);

  page.gauge("weir_peer_lag_seconds",
             "Time since the peer was known to hold everything this node had; absent if it never "
             "was.");
  for (const PeerMetrics& peer : peers) {
    if (peer.lag) page.add({{"peer", peer.peer}}, *peer.lag);
  }

  page.gauge("weir_peer_clock_skew_seconds",
             "How far the peer's clock is ahead of this node's; absent if not known.");
  for (const PeerMetrics& peer : peers) {
    if (peer.skew) page.add({{"peer", peer.peer}}, *peer.skew);
  }

  page.gauge("weir_peer_two_of_name",
             "1 while two nodes run under the peer's name, or did a minute ago.");
  for (const PeerMetrics& peer : peers) {
    page.add({{"peer", peer.peer}}, peer.two_of_name ? 1.0 : 0.0);
  }

  page.counter("weir_peer_dropped_messages_total",
               "Messages to the peer that were dropped because it was down or slow; they are sent "
               "again later.");
  for (const PeerMetrics& peer : peers) page.add({{"peer", peer.peer}}, peer.dropped_messages);

  page.counter(
      "weir_peer_withheld_slots_total",
      "Counts of other live members that the peer relayed higher than these had shown: not "
      "taken from it.");
  for (const PeerMetrics& peer : peers) page.add({{"peer", peer.peer}}, peer.withheld_slots);

  page.counter("weir_peer_refused_cells_total",
               "Cells from the peer that were not taken, as it has brought as many as it may.");
  for (const PeerMetrics& peer : peers) page.add({{"peer", peer.peer}}, peer.refused_cells);
}

void add_tls(Page& page, const std::vector<TlsMetrics>& all) {
  page.gauge("weir_certificate_expiry_seconds",
             "Time until the first certificate in a file ends, negative once it has.");
  for (const TlsMetrics& one : all) {
    for (const TlsMetrics::Certificate& certificate : one.certificates) {
      page.add({{"use", one.use}, {"file", certificate.file}}, certificate.expiry_seconds);
    }
  }
  page.gauge("weir_certificates_current",
             "1 if certificates, keys and CAs were taken when they were read last, 0 if they were "
             "refused and older ones stay in force.");
  for (const TlsMetrics& one : all) page.add({{"use", one.use}}, one.current ? 1.0 : 0.0);
  const std::string full = "full";
  const std::string resumed = "resumed";
  const std::string failed = "failed";
  page.counter("weir_tls_handshakes_total", "TLS handshakes, by how they went.");
  for (const TlsMetrics& one : all) {
    page.add({{"use", one.use}, {"result", full}}, one.handshakes - one.resumed);
    page.add({{"use", one.use}, {"result", resumed}}, one.resumed);
    page.add({{"use", one.use}, {"result", failed}}, one.failed);
  }
}

void add_access(Page& page, const NodeMetrics& metrics) {
  if (!metrics.denials.empty())
    page.counter("weir_access_denied_total",
                 "What callers asked for and may not, by front and reason.");
  for (const DenialMetrics& one : metrics.denials) {
    page.add({{"front", one.front}, {"reason", one.reason}}, one.count);
  }
  const std::string waiting = "waiting";
  const std::string status = "status";
  page.counter("weir_caller_over_budget_total",
               "What callers were refused as they have too much of it already: requests that may "
               "have to wait, and calls for the status.");
  page.add({{"what", waiting}}, metrics.requests_over_budget);
  page.add({{"what", status}}, metrics.reports_over_budget);
  if (!metrics.access_current) return;
  page.gauge("weir_access_current",
             "1 if the access file was taken when it was read last, 0 if it was refused and an "
             "older one stays in force.");
  page.add({}, *metrics.access_current ? 1.0 : 0.0);
}

void add_storage(Page& page, const StorageMetrics& storage) {
  page.gauge("weir_storage_ok", "1 while the store is durable, 0 after it failed.");
  page.add({}, storage.ok ? 1.0 : 0.0);
  page.counter("weir_storage_commits_total", "Durable commits.");
  page.add({}, storage.commits);
  page.counter("weir_storage_records_total", "Records appended to the log.");
  page.add({}, storage.records);
  page.counter("weir_storage_written_bytes_total", "Bytes of the records appended.");
  page.add({}, storage.bytes);
  page.gauge("weir_storage_backlog_writes", "Writes that wait for a commit.");
  page.add({}, storage.backlog);
  page.gauge("weir_storage_last_commit_duration_seconds", "How long the last commit took.");
  page.add({}, storage.last_commit_seconds);
  page.gauge("weir_storage_waiting_requests", "Requests whose answers wait for a commit.");
  page.add({}, storage.waiting);
  page.counter("weir_storage_shed_requests_total",
               "Requests turned away because the disk is too slow for them (max_commit_wait).");
  page.add({}, storage.shed);
}

void add_home(Page& page, const HomeMetrics& home) {
  page.counter("weir_home_forwarded_total", "Requests that another node was asked to decide.");
  page.add({}, home.forwarded);
  page.counter("weir_home_served_total", "Requests decided here for other nodes.");
  page.add({}, home.served);
  page.counter("weir_home_refused_total",
               "Requests of other nodes that take this one for a home that it is not: the nodes' "
               "configurations differ.");
  page.add({}, home.refused);
  page.counter("weir_home_degraded_total",
               "Requests whose home did not answer: the rule's on_failure decided.");
  page.add({}, home.degraded);
}

void add_escrow(Page& page, const std::vector<RuleMetrics>& rules, const EscrowMetrics& escrow) {
  page.counter("weir_rule_exhausted_locally_total",
               "Requests a rule denied because no rights were left here, while others may have had "
               "some.");
  for (const RuleMetrics& rule : rules) {
    page.add({{"domain", rule.domain}, {"rule", rule.rule}}, rule.exhausted_locally);
  }
  page.gauge("weir_escrow_open",
             "1 once another node knows of this one: its shares of windows that begin are spent.");
  page.add({}, escrow.open ? 1.0 : 0.0);
  page.gauge("weir_escrow_whole", "1 once this node has all rights that it had before its start.");
  page.add({}, escrow.whole ? 1.0 : 0.0);
  page.counter("weir_escrow_requests_sent_total", "Requests for rights, sent to other nodes.");
  page.add({}, escrow.requests_sent);
  page.counter("weir_escrow_requests_served_total",
               "Requests for rights of other nodes that got some.");
  page.add({}, escrow.requests_served);
  page.counter(
      "weir_escrow_requests_refused_total",
      "Requests for rights of other nodes that got nothing: none were left, or the rule is "
      "not known here.");
  page.add({}, escrow.requests_refused);
  page.counter("weir_escrow_units_given_total", "Units of rights transferred to other nodes.");
  page.add({}, escrow.units_given);
  page.counter("weir_escrow_units_received_total", "Units of rights transferred to this node.");
  page.add({}, escrow.units_received);
  page.counter("weir_escrow_versions_differ_total",
               "Times that a node asked to be confirmed that knows other weights than this one.");
  page.add({}, escrow.versions_differ);
  page.counter("weir_escrow_forwarded_total",
               "Requests without rights here that other nodes were asked to decide.");
  page.add({}, escrow.forwarded);
  page.counter("weir_escrow_forwards_total",
               "Questions to other nodes about such requests; several for one, where the first had "
               "no rights.");
  page.add({}, escrow.forwards);
  page.counter("weir_escrow_forwards_admitted_total", "Such requests that passed.");
  page.add({}, escrow.forwards_admitted);
  page.counter("weir_escrow_forwards_failed_total",
               "Such requests that were denied because another node did not answer, which may have "
               "counted them.");
  page.add({}, escrow.forwards_failed);
  page.counter(
      "weir_escrow_forwards_suppressed_total",
      "Requests denied without asking others: they had nothing lately, or are being asked.");
  page.add({}, escrow.forwards_suppressed);
  page.counter("weir_escrow_forwards_served_total",
               "Requests of other nodes decided here from the rights that are here.");
  page.add({}, escrow.forwards_served);
}

void add_replica(Page& page, const ReplicaMetrics& replica) {
  page.counter("weir_replica_late_cells_total",
               "Cells received after they had expired; acknowledged, without effect.");
  page.add({}, replica.late_cells);
  page.counter("weir_replica_future_cells_total",
               "Cells refused because they start later than max_skew allows.");
  page.add({}, replica.future_cells);
  page.counter("weir_replica_invalid_cells_total", "Cells refused because they are malformed.");
  page.add({}, replica.invalid_cells);
  page.counter("weir_replica_alarms_total",
               "Alarms about this node's identity: its own counts ahead at a peer, or two nodes "
               "under one identity.");
  page.add({}, replica.alarms);
}

/// What is remembered and held of requests, and those that nothing limited.
void add_requests(Page& page, const NodeMetrics& metrics) {
  page.gauge("weir_request_ids", "Ids of requests that are remembered.");
  page.add({}, metrics.request_ids.held);
  page.counter("weir_request_ids_repeated_total",
               "Requests whose id had passed before: answered as then, not counted.");
  page.add({}, metrics.request_ids.repeated);
  page.counter("weir_request_ids_evicted_total",
               "Ids forgotten before their time for want of room: one that comes again counts.");
  page.add({}, metrics.request_ids.evicted);
  const std::string no_rule = "no_rule";
  const std::string unknown_domain = "unknown_domain";
  page.counter("weir_unmet_requests_total",
               "Requests that passed as no rule met them: of domains without rules, and of those "
               "with rules.");
  page.add({{"reason", unknown_domain}}, metrics.unmet.unknown_domain);
  page.add({{"reason", no_rule}}, metrics.unmet.no_rule);
  page.gauge("weir_tickets", "Reservations that are not settled yet.");
  page.add({}, metrics.tickets.open);
  page.counter("weir_tickets_timed_out_total",
               "Reservations that nobody settled in time: counted in full.");
  page.add({}, metrics.tickets.timed_out);
  page.counter("weir_tickets_refused_total", "Reservations for which there was no room.");
  page.add({}, metrics.tickets.refused);
}

}  // namespace

std::string render_metrics(const NodeMetrics& metrics) {
  Page page;
  page.gauge("weir_build_info", "Always 1; the labels say what runs here.");
  page.add({{"version", metrics.version},
            {"cluster", metrics.cluster},
            {"region", metrics.region},
            {"node", metrics.node}},
           1.0);
  page.gauge("process_start_time_seconds", "Unix time at which the process started.");
  page.add({}, metrics.start_time_seconds);

  page.gauge("weir_series", "Series held in memory: one for each rule's each key in use.");
  page.add({}, metrics.series);
  page.gauge("weir_series_limit", "Most series that may be held (max_series).");
  page.add({}, metrics.max_series);
  page.gauge("weir_clock_ok",
             "0 while this node's clock is more than max_skew off from most others, or stands "
             "outside of the years 2020 to 2200.");
  page.add({}, metrics.clock_ok ? 1.0 : 0.0);
  page.gauge("weir_namesake", "1 while a peer hears another node that runs under this name, too.");
  page.add({}, metrics.namesake ? 1.0 : 0.0);
  page.gauge("weir_clock_set_back_seconds",
             "By how much the clock had been set back when the node went on under a fresh "
             "incarnation; 0 if it had not.");
  page.add({}, metrics.clock_set_back_seconds);
  page.gauge("weir_cells", "Cells held by the replica.");
  page.add({}, metrics.cells);

  add_requests(page, metrics);

  page.gauge("weir_loop_turn_longest_seconds",
             "Longest processor time for which one event had the main loop, by what it was, in the "
             "last minute or two; what=\"turn\" is all between two sleeps, \"other\" what has no "
             "name.");
  for (const TurnMetrics& turn : metrics.turns) {
    page.add({{"what", turn.what}}, turn.longest_seconds);
  }

  const RulesMetrics& file = metrics.rules_file;
  page.gauge("weir_rules_info", "Always 1; the label says which version of the rules is in force.");
  page.add({{"version", file.version}}, 1.0);
  page.gauge("weir_rules_loaded_time_seconds", "Unix time since which these rules are in force.");
  page.add({}, file.loaded_time_seconds);
  page.gauge("weir_rules_current",
             "1 if the rules' file was taken when it was read last, 0 if it was refused and older "
             "rules stay in force.");
  page.add({}, file.current ? 1.0 : 0.0);
  page.counter("weir_rules_reloads_total", "Times that the rules were replaced.");
  page.add({}, file.reloads);
  page.counter("weir_rules_refused_total", "Times that the rules' file was read and refused.");
  page.add({}, file.refused);

  add_rules(page, metrics.rules);
  add_peers(page, metrics.peers);
  add_access(page, metrics);
  if (!metrics.tls.empty()) add_tls(page, metrics.tls);
  if (metrics.storage) add_storage(page, *metrics.storage);
  if (metrics.home) add_home(page, *metrics.home);
  if (metrics.escrow) add_escrow(page, metrics.rules, *metrics.escrow);
  add_replica(page, metrics.replica);
  return page.text();
}

}  // namespace weir::node
