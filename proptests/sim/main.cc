#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <unistd.h>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <weir/limits/text/strict_options.h>
#include <weir/proptests/sim/world.h>

namespace {

using weir::sim::RunOptions;
using weir::sim::RunResult;
using weir::sim::RunStats;
using Clock = std::chrono::steady_clock;

constexpr std::size_t kMostFailures = 20;

struct Totals {
  std::uint64_t seeds = 0;
  RunStats sum;
  std::vector<std::uint64_t> failing;

  void add(const RunResult& result) {
    ++seeds;
    const RunStats& stats = result.stats;
    sum.simulated += stats.simulated;
    sum.node_seconds += stats.node_seconds;
    sum.events += stats.events;
    sum.decisions += stats.decisions;
    sum.admitted += stats.admitted;
    sum.over_admitted += stats.over_admitted;
    sum.escrow_admitted += stats.escrow_admitted;
    sum.escrow_denied += stats.escrow_denied;
    sum.escrow_given += stats.escrow_given;
    sum.satisfied += stats.satisfied;
    sum.messages += stats.messages;
    sum.commits += stats.commits;
    sum.boots += stats.boots;
    sum.reincarnations += stats.reincarnations;
    for (std::size_t i = 0; i < stats.faults.size(); ++i) sum.faults[i] += stats.faults[i];
  }
};

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

std::uint64_t fault_count(const RunStats& stats) {
  std::uint64_t count = 0;
  for (std::uint64_t faults : stats.faults) count += faults;
  return count;
}

void print_progress(const Totals& totals, double wall) {
  fmt::print(
      stderr, "{} seeds, {:.0f} node-seconds in {:.0f}s ({:.0f}/s), {} faults, {} violations\n",
      totals.seeds, totals.sum.node_seconds, wall, totals.sum.node_seconds / std::max(wall, 0.001),
      fault_count(totals.sum), totals.failing.size());
}

void print_summary(const Totals& totals, double wall, bool json) {
  const RunStats& sum = totals.sum;
  double ratio = sum.node_seconds / std::max(wall, 0.001);
  if (json) {
    std::string faults;
    for (std::size_t i = 0; i < weir::sim::kFaultKinds; ++i) {
      faults += fmt::format("{}\"{}\":{}", i == 0 ? "" : ",",
                            to_string(static_cast<weir::sim::FaultKind>(i)), sum.faults[i]);
    }
    fmt::print(
        "{{\"seeds\":{},\"simulated_s\":{:.3f},\"node_seconds\":{:.3f},\"wall_s\":{:.3f},"
        "\"node_seconds_per_s\":{:.1f},\"events\":{},\"decisions\":{},\"messages\":{},"
        "\"commits\":{},\"boots\":{},\"reincarnations\":{},\"faults\":{{{}}},\"violations\":{},"
        "\"failing_seeds\":[{}]}}\n",
        totals.seeds, static_cast<double>(sum.simulated) / 1e9, sum.node_seconds, wall, ratio,
        sum.events, sum.decisions, sum.messages, sum.commits, sum.boots, sum.reincarnations, faults,
        totals.failing.size(), fmt::join(totals.failing, ","));
    return;
  }
  fmt::print("seeds            {}\n", totals.seeds);
  fmt::print("simulated        {:.1f}s, {:.1f} node-seconds in {:.1f}s: {:.0f} per second\n",
             static_cast<double>(sum.simulated) / 1e9, sum.node_seconds, wall, ratio);
  fmt::print("events           {}, {} messages, {} commits\n", sum.events, sum.messages,
             sum.commits);
  fmt::print("decisions        {}, {} units admitted, {} over a window's limit\n", sum.decisions,
             sum.admitted, sum.over_admitted);
  fmt::print(
      "escrow           {} units admitted, {} denied while others may have had rights, {} given; a "
      "whole limit reached one node {} times\n",
      sum.escrow_admitted, sum.escrow_denied, sum.escrow_given, sum.satisfied);
  fmt::print("boots            {}, {} changes of incarnation while running\n", sum.boots,
             sum.reincarnations);
  fmt::print("faults           {}\n", fault_count(sum));
  for (std::size_t i = 0; i < weir::sim::kFaultKinds; ++i) {
    fmt::print("  {:<16} {}\n", to_string(static_cast<weir::sim::FaultKind>(i)), sum.faults[i]);
  }
  fmt::print("violations       {}\n", totals.failing.size());
  for (std::uint64_t seed : totals.failing) fmt::print("  weir-sim --seed {}\n", seed);
}

/// Shrinks and prints a failing seed.
void explain(const RunOptions& options, int attempts) {
  RunOptions small = shrink(options, attempts);
  small.tail = 60;
  fmt::print(stderr, "{}", report(small, run(small)));
  std::string left_out;
  for (std::size_t i : small.without)
    left_out += fmt::format("{}{}", left_out.empty() ? "" : ",", i);
  fmt::print(stderr, "replay: weir-sim --seed {} --trace{}{}\n", options.seed,
             left_out.empty() ? "" : " --without " + left_out,
             small.cut_off == weir::kNever ? "" : fmt::format(" --cut-off {}", small.cut_off));
}

struct Arguments {
  RunOptions options;
  std::uint64_t seed = 0;
  std::uint64_t from = 0;
  std::uint64_t seeds = 0;
  double minutes = 0;
  int jobs = 1;
  int attempts = 200;
  bool trace = false;
  bool json = false;
};

/// One seed, and what it was like.
void run_one(const Arguments& arguments, Totals& totals) {
  RunOptions options = arguments.options;
  options.seed = arguments.seed;
  if (arguments.trace) options.trace = stdout;
  RunResult result = run(options);
  totals.add(result);
  options.trace = nullptr;
  if (!arguments.json) {
    fmt::print("{}", report(options, result));
    fmt::print("trace hash {:016x}\n", result.hash);
  }
  if (!result.violated) return;
  totals.failing.push_back(options.seed);
  if (!arguments.trace) explain(options, arguments.attempts);
}

/// Seeds one after the other, `jobs` at a time, until there were enough or time is up.
class Seeds {
 public:
  Seeds(const Arguments& arguments, Totals& totals) : arguments_(arguments), totals_(totals) {}

