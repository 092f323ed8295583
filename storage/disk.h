#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include <weir/crdt/table_hash.h>
#include <weir/storage/fold_set.h>
#include <weir/storage/lmdb_env.h>
#include <weir/storage/store.h>
#include <weir/storage/time_lived.h>

namespace weir::storage {

/// Tries to write a little beside a store. Returns 0, or the system's error: ENOSPC where LMDB may
/// have said EIO, as it does of a write that came half through.
int try_to_write(const std::string& directory);

/// The files of one store and what their tables mean (docs/storage-format.md). Not thread-safe:
/// open() runs on the caller's thread, everything after on the writer's. Every function throws
/// StoreError; after that, and after a transaction that did not commit, the object may only be
/// destroyed (what it remembers is then ahead of the disk).
class Disk {
 public:
  struct Log {
    std::uint64_t first = 1;  ///< the oldest record; one above `last` if there is none
    std::uint64_t last = 0;
    std::uint64_t bytes = 0;
    std::uint64_t records() const { return last + 1 - first; }
  };

  explicit Disk(LmdbOptions options, std::size_t max_handles);
  ~Disk();

  /// Makes or checks the store, reads all of it, and makes the new boot durable. Throws with the
  /// path and the reason, in which case nothing of an existing store was changed.
  Recovered open(const crdt::Incarnation& fresh, Nanos now);

  MDB_env* env() const { return env_.get(); }
  const Log& log() const { return log_; }
  const std::set<crdt::Generation>& tables() const { return tables_; }
  std::uint64_t map_used() const;
  /// Of that, what is free. In proportion to it.
  std::uint64_t map_free() const;
  /// Throws if the files are not where they were when they were opened: what is written from then
  /// on would be found by nobody.
  void check_in_place() const;
  /// Frees what readers that died left behind; returns how many.
  std::uint64_t clear_stale_readers();

  /// Appends one log record. `delta` has only valid cells.
  std::uint64_t append(Txn& txn, const crdt::Delta& delta);
  /// Records another boot's incarnation; false if it was used before.
  bool adopt(Txn& txn, const crdt::Incarnation& fresh, Nanos now);
  /// The time record: where time resumes, and whether the stop was clean.
  void put_time(Txn& txn, Nanos floor, bool clean);

  /// The fold, in two phases of bounded steps. gather() reads records, none above `upto`, into
  /// memory and joins them, until it has read `cells` or `bytes`, or holds `most` cells; true once
  /// all or enough are gathered. Then put_gathered() joins up to `cells` of them a call into the
  /// tables, in the order of their keys (so that a page is written once a fold, not once a step);
  /// true once all are there, and with the last it deletes their records. A crash in between
  /// folds the same records again, which changes nothing.
  ///
  /// Windowed cells whose generation ended at or before `floor` are forgotten; a stored bucket
  /// that expired at or before `settled` counts as absent.
  bool gather(std::uint64_t upto, std::size_t cells, std::size_t bytes, std::size_t most);
  std::size_t gathered() const { return gathered_.size(); }
  bool put_gathered(Txn& txn, std::size_t cells, Nanos floor, Nanos settled);

  /// Drops up to `limit` tables of generations that ended at or before `floor`; returns how many.
  std::size_t drop_ended(Txn& txn, Nanos floor, std::size_t limit);
  bool any_ended(Nanos floor) const;

  /// Looks at up to `count` buckets from `from` on; returns the keys of those expired at or before
  /// `floor`, and leaves in `from` where to go on (empty: at the end).
  std::vector<Bytes> expired_buckets(Bytes& from, Nanos floor, std::size_t count);
  /// No stored bucket expires before this. As exact as the last time that expired_buckets() went
  /// through all of them; 0 before the first.
  Nanos first_bucket_expiry() const { return first_expiry_; }
  void erase_buckets(Txn& txn, const std::vector<Bytes>& keys);

  /// Closes table handles if there are many. Outside of transactions only.
  void trim_handles();

 private:
  using Cells = std::unordered_map<crdt::CellId, crdt::Cell, crdt::TableHash>;
  using Incarnations = std::unordered_set<crdt::Incarnation, crdt::TableHash>;
  struct Writer {
    std::uint32_t number = 0;
    bool named = false;
  };

  void make_directory();
  void lock();
  void create_data();
  void write_marker();
  void start_env();
  void read_all(Recovered& out);
  void find_tables(const Txn& txn);
  void forget_unused_writers(Txn& txn);
  void read_meta(const Txn& txn, Recovered& out);
  void read_lived(const Txn& txn, MDB_dbi meta, Recovered& out);
  void read_boots(const Txn& txn, MDB_dbi meta, Recovered& out);
  void read_writers(const Txn& txn, MDB_dbi dbi);
  void read_log(const Txn& txn, Cells& cells);
  void read_table(const Txn& txn, const crdt::Generation& generation, Cells& fresh,
                  crdt::Delta& out);
  MDB_dbi table(const Txn& txn, const crdt::Generation& generation, bool create);
  std::uint32_t number_of(Txn& txn, const crdt::Incarnation& writer);
  static void put_ranges(Bytes& value, const std::vector<crdt::TimeRange>& ranges);
  void put_lived(Txn& txn, MDB_dbi meta);
  void put_boot(Txn& txn, const crdt::Incarnation& fresh, Nanos now);
  void put_writer(Txn& txn, const crdt::Incarnation& writer, Writer& entry);
  void pack(Txn& txn, const crdt::Cell& cell, Bytes& value);
  crdt::Cell unpack(View key, View value, const crdt::Generation& generation);
  std::string file(const char* name) const { return options_.path + "/" + name; }
  [[noreturn]] void damaged(const std::string& what) const;

  LmdbOptions options_;
  std::size_t max_handles_;
  const crdt::TableHash hash_;
  File marker_;  // locked while the store is open
  Env env_;
  MDB_dbi meta_ = 0;
  MDB_dbi log_dbi_ = 0;
  MDB_dbi writers_dbi_ = 0;
  Log log_;
  std::uint64_t boots_ = 0;
  TimeLived lived_;
  Incarnations taken_;  // by every boot
  std::set<crdt::Generation> tables_;
  std::map<crdt::Generation, MDB_dbi> handles_;
  std::unordered_map<crdt::Incarnation, Writer, crdt::TableHash> writers_;
  std::unordered_map<std::uint32_t, crdt::Incarnation> by_number_;
  bool reading_ = true;  // open() has not finished
  Incarnations used_;    // writers of what open() read
  std::map<crdt::Incarnation, crdt::Member> members_;
  std::uint32_t next_writer_ = 0;
  FoldSet gathered_;
  std::uint64_t gathered_upto_ = 0;
  std::uint64_t gathered_bytes_ = 0;
  Nanos first_expiry_ = 0;
  Nanos expiry_written_ = kNever;  // the earliest of what was written since a scan began
  Nanos expiry_kept_ = kNever;     // and of what that scan has left
  std::vector<crdt::Incarnation> named_late_;  // their records lack the name
  Bytes key_;
  Bytes value_;
};

}  // namespace weir::storage
