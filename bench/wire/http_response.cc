#include <weir/bench/wire/http_response.h>

#include <charconv>
#include <stdexcept>
#include <string>

namespace weir::bench {
namespace {

bool is(std::string_view name, std::string_view lower) {
  if (name.size() != lower.size()) return false;
  for (std::size_t i = 0; i < name.size(); ++i) {
    char c = name[i];
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
    if (c != lower[i]) return false;
  }
  return true;
}

template <typename Number>
Number number(std::string_view text) {
  Number out{};
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), out);
  if (error != std::errc() || end != text.data() + text.size()) {
    throw std::runtime_error("not a number in a response: " + std::string(text.substr(0, 32)));
  }
  return out;
}

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) text.remove_prefix(1);
  while (!text.empty() && (text.back() == ' ' || text.back() == '\t')) text.remove_suffix(1);
  return text;
}

}  // namespace

std::optional<ResponseHead> read_response(std::string_view bytes) {
  std::size_t end = bytes.find("\r\n\r\n");
  if (end == std::string_view::npos) return std::nullopt;
  if (end < 12 || bytes.substr(0, 9) != "HTTP/1.1 ") {
    throw std::runtime_error("no HTTP/1.1 response: " + std::string(bytes.substr(0, 32)));
  }
  ResponseHead head{number<int>(bytes.substr(9, 3)), end + 4};
  std::string_view rest = bytes.substr(0, end);
  while (true) {
    std::size_t line_end = rest.find("\r\n");
    if (line_end == std::string_view::npos) return head;
    rest.remove_prefix(line_end + 2);
    std::size_t colon = rest.find(':');
    if (colon == std::string_view::npos) continue;
    std::string_view name = rest.substr(0, colon);
    if (is(name, "transfer-encoding")) throw std::runtime_error("a response in chunks");
    if (!is(name, "content-length")) continue;
    std::string_view value = rest.substr(colon + 1);
    head.size += number<std::size_t>(trimmed(value.substr(0, value.find("\r\n"))));
  }
}

}  // namespace weir::bench
