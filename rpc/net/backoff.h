#pragma once

#include <cstdint>
#include <functional>
#include <optional>

#include <weir/crdt/time.h>

namespace weir {

struct BackoffOptions {
  Nanos base = 100 * kMillisecond;  ///< the shortest wait
  Nanos cap = 30 * kSecond;         ///< the longest wait of its own; Retry-After may ask for more
  Nanos longest = 10 * kMinute;     ///< beyond this a Retry-After is cut: whoever sends it may err
};

/// How long to wait before trying again: a node that cannot be reached, or a limited API, for its
/// callers. Decorrelated jitter (uniform between `base` and three times the wait before, at most
/// `cap`; Brooker, "Exponential Backoff And Jitter", 2015), so that callers that were denied
/// together do not come back together. What a Retry-After asks for is a floor, with jitter on top
/// and never below it.
///
/// Not thread-safe: one for each thing that is retried. Reads no clock.
class Backoff {
 public:
  /// `random(n)` returns one of 0 … n-1, each as likely; n is at least 1.
  using Random = std::function<std::uint64_t(std::uint64_t n)>;
  Backoff(BackoffOptions options, Random random);

  /// The next wait. `retry_after` is the answer's, if it had one (parse_retry_after).
  Nanos next(std::optional<Nanos> retry_after = std::nullopt);
  /// A call went well: the next wait is short again.
  void reset() { last_ = options_.base; }

 private:
  const BackoffOptions options_;
  const Random random_;
  Nanos last_;
};

}  // namespace weir
