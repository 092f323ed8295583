#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include <weir/rpc/net/event_loop.h>

namespace weir::rpc {

/// Carries tasks from one loop's thread to another loop: those of a turn as one batch, so that the
/// other thread is woken once. For the thread of `from`. Both loops outlive it; tasks that the
/// other loop does not come to run are destroyed on its thread.
class Mailbox final : private Flushable {
 public:
  Mailbox(EventLoop& from, EventLoop& to) : from_(from), to_(to) {}
  ~Mailbox() {
    if (!batch_.empty()) from_.forget(*this);
  }
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;

  /// Runs `task` on the other loop, in order of sending.
  void send(std::function<void()> task) {
    if (batch_.empty()) from_.flush_later(*this);
    batch_.push_back(std::move(task));
  }

 private:
  void flush() noexcept override {
    auto batch = std::make_shared<std::vector<std::function<void()>>>();
    batch->swap(batch_);
    to_.post([batch] {
      for (std::function<void()>& task : *batch) std::exchange(task, nullptr)();
    });
  }

  EventLoop& from_;
  EventLoop& to_;
  std::vector<std::function<void()>> batch_;
};

}  // namespace weir::rpc
