#include <weir/limits/limiter.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <numeric>
#include <optional>
#include <string>
#include <unordered_map>

#include <weir/limits/bucket.h>
#include <weir/limits/divisor.h>
#include <weir/limits/escrow_bucket.h>
#include <weir/limits/escrow_cell.h>
#include <weir/limits/keyed_hash.h>
#include <weir/limits/log_window.h>
#include <weir/limits/marks.h>
#include <weir/limits/overflow_sketch.h>
#include <weir/limits/published.h>
#include <weir/limits/request_ids.h>
#include <weir/limits/rule_numbers.h>
#include <weir/limits/series.h>
#include <weir/limits/series_memo.h>
#include <weir/limits/series_table.h>
#include <weir/limits/tickets.h>
#include <weir/limits/window.h>

namespace weir {
namespace {

using crdt::CellId;
using crdt::SeriesId;

/// A thread may still hold a `now` from before it was descheduled; cells are kept this much longer.
constexpr Nanos kGrace = 2 * kSecond;
/// What threads write often is kept apart: each has one of these, those beyond share the last.
constexpr std::size_t kStripes = 16;
/// Threads tell each other how far time has come in steps of this.
constexpr Nanos kTimeStep = kMillisecond;
/// Requests of a batch whose memory is on its way while an earlier one is decided.
constexpr std::size_t kAhead = 8;
/// At most this many rules are looked at one by one, which is faster than looking them up.
constexpr std::size_t kScannedRules = 8;
/// Escrow: after this long, rights that were asked for may have come.
constexpr Nanos kAskAgain = 200 * kMillisecond;
/// Escrow: demand is measured in slices of at most this.
constexpr Nanos kSlice = 2 * kSecond;
/// Full table: so many idle series give their places at once, found in at most so many looks.
constexpr std::size_t kMovedAtOnce = 16;
constexpr int kLooks = 4;
/// A lane takes at most this part of the units that are left.
constexpr std::uint64_t kLaneShare = 64;
/// Escrow: a life may have lent this far ahead, so what was lent by those before it is over so long
/// after it began.
constexpr Nanos kLentAhead = 2 * kLendingPeriod;
constexpr std::uint64_t kMaxSmall = std::numeric_limits<std::uint32_t>::max();
/// Rule sets that Limiter::rules(version) still has.
constexpr std::size_t kVersionsKept = 8;
/// Numbers of rules that are no longer in force, at which a reload looks which of them still
/// matter.
constexpr std::size_t kManyNumbers = 1024;

struct alignas(32) AtomicCounters {
  std::atomic<std::uint64_t> allowed{0};
  std::atomic<std::uint64_t> denied{0};
  std::atomic<std::uint64_t> degraded{0};
  std::atomic<std::uint64_t> elsewhere{0};
};

struct alignas(64) Stripe {
  std::atomic<Nanos> newest{0};
  std::mutex mutex;
  std::vector<std::size_t> dirty;  // entries with something to drain
};

/// A bucket whose debt is all counted in its checkpoint, and fits 64 bits in ticks that are `scale`
/// of a BucketShape's (what rate and unit have in common; every debt is a multiple of it). Says
/// what evaluate_bucket and consume_bucket say, at a fraction of the cost.
struct BriskBucket {
  bool fits = false;  // every debt that can be reached, and every cost up to the burst on top
  std::uint64_t scale = 1;
  internal::Divisor rate;
  internal::Divisor unit;
  std::uint64_t capacity = 0;
  Nanos fill_time = 0;

  static BriskBucket of(const BucketShape& shape) {
    BriskBucket made;
    if (shape.rate == 0) return made;
    made.scale = std::gcd(shape.rate, static_cast<std::uint64_t>(shape.unit));
    made.rate = internal::Divisor(shape.rate / made.scale);
    made.unit = internal::Divisor(static_cast<std::uint64_t>(shape.unit) / made.scale);
    made.fits = (shape.cap() + shape.ticks(shape.burst)) / made.scale < crdt::DebtTicks{1} << 62;
    made.capacity = made.fits ? shape.burst * made.unit.value() : 0;
    made.fill_time = shape.fill_time();
    return made;
  }
  /// Time behind the entry's last touch counts as the last touch.
  [[gnu::always_inline]] std::uint64_t debt(const SeriesEntry& entry, Nanos now) const {
    std::uint64_t owed = entry.word[0];
    if (now <= entry.time) return owed;
    std::uint64_t passed = static_cast<std::uint64_t>(now) - static_cast<std::uint64_t>(entry.time);
    std::uint64_t drained = 0;
    if (__builtin_mul_overflow(passed, rate.value(), &drained) || drained >= owed) return 0;
    return owed - drained;
  }
  [[gnu::always_inline]] Nanos drain_time(std::uint64_t debt) const {
    std::uint64_t time = rate.ceil(debt);
    return time > static_cast<std::uint64_t>(kMaxTime) ? kNever : static_cast<Nanos>(time);
  }
};

/// What a bucket owed when a request came.
struct Owed {
  std::uint64_t debt = 0;
  Nanos ahead = 0;  // by which another thread has touched it later than now
};

std::atomic<std::uint64_t> next_hash{1};

/// A rule as decisions need it.
struct Plan {
  const Rule* rule = nullptr;
  std::uint32_t index = 0;                  // of the rule
  std::uint32_t number = 0;                 // see RuleNumbers
  std::uint64_t hash_number = 0;            // of hash_key, in all of this process
  internal::KeyedHash hash_key{HashKey{}};  // of the cluster's and the rule's identity in one
  bool plain_cost = false;
  std::uint64_t default_cost = 1;
  bool shadow = false;
  bool commit = false;  // its answers wait for the disk, where there is one
  bool bucket_cell = false;
  bool log = false;
  bool spread = false;
  bool small = false;          // its series mostly are in a small form, see decide_alone()
  bool small_windows = false;  // two windows are enough for Form::window
  bool escrow = false;
  std::uint64_t reserve = 0;   // durability reserve: kept ahead of what is used
  SeriesId name;               // of an escrow rule, alike on all nodes
  bool plain_windows = false;  // and all are of one length, the older one weighted
  WindowShape window;          // but for a spread phase
  internal::Divisor sub;       // its length
  std::uint64_t limit = 0;     // as reported
  BucketShape bucket;
  BriskBucket brisk;
  EscrowBucketShape escrow_bucket;
};

/// What says whether a rule applies, where there are so few that each is looked at.
struct Gate {
  std::string_view domain;
  bool same_domain = false;  // as the one before has
  bool one_entry = false;    // `key` is all that a request must have
  std::string_view key;
  const Plan* plan = nullptr;
};

/// The rules in force, and what was counted of them while they were.
struct Program {
  std::uint64_t version = 0;
  std::shared_ptr<const RuleSet> rules;
  std::vector<Plan> plans;  // by rule
  std::vector<Gate> gates;  // by rule, or none
  std::unordered_map<SeriesId, std::uint32_t> by_identity;
  std::unordered_map<SeriesId, std::uint32_t> escrow;                // by Plan::name
  std::array<std::unique_ptr<AtomicCounters[]>, kStripes> counters;  // by rule

  RuleCounters count(std::uint32_t rule) const {
    RuleCounters sum;
    for (const auto& stripe : counters) {
      sum.allowed += stripe[rule].allowed.load(std::memory_order_relaxed);
      sum.denied += stripe[rule].denied.load(std::memory_order_relaxed);
      sum.degraded += stripe[rule].degraded.load(std::memory_order_relaxed);
      sum.elsewhere += stripe[rule].elsewhere.load(std::memory_order_relaxed);
    }
    return sum;
  }
};

/// What becomes of a cost that is allowed. `no_ticket`: it should be held, and too many are.
enum class Mode : std::uint8_t { consume, hold, no_ticket };

/// One matching rule of a request under evaluation. What has no initial value is set by prepare(),
/// the window only for rules that have one.
struct Item {
  const Plan* plan = nullptr;
  std::uint32_t rule = 0;
  Mode mode = Mode::consume;
  bool made = false;     // the entry, by this request
  bool no_room = false;  // none could be made
  bool brisk = false;    // evaluated by its small bucket: `owed` is what it owes
  bool waits = false;    // what it consumed is ahead of what is durable
  bool noted = false;    // Request::demand_noted
  SeriesEntry* entry = nullptr;
  SeriesEntry* first = nullptr;  // where it is looked for first
  Lane* lane = nullptr;          // where this thread has one, if it has
  SeriesId id;
  std::uint64_t cost = 0;
  Owed owed;
  WindowShape shape;
  std::int64_t index = 0;  // of the window, and its start
  Nanos start = 0;

  void begin_anew() {
    mode = Mode::consume;
    made = no_room = brisk = waits = false;
    entry = nullptr;
  }
};

/// Grows and is used again: setting up an Item costs more than most of what is done with it.
class Items {
 public:
  void clear() { size_ = 0; }
  std::size_t size() const { return size_; }
  Item& next() {
    if (size_ == made_) {
      items_.emplace_back();
      ++made_;
    }
    Item& item = items_[size_++];
    item.begin_anew();
    return item;
  }
  std::span<Item> all() { return {items_.data(), size_}; }

 private:
  std::vector<Item> items_;
  std::size_t made_ = 0;  // items_.size(), which divides
  std::size_t size_ = 0;
};

/// A thread's own things, so that a decision allocates nothing and shares no line that is written.
struct Local {
  const Program* program = nullptr;  // of the current call
  bool sole = true;                  // the last request met one rule: the next one may, too
  std::vector<std::uint32_t> matched;
  std::array<Items, kAhead> items;  // of a request, and of those of its batch that come next
  std::vector<SeriesEntry*> locked;
  std::vector<LogEntry> log;
  std::string key;
  SeriesMemo memo;
  std::size_t stripe = take_stripe();
  ~Local() { give_back(stripe); }

  /// No other thread writes to this stripe.
  bool alone() const { return stripe != kStripes - 1; }

 private:
  static std::mutex& mutex() {
    static std::mutex instance;
    return instance;
  }
  static std::array<bool, kStripes>& taken() {
    static std::array<bool, kStripes> instance{};
    return instance;
  }
  static std::size_t take_stripe() {
    std::lock_guard lock(mutex());
    std::size_t free = 0;
    while (free < kStripes - 1 && taken()[free]) ++free;
    taken()[free] = true;
    return free;
  }
  static void give_back(std::size_t stripe) {
    std::lock_guard lock(mutex());
    taken()[stripe] = false;
  }
};

Local& local() {
  thread_local Local instance;
  return instance;
}

/// `alone`: no other thread adds to it.
void add_one(std::atomic<std::uint64_t>& counter, bool alone) {
  if (alone) {
    counter.store(counter.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  } else {
    counter.fetch_add(1, std::memory_order_relaxed);
  }
}

void append_text(std::string& out, std::string_view text) {
  // Length first: ("a", "bc") and ("ab", "c") must differ.
  auto size = static_cast<std::uint32_t>(text.size());
  out.append(reinterpret_cast<const char*>(&size), sizeof size);
  out.append(text);
}

SeriesId hash_with(const internal::KeyedHash& hash_key, std::string_view text) {
  std::array<std::uint64_t, 2> hash = hash_key(text);
  return {hash[0], hash[1]};
}

/// What makes two rules count apart. Not the numbers: a changed limit keeps its counts.
std::string identity(const Rule& rule) {
  std::string text;
  append_text(text, rule.domain);
  append_text(text, rule.name);
  append_text(text, to_string(rule.algorithm));
  bool sliding = rule.algorithm == Algorithm::sliding_window;
  append_text(text, std::to_string(rule.calendar ? 0 : rule.window));
  if (rule.calendar) {
    append_text(text, to_string(rule.calendar->unit));
    append_text(text, rule.calendar->time_zone);
  }
  append_text(text, std::to_string(sliding ? rule.slots : 0));
  append_text(text, sliding && rule.strict ? "strict" : "");
  append_text(text, rule.phase == Phase::spread ? "spread" : "");
  if (rule.enforcement == Enforcement::escrow) append_text(text, "escrow");
  for (const std::string& key : rule.key) append_text(text, key);
  return text;
}

/// A log's entries, oldest first; only the newest `most` that are not 0. Valid until the thread's
/// next call.
std::span<const LogEntry> read_log(const Series* series, std::uint64_t most) {
  std::vector<LogEntry>& log = local().log;
  log.clear();
  if (series == nullptr) return log;
  for (auto cell = series->windows.rbegin(); cell != series->windows.rend(); ++cell) {
    if (log.size() >= most) break;
    if (cell->total() > 0) log.push_back({cell->epoch.start, cell->total()});
  }
  std::reverse(log.begin(), log.end());
  return log;
}

// Form::window: the newest window starts at entry.time.

std::uint64_t small_count(const SeriesEntry& entry, const WindowShape& shape, std::int64_t index) {
  std::int64_t newest = shape.index(entry.time);
  if (index == newest) return std::uint64_t{entry.count[0]} + entry.count[1];
  if (index == newest - 1) return std::uint64_t{entry.count[2]} + entry.count[3];
  return 0;
}

/// Moves on to the window `index`, the next or a later one. False if undrained units would go.
bool roll(SeriesEntry& entry, const WindowShape& shape, std::int64_t index) {
  bool next = index == shape.index(entry.time) + 1;
  bool dirty = entry.has(SeriesEntry::kDirty);
  if (entry.has(SeriesEntry::kDirtyBefore) || (dirty && !next)) return false;
  entry.count[2] = next ? entry.count[0] : 0;
  entry.count[3] = next ? entry.count[1] : 0;
  entry.count[0] = entry.count[1] = 0;
  entry.set(SeriesEntry::kDirtyBefore, dirty);
  entry.set(SeriesEntry::kDirty, false);
  entry.time = shape.start(index);
  return true;
}

// Form::bucket: everything was counted here, so its checkpoint counts all, be it this much.

constexpr std::uint64_t kSmallTotal = 1;

/// `shape` is what its debt was counted by.
crdt::BucketState small_bucket(const SeriesEntry& entry, const BucketShape& shape) {
  BriskBucket brisk = BriskBucket::of(shape);
  crdt::BucketState state;
  state.checkpoint = {kSmallTotal, entry.time,
                      static_cast<crdt::DebtTicks>(entry.word[0]) * brisk.scale};
  state.touched = entry.time;
  state.expiry = entry.time + brisk.fill_time;
  return state;
}

/// Small, and never above a hundredth of the limit (but for limits that have none).
std::uint64_t reserve_of(const Rule& rule) {
  return rule.durability == Durability::reserve ? std::max<std::uint64_t>(1, rule.limit / 100) : 0;
}

std::vector<Gate> gates_of(const std::vector<Plan>& plans) {
  std::vector<Gate> gates;
  for (const Plan& plan : plans) {
    const Rule& rule = *plan.rule;
    Gate gate;
    gate.plan = &plan;
    gate.domain = rule.domain;
    gate.same_domain = !gates.empty() && gates.back().domain == rule.domain;
    gate.one_entry = rule.match.empty() && rule.key.size() == 1;
    if (gate.one_entry) gate.key = rule.key[0];
    gates.push_back(gate);
  }
  return gates;
}

Plan plan_of(const Rule& rule, std::uint32_t number, const SeriesId& identity) {
  Plan plan;
  plan.rule = &rule;
  plan.number = number;
  plan.hash_number = next_hash.fetch_add(1, std::memory_order_relaxed);
  HashKey own;
  std::memcpy(own.data(), &identity, sizeof identity);
  plan.hash_key = internal::KeyedHash(own);
  plan.plain_cost = rule.cost_by_method.empty();
  plan.default_cost = rule.default_cost;
  plan.shadow = rule.shadow;
  plan.escrow = rule.enforcement == Enforcement::escrow;
  plan.reserve = reserve_of(rule);
  plan.commit = rule.durability == Durability::commit && !plan.escrow;
  plan.bucket_cell = is_bucket(rule.algorithm);
  plan.log = rule.algorithm == Algorithm::sliding_log;
  plan.limit = plan.bucket_cell ? rule.burst : rule.limit;
  if (plan.bucket_cell) {
    plan.bucket = bucket_shape(rule);
    plan.brisk = BriskBucket::of(plan.bucket);
    plan.escrow_bucket = escrow_bucket_shape(rule);
  } else if (!plan.log) {
    WindowShape shape = window_shape(rule, {});
    // A thread that is late by the grace still finds its window.
    plan.small_windows = shape.previous <= 1 && (shape.calendar || shape.sub >= kGrace) &&
                         !plan.escrow && plan.reserve == 0;
    plan.plain_windows = plan.small_windows && shape.calendar == nullptr && !shape.strict;
    plan.spread = rule.phase == Phase::spread;
    plan.sub = internal::Divisor(static_cast<std::uint64_t>(shape.sub));
    shape.phase = 0;
    plan.window = shape;
  }
  plan.small = plan.brisk.fits || plan.plain_windows;
  return plan;
}

}  // namespace

struct Limiter::Impl {
  using Programs = Published<const Program, kStripes>;

