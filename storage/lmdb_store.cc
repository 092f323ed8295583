#include <weir/storage/lmdb_store.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include <fmt/format.h>

#include <weir/storage/disk.h>

namespace weir::storage {

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kDropStep = 256;
// The longest rest between two scans for expired buckets, in scan_intervals: five minutes.
constexpr int kMostScanPatience = 32;
/// Between two looks at whether the files are still where they were.
constexpr std::chrono::seconds kPlaceCheckInterval{1};
constexpr std::chrono::seconds kFreeCountInterval{1};
constexpr std::size_t kFirstFoldCells = 4096;
constexpr std::size_t kLeastFoldCells = 1024;

Nanos to_nanos(Clock::duration duration) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(duration).count();
}

/// About what crdt::encode() makes of it.
std::size_t estimate(const crdt::Cell& cell) {
  return 40 + 10 * cell.slots.size();
}

/// What decode() would refuse must not be acknowledged as stored.
void require_storable(const crdt::Delta& delta) {
  for (const crdt::Cell& cell : delta.cells) {
    if (!crdt::valid(cell)) throw StoreError("refused to store a malformed cell");
  }
  for (const auto& [incarnation, member] : delta.members) {
    if (member.region.size() > crdt::kMaxMemberName || member.node.size() > crdt::kMaxMemberName) {
      throw StoreError("refused to store a member with a name that is too long");
    }
  }
}

class LmdbStore final : public Store {
 public:
  LmdbStore(LmdbOptions options, LmdbTuning tuning, LmdbHooks hooks)
      : options_(std::move(options)), tuning_(tuning), hooks_(std::move(hooks)) {}

  ~LmdbStore() override {
    {
      std::lock_guard lock(mutex_);
      abandoned_ = true;
    }
    stop_thread();
  }

  bool open(const crdt::Incarnation& fresh, Nanos now, StoreEvents events, Recovered& out,
            std::string& error) override {
    if (disk_.has_value()) {
      error = fmt::format("{}: the store was opened before", options_.path);
      return false;
    }
    events_ = std::move(events);
    try {
      attach(fresh, now, out);
    } catch (const std::exception& failure) {
      error = explain(failure);
      disk_.reset();
      return false;
    }
    thread_ = std::thread([this] { run(); });
    return true;
  }

  void reopen(const crdt::Incarnation& fresh, Nanos now) override {
    {
      std::lock_guard lock(mutex_);
      accepting_ = false;
      reopening_ = Reopening{fresh, now};
    }
    wake_.notify_one();
  }

  bool adopt(const crdt::Incarnation& fresh, Nanos now, std::string& error) override {
    std::unique_lock lock(mutex_);
    if (accepting_) {
      adoption_ = Adoption{fresh, now};
      wake_.notify_one();
      adopted_.wait(lock, [this] { return !accepting_ || !adoption_->waiting; });
    }
    bool done = accepting_ && adoption_->taken;
    if (!done) {
      error = fmt::format("{}: {}", options_.path,
                          accepting_ ? "incarnation " + crdt::to_string(fresh) + " was used before"
                                     : "the store has failed");
    }
    adoption_.reset();
    return done;
  }

  void append(crdt::Write write) override {
    {
      std::lock_guard lock(mutex_);
      if (!accepting_) return;
      queue_.push_back(std::move(write));
      ++appended_;
    }
    wake_.notify_one();
  }

  void expire(Nanos floor) override {
    {
      std::lock_guard lock(mutex_);
      if (floor <= floor_wanted_) return;
      floor_wanted_ = floor;
    }
    wake_.notify_one();
  }

  void reserve_time(Nanos ceiling) override {
    {
      std::lock_guard lock(mutex_);
      if (ceiling <= ceiling_wanted_) return;
      ceiling_wanted_ = ceiling;
    }
    wake_.notify_one();
  }

  std::uint64_t backlog() const override {
    std::lock_guard lock(mutex_);
    return queue_.size() + in_commit_;
  }

  void close(Nanos now) override {
    {
      std::lock_guard lock(mutex_);
      accepting_ = false;
      closing_ = true;
      close_time_ = now;
    }
    stop_thread();
  }

  StoreCounters counters() const override {
    std::lock_guard lock(mutex_);
    return counters_;
  }

 private:
  struct Adoption {
    crdt::Incarnation fresh;
    Nanos now = 0;
    bool waiting = true;
    bool taken = false;
  };

