// Reservations.

#include <weir/limits/limiter/limiter_impl.h>

#include <algorithm>
#include <utility>

#include <weir/limits/algorithms/sync_thresholds.h>

namespace weir {

Ticket Limiter::Impl::reserve(const Request& request, Nanos given, Nanos timeout, Decision& out,
                              TicketHolder holder) {
  Local& work = local();
  RulesInForce::Use program = use(work);
  work.program = &*program;
  Nanos now = time.clamp(given, work.stripe);
  Items& items = work.items[0];
  prepare(request, now, work, items);
  items.kind = RequestKind::check;  // what is held has not passed yet, nor been given back
  if (items.exempt()) work.count_exempt(items);
  if (items.size() == 0 && !items.exempt()) unmet.note(*program, request);
  auto reserve_now = [&] { return reserve(request, items, work, now, timeout, out, holder); };
  return request.id.empty() ? reserve_now()
                            : by_id(request, items, *program, now, out, reserve_now);
}

Ticket Limiter::Impl::reserve(const Request& request, Items& items, Local& work, Nanos now,
                              Nanos timeout, Decision& out, TicketHolder holder) {
  bool asks = request.hits > 0 || std::any_of(request.more.begin(), request.more.end(),
                                              [](const Descriptor& each) { return each.hits > 0; });
  bool room = asks && reservations.keep_room(holder);
  for (Item& item : items.all()) item.mode = room ? Mode::hold : Mode::no_ticket;
  decide(items, work, now, out);
  if (room) out.wants_commit = false;  // when it is settled
  std::vector<Hold> holds;
  for (std::size_t i = 0; room && out.allowed && i < out.statuses.size(); ++i) {
    const Item& item = items.item_of(i);
    const CompiledRule& compiled = *item.compiled;
    const RuleStatus& status = out.statuses[i];
    const Request part = request.part(status.descriptor);
    const std::uint64_t units = cost_of(compiled, part);
    if (!status.allowed || status.degraded || units == 0) continue;
    holds.push_back({item.id, epoch_of(compiled, item, now), compiled.rule->cost_of(part), units,
                     compiled.limit, compiled.rule->late, status.descriptor, request.limit});
  }
  if (holds.empty()) {
    if (room) reservations.give_room_back(holder);
    return {};
  }
  return reservations.open(std::move(holds), request.hits, now, timeout, holder);
}

void Limiter::Impl::hold(const CompiledRule& compiled, const Item& item, Nanos now) {
  Series& series = general(*item.entry, item.id);
  if (!compiled.bucket_cell) series.forget_windows(now - kGrace);
  crdt::Epoch epoch = epoch_of(compiled, item, now);
  // At most the limit, as all of it was allowed.
  if (compiled.escrow) {
    escrow.hold(compiled, item.id, epoch, series, item.cost, now);
  } else if (compiled.bucket_cell) {
    series.make_bucket().held += item.cost;
  } else {
    series.window(epoch).held += item.cost;
  }
}

SettledHold Limiter::Impl::settle_hold(const Hold& hold, std::uint64_t cost, Nanos now) {
  SettledHold out;
  RulesInForce::Use program = use(local());
  // It is there: what holds something is not forgotten.
  with_entry(hold.series, Make::no, [&](SeriesEntry& entry) {
    const CompiledRule base = rules.compiled_for(*program, table.rule(entry));
    AskedRulePtr asked;
    const CompiledRule& compiled = in_place_of(base, hold.limit, asked);
    Item item;
    item.entry = &entry;
    item.id = hold.series;
    item.cost = cost;
    if (!compiled.bucket_cell && !compiled.log) item.window = window_at(compiled, item.id, now);
    if (compiled.first_hit) find_window(compiled, item, now);
    table.set_rule(entry, compiled.number);
    out.lapsed = !settle(compiled, item, hold, now);
    bool durable = item.waits || (options.replicated && compiled.commit);
    out.wants_commit = !out.lapsed && cost > 0 && durable;
  });
  return out;
}

bool Limiter::Impl::settle(const CompiledRule& compiled, Item& item, const Hold& hold, Nanos now) {
  Series& series = *item.entry->series;
  if (compiled.escrow) {
    auto spent = escrow.settle(compiled, item.id, hold.epoch, hold.units, series, item.cost, now);
    if (!spent && hold.late == Late::charge) {
      // No more than there are rights for here: what all spend of a window stays within the limit.
      item.cost = std::min(
          item.cost, escrow.evaluate(compiled, item.id, item.window, &series, 0, now).remaining);
      spent.emplace();
      if (item.cost > 0)
        spent = escrow.consume(compiled, item.id, item.window, series, item.cost, now);
    }
    if (spent) note_spent(item, *spent);
    return spent.has_value();
  }
  WindowCell* cell = nullptr;
  if (compiled.bucket_cell) {
    series.bucket->held -= hold.units;
  } else {
    cell = series.find(hold.epoch);
    cell->held -= hold.units;
    const bool over = hold.epoch.expiry <= now;
    if (cell->empty() && (over || item.cost == 0)) {
      series.windows.erase(series.windows.begin() + (cell - series.windows.data()));
    }
    if (over && (hold.late == Late::drop || item.cost == 0)) return hold.late == Late::charge;
    if (over) cell = &series.window(epoch_of(compiled, item, now));
  }
  if (item.cost == 0) return true;
  std::uint64_t left = evaluate(compiled, item, 0, now).remaining;
  std::uint64_t used = compiled.limit - std::min(compiled.limit, left);
  if (compiled.bucket_cell) {
    consume_bucket_cell(compiled, series, item.cost, now);
  } else {
    cell->own = add_saturated(cell->own, item.cost);
    cell->dirty = options.replicated;
    if (options.replicated && compiled.reserve > 0) keep_reserve(compiled, item, *cell);
  }
  if (!options.replicated) return true;
  if (crosses_sync_threshold(used, add_saturated(used, item.cost), compiled.limit)) {
    item.entry->set(SeriesEntry::kUrgent);
  }
  list(*item.entry);
  return true;
}

}  // namespace weir
