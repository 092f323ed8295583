#include <weir/limits/text/duration.h>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdint>

namespace weir {
namespace {

struct Unit {
  std::string_view name;
  Nanos length;
};
constexpr std::array<Unit, 7> kUnits = {{{"d", kDay},
                                         {"h", kHour},
                                         {"m", kMinute},
                                         {"s", kSecond},
                                         {"ms", kMillisecond},
                                         {"us", kMicrosecond},
                                         {"ns", 1}}};

}  // namespace

bool parse_duration(std::string_view text, Nanos& out) {
  if (text.empty()) return false;
  Nanos total = 0;
  std::size_t next_unit = 0;
  while (!text.empty()) {
    const std::size_t digits = std::min(text.find_first_not_of("0123456789"), text.size());
    if (digits == 0 || digits > 18) return false;
    Nanos count = 0;
    for (const char c : text.substr(0, digits)) count = count * 10 + (c - '0');
    text.remove_prefix(digits);
    const std::string_view name =
        text.substr(0, std::min(text.find_first_of("0123456789"), text.size()));
    while (next_unit < kUnits.size() && kUnits[next_unit].name != name) ++next_unit;
    if (next_unit == kUnits.size()) return false;
    const Nanos length = kUnits[next_unit++].length;
    if (count > kMaxDuration / length) return false;
    total += count * length;
    if (total > kMaxDuration) return false;
    text.remove_prefix(name.size());
  }
  if (total == 0) return false;
  out = total;
  return true;
}

std::string format_duration(Nanos duration) {
  if (duration == 0) return "0s";
  std::string out = duration < 0 ? "-" : "";
  auto rest = static_cast<std::uint64_t>(duration);
  if (duration < 0) rest = 0 - rest;
  for (const Unit& unit : kUnits) {
    const auto length = static_cast<std::uint64_t>(unit.length);
    if (rest >= length) out += fmt::format("{}{}", rest / length, unit.name);
    rest %= length;
  }
  return out;
}

}  // namespace weir
