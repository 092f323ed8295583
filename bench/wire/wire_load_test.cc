// What the measurements on the wire stand on: reading responses, asking, accounting.
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <filesystem>
#include <map>
#include <thread>

#include <weir/bench/machine.h>
#include <weir/bench/wire/http_load.h>
#include <weir/bench/wire/http_response.h>
#include <weir/bench/wire/process.h>
#include <weir/bench/wire/rpc_load.h>
#include <weir/bench/wire/servers.h>

namespace weir::bench {
namespace {

TEST(HttpResponse, IsReadAsFarAsItsLength) {
  std::string head = "HTTP/1.1 200 OK\r\nServer: x\r\ncontent-LENGTH:  5 \r\nX: y\r\n\r\n";
  auto read = read_response(head + "hello" + "HTTP/1.1 204");
  ASSERT_TRUE(read);
  EXPECT_EQ(read->status, 200);
  EXPECT_EQ(read->size, head.size() + 5);
  for (std::size_t cut = 0; cut < head.size(); ++cut) {
    EXPECT_FALSE(read_response(head.substr(0, cut))) << cut;
  }
  EXPECT_TRUE(read_response(head)) << "the body may come later";
}

TEST(HttpResponse, WithoutALengthHasNoBody) {
  std::string head = "HTTP/1.1 204 No Content\r\nServer: x\r\n\r\n";
  auto read = read_response(head + head);
  ASSERT_TRUE(read);
  EXPECT_EQ(read->status, 204);
  EXPECT_EQ(read->size, head.size());
}

TEST(HttpResponse, WhatIsNoneIsRefused) {
  for (const char* bytes :
       {"\r\n\r\n", "hello\r\n\r\n", "HTTP/1.0 200 OK\r\n\r\n", "HTTP/1.1 2x0 OK\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 5x\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length:\r\n\r\n",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"}) {
    EXPECT_THROW(read_response(bytes), std::runtime_error) << bytes;
  }
}

TEST(Stat, SumsUserAndSystemTimeWhateverTheName) {
  std::string fields = " S 1 2 3 4 5 6 7 8 9 10 1200 34 7 8 20 0 1";
  EXPECT_EQ(ticks_of_stat("17 (weir-node)" + fields), 1234u);
  EXPECT_EQ(ticks_of_stat("17 (a (b) c) d)" + fields), 1234u);
  EXPECT_FALSE(ticks_of_stat("17 (weir-node) S 1 2"));
  EXPECT_FALSE(ticks_of_stat("17 (x) S 1 2 3 4 5 6 7 8 9 10 12x 34"));
  EXPECT_FALSE(ticks_of_stat(""));
}

std::string scratch() {
  return ::testing::TempDir() + "/weir-wire-test-" + std::to_string(::getpid());
}

TEST(Process, CountsTheProcessorTimeOfAllItsThreads) {
  std::uint64_t wall = 0;
  {
    Process busy({{"/bin/sh", "-c", "while :; do :; done"}, scratch(), allowed_cpus().front()});
    std::uint64_t start = steady_ns();
    std::uint64_t before = busy.cpu_ns();
    while (busy.cpu_ns() - before < 20'000'000 && steady_ns() - start < 30'000'000'000) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    wall = steady_ns() - start;
    EXPECT_GE(busy.cpu_ns() - before, 20'000'000u);
    EXPECT_LE(busy.cpu_ns() - before, 2 * wall);
  }
  Process idle({{"/bin/sleep", "60"}, scratch(), std::nullopt});
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  std::uint64_t before = idle.cpu_ns();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(idle.cpu_ns(), before);
  std::filesystem::remove_all(scratch());
}

TEST(Process, ThatEndsIsNotWaitedFor) {
  Process fails({{"/bin/sh", "-c", "echo no such thing; exit 3"}, scratch(), std::nullopt});
  try {
    fails.wait_for_port(free_ports(1)[0]);
    FAIL();
  } catch (const std::runtime_error& error) {
    EXPECT_NE(std::string(error.what()).find("no such thing"), std::string::npos) << error.what();
  }
  EXPECT_EQ(Process({{"/bin/sh", "-c", "exit 3"}, scratch(), std::nullopt}).wait(), 3);
  std::filesystem::remove_all(scratch());
}

/// Answers each request with `answer`, and remembers the requests' keys.
class Server {
 public:
  Server(std::string answer, std::size_t request_size, std::size_t key_at)
      : answer_(std::move(answer)), request_size_(request_size), key_at_(key_at) {
    listener_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof at;
    EXPECT_EQ(::bind(listener_, reinterpret_cast<sockaddr*>(&at), size), 0);
    EXPECT_EQ(::listen(listener_, 16), 0);
    EXPECT_EQ(::getsockname(listener_, reinterpret_cast<sockaddr*>(&at), &size), 0);
    port = ntohs(at.sin_port);
    thread_ = std::thread([this] { serve(); });
  }
  ~Server() { join(); }
  /// Once its client has gone.
  void join() {
    if (thread_.joinable()) thread_.join();
  }
  std::uint16_t port = 0;
  std::map<std::string, int> keys;

 private:
  void serve() {
    int fd = ::accept(listener_, nullptr, nullptr);
    int one = 1;
    ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    ::close(listener_);
    std::string input;
    char bytes[4096];
    for (ssize_t n = 0; (n = ::recv(fd, bytes, sizeof bytes, 0)) > 0;) {
      input.append(bytes, static_cast<std::size_t>(n));
      for (; input.size() >= request_size_; input.erase(0, request_size_)) {
        ++keys[input.substr(key_at_, 16)];
        // In two pieces, cut at another place each time.
        std::size_t cut = keys.size() % answer_.size();
        ::send(fd, answer_.data(), cut, MSG_NOSIGNAL);
        ::send(fd, answer_.data() + cut, answer_.size() - cut, MSG_NOSIGNAL);
      }
    }
    ::close(fd);
  }
  std::string answer_;
  std::size_t request_size_;
  std::size_t key_at_;
  int listener_ = -1;
  std::thread thread_;
};

HttpTarget target(std::uint16_t port) {
  HttpTarget out;
  out.port = port;
  out.request = "GET /0123456789abcdef HTTP/1.1\r\n\r\n";
  out.key_at = 5;
  out.keys = 100;
  return out;
}

constexpr const char* kAnswer = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";

TEST(HttpLoad, AsksForEachKeyOnce) {
  Server server(kAnswer, target(0).request.size(), target(0).key_at);
  HttpLoad(target(server.port), 1, 7).ask_all();
  server.join();
  EXPECT_EQ(server.keys.size(), 100u);
  for (const auto& [key, count] : server.keys) EXPECT_EQ(count, 1) << key;
}

TEST(HttpLoad, CountsWhatWasAnswered) {
  for (bool paced : {false, true}) {
    Server server(kAnswer, target(0).request.size(), target(0).key_at);
    std::optional<HttpLoad> load(std::in_place, target(server.port), 1, paced ? 1 : 4);
    Load done = paced ? load->open(2000, 0.2) : load->closed(0.2);
    load.reset();
    server.join();
    std::uint64_t asked = 0;
    for (const auto& [key, count] : server.keys) asked += static_cast<std::uint64_t>(count);
    EXPECT_EQ(done.requests, asked);
    EXPECT_EQ(done.latency.count(), asked);
    EXPECT_GE(done.ns, 100'000'000u);
    EXPECT_LE(done.latency.max(), done.ns);
    EXPECT_GT(server.keys.size(), 50u);
    if (paced) {
      EXPECT_NEAR(static_cast<double>(asked), 400, 100);
    }
  }
}

TEST(RpcLoad, CountsChecksAndCalls) {
  EchoServer echo(WEIR_ECHO_PROGRAM, {scratch(), std::nullopt});
  for (RpcShape shape : {RpcShape{1, 1, 1}, RpcShape{2, 8, 1}, RpcShape{1, 4, 64}}) {
    RpcLoad load(echo.rpc(), shape);
    for (int turn = 0; turn < 2; ++turn) {
      Load done = load.closed(0.05);
      EXPECT_GT(done.requests, 0u);
      EXPECT_EQ(done.requests, done.latency.count() * shape.batch);
      EXPECT_GE(done.ns, 50'000'000u);
    }
    EXPECT_EQ(kj_load(echo.rpc(), shape, 0.05).requests % shape.batch, 0u);
  }
  std::filesystem::remove_all(scratch());
}

TEST(HttpLoad, AnotherStatusEndsIt) {
  Server server("HTTP/1.1 429 Too Many Requests\r\nContent-Length: 0\r\n\r\n",
                target(0).request.size(), target(0).key_at);
  EXPECT_THROW(HttpLoad(target(server.port), 1, 1).closed(0.1), std::runtime_error);
}

}  // namespace
}  // namespace weir::bench
