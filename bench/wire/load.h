#pragma once

#include <cstdint>

#include <weir/bench/histogram.h>

namespace weir::bench {

/// What one turn of load came to.
struct Load {
  std::uint64_t requests = 0;     ///< answered, and allowed
  std::uint64_t ns = 0;           ///< from the first request to the last answer
  std::uint64_t load_cpu_ns = 0;  ///< processor time of the thread that asked
  Histogram latency;              ///< ns
};

/// How long no answer may come before a turn is given up, ns.
inline constexpr std::uint64_t kPatienceNs = 10'000'000'000;

}  // namespace weir::bench
