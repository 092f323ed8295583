#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <weir/crdt/message.h>
#include <weir/crdt/table_hash.h>
#include <weir/node/engine/engine.h>
#include <weir/proptests/sim/disk.h>

template <>
struct std::hash<weir::crdt::CellId> : weir::crdt::TableHash {
  hash() : TableHash(1) {}
};

namespace weir::sim {

/// A law (docs/specification.md) was seen broken. Thrown; ends the run.
struct Violation {
  int law = 0;
  std::string what;
};

/// The specification beside the system: it sees every decision, commit, message and boot, keeps its
/// own books, and throws Violation as soon as they disagree. It only ever reads from the nodes.
///
/// Its books: per process, what it admitted in each cell (own counts); per incarnation, the highest
/// durable value of each of its slots; per node, what was promised as durable.
class Checker {
 public:
  struct NodeView {
    node::Engine* engine = nullptr;  ///< null: down
    const Disk* disk = nullptr;
    Nanos expired_to = 0;  ///< how far the store may have forgotten
  };

  /// `series_full`: so few series fit that the limiters are meant to miss some of what peers count.
  Checker(std::size_t nodes, bool series_full);

  std::vector<NodeView> nodes;
  /// Nodes have had different numbers in their rules: what a bucket owed then depends on whom you
  /// ask, so its debt is not checked any more.
  bool rates_differ = false;

  // Incarnations.
  void made_incarnation(const crdt::Incarnation& fresh);
  /// The engine started; before anything else happens to it.
  void booted(std::uint32_t node, bool durable);
  /// At a boot and after a reload.
  void rules_loaded(std::uint32_t node);
  void reincarnated(std::uint32_t node, const crdt::Incarnation& fresh);
  /// Before a clean stop, and after it.
  void stopping(std::uint32_t node);
  void stopped(std::uint32_t node);
  void crashed(std::uint32_t node);
  /// The node's disk is no longer the one that made its promises.
  void disk_replaced(std::uint32_t node);
  /// Before that: the disk will be `image`. What was admitted of escrow rules' windows, and
  /// neither that disk nor anybody else knows, nobody can be asked to respect: unless others know
  /// that there was more, which makes the node take all of it as used.
  void disk_will_be(std::uint32_t node, const Image& image, Nanos wall);

  // Decisions.
  void decided(std::uint32_t node, const Request& request, const Decision& decision, Nanos now);
  /// An answer waits for the disk; the returned number comes back in answered().
  std::uint64_t asked(std::uint32_t node);
  void answered(std::uint32_t node, std::uint64_t number, bool durable);

  // Disk.
  void appended(std::uint32_t node, const crdt::Write& write);
  void durable(std::uint32_t node, const crdt::Write& write);
  void store_failed(std::uint32_t node);
  void store_opened(std::uint32_t node);

  // Network.
  /// `receiver`: the incarnation that `from` believes to talk to.
  void sent(std::uint32_t from, std::uint32_t to, const crdt::Incarnation& receiver,
            const crdt::Message& message);
  void delivering(std::uint32_t to, const crdt::Message& message);
  void delivered(std::uint32_t to, const crdt::Message& message);

  /// The whole state of one node.
  void inspect(std::uint32_t node);

  /// Call when faults are over: what every node must hold in the end.
  void expect_from_here();
  /// True if all nodes hold equal states, at least what was expected. Throws if digests are equal
  /// and states are not, or if something got lost.
  bool converged();
  /// Why the last converged() said no.
  const std::string& difference() const { return difference_; }
  /// After convergence and a rest: equal answers, and empty buffers.
  void at_rest(const std::vector<std::vector<bool>>& linked, bool same_rules);

  std::uint64_t decisions() const { return decisions_; }
  std::uint64_t admitted() const { return admitted_; }
  std::uint64_t over_admitted() const { return over_admitted_; }
  /// Of escrow rules: units admitted, units denied, and rights that were transferred.
  std::uint64_t escrow_admitted() const { return escrow_admitted_; }
  std::uint64_t escrow_denied() const { return escrow_denied_; }
  std::uint64_t escrow_given() const { return escrow_given_; }

