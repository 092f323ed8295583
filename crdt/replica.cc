#include <weir/crdt/replica.h>

#include <algorithm>
#include <deque>
#include <set>
#include <utility>

#include <absl/container/btree_map.h>
#include <absl/container/flat_hash_map.h>

#include <weir/crdt/anti_entropy.h>
#include <weir/crdt/cell_store.h>
#include <weir/crdt/delta_packer.h>
#include <weir/crdt/escrow.h>
#include <weir/crdt/peer_cells.h>
#include <weir/crdt/relayed_claims.h>
#include <weir/crdt/table_hash.h>

namespace weir::crdt {
namespace {

/// Enough for urgent pushes all the time over a round trip and a commit of 600 ms.
constexpr std::size_t kMaxPushesInFlight = 64;
constexpr Nanos kUrgentSpacing = 10 * kMillisecond;
constexpr unsigned kQuickRounds = 20;
constexpr Nanos kForgetMembersEvery = 10 * kMinute;
/// Cells that are dropped in a tick, buckets and windows, so that no tick takes long.
constexpr unsigned kBucketsPerTick = 1024;
constexpr std::size_t kFreedPerTick = 4096;
constexpr std::size_t kLookedPerPush = 2 * kMaxDeltaCells;
/// Cells that were kept aside join the others so many max_skew before their windows begin: before
/// rights of these are transferred (EscrowAgent).
constexpr Nanos kJoinAhead = 10;
constexpr std::size_t kJoinedPerTick = 1024;
/// Anti-entropy intervals for which a member that was heard counts as live: each it offers digests.
constexpr Nanos kLiveFor = 3;
/// And after which a live member has shown all that it had when a relay spoke of it, unless it is
/// still bringing this node up to date.
constexpr Nanos kConfirmsWithin = 6;
/// Pieces of answers that a peer's messages may have at once, and how often one more. What it asks
/// for beyond that waits for ticks.
constexpr Nanos kPieceEvery = 10 * kMillisecond;
constexpr Nanos kPiecesAtOnce = 32;
/// A cell that has so many slots takes no more from peers than those of the peer itself: what a
/// message costs grows with the slots of its cells.
constexpr std::size_t kMostSlots = 16'384;

struct CellOf {
  const CellId& operator()(const OwnCount& own) const { return own.cell; }
  const CellId& operator()(const Cell& cell) const { return cell.id; }
};

struct Pending {
  WriteId write = 0;
  std::vector<OwnCount> counts;
};

struct PendingAck {
  WriteId write = 0;
  PeerIndex peer = 0;
  Ack ack;
};

struct Peer {
  Member member;
  Incarnation incarnation;  // zero: never met
  bool up = false;
  std::uint64_t base = 0;  // where the stream to this incarnation starts
  std::uint64_t acked = 0;
  std::uint64_t sent = 0;
  std::deque<std::uint64_t> in_flight;
  Nanos sent_at = 0;
  bool truncated = false;  // the last push stopped at its bound
  Incarnation inbound;     // whose stream `received` counts
  std::uint64_t received = 0;
  std::uint64_t round = 0;
  Nanos next_offer = 0;
  unsigned quick_rounds = 0;
  bool agrees = false;
  Nanos caught_up_at = 0;
  Nanos heard_at = 0;
  Incarnation speaker;  // whose the last message was; none: the session ended since
  Nanos spoke_at = 0;
  std::uint64_t repaired = 0;  // cells that its repairs changed
  std::uint64_t withheld = 0;
  std::uint64_t refused = 0;   // cells
  std::uint64_t answered = 0;  // the last round of an inventory that was looked at
  Nanos worked_until = 0;      // by answers to its messages, see repair_now()
};

/// Of a message: who says it, and when it came.
struct Source {
  PeerIndex peer = 0;
  Incarnation from;
  Nanos now = 0;
};

}  // namespace

std::uint64_t cell_key(const CellId& id) {
  return mix64(mix64(mix64(id.series.hi, id.series.lo), static_cast<std::uint64_t>(id.epoch.start)),
               static_cast<std::uint64_t>(id.epoch.expiry));
}

struct Replica::Impl {
  ReplicaOptions options;
  bool memory_only;
  bool disk_lacks = false;  // a disk was put under what memory holds: see rewrite_some()
  CellStore cells;
  // By stamp: the cells whose own slot grew, except those that every peer has. All stamps above
  // stream_floor are here, and none below.
  absl::btree_map<std::uint64_t, RecordRef> stream;
  std::uint64_t stream_floor = 0;
  std::uint64_t head = 0;                          // newest stamp
  std::uint64_t acked_by_all = ~std::uint64_t{0};  // of the peers ever met
  std::map<Incarnation, Member> members;
  std::vector<Peer> peers;
  AntiEntropy anti_entropy;
  PeerIndex repaired = 0;  // the peer that work for it was last done for in a tick
  std::deque<Pending> pending;
  // Buckets: own counts that wait for the disk; while any does, the bucket is kept.
  absl::flat_hash_map<CellId, unsigned, TableHash> pending_buckets;
  // Buckets that were reset: own counts up to this write may count slots that were forgotten since.
  // Kept until all these are durable.
  absl::flat_hash_map<CellId, WriteId, TableHash> reset_at;
  std::deque<std::pair<WriteId, CellId>> resets;  // in order
  std::deque<PendingAck> pending_acks;
  /// Windows that a clock which was ahead has counted in, by when they begin. No peer takes them
  /// yet, so they are compared with none.
  std::multimap<Nanos, Cell> early;
  WriteId last_write = 0;
  WriteId last_persisted = 0;
  Nanos floor = 0;
  Nanos bucket_floor = 0;
  Nanos next_sync = 0;
  Nanos last_sync = 0;
  Nanos next_forget = 0;
  std::uint64_t random;
  mutable HeldCell held;  // working memory
  Outbox outbox;
  std::vector<Alarm> alarms;
  std::uint64_t own_slots_ahead = 0;  // shown by peers
  PeerCells peer_cells;
  std::set<SeriesId> registries;  // of the cluster's members
  Nanos longest = kMaxLifetime;
  bool disk_short = false;
  RelayedClaims claims;
  Nanos next_claims = 0;
  ReplicaCounters counters;

