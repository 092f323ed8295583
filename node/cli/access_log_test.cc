#include <weir/node/cli/access_log.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

namespace weir {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr std::string_view kAgent = "Mozilla/5.0 (X11; Linux x86_64)";

struct Parts {
  std::string ip = "198.18.0.1";
  std::string ident = "-";
  std::string user = "-";
  std::string time = "[17/May/2015:10:05:03 +0000]";
  std::string request = "\"GET /a/b.png HTTP/1.1\"";
  std::string status = "200";
  std::string bytes = "203023";
  std::string referer = "\"-\"";
  std::string agent = "\"" + std::string(kAgent) + "\"";

  std::string line() const {
    return ip + ' ' + ident + ' ' + user + ' ' + time + ' ' + request + ' ' + status + ' ' + bytes +
           ' ' + referer + ' ' + agent;
  }
};

/// The error, or "" if the line was read.
std::string error_of(std::string_view line) {
  LogRecord record;
  std::string error;
  return parse_log_line(line, record, error) ? "" : error;
}

struct Read {
  std::string line;
  LogRecord record;
  explicit Read(const Parts& parts) : line(parts.line()) {
    std::string error;
    EXPECT_TRUE(parse_log_line(line, record, error)) << error << "\n" << line;
  }
};

Nanos time_of(const std::string& time) {
  Parts parts;
  parts.time = time;
  return Read(parts).record.time;
}

TEST(AccessLog, ReadsEveryField) {
  const Read read{Parts{}};
  EXPECT_EQ(read.record.time, 1'431'857'103 * kSecond);
  EXPECT_EQ(read.record.ip, "198.18.0.1");
  EXPECT_EQ(read.record.user, "");
  EXPECT_EQ(read.record.method, "GET");
  EXPECT_EQ(read.record.path, "/a/b.png");
  EXPECT_EQ(read.record.status, "200");
  EXPECT_EQ(read.record.user_agent, kAgent);
}

TEST(AccessLog, DescriptorLeavesOutWhatIsEmpty) {
  std::array<Entry, 6> entries;
  Parts parts;
  parts.user = "ann";
  const Read full(parts);
  ASSERT_EQ(full.record.descriptor(entries), 6u);
  const std::vector<std::pair<std::string_view, std::string_view>> expected = {
      {"ip", "198.18.0.1"}, {"user", "ann"},   {"method", "GET"},
      {"path", "/a/b.png"}, {"status", "200"}, {"user_agent", kAgent}};
  for (std::size_t i = 0; i < 6; ++i) {
    EXPECT_EQ(entries[i].key, expected[i].first);
    EXPECT_EQ(entries[i].value, expected[i].second);
  }

  parts.user = "-";
  parts.agent = "\"-\"";
  const Read bare(parts);
  ASSERT_EQ(bare.record.descriptor(entries), 4u);
  EXPECT_EQ(entries[1].key, "method");
  EXPECT_EQ(entries[3].key, "status");
}

TEST(AccessLog, TimesBecomeUtc) {
  EXPECT_EQ(time_of("[01/Jan/1970:00:00:00 +0000]"), 0);
  EXPECT_EQ(time_of("[01/Jan/1970:05:30:00 +0530]"), 0);
  EXPECT_EQ(time_of("[31/Dec/1969:19:00:00 -0500]"), 0);
  EXPECT_EQ(time_of("[29/Feb/2016:23:59:59 +0000]"), 1'456'790'399 * kSecond);
  EXPECT_EQ(time_of("[31/Dec/2016:23:59:60 +0000]"), 1'483'228'800 * kSecond);
  EXPECT_EQ(time_of("[31/Dec/2199:23:59:59 +0000]"), kMaxTime - kSecond);
}

TEST(AccessLog, RefusesTimesThatAreNone) {
  for (const char* time : {"[29/Feb/2015:00:00:00 +0000]",
                           "[31/Apr/2015:00:00:00 +0000]",
                           "[00/May/2015:00:00:00 +0000]",
                           "[17/may/2015:00:00:00 +0000]",
                           "[17/May/2015:24:00:00 +0000]",
                           "[17/May/2015:00:60:00 +0000]",
                           "[17/May/2015:00:00:61 +0000]",
                           "[17/May/2015:00:00:00 +1500]",
                           "[17/May/2015:00:00:00 +0060]",
                           "[17/May/2015:00:00:00 00000]",
                           "[17/May/2015:00:00:00]",
                           "[17/May/-015:00:00:00 +0000]",
                           "[17-May-2015:00:00:00 +0000]",
                           "[31/Dec/1969:23:59:59 +0000]",
                           "[01/Jan/1970:00:00:00 +0001]",
                           "[01/Jan/2200:00:00:00 +0000]",
                           "[31/Dec/2199:23:59:59 -0001]",
                           "17/May/2015",
                           "-",
                           "[",
                           "[17/May/2015:10:05:03 +00000]"}) {
    Parts parts;
    parts.time = time;
    EXPECT_THAT(error_of(parts.line()), StartsWith("time: ")) << time;
  }
}

TEST(AccessLog, ReadsIpv6AndUsers) {
  Parts parts;
  parts.ip = "2001:db8::17";
  parts.user = "\"\"";
  const Read read(parts);
  EXPECT_EQ(read.record.ip, "2001:db8::17");
  EXPECT_EQ(read.record.user, "");
}

TEST(AccessLog, PathHasNoQuery) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"GET /search?q=a+b HTTP/1.1", "/search"},
      {"GET /?a=http://x/y HTTP/1.1", "/"},
      {"GET /old", "/old"},
      {"GET /with space/x?y HTTP/1.0", "/with space/x"},
      {"GET http://example.org/a/b?c HTTP/1.1", "/a/b"},
      {"GET http://example.org HTTP/1.1", "/"},
      {"GET /go/http://example.org/x HTTP/1.1", "/go/http://example.org/x"},
      {"OPTIONS * HTTP/1.1", "*"},
      {"CONNECT example.org:443 HTTP/1.1", "example.org:443"},
      {"GET /say\\\"hi\\\" HTTP/1.1", "/say\\\"hi\\\""}};
  for (const auto& [request, path] : cases) {
    Parts parts;
    parts.request = "\"" + request + "\"";
    const Read read(parts);
    EXPECT_EQ(read.record.path, path) << request;
    EXPECT_EQ(read.record.method, request.substr(0, request.find(' ')));
  }
}

TEST(AccessLog, RefusesRequestsThatTellNoMethodOrPath) {
  for (const char* request :
       {"\"-\"", "\"\"", "\"GET\"", "\"GET \"", "\" /a HTTP/1.1\"", "\"GET HTTP/1.1\"",
        "\"GET  HTTP/1.1\"", "\"GET /a b\"", "\"GET ?q HTTP/1.1\"", "\"\\x16\\x03\\x01 /a\"",
        "\"GET /a HTTP/1.1", "GET", "\"AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA / HTTP/1.1\"",
        "\"GET /a HTTP/1.1\\\""}) {
    Parts parts;
    parts.request = request;
    EXPECT_THAT(error_of(parts.line()), StartsWith("request: ")) << request;
  }
}

TEST(AccessLog, EscapedQuotesStayInsideTheirField) {
  Parts parts;
  parts.referer = R"("http://x/\" 500 1 \"-\" \"fake\"")";
  parts.agent = R"("quote \" and backslash \\")";
  const Read read(parts);
  EXPECT_EQ(read.record.status, "200");
  EXPECT_EQ(read.record.user_agent, R"(quote \" and backslash \\)");
}

