#include <weir/limits/limiter/small_series.h>

namespace weir {
namespace {

/// Moves on to the window `index`, the next or a later one. False if undrained units would go.
bool roll(SeriesEntry& entry, const WindowShape& shape, std::int64_t index) {
  bool next = index == shape.index(entry.time) + 1;
  bool dirty = entry.has(SeriesEntry::kDirty);
  if (entry.has(SeriesEntry::kDirtyBefore) || (dirty && !next)) return false;
  entry.count[2] = next ? entry.count[0] : 0;
  entry.count[3] = next ? entry.count[1] : 0;
  entry.count[0] = entry.count[1] = 0;
  entry.set(SeriesEntry::kDirtyBefore, dirty);
  entry.set(SeriesEntry::kDirty, false);
  entry.time = shape.start(index);
  return true;
}

}  // namespace

void begin_compact(const CompiledRule& compiled, SeriesEntry& entry, std::uint64_t units,
                   Nanos now) {
  entry.set_form(Form::bucket);
  entry.time = now;
  entry.bucket = {units * compiled.compact.unit.value(), compiled.number, kSmallTotal};
}

std::uint64_t small_count(const SeriesEntry& entry, const WindowShape& shape, std::int64_t index) {
  std::int64_t newest = shape.index(entry.time);
  if (index == newest) return std::uint64_t{entry.count[0]} + entry.count[1];
  if (index == newest - 1) return std::uint64_t{entry.count[2]} + entry.count[3];
  return 0;
}

bool consume_small_window(const CompiledRule& compiled, SeriesEntry& entry, const WindowAt& window,
                          std::uint64_t cost, bool replicated) {
  if (!compiled.small_windows || cost > kMaxSmall) return false;
  if (entry.form() == Form::unused) {
    entry.set_form(Form::window);
    entry.time = window.start;
  }
  if (entry.form() != Form::window) return false;
  if (window.start > entry.time && !roll(entry, window.shape, window.index)) return false;
  bool before = window.start < entry.time;
  if (before && window.index != window.shape.index(entry.time) - 1) return false;
  std::uint32_t& own = entry.count[before ? 2 : 0];
  if (cost > kMaxSmall - own) return false;
  own += static_cast<std::uint32_t>(cost);
  if (replicated) entry.set(before ? SeriesEntry::kDirtyBefore : SeriesEntry::kDirty);
  return true;
}

bool begin_small(const CompiledRule& compiled, SeriesEntry& entry, const WindowAt& window,
                 std::uint64_t used, Nanos now) {
  if (compiled.compact.fits) {
    std::uint64_t most = mul_saturated(compiled.limit, 1 + std::uint64_t{compiled.bucket.max_debt});
    begin_compact(compiled, entry, std::min(used, most), now);
    return true;
  }
  if (!compiled.small_windows || used > kMaxSmall) return false;
  entry.set_form(Form::window);
  entry.time = window.start;
  entry.count[1] = static_cast<std::uint32_t>(used);
  return true;
}

std::unique_ptr<Series> to_general(const SeriesEntry& entry, const SeriesId& id,
                                   const RuleNumbers::Kept& kept) {
  auto series = std::make_unique<Series>();
  WindowShape shape = window_shape(kept.rule, id);
  std::int64_t newest = shape.index(entry.time);
  auto put = [&](std::int64_t index, const std::uint32_t* counts, std::uint64_t flag) {
    if (counts[0] == 0 && counts[1] == 0) return;
    series->windows.push_back({shape.epoch(index), counts[0], counts[1], entry.has(flag)});
  };
  put(newest - 1, entry.count + 2, SeriesEntry::kDirtyBefore);
  put(newest, entry.count, SeriesEntry::kDirty);
  return series;
}

bool are_windows_over(const SeriesEntry& entry, const RuleNumbers::Kept& kept, Nanos floor) {
  // Boundaries may be shifted by the series' id; lengths are not.
  WindowShape shape = window_shape(kept.rule, {});
  Nanos lifetime = shape.length(shape.index(entry.time)) * (std::int64_t{shape.previous} + 1);
  return entry.time + lifetime <= floor - kGrace;
}

}  // namespace weir
