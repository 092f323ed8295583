#pragma once

#include <algorithm>
#include <vector>

#include <weir/storage/store.h>

namespace weir::storage {

/// When this node's clock ran, by that clock, and what is lost once it is set back. A clock that
/// leaps over some time has counted nothing there: so windows of that time are whole when it is set
/// right again. Not thread-safe.
class TimeLived {
 public:
  /// More ranges than this become one at the far end.
  static constexpr std::size_t kMost = 16;
  /// A pause of less is none.
  static constexpr Nanos kPause = 10 * kSecond;

  TimeLived() = default;
  /// As it was when reached() last began a range. Time was used without a pause since, up to
  /// `floor`.
  TimeLived(std::vector<crdt::TimeRange> ranges, Nanos floor) : ranges_(std::move(ranges)) {
    if (!ranges_.empty()) ranges_.back().to = std::max(ranges_.back().to, floor);
    reached(floor);
  }

  /// Time is used up to `floor`. True if that began another range.
  bool reached(Nanos floor) {
    if (!ranges_.empty() && floor - ranges_.back().to <= kPause) {
      ranges_.back().to = std::max(ranges_.back().to, floor);
      return false;
    }
    // The floor may have been reserved ahead.
    ranges_.push_back({floor - kMostTimeWaits, floor});
    if (ranges_.size() > kMost) {
      ranges_[1].from = std::min(ranges_[0].from, ranges_[1].from);
      ranges_[1].to = std::max(ranges_[0].to, ranges_[1].to);
      ranges_.erase(ranges_.begin());
    }
    return true;
  }

  /// Time goes on at `now`, if that is more than kMostTimeWaits behind the floor of `out`: sets
  /// what is lost there. Peers' clocks may have been ahead of this one's by `max_skew`.
  void take_set_back(Nanos now, Nanos max_skew, Recovered& out) {
    if (out.time_floor - now <= kMostTimeWaits) return;
    out.set_back = out.time_floor - now;
    reached(out.time_floor);
    for (const crdt::TimeRange& range : ranges_) {
      out.lost.lived.push_back({range.from, range.to + max_skew});
    }
    auto& lived = out.lost.lived;
    std::sort(lived.begin(), lived.end(),
              [](const auto& a, const auto& b) { return a.from < b.from; });
    while (lived.size() > kMost) {
      lived[1] = {lived[0].from, std::max(lived[0].to, lived[1].to)};
      lived.erase(lived.begin());
    }
    out.lost.ended = std::max(out.lost.ended, out.time_floor);
    out.time_floor = now;
    ranges_ = {{now, now}};
  }

  const std::vector<crdt::TimeRange>& ranges() const { return ranges_; }

 private:
  std::vector<crdt::TimeRange> ranges_;  // the last goes on
};

}  // namespace weir::storage
