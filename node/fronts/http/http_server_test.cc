#include <weir/node/fronts/http/http_server.h>

#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>
#include <uv.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <weir/node/fronts/http/http_test_client.h>
#include <weir/node/fronts/http/http_test_util.h>

namespace weir::node {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::StartsWith;
using namespace std::string_literals;
using Clock = std::chrono::steady_clock;
using test::Client;
using test::Response;

// A listening socket on loopback.
class Door {
 public:
  Door() : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_storage name{};
    const socklen_t size = rpc::to_sockaddr(here(), name);
    EXPECT_EQ(::bind(fd_, reinterpret_cast<sockaddr*>(&name), size), 0);
    EXPECT_EQ(::listen(fd_, 128), 0);
  }
  ~Door() { ::close(fd_); }
  Door(const Door&) = delete;
  Door& operator=(const Door&) = delete;

  // Both ends of a connection; what the client may receive unread is limited by its buffer.
  std::pair<int, int> connect(int receive_buffer) {
    const int client = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (receive_buffer > 0) {
      ::setsockopt(client, SOL_SOCKET, SO_RCVBUF, &receive_buffer, sizeof receive_buffer);
    }
    sockaddr_storage name{};
    socklen_t size = sizeof name;
    ::getsockname(fd_, reinterpret_cast<sockaddr*>(&name), &size);
    EXPECT_EQ(::connect(client, reinterpret_cast<sockaddr*>(&name), size), 0);
    ::fcntl(client, F_SETFL, O_NONBLOCK);
    const int server = ::accept4(fd_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    return {client, server};
  }

 private:
  static rpc::Address here() {
    rpc::Address address;
    address.ip = {127, 0, 0, 1};
    return address;
  }
  int fd_;
};

class HttpServerTest : public testing::Test, public HttpServer::Handler {
 protected:
  HttpServerTest() { uv_loop_init(&loop_); }
  ~HttpServerTest() override {
    server_.reset();
    streams_.reset();
    while (uv_run(&loop_, UV_RUN_NOWAIT) != 0) continue;
    EXPECT_EQ(uv_loop_close(&loop_), 0);
    EXPECT_EQ(budget_->open(), 0u);
  }

  // Before the first client.
  void start(HttpServerOptions options, std::size_t connections = 100) {
    options.headers = test::EchoHandler::headers();
    budget_ = std::make_shared<ConnectionBudget>(connections);
    streams_ = std::make_unique<rpc::StreamLoop>(&loop_);
    server_ = std::make_unique<HttpServer>(*streams_, options, *this, budget_);
  }
  std::unique_ptr<Client> connect(int receive_buffer = 0) {
    if (server_ == nullptr) start({});
    const auto [client, server] = door_.connect(receive_buffer);
    server_->accept(server, rpc::Address{});
    return std::make_unique<Client>(turn_, client);
  }
  void turn_for(int milliseconds) {
    const auto until = Clock::now() + std::chrono::milliseconds(milliseconds);
    while (Clock::now() < until) turn_();
  }
  Response ask(std::string_view request, bool head = false) {
    auto client = connect();
    client->send(request);
    return client->receive(head).value_or(Response{});
  }

  void handle(std::span<HttpExchange* const> batch) override {
    peak_ = std::max(peak_, batch.size());
    if (on_handle_) {
      for (HttpExchange* exchange : batch) on_handle_(*exchange);
    } else {
      echo_.handle(batch);
    }
  }

