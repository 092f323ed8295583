#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <weir/crdt/time.h>
#include <weir/limits/algorithms/calendar.h>
#include <weir/limits/bounds.h>
#include <weir/limits/request.h>
#include <weir/limits/rules/match.h>

namespace weir {

enum class Algorithm : std::uint8_t {
  fixed_window,
  sliding_window,
  sliding_log,
  token_bucket,
  leaky_bucket
};
enum class Durability : std::uint8_t { async, commit, reserve };
enum class OnFailure : std::uint8_t { open, closed };
/// Who decides. `merged`: every node, from its own count and what it knows of the others'. `home`:
/// the node that is the key's home; the others ask it. `escrow`: every node, from rights that it
/// holds.
enum class Enforcement : std::uint8_t { merged, escrow, home };
/// Where windows begin: by the clock, each series shifted by its hash, or each with the first hit
/// that finds none open.
enum class Phase : std::uint8_t { aligned, spread, first_hit };
/// What becomes of a reservation that is settled after the window that it was made in is over.
enum class Late : std::uint8_t { charge, drop };

/// True for those that count in a bucket's cell; the others count in windows' cells.
constexpr bool is_bucket(Algorithm algorithm) {
  return algorithm == Algorithm::token_bucket || algorithm == Algorithm::leaky_bucket;
}

std::string_view to_string(Algorithm algorithm);
std::string_view to_string(Durability durability);
std::string_view to_string(OnFailure on_failure);
std::string_view to_string(Enforcement enforcement);
std::string_view to_string(Late late);
std::string_view to_string(Phase phase);

/// Which rule of a group is the first: that which stands first in the file, or that whose match is
/// the most exact (docs/rules.md, "Groups").
enum class GroupOrder : std::uint8_t { listed, exact };
std::string_view to_string(GroupOrder order);

/// Another limit that a rule is tried with: counted in the same series, reported, never enforced.
struct Candidate {
  std::uint64_t limit = 0;
  std::uint64_t burst = 0;  ///< buckets: as Rule::burst
  bool operator==(const Candidate&) const = default;
};

/// What a descriptor entry's value, a whole number, costs.
struct EntryCost {
  std::string key;
  std::uint64_t weight = 0;  ///< millionths of a unit for each; at most kMaxWeight
  bool operator==(const EntryCost&) const = default;
};
inline constexpr std::uint64_t kWeightUnit = 1'000'000;
inline constexpr std::uint64_t kMaxWeight = 1'000'000'000 * kWeightUnit;

/// A configured limit. Comparable and copied freely; validated by RuleSet::make.
struct Rule {
  std::string domain;
  std::string name;          ///< unique in its domain; part of the series' identity
  std::vector<Match> match;  ///< all must hold; none: every request of the domain
  /// Descriptor entries that form the series, in this order. A request that lacks one is not
  /// limited by this rule. Empty: one series for the whole rule.
  std::vector<std::string> key;
  /// How the entries of `key` are counted, by their places; those beyond its end are plain.
  std::vector<KeyForm> key_forms;
  /// Of the rules of one group that match, only the first applies. Empty: it is in none.
  std::string group;
  GroupOrder group_order = GroupOrder::listed;  ///< all rules of a group have the same
  /// Names of rules of this domain that do not apply where this one does.
  std::vector<std::string> replaces;
  /// It counts nothing and limits nothing, and is there for the rules in whose place it applies.
  /// All that is said below of limits means nothing then.
  bool unlimited = false;
  /// The request brings limit, window and burst (RequestLimit); those of the rule are the most that
  /// it may bring, and hold where it brings none.
  bool limit_from_request = false;
  std::uint64_t limit = 0;  ///< units per window; 0 denies everything
  Nanos window = kMinute;   ///< 1 ms to 366 days; not used with a calendar
  /// Fixed windows: days, weeks, months or years of a time zone instead of a length of time.
  std::optional<CalendarWindow> calendar;
  Algorithm algorithm = Algorithm::fixed_window;
  /// Buckets: capacity in units, for a leaky one its queue's depth including what leaves next; the
  /// rate is limit per window. 0 stands for the limit: a RuleSet holds the capacity itself, which
  /// is 0 only where the limit is.
  std::uint64_t burst = 0;
  /// Sliding windows: the window is kept as this many sub-windows plus the oldest one, which is
  /// weighted by how much of it still lies in the window. 1 is the usual two-cell estimate.
  std::uint32_t slots = 1;
  /// Sliding windows: the oldest sub-window counts whole, so that no window of this length,
  /// wherever it starts, ever sees more than the limit.
  bool strict = false;
  /// Units per hit, by the descriptor entry `method`.
  std::map<std::string, std::uint64_t> cost_by_method;
  std::uint64_t default_cost = 1;
  /// If there are any, a hit costs the sum of what these cost instead, exact and then rounded up.
  /// One that the descriptor lacks costs nothing, one that is no whole number 2^64 - 1.
  std::vector<EntryCost> cost_by_entry;
  /// Buckets: debt that a healed partition brings is cut to burst * (1 + max_debt).
  std::uint32_t max_debt = 1;
  /// `spread` shifts each series' window boundaries by its hash; `first_hit`, fixed windows only.
  Phase phase = Phase::aligned;
  /// `escrow`: what all members together admit in a window never exceeds the limit; of a bucket,
  /// over any interval, what burst and rate allow. docs/escrow.md
  Enforcement enforcement = Enforcement::merged;
  /// `reserve`: what is durable is ahead of what is used, so that only a key's first use waits for
  /// the disk. Escrow rules of windows with `async` stand for `reserve`, those of buckets are
  /// always `async`, home rules always `commit`: a RuleSet holds that.
  Durability durability = Durability::async;
  /// Windows and logs: `charge` counts in the current window what is settled too late for its own,
  /// `drop` nowhere.
  Late late = Late::charge;
  /// Requests that are denied, by this rule or another, consume from it too: as far as it then has
  /// room for the same request again one window later at the latest. docs/rules.md
  bool count_denied = false;
  std::optional<Candidate> candidate;
  /// Keys for which there is always room in LimiterOptions::max_series, whatever other rules hold.
  /// 0: a fair part.
  std::uint64_t series = 0;
  OnFailure on_failure = OnFailure::open;  ///< of escrow rules `closed`: a RuleSet holds that
  bool shadow = false;                     ///< evaluated, counted and reported, but never denies
  bool hide_headers = false;               ///< HTTP headers say nothing of it
  /// Where this rule decides a denial: the HTTP status, 429, 503 or 403, and what a person is told;
  /// empty: what is told of every rule.
  std::uint16_t deny_status = kDenyStatus;
  std::string deny_message;
  std::map<std::string, std::string> labels;  ///< of its metrics, by name

