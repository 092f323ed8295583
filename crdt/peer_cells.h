#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include <weir/crdt/epoch.h>
#include <weir/crdt/time.h>

namespace weir::crdt {

/// How many cells each peer has brought here that are not over yet, against how many it may. Cells
/// that live longer than those of any rule here have a bound of their own, a small one: in them
/// those of a disk count too, as one that stopped with them would be filled anew at each start.
/// Not thread-safe.
class PeerCells {
 public:
  PeerCells(std::size_t peers, std::size_t most, std::size_t most_long)
      : most_{most, most_long}, accounts_(peers + 1) {}

  /// A cell that ends at `end`, of those that live long or not. False: the peer has its part.
  bool take(std::size_t peer, bool lives_long, Nanos end) {
    std::size_t held = accounts_[peer].held[lives_long];
    if (lives_long) held += accounts_.back().held[true];
    if (held >= most_[lives_long]) return false;
    accounts_[peer].add(lives_long, end);
    return true;
  }
  /// A cell that lives long was found on the disk.
  void found(Nanos end) { accounts_.back().add(true, end); }

  /// What ended at or before `floor` counts no more.
  void end(Nanos floor) {
    for (Account& account : accounts_) account.end(floor);
  }

 private:
  struct Account {
    /// By when they end, which is rounded up as generations are: so it has few entries.
    std::map<Nanos, std::array<std::size_t, 2>> by_end;
    std::array<std::size_t, 2> held{};

    void add(bool lives_long, Nanos end) {
      ++by_end[end][lives_long];
      ++held[lives_long];
    }
    void end(Nanos floor) {
      while (!by_end.empty() && by_end.begin()->first <= floor) {
        for (std::size_t i = 0; i < held.size(); ++i) held[i] -= by_end.begin()->second[i];
        by_end.erase(by_end.begin());
      }
    }
  };

  std::array<std::size_t, 2> most_;
  std::vector<Account> accounts_;  // of each peer, and at last of the disk
};

}  // namespace weir::crdt
