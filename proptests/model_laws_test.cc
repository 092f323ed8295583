#include <rapidcheck/state.h>
#include <weir/limits/replica_side.h>

#include <thread>

#include "law.h"
#include "models.h"
#include "schedules.h"

/// Whole objects against models that are too plain to be wrong, under random commands.
namespace weir::laws {
namespace {

using crdt::Cell;

// A limiter against one that remembers every admission.

using LimiterCommand = rc::state::Command<PlainLimiter, Limiter>;

/// Two entries form the key; written one behind the other they would all be one.
constexpr std::string_view kKeys[][2] = {{"a", "bc"}, {"ab", "c"}, {"abc", ""}};

struct Check : LimiterCommand {
  std::size_t key = *between<std::size_t>(0, 2);
  std::uint64_t hits = *rc::gen::weightedElement<std::uint64_t>({{6, 1}, {3, 2}, {1, 0}, {1, 7}});
  bool post = *chance(30);
  /// Sometimes back; sometimes exactly to the next whole second, where windows end.
  Nanos pause = *rc::gen::weightedOneOf<Nanos>({{4, between<Nanos>(0, 300 * kMillisecond)},
                                                {2, between<Nanos>(0, 3 * kSecond)},
                                                {1, between<Nanos>(-kSecond, 0)},
                                                {1, between<Nanos>(0, 40 * kSecond)},
                                                {1, one_of<Nanos>({6 * kHour, kDay, 40 * kDay})}});
  bool to_edge = *chance(25);

