#pragma once

#include <cstdint>
#include <string_view>

namespace weir {

enum class Digits : std::uint8_t { none, too_many, good };

/// A whole number as it is written everywhere: decimal digits only, without a sign or a zero in
/// front. `none`: it is something else; `too_many`: it is 2^64 or more. `out` is set only if good.
Digits parse_number(std::string_view text, std::uint64_t& out);

}  // namespace weir
