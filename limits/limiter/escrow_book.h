#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include <weir/crdt/cell.h>
#include <weir/crdt/escrow.h>
#include <weir/crdt/replica.h>
#include <weir/limits/algorithms/window.h>
#include <weir/limits/escrow/escrow_bucket.h>
#include <weir/limits/escrow/escrow_cell.h>
#include <weir/limits/escrow/escrow_needs.h>
#include <weir/limits/limiter.h>
#include <weir/limits/limiter/program.h>
#include <weir/limits/limiter/small_series.h>
#include <weir/limits/replica_side.h>
#include <weir/limits/series/series.h>

namespace weir {

/// What this node may spend of the limits of escrow rules, and what it lacks: its grant state, its
/// share of each limit, and the windows in which more was asked for than that. What a series holds
/// of its rights is in the Series (EscrowCell and EscrowBucket have the arithmetic); whoever calls
/// knows where that is.
///
/// Thread-safe. A Series that is passed is guarded by the lock of its entry, which the caller
/// holds; null stands for one that was never used. This object's own locks, that of the busy
/// windows and that of EscrowNeeds, are taken inside, one at a time, and nothing is locked while
/// one is held.
class EscrowBook {
 public:
  /// Of the options: replicated, incarnation, shares and self.
  explicit EscrowBook(const LimiterOptions& options);

  // What the driver of a replica says.

  void set_grant_state(const EscrowGrantState& state);
  /// Another incarnation runs from now on. Not concurrently with anything else.
  void set_incarnation(const crdt::Incarnation& fresh) { incarnation_ = fresh; }
  /// What is used can't be kept any more: nothing may be spent.
  bool stopped() const { return stopped_.load(std::memory_order_relaxed); }
  /// Whether shares are known, so that rights may be asked of others.
  bool shared() const { return shares_ != nullptr; }

  // Decisions. `window` is what the cost falls in, of rules that have windows.

  /// What becomes of what was spent.
  struct Spent {
    bool waits = false;  ///< it is ahead of what is durable: the answer must wait
    bool dirty = false;  ///< the series has something to drain
  };

  /// In buckets it changes what time changes.
  Verdict evaluate(const CompiledRule& compiled, const SeriesId& id, const WindowAt& window,
                   Series* series, std::uint64_t cost, Nanos now) const;
  /// Spends, whatever is left: the caller has decided.
  Spent consume(const CompiledRule& compiled, const SeriesId& id, const WindowAt& window,
                Series& series, std::uint64_t cost, Nanos now);
  /// Units that a reservation takes out of `epoch` until it is settled. At most what is left.
  void hold(const CompiledRule& compiled, const SeriesId& id, const crdt::Epoch& epoch,
            Series& series, std::uint64_t units, Nanos now) const;
  /// The hold goes, and `cost` counts, also beyond the rights that are here: the work was done.
  /// Nothing if it is too late to count anything.
  std::optional<Spent> settle(const CompiledRule& compiled, const SeriesId& id,
                              const crdt::Epoch& epoch, std::uint64_t held, Series& series,
                              std::uint64_t cost, Nanos now) const;
  /// Windows: what this incarnation spent is not spent any more, up to `units`; its row stays as
  /// far ahead as it is. Returns how many. Buckets: none, as tokens that are missing may have been
  /// lent.
  static std::uint64_t give_back(const WindowAt& window, Series& series, std::uint64_t units);
  /// What was asked for, whatever became of it; and if it leaves too little here, or was too much,
  /// a need for more. `verdict` is evaluate()'s of this cost.
  void count_demand(const CompiledRule& compiled, const SeriesId& id, const WindowAt& window,
                    Series* series, std::uint64_t cost, const Verdict& verdict, Nanos now);
  /// Units consumed in the current window or owed now, and what is held.
  std::uint64_t used(const CompiledRule& compiled, const SeriesId& id, Series* series,
                     Nanos now) const;

  // Asking for rights.

  /// Windows that asked for more than their share and are about to end, and the names of their
  /// rules: look_ahead() says what the next ones will lack.
  std::vector<std::pair<crdt::CellId, SeriesId>> ending(Nanos now, Nanos lead);
  /// Notes what the window after `cell` will lack if it takes as much.
  void look_ahead(const CompiledRule& compiled, const crdt::CellId& cell, Series& series,
                  Nanos now);
  /// Needs that were noted and whose turn it is: EscrowNeeds::take_due.
  void take_needs(Nanos now, Nanos lead, std::vector<RightsNeed>& out) {
    needs_.take_due(now, lead, out);
  }

  // Giving and taking rights.

