#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "relay.h"

namespace weir::examples {

struct ClusterOptions {
  std::string node_program;          ///< path of weir-node
  std::string directory;             ///< for configurations, logs and LMDB; made if missing
  std::vector<std::string> regions;  ///< one node each
  std::string rules;                 ///< YAML
  std::string more_config;           ///< further lines for every node.yaml
  std::vector<std::string> more_arguments{};  ///< of every weir-node
  std::vector<std::string> environment{};     ///< "NAME=value", added to every weir-node's
  /// Members by certificate and HTTPS: a CA in DIRECTORY/certs, and for each node REGION-1.pem.
  bool tls = false;
  unsigned threads = 2;           ///< workers of every node
  std::string map_size = "4GiB";  ///< of every node's store
  Nanos drain = 0;                ///< of every node
  Nanos delay = 0;                ///< one way, between any two nodes
  /// If set, the one-way delay between two nodes instead; the same both ways.
  std::function<Nanos(std::size_t, std::size_t)> delay_between{};
};

/// Real node processes on loopback, with a relay on every link between two of them. Used by the
/// demo and by tests. Not thread-safe, but cut() and heal() may be called while others read.
class Cluster {
 public:
  /// Throws std::runtime_error if something cannot be set up.
  explicit Cluster(ClusterOptions options);
  ~Cluster();  ///< kills what still runs
  Cluster(const Cluster&) = delete;
  Cluster& operator=(const Cluster&) = delete;

  std::size_t size() const { return nodes_.size(); }
  const std::string& region(std::size_t node) const { return options_.regions[node]; }
  std::string client_address(std::size_t node) const;
  std::string http_address(std::size_t node) const;
  std::string admin_address(std::size_t node) const;  ///< status, metrics, health
  std::string peers_address(std::size_t node) const;  ///< without the relays
  std::string log_path(std::size_t node) const;
  pid_t pid(std::size_t node) const { return nodes_[node].pid; }

  /// Starts the process, with `more` behind more_arguments, and waits until it answers; throws with
  /// the end of its log if it does not.
  void start(std::size_t node, const std::vector<std::string>& more = {});
  void start_all();
  void kill(std::size_t node, int signal);  ///< and waits for its end, unless SIGSTOP or SIGCONT
  /// SIGTERM. Returns its exit code, or -1 if it had to be killed after `patience`.
  int stop(std::size_t node, Nanos patience = 5 * kSecond);

  /// Cuts every link from and to a node, or heals them.
  void cut(std::size_t node);
  void heal(std::size_t node);

  /// The node's status JSON; empty if it does not answer.
  std::string status(std::size_t node) const;
  /// True once all nodes report the same digest, agree with all peers, and are caught up.
  bool converged() const;

 private:
  struct Node {
    pid_t pid = -1;
    std::uint16_t peers = 0;
    std::uint16_t clients = 0;
    std::uint16_t http = 0;
    std::uint16_t admin = 0;
  };
  struct Link {
    std::size_t from = 0;
    std::size_t to = 0;
    std::unique_ptr<Relay> relay;
  };
  void make_certificates() const;
  void write_config(std::size_t node) const;
  std::string directory_of(std::size_t node) const;

  ClusterOptions options_;
  std::vector<Node> nodes_;
  std::vector<Link> links_;
};

}  // namespace weir::examples
