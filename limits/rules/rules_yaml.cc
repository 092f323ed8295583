#include <weir/limits/rules/rules_yaml.h>

#include <fmt/format.h>
#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/exceptions.h>
#include <yaml-cpp/mark.h>
#include <yaml-cpp/parser.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <limits>
#include <span>
#include <sstream>
#include <utility>

#include <weir/limits/rules/rule_origin.h>
#include <weir/limits/series/keyed_hash.h>

namespace weir {
namespace {

using internal::entry_path;
using internal::quoted;
using State = RuleOrigin::State;

constexpr std::size_t kMaxFile = 16u << 20;
constexpr std::size_t kMaxDepth = 64;
/// yaml-cpp holds every token of a [ ] or { } in memory until it ends, up to 250 bytes for one byte
/// of text. These keep that within about 0.6 GB, and leave room for 100,000 rules in JSON.
constexpr std::size_t kMaxBrackets = 1u << 20;
constexpr std::size_t kMaxIndicators = 4u << 20;
constexpr std::size_t kMaxNodes = 4u << 20;
/// What may be read in all, in bytes of scalars plus one for each node. A file without aliases
/// stays below this, because of its size; aliases could multiply it without end.
constexpr std::size_t kMaxExpanded = 2 * kMaxFile;

constexpr Nanos kMaxDuration = 366 * kDay;

// --- YAML to a tree ---

constexpr std::uint32_t kNone = std::numeric_limits<std::uint32_t>::max();

struct Position {
  int line = 0;  // from 1
  int column = 0;
};

Position position(const YAML::Mark& mark) {
  return mark.is_null() ? Position{} : Position{mark.line + 1, mark.column + 1};
}

struct Node {
  enum class Kind : std::uint8_t { null, scalar, list, map };
  Kind kind = Kind::null;
  bool plain = false;   // a scalar without quotes
  bool tagged = false;  // carries a tag such as !!int
  Position at;
  std::string text;                     // of a scalar
  std::vector<std::uint32_t> children;  // of a map: key, value, key, value
};

/// Takes yaml-cpp's events. Its own Node is not used: that one loses duplicate keys' positions, and
/// which alias stands for what. An alias is one more reference to the same node, so nothing is
/// expanded here; a node may even contain itself, and nobody may walk the tree without a bound.
class TreeBuilder final : public YAML::EventHandler {
 public:
  std::vector<Node> nodes;

  /// The last document's root.
  std::uint32_t root() const { return root_; }

  /// The last document was none: yaml-cpp gave it without reading anything.
  bool stuck() const { return stuck_; }

  void OnDocumentStart(const YAML::Mark& mark) override {
    // At a stray comma it would report empty documents for ever.
    if (mark.pos <= last_start_) {
      stuck_ = true;
      throw YAML::ParserException(mark, "unexpected text after the end of a document");
    }
    last_start_ = mark.pos;
    anchors_.clear();
    open_.clear();
    root_ = kNone;
  }
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    add(Node::Kind::null, mark, "?", anchor);
  }
  void OnAlias(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    if (anchor >= anchors_.size() || anchors_[anchor] == kNone) {
      throw YAML::ParserException(mark, "an alias without its anchor");
    }
    attach(anchors_[anchor]);
  }
  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                const std::string& value) override {
    Node& node = nodes[add(Node::Kind::scalar, mark, tag, anchor)];
    node.plain = tag != "!";
    node.text = value;
  }
  void OnSequenceStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                       YAML::EmitterStyle::value) override {
    open(Node::Kind::list, mark, tag, anchor);
  }
  void OnSequenceEnd() override { open_.pop_back(); }
  void OnMapStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                  YAML::EmitterStyle::value) override {
    open(Node::Kind::map, mark, tag, anchor);
  }
  void OnMapEnd() override { open_.pop_back(); }

 private:
  void attach(std::uint32_t node) {
    if (open_.empty()) {
      root_ = node;
    } else {
      nodes[open_.back()].children.push_back(node);
    }
  }

  std::uint32_t add(Node::Kind kind, const YAML::Mark& mark, const std::string& tag,
                    YAML::anchor_t anchor) {
    if (nodes.size() >= kMaxNodes) throw YAML::ParserException(mark, "too many values");
    const auto index = static_cast<std::uint32_t>(nodes.size());
    Node& node = nodes.emplace_back();
    node.kind = kind;
    node.at = position(mark);
    node.tagged = !(tag.empty() || tag == "?" || tag == "!");
    if (anchor != 0) {
      if (anchor >= anchors_.size()) anchors_.resize(anchor + 1, kNone);
      anchors_[anchor] = index;
    }
    attach(index);
    return index;
  }

  // The parser announces a collection before it recurses into it, so throwing here bounds its
  // stack.
  void open(Node::Kind kind, const YAML::Mark& mark, const std::string& tag,
            YAML::anchor_t anchor) {
    if (open_.size() >= kMaxDepth) {
      throw YAML::ParserException(mark, fmt::format("nested deeper than {} levels", kMaxDepth));
    }
    open_.push_back(add(kind, mark, tag, anchor));
  }

  std::vector<std::uint32_t> open_;
  std::vector<std::uint32_t> anchors_;  // by yaml-cpp's number, which starts at 1
  std::uint32_t root_ = kNone;
  int last_start_ = -1;
  bool stuck_ = false;
};

