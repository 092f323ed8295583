#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include <weir/crdt/ids.h>

namespace weir {

/// Who may have how many of a table's series. Each rule has a guaranteed part; what is in none is
/// for whoever comes first, and so is what a rule has beyond its part. A rule's keys so never take
/// from another one's part, however many they are.
///
/// Rules are named by the numbers that series have (RuleNumbers), of which one rule may have
/// several. A series whose rule is not known is nobody's: it has no part.
///
/// Thread-safe: one mutex, and nothing is locked while it is held.
class SeriesShares {
 public:
  /// Of a rule in force, and the number that its series have from now on.
  struct Part {
    std::uint32_t number = 0;
    crdt::SeriesId rule;
    std::uint64_t guaranteed = 0;
  };
  struct Usage {
    std::uint64_t series = 0;
    std::uint64_t guaranteed = 0;
    std::uint64_t refused = 0;  ///< new series for which there was no room
  };

  /// As long as there are no parts, everything is for whoever comes first.
  explicit SeriesShares(std::size_t all) : all_(all), pool_(all) {}

  /// The rules in force, before any series has one of these numbers. The parts add up to no more
  /// than all. Others lose their part, and what they have counts against what is in none: a part
  /// that has grown is there once as much has gone of what others have beyond theirs.
  void set(std::span<const Part> parts);

  /// For one more series of this rule; false: there is no room. With `anywhere` it may be in
  /// others' parts.
  bool take(std::uint32_t number, bool anywhere = false);
  void give_back(std::uint32_t number);
  /// Of what is in no part, less than a sixteenth is left.
  bool nearly_full() const;
  /// The rule of this number has more than its part: what it has beyond may be asked to go.
  bool beyond(std::uint32_t number) const;
  /// A series turns out to be of another rule. It keeps its place.
  void move(std::uint32_t from, std::uint32_t to);

  Usage of(const crdt::SeriesId& rule) const;
  /// Refused so far, of all rules.
  std::uint64_t refused() const;

 private:
  struct Account {
    std::uint64_t series = 0;
    std::uint64_t guaranteed = 0;
    std::uint64_t refused = 0;
    bool named = false;  // while set() looks which are
    std::uint64_t beyond() const { return series > guaranteed ? series - guaranteed : 0; }
  };
  // With the mutex.
  Account& account(std::uint32_t number);
  const Account& account(std::uint32_t number) const;
  void count();

  const std::size_t all_;
  mutable std::mutex mutex_;
  std::unordered_map<crdt::SeriesId, Account> accounts_;  // which never move
  std::vector<Account*> by_number_;
  Account nobody_;
  std::uint64_t total_ = 0;
  std::uint64_t pool_;        // in no part
  std::uint64_t beyond_ = 0;  // of the pool, taken
  std::uint64_t refused_ = 0;
};

}  // namespace weir
