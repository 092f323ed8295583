#include <weir/crdt/escrow.h>

#include <algorithm>
#include <limits>
#include <string_view>
#include <utility>

namespace weir::crdt {
namespace {

constexpr std::uint64_t kTop = std::uint64_t{1} << 63;
constexpr std::uint64_t kRegistrySeed = 0x7765697253686172ull;
/// A registry holds the incarnations of this long, and lives twice as long: longer than any window.
constexpr Nanos kRegistryPeriod = kMaxLifetime / 2;

std::uint64_t hash_text(std::uint64_t seed, std::string_view text) {
  seed = mix64(seed, text.size());
  for (char c : text) seed = mix64(seed, static_cast<unsigned char>(c));
  return seed;
}

std::uint64_t hash_of(const Member& member) {
  return hash_text(hash_text(kRegistrySeed, member.region), member.node);
}

CellId registry_of(const Member& member, Nanos start) {
  std::uint64_t name = hash_of(member);
  return {{mix64(name, 1), mix64(name, 2)}, {start, start + kMaxLifetime}};
}

std::uint64_t row_of(const Cell* current, const Cell* before, const SlotId& slot) {
  std::uint64_t value = current == nullptr ? 0 : current->value_of(slot);
  return before == nullptr ? value : std::max(value, before->value_of(slot));
}

}  // namespace

std::uint64_t transfer_row(const Incarnation& to) {
  return (mix64(mix64(kRegistrySeed, to.hi), to.lo) | kTop) & ~std::uint64_t{1};
}

bool is_escrow(const Cell& cell) {
  if (cell.id.is_bucket()) return false;
  return std::any_of(cell.slots.begin(), cell.slots.end(), [](const Slot& slot) {
    return slot.id.birth != 0 && slot.id.birth != kBackRow;
  });
}

std::uint32_t Shareholder::weight_at(Nanos instant) const {
  std::uint32_t weight = 0;
  for (const WeightChange& change : weights) {
    if (change.from <= instant) weight = change.weight;
  }
  return weight;
}

std::vector<std::uint64_t> apportion(std::uint64_t limit, std::span<const std::uint32_t> weights,
                                     std::span<const std::uint64_t> order) {
  std::vector<std::uint64_t> parts(weights.size(), 0);
  std::uint64_t sum = 0;
  for (std::uint32_t weight : weights) sum += weight;
  if (sum == 0) return parts;
  // The method never gives one less than its quota rounded down; what is left is less than one
  // unit for each.
  std::uint64_t left = limit;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    parts[i] = static_cast<std::uint64_t>(static_cast<Uint128>(limit) * weights[i] / sum);
    left -= parts[i];
  }
  for (; left > 0; --left) {
    std::size_t best = weights.size();
    for (std::size_t i = 0; i < weights.size(); ++i) {
      if (weights[i] == 0) continue;
      if (best == weights.size()) {
        best = i;
        continue;
      }
      Uint128 mine = static_cast<Uint128>(weights[i]) * (static_cast<Uint128>(parts[best]) + 1);
      Uint128 its = static_cast<Uint128>(weights[best]) * (static_cast<Uint128>(parts[i]) + 1);
      if (mine > its || (mine == its && order[i] < order[best])) best = i;
    }
    ++parts[best];
  }
  return parts;
}

ShareTable::ShareTable(std::vector<Shareholder> holders) : holders_(std::move(holders)) {
  std::sort(holders_.begin(), holders_.end(),
            [](const Shareholder& a, const Shareholder& b) { return a.member < b.member; });
  for (const Shareholder& holder : holders_) names_.push_back(hash_of(holder.member));
}

std::uint64_t ShareTable::share(const Member& member, const SeriesId& series, std::uint64_t limit,
                                Nanos start) const {
  std::vector<std::uint32_t> weights;
  std::vector<std::uint64_t> order;
  std::size_t self = holders_.size();
  std::uint64_t seed = mix64(series.hi, series.lo);
  for (std::size_t i = 0; i < holders_.size(); ++i) {
    if (holders_[i].member == member) self = i;
    weights.push_back(holders_[i].weight_at(start));
    // By the name and not by the place, so that who joins changes no order among the others.
    order.push_back(mix64(seed, names_[i]));
  }
  return self == holders_.size() ? 0 : apportion(limit, weights, order)[self];
}

