// weir-demo: three regions on loopback, a partition, a kill -9, and the books at the end.
#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <optional>
#include <set>
#include <thread>

#include <weir/limits/text/strict_options.h>

#include "../cluster/cluster.h"
#include "../load/load.h"

using namespace weir::examples;
using weir::kMillisecond;
using weir::kSecond;
using weir::Nanos;

namespace {

constexpr Nanos kWindow = 10 * kSecond;
constexpr std::uint64_t kLimit = 500;

// `everything` and `per-key-total` never deny: they count, durably, what was admitted, so that the
// end of the demo can look for lost increments.
constexpr const char* kRules = R"(domain: api
rules:
  - name: per-key
    match: {api_key: any}
    key: [api_key]
    limit: 500
    window: 10s
    algorithm: fixed_window
  - name: per-key-total
    match: {api_key: any}
    key: [api_key]
    limit: 1000000000000
    window: 365d
    algorithm: fixed_window
    durability: commit
  - name: everything
    key: []
    limit: 1000000000000
    window: 365d
    algorithm: fixed_window
    durability: commit
)";

struct Demo {
  explicit Demo(Cluster& nodes) : cluster(nodes) {}

  Cluster& cluster;
  std::vector<std::unique_ptr<Load>> loads;
  bool color = ::isatty(STDOUT_FILENO) == 1;
  Nanos began = wall_clock();
  std::set<std::size_t> cut_off;
  Nanos cut_at = 0;
  Nanos healed_at = 0;

  double elapsed() const {
    return static_cast<double>(wall_clock() - began) / static_cast<double>(kSecond);
  }

  void say(const std::string& text) {
    fmt::print("{}[{:5.1f} s] {}{}\n", color ? "\033[1m" : "", elapsed(), text,
               color ? "\033[0m" : "");
    std::fflush(stdout);
  }

  std::optional<std::uint64_t> used(std::size_t node, const std::string& rule,
                                    const std::string& key) const {
    weir::rpc::NodeClientOptions options;
    options.address = cluster.client_address(node);
    options.deadline = kSecond;
    weir::rpc::NodeClient client(options);
    weir::Reply reply = client.check(weir::rpc::CheckItem{"api", {{"api_key", key}}, 0});
    for (const auto& status : reply.statuses) {
      if (status.rule == rule) return status.limit - status.remaining;
    }
    return std::nullopt;
  }

  void table() const {
    fmt::print("           {:<14}{:>10}{:>10}{:>10}{:>14}{:>10}  {}\n", "region", "admitted",
               "denied", "no answer", "view of total", "lag", "");
    for (std::size_t i = 0; i < cluster.size(); ++i) {
      auto total = used(i, "everything", "key-0");
      auto status = nlohmann::json::parse(cluster.status(i), nullptr, false);
      std::string lag = "-";
      if (status.is_object()) {
        double worst = 0;
        for (const auto& peer : status["peers"]) {
          worst = std::max(worst, peer.value("caught_up_s", 0.0));
        }
        lag = fmt::format("{:.2f} s", worst);
      }
      fmt::print("           {:<14}{:>10}{:>10}{:>10}{:>14}{:>10}  {}\n", cluster.region(i),
                 loads[i]->admitted(), loads[i]->denied(), loads[i]->unknown(),
                 total ? fmt::format("{}", *total) : "-", lag,
                 cluster.pid(i) <= 0   ? "down"
                 : cut_off.contains(i) ? "cut off"
                                       : "");
    }
    std::fflush(stdout);
  }

  void run_for(unsigned seconds) {
    for (unsigned i = 0; i < seconds; ++i) {
      std::this_thread::sleep_for(std::chrono::seconds(1));
      if (i % 2 == 1 || i + 1 == seconds) table();
    }
  }

