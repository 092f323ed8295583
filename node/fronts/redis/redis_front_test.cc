#include <weir/node/fronts/redis/redis_front.h>

#include <fcntl.h>
#include <sys/socket.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <weir/node/access/access_file.h>
#include <weir/node/fronts/http/http_test_client.h>
#include <weir/node/fronts/redis/redis_test_util.h>
#include <weir/rpc/net/event_loop.h>
#include <weir/rpc/net/test_util.h>

namespace weir::node {
namespace {

using test::Client;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::StartsWith;

class RedisFrontTest : public testing::Test {
 protected:
  ~RedisFrontTest() noexcept override {}
  void TearDown() override {
    front_.reset();
    rpc::test::turn(loop_, 2);
    EXPECT_EQ(budget_->open(), 0u);
  }

  void start() {
    front_ = std::make_unique<RedisFront>(loop_, service_, options_, budget_);
    std::string error;
    ASSERT_TRUE(front_->start("127.0.0.1:0", rpc::Sharing::alone, error)) << error;
  }
  std::unique_ptr<Client> client() {
    if (front_ == nullptr) start();
    const rpc::Address to = rpc::test::local(front_->port());
    const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_storage at;
    const socklen_t size = rpc::to_sockaddr(to, at);
    EXPECT_EQ(::connect(fd, reinterpret_cast<sockaddr*>(&at), size), 0);
    ::fcntl(fd, F_SETFL, O_NONBLOCK);
    return std::make_unique<Client>(turn_, fd);
  }
  /// Sends, and takes as many bytes as the expected answer has.
  void exchange(Client& client, std::string_view sent, std::string_view expected) {
    client.send(sent);
    receive(client, expected);
  }
  void receive(Client& client, std::string_view expected) {
    client.wait([&] { return client.received().size() >= expected.size() || client.closed_now(); });
    EXPECT_EQ(client.received(), expected);
    client.received().clear();
  }
  /// Until so many parts wait for an answer.
  void await(std::size_t count) {
    EXPECT_TRUE(rpc::test::eventually(loop_, [&] { return service_.waiting.size() == count; }));
  }

