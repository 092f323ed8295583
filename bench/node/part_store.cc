#include <fmt/format.h>

#include <condition_variable>
#include <filesystem>
#include <mutex>

#include <weir/bench/keys.h>
#include <weir/bench/machine.h>
#include <weir/bench/node/node_parts.h>
#include <weir/bench/node/pushes.h>
#include <weir/bench/working_node.h>
#include <weir/storage/store.h>

namespace weir::bench {
namespace {

constexpr std::size_t kWrite = 2048;       // cells; an engine hands over as many at once
constexpr std::uint64_t kMostBehind = 64;  // writes; so does an engine

/// A store, and how far it is.
class Disk {
 public:
  explicit Disk(const std::string& path) {
    storage::LmdbOptions options;
    options.path = path;
    options.cluster = "bench";
    options.self = {"here", "node-0"};
    store_ = storage::make_lmdb_store(options);
    storage::StoreEvents events;
    events.committed = [this](crdt::WriteId upto) {
      std::lock_guard lock(mutex_);
      committed_ = upto;
      changed_.notify_all();
    };
    events.failed = [this](const std::string& reason) {
      std::lock_guard lock(mutex_);
      failure_ = reason;
      changed_.notify_all();
    };
    storage::Recovered found;
    std::string error;
    if (!store_->open({1, 1}, wall_clock(), events, found, error)) throw std::runtime_error(error);
  }
  ~Disk() { store_->close(wall_clock()); }

  void write(crdt::Delta delta) {
    while (store_->backlog() >= kMostBehind) wait(written_ - kMostBehind / 2);
    store_->append({++written_, std::move(delta)});
  }
  /// Until everything written is durable.
  void finish() { wait(written_); }

 private:
  void wait(crdt::WriteId upto) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return committed_ >= upto || !failure_.empty(); });
    if (!failure_.empty()) throw std::runtime_error(failure_);
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  crdt::WriteId committed_ = 0;
  std::string failure_;
  crdt::WriteId written_ = 0;
  std::unique_ptr<storage::Store> store_;
};

}  // namespace

Json node_store(const NodeBenchOptions& options) {
  const std::string path = options.scratch + "/store";
  const Pushes pushes("token_bucket");
  const Nanos now = wall_clock();
  std::vector<crdt::OwnCount> counts;
  for (std::uint64_t first = 0; first < options.counted_keys; first += kWrite) {
    const auto some =
        pushes.counts(first, std::min<std::uint64_t>(kWrite, options.counted_keys - first), now);
    counts.insert(counts.end(), some.begin(), some.end());
  }
  Disk disk(path);
  std::vector<double> rates;  // of rounds; in the first one every cell is new
  std::uint64_t random = 1;
  for (int round = 0; round <= options.rounds; ++round) {
    const std::uint64_t from = steady_ns();
    for (std::size_t at = 0; at < counts.size(); at += kWrite) {
      std::vector<crdt::OwnCount> some;
      const std::size_t end = std::min(at + kWrite, counts.size());
      for (std::size_t i = at; i < end; ++i) {
        crdt::OwnCount& count = counts[round == 0 ? i : next_random(random) % counts.size()];
        count.value += 1;
        count.bucket.checkpoint.counted = count.value;
        some.push_back(count);
      }
      disk.write(Pushes::push({1, 1}, 0, some).delta);
    }
    disk.finish();
    rates.push_back(static_cast<double>(counts.size()) * 1e9 /
                    static_cast<double>(steady_ns() - from));
  }
  const double first = rates.front();
  rates.erase(rates.begin());
  return {{"part", "store"},
          {"cells", counts.size()},
          {"first_per_s", std::round(first)},
          {"updates_per_s", spread_of(rates)},
          {"figures", {{"durable_updates_per_s", std::round(median_of(rates))}}}};
}

}  // namespace weir::bench
