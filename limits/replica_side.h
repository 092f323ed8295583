#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include <weir/crdt/cell.h>
#include <weir/crdt/replica.h>
#include <weir/limits/escrow/escrow_cell.h>
#include <weir/limits/escrow/escrow_needs.h>
#include <weir/limits/limiter.h>

namespace weir {

/// What absorb() learnt.
struct Growth {
  crdt::SeriesId
      rule;  ///< Limiter::rule_identity; zeros: nobody has asked for this series here yet
  std::uint64_t units = 0;  ///< that others consumed, unknown here before
};

/// A window of which a node has rights left.
struct RightsLeft {
  crdt::SeriesId rule;  ///< RightsNeed::rule
  crdt::CellId cell;
  std::uint64_t demand = 0;  ///< units that are asked for, about a slice of time
};

/// The other side of a limiter: what the driver of a replica calls, so that what is counted here
/// is counted everywhere. A program that decides alone needs none of it.
///
/// A view, as cheap as a pointer; the limiter must outlive it. Thread-safe, as Limiter is, except
/// where said otherwise.
class ReplicaSide {
 public:
  /// What the replica holds of a slot.
  using DurableCount =
      std::function<std::uint64_t(const crdt::CellId& cell, const crdt::SlotId& slot)>;
  /// Moves out up to `max` cells that this node consumed from since they were last drained, each
  /// with its whole total. Returns true if more are waiting.
  bool drain(std::vector<crdt::OwnCount>& out, std::size_t max);
  /// Takes in what a cell holds beside this node's current slot. Counts only rise. False if the
  /// series is new and there is no memory for it, or some other counts are with the replica alone:
  /// then these are, too (warm()).
  bool absorb(const crdt::Cell& cell);
  bool absorb(const crdt::Cell& cell, Growth& growth);
  /// The same, and what the replica has of this node's own current slot, which this limiter does
  /// not have: of a series that let_go() let go.
  bool restore(const crdt::Cell& cell, Growth& growth);
  /// When little room is left for whoever comes first: looks at about `most` series, of rules that
  /// have more than their part, and lets those go that nobody used since it last looked, and of
  /// which `kept(cell, slot)`, what the replica holds of an own slot, is all that was counted here.
  /// They come back by warm(). Not concurrently with absorb. Returns how many.
  std::size_t let_go(std::size_t most, const DurableCount& kept);
  /// Where absorb() found no room, and of what let_go() let go, counts stay with the replica alone,
  /// and whoever meets such a series is told that nothing was decided (Decision::version 0). For
  /// each rule that the request meets and whose series is not here, this makes the series, if the
  /// rule may have one more, and appends the cells that decisions read of it: restore what the
  /// replica has of them, then ask with Request::warmed. Does nothing while there is no such
  /// series. By the thread that absorbs. (Of a sliding log cells cannot be named: it begins anew.)
  void warm(const Request& request, Nanos now, std::vector<crdt::CellId>& out);
  /// This bucket had drained, and the replica forgot it and reset it to `cell` (see
  /// Outbox::reset_buckets): what was counted before no longer counts, here neither. `gone` is what
  /// it held of this node; what this node consumed beyond that, and has not been drained, stays.
  void reset(const crdt::Cell& cell, const crdt::Slot& gone);
  /// Continues under `fresh`. `durable(cell, slot)` is what the replica holds of the old own slot:
  /// it stays behind as another writer's count, the rest moves to the fresh slot and will be
  /// drained. Not concurrently with drain or absorb.
  void rebase(const crdt::Incarnation& fresh, const DurableCount& durable);
  /// Own counts of Outbox::durable.
  void mark_durable(const crdt::OwnCount& count);

  // Escrow rules, for EscrowAgent.

  void set_grant_state(const EscrowGrantState& state);
  /// What others wrote of a window; replaces what was known before. The units of rights that came
  /// with it; nothing if there is no memory.
  std::optional<std::uint64_t> absorb_rows(const crdt::CellId& cell, const EscrowOthers& others);
  /// Transfers rights of `cell`, a window of the rule RightsNeed::rule, to the incarnation `to`, so
  /// that they are `wanted` in all or as much as is left here beyond what this node itself is about
  /// to need; with `all` this node needs nothing. It will be drained. Returns how many; 0 if
  /// nothing can be given, as of a bucket's period that has begun.
  std::uint64_t give_rights(const crdt::SeriesId& rule, const crdt::CellId& cell,
                            const crdt::Incarnation& to, std::uint64_t wanted, Nanos now,
                            bool all = false);
  /// Open windows of which rights are left here: of at most `max`, those that most is asked for of.
  /// Looks at every series.
  std::vector<RightsLeft> rights_left(Nanos now, std::size_t max);
  /// The rights to ask for at `now`: what requests lack, and from `lead` before a window's end on
  /// what the next one will lack if it takes as much as this one. Of a bucket these are periods
  /// that have not begun, half a period ahead at most.
  void rights_needed(Nanos now, Nanos lead, std::vector<RightsNeed>& out);

 private:
  friend class Limiter;
  explicit ReplicaSide(Limiter::Impl& impl) : impl_(&impl) {}
  Limiter::Impl* impl_;
};

}  // namespace weir
