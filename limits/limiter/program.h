#pragma once

// The rules as decisions need them. Not installed.

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <numeric>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include <weir/limits/algorithms/bucket.h>
#include <weir/limits/algorithms/divisor.h>
#include <weir/limits/algorithms/window.h>
#include <weir/limits/escrow/escrow_bucket.h>
#include <weir/limits/limiter.h>
#include <weir/limits/rules/rule.h>
#include <weir/limits/series/keyed_hash.h>
#include <weir/limits/series/series_table.h>

namespace weir {

using crdt::SeriesId;

/// A thread may still hold a `now` from before it was descheduled; cells are kept this much longer.
inline constexpr Nanos kGrace = 2 * kSecond;
/// What threads write often is kept apart: each has one of these, those beyond share the last.
inline constexpr std::size_t kStripes = 16;
/// At most this many rules are looked at one by one, which is faster than looking them up.
inline constexpr std::size_t kScannedRules = 8;

struct alignas(32) AtomicCounters {
  std::atomic<std::uint64_t> allowed{0};
  std::atomic<std::uint64_t> denied{0};
  std::atomic<std::uint64_t> degraded{0};
  std::atomic<std::uint64_t> exhausted_locally{0};
};

/// A bucket whose debt is all counted in its checkpoint, and fits 64 bits in ticks that are `scale`
/// of a BucketShape's (what rate and unit have in common; every debt is a multiple of it). Says
/// what evaluate_bucket and consume_bucket say, at a fraction of the cost.
struct CompactBucket {
  bool fits = false;  // every debt that can be reached, and every cost up to the burst on top
  std::uint64_t scale = 1;
  internal::Divisor rate;
  internal::Divisor unit;
  std::uint64_t capacity = 0;
  Nanos fill_time = 0;

  static CompactBucket of(const BucketShape& shape) {
    CompactBucket made;
    if (shape.rate == 0) return made;
    made.scale = std::gcd(shape.rate, static_cast<std::uint64_t>(shape.unit));
    made.rate = internal::Divisor(shape.rate / made.scale);
    made.unit = internal::Divisor(static_cast<std::uint64_t>(shape.unit) / made.scale);
    made.fits = (shape.cap() + shape.ticks(shape.burst)) / made.scale < crdt::DebtTicks{1} << 62;
    made.capacity = made.fits ? shape.burst * made.unit.value() : 0;
    made.fill_time = shape.fill_time();
    return made;
  }
  /// Time behind the entry's last touch counts as the last touch.
  [[gnu::always_inline]] std::uint64_t debt(const SeriesEntry& entry, Nanos now) const {
    std::uint64_t owed = entry.bucket.debt;
    if (now <= entry.time) return owed;
    std::uint64_t passed = static_cast<std::uint64_t>(now) - static_cast<std::uint64_t>(entry.time);
    std::uint64_t drained = 0;
    if (__builtin_mul_overflow(passed, rate.value(), &drained) || drained >= owed) return 0;
    return owed - drained;
  }
  [[gnu::always_inline]] Nanos drain_time(std::uint64_t debt) const {
    std::uint64_t time = rate.ceil(debt);
    return time > static_cast<std::uint64_t>(kMaxTime) ? kNever : static_cast<Nanos>(time);
  }
};

/// What a bucket owed when a request came.
struct Owed {
  std::uint64_t debt = 0;
  Nanos ahead = 0;  // by which another thread has touched it later than now
};

struct CompiledCandidate;

/// A rule as decisions need it.
struct CompiledRule {
  const Rule* rule = nullptr;
  std::uint32_t index = 0;                  // of the rule
  std::uint32_t number = 0;                 // see RuleNumbers
  std::uint64_t hash_number = 0;            // of hash_key, in all of this process
  internal::KeyedHash hash_key{HashKey{}};  // of the cluster's and the rule's identity in one
  bool plain_cost = false;
  bool formed = false;   // some entry of its key is not counted as it is (Rule::key_forms)
  bool special = false;  // an exemption, or of numbers that the request brings: see add_special()
  std::uint64_t default_cost = 1;
  bool shadow = false;
  bool commit = false;  // its answers wait for the disk, where there is one
  bool bucket_cell = false;
  bool log = false;        // instants of admissions count, each for a window: first_hit too
  bool first_hit = false;  // admissions share the instant of the first that found no window open
  bool count_denied = false;
  bool spread = false;
  bool small = false;          // its series mostly are in a small form, see decide_alone()
  bool small_windows = false;  // two windows are enough for Form::window
  bool escrow = false;
  bool may_have_lost = false;  // it denies where counts may be missing: LimiterOptions::lost
  std::uint64_t reserve = 0;   // durability reserve: kept ahead of what is used
  SeriesId name;               // of an escrow rule, alike on all nodes
  bool plain_windows = false;  // and all are of one length, the older one weighted
  WindowShape window;          // but for a spread phase
  internal::Divisor sub;       // its length
  std::uint64_t limit = 0;     // as reported
  BucketShape bucket;
  CompactBucket compact;
  EscrowBucketShape escrow_bucket;
  std::shared_ptr<const CompiledCandidate> candidate;  // mostly none
};

/// Another limit that a rule is tried with.
struct CompiledCandidate {
  Rule rule;                                     // with that limit
  CompiledRule compiled;                         // of `rule`
  mutable std::atomic<std::uint64_t> denied{0};  // requests that it would have
};

/// What says whether a rule applies, where there are so few that each is looked at.
struct Prefilter {
  std::string_view domain;
  bool same_domain = false;  // as the one before has
  bool one_entry = false;    // `key` is all that a request must have
  std::string_view key;
  const CompiledRule* compiled = nullptr;
};

/// The rules in force, and what was counted of them while they were.
struct Program {
  std::uint64_t version = 0;
  std::shared_ptr<const RuleSet> rules;
  std::vector<CompiledRule> compiled_rules;  // by rule
  std::vector<Prefilter> prefilters;         // by rule, or none
  std::vector<SeriesId> identities;          // by rule
  std::unordered_set<std::string_view> domains;
  std::unordered_map<SeriesId, std::uint32_t> by_identity;
  std::unordered_map<SeriesId, std::uint32_t> by_name;  // escrow rules, by CompiledRule::name
  std::array<std::unique_ptr<AtomicCounters[]>, kStripes> counters;  // by rule