TEST(AccessLog, ALineCutShortIsMalformed) {
  const std::string whole = Parts{}.line();
  for (std::size_t length = 0; length < whole.size(); ++length) {
    EXPECT_NE(error_of(std::string_view(whole).substr(0, length)), "") << length;
  }
  EXPECT_THAT(error_of(std::string_view(whole).substr(0, whole.size() - 1)),
              StartsWith("user_agent: "));
  Parts parts;
  parts.agent = "\"ends in an escaped quote\\\"";
  EXPECT_THAT(error_of(parts.line()), StartsWith("user_agent: "));
}

TEST(AccessLog, NamesTheFieldThatIsWrong) {
  const auto with = [](std::string Parts::*field, const char* text) {
    Parts parts;
    parts.*field = text;
    return error_of(parts.line());
  };
  EXPECT_THAT(with(&Parts::ip, ""), StartsWith("ip: "));
  EXPECT_THAT(with(&Parts::ip, "-"), StartsWith("ip: "));
  EXPECT_THAT(with(&Parts::ident, ""), StartsWith("ident: "));
  EXPECT_THAT(with(&Parts::user, ""), StartsWith("user: "));
  EXPECT_THAT(with(&Parts::user, "two words"), StartsWith("time: "));
  EXPECT_THAT(with(&Parts::status, "20"), StartsWith("status: "));
  EXPECT_THAT(with(&Parts::status, "2000"), StartsWith("status: "));
  EXPECT_THAT(with(&Parts::status, "2x0"), StartsWith("status: "));
  EXPECT_THAT(with(&Parts::status, "-"), StartsWith("status: "));
  EXPECT_EQ(with(&Parts::bytes, "-"), "");
  EXPECT_THAT(with(&Parts::bytes, "-1"), StartsWith("bytes: "));
  EXPECT_THAT(with(&Parts::bytes, "123456789012345678901"), StartsWith("bytes: "));
  EXPECT_THAT(with(&Parts::referer, "-"), StartsWith("referer: "));
  EXPECT_THAT(with(&Parts::agent, "-"), StartsWith("user_agent: "));
  EXPECT_THAT(with(&Parts::agent, "\"a\" \"b\""), StartsWith("line: "));
  EXPECT_THAT(with(&Parts::agent, "\"a\nb\""), StartsWith("line: "));
}

