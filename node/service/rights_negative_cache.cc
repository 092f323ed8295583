#include <weir/node/service/rights_negative_cache.h>

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

bool RightsNegativeCache::begin(const crdt::CellId& cell, std::uint64_t cost, std::uint64_t limit,
                                Nanos now) {
  auto at = records_.find(cell);
  if (at == records_.end()) {
    if (!make_room(now)) return false;
    at = records_.emplace(cell, Record{}).first;
  }
  Record& record = at->second;
  if (cost >= record.gone || (now < record.until && cost >= record.cost)) return false;
  if (add_saturated(record.asking, cost) > limit) return false;
  record.asking += cost;
  return true;
}

RightsNegativeCache::Record* RightsNegativeCache::end(const crdt::CellId& cell,
                                                      std::uint64_t cost) {
  auto at = records_.find(cell);
  if (at == records_.end()) return nullptr;  // its window is over
  at->second.asking -= std::min(at->second.asking, cost);
  return &at->second;
}

void RightsNegativeCache::passed(const crdt::CellId& cell, std::uint64_t cost) {
  if (Record* record = end(cell, cost)) record->misses = 0;
}

void RightsNegativeCache::denied(const crdt::CellId& cell, std::uint64_t cost, bool used_up,
                                 Nanos now) {
  Record* record = end(cell, cost);
  if (record == nullptr) return;
  if (used_up) {
    record->gone = std::min(record->gone, cost);
    return;
  }
  record->cost = now < record->until ? std::min(record->cost, cost) : cost;
  record->until =
      now + std::min(kFirstWait << std::min(record->misses, kMostDoublings), kLongestWait);
  ++record->misses;
}

/// Windows that are over go; what is on its way of them ends without a trace.
bool RightsNegativeCache::make_room(Nanos now) {
  if (records_.size() < kMost) return true;
  if (now < next_sweep_) return false;
  next_sweep_ = now + kSweepInterval;
  std::erase_if(records_, [&](const auto& each) {
    return each.first.epoch.expiry <= now ||
           (each.second.asking == 0 && each.second.until + kLongestWait <= now);
  });
  return records_.size() < kMost;
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
