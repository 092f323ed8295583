#include <weir/rpc/net/backoff.h>

#include <algorithm>
#include <utility>

namespace weir {

Backoff::Backoff(BackoffOptions options, Random random)
    : options_(options), random_(std::move(random)), last_(options.base) {}

Nanos Backoff::next(std::optional<Nanos> retry_after) {
  Nanos high = std::max(
      options_.base, std::min(options_.cap, last_ > options_.cap / 3 ? options_.cap : last_ * 3));
  auto spread = static_cast<std::uint64_t>(high - options_.base) + 1;
  last_ = options_.base + static_cast<Nanos>(random_(spread));
  if (!retry_after) return last_;
  Nanos floor = std::clamp<Nanos>(*retry_after, 0, options_.longest);
  // All that were told the same must not come at the same instant; those told to wait for long
  // spread over a tenth of it.
  Nanos jitter = std::max(options_.base, floor / 10);
  return floor + static_cast<Nanos>(random_(static_cast<std::uint64_t>(jitter) + 1));
}

}  // namespace weir
