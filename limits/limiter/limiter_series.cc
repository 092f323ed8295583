// One series, with the lock of its entry held.

#include <weir/limits/limiter/limiter_impl.h>

#include <weir/limits/algorithms/sync_thresholds.h>

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

std::span<const LogEntry> read_log(const Series* series, std::uint64_t most) {
  std::vector<LogEntry>& log = local().log;
  log.clear();
  if (series == nullptr) return log;
  for (auto cell = series->windows.rbegin(); cell != series->windows.rend(); ++cell) {
    if (log.size() >= most) break;
    if (cell->total() > 0) log.push_back({cell->epoch.start, cell->total()});
  }
  std::reverse(log.begin(), log.end());
  return log;
}

std::uint64_t small_count(const SeriesEntry& entry, const WindowShape& shape, std::int64_t index) {
  std::int64_t newest = shape.index(entry.time);
  if (index == newest) return std::uint64_t{entry.count[0]} + entry.count[1];
  if (index == newest - 1) return std::uint64_t{entry.count[2]} + entry.count[3];
  return 0;
}

crdt::BucketState small_bucket(const SeriesEntry& entry, const BucketShape& shape) {
  CompactBucket compact = CompactBucket::of(shape);
  crdt::BucketState state;
  state.checkpoint = {kSmallTotal, entry.time,
                      static_cast<crdt::DebtTicks>(entry.word[0]) * compact.scale};
  state.touched = entry.time;
  state.expiry = entry.time + compact.fill_time;
  return state;
}

void Limiter::Impl::assess(const CompiledRule& compiled, Item& item, Nanos now,
                           RuleStatus& status) {
  const SeriesEntry* entry = item.entry;
  item.compact = compiled.compact.fits && entry != nullptr && is_compact(compiled, *entry);
  if (!item.compact && compiled.plain_windows && entry != nullptr &&
      entry->form() == Form::window && entry->time <= item.start) {
    if (assess_small_windows(compiled, *entry, item.cost, now, item.shape, item.start, status)) {
      return;
    }
  }
  if (item.compact) {
    item.owed = assess_compact(compiled, *item.entry, item.cost, now, status);
    return;
  }
  Verdict verdict = evaluate(compiled, item, item.cost, now);
  status.allowed = verdict.allowed;
  status.remaining = verdict.remaining;
  status.reset = verdict.reset;
  status.retry_after = verdict.retry_after;
  status.delay = verdict.delay;
  status.exhausted_locally = verdict.exhausted_locally;
}

Verdict Limiter::Impl::evaluate(const CompiledRule& compiled, const Item& item, std::uint64_t cost,
                                Nanos now) {
  const SeriesEntry* entry = item.entry;
  Form form = entry == nullptr ? Form::unused : entry->form();
  Series* series = form == Form::general ? entry->series : nullptr;
  if (compiled.escrow && compiled.bucket_cell) {
    return evaluate_escrow_bucket(compiled, item, series, cost, now);
  }
  if (compiled.escrow) return evaluate_escrow(compiled, item, series, cost, now);
  if (compiled.log) {
    return evaluate_log(read_log(series, compiled.limit + 1), compiled.rule->window, compiled.limit,
                        now, cost);
  }
  if (compiled.bucket_cell) {
    if (form == Form::bucket) {
      return evaluate_bucket(compiled.bucket, small_bucket(*entry, counted_by(*entry)), kSmallTotal,
                             now, cost);
    }
    if (series == nullptr || !series->bucket) {
      return evaluate_bucket(compiled.bucket, {}, 0, now, cost);
    }
    const BucketCell& bucket = *series->bucket;
    if (bucket.held > 0) {
      return evaluate_bucket(compiled.bucket, with_held(compiled, bucket, now),
                             add_saturated(bucket.total(), bucket.held), now, cost);
    }
    return evaluate_bucket(compiled.bucket, bucket.state, bucket.total(), now, cost);
  }
  const WindowShape& shape = item.shape;
  std::int64_t last = item.index;
  if (form == Form::window) {
    return evaluate_window(shape, compiled.limit, now, cost,
                           std::max(last, shape.index(entry->time)),
                           [&](std::int64_t index) { return small_count(*entry, shape, index); });
  }
  if (series == nullptr) {
    if (shape.previous == 0) return evaluate_fixed(compiled.limit, 0, cost, kNever);
    return evaluate_window(shape, compiled.limit, now, cost, last,
                           [](std::int64_t) { return std::uint64_t{0}; });
  }
  if (!series->windows.empty()) {
    last = std::max(last, shape.index(series->windows.back().epoch.start));
  }
  return evaluate_window(shape, compiled.limit, now, cost, last,
                         [&](std::int64_t index) { return series->count(shape.epoch(index)); });
}

crdt::BucketState Limiter::Impl::with_held(const CompiledRule& compiled, const BucketCell& bucket,
                                           Nanos now) {
  return consume_bucket(compiled.bucket, bucket.state, bucket.total(), now, bucket.held);
}

Verdict Limiter::Impl::evaluate_fixed(std::uint64_t limit, std::uint64_t used, std::uint64_t cost,
                                      Nanos left) {
  Verdict verdict;
  verdict.remaining = limit - std::min(limit, used);
  verdict.allowed = used <= limit && cost <= verdict.remaining;
  verdict.reset = used > 0 ? left : 0;
  if (!verdict.allowed) verdict.retry_after = cost > limit ? kNever : left;
  return verdict;
}

