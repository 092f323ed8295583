#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <weir/crdt/escrow.h>
#include <weir/crdt/ids.h>
#include <weir/limits/decision.h>
#include <weir/limits/hash_key.h>
#include <weir/limits/request.h>
#include <weir/limits/rules/rule.h>

namespace weir {

struct LimiterOptions {
  HashKey hash_key{};
  /// Series held at most, for which memory is reserved at once and taken as it is used (58 bytes a
  /// series; 64 with `replicated`, and 48 for each bucket in which others count). When full, series
  /// that are over give their places, then idle ones, whose counts move to a sketch of fixed size
  /// that may say too much and never too little; none do with `replicated`. Where none can, a new
  /// series of a rule with on_failure `closed` is denied, and with `open` counted in that sketch,
  /// here only. Either is reported as degraded.
  /// Each rule has a guaranteed part of them (Rule::series), and what is in no part is for whoever
  /// comes first: no rule's keys take places in another's part.
  std::size_t max_series = 1u << 20;
  /// Take all of that memory now (about 25 ms a GiB), and not where a decision first touches it,
  /// which then stands still for the time in which the system clears 2 MiB.
  bool populate = false;
  /// Keep track of what changed for drain(). Leave off when nobody replicates.
  bool replicated = false;
  crdt::Incarnation incarnation{};  ///< of the replica; only with `replicated`
  /// Escrow rules: who shares limits, and which of them this node is. Null: nobody else.
  std::shared_ptr<const crdt::ShareTable> shares = nullptr;
  crdt::Member self = {};
  /// Windows of which counts may be missing (a clock was set back): escrow rules have no share of
  /// them, and rules with on_failure `closed` deny; so for a bucket until it must be full again.
  crdt::LostWindows lost = {};
  /// Request ids remembered, about 200 bytes each and 64 for each rule that matched. When full the
  /// oldest are forgotten: a request that comes again after (about) so many newer ones counts
  /// again.
  std::size_t max_request_ids = 1u << 16;
  Nanos request_id_ttl = kMinute;  ///< for how long one is remembered
  /// Reservations open at once. Beyond, one is answered by its rules' on_failure: `closed` denies,
  /// `open` counts the estimate at once, as the timeout would. Either is reported as degraded.
  std::size_t max_tickets = 1u << 16;
  /// Of those, in percent, that one caller may have open (TicketHolder): beyond, it is answered as
  /// if all were. Of each limit a caller may hold as much by leases, too.
  unsigned caller_percent = 100;
};

/// A request counts once for each of its descriptors that the rule matches.
struct RuleCounters {
  std::uint64_t allowed = 0;   ///< requests to which this rule had no objection, and reports
  std::uint64_t denied = 0;    ///< requests it denied (for a shadow rule: would have)
  std::uint64_t degraded = 0;  ///< requests that on_failure answered
  /// Of the denied: escrow, there were no rights here, but perhaps at other members.
  std::uint64_t exhausted_locally = 0;
  std::uint64_t candidate_denied = 0;  ///< requests that Rule::candidate would have denied
  friend bool operator==(const RuleCounters&, const RuleCounters&) = default;
};

struct RequestIdCounters {
  std::size_t held = 0;
  std::uint64_t repeated = 0;  ///< requests that got the answer they had got before
  std::uint64_t evicted = 0;   ///< ids forgotten before their time, for want of room
};

/// How much of LimiterOptions::max_series a rule has.
struct SeriesUsage {
  std::uint64_t series = 0;
  std::uint64_t guaranteed = 0;  ///< for which there is always room
  std::uint64_t refused = 0;     ///< new keys, so far, for which there was none
};

struct TicketCounters {
  std::size_t open = 0;
  std::size_t most = 0;         ///< open at once, LimiterOptions::max_tickets
  std::uint64_t timed_out = 0;  ///< settled in full, as nobody did in time
  std::uint64_t refused = 0;    ///< reservations for which there was no room
};

/// Requests that no rule met: they pass, uncounted.
struct UnmetCounters {
  std::uint64_t no_rule = 0;         ///< of a domain that has rules
  std::uint64_t unknown_domain = 0;  ///< of one that has none
  std::string last_unknown_domain;   ///< about the last of those
};

class ReplicaSide;     // replica_side.h
struct PreparedRules;  // by Limiter::prepare

/// Decides from memory. Thread-safe: any number of threads may call any member at any time, except
/// where said otherwise. No call does I/O, waits for anything but another call on the same series
/// (or request id) or its neighbours in memory, or reads a clock.
class Limiter {
 public:
  Limiter(std::shared_ptr<const RuleSet> rules, LimiterOptions options);
  ~Limiter();
  Limiter(const Limiter&) = delete;
  Limiter& operator=(const Limiter&) = delete;

