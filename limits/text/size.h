#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace weir {

/// "64GiB", "512MiB", "64KiB", "4096". False if `text` is anything else, or above 2^63.
bool parse_size(std::string_view text, std::uint64_t& out);

/// The shortest text that parse_size reads back.
std::string format_size(std::uint64_t bytes);

}  // namespace weir
