#pragma once

#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>

#include <weir/bench/node/node_process.h>
#include <weir/bench/spread.h>

namespace weir::bench {

/// Sizes and times of scripts/bench --node.
struct NodeBenchOptions {
  std::string program;                     ///< weir-node
  std::string scratch;                     ///< a folder for stores; a disk's, for durable figures
  std::uint64_t keys = 10'000'000;         ///< held, merged, recovered, repaired
  std::uint64_t counted_keys = 1'000'000;  ///< counted again and again
  std::uint64_t full_keys = 0;             ///< 100 million with --full, or 0
  std::size_t rules = 10'000;              ///< of a large rules file
  int rounds = 5;
  double rate = 50'000;   ///< counted requests a second
  double counted_s = 20;  ///< a round of them
  /// Before a node is taken to be at rest; twelve times at most, where a disk is.
  double settle_s = 5;
  double rest_s = 10;  ///< and how long that is measured
  int window_s = 180;  ///< of keys that end together: long enough to ask for all of them

  static NodeBenchOptions quick();
};

// Each measures one thing, tells its progress on stderr, and returns an object: `figures` has what
// is compared between runs, `turns` the longest events of the main loop in ms, by what the node was
// made to do and what the event was. Throws LeftOut, or another std::runtime_error if
// something was wrong.

Json node_memory(const NodeBenchOptions& options);   ///< a node's memory of many keys, and its rest
Json node_full(const NodeBenchOptions& options);     ///< the same of full_keys
Json node_writers(const NodeBenchOptions& options);  ///< memory of keys that five nodes write
Json node_merge(const NodeBenchOptions& options);    ///< merges, and their size on the wire
Json node_counted(const NodeBenchOptions& options);  ///< what stands behind a counted request
Json node_store(const NodeBenchOptions& options);    ///< durable updates
Json node_held(const NodeBenchOptions& options);     ///< start, repair and rest with a full store
Json node_ends(const NodeBenchOptions& options);     ///< windows and buckets that end together
Json node_rules(const NodeBenchOptions& options);    ///< a large rules file
Json node_redis(const NodeBenchOptions& options);    ///< the same of Redis, if it is installed

/// One rule for each key, which no load of these programs uses up: `algorithm` is token_bucket or
/// fixed_window. A token bucket is full again 2.4 hours after one hit, and kept for 400 days.
std::string key_rules_text(const std::string& algorithm);

/// Calls `body` in a child process and returns what that returns: memory is the child's alone.
Json in_child(const std::function<Json()>& body);

/// There is too little memory, or a program is not installed: left out, and no failure.
struct LeftOut : std::runtime_error {
  using std::runtime_error::runtime_error;
};
/// Throws LeftOut unless this machine can give that much and 2 GiB besides.
void need(std::uint64_t bytes, const std::string& what);

}  // namespace weir::bench
