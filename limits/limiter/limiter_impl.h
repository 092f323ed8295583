#pragma once

// What Limiter is made of. Not installed. The files that define it: limiter.cc (rules in force, and
// decisions the quick way), limiter_general.cc (any decision, and the full table),
// limiter_series.cc (one series), limiter_reserve.cc, limiter_replica.cc and limiter_escrow.cc.

#include <weir/limits/replica_side.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <limits>
#include <map>
#include <mutex>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>

#include <weir/limits/algorithms/bucket.h>
#include <weir/limits/algorithms/divisor.h>
#include <weir/limits/algorithms/log_window.h>
#include <weir/limits/algorithms/window.h>
#include <weir/limits/escrow/escrow_bucket.h>
#include <weir/limits/escrow/escrow_cell.h>
#include <weir/limits/limiter/program.h>
#include <weir/limits/limiter/published.h>
#include <weir/limits/limiter/request_ids.h>
#include <weir/limits/limiter/rule_numbers.h>
#include <weir/limits/limiter/tickets.h>
#include <weir/limits/series/keyed_hash.h>
#include <weir/limits/series/overflow_sketch.h>
#include <weir/limits/series/series.h>
#include <weir/limits/series/series_memo.h>
#include <weir/limits/series/series_table.h>

namespace weir {

using crdt::CellId;

/// Threads tell each other how far time has come in steps of this.
inline constexpr Nanos kTimeStep = kMillisecond;
/// Requests of a batch whose memory is on its way while an earlier one is decided.
inline constexpr std::size_t kAhead = 8;
/// Escrow: after this long, rights that were asked for may have come.
inline constexpr Nanos kAskAgain = 200 * kMillisecond;
/// Escrow: demand is measured in slices of at most this.
inline constexpr Nanos kSlice = 2 * kSecond;
/// Full table: so many idle series give their places at once, found in at most so many looks.
inline constexpr std::size_t kMovedAtOnce = 16;
inline constexpr int kLooks = 4;
/// A credit takes at most this part of the units that are left.
inline constexpr std::uint64_t kCreditShare = 64;
/// Escrow: an incarnation may have lent this far ahead, so what was lent by those before it is over
/// so long after it began.
inline constexpr Nanos kLentAhead = 2 * kLendingPeriod;
inline constexpr std::uint64_t kMaxSmall = std::numeric_limits<std::uint32_t>::max();
/// Rule sets that Limiter::rules(version) still has.
inline constexpr std::size_t kVersionsKept = 8;
/// Numbers of rules that are no longer in force, at which a reload looks which of them still
/// matter.
inline constexpr std::size_t kManyNumbers = 1024;

struct alignas(64) Stripe {
  std::atomic<Nanos> newest{0};
  std::mutex mutex;
  std::vector<std::size_t> dirty;  // entries with something to drain
};

/// What becomes of a cost that is allowed. `no_ticket`: it should be held, and too many are.
enum class Mode : std::uint8_t { consume, hold, no_ticket };

/// One matching rule of a request under evaluation. What has no initial value is set by prepare(),
/// the window only for rules that have one.
struct Item {
  const CompiledRule* compiled = nullptr;
  std::uint32_t rule = 0;
  Mode mode = Mode::consume;
  bool made = false;            // the entry, by this request
  bool no_room = false;         // none could be made
  bool compact = false;         // evaluated by its small bucket: `owed` is what it owes
  bool waits = false;           // what it consumed is ahead of what is durable
  bool demand_counted = false;  // Request::demand_counted
  std::uint16_t descriptor = 0;
  SeriesEntry* entry = nullptr;
  SeriesEntry* first = nullptr;  // where it is looked for first
  Credit* credit = nullptr;      // where this thread has one, if it has
  SeriesId id;
  std::uint64_t cost = 0;
  Owed owed;
  WindowShape shape;
  std::int64_t index = 0;  // of the window, and its start
  Nanos start = 0;

  void reset() {
    mode = Mode::consume;
    made = no_room = compact = waits = false;
    descriptor = 0;
    entry = nullptr;
  }
};

/// Grows and is used again: setting up an Item costs more than most of what is done with it.
class Items {
 public:
  void clear() {
    size_ = 0;
    told_.clear();
  }
  std::size_t size() const { return size_; }
  Item& next() {
    if (size_ == made_) {
      items_.emplace_back();
      ++made_;
    }
    Item& item = items_[size_++];
    item.reset();
    return item;
  }
  std::span<Item> all() { return {items_.data(), size_}; }