  struct Reopening {
    crdt::Incarnation fresh;
    Nanos now = 0;
  };

  struct Wishes {
    std::optional<Adoption> adoption;
    Nanos ceiling = 0;
    Nanos floor = 0;
    std::uint64_t appended = 0;
    bool closing = false;
    bool abandoned = false;  // or to be opened again
  };

  void stop_thread() {
    wake_.notify_one();
    if (thread_.joinable()) thread_.join();
    disk_.reset();
  }

  /// Opens the files and begins anew.
  void attach(const crdt::Incarnation& fresh, Nanos now, Recovered& out) {
    disk_.reset();
    disk_.emplace(options_, tuning_.max_handles);
    out = disk_->open(fresh, now);
    stale_readers_ = disk_->clear_stale_readers();
    oldest_floor_ = out.time_floor;
    log_since_ = next_scan_ = Clock::now();
    next_reader_check_ = log_since_ + tuning_.reader_check_interval;
    next_place_check_ = log_since_ + kPlaceCheckInterval;
    fold_step_cells_ = std::min(kFirstFoldCells, tuning_.fold_step_cells);
    fold_target_ = 0;
    gathered_ = scanning_ = false;
    settling_floor_ = settled_floor_ = scanned_floor_ = 0;
    settling_record_.reset();
    committed_ = 0;
    pending_.clear();
    {
      std::lock_guard lock(mutex_);
      queue_.clear();
      appended_ = in_commit_ = 0;
      ceiling_ = ceiling_wanted_ = std::max(out.time_floor, now);
      accepting_ = true;
    }
    publish();
  }

  void run() {
    do {
      try {
        while (step()) {
        }
      } catch (const std::exception& failure) {
        fail(failure);
      }
    } while (open_again());
  }

  /// Once it is wanted. False: the store is to end.
  bool open_again() {
    while (true) {
      Reopening wanted;
      {
        std::unique_lock lock(mutex_);
        wake_.wait(lock, [this] { return abandoned_ || closing_ || reopening_.has_value(); });
        if (abandoned_ || closing_) return false;
        wanted = *std::exchange(reopening_, std::nullopt);
      }
      try {
        // Room for no more than a commit or two would soon be used up again.
        if (int error = try_to_write(options_.path); error != ENOENT) check(error, "cannot write");
        auto recovered = std::make_shared<Recovered>();
        attach(wanted.fresh, wanted.now, *recovered);
        if (events_.opened) events_.opened(std::move(recovered));
        return true;
      } catch (const std::exception& failure) {
        fail(failure);
      }
    }
  }

  /// Waits for work, makes at most one commit of writes and one bounded piece of maintenance.
  bool step() {
    Wishes wishes = wait();
    if (wishes.abandoned) return false;
    if (const Clock::time_point now = Clock::now(); now >= next_place_check_) {
      next_place_check_ = now + kPlaceCheckInterval;
      disk_->check_in_place();
    }
    if (wishes.adoption) commit_adoption(*wishes.adoption);
    if (!pending_.empty() || wishes.ceiling > ceiling_) {
      commit_writes(wishes.ceiling);
    } else if (wishes.closing) {
      commit_clean_stop();
      return false;
    }
    if (!wishes.closing) maintain(wishes);
    return true;
  }

  Wishes wait() {
    Clock::time_point due = next_due();
    std::unique_lock lock(mutex_);
    wake_.wait_until(lock, due, [this] {
      return abandoned_ || closing_ || reopening_.has_value() || adoption_wanted() ||
             !pending_.empty() || !queue_.empty() || ceiling_wanted_ > ceiling_ ||
             floor_wanted_ > floor_;
    });
    if (pending_.empty()) {
      pending_.swap(queue_);
      in_commit_ = pending_.size();
    }
    return {adoption_wanted() ? adoption_ : std::nullopt,
            ceiling_wanted_,
            floor_wanted_,
            appended_,
            closing_,
            abandoned_ || reopening_.has_value()};
  }

  bool adoption_wanted() const { return adoption_ && adoption_->waiting; }

  void commit_adoption(const Adoption& wanted) {
    Txn txn(disk_->env(), 0);
    bool taken = disk_->adopt(txn, wanted.fresh, wanted.now);
    if (taken) commit(txn);
    {
      std::lock_guard lock(mutex_);
      adoption_->waiting = false;
      adoption_->taken = taken;
    }
    adopted_.notify_one();
  }

