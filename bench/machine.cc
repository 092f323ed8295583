#include <weir/bench/machine.h>

#include <pthread.h>
#include <sched.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <fstream>
#include <string>
#include <thread>

#ifdef __x86_64__
#include <x86intrin.h>
#endif

namespace weir::bench {

std::uint64_t steady_ns() {
  return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                        std::chrono::steady_clock::now().time_since_epoch())
                                        .count());
}

std::uint64_t thread_cpu_ns() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<std::uint64_t>(time.tv_sec) * 1'000'000'000 +
         static_cast<std::uint64_t>(time.tv_nsec);
}

std::uint64_t preemptions() {
  rusage usage{};
  getrusage(RUSAGE_THREAD, &usage);
  return static_cast<std::uint64_t>(usage.ru_nivcsw);
}

std::uint64_t ticks() {
#ifdef __x86_64__
  unsigned core = 0;
  std::uint64_t now = __rdtscp(&core);
  _mm_lfence();
  return now;
#else
  return steady_ns();
#endif
}

double ns_per_tick() {
  static const double rate = [] {
    std::uint64_t from = steady_ns();
    std::uint64_t first = ticks();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    std::uint64_t to = steady_ns();
    return static_cast<double>(to - from) / static_cast<double>(ticks() - first);
  }();
  return rate;
}

std::uint64_t resident_bytes() {
  std::ifstream in("/proc/self/statm");
  std::uint64_t size = 0;
  std::uint64_t resident = 0;
  in >> size >> resident;
  return resident * static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
}

std::uint64_t available_bytes() {
  std::ifstream in("/proc/meminfo");
  for (std::string name; in >> name;) {
    std::uint64_t kib = 0;
    if (name == "MemAvailable:" && in >> kib) return kib << 10;
    in.ignore(256, '\n');
  }
  return 0;
}

void pin_to(int n) {
  cpu_set_t allowed;
  if (pthread_getaffinity_np(pthread_self(), sizeof allowed, &allowed) != 0) return;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &allowed) || n-- > 0) continue;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    pthread_setaffinity_np(pthread_self(), sizeof one, &one);
    return;
  }
}

double ping_pong_ns() {
  constexpr std::uint64_t kRounds = 2000;
  std::uint64_t least = ~std::uint64_t{0};
  for (int run = 0; run < 25; ++run) {
    alignas(64) std::atomic<std::uint64_t> ball{0};
    auto play = [&ball](int side) {
      pin_to(side);
      auto mine = static_cast<std::uint64_t>(side);
      std::uint64_t from = 0;
      for (std::uint64_t i = 0; i <= kRounds; ++i) {
        while (ball.load(std::memory_order_acquire) != 2 * i + mine) {
        }
        ball.store(2 * i + mine + 1, std::memory_order_release);
        if (i == 0) from = steady_ns();  // the other one is there
      }
      return steady_ns() - from;
    };
    std::thread other([&play] { play(1); });
    std::thread timed([&] { least = std::min(least, play(0)); });
    other.join();
    timed.join();
  }
  return static_cast<double>(least) / kRounds;
}

Histogram idle_histogram(double seconds) {
  Histogram out;
  double rate = ns_per_tick();
  auto span = static_cast<std::uint64_t>(seconds * 1e9 / rate);
  std::uint64_t from = ticks();
  for (std::uint64_t last = from; last - from < span;) {
    std::uint64_t now = ticks();
    out.record(static_cast<std::uint64_t>(static_cast<double>(now - last) * rate));
    last = now;
  }
  return out;
}

}  // namespace weir::bench
