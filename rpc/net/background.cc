#include <weir/rpc/net/background.h>

#include <utility>

namespace weir::rpc {

Background::~Background() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_one();
  if (thread_.joinable()) thread_.join();
}

void Background::run(std::function<void()> work, std::function<void()> done) {
  if (!thread_.joinable()) thread_ = std::thread([this] { serve(); });
  {
    std::lock_guard lock(mutex_);
    jobs_.push_back({std::move(work), std::move(done)});
  }
  changed_.notify_one();
}

void Background::serve() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stopping_ || !jobs_.empty(); });
    if (stopping_) return;
    Job job = std::move(jobs_.front());
    jobs_.pop_front();
    lock.unlock();
    job.work();
    job.work = nullptr;
    loop_.post(std::move(job.done));
    lock.lock();
  }
}

}  // namespace weir::rpc
