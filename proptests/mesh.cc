#include "mesh.h"

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <optional>
#include <sstream>

#include "generators.h"

namespace weir::laws {
namespace {

constexpr Nanos kPump = 50 * kMillisecond;

template <typename Value>
std::string text(const Value& value) {
  std::ostringstream out;
  showValue(value, out);
  return out.str();
}

const crdt::Delta* delta_of(const crdt::Message& message) {
  if (const auto* push = std::get_if<crdt::Push>(&message)) return &push->delta;
  if (const auto* repair = std::get_if<crdt::Repair>(&message)) return &repair->delta;
  return nullptr;
}

/// With WEIR_TRACE set in the environment, a run tells what travels.
void trace(Nanos now, const char* what, std::size_t from, std::size_t to,
           const crdt::Message& message) {
  static const bool on = std::getenv("WEIR_TRACE") != nullptr;
  if (!on) return;
  static const char* const names[] = {"push",   "ack",    "offer",          "inventory",
                                      "repair", "rights", "rejoin request", "rejoin confirmation"};
  std::cerr << (now - kStart) / kMicrosecond << " us: " << what << ' ' << names[message.index()]
            << ' ' << from << " -> " << to;
  if (const auto* push = std::get_if<crdt::Push>(&message)) {
    std::cerr << " (" << push->after << ", " << push->upto << (push->base ? "] base of " : "] of ")
              << text(push->pusher);
  }
  if (const auto* ack = std::get_if<crdt::Ack>(&message)) {
    std::cerr << " of " << text(ack->pusher) << " upto " << ack->upto << " by "
              << text(ack->receiver);
  }
  if (const crdt::Delta* delta = delta_of(message)) {
    for (const crdt::Cell& cell : delta->cells) std::cerr << ' ' << text(cell);
  }
  std::cerr << '\n';
}

}  // namespace

Mesh::Mesh(MeshOptions options)
    : options_(std::move(options)), now_(kStart), random_(options_.seed) {
  std::size_t n = options_.nodes;
  nodes_.resize(n);
  cut_.assign(n, std::vector<char>(n, 0));
  connected_.assign(n, std::vector<char>(n, 1));
  for (std::size_t i = 0; i < n; ++i) members_.push_back({"r" + std::to_string(i), "n"});
  for (std::size_t i = 0; i < n; ++i) boot(i);
}

void Mesh::at(Nanos time, std::function<void()> act) {
  events_.push({time, ++next_event_, std::move(act)});
}

Nanos Mesh::draw(Nanos low, Nanos high) {
  if (high <= low) return low;
  return low + static_cast<Nanos>(random_() % static_cast<std::uint64_t>(high - low + 1));
}

bool Mesh::roll(int percent) {
  return percent > 0 && draw(0, 99) < percent;
}

crdt::PeerIndex Mesh::index(std::size_t node, std::size_t other) const {
  return static_cast<crdt::PeerIndex>(other < node ? other : other - 1);
}
std::size_t Mesh::peer(std::size_t node, crdt::PeerIndex of) const {
  return of < node ? of : of + 1;
}

// Start and end of a node.

void Mesh::boot(std::size_t i) {
  Node& node = nodes_[i];
  if (node.replica != nullptr) return;
  crdt::ReplicaOptions replica;
  replica.self = members_[i];
  replica.incarnation = {i + 1, ++incarnations_};
  for (std::size_t j = 0; j < nodes_.size(); ++j) {
    if (j != i) replica.peers.push_back(members_[j]);
  }
  replica.sync_interval = options_.sync_interval;
  replica.anti_entropy_interval = options_.anti_entropy_interval;
  replica.seed = options_.seed + i;
  if (options_.seed % 2 == 0) replica.repair_piece = 1 + options_.seed / 2 % 4;
  if (options_.seed % 3 == 0) replica.enter_piece = 1 + options_.seed / 3 % 4;
  node.replica = std::make_unique<crdt::Replica>(replica, options_.memory_only);
  ++node.boots;
  node.own.clear();
  node.queued.clear();
  node.committing = false;
  node.stalled = false;
  node.undrained.clear();
  node.answers.clear();
  LimiterOptions limiter;
  if (options_.rules != nullptr) {
    limiter.replicated = true;
    limiter.incarnation = replica.incarnation;
    std::vector<crdt::Shareholder> holders;
    for (std::size_t j = 0; j < nodes_.size(); ++j) {
      holders.push_back({members_[j], {{0, options_.weights.empty() ? 1 : options_.weights[j]}}});
    }
    limiter.shares = std::make_shared<const crdt::ShareTable>(std::move(holders));
    limiter.self = members_[i];
    node.limiter = std::make_unique<Limiter>(options_.rules, limiter);
    // No two sweep in step, nor with the full second.
    node.next_sweep =
        now_ + static_cast<Nanos>(crdt::mix64(options_.seed, i) %
                                  static_cast<std::uint64_t>(options_.sweep_interval));
  }
  crdt::Delta held;
  for (const auto& [id, cell] : node.disk) held.cells.push_back(cell);
  held.members = node.disk_members;
  node.replica->restore(held, now_);
  if (node.limiter != nullptr) {
    EscrowAgentOptions escrow;
    escrow.shares = limiter.shares;
    escrow.rejoin_interval = options_.anti_entropy_interval / 5;
    escrow.quiet = options_.anti_entropy_interval * 6 / 5;
    node.agent = std::make_unique<EscrowAgent>(escrow, *node.replica, *node.limiter);
    node.agent->begin(!options_.memory_only, node.reserved, false, now_);
  }
  dispatch(i);
  for (std::size_t j = 0; j < nodes_.size(); ++j) {
    if (j != i && connected_[i][j] && up(j)) connect(i, j);
  }
  node.next_pump = now_ + draw(0, kPump);
  std::uint64_t boots = node.boots;
  auto beat = std::make_shared<std::function<void()>>();
  std::weak_ptr<std::function<void()>> again = beat;
  *beat = [this, i, boots, again] {
    if (nodes_[i].boots != boots || !up(i)) return;
    pump(i);
    if (auto self = again.lock()) at(now_ + kPump, [self] { (*self)(); });
  };
  at(node.next_pump, [beat] { (*beat)(); });
}

std::size_t Mesh::hand_over(std::size_t i) {
  nodes_[i].agent->hand_over(now_);
  std::size_t windows = 0;
  for (std::size_t given : nodes_[i].agent->handed_over()) windows += given;
  return windows;
}

void Mesh::crash(std::size_t i) {
  if (!up(i)) return;
  Node& node = nodes_[i];
  node.reserved = now_ + kSecond / 2;
  node.answers.clear();
  node.agent.reset();
  node.replica.reset();
  node.limiter.reset();
  writes_lost_ += node.queued.size();
  restarts_with_news_ += in_flight_ > 0;
  node.queued.clear();
  node.own.clear();
  for (std::size_t j = 0; j < nodes_.size(); ++j) {
    if (j != i && up(j)) nodes_[j].replica->peer_down(index(j, i));
  }
}

void Mesh::lose_disk(std::size_t i) {
  if (up(i)) return;
  lost_disks_.insert(i);
  nodes_[i].disk.clear();
  nodes_[i].disk_members.clear();
  nodes_[i].reserved = 0;
  forgive(i);
}

void Mesh::copy_disk(std::size_t i) {
  Node& node = nodes_[i];
  node.copy = node.disk;
  node.copy_members = node.disk_members;
  node.copy_reserved = up(i) ? now_ + kSecond / 2 : node.reserved;
}

void Mesh::restore_disk(std::size_t i) {
  if (up(i)) return;
  Node& node = nodes_[i];
  node.disk = node.copy;
  node.disk_members = node.copy_members;
  node.reserved = node.copy_reserved;
  forgive(i);
}

/// Somebody else has a row of this node that its disk has not.
bool Mesh::told_of_more(std::size_t i) const {
  auto more = [&](const crdt::Cell& cell) {
    auto held = nodes_[i].disk.find(cell.id);
    return std::any_of(cell.slots.begin(), cell.slots.end(), [&](const crdt::Slot& slot) {
      return !cell.id.is_bucket() && slot.id.birth != 0 && slot.id.writer.hi == i + 1 &&
             (held == nodes_[i].disk.end() || held->second.value_of(slot.id) < slot.value);
    });
  };
  for (std::size_t j = 0; j < nodes_.size(); ++j) {
    if (j == i) continue;
    for (const auto& [id, cell] : nodes_[j].disk) {
      if (more(cell)) return true;
    }
    bool known = false;
    if (up(j)) nodes_[j].replica->for_each([&](const crdt::Cell& cell) { known |= more(cell); });
    if (known) return true;
  }
  return false;
}

/// What no disk and no node knows that a node admitted, nobody can respect; but a member that hears
/// that there is more than its disk held, has to take everything as used.
void Mesh::forgive(std::size_t changed) {
  for (auto& [id, spent] : spent_) {
    std::map<crdt::SlotId, std::uint64_t> known;
    auto learn = [&](const std::optional<crdt::Cell>& cell) {
      if (!cell) return;
      for (const crdt::Slot& slot : cell->slots) {
        if (slot.id.birth != crdt::kUsedRow) continue;
        known[slot.id] = std::max(known[slot.id], slot.value);
      }
    };
    for (std::size_t j = 0; j < nodes_.size(); ++j) {
      auto on_disk = nodes_[j].disk.find(id);
      if (on_disk != nodes_[j].disk.end()) learn(on_disk->second);
      if (up(j)) learn(nodes_[j].replica->find(id));
    }
    std::map<std::size_t, std::uint64_t> sums;
    for (const auto& [slot, value] : known) sums[slot.writer.hi - 1] += value;
    for (auto& [node, admitted] : spent.by_node) {
      // Within the time that was reserved on the disk one peer's word is enough.
      bool soon = node == changed && now_ <= nodes_[node].reserved;
      if (!soon && told_of_more(node)) continue;
      std::uint64_t unknown = admitted - std::min(admitted, sums[node]);
      spent.forgiven += unknown;
      spent.units -= unknown;
      admitted -= unknown;
    }
  }
}

void Mesh::reincarnate(std::size_t i) {
  if (!up(i)) return;
  Node& node = nodes_[i];
  crdt::Incarnation fresh{i + 1, ++incarnations_};
  crdt::Incarnation old = node.replica->incarnation();
  restarts_with_news_ += in_flight_ > 0;
  // As a driver does: what was written under the old incarnation is durable first.
  if (!options_.memory_only) commit(i, node.queued.size());
  dispatch(i);
  if (!options_.memory_only) commit(i, node.queued.size());
  node.replica->reincarnate(fresh, options_.memory_only);
  for (auto& [cell, value] : node.own) {
    const std::optional<crdt::Cell> held = node.replica->find(cell);
    value -= !held ? 0 : std::min(value, held->value_of({old, 0}));
  }
  if (node.limiter != nullptr) {
    node.limiter->replica_side().rebase(
        fresh, [&](const crdt::CellId& id, const crdt::SlotId& slot) {
          const std::optional<crdt::Cell> held = node.replica->find(id);
          return !held ? std::uint64_t{0} : held->value_of(slot);
        });
    node.agent->reset(false, now_);
  }
  for (std::size_t j = 0; j < nodes_.size(); ++j) {
    if (j == i || !up(j)) continue;
    nodes_[j].replica->peer_down(index(j, i));
    if (connected_[i][j]) connect(i, j);
  }
  dispatch(i);
}

void Mesh::connect(std::size_t a, std::size_t b) {
  connected_[a][b] = connected_[b][a] = 1;
  if (!up(a) || !up(b)) return;
  nodes_[a].replica->peer_up(index(a, b), nodes_[b].replica->incarnation(), now_);
  nodes_[b].replica->peer_up(index(b, a), nodes_[a].replica->incarnation(), now_);
  dispatch(a);
  dispatch(b);
}

void Mesh::disconnect(std::size_t a, std::size_t b) {
  connected_[a][b] = connected_[b][a] = 0;
  if (up(a)) nodes_[a].replica->peer_down(index(a, b));
  if (up(b)) nodes_[b].replica->peer_down(index(b, a));
}

void Mesh::cut(std::size_t a, std::size_t b, bool both) {
  cut_[a][b] = 1;
  if (both) cut_[b][a] = 1;
}

void Mesh::mend(std::size_t a, std::size_t b) {
  cut_[a][b] = cut_[b][a] = 0;
}

void Mesh::stall(std::size_t i, bool stalled) {
  nodes_[i].stalled = stalled;
  if (!stalled) begin_commit(i);
}

void Mesh::faults(int loss_percent, int duplicate_percent) {
  options_.loss_percent = loss_percent;
  options_.duplicate_percent = duplicate_percent;
}

// Work.

std::uint64_t Mesh::own_total(std::size_t i, const crdt::CellId& cell) const {
  auto at = nodes_[i].own.find(cell);
  return at == nodes_[i].own.end() ? 0 : at->second;
}

void Mesh::note_own(const crdt::CellId& cell, const crdt::SlotId& slot, std::uint64_t value) {
  if (!options_.memory_only) return;
  std::uint64_t& ever = durable_[{cell, slot}];
  ever = std::max(ever, value);
}

void Mesh::add(std::size_t i, const crdt::CellId& cell, std::uint64_t units, bool urgent) {
  if (!up(i)) return;
  Node& node = nodes_[i];
  std::uint64_t& total = node.own[cell];
  total = add_saturated(total, units);
  std::uint64_t& all = counted_[cell];
  all = add_saturated(all, units);
  note_own(cell, {node.replica->incarnation(), 0}, total);
  crdt::OwnCount count{cell, 0, total, {}, urgent};
  node.replica->count({&count, 1}, now_);
  dispatch(i);
}

Decision Mesh::check(std::size_t i, const std::string& key, std::uint64_t hits) {
  Node& node = nodes_[i];
  std::vector<Entry> entries{{"key", key}};
  Request request{"api", entries, hits};
  Decision decision = node.limiter->check(request, now_);
  if (decision.allowed && !decision.statuses.empty() && hits > 0) {
    Admission admission;
    admission.at = now_;
    admission.node = i;
    admission.incarnation = node.replica->incarnation();
    admission.series = node.limiter->series_of(0, request);
    admission.units = mul_saturated(options_.rules->rules()[0].cost_of(request), hits);
    node.undrained.push_back(admissions_.size());
    admissions_.push_back(admission);
  }
  return decision;
}

Decision Mesh::spend(std::size_t i, const std::string& key, std::uint64_t hits) {
  Node& node = nodes_[i];
  std::vector<Entry> entries{{"key", key}};
  Request request{"api", entries, hits};
  Decision decision = node.limiter->check(request, now_);
  if (!decision.allowed || decision.statuses.empty() || hits == 0) return decision;
  const Rule& rule = options_.rules->rules()[0];
  crdt::SeriesId series = node.limiter->series_of(0, request);
  WindowShape shape = window_shape(rule, series);
  crdt::CellId cell{series, shape.epoch(shape.index(now_))};
  std::uint64_t units = mul_saturated(rule.cost_of(request), hits);
  if (decision.wants_commit) {
    drain(i);
    dispatch(i);
    node.answers.push_back({node.replica->written(), cell, units});
  } else {
    admit(i, cell, units);
  }
  return decision;
}

void Mesh::admit(std::size_t i, const crdt::CellId& cell, std::uint64_t units) {
  Spent& spent = spent_[cell];
  spent.units += units;
  spent.by_node[i] += units;
}

bool Mesh::knows(std::size_t i, const Admission& admission) const {
  bool own = admission.node == i && admission.incarnation == nodes_[i].replica->incarnation();
  if (admission.upto == 0) return own;
  crdt::CellId id{admission.series, crdt::kBucketEpoch};
  auto durable = durable_.find({id, admission.slot});
  if (own && (durable == durable_.end() || durable->second < admission.upto)) return true;
  const std::optional<crdt::Cell> cell = nodes_[i].replica->find(id);
  return cell.has_value() && cell->value_of(admission.slot) >= admission.upto;
}

void Mesh::drain(std::size_t i) {
  Node& node = nodes_[i];
  std::vector<crdt::OwnCount> counts;
  node.limiter->replica_side().drain(counts, ~std::size_t{0});
  if (counts.empty()) return;
  for (const crdt::OwnCount& count : counts) {
    crdt::SlotId slot{node.replica->incarnation(), count.birth};
    note_own(count.cell, slot, count.value);
    // What this total has that the last one had not are the latest admissions of the series.
    std::uint64_t upto = count.value;
    for (auto each = node.undrained.rbegin(); each != node.undrained.rend(); ++each) {
      Admission& admission = admissions_[*each];
      if (admission.series != count.cell.series) continue;
      admission.slot = slot;
      admission.upto = upto;
      upto -= std::min(upto, admission.units);
    }
  }
  node.undrained.clear();
  node.replica->count(counts, now_);
}

void Mesh::pump(std::size_t i) {
  Node& node = nodes_[i];
  if (node.limiter != nullptr) {
    bool sweep = now_ >= node.next_sweep;
    Nanos floor = now_ - node.replica->options().max_skew;
    if (sweep) {
      node.limiter->sweep(floor);
      node.next_sweep = now_ + options_.sweep_interval;
    }
    node.agent->pump(now_);
    dispatch(i);
    if (node.agent->tainted()) return reincarnate(i);
    drain(i);
    dispatch(i);
    if (sweep) node.replica->retire_buckets(floor);
  }
  node.replica->tick(now_);
  dispatch(i);
}

void Mesh::dispatch(std::size_t i) {
  Node& node = nodes_[i];
  crdt::Outbox out = node.replica->take();
  for (crdt::Write& write : out.writes) node.queued.push_back(std::move(write));
  begin_commit(i);
  for (const crdt::ResetBucket& was : out.reset_buckets) {
    const std::optional<crdt::Cell> cell = node.replica->find(was.id);
    if (!cell || node.limiter == nullptr) continue;
    node.limiter->replica_side().reset(*cell, was.own);
    ++resets_;
  }
  for (const crdt::OwnCount& count : out.durable) {
    if (node.agent != nullptr) node.agent->mark_durable(count);
  }
  for (const crdt::CellId& id : out.changed) {
    const std::optional<crdt::Cell> cell = node.replica->find(id);
    if (!cell || (node.agent != nullptr && node.agent->changed(id))) continue;
    if (node.limiter != nullptr) node.limiter->replica_side().absorb(*cell);
  }
  for (crdt::Envelope& envelope : out.messages) send(i, peer(i, envelope.to), envelope.message);
  if (node.agent != nullptr) {
    for (crdt::Envelope& envelope : node.agent->take()) {
      send(i, peer(i, envelope.to), envelope.message);
    }
  }
  check_alarms(i);
}

void Mesh::check_alarms(std::size_t i) {
  if (nodes_[i].replica->take_alarms().empty()) return;
  broken_.push_back("31: a node was told that somebody else counts under its incarnation");
}

void Mesh::flush(std::size_t i) {
  nodes_[i].replica->flush(now_);
  dispatch(i);
}

void Mesh::advance(Nanos time) {
  Nanos end = now_ + time;
  while (!events_.empty() && events_.top().at <= end) {
    Event event = events_.top();
    events_.pop();
    now_ = event.at;
    event.act();
  }
  now_ = end;
}

// Disks.

void Mesh::begin_commit(std::size_t i) {
  Node& node = nodes_[i];
  if (node.committing || node.stalled || node.queued.empty()) return;
  node.committing = true;
  std::size_t writes = node.queued.size();
  std::uint64_t boots = node.boots;
  at(now_ + draw(0, options_.max_commit), [this, i, writes, boots] {
    if (nodes_[i].boots != boots || !up(i)) return;
    nodes_[i].committing = false;
    if (nodes_[i].stalled) return;
    commit(i, std::min(writes, nodes_[i].queued.size()));
    begin_commit(i);
  });
}

void Mesh::commit(std::size_t i, std::size_t writes) {
  if (writes == 0) return;
  Node& node = nodes_[i];
  crdt::WriteId last = 0;
  for (std::size_t w = 0; w < writes; ++w) {
    remember(i, node.queued[w].delta);
    last = node.queued[w].id;
  }
  node.queued.erase(node.queued.begin(), node.queued.begin() + static_cast<std::ptrdiff_t>(writes));
  node.replica->persisted(last, now_);
  for (const Node::Answer& answer : node.answers) {
    if (answer.after <= last) admit(i, answer.cell, answer.units);
  }
  std::erase_if(node.answers, [&](const Node::Answer& each) { return each.after <= last; });
  dispatch(i);
}

void Mesh::remember(std::size_t i, const crdt::Delta& delta) {
  Node& node = nodes_[i];
  node.disk_members.insert(delta.members.begin(), delta.members.end());
  for (const crdt::Cell& cell : delta.cells) {
    auto [held, fresh] = node.disk.try_emplace(cell.id);
    if (fresh) held->second.id = cell.id;
    crdt::join(held->second, cell);
    for (const crdt::Slot& slot : cell.slots) {
      if (slot.id.writer.hi != i + 1) continue;
      std::uint64_t& ever = durable_[{cell.id, slot.id}];
      ever = std::max(ever, slot.value);
    }
  }
}

// Network.

void Mesh::send(std::size_t from, std::size_t to, const crdt::Message& message) {
  ++sent_[message.index()];
  trace(now_, "send", from, to, message);
  watch(from, to, message);
  if (!up(to) || !connected_[from][to]) return;
  auto content = std::make_shared<const crdt::Message>(message);
  int copies = roll(options_.duplicate_percent) ? 2 : 1;
  repeated_ += copies == 2;
  std::uint64_t number = ++next_message_;
  for (int copy = 0; copy < copies; ++copy) {
    if (cut_[from][to] || roll(options_.loss_percent)) {
      ++lost_;
      continue;
    }
    crdt::Incarnation sender = nodes_[from].replica->incarnation();
    std::uint64_t boots = nodes_[to].boots;
    bool news = delta_of(message) != nullptr;
    in_flight_ += news;
    at(now_ + draw(options_.min_delay, options_.max_delay),
       [this, from, to, content, sender, boots, news, number] {
         in_flight_ -= news;
         if (!up(to) || nodes_[to].boots != boots || !connected_[from][to]) return;
         std::uint64_t& newest = newest_taken_[{from, to}];
         overtaken_ += number < newest;
         newest = std::max(newest, number);
         trace(now_, "take", from, to, *content);
         if (nodes_[to].agent != nullptr) {
           nodes_[to].agent->heard(index(to, from), sender, now_);
           nodes_[to].agent->receive(index(to, from), sender, *content, now_);
         }
         nodes_[to].replica->receive(index(to, from), sender, *content, now_);
         dispatch(to);
       });
  }
}

/// What a node says must be true when it says it.
void Mesh::watch(std::size_t from, std::size_t to, const crdt::Message& message) {
  const crdt::Replica& sender = *nodes_[from].replica;
  if (const crdt::Delta* delta = delta_of(message)) watch_values(*delta);
  if (!up(to)) return;
  if (const auto* push = std::get_if<crdt::Push>(&message)) {
    Stream& stream = pushed_[{push->pusher, nodes_[to].replica->incarnation()}];
    stream.unacked.push_back({push->upto, push->after < stream.upto, push->delta});
    stream.upto = std::max(stream.upto, push->upto);
  }
  const auto* ack = std::get_if<crdt::Ack>(&message);
  if (ack == nullptr || ack->receiver != sender.incarnation()) return;
  // A bucket that had drained is forgotten, and without disks nothing tells that it was there.
  auto& pushes = pushed_[{ack->pusher, ack->receiver}].unacked;
  auto held_value = [&](const crdt::CellId& id, const crdt::SlotId& slot) -> std::uint64_t {
    if (options_.memory_only) {
      const std::optional<crdt::Cell> cell = sender.find(id);
      return !cell ? 0 : cell->value_of(slot);
    }
    auto held = nodes_[from].disk.find(id);
    return held == nodes_[from].disk.end() ? 0 : held->second.value_of(slot);
  };
  for (const Pushed& push : pushes) {
    if (push.upto > ack->upto) continue;
    for (const crdt::Cell& cell : push.delta.cells) {
      Nanos end =
          cell.id.is_bucket() ? cell.bucket.expiry : crdt::generation_of(cell.id.epoch).end();
      if (cell.id.is_bucket() && options_.memory_only) continue;
      if (end <= now_ - kSecond + kPump) continue;  // late news is acknowledged and dropped
      for (const crdt::Slot& slot : cell.slots) {
        if (held_value(cell.id, slot.id) >= slot.value) continue;
        // It may be the first that arrived, and its stamps are those of the pusher's own slots.
        const bool owner_runs = std::any_of(nodes_.begin(), nodes_.end(), [&](const Node& node) {
          return node.replica != nullptr && node.replica->incarnation() == slot.id.writer;
        });
        // Nor is a relay believed that runs ahead of an owner who speaks for itself.
        if (slot.id.writer != ack->pusher && (push.again || owner_runs)) {
          ++relayed_later_;
          continue;
        }
        if (cell.id.is_bucket() && born_since(cell.id, end)) {
          ++acknowledged_drained_;
          continue;
        }
        broken_.push_back("34: acknowledged but not durable: " + text(cell));
      }
    }
  }
  std::erase_if(pushes, [&](const Pushed& push) { return push.upto <= ack->upto; });
}

/// True if the bucket was reset when what ended at `end` had drained: that is forgotten then.
bool Mesh::born_since(const crdt::CellId& bucket, Nanos end) const {
  auto at = durable_.lower_bound({bucket, {}});
  for (; at != durable_.end() && at->first.first == bucket; ++at) {
    if (at->first.second.birth >= static_cast<std::uint64_t>(end)) return true;
  }
  return false;
}

void Mesh::watch_values(const crdt::Delta& delta) {
  for (const crdt::Cell& cell : delta.cells) {
    for (const crdt::Slot& slot : cell.slots) {
      // Without disks nobody noted the rows that the agent writes by itself.
      if (options_.memory_only && crdt::is_registry(cell.id)) continue;
      auto ever = durable_.find({cell.id, slot.id});
      if (ever != durable_.end() && ever->second >= slot.value) continue;
      broken_.push_back("29: shown above what its owner had on disk: " + text(cell));
    }
  }
}

// Rest.

bool Mesh::at_rest() const {
  if (in_flight_ > 0) return false;
  std::optional<std::uint64_t> digest;
  for (std::size_t i = 0; i < nodes_.size(); ++i) {
    const Node& node = nodes_[i];
    if (node.replica == nullptr || !node.queued.empty() || !node.undrained.empty()) return false;
    if (digest.has_value() && *digest != node.replica->digest()) return false;
    digest = node.replica->digest();
    std::vector<crdt::PeerStatus> peers = node.replica->peers();
    for (std::size_t p = 0; p < peers.size(); ++p) {
      const crdt::PeerStatus& status = peers[p];
      std::size_t j = peer(i, static_cast<crdt::PeerIndex>(p));
      if (cut_[i][j] || cut_[j][i] || !connected_[i][j]) continue;
      if (status.unacked > 0 || !status.agrees) return false;
    }
  }
  return true;
}

bool Mesh::settle(Nanos patience, bool keep_cuts) {
  faults(0, 0);
  for (std::size_t i = 0; i < nodes_.size(); ++i) {
    boot(i);
    stall(i, false);
  }
  for (std::size_t i = 0; i < nodes_.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      if (keep_cuts) continue;
      mend(i, j);
      if (!connected_[i][j]) connect(i, j);
    }
  }
  Nanos end = now_ + patience;
  advance(500 * kMillisecond);
  for (;;) {
    if (at_rest()) {
      // An offer from before, and the inventory that answers it, may still wake somebody.
      advance(2 * options_.max_delay);
      if (at_rest()) return true;
    }
    if (now_ >= end) return false;
    advance(250 * kMillisecond);
  }
}

std::map<crdt::CellId, crdt::Cell> Mesh::state(std::size_t i) const {
  std::map<crdt::CellId, crdt::Cell> cells;
  nodes_[i].replica->for_each([&](const crdt::Cell& cell) { cells.emplace(cell.id, cell); });
  return cells;
}

}  // namespace weir::laws
