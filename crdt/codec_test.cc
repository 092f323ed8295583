#include <weir/crdt/codec.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>

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
  EXPECT_NE(error.find("version 9, expected 2"), std::string::npos) << error;
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
    std::vector<std::byte> bytes{std::byte{1}, std::byte{0}, std::byte{1}};  // version 1
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
  EXPECT_EQ(error, "cell 0 is not valid");
}

/// Windows of one epoch and one writer, and buckets of another, as a push has them.
Delta push_of(std::size_t windows, std::size_t buckets) {
  Delta delta;
  Incarnation writer{0xAAAA, 1};
  delta.members[writer] = {"eu", "eu-1"};
  const Nanos start = 1'700'000'000 * kSecond;
  for (std::uint64_t i = 1; i <= windows + buckets; ++i) {
    Cell& cell = delta.cells.emplace_back();
    cell.id = {{mix64(i, 1), mix64(i, 2)}, {start, start + kHour}};
    cell.slots.push_back({{writer, 0}, 1 + i % 100});
    if (i <= windows) continue;
    cell.id.epoch = kBucketEpoch;
    const Nanos touched = start + static_cast<Nanos>(i) * 250 * kMicrosecond;
    cell.slots[0].id.birth = static_cast<std::uint64_t>(touched - static_cast<Nanos>(i) * kMinute);
    cell.bucket = {{1 + i % 100, touched, i * i * 1'234'567'890'123}, touched, touched + kDay};
  }
  return delta;
}

std::size_t bytes_of(const Delta& delta) {
  std::vector<std::byte> bytes;
  encode(delta, bytes);
  return bytes.size();
}

TEST(Codec, CellsThatAreAlikeShareWhatTheyHaveInCommon) {
  EXPECT_LE(bytes_of(push_of(1000, 0)), 17'100u);
  EXPECT_LE(bytes_of(push_of(0, 1000)), 38'000u);
  // Windows and buckets in turn: a run each.
  Delta mixed;
  Delta delta = push_of(500, 500);
  for (std::size_t i = 0; i < 500; ++i) {
    mixed.cells.push_back(delta.cells[i]);
    mixed.cells.push_back(delta.cells[500 + i]);
  }
  EXPECT_LE(bytes_of(mixed), 32'000u);
  std::vector<std::byte> bytes;
  encode(mixed, bytes);
  Delta back;
  std::string error;
  ASSERT_TRUE(decode(bytes, back, error)) << error;
  EXPECT_EQ(back, mixed);
}

TEST(Codec, AppendsToWhatIsThere) {
  std::vector<std::byte> bytes(7, std::byte{9});
  encode(sample(), bytes);
  Delta back;
  std::string error;
  EXPECT_TRUE(decode(std::span(bytes).subspan(7), back, error)) << error;
  EXPECT_EQ(std::count(bytes.begin(), bytes.begin() + 7, std::byte{9}), 7);
}

TEST(Codec, ReadsWhatVersionOneWrote) {
  const std::string hex =
      "0102aaaa0000000000000100000000000000010265750465752d31bbbb00000000000002000000000000000002"
      "010000000000000002000000000000000080b09dc2df0180b09dc2df01020000ac020100ffffffffffffffffff"
      "01030000000000000004000000000000000109050301060701014d09";
  std::vector<std::byte> bytes;
  for (std::size_t i = 0; i < hex.size(); i += 2) {
    bytes.push_back(static_cast<std::byte>(std::stoi(hex.substr(i, 2), nullptr, 16)));
  }
  Delta back;
  std::string error;
  ASSERT_TRUE(decode(bytes, back, error)) << error;
  EXPECT_EQ(back, sample());
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_FALSE(decode(std::span(bytes).first(size), back, error)) << size;
  }
}

/// The bytes behind the version, refused for `why`.
void expect_refused(std::initializer_list<int> behind, const std::string& why) {
  std::vector<std::byte> bytes{std::byte{kCodecVersion}};
  for (int byte : behind) bytes.push_back(static_cast<std::byte>(byte));
  Delta back;
  std::string error;
  EXPECT_FALSE(decode(bytes, back, error));
  EXPECT_EQ(error, why);
}

TEST(Codec, ReferencesMustPointSomewhere) {
  expect_refused({0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1},
                 "writer 0 belongs to no listed member");
  // No member, no writer, no window, a cell: its run, and room for its bytes.
  expect_refused({0, 0, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
                 "the run of cell 0 has no listed window");
  expect_refused(
      {0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
      "the run of cell 0 has slots without a listed writer");
  expect_refused({0, 0, 0, 1, 8, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
                 "the run of cell 0 has flags that are not known");
  expect_refused({0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
                 "the run of cell 0 has 0 cells of 1");
  expect_refused({0, 0, 0, 1, 1, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
                 "the run of cell 0 has 2 cells of 1");
  expect_refused({0, 0, 0, 0, 0}, "bytes behind the last cell");
}

TEST(Codec, BoundsAreKept) {
  std::vector<std::byte> bytes;
  encode(sample(), bytes);
  Delta back;
  std::string error;
  EXPECT_TRUE(decode(bytes, {.cells = 2, .slots = 3, .writers = 2, .members = 1}, back, error));
  EXPECT_FALSE(decode(bytes, {.cells = 1}, back, error));
  EXPECT_EQ(error, "too many cells in a delta");
  EXPECT_FALSE(decode(bytes, {.slots = 2}, back, error));
  EXPECT_EQ(error, "too many slots in a delta");
  EXPECT_FALSE(decode(bytes, {.writers = 1}, back, error));
  EXPECT_EQ(error, "too many writers in a delta");
  EXPECT_FALSE(decode(bytes, {.members = 0}, back, error));
  EXPECT_EQ(error, "too many members in a delta");
}

TEST(Codec, HugeCountsTakeNoMemory) {
  const std::initializer_list<int> huge{0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 1};
  std::vector<int> before;
  for (const char* why : {"more members than bytes", "more writers than bytes",
                          "more windows than bytes", "more cells than bytes"}) {
    std::vector<std::byte> bytes{std::byte{kCodecVersion}};
    for (int byte : before) bytes.push_back(static_cast<std::byte>(byte));
    for (int byte : huge) bytes.push_back(static_cast<std::byte>(byte));
    Delta back;
    std::string error;
    EXPECT_FALSE(decode(bytes, back, error));
    EXPECT_EQ(error, why);
    before.push_back(0);
  }
}

}  // namespace
}  // namespace weir::crdt
