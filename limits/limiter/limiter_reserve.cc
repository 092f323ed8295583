// Reservations.

#include <weir/limits/limiter/limiter_impl.h>

#include <weir/limits/algorithms/sync_thresholds.h>

namespace weir {

Ticket Limiter::Impl::reserve(const Request& request, Nanos given, Nanos timeout, Decision& out) {
  Local& work = local();
  RulesInForce::Use program = use(work);
  work.program = &*program;
  Nanos now = clamp(given, work.stripe);
  Items& items = work.items[0];
  prepare(request, now, work, items);
  auto reserve_now = [&] { return reserve(request, items, work, now, timeout, out); };
  return request.id.empty() ? reserve_now()
                            : by_id(request, items, *program, now, out, reserve_now);
}

Ticket Limiter::Impl::reserve(const Request& request, Items& items, Local& work, Nanos now,
                              Nanos timeout, Decision& out) {
  bool asks = request.hits > 0 || std::any_of(request.more.begin(), request.more.end(),
                                              [](const Descriptor& each) { return each.hits > 0; });
  bool room = asks && tickets.keep_room();
  for (Item& item : items.all()) item.mode = room ? Mode::hold : Mode::no_ticket;
  decide(items, work, now, out);
  if (room) out.wants_commit = false;  // when it is settled
  OpenTicket ticket;
  for (std::size_t i = 0; room && out.allowed && i < out.statuses.size(); ++i) {
    const Item& item = items.item_of(i);
    const CompiledRule& compiled = *item.compiled;
    const RuleStatus& status = out.statuses[i];
    const Request part = request.part(status.descriptor);
    const std::uint64_t units = cost_of(compiled, part);
    if (!status.allowed || status.degraded || units == 0) continue;
    ticket.holds.push_back({item.id, epoch_of(compiled, item, now), compiled.rule->cost_of(part),
                            units, status.descriptor});
  }
  if (ticket.holds.empty()) {
    if (room) tickets.give_room_back();
    return {};
  }
  for (std::size_t i = 0; i < request.descriptors(); ++i) {
    ticket.hits.push_back(request.part(i).hits);
  }
  ticket.deadline = now + std::clamp<Nanos>(timeout, 0, kMaxHold);
  return {tickets.open(std::move(ticket))};
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

Settled Limiter::Impl::settle_ticket(const OpenTicket& ticket,
                                     std::span<const std::uint64_t> actual, Nanos now) {
  Settled out;
  out.known = true;
  out.hits = ticket.hits[0];
  RulesInForce::Use program = use(local());
  for (const Hold& hold : ticket.holds) {
    // It is there: what holds something is not forgotten.
    with_entry(hold.series, false, [&](SeriesEntry& entry) {
      CompiledRule compiled = rules.compiled_for(*program, table.rule(entry));
      Item item;
      item.entry = &entry;
      item.id = hold.series;
      item.cost = hold.descriptor < actual.size()
                      ? mul_saturated(hold.per_hit, actual[hold.descriptor])
                      : hold.units;
      if (!compiled.bucket_cell && !compiled.log) item.window = window_at(compiled, item.id, now);
      table.set_rule(entry, compiled.number);
      bool counted = settle_hold(compiled, item, hold, now);
      out.lapsed |= !counted;
      out.wants_commit |=
          counted && item.cost > 0 && (item.waits || (options.replicated && compiled.commit));
    });
  }
  return out;
}

bool Limiter::Impl::settle_hold(const CompiledRule& compiled, Item& item, const Hold& hold,
                                Nanos now) {
  Series& series = *item.entry->series;
  if (compiled.escrow) {
    auto spent = escrow.settle(compiled, item.id, hold.epoch, hold.units, series, item.cost, now);
    if (spent) note_spent(item, *spent);
    return spent.has_value();
  }
  WindowCell* cell = nullptr;
  if (compiled.bucket_cell) {
    series.bucket->held -= hold.units;
  } else {
    cell = series.find(hold.epoch);
    cell->held -= hold.units;
    bool over = hold.epoch.expiry <= now;
    if (cell->empty() && (over || item.cost == 0)) {
      series.windows.erase(series.windows.begin() + (cell - series.windows.data()));
    }
    if (over) return false;
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

std::size_t Limiter::Impl::settle_due(Nanos now, std::size_t max) {
  std::size_t settled = 0;
  while (settled < max) {
    std::optional<OpenTicket> ticket = tickets.take_due(now);
    if (!ticket) break;
    settle_ticket(*ticket, {}, now);
    ++settled;
  }
  timed_out.fetch_add(settled, std::memory_order_relaxed);
  return settled;
}

void Limiter::Impl::settle_all(Nanos now) {
  while (std::optional<OpenTicket> ticket = tickets.take_due(kNever)) {
    settle_ticket(*ticket, {}, now);
  }
}

}  // namespace weir
