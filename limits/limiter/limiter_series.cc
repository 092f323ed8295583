// One series, with the lock of its entry held.

#include <weir/limits/limiter/limiter_impl.h>

#include <algorithm>

#include <weir/limits/algorithms/sync_thresholds.h>

namespace weir {
namespace {

/// As if what is held were consumed now.
crdt::BucketState with_held(const CompiledRule& compiled, const BucketCell& bucket, Nanos now) {
  return consume_bucket(compiled.bucket, bucket.state, bucket.total(), now, bucket.held);
}

/// What evaluate_window says of a fixed window with `used` units and nothing in a later one.
Verdict evaluate_fixed(std::uint64_t limit, std::uint64_t used, std::uint64_t cost, Nanos left) {
  Verdict verdict;
  verdict.remaining = limit - std::min(limit, used);
  verdict.allowed = used <= limit && cost <= verdict.remaining;
  verdict.reset = used > 0 ? left : 0;
  if (!verdict.allowed) verdict.retry_after = cost > limit ? kNever : left;
  return verdict;
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

void Limiter::Impl::find_window(const CompiledRule& compiled, Item& item, Nanos now) {
  Nanos start = now;
  if (const Series* series = general_form(item.entry)) {
    for (const WindowCell& cell : series->windows) {
      if (cell.epoch.start > now || cell.epoch.expiry <= now || cell.empty()) continue;
      start = cell.epoch.start;
      break;
    }
  }
  WindowShape shape;
  shape.sub = compiled.rule->window;
  shape.phase = (shape.sub - start % shape.sub) % shape.sub;
  item.window = {shape, shape.index(start), start};
}

void Limiter::Impl::assess(const CompiledRule& compiled, Item& item, Nanos now) {
  const SeriesEntry* entry = item.entry;
  if (compiled.first_hit) [[unlikely]]
    find_window(compiled, item, now);
  item.compact = compiled.compact.fits && entry != nullptr &&
                 is_small_bucket(compiled, *entry, item.cost, now);
  if (item.compact) {
    item.owed = assess_compact(compiled, *entry, item.cost, now, item.verdict);
    finish_compact(compiled, item.owed, item.cost, false, item.verdict);
    return;
  }
  if (compiled.plain_windows && entry != nullptr && entry->form() == Form::window &&
      entry->time <= item.window.start &&
      assess_small_windows(compiled, *entry, item.cost, now, item.window, item.verdict)) {
    return;
  }
  item.verdict = evaluate(compiled, item, item.cost, now);
}

Verdict Limiter::Impl::evaluate(const CompiledRule& compiled, const Item& item, std::uint64_t cost,
                                Nanos now) {
  const SeriesEntry* entry = item.entry;
  Form form = entry == nullptr ? Form::unused : entry->form();
  Series* series = general_form(entry);
  if (compiled.escrow) {
    // From now on a sweep fills a bucket by these numbers, too. (Or others lent to it before it was
    // ever used here.)
    if (series != nullptr && compiled.bucket_cell && table.rule(*entry) != compiled.number)
      table.set_rule(*entry, compiled.number);
    return escrow.evaluate(compiled, item.id, item.window, series, cost, now);
  }
  if (compiled.log) {
    return evaluate_log(read_log(series, add_saturated(compiled.limit, 1)), compiled.rule->window,
                        compiled.limit, now, cost);
  }
  if (compiled.bucket_cell) {
    if (form == Form::bucket) {
      const BucketCell bucket = read_bucket(*entry);
      return evaluate_bucket(compiled.bucket, bucket.state, bucket.total(), now, cost);
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
  const WindowShape& shape = item.window.shape;
  std::int64_t last = item.window.index;
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

Nanos Limiter::Impl::lost_until(const CompiledRule& compiled, const Item& item, Nanos now) const {
  const crdt::LostWindows& lost = options.lost;
  if (compiled.bucket_cell) return lost.until(now, compiled.bucket.fill_time());
  if (compiled.log) return lost.until(now, compiled.rule->window);
  Nanos until = 0;
  const WindowShape& shape = item.window.shape;
  for (std::int64_t back = 0; back <= shape.previous; ++back) {
    const crdt::Epoch epoch = shape.epoch(item.window.index - back);
    if (lost.has(epoch)) until = std::max(until, epoch.expiry);
  }
  return until;
}

Nanos Limiter::Impl::reset_after(const CompiledRule& compiled, const Item& item, Nanos before,
                                 Nanos now) {
  if (compiled.bucket_cell || compiled.log) return evaluate(compiled, item, 0, now).reset;
  if (compiled.plain_windows) return reset_of_windows(item.window, before, now);
  return std::max(before, item.window.epoch().expiry - now);
}

Series& Limiter::Impl::general(SeriesEntry& entry, const SeriesId& id) {
  if (entry.form() == Form::general) return *entry.series;
  std::unique_ptr<Series> series;
  if (entry.form() == Form::window) {
    series = to_general(entry, id, counted_by(entry));
  } else {
    series = std::make_unique<Series>();
  }
  if (entry.form() == Form::bucket) {
    series->make_bucket() = read_bucket(entry);
    table.end_bucket(entry);
  }
  entry.set(SeriesEntry::kDirty | SeriesEntry::kDirtyBefore, false);
  entry.set_form(Form::general);
  entry.time = 0;
  entry.series = series.release();
  return *entry.series;
}

void Limiter::Impl::consume(const CompiledRule& compiled, Item& item, Nanos now) {
  SeriesEntry& entry = *item.entry;
  if (item.compact && item.mode != Mode::hold) {
    consume_compact(compiled, entry, item.owed, item.cost, now);
    if (options.replicated) count_own(compiled, entry, item.cost, item.verdict.remaining);
    return;
  }
  if (entry.form() == Form::bucket) general(entry, item.id);
  // Small windows were made by a request: they have their rule, and it is on another line.
  if (entry.form() != Form::window && table.rule(entry) != compiled.number) {
    table.set_rule(entry, compiled.number);
  }
  if (item.mode == Mode::hold) {
    hold(compiled, item, now);
  } else {
    consume_general(compiled, item, now);
  }
}

void Limiter::Impl::consume_general(const CompiledRule& compiled, Item& item, Nanos now) {
  SeriesEntry& entry = *item.entry;
  if (compiled.escrow) {
    Series& series = general(entry, item.id);
    note_spent(item, escrow.consume(compiled, item.id, item.window, series, item.cost, now));
    return;
  }
  if (compiled.bucket_cell) {
    bool fresh = compiled.compact.fits && entry.form() == Form::unused;
    if (fresh && !options.replicated) {
      begin_compact(compiled, entry, item.cost, now);
    } else if (!fresh || !begin_replicated(compiled, entry, item.cost, now)) {
      consume_bucket_cell(compiled, general(entry, item.id), item.cost, now);
    }
  } else if (!consume_small_window(compiled, entry, item.window, item.cost, options.replicated)) {
    Series& series = general(entry, item.id);
    series.forget_windows(now - kGrace);
    WindowCell& cell = series.window(epoch_of(compiled, item, now));
    cell.own = add_saturated(cell.own, item.cost);
    cell.dirty = options.replicated;
    if (options.replicated && compiled.reserve > 0) keep_reserve(compiled, item, cell);
  }
  if (!options.replicated) return;
  note_crossed(compiled, entry, item.cost, item.verdict.remaining);
  list(entry);
}

void Limiter::Impl::note_crossed(const CompiledRule& compiled, SeriesEntry& entry,
                                 std::uint64_t cost, std::uint64_t remaining) {
  std::uint64_t used = compiled.limit - std::min(compiled.limit, remaining);
  if (crosses_sync_threshold(used, add_saturated(used, cost), compiled.limit))
    entry.set(SeriesEntry::kUrgent);
}

bool Limiter::Impl::can_count(const SeriesEntry& entry, std::uint64_t cost, Nanos now) const {
  if (!entry.has(SeriesEntry::kBeside)) return cost <= kMaxSmall - entry.bucket.own;
  // Before the last touch, which another's clock may have been ahead for, the checkpoint says it.
  if (now < entry.time) return false;
  const BucketRecord& record = table.record(entry);
  return cost <= kMaxInRecord - record.own - record.others;
}

void Limiter::Impl::count_own(const CompiledRule& compiled, SeriesEntry& entry, std::uint64_t cost,
                              std::uint64_t remaining) {
  if (entry.has(SeriesEntry::kBeside)) {
    BucketRecord& record = table.record(entry);
    if (record.own == 0) {
      record.birth = std::max(static_cast<std::uint64_t>(entry.time), record.birth + 1);
    }
    record.own += cost;
    record.uncounted = 0;
    record.at = entry.time;
    record.debt = entry.bucket.debt;
  } else {
    entry.bucket.own += static_cast<std::uint32_t>(cost);
  }
  entry.set(SeriesEntry::kDirty);
  note_crossed(compiled, entry, cost, remaining);
  list(entry);
}

bool Limiter::Impl::begin_replicated(const CompiledRule& compiled, SeriesEntry& entry,
                                     std::uint64_t cost, Nanos now) {
  Nanos second = now / kSecond;
  // Born in the second that has begun: no slot that was forgotten may have been born then.
  bool sure = second > 0 && second * kSecond > forgotten_until.load(std::memory_order_relaxed);
  if (!sure || second > Nanos{kMaxSmall} || cost > kMaxSmall) return false;
  begin_compact(compiled, entry, cost, now);
  entry.bucket.own = static_cast<std::uint32_t>(cost);
  table.set_birth(entry, static_cast<std::uint32_t>(second));
  entry.set(SeriesEntry::kDirty);
  return true;
}

BucketCell Limiter::Impl::read_bucket(const SeriesEntry& entry) const {
  const bool numbered = entry.bucket.number != SeriesTable::kNoRule;
  const crdt::DebtTicks scale = numbered ? counted_by(entry).compact.scale : 1;
  BucketCell out;
  out.state.touched = entry.time;
  out.state.expiry = expiry_of_bucket(entry);
  out.dirty = entry.has(SeriesEntry::kDirty);
  if (entry.has(SeriesEntry::kBeside)) {
    const BucketRecord& record = table.record(entry);
    out.own = record.own;
    out.others = record.others;
    out.last_birth = record.birth;
    out.state.checkpoint = {out.total() - record.uncounted, record.at, record.debt * scale};
  } else {
    out.own = entry.bucket.own;
    out.last_birth = options.replicated ? table.birth(entry) * static_cast<std::uint64_t>(kSecond)
                                        : static_cast<std::uint64_t>(entry.time);
    out.state.checkpoint = {out.own, entry.time, entry.bucket.debt * scale};
  }
  if (out.own > 0) {
    out.birth = out.last_birth;
    out.made = out.state.checkpoint;
  }
  return out;
}

bool Limiter::Impl::write_bucket(SeriesEntry& entry, const BucketCell& bucket) {
  const std::uint32_t number = table.rule(entry);
  const crdt::BucketState& state = bucket.state;
  const crdt::Checkpoint& checkpoint = state.checkpoint;
  const std::uint64_t total = bucket.total();
  if (bucket.held > 0 || bucket.own_back > 0) return false;
  if (total > kMaxInRecord || checkpoint.counted > total) return false;
  // What is handed over next is the checkpoint as it stands.
  if (bucket.dirty && bucket.made != checkpoint) return false;
  if (bucket.own > 0 && bucket.birth != bucket.last_birth) return false;
  BucketRecord record{
      bucket.own, bucket.others, bucket.last_birth, total - checkpoint.counted, checkpoint.at, 0};
  BucketWords words{static_cast<std::uint64_t>(state.expiry), number, 0};
  bool alone = false;
  if (number == SeriesTable::kNoRule) {
    if (bucket.own > 0 || checkpoint.debt > kMaxInRecord) return false;
    record.debt = static_cast<std::uint64_t>(checkpoint.debt);
  } else {
    const RuleNumbers::Kept& kept = rules.number(number);
    const CompactBucket& compact = kept.compact;
    if (!compact.fits || state.expiry != state.touched + compact.fill_time) return false;
    if (checkpoint.debt > kept.bucket.cap() || checkpoint.debt % compact.scale != 0) return false;
    record.debt = static_cast<std::uint64_t>(checkpoint.debt / compact.scale);
    words.debt = static_cast<std::uint64_t>(bucket_debt(kept.bucket, state, total, state.touched) /
                                            compact.scale);
    const std::uint64_t second = bucket.birth / static_cast<std::uint64_t>(kSecond);
    alone = bucket.own > 0 && bucket.others == 0 && record.uncounted == 0 &&
            checkpoint.at == state.touched && bucket.own <= kMaxSmall && second <= kMaxSmall &&
            second * static_cast<std::uint64_t>(kSecond) == bucket.birth;
    if (alone) {
      words.own = static_cast<std::uint32_t>(bucket.own);
      table.drop_record(entry);
      table.set_birth(entry, static_cast<std::uint32_t>(second));
    }
  }
  if (entry.form() == Form::bucket && entry.has(SeriesEntry::kBeside)) words.own = entry.bucket.own;
  entry.set_form(Form::bucket);
  entry.time = state.touched;
  entry.bucket = words;
  entry.set(SeriesEntry::kDirty, bucket.dirty);
  if (!alone) table.put_beside(entry) = record;
  return true;
}

void Limiter::Impl::shrink(SeriesEntry& entry) {
  Series* series = general_form(&entry);
  if (series == nullptr || !series->bucket || !series->windows.empty() || !series->escrow.empty() ||
      series->escrow_bucket != nullptr) {
    return;
  }
  if (write_bucket(entry, *series->bucket)) delete series;
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

crdt::DebtTicks Limiter::Impl::debt_of(const CompiledRule& compiled, const Item& item,
                                       Nanos now) const {
  const SeriesEntry* entry = item.entry;
  if (entry != nullptr && entry->form() == Form::bucket) {
    const BucketCell bucket = read_bucket(*entry);
    return bucket_debt(compiled.bucket, bucket.state, bucket.total(), now);
  }
  const Series* series = general_form(entry);
  if (series == nullptr || !series->bucket) return 0;
  const BucketCell& bucket = *series->bucket;
  if (bucket.held == 0) return bucket_debt(compiled.bucket, bucket.state, bucket.total(), now);
  return bucket_debt(compiled.bucket, with_held(compiled, bucket, now),
                     add_saturated(bucket.total(), bucket.held), now);
}

std::uint64_t Limiter::Impl::counted_in(const Item& item) const {
  const SeriesEntry* entry = item.entry;
  if (entry == nullptr) return 0;
  if (entry->form() == Form::window)
    return small_count(*entry, item.window.shape, item.window.index);
  Series* series = general_form(entry);
  return series == nullptr ? 0 : series->count(item.window.epoch());
}

std::uint64_t Limiter::Impl::used(const CompiledRule& compiled, const SeriesId& id, Nanos now) {
  std::uint64_t units = 0;
  with_entry(id, Make::no, [&](SeriesEntry& entry) {
    Series* series = general_form(&entry);
    if (compiled.escrow) {
      units = escrow.used(compiled, id, series, now);
      return;
    }
    if (compiled.log) {
      units = log_used(read_log(series, ~std::uint64_t{0}), compiled.rule->window, now);
      return;
    }
    if (compiled.bucket_cell) {
      Item item;
      item.entry = &entry;
      auto unit = static_cast<std::uint64_t>(compiled.bucket.unit);
      units = static_cast<std::uint64_t>((debt_of(compiled, item, now) + unit - 1) / unit);
      return;
    }
    WindowShape shape = window_shape(*compiled.rule, id);
    units = window_used(shape, now, [&](std::int64_t at) {
      if (entry.form() == Form::window) return small_count(entry, shape, at);
      return series == nullptr ? 0 : series->count(shape.epoch(at));
    });
  });
  return units;
}

bool Limiter::Impl::would_wait(const CompiledRule& compiled, const SeriesId& id, std::uint64_t cost,
                               Nanos now) {
  if (cost == 0) return false;
  if (compiled.commit) return true;
  const bool keeps_ahead = compiled.reserve > 0 || (compiled.escrow && !compiled.bucket_cell);
  if (!keeps_ahead) return false;
  // Of a key's first use nothing is on the disk.
  std::uint64_t ahead = 0;
  with_entry(id, Make::no, [&](SeriesEntry& entry) {
    Series* series = general_form(&entry);
    if (series == nullptr) return;
    const WindowShape shape = window_shape(*compiled.rule, id);
    const crdt::Epoch epoch = shape.epoch(shape.index(now));
    if (compiled.escrow) {
      const EscrowCell* cell = series->find_escrow(epoch);
      if (cell != nullptr) ahead = cell->durable - std::min(cell->durable, cell->spent);
    } else if (const WindowCell* cell = series->find(epoch)) {
      ahead = cell->durable - std::min(cell->durable, cell->own);
    }
  });
  return cost > ahead;
}

}  // namespace weir
