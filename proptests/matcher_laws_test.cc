#include <fmt/format.h>
#include <weir/limits/limiter.h>
#include <weir/limits/rules/match.h>

#include <algorithm>
#include <cctype>
#include <regex>
#include <set>

#include "generators.h"
#include "law.h"

namespace weir::laws {
namespace {

std::string draw_from(std::vector<std::string> pieces, int most) {
  std::string out;
  for (int n = *between(0, most); n > 0; --n) out += *one_of(pieces);
  return out;
}

// Patterns: the model is the standard library's, of the same language.

std::string as_regex(const std::string& pattern) {
  std::string out;
  for (std::size_t i = 0; i < pattern.size(); ++i) {
    char c = pattern[i];
    if (c == '*' || c == '?') {
      out += c == '*' ? "[^]*" : "[^]";
      continue;
    }
    if (c == '\\' && i + 1 < pattern.size()) c = pattern[++i];
    out += "\\";
    out += fmt::format("x{:02x}", static_cast<unsigned char>(c));
  }
  return out;
}

// Paths: the model splits, decodes and walks; nothing is done in place.

std::string decoded(const std::string& text) {
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const bool escape = text[i] == '%' && i + 2 < text.size() &&
                        std::isxdigit(static_cast<unsigned char>(text[i + 1])) != 0 &&
                        std::isxdigit(static_cast<unsigned char>(text[i + 2])) != 0;
    if (!escape) {
      out += text[i];
      continue;
    }
    const auto byte = static_cast<char>(std::stoi(text.substr(i + 1, 2), nullptr, 16));
    const bool plain = std::isalnum(static_cast<unsigned char>(byte)) != 0 || byte == '-' ||
                       byte == '.' || byte == '_' || byte == '~';
    out += plain ? std::string(1, byte) : fmt::format("%{:02X}", static_cast<unsigned char>(byte));
    i += 2;
  }
  return out;
}

std::vector<std::string> segments_of(std::string path, bool fold) {
  path = path.substr(0, std::min(path.find('?'), path.find('#')));
  std::vector<std::string> out;
  std::size_t begin = 0;
  while (begin <= path.size()) {
    const std::size_t end = std::min(path.find('/', begin), path.size());
    std::string segment = decoded(path.substr(begin, end - begin));
    // What was an escape keeps its digits in upper case; letters are folded.
    if (fold) {
      for (std::size_t i = 0; i < segment.size(); ++i) {
        const bool escape = segment[i] == '%' && i + 2 < segment.size() &&
                            std::isxdigit(static_cast<unsigned char>(segment[i + 1])) != 0 &&
                            std::isxdigit(static_cast<unsigned char>(segment[i + 2])) != 0;
        if (escape) {
          i += 2;
          continue;
        }
        segment[i] = static_cast<char>(std::tolower(static_cast<unsigned char>(segment[i])));
      }
    }
    if (segment == "..") {
      if (!out.empty()) out.pop_back();
    } else if (!segment.empty() && segment != ".") {
      out.push_back(segment);
    }
    begin = end + 1;
  }
  return out;
}

// Addresses: drawn as bits and written in one of their spellings.

struct Drawn {
  std::array<std::uint8_t, 16> bits{};
  bool v4 = false;
  std::string text;
};

Drawn draw_address() {
  Drawn out;
  out.v4 = *chance(50);
  if (out.v4) {
    out.bits = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xFF, 0xFF};
    for (std::size_t i = 12; i < 16; ++i)
      out.bits[i] = *one_of<std::uint8_t>({10, 10, 0, 200, 255});
    const std::string plain =
        fmt::format("{}.{}.{}.{}", out.bits[12], out.bits[13], out.bits[14], out.bits[15]);
    out.text =
        *one_of<std::string>({plain, plain + ":4711", "::ffff:" + plain, "[::FFFF:" + plain + "]:1",
                              fmt::format("::ffff:{:x}:{:x}", out.bits[12] << 8 | out.bits[13],
                                          out.bits[14] << 8 | out.bits[15])});
    return out;
  }
  out.bits = {0x20, 0x01, 0x0d, 0xb8};
  out.bits[7] = *one_of<std::uint8_t>({0, 1});
  out.bits[8] = *one_of<std::uint8_t>({0, 0xAB});
  out.bits[15] = *one_of<std::uint8_t>({1, 2, 0xcd});
  const std::string full =
      fmt::format("2001:db8:0:{:x}:{:x}:0:0:{:x}", out.bits[7], out.bits[8] << 8, out.bits[15]);
  const std::string upper = fmt::format("2001:0DB8:0000:{:04X}:{:04X}:0000:0000:{:04X}",
                                        out.bits[7], out.bits[8] << 8, out.bits[15]);
  const std::string brief =
      fmt::format("2001:db8:0:{:x}:{:x}::{:x}", out.bits[7], out.bits[8] << 8, out.bits[15]);
  out.text = *one_of<std::string>({full, upper, brief, "[" + brief + "]", "[" + upper + "]:443"});
  return out;
}

