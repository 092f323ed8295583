#include <weir/limits/rules/rules_yaml.h>

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <utility>

#include <weir/limits/rules/match_yaml.h>
#include <weir/limits/rules/rule_origin.h>
#include <weir/limits/rules/rule_warnings.h>
#include <weir/limits/series/keyed_hash.h>
#include <weir/limits/text/number.h>
#include <weir/limits/text/utf8.h>
#include <weir/limits/yaml/read_file.h>
#include <weir/limits/yaml/reader.h>
#include <weir/limits/yaml/tree.h>

namespace weir {
namespace {

using internal::quoted_text;
using State = RuleOrigin::State;
using yaml::Node;
using yaml::Position;
using yaml::Value;

constexpr std::uint64_t kAny = std::numeric_limits<std::uint64_t>::max();

constexpr yaml::Reader::Choice<CalendarUnit> kCalendarUnits[] = {{"day", CalendarUnit::day},
                                                                 {"week", CalendarUnit::week},
                                                                 {"month", CalendarUnit::month},
                                                                 {"year", CalendarUnit::year}};

/// What stands behind "expected" in RuleError::to_string().
class RulesWording final : public yaml::Wording {
 public:
  std::string expected(std::string_view what) const override { return std::string(what); }
  std::string expected(std::string_view what, const Node& got) const override {
    return fmt::format("{}, got {}", what, shown(got));
  }
  std::string a_map(yaml::Words) const override { return "a map"; }
  std::string_view a_key() const override { return "text as the key"; }
  std::string an_integer(bool none, std::uint64_t, std::uint64_t high) const override {
    return none ? "a whole number in decimal digits" : fmt::format("a number of at most {}", high);
  }
  std::string not_one_of(yaml::Words words, const Node& got) const override {
    const bool word = got.kind == Node::Kind::scalar && !got.tagged;
    return expected(yaml::listed(words), got) + (word ? yaml::did_you_mean(got.text, words) : "");
  }
  std::string unknown_field(std::string_view name, yaml::Words known) const override {
    if (name == "<<") return "no merge key: write the fields out (aliases of single values work)";
    const std::string hint = yaml::did_you_mean(name, known);
    return "a known field" + (hint.empty() ? fmt::format(" ({})", yaml::listed(known)) : hint);
  }
  std::string repeated(std::string_view, Position first) const override {
    return fmt::format("each key once; it is already on line {}", first.line);
  }
  std::string missing(std::string_view what) const override {
    return fmt::format("{}, got nothing", what);
  }

 private:
  static std::string shown(const Node& node) {
    if (node.tagged) return "one with a YAML tag";
    switch (node.kind) {
      case Node::Kind::null:
        return "nothing";
      case Node::Kind::list:
        return "a list";
      case Node::Kind::map:
        return "a map";
      case Node::Kind::scalar:
        break;
    }
    return node.plain ? quoted_text(node.text) : "the text " + quoted_text(node.text);
  }
};

/// One rule's place in the tree.
struct Site {
  Value rule;
  Position domain_at;
  bool domain_ok = true;
  std::vector<std::string_view> unreadable = {};
};

class RulesReader final : public RuleOrigin {
 public:
  RulesReader(const yaml::Tree& tree, std::string_view file)
      : tree_(tree), file_(file), read_(tree, wording_, problems_, internal::kMaxErrors) {}

  void read_document(const Value& root) {
    if (read_.node(root).kind == Node::Kind::null) {
      read_.fail(root, "a map with domain and rules, got an empty document");
      return;
    }
    const auto keep = [](Value& out) {
      return [&out](const Value& value) {
        out = value;
        return true;
      };
    };
    Value name;
    Value list;
    if (!read_.mapping(root, {{"domain", keep(name)}, {"rules", keep(list)}}).is_map) return;
    Site site;
    std::string domain;
    site.domain_at = read_.at(name.node == yaml::kNoNode ? root : name);
    site.domain_ok = read_domain(root, name, domain);
    read_rules(root, list, site, domain);
  }

  std::vector<Rule> take_rules() { return std::move(rules_); }
  void take_errors(std::vector<RuleError>& out) {
    for (yaml::Problem& problem : problems_) {
      out.push_back({file_, problem.at.line, problem.at.column, std::move(problem.path),
                     std::move(problem.text)});
    }
    problems_.clear();
  }

  // RuleOrigin

  State state(std::size_t rule, std::string_view field) const override {
    const Site& site = sites_[rule];
    if (field == "domain") return site.domain_ok ? State::set : State::unreadable;
    if (std::find(site.unreadable.begin(), site.unreadable.end(), field) != site.unreadable.end()) {
      return State::unreadable;
    }
    return tree_.child(site.rule.node, field) != yaml::kNoNode ? State::set : State::unset;
  }

