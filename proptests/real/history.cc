#include <weir/proptests/real/history.h>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <istream>
#include <map>
#include <ostream>
#include <set>
#include <stdexcept>
#include <tuple>

namespace weir::real {
namespace {

using nlohmann::json;

using Group = std::pair<Counter, std::string>;

bool counted(const Operation& operation) {
  return operation.kind == Kind::add && operation.result == Result::ok;
}

/// The runs of one node, in order.
class Runs {
 public:
  static constexpr std::size_t kNone = static_cast<std::size_t>(-1);

  Runs(const History& history, std::uint32_t node) {
    for (const Run& run : history.runs) {
      if (run.node == node) runs_.push_back(run);
    }
    std::sort(runs_.begin(), runs_.end(),
              [](const Run& a, const Run& b) { return a.begin < b.begin; });
  }

  std::size_t size() const { return runs_.size(); }
  const Run& operator[](std::size_t i) const { return runs_[i]; }

  /// The one process that can have answered, or kNone if it may have been either of two.
  std::size_t of(const Operation& operation) const {
    auto after = std::upper_bound(runs_.begin(), runs_.end(), operation.end,
                                  [](Nanos at, const Run& run) { return at < run.begin; });
    if (after == runs_.begin()) return kNone;
    --after;
    return after->begin <= operation.start ? static_cast<std::size_t>(after - runs_.begin())
                                           : kNone;
  }

  /// The process ran for at least `length` between `at` and its end.
  bool ran_for(std::size_t i, Nanos at, Nanos length) const {
    const Run& run = runs_[i];
    if (run.end == kNever) return true;
    Nanos ran = run.end - at;
    for (auto [from, to] : run.pauses) {
      ran -= std::max<Nanos>(0, std::min(to, run.end) - std::max(from, at));
    }
    return ran >= length;
  }

 private:
  std::vector<Run> runs_;
};

/// All attempts in one key, wherever made.
class Attempts {
 public:
  void add(Nanos start, std::uint64_t hits) { starts_.emplace_back(start, hits); }
  void sort() {
    std::sort(starts_.begin(), starts_.end());
    for (std::size_t i = 1; i < starts_.size(); ++i) starts_[i].second += starts_[i - 1].second;
  }
  std::uint64_t until(Nanos at) const {
    auto after = std::upper_bound(starts_.begin(), starts_.end(),
                                  std::pair<Nanos, std::uint64_t>{at, ~0ull});
    return after == starts_.begin() ? 0 : (after - 1)->second;
  }

 private:
  std::vector<std::pair<Nanos, std::uint64_t>> starts_;
};

class Checker {
 public:
  Checker(const History& history, const CheckOptions& options)
      : history_(history), options_(options) {}

  Verdict run() {
    std::map<std::pair<std::uint32_t, Group>, std::vector<const Operation*>> by_node;
    for (const Operation& operation : history_.operations) {
      if (operation.counter == Counter::quota) continue;
      Group group{operation.counter, operation.key};
      if (operation.kind == Kind::add && operation.result != Result::denied) {
        attempts_[group].add(operation.start, operation.hits);
        totals(group).attempted += operation.hits;
        if (operation.result == Result::ok) totals(group).acknowledged += operation.hits;
        if (operation.result == Result::ok) acknowledged_[group] += operation.hits;
      }
      if (operation.result == Result::denied) {
        violation(fmt::format("{} was denied by a rule that never denies", name(group)),
                  &operation);
      }
      if (operation.result == Result::ok) by_node[{operation.node, group}].push_back(&operation);
    }
    for (auto& [group, attempts] : attempts_) attempts.sort();
    std::vector<Runs> runs;
    for (std::uint32_t node = 0; node < history_.nodes; ++node) runs.emplace_back(history_, node);
    for (const auto& [where, operations] : by_node) {
      if (where.first >= history_.nodes) throw std::runtime_error("history: no such node");
      sweep(where.second, runs[where.first], operations);
    }
    check_finals();
    return std::move(verdict_);
  }

 private:
  struct Event {
    enum Type : std::uint8_t { boot, begin, end };
    Nanos at = 0;
    Type type = boot;
    const Operation* operation = nullptr;
    std::size_t run = 0;  // of a boot: which; of an operation: by which process
  };

  static std::string name(const Group& group) {
    return fmt::format("{} {}", to_string(group.first), group.second);
  }

  Totals& totals(const Group& group) {
    return group.first == Counter::commit ? verdict_.commit : verdict_.async;
  }

