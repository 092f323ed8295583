#include <weir/limits/reply.h>

#include <algorithm>
#include <array>
#include <utility>

namespace weir {
namespace {

constexpr std::array<std::pair<ErrorKind, std::string_view>, 10> kNames = {{
    {ErrorKind::none, "none"},
    {ErrorKind::invalid, "invalid"},
    {ErrorKind::unavailable, "unavailable"},
    {ErrorKind::overloaded, "overloaded"},
    {ErrorKind::deadline, "deadline"},
    {ErrorKind::unknown, "unknown"},
    {ErrorKind::closed, "closed"},
    {ErrorKind::unsupported, "unsupported"},
    {ErrorKind::unauthenticated, "unauthenticated"},
    {ErrorKind::forbidden, "forbidden"},
}};

}  // namespace

std::string_view to_string(ErrorKind kind) {
  const auto at = static_cast<std::size_t>(kind);
  return at < kNames.size() ? kNames[at].second : "unknown";
}

ErrorKind error_kind_of(std::string_view name) {
  for (const auto& [kind, known] : kNames) {
    if (known == name) return kind;
  }
  return ErrorKind::unknown;
}

std::string Error::to_string() const {
  if (empty()) return {};
  std::string out(weir::to_string(kind));
  if (!detail.empty()) out.append(": ").append(detail);
  return out;
}

Nanos Reply::delay() const {
  Nanos longest = 0;
  for (const Status& status : statuses) {
    if (allowed && !status.shadow) longest = std::max(longest, status.delay);
  }
  return longest;
}

void Reply::clear() {
  error.kind = ErrorKind::none;
  error.detail.clear();
  allowed = repeated = false;
  deciding = -1;
  statuses.clear();
  given_back = 0;
}

void Reply::fail(ErrorKind kind, std::string_view detail) {
  clear();
  error.kind = kind;
  error.detail = detail;
}

void tell(const Decision& decision, const RuleSet& rules, Reply& out) {
  out.error.kind = ErrorKind::none;
  out.error.detail.clear();
  out.allowed = decision.allowed;
  out.repeated = decision.repeated;
  out.deciding = decision.deciding;
  out.given_back = 0;
  // Assigned one by one: texts keep their memory.
  out.statuses.resize(decision.statuses.size());
  for (std::size_t i = 0; i < decision.statuses.size(); ++i) {
    const RuleStatus& from = decision.statuses[i];
    const Rule& rule = rules.rules()[from.rule];
    Status& to = out.statuses[i];
    to.rule = rule.name;
    to.descriptor = from.descriptor;
    to.limit = from.limit;
    to.remaining = from.remaining;
    to.reset = from.reset;
    to.retry_after = from.retry_after;
    to.allowed = from.allowed;
    to.shadow = from.shadow;
    to.degraded = from.degraded;
    to.delay = from.delay;
    to.exhausted_locally = from.exhausted_locally;
    // Who brought the numbers knows them.
    to.quota = rule.limit_from_request ? 0 : rule.limit;
    to.window = rule.calendar || rule.limit_from_request ? 0 : rule.window;
    to.over_admission.reset();
    to.hidden = rule.hide_headers;
    to.deny_status = rule.deny_status;
    to.deny_message.clear();
    if (!from.allowed) to.deny_message = rule.deny_message;
  }
}

}  // namespace weir
