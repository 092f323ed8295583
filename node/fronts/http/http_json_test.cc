#include <weir/node/fronts/http/http_json.h>

#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <weir/limits/counted_new.h>

namespace weir::node {
namespace {

using nlohmann::json;
using rpc::kMaxEntries;
using rpc::kMaxRequestId;
using rpc::kMaxText;
using Entries = std::vector<std::pair<std::string, std::string>>;

// A descriptor with texts of its own.
struct Part {
  Entries entries;
  std::uint64_t hits = 1;
  friend bool operator==(const Part&, const Part&) = default;
};

// A request with texts of its own.
struct Check {
  std::string domain;
  std::string id;
  bool over_admission = false;
  std::vector<Part> parts;
  RequestKind kind = RequestKind::check;

  const Entries& descriptor() const { return parts.at(0).entries; }
  std::uint64_t hits() const { return parts.at(0).hits; }
};

Entries texts(std::span<const Entry> entries) {
  Entries out;
  for (const Entry& entry : entries) out.emplace_back(entry.key, entry.value);
  return out;
}

Check copy(const Request& request) {
  Check out{
      std::string(request.domain), std::string(request.id), request.wants_bound, {}, request.kind};
  out.parts.push_back({texts(request.descriptor), request.hits});
  for (const Descriptor& each : request.more) {
    out.parts.push_back({texts(each.entries), each.hits});
  }
  return out;
}

std::vector<Check> copies(BodyReader& reader) {
  std::vector<Check> out;
  for (const Request& request : reader.requests()) out.push_back(copy(request));
  return out;
}

std::string told(const BodyError& error) {
  return error.field + ": " + error.expected;
}

Check good(const std::string& body) {
  BodyReader reader;
  EXPECT_TRUE(reader.check(body)) << body << ": " << told(reader.error());
  EXPECT_EQ(reader.size(), 1u);
  return reader.size() == 1 ? copies(reader)[0] : Check{{}, {}, false, {{}}};
}

std::vector<Check> good_checks(const std::string& body) {
  BodyReader reader;
  EXPECT_TRUE(reader.checks(body)) << body << ": " << told(reader.error());
  return copies(reader);
}

// "field: expected"
std::string bad(const std::string& body) {
  BodyReader reader;
  EXPECT_FALSE(reader.check(body)) << body;
  EXPECT_EQ(reader.size(), 0u);
  EXPECT_TRUE(reader.requests().empty());
  return told(reader.error());
}

std::string bad_checks(const std::string& body) {
  BodyReader reader;
  EXPECT_FALSE(reader.checks(body)) << body;
  EXPECT_EQ(reader.size(), 0u);
  return told(reader.error());
}

TEST(ReadCheck, TakesAnObject) {
  const Check body =
      good(R"({"domain": "api", "descriptor": {"api_key":"k","path":"/v1/x"}, "hits": 3})");
  EXPECT_EQ(body.domain, "api");
  EXPECT_EQ(body.parts, (std::vector<Part>{{{{"api_key", "k"}, {"path", "/v1/x"}}, 3}}));
}

TEST(ReadCheck, TakesAListInOrder) {
  const Check body = good(
      R"({"hits":0,"descriptor":[{"key":"b","value":"1"},{"value":"","key":"a"},{"key":"b","value":"2"}],"domain":"api"})");
  EXPECT_EQ(body.descriptor(), (Entries{{"b", "1"}, {"a", ""}, {"b", "2"}}));
  EXPECT_EQ(body.hits(), 0u);
}

TEST(ReadCheck, OnlyTheDomainIsRequired) {
  EXPECT_EQ(good(R"({"domain":"api"})").parts, std::vector<Part>{Part{}});
  EXPECT_TRUE(good(R"({"domain":"api","descriptor":{}})").descriptor().empty());
  EXPECT_TRUE(good(R"({"domain":"api","descriptor":[]})").descriptor().empty());
  EXPECT_EQ(bad("{}"), "domain: required field is missing");
}

TEST(ReadCheck, TakesSeveralDescriptors) {
  const Check body = good(
      R"({"descriptors":[{"entries":{"user":"u"}},{"hits":7,"entries":[{"key":"k","value":"v"},
          {"key":"k","value":"w"}]},{"entries":{},"hits":0}],"request_id":"r","domain":"api"})");
  EXPECT_EQ(body.parts,
            (std::vector<Part>{{{{"user", "u"}}, 1}, {{{"k", "v"}, {"k", "w"}}, 7}, {{}, 0}}));
  EXPECT_EQ(body.id, "r");

  const std::string list = "expected a list of 1 to 16 descriptors";
  const auto with = [](const std::string& descriptors) {
    return R"({"domain":"a","descriptors":)" + descriptors + "}";
  };
  EXPECT_EQ(bad(with("[]")), "descriptors: " + list);
  EXPECT_EQ(bad(with("{}")), "descriptors: " + list);
  EXPECT_EQ(bad(with("[1]")), "descriptors[0]: expected an object with entries and hits");
  EXPECT_EQ(bad(with("[{}]")), "descriptors[0].entries: required field is missing");
  EXPECT_EQ(bad(with(R"([{"entries":{}},{"entries":[{"key":1}]}])")),
            "descriptors[1].entries[0].key: expected a string of 1 to 4096 bytes");
  EXPECT_EQ(bad(with(R"([{"entries":{"a":null}}])")),
            "descriptors[0].entries.a: expected a string of at most 4096 bytes");
  EXPECT_EQ(bad(with(R"([{"entries":{},"hits":-1}])")),
            "descriptors[0].hits: expected an integer from 0 to 9007199254740992");
  EXPECT_EQ(bad(with(R"([{"entries":{},"hit":1}])")),
            "descriptors[0].hit: unknown field; expected entries and hits");
  EXPECT_EQ(bad(with(R"([{"entries":{},"entries":{}}])")),
            "descriptors[0].entries: repeated field; expected it once");
  EXPECT_EQ(bad(with(R"([{"entries":"x"}])")),
            "descriptors[0].entries: expected an object of strings, or a list of objects with key "
            "and value");
}

