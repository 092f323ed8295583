#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include <weir/crdt/cell.h>

namespace weir::crdt {

/// The bounded counter (Balegas et al., SRDS 2015) over ordinary slots. docs/escrow.md
///
/// A limit's units in a window are *rights*. Each member has a share of them; it may spend rights,
/// or transfer them. Both are rows of the window's cell: slots with a `birth` that says which row.
/// So the matrix joins, travels, is acknowledged and stored as every other cell is, and a member
/// raises its own rows only.
///
/// Rights are transferred to an *incarnation* of a member, not to its name: what an incarnation
/// that is gone was given, and may have spent unseen, is not anybody else's. An incarnation may
/// succeed the one before it, and then has all that it had: see Succession.

__extension__ typedef __int128 Int128;

// Rows: the `birth` of a slot of an escrow cell.

/// Units that the writer has used of its rights, or keeps for use (its durable ceiling).
inline constexpr std::uint64_t kUsedRow = 1;
/// Units that the writer has transferred to the incarnation `to`. At least 2^63, and even.
std::uint64_t transfer_row(const Incarnation& to);
/// Of a bucket's rights: how many of those in transfer_row(to) are full. At least 2^63, and odd.
inline std::uint64_t fill_row(const Incarnation& to) {
  return transfer_row(to) | 1;
}
constexpr bool is_transfer(std::uint64_t row) {
  return row >> 63 != 0 && (row & 1) == 0;
}
constexpr bool is_fill(std::uint64_t row) {
  return row >> 63 != 0 && (row & 1) != 0;
}
/// True if the cell holds rows of an escrow rule: a windowed cell with a slot that has a birth,
/// other than kBackRow.
bool is_escrow(const Cell& cell);

// Shares.

/// A weight, from an instant on.
struct WeightChange {
  Nanos from = 0;
  std::uint32_t weight = 1;
  friend bool operator==(const WeightChange&, const WeightChange&) = default;
};

/// A member that rights are shared among. It joins by a change from weight 0, and leaves by one to
/// 0. Every member of the cluster must know of a change before its instant.
struct Shareholder {
  Member member;
  std::vector<WeightChange> weights = {{}};  ///< by `from`, the first from 0 on
  std::uint32_t weight_at(Nanos instant) const;
  friend bool operator==(const Shareholder&, const Shareholder&) = default;
};

/// Splits `limit` by `weights` (sum above 0, else all get nothing), by D'Hondt's method: the k-th
/// unit of one with weight w has the priority w / k, and the `limit` highest are given. Sums to
/// `limit` exactly. No part falls when the limit rises, or when another's weight falls: so nodes
/// that know different limits together never hold more than the largest. Equal priorities go by
/// `order`: distinct numbers, smaller first.
std::vector<std::uint64_t> apportion(std::uint64_t limit, std::span<const std::uint32_t> weights,
                                     std::span<const std::uint64_t> order);

/// Who shares. Immutable: threads share it freely.
class ShareTable {
 public:
  /// Members must be distinct.
  explicit ShareTable(std::vector<Shareholder> holders);

  /// What `member` may spend of `limit` in a window of `series` that starts at `start`: by the
  /// weights in force then. 0 for one that is not among the holders. Which of several equal
  /// members gets what does not divide depends on the series, so small limits spread over all.
  std::uint64_t share(const Member& member, const SeriesId& series, std::uint64_t limit,
                      Nanos start) const;
  /// The first instant behind `instant` at which some weight changes; kNever if there is none.
  Nanos next_change(Nanos instant) const;
  /// Names the weights in force at `instant`: equal only where all weights are.
  std::uint64_t version(Nanos instant) const;
  const std::vector<Shareholder>& holders() const { return holders_; }

 private:
  std::vector<Shareholder> holders_;  // by member
  std::vector<std::uint64_t> names_;  // hashes of the members
};

// Incarnations.

/// The incarnations of one member that are as one: each took over all rights of the one before,
/// having made sure that its disk held everything that one did.
struct Succession {
  std::vector<Incarnation> incarnations;  ///< newest first
  /// The oldest of them came after another incarnation, or cannot know: in windows that start at or
  /// before this the member's share belongs to incarnations before it. -1: it was the member's
  /// first.
  Nanos fence_time = kNever;

  bool has(const Incarnation& incarnation) const;
  bool takes_share(const Epoch& epoch) const { return epoch.start > fence_time; }
};

/// What the rows of one cell say of one member's rights.
struct Holding {
  Uint128 received = 0;  ///< by incarnations of the succession
  Uint128 given = 0;     ///< by them
  Uint128 used = 0;      ///< by them
  Uint128 before = 0;    ///< given and used by the member's other incarnations
  Uint128 filled =
      0;  ///< of a bucket: received full by the newest incarnation; a level is no earlier one's
  friend bool operator==(const Holding&, const Holding&) = default;
};

/// `is_own` says whether an incarnation is one of the member.
Holding holding_of(const Cell& cell, const Succession& succession,
                   const std::function<bool(const Incarnation&)>& is_own);

/// What the newest incarnation may still use. Signed: below 0 where a settlement overran its
/// reservation. Never more than the member truly has, whatever rows of others are missing; its own
/// must all be there.
Int128 rights(const Holding& holding, const Succession& succession, const Epoch& epoch,
              std::uint64_t share);

/// The new value of a transfer row that is at `row`, so that it is at least `wanted` if `available`
/// rights are enough, else as much as they allow. Asking for a total, not for a difference, makes
/// requests safe to repeat, delay and reorder. Nothing if that raises nothing, as for a request
/// that was served before, to oneself, or with no rights.
std::optional<std::uint64_t> raised_transfer(const Incarnation& from, const Incarnation& to,
                                             std::uint64_t row, std::uint64_t wanted,
                                             Int128 available);

// The incarnation registry: every member has a cell that its incarnations write themselves into,
// which is how a cluster remembers what a lost disk forgot. No rule's window is that long.

/// The member's registry in use at `now`, and the one before, in which incarnations still may be
/// that some window remembers.
CellId registry_cell(const Member& member, Nanos now);
CellId registry_cell_before(const Member& member, Nanos now);
bool is_registry(const CellId& id);

/// An incarnation's row: 1 + its fence time.
inline constexpr std::uint64_t kFenceRow = 2;
/// "No incarnation of this member was before me."
inline constexpr std::uint64_t kFirstRow = 3;
/// 1 + the start of the first windows of which this incarnation knows all that its member counted,
/// in any rule. Rises, and each incarnation has at least the one before it had.
inline constexpr std::uint64_t kCountsRow = 1;
/// "I take over from this incarnation." At least 2^63.
inline std::uint64_t succession_row(const Incarnation& before) {
  return transfer_row(before);
}

/// What `incarnation` may count as its own, by the member's registries (null: not held).
Succession succession_of(const Incarnation& incarnation, const Cell* current, const Cell* before);

}  // namespace weir::crdt
