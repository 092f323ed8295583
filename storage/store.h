#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include <weir/crdt/cell.h>
#include <weir/crdt/replica.h>

namespace weir::storage {

/// A clock may be so far behind the time floor: time was reserved ahead, or the clock was slewed,
/// and decisions wait for it at that floor. One that is further behind was set back, or was wrong.
inline constexpr Nanos kMostTimeWaits = 2 * kSecond;

/// What a store found when it was opened.
struct Recovered {
  crdt::Delta state;  ///< every live cell, all writers
  /// No time that a decision before the stop used was later than this: it was reserved, or the
  /// time of an open() or close(). 0 on a new store. After a clock was set back it is the `now` of
  /// open(), and a decision may have used any time up to `lost.ended`.
  Nanos time_floor = 0;
  Nanos set_back = 0;      ///< by so much, more than kMostTimeWaits; 0: it was not
  crdt::LostWindows lost;  ///< by this and earlier clocks that were set back
  /// Earlier boots of this node, oldest first, without the one being made.
  std::vector<crdt::Incarnation> incarnations;
  bool clean = false;  ///< the last stop was an orderly close()
};

/// What happened to writes, told on the store's own thread.
struct StoreEvents {
  /// All writes up to `upto` are durable.
  std::function<void(crdt::WriteId upto)> committed;
  /// The store failed (disk full, map full, I/O or sync error, its files are gone). Nothing more is
  /// acknowledged until it is opened again.
  std::function<void(const std::string& reason)> failed;
  /// Times up to `ceiling` are durably reserved: see reserve_time().
  std::function<void(Nanos ceiling)> reserved = {};
  /// It is open again, and this is what it held: see reopen().
  std::function<void(std::shared_ptr<Recovered>)> opened = {};
};

struct StoreCounters {
  std::uint64_t commits = 0;
  std::uint64_t records = 0;
  std::uint64_t bytes = 0;
  std::uint64_t folded_cells = 0;
  std::uint64_t scanned_buckets = 0;  ///< looked at by scans for expired ones, in whole steps
  std::uint64_t dropped_generations = 0;
  std::uint64_t log_records = 0;  ///< waiting to be folded
  std::uint64_t stale_readers = 0;
  std::uint64_t map_used_bytes = 0;  ///< of the file, once used
  std::uint64_t map_free_bytes = 0;  ///< of these, to be used again; 0 while there is much else
  std::uint64_t map_bytes = 0;       ///< LmdbOptions::map_bytes
  Nanos last_commit_time = 0;        ///< how long the last commit took
};

/// Holds what must survive a crash. The node drives it; the simulator puts a faulty one in its
/// place. All members may be called from one thread; events come from another.
class Store {
 public:
  virtual ~Store() = default;

  /// Starts a new boot: makes `fresh` durable before it returns, so that no incarnation is ever
  /// used twice, reserves time up to `now`, and reads what is there. Where `now` is more than
  /// kMostTimeWaits behind the time floor, time goes on at `now`: Recovered::set_back. Called once,
  /// first. On failure returns false and a message that names the file.
  virtual bool open(const crdt::Incarnation& fresh, Nanos now, StoreEvents events, Recovered& out,
                    std::string& error) = 0;

  /// Takes another incarnation, durable before this returns. On failure returns false and why: it
  /// was used before, or the store has failed. What is written after it may be under either.
  virtual bool adopt(const crdt::Incarnation& fresh, Nanos now, std::string& error) = 0;

  /// After failed(): opens the files again under `fresh`, as open() does, on the store's own
  /// thread. What was queued and not committed is forgotten. `opened` follows, or `failed` once
  /// more.
  virtual void reopen(const crdt::Incarnation& fresh, Nanos now) = 0;

  /// Queues a write. `committed` follows, in order; several are grouped in one commit.
  virtual void append(crdt::Write write) = 0;

  /// Cells whose expiry is at or before `floor` may be deleted. Rises.
  virtual void expire(Nanos floor) = 0;

  /// Asks that decisions up to `ceiling` may be made: after a crash, time resumes there. Durable
  /// with the next commit, which this causes; `reserved` follows. Rises.
  virtual void reserve_time(Nanos ceiling) = 0;

  /// Writes queued and not yet committed: the driver holds back when there are many.
  virtual std::uint64_t backlog() const = 0;

  /// Commits everything queued, marks a clean stop at `now`, joins the thread.
  virtual void close(Nanos now) = 0;

  virtual StoreCounters counters() const = 0;
};

struct LmdbOptions {
  std::string path;                       ///< a directory; made if missing
  std::string cluster;                    ///< identity check: a store of another cluster or node
  crdt::Member self;                      ///<   is refused
  std::uint64_t map_bytes = 64ull << 30;  ///< address space, not memory; the file grows as needed
  Nanos max_skew = kSecond;               ///< ReplicaOptions::max_skew
  std::uint64_t seed = 1;                 ///< secret: how tables in memory are hashed
};

std::unique_ptr<Store> make_lmdb_store(LmdbOptions options);

}  // namespace weir::storage
