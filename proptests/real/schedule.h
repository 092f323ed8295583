#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weir/crdt/time.h>

namespace weir::real {

/// A node's clock is at most this far off, either way: two of them differ by no more than max_skew.
inline constexpr Nanos kMaxClockOffset = 500 * kMillisecond;

enum class Act : std::uint8_t {
  kill,   ///< SIGKILL
  stop,   ///< SIGTERM
  start,  ///< after either
  pause,  ///< SIGSTOP
  resume,
  cut,
  heal,
};
std::string_view to_string(Act act);

enum class Partition : std::uint8_t {
  isolated,  ///< one node and the rest
  split,     ///< two nodes and three
  pair,      ///< two nodes that both still talk to the others
  one_way,   ///< nothing gets from one node to another; the other direction works
};
inline constexpr Partition kPartitions[] = {Partition::isolated, Partition::split, Partition::pair,
                                            Partition::one_way};
std::string_view to_string(Partition partition);

/// What `first` sends to `second` is dropped.
using Drop = std::pair<std::uint32_t, std::uint32_t>;

struct Step {
  Nanos at = 0;  ///< from the beginning of the run
  Act act = Act::kill;
  std::uint32_t node = 0;                     ///< not of cut and heal
  Nanos clock_offset = 0;                     ///< of start
  Partition partition = Partition::isolated;  ///< of cut and heal
  std::vector<Drop> drops;                    ///< of cut; of heal the same again
};

/// What a seed decides beforehand.
struct Schedule {
  std::vector<Nanos> first_offsets;             ///< of the nodes' clocks
  std::vector<std::vector<Nanos>> round_trips;  ///< between two nodes, 80 to 150 ms; symmetric
  std::vector<Step> steps;                      ///< in time; everything is healed at the end
};

/// Node faults (each node one at a time, of at most three nodes at once) and partitions (one at a
/// time) over `length`. The same arguments give the same schedule.
Schedule make_schedule(std::uint64_t seed, Nanos length, std::uint32_t nodes);

/// A line a step.
std::string to_string(const Schedule& schedule);
std::string to_string(const Step& step);

/// Sets of nodes within which each can reach each, if need be through others.
std::uint32_t components(std::uint32_t nodes, const std::set<Drop>& drops);

}  // namespace weir::real
