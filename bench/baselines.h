#pragma once

// What the limiter is measured against, in the same program. Every one has
//   bool check(const Key16& key, Nanos now)
// and none does what weir does besides: no rules, no epochs, no totals for replication, no
// statuses.

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <span>
#include <unordered_map>

#include <weir/bench/keys.h>
#include <weir/crdt/time.h>

#ifdef WEIR_BENCH_ABSL
#include <absl/container/flat_hash_map.h>
#endif
#ifdef WEIR_BENCH_TBB
#include <tbb/concurrent_hash_map.h>
#endif

namespace weir::bench {

/// The floor: hash, find, read a counter. A flat table of 32-byte slots (two a cache line), sized
/// beforehand to at most 3/4 full, linear probing, no lock. One thread writes, then any may read.
class BareTable {
 public:
  /// `huge`: asks for 2 MiB pages, without which most of a random read is the page walk.
  BareTable(std::uint64_t keys, bool huge)
      : mask_(std::bit_ceil(keys + keys / 3 + 1) - 1), bytes_((mask_ + 1) * sizeof(Slot)) {
    bytes_ = (bytes_ + kHuge - 1) / kHuge * kHuge;
    void* memory = mmap(nullptr, bytes_ + kHuge, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    mapped_ = memory;
    auto address = (reinterpret_cast<std::uintptr_t>(memory) + kHuge - 1) / kHuge * kHuge;
    slots_ = reinterpret_cast<Slot*>(address);
    madvise(slots_, bytes_, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  }
  ~BareTable() { munmap(mapped_, bytes_ + kHuge); }
  BareTable(const BareTable&) = delete;
  BareTable& operator=(const BareTable&) = delete;

  void insert(const Key16& key) {
    Slot* slot = probe(key, hash_of(key));
    slot->key = key;
    ++slot->count;
  }
  bool check(const Key16& key, Nanos) const { return probe(key, hash_of(key))->count > 0; }
  /// At most 16 keys: all hashed and fetched, then all found. Returns how many counters are not 0.
  unsigned check_batch(std::span<const Key16> keys) const {
    std::array<std::uint64_t, 16> hashes;
    for (std::size_t i = 0; i < keys.size(); ++i) {
      hashes[i] = hash_of(keys[i]);
      __builtin_prefetch(&slots_[hashes[i] & mask_]);
    }
    unsigned found = 0;
    for (std::size_t i = 0; i < keys.size(); ++i) found += probe(keys[i], hashes[i])->count > 0;
    return found;
  }

 private:
  static constexpr std::uint64_t kHuge = 2u << 20;
  struct alignas(32) Slot {
    Key16 key;
    std::uint64_t count = 0;
  };
  Slot* probe(const Key16& key, std::uint64_t hash) const {
    std::uint64_t at = hash & mask_;
    while (slots_[at].key != key && slots_[at].count != 0) at = (at + 1) & mask_;
    return &slots_[at];
  }
  std::uint64_t mask_;
  std::uint64_t bytes_;
  void* mapped_ = nullptr;
  Slot* slots_ = nullptr;
};

/// The usual token bucket in floating point: `kCapacity` tokens, refilled over a minute.
struct TokenBucket {
  static constexpr double kCapacity = 1e9;
  double tokens = kCapacity;
  Nanos last = 0;
  bool take(Nanos now) {
    double refill = static_cast<double>(now - last) * (kCapacity / 60e9);
    tokens = std::min(kCapacity, tokens + refill);
    last = now;
    if (tokens < 1) return false;
    tokens -= 1;
    return true;
  }
};

class SpinLock {
 public:
  void lock() {
    while (taken_.exchange(true, std::memory_order_acquire)) {
      while (taken_.load(std::memory_order_relaxed)) __builtin_ia32_pause();
    }
  }
  void unlock() { taken_.store(false, std::memory_order_release); }

 private:
  std::atomic<bool> taken_{false};
};

/// A map in 64 shards with a lock each, all reserved beforehand.
template <typename Map, typename Lock>
class Sharded {
 public:
  explicit Sharded(std::uint64_t keys) {
    for (Shard& shard : shards_) shard.map.reserve(keys / kShards + keys / (kShards * 16) + 64);
  }
  bool check(const Key16& key, Nanos now) {
    // The high bits: the map uses the low ones.
    Shard& shard = shards_[hash_of(key) >> 58];
    std::lock_guard lock(shard.lock);
    return shard.map.try_emplace(key).first->second.take(now);
  }

 private:
  static constexpr std::size_t kShards = 64;
  struct alignas(64) Shard {
    Lock lock;
    Map map;
  };
  std::array<Shard, kShards> shards_;
};

using StdBuckets = Sharded<std::unordered_map<Key16, TokenBucket, KeyHash>, std::mutex>;
#ifdef WEIR_BENCH_ABSL
using AbslBuckets = Sharded<absl::flat_hash_map<Key16, TokenBucket, KeyHash>, SpinLock>;
#endif

#ifdef WEIR_BENCH_TBB
class TbbBuckets {
 public:
  explicit TbbBuckets(std::uint64_t keys) : map_(keys) {}
  bool check(const Key16& key, Nanos now) {
    Map::accessor at;
    map_.insert(at, key);
    return at->second.take(now);
  }

 private:
  struct Compare {
    static std::size_t hash(const Key16& key) { return hash_of(key); }
    static bool equal(const Key16& a, const Key16& b) { return a == b; }
  };
  using Map = tbb::concurrent_hash_map<Key16, TokenBucket, Compare>;
  Map map_;
};
#endif

/// One bucket as one atomic: the theoretical arrival time of GCRA, in ns. The floor of a hot key.
class AtomicGcra {
 public:
  AtomicGcra(Nanos interval, Nanos tolerance) : interval_(interval), tolerance_(tolerance) {}
  bool check(Nanos now) {
    Nanos arrival = arrival_.load(std::memory_order_relaxed);
    for (;;) {
      Nanos start = std::max(arrival, now);
      if (start - now > tolerance_) return false;
      if (arrival_.compare_exchange_weak(arrival, start + interval_, std::memory_order_relaxed)) {
        return true;
      }
    }
  }

 private:
  Nanos interval_;
  Nanos tolerance_;
  alignas(64) std::atomic<Nanos> arrival_{0};
};

}  // namespace weir::bench
