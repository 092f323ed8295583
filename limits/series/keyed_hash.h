#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <string_view>

#include <weir/limits/hash_key.h>

namespace weir::internal {

/// SipHash with 128 bits (Aumasson and Bernstein, 2012), the key's and the result's words in
/// little-endian order; kRounds a word and kLast at the end. Inlined, as a decision would spend a
/// fourth of its time in a library's. SipHash<2, 4> is crypto_shorthash_siphashx24 of libsodium; a
/// test holds it to that.
template <int kRounds, int kLast>
class SipHash {
 public:
  explicit SipHash(const HashKey& key) {
    std::uint64_t k0 = word(reinterpret_cast<const char*>(key.data()));
    std::uint64_t k1 = word(reinterpret_cast<const char*>(key.data()) + 8);
    v0_ = k0 ^ 0x736f6d6570736575ull;
    v1_ = k1 ^ 0x646f72616e646f6dull ^ 0xEE;
    v2_ = k0 ^ 0x6c7967656e657261ull;
    v3_ = k1 ^ 0x7465646279746573ull;
  }

  /// By value: what the key makes of the state serves any number of texts.
  std::array<std::uint64_t, 2> operator()(std::string_view text) const {
    SipHash state = *this;
    const char* at = text.data();
    std::size_t left = text.size();
    for (; left >= 8; at += 8, left -= 8) state.take(word(at));
    state.take(static_cast<std::uint64_t>(text.size()) << 56 | tail(at, left));
    std::array<std::uint64_t, 2> out;
    state.v2_ ^= 0xEE;
    out[0] = state.finish();
    state.v1_ ^= 0xDD;
    out[1] = state.finish();
    return out;
  }

 private:
  static std::uint64_t word(const char* at) {
    std::uint64_t value = 0;
    std::memcpy(&value, at, sizeof value);
    if constexpr (std::endian::native == std::endian::big) value = __builtin_bswap64(value);
    return value;
  }
  /// The last bytes, fewer than 8. The loads overlap; no byte is looked at twice with effect.
  static std::uint64_t tail(const char* at, std::size_t size) {
    auto byte = [&](std::size_t i) {
      return static_cast<std::uint64_t>(static_cast<unsigned char>(at[i])) << (8 * i);
    };
    if (size == 0) return 0;
    if (size < 4) return byte(0) | byte(size / 2) | byte(size - 1);
    std::uint32_t low = 0;
    std::uint32_t high = 0;
    std::memcpy(&low, at, sizeof low);
    std::memcpy(&high, at + size - 4, sizeof high);
    if constexpr (std::endian::native == std::endian::big) {
      low = __builtin_bswap32(low);
      high = __builtin_bswap32(high);
    }
    return low | static_cast<std::uint64_t>(high) << (8 * (size - 4));
  }
  void take(std::uint64_t message) {
    v3_ ^= message;
    for (int i = 0; i < kRounds; ++i) round();
    v0_ ^= message;
  }
  std::uint64_t finish() {
    for (int i = 0; i < kLast; ++i) round();
    return v0_ ^ v1_ ^ v2_ ^ v3_;
  }
  void round() {
    v0_ += v1_;
    v2_ += v3_;
    v1_ = std::rotl(v1_, 13) ^ v0_;
    v3_ = std::rotl(v3_, 16) ^ v2_;
    v0_ = std::rotl(v0_, 32);
    v2_ += v1_;
    v0_ += v3_;
    v1_ = std::rotl(v1_, 17) ^ v2_;
    v3_ = std::rotl(v3_, 21) ^ v0_;
    v2_ = std::rotl(v2_, 32);
  }
  std::uint64_t v0_, v1_, v2_, v3_;
};

/// Of series ids and request ids: the rounds that hash tables of Rust and Python use against keys
/// chosen to collide.
using KeyedHash = SipHash<1, 3>;

}  // namespace weir::internal