 private:
  struct SlotKey {
    crdt::CellId cell;
    std::uint64_t birth = 0;
    bool operator==(const SlotKey&) const = default;
  };
  struct SlotKeyHash {
    std::size_t operator()(const SlotKey& key) const noexcept {
      return std::hash<crdt::CellId>{}(key.cell) ^ (key.birth * 0x9E3779B97F4A7C15ull);
    }
  };
  using Counts = std::unordered_map<SlotKey, std::uint64_t, SlotKeyHash>;

  struct OwnBucket {
    std::vector<std::pair<Nanos, std::uint64_t>> log;  // time, cumulated units
    std::map<std::uint64_t, std::uint64_t> left;       // by birth
    /// Where in the log the slot of each birth starts, seen when it is first written: its value is
    /// then all that was admitted since. (Time may stand still, so the birth does not tell.)
    std::map<std::uint64_t, std::uint64_t> starts;
    std::uint64_t written = 0;  // of the log, in any slot
    crdt::DebtTicks debt = 0;
    Nanos debt_at = 0;
    Nanos expiry = 0;
    std::uint64_t before(std::uint64_t birth) const;
    std::uint64_t since(std::uint64_t birth) const;  // up to the next birth
    std::uint64_t left_of(std::uint64_t birth) const;
  };
  /// Of one window of an escrow rule.
  struct EscrowWindow {
    Uint128 admitted = 0;                      ///< by all, answered
    Uint128 excused = 0;                       ///< of it, by incarnations that nobody remembers
    std::map<std::uint32_t, Uint128> by_node;  ///< of it
  };
  /// One bucket of an escrow rule.
  struct EscrowLog {
    std::map<Nanos, std::uint64_t> admitted;  ///< by the clocks of those who did, when
    Nanos excused_from = 0;                   ///< what was admitted here on is not counted
    Nanos excused_to = 0;
  };
  using EscrowUnits = std::vector<std::pair<crdt::CellId, std::pair<std::string, std::uint64_t>>>;

  using Buckets = std::unordered_map<crdt::CellId, OwnBucket>;

  struct IncarnationRecord {  // of an incarnation
    std::uint32_t node = 0;
    bool durable = true;
    bool current = true;
    Counts counts;  // durable ones; of a memory-only incarnation, after its death, the counted ones
    Counts offsets;  // buckets: units of the process' log that earlier incarnations have kept
    std::shared_ptr<const Buckets> buckets;                       // of the process it was a part of
    std::shared_ptr<const std::set<crdt::Incarnation>> siblings;  // its incarnations
  };
  struct OwnWindow {
    std::uint64_t total = 0;  // admitted by this process
    std::uint64_t left = 0;   // of it, under incarnations it had before
  };
  struct Admitted {
    std::uint64_t total = 0;
    Nanos expiry = 0;  // when it need no longer be known
  };
  struct Waiting {
    std::uint64_t number = 0;
    Nanos time = 0;  // of the latest decision
    std::vector<std::pair<crdt::CellId, Admitted>> totals;
    EscrowUnits escrow;
  };
  struct Process {
    std::shared_ptr<std::set<crdt::Incarnation>> incarnations =
        std::make_shared<std::set<crdt::Incarnation>>();
    std::unordered_map<crdt::CellId, OwnWindow> windows;
    std::shared_ptr<Buckets> buckets = std::make_shared<Buckets>();
    std::deque<Waiting> waiting;
    std::map<crdt::CellId, Admitted> recent;
    std::set<crdt::CellId> shared;   // buckets of which anyone else knows or knew
    std::set<crdt::CellId> refused;  // far-future cells that a peer pushed
    /// News of buckets that had drained here: acknowledged, and dropped.
    std::map<std::pair<crdt::CellId, crdt::SlotId>, std::uint64_t> drained;
    EscrowUnits escrow;  // admitted, and the answer waits for the disk
    std::unordered_map<crdt::CellId, std::uint64_t>
        spent;  // of rights, by the incarnation that runs
    bool failed = false;
    bool was_without_disk = false;
    Nanos floor = 0;
    Nanos time = 0;
    Nanos floor_before = 0;
    Nanos time_before = 0;
  };
  struct Pushed {
    std::uint64_t upto = 0;
    std::vector<crdt::Cell> cells;
  };
  struct Memory {  // of a node, across its processes
    struct Promise {
      std::uint64_t value = 0;
      Nanos expiry = 0;  // as the bucket's last consumption set it
    };
    std::map<std::pair<crdt::CellId, crdt::SlotId>, Promise> promised;
    std::map<crdt::CellId, crdt::Cell> at_stop;
    bool stopped_clean = false;
    Nanos time = 0;  // latest that a decision used
  };