  LimiterOptions options;
  SeriesTable table;
  std::array<Stripe, kStripes> stripes;
  std::atomic<Nanos> newest{0};
  std::atomic<std::size_t> next_stripe{0};
  std::mutex overflow_mutex;  // taken with entries' locks held, never the other way
  OverflowSketch overflow;
  std::atomic<Nanos> overflow_over{0};  // when all that it counts is; changed with its mutex held
  RequestIds ids;
  Tickets tickets;
  std::atomic<std::uint64_t> timed_out{0};
  // Where escrow rules stand: EscrowStanding, read by every thread.
  std::atomic<bool> open{true};
  std::atomic<bool> stopped{false};
  std::atomic<bool> disk{true};
  std::atomic<Nanos> horizon{-1};
  std::atomic<Nanos> gives_ahead{kMaxTime};
  std::atomic<Nanos> since{-1};
  EscrowNeeds needs;
  std::mutex busy_mutex;            // taken with an entry's lock held
  std::map<CellId, SeriesId> busy;  // windows in which more was asked for than the share; the rule
  std::mutex reload_mutex;          // taken with no other lock held
  RuleNumbers numbers;              // changed with reload_mutex
  std::vector<std::shared_ptr<const RuleSet>> versions;  // the newest is the last
  std::unordered_map<SeriesId, RuleCounters> past;       // of programs that are gone
  Programs programs;

  Impl(std::shared_ptr<const RuleSet> rules, LimiterOptions given)
      : options(given),
        table(given.max_series, given.replicated, given.populate),
        ids(given.hash_key, given.max_request_ids, given.request_id_ttl),
        tickets(given.max_tickets),
        programs(make_program(std::move(rules), 1)) {}

  SeriesId identity_of(const Rule& rule) const {
    return hash_with(internal::KeyedHash(options.hash_key), identity(rule));
  }

  // The rules in force. With reload_mutex, but for use().

  std::unique_ptr<const Program> make_program(std::shared_ptr<const RuleSet> rules,
                                              std::uint64_t version) {
    auto program = std::make_unique<Program>();
    program->version = version;
    program->rules = std::move(rules);
    for (const Rule& rule : program->rules->rules()) {
      SeriesId id = identity_of(rule);
      program->by_identity.emplace(id, static_cast<std::uint32_t>(program->plans.size()));
      Plan plan = plan_of(rule, numbers.number_of(id, rule), id);
      plan.index = static_cast<std::uint32_t>(program->plans.size());
      plan.commit = plan.commit && options.replicated;
      if (plan.escrow) {
        plan.name = hash_with(internal::KeyedHash(options.hash_key), "name of " + identity(rule));
        program->escrow.emplace(plan.name, static_cast<std::uint32_t>(program->plans.size()));
      }
      program->plans.push_back(std::move(plan));
    }
    for (auto& stripe : program->counters) {
      stripe = std::make_unique<AtomicCounters[]>(program->plans.size());
    }
    if (program->plans.size() <= kScannedRules) program->gates = gates_of(program->plans);
    versions.push_back(program->rules);
    if (versions.size() > kVersionsKept) versions.erase(versions.begin());
    return program;
  }

  Programs::Use use(const Local& work) { return programs.use(work.stripe); }

  void reload(std::shared_ptr<const RuleSet> rules) {
    std::lock_guard lock(reload_mutex);
    programs.replace(make_program(std::move(rules), programs.current().version + 1));
    forget_programs();
    if (numbers.size() < 2 * programs.current().plans.size() + kManyNumbers) return;
    std::vector<bool> used = used_numbers();
    table.visit_all([&](SeriesEntry& entry) {
      note_number(entry, used);
      return false;
    });
    forget_numbers(used);
  }

  void forget_programs() {
    programs.reclaim([&](const Program& gone) {
      for (const auto& [id, rule] : gone.by_identity) {
        RuleCounters& sum = past[id];
        RuleCounters more = gone.count(rule);
        sum.allowed += more.allowed;
        sum.denied += more.denied;
        sum.degraded += more.degraded;
        sum.elsewhere += more.elsewhere;
      }
    });
  }

  std::vector<bool> used_numbers() const {
    std::vector<bool> used(numbers.end());
    programs.for_each([&](const Program& program) {
      for (const Plan& plan : program.plans) used[plan.number] = true;
    });
    return used;
  }
  /// With the entry's lock.
  void note_number(const SeriesEntry& entry, std::vector<bool>& used) const {
    std::uint32_t number = table.rule(entry);
    if (number != SeriesTable::kNoRule) used[number] = true;
  }
  void forget_numbers(const std::vector<bool>& used) {
    numbers.keep_only(used);
    std::erase_if(past, [&](const auto& one) { return !numbers.knows(one.first); });
  }

  RuleCounters counters(std::uint32_t rule) {
    std::lock_guard lock(reload_mutex);
    RuleCounters sum;
    if (rule >= programs.current().plans.size()) return sum;
    SeriesId id = identity_of(*programs.current().plans[rule].rule);
    if (auto before = past.find(id); before != past.end()) sum = before->second;
    programs.for_each([&](const Program& program) {
      auto found = program.by_identity.find(id);
      if (found == program.by_identity.end()) return;
      RuleCounters more = program.count(found->second);
      sum.allowed += more.allowed;
      sum.denied += more.denied;
      sum.degraded += more.degraded;
      sum.elsewhere += more.elsewhere;
    });
    return sum;
  }

  std::shared_ptr<const RuleSet> rules_of(std::uint64_t version) {
    std::lock_guard lock(reload_mutex);
    std::uint64_t behind = programs.current().version - version;
    return behind < versions.size() ? versions[versions.size() - 1 - behind] : nullptr;
  }

  /// What was told under other rules, in terms of those in force: of rules that are still there.
  void translate(const Program& program, const RuleSet& told_by, Decision& out) const {
    out.deciding = -1;
    out.version = program.version;
    std::erase_if(out.statuses, [&](RuleStatus& status) {
      auto found = program.by_identity.find(identity_of(told_by.rules()[status.rule]));
      if (found == program.by_identity.end()) return true;
      status.rule = found->second;
      return false;
    });
    std::sort(out.statuses.begin(), out.statuses.end(),
              [](const RuleStatus& a, const RuleStatus& b) { return a.rule < b.rule; });
    for (std::size_t i = 0; i < out.statuses.size(); ++i) {
      if (!out.statuses[i].shadow) pick_decider(out, static_cast<int>(i));
    }
  }

  /// What other threads have seen counts once it is a step ahead.
  [[gnu::always_inline]] Nanos clamp(Nanos now, std::size_t stripe) {
    std::atomic<Nanos>& mine = stripes[stripe].newest;
    Nanos told = newest.load(std::memory_order_relaxed);
    Nanos seen = std::max(mine.load(std::memory_order_relaxed), told);
    if (now <= seen) return seen;
    mine.store(now, std::memory_order_relaxed);
    while (now - told >= kTimeStep &&
           !newest.compare_exchange_weak(told, now, std::memory_order_relaxed)) {
    }
    return now;
  }

  SeriesId series_of(const Plan& plan, const Request& request, std::string& key) const {
    const std::vector<std::string>& names = plan.rule->key;
    if (names.size() == 1) {
      const std::string_view* value = request.find(names[0]);
      return hash_with(plan.hash_key, value == nullptr ? std::string_view{} : *value);
    }
    key.clear();
    for (const std::string& name : names) {
      const std::string_view* value = request.find(name);
      append_text(key, value == nullptr ? std::string_view{} : *value);
    }
    return hash_with(plan.hash_key, key);
  }

  // One entry, with its lock held. Null stands for an unused one.

  /// Without reset and waits where Item::brisk comes out true: finish() has these.
  void assess(const Plan& plan, Item& item, Nanos now, RuleStatus& status) {
    const SeriesEntry* entry = item.entry;
    item.brisk = plan.brisk.fits && entry != nullptr && is_brisk(plan, *entry);
    if (!item.brisk && plan.plain_windows && entry != nullptr && entry->form() == Form::window &&
        entry->time <= item.start) {
      if (assess_small_windows(plan, *entry, item.cost, now, item.shape, item.start, status)) {
        return;
      }
    }
    if (item.brisk) {
      item.owed = assess_brisk(plan, *item.entry, item.cost, now, status);
      return;
    }
    Verdict verdict = evaluate(plan, item, item.cost, now);
    status.allowed = verdict.allowed;
    status.remaining = verdict.remaining;
    status.reset = verdict.reset;
    status.retry_after = verdict.retry_after;
    status.delay = verdict.delay;
    status.elsewhere = verdict.elsewhere;
  }

  static bool is_brisk(const Plan& plan, const SeriesEntry& entry) {
    return entry.form() == Form::bucket && entry.word[1] == plan.number;
  }

  [[gnu::always_inline]] static Owed assess_brisk(const Plan& plan, const SeriesEntry& entry,
                                                  std::uint64_t cost, Nanos now,
                                                  RuleStatus& status) {
    Owed owed{plan.brisk.debt(entry, now), std::max<Nanos>(entry.time - now, 0)};
    bool room = owed.debt <= plan.brisk.capacity;
    std::uint64_t remaining = room ? plan.brisk.unit.floor(plan.brisk.capacity - owed.debt) : 0;
    status.remaining = remaining;
    status.allowed = room && cost <= remaining;
    status.retry_after = status.delay = 0;
    return owed;
  }

  /// What evaluate_window says where no window is newer than the current one. False: ask it.
  [[gnu::always_inline]] static bool assess_small_windows(const Plan& plan,
                                                          const SeriesEntry& entry,
                                                          std::uint64_t cost, Nanos now,
                                                          const WindowShape& shape, Nanos start,
                                                          RuleStatus& status) {
    std::uint64_t newest = std::uint64_t{entry.count[0]} + entry.count[1];
    std::uint64_t before = std::uint64_t{entry.count[2]} + entry.count[3];
    if (entry.time < start) {
      before = entry.time == start - shape.sub ? newest : 0;
      newest = 0;
    }
    if (shape.previous == 0) before = 0;
    Nanos left = start + shape.sub - now;
    std::uint64_t used = newest;
    if (before > 0) {
      Uint128 weighted = static_cast<Uint128>(before) * static_cast<std::uint64_t>(left);
      used +=
          weighted >> 64 == 0
              ? plan.sub.ceil(static_cast<std::uint64_t>(weighted))
              : static_cast<std::uint64_t>((weighted + plan.sub.value() - 1) / plan.sub.value());
    }
    status.remaining = plan.limit - std::min(plan.limit, used);
    status.allowed = used <= plan.limit && cost <= status.remaining;
    // When a weighted window lets this cost pass is for evaluate_window to say.
    if (!status.allowed && shape.previous > 0) return false;
    status.reset = newest > 0 ? left + shape.sub * shape.previous : before > 0 ? left : 0;
    status.delay = 0;
    status.retry_after = 0;
    if (status.allowed) return true;
    status.retry_after = cost > plan.limit ? kNever : left;
    return true;
  }

  /// What assess() left out; a consumed cost is in the debt by now.
  [[gnu::always_inline]] static void finish(const Plan& plan, Owed owed, std::uint64_t cost,
                                            bool consumed, RuleStatus& status) {
    const BriskBucket& brisk = plan.brisk;
    std::uint64_t debt = owed.debt;
    bool allowed = consumed || status.allowed;
    if (plan.bucket.queue && allowed) [[unlikely]]
      status.delay = until_drained(brisk, owed, debt);
    if (consumed) debt += cost * brisk.unit.value();
    status.reset = until_drained(brisk, owed, debt);
    if (allowed) [[likely]]
      return;
    debt -= brisk.capacity - cost * brisk.unit.value();
    status.retry_after = cost > plan.limit ? kNever : until_drained(brisk, owed, debt);
  }

  [[gnu::always_inline]] static Nanos until_drained(const BriskBucket& brisk, Owed owed,
                                                    std::uint64_t part) {
    if (part == 0) return 0;
    Nanos wait = brisk.drain_time(part);
    return wait == kNever ? kNever : wait + owed.ahead;
  }

  /// Of Form::bucket: the bucket that its debt was counted by.
  const BucketShape& counted_by(const SeriesEntry& entry) const {
    return numbers.at(static_cast<std::uint32_t>(entry.word[1])).bucket;
  }

