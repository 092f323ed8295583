#pragma once

#include <array>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include <weir/crdt/ids.h>
#include <weir/crdt/table_hash.h>

namespace weir::crdt {

/// The incarnations that slots of held cells name, by small numbers, and what each has counted.
/// A number belongs to an incarnation for as long as a slot names it. Not thread-safe.
class Writers {
 public:
  explicit Writers(std::uint64_t seed) : numbers_(0, TableHash(seed)) {}

  /// Its number, a new one if it has none. One that no slot names is kept until add() and remove().
  std::uint32_t number_of(const Incarnation& writer) {
    std::uint32_t number = recent_[writer.lo % recent_.size()];
    return number < writers_.size() && writers_[number].id == writer ? number : found(writer);
  }
  const Incarnation& incarnation(std::uint32_t number) const { return writers_[number].id; }

  /// A slot came, or went. `units`: what it counts.
  void add(std::uint32_t number, std::uint64_t units);
  void remove(std::uint32_t number, std::uint64_t units);
  /// A slot of it grew by `units`.
  void grow(std::uint32_t number, std::uint64_t units) { writers_[number].units += units; }

  /// Some slot names it.
  bool used(const Incarnation& writer) const { return numbers_.contains(writer); }

  /// Calls visit(incarnation, units) for each, in no order. The sum is modulo 2^64.
  template <typename Visit>
  void for_each(Visit visit) const {
    for (const Writer& writer : writers_) {
      if (writer.slots > 0) visit(writer.id, writer.units);
    }
  }

 private:
  struct Writer {
    Incarnation id;  // none: nobody has this number
    std::uint64_t slots = 0;
    std::uint64_t units = 0;
  };
  std::uint32_t found(const Incarnation& writer);

  std::vector<Writer> writers_;
  std::vector<std::uint32_t> unused_;
  std::unordered_map<Incarnation, std::uint32_t, TableHash> numbers_;
  std::array<std::uint32_t, 64> recent_{};  // by incarnation: looked up last
};

}  // namespace weir::crdt
