#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <weir/crdt/replica.h>
#include <weir/storage/store.h>

namespace weir::node {

/// Makes a store that was opened again and the memory of its node hold the same, piece by piece:
/// memory takes in what the disk has, and the disk gets what it lacks. For the driver's thread,
/// except where said.
class Refill {
 public:
  /// Any thread; before it is given to a Refill. Takes time in proportion to what the disk held.
  static void prepare(storage::Recovered& disk);
  explicit Refill(std::shared_ptr<storage::Recovered> disk);

  /// Goes on, with about `most` cells. True once the replica has put out all that the disk lacks.
  bool step(crdt::Replica& replica, Nanos now, std::size_t most);

  const std::vector<crdt::Incarnation>& boots() const { return disk_->incarnations; }
  Nanos time_floor() const { return disk_->time_floor; }
  bool set_back() const { return disk_->set_back > 0; }
  /// Units of this member that the disk had and memory did not: of writes whose sync failed, and
  /// that were there all the same. They had been counted once more meanwhile.
  std::uint64_t counted_twice() const { return counted_twice_; }

 private:
  void take_in(crdt::Replica& replica, Nanos now, std::size_t most);
  void count_twice(const crdt::Replica& replica, const crdt::Cell& cell);
  bool has(const crdt::Cell& cell) const;

  std::shared_ptr<storage::Recovered> disk_;
  std::size_t taken_in_ = 0;
  bool rewritten_ = false;
  crdt::Replica::Place place_;
  std::uint64_t counted_twice_ = 0;
  crdt::Cell held_;  // working memory
};

}  // namespace weir::node