  void violation(const std::string& what, const Operation* operation = nullptr) {
    verdict_.violations.push_back({what, operation == nullptr ? "" : to_line(*operation)});
  }

  /// May an answered add count towards the lower bounds of what comes later?
  bool holds(const Group& group, const Event& event) const {
    if (!counted(*event.operation)) return false;
    return group.first == Counter::commit || event.run != Runs::kNone;
  }

  /// All that one node said of one key, in time. With
  ///   ended   sum of the acknowledged adds that have ended
  ///   begun   of those among them that have begun, and of those under way
  ///   told    largest (value - begun), over the values that this process told, when they arrived
  /// an add that began after such a value arrived is in `ended` and was not in `begun` then, so the
  /// next value asked for is at least `ended + told`: the earlier value, and what was acknowledged
  /// since.
  void sweep(const Group& group, const Runs& runs,
             const std::vector<const Operation*>& operations) {
    std::vector<Event> events;
    for (std::size_t i = 0; i < runs.size(); ++i) {
      events.push_back({runs[i].begin, Event::boot, nullptr, i});
    }
    for (const Operation* operation : operations) {
      std::size_t run = runs.of(*operation);
      events.push_back({operation->start, Event::begin, operation, run});
      events.push_back({operation->end, Event::end, operation, run});
    }
    std::stable_sort(events.begin(), events.end(), [](const Event& a, const Event& b) {
      return std::tuple(a.at, a.type) < std::tuple(b.at, b.type);
    });
    std::uint64_t ended = 0;
    std::uint64_t begun = 0;
    std::uint64_t settled = 0;  // of the present process, async: would outlive kill -9
    std::uint64_t kept = 0;     // by earlier ones
    std::int64_t told = 0;
    for (const Event& event : events) {
      if (event.type == Event::boot) {
        if (event.run == 0) continue;
        if (runs[event.run - 1].clean) {
          kept = ended;
          settled = 0;
          continue;
        }
        told = 0;
        if (group.first == Counter::commit) continue;
        kept += settled;
        settled = 0;
        ended = begun = kept;
        continue;
      }
      const Operation& operation = *event.operation;
      if (event.type == Event::begin) {
        check_lower(group, event, static_cast<std::int64_t>(ended) + told, ended);
        if (holds(group, event)) begun += operation.hits;
        continue;
      }
      if (exact(operation)) check_upper(group, operation);
      if (event.run != Runs::kNone && exact(operation)) {
        told = std::max(told, static_cast<std::int64_t>(operation.used - begun));
      }
      if (!holds(group, event)) continue;
      ended += operation.hits;
      if (event.run != Runs::kNone &&
          runs.ran_for(event.run, operation.end, options_.async_settled)) {
        settled += operation.hits;
      }
    }
    // The last process was killed and none followed: what it may have lost is no floor.
    bool killed =
        runs.size() > 0 && runs[runs.size() - 1].end != kNever && !runs[runs.size() - 1].clean;
    if (group.first == Counter::async && killed) ended = kept + settled;
    floors_[group] += ended;
  }

  /// What it says is used is neither behind other threads' adds nor ahead by what they hold.
  bool exact(const Operation& operation) const {
    return !options_.adds_may_lag || operation.kind == Kind::read ||
           operation.result == Result::denied;
  }

  void check_lower(const Group& group, const Event& event, std::int64_t floor,
                   std::uint64_t acknowledged) {
    const Operation& operation = *event.operation;
    ++(operation.kind == Kind::read ? verdict_.reads_checked : verdict_.adds_checked);
    if (event.run == Runs::kNone) {
      ++verdict_.between_runs;
      return;
    }
    std::uint64_t low = static_cast<std::uint64_t>(std::max<std::int64_t>(0, floor));
    std::uint64_t bound = std::max(acknowledged, low) + operation.hits;
    std::uint64_t& missing = missing_[{operation.node, group}];
    if (!exact(operation) || operation.used + missing >= bound) return;
    violation(fmt::format("{} at node {}: {} is below {}: {}", name(group), operation.node + 1,
                          operation.used, bound,
                          operation.used < acknowledged + operation.hits
                              ? "acknowledged here before and not to be lost"
                              : "told here before, with what was acknowledged since"),
              &operation);
    missing = bound - operation.used;
  }

