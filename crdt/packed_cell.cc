#include <weir/crdt/packed_cell.h>

#include <cstring>

namespace weir::crdt {
namespace {

// Flags.
constexpr std::uint8_t kBucket = 1;
/// Windows: start and lifetime are whole seconds.
constexpr std::uint8_t kSeconds = 2;
/// Windows: all births are 0.
constexpr std::uint8_t kPlain = 4;
/// Buckets: the checkpoint counts all slots, and is of the last touch. So it is with one writer.
constexpr std::uint8_t kExact = 8;
/// One slot: no count of them.
constexpr std::uint8_t kOne = 16;

void put(std::vector<std::byte>& out, Uint128 value) {
  while (value >= 0x80) {
    out.push_back(static_cast<std::byte>(static_cast<std::uint8_t>(value) | 0x80u));
    value >>= 7;
  }
  out.push_back(static_cast<std::byte>(value));
}
void put(std::vector<std::byte>& out, std::uint64_t value) {
  while (value >= 0x80) {
    out.push_back(static_cast<std::byte>(static_cast<std::uint8_t>(value) | 0x80u));
    value >>= 7;
  }
  out.push_back(static_cast<std::byte>(value));
}

template <typename Value = std::uint64_t>
Value get(const std::byte*& at) {
  Value value = 0;
  for (unsigned shift = 0;; shift += 7) {
    auto byte = static_cast<std::uint8_t>(*at++);
    value |= static_cast<Value>(byte & 0x7Fu) << shift;
    if (byte < 0x80) return value;
  }
}

/// Small for small differences of either sign; wraps.
std::uint64_t zigzag(std::uint64_t difference) {
  return difference << 1 ^ (0 - (difference >> 63));
}
std::uint64_t unzigzag(std::uint64_t coded) {
  return coded >> 1 ^ (0 - (coded & 1));
}

std::uint64_t bits(Nanos time) {
  return static_cast<std::uint64_t>(time);
}

void put_epoch(const Epoch& epoch, bool seconds, std::vector<std::byte>& out) {
  Nanos unit = seconds ? kSecond : 1;
  put(out, bits(epoch.start / unit));
  put(out, bits((epoch.expiry - epoch.start) / unit));
}

Epoch get_epoch(const std::byte*& at, std::uint8_t flags) {
  Nanos unit = (flags & kSeconds) != 0 ? kSecond : 1;
  auto start = static_cast<Nanos>(get(at)) * unit;
  return {start, start + static_cast<Nanos>(get(at)) * unit};
}

void put_bucket(const BucketState& bucket, bool exact, std::vector<std::byte>& out) {
  std::size_t size = out.size();
  out.resize(size + sizeof bucket.touched);
  std::memcpy(out.data() + size, &bucket.touched, sizeof bucket.touched);
  put(out, bits(bucket.expiry) - bits(bucket.touched));
  put(out, bucket.checkpoint.debt);
  if (exact) return;
  put(out, bucket.checkpoint.counted);
  put(out, zigzag(bits(bucket.touched) - bits(bucket.checkpoint.at)));
}

/// With kExact all but what the checkpoint counts, which the slots say.
BucketState get_bucket(const std::byte*& at, std::uint8_t flags) {
  BucketState bucket;
  std::memcpy(&bucket.touched, at, sizeof bucket.touched);
  at += sizeof bucket.touched;
  bucket.expiry = static_cast<Nanos>(bits(bucket.touched) + get(at));
  bucket.checkpoint.debt = get<Uint128>(at);
  bucket.checkpoint.at = bucket.touched;
  if ((flags & kExact) != 0) return bucket;
  bucket.checkpoint.counted = get(at);
  bucket.checkpoint.at = static_cast<Nanos>(bits(bucket.touched) - unzigzag(get(at)));
  return bucket;
}

std::uint8_t flags_of(const Cell& cell) {
  std::uint8_t flags = cell.slots.size() == 1 ? kOne : 0;
  if (cell.id.is_bucket()) {
    const Checkpoint& checkpoint = cell.bucket.checkpoint;
    bool exact = checkpoint.counted == cell.total() && checkpoint.at == cell.bucket.touched;
    return static_cast<std::uint8_t>(flags | kBucket | (exact ? kExact : 0));
  }
  const Epoch& epoch = cell.id.epoch;
  if (epoch.start % kSecond == 0 && epoch.expiry % kSecond == 0) flags |= kSeconds;
  for (const Slot& slot : cell.slots) {
    if (slot.id.birth != 0) return flags;
  }
  return flags | kPlain;
}

}  // namespace

PackedHead& head_of(std::byte* record) {
  return *reinterpret_cast<PackedHead*>(record);
}
const PackedHead& head_of(const std::byte* record) {
  return *reinterpret_cast<const PackedHead*>(record);
}
bool is_packed_bucket(const std::byte* record) {
  return (head_of(record).word & kBucket) != 0;
}
std::uint64_t packed_stamp(const std::byte* record) {
  return head_of(record).word >> 8;
}
void set_packed_stamp(std::byte* record, std::uint64_t stamp) {
  PackedHead& head = head_of(record);
  head.word = stamp << 8 | (head.word & 0xFF);
}

std::uint8_t pack(const HeldCell& held, Writers& writers, std::vector<std::byte>& out) {
  const Cell& cell = held.cell;
  std::uint8_t flags = flags_of(cell);
  bool bucket = (flags & kBucket) != 0;
  out.clear();
  if (bucket) {
    put_bucket(cell.bucket, (flags & kExact) != 0, out);
  } else {
    put_epoch(cell.id.epoch, (flags & kSeconds) != 0, out);
  }
  if ((flags & kOne) == 0) put(out, static_cast<std::uint64_t>(cell.slots.size()));
  for (const Slot& slot : cell.slots) {
    std::uint64_t number = writers.number_of(slot.id.writer);
    if (bucket) {
      put(out, number << 1 | (slot.id == held.own ? 1u : 0u));
      put(out, zigzag(bits(cell.bucket.touched) - slot.id.birth));
    } else {
      put(out, number);
      if ((flags & kPlain) == 0) put(out, slot.id.birth);
    }
    put(out, slot.value);
  }
  return flags;
}

void unpack(const std::byte* record, const Writers& writers, HeldCell& out) {
  const PackedHead& head = head_of(record);
  auto flags = static_cast<std::uint8_t>(head.word);
  Cell& cell = out.cell;
  cell.id.series = head.series;
  out.own = {};
  bool bucket = (flags & kBucket) != 0;
  const std::byte* at = record + (bucket ? kBucketHead : kWindowHead);
  if (bucket) {
    cell.id.epoch = kBucketEpoch;
    cell.bucket = get_bucket(at, flags);
  } else {
    cell.id.epoch = get_epoch(at, flags);
    cell.bucket = {};
  }
  std::size_t count = (flags & kOne) != 0 ? 1 : get(at);
  cell.slots.resize(count);
  for (Slot& slot : cell.slots) {
    std::uint64_t number = get(at);
    if (bucket) {
      slot.id.birth = bits(cell.bucket.touched) - unzigzag(get(at));
      slot.id.writer = writers.incarnation(static_cast<std::uint32_t>(number >> 1));
      if ((number & 1) != 0) out.own = slot.id;
    } else {
      slot.id.birth = (flags & kPlain) != 0 ? 0 : get(at);
      slot.id.writer = writers.incarnation(static_cast<std::uint32_t>(number));
    }
    slot.value = get(at);
  }
  if ((flags & kExact) != 0) cell.bucket.checkpoint.counted = cell.total();
}

CellId packed_id(const std::byte* record) {
  const PackedHead& head = head_of(record);
  auto flags = static_cast<std::uint8_t>(head.word);
  if ((flags & kBucket) != 0) return {head.series, kBucketEpoch};
  const std::byte* at = record + kWindowHead;
  return {head.series, get_epoch(at, flags)};
}

bool is_packed(const std::byte* record, const CellId& id) {
  const PackedHead& head = head_of(record);
  return head.series == id.series && packed_id(record).epoch == id.epoch;
}

}  // namespace weir::crdt
