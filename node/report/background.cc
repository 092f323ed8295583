#include <weir/node/report/background.h>

#include <utility>

namespace weir::node {

Background::~Background() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_one();
  if (thread_.joinable()) thread_.join();
}

void Background::run(std::function<std::string()> make, std::function<void(std::string)> done) {
  if (!thread_.joinable()) thread_ = std::thread([this] { work(); });
  {
    std::lock_guard lock(mutex_);
    jobs_.push_back({std::move(make), std::move(done)});
  }
  changed_.notify_one();
}

void Background::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stopping_ || !jobs_.empty(); });
    if (stopping_) return;
    Job job = std::move(jobs_.front());
    jobs_.pop_front();
    lock.unlock();
    std::string text = job.make();
    job.make = nullptr;
    loop_.post(
        [done = std::move(job.done), text = std::move(text)]() mutable { done(std::move(text)); });
    lock.lock();
  }
}

}  // namespace weir::node
