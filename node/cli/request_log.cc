#include <weir/node/cli/request_log.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include <weir/node/cli/access_log.h>

namespace weir::node {
namespace {

constexpr std::size_t kChunk = 256u << 10;
constexpr std::size_t kLongLine = (64u << 10) + 1;  // more of a line tells the parser nothing new
constexpr std::uint64_t kProgressLines = 1u << 16;

}  // namespace

RequestLog::RequestLog(std::span<const Rule> rules) : values_(1) {
  auto want = [&](std::string_view key) {
    auto at = std::find(kKeys.begin(), kKeys.end(), key);
    if (at != kKeys.end()) wanted_[static_cast<std::size_t>(at - kKeys.begin())] = true;
  };
  want("ip");
  for (const Rule& rule : rules) {
    for (const Match& match : rule.match) want(match.key);
    for (const std::string& key : rule.key) want(key);
    if (!rule.cost_by_method.empty()) want("method");
    for (const EntryCost& entry : rule.cost_by_entry) want(entry.key);
  }
}

bool RequestLog::read(std::istream& in, std::string& error,
                      const std::function<void(std::uint64_t)>& progress) {
  std::vector<char> chunk(kChunk);
  std::string pending;  // a line's beginning
  bool unfinished = false;
  errno = 0;
  while (in) {
    in.read(chunk.data(), static_cast<std::streamsize>(chunk.size()));
    std::string_view rest(chunk.data(), static_cast<std::size_t>(in.gcount()));
    while (!rest.empty()) {
      const std::size_t end = rest.find('\n');
      const std::string_view part = rest.substr(0, end);
      if (end == std::string_view::npos || unfinished) {
        pending.append(part.substr(0, kLongLine - std::min(kLongLine, pending.size())));
        unfinished = true;
      }
      if (end == std::string_view::npos) break;
      add_line(unfinished ? std::string_view(pending) : part);
      pending.clear();
      unfinished = false;
      rest.remove_prefix(end + 1);
      if (progress && lines_ % kProgressLines == 0) progress(lines_);
    }
  }
  if (in.bad()) {
    error = errno != 0 ? std::strerror(errno) : "read error";
    return false;
  }
  if (unfinished) add_line(pending);
  ids_ = {};
  auto earlier = [](const Record& a, const Record& b) { return a.time < b.time; };
  if (!std::is_sorted(records_.begin(), records_.end(), earlier)) {
    std::stable_sort(records_.begin(), records_.end(), earlier);
  }
  return true;
}

void RequestLog::add_line(std::string_view line) {
  ++lines_;
  LogRecord parsed;
  std::string reason;
  if (!parse_log_line(line, parsed, reason)) {
    ++malformed_;
    if (malformed_lines_.size() < kMaxListed) malformed_lines_.push_back({lines_, reason});
    return;
  }
  std::array<Entry, kKeys.size()> entries;
  const std::size_t count = parsed.descriptor(entries);
  Record record;
  record.time = parsed.time;
  for (std::size_t i = 0, key = 0; i < count; ++i, ++key) {
    // Entries come in the order of kKeys; some may be missing.
    while (kKeys[key] != entries[i].key) ++key;
    if (wanted_[key]) record.values[key] = intern(entries[i].value);
  }
  records_.push_back(record);
}

std::uint32_t RequestLog::intern(std::string_view value) {
  auto at = ids_.find(value);
  if (at != ids_.end()) return at->second;
  const auto id = static_cast<std::uint32_t>(values_.size());
  values_.emplace_back(value);
  ids_.emplace(values_.back(), id);
  return id;
}

std::size_t RequestLog::descriptor(const Record& record,
                                   std::array<Entry, kKeys.size()>& out) const {
  std::size_t count = 0;
  for (std::size_t key = 0; key < kKeys.size(); ++key) {
    if (record.values[key] != 0) out[count++] = {kKeys[key], values_[record.values[key]]};
  }
  return count;
}

}  // namespace weir::node
