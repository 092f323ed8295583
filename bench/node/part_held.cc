#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <thread>

#include <weir/bench/machine.h>
#include <weir/bench/node/node_parts.h>

namespace weir::bench {
namespace {

constexpr std::uint64_t kBurst = 2000;  // of key_rules_text
constexpr double kPatience = 1200;      // s, with a repair

void pause(double seconds) {
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

double seconds_since(std::uint64_t from) {
  return static_cast<double>(steady_ns() - from) / 1e9;
}

/// Both hold the same, and know it.
void wait_until_equal(const BenchNode& one, const BenchNode& other) {
  other.wait("two equal nodes", kPatience, [&](const Json& now) {
    const Json there = one.status();
    return now.at("cells") == there.at("cells") && now.at("digest") == there.at("digest");
  });
}

void wait_until_agreed(const BenchNode& node) {
  node.wait("a peer that agrees", kPatience, [](const Json& now) {
    const Json& peer = now.at("peers").at(0);
    return peer.at("up") == true && peer.at("agrees") == true;
  });
}

/// From exec to the first right decision: of key 0 hardly anything was left.
double restart(BenchNode& node) {
  const std::uint64_t from = steady_ns();
  node.start();
  if (node.allows(0, kBurst / 2)) throw std::runtime_error("what was counted is forgotten");
  return seconds_since(from);
}

/// An empty node comes to one that has all. Seconds until both are equal, or nothing: it took too
/// long.
std::optional<double> repair(const BenchNode& full, BenchNode& empty, Json& turns) {
  const Turns before = full.turns();
  const std::uint64_t from = steady_ns();
  empty.start();
  std::optional<double> took;
  try {
    wait_until_equal(full, empty);
    took = seconds_since(from);
    wait_until_agreed(full);
    wait_until_agreed(empty);
  } catch (const std::runtime_error& error) {
    fmt::print(stderr, "  repair: {}\n", error.what());
  }
  turns["repair, the one with all"] = turns_between(before, full.turns());
  turns["repair, the empty one"] = empty.turns();
  return took;
}

/// The other one goes, and comes back with all that it had.
void peer_returns(const BenchNode& stays, BenchNode& goes, double away_s, Json& turns) {
  const Turns before = stays.turns();
  goes.kill();
  pause(away_s);
  goes.start();
  wait_until_agreed(stays);
  wait_until_agreed(goes);
  turns["a peer's return, the one that stayed"] = turns_between(before, stays.turns());
  turns["a peer's return, the one that came"] = goes.turns();
}

}  // namespace

Json node_held(const NodeBenchOptions& options) {
  need(options.keys * 1600, fmt::format("two nodes with {} keys", options.keys));
  const std::vector<NodePorts> members = ports_for(2);
  BenchNode::Options first{.program = options.program,
                           .directory = options.scratch + "/held-0",
                           .rules = key_rules_text("token_bucket"),
                           .max_series = options.keys,
                           .storage = true,
                           .members = members};
  BenchNode::Options second = first;
  second.directory = options.scratch + "/held-1";
  second.self = 1;
  BenchNode full(first);
  BenchNode empty(second);
  Json turns;

  full.start();
  full.load(options.keys, options.keys);
  if (!full.allows(0, kBurst - 200)) throw std::runtime_error("a decision was wrong");
  pause(options.settle_s);
  turns["first use of keys, with a disk"] = full.turns();
  full.kill();
  const double start_s = restart(full);
  pause(options.settle_s);
  turns["boot"] = full.turns();

  Json figures{{"start_10m_s", round_to(start_s, 3)}, {"repair_10m_s", nullptr}};
  if (const auto repair_s = repair(full, empty, turns)) {
    figures["repair_10m_s"] = round_to(*repair_s, 2);
    full.wait_at_rest(12 * options.settle_s);
    const Turns before = full.turns();
    figures["idle_pair_percent"] = round_to(full.cpu_percent(options.rest_s), 3);
    turns["at rest, two that agree"] = turns_between(before, full.turns());
    peer_returns(full, empty, std::min(3.0, options.settle_s), turns);
  }
  return {{"part", "held"},
          {"keys", options.keys},
          {"turns", std::move(turns)},
          {"figures", std::move(figures)}};
}

Json node_rules(const NodeBenchOptions& options) {
  const auto text = [&](std::uint64_t limit_of_first) {
    std::string out = "domain: api\nrules:\n";
    for (std::size_t i = 0; i < options.rules; ++i) {
      out += fmt::format(
          "  - {{name: rule-{0}, match: {{path: /{0}}}, key: [key], window: 1h, limit: {1}, "
          "algorithm: token_bucket, burst: 100}}\n",
          i, i == 0 ? limit_of_first : 100);
    }
    return out;
  };
  BenchNode node({.program = options.program,
                  .directory = options.scratch + "/rules",
                  .rules = text(100),
                  .members = {}});
  node.start();
  Turns before = node.turns();
  for (int i = 0; i < options.rounds; ++i) node.metrics();
  Turns after = node.turns();
  Json turns;
  const std::string size = fmt::format("{} rules", options.rules);
  turns["status and metrics of " + size] = turns_between(before, after);
  before = after;
  node.write_rules(text(200));
  node.wait("a reload", 60,
            [](const Json& now) { return now.at("rules_file").at("reloads") == 1; });
  pause(std::min(2.0, options.settle_s));
  turns["reload of " + size] = turns_between(before, node.turns());
  return {{"part", "rules"},
          {"rules", options.rules},
          {"turns", std::move(turns)},
          {"figures", Json::object()}};
}

}  // namespace weir::bench
