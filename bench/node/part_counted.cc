#include <fmt/format.h>

#include <weir/bench/machine.h>
#include <weir/bench/node/node_parts.h>

namespace weir::bench {
namespace {

constexpr RpcShape kBatches{1, 8, 64};
/// us of the node's processor time for a request, with what follows from it (the store folds its
/// log some time later), without its rest.
double round_of(const BenchNode& node, const NodeBenchOptions& options, unsigned hits,
                double idle_percent) {
  const std::uint64_t from = steady_ns();
  const std::uint64_t before = node.cpu_ns();
  RpcLoad load(node.rpc(options.counted_keys, hits), kBatches);
  const Load done = load.paced(options.rate, options.counted_s);
  node.wait_at_rest(12 * options.settle_s);
  const auto cpu = static_cast<double>(node.cpu_ns() - before);
  const double rest = idle_percent / 100 * static_cast<double>(steady_ns() - from);
  return (cpu - rest) / 1e3 / static_cast<double>(done.requests);
}

}  // namespace

Json node_counted(const NodeBenchOptions& options) {
  need(options.counted_keys * 1000, fmt::format("{} keys in a node", options.counted_keys));
  BenchNode node({.program = options.program,
                  .directory = options.scratch + "/counted",
                  .rules = key_rules_text("token_bucket"),
                  .max_series = options.counted_keys,
                  .storage = true,
                  .members = {}});
  node.start();
  node.load(options.counted_keys, options.counted_keys);
  node.wait_at_rest(12 * options.settle_s);
  const double idle = node.cpu_percent(options.rest_s);
  const Turns before = node.turns();
  std::vector<double> counted;
  std::vector<double> peeked;
  std::vector<double> behind;
  for (int i = 0; i < options.rounds; ++i) {
    peeked.push_back(round_of(node, options, 0, idle));
    counted.push_back(round_of(node, options, 1, idle));
    behind.push_back(counted.back() - peeked.back());
  }
  return {{"part", "counted"},
          {"keys", options.counted_keys},
          {"rate", options.rate},
          {"counted_us", spread_of(counted)},
          {"peeked_us", spread_of(peeked)},
          {"behind_us", spread_of(behind)},
          {"turns", {{"counted requests", turns_between(before, node.turns())}}},
          {"figures",
           {{"behind_count_us", round_to(median_of(behind), 3)},
            {"idle_lmdb_percent", round_to(idle, 3)}}}};
}

}  // namespace weir::bench
