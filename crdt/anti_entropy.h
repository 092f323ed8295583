#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <vector>

#include <absl/container/flat_hash_map.h>

#include <weir/crdt/cell_store.h>
#include <weir/crdt/delta_packer.h>
#include <weir/crdt/message.h>
#include <weir/crdt/table_hash.h>

namespace weir::crdt {

/// How two replicas find what one of them lacks (docs/protocol.md): digests of groups are offered,
/// groups that differ are listed cell by cell, and what differs is sent, or asked for. A group that
/// the other side lacks altogether is sent as it is.
///
/// A group may have hundreds of thousands of cells, so an answer is worked out piece by piece, in
/// work(): no call looks at more than a bounded number of cells. A later message of a peer takes
/// the place of an earlier one of its kind, so each peer costs at most one message of each kind in
/// memory. Not thread-safe.
class AntiEntropy {
 public:
  /// `cells` and `members` outlive it. In a call it sends up to `piece` cells, and looks at up to 8
  /// times as many. Of groups that the other side lacks it sends up to 64 times as many for each of
  /// that side's offers: its allowance, so that it is sent no more than it takes in. `seed`: of
  /// TableHash.
  AntiEntropy(const CellStore& cells, const std::map<Incarnation, Member>& members,
              std::size_t peers, std::size_t piece, std::uint64_t seed)
      : cells_(cells), members_(members), piece_(piece), hash_(seed) {
    for (std::size_t i = 0; i < peers; ++i) peers_.emplace_back(hash_);
  }

  /// Digests of everything that is held, above `floor`.
  DigestOffer offer(Nanos floor, std::uint64_t round) const;

  // What a peer said.

  void on(std::size_t peer, const DigestOffer& offer, Nanos floor);
  void on(std::size_t peer, const Inventory& inventory);
  void on_wanted(std::size_t peer, const std::vector<GroupWant>& wants);
  /// The peer is gone.
  void forget(std::size_t peer) { peers_[peer] = Peer(hash_); }

  /// Goes on with what there is to do for `peer`, and calls send(Message) for what is ready. True
  /// if there is more to do.
  template <typename Send>
  bool work(std::size_t peer, Send send);
  /// An answer to this peer is being worked out.
  bool busy(std::size_t peer) const { return peers_[peer].listing || peers_[peer].comparison; }

 private:
  struct Listing {
    std::deque<GroupInventory> groups;  // yet to be listed: their cells are not there yet
    std::uint64_t from = 0;             // in the first of them: see CellStore::walk
    Inventory answer;
    std::size_t room = kMaxInventoryCells;
  };
  /// By cell_key(), of which peers name as they like.
  template <typename Value>
  using ByKey = absl::flat_hash_map<std::uint64_t, Value, TableHash>;
  struct Comparison {
    explicit Comparison(const TableHash& hash) : theirs(0, hash) {}
    std::deque<GroupInventory> groups;
    std::uint64_t from = 0;
    bool begun = false;            // the first of them
    ByKey<std::uint64_t> theirs;   // of the first: digests
    GroupWant want;                // of the first
    std::vector<GroupWant> wants;  // of those before
    std::size_t sent = 0;
  };
  struct Transfer {
    std::deque<Group> groups;
    std::uint64_t from = 0;
    std::size_t allowance = 0;
  };
  struct Peer {
    explicit Peer(const TableHash& hash) : listed(0, hash) {}
    std::optional<Listing> listing;
    std::optional<Comparison> comparison;
    std::optional<Transfer> transfer;
    std::deque<CellId> wanted;
    ByKey<CellId> listed;  // of the last inventory sent
  };

  std::size_t most_looked() const { return 8 * piece_; }
  std::size_t allowance() const { return 64 * piece_; }
  GroupInventory slice_of(const Group& group, std::uint64_t round, bool& partial) const;
  std::optional<Inventory> list(Peer& peer);
  bool compare(Comparison& comparison, DeltaPacker& packer);
  void send_wanted(std::deque<CellId>& wanted, DeltaPacker& packer);
  bool transfer(Transfer& transfer, DeltaPacker& packer);

  const CellStore& cells_;
  const std::map<Incarnation, Member>& members_;
  const std::size_t piece_;
  const TableHash hash_;
  std::vector<Peer> peers_;
  HeldCell held_;  // working memory
};

template <typename Send>
bool AntiEntropy::work(std::size_t index, Send send) {
  Peer& peer = peers_[index];
  DeltaPacker packer(members_);
  if (peer.listing) {
    if (std::optional<Inventory> answer = list(peer)) {
      peer.listing.reset();
      send(std::move(*answer));
    }
  } else if (peer.comparison) {
    bool done = compare(*peer.comparison, packer);
    std::vector<GroupWant> wants;
    if (done) wants = std::move(peer.comparison->wants);
    if (done) peer.comparison.reset();
    if (!packer.empty() || !wants.empty()) send(Repair{packer.take(), std::move(wants)});
  } else if (!peer.wanted.empty()) {
    send_wanted(peer.wanted, packer);
    if (!packer.empty()) send(Repair{packer.take(), {}});
  } else if (peer.transfer) {
    if (transfer(*peer.transfer, packer)) peer.transfer.reset();
    if (!packer.empty()) send(Repair{packer.take(), {}});
  }
  return busy(index) || !peer.wanted.empty() || (peer.transfer && peer.transfer->allowance > 0);
}

}  // namespace weir::crdt
