#include <weir/limits/series/bucket_records.h>

#include <algorithm>

#include <weir/limits/series/mapped.h>

namespace weir {
namespace {

std::size_t bytes_of(std::size_t records) {
  return std::max<std::size_t>(records, 1) * sizeof(BucketRecord);
}

}  // namespace

// Not in huge pages: to find one the system may work for 50 ms, in the turn that needs it.
BucketRecords::BucketRecords(std::size_t most)
    : most_(most),
      records_(static_cast<BucketRecord*>(
          internal::map_zeros(bytes_of(most), internal::Pages::plain, false))) {}

BucketRecords::~BucketRecords() {
  internal::unmap_zeros(records_, bytes_of(most_));
}

std::uint32_t BucketRecords::take() {
  std::lock_guard lock(mutex_);
  if (unused_ == 0) return fresh_++;
  std::uint32_t number = unused_ - 1;
  unused_ = static_cast<std::uint32_t>(records_[number].own);
  return number;
}

void BucketRecords::give_back(std::uint32_t number) {
  std::lock_guard lock(mutex_);
  records_[number].own = unused_;
  unused_ = number + 1;
}

}  // namespace weir