  Impl(ReplicaOptions given, bool memory)
      : options(std::move(given)),
        memory_only(memory),
        cells(options.seed, options.incarnation),
        anti_entropy(cells, members, options.peers.size(), options.repair_piece, options.seed),
        pending_buckets(0, TableHash(options.seed)),
        reset_at(0, TableHash(options.seed)),
        random(options.seed),
        peer_cells(options.peers.size(), options.max_peer_cells, options.max_long_cells) {
    members.emplace(options.incarnation, options.self);
    registries.insert(registry_cell(options.self, 0).series);
    for (const Member& member : options.peers) {
      registries.insert(registry_cell(member, 0).series);
      peers.emplace_back();
      peers.back().member = member;
    }
  }

  std::uint64_t next_random() {
    random = mix64(random + 0x9E3779B97F4A7C15ull, 0xD1B54A32D192ED03ull);
    return random;
  }

  /// interval * [0.9, 1.1)
  Nanos jittered(Nanos interval) {
    auto spread = static_cast<std::uint64_t>(interval / 5 + 1);
    return interval - interval / 10 + static_cast<Nanos>(next_random() % spread);
  }

  /// Joins a part of the cell that was read last into the state. `ref` is the cell's, or 0 if there
  /// is none yet; then there will be. True if anything changed.
  bool apply(RecordRef& ref, std::span<const Slot> slots, const BucketState& bucket,
             const SlotId* own = nullptr) {
    RecordRef before = ref;
    bool changed = cells.join(ref, held, slots, bucket, own);
    moved(before, ref);
    return changed;
  }

  /// Reads the cell, as far as it is held.
  RecordRef read(const CellId& id) {
    RecordRef ref = cells.find(id);
    cells.read(ref, id, held);
    return ref;
  }

  /// The record of a cell is elsewhere, or its first.
  void moved(RecordRef from, RecordRef to) {
    if (from == 0 || from == to || cells.stamp(to) <= stream_floor) return;
    stream.find(cells.stamp(to))->second = to;
  }

  bool over(const CellId& id, const BucketState& bucket) const {
    return id.is_bucket() ? bucket.expiry <= floor : generation_of(id.epoch).end() <= floor;
  }

  bool too_early(const Cell& cell, Nanos now) const {
    Nanos first = cell.id.is_bucket() ? cell.bucket.touched : cell.id.epoch.start;
    return first > now + options.max_skew;
  }

  Slot own_slot(const OwnCount& count) const {
    return {{options.incarnation, count.birth}, count.value};
  }

  WriteId put_write(Delta delta) {
    WriteId id = ++last_write;
    if (memory_only) {
      last_persisted = id;
    } else {
      outbox.writes.push_back({id, std::move(delta)});
    }
    return id;
  }

  WriteId count(std::span<const OwnCount> counts) {
    if (memory_only) {
      cells.for_each_ahead(counts, CellOf(),
                           [this](const OwnCount& own) { apply_own(own, ~WriteId{0}); });
      return 0;
    }
    DeltaPacker packer(members);
    cells.for_each_ahead(counts, CellOf(), [&](const OwnCount& own) {
      if (own.cell.is_bucket()) ++pending_buckets[own.cell];
      packer.add(written_of(own));
    });
    WriteId id = put_write(packer.take());
    pending.push_back({id, {counts.begin(), counts.end()}});
    return id;
  }

  /// What goes to the disk of an own count. A bucket's checkpoint is written together with every
  /// slot it counted.
  Cell written_of(const OwnCount& own) const {
    Cell cell;
    RecordRef ref = own.cell.is_bucket() ? cells.find(own.cell) : 0;
    if (ref != 0) {
      cells.read(ref, held);
      cell = held.cell;
    }
    cell.id = own.cell;
    Slot slot = own_slot(own);
    join(cell, {&slot, 1}, own.bucket);
    return cell;
  }

  /// An own count of a bucket waits for the disk no longer.
  void arrived(const OwnCount& own) {
    auto at = pending_buckets.find(own.cell);
    if (--at->second == 0) pending_buckets.erase(at);
  }

