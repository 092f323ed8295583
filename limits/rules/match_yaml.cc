#include <weir/limits/rules/match_yaml.h>

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

#include <weir/limits/rules/rule_checks.h>
#include <weir/limits/text/utf8.h>

namespace weir::internal {
namespace {

using yaml::Value;

constexpr std::uint64_t kMost = std::numeric_limits<std::uint64_t>::max();

/// What one entry must be, in whatever form it is written.
class MatcherReader {
 public:
  MatcherReader(yaml::Reader& read, std::string_view key, std::vector<Match>& out)
      : read_(read), key_(key), out_(out) {}

  bool matcher(const Value& value, bool negated) {
    negated_ = negated;
    if (read_.is_map(value)) return forms(value);
    constexpr std::string_view kWhat =
        "a value, any, absent, or a map of what must hold, such as { prefix: /v1/ }";
    std::string text;
    if (read_.is_list(value)) {
      return read_.fail(value, fmt::format("{}, got a list; one of several values is written {{ "
                                           "in: [a, b] }}",
                                           kWhat));
    }
    if (!read_.text(value, kWhat, text)) return false;
    const bool plain = read_.node(value).plain;
    if (plain && text == "any") return add(MatchAny{});
    if (plain && text == "absent") return add(MatchAbsent{});
    return add(MatchExact{std::move(text)});
  }

 private:
  using Form = yaml::Reader::Field;

  bool add(Matcher matcher) {
    out_.push_back({std::string(key_), std::move(matcher), negated_});
    return true;
  }

  /// { exact: … }, { prefix: …, suffix: … } and so on: all of them hold.
  bool forms(const Value& value) {
    const std::size_t problems = read_.problems();
    const std::size_t before = out_.size();
    std::optional<MatchPath> path;
    std::optional<MatchNumber> number;
    bool ignore_case = false;
    std::vector<Form> known{
        {"exact", [&](const Value& v) { return one<MatchExact>(v); }},
        {"in", [&](const Value& v) { return list(v); }},
        {"prefix", [&](const Value& v) { return one<MatchPrefix>(v); }},
        {"suffix", [&](const Value& v) { return one<MatchSuffix>(v); }},
        {"glob", [&](const Value& v) { return one<MatchGlob>(v); }},
        {"cidr", [&](const Value& v) { return networks(v); }},
        {"path", [&](const Value& v) { return read_path(v, false, path); }},
        {"under", [&](const Value& v) { return read_path(v, true, path); }},
        {"ignore_case", [&](const Value& v) { return read_bool(read_, v, ignore_case); }},
        {"above", [&](const Value& v) { return low(v, 1, number); }},
        {"at_least", [&](const Value& v) { return low(v, 0, number); }},
        {"below", [&](const Value& v) { return high(v, 1, number); }},
        {"at_most", [&](const Value& v) { return high(v, 0, number); }},
    };
    // Of one thing that does not hold nothing further is said.
    std::optional<Value> none;
    const auto keep = [&](const Value& v) {
      none = v;
      return true;
    };
    if (!negated_) known.push_back({"not", keep});
    read_.mapping(value, known);
    if (read_.problems() != problems) return false;
    if (ignore_case && !path) return read_.fail(value, "ignore_case beside path or under");
    if (path) path->ignore_case = ignore_case;
    if (path) add(std::move(*path));
    if (number) add(*number);
    const std::size_t count = out_.size() - before;
    if (count == 0 && !none) {
      return read_.fail(value, "something that must hold, such as { prefix: /v1/ }");
    }
    if (negated_ && count > 1) {
      return read_.fail(value, "one thing that must not hold; several are a list: not: [a, b]");
    }
    return !none || none_of(*none);
  }

  template <typename Kind>
  bool one(const Value& value) {
    std::string text;
    return read_.text(value, "text", text) && add(Kind{std::move(text)});
  }

  bool list(const Value& value) {
    MatchIn in;
    std::vector<Value> items;
    if (!read_.items(value, "a list of values", items)) return false;
    for (const Value& item : items) {
      if (!read_.text(item, "a value", in.values.emplace_back())) return false;
    }
    return add(std::move(in));
  }

  bool networks(const Value& value) {
    if (!read_.is_list(value)) {
      MatchCidr network;
      return read_network(value, network) && add(network);
    }
    MatchCidrs cidrs;
    std::vector<Value> items;
    read_.items(value, "", items);
    bool ok = true;
    for (const Value& item : items) ok &= read_network(item, cidrs.networks.emplace_back());
    return ok && add(std::move(cidrs));
  }

  bool read_network(const Value& value, MatchCidr& out) {
    std::string text;
    if (!read_.text(value, "text", text)) return false;
    const std::optional<MatchCidr> cidr = parse_cidr(text);
    if (!cidr) {
      return read_.fail(value,
                        fmt::format("a network such as 10.0.0.0/8 or 2001:db8::/32, with no bits "
                                    "set behind the prefix, got {}",
                                    quoted_text(text)));
    }
    out = *cidr;
    return true;
  }

