#include <weir/rpc/net/turn_meter.h>

#include <algorithm>
#include <ctime>

namespace weir::rpc {
namespace {

template <clockid_t kClock>
Nanos read_clock() {
  timespec now{};
  clock_gettime(kClock, &now);
  return static_cast<Nanos>(now.tv_sec) * kSecond + now.tv_nsec;
}

}  // namespace

TurnClocks system_turn_clocks() {
  return {read_clock<CLOCK_THREAD_CPUTIME_ID>, read_clock<CLOCK_MONOTONIC>};
}

std::string_view TurnMeter::begin(std::string_view what) {
  if (depth_++ > 0) {
    const std::string_view before = step_;
    step(what);
    return before;
  }
  step_ = what;
  step_began_ = clocks_.steady();
  event_began_ = clocks_.cpu();
  return what;
}

void TurnMeter::end(std::string_view before) {
  if (--depth_ > 0) return step(before);
  const Nanos cpu = clocks_.cpu() - event_began_;
  close_step();
  record(longest_step(), cpu, step_began_);
  done_.clear();
  in_events_ += cpu;
}

void TurnMeter::step(std::string_view what) {
  if (depth_ == 0) return;
  close_step();
  step_ = what;
}

void TurnMeter::close_step() {
  const Nanos now = clocks_.steady();
  const Nanos length = now - step_began_;
  step_began_ = now;
  auto same =
      std::find_if(done_.begin(), done_.end(), [&](const auto& one) { return one.first == step_; });
  if (same == done_.end()) {
    done_.emplace_back(step_, length);
  } else {
    same->second += length;
  }
}

std::string_view TurnMeter::longest_step() const {
  return std::max_element(done_.begin(), done_.end(),
                          [](const auto& a, const auto& b) { return a.second < b.second; })
      ->first;
}

void TurnMeter::turn_ended() {
  if (depth_ > 0) return;  // inside an event that waits: its end counts it
  const Nanos cpu = clocks_.cpu();
  if (turn_began_ >= 0) {
    const Nanos now = clocks_.steady();
    record(kTurn, cpu - turn_began_, now);
    record(kOther, std::max<Nanos>(0, cpu - turn_began_ - in_events_), now);
  }
  turn_began_ = cpu;
  in_events_ = 0;
}

void TurnMeter::record(std::string_view what, Nanos cpu, Nanos now) {
  Kind& kind = kinds_[what];
  const std::int64_t span = now / kSpan;
  if (span != kind.span) {
    if (span > kind.span + 1) kind.spans = {};
    kind.spans[static_cast<std::size_t>(span) % 2] = 0;
    kind.span = span;
  }
  Nanos& longest = kind.spans[static_cast<std::size_t>(span) % 2];
  longest = std::max(longest, cpu);
  kind.ever = std::max(kind.ever, cpu);
}

std::vector<LongestTurn> TurnMeter::longest() const {
  const std::int64_t span = clocks_.steady() / kSpan;
  std::vector<LongestTurn> out;
  for (const auto& [what, kind] : kinds_) {
    Nanos lately = 0;
    if (span <= kind.span + 1) lately = kind.spans[static_cast<std::size_t>(kind.span) % 2];
    if (span <= kind.span) lately = std::max(kind.spans[0], kind.spans[1]);
    out.push_back({what, lately, kind.ever});
  }
  std::stable_sort(out.begin(), out.end(),
                   [](const LongestTurn& a, const LongestTurn& b) { return a.lately > b.lately; });
  return out;
}

}  // namespace weir::rpc
