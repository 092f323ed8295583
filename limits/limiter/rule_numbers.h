#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include <weir/crdt/ids.h>
#include <weir/limits/algorithms/bucket.h>
#include <weir/limits/limiter/program.h>
#include <weir/limits/rules/rule.h>

namespace weir {

/// Which numbers somebody has.
class NumbersInUse {
 public:
  /// Of those below `end`.
  explicit NumbersInUse(std::uint32_t end) : noted_(end) {}
  /// Others are no numbers, as SeriesTable::kNoRule is none.
  void note(std::uint32_t number) {
    if (number < noted_.size()) noted_[number] = true;
  }
  bool has(std::uint32_t number) const { return number < noted_.size() && noted_[number]; }

 private:
  std::vector<bool> noted_;
};

/// Numbers by which the limiter's table remembers how to read an entry, whatever the rules in force
/// say by now. Not installed.
///
/// A number stands for a rule's identity (what makes it count apart) and, for buckets, the numbers
/// that its small form is read by. It stays while a rule in force or an entry has it, so that a
/// rule that went still knows when its series are over, and one that comes back finds them.
///
/// at() from any thread; one thread at a time calls the rest.
class RuleNumbers {
 public:
  struct Kept {
    crdt::SeriesId identity;
    Rule rule;  ///< as far as its cells need it: without texts, match and cost
    BucketShape bucket;
    CompactBucket compact;  ///< of buckets, as the one before
  };

  RuleNumbers() = default;
  ~RuleNumbers();
  RuleNumbers(const RuleNumbers&) = delete;
  RuleNumbers& operator=(const RuleNumbers&) = delete;

  /// The number of this rule, the same each time until it is forgotten.
  std::uint32_t number_of(const crdt::SeriesId& identity, const Rule& rule);
  /// A number that is in use.
  const Kept& at(std::uint32_t number) const {
    return *place(number).load(std::memory_order_acquire);
  }
  std::size_t size() const { return numbers_.size(); }
  /// All numbers are below this.
  std::uint32_t end() const { return end_; }
  /// Forgets all numbers but these. Nobody may be about to use another one.
  void keep_only(const NumbersInUse& in_use);
  bool knows(const crdt::SeriesId& identity) const { return identities_.contains(identity); }

 private:
  using Place = std::atomic<const Kept*>;
  /// What a number stands for.
  struct Meaning {
    crdt::SeriesId identity;
    std::uint64_t limit = 0;
    std::uint64_t burst = 0;
    std::uint32_t max_debt = 0;
    bool operator==(const Meaning&) const = default;
  };
  struct Hash {
    std::size_t operator()(const Meaning& meaning) const {
      return meaning.identity.lo ^ (meaning.limit * 0x9E3779B97F4A7C15u) ^ (meaning.burst << 20);
    }
  };
  /// Block k holds kFirst << k places: what is there never moves.
  static constexpr std::uint64_t kFirst = 64;
  static constexpr std::size_t kBlocks = 26;  // of 2^32 numbers

  static Meaning meaning_of(const crdt::SeriesId& identity, const Rule& rule);
  static std::unique_ptr<Kept> kept_of(const crdt::SeriesId& identity, const Rule& rule);
  Place& place(std::uint32_t number) const;

  std::array<std::atomic<Place*>, kBlocks + 1> blocks_{};
  std::uint32_t end_ = 0;
  std::vector<std::uint32_t> free_;
  std::unordered_map<Meaning, std::uint32_t, Hash> numbers_;
  std::unordered_map<crdt::SeriesId, std::uint32_t> identities_;  // how many numbers each has
};

}  // namespace weir