  void run_all() {
    std::vector<std::thread> others;
    for (int i = 1; i < arguments_.jobs; ++i) others.emplace_back([this] { work(); });
    work();
    for (std::thread& other : others) other.join();
  }

 private:
  void work() {
    RunOptions mine = arguments_.options;
    while (next(mine.seed)) {
      RunResult result = run(mine);
      std::lock_guard lock(mutex_);
      totals_.add(result);
      if (!result.violated) continue;
      totals_.failing.push_back(mine.seed);
      explain(mine, arguments_.attempts);
    }
  }

  bool next(std::uint64_t& seed) {
    std::lock_guard lock(mutex_);
    double wall = seconds_since(start_);
    if (arguments_.seeds > 0 && begun_ >= arguments_.seeds) return false;
    if (arguments_.minutes > 0 && wall >= arguments_.minutes * 60) return false;
    if (totals_.failing.size() >= kMostFailures) return false;
    seed = arguments_.from + begun_++;
    if (wall - shown_ >= 10) {
      print_progress(totals_, wall);
      shown_ = wall;
    }
    return true;
  }

  const Arguments& arguments_;
  Totals& totals_;
  const Clock::time_point start_ = Clock::now();
  std::mutex mutex_;
  double shown_ = 0;
  std::uint64_t begun_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{
      "Simulates weir nodes with faulty clocks, networks and disks, and checks the laws.\n"
      "Examples: weir-sim --seed 42 --trace; weir-sim --minutes 10; weir-sim --seeds 200 --from 1"};
  Arguments arguments;
  RunOptions& options = arguments.options;
  bool lmdb = false;
  std::string directory = std::filesystem::temp_directory_path().string();
  std::vector<std::size_t> without;
  auto* one = app.add_option("--seed", arguments.seed, "Run this seed");
  auto* first = app.add_option("--from", arguments.from, "First seed; random if left out");
  app.add_option("--seeds", arguments.seeds, "Run so many seeds, one after the other from --from");
  app.add_option("--minutes", arguments.minutes, "Run for so long");
  app.add_option("--jobs", arguments.jobs, "Seeds run side by side (1)")->check(CLI::Range(1, 64));
  app.add_flag("--trace", arguments.trace, "Print the timeline of --seed");
  app.add_flag("--json", arguments.json, "Print the summary as JSON");
  app.add_flag("--lmdb", lmdb, "Real LMDB stores, on a temporary directory");
  app.add_option("--dir", directory, "Where the LMDB stores go");
  app.add_option("--without", without, "Leave out these faults of --seed")->delimiter(',');
  app.add_option("--cut-off", options.cut_off, "End the chaos phase of --seed here, in ns");
  app.add_option("--shrink", arguments.attempts, "Runs to spend on making a failure smaller (200)");
  weir::strict_numbers(app);
  CLI11_PARSE(app, argc, argv);

  options.without.insert(without.begin(), without.end());
  if (lmdb) options.lmdb_dir = fmt::format("{}/weir-sim-{}", directory, ::getpid());
  struct Cleanup {
    std::string path;
    ~Cleanup() {
      std::error_code ignored;
      if (!path.empty()) std::filesystem::remove_all(path, ignored);
    }
  } cleanup{options.lmdb_dir};

  Clock::time_point start = Clock::now();
  Totals totals;
  if (*one) {
    run_one(arguments, totals);
  } else {
    if (!*first) {
      arguments.from = std::random_device{}() | (std::uint64_t{std::random_device{}()} << 32);
    }
    if (arguments.seeds == 0 && arguments.minutes == 0) arguments.seeds = 100;
    fmt::print(stderr, "seeds from {}\n", arguments.from);
    Seeds(arguments, totals).run_all();
  }
  print_summary(totals, seconds_since(start), arguments.json);
  return totals.failing.empty() ? 0 : 1;
}
