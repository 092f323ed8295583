#include <gtest/gtest.h>
#include <sodium/crypto_shorthash_siphash24.h>
#include <weir/limits/series/keyed_hash.h>

#include <random>
#include <string>

namespace weir::internal {
namespace {

TEST(SipHash, AsLibsodiumForEveryLength) {
  std::mt19937_64 random(7);
  for (std::size_t size = 0; size < 300; ++size) {
    for (int i = 0; i < 20; ++i) {
      HashKey key;
      for (auto& byte : key) byte = static_cast<std::uint8_t>(random());
      std::string text(size, '\0');
      for (char& c : text) c = static_cast<char>(random());
      std::array<std::uint64_t, 2> wanted{};
      crypto_shorthash_siphashx24(reinterpret_cast<unsigned char*>(wanted.data()),
                                  reinterpret_cast<const unsigned char*>(text.data()), size,
                                  key.data());
      ASSERT_EQ((SipHash<2, 4>(key)(text)), wanted) << size << " bytes";
    }
  }
}

TEST(SipHash, EveryByteCounts) {
  KeyedHash hash(HashKey{1, 2, 3});
  for (std::size_t size = 1; size < 40; ++size) {
    std::string text(size, 'a');
    auto before = hash(text);
    EXPECT_NE(hash(text + '\0'), before);
    for (char& c : text) {
      c ^= 1;
      EXPECT_NE(hash(text), before) << size;
      c ^= 1;
    }
  }
}

}  // namespace
}  // namespace weir::internal
