#pragma once

#include <kj/async.h>
#include <kj/timer.h>
#include <uv.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include <weir/rpc/net/turn_meter.h>

namespace weir::rpc {

/// Something with output to write at the end of the loop's turn.
class Flushable {
 public:
  virtual void flush() noexcept = 0;

 protected:
  ~Flushable() = default;
};

/// KJ's event loop and a libuv loop, turning together in the thread that made it. Handles of other
/// libraries may live on uv() beside it; they must be closed before the loop is destroyed.
///
/// All members are for the loop's own thread, except post() and stop(). At most one EventLoop per
/// thread.
class EventLoop final : private kj::EventPort {
 public:
  EventLoop();
  ~EventLoop();
  EventLoop(const EventLoop&) = delete;
  EventLoop& operator=(const EventLoop&) = delete;

  /// Turns until stop(). No exception leaves it: what escapes a callback is logged.
  void run();
  /// Makes run() return after its turn. Any thread; also before run().
  void stop();
  /// Runs `task` on the loop's thread, in order of posting. Any thread. Tasks that have not run
  /// when the loop is destroyed are destroyed unrun.
  void post(std::function<void()> task);

  uv_loop_t* uv() { return &uv_; }
  kj::Timer& timer() { return timer_; }
  /// For Promise::wait() outside of run(): it turns the libuv loop too.
  kj::WaitScope& wait_scope() { return *scope_; }

  /// Calls `flushable.flush()` once, before the loop next sleeps. A flushable that goes away before
  /// that must call forget().
  void flush_later(Flushable& flushable) { dirty_.push_back(&flushable); }
  void forget(Flushable& flushable);

  /// Measures from now on what the thread does (turn_meter.h); posted tasks are events, "posted".
  void measure_turns() { meter_ = std::make_unique<TurnMeter>(); }
  /// Null: nothing is measured.
  TurnMeter* meter() { return meter_.get(); }

  /// KJ events run for so long, and until the one that has begun ends, before libuv gets its turn
  /// again: so neither starves the other, and who waits for the loop waits no longer than that.
  static constexpr kj::Duration kLongestRun = 2 * kj::MILLISECONDS;

 private:
  bool wait() override;
  bool poll() override;
  void setRunnable(bool runnable) override;
  void wake() const override;

  bool turn_uv(uv_run_mode mode);
  void run_posted();
  bool run_events();
  void pump();
  void flush_dirty();
  void before_sleep();
  void after_sleep();

  uv_loop_t uv_;
  uv_prepare_t prepare_;
  uv_check_t check_;
  uv_idle_t idle_;
  uv_timer_t alarm_;
  mutable uv_async_t async_;

  const kj::MonotonicClock& clock_;
  kj::TimerImpl timer_;
  mutable std::atomic<bool> woken_{false};
  bool kj_waits_ = false;  // a Promise::wait() is on the stack: KJ must not be turned from inside
  bool in_uv_ = false;
  bool run_was_long_ = false;  // in this turn of libuv
  std::vector<Flushable*> dirty_;
  std::unique_ptr<TurnMeter> meter_;

  std::mutex mutex_;
  std::vector<std::function<void()>> posted_;

  std::unique_ptr<kj::EventLoop> kj_;
  std::unique_ptr<kj::WaitScope> scope_;
};

}  // namespace weir::rpc
