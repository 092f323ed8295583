#include <weir/crdt/epoch.h>

#include <algorithm>

#include <bit>

namespace weir::crdt {
namespace {

constexpr int kMaxGrainLog2 = 17;  // about 36 hours

}  // namespace

bool valid_epoch(const Epoch& epoch) {
  return epoch.start >= 0 && epoch.start <= kMaxTime && epoch.expiry > epoch.start &&
         epoch.expiry - epoch.start <= kMaxLifetime;
}

Nanos Generation::end() const {
  return is_bucket() ? kNever : number * ((std::int64_t{1} << grain_log2) * kSecond);
}

Generation generation_of(const Epoch& epoch) {
  if (epoch == kBucketEpoch) return kBucketGeneration;
  auto eighth = static_cast<std::uint64_t>((epoch.expiry - epoch.start) / 8 / kSecond);
  int log2 = static_cast<int>(std::bit_width(eighth));
  if (log2 > kMaxGrainLog2) log2 = kMaxGrainLog2;
  Nanos grain = (std::int64_t{1} << log2) * kSecond;
  return {log2, (epoch.expiry + grain - 1) / grain};
}

bool LostWindows::has(const Epoch& epoch) const {
  return epoch.expiry <= ended &&
         std::any_of(lived.begin(), lived.end(), [&](const TimeRange& range) {
           return epoch.start <= range.to && epoch.expiry > range.from;
         });
}

Nanos LostWindows::until(Nanos now, Nanos length) const {
  Nanos until = 0;
  for (const TimeRange& range : lived) {
    if (range.from <= now) until = std::max(until, range.to + length);
  }
  return until;
}

}  // namespace weir::crdt