  void apply_own(const OwnCount& own, WriteId write) {
    BucketState bucket = own.bucket;
    if (over(own.cell, bucket)) {
      ++counters.late_cells;
      return;
    }
    RecordRef ref = read(own.cell);
    Slot slot = own_slot(own);
    std::span<const Slot> slots(&slot, own.value > 0 ? 1 : 0);
    std::optional<ResetBucket> was;
    if (ref != 0) was = forget_if_reborn(ref, slots);
    if (was || may_count_forgotten(own.cell, write)) {
      // Its checkpoint may count slots that are gone; it surely counts the own one.
      std::uint64_t& counted = bucket.checkpoint.counted;
      counted = std::min(counted, own.value);
    }
    bool changed = apply(ref, slots, bucket, &slot.id);
    if (was) reset(*was);
    if (changed || was) enter_stream(ref);
    if (own.urgent) next_sync = std::min(next_sync, last_sync + kUrgentSpacing);
    if (own.tell) outbox.durable.push_back(own);
  }

  bool may_count_forgotten(const CellId& id, WriteId write) const {
    if (reset_at.empty()) return false;
    auto at = reset_at.find(id);
    return at != reset_at.end() && write <= at->second;
  }

  void leave_stream(std::uint64_t stamp) {
    if (stamp > stream_floor) stream.erase(stamp);
  }

  /// At its head, and out again at its tail with what nobody waits for: two for each that enters,
  /// so that the stream shrinks and no call takes long.
  void enter_stream(RecordRef ref) {
    leave_stream(cells.stamp(ref));
    cells.set_stamp(ref, ++head);
    if (acked_by_all >= head) {
      stream_floor = head;
      return;
    }
    stream.emplace_hint(stream.end(), head, ref);
    for (int i = 0; i < 2 && stream.begin()->first <= acked_by_all; ++i) {
      stream_floor = stream.begin()->first;
      stream.erase(stream.begin());
    }
  }

  /// A peer that was never met gets no stream from before.
  void find_acked_by_all() {
    acked_by_all = ~std::uint64_t{0};
    for (const Peer& peer : peers) {
      if (peer.incarnation) acked_by_all = std::min(acked_by_all, peer.acked);
    }
  }

  /// A slot born after a bucket was over resets it: what the bucket held has drained, and its
  /// checkpoint would leave the new units uncounted. Returns what it was, if it was forgotten. Of
  /// the cell that was read last.
  std::optional<ResetBucket> forget_if_reborn(RecordRef& ref, std::span<const Slot> slots) {
    if (!held.cell.id.is_bucket()) return std::nullopt;
    auto over = static_cast<std::uint64_t>(held.cell.bucket.expiry);
    if (std::all_of(slots.begin(), slots.end(),
                    [over](const Slot& slot) { return slot.id.birth < over; })) {
      return std::nullopt;
    }
    ResetBucket was{held.cell.id, {}};
    if (held.own.writer == options.incarnation) {
      was.own = {held.own, held.cell.value_of(held.own)};
    }
    leave_stream(cells.stamp(ref));
    cells.clear(ref);
    cells.read(ref, held);
    return was;
  }

  void reset(const ResetBucket& was) {
    if (!memory_only) {
      reset_at[was.id] = last_write;
      resets.emplace_back(last_write, was.id);
    }
    outbox.reset_buckets.push_back(was);
  }

  void persisted(WriteId upto, Nanos now) {
    last_persisted = std::max(last_persisted, std::min(upto, last_write));
    enter_durable(options.enter_piece);
    send_acks();
    if (next_sync <= now) sync(now);
  }

  /// Own counts that are durable by now.
  bool behind_disk() const { return !pending.empty() && pending.front().write <= last_persisted; }

  /// They enter the state, whole writes of about `most`: one commit may make many durable. The
  /// others wait for the next tick.
  void enter_durable(std::size_t most) {
    for (std::size_t entered = 0; behind_disk() && entered < most; pending.pop_front()) {
      const std::vector<OwnCount>& counts = pending.front().counts;
      entered += counts.size();
      cells.for_each_ahead(std::span(counts), CellOf(), [this](const OwnCount& own) {
        if (own.cell.is_bucket()) arrived(own);
        apply_own(own, pending.front().write);
      });
    }
    // A reset concerns own counts of writes before it, so not before these.
    const WriteId done = behind_disk() ? pending.front().write - 1 : last_persisted;
    for (; !resets.empty() && resets.front().first <= done; resets.pop_front()) {
      auto at = reset_at.find(resets.front().second);
      if (at != reset_at.end() && at->second == resets.front().first) reset_at.erase(at);
    }
  }

  void send_acks() {
    while (!pending_acks.empty() && pending_acks.front().write <= last_persisted) {
      PendingAck& next = pending_acks.front();
      if (peers[next.peer].up) outbox.messages.push_back({next.peer, next.ack});
      pending_acks.pop_front();
    }
  }

  // Sending.

  /// What a push carries that begins behind `after`.
  struct Batch {
    std::uint64_t after = 0;
    std::uint64_t upto = 0;
    bool truncated = false;
    Delta delta;
  };

  Batch batch_behind(std::uint64_t after) {
    constexpr int kAhead = 8;
    Batch batch{after, after, false, {}};
    DeltaPacker packer(members);
    auto at = stream.upper_bound(after);
    auto ahead = at;  // these records' memory is on its way
    auto fetch_one = [&] {
      if (ahead != stream.end()) cells.prefetch((ahead++)->second);
    };
    for (int i = 0; i < kAhead; ++i) fetch_one();
    for (std::size_t looked = 0; at != stream.end() && looked < kLookedPerPush; ++at, ++looked) {
      fetch_one();
      cells.read(at->second, held);
      // What has ended stays in the stream until it is freed.
      if (!over(held.cell.id, held.cell.bucket)) {
        Cell cell = outgoing(held.cell);
        if (!packer.fits(cell)) break;
        packer.add(std::move(cell));
      }
      batch.upto = at->first;
    }
    batch.truncated = at != stream.end();
    // Nothing behind the last cell: the stamps up to the head were renewed or have expired.
    if (!batch.truncated) batch.upto = head;
    batch.delta = packer.take();
    return batch;
  }

