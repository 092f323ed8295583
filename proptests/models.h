#pragma once

#include <algorithm>
#include <cstdint>
#include <ctime>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <weir/crdt/time.h>
#include <weir/limits/rule.h>

/// What the laws compare against: the plainest code that can be right. Nothing here calls the code
/// under test.
namespace weir::laws {

/// A token bucket in exact integers: tokens times the window's nanoseconds.
class ExactBucket {
 public:
  ExactBucket(std::uint64_t limit, Nanos window, std::uint64_t burst)
      : limit_(limit),
        window_(static_cast<std::uint64_t>(window)),
        full_(scaled(burst)),
        held_(full_) {}

  Uint128 scaled(std::uint64_t units) const { return static_cast<Uint128>(units) * window_; }
  Uint128 held(Nanos now) const {
    Uint128 came = static_cast<Uint128>(limit_) * static_cast<std::uint64_t>(now - at_);
    return came >= full_ - held_ ? full_ : held_ + came;
  }
  std::uint64_t tokens(Nanos now) const { return static_cast<std::uint64_t>(held(now) / window_); }
  bool take(Nanos now, std::uint64_t cost) {
    held_ = held(now);
    at_ = now;
    if (scaled(cost) > held_) return false;
    held_ -= scaled(cost);
    return true;
  }

