#include <weir/rpc/net/uv_stream.h>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <cerrno>
#include <memory>
#include <optional>
#include <vector>

#include <weir/rpc/net/listener.h>
#include <weir/rpc/net/test_util.h>

namespace weir::rpc {
namespace {

struct Pair {
  explicit Pair(EventLoop& loop) {
    int fds[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds), 0);
    a = kj::heap<UvStream>(loop, kj::AutoCloseFd(fds[0]));
    b = kj::heap<UvStream>(loop, kj::AutoCloseFd(fds[1]));
  }
  kj::Own<UvStream> a;
  kj::Own<UvStream> b;
};

std::vector<kj::byte> pattern(std::size_t size) {
  std::vector<kj::byte> out(size);
  for (std::size_t i = 0; i < size; ++i) out[i] = static_cast<kj::byte>(i * 31 + i / 257);
  return out;
}

std::optional<kj::Exception::Type> failure(EventLoop& loop, kj::Promise<void> promise) {
  std::optional<kj::Exception::Type> type;
  promise.catch_([&](kj::Exception&& e) { type = e.getType(); }).wait(loop.wait_scope());
  return type;
}

TEST(Address, ReadsLiteralsOnly) {
  std::string error;
  auto v4 = parse_address("127.0.0.1:7400", error);
  ASSERT_TRUE(v4);
  EXPECT_EQ(to_string(*v4), "127.0.0.1:7400");
  auto v6 = parse_address("[::1]:0", error);
  ASSERT_TRUE(v6);
  EXPECT_EQ(to_string(*v6), "[::1]:0");
  sockaddr_storage raw;
  to_sockaddr(*v6, raw);
  EXPECT_EQ(from_sockaddr(raw), *v6);
  for (const char* bad :
       {"", ":", "127.0.0.1", "127.0.0.1:", "127.0.0.1:65536", "127.0.0.1:-1", "127.0.0.1:+1",
        "127.0.0.1: 1", "127.0.0.1:1x", "::1:80", "[::1]", "[::1]80", "[127.0.0.1]:80",
        "localhost:80", "1.2.3:80", "1.2.3.4.5:80", "[::1%lo]:80", "[]:80", "[:80"}) {
    error.clear();
    EXPECT_FALSE(parse_address(bad, error)) << bad;
    EXPECT_NE(error.find("expected an address"), std::string::npos) << bad;
  }
}

TEST(UvStream, CarriesSmallWritesInOrder) {
  EventLoop loop;
  Pair pair(loop);
  for (char c : std::string("hello")) {
    pair.a->write(&c, 1).wait(loop.wait_scope());
  }
  EXPECT_EQ(pair.a->buffered(), 5u);  // gathered, and sent when the loop sleeps
  char got[5];
  EXPECT_EQ(pair.b->tryRead(got, 5, 5).wait(loop.wait_scope()), 5u);
  EXPECT_EQ(std::string(got, 5), "hello");
  EXPECT_EQ(pair.a->buffered(), 0u);
}

TEST(UvStream, ReadsWhatIsThereAndWaitsForTheRest) {
  EventLoop loop;
  Pair pair(loop);
  pair.a->write("abc", 3).wait(loop.wait_scope());
  char got[8] = {};
  EXPECT_EQ(pair.b->tryRead(got, 1, 8).wait(loop.wait_scope()), 3u);
  auto rest = pair.b->tryRead(got, 4, 8);
  pair.a->write("12", 2).wait(loop.wait_scope());
  test::turn(loop, 5);
  EXPECT_FALSE(rest.poll(loop.wait_scope()));
  pair.a->write("34", 2).wait(loop.wait_scope());
  EXPECT_EQ(rest.wait(loop.wait_scope()), 4u);
  EXPECT_EQ(std::string(got, 4), "1234");
}

TEST(UvStream, LargeDataArrivesWholeUnderBackPressure) {
  EventLoop loop;
  Pair pair(loop);
  auto data = pattern(8u << 20);
  auto written = pair.a->write(data.data(), data.size()).eagerlyEvaluate(nullptr);
  test::turn(loop, 5);
  EXPECT_FALSE(written.poll(loop.wait_scope())) << "nobody reads, so the writer must wait";
  std::vector<kj::byte> got(data.size());
  EXPECT_EQ(pair.b->tryRead(got.data(), got.size(), got.size()).wait(loop.wait_scope()),
            got.size());
  written.wait(loop.wait_scope());
  EXPECT_TRUE(got == data);
}

TEST(UvStream, BufferStaysBoundedForAWriterThatWaits) {
  EventLoop loop;
  Pair pair(loop);
  auto chunk = pattern(100'000);
  std::size_t total = 0;
  std::size_t largest = 0;
  std::vector<kj::byte> got(chunk.size());
  for (int i = 0; i < 200; ++i) {
    auto written = pair.a->write(chunk.data(), chunk.size());
    largest = std::max(largest, pair.a->buffered());
    while (!written.poll(loop.wait_scope())) {
      total += pair.b->tryRead(got.data(), 1, got.size()).wait(loop.wait_scope());
    }
  }
  EXPECT_LE(largest, UvStream::kWriteHigh + chunk.size());
  pair.a->shutdownWrite();
  while (std::size_t n = pair.b->tryRead(got.data(), 1, got.size()).wait(loop.wait_scope())) {
    total += n;
  }
  EXPECT_EQ(total, 200 * chunk.size());
}

TEST(UvStream, EndOfStreamAfterEverythingBuffered) {
  EventLoop loop;
  Pair pair(loop);
  auto data = pattern(3u << 20);
  auto written = pair.a->write(data.data(), data.size()).eagerlyEvaluate(nullptr);
  pair.a->shutdownWrite();
  std::vector<kj::byte> got(data.size() + 10);
  EXPECT_EQ(pair.b->tryRead(got.data(), got.size(), got.size()).wait(loop.wait_scope()),
            data.size());
  EXPECT_EQ(pair.b->tryRead(got.data(), 1, 1).wait(loop.wait_scope()), 0u);
  // The other direction still works.
  pair.b->write("x", 1).wait(loop.wait_scope());
  char c = 0;
  EXPECT_EQ(pair.a->tryRead(&c, 1, 1).wait(loop.wait_scope()), 1u);
}

TEST(UvStream, DestructionSendsWhatItCan) {
  EventLoop loop;
  Pair pair(loop);
  pair.a->write("bye", 3).wait(loop.wait_scope());
  pair.a = nullptr;
  char got[4];
  EXPECT_EQ(pair.b->tryRead(got, 4, 4).wait(loop.wait_scope()), 3u);
}

TEST(UvStream, WritingToAGoneReaderFails) {
  EventLoop loop;
  Pair pair(loop);
  pair.b = nullptr;
  pair.a->write("x", 1).wait(loop.wait_scope());  // buffered: not known yet
  test::turn(loop, 5);
  EXPECT_EQ(failure(loop, pair.a->write("y", 1)), kj::Exception::Type::DISCONNECTED);
}

TEST(UvStream, AWaitingWriterHearsOfTheLoss) {
  EventLoop loop;
  Pair pair(loop);
  auto data = pattern(4u << 20);
  auto written = pair.a->write(data.data(), data.size());
  test::turn(loop, 5);
  pair.b = nullptr;
  EXPECT_EQ(failure(loop, kj::mv(written)), kj::Exception::Type::DISCONNECTED);
}

TEST(UvStream, DroppedPromisesLeaveTheStreamUsable) {
  EventLoop loop;
  Pair pair(loop);
  char got[4];
  {
    auto dropped = pair.b->tryRead(got, 1, 4);
    test::turn(loop, 2);
  }
  pair.a->write("data", 4).wait(loop.wait_scope());
  test::turn(loop, 2);
  EXPECT_EQ(pair.b->tryRead(got, 4, 4).wait(loop.wait_scope()), 4u);

  auto data = pattern(2u << 20);
  {
    // The bytes were taken over: the caller's memory may go with the promise.
    auto copy = data;
    auto dropped = pair.a->write(copy.data(), copy.size());
  }
  std::vector<kj::byte> all(data.size());
  EXPECT_EQ(pair.b->tryRead(all.data(), all.size(), all.size()).wait(loop.wait_scope()),
            all.size());
  EXPECT_TRUE(all == data);
}

TEST(UvStream, UnreadDataDoesNotSpinTheLoop) {
  EventLoop loop;
  Pair pair(loop);
  char c;
  pair.a->write("ab", 2).wait(loop.wait_scope());
  EXPECT_EQ(pair.b->tryRead(&c, 1, 1).wait(loop.wait_scope()), 1u);
  pair.a->write("cd", 2).wait(loop.wait_scope());
  test::turn(loop, 10);
  timespec before;
  timespec after;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &before);
  test::turn(loop, 300);
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &after);
  double ms = static_cast<double>(after.tv_sec - before.tv_sec) * 1e3 +
              static_cast<double>(after.tv_nsec - before.tv_nsec) / 1e6;
  EXPECT_LT(ms, 100.0);
}