  /// Of several descriptors: one item decides for all that have its series, on the sum of their
  /// costs, and the others go.
  void join_series();
  bool joined() const { return !told_.empty(); }
  /// The item that a status of the whole answer is about.
  const Item& told(std::size_t status) const {
    return items_[joined() ? told_[status].item : status];
  }
  /// From a status for each item to one for each rule of each descriptor.
  void tell_joined(Decision& out) const;
  /// Of the whole answer: an earlier status is about the same item.
  bool tells_again(std::size_t status) const { return told_[status].again; }

 private:
  struct Told {
    std::uint32_t item = 0;
    std::uint16_t descriptor = 0;
    bool again = false;
  };
  std::vector<Told> told_;  // by status; none: a status is that of the item in its place
  std::vector<std::uint32_t> order_;
  std::vector<Item> items_;
  std::size_t made_ = 0;  // items_.size(), which divides
  std::size_t size_ = 0;
};

/// A thread's own things, so that a decision allocates nothing and shares no line that is written.
struct Local {
  const Program* program = nullptr;  // of the current call
  bool single = true;                // the last request met one rule: the next one may, too
  std::vector<std::uint32_t> matched;
  std::array<Items, kAhead> items;  // of a request, and of those of its batch that come next
  std::vector<Item*> locked;
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

inline Local& local() {
  thread_local Local instance;
  return instance;
}

/// `alone`: no other thread adds to it.
inline void add_one(std::atomic<std::uint64_t>& counter, bool alone) {
  if (alone) {
    counter.store(counter.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  } else {
    counter.fetch_add(1, std::memory_order_relaxed);
  }
}

// Of series in their small forms.
/// A log's entries, oldest first; only the newest `most` that are not 0. Valid until the thread's
/// next call.
std::span<const LogEntry> read_log(const Series* series, std::uint64_t most);
std::uint64_t small_count(const SeriesEntry& entry, const WindowShape& shape, std::int64_t index);
/// `shape` is what its debt was counted by.
crdt::BucketState small_bucket(const SeriesEntry& entry, const BucketShape& shape);
/// Form::bucket: everything was counted here, so its checkpoint counts all, be it this much.
inline constexpr std::uint64_t kSmallTotal = 1;

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
  // EscrowGrantState, read by every thread.
  std::atomic<bool> open{true};
  std::atomic<bool> stopped{false};
  std::atomic<bool> disk{true};
  std::atomic<Nanos> fence_time{-1};
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
  SeriesId identity_of(const Rule& rule) const;

  // The rules in force. With reload_mutex, but for use().

  std::unique_ptr<const Program> make_program(std::shared_ptr<const RuleSet> rules,
                                              std::uint64_t version);

  Programs::Use use(const Local& work) { return programs.use(work.stripe); }
  void reload(std::shared_ptr<const RuleSet> rules);
  void forget_programs();
  std::vector<bool> used_numbers() const;
  /// With the entry's lock.
  void note_number(const SeriesEntry& entry, std::vector<bool>& used) const;
  void forget_numbers(const std::vector<bool>& used);
  RuleCounters counters(std::uint32_t rule);
  std::shared_ptr<const RuleSet> rules_of(std::uint64_t version);

  /// What was told under other rules, in terms of those in force: of rules that are still there.
  void translate(const Program& program, const RuleSet& told_by, Decision& out) const;

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
  SeriesId series_of(const CompiledRule& compiled, const Request& request, std::string& key) const;

  // One entry, with its lock held. Null stands for an unused one.

  /// Without reset and waits where Item::compact comes out true: finish() has these.
  void assess(const CompiledRule& compiled, Item& item, Nanos now, RuleStatus& status);

  static bool is_compact(const CompiledRule& compiled, const SeriesEntry& entry) {
    return entry.form() == Form::bucket && entry.word[1] == compiled.number;
  }

  [[gnu::always_inline]] static Owed assess_compact(const CompiledRule& compiled,
                                                    const SeriesEntry& entry, std::uint64_t cost,
                                                    Nanos now, RuleStatus& status) {
    Owed owed{compiled.compact.debt(entry, now), std::max<Nanos>(entry.time - now, 0)};
    bool room = owed.debt <= compiled.compact.capacity;
    std::uint64_t remaining =
        room ? compiled.compact.unit.floor(compiled.compact.capacity - owed.debt) : 0;
    status.remaining = remaining;
    status.allowed = room && cost <= remaining;
    status.retry_after = status.delay = 0;
    return owed;
  }

  /// What evaluate_window says where no window is newer than the current one. False: ask it.
  [[gnu::always_inline]] static bool assess_small_windows(const CompiledRule& compiled,
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
      used += weighted >> 64 == 0
                  ? compiled.sub.ceil(static_cast<std::uint64_t>(weighted))
                  : static_cast<std::uint64_t>((weighted + compiled.sub.value() - 1) /
                                               compiled.sub.value());
    }
    status.remaining = compiled.limit - std::min(compiled.limit, used);
    status.allowed = used <= compiled.limit && cost <= status.remaining;
    // When a weighted window lets this cost pass is for evaluate_window to say.
    if (!status.allowed && shape.previous > 0) return false;
    status.reset = newest > 0 ? left + shape.sub * shape.previous : before > 0 ? left : 0;
    status.delay = 0;
    status.retry_after = 0;
    if (status.allowed) return true;
    status.retry_after = cost > compiled.limit ? kNever : left;
    return true;
  }