  void check_upper(const Group& group, const Operation& operation) {
    std::uint64_t high = attempts_[group].until(operation.end);
    std::uint64_t& surplus = surplus_[{operation.node, group}];
    if (operation.used <= high + surplus) return;
    violation(fmt::format("{} at node {}: {} is above {}: all that anybody had attempted",
                          name(group), operation.node + 1, operation.used, high),
              &operation);
    surplus = operation.used - high;
  }

  void check_finals() {
    if (history_.finals.empty()) return;
    std::map<Group, std::map<std::uint32_t, std::uint64_t>> finals;
    for (const Final& final : history_.finals) {
      if (final.counter == Counter::quota) continue;
      finals[{final.counter, final.key}][final.node] = final.used;
    }
    for (const auto& [group, attempts] : attempts_) {
      auto found = finals.find(group);
      if (found == finals.end() || found->second.size() != history_.nodes) {
        violation(fmt::format("{}: not all nodes told it in the end", name(group)));
        continue;
      }
      const auto& values = found->second;
      std::set<std::uint64_t> different;
      std::string each;
      for (auto [node, used] : values) {
        different.insert(used);
        each += fmt::format(" {}", used);
      }
      if (different.size() > 1) {
        violation(fmt::format("{}: the nodes do not agree in the end:{}", name(group), each));
      }
      std::uint64_t low = floors_.contains(group) ? floors_[group] : 0;
      std::uint64_t high = attempts.until(kNever);
      std::uint64_t least = *different.begin();
      if (least < low) {
        violation(fmt::format("{}: {} in the end, of {} that were acknowledged and not to be lost",
                              name(group), least, low));
      }
      if (*different.rbegin() > high) {
        violation(fmt::format("{}: {} in the end, of {} that were attempted", name(group),
                              *different.rbegin(), high));
      }
      totals(group).counted += least;
      std::uint64_t acknowledged = acknowledged_[group];
      totals(group).lost += acknowledged - std::min(acknowledged, least);
    }
  }