/// What of an address counts, as text.
std::string first_bits(const Drawn& address, unsigned v4, unsigned v6) {
  const unsigned begin = address.v4 ? 96 : 0;
  std::string out = address.v4 ? "v4 " : "v6 ";
  for (unsigned bit = begin; bit < begin + (address.v4 ? v4 : v6); ++bit) {
    out += (address.bits[bit / 8] >> (7 - bit % 8) & 1) != 0 ? '1' : '0';
  }
  return out;
}

/// A matcher, a value, and whether the one holds of the other.
struct AskedOf {
  Match match;
  std::string value;
  bool holds = false;
};

void draw_pattern(AskedOf& asked) {
  const std::string pattern = draw_from({"a", "b", "*", "?", "\\*", "\\*", "\\", "."}, 6) + "b";
  asked.value = draw_from({"a", "b", "*", "\\", ".", "\n", "ab"}, 8);
  if (*chance(40)) {  // one that it may hold of
    asked.value.clear();
    for (std::size_t i = 0; i < pattern.size(); ++i) {
      const bool escaped = pattern[i] == '\\' && i + 1 < pattern.size();
      if (escaped) ++i;
      const bool wild = !escaped && (pattern[i] == '*' || pattern[i] == '?');
      asked.value += wild ? draw_from({"a", "b"}, 1) : std::string(1, pattern[i]);
    }
  }
  asked.match.matcher = MatchGlob{pattern};
  asked.holds = std::regex_match(asked.value, std::regex(as_regex(pattern)));
  reached("a pattern holds", asked.holds && pattern.find('*') != std::string::npos);
  reached("a pattern does not", !asked.holds);
  reached("an escaped star", asked.holds && pattern.find("\\*") != std::string::npos);
}

void draw_path(AskedOf& asked) {
  const std::vector<std::string> pieces{"/", "/",  "a",   "A", "b",   "%61", "%2f", "%2F",
                                        ".", "..", "%2e", "%", "%zz", "/a",  "/a/b"};
  MatchPath path{"/" + draw_from(pieces, 5), *chance(50), *chance(40)};
  asked.value = *chance(50) ? path.path : "/";
  asked.value += draw_from(pieces, 4) + *one_of<std::string>({"", "", "?a=/b", "#x", "/x/.."});
  const auto wanted = segments_of(path.path, path.ignore_case);
  const auto got = segments_of(asked.value, path.ignore_case);
  asked.holds = got.size() >= wanted.size() &&
                std::equal(wanted.begin(), wanted.end(), got.begin()) &&
                (path.below || got.size() == wanted.size());
  asked.match.matcher = path;
  reached("the same path in another spelling",
          asked.holds && !path.below && path.path != asked.value);
  reached("a path below", asked.holds && got.size() > wanted.size() && !wanted.empty());
  reached("a longer segment is no path below",
          path.below && !asked.holds && asked.value.starts_with(path.path));
  reached("a path up", asked.holds && asked.value.find("..") != std::string::npos);
  reached("letters of either case",
          asked.holds && path.ignore_case &&
              segments_of(path.path, false) != segments_of(asked.value, false));
}