  rpc::EventLoop loop_;
  test::CountingService service_;
  RedisFrontOptions options_;
  std::shared_ptr<ConnectionBudget> budget_ = std::make_shared<ConnectionBudget>(1000);
  std::unique_ptr<RedisFront> front_;
  const std::function<void()> turn_ = [this] { rpc::test::turn(loop_, 1); };
};

TEST_F(RedisFrontTest, APipelineIsOneBatchAndItsAnswersAreInOrder) {
  const auto one = client();
  exchange(
      *one, "INCR a\r\nPING\r\n*2\r\n$4\r\nINCR\r\n$1\r\na\r\nGET a\r\nLPUSH\r\n",
      ":1\r\n+PONG\r\n:2\r\n$1\r\n2\r\n-ERR unknown command 'LPUSH': weir limits rates, and "
      "stores nothing else. It knows CL.THROTTLE, and INCR, INCRBY, DECR, DECRBY, GET, SET … NX "
      "EX, EXPIRE, TTL, EXISTS, DEL of keys that a rule limits\r\n");
  EXPECT_THAT(service_.calls, ElementsAre("a*1 a*1 a*0"));
  EXPECT_EQ(front_->counters().commands, 5u);
}

TEST_F(RedisFrontTest, LongPipelinesAreCutIntoBatches) {
  const auto one = client();
  std::string sent;
  std::string expected;
  for (int i = 1; i <= 3000; ++i) {
    sent += "INCR a\r\n";
    expected += fmt::format(":{}\r\n", i);
  }
  exchange(*one, sent, expected);
  EXPECT_LT(service_.calls.size(), 100u);
}

TEST_F(RedisFrontTest, ACommandMayComeByteByByte) {
  const auto one = client();
  for (const char byte : std::string_view("*2\r\n$4\r\nINCR\r\n$1\r\na\r\n")) {
    one->send({&byte, 1});
    turn_();
  }
  receive(*one, ":1\r\n");
}

// Parts are answered when they are: what is told keeps its order, and what follows waits.
TEST_F(RedisFrontTest, LateAnswersKeepTheirOrder) {
  const auto one = client();
  one->send("INCR late\r\nINCR a\r\nPING\r\nINCR late\r\n");
  await(2);
  one->send("INCR b\r\n");
  rpc::test::turn(loop_, 5);
  EXPECT_EQ(one->received(), "");
  EXPECT_EQ(service_.calls.size(), 1u);
  service_.waiting[1]();
  rpc::test::turn(loop_, 5);
  EXPECT_EQ(one->received(), "");
  service_.waiting[0]();
  receive(*one, ":1\r\n:1\r\n+PONG\r\n:2\r\n:1\r\n");
}

TEST_F(RedisFrontTest, AnswersMayComeWhenTheConnectionIsGone) {
  auto one = client();
  one->send("INCR late\r\n");
  await(1);
  one->leave();
  EXPECT_TRUE(rpc::test::eventually(loop_, [&] {
    front_->drain();
    return true;
  }));
  front_.reset();
  rpc::test::turn(loop_, 2);
  service_.waiting[0]();
}

TEST_F(RedisFrontTest, WhatIsNotAnsweredInTimeIsAnError) {
  options_.answer_timeout = 20 * kMillisecond;
  const auto one = client();
  one->send("INCR a\r\nINCR late\r\nPING\r\n");
  await(1);
  receive(*one, ":1\r\n-ERR deadline: no answer in time; it may have been counted\r\n+PONG\r\n");
  service_.waiting[0]();  // has no effect any more
  exchange(*one, "INCR a\r\n", ":2\r\n");
  EXPECT_EQ(front_->counters().unanswered, 1u);
}

TEST_F(RedisFrontTest, AServiceThatThrowsIsAnError) {
  const auto one = client();
  service_.throws = true;
  exchange(*one, "INCR a\r\nPING\r\n", "-ERR the command could not be handled\r\n+PONG\r\n");
  service_.throws = false;
  exchange(*one, "INCR a\r\n", ":1\r\n");
}

TEST_F(RedisFrontTest, TransactionsAreAnsweredAsOne) {
  const auto one = client();
  exchange(*one, "MULTI\r\nINCR a\r\nEXPIRE a 60\r\nEXEC\r\nMULTI\r\nINCR a\r\nEXEC\r\n",
           "+OK\r\n+QUEUED\r\n+QUEUED\r\n*2\r\n:1\r\n:1\r\n+OK\r\n+QUEUED\r\n*1\r\n:2\r\n");
  EXPECT_EQ(service_.calls.size(), 1u);
}

TEST_F(RedisFrontTest, ATokenSaysWhoAsksFromThenOn) {
  const std::string good = make_token();
  const LoadedAccess loaded = parse_access(
      fmt::format("tokens:\n- {{name: ann, hash: '{}'}}", to_string(hash_token(good))), "access");
  Access access;
  access.replace(loaded.table);
  options_.access = &access;
  const auto one = client();
  exchange(*one,
           fmt::format("INCR a\r\nAUTH {}\r\nINCR a\r\nRESET\r\nINCR a\r\nAUTH bad\r\n", good),
           ":1\r\n+OK\r\n:2\r\n+RESET\r\n:3\r\n"
           "-WRONGPASS the password is no token that is known here\r\n");
  EXPECT_THAT(service_.who, ElementsAre("", "ann", ""));
  front_.reset();
  rpc::test::turn(loop_, 2);
}

TEST_F(RedisFrontTest, WhatIsNoRespIsAnsweredAndTheConnectionCloses) {
  const auto one = client();
  exchange(*one, "PING\r\n*x\r\nPING\r\n",
           "+PONG\r\n-ERR Protocol error: expected an array of 0 to 1024 arguments\r\n");
  EXPECT_TRUE(one->closed());
  const auto http = client();
  http->send("POST / HTTP/1.1\r\nHost: a\r\n\r\nINCR a\r\n");
  EXPECT_FALSE(http->closed());
  EXPECT_THAT(http->received(), StartsWith("-ERR this port speaks Redis"));
  EXPECT_TRUE(service_.calls.empty());
}

TEST_F(RedisFrontTest, QuitCloses) {
  const auto one = client();
  one->send("QUIT\r\nINCR a\r\n");
  EXPECT_FALSE(one->closed());
  EXPECT_EQ(one->received(), "+OK\r\n");
  EXPECT_TRUE(service_.calls.empty());
}

TEST_F(RedisFrontTest, HalfACommandHasADeadline) {
  options_.command_timeout = 30 * kMillisecond;
  const auto one = client();
  const auto idle = client();
  one->send("*2\r\n$4\r\nIN");
  EXPECT_TRUE(one->closed());
  EXPECT_EQ(front_->counters().timed_out, 1u);
  exchange(*idle, "PING\r\n", "+PONG\r\n");  // who asks nothing has none
}

TEST_F(RedisFrontTest, AClientThatDoesNotReadIsHeldBack) {
  options_.max_waiting = 10'000;
  options_.send_timeout = 50 * kMillisecond;
  const auto one = client();
  const std::string large = "*2\r\n$4\r\nECHO\r\n$60000\r\n" + std::string(60'000, 'x') + "\r\n";
  std::size_t sent = 0;
  EXPECT_TRUE(rpc::test::eventually(loop_, [&] {
    // What was taken in part goes on where it was cut.
    for (int i = 0; i < 20; ++i) {
      sent += one->try_send(std::string_view(large).substr(sent % large.size()));
    }
    return front_->counters().timed_out == 1;
  }));
  EXPECT_LT(sent, 100u << 20);
}

TEST_F(RedisFrontTest, IdleConnectionsMakeRoom) {
  budget_ = std::make_shared<ConnectionBudget>(2);
  options_.evict_after = 5 * kMillisecond;
  const auto asked = client();
  exchange(*asked, "PING\r\n", "+PONG\r\n");
  const auto silent = client();
  rpc::test::turn(loop_, 20);
  const auto other = client();
  exchange(*other, "PING\r\n", "+PONG\r\n");
  EXPECT_TRUE(silent->closed());
  exchange(*asked, "PING\r\n", "+PONG\r\n");
  EXPECT_EQ(front_->counters().evicted, 1u);
}

TEST_F(RedisFrontTest, DrainingClosesWhatRestsAndAnswersWhatIsAsked) {
  const auto idle = client();
  exchange(*idle, "PING\r\n", "+PONG\r\n");
  const auto busy = client();
  busy->send("INCR late\r\n");
  await(1);
  front_->drain();
  EXPECT_TRUE(idle->closed());
  EXPECT_FALSE(busy->closed_now());
  service_.waiting[0]();
  receive(*busy, ":1\r\n");
  EXPECT_TRUE(busy->closed());
}

TEST_F(RedisFrontTest, TheOtherSideMayCloseItsHalf) {
  const auto one = client();
  one->send("INCR late\r\n");
  one->shut_write();
  await(1);
  service_.waiting[0]();
  receive(*one, ":1\r\n");
  EXPECT_TRUE(one->closed());
}

}  // namespace
}  // namespace weir::node
