#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace weir::bench {

/// Counts of latencies in buckets whose width is at most 1/128 of their value, from 0 to 2^63 (the
/// log-linear buckets of HdrHistogram, of which Debian 12 has no C package). Recording allocates
/// nothing. Not thread-safe: one a thread, then add().
class Histogram {
 public:
  void record(std::uint64_t value) {
    ++counts_[bucket_of(value)];
    ++total_;
    max_ = std::max(max_, value);
  }
  void add(const Histogram& other) {
    for (std::size_t i = 0; i < counts_.size(); ++i) counts_[i] += other.counts_[i];
    total_ += other.total_;
    max_ = std::max(max_, other.max_);
  }
  std::uint64_t count() const { return total_; }
  std::uint64_t max() const { return max_; }
  /// The value that the share `q` (0 … 1) of all records does not exceed, rounded up to its
  /// bucket's end; exact for 1. 0 if nothing was recorded.
  std::uint64_t quantile(double q) const {
    auto wanted = static_cast<std::uint64_t>(q * static_cast<double>(total_));
    std::uint64_t seen = 0;
    for (std::size_t i = 0; i < counts_.size(); ++i) {
      seen += counts_[i];
      if (seen > wanted || (seen == total_ && seen > 0)) return std::min(max_, last_of(i));
    }
    return 0;
  }

 private:
  static constexpr unsigned kBits = 7;
  static constexpr std::uint64_t kSteps = 1u << kBits;
  static std::size_t bucket_of(std::uint64_t value) {
    if (value < 2 * kSteps) return value;
    unsigned shift = static_cast<unsigned>(std::bit_width(value)) - kBits - 1;
    return shift * kSteps + (value >> shift);
  }
  /// The highest value of a bucket.
  static std::uint64_t last_of(std::size_t bucket) {
    if (bucket < 2 * kSteps) return bucket;
    unsigned shift = static_cast<unsigned>(bucket / kSteps) - 1;
    return ((bucket - shift * kSteps + 1) << shift) - 1;
  }
  std::vector<std::uint64_t> counts_ = std::vector<std::uint64_t>(58 * kSteps);
  std::uint64_t total_ = 0;
  std::uint64_t max_ = 0;
};

}  // namespace weir::bench
