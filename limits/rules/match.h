#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace weir {

/// What one descriptor entry must be for a rule to apply.
struct MatchExact {
  std::string value;
  bool operator==(const MatchExact&) const = default;
};
struct MatchPrefix {
  std::string prefix;
  bool operator==(const MatchPrefix&) const = default;
};
struct MatchSuffix {
  std::string suffix;
  bool operator==(const MatchSuffix&) const = default;
};
struct MatchAny {  ///< present, with any value
  bool operator==(const MatchAny&) const = default;
};
struct MatchAbsent {  ///< not in the descriptor
  bool operator==(const MatchAbsent&) const = default;
};
/// An IPv4 or IPv6 network. IPv4 is held as ::ffff:a.b.c.d, so both compare alike; an entry whose
/// value is no address (it may stand in brackets, and with a port) does not match.
struct MatchCidr {
  std::array<std::uint8_t, 16> network{};
  unsigned bits = 0;  ///< of the 128
  bool operator==(const MatchCidr&) const = default;
};
/// One of several values.
struct MatchIn {
  std::vector<std::string> values;
  bool operator==(const MatchIn&) const = default;
};
/// In one of several networks.
struct MatchCidrs {
  std::vector<MatchCidr> networks;
  bool operator==(const MatchCidrs&) const = default;
};
/// A pattern that the whole value must have: `*` stands for any bytes, also none, `?` for one byte,
/// and a backslash makes the next byte stand for itself.
struct MatchGlob {
  std::string pattern;
  bool operator==(const MatchGlob&) const = default;
};
/// This path, or with `below` also what is below it, segment by segment: `/foo` is not `/foobar`.
/// Both paths are compared in one spelling (docs/rules.md, "Paths").
struct MatchPath {
  std::string path;
  bool below = false;
  bool ignore_case = false;
  bool operator==(const MatchPath&) const = default;
};
/// A whole number, in decimal digits, from `low` to `high`. One above 2^64 - 1 is taken for that.
struct MatchNumber {
  std::uint64_t low = 0;
  std::uint64_t high = std::numeric_limits<std::uint64_t>::max();
  bool operator==(const MatchNumber&) const = default;
};
using Matcher = std::variant<MatchExact, MatchPrefix, MatchAny, MatchAbsent, MatchCidr, MatchSuffix,
                             MatchIn, MatchCidrs, MatchGlob, MatchPath, MatchNumber>;

struct Match {
  std::string key;
  Matcher matcher;
  /// Holds where the matcher does not: also, but for MatchAbsent, where the entry is not there.
  bool negated = false;
  bool operator==(const Match&) const = default;

  /// `value`: of the entry; null if it is not there.
  bool holds(const std::string_view* value) const;
  /// It holds of no descriptor without the entry.
  bool needs_entry() const { return negated == std::holds_alternative<MatchAbsent>(matcher); }
};

/// Parses "10.0.0.0/8" or "2001:db8::/32" (a bare address is one host). Empty if it is neither, or
/// if bits are set behind the prefix.
std::optional<MatchCidr> parse_cidr(std::string_view text);

/// How a key's entry is counted: which values are one. Part of the series' identity.
struct KeyForm {
  enum class Kind : std::uint8_t {
    plain,    ///< as it is, byte by byte
    address,  ///< an IP address in whatever spelling; what is none, as it is
    lower,    ///< A to Z as a to z
    path,     ///< the first segments of a path, in one spelling
  };
  Kind kind = Kind::plain;
  std::uint8_t v4 = 32;       ///< address: bits of an IPv4 address that count, 0 to 32
  std::uint8_t v6 = 128;      ///< address: bits of an IPv6 address that count, 0 to 128
  std::uint8_t segments = 0;  ///< path: 1 to 64
  bool ignore_case = false;   ///< path
  bool operator==(const KeyForm&) const = default;
  auto operator<=>(const KeyForm&) const = default;
};

/// Appends what a value counts as: two values are counted as one if and only if this is the same.
/// Not for KeyForm::Kind::plain.
void append_key_value(const KeyForm& form, std::string_view value, std::string& out);

}  // namespace weir
