#include <weir/limits/rules/rule.h>

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

#include <weir/crdt/epoch.h>
#include <weir/limits/algorithms/log_window.h>
#include <weir/limits/bounds.h>
#include <weir/limits/escrow/escrow_bucket.h>
#include <weir/limits/matching/rule_index.h>
#include <weir/limits/rules/rule_checks.h>
#include <weir/limits/rules/rule_choice.h>
#include <weir/limits/rules/rule_origin.h>
#include <weir/limits/text/duration.h>
#include <weir/limits/text/number.h>
#include <weir/limits/text/utf8.h>

namespace weir {
namespace {

constexpr std::size_t kFewRules = 3;

/// One that takes longer to look through than the rule to look up.
bool has_long_list(const Rule& rule) {
  constexpr std::size_t kLong = 8;
  return std::any_of(rule.match.begin(), rule.match.end(), [](const Match& match) {
    const auto* values = std::get_if<MatchIn>(&match.matcher);
    const auto* networks = std::get_if<MatchCidrs>(&match.matcher);
    return (values != nullptr && values->values.size() > kLong) ||
           (networks != nullptr && networks->networks.size() > kLong);
  });
}

constexpr std::size_t kMaxKey = 16;
constexpr Nanos kMinWindow = kMillisecond;
constexpr Nanos kMaxWindow = kMaxDuration;
constexpr std::uint32_t kMaxSlots = 120;
constexpr std::uint32_t kMaxMaxDebt = 1000;

/// Rules made by a program.
class ProgramOrigin final : public RuleOrigin {
 public:
  State state(std::size_t, std::string_view) const override { return State::unset; }
  RuleError error(std::size_t rule, std::string_view path) const override {
    RuleError error;
    error.field = fmt::format("rules[{}].{}", rule, path);
    return error;
  }
  std::string place(std::size_t rule) const override { return fmt::format("rules[{}]", rule); }
};

/// One table for all rules of a set that have the same calendar.
class Calendars {
 public:
  struct Loaded {
    std::shared_ptr<const CalendarTable> table;
    std::string problem;  ///< why there is none
  };
  const Loaded& of(const CalendarWindow& window) {
    const auto [at, fresh] = loaded_.try_emplace({window.unit, window.time_zone});
    Loaded& loaded = at->second;
    if (fresh) loaded.table = CalendarTable::load(window.unit, window.time_zone, loaded.problem);
    return loaded;
  }

 private:
  std::map<std::pair<CalendarUnit, std::string>, Loaded> loaded_;
};

/// "rules.yaml:12:5: rules[2].window: ", as far as it is known.
template <typename Remark>
std::string where(const Remark& remark) {
  std::string out = remark.file;
  if (remark.line > 0) {
    if (!out.empty()) out += ':';
    out += fmt::format("{}:{}", remark.line, remark.column);
  }
  if (!out.empty()) out += ": ";
  if (!remark.field.empty()) out += remark.field + ": ";
  return out;
}

class Checker {
 public:
  Checker(const RuleOrigin& origin, Calendars& calendars, std::vector<RuleError>& errors)
      : origin_(origin), calendars_(calendars), errors_(errors) {}

  void check(const std::vector<Rule>& rules) {
    for (std::size_t i = 0; i < rules.size() && errors_.size() < internal::kMaxErrors; ++i) {
      index_ = i;
      check_names(rules);
      check_match(rules[i]);
      internal::check_told(rules[i], fail_);
      if (rules[i].unlimited) {
        check_unlimited(rules[i]);
        continue;
      }
      check_key(rules[i]);
      check_from_request(rules[i]);
      check_window(rules[i]);
      check_calendar(rules[i]);
      check_log(rules[i]);
      check_bucket(rules[i]);
      check_cost(rules[i]);
      check_enforcement(rules[i]);
      check_first_hit(rules[i]);
      check_candidate(rules[i]);
    }
    internal::check_places(rules,
                           [this](std::size_t rule, std::string_view path, std::string expected) {
                             index_ = rule;
                             const std::string_view field = path.substr(0, path.find('['));
                             if (errors_.size() >= internal::kMaxErrors || !readable(field)) return;
                             if (readable("domain") && readable("name"))
                               fail(path, std::move(expected));
                           });
  }

