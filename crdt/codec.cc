#include <weir/crdt/codec.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <map>

#include <absl/container/btree_map.h>

namespace weir::crdt {
namespace {

constexpr std::uint8_t kRowsVersion = 1;

// Flags of a run.
constexpr std::uint8_t kBucket = 1;
/// Buckets: every checkpoint counts all slots, and is of the last touch. So it is with one writer.
constexpr std::uint8_t kExact = 2;
/// Windows: a slot has a birth.
constexpr std::uint8_t kBirths = 4;
constexpr std::uint8_t kFlags = kBucket | kExact | kBirths;

constexpr std::size_t kMostOfVarint = 10;
/// Most bytes of a run's head and of a cell, without their slots.
constexpr std::size_t kMostOfRun = 1 + 3 * kMostOfVarint;
constexpr std::size_t kMostOfCell = 16 + 4 * kMostOfVarint + 19;
/// Most bytes of a slot in either.
constexpr std::size_t kMostOfSlot = 2 * kMostOfVarint;

std::uint64_t bits(Nanos time) {
  return static_cast<std::uint64_t>(time);
}

/// Small for small differences of either sign; wraps.
template <typename Value>
Value zigzag(Value difference) {
  return difference << 1 ^ (0 - (difference >> (sizeof(Value) * 8 - 1)));
}
template <typename Value>
Value unzigzag(Value coded) {
  return coded >> 1 ^ (0 - (coded & 1));
}

/// As it is on the wire, and back.
std::uint64_t little(std::uint64_t value) {
  return std::endian::native == std::endian::little ? value : __builtin_bswap64(value);
}

class Writer {
 public:
  explicit Writer(std::vector<std::byte>& out) : out_(out), used_(out.size()) {}
  Writer(const Writer&) = delete;
  Writer& operator=(const Writer&) = delete;
  ~Writer() { out_.resize(used_); }

  /// Before what follows, which is at most so many bytes.
  void make_room(std::size_t bytes) {
    if (out_.size() - used_ < bytes) out_.resize(std::max(2 * out_.size(), used_ + bytes));
  }
  void byte(std::uint8_t value) { out_[used_++] = static_cast<std::byte>(value); }
  void fixed64(std::uint64_t value) {
    value = little(value);
    std::memcpy(&out_[used_], &value, sizeof value);
    used_ += sizeof value;
  }
  template <typename Value>
  void varint(Value value) {
    while (value >= 0x80) {
      byte(static_cast<std::uint8_t>(static_cast<std::uint8_t>(value) | 0x80));
      value >>= 7;
    }
    byte(static_cast<std::uint8_t>(value));
  }
  void text(const std::string& value) {
    make_room(kMostOfVarint + value.size());
    varint(value.size());
    if (!value.empty()) std::memcpy(&out_[used_], value.data(), value.size());
    used_ += value.size();
  }

 private:
  std::vector<std::byte>& out_;
  std::size_t used_;
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
    std::memcpy(&out, &bytes_[at_], sizeof out);
    out = little(out);
    at_ += sizeof out;
    return true;
  }
  template <typename Value>
  bool varint(Value& out) {
    constexpr unsigned kBits = sizeof(Value) * 8;
    out = 0;
    for (unsigned shift = 0; shift < kBits; shift += 7) {
      std::uint8_t next = 0;
      if (!byte(next)) return false;
      if (shift + 7 > kBits && next >> (kBits - shift) != 0) return false;
      out |= static_cast<Value>(next & 0x7F) << shift;
      if (next < 0x80) return true;
    }
    return false;
  }
  bool nanos(Nanos& out) {
    std::uint64_t value = 0;
    if (!varint(value) || value > bits(kMaxTime + kMaxLifetime)) return false;
    out = static_cast<Nanos>(value);
    return true;
  }
  bool text(std::string& out) {
    std::uint64_t size = 0;
    if (!varint(size) || size > kMaxMemberName || size > left()) return false;
    out.resize(size);
    if (size > 0) std::memcpy(out.data(), &bytes_[at_], size);
    at_ += size;
    return true;
  }
  /// A count of items of at least `least` bytes each: one that cannot be there is refused.
  bool count(std::uint64_t& out, std::size_t least) { return varint(out) && out <= left() / least; }

