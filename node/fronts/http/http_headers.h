#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weir/crdt/time.h>

namespace weir::node {

/// What X-RateLimit-Reset counts: seconds from now, or the Unix time in seconds.
enum class ResetFormat : std::uint8_t { seconds, epoch };

/// One matching rule's say, as plain data: weir::RuleStatus with the rule resolved.
struct HttpStatus {
  std::string rule;  ///< its name
  bool allowed = true;
  bool shadow = false;          ///< evaluated, not enforced
  bool degraded = false;        ///< the rule's on_failure answered
  std::uint64_t limit = 0;      ///< units: the limit, or a bucket's burst
  std::uint64_t remaining = 0;  ///< units
  Nanos reset = 0;              ///< length of time until the rule is as if unused
  Nanos retry_after = 0;        ///< length of time until this cost passes; kNever; 0 if allowed
  std::uint64_t quota = 0;      ///< units per `window`: the rule as configured
  Nanos window = 0;             ///< 0: unknown or of no fixed length, not told
  Nanos delay = 0;              ///< length of time after which to forward the request; 0 if denied
  bool elsewhere = false;       ///< denied: other members may have rights left
  std::optional<std::uint64_t> over_admission{};  ///< units at most; if asked for
};

/// The answer to one check.
struct HttpAnswer {
  std::string error;  ///< not empty: the node cannot decide now; nothing else counts
  bool allowed = true;
  int deciding = -1;  ///< index into statuses; -1: no enforcing rule matched
  Nanos now = 0;      ///< Unix time of the decision
  std::vector<HttpStatus> statuses;
  bool repeated = false;                   ///< the id passed before: what it was told then
  std::optional<std::string> ticket = {};  ///< of a reservation; empty text: nothing is held

  const HttpStatus* decider() const;
  /// Allowed: the longest delay that an enforcing rule asks for.
  Nanos delay() const;
};

/// The answer to one settlement.
struct HttpSettled {
  std::string error;  ///< not empty: the node cannot settle now; nothing else counts
  bool known = false;
  std::uint64_t reserved = 0;  ///< hits, as estimated
  bool lapsed = false;         ///< some window's time was over: there nothing was counted
  bool degraded = false;       ///< counted, but not durable as a rule promises
};

using HttpHeader = std::pair<std::string, std::string>;

/// The headers that tell a client of its quota. docs/http.md says what each means.
///  RateLimit-Policy  every enforcing rule: "name";q=quota;w=seconds, the deciding one first
///  RateLimit         the deciding rule: "name";r=remaining;t=seconds
///  X-RateLimit-*     the deciding rule
///  X-RateLimit-Delay-Ms  when the request passed but has to wait, in milliseconds rounded up
///  Retry-After       on a denial that can pass later, in whole seconds rounded up
/// None if no enforcing rule matched or if there is an error. A length of time that is `never` is
/// not told at all. Policies beyond kMaxPolicyBytes are left out, whole.
std::vector<HttpHeader> rate_limit_headers(const HttpAnswer& answer, ResetFormat reset);

inline constexpr std::size_t kMaxPolicyBytes = 2048;

/// An RFC 9651 String: quoted, with '"' and '\' escaped. It holds printable ASCII only, so every
/// other byte, and '%', is written as %xx; names longer than 256 bytes are cut.
std::string structured_string(std::string_view text);

/// An RFC 9651 Integer: at most 15 digits; larger values become 999999999999999.
std::string structured_integer(std::uint64_t value);

/// Rounded up; negative lengths are 0.
std::uint64_t seconds_rounded_up(Nanos length);
std::uint64_t milliseconds_rounded_up(Nanos length);

/// True if a Content-Type names application/json, with or without parameters.
bool is_json_content_type(std::string_view value);

}  // namespace weir::node
