#pragma once

#include <cstdint>
#include <limits>

namespace weir {

/// A point in time (nanoseconds since the Unix epoch) or a length of time (nanoseconds).
/// The core never reads a clock: every function that needs the time takes it as an argument.
/// Points are in [0, kMaxTime]; what arrives from outside is checked at the edge.
using Nanos = std::int64_t;

inline constexpr Nanos kMicrosecond = 1'000;
inline constexpr Nanos kMillisecond = 1'000'000;
inline constexpr Nanos kSecond = 1'000'000'000;
inline constexpr Nanos kMinute = 60 * kSecond;
inline constexpr Nanos kHour = 60 * kMinute;
inline constexpr Nanos kDay = 24 * kHour;

/// Year 2200: far enough for any window, and leaves headroom below 2^63 for sums of two lengths.
inline constexpr Nanos kMaxTime = 7'258'118'400 * kSecond;

/// "There is no such instant."
inline constexpr Nanos kNever = std::numeric_limits<Nanos>::max();

__extension__ typedef unsigned __int128 Uint128;  // GCC and Clang; -Wpedantic wants to be told

/// a + b that stops at 2^64 - 1. Counts are monotone, so they saturate and never wrap.
constexpr std::uint64_t add_saturated(std::uint64_t a, std::uint64_t b) {
  std::uint64_t sum = a + b;
  return sum < a ? std::numeric_limits<std::uint64_t>::max() : sum;
}

/// a * b that stops at 2^64 - 1.
constexpr std::uint64_t mul_saturated(std::uint64_t a, std::uint64_t b) {
  std::uint64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) ? std::numeric_limits<std::uint64_t>::max()
                                                : product;
}

}  // namespace weir
