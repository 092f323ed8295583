#include <weir/storage/record.h>

#include <gtest/gtest.h>

#include <limits>

namespace weir::storage {
namespace {

TEST(Record, CrcIsCastagnoli) {
  EXPECT_EQ(crc32c(0, view_of("123456789")), 0xE3069283u);
  EXPECT_EQ(crc32c(0, View()), 0u);
  Bytes zeros(32, std::byte{0});
  EXPECT_EQ(crc32c(0, zeros), 0x8A9136AAu);
  std::string_view text = "the quick brown fox jumps over the lazy dog";
  for (std::size_t cut = 0; cut <= text.size(); ++cut) {
    std::uint32_t front = crc32c(0, view_of(text.substr(0, cut)));
    EXPECT_EQ(crc32c(front, view_of(text.substr(cut))), crc32c(0, view_of(text)));
    EXPECT_EQ(crc32c_by_tables(front, view_of(text.substr(cut))), crc32c(0, view_of(text)));
  }
}

TEST(Record, NumbersRoundTrip) {
  std::uint64_t values[] = {0,   1,          127,        128,
                            300, 1ull << 32, 1ull << 63, std::numeric_limits<std::uint64_t>::max()};
  Bytes bytes;
  for (std::uint64_t value : values) {
    put_varint(bytes, value);
    put_big64(bytes, value);
    put_u32(bytes, static_cast<std::uint32_t>(value));
  }
  put_text(bytes, "name");
  RecordReader reader(bytes);
  for (std::uint64_t value : values) {
    EXPECT_EQ(reader.varint(), value);
    EXPECT_EQ(reader.big64(), value);
    EXPECT_EQ(reader.u32(), static_cast<std::uint32_t>(value));
  }
  EXPECT_FALSE(reader.done());
  EXPECT_EQ(reader.text(), "name");
  EXPECT_TRUE(reader.done());
}

TEST(Record, ShortAndMalformedInputFails) {
  Bytes endless(11, std::byte{0x80});
  RecordReader varint(endless);
  varint.varint();
  EXPECT_FALSE(varint.ok());

  Bytes too_big(9, std::byte{0xFF});
  too_big.push_back(std::byte{0x02});
  RecordReader big(too_big);
  big.varint();
  EXPECT_FALSE(big.ok());

  Bytes long_text;
  put_varint(long_text, std::numeric_limits<std::uint64_t>::max());
  RecordReader text(long_text);
  EXPECT_EQ(text.text(), "");
  EXPECT_FALSE(text.ok());

  Bytes seven(7, std::byte{1});
  RecordReader shortened(seven);
  shortened.big64();
  EXPECT_FALSE(shortened.ok());
  EXPECT_EQ(shortened.u8(), 0);
  EXPECT_FALSE(shortened.done());
}

TEST(Record, SealCoversKeyAndContent) {
  Bytes value;
  start_value(value);
  put_text(value, "content");
  seal(view_of("key"), value);
  View content;
  ASSERT_TRUE(unseal(view_of("key"), value, content));
  EXPECT_EQ(RecordReader(content).text(), "content");
  EXPECT_FALSE(unseal(view_of("kez"), value, content));
  for (std::size_t at = 0; at < value.size(); ++at) {
    Bytes flipped = value;
    flipped[at] ^= std::byte{1};
    EXPECT_FALSE(unseal(view_of("key"), flipped, content)) << at;
  }
  EXPECT_FALSE(unseal(view_of("key"), View(value).first(3), content));
}

TEST(Record, CellKeysSortBySeriesThenEpoch) {
  crdt::CellId a{{1, 2}, {0, kSecond}};
  crdt::CellId b{{1, 2}, {kSecond, 2 * kSecond}};
  crdt::CellId c{{1ull << 40, 0}, {0, kSecond}};
  Bytes ka, kb, kc, bucket;
  put_cell_key(a, ka);
  put_cell_key(b, kb);
  put_cell_key(c, kc);
  put_cell_key({{5, 6}, crdt::kBucketEpoch}, bucket);
  EXPECT_LT(ka, kb);
  EXPECT_LT(kb, kc);
  EXPECT_EQ(ka.size(), 32u);
  EXPECT_EQ(bucket.size(), 16u);

  crdt::CellId read;
  ASSERT_TRUE(read_cell_key(kb, false, read));
  EXPECT_EQ(read, b);
  ASSERT_TRUE(read_cell_key(bucket, true, read));
  EXPECT_TRUE(read.is_bucket());
  EXPECT_EQ(read.series, (crdt::SeriesId{5, 6}));
  EXPECT_FALSE(read_cell_key(ka, true, read));
  EXPECT_FALSE(read_cell_key(bucket, false, read));
  ka[16] = std::byte{0xFF};  // a start before the beginning of time
  EXPECT_FALSE(read_cell_key(ka, false, read));
}

TEST(Record, TableNames) {
  EXPECT_EQ(table_name(crdt::kBucketGeneration), "buckets");
  crdt::Generation generation = crdt::generation_of({kDay * 20'000, kDay * 20'001});
  EXPECT_EQ(table_name(generation),
            "g/" + std::to_string(generation.grain_log2) + "/" + std::to_string(generation.number));
  crdt::Generation read;
  ASSERT_TRUE(read_table_name(table_name(generation), read));
  EXPECT_EQ(read, generation);
  ASSERT_TRUE(read_table_name("buckets", read));
  EXPECT_TRUE(read.is_bucket());
  for (const char* bad :
       {"", "g/", "g/1", "g/1/", "g//1", "g/-1/5", "g/1/-5", "g/01/5", "g/1/05", "g/1/5x", "x/1/5",
        "g/31/9223372036854775807", "g/64/1", "bucket", "g/1/99999999999999999999"}) {
    EXPECT_FALSE(read_table_name(bad, read)) << bad;
  }
}

}  // namespace
}  // namespace weir::storage