  /// Evaluates every rule that matches and, if all enforcing ones allow, consumes from each; a
  /// denied request consumes nothing, but of rules with Rule::count_denied. So does one of several
  /// descriptors: the rules of each of them must allow. Reports and refunds are told as allowed and
  /// count as RequestKind says. `now` is clamped so that time never runs backwards for a
  /// thread; between threads, and for those beyond the fifteenth, it may by less than a
  /// millisecond. Reusing `out` avoids allocation.
  ///
  /// A request with an id that passed and consumed is remembered with its answer (LimiterOptions):
  /// the same id in the same domain gets the same answer again, with `repeated` set, and consumes
  /// nothing. One that was denied is not remembered: it may pass when it comes again. Of two
  /// threads with one id at the same time exactly one consumes.
  void check(const Request& request, Nanos now, Decision& out);
  Decision check(const Request& request, Nanos now);
  /// The same for several requests, as if one after the other; `out` is as long as `requests`.
  /// Faster than single calls: the memory of the next ones is fetched meanwhile.
  void check(std::span<const Request> requests, Nanos now, std::span<Decision> out);

  // Reservations, for costs that are known only afterwards. docs/reserve.md

  /// Decides as check() does, with `hits` as the estimate; Request::kind is not looked at. What it
  /// would consume is held instead: it counts in every decision here at once, and is neither
  /// drained nor durable until it is settled. A hold in a bucket stands undrained, as if consumed
  /// now. `timeout` from now (0 to kMaxHold) it is settled in full, by settle_due(). No ticket if
  /// nothing is held: the request was denied, asks for 0 hits, meets no rule that counts it, or was
  /// answered by on_failure. A repeated request gets its ticket again.
  Ticket reserve(const Request& request, Nanos now, Nanos timeout, Decision& out,
                 TicketHolder holder = {});
  /// Units of the series that `rule` (an index) counts the request's first descriptor in, which the
  /// caller may still lease beside those that it has.
  std::uint64_t may_lease(std::uint32_t rule, const Request& request, std::uint64_t caller) const;
  static constexpr Nanos kMaxHold = kDay;
  /// The hold goes, and `actual` hits are counted, more than were reserved and beyond the limit
  /// too, but of no rule more units than its limit (a bucket's burst) was at the reservation: in
  /// windows and logs at the instant of the reservation (if no decision reads that any more, as
  /// Rule::late says), in buckets at `now`. Settles once. Of several descriptors `actual` are the
  /// hits of the first one, or of as many as it has numbers for; the others are counted as
  /// reserved. For another `caller` than the TicketHolder's the ticket is not known.
  Settled settle(Ticket ticket, std::uint64_t actual, Nanos now, std::uint64_t caller = 0);
  Settled settle(Ticket ticket, std::span<const std::uint64_t> actual, Nanos now,
                 std::uint64_t caller = 0);
  /// Settles in full what has timed out at `now`, at most `max` tickets. Returns how many. Call it
  /// every now and then; it costs little if there are none.
  std::size_t settle_due(Nanos now, std::size_t max);
  /// Settles in full all that is open: nobody will come to settle it.
  void settle_all(Nanos now);

