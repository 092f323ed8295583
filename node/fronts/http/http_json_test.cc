#include <weir/node/fronts/http/http_json.h>

#include <string>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

namespace weir::node {
namespace {

using nlohmann::json;

CheckBody good(const std::string& body) {
  CheckBody out;
  BodyError error;
  EXPECT_TRUE(parse_check(body, out, error))
      << body << ": " << error.field << ": " << error.expected;
  return out;
}

// "field: expected"
std::string bad(const std::string& body) {
  CheckBody out;
  BodyError error;
  EXPECT_FALSE(parse_check(body, out, error)) << body;
  return error.field + ": " + error.expected;
}

using Descriptor = std::vector<std::pair<std::string, std::string>>;

TEST(ParseCheck, TakesAnObject) {
  const CheckBody body =
      good(R"({"domain": "api", "descriptor": {"api_key":"k","path":"/v1/x"}, "hits": 3})");
  EXPECT_EQ(body.domain, "api");
  EXPECT_EQ(body.descriptor, (Descriptor{{"api_key", "k"}, {"path", "/v1/x"}}));
  EXPECT_EQ(body.hits, 3u);
}

TEST(ParseCheck, TakesAListInOrder) {
  const CheckBody body = good(
      R"({"hits":0,"descriptor":[{"key":"b","value":"1"},{"value":"","key":"a"},{"key":"b","value":"2"}],"domain":"api"})");
  EXPECT_EQ(body.descriptor, (Descriptor{{"b", "1"}, {"a", ""}, {"b", "2"}}));
  EXPECT_EQ(body.hits, 0u);
}

TEST(ParseCheck, OnlyTheDomainIsRequired) {
  EXPECT_EQ(good(R"({"domain":"api"})").hits, 1u);
  EXPECT_TRUE(good(R"({"domain":"api","descriptor":{}})").descriptor.empty());
  EXPECT_TRUE(good(R"({"domain":"api","descriptor":[]})").descriptor.empty());
  EXPECT_EQ(bad("{}"), "domain: required field is missing");
}

TEST(ParseCheck, TakesARequestId) {
  EXPECT_EQ(good(R"({"domain":"api"})").request_id, "");
  EXPECT_EQ(good(R"({"domain":"api","request_id":"é-7"})").request_id, "é-7");
  const std::string longest(kMaxRequestId, 'x');
  EXPECT_EQ(good(R"({"domain":"api","request_id":")" + longest + R"("})").request_id, longest);
  const std::string expected = "request_id: expected a string of 1 to 128 bytes";
  EXPECT_EQ(bad(R"({"domain":"api","request_id":")" + longest + R"(x"})"), expected);
  EXPECT_EQ(bad(R"({"domain":"api","request_id":""})"), expected);
  EXPECT_EQ(bad(R"({"domain":"api","request_id":7})"), expected);
  EXPECT_EQ(bad(R"({"request_id":"a","request_id":"a"})"),
            "request_id: repeated field; expected it once");
}

TEST(ParseReserve, TakesATimeout) {
  CheckBody body;
  BodyError error;
  EXPECT_TRUE(parse_reserve(R"({"domain":"api","hits":500})", body, error));
  EXPECT_EQ(body.timeout, kMinute);
  EXPECT_TRUE(parse_reserve(R"({"domain":"api","timeout_ms":1500})", body, error));
  EXPECT_EQ(body.timeout, 1500 * kMillisecond);
  for (const char* wrong : {"86400001", "-1", "\"1\"", "1.5"}) {
    EXPECT_FALSE(
        parse_reserve(std::string(R"({"domain":"api","timeout_ms":)") + wrong + "}", body, error));
    EXPECT_EQ(error.field, "timeout_ms");
    EXPECT_EQ(error.expected, "expected an integer from 0 to 86400000");
  }
  EXPECT_FALSE(parse_check(R"({"domain":"api","timeout_ms":1})", body, error));
  EXPECT_EQ(error.field, "timeout_ms");
}

TEST(ParseSettle, TakesATicketAndHits) {
  SettleBody body;
  BodyError error;
  EXPECT_TRUE(parse_settle(R"({"ticket":"00ff-7","hits":0})", body, error));
  EXPECT_EQ(body.ticket, "00ff-7");
  EXPECT_TRUE(parse_settle(R"({"hits":9007199254740992,"ticket":"x"})", body, error));
  EXPECT_EQ(body.hits, kMaxHits);
  auto wrong = [&](const std::string& text) {
    EXPECT_FALSE(parse_settle(text, body, error)) << text;
    return error.field + ": " + error.expected;
  };
  EXPECT_EQ(wrong(R"({"ticket":"x"})"), "hits: required field is missing");
  EXPECT_EQ(wrong(R"({"hits":1})"), "ticket: required field is missing");
  EXPECT_EQ(wrong(R"({"ticket":"x","hits":-1})"),
            "hits: expected an integer from 0 to 9007199254740992");
  EXPECT_EQ(wrong(R"({"ticket":7,"hits":1})"), "ticket: expected a string of 1 to 128 bytes");
  EXPECT_EQ(wrong(R"({"ticket":"","hits":1})"), "ticket: expected a string of 1 to 128 bytes");
  EXPECT_EQ(wrong(R"({"ticket":"x","hits":{}})"),
            "hits: expected an integer from 0 to 9007199254740992");
  EXPECT_EQ(wrong(R"({"ticket":"x","ticket":"y"})"), "ticket: repeated field; expected it once");
  EXPECT_EQ(wrong(R"({"tickets":"x"})"), "tickets: unknown field; expected ticket and hits");
  EXPECT_EQ(wrong("[]"), ": expected a JSON object");
  EXPECT_EQ(wrong("7"), ": expected a JSON object");
  EXPECT_EQ(wrong(""), ": expected JSON in UTF-8; it is broken at byte 1");
}

TEST(AnswerJson, TellsTheTicket) {
  HttpAnswer answer;
  EXPECT_FALSE(json::parse(answer_json(answer)).contains("ticket"));
  EXPECT_FALSE(json::parse(answer_json(answer)).contains("repeated"));
  answer.ticket = "00ff-7";
  answer.repeated = true;
  EXPECT_EQ(json::parse(answer_json(answer))["ticket"], "00ff-7");
  EXPECT_EQ(json::parse(answer_json(answer))["repeated"], true);
  answer.ticket = "";
  EXPECT_TRUE(json::parse(answer_json(answer))["ticket"].is_null());
}

TEST(ParseCheck, DecodesEscapes) {
  EXPECT_EQ(good(R"({"domain":"\u00e9\ud83d\ude00\n"})").domain, "é😀\n");
}

TEST(ParseCheck, RefusesWrongHits) {
  const std::string expected = "hits: expected an integer from 0 to 9007199254740992";
  for (const char* hits : {"-1", "-0", "1.5", "1.0", "1e3", "\"1\"", "null", "true", "[]", "{}",
                           "[1]", "9007199254740993", "18446744073709551616", "1e999"}) {
    const std::string got = bad(fmt::format(R"({{"domain":"api","hits":{}}})", hits));
    // A number beyond every range is a fault of the document itself.
    if (std::string(hits) == "1e999") {
      EXPECT_THAT(got, testing::HasSubstr("broken at byte"));
    } else {
      EXPECT_EQ(got, expected) << hits;
    }
  }
  EXPECT_EQ(good(R"({"domain":"api","hits":9007199254740992})").hits, kMaxHits);
}

TEST(ParseCheck, RefusesWrongKinds) {
  EXPECT_EQ(bad("[]"), ": expected a JSON object");
  EXPECT_EQ(bad("1"), ": expected a JSON object");
  EXPECT_EQ(bad("\"x\""), ": expected a JSON object");
  EXPECT_EQ(bad("null"), ": expected a JSON object");
  EXPECT_EQ(bad(R"({"domain":1})"), "domain: expected a string of 1 to 256 bytes");
  EXPECT_EQ(bad(R"({"domain":""})"), "domain: expected a string of 1 to 256 bytes");
  EXPECT_EQ(bad(R"({"domain":["a"]})"), "domain: expected a string of 1 to 256 bytes");
  EXPECT_EQ(bad(R"({"descriptor":"x"})"),
            "descriptor: expected an object of strings, or a list of objects with key and value");
  EXPECT_EQ(bad(R"({"descriptor":{"a":1}})"),
            "descriptor.a: expected a string of at most 4096 bytes");
  EXPECT_EQ(bad(R"({"descriptor":{"a":{"b":"c"}}})"),
            "descriptor.a: expected a string of at most 4096 bytes");
  EXPECT_EQ(bad(R"({"descriptor":[{"key":"a","value":"b"},"c"]})"),
            "descriptor[1]: expected an object with key and value");
  EXPECT_EQ(bad(R"({"descriptor":[[]]})"), "descriptor[0]: expected an object with key and value");
  EXPECT_EQ(bad(R"({"descriptor":[{"key":1}]})"),
            "descriptor[0].key: expected a string of 1 to 4096 bytes");
  EXPECT_EQ(bad(R"({"descriptor":[{"key":"","value":"x"}]})"),
            "descriptor[0].key: expected a string of 1 to 4096 bytes");
  EXPECT_EQ(bad(R"({"descriptor":[{"key":"a","value":null}]})"),
            "descriptor[0].value: expected a string of at most 4096 bytes");
}

TEST(ParseCheck, MayAskForTheBound) {
  CheckBody body;
  BodyError error;
  ASSERT_TRUE(parse_check(R"({"domain":"a","over_admission":true})", body, error));
  EXPECT_TRUE(body.over_admission);
  HttpAnswer answer;
  answer.statuses.resize(2);
  answer.statuses[1].over_admission = 17;
  auto told = nlohmann::json::parse(answer_json(answer)).at("statuses");
  EXPECT_FALSE(told[0].contains("over_admission_worst_case"));
  EXPECT_EQ(told[1].at("over_admission_worst_case"), 17);
}

TEST(ParseCheck, RefusesUnknownRepeatedAndMissingNames) {
  EXPECT_EQ(bad(R"({"domain":"a","hit":1})"),
            "hit: unknown field; expected domain, descriptor, hits, request_id or over_admission");
  EXPECT_EQ(bad(R"({"domain":"a","over_admission":1})"), "over_admission: expected true or false");
  EXPECT_EQ(bad(R"({"domain":"a","domain":"b"})"), "domain: repeated field; expected it once");
  EXPECT_EQ(bad(R"({"hits":1,"domain":"a","hits":2})"), "hits: repeated field; expected it once");
  EXPECT_EQ(bad(R"({"descriptor":{},"descriptor":[]})"),
            "descriptor: repeated field; expected it once");
  EXPECT_EQ(bad(R"({"descriptor":{"a":"1","b":"2","a":"3"}})"),
            "descriptor.a: repeated field; expected it once");
  EXPECT_EQ(bad(R"({"descriptor":{"":"1"}})"), "descriptor: expected keys of 1 to 4096 bytes");
  EXPECT_EQ(bad(R"({"descriptor":[{"key":"a","key":"b"}]})"),
            "descriptor[0].key: repeated field; expected it once");
  EXPECT_EQ(bad(R"({"descriptor":[{"key":"a","value":"b","x":"c"}]})"),
            "descriptor[0].x: unknown field; expected key and value");
  EXPECT_EQ(bad(R"({"descriptor":[{"key":"a","value":"b"},{"key":"a"}]})"),
            "descriptor[1]: expected both key and value");
}

TEST(ParseCheck, KeepsItsBounds) {
  const auto map_of = [](std::size_t n) {
    json body = {{"domain", "d"}, {"descriptor", json::object()}};
    for (std::size_t i = 0; i < n; ++i) body["descriptor"][fmt::format("k{}", i)] = "v";
    return body.dump();
  };
  const auto list_of = [](std::size_t n) {
    json body = {{"domain", "d"}, {"descriptor", json::array()}};
    for (std::size_t i = 0; i < n; ++i)
      body["descriptor"].push_back({{"key", "k"}, {"value", "v"}});
    return body.dump();
  };
  EXPECT_EQ(good(map_of(kMaxEntries)).descriptor.size(), kMaxEntries);
  EXPECT_EQ(good(list_of(kMaxEntries)).descriptor.size(), kMaxEntries);
  EXPECT_EQ(bad(map_of(kMaxEntries + 1)), "descriptor: expected at most 64 entries");
  EXPECT_EQ(bad(list_of(kMaxEntries + 1)), "descriptor: expected at most 64 entries");

  const std::string most(kMaxEntryText, 'x');
  const std::string over = most + "x";
  const json fits = {{"domain", std::string(kMaxDomainText, 'd')}, {"descriptor", {{most, most}}}};
  EXPECT_EQ(good(fits.dump()).descriptor, (Descriptor{{most, most}}));
  EXPECT_THAT(bad(json{{"domain", std::string(kMaxDomainText + 1, 'd')}}.dump()),
              testing::StartsWith("domain: "));
  EXPECT_THAT(bad(json{{"domain", "d"}, {"descriptor", {{over, "v"}}}}.dump()),
              testing::StartsWith("descriptor: "));
  EXPECT_THAT(bad(json{{"domain", "d"}, {"descriptor", {{"k", over}}}}.dump()),
              testing::StartsWith("descriptor.k: "));
}

TEST(ParseCheck, RefusesGarbage) {
  for (const std::string& body :
       {std::string(""), std::string("{"), std::string("{\"domain\":\"a\"} x"),
        std::string("{\"domain\":\"a\"}{}"), std::string("{'domain':'a'}"),
        std::string("{\"domain\":\"\xff\"}"), std::string("{\"domain\":\"\xed\xa0\x80\"}"),
        std::string("{\"domain\":\"a\",}"), std::string("\0\0", 2), std::string(40000, '['),
        std::string("{\"domain\":\"a\0\"}", 15)}) {
    EXPECT_NE(bad(body), ": ") << body;
  }
  EXPECT_THAT(bad("{\"domain\": x}"), testing::HasSubstr("broken at byte 12"));
}

HttpAnswer denial() {
  HttpAnswer answer;
  answer.allowed = false;
  answer.deciding = 1;
  answer.now = 5 * kSecond;
  HttpStatus passing{"burst", true, false, false, 10, 4, kSecond, 0, 10, kSecond};
  HttpStatus denying{"daily", false, false, false, 1000, 0, kHour, kMinute + 1, 1000, kDay};
  HttpStatus trial{"trial", false, true, false, 5, 0, kHour, kNever, 5, kDay};
  answer.statuses = {passing, denying, trial};
  return answer;
}

TEST(AnswerJson, DenialIsAProblemThatDescribesTheDecidingRule) {
  const json got = json::parse(answer_json(denial()));
  EXPECT_EQ(got["type"], "https://iana.org/assignments/http-problem-types#quota-exceeded");
  EXPECT_EQ(got["title"], "Quota exceeded");
  EXPECT_EQ(got["status"], 429);
  EXPECT_EQ(got["violated-policies"], json({"daily"}));
  EXPECT_EQ(got["allowed"], false);
  EXPECT_EQ(got["rule"], "daily");
  EXPECT_EQ(got["limit"], 1000);
  EXPECT_EQ(got["remaining"], 0);
  EXPECT_EQ(got["reset_ms"], 3'600'000);
  EXPECT_EQ(got["retry_after_ms"], 60'001);
  ASSERT_EQ(got["statuses"].size(), 3u);
  EXPECT_EQ(got["statuses"][0], json::parse(R"({"rule":"burst","allowed":true,"limit":10,
      "remaining":4,"reset_ms":1000,"retry_after_ms":0,"delay_ms":0,"shadow":false,"degraded":false})"));
  EXPECT_EQ(got["statuses"][2], json::parse(R"({"rule":"trial","allowed":false,"limit":5,
      "remaining":0,"reset_ms":3600000,"retry_after_ms":null,"delay_ms":0,"shadow":true,"degraded":false})"));
}

TEST(AnswerJson, TheLongestDelayIsThatOfTheAnswer) {
  HttpAnswer answer = denial();
  answer.allowed = answer.statuses[1].allowed = true;
  answer.statuses[0].delay = 250 * kMillisecond + 1;
  answer.statuses[1].delay = kMillisecond;
  answer.statuses[2].delay = kHour;  // a shadow rule
  json got = json::parse(answer_json(answer));
  EXPECT_EQ(got["delay_ms"], 251);
  EXPECT_EQ(got["statuses"][1]["delay_ms"], 1);
  answer.allowed = false;
  EXPECT_EQ(json::parse(answer_json(answer))["delay_ms"], 0);
}

TEST(AnswerJson, NeverIsNull) {
  HttpAnswer answer = denial();
  answer.statuses[1].retry_after = kNever;
  const json got = json::parse(answer_json(answer));
  EXPECT_TRUE(got.at("retry_after_ms").is_null());
  EXPECT_EQ(got["detail"], "Rule daily can never admit this request.");
}

TEST(AnswerJson, ADegradedDenialIsNoExceededQuota) {
  HttpAnswer answer = denial();
  answer.statuses[1].degraded = true;
  EXPECT_EQ(json::parse(answer_json(answer))["type"],
            "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity");
}

TEST(AnswerJson, SuccessIsNoProblem) {
  HttpAnswer answer = denial();
  answer.allowed = true;
  answer.deciding = 0;
  const json got = json::parse(answer_json(answer));
  EXPECT_FALSE(got.contains("type"));
  EXPECT_EQ(got["allowed"], true);
  EXPECT_EQ(got["rule"], "burst");
  EXPECT_EQ(got["remaining"], 4);
  EXPECT_EQ(got["retry_after_ms"], 0);
}

TEST(AnswerJson, NoRuleIsNull) {
  const json got = json::parse(answer_json({}));
  EXPECT_EQ(got, json::parse(R"({"allowed":true,"rule":null,"limit":null,"remaining":null,
      "reset_ms":null,"retry_after_ms":0,"delay_ms":0,"statuses":[]})"));
}

TEST(AnswerJson, ReplacesWhatIsNotUtf8) {
  HttpAnswer answer = denial();
  answer.statuses[1].rule = "d\xff";
  EXPECT_EQ(json::parse(answer_json(answer))["rule"], "d\uFFFD");
}

TEST(ProblemJson, HasTheMembersOfRfc9457) {
  EXPECT_EQ(json::parse(problem_json(400, "Bad request", "hits: \xff", "hits")),
            json::parse(R"({"type":"about:blank","title":"Bad request","status":400,
                            "detail":"hits: \ufffd","field":"hits"})"));
  EXPECT_FALSE(json::parse(problem_json(404, "Not found", "x")).contains("field"));
}

}  // namespace
}  // namespace weir::node
