#include <weir/node/fronts/http/http_headers.h>

#include <map>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace weir::node {
namespace {

using Headers = std::map<std::string, std::string>;

Headers headers(const HttpAnswer& answer, ResetFormat reset = ResetFormat::seconds) {
  Headers out;
  for (const auto& [name, value] : rate_limit_headers(answer, reset)) {
    EXPECT_TRUE(out.emplace(name, value).second) << name;
    for (char c : value) EXPECT_TRUE(c >= ' ' && c <= '~') << name;
  }
  return out;
}

HttpStatus status(const std::string& rule, bool allowed) {
  HttpStatus out;
  out.rule = rule;
  out.allowed = allowed;
  out.limit = 100;
  out.remaining = allowed ? 40 : 0;
  out.reset = 30 * kSecond;
  out.retry_after = allowed ? 0 : 12 * kSecond;
  out.quota = 100;
  out.window = kMinute;
  return out;
}

TEST(HttpHeaders, SuccessDescribesTheDecidingRule) {
  HttpAnswer answer;
  answer.statuses = {status("burst", true), status("daily", true)};
  answer.statuses[1].quota = 1000;
  answer.statuses[1].window = kDay;
  answer.statuses[1].remaining = 7;
  answer.deciding = 1;
  EXPECT_EQ(headers(answer),
            (Headers{{"RateLimit-Policy", "\"daily\";q=1000;w=86400,\"burst\";q=100;w=60"},
                     {"RateLimit", "\"daily\";r=7;t=30"},
                     {"X-RateLimit-Limit", "100"},
                     {"X-RateLimit-Remaining", "7"},
                     {"X-RateLimit-Reset", "30"}}));
}

TEST(HttpHeaders, ADenialDescribesTheRuleThatDenied) {
  HttpAnswer answer;
  answer.allowed = false;
  answer.statuses = {status("passing", true), status("denying", false)};
  answer.statuses[0].reset = kHour;
  answer.statuses[1].retry_after = 11 * kSecond + 1;
  answer.deciding = 1;
  EXPECT_EQ(headers(answer),
            (Headers{{"RateLimit-Policy", "\"denying\";q=100;w=60,\"passing\";q=100;w=60"},
                     {"RateLimit", "\"denying\";r=0;t=12"},
                     {"X-RateLimit-Limit", "100"},
                     {"X-RateLimit-Remaining", "0"},
                     {"X-RateLimit-Reset", "12"},
                     {"Retry-After", "12"}}));
}

TEST(HttpHeaders, ADelayIsTold) {
  HttpAnswer answer;
  answer.statuses = {status("smooth", true), status("daily", true)};
  answer.statuses[0].delay = 2 * kMillisecond + 1;
  answer.deciding = 1;
  EXPECT_EQ(headers(answer).at("X-RateLimit-Delay-Ms"), "3");
  answer.statuses[0].shadow = true;
  EXPECT_FALSE(headers(answer).contains("X-RateLimit-Delay-Ms"));
}

TEST(HttpHeaders, NeverTellsNoTime) {
  HttpAnswer answer;
  answer.allowed = false;
  answer.statuses = {status("small", false)};
  answer.statuses[0].retry_after = kNever;
  answer.deciding = 0;
  for (ResetFormat reset : {ResetFormat::seconds, ResetFormat::epoch}) {
    EXPECT_EQ(headers(answer, reset), (Headers{{"RateLimit-Policy", "\"small\";q=100;w=60"},
                                               {"RateLimit", "\"small\";r=0"},
                                               {"X-RateLimit-Limit", "100"},
                                               {"X-RateLimit-Remaining", "0"}}));
  }
}

TEST(HttpHeaders, ResetAsUnixTimeIsTheFirstSecondAfterTheInstant) {
  HttpAnswer answer;
  answer.statuses = {status("r", true)};
  answer.deciding = 0;
  answer.now = 1000 * kSecond + 600 * kMillisecond;
  answer.statuses[0].reset = 2 * kSecond + 300 * kMillisecond;  // 1002.9
  EXPECT_EQ(headers(answer, ResetFormat::epoch).at("X-RateLimit-Reset"), "1003");
  EXPECT_EQ(headers(answer, ResetFormat::seconds).at("X-RateLimit-Reset"), "3");
  answer.statuses[0].reset = 2 * kSecond + 500 * kMillisecond;  // 1003.1
  EXPECT_EQ(headers(answer, ResetFormat::epoch).at("X-RateLimit-Reset"), "1004");
  EXPECT_EQ(headers(answer, ResetFormat::epoch).at("RateLimit"), "\"r\";r=40;t=3");
}

TEST(HttpHeaders, ShadowRulesAreNoPolicy) {
  HttpAnswer answer;
  answer.statuses = {status("trial", false), status("real", true)};
  answer.statuses[0].shadow = true;
  answer.deciding = 1;
  EXPECT_EQ(headers(answer).at("RateLimit-Policy"), "\"real\";q=100;w=60");
  EXPECT_FALSE(headers(answer).contains("Retry-After"));
}

TEST(HttpHeaders, NoneWithoutADecidingRule) {
  HttpAnswer answer;
  EXPECT_EQ(headers(answer), Headers{});
  answer.statuses = {status("trial", false)};
  answer.statuses[0].shadow = true;
  EXPECT_EQ(headers(answer), Headers{});
  answer.deciding = 5;
  EXPECT_EQ(headers(answer), Headers{});
  answer.deciding = 0;
  answer.error = "busy";
  EXPECT_EQ(headers(answer), Headers{});
}

TEST(HttpHeaders, WindowsOfLessThanASecondAreRoundedUp) {
  HttpAnswer answer;
  answer.statuses = {status("r", true)};
  answer.deciding = 0;
  answer.statuses[0].window = 500 * kMillisecond;
  EXPECT_EQ(headers(answer).at("RateLimit-Policy"), "\"r\";q=100;w=1");
  answer.statuses[0].window = 0;
  EXPECT_EQ(headers(answer).at("RateLimit-Policy"), "\"r\";q=100");
}

TEST(HttpHeaders, ManyPoliciesAreCutBetweenItems) {
  HttpAnswer answer;
  for (int i = 0; i < 500; ++i)
    answer.statuses.push_back(status("rule-" + std::to_string(i), true));
  answer.deciding = 499;
  const std::string policies = headers(answer).at("RateLimit-Policy");
  EXPECT_LE(policies.size(), kMaxPolicyBytes);
  EXPECT_GT(policies.size(), kMaxPolicyBytes - 100);
  EXPECT_THAT(policies, testing::StartsWith("\"rule-499\";q=100;w=60,\"rule-0\";"));
  EXPECT_THAT(policies, testing::EndsWith(";q=100;w=60"));
}

TEST(HttpHeaders, TheDecidingPolicyIsToldHoweverLong) {
  HttpAnswer answer;
  answer.statuses = {status(std::string(5000, '\xff'), true)};
  answer.deciding = 0;
  const Headers all = headers(answer);
  EXPECT_THAT(all.at("RateLimit-Policy"), testing::EndsWith("%ff\";q=100;w=60"));
  EXPECT_LT(all.at("RateLimit-Policy").size(), 1000u);
}

TEST(HttpHeaders, StructuredStrings) {
  EXPECT_EQ(structured_string("per-key 1"), "\"per-key 1\"");
  EXPECT_EQ(structured_string(""), "\"\"");
  EXPECT_EQ(structured_string("a\"b\\c"), "\"a\\\"b\\\\c\"");
  EXPECT_EQ(structured_string("é\r\n%~\x7f"), "\"%c3%a9%0d%0a%25~%7f\"");
}

TEST(HttpHeaders, StructuredIntegersHaveAtMostFifteenDigits) {
  EXPECT_EQ(structured_integer(0), "0");
  EXPECT_EQ(structured_integer(999'999'999'999'999), "999999999999999");
  EXPECT_EQ(structured_integer(1'000'000'000'000'000), "999999999999999");
  EXPECT_EQ(structured_integer(~0ull), "999999999999999");
}

TEST(HttpHeaders, RoundsUp) {
  EXPECT_EQ(seconds_rounded_up(-1), 0u);
  EXPECT_EQ(seconds_rounded_up(0), 0u);
  EXPECT_EQ(seconds_rounded_up(1), 1u);
  EXPECT_EQ(seconds_rounded_up(kSecond), 1u);
  EXPECT_EQ(seconds_rounded_up(kSecond + 1), 2u);
  EXPECT_EQ(seconds_rounded_up(kNever), 9'223'372'037u);
  EXPECT_EQ(milliseconds_rounded_up(kMillisecond + 1), 2u);
}

TEST(HttpHeaders, ExtremeTimesDoNotOverflow) {
  HttpAnswer answer;
  answer.statuses = {status("r", true)};
  answer.deciding = 0;
  answer.now = kNever;
  answer.statuses[0].reset = kNever - 1;
  EXPECT_EQ(headers(answer, ResetFormat::epoch).at("X-RateLimit-Reset"), "9223372037");
  answer.now = -kNever;
  answer.statuses[0].reset = -5;
  EXPECT_EQ(headers(answer, ResetFormat::epoch).at("X-RateLimit-Reset"), "0");
}

TEST(HttpHeaders, JsonContentTypes) {
  for (const char* yes : {"application/json", "Application/JSON", "application/json; charset=utf-8",
                          "application/json ;x=y", " application/json"}) {
    EXPECT_TRUE(is_json_content_type(yes)) << yes;
  }
  for (const char* no : {"", "application/jsonx", "application/jso", "text/plain", "json",
                         "application/x-www-form-urlencoded", "text/plain; application/json"}) {
    EXPECT_FALSE(is_json_content_type(no)) << no;
  }
}

}  // namespace
}  // namespace weir::node
