#pragma once

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <filesystem>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <weir/crdt/cell.h>
#include <weir/storage/lmdb_store.h>

/// What the tests of this folder share.
namespace weir::storage::testing {

/// A directory of its own, deleted at the end.
class TempDir {
 public:
  TempDir() {
    std::string name = (std::filesystem::temp_directory_path() / "weir-storage-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp failed: " + name);
    path_ = name;
  }
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

/// Collects a store's events; wait_*() return false after a generous time.
class Watch {
 public:
  StoreEvents events() {
    return {[this](crdt::WriteId upto) {
              std::lock_guard lock(mutex_);
              if (upto <= committed_) ordered_ = false;
              if (!failures_.empty()) ordered_ = false;
              committed_ = upto;
              changed_.notify_all();
            },
            [this](const std::string& reason) {
              std::lock_guard lock(mutex_);
              failures_.push_back(reason);
              changed_.notify_all();
            }};
  }
  bool wait_committed(crdt::WriteId upto) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, kPatience, [&] { return committed_ >= upto || !failures_.empty(); });
    return committed_ >= upto;
  }
  bool wait_failed() {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, kPatience, [&] { return !failures_.empty(); });
  }
  crdt::WriteId committed() const {
    std::lock_guard lock(mutex_);
    return committed_;
  }
  std::vector<std::string> failures() const {
    std::lock_guard lock(mutex_);
    return failures_;
  }
  /// Commits rose, and none came after a failure.
  bool ordered() const {
    std::lock_guard lock(mutex_);
    return ordered_;
  }

 private:
  static constexpr std::chrono::seconds kPatience{20};
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  crdt::WriteId committed_ = 0;
  std::vector<std::string> failures_;
  bool ordered_ = true;
};

inline crdt::Incarnation incarnation(std::uint64_t number) {
  return {0x1000 + number, number + 1};
}

inline crdt::Cell windowed(std::uint64_t series, crdt::Epoch epoch,
                           std::vector<std::pair<std::uint64_t, std::uint64_t>> counts) {
  crdt::Cell cell;
  cell.id = {{series * 0x9E3779B97F4A7C15ull, series}, epoch};
  for (auto [writer, value] : counts) cell.raise({incarnation(writer), 0}, value);
  return cell;
}

inline crdt::Cell bucket(std::uint64_t series, std::uint64_t birth, std::uint64_t writer,
                         std::uint64_t value, Nanos at, Nanos expiry) {
  crdt::Cell cell;
  cell.id.series = {series * 0x9E3779B97F4A7C15ull, series};
  cell.raise({incarnation(writer), birth}, value);
  cell.bucket.checkpoint = {value, at, crdt::DebtTicks{value} << 66};
  cell.bucket.touched = at;
  cell.bucket.expiry = expiry;
  return cell;
}

/// The join of everything put in.
using Model = std::map<crdt::CellId, crdt::Cell>;

inline void join_into(Model& model, const crdt::Delta& delta) {
  for (const crdt::Cell& cell : delta.cells) {
    auto [at, added] = model.try_emplace(cell.id, cell);
    if (!added) crdt::join(at->second, cell);
  }
}

inline Model model_of(const crdt::Delta& delta) {
  Model model;
  join_into(model, delta);
  return model;
}

inline LmdbOptions options_for(const std::string& path) {
  LmdbOptions options;
  options.path = path;
  options.cluster = "test";
  options.self = {"eu", "node-1"};
  options.map_bytes = 1u << 30;
  return options;
}

/// Everything in the background happens at once.
inline LmdbTuning eager() {
  LmdbTuning tuning;
  tuning.fold_age = std::chrono::milliseconds(1);
  tuning.scan_interval = std::chrono::milliseconds(1);
  tuning.scan_pace = std::chrono::milliseconds(0);
  tuning.scan_step = 7;
  return tuning;
}

/// Nothing is folded until the test ends.
inline LmdbTuning lazy() {
  LmdbTuning tuning;
  tuning.fold_age = std::chrono::hours(1);
  tuning.fold_bytes = 1u << 30;
  tuning.fold_records = 1u << 30;
  return tuning;
}

/// Polls until `done` holds; false after a generous time.
template <typename Done>
bool eventually(Done done) {
  for (int i = 0; i < 20'000; ++i) {
    if (done()) return true;
    ::usleep(1000);
  }
  return false;
}

}  // namespace weir::storage::testing