  /// Null if there is none.
  const CompiledRule* find(const SeriesId& identity) const {
    auto found = by_identity.find(identity);
    return found == by_identity.end() ? nullptr : &compiled_rules[found->second];
  }
  const CompiledRule* find_escrow(const SeriesId& name) const {
    auto found = by_name.find(name);
    return found == by_name.end() ? nullptr : &compiled_rules[found->second];
  }
  RuleCounters count(std::uint32_t rule) const {
    RuleCounters sum;
    for (const auto& stripe : counters) {
      sum.allowed += stripe[rule].allowed.load(std::memory_order_relaxed);
      sum.denied += stripe[rule].denied.load(std::memory_order_relaxed);
      sum.degraded += stripe[rule].degraded.load(std::memory_order_relaxed);
      sum.exhausted_locally += stripe[rule].exhausted_locally.load(std::memory_order_relaxed);
    }
    if (const CompiledCandidate* candidate = compiled_rules[rule].candidate.get()) {
      sum.candidate_denied = candidate->denied.load(std::memory_order_relaxed);
    }
    return sum;
  }
};

/// What Limiter::prepare made, until it is in force.
struct PreparedRules {
  explicit PreparedRules(std::unique_ptr<Program> made) : program(std::move(made)) {}
  std::unique_ptr<Program> program;
};

SeriesId hash_with(const internal::KeyedHash& hash_key, std::string_view text);
/// Appended with its length: ("a", "bc") and ("ab", "c") differ.
void append_text(std::string& out, std::string_view text);
/// What makes two rules count apart. Not the numbers: a changed limit keeps its counts.
std::string identity(const Rule& rule);
/// `number`: see RuleNumbers. The rule must outlive it.
CompiledRule compile(const Rule& rule, std::uint32_t number, const SeriesId& identity);
/// The compiled rules must stay where they are.
std::vector<Prefilter> prefilters_of(const std::vector<CompiledRule>& compiled_rules);

}  // namespace weir
