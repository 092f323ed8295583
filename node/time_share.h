#pragma once

#include <algorithm>

#include <weir/crdt/time.h>

namespace weir::node {

/// How long one of several may have a thread to itself: a part of the time, and `burst` at once.
/// Who took more waits until it would have been its part. Times are of one clock that does not
/// jump.
class TimeShare {
 public:
  /// `percent` of the time, from 1.
  TimeShare(Nanos percent, Nanos burst) : percent_(percent), burst_(burst) {}

  /// It had the thread for `took`, until `now`. Returns for how long it is to wait.
  Nanos charge(Nanos took, Nanos now) {
    const Nanos passed = std::clamp<Nanos>(now - last_, 0, kLongest);
    last_ = now;
    owed_ =
        std::max<Nanos>(0, owed_ - passed * percent_ / 100) + std::clamp<Nanos>(took, 0, kLongest);
    return std::max<Nanos>(0, owed_ - burst_) * 100 / percent_;
  }

 private:
  static constexpr Nanos kLongest = kHour;

  Nanos percent_;
  Nanos burst_;
  Nanos owed_ = 0;
  Nanos last_ = 0;
};

}  // namespace weir::node
