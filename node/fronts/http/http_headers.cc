#include <weir/node/fronts/http/http_headers.h>

#include <algorithm>
#include <array>
#include <cstddef>

#include <weir/limits/matching/text.h>

namespace weir::node {
namespace {

constexpr std::uint64_t kMaxInteger = 999'999'999'999'999;
constexpr std::size_t kMaxNameBytes = 256;
constexpr std::string_view kBlanks = " \t";

char lower(char c) {
  return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
}

bool same_but_for_case(std::string_view any, std::string_view lower_case) {
  return std::equal(any.begin(), any.end(), lower_case.begin(), lower_case.end(),
                    [](char a, char b) { return lower(a) == b; });
}

std::uint64_t rounded_up(Nanos length, Nanos unit) {
  if (length <= 0) return 0;
  return static_cast<std::uint64_t>(length / unit) + (length % unit != 0 ? 1 : 0);
}

void append_field(rpc::Output& out, std::string_view name_and_colon, std::uint64_t value) {
  out.append(name_and_colon);
  out.append_decimal(value);
  out.append("\r\n");
}

void append_policy(rpc::Output& out, const Status& status) {
  append_structured_string(out, status.rule);
  out.append(";q=");
  append_structured_integer(out, status.quota);
  if (status.window > 0) {
    out.append(";w=");
    append_structured_integer(out, seconds_rounded_up(status.window));
  }
}

// The status that headers are about: the one that decided. If that is hidden, of a request that
// passed the one that would have decided otherwise; null: none.
const Status* shown(const Reply& reply) {
  const Status* decider = reply.decider();
  if (decider == nullptr || !decider->hidden) return decider;
  if (!reply.allowed) return nullptr;
  const Status* least = nullptr;
  for (const Status& status : reply.statuses) {
    if (status.hidden || status.shadow) continue;
    if (least == nullptr || status.remaining < least->remaining) least = &status;
  }
  return least;
}

// Several descriptors may meet one rule, which is one policy.
void append_policies(rpc::Output& out, const Reply& reply, const Status& decider) {
  std::array<const Status*, kMaxPolicyBytes / 8> listed;  // an item takes more than 8 bytes
  std::size_t count = 0;
  out.append("RateLimit-Policy: ");
  const std::size_t begin = out.size();
  append_policy(out, decider);
  listed[count++] = &decider;
  for (const Status& status : reply.statuses) {
    if (status.shadow || status.hidden || count == listed.size()) continue;
    if (std::any_of(listed.begin(), listed.begin() + count, [&](const Status* other) {
          return internal::same_text(other->rule, status.rule);
        })) {
      continue;
    }
    const std::size_t before = out.size();
    out.push_back(',');
    append_policy(out, status);
    if (out.size() - begin > kMaxPolicyBytes) {
      out.truncate(before);
      break;
    }
    listed[count++] = &status;
  }
  out.append("\r\n");
}

// Until more becomes available: for a denied request that is until it would pass.
Nanos wait_of(const Reply& reply, const Status& decider) {
  return reply.allowed ? decider.reset : decider.retry_after;
}

void append_rate_limit(rpc::Output& out, const Reply& reply, const Status& decider) {
  out.append("RateLimit: ");
  append_structured_string(out, decider.rule);
  out.append(";r=");
  append_structured_integer(out, decider.remaining);
  const Nanos wait = wait_of(reply, decider);
  if (wait != kNever) {
    out.append(";t=");
    append_structured_integer(out, seconds_rounded_up(wait));
  }
  out.append("\r\n");
}

// When to come again, or when to go on.
void append_waits(rpc::Output& out, const Reply& reply, const Status& decider) {
  if (!reply.allowed && decider.retry_after != kNever) {
    append_field(out, "Retry-After: ", seconds_rounded_up(decider.retry_after));
  }
  if (const Nanos delay = reply.delay(); delay > 0) {
    append_field(out, "X-RateLimit-Delay-Ms: ", milliseconds_rounded_up(delay));
  }
}

// The parts of a Prefer header.
class Words {
 public:
  explicit Words(std::string_view text) : left_(text) {}

