#include <weir/node/engine/engine.h>

#include <algorithm>
#include <array>
#include <utility>

#include <weir/limits/algorithms/bucket.h>
#include <weir/limits/algorithms/window.h>
#include <weir/limits/replica_side.h>
#include <weir/limits/text/number.h>

namespace weir::node {
namespace {

constexpr std::size_t kDrainBatch = 512;
/// Counts that are handed over in one pump. Into new cells among ten million, with the memory that
/// they need, one takes up to 4 µs.
constexpr std::size_t kMostDrained = 1024;
/// Between two passes of the sweep, for each series; so many times that where the last one found
/// next to nothing to forget and nobody is in want of room, so that rest is rest.
constexpr Nanos kSweepPause = 4 * kMicrosecond;
constexpr Nanos kSweepPatience = 5;
/// A wall clock that is too far behind is believed after so long: it may be about to jump again.
constexpr Nanos kBehindFor = kSecond;
/// More than this between two pumps is the clock's leap, or a loop that was busy: no fault of the
/// disk.
constexpr Nanos kLongestPump = 100 * kMillisecond;
/// Cells of a refill in one pump.
constexpr std::size_t kRefillPiece = 2048;
constexpr Nanos kFirstReopenWait = kSecond;
/// Series of a full table that are looked at in one pump, whether they can go.
constexpr std::size_t kLetGoPiece = 1024;
/// Reservations that have timed out, settled in one pump.
constexpr std::size_t kSettleBatch = 1024;

std::shared_ptr<const crdt::ShareTable> share_table(const EngineOptions& options) {
  std::vector<crdt::Shareholder> holders = options.shareholders;
  if (holders.empty()) {
    holders.push_back({options.replica.self, {{}}});
    for (const crdt::Member& peer : options.replica.peers) holders.push_back({peer, {{}}});
  }
  return std::make_shared<const crdt::ShareTable>(std::move(holders));
}

bool is_about_identity(crdt::AlarmKind kind) {
  return kind == crdt::AlarmKind::own_slot_ahead || kind == crdt::AlarmKind::duplicate_identity;
}

/// No cell of these rules is over later, after any instant. Half as long again, and a day: windows
/// are remembered for one of their parts longer, calendars' differ in length, clocks differ.
Nanos longest_cell(const RuleSet& rules) {
  Nanos longest = kMinute;
  for (const Rule& rule : rules.rules()) {
    // With what limit a request may come is not known.
    if (rule.limit_from_request && is_bucket(rule.algorithm)) return crdt::kMaxLifetime;
    longest = std::max(longest, rule.calendar ? 366 * kDay : 2 * rule.window);
    if (is_bucket(rule.algorithm)) longest = std::max(longest, bucket_shape(rule).fill_time());
  }
  return std::min(longest + longest / 2 + kDay, crdt::kMaxLifetime);
}

}  // namespace

Engine::Engine(EngineOptions options, storage::Store* store, EngineEvents events)
    : options_(std::move(options)),
      store_(store),
      events_(std::move(events)),
      ticket_hash_(options_.ticket_key),
      over_admission_(options_.replica.peers.size()) {}

Engine::~Engine() = default;

bool Engine::start(Nanos wall, storage::StoreEvents store_events, std::string& error) {
  wall_ = wall;
  crdt::Incarnation fresh = options_.fresh_incarnation();
  store_events.failed = [this, tell = std::move(store_events.failed)](const std::string& reason) {
    store_broke_ = true;
    if (tell) tell(reason);
  };
  store_events.reserved = [this, tell = std::move(store_events.reserved)](Nanos ceiling) {
    ceiling_ = ceiling;
    if (tell) tell(ceiling);
  };
  store_events.opened = [tell = std::move(store_events.opened)](auto opened) {
    Refill::prepare(*opened);
    if (tell) tell(std::move(opened));
  };
  storage::Recovered recovered;
  if (store_ != nullptr) {
    if (!store_->open(fresh, wall, std::move(store_events), recovered, error)) return false;
    durable_ = writing_ = true;
    ceiling_ = reserved_ = std::max(recovered.time_floor, wall);
    reserve_time(wall);
  }
  time_ = recovered.time_floor;
  Nanos now = clock(wall);
  was_set_back_ = recovered.set_back;
  if (was_set_back_ > 0) {
    events_.log("clock_set_back",
                "the clock is " + std::to_string(was_set_back_ / kMillisecond) +
                    " ms behind what it showed before: this node goes on from here, and spends "
                    "nothing in windows of which counts may be missing");
  }
  options_.replica.lost = recovered.lost;
  options_.replica.incarnation = fresh;
  replica_ = std::make_unique<crdt::Replica>(options_.replica, store_ == nullptr);
  replica_->set_longest(longest_cell(*options_.rules));
  LimiterOptions limiter;
  limiter.hash_key = options_.hash_key;
  limiter.max_series = options_.max_series;
  limiter.populate = options_.populate;
  limiter.max_request_ids = options_.max_request_ids;
  limiter.request_id_ttl = options_.request_id_ttl;
  limiter.max_tickets = options_.max_tickets;
  limiter.caller_percent = options_.caller_percent;
  limiter.replicated = true;
  limiter.incarnation = fresh;
  limiter.shares = share_table(options_);
  limiter.self = options_.replica.self;
  limiter.lost = recovered.lost;
  limiter_ = std::make_unique<Limiter>(options_.rules, limiter);
  EscrowAgentOptions escrow;
  escrow.shares = limiter.shares;
  escrow.rejoin_interval = options_.replica.anti_entropy_interval / 5;
  escrow.quiet = options_.replica.anti_entropy_interval * 6 / 5;
  escrow_ = std::make_unique<EscrowAgent>(std::move(escrow), *replica_, *limiter_);
  replica_->restore(recovered.state, now);
  escrow_->begin(store_ != nullptr, recovered.time_floor, recovered.set_back > 0, now,
                 recovered.incarnations);
  dispatch();
  return true;
}

std::size_t Engine::hand_over(Nanos wall) {
  Nanos now = clock(wall);
  limiter_->settle_all(now);
  escrow_->hand_over(now);
  std::size_t windows = 0;
  for (std::size_t each : escrow_->handed_over()) windows += each;
  drained_all_ = last_counts_known_ = false;
  pump(wall);
  return windows;
}

bool Engine::handed_over() {
  if (!drained_all_) return false;
  if (!std::exchange(last_counts_known_, true) || heirs_ != escrow_->handed_over()) {
    heirs_ = escrow_->handed_over();
    handed_over_write_ = last_write_;
    handed_over_stamp_ = 0;
  }
  if (writing_ && (persisted_ < handed_over_write_ || replica_->behind_disk())) return false;
  bool told = true;
  for (const crdt::PeerStatus& peer : replica_->peers()) {
    // What is durable has its stamp.
    if (handed_over_stamp_ == 0) handed_over_stamp_ = peer.acked + peer.unacked;
    told &= !peer.incarnation || peer.acked >= handed_over_stamp_;
  }
  if (told) return true;
  replica_->flush(clock(wall_));
  dispatch();
  return false;
}

void Engine::stop(Nanos wall) {
  Nanos now = clock(wall);
  limiter_->settle_all(now);
  if (!writing_) return;
  while (refill_ && !refilled_) refill(now);
  while (!drain(now)) {
    // It stops after a batch when the disk is behind; close() waits for the disk.
  }
  dispatch();
  store_->close(now);
  // It committed everything queued, or the store has failed, of which the driver may not have
  // heard.
  if (!store_broke_) persisted_ = last_write_;
  closed_ = true;
  answer_waiters(store_broke_);
}

Nanos Engine::clock(Nanos wall) {
  if (!stalled_.load(std::memory_order_relaxed)) [[likely]]
    wall = std::min(wall, ceiling_.load(std::memory_order_relaxed));
  Nanos seen = time_.load(std::memory_order_relaxed);
  while (wall > seen) {
    if (time_.compare_exchange_weak(seen, wall, std::memory_order_relaxed)) return wall;
  }
  return seen;
}

/// By the wall clock, not by a clock that stands still: or every crash would put it further ahead.
void Engine::reserve_time(Nanos wall) {
  if (!writing_) return;
  Nanos wanted =
      wall + options_.time_ahead / 2 > reserved_ ? wall + options_.time_ahead : reserved_;
  // A clock that went on without the disk, and was set back before the disk came to know the time.
  wanted = std::max(wanted, time_.load(std::memory_order_relaxed));
  if (wanted <= reserved_) return;
  reserved_ = wanted;
  store_->reserve_time(reserved_);
}

void Engine::watch_clock(Nanos wall, Nanos now) {
  if (now - wall <= storage::kMostTimeWaits) {
    behind_since_.reset();
    set_back_ = false;
    return;
  }
  if (!behind_since_ || wall < *behind_since_) behind_since_ = wall;
  set_back_ = wall - *behind_since_ >= kBehindFor;
}

/// What needs no disk must not wait for it. What does need it has its time on the disk all the
/// same: a ceiling above it was asked for before it was handed over, and is committed with it at
/// the latest. So an answer that waited, and whatever a peer sees, are of times that outlive a
/// crash.
void Engine::watch_disk(Nanos passed) {
  time_stood_ = writing_ && ceiling_ < wall_ ? time_stood_ + passed : 0;
  stalled_ = time_stood_ >= options_.max_time_wait;
}

/// The last quarter of the map is for what this node counts itself.
void Engine::watch_space(Nanos now) {
  if (!writing_ || now < next_space_) return;
  next_space_ = now + kSecond;
  const storage::StoreCounters store = store_->counters();
  const std::uint64_t used =
      store.map_used_bytes - std::min(store.map_used_bytes, store.map_free_bytes);
  const bool is_short = used > store.map_bytes / 100 * (disk_short_ ? 70 : 75);
  if (is_short == disk_short_ || store.map_bytes == 0) return;
  disk_short_ = is_short;
  replica_->set_disk_short(is_short);
  if (is_short) {
    events_.log("storage_nearly_full",
                "what others count is kept in memory alone, as map_size is nearly used up");
  } else {
    events_.log("storage_room", "what others count is written again");
  }
}

void Engine::check(const Request& request, Nanos wall, Decision& out) {
  limiter_->check(request, clock(wall), out);
}

void Engine::check(std::span<const Request> requests, Nanos wall, std::span<Decision> out) {
  if (requests.size() == 1) return limiter_->check(requests[0], clock(wall), out[0]);
  if (!requests.empty()) limiter_->check(requests, clock(wall), out);
}

Ticket Engine::reserve(const Request& request, Nanos wall, Nanos timeout, Decision& out,
                       TicketHolder holder) {
  return limiter_->reserve(request, clock(wall), timeout, out, holder);
}

Settled Engine::settle(Ticket ticket, std::uint64_t actual, Nanos wall, std::uint64_t caller) {
  return limiter_->settle(ticket, actual, clock(wall), caller);
}

void Engine::reload(std::shared_ptr<PreparedRules> prepared) {
  limiter_->reload(std::move(prepared));
  options_.rules = limiter_->rules();
  replica_->set_longest(longest_cell(*options_.rules));
  escrow_->rules_changed();
}

Lease Engine::lease(const Request& request, const LeaseTerms& terms, Nanos wall, Decision& out) {
  return grant_lease(*limiter_, request, terms, clock(wall), wall, out);
}

std::string Engine::ticket_name(Ticket ticket) const {
  if (!ticket) return {};
  const std::string number = std::to_string(ticket.number);
  const std::array<std::uint64_t, 2> secret = ticket_hash_(number);
  return crdt::to_string(crdt::Incarnation{secret[0], secret[1]}) + "-" + number;
}

Ticket Engine::ticket_named(std::string_view name) const {
  Ticket ticket;
  const std::size_t dash = name.find('-');
  if (dash == name.npos || parse_number(name.substr(dash + 1), ticket.number) != Digits::good)
    return {};
  // However long two names are alike, it takes the same time.
  const std::string known = ticket_name(ticket);
  if (known.size() != name.size()) return {};
  unsigned differs = 0;
  for (std::size_t i = 0; i < known.size(); ++i) {
    differs |= static_cast<unsigned char>(known[i]) ^ static_cast<unsigned char>(name[i]);
  }
  return differs == 0 ? ticket : Ticket{};
}

void Engine::when_durable(std::function<void(bool)> done, std::size_t requests) {
  if (!durable_ || closed_) return done(durable_ && !store_broke_);
  if (waiters_.empty()) waits_since_ = wall_;
  waiters_.push_back({generation_, std::move(done), requests, wall_});
  waiting_ += requests;
}

Error Engine::shed(const Request& request, Nanos wall) {
  if (!overloaded(wall)) return {};
  const std::size_t waiting = waiting_;
  std::string why;
  if (waiting >= options_.max_waiting) {
    why = std::to_string(waiting) + " requests wait for the disk";
  } else {
    why = "the disk has committed nothing for " +
          std::to_string((wall - waits_since_) / kMillisecond) + " ms";
  }
  if (!may_wait_for_disk(request, wall)) return {};
  ++shed_;
  return {ErrorKind::overloaded, why};
}

bool Engine::may_wait_for_disk(const Request& request, Nanos wall) {
  const std::shared_ptr<const RuleSet> rules = limiter_->rules();
  const Nanos now = clock(wall);
  std::vector<std::uint32_t> matched;
  for (std::size_t i = 0; i < request.descriptors(); ++i) {
    const Request part = request.part(i);
    rules->match(part, matched);
    const bool waits = std::any_of(matched.begin(), matched.end(), [&](std::uint32_t index) {
      return limiter_->would_wait(index, part, now);
    });
    if (waits) return true;
  }
  return false;
}

void Engine::pump(Nanos wall) {
  const Nanos passed = std::clamp<Nanos>(wall - std::exchange(wall_, wall), 0, kLongestPump);
  reserve_time(wall);
  watch_disk(passed);
  Nanos now = clock(wall);
  watch_clock(wall, now);
  if (store_ != nullptr && !writing_) reopen_store(wall);
  if (renewing_ && (!writing_ || persisted_ >= last_write_)) renew(now);
  limiter_->settle_due(now, kSettleBatch);
  watch_space(now);
  holding_ = writing_ && (renewing_ || store_->backlog() >= options_.max_backlog);
  if (!holding_ && sweep_due(now)) {
    step("sweep");
    sweep(now);
  }
  step("escrow");
  escrow_->pump(now);
  step("drain");
  // The limiter has forgotten first, and what it still knows is drained: see retire_buckets().
  more_to_drain_ = false;
  drained_all_ = !holding_ && drain(now);
  if (drained_all_ && swept_) {
    step("retire");
    replica_->retire_buckets(*swept_);
    if (writing_) store_->expire(*swept_);
    swept_.reset();
  }
  if (refill_ && !holding_) {
    step("refill");
    refill(now);
  }
  step("let_go");
  let_go(now);
  step("protocol");
  replica_->tick(now);
  step("dispatch");
  dispatch();
  handle_alarms(now);
  tell_fullness(now);
  step("answers");
  answer_waiters(false);
}

/// The more series there are, the longer until the next pass: what is over and takes a place
/// meanwhile is little beside them.
bool Engine::sweep_due(Nanos now) const {
  if (sweeping_) return true;
  const auto series = static_cast<Nanos>(limiter_->series_count());
  const Nanos pause = std::max(options_.sweep_interval, series * kSweepPause);
  const bool wanted = sweep_found_some_ || limiter_->series_refused() != refused_when_swept_;
  return now - swept_at_ >= (wanted ? pause : kSweepPatience * pause);
}

/// A piece of a pass over all series.
void Engine::sweep(Nanos now) {
  const std::optional<Limiter::Swept> swept =
      limiter_->sweep_some(now - options_.replica.max_skew, options_.sweep_piece);
  sweeping_ = !swept;
  if (sweeping_) return;
  swept_ = swept->floor;
  {
    std::lock_guard lock(over_admission_mutex_);
    over_admission_.sweep();
  }
  swept_at_ = now;
  sweep_found_some_ = swept->forgotten * 100 > limiter_->series_count();
  refused_when_swept_ = limiter_->series_refused();
}

/// True if everything that was waiting has been handed over.
bool Engine::drain(Nanos now) {
  std::size_t drained = 0;
  for (bool more = true; more; drained += counts_.size()) {
    if (drained >= kMostDrained) {
      more_to_drain_ = true;
      return false;
    }
    counts_.clear();
    more = limiter_->replica_side().drain(counts_, kDrainBatch);
    if (!counts_.empty()) {
      last_write_ = std::max(last_write_, replica_->count(counts_, now));
      dispatch();
    }
    if (more && writing_ && store_->backlog() >= options_.max_backlog) return false;
  }
  if (!waiters_.empty() && waiters_.back().generation == generation_) {
    drained_.push_back({generation_, last_write_});
    ++generation_;
  }
  return true;
}

void Engine::dispatch() {
  crdt::Outbox out = replica_->take();
  for (crdt::Write& write : out.writes) {
    last_write_ = std::max(last_write_, write.id);
    store_->append(std::move(write));
  }
  for (const crdt::ResetBucket& was : out.reset_buckets) {
    if (replica_->read(was.id, cell_)) limiter_->replica_side().reset(cell_, was.own);
  }
  for (const crdt::OwnCount& count : out.durable) escrow_->mark_durable(count);
  for (const crdt::CellId& id : out.changed) {
    if (escrow_->changed(id)) continue;
    absorb(id, false);
  }
  for (const crdt::Envelope& envelope : out.messages) events_.send(envelope.to, envelope.message);
  for (const crdt::Envelope& envelope : escrow_->take()) {
    events_.send(envelope.to, envelope.message);
  }
}

/// With `own`, of a series that may have been let go.
void Engine::absorb(const crdt::CellId& id, bool own) {
  Growth growth;
  if (!replica_->read(id, cell_)) return;
  // What comes back is no news.
  if (own) return static_cast<void>(limiter_->replica_side().restore(cell_, growth));
  if (!limiter_->replica_side().absorb(cell_, growth)) ++unabsorbed_;
  std::lock_guard lock(over_admission_mutex_);
  over_admission_.grew(growth.rule, growth.units);
}

void Engine::warm(Request& request, Nanos wall) {
  cells_.clear();
  limiter_->replica_side().warm(request, clock(wall), cells_);
  for (const crdt::CellId& id : cells_) absorb(id, true);
  request.warmed = true;
}

/// Series that are idle make room where little is left. A pass over all takes a second at least:
/// what is used more often stays.
void Engine::let_go(Nanos now) {
  if (now < next_let_go_) return;
  const auto pieces = static_cast<Nanos>(options_.max_series / kLetGoPiece + 1);
  next_let_go_ = now + kSecond / pieces;
  limiter_->replica_side().let_go(
      kLetGoPiece, [this](const crdt::CellId& id, const crdt::SlotId& slot) -> std::uint64_t {
        return replica_->read(id, cell_) ? cell_.value_of(slot) : 0;
      });
}

/// New keys that find no room are an alarm, once a minute while there are any.
void Engine::tell_fullness(Nanos now) {
  const std::uint64_t refused = limiter_->series_refused();
  const bool more = refused != series_refused_;
  if (series_told_ != 0 && now - series_told_ < kMinute) return;
  if (!more && series_told_ == 0) return;
  if (more) {
    events_.log("series_full", std::to_string(refused - series_refused_) +
                                   " new keys found no room in max_series (" +
                                   std::to_string(options_.max_series) + ")");
  } else {
    events_.log("series_room", "new keys find room again");
  }
  series_told_ = more ? now : 0;
  series_refused_ = refused;
}

void Engine::handle_alarms(Nanos now) {
  const bool renewing = renew_wanted_ || renewing_;
  for (const crdt::Alarm& alarm : replica_->take_alarms()) {
    tell_alarm(alarm, now);
    renew_wanted_ |= is_about_identity(alarm.kind) && !renewing_;
  }
  if (!renewing && escrow_->tainted()) {
    events_.log("stale_disk", "a peer knows more of this member than its disk held");
    renew_wanted_ = true;
  }
  // Who forges this node's slots would have it go through incarnations as fast as messages come.
  if (!renew_wanted_ || now < renew_due_) return;
  renew_wanted_ = false;
  // What was written under the old incarnation must be durable before the rest moves to a new one,
  // or a restart would count it under both.
  renewing_ = true;
  if (!writing_ || persisted_ >= last_write_) renew(now);
}

/// Peers can cause as many as they like: at most one of a kind and peer is told a minute.
void Engine::tell_alarm(const crdt::Alarm& alarm, Nanos now) {
  auto [at, first] = told_.try_emplace({alarm.kind, alarm.peer});
  Told& told = at->second;
  if (!first && now - told.at < kMinute) {
    ++told.more;
    return;
  }
  const crdt::Member& by = options_.replica.peers[alarm.peer];
  std::string detail = by.region + "/" + by.node;
  switch (alarm.kind) {
    case crdt::AlarmKind::own_slot_ahead:
      detail += " brought a higher value of this incarnation's slot";
      break;
    case crdt::AlarmKind::duplicate_identity:
      detail += " uses the same incarnation as another live node";
      break;
    case crdt::AlarmKind::too_many_cells:
      detail += " has brought more cells than a member may: further ones are not taken";
      break;
    case crdt::AlarmKind::unconfirmed_relay:
      detail += " told more of another member's slot than that member, which is live, ever showed";
      break;
  }
  if (told.more > 0) {
    detail += "; " + std::to_string(told.more) + " times more since the last such line";
  }
  const bool identity = is_about_identity(alarm.kind);
  const bool relay = alarm.kind == crdt::AlarmKind::unconfirmed_relay;
  events_.log(identity ? "identity_alarm" : relay ? "relay_alarm" : "member_alarm", detail);
  told = {now, 0};
}

void Engine::renew(Nanos now) {
  renewing_ = false;
  const bool again = renew_wait_ > 0 && now < renew_due_ + options_.longest_renew_wait;
  renew_wait_ =
      again ? std::min(2 * renew_wait_, options_.longest_renew_wait) : options_.renew_wait;
  renew_due_ = now + renew_wait_;
  crdt::Incarnation fresh = options_.fresh_incarnation();
  std::string error;
  if (writing_ && !store_->adopt(fresh, now, error)) {
    store_failed(error, now);
    return;
  }
  reincarnate(fresh, !writing_, now);
}

void Engine::reincarnate(const crdt::Incarnation& fresh, bool memory_only, Nanos now) {
  ++reincarnations_;
  replica_->reincarnate(fresh, memory_only);
  limiter_->replica_side().rebase(fresh, [this](const crdt::CellId& id, const crdt::SlotId& slot) {
    return replica_->read(id, cell_) ? cell_.value_of(slot) : std::uint64_t{0};
  });
  escrow_->reset(store_ != nullptr && !durable_, now);
  events_.reincarnated(fresh);
}

void Engine::committed(crdt::WriteId upto, Nanos wall) {
  if (!writing_) return;
  persisted_ = std::max(persisted_, upto);
  replica_->persisted(upto, clock(wall));
  dispatch();
  answer_waiters(false);
}

void Engine::store_failed(const std::string& reason, Nanos wall) {
  if (!writing_ && !reopening_) return;
  // What has failed again soon is not what has failed once in a long time.
  const bool again = wall < reopen_due_ + 2 * kLongestReopenWait;
  reopen_wait_ = again ? std::min(2 * reopen_wait_, kLongestReopenWait) : kFirstReopenWait;
  reopen_due_ = wall + reopen_wait_;
  reopening_ = false;
  events_.log("storage_failed", reason);
  failure_ = reason;
  if (!std::exchange(writing_, false)) return;
  durable_ = false;
  Nanos now = clock(wall);
  ceiling_ = kNever;
  holding_ = false;
  renew_wanted_ = renewing_ = false;
  refill_.reset();
  reincarnate(options_.fresh_incarnation(), true, now);
  answer_waiters(true);
}

void Engine::reopen_store(Nanos wall) {
  // A wall clock that was set back must not make it wait.
  const bool due = wall >= reopen_due_ || wall + kLongestReopenWait < reopen_due_;
  if (reopening_ || closed_ || !due) return;
  reopening_ = true;
  store_broke_ = false;
  reopened_as_ = options_.fresh_incarnation();
  reopened_at_ = clock(wall);
  store_->reopen(reopened_as_, reopened_at_);
}

void Engine::store_opened(std::shared_ptr<storage::Recovered> recovered, Nanos wall) {
  if (!std::exchange(reopening_, false)) return;
  // It may be another disk, or one from later: no boot begins before the time on its disk.
  const Nanos floor = std::max(recovered->time_floor, reopened_at_);
  for (Nanos seen = time_; seen < recovered->time_floor;) {
    if (time_.compare_exchange_weak(seen, recovered->time_floor)) break;
  }
  ceiling_ = reserved_ = floor;
  writing_ = true;
  persisted_ = last_write_;
  drained_.clear();
  refill_ = std::make_unique<Refill>(std::move(recovered));
  refilled_.reset();
  reincarnate(reopened_as_, false, clock(wall));
}

/// The disk gets what it lacks of what is in memory. Until it has all of it nothing is promised: an
/// answer stands for all that was decided before, and part of that is on its way.
void Engine::refill(Nanos now) {
  if (!refilled_) {
    const bool done = refill_->step(*replica_, now, kRefillPiece);
    dispatch();
    if (done) refilled_ = last_write_;
  }
  if (!refilled_ || persisted_ < *refilled_) return;
  durable_ = true;
  failure_.clear();
  escrow_->begin(true, refill_->time_floor(), refill_->set_back(), now, refill_->boots());
  events_.log("storage_recovered",
              std::to_string(refill_->counted_twice()) +
                  " units of writes that had failed were found, and count twice");
  refill_.reset();
}

void Engine::answer_waiters(bool failed) {
  while (!drained_.empty() && drained_.front().write <= persisted_) {
    durable_generation_ = drained_.front().generation;
    drained_.pop_front();
  }
  while (!waiters_.empty() && (failed || waiters_.front().generation <= durable_generation_)) {
    auto done = std::move(waiters_.front().done);
    bool durable = waiters_.front().generation <= durable_generation_;
    waiting_ -= waiters_.front().requests;
    waiters_.pop_front();
    if (!waiters_.empty()) waits_since_ = waiters_.front().since;
    done(durable);
  }
}

void Engine::peer_up(crdt::PeerIndex peer, const crdt::Incarnation& incarnation, Nanos wall) {
  Nanos now = clock(wall);
  replica_->peer_up(peer, incarnation, now);
  replica_->tick(now);
  dispatch();
  handle_alarms(now);
}

void Engine::peer_down(crdt::PeerIndex peer) {
  replica_->peer_down(peer);
}

void Engine::receive(crdt::PeerIndex peer, const crdt::Incarnation& from,
                     const crdt::Message& message, Nanos wall) {
  Nanos now = clock(wall);
  escrow_->heard(peer, from, now);
  escrow_->receive(peer, from, message, now);
  replica_->receive(peer, from, message, now);
  {
    std::lock_guard lock(over_admission_mutex_);
    over_admission_.heard(peer, now);
  }
  dispatch();
  {
    std::lock_guard lock(over_admission_mutex_);
    over_admission_.done();
  }
  handle_alarms(now);
}

EscrowWindow Engine::escrow_window(std::uint32_t rule, const Request& request, Nanos wall) {
  const Rule& of = options_.rules->rules()[rule];
  const Nanos now = clock(wall);
  EscrowWindow window;
  window.cell.series = limiter_->series_of(rule, request);
  WindowShape shape = window_shape(of, window.cell.series);
  window.cell.epoch = shape.epoch(shape.index(now));
  window.cost = mul_saturated(of.cost_of(request), request.hits);
  return window;
}

bool Engine::knows_counts(std::uint32_t rule, const Request& request, Nanos wall) {
  const Rule& of = options_.rules->rules()[rule];
  const Nanos now = clock(wall);
  Nanos since = 0;
  if (is_bucket(of.algorithm)) {
    since = now - bucket_shape(of).fill_time();
  } else if (of.algorithm == Algorithm::sliding_log || of.phase == Phase::first_hit) {
    since = now - of.window;
  } else {
    const WindowShape shape = window_shape(of, limiter_->series_of(rule, request));
    since = shape.start(shape.index(now) - shape.previous);
  }
  return escrow_->knows_counts_since(since);
}

std::uint64_t Engine::over_admission(std::uint32_t rule, Nanos wall) {
  const crdt::SeriesId identity = limiter_->rule_identity(rule);
  std::lock_guard lock(over_admission_mutex_);
  return over_admission_.worst_case(identity, clock(wall));
}

EngineStatus Engine::status() const {
  return {durable_,
          writing_,
          failure_,
          holding_,
          stalled_,
          unabsorbed_,
          reincarnations_,
          waiting_,
          shed_,
          was_set_back_,
          replica_->early_cell_count()};
}

}  // namespace weir::node