 private:
  using State = RuleOrigin::State;

  void fail(std::string_view path, std::string expected) {
    RuleError error = origin_.error(index_, path);
    error.expected = std::move(expected);
    errors_.push_back(std::move(error));
  }

  bool readable(std::string_view field) const {
    return origin_.state(index_, field) != State::unreadable;
  }

  /// A field that this rule's algorithm does not have.
  void refuse(std::string_view field, bool has_default, const Rule& rule,
              std::string_view who_has_it) {
    const State state = origin_.state(index_, field);
    if (state == State::unreadable || (state == State::unset && has_default)) return;
    fail(field, fmt::format("no {} with algorithm {}: only {} it", field, to_string(rule.algorithm),
                            who_has_it));
  }

  void check_names(const std::vector<Rule>& rules) {
    const Rule& rule = rules[index_];
    const bool has_domain = readable("domain");
    const bool has_name = readable("name");
    if (has_domain) check_name("domain", rule.domain);
    if (has_name) check_name("name", rule.name);
    if (!has_domain || !has_name) return;
    const auto [other, fresh] = names_.try_emplace({rule.domain, rule.name}, index_);
    if (fresh) return;
    fail("name", fmt::format("a name that is unique in its domain: {} is already the name of the "
                             "rule at {}",
                             internal::quoted_text(rule.name), origin_.place(other->second)));
  }

  void check_name(std::string_view path, std::string_view name) {
    std::string problem = internal::name_problem(name);
    if (!problem.empty()) fail(path, std::move(problem));
  }

  void check_match(const Rule& rule) {
    if (!readable("match")) return;
    if (rule.match.size() > kMaxEntries) {
      fail("match", fmt::format("at most {} entries, got {}", kMaxEntries, rule.match.size()));
      return;
    }
    for (const Match& match : rule.match) {
      const std::string path = internal::field_path("match", match.key);
      check_name(path, match.key);
      internal::check_matcher(match, path, fail_);
    }
  }

  void check_key(const Rule& rule) {
    if (!readable("key")) return;
    if (rule.key.size() > kMaxKey) {
      fail("key", fmt::format("at most {} entries, got {}", kMaxKey, rule.key.size()));
      return;
    }
    for (std::size_t i = 0; i < rule.key.size(); ++i) {
      const std::string& key = rule.key[i];
      const std::string path = fmt::format("key[{}]", i);
      check_name(path, key);
      if (std::find(rule.key.begin(), rule.key.begin() + static_cast<std::ptrdiff_t>(i), key) !=
          rule.key.begin() + static_cast<std::ptrdiff_t>(i)) {
        fail(path, fmt::format("each entry once, got {} again", internal::quoted_text(key)));
      }
      if (!readable("match")) continue;
      for (const Match& match : rule.match) {
        const bool absent = std::holds_alternative<MatchAbsent>(match.matcher);
        if (match.key != key || !absent || match.negated) continue;
        fail(path, fmt::format("an entry that can be there: match wants {} absent, so the rule "
                               "would never apply",
                               internal::quoted_text(key)));
      }
    }
    internal::check_key_forms(rule, fail_);
  }

  /// A rule that limits nothing has nothing that says how.
  void check_unlimited(const Rule& rule) {
    if (!readable("unlimited") || !readable("group") || !readable("replaces")) return;
    if (rule.group.empty() && rule.replaces.empty()) {
      fail("unlimited", "a group or replaces beside it: what it meets is limited by other rules");
    }
    for (const std::string_view field :
         {"key",   "limit",      "max",    "window",  "algorithm",   "slots",        "strict",
          "burst", "max_debt",   "cost",   "phase",   "enforcement", "durability",   "series",
          "late",  "on_failure", "shadow", "headers", "deny",        "count_denied", "candidate"}) {
      if (origin_.state(index_, field) != State::set) continue;
      fail(field, fmt::format("no {} with unlimited: true, which counts nothing", field));
    }
    if (!rule.key.empty()) fail("key", "none with unlimited: true, which counts nothing");
    if (rule.shadow) fail("shadow", "false with unlimited: true, which denies nothing");
  }

