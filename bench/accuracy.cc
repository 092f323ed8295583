// How exactly a limit holds over five regions, with real nodes: scripts/accuracy. What is measured,
// and how: docs/accuracy/README.md.
#include <cluster/cluster.h>
#include <fmt/format.h>
#include <load/load.h>
#include <sys/wait.h>
#include <unistd.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <numeric>
#include <optional>
#include <thread>

#include <weir/limits/text/strict_options.h>

namespace weir::examples {
namespace {

using nlohmann::json;

constexpr std::size_t kRegions = 5;
constexpr std::array<const char*, kRegions> kNames{"us-east", "us-west", "eu-west", "ap-south",
                                                   "ap-east"};
/// One way, in milliseconds.
constexpr int kDelays[kRegions][kRegions] = {{0, 80, 85, 130, 150},
                                             {80, 0, 110, 145, 120},
                                             {85, 110, 0, 95, 140},
                                             {130, 145, 95, 0, 90},
                                             {150, 120, 140, 90, 0}};
/// Percent of the demand, turning by one region each window.
constexpr std::array<int, kRegions> kShares{70, 10, 10, 5, 5};
constexpr Nanos kTick = 10 * kMillisecond;
/// Nothing is sent so close to a window's end: every answer belongs to a window without doubt.
constexpr Nanos kQuiet = 30 * kMillisecond;
constexpr Nanos kBin = 250 * kMillisecond;  // of a plot's curve

struct Options {
  std::string node_program;
  std::string mode = "merged";
  std::vector<std::uint64_t> limits{100, 1000, 100'000};
  double load = 3;
  int windows = 3;
  int window_s = 60;
  /// Window in which its busiest region is cut off, from its beginning on for cut_s; -1: none.
  int cut_window = -1;
  int cut_s = 60;
};

std::string rules_of(const Options& options) {
  std::string text = "domain: api\nrules:\n";
  for (std::uint64_t limit : options.limits) {
    text += fmt::format(
        "  - name: limit-{0}\n    match: {{size: \"{0}\"}}\n    key: key\n    limit: {0}\n"
        "    window: {1}s\n    enforcement: {2}\n",
        limit, options.window_s, options.mode);
  }
  return text;
}

/// True if the node takes these rules: a mode that it does not know is absent, not wrong.
bool takes(const Options& options, const std::string& folder) {
  std::filesystem::create_directories(folder);
  std::ofstream(folder + "/rules.yaml") << rules_of(options);
  std::ofstream(folder + "/node.yaml")
      << "cluster: {name: probe}\nregion: r\nnode: n\nrules: rules.yaml\nstorage: {path: data}\n";
  std::string command = fmt::format("'{}' --config '{}/node.yaml' --validate > '{}/why' 2>&1",
                                    options.node_program, folder, folder);
  int status = std::system(command.c_str());
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

/// What one region's clients were told of one limit.
struct Answers {
  std::map<std::int64_t, std::uint64_t> admitted;  // by window
  std::map<std::int64_t, std::uint64_t> by_bin;
  std::uint64_t unknown = 0;
};

/// Sends one region's share of the demand from a thread of its own.
class Region {
 public:
  Region(const Options& options, std::size_t index, const std::string& address, Nanos end)
      : options_(options), index_(index), end_(end), answers_(options.limits.size()) {
    rpc::NodeClientOptions client;
    client.address = address;
    client.deadline = 5 * kSecond;
    client.breaker_misses = 0;
    client_.emplace(client);
    thread_ = std::thread([this] { run(); });
  }
  ~Region() {
    if (thread_.joinable()) thread_.join();
  }
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  const std::vector<Answers>& finish() {
    thread_.join();
    client_.reset();  // what is unanswered is told as unknown
    return answers_;
  }

 private:
  void run() {
    Nanos window = options_.window_s * kSecond;
    std::vector<double> due(options_.limits.size());
    for (Nanos next = wall_clock(); next < end_; next += kTick) {
      Nanos now = wall_clock();
      if (now < next) std::this_thread::sleep_for(std::chrono::nanoseconds(next - now));
      now = wall_clock();
      std::int64_t number = now / window;
      auto place = (index_ + static_cast<std::size_t>(number)) % kRegions;
      Nanos into = now % window;
      bool quiet = into < kQuiet || window - into < kQuiet;
      std::vector<rpc::CheckItem> items;
      std::vector<std::size_t> of;
      for (std::size_t i = 0; i < options_.limits.size(); ++i) {
        due[i] += options_.load * static_cast<double>(options_.limits[i]) * kShares[place] / 100 *
                  static_cast<double>(kTick) / static_cast<double>(window);
        for (; due[i] >= 1 && !quiet; due[i] -= 1) {
          items.push_back({"api", {{"size", std::to_string(options_.limits[i])}, {"key", "k"}}, 1});
          of.push_back(i);
        }
      }
      for (std::size_t from = 0; from < items.size(); from += rpc::kMaxRequestsPerCall) {
        std::size_t to = std::min(items.size(), from + rpc::kMaxRequestsPerCall);
        auto at = [](auto& list, std::size_t i) {
          return list.begin() + static_cast<std::ptrdiff_t>(i);
        };
        std::vector<rpc::CheckItem> part(at(items, from), at(items, to));
        std::vector<std::size_t> part_of(at(of, from), at(of, to));
        client_->check_async(std::move(part), [this, part_of, now, number](auto replies) {
          note(part_of, now, number, replies);
        });
      }
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
  }

  void note(const std::vector<std::size_t>& of, Nanos now, std::int64_t number,
            const std::vector<Reply>& replies) {
    std::lock_guard lock(mutex_);
    for (std::size_t i = 0; i < of.size(); ++i) {
      Answers& answers = answers_[of[i]];
      if (!replies[i].error.empty()) {
        ++answers.unknown;
      } else if (replies[i].allowed) {
        ++answers.admitted[number];
        ++answers.by_bin[now / kBin];
      }
    }
  }

  const Options& options_;
  std::size_t index_;
  Nanos end_;
  std::mutex mutex_;
  std::vector<Answers> answers_;
  std::optional<rpc::NodeClient> client_;
  std::thread thread_;
};

struct Result {
  std::uint64_t limit = 0;
  std::vector<double> ratios;  // admitted / limit, by window
  std::uint64_t unknown = 0;
  std::vector<std::pair<double, double>> curve;  // seconds, admitted in this window / limit

  double mean() const {
    return std::accumulate(ratios.begin(), ratios.end(), 0.0) / static_cast<double>(ratios.size());
  }
  double median() const {
    std::vector<double> sorted = ratios;
    std::sort(sorted.begin(), sorted.end());
    return sorted[sorted.size() / 2];
  }
  double worst() const { return *std::max_element(ratios.begin(), ratios.end()); }
};

std::vector<Result> measure(const Options& options, const std::string& folder) {
  ClusterOptions made;
  made.node_program = options.node_program;
  made.directory = folder;
  made.regions.assign(kNames.begin(), kNames.end());
  made.rules = rules_of(options);
  made.delay_between = [](std::size_t from, std::size_t to) {
    return kDelays[from][to] * kMillisecond;
  };
  Cluster cluster(made);
  cluster.start_all();
  Nanos window = options.window_s * kSecond;
  // They find each other, and the demand starts with a window.
  Nanos first = (wall_clock() + 4 * kSecond) / window + 1;
  Nanos begin = first * window;
  Nanos end = begin + options.windows * window;
  std::this_thread::sleep_for(std::chrono::nanoseconds(begin - wall_clock()));
  std::vector<std::unique_ptr<Region>> regions;
  for (std::size_t i = 0; i < kRegions; ++i) {
    regions.push_back(std::make_unique<Region>(options, i, cluster.client_address(i), end));
  }
  if (options.cut_window >= 0) {
    Nanos cut = begin + options.cut_window * window;
    std::this_thread::sleep_for(std::chrono::nanoseconds(cut - wall_clock()));
    // The one with the largest share then: what it may admit alone is the most.
    auto number = static_cast<std::size_t>(first + options.cut_window);
    std::size_t busiest = (kRegions - number % kRegions) % kRegions;
    cluster.cut(busiest);
    std::this_thread::sleep_for(std::chrono::seconds(options.cut_s));
    cluster.heal(busiest);
  }
  std::vector<Result> results;
  for (std::uint64_t limit : options.limits) results.push_back({limit, {}, 0, {}});
  std::vector<std::map<std::int64_t, std::uint64_t>> windows(results.size());
  std::vector<std::map<std::int64_t, std::uint64_t>> bins(results.size());
  for (auto& region : regions) {
    const std::vector<Answers>& answers = region->finish();
    for (std::size_t i = 0; i < results.size(); ++i) {
      for (auto [number, units] : answers[i].admitted) windows[i][number] += units;
      for (auto [bin, units] : answers[i].by_bin) bins[i][bin] += units;
      results[i].unknown += answers[i].unknown;
    }
  }
  for (std::size_t i = 0; i < results.size(); ++i) {
    auto limit = static_cast<double>(results[i].limit);
    for (int w = 0; w < options.windows; ++w) {
      results[i].ratios.push_back(static_cast<double>(windows[i][first + w]) / limit);
    }
    std::uint64_t sum = 0;
    for (std::int64_t bin = begin / kBin; bin < end / kBin; ++bin) {
      if (bin * kBin % window == 0) sum = 0;
      sum += bins[i][bin];
      results[i].curve.emplace_back(
          static_cast<double>(bin * kBin + kBin - begin) / static_cast<double>(kSecond),
          static_cast<double>(sum) / limit);
    }
  }
  return results;
}

int run(const Options& options) {
  std::string folder =
      (std::filesystem::temp_directory_path() / fmt::format("weir-accuracy-{}", ::getpid()))
          .string();
  json out{{"mode", options.mode},
           {"load", options.load},
           {"window_s", options.window_s},
           {"windows", options.windows},
           {"cut_window", options.cut_window},
           {"cut_s", options.cut_s}};
  if (!takes(options, folder + "/probe")) {
    out["absent"] = true;
    fmt::print("{}\n", out.dump());
    std::filesystem::remove_all(folder);
    return 0;
  }
  out["limits"] = json::array();
  bool clean = true;
  for (const Result& result : measure(options, folder)) {
    out["limits"].push_back({{"limit", result.limit},
                             {"mean", result.mean()},
                             {"median", result.median()},
                             {"worst", result.worst()},
                             {"windows", result.ratios},
                             {"unknown", result.unknown},
                             {"curve", result.curve}});
    clean = clean && result.unknown == 0;
  }
  fmt::print("{}\n", out.dump());
  std::filesystem::remove_all(folder);
  if (!clean) fmt::print(stderr, "accuracy: some requests were not answered\n");
  return clean ? 0 : 1;
}

}  // namespace
}  // namespace weir::examples

int main(int argc, char** argv) {
  weir::examples::Options options;
  CLI::App app{"Admitted against allowed, in five real nodes 80 to 150 ms apart. Prints JSON.",
               "accuracy"};
  app.add_option("--node", options.node_program, "Path of weir-node")->required();
  app.add_option("--mode", options.mode, "merged, escrow or home");
  app.add_option("--limits", options.limits, "Units per window")->delimiter(',');
  app.add_option("--load", options.load, "Demand, in times of the limit");
  app.add_option("--windows", options.windows)->check(CLI::Range(1, 100));
  app.add_option("--window", options.window_s, "Length of a window in seconds")
      ->check(CLI::Range(1, 3600));
  app.add_option("--cut-window", options.cut_window, "Window in which a region is cut off");
  app.add_option("--cut-seconds", options.cut_s, "For how long")->check(CLI::Range(1, 600));
  weir::strict_numbers(app);
  CLI11_PARSE(app, argc, argv);
  return weir::examples::run(options);
}