  Nanos when(const PlainLimiter& model) const {
    Nanos at = model.now() + pause;
    return to_edge ? at + kSecond - at % kSecond - (hits == 2) : at;
  }
  PlainLimiter::Answer ask(PlainLimiter& model) const {
    return model.check(std::to_string(key), hits, post, when(model));
  }
  void apply(PlainLimiter& model) const override { ask(model); }
  void run(const PlainLimiter& before, Limiter& limiter) const override {
    PlainLimiter model = before;
    PlainLimiter::Answer expected = ask(model);
    std::vector<Entry> entries{
        {"key", kKeys[key][0]}, {"tenant", kKeys[key][1]}, {"method", post ? "POST" : "GET"}};
    Request request{"api", entries, hits};
    Decision decision = limiter.check(request, when(before));
    RC_ASSERT(decision.allowed == expected.allowed);
    RC_ASSERT(decision.statuses.size() == expected.rules.size());
    reached("denied", !decision.allowed);
    reached("allowed", decision.allowed && hits > 0);
    reached("a clock that went back", when(before) < before.now());
    for (std::size_t i = 0; i < expected.rules.size(); ++i) {
      RC_ASSERT(decision.statuses[i].allowed == expected.rules[i]);
      RC_ASSERT(decision.statuses[i].remaining == expected.remaining[i]);
      reached("a shadow rule that would deny", decision.statuses[i].shadow && !expected.rules[i]);
      // What is used, rounded up, and what is left, rounded down, are the whole.
      std::uint64_t used = limiter.used(static_cast<std::uint32_t>(i), request, model.now());
      RC_ASSERT(used + decision.statuses[i].remaining == decision.statuses[i].limit);
    }
  }
  void show(std::ostream& os) const override {
    os << "check " << key << " x" << hits << (post ? " POST" : "") << " after " << pause
       << (to_edge ? " at the edge" : "");
  }
};

struct Sweep : LimiterCommand {
  void run(const PlainLimiter& model, Limiter& limiter) const override {
    std::size_t before = limiter.series_count();
    std::size_t gone = limiter.sweep(model.now() - kSecond);
    RC_ASSERT(limiter.series_count() == before - gone);
    reached("series swept", gone > 0);
  }
  void show(std::ostream& os) const override { os << "sweep"; }
};

LAW(42, "a limiter decides as one that remembers every admission", "denied", "allowed",
    "a clock that went back", "a shadow rule that would deny", "series swept",
    "all five algorithms", "a calendar") {
  std::vector<Rule> rules;
  std::set<Algorithm> algorithms;
  for (std::size_t i = *between<std::size_t>(1, 6).as("rules"); i > 0; --i) {
    Rule rule = *rules_named("r" + std::to_string(i)).as("rule");
    if (*chance(50)) rule.window = kSecond * 10;
    reached("a calendar", rule.calendar.has_value());
    if (is_bucket(rule.algorithm) && rule.limit > 0 && rule.limit < 1000)
      rule.window = std::min(rule.window, kMinute);
    rule.key = {"key", "tenant"};
    algorithms.insert(rule.algorithm);
    rules.push_back(std::move(rule));
  }
  reached("all five algorithms", algorithms.size() == 5);
  Limiter limiter(rule_set(rules), {});
  std::vector<std::map<std::string, Nanos>> phases(rules.size());
  for (std::uint32_t i = 0; i < rules.size(); ++i) {
    for (std::size_t key = 0; key < 3; ++key) {
      std::vector<Entry> entries{{"key", kKeys[key][0]}, {"tenant", kKeys[key][1]}};
      phases[i][std::to_string(key)] =
          window_shape(limiter.rules()->rules()[i], limiter.series_of(i, {"api", entries, 1}))
              .phase;
    }
  }
  // Both clocks start here.
  std::vector<Entry> entries{{"key", "other"}, {"tenant", "other"}};
  limiter.check({"api", entries, 0}, kStart);
  PlainLimiter model(rules, phases, kStart);
  rc::state::check(model, limiter,
                   rc::state::gen::execOneOfWithArgs<Check, Check, Check, Check, Sweep>());
}

// A replica and its disk against maps.

constexpr crdt::Incarnation kSelf{100, 1};

struct ReplicaModel {
  Nanos now = kStart;
  std::map<crdt::CellId, std::map<crdt::SlotId, std::uint64_t>> cells;
  std::map<crdt::CellId, std::uint64_t> own;
  struct Waiting {
    crdt::CellId cell;
    std::uint64_t value;
  };
  std::vector<Waiting> waiting;  // counted, not yet durable
  std::uint64_t writes = 0;      // of own counts
};

struct ReplicaUnderTest {
  crdt::Replica replica;
  std::vector<crdt::WriteId> own_writes;
  explicit ReplicaUnderTest(crdt::ReplicaOptions options) : replica(std::move(options), false) {
    replica.peer_up(0, {200, 1}, kStart);
    replica.tick(kStart);
  }
};

using ReplicaCommand = rc::state::Command<ReplicaModel, ReplicaUnderTest>;

/// The cells of which the model can say that they are there: not over yet.
bool alive(const ReplicaModel& model, const crdt::CellId& id) {
  return id.epoch.expiry > model.now - kSecond;
}

rc::Gen<crdt::CellId> brief_ids(Nanos now) {
  return rc::gen::exec([now] {
    Nanos start = now - now % (10 * kSecond) - *between<Nanos>(0, 2) * 10 * kSecond;
    return crdt::CellId{*series_ids(), {start, start + *one_of<Nanos>({20 * kSecond, kHour})}};
  });
}

void agree(const ReplicaModel& model, const crdt::Replica& replica) {
  for (const auto& [id, slots] : model.cells) {
    const std::optional<Cell> cell = replica.find(id);
    if (!alive(model, id)) {
      reached("an epoch that is over");
      continue;
    }
    RC_ASSERT(cell.has_value());
    RC_ASSERT(cell->slots.size() == slots.size());
    for (const auto& [slot, value] : slots) RC_ASSERT(cell->value_of(slot) == value);
  }
  replica.for_each([&](const Cell& cell) {
    RC_ASSERT(model.cells.contains(cell.id));
    // Not longer than a generation's grain behind its end.
    RC_ASSERT(model.now - cell.id.epoch.expiry <=
              (cell.id.epoch.expiry - cell.id.epoch.start) / 4 + 3 * kSecond);
  });
}

struct Count : ReplicaCommand {
  crdt::CellId id;
  std::uint64_t units = *positive_counts();
  explicit Count(const ReplicaModel& model) : id(*brief_ids(model.now)) {}
  void apply(ReplicaModel& model) const override {
    std::uint64_t& total = model.own[id];
    total = add_saturated(total, units);
    model.waiting.push_back({id, total});
  }
  void run(const ReplicaModel& before, ReplicaUnderTest& sut) const override {
    auto held = before.own.find(id);
    std::uint64_t total = add_saturated(held == before.own.end() ? 0 : held->second, units);
    crdt::OwnCount own{id, 0, total, {}, false};
    sut.own_writes.push_back(sut.replica.count({&own, 1}, before.now));
    // Not before it is durable.
    agree(before, sut.replica);
  }
  void show(std::ostream& os) const override {
    os << "count " << units << " in ";
    crdt::showValue(id, os);
  }
};

struct Persist : ReplicaCommand {
  std::size_t how_many;
  explicit Persist(const ReplicaModel& model)
      : how_many(*between<std::size_t>(0, model.waiting.size())) {}
  void checkPreconditions(const ReplicaModel& model) const override {
    RC_PRE(how_many <= model.waiting.size());
  }
  void apply(ReplicaModel& model) const override {
    for (std::size_t i = 0; i < how_many; ++i) {
      const ReplicaModel::Waiting& next = model.waiting[i];
      std::uint64_t& held = model.cells[next.cell][{kSelf, 0}];
      held = std::max(held, next.value);
    }
    model.waiting.erase(model.waiting.begin(),
                        model.waiting.begin() + static_cast<std::ptrdiff_t>(how_many));
  }
  void run(const ReplicaModel& before, ReplicaUnderTest& sut) const override {
    if (how_many > 0) sut.replica.persisted(sut.own_writes.at(how_many - 1), before.now);
    sut.own_writes.erase(sut.own_writes.begin(),
                         sut.own_writes.begin() + static_cast<std::ptrdiff_t>(how_many));
    agree(nextState(before), sut.replica);
    reached("some durable, some not yet", how_many > 0 && how_many < before.waiting.size());
  }
  void show(std::ostream& os) const override { os << "persist " << how_many; }
};

struct Receive : ReplicaCommand {
  crdt::CellId id;
  crdt::Slots slots = *slots_of(false);
  bool as_push = *chance(50);
  explicit Receive(const ReplicaModel& model) : id(*brief_ids(model.now)) {}
  void checkPreconditions(const ReplicaModel& model) const override {
    RC_PRE(!slots.empty() && id.epoch.start <= model.now + kSecond);
  }
  void apply(ReplicaModel& model) const override {
    for (const crdt::Slot& slot : slots) {
      std::uint64_t& held = model.cells[id][slot.id];
      held = std::max(held, slot.value);
    }
  }
  void run(const ReplicaModel& before, ReplicaUnderTest& sut) const override {
    crdt::Delta delta{{{id, slots, {}}}, {}};
    crdt::Incarnation from{200, 1};
    if (as_push) {
      sut.replica.receive(0, from, crdt::Push{from, 0, 1, true, delta}, before.now);
    } else {
      sut.replica.receive(0, from, crdt::Repair{delta, {}}, before.now);
    }
    agree(nextState(before), sut.replica);
    reached("a peer's thousand slots", slots.size() >= 1000);
  }
  void show(std::ostream& os) const override {
    os << "receive ";
    crdt::showValue(Cell{id, slots, {}}, os);
  }
};

struct Pass : ReplicaCommand {
  Nanos time = *between<Nanos>(0, 15) * kSecond;
  void apply(ReplicaModel& model) const override { model.now += time; }
  void run(const ReplicaModel& before, ReplicaUnderTest& sut) const override {
    sut.replica.tick(before.now + time);
    sut.replica.take();
    agree(nextState(before), sut.replica);
  }
  void show(std::ostream& os) const override { os << "pass " << time / kSecond << " s"; }
};

LAW(5, "a replica holds what the sequential model holds", "some durable, some not yet",
    "an epoch that is over", "a peer's thousand slots") {
  crdt::ReplicaOptions options;
  options.incarnation = kSelf;
  options.peers = {{"other", "n"}};
  ReplicaUnderTest sut(options);
  rc::state::check(
      ReplicaModel{}, sut,
      rc::state::gen::execOneOfWithArgs<Count, Count, Persist, Receive, Receive, Pass>());
}

/// Moves a series into its general form, without a change to what it counts: an ancient window in
/// which nobody has counted anything.
void make_general(Limiter& limiter, std::uint32_t rule, const Request& request) {
  Cell nothing;
  nothing.id = {limiter.series_of(rule, request), crdt::Epoch{kHour, 2 * kHour}};
  limiter.replica_side().absorb(nothing);
}

LAW(42, "how a series is kept in memory does not show", "a count beyond 32 bits",
    "a debt beyond 64 bits", "a window that moved on undrained", "a thread that is behind",
    "replicated", "a bucket", "a sliding window", "a fixed window", "denied", "others' counts") {
  Rule rule = *rules_named("r").as("rule");
  bool log = rule.algorithm == Algorithm::sliding_log;
  bool huge = !log && *chance(40).as("huge counts");
  if (huge) rule.limit = *one_of<std::uint64_t>({1ull << 33, 1ull << 40, kMax / 4}).as("limit");
  if (!rule.calendar) {
    rule.window = *one_of<Nanos>({2 * kSecond, 10 * kSecond, kHour, 30 * kDay}).as("window");
  }
  bool sliding = rule.algorithm == Algorithm::sliding_window;
  rule.slots = sliding ? *one_of<std::uint32_t>({1, 1, 2}) : 1;
  rule.burst = 0;
  rule.key = {"key"};
  bool bucket = is_bucket(rule.algorithm);
  LimiterOptions options;
  options.replicated = *chance(50).as("replicated");
  options.incarnation = {7, 7};
  auto rules = rule_set({rule});
  Limiter small(rules, options);
  Limiter general(rules, options);
  std::vector<Entry> entries{{"key", "k"}, {"method", "GET"}};
  crdt::SeriesId id = small.series_of(0, {"api", entries, 1});
  Nanos now = kStart;
  Nanos latest = now;
  std::uint64_t own = 0;
  auto drained = [](Limiter& limiter) {
    std::vector<crdt::OwnCount> out;
    limiter.replica_side().drain(out, 1000);
    std::map<crdt::CellId, std::uint64_t> counts;
    for (const crdt::OwnCount& count : out) counts[count.cell] = count.value;
    return counts;
  };
  bool undrained = false;
  for (int step = *between(1, 30).as("steps"); step > 0; --step) {
    Nanos pause = *rc::gen::weightedOneOf<Nanos>({{5, between<Nanos>(0, rule.window / 4)},
                                                  {2, between<Nanos>(0, 3 * rule.window)},
                                                  {1, between<Nanos>(-rule.window, 0)}});
    // Time does not go back for a thread, but another one may be a little behind.
    now = std::max(now + pause, latest);
    latest = now;
    bool behind = step > 1 && !log && *chance(20);
    if (behind) {
      WindowShape edge = window_shape(rules->rules()[0], id);
      Nanos start = edge.start(edge.index(now) + 1);
      Request peek{"api", entries, 0};
      small.check(peek, start + 1);
      general.check(peek, start + 1);
      latest = start + 1;
      now = start - kMillisecond / 2;
    }
    Request request{
        "api", entries,
        huge ? *one_of<std::uint64_t>({1, 1ull << 31, 3'000'000'000, 1ull << 32, 1ull << 39})
             : *between<std::uint64_t>(0, 3)};
    if (*chance(20) && !bucket && !log) {
      WindowShape shape = window_shape(rules->rules()[0], id);
      Cell cell;
      cell.id = {id, shape.epoch(shape.index(now) - *choice(2))};
      cell.raise({{8, 8}, 0}, *one_of<std::uint64_t>({1, 2, 1ull << 32}));
      small.replica_side().absorb(cell);
      general.replica_side().absorb(cell);
      reached("others' counts");
    }
    make_general(general, 0, request);
    Decision one;
    Decision two;
    auto ask = [&] {
      one = small.check(request, now);
      two = general.check(request, now);
    };
    behind ? std::thread(ask).join() : ask();
    RC_ASSERT(one.allowed == two.allowed);
    RC_ASSERT(one.statuses.size() == 1u);
    RC_ASSERT(one.statuses[0].remaining == two.statuses[0].remaining);
    RC_ASSERT(one.statuses[0].reset == two.statuses[0].reset);
    RC_ASSERT(one.statuses[0].retry_after == two.statuses[0].retry_after);
    RC_ASSERT(small.used(0, request, latest) == general.used(0, request, latest));
    if (one.allowed) own += request.hits;
    reached("a count beyond 32 bits", !bucket && own >= 1ull << 32);
    reached(
        "a debt beyond 64 bits",
        bucket && static_cast<Uint128>(own) * static_cast<std::uint64_t>(rule.window) >> 64 != 0);
    reached("a window that moved on undrained", undrained && pause > rule.window && !bucket);
    reached("a thread that is behind", behind && one.allowed && !bucket);
    reached("denied", !one.allowed);
    undrained = options.replicated;
    if (options.replicated && *chance(40)) {
      RC_ASSERT(drained(small) == drained(general));
      undrained = false;
    }
  }
  if (options.replicated) RC_ASSERT(drained(small) == drained(general));
  reached("replicated", options.replicated);
  reached("a bucket", bucket);
  reached("a sliding window", rule.algorithm == Algorithm::sliding_window);
  reached("a fixed window", rule.algorithm == Algorithm::fixed_window);
}

/// A limiter and what its replica holds of the one bucket, as crdt/replica.cc does.
struct Counting {
  crdt::Incarnation self;
  Limiter limiter;
  Cell cell;

  Counting(const std::shared_ptr<const RuleSet>& rules, std::uint64_t number)
      : self{number, number},
        limiter(rules, {.replicated = true, .incarnation = {number, number}}) {}

  /// What it hands over. When its slot was born is its own affair.
  std::vector<Cell> drain() {
    std::vector<crdt::OwnCount> out;
    limiter.replica_side().drain(out, 10);
    std::vector<Cell> told;
    for (const crdt::OwnCount& count : out) {
      cell.id = count.cell;
      own = {self, count.birth};
      crdt::Slot slot{own, count.value};
      learn({&slot, 1}, count.bucket);
      told.push_back({count.cell, {{{}, count.value}}, count.bucket});
    }
    return told;
  }
  /// The same answer, as far as it says something of the bucket.
  auto ask(const Request& request, Nanos now) {
    Decision decision = limiter.check(request, now);
    const RuleStatus& status = decision.statuses.at(0);
    return std::tuple(decision.allowed, status.remaining, status.reset, status.retry_after,
                      status.delay);
  }
  /// True if the bucket was reset.
  bool hear(const Cell& other) {
    cell.id = other.id;
    bool reset = learn(other.slots, other.bucket);
    limiter.replica_side().absorb(cell);
    return reset;
  }
  void rebase() {
    crdt::Incarnation fresh{self.hi, self.lo + 100};
    limiter.replica_side().rebase(fresh, [this](const crdt::CellId&, const crdt::SlotId& slot) {
      return cell.value_of(slot);
    });
    self = fresh;
  }

 private:
  crdt::SlotId own;

  bool learn(std::span<const crdt::Slot> slots, const crdt::BucketState& state) {
    auto over = static_cast<std::uint64_t>(cell.bucket.expiry);
    bool reborn = !cell.slots.empty() &&
                  std::any_of(slots.begin(), slots.end(),
                              [over](const crdt::Slot& slot) { return slot.id.birth >= over; });
    crdt::Slot gone;
    if (reborn) {
      if (own.writer == self) gone = {own, cell.value_of(own)};
      cell = {cell.id, {}, {}};
    }
    join(cell, slots, state);
    if (reborn) limiter.replica_side().reset(cell, gone);
    return reborn;
  }
};

Rule any_bucket() {
  Rule rule;
  rule.domain = "api";
  rule.name = "r";
  rule.key = {"key"};
  rule.algorithm = *one_of<Algorithm>({Algorithm::token_bucket, Algorithm::leaky_bucket});
  rule.window = *one_of<Nanos>({kSecond, kMinute, kDay, 7 * kMillisecond}).as("window");
  rule.limit = *one_of<std::uint64_t>({6, 10, 7, 1ull << 33}).as("limit");
  rule.burst = rule.limit;
  return rule;
}

/// One bucket in two limiters, in one of them always in its general form, and what others consume.
struct TwoForms {
  const Rule rule = any_bucket();
  const std::shared_ptr<const RuleSet> rules = rule_set({rule});
  Counting small{rules, 1};
  Counting general{rules, 2};
  Counting other{rules, 3};
  std::vector<Entry> entries{{"key", "k"}, {"method", "GET"}};
  Request request{"api", entries, 1};
  Nanos now = kStart;

  template <typename What>
  auto both(What what) {
    auto one = what(small);
    make_general(general.limiter, 0, request);
    auto two = what(general);
    make_general(general.limiter, 0, request);
    RC_ASSERT(one == two);
    return one;
  }
  /// By a clock that may be ahead.
  void others_consume() {
    other.limiter.check(request, now + *one_of<Nanos>({0, 0, kMillisecond, kSecond}));
    other.drain();
  }
  void hear_others() {
    if (other.cell.slots.empty()) return;
    const bool reset = both([&](Counting& each) { return each.hear(other.cell); });
    reached("reset", reset);
    reached("others' counts");
    reached("a clock behind a peer's", other.cell.bucket.touched > now);
  }
  void others_hear() {
    if (small.cell.slots.empty()) return;
    Cell told = small.cell;
    for (crdt::Slot& slot : told.slots) slot.id.writer.hi += 10;
    other.hear(told);
  }
  void drain() {
    auto counts = both([](Counting& each) { return each.drain(); });
    reached("drained", !counts.empty());
    reached("counts beyond 32 bits", !counts.empty() && counts[0].total() >> 32 != 0);
  }
  void sweep() {
    const Nanos floor = now - *one_of<Nanos>({0, kSecond, kSecond});
    other.limiter.sweep(floor);
    general.limiter.sweep(floor);  // which may have an entry of windows alone
    reached("swept", small.limiter.sweep(floor) > 0);
  }
  void reload() {
    Rule changed = rule;
    changed.limit = changed.burst = rule.limit + *between<std::uint64_t>(0, 2);
    auto next = rule_set({changed});
    small.limiter.reload(next);
    general.limiter.reload(next);
    reached("another limit", changed.limit != rule.limit);
  }
  void hold_and_settle() {
    const std::uint64_t used = *between<std::uint64_t>(0, 2);
    const Nanos later = now + *between<Nanos>(0, rule.window);
    const bool held = both([&](Counting& each) {
      Decision decision;
      Ticket ticket = each.limiter.reserve(request, now, kHour, decision);
      std::uint64_t before = each.limiter.used(0, request, now);
      each.limiter.settle(ticket, used, later);
      return decision.allowed && before > 0 && request.hits > 0;
    });
    now = later;
    reached("held", held);
  }
  void rebase() {
    if (!*chance(30)) return;
    small.rebase();
    general.rebase();
    reached("under a fresh incarnation");
  }
};

LAW(42, "how a replicated bucket is kept in memory does not show", "others' counts", "denied",
    "a clock behind a peer's", "reset", "another limit", "held", "under a fresh incarnation",
    "swept", "drained", "counts beyond 32 bits") {
  TwoForms two;
  const Nanos window = two.rule.window;
  for (int step = *between(1, 40).as("steps"); step > 0; --step) {
    two.now += *rc::gen::weightedOneOf<Nanos>({{5, between<Nanos>(0, window / 4)},
                                               {2, between<Nanos>(0, 3 * window)},
                                               {1, between<Nanos>(0, 5 * kSecond)}});
    two.request.hits = two.rule.limit > 100
                           ? *one_of<std::uint64_t>({1, 1ull << 31, 1ull << 32, 3'000'000'000})
                           : *between<std::uint64_t>(0, 3);
    make_general(two.general.limiter, 0, two.request);
    switch (*between(0, 11)) {
      case 0:
        two.others_consume();
        two.hear_others();
        break;
      case 1:
        two.hear_others();
        break;
      case 2:
        two.others_hear();
        break;
      case 3:
        two.drain();
        break;
      case 4:
        two.sweep();
        break;
      case 5:
        two.reload();
        break;
      case 6:
        two.hold_and_settle();
        break;
      case 7:
        two.rebase();
        break;
      default:
        reached(
            "denied",
            !std::get<0>(two.both([&](Counting& each) { return each.ask(two.request, two.now); })));
    }
    two.both([&](Counting& each) { return each.limiter.used(0, two.request, two.now); });
  }
  two.drain();
}

}  // namespace
}  // namespace weir::laws
