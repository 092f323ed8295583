#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <weir/crdt/time.h>
#include <weir/limits/rules/rule.h>

namespace weir::sim {

/// What can go wrong. Every fault has a start, most have a length; all end with the chaos phase.
enum class FaultKind : std::uint8_t {
  crash,  ///< the process dies, un-synced writes are lost or torn; restarts after `length`
  crash_mid_commit,  ///< dies after its next commit reached the disk and before it hears of it
  stop,              ///< a clean stop, and a start after `length`
  limit_change,      ///< other numbers in the rules, while the node runs
  disk_lost,         ///< crash; the disk comes back empty
  disk_restored,  ///< a copy of the disk is taken; after `length` crash, and the copy is put back
  disk_cloned,    ///< crash; the disk of `other` is put in, both nodes run on
  disk_slow,      ///< commits take `amount` times as long
  disk_fails,     ///< syncs report errors; what they wrote may or may not be there
  disk_full,      ///< nothing can be written, the store cannot be opened
  cut,            ///< nothing gets from `node` to `other`
  partition,      ///< `amount` is the set of nodes on one side
  partial_cut,    ///< `node` and `other` cannot talk, both still talk to the rest
  lossy,          ///< the link from `node` to `other` loses `amount` per mille
  slow_link,      ///< delays `amount` times as long, both ways
  session_reset,  ///< the session from `node` to `other` breaks
  clock_jump,     ///< the wall clock of `node` jumps by `amount` ns
  clock_drift,    ///< the wall clock of `node` runs off by `amount` ppm
  forged,         ///< a peer shows `node` higher values of its own slot, and of live third nodes'
  burst,          ///< `node` sees twenty times its traffic
};
inline constexpr std::size_t kFaultKinds = 20;
std::string_view to_string(FaultKind kind);

struct Fault {
  FaultKind kind = FaultKind::crash;
  Nanos at = 0;
  Nanos length = 0;
  std::uint32_t node = 0;
  std::uint32_t other = 0;
  std::int64_t amount = 0;
};
std::string to_string(const Fault& fault);

struct LinkShape {
  bool exists = true;  ///< false: these two never talk; the others connect them
  Nanos delay = kMillisecond;
  Nanos jitter = kMillisecond;
  unsigned loss = 0;       ///< per mille
  unsigned duplicate = 0;  ///< per mille
};

/// Everything a seed decides beforehand. What it decides on the way comes from Random streams.
struct Scenario {
  std::uint64_t seed = 0;
  std::uint32_t nodes = 3;
  /// Intervals and gaps are this much longer, so that hours can be simulated sparsely.
  std::int64_t scale = 1;
  Nanos start_wall = 0;
  Nanos chaos = 0;  ///< length of the phase with traffic and faults
  Nanos sync_interval = 0;
  Nanos anti_entropy_interval = 0;
  Nanos resend_after = 0;
  std::uint64_t repair_piece = 2048;
  std::uint64_t sweep_piece = 8192;
  std::uint64_t enter_piece = 2048;
  std::uint64_t max_backlog = 64;
  std::size_t max_series = 1u << 16;
  std::vector<std::shared_ptr<const RuleSet>> rules;  ///< two sets: same rules, other numbers
  std::vector<std::vector<LinkShape>> links;          ///< [from][to]
  /// Messages of a session that is over may still arrive, as from a transport that forgets nothing.
  bool ghosts = false;
  std::uint32_t users = 1;
  std::uint32_t paths = 1;
  std::vector<Nanos> request_gap;      ///< mean, per node
  std::vector<std::uint32_t> weights;  ///< for escrow rules, per node
  Nanos disk_latency = kMillisecond;
  Nanos tell_delay = kMillisecond;  ///< from a commit to the node hearing of it
  bool disk_reorders = false;       ///< a crash keeps any subset of the un-synced writes
  std::vector<Nanos> skew;          ///< initial, per node
  std::vector<Fault> faults;
};

Scenario make_scenario(std::uint64_t seed);

/// One line for people.
std::string describe(const Scenario& scenario);

}  // namespace weir::sim