  RuleError error(std::size_t rule, std::string_view path) const override {
    const Site& site = sites_[rule];
    RuleError error;
    error.file = file_;
    Position at = read_.at(site.rule);
    if (path == "domain") {
      error.field = path;
      at = site.domain_at;
    } else {
      error.field = fmt::format("{}.{}", site.rule.path, path);
      const std::size_t end = std::min(path.find_first_of(".["), path.size());
      const std::uint32_t field = tree_.child(site.rule.node, path.substr(0, end));
      if (field != yaml::kNoNode) at = tree_.nodes[inner(field, path.substr(end))].at;
    }
    error.line = at.line;
    error.column = at.column;
    return error;
  }

  std::string place(std::size_t rule) const override {
    return fmt::format("line {}", read_.at(sites_[rule].rule).line);
  }

 private:
  /// The node at "" or ".key" or "[3]" below a field, or the field if there is none.
  std::uint32_t inner(std::uint32_t field, std::string_view path) const {
    std::uint32_t found = yaml::kNoNode;
    if (path.starts_with('.')) {
      found = tree_.child(field, path.substr(1));
    } else if (path.starts_with('[')) {
      std::size_t i = 0;
      for (const char c : path.substr(1, path.size() - 2)) {
        i = i * 10 + static_cast<std::size_t>(c - '0');
      }
      found = tree_.child(field, i);
    }
    return found == yaml::kNoNode ? field : found;
  }

  bool read_domain(const Value& document, const Value& name, std::string& out) {
    if (name.node == yaml::kNoNode) {
      read_.fail(read_.at(document), "domain",
                 "the name that requests give as their domain, got nothing");
      return false;
    }
    if (!read_.text(name, "a name", out)) return false;
    std::string problem = internal::name_problem(out);
    return problem.empty() || read_.fail(name, std::move(problem));
  }

  void read_rules(const Value& document, const Value& list, const Site& site,
                  const std::string& domain) {
    constexpr std::string_view kWhat = "a list of rules (rules: [] if there are none)";
    if (list.node == yaml::kNoNode) {
      read_.fail(read_.at(document), "rules", fmt::format("{}, got nothing", kWhat));
      return;
    }
    std::vector<Value> items;
    if (!read_.items(list, kWhat, items)) return;
    for (const Value& item : items) {
      if (read_.full()) return;
      if (rules_.size() >= internal::kMaxRules) {
        read_.fail(read_.at(item), "rules", fmt::format("at most {} rules", internal::kMaxRules));
        return;
      }
      read_rule(item, site, domain);
    }
  }

