#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include <absl/container/btree_set.h>

#include <weir/crdt/bucket_queue.h>
#include <weir/crdt/cell.h>
#include <weir/crdt/cell_arena.h>
#include <weir/crdt/cell_index.h>
#include <weir/crdt/message.h>
#include <weir/crdt/packed_cell.h>
#include <weir/crdt/table_hash.h>
#include <weir/crdt/writers.h>

namespace weir::crdt {

/// What anti-entropy compares cells by: equal cells have equal digests. The sum over the slots, and
/// for buckets the state, each mixed with the cell's key.
std::uint64_t digest_of(const Cell& cell);
/// Of its group.
std::uint32_t shard_number(const CellId& id);
Group group_of(const CellId& id);

/// The cells of a replica, packed (packed_cell.h), in groups that are compared and end together,
/// with what follows from all of them kept up to date: the groups' digests, the number of cells,
/// what each writer counted, which cells hold rows of escrow rules.
///
/// No call takes time in proportion to what is held, except where said. A RecordRef names a cell
/// until the next call that changes one. Not thread-safe.
class CellStore {
 public:
  /// `seed`: secret, where strangers choose ids.
  /// `self`: the incarnation of most slots; those take the least room.
  explicit CellStore(std::uint64_t seed, const Incarnation& self = {})
      : hash_(seed), writers_(seed), buckets_(arena_) {
    writers_.number_of(self);
  }

  /// 0 if it is not held.
  RecordRef find(const CellId& id) const;
  /// Calls visit(item) for each, with the memory of the next ones' cells on its way: most of what a
  /// cell costs is waiting for memory. `id_of(item)` is a CellId. `visit` may change cells.
  template <typename Item, typename IdOf, typename Visit>
  void for_each_ahead(std::span<const Item> items, IdOf id_of, Visit visit) const;

  void read(RecordRef ref, HeldCell& out) const {
    unpack(arena_.at(ref), writers_, lifetimes_, out);
  }
  CellId id(RecordRef ref) const { return packed_id(arena_.at(ref), lifetimes_); }
  /// Brings what read() reads closer.
  void prefetch(RecordRef ref) const {
    __builtin_prefetch(arena_.at(ref));
    __builtin_prefetch(arena_.at(ref) + 56);
  }
  /// The caller's, 0 at first, at most kMaxStamp.
  std::uint64_t stamp(RecordRef ref) const { return packed_stamp(arena_.at(ref)); }
  void set_stamp(RecordRef ref, std::uint64_t stamp) { set_packed_stamp(arena_.at(ref), stamp); }

  /// What `ref`, which is find(id), names; the empty cell if that is 0. Keeps the room of `out`.
  void read(RecordRef ref, const CellId& id, HeldCell& out) const;

  /// Joins a part of a cell in; see join() in cell.h. `ref` is what find() says of the cell and
  /// `held` what read() made of that; both become what they are afterwards: a cell that is not held
  /// will be. `own`, if it is given and anything changes, is the slot that this incarnation counts
  /// in from now on. True if anything changed.
  bool join(RecordRef& ref, HeldCell& held, std::span<const Slot> slots, const BucketState& bucket,
            const SlotId* own = nullptr);
  /// The same of a cell that was not read.
  bool join(RecordRef& ref, const CellId& id, std::span<const Slot> slots,
            const BucketState& bucket, const SlotId* own = nullptr) {
    read(ref, id, scratch_);
    return join(ref, scratch_, slots, bucket, own);
  }
  /// The cell holds nothing any more, has no stamp and no own slot, but is held.
  void clear(RecordRef& ref);

  // What ends.

  /// Takes away every group whose generation has ended at `floor`: its cells are not held any more.
  void end(Nanos floor);
  /// Frees up to `most` cells that were taken away, and calls freed(stamp, ref) for each. True if
  /// there are more.
  bool free_ended(std::size_t most, const std::function<void(std::uint64_t, RecordRef)>& freed);
  /// A bucket whose end, as it was when it was put, has come; 0 if there is none. It must be put
  /// again, or dropped.
  RecordRef take_due_bucket(Nanos floor) { return buckets_.take(floor); }
  void put_bucket(RecordRef ref, Nanos end) { buckets_.put(ref, end); }
  void drop_bucket(RecordRef ref);

  // All of them.

