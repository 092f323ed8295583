// What a decision costs its caller, through the client library, while nodes are well, dead, stopped
// or without a disk. Starts real nodes. See docs/client.md.
#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>
#include <CLI/CLI.hpp>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <thread>
#include <vector>

#include <cluster/cluster.h>
#include <weir/bench/histogram.h>
#include <weir/limits/rules/rules_yaml.h>
#include <weir/limits/text/strict_options.h>
#include <weir/rpc/client/client.h>

namespace weir::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kRules = R"(domain: api
rules:
  - name: per-key
    key: [key]
    limit: 1000000000
    window: 1h
)";

struct Options {
  std::string node;
  std::string stall;
  unsigned threads = 2;
  unsigned rate = 1000;
  double seconds = 5;
  std::size_t keys = 64;
  bool json = false;
};

enum class Fault { none, dead, stopped, stalled };

const char* name_of(Fault fault) {
  switch (fault) {
    case Fault::none:
      return "healthy";
    case Fault::dead:
      return "one node dead";
    case Fault::stopped:
      return "one node stopped";
    case Fault::stalled:
      return "disks stalled";
  }
  return "unknown";
}

struct Result {
  std::string scenario;
  bool lease = false;
  Histogram took;  // ns
  ClientCounters counters;
};

/// Real nodes of one region, in a folder of their own.
class Nodes {
 public:
  explicit Nodes(const Options& options)
      : directory_(std::filesystem::temp_directory_path() /
                   fmt::format("weir-client-load-{}", ::getpid())) {
    std::filesystem::remove_all(directory_);
    examples::ClusterOptions made;
    made.node_program = options.node;
    made.directory = directory_.string();
    made.regions = {"a", "b", "c"};
    made.rules = kRules;
    made.environment = {"LD_PRELOAD=" + options.stall, "WEIR_STALL=" + stall()};
    cluster_.emplace(std::move(made));
    cluster_->start_all();
  }
  ~Nodes() {
    cluster_.reset();
    std::filesystem::remove_all(directory_);
  }

  std::vector<std::string> addresses() const {
    return {cluster_->client_address(0), cluster_->client_address(1), cluster_->client_address(2)};
  }
  void inflict(Fault fault) {
    if (fault == Fault::dead) cluster_->kill(0, SIGKILL);
    if (fault == Fault::stopped) cluster_->kill(0, SIGSTOP);
    if (fault == Fault::stalled) std::ofstream(stall()) << "now";
  }

 private:
  std::string stall() const { return (directory_ / "stall").string(); }
  std::filesystem::path directory_;
  std::optional<examples::Cluster> cluster_;
};

ClientOptions client_options(const Nodes& nodes, bool lease) {
  ClientOptions made;
  made.nodes = nodes.addresses();
  made.rules = parse_rules(kRules, "rules.yaml").rules;
  made.leases.enabled = lease;
  return made;
}

void wait_for_connections(const Client& client) {
  for (int i = 0; i < 500 && client.connected() < 3; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

/// Steady load from several threads; the fault comes after a fifth of the time.
Result run(const Options& options, Fault fault, bool lease) {
  Nodes nodes(options);
  Client client(client_options(nodes, lease));
  wait_for_connections(client);
  Result result;
  result.scenario = name_of(fault);
  result.lease = lease;
  std::vector<Histogram> took(options.threads);
  std::vector<std::thread> threads;
  const auto start = Clock::now();
  const auto end = start + std::chrono::duration_cast<Clock::duration>(
                               std::chrono::duration<double>(options.seconds));
  for (unsigned t = 0; t < options.threads; ++t) {
    threads.emplace_back([&, t] {
      const auto step = std::chrono::nanoseconds(kSecond / options.rate);
      std::vector<CheckItem> items;
      for (std::size_t k = 0; k < options.keys; ++k) {
        items.push_back({"api", {{"key", "k" + std::to_string(k)}}, 1});
      }
      std::size_t n = t;
      for (auto next = start; next < end; next += step) {
        std::this_thread::sleep_until(next);
        const auto asked = Clock::now();
        client.check(items[n++ % items.size()]);
        took[t].record(static_cast<std::uint64_t>(
            std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - asked).count()));
      }
    });
  }
  std::this_thread::sleep_until(start + (end - start) / 5);
  nodes.inflict(fault);
  for (std::thread& thread : threads) thread.join();
  for (const Histogram& each : took) result.took.add(each);
  result.counters = client.counters();
  return result;
}

/// One key, as fast as it goes.
Result run_hot(const Options& options, bool lease) {
  Nodes nodes(options);
  Client client(client_options(nodes, lease));
  wait_for_connections(client);
  Result result;
  result.scenario = "hot key, as fast as it goes";
  result.lease = lease;
  const CheckItem item{"api", {{"key", "hot"}}, 1};
  for (auto end = Clock::now() + std::chrono::seconds(2); Clock::now() < end;) {
    for (int i = 0; i < 100; ++i) {
      const auto asked = Clock::now();
      client.check(item);
      result.took.record(static_cast<std::uint64_t>(
          std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - asked).count()));
    }
  }
  result.counters = client.counters();
  return result;
}