  /// Units that one hit of this request's first descriptor costs.
  std::uint64_t cost_of(const Request& request) const;
  KeyForm key_form(std::size_t place) const {
    return place < key_forms.size() ? key_forms[place] : KeyForm{};
  }
  /// True if of its first descriptor every match holds and every key entry is present. Whether it
  /// applies is for RuleSet::match() to say, as another rule may stand in its place.
  bool matches(const Request& request) const;

  bool operator==(const Rule&) const = default;
};

/// A mistake in a rules document or in a Rule made by a program.
struct RuleError {
  std::string file;      ///< empty for rules made by a program
  int line = 0;          ///< from 1; 0 if unknown
  int column = 0;        ///< from 1; 0 if unknown
  std::string field;     ///< "rules[2].window"
  std::string expected;  ///< what should stand there, and what does
  /// "rules.yaml:12:5: rules[2].window: expected …"
  std::string to_string() const;
};

/// What is valid, but most likely not meant.
struct RuleWarning {
  std::string file;
  int line = 0;    ///< from 1; 0 if unknown
  int column = 0;  ///< from 1; 0 if unknown
  std::string field;
  std::string text;
  /// "rules.yaml:12:5: rules[2].limit: warning: …"
  std::string to_string() const;
};

class RuleOrigin;  // rule_origin.h
class RuleIndex;   // rule_index.h
class RuleChoice;  // rule_choice.h

/// A validated, immutable set of rules. Shared between threads freely.
class RuleSet {
 public:
  /// Checks every rule and that names are unique per domain: all errors (the first 1000) are
  /// appended to `errors`. Returns null if there were any. At most 100,000 rules.
  static std::shared_ptr<const RuleSet> make(std::vector<Rule> rules,
                                             std::vector<RuleError>& errors);
  /// The same for rules that were read from somewhere: errors say where their fields stand.
  static std::shared_ptr<const RuleSet> make(std::vector<Rule> rules, const RuleOrigin& origin,
                                             std::vector<RuleError>& errors);
  ~RuleSet();
  RuleSet(const RuleSet&) = delete;
  RuleSet& operator=(const RuleSet&) = delete;

  const std::vector<Rule>& rules() const { return rules_; }

  /// Appends the indices, into rules(), of the rules that apply to `request`, in rule order: those
  /// of its domain for which Rule::matches is true of any of its descriptors, without those in
  /// whose place another one of that descriptor applies (Rule::group, Rule::replaces). Allocates
  /// nothing if `out` has room, but for a thread's first calls. Costs well below 1 us for thousands
  /// of rules of which few apply.
  void match(const Request& request, std::vector<std::uint32_t>& out) const;

  /// Whether a rule applies depends on no other rule, and Rule::matches() says so with few
  /// comparisons: where rules are few, it may be asked of each.
  bool each_alone() const { return each_alone_; }

 private:
  explicit RuleSet(std::vector<Rule> rules);
  void match_one(const Request& request, std::vector<std::uint32_t>& out) const;
  std::vector<Rule> rules_;
  std::unique_ptr<const RuleIndex> index_;  // it refers to rules_
  std::unique_ptr<const RuleChoice>
      choice_;  // null: there are no groups, and none replaces another
  bool each_alone_ = true;
};

}  // namespace weir
