#include <weir/limits/rules/rule_choice.h>

#include <algorithm>
#include <map>
#include <string_view>
#include <tuple>
#include <utility>

namespace weir {
namespace {

using Name = std::pair<std::string_view, std::string_view>;  // domain, and what is named in it

struct AddTo {
  Exactness& out;

  void operator()(const MatchExact&) const { ++out.values; }
  void operator()(const MatchIn&) const { ++out.values; }
  void operator()(const MatchPrefix& m) const { pattern(m.prefix.size()); }
  void operator()(const MatchSuffix& m) const { pattern(m.suffix.size()); }
  void operator()(const MatchGlob& m) const {
    pattern(static_cast<std::size_t>(std::count_if(m.pattern.begin(), m.pattern.end(), [](char c) {
      return c != '*' && c != '?' && c != '\\';
    })));
  }
  void operator()(const MatchPath& m) const {
    if (m.below) {
      pattern(m.path.size());
    } else {
      ++out.values;
    }
  }
  void operator()(const MatchCidr& m) const { pattern(m.bits); }
  void operator()(const MatchCidrs& m) const {
    unsigned least = 128;
    for (const MatchCidr& network : m.networks) least = std::min(least, network.bits);
    pattern(least);
  }
  void operator()(const MatchNumber&) const { ++out.others; }
  void operator()(const MatchAny&) const { ++out.others; }
  void operator()(const MatchAbsent&) const { ++out.others; }

  void pattern(std::size_t length) const {
    ++out.patterns;
    out.length += length;
  }
};

/// Of a rule that does not apply, while the others are looked at. Rules are far fewer.
constexpr std::uint32_t kOut = 1u << 31;

}  // namespace

Exactness exactness_of(const Rule& rule) {
  Exactness out;
  for (const Match& match : rule.match) {
    if (match.negated) {
      ++out.others;
    } else {
      std::visit(AddTo{out}, match.matcher);
    }
  }
  return out;
}

RuleChoice::RuleChoice(const std::vector<Rule>& rules) {
  const bool any = std::any_of(rules.begin(), rules.end(), [](const Rule& rule) {
    return !rule.group.empty() || !rule.replaces.empty();
  });
  if (!any) return;
  placed_.resize(rules.size());
  std::map<Name, std::uint32_t> by_name;
  std::map<Name, std::vector<std::uint32_t>> groups;
  for (std::uint32_t i = 0; i < rules.size(); ++i) {
    const Rule& rule = rules[i];
    placed_[i].shadow = rule.shadow;
    by_name.try_emplace({rule.domain, rule.name}, i);
    if (!rule.group.empty()) groups[{rule.domain, rule.group}].push_back(i);
  }
  std::uint32_t number = 0;
  for (auto& [name, members] : groups) {
    ++number;
    if (rules[members[0]].group_order == GroupOrder::exact) {
      std::stable_sort(members.begin(), members.end(), [&](std::uint32_t a, std::uint32_t b) {
        return exactness_of(rules[a]) > exactness_of(rules[b]);
      });
    }
    for (std::uint32_t place = 0; place < members.size(); ++place) {
      placed_[members[place]].group = number;
      placed_[members[place]].place = place;
    }
  }
  for (std::uint32_t i = 0; i < rules.size(); ++i) {
    placed_[i].replaces = static_cast<std::uint32_t>(replaced_.size());
    for (const std::string& name : rules[i].replaces) {
      const auto found = by_name.find({rules[i].domain, name});
      if (found != by_name.end()) replaced_.push_back(found->second);
    }
    placed_[i].replaces_end = static_cast<std::uint32_t>(replaced_.size());
  }
}

void RuleChoice::apply(std::vector<std::uint32_t>& matched, std::size_t first) const {
  const auto begin = matched.begin() + static_cast<std::ptrdiff_t>(first);
  const auto take_out = [&](std::uint32_t rule) {
    const auto at = std::lower_bound(
        begin, matched.end(), rule,
        [](std::uint32_t one, std::uint32_t wanted) { return (one & ~kOut) < wanted; });
    if (at != matched.end() && (*at & ~kOut) == rule) *at |= kOut;
  };

  // Of each group the first stays; and if that is a shadow rule, the first of those in force, too.
  thread_local std::vector<std::tuple<std::uint32_t, std::uint32_t, std::uint32_t>> grouped;
  grouped.clear();
  for (auto at = begin; at != matched.end(); ++at) {
    const Placed& placed = placed_[*at];
    if (placed.group != 0) grouped.emplace_back(placed.group, placed.place, *at);
  }
  std::sort(grouped.begin(), grouped.end());
  std::uint32_t group = 0;
  bool taken = false;  // by one in force
  for (const auto& [its, place, rule] : grouped) {
    const bool is_first = std::exchange(group, its) != its;
    if (is_first) taken = false;
    const bool shadow = placed_[rule].shadow;
    if (shadow ? !is_first : taken) take_out(rule);
    taken = taken || !shadow;
  }

  // All at once: a rule that is replaced replaces others all the same.
  thread_local std::vector<std::uint32_t> left;
  left.clear();
  for (auto at = begin; at != matched.end(); ++at) {
    if ((*at & kOut) == 0 && !placed_[*at].shadow) left.push_back(*at);
  }
  for (const std::uint32_t rule : left) {
    const Placed& placed = placed_[rule];
    for (std::uint32_t i = placed.replaces; i < placed.replaces_end; ++i) take_out(replaced_[i]);
  }
  matched.erase(
      std::remove_if(begin, matched.end(), [](std::uint32_t rule) { return (rule & kOut) != 0; }),
      matched.end());
}

}  // namespace weir