double calls_per_1000(const Result& result) {
  return 1000.0 * static_cast<double>(result.counters.calls) /
         static_cast<double>(std::max<std::uint64_t>(result.took.count(), 1));
}

void print(const Options& options, const std::vector<Result>& results) {
  if (options.json) {
    nlohmann::ordered_json out = nlohmann::ordered_json::array();
    for (const Result& r : results) {
      out.push_back({{"scenario", r.scenario},
                     {"by", r.lease ? "lease" : "call"},
                     {"decisions", r.took.count()},
                     {"p50_ns", r.took.quantile(0.5)},
                     {"p99_ns", r.took.quantile(0.99)},
                     {"p999_ns", r.took.quantile(0.999)},
                     {"max_ns", r.took.max()},
                     {"degraded", r.counters.degraded},
                     {"failovers", r.counters.failovers},
                     {"calls_per_1000", calls_per_1000(r)}});
    }
    fmt::print("{}\n", nlohmann::ordered_json{{"client", std::move(out)}}.dump());
    return;
  }
  fmt::print("{:28} {:6} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>11}\n", "scenario", "by", "p50 us",
             "p99 us", "p99.9 us", "max us", "decisions", "degraded", "calls/1000");
  for (const Result& r : results) {
    auto us = [](std::uint64_t ns) { return static_cast<double>(ns) / 1000; };
    fmt::print("{:28} {:6} {:9.1f} {:9.1f} {:9.1f} {:9.1f} {:9} {:9} {:11.1f}\n", r.scenario,
               r.lease ? "lease" : "call", us(r.took.quantile(0.5)), us(r.took.quantile(0.99)),
               us(r.took.quantile(0.999)), us(r.took.max()), r.took.count(), r.counters.degraded,
               calls_per_1000(r));
  }
}

}  // namespace

int run(int argc, char** argv) {
  CLI::App app{
      "What a decision costs its caller, with nodes well, dead, stopped, or without a disk."};
  Options options;
  options.node = WEIR_NODE_PROGRAM;
  options.stall = WEIR_STALL_LIBRARY;
  app.add_option("--threads", options.threads, "Callers")->check(CLI::Range(1u, 64u));
  app.add_option("--rate", options.rate, "Decisions a second of each caller")
      ->check(CLI::Range(1u, 100'000u));
  app.add_option("--seconds", options.seconds, "For each scenario")->check(CLI::Range(1.0, 600.0));
  app.add_option("--keys", options.keys, "Keys that are asked for in turn")
      ->check(CLI::Range(1, 100'000));
  app.add_flag("--json", options.json, "Print JSON");
  weir::strict_numbers(app);
  CLI11_PARSE(app, argc, argv);
  std::vector<Result> results;
  for (Fault fault : {Fault::none, Fault::dead, Fault::stopped, Fault::stalled}) {
    for (bool lease : {false, true}) results.push_back(run(options, fault, lease));
  }
  for (bool lease : {false, true}) results.push_back(run_hot(options, lease));
  print(options, results);
  return 0;
}

}  // namespace weir::bench

int main(int argc, char** argv) {
  try {
    return weir::bench::run(argc, argv);
  } catch (const std::exception& error) {
    fmt::print(stderr, "client_load: {}\n", error.what());
    return 2;
  }
}
