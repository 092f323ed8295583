#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <vector>

#include <weir/crdt/escrow.h>
#include <weir/crdt/message.h>
#include <weir/crdt/replica.h>
#include <weir/limits/replica_side.h>

namespace weir {

struct EscrowAgentOptions {
  std::shared_ptr<const crdt::ShareTable> shares;  ///< the limiter's
  Nanos rejoin_interval = kSecond;  ///< while not all peers have answered for this incarnation
  /// Another incarnation of a member was not heard of for this long: then it is gone. Longer than
  /// the longest silence of a node that runs, which is its anti-entropy interval.
  Nanos quiet = 6 * kSecond;
};

struct EscrowAgentCounters {
  std::uint64_t requests_sent = 0;
  std::uint64_t requests_served = 0;
  std::uint64_t requests_refused = 0;  ///< nothing to give, or no such rule
  std::uint64_t units_given = 0;
  std::uint64_t units_received = 0;   ///< told by peers since the start
  std::uint64_t versions_differ = 0;  ///< rejoin requests of a peer that knows other shares
};

/// Of what a replica holds of a member's incarnations but one: rows of windows that are not over at
/// `at`. Looks at every cell.
std::uint64_t digest_of_incarnations(const crdt::Replica& replica, const crdt::Member& member,
                                     const crdt::Incarnation& but, Nanos at);

/// What a member of escrow rules does beside deciding: it makes sure which rights are its own after
/// a boot, asks others for rights that it lacks, and gives of its own. Sans-I/O; one thread drives
/// it, the one that drives the replica.
///
/// After a boot an incarnation writes itself into its member's registry, and asks every peer.
/// Then it takes
///  - shares of windows that start later, once one peer has answered: from then on the cluster
///    remembers that this incarnation was;
///  - what its predecessor had, once all peers have answered that they know of no incarnation
///    and of no row of this member that its disk did not hold (one peer, if the time that the
///    predecessor had reserved is not over); with no peers, at once. A member that nobody ever
///    heard of has every share in the same way. Without a disk it never does;
///  - otherwise nothing of the windows that were open, but what others transfer to it.
///
/// Rules that one member decides for all (enforcement home, on_failure closed) ask less, as nobody
/// else spends of theirs: whether all is here that this member counted, see knows_counts_since().
class EscrowAgent {
 public:
  EscrowAgent(EscrowAgentOptions options, crdt::Replica& replica, Limiter& limiter);

  /// After Replica::restore; and once more when a disk that had failed was opened again and has all
  /// that is in memory. `disk`: the replica has one. `time_floor`: no earlier incarnation on
  /// it used a later time, unless the clock was set back since. In windows that are lost
  /// (ReplicaOptions::lost) nothing that earlier incarnations had is taken over. `boots`: the
  /// earlier incarnations that wrote to the disk.
  void begin(bool disk, Nanos time_floor, bool set_back, Nanos now,
             std::span<const crdt::Incarnation> boots = {});
  /// The replica goes on under another incarnation, after Limiter::rebase. It takes over nothing.
  /// With `stopped` the disk has failed, and nothing is spent any more.
  void reset(bool stopped, Nanos now);
  /// After Limiter::reload. From the first rule on that needs it this member has a registry.
  void rules_changed();
  /// True if what a disk held was not all, after it was taken over: the driver must reincarnate.
  bool tainted() const { return tainted_; }

  /// Takes in a cell in which rows of others grew; false if it is none of escrow rules.
  bool changed(const crdt::CellId& cell);
  /// Own counts of Outbox::durable.
  void mark_durable(const crdt::OwnCount& count);
  /// Something came from this incarnation of a peer.
  void heard(crdt::PeerIndex peer, const crdt::Incarnation& from, Nanos now);
  void receive(crdt::PeerIndex peer, const crdt::Incarnation& from, const crdt::Message& message,
               Nanos now);
  /// Before a clean stop, when nothing is decided or held any more: transfers what is left of open
  /// windows to peers that are connected, each window's to the one that has used most of it. At
  /// most kMostHandedOver windows, those that most is asked for of. From now on it asks for
  /// nothing, and passes on what still comes.
  void hand_over(Nanos now);
  /// How many windows' rights each peer got so.
  const std::vector<std::size_t>& handed_over() const { return handed_over_; }
  static constexpr std::size_t kMostHandedOver = 10'000;
  /// Does what is due. Before the limiter is drained.
  void pump(Nanos now);
  std::vector<crdt::Envelope> take();

  /// Peers that may have rights of a window, the richest first, as far as is known here.
  std::vector<crdt::PeerIndex> holders(const crdt::CellId& cell, std::uint64_t limit,
                                       Nanos now) const;
  /// Where another member may decide for this one: an escrow rule's limit is_scarce(). A bucket's
  /// never is: what fills in a period was lent before it began.
  bool scarce(const Rule& rule) const {
    return rule.enforcement == Enforcement::escrow && !is_bucket(rule.algorithm) &&
           is_scarce(rule.limit, *options_.shares);
  }

