#include <weir/limits/fallback.h>

#include <gtest/gtest.h>

#include <weir/limits/test_util.h>

namespace weir {
namespace {

using test::set;

constexpr Nanos kStart = 400'000 * kHour;

Rule rule(std::string name, std::uint64_t limit, OnFailure on_failure = OnFailure::open) {
  Rule out = test::rule(std::move(name), limit);
  out.on_failure = on_failure;
  return out;
}

struct Ask {
  std::vector<Entry> entries;
  Request request;
  explicit Ask(std::string_view key, std::uint64_t hits = 1) : entries{{"key", key}} {
    request.domain = "api";
    request.descriptor = entries;
    request.hits = hits;
  }
};

std::uint64_t passes(Fallback& fallback, std::string_view key, Nanos now) {
  std::uint64_t passed = 0;
  while (fallback.decide(Ask(key).request, now).allowed) ++passed;
  return passed;
}

TEST(Fallback, AnOpenRuleHasItsShareOfTheLimitAndAFifthMore) {
  Fallback fallback(set({rule("r", 1000)}), {4});
  EXPECT_EQ(passes(fallback, "a", kStart), 300u);  // 1000 / 4 * 1.2
  EXPECT_EQ(passes(fallback, "b", kStart), 300u);
  // 300 a minute: one each 200 ms, to the nanosecond.
  EXPECT_EQ(passes(fallback, "a", kStart + 200 * kMillisecond - 1), 0u);
  EXPECT_EQ(passes(fallback, "a", kStart + 200 * kMillisecond), 1u);
  EXPECT_EQ(passes(fallback, "a", kStart + 10 * kMinute), 300u);
  Fallback::Answer denied = fallback.decide(Ask("a").request, kStart + 10 * kMinute);
  EXPECT_FALSE(denied.closed);
  ASSERT_NE(denied.decision.decider(), nullptr);
  EXPECT_TRUE(denied.decision.decider()->degraded);
  EXPECT_EQ(denied.decision.decider()->retry_after, 200 * kMillisecond);
}

TEST(Fallback, AClosedRuleDeniesAndNothingIsConsumed) {
  Rule closed = rule("closed", 1000, OnFailure::closed);
  closed.match = {{"key", MatchExact{"secret"}}};
  Fallback fallback(set({rule("open", 10), closed}), {1});
  Fallback::Answer answer = fallback.decide(Ask("secret").request, kStart);
  EXPECT_FALSE(answer.allowed);
  EXPECT_TRUE(answer.closed);
  EXPECT_TRUE(answer.decision.statuses.empty());
  EXPECT_EQ(passes(fallback, "other", kStart), 12u);
  closed.shadow = true;
  Fallback shadowed(set({rule("open", 10), closed}), {1});
  EXPECT_EQ(passes(shadowed, "secret", kStart), 12u);
}

TEST(Fallback, AnAllowlistedRequestPassesAlways) {
  Fallback fallback(set({rule("closed", 0, OnFailure::closed)}), {1, {{"key", "probe"}}});
  EXPECT_TRUE(fallback.decide(Ask("probe").request, kStart).allowed);
  EXPECT_TRUE(fallback.decide(Ask("probe").request, kStart).allowlisted);
  EXPECT_FALSE(fallback.decide(Ask("prob").request, kStart).allowed);
}

TEST(Fallback, ASmallLimitLeavesAtLeastOneUnit) {
  Fallback fallback(set({rule("r", 1)}), {10});
  EXPECT_EQ(passes(fallback, "a", kStart), 1u);
  EXPECT_EQ(passes(fallback, "a", kStart + kMinute), 0u);  // 0.12 a minute
  EXPECT_EQ(passes(fallback, "a", kStart + 9 * kMinute), 1u);
  Fallback none(set({rule("r", 0)}), {10});
  EXPECT_EQ(passes(none, "a", kStart), 0u);
}

TEST(Fallback, EveryRuleThatIsValidHasALocalForm) {
  Rule year = rule("year", 1);
  year.window = 366 * kDay;
  Rule many = rule("many", ~std::uint64_t{0});
  Rule month = rule("month", 50);
  month.calendar = CalendarWindow{CalendarUnit::month, "UTC", nullptr};
  Rule leaky = rule("leaky", 1);
  leaky.algorithm = Algorithm::leaky_bucket;
  leaky.window = kDay;
  leaky.burst = 300;
  Rule log = rule("log", 5);
  log.algorithm = Algorithm::sliding_log;
  Fallback fallback(set({year, many, month, leaky, log}), {1000});
  EXPECT_EQ(passes(fallback, "a", kStart), 1u);
  EXPECT_EQ(Fallback::local_rule(leaky, 1).algorithm, Algorithm::leaky_bucket);
}

}  // namespace
}  // namespace weir
