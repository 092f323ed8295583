#pragma once

#include <cstddef>
#include <cstdint>

#include <weir/crdt/epoch.h>
#include <weir/crdt/ids.h>

namespace weir::crdt {

/// For hash tables whose keys other members choose: who does not know the seed cannot name many
/// keys that share a place, which would make each look-up as long as they are many. Nothing outside
/// of the process may depend on it.
class TableHash {
 public:
  /// `seed`: secret, and fresh in each process; in tests any number.
  explicit TableHash(std::uint64_t seed) : seed_(seed) {}

  std::size_t operator()(std::uint64_t key) const { return mix64(seed_, key); }
  std::size_t operator()(const Incarnation& id) const { return mix64(mix64(seed_, id.lo), id.hi); }
  std::size_t operator()(const CellId& id) const {
    const std::uint64_t hash = mix64(mix64(seed_, id.series.lo), id.series.hi);
    if (id.is_bucket()) return hash;
    return mix64(mix64(hash, static_cast<std::uint64_t>(id.epoch.start)),
                 static_cast<std::uint64_t>(id.epoch.expiry));
  }

 private:
  std::uint64_t seed_;
};

}  // namespace weir::crdt
