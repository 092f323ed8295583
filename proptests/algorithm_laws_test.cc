#include <weir/limits/replica_side.h>

#include <cstdlib>
#include <ctime>

#include <weir/limits/algorithms/log_window.h>

#include "law.h"
#include "models.h"
#include "schedules.h"

/// Laws of decisions and windows once more, for calendars, sliding logs and leaky buckets.
namespace weir::laws {
namespace {

using crdt::Cell;

constexpr crdt::Incarnation kSelf{1, 1};

Rule rule_of(Algorithm algorithm, std::uint64_t limit, Nanos window) {
  Rule rule;
  rule.domain = "api";
  rule.name = "r";
  rule.key = {"key"};
  rule.algorithm = algorithm;
  rule.limit = limit;
  rule.window = window;
  return rule;
}

struct Ask {
  std::vector<Entry> entries{{"key", "k"}};
  Request request;
  explicit Ask(std::uint64_t hits = 1) { request = {"api", entries, hits}; }
};

LimiterOptions replicated() {
  LimiterOptions options;
  options.replicated = true;
  options.incarnation = kSelf;
  return options;
}

// Calendars, against the C library's clock of the same zone.

/// Sets the process' zone; only one thread runs.
class ZoneClock {
 public:
  explicit ZoneClock(const std::string& zone) {
    setenv("TZ", zone.c_str(), 1);
    tzset();
  }
  ~ZoneClock() {
    unsetenv("TZ");
    tzset();
  }
  static std::tm at(Nanos now) {
    std::time_t seconds = (now - (now < 0 ? kSecond - 1 : 0)) / kSecond;
    std::tm local{};
    localtime_r(&seconds, &local);
    return local;
  }
  /// A number of the window that the clock shows, higher for later ones.
  static std::int64_t shows(CalendarUnit unit, Nanos now) {
    std::tm local = at(now);
    std::tm midnight{};
    midnight.tm_year = local.tm_year;
    midnight.tm_mon = local.tm_mon;
    midnight.tm_mday = local.tm_mday;
    std::int64_t day = timegm(&midnight) / (kDay / kSecond);
    switch (unit) {
      case CalendarUnit::day:
        return day;
      case CalendarUnit::week:
        return day - (local.tm_wday + 6) % 7;
      case CalendarUnit::month:
        return local.tm_year * 12 + local.tm_mon;
      case CalendarUnit::year:
        break;
    }
    return local.tm_year;
  }
};

struct CalendarCase {
  CalendarUnit unit = CalendarUnit::day;
  std::string zone;
  Nanos now = 0;
};

void showValue(const CalendarCase& drawn, std::ostream& os) {
  os << to_string(drawn.unit) << " in " << drawn.zone << " at " << drawn.now / kSecond << " s + "
     << drawn.now % kSecond << " ns";
}

rc::Gen<CalendarCase> calendar_cases() {
  return rc::gen::exec([] {
    struct Day {
      const char* zone;
      Nanos second;  // near a clock change
    };
    static const std::vector<Day> days{
        {"Europe/Berlin", 1'743'296'400},        // 30 March 2025, 23 hours
        {"Europe/Berlin", 1'761'440'400},        // 26 October 2025, 25 hours
        {"America/Sao_Paulo", 1'541'300'400},    // 4 November 2018, no midnight
        {"America/Sao_Paulo", 1'518'922'800},    // 18 February 2018, from midnight back to 23:00
        {"America/Havana", 1'730'610'000},       // 3 November 2024, midnight twice
        {"America/St_Johns", 1'162'089'000},     // 29 October 2006, from 0:01 back to 23:01
        {"Pacific/Apia", 1'325'239'200},         // 30 December 2011 was skipped
        {"Africa/Monrovia", 63'593'070},         // 7 January 1972, by 44 minutes and 30 seconds
        {"Australia/Lord_Howe", 1'743'865'200},  // 5 April 2025, by half an hour
        {"Asia/Tokyo", 951'782'400}};            // 29 February 2000
    static const std::vector<std::string> zones{"UTC",
                                                "Europe/Berlin",
                                                "Asia/Kathmandu",
                                                "Asia/Tehran",
                                                "America/Havana",
                                                "Africa/Casablanca",
                                                "Pacific/Chatham",
                                                "Pacific/Kiritimati",
                                                "America/Nuuk",
                                                "Antarctica/Troll"};
    CalendarCase drawn;
    drawn.unit = *one_of<CalendarUnit>(
        {CalendarUnit::day, CalendarUnit::week, CalendarUnit::month, CalendarUnit::year});
    if (*chance(75)) {
      const Day& near = days[static_cast<std::size_t>(*choice(static_cast<int>(days.size())))];
      drawn.zone = near.zone;
      drawn.now = (near.second +
                   *rc::gen::resize(rc::kNominalSize, between<Nanos>(-14 * 3600, 20 * 3600))) *
                  kSecond;
      if (*chance(80)) drawn.unit = CalendarUnit::day;
      if (drawn.zone == "Asia/Tokyo") drawn.unit = CalendarUnit::month;
    } else {
      drawn.zone = *one_of(zones);
      Nanos latest = *one_of<Nanos>({kMaxTime, kMaxTime, 730 * kDay});
      drawn.now = *rc::gen::resize(rc::kNominalSize, between<Nanos>(0, latest));
    }
    return drawn;
  });
}

std::shared_ptr<const CalendarTable> table_of(CalendarUnit unit, const std::string& zone) {
  static std::map<std::pair<CalendarUnit, std::string>, std::shared_ptr<const CalendarTable>>
      tables;
  auto& table = tables[{unit, zone}];
  std::string problem;
  if (table == nullptr) table = CalendarTable::load(unit, zone, problem);
  RC_ASSERT(table != nullptr);
  return table;
}

LAW(15, "a calendar's windows are those that the zone's clock shows", "a day of 23 hours",
    "a day of 25 hours", "a midnight that is skipped", "a midnight that occurs twice",
    "a day that was skipped", "a leap day", "behind 2037", "before 1972", "at a boundary", "a week",
    "a year") {
  CalendarCase drawn = *calendar_cases().as("case");
  CalendarUnit unit = drawn.unit;
  auto table = table_of(unit, drawn.zone);
  if (*chance(30)) {
    drawn.now = std::clamp<Nanos>(table->start(table->index(drawn.now)), 0, kMaxTime);
    reached("at a boundary");
  }
  Nanos now = drawn.now;
  std::int64_t index = table->index(now);
  Nanos start = table->start(index);
  Nanos next = table->start(index + 1);
  RC_ASSERT(start <= now);
  RC_ASSERT(now < next);
  RC_ASSERT(table->index(std::max<Nanos>(start, 0)) == index);
  RC_ASSERT(table->index(std::min(next - 1, kMaxTime)) == index);
  RC_ASSERT((next > kMaxTime || table->index(next) == index + 1));

  ZoneClock clock(drawn.zone);
  // A window begins when the clock first shows it: never in the hours before, and at that second.
  for (Nanos edge : {start, next}) {
    std::int64_t shown = ZoneClock::shows(unit, edge);
    RC_ASSERT(ZoneClock::shows(unit, edge - 1) < shown);
    for (Nanos back = kMinute; back < 5 * kHour; back += kMinute) {
      RC_ASSERT(ZoneClock::shows(unit, edge - back) < shown);
    }
  }
  // And none begins in between.
  std::int64_t shown = ZoneClock::shows(unit, start);
  Nanos step = std::max<Nanos>((next - start) / 60, 10 * kMinute);
  for (Nanos at = start; at < next; at += step) RC_ASSERT(ZoneClock::shows(unit, at) <= shown);
  for (Nanos back = 1; back < 5 * kHour && back < next - start; back += kMinute) {
    RC_ASSERT(ZoneClock::shows(unit, next - back) <= shown);
  }

  std::tm first = ZoneClock::at(start);
  bool day = unit == CalendarUnit::day;
  reached("a day of 23 hours", day && next - start == 23 * kHour);
  reached("a day of 25 hours", day && next - start == 25 * kHour);
  reached("a midnight that is skipped", day && first.tm_hour > 0);
  reached("a midnight that occurs twice", [&] {
    std::tm later = ZoneClock::at(start + kHour);
    return day && later.tm_hour == 0 && later.tm_mday == first.tm_mday;
  }());
  reached("a day that was skipped", day && ZoneClock::shows(unit, next) > shown + 1);
  reached("a leap day", unit == CalendarUnit::month && next - start == 29 * kDay);
  reached("behind 2037", now > 2'145'916'800 * kSecond);
  reached("before 1972", now < 63'072'000 * kSecond);
  reached("a week", unit == CalendarUnit::week);
  reached("a year", unit == CalendarUnit::year);
}

LAW(15, "an increment at a calendar's boundary lands in exactly one epoch", "at the boundary",
    "just before it", "within", "a window that was full before") {
  CalendarCase drawn = *calendar_cases().as("case");
  drawn.now = std::clamp(drawn.now, 800 * kDay, kMaxTime - 800 * kDay);
  auto table = table_of(drawn.unit, drawn.zone);
  Rule rule = rule_of(Algorithm::fixed_window, 4, kMinute);
  rule.calendar = CalendarWindow{drawn.unit, drawn.zone};
  Limiter limiter(rule_set({rule}), replicated());
  std::int64_t index = table->index(drawn.now);
  Nanos edge = table->start(index);
  // The window before is used up.
  bool full = *chance(50);
  if (full) {
    RC_ASSERT(limiter.check(Ask(4).request, edge - 1).allowed);
    RC_ASSERT(!limiter.check(Ask(1).request, edge - 1).allowed);
    std::vector<crdt::OwnCount> before;
    limiter.replica_side().drain(before, 10);
    RC_ASSERT(before.size() == 1u);
    RC_ASSERT((before[0].cell.epoch == crdt::Epoch{table->start(index - 1), edge}));
  }
  Nanos into = *one_of<Nanos>({0, -1, 1, drawn.now - edge}).as("from the boundary on");
  Nanos now = edge + into;
  if (full && into < 0) return;
  RC_ASSERT(limiter.check(Ask(3).request, now).allowed);
  std::vector<crdt::OwnCount> counts;
  limiter.replica_side().drain(counts, 10);
  RC_ASSERT(counts.size() == 1u);
  RC_ASSERT(counts[0].value == 3u);
  crdt::Epoch epoch = counts[0].cell.epoch;
  RC_ASSERT(crdt::valid_epoch(epoch));
  RC_ASSERT(epoch.start <= now);
  RC_ASSERT(now < epoch.expiry);
  RC_ASSERT((epoch.start == edge) == (into >= 0));
  RC_ASSERT((epoch.expiry == edge) == (into < 0));
  RC_ASSERT(limiter.used(0, Ask().request, epoch.expiry - 1) == 3u);
  RC_ASSERT(limiter.used(0, Ask().request, epoch.expiry) == 0u);
  reached("at the boundary", into == 0);
  reached("just before it", into == -1);
  reached("within", into > 1);
  reached("a window that was full before", full);
}

LAW(47, "retry_after is tight, for calendars", "a wait over a clock change", "a full window ahead",
    "never") {
  CalendarCase drawn = *calendar_cases().as("case");
  drawn.now = std::clamp(drawn.now, 800 * kDay, kMaxTime - 800 * kDay);
  auto table = table_of(drawn.unit, drawn.zone);
  Rule rule = rule_of(Algorithm::fixed_window, 10, kMinute);
  rule.calendar = CalendarWindow{drawn.unit, drawn.zone};
  Limiter limiter(rule_set({rule}), replicated());
  Nanos now = drawn.now;
  RC_ASSERT(limiter.check(Ask(7).request, now).allowed);
  bool ahead = *chance(30);
  std::int64_t index = table->index(now);
  if (ahead) {
    // A peer whose clock is ahead has used up the next window.
    Cell cell;
    cell.id = {limiter.series_of(0, Ask().request),
               {table->start(index + 1), table->start(index + 2)}};
    cell.raise({{2, 2}, 0}, 9);
    limiter.replica_side().absorb(cell);
  }
  std::uint64_t cost = *one_of<std::uint64_t>({4, 5, 10, 11}).as("cost");
  Decision denied = limiter.check(Ask(cost).request, now);
  RC_ASSERT(!denied.allowed);
  Nanos wait = denied.statuses[0].retry_after;
  reached("never", wait == kNever);
  RC_ASSERT((wait == kNever) == (cost > 10));
  if (wait == kNever) return;
  Nanos last = ahead ? table->start(index + 2) : table->start(index + 1);
  // The clock of the zone says that another window begins then.
  {
    ZoneClock clock(drawn.zone);
    RC_ASSERT(ZoneClock::shows(drawn.unit, now + wait) >
              ZoneClock::shows(drawn.unit, now + wait - 1));
    reached("a wait over a clock change",
            ZoneClock::at(now + wait).tm_gmtoff != ZoneClock::at(now).tm_gmtoff);
  }
  RC_ASSERT(now + wait == last);
  RC_ASSERT(!limiter.check(Ask(cost).request, now + wait - 1).allowed);
  RC_ASSERT(limiter.check(Ask(cost).request, now + wait).allowed);
  reached("a full window ahead", ahead);
}

// Sliding logs, against a list.

/// Every admission, in any order.
struct PlainLog {
  std::uint64_t limit = 0;
  Nanos window = 0;
  std::vector<Consumption> all;

  std::uint64_t used(Nanos now) const {
    std::uint64_t sum = 0;
    for (const Consumption& one : all) {
      if (now - one.at < window) sum = add_saturated(sum, one.units);
    }
    return sum;
  }
  bool fits(Nanos now, std::uint64_t cost) const {
    return static_cast<Uint128>(used(now)) + cost <= limit;
  }
  std::uint64_t remaining(Nanos now) const { return limit - std::min(limit, used(now)); }
  /// The first instant from `now` on at which the cost fits: one of those at which a unit leaves.
  Nanos wait(Nanos now, std::uint64_t cost) const {
    Nanos best = kNever;
    for (const Consumption& one : all) {
      Nanos leaves = one.at + window;
      if (leaves > now && leaves - now < best && fits(leaves, cost)) best = leaves - now;
    }
    return best;
  }
};

/// A window and a limit that a log may have.
Rule log_rule() {
  Nanos window = *one_of<Nanos>({kMinute, kSecond, 3 * kMillisecond, 30 * kDay}).as("window");
  std::uint64_t most = window < kSecond ? 12 : kMaxLogLimit;
  std::uint64_t limit =
      *rc::gen::weightedOneOf<std::uint64_t>(
           {{4, between<std::uint64_t>(1, 12)}, {1, one_of<std::uint64_t>({most, 1, 0})}})
           .as("limit");
  return rule_of(Algorithm::sliding_log, limit, window);
}

LAW(45, "a sliding log is a plain list of admissions, and no window of it exceeds the limit",
    "full", "a denial", "two at one instant", "just as one leaves", "a nanosecond too early",
    "a costly request", "a limit of nothing", "swept") {
  Rule rule = log_rule();
  Limiter limiter(rule_set({rule}), {});
  PlainLog plain{rule.limit, rule.window, {}};
  Nanos now = kStart;
  Nanos wait = 0;
  for (int i = *between(1, 80).as("requests"); i > 0; --i) {
    Nanos before = now;
    now += *rc::gen::weightedOneOf<Nanos>({{3, between<Nanos>(0, rule.window / 5)},
                                           {1, between<Nanos>(0, rule.window * 3 / 2)},
                                           {1, one_of<Nanos>({0, 1, 3 * kSecond + rule.window})},
                                           {2, rc::gen::just(wait)},
                                           {1, rc::gen::just(std::max<Nanos>(wait - 1, 0))}});
    if (*chance(20)) reached("swept", limiter.sweep(now) > 0);
    std::uint64_t hits = *rc::gen::weightedOneOf<std::uint64_t>(
        {{4, rc::gen::just<std::uint64_t>(1)}, {1, costs(rule.limit)}});
    RC_ASSERT(limiter.used(0, Ask().request, now) == plain.used(now));
    bool fits = plain.fits(now, hits);
    Decision decision = limiter.check(Ask(hits).request, now);
    const RuleStatus& status = decision.statuses.at(0);
    RC_ASSERT(decision.allowed == fits);
    RC_ASSERT(status.retry_after == (fits                ? 0
                                     : hits > rule.limit ? kNever
                                                         : plain.wait(now, hits)));
    reached("just as one leaves", fits && wait > 0 && now - before == wait);
    reached("a nanosecond too early", !fits && wait > 1 && now - before == wait - 1);
    reached("two at one instant",
            fits && hits > 0 && !plain.all.empty() && plain.all.back().at == now);
    if (fits && hits > 0) plain.all.push_back({now, hits});
    RC_ASSERT(status.remaining == plain.remaining(now));
    Nanos newest = plain.all.empty() ? 0 : plain.all.back().at + rule.window - now;
    RC_ASSERT(status.reset == std::max<Nanos>(newest, 0));
    // The windows that can be fullest end at an admission.
    RC_ASSERT(plain.used(now) <= rule.limit);
    reached("full", plain.used(now) == rule.limit && rule.limit > 0);
    reached("a denial", !fits);
    reached("a costly request", fits && hits > 1);
    wait = fits || hits > rule.limit ? 0 : status.retry_after;
  }
  reached("a limit of nothing", rule.limit == 0);
}

LAW(41, "a log counts what others admitted at their instants", "a faster clock",
    "more entries than the limit", "beyond the limit", "one instant of several writers",
    "older news again", "a wait", "counts that saturate") {
  Rule rule = log_rule();
  Limiter limiter(rule_set({rule}), replicated());
  crdt::SeriesId series = limiter.series_of(0, Ask().request);
  PlainLog plain{rule.limit, rule.window, {}};
  Nanos now = kStart;
  std::map<Nanos, Cell> cells;
  // What peers admitted, at times around now, in any order.
  bool many = *chance(30);
  for (int i = *between(0, 30).as("admissions of others"); i > 0; --i) {
    Nanos at = *rc::gen::weightedOneOf<Nanos>(
        {{4, between<Nanos>(now - rule.window * 5 / 4, now)},
         {1, between<Nanos>(now, now + std::min(rule.window, kSecond))},
         {2, one_of<Nanos>({now, now - rule.window, now - rule.window + 1, now - 5})}});
    auto units = *rc::gen::weightedOneOf<std::uint64_t>(
        {{20, between<std::uint64_t>(1, 4)}, {1, rc::gen::just(kMax)}});
    Cell& cell = cells[at];
    cell.id = {series, log_epoch(rule.window, at)};
    reached("one instant of several writers", !cell.slots.empty());
    crdt::SlotId slot{{2, *between<std::uint64_t>(1, 3)}, 0};
    Cell before = cell;
    cell.raise(slot, add_saturated(cell.value_of(slot), units));
    limiter.replica_side().absorb(cell);
    if (!before.slots.empty() && *chance(50)) {
      limiter.replica_side().absorb(before);
      reached("older news again");
    }
  }
  for (int i = many ? 40 : 0; i > 0; --i) {
    // As many as the limit, and some more.
    Nanos at = now - i * (rule.window / 100);
    Cell& cell = cells[at];
    cell.id = {series, log_epoch(rule.window, at)};
    cell.raise({{3, 1}, 0}, 1);
    limiter.replica_side().absorb(cell);
  }
  std::size_t alive = 0;
  for (const auto& [at, cell] : cells) {
    plain.all.push_back({at, cell.total()});
    alive += now - at < rule.window;
    reached("a faster clock", at > now);
    reached("counts that saturate", cell.total() == kMax);
  }
  for (int i = 0; i < 6; ++i) {
    std::uint64_t cost = *costs(rule.limit).as("cost");
    bool fits = plain.fits(now, cost);
    std::uint64_t used = plain.used(now);
    RC_ASSERT(limiter.used(0, Ask().request, now) == used);
    Decision decision = limiter.check(Ask(cost).request, now);
    RC_ASSERT(decision.allowed == fits);
    Nanos wait = decision.statuses[0].retry_after;
    RC_ASSERT(wait == (fits ? 0 : cost > rule.limit ? kNever : plain.wait(now, cost)));
    if (fits && cost > 0) plain.all.push_back({now, cost});
    RC_ASSERT(decision.statuses[0].remaining == plain.remaining(now));
    reached("beyond the limit", used > rule.limit);
    reached("more entries than the limit", alive > rule.limit + 1);
    reached("a wait", !fits && wait != kNever);
    now += *between<Nanos>(0, rule.window / 4);
  }
}

// Leaky buckets, against a queue.

/// A queue in exact integers: instants times the limit, so that a unit takes `window` of them.
struct PlainQueue {
  std::uint64_t limit = 1;
  std::uint64_t window = 1;
  std::uint64_t depth = 1;
  Uint128 empty_at = 0;  ///< the instant at which everything will have left

  Uint128 scaled(Nanos at) const {
    return static_cast<Uint128>(limit) * static_cast<std::uint64_t>(at);
  }
  Uint128 backlog(Nanos at) const { return empty_at > scaled(at) ? empty_at - scaled(at) : 0; }
  Uint128 size(std::uint64_t units) const { return static_cast<Uint128>(units) * window; }
  bool fits(Nanos at, std::uint64_t cost) const { return backlog(at) + size(cost) <= size(depth); }
  /// In whole nanoseconds, rounded up.
  Nanos lasts(Uint128 ticks) const { return static_cast<Nanos>((ticks + limit - 1) / limit); }
  void add(Nanos at, std::uint64_t cost) { empty_at = scaled(at) + backlog(at) + size(cost); }
};

LAW(17, "a leaky bucket is an exact queue, and no more than the rate leaves it", "one a month",
    "ten million a second", "a full queue", "an empty queue", "a wait in the queue",
    "a cost above one", "a cost above the depth", "several in one nanosecond",
    "just when there is room", "forgotten and made anew") {
  BucketShape shape = *bucket_shapes().as("shape");
  Rule rule = rule_of(Algorithm::leaky_bucket, shape.rate, shape.unit);
  rule.burst = shape.burst;
  rule.max_debt = shape.max_debt;
  Limiter limiter(rule_set({rule}), {});
  PlainQueue queue{shape.rate, static_cast<std::uint64_t>(shape.unit), shape.burst};
  struct Departure {
    Nanos at;
    std::uint64_t units;
  };
  std::vector<Departure> departures;
  Nanos now = kStart;
  for (int i = *between(1, 60).as("steps"); i > 0; --i) {
    Nanos pause = *bucket_pauses(shape);
    if (pause > kMaxTime - now) break;
    now += pause;
    std::uint64_t cost = *costs(shape.burst);
    bool fits = queue.fits(now, cost);
    Nanos turn = queue.lasts(queue.backlog(now));
    Decision decision = limiter.check(Ask(cost).request, now);
    const RuleStatus& status = decision.statuses.at(0);
    RC_ASSERT(decision.allowed == fits);
    RC_ASSERT(status.limit == shape.burst);
    RC_ASSERT(status.delay == (fits ? turn : 0));
    RC_ASSERT(decision.delay() == status.delay);
    reached("a full queue", !fits && cost <= shape.burst);
    reached("an empty queue", fits && turn == 0 && i > 1);
    reached("a wait in the queue", fits && turn > 0);
    reached("a cost above one", fits && cost > 1);
    reached("a cost above the depth", cost > shape.burst);
    reached("several in one nanosecond", fits && cost > 0 && queue.size(cost) < shape.rate);
    if (fits && cost > 0) {
      departures.push_back({now + turn, cost});
      queue.add(now, cost);
    }
    RC_ASSERT(
        status.remaining ==
        static_cast<std::uint64_t>((queue.size(shape.burst) - queue.backlog(now)) / queue.window));
    if (!fits && cost <= shape.burst) {
      Nanos wait = queue.lasts(queue.backlog(now) + queue.size(cost) - queue.size(shape.burst));
      RC_ASSERT(status.retry_after == wait);
      RC_ASSERT(!limiter.check(Ask(cost).request, now + wait - 1).allowed);
      now += wait;
      RC_ASSERT(limiter.check(Ask(cost).request, now).delay() == queue.lasts(queue.backlog(now)));
      departures.push_back({now + queue.lasts(queue.backlog(now)), cost});
      queue.add(now, cost);
      reached("just when there is room");
    }
    if (*chance(20))
      reached("forgotten and made anew", limiter.sweep(now - *one_of<Nanos>({0, kSecond})) > 0);
  }
  // In any interval leaves no more than the rate, and the request that closes it.
  for (std::size_t from = 0; from < departures.size(); ++from) {
    Uint128 left = 0;
    for (std::size_t to = from; to < departures.size(); ++to) {
      RC_ASSERT((to == from || departures[to].at >= departures[to - 1].at));
      Nanos length = departures[to].at - departures[from].at + 1;
      RC_ASSERT(left <= queue.scaled(length));
      left += queue.size(departures[to].units);
    }
  }
  reached("one a month", shape.unit == 30 * kDay);
  reached("ten million a second", shape.rate == 10'000'000);
}

LAW(47, "a leaky bucket's delay is tight: the debt before it has just drained", "a delay",
    "no delay", "units no checkpoint has counted", "a clock behind the last touch") {
  BucketShape shape = *bucket_shapes().as("shape");
  shape.queue = true;
  Nanos now = kStart;
  crdt::BucketState state;
  std::uint64_t counted = *between<std::uint64_t>(1, std::min<std::uint64_t>(shape.burst, 100));
  Nanos full = std::min(refill_time(shape), kDay);
  state.checkpoint = {counted, now - *between<Nanos>(0, full), shape.ticks(counted)};
  state.touched =
      *rc::gen::weightedOneOf<Nanos>({{2, between<Nanos>(state.checkpoint.at, now)},
                                      {1, between<Nanos>(now, now + std::min(full, kSecond))}});
  state.expiry = state.touched + shape.fill_time();
  std::uint64_t total = counted + *between<std::uint64_t>(0, 3);
  Verdict verdict = evaluate_bucket(shape, state, total, now, *between<std::uint64_t>(0, 3));
  if (!verdict.allowed) {
    RC_ASSERT(verdict.delay == 0);
    return;
  }
  auto owed = [&](Nanos then) {
    return crdt::debt_at(state, total, then, shape.rate, shape.unit, shape.cap());
  };
  RC_ASSERT(owed(now + verdict.delay) == 0u);
  RC_ASSERT((verdict.delay == 0 || owed(now + verdict.delay - 1) > 0u));
  reached("a delay", verdict.delay > 0);
  reached("no delay", verdict.delay == 0);
  reached("units no checkpoint has counted", total > counted);
  reached("a clock behind the last touch", state.touched > now && verdict.delay > 0);
}

}  // namespace
}  // namespace weir::laws
