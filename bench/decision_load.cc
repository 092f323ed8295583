// decision_load PART [--quick] [--keys N] [--algorithm A]: one measurement, as one JSON object on
// stdout; 77 as exit code if the machine has too little memory for it. scripts/bench runs all
// parts, each in a process of its own, and puts them together.
#include <fmt/core.h>
#include <weir/bench/machine.h>
#include <weir/bench/parts.h>
#include <weir/limits/counted_new.h>
#include <weir/limits/text/strict_options.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <map>
#include <stdexcept>
#include <thread>

namespace weir::bench {

std::uint64_t allocations() {
  return weir::allocations;
}

std::uint64_t run_threads(int threads, const std::function<void(int)>& body,
                          std::uint64_t* disturbed) {
  std::atomic<int> waiting{threads};
  std::atomic<std::uint64_t> first{~std::uint64_t{0}};
  std::atomic<std::uint64_t> last{0};
  std::atomic<std::uint64_t> lost{0};
  std::vector<std::thread> all;
  for (int thread = 0; thread < threads; ++thread) {
    all.emplace_back([&, thread] {
      pin_to(thread);
      std::uint64_t before = preemptions();
      waiting.fetch_sub(1);
      while (waiting.load() > 0) {
      }
      std::uint64_t from = steady_ns();
      body(thread);
      std::uint64_t to = steady_ns();
      lost += preemptions() - before;
      std::uint64_t seen = first.load();
      while (from < seen && !first.compare_exchange_weak(seen, from)) {
      }
      seen = last.load();
      while (to > seen && !last.compare_exchange_weak(seen, to)) {
      }
    });
  }
  for (std::thread& thread : all) thread.join();
  if (disturbed != nullptr) *disturbed = lost;
  return last - first;
}

std::uint64_t run_undisturbed(int threads, const std::function<void(int)>& body,
                              const std::function<void()>& before_each) {
  std::uint64_t best = 0;
  std::uint64_t least = ~std::uint64_t{0};
  for (int attempt = 0; attempt < 3 && least > 0; ++attempt) {
    before_each();
    std::uint64_t disturbed = 0;
    std::uint64_t ns = run_threads(threads, body, &disturbed);
    if (disturbed >= least) continue;
    least = disturbed;
    best = ns;
  }
  return best;
}

void need_memory(std::uint64_t bytes, const std::string& what) {
  std::uint64_t has = available_bytes();
  if (has >= bytes + (2ull << 30)) return;
  throw TooLittleMemory(
      fmt::format("{} needs {:.1f} GiB and 2 GiB besides; this machine has {:.1f} left", what,
                  static_cast<double>(bytes) / (1 << 30), static_cast<double>(has) / (1 << 30)));
}

void say(const std::string& line) {
  fmt::print(stderr, "  {}\n", line);
}

}  // namespace weir::bench

int main(int argc, char** argv) {
  using namespace weir::bench;
  const std::map<std::string, Json (*)(const PartOptions&)> parts{{"single", part_single},
                                                                  {"four-rules", part_four_rules},
                                                                  {"hot", part_hot},
                                                                  {"match", part_match},
                                                                  {"allocations", part_allocations},
                                                                  {"exact", part_exact},
                                                                  {"latency", part_latency},
                                                                  {"memory", part_memory}};
  const std::map<std::string, weir::Algorithm> algorithms{
      {"fixed_window", weir::Algorithm::fixed_window},
      {"sliding_window", weir::Algorithm::sliding_window},
      {"token_bucket", weir::Algorithm::token_bucket}};
  CLI::App app("One measurement of the decision engine, as JSON");
  std::string part;
  PartOptions options;
  app.add_option("part", part,
                 "single, four-rules, hot, match, allocations, exact, latency, memory")
      ->required()
      ->check(CLI::IsMember(parts));
  app.add_flag("--quick", options.quick, "fewer keys, shorter rounds");
  app.add_option("--keys", options.keys, "live keys (a dimension); default: the part's own choice");
  std::string algorithm = "token_bucket";
  app.add_option("--algorithm", algorithm, "of the rules, where a part has one")
      ->check(CLI::IsMember(algorithms));
  weir::strict_numbers(app);
  CLI11_PARSE(app, argc, argv);
  options.algorithm = algorithms.at(algorithm);
  try {
    Json out = parts.at(part)(options);
    fmt::print("{}\n", out.dump());
  } catch (const TooLittleMemory& shortage) {
    fmt::print(stderr, "decision_load {}: left out, {}\n", part, shortage.what());
    return 77;
  } catch (const std::exception& failure) {
    fmt::print(stderr, "decision_load {}: {}\n", part, failure.what());
    return 1;
  }
}