  void read_rule(const Value& value, Site site, const std::string& domain) {
    Rule rule;
    rule.domain = domain;
    // These say which others must be there.
    const bool unlimited = says(value, "unlimited", "true");
    const bool from_request = !unlimited && says(value, "limit", "from_request");
    auto fields = read_.mapping(
        value,
        {{"name", [&](const Value& v) { return read_.text(v, "a name", rule.name); },
          "a name that is unique in its domain"},
         {"match", [&](const Value& v) { return internal::read_match(read_, v, rule.match); }},
         {"key",
          [&](const Value& v) { return internal::read_key(read_, v, rule.key, rule.key_forms); }},
         {"group", [&](const Value& v) { return read_group(v, rule); }},
         {"replaces", [&](const Value& v) { return read_replaces(v, rule.replaces); }},
         {"unlimited", [&](const Value& v) { return read_bool(v, rule.unlimited); }},
         {"limit", [&](const Value& v) { return read_limit(v, rule); },
          unlimited ? "" : "the units that may pass in a window"},
         {"max", [&](const Value& v) { return read_max(v, rule); },
          from_request ? "what a request may bring at most, such as { limit: 1000, window: 1d }"
                       : ""},
         {"window", [&](const Value& v) { return read_window(v, rule); },
          unlimited || from_request ? "" : "a length of time such as 1m"},
         {"algorithm", [&](const Value& v) { return read_algorithm(v, rule.algorithm); }},
         {"slots", [&](const Value& v) { return read_small(v, rule.slots); }},
         {"strict", [&](const Value& v) { return read_bool(v, rule.strict); }},
         {"burst", [&](const Value& v) { return read_.integer(v, 0, kAny, rule.burst); }},
         {"max_debt", [&](const Value& v) { return read_small(v, rule.max_debt); }},
         {"cost", [&](const Value& v) { return read_cost(v, rule); }},
         {"phase", [&](const Value& v) { return read_phase(v, rule.phase); }},
         {"enforcement", [&](const Value& v) { return read_enforcement(v, rule.enforcement); }},
         {"durability", [&](const Value& v) { return read_durability(v, rule.durability); }},
         {"series",
          [&](const Value& v) { return read_.integer(v, 1, 1'000'000'000, rule.series); }},
         {"late", [&](const Value& v) { return read_late(v, rule.late); }},
         {"count_denied", [&](const Value& v) { return read_bool(v, rule.count_denied); }},
         {"candidate", [&](const Value& v) { return read_candidate(v, rule.candidate.emplace()); }},
         {"on_failure", [&](const Value& v) { return read_on_failure(v, rule.on_failure); }},
         {"shadow", [&](const Value& v) { return read_bool(v, rule.shadow); }},
         {"headers",
          [&](const Value& v) {
            return read_.choice<bool>(v, {{"show", false}, {"hide", true}}, rule.hide_headers);
          }},
         {"deny", [&](const Value& v) { return read_deny(v, rule); }},
         {"labels", [&](const Value& v) { return read_labels(v, rule.labels); }}});
    if (!fields.is_map) return;
    if (!unlimited && refuse_mixed(value, rule)) return;
    site.rule = value;
    site.unreadable = std::move(fields.bad);
    rules_.push_back(std::move(rule));
    sites_.push_back(std::move(site));
  }

  bool says(const Value& rule, std::string_view field, std::string_view word) const {
    if (!read_.is_map(rule)) return false;
    const std::uint32_t node = tree_.child(rule.node, field);
    return node != yaml::kNoNode && tree_.nodes[node].plain && tree_.nodes[node].text == word;
  }

  bool read_bool(const Value& value, bool& out) { return internal::read_bool(read_, value, out); }

  /// Numbers stand in `max` or beside it, as `limit` says.
  bool refuse_mixed(const Value& value, const Rule& rule) {
    const auto refuse = [&](std::string_view field, std::string why) {
      const std::uint32_t node = tree_.child(value.node, field);
      if (node == yaml::kNoNode) return false;
      read_.fail(tree_.nodes[node].at, fmt::format("{}.{}", value.path, field), std::move(why));
      return true;
    };
    if (!rule.limit_from_request) return refuse("max", "limit: from_request beside max");
    bool refused = false;
    for (const std::string_view field : {"window", "burst"}) {
      refused |= refuse(field, fmt::format("{} in max with limit: from_request", field));
    }
    return refused;
  }

  bool read_small(const Value& value, std::uint32_t& out) {
    return read_.integer(value, 0, std::numeric_limits<std::uint32_t>::max(), out);
  }

  bool read_window(const Value& value, Rule& rule) {
    if (read_.node(value).kind != Node::Kind::map) return read_length(value, rule.window);
    const std::size_t problems = read_.problems();
    CalendarWindow& window = rule.calendar.emplace();
    read_.mapping(value,
                  {{"calendar", [&](const Value& v) { return read_calendar(v, window.unit); },
                    "day, week, month or year"},
                   {"time_zone", [&](const Value& v) {
                      return read_.text(v, "the name of a time zone", window.time_zone);
                    }}});
    return read_.problems() == problems;
  }

  bool read_length(const Value& value, Nanos& out) {
    constexpr std::string_view kWhat =
        "a length of time such as 500ms, 10s, 1h30m or 1d, at most 366d";
    const std::string* text = read_.scalar(value);
    for (const auto& [word, unit] : kCalendarUnits) {
      if (text == nullptr || *text != word) continue;
      return read_.fail(value, fmt::format("{}; or {{ calendar: {} }}",
                                           wording_.expected(kWhat, read_.node(value)), word));
    }
    return read_.duration(value, kWhat, 1, kMaxDuration, out);
  }

  bool read_calendar(const Value& value, CalendarUnit& out) {
    return read_.choice<CalendarUnit>(value, kCalendarUnits, out);
  }

  bool read_algorithm(const Value& value, Algorithm& out) {
    return read_.choice<Algorithm>(value,
                                   {{"fixed_window", Algorithm::fixed_window},
                                    {"sliding_window", Algorithm::sliding_window},
                                    {"sliding_log", Algorithm::sliding_log},
                                    {"token_bucket", Algorithm::token_bucket},
                                    {"leaky_bucket", Algorithm::leaky_bucket}},
                                   out);
  }

  bool read_phase(const Value& value, Phase& out) {
    return read_.choice<Phase>(
        value,
        {{"aligned", Phase::aligned}, {"spread", Phase::spread}, {"first_hit", Phase::first_hit}},
        out);
  }

  bool read_enforcement(const Value& value, Enforcement& out) {
    return read_.choice<Enforcement>(value,
                                     {{"merged", Enforcement::merged},
                                      {"escrow", Enforcement::escrow},
                                      {"home", Enforcement::home}},
                                     out);
  }

  bool read_durability(const Value& value, Durability& out) {
    return read_.choice<Durability>(value,
                                    {{"async", Durability::async},
                                     {"commit", Durability::commit},
                                     {"reserve", Durability::reserve}},
                                    out);
  }

  bool read_late(const Value& value, Late& out) {
    return read_.choice<Late>(value, {{"charge", Late::charge}, {"drop", Late::drop}}, out);
  }

  bool read_candidate(const Value& value, Candidate& out) {
    const std::size_t problems = read_.problems();
    read_.mapping(
        value, {{"limit", [&](const Value& v) { return read_.integer(v, 0, kAny, out.limit); },
                 "the limit to try"},
                {"burst", [&](const Value& v) { return read_.integer(v, 1, kAny, out.burst); }}});
    return read_.problems() == problems;
  }

  bool read_on_failure(const Value& value, OnFailure& out) {
    return read_.choice<OnFailure>(value,
                                   {{"open", OnFailure::open}, {"closed", OnFailure::closed}}, out);
  }

  /// A name, or { name: …, order: … }.
  bool read_group(const Value& value, Rule& rule) {
    if (!read_.is_map(value)) return read_.text(value, "a name", rule.group);
    const std::size_t problems = read_.problems();
    read_.mapping(value,
                  {{"name", [&](const Value& v) { return read_.text(v, "a name", rule.group); },
                    "the group's name"},
                   {"order", [&](const Value& v) {
                      return read_.choice<GroupOrder>(
                          v, {{"listed", GroupOrder::listed}, {"exact", GroupOrder::exact}},
                          rule.group_order);
                    }}});
    return read_.problems() == problems;
  }

  bool read_replaces(const Value& value, std::vector<std::string>& out) {
    std::vector<Value> items;
    if (!read_.items(value, "a list of rules' names", items)) return false;
    bool ok = true;
    for (const Value& item : items) ok &= read_.text(item, "a rule's name", out.emplace_back());
    return ok;
  }

  bool read_limit(const Value& value, Rule& rule) {
    const std::string* text = read_.scalar(value);
    if (text != nullptr && *text == "from_request" && read_.node(value).plain) {
      return rule.limit_from_request = true;
    }
    return read_.integer(value, 0, kAny, rule.limit);
  }

  /// What a request may bring at most.
  bool read_max(const Value& value, Rule& rule) {
    const std::size_t problems = read_.problems();
    read_.mapping(
        value, {{"limit", [&](const Value& v) { return read_.integer(v, 1, kAny, rule.limit); },
                 "the most units that may pass in a window"},
                {"window", [&](const Value& v) { return read_length(v, rule.window); },
                 "the longest window, such as 1d"},
                {"burst", [&](const Value& v) { return read_.integer(v, 1, kAny, rule.burst); }}});
    return read_.problems() == problems;
  }

  bool read_deny(const Value& value, Rule& rule) {
    const std::size_t problems = read_.problems();
    read_.mapping(
        value,
        {{"status", [&](const Value& v) { return read_.integer(v, 403, 503, rule.deny_status); }},
         {"message", [&](const Value& v) { return read_.text(v, "text", rule.deny_message); }}});
    return read_.problems() == problems;
  }

  bool read_labels(const Value& value, std::map<std::string, std::string>& out) {
    std::vector<yaml::Reader::Member> entries;
    if (!read_.entries(value, "label", entries)) return false;
    bool ok = true;
    for (const auto& entry : entries) {
      ok &= read_.text(entry.value, "text", out[std::string(entry.name)]);
    }
    return ok;
  }

  bool read_cost(const Value& value, Rule& rule) {
    if (read_.node(value).kind != Node::Kind::map) {
      return read_.integer(value, 0, kAny, rule.default_cost);
    }
    std::vector<yaml::Reader::Member> entries;
    if (!read_.entries(value, "method", entries)) return false;
    bool ok = true;
    for (const auto& entry : entries) {
      if (read_.full()) return false;
      if (entry.name == "entries" && read_.is_map(entry.value)) {
        if (entries.size() > 1) ok = read_.fail(entry.key, "no methods beside entries");
        ok &= read_entry_costs(entry.value, rule.cost_by_entry);
        continue;
      }
      std::uint64_t cost = 0;
      ok &= read_.integer(entry.value, 0, kAny, cost);
      if (entry.name == "default") {
        rule.default_cost = cost;
      } else {
        rule.cost_by_method.emplace(entry.name, cost);
      }
    }
    return ok;
  }

  bool read_entry_costs(const Value& value, std::vector<EntryCost>& out) {
    std::vector<yaml::Reader::Member> entries;
    if (!read_.entries(value, "entry", entries)) return false;
    bool ok = true;
    for (const auto& entry : entries) {
      if (read_.full()) return false;
      EntryCost& cost = out.emplace_back();
      cost.key = entry.name;
      ok &= read_weight(entry.value, cost.weight);
    }
    return ok && (!out.empty() || read_.fail(value, "at least one entry"));
  }

  /// 4 or 0.25: at most six digits behind the point.
  bool read_weight(const Value& value, std::uint64_t& out) {
    constexpr std::string_view kWhat =
        "units for each, such as 4 or 0.25: at most 1000000000, with at most 6 digits behind the "
        "point";
    const std::string* text = read_.scalar(value);
    if (text == nullptr || !read_.node(value).plain) return read_.expected(value, kWhat);
    const std::size_t point = text->find('.');
    std::string digits = text->substr(0, point);
    std::string behind = point == std::string::npos ? "" : text->substr(point + 1);
    const bool form = point == std::string::npos || (!behind.empty() && behind.size() <= 6);
    behind.resize(6, '0');
    std::uint64_t units = 0;
    std::uint64_t millionths = 0;
    // In front of the millionths a 1, as a number has no zero there.
    if (!form || parse_number(digits, units) != Digits::good ||
        parse_number("1" + behind, millionths) != Digits::good || units > 1'000'000'000) {
      return read_.expected(value, kWhat);
    }
    out = units * kWeightUnit + (millionths - kWeightUnit);
    return out <= kMaxWeight || read_.expected(value, kWhat);
  }

  const yaml::Tree& tree_;
  const std::string file_;
  const RulesWording wording_;
  std::vector<yaml::Problem> problems_;
  yaml::Reader read_;
  std::vector<Rule> rules_;
  std::vector<Site> sites_;  // of rules_, index by index
};

void read_yaml(std::string_view text, std::string_view file, LoadedRules& out) {
  const auto fail = [&](Position at, std::string expected) {
    out.errors.push_back({std::string(file), at.line, at.column, "", std::move(expected)});
  };
  if (text.size() > yaml::kMaxText) {
    fail({}, fmt::format("a file of at most {} MiB", yaml::kMaxText >> 20));
    return;
  }
  yaml::Tree tree;
  if (const auto flaw = yaml::parse(text, tree)) {
    fail(flaw->at, (flaw->is_syntax ? "valid YAML: " : "") + flaw->text);
  } else if (tree.documents.empty()) {
    fail({}, "a map with domain and rules, got an empty file");
  }
  RulesReader reader(tree, file);
  for (const std::uint32_t root : tree.documents) reader.read_document({root, ""});
  reader.take_errors(out.errors);
  out.rules = RuleSet::make(reader.take_rules(), reader, out.errors);
  if (out.rules) out.warnings = internal::rule_warnings(out.rules->rules(), reader);
}

}  // namespace

LoadedRules parse_rules(std::string_view yaml, std::string_view file) {
  LoadedRules out;
  read_yaml(yaml, file, out);
  if (out.errors.empty()) return out;
  out.rules = nullptr;
  out.warnings.clear();
  std::stable_sort(out.errors.begin(), out.errors.end(), [](const auto& a, const auto& b) {
    return std::pair{a.line, a.column} < std::pair{b.line, b.column};
  });
  if (out.errors.size() > internal::kMaxErrors) out.errors.resize(internal::kMaxErrors);
  return out;
}

LoadedRules load_rules(const std::string& path) {
  std::string text;
  const int error = internal::read_file(path, yaml::kMaxText, text);
  LoadedRules out;
  if (error == 0 || error == EFBIG) {
    out = parse_rules(text, path);
    out.version = fmt::format("{:016x}", internal::KeyedHash(HashKey{})(text)[0]);
    return out;
  }
  out.errors.push_back({path, 0, 0, "", fmt::format("a readable file: {}", std::strerror(error))});
  return out;
}

std::string format_window(const Rule& rule) {
  if (!rule.calendar) return format_duration(rule.window);
  return fmt::format("{} ({})", to_string(rule.calendar->unit), rule.calendar->time_zone);
}

}  // namespace weir