TEST(ReadCheck, DescriptorsStandAlone) {
  const std::string one = R"("descriptors":[{"entries":{}}])";
  const std::string both = "descriptors: expected either descriptor or descriptors, not both";
  EXPECT_EQ(bad(R"({"domain":"a","descriptor":{},)" + one + "}"), both);
  EXPECT_EQ(bad("{" + one + R"(,"domain":"a","descriptor":{}})"), both);
  const std::string hits = "hits: beside descriptors each of them has its own; expected none here";
  EXPECT_EQ(bad(R"({"domain":"a","hits":1,)" + one + "}"), hits);
  EXPECT_EQ(bad("{" + one + R"(,"domain":"a","hits":1})"), hits);
}

TEST(ReadCheck, CountsDescriptorsAndTheirEntries) {
  const auto body = [](std::size_t descriptors, std::size_t entries) {
    json part = {{"entries", json::array()}};
    for (std::size_t i = 0; i < entries; ++i) {
      part["entries"].push_back({{"key", "k"}, {"value", "v"}});
    }
    return json{{"domain", "a"}, {"descriptors", std::vector<json>(descriptors, part)}}.dump();
  };
  EXPECT_EQ(good(body(kMaxDescriptors, kMaxEntries)).parts.size(), kMaxDescriptors);
  EXPECT_EQ(bad(body(kMaxDescriptors + 1, 1)),
            "descriptors: expected a list of 1 to 16 descriptors");
  EXPECT_EQ(bad(body(2, kMaxEntries + 1)), "descriptors[0].entries: expected at most 64 entries");
}

TEST(ReadCheck, TakesARequestId) {
  EXPECT_EQ(good(R"({"domain":"api"})").id, "");
  EXPECT_EQ(good(R"({"domain":"api","request_id":"é-7"})").id, "é-7");
  const std::string longest(kMaxRequestId, 'x');
  EXPECT_EQ(good(R"({"domain":"api","request_id":")" + longest + R"("})").id, longest);
  const std::string expected = "request_id: expected a string of 1 to 128 bytes";
  EXPECT_EQ(bad(R"({"domain":"api","request_id":")" + longest + R"(x"})"), expected);
  EXPECT_EQ(bad(R"({"domain":"api","request_id":""})"), expected);
  EXPECT_EQ(bad(R"({"domain":"api","request_id":7})"), expected);
  EXPECT_EQ(bad(R"({"request_id":"a","request_id":"a"})"),
            "request_id: repeated field; expected it once");
}

TEST(ReadCheck, DecodesEscapes) {
  EXPECT_EQ(good(R"({"domain":"\u00e9\ud83d\ude00\n"})").domain, "é😀\n");
  EXPECT_EQ(good(R"({"domain":"a\u0000b"})").domain, std::string("a\0b", 3));
  EXPECT_EQ(good(R"({"\u0064omain":"a"})").domain, "a");
}

TEST(ReadCheck, RefusesWrongHits) {
  const std::string expected = "hits: expected an integer from 0 to 9007199254740992";
  for (const char* hits : {"-1", "1.5", "1.0", "1e3", "-0.0", "\"1\"", "null", "true", "[]", "{}",
                           "[1]", "9007199254740993", "18446744073709551615"}) {
    EXPECT_EQ(bad(fmt::format(R"({{"domain":"api","hits":{}}})", hits)), expected) << hits;
  }
  // A number beyond every range, or that is none, is a fault of the document itself.
  for (const char* hits : {"18446744073709551616", "1e999", "01", "+1", "1.", ".5", "0x1", "NaN"}) {
    EXPECT_THAT(bad(fmt::format(R"({{"domain":"api","hits":{}}})", hits)),
                testing::StartsWith(": expected JSON in UTF-8: "))
        << hits;
  }
  EXPECT_EQ(good(R"({"domain":"api","hits":9007199254740992})").hits(), kMaxHits);
  EXPECT_EQ(good(R"({"domain":"api","hits":-0})").hits(), 0u);
}