  /// Everything is here that this member ever counted in windows that began at `start` or later.
  /// With a disk on which an earlier incarnation said so, from the start. With an empty one once
  /// all peers have answered that they never heard of this member. If a peer has, and knows more
  /// than the disk: of windows that start later than the boot, once one peer has answered.
  bool knows_counts_since(Nanos start) const;

  const EscrowGrantState& grant_state() const { return grant_state_; }
  /// All that the predecessor had, or every share, is this incarnation's.
  bool whole() const { return taken_over_; }
  const EscrowAgentCounters& counters() const { return counters_; }

 private:
  struct Peer {
    bool confirmed = false;
    std::map<crdt::Incarnation, Nanos> heard;
    crdt::Incarnation rejoins;  // by it; zero: nothing to answer
    Nanos rejoins_at = 0;
    crdt::WriteId after = 0;  // answered once this is durable
  };

  void register_incarnation(Nanos now);
  void write_fence(Nanos now);
  void write_row(std::uint64_t row, std::uint64_t value, Nanos now);
  void update_succession();
  crdt::Succession succession_in(const crdt::Epoch& epoch) const;
  void refresh();
  std::uint64_t absorb(const crdt::Cell& cell);
  void publish();
  void came(Nanos now) { now_ = std::max(now_, now); }
  void request_rejoin(Nanos now);
  void confirm_rejoins(Nanos now);
  void take_over_if_sure(Nanos now);
  void find_counts(Nanos now);
  std::size_t confirmations() const;
  void ask_for_rights(Nanos now);
  void ask(const RightsNeed& need, Nanos now);
  struct Donor {
    crdt::PeerIndex peer = 0;
    crdt::Int128 rights = 0;
    std::uint64_t received = 0;  // from it
  };
  std::vector<Donor> donors(const crdt::CellId& id, std::uint64_t limit, bool reserves,
                            Nanos now) const;
  bool is_incarnation_of(const crdt::Incarnation& incarnation, const crdt::Member& member) const;
  crdt::Succession succession_of(const crdt::Member& member, const crdt::Incarnation& incarnation,
                                 Nanos now) const;
  crdt::Succession succession_of(const crdt::Incarnation& incarnation, const crdt::CellId& registry,
                                 const crdt::CellId& before) const;
  static bool has_other_incarnations(const crdt::Cell& registry, const crdt::Incarnation& but);
  const crdt::Member& self() const { return replica_.options().self; }

  void on(crdt::PeerIndex peer, const crdt::Incarnation& from, const crdt::RightsRequest& message,
          Nanos now);
  void on(crdt::PeerIndex peer, const crdt::Incarnation& from, const crdt::RejoinRequest& message,
          Nanos now);
  void on(crdt::PeerIndex peer, const crdt::Incarnation& from,
          const crdt::RejoinConfirmation& message, Nanos now);

  EscrowAgentOptions options_;
  crdt::Replica& replica_;
  Limiter& limiter_;
  ReplicaSide side_;
  bool enabled_ = false;  // some rule is an escrow rule
  std::vector<Peer> peers_;
  crdt::CellId registry_;
  crdt::CellId registry_before_;
  bool written_ = false;        // into the registry
  std::uint64_t newest_ = 0;    // fence row that the disk knew
  crdt::Incarnation previous_;  // the newest incarnation that the disk knew
  crdt::Succession succession_;
  EscrowGrantState grant_state_;
  Nanos began_ = 0;
  Nanos now_ = 0;  // the latest that this incarnation was told
  Nanos time_floor_ = 0;
  bool quick_ = false;  // the predecessor's reserved time was not over at the boot
  bool may_take_over_ = false;
  bool taking_over_ = false;
  bool taken_over_ = false;
  bool registered_ = false;  // durably
  bool tainted_ = false;
  bool leaving_ = false;
  std::vector<std::size_t> handed_over_;  // windows, by peer
  std::uint64_t passed_on_ = 0;           // units_received, when it was handed over
  std::uint64_t elder_rows_ = 0;  // of earlier incarnations: peers knew them, the disk did not
  // knows_counts_since(). What a process once counted it goes on knowing under other incarnations.
  bool disk_ = false;
  bool disk_lacks_ = false;         // some that an earlier incarnation wrote
  bool remembered_ = false;         // some peer knows that an incarnation of this process was
  std::uint64_t counts_row_ = 0;    // kCountsRow as it should be; 0: not known
  bool counts_written_ = false;     // by the incarnation that runs
  Nanos boot_fence_ = kNever;       // windows that start later are this process'
  std::uint64_t elder_counts_ = 0;  // ReplicaCounters, at the boot
  std::uint64_t elder_rows_at_boot_ = 0;
  Nanos next_rejoin_ = 0;
  std::set<crdt::CellId> unabsorbed_;
  std::vector<RightsNeed> needs_;
  std::vector<crdt::Envelope> out_;
  EscrowAgentCounters counters_;
};

}  // namespace weir
