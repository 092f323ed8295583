#include <weir/limits/rules/rule.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

namespace weir {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr std::uint64_t kMax = std::numeric_limits<std::uint64_t>::max();

Rule valid_rule() {
  Rule rule;
  rule.domain = "api";
  rule.name = "per-key";
  rule.limit = 100;
  return rule;
}

Rule bucket() {
  Rule rule = valid_rule();
  rule.algorithm = Algorithm::token_bucket;
  return rule;
}

Rule sliding() {
  Rule rule = valid_rule();
  rule.algorithm = Algorithm::sliding_window;
  return rule;
}

std::vector<std::string> errors_of(std::vector<Rule> rules) {
  std::vector<RuleError> errors;
  const auto set = RuleSet::make(std::move(rules), errors);
  EXPECT_EQ(set == nullptr, !errors.empty());
  std::vector<std::string> out;
  for (const RuleError& error : errors) out.push_back(error.to_string());
  return out;
}

std::vector<std::string> errors_of(const Rule& rule) {
  return errors_of(std::vector<Rule>{rule});
}

std::shared_ptr<const RuleSet> make(std::vector<Rule> rules) {
  std::vector<RuleError> errors;
  auto set = RuleSet::make(std::move(rules), errors);
  EXPECT_THAT(errors, IsEmpty()) << errors.front().to_string();
  return set;
}

struct Asked {
  std::vector<Entry> entries;
  Request request;
  Asked(std::string_view domain, std::vector<Entry> list) : entries(std::move(list)) {
    request.domain = domain;
    request.descriptor = entries;
  }
  Asked(const Asked&) = delete;
  Asked& operator=(const Asked&) = delete;
};

bool matches(const Rule& rule, std::vector<Entry> entries) {
  return rule.matches(Asked("api", std::move(entries)).request);
}

TEST(Cidr, ReadsNetworksAndHosts) {
  const auto v4 = parse_cidr("10.0.0.0/8");
  ASSERT_TRUE(v4);
  EXPECT_EQ(v4->bits, 104u);
  EXPECT_THAT(v4->network, ElementsAre(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xFF, 0xFF, 10, 0, 0, 0));
  const auto v6 = parse_cidr("2001:db8::/32");
  ASSERT_TRUE(v6);
  EXPECT_EQ(v6->bits, 32u);
  EXPECT_THAT(v6->network, ElementsAre(0x20, 0x01, 0x0D, 0xB8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0));
  EXPECT_EQ(parse_cidr("10.1.2.3")->bits, 128u);
  EXPECT_EQ(parse_cidr("::1")->bits, 128u);
  EXPECT_EQ(parse_cidr("0.0.0.0/0")->bits, 96u);
  EXPECT_EQ(parse_cidr("::/0")->bits, 0u);
  EXPECT_EQ(parse_cidr("::ffff:10.0.0.0/104"), v4);
}

TEST(Cidr, RefusesWhatIsNoNetwork) {
  using namespace std::string_view_literals;
  for (const std::string_view text : {""sv,
                                      "/"sv,
                                      "10.0.0.0/"sv,
                                      "10.0.0.0/33"sv,
                                      "::/129"sv,
                                      "10.0.0.0/08"sv,
                                      "10.0.0.0/-1"sv,
                                      "10.0.0.0/+8"sv,
                                      "10.0.0.0/8 "sv,
                                      " 10.0.0.0/8"sv,
                                      "10.0.0.0/8/8"sv,
                                      "10.0.0/8"sv,
                                      "010.0.0.0/8"sv,
                                      "10.0.0.256"sv,
                                      "10.0.0.1/8"sv,
                                      "2001:db8::1/32"sv,
                                      "fe80::1%eth0"sv,
                                      "[::1]"sv,
                                      "host"sv,
                                      "10.0.0.0\0/8"sv,
                                      "10.0.0.1\0"sv,
                                      "10.0.0.0/9999999999"sv,
                                      "11111111111111111111111111111111111111111111111111/8"sv}) {
    EXPECT_FALSE(parse_cidr(text)) << text;
  }
}

TEST(Matches, ExactPrefixAnyAbsent) {
  Rule rule;
  rule.match = {{"path", MatchExact{"/v1/"}}};
  EXPECT_TRUE(matches(rule, {{"path", "/v1/"}}));
  EXPECT_FALSE(matches(rule, {{"path", "/v1/x"}}));
  EXPECT_FALSE(matches(rule, {{"other", "/v1/"}}));
  rule.match = {{"path", MatchPrefix{"/v1/"}}};
  EXPECT_TRUE(matches(rule, {{"path", "/v1/x"}}));
  EXPECT_FALSE(matches(rule, {{"path", "/v1"}}));
  EXPECT_FALSE(matches(rule, {}));
  rule.match = {{"path", MatchAny{}}};
  EXPECT_TRUE(matches(rule, {{"path", ""}}));
  EXPECT_FALSE(matches(rule, {{"Path", "x"}}));
  rule.match = {{"path", MatchAbsent{}}};
  EXPECT_TRUE(matches(rule, {{"Path", "x"}}));
  EXPECT_FALSE(matches(rule, {{"path", ""}}));
}

TEST(Matches, AllMustHoldAndNoneMatchesEverything) {
  Rule rule;
  EXPECT_TRUE(matches(rule, {}));
  rule.match = {{"method", MatchExact{"GET"}}, {"ip", MatchAny{}}};
  EXPECT_TRUE(matches(rule, {{"ip", "x"}, {"method", "GET"}}));
  EXPECT_FALSE(matches(rule, {{"ip", "x"}, {"method", "PUT"}}));
  EXPECT_FALSE(matches(rule, {{"method", "GET"}}));
}

TEST(Matches, TheFirstOfTwoEntriesCounts) {
  Rule rule;
  rule.match = {{"user", MatchExact{"ann"}}};
  EXPECT_TRUE(matches(rule, {{"user", "ann"}, {"user", "bob"}}));
  EXPECT_FALSE(matches(rule, {{"user", "bob"}, {"user", "ann"}}));
}

TEST(Matches, EveryKeyEntryMustBeThere) {
  Rule rule;
  rule.key = {"user", "ip"};
  EXPECT_TRUE(matches(rule, {{"ip", "x"}, {"user", ""}}));
  EXPECT_FALSE(matches(rule, {{"ip", "x"}}));
  // Names are compared whole: nothing is joined.
  EXPECT_FALSE(matches(rule, {{"userip", "x"}, {"user,ip", "x"}}));
}

TEST(Matches, Networks) {
  Rule rule;
  const auto within = [&](std::string_view network, std::string_view ip) {
    rule.match = {{"ip", *parse_cidr(network)}};
    return matches(rule, {{"ip", ip}});
  };
  EXPECT_TRUE(within("10.0.0.0/8", "10.255.0.1"));
  EXPECT_FALSE(within("10.0.0.0/8", "11.0.0.0"));
  EXPECT_TRUE(within("10.0.0.0/8", "::ffff:10.1.2.3"));
  EXPECT_TRUE(within("192.168.128.0/17", "192.168.255.255"));
  EXPECT_FALSE(within("192.168.128.0/17", "192.168.127.255"));
  EXPECT_TRUE(within("10.1.2.3", "10.1.2.3"));
  EXPECT_FALSE(within("10.1.2.3", "10.1.2.2"));
  EXPECT_TRUE(within("0.0.0.0/0", "255.255.255.255"));
  EXPECT_FALSE(within("0.0.0.0/0", "2001:db8::1"));
  EXPECT_TRUE(within("::/0", "2001:db8::1"));
  EXPECT_TRUE(within("::/0", "10.0.0.1"));
  EXPECT_TRUE(within("2001:db8::/33", "2001:DB8:7fff::1"));
  EXPECT_FALSE(within("2001:db8::/33", "2001:db8:8000::1"));
  for (const char* ip : {"10.0.0.1:80", "[::1]", "[::1]:65535", "[::ffff:10.0.0.1]:1"}) {
    EXPECT_TRUE(within("::/0", ip)) << ip;
  }
  for (const char* ip : {"", "host", "10.0.0.1 ", "10.1", "0x0a.0.0.1",
                         "10.0.0.1:", "10.0.0.1:65536", "10.0.0.1:x", "[10.0.0.1]", "[::1", "::1]",
                         "[::1]80", "[::1]:", "[::1]:123456", "[]", ":", "fe80::1%eth0"}) {
    EXPECT_FALSE(within("::/0", ip)) << ip;
  }
}

TEST(Cost, ByMethodElseDefault) {
  Rule rule;
  EXPECT_EQ(rule.cost_of(Asked("api", {{"method", "POST"}}).request), 1u);
  rule.cost_by_method = {{"POST", 5}, {"HEAD", 0}};
  rule.default_cost = 2;
  EXPECT_EQ(rule.cost_of(Asked("api", {{"method", "POST"}}).request), 5u);
  EXPECT_EQ(rule.cost_of(Asked("api", {{"method", "HEAD"}}).request), 0u);
  EXPECT_EQ(rule.cost_of(Asked("api", {{"method", "post"}}).request), 2u);
  EXPECT_EQ(rule.cost_of(Asked("api", {{"ip", "POST"}}).request), 2u);
}

TEST(RuleError, Reads) {
  RuleError error{"rules.yaml", 12, 5, "rules[2].window", "a length of time"};
  EXPECT_EQ(error.to_string(), "rules.yaml:12:5: rules[2].window: expected a length of time");
  error.file = "";
  EXPECT_EQ(error.to_string(), "12:5: rules[2].window: expected a length of time");
  error.line = 0;
  EXPECT_EQ(error.to_string(), "rules[2].window: expected a length of time");
  error.field = "";
  error.file = "rules.yaml";
  EXPECT_EQ(error.to_string(), "rules.yaml: expected a length of time");
}

TEST(Words, OfEveryValue) {
  EXPECT_EQ(to_string(Algorithm::fixed_window), "fixed_window");
  EXPECT_EQ(to_string(Algorithm::sliding_window), "sliding_window");
  EXPECT_EQ(to_string(Algorithm::token_bucket), "token_bucket");
  EXPECT_EQ(to_string(Durability::async), "async");
  EXPECT_EQ(to_string(Durability::commit), "commit");
  EXPECT_EQ(to_string(OnFailure::open), "open");
  EXPECT_EQ(to_string(OnFailure::closed), "closed");
}

TEST(Make, AcceptsTheExtremes) {
  Rule rule = valid_rule();
  rule.domain = std::string(256, 'd');
  rule.name = std::string(256, 'n');
  rule.limit = kMax;
  rule.window = kMillisecond;
  rule.key.clear();
  for (int i = 0; i < 16; ++i) rule.key.push_back("k" + std::to_string(i));
  EXPECT_THAT(errors_of(rule), IsEmpty());
  rule.limit = 0;
  rule.window = 366 * kDay;
  EXPECT_THAT(errors_of(rule), IsEmpty());

  Rule wide = bucket();
  wide.limit = kMax;
  wide.window = kMillisecond;
  wide.max_debt = 0;
  wide.burst = kMax;
  EXPECT_THAT(errors_of(wide), IsEmpty());
  wide.max_debt = 1000;
  wide.burst = kMax / 1001;
  EXPECT_THAT(errors_of(wide), IsEmpty());

  Rule ring = sliding();
  ring.slots = 120;
  ring.strict = true;
  EXPECT_THAT(errors_of(ring), IsEmpty());
}

TEST(Make, RefusesABucketThatFillsForYears) {
  Rule slow = bucket();
  slow.limit = 1;
  slow.window = 30 * kDay;
  slow.burst = 13;
  EXPECT_THAT(errors_of(slow), IsEmpty());
  slow.burst = 14;
  EXPECT_THAT(errors_of(slow), ElementsAre(HasSubstr("a bucket that fills within 800d")));
}

TEST(Make, FillsInTheBurst) {
  Rule given = bucket();
  given.name = "given";
  given.burst = 7;
  Rule zero = given;
  zero.name = "zero";
  zero.limit = 0;
  Rule window = valid_rule();
  window.name = "window";
  const auto set = make({bucket(), given, zero, window});
  ASSERT_NE(set, nullptr);
  EXPECT_EQ(set->rules()[0].burst, 100u);
  EXPECT_EQ(set->rules()[1].burst, 7u);
  EXPECT_EQ(set->rules()[2].burst, 0u);
  EXPECT_EQ(set->rules()[3].burst, 0u);
  // What a set holds is itself valid, and stays as it is.
  EXPECT_EQ(make(set->rules())->rules(), set->rules());
}

Rule log_of(std::uint64_t limit, Nanos window) {
  Rule rule = valid_rule();
  rule.algorithm = Algorithm::sliding_log;
  rule.limit = limit;
  rule.window = window;
  return rule;
}

TEST(Make, ALogIsBounded) {
  EXPECT_THAT(errors_of(log_of(1024, kSecond / 4)), IsEmpty());
  EXPECT_THAT(errors_of(log_of(0, kMillisecond)), IsEmpty());
  EXPECT_THAT(errors_of(log_of(1024, 366 * kDay)), IsEmpty());
  EXPECT_THAT(errors_of(log_of(1025, kDay)),
              ElementsAre("rules[0].limit: expected at most 1024 with algorithm sliding_log, which "
                          "remembers every admission, got 1025; sliding_window takes more"));
  EXPECT_THAT(errors_of(log_of(kMax, kDay)), ElementsAre(HasSubstr("at most 1024")));
  EXPECT_THAT(errors_of(log_of(5, kMillisecond)),
              ElementsAre("rules[0].limit: expected at most 4096 a second with algorithm "
                          "sliding_log, which remembers every admission, got 5 in 1ms"));
}

TEST(Make, ALeakyBucketsQueueIsTheLimitUnlessItSays) {
  Rule leaky = bucket();
  leaky.algorithm = Algorithm::leaky_bucket;
  EXPECT_EQ(make({leaky})->rules()[0].burst, leaky.limit);
  leaky.burst = 7;
  EXPECT_EQ(make({leaky})->rules()[0].burst, 7u);
  leaky.strict = true;
  EXPECT_THAT(errors_of(leaky), ElementsAre(HasSubstr("no strict with algorithm leaky_bucket")));
}

TEST(Make, ACalendarIsReadWhenTheSetIsMade) {
  Rule monthly = valid_rule();
  monthly.calendar = CalendarWindow{CalendarUnit::month, "Europe/Berlin"};
  monthly.window = 0;  // not used
  Rule again = monthly;
  again.name = "again";
  const auto set = make({monthly, again});
  ASSERT_NE(set, nullptr);
  EXPECT_NE(set->rules()[0].calendar->table, nullptr);
  EXPECT_EQ(set->rules()[0].calendar->table, set->rules()[1].calendar->table);
  EXPECT_EQ(make(set->rules())->rules(), set->rules());

  Rule bad = monthly;
  bad.calendar->time_zone = "Europe/Atlantis";
  EXPECT_THAT(errors_of(bad),
              ElementsAre("rules[0].window.time_zone: expected a time zone of the system's "
                          "database, such as UTC or Europe/Berlin, got \"Europe/Atlantis\""));
  bad = monthly;
  bad.phase = Phase::spread;
  EXPECT_THAT(errors_of(bad), ElementsAre("rules[0].phase: expected aligned, got spread: a "
                                          "calendar's windows begin when the calendar says"));
  for (Algorithm algorithm : {Algorithm::sliding_window, Algorithm::sliding_log,
                              Algorithm::token_bucket, Algorithm::leaky_bucket}) {
    bad = monthly;
    bad.algorithm = algorithm;
    EXPECT_THAT(
        errors_of(bad),
        ElementsAre("rules[0].window: expected a length of time with algorithm " +
                    std::string(to_string(algorithm)) + ": only fixed_window follows a calendar"));
  }
}

TEST(Make, RefusesEachBadValue) {
  const auto error = [](Rule rule, auto&& change) {
    change(rule);
    const std::vector<std::string> errors = errors_of(rule);
    return errors.size() == 1 ? errors[0] : "errors: " + std::to_string(errors.size());
  };
  const auto window = valid_rule();
  EXPECT_EQ(error(window, [](Rule& r) { r.domain = ""; }),
            "rules[0].domain: expected a name of at least one byte");
  EXPECT_EQ(error(window, [](Rule& r) { r.name = std::string(257, 'x'); }),
            "rules[0].name: expected a name of at most 256 bytes, got 257");
  EXPECT_EQ(error(window, [](Rule& r) { r.name = "a\nb\xff"; }),
            "rules[0].name: expected UTF-8 text without control characters, got \"a\\x0ab\\xff\"");
  EXPECT_EQ(error(window, [](Rule& r) { r.window = 0; }),
            "rules[0].window: expected 1ms to 366d, got 0s");
  EXPECT_EQ(error(window, [](Rule& r) { r.window = -kMinute; }),
            "rules[0].window: expected 1ms to 366d, got -1m");
  EXPECT_EQ(error(window, [](Rule& r) { r.window = kMillisecond - 1; }),
            "rules[0].window: expected 1ms to 366d, got 999us999ns");
  EXPECT_EQ(error(window, [](Rule& r) { r.window = 366 * kDay + 1; }),
            "rules[0].window: expected 1ms to 366d, got 366d1ns");
  EXPECT_EQ(error(window, [](Rule& r) { r.burst = 5; }),
            "rules[0].burst: expected no burst with algorithm fixed_window: only token_bucket and "
            "leaky_bucket have it");
  EXPECT_THAT(error(sliding(), [](Rule& r) { r.max_debt = 2; }), HasSubstr("no max_debt with"));
  EXPECT_THAT(error(window, [](Rule& r) { r.slots = 2; }), HasSubstr("no slots with"));
  EXPECT_THAT(error(bucket(), [](Rule& r) { r.strict = true; }), HasSubstr("no strict with"));
  EXPECT_EQ(error(sliding(), [](Rule& r) { r.slots = 0; }),
            "rules[0].slots: expected 1 to 120, got 0");
  EXPECT_EQ(error(sliding(), [](Rule& r) { r.slots = 121; }),
            "rules[0].slots: expected 1 to 120, got 121");
  EXPECT_EQ(error(sliding(), [](Rule& r) { r.slots = 7; }),
            "rules[0].slots: expected a number that divides the window of 1m into whole "
            "nanoseconds, got 7");
  EXPECT_EQ(error(bucket(), [](Rule& r) { r.max_debt = 1001; }),
            "rules[0].max_debt: expected 0 to 1000, got 1001");
  EXPECT_THAT(error(bucket(), [](Rule& r) { r.burst = kMax / 2 + 1; }),
              HasSubstr("rules[0].burst: expected burst * (1 + max_debt) below 2^64"));
  EXPECT_THAT(error(bucket(), [](Rule& r) { r.limit = kMax; }), HasSubstr("rules[0].limit: "));
  EXPECT_THAT(
      error(bucket(), [](Rule& r) { r.max_debt = std::numeric_limits<std::uint32_t>::max(); }),
      HasSubstr("rules[0].max_debt: "));
  EXPECT_THAT(error(window, [](Rule& r) { r.key.assign(17, "k"); }), HasSubstr("at most 16"));
  EXPECT_THAT(error(window,
                    [](Rule& r) {
                      r.key = {"a", "b", "a"};
                    }),
              HasSubstr("rules[0].key[2]: expected each entry once"));
  EXPECT_THAT(error(window, [](Rule& r) { r.key = {""}; }), HasSubstr("rules[0].key[0]: "));
  EXPECT_THAT(error(window,
                    [](Rule& r) {
                      r.key = {"user"};
                      r.match = {{"user", MatchAbsent{}}};
                    }),
              HasSubstr("would never apply"));
  EXPECT_THAT(error(window,
                    [](Rule& r) {
                      r.match = {{"", MatchAny{}}};
                    }),
              HasSubstr("rules[0].match."));
  EXPECT_THAT(error(window,
                    [](Rule& r) {
                      r.match.assign(65, {"a", MatchAny{}});
                    }),
              HasSubstr("rules[0].match: expected at most 64"));
  EXPECT_THAT(error(window,
                    [](Rule& r) {
                      r.match = {{"a", MatchPrefix{""}}};
                    }),
              HasSubstr("write any"));
  EXPECT_THAT(error(window,
                    [](Rule& r) {
                      r.match = {{"a", MatchExact{std::string(4097, 'x')}}};
                    }),
              HasSubstr("at most 4096 bytes, got 4097"));
  EXPECT_THAT(error(window,
                    [](Rule& r) {
                      MatchCidr cidr = *parse_cidr("10.0.0.0/8");
                      cidr.network[15] = 1;
                      r.match = {{"ip", cidr}};
                    }),
              HasSubstr("rules[0].match.ip: "));
  EXPECT_THAT(error(window,
                    [](Rule& r) {
                      r.match = {{"ip", MatchCidr{{}, 129}}};
                    }),
              HasSubstr("at most 128 bits"));
  EXPECT_THAT(error(window,
                    [](Rule& r) {
                      r.cost_by_method = {{"", 1}};
                    }),
              HasSubstr("rules[0].cost."));
  EXPECT_THAT(error(window,
                    [](Rule& r) {
                      for (int i = 0; i < 65; ++i) r.cost_by_method["M" + std::to_string(i)] = 1;
                    }),
              HasSubstr("at most 64 methods"));
}

TEST(Make, ReportsEveryErrorAndAppends) {
  Rule first = valid_rule();
  first.name = "";
  first.window = 0;
  Rule second = sliding();
  second.slots = 0;
  std::vector<RuleError> errors(1);
  EXPECT_EQ(RuleSet::make({first, second}, errors), nullptr);
  ASSERT_EQ(errors.size(), 4u);
  EXPECT_EQ(errors[1].field, "rules[0].name");
  EXPECT_EQ(errors[2].field, "rules[0].window");
  EXPECT_EQ(errors[3].field, "rules[1].slots");
  // Errors of others do not make good rules bad.
  EXPECT_NE(RuleSet::make({valid_rule()}, errors), nullptr);
  EXPECT_EQ(errors.size(), 4u);
}

TEST(Make, NamesAreUniquePerDomain) {
  Rule other = valid_rule();
  other.domain = "web";
  EXPECT_THAT(errors_of({valid_rule(), other}), IsEmpty());
  EXPECT_THAT(errors_of({valid_rule(), other, valid_rule()}),
              ElementsAre("rules[2].name: expected a name that is unique in its domain: "
                          "\"per-key\" is already the name of the rule at rules[0]"));
  // ("a", "bc") and ("ab", "c") are different names.
  Rule left = valid_rule();
  left.domain = "a";
  left.name = "bc";
  Rule right = valid_rule();
  right.domain = "ab";
  right.name = "c";
  EXPECT_THAT(errors_of({left, right}), IsEmpty());
}

TEST(Make, BoundsTheNumberOfRulesAndOfErrors) {
  std::vector<Rule> rules(100'000, valid_rule());
  for (std::size_t i = 0; i < rules.size(); ++i) rules[i].name = std::to_string(i);
  EXPECT_THAT(errors_of(rules), IsEmpty());
  rules.push_back(valid_rule());
  EXPECT_THAT(errors_of(rules), ElementsAre("rules: expected at most 100000 rules, got 100001"));
  rules.pop_back();
  for (Rule& rule : rules) rule.window = 0;
  EXPECT_EQ(errors_of(rules).size(), 1000u);
}

TEST(Match, FindsTheDomainsRulesInOrder) {
  Rule everything = valid_rule();
  everything.name = "everything";
  Rule per_user = valid_rule();
  per_user.name = "per-user";
  per_user.key = {"user"};
  Rule web = everything;
  web.domain = "web";
  Rule reads = valid_rule();
  reads.name = "reads";
  reads.match = {{"method", MatchExact{"GET"}}};
  const auto set = make({reads, web, per_user, everything});
  ASSERT_NE(set, nullptr);
  const auto match = [&](const Asked& asked) {
    std::vector<std::uint32_t> out = {99};
    set->match(asked.request, out);
    return out;
  };
  EXPECT_THAT(match(Asked("api", {{"method", "GET"}, {"user", "ann"}})), ElementsAre(99, 0, 2, 3));
  EXPECT_THAT(match(Asked("api", {{"method", "PUT"}})), ElementsAre(99, 3));
  EXPECT_THAT(match(Asked("web", {{"method", "GET"}})), ElementsAre(99, 1));
  EXPECT_THAT(match(Asked("ap", {})), ElementsAre(99));
  EXPECT_THAT(match(Asked("", {})), ElementsAre(99));
  // Of several descriptors, each rule once.
  const std::vector<Entry> user = {{"user", "ann"}};
  const std::vector<Entry> read = {{"method", "GET"}};
  const std::vector<Descriptor> more = {{user, 1}, {read, 1}};
  Asked several("api", {{"method", "PUT"}});
  several.request.more = more;
  EXPECT_THAT(match(several), ElementsAre(99, 0, 2, 3));
  const std::vector<std::string_view> rule_filter = {"per-user"};
  several.request.rule_filter = rule_filter;
  EXPECT_THAT(match(several), ElementsAre(99, 2));
}

}  // namespace
}  // namespace weir
