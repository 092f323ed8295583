#include <weir/storage/record.h>

#include <array>
#include <charconv>

#include <fmt/format.h>

namespace weir::storage {

namespace {

using CrcTables = std::array<std::array<std::uint32_t, 256>, 8>;

constexpr CrcTables make_crc_tables() {
  CrcTables tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82F63B78u : 0u);
    tables[0][byte] = crc;
  }
  for (std::size_t slice = 1; slice < 8; ++slice) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      std::uint32_t crc = tables[slice - 1][byte];
      tables[slice][byte] = (crc >> 8) ^ tables[0][crc & 0xFF];
    }
  }
  return tables;
}

constexpr CrcTables kCrc = make_crc_tables();

std::uint8_t byte_at(View bytes, std::size_t index) {
  return std::to_integer<std::uint8_t>(bytes[index]);
}

#if defined(__x86_64__)

/// By the processor's own instruction, eight bytes at a time: a tenth of the tables' time.
__attribute__((target("sse4.2"))) std::uint32_t crc32c_by_processor(std::uint32_t crc, View bytes) {
  std::uint64_t state = ~crc;
  while (bytes.size() >= sizeof state) {
    std::uint64_t eight = 0;
    std::memcpy(&eight, bytes.data(), sizeof eight);
    state = __builtin_ia32_crc32di(state, eight);
    bytes = bytes.subspan(sizeof eight);
  }
  auto rest = static_cast<std::uint32_t>(state);
  for (std::byte byte : bytes) {
    rest = __builtin_ia32_crc32qi(rest, std::to_integer<unsigned char>(byte));
  }
  return ~rest;
}

const bool kProcessorHasCrc = __builtin_cpu_supports("sse4.2") != 0;

#endif

}  // namespace

std::uint32_t crc32c_by_tables(std::uint32_t crc, View bytes) {
  crc = ~crc;
  while (bytes.size() >= 8) {
    std::uint32_t low =
        crc ^ (std::uint32_t{byte_at(bytes, 0)} | std::uint32_t{byte_at(bytes, 1)} << 8 |
               std::uint32_t{byte_at(bytes, 2)} << 16 | std::uint32_t{byte_at(bytes, 3)} << 24);
    crc = kCrc[7][low & 0xFF] ^ kCrc[6][(low >> 8) & 0xFF] ^ kCrc[5][(low >> 16) & 0xFF] ^
          kCrc[4][low >> 24] ^ kCrc[3][byte_at(bytes, 4)] ^ kCrc[2][byte_at(bytes, 5)] ^
          kCrc[1][byte_at(bytes, 6)] ^ kCrc[0][byte_at(bytes, 7)];
    bytes = bytes.subspan(8);
  }
  for (std::byte byte : bytes) {
    crc = (crc >> 8) ^ kCrc[0][(crc ^ std::to_integer<std::uint32_t>(byte)) & 0xFF];
  }
  return ~crc;
}

std::uint32_t crc32c(std::uint32_t crc, View bytes) {
#if defined(__x86_64__)
  if (kProcessorHasCrc) return crc32c_by_processor(crc, bytes);
#endif
  return crc32c_by_tables(crc, bytes);
}

View view_of(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

std::string_view text_of(View bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

void put_u8(Bytes& out, std::uint8_t value) {
  out.push_back(std::byte{value});
}

void put_u32(Bytes& out, std::uint32_t value) {
  for (int shift = 0; shift < 32; shift += 8) {
    out.push_back(static_cast<std::byte>((value >> shift) & 0xFF));
  }
}

void put_varint(Bytes& out, std::uint64_t value) {
  while (value >= 0x80) {
    out.push_back(static_cast<std::byte>((value & 0x7F) | 0x80));
    value >>= 7;
  }
  out.push_back(static_cast<std::byte>(value));
}

void put_text(Bytes& out, std::string_view value) {
  put_varint(out, value.size());
  View bytes = view_of(value);
  out.insert(out.end(), bytes.begin(), bytes.end());
}

void put_big32(Bytes& out, std::uint32_t value) {
  for (int shift = 24; shift >= 0; shift -= 8) {
    out.push_back(static_cast<std::byte>((value >> shift) & 0xFF));
  }
}

void put_big64(Bytes& out, std::uint64_t value) {
  put_big32(out, static_cast<std::uint32_t>(value >> 32));
  put_big32(out, static_cast<std::uint32_t>(value));
}

std::string RecordReader::text() {
  std::uint64_t size = varint();
  if (size > bytes_.size()) {
    fail();
    return {};
  }
  return std::string(text_of(take(static_cast<std::size_t>(size))));
}

void start_value(Bytes& value) {
  value.assign(kSealBytes, std::byte{0});
}

void seal(View key, Bytes& value) {
  std::uint32_t crc = crc32c(crc32c(0, key), View(value).subspan(kSealBytes));
  for (std::size_t i = 0; i < kSealBytes; ++i) {
    value[i] = static_cast<std::byte>((crc >> (8 * i)) & 0xFF);
  }
}

bool unseal(View key, View value, View& content) {
  if (value.size() < kSealBytes) return false;
  std::uint32_t stored = RecordReader(value.first(kSealBytes)).u32();
  content = value.subspan(kSealBytes);
  return crc32c(crc32c(0, key), content) == stored;
}

void put_cell_key(const crdt::CellId& id, Bytes& out) {
  put_big64(out, id.series.hi);
  put_big64(out, id.series.lo);
  if (id.is_bucket()) return;
  put_big64(out, static_cast<std::uint64_t>(id.epoch.start));
  put_big64(out, static_cast<std::uint64_t>(id.epoch.expiry));
}

bool read_cell_key(View key, bool bucket, crdt::CellId& out) {
  RecordReader reader(key);
  out.series.hi = reader.big64();
  out.series.lo = reader.big64();
  out.epoch = crdt::kBucketEpoch;
  if (bucket) return reader.done();
  out.epoch.start = static_cast<Nanos>(reader.big64());
  out.epoch.expiry = static_cast<Nanos>(reader.big64());
  return reader.done() && crdt::valid_epoch(out.epoch);
}

std::string table_name(const crdt::Generation& generation) {
  if (generation.is_bucket()) return "buckets";
  return fmt::format("g/{}/{}", generation.grain_log2, generation.number);
}

bool read_table_name(std::string_view name, crdt::Generation& out) {
  if (name == "buckets") {
    out = crdt::kBucketGeneration;
    return true;
  }
  if (!name.starts_with("g/")) return false;
  const char* end = name.data() + name.size();
  auto log2 = std::from_chars(name.data() + 2, end, out.grain_log2);
  if (log2.ec != std::errc() || log2.ptr == end || *log2.ptr != '/') return false;
  auto number = std::from_chars(log2.ptr + 1, end, out.number);
  if (number.ec != std::errc() || number.ptr != end) return false;
  // Bounds first, so that end() cannot overflow; and one spelling only.
  if (out.grain_log2 < 0 || out.grain_log2 > 31 || out.number < 0) return false;
  Nanos grain = (std::int64_t{1} << out.grain_log2) * kSecond;
  return out.number <= (kMaxTime + crdt::kMaxLifetime) / grain + 1 && table_name(out) == name;
}

}  // namespace weir::storage
