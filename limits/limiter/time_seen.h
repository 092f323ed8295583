#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>

#include <weir/crdt/time.h>
#include <weir/limits/limiter/program.h>

namespace weir {

/// How far time has come, so that it never runs backwards for a thread, and hardly between threads.
/// Thread-safe; no locks. A line that all threads read is written once in a step of time.
class TimeSeen {
 public:
  /// Threads tell each other how far time has come in steps of this.
  static constexpr Nanos kStep = kMillisecond;

  /// `now`, or what this thread (the one with this stripe) or any other has seen that is later:
  /// what others have seen counts once it is a step ahead.
  [[gnu::always_inline]] Nanos clamp(Nanos now, std::size_t stripe) {
    std::atomic<Nanos>& mine = stripes_[stripe].newest;
    Nanos shared = newest_.load(std::memory_order_relaxed);
    Nanos seen = std::max(mine.load(std::memory_order_relaxed), shared);
    if (now <= seen) return seen;
    mine.store(now, std::memory_order_relaxed);
    while (now - shared >= kStep &&
           !newest_.compare_exchange_weak(shared, now, std::memory_order_relaxed)) {
    }
    return now;
  }

 private:
  struct alignas(64) Stripe {
    std::atomic<Nanos> newest{0};
  };
  std::array<Stripe, kStripes> stripes_;
  alignas(64) std::atomic<Nanos> newest_{0};
};

}  // namespace weir
