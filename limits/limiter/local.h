#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include <weir/limits/algorithms/log_window.h>
#include <weir/limits/limiter/items.h>
#include <weir/limits/limiter/program.h>
#include <weir/limits/series/series_memo.h>

namespace weir {

/// Requests of a batch whose memory is on its way while an earlier one is decided.
inline constexpr std::size_t kAhead = 8;

/// A thread's working memory, so that a decision allocates nothing and shares no line that is
/// written.
struct Local {
  const Program* program = nullptr;  // of the current call
  bool single = true;                // the last request met one rule: the next one may, too
  std::vector<std::uint32_t> matched;
  std::array<Items, kAhead> items;  // of a request, and of those of its batch that come next
  std::vector<Item*> locked;
  std::vector<LogEntry> log;
  std::string key;
  SeriesMemo memo;
  AskedRules asked;
  std::size_t stripe = take_stripe();
  ~Local() { give_back(stripe); }

  /// No other thread writes to this stripe.
  bool alone() const { return stripe != kStripes - 1; }

  /// Counts for `program` what was decided the quick way, where nothing is degraded.
  [[gnu::always_inline]] void count(const RuleStatus& status) const {
    AtomicCounters& counter = program->counters[stripe][status.rule];
    add_one(status.allowed ? counter.allowed : counter.denied);
  }
  void count_any(const RuleStatus& status) const {
    count(status);
    AtomicCounters& counter = program->counters[stripe][status.rule];
    if (status.degraded) add_one(counter.degraded);
    if (status.exhausted_locally) add_one(counter.exhausted_locally);
  }
  /// Rules that a request is exempt by had no objection to it.
  void count_exempt(const Items& all) const {
    for (const std::uint32_t rule : all.exempt_by())
      add_one(program->counters[stripe][rule].allowed);
  }
  void add_one(std::atomic<std::uint64_t>& counter) const {
    if (alone()) {
      counter.store(counter.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    } else {
      counter.fetch_add(1, std::memory_order_relaxed);
    }
  }

 private:
  static std::mutex& mutex() {
    static std::mutex instance;
    return instance;
  }
  static std::array<bool, kStripes>& taken() {
    static std::array<bool, kStripes> instance{};
    return instance;
  }
  static std::size_t take_stripe() {
    std::lock_guard lock(mutex());
    std::size_t free = 0;
    while (free < kStripes - 1 && taken()[free]) ++free;
    taken()[free] = true;
    return free;
  }
  static void give_back(std::size_t stripe) {
    std::lock_guard lock(mutex());
    taken()[stripe] = false;
  }
};

inline Local& local() {
  thread_local Local instance;
  return instance;
}

}  // namespace weir
