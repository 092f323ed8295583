#pragma once

#include <algorithm>

#include <weir/crdt/time.h>

namespace weir::rpc {

/// A circuit breaker: so many missed answers in a row open it; then nothing is sent but a probe now
/// and then, until an answer comes. Reads no clock: all times are the caller's, and never go back.
class Circuit {
 public:
  struct Options {
    unsigned misses = 3;  ///< 0: it never opens
    Nanos pause = kSecond;
    Nanos pause_max = 10 * kSecond;  ///< each probe that fails doubles the pause, up to this
  };
  explicit Circuit(Options options) : options_(options), pause_(options.pause) {}

  /// A request may be sent.
  bool passes(Nanos now) const { return !open_ || (!probing_ && now >= until_); }
  /// One is sent that passes. True: it is the probe, and answered() or probe_failed() must follow.
  bool begin() { return probing_ = open_; }

  void answered() {
    misses_ = 0;
    open_ = probing_ = false;
    pause_ = options_.pause;
  }
  /// "In a row" means one after the other: requests that were under way together count once.
  void missed(Nanos start, Nanos deadline, Nanos now) {
    if (options_.misses == 0 || open_ || start < last_miss_) return;
    last_miss_ = deadline;
    if (++misses_ >= options_.misses) open(now);
  }
  void probe_failed(Nanos now) {
    if (!open_) return;
    pause_ = std::min(options_.pause_max, pause_ * 2);
    open(now);
  }

 private:
  void open(Nanos now) {
    misses_ = 0;
    probing_ = false;
    open_ = true;
    until_ = now + pause_;
  }

  Options options_;
  unsigned misses_ = 0;
  Nanos last_miss_ = 0;
  bool open_ = false;
  bool probing_ = false;
  Nanos until_ = 0;
  Nanos pause_;
};

}  // namespace weir::rpc
