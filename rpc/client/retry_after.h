#pragma once

#include <optional>
#include <string_view>

#include <weir/crdt/time.h>

namespace weir {

/// The value of a Retry-After header (RFC 9110, 10.2.3): seconds, or an HTTP date in any of its
/// three forms, from which `now` (since the Unix epoch) is taken; a date that is past is 0. Empty
/// if it is neither. Seconds beyond kMaxTime are cut to it.
std::optional<Nanos> parse_retry_after(std::string_view value, Nanos now);

}  // namespace weir
