#include <weir/node/fronts/http/http_headers.h>

#include <algorithm>
#include <cstddef>

#include <fmt/format.h>

namespace weir::node {
namespace {

constexpr std::uint64_t kMaxInteger = 999'999'999'999'999;
constexpr std::size_t kMaxNameBytes = 256;

std::string policy(const HttpStatus& status) {
  std::string out = structured_string(status.rule) + ";q=" + structured_integer(status.quota);
  if (status.window > 0) out += ";w=" + structured_integer(seconds_rounded_up(status.window));
  return out;
}

char lower(char c) {
  return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
}

std::uint64_t rounded_up(Nanos length, Nanos unit) {
  if (length <= 0) return 0;
  return static_cast<std::uint64_t>(length / unit) + (length % unit != 0 ? 1 : 0);
}

}  // namespace

const HttpStatus* HttpAnswer::decider() const {
  if (deciding < 0 || static_cast<std::size_t>(deciding) >= statuses.size()) return nullptr;
  return &statuses[static_cast<std::size_t>(deciding)];
}

Nanos HttpAnswer::delay() const {
  Nanos longest = 0;
  for (const HttpStatus& status : statuses) {
    if (allowed && !status.shadow) longest = std::max(longest, status.delay);
  }
  return longest;
}

std::uint64_t seconds_rounded_up(Nanos length) {
  return rounded_up(length, kSecond);
}

std::uint64_t milliseconds_rounded_up(Nanos length) {
  return rounded_up(length, kMillisecond);
}

std::string structured_integer(std::uint64_t value) {
  return fmt::format("{}", std::min(value, kMaxInteger));
}

std::string structured_string(std::string_view text) {
  std::string out = "\"";
  for (char c : text.substr(0, kMaxNameBytes)) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (c < ' ' || c > '~' || c == '%') {
      out += fmt::format("%{:02x}", static_cast<unsigned char>(c));
    } else {
      out += c;
    }
  }
  return out + '"';
}

std::vector<HttpHeader> rate_limit_headers(const HttpAnswer& answer, ResetFormat reset) {
  std::vector<HttpHeader> out;
  const HttpStatus* decider = answer.decider();
  if (!answer.error.empty() || decider == nullptr) return out;

  std::string policies = policy(*decider);
  for (const HttpStatus& status : answer.statuses) {
    if (&status == decider || status.shadow) continue;
    const std::string item = "," + policy(status);
    if (policies.size() + item.size() > kMaxPolicyBytes) break;
    policies += item;
  }
  out.emplace_back("RateLimit-Policy", policies);

  // Until more becomes available: for a denied request that is until it would pass.
  const Nanos wait = answer.allowed ? decider->reset : decider->retry_after;
  const bool known = wait != kNever;
  std::string item =
      structured_string(decider->rule) + ";r=" + structured_integer(decider->remaining);
  if (known) item += ";t=" + structured_integer(seconds_rounded_up(wait));
  out.emplace_back("RateLimit", item);

  out.emplace_back("X-RateLimit-Limit", fmt::format("{}", decider->limit));
  out.emplace_back("X-RateLimit-Remaining", fmt::format("{}", decider->remaining));
  if (known) {
    const Nanos length = std::max<Nanos>(wait, 0);
    const Nanos now = std::clamp<Nanos>(answer.now, 0, kMaxTime);
    // Rounded up as a sum: the second in which the instant lies may begin before it.
    const Nanos instant = length > kNever - now ? kNever : now + length;
    out.emplace_back(
        "X-RateLimit-Reset",
        fmt::format("{}", seconds_rounded_up(reset == ResetFormat::epoch ? instant : length)));
    if (!answer.allowed)
      out.emplace_back("Retry-After", fmt::format("{}", seconds_rounded_up(wait)));
  }
  if (answer.delay() > 0) {
    out.emplace_back("X-RateLimit-Delay-Ms",
                     fmt::format("{}", milliseconds_rounded_up(answer.delay())));
  }
  return out;
}

bool is_json_content_type(std::string_view value) {
  constexpr std::string_view kJson = "application/json";
  value = value.substr(0, value.find(';'));
  while (!value.empty() && (value.back() == ' ' || value.back() == '\t')) value.remove_suffix(1);
  while (!value.empty() && (value.front() == ' ' || value.front() == '\t')) value.remove_prefix(1);
  return std::equal(value.begin(), value.end(), kJson.begin(), kJson.end(),
                    [](char a, char b) { return lower(a) == b; });
}

}  // namespace weir::node