  std::size_t size() const { return size_; }
  const Writers& writers() const { return writers_; }
  /// Bytes of memory that cells take, without the groups'.
  std::size_t bytes() const;
  /// Calls visit(group, cells, digest) for each group that holds cells, in their order.
  template <typename Visit>
  void for_each_group(Visit visit) const;
  std::size_t size_of(const Group& group) const;
  /// Calls visit(ref, id) for cells of the group with table hashes from `from` on, until it returns
  /// false: then returns the hash to go on from, whatever comes and goes until then; else
  /// CellIndex::kEnd. In proportion to what it visits.
  template <typename Visit>
  std::uint64_t walk(const Group& group, std::uint64_t from, Visit visit) const;
  /// Every cell that holds rows of escrow rules. In proportion to these.
  const absl::btree_set<CellId>& with_rows() const { return with_rows_; }

 private:
  struct Shard {
    CellIndex cells;
    std::uint64_t digest = 0;
  };
  /// Of one generation: few are live at a time (Epoch bounds both length and start).
  using Shards = std::array<Shard, 1u << kShardBits>;

  /// Where a cell is, or would be.
  struct Spot {
    CellId id;
    Shards* shards = nullptr;  // null: not known
    Shard* shard = nullptr;
    std::uint32_t hash = 0;
  };

  const Shard* shard_of(const Group& group) const;
  const Spot& spot_of(const CellId& id) const;
  Shard& shard_made(const CellId& id);
  std::uint64_t grow(const Cell& cell, std::uint64_t seed, std::span<const Slot> slots);
  void write(RecordRef& ref, const HeldCell& held, Shard& shard);
  void forget(const HeldCell& held);

  TableHash hash_;
  CellArena arena_;
  Writers writers_;
  Lifetimes lifetimes_;
  BucketQueue buckets_;
  std::map<Generation, std::unique_ptr<Shards>> generations_;
  Nanos first_end_ = kNever;  // of the generations
  std::deque<std::unique_ptr<Shards>> ended_;
  std::size_t ended_shard_ = 0;  // of the first of them: those before it are empty
  absl::btree_set<CellId> with_rows_;
  std::size_t size_ = 0;
  mutable Spot spot_;  // that was asked for last: one cell is asked for several times in a row
  HeldCell scratch_;
  std::vector<std::byte> packed_;
};

template <typename Item, typename IdOf, typename Visit>
void CellStore::for_each_ahead(std::span<const Item> items, IdOf id_of, Visit visit) const {
  constexpr std::size_t kIndexAhead = 32;   // its place in the index is fetched
  constexpr std::size_t kRecordAhead = 16;  // its place is read, and its record fetched
  std::array<Spot, kIndexAhead> spots;
  for (std::size_t at = 0; at < items.size() + kIndexAhead; ++at) {
    Spot& spot = spots[at % kIndexAhead];
    if (at >= kIndexAhead) {
      spot_ = spot;
      visit(items[at - kIndexAhead]);
    }
    std::size_t record = at + kRecordAhead - kIndexAhead;
    if (at + kRecordAhead >= kIndexAhead && record < items.size()) {
      const Spot& next = spots[record % kIndexAhead];
      if (next.shard != nullptr) {
        next.shard->cells.find(next.hash, [this](RecordRef ref) {
          prefetch(ref);
          return true;
        });
      }
    }
    if (at >= items.size()) continue;
    spot = spot_of(id_of(items[at]));
    if (spot.shard != nullptr) spot.shard->cells.prefetch(spot.hash);
  }
}

template <typename Visit>
std::uint64_t CellStore::walk(const Group& group, std::uint64_t from, Visit visit) const {
  const Shard* shard = shard_of(group);
  if (shard == nullptr) return CellIndex::kEnd;
  return shard->cells.walk(
      from, [this](RecordRef ref) { __builtin_prefetch(arena_.at(ref)); },
      [&](RecordRef ref) { return visit(ref, id(ref)); });
}

template <typename Visit>
void CellStore::for_each_group(Visit visit) const {
  for (const auto& [generation, shards] : generations_) {
    for (std::uint32_t shard = 0; shard < shards->size(); ++shard) {
      const Shard& each = (*shards)[shard];
      if (each.cells.size() > 0) visit(Group{generation, shard}, each.cells.size(), each.digest);
    }
  }
}

}  // namespace weir::crdt