  Verdict evaluate(const Plan& plan, const Item& item, std::uint64_t cost, Nanos now) {
    const SeriesEntry* entry = item.entry;
    Form form = entry == nullptr ? Form::unused : entry->form();
    Series* series = form == Form::general ? entry->series : nullptr;
    if (plan.escrow && plan.bucket_cell) {
      return evaluate_escrow_bucket(plan, item, series, cost, now);
    }
    if (plan.escrow) return evaluate_escrow(plan, item, series, cost, now);
    if (plan.log) {
      return evaluate_log(read_log(series, plan.limit + 1), plan.rule->window, plan.limit, now,
                          cost);
    }
    if (plan.bucket_cell) {
      if (form == Form::bucket) {
        return evaluate_bucket(plan.bucket, small_bucket(*entry, counted_by(*entry)), kSmallTotal,
                               now, cost);
      }
      if (series == nullptr || series->bucket == nullptr) {
        return evaluate_bucket(plan.bucket, {}, 0, now, cost);
      }
      const BucketCell& bucket = *series->bucket;
      if (bucket.held > 0) {
        return evaluate_bucket(plan.bucket, with_held(plan, bucket, now),
                               add_saturated(bucket.total(), bucket.held), now, cost);
      }
      return evaluate_bucket(plan.bucket, bucket.state, bucket.total(), now, cost);
    }
    const WindowShape& shape = item.shape;
    std::int64_t last = item.index;
    if (form == Form::window) {
      return evaluate_window(shape, plan.limit, now, cost, std::max(last, shape.index(entry->time)),
                             [&](std::int64_t index) { return small_count(*entry, shape, index); });
    }
    if (series == nullptr) {
      if (shape.previous == 0) return evaluate_fixed(plan.limit, 0, cost, kNever);
      return evaluate_window(shape, plan.limit, now, cost, last,
                             [](std::int64_t) { return std::uint64_t{0}; });
    }
    if (!series->windows.empty()) {
      last = std::max(last, shape.index(series->windows.back().epoch.start));
    }
    return evaluate_window(shape, plan.limit, now, cost, last,
                           [&](std::int64_t index) { return series->count(shape.epoch(index)); });
  }

  /// As if what is held were consumed now.
  static crdt::BucketState with_held(const Plan& plan, const BucketCell& bucket, Nanos now) {
    return consume_bucket(plan.bucket, bucket.state, bucket.total(), now, bucket.held);
  }

  /// What evaluate_window says of a fixed window with `used` units and nothing in a later one.
  static Verdict evaluate_fixed(std::uint64_t limit, std::uint64_t used, std::uint64_t cost,
                                Nanos left) {
    Verdict verdict;
    verdict.remaining = limit - std::min(limit, used);
    verdict.allowed = used <= limit && cost <= verdict.remaining;
    verdict.reset = used > 0 ? left : 0;
    if (!verdict.allowed) verdict.retry_after = cost > limit ? kNever : left;
    return verdict;
  }

  /// Once the cost has been consumed. `status` is from before.
  Nanos reset_after(const Plan& plan, const Item& item, const RuleStatus& status, Nanos now) {
    if (plan.bucket_cell || plan.log) return evaluate(plan, item, 0, now).reset;
    if (plan.plain_windows) return reset_of_windows(item.shape, item.start, status, now);
    return std::max(status.reset, item.shape.epoch(item.index).expiry - now);
  }

  [[gnu::always_inline]] static Nanos reset_of_windows(const WindowShape& shape, Nanos start,
                                                       const RuleStatus& status, Nanos now) {
    return std::max(status.reset, start + shape.sub * (Nanos{shape.previous} + 1) - now);
  }

  /// Puts the series beside the table, where everything fits.
  Series& general(SeriesEntry& entry, const SeriesId& id) {
    Form form = entry.form();
    if (form == Form::general) return *entry.series;
    auto series = std::make_unique<Series>();
    if (form == Form::window) {
      WindowShape shape = window_shape(numbers.at(table.rule(entry)).rule, id);
      std::int64_t newest_index = shape.index(entry.time);
      auto put = [&](std::int64_t index, const std::uint32_t* counts, std::uint64_t flag) {
        if (counts[0] == 0 && counts[1] == 0) return;
        series->windows.push_back({shape.epoch(index), counts[0], counts[1], entry.has(flag)});
      };
      put(newest_index - 1, entry.count + 2, SeriesEntry::kDirtyBefore);
      put(newest_index, entry.count, SeriesEntry::kDirty);
    } else if (form == Form::bucket) {
      series->bucket = std::make_unique<BucketCell>();
      BucketCell& bucket = *series->bucket;
      bucket.birth = bucket.last_birth = static_cast<std::uint64_t>(entry.time);
      bucket.own = kSmallTotal;
      bucket.state = small_bucket(entry, counted_by(entry));
      bucket.made = bucket.state.checkpoint;
    }
    entry.set(SeriesEntry::kDirty | SeriesEntry::kDirtyBefore, false);
    entry.set_form(Form::general);
    entry.series = series.release();
    return *entry.series;
  }

  void consume(const Plan& plan, Item& item, Nanos now, const RuleStatus& status) {
    SeriesEntry& entry = *item.entry;
    // Small forms were made by a request: they have their rule, and it is on another line.
    bool small = item.brisk || entry.form() == Form::window;
    if (!small && table.rule(entry) != plan.number) table.set_rule(entry, plan.number);
    if (item.mode == Mode::hold) {
      hold(plan, item, now);
      return;
    }
    if (item.brisk) {
      consume_brisk(plan, entry, item.owed, item.cost, now);
      return;
    }
    if (plan.escrow) {
      consume_escrow(plan, item, now);
      return;
    }
    if (plan.bucket_cell) {
      if (!begin_small_bucket(plan, item, now)) {
        consume_bucket_cell(plan, general(entry, item.id), item.cost, now);
      }
    } else if (!consume_small_window(plan, item)) {
      Series& series = general(entry, item.id);
      series.forget_windows(now - kGrace);
      WindowCell& cell = series.window(plan.log ? log_epoch(plan.rule->window, now)
                                                : item.shape.epoch(item.index));
      cell.own = add_saturated(cell.own, item.cost);
      cell.dirty = options.replicated;
      if (options.replicated && plan.reserve > 0) keep_reserve(plan, item, cell);
    }
    if (!options.replicated) return;
    std::uint64_t used = status.limit - std::min(status.limit, status.remaining);
    if (crosses_mark(used, add_saturated(used, item.cost), status.limit))
      entry.set(SeriesEntry::kUrgent);
    list(entry);
  }

  /// The cell in which a cost counts.
  static crdt::Epoch epoch_of(const Plan& plan, const Item& item, Nanos now) {
    if (plan.bucket_cell) return crdt::kBucketEpoch;
    return plan.log ? log_epoch(plan.rule->window, now) : item.shape.epoch(item.index);
  }

  /// Only where nothing is replicated.
  static void consume_brisk(const Plan& plan, SeriesEntry& entry, Owed owed, std::uint64_t cost,
                            Nanos now) {
    entry.word[0] = owed.debt + cost * plan.brisk.unit.value();
    entry.time = now + owed.ahead;
  }

  bool consume_small_window(const Plan& plan, const Item& item) {
    SeriesEntry& entry = *item.entry;
    const WindowShape& shape = item.shape;
    if (!plan.small_windows || item.cost > kMaxSmall) return false;
    std::int64_t index = item.index;
    Nanos start = item.start;
    if (entry.form() == Form::unused) {
      entry.set_form(Form::window);
      entry.time = start;
    }
    if (entry.form() != Form::window) return false;
    if (start > entry.time && !roll(entry, shape, index)) return false;
    bool before = start < entry.time;
    if (before && index != shape.index(entry.time) - 1) return false;
    std::uint32_t& own = entry.count[before ? 2 : 0];
    if (item.cost > kMaxSmall - own) return false;
    own += static_cast<std::uint32_t>(item.cost);
    if (options.replicated) entry.set(before ? SeriesEntry::kDirtyBefore : SeriesEntry::kDirty);
    return true;
  }

  /// The first units of a series.
  bool begin_small_bucket(const Plan& plan, const Item& item, Nanos now) {
    SeriesEntry& entry = *item.entry;
    // A replicated bucket's slot has a birth, for which there is no room.
    if (options.replicated || !plan.brisk.fits || entry.form() != Form::unused) return false;
    entry.set_form(Form::bucket);
    entry.time = now;
    entry.word[0] = item.cost * plan.brisk.unit.value();
    entry.word[1] = plan.number;
    return true;
  }

  void consume_bucket_cell(const Plan& plan, Series& series, std::uint64_t cost, Nanos now) {
    BucketCell& bucket = series.make_bucket();
    if (bucket.birth == 0) {
      bucket.birth = std::max(static_cast<std::uint64_t>(now), bucket.last_birth + 1);
      bucket.last_birth = bucket.birth;
    }
    // As in consume(): alone, no total is needed.
    if (!options.replicated && bucket.others == 0) bucket.own = bucket.state.checkpoint.counted = 0;
    bucket.state = consume_bucket(plan.bucket, bucket.state, bucket.total(), now, cost);
    bucket.made = bucket.state.checkpoint;
    bucket.own = add_saturated(bucket.own, cost);
    bucket.dirty = options.replicated;
  }

  void list(SeriesEntry& entry) {
    if (entry.has(SeriesEntry::kListed)) return;
    entry.set(SeriesEntry::kListed);
    Stripe& stripe = stripes[local().stripe];
    std::lock_guard lock(stripe.mutex);
    stripe.dirty.push_back(table.index(entry));
  }

  // Decisions.

  /// The rules that apply, and where their series are.
  void prepare(const Request& request, Nanos now, Local& work, Items& items) {
    items.clear();
    const Program& program = *work.program;
    if (program.gates.empty() || !request.only.empty()) {
      prepare_by_index(request, now, work, items);
      return;
    }
    bool domain = false;
    for (const Gate& gate : program.gates) {
      if (!gate.same_domain) domain = internal::same_text(gate.domain, request.domain);
      if (!domain) continue;
      const Plan& plan = *gate.plan;
      if (gate.one_entry) {
        const std::string_view* value = request.find(gate.key);
        if (value != nullptr) add(plan, id_of(plan, *value, work), request, now, work, items);
      } else if (plan.rule->matches(request)) {
        add_any(plan, request, now, work, items);
      }
    }
  }

  [[gnu::noinline]] void prepare_by_index(const Request& request, Nanos now, Local& work,
                                          Items& items) {
    work.matched.clear();
    work.program->rules->match(request, work.matched);
    for (std::uint32_t index : work.matched) {
      add_any(work.program->plans[index], request, now, work, items);
    }
  }

  [[gnu::noinline]] void add_any(const Plan& plan, const Request& request, Nanos now, Local& work,
                                 Items& items) {
    add(plan, series_of(plan, request, work.key), request, now, work, items);
  }

  static SeriesId id_of(const Plan& plan, std::string_view value, Local& work) {
    return work.memo.id_of(plan.hash_number, value, [&plan](std::string_view text) {
      return hash_with(plan.hash_key, text);
    });
  }

  [[gnu::always_inline]] void add(const Plan& plan, const SeriesId& known, const Request& request,
                                  Nanos now, const Local& work, Items& items) {
    const SeriesId id = known;
    Item& item = items.next();
    item.first = table.first(id);
    // A thread with a lane leaves the entry's cache line to others.
    item.lane = &table.lane(work.stripe, id);
    if (item.lane->id != id) __builtin_prefetch(item.first, 1);
    item.plan = &plan;
    item.rule = plan.index;
    item.id = id;
    item.cost = cost_of(plan, request);
    item.noted = request.demand_noted;
    if (!plan.bucket_cell && !plan.log) find_window(plan, item, now);
  }

  [[gnu::always_inline]] static std::uint64_t cost_of(const Plan& plan, const Request& request) {
    return mul_saturated(plan.plain_cost ? plan.default_cost : plan.rule->cost_of(request),
                         request.hits);
  }

  [[gnu::always_inline]] static void find_window(const Plan& plan, Item& item, Nanos now) {
    find_window(plan, item.id, now, item.shape, item.index, item.start);
  }
  [[gnu::always_inline]] static void find_window(const Plan& plan, const SeriesId& id, Nanos now,
                                                 WindowShape& shape, std::int64_t& index,
                                                 Nanos& start) {
    shape = plan.spread ? window_shape(*plan.rule, id) : plan.window;
    if (shape.calendar != nullptr) {
      index = shape.index(now);
    } else {
      auto time = static_cast<std::uint64_t>(now + shape.phase);
      index = static_cast<std::int64_t>(plan.sub.floor(time));
    }
    start = shape.start(index);
  }

  void check(const Request& request, Nanos given, Decision& out) {
    Local& work = local();
    work.program = programs.kept(work.stripe);
    if (work.sole && work.program != nullptr && request.id.empty()) [[likely]] {
      Sole sole = sole_match(*work.program, request);
      if (sole.plan != nullptr && sole.plan->small) [[likely]] {
        const SeriesId id = id_of(*sole.plan, *sole.value, work);
        if (decide_alone(*sole.plan, id, cost_of(*sole.plan, request), table.first(id),
                         table.lane(work.stripe, id), work, clamp(given, work.stripe), out))
            [[likely]] {
          return;
        }
      }
    }
    check_any(request, work, given, out);
  }

  [[gnu::noinline]] void check_any(const Request& request, Local& work, Nanos given,
                                   Decision& out) {
    Programs::Use program = use(work);
    work.program = &*program;
    Nanos now = clamp(given, work.stripe);
    Items& items = work.items[0];
    prepare(request, now, work, items);
    work.sole = items.size() == 1;
    decide_prepared(request, items.all(), work, now, out);
  }

  /// The one rule that a request meets, if it has no matchers, and the text that it counts by.
  struct Sole {
    const Plan* plan = nullptr;
    const std::string_view* value = nullptr;
  };
  [[gnu::noinline]] static Sole sole_match(const Program& program, const Request& request) {
    Sole sole;
    bool domain = false;
    if (!request.only.empty()) return {};
    for (const Gate& gate : program.gates) {
      if (!gate.same_domain) domain = internal::same_text(gate.domain, request.domain);
      if (!domain) continue;
      if (!gate.one_entry) return {};
      const std::string_view* value = request.find(gate.key);
      if (value == nullptr) continue;
      if (sole.plan != nullptr) return {};
      sole = {gate.plan, value};
    }
    return sole;
  }

  void decide_prepared(const Request& request, std::span<Item> items, Local& work, Nanos now,
                       Decision& out) {
    if (request.id.empty()) {
      bool decided = items.size() == 1 ? decide_alone(items[0], work, now, out)
                                       : decide_few(items, work, now, out);
      if (decided) return;
    }
    decide_once(request, items, work, now, out);
  }

  void check(std::span<const Request> requests, Nanos given, std::span<Decision> out) {
    Local& work = local();
    Programs::Use program = use(work);
    work.program = &*program;
    Nanos now = clamp(given, work.stripe);
    for (std::size_t i = 0; i < requests.size() + kAhead; ++i) {
      Items& items = work.items[i % kAhead];
      if (i >= kAhead && i - kAhead < requests.size()) {
        decide_prepared(requests[i - kAhead], items.all(), work, now, out[i - kAhead]);
      }
      if (i < requests.size()) prepare(requests[i], now, work, items);
    }
  }

