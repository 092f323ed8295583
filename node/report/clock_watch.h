#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include <weir/crdt/time.h>
#include <weir/node/log.h>

namespace weir::node {

/// Whether this node's clock can be believed, by what peers' clocks say, and log lines of clocks
/// that differ: clock_skew when a peer's clock is further off than 100 ms, and than 1 s,
/// clock_skew_over when it is right again. For one thread.
class ClockWatch {
 public:
  struct Peer {
    std::string name;
    std::optional<Nanos> ahead;  ///< of this node's; nothing: not known
    Nanos error = 0;             ///< `ahead` is at most so far off
  };

  /// `max_skew` is ReplicaOptions'. `log` outlives this.
  ClockWatch(Nanos max_skew, Log& log) : max_skew_(max_skew), log_(log) {}

  /// Call each second or so, with the same peers in the same order. `waits`: the clock was set back
  /// again, and the node goes on by it only after so long.
  void look(Nanos wall, std::span<const Peer> peers, std::optional<Nanos> waits = {});

  /// What is wrong with this node's clock, for people; empty: nothing that is known. It stands
  /// outside of the years 2020 to 2200, or it is more than max_skew off from so many peers that
  /// they are most of the cluster: of two members, none says who is right. Or it is set back again
  /// and again.
  const std::string& wrong() const { return wrong_; }

 private:
  struct Known {
    int level = 0;
    Nanos logged_at = 0;
  };

  void log_level(Nanos wall, const Peer& peer, Known& known);

  Nanos max_skew_;
  Log& log_;
  std::vector<Known> known_;  // by peer
  std::string wrong_;
};

}  // namespace weir::node
