#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <weir/limits/limiter.h>

namespace weir {

struct FallbackOptions {
  /// How many decide on their own when nobody answers: each has limit / parts * 1.2 of every rule.
  unsigned parts = 1;
  /// A request with one of these descriptor entries always passes.
  std::vector<std::pair<std::string, std::string>> allowlist = {};
  std::size_t max_series = 4096;  ///< beyond, series share the cells of a sketch
};

/// What a rule's on_failure says when no node answers in time: `open` rules count in a bucket here
/// (limit / parts * 1.2 per window, and as much of the burst, at least one unit), `closed` rules
/// deny. All rules that match must agree. Buckets are exact (limits/algorithms/bucket.h), begin
/// full, and know nothing of what the nodes counted.
///
/// Thread-safe, and reads no clock.
class Fallback {
 public:
  Fallback(std::shared_ptr<const RuleSet> rules, FallbackOptions options);

  struct Answer {
    bool allowed = false;
    bool closed = false;  ///< a rule that is on_failure: closed denied it
    bool allowlisted = false;
    Decision decision;  ///< of the buckets; its rules are indices into rules(). Empty if closed
  };
  Answer decide(const Request& request, Nanos now);

  const RuleSet& rules() const { return *rules_; }
  /// How a rule counts here.
  static Rule local_rule(const Rule& rule, unsigned parts);

 private:
  bool allowlisted(const Request& request) const;

  const std::shared_ptr<const RuleSet> rules_;
  const FallbackOptions options_;
  std::unique_ptr<Limiter> buckets_;
};

}  // namespace weir