  void check_from_request(const Rule& rule) {
    if (!rule.limit_from_request || !readable("limit")) return;
    if (readable("max") && rule.limit == 0) {
      fail("max.limit", "at least 1 with limit: from_request, got 0");
    }
    const bool long_lived = static_cast<Uint128>(1 + rule.max_debt) *
                                static_cast<std::uint64_t>(std::max<Nanos>(rule.window, 0)) >
                            static_cast<Uint128>(crdt::kMaxLifetime);
    if (is_bucket(rule.algorithm) && readable("max_debt") && long_lived) {
      fail("max_debt", fmt::format("(1 + max_debt) times the longest window of at most {}, as any "
                                   "limit may come with a request",
                                   format_duration(crdt::kMaxLifetime)));
    }
    if (readable("algorithm") && rule.algorithm == Algorithm::sliding_log) {
      fail("limit", "a number with algorithm sliding_log: it bounds what is remembered");
    }
    if (readable("slots") && rule.slots != 1) {
      fail("slots",
           fmt::format("1 with limit: from_request, as any window may come, got {}", rule.slots));
    }
    if (readable("enforcement") && rule.enforcement != Enforcement::merged) {
      fail("enforcement",
           fmt::format("merged with limit: from_request, got {}", to_string(rule.enforcement)));
    }
    if (readable("durability") && rule.durability == Durability::reserve) {
      fail("durability", "async or commit with limit: from_request, got reserve");
    }
    if (readable("phase") && rule.phase == Phase::first_hit) {
      fail("phase", "aligned or spread with limit: from_request, as any window may come");
    }
    if (readable("candidate") && rule.candidate) {
      fail("candidate", "none with limit: from_request: the limit is another one each time");
    }
    if (rule.calendar && readable("window")) {
      fail("window", "a length of time with limit: from_request");
    }
  }

  void check_window(const Rule& rule) {
    const bool window_ok =
        rule.calendar || (rule.window >= kMinWindow && rule.window <= kMaxWindow);
    if (readable("window") && !window_ok) {
      fail("window", fmt::format("{} to {}, got {}", format_duration(kMinWindow),
                                 format_duration(kMaxWindow), format_duration(rule.window)));
    }
    if (!readable("algorithm")) return;
    if (rule.algorithm != Algorithm::sliding_window) {
      refuse("slots", rule.slots == 1, rule, "sliding_window has");
      refuse("strict", !rule.strict, rule, "sliding_window has");
      return;
    }
    if (!readable("slots")) return;
    if (rule.slots < 1 || rule.slots > kMaxSlots) {
      fail("slots", fmt::format("1 to {}, got {}", kMaxSlots, rule.slots));
    } else if (readable("window") && !rule.calendar && window_ok && rule.window % rule.slots != 0) {
      fail("slots", fmt::format("a number that divides the window of {} into whole nanoseconds, "
                                "got {}",
                                format_duration(rule.window), rule.slots));
    }
  }

  void check_calendar(const Rule& rule) {
    if (!rule.calendar || !readable("window")) return;
    const Calendars::Loaded& calendar = calendars_.of(*rule.calendar);
    if (calendar.table == nullptr) fail("window.time_zone", calendar.problem);
    if (readable("algorithm") && rule.algorithm != Algorithm::fixed_window) {
      fail("window", fmt::format("a length of time with algorithm {}: only fixed_window follows a "
                                 "calendar",
                                 to_string(rule.algorithm)));
    }
    if (readable("phase") && rule.phase != Phase::aligned) {
      fail("phase",
           fmt::format("aligned, got {}: a calendar's windows begin when the calendar says",
                       to_string(rule.phase)));
    }
  }

