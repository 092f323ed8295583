#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <weir/proptests/real/history.h>
#include <weir/proptests/real/network.h>
#include <weir/rpc/client/node_client.h>

namespace weir::real {

inline constexpr std::uint64_t kQuotaLimit = 500;
inline constexpr Nanos kQuotaWindow = 10 * kSecond;

/// The rules that clients count in. `commit_is_async`: the counters that promise durability do not
/// keep it, to see that this is noticed.
std::string rules_yaml(bool commit_is_async);

/// Threads that call nodes from inside their namespaces, one call at a time each, and note every
/// call. Each has a key of its own in both kinds of counters, which nobody else adds to, so that a
/// loss cannot hide behind what others counted; the other keys are shared.
class Clients {
 public:
  /// Starts `per_node` threads for every node.
  Clients(const Network& network, std::uint32_t per_node, std::uint64_t seed);
  ~Clients();  ///< stops
  Clients(const Clients&) = delete;
  Clients& operator=(const Clients&) = delete;

  /// Ends the traffic and waits for what is under way, at most about two seconds.
  void stop();
  /// All calls, in no order. After stop().
  std::vector<Operation> take();
  std::uint32_t count() const { return count_; }

 private:
  struct Worker {
    std::uint32_t number = 0;
    std::uint32_t node = 0;
    std::unique_ptr<rpc::NodeClient> client;
    std::vector<Operation> operations;
    std::thread thread;
  };
  void run(Worker& worker, std::uint64_t seed);

  std::uint32_t count_;
  std::atomic<bool> stopping_{false};
  std::vector<Worker> workers_;
};

/// One call, noted.
Operation call(rpc::NodeClient& client, std::uint32_t node, Counter counter, const std::string& key,
               std::uint64_t hits);

}  // namespace weir::real
