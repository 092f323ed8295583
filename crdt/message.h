#pragma once

#include <compare>
#include <cstdint>
#include <variant>
#include <vector>

#include <weir/crdt/cell.h>
#include <weir/crdt/epoch.h>
#include <weir/crdt/ids.h>

namespace weir::crdt {

/// The messages of the sync protocol (docs/protocol.md). All are safe to lose, repeat, delay and
/// reorder. rpc/ carries them; storage never sees them.

/// The sender's own slots stamped in (after, upto]: their current values, so a slow peer costs no
/// memory. `base`: the stream to this receiver starts at `after`.
struct Push {
  Incarnation pusher;
  std::uint64_t after = 0;
  std::uint64_t upto = 0;
  bool base = false;
  Delta delta;
  friend bool operator==(const Push&, const Push&) = default;
};

/// "Everything you stamped up to `upto` is durable here." Names both incarnations; one that names
/// another pusher or receiver than the current ones moves no cursor.
struct Ack {
  Incarnation pusher;
  Incarnation receiver;
  std::uint64_t upto = 0;
  friend bool operator==(const Ack&, const Ack&) = default;
};

/// A set of cells that anti-entropy compares at once: a generation's cells whose series falls in a
/// shard (the top kShardBits of SeriesId::hi).
struct Group {
  Generation generation;
  std::uint32_t shard = 0;
  friend auto operator<=>(const Group&, const Group&) = default;
};
inline constexpr unsigned kShardBits = 6;

struct GroupDigest {
  Group group;
  std::uint64_t digest = 0;
  friend bool operator==(const GroupDigest&, const GroupDigest&) = default;
};

/// "These are the digests of all I hold." Groups that end at or before either side's floor are not
/// compared.
struct DigestOffer {
  Nanos floor = 0;
  std::uint64_t round = 0;  ///< echoed in the answer
  std::vector<GroupDigest> groups;
  friend bool operator==(const DigestOffer&, const DigestOffer&) = default;
};

struct CellDigest {
  std::uint64_t key = 0;  ///< cell_key() of the cell
  std::uint64_t digest = 0;
  friend bool operator==(const CellDigest&, const CellDigest&) = default;
};

/// The cells one side holds of one differing group, with keys in [low, high].
struct GroupInventory {
  Group group;
  std::uint64_t low = 0;
  std::uint64_t high = 0;
  std::vector<CellDigest> cells;
  friend bool operator==(const GroupInventory&, const GroupInventory&) = default;
};

/// Answers a DigestOffer. Empty: both sides hold the same. `more`: further groups differ.
struct Inventory {
  std::uint64_t round = 0;
  bool more = false;
  std::vector<GroupInventory> groups;
  friend bool operator==(const Inventory&, const Inventory&) = default;
};

struct GroupWant {
  Group group;
  std::vector<std::uint64_t> keys;
  friend bool operator==(const GroupWant&, const GroupWant&) = default;
};

/// Answers an Inventory: cells the other side lacks (third parties' slots included), and what it
/// should send back, which comes as another Repair that wants nothing.
struct Repair {
  Delta delta;
  std::vector<GroupWant> wants;
  friend bool operator==(const Repair&, const Repair&) = default;
};

// Escrow rules (docs/escrow.md). The replica does not know these: limits/escrow/escrow_agent.h
// does.

/// "Of this window's rights you shall have transferred at least `wanted` to me", to the incarnation
/// that sends it. A total and not a difference, so any number of copies is one request. There is no
/// answer but the row itself, which comes as every row does.
struct RightsRequest {
  SeriesId rule;  ///< RightsNeed::rule
  CellId cell;
  std::uint64_t wanted = 0;
  friend bool operator==(const RightsRequest&, const RightsRequest&) = default;
};

/// "I am `incarnation`, and would spend my rights: is there anything against it?"
struct RejoinRequest {
  Incarnation incarnation;
  Nanos at = 0;               ///< the sender's time
  std::uint64_t version = 0;  ///< ShareTable::version(at)
  friend bool operator==(const RejoinRequest&, const RejoinRequest&) = default;
};

/// Answers a RejoinRequest, if the incarnation stands in the registry here, durably, if shares
/// agree, and if no other incarnation of that member was heard of lately; otherwise nothing is
/// answered.
struct RejoinConfirmation {
  Incarnation incarnation;
  Nanos at = 0;            ///< as requested
  Nanos now = 0;           ///< the sender's time
  std::uint64_t rows = 0;  ///< digest of what it holds of that member's other incarnations
  friend bool operator==(const RejoinConfirmation&, const RejoinConfirmation&) = default;
};

using Message = std::variant<Push, Ack, DigestOffer, Inventory, Repair, RightsRequest,
                             RejoinRequest, RejoinConfirmation>;
/// For tables by Message::index().
inline constexpr std::size_t kMessageKinds = std::variant_size_v<Message>;

/// 64 bits that name a cell within its group.
std::uint64_t cell_key(const CellId& id);

/// Bounds that a decoder enforces and a sender keeps, in items per message.
inline constexpr std::size_t kMaxDeltaCells = 4096;
inline constexpr std::size_t kMaxDeltaSlots = 65536;
inline constexpr std::size_t kMaxOfferGroups = 65536;
inline constexpr std::size_t kMaxInventoryCells = 32768;

}  // namespace weir::crdt
