#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>

#include <weir/limits/limiter.h>
#include <weir/limits/limiter/program.h>
#include <weir/limits/request.h>

namespace weir {

/// Counts requests that no rule met, which pass: a domain that is misspelt limits nothing.
///
/// Thread-safe. Its mutex guards one name, is never waited for, and is the last of all locks.
class Unmet {
 public:
  void note(const Program& program, const Request& request);
  UnmetCounters counters() const;

 private:
  std::atomic<std::uint64_t> no_rule_{0};
  std::atomic<std::uint64_t> unknown_domain_{0};
  mutable std::mutex mutex_;
  std::string last_;  // domain that is not known
};

}  // namespace weir
