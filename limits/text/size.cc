#include <weir/limits/text/size.h>

#include <fmt/format.h>

#include <weir/limits/text/number.h>

namespace weir {
namespace {

struct Unit {
  std::string_view name;
  std::uint64_t bytes;
};
constexpr Unit kUnits[] = {
    {"TiB", 1ull << 40}, {"GiB", 1ull << 30}, {"MiB", 1ull << 20}, {"KiB", 1ull << 10}, {"B", 1}};

}  // namespace

bool parse_size(std::string_view text, std::uint64_t& out) {
  std::uint64_t factor = 1;
  for (const Unit& unit : kUnits) {
    if (text.ends_with(unit.name)) {
      text.remove_suffix(unit.name.size());
      factor = unit.bytes;
      break;
    }
  }
  std::uint64_t count = 0;
  if (parse_number(text, count) != Digits::good) return false;
  if (count > (1ull << 63) / factor) return false;
  out = count * factor;
  return true;
}

std::string format_size(std::uint64_t bytes) {
  for (const Unit& unit : kUnits) {
    if (bytes != 0 && unit.bytes > 1 && bytes % unit.bytes == 0) {
      return fmt::format("{}{}", bytes / unit.bytes, unit.name);
    }
  }
  return fmt::format("{}", bytes);
}

}  // namespace weir
