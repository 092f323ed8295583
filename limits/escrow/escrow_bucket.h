#pragma once

#include <cstdint>
#include <optional>

#include <weir/crdt/escrow.h>
#include <weir/limits/algorithms/bucket.h>
#include <weir/limits/algorithms/window.h>
#include <weir/limits/escrow/escrow_cell.h>

namespace weir {

/// Buckets under `enforcement: escrow`. docs/escrow.md
///
/// Rights are parts of the burst, and each carries its part of the rate: who holds b of B units
/// has a bucket of its own with the burst b, which fills with rate * b / B. The parts sum to at
/// most B at every instant of a clock that all would share, so over any interval, each node by its
/// own clock, all together admit at most B + rate * length.
///
/// Rights are lent for a period, a cell of its own, and only before it begins by the lender's
/// clock: so within a period nobody's part falls. What the lender has in its bucket goes along
/// (crdt::fill_row): it is gone there at once, and there from the period's begin on. Until then the
/// lender does not fill the room again, so at no instant two have it.

/// How long rights are lent for. A member whose demand rises has more within about as much.
inline constexpr Nanos kLendingPeriod = kSecond;
/// The periods of a series: those of all series do not begin at the same instant.
WindowShape lending_periods(const crdt::SeriesId& series);

/// An escrow rule's bucket in ticks, of which a unit has unit * burst and of which rate * b fill
/// the part b each nanosecond: no rate is ever rounded.
struct EscrowBucketShape {
  std::uint64_t rate = 0;  ///< the rule's limit
  Nanos unit = kMinute;    ///< its window
  std::uint64_t burst = 0;
  bool queue = false;  ///< leaky: an allowed cost has a delay

  crdt::Int128 unit_ticks() const { return static_cast<crdt::Int128>(burst) * unit; }
  crdt::Int128 ticks(std::uint64_t units) const {
    return static_cast<crdt::Int128>(units) * unit_ticks();
  }
  /// That fill a part of the burst, each nanosecond.
  crdt::Int128 ticks_per_ns(std::uint64_t part) const {
    return static_cast<crdt::Int128>(rate) * part;
  }
  /// Units that fill a part of the burst in a lending period; rounded down, saturates.
  std::uint64_t per_period(std::uint64_t part) const;
  /// The part of the burst that a demand for `units` in a lending period needs: what fills as fast,
  /// or holds them twice where that is less. Rounded up, at most the burst.
  std::uint64_t part_for(std::uint64_t units) const;
  /// True if all sums of ticks fit. RuleSet makes sure.
  bool fits() const;
};

EscrowBucketShape escrow_bucket_shape(const Rule& rule);

/// What one member's bucket holds. Its part of the burst is not here: see EscrowCell. Guarded by
/// the series' lock.
struct EscrowBucket {
  crdt::Int128 level = 0;   ///< ticks; negative after a settlement that took more than there was
  crdt::Int128 queued = 0;  ///< ticks that a leaky bucket let in, and that have not left
  Nanos at = 0;             ///< of both; never moves back
  std::uint64_t burst = 0;  ///< that the ticks were counted by
  std::uint64_t held = 0;   ///< units in open tickets
  // What came full may come late: of it as much is good as there was room for at every instant
  // since the period began.
  crdt::Int128 room = 0;        ///< the least there was, in ticks
  std::uint64_t room_part = 0;  ///< of this part
  Nanos room_since = -1;
  Demand demand;
  std::uint64_t largest = 0;  ///< cost in the current period, and the one before
  std::uint64_t largest_before = 0;
  Nanos listed_until = 0;  ///< it is known that the next period may need more
  // The member's share, from one change of weights to the next.
  std::uint64_t share = 0;
  std::uint64_t share_burst = 0;
  Nanos share_from = 0;
  Nanos share_until = 0;

  /// Ticks by another burst: what is there stays.
  void rescale(const EscrowBucketShape& shape);
  /// A lending period begins at `start`: when the bucket is there, nothing of it is over yet.
  void enter(const EscrowBucketShape& shape, Nanos start);
  /// Up to `until` the part `part` fills, but never before `since`. `lent`: units of it that went
  /// to others already, so that there is no room for them.
  void fill(const EscrowBucketShape& shape, std::uint64_t part, std::uint64_t lent, Nanos since,
            Nanos until);
  /// Units of the part that came full.
  void add(const EscrowBucketShape& shape, std::uint64_t units, std::uint64_t part);
  /// Takes what goes to others; at most left().
  void lend(const EscrowBucketShape& shape, std::uint64_t units) { level -= shape.ticks(units); }
  /// Takes, whatever is left: the caller has decided. What is owed is counted up to one burst.
  void spend(const EscrowBucketShape& shape, std::uint64_t units);
  void want(std::uint64_t units, Nanos now);
  /// Whole units that may be spent.
  std::uint64_t left(const EscrowBucketShape& shape) const;
  /// What is asked for in about a period, if it goes on like this.
  std::uint64_t likely(Nanos now) const { return demand.forecast(kLendingPeriod, now); }
  /// Units of its part that this member itself is about to need.
  std::uint64_t kept(const EscrowBucketShape& shape, Nanos now) const;
  /// What this member should ask for in the next period, in which its part is `part` so far and
  /// `coming` units come full.
  std::uint64_t lacking(const EscrowBucketShape& shape, std::uint64_t part, std::uint64_t coming,
                        Nanos now) const;
  bool full(const EscrowBucketShape& shape, std::uint64_t part) const;
  /// Of a cost at `at`, with the part `part`. retry_after is when it has filled up enough here;
  /// kNever if the part is too small for that.
  Verdict evaluate(const EscrowBucketShape& shape, std::uint64_t part, std::uint64_t cost) const;
};

}  // namespace weir
