#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string_view>
#include <utility>
#include <vector>

#include <weir/crdt/time.h>

namespace weir::rpc {

/// Where a TurnMeter reads the time; a test puts its own in their place.
struct TurnClocks {
  Nanos (*cpu)();     ///< processor time of the calling thread
  Nanos (*steady)();  ///< never runs backwards
};
/// Those of the system.
TurnClocks system_turn_clocks();

/// The longest time, of a kind of event, for which one had a loop's thread to itself.
struct LongestTurn {
  std::string_view what;
  Nanos lately = 0;  ///< processor time of the longest in the last minute, or two at most
  Nanos ever = 0;    ///< since the meter was made
};

/// How long a loop's thread is taken at once, and by what: whoever else waits for the loop waits
/// for so long.
///
/// An event is a callback of the loop under a Scope. It is measured in processor time, since what
/// other programs take from the thread is not the event's doing. An event may have steps, by
/// step() and by scopes within its own; it counts as a whole, under the name of its longest step.
/// Two names are the meter's own: kTurn, all that the loop did between two sleeps, and kOther, what
/// of that no scope was around.
///
/// Names are literals: they are kept as pointers, and there are few. An event costs two reads of
/// the processor clock, a turn one (about 0.3 us each), a step one of the steady clock (30 ns). Not
/// thread-safe: for the loop's own thread.
class TurnMeter {
 public:
  static constexpr std::string_view kTurn = "turn";
  static constexpr std::string_view kOther = "other";
  /// What is longer ago than two of these is not told as `lately`.
  static constexpr Nanos kSpan = kMinute;

  explicit TurnMeter(TurnClocks clocks = system_turn_clocks()) : clocks_(clocks) {}
  TurnMeter(const TurnMeter&) = delete;
  TurnMeter& operator=(const TurnMeter&) = delete;

  /// An event, or a step of the event around it. A null meter measures nothing.
  class Scope {
   public:
    Scope(TurnMeter* meter, std::string_view what) : meter_(meter) {
      if (meter_ != nullptr) before_ = meter_->begin(what);
    }
    ~Scope() {
      if (meter_ != nullptr) meter_->end(before_);
    }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
    /// It turned out to be another kind than was said.
    void rename(std::string_view what) {
      if (meter_ != nullptr) meter_->step_ = what;
    }

   private:
    TurnMeter* meter_;
    std::string_view before_;
  };

  /// What the event does from here on. Without an event: nothing.
  void step(std::string_view what);
  /// The loop is about to sleep. The first call only says where turns begin.
  void turn_ended();

  /// Every kind that there was, the longest of late first.
  std::vector<LongestTurn> longest() const;

 private:
  struct Kind {
    Nanos ever = 0;
    std::array<Nanos, 2> spans{};  // by the number of the span, odd and even
    std::int64_t span = -1;        // the newest that is in there
  };

  std::string_view begin(std::string_view what);
  void end(std::string_view before);
  void close_step();
  void record(std::string_view what, Nanos cpu, Nanos now);
  std::string_view longest_step() const;

  TurnClocks clocks_;
  std::map<std::string_view, Kind> kinds_;
  unsigned depth_ = 0;  // scopes that are open
  std::string_view step_;
  Nanos step_began_ = 0;                                  // steady
  std::vector<std::pair<std::string_view, Nanos>> done_;  // the event's steps but the last one
  Nanos event_began_ = 0;                                 // processor time
  Nanos in_events_ = 0;                                   // of this turn
  Nanos turn_began_ = -1;                                 // processor time; -1: no turn has
};

}  // namespace weir::rpc
