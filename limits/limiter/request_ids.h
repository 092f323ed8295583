#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <string_view>
#include <unordered_map>

#include <weir/crdt/ids.h>
#include <weir/crdt/time.h>
#include <weir/limits/decision.h>
#include <weir/limits/limiter.h>
#include <weir/limits/series/keyed_hash.h>

namespace weir {

/// The requests that passed lately, by their ids, with their answers: so that a request that comes
/// again gets the same answer and consumes nothing.
///
/// An id is kept as a keyed 128-bit hash (SipHash-2-4, as series ids are) of domain and id. The
/// oldest go first, when their time is over or when the table is full; asking for one again does
/// not make it younger. Thread-safe. Ids are spread over shards with a lock and a share of the room
/// each; a table for less than 8192 ids has one shard, and is exact in what "oldest" means.
class RequestIds {
 public:
  struct Answer {
    Decision decision;
    Ticket ticket;
    std::shared_ptr<const RuleSet> rules = nullptr;  ///< that `decision` speaks of
  };

  /// Remembers at most `max_ids` (0: none), each for `ttl`.
  RequestIds(const HashKey& key, std::size_t max_ids, Nanos ttl);

  /// Calls `decide(known)` and holds the lock of the id's shard meanwhile: of two requests with one
  /// id, the second is decided when the first is done. `known` is what was remembered, or null.
  /// What `decide` returns (a pointer to an Answer, which is copied, or null) is remembered from
  /// `now` on, unless the id is known already.
  template <typename Decide>
  void once(std::string_view domain, std::string_view id, Nanos now, Decide decide) {
    crdt::SeriesId hash = hash_of(domain, id);
    Shard& shard = shards_[hash.hi & (shards_count_ - 1)];
    std::lock_guard lock(shard.mutex);
    const Answer* known = find(shard, hash, now);
    const Answer* fresh = decide(known);
    if (known == nullptr && fresh != nullptr) remember(shard, hash, *fresh, now);
  }

  /// Forgets one, as if it had not passed.
  void forget(std::string_view domain, std::string_view id);
  /// Forgets all whose time is over.
  void expire(Nanos now);

  std::size_t size() const { return size_.load(std::memory_order_relaxed); }
  std::uint64_t repeated() const { return repeated_.load(std::memory_order_relaxed); }
  /// Forgotten before their time, for want of room.
  std::uint64_t evicted() const { return evicted_.load(std::memory_order_relaxed); }

 private:
  struct Kept {
    crdt::SeriesId hash;
    Nanos until = 0;
    Answer answer;
  };
  using Order = std::list<Kept>;  // oldest first
  struct alignas(64) Shard {
    std::mutex mutex;
    Order order;
    std::unordered_map<crdt::SeriesId, Order::iterator> by_hash;
  };

  crdt::SeriesId hash_of(std::string_view domain, std::string_view id) const;
  const Answer* find(Shard& shard, const crdt::SeriesId& hash, Nanos now);
  void remember(Shard& shard, const crdt::SeriesId& hash, const Answer& answer, Nanos now);
  void forget(Shard& shard, Order::iterator kept);

  const internal::KeyedHash hash_;
  const std::size_t shards_count_;  // a power of two
  const std::size_t room_;          // of a shard
  const Nanos ttl_;
  std::unique_ptr<Shard[]> shards_;
  std::atomic<std::size_t> size_{0};
  std::atomic<std::uint64_t> repeated_{0};
  std::atomic<std::uint64_t> evicted_{0};
};

}  // namespace weir
