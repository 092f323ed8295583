#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <queue>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <weir/crdt/replica.h>
#include <weir/limits/escrow/escrow_agent.h>
#include <weir/limits/limiter.h>

namespace weir::laws {

struct MeshOptions {
  std::size_t nodes = 2;
  bool memory_only = false;
  // The network. Delays are drawn per message, so messages overtake each other.
  Nanos min_delay = kMillisecond;
  Nanos max_delay = 20 * kMillisecond;
  int loss_percent = 0;
  int duplicate_percent = 0;
  // The disks. A commit takes everything that was written when it began.
  Nanos max_commit = 10 * kMillisecond;
  Nanos sync_interval = 250 * kMillisecond;
  Nanos anti_entropy_interval = kSecond;
  /// Every node has a Limiter with these rules in front of its replica. Null: replicas alone.
  std::shared_ptr<const RuleSet> rules;
  Nanos sweep_interval = kSecond;
  /// Who shares the limits of escrow rules. Empty: all nodes, alike.
  std::vector<std::uint32_t> weights;
  std::uint64_t seed = 1;
};

/// One request that a node's limiter admitted under the first rule.
struct Admission {
  Nanos at = 0;
  std::size_t node = 0;
  crdt::Incarnation incarnation;
  crdt::SeriesId series;
  std::uint64_t units = 0;
  crdt::SlotId slot;       ///< known once it was handed to the replica
  std::uint64_t upto = 0;  ///< the slot's value that includes it; 0: not handed over yet
};

/// Several replicas with a network and disks that fail as told, in one thread and from one seed:
/// the same calls give the same run. Clocks are one and the same.
///
/// It watches what the nodes do and keeps what breaks a promise: `broken` is empty in a right
/// world.
class Mesh {
 public:
  explicit Mesh(MeshOptions options);

  // Work.
  /// This node consumes `units` in a windowed cell.
  void add(std::size_t node, const crdt::CellId& cell, std::uint64_t units, bool urgent = false);
  /// Asks the node's limiter for the key.
  Decision check(std::size_t node, const std::string& key, std::uint64_t hits);
  /// Asks the node's limiter for the key under an escrow rule. What passes counts as admitted once
  /// its answer may go out: at once, or after a commit.
  Decision spend(std::size_t node, const std::string& key, std::uint64_t hits);
  /// The node is about to be stopped: it transfers the rights that it has left. To be told to
  /// others it needs time. Returns how many windows'.
  std::size_t hand_over(std::size_t node);
  /// Sends everything unsent now.
  void flush(std::size_t node);
  void advance(Nanos time);

  // Faults.
  void cut(std::size_t a, std::size_t b, bool both = true);  ///< messages vanish; nobody is told
  void mend(std::size_t a, std::size_t b);
  void disconnect(std::size_t a, std::size_t b);  ///< both sides see the session end
  void connect(std::size_t a, std::size_t b);
  void crash(std::size_t node);      ///< what was not committed is gone
  void lose_disk(std::size_t node);  ///< of a node that is down
  void copy_disk(std::size_t node);  ///< to be put back later
  /// Of a node that is down. What it admitted and nobody knows any more is forgiven, if no peer
  /// can tell that its disk is not the newest, or not in time.
  void restore_disk(std::size_t node);
  void boot(std::size_t node);  ///< under a new incarnation
  void reincarnate(std::size_t node);
  void stall(std::size_t node, bool stalled);  ///< the disk takes writes but commits none
  void faults(int loss_percent, int duplicate_percent);

  /// Ends all faults but cuts in `keep_cut`, and runs until the mesh is at rest: disks and network
  /// empty, everything acknowledged, digests agreed. False if that takes longer than `patience`.
  bool settle(Nanos patience = 60 * kSecond, bool keep_cuts = false);
  bool at_rest() const;

  // Views.
  Nanos now() const { return now_; }
  std::size_t size() const { return nodes_.size(); }
  bool up(std::size_t node) const { return nodes_[node].replica != nullptr; }
  crdt::Replica& replica(std::size_t node) { return *nodes_[node].replica; }
  Limiter& limiter(std::size_t node) { return *nodes_[node].limiter; }
  std::map<crdt::CellId, crdt::Cell> state(std::size_t node) const;
  const std::map<crdt::CellId, crdt::Cell>& disk(std::size_t node) const {
    return nodes_[node].disk;
  }
  std::uint64_t own_total(std::size_t node, const crdt::CellId& cell) const;
  /// The highest value of a slot that its owner ever had on disk (memory-only: ever counted).
  using SlotKey = std::pair<crdt::CellId, crdt::SlotId>;
  const std::map<SlotKey, std::uint64_t>& durable() const { return durable_; }
  /// Units counted by add(), by cell, of all nodes and boots.
  const std::map<crdt::CellId, std::uint64_t>& counted() const { return counted_; }
  const std::vector<Admission>& admissions() const { return admissions_; }
  /// Of an escrow rule's window: units admitted, but for those that are forgiven.
  struct Spent {
    std::uint64_t units = 0;
    std::map<std::size_t, std::uint64_t> by_node;
    std::uint64_t forgiven = 0;
  };
  const std::map<crdt::CellId, Spent>& spent() const { return spent_; }
  const EscrowAgent& agent(std::size_t node) const { return *nodes_[node].agent; }
  crdt::Member member(std::size_t node) const { return members_[node]; }
  /// True if `node`, which is up, counts this admission of a bucket: it made it and has not handed
  /// it over, or its replica holds that much of the slot. (A bucket that has drained is forgotten.)
  bool knows(std::size_t node, const Admission& admission) const;
  std::uint64_t messages(std::size_t kind) const { return sent_[kind]; }  ///< by Message's index
  std::uint64_t resets() const { return resets_; }                        ///< buckets, everywhere
  std::uint64_t writes_lost() const { return writes_lost_; }              ///< by crashes
  const std::set<std::size_t>& lost_disks() const { return lost_disks_; }
  std::uint64_t messages_lost() const { return lost_; }
  std::uint64_t messages_repeated() const { return repeated_; }
  std::uint64_t messages_overtaken() const {
    return overtaken_;
  }  ///< by a later one of that sender
  /// Slots of third parties that a push showed higher when it was repeated, and that were not yet
  /// held when it was acknowledged: their owners see to them.
  std::uint64_t relayed_later() const { return relayed_later_; }
  /// Slots of a bucket that had drained and was reset before they were acknowledged, unseen.
  std::uint64_t acknowledged_drained() const { return acknowledged_drained_; }
  /// Crashes and changes of incarnation while cells were on their way.
  std::uint64_t restarts_with_news() const { return restarts_with_news_; }
  const std::vector<std::string>& broken() const { return broken_; }