TEST(ReadCheck, RefusesWrongKinds) {
  for (const char* body : {"[]", "1", "\"x\"", "null"}) {
    EXPECT_EQ(bad(body), ": expected a JSON object");
  }
  for (const char* domain : {"1", "\"\"", "[\"a\"]"}) {
    EXPECT_EQ(bad(fmt::format(R"({{"domain":{}}})", domain)),
              "domain: expected a string of 1 to 4096 bytes");
  }
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

TEST(ReadCheck, MayAskForTheBound) {
  EXPECT_TRUE(good(R"({"domain":"a","over_admission":true})").over_admission);
  EXPECT_FALSE(good(R"({"domain":"a","over_admission":false})").over_admission);
  EXPECT_EQ(bad(R"({"domain":"a","over_admission":1})"), "over_admission: expected true or false");
}

TEST(ReadCheck, MaySayOfWhatKindItIs) {
  EXPECT_EQ(good(R"({"domain":"a"})").kind, RequestKind::check);
  EXPECT_EQ(good(R"({"domain":"a","kind":"check"})").kind, RequestKind::check);
  EXPECT_EQ(good(R"({"domain":"a","kind":"report"})").kind, RequestKind::report);
  EXPECT_EQ(good(R"({"domain":"a","kind":"refund"})").kind, RequestKind::refund);
  for (const char* wrong : {"\"Report\"", "\"\"", "1", "null", "true"}) {
    EXPECT_EQ(bad(std::string(R"({"domain":"a","kind":)") + wrong + "}"),
              "kind: expected \"check\", \"report\" or \"refund\"");
  }
}

TEST(ReadCheck, RefusesUnknownRepeatedAndMissingNames) {
  EXPECT_EQ(bad(R"({"domain":"a","hit":1})"),
            "hit: unknown field; expected domain, descriptor or descriptors, hits, request_id, "
            "over_admission, kind or limit");
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
  // A long name is cut, between characters.
  std::string name;
  for (int i = 0; i < 40; ++i) name += "é";
  EXPECT_THAT(bad("{\"" + name + "\":1}"),
              testing::StartsWith(name.substr(0, 64) + "…: unknown field"));
}

TEST(ReadCheck, KeepsItsBounds) {
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
  EXPECT_EQ(good(map_of(kMaxEntries)).descriptor().size(), kMaxEntries);
  EXPECT_EQ(good(list_of(kMaxEntries)).descriptor().size(), kMaxEntries);
  EXPECT_EQ(bad(map_of(kMaxEntries + 1)), "descriptor: expected at most 64 entries");
  EXPECT_EQ(bad(list_of(kMaxEntries + 1)), "descriptor: expected at most 64 entries");

  const std::string most(kMaxText, 'x');
  const std::string over = most + "x";
  const json fits = {{"domain", most}, {"descriptor", {{most, most}}}};
  EXPECT_EQ(good(fits.dump()).descriptor(), (Entries{{most, most}}));
  EXPECT_THAT(bad(json{{"domain", over}}.dump()), testing::StartsWith("domain: "));
  EXPECT_THAT(bad(json{{"domain", "d"}, {"descriptor", {{over, "v"}}}}.dump()),
              testing::StartsWith("descriptor: "));
  EXPECT_THAT(bad(json{{"domain", "d"}, {"descriptor", {{"k", over}}}}.dump()),
              testing::StartsWith("descriptor.k: "));
}

TEST(ReadCheck, RefusesGarbage) {
  const std::vector<std::pair<std::string, std::string>> all = {
      {"", "it is empty"},
      {" ", "it is empty"},
      {"{", "do not fit"},
      {"{\"domain\":\"a\"} x", "do not fit"},
      {"{\"domain\":\"a\"}{}", "do not fit"},
      {"{\"domain\":\"a\"},", "do not fit"},
      {"{\"domain\":\"a\"}}", "do not fit"},
      {"{\"domain\":\"a\" \"hits\":1}", "do not fit"},
      {"{\"domain\"::\"a\"}", "do not fit"},
      {"{\"domain\":\"a\",}", "do not fit"},
      {"{\"domain\":\"a\"/**/}", "do not fit"},
      {"\xef\xbb\xbf{\"domain\":\"a\"}", "do not fit"},
      {"{'domain':'a'}", "do not fit"},
      {"{\"domain\": x}", "do not fit"},
      {"{\"domain\": nul}", "a word is none of"},
      {"{\"domain\":\"\xff\"}", "it is not UTF-8"},
      {"{\"domain\":\"\xed\xa0\x80\"}", "it is not UTF-8"},
      {"{\"domain\":\"\xc0\x80\"}", "it is not UTF-8"},
      {"{\"domain\":\"a", "a string has no end"},
      {"{\"domain\":\"a\tb\"}", "a control character"},
      {std::string("{\"domain\":\"a\0\"}", 15), "a control character"},
      {R"({"domain":"\udc00"})", "a wrong escape"},
      {R"({"domain":"\ud800"})", "a wrong escape"},
      {R"({"domain":"\ud800\u0041"})", "a wrong escape"},
      {R"({"domain":"\x"})", "a wrong escape"},
      {R"({"domain":"\u00g0"})", "a wrong escape"},
      {std::string("\0\0", 2), "do not fit"},
      {std::string(40000, '['), "do not fit"},
      {std::string(20000, '[') + std::string(20000, ']'), "nested too deeply"},
  };
  for (const auto& [body, why] : all) {
    EXPECT_THAT(bad(body), testing::StartsWith(": expected JSON in UTF-8: ")) << body;
    EXPECT_THAT(bad(body), testing::HasSubstr(why)) << body;
  }
}

TEST(ReadCheck, NothingStandsBehindTheDocument) {
  const std::string body = R"({"domain":"a"})";
  EXPECT_EQ(good(" \r\n\t" + body + " \r\n\t").domain, "a");
  for (int c = 0; c < 256; ++c) {
    const char byte = static_cast<char>(c);
    if (byte == ' ' || byte == '\r' || byte == '\n' || byte == '\t') continue;
    EXPECT_THAT(bad(body + byte), testing::StartsWith(": expected JSON in UTF-8: ")) << c;
    EXPECT_THAT(bad(byte + body), testing::StartsWith(": expected JSON in UTF-8: ")) << c;
    EXPECT_THAT(bad(body + byte + body), testing::StartsWith(": expected JSON in UTF-8: ")) << c;
  }
}

TEST(ReadCheck, ANulStandsNowhere) {
  const std::string body = R"({"domain":"a","hits":5,"over_admission":true})";
  for (const std::string& what :
       {std::string(1, '\0'), std::string("\0,\"hits\":7", 10), std::string("\0x", 2),
        std::string(64, '\0'), std::string("\0}", 2)}) {
    for (std::size_t at = 0; at <= body.size(); ++at) {
      std::string broken = body;
      broken.insert(at, what);
      EXPECT_THAT(bad(broken), testing::StartsWith(": expected JSON in UTF-8: ")) << at;
    }
  }
}

TEST(ReadChecks, TakesSeveral) {
  const std::vector<Check> all = good_checks(
      R"({"checks":[{"domain":"a","descriptor":{"k":"v"},"hits":2},
                    {"domain":"b","request_id":"7","over_admission":true},
                    {"descriptors":[{"entries":{"x":"1"}},{"entries":{"y":"2"},"hits":0}],"domain":"c"}]})");
  ASSERT_EQ(all.size(), 3u);
  EXPECT_EQ(all[0].domain, "a");
  EXPECT_EQ(all[0].parts, (std::vector<Part>{{{{"k", "v"}}, 2}}));
  EXPECT_EQ(all[1].domain, "b");
  EXPECT_EQ(all[1].id, "7");
  EXPECT_TRUE(all[1].over_admission);
  EXPECT_EQ(all[1].parts, std::vector<Part>{Part{}});
  EXPECT_EQ(all[2].domain, "c");
  EXPECT_EQ(all[2].parts, (std::vector<Part>{{{{"x", "1"}}, 1}, {{{"y", "2"}}, 0}}));
  EXPECT_TRUE(all[2].id.empty());
  EXPECT_FALSE(all[2].over_admission);
}

