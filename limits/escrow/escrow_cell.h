#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <weir/crdt/escrow.h>
#include <weir/crdt/replica.h>

namespace weir {

/// What this node may count on now, as its driver tells (escrow_agent.h). Alone, as a program that
/// links only a Limiter is, it has every limit to itself.
struct EscrowGrantState {
  bool open = true;       ///< a peer knows of this incarnation, so shares may be spent
  Nanos fence_time = -1;  ///< in windows that start after this
  /// Nothing is given of windows that start so much later than now: a later incarnation has a share
  /// of them, and would not know. (Buckets: see escrow_bucket.h.)
  Nanos ahead = kMaxTime;
  Nanos since = -1;      ///< open since then, so buckets were empty then; -1: for ever, so full
  bool stopped = false;  ///< what is used can't be kept any more, so nothing may be
  bool disk = true;      ///< what is used must be on a disk before an answer may go out
  bool takes_share(const crdt::Epoch& epoch) const { return open && epoch.start > fence_time; }
};

/// A limit of which each member has a few units at most. Of such a one nothing is kept in reserve,
/// and who has no rights left may ask others to decide (node/service/forwarder.h).
inline bool is_scarce(std::uint64_t limit, const crdt::ShareTable& shares) {
  constexpr std::uint64_t kFew = 8;
  return shares.holders().size() > 1 && limit < kFew * shares.holders().size();
}

/// What other incarnations wrote of a window, as one member sees it.
struct EscrowOthers {
  crdt::Holding holding;            ///< without the rows of the incarnation that runs
  std::uint64_t used_by_peers = 0;  ///< of the limit, as far as is known here
  bool empty() const { return holding == crdt::Holding{} && used_by_peers == 0; }
  friend bool operator==(const EscrowOthers&, const EscrowOthers&) = default;
};

/// How much is asked for, in slices of time: what the next one will take is what the last ones did.
class Demand {
 public:
  void add(std::uint64_t units, Nanos slice, Nanos now);
  /// For about the next slice.
  std::uint64_t forecast(Nanos slice, Nanos now) const;
  std::int64_t slice_of_last() const { return number_; }

 private:
  std::int64_t number_ = 0;
  std::uint64_t units_ = 0;
  std::uint64_t before_ = 0;
};

/// One window of one series of an escrow rule: what this node has of its rights. Of a bucket, one
/// lending period: rights are parts of its burst, and are not spent (escrow_bucket.h). Guarded by
/// the series' lock.
struct EscrowCell {
  struct Given {
    std::uint64_t row = 0;
    std::uint64_t units = 0;
    bool dirty = false;
  };

  crdt::Epoch epoch;
  bool placed = false;        ///< share, block and slice are known
  std::uint64_t share = 0;    ///< of the limit, by the weights in force when the window began
  std::uint64_t block = 0;    ///< kept ahead of what is spent; 0: durability commit, or scarce
  Nanos slice = kSecond;      ///< of demand
  std::uint64_t spent = 0;    ///< by the incarnation that runs
  std::uint64_t held = 0;     ///< by open tickets
  std::uint64_t ceiling = 0;  ///< its used row, as handed over
  std::uint64_t durable = 0;  ///< its used row, as far as it is on the disk
  std::vector<Given> given;   ///< its transfers
  EscrowOthers others;
  Demand demand;
  std::uint64_t demanded = 0;         ///< in all, denied or not; saturates
  std::uint64_t demanded_before = 0;  ///< the same of the window before
  bool busy = false;  ///< more was demanded than the share: the next window may need more
  bool dirty = false;
  std::uint64_t credited = 0;  ///< buckets: of others.holding.filled, what is in the bucket

  /// Rights that may still be spent here. Negative after a settlement beyond its reservation.
  crdt::Int128 left(bool takes_share) const;
  void want(std::uint64_t units, Nanos now);
  /// Spends, whatever is left: the caller has decided.
  void spend(std::uint64_t units, bool takes_share);
  /// What the next window will be asked for, if it is like the last two.
  std::uint64_t likely() const;
  /// What was spent is not on the disk: the answer must wait.
  bool waits() const { return spent > durable; }
  /// Units that should be asked for, so that the next requests find them; 0: enough is here.
  std::uint64_t lacking(Nanos now, bool takes_share) const;
  /// Raises the transfer row of `to` to at least `wanted`, keeping `kept` of what is left back.
  /// By how much; 0: nothing can be given.
  std::uint64_t give(const crdt::Incarnation& from, const crdt::Incarnation& to,
                     std::uint64_t wanted, std::uint64_t kept, bool takes_share);
  /// Buckets: how many of the rights of `to` are full.
  std::uint64_t filled_for(const crdt::Incarnation& to) const;
  /// Raises that by as much as there are rights for, at most by `units`. Returns by how much.
  std::uint64_t give_filled(const crdt::Incarnation& to, std::uint64_t units);
  /// All that was given full.
  std::uint64_t given_filled() const;
  /// Appends the own rows that changed since they were last handed over.
  void drain(const crdt::SeriesId& series, bool takes_share, std::vector<crdt::OwnCount>& out);
  void mark_durable(std::uint64_t value);
  /// Another incarnation runs now: it has written nothing.
  void reset();
  bool idle() const { return !dirty && held == 0; }

 private:
  std::uint64_t given_in(std::uint64_t row) const;
  void raise(std::uint64_t row, std::uint64_t units);
};

}  // namespace weir
