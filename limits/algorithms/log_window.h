#pragma once

#include <cstdint>
#include <span>

#include <weir/crdt/epoch.h>
#include <weir/limits/algorithms/window.h>

namespace weir {

/// A sliding log: every admission is remembered with its instant, so the window is exact. A unit
/// admitted at t counts in [t, t + window). No window of that length, wherever it starts, holds
/// more than the limit.
///
/// An instant at which something was admitted is an ordinary window's cell, named by that instant:
/// it lives for one window, admissions at the same nanosecond share it, and the union of two logs
/// is the join of their cells.
struct LogEntry {
  Nanos time = 0;
  std::uint64_t count = 0;
};

/// What RuleSet::make allows a log, since it keeps a cell for every admission.
inline constexpr std::uint64_t kMaxLogLimit = 1024;
inline constexpr std::uint64_t kMaxLogRate = 4096;  ///< units a second

/// The cell of what is admitted at `now`.
crdt::Epoch log_epoch(Nanos window, Nanos now);

/// Units that count against the limit at `now`. Entries are sorted by time. One from the future (a
/// peer's clock is ahead) counts already: it shares windows with what is admitted now.
std::uint64_t log_used(std::span<const LogEntry> log, Nanos window, Nanos now);

/// Admits iff used + cost <= limit. Entries are sorted by time; the newest limit + 1 that are not 0
/// are enough, as they decide everything. retry_after is the instant at which enough of the oldest
/// have left.
Verdict evaluate_log(std::span<const LogEntry> log, Nanos window, std::uint64_t limit, Nanos now,
                     std::uint64_t cost);

}  // namespace weir
