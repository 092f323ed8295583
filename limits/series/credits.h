#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include <weir/crdt/ids.h>
#include <weir/crdt/time.h>

namespace weir {

/// Units of one hot series that one thread may spend without touching the series' entry, which
/// counts them as consumed already. Whoever locks the entry takes back what is left in its credits
/// first (SeriesTable::lock), so nobody decides, drains or forgets by a count that says too much.
///
/// When a window's units were consumed within it makes no difference. When a bucket's were makes
/// none as long as it would not have run empty without them: a credit's end, `until`, is before
/// that. One who comes later takes back what is left in all of them, as if from the instant of the
/// last touch, which is no later than any end.
struct alignas(64) Credit {
  /// Whose units in the high half (1 + the entry's index), how many in the low one. Where thread
  /// and taker meet.
  std::atomic<std::uint64_t> held{0};
  std::atomic<Nanos> until{0};

  // The thread's own.
  crdt::SeriesId id;
  std::uint64_t version = 0;  ///< of the rules it was opened under
  std::uint64_t beyond = 0;   ///< units that remained beside it
  Nanos reset_at = 0;
  std::uint32_t block = 0;  ///< units it was opened with
  std::uint32_t score = 0;
  std::uint64_t candidate = 0;

  /// What a unit is in the entry: ticks of a bucket, 1 in a window. Set with its lock.
  std::atomic<std::uint64_t> per_unit{1};

  std::uint32_t left() const {
    return static_cast<std::uint32_t>(held.load(std::memory_order_relaxed));
  }
  /// By its thread. False if there are not so many.
  bool spend(std::uint64_t units) {
    std::uint64_t all = held.load(std::memory_order_relaxed);
    do {
      if (static_cast<std::uint32_t>(all) < units) return false;
    } while (!held.compare_exchange_weak(all, all - units, std::memory_order_relaxed));
    return true;
  }
};

/// The credits of all threads. A thread has a number of its own, below kThreads; those that share
/// kThreads have none. `place` is 1 + an entry's index, `tag` its series': what takes them is for
/// the holder of that entry's lock.
class Credits {
 public:
  static constexpr std::size_t kThreads = 15;
  /// A thread has a credit each for so many series, by their tags.
  static constexpr std::size_t kPerThread = 4;
  /// How long one lives at most: `remaining` lags behind other threads by no more.
  static constexpr Nanos kLifetime = kMillisecond;
  /// One that would live shorter is not worth it.
  static constexpr Nanos kMinLifetime = kLifetime / 64;
  static constexpr std::uint32_t kFirstBlock = 16;
  static constexpr std::uint32_t kMaxBlock = 1024;
  static constexpr std::uint64_t kMaxPlace = 0xFFFFFFFF;

  Credit& of(std::size_t thread, std::uint64_t tag) {
    return threads_[thread].credits[tag % kPerThread];
  }

  /// Another thread decided on the series since this one last did. True once that is what mostly
  /// happens to the series that would have the same credit (majority vote, Boyer and Moore 1991:
  /// the heavy hitters of a stream in a counter each).
  static bool is_hot(Credit& credit, const crdt::SeriesId& id) {
    if (credit.score == 0) credit.candidate = id.hi;
    if (credit.candidate != id.hi) {
      --credit.score;
      return false;
    }
    if (credit.score < kHot) ++credit.score;
    return credit.score == kHot;
  }

  struct Open {
    std::uint64_t units = 0;
    Nanos until = kNever;  ///< the first end
  };
  Open open(std::uint64_t place, std::uint64_t tag) const;
  /// Takes back what is left, in the entry's measure.
  std::uint64_t take_back(std::uint64_t place, std::uint64_t tag);

 private:
  static constexpr std::uint32_t kHot = 16;
  struct Thread {
    std::array<Credit, kPerThread> credits;
  };
  std::array<Thread, kThreads + 1> threads_;  // nobody opens the last one's
};

}  // namespace weir
