#include <weir/crdt/cell_store.h>

#include <algorithm>
#include <cstring>

#include <weir/crdt/escrow.h>

namespace weir::crdt {
namespace {

/// What the digests of a slot's values have in common. `key` is its cell's.
std::uint64_t slot_seed(std::uint64_t key, const SlotId& id) {
  return mix64(key ^ mix64(id.writer.hi, id.writer.lo), id.birth);
}

std::uint64_t state_digest(std::uint64_t seed, const BucketState& bucket) {
  std::uint64_t state = seed;
  for (std::uint64_t word :
       {bucket.checkpoint.counted, static_cast<std::uint64_t>(bucket.checkpoint.at),
        static_cast<std::uint64_t>(bucket.checkpoint.debt >> 64),
        static_cast<std::uint64_t>(bucket.checkpoint.debt),
        static_cast<std::uint64_t>(bucket.touched), static_cast<std::uint64_t>(bucket.expiry)}) {
    state = mix64(state, word);
  }
  return state;
}

bool is_row_of_escrow(const CellId& id, const SlotId& slot) {
  return !id.is_bucket() && slot.birth != 0 && slot.birth != kBackRow;
}

/// Units that were consumed, of what a slot says: rows of escrow rules also say what was
/// transferred, and the registry's when an incarnation began.
std::uint64_t units_of(const CellId& id, const SlotId& slot, std::uint64_t value) {
  return id.is_bucket() || slot.birth == 0 || (slot.birth == kUsedRow && !is_registry(id)) ? value
                                                                                           : 0;
}

}  // namespace

std::uint64_t digest_of(const Cell& cell) {
  std::uint64_t seed = cell_key(cell.id);
  std::uint64_t sum = cell.id.is_bucket() ? state_digest(seed, cell.bucket) : 0;
  for (const Slot& slot : cell.slots) sum += mix64(slot_seed(seed, slot.id), slot.value);
  return sum;
}

std::uint32_t shard_number(const CellId& id) {
  return static_cast<std::uint32_t>(id.series.hi >> (64 - kShardBits));
}

Group group_of(const CellId& id) {
  return {generation_of(id.epoch), shard_number(id)};
}

const CellStore::Spot& CellStore::spot_of(const CellId& id) const {
  if (spot_.shards != nullptr && spot_.id == id) return spot_;
  Shards* shards = spot_.shards;
  if (shards == nullptr || spot_.id.epoch != id.epoch) {
    auto at = generations_.find(generation_of(id.epoch));
    shards = at == generations_.end() ? nullptr : at->second.get();
  }
  spot_ = {id, shards, shards == nullptr ? nullptr : &(*shards)[shard_number(id)],
           static_cast<std::uint32_t>(hash_(id) >> 32)};
  return spot_;
}

const CellStore::Shard* CellStore::shard_of(const Group& group) const {
  auto at = generations_.find(group.generation);
  if (at == generations_.end() || group.shard >= at->second->size()) return nullptr;
  return &(*at->second)[group.shard];
}

CellStore::Shard& CellStore::shard_made(const CellId& id) {
  if (Shard* shard = spot_of(id).shard) return *shard;
  Generation generation = generation_of(id.epoch);
  auto& shards = generations_[generation] = std::make_unique<Shards>();
  first_end_ = std::min(first_end_, generation.end());
  return (*shards)[shard_number(id)];
}

RecordRef CellStore::find(const CellId& id) const {
  const Spot& spot = spot_of(id);
  if (spot.shard == nullptr) return 0;
  return spot.shard->cells.find(
      spot.hash, [&](RecordRef ref) { return is_packed(arena_.at(ref), lifetimes_, id); });
}

/// Accounts for the slots that a join will make grow. Returns what it adds to the digest.
std::uint64_t CellStore::grow(const Cell& cell, std::uint64_t seed, std::span<const Slot> slots) {
  const CellId& id = cell.id;
  std::uint64_t digest = 0;
  for (const Slot& slot : slots) {
    std::uint64_t before = cell.value_of(slot.id);
    if (slot.value <= before) continue;
    std::uint32_t number = writers_.number_of(slot.id.writer);
    std::uint64_t of_slot = slot_seed(seed, slot.id);
    digest += mix64(of_slot, slot.value);
    std::uint64_t units = units_of(id, slot.id, slot.value);
    if (before > 0) {
      digest -= mix64(of_slot, before);
      writers_.grow(number, units - units_of(id, slot.id, before));
    } else {
      writers_.add(number, units);
      if (is_row_of_escrow(id, slot.id)) with_rows_.insert(id);
    }
  }
  return digest;
}

void CellStore::read(RecordRef ref, const CellId& id, HeldCell& out) const {
  if (ref != 0) return read(ref, out);
  out.cell.id = id;
  out.cell.slots.clear();
  out.cell.bucket = {};
  out.own = {};
}

bool CellStore::join(RecordRef& ref, HeldCell& held, std::span<const Slot> slots,
                     const BucketState& bucket, const SlotId* own) {
  bool fresh = ref == 0;
  const CellId& id = held.cell.id;
  std::uint64_t seed = cell_key(id);
  std::uint64_t digest = grow(held.cell, seed, slots);
  BucketState before = held.cell.bucket;
  bool changed = crdt::join(held.cell, slots, bucket);
  if (!changed && !fresh) return false;
  if (id.is_bucket()) {
    digest += state_digest(seed, held.cell.bucket);
    if (!fresh) digest -= state_digest(seed, before);
  }
  if (own != nullptr && changed) held.own = *own;
  Shard& shard = shard_made(id);
  shard.digest += digest;
  write(ref, held, shard);
  return changed;
}

/// Packs the cell into its record, or into another if it needs more room or much less.
void CellStore::write(RecordRef& ref, const HeldCell& held, Shard& shard) {
  const CellId& id = held.cell.id;
  const std::uint16_t kind = pack(held, writers_, lifetimes_, packed_);
  std::size_t head_bytes = id.is_bucket() ? kBucketHead : kWindowHead;
  std::size_t size = head_bytes + packed_.size();
  RecordRef before = ref;
  if (before == 0 || CellArena::room_for(size) != arena_.room(before)) {
    ref = arena_.allocate(size);
    std::byte* record = arena_.at(ref);
    if (before == 0) {
      std::memset(record, 0, head_bytes);
      head_of(record).series = id.series;
      shard.cells.insert(spot_of(id).hash, ref);
      ++size_;
      if (id.is_bucket()) buckets_.put(ref, held.cell.bucket.expiry);
    } else {
      std::memcpy(record, arena_.at(before), head_bytes);
      shard.cells.replace(spot_of(id).hash, before, ref);
      if (id.is_bucket()) buckets_.moved(ref);
      arena_.free(before);
    }
  }
  std::byte* record = arena_.at(ref);
  head_of(record).word = packed_stamp(record) << kStampShift | kind;
  std::memcpy(record + head_bytes, packed_.data(), packed_.size());
}

/// Its slots are not held any more.
void CellStore::forget(const HeldCell& held) {
  bool rows = false;
  for (const Slot& slot : held.cell.slots) {
    writers_.remove(writers_.number_of(slot.id.writer),
                    units_of(held.cell.id, slot.id, slot.value));
    rows |= is_row_of_escrow(held.cell.id, slot.id);
  }
  if (rows) with_rows_.erase(held.cell.id);
}

void CellStore::clear(RecordRef& ref) {
  HeldCell& held = scratch_;
  read(ref, held);
  Shard& shard = shard_made(held.cell.id);
  shard.digest -= crdt::digest_of(held.cell);
  forget(held);
  held.cell.slots.clear();
  held.cell.bucket = {};
  held.own = {};
  shard.digest += crdt::digest_of(held.cell);
  set_stamp(ref, 0);
  write(ref, held, shard);
}

void CellStore::drop_bucket(RecordRef ref) {
  HeldCell& held = scratch_;
  read(ref, held);
  Shard& shard = shard_made(held.cell.id);
  shard.digest -= crdt::digest_of(held.cell);
  forget(held);
  shard.cells.erase(spot_of(held.cell.id).hash, ref);
  arena_.free(ref);
  --size_;
}

void CellStore::end(Nanos floor) {
  if (first_end_ > floor) return;
  spot_ = {};
  first_end_ = kNever;
  for (auto at = generations_.begin(); at != generations_.end();) {
    if (Nanos end = at->first.end(); end > floor) {
      first_end_ = std::min(first_end_, end);
      ++at;
      continue;
    }
    for (const Shard& shard : *at->second) size_ -= shard.cells.size();
    ended_.push_back(std::move(at->second));
    at = generations_.erase(at);
  }
}

bool CellStore::free_ended(std::size_t most,
                           const std::function<void(std::uint64_t, RecordRef)>& freed) {
  for (; !ended_.empty(); ended_.pop_front(), ended_shard_ = 0) {
    for (; ended_shard_ < ended_.front()->size(); ++ended_shard_) {
      CellIndex& cells = (*ended_.front())[ended_shard_].cells;
      while (cells.size() > 0) {
        if (most-- == 0) return true;
        RecordRef ref = cells.take_last();
        freed(stamp(ref), ref);
        read(ref, scratch_);
        forget(scratch_);
        arena_.free(ref);
      }
    }
  }
  return false;
}

std::size_t CellStore::bytes() const {
  std::size_t sum = arena_.bytes();
  for (const auto& [generation, shards] : generations_) {
    for (const Shard& shard : *shards) sum += shard.cells.bytes();
  }
  return sum;
}

std::size_t CellStore::size_of(const Group& group) const {
  const Shard* shard = shard_of(group);
  return shard == nullptr ? 0 : shard->cells.size();
}

}  // namespace weir::crdt