  void check_log(const Rule& rule) {
    if (!readable("algorithm") || rule.algorithm != Algorithm::sliding_log) return;
    if (!readable("limit")) return;
    if (rule.limit > kMaxLogLimit) {
      fail("limit", fmt::format("at most {} with algorithm sliding_log, which remembers every "
                                "admission, got {}; sliding_window takes more",
                                kMaxLogLimit, rule.limit));
    } else if (readable("window") && !rule.calendar && rule.window >= kMinWindow &&
               rule.limit * static_cast<std::uint64_t>(kSecond) >
                   kMaxLogRate * static_cast<std::uint64_t>(rule.window)) {
      fail("limit", fmt::format("at most {} a second with algorithm sliding_log, which remembers "
                                "every admission, got {} in {}",
                                kMaxLogRate, rule.limit, format_duration(rule.window)));
    }
  }

  void check_bucket(const Rule& rule) {
    if (!readable("algorithm")) return;
    if (!is_bucket(rule.algorithm)) {
      refuse("burst", rule.burst == 0, rule, "token_bucket and leaky_bucket have");
      refuse("max_debt", rule.max_debt == 1, rule, "token_bucket and leaky_bucket have");
      return;
    }
    refuse("late", rule.late == Late::charge, rule,
           "fixed_window, sliding_window and sliding_log have");
    bool sizes_ok = readable("limit") && readable("burst") && readable("max_debt");
    if (origin_.state(index_, "burst") == State::set && rule.burst == 0) {
      fail("burst", "at least 1, got 0; left out, it is the limit");
      sizes_ok = false;
    }
    if (readable("max_debt") && rule.max_debt > kMaxMaxDebt) {
      fail("max_debt", fmt::format("0 to {}, got {}", kMaxMaxDebt, rule.max_debt));
      sizes_ok = false;
    }
    if (!sizes_ok) return;
    const std::uint64_t burst = rule.burst == 0 ? rule.limit : rule.burst;
    if (burst > std::numeric_limits<std::uint64_t>::max() / (1 + rule.max_debt)) {
      fail(rule.burst == 0 ? "limit" : "burst",
           fmt::format("burst * (1 + max_debt) below 2^64, got {} * {}", burst, 1 + rule.max_debt));
      return;
    }
    if (rule.limit == 0 || rule.calendar || !readable("window")) return;
    if (readable("enforcement") && rule.enforcement == Enforcement::escrow) {
      check_escrow_bucket(rule, burst);
      return;
    }
    // A bucket is kept at most this long after its last use, so it must be full again by then.
    Uint128 fill = static_cast<Uint128>(burst) * (1 + rule.max_debt) *
                   static_cast<std::uint64_t>(std::max<Nanos>(rule.window, 0)) / rule.limit;
    if (fill > static_cast<Uint128>(crdt::kMaxLifetime)) {
      fail(rule.burst == 0 ? "max_debt" : "burst",
           fmt::format("a bucket that fills within {}: burst * (1 + max_debt) * window / limit",
                       format_duration(crdt::kMaxLifetime)));
    }
  }

  /// What a split bucket holds is counted in parts of window / burst of a unit.
  void check_escrow_bucket(const Rule& rule, std::uint64_t burst) {
    EscrowBucketShape shape{rule.limit, rule.window, burst, false};
    if (!shape.fits()) {
      fail(rule.burst == 0 ? "limit" : "burst",
           fmt::format("burst * burst * window, in nanoseconds, and limit * burst below 2^124 with "
                       "enforcement escrow, got a burst of {}",
                       burst));
    }
  }

  void check_cost(const Rule& rule) {
    if (!readable("cost")) return;
    if (rule.cost_by_method.size() > internal::kMaxMethods) {
      fail("cost", fmt::format("at most {} methods, got {}", internal::kMaxMethods,
                               rule.cost_by_method.size()));
      return;
    }
    for (const auto& [method, cost] : rule.cost_by_method) {
      check_name(internal::field_path("cost", method), method);
    }
    if (rule.cost_by_entry.size() > kMaxKey) {
      fail("cost.entries",
           fmt::format("at most {} entries, got {}", kMaxKey, rule.cost_by_entry.size()));
      return;
    }
    for (const EntryCost& entry : rule.cost_by_entry) {
      check_name("cost.entries", entry.key);
      if (entry.weight > kMaxWeight) fail("cost.entries", "at most 1000000000 units for each");
    }
  }

