#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include <weir/crdt/epoch.h>
#include <weir/crdt/ids.h>
#include <weir/crdt/time.h>

namespace weir {

/// What a reservation holds of one rule.
struct Hold {
  crdt::SeriesId series;
  crdt::Epoch epoch;             ///< of the cell that it was taken from; kBucketEpoch
  std::uint64_t per_hit = 0;     ///< the rule's cost of one hit
  std::uint64_t units = 0;       ///< held
  std::uint16_t descriptor = 0;  ///< of the request, whose hits these are
};

struct OpenTicket {
  std::uint64_t number = 0;
  Nanos deadline = 0;
  std::vector<std::uint64_t> hits;  ///< as reserved, by descriptor
  std::vector<Hold> holds;
};

/// Tickets that were given out and are not settled yet. Each is taken out once. Thread-safe; the
/// tickets are in shards with a lock each, which is never held during a call to anything else.
class Tickets {
 public:
  explicit Tickets(std::size_t max_open) : max_open_(max_open) {}

  /// Keeps room for one ticket. False if as many are open (or have room kept) as may be.
  bool keep_room();
  void give_room_back() { open_.fetch_sub(1, std::memory_order_relaxed); }
  /// In the room that was kept. Sets and returns its number: never 0, never given twice.
  std::uint64_t open(OpenTicket ticket);

  /// Takes a ticket out. Empty if there is none of this number.
  std::optional<OpenTicket> take(std::uint64_t number);
  /// Takes out one whose deadline is at or before `now`: in each shard the earliest comes first.
  std::optional<OpenTicket> take_due(Nanos now);

  std::size_t size() const { return open_.load(std::memory_order_relaxed); }
  std::uint64_t refused() const { return refused_.load(std::memory_order_relaxed); }

 private:
  static constexpr std::size_t kShards = 16;
  struct alignas(64) Shard {
    std::mutex mutex;
    std::unordered_map<std::uint64_t, OpenTicket> by_number;
    std::set<std::pair<Nanos, std::uint64_t>> by_deadline;
  };
  std::optional<OpenTicket> take(Shard& shard, std::uint64_t number);  // with its lock

  const std::size_t max_open_;
  std::array<Shard, kShards> shards_;
  std::atomic<std::size_t> open_{0};
  std::atomic<std::uint64_t> next_{1};
  std::atomic<std::uint64_t> refused_{0};
};

}  // namespace weir