  void decide_once(const Request& request, std::span<Item> items, Local& work, Nanos now,
                   Decision& out) {
    if (request.id.empty()) {
      decide(items, work, now, out);
    } else {
      by_id(request, items, *work.program, now, out, [&] {
        decide(items, work, now, out);
        return Ticket{};
      });
    }
  }

  /// What was told to this id before, or what `decide_now` makes of it. The lock of an id is taken
  /// before those of series, never with one in hand.
  template <typename Decide>
  Ticket by_id(const Request& request, std::span<const Item> items, const Program& program,
               Nanos now, Decision& out, Decide decide_now) {
    RequestIds::Answer answer;
    ids.once(request.domain, request.id, now, [&](const RequestIds::Answer* known) {
      if (known != nullptr) {
        out = known->decision;
        out.repeated = true;
        if (known->rules != program.rules) translate(program, *known->rules, out);
        answer.ticket = known->ticket;
        return known;
      }
      answer.ticket = decide_now();
      const RequestIds::Answer* fresh = nullptr;
      if (consumed(items, out)) {
        answer.decision = out;
        answer.rules = program.rules;
        fresh = &answer;
      }
      return fresh;
    });
    return answer.ticket;
  }

  static bool consumed(std::span<const Item> items, const Decision& decision) {
    if (!decision.allowed) return false;
    for (std::size_t i = 0; i < items.size(); ++i) {
      if (decision.statuses[i].allowed && items[i].cost > 0) return true;
    }
    return false;
  }

  void decide(std::span<Item> items, Local& work, Nanos now, Decision& out) {
    for (bool again = false;; again = true) {
      for (Item& item : items) {
        if (item.entry == nullptr) item.entry = table.find(item.id, item.first);
      }
      if (!lock_all(items, work.locked) || !settle(items, now, out)) continue;
      for (Item& item : items) {
        if (again && item.made) table.remove_unused(*item.entry, item.id);
      }
      break;
    }
    out.version = work.program->version;
    for (const RuleStatus& status : out.statuses) count_any(status, work);
  }

  [[gnu::always_inline]] static void count(const RuleStatus& status, Local& work) {
    AtomicCounters& counter = work.program->counters[work.stripe][status.rule];
    add_one(status.allowed ? counter.allowed : counter.denied, work.alone());
  }
  static void count_any(const RuleStatus& status, Local& work) {
    count(status, work);
    AtomicCounters& counter = work.program->counters[work.stripe][status.rule];
    if (status.degraded) add_one(counter.degraded, work.alone());
    if (status.elsewhere) add_one(counter.elsewhere, work.alone());
  }

  [[gnu::noinline]] bool decide_alone(const Item& item, Local& work, Nanos now, Decision& out) {
    return item.plan->small &&
           decide_alone(*item.plan, item.id, item.cost, item.first, *item.lane, work, now, out);
  }

  /// What the general way says where one rule matches, and its series is known and small (as it
  /// mostly is with Plan::small). The lock is held for what needs it, and not taken where this
  /// thread has a lane. False: nothing was done. Inlined with all that it needs, as nothing else
  /// is: what is rare is a call away.
  [[gnu::always_inline]] bool decide_alone(const Plan& plan, const SeriesId id,
                                           const std::uint64_t cost, SeriesEntry* first, Lane& lane,
                                           Local& work, Nanos now, Decision& out) {
    if (!has_one(out.statuses)) [[unlikely]]
      make_one(out.statuses);
    RuleStatus& status = *out.statuses.data();
    status.limit = plan.limit;
    bool consumes = true;
    if (has_lane(lane, id, cost, *work.program, now) && lane.spend(cost)) {
      tell_of_lane(lane, now, status);
    } else {
      SeriesEntry* entry = table.find_and_lock(id, first);
      if (entry == nullptr) [[unlikely]]
        return false;
      if (entry->has(SeriesEntry::kLanes)) [[unlikely]]
        close_ended_lanes(*entry, cost, now);
      if (plan.bucket_cell) {
        Owed owed;
        if (!assess_bucket_alone(plan, *entry, cost, now, owed, status)) [[unlikely]]
          return false;
        consumes = status.allowed && cost > 0;
        if (consumes) [[likely]] {
          consume_brisk(plan, *entry, owed, cost, now);
          if (wants_lane(*entry, work)) [[unlikely]] {
            open_lane(plan, id, cost, *entry, lane, work, now, status);
          }
        }
        SeriesTable::unlock(*entry, work.stripe);
        finish(plan, owed, cost, consumes, status);
      } else {
        WindowShape shape;
        std::int64_t index = 0;
        Nanos start = 0;
        find_window(plan, id, now, shape, index, start);
        if (!assess_window_alone(plan, *entry, cost, now, shape, start, status)) [[unlikely]] {
          return false;
        }
        consumes = status.allowed && cost > 0;
        if (consumes) [[likely]] {
          bool brief =
              entry->time == start && cost <= kMaxSmall - entry->count[0] && !options.replicated;
          if (brief) [[likely]] {
            entry->count[0] += static_cast<std::uint32_t>(cost);
          } else {
            consume_window_alone(plan, id, cost, *entry, lane, now, status);
          }
          if (wants_lane(*entry, work)) [[unlikely]] {
            open_lane(plan, id, cost, *entry, lane, work, now, status);
          }
        }
        SeriesTable::unlock(*entry, work.stripe);
        if (consumes) status.reset = reset_of_windows(shape, start, status, now);
      }
      if (consumes) [[likely]]
        status.remaining -= cost;
    }
    status.rule = plan.index;
    status.shadow = plan.shadow;
    status.degraded = status.elsewhere = false;
    out.allowed = status.allowed || plan.shadow;
    out.deciding = plan.shadow ? -1 : 0;
    out.wants_commit = consumes && plan.commit;
    out.repeated = false;
    out.version = work.program->version;
    count(status, work);
    return true;
  }

  /// The same for several rules: all of their series are known and small. At most one of them is
  /// decided by a lane: what is spent there could not be given back.
  [[gnu::noinline]] bool decide_few(std::span<Item> items, Local& work, Nanos now, Decision& out) {
    Item* by_lane = nullptr;
    if (!lock_small(items, *work.program, now, by_lane)) return false;
    if (out.statuses.size() != items.size()) out.statuses.resize(items.size());
    RuleStatus* const statuses = out.statuses.data();
    RuleStatus* status = statuses;
    bool allowed = true;
    for (Item& item : items) {
      status->limit = item.plan->limit;
      if (&item == by_lane) {
        tell_of_lane(*item.lane, now, *status);
      } else if (!assess_small(item, now, *status)) [[unlikely]] {
        return leave(items, by_lane);
      }
      allowed &= status->allowed || item.plan->shadow;
      ++status;
    }
    // With this, if there is a lane, all of it happens.
    if (by_lane != nullptr && allowed && !by_lane->lane->spend(by_lane->cost)) {
      return leave(items, by_lane);
    }
    bool wants_commit = false;
    RuleStatus* deciding = nullptr;
    status = statuses;
    for (Item& item : items) {
      const Plan& plan = *item.plan;
      bool consumes = allowed && status->allowed && item.cost > 0;
      if (&item != by_lane) {
        if (consumes) {
          consume_small(plan, item, now, *status);
          if (wants_lane(*item.entry, work)) [[unlikely]] {
            open_lane(plan, item.id, item.cost, *item.entry, *item.lane, work, now, *status);
          }
        }
        SeriesTable::unlock(*item.entry, work.stripe);
        if (plan.bucket_cell) {
          finish(plan, item.owed, item.cost, consumes, *status);
        } else if (consumes) {
          status->reset = reset_of_windows(item.shape, item.start, *status, now);
        }
      }
      if (consumes) {
        status->remaining -= item.cost;
        wants_commit |= plan.commit;
      }
      status->rule = item.rule;
      status->shadow = plan.shadow;
      status->degraded = status->elsewhere = false;
      if (!plan.shadow && decides(*status, deciding, allowed)) deciding = status;
      count(*status, work);
      ++status;
    }
    out.allowed = allowed;
    out.deciding = deciding == nullptr ? -1 : static_cast<int>(deciding - statuses);
    out.wants_commit = wants_commit;
    out.repeated = false;
    out.version = work.program->version;
    return true;
  }

  /// Locks the entries of all but `by_lane`, which is the first that this thread has a lane of, in
  /// the order of addresses. False: none is, and nothing was done.
  [[gnu::always_inline]] bool lock_small(std::span<Item> items, const Program& program, Nanos now,
                                         Item*& by_lane) {
    std::array<Item*, kScannedRules> order;
    std::size_t count = 0;
    if (items.empty() || items.size() > order.size()) return false;
    for (Item& item : items) {
      if (!item.plan->small) return false;
      if (by_lane == nullptr && has_lane(*item.lane, item.id, item.cost, program, now)) {
        by_lane = &item;
        continue;
      }
      SeriesEntry* entry = table.find(item.id, item.first);
      if (entry == nullptr) return false;
      item.entry = entry;
      std::size_t at = count++;
      for (; at > 0 && entry < order[at - 1]->entry; --at) order[at] = order[at - 1];
      order[at] = &item;
    }
    for (std::size_t i = 0; i < count; ++i) {
      if (table.lock_with_lanes(*order[i]->entry, order[i]->id)) [[likely]]
        continue;
      order[i]->entry = nullptr;
      while (i > 0) SeriesTable::unlock(*order[--i]->entry);
      return false;
    }
    return true;
  }

  [[gnu::noinline]] static bool leave(std::span<Item> items, const Item* by_lane) {
    for (Item& item : items) {
      if (&item != by_lane) SeriesTable::unlock(*item.entry);
    }
    return false;
  }

  [[gnu::always_inline]] bool assess_small(Item& item, Nanos now, RuleStatus& status) {
    const Plan& plan = *item.plan;
    SeriesEntry& entry = *item.entry;
    auto assess = [&] {
      if (plan.bucket_cell) {
        if (!is_brisk(plan, entry)) return false;
        item.owed = assess_brisk(plan, entry, item.cost, now, status);
        return true;
      }
      return entry.form() == Form::window && entry.time <= item.start &&
             assess_small_windows(plan, entry, item.cost, now, item.shape, item.start, status);
    };
    if (!entry.has(SeriesEntry::kLanes)) [[likely]]
      return assess();
    close_ended_lanes(entry, item.cost, now);
    if (assess() && status.allowed) return true;
    table.close_lanes(entry);
    return assess();
  }

  [[gnu::always_inline]] void consume_small(const Plan& plan, Item& item, Nanos now,
                                            const RuleStatus& status) {
    SeriesEntry& entry = *item.entry;
    if (plan.bucket_cell) {
      consume_brisk(plan, entry, item.owed, item.cost, now);
    } else if (!options.replicated && entry.time == item.start &&
               item.cost <= kMaxSmall - entry.count[0]) {
      entry.count[0] += static_cast<std::uint32_t>(item.cost);
    } else {
      consume(plan, item, now, status);
    }
  }

  [[gnu::always_inline]] static bool has_one(const std::vector<RuleStatus>& statuses) {
    return !statuses.empty() && statuses.begin() + 1 == statuses.end();  // size() divides
  }
  [[gnu::noinline]] static void make_one(std::vector<RuleStatus>& statuses) { statuses.resize(1); }

  /// False: it is no small bucket, and the lock is gone.
  [[gnu::always_inline]] bool assess_bucket_alone(const Plan& plan, SeriesEntry& entry,
                                                  std::uint64_t cost, Nanos now, Owed& owed,
                                                  RuleStatus& status) {
    if (is_brisk(plan, entry)) [[likely]] {
      owed = assess_brisk(plan, entry, cost, now, status);
      if (status.allowed || !entry.has(SeriesEntry::kLanes)) [[likely]]
        return true;
      table.close_lanes(entry);
      owed = assess_brisk(plan, entry, cost, now, status);
      return true;
    }
    SeriesTable::unlock(entry);
    return false;
  }

  /// False: they are not small windows of which none is newer than this one, and the lock is gone.
  [[gnu::always_inline]] bool assess_window_alone(const Plan& plan, SeriesEntry& entry,
                                                  std::uint64_t cost, Nanos now,
                                                  const WindowShape& shape, Nanos start,
                                                  RuleStatus& status) {
    auto assess = [&] {
      return entry.form() == Form::window && entry.time <= start &&
             assess_small_windows(plan, entry, cost, now, shape, start, status);
    };
    bool assessed = assess();
    if ((!assessed || !status.allowed) && entry.has(SeriesEntry::kLanes)) [[unlikely]] {
      table.close_lanes(entry);
      assessed = assess();
    }
    if (!assessed) [[unlikely]]
      SeriesTable::unlock(entry);
    return assessed;
  }

  [[gnu::always_inline]] static bool wants_lane(const SeriesEntry& entry, const Local& work) {
    return entry.last() != work.stripe && work.alone();
  }

  [[gnu::noinline]] void consume_window_alone(const Plan& plan, SeriesId id, std::uint64_t cost,
                                              SeriesEntry& entry, Lane& lane, Nanos now,
                                              const RuleStatus& status) {
    Item item = item_alone(plan, id, cost, entry, lane, now);
    bool fits = entry.time == item.start && cost <= kMaxSmall - entry.count[0];
    if (!fits) table.close_lanes(entry);
    consume(plan, item, now, status);
  }

  static Item item_alone(const Plan& plan, const SeriesId& id, std::uint64_t cost,
                         SeriesEntry& entry, Lane& lane, Nanos now) {
    Item item;
    item.plan = &plan;
    item.rule = plan.index;
    item.entry = &entry;
    item.lane = &lane;
    item.id = id;
    item.cost = cost;
    if (!plan.bucket_cell) find_window(plan, item, now);
    return item;
  }

  // Lanes: a thread that finds another at the same series time and again takes a block of units.

  [[gnu::always_inline]] static bool has_lane(const Lane& lane, const SeriesId& id,
                                              std::uint64_t cost, const Program& program,
                                              Nanos now) {
    return lane.id == id && now <= lane.until.load(std::memory_order_relaxed) &&
           lane.version == program.version && cost > 0 && lane.left() >= cost;
  }
  [[gnu::always_inline]] static void tell_of_lane(const Lane& lane, Nanos now, RuleStatus& status) {
    status.allowed = true;
    status.remaining = lane.beyond + lane.left();
    status.reset = lane.reset_at - now;
    status.retry_after = status.delay = 0;
  }

  /// A peek tells what is left, lanes included.
  [[gnu::noinline]] void close_ended_lanes(SeriesEntry& entry, std::uint64_t cost, Nanos now) {
    Lanes::Open lanes = table.open_lanes(entry);
    if (cost == 0 || lanes.units == 0 || lanes.until < std::max(now, entry.time)) {
      table.close_lanes(entry);
    }
  }