  void check_enforcement(const Rule& rule) {
    if (!readable("enforcement") || !readable("algorithm")) return;
    bool escrow = rule.enforcement == Enforcement::escrow;
    if (readable("durability") && rule.durability == Durability::reserve && !escrow &&
        rule.algorithm != Algorithm::fixed_window && rule.algorithm != Algorithm::sliding_window) {
      fail("durability",
           fmt::format("async or commit with algorithm {}: only fixed_window and sliding_window "
                       "keep a reserve",
                       to_string(rule.algorithm)));
    }
    if (!escrow) return;
    bool bucket = is_bucket(rule.algorithm);
    if (rule.algorithm != Algorithm::fixed_window && !bucket) {
      fail("enforcement",
           fmt::format("merged with algorithm {}, got escrow: fixed_window, token_bucket and "
                       "leaky_bucket have rights",
                       to_string(rule.algorithm)));
    }
    bool async = rule.durability == Durability::async;
    if (bucket && readable("durability") && !async) {
      fail("durability",
           fmt::format("async with enforcement escrow and algorithm {}, got {}: a node that starts "
                       "begins with an empty bucket, so nothing of it is kept",
                       to_string(rule.algorithm), to_string(rule.durability)));
    }
    if (bucket && readable("max_debt") && rule.max_debt != 1) {
      fail("max_debt",
           fmt::format(
               "1, or none, with enforcement escrow, got {}: nothing is admitted twice, so no debt "
               "comes from others",
               rule.max_debt));
    }
    if (!bucket && origin_.state(index_, "durability") == State::set && async) {
      fail("durability", "reserve or commit with enforcement escrow, got async");
    }
    if (origin_.state(index_, "on_failure") == State::set && rule.on_failure == OnFailure::open) {
      fail("on_failure", "closed with enforcement escrow, got open: it never admits too much");
    }
  }

  void check_first_hit(const Rule& rule) {
    if (!readable("phase") || rule.phase != Phase::first_hit) return;
    if (readable("algorithm") && rule.algorithm != Algorithm::fixed_window) {
      fail("phase", fmt::format("aligned or spread with algorithm {}, got first_hit: only the "
                                "windows of fixed_window can begin with a hit",
                                to_string(rule.algorithm)));
    }
    if (readable("enforcement") && rule.enforcement == Enforcement::escrow) {
      fail("phase",
           "aligned or spread with enforcement escrow, got first_hit: rights are shares of windows "
           "that all nodes know before they begin");
    }
    if (readable("durability") && rule.durability == Durability::reserve) {
      fail("phase",
           "aligned or spread with durability reserve, got first_hit: what is ahead is kept for "
           "windows that are known before they begin");
    }
  }

  void check_candidate(const Rule& rule) {
    if (!readable("candidate") || !rule.candidate) return;
    if (readable("enforcement") && rule.enforcement == Enforcement::escrow) {
      fail("candidate",
           "no candidate with enforcement escrow: the rights that nodes hold are those of the "
           "limit");
    }
    if (!readable("algorithm")) return;
    const Candidate& candidate = *rule.candidate;
    if (!is_bucket(rule.algorithm)) {
      if (candidate.burst != 0) {
        fail("candidate.burst", fmt::format("no burst with algorithm {}: only token_bucket and "
                                            "leaky_bucket have it",
                                            to_string(rule.algorithm)));
      }
      return;
    }
    const std::uint64_t burst = candidate.burst == 0 ? candidate.limit : candidate.burst;
    if (readable("max_debt") &&
        burst > std::numeric_limits<std::uint64_t>::max() / (1 + std::uint64_t{rule.max_debt})) {
      fail("candidate", fmt::format("burst * (1 + max_debt) below 2^64, got {} * {}", burst,
                                    1 + std::uint64_t{rule.max_debt}));
    }
  }

