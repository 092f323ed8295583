#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <weir/crdt/time.h>

namespace weir::node {

/// What one rule did since the start.
struct RuleMetrics {
  std::string domain;
  std::string rule;
  std::uint64_t allowed = 0;
  std::uint64_t denied = 0;             ///< for a shadow rule: would have been
  std::uint64_t degraded = 0;           ///< answered by on_failure
  std::uint64_t exhausted_locally = 0;  ///< of the denied: others may have had rights
  bool shadow = false;
  std::uint64_t over_admission = 0;     ///< units, at most, as far as is known now
  std::uint64_t series = 0;             ///< keys held
  std::uint64_t series_guaranteed = 0;  ///< for which there is always room
  std::uint64_t series_refused = 0;     ///< new keys for which there was none
  /// Requests that Rule::candidate would have denied. None: the rule has no candidate.
  std::optional<std::uint64_t> candidate_denied = std::nullopt;
  std::map<std::string, std::string> labels{};  ///< as the rule says
};

struct PeerMetrics {
  std::string peer;  ///< "region/node"
  bool up = false;
  std::uint64_t unacked = 0;   ///< changes the peer has not acknowledged
  std::optional<double> lag;   ///< seconds since it held all of ours; unknown: never did
  std::optional<double> skew;  ///< seconds its clock is ahead of ours
  std::uint64_t dropped_messages = 0;
  bool two_of_name = false;          ///< LinkStatus::two_of_name
  std::uint64_t withheld_slots = 0;  ///< crdt::PeerStatus
  std::uint64_t refused_cells = 0;   ///< the same
};

struct StorageMetrics {
  bool ok = true;
  std::uint64_t commits = 0;
  std::uint64_t records = 0;
  std::uint64_t bytes = 0;
  std::uint64_t backlog = 0;       ///< writes waiting for a commit
  double last_commit_seconds = 0;  ///< how long the last commit took
  std::uint64_t waiting = 0;       ///< requests that wait for a commit
  std::uint64_t shed = 0;          ///< requests turned away, as the disk is too slow for them
};

/// Requests of rules with enforcement: home.
struct HomeMetrics {
  std::uint64_t forwarded = 0;  ///< to another member
  std::uint64_t served = 0;     ///< for other members
  std::uint64_t refused = 0;    ///< of which this node is not the home
  std::uint64_t degraded = 0;   ///< whose home did not answer
};

/// Rights of rules with enforcement: escrow.
struct EscrowMetrics {
  bool open = false;   ///< shares of windows that begin are spent
  bool whole = false;  ///< it has all that it had before its start
  std::uint64_t requests_sent = 0;
  std::uint64_t requests_served = 0;
  std::uint64_t requests_refused = 0;
  std::uint64_t units_given = 0;
  std::uint64_t units_received = 0;
  std::uint64_t versions_differ = 0;  ///< rejoin requests of peers that know other weights
  std::uint64_t forwarded = 0;        ///< requests that others were asked to decide
  std::uint64_t forwards = 0;         ///< questions for that
  std::uint64_t forwards_admitted = 0;
  std::uint64_t forwards_failed = 0;
  std::uint64_t forwards_suppressed = 0;
  std::uint64_t forwards_served = 0;
};

struct ReplicaMetrics {
  std::uint64_t late_cells = 0;
  std::uint64_t future_cells = 0;
  std::uint64_t invalid_cells = 0;
  std::uint64_t alarms = 0;
};

struct RequestIdMetrics {
  std::uint64_t held = 0;
  std::uint64_t repeated = 0;  ///< requests told what they were told before
  std::uint64_t evicted = 0;   ///< forgotten before their time, for want of room
};

/// Requests that no rule met.
struct UnmetMetrics {
  std::uint64_t no_rule = 0;         ///< of a domain with rules
  std::uint64_t unknown_domain = 0;  ///< of one without
};

struct TicketMetrics {
  std::uint64_t open = 0;
  std::uint64_t timed_out = 0;  ///< settled in full, as nobody did in time
  std::uint64_t refused = 0;    ///< reservations for which there was no room
};

/// A kind of event on the main loop.
struct TurnMetrics {
  std::string what;
  double longest_seconds = 0;  ///< processor time of the longest one in the last minute or two
};

/// TLS of the peers, or of a front.
struct TlsMetrics {
  struct Certificate {
    std::string file;
    double expiry_seconds = 0;  ///< until the first one in it ends; negative: since then
  };
  std::string use;
  std::uint64_t handshakes = 0;
  std::uint64_t resumed = 0;
  std::uint64_t failed = 0;
  bool current = true;  ///< the files were taken when they were read last
  std::vector<Certificate> certificates;
};

/// Callers that were told that they may not.
struct DenialMetrics {
  std::string front;
  std::string reason;
  std::uint64_t count = 0;
};

/// The rules in force, and what became of the file they are read from.
struct RulesMetrics {
  std::string version;             ///< LoadedRules::version
  double loaded_time_seconds = 0;  ///< Unix time since which they are in force
  std::uint64_t reloads = 0;       ///< since the start
  std::uint64_t refused = 0;       ///< files that were not taken
  bool current = true;             ///< the file was taken when it was read last
};

/// Everything a scrape tells, taken at one moment.
struct NodeMetrics {
  std::string version;  ///< build info
  std::string cluster;
  std::string region;
  std::string node;
  double start_time_seconds = 0;  ///< Unix time of the process's start
  std::uint64_t series = 0;
  std::uint64_t max_series = 0;
  std::uint64_t cells = 0;
  bool clock_ok = true;               ///< nothing is known to be wrong with the clock
  double clock_set_back_seconds = 0;  ///< by so much, before the start
  bool namesake = false;              ///< a peer has seen another node of this name
  RequestIdMetrics request_ids;
  TicketMetrics tickets;
  UnmetMetrics unmet;
  std::vector<TurnMetrics> turns;
  RulesMetrics rules_file;
  std::vector<RuleMetrics> rules;
  std::vector<PeerMetrics> peers;
  std::vector<TlsMetrics> tls;  ///< empty: none
  std::vector<DenialMetrics> denials;
  std::uint64_t requests_over_budget = 0;  ///< CallerBudgets
  std::uint64_t reports_over_budget = 0;
  std::optional<bool> access_current;  ///< the access file was taken when read last; none: no file
  std::optional<StorageMetrics> storage;  ///< none: in memory only
  std::optional<HomeMetrics> home;        ///< none: no rule has a home
  std::optional<EscrowMetrics> escrow;    ///< none: no rule has rights
  ReplicaMetrics replica;
};

/// The Prometheus text format, version 0.0.4. The number of lines depends on the configuration
/// (rules, peers) and on kinds of events, never on users or keys. Text that is not UTF-8 is
/// replaced.
std::string render_metrics(const NodeMetrics& metrics);

}  // namespace weir::node
