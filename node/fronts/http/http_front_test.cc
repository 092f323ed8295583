#include <weir/node/fronts/http/http_front.h>

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>
#include <uv.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <functional>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

namespace weir::node {
namespace {

using nlohmann::json;
using testing::HasSubstr;
using Clock = std::chrono::steady_clock;

// Long enough for the slowest machine: reached only if a test fails.
constexpr auto kPatience = std::chrono::seconds(20);

struct Response {
  int status = 0;
  std::map<std::string, std::string> headers;  // names in lower case
  std::string body;
  std::string header(const std::string& name) const {
    const auto at = headers.find(name);
    return at == headers.end() ? "(absent)" : at->second;
  }
};

// A raw connection to the front, driven in the same thread as the loop.
class Client {
 public:
  Client(uv_loop_t* loop, std::uint16_t port, int receive_buffer = 0) : loop_(loop) {
    fd_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (receive_buffer > 0) {
      setsockopt(fd_, SOL_SOCKET, SO_RCVBUF, &receive_buffer, sizeof(receive_buffer));
    }
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    fcntl(fd_, F_SETFL, O_NONBLOCK);
  }
  ~Client() { close_now(); }
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  void close_now() {
    if (fd_ >= 0) close(fd_);
    fd_ = -1;
  }

  // Sends while the loop runs; stops early if the other side closes.
  void send_all(std::string_view bytes) {
    const auto until = Clock::now() + kPatience;
    while (!bytes.empty() && Clock::now() < until) {
      const ssize_t n = send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (n > 0) {
        bytes.remove_prefix(static_cast<std::size_t>(n));
      } else if (n < 0 && errno != EAGAIN) {
        return;
      }
      turn();
    }
    EXPECT_TRUE(bytes.empty()) << "the front did not take the request";
  }

  // The next response; `head`: it answers a HEAD. Empty if the connection closed before one.
  std::optional<Response> receive(bool head = false) {
    std::optional<Response> out;
    wait([&] { return (out = parse(head)).has_value() || closed_; });
    return out;
  }

  // True once the other side has closed and everything it sent was read by receive().
  bool closed() {
    wait([&] { return closed_; });
    return closed_ && in_.empty();
  }

  bool anything_received() {
    for (int i = 0; i < 20; ++i) turn();
    return !in_.empty();
  }

  // Runs the loop until `condition`.
  void wait(const std::function<bool()>& condition) {
    const auto until = Clock::now() + kPatience;
    while (!condition()) {
      if (Clock::now() > until) {
        ADD_FAILURE() << "waited in vain";
        return;
      }
      turn();
    }
  }

  int fd() const { return fd_; }

 private:
  void turn() {
    uv_run(loop_, UV_RUN_NOWAIT);
    if (fd_ < 0 || paused_) return;
    char buffer[4096];
    const ssize_t n = recv(fd_, buffer, sizeof(buffer), 0);
    if (n > 0) {
      in_.append(buffer, static_cast<std::size_t>(n));
    } else if (n == 0 || errno != EAGAIN) {
      closed_ = true;
    } else {
      pollfd waiting{fd_, POLLIN, 0};
      poll(&waiting, 1, 1);
    }
  }

