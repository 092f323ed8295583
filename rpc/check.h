#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <weir/crdt/time.h>

namespace weir::rpc {

/// What one matching rule says of one request (weir::RuleStatus with the rule's name).
struct CheckStatus {
  std::string rule;
  std::uint64_t limit = 0;
  std::uint64_t remaining = 0;
  Nanos reset = 0;        ///< until the rule is as if unused
  Nanos retry_after = 0;  ///< denied: until this cost passes; kNever if it never can
  bool allowed = true;
  bool shadow = false;
  bool degraded = false;
  Nanos delay = 0;         ///< allowed by a leaky bucket: after which to forward the request
  bool elsewhere = false;  ///< denied: other members may have rights left, and are being asked
  /// If asked for: units, by which the rule may be over its limit at most, by what peers admitted
  /// unseen. At most 2^63 - 1.
  std::optional<std::uint64_t> over_admission{};
  friend bool operator==(const CheckStatus&, const CheckStatus&) = default;
};

/// The answer to one request, as a server gives it and a client gets it.
struct CheckReply {
  /// Not empty: no decision is known, and says why. "unavailable: …": it was not counted, as it was
  /// not sent or the node refused it (when it sheds load: "unavailable: shedding: …"). "deadline"
  /// or "unknown: …": the node may have counted it. Else what was wrong with the request. Whether
  /// the request may then pass is the caller's policy.
  std::string error;
  bool allowed = false;
  int deciding = -1;  ///< index into statuses; -1: no enforcing rule matched
  std::vector<CheckStatus> statuses;
  bool repeated = false;  ///< the id passed before: what it was told then; nothing was consumed

  /// Allowed: time after which to forward the request, the longest that an enforcing rule asks for.
  Nanos delay() const {
    Nanos longest = 0;
    for (const CheckStatus& status : statuses) {
      if (allowed && !status.shadow && status.delay > longest) longest = status.delay;
    }
    return longest;
  }

  const CheckStatus* decider() const {
    return deciding < 0 ? nullptr : &statuses[static_cast<std::size_t>(deciding)];
  }
  friend bool operator==(const CheckReply&, const CheckReply&) = default;
};

/// One request, owning its text.
struct CheckItem {
  std::string domain;
  std::vector<std::pair<std::string, std::string>> entries;
  std::uint64_t hits = 1;  ///< 0 peeks
  std::string id = {};     ///< names the request, which then counts once; empty: no name
  /// It may take long (a commit, another region): it shares no message with those that need not
  /// wait for it.
  bool apart = false;
  /// Between nodes: the rules that are to decide, where they arrive: those that have their home
  /// there, or escrow rules, from the rights that are there. Empty: all, anywhere.
  std::vector<std::string> only = {};
  bool wants_bound = false;  ///< asks for CheckStatus::over_admission
  friend bool operator==(const CheckItem&, const CheckItem&) = default;
};

/// The answer to a reservation. docs/reserve.md
struct ReserveReply {
  CheckReply decision;
  std::string ticket;  ///< to settle with; empty if nothing is held
  friend bool operator==(const ReserveReply&, const ReserveReply&) = default;
};

struct SettleReply {
  std::string error;           ///< not empty: it is not known to be settled, and says why
  bool settled = false;        ///< false: no such ticket is open, nothing has changed
  std::uint64_t reserved = 0;  ///< hits, as estimated
  bool lapsed = false;         ///< some window's time was over: there nothing was counted
  bool degraded = false;       ///< counted, but not durable as a rule promises
  friend bool operator==(const SettleReply&, const SettleReply&) = default;
};

/// The answer to a client that wants to decide on its own for a while. limits/lease.h
struct LeaseReply {
  CheckReply decision;
  std::string ticket;      ///< to settle with what was used; empty: there is no lease
  std::uint64_t hits = 0;  ///< granted, those of the request included
  Nanos term = 0;          ///< from when the request was sent
  friend bool operator==(const LeaseReply&, const LeaseReply&) = default;
};

/// A node's rules. limits/rules/rules_text.h
struct RulesReply {
  std::string error;  ///< not empty: there are none, and why
  std::string yaml;
  friend bool operator==(const RulesReply&, const RulesReply&) = default;
};

/// True of an error after which nothing can have been counted: the request may go elsewhere.
inline bool surely_not_counted(const std::string& error) {
  return error.compare(0, 12, "unavailable:") == 0;
}

/// Bounds of the client protocol, kept by clients and enforced by servers.
inline constexpr std::size_t kMaxRequestsPerCall = 1024;
inline constexpr std::size_t kMaxEntries = 64;
inline constexpr std::size_t kMaxText = 4096;  ///< bytes of a domain, a key or a value
inline constexpr std::size_t kMaxRequestId = 128;
inline constexpr std::size_t kMaxTicket = 128;
inline constexpr std::size_t kMaxOnly = 64;  ///< rules that a forwarded request names

}  // namespace weir::rpc