// --- Words ---

constexpr std::array<std::string_view, 2> kDocumentFields = {"domain", "rules"};

constexpr std::array<std::string_view, 16> kRuleFields = {
    "name",  "match",    "key",  "limit", "window",      "algorithm",  "slots",      "strict",
    "burst", "max_debt", "cost", "phase", "enforcement", "durability", "on_failure", "shadow"};

constexpr std::array<std::string_view, 2> kWindowFields = {"calendar", "time_zone"};

constexpr std::array<std::pair<std::string_view, CalendarUnit>, 4> kCalendarUnits = {
    {{"day", CalendarUnit::day},
     {"week", CalendarUnit::week},
     {"month", CalendarUnit::month},
     {"year", CalendarUnit::year}}};

constexpr std::array<std::string_view, 3> kMatchFields = {"exact", "prefix", "cidr"};

std::uint32_t field_bit(std::string_view field) {
  const auto found = std::find(kRuleFields.begin(), kRuleFields.end(), field);
  return found == kRuleFields.end() ? 0 : 1u << (found - kRuleFields.begin());
}

/// Insertions, deletions, replacements and swaps of neighbours that turn a into b.
std::size_t distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> before(b.size() + 1);
  std::vector<std::size_t> last(b.size() + 1);
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) last[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t replaced = last[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      row[j] = std::min({replaced, last[j] + 1, row[j - 1] + 1});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        row[j] = std::min(row[j], before[j - 2] + 1);
      }
    }
    std::swap(before, last);
    std::swap(last, row);
  }
  return last[b.size()];
}

/// `; did you mean "x"?`, or nothing if no word is near.
std::string did_you_mean(std::string_view text, std::span<const std::string_view> words) {
  constexpr std::size_t kLongest = 32;
  if (text.size() > kLongest) return {};
  std::string lower(text);
  for (char& c : lower) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
    if (c == '-' || c == ' ') c = '_';
  }
  std::size_t best = text.size() <= 4 ? 2 : 3;  // the first distance that is too far
  std::string_view nearest;
  for (const std::string_view word : words) {
    const std::size_t d = distance(lower, word);
    if (d < best) {
      best = d;
      nearest = word;
    }
  }
  return nearest.empty() ? std::string{} : fmt::format("; did you mean \"{}\"?", nearest);
}

std::string listed(std::span<const std::string_view> words) {
  std::string out;
  for (std::size_t i = 0; i < words.size(); ++i) {
    if (i > 0) out += i + 1 == words.size() ? " or " : ", ";
    out += words[i];
  }
  return out;
}

// --- The tree to rules ---

/// One rule's place in the tree.
struct Site {
  std::uint32_t node = kNone;
  std::size_t number = 0;  // in its document, from 0
  Position domain_at;
  bool domain_ok = true;
  std::uint32_t set = 0;  // bits of kRuleFields
  std::uint32_t unreadable = 0;
};

class Reader final : public RuleOrigin {
 public:
  Reader(const std::vector<Node>& nodes, std::string_view file, std::vector<RuleError>& errors)
      : nodes_(nodes), file_(file), errors_(errors) {}

