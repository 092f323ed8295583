#include <weir/limits/limiter/unmet.h>

#include <weir/limits/bounds.h>

namespace weir {

void Unmet::note(const Program& program, const Request& request) {
  // Whoever names rules asks about these, for another node.
  if (!request.rule_filter.empty()) return;
  if (program.domains.contains(request.domain)) {
    no_rule_.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  unknown_domain_.fetch_add(1, std::memory_order_relaxed);
  std::unique_lock lock(mutex_, std::try_to_lock);
  if (lock && last_ != request.domain) last_.assign(request.domain.substr(0, kMaxName));
}

UnmetCounters Unmet::counters() const {
  std::lock_guard lock(mutex_);
  return {no_rule_.load(std::memory_order_relaxed), unknown_domain_.load(std::memory_order_relaxed),
          last_};
}

}  // namespace weir
