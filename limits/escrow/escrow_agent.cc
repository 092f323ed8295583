#include <weir/limits/escrow/escrow_agent.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

namespace weir {
namespace {

/// A peer that has no more than this long to answer is not asked for the next window.
/// An incarnation's share begins with windows that start so many times the tolerated skew after it
/// did; and no incarnation gives of those that start later than that.
constexpr Nanos kFenceSkews = 2;
constexpr Nanos kLeadShare = 2;  // of max_skew
constexpr std::uint32_t kReserveAttempts = 32;

std::uint64_t saturated(Uint128 units) {
  constexpr auto kMost = std::numeric_limits<std::uint64_t>::max();
  return units > kMost ? kMost : static_cast<std::uint64_t>(units);
}

}  // namespace

std::uint64_t digest_of_incarnations(const crdt::Replica& replica, const crdt::Member& member,
                                     const crdt::Incarnation& but, Nanos at) {
  std::uint64_t sum = 0;
  const auto& members = replica.members();
  // Windows that are over are left out: either side may have forgotten them.
  replica.for_each_with_rows([&](const crdt::Cell& cell) {
    if (cell.id.epoch.expiry <= at) return;
    for (const crdt::Slot& slot : cell.slots) {
      if (slot.id.birth == 0 || slot.id.writer == but) continue;
      auto owner = members.find(slot.id.writer);
      if (owner == members.end() || owner->second != member) continue;
      std::uint64_t hash = crdt::mix64(crdt::cell_key(cell.id), slot.id.writer.hi);
      hash = crdt::mix64(crdt::mix64(hash, slot.id.writer.lo), slot.id.birth);
      sum += crdt::mix64(hash, slot.value);
    }
  });
  return sum;
}

EscrowAgent::EscrowAgent(EscrowAgentOptions options, crdt::Replica& replica, Limiter& limiter)
    : options_(std::move(options)),
      replica_(replica),
      limiter_(limiter),
      side_(limiter.replica_side()) {
  peers_.resize(replica_.options().peers.size());
  rules_changed();
}

void EscrowAgent::rules_changed() {
  std::shared_ptr<const RuleSet> rules = limiter_.rules();
  enabled_ |= std::any_of(rules->rules().begin(), rules->rules().end(), [](const Rule& rule) {
    return rule.enforcement == Enforcement::escrow ||
           (rule.enforcement == Enforcement::home && rule.on_failure == OnFailure::closed);
  });
}

// Incarnations.

void EscrowAgent::begin(bool disk, Nanos time_floor, bool set_back, Nanos now,
                        std::span<const crdt::Incarnation> boots) {
  grant_state_ = {};
  grant_state_.ahead = kFenceSkews * replica_.options().max_skew;
  grant_state_.disk = disk;
  began_ = now_ = now;
  time_floor_ = time_floor;
  may_take_over_ = disk_ = disk;
  quick_ = disk && now <= time_floor && !set_back;
  taking_over_ = taken_over_ = registered_ = tainted_ = false;
  for (Peer& peer : peers_) peer.confirmed = false;
  register_incarnation(now);
  if (boot_fence_ != kNever) return;  // memory knows what was counted since
  boot_fence_ = now + kFenceSkews * replica_.options().max_skew;
  elder_counts_ = replica_.counters().elder_counts;
  elder_rows_at_boot_ = replica_.counters().elder_rows;
  // What the disk says. Peers have told this incarnation nothing yet, but perhaps the one before
  // it, of one that wrote to another disk.
  for (const crdt::CellId& id : {registry_before_, registry_}) {
    const std::optional<crdt::Cell> cell = replica_.find(id);
    if (!disk || !cell) continue;
    for (const crdt::Slot& slot : cell->slots) {
      if (std::find(boots.begin(), boots.end(), slot.id.writer) == boots.end()) {
        disk_lacks_ |= slot.id.birth == crdt::kFenceRow;
      } else if (slot.id.birth == crdt::kCountsRow) {
        counts_row_ = std::max(counts_row_, slot.value);
      }
    }
  }
  if (counts_row_ != 0) disk_lacks_ = false;  // that one took it into account
}

void EscrowAgent::reset(bool stopped, Nanos now) {
  grant_state_.stopped = stopped;
  may_take_over_ = false;
  taking_over_ = taken_over_ = registered_ = tainted_ = false;
  for (Peer& peer : peers_) peer.confirmed = false;
  register_incarnation(now);
}

void EscrowAgent::register_incarnation(Nanos now) {
  came(now);
  grant_state_.open = false;
  next_rejoin_ = now;
  elder_rows_ = replica_.counters().elder_rows;
  written_ = counts_written_ = false;
  newest_ = 0;
  previous_ = {};
  registry_ = crdt::registry_cell(self(), now);
  registry_before_ = crdt::registry_cell_before(self(), now);
  for (const crdt::CellId& id : {registry_before_, registry_}) {
    const std::optional<crdt::Cell> cell = replica_.find(id);
    if (!cell) continue;
    for (const crdt::Slot& slot : cell->slots) {
      if (slot.id.birth != crdt::kFenceRow || slot.value <= newest_) continue;
      newest_ = slot.value;
      previous_ = slot.id.writer;
    }
  }
  update_succession();
}

/// What was transferred for a window that has not begun, and clocks that are ahead: so much is not
/// this incarnation's.
void EscrowAgent::write_fence(Nanos now) {
  written_ = true;
  Nanos fence_time = now + kFenceSkews * replica_.options().max_skew;
  write_row(crdt::kFenceRow, std::max(static_cast<std::uint64_t>(fence_time) + 1, newest_ + 1),
            now);
}

void EscrowAgent::write_row(std::uint64_t row, std::uint64_t value, Nanos now) {
  crdt::OwnCount count{registry_, row, value, {}, true, true};
  replica_.count({&count, 1}, now);
}

crdt::Succession EscrowAgent::succession_of(const crdt::Member& member,
                                            const crdt::Incarnation& incarnation, Nanos now) const {
  return succession_of(incarnation, crdt::registry_cell(member, now),
                       crdt::registry_cell_before(member, now));
}

crdt::Succession EscrowAgent::succession_of(const crdt::Incarnation& incarnation,
                                            const crdt::CellId& registry,
                                            const crdt::CellId& before) const {
  const std::optional<crdt::Cell> current = replica_.find(registry);
  const std::optional<crdt::Cell> earlier = replica_.find(before);
  return crdt::succession_of(incarnation, current ? &*current : nullptr,
                             earlier ? &*earlier : nullptr);
}

void EscrowAgent::update_succession() {
  succession_ = succession_of(replica_.incarnation(), registry_, registry_before_);
  // What earlier incarnations used must be known before it is counted on what they had.
  if (enabled_) refresh();
  publish();
}

/// Of a lost window it is not known what earlier incarnations used, so nothing of theirs is left.
crdt::Succession EscrowAgent::succession_in(const crdt::Epoch& epoch) const {
  if (!replica_.options().lost.has(epoch)) return succession_;
  return {{replica_.incarnation()}, kNever};
}

void EscrowAgent::publish() {
  bool confirmed = peers_.empty();
  for (const Peer& peer : peers_) confirmed |= peer.confirmed;
  bool open = registered_ && confirmed && unabsorbed_.empty();
  if (open && !grant_state_.open) grant_state_.since = now_;
  grant_state_.open = open;
  grant_state_.fence_time = succession_.fence_time;
  side_.set_grant_state(grant_state_);
}

void EscrowAgent::mark_durable(const crdt::OwnCount& count) {
  if (!crdt::is_registry(count.cell)) return side_.mark_durable(count);
  if (count.birth == crdt::kFenceRow) {
    registered_ = true;
  } else if (count.birth != crdt::kCountsRow) {
    taken_over_ = true;
  }
  update_succession();
}

bool EscrowAgent::is_incarnation_of(const crdt::Incarnation& incarnation,
                                    const crdt::Member& member) const {
  auto known = replica_.members().find(incarnation);
  return known != replica_.members().end() && known->second == member;
}

void EscrowAgent::request_rejoin(Nanos now) {
  if (taken_over_ || grant_state_.stopped || !registered_ || now < next_rejoin_) return;
  next_rejoin_ = now + options_.rejoin_interval;
  std::vector<crdt::PeerStatus> status = replica_.peers();
  for (crdt::PeerIndex i = 0; i < peers_.size(); ++i) {
    if (peers_[i].confirmed || !status[i].incarnation) continue;
    out_.push_back(
        {i, crdt::RejoinRequest{replica_.incarnation(), now, options_.shares->version(now)}});
  }
}

void EscrowAgent::heard(crdt::PeerIndex peer, const crdt::Incarnation& from, Nanos now) {
  if (peer >= peers_.size()) return;
  auto& heard = peers_[peer].heard;
  heard[from] = now;
  if (heard.size() > 1) {
    std::erase_if(heard, [&](const auto& each) { return each.second + options_.quiet <= now; });
  }
}

void EscrowAgent::receive(crdt::PeerIndex peer, const crdt::Incarnation& from,
                          const crdt::Message& message, Nanos now) {
  if (peer >= peers_.size()) return;
  came(now);
  if (const auto* request = std::get_if<crdt::RightsRequest>(&message))
    on(peer, from, *request, now);
  if (const auto* request = std::get_if<crdt::RejoinRequest>(&message))
    on(peer, from, *request, now);
  if (const auto* confirmation = std::get_if<crdt::RejoinConfirmation>(&message))
    on(peer, from, *confirmation, now);
}

void EscrowAgent::on(crdt::PeerIndex index, const crdt::Incarnation& from,
                     const crdt::RejoinRequest& message, Nanos now) {
  Peer& peer = peers_[index];
  if (message.incarnation != from || peer.heard.size() > 1) return;
  if (options_.shares->version(message.at) != message.version) {
    ++counters_.versions_differ;
    return;
  }
  const crdt::Member& member = replica_.options().peers[index];
  const std::optional<crdt::Cell> current = replica_.find(crdt::registry_cell(member, message.at));
  if (!current || current->value_of({from, crdt::kFenceRow}) == 0) return;
  // This node would not have heard of another incarnation yet, if there is one.
  if (now < began_ + options_.quiet && has_other_incarnations(*current, from)) return;
  peer.rejoins = from;
  peer.rejoins_at = message.at;
  peer.after = replica_.written();
  confirm_rejoins(now);
}

bool EscrowAgent::has_other_incarnations(const crdt::Cell& registry, const crdt::Incarnation& but) {
  return std::any_of(registry.slots.begin(), registry.slots.end(),
                     [&](const crdt::Slot& slot) { return slot.id.writer != but; });
}

void EscrowAgent::confirm_rejoins(Nanos now) {
  for (crdt::PeerIndex i = 0; i < peers_.size(); ++i) {
    Peer& peer = peers_[i];
    if (!peer.rejoins || replica_.durable() < peer.after) continue;
    std::uint64_t rows = digest_of_incarnations(replica_, replica_.options().peers[i], peer.rejoins,
                                                peer.rejoins_at);
    out_.push_back({i, crdt::RejoinConfirmation{peer.rejoins, peer.rejoins_at, now, rows}});
    peer.rejoins = {};
  }
}

void EscrowAgent::on(crdt::PeerIndex index, const crdt::Incarnation&,
                     const crdt::RejoinConfirmation& message, Nanos now) {
  Peer& peer = peers_[index];
  if (!enabled_ || message.incarnation != replica_.incarnation() || peer.confirmed) return;
  if (message.rows != digest_of_incarnations(replica_, self(), message.incarnation, message.at)) {
    // Rows are still on their way, in one direction or the other: asked again.
    return;
  }
  peer.confirmed = true;
  // By its clock the reserved time is over: ours may have been set back.
  if (message.now > time_floor_ + replica_.options().max_skew) quick_ = false;
  publish();
  take_over_if_sure(now);
}

void EscrowAgent::take_over_if_sure(Nanos now) {
  if (!may_take_over_ || taking_over_ || !registered_ || grant_state_.stopped) return;
  if (replica_.counters().elder_rows != elder_rows_) {
    // Some incarnation of this member wrote what our disk does not hold.
    may_take_over_ = false;
    return;
  }
  const std::size_t sure_of_it = confirmations();
  bool sure = sure_of_it == peers_.size() || (quick_ && previous_ && sure_of_it > 0);
  if (!sure) return;
  taking_over_ = true;
  write_row(previous_ ? crdt::succession_row(previous_) : crdt::kFirstRow, 1, now);
}

std::size_t EscrowAgent::confirmations() const {
  return static_cast<std::size_t>(
      std::count_if(peers_.begin(), peers_.end(), [](const Peer& peer) { return peer.confirmed; }));
}

// Counts of rules that this member decides for all.

bool EscrowAgent::knows_counts_since(Nanos start) const {
  if (counts_row_ != 0 && static_cast<std::uint64_t>(start) + 1 >= counts_row_) return true;
  return remembered_ && start > boot_fence_;
}

/// What is not on the disk of an earlier boot must be heard of: counts that reached nobody else
/// went with it, so that of windows that were open then nothing can be said.
void EscrowAgent::find_counts(Nanos now) {
  if (grant_state_.stopped || !registered_) return;
  remembered_ |= peers_.empty() || confirmations() > 0;
  disk_lacks_ |= replica_.counters().elder_counts != elder_counts_ ||
                 replica_.counters().elder_rows != elder_rows_at_boot_;
  const std::uint64_t before = counts_row_;
  if (disk_lacks_) {
    counts_row_ = std::max(counts_row_, static_cast<std::uint64_t>(boot_fence_) + 2);
  } else if (counts_row_ == 0 && disk_ && confirmations() == peers_.size()) {
    counts_row_ = 1;
  }
  if (counts_row_ == 0 || (counts_written_ && counts_row_ == before)) return;
  counts_written_ = true;
  write_row(crdt::kCountsRow, counts_row_, now);
}

// Rights.

bool EscrowAgent::changed(const crdt::CellId& id) {
  if (!replica_.has_rows(id)) return false;
  const std::optional<crdt::Cell> cell = replica_.find(id);
  if (taking_over_ && replica_.counters().elder_rows != elder_rows_) tainted_ = true;
  if (!enabled_ || crdt::is_registry(id)) return true;
  counters_.units_received += absorb(*cell);
  publish();
  return true;
}

/// Everything but the rows of the incarnation that runs: these the limiter knows best. Returns the
/// units of rights that came.
std::uint64_t EscrowAgent::absorb(const crdt::Cell& cell) {
  crdt::Cell rest;
  rest.id = cell.id;
  Uint128 used = 0;
  for (const crdt::Slot& slot : cell.slots) {
    if (slot.id.writer == replica_.incarnation()) continue;
    rest.slots.push_back(slot);
    if (slot.id.birth == crdt::kUsedRow) used += slot.value;
  }
  EscrowOthers others;
  others.holding = crdt::holding_of(rest, succession_in(cell.id.epoch),
                                    [this](const crdt::Incarnation& incarnation) {
                                      return is_incarnation_of(incarnation, self());
                                    });
  others.used_by_peers = saturated(used);
  std::optional<std::uint64_t> absorbed = side_.absorb_rows(cell.id, others);
  if (absorbed) {
    unabsorbed_.erase(cell.id);
  } else {
    unabsorbed_.insert(cell.id);
  }
  return absorbed.value_or(0);
}

void EscrowAgent::refresh() {
  replica_.for_each_with_rows([this](const crdt::Cell& cell) {
    if (!crdt::is_registry(cell.id)) absorb(cell);
  });
}

void EscrowAgent::on(crdt::PeerIndex index, const crdt::Incarnation& from,
                     const crdt::RightsRequest& message, Nanos now) {
  // Only to the incarnation that this node itself talks to: a late request of one that is gone
  // would transfer rights to nobody.
  bool current = replica_.peers()[index].incarnation == from;
  std::uint64_t given = 0;
  if (current && !grant_state_.stopped && crdt::valid_epoch(message.cell.epoch)) {
    given = side_.give_rights(message.rule, message.cell, from, message.wanted, now);
  }
  ++(given > 0 ? counters_.requests_served : counters_.requests_refused);
  counters_.units_given = add_saturated(counters_.units_given, given);
}

void EscrowAgent::ask_for_rights(Nanos now) {
  needs_.clear();
  side_.rights_needed(now, replica_.options().max_skew / kLeadShare, needs_);
  if (grant_state_.stopped) return;
  for (const RightsNeed& need : needs_) ask(need, now);
}

/// The richest first, as far as is known here. With `reserves` also those that have used all, of
/// which they may keep a little in reserve.
std::vector<EscrowAgent::Donor> EscrowAgent::donors(const crdt::CellId& id, std::uint64_t limit,
                                                    bool reserves, Nanos now) const {
  std::vector<Donor> found;
  const crdt::Cell cell = replica_.find(id).value_or(crdt::Cell{});
  std::vector<crdt::PeerStatus> status = replica_.peers();
  for (crdt::PeerIndex i = 0; i < status.size(); ++i) {
    const crdt::Incarnation& incarnation = status[i].incarnation;
    if (!incarnation) continue;
    const crdt::Member& member = status[i].member;
    crdt::Succession succession = succession_of(member, incarnation, now);
    crdt::Holding holding = crdt::holding_of(cell, succession, [&](const crdt::Incarnation& each) {
      return is_incarnation_of(each, member);
    });
    std::uint64_t share = options_.shares->share(member, id.series, limit, id.epoch.start);
    crdt::Int128 rights = crdt::rights(holding, succession, id.epoch, share);
    if (rights <= 0 && !(reserves && holding.used > 0)) continue;
    std::uint64_t received =
        cell.value_of({incarnation, crdt::transfer_row(replica_.incarnation())});
    found.push_back({i, rights, received});
  }
  std::stable_sort(found.begin(), found.end(),
                   [](const Donor& a, const Donor& b) { return a.rights > b.rights; });
  return found;
}

std::vector<crdt::PeerIndex> EscrowAgent::holders(const crdt::CellId& cell, std::uint64_t limit,
                                                  Nanos now) const {
  std::vector<crdt::PeerIndex> peers;
  for (const Donor& donor : donors(cell, limit, !is_scarce(limit, *options_.shares), now))
    peers.push_back(donor.peer);
  return peers;
}

/// The next one each time nothing came of it. For what is kept in reserve a few times.
void EscrowAgent::ask(const RightsNeed& need, Nanos now) {
  const std::vector<Donor> found =
      donors(need.cell, need.limit, need.attempt < kReserveAttempts, now);
  if (found.empty()) return;
  auto request = [&](const Donor& donor, std::uint64_t units) {
    std::uint64_t wanted = add_saturated(donor.received, units);
    out_.push_back({donor.peer, crdt::RightsRequest{need.rule, need.cell, wanted}});
    ++counters_.requests_sent;
  };
  if (need.ahead) {
    // Nobody has time to be asked after somebody else: of each what it has of all.
    Uint128 all = 0;
    for (const Donor& donor : found) all += static_cast<Uint128>(donor.rights);
    std::uint64_t units = std::min(need.units, saturated(all));
    for (const Donor& donor : found) {
      auto rights = static_cast<Uint128>(donor.rights);
      if (all == 0 || rights == 0) continue;
      request(donor, saturated((units * rights + all - 1) / all));
    }
    return;
  }
  const Donor& donor = found[need.attempt % found.size()];
  std::uint64_t most =
      donor.rights > 0 ? saturated(static_cast<Uint128>(donor.rights)) : need.units;
  request(donor, std::min(need.units, most));
}

void EscrowAgent::hand_over(Nanos now) {
  leaving_ = true;
  passed_on_ = counters_.units_received;
  std::vector<crdt::PeerStatus> status = replica_.peers();
  handed_over_.resize(status.size());
  std::vector<crdt::PeerIndex> connected;
  for (crdt::PeerIndex i = 0; i < status.size(); ++i) {
    if (status[i].incarnation) connected.push_back(i);
  }
  if (!enabled_ || grant_state_.stopped || connected.empty()) return;
  for (const RightsLeft& each : side_.rights_left(now, kMostHandedOver)) {
    // Where nobody has used any, it depends on the series.
    crdt::PeerIndex heir = connected[each.cell.series.lo % connected.size()];
    std::uint64_t most = 0;
    const std::optional<crdt::Cell> cell = replica_.find(each.cell);
    for (crdt::PeerIndex i : connected) {
      if (!cell) break;
      std::uint64_t used = cell->value_of({status[i].incarnation, crdt::kUsedRow});
      if (used <= most) continue;
      most = used;
      heir = i;
    }
    std::uint64_t given = side_.give_rights(each.rule, each.cell, status[heir].incarnation,
                                            std::numeric_limits<std::uint64_t>::max(), now, true);
    counters_.units_given = add_saturated(counters_.units_given, given);
    handed_over_[heir] += given > 0;
  }
}

void EscrowAgent::pump(Nanos now) {
  came(now);
  confirm_rejoins(now);
  if (leaving_ && counters_.units_received != passed_on_) hand_over(now);
  if (!enabled_ || leaving_) return;
  // Of one that spends nothing, as its disk has failed, nobody needs to know.
  if (!written_ && !grant_state_.stopped) write_fence(now);
  for (auto at = unabsorbed_.begin(); at != unabsorbed_.end();) {
    const crdt::CellId id = *at++;
    const std::optional<crdt::Cell> cell = replica_.find(id);
    if (!cell) {
      unabsorbed_.erase(id);
    } else {
      counters_.units_received += absorb(*cell);
    }
  }
  take_over_if_sure(now);
  find_counts(now);
  request_rejoin(now);
  publish();
  ask_for_rights(now);
}

std::vector<crdt::Envelope> EscrowAgent::take() {
  return std::exchange(out_, {});
}

}  // namespace weir
