#pragma once

#include <algorithm>
#include <optional>

#include <weir/crdt/time.h>

namespace weir::node {

/// How soon a node may start again in its process, whose clock is set back again and again: at once
/// the first time, then kFirst after the last one, twice as long each time up to kMost, and at once
/// again after kCalm without. By a clock that does not jump.
class RestartBackoff {
 public:
  static constexpr Nanos kFirst = 5 * kSecond;
  static constexpr Nanos kMost = 5 * kMinute;
  static constexpr Nanos kCalm = 10 * kMinute;

  /// It starts again now. Returns when it may the next time.
  Nanos started_again(Nanos now) {
    const bool calm = !last_ || now - *last_ >= kCalm;
    wait_ = calm ? kFirst : std::min(2 * wait_, kMost);
    last_ = now;
    return now + wait_;
  }

 private:
  std::optional<Nanos> last_;
  Nanos wait_ = 0;
};

}  // namespace weir::node
