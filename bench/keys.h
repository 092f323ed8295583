#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <vector>

namespace weir::bench {

/// A key as a service would send it: 16 hexadecimal digits, never all zero bytes. Held inline, so
/// that no contender pays for a pointer to its key.
struct Key16 {
  std::array<char, 16> text{};
  std::string_view view() const { return {text.data(), text.size()}; }
  friend bool operator==(const Key16& a, const Key16& b) {
    return std::memcmp(a.text.data(), b.text.data(), 16) == 0;
  }
};

/// A bijection on 64 bits that spreads (the finalizer of SplitMix64).
inline std::uint64_t spread(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

/// The next number of a sequence (SplitMix64); `state` is any seed.
inline std::uint64_t next_random(std::uint64_t& state) {
  state += 0x9E3779B97F4A7C15ull;
  return spread(state);
}

/// In [0, 1).
inline double next_unit(std::uint64_t& state) {
  return static_cast<double>(next_random(state) >> 11) * 0x1p-53;
}

/// Eight lower-case hexadecimal digits of 32 bits, one a byte, without a table or a branch.
inline std::uint64_t hex_digits(std::uint32_t bits) {
  std::uint64_t v = bits;
  v = (v << 16 | v) & 0x0000FFFF0000FFFFull;
  v = (v << 8 | v) & 0x00FF00FF00FF00FFull;
  v = (v << 4 | v) & 0x0F0F0F0F0F0F0F0Full;
  std::uint64_t letters = ((v + 0x0606060606060606ull) >> 4) & 0x0101010101010101ull;
  return v + 0x3030303030303030ull + letters * ('a' - '0' - 10);
}

/// The key of an index: different for every index, made on the fly, so that 100 million keys take
/// no memory.
inline Key16 key_of(std::uint64_t index) {
  std::uint64_t bits = spread(index);
  std::array<std::uint64_t, 2> words{hex_digits(static_cast<std::uint32_t>(bits >> 32)),
                                     hex_digits(static_cast<std::uint32_t>(bits))};
  return std::bit_cast<Key16>(words);
}

/// A hash for 16 bytes: two 64-bit words through one 128-bit multiplication (as in wyhash). Used by
/// every baseline, so that none loses by its standard library's hash.
inline std::uint64_t hash_of(const Key16& key) {
  auto words = std::bit_cast<std::array<std::uint64_t, 2>>(key.text);
  __extension__ typedef unsigned __int128 Wide;
  Wide product =
      static_cast<Wide>(words[0] ^ 0xA0761D6478BD642Full) * (words[1] ^ 0xE7037ED1A0B428DBull);
  auto folded = static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
  return folded * 0x9E3779B97F4A7C15ull ^ (folded >> 32);
}

struct KeyHash {
  std::size_t operator()(const Key16& key) const { return hash_of(key); }
};

/// Ranks 0 … n-1 with probability proportional to 1 / (rank + 1)^exponent; by rejection-inversion
/// (Hörmann and Derflinger, 1996), so nothing is set up per key. exponent > 0, not 1; n >= 1.
class Zipf {
 public:
  Zipf(std::uint64_t n, double exponent) : n_(static_cast<double>(n)), exponent_(exponent) {
    low_ = area(1.5) - 1;
    high_ = area(n_ + 0.5);
    shortcut_ = 2 - inverse(area(2.5) - height(2));
  }
  std::uint64_t operator()(std::uint64_t& state) const {
    for (;;) {
      double u = high_ + next_unit(state) * (low_ - high_);
      double x = inverse(u);
      double k = std::floor(x + 0.5);
      k = k < 1 ? 1 : k > n_ ? n_ : k;
      if (k - x <= shortcut_ || u >= area(k + 0.5) - height(k)) {
        return static_cast<std::uint64_t>(k) - 1;
      }
    }
  }

 private:
  double height(double x) const { return std::exp(-exponent_ * std::log(x)); }
  /// The integral of height, with area(1) = 0.
  double area(double x) const {
    double log = std::log(x);
    double scaled = (1 - exponent_) * log;
    return (std::abs(scaled) < 1e-8 ? 1 + scaled / 2 : std::expm1(scaled) / scaled) * log;
  }
  double inverse(double a) const {
    double scaled = std::max(-1.0, a * (1 - exponent_));
    double factor = std::abs(scaled) < 1e-8 ? 1 - scaled / 2 : std::log1p(scaled) / scaled;
    return std::exp(factor * a);
  }
  double n_;
  double exponent_;
  double low_ = 0;
  double high_ = 0;
  double shortcut_ = 0;
};

enum class Draw { uniform, zipf };

/// What a loop asks for, drawn beforehand: drawing from a Zipf costs more than a decision does.
/// Indices into [0, keys), keys below 2^32. The loop walks it round and round; it is long enough
/// (16 MiB of indices) that the keys of one round do not fit any cache.
inline std::vector<std::uint32_t> draw_indices(Draw draw, std::uint64_t keys, std::uint64_t seed,
                                               std::size_t count = 1u << 22) {
  std::vector<std::uint32_t> out(count);
  Zipf zipf(keys, 0.99);
  for (std::uint32_t& index : out) {
    index = static_cast<std::uint32_t>(draw == Draw::zipf ? zipf(seed) : next_random(seed) % keys);
  }
  return out;
}

/// Costs: exp of a normal variable (median 1, sigma 1), rounded, 1 … 255.
inline std::vector<std::uint8_t> draw_costs(std::uint64_t seed, std::size_t count = 1u << 20) {
  std::vector<std::uint8_t> out(count);
  for (std::uint8_t& cost : out) {
    double radius = std::sqrt(-2 * std::log(1 - next_unit(seed)));
    double value = std::exp(radius * std::cos(6.283185307179586 * next_unit(seed)));
    cost = static_cast<std::uint8_t>(value < 1 ? 1 : value > 255 ? 255 : value + 0.5);
  }
  return out;
}

}  // namespace weir::bench
