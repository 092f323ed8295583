#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include <absl/container/inlined_vector.h>

#include <weir/crdt/epoch.h>
#include <weir/crdt/ids.h>
#include <weir/crdt/time.h>

namespace weir::crdt {

/// Debt in units of 1/window_ns of one request: a product of a count below 2^64 and a window below
/// 2^63, so it fits. Exact for every rate (no interval is ever rounded), and independent of the
/// rule's limit, so a limit may change while buckets live.
using DebtTicks = Uint128;

/// One writer's count. Written by that writer alone; only grows.
struct Slot {
  SlotId id;
  std::uint64_t value = 0;
  friend bool operator==(const Slot&, const Slot&) = default;
};

/// Of one cell. Most have one, which takes no memory of its own.
using Slots = absl::InlinedVector<Slot, 1>;

/// "When `counted` units had been consumed, at time `at`, the bucket owed `debt`."
/// Better checkpoints win whole: larger `counted`; on a tie the earlier `at` (its debt has drained
/// for longer), then the smaller debt. It counts slots that travel with it, so counted <= the sum
/// of the slots wherever it is seen.
struct Checkpoint {
  std::uint64_t counted = 0;
  Nanos at = 0;
  DebtTicks debt = 0;
  friend bool operator==(const Checkpoint&, const Checkpoint&) = default;
};

/// True if `a` replaces `b` in a join.
bool wins(const Checkpoint& a, const Checkpoint& b);

/// What a bucket's cell has besides its slots. A join-semilattice of its own.
struct BucketState {
  Checkpoint checkpoint;
  Nanos touched = 0;  ///< no slot of this cell grew after this instant; join: max
  Nanos expiry = 0;   ///< the bucket is full again and may be dropped from here on; join: max
  friend bool operator==(const BucketState&, const BucketState&) = default;
};

void join(BucketState& into, const BucketState& from);

/// The state of one cell, or a part of it: a part is itself a state, and merging it is the same
/// join. Slots are sorted by id and unique. `bucket` is meaningful only if id.is_bucket().
struct Cell {
  CellId id;
  Slots slots;
  BucketState bucket;

  /// Saturating sum of the slots, without what was given back.
  std::uint64_t total() const;
  /// What was given back of that, of windows: by each writer at most what it counted. A saturating
  /// sum, too.
  std::uint64_t given_back() const;
  /// The value of one slot, 0 if absent.
  std::uint64_t value_of(const SlotId& slot) const;
  /// Raises one slot to at least `value`. Returns true if it strictly grew (a slot that is new with
  /// value 0 does not count as growth and is not stored).
  bool raise(const SlotId& slot, std::uint64_t value);
  /// When the cell may be dropped: its epoch's expiry, or the bucket's.
  Nanos expiry() const { return id.is_bucket() ? bucket.expiry : id.epoch.expiry; }

  friend bool operator==(const Cell&, const Cell&) = default;
};

/// Per-slot max, and for buckets the join of BucketState; the checkpoint is cut so that it counts
/// no more than the slots present. Requires equal ids. Returns true if `into` changed.
bool join(Cell& into, const Cell& from);
/// The same with a part that nobody holds as a cell. `bucket` is read only of buckets.
bool join(Cell& into, std::span<const Slot> slots, const BucketState& bucket);

/// The birth of a windowed slot that says what its writer gave back of what it counted in the slot
/// whose birth is 0. It grows as every slot does, and counts up to that one's value: a part of a
/// cell may have it without that.
inline constexpr std::uint64_t kBackRow = 4;

/// What the birth of a windowed slot may be, and that of a bucket's never is but for 0: 0 for a
/// count, kBackRow, or a row of an escrow rule (escrow.h).
constexpr bool is_row(std::uint64_t birth) {
  return birth <= kBackRow || birth >> 63 != 0;
}

/// A well-formed cell: valid epoch; slots sorted, unique, non-zero; windowed slots have is_row();
/// a bucket's checkpoint counts at most its slots (one that counts nothing says nothing: it is the
/// empty one), and its times are in order. What comes from a socket or a disk is checked with this
/// before it is joined.
bool valid(const Cell& cell);

/// The debt of a bucket at `now`, in ticks, as a pure function of the state: the checkpoint's debt
/// drained to the last touch, plus everything the checkpoint has not counted (taken as consumed at
/// that last touch, the latest it can have been), cut to `cap`, drained from there to `now`.
///
/// Never below the true debt of the consumption this state knows, and with one writer equal to it:
/// adding a consumption u raises an exact bucket's debt at any later time by at most u, so
/// debt(touched) <= checkpoint(touched) + uncounted. `rate` is ticks drained per nanosecond (the
/// rule's limit per window), `unit` the ticks of one request (window_ns).
///
/// A total that has saturated no longer tells what was consumed, nor the checkpoint what it
/// counted: then the debt is taken as `cap` at the last touch, until the bucket drains and is begun
/// anew.
DebtTicks debt_at(const BucketState& bucket, std::uint64_t total, Nanos now, std::uint64_t rate,
                  Nanos unit, DebtTicks cap);

/// A part of a replica's state: cells, and who their writers are.
struct Delta {
  std::vector<Cell> cells;
  std::map<Incarnation, Member> members;
  bool empty() const { return cells.empty(); }
  friend bool operator==(const Delta&, const Delta&) = default;
};

}  // namespace weir::crdt
