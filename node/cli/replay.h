#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <weir/crdt/time.h>
#include <weir/limits/rules/rule.h>
#include <weir/node/cli/request_log.h>

namespace weir::node {

/// Which region a request goes to.
enum class Spread : std::uint8_t {
  client,   ///< a client's ip always to the same one, by hash
  request,  ///< one after the other
};

struct ReplayOptions {
  std::shared_ptr<const RuleSet> rules;
  std::string domain;         ///< of all requests
  std::uint32_t regions = 1;  ///< 1 to kMaxRegions
  Spread spread = Spread::client;
  Nanos sync_interval = 250 * kMillisecond;              ///< positive; at most 366 days
  std::size_t top = 10;                                  ///< most denied keys to report
  std::function<void(std::uint64_t requests)> progress;  ///< called now and then
};

inline constexpr std::uint32_t kMaxRegions = 64;

/// What one rule did, in requests that it matched. As in RuleStatus `allowed` means that this rule
/// had no objection; whether the request passed is up to all rules.
struct RuleOutcome {
  std::string name;
  bool shadow = false;  ///< what it denied passed as far as it is concerned
  std::uint64_t allowed = 0;
  std::uint64_t denied = 0;
  /// What the regions together allowed beyond one global limiter that saw all traffic at once: the
  /// sum of the excess over the rule's keys.
  std::uint64_t over_admitted = 0;
  /// What Rule::candidate would have denied, in all regions. None: the rule has no candidate.
  std::optional<std::uint64_t> candidate_denied = std::nullopt;
  friend bool operator==(const RuleOutcome&, const RuleOutcome&) = default;
};

struct DeniedKey {
  std::string rule;
  std::vector<std::pair<std::string, std::string>> entries;  ///< the rule's key with its values
  std::uint64_t denied = 0;
  friend bool operator==(const DeniedKey&, const DeniedKey&) = default;
};

struct ReplayReport {
  std::uint64_t requests = 0;
  std::uint64_t passed = 0;     ///< let through by all enforcing rules
  std::uint64_t refused = 0;    ///< denied by one at least
  std::uint64_t unmatched = 0;  ///< of those passed: met no rule at all
  Nanos first = 0;              ///< time of the earliest and the latest request
  Nanos last = 0;
  std::vector<RuleOutcome> rules;     ///< of the domain, in their order
  std::vector<DeniedKey> top_denied;  ///< most denied first; equal ones by rule, then by value
  friend bool operator==(const ReplayReport&, const ReplayReport&) = default;
};

/// Sends a log's requests, in the log's own time, through nodes in several regions, each with a
/// limiter and a replica of its own, and beside them through one global limiter.
///
/// The regions exchange all they have counted once per sync_interval, without loss or delay. All
/// requests of one instant are decided before time moves on, so what one region admits in an
/// instant the others learn of after it: logs with a resolution of a second show the worst case.
/// Real nodes also exchange at once when a key nears its limit. Memory for keys is not bounded, so
/// nothing is answered by a rule's on_failure. Equal arguments give equal reports.
ReplayReport replay(const ReplayOptions& options, const RequestLog& log);

}  // namespace weir::node