  /// What assess() left out; a consumed cost is in the debt by now.
  [[gnu::always_inline]] static void finish(const CompiledRule& compiled, Owed owed,
                                            std::uint64_t cost, bool consumed, RuleStatus& status) {
    const CompactBucket& compact = compiled.compact;
    std::uint64_t debt = owed.debt;
    bool allowed = consumed || status.allowed;
    if (compiled.bucket.queue && allowed) [[unlikely]]
      status.delay = until_drained(compact, owed, debt);
    if (consumed) debt += cost * compact.unit.value();
    status.reset = until_drained(compact, owed, debt);
    if (allowed) [[likely]]
      return;
    debt -= compact.capacity - cost * compact.unit.value();
    status.retry_after = cost > compiled.limit ? kNever : until_drained(compact, owed, debt);
  }

  [[gnu::always_inline]] static Nanos until_drained(const CompactBucket& compact, Owed owed,
                                                    std::uint64_t part) {
    if (part == 0) return 0;
    Nanos wait = compact.drain_time(part);
    return wait == kNever ? kNever : wait + owed.ahead;
  }

  /// Of Form::bucket: the bucket that its debt was counted by.
  const BucketShape& counted_by(const SeriesEntry& entry) const {
    return numbers.at(static_cast<std::uint32_t>(entry.word[1])).bucket;
  }
  Verdict evaluate(const CompiledRule& compiled, const Item& item, std::uint64_t cost, Nanos now);

  /// As if what is held were consumed now.
  static crdt::BucketState with_held(const CompiledRule& compiled, const BucketCell& bucket,
                                     Nanos now);

  /// What evaluate_window says of a fixed window with `used` units and nothing in a later one.
  static Verdict evaluate_fixed(std::uint64_t limit, std::uint64_t used, std::uint64_t cost,
                                Nanos left);

  /// Once the cost has been consumed. `status` is from before.
  Nanos reset_after(const CompiledRule& compiled, const Item& item, const RuleStatus& status,
                    Nanos now);

  [[gnu::always_inline]] static Nanos reset_of_windows(const WindowShape& shape, Nanos start,
                                                       const RuleStatus& status, Nanos now) {
    return std::max(status.reset, start + shape.sub * (Nanos{shape.previous} + 1) - now);
  }

  /// Puts the series beside the table, where everything fits.
  Series& general(SeriesEntry& entry, const SeriesId& id);
  void consume(const CompiledRule& compiled, Item& item, Nanos now, const RuleStatus& status);

  /// The cell in which a cost counts.
  static crdt::Epoch epoch_of(const CompiledRule& compiled, const Item& item, Nanos now) {
    if (compiled.bucket_cell) return crdt::kBucketEpoch;
    return compiled.log ? log_epoch(compiled.rule->window, now) : item.shape.epoch(item.index);
  }

  /// Only where nothing is replicated.
  static void consume_compact(const CompiledRule& compiled, SeriesEntry& entry, Owed owed,
                              std::uint64_t cost, Nanos now) {
    entry.word[0] = owed.debt + cost * compiled.compact.unit.value();
    entry.time = now + owed.ahead;
  }
  bool consume_small_window(const CompiledRule& compiled, const Item& item);

