#include <weir/crdt/cell.h>

#include <algorithm>
#include <limits>

namespace weir::crdt {
namespace {

auto position(Slots& slots, const SlotId& id) {
  return std::lower_bound(slots.begin(), slots.end(), id,
                          [](const Slot& slot, const SlotId& wanted) { return slot.id < wanted; });
}

DebtTicks drained(DebtTicks debt, Nanos elapsed, std::uint64_t rate) {
  if (elapsed <= 0) return debt;
  DebtTicks out = static_cast<DebtTicks>(rate) * static_cast<std::uint64_t>(elapsed);
  return out >= debt ? 0 : debt - out;
}

}  // namespace

bool wins(const Checkpoint& a, const Checkpoint& b) {
  if (a.counted != b.counted) return a.counted > b.counted;
  if (a.at != b.at) return a.at < b.at;
  return a.debt < b.debt;
}

void join(BucketState& into, const BucketState& from) {
  if (wins(from.checkpoint, into.checkpoint)) into.checkpoint = from.checkpoint;
  into.touched = std::max(into.touched, from.touched);
  into.expiry = std::max(into.expiry, from.expiry);
}

std::uint64_t Cell::total() const {
  std::uint64_t sum = 0;
  const bool all = id.is_bucket();
  for (const Slot& slot : slots) {
    if (all || slot.id.birth != kBackRow) sum = add_saturated(sum, slot.value);
  }
  return sum;
}

std::uint64_t Cell::given_back() const {
  if (id.is_bucket()) return 0;
  std::uint64_t sum = 0;
  for (const Slot& slot : slots) {
    if (slot.id.birth != kBackRow) continue;
    sum = add_saturated(sum, std::min(slot.value, value_of({slot.id.writer, 0})));
  }
  return sum;
}

std::uint64_t Cell::value_of(const SlotId& slot) const {
  auto at = std::lower_bound(slots.begin(), slots.end(), slot,
                             [](const Slot& s, const SlotId& wanted) { return s.id < wanted; });
  return at != slots.end() && at->id == slot ? at->value : 0;
}

bool Cell::raise(const SlotId& slot, std::uint64_t value) {
  if (value == 0) return false;
  auto at = position(slots, slot);
  if (at == slots.end() || at->id != slot) {
    slots.insert(at, Slot{slot, value});
    return true;
  }
  if (at->value >= value) return false;
  at->value = value;
  return true;
}

bool join(Cell& into, const Cell& from) {
  return join(into, from.slots, from.bucket);
}

bool join(Cell& into, std::span<const Slot> slots, const BucketState& bucket) {
  bool changed = false;
  for (const Slot& slot : slots) changed |= into.raise(slot.id, slot.value);
  if (into.id.is_bucket()) {
    BucketState before = into.bucket;
    join(into.bucket, bucket);
    into.bucket.checkpoint.counted = std::min(into.bucket.checkpoint.counted, into.total());
    changed |= into.bucket != before;
  }
  return changed;
}

bool valid(const Cell& cell) {
  bool bucket = cell.id.is_bucket();
  if (!bucket && !valid_epoch(cell.id.epoch)) return false;
  for (std::size_t i = 0; i < cell.slots.size(); ++i) {
    const Slot& slot = cell.slots[i];
    if (slot.value == 0 || !slot.id.writer) return false;
    if (!bucket && !is_row(slot.id.birth)) return false;
    if (i > 0 && !(cell.slots[i - 1].id < slot.id)) return false;
  }
  if (!bucket) return cell.bucket == BucketState{};
  const BucketState& state = cell.bucket;
  // Otherwise the empty state, which is earlier, would win over it and not be the join's bottom.
  if (state.checkpoint.counted == 0 && state.checkpoint != Checkpoint{}) return false;
  return state.checkpoint.counted <= cell.total() && state.checkpoint.at >= 0 &&
         state.checkpoint.at <= kMaxTime && state.touched >= 0 && state.touched <= kMaxTime &&
         state.expiry >= state.touched && state.expiry - state.touched <= kMaxLifetime;
}

DebtTicks debt_at(const BucketState& bucket, std::uint64_t total, Nanos now, std::uint64_t rate,
                  Nanos unit, DebtTicks cap) {
  const Checkpoint& checkpoint = bucket.checkpoint;
  std::uint64_t uncounted = total - std::min(total, checkpoint.counted);
  DebtTicks added = static_cast<DebtTicks>(uncounted) * static_cast<std::uint64_t>(unit);
  if (total == std::numeric_limits<std::uint64_t>::max()) added = cap;
  Nanos until = std::min(now, bucket.touched);
  DebtTicks debt = drained(std::min(checkpoint.debt, cap), until - checkpoint.at, rate);
  debt = std::min(debt + added, cap);
  return drained(debt, now - bucket.touched, rate);
}

}  // namespace weir::crdt