 private:
  std::span<const std::byte> bytes_;
  std::size_t at_ = 0;
};

// ---- Encoding ----

/// What is named often, in its order, by the place there. A tree: ids are chosen by others, who
/// could make hashes collide.
template <typename Item>
class Table {
 public:
  void add(const Item& item) { places_.try_emplace(item, 0); }
  /// Before the first use of at() or items().
  void close() {
    std::uint64_t next = 0;
    for (auto& [item, place] : places_) place = next++;
  }
  std::uint64_t at(const Item& item) const { return places_.find(item)->second; }
  const absl::btree_map<Item, std::uint64_t>& items() const { return places_; }

 private:
  absl::btree_map<Item, std::uint64_t> places_;
};

/// Cells that follow one another and are alike: one window or all buckets, and the same writers.
struct Run {
  std::uint8_t flags = 0;
  std::span<const Cell> cells;
};

std::uint8_t flags_of(const Cell& cell) {
  if (cell.id.is_bucket()) {
    const Checkpoint& checkpoint = cell.bucket.checkpoint;
    bool exact = checkpoint.at == cell.bucket.touched && checkpoint.counted == cell.total();
    return exact ? kBucket | kExact : kBucket;
  }
  bool births = std::any_of(cell.slots.begin(), cell.slots.end(),
                            [](const Slot& slot) { return slot.id.birth != 0; });
  return births ? kBirths : 0;
}

bool alike(const Cell& a, const Cell& b) {
  if (a.id.epoch != b.id.epoch) return false;
  bool bucket = a.id.is_bucket();
  return std::equal(a.slots.begin(), a.slots.end(), b.slots.begin(), b.slots.end(),
                    [bucket](const Slot& x, const Slot& y) {
                      return x.id.writer == y.id.writer && (bucket || x.id.birth == y.id.birth);
                    });
}

std::vector<Run> runs_of(std::span<const Cell> cells) {
  std::vector<Run> runs;
  for (const Cell& cell : cells) {
    std::uint8_t flags = flags_of(cell);
    if (runs.empty() || runs.back().flags != flags || !alike(*(&cell - 1), cell)) {
      runs.push_back({flags, {&cell, 0}});
    }
    Run& run = runs.back();
    run.cells = {run.cells.data(), run.cells.size() + 1};
  }
  return runs;
}

class Encoder {
 public:
  Encoder(const Delta& delta, std::vector<std::byte>& bytes)
      : delta_(delta), runs_(runs_of(delta.cells)), out_(bytes) {
    for (const auto& [writer, member] : delta.members) {
      writers_.add(writer);
      members_.add(member);
    }
    for (const Run& run : runs_) {
      if ((run.flags & kBucket) == 0) epochs_.add(run.cells[0].id.epoch);
      for (const Slot& slot : run.cells[0].slots) writers_.add(slot.id.writer);
    }
    members_.close();
    writers_.close();
    epochs_.close();
  }

  void write() {
    write_tables();
    out_.make_room(kMostOfVarint);
    out_.varint(delta_.cells.size());
    for (const Run& run : runs_) write(run);
  }

 private:
  void write_tables() {
    out_.make_room(1 + kMostOfVarint);
    out_.byte(kCodecVersion);
    out_.varint(members_.items().size());
    for (const auto& [member, place] : members_.items()) {
      out_.text(member.region);
      out_.text(member.node);
    }
    out_.make_room(2 * kMostOfVarint + writers_.items().size() * (16 + kMostOfVarint) +
                   epochs_.items().size() * 2 * kMostOfVarint);
    out_.varint(writers_.items().size());
    for (const auto& [writer, place] : writers_.items()) {
      out_.fixed64(writer.hi);
      out_.fixed64(writer.lo);
      auto member = delta_.members.find(writer);
      out_.varint(member == delta_.members.end() ? 0 : members_.at(member->second) + 1);
    }
    out_.varint(epochs_.items().size());
    for (const auto& [epoch, place] : epochs_.items()) {
      out_.varint(bits(epoch.start));
      out_.varint(bits(epoch.expiry) - bits(epoch.start));
    }
  }

