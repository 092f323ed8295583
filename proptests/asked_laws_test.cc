#include <weir/limits/limiter.h>

#include <map>
#include <memory>
#include <optional>

#include "generators.h"
#include "law.h"

namespace weir::laws {
namespace {

struct Asked {
  Rule most;  // the rule, whose numbers are the most that a request may bring
  std::vector<RequestLimit> pool;
};

Asked draw_asked() {
  Asked out;
  Rule& rule = out.most;
  rule.domain = "api";
  rule.name = "r";
  rule.key = {"key"};
  rule.limit_from_request = true;
  rule.algorithm = *one_of<Algorithm>({Algorithm::fixed_window, Algorithm::sliding_window,
                                       Algorithm::token_bucket, Algorithm::leaky_bucket});
  rule.limit = *one_of<std::uint64_t>({20, 5, 1000});
  rule.window = *one_of<Nanos>({kMinute, kHour});
  if (is_bucket(rule.algorithm)) rule.burst = *one_of<std::uint64_t>({10, 0, 3});
  rule.strict = rule.algorithm == Algorithm::sliding_window && *chance(30);
  rule.default_cost = *one_of<std::uint64_t>({1, 1, 3});
  if (*chance(20)) rule.late = is_bucket(rule.algorithm) ? Late::charge : Late::drop;
  for (int i = *between(1, 4); i > 0; --i) {
    out.pool.push_back({*one_of<std::uint64_t>({7, 0, 2, 15, 10'000}),
                        *one_of<Nanos>({kMinute, 0, kSecond, 30 * kSecond, 2 * kHour, 1}),
                        is_bucket(rule.algorithm) ? *one_of<std::uint64_t>({0, 4, 1, 500}) : 0});
  }
  return out;
}

/// The rule that docs/rules.md says such a request is decided by.
Rule plain(const Rule& most, const RequestLimit& asked) {
  Rule rule = most;
  rule.limit_from_request = false;
  if (asked.limit > 0) rule.limit = std::min(asked.limit, most.limit);
  if (asked.window > 0) {
    rule.window = std::min(std::max(asked.window, kMillisecond), most.window);
  }
  if (is_bucket(most.algorithm)) {
    const std::uint64_t most_burst = most.burst == 0 ? most.limit : most.burst;
    const std::uint64_t burst = asked.burst > 0   ? asked.burst
                                : asked.limit > 0 ? rule.limit
                                                  : most_burst;
    rule.burst = std::min(burst, most_burst);
  }
  return rule;
}

/// A limiter whose rule takes its limits from requests, and for each length of window one whose
/// rule is changed before each request.
struct Beside {
  const Asked asked = draw_asked();
  LimiterOptions options;
  std::unique_ptr<Limiter> limiter;
  std::map<Nanos, std::unique_ptr<Limiter>> models;  // by the window's length
  std::map<Nanos, std::uint64_t> limits;
  std::optional<Nanos> last;
  Nanos now = kStart;
  struct Held {
    Ticket ticket;
    Ticket model_ticket;
    Limiter* model;
    Rule rule;
  };
  std::vector<Held> held;

  Beside() {
    options.replicated = *chance(30);
    if (options.replicated) options.incarnation = {1, 1};
    limiter = std::make_unique<Limiter>(rule_set({asked.most}), options);
    reached("replicated", options.replicated);
    reached("a bucket", is_bucket(asked.most.algorithm));
  }

  Limiter& model_of(const Rule& rule) {
    std::unique_ptr<Limiter>& model = models[rule.window];
    reached("back to a window", model != nullptr && last && *last != rule.window);
    reached("another window than before", last && *last != rule.window);
    if (model == nullptr) model = std::make_unique<Limiter>(rule_set({rule}), options);
    model->reload(rule_set({rule}));
    reached("another limit than before",
            limits.contains(rule.window) && limits[rule.window] != rule.limit);
    limits[rule.window] = rule.limit;
    last = rule.window;
    return *model;
  }

  void ask(const Request& request, const Request& without, Limiter& model, const Rule& rule,
           Decision& one, Decision& two) {
    switch (*choice(5)) {
      case 0: {
        const Ticket ticket = limiter->reserve(request, now, kHour, one);
        const Ticket model_ticket = model.reserve(without, now, kHour, two);
        RC_ASSERT(static_cast<bool>(ticket) == static_cast<bool>(model_ticket));
        if (ticket) held.push_back({ticket, model_ticket, &model, rule});
        reached("reserved", static_cast<bool>(ticket));
        return;
      }
      case 1: {
        // Beside one with other numbers, whose rule is in use at the same time.
        Request other = request;
        const Entry others[] = {{"key", "c"}};
        other.descriptor = others;
        other.limit = {1, kSecond, 1};
        const Request batch[] = {other, request, other};
        Decision answers[3];
        limiter->check(batch, now, answers);
        one = answers[1];
        model.check(without, now, two);
        reached("several requests of one batch");
        return;
      }
      default:
        limiter->check(request, now, one);
        model.check(without, now, two);
    }
  }

  void settle() {
    const Held settled = held.back();
    held.pop_back();
    const std::uint64_t actual = *between<std::uint64_t>(0, 4);
    settled.model->reload(rule_set({settled.rule}));
    const Settled one = limiter->settle(settled.ticket, actual, now);
    const Settled two = settled.model->settle(settled.model_ticket, actual, now);
    RC_ASSERT(one.known == two.known);
    RC_ASSERT(one.lapsed == two.lapsed);
  }
};

LAW(62,
    "limits that come with requests are those of a rule that changes with each request, and each "
    "window's length has counts of its own",
    "nothing asked", "more than the most", "another limit than before",
    "another window than before", "back to a window", "denied", "reserved",
    "a shorter time than a millisecond", "a bucket", "several requests of one batch",
    "replicated") {
  Beside beside;
  const Rule& most = beside.asked.most;
  for (int step = *between(1, 30); step > 0; --step) {
    beside.now += *rc::gen::weightedOneOf<Nanos>({{5, between<Nanos>(0, 5 * kSecond)},
                                                  {2, between<Nanos>(0, most.window)},
                                                  {1, one_of<Nanos>({0, kMinute})}});
    const std::string key = *one_of<std::string>({"a", "b"});
    const Entry entries[] = {{"key", key}};
    const Request without{"api", entries, *between<std::uint64_t>(0, 3)};
    Request request = without;
    request.limit = *one_of(beside.asked.pool);
    const Rule rule = plain(most, request.limit);
    Limiter& model = beside.model_of(rule);
    reached("nothing asked", !request.limit.any());
    reached("more than the most", request.limit.limit > most.limit);
    reached("a shorter time than a millisecond", request.limit.window == 1);
    Decision one;
    Decision two;
    beside.ask(request, without, model, rule, one, two);
    RC_ASSERT(one.allowed == two.allowed);
    RC_ASSERT(one.statuses.size() == 1u);
    RC_ASSERT(one.statuses[0].limit == two.statuses[0].limit);
    RC_ASSERT(one.statuses[0].remaining == two.statuses[0].remaining);
    RC_ASSERT(one.statuses[0].reset == two.statuses[0].reset);
    RC_ASSERT(one.statuses[0].retry_after == two.statuses[0].retry_after);
    RC_ASSERT(one.statuses[0].delay == two.statuses[0].delay);
    RC_ASSERT(beside.limiter->used(0, request, beside.now) == model.used(0, without, beside.now));
    reached("denied", !one.allowed);
    if (!beside.held.empty() && *chance(30)) beside.settle();
    if (*chance(10)) beside.limiter->sweep(beside.now - kSecond);
  }
}

}  // namespace
}  // namespace weir::laws