  const RuleOrigin& origin_;
  Calendars& calendars_;
  std::vector<RuleError>& errors_;
  const internal::Fail fail_ = [this](std::string_view path, std::string expected) {
    fail(path, std::move(expected));
  };
  std::size_t index_ = 0;
  std::map<std::pair<std::string_view, std::string_view>, std::size_t> names_;
};

}  // namespace

std::string_view to_string(Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::fixed_window:
      return "fixed_window";
    case Algorithm::sliding_window:
      return "sliding_window";
    case Algorithm::sliding_log:
      return "sliding_log";
    case Algorithm::token_bucket:
      return "token_bucket";
    case Algorithm::leaky_bucket:
      return "leaky_bucket";
  }
  return "unknown";
}

std::string_view to_string(Durability durability) {
  switch (durability) {
    case Durability::reserve:
      return "reserve";
    case Durability::async:
      return "async";
    case Durability::commit:
      return "commit";
  }
  return "unknown";
}

std::string_view to_string(OnFailure on_failure) {
  switch (on_failure) {
    case OnFailure::open:
      return "open";
    case OnFailure::closed:
      return "closed";
  }
  return "unknown";
}

std::string_view to_string(Enforcement enforcement) {
  switch (enforcement) {
    case Enforcement::merged:
      return "merged";
    case Enforcement::escrow:
      return "escrow";
    case Enforcement::home:
      return "home";
  }
  return "unknown";
}

std::string_view to_string(GroupOrder order) {
  switch (order) {
    case GroupOrder::listed:
      return "listed";
    case GroupOrder::exact:
      return "exact";
  }
  return "unknown";
}

std::string_view to_string(Late late) {
  switch (late) {
    case Late::charge:
      return "charge";
    case Late::drop:
      return "drop";
  }
  return "unknown";
}

std::string_view to_string(Phase phase) {
  switch (phase) {
    case Phase::aligned:
      return "aligned";
    case Phase::spread:
      return "spread";
    case Phase::first_hit:
      return "first_hit";
  }
  return "unknown";
}

namespace {

std::uint64_t cost_of_entries(const std::vector<EntryCost>& entries, const Request& request) {
  constexpr std::uint64_t kMost = std::numeric_limits<std::uint64_t>::max();
  Uint128 sum = 0;  // 16 products below 2^114
  for (const EntryCost& entry : entries) {
    const std::string_view* text = request.find(entry.key);
    if (text == nullptr) continue;
    std::uint64_t value = 0;
    if (parse_number(*text, value) != Digits::good) return kMost;
    sum += static_cast<Uint128>(entry.weight) * value;
  }
  const Uint128 units = (sum + kWeightUnit - 1) / kWeightUnit;
  return units > kMost ? kMost : static_cast<std::uint64_t>(units);
}

}  // namespace

std::uint64_t Rule::cost_of(const Request& request) const {
  if (!cost_by_entry.empty()) return cost_of_entries(cost_by_entry, request);
  if (cost_by_method.empty()) return default_cost;
  const std::string_view* method = request.find("method");
  if (method == nullptr) return default_cost;
  // A handful of entries; looking one up in the map would need a std::string.
  for (const auto& [each, cost] : cost_by_method) {
    if (each == *method) return cost;
  }
  return default_cost;
}

bool Rule::matches(const Request& request) const {
  for (const Match& each : match) {
    const std::string_view* value = request.find(each.key);
    const auto* exact = std::get_if<MatchExact>(&each.matcher);
    // What most rules ask is asked without a call.
    const bool holds = exact != nullptr && !each.negated
                           ? value != nullptr && internal::same_text(*value, exact->value)
                           : each.holds(value);
    if (!holds) return false;
  }
  return std::all_of(key.begin(), key.end(),
                     [&](const std::string& entry) { return request.find(entry) != nullptr; });
}

std::string RuleError::to_string() const {
  return where(*this) + "expected " + expected;
}

std::string RuleWarning::to_string() const {
  return where(*this) + "warning: " + text;
}

RuleSet::RuleSet(std::vector<Rule> rules)
    : rules_(std::move(rules)), index_(std::make_unique<RuleIndex>(rules_)) {
  auto choice = std::make_unique<RuleChoice>(rules_);
  if (!choice->empty()) choice_ = std::move(choice);
  each_alone_ = choice_ == nullptr && !std::any_of(rules_.begin(), rules_.end(), has_long_list);
}

