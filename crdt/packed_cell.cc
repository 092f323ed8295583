#include <weir/crdt/packed_cell.h>

#include <cstring>

namespace weir::crdt {
namespace {

// Flags.
constexpr std::uint8_t kBucket = kPackedBucket;
/// Windows: start and lifetime are whole seconds.
constexpr std::uint8_t kSeconds = 2;
/// Windows: all births are 0.
constexpr std::uint8_t kPlain = 4;
/// Buckets: the checkpoint counts all slots, and is of the last touch. So it is with one writer.
constexpr std::uint8_t kExact = 8;
/// One slot: no count of them.
constexpr std::uint8_t kOne = 16;

/// Most bytes of a slot, and of all that stands before the slots.
constexpr std::size_t kMostOfSlot = 6 + 10 + 10;
constexpr std::size_t kMostOfState = 8 + 10 + 19 + 10 + 10 + 10;

template <typename Value>
void put(std::byte*& out, Value value) {
  while (value >= 0x80) {
    *out++ = static_cast<std::byte>(static_cast<std::uint8_t>(value) | 0x80u);
    value >>= 7;
  }
  *out++ = static_cast<std::byte>(value);
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

void put_epoch(const Epoch& epoch, bool seconds, std::byte*& out) {
  Nanos unit = seconds ? kSecond : 1;
  put(out, bits(epoch.start / unit));
  put(out, bits((epoch.expiry - epoch.start) / unit));
}

Epoch get_epoch(const std::byte*& at, std::uint8_t flags) {
  Nanos unit = (flags & kSeconds) != 0 ? kSecond : 1;
  auto start = static_cast<Nanos>(get(at)) * unit;
  return {start, start + static_cast<Nanos>(get(at)) * unit};
}

void put_bucket(const BucketState& bucket, bool exact, std::byte*& out) {
  std::memcpy(out, &bucket.touched, sizeof bucket.touched);
  out += sizeof bucket.touched;
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

std::uint8_t pack(const HeldCell& held, Writers& writers, std::vector<std::byte>& out) {
  const Cell& cell = held.cell;
  std::uint8_t flags = flags_of(cell);
  bool bucket = (flags & kBucket) != 0;
  out.resize(kMostOfState + cell.slots.size() * kMostOfSlot);
  std::byte* at = out.data();
  if (bucket) {
    put_bucket(cell.bucket, (flags & kExact) != 0, at);
  } else {
    put_epoch(cell.id.epoch, (flags & kSeconds) != 0, at);
  }
  if ((flags & kOne) == 0) put(at, cell.slots.size());
  for (const Slot& slot : cell.slots) {
    std::uint64_t number = writers.number_of(slot.id.writer);
    if (bucket) {
      put(at, number << 1 | (slot.id == held.own ? 1u : 0u));
      put(at, zigzag(bits(cell.bucket.touched) - slot.id.birth));
    } else {
      put(at, number);
      if ((flags & kPlain) == 0) put(at, slot.id.birth);
    }
    put(at, slot.value);
  }
  out.resize(static_cast<std::size_t>(at - out.data()));
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

}  // namespace weir::crdt