  /// After the cost was consumed; `status` is from before.
  [[gnu::noinline]] void open_lane(const Plan& plan, SeriesId id, std::uint64_t cost,
                                   SeriesEntry& entry, Lane& lane, const Local& work, Nanos now,
                                   const RuleStatus& status) {
    if (!Lanes::is_hot(lane, id)) return;
    if (plan.bucket.queue || !table.may_have_lanes(entry)) return;
    if (entry.form() == Form::general) return;  // which it may have become just now
    const Item item = item_alone(plan, id, cost, entry, lane, now);
    std::uint64_t block = Lanes::kFirstBlock;
    if (lane.id == item.id) {
      bool quiet = lane.left() > lane.block / 2;
      if (lane.left() > 0) table.close_lanes(entry);
      if (quiet) {
        lane.id = {};
        lane.score = 0;
        return;
      }
      block = std::min(2 * lane.block, Lanes::kMaxBlock);
    } else if (lane.left() > 0) {
      return;  // another series'
    }
    std::uint64_t room = status.remaining - item.cost;
    // All lanes together stay a small part of what is left.
    block = std::min(std::max(block, 8 * item.cost), room / kLaneShare);
    if (block < 4 * item.cost) return;
    Nanos until = now + Lanes::kLife;
    std::uint64_t per_unit = 1;
    if (plan.bucket_cell) {
      per_unit = plan.brisk.unit.value();
      std::uint64_t sure = entry.word[0] - table.open_lanes(entry).units * per_unit;
      until = std::min(until, entry.time + plan.brisk.drain_time(sure) - 1);
      if (until < now + Lanes::kMinLife) {
        lane.score = 0;  // it is no more than looked at now and then
        return;
      }
      entry.word[0] += block * per_unit;
      lane.reset_at = entry.time + plan.brisk.drain_time(entry.word[0]);
    } else {
      if (block > kMaxSmall - entry.count[0]) return;
      until = std::min(until, item.start + item.shape.sub - 1);
      std::uint64_t used = plan.limit - std::min(plan.limit, room);
      if (options.replicated && crosses_mark(used, add_saturated(used, block), plan.limit)) {
        entry.set(SeriesEntry::kUrgent);
      }
      entry.count[0] += static_cast<std::uint32_t>(block);
      lane.reset_at = now + reset_after(plan, item, status, now);
    }
    lane.id = item.id;
    lane.version = work.program->version;
    lane.beyond = room - block;
    lane.block = static_cast<std::uint32_t>(block);
    table.open_lane(entry, lane, lane.block, per_unit, until);
  }

  /// In the order of addresses, so that two requests cannot wait for each other. If an entry has
  /// been removed since it was found, nothing is locked and false returned.
  bool lock_all(std::span<Item> items, std::vector<SeriesEntry*>& locked) {
    if (items.size() == 1) {
      Item& item = items[0];
      if (item.entry == nullptr || table.lock(*item.entry, item.id)) return true;
      item.entry = nullptr;
      return false;
    }
    locked.clear();
    for (Item& item : items) {
      if (item.entry != nullptr) locked.push_back(item.entry);
    }
    std::sort(locked.begin(), locked.end());
    for (std::size_t i = 0; i < locked.size(); ++i) {
      auto item = std::find_if(items.begin(), items.end(),
                               [&](const Item& one) { return one.entry == locked[i]; });
      if (table.lock(*locked[i], item->id)) continue;
      item->entry = nullptr;
      for (std::size_t j = 0; j < i; ++j) SeriesTable::unlock(*locked[j]);
      return false;
    }
    return true;
  }

  static void unlock_all(std::span<Item> items) {
    for (Item& item : items) {
      if (item.entry != nullptr) SeriesTable::unlock(*item.entry, local().stripe);
    }
  }

  /// Decides and unlocks. False, with nothing decided, if series must be made first.
  bool settle(std::span<Item> items, Nanos now, Decision& out) {
    out.allowed = true;
    out.deciding = -1;
    out.wants_commit = false;
    out.repeated = false;
    out.statuses.resize(items.size());
    bool missing = false;
    std::unique_lock counting(overflow_mutex, std::defer_lock);
    for (std::size_t i = 0; i < items.size(); ++i) {
      Item& item = items[i];
      const Plan& plan = *item.plan;
      RuleStatus& status = out.statuses[i];
      status.rule = item.rule;
      status.shadow = plan.shadow;
      status.degraded = false;
      status.elsewhere = false;
      status.limit = plan.limit;
      assess(plan, item, now, status);
      if (plan.escrow && stopped.load(std::memory_order_relaxed)) {
        deny_degraded(status);
        status.elsewhere = false;
      } else if (plan.escrow) {
        note_demand(plan, item, status, now);
      }
      if (status.allowed && item.cost > 0 &&
          (item.entry == nullptr || item.mode == Mode::no_ticket)) [[unlikely]] {
        if (item.mode == Mode::no_ticket && plan.rule->on_failure == OnFailure::closed) {
          deny_degraded(status);
        } else if (item.entry != nullptr) {
          // Counted at once.
        } else if (item.no_room) {
          if (!counting.owns_lock()) counting.lock();
          degrade(plan, item, now, status);
        } else {
          missing = true;
        }
      }
      if (!status.shadow && !status.allowed) out.allowed = false;
    }
    if (missing && out.allowed) {
      unlock_all(items);
      for (Item& item : items) make(item, now);
      return false;
    }
    for (std::size_t i = 0; i < items.size(); ++i) {
      Item& item = items[i];
      RuleStatus& status = out.statuses[i];
      const Plan& plan = *item.plan;
      bool consumes = out.allowed && status.allowed && !status.degraded && item.cost > 0;
      if (item.brisk) finish(plan, item.owed, item.cost, consumes, status);
      if (consumes) {
        consume(plan, item, now, status);
        status.remaining -= std::min(status.remaining, item.cost);
        out.wants_commit |= plan.commit || item.waits;
        if (!item.brisk) status.reset = reset_after(plan, item, status, now);
      } else if (status.degraded && out.allowed && status.allowed) {
        Period period = period_of(plan, item, now);
        overflow.add(table.short_id(item.id), period.number, item.cost, period.expiry, now);
        overflow_lasts(period.expiry);
        status.remaining -= item.cost;
      }
      if (!status.shadow) pick_decider(out, static_cast<int>(i));
    }
    unlock_all(items);
    return true;
  }

  /// What the overflow sketch counts by. Two neighbours cover whatever the algorithm would look at.
  struct Period {
    std::int64_t number = 0;
    bool neighbour = false;  // the one before counts too
    Nanos end = 0;
    Nanos expiry = 0;
  };
  static Period period_of(const Plan& plan, const Item& item, Nanos now) {
    if (!plan.bucket_cell && !plan.log && item.shape.previous == 0) {
      Nanos end = item.start + item.shape.length(item.index);
      return {item.index, false, end, end};
    }
    if (plan.bucket_cell) {
      // In which a full bucket drains; no request passes one without a rate.
      return period_at(drain_length(plan.bucket), now);
    }
    return period_at(plan.rule->window, now);
  }
  static Period period_at(Nanos length, Nanos now) {
    std::int64_t number = now / length;
    Nanos end = (number + 1) * length;
    return {number, true, end, end + length};
  }
  static Nanos drain_length(const BucketShape& bucket) {
    Uint128 time = bucket.ticks(bucket.burst) / std::max<std::uint64_t>(bucket.rate, 1) + 1;
    return static_cast<Nanos>(std::min(time, static_cast<Uint128>(crdt::kMaxLife)));
  }

  /// With overflow_mutex.
  void overflow_lasts(Nanos expiry) {
    overflow_over.store(std::max(overflow_over.load(std::memory_order_relaxed), expiry),
                        std::memory_order_relaxed);
  }
  std::uint64_t overflow_used(const Item& item, const Period& period, Nanos now) const {
    SeriesId id = table.short_id(item.id);
    std::uint64_t used = overflow.estimate(id, period.number, now);
    if (!period.neighbour) return used;
    return add_saturated(used, overflow.estimate(id, period.number - 1, now));
  }

  /// A series that the sketch counts begins with what it says. False if that does not fit an entry.
  bool begin_with_overflow(const Item& item, Nanos now, SeriesEntry& entry) {
    if (now >= overflow_over.load(std::memory_order_relaxed)) return true;
    const Plan& plan = *item.plan;
    std::uint64_t used = 0;
    {
      std::lock_guard counting(overflow_mutex);
      used = overflow_used(item, period_of(plan, item, now), now);
    }
    if (used == 0) return true;
    if (options.replicated || !(plan.brisk.fits || plan.small_windows)) return false;
    if (plan.bucket_cell) {
      std::uint64_t most = mul_saturated(plan.limit, 1 + std::uint64_t{plan.bucket.max_debt});
      entry.set_form(Form::bucket);
      entry.time = now;
      entry.word[0] = std::min(used, most) * plan.brisk.unit.value();
      entry.word[1] = plan.number;
      return true;
    }
    if (used > kMaxSmall) return false;
    entry.set_form(Form::window);
    entry.time = item.start;
    entry.count[1] = static_cast<std::uint32_t>(used);
    return true;
  }

  /// Gives the places of series that are over, or else of some that are idle. Not where the replica
  /// must forget a series in step.
  bool make_room(Nanos now) {
    if (options.replicated) return false;
    std::size_t moved = 0;
    auto gives_way = [&](SeriesEntry& entry) {
      // Somebody is about to use an unused one.
      if (entry.form() == Form::unused) return false;
      if (is_over(entry, now - kGrace)) return true;
      if (moved == kMovedAtOnce || !move_out(entry, now)) return false;
      ++moved;
      return true;
    };
    for (int look = 0; look < kLooks; ++look) {
      if (table.make_room(gives_way) > 0) return true;
    }
    return false;
  }

  /// Counts a series in the sketch, so that it may go. False if it was used since this was last
  /// asked of it (the clock algorithm, Corbato 1968), or has no small form.
  bool move_out(SeriesEntry& entry, Nanos now) {
    if (entry.has(SeriesEntry::kUsed)) {
      entry.set(SeriesEntry::kUsed, false);
      return false;
    }
    Period period;
    std::uint64_t units = 0;
    if (entry.form() == Form::window) {
      const Rule& rule = numbers.at(table.rule(entry)).rule;
      WindowShape shape = window_shape(rule, {});
      units = std::uint64_t{entry.count[0]} + entry.count[1];
      if (shape.previous == 0) {
        // Its phase is not known here, but is less than its length.
        period.number = shape.calendar != nullptr ? shape.index(entry.time)
                                                  : (entry.time + shape.sub - 1) / shape.sub;
        period.expiry = entry.time + shape.length(period.number);
      } else {
        units += std::uint64_t{entry.count[2]} + entry.count[3];
        period = period_at(rule.window, now);
      }
    } else if (entry.form() == Form::bucket) {
      const BucketShape& shape = counted_by(entry);
      BriskBucket brisk = BriskBucket::of(shape);
      units = brisk.unit.ceil(brisk.debt(entry, now));
      period = period_at(drain_length(shape), now);
    } else {
      return false;
    }
    std::lock_guard counting(overflow_mutex);
    overflow.raise(table.short_id(entry), period.number, units, period.expiry, now);
    overflow_lasts(period.expiry);
    return true;
  }

  /// No room for the series: closed rules deny; open ones count in the sketch, which may deny too
  /// early and never too late.
  void degrade(const Plan& plan, const Item& item, Nanos now, RuleStatus& status) {
    deny_degraded(status);
    if (plan.rule->on_failure == OnFailure::closed) return;
    Period period = period_of(plan, item, now);
    std::uint64_t used = overflow_used(item, period, now);
    status.remaining = plan.limit - std::min(plan.limit, used);
    status.reset = used == 0 ? 0 : period.end - now;
    status.allowed = item.cost <= status.remaining;
    status.retry_after = status.allowed ? 0 : period.end - now;
  }

  static void deny_degraded(RuleStatus& status) {
    status.degraded = true;
    status.delay = 0;
    status.allowed = false;
    status.retry_after = kSecond;
  }

  void make(Item& item, Nanos now) {
    if (item.entry != nullptr || item.cost == 0 || item.no_room) return;
    SeriesEntry fresh{};
    if (begin_with_overflow(item, now, fresh)) {
      item.entry = table.insert(item.id, item.plan->number, item.made, fresh);
      if (item.entry == nullptr && make_room(now)) {
        item.entry = table.insert(item.id, item.plan->number, item.made, fresh);
      }
    }
    item.no_room = item.entry == nullptr;
  }

  // Reservations.

  Ticket reserve(const Request& request, Nanos given, Nanos timeout, Decision& out) {
    Local& work = local();
    Programs::Use program = use(work);
    work.program = &*program;
    Nanos now = clamp(given, work.stripe);
    prepare(request, now, work, work.items[0]);
    std::span<Item> items = work.items[0].all();
    auto reserve_now = [&] { return reserve(request, items, work, now, timeout, out); };
    return request.id.empty() ? reserve_now()
                              : by_id(request, items, *program, now, out, reserve_now);
  }

  Ticket reserve(const Request& request, std::span<Item> items, Local& work, Nanos now,
                 Nanos timeout, Decision& out) {
    bool room = request.hits > 0 && tickets.keep_room();
    for (Item& item : items) item.mode = room ? Mode::hold : Mode::no_ticket;
    decide(items, work, now, out);
    if (room) out.wants_commit = false;  // when it is settled
    OpenTicket ticket;
    for (std::size_t i = 0; i < items.size() && out.allowed; ++i) {
      const Item& item = items[i];
      const Plan& plan = *item.plan;
      RuleStatus& status = out.statuses[i];
      if (!status.allowed || status.degraded || item.cost == 0) continue;
      if (room) {
        ticket.holds.push_back(
            {item.id, epoch_of(plan, item, now), plan.rule->cost_of(request), item.cost});
      } else {
        status.degraded = true;
        add_one(work.program->counters[work.stripe][item.rule].degraded, work.alone());
      }
    }
    if (ticket.holds.empty()) {
      if (room) tickets.give_room_back();
      return {};
    }
    ticket.hits = request.hits;
    ticket.deadline = now + std::clamp<Nanos>(timeout, 0, kMaxHold);
    return {tickets.open(std::move(ticket))};
  }

  void hold(const Plan& plan, const Item& item, Nanos now) {
    Series& series = general(*item.entry, item.id);
    if (plan.escrow && plan.bucket_cell) {
      EscrowBucket& bucket = escrow_bucket(plan, item.id, series, now);
      bucket.held = add_saturated(bucket.held, item.cost);
      return;
    }
    if (plan.bucket_cell) {
      series.make_bucket().held += item.cost;  // at most the limit, as all of it was allowed
      return;
    }
    series.forget_windows(now - kGrace);
    crdt::Epoch epoch = epoch_of(plan, item, now);
    if (plan.escrow) {
      place(plan, item.id, series.escrow_cell(epoch)).held += item.cost;
    } else {
      series.window(epoch).held += item.cost;
    }
  }

