// Refunds.

#include <weir/limits/limiter/limiter_impl.h>

#include <algorithm>

#include <weir/limits/limiter/rule_status.h>

namespace weir {

void Limiter::Impl::give_back(std::span<Item> items, Nanos now, Decision& out) {
  out.allowed = true;
  out.wants_commit = false;  // one that is lost denies more, and never less
  out.repeated = false;
  out.given_back = 0;
  out.statuses.resize(items.size());
  for (std::size_t i = 0; i < items.size(); ++i) {
    Item& item = items[i];
    const CompiledRule& compiled = *item.compiled;
    if (item.entry != nullptr && item.cost > 0) {
      out.given_back = std::max(out.given_back, give_back(compiled, item, now));
    }
    if (compiled.first_hit) find_window(compiled, item, now);
    item.verdict = evaluate(compiled, item, 0, now);
    item.verdict.allowed = true;
    item.verdict.retry_after = item.verdict.delay = 0;
    fill(out.statuses[i], compiled, item.descriptor, item.verdict);
  }
  find_decider(out);
  unlock_all(items);
}

std::uint64_t Limiter::Impl::give_back(const CompiledRule& compiled, Item& item, Nanos now) {
  SeriesEntry& entry = *item.entry;
  if (compiled.escrow) {
    Series* series = general_form(&entry);
    return series == nullptr ? 0 : EscrowBook::give_back(item.window, *series, item.cost);
  }
  return compiled.bucket_cell ? give_back_bucket(compiled, entry, item.id, item.cost, now)
                              : give_back_windows(entry, item.id, item.cost, now);
}

/// The newest first: those count for longest.
std::uint64_t Limiter::Impl::give_back_windows(SeriesEntry& entry, const SeriesId& id,
                                               std::uint64_t units, Nanos now) {
  if (entry.form() == Form::unused) return 0;
  if (entry.form() == Form::window && entry.count[0] == 0 && entry.count[2] == 0) return 0;
  std::uint64_t given = 0;
  Series& series = general(entry, id);
  for (auto cell = series.windows.rbegin(); cell != series.windows.rend(); ++cell) {
    if (given == units) break;
    if (cell->epoch.expiry <= now) continue;
    const std::uint64_t left = cell->own - std::min(cell->own, cell->own_back);
    const std::uint64_t part = std::min(left, units - given);
    if (part == 0) continue;
    cell->own_back += part;
    cell->back_dirty = options.replicated;
    given += part;
  }
  if (given > 0 && options.replicated) list(entry);
  return given;
}

/// The checkpoint owes less. Of two that count as much the one that owes less wins, so others take
/// it over, unless they counted more meanwhile.
std::uint64_t Limiter::Impl::give_back_bucket(const CompiledRule& compiled, SeriesEntry& entry,
                                              const SeriesId& id, std::uint64_t units, Nanos now) {
  const BucketShape& shape = compiled.bucket;
  const auto unit = static_cast<std::uint64_t>(shape.unit);
  if (entry.form() == Form::unused) return 0;
  if (!options.replicated && is_compact(compiled, entry)) {
    // Nobody else's units are in it.
    const std::uint64_t ticks = compiled.compact.unit.value();
    const std::uint64_t given =
        std::min(units, compiled.compact.unit.floor(compiled.compact.debt(entry, now)));
    entry.bucket.debt -= given * ticks;
    return given;
  }
  std::uint64_t given = 0;
  change_bucket(entry, id, [&](BucketCell& bucket) {
    const std::uint64_t total = bucket.total();
    const crdt::DebtTicks debt = bucket_debt(shape, bucket.state, total, now);
    // Alone, all that is owed was consumed here, and own is not kept.
    given = !options.replicated
                ? units
                : std::min(units, bucket.own - std::min(bucket.own, bucket.own_back));
    if (debt / unit < given) given = static_cast<std::uint64_t>(debt / unit);
    if (given == 0) return;
    // One that counts everything, as what it does not count has no debt of its own.
    if (bucket.state.checkpoint.counted != total)
      bucket.state = consume_bucket(shape, bucket.state, total, now, 0);
    crdt::Checkpoint& checkpoint = bucket.state.checkpoint;
    checkpoint.debt = std::min(checkpoint.debt, shape.cap()) - shape.ticks(given);
    bucket.made = checkpoint;
    if (!options.replicated) return;
    bucket.own_back += given;
    bucket.dirty = true;
  });
  if (given > 0 && options.replicated) list(entry);
  return given;
}

}  // namespace weir
