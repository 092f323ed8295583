#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include <weir/crdt/time.h>
#include <weir/limits/reply.h>
#include <weir/limits/request.h>
#include <weir/rpc/check.h>
#include <weir/rpc/net/output.h>

namespace weir::node {

/// Why a body was refused.
struct BodyError {
  std::string field;     ///< "checks[3].descriptor[1].value"; empty for the body as a whole
  std::string expected;  ///< what should stand there
};

/// What a settlement says. Views are valid until the reader is used again.
struct SettleBody {
  std::string_view ticket;
  std::uint64_t hits = 0;
};

inline constexpr std::size_t kMaxChecks = 256;  ///< in one body
inline constexpr std::uint64_t kMaxHits = 1ull << 53;
inline constexpr std::uint64_t kMaxWindowMs = 366ull * 24 * 3'600'000;  ///< kMaxDuration
inline constexpr std::uint64_t kMaxTimeoutMs = 24ull * 3'600'000;  ///< a day: Limiter::kMaxHold

/// Reads the bodies of requests; docs/http.md says what they may hold. Strict: unknown and repeated
/// names are refused, and so is everything outside the bounds above, those of rpc/check.h and
/// kMaxDescriptors. Text has to be UTF-8.
///
/// A reader gathers the requests of several bodies, which may then be decided in one call:
///   reader.clear();
///   for (body : bodies) if (!reader.check(body)) refuse(reader.error());
///   service.check(reader.requests(), …);
/// It keeps its memory, up to some megabytes: bodies like those before allocate nothing. Not
/// thread-safe. Out of memory throws std::bad_alloc; the reader is then good for clear() only.
class BodyReader {
 public:
  BodyReader();
  ~BodyReader();
  BodyReader(BodyReader&&) noexcept;
  BodyReader& operator=(BodyReader&&) noexcept;

  /// The body of POST /v1/check: adds one request. False, with the first mistake in error(), if it
  /// is refused: then it adds nothing. So do the next two.
  bool check(std::string_view body);
  /// The body of POST /v1/checks: adds 1 to kMaxChecks requests.
  bool checks(std::string_view body);
  /// The body of POST /v1/reserve: adds one request, of one descriptor, and sets timeout().
  bool reserve(std::string_view body);
  /// The body of POST /v1/settle. Adds no request.
  bool settle(std::string_view body, SettleBody& out);

  /// How many there are since clear().
  std::size_t size() const;
  /// All of them, in order. Valid until the reader is used again.
  std::span<const Request> requests();
  /// Of the last reservation: from 0 to a day, a minute if it does not say.
  Nanos timeout() const;
  /// Of the last body that was refused.
  const BodyError& error() const;
  void clear();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// The status that answers: 200, or what the rule that decided says of a denial, which is 429
/// unless it says another one; 400 for what is invalid, 401 and 403 for who may not, 501 for what
/// is unsupported, 503 for other errors.
unsigned http_status(const Reply& reply);
/// The same; 404 if there is no such ticket.
unsigned http_status(const SettleReply& reply);
unsigned http_status(ErrorKind kind);

/// application/json below 400, else application/problem+json.
std::string_view content_type(unsigned status);

// Bodies of answers, each appended with a line feed at its end. Lengths of time are in
// milliseconds, rounded up, and null for never. What is not UTF-8 is replaced.

/// The body for http_status(reply): a decision, for a denial as a problem document (RFC 9457) with
/// the same members; or an error's problem document.
void append_answer(rpc::Output& out, const Reply& reply);
/// Of a 200: {"results": [...]}, each as append_answer tells it, an error as {"error": "<kind>",
/// "detail": "..."}.
void append_answers(rpc::Output& out, std::span<const Reply> replies);
/// As append_answer, with the ticket; null if nothing is held.
void append_reserved(rpc::Output& out, const ReserveReply& reply);
/// The body for http_status(reply).
void append_settled(rpc::Output& out, const SettleReply& reply);

/// A problem document; `field` is left out if empty, `error` if it is none.
void append_problem(rpc::Output& out, unsigned status, std::string_view title,
                    std::string_view detail, std::string_view field = {},
                    ErrorKind error = ErrorKind::none);
/// Of a 400.
void append_problem(rpc::Output& out, const BodyError& error);

/// `text` as a JSON string, quoted. Every byte that is not part of UTF-8 becomes U+FFFD.
void append_json_string(rpc::Output& out, std::string_view text);

}  // namespace weir::node