  Clock::time_point next_due() const {
    Clock::time_point due = std::min(next_reader_check_, next_place_check_);
    if (disk_->log().records() > 0) {
      due = std::min(due, fold_target_ >= disk_->log().first ? Clock::time_point::min()
                                                             : log_since_ + tuning_.fold_age);
    }
    if (scanning_ || scan_wanted()) due = std::min(due, next_scan_);
    return due;
  }

  void commit(Txn& txn) {
    int rc = hooks_.before_commit ? hooks_.before_commit() : 0;
    if (rc == 0) rc = txn.commit();
    if (rc == 0 && hooks_.after_commit) rc = hooks_.after_commit();
    check(rc, "cannot commit");
  }

  /// Commits as many pending writes as fit one commit, and the ceiling.
  void commit_writes(Nanos ceiling) {
    Clock::time_point start = Clock::now();
    if (disk_->log().records() == 0) log_since_ = start;
    std::uint64_t writes = 0;
    std::uint64_t bytes = 0;
    std::uint64_t records = 0;
    crdt::WriteId upto = 0;
    Txn txn(disk_->env(), 0);
    crdt::Delta part;
    std::size_t part_bytes = 0;
    auto flush = [&] {
      if (part.cells.empty()) return;
      bytes += disk_->append(txn, part);
      ++records;
      part.cells.clear();
      part_bytes = 0;
    };
    while (!pending_.empty() && bytes + part_bytes < tuning_.commit_bytes) {
      crdt::Write write = std::move(pending_.front());
      pending_.pop_front();
      require_storable(write.delta);
      part.members.insert(write.delta.members.begin(), write.delta.members.end());
      for (crdt::Cell& cell : write.delta.cells) {
        part_bytes += estimate(cell);
        part.cells.push_back(std::move(cell));
        if (part.cells.size() >= tuning_.record_cells || part_bytes >= tuning_.record_bytes) {
          flush();
        }
      }
      upto = write.id;
      ++writes;
    }
    flush();
    if (ceiling > ceiling_) disk_->put_time(txn, ceiling, false);
    commit(txn);
    Clock::time_point end = Clock::now();
    committed_ += writes;
    std::uint64_t used = disk_->map_used();
    bool risen = ceiling > ceiling_;
    {
      std::lock_guard lock(mutex_);
      ceiling_ = std::max(ceiling_, ceiling);
      in_commit_ = pending_.size();
      ++counters_.commits;
      counters_.records += records;
      counters_.bytes += bytes;
      counters_.log_records = disk_->log().records();
      counters_.map_used_bytes = used;
      counters_.last_commit_time = to_nanos(end - start);
    }
    if (risen && events_.reserved) events_.reserved(ceiling);
    if (writes > 0 && events_.committed) events_.committed(upto);
  }

  /// An earlier boot may have gone further than this one: its decisions count as well.
  void commit_clean_stop() {
    Nanos now = 0;
    {
      std::lock_guard lock(mutex_);
      now = close_time_;
    }
    Txn txn(disk_->env(), 0);
    disk_->put_time(txn, std::max(now, oldest_floor_), true);
    commit(txn);
  }

  void maintain(const Wishes& wishes) {
    Clock::time_point now = Clock::now();
    {
      std::lock_guard lock(mutex_);
      floor_ = wishes.floor;
    }
    disk_->trim_handles();
    if (disk_->any_ended(wishes.floor)) {
      drop_ended(wishes.floor);
    } else if (fold_due(now)) {
      fold(wishes.floor);
    } else if (scan_due(now)) {
      scan(now);
    } else if (now >= next_reader_check_) {
      next_reader_check_ = now + tuning_.reader_check_interval;
      stale_readers_ += disk_->clear_stale_readers();
    }
    settle(wishes);
    publish();
  }

  void drop_ended(Nanos floor) {
    Txn txn(disk_->env(), 0);
    std::size_t dropped = disk_->drop_ended(txn, floor, kDropStep);
    commit(txn);
    dropped_ += dropped;
  }

  bool fold_due(Clock::time_point now) {
    const Disk::Log& log = disk_->log();
    if (log.records() == 0) return false;
    if (fold_target_ >= log.first) return true;
    if (log.bytes < tuning_.fold_bytes && log.records() < tuning_.fold_records &&
        now - log_since_ < tuning_.fold_age) {
      return false;
    }
    // Up to here and then a rest: what comes in meanwhile is better folded in one go later.
    fold_target_ = log.last;
    log_since_ = now;
    return true;
  }

