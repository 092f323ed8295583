#include <weir/node/worker.h>

#include <utility>

#include <weir/node/fronts/factory.h>
#include <weir/node/kj_log.h>
#include <weir/rpc/net/address.h>

namespace weir::node {

/// What lives on the worker's own thread.
struct Worker::Thread {
  Thread(rpc::EventLoop& loop, const Shared& shared)
      : service(loop, shared.main_loop, shared.engine, shared.coordinator, shared.budgets,
                shared.answers, shared.wall) {}
  WorkerService service;
  std::vector<std::unique_ptr<Front>> fronts;
};

Worker::Worker(const Shared& shared) : shared_(shared) {
  std::promise<void> ready;
  std::future<void> started = ready.get_future();
  thread_ = std::thread([this, &ready] { run(ready); });
  try {
    started.get();
  } catch (...) {
    thread_.join();
    throw;
  }
}

Worker::~Worker() {
  stop();
}

void Worker::run(std::promise<void>& ready) {
  bool reported = false;
  try {
    const KjLog kj_log(shared_.log);
    rpc::EventLoop loop;
    Thread state(loop, shared_);
    loop_ = &loop;
    state_ = &state;
    reported = true;
    ready.set_value();
    loop.run();
    state.fronts.clear();
  } catch (...) {
    if (!reported) ready.set_exception(std::current_exception());
  }
}

bool Worker::start_front(ListenConfig& listen, rpc::Sharing sharing, std::shared_ptr<void>& among,
                         std::string& error) {
  std::promise<bool> result;
  std::future<bool> started = result.get_future();
  loop_->post([&] {
    auto front =
        make_front(listen.front, {*loop_, shared_.config, &state_->service, nullptr, shared_.wall,
                                  among, shared_.certificates.of(listen.front), &shared_.access});
    const bool listens = front->start(listen.address, sharing, error);
    if (listens) {
      listen.address = rpc::with_port(listen.address, front->port());
      state_->fronts.push_back(std::move(front));
    }
    result.set_value(listens);
  });
  return started.get();
}

void Worker::drain() {
  std::promise<void> drained;
  loop_->post([&] {
    for (const auto& front : state_->fronts) front->drain();
    drained.set_value();
  });
  drained.get_future().wait();
}

void Worker::stop() {
  if (!thread_.joinable()) return;
  loop_->post([this] {
    for (const auto& front : state_->fronts) front->stop();
  });
  loop_->stop();
  thread_.join();
}

}  // namespace weir::node
