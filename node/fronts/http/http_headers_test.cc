#include <weir/node/fronts/http/http_headers.h>

#include <algorithm>
#include <map>
#include <string>
#include <string_view>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace weir::node {
namespace {

using Headers = std::map<std::string, std::string>;

// Every line once, of printable ASCII, ended by CR LF.
Headers split(std::string_view lines) {
  Headers out;
  while (!lines.empty()) {
    const std::string_view line = lines.substr(0, lines.find("\r\n"));
    EXPECT_LE(line.size() + 2, lines.size()) << lines;
    lines.remove_prefix(std::min(lines.size(), line.size() + 2));
    const std::size_t colon = line.find(": ");
    EXPECT_NE(colon, line.npos) << line;
    for (char c : line) EXPECT_TRUE(c >= ' ' && c <= '~') << line;
    EXPECT_TRUE(out.emplace(line.substr(0, colon), line.substr(colon + 2)).second) << line;
  }
  return out;
}

Headers headers(const Reply& answer, ResetFormat reset = ResetFormat::seconds, Nanos now = 0) {
  rpc::Output out;
  append_rate_limit_headers(out, answer, reset, now);
  return split(out.view());
}

Headers minimal_headers(const Reply& answer) {
  rpc::Output out;
  append_minimal_headers(out, answer);
  return split(out.view());
}

std::string structured_string(std::string_view text) {
  rpc::Output out;
  append_structured_string(out, text);
  return std::string(out.view());
}

std::string structured_integer(std::uint64_t value) {
  rpc::Output out;
  append_structured_integer(out, value);
  return std::string(out.view());
}

Status status(const std::string& rule, bool allowed) {
  Status out;
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

Reply passed() {
  Reply out;
  out.allowed = true;
  return out;
}

TEST(HttpHeaders, SuccessDescribesTheDecidingRule) {
  Reply answer = passed();
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
  Reply answer;
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
  Reply answer = passed();
  answer.statuses = {status("smooth", true), status("daily", true)};
  answer.statuses[0].delay = 2 * kMillisecond + 1;
  answer.deciding = 1;
  EXPECT_EQ(headers(answer).at("X-RateLimit-Delay-Ms"), "3");
  answer.statuses[0].shadow = true;
  EXPECT_FALSE(headers(answer).contains("X-RateLimit-Delay-Ms"));
}

TEST(HttpHeaders, NeverTellsNoTime) {
  Reply answer;
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
  Reply answer = passed();
  answer.statuses = {status("r", true)};
  answer.deciding = 0;
  const Nanos now = 1000 * kSecond + 600 * kMillisecond;
  answer.statuses[0].reset = 2 * kSecond + 300 * kMillisecond;  // 1002.9
  EXPECT_EQ(headers(answer, ResetFormat::epoch, now).at("X-RateLimit-Reset"), "1003");
  EXPECT_EQ(headers(answer, ResetFormat::seconds, now).at("X-RateLimit-Reset"), "3");
  answer.statuses[0].reset = 2 * kSecond + 500 * kMillisecond;  // 1003.1
  EXPECT_EQ(headers(answer, ResetFormat::epoch, now).at("X-RateLimit-Reset"), "1004");
  EXPECT_EQ(headers(answer, ResetFormat::epoch, now).at("RateLimit"), "\"r\";r=40;t=3");
}

TEST(HttpHeaders, ShadowRulesAreNoPolicy) {
  Reply answer = passed();
  answer.statuses = {status("trial", false), status("real", true)};
  answer.statuses[0].shadow = true;
  answer.deciding = 1;
  EXPECT_EQ(headers(answer).at("RateLimit-Policy"), "\"real\";q=100;w=60");
  EXPECT_FALSE(headers(answer).contains("Retry-After"));
}

TEST(HttpHeaders, NoneWithoutADecidingRule) {
  Reply answer = passed();
  EXPECT_EQ(headers(answer), Headers{});
  answer.statuses = {status("trial", false)};
  answer.statuses[0].shadow = true;
  EXPECT_EQ(headers(answer), Headers{});
  answer.deciding = 5;
  EXPECT_EQ(headers(answer), Headers{});
  answer.deciding = 0;
  answer.error.kind = ErrorKind::deadline;
  EXPECT_EQ(headers(answer), Headers{});
}

TEST(HttpHeaders, WhoIsOverloadedSaysWhenToComeAgain) {
  Reply answer;
  answer.fail(ErrorKind::overloaded, "the disk is slow");
  EXPECT_EQ(headers(answer), (Headers{{"Retry-After", "1"}}));
}

TEST(HttpHeaders, OverSeveralDescriptorsTheDecidingStatusLeads) {
  Reply answer;
  answer.statuses = {status("user", true), status("path", true), status("user", true),
                     status("path", false), status("extra", true)};
  answer.statuses[2].descriptor = answer.statuses[3].descriptor = 1;
  answer.statuses[4].descriptor = 1;
  answer.statuses[3].retry_after = 3 * kSecond;
  answer.deciding = 3;
  EXPECT_EQ(
      headers(answer),
      (Headers{{"RateLimit-Policy", "\"path\";q=100;w=60,\"user\";q=100;w=60,\"extra\";q=100;w=60"},
               {"RateLimit", "\"path\";r=0;t=3"},
               {"X-RateLimit-Limit", "100"},
               {"X-RateLimit-Remaining", "0"},
               {"X-RateLimit-Reset", "3"},
               {"Retry-After", "3"}}));
}

TEST(HttpHeaders, MinimalTellsWhatAClientActsOn) {
  Reply answer = passed();
  EXPECT_EQ(minimal_headers(answer), (Headers{{"Preference-Applied", "return=minimal"}}));
  answer.statuses = {status("smooth", true), status("daily", true)};
  answer.deciding = 1;
  EXPECT_EQ(minimal_headers(answer), (Headers{{"RateLimit", "\"daily\";r=40;t=30"},
                                              {"Preference-Applied", "return=minimal"}}));
  answer.statuses[0].delay = 2 * kMillisecond + 1;
  EXPECT_EQ(minimal_headers(answer), (Headers{{"RateLimit", "\"daily\";r=40;t=30"},
                                              {"X-RateLimit-Delay-Ms", "3"},
                                              {"Preference-Applied", "return=minimal"}}));
  answer.allowed = false;
  answer.statuses[1] = status("daily", false);
  EXPECT_EQ(minimal_headers(answer), (Headers{{"RateLimit", "\"daily\";r=0;t=12"},
                                              {"Retry-After", "12"},
                                              {"Preference-Applied", "return=minimal"}}));
  answer.statuses[1].retry_after = kNever;
  EXPECT_EQ(minimal_headers(answer),
            (Headers{{"RateLimit", "\"daily\";r=0"}, {"Preference-Applied", "return=minimal"}}));
}

TEST(HttpHeaders, PreferAsksForTheMinimum) {
  for (const char* yes :
       {"return=minimal", "RETURN=minimal", " return = minimal ", "return=\"minimal\"",
        "respond-async, return=minimal", "wait=100 , ,return=minimal",
        "return=minimal; foo=\"a,b\"", "x=\"return=representation, \\\" ,\", return=minimal",
        "return=minimal, return=representation", "a;b;c=d, return=minimal", "return=minimal,",
        "foo;, return=minimal", "foo=, return=minimal"}) {
    EXPECT_TRUE(wants_minimal(yes)) << yes;
  }
  for (const char* no : {"",
                         " ",
                         ",",
                         "return",
                         "return=",
                         "return=representation",
                         "return=Minimal",
                         "minimal",
                         "return=minimally",
                         "returns=minimal",
                         "x-return=minimal",
                         "return=\"minimal",
                         "return=representation, return=minimal",
                         "foo;return=minimal",
                         "x=\"return=minimal\"",
                         "x=\", return=minimal",
                         "return==minimal",
                         "return=minimal minimal",
                         "=minimal",
                         "foo bar, return=minimal",
                         "handling=lenient",
                         ";",
                         "\"return\"=minimal"}) {
    EXPECT_FALSE(wants_minimal(no)) << no;
  }
}

TEST(HttpHeaders, WindowsOfLessThanASecondAreRoundedUp) {
  Reply answer = passed();
  answer.statuses = {status("r", true)};
  answer.deciding = 0;
  answer.statuses[0].window = 500 * kMillisecond;
  EXPECT_EQ(headers(answer).at("RateLimit-Policy"), "\"r\";q=100;w=1");
  answer.statuses[0].window = 0;
  EXPECT_EQ(headers(answer).at("RateLimit-Policy"), "\"r\";q=100");
}

TEST(HttpHeaders, ManyPoliciesAreCutBetweenItems) {
  Reply answer = passed();
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
  Reply answer = passed();
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
  Reply answer = passed();
  answer.statuses = {status("r", true)};
  answer.deciding = 0;
  answer.statuses[0].reset = kNever - 1;
  EXPECT_EQ(headers(answer, ResetFormat::epoch, kNever).at("X-RateLimit-Reset"), "9223372037");
  answer.statuses[0].reset = -5;
  EXPECT_EQ(headers(answer, ResetFormat::epoch, -kNever).at("X-RateLimit-Reset"), "0");
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
