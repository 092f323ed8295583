#pragma once

#include <cstdint>
#include <string_view>

#include <weir/crdt/time.h>
#include <weir/limits/reply.h>
#include <weir/node/config.h>
#include <weir/rpc/net/output.h>

namespace weir::node {

/// The header line that an answer of 401 must have.
inline constexpr std::string_view kChallenge = "WWW-Authenticate: Bearer\r\n";

/// Appends the headers that tell a client of its quota, as lines with CR LF. docs/http.md says what
/// each means. `now` is the Unix time of the answer.
///  RateLimit-Policy  every enforcing rule: "name";q=quota;w=seconds, the deciding one first, each
///                    name once
///  RateLimit         the deciding status: "name";r=remaining;t=seconds
///  X-RateLimit-*     the deciding status
///  X-RateLimit-Delay-Ms  when the request passed but has to wait, in milliseconds rounded up
///  Retry-After       on a denial that can pass later, in whole seconds rounded up
/// Of a hidden rule (Status::hidden) nothing is said but Retry-After and the delay: where one
/// decided that a request passes, the rest is about the one with the least remaining that is not
/// hidden, and where one denied it there is no more. None if no enforcing rule matched. If there is
/// an error, `Retry-After: 1` where it says overloaded, else none. A length of time that is `never`
/// is not told at all. Policies beyond kMaxPolicyBytes are left out, whole.
void append_rate_limit_headers(rpc::Output& out, const Reply& reply, ResetFormat reset, Nanos now);

/// What is left of them in an answer without a body: RateLimit, Retry-After, X-RateLimit-Delay-Ms,
/// and Preference-Applied. Not for errors, which are told in full.
void append_minimal_headers(rpc::Output& out, const Reply& reply);

/// True if a Prefer header (RFC 7240) asks for `return=minimal`. If it has several preferences of
/// that name the first counts; what is no such header asks for nothing.
bool wants_minimal(std::string_view prefer);

inline constexpr std::size_t kMaxPolicyBytes = 2048;

/// An RFC 9651 String: quoted, with '"' and '\' escaped. It holds printable ASCII only, so every
/// other byte, and '%', is written as %xx; names longer than 256 bytes are cut.
void append_structured_string(rpc::Output& out, std::string_view text);

/// An RFC 9651 Integer: at most 15 digits; larger values become 999999999999999.
void append_structured_integer(rpc::Output& out, std::uint64_t value);

/// Rounded up; negative lengths are 0.
std::uint64_t seconds_rounded_up(Nanos length);
std::uint64_t milliseconds_rounded_up(Nanos length);

/// True if a Content-Type names application/json, with or without parameters.
bool is_json_content_type(std::string_view value);

}  // namespace weir::node
