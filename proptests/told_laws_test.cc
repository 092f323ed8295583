#include <weir/limits/limiter.h>
#include <weir/node/fronts/http/http_headers.h>
#include <weir/node/fronts/http/http_json.h>

#include <algorithm>

#include "generators.h"
#include "law.h"

namespace weir::laws {
namespace {

std::string headers_of(const Reply& reply, bool minimal) {
  rpc::Output out;
  if (minimal) {
    node::append_minimal_headers(out, reply);
  } else {
    node::append_rate_limit_headers(out, reply, node::ResetFormat::seconds, kStart);
  }
  return std::string(out.view());
}

std::vector<Rule> draw_rules() {
  std::vector<Rule> rules;
  for (int i = *between(1, 4); i > 0; --i) {
    Rule rule;
    rule.domain = "api";
    rule.name = "rule-" + std::to_string(i);
    rule.limit = *between<std::uint64_t>(0, 9);
    rule.window = static_cast<Nanos>(i) * kMinute;
    rule.shadow = *chance(20);
    rule.hide_headers = *chance(50);
    rule.deny_status = *one_of<std::uint16_t>({429, 503, 403});
    if (*chance(50)) rule.deny_message = "message of " + rule.name;
    rules.push_back(std::move(rule));
  }
  return rules;
}

/// With other names and numbers of hidden rules.
Reply with_others_hidden(const Reply& reply) {
  Reply changed = reply;
  for (Status& status : changed.statuses) {
    if (!status.hidden) continue;
    status.rule += "-other";
    status.limit += 100;
    status.quota += 100;
    status.window += kHour;
    status.reset += kHour;
    status.remaining += 100;
  }
  return changed;
}

void check_denial(const std::vector<Rule>& rules, const Reply& reply, const std::string& headers) {
  const Status& decider = *reply.decider();
  const bool waits = decider.retry_after != kNever;
  RC_ASSERT((headers.find("Retry-After: ") != std::string::npos) == waits);
  if (decider.hidden) RC_ASSERT(headers.find("RateLimit") == std::string::npos);
  reached("only what waits", decider.hidden && waits);
  const Rule& rule = *std::find_if(rules.begin(), rules.end(),
                                   [&](const Rule& each) { return each.name == decider.rule; });
  RC_ASSERT(node::http_status(reply) == rule.deny_status);
  rpc::Output out;
  node::append_answer(out, reply);
  const std::string body(out.view());
  const std::string status = "\"status\":" + std::to_string(rule.deny_status) + ",";
  RC_ASSERT(body.find(status) != std::string::npos);
  const std::string detail = "\"detail\":\"" + rule.deny_message;
  RC_ASSERT(body.find(detail) != std::string::npos);
  reached("a status of its own", rule.deny_status != 429);
  reached("a message of its own", !rule.deny_message.empty());
}

LAW(64,
    "what a rule hides no header says, whatever else is told; a denial has the status and the "
    "message of the rule that decided",
    "passed, and a hidden rule has the least", "passed, and all are hidden",
    "denied by a hidden one", "denied beside a hidden one", "a status of its own",
    "a message of its own", "only what waits") {
  const std::vector<Rule> rules = draw_rules();
  const auto set = rule_set(rules);
  Limiter limiter(set, {});
  Reply reply;
  Decision decision;
  const std::uint64_t hits = *between<std::uint64_t>(0, 2);
  for (int i = *between(1, 6); i > 0; --i) limiter.check({"api", {}, hits}, kStart, decision);
  tell(decision, *set, reply);
  const bool minimal = *chance(30);
  const std::string text = headers_of(reply, minimal);
  RC_ASSERT(headers_of(with_others_hidden(reply), minimal) == text);

  const Status* decider = reply.decider();
  const bool hidden = decider != nullptr && decider->hidden;
  bool all_hidden = decider != nullptr;
  for (const Status& status : reply.statuses) {
    RC_ASSERT(!status.hidden || text.find(status.rule) == std::string::npos);
    // What is not hidden is told all the same.
    const bool told = !status.hidden && !status.shadow && !minimal && (reply.allowed || !hidden);
    if (told) RC_ASSERT(text.find(status.rule) != std::string::npos);
    all_hidden = all_hidden && (status.hidden || status.shadow);
    reached("denied beside a hidden one", !reply.allowed && !hidden && status.hidden);
  }
  reached("passed, and a hidden rule has the least", reply.allowed && hidden && !all_hidden);
  reached("passed, and all are hidden", reply.allowed && hidden && all_hidden);
  reached("denied by a hidden one", !reply.allowed && hidden);
  if (reply.allowed) {
    RC_ASSERT(node::http_status(reply) == 200u);
  } else {
    check_denial(rules, reply, text);
  }
}

}  // namespace
}  // namespace weir::laws
