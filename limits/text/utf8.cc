#include <weir/limits/text/utf8.h>

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>

namespace weir::internal {
namespace {

std::uint8_t byte_at(std::string_view text, std::size_t i) {
  return static_cast<std::uint8_t>(text[i]);
}

bool is_continuation(char c) {
  return (static_cast<std::uint8_t>(c) & 0xC0u) == 0x80u;
}

bool is_control(std::string_view character) {
  const std::uint8_t first = byte_at(character, 0);
  if (first < 0x20 || first == 0x7F) return true;
  // U+0080 to U+009F.
  return first == 0xC2 && byte_at(character, 1) < 0xA0;
}

/// The code of a control character, or a byte that is no UTF-8, as \xNN.
void escape(std::string& out, std::string_view character) {
  out += fmt::format("\\x{:02x}", byte_at(character, character.size() - 1));
}

}  // namespace

std::size_t utf8_length(std::string_view text) {
  if (text.empty()) return 0;
  const std::uint8_t first = byte_at(text, 0);
  if (first < 0x80) return 1;
  // The second byte's range rules out overlong forms, surrogates and what lies above U+10FFFF.
  std::size_t length = 0;
  std::uint8_t low = 0x80;
  std::uint8_t high = 0xBF;
  if (first >= 0xC2 && first <= 0xDF) {
    length = 2;
  } else if (first >= 0xE0 && first <= 0xEF) {
    length = 3;
    if (first == 0xE0) low = 0xA0;
    if (first == 0xED) high = 0x9F;
  } else if (first >= 0xF0 && first <= 0xF4) {
    length = 4;
    if (first == 0xF0) low = 0x90;
    if (first == 0xF4) high = 0x8F;
  }
  if (length == 0 || text.size() < length) return 0;
  if (byte_at(text, 1) < low || byte_at(text, 1) > high) return 0;
  for (std::size_t i = 2; i < length; ++i) {
    if (!is_continuation(text[i])) return 0;
  }
  return length;
}

bool is_clean_text(std::string_view text) {
  while (!text.empty()) {
    const std::size_t length = utf8_length(text);
    if (length == 0) return false;
    const std::uint8_t first = byte_at(text, 0);
    if (first < 0x20 || first == 0x7F) return false;
    text.remove_prefix(length);
  }
  return true;
}

std::string to_valid_utf8(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const std::size_t length = utf8_length(text);
    if (length == 0) {
      out += "\xEF\xBF\xBD";
      text.remove_prefix(1);
    } else {
      out.append(text.substr(0, length));
      text.remove_prefix(length);
    }
  }
  return out;
}

std::string_view utf8_prefix(std::string_view text, std::size_t max) {
  if (text.size() <= max) return text;
  std::size_t end = max;
  // At most three continuation bytes belong to one sequence; more are garbage and may be cut.
  for (int i = 0; i < 3 && end > 0 && is_continuation(text[end]); ++i) --end;
  return text.substr(0, is_continuation(text[end]) ? max : end);
}

std::string printable(std::string_view text) {
  const std::string valid = to_valid_utf8(text);
  std::string out;
  out.reserve(valid.size());
  for (std::string_view left = valid; !left.empty();) {
    const std::string_view character = left.substr(0, utf8_length(left));
    if (is_control(character)) {
      escape(out, character);
    } else {
      out += character;
    }
    left.remove_prefix(character.size());
  }
  return out;
}

std::string quoted_text(std::string_view text, char quote, std::size_t most) {
  std::string out(1, quote);
  std::size_t shown = 0;
  while (!text.empty() && shown < most) {
    const std::size_t length = utf8_length(text);
    const std::string_view character = text.substr(0, std::max<std::size_t>(length, 1));
    if (length == 0 || is_control(character)) {
      escape(out, character);
    } else {
      if (character[0] == quote || character[0] == '\\') out += '\\';
      out += character;
    }
    text.remove_prefix(character.size());
    shown += character.size();
  }
  out += quote;
  if (!text.empty()) out += "...";
  return out;
}

std::string field_path(std::string_view path, std::string_view key) {
  constexpr std::size_t kLongest = 64;
  const bool plain = key.size() <= kLongest && is_clean_text(key);
  const std::string name = plain ? std::string(key) : quoted_text(key);
  return path.empty() ? name : fmt::format("{}.{}", path, name);
}

}  // namespace weir::internal
