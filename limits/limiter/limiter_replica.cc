// The replica's side, and what is over.

#include <weir/limits/limiter/limiter_impl.h>

#include <algorithm>
#include <utility>

namespace weir {
namespace {

/// Of a cell's own units `held` are another writer's count from now on. False if none are left.
template <typename AnyCell>
bool leave_behind(AnyCell& cell, std::uint64_t held) {
  held = std::min(held, cell.own);
  cell.own -= held;
  cell.others = add_saturated(cell.others, held);
  return cell.own > 0;
}

[[gnu::always_inline]] inline void prefetch(const Series& series) {
  constexpr std::size_t kLine = 64;
  const auto* bytes = reinterpret_cast<const char*>(&series);
  for (std::size_t at = 0; at < sizeof series; at += kLine) __builtin_prefetch(bytes + at);
}

}  // namespace

void Limiter::Impl::list(SeriesEntry& entry) {
  if (entry.has(SeriesEntry::kListed)) return;
  entry.set(SeriesEntry::kListed);
  dirty_entries.add(local().stripe, table.index(entry));
}

bool Limiter::Impl::drain(std::vector<crdt::OwnCount>& out, std::size_t max) {
  return dirty_entries.take(
      [&] { return max - std::min(max, out.size()); },
      [&](std::span<const std::size_t> places) { drain_places(places, out); });
}

/// They come in no order, and each alone would wait for its memory: a group's is asked for before
/// the first is drained.
void Limiter::Impl::drain_places(std::span<const std::size_t> places,
                                 std::vector<crdt::OwnCount>& out) {
  for (std::size_t place : places) table.prefetch(place);
  for (std::size_t place : places) {
    SeriesEntry& entry = table.at(place);
    if (!table.lock_any(entry)) continue;
    if (entry.form() == Form::general) prefetch(*entry.series);
    if (entry.form() == Form::bucket && entry.has(SeriesEntry::kBeside)) {
      __builtin_prefetch(&table.record(entry));
    }
    SeriesTable::unlock(entry);
  }
  for (std::size_t place : places) {
    SeriesEntry& entry = table.at(place);
    if (!table.lock_any(entry)) continue;
    if (entry.has(SeriesEntry::kListed)) drain_entry(entry, out);
    SeriesTable::unlock(entry);
  }
}

void Limiter::Impl::drain_entry(SeriesEntry& entry, std::vector<crdt::OwnCount>& out) {
  const SeriesId id = table.id(entry);
  bool urgent = entry.has(SeriesEntry::kUrgent);
  if (entry.form() == Form::window) {
    WindowShape shape = window_shape(rules.number(table.rule(entry)).rule, id);
    std::int64_t index = shape.index(entry.time);
    if (entry.has(SeriesEntry::kDirtyBefore)) {
      out.push_back({{id, shape.epoch(index - 1)}, 0, entry.count[2], {}, urgent});
    }
    if (entry.has(SeriesEntry::kDirty)) {
      out.push_back({{id, shape.epoch(index)}, 0, entry.count[0], {}, urgent});
    }
    entry.set(SeriesEntry::kDirtyBefore, false);
  } else if (entry.form() == Form::bucket && entry.has(SeriesEntry::kDirty)) {
    const BucketCell bucket = read_bucket(entry);
    out.push_back({{id, crdt::kBucketEpoch}, bucket.birth, bucket.own, bucket.state, urgent});
  } else if (entry.form() == Form::general) {
    drain_series(id, *entry.series, urgent, out);
    shrink(entry);
  }
  entry.set(SeriesEntry::kDirty | SeriesEntry::kListed | SeriesEntry::kUrgent, false);
}

void Limiter::Impl::drain_series(const SeriesId& id, Series& series, bool urgent,
                                 std::vector<crdt::OwnCount>& out) const {
  escrow.drain(id, series, out);
  for (WindowCell& cell : series.windows) {
    if (cell.dirty) {
      cell.dirty = false;
      bool ahead = cell.block > 0;
      if (ahead) cell.ceiling = std::max(cell.ceiling, add_saturated(cell.own, cell.block));
      out.push_back({{id, cell.epoch}, 0, ahead ? cell.ceiling : cell.own, {}, urgent, ahead});
    }
    if (cell.back_dirty) {
      cell.back_dirty = false;
      out.push_back({{id, cell.epoch}, crdt::kBackRow, cell.own_back, {}, urgent, false});
    }
  }
  if (!series.bucket || !series.bucket->dirty) return;
  BucketCell& bucket = *series.bucket;
  bucket.dirty = false;
  crdt::BucketState state = bucket.state;
  state.checkpoint = bucket.made;
  out.push_back({{id, crdt::kBucketEpoch}, bucket.birth, bucket.own, state, urgent});
}

bool Limiter::Impl::absorb(const crdt::Cell& cell, Growth& growth, bool own) {
  const auto take_in = [&](SeriesEntry& entry) {
    std::uint32_t number = table.rule(entry);
    if (number != SeriesTable::kNoRule) growth.rule = rules.number(number).identity;
    std::uint64_t total = cell.total();
    if (cell.id.is_bucket()) {
      change_bucket(entry, cell.id.series,
                    [&](BucketCell& bucket) { absorb_bucket(bucket, cell, total, growth); });
      return;
    }
    const std::uint64_t mine = cell.value_of({options.incarnation, 0});
    std::uint64_t others = total - mine;
    const std::uint64_t back = cell.given_back();
    if (back == 0 && absorb_small(entry, cell.id, others, growth)) return;
    const std::uint64_t mine_back =
        std::min(mine, cell.value_of({options.incarnation, crdt::kBackRow}));
    WindowCell& window = general(entry, cell.id.series).window(cell.id.epoch);
    growth.units = others - std::min(others, window.others);
    window.others = std::max(window.others, others);
    window.others_back = std::max(window.others_back, back - std::min(back, mine_back));
    if (!own) return;
    window.own = std::max(window.own, mine);
    window.own_back = std::max(window.own_back, mine_back);
  };
  // While some series are with the replica alone this may be one of them, of which it has more
  // cells.
  const bool may_make = !own && !cold(time.clamp(0, local().stripe));
  if (with_entry(cell.id.series, may_make ? Make::yes : Make::no, take_in)) return true;
  cold_for(cell.id.is_bucket() ? cell.bucket.expiry : cell.id.epoch.expiry);
  // Whoever makes the series from now on asks for its counts, but it may have been made meanwhile.
  return with_entry(cell.id.series, Make::no, take_in);
}

void Limiter::Impl::cold_for(Nanos until) {
  Nanos known = cold_until.load(std::memory_order_relaxed);
  while (known < until && !cold_until.compare_exchange_weak(known, until)) {
  }
}

bool Limiter::Impl::is_kept(const SeriesEntry& entry, const ReplicaSide::DurableCount& kept,
                            Nanos& until, Nanos& born) const {
  const std::uint32_t number = table.rule(entry);
  const bool known = number != SeriesTable::kNoRule;
  const SeriesId id = table.id(entry);
  const auto has = [&](const crdt::Epoch& epoch, std::uint64_t own) {
    until = std::max(until, epoch.expiry);
    return own == 0 || kept({id, epoch}, {options.incarnation, 0}) == own;
  };
  if (entry.form() == Form::window) {
    const WindowShape shape = window_shape(rules.number(number).rule, id);
    const std::int64_t index = shape.index(entry.time);
    return has(shape.epoch(index), entry.count[0]) && has(shape.epoch(index - 1), entry.count[2]);
  }
  const auto has_bucket = [&](const BucketCell& bucket) {
    until = std::max(until, bucket.state.expiry);
    // Its cell names no slot that was reset, and once it is over nobody asks for it.
    const auto last = static_cast<Nanos>(bucket.last_birth);
    if (bucket.own == 0 || bucket.state.expiry - kSecond < last) born = std::max(born, last);
    const crdt::SlotId slot{options.incarnation, bucket.birth};
    const bool own = bucket.own == 0 || kept({id, crdt::kBucketEpoch}, slot) == bucket.own;
    return own && !bucket.dirty && bucket.held == 0 && bucket.own_back == 0;
  };
  if (entry.form() == Form::bucket) return has_bucket(read_bucket(entry));
  if (entry.form() != Form::general) return false;
  const Series& series = *entry.series;
  if (!series.escrow.empty() || series.escrow_bucket != nullptr) return false;
  if (known && rules.number(number).rule.algorithm == Algorithm::sliding_log) return false;
  if (known && rules.number(number).rule.phase == Phase::first_hit) return false;
  if (series.bucket && !has_bucket(*series.bucket)) return false;
  return std::all_of(series.windows.begin(), series.windows.end(), [&](const WindowCell& cell) {
    // Of a series whose rule nobody knows: an instant of a log is hardly ever a whole second.
    const bool named =
        known || (cell.epoch.start % kSecond == 0 && cell.epoch.expiry % kSecond == 0);
    return named && !cell.dirty && cell.own_back == 0 && cell.held == 0 && cell.block == 0 &&
           has(cell.epoch, cell.own);
  });
}

std::size_t Limiter::Impl::let_go(std::size_t most, const ReplicaSide::DurableCount& kept) {
  if (!options.replicated || !table.shares().nearly_full()) return 0;
  return table.visit_some(next_let_go, most, [&](SeriesEntry& entry) {
    if (entry.has(SeriesEntry::kListed) || !table.shares().beyond(table.rule(entry))) return false;
    if (entry.has(SeriesEntry::kUsed)) {
      entry.set(SeriesEntry::kUsed, false);
      return false;
    }
    Nanos until = 0;
    Nanos born = 0;
    if (!is_kept(entry, kept, until, born)) return false;
    forget_until(born);
    cold_for(until);
    return true;
  });
}

void Limiter::Impl::warm(const Request& request, Nanos given, std::vector<CellId>& out) {
  Local& work = local();
  RulesInForce::Use program = use(work);
  work.program = &*program;
  const Nanos now = time.clamp(given, work.stripe);
  if (!cold(now)) return;
  Items& items = work.items[0];
  prepare(request, now, work, items);
  for (const Item& item : items.all()) {
    const CompiledRule& compiled = *item.compiled;
    if (compiled.escrow || compiled.log) continue;
    const SeriesEntry* entry = table.find(item.id);
    // One that was made for a request that did not consume may still be unused.
    if (entry != nullptr && entry->form() != Form::unused) continue;
    bool made = false;
    if (entry == nullptr && table.insert(item.id, compiled.number, made) == nullptr) continue;
    if (compiled.bucket_cell) {
      out.push_back({item.id, crdt::kBucketEpoch});
      continue;
    }
    // One more: another clock may be ahead.
    for (std::int64_t back = -1; back <= std::int64_t{item.window.shape.previous}; ++back) {
      out.push_back({item.id, item.window.shape.epoch(item.window.index - back)});
    }
  }
}

bool Limiter::Impl::absorb_small(SeriesEntry& entry, const CellId& id, std::uint64_t others,
                                 Growth& growth) {
  if (entry.form() != Form::window || others > kMaxSmall) return false;
  WindowShape shape = window_shape(rules.number(table.rule(entry)).rule, id.series);
  std::int64_t index = shape.index(entry.time);
  bool before = id.epoch == shape.epoch(index - 1);
  if (!before && id.epoch != shape.epoch(index)) return false;
  std::uint32_t& known = entry.count[before ? 3 : 1];
  growth.units = others - std::min<std::uint64_t>(others, known);
  known = std::max(known, static_cast<std::uint32_t>(others));
  return true;
}

void Limiter::Impl::absorb_bucket(BucketCell& bucket, const crdt::Cell& cell, std::uint64_t total,
                                  Growth& growth) const {
  // Of a series that was let go the own slots are others', and no new one may have their births.
  for (const crdt::Slot& slot : cell.slots) {
    if (slot.id.writer == options.incarnation && bucket.birth == 0)
      bucket.last_birth = std::max(bucket.last_birth, slot.id.birth);
  }
  std::uint64_t own = bucket.birth == 0 ? 0 : cell.value_of({options.incarnation, bucket.birth});
  growth.units = total - own - std::min(total - own, bucket.others);
  bucket.others = std::max(bucket.others, total - own);
  crdt::join(bucket.state, cell.bucket);
  bucket.state.checkpoint.counted = std::min(bucket.state.checkpoint.counted, bucket.total());
}

void Limiter::Impl::reset(const crdt::Cell& cell, const crdt::Slot& gone) {
  with_entry(cell.id.series, Make::no, [&](SeriesEntry& entry) {
    if (entry.form() == Form::general && !entry.series->bucket) return;
    if (entry.form() == Form::unused || entry.form() == Form::window) return;
    if (entry.form() == Form::general) entry.time = 0;
    change_bucket(entry, cell.id.series, [&](BucketCell& bucket) {
      const crdt::SlotId own{options.incarnation, bucket.birth};
      std::uint64_t held = bucket.birth == 0 ? 0 : cell.value_of(own);
      std::uint64_t forgotten = gone.id == own ? std::min(gone.value, bucket.own) : 0;
      crdt::BucketState state = cell.bucket;
      if (bucket.own == forgotten) {
        bucket.birth = bucket.own = bucket.own_back = forgotten = 0;
        bucket.made = {};
      } else if (bucket.own > held) {
        state.touched = std::max(state.touched, bucket.state.touched);
        state.expiry = std::max(state.expiry, bucket.state.expiry);
      }
      bucket.made.counted = std::min(bucket.made.counted, bucket.own);
      state.checkpoint.counted = add_saturated(state.checkpoint.counted, forgotten);
      bucket.others = cell.total() - held;
      bucket.state = state;
    });
  });
}

void Limiter::Impl::rebase(const crdt::Incarnation& fresh,
                           const ReplicaSide::DurableCount& durable) {
  crdt::Incarnation old = options.incarnation;
  options.incarnation = fresh;
  escrow.set_incarnation(fresh);
  if (!options.replicated) return;
  table.visit_all([&](SeriesEntry& entry) {
    SeriesId id = table.id(entry);
    if (entry.form() == Form::unused) return false;
    auto leave = [&](BucketCell& bucket) {
      if (bucket.birth == 0) return;
      bucket.dirty = leave_behind(bucket, durable({id, crdt::kBucketEpoch}, {old, bucket.birth}));
      bucket.own_back = std::min(bucket.own_back, bucket.own);
      if (!bucket.dirty) bucket.birth = 0;  // the fresh incarnation has no slot yet
    };
    bool dirty = false;
    if (entry.form() == Form::bucket) {
      change_bucket(entry, id, [&](BucketCell& bucket) {
        leave(bucket);
        dirty = bucket.dirty;
      });
      if (dirty) list(entry);
      return false;
    }
    Series& series = general(entry, id);
    // Rights belong to an incarnation: the driver tells what the fresh one has.
    for (EscrowCell& cell : series.escrow) cell.reset();
    for (WindowCell& cell : series.windows) {
      std::uint64_t held = durable({id, cell.epoch}, {old, 0});
      // The old slot stays as it is, with what it was ahead.
      std::uint64_t ahead = held - std::min(held, cell.own);
      const std::uint64_t back =
          std::min({durable({id, cell.epoch}, {old, crdt::kBackRow}), cell.own_back, held});
      cell.dirty = leave_behind(cell, held);
      cell.others = add_saturated(cell.others, ahead);
      // Nobody gives back more than it counted: what the disk has not of it is lost.
      cell.others_back = add_saturated(cell.others_back, back);
      cell.own_back = std::min(cell.own_back - back, cell.own);
      cell.back_dirty = cell.own_back > 0;
      cell.ceiling = cell.durable = 0;
      dirty |= cell.dirty;
    }
    if (series.bucket) {
      leave(*series.bucket);
      dirty |= series.bucket->dirty;
    }
    if (dirty) list(entry);
    return false;
  });
}

void Limiter::Impl::mark_durable(const crdt::OwnCount& count) {
  with_entry(count.cell.series, Make::no, [&](SeriesEntry& entry) {
    if (entry.form() != Form::general) return;
    if (count.birth == crdt::kUsedRow) {
      EscrowCell* cell = entry.series->find_escrow(count.cell.epoch);
      if (cell != nullptr) cell->mark_durable(count.value);
    } else if (WindowCell* cell = entry.series->find(count.cell.epoch)) {
      cell->durable = std::max(cell->durable, std::min(count.value, cell->ceiling));
    }
  });
}

void Limiter::Impl::keep_reserve(const CompiledRule& compiled, Item& item, WindowCell& cell) {
  cell.block = compiled.reserve;
  item.waits = cell.waits();
  // Handed over again once half of what is ahead is gone.
  std::uint64_t ahead = cell.ceiling > cell.own ? cell.ceiling - cell.own : 0;
  cell.dirty = cell.own > cell.ceiling || ahead * 2 < cell.block;
}

void Limiter::Impl::note_spent(Item& item, const EscrowBook::Spent& spent) {
  item.waits = spent.waits;
  if (spent.dirty) list(*item.entry);
}

void Limiter::Impl::rights_needed(Nanos now, Nanos lead, std::vector<RightsNeed>& out) {
  std::vector<std::pair<CellId, SeriesId>> ending = escrow.ending(now, lead);
  if (!ending.empty()) {
    RulesInForce::Use program = use(local());
    for (const auto& [cell, name] : ending) {
      const CompiledRule* compiled = program->find_escrow(name);
      if (compiled == nullptr) continue;
      with_entry(cell.series, Make::no, [&, &id = cell](SeriesEntry& entry) {
        Series* series = general_form(&entry);
        if (series != nullptr) escrow.look_ahead(*compiled, id, *series, now);
      });
    }
  }
  escrow.take_needs(now, lead, out);
}

std::uint64_t Limiter::Impl::give_rights(const SeriesId& name, const CellId& id,
                                         const crdt::Incarnation& to, std::uint64_t wanted,
                                         Nanos now, bool all) {
  RulesInForce::Use program = use(local());
  const CompiledRule* compiled = program->find_escrow(name);
  if (compiled == nullptr || !escrow.may_give(*compiled, id, now)) return 0;
  std::uint64_t gave = 0;
  with_entry(id.series, Make::yes, [&](SeriesEntry& entry) {
    Series& series = general(entry, id.series);
    table.set_rule(entry, compiled->number);
    gave = escrow.give(*compiled, id, series, to, wanted, now, all);
    if (gave == 0) return;
    entry.set(SeriesEntry::kUrgent);
    list(entry);
  });
  return gave;
}

std::vector<RightsLeft> Limiter::Impl::rights_left(Nanos now, std::size_t max) {
  std::vector<RightsLeft> found;
  auto keep_busiest = [&] {
    if (found.size() <= max) return;
    std::nth_element(found.begin(), found.begin() + static_cast<std::ptrdiff_t>(max), found.end(),
                     [](const RightsLeft& a, const RightsLeft& b) { return a.demand > b.demand; });
    found.resize(max);
  };
  RulesInForce::Use program = use(local());
  table.visit_all([&](const SeriesEntry& entry) {
    const Series* series = general_form(&entry);
    std::uint32_t number = table.rule(entry);
    if (series == nullptr || series->escrow.empty() || number == SeriesTable::kNoRule) return false;
    const CompiledRule* compiled = program->find(rules.number(number).identity);
    if (compiled == nullptr) return false;
    escrow.find_rights_left(*compiled, table.id(entry), *series, now, found);
    if (found.size() >= 2 * max) keep_busiest();
    return false;
  });
  keep_busiest();
  std::sort(found.begin(), found.end(),
            [](const RightsLeft& a, const RightsLeft& b) { return a.demand > b.demand; });
  return found;
}

std::optional<std::uint64_t> Limiter::Impl::absorb_rows(const CellId& id,
                                                        const EscrowOthers& others) {
  // Where others only used their own, nothing changes here.
  bool make = others.holding != crdt::Holding{};
  std::uint64_t more = 0;
  bool found = with_entry(id.series, make ? Make::anywhere : Make::no, [&](SeriesEntry& entry) {
    more = escrow.absorb(id, general(entry, id.series), others);
  });
  if (!found && make) return std::nullopt;
  return more;
}

void Limiter::Impl::forget_until(Nanos until) {
  Nanos before = forgotten_until.load(std::memory_order_relaxed);
  while (before < until &&
         !forgotten_until.compare_exchange_weak(before, until, std::memory_order_relaxed)) {
  }
}

std::size_t Limiter::Impl::sweep(Nanos floor) {
  ids.expire(floor);
  forget_until(floor);
  std::size_t gone = 0;
  rules.reclaim([&](NumbersInUse* in_use) {
    gone = table.visit_all([&](SeriesEntry& entry) {
      if (is_over(entry, floor)) return true;
      if (in_use != nullptr) in_use->note(table.rule(entry));
      return false;
    });
  });
  return gone;
}

std::optional<Limiter::Swept> Limiter::Impl::sweep_some(Nanos floor, std::size_t most) {
  std::lock_guard lock(sweep_mutex);
  if (pass.segment == 0) {
    pass.floor = floor;
    pass.in_use = rules.begin_reclaim(pass.version);
    ids.expire(floor);
    forget_until(floor);
  }
  table.visit_some(pass.segment, most, [this](SeriesEntry& entry) {
    if (is_over(entry, pass.floor)) {
      ++pass.forgotten;
      return true;
    }
    if (pass.in_use) pass.in_use->note(table.rule(entry));
    return false;
  });
  if (pass.segment != 0) return std::nullopt;
  if (pass.in_use) rules.end_reclaim(*pass.in_use, pass.version);
  return Swept{pass.floor, std::exchange(pass.forgotten, 0)};
}

void Limiter::Impl::reload(std::unique_ptr<Program> prepared) {
  rules.reload(std::move(prepared), [&](NumbersInUse* in_use) {
    table.visit_all([&](const SeriesEntry& entry) {
      in_use->note(table.rule(entry));
      return false;
    });
  });
}

bool Limiter::Impl::is_over(SeriesEntry& entry, Nanos floor) {
  if (entry.has(SeriesEntry::kListed)) return false;
  switch (entry.form()) {
    case Form::unused:
      return true;
    case Form::window:
      return are_windows_over(entry, counted_by(entry), floor);
    case Form::bucket:
      return expiry_of_bucket(entry) <= floor;
    case Form::general:
      break;
  }
  if (entry.time > floor) return false;
  Series& series = *entry.series;
  if (series.escrow_bucket != nullptr) return is_escrow_bucket_over(entry, series, floor - kGrace);
  series.forget_windows(floor - kGrace);
  if (!series.windows.empty() || !series.escrow.empty()) return false;
  if (!series.bucket) return true;
  if (series.bucket->state.expiry > floor) {
    entry.time = series.bucket->state.expiry;  // which only rises
    return false;
  }
  // Its slots are forgotten here before the replica may do so.
  series.bucket->reset();
  return series.bucket->held == 0;
}

bool Limiter::Impl::is_escrow_bucket_over(const SeriesEntry& entry, Series& series,
                                          Nanos floor) const {
  std::uint32_t number = table.rule(entry);
  // Where shares are known but nothing is replicated, ids are not.
  if (number == SeriesTable::kNoRule || (escrow.shared() && !options.replicated)) return false;
  SeriesId id = options.replicated ? table.id(entry) : SeriesId{};
  return escrow.is_over(escrow_bucket_shape(rules.number(number).rule), id, series, floor);
}

}  // namespace weir
