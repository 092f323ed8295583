#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace weir::node {

/// `text` with every byte that is not part of a well-formed UTF-8 sequence replaced by U+FFFD.
std::string to_valid_utf8(std::string_view text);

/// Length of the well-formed sequence at the start of `text`, which is not empty; 0 if there is none.
std::size_t utf8_sequence(std::string_view text);

/// The longest prefix of at most `max` bytes that does not cut a UTF-8 sequence in two.
std::string_view utf8_prefix(std::string_view text, std::size_t max);

}  // namespace weir::node
