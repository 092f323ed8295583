#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <weir/proptests/real/history.h>
#include <weir/proptests/real/network.h>
#include <weir/rpc/client/node_client.h>

namespace weir::real {

/// Monotonic: the clock of histories.
Nanos monotonic();

struct NodesOptions {
  std::string program;                 ///< weir-node
  std::string directory;               ///< for configurations, logs and LMDB; made if missing
  std::string rules;                   ///< YAML
  Nanos stop_patience = 20 * kSecond;  ///< for a clean stop; then SIGKILL
};

/// A weir-node process in each namespace of a network, with its clock at an offset of its own.
/// Clients reach a node at kClients from inside its namespace. For the thread that made it, which
/// must outlive the processes: they are killed with it.
class Nodes {
 public:
  static constexpr const char* kClients = "127.0.0.1:7401";
  enum class State : std::uint8_t { down, running, paused, stopping };

  /// Throws std::runtime_error if files cannot be written. Starts nothing.
  Nodes(const Network& network, NodesOptions options);
  ~Nodes();  ///< kills what still runs
  Nodes(const Nodes&) = delete;
  Nodes& operator=(const Nodes&) = delete;

  State state(std::uint32_t node) const { return processes_[node].state; }
  bool all_running() const;
  /// Makes the process and returns at once. A node that is still stopping starts when it has.
  void start(std::uint32_t node, Nanos clock_offset);
  // These do nothing, and return false, in states where they would have no sense.
  bool kill(std::uint32_t node);  ///< SIGKILL, and waits for the end
  bool stop(std::uint32_t node);  ///< SIGTERM; poll() sees the end
  bool pause(std::uint32_t node);
  bool resume(std::uint32_t node);
  /// Call often. Returns what went wrong since: a node that ended without being told to, did not
  /// stop in time, or stopped with another code than 0.
  std::vector<std::string> poll();
  /// Removes a node's store; it must be down.
  void lose_disk(std::uint32_t node);

  /// All processes so far.
  std::vector<Run> runs() const;
  /// The node's status JSON; empty if it does not answer within a second.
  std::string status(std::uint32_t node) const;
  std::string log_path(std::uint32_t node) const;

 private:
  struct Process {
    pid_t pid = -1;
    State state = State::down;
    Nanos stop_deadline = 0;
    std::optional<Nanos> start_when_down;  // with this clock offset
    std::vector<Run> runs;
    std::unique_ptr<rpc::NodeClient> client;
  };
  void write_config(std::uint32_t node) const;
  void spawn(std::uint32_t node, Nanos clock_offset);
  void ended(Process& process);
  std::string directory_of(std::uint32_t node) const;

  const Network& network_;
  NodesOptions options_;
  std::vector<Process> processes_;
};

}  // namespace weir::real
