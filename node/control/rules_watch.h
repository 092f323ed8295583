#pragma once

#include <uv.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include <weir/limits/rules/rules_yaml.h>

namespace weir::node {

struct RulesWatchOptions {
  /// After the last sign of a change: whoever writes in place may not be done yet.
  std::uint64_t debounce_ms = 100;
  /// The file is looked at this often besides: not every change gives a sign (a symlink's target in
  /// another folder, a network file system).
  std::uint64_t poll_ms = 2000;
};

/// Reads the rules again when their file changes: written in place, replaced by a rename, or with a
/// symlink on its way swapped, as a mounted ConfigMap does. The folder is watched, not the file,
/// which may be gone for a moment. One that cannot be read is tried again at each poll, and told
/// again once the reason is another one.
///
/// Reading and checking run in libuv's pool, one at a time; everything else, `read` included, on
/// the loop's thread.
class RulesWatch {
 public:
  /// Told what was read after each change, valid or not, and after each reread().
  using Read = std::function<void(LoadedRules)>;

  /// `loop` outlives the watch and runs once more after its end.
  RulesWatch(uv_loop_t* loop, std::string path, RulesWatchOptions options, Read read);
  ~RulesWatch();
  RulesWatch(const RulesWatch&) = delete;
  RulesWatch& operator=(const RulesWatch&) = delete;

  /// Reads it whether it changed or not.
  void reread();

 private:
  struct Impl;
  Impl* impl_;  // goes when libuv has closed all of it
};

}  // namespace weir::node
