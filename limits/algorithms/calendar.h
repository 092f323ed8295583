#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <weir/crdt/time.h>

namespace weir {

/// Weeks begin on Monday (ISO 8601).
enum class CalendarUnit : std::uint8_t { day, week, month, year };

std::string_view to_string(CalendarUnit unit);

/// When a calendar's windows begin in one time zone, from 1970 to 2200 and one window beyond: a
/// table, made once, so that a decision reads no clock, no file and no zone. Immutable; shared
/// between threads freely. At most 0.7 MB.
///
/// A window begins at the first instant at which the zone's clock shows its first second or a later
/// one, and ends where the next begins. So where midnight is skipped the day begins with the jump,
/// where midnight occurs twice it begins with the first, and a time of day that is repeated never
/// leads back into yesterday. A day has 23 to 25 hours where clocks are changed by one; one that a
/// zone skipped (Apia's 30 December 2011) has no window.
class CalendarTable {
 public:
  /// From the system's time zone database, which later changes of zones do not reach: it is read
  /// once per zone and process. Null with `problem` set ("a time zone such as …") if `zone` is no
  /// name in it. "UTC" needs no database.
  static std::shared_ptr<const CalendarTable> load(CalendarUnit unit, std::string_view zone,
                                                   std::string& problem);

  /// Number of the window that `now` lies in, from 0 for the one that holds 1970-01-01 00:00 UTC.
  /// Instants outside [0, kMaxTime] lie in the first or the last window.
  std::int64_t index(Nanos now) const;
  /// When it begins (the first: at or before 0). Indices outside the table count as its nearest:
  /// from 0 to last() + 2.
  Nanos start(std::int64_t index) const;
  /// The number of the window that kMaxTime lies in.
  std::int64_t last() const { return static_cast<std::int64_t>(starts_.size()) - 3; }

 private:
  explicit CalendarTable(std::vector<Nanos> starts);
  std::vector<Nanos> starts_;  // rising; of windows 0 to last() + 2
  Nanos typical_ = kDay;       // length of a window, for a first guess
};

/// Windows that follow a calendar, as a rule has them.
struct CalendarWindow {
  CalendarUnit unit = CalendarUnit::day;
  std::string time_zone = "UTC";  ///< a name of the IANA database, such as "Europe/Berlin"
  std::shared_ptr<const CalendarTable> table = nullptr;  ///< set by RuleSet::make

  bool operator==(const CalendarWindow& other) const {
    return unit == other.unit && time_zone == other.time_zone;
  }
};

}  // namespace weir
