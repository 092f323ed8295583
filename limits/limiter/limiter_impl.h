#pragma once

// What Limiter is made of: the objects that have a state of their own, and what is done with the
// series in the table. Not installed. The files that define it: limiter.cc (the public side; which
// series a request meets), limiter_quick.cc (decisions the quick way), limiter_general.cc (any
// decision, and the full table), limiter_series.cc (one series), limiter_reserve.cc,
// limiter_refund.cc and limiter_replica.cc.

#include <weir/limits/limiter.h>
#include <weir/limits/replica_side.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <weir/limits/algorithms/log_window.h>
#include <weir/limits/algorithms/window.h>
#include <weir/limits/limiter/dirty_entries.h>
#include <weir/limits/limiter/escrow_book.h>
#include <weir/limits/limiter/items.h>
#include <weir/limits/limiter/local.h>
#include <weir/limits/limiter/overflow.h>
#include <weir/limits/limiter/program.h>
#include <weir/limits/limiter/request_ids.h>
#include <weir/limits/limiter/reservations.h>
#include <weir/limits/limiter/rules_in_force.h>
#include <weir/limits/limiter/small_series.h>
#include <weir/limits/limiter/time_seen.h>
#include <weir/limits/limiter/unmet.h>
#include <weir/limits/series/series.h>
#include <weir/limits/series/series_table.h>

namespace weir {

using crdt::CellId;

/// A log's entries, oldest first; only the newest `most` that are not 0. Valid until the thread's
/// next call.
std::span<const LogEntry> read_log(const Series* series, std::uint64_t most);

/// Of sweep_some(): where it is.
struct SweepPass {
  Nanos floor = 0;
  std::size_t segment = 0;
  std::size_t forgotten = 0;
  std::optional<NumbersInUse> in_use;  // if numbers are to be forgotten
  std::uint64_t version = 0;           // of the rules as it began
};

/// Locks, in the order in which they are taken; whoever holds one takes none before it:
///   0. the sweep's
///   1. a request id's (RequestIds), or that of the rules in force (RulesInForce)
///   2. a segment's of the table; not by who holds an entry's
///   3. entries' of the table, in the order of their addresses
///   4. one of these: the table's SeriesShares, the sketch's turn (Overflow), busy windows or needs
///      (EscrowBook), a stripe of DirtyEntries, a shard of Reservations. Nothing is locked with one
///      of them held.
struct Limiter::Impl {
  LimiterOptions options;
  SeriesTable table;
  TimeSeen time;
  DirtyEntries dirty_entries;
  Overflow overflow;
  RequestIds ids;
  Reservations reservations;
  Unmet unmet;
  EscrowBook escrow;
  RulesInForce rules;
  std::mutex sweep_mutex;                 // taken with no other lock held
  SweepPass pass;                         // with that
  std::atomic<Nanos> forgotten_until{0};  // of buckets' slots that were born by then some may be

  Impl(std::shared_ptr<const RuleSet> first, LimiterOptions given)
      : options(given),
        table(given.max_series, given.replicated, given.populate),
        ids(given.hash_key, given.max_request_ids, given.request_id_ttl),
        reservations(given.max_tickets, part_of_one(given.max_tickets)),
        escrow(given),
        rules(std::move(first), given.hash_key, given.replicated, given.lost.any(),
              [this](const Program& program) { share_out(program); }) {}

  /// Tells the table which part each rule has.
  void share_out(const Program& program);

  /// Until then some series are not here and have counts that the replica holds.
  std::atomic<Nanos> cold_until{0};
  bool cold(Nanos now) const { return cold_until.load(std::memory_order_acquire) > now; }
  void cold_for(Nanos until);
  std::size_t next_let_go = 0;  // a segment; by the thread that absorbs
  /// Some series are not here, and may be with the replica: nothing is decided before it was asked.
  bool lacks_counts(std::span<const Item> items) const;
  void warm(const Request& request, Nanos given, std::vector<CellId>& out);

