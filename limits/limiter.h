#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include <weir/crdt/cell.h>
#include <weir/crdt/replica.h>
#include <weir/limits/decision.h>
#include <weir/limits/request.h>
#include <weir/limits/rule.h>

namespace weir {

/// Secret from which series ids are made. All nodes of a cluster need the same one; whoever knows
/// it can make keys collide.
using HashKey = std::array<std::uint8_t, 16>;

struct LimiterOptions {
  HashKey hash_key{};
  /// Series held at most, for which memory is reserved at once and taken as it is used (58 bytes a
  /// series; 83 with `replicated`). When full, a new series of a rule with on_failure `closed` is
  /// denied; with `open` it is counted in a sketch that may deny too early and never too late, here
  /// only. Either is reported as degraded.
  std::size_t max_series = 1u << 20;
  /// Keep track of what changed for drain(). Leave off when nobody replicates.
  bool replicated = false;
  crdt::Incarnation incarnation{};  ///< of the replica; only with `replicated`
};

struct RuleCounters {
  std::uint64_t allowed = 0;   ///< requests to which this rule had no objection
  std::uint64_t denied = 0;    ///< requests it denied (for a shadow rule: would have)
  std::uint64_t degraded = 0;  ///< requests that on_failure answered
};

/// Decides from memory. Thread-safe: any number of threads may call any member at any time, except
/// where said otherwise. No call does I/O, waits for anything but another call on the same series
/// or its neighbours in memory, or reads a clock.
class Limiter {
 public:
  Limiter(std::shared_ptr<const RuleSet> rules, LimiterOptions options);
  ~Limiter();
  Limiter(const Limiter&) = delete;
  Limiter& operator=(const Limiter&) = delete;

  /// Evaluates every rule that matches and, if all enforcing ones allow, consumes from each; a
  /// denied request consumes nothing. `now` is clamped so that time never runs backwards for a
  /// thread; between threads it may by less than a millisecond.
  /// Reusing `out` avoids allocation.
  void check(const Request& request, Nanos now, Decision& out);
  Decision check(const Request& request, Nanos now);
  /// The same for several requests, as if one after the other; `out` is as long as `requests`.
  /// Faster than single calls: the memory of the next ones is fetched meanwhile.
  void check(std::span<const Request> requests, Nanos now, std::span<Decision> out);

  const RuleSet& rules() const;
  /// The series that `rule` (an index into rules()) counts this request in. The request must match.
  crdt::SeriesId series_of(std::uint32_t rule, const Request& request) const;
  RuleCounters counters(std::uint32_t rule) const;
  std::size_t series_count() const;
  /// Units consumed in the rule's current window or, for buckets, owed now; own and merged counts.
  std::uint64_t used(std::uint32_t rule, const Request& request, Nanos now);

  /// Forgets series that are over at `floor` (windows past, buckets full) and drained. Returns how
  /// many. With a replica: sweep, then drain everything, then Replica::retire_buckets(floor), so
  /// that a bucket's slots are forgotten here first.
  std::size_t sweep(Nanos floor);

  // The other side of the limiter: the replica's driver.

  /// Moves out up to `max` cells that this node consumed from since they were last drained, each
  /// with its whole total. Returns true if more are waiting.
  bool drain(std::vector<crdt::OwnCount>& out, std::size_t max);
  /// Takes in what a cell holds beside this node's current slot. Counts only rise. False if the
  /// series is new and there is no memory for it.
  bool absorb(const crdt::Cell& cell);
  /// This bucket had drained, and the replica forgot it and began anew with `cell` (see
  /// Outbox::begun_anew): what was counted before no longer counts, here neither. What this node
  /// consumed since it was last drained stays.
  void begin_anew(const crdt::Cell& cell);
  /// Continues under `fresh`. `durable(cell, slot)` is what the replica holds of the old own slot:
  /// it stays behind as another writer's count, the rest moves to the fresh slot and will be
  /// drained. Not concurrently with drain or absorb.
  using DurableCount =
      std::function<std::uint64_t(const crdt::CellId& cell, const crdt::SlotId& slot)>;
  void rebase(const crdt::Incarnation& fresh, const DurableCount& durable);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace weir