TEST(ReadChecks, NamesTheMistake) {
  EXPECT_EQ(bad_checks(R"({"checks":[{"domain":"a"},{"domain":"a","descriptors":[{"entries":{}},
                          {"entries":{"key":7}}]}]})"),
            "checks[1].descriptors[1].entries.key: expected a string of at most 4096 bytes");
  EXPECT_EQ(bad_checks(R"({"checks":[{"domain":"a"},7]})"), "checks[1]: expected a JSON object");
  EXPECT_EQ(bad_checks(R"({"checks":[{}]})"), "checks[0].domain: required field is missing");
  EXPECT_EQ(bad_checks(R"({"checks":[{"domain":"a","hits":"1"}]})"),
            "checks[0].hits: expected an integer from 0 to 9007199254740992");
  EXPECT_EQ(bad_checks("{}"), "checks: required field is missing");
  EXPECT_EQ(bad_checks("[]"), ": expected a JSON object");
  EXPECT_EQ(bad_checks(R"({"checks":{}})"), "checks: expected a list of 1 to 256 checks");
  EXPECT_EQ(bad_checks(R"({"checks":[]})"), "checks: expected a list of 1 to 256 checks");
  EXPECT_EQ(bad_checks(R"({"checks":[{"domain":"a"}],"checks":[{"domain":"a"}]})"),
            "checks: repeated field; expected it once");
  EXPECT_EQ(bad_checks(R"({"domain":"a"})"), "domain: unknown field; expected checks");
  EXPECT_EQ(bad_checks(R"({"checks":[{"domain":"a","timeout_ms":1}]})").substr(0, 33),
            "checks[0].timeout_ms: unknown fie");
}

TEST(ReadChecks, KeepsItsBounds) {
  const auto body = [](std::size_t count) {
    return json{{"checks", std::vector<json>(count, json{{"domain", "a"}})}}.dump();
  };
  EXPECT_EQ(good_checks(body(kMaxChecks)).size(), kMaxChecks);
  EXPECT_EQ(bad_checks(body(kMaxChecks + 1)), "checks: expected a list of 1 to 256 checks");
}

TEST(ReadReserve, TakesATimeout) {
  BodyReader reader;
  EXPECT_TRUE(reader.reserve(R"({"domain":"api","hits":500,"timeout_ms":1500})"));
  EXPECT_EQ(reader.timeout(), 1500 * kMillisecond);
  EXPECT_EQ(reader.requests()[0].hits, 500u);
  EXPECT_TRUE(reader.reserve(R"({"domain":"api"})"));
  EXPECT_EQ(reader.timeout(), kMinute);
  for (const char* wrong : {"86400001", "-1", "\"1\"", "1.5"}) {
    EXPECT_FALSE(reader.reserve(std::string(R"({"domain":"api","timeout_ms":)") + wrong + "}"));
    EXPECT_EQ(told(reader.error()), "timeout_ms: expected an integer from 0 to 86400000");
  }
  EXPECT_FALSE(reader.reserve(R"({"domain":"api","descriptors":[{"entries":{}}]})"));
  EXPECT_EQ(told(reader.error()),
            "descriptors: unknown field; expected domain, descriptor, hits, request_id, "
            "over_admission, limit or timeout_ms");
  EXPECT_THAT(bad(R"({"domain":"api","timeout_ms":1})"),
              testing::StartsWith("timeout_ms: unknown field"));
}