 private:
  struct Pushed {
    std::uint64_t upto = 0;
    bool again = false;  // some of these stamps were sent before
    crdt::Delta delta;
  };
  struct Stream {
    std::uint64_t upto = 0;
    std::vector<Pushed> unacked;
  };
  struct Node {
    std::unique_ptr<crdt::Replica> replica;
    std::unique_ptr<Limiter> limiter;
    std::uint64_t boots = 0;
    std::map<crdt::CellId, std::uint64_t> own;  // of this incarnation
    std::map<crdt::CellId, crdt::Cell> disk;
    std::map<crdt::Incarnation, crdt::Member> disk_members;
    std::vector<crdt::Write> queued;
    bool committing = false;
    bool stalled = false;
    Nanos next_pump = 0;
    Nanos next_sweep = 0;
    std::vector<std::size_t> undrained;  // indices of admissions
    std::unique_ptr<EscrowAgent> agent;
    struct Answer {
      crdt::WriteId after = 0;
      crdt::CellId cell;
      std::uint64_t units = 0;
    };
    std::vector<Answer> answers;  // that wait for the disk
    std::map<crdt::CellId, crdt::Cell> copy;
    std::map<crdt::Incarnation, crdt::Member> copy_members;
    Nanos reserved = 0;  // time
    Nanos copy_reserved = 0;
  };
  struct Event {
    Nanos at = 0;
    std::uint64_t number = 0;
    std::function<void()> act;
    bool operator>(const Event& other) const {
      return std::tie(at, number) > std::tie(other.at, other.number);
    }
  };

  void at(Nanos time, std::function<void()> act);
  Nanos draw(Nanos low, Nanos high);
  bool roll(int percent);
  crdt::PeerIndex index(std::size_t node, std::size_t peer) const;
  std::size_t peer(std::size_t node, crdt::PeerIndex index) const;
  void pump(std::size_t node);
  void drain(std::size_t node);
  void dispatch(std::size_t node);
  void send(std::size_t from, std::size_t to, const crdt::Message& message);
  void watch(std::size_t from, std::size_t to, const crdt::Message& message);
  void watch_values(const crdt::Delta& delta);
  bool born_since(const crdt::CellId& bucket, Nanos end) const;
  void begin_commit(std::size_t node);
  void commit(std::size_t node, std::size_t writes);
  void remember(std::size_t node, const crdt::Delta& delta);
  void note_own(const crdt::CellId& cell, const crdt::SlotId& slot, std::uint64_t value);
  void check_alarms(std::size_t node);
  void admit(std::size_t node, const crdt::CellId& cell, std::uint64_t units);
  void forgive(std::size_t changed);
  bool told_of_more(std::size_t node) const;

  MeshOptions options_;
  Nanos now_;
  std::mt19937_64 random_;
  std::uint64_t next_event_ = 0;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  std::uint64_t in_flight_ = 0;  // of the messages that carry cells
  std::vector<Node> nodes_;
  std::vector<crdt::Member> members_;
  std::vector<std::vector<char>> cut_;
  std::vector<std::vector<char>> connected_;
  std::uint64_t incarnations_ = 0;
  std::map<crdt::CellId, std::uint64_t> counted_;
  std::map<SlotKey, std::uint64_t> durable_;
  std::map<std::pair<crdt::Incarnation, crdt::Incarnation>, Stream> pushed_;
  std::vector<Admission> admissions_;
  std::map<crdt::CellId, Spent> spent_;
  std::map<std::string, crdt::SeriesId> series_;
  std::vector<std::uint64_t> sent_ = std::vector<std::uint64_t>(crdt::kMessageKinds);
  std::uint64_t lost_ = 0;
  std::uint64_t repeated_ = 0;
  std::uint64_t overtaken_ = 0;
  std::uint64_t restarts_with_news_ = 0;
  std::uint64_t next_message_ = 0;
  std::map<std::pair<std::size_t, std::size_t>, std::uint64_t> newest_taken_;
  std::uint64_t relayed_later_ = 0;
  std::uint64_t acknowledged_drained_ = 0;
  std::uint64_t writes_lost_ = 0;
  std::uint64_t resets_ = 0;
  std::set<std::size_t> lost_disks_;
  std::vector<std::string> broken_;
};

}  // namespace weir::laws
