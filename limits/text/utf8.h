#pragma once

#include <cstddef>
#include <string>
#include <string_view>

/// Text as it arrives, from files, requests and peers: what of it is UTF-8, and how it is shown.
/// Not installed.
namespace weir::internal {

/// Length of the well-formed UTF-8 sequence at the start of `text`; 0 if there is none.
std::size_t utf8_length(std::string_view text);

/// Valid UTF-8 without control characters.
bool is_clean_text(std::string_view text);

/// `text` with every byte that is not part of a well-formed sequence replaced by U+FFFD.
std::string to_valid_utf8(std::string_view text);

/// The longest prefix of at most `max` bytes that does not cut a sequence in two.
std::string_view utf8_prefix(std::string_view text, std::size_t max);

/// `text` made fit for a terminal or a log: valid UTF-8, with control characters (U+0000 to U+001F,
/// U+007F to U+009F) written as \xNN.
std::string printable(std::string_view text);

/// `text` in quotes: escaped, and cut after `most` bytes. In double quotes and not cut, YAML reads
/// it back if it is UTF-8.
std::string quoted_text(std::string_view text, char quote = '"', std::size_t most = 64);

/// How a message names an entry of what is at `path`: "path.key", with the key in quotes where it
/// is long or no clean text.
std::string field_path(std::string_view path, std::string_view key);

}  // namespace weir::internal