void draw_number(AskedOf& asked) {
  MatchNumber number;
  number.low = *one_of<std::uint64_t>({0, 5, 100, kMax});
  number.high = std::max(number.low, *one_of<std::uint64_t>({5, 99, 1000, kMax}));
  asked.value = *one_of<std::string>({"0", "5", "99", "100", "1000", "1001", "007",
                                      "18446744073709551615", "18446744073709551616",
                                      "99999999999999999999999", "", "-5", "5.0", "x", "+5", " 5"});
  const bool digits =
      !asked.value.empty() && asked.value.find_first_not_of("0123456789") == std::string::npos;
  const bool huge = digits && asked.value.size() >= 20;
  const std::uint64_t it = !digits ? 0 : huge ? kMax : std::stoull(asked.value);
  asked.holds = digits && it >= number.low && it <= number.high;
  asked.match.matcher = number;
  reached("a number holds", asked.holds);
  reached("a number beyond 64 bits", asked.holds && asked.value.size() > 20);
  reached("no number", !digits);
}

void draw_network(AskedOf& asked) {
  const Drawn inside = draw_address();
  const unsigned bits = *one_of<unsigned>({0, 8, 24, 32, 31, 20});
  const Drawn other = draw_address();
  asked.value = other.text;
  const bool v4 = inside.v4;
  MatchCidr network{inside.bits, v4 ? 96 + bits : 4 * bits};
  for (unsigned bit = network.bits; bit < 128; ++bit) {
    network.network[bit / 8] =
        static_cast<std::uint8_t>(network.network[bit / 8] & ~(0x80u >> bit % 8));
  }
  const bool all = network.bits == 0;
  asked.holds = all || (v4 == other.v4 &&
                        first_bits(inside, bits, 4 * bits) == first_bits(other, bits, 4 * bits));
  if (*chance(50)) {
    asked.match.matcher = MatchCidrs{{*parse_cidr("192.0.2.0/24"), network}};
  } else {
    asked.match.matcher = network;
  }
  reached("an address in a network", asked.holds && !all);
  reached("an address that is in none", !asked.holds);
}

void draw_list(AskedOf& asked) {
  MatchIn in;
  for (int n = *between(1, 20); n > 0; --n) in.values.push_back(draw_from({"a", "b"}, 3));
  asked.value = draw_from({"a", "b"}, 3);
  const std::set<std::string> all(in.values.begin(), in.values.end());
  asked.holds = all.contains(asked.value);
  reached("a value of a list", asked.holds);
  asked.match.matcher = in;
}

void ask_matcher() {
  AskedOf asked{{"entry", MatchAny{}, *chance(30)}, {}, false};
  constexpr void (*kDraw[])(AskedOf&) = {draw_pattern, draw_path, draw_number, draw_network,
                                         draw_list};
  kDraw[*choice(5)](asked);
  RC_LOG() << "value " << asked.value << '\n';
  const std::string_view view = asked.value;
  RC_ASSERT(asked.match.holds(&view) == (asked.holds != asked.match.negated));
  RC_ASSERT(asked.match.holds(nullptr) == asked.match.negated);
  reached("what must not hold is not there", asked.match.negated);
}

LAW(61, "a matcher holds of the values that it says", "a pattern holds", "a pattern does not",
    "an escaped star", "the same path in another spelling", "a path below",
    "a longer segment is no path below", "a path up", "letters of either case", "a number holds",
    "a number beyond 64 bits", "no number", "an address in a network", "an address that is in none",
    "a value of a list", "what must not hold is not there") {
  for (int i = 0; i < 20; ++i) ask_matcher();
}

