#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <weir/crdt/time.h>
#include <weir/limits/bounds.h>
#include <weir/limits/decision.h>
#include <weir/limits/rules/rule.h>

namespace weir {

/// Why there is no decision. The same in code, on the wire and in JSON (to_string). Values are
/// never reused.
enum class ErrorKind : std::uint8_t {
  none = 0,
  invalid = 1,      ///< the request breaks a bound or names what is not there; not counted
  unavailable = 2,  ///< not counted: it was not sent, or the node does not take it now
  overloaded = 3,   ///< not counted: shed, as too much is under way or the disk is too slow for it
  deadline = 4,     ///< no answer in time; it may have been counted
  unknown = 5,      ///< the answer was lost, or makes no sense; it may have been counted
  closed = 6,       ///< a rule with on_failure: closed cannot keep its promise now
  unsupported = 7,  ///< not counted: this is not done here
  unauthenticated = 8,  ///< not counted: the caller may not, unless it shows who it is
  forbidden = 9,        ///< not counted: the caller is known, and may not
};

std::string_view to_string(ErrorKind kind);
/// The kind of that name, or `unknown`.
ErrorKind error_kind_of(std::string_view name);

/// An error kind, and what a person should know. Whether the request may then pass is the caller's
/// policy.
struct Error {
  ErrorKind kind = ErrorKind::none;
  std::string detail = {};

  bool empty() const { return kind == ErrorKind::none; }
  /// The request may go elsewhere: nothing can have been counted.
  bool surely_not_counted() const {
    return kind == ErrorKind::unavailable || kind == ErrorKind::overloaded ||
           kind == ErrorKind::unsupported;
  }
  /// It may have been counted. To send it again may count it twice, unless it has an id.
  bool may_have_counted() const {
    return kind == ErrorKind::deadline || kind == ErrorKind::unknown;
  }
  /// "unavailable: connection refused"
  std::string to_string() const;
  friend bool operator==(const Error&, const Error&) = default;
};

/// What one matching rule says of one descriptor: RuleStatus with names, as it is told outside of
/// the process.
struct Status {
  std::string rule;
  std::uint64_t limit = 0;      ///< units: the limit, or a bucket's burst
  std::uint64_t remaining = 0;  ///< units
  Nanos reset = 0;              ///< until the rule is as if unused
  Nanos retry_after = 0;        ///< denied: until this cost passes; kNever if it never can
  bool allowed = true;
  bool shadow = false;    ///< evaluated, not enforced
  bool degraded = false;  ///< the rule's on_failure answered, or what was promised is not kept
  Nanos delay = 0;        ///< allowed by a leaky bucket: after which to forward the request
  bool exhausted_locally =
      false;  ///< denied: other members may have rights left, and are being asked
  /// If asked for: units, by which the rule may be over its limit at most, by what peers admitted
  /// unseen. At most 2^63 - 1.
  std::optional<std::uint64_t> over_admission{};
  std::uint64_t quota = 0;       ///< units per `window`: the rule as configured; 0: not known
  Nanos window = 0;              ///< 0: not known, or of no fixed length
  std::uint16_t descriptor = 0;  ///< index of the request's descriptor that it is about
  bool hidden = false;           ///< no HTTP header says anything of the rule
  /// Denied: the HTTP status if this one decides, 403, 429 or 503, and what a person is told;
  /// empty: nothing of its own.
  std::uint16_t deny_status = kDenyStatus;
  std::string deny_message{};
  friend bool operator==(const Status&, const Status&) = default;
};

/// The answer to one request: the only shape in which one is told, by a node and by a client. A
/// Reply that is used again keeps its memory.
struct Reply {
  Error error;  ///< not empty: no decision is known, and nothing else counts
  bool allowed = false;
  bool repeated = false;  ///< the id passed before: what it was told then; nothing was consumed
  int deciding = -1;      ///< index into statuses; -1: no enforcing rule matched
  std::vector<Status> statuses;
  std::uint64_t given_back = 0;  ///< of a refund: units, in the rule that gave back the most

  const Status* decider() const {
    return deciding < 0 || static_cast<std::size_t>(deciding) >= statuses.size()
               ? nullptr
               : &statuses[static_cast<std::size_t>(deciding)];
  }
  /// Allowed: time after which to forward the request, the longest that an enforcing rule asks for.
  Nanos delay() const;
  /// Empty, with its memory.
  void clear();
  /// As an error, and nothing else.
  void fail(ErrorKind kind, std::string_view detail);
  friend bool operator==(const Reply&, const Reply&) = default;
};

/// Tells a decision by the rules that it went by (Decision::version), but for what was given back.
void tell(const Decision& decision, const RuleSet& rules, Reply& out);

/// The answer to a reservation. docs/reserve.md
struct ReserveReply {
  Reply decision;
  std::string ticket;  ///< to settle with; empty if nothing is held
  friend bool operator==(const ReserveReply&, const ReserveReply&) = default;
};

struct SettleReply {
  Error error;                 ///< not empty: it is not known to be settled
  bool settled = false;        ///< false: no such ticket is open, nothing has changed
  std::uint64_t reserved = 0;  ///< hits, as estimated
  bool lapsed = false;         ///< some window was over, of a rule that drops: nothing counted
  bool degraded = false;       ///< counted, but not durable as a rule promises
  friend bool operator==(const SettleReply&, const SettleReply&) = default;
};

/// The answer to a client that wants to decide on its own for a while. limits/lease.h
struct LeaseReply {
  Reply decision;
  std::string ticket;      ///< to settle with what was used; empty: there is no lease
  std::uint64_t hits = 0;  ///< granted, those of the request included
  Nanos term = 0;          ///< from when the request was sent
  friend bool operator==(const LeaseReply&, const LeaseReply&) = default;
};

/// A node's rules. limits/rules/rules_text.h
struct RulesReply {
  Error error;          ///< not empty: there are none
  std::string version;  ///< of the rules in force; the same text has the same version
  bool same = false;    ///< the caller has this version: `yaml` is empty
  std::string yaml;
  friend bool operator==(const RulesReply&, const RulesReply&) = default;
};

}  // namespace weir