  void write(const Run& run) {
    const Cell& first = run.cells[0];
    out_.make_room(kMostOfRun + first.slots.size() * kMostOfSlot);
    out_.byte(run.flags);
    out_.varint(run.cells.size());
    if ((run.flags & kBucket) == 0) out_.varint(epochs_.at(first.id.epoch));
    out_.varint(first.slots.size());
    for (const Slot& slot : first.slots) {
      out_.varint(writers_.at(slot.id.writer));
      if ((run.flags & kBirths) != 0) out_.varint(slot.id.birth);
    }
    for (const Cell& cell : run.cells) {
      out_.make_room(kMostOfCell + cell.slots.size() * kMostOfSlot);
      out_.fixed64(cell.id.series.hi);
      out_.fixed64(cell.id.series.lo);
      if ((run.flags & kBucket) != 0) write(cell.bucket, run.flags);
      for (const Slot& slot : cell.slots) {
        out_.varint(slot.value);
        if ((run.flags & kBucket) != 0) out_.varint(zigzag(bits(before_.touched) - slot.id.birth));
      }
    }
  }

  void write(const BucketState& bucket, std::uint8_t flags) {
    out_.varint(zigzag(bits(bucket.touched) - bits(before_.touched)));
    out_.varint(zigzag(bits(bucket.expiry) - bits(bucket.touched) -
                       (bits(before_.expiry) - bits(before_.touched))));
    out_.varint(zigzag(bucket.checkpoint.debt - before_.checkpoint.debt));
    if ((flags & kExact) == 0) {
      out_.varint(bucket.checkpoint.counted);
      out_.varint(zigzag(bits(bucket.touched) - bits(bucket.checkpoint.at)));
    }
    before_ = bucket;
  }

  const Delta& delta_;
  std::vector<Run> runs_;
  Writer out_;
  Table<Member> members_;
  Table<Incarnation> writers_;
  Table<Epoch> epochs_;
  BucketState before_;  // of the bucket that was written last
};

// ---- Decoding ----

bool fail(std::string& error, std::string what) {
  error = std::move(what);
  return false;
}

std::string at(const char* what, std::size_t index) {
  return std::string(what) + " " + std::to_string(index);
}

class Decoder {
 public:
  Decoder(ByteReader in, const DeltaBounds& bounds, Delta& out, std::string& error)
      : in_(in), bounds_(bounds), out_(out), error_(error) {}

  bool read() {
    std::uint64_t cells = 0;
    if (!read_members() || !read_writers() || !read_epochs()) return false;
    if (!in_.count(cells, 16)) return fail(error_, "more cells than bytes");
    if (cells > bounds_.cells) return fail(error_, "too many cells in a delta");
    out_.cells.reserve(cells);
    while (out_.cells.size() < cells) {
      if (!read_run(cells - out_.cells.size())) return false;
    }
    return in_.left() == 0 || fail(error_, "bytes behind the last cell");
  }

 private:
  bool read_members() {
    std::uint64_t count = 0;
    if (!in_.count(count, 2)) return fail(error_, "more members than bytes");
    if (count > bounds_.members) return fail(error_, "too many members in a delta");
    members_.resize(count);
    for (std::size_t i = 0; i < count; ++i) {
      if (!in_.text(members_[i].region) || !in_.text(members_[i].node)) {
        return fail(error_, at("member", i) + " has a bad name");
      }
    }
    return true;
  }

  bool read_writers() {
    std::uint64_t count = 0;
    if (!in_.count(count, 17)) return fail(error_, "more writers than bytes");
    if (count > bounds_.writers) return fail(error_, "too many writers in a delta");
    writers_.resize(count);
    for (std::size_t i = 0; i < count; ++i) {
      Incarnation& writer = writers_[i];
      std::uint64_t member = 0;
      if (!in_.fixed64(writer.hi) || !in_.fixed64(writer.lo) || !in_.varint(member)) {
        return fail(error_, at("writer", i) + " is cut off");
      }
      if (!writer) return fail(error_, at("writer", i) + " is no incarnation");
      if (i > 0 && writers_[i - 1] >= writer) return fail(error_, "writers are out of order");
      if (member > members_.size()) {
        return fail(error_, at("writer", i) + " belongs to no listed member");
      }
      if (member > 0) {
        out_.members.emplace_hint(out_.members.end(), writer, members_[member - 1]);
      }
    }
    return true;
  }

