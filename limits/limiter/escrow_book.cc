// Grant state and windows; buckets are in escrow_book_buckets.cc.

#include <weir/limits/limiter/escrow_book.h>

#include <algorithm>

namespace weir {
namespace {

/// Demand is measured in slices of at most this.
constexpr Nanos kSlice = 2 * kSecond;

}  // namespace

EscrowBook::EscrowBook(const LimiterOptions& options)
    : replicated_(options.replicated),
      shares_(options.shares),
      self_(options.self),
      lost_(options.lost),
      incarnation_(options.incarnation) {}

void EscrowBook::set_grant_state(const EscrowGrantState& state) {
  open_ = state.open;
  stopped_ = state.stopped;
  disk_ = state.disk;
  fence_time_ = state.fence_time;
  gives_ahead_ = state.ahead;
  since_ = state.since;
}

bool EscrowBook::takes_share(const crdt::Epoch& epoch) const {
  return open_.load(std::memory_order_relaxed) &&
         epoch.start > fence_time_.load(std::memory_order_relaxed) && !lost_.has(epoch);
}

EscrowCell& EscrowBook::place(const CompiledRule& compiled, const SeriesId& id,
                              EscrowCell& cell) const {
  if (cell.placed) return cell;
  cell.placed = true;
  cell.share = shares_ == nullptr ? compiled.limit
                                  : shares_->share(self_, id, compiled.limit, cell.epoch.start);
  bool scarce = shares_ != nullptr && is_scarce(compiled.limit, *shares_);
  cell.block = scarce ? 0 : compiled.reserve;
  cell.slice = std::clamp<Nanos>((cell.epoch.expiry - cell.epoch.start) / 16, 1, kSlice);
  return cell;
}

Verdict EscrowBook::evaluate(const CompiledRule& compiled, const SeriesId& id,
                             const WindowAt& window, Series* series, std::uint64_t cost,
                             Nanos now) const {
  return compiled.bucket_cell
             ? evaluate_bucket_rights(compiled, id, series, cost, now)
             : evaluate_window_rights(compiled, id, window.epoch(), series, cost, now);
}

Verdict EscrowBook::evaluate_window_rights(const CompiledRule& compiled, const SeriesId& id,
                                           const crdt::Epoch& epoch, Series* series,
                                           std::uint64_t cost, Nanos now) const {
  EscrowCell* cell = series == nullptr ? nullptr : series->find_escrow(epoch);
  EscrowCell unused;
  unused.epoch = epoch;
  const EscrowCell& here = place(compiled, id, cell == nullptr ? unused : *cell);
  // A limit that was lowered leaves the rights of this window, but no more at a time; 0 none.
  crdt::Int128 left =
      std::min(here.left(takes_share(epoch)), static_cast<crdt::Int128>(compiled.limit));
  std::uint64_t used = add_saturated(here.spent, here.others.used_by_peers);
  Nanos until_end = epoch.expiry - now;
  Verdict verdict;
  if (left > 0) verdict.remaining = static_cast<std::uint64_t>(left);
  verdict.allowed = left >= static_cast<crdt::Int128>(cost);
  verdict.reset = used > 0 || here.held > 0 ? until_end : 0;
  if (verdict.allowed) return verdict;
  bool never = cost > compiled.limit;
  verdict.exhausted_locally =
      !never && shares_ != nullptr && add_saturated(used, cost) <= compiled.limit;
  verdict.retry_after = never ? kNever : until_end;
  if (verdict.exhausted_locally) verdict.retry_after = std::min(until_end, kAskAgain);
  return verdict;
}

EscrowBook::Spent EscrowBook::spend(const CompiledRule& compiled, const SeriesId& id,
                                    EscrowCell& cell, std::uint64_t cost) const {
  place(compiled, id, cell).spend(cost, takes_share(cell.epoch));
  if (!replicated_) return {};
  return {disk_.load(std::memory_order_relaxed) && cell.waits(), cell.dirty};
}

EscrowBook::Spent EscrowBook::consume(const CompiledRule& compiled, const SeriesId& id,
                                      const WindowAt& window, Series& series, std::uint64_t cost,
                                      Nanos now) {
  if (compiled.bucket_cell) {
    bool fresh = series.escrow_bucket == nullptr;
    bucket_at(compiled.escrow_bucket, id, series, now).spend(compiled.escrow_bucket, cost);
    if (fresh) count_bucket_demand(compiled, id, series, cost, now);
    return {};
  }
  series.forget_windows(window.start - kGrace);
  return spend(compiled, id, series.escrow_cell(window.epoch()), cost);
}

void EscrowBook::hold(const CompiledRule& compiled, const SeriesId& id, const crdt::Epoch& epoch,
                      Series& series, std::uint64_t units, Nanos now) const {
  if (compiled.bucket_cell) {
    EscrowBucket& bucket = bucket_at(compiled.escrow_bucket, id, series, now);
    bucket.held = add_saturated(bucket.held, units);
  } else {
    place(compiled, id, series.escrow_cell(epoch)).held += units;
  }
}

std::optional<EscrowBook::Spent> EscrowBook::settle(const CompiledRule& compiled,
                                                    const SeriesId& id, const crdt::Epoch& epoch,
                                                    std::uint64_t held, Series& series,
                                                    std::uint64_t cost, Nanos now) const {
  if (compiled.bucket_cell) {
    EscrowBucket& bucket = bucket_at(compiled.escrow_bucket, id, series, now);
    bucket.held -= std::min(bucket.held, held);
    if (cost > 0) bucket.spend(compiled.escrow_bucket, cost);
    return Spent{};
  }
  EscrowCell& cell = *series.find_escrow(epoch);
  cell.held -= held;
  if (epoch.expiry <= now) return std::nullopt;
  return cost > 0 ? spend(compiled, id, cell, cost) : Spent{};
}

std::uint64_t EscrowBook::give_back(const WindowAt& window, Series& series, std::uint64_t units) {
  if (series.escrow_bucket != nullptr) return 0;
  EscrowCell* cell = series.find_escrow(window.epoch());
  if (cell == nullptr) return 0;
  units = std::min(units, cell->spent);
  cell->spent -= units;
  return units;
}

void EscrowBook::count_demand(const CompiledRule& compiled, const SeriesId& id,
                              const WindowAt& window, Series* series, std::uint64_t cost,
                              const Verdict& verdict, Nanos now) {
  if (cost == 0 || !shared()) return;
  if (!compiled.bucket_cell) {
    count_window_demand(compiled, {id, window.epoch()}, series, cost, verdict, now);
  } else if (series != nullptr && series->escrow_bucket != nullptr) {
    count_bucket_demand(compiled, id, *series, cost, now);
  } else if (verdict.exhausted_locally) {
    // Nothing was ever spent here, so nothing is known but this. What was allowed is counted once
    // it is consumed.
    needs_.note(compiled.name, compiled.limit, {id, period_after(id, now)}, cost, true);
  }
}

void EscrowBook::count_window_demand(const CompiledRule& compiled, const crdt::CellId& id,
                                     Series* series, std::uint64_t cost, const Verdict& verdict,
                                     Nanos now) {
  EscrowCell* cell = series == nullptr ? nullptr : series->find_escrow(id.epoch);
  if (cell == nullptr) {
    // Nothing was ever spent here, so nothing is known but this.
    if (verdict.exhausted_locally) needs_.note(compiled.name, compiled.limit, id, cost);
    return;
  }
  if (cell->demanded == 0) {
    for (const EscrowCell& each : series->escrow) {
      if (each.epoch.expiry == id.epoch.start) cell->demanded_before = each.demanded;
    }
  }
  cell->want(std::min(cost, compiled.limit), now);
  if (!cell->busy && cell->demanded > cell->share) {
    cell->busy = true;
    note_busy(id, compiled.name);
  }
  std::uint64_t lacking = cell->lacking(now, takes_share(id.epoch));
  if (verdict.exhausted_locally) {
    lacking = std::max(lacking, cost - std::min(cost, verdict.remaining));
  }
  if (lacking > 0)
    needs_.note(compiled.name, compiled.limit, id, std::min(lacking, compiled.limit));
}

void EscrowBook::note_busy(const crdt::CellId& cell, const SeriesId& rule) {
  std::lock_guard lock(busy_mutex_);
  if (busy_.size() < EscrowNeeds::kMost) busy_.emplace(cell, rule);
}

std::uint64_t EscrowBook::used(const CompiledRule& compiled, const SeriesId& id, Series* series,
                               Nanos now) const {
  if (series == nullptr) return 0;
  if (compiled.bucket_cell) {
    if (series->escrow_bucket == nullptr) return 0;
    const EscrowBucketShape& shape = compiled.escrow_bucket;
    std::uint64_t part = advance(shape, id, series, *series->escrow_bucket, now);
    return part - std::min(part, series->escrow_bucket->left(shape));
  }
  const EscrowCell* cell = series->find_escrow(window_at(compiled, id, now).epoch());
  if (cell == nullptr) return 0;
  return add_saturated(add_saturated(cell->spent, cell->held), cell->others.used_by_peers);
}

std::vector<std::pair<crdt::CellId, SeriesId>> EscrowBook::ending(Nanos now, Nanos lead) {
  std::vector<std::pair<crdt::CellId, SeriesId>> ending;
  std::lock_guard lock(busy_mutex_);
  for (auto at = busy_.begin(); at != busy_.end();) {
    const crdt::Epoch& epoch = at->first.epoch;
    if (epoch.expiry <= now) {
      at = busy_.erase(at);
      continue;
    }
    // Of a bucket the next period can be asked for only now.
    Nanos length = epoch.expiry - epoch.start;
    Nanos before = std::min(lead, length == kLendingPeriod ? length / 2 : length / 8);
    if (epoch.expiry - before <= now) ending.push_back(*at);
    ++at;
  }
  return ending;
}

void EscrowBook::look_ahead(const CompiledRule& compiled, const crdt::CellId& cell, Series& series,
                            Nanos now) {
  if (!compiled.bucket_cell) {
    look_ahead_in_windows(compiled, cell, series, now);
  } else if (series.escrow_bucket != nullptr) {
    look_ahead_in_bucket(compiled, cell, series, now);
  }
}

void EscrowBook::look_ahead_in_windows(const CompiledRule& compiled, const crdt::CellId& id,
                                       Series& series, Nanos now) {
  EscrowCell* cell = series.find_escrow(id.epoch);
  // Who has become quiet needs nothing.
  if (cell == nullptr || cell->demand.forecast(cell->slice, now) == 0) return;
  WindowShape shape = window_shape(*compiled.rule, id.series);
  crdt::Epoch next = shape.epoch(shape.index(id.epoch.start) + 1);
  std::uint64_t likely = std::min(cell->likely(), compiled.limit);
  EscrowCell& then = place(compiled, id.series, series.escrow_cell(next));
  crdt::Int128 lacking = static_cast<crdt::Int128>(likely) - then.left(takes_share(next));
  if (lacking <= 0) return;
  lacking = std::min(lacking, static_cast<crdt::Int128>(compiled.limit));
  needs_.note(compiled.name, compiled.limit, {id.series, next},
              static_cast<std::uint64_t>(lacking));
}

bool EscrowBook::may_give(const CompiledRule& compiled, const crdt::CellId& cell, Nanos now) const {
  if (stopped() || cell.epoch.expiry <= now) return false;
  if (compiled.bucket_cell) {
    return period_at(cell.series, cell.epoch.start) == cell.epoch &&
           cell.epoch.start <= now + kLentAhead;
  }
  // A window that this rule has, and no other.
  WindowShape shape = window_shape(*compiled.rule, cell.series);
  if (shape.epoch(shape.index(cell.epoch.start)) != cell.epoch) return false;
  return cell.epoch.start - now <= gives_ahead_.load(std::memory_order_relaxed);
}

std::uint64_t EscrowBook::give(const CompiledRule& compiled, const crdt::CellId& id, Series& series,
                               const crdt::Incarnation& to, std::uint64_t wanted, Nanos now,
                               bool all) const {
  if (compiled.bucket_cell) return lend(compiled, id, series, to, wanted, now);
  EscrowCell& cell = place(compiled, id.series, series.escrow_cell(id.epoch));
  std::uint64_t kept = all ? 0 : cell.demand.forecast(cell.slice, now);
  if (!all && id.epoch.start > now) {
    // What this node itself will want of that window.
    for (const EscrowCell& each : series.escrow) {
      if (each.epoch.expiry == id.epoch.start) kept = each.likely();
    }
  }
  return cell.give(incarnation_, to, wanted, kept, takes_share(id.epoch));
}

std::uint64_t EscrowBook::absorb(const crdt::CellId& id, Series& series,
                                 const EscrowOthers& others) {
  // Where others only used their own, nothing changes here.
  bool make = others.holding != crdt::Holding{};
  EscrowCell* cell = make ? &series.escrow_cell(id.epoch) : series.find_escrow(id.epoch);
  if (cell == nullptr) return 0;
  std::uint64_t more = 0;
  if (others.holding.received > cell->others.holding.received) {
    more = static_cast<std::uint64_t>(others.holding.received - cell->others.holding.received);
    needs_.satisfied(id);
  }
  cell->others = others;
  return more;
}

void EscrowBook::find_rights_left(const CompiledRule& compiled, const SeriesId& id,
                                  const Series& series, Nanos now,
                                  std::vector<RightsLeft>& out) const {
  for (const EscrowCell& cell : series.escrow) {
    if (cell.epoch.start > now || cell.epoch.expiry <= now) continue;
    if (!cell.placed || cell.left(takes_share(cell.epoch)) <= 0) continue;
    out.push_back({compiled.name, {id, cell.epoch}, cell.demand.forecast(cell.slice, now)});
  }
}

void EscrowBook::drain(const SeriesId& id, Series& series, std::vector<crdt::OwnCount>& out) const {
  for (EscrowCell& cell : series.escrow) cell.drain(id, takes_share(cell.epoch), out);
}

}  // namespace weir
