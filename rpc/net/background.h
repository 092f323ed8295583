#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include <weir/rpc/net/event_loop.h>

namespace weir::rpc {

/// Does what would take a loop's thread for too long, one thing after the other, on a thread of its
/// own, which is there from the first one on. For the loop's thread.
class Background {
 public:
  /// The loop outlives it.
  explicit Background(EventLoop& loop) : loop_(loop) {}
  /// Waits for what is being worked on. Nobody is told of what was not told by then.
  ~Background();
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;

  /// `work` runs on the other thread, and must not throw; then `done` on the loop's, in a later
  /// turn, in the order of calls. Work that has run is destroyed there, all else on the loop's
  /// thread.
  void run(std::function<void()> work, std::function<void()> done);

 private:
  struct Job {
    std::function<void()> work;
    std::function<void()> done;
  };
  void serve();

  EventLoop& loop_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> jobs_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace weir::rpc
