#include <weir/limits/rules/rules_text.h>

#include <gtest/gtest.h>

#include <weir/limits/rules/rules_yaml.h>

namespace weir {
namespace {

void comes_back(const std::string& yaml) {
  LoadedRules first = parse_rules(yaml, "first.yaml");
  for (const RuleError& error : first.errors) ADD_FAILURE() << error.to_string();
  ASSERT_NE(first.rules, nullptr);
  const std::string text = rules_text(*first.rules);
  LoadedRules second = parse_rules(text, "second.yaml");
  for (const RuleError& error : second.errors) ADD_FAILURE() << error.to_string() << "\n" << text;
  ASSERT_NE(second.rules, nullptr);
  ASSERT_EQ(first.rules->rules().size(), second.rules->rules().size());
  for (std::size_t i = 0; i < first.rules->rules().size(); ++i) {
    Rule a = first.rules->rules()[i];
    Rule b = second.rules->rules()[i];
    EXPECT_TRUE(a == b) << text;
  }
}

TEST(RulesText, EveryFormOfEveryField) {
  comes_back(R"(domain: api
rules:
  - name: "quoted \"name\" \\ any"
    match: { path: { prefix: "/v1/" }, plan: "any", user: any, bot: absent, ip: { cidr: 10.0.0.0/8 } }
    key: [api_key, ip]
    limit: 18446744073709551615
    window: 1h30m
    cost: { POST: 5, default: 0 }
    phase: spread
    durability: commit
    on_failure: closed
    shadow: true
  - { name: b, limit: 10, window: 500ms, algorithm: token_bucket, burst: 7, max_debt: 3 }
  - { name: c, limit: 10, window: 1m, algorithm: leaky_bucket, key: [] }
  - { name: d, limit: 0, window: 1m, algorithm: token_bucket }
  - { name: e, limit: 10, window: 1m, algorithm: sliding_window, slots: 6, strict: true }
  - { name: f, limit: 10, window: 1m, algorithm: sliding_log, cost: 3, late: drop, series: 7 }
  - { name: g, limit: 10, window: { calendar: month, time_zone: Europe/Berlin } }
  - { name: h, limit: 10, window: 1d, enforcement: home, on_failure: closed }
  - { name: i, limit: 10, window: 1d, phase: first_hit, count_denied: true, candidate: { limit: 5 } }
  - { name: k, limit: 10, window: 1d, cost: { entries: { in: 1, out: 4, cached: 0.25, "x y": 0.000001 } } }
  - { name: l, limit: 10, window: 1d, cost: { entries: { in: 1000000000, none: 0 } } }
  - { name: j, limit: 10, window: 1d, algorithm: token_bucket, candidate: { limit: 5, burst: 3 } }
---
domain: "other: domain"
rules:
  - { name: a, match: { ip: { cidr: "2001:db8::/32" }, q: { exact: "" }, z: "#x" }, limit: 1, window: 1s }
  - { name: b, match: { ip: { cidr: "::/0" } }, limit: 1, window: 1s }
  - { name: c, match: { ip: { cidr: 0.0.0.0/0 } }, limit: 1, window: 1s }
  - { name: d, match: { ip: 'é"\' }, limit: 1, window: 1s }
)");
}

TEST(RulesText, NoRulesIsNoText) {
  std::vector<RuleError> errors;
  EXPECT_EQ(rules_text(*RuleSet::make({}, errors)), "");
}

}  // namespace
}  // namespace weir
