#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include <weir/crdt/time.h>
#include <weir/proptests/real/schedule.h>

#include <cluster/relay.h>

namespace weir::real {

/// The kernel or the lack of rights does not let us make namespaces and links.
struct NoNetwork : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// A network namespace for every node and one for what lies between them.
///
///     NAME-n1  10.77.1.2 ──veth── 10.77.1.1   NAME-wan: relays, no forwarding
///                                 10.77.1.102 what node 1 takes for node 2
///                                 10.77.1.103 what node 1 takes for node 3, …
///     NAME-n2  10.77.2.2 ──veth── 10.77.2.101 what node 2 takes for node 1, …
///
/// Node 1 dials node 2 at 10.77.1.102; the relay there goes on from 10.77.2.101 to 10.77.2.2, so
/// that all packets between the two, whoever dialled, leave namespace n1 for 10.77.1.102 and n2 for
/// 10.77.2.101. A blackhole route to the one address in the one namespace is a one-way cut of one
/// pair; everything else is made of those. What a relay holds at that moment still arrives, as
/// packets under way would.
///
/// Not thread-safe, but within() may be called from any thread.
class Network {
 public:
  /// `name` is the beginning of the namespaces' names. Between two nodes every byte takes half of
  /// their round trip. Throws NoNetwork, after removing what was made.
  Network(std::string name, const std::vector<std::vector<Nanos>>& round_trips);
  /// Removes the namespaces; what still runs in them keeps them alive without a name.
  ~Network();
  Network(const Network&) = delete;
  Network& operator=(const Network&) = delete;

  std::uint32_t size() const { return size_; }
  std::string listen_address(std::uint32_t node) const;
  std::string peer_address(std::uint32_t from, std::uint32_t to) const;
  /// For setns(); open as long as this object lives.
  int descriptor(std::uint32_t node) const { return descriptors_[node + 1]; }
  /// Calls `what` on a thread that is in a node's namespace, and waits for it. Sockets that it
  /// makes and threads that it starts stay there.
  void within(std::uint32_t node, const std::function<void()>& what) const;

  /// Drops what `first` sends to `second`, or no longer. Throws std::runtime_error.
  void cut(const std::vector<Drop>& drops);
  void heal(const std::vector<Drop>& drops);
  void heal_all();
  const std::set<Drop>& dropped() const { return dropped_; }

 private:
  void make(const std::vector<std::vector<Nanos>>& round_trips);
  void remove() noexcept;
  void route(const char* verb, const Drop& drop) const;
  std::string space(std::uint32_t node) const;

  std::string name_;
  std::uint32_t size_;
  std::vector<std::string> made_;  // namespaces
  std::vector<int> descriptors_;   // of the one between, then of the nodes'
  std::vector<std::unique_ptr<examples::Relay>> relays_;
  std::set<Drop> dropped_;
};

/// Removes namespaces "PREFIX-PID-…" of processes that no longer are: a run that was killed leaves
/// its own behind. Returns how many.
std::size_t remove_leftovers(const std::string& prefix);

}  // namespace weir::real
