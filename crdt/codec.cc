#include <weir/crdt/codec.h>

#include <map>

namespace weir::crdt {
namespace {

class Writer {
 public:
  explicit Writer(std::vector<std::byte>& out) : out_(out) {}
  void byte(std::uint8_t value) { out_.push_back(static_cast<std::byte>(value)); }
  void fixed64(std::uint64_t value) {
    for (int shift = 0; shift < 64; shift += 8) byte(static_cast<std::uint8_t>(value >> shift));
  }
  void varint(std::uint64_t value) {
    while (value >= 0x80) {
      byte(static_cast<std::uint8_t>(value | 0x80));
      value >>= 7;
    }
    byte(static_cast<std::uint8_t>(value));
  }
  void text(const std::string& value) {
    varint(value.size());
    for (char c : value) byte(static_cast<std::uint8_t>(c));
  }

 private:
  std::vector<std::byte>& out_;
};

class ByteReader {
 public:
  explicit ByteReader(std::span<const std::byte> bytes) : bytes_(bytes) {}
  std::size_t left() const { return bytes_.size() - at_; }
  bool byte(std::uint8_t& out) {
    if (left() == 0) return false;
    out = std::to_integer<std::uint8_t>(bytes_[at_++]);
    return true;
  }
  bool fixed64(std::uint64_t& out) {
    if (left() < 8) return false;
    out = 0;
    for (unsigned shift = 0; shift < 64; shift += 8) {
      out |= static_cast<std::uint64_t>(std::to_integer<std::uint8_t>(bytes_[at_++])) << shift;
    }
    return true;
  }
  bool varint(std::uint64_t& out) {
    out = 0;
    for (unsigned shift = 0; shift < 64; shift += 7) {
      std::uint8_t next = 0;
      if (!byte(next)) return false;
      if (shift == 63 && next > 1) return false;
      out |= static_cast<std::uint64_t>(next & 0x7F) << shift;
      if (next < 0x80) return true;
    }
    return false;
  }
  bool nanos(Nanos& out) {
    std::uint64_t value = 0;
    if (!varint(value) || value > static_cast<std::uint64_t>(kMaxTime + kMaxLifetime)) return false;
    out = static_cast<Nanos>(value);
    return true;
  }
  bool text(std::string& out) {
    std::uint64_t size = 0;
    if (!varint(size) || size > kMaxMemberName || size > left()) return false;
    out.resize(size);
    for (char& c : out) c = static_cast<char>(std::to_integer<std::uint8_t>(bytes_[at_++]));
    return true;
  }
  /// A count of items of at least `least` bytes each: one that cannot be there is refused.
  bool count(std::uint64_t& out, std::size_t least) { return varint(out) && out <= left() / least; }