  const crdt::Replica& replica(std::uint32_t node) const { return nodes[node].engine->replica(); }
  std::uint64_t own_count(std::uint32_t node, const crdt::CellId& cell, std::uint64_t birth) const;
  /// The most that anybody but its owner may know of a slot.
  std::uint64_t allowed(const crdt::SlotId& slot, const crdt::CellId& cell) const;
  void check_known(const crdt::Cell& cell, const char* where, std::uint32_t node) const;
  std::uint64_t window_count(std::uint32_t node, const crdt::CellId& cell) const;
  void check_window(std::uint32_t node, const Rule& rule, const crdt::SeriesId& series,
                    const RuleStatus& status, std::uint64_t cost, bool consumed, Nanos now);
  void check_escrow(std::uint32_t node, const Rule& rule, const crdt::SeriesId& series,
                    const RuleStatus& status, std::uint64_t cost, bool consumed, bool waits,
                    Nanos now);
  void check_escrow_bucket(std::uint32_t node, const Rule& rule, const crdt::SeriesId& series,
                           const RuleStatus& status, std::uint64_t cost, bool consumed, Nanos now);
  void admit_escrow(std::uint32_t node, const crdt::CellId& id, const std::string& rule,
                    std::uint64_t units);
  std::uint64_t reserve_of(const crdt::CellId& id) const;
  bool told_of_more(std::uint32_t node, const Image& disk, std::uint32_t replaced,
                    const Image& replacement, Nanos wall) const;
  void check_bucket(std::uint32_t node, const Rule& rule, const crdt::SeriesId& series,
                    const RuleStatus& status, std::uint64_t cost, bool consumed, Nanos now);
  std::string show(std::uint32_t node, const crdt::CellId& id, Nanos now) const;
  /// The least that a bucket can owe, given the consumption that this node knows of.
  crdt::DebtTicks least_debt(std::uint32_t node, const Rule& rule, const crdt::CellId& id,
                             Nanos now) const;
  void check_acknowledged(std::uint32_t from, std::uint32_t to, const crdt::Ack& ack);
  void note_written(std::uint32_t node, const crdt::CellId& id, const crdt::Slot& slot);
  void watch_time(std::uint32_t node);
  void freeze(std::uint32_t node, const crdt::Incarnation& incarnation);
  bool over(std::uint32_t node, const crdt::Cell& cell) const;
  bool was_reset(std::uint32_t node, const crdt::Cell& cell) const;
  Nanos latest_floor() const;
  Nanos latest_time() const;
  [[noreturn]] void fail(int law, std::uint32_t node, const std::string& what) const;

  bool series_full_;
  std::set<crdt::Incarnation> used_;
  std::map<crdt::Incarnation, IncarnationRecord> incarnations_;
  std::vector<Process> processes_;
  std::vector<Memory> memories_;
  std::map<std::pair<crdt::Incarnation, crdt::Incarnation>, std::deque<Pushed>> pushed_;
  std::map<crdt::CellId, crdt::Cell> expected_;
  /// Of expected buckets' slots: the value, and when the bucket that has it is full again.
  std::map<std::pair<crdt::CellId, crdt::SlotId>, std::pair<std::uint64_t, Nanos>> full_again_;
  std::unordered_map<crdt::CellId, std::uint64_t> globally_;  // windows: admitted by anyone
  std::map<crdt::CellId, EscrowWindow> escrow_;
  std::map<crdt::SeriesId, EscrowLog> escrow_logs_;
  /// The largest burst that any node ever had, as below.
  std::map<std::string, std::uint64_t> bursts_;
  /// The highest limit that any node ever had. Until all have the new one, that is the promise.
  std::map<std::string, std::uint64_t> limits_;
  std::unordered_map<crdt::CellId, std::uint64_t> reserves_;  // windows with durability reserve
  std::string difference_;
  std::uint64_t number_ = 0;
  std::uint64_t decisions_ = 0;
  std::uint64_t admitted_ = 0;
  std::uint64_t over_admitted_ = 0;
  std::uint64_t escrow_admitted_ = 0;
  std::uint64_t escrow_denied_ = 0;
  std::uint64_t escrow_given_ = 0;
};

}  // namespace weir::sim
