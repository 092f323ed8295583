#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include <weir/crdt/epoch.h>
#include <weir/crdt/ids.h>
#include <weir/crdt/time.h>
#include <weir/limits/decision.h>
#include <weir/limits/limiter.h>

namespace weir {

/// What a reservation holds of one rule.
struct Hold {
  crdt::SeriesId series;
  crdt::Epoch epoch;                       ///< of the cell that it was taken from; kBucketEpoch
  std::uint64_t per_hit = 0;               ///< the rule's cost of one hit
  std::uint64_t units = 0;                 ///< held
  std::uint64_t most = ~std::uint64_t{0};  ///< units that may be counted instead: the limit
  Late late = Late::charge;                ///< the rule's
  std::uint16_t descriptor = 0;            ///< of the request, whose hits these are
  RequestLimit limit = {};                 ///< as the request brought it
};

/// What became of one hold.
struct SettledHold {
  bool lapsed = false;  ///< its window was over, and nothing counted
  bool wants_commit = false;
};

/// Reservations whose cost is not known yet: which ticket holds what, until when, and what is
/// counted instead once it is settled. What is held in a series is the caller's business, who is
/// given each hold with the cost that counts instead, exactly once.
///
/// What each caller has open is bounded and known, so that one cannot take all tickets, nor lease a
/// key's whole limit.
///
/// Thread-safe. Tickets are in shards with a lock each, and callers in others. None is held during
/// a call to anything else: whoever calls may take series' locks for a hold, and may call with some
/// held.
class Reservations {
 public:
  /// At most `most` are open at once, `most_of_one` by one caller.
  explicit Reservations(std::size_t most, std::size_t most_of_one = ~std::size_t{0})
      : most_(most), most_of_one_(most_of_one) {}

  /// Keeps room for one ticket. False if as many are open (or have room kept) as may be.
  bool keep_room(TicketHolder holder = {});
  void give_room_back(TicketHolder holder = {});
  /// In the room that was kept for `holder`. It times out `timeout` from `now`, at least at once
  /// and at most after Limiter::kMaxHold. `hits`: Settled::hits. The number is never 0 and never
  /// given twice.
  Ticket open(std::vector<Hold> holds, std::uint64_t hits, Nanos now, Nanos timeout,
              TicketHolder holder = {});
  /// Units of the series that the caller holds by leases that are open.
  std::uint64_t leased(std::uint64_t caller, const crdt::SeriesId& series) const;

  /// Calls `settle_hold(hold, cost)`, which returns a SettledHold, for each hold of the ticket if
  /// it is still open and `caller` (TicketHolder::caller) has it. `actual` are hits by descriptor;
  /// beyond them it costs what was held.
  template <typename SettleHold>
  Settled settle(Ticket ticket, std::span<const std::uint64_t> actual, SettleHold settle_hold,
                 std::uint64_t caller = 0) {
    std::optional<Open> open = take(ticket.number, caller);
    return open ? settle_open(*open, actual, settle_hold) : Settled{};
  }
  /// Settles as held what has timed out at `now`, at most `max` tickets, in each shard the earliest
  /// first. Returns how many.
  template <typename SettleHold>
  std::size_t settle_due(Nanos now, std::size_t max, SettleHold settle_hold) {
    std::size_t settled = 0;
    for (; settled < max; ++settled) {
      std::optional<Open> open = take_due(now);
      if (!open) break;
      settle_open(*open, {}, settle_hold);
    }
    timed_out_.fetch_add(settled, std::memory_order_relaxed);
    return settled;
  }
  /// Settles as held all that is open.
  template <typename SettleHold>
  void settle_all(SettleHold settle_hold) {
    while (std::optional<Open> open = take_due(kNever)) settle_open(*open, {}, settle_hold);
  }

  TicketCounters counters() const;

 private:
  struct Open {
    Nanos deadline = 0;
    std::uint64_t hits = 0;
    std::vector<Hold> holds;
    TicketHolder holder;
  };
  /// What one caller has open; forgotten with the last of it.
  struct Caller {
    std::size_t tickets = 0;
    std::unordered_map<crdt::SeriesId, std::uint64_t> leased;
  };
  static constexpr std::size_t kShards = 16;
  struct alignas(64) CallerShard {
    mutable std::mutex mutex;
    std::unordered_map<std::uint64_t, Caller> callers;
  };
  struct alignas(64) Shard {
    std::mutex mutex;
    std::unordered_map<std::uint64_t, Open> by_number;
    std::set<std::pair<Nanos, std::uint64_t>> by_deadline;
  };

  template <typename SettleHold>
  static Settled settle_open(const Open& open, std::span<const std::uint64_t> actual,
                             SettleHold& settle_hold) {
    Settled out;
    out.known = true;
    out.hits = open.hits;
    for (const Hold& hold : open.holds) {
      SettledHold settled = settle_hold(hold, cost_of(hold, actual));
      out.lapsed |= settled.lapsed;
      out.wants_commit |= settled.wants_commit;
    }
    return out;
  }
  static std::uint64_t cost_of(const Hold& hold, std::span<const std::uint64_t> actual);
  std::optional<Open> take(std::uint64_t number, std::uint64_t caller);
  std::optional<Open> take_due(Nanos now);
  static Open take(Shard& shard, std::uint64_t number);  // with its lock; it is there
  void gone(const Open& open);                           // with none

  const std::size_t most_;
  const std::size_t most_of_one_;
  std::array<CallerShard, kShards> callers_;
  std::array<Shard, kShards> shards_;
  std::atomic<std::size_t> open_{0};
  std::atomic<std::uint64_t> next_{1};
  std::atomic<std::uint64_t> refused_{0};
  std::atomic<std::uint64_t> timed_out_{0};
};

}  // namespace weir