  bool read_epochs() {
    std::uint64_t count = 0;
    if (!in_.count(count, 2)) return fail(error_, "more windows than bytes");
    if (count > bounds_.cells) return fail(error_, "too many windows in a delta");
    epochs_.resize(count);
    for (std::size_t i = 0; i < count; ++i) {
      Nanos lifetime = 0;
      if (!in_.nanos(epochs_[i].start) || !in_.nanos(lifetime) || lifetime > kMaxLifetime) {
        return fail(error_, at("window", i) + " is not valid");
      }
      epochs_[i].expiry = epochs_[i].start + lifetime;
    }
    return true;
  }

  /// The cells of a run are at most `most`.
  bool read_run(std::uint64_t most) {
    const auto which = [this] { return "the run of " + at("cell", out_.cells.size()); };
    std::uint8_t flags = 0;
    std::uint64_t cells = 0;
    if (!in_.byte(flags) || !in_.varint(cells)) return fail(error_, which() + " is cut off");
    if ((flags & ~kFlags) != 0) return fail(error_, which() + " has flags that are not known");
    const bool bucket = (flags & kBucket) != 0;
    if (cells == 0 || cells > most) {
      return fail(error_,
                  which() + " has " + std::to_string(cells) + " cells of " + std::to_string(most));
    }
    Epoch epoch = kBucketEpoch;
    if (!bucket) {
      std::uint64_t place = 0;
      if (!in_.varint(place) || place >= epochs_.size()) {
        return fail(error_, which() + " has no listed window");
      }
      epoch = epochs_[place];
    }
    std::uint64_t slots = 0;
    if (!in_.count(slots, 1)) return fail(error_, which() + " has more slots than bytes");
    const std::size_t least = bucket ? 19 + slots * 2 : 16 + slots;
    if (cells > in_.left() / least) return fail(error_, which() + " has more cells than bytes");
    if (slots > (bounds_.slots - slots_read_) / cells) {
      return fail(error_, "too many slots in a delta");
    }
    slots_read_ += slots * cells;
    slots_.resize(slots);
    if (!read_slots(flags)) return fail(error_, which() + " has slots without a listed writer");
    for (; cells > 0; --cells) {
      Cell& cell = out_.cells.emplace_back();
      cell.id.epoch = epoch;
      if (!read_cell(cell, flags)) {
        return fail(error_, at("cell", out_.cells.size() - 1) + " is not valid");
      }
    }
    return true;
  }

  /// What all cells of a run have of their slots.
  bool read_slots(std::uint8_t flags) {
    for (SlotId& slot : slots_) {
      std::uint64_t writer = 0;
      if (!in_.varint(writer) || writer >= writers_.size()) return false;
      slot = {writers_[writer], 0};
      if ((flags & kBirths) != 0 && !in_.varint(slot.birth)) return false;
    }
    return true;
  }

  bool read_cell(Cell& cell, std::uint8_t flags) {
    if (!in_.fixed64(cell.id.series.hi) || !in_.fixed64(cell.id.series.lo)) return false;
    const bool bucket = (flags & kBucket) != 0;
    if (bucket && !read_bucket(cell.bucket, flags)) return false;
    cell.slots.resize(slots_.size());
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      Slot& slot = cell.slots[i];
      slot.id = slots_[i];
      std::uint64_t age = 0;
      if (!in_.varint(slot.value) || (bucket && !in_.varint(age))) return false;
      if (bucket) slot.id.birth = bits(cell.bucket.touched) - unzigzag(age);
    }
    if ((flags & kExact) != 0) cell.bucket.checkpoint.counted = cell.total();
    if (bucket) before_ = cell.bucket;
    return valid(cell);
  }

