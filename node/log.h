#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <mutex>
#include <string>
#include <string_view>
#include <type_traits>
#include <variant>

#include <weir/crdt/time.h>

namespace weir::node {

enum class LogLevel : std::uint8_t { debug, info, warn, error };
enum class LogFormat : std::uint8_t { json, text };

std::string_view to_string(LogLevel level);
std::string_view to_string(LogFormat format);

/// A field's value. Views only: it must outlive the call that logs it.
class LogValue {
 public:
  LogValue(std::string_view text) : value_(text) {}  // NOLINT: fields are written as literals
  LogValue(const char* text) : value_(std::string_view(text)) {}
  LogValue(const std::string& text) : value_(std::string_view(text)) {}
  LogValue(bool value) : value_(value) {}
  LogValue(double value) : value_(value) {}
  template <typename T>
  requires(std::is_integral_v<T> && !std::is_same_v<T, bool>) LogValue(T value) {
    if constexpr (std::is_signed_v<T>) {
      value_ = static_cast<std::int64_t>(value);
    } else {
      value_ = static_cast<std::uint64_t>(value);
    }
  }
  using Variant = std::variant<std::string_view, bool, std::int64_t, std::uint64_t, double>;
  const Variant& get() const { return value_; }

 private:
  Variant value_;
};

struct LogField {
  std::string_view key;
  LogValue value;
};

struct LogOptions {
  LogLevel level = LogLevel::info;
  LogFormat format = LogFormat::json;
  int fd = 2;                    ///< not owned
  std::function<Nanos()> clock;  ///< wall clock; the system's if empty
};

/// Structured logs, one line an event:
///   {"time":"2026-01-02T03:04:05.678Z","level":"info","event":"peer_up","peer":"eu-2"}
///   time=2026-01-02T03:04:05.678Z level=info event=peer_up peer=eu-2
/// Thread-safe. A line is put out by one write(2), so lines of several processes on one pipe do not
/// mix while they are below PIPE_BUF. Nothing throws: invalid UTF-8 is replaced, text is cut to
/// kMaxLogText, and what the descriptor does not take is dropped and counted.
class Log {
 public:
  explicit Log(LogOptions options = {});
  Log(const Log&) = delete;
  Log& operator=(const Log&) = delete;

  bool enabled(LogLevel level) const { return level >= level_; }

  /// `event` and the keys are identifiers such as "peer_up". A key that repeats time, level, event
  /// or an earlier key gets a trailing underscore.
  void write(LogLevel level, std::string_view event,
             std::initializer_list<LogField> fields = {}) noexcept;

  void debug(std::string_view event, std::initializer_list<LogField> fields = {}) noexcept {
    write(LogLevel::debug, event, fields);
  }
  void info(std::string_view event, std::initializer_list<LogField> fields = {}) noexcept {
    write(LogLevel::info, event, fields);
  }
  void warn(std::string_view event, std::initializer_list<LogField> fields = {}) noexcept {
    write(LogLevel::warn, event, fields);
  }
  void error(std::string_view event, std::initializer_list<LogField> fields = {}) noexcept {
    write(LogLevel::error, event, fields);
  }

  /// Lines that could not be written whole.
  std::uint64_t dropped() const { return dropped_.load(std::memory_order_relaxed); }

 private:
  std::string format_line(LogLevel level, std::string_view event,
                          std::initializer_list<LogField> fields) const;

  const LogLevel level_;
  const LogFormat format_;
  const int fd_;
  const std::function<Nanos()> clock_;
  std::mutex mutex_;
  std::atomic<std::uint64_t> dropped_{0};
};

/// Longest text value of a field, in bytes; what is cut is marked with "…".
inline constexpr std::size_t kMaxLogText = 2048;

/// "2026-01-02T03:04:05.678Z". Times outside [0, kMaxTime] are clamped.
std::string format_rfc3339(Nanos time);

}  // namespace weir::node
