#include <weir/node/report/clock_watch.h>

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <string>

#include <gtest/gtest.h>

namespace weir::node {
namespace {

constexpr Nanos kNow = 1'700'000'000 * kSecond;

struct Pipe {
  Pipe() { EXPECT_EQ(::pipe2(ends, O_NONBLOCK), 0); }
  ~Pipe() {
    ::close(ends[0]);
    ::close(ends[1]);
  }
  int ends[2] = {};
};

class ClockWatchTest : public ::testing::Test {
 protected:
  static LogOptions to(int fd) {
    LogOptions options;
    options.fd = fd;
    return options;
  }

  std::vector<ClockWatch::Peer> peers(std::initializer_list<std::optional<Nanos>> ahead) {
    std::vector<ClockWatch::Peer> made;
    for (const std::optional<Nanos>& each : ahead) {
      made.push_back({"r/n" + std::to_string(made.size()), each, kMillisecond});
    }
    return made;
  }

  void look(std::initializer_list<std::optional<Nanos>> ahead, Nanos wall = kNow) {
    watch_.look(wall, peers(ahead));
  }

  /// Lines since the last call.
  long lines() {
    std::string text;
    char buffer[4096];
    for (ssize_t got; (got = ::read(pipe_.ends[0], buffer, sizeof buffer)) > 0;) {
      text.append(buffer, static_cast<std::size_t>(got));
    }
    return std::count(text.begin(), text.end(), '\n');
  }

  Pipe pipe_;
  Log log_{to(pipe_.ends[1])};
  ClockWatch watch_{kSecond, log_};
};

TEST_F(ClockWatchTest, AClockThatMostAreOffFromIsWrong) {
  look({{}, {}, {}, {}});
  EXPECT_EQ(watch_.wrong(), "");
  look({3 * kSecond, 3 * kSecond, {}, {}});
  EXPECT_EQ(watch_.wrong(), "") << "2 of 5 are not most";
  look({3 * kSecond, 3 * kSecond, -2 * kSecond, {}});
  EXPECT_EQ(
      watch_.wrong(),
      "the clock is 2.000 s or more off from 3 of 4 peers (1 of them behind it, 2 ahead), more "
      "than max_skew (1.000 s)");
  look({900 * kMillisecond, 3 * kSecond, -kSecond, {}});
  EXPECT_EQ(watch_.wrong(), "");
}

TEST_F(ClockWatchTest, OfTwoNoneIsRight) {
  look({kHour});
  EXPECT_EQ(watch_.wrong(), "");
}

TEST_F(ClockWatchTest, AClockOutsideOfItsCenturiesIsWrong) {
  look({}, 0);
  EXPECT_EQ(watch_.wrong(), "the clock stands outside of the years 2020 to 2200: 0 s since 1970");
  look({}, 7'258'118'400 * kSecond);
  EXPECT_NE(watch_.wrong(), "");
  look({}, kNow);
  EXPECT_EQ(watch_.wrong(), "");
}

TEST_F(ClockWatchTest, LogsEachLevelOnce) {
  look({50 * kMillisecond});
  EXPECT_EQ(lines(), 0);
  look({-150 * kMillisecond});
  EXPECT_EQ(lines(), 1);
  for (int i = 0; i < 10; ++i) look({(i % 2 == 0 ? -95 : -150) * kMillisecond});
  EXPECT_EQ(lines(), 0) << "at the edge";
  look({-2 * kSecond}, kNow + 2 * kMinute);
  EXPECT_EQ(lines(), 1);
  look({0}, kNow + 4 * kMinute);
  EXPECT_EQ(lines(), 1);
}

TEST_F(ClockWatchTest, AClockThatJumpsAboutIsNotLoggedAllTheTime) {
  for (int i = 0; i < 600; ++i) look({i % 2 == 0 ? kHour : 0}, kNow + i * kSecond);
  EXPECT_LE(lines(), 20);
}

}  // namespace
}  // namespace weir::node
