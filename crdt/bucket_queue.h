#pragma once

#include <cstdint>
#include <map>

#include <weir/crdt/cell_arena.h>
#include <weir/crdt/time.h>

namespace weir::crdt {

/// Every bucket that is held, by when to see whether it is over. Use moves a bucket's end away all
/// the time; here it stays where it was put, so use costs nothing, and is seen when the end comes
/// that it had then. Links the records themselves (PackedHead::before and behind), which may move.
/// Not thread-safe.
class BucketQueue {
 public:
  explicit BucketQueue(CellArena& arena) : arena_(arena) {}

  /// Not in the queue now. It is due in the second after `end`.
  void put(RecordRef bucket, Nanos end);
  /// One that is due at `floor`, or 0. No longer in the queue.
  RecordRef take(Nanos floor);
  /// `from` became `to`, and its head was copied.
  void moved(RecordRef to);

 private:
  CellArena& arena_;
  std::map<std::int64_t, RecordRef>
      due_;  // by second: a head of its own, which the first stands behind
};

}  // namespace weir::crdt
