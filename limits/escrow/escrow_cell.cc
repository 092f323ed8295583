#include <weir/limits/escrow/escrow_cell.h>

#include <algorithm>
#include <limits>

namespace weir {
namespace {

std::uint64_t clamped(crdt::Int128 units) {
  if (units <= 0) return 0;
  constexpr auto kMost = std::numeric_limits<std::uint64_t>::max();
  return units > static_cast<crdt::Int128>(kMost) ? kMost : static_cast<std::uint64_t>(units);
}

}  // namespace

void Demand::add(std::uint64_t units, Nanos slice, Nanos now) {
  std::int64_t number = now / slice;
  if (number > number_) {
    before_ = number == number_ + 1 ? units_ : 0;
    units_ = 0;
    number_ = number;
  }
  units_ = add_saturated(units_, units);
}

std::uint64_t Demand::forecast(Nanos slice, Nanos now) const {
  std::int64_t number = now / slice;
  if (number <= number_) return std::max(units_, before_);
  return number == number_ + 1 ? units_ : 0;
}

crdt::Int128 EscrowCell::left(bool takes_share) const {
  auto of = [](auto units) { return static_cast<crdt::Int128>(units); };
  const crdt::Holding& holding = others.holding;
  crdt::Int128 rights = of(holding.received) - of(holding.given) - of(holding.used);
  if (takes_share) rights += of(share) - of(holding.before);
  for (const Given& each : given) {
    if (!crdt::is_fill(each.row)) rights -= of(each.units);
  }
  return rights - of(spent) - of(held);
}

void EscrowCell::want(std::uint64_t units, Nanos now) {
  demand.add(units, slice, now);
  demanded = add_saturated(demanded, units);
}

void EscrowCell::spend(std::uint64_t units, bool takes_share) {
  spent = add_saturated(spent, units);
  // Handed over once half of the reserve is gone, so that it does not run out; never more of it
  // than there are rights.
  std::uint64_t ahead = ceiling > spent ? ceiling - spent : 0;
  if (spent > ceiling ||
      (ahead * 2 < block && left(takes_share) > static_cast<crdt::Int128>(ahead)))
    dirty = true;
}

std::uint64_t EscrowCell::likely() const {
  return demanded_before == 0 ? demanded : demanded / 2 + demanded_before / 2;
}

std::uint64_t EscrowCell::lacking(Nanos now, bool takes_share) const {
  std::uint64_t next = demand.forecast(slice, now);
  crdt::Int128 here = left(takes_share);
  if (here >= static_cast<crdt::Int128>(next)) return 0;
  return clamped(2 * static_cast<crdt::Int128>(next) - here);
}

std::uint64_t EscrowCell::give(const crdt::Incarnation& from, const crdt::Incarnation& to,
                               std::uint64_t wanted, std::uint64_t kept, bool takes_share) {
  std::uint64_t row = crdt::transfer_row(to);
  std::uint64_t before = given_in(row);
  auto raised = crdt::raised_transfer(from, to, before, wanted,
                                      left(takes_share) - static_cast<crdt::Int128>(kept));
  if (!raised) return 0;
  raise(row, *raised);
  return *raised - before;
}

std::uint64_t EscrowCell::given_in(std::uint64_t row) const {
  auto at = std::find_if(given.begin(), given.end(),
                         [row](const Given& each) { return each.row == row; });
  return at == given.end() ? 0 : at->units;
}

void EscrowCell::raise(std::uint64_t row, std::uint64_t units) {
  auto at = std::find_if(given.begin(), given.end(),
                         [row](const Given& each) { return each.row == row; });
  if (at == given.end()) at = given.insert(given.end(), {row, 0, false});
  at->units = units;
  at->dirty = true;
  dirty = true;
}

std::uint64_t EscrowCell::filled_for(const crdt::Incarnation& to) const {
  return given_in(crdt::fill_row(to));
}

std::uint64_t EscrowCell::give_filled(const crdt::Incarnation& to, std::uint64_t units) {
  std::uint64_t full = filled_for(to);
  units = std::min(units, given_in(crdt::transfer_row(to)) - full);
  if (units > 0) raise(crdt::fill_row(to), full + units);
  return units;
}

std::uint64_t EscrowCell::given_filled() const {
  std::uint64_t sum = 0;
  for (const Given& each : given) {
    if (crdt::is_fill(each.row)) sum = add_saturated(sum, each.units);
  }
  return sum;
}

void EscrowCell::drain(const crdt::SeriesId& series, bool takes_share,
                       std::vector<crdt::OwnCount>& out) {
  if (!dirty) return;
  dirty = false;
  // Nothing is kept ahead of nothing: what this node does not use, others may.
  std::uint64_t ahead = spent == 0 ? 0 : std::min(block, clamped(left(takes_share)));
  ceiling = std::max(ceiling, add_saturated(spent, ahead));
  if (ceiling > durable) {
    out.push_back({{series, epoch}, crdt::kUsedRow, ceiling, {}, false, true});
  }
  for (Given& each : given) {
    if (!each.dirty) continue;
    each.dirty = false;
    out.push_back({{series, epoch}, each.row, each.units, {}, true, false});
  }
}

void EscrowCell::mark_durable(std::uint64_t value) {
  durable = std::max(durable, std::min(value, ceiling));
}

void EscrowCell::reset() {
  spent = ceiling = durable = credited = 0;
  given.clear();
  others = {};
  dirty = false;
}

}  // namespace weir
