#pragma once

#include <array>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <queue>
#include <set>
#include <string>
#include <vector>

#include <weir/node/engine/engine.h>
#include <weir/proptests/sim/checker.h>
#include <weir/proptests/sim/disk.h>
#include <weir/proptests/sim/random.h>
#include <weir/proptests/sim/scenario.h>
#include <weir/proptests/sim/trace.h>

namespace weir::sim {

struct RunOptions {
  std::uint64_t seed = 1;
  std::set<std::size_t> without;   ///< faults left out, by their index in the scenario
  Nanos cut_off = kNever;          ///< the chaos phase ends no later than this
  bool no_bursts_of_hits = false;  ///< every request asks for one unit
  std::uint32_t most_users = ~0u;  ///< no more keys than this
  Sabotage sabotage = Sabotage::none;
  std::string lmdb_dir;        ///< not empty: real LMDB stores under this directory
  std::FILE* trace = nullptr;  ///< the timeline goes here
  std::size_t tail = 0;        ///< newest lines of it to keep
};

struct RunStats {
  Nanos simulated = 0;      ///< virtual time
  double node_seconds = 0;  ///< of running nodes
  std::uint64_t events = 0;
  std::uint64_t decisions = 0;
  std::uint64_t admitted = 0;
  std::uint64_t over_admitted = 0;
  std::uint64_t escrow_admitted = 0;
  std::uint64_t escrow_denied = 0;  ///< while others may have had rights
  std::uint64_t escrow_given = 0;
  std::uint64_t satisfied = 0;  ///< runs at whose end one node got all of a limit (law 46)
  std::uint64_t messages = 0;
  std::uint64_t commits = 0;
  std::uint64_t boots = 0;
  std::uint64_t reincarnations = 0;
  std::array<std::uint64_t, kFaultKinds> faults{};
};

struct RunResult {
  bool violated = false;
  int law = 0;
  std::string what;
  Nanos at = 0;            ///< virtual time of the violation
  std::uint64_t hash = 0;  ///< of everything that happened
  RunStats stats;
  Scenario scenario;
  std::vector<std::string> tail;
};

/// One run: chaos, healing, convergence, rest. Depends on the options alone.
RunResult run(const RunOptions& options);

/// Leaves out faults and shortens the run as long as the same law still breaks; at most `attempts`
/// runs.
RunOptions shrink(const RunOptions& failing, int attempts);

/// For people: the scenario, the faults that were not left out, the end of the timeline.
std::string report(const RunOptions& options, const RunResult& result);

}  // namespace weir::sim