  void fold(Nanos floor) {
    if (!gathered_) {
      gathered_ = disk_->gather(fold_target_, tuning_.fold_step_cells, tuning_.fold_step_bytes,
                                tuning_.fold_cells);
      return;
    }
    // A log that grows faster than it is folded takes a larger share of the thread, so that the
    // driver sees a backlog instead of a disk that fills up.
    std::size_t pressure = 1 + static_cast<std::size_t>(disk_->log().bytes / (64u << 20));
    pressure = std::min<std::size_t>(pressure, 16);
    std::size_t cells = fold_step_cells_ * pressure;
    std::uint64_t before = disk_->gathered();
    Clock::time_point start = Clock::now();
    Txn txn(disk_->env(), 0);
    bool done = disk_->put_gathered(txn, cells, floor, settled_floor_);
    commit(txn);
    Clock::duration took = Clock::now() - start;
    folded_ += before - disk_->gathered();
    if (done) gathered_ = false;
    if (took > tuning_.fold_step * pressure) {
      fold_step_cells_ =
          std::max(std::min(kLeastFoldCells, tuning_.fold_step_cells), fold_step_cells_ / 2);
    } else if (took < tuning_.fold_step * pressure / 2 && !done) {
      fold_step_cells_ = std::min(tuning_.fold_step_cells, fold_step_cells_ * 2);
    }
  }

  /// A bucket's stored state is a part of it while newer parts wait in the log, so its expiry may
  /// be too early. A floor is settled, and buckets may be deleted by it, once everything that was
  /// appended before it was learnt has been folded.
  void settle(const Wishes& wishes) {
    if (settling_floor_ == settled_floor_) {
      if (wishes.floor <= settled_floor_) return;
      settling_floor_ = wishes.floor;
      settling_after_ = wishes.appended;
      settling_record_.reset();
    }
    if (!settling_record_ && committed_ >= settling_after_) settling_record_ = disk_->log().last;
    if (settling_record_ && disk_->log().first > *settling_record_) {
      settled_floor_ = settling_floor_;
    }
  }

  bool scan_wanted() const {
    return settled_floor_ > scanned_floor_ && disk_->first_bucket_expiry() <= settled_floor_;
  }

  bool scan_due(Clock::time_point now) {
    if (now < next_scan_) return false;
    if (!scanning_ && scan_wanted()) {
      scanning_ = true;
      scanned_floor_ = settled_floor_;
      scan_from_.clear();
      scan_steps_ = 0;
      scan_erased_ = 0;
    }
    return scanning_;
  }

  /// A scan reads every bucket. One that found little was too early, and the next comes after twice
  /// the time, unless the map is getting full; so what is erased pays for what is read, and what
  /// has expired waits for some minutes at most.
  Clock::duration scan_rest() {
    const bool worth_it = scan_erased_ * 8 >= scan_steps_ * tuning_.scan_step;
    const bool tight = disk_->map_used() > options_.map_bytes / 2;
    scan_patience_ = worth_it || tight ? 1 : std::min(scan_patience_ * 2, kMostScanPatience);
    return tuning_.scan_interval * scan_patience_;
  }

  void scan(Clock::time_point now) {
    std::vector<Bytes> expired =
        disk_->expired_buckets(scan_from_, scanned_floor_, tuning_.scan_step);
    ++scan_steps_;
    scanned_ += tuning_.scan_step;
    scan_erased_ += expired.size();
    if (!expired.empty()) {
      Txn txn(disk_->env(), 0);
      disk_->erase_buckets(txn, expired);
      commit(txn);
    }
    scanning_ = !scan_from_.empty();
    if (scanning_) {
      next_scan_ = now + tuning_.scan_pace;
    } else {
      next_scan_ = now + scan_rest();
    }
  }

  void publish() {
    count_free();
    std::lock_guard lock(mutex_);
    counters_.folded_cells = folded_;
    counters_.dropped_generations = dropped_;
    counters_.scanned_buckets = scanned_;
    counters_.log_records = disk_->log().records();
    counters_.stale_readers = stale_readers_;
    counters_.map_used_bytes = disk_->map_used();
    counters_.map_free_bytes = map_free_;
    counters_.map_bytes = options_.map_bytes;
  }