RuleSet::~RuleSet() = default;

std::shared_ptr<const RuleSet> RuleSet::make(std::vector<Rule> rules,
                                             std::vector<RuleError>& errors) {
  return make(std::move(rules), ProgramOrigin{}, errors);
}

std::shared_ptr<const RuleSet> RuleSet::make(std::vector<Rule> rules, const RuleOrigin& origin,
                                             std::vector<RuleError>& errors) {
  std::vector<RuleError> found;
  Calendars calendars;
  if (rules.size() > internal::kMaxRules) {
    RuleError error;
    error.field = "rules";
    error.expected = fmt::format("at most {} rules, got {}", internal::kMaxRules, rules.size());
    found.push_back(std::move(error));
  } else {
    Checker(origin, calendars, found).check(rules);
  }
  if (!found.empty()) {
    if (found.size() > internal::kMaxErrors) found.resize(internal::kMaxErrors);
    errors.insert(errors.end(), std::make_move_iterator(found.begin()),
                  std::make_move_iterator(found.end()));
    return nullptr;
  }
  for (Rule& rule : rules) {
    // What a home counted must not be forgotten by a crash: nobody else has decided on it.
    if (rule.enforcement == Enforcement::home) rule.durability = Durability::commit;
    if (rule.calendar) rule.calendar->table = calendars.of(*rule.calendar).table;
    if (rule.enforcement == Enforcement::escrow) {
      if (!is_bucket(rule.algorithm) && rule.durability == Durability::async) {
        rule.durability = Durability::reserve;
      }
      rule.on_failure = OnFailure::closed;
    }
    if (!is_bucket(rule.algorithm)) continue;
    if (rule.candidate && (rule.candidate->burst == 0 || rule.candidate->limit == 0)) {
      rule.candidate->burst = rule.candidate->limit;
    }
    // A limit of 0 denies everything, so it has nothing to burst with.
    if (rule.burst == 0 || rule.limit == 0) rule.burst = rule.limit;
  }
  return std::shared_ptr<const RuleSet>(new RuleSet(std::move(rules)));
}

void RuleSet::match(const Request& request, std::vector<std::uint32_t>& out) const {
  if (request.more.empty()) return match_one(request, out);
  const std::size_t before = out.size();
  for (std::size_t i = 0; i < request.descriptors(); ++i) match_one(request.part(i), out);
  const auto first = out.begin() + static_cast<std::ptrdiff_t>(before);
  std::sort(first, out.end());
  out.erase(std::unique(first, out.end()), out.end());
}

void RuleSet::match_one(const Request& request, std::vector<std::uint32_t>& out) const {
  // So few are looked at faster than looked up.
  const std::size_t before = out.size();
  if (rules_.size() > kFewRules || !each_alone_) {
    index_->match(request, out);
    if (choice_ != nullptr) choice_->apply(out, before);
  } else {
    for (std::uint32_t i = 0; i < rules_.size(); ++i) {
      const Rule& rule = rules_[i];
      if (internal::same_text(rule.domain, request.domain) && rule.matches(request)) {
        out.push_back(i);
      }
    }
  }
  if (request.rule_filter.empty()) return;
  const auto first = out.begin() + static_cast<std::ptrdiff_t>(before);
  out.erase(std::remove_if(first, out.end(),
                           [&](std::uint32_t i) {
                             return std::find(request.rule_filter.begin(),
                                              request.rule_filter.end(),
                                              rules_[i].name) == request.rule_filter.end();
                           }),
            out.end());
}

namespace internal {

std::string name_problem(std::string_view name) {
  if (name.empty()) return "a name of at least one byte";
  if (name.size() > kMaxName) {
    return fmt::format("a name of at most {} bytes, got {}", kMaxName, name.size());
  }
  if (!is_clean_text(name)) {
    return fmt::format("UTF-8 text without control characters, got {}", quoted_text(name));
  }
  return {};
}

}  // namespace internal
}  // namespace weir
