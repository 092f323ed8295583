#include <weir/limits/text/number.h>

namespace weir {

Digits parse_number(std::string_view text, std::uint64_t& out) {
  if (text.empty() || text.find_first_not_of("0123456789") != text.npos) return Digits::none;
  if (text.size() > 1 && text[0] == '0') return Digits::none;
  std::uint64_t value = 0;
  for (const char c : text) {
    if (__builtin_mul_overflow(value, 10u, &value) ||
        __builtin_add_overflow(value, static_cast<std::uint64_t>(c - '0'), &value)) {
      return Digits::too_many;
    }
  }
  out = value;
  return Digits::good;
}

}  // namespace weir
