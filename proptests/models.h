#pragma once

#include <algorithm>
#include <cstdint>
#include <ctime>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <weir/crdt/time.h>
#include <weir/limits/rules/rule.h>

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

/// What a bucket owed when its numbers were changed: as of its last consumption, and from `full_at`
/// on nothing any more.
struct Owed {
  Uint128 debt = 0;
  Nanos at = 0;
  Nanos full_at = 0;
};

inline Uint128 true_debt(std::vector<Consumption> log, Nanos now, std::uint64_t limit, Nanos window,
                         Uint128 cap, const Owed& owed = {}) {
  std::stable_sort(log.begin(), log.end(),
                   [](const Consumption& a, const Consumption& b) { return a.at < b.at; });
  Nanos first = log.empty() ? now : log.front().at;
  Uint128 debt = first < owed.full_at ? std::min(cap, owed.debt) : 0;
  Nanos last = owed.at;
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
      : rules_(std::move(rules)),
        phases_(std::move(phases)),
        logs_(rules_.size()),
        owed_(rules_.size()),
        now_(now) {
    for (std::size_t i = 0; i < rules_.size(); ++i) order_.push_back(i);
  }

  /// The rules in force from now on, of those that it was made with (by name), with other numbers.
  void reload(const std::vector<Rule>& rules) {
    order_.clear();
    for (const Rule& rule : rules) {
      auto known = std::find_if(rules_.begin(), rules_.end(),
                                [&](const Rule& one) { return one.name == rule.name; });
      auto i = static_cast<std::size_t>(known - rules_.begin());
      if (is_bucket(rule.algorithm)) settle_bucket(i);
      rules_[i] = rule;
      order_.push_back(i);
    }
  }

  Nanos now() const { return now_; }

  Answer check(const std::string& key, std::uint64_t hits, bool post, Nanos given) {
    return decide(key, hits, post, given, nullptr);
  }

  /// One descriptor of a request.
  struct Part {
    std::string key;
    std::uint64_t hits = 1;
    bool post = false;
  };
  /// All or nothing, on the sum of what each series is asked for. A rule without key entries has
  /// one series, "". The answer is by part, then by rule.
  Answer check_all(const std::vector<Part>& parts, Nanos given) {
    now_ = std::max(now_, given);
    std::map<std::pair<std::size_t, std::string>, Uint128> sums;
    auto series = [&](std::size_t i, const Part& part) {
      return std::pair(i, rules_[i].key.empty() ? std::string() : part.key);
    };
    for (const Part& part : parts) {
      for (std::size_t i : order_) {
        sums[series(i, part)] += cost(rules_[i], part.hits, part.post);
      }
    }
    Answer answer;
    std::map<std::pair<std::size_t, std::string>, bool> fit;
    for (const auto& [at, units] : sums) {
      auto capped = static_cast<std::uint64_t>(std::min<Uint128>(units, ~std::uint64_t{0}));
      fit[at] = admits(at.first, at.second, capped);
      if (!fit[at] && !rules_[at.first].shadow) answer.allowed = false;
    }
    for (const auto& [at, units] : sums) {
      if (!answer.allowed || !fit[at] || units == 0) continue;
      note_lifetime(at.first, at.second);
      used_by_[at.first][at.second] = rules_[at.first];
      logs_[at.first][at.second].push_back({now_, static_cast<std::uint64_t>(units)});
    }
    for (const Part& part : parts) {
      for (std::size_t i : order_) {
        answer.rules.push_back(fit[series(i, part)]);
        answer.remaining.push_back(remaining(i, series(i, part).second));
      }
    }
    return answer;
  }

  /// What one reservation holds. `units` of each rule that holds any, and what a hit costs there.
  struct Holding {
    std::string key;
    Nanos at = 0;
    std::map<std::size_t, std::uint64_t> units;
    std::map<std::size_t, std::uint64_t> per_hit;
    std::map<std::size_t, std::uint64_t> most;
    std::map<std::size_t, Late> late;
  };
  /// Decides as check(); `number` names what is held.
  Answer reserve(int number, const std::string& key, std::uint64_t hits, Nanos given) {
    Holding holding;
    Answer answer = decide(key, hits, false, given, &holding);
    if (!holding.units.empty()) holdings_[number] = std::move(holding);
    for (std::size_t i = 0; i < order_.size(); ++i) answer.remaining[i] = remaining(order_[i], key);
    return answer;
  }
  bool holds(int number) const { return holdings_.contains(number); }
  /// True if it was counted everywhere; false where a window was over.
  bool settle(int number, std::uint64_t actual, Nanos given) {
    now_ = std::max(now_, given);
    Holding holding = holdings_.at(number);
    holdings_.erase(number);
    bool counted = true;
    for (const auto& [i, per_hit] : holding.per_hit) {
      bool bucket = is_bucket(rules_[i].algorithm);
      const bool over = !bucket && !read_now(i, holding.key, holding.at);
      if (over && holding.late.at(i) == Late::drop) {
        counted = false;
        continue;
      }
      std::uint64_t units = std::min(per_hit * actual, holding.most.at(i));
      consumed_ += units;
      charged_late_ += over && units > 0;
      cut_ += units < per_hit * actual;
      if (bucket) {
        if (units > 0) settle_in_bucket(i, holding.key, units);
      } else {
        logs_[i][holding.key].push_back({over ? now_ : holding.at, units});
      }
    }
    return counted;
  }
  /// Settlements, by rules: counted in a later window than reserved, and cut to the limit.
  int charged_late() const { return charged_late_; }
  int cut() const { return cut_; }
  /// Of every rule, by checks and settlements.
  Uint128 consumed() const { return consumed_; }
  /// When the bucket of the first rule is full whatever drains meanwhile.
  Nanos full_at(const std::string& key) { return owed_[0][key].full_at; }
  /// True if that has come for any rule before what its debt at the last change would have drained.
  bool full_by_old_numbers(const std::string& key) {
    return std::any_of(order_.begin(), order_.end(), [&](std::size_t i) {
      const Owed& opening = opening_[i][key];
      Uint128 gone = static_cast<Uint128>(rules_[i].limit) *
                     static_cast<std::uint64_t>(std::max<Nanos>(0, now_ - opening.at));
      return opening.debt > gone && now_ >= opening.full_at && logs_[i][key].empty();
    });
  }
  /// What a peek says of the rule at this place.
  std::uint64_t left(std::size_t i, const std::string& key) { return remaining(order_[i], key); }

 private:
  Answer decide(const std::string& key, std::uint64_t hits, bool post, Nanos given,
                Holding* holding) {
    now_ = std::max(now_, given);
    Answer answer;
    std::vector<std::uint64_t> costs;
    for (std::size_t i : order_) {
      costs.push_back(cost(rules_[i], hits, post));
      bool fits = admits(i, key, costs.back());
      answer.rules.push_back(fits);
      if (!fits && !rules_[i].shadow) answer.allowed = false;
    }
    for (std::size_t place = 0; place < order_.size(); ++place) {
      std::size_t i = order_[place];
      std::uint64_t units = costs[place];
      if (answer.allowed && answer.rules[place] && holding == nullptr) {
        if (units > 0) note_lifetime(i, key);
        if (units > 0) used_by_[i][key] = rules_[i];
        if (units > 0) logs_[i][key].push_back({now_, units});
        consumed_ += units;
      } else if (answer.allowed && answer.rules[place] && units > 0) {
        used_by_[i][key] = rules_[i];
        holding->key = key;
        holding->at = now_;
        holding->units[i] = units;
        holding->per_hit[i] = units / hits;
        holding->most[i] = most_of(rules_[i]);
        holding->late[i] = rules_[i].late;
      }
      answer.remaining.push_back(remaining(i, key));
    }
    return answer;
  }

  /// The limit, or a bucket's burst.
  static std::uint64_t most_of(const Rule& rule) {
    const bool burst = is_bucket(rule.algorithm) && rule.burst > 0 && rule.limit > 0;
    return burst ? rule.burst : rule.limit;
  }
  static Uint128 full_debt(const Rule& rule) {
    return static_cast<Uint128>(most_of(rule)) * static_cast<std::uint64_t>(rule.window);
  }
  /// A bucket that consumes now is full again when the most that it can owe has drained.
  void note_lifetime(std::size_t i, const std::string& key) {
    const Rule& rule = rules_[i];
    if (!is_bucket(rule.algorithm)) return;
    Uint128 most = full_debt(rule) * (1 + rule.max_debt);
    Uint128 lifetime = rule.limit == 0 ? 0 : (most + rule.limit - 1) / rule.limit;
    Nanos& full_at = owed_[i][key].full_at;
    full_at = std::max(full_at, now_ + static_cast<Nanos>(std::min<Uint128>(lifetime, 800 * kDay)));
  }
  /// By the rule in force or, if there is none, by the numbers that the bucket was last used by.
  void settle_in_bucket(std::size_t i, const std::string& key, std::uint64_t units) {
    bool in_force = std::find(order_.begin(), order_.end(), i) != order_.end();
    Rule last = rules_[i];
    if (!in_force) {
      settle_bucket(i);
      rules_[i] = used_by_[i][key];
    }
    note_lifetime(i, key);
    logs_[i][key].push_back({now_, units});
    if (in_force) {
      used_by_[i][key] = rules_[i];
    } else {
      settle_bucket(i);
      rules_[i] = last;
    }
  }
  /// What it consumed so far becomes a debt as of then.
  void settle_bucket(std::size_t i) {
    const Rule& rule = rules_[i];
    for (auto& [key, log] : logs_[i]) {
      if (log.empty()) continue;
      Owed& owed = owed_[i][key];
      Consumption last = log.back();
      log.pop_back();
      Uint128 cap = full_debt(rule) * (1 + rule.max_debt);
      Uint128 before = true_debt(log, last.at, rule.limit, rule.window, cap, opening_[i][key]);
      // What comes last is not cut: other numbers may leave room for it.
      owed.debt =
          before + static_cast<Uint128>(last.units) * static_cast<std::uint64_t>(rule.window);
      owed.at = last.at;
      opening_[i][key] = owed;
      log.clear();
    }
  }

  std::int64_t number(std::size_t i, const std::string& key, Nanos at) const {
    const Rule& rule = rules_[i];
    bool sliding = rule.algorithm == Algorithm::sliding_window;
    Nanos sub = sliding ? rule.window / rule.slots : rule.window;
    return (at + (rule.phase == Phase::spread ? phases_[i].at(key) : 0)) / sub;
  }
  /// True if a decision now counts what a window or a log was given at `at`.
  bool read_now(std::size_t i, const std::string& key, Nanos at) const {
    const Rule& rule = rules_[i];
    if (rule.calendar) {
      return berlin_window(rule.calendar->unit, at) == berlin_window(rule.calendar->unit, now_);
    }
    if (rule.algorithm == Algorithm::sliding_log) return now_ - at < rule.window;
    bool sliding = rule.algorithm == Algorithm::sliding_window;
    return number(i, key, now_) - number(i, key, at) <= (sliding ? rule.slots : 0);
  }

  /// What was consumed and, as if consumed when it was reserved, what is held.
  std::vector<Consumption> with_held(std::size_t i, const std::string& key) {
    std::vector<Consumption> all = logs_[i][key];
    for (const auto& [number, holding] : holdings_) {
      auto units = holding.units.find(i);
      if (holding.key == key && units != holding.units.end()) {
        all.push_back({is_bucket(rules_[i].algorithm) ? now_ : holding.at, units->second});
      }
    }
    return all;
  }

  static std::uint64_t cost(const Rule& rule, std::uint64_t hits, bool post) {
    std::uint64_t per_hit = post && rule.cost_by_method.contains("POST")
                                ? rule.cost_by_method.at("POST")
                                : rule.default_cost;
    Uint128 product = static_cast<Uint128>(per_hit) * hits;
    return static_cast<std::uint64_t>(std::min<Uint128>(product, ~std::uint64_t{0}));
  }

  /// What is free now, as a fraction of `scale` per unit. `over`: less than nothing; it returns 0.
  Uint128 room(std::size_t i, const std::string& key, Uint128& scale, bool& over) {
    auto left = [&over](Uint128 all, Uint128 used) {
      over = used > all;
      return over ? 0 : all - used;
    };
    const Rule& rule = rules_[i];
    std::vector<Consumption> log = with_held(i, key);
    if (rule.algorithm == Algorithm::token_bucket || rule.algorithm == Algorithm::leaky_bucket) {
      scale = static_cast<std::uint64_t>(rule.window);
      Uint128 full = full_debt(rule);
      Uint128 debt = true_debt(log, now_, rule.limit, rule.window, full * (1 + rule.max_debt),
                               opening_[i][key]);
      return left(full, debt);
    }
    if (rule.algorithm == Algorithm::sliding_log || rule.calendar) {
      std::uint64_t used = 0;
      for (const Consumption& one : log) used += read_now(i, key, one.at) ? one.units : 0;
      scale = 1;
      return left(rule.limit, used);
    }
    bool sliding = rule.algorithm == Algorithm::sliding_window;
    Nanos sub = sliding ? rule.window / rule.slots : rule.window;
    Nanos phase = rule.phase == Phase::spread ? phases_[i].at(key) : 0;
    Nanos into = (now_ + phase) % sub;
    scale = static_cast<std::uint64_t>(sub);
    Uint128 used = 0;
    for (const Consumption& one : log) {
      if (!read_now(i, key, one.at)) continue;
      std::int64_t age = number(i, key, now_) - number(i, key, one.at);
      std::int64_t oldest = sliding ? rule.slots : 0;
      bool whole = age < oldest || !sliding || rule.strict;
      used +=
          static_cast<Uint128>(one.units) * static_cast<std::uint64_t>(whole ? sub : sub - into);
    }
    Uint128 limit = static_cast<Uint128>(rule.limit) * scale;
    return left(limit, used);
  }

  bool admits(std::size_t i, const std::string& key, std::uint64_t cost) {
    Uint128 scale = 1;
    bool over = false;
    Uint128 free = room(i, key, scale, over);
    return !over && static_cast<Uint128>(cost) * scale <= free;
  }
  std::uint64_t remaining(std::size_t i, const std::string& key) {
    Uint128 scale = 1;
    bool over = false;
    Uint128 free = room(i, key, scale, over);
    return static_cast<std::uint64_t>(free / scale);
  }

  std::vector<Rule> rules_;
  std::vector<std::map<std::string, Nanos>> phases_;
  std::vector<std::map<std::string, std::vector<Consumption>>> logs_;
  std::vector<std::map<std::string, Owed>> owed_;               // of buckets
  std::map<std::size_t, std::map<std::string, Owed>> opening_;  // at the last change of numbers
  std::map<std::size_t, std::map<std::string, Rule>> used_by_;  // of buckets
  std::vector<std::size_t> order_;                              // the rules in force
  std::map<int, Holding> holdings_;
  Uint128 consumed_ = 0;
  int charged_late_ = 0;
  int cut_ = 0;
  Nanos now_;
};

}  // namespace weir::laws
