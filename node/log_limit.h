#pragma once

#include <initializer_list>
#include <map>
#include <mutex>
#include <string>
#include <string_view>

#include <weir/crdt/time.h>
#include <weir/node/log.h>

namespace weir::node {

/// Warnings that others cause, who may be many and mean harm: of each event kBurst at once, and one
/// more every kEach. What is left out is counted, and the count told by tell(). Thread-safe.
class LogLimit {
 public:
  static constexpr int kBurst = 20;
  static constexpr Nanos kEach = 5 * kSecond;

  /// `log` outlives this.
  explicit LogLimit(Log& log) : log_(log) {}
  LogLimit(const LogLimit&) = delete;
  LogLimit& operator=(const LogLimit&) = delete;

  /// Log::warn, perhaps. `event` is one of a few literals; `now` from a clock that does not jump.
  void warn(Nanos now, std::string_view event, std::initializer_list<LogField> fields) noexcept;
  /// Logs log_lines_left_out for events of which lines were since it did last, at most every kEach.
  /// Call each second or so.
  void tell(Nanos now) noexcept;

 private:
  struct Event {
    double tokens = kBurst;
    Nanos at = 0;
    std::uint64_t left_out = 0;
  };

  Log& log_;
  std::mutex mutex_;
  std::map<std::string, Event, std::less<>> events_;
  Nanos told_at_ = -kEach;
};

}  // namespace weir::node
