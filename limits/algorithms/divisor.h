#pragma once

#include <cstdint>

#include <weir/crdt/time.h>

namespace weir::internal {

/// Divides any 64-bit number by one that stays the same, by two multiplications: n / d is
/// floor(n * ceil(2^128 / d) / 2^128), exact for all 64-bit n and d (Lemire, Kaser and Kurz,
/// "Faster remainder by direct computation", 2019, theorem 1: 128 >= 64 + 64 bits).
class Divisor {
 public:
  /// d > 0.
  explicit Divisor(std::uint64_t d = 1) : divisor_(d) {
    if (d > 1) inverse_ = ~Uint128{0} / d + 1;
  }
  std::uint64_t value() const { return divisor_; }
  [[gnu::always_inline]] std::uint64_t floor(std::uint64_t n) const {
    if (divisor_ == 1) return n;  // its inverse has 129 bits
    Uint128 low = static_cast<Uint128>(n) * static_cast<std::uint64_t>(inverse_);
    Uint128 high = static_cast<Uint128>(n) * static_cast<std::uint64_t>(inverse_ >> 64);
    return static_cast<std::uint64_t>((high + (low >> 64)) >> 64);
  }
  [[gnu::always_inline]] std::uint64_t ceil(std::uint64_t n) const {
    std::uint64_t quotient = floor(n);
    return quotient + (quotient * divisor_ != n);
  }

 private:
  std::uint64_t divisor_;
  Uint128 inverse_ = 0;
};

}  // namespace weir::internal
