#pragma once

#include <memory>
#include <string>

#include <weir/crdt/time.h>
#include <weir/limits/yaml/read_file.h>
#include <weir/node/access/access.h>
#include <weir/node/access/access_file.h>
#include <weir/node/config.h>
#include <weir/node/log.h>
#include <weir/rpc/net/background.h>

namespace weir::node {

/// What is wrong with the access file of a configuration; empty: nothing, or there is none.
std::vector<ConfigError> unusable_access(const NodeConfig& config);

/// Has the access file in force, and another one when it changes: it is looked at every two
/// seconds. One that is no good leaves the former in force, with each mistake in the log, once. For
/// the main loop's thread.
class AccessControl {
 public:
  /// Reads the file. All outlive this; it is destroyed when `background` tells nobody anything any
  /// more.
  AccessControl(const NodeConfig& config, Access& access, Log& log, rpc::Background& background);

  /// Why there is nothing in force; empty: there is.
  const std::string& error() const { return error_; }
  /// Call each second or so.
  void look(Nanos wall);
  /// Reads it now, whether it changed or not.
  void reread();
  /// False: the file that is there was refused.
  bool current() const { return current_; }

 private:
  void read();
  void take(LoadedAccess loaded);

  const std::string file_;  // empty: none
  Access& access_;
  Log& log_;
  rpc::Background& background_;
  std::string error_;
  std::string told_;  // what was wrong with it
  internal::FileLook seen_{};
  Nanos looked_at_ = 0;
  bool current_ = true;
  bool busy_ = false;
};

/// Says of each address of a front that is not on loopback whether anonymous callers from elsewhere
/// may do something there, or whether nobody may.
void warn_of_listeners(const NodeConfig& config, const AccessTable& table, Log& log);

}  // namespace weir::node
