#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <utility>

#include <absl/container/btree_map.h>

#include <weir/crdt/cell.h>
#include <weir/crdt/time.h>

namespace weir::crdt {

/// What relays said of slots whose owners speak for themselves, and these have not confirmed yet:
/// of each slot the first claim, which an honest relay's owner confirms soon. Holds kMost; further
/// ones are not kept, as a relay that lies once lies again. Not thread-safe.
class RelayedClaims {
 public:
  static constexpr std::size_t kMost = 1024;

  struct Claim {
    std::uint32_t relay = 0;  ///< as PeerIndex
    std::uint32_t owner = 0;
    std::uint64_t value = 0;
    Nanos since = 0;
    std::uint64_t repaired = 0;  ///< how many cells the owner had repaired here then
  };

  /// `claim.value` is taken from the slot.
  void note(const CellId& cell, const Slot& slot, Claim claim) {
    claim.value = slot.value;
    if (claims_.size() < kMost) claims_.emplace(Key{cell, slot.id}, claim);
  }

  /// Erases those of which over(cell, slot, claim) is true.
  template <typename Over>
  void erase_if(Over over) {
    for (auto at = claims_.begin(); at != claims_.end();) {
      at = over(at->first.first, at->first.second, at->second) ? claims_.erase(at) : std::next(at);
    }
  }

 private:
  using Key = std::pair<CellId, SlotId>;
  absl::btree_map<Key, Claim> claims_;
};

}  // namespace weir::crdt