TEST(AccessLog, CarriageReturnAtTheEndIsIgnored) {
  EXPECT_EQ(error_of(Parts{}.line() + "\r"), "");
  EXPECT_NE(error_of(Parts{}.line() + "\r\r"), "");
}

TEST(AccessLog, BoundsTheLine) {
  Parts parts;
  parts.agent = "\"\"";
  parts.agent = "\"" + std::string((64u << 10) - parts.line().size(), 'a') + "\"";
  ASSERT_EQ(parts.line().size(), 64u << 10);
  EXPECT_EQ(error_of(parts.line()), "");
  parts.agent.insert(1, "a");
  EXPECT_THAT(error_of(parts.line()), HasSubstr("64 KiB"));
}

TEST(AccessLog, AFailureLeavesTheRecordAlone) {
  LogRecord record;
  record.status = "304";
  record.time = 7;
  std::string error;
  EXPECT_FALSE(parse_log_line(Parts{}.line() + " more", record, error));
  EXPECT_EQ(record.status, "304");
  EXPECT_EQ(record.time, 7);
  EXPECT_EQ(record.method, "");
}

TEST(AccessLog, AnyBytesGiveARecordInsideTheLineOrAnError) {
  std::mt19937 random(20150517);
  const std::string base = Parts{}.line();
  const std::string_view special("\"\\ []/:-\0\n\r\xff?", 14);
  std::size_t read = 0;
  for (int round = 0; round < 50'000; ++round) {
    std::string line = base;
    for (auto changes = random() % 3 + 1; changes > 0 && !line.empty(); --changes) {
      const std::size_t at = random() % line.size();
      switch (random() % 4) {
        case 0:
          line[at] = special[random() % special.size()];
          break;
        case 1:
          line.insert(at, 1, static_cast<char>(random() % 256));
          break;
        case 2:
          line.erase(at, random() % 20);
          break;
        default:
          line.resize(at);
          break;
      }
    }
    LogRecord record;
    std::string error;
    if (!parse_log_line(line, record, error)) {
      ASSERT_NE(error, "") << line;
      continue;
    }
    ++read;
    ASSERT_GE(record.time, 0);
    ASSERT_LT(record.time, kMaxTime);
    std::array<Entry, 6> entries;
    const std::size_t count = record.descriptor(entries);
    for (std::size_t i = 0; i < count; ++i) {
      ASSERT_FALSE(entries[i].value.empty()) << line;
      const bool inside =
          entries[i].value.data() >= line.data() &&
          entries[i].value.data() + entries[i].value.size() <= line.data() + line.size();
      ASSERT_TRUE(inside || entries[i].value == "/") << line;
    }
  }
  // Most single changes fall into a free text, so both outcomes must be common.
  EXPECT_GT(read, 5'000u);
  EXPECT_LT(read, 45'000u);
}

// Real traffic, where it is at hand: WEIR_TRACES names access-2015.log or the folder it is in.
std::vector<std::string> traces() {
  const char* given = std::getenv("WEIR_TRACES");
  if (given == nullptr) return {};
  std::filesystem::path path(given);
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) path /= "access-2015.log";
  if (!std::filesystem::is_regular_file(path, ignored)) return {};
  return {path.string()};
}

class AccessLogTrace : public ::testing::TestWithParam<std::string> {};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(AccessLogTrace);
INSTANTIATE_TEST_SUITE_P(Given, AccessLogTrace, ::testing::ValuesIn(traces()));

TEST_P(AccessLogTrace, OnlyTheLineThatIsCutShortIsMalformed) {
  std::ifstream file(GetParam());
  std::string line;
  std::string error;
  std::size_t lines = 0;
  std::vector<std::string> errors;
  while (std::getline(file, line)) {
    ++lines;
    LogRecord record;
    if (!parse_log_line(line, record, error)) errors.push_back(error);
  }
  EXPECT_EQ(lines, 10'000u);
  ASSERT_EQ(errors.size(), 1u);
  EXPECT_THAT(errors[0], StartsWith("user_agent: "));
}

}  // namespace
}  // namespace weir