  void sync(Nanos now) {
    std::optional<Batch> batch;  // peers that have the same get the same
    for (PeerIndex i = 0; i < peers.size(); ++i) push(i, batch, now);
    last_sync = now;
    next_sync = now + jittered(options.sync_interval);
  }

  /// `batch`: one that was made since anything changed, or nothing.
  void push(PeerIndex index, std::optional<Batch>& batch, Nanos now) {
    Peer& peer = peers[index];
    if (!peer.up) return;
    if (!peer.in_flight.empty() && now - peer.sent_at >= options.resend_after) {
      peer.in_flight.clear();
      peer.sent = peer.acked;
    }
    if (peer.sent == head || peer.in_flight.size() >= kMaxPushesInFlight) return;
    if (!batch || batch->after != peer.sent) batch = batch_behind(peer.sent);
    peer.truncated = batch->truncated;
    Push message;
    message.pusher = options.incarnation;
    message.after = peer.sent;
    message.upto = batch->upto;
    message.base = peer.sent == peer.base;
    message.delta = batch->delta;
    ++counters.pushes_sent;
    counters.cells_sent += message.delta.cells.size();
    outbox.messages.push_back({index, std::move(message)});
    peer.sent = batch->upto;
    peer.in_flight.push_back(peer.sent);
    peer.sent_at = now;
  }

  /// What the stream carries of a cell: the own slots, or a bucket with everything it counted.
  Cell outgoing(const Cell& cell) const {
    if (cell.id.is_bucket()) return cell;
    Cell own;
    own.id = cell.id;
    for (const Slot& slot : cell.slots) {
      if (slot.id.writer == options.incarnation) own.slots.push_back(slot);
    }
    return own;
  }

  void offer(PeerIndex index, Nanos now) {
    Peer& peer = peers[index];
    peer.next_offer = now + jittered(options.anti_entropy_interval);
    outbox.messages.push_back({index, anti_entropy.offer(floor, ++peer.round)});
  }

  /// The next piece of the answers to this peer: a small answer is whole at once, of a large one
  /// the rest follows in ticks. True if there is more to do.
  bool repair(PeerIndex index) {
    return anti_entropy.work(index, [&](auto message) {
      outbox.messages.push_back({index, std::move(message)});
    });
  }

  /// The first piece of an answer, as a message came: unless there were many such.
  void repair_now(PeerIndex index, Nanos now) {
    const Nanos until = std::max(peers[index].worked_until, now) + kPieceEvery;
    if (until - now > kPiecesAtOnce * kPieceEvery) return;
    peers[index].worked_until = until;
    repair(index);
  }

  // Receiving.

  struct Merged {
    Delta written;
    std::size_t changed = 0;
    Incarnation learned;  // the last whose name was looked up
  };

  Merged merge(const Delta& delta, const Source& source) {
    Merged merged;
    const std::uint64_t refused = peers[source.peer].refused;
    cells.for_each_ahead(std::span(delta.cells), CellOf(), [&](const Cell& cell) {
      ++counters.cells_received;
      if (!valid(cell)) {
        ++counters.invalid_cells;
      } else if (too_early(cell, source.now)) {
        ++counters.future_cells;
      } else if (over(cell.id, cell.bucket)) {
        ++counters.late_cells;
      } else if (std::optional<Cell> grown = merge_cell(cell, source)) {
        accept(std::move(*grown), delta, merged);
      }
    });
    if (peers[source.peer].refused > refused) alarm(AlarmKind::too_many_cells, source.peer);
    return merged;
  }

  void accept(Cell grown, const Delta& delta, Merged& merged) {
    ++merged.changed;
    for (const Slot& slot : grown.slots) {
      if (slot.id.writer != merged.learned) learn(slot.id.writer, delta, merged.written);
      merged.learned = slot.id.writer;
      if (is_elder(grown.id, slot.id)) {
        const bool count = slot.id.birth == 0 || slot.id.birth == kBackRow;
        ++(count ? counters.elder_counts : counters.elder_rows);
      }
    }
    outbox.changed.push_back(grown.id);
    if (memory_only) return;
    if (disk_short && !cells.with_rows().contains(grown.id)) {
      ++counters.unwritten_cells;
      return;
    }
    merged.written.cells.push_back(std::move(grown));
  }

  /// Of a window, and written by another incarnation of this member.
  bool is_elder(const CellId& cell, const SlotId& slot) const {
    if (cell.is_bucket() || slot.writer == options.incarnation) return false;
    if (options.lost.has(cell.epoch)) return false;
    auto member = members.find(slot.writer);
    return member != members.end() && member->second == options.self;
  }

  void learn(const Incarnation& writer, const Delta& delta, Delta& written) {
    auto named = delta.members.find(writer);
    if (named != delta.members.end()) members.insert(*named);
    auto known = members.find(writer);
    if (known != members.end()) written.members.insert(*known);
  }