TEST(ReadCheck, TakesALimit) {
  BodyReader reader;
  ASSERT_TRUE(reader.check(R"({"domain":"a","limit":{"limit":100,"window_ms":60000,"burst":7}})"));
  ASSERT_TRUE(reader.check(R"({"domain":"a","limit":{}})"));
  EXPECT_EQ(reader.requests()[0].limit, (RequestLimit{100, kMinute, 7}));
  EXPECT_EQ(reader.requests()[1].limit, RequestLimit{});
  EXPECT_EQ(bad(R"({"domain":"a","limit":5})"),
            "limit: expected an object with limit, window_ms and burst");
  EXPECT_EQ(bad(R"({"domain":"a","limit":{"limit":0}})"),
            "limit.limit: expected an integer of at least 1");
  EXPECT_EQ(bad(R"({"domain":"a","limit":{"window_ms":31622400001}})"),
            "limit.window_ms: expected an integer from 0 to 31622400000");
  EXPECT_EQ(bad(R"({"domain":"a","limit":{"window":"1m"}})"),
            "limit.window: unknown field; expected limit, window_ms and burst");
  EXPECT_EQ(bad(R"({"domain":"a","limit":{"burst":1,"burst":1}})"),
            "limit.burst: repeated field; expected it once");
}

TEST(ReadSettle, TakesATicketAndHits) {
  BodyReader reader;
  SettleBody body;
  EXPECT_TRUE(reader.settle(R"({"ticket":"00ff-7","hits":0})", body));
  EXPECT_EQ(body.ticket, "00ff-7");
  EXPECT_TRUE(reader.settle(R"({"hits":9007199254740992,"ticket":"x"})", body));
  EXPECT_EQ(body.hits, kMaxHits);
  EXPECT_EQ(reader.size(), 0u);
  auto wrong = [&](const std::string& text) {
    EXPECT_FALSE(reader.settle(text, body)) << text;
    return told(reader.error());
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
  EXPECT_EQ(wrong(""), ": expected JSON in UTF-8: it is empty");
  EXPECT_EQ(wrong(std::string("{\"ticket\":\"x\",\"hits\":1}\0", 24)),
            ": expected JSON in UTF-8: its braces, brackets, commas and colons do not fit");
}

TEST(BodyReader, GathersWhatIsGoodInOrder) {
  BodyReader reader;
  EXPECT_TRUE(reader.check(R"({"domain":"a","descriptor":{"k":"1"}})"));
  EXPECT_FALSE(reader.check(R"({"domain":"b","descriptor":{"k":"2"},"hits":-1})"));
  EXPECT_FALSE(reader.checks(R"({"checks":[{"domain":"c"},{"domain":"c","descriptors":
                                [{"entries":{"k":"3"}},{"entries":{"k":4}}]}]})"));
  EXPECT_TRUE(reader.checks(R"({"checks":[{"domain":"d","descriptors":
                               [{"entries":{"k":"5"}},{"entries":{"k":"6"}}]},{"domain":"e"}]})"));
  // As if seen now.
  EXPECT_EQ(reader.requests().size(), 3u);
  EXPECT_TRUE(reader.check(R"({"domain":"f","descriptor":{"k":"7"}})"));
  const std::vector<Check> all = copies(reader);
  ASSERT_EQ(all.size(), 4u);
  EXPECT_EQ(all[0].domain, "a");
  EXPECT_EQ(all[0].parts, (std::vector<Part>{{{{"k", "1"}}, 1}}));
  EXPECT_EQ(all[1].domain, "d");
  EXPECT_EQ(all[1].parts, (std::vector<Part>{{{{"k", "5"}}, 1}, {{{"k", "6"}}, 1}}));
  EXPECT_EQ(all[2].domain, "e");
  EXPECT_EQ(all[2].parts, std::vector<Part>{Part{}});
  EXPECT_EQ(all[3].domain, "f");
  EXPECT_EQ(all[3].parts, (std::vector<Part>{{{{"k", "7"}}, 1}}));
  reader.clear();
  EXPECT_TRUE(reader.requests().empty());
}

TEST(BodyReader, LeavesNothingOfTheRequestBefore) {
  BodyReader reader;
  EXPECT_TRUE(reader.check(R"({"domain":"a","request_id":"r","over_admission":true,
                              "descriptors":[{"entries":{"k":"v"},"hits":5},{"entries":{}}]})"));
  EXPECT_EQ(reader.requests().size(), 1u);
  reader.clear();
  EXPECT_TRUE(reader.check(R"({"domain":"b"})"));
  const Request& request = reader.requests()[0];
  EXPECT_EQ(request.domain, "b");
  EXPECT_TRUE(request.descriptor.empty());
  EXPECT_TRUE(request.more.empty());
  EXPECT_TRUE(request.id.empty());
  EXPECT_EQ(request.hits, 1u);
  EXPECT_FALSE(request.wants_bound);
}

