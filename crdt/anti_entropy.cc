#include <weir/crdt/anti_entropy.h>

#include <algorithm>
#include <bit>

#include <absl/container/btree_map.h>
#include <absl/container/btree_set.h>

namespace weir::crdt {

DigestOffer AntiEntropy::offer(Nanos floor, std::uint64_t round) const {
  DigestOffer message;
  message.floor = floor;
  message.round = round;
  cells_.for_each_group([&](const Group& group, std::size_t, std::uint64_t digest) {
    if (group.generation.end() <= floor || message.groups.size() == kMaxOfferGroups) return;
    message.groups.push_back({group, digest});
  });
  return message;
}

void AntiEntropy::on(std::size_t index, const DigestOffer& message, Nanos floor) {
  Peer& peer = peers_[index];
  if (peer.transfer) {
    peer.transfer->allowance = allowance();
    return;
  }
  Nanos common = std::max(floor, message.floor);
  absl::btree_map<Group, std::uint64_t> theirs;
  for (const GroupDigest& group : message.groups) theirs.emplace(group.group, group.digest);
  std::vector<Group> differing;
  Transfer transfer;
  transfer.allowance = allowance();
  cells_.for_each_group([&](const Group& group, std::size_t, std::uint64_t digest) {
    if (group.generation.end() <= common) return;
    auto at = theirs.find(group);
    if (at == theirs.end()) {
      transfer.groups.push_back(group);
    } else if (at->second != digest) {
      differing.push_back(group);
    }
  });
  for (const GroupDigest& each : message.groups) {
    const Group& group = each.group;
    if (group.generation.end() <= common || group.shard >= (1u << kShardBits)) continue;
    if (cells_.size_of(group) == 0) differing.push_back(group);
  }
  Listing listing;
  listing.answer.round = message.round;
  listing.answer.more = !transfer.groups.empty();
  // Each round starts elsewhere, so that what does not fit into one gets its turn.
  std::size_t first = differing.empty() ? 0 : message.round % differing.size();
  for (std::size_t i = 0; i < differing.size(); ++i) {
    const Group& group = differing[(first + i) % differing.size()];
    listing.groups.push_back(slice_of(group, message.round, listing.answer.more));
  }
  peer.listing = std::move(listing);
  peer.listed.clear();
  if (!transfer.groups.empty()) peer.transfer = std::move(transfer);
}

/// The whole group, or if that is too much for a message the slice of it that is this round's.
GroupInventory AntiEntropy::slice_of(const Group& group, std::uint64_t round, bool& partial) const {
  GroupInventory inventory;
  inventory.group = group;
  inventory.high = ~std::uint64_t{0};
  // Half the bound: keys are uniform, so a slice is far from it.
  auto slices = std::bit_ceil(cells_.size_of(group) / (kMaxInventoryCells / 2) + 1);
  if (slices > 1) {
    unsigned shift = 64u - static_cast<unsigned>(std::countr_zero(slices));
    inventory.low = (round % slices) << shift;
    inventory.high = inventory.low + ((std::uint64_t{1} << shift) - 1);
    partial = true;
  }
  return inventory;
}

/// The answer, once it is whole.
std::optional<Inventory> AntiEntropy::list(Peer& peer) {
  Listing& listing = *peer.listing;
  std::size_t looked = 0;
  while (!listing.groups.empty()) {
    GroupInventory& group = listing.groups.front();
    bool full = false;
    listing.from = cells_.walk(group.group, listing.from, [&](RecordRef ref, const CellId& id) {
      if (looked == most_looked()) return false;
      ++looked;
      std::uint64_t key = cell_key(id);
      if (key < group.low || key > group.high) return true;
      full = group.cells.size() == listing.room;
      if (full) return false;
      cells_.read(ref, held_);
      group.cells.push_back({key, digest_of(held_.cell)});
      peer.listed.emplace(key, id);
      return true;
    });
    if (full) {
      listing.answer.more = true;
      // What is left out of the first only is sent once more than need be.
      if (listing.answer.groups.empty()) listing.answer.groups.push_back(std::move(group));
      break;
    }
    if (listing.from != CellIndex::kEnd) return std::nullopt;
    listing.from = 0;
    listing.room -= group.cells.size();
    listing.answer.groups.push_back(std::move(group));
    listing.groups.pop_front();
  }
  return std::move(listing.answer);
}

void AntiEntropy::on(std::size_t index, const Inventory& message) {
  Comparison comparison(hash_);
  absl::btree_set<Group> named;
  for (const GroupInventory& group : message.groups) {
    if (named.insert(group.group).second) comparison.groups.push_back(group);
  }
  peers_[index].comparison = std::move(comparison);
}

/// True when all groups are done, or as much was sent as goes to a peer in a round.
bool AntiEntropy::compare(Comparison& comparison, DeltaPacker& packer) {
  std::size_t looked = 0;
  std::size_t sent = 0;
  while (!comparison.groups.empty() && comparison.sent < kMaxInventoryCells) {
    const GroupInventory& group = comparison.groups.front();
    if (!comparison.begun) {
      comparison.begun = true;
      comparison.want = {group.group, {}};
      comparison.theirs.clear();
      for (const CellDigest& cell : group.cells) comparison.theirs.emplace(cell.key, cell.digest);
    }
    auto compare_cell = [&](RecordRef ref, const CellId& id) {
      std::uint64_t key = cell_key(id);
      if (looked == most_looked()) return false;
      ++looked;
      if (key < group.low || key > group.high) return true;
      cells_.read(ref, held_);
      if (sent == piece_ || !packer.fits(held_.cell)) return false;
      auto other = comparison.theirs.find(key);
      if (other != comparison.theirs.end()) {
        bool same = other->second == digest_of(held_.cell);
        comparison.theirs.erase(other);
        if (same) return true;
        comparison.want.keys.push_back(key);
      }
      packer.add(held_.cell);
      ++sent;
      ++comparison.sent;
      return true;
    };
    comparison.from = cells_.walk(group.group, comparison.from, compare_cell);
    if (comparison.from != CellIndex::kEnd) return false;
    for (const CellDigest& cell : group.cells) {
      if (comparison.theirs.erase(cell.key) > 0) comparison.want.keys.push_back(cell.key);
    }
    if (!comparison.want.keys.empty()) comparison.wants.push_back(std::move(comparison.want));
    comparison.groups.pop_front();
    comparison.from = 0;
    comparison.begun = false;
  }
  return true;
}

/// Of keys that were not in the last inventory nothing is known any more: a later round says again
/// what differs.
void AntiEntropy::on_wanted(std::size_t index, const std::vector<GroupWant>& wants) {
  Peer& peer = peers_[index];
  for (const GroupWant& want : wants) {
    for (std::uint64_t key : want.keys) {
      auto at = peer.listed.find(key);
      if (at == peer.listed.end()) continue;
      // It asks for more before it was sent what it has asked for.
      if (peer.wanted.size() >= kMaxInventoryCells) return;
      peer.wanted.push_back(at->second);
      peer.listed.erase(at);
    }
  }
}

void AntiEntropy::send_wanted(std::deque<CellId>& wanted, DeltaPacker& packer) {
  for (std::size_t sent = 0; !wanted.empty() && sent < piece_; ++sent) {
    if (RecordRef ref = cells_.find(wanted.front())) {
      cells_.read(ref, held_);
      if (!packer.fits(held_.cell)) return;
      packer.add(held_.cell);
    }
    wanted.pop_front();
  }
}

/// True when everything was sent.
bool AntiEntropy::transfer(Transfer& transfer, DeltaPacker& packer) {
  std::size_t sent = 0;
  while (!transfer.groups.empty()) {
    auto send_cell = [&](RecordRef ref, const CellId&) {
      cells_.read(ref, held_);
      if (sent == piece_ || transfer.allowance == 0 || !packer.fits(held_.cell)) return false;
      packer.add(held_.cell);
      ++sent;
      --transfer.allowance;
      return true;
    };
    transfer.from = cells_.walk(transfer.groups.front(), transfer.from, send_cell);
    if (transfer.from != CellIndex::kEnd) return false;
    transfer.groups.pop_front();
    transfer.from = 0;
  }
  return true;
}

}  // namespace weir::crdt
