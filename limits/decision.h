#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include <weir/crdt/time.h>

namespace weir {

/// What one matching rule says of one descriptor of a request. Where several descriptors count in
/// one series of the rule, it says the same of each: what becomes of the sum of their costs.
struct RuleStatus {
  std::uint32_t rule = 0;   ///< index into the rules of Decision::version
  bool allowed = true;      ///< this rule alone
  bool shadow = false;      ///< its verdict was not enforced
  bool degraded = false;    ///< no memory for a new series: see LimiterOptions::max_series
  std::uint64_t limit = 0;  ///< units: the limit, or a bucket's burst
  /// Units left now, after this request if it passed. Where several threads decide on one series it
  /// may lag behind the others by a millisecond (docs/architecture.md); a denial and a peek do not.
  std::uint64_t remaining = 0;
  /// Time until the rule is as if unused: the window's end, or a full bucket. ns.
  Nanos reset = 0;
  /// Denied: time until this very cost passes if nothing else comes; kNever if it never can.
  /// Exact: 1 ns earlier it is denied (an estimate where degraded). Allowed: 0.
  Nanos retry_after = 0;
  /// Escrow, denied: there are no rights left here, but other members may have some, and are being
  /// asked. retry_after is then when to try again, and not exact.
  bool exhausted_locally = false;
  /// Which of the request's descriptors: 0 is Request::descriptor, those of Request::more follow.
  std::uint16_t descriptor = 0;
  /// Leaky buckets, allowed: time after which the request should be forwarded, so that no more
  /// than the limit leaves per window. Exact: until what came before it has drained, rounded up to
  /// 1 ns. Else 0.
  Nanos delay = 0;
};

/// The answer to a Request.
struct Decision {
  bool allowed = true;
  /// Index into `statuses` of the rule that decided: of the denying ones that with the longest
  /// wait, of the allowing ones that with the least remaining. -1: no enforcing rule matched.
  int deciding = -1;
  /// Some rule that this request consumed from promises commit durability: the answer may go out
  /// only after the next commit.
  bool wants_commit = false;
  /// The request's id had passed before: this is the answer that it got then, and nothing was
  /// consumed.
  bool repeated = false;
  /// Of the rules that decided: see Limiter::rules(). From 1, one more with each reload. 0: nothing
  /// was decided, as the counts of some series are with the replica alone (ReplicaSide::warm). An
  /// answer that is given again speaks of those that are in force then, of rules that are still
  /// there.
  std::uint64_t version = 0;
  /// Of a refund, else not set: units that were given back, in the rule that gave the most.
  std::uint64_t given_back = 0;
  /// Every rule that matched, in rule order, shadow rules included: those of the first descriptor,
  /// then those of the next one.
  std::vector<RuleStatus> statuses;

  /// Allowed: time after which the request should be forwarded, the longest that an enforcing rule
  /// asks for. Denied: 0.
  Nanos delay() const {
    Nanos longest = 0;
    for (const RuleStatus& status : statuses) {
      if (allowed && !status.shadow && status.delay > longest) longest = status.delay;
    }
    return longest;
  }

  const RuleStatus* decider() const {
    return deciding < 0 ? nullptr : &statuses[static_cast<std::size_t>(deciding)];
  }
};

/// Names what a reservation holds, within one Limiter. 0: nothing.
struct Ticket {
  std::uint64_t number = 0;
  explicit operator bool() const { return number != 0; }
  friend bool operator==(const Ticket&, const Ticket&) = default;
};

/// For whom a reservation is made.
struct TicketHolder {
  /// Names who asks, and alone may settle; 0: nobody, whose tickets are not counted apart.
  std::uint64_t caller = 0;
  bool lease = false;  ///< what is held is the caller's to spend (lease.h)
};

/// What became of a ticket.
struct Settled {
  bool known = false;      ///< it was open; if not, nothing has changed
  std::uint64_t hits = 0;  ///< as reserved, of the first descriptor
  bool lapsed = false;     ///< some window was over, of a rule with `late: drop`: nothing counted
  /// What was counted is durable only after the next commit, as some rule promises.
  bool wants_commit = false;
};

}  // namespace weir