  Settled settle_ticket(const OpenTicket& ticket, std::uint64_t actual, Nanos now) {
    Settled out;
    out.known = true;
    out.hits = ticket.hits;
    Programs::Use program = use(local());
    for (const Hold& hold : ticket.holds) {
      // It is there: what holds something is not forgotten.
      with_entry(hold.series, false, [&](SeriesEntry& entry) {
        Plan plan = plan_for(*program, entry);
        Item item;
        item.entry = &entry;
        item.id = hold.series;
        item.cost = mul_saturated(hold.per_hit, actual);
        if (!plan.bucket_cell && !plan.log) find_window(plan, item, now);
        table.set_rule(entry, plan.number);
        bool counted = settle_hold(plan, item, hold, now);
        out.lapsed |= !counted;
        out.wants_commit |=
            counted && item.cost > 0 && (item.waits || (options.replicated && plan.commit));
      });
    }
    return out;
  }

  /// Of the rule in force that an entry belongs to. If there is none, of the one that it was last
  /// used by.
  Plan plan_for(const Program& program, const SeriesEntry& entry) const {
    std::uint32_t number = table.rule(entry);
    const RuleNumbers::Kept& kept = numbers.at(number);
    auto found = program.by_identity.find(kept.identity);
    if (found != program.by_identity.end()) return program.plans[found->second];
    return plan_of(kept.rule, number, kept.identity);
  }

