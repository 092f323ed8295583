#include <weir/limits/rules/rule_warnings.h>

#include <fmt/format.h>

#include <utility>

namespace weir::internal {
namespace {

/// Below this a sliding window of one slot lets through less than nine tenths of it.
constexpr std::uint64_t kSmallLimit = 10;

constexpr std::string_view kInstead =
    "take algorithm: sliding_log, which is exact, or strict: true with slots of 10 or more";

/// Of a sliding window that holds back more than its limit says: why.
std::string held_back(const Rule& rule) {
  if (rule.algorithm != Algorithm::sliding_window || rule.slots > 1 || rule.limit == 0) return {};
  if (rule.strict) {
    return "strict with slots: 1 counts all of the window before, so a key that always asks gets "
           "about half of the limit: take slots of 10 or more";
  }
  if (rule.limit >= kSmallLimit) return {};
  return fmt::format(
      "a sliding_window rounds up what it counts of the window before, so a key that "
      "always asks gets {} of this limit: {}",
      rule.limit <= 2 ? std::string("half") : fmt::format("{} of {}", rule.limit - 1, rule.limit),
      kInstead);
}

/// Of denied requests that count where it makes no difference to those who ask all the time.
std::string counts_in_vain(const Rule& rule) {
  if (!rule.count_denied) return {};
  std::string what;
  if (rule.enforcement == Enforcement::escrow) {
    what = "enforcement: escrow";
  } else if (rule.algorithm == Algorithm::sliding_log || rule.phase == Phase::first_hit) {
    what = rule.phase == Phase::first_hit ? "phase: first_hit" : "algorithm: sliding_log";
  } else {
    return {};
  }
  return fmt::format(
      "with {} a denied request counts as far as there is room: who goes on asking waits no longer "
      "for it. For that take a sliding_window or a bucket",
      what);
}

std::string tries_nothing(const Rule& rule) {
  const bool same = rule.candidate && rule.candidate->limit == rule.limit &&
                    (!is_bucket(rule.algorithm) || rule.candidate->burst == rule.burst);
  return same ? "the same as the limit: it would deny the same" : "";
}

}  // namespace

std::vector<RuleWarning> rule_warnings(const std::vector<Rule>& rules, const RuleOrigin& origin) {
  std::vector<RuleWarning> out;
  for (std::size_t i = 0; i < rules.size() && out.size() < kMaxErrors; ++i) {
    const auto warn = [&](std::string_view field, std::string text) {
      if (text.empty()) return;
      const RuleError at = origin.error(i, field);
      out.push_back({at.file, at.line, at.column, at.field, std::move(text)});
    };
    warn(rules[i].strict ? "strict" : "limit", held_back(rules[i]));
    warn("count_denied", counts_in_vain(rules[i]));
    warn("candidate", tries_nothing(rules[i]));
  }
  return out;
}

}  // namespace weir::internal
