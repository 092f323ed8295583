#pragma once

#include <absl/container/flat_hash_map.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <weir/crdt/cell.h>
#include <weir/crdt/table_hash.h>

namespace weir::storage {

/// Cells of many log records, joined in memory: what a fold is about to write. Filled first, then
/// taken out in an order in which the keys of each table rise. Neither costs more at once than a
/// part of it: series are hashes, and their first bits say which part a cell belongs to.
class FoldSet {
 public:
  /// `seed`: of TableHash.
  explicit FoldSet(std::uint64_t seed)
      : hash_(seed), parts_(std::size_t{1} << kPartBits, Part(hash_)), taking_(hash_) {}

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
    explicit Part(const crdt::TableHash& hash) : places(0, hash) {}
    std::vector<crdt::Cell> cells;
    absl::flat_hash_map<crdt::CellId, std::uint32_t, crdt::TableHash> places;
  };
  struct Place {
    crdt::Generation generation;
    std::uint64_t series = 0;  // the first half of it, which mostly decides
    std::uint32_t cell = 0;
  };
  void begin(Part& part);

  const crdt::TableHash hash_;
  std::vector<Part> parts_;
  std::size_t size_ = 0;
  std::size_t next_part_ = 0;
  Part taking_;  // the part that is being taken
  std::vector<Place> order_;
  std::size_t next_ = 0;
};

}  // namespace weir::storage
