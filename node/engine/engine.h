#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weir/crdt/escrow.h>
#include <weir/crdt/replica.h>
#include <weir/limits/escrow/escrow_agent.h>
#include <weir/limits/lease.h>
#include <weir/limits/limiter.h>
#include <weir/limits/reply.h>
#include <weir/limits/series/keyed_hash.h>
#include <weir/node/engine/over_admission.h>
#include <weir/node/engine/refill.h>
#include <weir/storage/store.h>

namespace weir::node {

struct EngineOptions {
  crdt::ReplicaOptions replica;  ///< `incarnation` is ignored: the engine takes a fresh one
  std::shared_ptr<const RuleSet> rules;
  HashKey hash_key{};
  /// Who shares the limits of escrow rules. Empty: this node and its peers, alike.
  std::vector<crdt::Shareholder> shareholders;
  std::size_t max_series = 1u << 20;
  bool populate = false;                   ///< as in LimiterOptions
  std::size_t max_request_ids = 1u << 16;  ///< the same
  Nanos request_id_ttl = kMinute;
  std::size_t max_tickets = 1u << 16;
  unsigned caller_percent = 100;  ///< the same
  /// Secret of this process, from which names of tickets are made: fresh at each boot.
  HashKey ticket_key{};
  Nanos sweep_interval = kSecond;  ///< at least, between two passes over all series
  std::size_t sweep_piece = 8192;  ///< series that a pump looks at, about
  /// How far ahead of now the time ceiling is kept on disk. After a crash the clock resumes there,
  /// so it may stand still for this long; it also stands still while the disk makes no ceiling
  /// durable for longer than half of this.
  Nanos time_ahead = kSecond;
  /// Then the disk has stalled: time goes on without it.
  Nanos max_time_wait = kSecond / 2;
  /// Uncommitted writes at which the engine stops handing over more: the limiter keeps the totals,
  /// so a disk that is slow costs no memory.
  std::uint64_t max_backlog = 64;
  /// Requests that wait for a commit at once, and for how long the first of them may: beyond either
  /// further ones are to be turned away, see shed().
  std::size_t max_waiting = 100'000;
  Nanos max_commit_wait = kSecond;
  /// A tripwire takes a fresh incarnation at once, and another one not before this has passed;
  /// twice as long each time that follows soon, up to the longest. What a peer says in between of
  /// slots of this node is not taken, so its own counts stay right.
  Nanos renew_wait = 10 * kSecond;
  Nanos longest_renew_wait = 10 * kMinute;
  /// Makes an id that was never used before. Called at start and after a tripwire.
  std::function<crdt::Incarnation()> fresh_incarnation;
};

/// What the engine tells its driver. Called on the driver's thread, never re-entrantly from
/// check().
struct EngineEvents {
  std::function<void(crdt::PeerIndex, const crdt::Message&)> send;
  /// The node goes on under another incarnation: sessions must be made anew.
  std::function<void(const crdt::Incarnation&)> reincarnated;
  std::function<void(const std::string& event, const std::string& detail)> log;
  /// pump() goes on with this, a literal: for who measures how long it takes. May be empty.
  std::function<void(std::string_view what)> step = {};
};

/// Escrow: the window and the cost that a request has in a rule.
struct EscrowWindow {
  crdt::CellId cell;
  std::uint64_t cost = 0;
};

struct EngineStatus {
  bool durable = false;          ///< a store is open, holds what memory does, and has not failed
  bool writing = false;          ///< a store is open: it may still lack some of what memory holds
  std::string storage_failure;   ///< why it is not durable
  bool holding = false;          ///< waiting for a slow disk
  bool stalled = false;          ///< the disk is so slow that time goes on without it
  std::uint64_t unabsorbed = 0;  ///< cells from peers that found no memory in the limiter
  std::uint64_t reincarnations = 0;
  std::size_t waiting = 0;      ///< requests that wait for a commit
  std::uint64_t shed = 0;       ///< requests turned away, as the disk is too slow for them
  Nanos set_back = 0;           ///< by so much the clock had been set back at the start
  std::size_t early_cells = 0;  ///< counts of a clock that was ahead, in windows that begin later
};

/// Limiter, replica and store as one node, without sockets, threads or a clock: the daemon drives
/// it from libuv, the simulator from a seed. One thread drives it; check(), reserve(), settle(),
/// clock(), shed(), ticket names, prepare() and over_admission() may be called from any thread at
/// any time.
///
/// A count's way: check() -> limiter; pump() -> replica and store; committed() -> visible to peers.
/// A peer's count: receive() -> replica and limiter at once, store; committed() -> acknowledged.
class Engine {
 public:
  /// `store` null: memory only. It must outlive the engine.
  Engine(EngineOptions options, storage::Store* store, EngineEvents events);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  /// Opens the store under a fresh incarnation and takes in what it holds. `store_events` go to the
  /// store as they are: the driver brings them back to its thread and calls committed(),
  /// store_failed() and store_opened(). Returns false and why.
  bool start(Nanos wall, storage::StoreEvents store_events, std::string& error);
  /// Before a clean stop, while sessions last: settles in full all that is open, transfers rights
  /// of escrow rules that are left here (EscrowAgent::hand_over), and has peers get every count.
  /// Nothing may be decided after it; pump until handed_over() or out of patience. Returns how many
  /// windows' rights.
  std::size_t hand_over(Nanos wall);
  /// All peers that there is a session to have all that this node counted, and those who got rights
  /// have these, durably. Sends what is unsent.
  bool handed_over();
  /// Hands over everything, commits it and closes the store. Nothing may be called after it but
  /// when_durable(), for what was decided before and crosses threads meanwhile: it tells at once.
  void stop(Nanos wall);

