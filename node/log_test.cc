#include <weir/node/log.h>
#include <weir/node/log_limit.h>

#include <fcntl.h>
#include <unistd.h>

#include <limits>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

namespace weir::node {
namespace {

using nlohmann::json;
using namespace std::string_literals;

constexpr Nanos kThen = 1'767'323'045 * kSecond + 678'900'000;  // 2026-01-02T03:04:05.6789Z

// A pipe that a Log writes into.
class Pipe {
 public:
  Pipe() {
    EXPECT_EQ(pipe2(fds_, O_CLOEXEC), 0);
    fcntl(fds_[1], F_SETPIPE_SZ, 1 << 20);
  }
  ~Pipe() {
    close(fds_[0]);
    if (fds_[1] >= 0) close(fds_[1]);
  }
  int in() const { return fds_[1]; }
  int out() const { return fds_[0]; }
  LogOptions options(LogFormat format, LogLevel level = LogLevel::info) const {
    return {level, format, fds_[1], [] { return kThen; }};
  }
  std::string read_all() {
    close(fds_[1]);
    fds_[1] = -1;
    std::string out;
    char buffer[65536];
    ssize_t n = 0;
    while ((n = read(fds_[0], buffer, sizeof(buffer))) > 0) {
      out.append(buffer, static_cast<std::size_t>(n));
    }
    return out;
  }
  std::vector<std::string> lines() {
    std::vector<std::string> out;
    std::istringstream in(read_all());
    for (std::string line; std::getline(in, line);) out.push_back(line);
    return out;
  }