  /// False: of this cell nothing may be given at `now`, whatever the series holds.
  bool may_give(const CompiledRule& compiled, const crdt::CellId& cell, Nanos now) const;
  /// ReplicaSide::give_rights, where may_give().
  std::uint64_t give(const CompiledRule& compiled, const crdt::CellId& cell, Series& series,
                     const crdt::Incarnation& to, std::uint64_t wanted, Nanos now, bool all) const;
  /// Takes in what others wrote of a cell, instead of what was known. The rights that came with it.
  std::uint64_t absorb(const crdt::CellId& cell, Series& series, const EscrowOthers& others);
  /// Appends open windows of which rights are left.
  void find_rights_left(const CompiledRule& compiled, const SeriesId& id, const Series& series,
                        Nanos now, std::vector<RightsLeft>& out) const;
  /// Appends the own rows that changed since they were last drained.
  void drain(const SeriesId& id, Series& series, std::vector<crdt::OwnCount>& out) const;
  /// A series with a bucket: nothing is lost if it is forgotten. One that is full is as one that
  /// was never used.
  bool is_over(const EscrowBucketShape& shape, const SeriesId& id, Series& series,
               Nanos floor) const;

 private:
  /// After this long, rights that were asked for may have come.
  static constexpr Nanos kAskAgain = 200 * kMillisecond;
  /// An incarnation may have lent this far ahead, so what was lent by those before it is over so
  /// long after it began.
  static constexpr Nanos kLentAhead = 2 * kLendingPeriod;

  bool takes_share(const crdt::Epoch& epoch) const;

  // Windows.

  /// A limit that changes does so for later windows.
  EscrowCell& place(const CompiledRule& compiled, const SeriesId& id, EscrowCell& cell) const;
  Spent spend(const CompiledRule& compiled, const SeriesId& id, EscrowCell& cell,
              std::uint64_t cost) const;
  Verdict evaluate_window_rights(const CompiledRule& compiled, const SeriesId& id,
                                 const crdt::Epoch& epoch, Series* series, std::uint64_t cost,
                                 Nanos now) const;
  void count_window_demand(const CompiledRule& compiled, const crdt::CellId& id, Series* series,
                           std::uint64_t cost, const Verdict& verdict, Nanos now);
  void look_ahead_in_windows(const CompiledRule& compiled, const crdt::CellId& cell, Series& series,
                             Nanos now);
  void note_busy(const crdt::CellId& cell, const SeriesId& rule);

  // Buckets: see escrow_bucket.h.

  static crdt::Epoch period_at(const SeriesId& id, Nanos now);
  static crdt::Epoch period_after(const SeriesId& id, Nanos now);
  static crdt::Epoch period_from(const SeriesId& id, Nanos instant);

  /// The member's share of the burst in the period that begins at `start`.
  std::uint64_t share_of(const EscrowBucketShape& shape, const SeriesId& id, EscrowBucket& bucket,
                         Nanos start) const;
  /// Rights of a lending period that this member has. Whether they may be spent yet is not asked.
  std::uint64_t part_of(const EscrowBucketShape& shape, const SeriesId& id, EscrowBucket& bucket,
                        EscrowCell* cell, const crdt::Epoch& period) const;
  /// Until when what part_of() says of the period at `now`, which has no cell, holds.
  Nanos same_until(const SeriesId& id, const Series* series, const EscrowBucket& bucket,
                   Nanos now) const;
  /// What the bucket holds at `now`, through all periods in between. Returns the part of the burst
  /// that this member has then. Periods that are over are forgotten.
  std::uint64_t advance(const EscrowBucketShape& shape, const SeriesId& id, Series* series,
                        EscrowBucket& bucket, Nanos now) const;
  /// The bucket of a series that was not used since grants of this incarnation are open, or is full
  /// again.
  EscrowBucket unused_bucket(const EscrowBucketShape& shape, const SeriesId& id, Nanos now) const;
  EscrowBucket& made_bucket(const EscrowBucketShape& shape, const SeriesId& id, Series& series,
                            Nanos now) const;
  /// Made if need be, and brought to `now`.
  EscrowBucket& bucket_at(const EscrowBucketShape& shape, const SeriesId& id, Series& series,
                          Nanos now) const;
  Verdict evaluate_bucket_rights(const CompiledRule& compiled, const SeriesId& id, Series* series,
                                 std::uint64_t cost, Nanos now) const;
  void count_bucket_demand(const CompiledRule& compiled, const SeriesId& id, Series& series,
                           std::uint64_t cost, Nanos now);
  void look_ahead_in_bucket(const CompiledRule& compiled, const crdt::CellId& cell, Series& series,
                            Nanos now);
  std::uint64_t lend(const CompiledRule& compiled, const crdt::CellId& cell, Series& series,
                     const crdt::Incarnation& to, std::uint64_t wanted, Nanos now) const;

  const bool replicated_;
  const std::shared_ptr<const crdt::ShareTable> shares_;  // null: every limit is this node's
  const crdt::Member self_;
  const crdt::LostWindows lost_;
  crdt::Incarnation incarnation_;
  // EscrowGrantState.
  std::atomic<bool> open_{true};
  std::atomic<bool> stopped_{false};
  std::atomic<bool> disk_{true};
  std::atomic<Nanos> fence_time_{-1};
  std::atomic<Nanos> gives_ahead_{kMaxTime};
  std::atomic<Nanos> since_{-1};
  EscrowNeeds needs_;
  std::mutex busy_mutex_;
  std::map<crdt::CellId, SeriesId> busy_;  // windows that asked for more than their share; the rule
};

}  // namespace weir