TEST(Connect, RefusedOrConnected) {
  EventLoop loop;
  std::uint16_t free_port;
  {
    test::DeafServer server;
    free_port = server.port();
  }
  auto refused = connect(loop, test::local(free_port), 5 * kj::SECONDS).ignoreResult();
  EXPECT_EQ(failure(loop, kj::mv(refused)), kj::Exception::Type::DISCONNECTED);

  test::DeafServer server;
  auto stream = connect(loop, test::local(server.port()), 5 * kj::SECONDS).wait(loop.wait_scope());
  EXPECT_TRUE(stream.get() != nullptr);
}

TEST(Listener, AcceptsOnBothFamiliesAndCountsConnections) {
  for (const char* where : {"127.0.0.1:0", "[::1]:0"}) {
    EventLoop loop;
    std::vector<kj::Own<UvStream>> accepted;
    Listener listener(loop, 2,
                      [&](kj::Own<UvStream> s, const Address&) { accepted.push_back(kj::mv(s)); });
    std::string error;
    ASSERT_TRUE(listener.open(where, error)) << error;
    EXPECT_NE(listener.port(), 0);
    test::RawSocket one(listener.address());
    test::RawSocket two(listener.address());
    ASSERT_TRUE(test::eventually(loop, [&] { return accepted.size() == 2; }));
    EXPECT_EQ(listener.connections(), 2u);

    test::RawSocket three(listener.address());
    ASSERT_TRUE(test::eventually(loop, [&] { return three.ended(); }));
    EXPECT_EQ(listener.counters().turned_away, 1u);

    accepted.pop_back();
    EXPECT_EQ(listener.connections(), 1u);
    test::RawSocket four(listener.address());
    ASSERT_TRUE(test::eventually(loop, [&] { return accepted.size() == 2; }));
    accepted.clear();
  }
}

