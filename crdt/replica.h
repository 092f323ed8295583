#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <weir/crdt/cell.h>
#include <weir/crdt/message.h>

namespace weir::crdt {

/// The total this node's current incarnation has consumed in one cell, as the limiter knows it.
struct OwnCount {
  CellId cell;
  std::uint64_t birth = 0;  ///< 0 for windowed cells, or which row (escrow.h)
  std::uint64_t value = 0;  ///< the whole total, not an increment
  BucketState bucket;       ///< buckets only
  bool urgent = false;      ///< reached a sync threshold of its limit: tell the peers at once
  bool tell = false;        ///< comes back in Outbox::durable
};

/// Numbers of durable writes, rising from 1 within one Replica.
using WriteId = std::uint64_t;

/// Something the disk must hold before the replica is told persisted(id).
struct Write {
  WriteId id = 0;
  Delta delta;
};

/// Index of a peer in ReplicaOptions::peers.
using PeerIndex = std::uint32_t;

struct Envelope {
  PeerIndex to = 0;
  Message message;
};

/// A bucket that had drained and was reset, and what it held of the current incarnation's slot; a
/// value of 0 if it held none.
struct ResetBucket {
  CellId id;
  Slot own;
  friend bool operator==(const ResetBucket&, const ResetBucket&) = default;
};

/// What a call to the replica asks its driver to do. The driver takes it whole.
struct Outbox {
  std::vector<Envelope> messages;
  std::vector<Write> writes;    ///< in order
  std::vector<CellId> changed;  ///< cells in which slots other than the current own ones grew
  /// Buckets that had drained and were reset: they hold less than before, so the limiter must
  /// forget too (Limiter::reset, before it absorbs what changed).
  std::vector<ResetBucket> reset_buckets;
  std::vector<OwnCount> durable;  ///< own counts that asked for it, and are durable now
  bool empty() const {
    return messages.empty() && writes.empty() && changed.empty() && reset_buckets.empty() &&
           durable.empty();
  }
};

enum class AlarmKind : std::uint8_t {
  own_slot_ahead,      ///< a peer holds a higher value of a slot that this incarnation owns
  duplicate_identity,  ///< two live sessions with one incarnation
  unconfirmed_relay,   ///< a peer said more of a live member's slot than that member ever showed
  too_many_cells,      ///< a peer has brought more cells than it may: these are not taken
};

struct Alarm {
  AlarmKind kind = AlarmKind::own_slot_ahead;
  PeerIndex peer = 0;  ///< who brought it
  friend bool operator==(const Alarm&, const Alarm&) = default;
};

struct ReplicaOptions {
  Member self;
  Incarnation incarnation;
  std::vector<Member> peers;                 ///< every other member of the cluster
  Nanos sync_interval = 250 * kMillisecond;  ///< own slots go to every peer this often, jittered
  Nanos anti_entropy_interval = 5 * kSecond;
  Nanos resend_after = 2 * kSecond;  ///< an unacknowledged push is sent again
  Nanos max_skew = kSecond;          ///< cells that start later than this ahead are refused
  /// Cells that anti-entropy sends in one call; it looks at up to 8 times as many. At least 1.
  std::size_t repair_piece = 2048;
  /// Own counts that enter the state at once, about, once they are durable.
  std::size_t enter_piece = 2048;
  std::uint64_t seed = 1;  ///< secret: jitter, and how tables are hashed
  /// Cells that a peer may have brought here and that are not over. What is beyond is not taken,
  /// and comes again by anti-entropy.
  std::size_t max_peer_cells = 20'000'000;
  /// Of them, such as live on for longer than Replica::set_longest() says.
  std::size_t max_long_cells = 65'536;
  LostWindows lost;  ///< what others hold of this member there is no sign of a lost disk
};

struct PeerStatus {
  Member member;
  Incarnation incarnation;    ///< zero: no session
  std::uint64_t acked = 0;    ///< stamps up to this are durable at the peer
  std::uint64_t unacked = 0;  ///< stamps the peer has not acknowledged
  Nanos caught_up_at = 0;     ///< last time everything this node had was known to be there
  Nanos heard_at = 0;         ///< last message
  bool agrees = false;        ///< the last digest round found nothing to repair
  /// Slots of live members that it relayed higher than these had shown: not taken from it.
  std::uint64_t withheld_slots = 0;
  std::uint64_t refused_cells = 0;  ///< beyond what it may bring: not taken, but acknowledged
};

struct ReplicaCounters {
  std::uint64_t pushes_sent = 0;
  std::uint64_t cells_sent = 0;
  std::uint64_t cells_received = 0;
  std::uint64_t late_cells = 0;     ///< below the floor: changed nothing, were acknowledged
  std::uint64_t future_cells = 0;   ///< beyond max_skew: refused
  std::uint64_t invalid_cells = 0;  ///< not valid(): refused
  std::uint64_t stale_acks = 0;
  std::uint64_t repaired_cells = 0;  ///< changed by anti-entropy
  std::uint64_t alarms = 0;
  std::uint64_t unwritten_cells = 0;  ///< as the disk was nearly full: see set_disk_short()
  /// Escrow rows of this member's other incarnations that a peer knew and this node did not. After
  /// a boot: its disk is not the one on which they were written.
  std::uint64_t elder_rows = 0;
  /// The same of counts in windows.
  std::uint64_t elder_counts = 0;
};

/// Of a live member's slot of a bucket a relay is believed below this: as many slots as a cell may
/// have do not add up to the largest number, which means more than was ever counted.
inline constexpr std::uint64_t kMostRelayedUnits = std::uint64_t{1} << 48;

/// One node's copy of the lattice, and the protocol that keeps copies equal. Sans-I/O: it is given
/// messages, time and disk completions, and returns messages and writes through take(). It starts
/// no thread, reads no clock, and is driven by one thread (not thread-safe).
///
/// Laws of docs/specification.md:
///  - An own count enters the state, and so may be sent, only after it is persisted (or at once
///  with
///    `memory_only`, where the incarnation dies with the process).
///  - A push is acknowledged only once what it changed is persisted.
///  - The floor (now - max_skew) only rises; cells below it are dropped by generation, and late
///    news about them changes nothing.
///  - Memory is bounded by live cells, whatever the peers do.
///  - Of an incarnation that speaks for itself, in the last three anti_entropy_intervals over a
///    session that has not ended since, no relay is believed: its slots grow by its own messages.
///    Of buckets relays are, below kMostRelayedUnits.
class Replica {
 public:
  /// `memory_only`: writes count as persisted when made, and none are put out.
  Replica(ReplicaOptions options, bool memory_only);
  ~Replica();
  Replica(const Replica&) = delete;
  Replica& operator=(const Replica&) = delete;

