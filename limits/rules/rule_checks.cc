#include <weir/limits/rules/rule_checks.h>

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <utility>

#include <weir/limits/bounds.h>
#include <weir/limits/matching/address.h>
#include <weir/limits/rules/rule_origin.h>
#include <weir/limits/text/utf8.h>

namespace weir::internal {
namespace {

bool is_network(const MatchCidr& cidr) {
  Address masked = cidr.network;
  mask_address(masked, std::min(cidr.bits, 128u));
  return cidr.bits <= 128 && masked == cidr.network;
}

struct CheckMatcher {
  std::string_view path;
  const Fail& fail;

  void operator()(const MatchExact& m) const { text(m.value); }
  void operator()(const MatchPrefix& m) const { part(m.prefix, "prefix"); }
  void operator()(const MatchSuffix& m) const { part(m.suffix, "suffix"); }
  void operator()(const MatchAny&) const {}
  void operator()(const MatchAbsent&) const {}
  void operator()(const MatchCidr& m) const {
    if (!is_network(m)) fail(path, "a network of at most 128 bits with none set behind them");
  }
  void operator()(const MatchIn& m) const {
    size(m.values.size(), "values");
    for (const std::string& value : m.values) text(value);
  }
  void operator()(const MatchCidrs& m) const {
    size(m.networks.size(), "networks");
    for (const MatchCidr& network : m.networks) (*this)(network);
  }
  void operator()(const MatchGlob& m) const {
    if (m.pattern.empty()) fail(path, "a pattern of at least one byte");
    if (m.pattern.size() > kMaxPattern) {
      fail(path,
           fmt::format("a pattern of at most {} bytes, got {}", kMaxPattern, m.pattern.size()));
    }
  }
  void operator()(const MatchPath& m) const {
    text(m.path);
    if (!m.path.starts_with('/')) {
      fail(path, fmt::format("a path that begins with a slash, got {}", quoted_text(m.path)));
    } else if (m.path.find_first_of("?#") != std::string::npos) {
      fail(path, fmt::format("a path without ? and #, got {}", quoted_text(m.path)));
    }
  }
  void operator()(const MatchNumber& m) const {
    if (m.low > m.high) fail(path, "bounds that some number is within");
  }

  void part(const std::string& it, std::string_view what) const {
    if (it.empty()) {
      fail(path, fmt::format("a {} of at least one byte; to match every value write any", what));
    }
    text(it);
  }
  void text(const std::string& it) const {
    if (it.size() <= kMaxEntryText) return;
    fail(path, fmt::format("at most {} bytes, got {}", kMaxEntryText, it.size()));
  }
  void size(std::size_t count, std::string_view what) const {
    if (count >= 1 && count <= kMaxList) return;
    fail(path, fmt::format("1 to {} {}, got {}", kMaxList, what, count));
  }
};

using Name = std::pair<std::string_view, std::string_view>;
using FailAt = std::function<void(std::size_t rule, std::string_view path, std::string expected)>;

void check_groups(const std::vector<Rule>& rules, const FailAt& fail) {
  std::map<Name, GroupOrder> orders;
  for (std::size_t i = 0; i < rules.size(); ++i) {
    const Rule& rule = rules[i];
    if (rule.group.empty()) continue;
    std::string problem = name_problem(rule.group);
    if (!problem.empty()) fail(i, "group", std::move(problem));
    const auto [first, fresh] = orders.try_emplace({rule.domain, rule.group}, rule.group_order);
    if (fresh || first->second == rule.group_order) continue;
    fail(i, "group",
         fmt::format("the order of the group's first rule, which is {}, got {}",
                     to_string(first->second), to_string(rule.group_order)));
  }
}

/// Rules that replace each other in a circle would leave a request without any of them.
class Circles {
 public:
  Circles(const std::vector<std::vector<std::size_t>>& replaces, const FailAt& fail)
      : replaces_(replaces), fail_(fail), seen_(replaces.size(), Seen::not_yet) {}

  void find() {
    for (std::size_t i = 0; i < replaces_.size(); ++i) {
      if (seen_[i] == Seen::not_yet) walk(i);
    }
  }

 private:
  enum class Seen : std::uint8_t { not_yet, on_the_way, done };
  struct Step {
    std::size_t rule = 0;
    std::size_t next = 0;  // of what it replaces
  };

