#pragma once

#include <algorithm>
#include <cstdint>

namespace weir {

/// Of a limit's last tenth every kFineSteps-th of the whole is a threshold.
inline constexpr std::uint64_t kFineSteps = 1024;

/// How many thresholds `used` has reached: half of the limit, 80%, 90%, from there on every 1/1024
/// of the limit (each unit, if that is less than one), and the limit itself.
constexpr std::uint64_t marks_reached(std::uint64_t used, std::uint64_t limit) {
  if (used < limit / 2 + limit % 2) return 0;
  if (used < limit - limit / 5) return 1;
  std::uint64_t fine = limit - limit / 10;
  if (used < fine) return 2;
  std::uint64_t step = std::max<std::uint64_t>(limit / kFineSteps, 1);
  return 3 + (std::min(used, limit) - fine) / step + (used >= limit);
}

/// A series that reaches a threshold is exchanged at once, not at the next interval: what can be
/// admitted beyond the limit is what the others admitted since they were last heard, and near the
/// limit that should be no more than the way takes. The thresholds are this node's alone; what
/// travels are counts.
constexpr bool crosses_sync_threshold(std::uint64_t before, std::uint64_t after,
                                      std::uint64_t limit) {
  return limit > 0 && marks_reached(before, limit) < marks_reached(after, limit);
}

}  // namespace weir