  /// Longer than any rule here would have it, and no registry of the cluster's.
  bool lives_long(const CellId& id, Nanos end, Nanos now) const {
    return end - now > longest && !registries.contains(id.series);
  }

  /// When a cell is over, and is forgotten.
  static Nanos end_of(const CellId& id, const BucketState& bucket) {
    if (!id.is_bucket()) return generation_of(id.epoch).end();
    return generation_of({bucket.touched, bucket.expiry + 1}).end();
  }

  /// The cell that was read last has few enough slots to take this one.
  bool fits(const Slot& slot, std::size_t more, const Source& source) {
    const bool few = held.cell.slots.size() + more < kMostSlots;
    if (few || slot.id.writer == source.from || held.cell.value_of(slot.id) > 0) return true;
    ++peers[source.peer].refused;
    return false;
  }

  /// There is room for this peer's cell: it is held already, or the peer may bring one more.
  bool has_room(RecordRef ref, const Cell& cell, const Source& source) {
    const bool lives = lives_long(cell.id, cell.expiry(), source.now);
    // A bucket may be held for longer than when it came.
    const bool longer = cell.id.is_bucket() && lives && held.cell.bucket.expiry < cell.expiry();
    if (ref != 0 && !longer) return true;
    if (peer_cells.take(source.peer, lives, end_of(cell.id, cell.bucket))) return true;
    ++peers[source.peer].refused;
    return false;
  }

  /// The member that speaks for itself as this incarnation, or null.
  const Peer* live_as(const Incarnation& writer, Nanos now) const {
    for (const Peer& peer : peers) {
      if (peer.speaker != writer) continue;
      return now - peer.spoke_at <= kLiveFor * options.anti_entropy_interval ? &peer : nullptr;
    }
    return nullptr;
  }

  /// False if it is for somebody else to say that this slot grew so far, who will. Of a bucket a
  /// relay is believed as its checkpoint is, which counts these slots and is wrong without them:
  /// what either claims too much is drained in time (law 21). Only what no time drains is not.
  bool believes(const CellId& cell, const Slot& slot, const Source& source) {
    if (slot.id.writer == source.from) return true;
    if (cell.is_bucket() && slot.value < kMostRelayedUnits) return true;
    const Peer* owner = live_as(slot.id.writer, source.now);
    if (owner == nullptr) return true;
    ++peers[source.peer].withheld;
    claims.note(cell, slot,
                {source.peer, static_cast<PeerIndex>(owner - peers.data()), 0, source.now,
                 owner->repaired});
    return false;
  }

  /// Joins one cell from a peer. Returns what must be written: the slots that grew, or the bucket.
  std::optional<Cell> merge_cell(const Cell& cell, const Source& source) {
    RecordRef ref = read(cell.id);
    Cell grown;
    grown.id = cell.id;
    bool whole = true;
    for (const Slot& slot : cell.slots) {
      if (slot.value <= held.cell.value_of(slot.id)) continue;
      if (slot.id.writer == options.incarnation && owns(slot.id, held.own)) {
        alarm(AlarmKind::own_slot_ahead, source.peer);
        ++own_slots_ahead;
        return std::nullopt;  // the driver takes a new incarnation; a later repair brings this back
      }
      if (believes(cell.id, slot, source) && fits(slot, grown.slots.size(), source)) {
        grown.slots.push_back(slot);
      } else {
        whole = false;
      }
    }
    if (grown.slots.empty() && (!whole || !cell.id.is_bucket())) return std::nullopt;
    if (!has_room(ref, cell, source)) return std::nullopt;
    if (cell.id.is_bucket()) {
      if (whole) return merge_bucket(ref, cell.slots, cell.bucket);
      // The checkpoint counts units that are not known here yet: what came beside them is taken as
      // consumed at the last touch until a checkpoint comes that counts no more than is known.
      return merge_bucket(ref, grown.slots, {{}, cell.bucket.touched, cell.bucket.expiry});
    }
    apply(ref, grown.slots, {});
    return grown;
  }

  std::optional<Cell> merge_bucket(RecordRef ref, std::span<const Slot> slots,
                                   const BucketState& bucket) {
    // What waits for the disk was counted on top of what is here.
    bool free = ref != 0 && !pending_buckets.contains(held.cell.id);
    std::optional<ResetBucket> was;
    if (free) was = forget_if_reborn(ref, slots);
    bool changed = apply(ref, slots, bucket);
    if (was) reset(*was);
    if (!changed) return std::nullopt;
    return held.cell;
  }

  void alarm(AlarmKind kind, PeerIndex peer) {
    ++counters.alarms;
    alarms.push_back({kind, peer});
  }

  /// False for a bucket slot made before the last time this bucket was dropped: its value is known
  /// to nobody but the peers any more. `own`: the slot that this incarnation counts in.
  static bool owns(const SlotId& slot, const SlotId& own) {
    return is_row(slot.birth) || own == slot;
  }

  void receive(PeerIndex index, const Incarnation& from, const Message& message, Nanos now) {
    if (index >= peers.size()) return;
    peers[index].heard_at = peers[index].spoke_at = now;
    peers[index].speaker = from;
    std::visit([&](const auto& m) { on(index, from, m, now); }, message);
  }

