#include <weir/limits/rules/rules_text.h>

#include <fmt/format.h>

#include <algorithm>
#include <string_view>

#include <weir/limits/text/duration.h>
#include <weir/limits/text/utf8.h>

namespace weir {
namespace {

std::string quoted(std::string_view text) {
  return internal::quoted_text(text, '"', text.size());
}

std::string cidr_text(const MatchCidr& cidr) {
  constexpr std::array<std::uint8_t, 12> kIpv4 = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xFF, 0xFF};
  const auto& bytes = cidr.network;
  if (cidr.bits >= 96 && std::equal(kIpv4.begin(), kIpv4.end(), bytes.begin())) {
    return fmt::format("{}.{}.{}.{}/{}", bytes[12], bytes[13], bytes[14], bytes[15],
                       cidr.bits - 96);
  }
  std::string out;
  for (std::size_t i = 0; i < bytes.size(); i += 2) {
    out += fmt::format("{}{:x}", i == 0 ? "" : ":", bytes[i] << 8 | bytes[i + 1]);
  }
  return fmt::format("{}/{}", out, cidr.bits);
}

struct MatcherText {
  std::string operator()(const MatchExact& m) const { return quoted(m.value); }
  std::string operator()(const MatchPrefix& m) const {
    return fmt::format("{{prefix: {}}}", quoted(m.prefix));
  }
  std::string operator()(const MatchAny&) const { return "any"; }
  std::string operator()(const MatchAbsent&) const { return "absent"; }
  std::string operator()(const MatchCidr& m) const {
    return fmt::format("{{cidr: {}}}", quoted(cidr_text(m)));
  }
};

std::string window_text(const Rule& rule) {
  if (!rule.calendar) return format_duration(rule.window);
  return fmt::format("{{calendar: {}, time_zone: {}}}", to_string(rule.calendar->unit),
                     quoted(rule.calendar->time_zone));
}

std::string weight_text(std::uint64_t weight) {
  std::string text = fmt::format("{}.{:06}", weight / kWeightUnit, weight % kWeightUnit);
  text.erase(text.find_last_not_of('0') + 1);
  if (text.back() == '.') text.pop_back();
  return text;
}

std::string cost_text(const Rule& rule) {
  if (!rule.cost_by_entry.empty()) {
    std::string entries;
    for (const EntryCost& entry : rule.cost_by_entry) {
      entries += fmt::format("{}{}: {}", entries.empty() ? "" : ", ", quoted(entry.key),
                             weight_text(entry.weight));
    }
    return fmt::format("{{entries: {{{}}}}}", entries);
  }
  if (rule.cost_by_method.empty()) return std::to_string(rule.default_cost);
  std::string out = "{";
  for (const auto& [method, cost] : rule.cost_by_method) {
    out += fmt::format("{}: {}, ", quoted(method), cost);
  }
  return out + fmt::format("default: {}}}", rule.default_cost);
}

std::string candidate_text(const Candidate& candidate) {
  if (candidate.burst == 0) return fmt::format("{{limit: {}}}", candidate.limit);
  return fmt::format("{{limit: {}, burst: {}}}", candidate.limit, candidate.burst);
}

std::string rule_text(const Rule& rule) {
  std::string out = fmt::format("  - name: {}\n", quoted(rule.name));
  const auto field = [&out](std::string_view name, std::string_view value) {
    out += fmt::format("    {}: {}\n", name, value);
  };
  if (!rule.match.empty()) {
    std::string match;
    for (const Match& each : rule.match) {
      match += fmt::format("{}{}: {}", match.empty() ? "" : ", ", quoted(each.key),
                           std::visit(MatcherText{}, each.matcher));
    }
    field("match", "{" + match + "}");
  }
  std::string key;
  for (const std::string& entry : rule.key) key += (key.empty() ? "" : ", ") + quoted(entry);
  field("key", "[" + key + "]");
  field("limit", std::to_string(rule.limit));
  field("window", window_text(rule));
  field("algorithm", to_string(rule.algorithm));
  if (rule.algorithm == Algorithm::sliding_window) {
    field("slots", std::to_string(rule.slots));
    field("strict", rule.strict ? "true" : "false");
  }
  if (is_bucket(rule.algorithm)) {
    // 0 is what a limit of 0 makes of it.
    if (rule.burst > 0) field("burst", std::to_string(rule.burst));
    field("max_debt", std::to_string(rule.max_debt));
  }
  field("cost", cost_text(rule));
  field("phase", to_string(rule.phase));
  field("enforcement", to_string(rule.enforcement));
  field("durability", to_string(rule.durability));
  // Readers that do not know it yet take the default.
  if (rule.late != Late::charge) field("late", to_string(rule.late));
  if (rule.count_denied) field("count_denied", "true");
  if (rule.candidate) field("candidate", candidate_text(*rule.candidate));
  if (rule.series > 0) field("series", std::to_string(rule.series));
  field("on_failure", to_string(rule.on_failure));
  field("shadow", rule.shadow ? "true" : "false");
  return out;
}

}  // namespace

std::string rules_text(const RuleSet& rules) {
  std::string out;
  const std::string* domain = nullptr;
  for (const Rule& rule : rules.rules()) {
    if (domain == nullptr || *domain != rule.domain) {
      out += fmt::format("{}domain: {}\nrules:\n", domain == nullptr ? "" : "---\n",
                         quoted(rule.domain));
      domain = &rule.domain;
    }
    out += rule_text(rule);
  }
  return out;
}

}  // namespace weir
