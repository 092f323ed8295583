#pragma once

#include <cstddef>
#include <cstdint>

#include <weir/limits/algorithms/window.h>
#include <weir/limits/decision.h>
#include <weir/limits/limiter/program.h>

namespace weir {

/// What `compiled` says of a descriptor's cost. Nothing else fills a status; `verdict` is from
/// after the cost was consumed, if it was. `degraded`: on_failure said it.
[[gnu::always_inline]] inline void fill(RuleStatus& status, const CompiledRule& compiled,
                                        std::uint16_t descriptor, const Verdict& verdict,
                                        bool degraded = false) {
  status.rule = compiled.index;
  status.allowed = verdict.allowed;
  status.shadow = compiled.shadow;
  status.degraded = degraded;
  status.limit = compiled.limit;
  status.remaining = verdict.remaining;
  status.reset = verdict.reset;
  status.retry_after = verdict.retry_after;
  status.exhausted_locally = verdict.exhausted_locally;
  status.descriptor = descriptor;
  status.delay = verdict.delay;
}

/// `candidate` decides rather than `current`, if there is one: the least that remains, or the
/// longest wait.
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