  bool read_path(const Value& value, bool below, std::optional<MatchPath>& out) {
    if (out) return read_.fail(value, "one of path and under");
    std::string text;
    if (!read_.text(value, "a path", text)) return false;
    out = MatchPath{std::move(text), below, false};
    return true;
  }

  /// `behind`: how far the bound lies outside.
  bool low(const Value& value, std::uint64_t behind, std::optional<MatchNumber>& number) {
    std::uint64_t bound = 0;
    if (!read_.integer(value, 0, kMost - behind, bound)) return false;
    if (!number) number.emplace();
    number->low = std::max(number->low, bound + behind);
    return true;
  }
  bool high(const Value& value, std::uint64_t behind, std::optional<MatchNumber>& number) {
    std::uint64_t bound = 0;
    if (!read_.integer(value, behind, kMost, bound)) return false;
    if (!number) number.emplace();
    number->high = std::min(number->high, bound - behind);
    return true;
  }

  /// One thing that must not hold, or a list of some of which none may.
  bool none_of(const Value& value) {
    MatcherReader inner(read_, key_, out_);
    if (!read_.is_list(value)) return inner.matcher(value, true);
    std::vector<Value> items;
    read_.items(value, "", items);
    if (items.empty()) return read_.fail(value, "something that must not hold, got an empty list");
    bool ok = true;
    for (const Value& item : items) ok &= inner.matcher(item, true);
    return ok;
  }

  yaml::Reader& read_;
  const std::string_view key_;
  std::vector<Match>& out_;
  bool negated_ = false;
};

bool read_form(yaml::Reader& read, const Value& value, KeyForm& out) {
  if (!read.is_map(value)) {
    return read.choice<KeyForm::Kind>(
        value, {{"address", KeyForm::Kind::address}, {"lower", KeyForm::Kind::lower}}, out.kind);
  }
  const std::size_t problems = read.problems();
  bool v4 = false;
  bool v6 = false;
  bool segments = false;
  const auto number = [&](bool& given, std::uint64_t low, std::uint64_t high, std::uint8_t& to) {
    return [&read, &given, low, high, &to](const Value& v) {
      given = true;
      return read.integer(v, low, high, to);
    };
  };
  read.mapping(value, {{"v4", number(v4, 0, 32, out.v4)},
                       {"v6", number(v6, 0, 128, out.v6)},
                       {"segments", number(segments, 1, kMaxSegments, out.segments)},
                       {"ignore_case",
                        [&](const Value& v) { return read_bool(read, v, out.ignore_case); }}});
  if (read.problems() != problems) return false;
  if ((v4 || v6) == segments || (out.ignore_case && !segments)) {
    return read.fail(value,
                     "v4 and v6, bits of an address, or segments of a path, such as { v4: "
                     "32, v6: 64 } or { segments: 2 }");
  }
  out.kind = segments ? KeyForm::Kind::path : KeyForm::Kind::address;
  return true;
}

/// A name, or { name: how it is counted }.
bool read_part(yaml::Reader& read, const Value& value, std::string_view what, std::string& name,
               KeyForm& form) {
  if (!read.is_map(value)) return read.text(value, what, name);
  std::vector<yaml::Reader::Member> members;
  if (!read.entries(value, "entry", members)) return false;
  if (members.size() != 1) {
    return read.fail(value, "one entry and how it is counted, such as { ip: address }");
  }
  name = members[0].name;
  return read_form(read, members[0].value, form);
}

}  // namespace

bool read_match(yaml::Reader& read, const Value& value, std::vector<Match>& out) {
  std::vector<yaml::Reader::Member> entries;
  if (!read.entries(value, "entry", entries)) return false;
  bool ok = true;
  for (const auto& entry : entries) {
    if (read.full()) return false;
    ok &= MatcherReader(read, entry.name, out).matcher(entry.value, false);
  }
  return ok;
}

bool read_key(yaml::Reader& read, const Value& value, std::vector<std::string>& names,
              std::vector<KeyForm>& forms) {
  std::vector<Value> items{value};
  std::string_view what = "a descriptor entry or a list of them";
  if (read.is_list(value)) {
    items.clear();
    read.items(value, "", items);
    what = "a descriptor entry";
  }
  bool ok = true;
  std::vector<KeyForm> read_forms;
  for (const Value& item : items) {
    ok &= read_part(read, item, what, names.emplace_back(), read_forms.emplace_back());
  }
  const auto plain = [](const KeyForm& form) { return form == KeyForm{}; };
  if (!std::all_of(read_forms.begin(), read_forms.end(), plain)) forms = std::move(read_forms);
  return ok;
}

bool read_bool(yaml::Reader& read, const Value& value, bool& out) {
  const std::string* text = read.scalar(value);
  if (text == nullptr || !read.node(value).plain || (*text != "true" && *text != "false")) {
    return read.expected(value, "true or false");
  }
  out = *text == "true";
  return true;
}

}  // namespace weir::internal