  uv_loop_t loop_{};
  Door door_;
  std::shared_ptr<ConnectionBudget> budget_;
  std::unique_ptr<rpc::StreamLoop> streams_;
  std::unique_ptr<HttpServer> server_;
  test::EchoHandler echo_;
  std::function<void(HttpExchange&)> on_handle_;
  std::size_t peak_ = 0;  // requests in one batch
  const std::function<void()> turn_ = [this] {
    uv_run(&loop_, UV_RUN_NOWAIT);
    ::poll(nullptr, 0, 1);
  };
};

constexpr std::string_view kGet = "GET / HTTP/1.1\r\nHost: a\r\n\r\n";

TEST_F(HttpServerTest, AnswersOnAConnectionThatIsKept) {
  auto client = connect();
  client->send(
      "POST /v1/check?x=1 HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
      "x-request-id:  7\t\r\nContent-Length: 2\r\n\r\n{}");
  const Response first = client->receive().value();
  EXPECT_EQ(first.status, 200);
  EXPECT_EQ(first.body, "POST /v1/check?x=1 content-type=[application/json] X-Request-Id=[7] <{}>");
  EXPECT_EQ(first.header("Content-Type"), "text/plain");
  EXPECT_EQ(first.header("Connection"), "(absent)");
  EXPECT_THAT(first.header("Date"), testing::MatchesRegex("..., .. ... .... ..:..:.. GMT"));
  client->send(kGet);
  EXPECT_EQ(client->receive().value().body, "GET /");
  EXPECT_EQ(server_->connections(), 1u);
  EXPECT_EQ(server_->counters().requests, 2u);
}

TEST_F(HttpServerTest, KeepsOrClosesAsAsked) {
  auto client = connect();
  client->send("GET / HTTP/1.1\r\nHost: a\r\nConnection: x, Close\r\n\r\n");
  EXPECT_EQ(client->receive().value().header("Connection"), "close");
  EXPECT_TRUE(client->closed());

  client = connect();
  client->send("GET / HTTP/1.0\r\n\r\n");
  EXPECT_EQ(client->receive().value().header("Connection"), "close");
  EXPECT_TRUE(client->closed());

  client = connect();
  client->send("GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n");
  EXPECT_EQ(client->receive().value().header("Connection"), "keep-alive");
  client->send("GET / HTTP/1.0\r\n\r\n");
  EXPECT_TRUE(client->receive().has_value());
  EXPECT_TRUE(client->closed());
}

TEST_F(HttpServerTest, WhatFollowsTheLastRequestIsIgnored) {
  auto client = connect();
  client->send("GET /1 HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n" + std::string(kGet));
  EXPECT_EQ(client->receive().value().body, "GET /1");
  EXPECT_TRUE(client->closed());
  EXPECT_EQ(server_->counters().requests, 1u);
}

TEST_F(HttpServerTest, ClosesAfterTheAnswerIfTheClientSendsNoMore) {
  auto client = connect();
  client->send("GET /late HTTP/1.1\r\nHost: a\r\n\r\n");
  client->shut_write();
  turn_for(10);
  echo_.answer_late(*server_);
  EXPECT_EQ(client->receive().value().body, "GET /late");
  EXPECT_TRUE(client->closed());
  EXPECT_EQ(server_->connections(), 0u);
}

TEST_F(HttpServerTest, Head) {
  const Response response = ask("HEAD /x HTTP/1.1\r\nHost: a\r\n\r\n", true);
  EXPECT_EQ(response.header("Content-Length"), "7");
  EXPECT_EQ(response.body, "");
}

TEST_F(HttpServerTest, LengthsOfAnyNumberOfDigits) {
  std::size_t size = 0;
  on_handle_ = [&](HttpExchange& exchange) {
    exchange.respond(200, "text/plain", std::string(size, 'x'), "X-A: b\r\n");
  };
  auto client = connect();
  for (const std::size_t next : {0, 9, 10, 99, 100, 999, 1000, 123456, 1234567}) {
    size = next;
    client->send(kGet);
    const Response response = client->receive().value();
    EXPECT_EQ(response.body, std::string(size, 'x'));
    EXPECT_EQ(response.header("X-A"), "b");
  }
}

TEST_F(HttpServerTest, NoBodyWith204) {
  on_handle_ = [](HttpExchange& exchange) { exchange.respond(204, {}, "not sent"); };
  auto client = connect();
  client->send(std::string(kGet) + std::string(kGet));
  for (int i = 0; i < 2; ++i) {
    const Response response = client->receive().value();
    EXPECT_EQ(response.status, 204);
    EXPECT_EQ(response.header("Content-Length"), "(absent)");
  }
  EXPECT_EQ(client->received(), "");
}

TEST_F(HttpServerTest, FieldsCannotBeInjected) {
  on_handle_ = [](HttpExchange& exchange) {
    exchange.begin(200);
    exchange.field("X-Name", "a\r\nX-Evil: b");
    exchange.finish();
  };
  EXPECT_EQ(ask(kGet).header("X-Name"), "a  X-Evil: b");
}

TEST_F(HttpServerTest, Targets) {
  EXPECT_EQ(ask("GET http://host:80/p?q?r HTTP/1.1\r\nHost: a\r\n\r\n").body, "GET /p?q?r");
  EXPECT_EQ(ask("GET HTTPS://host?q HTTP/1.1\r\nHost: a\r\n\r\n").body, "GET /?q");
  EXPECT_EQ(ask("OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n").body, "OPTIONS *");
  EXPECT_EQ(ask("GET //a%00/../b HTTP/1.1\r\nHost: a\r\n\r\n").body, "GET //a%00/../b");
  const std::string longest = "/" + std::string(kMaxHttpTarget - 1, 'x');
  EXPECT_EQ(ask("GET " + longest + " HTTP/1.1\r\nHost: a\r\n\r\n").body, "GET " + longest);
}

TEST_F(HttpServerTest, Continue) {
  auto client = connect();
  client->send("POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-Continue\r\nContent-Length: 5\r\n\r\n");
  EXPECT_EQ(client->receive().value().status, 100);
  client->send("hel");
  turn_for(5);
  client->send("lo");
  EXPECT_EQ(client->receive().value().body, "POST / <hello>");
  // Not asked for if the body is there, or is not wanted.
  client->send("POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 1\r\n\r\nx");
  EXPECT_EQ(client->receive().value().status, 200);
  client->send(
      "POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 99999\r\n\r\n");
  EXPECT_EQ(client->receive().value().status, 413);
  EXPECT_TRUE(client->closed());
}

TEST_F(HttpServerTest, ChunkedBodies) {
  const std::string head = "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: Chunked\r\n\r\n";
  EXPECT_EQ(ask(head + "3\r\nabc\r\n00000A;x=\"y\"\r\n0123456789\r\n0\r\nTrailer: x\r\n\r\n").body,
            "POST / <abc0123456789>");
  EXPECT_EQ(ask(head + "0\r\n\r\n").body, "POST /");
  auto client = connect();
  client->send(head + "5\r\nab");
  turn_for(5);
  client->send("cde\r\n1");
  turn_for(5);
  client->send("0\r\n0123456789abcdef\r\n0\r\n\r\n" + std::string(kGet));
  EXPECT_EQ(client->receive().value().body, "POST / <abcde0123456789abcdef>");
  EXPECT_EQ(client->receive().value().body, "GET /");
}

struct Bad {
  const char* name;
  int status;
  std::string bytes;
};

std::string post(const std::string& fields, const std::string& body = "") {
  return "POST / HTTP/1.1\r\nHost: a\r\n" + fields + "\r\n" + body;
}

std::string chunked(const std::string& body) {
  return post("Transfer-Encoding: chunked\r\n", body);
}

std::vector<Bad> bad_lengths() {
  return {
      {"two lengths", 400, post("Content-Length: 5\r\nContent-Length: 6\r\n", "hello")},
      {"equal lengths", 400, post("Content-Length: 5\r\nContent-Length: 5\r\n", "hello")},
      {"a list of lengths", 400, post("Content-Length: 5, 5\r\n", "hello")},
      {"signed length", 400, post("Content-Length: +5\r\n", "hello")},
      {"empty length", 400, post("Content-Length:\r\n", "hello")},
      {"huge length", 400, post("Content-Length: 99999999999999999999\r\n")},
      {"length, coding", 400,
       post("Content-Length: 5\r\nTransfer-Encoding: chunked\r\n", "0\r\n\r\n")},
      {"coding, length", 400,
       post("Transfer-Encoding: chunked\r\nContent-Length: 5\r\n", "0\r\n\r\n")},
      {"space before colon", 400, post("Transfer-Encoding : chunked\r\n", "0\r\n\r\n")},
      {"tab before colon", 400, post("Content-Length\t: 5\r\n", "hello")},
      {"unknown coding", 501, post("Transfer-Encoding: gzip\r\n", "0\r\n\r\n")},
      {"coding in a list", 501, post("Transfer-Encoding: gzip, chunked\r\n", "0\r\n\r\n")},
      {"identity", 501, post("Transfer-Encoding: identity\r\n", "0\r\n\r\n")},
      {"coding in quotes", 501, post("Transfer-Encoding: \"chunked\"\r\n", "0\r\n\r\n")},
      {"coding with a control byte", 400, post("Transfer-Encoding: \vchunked\r\n", "0\r\n\r\n")},
      {"coding twice in a list", 400, post("Transfer-Encoding: chunked, chunked\r\n", "0\r\n\r\n")},
      {"coding twice", 400,
       post("Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n", "0\r\n\r\n")},
      {"coding in 1.0", 400, "POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"},
  };
}

std::vector<Bad> bad_fields() {
  return {
      {"two hosts", 400, post("Host: a\r\n")},
      {"two hosts in 1.0", 400, "GET / HTTP/1.0\r\nHost: a\r\nHost: b\r\n\r\n"},
      {"no host", 400, "GET / HTTP/1.1\r\nAccept: x\r\n\r\n"},
      {"bad host", 400, "GET / HTTP/1.1\r\nHost: a@b\r\n\r\n"},
      {"bare lf after the request line", 400, "GET / HTTP/1.1\nHost: a\r\n\r\n"},
      {"bare lf in a field", 400, "GET / HTTP/1.1\r\nHost: a\nX: y\r\n\r\n"},
      {"bare lf at the end", 400, "GET / HTTP/1.1\r\nHost: a\r\n\n"},
      {"bare cr", 400, "GET / HTTP/1.1\r\nHost: a\r\nX: y\rZ: z\r\n\r\n"},
      {"obs-fold", 400, post("X: a\r\n b\r\n")},
      {"obs-fold of nothing", 400, post("X:\r\n\t\r\n")},
      {"obs-fold first", 400, "GET / HTTP/1.1\r\n Host: a\r\n\r\n"},
      {"nul in a field", 400, post("X: a\0b\r\n"s)},
      {"nul in a name", 400, post("X\0: a\r\n"s)},
      {"nul in the target", 400, "GET /\0 HTTP/1.1\r\nHost: a\r\n\r\n"s},
      {"delete in a field", 400, post("X: a\x7f\r\n")},
      {"control byte in the target", 400, "GET /\x01 HTTP/1.1\r\nHost: a\r\n\r\n"},
      {"delete in the target", 400, "GET /\x7f HTTP/1.1\r\nHost: a\r\n\r\n"},
      {"no name", 400, post(": x\r\n")},
      {"no colon", 400, post("Name\r\n")},
      {"name with a bracket", 400, post("Na(me: x\r\n")},
  };
}

std::vector<Bad> bad_request_lines() {
  const std::string x8k(8 << 10, 'x');
  std::string many;
  for (int i = 0; i < 101; ++i) many += "A: b\r\n";
  return {
      {"fragment", 400, "GET /#x HTTP/1.1\r\nHost: a\r\n\r\n"},
      {"target without slash", 400, "GET x HTTP/1.1\r\nHost: a\r\n\r\n"},
      {"no target", 400, "GET  HTTP/1.1\r\nHost: a\r\n\r\n"},
      {"space in the target", 400, "GET /a b HTTP/1.1\r\nHost: a\r\n\r\n"},
      {"asterisk", 400, "GET * HTTP/1.1\r\nHost: a\r\n\r\n"},
      {"no authority", 400, "GET http:///x HTTP/1.1\r\nHost: a\r\n\r\n"},
      {"user in the authority", 400, "GET http://u@h/ HTTP/1.1\r\nHost: a\r\n\r\n"},
      {"other scheme", 400, "GET ftp://h/ HTTP/1.1\r\nHost: a\r\n\r\n"},
      {"connect", 501, "CONNECT a:80 HTTP/1.1\r\nHost: a\r\n\r\n"},
      {"long target", 414, "GET /" + x8k + " HTTP/1.1\r\nHost: a\r\n\r\n"},
      {"endless target", 414, "GET /" + x8k + x8k},
      {"endless field", 431, "GET / HTTP/1.1\r\nX: " + x8k + x8k},
      {"large head", 431, "GET / HTTP/1.1\r\nHost: a\r\nX: " + x8k + "\r\nY: " + x8k + "\r\n\r\n"},
      {"many fields", 431, post(many)},
      {"version 2.0", 505, "GET / HTTP/2.0\r\nHost: a\r\n\r\n"},
      {"version 1.2", 505, "GET / HTTP/1.2\r\nHost: a\r\n\r\n"},
      {"version 0.9", 400, "GET /\r\n"},
      {"version in lower case", 400, "GET / http/1.1\r\nHost: a\r\n\r\n"},
      {"version with a space", 400, "GET / HTTP/1.1 \r\nHost: a\r\n\r\n"},
      {"preface of HTTP/2", 505, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"},
      {"expectation", 417, post("Expect: tea\r\nContent-Length: 1\r\n", "x")},
      {"bad connection", 400, post("Connection: a b\r\n")},
  };
}

std::vector<Bad> bad_bodies() {
  const std::string x8k(8 << 10, 'x');
  return {
      {"large body", 413, post("Content-Length: 65537\r\n", std::string(65537, 'x'))},
      {"large chunk", 413, chunked("10001\r\n" + std::string(65537, 'x') + "\r\n0\r\n\r\n")},
      {"two chunks too large", 413, chunked("8000\r\n" + std::string(32768, 'x') + "\r\n8001\r\n")},
      {"huge chunk", 413, chunked("ffffffffffffffff\r\n")},
      {"overflowing chunk", 400, chunked("10000000000000000\r\nx\r\n")},
      {"chunk in 0x", 400, chunked("0x5\r\nhello\r\n0\r\n\r\n")},
      {"signed chunk", 400, chunked("-1\r\n")},
      {"no chunk size", 400, chunked("\r\nhello")},
      {"space after chunk size", 400, chunked("5 \r\nhello\r\n0\r\n\r\n")},
      {"bare lf after chunk size", 400, chunked("5\nhello\r\n0\r\n\r\n")},
      {"bare lf in an extension", 400, chunked("5;a\nhello\r\n0\r\n\r\n")},
      {"chunk too long", 400, chunked("5\r\nhello!\r\n0\r\n\r\n")},
      {"long extension", 400, chunked("5;" + x8k + "\r\nhello\r\n0\r\n\r\n")},
      {"long trailers", 400, chunked("0\r\nT: " + x8k + "\r\n\r\n")},
      {"folded trailer", 400, chunked("0\r\nT: a\r\n b\r\n\r\n")},
      {"trailer without colon", 400, chunked("0\r\nTrailer\r\n\r\n")},
  };
}

std::vector<Bad> other_protocols() {
  return {
      {"tls", 400, "\x16\x03\x01\x02\x00\x01\x00\x01\xfc"s},
      {"nul", 400, "\0"s},
      {"ssh", 400, "SSH-2.0-OpenSSH_9\r\n"},
      {"redis", 400, "PING\r\n"},
      {"redis arrays", 400, "*1\r\n$4\r\nPING\r\n"},
      {"empty lines", 400, "\r\n\r\n"},
      {"http/0.9 with much space", 400, "GET      /\r\n"},
  };
}

std::vector<Bad> bad_requests() {
  std::vector<Bad> all;
  for (const auto& some :
       {bad_lengths(), bad_fields(), bad_request_lines(), bad_bodies(), other_protocols()}) {
    all.insert(all.end(), some.begin(), some.end());
  }
  return all;
}

// Each is answered once, and what stands behind it, which may be meant as another request, never.
TEST_F(HttpServerTest, BadRequestsAreRefusedOnce) {
  for (const Bad& bad : bad_requests()) {
    SCOPED_TRACE(bad.name);
    auto client = connect();
    client->send(bad.bytes);
    const std::optional<Response> response = client->receive();
    ASSERT_TRUE(response.has_value());
    EXPECT_EQ(response->status, bad.status) << response->body;
    EXPECT_EQ(response->header("Content-Type"), "application/problem+json");
    EXPECT_EQ(response->header("Connection"), "close");
    EXPECT_THAT(response->body, HasSubstr(fmt::format("\"status\":{}", bad.status)));
    client->try_send(kGet);
    EXPECT_TRUE(client->closed());
  }
  EXPECT_EQ(server_->counters().requests, 0u);
  EXPECT_EQ(server_->counters().refused, bad_requests().size());
}

TEST(HttpServer, BadRequestsAreRefusedHoweverTheyAreCut) {
  test::PieceServer pieces;
  for (const Bad& bad : bad_requests()) {
    SCOPED_TRACE(bad.name);
    const auto whole = pieces.ask({bad.bytes});
    EXPECT_TRUE(whole.closed || bad.status == 413);  // there fewer bytes are too many
    EXPECT_EQ(pieces.ask(test::pieces_of(bad.bytes, 1)).text, whole.text);
    EXPECT_EQ(pieces.ask(test::pieces_of(bad.bytes, 7)).text, whole.text);
  }
}

TEST_F(HttpServerTest, ARefusalComesAfterTheAnswersBefore) {
  auto client = connect();
  client->send("GET /late HTTP/1.1\r\nHost: a\r\n\r\n" + std::string(kGet) +
               "GET / HTTP/3\r\n\r\n");
  turn_for(5);
  EXPECT_EQ(client->received(), "");
  echo_.answer_late(*server_);
  EXPECT_EQ(client->receive().value().body, "GET /late");
  EXPECT_EQ(client->receive().value().body, "GET /");
  EXPECT_EQ(client->receive().value().status, 400);
  EXPECT_TRUE(client->closed());
}

TEST_F(HttpServerTest, AClientThatSendsOnReadsItsRefusal) {
  auto client = connect();
  client->send(post("Content-Length: 1000000\r\n", std::string(1'000'000, 'x')));
  EXPECT_EQ(client->receive().value().status, 413);
  EXPECT_TRUE(client->closed());
  // But not for ever.
  client = connect();
  client->send("\x16");
  client->wait([&] {
    client->try_send(std::string(10'000, 'x'));
    return server_->connections() == 0;
  });
}

TEST_F(HttpServerTest, PipelinedRequestsAreOneBatch) {
  auto client = connect();
  std::string many;
  for (int i = 0; i < 20; ++i) many += fmt::format("GET /{} HTTP/1.1\r\nHost: a\r\n\r\n", i);
  client->send(many);
  for (int i = 0; i < 20; ++i) EXPECT_EQ(client->receive().value().body, fmt::format("GET /{}", i));
  EXPECT_EQ(peak_, 20u);
}

TEST_F(HttpServerTest, ABatchIsBounded) {
  HttpServerOptions options;
  options.max_batch = 8;
  start(options);
  auto client = connect();
  std::string many;
  for (int i = 0; i < 20; ++i) many += fmt::format("GET /{} HTTP/1.1\r\nHost: a\r\n\r\n", i);
  client->send(many);
  for (int i = 0; i < 20; ++i) EXPECT_EQ(client->receive().value().body, fmt::format("GET /{}", i));
  EXPECT_THAT(echo_.batches, ElementsAre(8, 8, 4));
}

TEST_F(HttpServerTest, LateAnswersKeepTheOrder) {
  auto client = connect();
  client->send(
      "GET /1 HTTP/1.1\r\nHost: a\r\n\r\nPOST /late2 HTTP/1.1\r\nHost: a\r\n"
      "Content-Type: text/x\r\nContent-Length: 3\r\n\r\nabcGET /3 HTTP/1.1\r\nHost: a\r\n\r\n"
      "GET http://h/late4 HTTP/1.1\r\nHost: a\r\n\r\nGET /5 HT");
  EXPECT_EQ(client->receive().value().body, "GET /1");
  client->send("TP/1.1\r\nHost: a\r\n\r\n");
  turn_for(5);
  EXPECT_EQ(client->received(), "");
  ASSERT_EQ(echo_.late.size(), 2u);
  // The last one first.
  test::EchoHandler::echo(*server_->find(echo_.late[1]));
  turn_for(5);
  EXPECT_EQ(client->received(), "");
  EXPECT_EQ(server_->find(echo_.late[1]), nullptr);
  HttpExchange* second = server_->find(echo_.late[0]);
  // The request was copied from where it was read.
  client->send(std::string(1000, ' '));
  EXPECT_EQ(second->body(), "abc");
  EXPECT_THAT(second->head(), StartsWith("POST /late2 HTTP/1.1\r\n"));
  test::EchoHandler::echo(*second);
  second->respond(500, {}, "a second answer has no effect");
  EXPECT_EQ(client->receive().value().body, "POST /late2 content-type=[text/x] <abc>");
  EXPECT_EQ(client->receive().value().body, "GET /3");
  EXPECT_EQ(client->receive().value().body, "GET /late4");
  EXPECT_EQ(client->receive().value().body, "GET /5");
}

TEST_F(HttpServerTest, AnswersToConnectionsThatAreGoneHaveNoEffect) {
  auto client = connect();
  client->send("GET /late HTTP/1.1\r\nHost: a\r\n\r\n");
  client->wait([&] { return !echo_.late.empty(); });
  const std::uint64_t id = echo_.late.front();
  server_->find(id)->respond(200, {}, "");
  EXPECT_EQ(server_->find(id), nullptr);
  client->receive();
  client->send("GET /late HTTP/1.1\r\nHost: a\r\n\r\n");
  client->wait([&] { return echo_.late.size() == 2; });
  HttpExchange* exchange = server_->find(echo_.late.back());
  ASSERT_NE(exchange, nullptr);
  server_->stop();
  exchange->respond(200, "text/plain", "nobody reads it");
  EXPECT_EQ(server_->find(echo_.late.back()), nullptr);
  EXPECT_EQ(server_->find(~std::uint64_t{0}), nullptr);
}

TEST_F(HttpServerTest, AHandlerThatThrowsOrGivesUp) {
  int calls = 0;
  on_handle_ = [&](HttpExchange& exchange) {
    if (++calls == 1) return exchange.respond(200, {}, "first");
    exchange.begin(200);
    exchange.begin_body().append("half of an answer");
    if (calls == 2) throw std::runtime_error("boom");
  };
  auto client = connect();
  client->send(std::string(kGet) + std::string(kGet) + std::string(kGet));
  EXPECT_EQ(client->receive().value().body, "first");
  EXPECT_EQ(client->receive().value().status, 500);
  EXPECT_EQ(client->receive().value().status, 500);
  EXPECT_EQ(client->received(), "");
  EXPECT_EQ(server_->counters().failed, 1u);
}

TEST_F(HttpServerTest, AClientThatDoesNotReadIsNotReadFrom) {
  HttpServerOptions options;
  options.max_batch = 4;
  start(options);
  constexpr std::size_t kSize = 50'000;
  on_handle_ = [&](HttpExchange& exchange) {
    exchange.respond(200, {},
                     std::string(kSize, static_cast<char>('a' + exchange.path().size() % 26)));
  };
  auto client = connect(4096);
  std::string many;
  for (int i = 0; i < 2000; ++i) {
    many += "GET /" + std::string(static_cast<std::size_t>(i % 26), 'x') +
            " HTTP/1.1\r\nHost: a\r\n\r\n";
  }
  std::string_view rest = many;
  rest.remove_prefix(client->try_send(rest));
  std::uint64_t served = 0;
  client->wait([&] {
    const bool stands_still = served == server_->counters().requests && served > 0;
    served = server_->counters().requests;
    turn_for(20);
    return stands_still;
  });
  // What the kernel's buffers take, 256 KiB, and a batch.
  EXPECT_LT(served * kSize, 20u << 20);
  for (int i = 0; i < 2000; ++i) {
    rest.remove_prefix(client->try_send(rest));
    const Response response = client->receive().value();
    ASSERT_EQ(response.body.size(), kSize);
    ASSERT_EQ(response.body[0], 'a' + (i % 26 + 1) % 26) << i;
  }
}

TEST_F(HttpServerTest, IdleConnectionsAreClosed) {
  HttpServerOptions options;
  options.idle_timeout = 200 * kMillisecond;
  start(options);
  auto fresh = connect();
  auto kept = connect();
  auto slow = connect();
  auto waiting = connect();
  kept->send(kGet);
  EXPECT_TRUE(kept->receive().has_value());
  waiting->send("GET /late HTTP/1.1\r\nHost: a\r\n\r\n");
  slow->send(post("Content-Length: 100000\r\n").substr(0, 20));
  const auto begin = Clock::now();
  // However slowly it sends.
  slow->wait([&] {
    slow->try_send("a");
    return slow->closed_now();
  });
  EXPECT_TRUE(fresh->closed());
  EXPECT_TRUE(kept->closed());
  EXPECT_GE(Clock::now() - begin, std::chrono::milliseconds(150));
  EXPECT_EQ(server_->counters().timed_out, 3u);
  // The handler's time does not count.
  EXPECT_EQ(server_->connections(), 1u);
  echo_.answer_late(*server_);
  EXPECT_TRUE(waiting->receive().has_value());
  EXPECT_TRUE(waiting->closed());
}

TEST_F(HttpServerTest, AHeadMustArriveInTime) {
  HttpServerOptions options;
  options.header_timeout = 100 * kMillisecond;
  start(options);
  auto client = connect();
  auto body = connect();
  auto second = connect();
  body->send(post("Content-Length: 3\r\n", "a"));
  turn_for(60);
  second->send(std::string(kGet) + "GET");
  client->send("GET / HT");
  turn_for(60);
  client->send("TP/1.1\r\nHo");
  EXPECT_EQ(client->receive().value().status, 408);
  EXPECT_TRUE(client->closed());
  EXPECT_EQ(second->receive().value().status, 200);
  EXPECT_EQ(second->receive().value().status, 408);
  body->send("bc");
  EXPECT_EQ(body->receive().value().status, 200);
  // Each head has its own time.
  for (int i = 0; i < 3; ++i) {
    body->send("GET /");
    turn_for(50);
    body->send(" HTTP/1.1\r\nHost: a\r\n\r\n");
    EXPECT_EQ(body->receive().value().status, 200);
  }
}

TEST_F(HttpServerTest, AHandlerThatDoesNotAnswer) {
  HttpServerOptions options;
  options.answer_timeout = 50 * kMillisecond;
  start(options);
  auto client = connect();
  client->send("GET /late HTTP/1.1\r\nHost: a\r\n\r\n" + std::string(kGet));
  EXPECT_EQ(client->receive().value().status, 503);
  EXPECT_EQ(client->receive().value().body, "GET /");
  EXPECT_EQ(server_->counters().unanswered, 1u);
  echo_.answer_late(*server_);
  client->send(kGet);
  EXPECT_EQ(client->receive().value().body, "GET /");
}

TEST_F(HttpServerTest, ConnectionsMakeRoom) {
  HttpServerOptions options;
  options.evict_after = 50 * kMillisecond;
  start(options, 3);
  auto kept = connect();
  kept->send(kGet);
  EXPECT_TRUE(kept->receive().has_value());
  auto fresh = connect();
  auto busy = connect();
  busy->send("GET /late HTTP/1.1\r\nHost: a\r\n\r\n");
  turn_for(10);
  // All too young.
  EXPECT_TRUE(connect()->closed());
  EXPECT_EQ(server_->counters().turned_away, 1u);
  turn_for(60);
  auto third = connect();
  EXPECT_TRUE(fresh->closed());
  EXPECT_FALSE(kept->closed_now());
  auto fourth = connect();
  EXPECT_TRUE(kept->closed());
  EXPECT_EQ(server_->counters().evicted, 2u);
  EXPECT_TRUE(connect()->closed());
  echo_.answer_late(*server_);
  EXPECT_TRUE(busy->receive().has_value());
  EXPECT_EQ(budget_->open(), 3u);
}

TEST_F(HttpServerTest, WhoseRequestWaitsToBeReadMakesNoRoom) {
  HttpServerOptions options;
  options.evict_after = 0;
  start(options, 2);
  auto asks = connect();
  auto silent = connect();
  asks->send(kGet);
  auto next = connect();
  EXPECT_TRUE(silent->closed());
  EXPECT_TRUE(asks->receive().has_value());
  EXPECT_EQ(server_->counters().evicted, 1u);
}

TEST_F(HttpServerTest, AnAddressHasItsPartOfTheConnections) {
  HttpServerOptions options;
  options.evict_after = 50 * kMillisecond;
  start(options, 8);
  budget_ = std::make_shared<ConnectionBudget>(8, 50);
  server_ = std::make_unique<HttpServer>(*streams_, options, *this, budget_);
  const auto from = [&](std::uint8_t last) {
    rpc::Address address;
    address.ip = {192, 0, 2, last};
    const auto [client, server] = door_.connect(0);
    server_->accept(server, address);
    return std::make_unique<Client>(turn_, client);
  };
  std::vector<std::unique_ptr<Client>> greedy;
  for (int i = 0; i < 4; ++i) greedy.push_back(from(1));
  auto more = from(1);
  EXPECT_TRUE(more->closed());
  EXPECT_EQ(server_->counters().turned_away, 1u);
  auto other = from(2);
  other->send(kGet);
  EXPECT_TRUE(other->receive().has_value());
  turn_for(60);
  // Its own make room, and not the other's.
  more = from(1);
  EXPECT_TRUE(greedy[0]->closed());
  more->send(kGet);
  EXPECT_TRUE(more->receive().has_value());
  EXPECT_FALSE(other->closed_now());
  EXPECT_EQ(budget_->open(), 5u);
  for (std::uint8_t last = 3; last < 6; ++last) greedy.push_back(from(last));
  EXPECT_EQ(budget_->open(), 8u);
}

TEST_F(HttpServerTest, ServersShareABudget) {
  start({}, 1);
  HttpServer other(*streams_, {}, *this, budget_);
  auto client = connect();
  const auto [there, here] = door_.connect(0);
  other.accept(here, {});
  Client second(turn_, there);
  EXPECT_TRUE(second.closed());
  EXPECT_EQ(other.counters().turned_away, 1u);
}

TEST_F(HttpServerTest, Drain) {
  auto idle = connect();
  auto kept = connect();
  auto waiting = connect();
  auto sending = connect();
  kept->send(kGet);
  EXPECT_TRUE(kept->receive().has_value());
  waiting->send("GET /late HTTP/1.1\r\nHost: a\r\n\r\n");
  sending->send("GET / HTTP/1.1\r\n");
  turn_for(5);
  server_->drain();
  EXPECT_TRUE(idle->closed());
  EXPECT_TRUE(kept->closed());
  sending->send("Host: a\r\n\r\n");
  EXPECT_EQ(sending->receive().value().header("Connection"), "close");
  EXPECT_TRUE(sending->closed());
  echo_.answer_late(*server_);
  EXPECT_EQ(waiting->receive().value().header("Connection"), "close");
  EXPECT_TRUE(waiting->closed());
  auto later = connect();
  later->send(std::string(kGet) + std::string(kGet));
  EXPECT_EQ(later->receive().value().header("Connection"), "(absent)");
  EXPECT_EQ(later->receive().value().header("Connection"), "close");
  EXPECT_TRUE(later->closed());
  EXPECT_EQ(server_->connections(), 0u);
}

TEST_F(HttpServerTest, StopAnswersWhatWaits) {
  auto idle = connect();
  auto waiting = connect();
  waiting->send("GET /late1 HTTP/1.1\r\nHost: a\r\n\r\nGET /late2 HTTP/1.1\r\nHost: a\r\n\r\n");
  waiting->wait([&] { return echo_.late.size() == 2; });
  server_->stop();
  EXPECT_EQ(server_->connections(), 0u);
  EXPECT_EQ(waiting->receive().value().status, 503);
  const Response last = waiting->receive().value();
  EXPECT_EQ(last.status, 503);
  EXPECT_EQ(last.header("Connection"), "close");
  EXPECT_TRUE(waiting->closed());
  EXPECT_TRUE(idle->closed());
  EXPECT_TRUE(connect()->closed());
  server_->stop();
}

TEST_F(HttpServerTest, AClientThatLeaves) {
  auto client = connect();
  client->send("GET / HTTP/1.1\r\nHo");
  turn_for(5);
  client->leave();
  turn_for(5);
  EXPECT_EQ(server_->connections(), 0u);
  client = connect();
  client->send("GET /late HTTP/1.1\r\nHost: a\r\n\r\n");
  turn_for(5);
  client->leave();
  turn_for(5);
  echo_.answer_late(*server_);
  turn_for(5);
  EXPECT_EQ(server_->connections(), 0u);
}

}  // namespace
}  // namespace weir::node
