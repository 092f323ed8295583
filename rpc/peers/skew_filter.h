#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <optional>

#include <weir/crdt/time.h>

namespace weir::rpc {

/// How far another's clock is ahead of one's own, from pings that are answered with the time, as
/// NTP finds it: an answer was given at some instant between asking and hearing, so the quickest of
/// the last few pings says it best (RFC 5905, section 10). Not thread-safe.
class SkewFilter {
 public:
  struct Skew {
    Nanos ahead = 0;
    Nanos error = 0;  ///< at most so far off, if neither clock was set meanwhile
  };

  /// The answer, heard at `heard` by the own clock after it was awaited for `took`, said `told`.
  void add(Nanos heard, Nanos took, Nanos told) {
    took = std::max<Nanos>(took, 0);
    const Nanos ahead = std::clamp<Nanos>(told, 0, kMaxTime) - (heard - took / 2);
    samples_[next_] = {ahead, took / 2 + 1};
    next_ = (next_ + 1) % samples_.size();
    count_ = std::min(count_ + 1, samples_.size());
  }

  /// Nothing before the first answer. A clock that was set shows once it differs from this by more
  /// than both errors: then only the newest counts.
  std::optional<Skew> skew() const {
    if (count_ == 0) return std::nullopt;
    const Skew& newest = samples_[(next_ + samples_.size() - 1) % samples_.size()];
    Skew best = newest;
    for (std::size_t i = 0; i < count_; ++i) {
      if (samples_[i].error < best.error) best = samples_[i];
    }
    const Nanos apart = std::max(best.ahead, newest.ahead) - std::min(best.ahead, newest.ahead);
    return apart > best.error + newest.error + kDrift ? newest : best;
  }

 private:
  /// Clocks that run free drift apart by less in the time that the samples span.
  static constexpr Nanos kDrift = 2 * kMillisecond;

  std::array<Skew, 8> samples_;
  std::size_t next_ = 0;
  std::size_t count_ = 0;
};

}  // namespace weir::rpc
