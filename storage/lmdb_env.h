#pragma once

#include <lmdb.h>

#include <cstddef>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include <weir/storage/record.h>

namespace weir::storage {

/// Thrown inside the folder only; Store turns it into an error value or the failed() event.
struct StoreError : std::runtime_error {
  explicit StoreError(const std::string& what, int error = 0)
      : std::runtime_error(what), code(error) {}
  int code = 0;  ///< LMDB's or the system's, where one is known
};

/// Throws StoreError("what: LMDB's message") unless `rc` is MDB_SUCCESS.
inline void check(int rc, std::string_view what) {
  if (rc == MDB_SUCCESS) return;
  throw StoreError(std::string(what) + ": " + mdb_strerror(rc), rc);
}

inline MDB_val to_val(View bytes) {
  return {bytes.size(), const_cast<std::byte*>(bytes.data())};
}

inline View to_view(const MDB_val& value) {
  return {static_cast<const std::byte*>(value.mv_data), value.mv_size};
}

/// A transaction; aborted unless committed. Not thread-safe, stays on its thread.
class Txn {
 public:
  Txn(MDB_env* env, unsigned flags) {
    check(mdb_txn_begin(env, nullptr, flags, &txn_), "cannot begin a transaction");
  }
  ~Txn() {
    if (txn_ != nullptr) mdb_txn_abort(txn_);
  }
  Txn(const Txn&) = delete;
  Txn& operator=(const Txn&) = delete;

  MDB_txn* get() const { return txn_; }
  /// Returns LMDB's code; the transaction is over either way.
  int commit() { return mdb_txn_commit(std::exchange(txn_, nullptr)); }

  /// MDB_NOTFOUND is an empty optional. Views last until the next write.
  std::optional<View> get(MDB_dbi dbi, View key) const {
    MDB_val k = to_val(key);
    MDB_val v{};
    int rc = mdb_get(txn_, dbi, &k, &v);
    if (rc == MDB_NOTFOUND) return std::nullopt;
    check(rc, "cannot read");
    return to_view(v);
  }
  void put(MDB_dbi dbi, View key, View value, unsigned flags = 0) {
    MDB_val k = to_val(key);
    MDB_val v = to_val(value);
    check(mdb_put(txn_, dbi, &k, &v, flags), "cannot write");
  }
  void erase(MDB_dbi dbi, View key) {
    MDB_val k = to_val(key);
    check(mdb_del(txn_, dbi, &k, nullptr), "cannot delete");
  }

 private:
  MDB_txn* txn_ = nullptr;
};

/// A cursor of a transaction that outlives it.
class Cursor {
 public:
  Cursor(const Txn& txn, MDB_dbi dbi) {
    check(mdb_cursor_open(txn.get(), dbi, &cursor_), "cannot open a cursor");
  }
  ~Cursor() { mdb_cursor_close(cursor_); }
  Cursor(const Cursor&) = delete;
  Cursor& operator=(const Cursor&) = delete;

  /// Moves; false at the end. key() and value() last until the next write.
  bool move(MDB_cursor_op op) {
    int rc = mdb_cursor_get(cursor_, &key_, &value_, op);
    if (rc == MDB_NOTFOUND) return false;
    check(rc, "cannot read");
    return true;
  }
  /// Moves to the first key at or after `key`.
  bool seek(View key) {
    key_ = to_val(key);
    return move(MDB_SET_RANGE);
  }
  /// Moves to `key`; false if it is not there. Cheap where it is on the page of the last one.
  bool find(View key) {
    key_ = to_val(key);
    return move(MDB_SET_KEY);
  }
  View key() const { return to_view(key_); }
  View value() const { return to_view(value_); }
  /// Writes; the cursor is at `key` then.
  void put(View key, View value) {
    MDB_val k = to_val(key);
    MDB_val v = to_val(value);
    check(mdb_cursor_put(cursor_, &k, &v, 0), "cannot write");
  }
  void erase() { check(mdb_cursor_del(cursor_, 0), "cannot delete"); }

 private:
  MDB_cursor* cursor_ = nullptr;
  MDB_val key_{};
  MDB_val value_{};
};

/// A file descriptor, closed with its owner (which lets go of a lock on it).
class File {
 public:
  File() = default;
  explicit File(int fd) : fd_(fd) {}
  ~File();
  File(File&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  File& operator=(File&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  int get() const { return fd_; }

 private:
  int fd_ = -1;
};

/// An open environment, closed with its owner.
class Env {
 public:
  Env() = default;
  ~Env() { reset(); }
  Env(const Env&) = delete;
  Env& operator=(const Env&) = delete;

  void create() {
    reset();
    check(mdb_env_create(&env_), "cannot set LMDB up");
  }
  void reset() {
    if (env_ != nullptr) mdb_env_close(std::exchange(env_, nullptr));
  }
  MDB_env* get() const { return env_; }

 private:
  MDB_env* env_ = nullptr;
};

}  // namespace weir::storage
