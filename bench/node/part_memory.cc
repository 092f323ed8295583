#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include <weir/bench/machine.h>
#include <weir/bench/node/node_parts.h>

namespace weir::bench {
namespace {

constexpr const char* kAlgorithms[] = {"token_bucket", "fixed_window"};

void pause(double seconds) {
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

void check_counted(const BenchNode& node) {
  const Json status = node.status();
  for (const Json& rule : status.at("rules")) {
    if (rule.at("degraded") != 0) throw std::runtime_error("some keys were not counted exactly");
  }
}

/// One algorithm's keys in a node without a disk: what they take, and what it does at rest.
Json held_in_memory(const NodeBenchOptions& options, const std::string& algorithm) {
  BenchNode node({.program = options.program,
                  .directory = options.scratch + "/memory-" + algorithm,
                  .rules = key_rules_text(algorithm),
                  .max_series = options.keys,
                  .members = {}});
  node.start();
  pause(std::min(1.0, options.settle_s));
  const std::uint64_t before = node.resident_bytes();
  const Turns started = node.turns();
  node.load(options.keys, options.keys);
  check_counted(node);
  const Turns loaded = node.turns();
  pause(options.settle_s);
  const std::uint64_t after = node.resident_bytes();
  const double idle = node.cpu_percent(options.rest_s);
  const Turns rested = node.turns();
  node.metrics();
  const Turns asked = node.turns();
  return {{"algorithm", algorithm},
          {"bytes_per_key",
           round_to(static_cast<double>(after - before) / static_cast<double>(options.keys), 1)},
          {"idle_percent", round_to(idle, 3)},
          {"turns",
           {{"first use of keys", turns_between(started, loaded)},
            {"at rest", turns_between(loaded, rested)},
            {"status and metrics", turns_between(rested, asked)}}}};
}

}  // namespace

Json node_memory(const NodeBenchOptions& options) {
  need(options.keys * 800, fmt::format("{} keys in a node", options.keys));
  Json rows = Json::array();
  Json turns;
  double bytes = 0;
  double idle = 0;
  for (const char* algorithm : kAlgorithms) {
    Json row = held_in_memory(options, algorithm);
    bytes = std::max(bytes, row.at("bytes_per_key").get<double>());
    idle = std::max(idle, row.at("idle_percent").get<double>());
    for (const auto& [what, each] : row.at("turns").items()) {
      turns[fmt::format("{}, {}", what, algorithm)] = each;
    }
    row.erase("turns");
    rows.push_back(std::move(row));
  }
  return {{"part", "memory"},
          {"keys", options.keys},
          {"rows", std::move(rows)},
          {"turns", std::move(turns)},
          {"figures", {{"bytes_per_key_1w", bytes}, {"idle_percent", idle}}}};
}

Json node_full(const NodeBenchOptions& options) {
  constexpr double kGib = 1 << 30;
  // No part of them tells: the first keys take most of the table's pages.
  need(options.full_keys * 140, fmt::format("{} keys in a node", options.full_keys));
  BenchNode node({.program = options.program,
                  .directory = options.scratch + "/full",
                  .rules = key_rules_text("token_bucket"),
                  .max_series = options.full_keys,
                  .populate = true,
                  .members = {}});
  node.start();
  const std::uint64_t from = steady_ns();
  node.load(options.full_keys, options.full_keys);
  const double loaded_s = static_cast<double>(steady_ns() - from) / 1e9;
  check_counted(node);
  pause(options.settle_s);
  const double resident = static_cast<double>(node.resident_bytes()) / kGib;
  const double idle = node.cpu_percent(options.rest_s);
  node.metrics();
  return {{"part", "full"},
          {"keys", options.full_keys},
          {"loaded_s", round_to(loaded_s, 1)},
          {"bytes_per_key", round_to(resident * kGib / static_cast<double>(options.full_keys), 1)},
          {"turns",
           {{fmt::format("{} keys: first use, rest, status", options.full_keys), node.turns()}}},
          {"figures",
           {{"rss_100m_gib", round_to(resident, 2)}, {"idle_100m_percent", round_to(idle, 3)}}}};
}

Json node_ends(const NodeBenchOptions& options) {
  need(options.keys * 1400, fmt::format("{} windows and buckets in a node", options.keys));
  // A window and a bucket for each key. A bucket is over half a window after its last hit.
  const std::string rules = fmt::format(
      "domain: api\nrules:\n"
      "  - {{name: window, key: [key], window: {0}s, algorithm: fixed_window, limit: 100000, "
      "durability: async}}\n"
      "  - {{name: bucket, key: [key], window: {0}s, algorithm: token_bucket, limit: 400, "
      "burst: 100, durability: async}}\n",
      options.window_s);
  BenchNode node({.program = options.program,
                  .directory = options.scratch + "/ends",
                  .rules = rules,
                  .max_series = 2 * options.keys,
                  .members = {}});
  node.start();
  // Just after a window began, so that there is one to load all keys in.
  const auto in_window = [&] {
    const auto now = std::chrono::system_clock::now().time_since_epoch();
    return std::chrono::duration<double>(now).count() -
           static_cast<double>(std::chrono::duration_cast<std::chrono::seconds>(now).count() /
                               options.window_s * options.window_s);
  };
  while (in_window() > 0.2) pause(0.05);
  RpcLoad(node.rpc(options.keys), {2, 8, 64}).ask_all();
  const double loaded_s = in_window();
  // What was asked for is held some turns later.
  const auto held = [&] { return node.status().at("cells").get<std::uint64_t>() >= options.keys; };
  for (int i = 0; i < 50 && !held(); ++i) pause(0.02);
  if (!held()) {
    throw std::runtime_error("the window was over before all keys were asked for");
  }
  const Turns loaded = node.turns();
  node.wait("the end of all windows and buckets", 3.0 * options.window_s + 60,
            [](const Json& now) { return now.at("cells") == 0 && now.at("series") == 0; });
  const Turns ended = node.turns();
  return {{"part", "ends"},
          {"keys", options.keys},
          {"loaded_s", round_to(loaded_s, 1)},
          {"turns", {{"windows and buckets end", turns_between(loaded, ended)}}},
          {"figures", Json::object()}};
}

}  // namespace weir::bench