  /// The node's time: max(wall, all earlier results), and never past the ceiling that is on disk,
  /// unless the disk has stalled. So no restart takes it to before anything that is durable, but
  /// one under a wall clock that is more than storage::kMostTimeWaits behind, which puts it back
  /// and logs clock_set_back.
  Nanos clock(Nanos wall);
  /// The wall clock is so far behind the engine's, and has been for a second of it: time would
  /// stand still until it has caught up, as it does while this is so. The driver is to stop the
  /// engine and to start another: nothing else can tell what was counted by a clock that was wrong.
  bool clock_set_back() const { return set_back_; }

  /// Decides. If the decision wants_commit the answer must wait: see when_durable().
  void check(const Request& request, Nanos wall, Decision& out);
  /// Several, as if one after the other: Limiter::check.
  void check(std::span<const Request> requests, Nanos wall, std::span<Decision> out);
  /// Driver's thread: before a request is decided that may be new here. Brings counts that only the
  /// replica has, for want of room, and says so in the request. A decision whose version is 0 has
  /// to be asked for again so. Does next to nothing while there are none.
  void warm(Request& request, Nanos wall);
  /// Limiter::reserve and settle. pump() settles what has timed out, and stop() all that is open; a
  /// crash loses what is held, since only memory knew of it. A settlement that wants_commit waits
  /// as a decision does.
  Ticket reserve(const Request& request, Nanos wall, Nanos timeout, Decision& out,
                 TicketHolder holder = {});
  Settled settle(Ticket ticket, std::uint64_t actual, Nanos wall, std::uint64_t caller = 0);
  /// grant_lease(): a decision, and perhaps hits that the asker may spend. Waits as a decision
  /// does.
  Lease lease(const Request& request, const LeaseTerms& terms, Nanos wall, Decision& out);
  /// TicketHolder::caller of who comes from an address. Empty: 0, nobody.
  std::uint64_t caller_of(std::string_view address) const {
    return address.empty() ? 0 : ticket_hash_(address)[0] | 1;
  }
  /// A ticket's name: its number, and 128 bits of it that only this boot of this node can tell, so
  /// that nobody can name a ticket whom it was not given to. Empty for no ticket.
  std::string ticket_name(Ticket ticket) const;
  /// The other way round. No ticket if the name is another boot's, or nobody was given it.
  Ticket ticket_named(std::string_view name) const;
  /// Limiter::reload. Driver's thread.
  void reload(std::shared_ptr<const RuleSet> rules) { reload(prepare(std::move(rules))); }
  /// Limiter::prepare, which takes most of a reload's time. Any thread.
  std::shared_ptr<PreparedRules> prepare(std::shared_ptr<const RuleSet> rules) const {
    return limiter_->prepare(std::move(rules));
  }
  void reload(std::shared_ptr<PreparedRules> prepared);
  /// Calls back, from a later pump() or committed(), once everything decided before this call is
  /// durable (true) or can no longer become so (false). `requests` of them wait. Driver's thread.
  void when_durable(std::function<void(bool durable)> done, std::size_t requests = 1);
  /// Requests wait for the disk, and too many do or for too long: those that may have to wait are
  /// to be shed(). Any thread; cheap.
  bool overloaded(Nanos wall) const {
    const std::size_t waiting = waiting_.load(std::memory_order_relaxed);
    if (waiting == 0) [[likely]]
      return false;
    return waiting >= options_.max_waiting ||
           wall - waits_since_.load(std::memory_order_relaxed) >= options_.max_commit_wait;
  }
  /// Why this request should not be decided now: it may have to wait for the disk, and the engine
  /// is overloaded(). Empty: decide it. A slow disk so costs no memory, nor others their time. Any
  /// thread.
  Error shed(const Request& request, Nanos wall);
  /// Whether its answer may have to wait for a commit. Any thread.
  bool may_wait_for_disk(const Request& request, Nanos wall);
  bool has_waiters() const { return !waiters_.empty(); }

