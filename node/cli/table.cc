#include <weir/node/cli/table.h>

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include <weir/limits/text/duration.h>
#include <weir/limits/text/utf8.h>

namespace weir::node {
namespace {

// Characters, not bytes: continuation bytes take no room.
std::size_t width(std::string_view text) {
  return static_cast<std::size_t>(std::count_if(text.begin(), text.end(), [](char c) {
    return (static_cast<unsigned char>(c) & 0xC0) != 0x80;
  }));
}

}  // namespace

std::string with_commas(std::uint64_t number) {
  std::string out = std::to_string(number);
  for (std::size_t at = out.size(); at > 3;) {
    at -= 3;
    out.insert(at, 1, ',');
  }
  return out;
}

std::string short_duration(Nanos duration) {
  if (duration == kNever) return "never";
  if (duration <= 0) return "0s";
  // Three digits say enough; never less than the truth.
  Nanos grain = 1;
  for (const Nanos unit :
       {kMicrosecond, kMillisecond, 10 * kMillisecond, 100 * kMillisecond, kSecond, kMinute}) {
    if (duration > unit * 100) grain = unit;
  }
  if (duration > kNever - grain) return format_duration(duration);
  const Nanos rounded = (duration / grain + (duration % grain != 0 ? 1 : 0)) * grain;
  if (rounded < kMinute && rounded >= kSecond) {
    return fmt::format("{:g}s", static_cast<double>(rounded) / static_cast<double>(kSecond));
  }
  return format_duration(rounded);
}

void Table::add(std::vector<std::string> row) {
  row.resize(columns_.size());
  for (std::string& cell : row) cell = internal::printable(cell);
  rows_.push_back(std::move(row));
}

std::string Table::text(std::size_t indent) const {
  std::vector<std::size_t> widths(columns_.size());
  for (const auto& row : rows_) {
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], width(row[i]));
  }
  std::string out;
  for (const auto& row : rows_) {
    std::string line(indent, ' ');
    for (std::size_t i = 0; i < row.size(); ++i) {
      if (i > 0) line += "  ";
      const std::string padding(widths[i] - width(row[i]), ' ');
      line += columns_[i] == Align::right ? padding + row[i] : row[i] + padding;
    }
    line.erase(line.find_last_not_of(' ') + 1);
    out += line + '\n';
  }
  return out;
}

}  // namespace weir::node
