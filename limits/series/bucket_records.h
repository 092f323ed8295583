#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>

#include <weir/crdt/time.h>

namespace weir {

/// What an entry of the table has no room for, of a replicated bucket from which others consume, or
/// this node more than an entry can count. The checkpoint is crdt::BucketState's, the units are
/// BucketCell's.
struct BucketRecord {
  std::uint64_t own;
  std::uint64_t others;
  std::uint64_t birth;
  std::uint64_t uncounted;  ///< units that the checkpoint has not counted
  Nanos at;                 ///< of the checkpoint
  std::uint64_t debt;       ///< of the checkpoint, in crdt::DebtTicks
};
static_assert(sizeof(BucketRecord) == 48);

/// Room for a number of records, each known by a small number. Memory is taken when first touched,
/// and used again, never moved or given back. Thread-safe; a record is whoever's took it.
class BucketRecords {
 public:
  /// @throws std::bad_alloc
  explicit BucketRecords(std::size_t most);
  ~BucketRecords();
  BucketRecords(const BucketRecords&) = delete;
  BucketRecords& operator=(const BucketRecords&) = delete;

  /// One that nobody has; no more than `most` may be taken.
  std::uint32_t take();
  void give_back(std::uint32_t number);
  BucketRecord& at(std::uint32_t number) const { return records_[number]; }

 private:
  const std::size_t most_;
  BucketRecord* records_ = nullptr;
  std::mutex mutex_;
  std::uint32_t unused_ = 0;  // a record that was given back, + 1; its `own` says which is next
  std::uint32_t fresh_ = 0;   // those from here on were never taken
};

}  // namespace weir
