#include <weir/limits/series/credits.h>

#include <algorithm>

namespace weir {
namespace {

std::uint64_t owner(std::uint64_t held) {
  return held >> 32;
}
std::uint32_t units(std::uint64_t held) {
  return static_cast<std::uint32_t>(held);
}

}  // namespace

Credits::Open Credits::open(std::uint64_t place, std::uint64_t tag) const {
  Open out;
  for (const Thread& thread : threads_) {
    const Credit& credit = thread.credits[tag % kPerThread];
    std::uint64_t held = credit.held.load(std::memory_order_relaxed);
    if (owner(held) != place || units(held) == 0) continue;
    out.units += units(held);
    out.until = std::min(out.until, credit.until.load(std::memory_order_relaxed));
  }
  return out;
}

std::uint64_t Credits::take_back(std::uint64_t place, std::uint64_t tag) {
  std::uint64_t sum = 0;
  for (Thread& thread : threads_) {
    Credit& credit = thread.credits[tag % kPerThread];
    std::uint64_t held = credit.held.load(std::memory_order_acquire);
    while (owner(held) == place && units(held) != 0) {
      // It becomes this series' again only with the lock in hand, so this is what was set for it.
      std::uint64_t per_unit = credit.per_unit.load(std::memory_order_relaxed);
      if (credit.held.compare_exchange_weak(held, place << 32, std::memory_order_acquire)) {
        sum += units(held) * per_unit;
      }
    }
  }
  return sum;
}

}  // namespace weir