  /// Seconds until all nodes hold the same, or nothing after `patience`.
  std::optional<double> converge(double patience) const {
    double start = elapsed();
    while (elapsed() - start < patience) {
      if (cluster.converged()) return elapsed() - start;
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    return std::nullopt;
  }
};

/// Time from the heal until the region that was away knows what the others admitted before it.
std::optional<double> catch_up(const Demo& demo, std::size_t node, std::uint64_t wanted) {
  double start = demo.elapsed();
  while (demo.elapsed() - start < 20) {
    auto view = demo.used(node, "everything", "key-0");
    if (view && *view >= wanted) return demo.elapsed() - start;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  return std::nullopt;
}

struct Books {
  std::uint64_t admitted = 0;
  std::uint64_t denied = 0;
  std::uint64_t unknown = 0;
  std::uint64_t over = 0;             ///< admitted beyond the limit, over all keys and windows
  std::uint64_t worst_connected = 0;  ///< in one key's window, all regions connected
  std::uint64_t worst_cut = 0;        ///< the same while a region was cut off
  std::uint64_t allowance = 0;        ///< what the limit would have let through
  std::uint64_t lost = 0;
  bool all_views_read = true;
};

Books balance(Demo& demo) {
  Books books;
  std::map<std::string, std::map<std::int64_t, KeyTally>> all;
  for (auto& load : demo.loads) {
    books.admitted += load->admitted();
    books.denied += load->denied();
    books.unknown += load->unknown();
    for (const auto& [key, windows] : load->tallies()) {
      for (const auto& [window, tally] : windows) {
        KeyTally& sum = all[key][window];
        sum.admitted += tally.admitted;
        sum.denied += tally.denied;
        sum.unknown += tally.unknown;
      }
    }
  }
  for (const auto& [key, windows] : all) {
    std::uint64_t acknowledged = 0;
    for (const auto& [window, tally] : windows) {
      acknowledged += tally.admitted;
      books.allowance += std::min(kLimit, tally.admitted + tally.denied);
      std::uint64_t over = tally.admitted - std::min(kLimit, tally.admitted);
      books.over += over;
      bool cut = window >= demo.cut_at / kWindow && window <= demo.healed_at / kWindow;
      std::uint64_t& worst = cut ? books.worst_cut : books.worst_connected;
      worst = std::max(worst, over);
    }
    if (acknowledged == 0) continue;
    for (std::size_t i = 0; i < demo.cluster.size(); ++i) {
      auto view = demo.used(i, "per-key-total", key);
      if (!view) {
        books.all_views_read = false;
      } else if (*view < acknowledged) {
        books.lost = std::max(books.lost, acknowledged - *view);
        fmt::print("LOST: {} knows {} of the {} that were acknowledged for {}\n",
                   demo.cluster.region(i), *view, acknowledged, key);
      }
    }
  }
  return books;
}

struct Arguments {
  std::string node_program;
  std::string directory;
  std::string log;
  std::uint64_t rate = 600;
  bool tls = false;
};

/// False: the log has no keys.
bool start_loads(Demo& demo, const Arguments& arguments) {
  const std::vector<std::string> keys =
      arguments.log.empty() ? std::vector<std::string>{} : keys_of_log(arguments.log);
  if (!arguments.log.empty() && keys.empty()) return false;
  for (std::size_t i = 0; i < demo.cluster.size(); ++i) {
    LoadOptions load;
    load.address = demo.cluster.client_address(i);
    load.per_second = arguments.rate;
    load.quiet_every = kWindow;
    load.keys = keys;
    ZipfKeys zipf(200, 1.1, i + 1);
    for (int k = 0; keys.empty() && k < 100'000; ++k) {
      load.keys.push_back(fmt::format("key-{}", zipf.next()));
    }
    demo.loads.push_back(std::make_unique<Load>(load));
  }
  return true;
}

/// A partition and a kill -9. How long it took ap-south to know what it had missed.
std::optional<double> play(Demo& demo) {
  demo.run_for(10);

  demo.say("cutting ap-south off");
  demo.cut_off.insert(2);
  demo.cut_at = wall_clock();
  demo.cluster.cut(2);
  demo.run_for(12);

  std::uint64_t behind = 0;
  for (const auto& load : demo.loads) behind += load->admitted();
  demo.say("healing ap-south");
  demo.cut_off.erase(2);
  demo.cluster.heal(2);
  demo.healed_at = wall_clock();
  std::optional<double> healed = catch_up(demo, 2, behind);
  demo.say(
      healed ? fmt::format("ap-south knows everything from before the heal after {:.2f} s", *healed)
             : "ap-south did not catch up within 20 s");
  demo.run_for(6);

  demo.say("kill -9 of us-east");
  demo.cluster.kill(1, SIGKILL);
  demo.run_for(4);
  demo.say("restarting us-east");
  demo.cluster.start(1);
  demo.run_for(8);

  demo.say("stopping the traffic");
  for (auto& load : demo.loads) load->stop();
  return healed;
}

void print_books(const Books& books, std::optional<double> healed, bool agree,
                 std::optional<double> settled) {
  auto percent = [](std::uint64_t part, std::uint64_t whole) {
    return whole == 0 ? 0.0 : 100.0 * static_cast<double>(part) / static_cast<double>(whole);
  };
  fmt::print("\n");
  fmt::print(
      "admitted globally              {} of {} that the limit allows ({:+.2f}%), {} denied, "
      "{} unanswered\n",
      books.admitted, books.allowance, percent(books.admitted, books.allowance) - 100, books.denied,
      books.unknown);
  fmt::print(
      "worst over-admission           {} above {} in one key's window while connected, "
      "{} while ap-south was cut off\n",
      books.worst_connected, kLimit, books.worst_cut);
  fmt::print(
      "                               (cut off, each side admits up to the limit on its "
      "own)\n");
  fmt::print("increments lost                {}\n", books.lost);
  fmt::print("time to converge after heal    {}\n",
             healed ? fmt::format("{:.2f} s", *healed) : "never");
  fmt::print("nodes agree at the end         {}\n",
             agree ? fmt::format("yes, {:.2f} s after the traffic stopped", *settled) : "NO");
}

bool stop_all(Cluster& cluster) {
  bool clean = true;
  for (std::size_t i = 0; i < cluster.size(); ++i) {
    if (cluster.stop(i) == 0) continue;
    fmt::print("node {} did not stop cleanly; see {}\n", cluster.region(i), cluster.log_path(i));
    clean = false;
  }
  return clean;
}

int run_demo(const Arguments& arguments) {
  ClusterOptions options;
  options.node_program = arguments.node_program;
  options.directory = arguments.directory;
  options.regions = {"eu-west", "us-east", "ap-south"};
  options.rules = kRules;
  options.tls = arguments.tls;
  std::filesystem::remove_all(options.directory);
  Cluster cluster(options);
  Demo demo(cluster);
  demo.say("starting three nodes: eu-west, us-east, ap-south (logs and data in " +
           options.directory + ")");
  cluster.start_all();
  if (!start_loads(demo, arguments)) {
    fmt::print(stderr, "weir-demo: {}: no access log lines\n", arguments.log);
    return 2;
  }
  demo.say(
      fmt::format("driving each region with {} requests/s, skewed; the limit is {} per key and "
                  "10 s, across all regions",
                  arguments.rate, kLimit));
  std::optional<double> healed = play(demo);
  std::optional<double> settled = demo.converge(20);
  demo.table();
  Books books = balance(demo);
  bool agree = settled.has_value() && healed.has_value() && books.all_views_read;
  print_books(books, healed, agree, settled);
  agree &= stop_all(cluster);
  return books.lost == 0 && agree ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Three region nodes count real traffic together.", "weir-demo"};
  Arguments arguments;
  app.add_option("--node", arguments.node_program, "Path of weir-node")->required();
  app.add_option("--dir", arguments.directory, "Folder for data and logs; emptied first")
      ->required();
  app.add_option("--log", arguments.log, "Drive it with the client addresses of this access log");
  app.add_option("--rate", arguments.rate, "Requests a second and region")
      ->check(CLI::Range(10, 20'000));
  app.add_flag("--tls", arguments.tls, "Members by certificate instead of a secret, and HTTPS");
  weir::strict_numbers(app);
  CLI11_PARSE(app, argc, argv);
  try {
    return run_demo(arguments);
  } catch (const std::exception& failure) {
    fmt::print(stderr, "weir-demo: {}\n", failure.what());
    return 1;
  }
}
