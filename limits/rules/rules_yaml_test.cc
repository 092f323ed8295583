#include <weir/limits/rules/rules_yaml.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <limits>
#include <random>
#include <sstream>
#include <string>
#include <vector>

namespace weir {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

constexpr std::uint64_t kMax = std::numeric_limits<std::uint64_t>::max();

std::vector<std::string> errors_of(std::string_view yaml, std::string_view file = "r.yaml") {
  const LoadedRules loaded = parse_rules(yaml, file);
  EXPECT_EQ(loaded.rules == nullptr, !loaded.errors.empty());
  std::vector<std::string> out;
  for (const RuleError& error : loaded.errors) out.push_back(error.to_string());
  return out;
}

std::vector<Rule> rules_of(std::string_view yaml) {
  const LoadedRules loaded = parse_rules(yaml, "r.yaml");
  for (const RuleError& error : loaded.errors) ADD_FAILURE() << error.to_string();
  return loaded.rules ? loaded.rules->rules() : std::vector<Rule>{};
}

/// A document with one rule that has these lines besides name, limit and window.
std::string one_rule(const std::vector<std::string>& lines) {
  std::string yaml = "domain: api\nrules:\n  - name: a\n    limit: 10\n    window: 1m\n";
  for (const std::string& line : lines) yaml += "    " + line + "\n";
  return yaml;
}

std::vector<std::string> errors_with(const std::vector<std::string>& lines) {
  return errors_of(one_rule(lines));
}

Rule rule_with(const std::vector<std::string>& lines) {
  const std::vector<Rule> rules = rules_of(one_rule(lines));
  return rules.size() == 1 ? rules[0] : Rule{};
}

TEST(RulesYaml, Defaults) {
  Rule expected;
  expected.domain = "api";
  expected.name = "a";
  expected.limit = 10;
  expected.window = kMinute;
  EXPECT_EQ(rule_with({}), expected);
}

TEST(RulesYaml, AHomeRuleIsAlwaysDurable) {
  const Rule rule = rule_with({"enforcement: home", "durability: async"});
  EXPECT_EQ(rule.enforcement, Enforcement::home);
  EXPECT_EQ(rule.durability, Durability::commit);
}

TEST(RulesYaml, EveryField) {
  const Rule rule =
      rule_with({"match:", "  path: { prefix: /v1/ }", "  plan: free", "  ip: { cidr: 10.0.0.0/8 }",
                 "  user: any", "  bot: absent", "  status: { exact: 404 }", "key: [api_key, ip]",
                 "algorithm: token_bucket", "burst: 5", "max_debt: 3",
                 "cost: { POST: 5, default: 2 }", "phase: spread", "enforcement: merged",
                 "durability: commit", "on_failure: closed", "shadow: true"});
  Rule expected;
  expected.domain = "api";
  expected.name = "a";
  expected.limit = 10;
  expected.window = kMinute;
  expected.match = {{"path", MatchPrefix{"/v1/"}},
                    {"plan", MatchExact{"free"}},
                    {"ip", *parse_cidr("10.0.0.0/8")},
                    {"user", MatchAny{}},
                    {"bot", MatchAbsent{}},
                    {"status", MatchExact{"404"}}};
  expected.key = {"api_key", "ip"};
  expected.algorithm = Algorithm::token_bucket;
  expected.burst = 5;
  expected.max_debt = 3;
  expected.cost_by_method = {{"POST", 5}};
  expected.default_cost = 2;
  expected.phase = Phase::spread;
  expected.durability = Durability::commit;
  expected.on_failure = OnFailure::closed;
  expected.shadow = true;
  EXPECT_EQ(rule, expected);

  const Rule ring = rule_with({"algorithm: sliding_window", "slots: 6", "strict: true"});
  EXPECT_EQ(ring.algorithm, Algorithm::sliding_window);
  EXPECT_EQ(ring.slots, 6u);
  EXPECT_TRUE(ring.strict);
}

TEST(RulesYaml, HowItCounts) {
  const Rule rule =
      rule_with({"phase: first_hit", "count_denied: true", "candidate: { limit: 5 }"});
  EXPECT_EQ(rule.phase, Phase::first_hit);
  EXPECT_TRUE(rule.count_denied);
  EXPECT_EQ(rule.candidate, (Candidate{5, 0}));
  const Rule bucket = rule_with({"algorithm: token_bucket", "candidate: { limit: 5, burst: 2 }"});
  EXPECT_EQ(bucket.candidate, (Candidate{5, 2}));
  EXPECT_EQ(rule_with({"algorithm: token_bucket", "candidate: { limit: 5 }"}).candidate,
            (Candidate{5, 5}));
}

TEST(RulesYaml, ACostMayBeByEntries) {
  const Rule rule = rule_with({"cost: { entries: { in: 1, out: 4, cached: 0.25 } }"});
  EXPECT_EQ(rule.cost_by_entry,
            (std::vector<EntryCost>{{"in", 1'000'000}, {"out", 4'000'000}, {"cached", 250'000}}));
  // A method of that name.
  EXPECT_EQ(rule_with({"cost: { entries: 3 }"}).cost_by_method.at("entries"), 3u);
  const std::string what =
      "expected units for each, such as 4 or 0.25: at most 1000000000, with at most 6 digits "
      "behind the point, got ";
  for (const char* wrong : {"-1", "1.", ".5", "0.1234567", "1000000000.1", "01", "1e3", "a"}) {
    EXPECT_THAT(
        errors_with({"cost: { entries: { in: " + std::string(wrong) + " } }"}),
        ElementsAre("r.yaml:6:28: rules[0].cost.entries.in: " + what + "\"" + wrong + "\""));
  }
  EXPECT_THAT(errors_with({"cost: { entries: {} }"}),
              ElementsAre("r.yaml:6:22: rules[0].cost.entries: expected at least one entry"));
  EXPECT_THAT(
      errors_with({"cost: { entries: { in: 1 }, GET: 2 }"}),
      ElementsAre("r.yaml:6:13: rules[0].cost.entries: expected no methods beside entries"));
}

TEST(RulesYaml, HowItCountsIsRefusedWhereItMeansNothing) {
  EXPECT_THAT(errors_with({"phase: first_hit", "algorithm: sliding_log"}),
              ElementsAre("r.yaml:6:12: rules[0].phase: expected aligned or spread with algorithm "
                          "sliding_log, got first_hit: only the windows of fixed_window can begin "
                          "with a hit"));
  EXPECT_THAT(errors_with({"phase: first_hit", "durability: reserve"}),
              ElementsAre("r.yaml:6:12: rules[0].phase: expected aligned or spread with durability "
                          "reserve, got first_hit: what is ahead is kept for windows that are "
                          "known before they begin"));
  EXPECT_THAT(
      errors_with({"phase: first_hit", "enforcement: escrow"}),
      ElementsAre("r.yaml:6:12: rules[0].phase: expected aligned or spread with enforcement "
                  "escrow, got first_hit: rights are shares of windows that all nodes know "
                  "before they begin"));
  EXPECT_THAT(errors_with({"candidate: { limit: 5 }", "enforcement: escrow"}),
              ElementsAre("r.yaml:6:16: rules[0].candidate: expected no candidate with enforcement "
                          "escrow: the rights that nodes hold are those of the limit"));
  EXPECT_THAT(errors_with({"candidate: { limit: 5, burst: 2 }"}),
              ElementsAre("r.yaml:6:35: rules[0].candidate.burst: expected no burst with algorithm "
                          "fixed_window: only token_bucket and leaky_bucket have it"));
  EXPECT_THAT(
      errors_with({"candidate: {}"}),
      ElementsAre("r.yaml:6:16: rules[0].candidate.limit: expected the limit to try, got nothing"));
  EXPECT_THAT(errors_with({"candidate: 5"}),
              ElementsAre("r.yaml:6:16: rules[0].candidate: expected a map, got \"5\""));
  EXPECT_THAT(
      errors_with({"count_denied: yes"}),
      ElementsAre("r.yaml:6:19: rules[0].count_denied: expected true or false, got \"yes\""));
}

TEST(RulesYaml, TheOtherAlgorithms) {
  const Rule leaky = rule_with({"algorithm: leaky_bucket", "burst: 4", "max_debt: 2"});
  EXPECT_EQ(leaky.algorithm, Algorithm::leaky_bucket);
  EXPECT_EQ(leaky.burst, 4u);
  EXPECT_EQ(leaky.max_debt, 2u);
  EXPECT_EQ(rule_with({"algorithm: leaky_bucket"}).burst, 10u);
  EXPECT_EQ(rule_with({"algorithm: sliding_log"}).algorithm, Algorithm::sliding_log);
}

/// A rule without a window, and one with this one.
std::string windowed(const std::string& window, const std::string& more = "") {
  return "domain: api\nrules:\n  - name: a\n    limit: 10\n    window: " + window + "\n" + more;
}

TEST(RulesYaml, AWindowMayFollowACalendar) {
  const Rule rule = rules_of(windowed("{ calendar: month, time_zone: Europe/Berlin }")).at(0);
  EXPECT_EQ(rule.calendar, (CalendarWindow{CalendarUnit::month, "Europe/Berlin"}));
  EXPECT_EQ(format_window(rule), "month (Europe/Berlin)");
  for (CalendarUnit unit :
       {CalendarUnit::day, CalendarUnit::week, CalendarUnit::month, CalendarUnit::year}) {
    const std::string window = "{ calendar: " + std::string(to_string(unit)) + " }";
    EXPECT_EQ(rules_of(windowed(window)).at(0).calendar, (CalendarWindow{unit, "UTC"}));
  }
  EXPECT_EQ(format_window(rule_with({})), "1m");
}

TEST(RulesYaml, MistakesInACalendarAreNamedWhereTheyStand) {
  EXPECT_THAT(errors_of(windowed("month")),
              ElementsAre("r.yaml:5:13: rules[0].window: expected a length of time such as 500ms, "
                          "10s, 1h30m or 1d, at most 366d, got \"month\"; or { calendar: month }"));
  EXPECT_THAT(errors_of(windowed("{ calendar: days }")),
              ElementsAre("r.yaml:5:25: rules[0].window.calendar: expected day, week, month or "
                          "year, got \"days\"; did you mean \"day\"?"));
  EXPECT_THAT(errors_of(windowed("{ time_zone: UTC }")),
              ElementsAre("r.yaml:5:13: rules[0].window.calendar: expected day, week, month or "
                          "year, got nothing"));
  EXPECT_THAT(errors_of(windowed("{ calendar: day, zone: UTC }")),
              ElementsAre(HasSubstr("rules[0].window.zone: expected a known field (calendar or "
                                    "time_zone)")));
  EXPECT_THAT(errors_of(windowed("{ calendar: day, time_zone: [UTC] }")),
              ElementsAre(EndsWith("rules[0].window.time_zone: expected the name of a time zone, "
                                   "got a list")));
  EXPECT_THAT(errors_of(windowed("{ calendar: day, time_zone: Europe/Atlantis }")),
              ElementsAre("r.yaml:5:41: rules[0].window.time_zone: expected a time zone of the "
                          "system's database, such as UTC or Europe/Berlin, got "
                          "\"Europe/Atlantis\""));
  EXPECT_THAT(errors_of(windowed("{ calendar: day }", "    algorithm: sliding_window\n")),
              ElementsAre("r.yaml:5:13: rules[0].window: expected a length of time with algorithm "
                          "sliding_window: only fixed_window follows a calendar"));
  EXPECT_THAT(errors_of(windowed("{ calendar: day }", "    phase: spread\n")),
              ElementsAre("r.yaml:6:12: rules[0].phase: expected aligned, got spread: a "
                          "calendar's windows begin when the calendar says"));
}

TEST(RulesYaml, KeyMayBeOneEntryOrNone) {
  EXPECT_THAT(rule_with({"key: ip"}).key, ElementsAre("ip"));
  EXPECT_THAT(rule_with({"key: []"}).key, IsEmpty());
  EXPECT_THAT(rule_with({"key: [b, a]"}).key, ElementsAre("b", "a"));
}

TEST(RulesYaml, CostMayBeOneNumber) {
  EXPECT_EQ(rule_with({"cost: 7"}).default_cost, 7u);
  EXPECT_EQ(rule_with({"cost: 0"}).default_cost, 0u);
  const Rule rule = rule_with({"cost: { GET: 2 }"});
  EXPECT_EQ(rule.default_cost, 1u);
  EXPECT_EQ(rule.cost_by_method.at("GET"), 2u);
}

TEST(RulesYaml, QuotedWordsAreValues) {
  const auto matcher = [](const std::string& value) {
    return rule_with({"match: { x: " + value + " }"}).match.at(0).matcher;
  };
  EXPECT_EQ(matcher("any"), Matcher(MatchAny{}));
  EXPECT_EQ(matcher("\"any\""), Matcher(MatchExact{"any"}));
  EXPECT_EQ(matcher("'absent'"), Matcher(MatchExact{"absent"}));
  EXPECT_EQ(matcher("{ exact: any }"), Matcher(MatchExact{"any"}));
  EXPECT_EQ(matcher("\"\""), Matcher(MatchExact{""}));
  EXPECT_EQ(matcher("\"null\""), Matcher(MatchExact{"null"}));
  EXPECT_EQ(matcher("true"), Matcher(MatchExact{"true"}));
}

TEST(RulesYaml, NumbersAreExact) {
  const auto limit = [](const std::string& text) {
    return "domain: d\nrules: [{name: a, window: 1s, limit: " + text + "}]";
  };
  EXPECT_EQ(rules_of(limit("18446744073709551615")).at(0).limit, kMax);
  EXPECT_EQ(rules_of(limit("0")).at(0).limit, 0u);
  for (const char* text : {"-1", "+1", "1.0", "1e3", "0x10", "1_000", "007", "'1'", "\"1\"", "one",
                           "true", "~", "", "[1]", "{a: 1}", "!!int 1", "1 000", "00"}) {
    EXPECT_THAT(errors_of(limit(text)),
                ElementsAre(HasSubstr("rules[0].limit: expected a whole number in decimal digits")))
        << text;
  }
  for (const char* text : {"18446744073709551616", "99999999999999999999999999999999999999"}) {
    EXPECT_THAT(errors_of(limit(text)),
                ElementsAre(HasSubstr("expected a number of at most 18446744073709551615, got")))
        << text;
  }
  EXPECT_THAT(errors_with({"algorithm: sliding_window", "slots: 4294967297"}),
              ElementsAre(HasSubstr("expected a number of at most 4294967295")));
}

TEST(RulesYaml, BooleansAreTrueAndFalse) {
  EXPECT_FALSE(rule_with({"shadow: false"}).shadow);
  for (const char* text : {"yes", "on", "True", "TRUE", "1", "'true'", "", "[true]"}) {
    EXPECT_THAT(errors_with({std::string("shadow: ") + text}),
                ElementsAre(HasSubstr("rules[0].shadow: expected true or false, got")))
        << text;
  }
}

TEST(RulesYaml, WordsOutsideTheListAreRefusedWithTheList) {
  EXPECT_THAT(errors_with({"algorithm: bucket"}),
              ElementsAre("r.yaml:6:16: rules[0].algorithm: expected fixed_window, "
                          "sliding_window, sliding_log, token_bucket or leaky_bucket, got "
                          "\"bucket\""));
  EXPECT_THAT(errors_with({"algorithm: Fixed-Window"}),
              ElementsAre(EndsWith("did you mean \"fixed_window\"?")));
  EXPECT_THAT(errors_with({"algorithm: leaky-bucket"}),
              ElementsAre(EndsWith("did you mean \"leaky_bucket\"?")));
  EXPECT_THAT(errors_with({"algorithm: [token_bucket]"}), ElementsAre(EndsWith("got a list")));
  EXPECT_THAT(errors_with({"enforcement: homes"}),
              ElementsAre(EndsWith("expected merged, escrow or home, got \"homes\"; did you mean "
                                   "\"home\"?")));
  EXPECT_THAT(errors_with({"durability: reserved"}),
              ElementsAre(EndsWith("expected async, commit or reserve, got \"reserved\"; did you "
                                   "mean \"reserve\"?")));
  EXPECT_THAT(errors_with({"on_failure: opne"}),
              ElementsAre(EndsWith("open or closed, got \"opne\"; did you mean \"open\"?")));
  EXPECT_THAT(errors_with({"phase: random"}),
              ElementsAre(HasSubstr("aligned, spread or first_hit")));
}

TEST(RulesYaml, EscrowNeverAdmitsTooMuch) {
  const Rule escrow = rule_with({"enforcement: escrow"});
  EXPECT_EQ(escrow.enforcement, Enforcement::escrow);
  EXPECT_EQ(escrow.durability, Durability::reserve);
  EXPECT_EQ(escrow.on_failure, OnFailure::closed);
  const Rule commit =
      rule_with({"enforcement: escrow", "durability: commit", "on_failure: closed"});
  EXPECT_EQ(commit.durability, Durability::commit);
  EXPECT_THAT(errors_with({"enforcement: escrow", "durability: async"}),
              ElementsAre("r.yaml:7:17: rules[0].durability: expected reserve or commit with "
                          "enforcement escrow, got async"));
  EXPECT_THAT(errors_with({"enforcement: escrow", "on_failure: open"}),
              ElementsAre("r.yaml:7:17: rules[0].on_failure: expected closed with enforcement "
                          "escrow, got open: it never admits too much"));
  EXPECT_THAT(errors_with({"enforcement: escrow", "algorithm: sliding_window"}),
              ElementsAre("r.yaml:6:18: rules[0].enforcement: expected merged with algorithm "
                          "sliding_window, got escrow: fixed_window, token_bucket and leaky_bucket "
                          "have rights"));
  const Rule bucket = rule_with({"enforcement: escrow", "algorithm: token_bucket", "burst: 3"});
  EXPECT_EQ(bucket.durability, Durability::async);
  EXPECT_EQ(bucket.on_failure, OnFailure::closed);
  EXPECT_THAT(
      errors_with({"enforcement: escrow", "algorithm: leaky_bucket", "durability: reserve"}),
      ElementsAre("r.yaml:8:17: rules[0].durability: expected async with enforcement escrow and "
                  "algorithm leaky_bucket, got reserve: a node that starts begins with an empty "
                  "bucket, so nothing of it is kept"));
  EXPECT_THAT(
      errors_with({"enforcement: escrow", "algorithm: token_bucket", "max_debt: 2"}),
      ElementsAre("r.yaml:8:15: rules[0].max_debt: expected 1, or none, with enforcement "
                  "escrow, got 2: nothing is admitted twice, so no debt comes from others"));
  EXPECT_THAT(
      errors_with({"enforcement: escrow", "algorithm: token_bucket", "burst: 100000000000000"}),
      ElementsAre("r.yaml:8:12: rules[0].burst: expected burst * burst * window, in nanoseconds, "
                  "and limit * burst below 2^124 with enforcement escrow, got a burst of "
                  "100000000000000"));
}

TEST(RulesYaml, ReserveIsForWindows) {
  EXPECT_EQ(rule_with({"durability: reserve"}).durability, Durability::reserve);
  EXPECT_THAT(errors_with({"durability: reserve", "algorithm: token_bucket"}),
              ElementsAre("r.yaml:6:17: rules[0].durability: expected async or commit with "
                          "algorithm token_bucket: only fixed_window and sliding_window keep a "
                          "reserve"));
}

TEST(RulesYaml, UnknownFieldsAreErrors) {
  EXPECT_THAT(errors_with({"shadw: true"}),
              ElementsAre("r.yaml:6:5: rules[0].shadw: expected a known field; did you mean "
                          "\"shadow\"?"));
  EXPECT_THAT(errors_with({"on-failure: open"}), ElementsAre(HasSubstr("\"on_failure\"?")));
  EXPECT_THAT(errors_with({"requests_per_unit: 5"}),
              ElementsAre(HasSubstr("expected a known field (name, match, key, group, replaces,")));
  EXPECT_THAT(errors_of("domain: api\nrule: []\n"),
              ElementsAre(HasSubstr("r.yaml:1:1: rules: expected a list of rules"),
                          "r.yaml:2:1: rule: expected a known field; did you mean \"rules\"?"));
  EXPECT_THAT(errors_with({"match: { path: { prefx: /v1 } }"}),
              ElementsAre(HasSubstr("rules[0].match.path.prefx: expected a known field; did you "
                                    "mean \"prefix\"?")));
  EXPECT_THAT(errors_with({"<<: { shadow: true }"}), ElementsAre(HasSubstr("no merge key")));
  // What it quotes cannot write into a log what it likes.
  EXPECT_THAT(errors_with({"\"a\\nb\": 1"}), ElementsAre(HasSubstr("rules[0].\"a\\x0ab\": ")));
}

TEST(RulesYaml, DuplicateKeysAreErrors) {
  EXPECT_THAT(errors_with({"limit: 20"}),
              ElementsAre("r.yaml:6:5: rules[0].limit: expected each key once; it is already on "
                          "line 4"));
  EXPECT_THAT(errors_of("domain: a\ndomain: b\nrules: []"),
              ElementsAre("r.yaml:2:1: domain: expected each key once; it is already on line 1"));
  EXPECT_THAT(errors_with({"match: { a: any, \"a\": absent }"}),
              ElementsAre(HasSubstr("rules[0].match.a: expected each key once")));
  EXPECT_THAT(errors_with({"cost: { GET: 1, GET: 1 }"}),
              ElementsAre(HasSubstr("rules[0].cost.GET: expected each key once")));
}

TEST(RulesYaml, FieldsOfOtherAlgorithmsAreErrorsEvenWithTheirDefault) {
  EXPECT_THAT(errors_with({"burst: 10"}),
              ElementsAre("r.yaml:6:12: rules[0].burst: expected no burst with algorithm "
                          "fixed_window: only token_bucket and leaky_bucket have it"));
  EXPECT_THAT(errors_with({"max_debt: 1"}), ElementsAre(HasSubstr("no max_debt with")));
  EXPECT_THAT(errors_with({"slots: 1"}), ElementsAre(HasSubstr("no slots with")));
  EXPECT_THAT(errors_with({"algorithm: token_bucket", "strict: false"}),
              ElementsAre(HasSubstr("no strict with algorithm token_bucket: only sliding_window")));
  EXPECT_THAT(errors_with({"algorithm: sliding_window", "burst: 0"}),
              ElementsAre(HasSubstr("no burst with")));
  EXPECT_THAT(errors_with({"algorithm: token_bucket", "burst: 0"}),
              ElementsAre("r.yaml:7:12: rules[0].burst: expected at least 1, got 0; left out, it "
                          "is the limit"));
}

TEST(RulesYaml, MissingFieldsNameTheRulesLine) {
  EXPECT_THAT(errors_of("domain: api\nrules:\n  - key: ip\n  - name: b\n    limit: 1\n"),
              ElementsAre(StartsWith("r.yaml:3:5: rules[0].name: expected a name"),
                          StartsWith("r.yaml:3:5: rules[0].limit: expected the units"),
                          StartsWith("r.yaml:3:5: rules[0].window: expected a length of time"),
                          StartsWith("r.yaml:4:5: rules[1].window: expected a length of time")));
  EXPECT_THAT(errors_of("rules: []"), ElementsAre(StartsWith("r.yaml:1:1: domain: expected ")));
  EXPECT_THAT(errors_of("domain: ''\nrules: []"),
              ElementsAre("r.yaml:1:9: domain: expected a name of at least one byte"));
}

TEST(RulesYaml, ErrorsOfValuesStandAtTheirField) {
  EXPECT_THAT(errors_of("domain: api\nrules:\n- name: a\n  limit: 1\n  window: 500us\n"),
              ElementsAre("r.yaml:5:11: rules[0].window: expected 1ms to 366d, got 500us"));
  EXPECT_THAT(errors_with({"algorithm: sliding_window", "slots: 7"}),
              ElementsAre(StartsWith("r.yaml:7:12: rules[0].slots: expected a number that divides "
                                     "the window of 1m")));
  EXPECT_THAT(
      errors_with({"key:", "  - a", "  - b", "  - a"}),
      ElementsAre("r.yaml:9:9: rules[0].key[2]: expected each entry once, got \"a\" again"));
  EXPECT_THAT(errors_with({"match:", "  a.b: { prefix: '' }"}),
              ElementsAre(StartsWith("r.yaml:7:12: rules[0].match.a.b: expected a prefix")));
  EXPECT_THAT(errors_with({"match: { ip: { cidr: 10.0.0.1/8 } }"}),
              ElementsAre(StartsWith("r.yaml:6:26: rules[0].match.ip.cidr: expected a network")));
  EXPECT_THAT(errors_with({"cost: { '': 2 }"}),
              ElementsAre(HasSubstr("r.yaml:6:17: rules[0].cost.")));
}

TEST(RulesYaml, AMisreadFieldCausesNoOtherErrors) {
  EXPECT_THAT(errors_with({"algorithm: sliding", "slots: 7", "burst: 5"}),
              ElementsAre(HasSubstr("rules[0].algorithm: ")));
  EXPECT_THAT(errors_of("domain: d\nrules: [{name: a, limit: 1, window: x, "
                        "algorithm: sliding_window, slots: 7}]"),
              ElementsAre(HasSubstr("rules[0].window: ")));
  EXPECT_THAT(errors_of("domain: []\nrules: [{name: a, limit: 1, window: 1s}, "
                        "{name: b, limit: 1, window: 1s}]"),
              ElementsAre(HasSubstr("r.yaml:1:9: domain: expected a name, got a list")));
}

TEST(RulesYaml, AllThatAnEntryMustBe) {
  const Rule rule = rule_with(
      {"match:", "  plan: { in: [free, trial] }",
       "  host: { suffix: .example.com, not: a.example.com }", "  agent: { glob: \"curl/*\" }",
       "  ip: { cidr: [10.0.0.0/8, 2001:db8::/32] }", "  path: { under: /v1, ignore_case: true }",
       "  login: { path: /login }", "  size: { above: 10, at_most: 20 }",
       "  user: { not: [absent, root, { prefix: svc- }] }"});
  EXPECT_EQ(rule.match,
            (std::vector<Match>{
                {"plan", MatchIn{{"free", "trial"}}},
                {"host", MatchSuffix{".example.com"}},
                {"host", MatchExact{"a.example.com"}, true},
                {"agent", MatchGlob{"curl/*"}},
                {"ip", MatchCidrs{{*parse_cidr("10.0.0.0/8"), *parse_cidr("2001:db8::/32")}}},
                {"path", MatchPath{"/v1", true, true}},
                {"login", MatchPath{"/login", false, false}},
                {"size", MatchNumber{11, 20}},
                {"user", MatchAbsent{}, true},
                {"user", MatchExact{"root"}, true},
                {"user", MatchPrefix{"svc-"}, true}}));
}

TEST(RulesYaml, WhatAnEntryCannotBe) {
  const auto error = [](const std::string& value) {
    const std::vector<std::string> errors = errors_with({"match: { x: " + value + " }"});
    return errors.size() == 1 ? errors[0].substr(errors[0].find("rules[0]")) : "none, or several";
  };
  EXPECT_THAT(error("{ not: { not: a } }"),
              HasSubstr("rules[0].match.x.not.not: expected a known"));
  EXPECT_THAT(error("{ not: [] }"),
              HasSubstr("match.x.not: expected something that must not hold"));
  EXPECT_THAT(error("{ not: { prefix: a, suffix: b } }"),
              HasSubstr("one thing that must not hold"));
  EXPECT_THAT(error("{ in: [] }"), HasSubstr("match.x: expected 1 to 1024 values, got 0"));
  EXPECT_THAT(error("{ in: a }"), HasSubstr("match.x.in: expected a list of values"));
  EXPECT_THAT(error("[a, b]"), HasSubstr("one of several values is written { in: [a, b] }"));
  EXPECT_THAT(error("{ under: v1 }"), HasSubstr("expected a path that begins with a slash"));
  EXPECT_THAT(error("{ path: \"/a?b\" }"), HasSubstr("expected a path without ? and #"));
  EXPECT_THAT(error("{ path: /a, under: /b }"), HasSubstr("expected one of path and under"));
  EXPECT_THAT(error("{ prefix: a, ignore_case: true }"), HasSubstr("expected ignore_case beside"));
  EXPECT_THAT(error("{ above: 5, below: 6 }"),
              HasSubstr("expected bounds that some number is within"));
  EXPECT_THAT(error("{ below: 0 }"), HasSubstr("match.x.below: expected"));
  EXPECT_THAT(error("{ glob: " + std::string(257, 'a') + " }"), HasSubstr("at most 256 bytes"));
  EXPECT_THAT(error("{ suffix: \"\" }"), HasSubstr("a suffix of at least one byte"));
}

TEST(RulesYaml, HowAKeyIsCounted) {
  const Rule rule = rule_with(
      {"key: [user, {ip: {v4: 24, v6: 64}}, {host: lower}, {path: {segments: 2}}, {x: address}]"});
  EXPECT_EQ(rule.key, (std::vector<std::string>{"user", "ip", "host", "path", "x"}));
  EXPECT_EQ(rule.key_forms, (std::vector<KeyForm>{{},
                                                  {KeyForm::Kind::address, 24, 64, 0, false},
                                                  {KeyForm::Kind::lower, 32, 128, 0, false},
                                                  {KeyForm::Kind::path, 32, 128, 2, false},
                                                  {KeyForm::Kind::address, 32, 128, 0, false}}));
  EXPECT_THAT(errors_with({"key: { ip: { v4: 33 } }"}),
              ElementsAre(HasSubstr("rules[0].key.ip.v4: expected a number of at most 32")));
  EXPECT_THAT(errors_with({"key: { ip: upper }"}),
              ElementsAre(HasSubstr("rules[0].key.ip: expected address or lower")));
  EXPECT_THAT(errors_with({"key: { ip: { v6: 64, segments: 2 } }"}),
              ElementsAre(HasSubstr("rules[0].key.ip: expected v4 and v6")));
  EXPECT_THAT(errors_with({"key: { a: lower, b: lower }"}),
              ElementsAre(HasSubstr("rules[0].key: expected one entry and how it is counted")));
}

TEST(RulesYaml, RulesInEachOthersPlace) {
  const LoadedRules loaded = parse_rules(
      "domain: d\nrules:\n"
      "- {name: vip, match: {plan: vip}, group: plans, key: user, limit: 9, window: 1s}\n"
      "- {name: all, group: {name: plans}, key: user, limit: 1, window: 1s}\n"
      "- {name: probe, match: {path: /healthz}, unlimited: true, replaces: [vip, all]}\n"
      "- {name: a, group: {name: paths, order: exact}, limit: 1, window: 1s}\n",
      "r.yaml");
  ASSERT_THAT(loaded.errors, IsEmpty());
  const std::vector<Rule>& rules = loaded.rules->rules();
  EXPECT_EQ(rules[0].group, "plans");
  EXPECT_EQ(rules[1].group, "plans");
  EXPECT_TRUE(rules[2].unlimited);
  EXPECT_EQ(rules[2].replaces, (std::vector<std::string>{"vip", "all"}));
  EXPECT_EQ(rules[3].group_order, GroupOrder::exact);

  const auto errors = [](const std::string& more) {
    return errors_of("domain: d\nrules:\n- {name: a, limit: 1, window: 1s}\n" + more);
  };
  EXPECT_THAT(errors("- {name: b, limit: 1, window: 1s, replaces: [c]}\n"),
              ElementsAre(HasSubstr("rules[1].replaces[0]: expected the name of a rule of this "
                                    "domain, got \"c\"")));
  EXPECT_THAT(errors("- {name: b, limit: 1, window: 1s, replaces: [b]}\n"),
              ElementsAre(HasSubstr("expected another rule's name, got its own")));
  EXPECT_THAT(errors("- {name: b, limit: 1, window: 1s, replaces: [c]}\n"
                     "- {name: c, limit: 1, window: 1s, replaces: [b]}\n"),
              ElementsAre(HasSubstr("rules[2].replaces: expected no circle")));
  EXPECT_THAT(errors("- {name: b, limit: 1, window: 1s, group: g}\n"
                     "- {name: c, limit: 1, window: 1s, group: {name: g, order: exact}}\n"),
              ElementsAre(HasSubstr("rules[2].group: expected the order of the group's first rule, "
                                    "which is listed, got exact")));
  EXPECT_THAT(errors("- {name: b, unlimited: true}\n"),
              ElementsAre(HasSubstr("rules[1].unlimited: expected a group or replaces beside it")));
  EXPECT_THAT(errors("- {name: b, unlimited: true, replaces: [a], limit: 5}\n"),
              ElementsAre(HasSubstr("rules[1].limit: expected no limit with unlimited: true")));
}

TEST(RulesYaml, LimitsThatComeWithRequests) {
  const LoadedRules loaded = parse_rules(
      "domain: d\nrules:\n- {name: a, key: k, limit: from_request, max: {limit: 100, window: 1h, "
      "burst: 7}, algorithm: token_bucket}\n",
      "r.yaml");
  ASSERT_THAT(loaded.errors, IsEmpty());
  const Rule& rule = loaded.rules->rules()[0];
  EXPECT_TRUE(rule.limit_from_request);
  EXPECT_EQ(rule.limit, 100u);
  EXPECT_EQ(rule.window, kHour);
  EXPECT_EQ(rule.burst, 7u);

  const auto error = [](const std::string& fields) {
    const auto errors = errors_of("domain: d\nrules:\n- {name: a, " + fields + "}\n");
    return errors.empty() ? "none" : errors[0];
  };
  EXPECT_THAT(error("limit: from_request"), HasSubstr("rules[0].max: expected what a request may"));
  EXPECT_THAT(error("limit: from_request, window: 1s, max: {limit: 1, window: 1s}"),
              HasSubstr("rules[0].window: expected window in max"));
  EXPECT_THAT(error("limit: 5, window: 1s, max: {limit: 1, window: 1s}"),
              HasSubstr("rules[0].max: expected limit: from_request beside max"));
  EXPECT_THAT(error("limit: from_request, max: {limit: 1, window: 1s}, phase: first_hit"),
              HasSubstr("rules[0].phase: expected aligned or spread with limit: from_request"));
  EXPECT_THAT(error("limit: from_request, max: {limit: 1, window: 1s}, candidate: {limit: 1}"),
              HasSubstr("rules[0].candidate: expected none with limit: from_request"));
  EXPECT_THAT(error("limit: from_request, max: {limit: 1, window: 1s}, enforcement: escrow"),
              HasSubstr("rules[0].enforcement: expected merged with limit: from_request"));
  EXPECT_THAT(error("limit: from_request, max: {limit: 1, window: 1s}, algorithm: sliding_log"),
              HasSubstr("rules[0].limit: expected a number with algorithm sliding_log"));
}

TEST(RulesYaml, WhatCallersAndMetricsAreTold) {
  const Rule rule = rule_with({"headers: hide", "deny: { status: 503, message: not now }",
                               "labels: { team: search, tier: \"1\" }"});
  EXPECT_TRUE(rule.hide_headers);
  EXPECT_EQ(rule.deny_status, 503);
  EXPECT_EQ(rule.deny_message, "not now");
  EXPECT_EQ(rule.labels, (std::map<std::string, std::string>{{"team", "search"}, {"tier", "1"}}));
  EXPECT_THAT(errors_with({"headers: none"}),
              ElementsAre(HasSubstr("rules[0].headers: expected show or hide")));
  EXPECT_THAT(
      errors_with({"deny: { status: 404 }"}),
      ElementsAre(HasSubstr("rules[0].deny: expected a status of 429, 503 or 403, got 404")));
  EXPECT_THAT(errors_with({"deny: { status: 200 }"}),
              ElementsAre(HasSubstr("rules[0].deny.status: expected a number")));
  EXPECT_THAT(errors_with({"labels: { rule: a }"}),
              ElementsAre(HasSubstr("rules[0].labels.rule: expected a label's name")));
  EXPECT_THAT(errors_with({"labels: { a-b: a }"}),
              ElementsAre(HasSubstr("rules[0].labels.a-b: expected a label's name")));
  EXPECT_THAT(errors_with({"labels: { team: \"\" }"}),
              ElementsAre(HasSubstr("rules[0].labels.team: expected a name of at least one byte")));
}

TEST(RulesYaml, WarnsOfWhatMatchesNothing) {
  const auto warning = [](const std::string& fields) {
    const LoadedRules loaded = parse_rules(
        "domain: d\nrules:\n- {name: a, limit: 1, window: 1s, " + fields + "}\n", "r.yaml");
    EXPECT_THAT(loaded.errors, IsEmpty());
    return loaded.warnings.size() == 1 ? loaded.warnings[0].to_string() : "none, or several";
  };
  EXPECT_THAT(warning("key: \"*\""), HasSubstr("r.yaml:3:40: rules[0].key[0]: warning: an entry is "
                                               "called \"*\""));
  EXPECT_THAT(warning("key: [ip/64]"), HasSubstr("write { ip: { v4: 32, v6: 64 } }"));
  EXPECT_THAT(warning("match: { path: \"/v1/*\" }"),
              HasSubstr("a pattern is written { glob: /v1/* }"));
  EXPECT_THAT(warning("match: { ip: 10.0.0.0/8 }"), HasSubstr("written { cidr: 10.0.0.0/8 }"));
  EXPECT_THAT(warning("match: { x: { glob: abc } }"),
              HasSubstr("is a value: write it without glob"));
  EXPECT_EQ(warning("key: ip, match: { path: { glob: /v1/* } }"), "none, or several");
}

TEST(RulesYaml, MatchHasOneOfItsForms) {
  for (const char* value : {"", "~", "[a]", "!tag a"}) {
    EXPECT_THAT(errors_with({std::string("match: { x: ") + value + " }"}),
                ElementsAre(HasSubstr("rules[0].match.x: expected a value, any, absent, or a map")))
        << value;
  }
  EXPECT_THAT(errors_with({"match: { x: {} }"}),
              ElementsAre(HasSubstr("rules[0].match.x: expected something that must hold")));
  EXPECT_THAT(errors_with({"match: { x: { prefix: [a] } }"}),
              ElementsAre(HasSubstr("rules[0].match.x.prefix: expected text, got a list")));
  for (const char* value : {"[]", "any", ""}) {
    EXPECT_THAT(errors_with({std::string("match: ") + value}),
                ElementsAre(HasSubstr("rules[0].match: expected a map, got")))
        << value;
  }
}

TEST(RulesYaml, AllErrorsInDocumentOrder) {
  const std::string yaml =
      "domain: api\n"
      "rules:\n"
      "  - name: a\n"
      "    limit: x\n"
      "    window: 1us\n"
      "    foo: 1\n"
      "  - 17\n"
      "  - name: a\n"
      "    limit: 1\n"
      "    window: 1s\n"
      "---\n"
      "domain: web\n"
      "rules:\n"
      "  - name: a\n"
      "    limit: 1\n"
      "    window: 1s\n"
      "    shadow: maybe\n";
  EXPECT_THAT(
      errors_of(yaml),
      ElementsAre(StartsWith("r.yaml:4:12: rules[0].limit: "),
                  StartsWith("r.yaml:5:13: rules[0].window: expected 1ms to 366d"),
                  StartsWith("r.yaml:6:5: rules[0].foo: "),
                  StartsWith("r.yaml:7:5: rules[1]: expected a map, got \"17\""),
                  "r.yaml:8:11: rules[2].name: expected a name that is unique in its domain: \"a\" "
                  "is already the name of the rule at line 3",
                  StartsWith("r.yaml:17:13: rules[0].shadow: ")));
}

TEST(RulesYaml, SeveralDocuments) {
  const std::vector<Rule> rules = rules_of(
      "domain: api\nrules:\n- {name: a, limit: 1, window: 1s}\n---\n"
      "domain: web\nrules: []\n---\n"
      "domain: api\nrules:\n- {name: b, limit: 2, window: 1s}\n");
  ASSERT_EQ(rules.size(), 2u);
  EXPECT_EQ(rules[1].domain, "api");
  EXPECT_EQ(rules[1].name, "b");
  EXPECT_THAT(errors_of("domain: api\nrules:\n- {name: a, limit: 1, window: 1s}\n---\n"
                        "domain: api\nrules:\n- {name: a, limit: 2, window: 1s}\n"),
              ElementsAre(EndsWith("is already the name of the rule at line 3")));
}

TEST(RulesYaml, JsonIsYaml) {
  const std::vector<Rule> rules = rules_of(
      R"({"domain": "api", "rules": [{"name": "a", "limit": 1, "window": "1s",
          "match": {"user": {"exact": "x"}}, "key": ["ip"], "shadow": true}]})");
  ASSERT_EQ(rules.size(), 1u);
  EXPECT_TRUE(rules[0].shadow);
}

TEST(RulesYaml, NothingIsNotARuleSet) {
  EXPECT_THAT(errors_of(""), ElementsAre("r.yaml: expected a map with domain and rules, got an "
                                         "empty file"));
  EXPECT_THAT(errors_of("# only a comment\n"), ElementsAre(HasSubstr("an empty file")));
  EXPECT_THAT(errors_of("---\n---\n").size(), 2u);
  EXPECT_THAT(errors_of("domain: a\nrules: []\n---\n"),
              ElementsAre("r.yaml:4:1: expected a map with domain and rules, got an empty "
                          "document"));
  EXPECT_THAT(errors_of("domain: a\nrules:\n"),
              ElementsAre("r.yaml:3:1: rules: expected a list of rules (rules: [] if there are "
                          "none), got nothing"));
  EXPECT_THAT(errors_of("domain: a\nrules: {}\n"), ElementsAre(HasSubstr("got a map")));
  EXPECT_THAT(errors_of("[]"), ElementsAre("r.yaml:1:1: expected a map, got a list"));
  const LoadedRules none = parse_rules("domain: a\nrules: []\n", "");
  ASSERT_NE(none.rules, nullptr);
  EXPECT_THAT(none.rules->rules(), IsEmpty());
}

TEST(RulesYaml, SyntaxErrorsCarryTheirPlaceAndTheDocumentsBeforeAreChecked) {
  EXPECT_THAT(errors_of("domain: api\nrules: [\n"), ElementsAre(StartsWith("r.yaml:3:1: expected "
                                                                           "valid YAML: ")));
  EXPECT_THAT(errors_of("domain: api\nrules: no\n---\na: b: c\n"),
              ElementsAre(StartsWith("r.yaml:2:8: rules: expected a list"),
                          StartsWith("r.yaml:4:5: expected valid YAML: ")));
  EXPECT_THAT(errors_of("domain: *nobody\nrules: []\n"),
              ElementsAre(StartsWith("r.yaml:1:9: expected valid YAML: ")));
  EXPECT_THAT(errors_of("a: 'open", ""), ElementsAre(StartsWith("1:9: expected valid YAML: ")));
}

TEST(RulesYaml, StrayTextBetweenDocumentsIsAnError) {
  EXPECT_THAT(errors_of(",Q#"),
              ElementsAre("r.yaml:1:1: expected valid YAML: unexpected text after "
                          "the end of a document"));
  EXPECT_THAT(errors_of(one_rule({}) + ", {}\n"),
              ElementsAre(StartsWith("r.yaml:6:1: expected valid YAML: ")));
}

TEST(RulesYaml, AliasesStandForWholeValues) {
  const std::vector<Rule> rules = rules_of(
      "domain: api\nrules:\n"
      "- {name: a, limit: &n 5, window: 1s, match: &m { ip: { cidr: 10.0.0.0/8 } }}\n"
      "- {name: b, limit: *n, window: 1s, match: *m}\n");
  ASSERT_EQ(rules.size(), 2u);
  EXPECT_EQ(rules[1].limit, 5u);
  EXPECT_EQ(rules[1].match, rules[0].match);
}

TEST(RulesYaml, AliasesCannotBlowUp) {
  // A map that holds itself.
  EXPECT_THAT(errors_of("&a\ndomain: *a\nrules: [*a]\n"),
              ElementsAre("r.yaml:1:1: domain: expected a name, got a map",
                          HasSubstr("rules[0].name: "), HasSubstr("rules[0].limit: "),
                          HasSubstr("rules[0].window: "), HasSubstr("rules[0].domain: "),
                          HasSubstr("rules[0].rules: expected a known field")));
  // Ten levels of ten.
  std::string laughs = "domain: d\nx0: &x0 ha\n";
  for (int i = 1; i <= 10; ++i) {
    laughs += "x" + std::to_string(i) + ": &x" + std::to_string(i) + " [";
    for (int j = 0; j < 10; ++j) laughs += "*x" + std::to_string(i - 1) + ", ";
    laughs += "]\n";
  }
  EXPECT_THAT(errors_of(laughs + "rules: *x10\n"), Contains(HasSubstr("rules[9]: expected a map")));
  // One large rule, again and again: the same name each time, so it would also end by 1000 errors.
  std::string large = "domain: d\nrules:\n- &r\n  name: a\n  limit: 1\n  window: 1s\n  match:\n";
  for (int i = 0; i < 60; ++i) {
    large += "    k" + std::to_string(i) + ": " + std::string(4000, 'x') + "\n";
  }
  for (int i = 0; i < 200; ++i) large += "- *r\n";
  EXPECT_THAT(errors_of(large), Contains(HasSubstr("at most 32 MiB when aliases are expanded")));
}

TEST(RulesYaml, NestingIsBounded) {
  for (const char* open : {"[", "{a: ", "- ", "? ", "[{a: "}) {
    std::string deep;
    for (int i = 0; i < 100'000; ++i) deep += open;
    EXPECT_THAT(errors_of(deep), ElementsAre(HasSubstr("nested deeper than 64 levels"))) << open;
  }
  std::string indented;
  for (int i = 0; i < 100; ++i) indented += std::string(static_cast<std::size_t>(i), ' ') + "a:\n";
  EXPECT_THAT(errors_of(indented), ElementsAre(HasSubstr("nested deeper than 64 levels")));
  EXPECT_THAT(errors_of(std::string((1u << 20) + 1, '[')),
              ElementsAre(HasSubstr("a smaller file")));
  EXPECT_THAT(errors_of("[" + std::string(4u << 20, ',')),
              ElementsAre(HasSubstr("a smaller file")));
}

TEST(RulesYaml, BytesThatAreNoText) {
  using namespace std::string_literals;
  EXPECT_THAT(errors_of("domain: api\nrules: []\n# \x04\n"),
              ElementsAre("r.yaml:3:3: expected UTF-8 text without control characters, got the "
                          "byte 0x04"));
  EXPECT_THAT(errors_of("domain: a\0i\n"s), ElementsAre(StartsWith("r.yaml:1:10: ")));
  for (const std::string& bad : {"\xff"s, "\xc0\xaf"s, "\xe0\x80\xaf"s, "\xed\xa0\x80"s,
                                 "\xf4\x90\x80\x80"s, "\xe2\x82"s, "\x80"s, "\x7f"s}) {
    EXPECT_THAT(errors_of("# " + bad), ElementsAre(StartsWith("r.yaml:1:3: expected UTF-8")));
  }
  EXPECT_EQ(rules_of("\xef\xbb\xbf"
                     "domain: gr\xc3\xbc\xc3\x9f"
                     "e\r\nrules:\r\n- {name: "
                     "\xf0\x9f\x8c\x8a, limit: 1, window: 1s}\r\n")
                .at(0)
                .name,
            "\xf0\x9f\x8c\x8a");
  EXPECT_THAT(errors_of("domain: \"a\\0b\"\nrules: []"),
              ElementsAre("r.yaml:1:9: domain: expected UTF-8 text without control characters, got "
                          "\"a\\x00b\""));
}

TEST(RulesYaml, ReportsAtMostAThousandErrors) {
  std::string yaml = "domain: api\nrules:\n";
  for (int i = 0; i < 1500; ++i) yaml += "- x: 1\n";
  EXPECT_EQ(errors_of(yaml).size(), 1000u);
}

TEST(RulesYaml, BoundsTheNumberOfRules) {
  std::string yaml = "domain: api\nrules:\n";
  for (int i = 0; i < 100'000; ++i) {
    yaml += "- {name: r" + std::to_string(i) + ", limit: 1, window: 1s}\n";
  }
  EXPECT_EQ(rules_of(yaml).size(), 100'000u);
  yaml += "- {name: more, limit: 1, window: 1s}\n";
  EXPECT_THAT(errors_of(yaml),
              ElementsAre("r.yaml:100003:3: rules: expected at most 100000 rules"));
}

TEST(RulesYaml, AnyBytesGiveRulesOrErrors) {
  std::mt19937 random(7);
  const std::string base =
      one_rule({"match: { path: { prefix: /v1/ }, user: any }", "key: [&k a, b]",
                "algorithm: token_bucket", "burst: 5", "cost: { POST: 5, default: 2 }"});
  const std::string_view special("\"'\\ []{},:-?&*!|>%@#\n\t~<", 25);
  std::size_t good = 0;
  for (int round = 0; round < 5'000; ++round) {
    std::string yaml = base;
    for (auto changes = random() % 4 + 1; changes > 0; --changes) {
      const std::size_t at = random() % yaml.size();
      switch (random() % 3) {
        case 0:
          yaml[at] = special[random() % special.size()];
          break;
        case 1:
          yaml.insert(at, 1, special[random() % special.size()]);
          break;
        default:
          yaml.erase(at, random() % 8);
          break;
      }
      if (yaml.empty()) yaml = base;
    }
    const LoadedRules loaded = parse_rules(yaml, "r.yaml");
    ASSERT_EQ(loaded.rules == nullptr, !loaded.errors.empty()) << yaml;
    if (loaded.rules) ++good;
  }
  EXPECT_GT(good, 100u);
  EXPECT_LT(good, 4'000u);
}

class TemporaryFile {
 public:
  TemporaryFile()
      : path_(std::filesystem::temp_directory_path() /
              ("weir_rules_yaml_test." + std::to_string(getpid()))) {}
  ~TemporaryFile() {
    std::error_code ignored;
    std::filesystem::remove(path_, ignored);
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  std::string write(std::string_view text) const {
    std::ofstream(path_, std::ios::binary) << text;
    return path_.string();
  }

 private:
  std::filesystem::path path_;
};

TEST(LoadRules, ReadsAFile) {
  const TemporaryFile file;
  const std::string path = file.write(one_rule({}));
  const LoadedRules loaded = load_rules(path);
  EXPECT_THAT(loaded.errors, IsEmpty());
  ASSERT_NE(loaded.rules, nullptr);
  EXPECT_EQ(loaded.rules->rules().size(), 1u);

  file.write("domain: api\nrules: 5\n");
  const LoadedRules bad = load_rules(path);
  EXPECT_EQ(bad.rules, nullptr);
  ASSERT_EQ(bad.errors.size(), 1u);
  EXPECT_THAT(bad.errors[0].to_string(), StartsWith(path + ":2:8: rules: "));
}

TEST(LoadRules, AFileThatCannotBeReadIsAnError) {
  const auto error = [](const std::string& path) {
    const LoadedRules loaded = load_rules(path);
    EXPECT_EQ(loaded.rules, nullptr);
    return loaded.errors.size() == 1 ? loaded.errors[0].to_string() : std::string("not one error");
  };
  EXPECT_EQ(error("/nowhere/rules.yaml"),
            "/nowhere/rules.yaml: expected a readable file: No such file or directory");
  EXPECT_THAT(error("/tmp"), HasSubstr("Is a directory"));
  const TemporaryFile file;
  EXPECT_THAT(error(file.write(std::string((16u << 20) + 1, '#'))),
              EndsWith("expected a file of at most 16 MiB"));
  EXPECT_THAT(error(file.write(std::string(16u << 20, '#'))), HasSubstr("an empty file"));
}

TEST(Duration, Reads) {
  const std::vector<std::pair<std::string, Nanos>> cases = {
      {"500ms", 500 * kMillisecond},
      {"10s", 10 * kSecond},
      {"1m", kMinute},
      {"90s", 90 * kSecond},
      {"1h30m", 90 * kMinute},
      {"1d", kDay},
      {"366d", 366 * kDay},
      {"365d24h", 366 * kDay},
      {"1us1ns", 1001},
      {"05s", 5 * kSecond},
      {"1m0s", kMinute},
      {"31622400000000000ns", 366 * kDay},
      {"1d1h1m1s1ms1us1ns", kDay + kHour + kMinute + kSecond + kMillisecond + kMicrosecond + 1}};
  for (const auto& [text, expected] : cases) {
    Nanos out = -1;
    EXPECT_TRUE(parse_duration(text, out)) << text;
    EXPECT_EQ(out, expected) << text;
  }
}

TEST(Duration, RefusesEverythingElse) {
  for (const char* text : {"",
                           "0s",
                           "0d0h",
                           "1",
                           "s",
                           "1 s",
                           " 1s",
                           "1s ",
                           "-1s",
                           "+1s",
                           "1.5h",
                           "1S",
                           "1sec",
                           "1w",
                           "1y",
                           "day",
                           "30m1h",
                           "1s1s",
                           "1h 30m",
                           "367d",
                           "366d1ns",
                           "365d25h",
                           "1hm",
                           "m1",
                           "999999999999999999d",
                           "9999999999999999999ns",
                           "31622400000000001ns",
                           "0x1s"}) {
    Nanos out = 77;
    EXPECT_FALSE(parse_duration(text, out)) << text;
    EXPECT_EQ(out, 77) << text;
  }
}

TEST(Duration, Writes) {
  EXPECT_EQ(format_duration(90 * kSecond), "1m30s");
  EXPECT_EQ(format_duration(kDay), "1d");
  EXPECT_EQ(format_duration(500 * kMillisecond), "500ms");
  EXPECT_EQ(format_duration(1), "1ns");
  EXPECT_EQ(format_duration(0), "0s");
  EXPECT_EQ(format_duration(-kHour), "-1h");
  EXPECT_EQ(format_duration(std::numeric_limits<Nanos>::min()), "-106751d23h47m16s854ms775us808ns");
}

TEST(Duration, WhatIsWrittenIsReadBack) {
  std::mt19937_64 random(3);
  for (int round = 0; round < 20'000; ++round) {
    const Nanos length = static_cast<Nanos>((random() >> (random() % 64)) % (366 * kDay)) + 1;
    Nanos back = 0;
    ASSERT_TRUE(parse_duration(format_duration(length), back)) << length;
    ASSERT_EQ(back, length);
  }
}

// docs/rules.md: examples are valid, and those of mistakes give just the errors shown after them.
TEST(RulesDocument, ExamplesHold) {
  const std::filesystem::path root = WEIR_SOURCE_DIR;
  std::ifstream file(root / "docs" / "rules.md");
  ASSERT_TRUE(file) << root;
  std::string line;
  std::string kind;
  std::string block;
  std::vector<std::string> errors;
  int examples = 0;
  int mistakes = 0;
  while (std::getline(file, line)) {
    if (!line.starts_with("```")) {
      if (!kind.empty()) block += line + "\n";
      continue;
    }
    if (kind.empty()) {
      kind = line.substr(3);
      block.clear();
      continue;
    }
    if (kind == "yaml") {
      ++examples;
      EXPECT_THAT(errors_of(block), IsEmpty()) << block;
    } else if (kind == "yaml error") {
      errors = errors_of(block, "rules.yaml");
    } else if (kind == "text") {
      ++mistakes;
      std::string all;
      for (const std::string& error : errors) all += error + "\n";
      EXPECT_EQ(all, block);
    } else {
      ADD_FAILURE() << "a block of kind " << kind;
    }
    kind.clear();
  }
  EXPECT_GE(examples, 5);
  EXPECT_GE(mistakes, 2);
}

}  // namespace
}  // namespace weir
