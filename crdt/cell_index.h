#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <weir/crdt/cell_arena.h>

namespace weir::crdt {

/// References to records by a hash of 32 bits: open addressing with linear probing, in which
/// entries stand in the order of their hashes (Amble and Knuth, "Ordered hash tables", 1974). So a
/// search ends early, growing is one pass from front to back that reads no record, a walk is in
/// the order of hashes, and one that was interrupted goes on from a hash, whatever has come and
/// gone in between. Takes 9 to 11 bytes an entry. Not thread-safe.
///
/// The caller hashes, with a secret where strangers choose what is held.
class CellIndex {
 public:
  /// The entry with this hash of which `same(ref)` is true, or 0.
  template <typename Same>
  RecordRef find(std::uint32_t hash, Same same) const {
    for (std::size_t at = first(hash); at < places_.size(); ++at) {
      const Place& place = places_[at];
      if (place.ref == 0 || place.hash > hash) return 0;
      if (place.hash == hash && same(place.ref)) return place.ref;
    }
    return 0;
  }

  /// Brings what find() reads first closer.
  void prefetch(std::uint32_t hash) const {
    if (!places_.empty()) __builtin_prefetch(&places_[home(hash)]);
  }

  void insert(std::uint32_t hash, RecordRef ref) {
    if ((size_ + 1) * 8 > homes_ * 7) resize(grown(hash));
    while (!place(hash, ref)) resize(grown(hash));
    ++size_;
  }

  /// It must be here.
  void erase(std::uint32_t hash, RecordRef ref) {
    std::size_t hole = find_place(hash, ref);
    // What stands behind the place where it would be now moves up.
    for (; hole + 1 < places_.size(); ++hole) {
      const Place& next = places_[hole + 1];
      if (next.ref == 0 || home(next.hash) > hole) break;
      places_[hole] = next;
    }
    places_[hole] = {};
    --size_;
    if (homes_ > kSmall && size_ * 4 < homes_) resize(size_ * 3 / 2 + 4);
  }

  /// The record moved.
  void replace(std::uint32_t hash, RecordRef from, RecordRef to) {
    places_[find_place(hash, from)].ref = to;
  }

  std::size_t size() const { return size_; }
  std::size_t bytes() const { return places_.capacity() * sizeof(Place); }

  /// Calls visit(ref) for entries with hashes from `from` on, in their order, until it returns
  /// false: then the hash of that entry is returned; else 2^32. `visit` must not change the index.
  /// `ahead(ref)` is called some entries before visit(ref).
  template <typename Ahead, typename Visit>
  std::uint64_t walk(std::uint64_t from, Ahead ahead, Visit visit) const {
    if (places_.empty() || from > kEnd) return kEnd;
    std::size_t at = from == kEnd ? places_.size() : first(static_cast<std::uint32_t>(from));
    for (; at < places_.size(); ++at) {
      const Place& place = places_[at];
      if (at + kAhead < places_.size() && places_[at + kAhead].ref != 0) {
        ahead(places_[at + kAhead].ref);
      }
      if (place.ref == 0 || place.hash < from) continue;
      if (!visit(place.ref)) return place.hash;
    }
    return kEnd;
  }
  static constexpr std::uint64_t kEnd = std::uint64_t{1} << 32;

  /// Takes out any one entry, the last; 0 if there is none. What is left can only be taken out.
  RecordRef take_last() {
    while (!places_.empty()) {
      RecordRef ref = places_.back().ref;
      places_.pop_back();
      if (ref == 0) continue;
      --size_;
      return ref;
    }
    return 0;
  }

 private:
  struct Place {
    std::uint32_t hash = 0;
    RecordRef ref = 0;  // 0: nothing is here
  };
  static constexpr std::size_t kSmall = 16;
  static constexpr std::size_t kAhead = 12;

  /// Some fifth to a quarter more, as chance has it: indices that fill alike do not all grow in
  /// the same moment.
  std::size_t grown(std::uint32_t hash) const {
    return homes_ + homes_ / 5 + (homes_ / 1024) * (hash % 64) + 4;
  }

  /// Where an entry stands if there is room: rises with the hash.
  std::size_t home(std::uint32_t hash) const {
    return static_cast<std::size_t>((std::uint64_t{hash} * homes_) >> 32);
  }

  /// Where the entries with this hash begin, if there are any.
  std::size_t first(std::uint32_t hash) const {
    std::size_t at = home(hash);
    while (at < places_.size() && places_[at].ref != 0 && places_[at].hash < hash) ++at;
    return at;
  }

  std::size_t find_place(std::uint32_t hash, RecordRef ref) const {
    std::size_t at = first(hash);
    while (places_[at].ref != ref) ++at;
    return at;
  }

  /// False if the end of the table is reached.
  bool place(std::uint32_t hash, RecordRef ref) {
    std::size_t at = first(hash);
    std::size_t empty = at;
    while (empty < places_.size() && places_[empty].ref != 0) ++empty;
    if (empty >= places_.size()) return false;
    std::move_backward(places_.begin() + static_cast<std::ptrdiff_t>(at),
                       places_.begin() + static_cast<std::ptrdiff_t>(empty),
                       places_.begin() + static_cast<std::ptrdiff_t>(empty) + 1);
    places_[at] = {hash, ref};
    return true;
  }

  void resize(std::size_t homes) {
    std::vector<Place> old = std::move(places_);
    homes_ = homes;
    // Behind the last home, for what is pushed there.
    places_ = std::vector<Place>(homes + std::min<std::size_t>(homes, 64));
    std::size_t behind = 0;  // the last one placed
    for (const Place& each : old) {
      if (each.ref == 0) continue;
      std::size_t at = std::max(home(each.hash), behind);
      if (at >= places_.size()) places_.resize(at + 64);
      places_[at] = each;
      behind = at + 1;
    }
  }

  std::vector<Place> places_;
  std::size_t homes_ = 0;
  std::size_t size_ = 0;
};

}  // namespace weir::crdt
