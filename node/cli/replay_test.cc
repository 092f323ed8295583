#include <weir/node/cli/replay.h>

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include <weir/limits/limiter.h>
#include <weir/limits/rules/rules_yaml.h>
#include <weir/node/cli/replay_report.h>
#include <weir/node/cli/request_log.h>

namespace weir::node {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr std::int64_t kBase = 1'700'000'040;  // a full minute, in seconds

std::string line(std::int64_t second, const std::string& ip, const std::string& path = "/",
                 const std::string& method = "GET") {
  const std::chrono::sys_seconds time{std::chrono::seconds(kBase + second)};
  return fmt::format("{} - - [{:%d/%b/%Y:%H:%M:%S} +0000] \"{} {} HTTP/1.1\" 200 1 \"-\" \"x\"\n",
                     ip, time, method, path);
}

std::shared_ptr<const RuleSet> rules_of(const std::string& rules) {
  LoadedRules loaded = parse_rules("domain: site\nrules:\n" + rules, "rules.yaml");
  for (const RuleError& error : loaded.errors) ADD_FAILURE() << error.to_string();
  return loaded.rules;
}

RequestLog read(const std::string& text, const std::shared_ptr<const RuleSet>& rules) {
  RequestLog log(rules->rules());
  std::istringstream in(text);
  std::string error;
  EXPECT_TRUE(log.read(in, error)) << error;
  return log;
}

struct Given {
  std::uint32_t regions = 1;
  Spread spread = Spread::client;
  Nanos sync_interval = 250 * kMillisecond;
  std::size_t top = 10;
};

ReplayOptions options_of(const std::shared_ptr<const RuleSet>& rules, const Given& given) {
  ReplayOptions options;
  options.rules = rules;
  options.domain = "site";
  options.regions = given.regions;
  options.spread = given.spread;
  options.sync_interval = given.sync_interval;
  options.top = given.top;
  return options;
}

ReplayReport run(const std::string& text, const std::string& rules, const Given& given = {}) {
  const auto parsed = rules_of(rules);
  return replay(options_of(parsed, given), read(text, parsed));
}

const std::string kPerIp = "  - { name: r, key: ip, limit: 10, window: 1m }\n";
const std::string kTogether = "  - { name: r, key: [], limit: 10, window: 1m }\n";

// Bursts, quiet hours and everything between, from a few clients.
std::string random_log(std::uint32_t seed, std::size_t requests) {
  std::mt19937 random(seed);
  std::string out;
  std::int64_t second = 0;
  for (std::size_t i = 0; i < requests; ++i) {
    const auto dice = random() % 100;
    if (dice == 0) {
      second += random() % 10000;
    } else if (dice < 40) {
      second += random() % 7;
    }
    const std::string ip = fmt::format("192.0.2.{}", random() % 6);
    out += line(second, ip, fmt::format("/{}", random() % 3), random() % 5 == 0 ? "POST" : "GET");
  }
  return out;
}

std::vector<std::string> paths(const RequestLog& log) {
  std::vector<std::string> out;
  for (const RequestLog::Record& record : log.records()) {
    out.emplace_back(log.value(record.values[3]));
  }
  return out;
}

const std::string kByPath = "  - { name: r, key: path, limit: 10, window: 1m }\n";

TEST(RequestLog, SortsByTimeAndKeepsTheOrderOfOneInstant) {
  const std::string text = line(5, "a", "/1") + line(3, "a", "/2") + line(5, "a", "/3") +
                           line(0, "a", "/4") + line(3, "a", "/5");
  const RequestLog log = read(text, rules_of(kByPath));
  EXPECT_THAT(paths(log), ElementsAre("/4", "/2", "/5", "/1", "/3"));
  EXPECT_EQ(log.records().front().time, kBase * kSecond);
  EXPECT_EQ(log.records().back().time, (kBase + 5) * kSecond);
}

TEST(RequestLog, NumbersMalformedLines) {
  const std::string text = "nonsense\n" + line(0, "a") + "\n" + line(1, "b") +
                           std::string(1, '\0') + "\n" + line(2, "c") + "cut short";
  const RequestLog log = read(text, rules_of(kPerIp));
  EXPECT_EQ(log.records().size(), 3u);
  EXPECT_EQ(log.malformed(), 4u);
  std::vector<std::uint64_t> numbers;
  for (const MalformedLine& bad : log.malformed_lines()) {
    numbers.push_back(bad.line);
    EXPECT_FALSE(bad.reason.empty());
  }
  EXPECT_THAT(numbers, ElementsAre(1, 3, 5, 7));
}

TEST(RequestLog, ListsOnlySoManyMalformedLinesButCountsAll) {
  std::string text;
  for (int i = 0; i < 1500; ++i) text += "?\n";
  const RequestLog log = read(text + line(0, "a"), rules_of(kPerIp));
  EXPECT_EQ(log.malformed(), 1500u);
  EXPECT_EQ(log.malformed_lines().size(), RequestLog::kMaxListed);
  EXPECT_EQ(log.records().size(), 1u);
}

TEST(RequestLog, AnEndlessLineIsOneMalformedLine) {
  const std::string text =
      line(0, "a") + std::string(3u << 20, 'x') + "\n" + line(1, "b") + std::string(1u << 20, 'y');
  const RequestLog log = read(text, rules_of(kPerIp));
  EXPECT_EQ(log.records().size(), 2u);
  ASSERT_EQ(log.malformed_lines().size(), 2u);
  EXPECT_EQ(log.malformed_lines()[0], (MalformedLine{2, "line: longer than 64 KiB"}));
  EXPECT_EQ(log.malformed_lines()[1], (MalformedLine{4, "line: longer than 64 KiB"}));
}

TEST(RequestLog, LinesAreWholeAcrossTheChunksOfReading) {
  std::string text;
  std::vector<std::string> expected;
  for (int i = 0; i < 9000; ++i) {
    expected.push_back(
        fmt::format("/{}/{}", i, std::string(static_cast<std::size_t>(i % 97), 'p')));
    text += line(i, "a", expected.back());
  }
  ASSERT_GT(text.size(), 3u * (256u << 10));
  text.pop_back();  // the last line has no end
  const RequestLog log = read(text, rules_of(kByPath));
  EXPECT_EQ(log.malformed(), 0u);
  EXPECT_EQ(paths(log), expected);
}

TEST(RequestLog, KeepsOnlyWhatRulesLookAt) {
  const auto keys = [](const std::string& rules) {
    const RequestLog log = read(line(0, "a"), rules_of(rules));
    std::array<Entry, 6> entries;
    std::vector<std::string> out;
    const std::size_t count = log.descriptor(log.records().at(0), entries);
    for (std::size_t i = 0; i < count; ++i) out.emplace_back(entries[i].key);
    return out;
  };
  EXPECT_THAT(keys(kPerIp), ElementsAre("ip"));
  EXPECT_THAT(keys("  - { name: r, key: path, match: { status: any }, limit: 1, window: 1m }\n"),
              ElementsAre("ip", "path", "status"));
  EXPECT_THAT(keys("  - { name: r, limit: 1, window: 1m, cost: { POST: 2 } }\n"),
              ElementsAre("ip", "method"));
  EXPECT_THAT(keys("  - { name: r, key: user_agent, limit: 1, window: 1m }\n"),
              ElementsAre("ip", "user_agent"));
}

TEST(RequestLog, AReadErrorIsReported) {
  class Broken : public std::streambuf {
    int_type underflow() override { throw std::ios_base::failure("gone"); }
  };
  Broken broken;
  std::istream in(&broken);
  const auto rules = rules_of(kPerIp);
  RequestLog log(rules->rules());
  std::string error;
  EXPECT_FALSE(log.read(in, error));
  EXPECT_FALSE(error.empty());
}

TEST(Replay, OrderOfLinesDoesNotMatterAcrossInstants) {
  const std::string rules =
      "  - { name: r, key: ip, limit: 2, window: 10s, algorithm: token_bucket, burst: 3 }\n";
  std::vector<std::string> lines;
  for (int i = 0; i < 60; ++i) lines.push_back(line(i * 2, fmt::format("192.0.2.{}", i % 2)));
  const auto join = [&] {
    std::string out;
    for (const std::string& text : lines) out += text;
    return out;
  };
  const ReplayReport sorted = run(join(), rules);
  ASSERT_GT(sorted.refused, 0u);
  ASSERT_GT(sorted.passed, 20u);
  std::mt19937 random(1);
  std::shuffle(lines.begin(), lines.end(), random);
  EXPECT_EQ(run(join(), rules), sorted);
}

class EveryAlgorithm : public testing::TestWithParam<std::string> {};

std::string rule_with(const std::string& algorithm) {
  const std::string window = algorithm.find("calendar") == algorithm.npos ? "window: 1m, " : "";
  return "  - { name: r, key: ip, limit: 8, " + window + algorithm + " }\n";
}

// One region, and no limiter but the plain one to compare with.
TEST_P(EveryAlgorithm, OneRegionEqualsOneLimiter) {
  for (std::uint32_t seed = 1; seed <= 5; ++seed) {
    const std::string text = random_log(seed, 1500);
    const auto rules = rules_of(rule_with(GetParam()));
    const RequestLog log = read(text, rules);
    Limiter limiter(rules, {});
    std::uint64_t allowed = 0;
    std::map<std::string, std::uint64_t> denied;
    for (const RequestLog::Record& record : log.records()) {
      std::array<Entry, 6> entries;
      const std::size_t count = log.descriptor(record, entries);
      const Request request{"site", std::span(entries).first(count)};
      if (limiter.check(request, record.time).allowed) {
        ++allowed;
      } else {
        ++denied[std::string(entries[0].value)];
      }
    }
    const ReplayReport report = replay(options_of(rules, {}), log);
    ASSERT_EQ(report.rules.size(), 1u);
    EXPECT_EQ(report.rules[0].allowed, allowed);
    EXPECT_EQ(report.rules[0].denied, log.records().size() - allowed);
    EXPECT_EQ(report.rules[0].over_admitted, 0u);
    EXPECT_EQ(report.passed, allowed);
    EXPECT_GT(report.refused, 0u);
    std::map<std::string, std::uint64_t> top;
    for (const DeniedKey& key : report.top_denied) top[key.entries.at(0).second] = key.denied;
    EXPECT_EQ(top, denied);
  }
}

// Seconds apart and an exchange in between: every region always knows everything.
TEST_P(EveryAlgorithm, RegionsThatExchangeBetweenRequestsAreOneLimiter) {
  std::string text;
  std::mt19937 random(3);
  std::int64_t second = 0;
  for (int i = 0; i < 1200; ++i) {
    second += 1 + (i % 200 == 199 ? 5000 : random() % 3);
    text += line(second, fmt::format("192.0.2.{}", random() % 3));
  }
  const ReplayReport one = run(text, rule_with(GetParam()));
  ReplayReport three = run(text, rule_with(GetParam()), {3, Spread::request});
  EXPECT_GT(one.refused, 100u);
  EXPECT_EQ(three, one);
}

TEST_P(EveryAlgorithm, RegionsThatNeverExchangeEachAdmitOnTheirOwn) {
  std::string text;
  for (int i = 0; i < 600; ++i) text += line(i / 20, "192.0.2.1");
  const std::string rules = rule_with(GetParam());
  const ReplayReport one = run(text, rules);
  const ReplayReport apart = run(text, rules, {3, Spread::request, kHour});
  const ReplayReport together = run(text, rules, {3, Spread::request, kSecond});
  EXPECT_GE(apart.rules[0].allowed, 3 * one.rules[0].allowed - 3);
  EXPECT_EQ(apart.rules[0].over_admitted, apart.rules[0].allowed - one.rules[0].allowed);
  EXPECT_LT(together.rules[0].over_admitted, apart.rules[0].over_admitted);
}

INSTANTIATE_TEST_SUITE_P(
    Algorithms, EveryAlgorithm,
    testing::Values("algorithm: fixed_window", "algorithm: fixed_window, phase: spread",
                    "algorithm: sliding_window", "algorithm: sliding_window, slots: 6",
                    "algorithm: sliding_window, slots: 6, strict: true", "algorithm: token_bucket",
                    "algorithm: token_bucket, burst: 3", "algorithm: leaky_bucket",
                    "algorithm: leaky_bucket, burst: 3", "algorithm: sliding_log",
                    "window: { calendar: day, time_zone: Europe/Berlin }",
                    "algorithm: fixed_window, cost: { POST: 3 }"),
    [](const auto& given) {
      std::string name = given.param;
      std::erase_if(name, [](char c) { return std::isalnum(static_cast<unsigned char>(c)) == 0; });
      return name;
    });

TEST(Replay, WithinOneInstantEachRegionAdmitsTheLimit) {
  std::string text;
  for (int i = 0; i < 60; ++i) text += line(0, "192.0.2.1");
  const ReplayReport report = run(text, kPerIp, {3, Spread::request});
  EXPECT_EQ(report.rules[0], (RuleOutcome{"r", false, 30, 30, 20}));
  // By the next second all have heard of it.
  const ReplayReport later =
      run(text + line(1, "192.0.2.1") + line(1, "192.0.2.1"), kPerIp, {3, Spread::request});
  EXPECT_EQ(later.rules[0], (RuleOutcome{"r", false, 30, 32, 20}));
}

// What is not known of the others when a region admits is what they admitted since the last
// exchange: of one interval's requests at most.
TEST(Replay, OverAdmissionIsAtMostWhatOneIntervalBrings) {
  constexpr std::int64_t kInterval = 5;
  std::uint64_t over = 0;
  for (std::uint32_t seed = 1; seed <= 20; ++seed) {
    std::mt19937 random(seed);
    std::string text = line(0, "192.0.2.1");
    std::map<std::int64_t, std::uint64_t> arrivals{{0, 1}};  // by interval, counted from the first
    std::map<std::int64_t, std::uint64_t> wanted{{0, 1}};    // by window
    std::int64_t second = 0;
    for (int i = 0; i < 400; ++i) {
      second += random() % 3;
      text += line(second, "192.0.2.1");
      ++arrivals[second / kInterval];
      ++wanted[second / 60];
    }
    const ReplayReport report = run(text, kPerIp, {4, Spread::request, kInterval * kSecond});
    std::uint64_t most = 0;
    for (const auto& [interval, count] : arrivals) most = std::max(most, count);
    std::uint64_t bound = 0;
    for (const auto& [window, count] : wanted)
      bound += std::min(count, 10 + most) - std::min<std::uint64_t>(count, 10);
    EXPECT_LE(report.rules[0].over_admitted, bound) << seed;
    over += report.rules[0].over_admitted;
  }
  EXPECT_GT(over, 20u);
}

TEST(Replay, AnExchangeCarriesAnyNumberOfKeys) {
  constexpr int kClients = 36'001;  // odd: round robin gives a client's second request to the other
  std::string text;
  for (std::int64_t second = 0; second < 2; ++second) {
    for (int i = 0; i < kClients; ++i) {
      text += line(second, fmt::format("10.0.{}.{}", i / 250, i % 250));
    }
  }
  for (const std::string algorithm : {"fixed_window", "token_bucket"}) {
    const ReplayReport report =
        run(text, "  - { name: r, key: ip, limit: 1, window: 1h, algorithm: " + algorithm + " }\n",
            {2, Spread::request});
    EXPECT_EQ(report.rules[0], (RuleOutcome{"r", false, kClients, kClients, 0})) << algorithm;
  }
}

TEST(Replay, SpreadByClientKeepsAClientInOneRegion) {
  std::string text;
  for (int i = 0; i < 3000; ++i) text += line(i / 100, fmt::format("192.0.2.{}", i % 31));
  // A day between exchanges: only a client that stays in one region is held to its limit.
  const ReplayReport client = run(text, kPerIp, {5, Spread::client, kDay});
  EXPECT_EQ(client.rules[0], (RuleOutcome{"r", false, 310, 2690, 0}));
  EXPECT_GT(run(text, kPerIp, {5, Spread::request, kDay}).rules[0].over_admitted, 0u);
  // And all regions are in use: together they admit five times the one count all share.
  EXPECT_EQ(run(text, kTogether, {5, Spread::client, kDay}).rules[0],
            (RuleOutcome{"r", false, 50, 2950, 40}));
}

TEST(Replay, CountsOfAllRulesAndOfRequests) {
  const std::string rules =
      "  - { name: posts, match: { method: POST }, key: ip, limit: 1, window: 1m }\n"
      "  - { name: trial, key: path, limit: 2, window: 1m, shadow: true,\n"
      "      match: { path: { prefix: /v1 } } }\n"
      "  - { name: idle, match: { user: any }, limit: 0, window: 1m }\n";
  std::string text;
  for (int i = 0; i < 3; ++i) text += line(i, "a", "/x", "POST");  // 1 passes
  for (int i = 0; i < 5; ++i) text += line(i, "b", "/v1");         // all pass, the trial says 2
  text += line(9, "c", "/other");                                  // no rule
  const ReplayReport report = run(text, rules);
  EXPECT_EQ(report.requests, 9u);
  EXPECT_EQ(report.passed, 7u);
  EXPECT_EQ(report.refused, 2u);
  EXPECT_EQ(report.unmatched, 1u);
  EXPECT_THAT(report.rules,
              ElementsAre(RuleOutcome{"posts", false, 1, 2, 0}, RuleOutcome{"trial", true, 2, 3, 0},
                          RuleOutcome{"idle", false, 0, 0, 0}));
  EXPECT_THAT(report.top_denied, ElementsAre(DeniedKey{"trial", {{"path", "/v1"}}, 3},
                                             DeniedKey{"posts", {{"ip", "a"}}, 2}));
}

TEST(Replay, MostDeniedKeysComeFirstAndTiesInAFixedOrder) {
  std::string text;
  const auto send = [&](const std::string& ip, int times) {
    for (int i = 0; i < times; ++i) text += line(i, ip);
  };
  send("d", 13);
  send("b", 12);
  send("c", 12);
  send("a", 12);
  send("e", 10);
  const auto ips = [&](std::size_t top) {
    std::vector<std::string> out;
    for (const DeniedKey& key : run(text, kPerIp, {1, Spread::client, kSecond, top}).top_denied) {
      out.push_back(key.entries.at(0).second);
    }
    return out;
  };
  EXPECT_THAT(ips(10), ElementsAre("d", "a", "b", "c"));
  EXPECT_THAT(ips(2), ElementsAre("d", "a"));
  EXPECT_THAT(ips(0), ElementsAre());
}

TEST(Replay, RulesOfOtherDomainsStayOut) {
  LoadedRules loaded = parse_rules(
      "domain: other\nrules:\n  - { name: o, limit: 0, window: 1m }\n---\n"
      "domain: site\nrules:\n  - { name: s, limit: 5, window: 1m }\n",
      "rules.yaml");
  ASSERT_NE(loaded.rules, nullptr);
  const ReplayReport report =
      replay(options_of(loaded.rules, {}), read(line(0, "a") + line(1, "a"), loaded.rules));
  EXPECT_THAT(report.rules, ElementsAre(RuleOutcome{"s", false, 2, 0, 0}));
}

TEST(Replay, ALogWithoutRequestsIsAnEmptyReport) {
  const ReplayReport report = run("nonsense\n", kPerIp);
  EXPECT_EQ(report.requests, 0u);
  EXPECT_THAT(report.rules, ElementsAre(RuleOutcome{"r", false, 0, 0, 0}));
  EXPECT_TRUE(report.top_denied.empty());
}

TEST(ReplayReport, JsonHasTheDocumentedFields) {
  std::string text = "bad\n";
  for (int i = 0; i < 24; ++i) text += line(0, "\xff\"\x01");
  const auto rules = rules_of("  - { name: r, key: [ip, path], limit: 10, window: 1m }\n");
  const RequestLog log = read(text, rules);
  const ReplayOptions options = options_of(rules, {2, Spread::request});
  const auto json = nlohmann::json::parse(replay_json(options, log, replay(options, log)));
  EXPECT_EQ(json.at("requests"), 24);
  EXPECT_EQ(json.at("malformed"), 1);
  const nlohmann::json rule{
      {"name", "r"}, {"allowed", 20}, {"denied", 4}, {"over_admitted", 10}, {"shadow", false}};
  EXPECT_EQ(json.at("rules"), nlohmann::json::array({rule}));
  ASSERT_EQ(json.at("top_denied").size(), 1u);
  const auto& top = json.at("top_denied")[0];
  EXPECT_EQ(top.at("rule"), "r");
  EXPECT_EQ(top.at("key"), "\uFFFD\"\x01, /");
  EXPECT_EQ(top.at("denied"), 4);
  EXPECT_EQ(top.at("entries").at("path"), "/");
  EXPECT_EQ(json.at("malformed_lines")[0].at("line"), 1);
  EXPECT_EQ(json.at("passed"), 20);
  EXPECT_EQ(json.at("refused"), 4);
  EXPECT_EQ(json.at("regions"), 2);
  EXPECT_EQ(json.at("spread"), "request");
  EXPECT_EQ(json.at("sync_interval"), "250ms");
  EXPECT_EQ(json.at("first"), "2023-11-14T22:14:00Z");
}

TEST(ReplayReport, TextListsTheFirstMalformedLines) {
  std::string text;
  for (int i = 0; i < 13; ++i) text += "bad\n";
  for (int i = 0; i < 12; ++i) text += line(0, "\x1b[31m");
  const auto rules = rules_of("  - { name: r, key: ip, limit: 10, window: 1m, shadow: true }\n");
  const RequestLog log = read(text, rules);
  const ReplayOptions options = options_of(rules, {});
  const std::string out = replay_text(options, log, replay(options, log), "access.log");
  EXPECT_THAT(out, HasSubstr("access.log: 12 requests"));
  EXPECT_THAT(out, HasSubstr("13 malformed lines\n"));
  EXPECT_THAT(out, HasSubstr("  line 10: "));
  EXPECT_THAT(out, testing::Not(HasSubstr("  line 11: ")));
  EXPECT_THAT(out, HasSubstr("  and 3 more\n"));
  EXPECT_THAT(out, HasSubstr("r (shadow)"));
  EXPECT_THAT(out, HasSubstr("\\x1b[31m"));
  EXPECT_THAT(out, testing::Not(HasSubstr("\x1b")));
}

}  // namespace
}  // namespace weir::node
