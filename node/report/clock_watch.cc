#include <weir/node/report/clock_watch.h>

#include <algorithm>
#include <cstdlib>

#include <fmt/format.h>

namespace weir::node {
namespace {

constexpr Nanos kLevels[] = {100 * kMillisecond, kSecond};
/// A clock at the edge of a level is not logged again and again.
constexpr Nanos kLogAgain = kMinute;
constexpr Nanos kEarliest = 1'577'836'800 * kSecond;  // 2020-01-01
constexpr Nanos kLatest = 7'258'118'400 * kSecond;    // 2200-01-01

/// What of it is surely there.
Nanos at_least(const ClockWatch::Peer& peer) {
  return std::max<Nanos>(std::abs(*peer.ahead) - peer.error, 0);
}

std::string seconds(Nanos time) {
  return fmt::format("{:.3f} s", static_cast<double>(time) / 1e9);
}

}  // namespace

void ClockWatch::log_level(Nanos wall, const Peer& peer, Known& known) {
  const Nanos off = at_least(peer);
  int level = 0;
  for (const Nanos each : kLevels) level += off >= each ? 1 : 0;
  // Down only once it is well below.
  if (level < known.level && off >= kLevels[known.level - 1] / 5 * 4) return;
  if (level == known.level) return;
  const bool higher = level > known.level;
  known.level = level;
  // A time in the future is from before the own clock was set back.
  if (known.logged_at != 0 && known.logged_at <= wall && wall - known.logged_at < kLogAgain) return;
  known.logged_at = wall;
  if (!higher && level > 0) return;
  log_.warn(level > 0 ? "clock_skew" : "clock_skew_over",
            {{"peer", peer.name},
             {"ahead_ms", *peer.ahead / kMillisecond},
             {"max_skew_ms", max_skew_ / kMillisecond}});
}

void ClockWatch::look(Nanos wall, std::span<const Peer> peers, std::optional<Nanos> waits) {
  known_.resize(peers.size());
  std::size_t ahead = 0;
  std::size_t behind = 0;
  Nanos least = kNever;
  for (std::size_t i = 0; i < peers.size(); ++i) {
    if (!peers[i].ahead) continue;
    log_level(wall, peers[i], known_[i]);
    if (at_least(peers[i]) <= max_skew_) continue;
    least = std::min(least, std::abs(*peers[i].ahead));
    ++(*peers[i].ahead > 0 ? behind : ahead);
  }
  wrong_.clear();
  if (wall < kEarliest || wall >= kLatest) {
    wrong_ = fmt::format("the clock stands outside of the years 2020 to 2200: {} s since 1970",
                         wall / kSecond);
  } else if (waits) {
    wrong_ =
        fmt::format("the clock was set back again: time stands still here, and goes on by it in {}",
                    seconds(*waits));
  } else if (2 * (ahead + behind) > peers.size() + 1) {
    wrong_ = fmt::format(
        "the clock is {} or more off from {} of {} peers ({} of them behind it, {} ahead), more "
        "than "
        "max_skew ({})",
        seconds(least), ahead + behind, peers.size(), ahead, behind, seconds(max_skew_));
  }
}

}  // namespace weir::node