  void on(PeerIndex index, const Incarnation& from, const Push& message, Nanos now) {
    if (message.pusher != from || message.upto < message.after) {
      ++counters.invalid_cells;
      return;
    }
    Peer& peer = peers[index];
    const std::uint64_t ahead = own_slots_ahead;
    Merged merged = merge(message.delta, {index, from, now});
    WriteId write = merged.changed > 0 ? put_write(std::move(merged.written)) : last_write;
    // Overtaken by its successor's session: its stream is over, and must not reset the other's.
    if (from != peer.incarnation) return;
    if (peer.inbound != from) {
      peer.inbound = from;
      peer.received = 0;
    }
    // Refused in part, or something before it is missing, or what memory has of it may not be on
    // the disk: nothing of it may be acknowledged.
    if (own_slots_ahead > ahead || disk_lacks) return;
    if (!message.base && message.after > peer.received) return;
    peer.received = std::max(peer.received, message.upto);
    pending_acks.push_back({write, index, Ack{from, options.incarnation, peer.received}});
    send_acks();
  }

  void on(PeerIndex index, const Incarnation& from, const Ack& message, Nanos now) {
    Peer& peer = peers[index];
    if (message.pusher != options.incarnation || message.receiver != from ||
        from != peer.incarnation || message.upto > head || message.upto < peer.base) {
      ++counters.stale_acks;
      return;
    }
    if (message.upto > peer.acked) {
      peer.acked = message.upto;
      find_acked_by_all();
    }
    peer.sent = std::max(peer.sent, peer.acked);
    while (!peer.in_flight.empty() && peer.in_flight.front() <= peer.acked) {
      peer.in_flight.pop_front();
    }
    if (peer.acked == head) peer.caught_up_at = now;
    std::optional<Batch> batch;
    if (peer.truncated) push(index, batch, now);
  }

  // Of escrow rules, which are not the replica's business.
  void on(PeerIndex, const Incarnation&, const RightsRequest&, Nanos) {}
  void on(PeerIndex, const Incarnation&, const RejoinRequest&, Nanos) {}
  void on(PeerIndex, const Incarnation&, const RejoinConfirmation&, Nanos) {}

  void on(PeerIndex index, const Incarnation&, const DigestOffer& message, Nanos now) {
    anti_entropy.on(index, message, floor);
    repair_now(index, now);
  }

  void on(PeerIndex index, const Incarnation& from, const Inventory& message, Nanos now) {
    Peer& peer = peers[index];
    if (from != peer.incarnation || message.round != peer.round) return;
    // One answer to each offer.
    if (std::exchange(peer.answered, message.round) == message.round) return;
    peer.agrees = message.groups.empty() && !message.more;
    if (peer.agrees) {
      peer.quick_rounds = 0;
      return;
    }
    if (peer.quick_rounds > 0) {
      --peer.quick_rounds;
      peer.next_offer = std::min(peer.next_offer, now + options.sync_interval);
    }
    anti_entropy.on(index, message);
    repair_now(index, now);
  }

  void on(PeerIndex index, const Incarnation& from, const Repair& message, Nanos now) {
    Merged merged = merge(message.delta, {index, from, now});
    counters.repaired_cells += merged.changed;
    peers[index].repaired += merged.changed;
    if (merged.changed > 0) {
      put_write(std::move(merged.written));
      // There may be more where that came from.
      Peer& peer = peers[index];
      peer.next_offer = std::min(peer.next_offer, now + options.sync_interval);
    }
    if (message.wants.empty()) return;
    anti_entropy.on_wanted(index, message.wants);
    repair_now(index, now);
  }

  // Time.

  void restore(const Cell& cell, Nanos now) {
    if (!valid(cell) || over(cell.id, cell.bucket)) return;
    if (cell.id.is_bucket()) {
      // Used when the clock was ahead. When that was nobody knows; it begins anew.
      if (too_early(cell, now)) return;
    } else if (cell.id.epoch.start > now + kJoinAhead * options.max_skew) {
      early.emplace(cell.id.epoch.start, cell);
      return;
    }
    RecordRef ref = read(cell.id);
    if (ref == 0 && lives_long(cell.id, cell.expiry(), now)) {
      peer_cells.found(end_of(cell.id, cell.bucket));
    }
    apply(ref, cell.slots, cell.bucket);
    outbox.changed.push_back(cell.id);
  }

  void join_early(Nanos now) {
    for (std::size_t i = 0; i < kJoinedPerTick && !early.empty(); ++i) {
      auto first = early.begin();
      if (first->first > now + kJoinAhead * options.max_skew) return;
      restore(first->second, now);
      early.erase(first);
    }
  }

  void tick(Nanos now) {
    if (behind_disk()) enter_durable(options.enter_piece);
    expire(now);
    join_early(now);
    if (now >= next_sync) sync(now);
    for (PeerIndex i = 0; i < peers.size(); ++i) {
      Peer& peer = peers[i];
      if (!peer.up) continue;
      if (peer.acked == head) peer.caught_up_at = now;
      if (now >= peer.next_offer && !anti_entropy.busy(i)) offer(i, now);
    }
    for (std::size_t i = 0; i < peers.size(); ++i) {
      repaired = static_cast<PeerIndex>((repaired + 1) % peers.size());
      if (peers[repaired].up && repair(repaired)) break;
    }
    if (now >= next_claims) {
      check_claims(now);
      next_claims = now + options.anti_entropy_interval / 2;
    }
    if (now >= next_forget && early.empty()) {
      forget_members();
      next_forget = now + kForgetMembersEvery;
    }
  }

