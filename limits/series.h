#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include <weir/crdt/cell.h>

namespace weir {

/// One cell of a window, as a limiter holds it.
struct WindowCell {
  crdt::Epoch epoch;
  std::uint64_t own = 0;     ///< this node's current slot
  std::uint64_t others = 0;  ///< all other slots
  bool dirty = false;        ///< own has grown since it was last drained
  std::uint64_t held = 0;    ///< by open tickets; never drained
  /// What decisions count.
  std::uint64_t total() const { return add_saturated(add_saturated(own, others), held); }
  bool empty() const { return own == 0 && others == 0 && held == 0; }
};

struct BucketCell {
  std::uint64_t birth = 0;
  std::uint64_t last_birth = 0;  ///< time may stand still, but no two slots may share a birth
  std::uint64_t own = 0;
  std::uint64_t drained = 0;  ///< of own, handed to the replica
  std::uint64_t others = 0;
  crdt::BucketState state;
  crdt::Checkpoint made;  ///< by the last consumption here: it surely counts all of own
  bool dirty = false;
  std::uint64_t held = 0;  ///< by open tickets; no part of the state
  std::uint64_t total() const { return add_saturated(own, others); }
  /// As if never used, but for what is held.
  void begin_anew() {
    BucketCell fresh;
    fresh.last_birth = last_birth;
    fresh.held = held;
    *this = fresh;
  }
};

/// A series in its general form: everything that does not fit an Entry of the table. Guarded by
/// that entry's lock.
struct Series {
  std::vector<WindowCell> windows;  ///< by start, oldest first
  std::unique_ptr<BucketCell> bucket;

  BucketCell& make_bucket() {
    if (bucket == nullptr) bucket = std::make_unique<BucketCell>();
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
  void forget_windows(Nanos before) {
    std::erase_if(windows, [before](const WindowCell& cell) {
      return cell.epoch.expiry <= before && !cell.dirty && cell.held == 0;
    });
  }
};

}  // namespace weir