 private:
  int fds_[2] = {-1, -1};
};

TEST(Log, WritesJsonWithTimeLevelEventAndFieldsInOrder) {
  Pipe pipe;
  Log log(pipe.options(LogFormat::json));
  log.info("peer_up", {{"peer", "eu-2"},
                       {"port", 7400},
                       {"skew", -0.25},
                       {"fresh", true},
                       {"big", std::numeric_limits<std::uint64_t>::max()},
                       {"low", std::int64_t{-7}}});
  EXPECT_EQ(pipe.read_all(),
            "{\"time\":\"2026-01-02T03:04:05.678Z\",\"level\":\"info\",\"event\":\"peer_up\","
            "\"peer\":\"eu-2\",\"port\":7400,\"skew\":-0.25,\"fresh\":true,"
            "\"big\":18446744073709551615,\"low\":-7}\n");
}

TEST(Log, WritesLogfmtAndQuotesWhatNeedsIt) {
  Pipe pipe;
  Log log(pipe.options(LogFormat::text));
  log.warn("refused", {{"who", "a b"},
                       {"why", "say \"no\"\nand=\\"},
                       {"empty", ""},
                       {"n", 3},
                       {"ok", false},
                       {"odd key=", "x"}});
  EXPECT_EQ(pipe.read_all(),
            "time=2026-01-02T03:04:05.678Z level=warn event=refused who=\"a b\" "
            "why=\"say \\\"no\\\"\\nand=\\\\\" empty=\"\" n=3 ok=false odd_key_=x\n");
}

TEST(Log, EscapesHostileTextIntoOneLine) {
  const std::string hostile = "a\nb\r\t\"\\\x01\x7f\xff\xc3\xa9\xed\xa0\x80\0z"s;
  for (LogFormat format : {LogFormat::json, LogFormat::text}) {
    Pipe pipe;
    Log log(pipe.options(format));
    log.info("e", {{"v", hostile}, {"\xff\n", "k"}});
    EXPECT_EQ(log.dropped(), 0u);
    const std::vector<std::string> lines = pipe.lines();
    ASSERT_EQ(lines.size(), 1u) << to_string(format);
    if (format == LogFormat::json) {
      const json parsed = json::parse(lines[0]);
      EXPECT_THAT(parsed["v"].get<std::string>(),
                  testing::StartsWith("a\nb\r\t\"\\\x01\x7f\uFFFDé"));
      EXPECT_EQ(parsed["v"].get<std::string>().back(), 'z');
    } else {
      EXPECT_THAT(lines[0], testing::HasSubstr("v=\"a\\nb\\r\\t\\\"\\\\\\u0001"));
      EXPECT_THAT(lines[0], testing::Not(testing::HasSubstr("\xff")));
    }
  }
}

TEST(Log, KeepsQuietBelowItsLevel) {
  Pipe pipe;
  Log log(pipe.options(LogFormat::text, LogLevel::warn));
  log.debug("one");
  log.info("two");
  log.warn("three");
  log.error("four");
  EXPECT_FALSE(log.enabled(LogLevel::info));
  EXPECT_TRUE(log.enabled(LogLevel::warn));
  const std::vector<std::string> lines = pipe.lines();
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_THAT(lines[0], testing::EndsWith("level=warn event=three"));
  EXPECT_THAT(lines[1], testing::EndsWith("level=error event=four"));
}

TEST(Log, FieldsCannotReplaceTheEventOrEachOther) {
  Pipe pipe;
  Log log(pipe.options(LogFormat::json));
  log.info("real", {{"event", "fake"}, {"time", "never"}, {"a", 1}, {"a", 2}});
  const json parsed = json::parse(pipe.read_all());
  EXPECT_EQ(parsed["event"], "real");
  EXPECT_EQ(parsed["event_"], "fake");
  EXPECT_EQ(parsed["time_"], "never");
  EXPECT_EQ(parsed["a"], 1);
  EXPECT_EQ(parsed["a_"], 2);
}

TEST(Log, CutsLongTextBetweenCharacters) {
  Pipe pipe;
  Log log(pipe.options(LogFormat::json));
  std::string text = "x";
  while (text.size() < 3 * kMaxLogText) text += "é";
  log.info("e", {{"v", text}});
  const std::string value = json::parse(pipe.read_all())["v"];
  EXPECT_EQ(value.size(), kMaxLogText - 1 + std::string("…").size());
  EXPECT_THAT(value, testing::EndsWith("é…"));
}

TEST(Log, NumbersThatJsonLacksAreNull) {
  Pipe pipe;
  Log log(pipe.options(LogFormat::json));
  log.info("e", {{"v", std::numeric_limits<double>::quiet_NaN()}});
  EXPECT_TRUE(json::parse(pipe.read_all())["v"].is_null());
}

TEST(Log, CountsWhatTheDescriptorDoesNotTake) {
  Log log({LogLevel::info, LogFormat::json, -1, {}});
  log.info("lost");
  log.debug("not even tried");
  EXPECT_EQ(log.dropped(), 1u);
}

TEST(Log, LinesOfSeveralThreadsDoNotMix) {
  constexpr int kThreads = 4;
  constexpr int kLines = 300;
  Pipe pipe;
  Log log(pipe.options(LogFormat::json));
  std::string text;
  std::thread reader([&] {
    char buffer[4096];
    ssize_t n = 0;
    while ((n = read(pipe.out(), buffer, sizeof(buffer))) > 0) {
      text.append(buffer, static_cast<std::size_t>(n));
      if (text.find("\"last\"") != std::string::npos) break;
    }
  });
  std::vector<std::thread> writers;
  for (int t = 0; t < kThreads; ++t) {
    writers.emplace_back([&, t] {
      for (int i = 0; i < kLines; ++i) log.info("n", {{"thread", t}, {"i", i}});
    });
  }
  for (std::thread& writer : writers) writer.join();
  log.info("last");
  reader.join();

  std::vector<int> next(kThreads, 0);
  std::istringstream in(text);
  int count = 0;
  for (std::string line; std::getline(in, line); ++count) {
    const json parsed = json::parse(line);
    if (parsed["event"] == "last") continue;
    const auto thread = parsed["thread"].get<std::size_t>();
    EXPECT_EQ(parsed["i"], next.at(thread)++);
  }
  EXPECT_EQ(count, kThreads * kLines + 1);
}

TEST(Log, FormatsTimes) {
  EXPECT_EQ(format_rfc3339(0), "1970-01-01T00:00:00.000Z");
  EXPECT_EQ(format_rfc3339(-5), "1970-01-01T00:00:00.000Z");
  EXPECT_EQ(format_rfc3339(951'782'400 * kSecond - 1), "2000-02-28T23:59:59.999Z");
  EXPECT_EQ(format_rfc3339(951'782'400 * kSecond), "2000-02-29T00:00:00.000Z");
  EXPECT_EQ(format_rfc3339(kNever), "2200-01-01T00:00:00.000Z");
}

TEST(LogLimit, LeavesOutWhatIsTooMuchAndSaysHowMuch) {
  Pipe pipe;
  Log log(pipe.options(LogFormat::text));
  LogLimit limit(log);
  Nanos now = kMinute;
  for (int i = 0; i < 1000; ++i) limit.warn(now, "refused", {{"n", i}});
  limit.warn(now, "other", {});  // has its own
  limit.tell(now);
  limit.tell(now);
  limit.warn(now + LogLimit::kEach, "refused", {{"n", 1000}});
  limit.warn(now + LogLimit::kEach, "refused", {{"n", 1001}});
  limit.tell(now + kSecond);
  limit.tell(now + LogLimit::kEach);
  const std::vector<std::string> lines = pipe.lines();
  ASSERT_EQ(lines.size(), LogLimit::kBurst + 4u);
  EXPECT_THAT(lines[LogLimit::kBurst - 1], testing::HasSubstr("n=19"));
  EXPECT_THAT(lines[LogLimit::kBurst], testing::HasSubstr("event=other"));
  EXPECT_THAT(lines[LogLimit::kBurst + 1],
              testing::HasSubstr("event=log_lines_left_out of=refused lines=980"));
  EXPECT_THAT(lines[LogLimit::kBurst + 2], testing::HasSubstr("n=1000"));
  EXPECT_THAT(lines[LogLimit::kBurst + 3], testing::HasSubstr("lines=1"));
}

}  // namespace
}  // namespace weir::node