  void read_document(std::uint32_t root) {
    if (full()) return;
    const Node& node = visit(root);
    if (node.kind == Node::Kind::null) {
      fail(node.at, "", "a map with domain and rules, got an empty document");
      return;
    }
    std::array<std::uint32_t, kDocumentFields.size()> fields;
    if (!read_fields(root, "", kDocumentFields, fields)) return;

    Site site;
    std::string domain;
    site.domain_at = node.at;
    site.domain_ok = read_domain(node, fields[0], domain);
    if (fields[0] != kNone) site.domain_at = nodes_[fields[0]].at;

    if (fields[1] == kNone) {
      fail(node.at, "rules", "a list of rules (rules: [] if there are none), got nothing");
      return;
    }
    const Node& list = visit(fields[1]);
    if (list.kind != Node::Kind::list || list.tagged) {
      fail(list.at, "rules", "a list of rules (rules: [] if there are none), got " + kind_of(list));
      return;
    }
    for (std::size_t i = 0; i < list.children.size() && !full(); ++i) {
      if (rules_.size() >= internal::kMaxRules) {
        fail(nodes_[list.children[i]].at, "rules",
             fmt::format("at most {} rules", internal::kMaxRules));
        break;
      }
      site.node = list.children[i];
      site.number = i;
      read_rule(site, domain);
    }
  }

  std::vector<Rule> take_rules() { return std::move(rules_); }

  // RuleOrigin

  State state(std::size_t rule, std::string_view field) const override {
    const Site& site = sites_[rule];
    if (field == "domain") return site.domain_ok ? State::set : State::unreadable;
    const std::uint32_t bit = field_bit(field);
    if (site.unreadable & bit) return State::unreadable;
    return site.set & bit ? State::set : State::unset;
  }

  RuleError error(std::size_t rule, std::string_view path) const override {
    const Site& site = sites_[rule];
    RuleError error;
    error.file = file_;
    Position at = nodes_[site.node].at;
    if (path == "domain") {
      error.field = path;
      at = site.domain_at;
    } else {
      error.field = fmt::format("rules[{}].{}", site.number, path);
      const std::size_t end = std::min(path.find_first_of(".["), path.size());
      if (const std::uint32_t field = child(site.node, path.substr(0, end)); field != kNone) {
        at = nodes_[inner(field, path.substr(end))].at;
      }
    }
    error.line = at.line;
    error.column = at.column;
    return error;
  }

  std::string place(std::size_t rule) const override {
    return fmt::format("line {}", nodes_[sites_[rule].node].at.line);
  }

 private:
  struct Item {
    std::string_view key;
    std::uint32_t key_node;
    std::uint32_t value;
  };

  // Positions

  std::uint32_t child(std::uint32_t map, std::string_view key) const {
    const Node& node = nodes_[map];
    if (node.kind != Node::Kind::map) return kNone;
    for (std::size_t i = 0; i + 1 < node.children.size(); i += 2) {
      if (nodes_[node.children[i]].text == key) return node.children[i + 1];
    }
    return kNone;
  }

  /// The node at "" or ".key" or "[3]" below a field, or the field if there is none.
  std::uint32_t inner(std::uint32_t field, std::string_view path) const {
    std::uint32_t found = kNone;
    if (path.starts_with('.')) {
      found = child(field, path.substr(1));
    } else if (path.starts_with('[') && nodes_[field].kind == Node::Kind::list) {
      std::size_t i = 0;
      for (const char c : path.substr(1, path.size() - 2)) {
        i = i * 10 + static_cast<std::size_t>(c - '0');
      }
      if (i < nodes_[field].children.size()) found = nodes_[field].children[i];
    }
    return found == kNone ? field : found;
  }

  // Errors

  bool full() const { return stopped_ || errors_.size() >= internal::kMaxErrors; }

  void fail(Position at, std::string field, std::string expected) {
    if (full()) return;
    errors_.push_back({file_, at.line, at.column, std::move(field), std::move(expected)});
  }

  static std::string kind_of(const Node& node) {
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
    return node.plain ? quoted(node.text) : "the text " + quoted(node.text);
  }

  /// Every read of a node goes through here: this bounds what aliases can make of a small file.
  const Node& visit(std::uint32_t index) {
    const Node& node = nodes_[index];
    expanded_ += 1 + node.text.size();
    if (expanded_ > kMaxExpanded && !stopped_) {
      fail(node.at, "",
           fmt::format("at most {} MiB when aliases are expanded", kMaxExpanded >> 20));
      stopped_ = true;
    }
    return node;
  }

  // Shapes