TEST(BodyReader, WorksAfterMuchWasReadAtOnce) {
  BodyReader reader;
  json body = {{"checks", json::array()}};
  for (std::size_t i = 0; i < kMaxChecks; ++i) {
    body["checks"].push_back({{"domain", "a"}, {"descriptor", {{"k", std::string(200, 'x')}}}});
  }
  const std::string text = body.dump();
  for (int i = 0; i < 200; ++i) ASSERT_TRUE(reader.checks(text));
  EXPECT_EQ(reader.requests().size(), 200 * kMaxChecks);
  reader.clear();
  EXPECT_TRUE(reader.check(R"({"domain":"b"})"));
  EXPECT_EQ(copies(reader)[0].domain, "b");
}

template <typename Append>
std::string written(Append&& append) {
  rpc::Output out;
  append(out);
  return std::string(out.view());
}

std::string answer_text(const Reply& reply) {
  return written([&](rpc::Output& out) { append_answer(out, reply); });
}

json answer(const Reply& reply) {
  const std::string text = answer_text(reply);
  EXPECT_TRUE(text.ends_with("}\n")) << text;
  return json::parse(text);
}

Status status(const std::string& rule, bool allowed, std::uint64_t limit, std::uint64_t remaining,
              Nanos reset, Nanos retry_after) {
  Status out;
  out.rule = rule;
  out.allowed = allowed;
  out.limit = out.quota = limit;
  out.remaining = remaining;
  out.reset = reset;
  out.retry_after = retry_after;
  return out;
}

Reply allowed() {
  Reply reply;
  reply.allowed = true;
  return reply;
}

Reply denial() {
  Reply reply;
  reply.deciding = 1;
  reply.statuses = {status("burst", true, 10, 4, kSecond, 0),
                    status("daily", false, 1000, 0, kHour, kMinute + 1),
                    status("trial", false, 5, 0, kHour, kNever)};
  reply.statuses[2].shadow = true;
  return reply;
}

