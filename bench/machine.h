#pragma once

#include <cstdint>

#include <weir/bench/histogram.h>

namespace weir::bench {

/// A counter that rises at a constant rate, cheap to read (about 10 ns): the processor's time stamp
/// where there is one, else the steady clock. Later instructions do not start before it is read.
std::uint64_t ticks();
/// What is written below in the program begins once everything above is done, loads and all.
inline void wait_for_what_came_before() {
#if defined(__x86_64__)
  __builtin_ia32_lfence();
#elif defined(__aarch64__)
  asm volatile("dsb ld\n isb" ::: "memory");
#else
#error "say how this processor is made to wait"
#endif
}
/// Nanoseconds of one tick; measured at the first call (20 ms).
double ns_per_tick();
/// Of the steady clock.
std::uint64_t steady_ns();
/// Processor time of this thread: what other programs take from it does not count.
std::uint64_t thread_cpu_ns();
/// How often this thread was made to give its processor to somebody else.
std::uint64_t preemptions();

/// Memory of this process that is resident, in bytes.
std::uint64_t resident_bytes();
/// Memory that this machine can still give, in bytes.
std::uint64_t available_bytes();

/// Ties this thread to the n-th processor that it may use, if there are so many. Two threads on one
/// processor would not contend.
void pin_to(int n);

/// Two pinned threads hand one cache line to and fro: ns for the way there and back, the least of
/// 25 short runs. Says what a contended key costs at the very least, and whether the machine is in
/// the same mood as in another run.
double ping_pong_ns();

/// Nothing, timed for `seconds` like a decision is: what the timer costs, and how often the machine
/// itself stands still.
Histogram idle_histogram(double seconds);

}  // namespace weir::bench
