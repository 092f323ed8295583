#include <weir/proptests/sim/checker.h>

#include <algorithm>

#include <fmt/format.h>

#include <weir/crdt/escrow.h>
#include <weir/limits/algorithms/bucket.h>
#include <weir/limits/algorithms/window.h>

namespace weir::sim {
namespace {

const crdt::Delta* delta_of(const crdt::Message& message) {
  if (const auto* push = std::get_if<crdt::Push>(&message)) return &push->delta;
  if (const auto* repair = std::get_if<crdt::Repair>(&message)) return &repair->delta;
  return nullptr;
}

std::string name(const crdt::CellId& id) {
  std::string series = crdt::to_string(id.series).substr(0, 8);
  if (id.is_bucket()) return "bucket " + series;
  return fmt::format("cell {} from {:.3f}s for {:.3f}s", series,
                     static_cast<double>(id.epoch.start) / 1e9,
                     static_cast<double>(id.epoch.expiry - id.epoch.start) / 1e9);
}

std::string name(const crdt::Incarnation& id) {
  return crdt::to_string(id).substr(0, 8);
}

}  // namespace

Checker::Checker(std::size_t node_count, bool series_full)
    : nodes(node_count), series_full_(series_full), processes_(node_count), memories_(node_count) {}

void Checker::fail(int law, std::uint32_t node, const std::string& what) const {
  throw Violation{law, fmt::format("n{}: {}", node, what)};
}

std::uint64_t Checker::OwnBucket::before(std::uint64_t birth) const {
  if (auto known = starts.find(birth); known != starts.end()) return known->second;
  auto at = std::lower_bound(log.begin(), log.end(), static_cast<Nanos>(birth) - kMicrosecond,
                             [](const auto& entry, Nanos wanted) { return entry.first < wanted; });
  return at == log.begin() ? 0 : std::prev(at)->second;
}

std::uint64_t Checker::OwnBucket::since(std::uint64_t birth) const {
  if (log.empty()) return 0;
  auto next = starts.upper_bound(birth);
  return (next == starts.end() ? log.back().second : next->second) - before(birth);
}

std::uint64_t Checker::OwnBucket::left_of(std::uint64_t birth) const {
  auto at = left.find(birth);
  return at == left.end() ? 0 : at->second;
}

std::uint64_t Checker::own_count(std::uint32_t node, const crdt::CellId& cell,
                                 std::uint64_t birth) const {
  const Process& process = processes_[node];
  if (!cell.is_bucket()) {
    auto at = process.windows.find(cell);
    return at == process.windows.end() ? 0 : at->second.total - at->second.left;
  }
  auto at = process.buckets->find(cell);
  if (at == process.buckets->end()) return 0;
  return at->second.since(birth) - std::min(at->second.since(birth), at->second.left_of(birth));
}

std::uint64_t Checker::allowed(const crdt::SlotId& slot, const crdt::CellId& cell) const {
  auto at = incarnations_.find(slot.writer);
  if (at == incarnations_.end()) return 0;
  const IncarnationRecord& incarnation = at->second;
  if (!incarnation.durable && cell.is_bucket()) {
    auto bucket = incarnation.buckets->find(cell);
    return bucket == incarnation.buckets->end() ? 0 : bucket->second.since(slot.birth);
  }
  // Rows of escrow rules: what is spent is checked, and where that is written before anybody knows.
  if (!incarnation.durable && !cell.is_bucket() && slot.birth != 0) return ~std::uint64_t{0};
  if (!incarnation.durable && incarnation.current) {
    return add_saturated(own_count(incarnation.node, cell, slot.birth), reserve_of(cell));
  }
  auto count = incarnation.counts.find({cell, slot.birth});
  return count == incarnation.counts.end() ? 0 : count->second;
}

void Checker::check_known(const crdt::Cell& cell, const char* where, std::uint32_t node) const {
  for (const crdt::Slot& slot : cell.slots) {
    std::uint64_t most = allowed(slot.id, cell.id);
    if (slot.value <= most) continue;
    auto incarnation = incarnations_.find(slot.id.writer);
    if (incarnation == incarnations_.end())
      fail(31, node, fmt::format("{} has a slot of nobody", name(cell.id)));
    bool row = !cell.id.is_bucket() && slot.id.birth != 0;
    bool invented = incarnation->second.current && !row &&
                    slot.value > own_count(incarnation->second.node, cell.id, slot.id.birth);
    fail(invented ? 31 : 29, node,
         fmt::format("{} {}: slot of {} (n{}) has {}, but its owner had at most {} {}", where,
                     name(cell.id), name(slot.id.writer), incarnation->second.node, slot.value,
                     most, incarnation->second.durable ? "durable" : "counted"));
  }
}

// Incarnations.

void Checker::made_incarnation(const crdt::Incarnation& fresh) {
  if (!used_.insert(fresh).second) {
    throw Violation{30, "incarnation " + name(fresh) + " is used a second time"};
  }
}

void Checker::booted(std::uint32_t node, bool durable) {
  const crdt::Incarnation& incarnation = replica(node).incarnation();
  processes_[node] = {};
  Process& process = processes_[node];
  incarnations_[incarnation] = {node, durable, true, {}, {}, process.buckets, process.incarnations};
  process.incarnations->insert(incarnation);
  process.floor = replica(node).floor();
  Memory& memory = memories_[node];
  process.time = nodes[node].engine->clock(0);
  const bool set_back = nodes[node].engine->status().set_back > 0;
  const crdt::LostWindows& lost = replica(node).options().lost;
  // What a clock that was ahead took for over, or has counted in later windows and buckets.
  const Nanos max_skew = replica(node).options().max_skew;
  auto left_behind = [&](const crdt::CellId& id) {
    if (id.is_bucket()) {
      auto stored = nodes[node].disk->image.cells.find(id);
      return set_back || (stored != nodes[node].disk->image.cells.end() &&
                          stored->second.bucket.touched > process.time + max_skew);
    }
    return (set_back && lost.has(id.epoch)) || id.epoch.start > process.time + 10 * max_skew;
  };
  if (process.time < memory.time && !set_back) {
    fail(11, node,
         fmt::format("after a restart the time is {}ns behind an earlier decision",
                     memory.time - process.time));
  }
  if (set_back) memory.time = process.time;
  std::erase_if(memory.promised, [&](const auto& entry) {
    return entry.second.expiry <= process.floor || left_behind(entry.first.first);
  });
  for (const auto& [key, promise] : memory.promised) {
    const std::optional<crdt::Cell> cell = replica(node).find(key.first);
    std::uint64_t held = !cell ? 0 : cell->value_of(key.second);
    if (held >= promise.value) continue;
    fail(28, node,
         fmt::format("{}: {} was acknowledged as durable, {} was recovered", name(key.first),
                     promise.value, held));
  }
  if (memory.stopped_clean) {
    for (const auto& [id, cell] : memory.at_stop) {
      bool gone = id.is_bucket() ? cell.bucket.expiry <= process.floor
                                 : crdt::generation_of(id.epoch).end() <= process.floor;
      if (gone || left_behind(id)) continue;
      const std::optional<crdt::Cell> held = replica(node).find(id);
      std::uint64_t total = !held ? 0 : held->total();
      // What is kept in reserve may have been handed over by the stop itself.
      bool ahead = crdt::is_escrow(cell) || reserve_of(id) > 0;
      if (ahead ? total < cell.total() : total != cell.total()) {
        fail(32, node,
             fmt::format("{}: {} before a clean stop, {} after it", name(id), cell.total(), total));
      }
    }
  }
  memory.stopped_clean = false;
  memory.at_stop.clear();
  rules_loaded(node);
  replica(node).for_each([&](const crdt::Cell& cell) {
    if (cell.id.is_bucket()) process.shared.insert(cell.id);
  });
  inspect(node);
}

void Checker::rules_loaded(std::uint32_t node) {
  std::shared_ptr<const RuleSet> rules = nodes[node].engine->limiter().rules();
  for (const Rule& rule : rules->rules()) {
    std::uint64_t& limit = limits_[rule.name];
    limit = std::max(limit, rule.limit);
    std::uint64_t& burst = bursts_[rule.name];
    burst = std::max(burst, rule.burst);
  }
}

void Checker::freeze(std::uint32_t node, const crdt::Incarnation& id) {
  IncarnationRecord& incarnation = incarnations_[id];
  incarnation.current = false;
  if (incarnation.durable) return;
  const Process& process = processes_[node];
  for (const auto& [cell, own] : process.windows) {
    if (own.total > own.left)
      incarnation.counts[{cell, 0}] = own.total - own.left + reserve_of(cell);
  }
}

void Checker::reincarnated(std::uint32_t node, const crdt::Incarnation& fresh) {
  Process& process = processes_[node];
  crdt::Incarnation old;
  for (const crdt::Incarnation& id : *process.incarnations) {
    if (incarnations_[id].current) old = id;
  }
  freeze(node, old);
  process.was_without_disk |= !incarnations_[old].durable;
  process.spent.clear();
  // What the replica holds of the old incarnation stays behind, the rest is counted again under the
  // new.
  auto held = [&](const crdt::CellId& id, std::uint64_t birth) {
    const std::optional<crdt::Cell> cell = replica(node).find(id);
    return !cell ? 0 : cell->value_of({old, birth});
  };
  for (auto& [id, own] : process.windows) {
    own.left += std::min(own.total - own.left, held(id, 0));
  }
  for (auto& [id, own] : *process.buckets) {
    const std::optional<crdt::Cell> cell = replica(node).find(id);
    if (!cell) continue;
    for (const crdt::Slot& slot : cell->slots) {
      if (slot.id.writer != old) continue;
      own.left[slot.id.birth] += std::min(own_count(node, id, slot.id.birth), slot.value);
    }
  }
  IncarnationRecord& incarnation = incarnations_[fresh];
  incarnation = {node,
                 nodes[node].engine->status().writing,
                 true,
                 {},
                 {},
                 process.buckets,
                 process.incarnations};
  for (const auto& [id, own] : *process.buckets) {
    for (const auto& [birth, left] : own.left) incarnation.offsets[{id, birth}] = left;
  }
  process.incarnations->insert(fresh);
}

void Checker::stopping(std::uint32_t node) {
  Memory& memory = memories_[node];
  memory.at_stop.clear();
  memory.stopped_clean = false;
  if (processes_[node].failed || !nodes[node].engine->status().durable) return;
  // Everything it knows and everything it counted.
  const crdt::Incarnation& incarnation = replica(node).incarnation();
  replica(node).for_each([&](const crdt::Cell& cell) { memory.at_stop[cell.id] = cell; });
  for (const auto& [id, own] : processes_[node].windows) {
    if (own.total == own.left) continue;
    crdt::Cell& cell = memory.at_stop[id];
    cell.id = id;
    cell.raise({incarnation, 0}, own.total - own.left);
  }
  for (auto& [id, cell] : memory.at_stop) {
    if (!id.is_bucket()) continue;
    for (crdt::Slot& slot : cell.slots) {
      if (slot.id.writer == incarnation) slot.value = own_count(node, id, slot.id.birth);
    }
  }
}

void Checker::stopped(std::uint32_t node) {
  Memory& memory = memories_[node];
  memory.stopped_clean = !processes_[node].failed && nodes[node].disk->image.clean;
  if (memory.stopped_clean) memory.time = std::max(memory.time, processes_[node].time);
  // A bucket that drained and was reset since it was last handed over is not in these books.
  std::erase_if(memory.at_stop, [](const auto& entry) { return entry.first.is_bucket(); });
  crashed(node);
}

void Checker::crashed(std::uint32_t node) {
  for (const crdt::Incarnation& id : *processes_[node].incarnations) {
    if (incarnations_[id].current) freeze(node, id);
    std::erase_if(pushed_, [&](const auto& entry) {
      return entry.first.first == id || entry.first.second == id;
    });
  }
  processes_[node] = {};
}

void Checker::disk_replaced(std::uint32_t node) {
  memories_[node] = {};
}

/// Somebody else has a row of this node that its disk will not have.
bool Checker::told_of_more(std::uint32_t node, const Image& disk, std::uint32_t replaced,
                           const Image& replacement, Nanos wall) const {
  auto more = [&](const crdt::Cell& cell) {
    // What is over, no one is told of any more.
    if (cell.id.is_bucket() || cell.id.epoch.expiry <= wall + kSecond) return false;
    return std::any_of(cell.slots.begin(), cell.slots.end(), [&](const crdt::Slot& slot) {
      auto incarnation = incarnations_.find(slot.id.writer);
      return slot.id.birth != 0 && incarnation != incarnations_.end() &&
             incarnation->second.node == node && disk.value_of(cell.id, slot.id) < slot.value;
    });
  };
  for (std::uint32_t other = 0; other < nodes.size(); ++other) {
    if (other == node) continue;
    const Image& image = other == replaced ? replacement : nodes[other].disk->image;
    for (const auto& [id, cell] : image.cells) {
      if (more(cell)) return true;
    }
    bool known = false;
    if (other != replaced && nodes[other].engine != nullptr) {
      replica(other).for_each([&](const crdt::Cell& cell) { known |= more(cell); });
    }
    if (known) return true;
  }
  return false;
}

void Checker::disk_will_be(std::uint32_t node, const Image& image, Nanos wall) {
  std::vector<bool> told;
  for (std::uint32_t each = 0; each < nodes.size(); ++each) {
    const Image& disk = each == node ? image : nodes[each].disk->image;
    // Within the time that is reserved on it one peer's word is enough.
    bool soon = each == node && wall <= disk.ceiling;
    told.push_back(!soon && told_of_more(each, disk, node, image, wall));
  }
  for (auto& [id, window] : escrow_) {
    // By slot, the most that anybody will know.
    std::map<crdt::SlotId, std::uint64_t> known;
    auto learn = [&](const std::optional<crdt::Cell>& cell) {
      if (!cell) return;
      for (const crdt::Slot& slot : cell->slots) {
        if (slot.id.birth != crdt::kUsedRow) continue;
        std::uint64_t& most = known[slot.id];
        most = std::max(most, slot.value);
      }
    };
    for (std::uint32_t each = 0; each < nodes.size(); ++each) {
      const Image& disk = each == node ? image : nodes[each].disk->image;
      auto cell = disk.cells.find(id);
      if (cell != disk.cells.end()) learn(cell->second);
      if (each != node && nodes[each].engine != nullptr) learn(replica(each).find(id));
    }
    std::map<std::uint32_t, Uint128> sums;
    for (const auto& [slot, value] : known) {
      auto incarnation = incarnations_.find(slot.writer);
      if (incarnation != incarnations_.end()) sums[incarnation->second.node] += value;
    }
    for (auto& [each, admitted] : window.by_node) {
      // A window that begins later than the incarnation after this one is that one's.
      bool later = each == node && id.epoch.start > wall + 2 * kSecond;
      if (admitted <= sums[each] || (told[each] && !later)) continue;
      window.excused += admitted - sums[each];
      admitted = sums[each];
    }
  }
  // What the node had lent may be its own again, if nobody tells; and a clock that was ahead of
  // this one's is forgotten. Either ends with the periods that were known then.
  Nanos from = wall + (told[node] ? 2 : -3) * kSecond;
  Nanos to = std::max(wall, memories_[node].time) + 3 * kSecond;
  if (told[node] && memories_[node].time <= from) return;
  for (auto& [series, log] : escrow_logs_) {
    log.admitted.erase(log.admitted.lower_bound(from), log.admitted.upper_bound(to));
    if (log.excused_to < from) log.excused_from = from;
    log.excused_to = std::max(log.excused_to, to);
  }
}

// Decisions.

std::uint64_t Checker::window_count(std::uint32_t node, const crdt::CellId& id) const {
  std::uint64_t count = own_count(node, id, 0);
  const std::optional<crdt::Cell> cell = replica(node).find(id);
  if (!cell) return count;
  const crdt::Incarnation& incarnation = replica(node).incarnation();
  for (const crdt::Slot& slot : cell->slots) {
    if (slot.id.writer != incarnation) count = add_saturated(count, slot.value);
  }
  return count;
}

void Checker::check_window(std::uint32_t node, const Rule& rule, const crdt::SeriesId& series,
                           const RuleStatus& status, std::uint64_t cost, bool consumed, Nanos now) {
  WindowShape shape = window_shape(rule, series);
  std::int64_t index = shape.index(now);
  auto count = [&](std::int64_t i) { return window_count(node, {series, shape.epoch(i)}); };
  // In units of 1/sub: the newest cells whole, the oldest by the part of it that is still inside.
  Uint128 used = 0;
  auto sub = static_cast<std::uint64_t>(shape.sub);
  for (std::uint32_t back = 0; back < std::max<std::uint32_t>(shape.previous, 1); ++back) {
    used += static_cast<Uint128>(count(index - back)) * sub;
  }
  if (shape.previous > 0) {
    std::uint64_t oldest = count(index - shape.previous);
    auto inside = static_cast<std::uint64_t>(shape.start(index + 1) - now);
    used += static_cast<Uint128>(oldest) * (shape.strict ? sub : inside);
  }
  Uint128 room = static_cast<Uint128>(rule.limit) * sub;
  bool fits = used + static_cast<Uint128>(cost) * sub <= room;
  std::uint64_t left = used >= room ? 0 : static_cast<std::uint64_t>((room - used) / sub);
  if (consumed) left -= std::min(left, cost);
  if (!series_full_ && (status.allowed != fits || status.remaining != left)) {
    fail(44, node,
         fmt::format("{} {}: cost {} of limit {} was {} with {} left; what this node admitted and "
                     "knows says {} with {} left",
                     rule.name, name(crdt::CellId{series, shape.epoch(index)}), cost, rule.limit,
                     status.allowed ? "allowed" : "denied", status.remaining,
                     fits ? "allowed" : "denied", left));
  }
  if (!consumed) return;
  crdt::CellId id{series, shape.epoch(index)};
  if (rule.durability == Durability::reserve) {
    std::uint64_t& block = reserves_[id];
    block = std::max({block, rule.limit / 100, std::uint64_t{1}});
  }
  OwnWindow& own = processes_[node].windows[id];
  own.total = add_saturated(own.total, cost);
  std::uint64_t& everywhere = globally_[id];
  everywhere = add_saturated(everywhere, cost);
  if (!rule.shadow && everywhere > rule.limit) {
    over_admitted_ += std::min(cost, everywhere - rule.limit);
  }
  processes_[node].recent[id] = {own.total, crdt::generation_of(id.epoch).end()};
}

std::uint64_t Checker::reserve_of(const crdt::CellId& id) const {
  auto at = reserves_.find(id);
  return at == reserves_.end() ? 0 : at->second;
}

void Checker::check_escrow(std::uint32_t node, const Rule& rule, const crdt::SeriesId& series,
                           const RuleStatus& status, std::uint64_t cost, bool consumed, bool waits,
                           Nanos now) {
  WindowShape shape = window_shape(rule, series);
  crdt::CellId id{series, shape.epoch(shape.index(now))};
  EscrowWindow& window = escrow_[id];
  Process& process = processes_[node];
  if (consumed && process.failed && nodes[node].engine->status().storage_failure != "") {
    fail(33, node, rule.name + ": rights are spent after a failed sync");
  }
  std::uint64_t limit = limits_[rule.name];
  // Rights that are left here are left in all.
  Uint128 most = window.admitted - std::min(window.admitted, window.excused) + status.remaining;
  if (most > limit) {
    fail(24, node,
         fmt::format("{} {}: {} rights are left here, and {} of {} are used", rule.name, name(id),
                     status.remaining, static_cast<std::uint64_t>(window.admitted), limit));
  }
  if (!status.allowed && status.exhausted_locally)
    escrow_denied_ = add_saturated(escrow_denied_, cost);
  if (!consumed) return;
  std::uint64_t& spent = process.spent[id];
  spent = add_saturated(spent, cost);
  if (waits) {
    process.escrow.push_back({id, {rule.name, cost}});
    return;
  }
  const IncarnationRecord& incarnation = incarnations_[replica(node).incarnation()];
  auto durable = incarnation.counts.find({id, crdt::kUsedRow});
  std::uint64_t kept = durable == incarnation.counts.end() ? 0 : durable->second;
  if (incarnation.durable && spent > kept) {
    fail(28, node,
         fmt::format("{} {}: answered with {} spent and {} durable", rule.name, name(id), spent,
                     kept));
  }
  admit_escrow(node, id, rule.name, cost);
}

/// Over any interval, each node by its own clock: no more than burst and rate allow. Of those that
/// hold this admission, as the others were looked at before.
void Checker::check_escrow_bucket(std::uint32_t node, const Rule& rule,
                                  const crdt::SeriesId& series, const RuleStatus& status,
                                  std::uint64_t cost, bool consumed, Nanos now) {
  if (consumed && processes_[node].failed && nodes[node].engine->status().storage_failure != "") {
    fail(33, node, rule.name + ": rights are spent after a failed sync");
  }
  if (!status.allowed && status.exhausted_locally)
    escrow_denied_ = add_saturated(escrow_denied_, cost);
  if (!consumed) return;
  escrow_admitted_ += cost;
  EscrowLog& log = escrow_logs_[series];
  if (now >= log.excused_from && now <= log.excused_to) return;
  log.admitted[now] += cost;
  auto unit = static_cast<Uint128>(rule.window);
  Uint128 rate = limits_[rule.name];
  // The most that units in an interval from (to) here exceed what the rate brings in it.
  auto most = [&](auto begin, auto end) {
    crdt::Int128 sum = 0;
    crdt::Int128 best = 0;
    for (auto at = begin; at != end; ++at) {
      sum += static_cast<crdt::Int128>(unit * at->second);
      Nanos between = at->first > now ? at->first - now : now - at->first;
      best = std::max(best,
                      sum - static_cast<crdt::Int128>(rate * static_cast<std::uint64_t>(between)));
    }
    return best;
  };
  auto here = log.admitted.find(now);
  crdt::Int128 over =
      most(here, log.admitted.end()) + most(std::make_reverse_iterator(here), log.admitted.rend());
  if (over <= static_cast<crdt::Int128>(unit * bursts_[rule.name])) return;
  fail(23, node,
       fmt::format("{} {:016x}: {} units admitted at {} are {:.3f} units above rate and burst",
                   rule.name, series.lo, cost, now,
                   static_cast<double>(over) / static_cast<double>(unit) -
                       static_cast<double>(bursts_[rule.name])));
}

void Checker::admit_escrow(std::uint32_t node, const crdt::CellId& id, const std::string& rule,
                           std::uint64_t units) {
  EscrowWindow& window = escrow_[id];
  window.admitted += units;
  escrow_admitted_ += units;
  window.by_node[node] += units;
  if (window.admitted <= limits_[rule] + window.excused) return;
  std::string rows;
  if (const std::optional<crdt::Cell> cell = replica(node).find(id)) {
    for (const crdt::Slot& slot : cell->slots) {
      auto incarnation = incarnations_.find(slot.id.writer);
      rows += fmt::format(" {} (n{}) {}: {};", name(slot.id.writer),
                          incarnation == incarnations_.end() ? 99 : incarnation->second.node,
                          slot.id.birth == crdt::kUsedRow ? "used" : "gave", slot.value);
    }
  }
  for (const auto& [who, share] : window.by_node) {
    rows += fmt::format(" n{} admitted {};", who, static_cast<std::uint64_t>(share));
  }
  fail(23, node,
       fmt::format("{} {}: {} of {} admitted;{}", rule, name(id),
                   static_cast<std::uint64_t>(window.admitted), limits_[rule], rows));
}

void Checker::check_bucket(std::uint32_t node, const Rule& rule, const crdt::SeriesId& series,
                           const RuleStatus& status, std::uint64_t cost, bool consumed, Nanos now) {
  crdt::CellId id{series, crdt::kBucketEpoch};
  Process& process = processes_[node];
  auto at = process.buckets->find(id);
  // A bucket that only this process has ever touched is an exact one.
  bool alone = !series_full_ && !process.shared.contains(id);
  if (at == process.buckets->end()) {
    if (!consumed && !alone) return;
    at = process.buckets->try_emplace(id).first;
  }
  OwnBucket& own = at->second;
  auto unit = static_cast<std::uint64_t>(rule.window);
  Uint128 drained = own.debt_at == 0 ? 0
                                     : static_cast<Uint128>(rule.limit) *
                                           static_cast<std::uint64_t>(now - own.debt_at);
  // The numbers may have changed since: never more debt than the burst in force allows, and none
  // once the bucket would have been full by those it was last touched under.
  Uint128 owed = std::min(own.debt, bucket_shape(rule).cap());
  bool over = rule.limit != 0 && now >= own.expiry;
  Uint128 debt = owed > drained && !over ? owed - drained : 0;
  Uint128 capacity = static_cast<Uint128>(rule.burst) * unit;
  bool fits = debt + static_cast<Uint128>(cost) * unit <= capacity;
  if (!series_full_ && !rates_differ) {
    Uint128 least = least_debt(node, rule, id, now);
    bool no_room = least + static_cast<Uint128>(cost) * unit > capacity;
    std::uint64_t most =
        least >= capacity ? 0 : static_cast<std::uint64_t>((capacity - least) / unit);
    if ((consumed && no_room) || status.remaining + (consumed ? cost : 0) > most) {
      fail(18, node,
           fmt::format("{} {}: cost {} was {} with {} left, but the consumption that this "
                       "node knows of leaves {}; {}",
                       rule.name, name(id), cost, consumed ? "admitted" : "not admitted",
                       status.remaining, most, show(node, id, now)));
    }
  }
  if (alone) {
    std::uint64_t left =
        debt >= capacity ? 0 : static_cast<std::uint64_t>((capacity - debt) / unit);
    if (consumed) left -= std::min(left, cost);
    if (status.allowed != fits || status.remaining != left) {
      fail(17, node,
           fmt::format("{} {}: cost {} was {} with {} left, an exact bucket says {} with "
                       "{} left",
                       rule.name, name(id), cost, status.allowed ? "allowed" : "denied",
                       status.remaining, fits ? "allowed" : "denied", left));
    }
  }
  if (!consumed) return;
  own.debt = debt + static_cast<Uint128>(cost) * unit;
  own.debt_at = now;
  own.expiry = std::max(own.expiry, now + bucket_shape(rule).fill_time());
  std::uint64_t sum = own.log.empty() ? 0 : own.log.back().second;
  own.log.emplace_back(now, add_saturated(sum, cost));
  process.recent[id] = {own.log.back().second, own.expiry};
}

/// A bucket as a replica holds it, with times relative to `now`.
std::string Checker::show(std::uint32_t node, const crdt::CellId& id, Nanos now) const {
  const std::optional<crdt::Cell> cell = replica(node).find(id);
  if (!cell) return "not in the replica";
  auto ago = [now](Nanos then) { return static_cast<double>(then - now) / 1e9; };
  std::string text;
  for (const crdt::Slot& slot : cell->slots) {
    auto incarnation = incarnations_.find(slot.id.writer);
    text += fmt::format("{} (n{}) born {:+.6f}s: {}; ", name(slot.id.writer),
                        incarnation == incarnations_.end() ? 99 : incarnation->second.node,
                        ago(static_cast<Nanos>(slot.id.birth)), slot.value);
  }
  const crdt::BucketState& state = cell->bucket;
  text += fmt::format("checkpoint counts {} at {:+.6f}s, touched {:+.6f}s, full at {:+.6f}s",
                      state.checkpoint.counted, ago(state.checkpoint.at), ago(state.touched),
                      ago(state.expiry));
  auto own = processes_[node].buckets->find(id);
  if (own == processes_[node].buckets->end()) return text;
  const auto& log = own->second.log;
  text += "; admitted here:";
  for (std::size_t i = log.size() - std::min<std::size_t>(log.size(), 8); i < log.size(); ++i) {
    text += fmt::format(" {:+.6f}s: {}", ago(log[i].first), log[i].second);
  }
  return text;
}

crdt::DebtTicks Checker::least_debt(std::uint32_t node, const Rule& rule, const crdt::CellId& id,
                                    Nanos now) const {
  BucketShape shape = bucket_shape(rule);
  // Debt from before this has drained, however much there was.
  Nanos since = now - shape.fill_time();
  std::vector<std::pair<Nanos, std::uint64_t>> consumed;
  auto add = [&](const OwnBucket& bucket, std::uint64_t after, std::uint64_t upto) {
    auto at =
        std::upper_bound(bucket.log.begin(), bucket.log.end(), after,
                         [](std::uint64_t sum, const auto& entry) { return sum < entry.second; });
    std::uint64_t sum = after;
    for (; at != bucket.log.end() && sum < upto; ++at) {
      std::uint64_t next = std::min(at->second, upto);
      if (at->first > since) consumed.emplace_back(at->first, next - sum);
      sum = next;
    }
  };
  const Process& process = processes_[node];
  auto own = process.buckets->find(id);
  if (own != process.buckets->end() && !own->second.log.empty()) {
    add(own->second, 0, own->second.log.back().second);
  }
  if (const std::optional<crdt::Cell> cell = replica(node).find(id)) {
    // Each slot is a stretch of its process' log; those of two incarnations of one process may
    // overlap.
    std::map<const Buckets*, std::vector<std::pair<std::uint64_t, std::uint64_t>>> known;
    for (const crdt::Slot& slot : cell->slots) {
      if (process.incarnations->contains(slot.id.writer)) continue;
      auto incarnation = incarnations_.find(slot.id.writer);
      if (incarnation == incarnations_.end()) continue;
      auto bucket = incarnation->second.buckets->find(id);
      if (bucket == incarnation->second.buckets->end()) continue;
      auto offset = incarnation->second.offsets.find({id, slot.id.birth});
      std::uint64_t from = bucket->second.before(slot.id.birth) +
                           (offset == incarnation->second.offsets.end() ? 0 : offset->second);
      known[incarnation->second.buckets.get()].emplace_back(from, from + slot.value);
    }
    for (auto& [log, stretches] : known) {
      std::sort(stretches.begin(), stretches.end());
      std::uint64_t done = 0;
      for (const auto& [from, to] : stretches) {
        if (to > done) add(log->at(id), std::max(from, done), to);
        done = std::max(done, to);
      }
    }
  }
  std::sort(consumed.begin(), consumed.end());
  Uint128 debt = 0;
  Nanos at = since;
  auto drain = [&](Nanos to) {
    if (to <= at) return;
    Uint128 out = static_cast<Uint128>(shape.rate) * static_cast<std::uint64_t>(to - at);
    debt = debt > out ? debt - out : 0;
    at = to;
  };
  for (const auto& [when, units] : consumed) {
    drain(when);
    debt = std::min(debt + shape.ticks(units), shape.cap());
  }
  drain(now);
  return debt;
}

void Checker::decided(std::uint32_t node, const Request& request, const Decision& decision,
                      Nanos now) {
  ++decisions_;
  watch_time(node);
  // What the disk does not know cannot be kept for the next process.
  if (!processes_[node].failed && now <= nodes[node].disk->image.ceiling) {
    memories_[node].time = std::max(memories_[node].time, now);
  }
  std::shared_ptr<const RuleSet> rules = nodes[node].engine->limiter().rules();
  bool all = true;
  for (const RuleStatus& status : decision.statuses) {
    all &= status.shadow || status.allowed;
  }
  if (decision.allowed != all) {
    fail(42, node, "the answer is not that of all enforcing rules together");
  }
  for (const RuleStatus& status : decision.statuses) {
    const Rule& rule = rules->rules()[status.rule];
    std::uint64_t cost = mul_saturated(rule.cost_of(request), request.hits);
    bool consumed = decision.allowed && status.allowed && !status.degraded && cost > 0;
    if (status.degraded) continue;
    crdt::SeriesId series = nodes[node].engine->limiter().series_of(status.rule, request);
    if (rule.enforcement == Enforcement::escrow && is_bucket(rule.algorithm)) {
      check_escrow_bucket(node, rule, series, status, cost, consumed, now);
    } else if (rule.enforcement == Enforcement::escrow) {
      check_escrow(node, rule, series, status, cost, consumed, decision.wants_commit, now);
    } else if (rule.algorithm == Algorithm::token_bucket) {
      check_bucket(node, rule, series, status, cost, consumed, now);
    } else {
      check_window(node, rule, series, status, cost, consumed, now);
    }
    if (consumed) admitted_ = add_saturated(admitted_, cost);
  }
}

std::uint64_t Checker::asked(std::uint32_t node) {
  Process& process = processes_[node];
  Waiting waiting;
  waiting.number = ++number_;
  waiting.time = process.time;
  waiting.totals.assign(process.recent.begin(), process.recent.end());
  process.recent.clear();
  waiting.escrow = std::exchange(process.escrow, {});
  process.waiting.push_back(std::move(waiting));
  return number_;
}

void Checker::answered(std::uint32_t node, std::uint64_t number, bool durable) {
  Process& process = processes_[node];
  if (durable && process.failed) {
    fail(33, node, "an increment was acknowledged as durable after a failed sync");
  }
  const Image& image = nodes[node].disk->image;
  Nanos floor = std::max(nodes[node].expired_to, replica(node).floor());
  while (!process.waiting.empty() && process.waiting.front().number <= number) {
    Waiting waiting = std::move(process.waiting.front());
    process.waiting.pop_front();
    if (!durable) continue;
    if (waiting.time > image.ceiling) {
      fail(11, node,
           fmt::format("an answer of a time {}ns past that on the disk",
                       waiting.time - image.ceiling));
    }
    memories_[node].time = std::max(memories_[node].time, waiting.time);
    for (const auto& [id, units] : waiting.escrow) {
      admit_escrow(node, id, units.first, units.second);
    }
    for (const auto& [id, admitted] : waiting.totals) {
      if (admitted.expiry <= floor) continue;
      std::uint64_t total = admitted.total;
      auto held = image.cells.find(id);
      std::uint64_t sum = 0;
      std::uint64_t wanted = total;
      std::uint64_t birth = 0;
      const OwnBucket* own = id.is_bucket() ? &(*process.buckets)[id] : nullptr;
      if (own != nullptr) {
        // The slot in which the last of those units is.
        for (const auto& [begin, start] : own->starts) {
          if (start < total) birth = begin;
        }
        wanted = total - own->before(birth);
      }
      if (held != image.cells.end()) {
        for (const crdt::Slot& slot : held->second.slots) {
          // What was counted without a disk was written by nobody who said which slot it was for:
          // it is in one that is younger, and not known here.
          if (birth != 0 && slot.id.birth != birth &&
              (slot.id.birth < birth || own->starts.contains(slot.id.birth))) {
            continue;
          }
          if (!process.incarnations->contains(slot.id.writer)) continue;
          sum += slot.value;
          Memory::Promise& promise = memories_[node].promised[{id, slot.id}];
          promise.value = std::max(promise.value, slot.value);
          promise.expiry = std::max(promise.expiry, admitted.expiry);
        }
      }
      if (sum < wanted) {
        fail(28, node,
             fmt::format("{}: {} acknowledged as durable, {} on the disk; {}", name(id), wanted,
                         sum, show(node, id, nodes[node].engine->clock(0))));
      }
    }
  }
}

// Disk.

void Checker::appended(std::uint32_t node, const crdt::Write& write) {
  const crdt::Incarnation& incarnation = replica(node).incarnation();
  for (const crdt::Cell& cell : write.delta.cells) {
    if (!crdt::valid(cell)) fail(4, node, "a malformed cell was handed to the store");
    for (const crdt::Slot& slot : cell.slots) {
      if (slot.id.writer != incarnation) {
        std::uint64_t most = allowed(slot.id, cell.id);
        if (slot.value > most) check_known(cell, "writes", node);
        continue;
      }
      if (!cell.id.is_bucket() && slot.id.birth != 0) {
        auto spent = processes_[node].spent.find(cell.id);
        if (slot.id.birth == crdt::kUsedRow && spent != processes_[node].spent.end() &&
            slot.value < spent->second) {
          fail(28, node,
               fmt::format("{}: {} rights are spent, {} are written", name(cell.id), spent->second,
                           slot.value));
        }
        continue;
      }
      // A disk that was opened again gets what is durable once more.
      const std::optional<crdt::Cell> held = replica(node).find(cell.id);
      if (held && held->value_of(slot.id) == slot.value) continue;
      if (cell.id.is_bucket()) note_written(node, cell.id, slot);
      std::uint64_t own = own_count(node, cell.id, slot.id.birth);
      std::uint64_t ahead = slot.value - std::min(slot.value, own);
      bool wrong =
          cell.id.is_bucket() ? slot.value > own : slot.value < own || ahead > reserve_of(cell.id);
      if (wrong) {
        fail(42, node,
             fmt::format("{}: {} is written as this node's count, but it admitted {}",
                         name(cell.id), slot.value, own));
      }
    }
  }
}

void Checker::note_written(std::uint32_t node, const crdt::CellId& id, const crdt::Slot& slot) {
  OwnBucket& own = (*processes_[node].buckets)[id];
  std::uint64_t sum = own.log.empty() ? 0 : own.log.back().second;
  auto [start, fresh] = own.starts.try_emplace(slot.id.birth, 0);
  if (fresh) {
    start->second = sum - std::min(sum, add_saturated(own.left_of(slot.id.birth), slot.value));
    // What was counted without a disk was never written.
    if (processes_[node].was_without_disk) own.written = start->second;
    if (start->second != own.written || std::next(start) != own.starts.end()) {
      fail(31, node,
           fmt::format("{}: a slot begins with {} of {} admitted units, {} are in older slots",
                       name(id), slot.value, sum, own.written));
    }
  }
  own.written = std::max(own.written, start->second + own.left_of(slot.id.birth) + slot.value);
}

void Checker::durable(std::uint32_t node, const crdt::Write& write) {
  for (const crdt::Cell& cell : write.delta.cells) {
    for (const crdt::Slot& slot : cell.slots) {
      auto incarnation = incarnations_.find(slot.id.writer);
      if (incarnation == incarnations_.end() || incarnation->second.node != node ||
          !incarnation->second.durable)
        continue;
      std::uint64_t& value = incarnation->second.counts[{cell.id, slot.id.birth}];
      if (!cell.id.is_bucket() && crdt::is_transfer(slot.id.birth) && !crdt::is_registry(cell.id)) {
        escrow_given_ += slot.value - std::min(slot.value, value);
      }
      value = std::max(value, slot.value);
    }
  }
}

void Checker::store_failed(std::uint32_t node) {
  processes_[node].failed = true;
}

void Checker::store_opened(std::uint32_t node) {
  processes_[node].failed = false;
}

// Network.

void Checker::sent(std::uint32_t from, std::uint32_t to, const crdt::Incarnation& receiver,
                   const crdt::Message& message) {
  if (const crdt::Delta* delta = delta_of(message)) {
    for (const crdt::Cell& cell : delta->cells) check_known(cell, "sends", from);
  }
  if (const auto* push = std::get_if<crdt::Push>(&message)) {
    auto& queue = pushed_[{push->pusher, receiver}];
    queue.push_back({push->upto, push->delta.cells});
    if (queue.size() > 64) queue.pop_front();
  }
  if (const auto* ack = std::get_if<crdt::Ack>(&message)) check_acknowledged(from, to, *ack);
}

void Checker::check_acknowledged(std::uint32_t from, std::uint32_t to, const crdt::Ack& ack) {
  auto incarnation = incarnations_.find(ack.receiver);
  if (incarnation == incarnations_.end() || incarnation->second.node != from) {
    fail(34, from, "acknowledges under an incarnation that is not its own");
  }
  auto at = pushed_.find({ack.pusher, ack.receiver});
  if (at == pushed_.end()) return;
  Process& process = processes_[from];
  const Image& image = nodes[from].disk->image;
  while (!at->second.empty() && at->second.front().upto <= ack.upto) {
    for (const crdt::Cell& cell : at->second.front().cells) {
      if (!incarnation->second.durable || !incarnation->second.current) break;
      // What has expired on either side is out of the stream; what lies in the future of this side
      // was refused, and comes by anti-entropy once it no longer does.
      if (process.refused.contains(cell.id)) continue;
      if (over(from, cell)) {
        // The same count may be sent once more, in a bucket that others have kept alive.
        for (const crdt::Slot& slot : cell.slots) {
          std::uint64_t& value = process.drained[{cell.id, slot.id}];
          if (cell.id.is_bucket()) value = std::max(value, slot.value);
        }
        continue;
      }
      if (nodes[to].engine != nullptr && over(to, cell)) continue;
      // So is a slot of a bucket that either side saw drained and reset.
      if (was_reset(from, cell) || (nodes[to].engine != nullptr && was_reset(to, cell))) continue;
      const std::optional<crdt::Cell> owned =
          nodes[to].engine == nullptr ? std::nullopt : replica(to).find(cell.id);
      std::uint64_t pushed = 0;
      std::uint64_t held = 0;
      for (const crdt::Slot& slot : cell.slots) {
        if (slot.id.writer != ack.pusher) continue;
        if (cell.id.is_bucket() && (!owned || owned->value_of(slot.id) == 0)) continue;
        auto drained = process.drained.find({cell.id, slot.id});
        if (drained != process.drained.end() && slot.value <= drained->second) continue;
        pushed = std::max(pushed, slot.value);
        held = std::max(held, image.value_of(cell.id, slot.id));
      }
      if (held < pushed) {
        Nanos now = nodes[from].engine->clock(0);
        fail(34, from,
             fmt::format("tells n{} that {} is durable here, with {}; on the disk is {}; here: {}; "
                         "there: {}",
                         to, name(cell.id), pushed, held, show(from, cell.id, now),
                         nodes[to].engine == nullptr ? "down" : show(to, cell.id, now)));
      }
    }
    at->second.pop_front();
  }
}

bool Checker::over(std::uint32_t node, const crdt::Cell& cell) const {
  Nanos floor = replica(node).floor();
  return cell.id.is_bucket() ? cell.bucket.expiry <= floor
                             : crdt::generation_of(cell.id.epoch).end() <= floor;
}

/// Some slot was born after `cell`, a bucket, was full again.
bool Checker::was_reset(std::uint32_t node, const crdt::Cell& cell) const {
  if (!cell.id.is_bucket()) return false;
  const std::optional<crdt::Cell> held = replica(node).find(cell.id);
  if (!held) return false;
  for (const crdt::Slot& slot : held->slots) {
    if (static_cast<Nanos>(slot.id.birth) >= cell.bucket.expiry) return true;
  }
  return false;
}

void Checker::delivering(std::uint32_t to, const crdt::Message& message) {
  Process& process = processes_[to];
  if (const crdt::Delta* delta = delta_of(message)) {
    for (const crdt::Cell& cell : delta->cells) {
      if (cell.id.is_bucket()) process.shared.insert(cell.id);
    }
  }
  process.floor_before = replica(to).floor();
  process.time_before = nodes[to].engine->clock(0);
  const auto* push = std::get_if<crdt::Push>(&message);
  if (push == nullptr) return;
  for (const crdt::Cell& cell : push->delta.cells) {
    Nanos first = cell.id.is_bucket() ? cell.bucket.touched : cell.id.epoch.start;
    if (first > process.time_before + replica(to).options().max_skew) {
      process.refused.insert(cell.id);
    }
  }
}

void Checker::delivered(std::uint32_t to, const crdt::Message& message) {
  const Process& process = processes_[to];
  if (replica(to).floor() != process.floor_before ||
      nodes[to].engine->clock(0) != process.time_before) {
    fail(14, to, "a message moved the floor or the clock");
  }
  if (const crdt::Delta* delta = delta_of(message)) {
    for (const crdt::Cell& cell : delta->cells) {
      const std::optional<crdt::Cell> held = replica(to).find(cell.id);
      if (held.has_value()) check_known(*held, "holds", to);
    }
  }
}

void Checker::watch_time(std::uint32_t node) {
  Process& process = processes_[node];
  Nanos time = nodes[node].engine->clock(0);
  Nanos floor = replica(node).floor();
  if (time < process.time || floor < process.floor) fail(11, node, "time or floor ran backwards");
  process.time = time;
  process.floor = floor;
}

void Checker::inspect(std::uint32_t node) {
  if (nodes[node].engine == nullptr) return;
  watch_time(node);
  Nanos floor = replica(node).floor();
  replica(node).for_each([&](const crdt::Cell& cell) {
    if (!crdt::valid(cell)) fail(4, node, name(cell.id) + " is malformed");
    if (!cell.id.is_bucket() && crdt::generation_of(cell.id.epoch).end() <= floor) {
      fail(12, node, name(cell.id) + " has expired and is there");
    }
    check_known(cell, "holds", node);
  });
}

// The end.

Nanos Checker::latest_floor() const {
  Nanos latest = 0;
  for (const NodeView& view : nodes) latest = std::max(latest, view.engine->replica().floor());
  return latest;
}

Nanos Checker::latest_time() const {
  Nanos latest = 0;
  for (const NodeView& view : nodes) latest = std::max(latest, view.engine->clock(0));
  return latest;
}

void Checker::expect_from_here() {
  expected_.clear();
  full_again_.clear();
  for (std::uint32_t n = 0; n < nodes.size(); ++n) {
    auto expect = [&](const crdt::Cell& cell) {
      auto [at, fresh] = expected_.try_emplace(cell.id, cell);
      if (!fresh) crdt::join(at->second, cell);
      if (!cell.id.is_bucket()) return;
      for (const crdt::Slot& slot : cell.slots) {
        auto& full = full_again_[{cell.id, slot.id}];
        full = std::max(full, std::pair(slot.value, cell.bucket.expiry));
      }
    };
    replica(n).for_each(expect);
    // What it admitted and has not made durable yet may still move to another incarnation of this
    // process: converged() looks at the books as they are then.
  }
}

bool Checker::converged() {
  Nanos floor = latest_floor();
  Nanos now = latest_time();
  auto settled = [&](const crdt::Cell& cell) {
    return cell.id.is_bucket() ? cell.bucket.expiry > now
                               : crdt::generation_of(cell.id.epoch).end() > floor;
  };
  std::vector<std::size_t> live(nodes.size(), 0);
  bool equal = true;
  for (std::uint32_t n = 0; n < nodes.size(); ++n) {
    replica(n).for_each([&](const crdt::Cell& cell) {
      if (!settled(cell)) return;
      ++live[n];
      if (n == 0 || !equal) return;
      const std::optional<crdt::Cell> other = replica(0).find(cell.id);
      equal = other.has_value() && *other == cell;
    });
    equal &= live[n] == live[0];
    difference_ = fmt::format("n0 and n{} differ", n);
    if (!equal && n > 0 && replica(n).digest() == replica(0).digest()) {
      fail(38, n, "equal digests of unequal states");
    }
    if (!equal) return false;
  }
  for (const auto& [id, cell] : expected_) {
    if (!settled(cell)) continue;
    const std::optional<crdt::Cell> held = replica(0).find(id);
    std::uint64_t newest = 0;
    if (held.has_value()) {
      for (const crdt::Slot& slot : held->slots) newest = std::max(newest, slot.id.birth);
    }
    for (const crdt::Slot& slot : cell.slots) {
      // A bucket that was full again by now, or when another slot was born, has been forgotten.
      if (id.is_bucket()) {
        Nanos full = full_again_[{id, slot.id}].second;
        if (full <= now || full <= static_cast<Nanos>(newest)) continue;
      }
      std::uint64_t value = !held ? 0 : held->value_of(slot.id);
      if (value >= slot.value) continue;
      // Its owner may still have it in hand: not yet drained or not yet committed.
      difference_ = fmt::format("{}: slot of {} has {} of {}", name(id), name(slot.id.writer),
                                value, slot.value);
      return false;
    }
  }
  for (std::uint32_t n = 0; n < nodes.size(); ++n) {
    for (const auto& [id, own] : processes_[n].windows) {
      if (crdt::generation_of(id.epoch).end() <= floor || own.total == own.left) continue;
      const std::optional<crdt::Cell> held = replica(0).find(id);
      std::uint64_t value = !held ? 0 : held->value_of({replica(n).incarnation(), 0});
      if (value >= own.total - own.left && value - (own.total - own.left) <= reserve_of(id)) {
        continue;
      }
      difference_ =
          fmt::format("{}: n{} admitted {}, {} is known", name(id), n, own.total - own.left, value);
      return false;
    }
  }
  return true;
}

void Checker::at_rest(const std::vector<std::vector<bool>>& linked, bool same_rules) {
  for (std::uint32_t n = 0; n < nodes.size(); ++n) {
    inspect(n);
    if (!processes_[n].waiting.empty()) fail(37, n, "an answer still waits");
    std::vector<crdt::PeerStatus> peers = replica(n).peers();
    for (std::uint32_t i = 0; i < peers.size(); ++i) {
      std::uint32_t other = i < n ? i : i + 1;
      if (!linked[n][other]) continue;
      if (!peers[i].incarnation) fail(37, n, fmt::format("no session to n{}", other));
      if (peers[i].unacked != 0) {
        fail(37, n, fmt::format("n{} has not acknowledged {} stamps", other, peers[i].unacked));
      }
    }
  }
  if (!same_rules || series_full_) return;
  // Equal states and equal times: every peek is answered alike.
  Nanos then = latest_time() + kMillisecond;
  std::set<crdt::SeriesId> seen;
  auto lost = [&](std::uint32_t n) { return replica(n).options().lost.any(); };
  for (std::uint32_t u = 0; u < 40; ++u) {
    std::string user = fmt::format("u{}", u);
    std::string path = fmt::format("/p{}", u % 6);
    std::vector<Entry> entries{{"user", user}, {"path", path}, {"method", "POST"}};
    Request request{"sim", entries, 0};
    Decision first;
    // Past the engines' clocks, which may wait for their disks.
    nodes[0].engine->limiter().check(request, then, first);
    for (std::uint32_t n = 1; n < nodes.size(); ++n) {
      Decision other;
      nodes[n].engine->limiter().check(request, then, other);
      for (std::size_t i = 0; i < first.statuses.size(); ++i) {
        const Rule& rule = nodes[n].engine->limiter().rules()->rules()[first.statuses[i].rule];
        // Rights are each node's own; and of a reserve others know what is ahead. One whose clock
        // was set back denies where it may have lost counts.
        if (rule.enforcement == Enforcement::escrow || rule.durability == Durability::reserve) {
          continue;
        }
        if (rule.on_failure == OnFailure::closed && (lost(0) || lost(n))) continue;
        if (other.statuses[i].remaining == first.statuses[i].remaining &&
            other.statuses[i].allowed == first.statuses[i].allowed) {
          continue;
        }
        fail(16, n,
             fmt::format("rule {}: {} left here, {} at n0, with equal states at equal times",
                         first.statuses[i].rule, other.statuses[i].remaining,
                         first.statuses[i].remaining));
      }
    }
  }
}

}  // namespace weir::sim