  /// Moves counts along and does what is due. Call every few milliseconds.
  void pump(Nanos wall);
  /// The last pump() stopped as it had done enough for one turn of a loop: there is more to be done
  /// in the next one.
  bool has_more() const { return more_to_drain_ || replica_->behind_disk(); }
  void committed(crdt::WriteId upto, Nanos wall);
  /// The node goes on in memory, under a fresh incarnation, and opens the store again once it can
  /// be, after a second, later each time, up to kLongestReopenWait.
  void store_failed(const std::string& reason, Nanos wall);
  /// Under another one again. Its answers are durable once the disk has all that memory holds.
  void store_opened(std::shared_ptr<storage::Recovered> recovered, Nanos wall);
  static constexpr Nanos kLongestReopenWait = 30 * kSecond;
  void peer_up(crdt::PeerIndex peer, const crdt::Incarnation& incarnation, Nanos wall);
  void peer_down(crdt::PeerIndex peer);
  void receive(crdt::PeerIndex peer, const crdt::Incarnation& from, const crdt::Message& message,
               Nanos wall);
  /// False: the disk is behind, the driver should let peers wait.
  bool ready_for_more() const { return !holding_; }

  Limiter& limiter() { return *limiter_; }
  const crdt::Replica& replica() const { return *replica_; }
  const EscrowAgent& escrow() const { return *escrow_; }
  /// `rule` is an escrow rule that the request meets (an index into the rules in force). Driver's
  /// thread.
  EscrowWindow escrow_window(std::uint32_t rule, const Request& request, Nanos wall);
  /// All that this node counted is known here that `rule` (an index into the rules in force) looks
  /// at for the request: its disk was not lost, or it is too long ago. Driver's thread.
  bool knows_counts(std::uint32_t rule, const Request& request, Nanos wall);
  EngineStatus status() const;
  /// By how many units `rule` (an index into the rules in force) may be over its limit at most: see
  /// OverAdmission. Any thread.
  std::uint64_t over_admission(std::uint32_t rule, Nanos wall);

 private:
  struct Waiter {
    std::uint64_t generation = 0;
    std::function<void(bool)> done;
    std::size_t requests = 1;
    Nanos since = 0;  // wall clock
  };
  struct Drained {
    std::uint64_t generation = 0;
    crdt::WriteId write = 0;
  };

  void step(std::string_view what) {
    if (events_.step) events_.step(what);
  }
  void reserve_time(Nanos wall);
  void watch_clock(Nanos wall, Nanos now);
  void watch_disk(Nanos passed);
  void watch_space(Nanos now);
  void absorb(const crdt::CellId& id, bool own);
  void let_go(Nanos now);
  void tell_fullness(Nanos now);
  bool drain(Nanos now);
  bool sweep_due(Nanos now) const;
  void sweep(Nanos now);
  void dispatch();
  void reopen_store(Nanos wall);
  void refill(Nanos now);
  void handle_alarms(Nanos now);
  void tell_alarm(const crdt::Alarm& alarm, Nanos now);
  void renew(Nanos now);
  void reincarnate(const crdt::Incarnation& fresh, bool memory_only, Nanos now);
  void answer_waiters(bool failed);

