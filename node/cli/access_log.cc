#include <weir/node/cli/access_log.h>

#include <algorithm>
#include <chrono>

namespace weir {
namespace {

constexpr std::size_t kMaxLine = 64u << 10;
constexpr std::size_t kMaxMethod = 32;
constexpr std::size_t kTimeLength = 26;  // 17/May/2015:10:05:03 +0000

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

/// RFC 9110, 5.6.2: what a method may consist of.
bool is_token_char(char c) {
  return is_digit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
         std::string_view("!#$%&'*+-.^_`|~").find(c) != std::string_view::npos;
}

/// The rest of a line, eaten from the left.
class Cursor {
 public:
  explicit Cursor(std::string_view rest) : rest_(rest) {}

  bool at_end() const { return rest_.empty(); }

  bool eat(char c) {
    if (rest_.empty() || rest_.front() != c) return false;
    rest_.remove_prefix(1);
    return true;
  }

  /// Up to the next space, which is eaten too. Not empty.
  bool word(std::string_view& out) {
    const std::size_t end = rest_.find(' ');
    if (end == 0 || end == std::string_view::npos) return false;
    take(end, out);
    return eat(' ');
  }

  bool fixed(std::size_t length, std::string_view& out) {
    if (rest_.size() < length) return false;
    take(length, out);
    return true;
  }

  /// "…", where a backslash makes the next byte part of the text.
  bool quoted(std::string_view& out) {
    if (!eat('"')) return false;
    for (std::size_t i = 0; i < rest_.size(); ++i) {
      if (rest_[i] == '\\') {
        ++i;
      } else if (rest_[i] == '"') {
        take(i, out);
        return eat('"');
      }
    }
    return false;
  }

 private:
  void take(std::size_t length, std::string_view& out) {
    out = rest_.substr(0, length);
    rest_.remove_prefix(length);
  }

