#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace weir::bench {

/// A program in a process of its own, killed with its owner.
class Process {
 public:
  struct Options {
    std::vector<std::string> command;  ///< the program's path, then its arguments
    std::string directory;             ///< where it runs, made if missing; its output goes to `log`
    std::optional<int> cpu;            ///< the only processor that it may use
  };

  /// Starts it. Throws std::runtime_error if there can be no further process.
  explicit Process(Options options);
  ~Process();
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  /// Waits until 127.0.0.1:`port` takes connections; throws std::runtime_error, with the end of
  /// what the program wrote, if it ends before that or needs longer than that.
  void wait_for_port(std::uint16_t port, double patience_seconds = 10);
  /// Waits for its end, and returns its exit code; -1 if a signal ended it.
  int wait();
  pid_t pid() const { return pid_; }
  /// Processor time of all its threads so far, in its own code and in the kernel, ns.
  std::uint64_t cpu_ns() const;

 private:
  std::string log_end() const;

  Options options_;
  pid_t pid_ = -1;
};

/// utime + stime of a line of /proc/PID/stat, in clock ticks; nothing if it is no such line.
std::optional<std::uint64_t> ticks_of_stat(std::string_view line);

/// Ports on 127.0.0.1 that are free now, each another one.
std::vector<std::uint16_t> free_ports(std::size_t count);

/// The processors that this thread may use, in order.
std::vector<int> allowed_cpus();
/// Ties the calling thread, and what it starts from now on, to these.
void use_cpus(const std::vector<int>& cpus);

}  // namespace weir::bench
