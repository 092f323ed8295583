#pragma once

#include <string>
#include <string_view>

#include <weir/crdt/time.h>

namespace weir {

inline constexpr Nanos kMaxDuration = 366 * kDay;  ///< that parse_duration reads

/// "500ms", "10s", "1m", "1h", "1d" (also "us" and "ns"), or a sum such as "1h30m" with each unit
/// at most once, larger ones first; a positive length of at most kMaxDuration. False if `text` is
/// anything else.
bool parse_duration(std::string_view text, Nanos& out);

/// Largest units first, empty ones left out: 90 s is "1m30s". parse_duration reads it back if the
/// length is in its range.
std::string format_duration(Nanos duration);

}  // namespace weir