  void walk(std::size_t from) {
    std::vector<Step> way{{from, 0}};
    seen_[from] = Seen::on_the_way;
    while (!way.empty()) {
      Step& step = way.back();
      if (step.next == replaces_[step.rule].size()) {
        seen_[step.rule] = Seen::done;
        way.pop_back();
        continue;
      }
      const std::size_t rule = step.rule;
      const std::size_t next = replaces_[rule][step.next++];
      if (seen_[next] == Seen::on_the_way) {
        fail_(rule, "replaces", "no circle: the rules that it replaces replace it as well");
      } else if (seen_[next] == Seen::not_yet) {
        seen_[next] = Seen::on_the_way;
        way.push_back({next, 0});
      }
    }
  }

  const std::vector<std::vector<std::size_t>>& replaces_;
  const FailAt& fail_;
  std::vector<Seen> seen_;
};

void check_replaces(const std::vector<Rule>& rules, const FailAt& fail) {
  const bool any = std::any_of(rules.begin(), rules.end(),
                               [](const Rule& rule) { return !rule.replaces.empty(); });
  if (!any) return;
  std::map<Name, std::size_t> by_name;
  for (std::size_t i = 0; i < rules.size(); ++i) {
    by_name.try_emplace({rules[i].domain, rules[i].name}, i);
  }
  std::vector<std::vector<std::size_t>> replaces(rules.size());
  for (std::size_t i = 0; i < rules.size(); ++i) {
    const Rule& rule = rules[i];
    if (rule.replaces.size() > kMaxReplaces) {
      fail(i, "replaces",
           fmt::format("at most {} names, got {}", kMaxReplaces, rule.replaces.size()));
      continue;
    }
    for (std::size_t k = 0; k < rule.replaces.size(); ++k) {
      const auto found = by_name.find({rule.domain, rule.replaces[k]});
      const std::string path = fmt::format("replaces[{}]", k);
      if (found == by_name.end()) {
        fail(i, path,
             fmt::format("the name of a rule of this domain, got {}",
                         quoted_text(rule.replaces[k])));
      } else if (found->second == i) {
        fail(i, path, "another rule's name, got its own");
      } else {
        replaces[i].push_back(found->second);
      }
    }
  }
  Circles(replaces, fail).find();
}

}  // namespace

void check_matcher(const Match& match, std::string_view path, const Fail& fail) {
  std::visit(CheckMatcher{path, fail}, match.matcher);
}

void check_key_forms(const Rule& rule, const Fail& fail) {
  if (rule.key_forms.size() > rule.key.size()) fail("key", "no more forms than entries");
  for (std::size_t i = 0; i < std::min(rule.key.size(), rule.key_forms.size()); ++i) {
    const KeyForm& form = rule.key_forms[i];
    const std::string path = fmt::format("key[{}]", i);
    if (form.v4 > 32 || form.v6 > 128) fail(path, "v4 of at most 32 and v6 of at most 128");
    if (form.kind == KeyForm::Kind::path && (form.segments < 1 || form.segments > kMaxSegments)) {
      fail(path, fmt::format("1 to {} segments, got {}", kMaxSegments, form.segments));
    }
  }
}

void check_told(const Rule& rule, const Fail& fail) {
  if (rule.deny_status != 429 && rule.deny_status != 503 && rule.deny_status != 403) {
    fail("deny", fmt::format("a status of 429, 503 or 403, got {}", rule.deny_status));
  }
  if (rule.deny_message.size() > kMaxDenyMessage || !is_clean_text(rule.deny_message)) {
    fail("deny",
         fmt::format("a message of at most {} bytes of UTF-8 text without control characters",
                     kMaxDenyMessage));
  }
  if (rule.labels.size() > kMaxLabels) {
    fail("labels", fmt::format("at most {} labels, got {}", kMaxLabels, rule.labels.size()));
    return;
  }
  for (const auto& [name, value] : rule.labels) {
    const std::string path = field_path("labels", name);
    constexpr std::string_view kLetters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_";
    const bool good = !name.empty() && name.size() <= kMaxName && !name.starts_with("__") &&
                      kLetters.find(name[0]) != std::string_view::npos &&
                      std::all_of(name.begin(), name.end(), [&](char c) {
                        return (c >= '0' && c <= '9') || kLetters.find(c) != std::string_view::npos;
                      });
    if (!good || name == "domain" || name == "rule") {
      fail(path,
           "a label's name of letters, digits and _, other than domain and rule, such as team");
    }
    std::string problem = name_problem(value);
    if (!problem.empty()) fail(path, std::move(problem));
  }
}

void check_places(const std::vector<Rule>& rules, const FailAt& fail) {
  check_groups(rules, fail);
  check_replaces(rules, fail);
}

}  // namespace weir::internal