  RulesInForce::Use use(const Local& work) { return rules.use(work.stripe); }

  SeriesId series_of(const CompiledRule& compiled, const Request& request, std::string& key) const;

  // One entry, with its lock held. Null stands for an unused one.

  /// Sets Item::verdict and Item::compact.
  void assess(const CompiledRule& compiled, Item& item, Nanos now);

  /// What its count or debt was counted by; of small forms that have a number.
  const RuleNumbers::Kept& counted_by(const SeriesEntry& entry) const {
    return rules.number(table.rule(entry));
  }
  Verdict evaluate(const CompiledRule& compiled, const Item& item, std::uint64_t cost, Nanos now);
  /// Until when counts may be missing that this decision would go by; `now` or earlier: none are.
  Nanos lost_until(const CompiledRule& compiled, const Item& item, Nanos now) const;

  /// Verdict::reset once the cost has been consumed. `before` is the same from before.
  Nanos reset_after(const CompiledRule& compiled, const Item& item, Nanos before, Nanos now);

  /// Null: it has another form, or there is no entry.
  static Series* general_form(const SeriesEntry* entry) {
    return entry != nullptr && entry->form() == Form::general ? entry->series : nullptr;
  }
  /// What a bucket owes, with what is held.
  crdt::DebtTicks debt_of(const CompiledRule& compiled, const Item& item, Nanos now) const;
  /// Units in the window that a cost counts in.
  std::uint64_t counted_in(const Item& item) const;
  /// Puts the series beside the table, where everything fits.
  Series& general(SeriesEntry& entry, const SeriesId& id);
  /// Item::verdict is from before.
  void consume(const CompiledRule& compiled, Item& item, Nanos now);
  void consume_general(const CompiledRule& compiled, Item& item, Nanos now);

  // Form::bucket (small_series.h). Of a replicated bucket an entry has what a decision reads, the
  // debt and when that was; and as long as nobody else consumes from it, the rest as well: its
  // units, all of them counted by a checkpoint of the last touch, and when its slot was born, which
  // is a whole second. Otherwise the rest is in a BucketRecord, or it has the general form.

  /// is_compact(), and count_own() can count the cost.
  [[gnu::always_inline]] inline bool is_small_bucket(const CompiledRule& compiled,
                                                     const SeriesEntry& entry, std::uint64_t cost,
                                                     Nanos now) const {
    return is_compact(compiled, entry) && (!options.replicated || can_count(entry, cost, now));
  }
  [[gnu::noinline]] bool can_count(const SeriesEntry& entry, std::uint64_t cost, Nanos now) const;
  /// After consume_compact(), where buckets are replicated. `remaining` is from before.
  [[gnu::noinline]] void count_own(const CompiledRule& compiled, SeriesEntry& entry,
                                   std::uint64_t cost, std::uint64_t remaining);
  void note_crossed(const CompiledRule& compiled, SeriesEntry& entry, std::uint64_t cost,
                    std::uint64_t remaining);
  /// The first consumption from a replicated bucket. False if it must have the general form.
  bool begin_replicated(const CompiledRule& compiled, SeriesEntry& entry, std::uint64_t cost,
                        Nanos now);
  /// All that an entry of the form `bucket` says.
  BucketCell read_bucket(const SeriesEntry& entry) const;
  /// Replicated: makes the entry one of the form `bucket` that says the same. False if none can.
  bool write_bucket(SeriesEntry& entry, const BucketCell& bucket);
  /// Back to Form::bucket, if that says all there is.
  void shrink(SeriesEntry& entry);
  Nanos expiry_of_bucket(const SeriesEntry& entry) const {
    return entry.bucket.number == SeriesTable::kNoRule
               ? static_cast<Nanos>(entry.bucket.debt)
               : entry.time + counted_by(entry).compact.fill_time;
  }
  /// Calls `change(bucket)` of the series' bucket, whatever form it has and will have; a new one if
  /// there is none.
  template <typename Change>
  void change_bucket(SeriesEntry& entry, const SeriesId& id, Change change) {
    if (options.replicated && entry.form() != Form::general && entry.form() != Form::window) {
      BucketCell bucket;
      if (entry.form() == Form::bucket) bucket = read_bucket(entry);
      change(bucket);
      if (!write_bucket(entry, bucket)) general(entry, id).make_bucket() = bucket;
      return;
    }
    change(general(entry, id).make_bucket());
    if (options.replicated) shrink(entry);
  }