  /// A map's entries with duplicates and odd keys reported and left out. False if it is no map.
  bool read_map(std::uint32_t index, const std::string& path, std::vector<Item>& out) {
    const Node& node = visit(index);
    if (node.kind != Node::Kind::map || node.tagged) {
      fail(node.at, path, "a map, got " + kind_of(node));
      return false;
    }
    std::map<std::string_view, std::uint32_t> first;
    for (std::size_t i = 0; i + 1 < node.children.size() && !full(); i += 2) {
      const std::uint32_t key_node = node.children[i];
      const Node& key = visit(key_node);
      if (key.kind != Node::Kind::scalar || key.tagged) {
        fail(key.at, path, "text as the key, got " + kind_of(key));
        continue;
      }
      const auto [other, fresh] = first.try_emplace(key.text, key_node);
      if (!fresh) {
        fail(key.at, join(path, key.text),
             fmt::format("each key once; it is already on line {}", nodes_[other->second].at.line));
        continue;
      }
      out.push_back({key.text, key_node, node.children[i + 1]});
    }
    return true;
  }

  static std::string join(const std::string& path, std::string_view key) {
    std::string whole = entry_path(path, key);
    return path.empty() ? whole.substr(1) : whole;
  }

  /// The values of a map with known keys, kNone for those that are not there.
  template <std::size_t N>
  bool read_fields(std::uint32_t index, const std::string& path,
                   const std::array<std::string_view, N>& known,
                   std::array<std::uint32_t, N>& out) {
    out.fill(kNone);
    std::vector<Item> items;
    if (!read_map(index, path, items)) return false;
    for (const Item& item : items) {
      const auto found = std::find(known.begin(), known.end(), item.key);
      if (found != known.end()) {
        out[static_cast<std::size_t>(found - known.begin())] = item.value;
      } else if (item.key == "<<") {
        fail(nodes_[item.key_node].at, join(path, item.key),
             "no merge key: write the fields out (aliases of single values work)");
      } else {
        fail(nodes_[item.key_node].at, join(path, item.key),
             "a known field" + unknown_hint(item.key, known));
      }
    }
    return true;
  }

  static std::string unknown_hint(std::string_view key, std::span<const std::string_view> known) {
    std::string hint = did_you_mean(key, known);
    return hint.empty() ? fmt::format(" ({})", listed(known)) : hint;
  }

  bool read_text(std::uint32_t index, const std::string& path, std::string_view what,
                 std::string& out) {
    const Node& node = visit(index);
    if (node.kind != Node::Kind::scalar || node.tagged) {
      fail(node.at, path, fmt::format("{}, got {}", what, kind_of(node)));
      return false;
    }
    out = node.text;
    return true;
  }

  bool read_number(std::uint32_t index, const std::string& path, std::uint64_t max,
                   std::uint64_t& out) {
    const Node& node = visit(index);
    const std::string_view text = node.text;
    const bool digits = node.kind == Node::Kind::scalar && node.plain && !node.tagged &&
                        !text.empty() && text.find_first_not_of("0123456789") == text.npos &&
                        (text.size() == 1 || text[0] != '0');
    if (!digits) {
      fail(node.at, path, "a whole number in decimal digits, got " + kind_of(node));
      return false;
    }
    std::uint64_t value = 0;
    bool fits = true;
    for (const char c : text) {
      fits = fits && !__builtin_mul_overflow(value, 10u, &value) &&
             !__builtin_add_overflow(value, static_cast<std::uint64_t>(c - '0'), &value);
    }
    if (!fits || value > max) {
      fail(node.at, path, fmt::format("a number of at most {}, got {}", max, kind_of(node)));
      return false;
    }
    out = value;
    return true;
  }

  bool read_number(std::uint32_t index, const std::string& path, std::uint32_t& out) {
    std::uint64_t wide = 0;
    if (!read_number(index, path, std::numeric_limits<std::uint32_t>::max(), wide)) return false;
    out = static_cast<std::uint32_t>(wide);
    return true;
  }

  bool read_bool(std::uint32_t index, const std::string& path, bool& out) {
    const Node& node = visit(index);
    if (node.kind != Node::Kind::scalar || !node.plain || node.tagged ||
        (node.text != "true" && node.text != "false")) {
      fail(node.at, path, "true or false, got " + kind_of(node));
      return false;
    }
    out = node.text == "true";
    return true;
  }

  bool read_duration(std::uint32_t index, const std::string& path, Nanos& out) {
    const Node& node = visit(index);
    if (node.kind != Node::Kind::scalar || node.tagged || !parse_duration(node.text, out)) {
      fail(node.at, path,
           "a length of time such as 500ms, 10s, 1h30m or 1d, at most 366d, got " + kind_of(node) +
               calendar_hint(node));
      return false;
    }
    return true;
  }

