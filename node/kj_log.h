#pragma once

#include <kj/exception.h>

#include <ctime>

#include <weir/node/log_limit.h>

namespace weir::node {

/// While it lives, what KJ has to say on this thread are lines of the log: it says most of what
/// others' bytes made it think. On the stack, as KJ asks for.
class KjLog final : public kj::ExceptionCallback {
 public:
  explicit KjLog(LogLimit& log) : log_(log) {}

  void logMessage(kj::LogSeverity, const char* file, int line, int, kj::String&& text) override {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    log_.warn(static_cast<Nanos>(now.tv_sec) * kSecond + now.tv_nsec, "kj",
              {{"file", file}, {"line", line}, {"text", text.cStr()}});
  }

 private:
  LogLimit& log_;
};

}  // namespace weir::node
