// What one decision costs, in every combination worth looking at: for exploring, with
// --benchmark_filter. Ratios to quote come from decision_load, which interleaves the sides.
//
// WEIR_BENCH_KEYS=N: the largest number of keys, 10,000,000 by default; 100,000,000 needs about
// 10 GiB.
#include <benchmark/benchmark.h>
#include <weir/bench/baselines.h>
#include <weir/bench/machine.h>
#include <weir/bench/subject.h>

#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace weir::bench {
namespace {

struct Setting {
  std::uint64_t keys = 1;
  Draw draw = Draw::uniform;
  int rules = 1;
  Algorithm algorithm = Algorithm::token_bucket;
  bool allow = true;
  bool costs = false;  ///< log-normal instead of 1
  bool batches = false;

  /// What the table depends on.
  std::string table() const {
    return std::string(to_string(algorithm)) + "/rules:" + std::to_string(rules) +
           (allow ? "/allow" : "/deny") + "/keys:" + std::to_string(keys);
  }
  std::string name() const {
    return table() + (draw == Draw::zipf ? "/zipf" : "/uniform") + (costs ? "/costs" : "") +
           (batches ? "/batches" : "");
  }
};

/// The table in use; filling a large one takes longer than measuring it, so it stays until another
/// one is asked for. Thread 0 of a benchmark changes it before the others start.
struct Held {
  std::string name;
  std::shared_ptr<void> table;
  std::string stream;
  std::vector<std::uint32_t> indices;
  Nanos now = kStart;  ///< when the next run starts: a limiter's time never runs backwards
} held;

template <typename Make>
auto hold(const std::string& name, Make make) -> decltype(make().get()) {
  if (held.name != name) {
    held.table.reset();
    held.table = make();
    held.now = kStart;
    held.name = name;
  }
  return static_cast<decltype(make().get())>(held.table.get());
}

void hold_stream(Draw draw, std::uint64_t keys) {
  std::string name = std::to_string(keys) + (draw == Draw::zipf ? "z" : "u");
  if (held.stream == name) return;
  held.indices = draw_indices(draw, keys, 7);
  held.stream = name;
}

std::size_t start_of(const benchmark::State& state) {
  return static_cast<std::size_t>(state.thread_index()) * 1'000'003;
}

void run_limiter(benchmark::State& state, const Setting& setting) {
  static std::vector<std::uint8_t> costs;
  if (state.thread_index() == 0) {
    hold_stream(setting.draw, setting.keys);
    if (costs.empty()) costs = draw_costs(3);
    hold(setting.table(), [&] {
      auto rules = key_rules(setting.rules, setting.algorithm, setting.allow);
      std::uint64_t series = setting.keys * static_cast<std::uint64_t>(setting.rules) + 1;
      auto limiter = std::make_shared<Limiter>(std::move(rules), sized(series));
      fill(*limiter, setting.keys);
      return limiter;
    });
    held.now += 2 * kSecond;
  }
  std::size_t at = start_of(state);
  Nanos now = 0;
  std::unique_ptr<Caller> caller;
  std::size_t mask = 0;
  for (auto _ : state) {
    if (caller == nullptr) {  // only now is the table surely there
      caller = std::make_unique<Caller>(*static_cast<Limiter*>(held.table.get()));
      mask = held.indices.size() - 1;
      now = held.now;
    }
    now += kStep;
    if (setting.batches) {
      std::array<Key16, kBatch> keys;
      for (Key16& key : keys) key = key_of(held.indices[at++ & mask]);
      benchmark::DoNotOptimize(caller->check_batch(keys, now));
      continue;
    }
    std::uint64_t hits = setting.costs ? costs[at % costs.size()] : 1;
    benchmark::DoNotOptimize(caller->check(key_of(held.indices[at++ & mask]), now, hits));
  }
  state.SetItemsProcessed(state.iterations() *
                          static_cast<std::int64_t>(setting.batches ? kBatch : 1));
}

template <typename Table>
void run_table(benchmark::State& state, const std::string& name, std::uint64_t keys, Draw draw) {
  if (state.thread_index() == 0) {
    hold_stream(draw, keys);
    hold(name + std::to_string(keys), [&] {
      std::shared_ptr<Table> table;
      if constexpr (std::is_same_v<Table, BareTable>) {
        table = std::make_shared<Table>(keys, true);
        for (std::uint64_t i = 0; i < keys; ++i) table->insert(key_of(i));
      } else {
        table = std::make_shared<Table>(keys);
        for (std::uint64_t i = 0; i < keys; ++i) table->check(key_of(i), kStart);
      }
      return table;
    });
  }
  std::size_t at = start_of(state);
  Nanos now = kStart + kSecond;
  for (auto _ : state) {
    auto* table = static_cast<Table*>(held.table.get());
    std::size_t mask = held.indices.size() - 1;
    now += kStep;
    benchmark::DoNotOptimize(table->check(key_of(held.indices[at++ & mask]), now));
  }
  state.SetItemsProcessed(state.iterations());
}

void run_gcra(benchmark::State& state) {
  static AtomicGcra gcra(1, kHour);
  Nanos now = kStart;
  for (auto _ : state) benchmark::DoNotOptimize(gcra.check(now += kStep));
  state.SetItemsProcessed(state.iterations());
}

template <typename Run>
void add(const std::string& name, Run run) {
  benchmark::RegisterBenchmark(name.c_str(), run)->ThreadRange(1, 2)->UseRealTime();
}

void add_limiter(const Setting& setting) {
  add("weir/" + setting.name(),
      [setting](benchmark::State& state) { run_limiter(state, setting); });
}

template <typename Table>
void add_table(const std::string& name, std::uint64_t keys) {
  for (Draw draw : {Draw::uniform, Draw::zipf}) {
    add(name + "/keys:" + std::to_string(keys) + (draw == Draw::zipf ? "/zipf" : "/uniform"),
        [=](benchmark::State& state) { run_table<Table>(state, name, keys, draw); });
  }
}

/// Settings with the same table stand together.
void add_size(std::uint64_t keys) {
  for (Algorithm algorithm :
       {Algorithm::token_bucket, Algorithm::fixed_window, Algorithm::sliding_window}) {
    for (Draw draw : {Draw::uniform, Draw::zipf}) {
      Setting setting{keys, draw, 1, algorithm};
      add_limiter(setting);
      setting.costs = true;
      add_limiter(setting);
      setting.costs = false;
      setting.batches = true;
      add_limiter(setting);
    }
    add_limiter({keys, Draw::uniform, 1, algorithm, false});
  }
  if (keys <= 10'000'000) {
    for (int rules : {2, 3, 4}) {
      if (keys > 1'000'000 && rules != 4) continue;
      add_limiter({keys, Draw::uniform, rules});
      add_limiter({keys, Draw::zipf, rules});
      add_limiter({keys, Draw::uniform, rules, Algorithm::token_bucket, false});
    }
  }
  add_table<BareTable>("bare_table", keys);
  add_table<StdBuckets>("std_unordered_map_64_mutexes", keys);
#ifdef WEIR_BENCH_ABSL
  add_table<AbslBuckets>("absl_flat_hash_map_64_spinlocks", keys);
#endif
#ifdef WEIR_BENCH_TBB
  add_table<TbbBuckets>("tbb_concurrent_hash_map", keys);
#endif
}

}  // namespace
}  // namespace weir::bench

int main(int argc, char** argv) {
  using namespace weir::bench;
  const char* wish = std::getenv("WEIR_BENCH_KEYS");
  std::uint64_t most = wish == nullptr ? 10'000'000 : std::strtoull(wish, nullptr, 10);
  add("one_atomic_gcra", run_gcra);
  for (std::uint64_t keys : {1ull, 1'000'000ull, 10'000'000ull, 100'000'000ull}) {
    if (keys <= most) add_size(keys);
  }
  benchmark::AddCustomContext("ping_pong_ns", std::to_string(ping_pong_ns()));
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
}
