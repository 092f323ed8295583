#pragma once

#include <array>
#include <cstddef>
#include <string>
#include <string_view>

#include <weir/crdt/time.h>
#include <weir/limits/request.h>

namespace weir {

/// One request of an access log in Combined format (Apache, nginx):
///   ip ident user [17/May/2015:10:05:03 +0000] "GET /path HTTP/1.1" 200 203023 "referer" "agent"
/// Views point into the parsed line.
struct LogRecord {
  Nanos time = 0;
  std::string_view ip;    ///< or a host name, as the server wrote it
  std::string_view user;  ///< empty if "-"
  std::string_view method;
  std::string_view path;  ///< without the query string; of an absolute URL only its path
  std::string_view status;
  std::string_view user_agent;  ///< empty if "-"; escapes are left as they stand

  /// The descriptor entries ip, user, method, path, status and user_agent; an empty user or
  /// user_agent is left out. Returns how many were written to `out`.
  std::size_t descriptor(std::array<Entry, 6>& out) const;
};

/// Reads one line, without its end of line (a CR left at the end is ignored). The request line may
/// lack its protocol, as in HTTP/0.9, and hold spaces in the path if it has one. On failure says
/// which field was wrong in `error` and leaves `out` alone. Lines longer than 64 KiB are refused,
/// and so are times outside 1970 to 2199.
bool parse_log_line(std::string_view line, LogRecord& out, std::string& error);

}  // namespace weir