  static std::string calendar_hint(const Node& node) {
    for (const auto& [word, unit] : kCalendarUnits) {
      if (node.text == word) return fmt::format("; or {{ calendar: {} }}", word);
    }
    return {};
  }

  bool read_window(std::uint32_t index, const std::string& path, Rule& rule) {
    if (nodes_[index].kind != Node::Kind::map) return read_duration(index, path, rule.window);
    std::array<std::uint32_t, kWindowFields.size()> fields;
    const std::size_t errors_before = errors_.size();
    if (!read_fields(index, path, kWindowFields, fields)) return false;
    CalendarWindow& window = rule.calendar.emplace();
    if (fields[0] == kNone) {
      fail(nodes_[index].at, path + ".calendar", "day, week, month or year, got nothing");
    } else {
      read_choice(fields[0], path + ".calendar", kCalendarUnits, window.unit);
    }
    if (fields[1] != kNone) {
      read_text(fields[1], path + ".time_zone", "the name of a time zone", window.time_zone);
    }
    return errors_.size() == errors_before;
  }

  /// One of some words; `choices` pairs each with its value.
  template <class T, std::size_t N>
  bool read_choice(std::uint32_t index, const std::string& path,
                   const std::array<std::pair<std::string_view, T>, N>& choices, T& out) {
    const Node& node = visit(index);
    std::array<std::string_view, N> words;
    for (std::size_t i = 0; i < N; ++i) words[i] = choices[i].first;
    if (node.kind == Node::Kind::scalar && !node.tagged) {
      for (const auto& [word, value] : choices) {
        if (node.text == word) {
          out = value;
          return true;
        }
      }
      fail(node.at, path,
           fmt::format("{}, got {}{}", listed(words), kind_of(node),
                       did_you_mean(node.text, words)));
      return false;
    }
    fail(node.at, path, fmt::format("{}, got {}", listed(words), kind_of(node)));
    return false;
  }

  // Rules

  bool read_domain(const Node& document, std::uint32_t index, std::string& out) {
    if (index == kNone) {
      fail(document.at, "domain", "the name that requests give as their domain, got nothing");
      return false;
    }
    if (!read_text(index, "domain", "a name", out)) return false;
    std::string problem = internal::name_problem(out);
    if (problem.empty()) return true;
    fail(nodes_[index].at, "domain", std::move(problem));
    return false;
  }

  void read_rule(Site site, const std::string& domain) {
    const std::string path = fmt::format("rules[{}]", site.number);
    std::array<std::uint32_t, kRuleFields.size()> fields;
    if (!read_fields(site.node, path, kRuleFields, fields)) return;

    Rule rule;
    rule.domain = domain;
    const auto read = [&](std::string_view field, auto&& reader, std::string_view required = {}) {
      const std::uint32_t bit = field_bit(field);
      const std::uint32_t value = fields[static_cast<std::size_t>(__builtin_ctz(bit))];
      const std::string field_path = fmt::format("{}.{}", path, field);
      if (value != kNone) {
        site.set |= bit;
        if (!reader(value, field_path)) site.unreadable |= bit;
      } else if (!required.empty()) {
        fail(nodes_[site.node].at, field_path, fmt::format("{}, got nothing", required));
        site.unreadable |= bit;
      }
    };
    using Index = std::uint32_t;
    using Path = const std::string&;
    constexpr std::uint64_t kAny = std::numeric_limits<std::uint64_t>::max();

    read(
        "name", [&](Index i, Path p) { return read_text(i, p, "a name", rule.name); },
        "a name that is unique in its domain");
    read("match", [&](Index i, Path p) { return read_match(i, p, rule.match); });
    read("key", [&](Index i, Path p) { return read_key(i, p, rule.key); });
    read(
        "limit", [&](Index i, Path p) { return read_number(i, p, kAny, rule.limit); },
        "the units that may pass in a window");
    read(
        "window", [&](Index i, Path p) { return read_window(i, p, rule); },
        "a length of time such as 1m");
    read("algorithm", [&](Index i, Path p) { return read_algorithm(i, p, rule.algorithm); });
    read("burst", [&](Index i, Path p) { return read_number(i, p, kAny, rule.burst); });
    read("slots", [&](Index i, Path p) { return read_number(i, p, rule.slots); });
    read("strict", [&](Index i, Path p) { return read_bool(i, p, rule.strict); });
    read("cost", [&](Index i, Path p) { return read_cost(i, p, rule); });
    read("max_debt", [&](Index i, Path p) { return read_number(i, p, rule.max_debt); });
    read("phase", [&](Index i, Path p) { return read_phase(i, p, rule.phase); });
    read("enforcement", [&](Index i, Path p) { return read_enforcement(i, p, rule.enforcement); });
    read("durability", [&](Index i, Path p) { return read_durability(i, p, rule.durability); });
    read("on_failure", [&](Index i, Path p) { return read_on_failure(i, p, rule.on_failure); });
    read("shadow", [&](Index i, Path p) { return read_bool(i, p, rule.shadow); });

    rules_.push_back(std::move(rule));
    sites_.push_back(site);
  }