  std::string_view rest_;
};

bool number(std::string_view digits, int& out) {
  out = 0;
  for (const char c : digits) {
    if (!is_digit(c)) return false;
    out = out * 10 + (c - '0');
  }
  return true;
}

bool parse_time(std::string_view text, Nanos& out) {
  constexpr std::array<std::string_view, 12> kMonths = {"Jan", "Feb", "Mar", "Apr", "May", "Jun",
                                                        "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"};
  const auto month = std::find(kMonths.begin(), kMonths.end(), text.substr(3, 3));
  int day = 0;
  int year = 0;
  int hour = 0;
  int minute = 0;
  int second = 0;
  int zone_hours = 0;
  int zone_minutes = 0;
  const char sign = text[21];
  if (text[2] != '/' || text[6] != '/' || text[11] != ':' || text[14] != ':' || text[17] != ':' ||
      text[20] != ' ' || (sign != '+' && sign != '-') || month == kMonths.end() ||
      !number(text.substr(0, 2), day) || !number(text.substr(7, 4), year) ||
      !number(text.substr(12, 2), hour) || !number(text.substr(15, 2), minute) ||
      !number(text.substr(18, 2), second) || !number(text.substr(22, 2), zone_hours) ||
      !number(text.substr(24, 2), zone_minutes)) {
    return false;
  }
  const std::chrono::year_month_day date{
      std::chrono::year(year),
      std::chrono::month(static_cast<unsigned>(month - kMonths.begin()) + 1),
      std::chrono::day(static_cast<unsigned>(day))};
  // Second 60 is a leap second; it counts as the next second.
  if (!date.ok() || hour > 23 || minute > 59 || second > 60 || zone_hours > 14 ||
      zone_minutes > 59) {
    return false;
  }
  const Nanos days = std::chrono::sys_days(date).time_since_epoch().count();
  const Nanos zone = zone_hours * 3600 + zone_minutes * 60;
  const Nanos seconds =
      days * 86400 + hour * 3600 + minute * 60 + second - (sign == '+' ? zone : -zone);
  if (seconds < 0 || seconds >= kMaxTime / kSecond) return false;
  out = seconds * kSecond;
  return true;
}

std::string_view path_of(std::string_view target) {
  target = target.substr(0, target.find('?'));
  const std::size_t scheme = target.find("://");
  if (scheme == std::string_view::npos || scheme == 0 || target.front() == '/') return target;
  const std::size_t path = target.find('/', scheme + 3);
  return path == std::string_view::npos ? std::string_view("/") : target.substr(path);
}

bool parse_request(std::string_view text, LogRecord& out) {
  const std::size_t first = text.find(' ');
  if (first == std::string_view::npos || first == 0 || first > kMaxMethod) return false;
  const std::string_view method = text.substr(0, first);
  if (!std::all_of(method.begin(), method.end(), is_token_char)) return false;

  std::string_view target = text.substr(first + 1);
  const std::size_t last = target.rfind(' ');
  if (last != std::string_view::npos) {
    // More than two words: only a protocol at the end tells where the path ends.
    if (!target.substr(last + 1).starts_with("HTTP/")) return false;
    target = target.substr(0, last);
  } else if (target.starts_with("HTTP/")) {
    return false;
  }
  out.method = method;
  out.path = path_of(target);
  return !out.path.empty() && out.path.front() != ' ';
}

bool is_count(std::string_view text) {
  return text == "-" ||
         (!text.empty() && text.size() <= 20 && std::all_of(text.begin(), text.end(), is_digit));
}

std::string_view unless_dash(std::string_view text) {
  return text == "-" ? std::string_view() : text;
}

}  // namespace

std::size_t LogRecord::descriptor(std::array<Entry, 6>& out) const {
  std::size_t count = 0;
  out[count++] = {"ip", ip};
  if (!user.empty()) out[count++] = {"user", user};
  out[count++] = {"method", method};
  out[count++] = {"path", path};
  out[count++] = {"status", status};
  if (!user_agent.empty()) out[count++] = {"user_agent", user_agent};
  return count;
}

bool parse_log_line(std::string_view line, LogRecord& out, std::string& error) {
  const auto fail = [&](const char* what) {
    error = what;
    return false;
  };
  if (line.size() > kMaxLine) return fail("line: longer than 64 KiB");
  if (line.ends_with('\r')) line.remove_suffix(1);
  if (line.find('\n') != std::string_view::npos) return fail("line: holds an end of line");

  Cursor rest(line);
  LogRecord record;
  std::string_view field;
  if (!rest.word(record.ip) || record.ip == "-") return fail("ip: expected an address");
  if (!rest.word(field)) return fail("ident: expected a word or -");
  if (!rest.word(record.user)) return fail("user: expected a word or -");
  // Apache writes an empty user as "".
  record.user = record.user == "\"\"" ? std::string_view() : unless_dash(record.user);
  if (!rest.eat('[') || !rest.fixed(kTimeLength, field) || !rest.eat(']') || !rest.eat(' ') ||
      !parse_time(field, record.time)) {
    return fail("time: expected [day/Mon/year:hour:minute:second +zone], 1970 to 2199");
  }
  if (!rest.quoted(field) || !rest.eat(' ') || !parse_request(field, record)) {
    return fail("request: expected \"METHOD path HTTP/version\"");
  }
  if (!rest.word(record.status) || record.status.size() != 3 ||
      !std::all_of(record.status.begin(), record.status.end(), is_digit)) {
    return fail("status: expected three digits");
  }
  if (!rest.word(field) || !is_count(field)) return fail("bytes: expected a number or -");
  if (!rest.quoted(field) || !rest.eat(' ')) return fail("referer: expected a quoted text");
  if (!rest.quoted(record.user_agent)) return fail("user_agent: expected a quoted text");
  if (!rest.at_end()) return fail("line: expected its end after the user agent");
  record.user_agent = unless_dash(record.user_agent);
  out = record;
  return true;
}

}  // namespace weir