  /// The first units of a series.
  bool begin_small_bucket(const CompiledRule& compiled, const Item& item, Nanos now);
  void consume_bucket_cell(const CompiledRule& compiled, Series& series, std::uint64_t cost,
                           Nanos now);
  void list(SeriesEntry& entry);

  // Decisions.

  /// The rules that apply, and where their series are.
  void prepare(const Request& request, Nanos now, Local& work, Items& items);
  [[gnu::noinline]] void prepare_several(const Request& request, Nanos now, Local& work,
                                         Items& items);
  void prepare_one(const Request& request, Nanos now, Local& work, Items& items);
  [[gnu::noinline]] void prepare_by_index(const Request& request, Nanos now, Local& work,
                                          Items& items);
  [[gnu::noinline]] void add_any(const CompiledRule& compiled, const Request& request, Nanos now,
                                 Local& work, Items& items);

  static SeriesId id_of(const CompiledRule& compiled, std::string_view value, Local& work) {
    return work.memo.id_of(compiled.hash_number, value, [&compiled](std::string_view text) {
      return hash_with(compiled.hash_key, text);
    });
  }
  [[gnu::always_inline]] inline void add(const CompiledRule& compiled, const SeriesId& known,
                                         const Request& request, Nanos now, const Local& work,
                                         Items& items);

  [[gnu::always_inline]] static std::uint64_t cost_of(const CompiledRule& compiled,
                                                      const Request& request) {
    return mul_saturated(
        compiled.plain_cost ? compiled.default_cost : compiled.rule->cost_of(request),
        request.hits);
  }

  [[gnu::always_inline]] static void find_window(const CompiledRule& compiled, Item& item,
                                                 Nanos now) {
    find_window(compiled, item.id, now, item.shape, item.index, item.start);
  }
  [[gnu::always_inline]] static void find_window(const CompiledRule& compiled, const SeriesId& id,
                                                 Nanos now, WindowShape& shape, std::int64_t& index,
                                                 Nanos& start) {
    shape = compiled.spread ? window_shape(*compiled.rule, id) : compiled.window;
    if (shape.calendar != nullptr) {
      index = shape.index(now);
    } else {
      auto time = static_cast<std::uint64_t>(now + shape.phase);
      index = static_cast<std::int64_t>(compiled.sub.floor(time));
    }
    start = shape.start(index);
  }
  void check(const Request& request, Nanos given, Decision& out);
  [[gnu::noinline]] void check_any(const Request& request, Local& work, Nanos given, Decision& out);

  /// The one rule that a request meets, if it has no matchers, and the text that it counts by.
  struct SingleMatch {
    const CompiledRule* compiled = nullptr;
    const std::string_view* value = nullptr;
  };
  [[gnu::noinline]] static SingleMatch single_match(const Program& program, const Request& request);
  void decide_prepared(const Request& request, Items& items, Local& work, Nanos now, Decision& out);
  void check(std::span<const Request> requests, Nanos given, std::span<Decision> out);
  void decide_once(const Request& request, Items& items, Local& work, Nanos now, Decision& out);