  bool read_algorithm(std::uint32_t index, const std::string& path, Algorithm& out) {
    constexpr auto entry = [](std::string_view word, Algorithm value) {
      return std::pair{word, value};
    };
    static constexpr std::array kChoices = {entry("fixed_window", Algorithm::fixed_window),
                                            entry("sliding_window", Algorithm::sliding_window),
                                            entry("sliding_log", Algorithm::sliding_log),
                                            entry("token_bucket", Algorithm::token_bucket),
                                            entry("leaky_bucket", Algorithm::leaky_bucket)};
    return read_choice(index, path, kChoices, out);
  }

  bool read_phase(std::uint32_t index, const std::string& path, Phase& out) {
    static constexpr std::array<std::pair<std::string_view, Phase>, 2> kChoices = {
        {{"aligned", Phase::aligned}, {"spread", Phase::spread}}};
    return read_choice(index, path, kChoices, out);
  }

  bool read_enforcement(std::uint32_t index, const std::string& path, Enforcement& out) {
    static constexpr std::array<std::pair<std::string_view, Enforcement>, 3> kChoices = {
        {{"merged", Enforcement::merged},
         {"escrow", Enforcement::escrow},
         {"home", Enforcement::home}}};
    return read_choice(index, path, kChoices, out);
  }

  bool read_durability(std::uint32_t index, const std::string& path, Durability& out) {
    static constexpr std::array<std::pair<std::string_view, Durability>, 3> kChoices = {
        {{"async", Durability::async},
         {"commit", Durability::commit},
         {"reserve", Durability::reserve}}};
    return read_choice(index, path, kChoices, out);
  }

  bool read_on_failure(std::uint32_t index, const std::string& path, OnFailure& out) {
    static constexpr std::array<std::pair<std::string_view, OnFailure>, 2> kChoices = {
        {{"open", OnFailure::open}, {"closed", OnFailure::closed}}};
    return read_choice(index, path, kChoices, out);
  }

  bool read_key(std::uint32_t index, const std::string& path, std::vector<std::string>& out) {
    constexpr std::string_view kWhat = "a descriptor entry or a list of them";
    const Node& node = visit(index);
    if (node.kind != Node::Kind::list || node.tagged) {
      return read_text(index, path, kWhat, out.emplace_back());
    }
    bool ok = true;
    for (std::size_t i = 0; i < node.children.size() && !full(); ++i) {
      ok &= read_text(node.children[i], fmt::format("{}[{}]", path, i), "a descriptor entry",
                      out.emplace_back());
    }
    return ok;
  }

  bool read_match(std::uint32_t index, const std::string& path, std::vector<Match>& out) {
    std::vector<Item> items;
    if (!read_map(index, path, items)) return false;
    bool ok = true;
    for (const Item& item : items) {
      if (full()) return false;
      Match& match = out.emplace_back();
      match.key = item.key;
      ok &= read_matcher(item.value, join(path, item.key), match.matcher);
    }
    return ok;
  }

