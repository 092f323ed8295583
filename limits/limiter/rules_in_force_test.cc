#include <weir/limits/limiter/rules_in_force.h>

#include <gtest/gtest.h>
#include <weir/limits/test_util.h>

#include <optional>
#include <string>
#include <vector>

namespace weir {
namespace {

using test::rule;
using test::set;

Rule escrow(std::string name, std::uint64_t limit) {
  Rule made = rule(std::move(name), limit);
  made.enforcement = Enforcement::escrow;
  return made;
}

/// Rules, and one series that has a number, if any.
struct Under {
  RulesInForce rules;
  std::optional<std::uint32_t> series = std::nullopt;
  int visits = 0;

  explicit Under(std::vector<Rule> first, bool replicated = false)
      : rules(set(std::move(first)), HashKey{}, replicated) {}
  RulesInForce::VisitSeries visit() {
    return [this](NumbersInUse* in_use) {
      ++visits;
      if (in_use != nullptr && series) in_use->note(*series);
    };
  }
  void reload(std::vector<Rule> fresh) {
    rules.reload(rules.prepare(set(std::move(fresh))), visit());
  }
  /// Under the newest rules.
  void count(std::uint32_t rule) {
    RulesInForce::Use program = rules.use(0);
    program->counters[0][rule].allowed.fetch_add(1);
  }
  /// So that no thread keeps an earlier program, and it is freed.
  void move_on() {
    RulesInForce::Use newest = rules.use(0);
    rules.reclaim(visit());
    rules.reclaim(visit());
  }
  std::uint32_t number(std::uint32_t rule) { return rules.use(0)->compiled_rules[rule].number; }
};

TEST(RulesInForce, EachReloadIsAVersionAndTheNewestEightAreKept) {
  Under under({rule("r", 1)});
  EXPECT_EQ(under.rules.use(0)->version, 1u);
  for (std::uint64_t limit = 2; limit <= 10; ++limit) under.reload({rule("r", limit)});
  EXPECT_EQ(under.rules.use(0)->version, 10u);
  EXPECT_EQ(under.rules.rules()->rules()[0].limit, 10u);
  EXPECT_EQ(under.rules.rules(0), nullptr);
  EXPECT_EQ(under.rules.rules(2), nullptr);
  EXPECT_EQ(under.rules.rules(11), nullptr);
  for (std::uint64_t version = 3; version <= 10; ++version) {
    ASSERT_NE(under.rules.rules(version), nullptr) << version;
    EXPECT_EQ(under.rules.rules(version)->rules()[0].limit, version);
  }
}

TEST(RulesInForce, WhatIsInUseStaysAndKeptIsWhatTheThreadSawLast) {
  Under under({rule("r", 1)});
  EXPECT_EQ(under.rules.kept(0), nullptr);
  {
    RulesInForce::Use before = under.rules.use(0);
    EXPECT_EQ(under.rules.kept(0), &*before);
    under.reload({rule("r", 2)});
    under.rules.reclaim(under.visit());
    EXPECT_EQ(under.rules.kept(0), nullptr);
    EXPECT_EQ(before->rules->rules()[0].limit, 1u);
  }
  EXPECT_EQ(under.rules.use(0)->rules->rules()[0].limit, 2u);
  EXPECT_EQ(under.rules.kept(kStripes - 1), nullptr);  // a stripe that threads share keeps nothing
}

TEST(RulesInForce, AnIdentityIsOfTheRuleAndTheKeyAndNotOfTheLimit) {
  Under under({rule("a", 1), rule("b", 1)});
  SeriesId a = under.rules.identity(0);
  EXPECT_EQ(a, under.rules.identity_of(rule("a", 7)));
  EXPECT_NE(a, under.rules.identity(1));
  EXPECT_EQ(under.rules.identity(2), SeriesId{});
  HashKey other{};
  other[0] = 1;
  EXPECT_NE(a, RulesInForce(set({rule("a", 1)}), other, false).identity(0));
}

TEST(RulesInForce, CountersGoOnThroughReloadsAlsoOfFreedPrograms) {
  Under under({rule("a", 1), rule("b", 1)});
  under.count(0);
  under.count(1);
  under.reload({rule("b", 2)});
  EXPECT_EQ(under.rules.counters(0).allowed, 1u);
  under.count(0);
  under.move_on();
  EXPECT_EQ(under.rules.counters(0).allowed, 2u);
  EXPECT_EQ(under.rules.counters(1).allowed, 0u);
}

TEST(RulesInForce, ARuleThatIsGoneIsForgottenOnceNoSeriesHasItsNumber) {
  Under under({rule("a", 1), rule("b", 1)});
  under.count(0);
  under.series = under.number(0);
  under.reload({rule("b", 1)});
  under.move_on();
  EXPECT_EQ(under.rules.number(*under.series).identity, under.rules.identity_of(rule("a", 1)));
  under.reload({rule("a", 1), rule("b", 1)});
  EXPECT_EQ(under.number(0), *under.series);
  EXPECT_EQ(under.rules.counters(0).allowed, 1u);

  under.reload({rule("b", 1)});
  under.series.reset();
  under.move_on();
  under.reload({rule("a", 1), rule("b", 1)});
  EXPECT_EQ(under.rules.counters(0).allowed, 0u);
}

TEST(RulesInForce, AReloadVisitsTheSeriesOnlyWhereNumbersHaveBecomeMany) {
  Under under({});
  std::uint64_t limit = 1;
  for (; limit < RulesInForce::kManyNumbers; ++limit) {
    under.reload({rule("r" + std::to_string(limit), 1)});
  }
  EXPECT_EQ(under.visits, 0);
  for (; limit < RulesInForce::kManyNumbers + 4; ++limit) {
    under.reload({rule("r" + std::to_string(limit), 1)});
  }
  EXPECT_GT(under.visits, 0);
  EXPECT_EQ(under.rules.use(0)->rules->rules()[0].name, "r" + std::to_string(limit - 1));
}

TEST(RulesInForce, ANumberIsReadByTheRuleInForceOrAsItWas) {
  Rule bucket = rule("bucket", 10, Algorithm::token_bucket);
  bucket.burst = 5;
  Under under({bucket});
  std::uint32_t before = under.number(0);
  under.series = before;
  bucket.burst = 6;
  under.reload({bucket});
  EXPECT_NE(under.number(0), before);  // a small bucket is in ticks of these numbers
  EXPECT_EQ(under.rules.compiled_for(*under.rules.use(0), before).bucket.burst, 6u);
  EXPECT_EQ(under.rules.number(before).bucket.burst, 5u);
  under.reload({});
  CompiledRule kept = under.rules.compiled_for(*under.rules.use(0), before);
  EXPECT_EQ(kept.bucket.burst, 5u);
  EXPECT_EQ(kept.number, before);
}

TEST(RulesInForce, AnswersWaitForTheDiskOnlyWhereThereIsOne) {
  Rule commit = rule("r", 1);
  commit.durability = Durability::commit;
  EXPECT_FALSE(Under({commit}).rules.use(0)->compiled_rules[0].commit);
  EXPECT_TRUE(Under({commit}, true).rules.use(0)->compiled_rules[0].commit);
}

TEST(RulesInForce, EscrowRulesAreFoundByTheirNames) {
  Under under({rule("a", 1), escrow("b", 1)});
  RulesInForce::Use program = under.rules.use(0);
  const CompiledRule& compiled = program->compiled_rules[1];
  EXPECT_EQ(program->find_escrow(compiled.name), &compiled);
  EXPECT_NE(compiled.name, under.rules.identity(1));
  EXPECT_EQ(program->find_escrow(under.rules.identity(1)), nullptr);
  EXPECT_EQ(program->find(under.rules.identity(1)), &compiled);
}

TEST(RulesInForce, AnAnswerIsTranslatedToRulesThatAreStillThere) {
  Under under({rule("a", 1), rule("b", 2), rule("c", 3)});
  std::shared_ptr<const RuleSet> before = under.rules.rules();
  Decision answer;
  for (std::uint32_t index : {0u, 1u, 2u}) {
    RuleStatus status;
    status.rule = index;
    status.remaining = index;
    answer.statuses.push_back(status);
  }
  answer.deciding = 0;
  under.reload({rule("c", 3), rule("b", 2)});
  under.rules.translate(*under.rules.use(0), *before, answer);
  EXPECT_EQ(answer.version, 2u);
  ASSERT_EQ(answer.statuses.size(), 2u);
  EXPECT_EQ(answer.statuses[0].rule, 0u);
  EXPECT_EQ(answer.statuses[0].remaining, 2u);  // c
  EXPECT_EQ(answer.statuses[1].remaining, 1u);  // b, of which least is left
  EXPECT_EQ(answer.deciding, 1);
  under.reload({});
  under.rules.translate(*under.rules.use(0), *under.rules.rules(2), answer);
  EXPECT_TRUE(answer.statuses.empty());
  EXPECT_EQ(answer.deciding, -1);
}

}  // namespace
}  // namespace weir
