#include <weir/rpc/client/retry_after.h>

#include <algorithm>
#include <array>
#include <charconv>

namespace weir {
namespace {

constexpr std::array<std::string_view, 12> kMonths = {"Jan", "Feb", "Mar", "Apr", "May", "Jun",
                                                      "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"};

/// Reads a date piece by piece; after a piece that is not there nothing fits any more.
class Pieces {
 public:
  explicit Pieces(std::string_view text) : left_(text) {}

  std::int64_t number(std::size_t digits) {
    std::int64_t out = 0;
    for (std::size_t i = 0; i < digits; ++i) {
      if (i >= left_.size() || left_[i] < '0' || left_[i] > '9') return fail();
      out = out * 10 + (left_[i] - '0');
    }
    left_.remove_prefix(digits);
    return out;
  }
  /// asctime() pads a day below 10 with a blank.
  std::int64_t padded_day() {
    if (!left_.starts_with(' ')) return number(2);
    left_.remove_prefix(1);
    return number(1);
  }
  std::int64_t month() {
    for (std::size_t i = 0; i < kMonths.size(); ++i) {
      if (!left_.starts_with(kMonths[i])) continue;
      left_.remove_prefix(3);
      return static_cast<std::int64_t>(i) + 1;
    }
    return fail();
  }
  void text(std::string_view wanted) {
    if (!left_.starts_with(wanted)) {
      fail();
      return;
    }
    left_.remove_prefix(wanted.size());
  }
  bool done() const { return ok_ && left_.empty(); }

 private:
  std::int64_t fail() {
    ok_ = false;
    left_ = {};
    return 0;
  }
  std::string_view left_;
  bool ok_ = true;
};

struct Date {
  std::int64_t year = 0, month = 0, day = 0, hour = 0, minute = 0, second = 0;
};

/// Days since 1970-01-01 (Howard Hinnant, "chrono-Compatible Low-Level Date Algorithms").
std::int64_t days_from_civil(std::int64_t y, std::int64_t m, std::int64_t d) {
  y -= m <= 2;
  std::int64_t era = y / 400;
  std::int64_t yoe = y - era * 400;
  std::int64_t doy = (153 * (m + (m > 2 ? -3 : 9)) + 2) / 5 + d - 1;
  std::int64_t doe = yoe * 365 + yoe / 4 - yoe / 100 + doy;
  return era * 146097 + doe - 719468;
}

void read_clock(Pieces& in, Date& out) {
  out.hour = in.number(2);
  in.text(":");
  out.minute = in.number(2);
  in.text(":");
  out.second = in.number(2);
}

/// "Sun, 06 Nov 1994 08:49:37 GMT"
bool read_imf(std::string_view text, Date& out) {
  if (text.size() < 5) return false;
  Pieces in(text.substr(3));
  in.text(", ");
  out.day = in.number(2);
  in.text(" ");
  out.month = in.month();
  in.text(" ");
  out.year = in.number(4);
  in.text(" ");
  read_clock(in, out);
  in.text(" GMT");
  return in.done();
}

/// "Sunday, 06-Nov-94 08:49:37 GMT". A year that seems more than 50 years ahead is of the last
/// century (RFC 9110, 5.6.7).
bool read_rfc850(std::string_view text, Nanos now, Date& out) {
  auto comma = text.find(", ");
  if (comma == std::string_view::npos) return false;
  Pieces in(text.substr(comma));
  in.text(", ");
  out.day = in.number(2);
  in.text("-");
  out.month = in.month();
  in.text("-");
  out.year = in.number(2);
  in.text(" ");
  read_clock(in, out);
  in.text(" GMT");
  std::int64_t this_year = 1970 + now / (kDay * 365 + kDay / 4);
  out.year += this_year / 100 * 100;
  if (out.year > this_year + 50) out.year -= 100;
  return in.done();
}

/// "Sun Nov  6 08:49:37 1994"
bool read_asctime(std::string_view text, Date& out) {
  if (text.size() < 4) return false;
  Pieces in(text.substr(3));
  in.text(" ");
  out.month = in.month();
  in.text(" ");
  out.day = in.padded_day();
  in.text(" ");
  read_clock(in, out);
  in.text(" ");
  out.year = in.number(4);
  return in.done();
}

bool is_date(const Date& date) {
  constexpr std::array<std::int64_t, 12> kDays = {31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31};
  return date.year >= 1900 && date.month >= 1 && date.day >= 1 &&
         date.day <= kDays[static_cast<std::size_t>(date.month - 1)] && date.hour < 24 &&
         date.minute < 60 && date.second <= 60;
}

}  // namespace

std::optional<Nanos> parse_retry_after(std::string_view value, Nanos now) {
  while (!value.empty() && (value.front() == ' ' || value.front() == '\t')) value.remove_prefix(1);
  while (!value.empty() && (value.back() == ' ' || value.back() == '\t')) value.remove_suffix(1);
  if (value.empty()) return std::nullopt;
  if (std::all_of(value.begin(), value.end(), [](char c) { return c >= '0' && c <= '9'; })) {
    std::uint64_t seconds = 0;
    auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), seconds);
    constexpr std::uint64_t kMost = kMaxTime / kSecond;
    if (error != std::errc() || seconds > kMost) seconds = kMost;
    return static_cast<Nanos>(seconds) * kSecond;
  }
  Date date;
  if (!read_imf(value, date) && !read_rfc850(value, now, date) && !read_asctime(value, date)) {
    return std::nullopt;
  }
  if (!is_date(date)) return std::nullopt;
  std::int64_t seconds = days_from_civil(date.year, date.month, date.day) * 86400 +
                         date.hour * 3600 + date.minute * 60 + date.second;
  seconds = std::min<std::int64_t>(seconds, kMaxTime / kSecond);
  return std::max<Nanos>(0, seconds * kSecond - now);
}

}  // namespace weir
