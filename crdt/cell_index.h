#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <weir/crdt/cell_arena.h>

namespace weir::crdt {

namespace internal {

/// A sixteenth of a CellIndex: the entries whose hashes begin alike.
class IndexPart {
 public:
  static constexpr unsigned kPrefix = 4;  ///< bits that all hashes here have in common

  template <typename Same>
  RecordRef find(std::uint32_t hash, Same same) const {
    for (std::size_t at = first(hash); at < places_.size(); ++at) {
      const Place& place = places_[at];
      if (place.ref == 0 || place.hash > hash) return 0;
      if (place.hash == hash && same(place.ref)) return place.ref;
    }
    return 0;
  }

  void prefetch(std::uint32_t hash) const {
    if (!places_.empty()) __builtin_prefetch(&places_[home(hash)]);
  }

  void insert(std::uint32_t hash, RecordRef ref) {
    if ((size_ + 1) * 8 > homes_ * 7) resize(grown(hash));
    while (!place(hash, ref)) resize(grown(hash));
    ++size_;
  }

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
    if (size_ == 0) {
      places_ = std::vector<Place>();
      homes_ = 0;
    } else if (homes_ > kSmall && size_ * 4 < homes_) {
      resize(size_ * 3 / 2 + 4);
    }
  }

  void replace(std::uint32_t hash, RecordRef from, RecordRef to) {
    places_[find_place(hash, from)].ref = to;
  }

  std::size_t size() const { return size_; }
  std::size_t bytes() const { return places_.capacity() * sizeof(Place); }

  template <typename Ahead, typename Visit>
  std::uint64_t walk(std::uint32_t from, Ahead ahead, Visit visit) const {
    if (places_.empty()) return kEnd;
    for (std::size_t at = first(from); at < places_.size(); ++at) {
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

  /// Some fifth to a quarter more, as chance has it: parts that fill alike do not all grow in the
  /// same moment.
  std::size_t grown(std::uint32_t hash) const {
    return homes_ + homes_ / 5 + (homes_ / 1024) * (hash % 64) + 4;
  }

  /// Where an entry stands if there is room: rises with the hash.
  std::size_t home(std::uint32_t hash) const {
    return static_cast<std::size_t>((std::uint64_t{hash << kPrefix} * homes_) >> 32);
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
    places_ = std::vector<Place>(homes + std::min<std::size_t>(homes / 8 + 4, 64));
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

}  // namespace internal

/// References to records by a hash of 32 bits: open addressing with linear probing, in which
/// entries stand in the order of their hashes (Amble and Knuth, "Ordered hash tables", 1974). So a
/// search ends early, growing is one pass from front to back that reads no record, a walk is in
/// the order of hashes, and one that was interrupted goes on from a hash, whatever has come and
/// gone in between. Grows in parts, so that no insertion moves more than a sixteenth. Takes 9 to 11
/// bytes an entry. Not thread-safe.
///
/// The caller hashes, with a secret where strangers choose what is held.
class CellIndex {
  using Part = internal::IndexPart;

 public:
  /// The entry with this hash of which `same(ref)` is true, or 0.
  template <typename Same>
  RecordRef find(std::uint32_t hash, Same same) const {
    return part(hash).find(hash, same);
  }
  /// Brings what find() reads first closer.
  void prefetch(std::uint32_t hash) const { part(hash).prefetch(hash); }
  void insert(std::uint32_t hash, RecordRef ref) {
    part(hash).insert(hash, ref);
    ++size_;
  }
  /// It must be here.
  void erase(std::uint32_t hash, RecordRef ref) {
    part(hash).erase(hash, ref);
    --size_;
  }
  /// The record moved.
  void replace(std::uint32_t hash, RecordRef from, RecordRef to) {
    part(hash).replace(hash, from, to);
  }
  std::size_t size() const { return size_; }
  std::size_t bytes() const {
    std::size_t sum = 0;
    for (const Part& part : parts_) sum += part.bytes();
    return sum;
  }

  static constexpr std::uint64_t kEnd = Part::kEnd;
  /// Calls visit(ref) for entries with hashes from `from` on, in their order, until it returns
  /// false: then the hash of that entry is returned; else kEnd. `visit` must not change the index.
  /// `ahead(ref)` is called some entries before visit(ref).
  template <typename Ahead, typename Visit>
  std::uint64_t walk(std::uint64_t from, Ahead ahead, Visit visit) const {
    while (from < kEnd) {
      auto hash = static_cast<std::uint32_t>(from);
      std::uint64_t stopped = part(hash).walk(hash, ahead, visit);
      if (stopped != kEnd) return stopped;
      from = ((from >> kShift) + 1) << kShift;
    }
    return kEnd;
  }

  /// Takes out any one entry; 0 if there is none. What is left can only be taken out.
  RecordRef take_last() {
    while (taken_ < parts_.size()) {
      if (RecordRef ref = parts_[taken_].take_last(); ref != 0) {
        --size_;
        return ref;
      }
      ++taken_;
    }
    return 0;
  }

 private:
  static constexpr unsigned kShift = 32 - Part::kPrefix;

  const Part& part(std::uint32_t hash) const { return parts_[hash >> kShift]; }
  Part& part(std::uint32_t hash) { return parts_[hash >> kShift]; }

  std::array<Part, 1u << Part::kPrefix> parts_;
  std::size_t size_ = 0;
  std::size_t taken_ = 0;  // by take_last(): parts before this one are empty
};

}  // namespace weir::crdt
