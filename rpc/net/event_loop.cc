#include <weir/rpc/net/event_loop.h>

#include <kj/debug.h>

#include <algorithm>
#include <utility>

namespace weir::rpc {
namespace {

/// Runs `body`; nothing may unwind through libuv's C frames.
template <typename Body>
void contained(const char* where, Body&& body) noexcept {
  try {
    body();
  } catch (const kj::Exception& e) {
    KJ_LOG(ERROR, "exception escaped", where, e);
  } catch (const std::exception& e) {
    KJ_LOG(ERROR, "exception escaped", where, e.what());
  } catch (...) {
    KJ_LOG(ERROR, "exception of unknown type escaped", where);
  }
}

void check(int code, const char* what) {
  if (code < 0) {
    kj::throwFatalException(KJ_EXCEPTION(FAILED, "libuv", what, uv_strerror(code)));
  }
}

template <typename T>
uv_handle_t* handle(T* h) {
  return reinterpret_cast<uv_handle_t*>(h);
}

template <typename T>
EventLoop& owner(T* h) {
  return *static_cast<EventLoop*>(h->data);
}

}  // namespace

EventLoop::EventLoop() : clock_(kj::systemPreciseMonotonicClock()), timer_(clock_.now()) {
  check(uv_loop_init(&uv_), "loop");
  if (int code = uv_async_init(&uv_, &async_, [](uv_async_t* h) { owner(h).run_posted(); });
      code < 0) {
    uv_loop_close(&uv_);
    check(code, "async");
  }
  // The others cannot fail: they only register with the loop.
  uv_prepare_init(&uv_, &prepare_);
  uv_check_init(&uv_, &check_);
  uv_idle_init(&uv_, &idle_);
  uv_timer_init(&uv_, &alarm_);
  async_.data = prepare_.data = check_.data = idle_.data = alarm_.data = this;
  uv_prepare_start(&prepare_, [](uv_prepare_t* h) { owner(h).before_sleep(); });
  uv_check_start(&check_, [](uv_check_t* h) { owner(h).after_sleep(); });
  kj_ = std::make_unique<kj::EventLoop>(static_cast<kj::EventPort&>(*this));
  scope_ = std::make_unique<kj::WaitScope>(*kj_);
}

EventLoop::~EventLoop() {
  {
    std::vector<std::function<void()>> unrun;
    {
      std::lock_guard lock(mutex_);
      unrun.swap(posted_);
    }
  }
  // Lets what was already queued (connections being retired) finish.
  contained("the loop's end", [&] { kj_->run(1u << 20); });
  scope_.reset();
  kj_.reset();
  for (uv_handle_t* h :
       {handle(&prepare_), handle(&check_), handle(&idle_), handle(&alarm_), handle(&async_)}) {
    uv_close(h, nullptr);
  }
  // Foreign handles that are still open would keep the loop alive for ever: give up after a while.
  int code = UV_EBUSY;
  for (int i = 0; i < 64 && code == UV_EBUSY; ++i) {
    uv_run(&uv_, UV_RUN_NOWAIT);
    code = uv_loop_close(&uv_);
  }
  if (code != 0) KJ_LOG(ERROR, "event loop destroyed with open handles");
}

void EventLoop::run() {
  in_uv_ = true;
  uv_run(&uv_, UV_RUN_DEFAULT);
  in_uv_ = false;
}

void EventLoop::stop() {
  post([this] { uv_stop(&uv_); });
}

void EventLoop::post(std::function<void()> task) {
  // Woken under the lock: once the task can run, it may end the loop, and the handle with it.
  std::lock_guard lock(mutex_);
  posted_.push_back(std::move(task));
  uv_async_send(&async_);
}

void EventLoop::run_posted() {
  std::vector<std::function<void()>> tasks;
  {
    std::lock_guard lock(mutex_);
    tasks.swap(posted_);
  }
  for (auto& task : tasks) {
    contained("a posted task", [&] {
      TurnMeter::Scope scope(meter_.get(), "posted");
      task();
      task = nullptr;
    });
  }
}

void EventLoop::forget(Flushable& flushable) {
  std::replace(dirty_.begin(), dirty_.end(), &flushable, static_cast<Flushable*>(nullptr));
}

bool EventLoop::wait() {
  KJ_REQUIRE(!in_uv_, "Promise::wait() from a callback of the loop");
  return turn_uv(UV_RUN_ONCE);
}

bool EventLoop::poll() {
  return in_uv_ ? woken_.exchange(false) : turn_uv(UV_RUN_NOWAIT);
}

// An active idle handle keeps libuv from sleeping.
void EventLoop::setRunnable(bool runnable) {
  if (runnable) {
    uv_idle_start(&idle_, [](uv_idle_t*) {});
  } else {
    uv_idle_stop(&idle_);
  }
}

void EventLoop::wake() const {
  woken_.store(true);
  uv_async_send(&async_);
}

bool EventLoop::turn_uv(uv_run_mode mode) {
  KJ_REQUIRE(!kj_waits_, "nested wait");
  kj_waits_ = true;
  KJ_DEFER(kj_waits_ = false);
  // KJ does not take its runnable state back before it waits; libuv would spin.
  bool idle = uv_is_active(handle(&idle_)) != 0;
  if (idle) uv_idle_stop(&idle_);
  uv_run(&uv_, mode);
  if (idle) setRunnable(true);
  return woken_.exchange(false);
}

/// False if there are more than fit into the time.
bool EventLoop::run_events() {
  constexpr unsigned kBetweenLooks = 4;  // at the clock
  const kj::TimePoint end = clock_.now() + kLongestRun;
  do {
    kj_->run(kBetweenLooks);
    if (!kj_->isRunnable()) return true;
  } while (clock_.now() < end);
  return false;
}

void EventLoop::pump() {
  if (!kj_waits_ && !run_was_long_) {
    bool was = std::exchange(in_uv_, true);
    contained("the event loop", [&] {
      if (woken_.load()) scope_->poll();  // only this serves events from other threads' executors
      run_was_long_ = !run_events();
    });
    in_uv_ = was;
  }
  flush_dirty();
}

void EventLoop::flush_dirty() {
  while (!dirty_.empty()) {
    // flush() may mark others, and forget() may clear entries of the list being walked.
    Flushable* next = dirty_.back();
    dirty_.pop_back();
    if (next != nullptr) next->flush();
  }
}

void EventLoop::before_sleep() {
  pump();
  run_was_long_ = false;
  KJ_IF_MAYBE (ms, timer_.timeoutToNextEvent(clock_.now(), kj::MILLISECONDS, 1u << 30)) {
    uv_update_time(&uv_);
    uv_timer_start(
        &alarm_, [](uv_timer_t*) {}, *ms, 0);
  } else {
    uv_timer_stop(&alarm_);
  }
  if (meter_) meter_->turn_ended();
}

void EventLoop::after_sleep() {
  contained("a timer", [&] { timer_.advanceTo(clock_.now()); });
  pump();
}

}  // namespace weir::rpc
