#pragma once

#include <cstddef>

#include <weir/limits/decision.h>

namespace weir {

// Which of several statuses decides.

/// `candidate` rather than `current`, if there is one: the least that remains, or the longest wait.
[[gnu::always_inline]] inline bool decides(const RuleStatus& candidate, const RuleStatus* current,
                                           bool allowed) {
  if (candidate.allowed != allowed) return false;
  return current == nullptr || (allowed ? candidate.remaining < current->remaining
                                        : candidate.retry_after > current->retry_after);
}

/// Sets Decision::deciding, of `out.allowed` and the statuses as they are.
inline void find_decider(Decision& out) {
  const RuleStatus* decider = nullptr;
  out.deciding = -1;
  for (std::size_t i = 0; i < out.statuses.size(); ++i) {
    if (out.statuses[i].shadow || !decides(out.statuses[i], decider, out.allowed)) continue;
    decider = &out.statuses[i];
    out.deciding = static_cast<int>(i);
  }
}

}  // namespace weir
