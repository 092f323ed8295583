#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <string_view>

#include <weir/crdt/ids.h>
#include <weir/limits/matching/text.h>

namespace weir {

/// Which series the short texts that one thread saw last were hashed to: a key that comes in every
/// other request is hashed once. Not thread-safe.
class SeriesMemo {
 public:
  /// Longest text that is remembered: a UUID has as many characters.
  static constexpr std::size_t kMaxText = 36;

  /// `hash(text)`, or what it said of this text before. `owner` names the hash function: never 0,
  /// and never used for another one.
  template <typename Hash>
  crdt::SeriesId id_of(std::uint64_t owner, std::string_view text, Hash hash) {
    if (text.size() > kMaxText) return hash(text);
    Place& place = places_[spread(owner, text)];
    if (place.owner == owner && internal::same_text({place.text, place.size}, text)) {
      return place.id;
    }
    place.id = hash(text);
    place.owner = owner;
    place.size = static_cast<std::uint32_t>(text.size());
    std::memcpy(place.text, text.data(), text.size());
    return place.id;
  }

 private:
  static constexpr unsigned kBits = 6;
  struct alignas(64) Place {
    crdt::SeriesId id;
    std::uint64_t owner = 0;
    std::uint32_t size = 0;
    char text[kMaxText] = {};
  };

  /// Of the first and the last bytes: texts that differ elsewhere take each other's place.
  static std::size_t spread(std::uint64_t owner, std::string_view text) {
    std::uint64_t first = owner;
    std::uint64_t last = text.size();
    if (text.size() >= 8) {
      std::memcpy(&first, text.data(), 8);
      std::memcpy(&last, text.data() + text.size() - 8, 8);
      first += owner;
    } else if (!text.empty()) {
      std::memcpy(&last, text.data(), text.size());
    }
    std::uint64_t mixed = (first ^ last * 0x9E3779B97F4A7C15ull) * 0xD6E8FEB86659FD93ull;
    return mixed >> (64 - kBits);
  }

  std::array<Place, 1u << kBits> places_{};
};

}  // namespace weir
