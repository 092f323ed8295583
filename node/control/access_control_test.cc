#include <weir/node/control/access_control.h>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include <weir/node/access/session.h>
#include <weir/rpc/net/test_util.h>

namespace weir::node {
namespace {

class AccessControlTest : public testing::Test {
 protected:
  AccessControlTest() {
    std::string folder = std::filesystem::temp_directory_path() / "weir-access-XXXXXX";
    folder_ = ::mkdtemp(folder.data());
    fd_ = ::open((folder_ / "log").c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    LogOptions options;
    options.fd = fd_;
    options.format = LogFormat::text;
    log_ = std::make_unique<Log>(options);
    config_.access = folder_ / "access.yaml";
  }
  ~AccessControlTest() noexcept override {
    ::close(fd_);
    std::filesystem::remove_all(folder_);
  }

  void write(const std::string& text) const { std::ofstream(config_.access) << text; }
  std::string log() const {
    std::ostringstream out;
    out << std::ifstream(folder_ / "log").rdbuf();
    return out.str();
  }
  int lines(const std::string& with) const {
    const std::string all = log();
    int count = 0;
    for (std::size_t at = all.find(with); at != all.npos; at = all.find(with, at + 1)) ++count;
    return count;
  }

  std::filesystem::path folder_;
  int fd_ = -1;
  std::unique_ptr<Log> log_;
  NodeConfig config_;
  rpc::EventLoop loop_;
  rpc::Background background_{loop_};
  Access access_;
};

TEST_F(AccessControlTest, ABadFileLeavesTheOldOneInForceAndIsTold) {
  write("anonymous: [{from: [192.0.2.0/24], check: [api]}]");
  AccessControl control(config_, access_, *log_, background_);
  ASSERT_EQ(control.error(), "");
  rpc::Address from;
  from.ip = {192, 0, 2, 1};
  Session session(&access_, "http", from);
  Nanos at = 0;
  const auto until = [&](const std::string& line, int count) {
    return rpc::test::eventually(loop_, [&] {
      control.look(at += 3 * kSecond);
      return lines(line) >= count;
    });
  };
  EXPECT_TRUE(session.caller().may_check("api"));
  write("anonymous: [{from: nonsense}]");
  EXPECT_TRUE(until("event=access_refused", 1));
  EXPECT_TRUE(until("outcome=\"refused: ", 1)) << log();
  for (int i = 0; i < 10; ++i) {
    control.look(at += 3 * kSecond);
    rpc::test::turn(loop_, 5);
  }
  EXPECT_EQ(lines("event=access_refused"), 1) << log();
  EXPECT_FALSE(control.current());
  EXPECT_TRUE(session.caller().may_check("api"));
  write("anonymous: []");
  EXPECT_TRUE(until("what=access outcome=done", 1)) << log();
  EXPECT_TRUE(control.current());
  EXPECT_FALSE(session.caller().may_check("api"));
}

TEST_F(AccessControlTest, ANodeDoesNotStartWithABadFile) {
  EXPECT_EQ(AccessControl(config_, access_, *log_, background_).error(),
            "access: " + config_.access + ": No such file or directory");
  EXPECT_EQ(unusable_access(config_).size(), 1u);
  write("tokens: []");
  EXPECT_TRUE(unusable_access(config_).empty());
}

TEST_F(AccessControlTest, ListenersThatAreOpenAndThoseThatNobodyMayUseAreSaid) {
  config_.fronts = {{"admin", "127.0.0.1:1"}, {"clients", "10.0.0.1:2"}, {"http", "[::]:3"}};
  warn_of_listeners(config_, AccessTable(), *log_);
  EXPECT_EQ(lines("event=nobody_may_call front=clients"), 1) << log();
  EXPECT_EQ(lines("event=nobody_may_call front=http"), 1);
  EXPECT_EQ(lines("front=admin"), 0);
  warn_of_listeners(
      config_, *parse_access("anonymous: [{from: ['0.0.0.0/0'], check: all}]", "a").table, *log_);
  EXPECT_EQ(lines("event=open_to_anonymous"), 2);
  warn_of_listeners(config_, *parse_access("certificates: [{name: a, read: true}]", "a").table,
                    *log_);
  EXPECT_EQ(lines("event="), 4);
}

}  // namespace
}  // namespace weir::node