  /// The cell in which a cost counts.
  static crdt::Epoch epoch_of(const CompiledRule& compiled, const Item& item, Nanos now) {
    if (compiled.bucket_cell) return crdt::kBucketEpoch;
    const bool each = compiled.log && !compiled.first_hit;
    return each ? log_epoch(compiled.rule->window, now) : item.window.epoch();
  }
  /// Of rules with first_hit: sets Item::window to the one that a cost counts in. Of those that are
  /// open that which began first, as all nodes then say the same; or one that begins now.
  static void find_window(const CompiledRule& compiled, Item& item, Nanos now);

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
  /// Of CompiledRule::special.
  [[gnu::noinline]] void add_special(const CompiledRule& compiled, const Request& request,
                                     Nanos now, Local& work, Items& items);
  /// `base`, or what it is with the numbers that come with a request; then `keep` holds that.
  const CompiledRule& in_place_of(const CompiledRule& base, const RequestLimit& asked,
                                  AskedRulePtr& keep) const;

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

  void check(const Request& request, Nanos given, Decision& out);
  [[gnu::noinline]] void check_any(const Request& request, Local& work, Nanos given, Decision& out);

  void decide_prepared(const Request& request, Items& items, Local& work, Nanos now, Decision& out);
  void check(std::span<const Request> requests, Nanos given, std::span<Decision> out);
  void decide_once(const Request& request, Items& items, Local& work, Nanos now, Decision& out);