  const History& history_;
  CheckOptions options_;
  Verdict verdict_;
  std::map<Group, Attempts> attempts_;
  std::map<Group, std::uint64_t> acknowledged_;
  std::map<Group, std::uint64_t> floors_;  // what must be there in the end
  // What was complained of before: a loss is told where it is first seen, not at every later read.
  std::map<std::pair<std::uint32_t, Group>, std::uint64_t> missing_;
  std::map<std::pair<std::uint32_t, Group>, std::uint64_t> surplus_;
};

template <typename Enum, std::size_t N>
Enum from_string(const std::string& text, const Enum (&all)[N]) {
  for (Enum one : all) {
    if (to_string(one) == text) return one;
  }
  throw std::runtime_error("unknown word: " + text);
}

constexpr Kind kKinds[] = {Kind::add, Kind::read};
constexpr Result kResults[] = {Result::ok, Result::denied, Result::unknown};

json to_json(const Operation& operation) {
  json out{{"t", "op"},
           {"start", operation.start},
           {"end", operation.end},
           {"client", operation.client},
           {"node", operation.node},
           {"kind", to_string(operation.kind)},
           {"counter", to_string(operation.counter)},
           {"key", operation.key},
           {"result", to_string(operation.result)}};
  if (operation.kind == Kind::add) out["hits"] = operation.hits;
  if (operation.result != Result::unknown) out["used"] = operation.used;
  if (operation.window != 0) out["window"] = operation.window;
  if (!operation.error.empty()) out["error"] = operation.error;
  return out;
}

Operation operation_of(const json& line) {
  Operation out;
  out.start = line.at("start");
  out.end = line.at("end");
  out.client = line.at("client");
  out.node = line.at("node");
  out.kind = from_string(line.at("kind"), kKinds);
  out.counter = from_string(line.at("counter"), kCounters);
  out.key = line.at("key");
  out.result = from_string(line.at("result"), kResults);
  out.hits = line.value("hits", std::uint64_t{0});
  out.used = line.value("used", std::uint64_t{0});
  out.window = line.value("window", std::int64_t{0});
  out.error = line.value("error", "");
  return out;
}

std::string dump(const json& line) {
  return line.dump(-1, ' ', false, json::error_handler_t::replace);
}

void take_line(const json& line, History& out) {
  const std::string type = line.at("t");
  if (type == "op") {
    out.operations.push_back(operation_of(line));
  } else if (type == "history") {
    out.nodes = line.at("nodes");
    out.limit = line.at("limit");
    out.window = line.at("window");
    out.wall_minus_monotonic = line.at("wall_minus_monotonic");
  } else if (type == "run") {
    Run run;
    run.node = line.at("node");
    run.begin = line.at("begin");
    run.end = line.at("end").is_null() ? kNever : line.at("end").get<Nanos>();
    run.clean = line.at("clean");
    run.pauses = line.at("pauses");
    out.runs.push_back(std::move(run));
  } else if (type == "connectivity") {
    out.connectivity.push_back({line.at("at"), line.at("components")});
  } else if (type == "final") {
    out.finals.push_back({line.at("node"), from_string(line.at("counter"), kCounters),
                          line.at("key"), line.at("used")});
  } else {
    throw std::runtime_error("unknown type of line: " + type);
  }
}

}  // namespace

std::string_view to_string(Counter counter) {
  switch (counter) {
    case Counter::commit:
      return "commit";
    case Counter::async:
      return "async";
    case Counter::quota:
      return "quota";
  }
  return "?";
}

std::string_view to_string(Kind kind) {
  return kind == Kind::add ? "add" : "read";
}

std::string_view to_string(Result result) {
  switch (result) {
    case Result::ok:
      return "ok";
    case Result::denied:
      return "denied";
    case Result::unknown:
      return "unknown";
  }
  return "?";
}

Verdict check(const History& history, const CheckOptions& options) {
  return Checker(history, options).run();
}

QuotaReport judge_quota(const History& history) {
  QuotaReport out;
  std::map<std::pair<std::string, std::int64_t>, std::uint64_t> admitted;
  for (const Operation& operation : history.operations) {
    if (operation.counter != Counter::quota || operation.result == Result::unknown) continue;
    std::uint64_t& sum = admitted[{operation.key, operation.window}];
    if (counted(operation)) sum += operation.hits;
  }
  std::vector<Connectivity> steps = history.connectivity;
  std::sort(steps.begin(), steps.end(),
            [](const Connectivity& a, const Connectivity& b) { return a.at < b.at; });
  // Clocks differ and news takes its time: a cut a little before or after a window is felt in it.
  constexpr Nanos kMargin = 2 * kSecond;
  for (const auto& [where, sum] : admitted) {
    Nanos from = where.second * history.window - history.wall_minus_monotonic - kMargin;
    Nanos to = from + history.window + 2 * kMargin;
    std::uint64_t components = 1;
    for (std::size_t i = 0; i < steps.size(); ++i) {
      Nanos until = i + 1 < steps.size() ? steps[i + 1].at : kNever;
      if (steps[i].at < to && until > from) {
        components = std::max<std::uint64_t>(components, steps[i].components);
      }
    }
    ++out.windows;
    if (sum > history.limit) ++out.over_limit;
    if (sum > history.limit * components) ++out.over_components;
    if (components == 1) out.worst_connected = std::max(out.worst_connected, sum);
    if (sum > out.worst_admitted) {
      out.worst_admitted = sum;
      out.worst_components = components;
    }
    if (history.limit > 0) {
      out.worst_ratio =
          std::max(out.worst_ratio,
                   static_cast<double>(sum) / static_cast<double>(history.limit * components));
    }
  }
  return out;
}

std::string to_line(const Operation& operation) {
  return dump(to_json(operation));
}

void write(const History& history, std::ostream& out) {
  out << dump({{"t", "history"},
               {"nodes", history.nodes},
               {"limit", history.limit},
               {"window", history.window},
               {"wall_minus_monotonic", history.wall_minus_monotonic}})
      << '\n';
  for (const Run& run : history.runs) {
    out << dump({{"t", "run"},
                 {"node", run.node},
                 {"begin", run.begin},
                 {"end", run.end == kNever ? json() : json(run.end)},
                 {"clean", run.clean},
                 {"pauses", run.pauses}})
        << '\n';
  }
  for (const Connectivity& step : history.connectivity) {
    out << dump({{"t", "connectivity"}, {"at", step.at}, {"components", step.components}}) << '\n';
  }
  for (const Operation& operation : history.operations) out << to_line(operation) << '\n';
  for (const Final& final : history.finals) {
    out << dump({{"t", "final"},
                 {"node", final.node},
                 {"counter", to_string(final.counter)},
                 {"key", final.key},
                 {"used", final.used}})
        << '\n';
  }
}

History read_history(std::istream& in) {
  History out;
  std::string line;
  for (std::size_t number = 1; std::getline(in, line); ++number) {
    try {
      take_line(json::parse(line), out);
    } catch (const std::exception& error) {
      throw std::runtime_error(fmt::format("line {}: {}", number, error.what()));
    }
  }
  return out;
}

}  // namespace weir::real
