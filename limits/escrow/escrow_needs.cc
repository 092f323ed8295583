#include <weir/limits/escrow/escrow_needs.h>

#include <algorithm>

namespace weir {
namespace {

constexpr Nanos kFirstWait = 50 * kMillisecond;
constexpr std::uint32_t kMostDoublings = 4;
/// Whom to ask next is remembered this long: who was denied tries again later than this node could.
constexpr Nanos kRemembered = 2 * kSecond;

}  // namespace

void EscrowNeeds::note(const crdt::SeriesId& rule, std::uint64_t limit, const crdt::CellId& cell,
                       std::uint64_t units, bool ahead) {
  std::lock_guard lock(mutex_);
  auto at = needs_.find(cell);
  if (at == needs_.end()) {
    if (needs_.size() >= kMost) return;
    at = needs_.emplace(cell, Need{}).first;
  }
  Need& need = at->second;
  need.rule = rule;
  need.limit = limit;
  need.units = std::max(need.units, units);
  need.fresh = true;
  need.ahead = ahead;
}

void EscrowNeeds::satisfied(const crdt::CellId& cell) {
  std::lock_guard lock(mutex_);
  auto at = needs_.find(cell);
  if (at == needs_.end()) return;
  at->second.attempt = 0;
  at->second.units = 0;
  at->second.fresh = false;
}

void EscrowNeeds::take_due(Nanos now, Nanos lead, std::vector<RightsNeed>& out) {
  std::lock_guard lock(mutex_);
  for (auto at = needs_.begin(); at != needs_.end();) {
    Need& need = at->second;
    Nanos end = need.ahead ? at->first.epoch.start : at->first.epoch.expiry;
    if (end <= now || (!need.fresh && need.next + kRemembered <= now)) {
      at = needs_.erase(at);
      continue;
    }
    if (!need.fresh || now < need.next || (need.ahead && now < end - lead)) {
      ++at;
      continue;
    }
    out.push_back({need.rule, need.limit, at->first, need.units, need.attempt, need.ahead});
    need.next = now + (kFirstWait << std::min(need.attempt / 2, kMostDoublings));
    need.fresh = false;
    need.units = 0;
    ++need.attempt;
    ++at;
  }
}

}  // namespace weir
