#include <weir/node/log_limit.h>

#include <algorithm>
#include <utility>

namespace weir::node {

void LogLimit::warn(Nanos now, std::string_view event,
                    std::initializer_list<LogField> fields) noexcept {
  try {
    const std::lock_guard lock(mutex_);
    auto found = events_.find(event);
    if (found == events_.end()) {
      found = events_.emplace(std::string(event), Event{.at = now}).first;
    }
    Event& known = found->second;
    const auto passed = static_cast<double>(std::max<Nanos>(now - std::exchange(known.at, now), 0));
    known.tokens = std::min<double>(kBurst, known.tokens + passed / static_cast<double>(kEach));
    if (known.tokens < 1) {
      ++known.left_out;
      return;
    }
    known.tokens -= 1;
  } catch (...) {
    return;  // no memory for the books: better no line than one of many
  }
  log_.warn(event, fields);
}

void LogLimit::tell(Nanos now) noexcept {
  const std::lock_guard lock(mutex_);
  if (now - told_at_ < kEach) return;
  for (auto& [event, known] : events_) {
    if (known.left_out == 0) continue;
    told_at_ = now;
    log_.warn("log_lines_left_out", {{"of", event}, {"lines", std::exchange(known.left_out, 0)}});
  }
}

}  // namespace weir::node
