#include <weir/limits/algorithms/calendar.h>

#include <absl/strings/string_view.h>
#include <absl/time/civil_time.h>
#include <absl/time/time.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include <weir/limits/text/utf8.h>

namespace weir {
namespace {

constexpr std::size_t kMaxZoneName = 64;

/// A name that means the same on every node, and stays within the database's folder. "localtime" is
/// the machine's own zone, "right/…" counts leap seconds.
bool is_zone_name(std::string_view name) {
  const auto allowed = [](char c) {
    return (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_' ||
           c == '+' || c == '-' || c == '/';
  };
  return !name.empty() && name.size() <= kMaxZoneName && name[0] != '/' && name != "localtime" &&
         name != "posixrules" && !name.starts_with("right/") &&
         std::all_of(name.begin(), name.end(), allowed);
}

/// The first instant at which the zone's clock shows `first` or a later second.
Nanos reached_at(const absl::TimeZone& zone, absl::CivilSecond first) {
  const absl::TimeZone::TimeInfo info = zone.At(first);
  const bool skipped = info.kind == absl::TimeZone::TimeInfo::SKIPPED;
  return absl::ToUnixNanos(skipped ? info.trans : info.pre);
}

absl::CivilDay first_day(CalendarUnit unit) {
  // At 0 UTC no zone was two days away from 1 January 1970, a Thursday.
  switch (unit) {
    case CalendarUnit::day:
      return absl::CivilDay(1969, 12, 30);
    case CalendarUnit::week:
      return absl::CivilDay(1969, 12, 22);
    case CalendarUnit::month:
      return absl::CivilDay(1969, 12, 1);
    case CalendarUnit::year:
      break;
  }
  return absl::CivilDay(1969, 1, 1);
}

absl::CivilDay next_day(CalendarUnit unit, absl::CivilDay day) {
  switch (unit) {
    case CalendarUnit::day:
      return day + 1;
    case CalendarUnit::week:
      return day + 7;
    case CalendarUnit::month:
      return absl::CivilDay(absl::CivilMonth(day) + 1);
    case CalendarUnit::year:
      break;
  }
  return absl::CivilDay(absl::CivilYear(day) + 1);
}

}  // namespace

std::string_view to_string(CalendarUnit unit) {
  switch (unit) {
    case CalendarUnit::day:
      return "day";
    case CalendarUnit::week:
      return "week";
    case CalendarUnit::month:
      return "month";
    case CalendarUnit::year:
      return "year";
  }
  return "unknown";
}

CalendarTable::CalendarTable(std::vector<Nanos> starts) : starts_(std::move(starts)) {
  typical_ = (starts_.back() - starts_.front()) / static_cast<Nanos>(starts_.size() - 1);
}

std::shared_ptr<const CalendarTable> CalendarTable::load(CalendarUnit unit, std::string_view zone,
                                                         std::string& problem) {
  absl::TimeZone found;
  if (!is_zone_name(zone) ||
      !absl::LoadTimeZone(absl::string_view(zone.data(), zone.size()), &found)) {
    problem =
        fmt::format("a time zone of the system's database, such as UTC or Europe/Berlin, got {}",
                    internal::quoted_text(zone));
    return nullptr;
  }
  std::vector<Nanos> starts;
  int beyond = 0;
  for (absl::CivilDay day = first_day(unit); beyond < 2; day = next_day(unit, day)) {
    const Nanos start = reached_at(found, absl::CivilSecond(day));
    if (start <= 0) {
      starts.assign(1, start);
    } else if (start > starts.back()) {  // else the day before was skipped whole
      starts.push_back(start);
      if (start > kMaxTime) ++beyond;
    }
  }
  return std::shared_ptr<const CalendarTable>(new CalendarTable(std::move(starts)));
}

std::int64_t CalendarTable::index(Nanos now) const {
  now = std::clamp<Nanos>(now, 0, kMaxTime);
  // Off by a few hours of clock changes, days of months, or a skipped day: by one window or two.
  std::int64_t at = std::min((now - starts_.front()) / typical_, last());
  while (start(at) > now) --at;
  while (start(at + 1) <= now) ++at;
  return at;
}

Nanos CalendarTable::start(std::int64_t index) const {
  return starts_[static_cast<std::size_t>(std::clamp<std::int64_t>(index, 0, last() + 2))];
}

}  // namespace weir
