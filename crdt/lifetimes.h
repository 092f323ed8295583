#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include <weir/crdt/time.h>

namespace weir::crdt {

/// Lengths of time by numbers of a byte, for cells: those of one rule all last equally long. The
/// first kMost that are asked for have a number for good; there are not many more, and whoever has
/// none says it in full. Not thread-safe.
class Lifetimes {
 public:
  static constexpr std::uint8_t kNone = 255;  ///< no number

  /// Its number, a new one if there is one left, or kNone.
  std::uint8_t number_of(Nanos lifetime) {
    if (last_ < known_.size() && known_[last_] == lifetime) return last_;
    auto at = numbers_.find(lifetime);
    if (at == numbers_.end()) {
      if (known_.size() == kNone) return kNone;
      at = numbers_.emplace(lifetime, static_cast<std::uint8_t>(known_.size())).first;
      known_.push_back(lifetime);
    }
    return last_ = at->second;
  }
  Nanos lifetime(std::uint8_t number) const { return known_[number]; }

 private:
  std::vector<Nanos> known_;
  std::unordered_map<Nanos, std::uint8_t> numbers_;
  std::uint8_t last_ = 0;
};

}  // namespace weir::crdt
