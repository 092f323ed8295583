#include <weir/limits/matching/rule_index.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <weir/limits/counted_new.h>

#include <string>
#include <thread>
#include <vector>

namespace weir {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

using Found = std::vector<std::uint32_t>;

Rule rule_of(std::vector<Match> match, std::vector<std::string> key = {},
             std::string domain = "api") {
  Rule rule;
  rule.domain = std::move(domain);
  rule.match = std::move(match);
  rule.key = std::move(key);
  return rule;
}

/// Rules that no request meets, so that the others do not stand in a short list.
std::vector<Rule> with_filler(std::vector<Rule> rules) {
  for (int i = 0; i < 20; ++i) {
    const std::string text = "filler-" + std::to_string(i);
    rules.push_back(rule_of({{"filler", MatchExact{text}}}));
    rules.push_back(rule_of({{"filler", MatchPrefix{text + "/"}}}));
  }
  return rules;
}

Found scan(const std::vector<Rule>& rules, const Request& request) {
  Found out;
  for (std::uint32_t i = 0; i < rules.size(); ++i) {
    if (rules[i].domain == request.domain && rules[i].matches(request)) out.push_back(i);
  }
  return out;
}

/// What the index finds; a scan must agree.
Found find(const RuleIndex& index, const std::vector<Rule>& rules, std::vector<Entry> descriptor,
           std::string_view domain = "api") {
  const Request request{domain, descriptor, 1};
  Found out;
  index.match(request, out);
  EXPECT_EQ(out, scan(rules, request));
  return out;
}

TEST(RuleIndex, OfNoRulesFindsNone) {
  const std::vector<Rule> none;
  const RuleIndex index(none);
  EXPECT_THAT(find(index, none, {}), IsEmpty());
  EXPECT_THAT(find(index, none, {{"path", "/"}}), IsEmpty());
}

TEST(RuleIndex, AppendsInRuleOrder) {
  const std::vector<Rule> rules = with_filler({
      rule_of({}),
      rule_of({{"path", MatchPrefix{"/a"}}}),
      rule_of({{"path", MatchExact{"/a/b"}}}),
      rule_of({}, {}, "web"),
      rule_of({{"path", MatchAny{}}}, {"user"}),
      rule_of({{"user", MatchAbsent{}}}),
      rule_of({{"ip", *parse_cidr("10.0.0.0/8")}}),
  });
  const RuleIndex index(rules);
  EXPECT_THAT(find(index, rules, {{"path", "/a/b"}, {"ip", "10.1.1.1"}}),
              ElementsAre(0, 1, 2, 5, 6));
  EXPECT_THAT(find(index, rules, {{"user", ""}, {"path", ""}}), ElementsAre(0, 4));
  EXPECT_THAT(find(index, rules, {}, "web"), ElementsAre(3));
  EXPECT_THAT(find(index, rules, {}, "we"), IsEmpty());
  EXPECT_THAT(find(index, rules, {}, ""), IsEmpty());
  Found out{99};
  index.match({"web", {}, 1}, out);
  EXPECT_THAT(out, ElementsAre(99, 3));
}

TEST(RuleIndex, FindsEveryPrefixOfAValue) {
  std::vector<Rule> rules;
  for (const char* prefix :
       {"", "/", "/a", "/a/", "/a/b", "/a/b/c", "/ab", "/b", "/a/b", "/\xff", "/\x01", "z"}) {
    rules.push_back(rule_of({{"path", MatchPrefix{prefix}}}));
  }
  const RuleIndex index(rules);
  EXPECT_THAT(find(index, rules, {{"path", "/a/b/c/d"}}), ElementsAre(0, 1, 2, 3, 4, 5, 8));
  EXPECT_THAT(find(index, rules, {{"path", "/a/b"}}), ElementsAre(0, 1, 2, 3, 4, 8));
  EXPECT_THAT(find(index, rules, {{"path", "/ab"}}), ElementsAre(0, 1, 2, 6));
  EXPECT_THAT(find(index, rules, {{"path", "/\xff\xff"}}), ElementsAre(0, 1, 9));
  EXPECT_THAT(find(index, rules, {{"path", "/\x01"}}), ElementsAre(0, 1, 10));
  EXPECT_THAT(find(index, rules, {{"path", ""}}), ElementsAre(0));
  EXPECT_THAT(find(index, rules, {{"other", "/a"}}), IsEmpty());
  for (const char* path : {"/", "/a/", "/a/b/", "/a/c", "/abc", "y", "zz"}) {
    find(index, rules, {{"path", path}});
  }
}

TEST(RuleIndex, FindsEveryNetworkAroundAnAddress) {
  std::vector<Rule> rules;
  for (const char* network :
       {"::/0", "0.0.0.0/0", "10.0.0.0/8", "10.1.0.0/16", "10.1.2.0/24", "10.1.2.3/32",
        "10.1.0.0/16", "10.0.0.0/16", "10.128.0.0/9", "2001:db8::/32", "2001:db8:1::/48",
        "::ffff:10.1.0.0/112", "255.255.255.255", "ffff::/16"}) {
    rules.push_back(rule_of({{"ip", *parse_cidr(network)}}));
  }
  const RuleIndex index(rules);
  const auto at = [&](std::string_view ip) { return find(index, rules, {{"ip", ip}}); };
  EXPECT_THAT(at("10.1.2.3"), ElementsAre(0, 1, 2, 3, 4, 5, 6, 11));
  EXPECT_THAT(at("::ffff:10.1.2.3"), ElementsAre(0, 1, 2, 3, 4, 5, 6, 11));
  EXPECT_THAT(at("10.1.2.4"), ElementsAre(0, 1, 2, 3, 4, 6, 11));
  EXPECT_THAT(at("10.127.0.1"), ElementsAre(0, 1, 2));
  EXPECT_THAT(at("10.255.255.255"), ElementsAre(0, 1, 2, 8));
  EXPECT_THAT(at("11.0.0.0"), ElementsAre(0, 1));
  EXPECT_THAT(at("0.0.0.0"), ElementsAre(0, 1));
  EXPECT_THAT(at("255.255.255.255"), ElementsAre(0, 1, 12));
  EXPECT_THAT(at("2001:db8:1::5"), ElementsAre(0, 9, 10));
  EXPECT_THAT(at("::"), ElementsAre(0));
  EXPECT_THAT(at("ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"), ElementsAre(0, 13));
  for (const char* text : {"", "10.1.2", "10.1.2.3/32", "host", "010.1.2.3", "10.1.2.3 "}) {
    EXPECT_THAT(at(text), IsEmpty()) << text;
  }
}

TEST(RuleIndex, AddressesBelowAllNetworks) {
  std::vector<Rule> rules;
  for (int i = 0; i < 20; ++i) {
    rules.push_back(rule_of({{"ip", *parse_cidr("192.0.2." + std::to_string(10 + i))}}));
  }
  const RuleIndex index(rules);
  EXPECT_THAT(find(index, rules, {{"ip", "1.1.1.1"}}), IsEmpty());
  EXPECT_THAT(find(index, rules, {{"ip", "::"}}), IsEmpty());
  EXPECT_THAT(find(index, rules, {{"ip", "192.0.2.10"}}), ElementsAre(0));
  EXPECT_THAT(find(index, rules, {{"ip", "192.0.2.30"}}), IsEmpty());
}

TEST(RuleIndex, NetworksOfAProgramCountAsRuleReadsThem) {
  MatchCidr loose = *parse_cidr("10.1.2.3");
  loose.bits = 104;  // RuleSet::make refuses bits behind the prefix
  MatchCidr long_one = *parse_cidr("10.1.2.3");
  long_one.bits = 200;
  const std::vector<Rule> rules =
      with_filler({rule_of({{"ip", loose}}), rule_of({{"ip", long_one}})});
  const RuleIndex index(rules);
  EXPECT_THAT(find(index, rules, {{"ip", "10.1.2.3"}}), ElementsAre(0, 1));
  EXPECT_THAT(find(index, rules, {{"ip", "11.1.2.3"}}), IsEmpty());
}

TEST(RuleIndex, TheFirstOfTwoEntriesCounts) {
  const std::vector<Rule> rules = with_filler({rule_of({{"user", MatchExact{"ann"}}})});
  const RuleIndex index(rules);
  EXPECT_THAT(find(index, rules, {{"user", "ann"}, {"user", "bob"}}), ElementsAre(0));
  EXPECT_THAT(find(index, rules, {{"user", "bob"}, {"user", "ann"}}), IsEmpty());
}

TEST(RuleIndex, SeveralMatchersOfOneEntryMustAllHold) {
  const std::vector<Rule> rules = with_filler({
      rule_of({{"path", MatchPrefix{"/a"}}, {"path", MatchPrefix{"/a/b"}}}),
      rule_of({{"path", MatchPrefix{"/a"}}, {"path", MatchExact{"/a/b"}}}),
      rule_of({{"path", MatchExact{"/a"}}, {"path", MatchExact{"/a/b"}}}),
      rule_of({{"path", MatchAny{}}, {"path", MatchAbsent{}}}),
      rule_of({{"path", MatchAbsent{}}}, {"path"}),
      rule_of({{"path", MatchExact{"/a/b"}}, {"path", MatchExact{"/a/b"}}}, {"path"}),
  });
  const RuleIndex index(rules);
  EXPECT_THAT(find(index, rules, {{"path", "/a/b"}}), ElementsAre(0, 1, 5));
  EXPECT_THAT(find(index, rules, {{"path", "/a/b/c"}}), ElementsAre(0));
  EXPECT_THAT(find(index, rules, {}), IsEmpty());
}

TEST(RuleIndex, FindsAmongManyWithTheSameConditions) {
  std::vector<Rule> rules;
  for (int i = 0; i < 1000; ++i) {
    Rule rule = rule_of({{"method", MatchExact{i % 2 == 0 ? "GET" : "PUT"}}}, {"user"});
    if (i % 3 == 0) rule.match.push_back({"path", MatchPrefix{"/" + std::to_string(i % 10)}});
    rules.push_back(std::move(rule));
  }
  const RuleIndex index(rules);
  EXPECT_THAT(find(index, rules, {{"method", "GET"}, {"user", "u"}, {"path", "/4"}}),
              SizeIs(333 + 33));
  EXPECT_THAT(find(index, rules, {{"method", "GET"}, {"path", "/4"}}), IsEmpty());
}

TEST(RuleIndex, KeysThatAreManyInTheRulesOrInTheRequest) {
  std::vector<Rule> rules;
  std::vector<std::string> names;
  for (int i = 0; i < 300; ++i) names.push_back("entry-" + std::to_string(i));
  for (const std::string& name : names) rules.push_back(rule_of({{name, MatchAny{}}}));
  for (const std::string& name : names) rules.push_back(rule_of({{name, MatchAbsent{}}}));
  const RuleIndex index(rules);
  EXPECT_THAT(find(index, rules, {{"entry-7", "x"}}), SizeIs(300));
  std::vector<Entry> all;
  for (const std::string& name : names) all.push_back({name, "x"});
  all.push_back({"unheard of", "x"});
  EXPECT_THAT(find(index, rules, all), SizeIs(300));
}

TEST(RuleIndex, TextsOfEveryLength) {
  std::vector<Rule> rules;
  std::vector<std::string> texts;
  for (std::size_t size = 0; size < 70; ++size) {
    for (const char last : {'a', 'b'}) {
      std::string text(size, 'x');
      if (size > 0) text[size / 2] = last;
      texts.push_back(text);
      rules.push_back(rule_of({{"user", MatchExact{text}}}));
    }
  }
  const RuleIndex index(rules);
  for (std::size_t i = 0; i < texts.size(); ++i) {
    EXPECT_THAT(find(index, rules, {{"user", texts[i]}}), SizeIs(texts[i].empty() ? 2 : 1));
  }
}

TEST(RuleIndex, AllocatesNothingOnceWarm) {
  std::vector<Rule> rules;
  for (int i = 0; i < 100; ++i) {
    rules.push_back(rule_of({{"user", MatchExact{std::to_string(i)}}}, {"ip"}));
    rules.push_back(rule_of({{"path", MatchPrefix{"/" + std::to_string(i)}}}));
    rules.push_back(rule_of({{"ip", *parse_cidr("10.0.0." + std::to_string(i))}}));
    rules.push_back(rule_of({{"method", MatchExact{"GET"}}}));
  }
  const RuleIndex index(rules);
  const std::vector<Entry> descriptor{
      {"user", "7"}, {"path", "/70"}, {"ip", "10.0.0.70"}, {"method", "GET"}};
  const Request request{"api", descriptor, 1};
  Found out;
  index.match(request, out);
  EXPECT_THAT(out, SizeIs(1 + 2 + 1 + 100));
  const std::size_t before = allocations;
  for (int i = 0; i < 100; ++i) {
    out.clear();
    index.match(request, out);
  }
  EXPECT_EQ(allocations, before);
}

TEST(RuleIndex, IsReadByManyThreads) {
  std::vector<Rule> rules;
  for (int i = 0; i < 500; ++i) {
    rules.push_back(rule_of({{"user", MatchExact{std::to_string(i)}}}));
  }
  const RuleIndex index(rules);
  std::vector<std::thread> threads;
  std::vector<int> good(4);
  for (std::size_t t = 0; t < good.size(); ++t) {
    threads.emplace_back([&, t] {
      for (std::uint32_t i = 0; i < 500; ++i) {
        const std::string user = std::to_string(i);
        const Entry entry{"user", user};
        Found out;
        index.match({"api", {&entry, 1}, 1}, out);
        good[t] += out == Found{i} ? 1 : 0;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_THAT(good, ElementsAre(500, 500, 500, 500));
}

/// Sets that somebody might make to slow it down. Slow would be minutes.
TEST(RuleIndex, BuildsFromHostileSets) {
  {
    std::vector<Rule> rules(5'000, rule_of({}));
    for (Rule& rule : rules) {
      for (int i = 0; i < 64; ++i) rule.match.push_back({std::to_string(i), MatchExact{"x"}});
    }
    const RuleIndex index(rules);
    EXPECT_THAT(find(index, rules, {{"1", "x"}}), IsEmpty());
  }
  {
    std::vector<Rule> rules;
    for (std::size_t i = 0; i < 4096; ++i) {
      rules.push_back(rule_of({{"path", MatchPrefix{std::string(i, 'a')}}}));
      rules.push_back(rule_of({{"path", MatchPrefix{std::string(i, 'a') + "b"}}}));
    }
    const RuleIndex index(rules);
    const std::string path(4096, 'a');
    EXPECT_THAT(find(index, rules, {{"path", path}}), SizeIs(4096));
  }
}

}  // namespace
}  // namespace weir
