#include <weir/limits/limiter/reservations.h>

#include <algorithm>

namespace weir {

bool Reservations::keep_room() {
  if (open_.fetch_add(1, std::memory_order_relaxed) < most_) return true;
  give_room_back();
  refused_.fetch_add(1, std::memory_order_relaxed);
  return false;
}

Ticket Reservations::open(std::vector<Hold> holds, std::uint64_t hits, Nanos now, Nanos timeout) {
  Nanos deadline = now + std::clamp<Nanos>(timeout, 0, Limiter::kMaxHold);
  std::uint64_t number = next_.fetch_add(1, std::memory_order_relaxed);
  Shard& shard = shards_[number % kShards];
  std::lock_guard lock(shard.mutex);
  shard.by_deadline.emplace(deadline, number);
  shard.by_number.emplace(number, Open{deadline, hits, std::move(holds)});
  return {number};
}

std::uint64_t Reservations::cost_of(const Hold& hold, std::span<const std::uint64_t> actual) {
  if (hold.descriptor >= actual.size()) return hold.units;
  return std::min(mul_saturated(hold.per_hit, actual[hold.descriptor]), hold.most);
}

std::optional<Reservations::Open> Reservations::take(std::uint64_t number) {
  Shard& shard = shards_[number % kShards];
  std::lock_guard lock(shard.mutex);
  return take(shard, number);
}

std::optional<Reservations::Open> Reservations::take(Shard& shard, std::uint64_t number) {
  auto found = shard.by_number.find(number);
  if (found == shard.by_number.end()) return std::nullopt;
  Open open = std::move(found->second);
  shard.by_number.erase(found);
  shard.by_deadline.erase({open.deadline, number});
  give_room_back();
  return open;
}

std::optional<Reservations::Open> Reservations::take_due(Nanos now) {
  if (open_.load(std::memory_order_relaxed) == 0) return std::nullopt;
  for (Shard& shard : shards_) {
    std::lock_guard lock(shard.mutex);
    if (shard.by_deadline.empty() || shard.by_deadline.begin()->first > now) continue;
    return take(shard, shard.by_deadline.begin()->second);
  }
  return std::nullopt;
}

TicketCounters Reservations::counters() const {
  return {open_.load(std::memory_order_relaxed), most_, timed_out_.load(std::memory_order_relaxed),
          refused_.load(std::memory_order_relaxed)};
}

}  // namespace weir
