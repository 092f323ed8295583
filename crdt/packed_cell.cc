#include <weir/crdt/packed_cell.h>

#include <algorithm>
#include <bit>
#include <cstring>

namespace weir::crdt {
namespace {

// Flags.
constexpr std::uint8_t kBucket = kPackedBucket;
/// Windows: start and lifetime are whole seconds. Buckets: all births are.
constexpr std::uint8_t kSeconds = 2;
/// Windows: all births are 0. Buckets: there is one slot, this incarnation's, whose number is 0.
constexpr std::uint8_t kPlain = 4;
/// Buckets: the checkpoint counts all slots, and is of the last touch. So it is with one writer.
constexpr std::uint8_t kExact = 8;
/// One slot: no count of them.
constexpr std::uint8_t kOne = 16;
/// Buckets: bytes of the checkpoint's debt; at kLongDebt it is a variable-length integer.
constexpr unsigned kDebtShift = 5;
constexpr std::uint8_t kLongDebt = 7;

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

/// In so many bytes, of which the first is the lowest.
void put_low(std::byte*& out, std::uint64_t value, unsigned bytes) {
  for (unsigned i = 0; i < bytes; ++i) *out++ = static_cast<std::byte>(value >> 8 * i & 0xFF);
}

std::uint64_t get_low(const std::byte*& at, unsigned bytes) {
  std::uint64_t value = 0;
  for (unsigned i = 0; i < bytes; ++i) value |= static_cast<std::uint64_t>(*at++) << 8 * i;
  return value;
}

/// What stands beside the stamp.
std::uint8_t flags_in(const PackedHead& head) {
  return static_cast<std::uint8_t>(head.word);
}
std::uint8_t lifetime_in(const PackedHead& head) {
  return static_cast<std::uint8_t>(head.word >> 8);
}

/// The lifetime, unless it has a number.
void put_lifetime(std::uint8_t number, Nanos lifetime, std::byte*& out) {
  if (number == Lifetimes::kNone) put(out, bits(lifetime));
}

Nanos get_lifetime(std::uint8_t number, const Lifetimes& lifetimes, const std::byte*& at) {
  return number == Lifetimes::kNone ? static_cast<Nanos>(get(at)) : lifetimes.lifetime(number);
}

Epoch get_epoch(const std::byte*& at, const PackedHead& head, const Lifetimes& lifetimes) {
  Nanos unit = (flags_in(head) & kSeconds) != 0 ? kSecond : 1;
  auto start = static_cast<Nanos>(get(at)) * unit;
  return {start, start + get_lifetime(lifetime_in(head), lifetimes, at)};
}

void put_bucket(const BucketState& bucket, std::uint8_t flags, std::uint8_t lifetime,
                std::byte*& out) {
  std::memcpy(out, &bucket.touched, sizeof bucket.touched);
  out += sizeof bucket.touched;
  put_lifetime(lifetime, bucket.expiry - bucket.touched, out);
  const unsigned debt_bytes = flags >> kDebtShift;
  if (debt_bytes == kLongDebt) {
    put(out, bucket.checkpoint.debt);
  } else {
    put_low(out, static_cast<std::uint64_t>(bucket.checkpoint.debt), debt_bytes);
  }
  if ((flags & kExact) != 0) return;
  put(out, bucket.checkpoint.counted);
  put(out, zigzag(bits(bucket.touched) - bits(bucket.checkpoint.at)));
}

/// With kExact all but what the checkpoint counts, which the slots say.
BucketState get_bucket(const std::byte*& at, const PackedHead& head, const Lifetimes& lifetimes) {
  const std::uint8_t flags = flags_in(head);
  BucketState bucket;
  std::memcpy(&bucket.touched, at, sizeof bucket.touched);
  at += sizeof bucket.touched;
  bucket.expiry = bucket.touched + get_lifetime(lifetime_in(head), lifetimes, at);
  const unsigned debt_bytes = flags >> kDebtShift;
  bucket.checkpoint.debt =
      debt_bytes == kLongDebt ? get<Uint128>(at) : DebtTicks{get_low(at, debt_bytes)};
  bucket.checkpoint.at = bucket.touched;
  if ((flags & kExact) != 0) return bucket;
  bucket.checkpoint.counted = get(at);
  bucket.checkpoint.at = static_cast<Nanos>(bits(bucket.touched) - unzigzag(get(at)));
  return bucket;
}

std::uint8_t flags_of_bucket(const HeldCell& held, Writers& writers) {
  const Cell& cell = held.cell;
  const Checkpoint& checkpoint = cell.bucket.checkpoint;
  const bool one = cell.slots.size() == 1;
  const auto whole = [](const Slot& slot) { return slot.id.birth % bits(kSecond) == 0; };
  unsigned flags = kBucket | (one ? kOne : 0);
  if (checkpoint.counted == cell.total() && checkpoint.at == cell.bucket.touched) flags |= kExact;
  if (std::all_of(cell.slots.begin(), cell.slots.end(), whole)) flags |= kSeconds;
  if (one && cell.slots[0].id == held.own && writers.number_of(held.own.writer) == 0)
    flags |= kPlain;
  const auto low = static_cast<std::uint64_t>(checkpoint.debt);
  const unsigned debt_bytes = (static_cast<unsigned>(std::bit_width(low)) + 7) / 8;
  const bool longer = checkpoint.debt != low || debt_bytes >= kLongDebt;
  return static_cast<std::uint8_t>(flags | (longer ? kLongDebt : debt_bytes) << kDebtShift);
}

std::uint8_t flags_of(const Cell& cell) {
  std::uint8_t flags = cell.slots.size() == 1 ? kOne : 0;
  const Epoch& epoch = cell.id.epoch;
  if (epoch.start % kSecond == 0 && epoch.expiry % kSecond == 0) flags |= kSeconds;
  for (const Slot& slot : cell.slots) {
    if (slot.id.birth != 0) return flags;
  }
  return flags | kPlain;
}

}  // namespace

std::uint16_t pack(const HeldCell& held, Writers& writers, Lifetimes& lifetimes,
                   std::vector<std::byte>& out) {
  const Cell& cell = held.cell;
  const bool bucket = cell.id.is_bucket();
  const std::uint8_t flags = bucket ? flags_of_bucket(held, writers) : flags_of(cell);
  const bool seconds = (flags & kSeconds) != 0;
  const bool plain = (flags & kPlain) != 0;
  out.resize(kMostOfState + cell.slots.size() * kMostOfSlot);
  std::byte* at = out.data();
  std::uint8_t lifetime = 0;
  if (bucket) {
    lifetime = lifetimes.number_of(cell.bucket.expiry - cell.bucket.touched);
    put_bucket(cell.bucket, flags, lifetime, at);
  } else {
    const Epoch& epoch = cell.id.epoch;
    lifetime = lifetimes.number_of(epoch.expiry - epoch.start);
    put(at, bits(epoch.start / (seconds ? kSecond : 1)));
    put_lifetime(lifetime, epoch.expiry - epoch.start, at);
  }
  if ((flags & kOne) == 0) put(at, cell.slots.size());
  for (const Slot& slot : cell.slots) {
    if (!bucket) {
      put(at, writers.number_of(slot.id.writer));
      if (!plain) put(at, slot.id.birth);
    } else {
      if (!plain) {
        const std::uint64_t number = writers.number_of(slot.id.writer);
        put(at, number << 1 | (slot.id == held.own ? 1u : 0u));
      }
      const std::uint64_t unit = seconds ? bits(kSecond) : 1;
      put(at, zigzag(bits(cell.bucket.touched) / unit - slot.id.birth / unit));
    }
    put(at, slot.value);
  }
  out.resize(static_cast<std::size_t>(at - out.data()));
  return static_cast<std::uint16_t>(lifetime << 8 | flags);
}

void unpack(const std::byte* record, const Writers& writers, const Lifetimes& lifetimes,
            HeldCell& out) {
  const PackedHead& head = head_of(record);
  const std::uint8_t flags = flags_in(head);
  const bool plain = (flags & kPlain) != 0;
  Cell& cell = out.cell;
  cell.id.series = head.series;
  out.own = {};
  bool bucket = (flags & kBucket) != 0;
  const std::byte* at = record + (bucket ? kBucketHead : kWindowHead);
  if (bucket) {
    cell.id.epoch = kBucketEpoch;
    cell.bucket = get_bucket(at, head, lifetimes);
  } else {
    cell.id.epoch = get_epoch(at, head, lifetimes);
    cell.bucket = {};
  }
  std::size_t count = (flags & kOne) != 0 ? 1 : get(at);
  cell.slots.resize(count);
  for (Slot& slot : cell.slots) {
    if (bucket) {
      const std::uint64_t number = plain ? 1 : get(at);
      const std::uint64_t unit = (flags & kSeconds) != 0 ? bits(kSecond) : 1;
      slot.id.birth = (bits(cell.bucket.touched) / unit - unzigzag(get(at))) * unit;
      slot.id.writer = writers.incarnation(static_cast<std::uint32_t>(number >> 1));
      if ((number & 1) != 0) out.own = slot.id;
    } else {
      slot.id.writer = writers.incarnation(static_cast<std::uint32_t>(get(at)));
      slot.id.birth = plain ? 0 : get(at);
    }
    slot.value = get(at);
  }
  if ((flags & kExact) != 0) cell.bucket.checkpoint.counted = cell.total();
}

CellId packed_id(const std::byte* record, const Lifetimes& lifetimes) {
  const PackedHead& head = head_of(record);
  if ((flags_in(head) & kBucket) != 0) return {head.series, kBucketEpoch};
  const std::byte* at = record + kWindowHead;
  return {head.series, get_epoch(at, head, lifetimes)};
}

}  // namespace weir::crdt
