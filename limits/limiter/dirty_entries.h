#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <mutex>
#include <span>
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

  /// Calls `take(indices)` for some entries at a time, which are not in the list any more by then,
  /// for as long as `room()`, how many more there may be, is above 0. True if some are left; the
  /// next call begins where this one ended.
  template <typename Room, typename Take>
  bool take(Room room, Take take) {
    std::array<std::size_t, kTogether> indices;
    std::size_t first = next_.load(std::memory_order_relaxed);
    for (std::size_t i = 0; i < kStripes; ++i) {
      std::size_t number = (first + i) % kStripes;
      Stripe& stripe = stripes_[number];
      for (;;) {
        std::size_t count = 0;
        {
          std::lock_guard lock(stripe.mutex);
          if (stripe.indices.empty()) {
            // Memory that a burst took; what is usual stays.
            if (stripe.indices.capacity() > kKept) stripe.indices = std::vector<std::size_t>();
            break;
          }
          std::size_t most = std::min(kTogether, room());
          if (most == 0) {
            next_.store(number, std::memory_order_relaxed);
            return true;
          }
          for (; count < most && !stripe.indices.empty(); ++count) {
            indices[count] = stripe.indices.back();
            stripe.indices.pop_back();
          }
        }
        take(std::span<const std::size_t>(indices).first(count));
      }
    }
    return false;
  }

 private:
  static constexpr std::size_t kTogether = 16;
  static constexpr std::size_t kKept = 1u << 16;
  struct alignas(64) Stripe {
    std::mutex mutex;
    std::vector<std::size_t> indices;
  };
  std::array<Stripe, kStripes> stripes_;
  std::atomic<std::size_t> next_{0};
};

}  // namespace weir
