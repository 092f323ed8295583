#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <weir/bench/keys.h>
#include <weir/node/engine/engine.h>
#include <weir/storage/store.h>

namespace weir::bench {

/// A node with everything but sockets: the engine on an LMDB store in a temporary directory, driven
/// every 5 ms by a thread of its own as the daemon does, and a peer that acknowledges every push
/// and sends counts of its own for `peer_cells` random keys every 50 ms. Rules must be of fixed
/// windows, with the one key api_key.
class WorkingNode {
 public:
  /// What went on in the background.
  struct Background {
    std::uint64_t commits = 0;
    std::uint64_t committed_bytes = 0;
    std::uint64_t cells_pushed = 0;    ///< to the peer
    std::uint64_t cells_absorbed = 0;  ///< from the peer
    std::uint64_t pumps = 0;
    std::uint64_t behind = 0;  ///< pumps that found the disk behind
  };

  /// Throws std::runtime_error if the store cannot be opened.
  WorkingNode(std::shared_ptr<const RuleSet> rules, std::uint64_t keys, std::size_t peer_cells);
  ~WorkingNode();
  WorkingNode(const WorkingNode&) = delete;
  WorkingNode& operator=(const WorkingNode&) = delete;

  node::Engine& engine() { return *engine_; }
  /// Waits until everything decided so far is handed over, at most this long; true if it is.
  bool settle(double seconds);
  /// Stops the driver, closes the store. Throws if the store had failed.
  Background stop();

 private:
  void drive();
  void hear_peer(Nanos wall);

  std::filesystem::path directory_;
  std::uint64_t keys_;
  std::size_t peer_cells_;
  std::unique_ptr<storage::Store> store_;
  std::unique_ptr<node::Engine> engine_;
  std::mutex mutex_;  // of what the store's thread leaves for the driver's
  crdt::WriteId committed_ = 0;
  std::string failure_;
  crdt::Incarnation peer_{7, 7};
  std::vector<crdt::Ack> acks_;
  std::uint64_t peer_stamp_ = 0;
  std::map<crdt::CellId, std::uint64_t> peer_counts_;
  std::uint64_t seed_ = 5;
  std::uint64_t pumps_ = 0;
  std::uint64_t behind_ = 0;
  std::atomic<std::uint64_t> settled_{0};  // pumps that left nothing uncommitted
  std::atomic<bool> stopping_{false};
  std::thread driver_;
};

/// Nanoseconds since the Unix epoch.
Nanos wall_clock();

}  // namespace weir::bench