  std::optional<Response> parse(bool head) {
    const std::size_t end = in_.find("\r\n\r\n");
    if (end == std::string::npos) return std::nullopt;
    Response out;
    std::size_t line_end = in_.find("\r\n");
    EXPECT_EQ(in_.substr(0, 9), "HTTP/1.1 ");
    out.status = std::stoi(in_.substr(9, 3));
    while (line_end < end) {
      const std::size_t start = line_end + 2;
      line_end = in_.find("\r\n", start);
      const std::string line = in_.substr(start, line_end - start);
      const std::size_t colon = line.find(": ");
      std::string name = line.substr(0, colon);
      std::transform(name.begin(), name.end(), name.begin(),
                     [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
      EXPECT_TRUE(out.headers.emplace(name, line.substr(colon + 2)).second) << line;
    }
    if (out.status == 100) {
      in_.erase(0, end + 4);
      return parse(head);
    }
    const std::size_t length =
        head ? 0 : static_cast<std::size_t>(std::stoul(out.headers.at("content-length")));
    if (in_.size() < end + 4 + length) return std::nullopt;
    out.body = in_.substr(end + 4, length);
    in_.erase(0, end + 4 + length);
    return out;
  }

 public:
  bool paused_ = false;  // takes nothing from the socket

 private:
  uv_loop_t* loop_;
  int fd_ = -1;
  std::string in_;
  bool closed_ = false;
};

// Answers as told, and remembers what it was asked.
class FakeHandler final : public HttpHandler {
 public:
  void check(const Request& request, std::function<void(const HttpAnswer&)> done) override {
    std::string seen(request.domain);
    for (const Entry& entry : request.descriptor) {
      seen += " " + std::string(entry.key) + "=" + std::string(entry.value);
    }
    if (!request.id.empty()) seen += " id " + std::string(request.id);
    asked.push_back(seen + " " + std::to_string(request.hits));
    if (throws) throw std::runtime_error("boom");
    if (deferred) {
      waiting.push_back(std::move(done));
    } else {
      done(answer);
      if (twice) done(HttpAnswer{"a second answer", false, -1, 0, {}});
    }
  }
  void reserve(const Request& request, Nanos timeout,
               std::function<void(const HttpAnswer&)> done) override {
    asked.push_back("reserve for " + std::to_string(timeout / kMillisecond));
    check(request, std::move(done));
  }
  void settle(std::string_view ticket, std::uint64_t hits,
              std::function<void(const HttpSettled&)> done) override {
    asked.push_back("settle " + std::string(ticket) + " " + std::to_string(hits));
    done(settled);
  }
  std::string status_json() override { return R"({"node":"eu-1"})"; }
  std::string metrics() override { return metrics_text; }
  bool healthy(std::string& why) override {
    why = "the disk is gone";
    return is_healthy;
  }
  bool ready(std::string& why) override {
    why = "still reading the disk";
    return is_ready;
  }

  HttpAnswer answer;
  HttpSettled settled;
  bool deferred = false;
  bool twice = false;
  bool throws = false;
  bool is_healthy = true;
  bool is_ready = true;
  std::string metrics_text = "weir_series 1\n";
  std::vector<std::string> asked;
  std::vector<std::function<void(const HttpAnswer&)>> waiting;
};

HttpAnswer allowing(std::uint64_t remaining = 41) {
  HttpAnswer answer;
  answer.deciding = 0;
  answer.now = 1'767'323'045 * kSecond;
  answer.statuses = {
      {"per-key", true, false, false, 100, remaining, 12'500 * kMillisecond, 0, 100, kMinute}};
  return answer;
}

HttpAnswer denying() {
  HttpAnswer answer = allowing();
  answer.allowed = false;
  answer.deciding = 1;
  answer.statuses.push_back(
      {"daily \"x\"", false, false, false, 1000, 0, kHour, 1'500 * kMillisecond, 1000, kDay});
  return answer;
}

std::string post(const std::string& body, const std::string& more = "",
                 const std::string& path = "/v1/check") {
  return "POST " + path + " HTTP/1.1\r\nHost: weir\r\nContent-Type: application/json\r\n" + more +
         "Content-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body;
}

std::string get(const std::string& path, const std::string& method = "GET") {
  return method + " " + path + " HTTP/1.1\r\nHost: weir\r\n\r\n";
}

const std::string kBody = R"({"domain":"api","descriptor":{"api_key":"k"}})";

class HttpFrontTest : public testing::Test {
 protected:
  HttpFrontTest() {
    signal(SIGPIPE, SIG_IGN);
    uv_loop_init(&loop_);
    handler_.answer = allowing();
  }
  ~HttpFrontTest() override {
    front_.reset();
    uv_run(&loop_, UV_RUN_DEFAULT);
    EXPECT_EQ(uv_loop_close(&loop_), 0);
  }
  void start(HttpOptions options = {}) {
    front_ = std::make_unique<HttpFront>(&loop_, "127.0.0.1:0", options, handler_);
    std::string error;
    ASSERT_TRUE(front_->start(error)) << error;
    ASSERT_NE(front_->port(), 0);
  }
  std::unique_ptr<Client> client(int receive_buffer = 0) {
    return std::make_unique<Client>(&loop_, front_->port(), receive_buffer);
  }
  Response ask(Client& client, const std::string& bytes, bool head = false) {
    client.send_all(bytes);
    const std::optional<Response> response = client.receive(head);
    EXPECT_TRUE(response.has_value()) << "closed without an answer";
    return response.value_or(Response{});
  }
  Response ask(const std::string& bytes) { return ask(*client(), bytes); }

  uv_loop_t loop_;
  FakeHandler handler_;
  std::unique_ptr<HttpFront> front_;
};

TEST_F(HttpFrontTest, ReservesAndSettles) {
  start();
  auto connection = client();
  handler_.answer.ticket = "00ff-7";
  Response reply =
      ask(*connection, post(R"({"domain":"llm","hits":500,"request_id":"r1","timeout_ms":9000})",
                            "", "/v1/reserve"));
  EXPECT_EQ(reply.status, 200);
  EXPECT_EQ(json::parse(reply.body)["ticket"], "00ff-7");
  EXPECT_EQ(handler_.asked, (std::vector<std::string>{"reserve for 9000", "llm id r1 500"}));

  handler_.settled.known = true;
  handler_.settled.reserved = 500;
  reply = ask(*connection, post(R"({"ticket":"00ff-7","hits":321})", "", "/v1/settle"));
  EXPECT_EQ(reply.status, 200);
  EXPECT_EQ(handler_.asked.back(), "settle 00ff-7 321");
  EXPECT_EQ(json::parse(reply.body),
            json::parse(R"({"settled":true,"reserved":500,"lapsed":false,"degraded":false})"));

  handler_.settled.known = false;
  reply = ask(*connection, post(R"({"ticket":"00ff-7","hits":321})", "", "/v1/settle"));
  EXPECT_EQ(reply.status, 404);
  EXPECT_EQ(json::parse(reply.body)["field"], "ticket");
  handler_.settled.error = "the node is stopping";
  EXPECT_EQ(ask(*connection, post(R"({"ticket":"a","hits":1})", "", "/v1/settle")).status, 503);
  EXPECT_EQ(ask(*connection, post(R"({"ticket":"a"})", "", "/v1/settle")).status, 400);
  EXPECT_EQ(ask(*connection, post(R"({"hits":1})", "", "/v1/reserve")).status, 400);
  handler_.answer = denying();
  handler_.answer.ticket = "";
  reply = ask(*connection, post(R"({"domain":"llm","hits":500})", "", "/v1/reserve"));
  EXPECT_EQ(reply.status, 429);
  EXPECT_TRUE(json::parse(reply.body)["ticket"].is_null());
}

TEST_F(HttpFrontTest, AllowsWithHeaders) {
  start();
  const Response got = ask(post(R"({"domain":"api","descriptor":{"a":"1","b":"2"},"hits":3})"));
  EXPECT_EQ(got.status, 200);
  EXPECT_THAT(handler_.asked, testing::ElementsAre("api a=1 b=2 3"));
  EXPECT_EQ(got.header("content-type"), "application/json");
  EXPECT_EQ(got.header("ratelimit-policy"), "\"per-key\";q=100;w=60");
  EXPECT_EQ(got.header("ratelimit"), "\"per-key\";r=41;t=13");
  EXPECT_EQ(got.header("x-ratelimit-limit"), "100");
  EXPECT_EQ(got.header("x-ratelimit-remaining"), "41");
  EXPECT_EQ(got.header("x-ratelimit-reset"), "13");
  EXPECT_EQ(got.header("retry-after"), "(absent)");
  const json body = json::parse(got.body);
  EXPECT_EQ(body["allowed"], true);
  EXPECT_EQ(body["rule"], "per-key");
  EXPECT_EQ(body["reset_ms"], 12'500);
  EXPECT_EQ(body["retry_after_ms"], 0);
}

TEST_F(HttpFrontTest, DeniesWithTheDecidingRule) {
  HttpOptions options;
  options.reset = ResetFormat::epoch;
  start(options);
  handler_.answer = denying();
  const Response got = ask(post(kBody));
  EXPECT_EQ(got.status, 429);
  EXPECT_EQ(got.header("content-type"), "application/problem+json");
  EXPECT_EQ(got.header("ratelimit"), "\"daily \\\"x\\\"\";r=0;t=2");
  EXPECT_EQ(got.header("retry-after"), "2");
  EXPECT_EQ(got.header("x-ratelimit-limit"), "1000");
  EXPECT_EQ(got.header("x-ratelimit-remaining"), "0");
  EXPECT_EQ(got.header("x-ratelimit-reset"), "1767323047");
  const json body = json::parse(got.body);
  EXPECT_EQ(body["type"], "https://iana.org/assignments/http-problem-types#quota-exceeded");
  EXPECT_EQ(body["violated-policies"], json({"daily \"x\""}));
  EXPECT_EQ(body["retry_after_ms"], 1500);
}

TEST_F(HttpFrontTest, NeverHasNoRetryAfter) {
  start();
  handler_.answer = denying();
  handler_.answer.statuses[1].retry_after = kNever;
  const Response got = ask(post(kBody));
  EXPECT_EQ(got.status, 429);
  EXPECT_EQ(got.header("retry-after"), "(absent)");
  EXPECT_TRUE(json::parse(got.body).at("retry_after_ms").is_null());
}

TEST_F(HttpFrontTest, AnErrorOfTheNodeIs503) {
  start();
  handler_.answer.error = "the store failed";
  const Response got = ask(post(kBody));
  EXPECT_EQ(got.status, 503);
  EXPECT_EQ(got.header("ratelimit"), "(absent)");
  EXPECT_EQ(json::parse(got.body)["detail"], "the store failed");
}

TEST_F(HttpFrontTest, AnExceptionIs500AndTheFrontLives) {
  start();
  handler_.throws = true;
  const auto connection = client();
  EXPECT_EQ(ask(*connection, post(kBody)).status, 500);
  handler_.throws = false;
  EXPECT_EQ(ask(*connection, post(kBody)).status, 200);
}

TEST_F(HttpFrontTest, TheFirstAnswerCounts) {
  start();
  handler_.twice = true;
  EXPECT_EQ(ask(post(kBody)).status, 200);
}

TEST_F(HttpFrontTest, ServesTheOtherEndpoints) {
  start();
  const auto connection = client();
  Response got = ask(*connection, get("/v1/status"));
  EXPECT_EQ(got.status, 200);
  EXPECT_EQ(got.header("content-type"), "application/json");
  EXPECT_EQ(got.body, R"({"node":"eu-1"})");
  got = ask(*connection, get("/metrics"));
  EXPECT_EQ(got.status, 200);
  EXPECT_EQ(got.header("content-type"), "text/plain; version=0.0.4; charset=utf-8");
  EXPECT_EQ(got.body, "weir_series 1\n");
  EXPECT_EQ(ask(*connection, get("/metrics?x=y")).body, "weir_series 1\n");
  got = ask(*connection, get("/metrics", "HEAD"), true);
  EXPECT_EQ(got.status, 200);
  EXPECT_EQ(got.header("content-length"), "14");
  for (const char* path : {"/healthz", "/readyz"}) {
    got = ask(*connection, get(path));
    EXPECT_EQ(got.status, 200);
    EXPECT_EQ(got.body, "ok\n");
  }
  handler_.is_healthy = handler_.is_ready = false;
  got = ask(*connection, get("/healthz"));
  EXPECT_EQ(got.status, 503);
  EXPECT_EQ(json::parse(got.body)["detail"], "the disk is gone");
  got = ask(*connection, get("/readyz"));
  EXPECT_EQ(got.status, 503);
  EXPECT_EQ(json::parse(got.body)["detail"], "still reading the disk");
}

TEST_F(HttpFrontTest, NamesWhatIsWrong) {
  start();
  const auto connection = client();
  const auto problem = [&](const std::string& bytes, int status) {
    const Response got = ask(*connection, bytes);
    EXPECT_EQ(got.status, status) << bytes;
    EXPECT_EQ(got.header("content-type"), "application/problem+json");
    const json body = json::parse(got.body);
    EXPECT_EQ(body["status"], status);
    return body;
  };
  const json hits = problem(post(R"({"domain":"api","hits":-1})"), 400);
  EXPECT_EQ(hits["field"], "hits");
  EXPECT_EQ(hits["detail"], "hits: expected an integer from 0 to 9007199254740992");
  EXPECT_THAT(problem(post("{"), 400)["detail"], HasSubstr("broken at byte"));
  EXPECT_EQ(problem(post(""), 400).contains("field"), false);
  problem(get("/"), 404);
  problem(get("/v1/check/"), 404);
  problem(get("/v1/check%00"), 404);
  problem("POST /nowhere HTTP/1.1\r\nHost: w\r\nContent-Length: 5\r\n\r\nhello", 404);
  EXPECT_EQ(ask(*connection, get("/v1/check")).header("allow"), "POST");
  problem(get("/v1/check"), 405);
  problem(get("/v1/check", "DELETE"), 405);
  EXPECT_EQ(ask(*connection, get("/metrics", "OPTIONS")).header("allow"), "GET, HEAD");
  problem("POST /metrics HTTP/1.1\r\nHost: w\r\nContent-Length: 2\r\n\r\n{}", 405);
  problem("POST /v1/check HTTP/1.1\r\nHost: w\r\nContent-Length: 2\r\n\r\n{}", 415);
  problem(
      "POST /v1/check HTTP/1.1\r\nHost: w\r\nContent-Type: application/"
      "x-www-form-urlencoded\r\nContent-Length: 2\r\n\r\n{}",
      415);
  EXPECT_TRUE(handler_.asked.empty());
  // The connection was kept through all of it.
  EXPECT_EQ(ask(*connection, post(kBody)).status, 200);
}

TEST_F(HttpFrontTest, AnswersPipelinedRequestsInOrder) {
  start();
  const auto connection = client();
  std::string bytes;
  for (int i = 0; i < 50; ++i) {
    bytes += post("{\"domain\":\"d\",\"hits\":" + std::to_string(i) + "}");
    bytes += get(i % 2 == 0 ? "/healthz" : "/metrics");
  }
  connection->send_all(bytes);
  for (int i = 0; i < 50; ++i) {
    const std::optional<Response> check = connection->receive();
    ASSERT_TRUE(check.has_value()) << i;
    EXPECT_EQ(json::parse(check->body)["rule"], "per-key");
    const std::optional<Response> other = connection->receive();
    ASSERT_TRUE(other.has_value()) << i;
    EXPECT_EQ(other->body, i % 2 == 0 ? "ok\n" : "weir_series 1\n");
  }
  ASSERT_EQ(handler_.asked.size(), 50u);
  EXPECT_EQ(handler_.asked.front(), "d 0");
  EXPECT_EQ(handler_.asked.back(), "d 49");
}

TEST_F(HttpFrontTest, TakesChunkedBodiesAndBodiesInPieces) {
  start();
  const auto connection = client();
  const std::string head =
      "POST /v1/check HTTP/1.1\r\nHost: w\r\nContent-Type: application/json\r\n";
  EXPECT_EQ(ask(*connection, head + "Transfer-Encoding: chunked\r\n\r\n"
                                    "8\r\n{\"domain\r\n7\r\n\":\"chk\"\r\n1\r\n}\r\n0\r\n\r\n")
                .status,
            200);
  for (char c : post(kBody)) connection->send_all(std::string_view(&c, 1));
  const std::optional<Response> got = connection->receive();
  ASSERT_TRUE(got.has_value());
  EXPECT_EQ(got->status, 200);
  EXPECT_THAT(handler_.asked, testing::ElementsAre("chk 1", "api api_key=k 1"));
}

TEST_F(HttpFrontTest, HonoursExpectContinue) {
  start();
  const auto connection = client();
  const std::string whole = post(kBody, "Expect: 100-continue\r\n");
  const std::size_t head = whole.size() - kBody.size();
  connection->send_all(whole.substr(0, head));
  connection->wait([&] { return connection->anything_received(); });
  connection->send_all(whole.substr(head));
  EXPECT_EQ(connection->receive().value_or(Response{}).status, 200);

  // One that is too large is refused before it is sent, and nothing of it is waited for.
  connection->send_all(
      "POST /v1/check HTTP/1.1\r\nHost: w\r\nContent-Type: application/json\r\n"
      "Content-Length: 70000\r\nExpect: 100-continue\r\n\r\n");
  EXPECT_EQ(connection->receive().value_or(Response{}).status, 413);
  EXPECT_TRUE(connection->closed());
}

TEST_F(HttpFrontTest, DeferredAnswersComeWhenTheyAreReady) {
  start();
  handler_.deferred = true;
  const auto one = client();
  const auto two = client();
  one->send_all(post(kBody));
  two->send_all(post(kBody) + get("/healthz"));
  one->wait([&] { return handler_.waiting.size() == 2; });
  EXPECT_FALSE(one->anything_received());
  EXPECT_FALSE(two->anything_received());
  // Others are served meanwhile.
  EXPECT_EQ(ask(get("/healthz")).status, 200);

  handler_.waiting[1](allowing(7));
  const std::optional<Response> second = two->receive();
  ASSERT_TRUE(second.has_value());
  EXPECT_EQ(json::parse(second->body)["remaining"], 7);
  // What was pipelined behind it follows.
  EXPECT_EQ(two->receive().value_or(Response{}).body, "ok\n");
  EXPECT_FALSE(one->anything_received());

  handler_.waiting[0](denying());
  handler_.waiting[0](allowing());
  EXPECT_EQ(one->receive().value_or(Response{}).status, 429);
  handler_.deferred = false;
  EXPECT_EQ(ask(*one, post(kBody)).status, 200);
}

TEST_F(HttpFrontTest, OneCheckMayAnswerAnother) {
  start();
  handler_.deferred = true;
  const auto one = client();
  one->send_all(post(kBody));
  one->wait([&] { return handler_.waiting.size() == 1; });
  // From within MHD's callback for another connection.
  class Chained final : public HttpHandler {
   public:
    explicit Chained(FakeHandler& inner) : inner_(inner) {}
    void check(const Request&, std::function<void(const HttpAnswer&)>) override {}
    std::string status_json() override {
      inner_.waiting[0](allowing());
      return "{}";
    }
    std::string metrics() override { return ""; }
    bool healthy(std::string&) override { return true; }
    bool ready(std::string&) override { return true; }

   private:
    FakeHandler& inner_;
  } chained(handler_);
  HttpFront other(&loop_, "127.0.0.1:0", {}, chained);
  std::string error;
  ASSERT_TRUE(other.start(error)) << error;
  Client asker(&loop_, other.port());
  EXPECT_EQ(ask(asker, get("/v1/status")).status, 200);
  EXPECT_EQ(one->receive().value_or(Response{}).status, 200);
}

TEST_F(HttpFrontTest, ADeferredAnswerOutlivesItsClient) {
  start();
  handler_.deferred = true;
  auto gone = client();
  gone->send_all(post(kBody));
  gone->wait([&] { return handler_.waiting.size() == 1; });
  gone->close_now();
  EXPECT_EQ(ask(get("/healthz")).status, 200);
  handler_.waiting[0](allowing());
  EXPECT_EQ(ask(get("/healthz")).status, 200);
  handler_.waiting[0](allowing());
}

TEST_F(HttpFrontTest, AHandlerThatNeverAnswersIsA503) {
  HttpOptions options;
  options.answer_timeout = 30 * kMillisecond;
  start(options);
  handler_.deferred = true;
  const auto connection = client();
  const Response got = ask(*connection, post(kBody));
  EXPECT_EQ(got.status, 503);
  EXPECT_EQ(json::parse(got.body)["title"], "Service unavailable");
  handler_.waiting[0](allowing());  // too late
  handler_.deferred = false;
  EXPECT_EQ(ask(*connection, post(kBody)).status, 200);
}

TEST_F(HttpFrontTest, StopAnswersWhatIsSuspended) {
  start();
  handler_.deferred = true;
  const auto one = client();
  const auto two = client();
  const auto idle = client();
  const auto partial = client();
  const auto late = client();
  EXPECT_EQ(ask(*late, get("/healthz")).status, 200);
  EXPECT_EQ(ask(*idle, get("/healthz")).status, 200);
  one->send_all(post(kBody));
  two->send_all(post(kBody) + post(kBody));
  partial->send_all(post(kBody).substr(0, 80));
  one->wait([&] { return handler_.waiting.size() == 2; });
  const std::uint16_t port = front_->port();
  // Arrives, whole, while the front stops.
  const std::string last = post(kBody);
  ASSERT_EQ(send(late->fd(), last.data(), last.size(), MSG_NOSIGNAL), std::ssize(last));
  front_->stop();
  EXPECT_EQ(front_->port(), 0);

  const std::optional<Response> got = one->receive();
  ASSERT_TRUE(got.has_value());
  EXPECT_EQ(got->status, 503);
  EXPECT_EQ(got->header("connection"), "close");
  EXPECT_TRUE(one->closed());
  EXPECT_EQ(two->receive().value_or(Response{}).status, 503);
  EXPECT_TRUE(idle->closed());
  EXPECT_TRUE(partial->closed());
  EXPECT_EQ(late->receive().value_or(Response{}).status, 503);
  EXPECT_EQ(handler_.asked.size(), 2u);  // neither what was late nor what was pipelined

  // Answers that come now go nowhere, also when the front is gone.
  handler_.waiting[0](allowing());
  front_.reset();
  handler_.waiting[1](allowing());

  // Nobody listens there any more.
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  EXPECT_NE(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  close(fd);
}

TEST_F(HttpFrontTest, StopIsIdempotentAndFinal) {
  start();
  front_->stop();
  front_->stop();
  std::string error;
  EXPECT_FALSE(front_->start(error));
  EXPECT_THAT(error, HasSubstr("started before"));
}

TEST_F(HttpFrontTest, StartSaysWhyItFails) {
  start();
  std::string error;
  EXPECT_FALSE(front_->start(error));
  const std::string taken = "127.0.0.1:" + std::to_string(front_->port());
  HttpFront second(&loop_, taken, {}, handler_);
  EXPECT_FALSE(second.start(error));
  EXPECT_EQ(error, taken + ": Address already in use");
  HttpFront named(&loop_, "localhost:1", {}, handler_);
  EXPECT_FALSE(named.start(error));
  EXPECT_THAT(error, ::testing::HasSubstr("expected an address such as 127.0.0.1:7400"));
  EXPECT_EQ(named.port(), 0);
  // A failed start may be tried again.
  front_->stop();
  EXPECT_TRUE(second.start(error)) << error;
}

TEST_F(HttpFrontTest, ListensOnIpv6) {
  HttpFront six(&loop_, "[::1]:0", {}, handler_);
  std::string error;
  ASSERT_TRUE(six.start(error)) << error;
  EXPECT_NE(six.port(), 0);
}

TEST_F(HttpFrontTest, BodiesAboveTheLimitAreRefused) {
  HttpOptions options;
  options.max_body = 1024;
  start(options);
  const auto connection = client();
  std::string body = kBody;
  body.insert(1, 1024 - body.size(), ' ');
  EXPECT_EQ(ask(*connection, post(body)).status, 200);
  body.insert(1, 1, ' ');
  Response got = ask(*connection, post(body));
  EXPECT_EQ(got.status, 413);
  EXPECT_EQ(json::parse(got.body)["detail"], "The body may have 1024 bytes.");
  EXPECT_EQ(ask(*connection, post(std::string(300'000, ' '))).status, 413);
  EXPECT_EQ(ask(*connection,
                "POST /v1/check HTTP/1.1\r\nHost: w\r\nContent-Type: application/json\r\n"
                "Transfer-Encoding: chunked\r\n\r\n800\r\n" +
                    std::string(0x800, ' ') + "\r\n0\r\n\r\n")
                .status,
            413);
  // The connection was kept through all of it.
  EXPECT_EQ(ask(*connection, post(kBody)).status, 200);
  EXPECT_EQ(handler_.asked.size(), 2u);

  // Far too large: answered from the head alone, and closed.
  got = ask(*connection,
            "POST /v1/check HTTP/1.1\r\nHost: w\r\nContent-Type: application/json\r\n"
            "Content-Length: 9000000000000\r\n\r\n");
  EXPECT_EQ(got.status, 413);
  EXPECT_TRUE(connection->closed());
}

TEST_F(HttpFrontTest, EndlessChunksAreCutOff) {
  start();
  const auto connection = client();
  std::string bytes =
      "POST /v1/check HTTP/1.1\r\nHost: w\r\nContent-Type: application/json\r\n"
      "Transfer-Encoding: chunked\r\n\r\n";
  for (int i = 0; i < 40; ++i) bytes += "10000\r\n" + std::string(0x10000, 'x') + "\r\n";
  connection->send_all(bytes);
  EXPECT_FALSE(connection->receive().has_value());
  EXPECT_TRUE(connection->closed());
  EXPECT_TRUE(handler_.asked.empty());
}

TEST_F(HttpFrontTest, SurvivesGarbage) {
  start();
  std::string bytes;
  std::uint32_t state = 1;
  for (int i = 0; i < 4000; ++i) {
    state = state * 1664525u + 1013904223u;
    bytes += static_cast<char>(state >> 24);
  }
  for (const std::string& garbage :
       {std::string("\r\n\r\n\r\n\r\n"), std::string("GET\r\n\r\n"),
        std::string("\0\0\0\0\r\n\r\n", 8), std::string("GET / HTTP/9.9\r\n\r\n"),
        std::string("GET / HTTP/1.1\r\n\r\n"),
        std::string("POST /v1/check HTTP/1.1\r\nHost: w\r\nContent-Length: -1\r\n\r\n"),
        std::string("POST /v1/check HTTP/1.1\r\nHost: w\r\nContent-Length: abc\r\n\r\n"),
        std::string("POST /v1/check HTTP/1.1\r\nHost: w\r\nContent-Length: "
                    "99999999999999999999999\r\n\r\n"),
        std::string("POST /v1/check HTTP/1.1\r\nHost: w\r\nTransfer-Encoding: "
                    "chunked\r\n\r\nzz\r\n"),
        std::string("POST /v1/check HTTP/1.1\r\nHost: w\r\nTransfer-Encoding: "
                    "chunked\r\n\r\nFFFFFFFFFFFFFFFFFF\r\n"),
        "GET /" + std::string(100'000, 'a') + " HTTP/1.1\r\nHost: w\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: w\r\n" + std::string(100'000, 'h') + ": x\r\n\r\n",
        std::string("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 11), bytes}) {
    const auto connection = client();
    connection->send_all(garbage);
    connection->anything_received();
  }
  EXPECT_TRUE(handler_.asked.empty());
  EXPECT_EQ(ask(post(kBody)).status, 200);
}

TEST_F(HttpFrontTest, ASlowClientIsClosedThoughItKeepsSending) {
  HttpOptions options;
  options.idle_timeout = 500 * kMillisecond;
  start(options);
  const auto slow = client();
  const std::string bytes = post(kBody);
  // A byte every few milliseconds: never idle, and never done.
  char closed = 0;
  std::size_t sent = 0;
  slow->wait([&] {
    usleep(2000);
    const char c = sent < 60 ? bytes[sent] : 'x';  // the head never ends
    const ssize_t n = send(slow->fd(), &c, 1, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n == 1) ++sent;
    return recv(slow->fd(), &closed, 1, MSG_PEEK | MSG_DONTWAIT) == 0 || (n < 0 && errno != EAGAIN);
  });
  EXPECT_GT(sent, 1u);
  EXPECT_TRUE(handler_.asked.empty());
  EXPECT_EQ(ask(post(kBody)).status, 200);
}

TEST_F(HttpFrontTest, AnIdleConnectionIsClosed) {
  HttpOptions options;
  options.idle_timeout = 50 * kMillisecond;
  start(options);
  const auto fresh = client();
  const auto used = client();
  EXPECT_EQ(ask(*used, get("/healthz")).status, 200);
  EXPECT_TRUE(fresh->closed());
  EXPECT_TRUE(used->closed());
}

TEST_F(HttpFrontTest, TimeThatTheHandlerTakesIsNotTheClients) {
  HttpOptions options;
  options.idle_timeout = 50 * kMillisecond;
  start(options);
  handler_.deferred = true;
  const auto patient = client();
  const auto bystander = client();
  patient->send_all(post(kBody));
  EXPECT_TRUE(bystander->closed());  // the timeout has passed
  ASSERT_EQ(handler_.waiting.size(), 1u);
  usleep(60'000);
  EXPECT_FALSE(patient->anything_received());
  handler_.waiting[0](allowing());
  EXPECT_EQ(patient->receive().value_or(Response{}).status, 200);
}

TEST_F(HttpFrontTest, AClientThatDoesNotReadIsClosed) {
  HttpOptions options;
  options.idle_timeout = 100 * kMillisecond;
  start(options);
  handler_.metrics_text = std::string(16u << 20, 'm');
  const auto lazy = client(4096);
  lazy->paused_ = true;
  lazy->send_all(get("/metrics"));
  const auto until = Clock::now() + std::chrono::milliseconds(400);
  while (Clock::now() < until) {
    uv_run(&loop_, UV_RUN_NOWAIT);
    usleep(1000);
  }
  lazy->paused_ = false;
  EXPECT_FALSE(lazy->receive().has_value());  // cut before the end
}

TEST_F(HttpFrontTest, ALargeAnswerArrivesWhole) {
  start();
  handler_.metrics_text = std::string(8u << 20, 'm') + "end";
  const Response got = ask(get("/metrics"));
  EXPECT_EQ(got.body.size(), handler_.metrics_text.size());
  EXPECT_TRUE(got.body.ends_with("mend"));
}

TEST_F(HttpFrontTest, ConnectionsAboveTheLimitWait) {
  HttpOptions options;
  options.max_connections = 2;
  start(options);
  const auto one = client();
  const auto two = client();
  EXPECT_EQ(ask(*one, get("/healthz")).status, 200);
  EXPECT_EQ(ask(*two, get("/healthz")).status, 200);
  const auto three = client();
  three->send_all(get("/healthz"));
  EXPECT_FALSE(three->anything_received());
  one->close_now();
  EXPECT_EQ(three->receive().value_or(Response{}).status, 200);
}

TEST_F(HttpFrontTest, DoesNotSpinWhileItWaits) {
  start();
  handler_.deferred = true;
  const auto waiting = client();
  const auto idle = client();
  EXPECT_EQ(ask(*idle, get("/healthz")).status, 200);
  waiting->send_all(post(kBody));
  waiting->wait([&] { return handler_.waiting.size() == 1; });
  for (int i = 0; i < 20; ++i) waiting->anything_received();

  uv_timer_t alarm;
  uv_timer_init(&loop_, &alarm);
  bool rang = false;
  alarm.data = &rang;
  uv_timer_start(
      &alarm, [](uv_timer_t* timer) { *static_cast<bool*>(timer->data) = true; }, 300, 0);
  int turns = 0;
  while (!rang && turns < 1000) {
    uv_run(&loop_, UV_RUN_ONCE);
    ++turns;
  }
  EXPECT_LT(turns, 20);
  uv_close(reinterpret_cast<uv_handle_t*>(&alarm), nullptr);
  uv_run(&loop_, UV_RUN_NOWAIT);
  handler_.waiting[0](allowing());
  EXPECT_EQ(waiting->receive().value_or(Response{}).status, 200);
}

TEST_F(HttpFrontTest, ManyConnectionsInterleave) {
  start();
  std::vector<std::unique_ptr<Client>> clients;
  for (int i = 0; i < 64; ++i) clients.push_back(client());
  for (int round = 0; round < 5; ++round) {
    handler_.deferred = round % 2 == 1;
    handler_.waiting.clear();
    for (auto& each : clients) each->send_all(post(kBody));
    if (handler_.deferred) {
      clients[0]->wait([&] { return handler_.waiting.size() == clients.size(); });
      for (auto& done : handler_.waiting) done(allowing());
    }
    for (auto& each : clients) EXPECT_EQ(each->receive().value_or(Response{}).status, 200);
  }
  EXPECT_EQ(handler_.asked.size(), 5u * 64u);
}

}  // namespace
}  // namespace weir::node
