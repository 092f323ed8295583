#pragma once

#include <cstdint>
#include <limits>
#include <string_view>

namespace weir::internal {

/// Reads a whole number in decimal digits, zeros in front included; one above 2^64 - 1 is read as
/// that. False if it is none. Not installed.
inline bool read_number(std::string_view text, std::uint64_t& out) {
  constexpr std::uint64_t kMost = std::numeric_limits<std::uint64_t>::max();
  if (text.empty()) return false;
  out = 0;
  for (const char c : text) {
    if (c < '0' || c > '9') return false;
    const auto digit = static_cast<std::uint64_t>(c - '0');
    out = out > (kMost - digit) / 10 ? kMost : out * 10 + digit;
  }
  return true;
}

}  // namespace weir::internal