Nanos Limiter::Impl::reset_after(const CompiledRule& compiled, const Item& item,
                                 const RuleStatus& status, Nanos now) {
  if (compiled.bucket_cell || compiled.log) return evaluate(compiled, item, 0, now).reset;
  if (compiled.plain_windows) return reset_of_windows(item.shape, item.start, status, now);
  return std::max(status.reset, item.shape.epoch(item.index).expiry - now);
}

Series& Limiter::Impl::general(SeriesEntry& entry, const SeriesId& id) {
  Form form = entry.form();
  if (form == Form::general) return *entry.series;
  auto series = std::make_unique<Series>();
  if (form == Form::window) {
    WindowShape shape = window_shape(numbers.at(table.rule(entry)).rule, id);
    std::int64_t newest_index = shape.index(entry.time);
    auto put = [&](std::int64_t index, const std::uint32_t* counts, std::uint64_t flag) {
      if (counts[0] == 0 && counts[1] == 0) return;
      series->windows.push_back({shape.epoch(index), counts[0], counts[1], entry.has(flag)});
    };
    put(newest_index - 1, entry.count + 2, SeriesEntry::kDirtyBefore);
    put(newest_index, entry.count, SeriesEntry::kDirty);
  } else if (form == Form::bucket) {
    BucketCell& bucket = series->make_bucket();
    bucket.birth = bucket.last_birth = static_cast<std::uint64_t>(entry.time);
    bucket.own = kSmallTotal;
    bucket.state = small_bucket(entry, counted_by(entry));
    bucket.made = bucket.state.checkpoint;
  }
  entry.set(SeriesEntry::kDirty | SeriesEntry::kDirtyBefore, false);
  entry.set_form(Form::general);
  entry.time = 0;
  entry.series = series.release();
  return *entry.series;
}

void Limiter::Impl::consume(const CompiledRule& compiled, Item& item, Nanos now,
                            const RuleStatus& status) {
  SeriesEntry& entry = *item.entry;
  // Small forms were made by a request: they have their rule, and it is on another line.
  bool small = item.compact || entry.form() == Form::window;
  if (!small && table.rule(entry) != compiled.number) table.set_rule(entry, compiled.number);
  if (item.mode == Mode::hold) {
    hold(compiled, item, now);
    return;
  }
  if (item.compact) {
    consume_compact(compiled, entry, item.owed, item.cost, now);
    return;
  }
  if (compiled.escrow) {
    consume_escrow(compiled, item, now);
    return;
  }
  if (compiled.bucket_cell) {
    if (!begin_small_bucket(compiled, item, now)) {
      consume_bucket_cell(compiled, general(entry, item.id), item.cost, now);
    }
  } else if (!consume_small_window(compiled, item)) {
    Series& series = general(entry, item.id);
    series.forget_windows(now - kGrace);
    WindowCell& cell = series.window(compiled.log ? log_epoch(compiled.rule->window, now)
                                                  : item.shape.epoch(item.index));
    cell.own = add_saturated(cell.own, item.cost);
    cell.dirty = options.replicated;
    if (options.replicated && compiled.reserve > 0) keep_reserve(compiled, item, cell);
  }
  if (!options.replicated) return;
  std::uint64_t used = status.limit - std::min(status.limit, status.remaining);
  if (crosses_sync_threshold(used, add_saturated(used, item.cost), status.limit))
    entry.set(SeriesEntry::kUrgent);
  list(entry);
}

bool Limiter::Impl::consume_small_window(const CompiledRule& compiled, const Item& item) {
  SeriesEntry& entry = *item.entry;
  const WindowShape& shape = item.shape;
  if (!compiled.small_windows || item.cost > kMaxSmall) return false;
  std::int64_t index = item.index;
  Nanos start = item.start;
  if (entry.form() == Form::unused) {
    entry.set_form(Form::window);
    entry.time = start;
  }
  if (entry.form() != Form::window) return false;
  if (start > entry.time && !roll(entry, shape, index)) return false;
  bool before = start < entry.time;
  if (before && index != shape.index(entry.time) - 1) return false;
  std::uint32_t& own = entry.count[before ? 2 : 0];
  if (item.cost > kMaxSmall - own) return false;
  own += static_cast<std::uint32_t>(item.cost);
  if (options.replicated) entry.set(before ? SeriesEntry::kDirtyBefore : SeriesEntry::kDirty);
  return true;
}

bool Limiter::Impl::begin_small_bucket(const CompiledRule& compiled, const Item& item, Nanos now) {
  SeriesEntry& entry = *item.entry;
  // A replicated bucket's slot has a birth, for which there is no room.
  if (options.replicated || !compiled.compact.fits || entry.form() != Form::unused) return false;
  entry.set_form(Form::bucket);
  entry.time = now;
  entry.word[0] = item.cost * compiled.compact.unit.value();
  entry.word[1] = compiled.number;
  return true;
}

void Limiter::Impl::consume_bucket_cell(const CompiledRule& compiled, Series& series,
                                        std::uint64_t cost, Nanos now) {
  BucketCell& bucket = series.make_bucket();
  if (bucket.birth == 0) {
    bucket.birth = std::max(static_cast<std::uint64_t>(now), bucket.last_birth + 1);
    bucket.last_birth = bucket.birth;
  }
  // As in consume(): alone, no total is needed.
  if (!options.replicated && bucket.others == 0) bucket.own = bucket.state.checkpoint.counted = 0;
  bucket.state = consume_bucket(compiled.bucket, bucket.state, bucket.total(), now, cost);
  bucket.made = bucket.state.checkpoint;
  bucket.own = add_saturated(bucket.own, cost);
  bucket.dirty = options.replicated;
}

}  // namespace weir
