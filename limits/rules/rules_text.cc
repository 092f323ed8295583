#include <weir/limits/rules/rules_text.h>

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <string_view>
#include <vector>

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

template <typename List, typename Text>
std::string joined(const List& list, Text text) {
  std::string out;
  for (const auto& each : list) out += (out.empty() ? "" : ", ") + text(each);
  return out;
}

/// A list of what `text` makes of each.
template <typename List, typename Text>
std::string list_text(const List& list, Text text) {
  return "[" + joined(list, text) + "]";
}

/// As a form stands in a map; without a name where it is a word of its own.
struct FormText {
  std::string operator()(const MatchExact& m) const { return "exact: " + quoted(m.value); }
  std::string operator()(const MatchIn& m) const { return "in: " + list_text(m.values, quoted); }
  std::string operator()(const MatchPrefix& m) const { return "prefix: " + quoted(m.prefix); }
  std::string operator()(const MatchSuffix& m) const { return "suffix: " + quoted(m.suffix); }
  std::string operator()(const MatchGlob& m) const { return "glob: " + quoted(m.pattern); }
  std::string operator()(const MatchAny&) const { return "any"; }
  std::string operator()(const MatchAbsent&) const { return "absent"; }
  std::string operator()(const MatchCidr& m) const { return "cidr: " + quoted(cidr_text(m)); }
  std::string operator()(const MatchCidrs& m) const {
    return "cidr: " +
           list_text(m.networks, [](const MatchCidr& each) { return quoted(cidr_text(each)); });
  }
  std::string operator()(const MatchPath& m) const {
    return fmt::format("{}: {}{}", m.below ? "under" : "path", quoted(m.path),
                       m.ignore_case ? ", ignore_case: true" : "");
  }
  std::string operator()(const MatchNumber& m) const {
    const bool bounded = m.high < std::numeric_limits<std::uint64_t>::max();
    return fmt::format("at_least: {}{}", m.low,
                       bounded ? fmt::format(", at_most: {}", m.high) : std::string());
  }
};

bool is_word(const Match& match) {
  return std::holds_alternative<MatchAny>(match.matcher) ||
         std::holds_alternative<MatchAbsent>(match.matcher);
}

std::string one_text(const Match& match) {
  if (const auto* exact = std::get_if<MatchExact>(&match.matcher)) return quoted(exact->value);
  const std::string form = std::visit(FormText{}, match.matcher);
  return is_word(match) ? form : "{" + form + "}";
}

/// All that a rule asks of one entry, the first of which stands at `first`.
std::string entry_text(const std::vector<Match>& all, std::size_t first) {
  std::vector<const Match*> held;
  std::vector<const Match*> not_held;
  for (std::size_t i = first; i < all.size(); ++i) {
    if (all[i].key == all[first].key) (all[i].negated ? not_held : held).push_back(&all[i]);
  }
  if (held.size() == 1 && not_held.empty()) return one_text(*held[0]);
  std::string out;
  for (const Match* match : held) {
    // "any" is what every other form says as well.
    if (is_word(*match)) not_held.push_back(match);
    if (!is_word(*match)) out += (out.empty() ? "" : ", ") + std::visit(FormText{}, match->matcher);
  }
  if (not_held.empty()) return "{" + out + "}";
  const std::string none = list_text(not_held, [](const Match* match) {
    if (match->negated) return one_text(*match);
    return std::string(std::holds_alternative<MatchAny>(match->matcher) ? "absent" : "any");
  });
  return fmt::format("{{{}{}not: {}}}", out, out.empty() ? "" : ", ", none);
}

std::string match_text(const std::vector<Match>& all) {
  std::string out;
  for (std::size_t i = 0; i < all.size(); ++i) {
    const bool written = std::any_of(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(i),
                                     [&](const Match& match) { return match.key == all[i].key; });
    if (written) continue;
    out += fmt::format("{}{}: {}", out.empty() ? "" : ", ", quoted(all[i].key), entry_text(all, i));
  }
  return "{" + out + "}";
}

std::string key_text(const Rule& rule) {
  std::string out;
  for (std::size_t i = 0; i < rule.key.size(); ++i) {
    const KeyForm form = rule.key_form(i);
    const std::string name = quoted(rule.key[i]);
    out += out.empty() ? "" : ", ";
    switch (form.kind) {
      case KeyForm::Kind::plain:
        out += name;
        break;
      case KeyForm::Kind::lower:
        out += fmt::format("{{{}: lower}}", name);
        break;
      case KeyForm::Kind::address:
        out += fmt::format("{{{}: {{v4: {}, v6: {}}}}}", name, form.v4, form.v6);
        break;
      case KeyForm::Kind::path:
        out += fmt::format("{{{}: {{segments: {}, ignore_case: {}}}}}", name, form.segments,
                           form.ignore_case);
        break;
    }
  }
  return "[" + out + "]";
}

/// Where it stands among other rules, and what only it may say.
template <typename Field>
void place_text(const Rule& rule, Field field) {
  if (!rule.group.empty()) {
    field("group",
          fmt::format("{{name: {}, order: {}}}", quoted(rule.group), to_string(rule.group_order)));
  }
  if (!rule.replaces.empty()) field("replaces", list_text(rule.replaces, quoted));
  if (rule.unlimited) field("unlimited", "true");
  if (rule.labels.empty()) return;
  field("labels", "{" + joined(rule.labels, [](const auto& label) {
                    return fmt::format("{}: {}", quoted(label.first), quoted(label.second));
                  }) + "}");
}

/// What callers are told, where it is not what they are told of every rule.
template <typename Field>
void told_text(const Rule& rule, Field field) {
  if (rule.hide_headers) field("headers", "hide");
  if (rule.deny_status == kDenyStatus && rule.deny_message.empty()) return;
  field("deny",
        fmt::format("{{status: {}, message: {}}}", rule.deny_status, quoted(rule.deny_message)));
}

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
  if (!rule.match.empty()) field("match", match_text(rule.match));
  place_text(rule, field);
  if (rule.unlimited) return out;
  field("key", key_text(rule));
  if (rule.limit_from_request) {
    const bool bucket = is_bucket(rule.algorithm);
    field("limit", "from_request");
    field("max",
          fmt::format("{{limit: {}, window: {}{}}}", rule.limit, format_duration(rule.window),
                      bucket ? fmt::format(", burst: {}", rule.burst) : std::string()));
  } else {
    field("limit", std::to_string(rule.limit));
    field("window", window_text(rule));
  }
  field("algorithm", to_string(rule.algorithm));
  if (rule.algorithm == Algorithm::sliding_window) {
    field("slots", std::to_string(rule.slots));
    field("strict", rule.strict ? "true" : "false");
  }
  if (is_bucket(rule.algorithm)) {
    // 0 is what a limit of 0 makes of it.
    if (rule.burst > 0 && !rule.limit_from_request) field("burst", std::to_string(rule.burst));
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
  told_text(rule, field);
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
