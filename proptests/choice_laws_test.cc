#include <weir/limits/limiter.h>
#include <weir/limits/rules/rule_choice.h>

#include <tuple>

#include "generators.h"
#include "law.h"

namespace weir::laws {
namespace {

/// Rules over a few entries, many of which meet in one request. Names tell their numbers.
std::vector<Rule> draw_rules() {
  std::vector<Rule> rules;
  const int count = *one_of<int>({6, 3, 2, 12, 20});
  const GroupOrder order = *one_of<GroupOrder>({GroupOrder::listed, GroupOrder::exact});
  for (int i = 0; i < count; ++i) {
    Rule rule;
    rule.domain = *chance(85) ? "api" : "web";
    rule.name = "r" + std::to_string(i);
    rule.limit = *between<std::uint64_t>(0, 3);
    for (int n = *between(0, 3); n > 0; --n) {
      const std::string key = *one_of<std::string>({"plan", "path", "user"});
      rule.match.push_back(*one_of<Match>({{key, MatchExact{"/a/b"}},
                                           {key, MatchPrefix{"/a"}},
                                           {key, MatchPrefix{"/a/"}},
                                           {key, MatchSuffix{"b"}},
                                           {key, MatchIn{{"/a/b", "x"}}},
                                           {key, MatchAny{}},
                                           {key, MatchExact{"x"}, true}}));
    }
    if (*chance(60)) {
      rule.group = *one_of<std::string>({"g", "g", "h"});
      rule.group_order = rule.group == "g" ? order : GroupOrder::listed;
    }
    // Only earlier ones, so that there is no circle.
    for (int n = *chance(40) ? *between(1, 3) : 0; n > 0 && i > 0; --n) {
      const Rule& other = rules[*between<std::size_t>(0, rules.size() - 1)];
      if (other.domain == rule.domain) rule.replaces.push_back(other.name);
    }
    rule.unlimited = *chance(20) && !(rule.group.empty() && rule.replaces.empty());
    rule.shadow = *chance(20) && !rule.unlimited;
    if (!rule.unlimited) rule.key = {"user"};
    rules.push_back(std::move(rule));
  }
  return rules;
}

/// As docs/rules.md says it.
auto exactness(const Rule& rule) {
  int values = 0;
  int patterns = 0;
  std::size_t length = 0;
  int others = 0;
  for (const Match& match : rule.match) {
    const auto* prefix = std::get_if<MatchPrefix>(&match.matcher);
    const auto* suffix = std::get_if<MatchSuffix>(&match.matcher);
    const bool value = std::holds_alternative<MatchExact>(match.matcher) ||
                       std::holds_alternative<MatchIn>(match.matcher);
    if (match.negated || std::holds_alternative<MatchAny>(match.matcher)) {
      ++others;
    } else if (value) {
      ++values;
    } else {
      ++patterns;
      length += prefix != nullptr ? prefix->prefix.size() : suffix->suffix.size();
    }
  }
  return std::tuple(values, patterns, length, others);
}

/// The plain model: each rule on its own, asked of all others.
struct Model {
  const std::vector<Rule>& rules;
  const Request& request;

