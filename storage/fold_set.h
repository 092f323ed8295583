#pragma once

#include <absl/container/flat_hash_map.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <weir/crdt/cell.h>

namespace weir::storage {

/// Cells of many log records, joined in memory: what a fold is about to write. Filled first, then
/// taken out in an order in which the keys of each table rise. Neither costs more at once than a
/// part of it: series are hashes, and their first bits say which part a cell belongs to.
class FoldSet {
 public:
  /// Joins it with what is there of the same cell. Not once taking has begun, until all is taken.
  void add(crdt::Cell&& cell);
  /// Cells that are left to take.
  std::size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  /// The next cell, and its generation. Requires that there is one.
  std::pair<crdt::Generation, crdt::Cell> take();

 private:
  static constexpr unsigned kPartBits = 6;
  struct Part {
    std::vector<crdt::Cell> cells;
    absl::flat_hash_map<crdt::CellId, std::uint32_t, std::hash<crdt::CellId>> places;
  };
  struct Place {
    crdt::Generation generation;
    std::uint64_t series = 0;  // the first half of it, which mostly decides
    std::uint32_t cell = 0;
  };
  void begin(Part& part);

  std::array<Part, 1u << kPartBits> parts_;
  std::size_t size_ = 0;
  std::size_t next_part_ = 0;
  Part taking_;  // the part that is being taken
  std::vector<Place> order_;
  std::size_t next_ = 0;
};

}  // namespace weir::storage
