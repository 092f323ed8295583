#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include <weir/rpc/net/event_loop.h>

namespace weir::node {

/// Makes texts that would take the loop's thread for too long, one after the other, on a thread of
/// its own, which is there from the first one on. For the loop's thread.
class Background {
 public:
  /// The loop outlives it.
  explicit Background(rpc::EventLoop& loop) : loop_(loop) {}
  /// Waits for the text that is being made. What nobody was told by then is told nobody.
  ~Background();
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;

  /// `make` runs on the other thread, and must not throw; `done` on the loop's, in a later turn.
  /// Both are destroyed on the loop's thread, unless `make` is gone once it has run.
  void run(std::function<std::string()> make, std::function<void(std::string)> done);

 private:
  struct Job {
    std::function<std::string()> make;
    std::function<void(std::string)> done;
  };
  void work();

  rpc::EventLoop& loop_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> jobs_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace weir::node
