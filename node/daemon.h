#pragma once

#include <memory>
#include <string>

#include <weir/limits/rules/rules_yaml.h>
#include <weir/node/config.h>
#include <weir/node/log.h>

namespace weir::node {

/// One node: engine, store, peer links, client protocol and HTTP on one libuv loop, plus the
/// store's writer thread. Everything runs in the thread that calls run().
class Daemon {
 public:
  /// `rules` are valid, and were read from the file that `config` names; it is read again when it
  /// changes and on SIGHUP. One that is refused leaves the last good one in force. `log` outlives
  /// the daemon.
  /// `no_restart_before`, on the monotonic clock: until then it does not stop for a clock that was
  /// set back, and is not ready meanwhile.
  Daemon(NodeConfig config, LoadedRules rules, Log& log, Nanos no_restart_before);
  ~Daemon();
  Daemon(const Daemon&) = delete;
  Daemon& operator=(const Daemon&) = delete;

  /// Opens the store and every listener. False, with a reason, if any of them fails.
  bool start(std::string& error);
  /// Serves until SIGTERM or SIGINT, and for NodeConfig::drain after it, or until the clock was set
  /// back (Engine::clock_set_back); then has peers get what they lack, for a second at most,
  /// commits everything and returns. The signal again ends the waiting.
  void run();
  /// After run(): the clock was set back, so another daemon is to go on, with this.
  bool set_back() const;
  /// With the ports that were taken.
  const NodeConfig& config() const;
  /// Those in force.
  LoadedRules rules() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace weir::node
