#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <weir/proptests/sim/random.h>
#include <weir/storage/store.h>
#include <weir/storage/time_lived.h>

namespace weir::sim {

/// Ways to break the rules on purpose, so that the tests can see the checker notice.
enum class Sabotage : std::uint8_t {
  none,
  lying_store,         ///< says "committed" one commit before it holds the data
  forgetful_store,     ///< now and then drops a write it was given
  ignored_sync_error,  ///< takes a failed sync for a good one
  counted_twice,       ///< recovery offers the old counts once more, under the new incarnation
  lost_clock,          ///< forgets how far time had come
  reused_incarnation,  ///< a node boots under its former id
  inflating_network,   ///< raises a count on its way
  early_ack,           ///< the network answers for a peer before its disk does
  leaky_stop,          ///< a clean stop loses what was not committed yet
};

/// What is on a disk: the join of everything that was synced.
struct Image {
  std::map<crdt::CellId, crdt::Cell> cells;
  std::map<crdt::Incarnation, crdt::Member> members;
  std::vector<crdt::Incarnation> incarnations;
  Nanos ceiling = 0;
  crdt::LostWindows lost;
  storage::TimeLived lived;
  /// What of it is kept, as the real store does it: as it was when a range began. A start extends
  /// the last one to the floor that it finds, which after a clean stop is not what was reserved.
  std::vector<crdt::TimeRange> lived_kept;
  bool clean = false;
  /// When the bucket of a slot was full again, as the last write that had the slot said. A store
  /// may forget it from then on, also if the bucket goes on with other slots.
  std::map<std::pair<crdt::CellId, crdt::SlotId>, Nanos> slot_expiry;

  void take_in(const crdt::Delta& delta);
  std::uint64_t value_of(const crdt::CellId& cell, const crdt::SlotId& slot) const;
  /// Time is reserved up to there.
  void reached(Nanos floor) {
    if (lived.reached(floor)) lived_kept = lived.ranges();
  }
  storage::Recovered recovered() const;
};

/// A real store under the simulated one. Every call blocks until it is done, so that the schedule
/// stays the simulator's.
class Backing {
 public:
  virtual ~Backing() = default;
  virtual bool open(const crdt::Incarnation& fresh, Nanos now, storage::Recovered& out,
                    std::string& error) = 0;
  virtual bool adopt(const crdt::Incarnation& fresh, Nanos now, std::string& error) = 0;
  virtual void commit(const std::vector<crdt::Write>& writes, Nanos ceiling) = 0;
  /// The same, but the sync reports an error; `written` says whether the data got there.
  virtual void fail(const std::vector<crdt::Write>& writes, Nanos ceiling, bool written) = 0;
  virtual void expire(Nanos floor) = 0;
  virtual void close(Nanos now) = 0;
  virtual void crash() = 0;
  // While it is closed:
  virtual void wipe() = 0;
  virtual void save_copy() = 0;
  virtual void load_copy() = 0;
};

/// One node's disk. Outlives its processes.
struct Disk {
  Image image;
  Image copy;  ///< the backup
  bool has_copy = false;
  bool failing = false;
  bool full = false;
  std::int64_t slowness = 1;
  std::unique_ptr<Backing> backing;
};

/// What a SimStore needs from the world.
struct StoreHost {
  /// Runs `call` after `delay`, unless the process has ended by then.
  std::function<void(Nanos delay, std::function<void()> call)> after;
  /// `write` has just become durable.
  std::function<void(const crdt::Write& write)> durable;
  /// A commit has reached the disk, and nobody knows it yet. True: the process dies here.
  std::function<bool()> dies_after_commit;
  Random* random = nullptr;
  Nanos latency = kMillisecond;
  Nanos tell_delay = kMillisecond;
  bool reorders = false;
  Sabotage sabotage = Sabotage::none;
};

/// The store of one process: group commit with latency; a write is durable or not as a whole, as in
/// one LMDB transaction. What was not synced when the process dies is lost, or a part of it was.
class SimStore final : public storage::Store {
 public:
  SimStore(Disk& disk, StoreHost host) : disk_(disk), host_(std::move(host)) {}

  bool open(const crdt::Incarnation& fresh, Nanos now, storage::StoreEvents events,
            storage::Recovered& out, std::string& error) override;
  bool adopt(const crdt::Incarnation& fresh, Nanos now, std::string& error) override;
  void reopen(const crdt::Incarnation& fresh, Nanos now) override;
  void append(crdt::Write write) override;
  void expire(Nanos floor) override;
  void reserve_time(Nanos ceiling) override;
  std::uint64_t backlog() const override { return queue_.size() + batch_.size(); }
  void close(Nanos now) override;
  storage::StoreCounters counters() const override { return counters_; }

  /// The process dies: decides what of the un-synced writes is on the disk.
  void crash();
  Nanos expired_to() const { return expired_; }
  bool failed() const { return failed_; }

 private:
  bool attach(const crdt::Incarnation& fresh, Nanos now, storage::Recovered& out,
              std::string& error);
  void begin();
  void finish();
  void hold(std::vector<crdt::Write> writes, Nanos ceiling);
  void fail(const std::string& reason);
  void drop_expired();

  Disk& disk_;
  StoreHost host_;
  storage::StoreEvents events_;
  std::vector<crdt::Write> queue_;
  std::vector<crdt::Write> batch_;   // being committed
  std::vector<crdt::Write> cached_;  // sabotage: reported, not held
  Nanos ceiling_wanted_ = 0;
  Nanos batch_ceiling_ = 0;
  Nanos expire_wanted_ = 0;
  Nanos expire_settling_ = 0;
  Nanos expired_ = 0;
  std::uint64_t opened_ = 0;  // how often: what was planned before is over
  bool busy_ = false;
  bool failed_ = false;
  storage::StoreCounters counters_;
};

}  // namespace weir::sim