void count_two() {
  Rule rule;
  rule.domain = "api";
  rule.name = "r";
  rule.limit = 100;
  rule.key = {"value", "other"};
  KeyForm form;
  std::string values[2];
  bool same = false;
  switch (*choice(4)) {
    case 0: {
      form.kind = KeyForm::Kind::address;
      form.v4 = *one_of<std::uint8_t>({32, 24, 0, 31});
      form.v6 = *one_of<std::uint8_t>({128, 64, 0, 56});
      const Drawn one = draw_address();
      const Drawn two = draw_address();
      values[0] = one.text;
      values[1] = two.text;
      same = first_bits(one, form.v4, form.v6) == first_bits(two, form.v4, form.v6);
      reached("one address in two spellings", one.bits == two.bits && one.text != two.text);
      reached("two addresses of one network", same && one.bits != two.bits);
      reached("two networks", !same && one.v4 == two.v4);
      break;
    }
    case 1: {
      form.kind = KeyForm::Kind::address;
      const Drawn one = draw_address();
      const std::string bytes(one.bits.begin(), one.bits.end());
      values[0] = *one_of<std::string>({"unknown", "10.0.0.256", "", bytes, "[10.0.0.1]",
                                        "\4" + bytes, "\6" + bytes, "10.0.0.1:x"});
      values[1] = *chance(30) ? values[0] : one.text;
      same = values[0] == values[1];
      reached("a text that is no address", values[0] == "10.0.0.256" && !same);
      reached("the bytes of an address as text", values[0] == bytes && !same);
      break;
    }
    case 2:
      form.kind = KeyForm::Kind::lower;
      for (std::string& value : values) value = draw_from({"a", "A", "b", "1", "\xc3\x84"}, 2);
      same = segments_of("x" + values[0], true) == segments_of("x" + values[1], true);
      reached("two cases of a letter", same && values[0] != values[1]);
      break;
    default: {
      form.kind = KeyForm::Kind::path;
      form.segments = *between<std::uint8_t>(1, 3);
      form.ignore_case = *chance(30);
      std::vector<std::string> first[2];
      for (int i = 0; i < 2; ++i) {
        values[i] = draw_from({"/a", "/b", "/A", "/%61", "//", "/..", "/.", "?q", "/c"}, 4);
        first[i] = segments_of(values[i], form.ignore_case);
        if (first[i].size() > form.segments) first[i].resize(form.segments);
      }
      same = first[0] == first[1];
      reached("two paths with the same beginning", same && values[0] != values[1]);
      reached("two paths apart", !same);
    }
  }
  rule.key_forms = {form};
  if (*chance(30)) rule.key = {"value"};
  RC_LOG() << "values " << values[0] << " and " << values[1] << '\n';
  Limiter limiter(rule_set({rule}), {});
  const Entry one[] = {{"value", values[0]}, {"other", "x"}};
  const Entry two[] = {{"value", values[1]}, {"other", "x"}};
  const bool counted = limiter.check({"api", one, 1}, kStart).allowed;
  RC_ASSERT(counted);
  const Decision decision = limiter.check({"api", two, 1}, kStart);
  RC_ASSERT(decision.statuses.at(0).remaining == (same ? 98u : 99u));
  RC_ASSERT((limiter.series_of(0, {"api", one, 1}) == limiter.series_of(0, {"api", two, 1})) ==
            same);
}

LAW(61, "two values of a key are counted as one if they are one, and else apart",
    "one address in two spellings", "two addresses of one network", "two networks",
    "a text that is no address", "two cases of a letter", "two paths with the same beginning",
    "two paths apart", "the bytes of an address as text") {
  for (int i = 0; i < 20; ++i) count_two();
}

}  // namespace
}  // namespace weir::laws