  /// Looks for claims that members had the time to confirm, and have not: at most one alarm a
  /// relay.
  void check_claims(Nanos now) {
    std::set<PeerIndex> liars;
    claims.erase_if([&](const CellId& id, const SlotId& slot, const RelayedClaims::Claim& claim) {
      const Peer& owner = peers[claim.owner];
      if (live_as(slot.writer, now) != &owner) return true;
      if (owner.repaired - claim.repaired > kMaxDeltaCells) return true;
      read(id);
      const std::uint64_t value = held.cell.value_of(slot);
      // Of a bucket that was forgotten on the way nobody has anything to show.
      if (value >= claim.value || over(id, held.cell.bucket)) return true;
      if (id.is_bucket() && value == 0) return true;
      if (now - claim.since < kConfirmsWithin * options.anti_entropy_interval) return false;
      liars.insert(claim.relay);
      return true;
    });
    for (PeerIndex relay : liars) alarm(AlarmKind::unconfirmed_relay, relay);
  }

  void expire(Nanos now) {
    floor = std::max(floor, now - options.max_skew);
    cells.end(floor);
    peer_cells.end(floor);
    cells.free_ended(kFreedPerTick,
                     [this](std::uint64_t stamp, RecordRef) { leave_stream(stamp); });
    // Buckets end one by one.
    for (unsigned i = 0; i < kBucketsPerTick; ++i) {
      RecordRef ref = cells.take_due_bucket(bucket_floor);
      if (ref == 0) break;
      cells.read(ref, held);
      Nanos end = held.cell.bucket.expiry;
      if (end > bucket_floor || pending_buckets.contains(held.cell.id)) {
        cells.put_bucket(ref, std::max(end, bucket_floor));
        continue;
      }
      leave_stream(cells.stamp(ref));
      cells.drop_bucket(ref);
    }
  }

