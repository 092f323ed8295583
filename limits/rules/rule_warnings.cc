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

}  // namespace

std::vector<RuleWarning> rule_warnings(const std::vector<Rule>& rules, const RuleOrigin& origin) {
  std::vector<RuleWarning> out;
  for (std::size_t i = 0; i < rules.size() && out.size() < kMaxErrors; ++i) {
    std::string text = held_back(rules[i]);
    if (text.empty()) continue;
    const bool strict = rules[i].strict;
    const RuleError at = origin.error(i, strict ? "strict" : "limit");
    out.push_back({at.file, at.line, at.column, at.field, std::move(text)});
  }
  return out;
}

}  // namespace weir::internal
