#include <weir/limits/rules/rule_warnings.h>

#include <fmt/format.h>

#include <string>
#include <utility>

#include <weir/limits/text/utf8.h>

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

bool is_digits(std::string_view text) {
  return !text.empty() && text.find_first_not_of("0123456789") == std::string_view::npos;
}

/// Of a descriptor entry's name that no request is likely to have: why.
std::string odd_name(std::string_view name) {
  const std::size_t slash = name.rfind('/');
  if (slash != std::string_view::npos && is_digits(name.substr(slash + 1))) {
    return fmt::format(
        "an entry is called {}, so this counts no networks: write {{ {}: {{ v4: 32, "
        "v6: 64 }} }}",
        quoted_text(name), name.substr(0, slash));
  }
  if (name.find('*') == std::string_view::npos) return {};
  return fmt::format(
      "an entry is called {}; no name stands for several: a rule without key counts "
      "all requests together",
      quoted_text(name));
}

/// Of a matcher that most likely holds of no request: why.
std::string odd_matcher(const Match& match) {
  const auto* exact = std::get_if<MatchExact>(&match.matcher);
  const auto* glob = std::get_if<MatchGlob>(&match.matcher);
  if (glob != nullptr && glob->pattern.find_first_of("*?") == std::string::npos) {
    return "a pattern without * and ? is a value: write it without glob";
  }
  if (exact == nullptr) return {};
  if (exact->value.find('*') != std::string::npos) {
    return fmt::format("this is exactly the text {}: a pattern is written {{ glob: {} }}",
                       quoted_text(exact->value), exact->value);
  }
  if (exact->value.find('/') != std::string::npos && parse_cidr(exact->value)) {
    return fmt::format("this is exactly the text {}: a network is written {{ cidr: {} }}",
                       quoted_text(exact->value), exact->value);
  }
  return {};
}

class Warnings {
 public:
  Warnings(const RuleOrigin& origin, std::vector<RuleWarning>& out) : origin_(origin), out_(out) {}

  void add(std::size_t rule, std::string_view path, std::string text) {
    if (text.empty() || out_.size() >= kMaxErrors) return;
    RuleError at = origin_.error(rule, path);
    out_.push_back({at.file, at.line, at.column, at.field, std::move(text)});
  }

 private:
  const RuleOrigin& origin_;
  std::vector<RuleWarning>& out_;
};

}  // namespace

std::vector<RuleWarning> rule_warnings(const std::vector<Rule>& rules, const RuleOrigin& origin) {
  std::vector<RuleWarning> out;
  Warnings warnings(origin, out);
  for (std::size_t i = 0; i < rules.size() && out.size() < kMaxErrors; ++i) {
    const Rule& rule = rules[i];
    for (const Match& match : rule.match) {
      const std::string path = field_path("match", match.key);
      warnings.add(i, path, odd_name(match.key));
      warnings.add(i, path, odd_matcher(match));
    }
    for (std::size_t k = 0; k < rule.key.size(); ++k) {
      warnings.add(i, fmt::format("key[{}]", k), odd_name(rule.key[k]));
    }
    warnings.add(i, rule.strict ? "strict" : "limit", held_back(rule));
    warnings.add(i, "count_denied", counts_in_vain(rule));
    warnings.add(i, "candidate", tries_nothing(rule));
  }
  return out;
}

}  // namespace weir::internal