Nanos ShareTable::next_change(Nanos instant) const {
  Nanos next = kNever;
  for (const Shareholder& holder : holders_) {
    for (const WeightChange& change : holder.weights) {
      if (change.from > instant) next = std::min(next, change.from);
    }
  }
  return next;
}

std::uint64_t ShareTable::version(Nanos instant) const {
  std::uint64_t hash = kRegistrySeed;
  for (std::size_t i = 0; i < holders_.size(); ++i) {
    std::uint32_t weight = holders_[i].weight_at(instant);
    if (weight != 0) hash = mix64(mix64(hash, names_[i]), weight);
  }
  return hash;
}

bool Succession::has(const Incarnation& incarnation) const {
  return std::find(incarnations.begin(), incarnations.end(), incarnation) != incarnations.end();
}

Holding holding_of(const Cell& cell, const Succession& succession,
                   const std::function<bool(const Incarnation&)>& is_own) {
  std::vector<std::uint64_t> ours;
  for (const Incarnation& incarnation : succession.incarnations)
    ours.push_back(transfer_row(incarnation));
  Holding holding;
  for (const Slot& slot : cell.slots) {
    if (is_fill(slot.id.birth)) {
      bool to_newest = !ours.empty() && slot.id.birth == (ours.front() | 1);
      if (to_newest) holding.filled += slot.value;
      continue;
    }
    bool own = succession.has(slot.id.writer);
    if (is_transfer(slot.id.birth)) {
      bool to_us = std::find(ours.begin(), ours.end(), slot.id.birth) != ours.end();
      if (to_us) holding.received += slot.value;
      if (own) holding.given += slot.value;
    } else if (own) {
      holding.used += slot.value;
    }
    if (!own && is_own(slot.id.writer)) holding.before += slot.value;
  }
  return holding;
}

Int128 rights(const Holding& holding, const Succession& succession, const Epoch& epoch,
              std::uint64_t share) {
  auto signed_of = [](Uint128 units) { return static_cast<Int128>(units); };
  Int128 base = signed_of(holding.received) - signed_of(holding.given) - signed_of(holding.used);
  if (!succession.takes_share(epoch)) return base;
  return base + signed_of(share) - signed_of(holding.before);
}

std::optional<std::uint64_t> raised_transfer(const Incarnation& from, const Incarnation& to,
                                             std::uint64_t row, std::uint64_t wanted,
                                             Int128 available) {
  if (from == to || !from || !to || wanted <= row || available <= 0) return std::nullopt;
  auto lacking = static_cast<Int128>(wanted - row);
  return row + static_cast<std::uint64_t>(std::min(lacking, available));
}

CellId registry_cell(const Member& member, Nanos now) {
  return registry_of(member, now / kRegistryPeriod * kRegistryPeriod);
}

CellId registry_cell_before(const Member& member, Nanos now) {
  return registry_of(member, std::max<Nanos>(now / kRegistryPeriod - 1, 0) * kRegistryPeriod);
}

bool is_registry(const CellId& id) {
  return !id.is_bucket() && id.epoch.expiry - id.epoch.start == kMaxLifetime &&
         id.epoch.start % kRegistryPeriod == 0;
}

Succession succession_of(const Incarnation& incarnation, const Cell* current, const Cell* before) {
  Succession result;
  Incarnation at = incarnation;
  while (at && !result.has(at)) {
    result.incarnations.push_back(at);
    std::uint64_t fence_time = row_of(current, before, {at, kFenceRow});
    result.fence_time = fence_time == 0 ? kNever : static_cast<Nanos>(fence_time - 1);
    if (row_of(current, before, {at, kFirstRow}) != 0) result.fence_time = -1;
    Incarnation previous;
    for (const Cell* cell : {current, before}) {
      if (cell == nullptr) continue;
      for (const Slot& slot : cell->slots) {
        if (slot.id.birth != kFenceRow || slot.id.writer == at) continue;
        if (row_of(current, before, {at, succession_row(slot.id.writer)}) != 0) {
          previous = slot.id.writer;
        }
      }
    }
    at = previous;
  }
  return result;
}

}  // namespace weir::crdt
