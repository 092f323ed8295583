#include <weir/limits/rules/match.h>

#include <algorithm>
#include <cstring>

#include <weir/limits/matching/address.h>
#include <weir/limits/matching/number.h>
#include <weir/limits/matching/path.h>

namespace weir {
namespace {

using internal::Address;

bool bits_behind(const MatchCidr& cidr) {
  Address masked = cidr.network;
  internal::mask_address(masked, cidr.bits);
  return masked != cidr.network;
}

bool contains(const MatchCidr& cidr, const Address& address) {
  const unsigned bits = std::min(cidr.bits, 128u);
  const unsigned whole = bits / 8;
  if (std::memcmp(cidr.network.data(), address.data(), whole) != 0) return false;
  const unsigned rest = bits % 8;
  return rest == 0 || (cidr.network[whole] ^ address[whole]) >> (8 - rest) == 0;
}

/// A pattern's next byte, of which a backslash is taken off; `wild` where it is `*` or `?`.
struct PatternByte {
  char byte = 0;
  bool wild = false;
  std::size_t size = 1;
};

PatternByte pattern_byte(std::string_view pattern, std::size_t at) {
  const char c = pattern[at];
  if (c == '\\' && at + 1 < pattern.size()) return {pattern[at + 1], false, 2};
  return {c, c == '*' || c == '?', 1};
}

/// What stands behind the last star may be tried at every byte: at most pattern times value steps,
/// and a pattern is short (kMaxPattern).
bool glob_matches(std::string_view pattern, std::string_view value) {
  constexpr std::size_t kNone = std::string_view::npos;
  std::size_t p = 0;
  std::size_t v = 0;
  std::size_t star = kNone;  // behind the last one
  std::size_t tried = 0;     // where what follows it was tried last
  while (v < value.size() || p < pattern.size()) {
    if (p < pattern.size()) {
      const PatternByte next = pattern_byte(pattern, p);
      if (next.wild && next.byte == '*') {
        star = ++p;
        tried = v;
        continue;
      }
      if (v < value.size() && (next.wild || next.byte == value[v])) {
        p += next.size;
        ++v;
        continue;
      }
    }
    if (star == kNone || tried >= value.size()) return false;
    p = star;
    v = ++tried;
  }
  return true;
}

bool path_matches(const MatchPath& match, std::string_view value) {
  thread_local std::string path;
  path.clear();
  internal::append_normal_path(match.path, match.ignore_case, path);
  const std::size_t wanted = path.size();
  internal::append_normal_path(value, match.ignore_case, path);
  const std::string_view got = std::string_view(path).substr(wanted);
  const std::string_view want = std::string_view(path).substr(0, wanted);
  return match.below ? got.starts_with(want) : got == want;
}

/// Of an entry that is there.
struct HoldsOf {
  std::string_view value;

  bool operator()(const MatchExact& m) const { return value == m.value; }
  bool operator()(const MatchPrefix& m) const { return value.starts_with(m.prefix); }
  bool operator()(const MatchSuffix& m) const { return value.ends_with(m.suffix); }
  bool operator()(const MatchAny&) const { return true; }
  bool operator()(const MatchAbsent&) const { return false; }
  bool operator()(const MatchCidr& m) const {
    Address address{};
    return internal::read_address(value, address) && contains(m, address);
  }
  bool operator()(const MatchIn& m) const {
    return std::find(m.values.begin(), m.values.end(), value) != m.values.end();
  }
  bool operator()(const MatchCidrs& m) const {
    Address address{};
    return internal::read_address(value, address) &&
           std::any_of(m.networks.begin(), m.networks.end(),
                       [&](const MatchCidr& each) { return contains(each, address); });
  }
  bool operator()(const MatchGlob& m) const { return glob_matches(m.pattern, value); }
  bool operator()(const MatchPath& m) const { return path_matches(m, value); }
  bool operator()(const MatchNumber& m) const {
    std::uint64_t number = 0;
    return internal::read_number(value, number) && number >= m.low && number <= m.high;
  }
};

}  // namespace

bool Match::holds(const std::string_view* value) const {
  const bool held = value == nullptr ? std::holds_alternative<MatchAbsent>(matcher)
                                     : std::visit(HoldsOf{*value}, matcher);
  return held != negated;
}

std::optional<MatchCidr> parse_cidr(std::string_view text) {
  const std::size_t slash = text.find('/');
  MatchCidr cidr;
  bool is_ipv4 = false;
  if (!internal::parse_address(text.substr(0, slash), cidr.network, is_ipv4)) return std::nullopt;
  const unsigned width = is_ipv4 ? 32 : 128;
  unsigned bits = width;
  if (slash != std::string_view::npos) {
    const std::string_view digits = text.substr(slash + 1);
    if (digits.empty() || digits.size() > 3 || (digits.size() > 1 && digits[0] == '0')) {
      return std::nullopt;
    }
    bits = 0;
    for (const char c : digits) {
      if (c < '0' || c > '9') return std::nullopt;
      bits = bits * 10 + static_cast<unsigned>(c - '0');
    }
    if (bits > width) return std::nullopt;
  }
  cidr.bits = bits + (128 - width);
  if (bits_behind(cidr)) return std::nullopt;
  return cidr;
}

void append_key_value(const KeyForm& form, std::string_view value, std::string& out) {
  switch (form.kind) {
    case KeyForm::Kind::plain:
      out += value;
      return;
    case KeyForm::Kind::lower:
      for (const char c : value) out += internal::lower_case(c);
      return;
    case KeyForm::Kind::path:
      internal::append_first_segments(value, form.segments, form.ignore_case, out);
      return;
    case KeyForm::Kind::address:
      break;
  }
  Address address{};
  // One byte keeps addresses apart from texts that have the same bytes.
  if (!internal::read_address(value, address)) {
    (out += '\0') += value;
    return;
  }
  const unsigned bits = internal::is_ipv4(address) ? 96u + form.v4 : form.v6;
  // IPv4 with 0 bits is all of IPv4, and IPv6 with 0 bits all of IPv6.
  out += internal::is_ipv4(address) ? '\4' : '\6';
  internal::mask_address(address, bits);
  out.append(reinterpret_cast<const char*>(address.data()), address.size());
}

}  // namespace weir
