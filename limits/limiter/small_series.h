#pragma once

// Series in their small forms, which an entry of the table holds by itself: what evaluate_window
// and evaluate_bucket say of them and what a cost changes in them, at a fraction of the time. The
// entry's lock is held.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>

#include <weir/crdt/cell.h>
#include <weir/limits/algorithms/bucket.h>
#include <weir/limits/algorithms/window.h>
#include <weir/limits/limiter/program.h>
#include <weir/limits/limiter/rule_numbers.h>
#include <weir/limits/series/series.h>
#include <weir/limits/series/series_table.h>

namespace weir {

inline constexpr std::uint64_t kMaxSmall = std::numeric_limits<std::uint32_t>::max();
/// Form::bucket, where nothing is replicated: the checkpoint counts all, be it this much.
inline constexpr std::uint32_t kSmallTotal = 1;
/// Units and ticks in a BucketRecord are at most this, so that no sum of two overflows.
inline constexpr std::uint64_t kMaxInRecord = std::numeric_limits<std::int64_t>::max();

/// The window of a series that an instant lies in.
struct WindowAt {
  WindowShape shape;
  std::int64_t index = 0;
  Nanos start = 0;
  crdt::Epoch epoch() const { return shape.epoch(index); }
};

/// Of rules that have windows.
[[gnu::always_inline]] inline WindowAt window_at(const CompiledRule& compiled, const SeriesId& id,
                                                 Nanos now) {
  WindowAt window;
  window.shape = compiled.spread ? window_shape(*compiled.rule, id) : compiled.window;
  if (window.shape.calendar != nullptr) {
    window.index = window.shape.index(now);
  } else {
    auto time = static_cast<std::uint64_t>(now + window.shape.phase);
    window.index = static_cast<std::int64_t>(compiled.sub.floor(time));
  }
  window.start = window.shape.start(window.index);
  return window;
}

// Form::bucket.

/// Its debt is in this rule's ticks.
inline bool is_compact(const CompiledRule& compiled, const SeriesEntry& entry) {
  return entry.form() == Form::bucket && entry.bucket.number == compiled.number;
}

/// Says whether a cost passes; the rest of the verdict is finish_compact()'s.
[[gnu::always_inline]] inline Owed assess_compact(const CompiledRule& compiled,
                                                  const SeriesEntry& entry, std::uint64_t cost,
                                                  Nanos now, Verdict& verdict) {
  Owed owed{compiled.compact.debt(entry, now), std::max<Nanos>(entry.time - now, 0)};
  bool room = owed.debt <= compiled.compact.capacity;
  verdict.remaining = room ? compiled.compact.unit.floor(compiled.compact.capacity - owed.debt) : 0;
  verdict.allowed = room && cost <= verdict.remaining;
  verdict.exhausted_locally = false;
  return owed;
}

[[gnu::always_inline]] inline Nanos until_drained(const CompactBucket& compact, Owed owed,
                                                  std::uint64_t part) {
  if (part == 0) return 0;
  Nanos wait = compact.drain_time(part);
  return wait == kNever ? kNever : wait + owed.ahead;
}

/// What assess_compact() left out. `reset` is from after the cost was consumed, if it was.
[[gnu::always_inline]] inline void finish_compact(const CompiledRule& compiled, Owed owed,
                                                  std::uint64_t cost, bool consumed,
                                                  Verdict& verdict) {
  const CompactBucket& compact = compiled.compact;
  std::uint64_t debt = owed.debt;
  if (consumed) debt += cost * compact.unit.value();
  verdict.reset = until_drained(compact, owed, debt);
  verdict.retry_after = verdict.delay = 0;
  if (!verdict.allowed) [[unlikely]] {
    debt -= compact.capacity - cost * compact.unit.value();
    verdict.retry_after = cost > compiled.limit ? kNever : until_drained(compact, owed, debt);
  } else if (compiled.bucket.queue) [[unlikely]] {
    verdict.delay = until_drained(compact, owed, owed.debt);
  }
}

[[gnu::always_inline]] inline void consume_compact(const CompiledRule& compiled, SeriesEntry& entry,
                                                   Owed owed, std::uint64_t cost, Nanos now) {
  entry.bucket.debt = owed.debt + cost * compiled.compact.unit.value();
  entry.time = now + owed.ahead;
}

/// What was consumed of a series that had no form yet: `units`, at most the limit and what may be
/// owed beyond it.
void begin_compact(const CompiledRule& compiled, SeriesEntry& entry, std::uint64_t units,
                   Nanos now);

// Form::window.

/// What evaluate_window says where no window is newer than the current one. False: ask it.
[[gnu::always_inline]] inline bool assess_small_windows(const CompiledRule& compiled,
                                                        const SeriesEntry& entry,
                                                        std::uint64_t cost, Nanos now,
                                                        const WindowAt& window, Verdict& verdict) {
  const WindowShape& shape = window.shape;
  std::uint64_t newest = std::uint64_t{entry.count[0]} + entry.count[1];
  std::uint64_t before = std::uint64_t{entry.count[2]} + entry.count[3];
  if (entry.time < window.start) {
    before = entry.time == window.start - shape.sub ? newest : 0;
    newest = 0;
  }
  if (shape.previous == 0) before = 0;
  Nanos left = window.start + shape.sub - now;
  std::uint64_t used = newest;
  if (before > 0) {
    Uint128 weighted = static_cast<Uint128>(before) * static_cast<std::uint64_t>(left);
    used += weighted >> 64 == 0 ? compiled.sub.ceil(static_cast<std::uint64_t>(weighted))
                                : static_cast<std::uint64_t>((weighted + compiled.sub.value() - 1) /
                                                             compiled.sub.value());
  }
  verdict.remaining = compiled.limit - std::min(compiled.limit, used);
  verdict.allowed = used <= compiled.limit && cost <= verdict.remaining;
  // When a weighted window lets this cost pass is for evaluate_window to say.
  if (!verdict.allowed && shape.previous > 0) return false;
  verdict.reset = newest > 0 ? left + shape.sub * shape.previous : before > 0 ? left : 0;
  verdict.delay = 0;
  verdict.retry_after = 0;
  verdict.exhausted_locally = false;
  if (verdict.allowed) return true;
  verdict.retry_after = cost > compiled.limit ? kNever : left;
  return true;
}

/// Once a cost was consumed in `window`; `before` is Verdict::reset from before. Plain windows.
[[gnu::always_inline]] inline Nanos reset_of_windows(const WindowAt& window, Nanos before,
                                                     Nanos now) {
  return std::max(before,
                  window.start + window.shape.sub * (Nanos{window.shape.previous} + 1) - now);
}

/// A cost goes into the newest window, and the entry stays as it is otherwise.
[[gnu::always_inline]] inline bool fits_in_window(const SeriesEntry& entry, std::uint64_t cost,
                                                  Nanos start) {
  return entry.time == start && cost <= kMaxSmall - entry.count[0];
}

std::uint64_t small_count(const SeriesEntry& entry, const WindowShape& shape, std::int64_t index);

/// Counts a cost if the entry can hold it, one without a form too. With `replicated` it is marked
/// as not drained.
bool consume_small_window(const CompiledRule& compiled, SeriesEntry& entry, const WindowAt& window,
                          std::uint64_t cost, bool replicated);

/// Gives an entry without a form `used` units of a series that was counted elsewhere until now.
/// False if no small form can hold them.
bool begin_small(const CompiledRule& compiled, SeriesEntry& entry, const WindowAt& window,
                 std::uint64_t used, Nanos now);

/// The same windows in their general form. `kept` is what the entry's number stands for.
std::unique_ptr<Series> to_general(const SeriesEntry& entry, const SeriesId& id,
                                   const RuleNumbers::Kept& kept);

/// No decision at `floor` or later would see a difference if the windows were forgotten.
bool are_windows_over(const SeriesEntry& entry, const RuleNumbers::Kept& kept, Nanos floor);

}  // namespace weir