  bool read_matcher(std::uint32_t index, const std::string& path, Matcher& out) {
    constexpr std::string_view kWhat =
        "a value, any, absent, or a map with one of exact, prefix and cidr";
    const Node& node = visit(index);
    if (node.kind != Node::Kind::map || node.tagged) {
      std::string text;
      if (!read_text(index, path, kWhat, text)) return false;
      if (node.plain && text == "any") {
        out = MatchAny{};
      } else if (node.plain && text == "absent") {
        out = MatchAbsent{};
      } else {
        out = MatchExact{std::move(text)};
      }
      return true;
    }
    std::array<std::uint32_t, kMatchFields.size()> fields;
    const std::size_t errors_before = errors_.size();
    if (!read_fields(index, path, kMatchFields, fields)) return false;
    if (errors_.size() != errors_before) return false;
    if (std::count(fields.begin(), fields.end(), kNone) != kMatchFields.size() - 1) {
      fail(node.at, path, "exactly one of exact, prefix and cidr");
      return false;
    }
    const auto which = static_cast<std::size_t>(
        std::find_if(fields.begin(), fields.end(), [](auto field) { return field != kNone; }) -
        fields.begin());
    std::string text;
    const std::string inner_path = fmt::format("{}.{}", path, kMatchFields[which]);
    if (!read_text(fields[which], inner_path, "text", text)) return false;
    if (kMatchFields[which] == "exact") {
      out = MatchExact{std::move(text)};
    } else if (kMatchFields[which] == "prefix") {
      out = MatchPrefix{std::move(text)};
    } else {
      const std::optional<MatchCidr> cidr = parse_cidr(text);
      if (!cidr) {
        fail(nodes_[fields[which]].at, inner_path,
             fmt::format("a network such as 10.0.0.0/8 or 2001:db8::/32, with no bits set behind "
                         "the prefix, got {}",
                         quoted(text)));
        return false;
      }
      out = *cidr;
    }
    return true;
  }

  bool read_cost(std::uint32_t index, const std::string& path, Rule& rule) {
    constexpr std::uint64_t kAny = std::numeric_limits<std::uint64_t>::max();
    if (nodes_[index].kind != Node::Kind::map) {
      return read_number(index, path, kAny, rule.default_cost);
    }
    std::vector<Item> items;
    if (!read_map(index, path, items)) return false;
    bool ok = true;
    for (const Item& item : items) {
      if (full()) return false;
      std::uint64_t cost = 0;
      ok &= read_number(item.value, join(path, item.key), kAny, cost);
      if (item.key == "default") {
        rule.default_cost = cost;
      } else {
        rule.cost_by_method.emplace(item.key, cost);
      }
    }
    return ok;
  }

  const std::vector<Node>& nodes_;
  const std::string file_;
  std::vector<RuleError>& errors_;
  std::vector<Rule> rules_;
  std::vector<Site> sites_;  // of rules_, index by index
  std::size_t expanded_ = 0;
  bool stopped_ = false;
};

// --- Text before YAML ---

/// What yaml-cpp must not see: it takes a byte 4 for the end of the file and the rest for not
/// there, reads what is not UTF-8 as something else, and needs much memory for some small texts.
bool check_bytes(std::string_view yaml, Position& at, std::string& expected) {
  std::size_t brackets = 0;
  std::size_t indicators = 0;
  at = {1, 1};
  for (std::size_t i = 0; i < yaml.size();) {
    const char c = yaml[i];
    const auto byte = static_cast<unsigned char>(c);
    if (c == '\n') {
      ++at.line;
      at.column = 1;
      ++i;
      continue;
    }
    const std::size_t length = internal::utf8_length(yaml.substr(i, 4));
    if (length == 0 || (byte < 0x20 && c != '\t' && c != '\r') || byte == 0x7F) {
      expected = fmt::format("UTF-8 text without control characters, got the byte 0x{:02x}", byte);
      return false;
    }
    switch (c) {
      case '[':
      case '{':
        ++brackets;
        [[fallthrough]];
      case ']':
      case '}':
      case ',':
      case ':':
      case '-':
      case '?':
      case '&':
      case '*':
      case '!':
        ++indicators;
        break;
      default:
        break;
    }
    if (brackets > kMaxBrackets || indicators > kMaxIndicators) {
      expected = fmt::format(
          "a smaller file: at most {} of [ and {{, and {} of these and ] }} , : "
          "- ? & * !",
          kMaxBrackets, kMaxIndicators);
      return false;
    }
    ++at.column;
    i += length;
  }
  return true;
}