TEST(Listener, AcceptsFewInATurnWhereEachCostsMuch) {
  EventLoop loop;
  std::vector<kj::Own<UvStream>> accepted;
  Listener listener(loop, 64,
                    [&](kj::Own<UvStream> s, const Address&) { accepted.push_back(kj::mv(s)); });
  listener.accept_few();
  std::string error;
  ASSERT_TRUE(listener.open("127.0.0.1:0", error)) << error;
  std::vector<std::unique_ptr<test::RawSocket>> callers;
  for (int i = 0; i < 3 * Listener::kFew; ++i) {
    callers.push_back(std::make_unique<test::RawSocket>(listener.address()));
  }
  for (std::size_t turn = 1; turn <= 3; ++turn) {
    uv_run(loop.uv(), UV_RUN_NOWAIT);
    EXPECT_EQ(accepted.size(), turn * std::size_t{Listener::kFew});
  }
}

TEST(Listener, SaysWhyItCannotListen) {
  EventLoop loop;
  test::DeafServer other;
  Listener listener(loop, 2, [](kj::Own<UvStream>, const Address&) {});
  std::string error;
  EXPECT_FALSE(listener.open(other.address(), error));
  EXPECT_NE(error.find("Address already in use"), std::string::npos) << error;
  EXPECT_FALSE(listener.open("localhost:1", error));
  EXPECT_NE(error.find("expected an address"), std::string::npos) << error;
}

int accept_failures_left = 0;

int failing_accept(int fd, sockaddr* from, socklen_t* size, int flags) {
  if (accept_failures_left > 0) {
    --accept_failures_left;
    errno = EMFILE;
    return -1;
  }
  return ::accept4(fd, from, size, flags);
}

TEST(Listener, BacksOffWithoutDescriptorsAndRecovers) {
  EventLoop loop;
  std::vector<kj::Own<UvStream>> accepted;
  Listener listener(
      loop, 16, [&](kj::Own<UvStream> s, const Address&) { accepted.push_back(kj::mv(s)); },
      failing_accept);
  std::string error;
  ASSERT_TRUE(listener.open("127.0.0.1:0", error)) << error;
  accept_failures_left = 3;
  auto start = std::chrono::steady_clock::now();
  test::RawSocket caller(listener.address());
  ASSERT_TRUE(test::eventually(loop, [&] { return accepted.size() == 1; }));
  EXPECT_EQ(listener.counters().failures, 3u);
  EXPECT_GE(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(290))
      << "it must pause after each failure, not spin";
}

TEST(Listener, ClosesAndOpensAgain) {
  EventLoop loop;
  std::vector<kj::Own<UvStream>> accepted;
  Listener listener(loop, 16,
                    [&](kj::Own<UvStream> s, const Address&) { accepted.push_back(kj::mv(s)); });
  std::string error;
  ASSERT_TRUE(listener.open("127.0.0.1:0", error)) << error;
  listener.close();
  listener.close();
  test::RawSocket late(listener.address());
  EXPECT_FALSE(late.connected());
  ASSERT_TRUE(listener.open("127.0.0.1:0", error)) << error;
  test::RawSocket caller(listener.address());
  EXPECT_TRUE(test::eventually(loop, [&] { return accepted.size() == 1; }));
}

}  // namespace
}  // namespace weir::rpc
