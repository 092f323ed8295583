#include <weir/limits/algorithms/calendar.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ctime>

#include <weir/limits/algorithms/window.h>

namespace weir {
namespace {

/// A time in UTC.
Nanos utc(int year, int month, int day, int hour = 0, int minute = 0) {
  std::tm tm{};
  tm.tm_year = year - 1900;
  tm.tm_mon = month - 1;
  tm.tm_mday = day;
  tm.tm_hour = hour;
  tm.tm_min = minute;
  return static_cast<Nanos>(timegm(&tm)) * kSecond;
}

std::shared_ptr<const CalendarTable> load(CalendarUnit unit, std::string_view zone) {
  std::string problem;
  auto table = CalendarTable::load(unit, zone, problem);
  EXPECT_NE(table, nullptr) << problem;
  return table;
}

/// The window that holds `now`, which a window's first and last nanosecond agree on.
crdt::Epoch window_at(CalendarUnit unit, std::string_view zone, Nanos now) {
  auto table = load(unit, zone);
  std::int64_t index = table->index(now);
  crdt::Epoch out{table->start(index), table->start(index + 1)};
  EXPECT_LE(out.start, now);
  EXPECT_GT(out.expiry, now);
  EXPECT_EQ(table->index(std::max<Nanos>(out.start, 0)), index);
  EXPECT_EQ(table->index(out.expiry - 1), index);
  EXPECT_EQ(table->index(out.expiry), index + 1);
  return out;
}

using enum CalendarUnit;

TEST(Calendar, UtcDaysAreTheFixedOnes) {
  auto table = load(day, "UTC");
  EXPECT_EQ(table->index(0), 0);
  EXPECT_EQ(table->start(0), 0);
  for (Nanos now : {kDay - 1, kDay, 20'000 * kDay + 5, kMaxTime}) {
    EXPECT_EQ(table->index(now), now / kDay);
    EXPECT_EQ(table->start(now / kDay), now / kDay * kDay);
  }
}

TEST(Calendar, WeeksBeginOnMonday) {
  EXPECT_EQ(window_at(week, "UTC", utc(2025, 7, 17)),
            (crdt::Epoch{utc(2025, 7, 14), utc(2025, 7, 21)}));
  EXPECT_EQ(load(week, "UTC")->start(0), -3 * kDay);
}

TEST(Calendar, MonthsAndYearsAreAsLongAsTheyAre) {
  auto months = [](int year, int month) {
    crdt::Epoch epoch = window_at(month == 0 ? CalendarUnit::year : CalendarUnit::month, "UTC",
                                  utc(year, std::max(month, 1), 1));
    return (epoch.expiry - epoch.start) / kDay;
  };
  EXPECT_EQ(months(2023, 2), 28);
  EXPECT_EQ(months(2024, 2), 29);
  EXPECT_EQ(months(2100, 2), 28);
  EXPECT_EQ(months(2025, 4), 30);
  EXPECT_EQ(months(2025, 12), 31);
  EXPECT_EQ(months(2023, 0), 365);
  EXPECT_EQ(months(2000, 0), 366);
  EXPECT_EQ(months(2100, 0), 365);
}

TEST(Calendar, DaysOf23And25Hours) {
  EXPECT_EQ(window_at(day, "Europe/Berlin", utc(2025, 3, 30, 12)),
            (crdt::Epoch{utc(2025, 3, 29, 23), utc(2025, 3, 30, 22)}));
  EXPECT_EQ(window_at(day, "Europe/Berlin", utc(2025, 10, 26, 12)),
            (crdt::Epoch{utc(2025, 10, 25, 22), utc(2025, 10, 26, 23)}));
  EXPECT_EQ(window_at(month, "Europe/Berlin", utc(2025, 3, 30)),
            (crdt::Epoch{utc(2025, 2, 28, 23), utc(2025, 3, 31, 22)}));
}

TEST(Calendar, WhereMidnightIsSkippedTheDayBeginsWithTheJump) {
  // Clocks went from 0:00 to 1:00.
  EXPECT_EQ(window_at(day, "America/Sao_Paulo", utc(2018, 11, 4, 12)),
            (crdt::Epoch{utc(2018, 11, 4, 3), utc(2018, 11, 5, 2)}));
}

TEST(Calendar, WhereMidnightOccursTwiceTheDayBeginsWithTheFirst) {
  // Back from 1:00 to 0:00.
  EXPECT_EQ(window_at(day, "America/Havana", utc(2024, 11, 3, 12)),
            (crdt::Epoch{utc(2024, 11, 3, 4), utc(2024, 11, 4, 5)}));
  // Back from 0:01 to 23:01 of the day before, which has begun to be over.
  EXPECT_EQ(window_at(day, "America/St_Johns", utc(2006, 10, 29, 12)),
            (crdt::Epoch{utc(2006, 10, 29, 2, 30), utc(2006, 10, 30, 3, 30)}));
  // Back from 0:00 to 23:00: the only midnight is an hour later.
  EXPECT_EQ(window_at(day, "America/Sao_Paulo", utc(2018, 2, 17, 12)),
            (crdt::Epoch{utc(2018, 2, 17, 2), utc(2018, 2, 18, 3)}));
}

TEST(Calendar, ASkippedDayHasNoWindow) {
  // Apia went from 29 to 31 December 2011.
  EXPECT_EQ(window_at(day, "Pacific/Apia", utc(2011, 12, 30)),
            (crdt::Epoch{utc(2011, 12, 29, 10), utc(2011, 12, 30, 10)}));
  EXPECT_EQ(window_at(day, "Pacific/Apia", utc(2011, 12, 30, 10)),
            (crdt::Epoch{utc(2011, 12, 30, 10), utc(2011, 12, 31, 10)}));
}

TEST(Calendar, OffsetsBelowAnHourAndTheFarFuture) {
  EXPECT_EQ(window_at(day, "Asia/Kathmandu", utc(2025, 1, 2)).start, utc(2025, 1, 1, 18, 15));
  // Behind the transitions that a zone's file lists one by one.
  EXPECT_EQ(window_at(day, "Europe/Berlin", utc(2150, 7, 1, 12)).start, utc(2150, 6, 30, 22));
  EXPECT_EQ(window_at(day, "Europe/Berlin", utc(2150, 1, 1, 12)).start, utc(2149, 12, 31, 23));
}

TEST(Calendar, TheTableCoversEveryPointInTime) {
  for (CalendarUnit unit : {day, week, month, year}) {
    for (std::string_view zone : {"UTC", "Pacific/Kiritimati", "Pacific/Pago_Pago", "Asia/Tokyo"}) {
      auto table = load(unit, zone);
      EXPECT_EQ(table->index(0), 0);
      EXPECT_LE(table->start(0), 0);
      EXPECT_GT(table->start(1), 0);
      EXPECT_EQ(table->index(kMaxTime), table->last());
      EXPECT_GT(table->start(table->last() + 1), kMaxTime);
      EXPECT_GT(table->start(table->last() + 2), table->start(table->last() + 1));
      // Outside of it: its ends.
      EXPECT_EQ(table->index(-kDay), 0);
      EXPECT_EQ(table->index(kNever), table->last());
      EXPECT_EQ(table->start(-5), table->start(0));
      EXPECT_EQ(table->start(kMaxTime), table->start(table->last() + 2));
    }
  }
}

TEST(Calendar, EpochsAreValidAndLiveForTheirWindow) {
  WindowShape shape;
  auto table = load(year, "Asia/Tokyo");
  shape.calendar = table.get();
  EXPECT_EQ(shape.epoch(0), (crdt::Epoch{0, utc(1970, 12, 31, 15)}));
  EXPECT_EQ(shape.epoch(54), (crdt::Epoch{utc(2023, 12, 31, 15), utc(2024, 12, 31, 15)}));
  EXPECT_TRUE(crdt::valid_epoch(shape.epoch(54)));
  EXPECT_TRUE(crdt::valid_epoch(shape.epoch(table->last())));
}

TEST(Calendar, AZoneThatIsNotThere) {
  for (std::string_view zone :
       {"Europe/Atlantis", "", "localtime", "/usr/share/zoneinfo/UTC", "../zoneinfo/UTC", "Europe",
        "Europe/Berlin ", "europe\nberlin", "Fixed/UTC+01:00:00", "zone.tab", "right/UTC"}) {
    std::string problem;
    EXPECT_EQ(CalendarTable::load(day, zone, problem), nullptr) << zone;
    EXPECT_THAT(problem, testing::StartsWith("a time zone of the system's database"));
  }
}

TEST(Calendar, AWaitEndsWithTheWindow) {
  WindowShape shape;
  auto table = load(day, "Europe/Berlin");
  shape.calendar = table.get();
  Nanos noon = utc(2025, 10, 26, 11);
  std::int64_t today = shape.index(noon);
  auto full = [&](std::int64_t index) -> std::uint64_t { return index == today ? 10 : 0; };
  Verdict denied = evaluate_window(shape, 10, noon, 1, today, full);
  EXPECT_FALSE(denied.allowed);
  EXPECT_EQ(denied.retry_after, 12 * kHour);
  EXPECT_EQ(denied.reset, 12 * kHour);
  EXPECT_EQ(evaluate_window(shape, 10, noon, 11, today, full).retry_after, kNever);
  EXPECT_EQ(window_used(shape, noon, full), 10u);
  // A peer's clock is ahead: tomorrow is full as well, for 24 hours.
  auto both = [&](std::int64_t index) -> std::uint64_t {
    return index == today || index == today + 1 ? 10 : 0;
  };
  EXPECT_EQ(evaluate_window(shape, 10, noon, 1, today + 1, both).retry_after, 36 * kHour);
}

}  // namespace
}  // namespace weir
