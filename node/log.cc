#include <weir/node/log.h>

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <ctime>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <weir/limits/text/utf8.h>

namespace weir::node {
namespace {

using Json = nlohmann::ordered_json;

Nanos system_clock() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

std::string cut(std::string_view text) {
  if (text.size() <= kMaxLogText) return std::string(text);
  return std::string(internal::utf8_prefix(text, kMaxLogText)) + "…";
}

Json to_json(const LogValue& value) {
  return std::visit(
      [](const auto& v) -> Json {
        if constexpr (std::is_same_v<std::decay_t<decltype(v)>, std::string_view>) {
          return Json(cut(v));
        } else {
          return Json(v);
        }
      },
      value.get());
}

std::string dump(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

// A quoted logfmt value reads back like a JSON string.
std::string logfmt_text(const std::string& text) {
  const auto plain = [](char c) {
    return c > ' ' && c != '"' && c != '=' && c != '\\' && c != '\x7F' && (c & '\x80') == 0;
  };
  if (!text.empty() && std::all_of(text.begin(), text.end(), plain)) return text;
  return dump(Json(text));
}

std::string logfmt_key(std::string_view key) {
  std::string out(key.empty() ? "_" : key);
  for (char& c : out) {
    if (c <= ' ' || c == '"' || c == '=' || c == '\\' || c == '\x7F' || (c & '\x80') != 0) c = '_';
  }
  return out;
}

}  // namespace

std::string_view to_string(LogLevel level) {
  switch (level) {
    case LogLevel::debug:
      return "debug";
    case LogLevel::info:
      return "info";
    case LogLevel::warn:
      return "warn";
    case LogLevel::error:
      return "error";
  }
  return "error";
}

std::string_view to_string(LogFormat format) {
  return format == LogFormat::json ? "json" : "text";
}

std::string format_rfc3339(Nanos time) {
  time = std::clamp<Nanos>(time, 0, kMaxTime);
  const std::time_t seconds = time / kSecond;
  std::tm utc{};
  gmtime_r(&seconds, &utc);
  return fmt::format("{:04}-{:02}-{:02}T{:02}:{:02}:{:02}.{:03}Z", utc.tm_year + 1900,
                     utc.tm_mon + 1, utc.tm_mday, utc.tm_hour, utc.tm_min, utc.tm_sec,
                     time % kSecond / kMillisecond);
}

Log::Log(LogOptions options)
    : level_(options.level),
      format_(options.format),
      fd_(options.fd),
      clock_(options.clock ? std::move(options.clock) : system_clock) {}

std::string Log::format_line(LogLevel level, std::string_view event,
                             std::initializer_list<LogField> fields) const {
  Json line = Json::object();
  line["time"] = format_rfc3339(clock_());
  line["level"] = to_string(level);
  line["event"] = cut(event);
  for (const LogField& field : fields) {
    std::string key(field.key);
    while (line.contains(key)) key += '_';
    line[key] = to_json(field.value);
  }
  if (format_ == LogFormat::json) return dump(line) + "\n";

  std::string out;
  for (const auto& [key, value] : line.items()) {
    if (!out.empty()) out += ' ';
    out += logfmt_key(key);
    out += '=';
    out += value.is_string() ? logfmt_text(value.get_ref<const std::string&>()) : dump(value);
  }
  return out + "\n";
}

void Log::write(LogLevel level, std::string_view event,
                std::initializer_list<LogField> fields) noexcept {
  if (!enabled(level)) return;
  try {
    const std::string line = format_line(level, event, fields);
    const std::lock_guard lock(mutex_);
    ssize_t written = 0;
    do {
      written = ::write(fd_, line.data(), line.size());
    } while (written < 0 && errno == EINTR);
    if (written != static_cast<ssize_t>(line.size())) dropped_.fetch_add(1);
  } catch (...) {
    dropped_.fetch_add(1);
  }
}

}  // namespace weir::node
