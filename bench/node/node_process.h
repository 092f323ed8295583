#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <weir/bench/spread.h>
#include <weir/bench/wire/process.h>
#include <weir/bench/wire/rpc_load.h>

namespace weir::bench {

/// Where a node listens, on 127.0.0.1.
struct NodePorts {
  std::uint16_t peers = 0;
  std::uint16_t clients = 0;
  std::uint16_t http = 0;
  std::uint16_t admin = 0;
};

/// Ports for so many nodes, all different and free now.
std::vector<NodePorts> ports_for(std::size_t nodes);

/// ms of processor time, by what the main loop did: the longest of each kind.
using Turns = std::map<std::string, double>;
/// Those of `after` that are longer than in `before`: what happened in between.
Turns turns_between(const Turns& before, const Turns& after);

/// A node that is measured: the real program, with a configuration of its own. Every call throws
/// std::runtime_error if the node is not there, or answers something else than it should.
class BenchNode {
 public:
  struct Options {
    std::string program;    ///< weir-node
    std::string directory;  ///< of this node alone
    std::string rules;      ///< the text
    std::uint64_t max_series = 1'000'000;
    bool populate = false;  ///< takes the limiter's memory at the start
    bool storage = false;
    std::vector<NodePorts> members;  ///< itself and its peers, named node-0, node-1 …
    std::size_t self = 0;            ///< which of them it is
  };
  explicit BenchNode(Options options);

  /// Starts it, and returns once it answers; how long that took, in seconds.
  double start(double patience_seconds = 600);
  /// kill -9.
  void kill() { process_.reset(); }
  void write_rules(const std::string& text) const;

  Json status() const;
  std::string metrics() const;
  /// Asks for the key of an index and says whether it was allowed; `hits` 0 consumes nothing.
  bool allows(std::uint64_t key, std::uint64_t hits) const;
  Turns turns() const;
  std::uint64_t resident_bytes() const;
  std::uint64_t cpu_ns() const { return process_->cpu_ns(); }
  RpcTarget rpc(std::uint64_t keys, unsigned hits = 1) const {
    return {ports().clients, keys, hits};
  }

  /// Asks for each key from `first` on once, in batches; then waits until its status has `cells`,
  /// and nothing waits for the disk.
  void load(std::uint64_t keys, std::uint64_t cells, std::uint64_t first = 0) const;
  /// Polls the status until `done(status)`. Throws, naming `what`, after `patience_seconds`.
  void wait(const std::string& what, double patience_seconds,
            const std::function<bool(const Json&)>& done) const;
  /// Processor time that it takes over `seconds`, in percent of one processor.
  double cpu_percent(double seconds) const;
  /// Waits until what it was given to do is done, the store's folding included, which begins when
  /// its log is ten seconds old: until it takes no more than 2% of a processor for eleven seconds
  /// on end, or `patience_seconds` have passed.
  void wait_at_rest(double patience_seconds) const;

 private:
  const NodePorts& ports() const { return options_.members[options_.self]; }
  void write_config() const;

  Options options_;
  std::unique_ptr<Process> process_;
};

}  // namespace weir::bench