void read_yaml(std::string_view yaml, std::string_view file, LoadedRules& out) {
  const auto fail = [&](Position at, std::string expected) {
    out.errors.push_back({std::string(file), at.line, at.column, "", std::move(expected)});
  };
  if (yaml.size() > kMaxFile) {
    fail({}, fmt::format("a file of at most {} MiB", kMaxFile >> 20));
    return;
  }
  Position at;
  std::string expected;
  if (!check_bytes(yaml, at, expected)) {
    fail(at, std::move(expected));
    return;
  }

  TreeBuilder tree;
  std::vector<std::uint32_t> roots;
  try {
    std::istringstream stream{std::string(yaml)};
    YAML::Parser parser(stream);
    while (parser.HandleNextDocument(tree)) {
      if (tree.root() != kNone) roots.push_back(tree.root());
    }
  } catch (const YAML::Exception& e) {
    if (tree.stuck()) roots.pop_back();
    fail(position(e.mark), "valid YAML: " + e.msg);
  }
  if (roots.empty() && out.errors.empty()) {
    fail({}, "a map with domain and rules, got an empty file");
    return;
  }

  Reader reader(tree.nodes, file, out.errors);
  for (const std::uint32_t root : roots) reader.read_document(root);
  out.rules = RuleSet::make(reader.take_rules(), reader, out.errors);
}

struct Unit {
  std::string_view name;
  Nanos length;
};
constexpr std::array<Unit, 7> kUnits = {{{"d", kDay},
                                         {"h", kHour},
                                         {"m", kMinute},
                                         {"s", kSecond},
                                         {"ms", kMillisecond},
                                         {"us", kMicrosecond},
                                         {"ns", 1}}};

}  // namespace

LoadedRules parse_rules(std::string_view yaml, std::string_view file) {
  LoadedRules out;
  read_yaml(yaml, file, out);
  if (out.errors.empty()) return out;
  out.rules = nullptr;
  std::stable_sort(out.errors.begin(), out.errors.end(), [](const auto& a, const auto& b) {
    return std::pair{a.line, a.column} < std::pair{b.line, b.column};
  });
  if (out.errors.size() > internal::kMaxErrors) out.errors.resize(internal::kMaxErrors);
  return out;
}

LoadedRules load_rules(const std::string& path) {
  std::string text;
  int error = 0;
  if (std::FILE* file = std::fopen(path.c_str(), "rbe")) {
    std::vector<char> block(64u << 10);
    while (text.size() <= kMaxFile) {
      errno = 0;
      const std::size_t got = std::fread(block.data(), 1, block.size(), file);
      text.append(block.data(), got);
      if (got < block.size()) {
        if (std::ferror(file)) error = errno != 0 ? errno : EIO;
        break;
      }
    }
    std::fclose(file);
  } else {
    error = errno;
  }
  LoadedRules out;
  if (error == 0) {
    out = parse_rules(text, path);
    out.version = fmt::format("{:016x}", internal::KeyedHash(HashKey{})(text)[0]);
    return out;
  }
  out.errors.push_back({path, 0, 0, "", fmt::format("a readable file: {}", std::strerror(error))});
  return out;
}

bool parse_duration(std::string_view text, Nanos& out) {
  if (text.empty()) return false;
  Nanos total = 0;
  std::size_t next_unit = 0;
  while (!text.empty()) {
    const std::size_t digits = std::min(text.find_first_not_of("0123456789"), text.size());
    if (digits == 0 || digits > 18) return false;
    Nanos count = 0;
    for (const char c : text.substr(0, digits)) count = count * 10 + (c - '0');
    text.remove_prefix(digits);
    const std::string_view name =
        text.substr(0, std::min(text.find_first_of("0123456789"), text.size()));
    while (next_unit < kUnits.size() && kUnits[next_unit].name != name) ++next_unit;
    if (next_unit == kUnits.size()) return false;
    const Nanos length = kUnits[next_unit++].length;
    if (count > kMaxDuration / length) return false;
    total += count * length;
    if (total > kMaxDuration) return false;
    text.remove_prefix(name.size());
  }
  if (total == 0) return false;
  out = total;
  return true;
}

std::string format_window(const Rule& rule) {
  if (!rule.calendar) return format_duration(rule.window);
  return fmt::format("{} ({})", to_string(rule.calendar->unit), rule.calendar->time_zone);
}

std::string format_duration(Nanos duration) {
  if (duration == 0) return "0s";
  std::string out = duration < 0 ? "-" : "";
  auto rest = static_cast<std::uint64_t>(duration);
  if (duration < 0) rest = 0 - rest;
  for (const Unit& unit : kUnits) {
    const auto length = static_cast<std::uint64_t>(unit.length);
    if (rest >= length) out += fmt::format("{}{}", rest / length, unit.name);
    rest %= length;
  }
  return out;
}

}  // namespace weir
