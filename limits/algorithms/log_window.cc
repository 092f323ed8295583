#include <weir/limits/algorithms/log_window.h>

#include <algorithm>

namespace weir {

crdt::Epoch log_epoch(Nanos window, Nanos now) {
  return {now, now + window};
}

std::uint64_t log_used(std::span<const LogEntry> log, Nanos window, Nanos now) {
  std::uint64_t used = 0;
  for (auto entry = log.rbegin(); entry != log.rend() && entry->time + window > now; ++entry) {
    used = add_saturated(used, entry->count);
  }
  return used;
}

Verdict evaluate_log(std::span<const LogEntry> log, Nanos window, std::uint64_t limit, Nanos now,
                     std::uint64_t cost) {
  Verdict verdict;
  std::uint64_t used = log_used(log, window, now);
  verdict.remaining = limit - std::min(limit, used);
  verdict.allowed = used <= limit && cost <= limit - used;
  for (auto entry = log.rbegin(); entry != log.rend() && entry->time + window > now; ++entry) {
    if (entry->count == 0) continue;
    verdict.reset = entry->time + window - now;
    break;
  }
  if (verdict.allowed) return verdict;
  verdict.retry_after = kNever;
  if (cost > limit) return verdict;
  // The newest that may stay; the next older one must have left.
  std::uint64_t kept = 0;
  for (auto entry = log.rbegin(); entry != log.rend(); ++entry) {
    kept = add_saturated(kept, entry->count);
    if (kept <= limit - cost) continue;
    verdict.retry_after = entry->time + window - now;
    break;
  }
  return verdict;
}

}  // namespace weir