TEST(Answer, ADenialIsAProblemThatDescribesTheDecidingRule) {
  EXPECT_EQ(http_status(denial()), 429u);
  const json got = answer(denial());
  EXPECT_EQ(got["type"], "https://iana.org/assignments/http-problem-types#quota-exceeded");
  EXPECT_EQ(got["title"], "Quota exceeded");
  EXPECT_EQ(got["status"], 429);
  EXPECT_EQ(got["detail"], "Rule daily denied this request.");
  EXPECT_EQ(got["violated-policies"], json({"daily"}));
  EXPECT_EQ(got["allowed"], false);
  EXPECT_EQ(got["rule"], "daily");
  EXPECT_EQ(got["limit"], 1000);
  EXPECT_EQ(got["remaining"], 0);
  EXPECT_EQ(got["reset_ms"], 3'600'000);
  EXPECT_EQ(got["retry_after_ms"], 60'001);
  EXPECT_EQ(got["delay_ms"], 0);
  ASSERT_EQ(got["statuses"].size(), 3u);
  EXPECT_EQ(got["statuses"][0], json::parse(R"({"rule":"burst","allowed":true,"limit":10,
      "remaining":4,"reset_ms":1000,"retry_after_ms":0,"delay_ms":0,"shadow":false,"degraded":false})"));
  EXPECT_EQ(got["statuses"][2], json::parse(R"({"rule":"trial","allowed":false,"limit":5,
      "remaining":0,"reset_ms":3600000,"retry_after_ms":null,"delay_ms":0,"shadow":true,"degraded":false})"));
}

TEST(Answer, TheLongestDelayIsThatOfTheAnswer) {
  Reply reply = denial();
  reply.allowed = reply.statuses[1].allowed = true;
  reply.statuses[0].delay = 250 * kMillisecond + 1;
  reply.statuses[1].delay = kMillisecond;
  reply.statuses[2].delay = kHour;  // a shadow rule
  json got = answer(reply);
  EXPECT_EQ(got["delay_ms"], 251);
  EXPECT_EQ(got["statuses"][1]["delay_ms"], 1);
  reply.allowed = false;
  EXPECT_EQ(answer(reply)["delay_ms"], 0);
}

TEST(Answer, NeverIsNull) {
  Reply reply = denial();
  reply.statuses[1].retry_after = kNever;
  const json got = answer(reply);
  EXPECT_TRUE(got.at("retry_after_ms").is_null());
  EXPECT_EQ(got["detail"], "Rule daily can never admit this request.");
}

TEST(Answer, ADegradedDenialIsNoExceededQuota) {
  Reply reply = denial();
  reply.statuses[1].degraded = true;
  const json got = answer(reply);
  EXPECT_EQ(got["type"],
            "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity");
  EXPECT_EQ(got["title"], "Temporarily reduced capacity");
  EXPECT_EQ(got["detail"], "The limiter cannot count for rule daily now.");
}

TEST(Answer, RightsThatAreExhaustedLocallyAreTold) {
  Reply reply = denial();
  reply.statuses[1].exhausted_locally = true;
  const json got = answer(reply);
  EXPECT_EQ(got["detail"], "Rule daily has no rights left here; other regions are asked.");
  EXPECT_EQ(got["statuses"][1]["exhausted_locally"], true);
  EXPECT_FALSE(got["statuses"][0].contains("exhausted_locally"));
}

TEST(Answer, SuccessIsNoProblem) {
  Reply reply = denial();
  reply.allowed = true;
  reply.deciding = 0;
  EXPECT_EQ(http_status(reply), 200u);
  const json got = answer(reply);
  EXPECT_FALSE(got.contains("type"));
  EXPECT_EQ(got["allowed"], true);
  EXPECT_EQ(got["rule"], "burst");
  EXPECT_EQ(got["remaining"], 4);
  EXPECT_EQ(got["retry_after_ms"], 0);
}

TEST(Answer, NoRuleIsNull) {
  EXPECT_EQ(answer(allowed()), json::parse(R"({"allowed":true,"rule":null,"limit":null,
      "remaining":null,"reset_ms":null,"retry_after_ms":0,"delay_ms":0,"statuses":[]})"));
  EXPECT_TRUE(answer(Reply{})["retry_after_ms"].is_null());
}

TEST(Answer, TellsTheBoundIfItIsKnown) {
  Reply reply = allowed();
  reply.statuses.resize(2);
  reply.statuses[1].over_admission = 17;
  const json told_statuses = answer(reply).at("statuses");
  EXPECT_FALSE(told_statuses[0].contains("over_admission_worst_case"));
  EXPECT_EQ(told_statuses[1].at("over_admission_worst_case"), 17);
}

TEST(Answer, TellsTheDescriptorWhereThereAreSeveral) {
  Reply reply = denial();
  EXPECT_FALSE(answer(reply)["statuses"][0].contains("descriptor"));
  reply.statuses.push_back(status("burst", false, 10, 0, kSecond, kSecond));
  reply.statuses.push_back(status("daily", false, 1000, 0, kHour, kMinute + 1));
  reply.statuses[3].descriptor = 1;
  reply.statuses[4].descriptor = 15;
  const json got = answer(reply);
  EXPECT_EQ(got["statuses"][0]["descriptor"], 0);
  EXPECT_EQ(got["statuses"][3]["descriptor"], 1);
  EXPECT_EQ(got["statuses"][4]["descriptor"], 15);
  // A policy is named once, however many descriptors break it.
  EXPECT_EQ(got["violated-policies"], json({"daily", "burst"}));
}

TEST(Answer, TellsARepeat) {
  Reply reply = allowed();
  EXPECT_FALSE(answer(reply).contains("repeated"));
  reply.repeated = true;
  EXPECT_EQ(answer(reply)["repeated"], true);
}

TEST(Answer, ReplacesWhatIsNotUtf8) {
  Reply reply = denial();
  reply.statuses[1].rule = "d\xff";
  EXPECT_EQ(answer(reply)["rule"], "d\uFFFD");
}

TEST(Answer, TellsTheLargestNumbers) {
  Reply reply = allowed();
  reply.deciding = 0;
  const std::uint64_t most = std::numeric_limits<std::uint64_t>::max();
  reply.statuses = {status("r", true, most, most, kNever - 1, 0)};
  const json got = answer(reply);
  EXPECT_EQ(got["limit"], most);
  EXPECT_EQ(got["statuses"][0]["remaining"], most);
  EXPECT_EQ(got["reset_ms"], 9'223'372'036'855);
}

TEST(Answer, ErrorsAreProblemsWithTheirKind) {
  const std::vector<std::pair<ErrorKind, unsigned>> all = {
      {ErrorKind::invalid, 400},     {ErrorKind::unavailable, 503},
      {ErrorKind::overloaded, 503},  {ErrorKind::deadline, 503},
      {ErrorKind::unknown, 503},     {ErrorKind::closed, 503},
      {ErrorKind::unsupported, 501}, {ErrorKind::unauthenticated, 401},
      {ErrorKind::forbidden, 403},
  };
  for (const auto& [kind, expected] : all) {
    Reply reply;
    reply.fail(kind, "the \"disk\"\n");
    EXPECT_EQ(http_status(reply), expected);
    const json got = answer(reply);
    EXPECT_EQ(got["status"], expected);
    EXPECT_EQ(got["error"], std::string(to_string(kind)));
    EXPECT_EQ(got["detail"], "the \"disk\"\n");
    EXPECT_EQ(got["type"], "about:blank");
    EXPECT_FALSE(got["title"].empty());
    EXPECT_FALSE(got.contains("allowed"));
  }
}

TEST(Answers, AreAListOfAnswers) {
  std::vector<Reply> replies = {denial(), allowed(), Reply{}};
  replies[2].fail(ErrorKind::overloaded, "the disk is slow");
  const json got = json::parse(written([&](rpc::Output& out) { append_answers(out, replies); }));
  ASSERT_EQ(got["results"].size(), 3u);
  EXPECT_EQ(got["results"][0], answer(replies[0]));
  EXPECT_EQ(got["results"][1], answer(replies[1]));
  EXPECT_EQ(got["results"][2],
            json::parse(R"({"error":"overloaded","detail":"the disk is slow"})"));
}

TEST(Reserved, TellsTheTicket) {
  ReserveReply reply{allowed(), "00ff-7"};
  const auto got = [&] {
    return json::parse(written([&](rpc::Output& out) { append_reserved(out, reply); }));
  };
  EXPECT_EQ(got()["ticket"], "00ff-7");
  EXPECT_EQ(got()["allowed"], true);
  EXPECT_TRUE(got().contains("statuses"));
  reply.ticket.clear();
  EXPECT_TRUE(got().at("ticket").is_null());
  reply.decision.fail(ErrorKind::unavailable, "stopping");
  EXPECT_EQ(got()["error"], "unavailable");
  EXPECT_FALSE(got().contains("ticket"));
}

TEST(Settled, TellsWhatBecameOfIt) {
  SettleReply reply;
  reply.settled = reply.lapsed = true;
  reply.reserved = 500;
  const auto got = [&] {
    return json::parse(written([&](rpc::Output& out) { append_settled(out, reply); }));
  };
  EXPECT_EQ(http_status(reply), 200u);
  EXPECT_EQ(got(),
            json::parse(R"({"settled":true,"reserved":500,"lapsed":true,"degraded":false})"));
  reply.settled = false;
  EXPECT_EQ(http_status(reply), 404u);
  EXPECT_EQ(got()["title"], "Unknown ticket");
  EXPECT_EQ(got()["status"], 404);
  EXPECT_EQ(got()["field"], "ticket");
  reply.error = {ErrorKind::deadline, "no answer"};
  EXPECT_EQ(http_status(reply), 503u);
  EXPECT_EQ(got()["error"], "deadline");
}

TEST(Problem, HasTheMembersOfRfc9457) {
  EXPECT_EQ(json::parse(written(
                [](rpc::Output& out) { append_problem(out, 404, "Not found", "no \xff"); })),
            json::parse(R"({"type":"about:blank","title":"Not found","status":404,
                            "detail":"no \ufffd"})"));
  EXPECT_EQ(json::parse(written([](rpc::Output& out) {
              append_problem(out, BodyError{"hits", "expected an integer"});
            })),
            json::parse(R"({"type":"about:blank","title":"Bad Request","status":400,
                            "detail":"hits: expected an integer","field":"hits",
                            "error":"invalid"})"));
  EXPECT_EQ(json::parse(written([](rpc::Output& out) {
              append_problem(out, BodyError{"", "expected a JSON object"});
            }))["detail"],
            "expected a JSON object");
  EXPECT_EQ(content_type(200), "application/json");
  EXPECT_EQ(content_type(429), "application/problem+json");
}

// What is written reads back as it was, or, where it was not UTF-8, with U+FFFD in it.
TEST(JsonStrings, ReadBackAsTheyWere) {
  std::mt19937_64 random(7);
  const std::vector<std::string> pieces = {"a",
                                           "plain text",
                                           "\"",
                                           "\\",
                                           "/",
                                           std::string(1, '\0'),
                                           "\n",
                                           "\x1f",
                                           "\x7f",
                                           "é",
                                           "\u20ac",
                                           "😀",
                                           "\xff",
                                           "\xc3",
                                           "\xed\xa0\x80",
                                           "\xc0\xaf",
                                           "\xf4\x90\x80\x80"};
  for (int i = 0; i < 20'000; ++i) {
    std::string text;
    const bool bytes = random() % 2 == 0;
    for (std::size_t n = random() % 24; n > 0; --n) {
      if (bytes) {
        text.push_back(static_cast<char>(random()));
      } else {
        text += pieces[random() % (i % 2 == 0 ? 12 : pieces.size())];
      }
    }
    const std::string out = written([&](rpc::Output& to) { append_json_string(to, text); });
    ASSERT_TRUE(json::accept(out)) << out;
    const std::string back = json::parse(out);
    // Valid if nothing has to be left out.
    const bool valid =
        json::parse(json(text).dump(-1, ' ', false, json::error_handler_t::ignore)) == text;
    if (valid) {
      ASSERT_EQ(back, text);
    } else {
      ASSERT_THAT(back, testing::HasSubstr("\uFFFD"));
    }
    // And a node reads it as well.
    if (text.empty()) continue;
    BodyReader reader;
    ASSERT_TRUE(reader.check("{\"domain\":" + out + "}"));
    ASSERT_EQ(reader.requests()[0].domain, back);
  }
}

TEST(Memory, ABodyLikeTheOneBeforeAllocatesNothing) {
  const std::string check = R"({"domain":"api","descriptor":{"key":"k123456789012345678"}})";
  const std::string checks =
      R"({"checks":[{"domain":"api","descriptor":{"a longer key than a small string":"and a value"},
          "request_id":"00000000-0000-0000-0000-000000000000"},{"domain":"b","descriptors":
          [{"entries":{"x":"1"}},{"entries":[{"key":"y","value":"2"}],"hits":0}]}]})";
  const std::string reserve = R"({"domain":"api","hits":7,"timeout_ms":100})";
  const std::string settle = R"({"ticket":"00ff0000000000000000000000000000-7","hits":1})";
  BodyReader reader;
  rpc::Output out;
  const Reply denied = denial();
  std::vector<Reply> replies = {denied, allowed()};
  SettleBody settled;
  std::uint64_t made = 0;
  for (int i = 0; i < 3; ++i) {
    const std::uint64_t before = allocations;
    reader.clear();
    const bool all = reader.check(check) && reader.checks(checks) && reader.reserve(reserve) &&
                     reader.settle(settle, settled) && reader.requests().size() == 4;
    out.clear();
    append_answer(out, denied);
    append_answers(out, replies);
    made = allocations - before;
    EXPECT_TRUE(all);
    EXPECT_TRUE(i > 0 || made > 0);
  }
  EXPECT_EQ(made, 0u);
}

}  // namespace
}  // namespace weir::node
