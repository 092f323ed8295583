#include <weir/limits/matching/path.h>

#include <cstddef>

namespace weir::internal {
namespace {

/// Of a hexadecimal digit; -1 of anything else.
int digit_of(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  const char low = lower_case(c);
  return low >= 'a' && low <= 'f' ? low - 'a' + 10 : -1;
}

bool is_unreserved(char c) {
  const char low = lower_case(c);
  return (low >= 'a' && low <= 'z') || (c >= '0' && c <= '9') || c == '-' || c == '.' || c == '_' ||
         c == '~';
}

constexpr std::string_view kHex = "0123456789ABCDEF";

/// Takes the segment off that begins at `from` in `out`, if it says no more than where it stands.
/// `start`: of the path in `out`, whose first byte is a slash.
void end_segment(std::size_t start, std::size_t& from, std::string& out) {
  const std::string_view segment = std::string_view(out).substr(from);
  if (segment.empty()) return;
  if (segment == ".") {
    out.resize(from);
  } else if (segment == "..") {
    out.resize(from);
    // The slash at the beginning stays.
    if (from > start + 1) out.resize(out.rfind('/', from - 2) + 1);
    from = out.size();
  } else {
    out += '/';
    from = out.size();
  }
}

}  // namespace

void append_normal_path(std::string_view path, bool fold_case, std::string& out) {
  path = path.substr(0, path.find_first_of("?#"));
  const std::size_t start = out.size();
  out += '/';
  std::size_t from = out.size();
  for (std::size_t i = 0; i < path.size(); ++i) {
    char c = path[i];
    if (c == '/') {
      end_segment(start, from, out);
      continue;
    }
    const int high = c == '%' && i + 2 < path.size() ? digit_of(path[i + 1]) : -1;
    const int low = high >= 0 ? digit_of(path[i + 2]) : -1;
    if (low >= 0) {
      i += 2;
      c = static_cast<char>(high * 16 + low);
      if (!is_unreserved(c)) {
        out += '%';
        out += kHex[static_cast<std::size_t>(high)];
        out += kHex[static_cast<std::size_t>(low)];
        continue;
      }
    }
    out += fold_case ? lower_case(c) : c;
  }
  end_segment(start, from, out);
}

void append_first_segments(std::string_view path, unsigned segments, bool fold_case,
                           std::string& out) {
  const std::size_t start = out.size();
  append_normal_path(path, fold_case, out);
  std::size_t end = start;
  for (unsigned i = 0; i < segments && end != std::string::npos; ++i) end = out.find('/', end + 1);
  if (end != std::string::npos) out.resize(end == start ? start + 1 : end);
  if (out.size() > start + 1 && out.back() == '/') out.pop_back();
}

}  // namespace weir::internal
