#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <weir/crdt/time.h>
#include <weir/rpc/client/node_client.h>

namespace weir::examples {

/// Keys drawn with Zipf's law: key k (from 0) in proportion to 1 / (k + 1)^skew.
class ZipfKeys {
 public:
  ZipfKeys(std::size_t keys, double skew, std::uint64_t seed);
  std::size_t next();

 private:
  std::vector<double> cumulative_;
  std::uint64_t state_;
};

/// What one client learned about one key.
struct KeyTally {
  std::uint64_t admitted = 0;
  std::uint64_t denied = 0;
  std::uint64_t unknown = 0;  ///< no answer: counted or not
};

struct LoadOptions {
  std::string address;
  std::string domain = "api";
  std::string key = "api_key";    ///< the descriptor entry that carries the key
  std::vector<std::string> keys;  ///< what is asked for, in this order, again and again
  std::uint64_t per_second = 1000;
  std::size_t batch = 20;
  Nanos deadline = kSecond;
  /// No request is sent within this distance of a multiple of `quiet_every` of the wall clock, so
  /// that every answer belongs to a window without doubt. 0: no pauses.
  Nanos quiet_every = 0;
  Nanos quiet_margin = 30 * kMillisecond;
};

/// Sends checks to one node at a steady rate from a thread of its own, and tallies the answers.
class Load {
 public:
  explicit Load(LoadOptions options);
  ~Load();  ///< stops
  Load(const Load&) = delete;
  Load& operator=(const Load&) = delete;
  void stop();

  std::uint64_t admitted() const { return admitted_; }
  std::uint64_t denied() const { return denied_; }
  std::uint64_t unknown() const { return unknown_; }
  /// By key and by window (multiples of quiet_every; one window if that is 0).
  using Tallies = std::map<std::string, std::map<std::int64_t, KeyTally>>;
  Tallies tallies() const;

 private:
  void run();
  void send_batch(rpc::NodeClient& client, std::size_t& at);

  LoadOptions options_;
  std::atomic<bool> stopping_{false};
  std::atomic<std::uint64_t> admitted_{0};
  std::atomic<std::uint64_t> denied_{0};
  std::atomic<std::uint64_t> unknown_{0};
  mutable std::mutex mutex_;
  Tallies tallies_;
  std::thread thread_;
};

/// The client addresses of an access log, in the log's order; lines that are malformed are skipped.
std::vector<std::string> keys_of_log(const std::string& path);

Nanos wall_clock();

}  // namespace weir::examples
