#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weir/limits/request.h>
#include <weir/node/fronts/http/http_headers.h>

namespace weir::node {

/// The body of POST /v1/check or /v1/reserve, checked.
struct CheckBody {
  std::string domain;
  std::vector<std::pair<std::string, std::string>> descriptor;
  std::uint64_t hits = 1;
  std::string request_id;       ///< empty: none
  bool over_admission = false;  ///< the answer should tell HttpStatus::over_admission
  Nanos timeout = kMinute;      ///< of a reservation
};

/// The body of POST /v1/settle, checked.
struct SettleBody {
  std::string ticket;
  std::uint64_t hits = 0;
};

/// Why a body was refused.
struct BodyError {
  std::string field;     ///< "descriptor[3].value"; empty for the body as a whole
  std::string expected;  ///< what should stand there
};

inline constexpr std::size_t kMaxEntries = 64;
inline constexpr std::size_t kMaxEntryText = 4096;  ///< bytes of one key or one value
inline constexpr std::size_t kMaxDomainText = 256;
inline constexpr std::uint64_t kMaxHits = 1ull << 53;
inline constexpr std::size_t kMaxRequestId = 128;              ///< bytes
inline constexpr std::size_t kMaxTicket = 128;                 ///< bytes
inline constexpr std::uint64_t kMaxTimeoutMs = 24 * 3600'000;  ///< a day: Limiter::kMaxHold

/// Reads {"domain": "api", "descriptor": {"key": "value"} or [{"key": …, "value": …}], "hits": 1,
/// "request_id": "…"}. Only `domain` is required. Unknown and repeated names are refused, and so is
/// everything outside the bounds above. False with the first mistake in `error`.
bool parse_check(std::string_view body, CheckBody& out, BodyError& error);
/// The same with "timeout_ms" beside it.
bool parse_reserve(std::string_view body, CheckBody& out, BodyError& error);
/// Reads {"ticket": "…", "hits": 17}, both required.
bool parse_settle(std::string_view body, SettleBody& out, BodyError& error);

/// An RFC 9457 problem document; `field` is left out if empty. Never throws: what is not UTF-8 is
/// replaced.
std::string problem_json(unsigned status, std::string_view title, std::string_view detail,
                         std::string_view field = {});

/// The body of a 200 or, for a denial, of a 429 (a problem document with the same members).
/// Lengths of time are in milliseconds, rounded up, and null for never.
std::string answer_json(const HttpAnswer& answer);
std::string settled_json(const HttpSettled& settled);

}  // namespace weir::node