  /// What this id was answered before, or what `decide_now` makes of it. The lock of an id is taken
  /// before those of series, never with one in hand.
  template <typename Decide>
  Ticket by_id(const Request& request, const Items& items, const Program& program, Nanos now,
               Decision& out, Decide decide_now) {
    RequestIds::Answer answer;
    ids.once(request.domain, request.id, now, [&](const RequestIds::Answer* known) {
      if (known != nullptr) {
        out = known->decision;
        out.repeated = true;
        if (known->rules != program.rules) rules.translate(program, *known->rules, out);
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
      if (decision.statuses[i].allowed && items.item_of(i).cost > 0) return true;
    }
    return false;
  }
  void decide(Items& items, Local& work, Nanos now, Decision& out);

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
  [[gnu::always_inline]] inline bool assess_small(Item& item, Nanos now);
  [[gnu::always_inline]] inline void consume_small(const CompiledRule& compiled, Item& item,
                                                   Nanos now);
  /// False: it is no small bucket, and the lock is gone.
  [[gnu::always_inline]] inline bool assess_bucket_alone(const CompiledRule& compiled,
                                                         SeriesEntry& entry, std::uint64_t cost,
                                                         Nanos now, Owed& owed, Verdict& verdict);

  /// False: they are not small windows of which none is newer than this one, and the lock is gone.
  [[gnu::always_inline]] inline bool assess_window_alone(const CompiledRule& compiled,
                                                         SeriesEntry& entry, std::uint64_t cost,
                                                         Nanos now, const WindowAt& window,
                                                         Verdict& verdict);
  /// What changes more than fits_in_window() says must find no credits: their units are in the
  /// count as it stands.
  [[gnu::noinline]] void consume_window(const CompiledRule& compiled, Item& item, Nanos now);
  [[gnu::noinline]] void consume_window_alone(const CompiledRule& compiled, SeriesId id,
                                              std::uint64_t cost, SeriesEntry& entry,
                                              Credit& credit, Nanos now, Verdict before);
  // Credits: a thread that finds another at the same series time and again takes a block of units.

  /// A peek tells what is left, credits included.
  [[gnu::noinline]] void close_ended_credits(SeriesEntry& entry, std::uint64_t cost, Nanos now);

  /// After the cost was consumed; `before` is from before that.
  [[gnu::noinline]] void open_credit(const CompiledRule& compiled, SeriesId id, std::uint64_t cost,
                                     SeriesEntry& entry, Credit& credit, const Local& work,
                                     Nanos now, Verdict before);

  /// In the order of addresses, so that two requests cannot wait for each other. If an entry has
  /// been removed since it was found, nothing is locked and false returned.
  bool lock_all(std::span<Item> items, std::vector<Item*>& locked);
  static void unlock_all(std::span<Item> items);

  /// The rule's verdict, before anything is made or consumed.
  void assess_whole(const CompiledRule& compiled, Item& item, Nanos now);
  /// Decides and unlocks. False, with nothing decided, if series must be made first.
  bool decide_locked(const Items& all, std::span<Item> items, Nanos now, Decision& out);
  /// Sets Item::beyond, of a report or where the request is denied. True if any is set.
  bool find_beyond(const Items& all, std::span<Item> items, Decision& out, Nanos now);
  /// Units of a cost that count although they may not pass.
  std::uint64_t units_beyond(const CompiledRule& compiled, const Item& item, bool report,
                             Nanos now);
  /// Consumes them; the verdict becomes that from afterwards.
  void consume_beyond(const CompiledRule& compiled, Item& item, bool report, Nanos now,
                      std::optional<Overflow::Turn>& turn);
  /// Decides nothing, and unlocks.
  void give_back(std::span<Item> items, Nanos now, Decision& out);
  /// Units of the cost that this node counted, and that still count, do so no longer.
  std::uint64_t give_back(const CompiledRule& compiled, Item& item, Nanos now);
  std::uint64_t give_back_windows(SeriesEntry& entry, const SeriesId& id, std::uint64_t units,
                                  Nanos now);
  std::uint64_t give_back_bucket(const CompiledRule& compiled, SeriesEntry& entry,
                                 const SeriesId& id, std::uint64_t units, Nanos now);
  /// Counts the request if the candidate would deny it. Before it consumes anything.
  void try_candidate(const CompiledCandidate& candidate, const Item& item, bool report, Nanos now);

  /// For a series of this rule: gives the places of series that are over, or else of some that are
  /// idle, of this rule or of those that have more than their part. Not where the replica must
  /// forget a series in step.
  bool make_room(std::uint32_t number, Nanos now);

  /// Counts a series in the sketch, so that it may go. False if it was used since this was last
  /// asked of it (the clock algorithm, Corbato 1968), or has no small form.
  bool move_out(SeriesEntry& entry, Nanos now);

  /// No room for the series: closed rules deny; open ones count in the sketch, which may deny too
  /// early and never too late.
  void degrade(const CompiledRule& compiled, Item& item, Nanos now,
               std::optional<Overflow::Turn>& turn);
  void make(Item& item, bool warmed, Nanos now);

  // Reservations.

  Ticket reserve(const Request& request, Nanos given, Nanos timeout, Decision& out,
                 TicketHolder holder);
  Ticket reserve(const Request& request, Items& items, Local& work, Nanos now, Nanos timeout,
                 Decision& out, TicketHolder holder);
  /// How much of `all` one caller may have: something, if there is anything.
  std::uint64_t part_of_one(std::uint64_t all) const {
    auto part = static_cast<std::uint64_t>(static_cast<Uint128>(all) *
                                           std::min(options.caller_percent, 100u) / 100);
    return std::max<std::uint64_t>(part, std::min<std::uint64_t>(all, 1));
  }
  void hold(const CompiledRule& compiled, const Item& item, Nanos now);
  /// For Reservations: the hold goes, and `cost` counts.
  auto settling(Nanos now) {
    return
        [this, now](const Hold& held, std::uint64_t cost) { return settle_hold(held, cost, now); };
  }
  SettledHold settle_hold(const Hold& hold, std::uint64_t cost, Nanos now);
  /// False if it is too late to count anything: the rule drops that.
  bool settle(const CompiledRule& compiled, Item& item, const Hold& hold, Nanos now);

  // The replica's side.

  bool drain(std::vector<crdt::OwnCount>& out, std::size_t max);
  void drain_places(std::span<const std::size_t> places, std::vector<crdt::OwnCount>& out);
  void drain_entry(SeriesEntry& entry, std::vector<crdt::OwnCount>& out);
  void drain_series(const SeriesId& id, Series& series, bool urgent,
                    std::vector<crdt::OwnCount>& out) const;

  /// What with_entry() does where there is no entry. `anywhere`: in others' parts of the table,
  /// too.
  enum class Make : std::uint8_t { no, yes, anywhere };
  /// Calls `change(entry)` with the lock of the series' entry. False if there is none, or no room
  /// to make one.
  template <typename Change>
  bool with_entry(const SeriesId& id, Make make, Change change) {
    for (;;) {
      bool made = false;
      SeriesEntry* entry = table.find(id);
      if (entry == nullptr && make != Make::no) {
        entry = table.insert(id, SeriesTable::kNoRule, made, {}, make == Make::anywhere);
      }
      if (entry == nullptr) return false;
      if (!table.lock(*entry, id)) continue;
      change(*entry);
      SeriesTable::unlock(*entry);
      return true;
    }
  }
  /// With `own`, the own slot too: the series was let go.
  bool absorb(const crdt::Cell& cell, Growth& growth, bool own = false);
  std::size_t let_go(std::size_t most, const ReplicaSide::DurableCount& kept);
  /// The replica has all that the entry has, and warm() names the cells. `until`: when the last of
  /// them is over. `born`: the last slot of a bucket whose birth must be known to what comes next,
  /// as no cell will say it.
  bool is_kept(const SeriesEntry& entry, const ReplicaSide::DurableCount& kept, Nanos& until,
               Nanos& born) const;
  bool absorb_small(SeriesEntry& entry, const CellId& id, std::uint64_t others, Growth& growth);
  void absorb_bucket(BucketCell& bucket, const crdt::Cell& cell, std::uint64_t total,
                     Growth& growth) const;
  void reset(const crdt::Cell& cell, const crdt::Slot& gone);
  void rebase(const crdt::Incarnation& fresh, const ReplicaSide::DurableCount& durable);

  // Rights of escrow rules, of series that are in their general form.

  /// Keeps what EscrowBook says became of a cost.
  void note_spent(Item& item, const EscrowBook::Spent& spent);
  void rights_needed(Nanos now, Nanos lead, std::vector<RightsNeed>& out);
  std::uint64_t give_rights(const SeriesId& name, const CellId& id, const crdt::Incarnation& to,
                            std::uint64_t wanted, Nanos now, bool all);
  std::vector<RightsLeft> rights_left(Nanos now, std::size_t max);
  std::optional<std::uint64_t> absorb_rows(const CellId& id, const EscrowOthers& others);

  void mark_durable(const crdt::OwnCount& count);
  /// Durability reserve of a merged rule.
  static void keep_reserve(const CompiledRule& compiled, Item& item, WindowCell& cell);
  void forget_until(Nanos until);
  std::size_t sweep(Nanos floor);
  std::optional<Swept> sweep_some(Nanos floor, std::size_t most);

  void reload(std::unique_ptr<Program> prepared);

  /// With its lock: it may be forgotten.
  bool is_over(SeriesEntry& entry, Nanos floor);

  bool is_escrow_bucket_over(const SeriesEntry& entry, Series& series, Nanos floor) const;
  std::uint64_t used(const CompiledRule& compiled, const SeriesId& id, Nanos now);
  bool would_wait(const CompiledRule& compiled, const SeriesId& id, std::uint64_t cost, Nanos now);
};

}  // namespace weir
