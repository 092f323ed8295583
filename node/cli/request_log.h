#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <istream>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include <weir/crdt/time.h>
#include <weir/limits/request.h>
#include <weir/limits/rules/rule.h>

namespace weir::node {

/// A line that holds no request.
struct MalformedLine {
  std::uint64_t line = 0;  ///< from 1
  std::string reason;
  friend bool operator==(const MalformedLine&, const MalformedLine&) = default;
};

/// The requests of a Combined-format access log, kept small: 32 bytes a request, and each different
/// value once. Of a request's descriptor only what some rule looks at is kept, and the ip.
class RequestLog {
 public:
  static constexpr std::array<std::string_view, 6> kKeys = {"ip",   "user",   "method",
                                                            "path", "status", "user_agent"};

  struct Record {
    Nanos time = 0;
    std::array<std::uint32_t, kKeys.size()> values{};  ///< by kKeys, for value(); 0: absent
  };

  /// Keeps what `rules` match, are keyed by or cost by.
  explicit RequestLog(std::span<const Rule> rules);

  /// Reads to the end of `in` and sorts: by time, lines of one instant in their order. Lines that
  /// are no requests are counted and passed over. Returns false and why if reading fails. Called
  /// once. `progress` is given the number of lines so far, now and then.
  bool read(std::istream& in, std::string& error,
            const std::function<void(std::uint64_t lines)>& progress = {});

  const std::vector<Record>& records() const { return records_; }
  std::uint64_t malformed() const { return malformed_; }
  /// The first kMaxListed of them.
  const std::vector<MalformedLine>& malformed_lines() const { return malformed_lines_; }
  static constexpr std::size_t kMaxListed = 1000;

  std::string_view value(std::uint32_t id) const { return values_[id]; }
  /// Writes the record's entries to `out` and returns how many.
  std::size_t descriptor(const Record& record, std::array<Entry, kKeys.size()>& out) const;

 private:
  void add_line(std::string_view line);
  std::uint32_t intern(std::string_view value);

  std::array<bool, kKeys.size()> wanted_{};
  std::vector<Record> records_;
  std::uint64_t lines_ = 0;
  std::uint64_t malformed_ = 0;
  std::vector<MalformedLine> malformed_lines_;
  std::deque<std::string> values_;  // a deque: views into its strings stay valid
  std::unordered_map<std::string_view, std::uint32_t> ids_;
};

}  // namespace weir::node