  EngineOptions options_;
  storage::Store* store_;
  EngineEvents events_;
  std::unique_ptr<Limiter> limiter_;
  std::unique_ptr<crdt::Replica> replica_;
  std::unique_ptr<EscrowAgent> escrow_;
  const internal::SipHash<2, 4> ticket_hash_;
  std::atomic<Nanos> time_{0};
  std::atomic<Nanos> ceiling_{kNever};    // durable; raised by the store's thread
  std::atomic<bool> stalled_{false};      // the ceiling does not hold time
  std::atomic<bool> durable_{false};      // what is decided now can be: writing_, and no refill_
  std::atomic<bool> store_broke_{false};  // known to the store's thread before the driver's
  Nanos reserved_ = 0;
  std::optional<Nanos> behind_since_;  // on the wall clock, which is too far behind
  bool set_back_ = false;
  Nanos was_set_back_ = 0;  // before the start
  Nanos time_stood_ = 0;    // at the ceiling
  // The last pass of the sweep over all series.
  Nanos swept_at_ = 0;
  bool sweeping_ = false;  // it goes on
  bool sweep_found_some_ = true;
  std::uint64_t refused_when_swept_ = 0;
  std::optional<Nanos> swept_;    // a pass has ended that began with this floor
  std::uint64_t generation_ = 1;  // of drains: what is decided now is in the one that ends next
  crdt::WriteId last_write_ = 0;
  crdt::WriteId persisted_ = 0;
  std::deque<Drained> drained_;
  std::uint64_t durable_generation_ = 0;
  std::deque<Waiter> waiters_;
  std::atomic<std::size_t> waiting_{0};  // requests of waiters
  std::atomic<Nanos> waits_since_{0};    // the first of them, on the wall clock
  std::atomic<std::uint64_t> shed_{0};
  Nanos wall_ = 0;  // when the driver last said it: the engine's own clock stands with the disk
  std::vector<crdt::OwnCount> counts_;
  crdt::Cell cell_;  // working memory
  std::vector<crdt::CellId> cells_;
  Nanos next_let_go_ = 0;
  std::uint64_t series_refused_ = 0;  // as was told last
  Nanos series_told_ = 0;             // when, by this engine's clock; 0: there was room since
  std::mutex over_admission_mutex_;
  OverAdmission over_admission_;
  bool more_to_drain_ = false;           // it stopped at kMostDrained
  bool drained_all_ = false;             // the last pump() left nothing in the limiter
  bool last_counts_known_ = false;       // what hand_over() found is in handed_over_write_
  std::vector<std::size_t> heirs_;       // EscrowAgent::handed_over, as it was last
  crdt::WriteId handed_over_write_ = 0;  // with that
  std::uint64_t handed_over_stamp_ = 0;  // up to here they have to acknowledge; 0: not known
  bool holding_ = false;
  bool writing_ = false;     // the store takes writes
  bool disk_short_ = false;  // it is nearly full
  Nanos next_space_ = 0;
  // A store that has failed:
  bool reopening_ = false;  // it was asked to open again, as reopened_as_ at reopened_at_
  crdt::Incarnation reopened_as_;
  Nanos reopened_at_ = 0;
  Nanos reopen_due_ = 0;   // by the wall clock
  Nanos reopen_wait_ = 0;  // the last one
  std::unique_ptr<Refill> refill_;
  std::optional<crdt::WriteId> refilled_;  // the last write of it, once all are made
  bool closed_ = false;                    // the store is, by stop()
  bool renew_wanted_ = false;              // a tripwire asked for a new incarnation
  bool renewing_ = false;                  // it is its time; writes are still on their way
  Nanos renew_due_ = 0;                    // not before
  Nanos renew_wait_ = 0;                   // the last one
  struct Told {
    Nanos at = 0;
    std::uint64_t more = 0;  // of its kind since, that nobody was told of
  };
  std::map<std::pair<crdt::AlarmKind, crdt::PeerIndex>, Told> told_;
  std::string failure_;
  std::uint64_t unabsorbed_ = 0;
  std::uint64_t reincarnations_ = 0;
};

}  // namespace weir::node
