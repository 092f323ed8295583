#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <weir/crdt/epoch.h>

namespace weir::crdt {

/// Entries by the id of their cell (`Entry::cell.id`): open addressing with linear probing, and a
/// hash beside each pointer, so that a search looks at one entry and growing at none. Entries stay
/// where they are. The caller hashes, with a secret where strangers choose ids. The order of a walk
/// follows from hashes and history alone, so that a run can be repeated. Not thread-safe.
template <typename Entry>
class CellTable {
 public:
  /// Null if there is none.
  Entry* find(std::uint64_t hash, const CellId& id) const {
    for (std::size_t at = home(hash);; at = next(at)) {
      if (at >= places_.size() || !places_[at].entry) return nullptr;
      if (places_[at].hash == hash && places_[at].entry->cell.id == id) {
        return places_[at].entry.get();
      }
    }
  }

  /// Brings what find() reads first closer; then what it reads next, of which it says what it is
  /// if the hash alone decides.
  void fetch(std::uint64_t hash) const {
    if (!places_.empty()) __builtin_prefetch(&places_[home(hash)]);
  }
  const Entry* fetch_entry(std::uint64_t hash) const {
    for (std::size_t at = home(hash);; at = next(at)) {
      if (at >= places_.size() || !places_[at].entry) return nullptr;
      if (places_[at].hash != hash) continue;
      auto* bytes = reinterpret_cast<const char*>(places_[at].entry.get());
      for (std::size_t i = 0; i < sizeof(Entry); i += 64) __builtin_prefetch(bytes + i);
      return places_[at].entry.get();
    }
  }

  /// There must be none with this id.
  Entry& add(std::uint64_t hash, const CellId& id) {
    if ((size_ + 1) * 8 > places_.size() * 7) resize(places_.empty() ? 4 : places_.size() * 2);
    Place place{hash, std::make_unique<Entry>()};
    place.entry->cell.id = id;
    Entry& entry = *place.entry;
    put(std::move(place));
    ++size_;
    return entry;
  }

  /// It must be here. Ends walks.
  void erase(std::uint64_t hash, const Entry& entry) {
    std::size_t hole = home(hash);
    while (places_[hole].entry.get() != &entry) hole = next(hole);
    places_[hole].entry.reset();
    --size_;
    // What a search would no longer find behind the hole moves into it.
    for (std::size_t at = next(hole); places_[at].entry; at = next(at)) {
      std::size_t distance = (at - home(places_[at].hash)) & mask();
      if (distance < ((at - hole) & mask())) continue;
      places_[hole] = std::move(places_[at]);
      hole = at;
    }
    if (places_.size() > 4 && size_ * 8 < places_.size()) resize(places_.size() / 2);
  }

  std::size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }

  auto begin() const { return Walk(places_.data(), places_.data() + places_.size()); }
  auto end() const {
    const Place* end = places_.data() + places_.size();
    return Walk(end, end);
  }

 private:
  struct Place {
    std::uint64_t hash = 0;
    std::unique_ptr<Entry> entry;
  };

  class Walk {
   public:
    Walk(const Place* at, const Place* end) : at_(at), end_(end) { skip(); }
    const Entry& operator*() const { return *at_->entry; }
    Walk& operator++() {
      ++at_;
      skip();
      return *this;
    }
    friend bool operator==(const Walk&, const Walk&) = default;

   private:
    void skip() {
      while (at_ != end_ && !at_->entry) ++at_;
    }
    const Place* at_;
    const Place* end_;
  };

  std::size_t mask() const { return places_.size() - 1; }
  std::size_t home(std::uint64_t hash) const { return hash & mask(); }
  std::size_t next(std::size_t at) const { return (at + 1) & mask(); }

  void put(Place place) {
    std::size_t at = home(place.hash);
    while (places_[at].entry) at = next(at);
    places_[at] = std::move(place);
  }

  void resize(std::size_t places) {
    std::vector<Place> old = std::exchange(places_, std::vector<Place>(places));
    for (Place& place : old) {
      if (place.entry) put(std::move(place));
    }
  }

  std::vector<Place> places_;  // a power of two of them, or none
  std::size_t size_ = 0;
};

}  // namespace weir::crdt
