#include <weir/node/fronts/admin/admin_front.h>

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <weir/node/access/access_file.h>
#include <weir/rpc/net/test_util.h>

namespace weir::node {
namespace {

struct Node final : Operations {
  void status_json(Text done) override { done(R"({"region":"eu"})"); }
  void metrics(Text done) override { made.push_back(std::move(done)); }
  std::vector<Condition> conditions() override { return now; }
  std::vector<Condition> now{{"storage"}, {"rules"}};
  std::vector<Text> made;  // for the test to tell
};

class AdminFrontTest : public testing::Test {
 protected:
  ~AdminFrontTest() noexcept override {}
  void SetUp() override {
    std::string error;
    ASSERT_TRUE(front_.start("127.0.0.1:0", rpc::Sharing::alone, error)) << error;
  }
  void TearDown() override {
    front_.stop();
    rpc::test::turn(loop_, 2);
  }

  /// Tells the metrics that were asked for, in later turns.
  void tell_metrics() {
    for (Operations::Text& done : std::exchange(node_.made, {})) done("weir_series 3\n");
  }

  /// The whole answer to one request, after which the connection closes.
  std::string ask(const std::string& line) {
    rpc::test::RawSocket socket(rpc::test::local(front_.port()));
    const std::string text = line + " HTTP/1.1\r\nHost: n\r\nConnection: close\r\n\r\n";
    socket.send({text.begin(), text.end()});
    std::string answer;
    rpc::test::eventually(loop_, [&] {
      tell_metrics();
      char buffer[4096];
      const ssize_t got = ::recv(socket.fd(), buffer, sizeof buffer, MSG_DONTWAIT);
      if (got > 0) answer.append(buffer, static_cast<std::size_t>(got));
      return got == 0;
    });
    return answer;
  }

  rpc::EventLoop loop_;
  Node node_;
  Access access_;
  AdminFront front_{loop_, node_, &access_};
};

TEST_F(AdminFrontTest, StatusAndMetricsAreForThoseWhoMayRead) {
  access_.replace(parse_access("anonymous: [{from: [127.0.0.0/8], check: all}]", "access").table);
  for (const char* path : {"/v1/status", "/metrics"}) {
    const std::string answer = ask(std::string("GET ") + path);
    EXPECT_NE(answer.find("HTTP/1.1 401 Unauthorized"), answer.npos) << answer;
    EXPECT_NE(answer.find("WWW-Authenticate: Bearer\r\n"), answer.npos) << answer;
  }
  for (const char* path : {"/healthz", "/readyz"}) {
    EXPECT_NE(ask(std::string("GET ") + path).find("HTTP/1.1 200"), std::string::npos);
  }
  EXPECT_EQ(access_.denials(0, DenialReason::anonymous), 2u);
}

TEST_F(AdminFrontTest, AnswersOperators) {
  EXPECT_NE(ask("GET /v1/status").find("{\"region\":\"eu\"}"), std::string::npos);
  const std::string metrics = ask("GET /metrics");
  EXPECT_NE(metrics.find("text/plain; version=0.0.4"), std::string::npos) << metrics;
  EXPECT_NE(metrics.find("\r\n\r\nweir_series 3\n"), std::string::npos) << metrics;
  EXPECT_EQ(ask("HEAD /metrics").find("weir_series"), std::string::npos);
}

TEST_F(AdminFrontTest, WhoHasGoneIsNotAnswered) {
  {
    rpc::test::RawSocket socket(rpc::test::local(front_.port()));
    const std::string text = "GET /metrics HTTP/1.1\r\nHost: n\r\n\r\n";
    socket.send({text.begin(), text.end()});
    rpc::test::eventually(loop_, [&] { return !node_.made.empty(); });
  }
  rpc::test::turn(loop_, 5);
  tell_metrics();
  EXPECT_EQ(ask("GET /healthz").find("HTTP/1.1 200"), 0u);
}

TEST_F(AdminFrontTest, ProbesSayWhy) {
  EXPECT_EQ(ask("GET /healthz").find("HTTP/1.1 200"), 0u);
  EXPECT_EQ(ask("GET /readyz").find("HTTP/1.1 200"), 0u);
  node_.now[1] = {"rules", true, true, "line 3"};
  EXPECT_NE(ask("GET /readyz").find("\r\n\r\nok, but rules: line 3\n"), std::string::npos);
  node_.now[0] = {"storage", false, true, "the \"disk\" is full"};
  EXPECT_EQ(ask("GET /healthz").find("HTTP/1.1 200"), 0u);
  const std::string unready = ask("GET /readyz");
  EXPECT_EQ(unready.find("HTTP/1.1 503"), 0u);
  EXPECT_NE(unready.find(R"("detail":"storage: the \"disk\" is full")"), std::string::npos)
      << unready;
  node_.now[0].alive = false;
  EXPECT_EQ(ask("GET /healthz").find("HTTP/1.1 503"), 0u);
}

TEST_F(AdminFrontTest, NothingElse) {
  EXPECT_EQ(ask("GET /v1/check").find("HTTP/1.1 404"), 0u);
  const std::string post = ask("POST /metrics");
  EXPECT_EQ(post.find("HTTP/1.1 405"), 0u);
  EXPECT_NE(post.find("Allow: GET, HEAD\r\n"), std::string::npos);
}

}  // namespace
}  // namespace weir::node