  /// What was told to this id before, or what `decide_now` makes of it. The lock of an id is taken
  /// before those of series, never with one in hand.
  template <typename Decide>
  Ticket by_id(const Request& request, const Items& items, const Program& program, Nanos now,
               Decision& out, Decide decide_now) {
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

  static bool consumed(const Items& items, const Decision& decision) {
    if (!decision.allowed) return false;
    for (std::size_t i = 0; i < decision.statuses.size(); ++i) {
      if (decision.statuses[i].allowed && items.told(i).cost > 0) return true;
    }
    return false;
  }
  void decide(Items& items, Local& work, Nanos now, Decision& out);

  [[gnu::always_inline]] static void count(const RuleStatus& status, Local& work) {
    AtomicCounters& counter = work.program->counters[work.stripe][status.rule];
    add_one(status.allowed ? counter.allowed : counter.denied, work.alone());
  }
  [[gnu::noinline]] static void tell_joined(const Items& items, Local& work, Decision& out);
  static void count_any(const RuleStatus& status, Local& work) {
    count(status, work);
    AtomicCounters& counter = work.program->counters[work.stripe][status.rule];
    if (status.degraded) add_one(counter.degraded, work.alone());
    if (status.exhausted_locally) add_one(counter.exhausted_locally, work.alone());
  }
  [[gnu::noinline]] bool decide_alone(const Item& item, Local& work, Nanos now, Decision& out);

  /// What the general way says where one rule matches, and its series is known and small (as it
  /// mostly is with CompiledRule::small). The lock is held for what needs it, and not taken where
  /// this thread has a credit. False: nothing was done. Inlined with all that it needs, as nothing
  /// else is: what is rare is a call away.
  [[gnu::always_inline]] inline bool decide_alone(const CompiledRule& compiled, const SeriesId id,
                                                  const std::uint64_t cost, SeriesEntry* first,
                                                  Credit& credit, Local& work, Nanos now,
                                                  Decision& out);

  /// The same for several rules: all of their series are known and small. At most one of them is
  /// decided by a credit: what is spent there could not be given back.
  [[gnu::noinline]] bool decide_few(std::span<Item> items, Local& work, Nanos now, Decision& out);

  /// Locks the entries of all but `by_credit`, which is the first that this thread has a credit of,
  /// in the order of addresses. False: none is, and nothing was done.
  [[gnu::always_inline]] inline bool lock_small(std::span<Item> items, const Program& program,
                                                Nanos now, Item*& by_credit);
  [[gnu::noinline]] static bool leave(std::span<Item> items, const Item* by_credit);
  [[gnu::always_inline]] inline bool assess_small(Item& item, Nanos now, RuleStatus& status);
  [[gnu::always_inline]] inline void consume_small(const CompiledRule& compiled, Item& item,
                                                   Nanos now, const RuleStatus& status);
  [[gnu::always_inline]] inline static bool has_one(const std::vector<RuleStatus>& statuses);
  [[gnu::noinline]] static void make_one(std::vector<RuleStatus>& statuses);

  /// False: it is no small bucket, and the lock is gone.
  [[gnu::always_inline]] inline bool assess_bucket_alone(const CompiledRule& compiled,
                                                         SeriesEntry& entry, std::uint64_t cost,
                                                         Nanos now, Owed& owed, RuleStatus& status);

  /// False: they are not small windows of which none is newer than this one, and the lock is gone.
  [[gnu::always_inline]] inline bool assess_window_alone(const CompiledRule& compiled,
                                                         SeriesEntry& entry, std::uint64_t cost,
                                                         Nanos now, const WindowShape& shape,
                                                         Nanos start, RuleStatus& status);
  [[gnu::always_inline]] inline static bool wants_credit(const SeriesEntry& entry,
                                                         const Local& work);
  /// In the newest window, and the entry stays as it is otherwise.
  [[gnu::always_inline]] inline static bool fits_in_window(const SeriesEntry& entry,
                                                           std::uint64_t cost, Nanos start);
  /// What changes more than that must find no credits: their units are in the count as it stands.
  [[gnu::noinline]] void consume_window(const CompiledRule& compiled, Item& item, Nanos now,
                                        const RuleStatus& status);
  [[gnu::noinline]] void consume_window_alone(const CompiledRule& compiled, SeriesId id,
                                              std::uint64_t cost, SeriesEntry& entry,
                                              Credit& credit, Nanos now, const RuleStatus& status);
  static Item item_alone(const CompiledRule& compiled, const SeriesId& id, std::uint64_t cost,
                         SeriesEntry& entry, Credit& credit, Nanos now);

  // Credits: a thread that finds another at the same series time and again takes a block of units.

  [[gnu::always_inline]] inline static bool has_credit(const Credit& credit, const SeriesId& id,
                                                       std::uint64_t cost, const Program& program,
                                                       Nanos now);
  [[gnu::always_inline]] inline static void tell_of_credit(const Credit& credit, Nanos now,
                                                           RuleStatus& status);

  /// A peek tells what is left, credits included.
  [[gnu::noinline]] void close_ended_credits(SeriesEntry& entry, std::uint64_t cost, Nanos now);

  /// After the cost was consumed; `status` is from before.
  [[gnu::noinline]] void open_credit(const CompiledRule& compiled, SeriesId id, std::uint64_t cost,
                                     SeriesEntry& entry, Credit& credit, const Local& work,
                                     Nanos now, const RuleStatus& status);

  /// In the order of addresses, so that two requests cannot wait for each other. If an entry has
  /// been removed since it was found, nothing is locked and false returned.
  bool lock_all(std::span<Item> items, std::vector<Item*>& locked);
  static void unlock_all(std::span<Item> items);

  /// Decides and unlocks. False, with nothing decided, if series must be made first.
  bool decide_locked(std::span<Item> items, Nanos now, Decision& out);

  /// What the overflow sketch counts by. Two neighbours cover whatever the algorithm would look at.
  struct Period {
    std::int64_t number = 0;
    bool neighbour = false;  // the one before counts too
    Nanos end = 0;
    Nanos expiry = 0;
  };
  static Period period_of(const CompiledRule& compiled, const Item& item, Nanos now);
  static Period period_at(Nanos length, Nanos now);
  static Nanos drain_length(const BucketShape& bucket);

  /// With overflow_mutex.
  void overflow_lasts(Nanos expiry);
  std::uint64_t overflow_used(const Item& item, const Period& period, Nanos now) const;

  /// A series that the sketch counts begins with what it says. False if that does not fit an entry.
  bool begin_with_overflow(const Item& item, Nanos now, SeriesEntry& entry);

  /// Gives the places of series that are over, or else of some that are idle. Not where the replica
  /// must forget a series in step.
  bool make_room(Nanos now);

  /// Counts a series in the sketch, so that it may go. False if it was used since this was last
  /// asked of it (the clock algorithm, Corbato 1968), or has no small form.
  bool move_out(SeriesEntry& entry, Nanos now);

  /// No room for the series: closed rules deny; open ones count in the sketch, which may deny too
  /// early and never too late.
  void degrade(const CompiledRule& compiled, const Item& item, Nanos now, RuleStatus& status);
  static void deny_degraded(RuleStatus& status);
  void make(Item& item, Nanos now);

  // Reservations.

  Ticket reserve(const Request& request, Nanos given, Nanos timeout, Decision& out);
  Ticket reserve(const Request& request, Items& items, Local& work, Nanos now, Nanos timeout,
                 Decision& out);
  void hold(const CompiledRule& compiled, const Item& item, Nanos now);
  /// Descriptors beyond `actual` as reserved.
  Settled settle_ticket(const OpenTicket& ticket, std::span<const std::uint64_t> actual, Nanos now);

  /// Of the rule in force that an entry belongs to. If there is none, of the one that it was last
  /// used by.
  CompiledRule compiled_for(const Program& program, const SeriesEntry& entry) const;

  /// False if it is too late to count anything.
  bool settle_hold(const CompiledRule& compiled, Item& item, const Hold& hold, Nanos now);
  std::size_t settle_due(Nanos now, std::size_t max);
  void settle_all(Nanos now);

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

  bool drain(std::vector<crdt::OwnCount>& out, std::size_t max);
  void drain_places(std::span<const std::size_t> places, std::vector<crdt::OwnCount>& out);
  void drain_entry(SeriesEntry& entry, std::vector<crdt::OwnCount>& out);
  void drain_series(const SeriesId& id, Series& series, bool urgent,
                    std::vector<crdt::OwnCount>& out) const;

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
  bool absorb(const crdt::Cell& cell, Growth& growth);
  bool absorb_small(SeriesEntry& entry, const CellId& id, std::uint64_t others, Growth& growth);
  void absorb_bucket(Series& series, const crdt::Cell& cell, std::uint64_t total, Growth& growth);
  void reset(const crdt::Cell& cell);
  void rebase(const crdt::Incarnation& fresh, const ReplicaSide::DurableCount& durable);

  template <typename AnyCell>
  static bool leave_behind(AnyCell& cell, std::uint64_t held) {
    held = std::min(held, cell.own);
    cell.own -= held;
    cell.others = add_saturated(cell.others, held);
    return cell.own > 0;
  }

  // Escrow rules: every member spends rights of its own. EscrowCell has the arithmetic.

  bool takes_share(const crdt::Epoch& epoch) const;

  /// A limit that changes does so for later windows.
  EscrowCell& place(const CompiledRule& compiled, const SeriesId& id, EscrowCell& cell) const;
  Verdict evaluate_escrow(const CompiledRule& compiled, const Item& item, Series* series,
                          std::uint64_t cost, Nanos now) const;

  /// Spends, whatever is left: the caller has decided.
  void spend(const CompiledRule& compiled, Item& item, EscrowCell& cell);
  void consume_escrow(const CompiledRule& compiled, Item& item, Nanos now);

  /// A settlement counts, also beyond the rights that are here: the work was done.
  bool settle_escrow(const CompiledRule& compiled, Item& item, const Hold& hold, Nanos now);

  /// What was asked for, whatever became of it; and if it leaves too little here, or was too much,
  /// a need for more.
  void count_demand(const CompiledRule& compiled, const Item& item, const RuleStatus& status,
                    Nanos now);

  /// Towards the end of a window that asked for more than its share: what the next one will lack.
  void look_ahead(Nanos now, Nanos lead);
  void look_ahead(const CompiledRule& compiled, const CellId& id, Nanos now);
  std::uint64_t give_rights(const SeriesId& name, const CellId& id, const crdt::Incarnation& to,
                            std::uint64_t wanted, Nanos now, bool all);
  std::vector<RightsLeft> rights_left(Nanos now, std::size_t max);
  std::optional<std::uint64_t> absorb_rows(const CellId& id, const EscrowOthers& others);

  // Buckets of escrow rules: see escrow_bucket.h.

  static crdt::Epoch period_at(const SeriesId& id, Nanos now);
  static crdt::Epoch period_after(const SeriesId& id, Nanos now);
  static crdt::Epoch period_from(const SeriesId& id, Nanos instant);

  /// The member's share of the burst in the period that begins at `start`.
  std::uint64_t share_of(const EscrowBucketShape& shape, const SeriesId& id, EscrowBucket& bucket,
                         Nanos start) const;

  /// Rights of a lending period that this member has. Whether they may be spent yet is not asked.
  std::uint64_t part_of(const EscrowBucketShape& shape, const SeriesId& id, EscrowBucket& bucket,
                        EscrowCell* cell, const crdt::Epoch& period) const;

  /// Until when what part_of() says of the period at `now`, which has no cell, holds.
  Nanos same_until(const SeriesId& id, const Series* series, const EscrowBucket& bucket,
                   Nanos now) const;

  /// What the bucket holds at `now`, through all periods in between. Returns the part of the burst
  /// that this member has then. Periods that are over are forgotten.
  std::uint64_t advance(const EscrowBucketShape& shape, const SeriesId& id, Series* series,
                        EscrowBucket& bucket, Nanos now) const;

  /// The bucket of a series that was not used since grants of this incarnation are open, or is full
  /// again.
  EscrowBucket unused_bucket(const EscrowBucketShape& shape, const SeriesId& id, Nanos now) const;
  EscrowBucket& made_escrow_bucket(const CompiledRule& compiled, const SeriesId& id, Series& series,
                                   Nanos now) const;
  /// Made if need be, and brought to `now`.
  EscrowBucket& escrow_bucket(const CompiledRule& compiled, const SeriesId& id, Series& series,
                              Nanos now) const;
  Verdict evaluate_escrow_bucket(const CompiledRule& compiled, const Item& item, Series* series,
                                 std::uint64_t cost, Nanos now);
  std::uint64_t owed_escrow(const CompiledRule& compiled, const SeriesId& id, Series* series,
                            Nanos now) const;

  /// What was asked for, whatever became of it.
  void count_demand(const CompiledRule& compiled, const SeriesId& id, Series& series,
                    std::uint64_t cost, Nanos now);
  void look_ahead_in_bucket(const CompiledRule& compiled, const CellId& id, Nanos now);
  std::uint64_t lend_rights(const CompiledRule& compiled, const CellId& id,
                            const crdt::Incarnation& to, std::uint64_t wanted, Nanos now);
  void mark_durable(const crdt::OwnCount& count);
  static std::uint64_t used_escrow(const CompiledRule& compiled, const SeriesId& id, Series* series,
                                   Nanos now);

  /// Durability reserve of a merged rule.
  static void keep_reserve(const CompiledRule& compiled, Item& item, WindowCell& cell);
  std::size_t sweep(Nanos floor);

  /// With its lock: it may be forgotten.
  bool is_over(SeriesEntry& entry, Nanos floor);

  /// An escrow rule's bucket that is full is as one that was never used.
  bool is_over(const SeriesEntry& entry, Series& series, Nanos floor) const;
  std::uint64_t used(const CompiledRule& compiled, const SeriesId& id, Nanos now);
};

}  // namespace weir
