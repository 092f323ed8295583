#include <weir/node/cli/status_view.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <vector>

namespace weir::node {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

const char* const kEu = R"({"region":"eu","node":"eu-1","version":"0.1.0","uptime_s":3725.5,
  "series":1200,"cells":3400,"holding":false,
  "loop":{"longest_turn":"sweep","longest_turn_s":0.00412},
  "storage":{"mode":"lmdb","ok":true,"failure":"","commits":9,"backlog":0,"last_commit_us":840},
  "rules":[{"domain":"api","name":"per-key","algorithm":"fixed_window","limit":1000,"window":"1m",
            "shadow":true,"allowed":12345,"denied":67,"degraded":8}],
  "peers":[{"region":"us","node":"us-1","up":true,"unacked":5,"caught_up_s":0.25,"agrees":true,
            "clock_ahead_s":-2.5},
           {"region":"ap","node":"ap-1","up":false,"unacked":9,"agrees":false,
            "last_error":"connection refused"}],
  "counters":{"late":1,"future":2,"invalid":3,"alarms":4,"repaired":5}})";

// The line of `text` that holds `part`.
std::string line_with(const std::string& text, const std::string& part) {
  const std::size_t at = text.find(part);
  if (at == std::string::npos) return "nothing has " + part + " in:\n" + text;
  const std::size_t begin = text.rfind('\n', at) + 1;
  return text.substr(begin, text.find('\n', at) - begin);
}

TEST(StatusView, ShowsNodeRulesAndPeers) {
  const std::vector<NodeAnswer> answers{{"127.0.0.1:7401", kEu, ""}};
  const std::string text = status_text(answers);
  EXPECT_THAT(
      line_with(text, "127.0.0.1:7401"),
      AllOf(HasSubstr("eu/eu-1"), HasSubstr("0.1.0"), HasSubstr("1h2m6s"), HasSubstr("1,200"),
            HasSubstr("3,400"), HasSubstr("1 of 2"), HasSubstr("lmdb, commit 840 us"),
            HasSubstr("  4"), HasSubstr("4.1 ms, sweep")));
  EXPECT_THAT(line_with(text, "per-key"),
              AllOf(HasSubstr("per-key (shadow)"), HasSubstr("12,345"), HasSubstr("67"),
                    HasSubstr("1,000 per 1m"), HasSubstr("fixed_window")));
  EXPECT_THAT(line_with(text, "us/us-1"),
              AllOf(HasSubstr("yes"), HasSubstr("5"), HasSubstr("250ms"), HasSubstr("-2.5s")));
  EXPECT_THAT(line_with(text, "ap/ap-1"),
              AllOf(HasSubstr("no"), HasSubstr("9"), HasSubstr("connection refused")));
}

TEST(StatusView, AFailedStoreSaysWhy) {
  const std::vector<NodeAnswer> answers{
      {"a", R"({"storage":{"mode":"lmdb","ok":false,"failure":"disk full"}})", ""},
      {"b", R"({"storage":{"mode":"none","ok":true}})", ""}};
  const std::string text = status_text(answers);
  EXPECT_THAT(text, AllOf(HasSubstr("failed: disk full"), HasSubstr("memory only")));
}

TEST(StatusView, SaysWhatPassedUnlimited) {
  const std::vector<NodeAnswer> answers{
      {"a", R"({"region":"eu","node":"1","unmet":{"no_rule":0,"unknown_domain":0}})", ""},
      {"b",
       R"({"region":"us","node":"1","unmet":{"no_rule":3,"unknown_domain":1200,)"
       R"("last_unknown_domain":"ap\nj"}})",
       ""}};
  const std::string text = status_text(answers);
  EXPECT_THAT(text, Not(HasSubstr("eu/1: ")));
  EXPECT_THAT(line_with(text, "us/1: "),
              AllOf(HasSubstr("requests passed unlimited: 1,200 of domains without rules (last: "),
                    HasSubstr("3 that no rule of their domain met")));
}

TEST(StatusView, ToleratesWhatIsMissingOrStrange) {
  const std::vector<std::string> strange = {
      "{}",
      R"({"region":7,"rules":3,"peers":{},"storage":[],"counters":"x","uptime_s":"long"})",
      R"({"unmet":{"no_rule":-1,"unknown_domain":"x","last_unknown_domain":7}})",
      R"({"unmet":[1]})",
      R"({"rules":[null,1,{},{"name":null,"shadow":1}],"peers":[null,{"caught_up_s":-1e300}]})",
      R"({"uptime_s":1e308,"series":-1,"cells":1.5,"storage":{"ok":"no","last_commit_us":{}}})"};
  for (const std::string& json : strange) {
    const std::vector<NodeAnswer> answers{{"addr", json, ""}};
    EXPECT_THAT(line_with(status_text(answers), "addr"), Not(HasSubstr("no status"))) << json;
  }
}

TEST(StatusView, SaysWhichNodesDidNotAnswer) {
  const std::vector<NodeAnswer> answers{{"a:1", kEu, ""},
                                        {"b:2", "", "unavailable: connection refused"},
                                        {"c:3", "<html>", ""},
                                        {"d:4", "[]", ""}};
  const std::string text = status_text(answers);
  EXPECT_THAT(text, HasSubstr("b:2: unavailable: connection refused\n"));
  EXPECT_THAT(text, HasSubstr("c:3: the answer is no JSON object\n"));
  EXPECT_THAT(text, HasSubstr("d:4: the answer is no JSON object\n"));
  EXPECT_THAT(line_with(text, "per-key"), HasSubstr("eu/eu-1"));
}

TEST(StatusView, Json) {
  const std::vector<NodeAnswer> one{{"a:1", R"({"b":1,"a":"\u0000"})", ""}};
  EXPECT_EQ(nlohmann::json::parse(status_json(one)), nlohmann::json::parse(one[0].json));
  const std::vector<NodeAnswer> two{{"a:1", "{}", ""}, {"b:2", "", "deadline"}};
  EXPECT_EQ(status_json(two),
            "{\"nodes\":[{\"address\":\"a:1\",\"status\":{}},"
            "{\"address\":\"b:2\",\"error\":\"deadline\"}]}\n");
  const std::vector<NodeAnswer> none{{"b:2", "", "deadline"}};
  EXPECT_EQ(status_json(none), "{\"address\":\"b:2\",\"error\":\"deadline\"}\n");
}

}  // namespace
}  // namespace weir::node