 private:
  std::span<const std::byte> bytes_;
  std::size_t at_ = 0;
};

bool read_bucket(ByteReader& in, BucketState& bucket) {
  std::uint64_t high = 0;
  std::uint64_t low = 0;
  if (!in.varint(bucket.checkpoint.counted) || !in.nanos(bucket.checkpoint.at) ||
      !in.varint(high) || !in.varint(low) || !in.nanos(bucket.touched) ||
      !in.nanos(bucket.expiry)) {
    return false;
  }
  bucket.checkpoint.debt = (static_cast<DebtTicks>(high) << 64) | low;
  return true;
}

bool read_cell(ByteReader& in, const std::vector<Incarnation>& writers, Cell& cell) {
  std::uint8_t kind = 0;
  std::uint64_t slots = 0;
  if (!in.fixed64(cell.id.series.hi) || !in.fixed64(cell.id.series.lo) || !in.byte(kind)) {
    return false;
  }
  if (kind == 0) {
    Nanos lifetime = 0;
    if (!in.nanos(cell.id.epoch.start) || !in.nanos(lifetime)) return false;
    // Both are in range alone; their sum may be beyond what 63 bits hold.
    if (lifetime > kMaxLifetime) return false;
    cell.id.epoch.expiry = cell.id.epoch.start + lifetime;
  } else if (kind == 1) {
    cell.id.epoch = kBucketEpoch;
    if (!read_bucket(in, cell.bucket)) return false;
  } else {
    return false;
  }
  if (!in.count(slots, 3)) return false;
  cell.slots.resize(slots);
  for (Slot& slot : cell.slots) {
    std::uint64_t writer = 0;
    if (!in.varint(writer) || writer >= writers.size() || !in.varint(slot.id.birth) ||
        !in.varint(slot.value)) {
      return false;
    }
    slot.id.writer = writers[writer];
  }
  return true;
}

}  // namespace

void encode(const Delta& delta, std::vector<std::byte>& out) {
  Writer writer(out);
  std::map<Incarnation, std::uint64_t> index;
  for (const auto& [incarnation, member] : delta.members) index.emplace(incarnation, 0);
  for (const Cell& cell : delta.cells) {
    for (const Slot& slot : cell.slots) index.emplace(slot.id.writer, 0);
  }
  writer.byte(kCodecVersion);
  writer.varint(index.size());
  std::uint64_t next = 0;
  for (auto& [incarnation, number] : index) {
    number = next++;
    writer.fixed64(incarnation.hi);
    writer.fixed64(incarnation.lo);
    auto member = delta.members.find(incarnation);
    writer.byte(member == delta.members.end() ? 0 : 1);
    if (member != delta.members.end()) {
      writer.text(member->second.region);
      writer.text(member->second.node);
    }
  }
  writer.varint(delta.cells.size());
  for (const Cell& cell : delta.cells) {
    writer.fixed64(cell.id.series.hi);
    writer.fixed64(cell.id.series.lo);
    writer.byte(cell.id.is_bucket() ? 1 : 0);
    if (cell.id.is_bucket()) {
      const BucketState& bucket = cell.bucket;
      writer.varint(bucket.checkpoint.counted);
      writer.varint(static_cast<std::uint64_t>(bucket.checkpoint.at));
      writer.varint(static_cast<std::uint64_t>(bucket.checkpoint.debt >> 64));
      writer.varint(static_cast<std::uint64_t>(bucket.checkpoint.debt));
      writer.varint(static_cast<std::uint64_t>(bucket.touched));
      writer.varint(static_cast<std::uint64_t>(bucket.expiry));
    } else {
      writer.varint(static_cast<std::uint64_t>(cell.id.epoch.start));
      writer.varint(static_cast<std::uint64_t>(cell.id.epoch.expiry - cell.id.epoch.start));
    }
    writer.varint(cell.slots.size());
    for (const Slot& slot : cell.slots) {
      writer.varint(index.at(slot.id.writer));
      writer.varint(slot.id.birth);
      writer.varint(slot.value);
    }
  }
}

bool decode(std::span<const std::byte> bytes, Delta& out, std::string& error) {
  auto fail = [&error](std::string what) {
    error = std::move(what);
    return false;
  };
  out = Delta{};
  if (bytes.size() > kMaxEncodedDelta) return fail("delta larger than 64 MiB");
  ByteReader in(bytes);
  std::uint8_t version = 0;
  if (!in.byte(version)) return fail("empty delta");
  if (version != kCodecVersion) {
    return fail("delta of version " + std::to_string(version) + ", expected " +
                std::to_string(kCodecVersion));
  }
  std::uint64_t count = 0;
  if (!in.count(count, 17)) return fail("bad number of writers");
  std::vector<Incarnation> writers(count);
  for (std::size_t i = 0; i < writers.size(); ++i) {
    std::uint8_t named = 0;
    if (!in.fixed64(writers[i].hi) || !in.fixed64(writers[i].lo) || !in.byte(named) || named > 1) {
      return fail("bad writer " + std::to_string(i));
    }
    if (i > 0 && !(writers[i - 1] < writers[i])) return fail("writers out of order");
    if (named == 1) {
      Member member;
      if (!in.text(member.region) || !in.text(member.node)) {
        return fail("bad name of writer " + std::to_string(i));
      }
      out.members.emplace(writers[i], std::move(member));
    }
  }
  if (!in.count(count, 20)) return fail("bad number of cells");
  out.cells.resize(count);
  for (std::size_t i = 0; i < out.cells.size(); ++i) {
    if (!read_cell(in, writers, out.cells[i]) || !valid(out.cells[i])) {
      return fail("bad cell " + std::to_string(i));
    }
  }
  if (in.left() != 0) return fail("bytes behind the last cell");
  return true;
}

}  // namespace weir::crdt