  bool matches(std::size_t i) const {
    return rules[i].domain == request.domain && rules[i].matches(request);
  }
  bool precedes(std::size_t a, std::size_t b) const {
    const bool exact = rules[a].group_order == GroupOrder::exact;
    if (exact && exactness(rules[a]) != exactness(rules[b])) {
      return exactness(rules[a]) > exactness(rules[b]);
    }
    return a < b;
  }
  bool chosen(std::size_t i) const {
    if (!matches(i)) return false;
    for (std::size_t other = 0; other < rules.size(); ++other) {
      const bool mate = other != i && !rules[i].group.empty() &&
                        rules[other].group == rules[i].group && matches(other);
      if (mate && precedes(other, i) && (rules[i].shadow || !rules[other].shadow)) return false;
    }
    return true;
  }
  bool applies(std::size_t i) const {
    if (!chosen(i)) return false;
    for (std::size_t other = 0; other < rules.size(); ++other) {
      const auto& names = rules[other].replaces;
      const bool replaces = std::find(names.begin(), names.end(), rules[i].name) != names.end();
      if (replaces && !rules[other].shadow && chosen(other)) return false;
    }
    return true;
  }
};

/// Which cases a rule that matches is one of.
void note(const std::vector<Rule>& rules, const Model& model, std::uint32_t i) {
  if (!model.matches(i)) return;
  const bool applies = model.applies(i);
  reached("another of its group stands before it", !model.chosen(i));
  reached("replaced", model.chosen(i) && !applies);
  reached("replaced by one that is replaced",
          model.chosen(i) && !applies && !rules[i].replaces.empty());
  reached("exempt", applies && rules[i].unlimited);
  for (std::uint32_t other = 0; other < rules.size(); ++other) {
    if (rules[i].group.empty() || rules[i].group != rules[other].group || other == i) continue;
    if (!model.matches(other)) continue;
    reached("the more exact one stands behind", applies && other < i && !rules[other].shadow);
    reached("a shadow rule beside the first in force",
            applies && rules[i].shadow && model.applies(other) && !rules[other].shadow);
    reached("a shadow rule behind the first",
            rules[i].shadow && !applies && model.precedes(other, i));
  }
}

/// Those that apply decide, and they alone count.
void check_counts(const std::vector<Rule>& rules, Limiter& limiter, const Request& request,
                  const std::vector<std::uint32_t>& expected) {
  const auto applies = [&](std::uint32_t i) {
    return std::find(expected.begin(), expected.end(), i) != expected.end();
  };
  std::vector<std::uint64_t> before;
  bool allowed = true;
  bool others_allow = true;
  for (std::uint32_t i = 0; i < rules.size(); ++i) {
    before.push_back(limiter.used(i, request, kStart));
    if (rules[i].unlimited || rules[i].domain != request.domain || rules[i].shadow) continue;
    const bool full = before[i] >= rules[i].limit && rules[i].matches(request);
    (applies(i) ? allowed : others_allow) &= !full;
  }
  std::vector<std::uint32_t> limits;
  for (const std::uint32_t rule : expected) {
    if (!rules[rule].unlimited) limits.push_back(rule);
  }
  const Decision decision = limiter.check(request, kStart);
  RC_ASSERT(decision.allowed == allowed);
  RC_ASSERT(decision.statuses.size() == limits.size());
  for (std::size_t k = 0; k < limits.size(); ++k) {
    RC_ASSERT(decision.statuses[k].rule == limits[k]);
  }
  for (std::uint32_t i = 0; i < rules.size(); ++i) {
    const bool limited = std::find(limits.begin(), limits.end(), i) != limits.end();
    const bool counts = allowed && before[i] < rules[i].limit && limited;
    RC_ASSERT(limiter.used(i, request, kStart) == before[i] + (counts ? 1 : 0));
  }
  reached("denied by what applies", !allowed);
  reached("passed as what would deny does not apply", allowed && !others_allow);
}

LAW(60, "of a group the first rule that matches applies, and none that another one replaces",
    "another of its group stands before it", "the more exact one stands behind",
    "a shadow rule beside the first in force", "a shadow rule behind the first", "replaced",
    "replaced by one that is replaced", "exempt", "denied by what applies",
    "passed as what would deny does not apply", "asked for some rules alone") {
  const std::vector<Rule> rules = draw_rules();
  const std::shared_ptr<const RuleSet> set = rule_set(rules);
  Limiter limiter(set, {});
  for (int step = *between(1, 8); step > 0; --step) {
    std::vector<std::pair<std::string, std::string>> texts;
    for (const char* key : {"plan", "path", "user"}) {
      if (*chance(85)) texts.emplace_back(key, *one_of<std::string>({"/a/b", "/a/c", "x"}));
    }
    std::vector<Entry> entries;
    for (const auto& [key, value] : texts) entries.push_back({key, value});
    Request request{"api", entries, 1};
    const Model model{set->rules(), request};
    std::vector<std::uint32_t> expected;
    for (std::uint32_t i = 0; i < rules.size(); ++i) {
      if (model.applies(i)) expected.push_back(i);
      note(rules, model, i);
    }
    std::vector<std::uint32_t> found{7};
    set->match(request, found);
    found.erase(found.begin());
    RC_ASSERT(found == expected);
    check_counts(rules, limiter, request, expected);

    // A request that is decided in several places is decided by the same rules.
    const std::string_view some[] = {rules[0].name, rules.back().name};
    request.rule_filter = some;
    std::vector<std::uint32_t> filtered;
    set->match(request, filtered);
    std::erase_if(expected, [&](std::uint32_t i) {
      return rules[i].name != some[0] && rules[i].name != some[1];
    });
    RC_ASSERT(filtered == expected);
    reached("asked for some rules alone", !filtered.empty());
  }
}

}  // namespace
}  // namespace weir::laws
