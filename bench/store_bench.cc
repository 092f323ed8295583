// What a counted request costs in the store: processor time of the writer's thread a cell that is
// written, in writes of 5 ms as the engine makes them, over some folds. "rate" is how many cells a
// second are written, "keys" how many there are, drawn evenly. WEIR_BENCH_DIR says where the store
// lies; else where temporary files do.
#include <benchmark/benchmark.h>
#include <sys/resource.h>
#include <weir/bench/keys.h>
#include <weir/bench/machine.h>
#include <weir/storage/store.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <unordered_set>
#include <vector>

namespace weir::bench {
namespace {

constexpr auto kPump = std::chrono::milliseconds(5);
constexpr crdt::Incarnation kSelf{1, 1};
constexpr Nanos kStart = 1'000'000 * kSecond;

std::uint64_t process_cpu_ns() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  auto ns = [](const timeval& time) {
    return static_cast<std::uint64_t>(time.tv_sec) * 1'000'000'000 +
           static_cast<std::uint64_t>(time.tv_usec) * 1000;
  };
  return ns(usage.ru_utime) + ns(usage.ru_stime);
}

class Disk {
 public:
  Disk(std::uint64_t keys, bool buckets) : buckets_(buckets), totals_(keys) {
    const char* where = std::getenv("WEIR_BENCH_DIR");
    std::filesystem::path parent =
        where != nullptr ? where : std::filesystem::temp_directory_path().string();
    std::string name = (parent / "weir-bench-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("cannot make " + name);
    directory_ = name;
    storage::LmdbOptions options;
    options.path = (directory_ / "store").string();
    options.cluster = "bench";
    options.self = {"here", "one"};
    store_ = storage::make_lmdb_store(options);
    storage::StoreEvents events;
    events.failed = [this](const std::string&) { failed_ = true; };
    storage::Recovered recovered;
    std::string error;
    if (!store_->open(kSelf, kStart, events, recovered, error)) throw std::runtime_error(error);
    for (std::uint64_t key = 0; key < keys;) {
      crdt::Write write;
      for (; key < keys && write.delta.cells.size() < 4096; ++key) add(write.delta, key);
      append(std::move(write));
    }
    settle();
  }
  ~Disk() {
    store_.reset();
    std::error_code ignored;
    std::filesystem::remove_all(directory_, ignored);
  }

  /// Writes random cells at `rate` a second, until everything that was written is folded once.
  std::uint64_t write_for(std::chrono::seconds time, std::uint64_t rate) {
    auto end = std::chrono::steady_clock::now() + time;
    std::uint64_t written = 0;
    std::unordered_set<std::uint64_t> drawn;
    for (auto due = std::chrono::steady_clock::now(); due < end; due += kPump) {
      crdt::Write write;
      drawn.clear();
      for (std::uint64_t i = 0; i < rate / 200; ++i) {
        drawn.insert(next_random(random_) % totals_.size());
      }
      for (std::uint64_t key : drawn) add(write.delta, key);
      written += write.delta.cells.size();
      append(std::move(write));
      std::this_thread::sleep_until(due + kPump);
    }
    settle();
    return written;
  }

 private:
  void add(crdt::Delta& delta, std::uint64_t key) {
    crdt::Cell cell;
    cell.id.series = {spread(key), spread(key + 1)};
    cell.id.epoch = {kStart, kStart + kDay};
    std::uint64_t birth = 0;
    std::uint64_t total = ++totals_[key];
    now_ += 1000;
    if (buckets_) {
      birth = kStart;
      cell.id.epoch = crdt::kBucketEpoch;
      cell.bucket = {{total, now_, crdt::DebtTicks{total} << 64}, now_, now_ + kDay};
    }
    cell.raise({kSelf, birth}, total);
    delta.cells.push_back(std::move(cell));
  }
  void append(crdt::Write write) {
    while (store_->backlog() > 64) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    write.id = ++last_;
    write.delta.members[kSelf] = {"here", "one"};
    store_->append(std::move(write));
  }
  void settle() {
    while (store_->backlog() > 0 || store_->counters().log_records > 0) {
      if (failed_) throw std::runtime_error("the store has failed");
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  }

  bool buckets_;
  std::vector<std::uint64_t> totals_;
  std::filesystem::path directory_;
  std::unique_ptr<storage::Store> store_;
  std::atomic<bool> failed_{false};
  std::uint64_t random_ = 1;
  crdt::WriteId last_ = 0;
  Nanos now_ = kStart;
};

void measure(benchmark::State& state, bool buckets) {
  Disk disk(static_cast<std::uint64_t>(state.range(0)), buckets);
  std::uint64_t written = 0;
  std::uint64_t cpu = 0;
  for (auto _ : state) {
    std::uint64_t before = process_cpu_ns() - thread_cpu_ns();
    written += disk.write_for(std::chrono::seconds(10), static_cast<std::uint64_t>(state.range(1)));
    std::uint64_t took = process_cpu_ns() - thread_cpu_ns() - before;
    state.SetIterationTime(static_cast<double>(took) / 1e9);
    cpu += took;
  }
  state.counters["cell_ns"] = static_cast<double>(cpu) / static_cast<double>(written);
}

void add(const char* name, bool buckets) {
  benchmark::RegisterBenchmark(name, measure, buckets)
      ->ArgNames({"keys", "rate"})
      ->ArgsProduct({{100'000, 1'000'000}, {50'000, 400'000}})
      ->UseManualTime()
      ->Iterations(1)
      ->Unit(benchmark::kMillisecond);
}

}  // namespace
}  // namespace weir::bench

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  weir::bench::add("buckets", true);
  weir::bench::add("windows", false);
  benchmark::RunSpecifiedBenchmarks();
}
