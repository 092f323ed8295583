#include <weir/limits/limiter/program.h>
#include <weir/limits/matching/rule_index.h>

#include <tuple>

#include "generators.h"
#include "law.h"

namespace weir::laws {
namespace {

/// Values of which many begin with, hold or equal others.
std::string draw_text() {
  static const std::vector<std::string> texts{
      "/a",   "/a/b",  "/a/b/c", "/a/b/d", "/ab", "/b", "/",        "GET",     "PUT",
      "/a/b", "/\xff", "x",      "y",      "z",   "",   "10.1.2.3", "10.1.2.", "not an address"};
  return *one_of(texts);
}

std::string draw_network() {
  return *one_of<std::string>({"10.1.2.3/32", "10.1.2.0/24", "10.1.0.0/16", "10.0.0.0/8",
                               "0.0.0.0/0", "::/0", "10.1.0.0/16", "10.1.2.2/31", "11.0.0.0/8",
                               "::ffff:10.1.2.0/120", "::ffff:0.0.0.0/96", "2001:db8::/32",
                               "2001:db8:0:1::/64", "2001:db8::1/128", "192.0.2.128/25"});
}

std::string draw_address() {
  return *one_of<std::string>({"10.1.2.3", "10.1.2.2", "10.1.9.9", "10.9.9.9", "11.0.0.0",
                               "0.0.0.0", "255.255.255.255", "::", "::ffff:10.1.2.3", "2001:db8::1",
                               "2001:db8:0:1::1", "2001:DB8::1", "192.0.2.200"});
}

std::string draw_key() {
  return *one_of<std::string>({"path", "method", "ip", "user", "host", "domain"});
}

Match draw_match() {
  Match match;
  match.key = draw_key();
  match.negated = *chance(10);
  switch (*choice(14)) {
    case 0:
    case 1:
      match.matcher = MatchExact{draw_text()};
      break;
    case 2:
    case 3:
      match.key = *chance(50) ? "path" : match.key;
      match.matcher = MatchPrefix{draw_text()};
      break;
    case 4:
    case 5:
      match.key = *chance(80) ? "ip" : match.key;
      match.matcher = *parse_cidr(draw_network());
      break;
    case 6:
      match.matcher = MatchAny{};
      break;
    case 7:
      match.matcher = MatchSuffix{draw_text()};
      break;
    case 8: {
      MatchIn in;
      for (int i = *between(1, 5); i > 0; --i) in.values.push_back(draw_text());
      match.matcher = in;
      break;
    }
    case 9: {
      MatchCidrs cidrs;
      for (int i = *between(1, 5); i > 0; --i)
        cidrs.networks.push_back(*parse_cidr(draw_network()));
      match.key = *chance(80) ? "ip" : match.key;
      match.matcher = cidrs;
      break;
    }
    case 10:
      match.matcher = MatchGlob{*one_of<std::string>(
          {"/a*", "*/b", "/a/?/c", "*", "GET", "*.1.*", "/a*b*", "\\*", "?ET", "*/a/b/"})};
      break;
    case 11:
      match.key = *chance(80) ? "path" : match.key;
      match.matcher = MatchPath{*one_of<std::string>({"/a", "/a/b", "/", "/a/b/c", "/%61/b/"}),
                                *chance(60), *chance(30)};
      break;
    case 12:
      match.matcher =
          MatchNumber{*between<std::uint64_t>(0, 3), *one_of<std::uint64_t>({3, 5, 9, kMax})};
      break;
    default:
      match.matcher = MatchAbsent{};
  }
  return match;
}

Rule draw_rule() {
  Rule rule;
  rule.domain = *one_of<std::string>({"api", "api", "api", "web", ""});
  const int matches = *rc::gen::weightedElement<int>({{5, 1}, {4, 2}, {1, 0}, {1, 3}, {1, 6}});
  for (int i = 0; i < matches; ++i) rule.match.push_back(draw_match());
  if (*chance(10)) {
    rule.match.push_back({"path", MatchIn{{"/a", "/a/b", "/"}}});
    rule.match.push_back({"ip", MatchCidrs{{*parse_cidr("10.0.0.0/8"), *parse_cidr("::/0")}}});
  }
  const int keys = *rc::gen::weightedElement<int>({{5, 0}, {2, 1}, {1, 2}});
  for (int i = 0; i < keys; ++i) rule.key.push_back(draw_key());
  return rule;
}

/// Some from one mould, so that rules share conditions and the index has several levels.
std::vector<Rule> draw_rules() {
  std::vector<Rule> rules;
  const bool loose = *chance(10);  // many that most requests meet
  const int count = loose ? 150 : *one_of<int>({30, 12, 60, 9, 5, 1, 0, 200});
  Rule mould = draw_rule();
  for (int i = 0; i < count; ++i) {
    Rule rule = draw_rule();
    if (loose && *chance(80)) {
      rule.domain = "api";
      rule.match = {{draw_key(), MatchAbsent{}}};
      rule.key.clear();
    } else if (*chance(40)) {
      rule.domain = mould.domain;
      rule.match.insert(rule.match.begin(), mould.match.begin(), mould.match.end());
    }
    if (*chance(10)) mould = rule;
    if (rule.match.size() > 10) rule.match.resize(10);
    rules.push_back(std::move(rule));
  }
  return rules;
}

struct Asked {
  std::string domain;
  std::vector<std::pair<std::string, std::string>> texts;
};

Asked draw_request(const std::vector<Rule>& rules) {
  Asked asked;
  asked.domain = *rc::gen::weightedElement<std::string>(
      {{8, "api"}, {3, "web"}, {1, ""}, {1, "unknown"}, {1, "ap"}});
  if (!rules.empty() && *chance(60)) {  // much of what one rule wants
    const Rule& rule = rules[*between<std::size_t>(0, rules.size() - 1)];
    asked.domain = rule.domain;
    for (const Match& match : rule.match) {
      if (*chance(5) || std::holds_alternative<MatchAbsent>(match.matcher)) continue;
      if (match.negated && *chance(70)) continue;
      std::string value = draw_text();
      if (const auto* exact = std::get_if<MatchExact>(&match.matcher)) value = exact->value;
      if (const auto* prefix = std::get_if<MatchPrefix>(&match.matcher)) {
        value.insert(0, prefix->prefix);
      }
      const bool in_network = std::holds_alternative<MatchCidr>(match.matcher) ||
                              std::holds_alternative<MatchCidrs>(match.matcher);
      if (in_network) value = draw_address();
      if (const auto* in = std::get_if<MatchIn>(&match.matcher)) value = *one_of(in->values);
      if (const auto* suffix = std::get_if<MatchSuffix>(&match.matcher)) value += suffix->suffix;
      if (const auto* path = std::get_if<MatchPath>(&match.matcher)) {
        value = path->path + *one_of<std::string>({"", "/", "//", "/x", "/../a", "?q", "x"});
      }
      if (std::holds_alternative<MatchNumber>(match.matcher)) {
        value = std::to_string(*between(0, 12));
      }
      asked.texts.emplace_back(match.key, value);
    }
    for (const std::string& key : rule.key) {
      if (*chance(80)) asked.texts.emplace_back(key, draw_text());
    }
  }
  const int entries = *one_of<int>({3, 1, 5, 2, 0, 8});
  for (int i = 0; i < entries; ++i) {
    std::string key = *chance(90) ? draw_key() : "nobody asks";
    const bool address = *chance(key == "ip" ? 80 : 10);
    std::string value = address ? draw_address() : draw_text();
    if (!address && *chance(30)) value += draw_text();
    asked.texts.emplace_back(std::move(key), std::move(value));
  }
  return asked;
}

template <typename Kind>
bool has(const Rule& rule) {
  return std::any_of(rule.match.begin(), rule.match.end(), [](const Match& match) {
    return std::holds_alternative<Kind>(match.matcher);
  });
}

bool nested(const MatchCidr& outer, const MatchCidr& inner) {
  const auto bit = [](const MatchCidr& cidr, unsigned at) {
    return cidr.network[at / 8] >> (7 - at % 8) & 1;
  };
  for (unsigned at = 0; at < outer.bits; ++at) {
    if (at >= inner.bits || bit(outer, at) != bit(inner, at)) return false;
  }
  return true;
}

/// Which kinds of prefixes and networks met in one request.
void note_pairs(const std::vector<const Match*>& met) {
  for (const Match* one : met) {
    for (const Match* other : met) {
      if (one == other || one->key != other->key) continue;
      const auto* prefix = std::get_if<MatchPrefix>(&one->matcher);
      const auto* longer = std::get_if<MatchPrefix>(&other->matcher);
      if (prefix != nullptr && longer != nullptr) {
        reached("nested prefixes", prefix->prefix.size() < longer->prefix.size());
      }
      const auto* outer = std::get_if<MatchCidr>(&one->matcher);
      const auto* inner = std::get_if<MatchCidr>(&other->matcher);
      if (outer != nullptr && inner != nullptr) {
        reached("equal networks", *outer == *inner);
        reached("nested networks", outer->bits < inner->bits && nested(*outer, *inner));
      }
    }
  }
}

LAW(42, "the index finds exactly the rules that a scan finds, in rule order", "nothing found",
    "so many found that no comparison sorts them", "a list that is short", "nested prefixes",
    "an empty prefix", "nested networks", "equal networks", "an IPv4 address in IPv6 text",
    "an IPv6 address", "an entry that is no address", "an absent entry", "any value",
    "a doubled key that decides", "several domains", "an unknown domain", "a rule without matchers",
    "a missing key entry", "a rule with several matchers", "an entry called domain",
    "what must not hold", "a list of values", "a list of networks", "the end of a value",
    "a pattern", "a path", "a number", "several lists") {
  const std::vector<Rule> rules = draw_rules();
  const RuleIndex index(rules);
  std::vector<std::uint32_t> found;
  const int requests = *one_of<int>({12, 1, 4});
  for (int i = 0; i < requests; ++i) {
    const Asked asked = draw_request(rules);
    RC_LOG() << "domain " << asked.domain << '\n';
    std::vector<Entry> descriptor;
    for (const auto& [key, value] : asked.texts) {
      descriptor.push_back({key, value});
      RC_LOG() << key << '=' << value << '\n';
    }
    const Request request{asked.domain, descriptor, 1};
    std::vector<std::uint32_t> expected;
    std::vector<const Match*> met;
    for (std::uint32_t at = 0; at < rules.size(); ++at) {
      const Rule& rule = rules[at];
      if (rule.domain != request.domain) {
        reached("several domains", rule.matches(request));
        continue;
      }
      if (!rule.matches(request)) {
        Rule without_key = rule;
        without_key.key.clear();
        reached("a missing key entry", without_key.matches(request));
        continue;
      }
      expected.push_back(at);
      reached("a rule without matchers", rule.match.empty());
      reached("a rule with several matchers", rule.match.size() > 2);
      reached("an absent entry", has<MatchAbsent>(rule));
      reached("any value", has<MatchAny>(rule));
      for (const Match& match : rule.match) {
        met.push_back(&match);
        reached("what must not hold", match.negated);
        if (match.negated) continue;
        reached("a list of values", std::holds_alternative<MatchIn>(match.matcher));
        reached("a list of networks", std::holds_alternative<MatchCidrs>(match.matcher));
        reached("several lists", has<MatchIn>(rule) && has<MatchCidrs>(rule));
        reached("the end of a value", std::holds_alternative<MatchSuffix>(match.matcher));
        reached("a pattern", std::holds_alternative<MatchGlob>(match.matcher));
        reached("a path", std::holds_alternative<MatchPath>(match.matcher));
        reached("a number", std::holds_alternative<MatchNumber>(match.matcher));
        const auto* prefix = std::get_if<MatchPrefix>(&match.matcher);
        reached("an empty prefix", prefix != nullptr && prefix->prefix.empty());
        reached("an entry called domain",
                match.key == "domain" && std::holds_alternative<MatchExact>(match.matcher));
        if (!std::holds_alternative<MatchCidr>(match.matcher) || match.negated) continue;
        const std::string_view text = *request.find(match.key);
        reached("an IPv4 address in IPv6 text", text == "::ffff:10.1.2.3");
        reached("an IPv6 address", text.starts_with("2001"));
      }
    }
    note_pairs(met);

    found.clear();
    const bool appends = *chance(30);
    if (appends) found = {7, 3};
    index.match(request, found);
    if (appends) expected.insert(expected.begin(), {7, 3});
    RC_ASSERT(found == expected);

    reached("nothing found", found.empty());
    reached("so many found that no comparison sorts them", !appends && expected.size() >= 64);
    reached("a list that is short", !rules.empty() && rules.size() <= RuleIndex::kScanned);
    reached("an unknown domain", std::none_of(rules.begin(), rules.end(), [&](const Rule& rule) {
              return rule.domain == request.domain;
            }));
    reached("an entry that is no address",
            request.find("ip") != nullptr && !parse_cidr(*request.find("ip")) && !rules.empty());
    std::vector<Entry> reversed(descriptor.rbegin(), descriptor.rend());
    const Request other{request.domain, reversed, 1};
    std::vector<std::uint32_t> otherwise;
    index.match(other, otherwise);
    reached("a doubled key that decides", !appends && otherwise != found);
  }
}

/// What docs/rules.md says that counts belong to.
auto counted_apart_by(const Rule& rule) {
  const bool sliding = rule.algorithm == Algorithm::sliding_window;
  std::vector<KeyForm> forms;
  for (std::size_t i = 0; i < rule.key.size(); ++i) forms.push_back(rule.key_form(i));
  return std::tuple(rule.domain, rule.name, rule.key, forms, rule.algorithm,
                    rule.calendar ? std::string(to_string(rule.calendar->unit)) : std::string(),
                    rule.calendar ? rule.calendar->time_zone : std::string(),
                    rule.calendar ? Nanos{0} : rule.window, sliding ? rule.slots : 0,
                    sliding && rule.strict, rule.phase, rule.enforcement == Enforcement::escrow);
}

KeyForm draw_form() {
  return *one_of<KeyForm>({{},
                           {},
                           {KeyForm::Kind::lower, 32, 128, 0, false},
                           {KeyForm::Kind::address, 32, 64, 0, false},
                           {KeyForm::Kind::address, 32, 128, 0, false},
                           {KeyForm::Kind::path, 32, 128, 1, false},
                           {KeyForm::Kind::path, 32, 128, 1, true}});
}

Rule draw_identity() {
  static const std::vector<std::string> words{"escrow", "spread", "strict", "a", "0", "UTC", "day"};
  Rule rule;
  rule.domain = *one_of(words);
  rule.name = *one_of(words);
  rule.window = *one_of<Nanos>({kMinute, kHour});
  rule.algorithm = *one_of<Algorithm>(
      {Algorithm::fixed_window, Algorithm::sliding_window, Algorithm::token_bucket});
  if (rule.algorithm == Algorithm::fixed_window && *chance(30)) {
    rule.calendar = CalendarWindow{*one_of<CalendarUnit>({CalendarUnit::day, CalendarUnit::week}),
                                   *one_of<std::string>({"UTC", "escrow"}), nullptr};
  }
  if (rule.algorithm == Algorithm::sliding_window) {
    rule.slots = *between<std::uint32_t>(1, 2);
    rule.strict = *chance(30);
  }
  rule.phase = *chance(30) ? Phase::spread : Phase::aligned;
  rule.enforcement = *one_of<Enforcement>(
      {Enforcement::merged, Enforcement::merged, Enforcement::escrow, Enforcement::home});
  const int keys = *between(0, 3);
  for (int i = 0; i < keys; ++i) {
    rule.key.push_back(*one_of(words));
    rule.key_forms.push_back(draw_form());
  }
  return rule;
}

LAW(51, "two rules count in the same series exactly if all that their counts belong to is the same",
    "the same", "different", "only the enforcement differs", "an entry called escrow",
    "only how the key is counted differs", "one key begins with escrow and goes on as the other") {
  for (int i = 0; i < 40; ++i) {
    const Rule one = draw_identity();
    Rule other = *chance(70) ? one : draw_identity();
    if (*chance(70)) other.key = draw_identity().key;
    if (*chance(30)) other.key_forms = draw_identity().key_forms;
    if (*chance(40)) other.enforcement = draw_identity().enforcement;
    if (*chance(20)) {
      other.key = one.key;
      other.key.insert(other.key.begin(), "escrow");
      other.key_forms = one.key_forms;
      other.key_forms.insert(other.key_forms.begin(), KeyForm{});
      reached("one key begins with escrow and goes on as the other");
    }
    const bool same = counted_apart_by(one) == counted_apart_by(other);
    RC_ASSERT((identity(one) == identity(other)) == same);
    reached("the same", same);
    reached("different", !same);
    reached("only how the key is counted differs", !same && one.key == other.key &&
                                                       one.name == other.name &&
                                                       one.key_forms != other.key_forms);
    reached("an entry called escrow", !one.key.empty() && one.key[0] == "escrow");
    Rule turned = other;
    turned.enforcement = one.enforcement;
    reached("only the enforcement differs",
            !same && counted_apart_by(one) == counted_apart_by(turned));
  }
}

}  // namespace
}  // namespace weir::laws
