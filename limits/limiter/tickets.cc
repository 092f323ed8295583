#include <weir/limits/limiter/tickets.h>

namespace weir {

bool Tickets::keep_room() {
  if (open_.fetch_add(1, std::memory_order_relaxed) < max_open_) return true;
  give_room_back();
  refused_.fetch_add(1, std::memory_order_relaxed);
  return false;
}

std::uint64_t Tickets::open(OpenTicket ticket) {
  std::uint64_t number = next_.fetch_add(1, std::memory_order_relaxed);
  ticket.number = number;
  Shard& shard = shards_[number % kShards];
  std::lock_guard lock(shard.mutex);
  shard.by_deadline.emplace(ticket.deadline, number);
  shard.by_number.emplace(number, std::move(ticket));
  return number;
}

std::optional<OpenTicket> Tickets::take(std::uint64_t number) {
  Shard& shard = shards_[number % kShards];
  std::lock_guard lock(shard.mutex);
  return take(shard, number);
}

std::optional<OpenTicket> Tickets::take(Shard& shard, std::uint64_t number) {
  auto found = shard.by_number.find(number);
  if (found == shard.by_number.end()) return std::nullopt;
  OpenTicket ticket = std::move(found->second);
  shard.by_number.erase(found);
  shard.by_deadline.erase({ticket.deadline, number});
  give_room_back();
  return ticket;
}

std::optional<OpenTicket> Tickets::take_due(Nanos now) {
  if (size() == 0) return std::nullopt;
  for (Shard& shard : shards_) {
    std::lock_guard lock(shard.mutex);
    if (shard.by_deadline.empty() || shard.by_deadline.begin()->first > now) continue;
    return take(shard, shard.by_deadline.begin()->second);
  }
  return std::nullopt;
}

}  // namespace weir