  /// Forgets a request id that passed here, of a request that was then denied elsewhere and gave
  /// back what it held: it may come again.
  void forget_id(std::string_view domain, std::string_view id);

  /// Decisions that begin from now on go by `rules`; one that another thread has begun may still go
  /// by those before. A rule that counts in the same series as before (docs/rules.md) goes on with
  /// its counts, its counters, what is held, and with the requests that are remembered. The series
  /// of one that is gone expire as they would have: until then it finds them if it comes back.
  ///
  /// Costs a decision nothing but a look whether the rules are still the same. Several reloads at a
  /// time wait for each other and for sweep(). A thread that makes no more calls may keep the rules
  /// alive that it saw last; sweep() frees the rest. docs/rules.md says what becomes of what was
  /// consumed.
  void reload(std::shared_ptr<const RuleSet> rules);
  /// The same in two steps, for a thread that must not stand still: most of the work is in
  /// prepare(), on any other thread, and changes nothing. What it made is for this limiter, once;
  /// other rules may have come into force meanwhile.
  std::shared_ptr<PreparedRules> prepare(std::shared_ptr<const RuleSet> rules) const;
  void reload(std::shared_ptr<PreparedRules> prepared);

  /// Those in force. Where it is said of a `rule` that it is an index, it is one into these; beyond
  /// them is answered with nothing.
  std::shared_ptr<const RuleSet> rules() const;
  /// Those that a decision with this `version` went by. Null if eight newer ones were loaded since.
  std::shared_ptr<const RuleSet> rules(std::uint64_t version) const;
  /// The series that `rule` (an index) counts this request's first descriptor in, which must match.
  crdt::SeriesId series_of(std::uint32_t rule, const Request& request) const;
  /// Since the limiter was made. A rule that was gone for so long that it has no series left may
  /// begin anew.
  RuleCounters counters(std::uint32_t rule) const;
  /// The same for what counts as one rule (docs/rules.md), on every node with this hash key.
  crdt::SeriesId rule_identity(std::uint32_t rule) const;
  RequestIdCounters request_ids() const;
  TicketCounters tickets() const;
  UnmetCounters unmet() const;
  std::size_t series_count() const;
  SeriesUsage series_usage(std::uint32_t rule) const;
  /// New keys of any rule, so far, for which there was no room.
  std::uint64_t series_refused() const;
  /// Units consumed in the rule's current window or, for buckets, owed now; own and merged counts,
  /// and what is held. Of the request's first descriptor.
  std::uint64_t used(std::uint32_t rule, const Request& request, Nanos now);
  /// If `rule` lets the request pass, its answer waits for the disk (Decision::wants_commit): what
  /// the rule keeps ahead there is not enough. Of the request's first descriptor.
  bool would_wait(std::uint32_t rule, const Request& request, Nanos now);

  /// Forgets series that are over at `floor` (windows past, buckets full), drained and not held,
  /// and request ids whose time was over then. Returns how many series. With a replica: sweep, then
  /// drain everything, then Replica::retire_buckets(floor), so that a bucket's slots are forgotten
  /// here first.
  std::size_t sweep(Nanos floor);
  /// A whole pass over all series.
  struct Swept {
    Nanos floor = 0;            ///< of its first call: what was over then is gone
    std::size_t forgotten = 0;  ///< series
  };
  /// The same piece by piece, for a loop that must not stand still: looks at about `most` series,
  /// and the next call goes on from there. Returns what it did once it has seen all of them.
  std::optional<Swept> sweep_some(Nanos floor, std::size_t most);

  /// For the driver of a replica, with LimiterOptions::replicated (replica_side.h). Valid as long
  /// as this limiter is.
  ReplicaSide replica_side();

 private:
  friend class ReplicaSide;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace weir
