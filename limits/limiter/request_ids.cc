#include <weir/limits/limiter/request_ids.h>

#include <algorithm>
#include <array>
#include <bit>
#include <string>

namespace weir {
namespace {

constexpr std::size_t kMaxShards = 64;
constexpr std::size_t kIdsPerShard = 4096;

std::size_t shards_for(std::size_t max_ids) {
  return std::bit_floor(std::clamp<std::size_t>(max_ids / kIdsPerShard, 1, kMaxShards));
}

}  // namespace

RequestIds::RequestIds(const HashKey& key, std::size_t max_ids, Nanos ttl)
    : hash_(key),
      shards_count_(shards_for(max_ids)),
      room_(max_ids / shards_count_),
      ttl_(ttl),
      shards_(std::make_unique<Shard[]>(shards_count_)) {}

crdt::SeriesId RequestIds::hash_of(std::string_view domain, std::string_view id) const {
  thread_local std::string text;
  auto length = static_cast<std::uint64_t>(domain.size());
  text.assign(reinterpret_cast<const char*>(&length), sizeof length);
  text.append(domain);
  text.append(id);
  std::array<std::uint64_t, 2> hash = hash_(text);
  return {hash[0], hash[1]};
}

const RequestIds::Answer* RequestIds::find(Shard& shard, const crdt::SeriesId& hash, Nanos now) {
  auto found = shard.by_hash.find(hash);
  if (found == shard.by_hash.end()) return nullptr;
  if (found->second->until <= now) {
    forget(shard, found->second);
    return nullptr;
  }
  repeated_.fetch_add(1, std::memory_order_relaxed);
  return &found->second->answer;
}

void RequestIds::forget(std::string_view domain, std::string_view id) {
  crdt::SeriesId hash = hash_of(domain, id);
  Shard& shard = shards_[hash.hi & (shards_count_ - 1)];
  std::lock_guard lock(shard.mutex);
  auto found = shard.by_hash.find(hash);
  if (found != shard.by_hash.end()) forget(shard, found->second);
}

void RequestIds::remember(Shard& shard, const crdt::SeriesId& hash, const Answer& answer,
                          Nanos now) {
  if (room_ == 0) return;
  if (shard.order.size() >= room_) {
    if (shard.order.front().until > now) evicted_.fetch_add(1, std::memory_order_relaxed);
    forget(shard, shard.order.begin());
  }
  auto kept = shard.order.insert(shard.order.end(), {hash, now + ttl_, answer});
  shard.by_hash.emplace(hash, kept);
  size_.fetch_add(1, std::memory_order_relaxed);
}

void RequestIds::forget(Shard& shard, Order::iterator kept) {
  shard.by_hash.erase(kept->hash);
  shard.order.erase(kept);
  size_.fetch_sub(1, std::memory_order_relaxed);
}

void RequestIds::expire(Nanos now) {
  if (size() == 0) return;
  for (std::size_t i = 0; i < shards_count_; ++i) {
    Shard& shard = shards_[i];
    std::lock_guard lock(shard.mutex);
    while (!shard.order.empty() && shard.order.front().until <= now) {
      forget(shard, shard.order.begin());
    }
  }
}

}  // namespace weir
