// Fuzz target (scripts/fuzz): arbitrary lines as an access log.
#include <array>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include <weir/node/cli/access_log.h>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  std::string_view text(reinterpret_cast<const char*>(data), size);
  while (!text.empty()) {
    const std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(text.size(), line.size() + 1));
    weir::LogRecord record;
    std::string error;
    if (!weir::parse_log_line(line, record, error)) {
      if (error.empty()) std::abort();
      continue;
    }
    // What was read are parts of the line.
    for (const std::string_view part : {record.ip, record.method, record.path, record.status}) {
      if (part.empty() || part == "/") continue;  // an absolute URL may have no path
      if (part.data() < line.data() || part.data() + part.size() > line.data() + line.size()) {
        std::abort();
      }
    }
    std::array<weir::Entry, 6> entries;
    if (record.descriptor(entries) > entries.size()) std::abort();
  }
  return 0;
}