  /// False if it is too late to count anything.
  bool settle_hold(const Plan& plan, Item& item, const Hold& hold, Nanos now) {
    Series& series = *item.entry->series;
    if (plan.escrow) return settle_escrow(plan, item, hold, now);
    WindowCell* cell = nullptr;
    if (plan.bucket_cell) {
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
    std::uint64_t left = evaluate(plan, item, 0, now).remaining;
    std::uint64_t used = plan.limit - std::min(plan.limit, left);
    if (plan.bucket_cell) {
      consume_bucket_cell(plan, series, item.cost, now);
    } else {
      cell->own = add_saturated(cell->own, item.cost);
      cell->dirty = options.replicated;
      if (options.replicated && plan.reserve > 0) keep_reserve(plan, item, *cell);
    }
    if (!options.replicated) return true;
    if (crosses_mark(used, add_saturated(used, item.cost), plan.limit)) {
      item.entry->set(SeriesEntry::kUrgent);
    }
    list(*item.entry);
    return true;
  }

  std::size_t settle_due(Nanos now, std::size_t max) {
    std::size_t settled = 0;
    while (settled < max) {
      std::optional<OpenTicket> ticket = tickets.take_due(now);
      if (!ticket) break;
      settle_ticket(*ticket, ticket->hits, now);
      ++settled;
    }
    timed_out.fetch_add(settled, std::memory_order_relaxed);
    return settled;
  }

  void settle_all(Nanos now) {
    while (std::optional<OpenTicket> ticket = tickets.take_due(kNever)) {
      settle_ticket(*ticket, ticket->hits, now);
    }
  }

  static void pick_decider(Decision& out, int index) {
    if (decides(out.statuses[static_cast<std::size_t>(index)], out.decider(), out.allowed)) {
      out.deciding = index;
    }
  }
  /// Rather than `current`, if there is one: the least that remains, or the longest wait.
  [[gnu::always_inline]] static bool decides(const RuleStatus& candidate, const RuleStatus* current,
                                             bool allowed) {
    if (candidate.allowed != allowed) return false;
    return current == nullptr || (allowed ? candidate.remaining < current->remaining
                                          : candidate.retry_after > current->retry_after);
  }

  // The replica's side.

  bool drain(std::vector<crdt::OwnCount>& out, std::size_t max) {
    std::size_t first = next_stripe.load(std::memory_order_relaxed);
    for (std::size_t i = 0; i < kStripes; ++i) {
      std::size_t number = (first + i) % kStripes;
      Stripe& stripe = stripes[number];
      for (;;) {
        std::size_t place = 0;
        {
          std::lock_guard lock(stripe.mutex);
          if (stripe.dirty.empty()) break;
          if (out.size() >= max) {
            next_stripe.store(number, std::memory_order_relaxed);
            return true;
          }
          place = stripe.dirty.back();
          stripe.dirty.pop_back();
        }
        SeriesEntry& entry = table.at(place);
        if (!table.lock_any(entry)) continue;
        if (entry.has(SeriesEntry::kListed)) drain_entry(entry, out);
        SeriesTable::unlock(entry);
      }
    }
    return false;
  }

  void drain_entry(SeriesEntry& entry, std::vector<crdt::OwnCount>& out) {
    const SeriesId& id = table.id(entry);
    bool urgent = entry.has(SeriesEntry::kUrgent);
    if (entry.form() == Form::window) {
      WindowShape shape = window_shape(numbers.at(table.rule(entry)).rule, id);
      std::int64_t index = shape.index(entry.time);
      if (entry.has(SeriesEntry::kDirtyBefore)) {
        out.push_back({{id, shape.epoch(index - 1)}, 0, entry.count[2], {}, urgent});
      }
      if (entry.has(SeriesEntry::kDirty)) {
        out.push_back({{id, shape.epoch(index)}, 0, entry.count[0], {}, urgent});
      }
    } else if (entry.form() == Form::general) {
      drain_series(id, *entry.series, urgent, out);
    }
    entry.set(SeriesEntry::kDirty | SeriesEntry::kDirtyBefore | SeriesEntry::kListed |
                  SeriesEntry::kUrgent,
              false);
  }

  void drain_series(const SeriesId& id, Series& series, bool urgent,
                    std::vector<crdt::OwnCount>& out) const {
    for (EscrowCell& cell : series.escrow) cell.drain(id, takes_share(cell.epoch), out);
    for (WindowCell& cell : series.windows) {
      if (!cell.dirty) continue;
      cell.dirty = false;
      bool ahead = cell.block > 0;
      if (ahead) cell.ceiling = std::max(cell.ceiling, add_saturated(cell.own, cell.block));
      out.push_back({{id, cell.epoch}, 0, ahead ? cell.ceiling : cell.own, {}, urgent, ahead});
    }
    if (series.bucket == nullptr || !series.bucket->dirty) return;
    BucketCell& bucket = *series.bucket;
    bucket.dirty = false;
    bucket.drained = bucket.own;
    crdt::BucketState state = bucket.state;
    state.checkpoint = bucket.made;
    out.push_back({{id, crdt::kBucketEpoch}, bucket.birth, bucket.own, state, urgent});
  }

  /// Calls `change(entry)` with the lock of the series' entry. False if there is none, or with
  /// `make` no room for one.
  template <typename Change>
  bool with_entry(const SeriesId& id, bool make, Change change) {
    for (;;) {
      bool made = false;
      SeriesEntry* entry = table.find(id);
      if (entry == nullptr && make) entry = table.insert(id, SeriesTable::kNoRule, made);
      if (entry == nullptr) return false;
      if (!table.lock(*entry, id)) continue;
      change(*entry);
      SeriesTable::unlock(*entry);
      return true;
    }
  }

  bool absorb(const crdt::Cell& cell, Growth& growth) {
    return with_entry(cell.id.series, true, [&](SeriesEntry& entry) {
      std::uint32_t number = table.rule(entry);
      if (number != SeriesTable::kNoRule) growth.rule = numbers.at(number).identity;
      std::uint64_t total = cell.total();
      if (cell.id.is_bucket()) {
        absorb_bucket(general(entry, cell.id.series), cell, total, growth);
        return;
      }
      std::uint64_t others = total - cell.value_of({options.incarnation, 0});
      if (absorb_small(entry, cell.id, others, growth)) return;
      WindowCell& window = general(entry, cell.id.series).window(cell.id.epoch);
      growth.units = others - std::min(others, window.others);
      window.others = std::max(window.others, others);
    });
  }

  bool absorb_small(SeriesEntry& entry, const CellId& id, std::uint64_t others, Growth& growth) {
    if (entry.form() != Form::window || others > kMaxSmall) return false;
    WindowShape shape = window_shape(numbers.at(table.rule(entry)).rule, id.series);
    std::int64_t index = shape.index(entry.time);
    bool before = id.epoch == shape.epoch(index - 1);
    if (!before && id.epoch != shape.epoch(index)) return false;
    std::uint32_t& known = entry.count[before ? 3 : 1];
    growth.units = others - std::min<std::uint64_t>(others, known);
    known = std::max(known, static_cast<std::uint32_t>(others));
    return true;
  }

  void absorb_bucket(Series& series, const crdt::Cell& cell, std::uint64_t total, Growth& growth) {
    BucketCell& bucket = series.make_bucket();
    std::uint64_t own = bucket.birth == 0 ? 0 : cell.value_of({options.incarnation, bucket.birth});
    growth.units = total - own - std::min(total - own, bucket.others);
    bucket.others = std::max(bucket.others, total - own);
    crdt::join(bucket.state, cell.bucket);
    bucket.state.checkpoint.counted = std::min(bucket.state.checkpoint.counted, bucket.total());
  }

  void begin_anew(const crdt::Cell& cell) {
    with_entry(cell.id.series, false, [&](SeriesEntry& entry) {
      if (entry.form() != Form::general || entry.series->bucket == nullptr) return;
      BucketCell& bucket = *entry.series->bucket;
      std::uint64_t held =
          bucket.birth == 0 ? 0 : cell.value_of({options.incarnation, bucket.birth});
      // Of the own units the replica forgot those that it had; it has none that it forgot and
      // holds.
      std::uint64_t forgotten = held == 0 ? bucket.drained : 0;
      crdt::BucketState state = cell.bucket;
      if (bucket.own == forgotten) {
        bucket.birth = bucket.own = bucket.drained = forgotten = 0;
        bucket.made = {};
      } else if (bucket.own > held) {
        state.touched = std::max(state.touched, bucket.state.touched);
        state.expiry = std::max(state.expiry, bucket.state.expiry);
      }
      bucket.made.counted = std::min(bucket.made.counted, bucket.own);
      state.checkpoint.counted = add_saturated(state.checkpoint.counted, forgotten);
      bucket.others = cell.total() - held;
      bucket.state = state;
    });
  }

  void rebase(const crdt::Incarnation& fresh, const DurableCount& durable) {
    crdt::Incarnation old = options.incarnation;
    options.incarnation = fresh;
    if (!options.replicated) return;
    table.visit_all([&](SeriesEntry& entry) {
      SeriesId id = table.id(entry);
      if (entry.form() == Form::unused) return false;
      Series& series = general(entry, id);
      bool dirty = false;
      // Rights belong to a life: the driver tells what the fresh one has.
      for (EscrowCell& cell : series.escrow) cell.begin_anew();
      for (WindowCell& cell : series.windows) {
        std::uint64_t held = durable({id, cell.epoch}, {old, 0});
        // The old slot stays as it is, with what it was ahead.
        std::uint64_t ahead = held - std::min(held, cell.own);
        cell.dirty = leave_behind(cell, held);
        cell.others = add_saturated(cell.others, ahead);
        cell.ceiling = cell.durable = 0;
        dirty |= cell.dirty;
      }
      if (series.bucket != nullptr && series.bucket->birth != 0) {
        BucketCell& bucket = *series.bucket;
        bucket.drained = 0;
        bucket.dirty = leave_behind(bucket, durable({id, crdt::kBucketEpoch}, {old, bucket.birth}));
        dirty |= bucket.dirty;
      }
      if (dirty) list(entry);
      return false;
    });
  }

  template <typename AnyCell>
  static bool leave_behind(AnyCell& cell, std::uint64_t held) {
    held = std::min(held, cell.own);
    cell.own -= held;
    cell.others = add_saturated(cell.others, held);
    return cell.own > 0;
  }

  // Escrow rules: every member spends rights of its own. EscrowCell has the arithmetic.

  bool takes_share(const crdt::Epoch& epoch) const {
    return open.load(std::memory_order_relaxed) &&
           epoch.start > horizon.load(std::memory_order_relaxed);
  }

  /// A limit that changes does so for later windows.
  EscrowCell& place(const Plan& plan, const SeriesId& id, EscrowCell& cell) const {
    if (cell.placed) return cell;
    cell.placed = true;
    cell.share = options.shares == nullptr
                     ? plan.limit
                     : options.shares->share(options.self, id, plan.limit, cell.epoch.start);
    bool scarce = options.shares != nullptr && is_scarce(plan.limit, *options.shares);
    cell.block = scarce ? 0 : plan.reserve;
    cell.slice = std::clamp<Nanos>((cell.epoch.expiry - cell.epoch.start) / 16, 1, kSlice);
    return cell;
  }

  Verdict evaluate_escrow(const Plan& plan, const Item& item, Series* series, std::uint64_t cost,
                          Nanos now) const {
    crdt::Epoch epoch = item.shape.epoch(item.index);
    EscrowCell* cell = series == nullptr ? nullptr : series->find_escrow(epoch);
    EscrowCell unused;
    unused.epoch = epoch;
    const EscrowCell& here = place(plan, item.id, cell == nullptr ? unused : *cell);
    // A limit that was lowered leaves the rights of this window, but no more at a time; 0 none.
    crdt::Int128 left =
        std::min(here.left(takes_share(epoch)), static_cast<crdt::Int128>(plan.limit));
    std::uint64_t used = add_saturated(here.spent, here.others.used_by_peers);
    Nanos until_end = epoch.expiry - now;
    Verdict verdict;
    if (left > 0) verdict.remaining = static_cast<std::uint64_t>(left);
    verdict.allowed = left >= static_cast<crdt::Int128>(cost);
    verdict.reset = used > 0 || here.held > 0 ? until_end : 0;
    if (verdict.allowed) return verdict;
    bool never = cost > plan.limit;
    verdict.elsewhere =
        !never && options.shares != nullptr && add_saturated(used, cost) <= plan.limit;
    verdict.retry_after = never ? kNever : until_end;
    if (verdict.elsewhere) verdict.retry_after = std::min(until_end, kAskAgain);
    return verdict;
  }

  /// Spends, whatever is left: the caller has decided.
  void spend(const Plan& plan, Item& item, EscrowCell& cell) {
    place(plan, item.id, cell).spend(item.cost, takes_share(cell.epoch));
    if (!options.replicated) return;
    item.waits = disk.load(std::memory_order_relaxed) && cell.waits();
    if (cell.dirty) list(*item.entry);
  }

  void consume_escrow(const Plan& plan, Item& item, Nanos now) {
    Series& series = general(*item.entry, item.id);
    if (plan.bucket_cell) {
      bool fresh = series.escrow_bucket == nullptr;
      EscrowBucket& bucket = escrow_bucket(plan, item.id, series, now);
      bucket.spend(plan.escrow_bucket, item.cost);
      if (fresh) note_demand(plan, item.id, series, item.cost, now);
      return;
    }
    series.forget_windows(item.start - kGrace);
    spend(plan, item, series.escrow_cell(item.shape.epoch(item.index)));
  }

  /// A settlement counts, also beyond the rights that are here: the work was done.
  bool settle_escrow(const Plan& plan, Item& item, const Hold& hold, Nanos now) {
    if (plan.bucket_cell) {
      EscrowBucket& bucket = escrow_bucket(plan, item.id, *item.entry->series, now);
      bucket.held -= std::min(bucket.held, hold.units);
      if (item.cost > 0) bucket.spend(plan.escrow_bucket, item.cost);
      return true;
    }
    EscrowCell& cell = *item.entry->series->find_escrow(hold.epoch);
    cell.held -= hold.units;
    if (hold.epoch.expiry <= now) return false;
    if (item.cost > 0) spend(plan, item, cell);
    return true;
  }

  /// What was asked for, whatever became of it; and if it leaves too little here, or was too much,
  /// a need for more.
  void note_demand(const Plan& plan, const Item& item, const RuleStatus& status, Nanos now) {
    if (item.cost == 0 || item.noted || options.shares == nullptr) return;
    bool known = item.entry != nullptr && item.entry->form() == Form::general;
    if (plan.bucket_cell) {
      if (known && item.entry->series->escrow_bucket != nullptr) {
        note_demand(plan, item.id, *item.entry->series, item.cost, now);
      } else if (status.elsewhere) {
        // As below. What was allowed is noted once it is consumed.
        needs.note(plan.name, plan.limit, {item.id, period_after(item.id, now)}, item.cost, true);
      }
      return;
    }
    CellId id{item.id, item.shape.epoch(item.index)};
    EscrowCell* cell = known ? item.entry->series->find_escrow(id.epoch) : nullptr;
    if (cell == nullptr) {
      // Nothing was ever spent here, so nothing is known but this.
      if (status.elsewhere) needs.note(plan.name, plan.limit, id, item.cost);
      return;
    }
    if (cell->demanded == 0) {
      for (const EscrowCell& each : item.entry->series->escrow) {
        if (each.epoch.expiry == id.epoch.start) cell->demanded_before = each.demanded;
      }
    }
    cell->want(std::min(item.cost, plan.limit), now);
    if (!cell->busy && cell->demanded > cell->share) {
      cell->busy = true;
      std::lock_guard lock(busy_mutex);
      if (busy.size() < EscrowNeeds::kMost) busy.emplace(id, plan.name);
    }
    std::uint64_t lacking = cell->lacking(now, takes_share(id.epoch));
    if (status.elsewhere) {
      lacking = std::max(lacking, item.cost - std::min(item.cost, status.remaining));
    }
    if (lacking > 0) needs.note(plan.name, plan.limit, id, std::min(lacking, plan.limit));
  }

  /// Towards the end of a window that asked for more than its share: what the next one will lack.
  void look_ahead(Nanos now, Nanos lead) {
    std::vector<std::pair<CellId, SeriesId>> ending;
    {
      std::lock_guard lock(busy_mutex);
      for (auto at = busy.begin(); at != busy.end();) {
        const crdt::Epoch& epoch = at->first.epoch;
        if (epoch.expiry <= now) {
          at = busy.erase(at);
          continue;
        }
        // Of a bucket the next period can be asked for only now.
        Nanos length = epoch.expiry - epoch.start;
        Nanos before = std::min(lead, length == kLendingPeriod ? length / 2 : length / 8);
        if (epoch.expiry - before <= now) ending.push_back(*at);
        ++at;
      }
    }
    if (ending.empty()) return;
    Programs::Use program = use(local());
    for (const auto& [id, name] : ending) {
      auto rule = program->escrow.find(name);
      if (rule == program->escrow.end()) continue;
      const Plan& plan = program->plans[rule->second];
      if (plan.bucket_cell) {
        look_ahead_in_bucket(plan, id, now);
      } else {
        look_ahead(plan, id, now);
      }
    }
  }

  void look_ahead(const Plan& plan, const CellId& id, Nanos now) {
    with_entry(id.series, false, [&](SeriesEntry& entry) {
      if (entry.form() != Form::general) return;
      Series& series = *entry.series;
      EscrowCell* cell = series.find_escrow(id.epoch);
      // Who has become quiet needs nothing.
      if (cell == nullptr || cell->demand.forecast(cell->slice, now) == 0) return;
      WindowShape shape = window_shape(*plan.rule, id.series);
      crdt::Epoch next = shape.epoch(shape.index(id.epoch.start) + 1);
      std::uint64_t likely = std::min(cell->likely(), plan.limit);
      EscrowCell& then = place(plan, id.series, series.escrow_cell(next));
      crdt::Int128 lacking = static_cast<crdt::Int128>(likely) - then.left(takes_share(next));
      if (lacking <= 0) return;
      lacking = std::min(lacking, static_cast<crdt::Int128>(plan.limit));
      needs.note(plan.name, plan.limit, {id.series, next}, static_cast<std::uint64_t>(lacking));
    });
  }

  std::uint64_t give_rights(const SeriesId& name, const CellId& id, const crdt::Incarnation& to,
                            std::uint64_t wanted, Nanos now, bool all) {
    Programs::Use program = use(local());
    auto rule = program->escrow.find(name);
    if (rule == program->escrow.end() || stopped || id.epoch.expiry <= now) return 0;
    const Plan& plan = program->plans[rule->second];
    if (plan.bucket_cell) return lend_rights(plan, id, to, wanted, now);
    // A window that this rule has, and no other.
    WindowShape shape = window_shape(*plan.rule, id.series);
    if (shape.epoch(shape.index(id.epoch.start)) != id.epoch) return 0;
    if (id.epoch.start - now > gives_ahead.load(std::memory_order_relaxed)) return 0;
    std::uint64_t gave = 0;
    with_entry(id.series, true, [&](SeriesEntry& entry) {
      Series& series = general(entry, id.series);
      table.set_rule(entry, plan.number);
      EscrowCell& cell = place(plan, id.series, series.escrow_cell(id.epoch));
      std::uint64_t kept = all ? 0 : cell.demand.forecast(cell.slice, now);
      if (!all && id.epoch.start > now) {
        // What this node itself will want of that window.
        for (const EscrowCell& each : series.escrow) {
          if (each.epoch.expiry == id.epoch.start) kept = each.likely();
        }
      }
      gave = cell.give(options.incarnation, to, wanted, kept, takes_share(id.epoch));
      if (gave == 0) return;
      entry.set(SeriesEntry::kUrgent);
      list(entry);
    });
    return gave;
  }

  std::vector<RightsLeft> rights_left(Nanos now, std::size_t max) {
    std::vector<RightsLeft> found;
    auto busier = [](const RightsLeft& a, const RightsLeft& b) { return a.demand > b.demand; };
    std::lock_guard lock(reload_mutex);  // as sweep()
    const Program& program = programs.current();
    table.visit_all([&](SeriesEntry& entry) {
      std::uint32_t number = table.rule(entry);
      if (entry.form() != Form::general || number == SeriesTable::kNoRule) return false;
      for (const EscrowCell& cell : entry.series->escrow) {
        if (cell.epoch.start > now || cell.epoch.expiry <= now) continue;
        if (!cell.placed || cell.left(takes_share(cell.epoch)) <= 0) continue;
        auto rule = program.by_identity.find(numbers.at(number).identity);
        if (rule == program.by_identity.end()) continue;
        found.push_back({program.plans[rule->second].name,
                         {table.id(entry), cell.epoch},
                         cell.demand.forecast(cell.slice, now)});
      }
      if (found.size() >= 2 * max) {  // the rest is as busy at most
        std::nth_element(found.begin(), found.begin() + static_cast<std::ptrdiff_t>(max),
                         found.end(), busier);
        found.resize(max);
      }
      return false;
    });
    std::sort(found.begin(), found.end(), busier);
    if (found.size() > max) found.resize(max);
    return found;
  }

  std::optional<std::uint64_t> absorb_rows(const CellId& id, const EscrowOthers& others) {
    // Where others only used their own, nothing changes here.
    bool make = others.holding != crdt::Holding{};
    std::uint64_t more = 0;
    bool found = with_entry(id.series, make, [&](SeriesEntry& entry) {
      Series& series = general(entry, id.series);
      EscrowCell* cell = make ? &series.escrow_cell(id.epoch) : series.find_escrow(id.epoch);
      if (cell == nullptr) return;
      if (others.holding.received > cell->others.holding.received) {
        more = static_cast<std::uint64_t>(others.holding.received - cell->others.holding.received);
      }
      cell->others = others;
    });
    if (more > 0) needs.satisfied(id);
    if (!found && make) return std::nullopt;
    return more;
  }

  // Buckets of escrow rules: see escrow_bucket.h.

  static crdt::Epoch period_at(const SeriesId& id, Nanos now) {
    WindowShape periods = lending_periods(id);
    return periods.epoch(periods.index(now));
  }
  static crdt::Epoch period_after(const SeriesId& id, Nanos now) {
    return period_at(id, period_at(id, now).expiry);
  }
  static crdt::Epoch period_from(const SeriesId& id, Nanos instant) {
    crdt::Epoch period = period_at(id, instant);
    return period.start == instant ? period : period_at(id, period.expiry);
  }

  /// The member's share of the burst in the period that begins at `start`.
  std::uint64_t share_of(const EscrowBucketShape& shape, const SeriesId& id, EscrowBucket& bucket,
                         Nanos start) const {
    if (options.shares == nullptr) return shape.burst;
    if (start < bucket.share_from || start >= bucket.share_until ||
        bucket.share_burst != shape.burst) {
      bucket.share = options.shares->share(options.self, id, shape.burst, start);
      bucket.share_burst = shape.burst;
      bucket.share_from = start;
      bucket.share_until = options.shares->next_change(start);
    }
    return bucket.share;
  }

  /// Rights of a lending period that this member has. Whether they may be spent yet is not asked.
  std::uint64_t part_of(const EscrowBucketShape& shape, const SeriesId& id, EscrowBucket& bucket,
                        EscrowCell* cell, const crdt::Epoch& period) const {
    bool own = period.start > horizon.load(std::memory_order_relaxed);
    if (cell == nullptr) return own ? share_of(shape, id, bucket, period.start) : 0;
    cell->share = share_of(shape, id, bucket, period.start);
    crdt::Int128 left = cell->left(own);
    return left <= 0
               ? 0
               : static_cast<std::uint64_t>(std::min(left, static_cast<crdt::Int128>(shape.burst)));
  }

  /// Until when what part_of() says of the period at `now`, which has no cell, holds.
  Nanos same_until(const SeriesId& id, const Series* series, const EscrowBucket& bucket,
                   Nanos now) const {
    Nanos until = kNever;
    Nanos from = horizon.load(std::memory_order_relaxed);
    if (period_at(id, now).start <= from) {
      if (from < kMaxTime) until = period_from(id, from + 1).start;
    } else if (bucket.share_until < kMaxTime) {
      until = period_from(id, bucket.share_until).start;
    }
    if (series == nullptr) return until;
    for (const EscrowCell& cell : series->escrow) {
      if (cell.epoch.start > now) until = std::min(until, cell.epoch.start);
    }
    return until;
  }

  /// What the bucket holds at `now`, through all periods in between. Returns the part of the burst
  /// that this member has then. Periods that are over are forgotten.
  std::uint64_t advance(const EscrowBucketShape& shape, const SeriesId& id, Series* series,
                        EscrowBucket& bucket, Nanos now) const {
    bucket.rescale(shape);
    now = std::max(now, bucket.at);
    Nanos filled_since =
        open.load(std::memory_order_relaxed) ? since.load(std::memory_order_relaxed) : kNever;
    if (options.shares == nullptr) {
      bucket.fill(shape, shape.burst, 0, filled_since, now);
      return shape.burst;
    }
    for (;;) {
      crdt::Epoch period = period_at(id, bucket.at);
      EscrowCell* cell = series == nullptr ? nullptr : series->find_escrow(period);
      std::uint64_t part = part_of(shape, id, bucket, cell, period);
      bucket.enter(shape, period.start);
      Nanos until = period.expiry;
      if (cell == nullptr) {
        until = same_until(id, series, bucket, bucket.at);
      } else {
        std::uint64_t filled = static_cast<std::uint64_t>(
            std::min(cell->others.holding.filled, static_cast<Uint128>(shape.burst)));
        if (filled > cell->credited) {
          bucket.add(shape, filled - cell->credited, part);
          cell->credited = filled;
        }
      }
      std::uint64_t lent = 0;
      for (std::size_t i = 0; series != nullptr && i < series->escrow.size(); ++i) {
        const EscrowCell& each = series->escrow[i];
        if (each.epoch.start > bucket.at) lent = add_saturated(lent, each.given_filled());
      }
      bucket.fill(shape, part, lent, filled_since, std::min(until, now));
      if (now >= until) continue;
      if (series != nullptr) {
        std::erase_if(series->escrow, [&](const EscrowCell& each) {
          return each.epoch.expiry <= bucket.at && each.idle();
        });
      }
      return part;
    }
  }

  /// The bucket of a series that was not used since this life's standing is open, or is full again.
  EscrowBucket unused_bucket(const EscrowBucketShape& shape, const SeriesId& id, Nanos now) const {
    EscrowBucket bucket;
    bucket.burst = shape.burst;
    Nanos from = since.load(std::memory_order_relaxed);
    if (from < 0) {
      bucket.level = shape.ticks(shape.burst);
    } else {
      // What an earlier life lent for the periods up to then may have been forgotten here.
      bucket.at = std::min(now, period_from(id, from + kLentAhead).expiry);
    }
    return bucket;
  }

  EscrowBucket& made_escrow_bucket(const Plan& plan, const SeriesId& id, Series& series,
                                   Nanos now) const {
    if (series.escrow_bucket == nullptr) {
      series.escrow_bucket =
          std::make_unique<EscrowBucket>(unused_bucket(plan.escrow_bucket, id, now));
    }
    return *series.escrow_bucket;
  }
  /// Made if need be, and brought to `now`.
  EscrowBucket& escrow_bucket(const Plan& plan, const SeriesId& id, Series& series,
                              Nanos now) const {
    EscrowBucket& bucket = made_escrow_bucket(plan, id, series, now);
    advance(plan.escrow_bucket, id, &series, bucket, now);
    return bucket;
  }

  Verdict evaluate_escrow_bucket(const Plan& plan, const Item& item, Series* series,
                                 std::uint64_t cost, Nanos now) {
    const EscrowBucketShape& shape = plan.escrow_bucket;
    EscrowBucket unused;
    EscrowBucket* bucket = &unused;
    if (series == nullptr) {
      unused = unused_bucket(shape, item.id, now);
    } else {
      // From now on a sweep fills it by these numbers, too. (Or others lent to it before it was
      // ever used here.)
      if (table.rule(*item.entry) != plan.number) table.set_rule(*item.entry, plan.number);
      bucket = &made_escrow_bucket(plan, item.id, *series, now);
    }
    std::uint64_t part = advance(shape, item.id, series, *bucket, now);
    Verdict verdict = bucket->evaluate(shape, part, cost);
    if (!open.load(std::memory_order_relaxed)) {
      verdict.allowed = cost == 0;
      verdict.remaining = 0;
      verdict.retry_after = kAskAgain;
    }
    if (verdict.allowed) {
      verdict.retry_after = 0;
      return verdict;
    }
    verdict.delay = 0;
    verdict.elsewhere = cost <= plan.limit && options.shares != nullptr && part < shape.burst;
    if (verdict.elsewhere) verdict.retry_after = std::min(verdict.retry_after, kAskAgain);
    if (cost > plan.limit) verdict.retry_after = kNever;
    return verdict;
  }

  std::uint64_t owed_escrow(const Plan& plan, const SeriesId& id, Series* series, Nanos now) const {
    if (series == nullptr || series->escrow_bucket == nullptr) return 0;
    const EscrowBucketShape& shape = plan.escrow_bucket;
    EscrowBucket& bucket = *series->escrow_bucket;
    std::uint64_t part = advance(shape, id, series, bucket, now);
    std::uint64_t left = bucket.left(shape);
    return part - std::min(part, left);
  }

  /// What was asked for, whatever became of it.
  void note_demand(const Plan& plan, const SeriesId& id, Series& series, std::uint64_t cost,
                   Nanos now) {
    if (options.shares == nullptr) return;
    EscrowBucket& bucket = *series.escrow_bucket;
    now = std::max(now, bucket.at);
    bucket.want(std::min(cost, plan.limit), now);
    if (now < bucket.listed_until) return;
    std::uint64_t left = bucket.left(plan.escrow_bucket);
    bool enough = left / 2 >= bucket.likely(now) && left <= bucket.share;
    if (enough) return;
    crdt::Epoch period = period_at(id, now);
    bucket.listed_until = period.expiry;
    std::lock_guard lock(busy_mutex);
    if (busy.size() < EscrowNeeds::kMost) busy.emplace(CellId{id, period}, plan.name);
  }

  void look_ahead_in_bucket(const Plan& plan, const CellId& id, Nanos now) {
    with_entry(id.series, false, [&](SeriesEntry& entry) {
      if (entry.form() != Form::general || entry.series->escrow_bucket == nullptr) return;
      Series& series = *entry.series;
      const EscrowBucketShape& shape = plan.escrow_bucket;
      EscrowBucket& bucket = escrow_bucket(plan, id.series, series, now);
      crdt::Epoch next = period_at(id.series, id.epoch.expiry);
      if (next.start <= bucket.at) return;
      EscrowCell* cell = series.find_escrow(next);
      std::uint64_t part = part_of(shape, id.series, bucket, cell, next);
      Uint128 filled = cell == nullptr ? 0 : cell->others.holding.filled;
      auto coming = static_cast<std::uint64_t>(std::min<Uint128>(filled, shape.burst));
      std::uint64_t lacking = bucket.lacking(shape, part, coming, now);
      if (lacking > 0) needs.note(plan.name, plan.limit, {id.series, next}, lacking, true);
    });
  }

  std::uint64_t lend_rights(const Plan& plan, const CellId& id, const crdt::Incarnation& to,
                            std::uint64_t wanted, Nanos now) {
    const EscrowBucketShape& shape = plan.escrow_bucket;
    if (period_at(id.series, id.epoch.start) != id.epoch || id.epoch.start > now + kLentAhead) {
      return 0;
    }
    std::uint64_t gave = 0;
    with_entry(id.series, true, [&](SeriesEntry& entry) {
      Series& series = general(entry, id.series);
      table.set_rule(entry, plan.number);
      EscrowBucket& bucket = escrow_bucket(plan, id.series, series, now);
      // What has begun here is spent already.
      if (id.epoch.start <= std::max(now, bucket.at)) return;
      EscrowCell& cell = series.escrow_cell(id.epoch);
      part_of(shape, id.series, bucket, &cell, id.epoch);
      bool own = takes_share(id.epoch);
      gave = cell.give(options.incarnation, to, wanted, bucket.kept(shape, now), own);
      if (gave == 0) return;
      // Only for the next period: what is on its way must be room of the part of now, and in the
      // next one that may be lent to somebody else.
      if (id.epoch.start == period_after(id.series, bucket.at).start) {
        std::uint64_t left = bucket.left(shape);
        left -= std::min(left, bucket.likely(now));
        bucket.lend(shape, cell.give_filled(to, left));
      }
      entry.set(SeriesEntry::kUrgent);
      list(entry);
    });
    return gave;
  }

  void told_durable(const crdt::OwnCount& count) {
    with_entry(count.cell.series, false, [&](SeriesEntry& entry) {
      if (entry.form() != Form::general) return;
      if (count.birth == crdt::kUsedRow) {
        EscrowCell* cell = entry.series->find_escrow(count.cell.epoch);
        if (cell != nullptr) cell->told_durable(count.value);
      } else if (WindowCell* cell = entry.series->find(count.cell.epoch)) {
        cell->durable = std::max(cell->durable, std::min(count.value, cell->ceiling));
      }
    });
  }

  static std::uint64_t used_escrow(const Plan& plan, const SeriesId& id, Series* series,
                                   Nanos now) {
    WindowShape shape = window_shape(*plan.rule, id);
    crdt::Epoch epoch = shape.epoch(shape.index(now));
    EscrowCell* cell = series == nullptr ? nullptr : series->find_escrow(epoch);
    if (cell == nullptr) return 0;
    return add_saturated(add_saturated(cell->spent, cell->held), cell->others.used_by_peers);
  }

  /// Durability reserve of a merged rule.
  static void keep_reserve(const Plan& plan, Item& item, WindowCell& cell) {
    cell.block = plan.reserve;
    item.waits = cell.waits();
    // Handed over again once half of what is ahead is gone.
    std::uint64_t ahead = cell.ceiling > cell.own ? cell.ceiling - cell.own : 0;
    cell.dirty = cell.own > cell.ceiling || ahead * 2 < cell.block;
  }

  std::size_t sweep(Nanos floor) {
    ids.expire(floor);
    std::lock_guard lock(reload_mutex);
    forget_programs();
    // Those of rules that went are looked for in passing.
    bool look = numbers.size() > programs.current().plans.size();
    std::vector<bool> used = look ? used_numbers() : std::vector<bool>();
    std::size_t gone = table.visit_all([&](SeriesEntry& entry) {
      if (is_over(entry, floor)) return true;
      if (look) note_number(entry, used);
      return false;
    });
    if (look) forget_numbers(used);
    return gone;
  }

  /// With its lock: it may be forgotten.
  bool is_over(SeriesEntry& entry, Nanos floor) {
    if (entry.has(SeriesEntry::kListed)) return false;
    switch (entry.form()) {
      case Form::unused:
        return true;
      case Form::window: {
        // Boundaries may be shifted by the series' id; lengths are not.
        WindowShape shape = window_shape(numbers.at(table.rule(entry)).rule, {});
        Nanos life = shape.length(shape.index(entry.time)) * (std::int64_t{shape.previous} + 1);
        return entry.time + life <= floor - kGrace;
      }
      case Form::bucket:
        return entry.time + numbers.at(table.rule(entry)).fill_time <= floor;
      case Form::general:
        break;
    }
    Series& series = *entry.series;
    if (series.escrow_bucket != nullptr) return is_over(entry, series, floor - kGrace);
    series.forget_windows(floor - kGrace);
    if (!series.windows.empty() || !series.escrow.empty()) return false;
    if (series.bucket == nullptr) return true;
    if (series.bucket->state.expiry > floor) return false;
    // Its slots are forgotten here before the replica may do so.
    series.bucket->begin_anew();
    return series.bucket->held == 0;
  }

  /// An escrow rule's bucket that is full is as one that was never used.
  bool is_over(const SeriesEntry& entry, Series& series, Nanos floor) const {
    std::uint32_t number = table.rule(entry);
    // Where shares are known but nothing is replicated, ids are not.
    if (number == SeriesTable::kNoRule || (options.shares != nullptr && !options.replicated)) {
      return false;
    }
    EscrowBucketShape shape = escrow_bucket_shape(numbers.at(number).rule);
    SeriesId id = options.replicated ? table.id(entry) : SeriesId{};
    EscrowBucket& bucket = *series.escrow_bucket;
    std::uint64_t part = advance(shape, id, &series, bucket, floor);
    return series.escrow.empty() && bucket.full(shape, part);
  }

  std::uint64_t used(const Plan& plan, const SeriesId& id, Nanos now) {
    std::uint64_t units = 0;
    with_entry(id, false, [&](SeriesEntry& entry) {
      Series* series = entry.form() == Form::general ? entry.series : nullptr;
      if (plan.escrow) {
        units = plan.bucket_cell ? owed_escrow(plan, id, series, now)
                                 : used_escrow(plan, id, series, now);
        return;
      }
      if (plan.log) {
        units = log_used(read_log(series, ~std::uint64_t{0}), plan.rule->window, now);
        return;
      }
      if (plan.bucket_cell) {
        const BucketShape& shape = plan.bucket;
        crdt::BucketState state;
        if (entry.form() == Form::bucket) state = small_bucket(entry, counted_by(entry));
        std::uint64_t total = state.checkpoint.counted;
        if (series != nullptr && series->bucket != nullptr) {
          const BucketCell& bucket = *series->bucket;
          state = bucket.held > 0 ? with_held(plan, bucket, now) : bucket.state;
          total = add_saturated(bucket.total(), bucket.held);
        }
        auto unit = static_cast<std::uint64_t>(shape.unit);
        crdt::DebtTicks debt = bucket_debt(shape, state, total, now);
        units = static_cast<std::uint64_t>((debt + unit - 1) / unit);
        return;
      }
      WindowShape shape = window_shape(*plan.rule, id);
      units = window_used(shape, now, [&](std::int64_t at) {
        if (entry.form() == Form::window) return small_count(entry, shape, at);
        return series == nullptr ? 0 : series->count(shape.epoch(at));
      });
    });
    return units;
  }
};

Limiter::Limiter(std::shared_ptr<const RuleSet> rules, LimiterOptions options)
    : impl_(std::make_unique<Impl>(std::move(rules), options)) {}

Limiter::~Limiter() = default;

void Limiter::check(const Request& request, Nanos now, Decision& out) {
  impl_->check(request, now, out);
}

void Limiter::check(std::span<const Request> requests, Nanos now, std::span<Decision> out) {
  impl_->check(requests, now, out);
}

Decision Limiter::check(const Request& request, Nanos now) {
  Decision decision;
  impl_->check(request, now, decision);
  return decision;
}

Ticket Limiter::reserve(const Request& request, Nanos now, Nanos timeout, Decision& out) {
  return impl_->reserve(request, now, timeout, out);
}

Settled Limiter::settle(Ticket ticket, std::uint64_t actual, Nanos now) {
  std::optional<OpenTicket> open = impl_->tickets.take(ticket.number);
  if (!open) return {};
  return impl_->settle_ticket(*open, actual, impl_->clamp(now, local().stripe));
}

std::size_t Limiter::settle_due(Nanos now, std::size_t max) {
  return impl_->settle_due(impl_->clamp(now, local().stripe), max);
}

void Limiter::settle_all(Nanos now) {
  impl_->settle_all(impl_->clamp(now, local().stripe));
}

void Limiter::forget_id(std::string_view domain, std::string_view id) {
  impl_->ids.forget(domain, id);
}

RequestIdCounters Limiter::request_ids() const {
  return {impl_->ids.size(), impl_->ids.repeated(), impl_->ids.evicted()};
}

TicketCounters Limiter::tickets() const {
  return {impl_->tickets.size(), impl_->options.max_tickets,
          impl_->timed_out.load(std::memory_order_relaxed), impl_->tickets.refused()};
}

void Limiter::reload(std::shared_ptr<const RuleSet> rules) {
  impl_->reload(std::move(rules));
}

std::shared_ptr<const RuleSet> Limiter::rules() const {
  std::lock_guard lock(impl_->reload_mutex);
  return impl_->programs.current().rules;
}

std::shared_ptr<const RuleSet> Limiter::rules(std::uint64_t version) const {
  return impl_->rules_of(version);
}

crdt::SeriesId Limiter::series_of(std::uint32_t rule, const Request& request) const {
  Impl::Programs::Use program = impl_->use(local());
  std::string key;
  if (rule >= program->plans.size()) return {};
  return impl_->series_of(program->plans[rule], request, key);
}

crdt::SeriesId Limiter::rule_identity(std::uint32_t rule) const {
  std::lock_guard lock(impl_->reload_mutex);
  const std::vector<Plan>& plans = impl_->programs.current().plans;
  return rule < plans.size() ? impl_->identity_of(*plans[rule].rule) : SeriesId{};
}

RuleCounters Limiter::counters(std::uint32_t rule) const {
  return impl_->counters(rule);
}

std::size_t Limiter::series_count() const {
  return impl_->table.size();
}

std::uint64_t Limiter::used(std::uint32_t index, const Request& request, Nanos now) {
  Impl::Programs::Use program = impl_->use(local());
  if (index >= program->plans.size()) return 0;
  const Plan& plan = program->plans[index];
  std::string key;
  return impl_->used(plan, impl_->series_of(plan, request, key), now);
}

void Limiter::told_durable(const crdt::OwnCount& count) {
  impl_->told_durable(count);
}

void Limiter::set_standing(const EscrowStanding& standing) {
  impl_->open = standing.open;
  impl_->stopped = standing.stopped;
  impl_->disk = standing.disk;
  impl_->horizon = standing.horizon;
  impl_->gives_ahead = standing.ahead;
  impl_->since = standing.since;
}

std::optional<std::uint64_t> Limiter::absorb_rows(const crdt::CellId& cell,
                                                  const EscrowOthers& others) {
  return impl_->absorb_rows(cell, others);
}

std::uint64_t Limiter::give_rights(const crdt::SeriesId& rule, const crdt::CellId& cell,
                                   const crdt::Incarnation& to, std::uint64_t wanted, Nanos now,
                                   bool all) {
  return impl_->give_rights(rule, cell, to, wanted, now, all);
}

std::vector<RightsLeft> Limiter::rights_left(Nanos now, std::size_t max) {
  return impl_->rights_left(now, max);
}

void Limiter::rights_needed(Nanos now, Nanos lead, std::vector<RightsNeed>& out) {
  impl_->look_ahead(now, lead);
  impl_->needs.take_due(now, lead, out);
}

std::size_t Limiter::sweep(Nanos floor) {
  return impl_->sweep(floor);
}

bool Limiter::drain(std::vector<crdt::OwnCount>& out, std::size_t max) {
  return impl_->drain(out, max);
}

bool Limiter::absorb(const crdt::Cell& cell) {
  Growth growth;
  return impl_->absorb(cell, growth);
}

bool Limiter::absorb(const crdt::Cell& cell, Growth& growth) {
  growth = {};
  return impl_->absorb(cell, growth);
}

void Limiter::begin_anew(const crdt::Cell& cell) {
  impl_->begin_anew(cell);
}

void Limiter::rebase(const crdt::Incarnation& fresh, const DurableCount& durable) {
  impl_->rebase(fresh, durable);
}

}  // namespace weir