 private:
  std::uint64_t limit_;
  std::uint64_t window_;
  Uint128 full_;
  Uint128 held_;
  Nanos at_ = 0;
};

/// True debt of a set of consumptions, in units times the window's nanoseconds, cut to `cap` as
/// they come.
struct Consumption {
  Nanos at = 0;
  std::uint64_t units = 0;
};

inline Uint128 true_debt(std::vector<Consumption> log, Nanos now, std::uint64_t limit, Nanos window,
                         Uint128 cap) {
  std::stable_sort(log.begin(), log.end(),
                   [](const Consumption& a, const Consumption& b) { return a.at < b.at; });
  Uint128 debt = 0;
  Nanos last = 0;
  auto drain = [&](Nanos to) {
    Uint128 gone = static_cast<Uint128>(limit) * static_cast<std::uint64_t>(to - last);
    debt -= std::min(debt, gone);
    last = to;
  };
  for (const Consumption& one : log) {
    drain(one.at);
    debt =
        std::min(cap, debt + static_cast<Uint128>(one.units) * static_cast<std::uint64_t>(window));
  }
  drain(std::max(now, last));
  return debt;
}

/// The number of the day, week, month or year that it is in Berlin, from 1996 on: summer time is
/// from the last Sunday of March, 1:00 UTC, to that of October.
inline std::int64_t berlin_window(CalendarUnit unit, Nanos now) {
  auto last_sunday = [](int year, int month) {
    std::tm last{};
    last.tm_year = year;
    last.tm_mon = month;
    last.tm_mday = 31;
    std::time_t at = timegm(&last);
    gmtime_r(&at, &last);
    return at - last.tm_wday * 86'400 + 3600;
  };
  std::time_t at = now / kSecond;
  std::tm utc{};
  gmtime_r(&at, &utc);
  bool summer = at >= last_sunday(utc.tm_year, 2) && at < last_sunday(utc.tm_year, 9);
  at += summer ? 7200 : 3600;
  gmtime_r(&at, &utc);
  if (unit == CalendarUnit::day) return at / 86'400;
  if (unit == CalendarUnit::week) return (at / 86'400 + 3) / 7;
  if (unit == CalendarUnit::month) return utc.tm_year * 12 + utc.tm_mon;
  return utc.tm_year;
}

/// A limiter for one thread that remembers every admission and decides by going through them.
class PlainLimiter {
 public:
  struct Answer {
    bool allowed = true;
    std::vector<bool> rules;               ///< what each said, in order
    std::vector<std::uint64_t> remaining;  ///< after the request, if it passed
  };

  /// `phases[rule][key]`: by how much that series' boundaries are early.
  PlainLimiter(std::vector<Rule> rules, std::vector<std::map<std::string, Nanos>> phases, Nanos now)
      : rules_(std::move(rules)), phases_(std::move(phases)), logs_(rules_.size()), now_(now) {}

  Nanos now() const { return now_; }

  Answer check(const std::string& key, std::uint64_t hits, bool post, Nanos given) {
    now_ = std::max(now_, given);
    Answer answer;
    std::vector<std::uint64_t> costs;
    for (std::size_t i = 0; i < rules_.size(); ++i) {
      costs.push_back(cost(rules_[i], hits, post));
      bool fits = admits(i, key, costs[i]);
      answer.rules.push_back(fits);
      if (!fits && !rules_[i].shadow) answer.allowed = false;
    }
    for (std::size_t i = 0; i < rules_.size(); ++i) {
      if (answer.allowed && answer.rules[i]) logs_[i][key].push_back({now_, costs[i]});
      answer.remaining.push_back(remaining(i, key));
    }
    return answer;
  }

 private:
  static std::uint64_t cost(const Rule& rule, std::uint64_t hits, bool post) {
    std::uint64_t per_hit = post && rule.cost_by_method.contains("POST")
                                ? rule.cost_by_method.at("POST")
                                : rule.default_cost;
    Uint128 product = static_cast<Uint128>(per_hit) * hits;
    return static_cast<std::uint64_t>(std::min<Uint128>(product, ~std::uint64_t{0}));
  }

  /// What is free now, as a fraction of `scale` per unit; below 0 counts as 0.
  Uint128 room(std::size_t i, const std::string& key, Uint128& scale) {
    const Rule& rule = rules_[i];
    const std::vector<Consumption>& log = logs_[i][key];
    if (rule.algorithm == Algorithm::token_bucket || rule.algorithm == Algorithm::leaky_bucket) {
      scale = static_cast<std::uint64_t>(rule.window);
      std::uint64_t burst = rule.burst == 0 || rule.limit == 0 ? rule.limit : rule.burst;
      ExactBucket bucket(rule.limit, rule.window, burst);
      for (const Consumption& one : log) bucket.take(one.at, one.units);
      return bucket.held(now_);
    }
    if (rule.algorithm == Algorithm::sliding_log || rule.calendar) {
      std::uint64_t used = 0;
      for (const Consumption& one : log) {
        bool counts = rule.calendar ? berlin_window(rule.calendar->unit, one.at) ==
                                          berlin_window(rule.calendar->unit, now_)
                                    : now_ - one.at < rule.window;
        if (counts) used += one.units;
      }
      scale = 1;
      return rule.limit - used;
    }
    bool sliding = rule.algorithm == Algorithm::sliding_window;
    Nanos sub = sliding ? rule.window / rule.slots : rule.window;
    Nanos phase = rule.phase == Phase::spread ? phases_[i].at(key) : 0;
    auto number = [&](Nanos at) { return (at + phase) / sub; };
    Nanos into = (now_ + phase) % sub;
    scale = static_cast<std::uint64_t>(sub);
    Uint128 used = 0;
    for (const Consumption& one : log) {
      std::int64_t age = number(now_) - number(one.at);
      std::int64_t oldest = sliding ? rule.slots : 0;
      if (age > oldest) continue;
      bool whole = age < oldest || !sliding || rule.strict;
      used +=
          static_cast<Uint128>(one.units) * static_cast<std::uint64_t>(whole ? sub : sub - into);
    }
    Uint128 limit = static_cast<Uint128>(rule.limit) * scale;
    return used > limit ? 0 : limit - used;
  }

  bool admits(std::size_t i, const std::string& key, std::uint64_t cost) {
    Uint128 scale = 1;
    Uint128 free = room(i, key, scale);
    return static_cast<Uint128>(cost) * scale <= free;
  }
  std::uint64_t remaining(std::size_t i, const std::string& key) {
    Uint128 scale = 1;
    Uint128 free = room(i, key, scale);
    return static_cast<std::uint64_t>(free / scale);
  }

  std::vector<Rule> rules_;
  std::vector<std::map<std::string, Nanos>> phases_;
  std::vector<std::map<std::string, std::vector<Consumption>>> logs_;
  Nanos now_;
};

}  // namespace weir::laws
