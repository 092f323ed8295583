#pragma once

#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <weir/node/config.h>
#include <weir/node/control/certificates.h>
#include <weir/node/engine/engine.h>
#include <weir/node/fronts/front.h>
#include <weir/node/log_limit.h>
#include <weir/node/service/coordinator.h>
#include <weir/node/service/worker_service.h>
#include <weir/rpc/net/event_loop.h>

namespace weir::node {

/// A thread with an event loop, listeners and fronts of its own. It decides in place; only what
/// needs the main loop goes there. All members are for the main thread.
class Worker {
 public:
  /// What all workers share; outlives them.
  struct Shared {
    const NodeConfig& config;
    rpc::EventLoop& main_loop;
    Engine& engine;
    Coordinator& coordinator;
    CallerBudgets& budgets;
    const MainLoopAnswers& answers;
    std::function<Nanos()> wall;
    LogLimit& log;
    const Certificates& certificates;
    Access& access;
  };

  explicit Worker(const Shared& shared);
  /// Stops it. The main loop must run nothing afterwards that came from this worker.
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  /// Makes a front there and has it listen. Port 0 of `listen.address` is replaced by the port that
  /// it got, so that further workers listen there too. On failure false, with the reason.
  /// `among` is FrontContext::shared, of all workers.
  bool start_front(ListenConfig& listen, rpc::Sharing sharing, std::shared_ptr<void>& among,
                   std::string& error);
  /// Has all fronts drain, and waits for the worker's turn to do so: what it decides later sees all
  /// that was written before this call.
  void drain();
  /// Closes all fronts and ends the thread.
  void stop();

 private:
  struct Thread;
  void run(std::promise<void>& ready);

  const Shared& shared_;
  rpc::EventLoop* loop_ = nullptr;  // on the thread's stack
  Thread* state_ = nullptr;         // too
  std::thread thread_;
};

}  // namespace weir::node
