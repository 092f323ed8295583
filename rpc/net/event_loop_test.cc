#include <weir/rpc/net/event_loop.h>

#include <gtest/gtest.h>
#include <kj/exception.h>
#include <kj/vector.h>

#include <atomic>
#include <chrono>
#include <ctime>
#include <stdexcept>
#include <thread>

#include <weir/rpc/net/test_util.h>

namespace weir::rpc {
namespace {

double cpu_ms() {
  timespec t;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) * 1e3 + static_cast<double>(t.tv_nsec) / 1e6;
}

/// Runs the loop in libuv's own way until the promise resolves.
void run_until(EventLoop& loop, kj::Promise<void> promise) {
  auto stopping = promise.then([&] { loop.stop(); }).eagerlyEvaluate(nullptr);
  loop.run();
}

TEST(EventLoop, TimersFireInOrderAndNotEarly) {
  // A delay counts from the loop's last turn, which is its beginning here.
  auto start = std::chrono::steady_clock::now();
  EventLoop loop;
  std::vector<int> fired;
  auto late = loop.timer().afterDelay(30 * kj::MILLISECONDS).then([&] { fired.push_back(2); });
  auto soon = loop.timer().afterDelay(10 * kj::MILLISECONDS).then([&] { fired.push_back(1); });
  auto both =
      kj::joinPromises(kj::arr(late.eagerlyEvaluate(nullptr), soon.eagerlyEvaluate(nullptr)));
  run_until(loop, kj::mv(both));
  EXPECT_EQ(fired, (std::vector<int>{1, 2}));
  EXPECT_GE(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(29));
}

TEST(EventLoop, WaitTurnsTheLoop) {
  EventLoop loop;
  int ticks = 0;
  uv_timer_t timer;
  uv_timer_init(loop.uv(), &timer);
  timer.data = &ticks;
  uv_timer_start(
      &timer, [](uv_timer_t* h) { ++*static_cast<int*>(h->data); }, 1, 1);
  loop.timer().afterDelay(20 * kj::MILLISECONDS).wait(loop.wait_scope());
  EXPECT_GT(ticks, 0);
  uv_close(reinterpret_cast<uv_handle_t*>(&timer), nullptr);
  uv_run(loop.uv(), UV_RUN_NOWAIT);
}

TEST(EventLoop, PostWakesASleepingLoopFromAnotherThread) {
  EventLoop loop;
  std::thread::id ran_on;
  std::thread other([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    loop.post([&] {
      ran_on = std::this_thread::get_id();
      loop.stop();
    });
  });
  loop.run();
  other.join();
  EXPECT_EQ(ran_on, std::this_thread::get_id());
}

TEST(EventLoop, PostsOfOneThreadRunInOrder) {
  EventLoop loop;
  std::vector<int> order;
  std::thread other([&] {
    for (int i = 0; i < 1000; ++i) loop.post([&order, i] { order.push_back(i); });
    loop.stop();
  });
  loop.run();
  other.join();
  ASSERT_EQ(order.size(), 1000u);
  for (int i = 0; i < 1000; ++i) EXPECT_EQ(order[static_cast<std::size_t>(i)], i);
}

TEST(EventLoop, StopBeforeRunReturnsAtOnce) {
  EventLoop loop;
  loop.stop();
  loop.run();
}

TEST(EventLoop, UnrunTasksAreDestroyed) {
  auto token = std::make_shared<int>(0);
  {
    EventLoop loop;
    loop.post([token] { ++*token; });
    EXPECT_EQ(token.use_count(), 2);
  }
  EXPECT_EQ(token.use_count(), 1);
  EXPECT_EQ(*token, 0);
}

TEST(EventLoop, SleepsWhenIdle) {
  EventLoop loop;
  run_until(loop, loop.timer().afterDelay(10 * kj::MILLISECONDS));  // warm
  double before = cpu_ms();
  run_until(loop, loop.timer().afterDelay(300 * kj::MILLISECONDS));
  EXPECT_LT(cpu_ms() - before, 100.0);
  // KJ stays "runnable" throughout a wait() in which any event ran.
  before = cpu_ms();
  kj::evalLater([&] {
    return loop.timer().afterDelay(300 * kj::MILLISECONDS);
  }).wait(loop.wait_scope());
  EXPECT_LT(cpu_ms() - before, 100.0);
}

TEST(EventLoop, BusyPromisesDoNotStarveLibuv) {
  EventLoop loop;
  bool done = false;
  std::function<kj::Promise<void>()> spin = [&]() -> kj::Promise<void> {
    if (done) return kj::READY_NOW;
    return kj::evalLater([&] { return spin(); });
  };
  auto spinning = spin().eagerlyEvaluate(nullptr);
  uv_timer_t timer;
  uv_timer_init(loop.uv(), &timer);
  timer.data = &done;
  uv_timer_start(
      &timer, [](uv_timer_t* h) { *static_cast<bool*>(h->data) = true; }, 5, 0);
  run_until(loop, kj::mv(spinning));
  EXPECT_TRUE(done);
  uv_close(reinterpret_cast<uv_handle_t*>(&timer), nullptr);
  uv_run(loop.uv(), UV_RUN_NOWAIT);
}

TEST(EventLoop, LongEventsLeaveTurnsToLibuv) {
  EventLoop loop;
  int turns = 0;
  uv_check_t check;
  uv_check_init(loop.uv(), &check);
  check.data = &turns;
  uv_check_start(&check, [](uv_check_t* h) { ++*static_cast<int*>(h->data); });
  const auto long_event = [] {
    auto from = std::chrono::steady_clock::now();
    while (std::chrono::steady_clock::now() - from < std::chrono::milliseconds(1)) {
    }
  };
  kj::Vector<kj::Promise<void>> events;
  for (int i = 0; i < 40; ++i) events.add(kj::evalLater(long_event).eagerlyEvaluate(nullptr));
  run_until(loop, kj::joinPromises(events.releaseAsArray()));
  // Two or four of them fit into one.
  EXPECT_GE(turns, 8);
  uv_close(reinterpret_cast<uv_handle_t*>(&check), nullptr);
  uv_run(loop.uv(), UV_RUN_NOWAIT);
}

TEST(EventLoop, ExceptionsOfTasksStayInside) {
  test::KjLog log;
  EventLoop loop;
  bool after = false;
  loop.post([] { throw std::runtime_error("from a task"); });
  loop.post([] { throw 7; });
  loop.post([&] { after = true; });
  loop.stop();
  loop.run();
  EXPECT_TRUE(after);
  ASSERT_EQ(log.errors.size(), 2u);
  EXPECT_NE(log.errors[0].find("from a task"), std::string::npos);
}

// KJ's libraries are not built for ThreadSanitizer, which does not see that their locks order this.
#ifndef __SANITIZE_THREAD__
TEST(EventLoop, KjExecutorsReachTheLoop) {
  EventLoop loop;
  std::atomic<bool> ran{false};
  const kj::Executor& executor = kj::getCurrentThreadExecutor();
  std::thread other([&] {
    executor.executeSync([&] { ran = true; });
    loop.stop();
  });
  loop.run();
  other.join();
  EXPECT_TRUE(ran);
}
#endif

TEST(EventLoop, WaitFromACallbackIsRefused) {
  test::KjLog log;
  EventLoop loop;
  loop.post([&] { loop.timer().afterDelay(1 * kj::MILLISECONDS).wait(loop.wait_scope()); });
  loop.stop();
  loop.run();
  EXPECT_EQ(log.errors.size(), 1u);
}

struct Counter final : Flushable {
  int flushed = 0;
  void flush() noexcept override { ++flushed; }
};

TEST(EventLoop, FlushesBeforeItSleepsAndForgets) {
  EventLoop loop;
  Counter kept;
  Counter gone;
  loop.flush_later(kept);
  loop.flush_later(gone);
  loop.forget(gone);
  test::turn(loop, 1);
  EXPECT_EQ(kept.flushed, 1);
  EXPECT_EQ(gone.flushed, 0);
}

}  // namespace
}  // namespace weir::rpc
