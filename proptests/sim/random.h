#pragma once

#include <cstdint>

namespace weir::sim {

/// A stream of pseudo-random numbers (SplitMix64) that depends on its seed alone. Every choice of a
/// run comes from one of these; each part of the world has a stream of its own, so that leaving a
/// fault out disturbs the other parts as little as possible.
class Random {
 public:
  /// Neighbouring seeds must not give shifted copies of one sequence, so the seed is mixed first.
  Random(std::uint64_t seed, std::uint64_t stream) : state_(seed) {
    state_ = next() ^ (stream * 0xD1B54A32D192ED03ull);
    state_ = next();
  }

  std::uint64_t next() {
    state_ += 0x9E3779B97F4A7C15ull;
    std::uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
  }
  /// In [0, n); n > 0.
  std::uint64_t below(std::uint64_t n) { return next() % n; }
  /// In [low, high].
  std::int64_t between(std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>(below(static_cast<std::uint64_t>(high - low) + 1));
  }
  bool chance(unsigned per_mille) { return below(1000) < per_mille; }
  /// In [low, high], every factor of two about equally likely; low > 0.
  std::int64_t log_between(std::int64_t low, std::int64_t high) {
    unsigned doublings = 0;
    while ((low << (doublings + 1)) <= high) ++doublings;
    std::int64_t base = low << below(doublings + 1);
    std::int64_t top = base * 2 - 1 < high ? base * 2 - 1 : high;
    return between(base, top);
  }
  template <typename T, std::size_t N>
  const T& pick(const T (&from)[N]) {
    return from[below(N)];
  }

 private:
  std::uint64_t state_;
};

}  // namespace weir::sim
