#include <weir/limits/limiter/reservations.h>

#include <algorithm>

namespace weir {

bool Reservations::keep_room(TicketHolder holder) {
  bool room = open_.fetch_add(1, std::memory_order_relaxed) < most_;
  if (room && holder.caller != 0) {
    CallerShard& shard = callers_[holder.caller % kShards];
    std::lock_guard lock(shard.mutex);
    auto at = shard.callers.find(holder.caller);
    const std::size_t has = at == shard.callers.end() ? 0 : at->second.tickets;
    room = has < most_of_one_;
    if (room) ++shard.callers[holder.caller].tickets;
  }
  if (room) return true;
  open_.fetch_sub(1, std::memory_order_relaxed);
  refused_.fetch_add(1, std::memory_order_relaxed);
  return false;
}

void Reservations::give_room_back(TicketHolder holder) {
  open_.fetch_sub(1, std::memory_order_relaxed);
  if (holder.caller == 0) return;
  CallerShard& shard = callers_[holder.caller % kShards];
  std::lock_guard lock(shard.mutex);
  auto at = shard.callers.find(holder.caller);
  if (--at->second.tickets == 0) shard.callers.erase(at);
}

Ticket Reservations::open(std::vector<Hold> holds, std::uint64_t hits, Nanos now, Nanos timeout,
                          TicketHolder holder) {
  if (holder.caller != 0 && holder.lease) {
    CallerShard& shard = callers_[holder.caller % kShards];
    std::lock_guard lock(shard.mutex);
    auto& leased = shard.callers[holder.caller].leased;
    for (const Hold& hold : holds) leased[hold.series] += hold.units;
  }
  Nanos deadline = now + std::clamp<Nanos>(timeout, 0, Limiter::kMaxHold);
  std::uint64_t number = next_.fetch_add(1, std::memory_order_relaxed);
  Shard& shard = shards_[number % kShards];
  std::lock_guard lock(shard.mutex);
  shard.by_deadline.emplace(deadline, number);
  shard.by_number.emplace(number, Open{deadline, hits, std::move(holds), holder});
  return {number};
}

std::uint64_t Reservations::leased(std::uint64_t caller, const crdt::SeriesId& series) const {
  const CallerShard& shard = callers_[caller % kShards];
  std::lock_guard lock(shard.mutex);
  auto at = shard.callers.find(caller);
  if (at == shard.callers.end()) return 0;
  auto units = at->second.leased.find(series);
  return units == at->second.leased.end() ? 0 : units->second;
}

void Reservations::gone(const Open& open) {
  if (open.holder.caller != 0 && open.holder.lease) {
    CallerShard& shard = callers_[open.holder.caller % kShards];
    std::lock_guard lock(shard.mutex);
    auto& leased = shard.callers.at(open.holder.caller).leased;
    for (const Hold& hold : open.holds) {
      auto units = leased.find(hold.series);
      units->second -= hold.units;
      if (units->second == 0) leased.erase(units);
    }
  }
  give_room_back(open.holder);
}

std::uint64_t Reservations::cost_of(const Hold& hold, std::span<const std::uint64_t> actual) {
  if (hold.descriptor >= actual.size()) return hold.units;
  return std::min(mul_saturated(hold.per_hit, actual[hold.descriptor]), hold.most);
}

std::optional<Reservations::Open> Reservations::take(std::uint64_t number, std::uint64_t caller) {
  Shard& shard = shards_[number % kShards];
  std::optional<Open> open;
  {
    std::lock_guard lock(shard.mutex);
    const auto at = shard.by_number.find(number);
    if (at == shard.by_number.end() || at->second.holder.caller != caller) return std::nullopt;
    open = take(shard, number);
  }
  gone(*open);
  return open;
}

Reservations::Open Reservations::take(Shard& shard, std::uint64_t number) {
  Open open = std::move(shard.by_number.extract(number).mapped());
  shard.by_deadline.erase({open.deadline, number});
  return open;
}

std::optional<Reservations::Open> Reservations::take_due(Nanos now) {
  if (open_.load(std::memory_order_relaxed) == 0) return std::nullopt;
  std::optional<Open> open;
  for (Shard& shard : shards_) {
    std::lock_guard lock(shard.mutex);
    if (shard.by_deadline.empty() || shard.by_deadline.begin()->first > now) continue;
    open = take(shard, shard.by_deadline.begin()->second);
    break;
  }
  if (open) gone(*open);
  return open;
}

TicketCounters Reservations::counters() const {
  return {open_.load(std::memory_order_relaxed), most_, timed_out_.load(std::memory_order_relaxed),
          refused_.load(std::memory_order_relaxed)};
}

}  // namespace weir
