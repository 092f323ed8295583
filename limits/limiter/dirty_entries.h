#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <mutex>
#include <vector>

#include <weir/limits/limiter/program.h>

namespace weir {

/// Which entries of the table have something to drain: each thread lists in its own stripe, one
/// thread takes from all. Thread-safe; a stripe's mutex is taken with series' locks held, and
/// nothing is locked while it is held.
class DirtyEntries {
 public:
  /// `index`: SeriesTable::index. Whoever lists an entry marks it as listed.
  void add(std::size_t stripe, std::size_t index) {
    std::lock_guard lock(stripes_[stripe].mutex);
    stripes_[stripe].indices.push_back(index);
  }

  /// Calls `take(index)` for each entry, which is not in the list any more by then, for as long as
  /// `more()`. True if some are left; the next call begins where this one ended.
  template <typename More, typename Take>
  bool take(More more, Take take) {
    std::size_t first = next_.load(std::memory_order_relaxed);
    for (std::size_t i = 0; i < kStripes; ++i) {
      std::size_t number = (first + i) % kStripes;
      Stripe& stripe = stripes_[number];
      for (;;) {
        std::size_t index = 0;
        {
          std::lock_guard lock(stripe.mutex);
          if (stripe.indices.empty()) break;
          if (!more()) {
            next_.store(number, std::memory_order_relaxed);
            return true;
          }
          index = stripe.indices.back();
          stripe.indices.pop_back();
        }
        take(index);
      }
    }
    return false;
  }

 private:
  struct alignas(64) Stripe {
    std::mutex mutex;
    std::vector<std::size_t> indices;
  };
  std::array<Stripe, kStripes> stripes_;
  std::atomic<std::size_t> next_{0};
};

}  // namespace weir