  /// Where little of the map was never used.
  void count_free() {
    if (disk_->map_used() < options_.map_bytes / 2) {
      map_free_ = 0;
      return;
    }
    const Clock::time_point now = Clock::now();
    if (now < next_free_count_) return;
    next_free_count_ = now + kFreeCountInterval;
    map_free_ = disk_->map_free();
  }

  /// With the path; and the true reason where the system told LMDB another.
  std::string explain(const std::exception& failure) const {
    std::string text = failure.what();
    const auto* error = dynamic_cast<const StoreError*>(&failure);
    int code = error == nullptr ? 0 : error->code;
    if (code == EIO) code = try_to_write(options_.path);
    if (code == ENOSPC) text = fmt::format("no space left on the disk ({})", text);
    if (code == EFBIG) text = fmt::format("a file may not grow (limit of file sizes; {})", text);
    if (code == EDQUOT) text = fmt::format("the quota of the disk is used up ({})", text);
    if (code == MDB_MAP_FULL) {
      text = fmt::format("storage.map_size, {} bytes, is used up ({})", options_.map_bytes, text);
    }
    if (text.find(options_.path) == std::string::npos) text = options_.path + ": " + text;
    return text;
  }

  void fail(const std::exception& failure) {
    const std::string reason = explain(failure);
    disk_.reset();
    {
      std::lock_guard lock(mutex_);
      accepting_ = false;
      queue_.clear();
      in_commit_ = 0;
    }
    adopted_.notify_one();
    pending_.clear();
    if (!events_.failed) return;
    try {
      events_.failed(reason);
    } catch (const std::exception&) {
      // There is nobody left to tell.
    }
  }

  const LmdbOptions options_;
  const LmdbTuning tuning_;
  const LmdbHooks hooks_;
  StoreEvents events_;
  std::thread thread_;

  mutable std::mutex mutex_;  // guards from here to the next comment
  std::condition_variable wake_;
  std::condition_variable adopted_;
  std::optional<Adoption> adoption_;
  std::optional<Reopening> reopening_;
  std::deque<crdt::Write> queue_;
  std::uint64_t in_commit_ = 0;
  std::uint64_t appended_ = 0;
  Nanos ceiling_wanted_ = 0;
  Nanos floor_wanted_ = 0;
  Nanos ceiling_ = 0;  // written by the writer alone, as is floor_
  Nanos floor_ = 0;
  Nanos close_time_ = 0;
  bool accepting_ = false;
  bool closing_ = false;
  bool abandoned_ = false;
  StoreCounters counters_;

  // The writer's own, once it runs.
  std::optional<Disk> disk_;
  std::deque<crdt::Write> pending_;
  std::uint64_t committed_ = 0;
  Nanos oldest_floor_ = 0;
  Clock::time_point log_since_;
  std::uint64_t fold_target_ = 0;
  bool gathered_ = false;
  std::size_t fold_step_cells_ = 0;
  Nanos settling_floor_ = 0;
  Nanos settled_floor_ = 0;
  std::uint64_t settling_after_ = 0;
  std::optional<std::uint64_t> settling_record_;
  Nanos scanned_floor_ = 0;
  bool scanning_ = false;
  Bytes scan_from_;
  std::size_t scan_steps_ = 0;
  std::size_t scan_erased_ = 0;
  int scan_patience_ = 1;
  Clock::time_point next_scan_;
  Clock::time_point next_reader_check_;
  Clock::time_point next_free_count_;
  std::uint64_t map_free_ = 0;
  Clock::time_point next_place_check_;
  std::uint64_t folded_ = 0;
  std::uint64_t dropped_ = 0;
  std::uint64_t scanned_ = 0;
  std::uint64_t stale_readers_ = 0;
};

}  // namespace

std::unique_ptr<Store> make_lmdb_store(LmdbOptions options, LmdbTuning tuning, LmdbHooks hooks) {
  return std::make_unique<LmdbStore>(std::move(options), tuning, std::move(hooks));
}

std::unique_ptr<Store> make_lmdb_store(LmdbOptions options) {
  LmdbTuning tuning;
  // A small map has room for more than the log.
  tuning.fold_bytes = std::min(tuning.fold_bytes, options.map_bytes / 16);
  return make_lmdb_store(std::move(options), tuning, LmdbHooks{});
}

}  // namespace weir::storage