  /// What the disk held. Before anything else; or later, piece by piece, when a disk was opened
  /// again. Expired cells are skipped. Windows that begin much later than now, which a clock that
  /// was ahead has left, are kept aside until their time has come; buckets that were used later
  /// than now are skipped.
  void restore(const Delta& delta, Nanos now);

  /// New totals of the current incarnation. Returns the id of the write that makes them durable
  /// (0 in memory-only mode: nothing to wait for).
  WriteId count(std::span<const OwnCount> counts, Nanos now);

  /// Every write made so far, and every one that is durable.
  WriteId written() const;
  WriteId durable() const;

  /// All writes up to `upto` are durable.
  void persisted(WriteId upto, Nanos now);
  /// Own counts are durable that have not entered the state yet: some do with each persisted() and
  /// tick(), so that one call takes no longer than some milliseconds.
  bool behind_disk() const;

  /// A session to `peer` is up and its incarnation is known. Idempotent for the same incarnation.
  void peer_up(PeerIndex peer, const Incarnation& incarnation, Nanos now);
  void peer_down(PeerIndex peer);

  /// A message from `peer`'s incarnation `from`. Hostile content is refused and counted.
  void receive(PeerIndex peer, const Incarnation& from, const Message& message, Nanos now);

  /// A cell of any rule here is over so long from now at the latest. kMaxLifetime at first.
  void set_longest(Nanos life);
  /// The disk is nearly full: of what peers count, windows' and buckets' cells are kept in memory
  /// alone, and acknowledged all the same. Rows of escrow rules and own counts are written.
  void set_disk_short(bool is_short);
  /// Sends what is due, drops what has expired. Call a few times in each sync_interval.
  void tick(Nanos now);
  /// The limiter has forgotten every bucket that was over at `floor`, and everything it drained was
  /// handed in: such buckets may now be dropped here. Rises.
  void retire_buckets(Nanos floor);
  /// Sends everything unsent now instead of at the next interval.
  void flush(Nanos now);

  /// Where rewrite_some() goes on; anew, at the start.
  struct Place {
    Group group;
    std::uint64_t from = 0;
  };
  /// For a disk that may lack what is held: looks at about `most` cells from `place` on, and puts
  /// out a write of those that `lacks`. True once all were looked at that have been held all along:
  /// until then nothing is acknowledged, if this replica was without a disk before.
  bool rewrite_some(Place& place, std::size_t most, const std::function<bool(const Cell&)>& lacks);

  /// Continues under a fresh incarnation, without a disk if `memory_only`: after a failed sync or
  /// a tripwire. What was counted but never became durable is forgotten here; the limiter still
  /// has it and hands it in again under the new incarnation (Limiter::rebase).
  void reincarnate(const Incarnation& fresh, bool memory_only);

  Outbox take();

  /// Nothing if the cell is not held.
  std::optional<Cell> find(const CellId& id) const;
  /// The same without taking memory, if `into` was used before. False leaves it unspecified.
  bool read(const CellId& id, Cell& into) const;
  /// Every cell. In proportion to what is held, as nothing else here is: not for an event loop.
  void for_each(const std::function<void(const Cell&)>& visit) const;
  /// A cell that holds rows of an escrow rule, or is a registry of incarnations.
  bool has_rows(const CellId& id) const;
  /// Every such cell.
  void for_each_with_rows(const std::function<void(const Cell&)>& visit) const;
  /// Every incarnation that a held slot names, and the units that it consumed in all cells that are
  /// held, modulo 2^64.
  void for_each_writer(
      const std::function<void(const Incarnation&, std::uint64_t units)>& visit) const;
  std::size_t cell_count() const;
  /// Cells of windows that begin later, kept aside by restore().
  std::size_t early_cell_count() const;
  /// Memory that cells take.
  std::size_t cell_bytes() const;
  const ReplicaOptions& options() const;
  const Incarnation& incarnation() const;
  Nanos floor() const;
  std::vector<PeerStatus> peers() const;
  const ReplicaCounters& counters() const;
  std::vector<Alarm> take_alarms();
  const std::map<Incarnation, Member>& members() const;
  /// Digest of all live cells: equal states have equal digests.
  std::uint64_t digest() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace weir::crdt
