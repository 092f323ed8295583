#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include <weir/crdt/cell.h>
#include <weir/limits/escrow/escrow_bucket.h>
#include <weir/limits/escrow/escrow_cell.h>

namespace weir {

/// One cell of a window, as a limiter holds it.
struct WindowCell {
  crdt::Epoch epoch;
  std::uint64_t own = 0;     ///< this node's current slot
  std::uint64_t others = 0;  ///< all other slots
  bool dirty = false;        ///< own has grown since it was last drained
  std::uint64_t held = 0;    ///< by open tickets; never drained
  // What was given back of own and others: at most as much.
  std::uint64_t own_back = 0;
  std::uint64_t others_back = 0;
  bool back_dirty = false;  ///< own_back has grown since it was last drained
  // Durability reserve: the slot is kept ahead of what was counted.
  std::uint64_t block = 0;    ///< by so much; 0: another durability
  std::uint64_t ceiling = 0;  ///< the slot as handed over
  std::uint64_t durable = 0;  ///< the slot as far as it is on the disk
  /// What was counted is not on the disk: the answer must wait.
  bool waits() const { return own > durable; }
  /// What decisions count.
  std::uint64_t total() const {
    const std::uint64_t mine = own - std::min(own, own_back);
    return add_saturated(add_saturated(mine, others - std::min(others, others_back)), held);
  }
  bool empty() const { return own == 0 && others == 0 && held == 0; }
};

struct BucketCell {
  std::uint64_t birth = 0;
  std::uint64_t last_birth = 0;  ///< time may stand still, but no two slots may share a birth
  std::uint64_t own = 0;
  std::uint64_t others = 0;
  crdt::BucketState state;
  crdt::Checkpoint made;  ///< by the last consumption here: it surely counts all of own
  bool dirty = false;
  std::uint64_t held = 0;  ///< by open tickets; no part of the state
  /// Of own, given back: which the checkpoint's debt says, and no slot does.
  std::uint64_t own_back = 0;
  std::uint64_t total() const { return add_saturated(own, others); }
  /// As if never used, but for what is held.
  void reset() {
    BucketCell fresh;
    fresh.last_birth = last_birth;
    fresh.held = held;
    *this = fresh;
  }
};

/// A series in its general form: everything that does not fit an Entry of the table. Guarded by
/// that entry's lock.
struct Series {
  std::unique_ptr<BucketCell> bucket;  ///< rarely here: see Form::bucket
  std::vector<WindowCell> windows;     ///< by start, oldest first
  std::vector<EscrowCell> escrow;      ///< the same for an escrow rule, which has no `windows`
  std::unique_ptr<EscrowBucket> escrow_bucket;  ///< and `escrow` its lending periods

  BucketCell& make_bucket() {
    if (!bucket) bucket = std::make_unique<BucketCell>();
    return *bucket;
  }
  WindowCell* find(const crdt::Epoch& epoch) {
    for (auto cell = windows.rbegin(); cell != windows.rend(); ++cell) {
      if (cell->epoch <= epoch) return cell->epoch == epoch ? &*cell : nullptr;
    }
    return nullptr;
  }
  WindowCell& window(const crdt::Epoch& epoch) {
    if (WindowCell* cell = find(epoch)) return *cell;
    auto at = std::lower_bound(
        windows.begin(), windows.end(), epoch,
        [](const WindowCell& cell, const crdt::Epoch& wanted) { return cell.epoch < wanted; });
    return *windows.insert(at, WindowCell{epoch});
  }
  std::uint64_t count(const crdt::Epoch& epoch) {
    const WindowCell* cell = find(epoch);
    return cell == nullptr ? 0 : cell->total();
  }
  EscrowCell* find_escrow(const crdt::Epoch& epoch) {
    auto at = std::find_if(escrow.begin(), escrow.end(),
                           [&](const EscrowCell& cell) { return cell.epoch == epoch; });
    return at == escrow.end() ? nullptr : &*at;
  }
  EscrowCell& escrow_cell(const crdt::Epoch& epoch) {
    if (EscrowCell* cell = find_escrow(epoch)) return *cell;
    auto at = std::find_if(escrow.begin(), escrow.end(),
                           [&](const EscrowCell& cell) { return epoch < cell.epoch; });
    at = escrow.insert(at, EscrowCell{});
    at->epoch = epoch;
    return *at;
  }
  void forget_windows(Nanos before) {
    std::erase_if(escrow, [before](const EscrowCell& cell) {
      return cell.epoch.expiry <= before && cell.idle();
    });
    std::erase_if(windows, [before](const WindowCell& cell) {
      return cell.epoch.expiry <= before && !cell.dirty && !cell.back_dirty && cell.held == 0;
    });
  }
};

}  // namespace weir
