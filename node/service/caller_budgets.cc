#include <weir/node/service/caller_budgets.h>

namespace weir::node {
namespace {

/// Callers whose reports of a second are counted. Of more, nobody has one in that second.
constexpr std::size_t kMostReporting = 4096;

}  // namespace

struct CallerBudgets::Hold::All {
  explicit All(std::size_t most) : most_waiting(most) {}

  void add(std::uint64_t caller) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (++waiting[caller] == most_waiting) full.fetch_add(1, std::memory_order_relaxed);
  }
  void remove(std::uint64_t caller, std::size_t requests) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto at = waiting.find(caller);
    const bool was_full = at->second >= most_waiting;
    at->second -= requests;
    if (was_full && at->second < most_waiting) full.fetch_sub(1, std::memory_order_relaxed);
    if (at->second == 0) waiting.erase(at);
  }

  const std::size_t most_waiting;
  std::atomic<std::size_t> full{0};  // callers with so many or more
  mutable std::mutex mutex;
  std::unordered_map<std::uint64_t, std::size_t> waiting;  // of those of whom some do
};

CallerBudgets::CallerBudgets(std::size_t most_waiting, std::size_t reports_per_second)
    : all_(std::make_shared<Hold::All>(most_waiting)), reports_per_second_(reports_per_second) {}

CallerBudgets::Hold::~Hold() {
  if (requests_ > 0) all_->remove(caller_, requests_);
}

void CallerBudgets::Hold::add() {
  if (all_ == nullptr) return;
  all_->add(caller_);
  ++requests_;
}

CallerBudgets::Hold CallerBudgets::hold(std::uint64_t caller) {
  return caller == 0 ? Hold() : Hold(all_, caller);
}

bool CallerBudgets::any_full() const {
  return all_->full.load(std::memory_order_relaxed) > 0;
}

bool CallerBudgets::full(std::uint64_t caller) const {
  const std::lock_guard<std::mutex> lock(all_->mutex);
  const auto at = all_->waiting.find(caller);
  return at != all_->waiting.end() && at->second >= all_->most_waiting;
}

std::size_t CallerBudgets::most_waiting() const {
  return all_->most_waiting;
}

bool CallerBudgets::take_report(std::uint64_t caller, Nanos wall) {
  if (caller == 0) return true;
  const std::lock_guard<std::mutex> lock(mutex_);
  // A clock that is set back begins another second, too.
  if (wall < second_ || wall - second_ >= kSecond) {
    reports_.clear();
    second_ = wall;
  }
  const bool counted = reports_.size() < kMostReporting || reports_.contains(caller);
  if (counted && ++reports_[caller] <= reports_per_second_) return true;
  reports_refused_.fetch_add(1, std::memory_order_relaxed);
  return false;
}

}  // namespace weir::node
