#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <weir/crdt/time.h>

namespace weir::node {

/// "1,234,567".
std::string with_commas(std::uint64_t number);

/// A length of time for a person: rounded up to a unit that fits, "250ms", "1.5s", "12m"; "never"
/// for kNever.
std::string short_duration(Nanos duration);

/// Text in columns. The first row is the heading.
class Table {
 public:
  enum class Align : std::uint8_t { left, right };

  explicit Table(std::vector<Align> columns) : columns_(std::move(columns)) {}
  /// Cells beyond the number of columns are dropped, missing ones are empty. Made printable.
  void add(std::vector<std::string> row);
  bool has_rows() const { return rows_.size() > 1; }
  /// One line a row, two spaces between columns, `indent` spaces in front, none at the end.
  std::string text(std::size_t indent = 0) const;

 private:
  std::vector<Align> columns_;
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace weir::node
