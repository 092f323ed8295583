#include <weir/crdt/codec.h>

#include <gtest/gtest.h>

#include <random>

namespace weir::crdt {
namespace {

Delta sample() {
  Delta delta;
  Incarnation a{0xAAAA, 1};
  Incarnation b{0xBBBB, 2};
  delta.members[a] = {"eu", "eu-1"};
  Cell window{{{1, 2}, {60 * kSecond, 120 * kSecond}}, {}, {}};
  window.raise({a, 0}, 300);
  window.raise({b, 0}, ~std::uint64_t{0});
  Cell bucket{{{3, 4}, kBucketEpoch}, {}, {}};
  bucket.raise({b, 77}, 9);
  bucket.bucket = {{9, 5, (DebtTicks{3} << 64) | 1}, 6, 7};
  delta.cells = {window, bucket};
  return delta;
}

TEST(Codec, ReadsWhatItWrote) {
  std::vector<std::byte> bytes;
  encode(sample(), bytes);
  Delta back;
  std::string error;
  ASSERT_TRUE(decode(bytes, back, error)) << error;
  EXPECT_EQ(back, sample());
}

TEST(Codec, EveryTruncationIsRefused) {
  std::vector<std::byte> bytes;
  encode(sample(), bytes);
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    Delta back;
    std::string error;
    EXPECT_FALSE(decode(std::span(bytes).first(size), back, error)) << size;
    EXPECT_FALSE(error.empty());
  }
}

TEST(Codec, ANewerVersionIsNamed) {
  std::vector<std::byte> bytes;
  encode(sample(), bytes);
  bytes[0] = std::byte{9};
  Delta back;
  std::string error;
  EXPECT_FALSE(decode(bytes, back, error));
  EXPECT_NE(error.find("version 9, expected 1"), std::string::npos) << error;
}

TEST(Codec, DamagedBytesNeverYieldAnInvalidCell) {
  std::vector<std::byte> good;
  encode(sample(), good);
  std::mt19937 random(7);
  int accepted = 0;
  for (int i = 0; i < 20'000; ++i) {
    std::vector<std::byte> bytes = good;
    for (int k = 0; k < 1 + i % 4; ++k) {
      bytes[random() % bytes.size()] = static_cast<std::byte>(random());
    }
    Delta back;
    std::string error;
    if (!decode(bytes, back, error)) continue;
    ++accepted;
    for (const Cell& cell : back.cells) EXPECT_TRUE(valid(cell));
  }
  EXPECT_GT(accepted, 0);
}

TEST(Codec, AWindowThatEndsBehindAllTimeIsRefused) {
  auto encoded = [](Nanos start, std::uint64_t lifetime) {
    // No writers, one cell of a window without slots.
    std::vector<std::byte> bytes{std::byte{kCodecVersion}, std::byte{0}, std::byte{1}};
    for (int i = 0; i < 17; ++i) bytes.push_back(std::byte{0});
    auto put = [&bytes](std::uint64_t value) {
      for (; value >= 0x80; value >>= 7) bytes.push_back(static_cast<std::byte>(value | 0x80));
      bytes.push_back(static_cast<std::byte>(value));
    };
    put(static_cast<std::uint64_t>(start));
    put(lifetime);
    bytes.push_back(std::byte{0});
    return bytes;
  };
  Delta back;
  std::string error;
  EXPECT_TRUE(decode(encoded(kMaxTime, kMaxLifetime), back, error)) << error;
  EXPECT_FALSE(decode(encoded(kMaxTime, kMaxLifetime + 1), back, error));
  // Under UBSan: no sum that overflows.
  EXPECT_FALSE(decode(encoded(kMaxTime, kMaxTime), back, error));
  EXPECT_EQ(error, "bad cell 0");
}

TEST(Codec, HugeCountsTakeNoMemory) {
  std::vector<std::byte> bytes{std::byte{kCodecVersion}};
  for (int i = 0; i < 9; ++i) bytes.push_back(std::byte{0xFF});
  bytes.push_back(std::byte{0x01});
  Delta back;
  std::string error;
  EXPECT_FALSE(decode(bytes, back, error));
}

}  // namespace
}  // namespace weir::crdt
