#pragma once

#include <string>
#include <string_view>

namespace weir::internal {

/// Appends the one spelling of a URL's path that rules compare: what stands before `?` or `#`;
/// percent-encoded letters, digits and `-._~` decoded, the digits of other escapes in upper case
/// (RFC 3986, 6.2.2; an escaped slash stays one); no empty segment, none that is `.`, and for each
/// `..` one segment less; a slash at the beginning and at the end. With `fold_case`, A to Z in
/// lower case. What is no escape (`%zz`) stays as it is.
///
/// Linear in `path`, and at most two bytes longer. Not installed.
void append_normal_path(std::string_view path, bool fold_case, std::string& out);

/// The first `segments` of that, in lower case too if asked. No slash at the end but for "/".
void append_first_segments(std::string_view path, unsigned segments, bool fold_case,
                           std::string& out);

constexpr char lower_case(char c) {
  return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
}

}  // namespace weir::internal