  /// With kExact all but what the checkpoint counts, which the slots say.
  bool read_bucket(BucketState& bucket, std::uint8_t flags) {
    std::uint64_t later = 0;
    std::uint64_t longer = 0;
    DebtTicks more = 0;
    if (!in_.varint(later) || !in_.varint(longer) || !in_.varint(more)) return false;
    std::uint64_t touched = bits(before_.touched) + unzigzag(later);
    std::uint64_t span = bits(before_.expiry) - bits(before_.touched) + unzigzag(longer);
    bucket.touched = static_cast<Nanos>(touched);
    bucket.expiry = static_cast<Nanos>(touched + span);
    bucket.checkpoint.debt = before_.checkpoint.debt + unzigzag(more);
    bucket.checkpoint.at = bucket.touched;
    if ((flags & kExact) != 0) return true;
    std::uint64_t age = 0;
    if (!in_.varint(bucket.checkpoint.counted) || !in_.varint(age)) return false;
    bucket.checkpoint.at = static_cast<Nanos>(touched - unzigzag(age));
    return true;
  }

  ByteReader in_;
  const DeltaBounds& bounds_;
  Delta& out_;
  std::string& error_;
  std::vector<Member> members_;
  std::vector<Incarnation> writers_;
  std::vector<Epoch> epochs_;
  std::vector<SlotId> slots_;  // of the run
  std::size_t slots_read_ = 0;
  BucketState before_;  // of the bucket that was read last
};

// Version 1: every cell on its own.

bool read_rows_bucket(ByteReader& in, BucketState& bucket) {
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

bool read_rows_cell(ByteReader& in, const std::vector<Incarnation>& writers, Cell& cell) {
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
    if (!read_rows_bucket(in, cell.bucket)) return false;
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
  return valid(cell);
}

bool read_rows(ByteReader in, Delta& out, std::string& error) {
  std::uint64_t count = 0;
  if (!in.count(count, 17)) return fail(error, "more writers than bytes");
  std::vector<Incarnation> writers(count);
  for (std::size_t i = 0; i < writers.size(); ++i) {
    std::uint8_t named = 0;
    if (!in.fixed64(writers[i].hi) || !in.fixed64(writers[i].lo) || !in.byte(named) || named > 1) {
      return fail(error, at("writer", i) + " is not valid");
    }
    if (i > 0 && writers[i - 1] >= writers[i]) return fail(error, "writers are out of order");
    if (named == 0) continue;
    Member member;
    if (!in.text(member.region) || !in.text(member.node)) {
      return fail(error, at("writer", i) + " has a bad name");
    }
    out.members.emplace(writers[i], std::move(member));
  }
  if (!in.count(count, 20)) return fail(error, "more cells than bytes");
  out.cells.resize(count);
  for (std::size_t i = 0; i < out.cells.size(); ++i) {
    if (!read_rows_cell(in, writers, out.cells[i])) {
      return fail(error, at("cell", i) + " is not valid");
    }
  }
  return in.left() == 0 || fail(error, "bytes behind the last cell");
}

}  // namespace

void encode(const Delta& delta, std::vector<std::byte>& out) {
  Encoder(delta, out).write();
}

bool decode(std::span<const std::byte> bytes, const DeltaBounds& bounds, Delta& out,
            std::string& error) {
  out = Delta{};
  if (bytes.size() > kMaxEncodedDelta) return fail(error, "delta larger than 64 MiB");
  ByteReader in(bytes);
  std::uint8_t version = 0;
  if (!in.byte(version)) return fail(error, "empty delta");
  if (version != kCodecVersion) {
    return fail(error, "delta of version " + std::to_string(version) + ", expected " +
                           std::to_string(kCodecVersion));
  }
  return Decoder(in, bounds, out, error).read();
}

bool decode(std::span<const std::byte> bytes, Delta& out, std::string& error) {
  if (bytes.empty() || std::to_integer<std::uint8_t>(bytes[0]) != kRowsVersion) {
    return decode(bytes, DeltaBounds{}, out, error);
  }
  out = Delta{};
  if (bytes.size() > kMaxEncodedDelta) return fail(error, "delta larger than 64 MiB");
  return read_rows(ByteReader(bytes.subspan(1)), out, error);
}

}  // namespace weir::crdt