  bool done() const { return left_.empty(); }
  void skip_blanks() {
    left_.remove_prefix(std::min(left_.find_first_not_of(kBlanks), left_.size()));
  }
  bool take(char c) {
    if (left_.empty() || left_.front() != c) return false;
    left_.remove_prefix(1);
    return true;
  }
  // A token; empty if there is none.
  std::string_view token() {
    const std::string_view found = left_.substr(0, left_.find_first_of(" \t,;=\""));
    left_.remove_prefix(found.size());
    return found;
  }
  // A token or a quoted string, its quotes and escapes left out of sight: a value with an escape is
  // none that anybody asks for. False if it has no end.
  bool word(std::string_view& out) {
    if (!take('"')) {
      out = token();
      return true;
    }
    for (std::size_t i = 0; i < left_.size(); ++i) {
      if (left_[i] == '\\') {
        ++i;
      } else if (left_[i] == '"') {
        out = left_.substr(0, i);
        left_.remove_prefix(i + 1);
        return true;
      }
    }
    return false;
  }
  // name [= [word]]
  bool pair(std::string_view& name, std::string_view& value) {
    name = token();
    value = {};
    skip_blanks();
    if (name.empty()) return false;
    if (!take('=')) return true;
    skip_blanks();
    const bool good = word(value);
    skip_blanks();
    return good;
  }

 private:
  std::string_view left_;
};

}  // namespace

std::uint64_t seconds_rounded_up(Nanos length) {
  return rounded_up(length, kSecond);
}

std::uint64_t milliseconds_rounded_up(Nanos length) {
  return rounded_up(length, kMillisecond);
}

void append_structured_integer(rpc::Output& out, std::uint64_t value) {
  out.append_decimal(std::min(value, kMaxInteger));
}

void append_structured_string(rpc::Output& out, std::string_view text) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  out.push_back('"');
  for (char c : text.substr(0, kMaxNameBytes)) {
    if (c == '"' || c == '\\') {
      out.push_back('\\');
      out.push_back(c);
    } else if (c < ' ' || c > '~' || c == '%') {
      const auto byte = static_cast<unsigned char>(c);
      const char escaped[] = {'%', kDigits[byte >> 4], kDigits[byte & 15u]};
      out.append({escaped, sizeof escaped});
    } else {
      out.push_back(c);
    }
  }
  out.push_back('"');
}

void append_rate_limit_headers(rpc::Output& out, const Reply& reply, ResetFormat reset, Nanos now) {
  if (!reply.error.empty()) {
    if (reply.error.kind == ErrorKind::overloaded) append_field(out, "Retry-After: ", 1);
    if (reply.error.kind == ErrorKind::unauthenticated) out.append(kChallenge);
    return;
  }
  if (reply.decider() == nullptr) return;
  const Status* decider = shown(reply);
  if (decider == nullptr) return append_waits(out, reply, *reply.decider());
  append_policies(out, reply, *decider);
  append_rate_limit(out, reply, *decider);
  append_field(out, "X-RateLimit-Limit: ", decider->limit);
  append_field(out, "X-RateLimit-Remaining: ", decider->remaining);
  const Nanos wait = wait_of(reply, *decider);
  if (wait != kNever) {
    const Nanos length = std::max<Nanos>(wait, 0);
    const Nanos from = std::clamp<Nanos>(now, 0, kMaxTime);
    // Rounded up as a sum: the second in which the instant lies may begin before it.
    const Nanos instant = length > kNever - from ? kNever : from + length;
    append_field(out, "X-RateLimit-Reset: ",
                 seconds_rounded_up(reset == ResetFormat::epoch ? instant : length));
  }
  append_waits(out, reply, *reply.decider());
}

void append_minimal_headers(rpc::Output& out, const Reply& reply) {
  if (const Status* decider = reply.decider()) {
    if (const Status* visible = shown(reply)) append_rate_limit(out, reply, *visible);
    append_waits(out, reply, *decider);
  }
  out.append("Preference-Applied: return=minimal\r\n");
}

bool wants_minimal(std::string_view prefer) {
  Words words(prefer);
  while (!words.done()) {
    words.skip_blanks();
    if (words.take(',')) continue;  // an empty element
    if (words.done()) return false;
    std::string_view name;
    std::string_view value;
    if (!words.pair(name, value)) return false;
    const bool found = same_but_for_case(name, "return");
    const bool minimal = found && value == "minimal";
    while (words.take(';')) {
      words.skip_blanks();
      std::string_view parameter;
      if (!words.pair(parameter, value) && !parameter.empty()) return false;
    }
    if (!words.done() && !words.take(',')) return false;
    if (found) return minimal;
  }
  return false;
}

bool is_json_content_type(std::string_view value) {
  value = value.substr(0, value.find(';'));
  while (!value.empty() && kBlanks.find(value.back()) != kBlanks.npos) value.remove_suffix(1);
  while (!value.empty() && kBlanks.find(value.front()) != kBlanks.npos) value.remove_prefix(1);
  return same_but_for_case(value, "application/json");
}

}  // namespace weir::node