  void forget_members() {
    std::erase_if(members, [this](const auto& each) {
      const Incarnation& id = each.first;
      return id != options.incarnation && !cells.writers().used(id) &&
             std::none_of(peers.begin(), peers.end(),
                          [&](const Peer& peer) { return peer.incarnation == id; });
    });
  }
};

Replica::Replica(ReplicaOptions options, bool memory_only)
    : impl_(std::make_unique<Impl>(std::move(options), memory_only)) {}

Replica::~Replica() = default;

void Replica::restore(const Delta& delta, Nanos now) {
  impl_->floor = std::max(impl_->floor, now - impl_->options.max_skew);
  for (const auto& named : delta.members) impl_->members.insert(named);
  impl_->cells.for_each_ahead(std::span(delta.cells), CellOf(),
                              [&](const Cell& cell) { impl_->restore(cell, now); });
}

WriteId Replica::count(std::span<const OwnCount> counts, Nanos now) {
  WriteId id = impl_->count(counts);
  if (impl_->memory_only && impl_->next_sync <= now) impl_->sync(now);
  return id;
}

WriteId Replica::written() const {
  return impl_->last_write;
}
WriteId Replica::durable() const {
  return impl_->last_persisted;
}
bool Replica::behind_disk() const {
  return impl_->behind_disk();
}

void Replica::persisted(WriteId upto, Nanos now) {
  impl_->persisted(upto, now);
}

void Replica::peer_up(PeerIndex index, const Incarnation& incarnation, Nanos now) {
  if (index >= impl_->peers.size()) return;
  bool duplicate = incarnation == impl_->options.incarnation;
  for (PeerIndex i = 0; i < impl_->peers.size(); ++i) {
    duplicate |= i != index && impl_->peers[i].up && impl_->peers[i].incarnation == incarnation;
  }
  if (duplicate) impl_->alarm(AlarmKind::duplicate_identity, index);
  Peer& peer = impl_->peers[index];
  bool fresh = peer.incarnation != incarnation;
  if (peer.up && !fresh) return;
  peer.up = true;
  peer.heard_at = now;
  peer.in_flight.clear();
  if (fresh) {
    // What this incarnation may lack of the past comes by anti-entropy, beside the live stream.
    peer.incarnation = incarnation;
    peer.base = peer.acked = impl_->head;
    impl_->find_acked_by_all();
  }
  peer.sent = peer.acked;
  peer.agrees = false;
  peer.quick_rounds = kQuickRounds;
  peer.next_offer = now;
}

void Replica::peer_down(PeerIndex index) {
  if (index >= impl_->peers.size()) return;
  Peer& peer = impl_->peers[index];
  peer.up = false;
  peer.agrees = false;
  peer.speaker = {};
  peer.in_flight.clear();
  peer.sent = peer.acked;
  impl_->anti_entropy.forget(index);
}

void Replica::receive(PeerIndex peer, const Incarnation& from, const Message& message, Nanos now) {
  impl_->receive(peer, from, message, now);
}

void Replica::tick(Nanos now) {
  impl_->tick(now);
}

void Replica::set_longest(Nanos life) {
  impl_->longest = life;
}

void Replica::set_disk_short(bool is_short) {
  impl_->disk_short = is_short;
}

void Replica::retire_buckets(Nanos floor) {
  impl_->bucket_floor = std::max(impl_->bucket_floor, floor);
}

void Replica::flush(Nanos now) {
  impl_->sync(now);
}

void Replica::reincarnate(const Incarnation& fresh, bool memory_only) {
  impl_->enter_durable(std::numeric_limits<std::size_t>::max());
  impl_->stream.clear();
  impl_->stream_floor = impl_->head;
  impl_->pending_buckets.clear();
  impl_->reset_at.clear();
  impl_->resets.clear();
  impl_->pending.clear();
  impl_->pending_acks.clear();
  impl_->outbox.writes.clear();
  impl_->options.incarnation = fresh;
  impl_->disk_lacks = !memory_only && (impl_->memory_only || impl_->disk_lacks);
  impl_->memory_only = memory_only;
  if (memory_only) impl_->last_persisted = impl_->last_write;
  impl_->members.emplace(fresh, impl_->options.self);
  for (PeerIndex i = 0; i < impl_->peers.size(); ++i) {
    peer_down(i);
    impl_->peers[i].incarnation = {};
  }
  impl_->find_acked_by_all();
}

Outbox Replica::take() {
  return std::exchange(impl_->outbox, {});
}

std::optional<Cell> Replica::find(const CellId& id) const {
  HeldCell held;
  RecordRef ref = impl_->cells.find(id);
  if (ref == 0) return std::nullopt;
  impl_->cells.read(ref, held);
  return std::move(held.cell);
}

bool Replica::read(const CellId& id, Cell& into) const {
  RecordRef ref = impl_->cells.find(id);
  if (ref == 0) return false;
  std::swap(impl_->held.cell.slots, into.slots);
  impl_->cells.read(ref, impl_->held);
  std::swap(impl_->held.cell, into);
  return true;
}

void Replica::for_each(const std::function<void(const Cell&)>& visit) const {
  impl_->cells.for_each_group([&](const Group& group, std::size_t, std::uint64_t) {
    impl_->cells.walk(group, 0, [&](RecordRef ref, const CellId&) {
      impl_->cells.read(ref, impl_->held);
      visit(impl_->held.cell);
      return true;
    });
  });
}

bool Replica::rewrite_some(Place& place, std::size_t most,
                           const std::function<bool(const Cell&)>& lacks) {
  DeltaPacker packer(impl_->members);
  std::vector<Group> groups;
  impl_->cells.for_each_group([&](const Group& group, std::size_t, std::uint64_t) {
    if (!(group < place.group)) groups.push_back(group);
  });
  bool done = true;
  for (const Group& group : groups) {
    if (group != place.group) place = {group, 0};
    place.from = impl_->cells.walk(group, place.from, [&](RecordRef ref, const CellId&) {
      if (most == 0) return false;
      --most;
      impl_->cells.read(ref, impl_->held);
      if (lacks(impl_->held.cell)) packer.add(impl_->held.cell);
      return true;
    });
    done = place.from == CellIndex::kEnd;
    if (!done) break;
  }
  if (!packer.empty()) impl_->put_write(packer.take());
  if (done) impl_->disk_lacks = false;
  return done;
}

bool Replica::has_rows(const CellId& id) const {
  return impl_->cells.with_rows().contains(id);
}

void Replica::for_each_with_rows(const std::function<void(const Cell&)>& visit) const {
  for (const CellId& id : impl_->cells.with_rows()) {
    if (std::optional<Cell> cell = find(id)) visit(*cell);
  }
}

void Replica::for_each_writer(
    const std::function<void(const Incarnation&, std::uint64_t)>& visit) const {
  impl_->cells.writers().for_each(visit);
}

std::size_t Replica::cell_count() const {
  return impl_->cells.size();
}
std::size_t Replica::early_cell_count() const {
  return impl_->early.size();
}
std::size_t Replica::cell_bytes() const {
  return impl_->cells.bytes();
}
const ReplicaOptions& Replica::options() const {
  return impl_->options;
}
const Incarnation& Replica::incarnation() const {
  return impl_->options.incarnation;
}
Nanos Replica::floor() const {
  return impl_->floor;
}
const ReplicaCounters& Replica::counters() const {
  return impl_->counters;
}
std::vector<Alarm> Replica::take_alarms() {
  return std::exchange(impl_->alarms, {});
}
const std::map<Incarnation, Member>& Replica::members() const {
  return impl_->members;
}

std::vector<PeerStatus> Replica::peers() const {
  std::vector<PeerStatus> result;
  for (const Peer& peer : impl_->peers) {
    PeerStatus status;
    status.member = peer.member;
    if (peer.up) status.incarnation = peer.incarnation;
    status.acked = peer.acked;
    status.unacked = impl_->head - peer.acked;
    status.caught_up_at = peer.caught_up_at;
    status.heard_at = peer.heard_at;
    status.agrees = peer.agrees;
    status.withheld_slots = peer.withheld;
    status.refused_cells = peer.refused;
    result.push_back(std::move(status));
  }
  return result;
}

std::uint64_t Replica::digest() const {
  std::uint64_t sum = 0;
  impl_->cells.for_each_group([&](const Group& group, std::size_t, std::uint64_t digest) {
    sum += mix64(mix64(static_cast<std::uint64_t>(group.generation.number), group.shard), digest);
  });
  return sum;
}

}  // namespace weir::crdt
