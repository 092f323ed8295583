#include <weir/limits/fallback.h>

#include <algorithm>
#include <limits>
#include <stdexcept>

namespace weir {
namespace {

constexpr Nanos kLongest = 366 * kDay;

Nanos window_length(const Rule& rule) {
  if (!rule.calendar) return rule.window;
  switch (rule.calendar->unit) {
    case CalendarUnit::day:
      return kDay;
    case CalendarUnit::week:
      return 7 * kDay;
    case CalendarUnit::month:
      return 30 * kDay;
    case CalendarUnit::year:
      return 365 * kDay;
  }
  return kDay;
}

/// units / parts * 1.2, rounded down.
std::uint64_t share_of(std::uint64_t units, std::uint64_t parts) {
  Uint128 share = static_cast<Uint128>(units) * 6 / (5 * static_cast<Uint128>(parts));
  return static_cast<std::uint64_t>(
      std::min<Uint128>(share, std::numeric_limits<std::uint64_t>::max() / 2));
}

}  // namespace

Rule Fallback::local_rule(const Rule& rule, unsigned parts) {
  parts = std::max(parts, 1u);
  Rule local = rule;
  local.calendar.reset();
  local.window = window_length(rule);
  if (!is_bucket(rule.algorithm)) local.algorithm = Algorithm::token_bucket;
  local.slots = 1;
  local.strict = false;
  local.max_debt = 0;
  local.phase = Phase::aligned;
  local.count_denied = false;
  local.candidate.reset();
  local.enforcement = Enforcement::merged;
  local.durability = Durability::async;
  if (rule.limit == 0) {
    local.burst = 0;
    return local;
  }
  const std::uint64_t burst = is_bucket(rule.algorithm) ? rule.burst : rule.limit;
  local.burst = std::max<std::uint64_t>(share_of(burst, parts), 1);
  // The rate without rounding where it can be written so: limit * 6 in window * 5 * parts. Of
  // limits that come with requests decide() takes a part, and the window is theirs.
  const Nanos stretch = 5 * static_cast<Nanos>(parts);
  if (!rule.limit_from_request && local.window <= kLongest / stretch &&
      rule.limit <= std::numeric_limits<std::uint64_t>::max() / 6) {
    local.window *= stretch;
    local.limit = rule.limit * 6;
  } else {
    local.limit = std::max<std::uint64_t>(share_of(rule.limit, parts), 1);
  }
  // A bucket must be full again within the longest window.
  Uint128 least = (static_cast<Uint128>(local.burst) * static_cast<std::uint64_t>(local.window) +
                   static_cast<std::uint64_t>(kLongest) - 1) /
                  static_cast<std::uint64_t>(kLongest);
  local.limit = std::max(local.limit, static_cast<std::uint64_t>(least));
  return local;
}

Fallback::Fallback(std::shared_ptr<const RuleSet> rules, FallbackOptions options)
    : rules_(std::move(rules)), options_(std::move(options)) {
  std::vector<Rule> local;
  for (const Rule& rule : rules_->rules()) local.push_back(local_rule(rule, options_.parts));
  std::vector<RuleError> errors;
  std::shared_ptr<const RuleSet> set = RuleSet::make(std::move(local), errors);
  if (set == nullptr) throw std::logic_error("fallback: " + errors.front().to_string());
  LimiterOptions limiter;
  limiter.max_series = std::max<std::size_t>(options_.max_series, 1);
  limiter.max_request_ids = std::min<std::size_t>(options_.max_series, 4096);
  buckets_ = std::make_unique<Limiter>(std::move(set), limiter);
}

bool Fallback::allowlisted(const Request& request) const {
  return std::any_of(options_.allowlist.begin(), options_.allowlist.end(), [&](const auto& entry) {
    const std::string_view* value = request.find(entry.first);
    return value != nullptr && *value == entry.second;
  });
}

Fallback::Answer Fallback::decide(const Request& request, Nanos now) {
  Answer answer;
  answer.allowlisted = allowlisted(request);
  if (answer.allowlisted) {
    answer.allowed = true;
    return answer;
  }
  std::vector<std::uint32_t> matched;
  rules_->match(request, matched);
  answer.closed = std::any_of(matched.begin(), matched.end(), [this](std::uint32_t index) {
    const Rule& rule = rules_->rules()[index];
    return !rule.shadow && rule.on_failure == OnFailure::closed;
  });
  if (answer.closed) return answer;
  Request local = request;
  if (request.limit.limit > 0) {
    local.limit.limit = std::max<std::uint64_t>(share_of(request.limit.limit, options_.parts), 1);
  }
  if (request.limit.burst > 0) {
    local.limit.burst = std::max<std::uint64_t>(share_of(request.limit.burst, options_.parts), 1);
  }
  buckets_->check(local, now, answer.decision);
  answer.allowed = answer.decision.allowed;
  for (RuleStatus& status : answer.decision.statuses) status.degraded = true;
  return answer;
}

}  // namespace weir
