#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <weir/crdt/cell.h>

namespace weir::storage {

/// The bytes of keys and values (docs/storage-format.md). Nothing read from the disk is trusted:
/// readers check every length, and every value carries a checksum over its key and itself.

using Bytes = std::vector<std::byte>;
using View = std::span<const std::byte>;

/// CRC-32C (Castagnoli) of `bytes`, continued from `crc` (0 to start).
std::uint32_t crc32c(std::uint32_t crc, View bytes);
/// The same without the processor's instruction for it.
std::uint32_t crc32c_by_tables(std::uint32_t crc, View bytes);

View view_of(std::string_view text);
std::string_view text_of(View bytes);

void put_u8(Bytes& out, std::uint8_t value);
void put_u32(Bytes& out, std::uint32_t value);      ///< little-endian
void put_varint(Bytes& out, std::uint64_t value);   ///< LEB128
void put_text(Bytes& out, std::string_view value);  ///< length, bytes
void put_big32(Bytes& out, std::uint32_t value);    ///< big-endian, for keys
void put_big64(Bytes& out, std::uint64_t value);    ///< big-endian, for keys

/// Reads what the functions above wrote. After a read past the end or a malformed number every
/// read gives zero, and ok() is false.
class RecordReader {
 public:
  explicit RecordReader(View bytes) : bytes_(bytes) {}
  std::uint8_t u8() {
    const View one = take(1);
    return one.empty() ? std::uint8_t{0} : std::to_integer<std::uint8_t>(one[0]);
  }
  std::uint32_t u32() {
    const View four = take(4);
    std::uint32_t value = 0;
    for (std::size_t i = four.size(); i > 0; --i) {
      value = value << 8 | std::to_integer<std::uint32_t>(four[i - 1]);
    }
    return value;
  }
  std::uint64_t varint() {
    std::uint64_t value = 0;
    for (unsigned shift = 0; shift < 64; shift += 7) {
      const std::uint8_t byte = u8();
      if (!ok_) return 0;
      if (shift == 63 && byte > 1) break;  // beyond 64 bits
      value |= std::uint64_t{byte & 0x7Fu} << shift;
      if ((byte & 0x80) == 0) return value;
    }
    fail();
    return 0;
  }
  std::string text();
  std::uint32_t big32() {
    std::uint32_t value = 0;
    for (std::byte byte : take(4)) value = value << 8 | std::to_integer<std::uint32_t>(byte);
    return value;
  }
  std::uint64_t big64() {
    const std::uint64_t high = big32();
    return high << 32 | big32();
  }
  std::size_t left() const { return bytes_.size(); }
  bool ok() const { return ok_; }
  bool done() const { return ok_ && bytes_.empty(); }
  void fail() {
    ok_ = false;
    bytes_ = {};
  }

 private:
  View take(std::size_t count) {
    if (count > bytes_.size()) {
      fail();
      return {};
    }
    const View taken = bytes_.first(count);
    bytes_ = bytes_.subspan(count);
    return taken;
  }
  View bytes_;
  bool ok_ = true;
};

/// Bytes at the front of every value that hold its checksum.
inline constexpr std::size_t kSealBytes = 4;

/// Starts a value: room for the checksum.
void start_value(Bytes& value);
/// Fills in the checksum of `key` and everything after the seal.
void seal(View key, Bytes& value);
/// The content of a sealed value. False if it is too short or its checksum differs.
bool unseal(View key, View value, View& content);

/// 32 bytes: series, epoch start, epoch expiry, all big-endian; 16 for a bucket: the series.
/// Requires a valid epoch.
void put_cell_key(const crdt::CellId& id, Bytes& out);
/// False if `key` names no valid cell of a generation table, or with `bucket` of the bucket table.
bool read_cell_key(View key, bool bucket, crdt::CellId& out);

/// "g/<grain_log2>/<number>", or "buckets".
std::string table_name(const crdt::Generation& generation);
/// False if `name` is not one that table_name() makes.
bool read_table_name(std::string_view name, crdt::Generation& out);

}  // namespace weir::storage
