#include <weir/node/service/rights_trails.h>

#include <algorithm>
#include <utility>

#include <weir/crdt/cell.h>

namespace weir::node {
namespace {

constexpr Nanos kFirstWait = 100 * kMillisecond;
constexpr Nanos kLongestWait = 2 * kSecond;
constexpr unsigned kMostDoublings = 5;
/// Of looking for windows that are over, while there is no room.
constexpr Nanos kSweepInterval = 100 * kMillisecond;

}  // namespace

bool RightsTrails::begin(const crdt::CellId& cell, std::uint64_t cost, std::uint64_t limit,
                         Nanos now) {
  auto at = trails_.find(cell);
  if (at == trails_.end()) {
    if (!make_room(now)) return false;
    at = trails_.emplace(cell, Trail{}).first;
  }
  Trail& trail = at->second;
  if (cost >= trail.gone || (now < trail.until && cost >= trail.cost)) return false;
  if (add_saturated(trail.asking, cost) > limit) return false;
  trail.asking += cost;
  return true;
}

RightsTrails::Trail* RightsTrails::end(const crdt::CellId& cell, std::uint64_t cost) {
  auto at = trails_.find(cell);
  if (at == trails_.end()) return nullptr;  // its window is over
  at->second.asking -= std::min(at->second.asking, cost);
  return &at->second;
}

void RightsTrails::passed(const crdt::CellId& cell, std::uint64_t cost) {
  if (Trail* trail = end(cell, cost)) trail->misses = 0;
}

void RightsTrails::denied(const crdt::CellId& cell, std::uint64_t cost, bool used_up, Nanos now) {
  Trail* trail = end(cell, cost);
  if (trail == nullptr) return;
  if (used_up) {
    trail->gone = std::min(trail->gone, cost);
    return;
  }
  trail->cost = now < trail->until ? std::min(trail->cost, cost) : cost;
  trail->until =
      now + std::min(kFirstWait << std::min(trail->misses, kMostDoublings), kLongestWait);
  ++trail->misses;
}

/// Windows that are over go; what is on its way of them ends without a trace.
bool RightsTrails::make_room(Nanos now) {
  if (trails_.size() < kMost) return true;
  if (now < next_sweep_) return false;
  next_sweep_ = now + kSweepInterval;
  std::erase_if(trails_, [&](const auto& each) {
    return each.first.epoch.expiry <= now ||
           (each.second.asking == 0 && each.second.until + kLongestWait <= now);
  });
  return trails_.size() < kMost;
}

void AskedMembers::remember(const std::string& id, Asked asked, Nanos now) {
  while (!order_.empty()) {
    const auto& [number, oldest] = order_.front();
    auto at = asked_.find(oldest);
    bool current = at != asked_.end() && at->second.number == number;
    if (current && at->second.until > now && asked_.size() < kMost && order_.size() < 2 * kMost) {
      break;
    }
    if (current) asked_.erase(at);
    order_.pop_front();
  }
  asked_[id] = {std::move(asked), ++next_, now + ttl_};
  order_.emplace_back(next_, id);
}

const AskedMembers::Asked* AskedMembers::find(const std::string& id, Nanos now) const {
  auto at = asked_.find(id);
  return at == asked_.end() || at->second.until <= now ? nullptr : &at->second.asked;
}

void AskedMembers::forget(const std::string& id) {
  asked_.erase(id);
}

}  // namespace weir::node
