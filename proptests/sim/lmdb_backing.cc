#include <weir/proptests/sim/lmdb_backing.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <filesystem>
#include <mutex>
#include <utility>

#include <weir/proptests/sim/checker.h>
#include <weir/storage/lmdb_store.h>

namespace weir::sim {
namespace {

namespace fs = std::filesystem;

/// Real time, for a loaded machine.
constexpr std::chrono::seconds kPatience{120};

/// Hands over one batch at a time and waits for it: LMDB commits on a thread of its own, and the
/// order in which things happen must be the simulator's.
class LmdbBacking final : public Backing {
 public:
  LmdbBacking(std::string path, crdt::Member self)
      : path_(std::move(path)), self_(std::move(self)) {
    wipe();
  }
  ~LmdbBacking() override {
    store_.reset();
    wipe();
    std::error_code ignored;
    fs::remove_all(path_ + ".copy", ignored);
  }

  bool open(const crdt::Incarnation& fresh, Nanos now, storage::Recovered& out,
            std::string& error) override {
    storage::LmdbOptions options;
    options.path = path_;
    options.cluster = "sim";
    options.self = self_;
    options.map_bytes = 1u << 28;
    storage::LmdbTuning tuning;
    tuning.fold_records = 64;
    tuning.fold_step_cells = 32;
    tuning.scan_interval = std::chrono::milliseconds(50);
    storage::LmdbHooks hooks;
    hooks.before_commit = [this] { return sync_fails_ ? EIO : 0; };
    sync_fails_ = false;
    committed_ = 0;
    failed_ = false;
    store_ = storage::make_lmdb_store(options, tuning, hooks);
    storage::StoreEvents events;
    events.committed = [this](crdt::WriteId upto) {
      std::lock_guard lock(mutex_);
      committed_ = upto;
      changed_.notify_all();
    };
    events.failed = [this](const std::string&) {
      std::lock_guard lock(mutex_);
      failed_ = true;
      changed_.notify_all();
    };
    if (!store_->open(fresh, now, std::move(events), out, error)) {
      store_.reset();
      return false;
    }
    ceiling_ = std::max(out.time_floor, now);
    return true;
  }

  bool adopt(const crdt::Incarnation& fresh, Nanos now, std::string& error) override {
    return store_->adopt(fresh, now, error);
  }

  void commit(const std::vector<crdt::Write>& writes, Nanos ceiling) override {
    std::uint64_t before = store_->counters().commits;
    crdt::WriteId last = hand_over(writes, ceiling);
    if (last == 0 && ceiling <= ceiling_) return;
    ceiling_ = std::max(ceiling_, ceiling);
    std::unique_lock lock(mutex_);
    auto give_up = std::chrono::steady_clock::now() + kPatience;
    if (last != 0) {
      changed_.wait_until(lock, give_up, [&] { return failed_ || committed_ >= last; });
      if (!failed_ && committed_ < last) throw Violation{28, path_ + ": no commit, no failure"};
    } else {
      // A time alone is committed without a word.
      while (!failed_ && store_->counters().commits == before) {
        changed_.wait_for(lock, std::chrono::microseconds(200));
        if (std::chrono::steady_clock::now() > give_up) {
          throw Violation{11, path_ + ": a time that is not committed"};
        }
      }
    }
    if (failed_) throw Violation{33, path_ + ": LMDB failed by itself"};
  }

  void fail(const std::vector<crdt::Write>& writes, Nanos ceiling, bool written) override {
    // Nobody was told of the commit, so a good one and then a failure is the same to the node.
    if (written) commit(writes, ceiling);
    sync_fails_ = true;
    hand_over(written ? std::vector<crdt::Write>{} : writes, ceiling_ + 1);
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, kPatience, [&] { return failed_; })) {
      throw Violation{33, path_ + ": a failed sync that nobody was told of"};
    }
  }

  void expire(Nanos floor) override { store_->expire(floor); }

  void close(Nanos now) override {
    store_->close(now);
    store_.reset();
  }

  void crash() override { store_.reset(); }

  void wipe() override {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
    ceiling_ = 0;
  }
  void save_copy() override {
    fs::remove_all(path_ + ".copy");
    if (fs::exists(path_)) fs::copy(path_, path_ + ".copy", fs::copy_options::recursive);
  }
  void load_copy() override {
    wipe();
    if (fs::exists(path_ + ".copy")) {
      fs::copy(path_ + ".copy", path_, fs::copy_options::recursive);
    }
  }

 private:
  crdt::WriteId hand_over(const std::vector<crdt::Write>& writes, Nanos ceiling) {
    if (ceiling > 0) store_->reserve_time(ceiling);
    crdt::WriteId last = 0;
    for (const crdt::Write& write : writes) {
      store_->append(write);
      last = write.id;
    }
    return last;
  }

  std::string path_;
  crdt::Member self_;
  std::unique_ptr<storage::Store> store_;
  std::atomic<bool> sync_fails_{false};
  Nanos ceiling_ = 0;
  std::mutex mutex_;
  std::condition_variable changed_;
  crdt::WriteId committed_ = 0;
  bool failed_ = false;
};

}  // namespace

std::unique_ptr<Backing> make_lmdb_backing(const std::string& path, const crdt::Member& self) {
  return std::make_unique<LmdbBacking>(path, self);
}

}  // namespace weir::sim
