#include <weir/node/fronts/grpc/grpc_server.h>

#include <fcntl.h>
#include <sys/socket.h>
#include <uv.h>

#include <chrono>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <weir/node/fronts/grpc/grpc_connection.h>
#include <weir/node/fronts/grpc/grpc_test_util.h>

namespace weir::node {
namespace {

using test::framed;
using test::GrpcAnswer;
using test::GrpcClient;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::StartsWith;
using namespace std::string_literals;
using Fields = test::GrpcSession::Fields;

/// Answers "/echo" with the message, "/late" when the test says so, "/stream" with each message.
class GrpcServerTest : public testing::Test, public GrpcServer::Handler {
 protected:
  GrpcServerTest() {
    uv_loop_init(&loop_);
    streams_ = std::make_unique<rpc::StreamLoop>(&loop_);
  }
  ~GrpcServerTest() override {
    if (server_ != nullptr) server_->stop();
    EXPECT_EQ(server_ == nullptr ? 0 : server_->held(), 0u);
    EXPECT_EQ(server_ == nullptr ? 0 : server_->calls(), 0u);
    server_.reset();
    streams_.reset();
    while (uv_run(&loop_, UV_RUN_NOWAIT) != 0) continue;
    EXPECT_EQ(uv_loop_close(&loop_), 0);
    EXPECT_EQ(budget_->open(), 0u);
  }

  void start(GrpcServerOptions options = {}, std::size_t connections = 100) {
    budget_ = std::make_shared<ConnectionBudget>(connections);
    server_ = std::make_unique<GrpcServer>(*streams_, options, *this, budget_);
  }
  std::unique_ptr<GrpcClient> connect(bool greets = true) {
    if (server_ == nullptr) start();
    int fds[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds), 0);
    server_->accept(rpc::make_tcp_stream(*streams_, fds[1]), {});
    auto client = std::make_unique<GrpcClient>(turn_, fds[0]);
    if (greets) client->greet();
    return client;
  }
  GrpcAnswer ask(const Fields& fields, std::string body) {
    auto client = connect();
    return client->answer(client->call(fields, std::move(body)));
  }
  static Fields to(const std::string& path, Fields more = {}) {
    return GrpcClient::head(path, std::move(more));
  }

  GrpcKind kind_of(std::string_view& path) override {
    for (const std::string_view known : {"/echo", "/late", "/throw"}) {
      if (path == known) return path = known, GrpcKind::unary;
    }
    if (path != "/stream") return GrpcKind::none;
    path = "/stream";
    return GrpcKind::streaming;
  }
  void handle(std::span<GrpcCall* const> batch) override {
    batches_.push_back(batch.size());
    for (GrpcCall* call : batch) {
      seen_.push_back(call->message().data() == nullptr ? "(end)" : std::string(call->message()));
      if (call->path() == "/throw" || call->message() == "throw") {
        call->begin_message().append("half");
        throw std::runtime_error("boom");
      }
      if (call->path() == "/late") {
        late_.push_back(call->id());
      } else if (call->message().data() == nullptr) {
        call->finish();
      } else {
        call->begin_message().append(call->message());
        call->end_message();
        if (call->path() == "/echo") call->finish();
      }
    }
  }
  void answer_late() {
    for (const std::uint64_t id : std::exchange(late_, {})) {
      GrpcCall* call = server_->find(id);
      if (call == nullptr) continue;
      call->begin_message().append("late");
      call->end_message();
      call->finish();
    }
  }

  uv_loop_t loop_{};
  std::unique_ptr<rpc::StreamLoop> streams_;
  std::shared_ptr<ConnectionBudget> budget_ = std::make_shared<ConnectionBudget>(100);
  std::unique_ptr<GrpcServer> server_;
  std::vector<std::size_t> batches_;
  std::vector<std::string> seen_;
  std::vector<std::uint64_t> late_;
  const std::function<void()> turn_ = [this] {
    uv_run(&loop_, UV_RUN_NOWAIT);
    ::usleep(200);
  };
};

// Calls

TEST_F(GrpcServerTest, AnswersAMessage) {
  const GrpcAnswer got = ask(to("/echo"), framed("hello"));
  EXPECT_EQ(got.status(), "OK");
  EXPECT_EQ(got.field("content-type"), "application/grpc");
  EXPECT_THAT(got.messages(), ElementsAre("hello"));
}

TEST_F(GrpcServerTest, AnEmptyMessageIsAMessage) {
  const GrpcAnswer got = ask(to("/echo"), framed(""));
  EXPECT_EQ(got.status(), "OK");
  EXPECT_THAT(got.messages(), ElementsAre(""));
}

TEST_F(GrpcServerTest, WhatOneReadBringsIsOneBatch) {
  auto client = connect();
  std::vector<std::int32_t> calls;
  for (int i = 0; i < 20; ++i) {
    calls.push_back(client->call(to("/echo"), framed(std::to_string(i))));
  }
  for (int i = 0; i < 20; ++i) {
    EXPECT_THAT(client->answer(calls[i]).messages(), ElementsAre(std::to_string(i)));
  }
  EXPECT_THAT(batches_, ElementsAre(20u));
}

TEST_F(GrpcServerTest, AMessageMayComeInPieces) {
  auto client = connect();
  const std::string body = framed(std::string(30'000, 'x'));
  const std::int32_t call = client->call(to("/echo"), "", true);
  for (std::size_t i = 0; i < 6; ++i) {
    client->more(call, body.substr(i, 1), true);
    client->exchange();
    turn_();
  }
  client->more(call, body.substr(6));
  EXPECT_EQ(client->answer(call).status(), "OK");
  EXPECT_EQ(client->answer(call).messages().at(0).size(), 30'000u);
}

TEST_F(GrpcServerTest, AnswersComeLater) {
  auto client = connect();
  const std::int32_t first = client->call(to("/late"), framed("a"));
  const std::int32_t gone = client->call(to("/late"), framed("b"));
  EXPECT_TRUE(client->wait([&] { return late_.size() == 2; }));
  client->reset(gone);
  EXPECT_TRUE(client->wait([&] { return server_->calls() == 1; }));
  answer_late();
  EXPECT_THAT(client->answer(first).messages(), ElementsAre("late"));
}

TEST_F(GrpcServerTest, AnswersThatComeAfterTheConnectionHaveNoEffect) {
  auto client = connect();
  client->call(to("/late"), framed("a"));
  EXPECT_TRUE(client->wait([&] { return late_.size() == 1; }));
  client->leave();
  while (server_->connections() > 0) turn_();
  answer_late();
}

TEST_F(GrpcServerTest, StreamsAreAnsweredMessageByMessage) {
  auto client = connect();
  const std::int32_t call = client->call(to("/stream"), framed("a") + framed("b"), true);
  EXPECT_TRUE(client->wait([&] { return client->answers[call].messages().size() == 2; }));
  EXPECT_FALSE(client->answers[call].closed);
  client->more(call, framed("c"));
  EXPECT_THAT(client->answer(call).messages(), ElementsAre("a", "b", "c"));
  EXPECT_EQ(client->answer(call).status(), "OK");
  EXPECT_THAT(seen_, ElementsAre("a", "b", "c", "(end)"));
}

TEST_F(GrpcServerTest, AHandlerThatThrowsFailsItsCalls) {
  EXPECT_EQ(ask(to("/throw"), framed("x")).status(), "13 the call could not be handled");
  EXPECT_EQ(server_->counters().failed, 1u);
  const GrpcAnswer stream = ask(to("/stream"), framed("a") + framed("throw"));
  EXPECT_THAT(stream.messages(), ElementsAre("a"));
  EXPECT_EQ(stream.status(), "13 the call could not be handled");
}

// What is no call

TEST_F(GrpcServerTest, RefusesWhatIsNoCall) {
  EXPECT_EQ(ask(to("/nothing"), framed("x")).status(), "12 unknown method");
  Fields get = to("/echo");
  get[0].second = "GET";
  EXPECT_EQ(ask(get, "").status(), "HTTP 405");
  for (const std::string type :
       {"application/json", "application/grpc-web", "application/grpc+json"}) {
    Fields other = to("/echo");
    other.back().second = type;
    EXPECT_EQ(ask(other, framed("x")).status(), "HTTP 415") << type;
  }
  Fields proto = to("/echo");
  proto.back().second = "application/grpc+proto";
  EXPECT_EQ(ask(proto, framed("x")).status(), "OK");
  EXPECT_THAT(seen_, ElementsAre("x"));
}

TEST_F(GrpcServerTest, RefusesWhatIsNoMessage) {
  EXPECT_EQ(ask(to("/echo"), framed("x", 1)).status(), "12 compressed messages are not taken");
  EXPECT_EQ(ask(to("/echo"), framed("x", 2)).status(), "13 a message begins with an unknown flag");
  EXPECT_EQ(ask(to("/echo"), "").status(), "13 there is no message");
  EXPECT_EQ(ask(to("/echo"), framed("abc").substr(0, 7)).status(), "13 the message is cut short");
  EXPECT_EQ(ask(to("/echo"), framed("abc").substr(0, 3)).status(), "13 the message is cut short");
  EXPECT_EQ(ask(to("/echo"), framed("a") + framed("b")).status(), "13 more than one message");
  EXPECT_EQ(ask(to("/stream"), framed("a") + "\0\0"s).status(), "13 the message is cut short");
  EXPECT_THAT(seen_, ElementsAre("a"));
}

TEST_F(GrpcServerTest, SaysWhichEncodingsItTakes) {
  EXPECT_EQ(ask(to("/echo"), framed("x", 1)).field("grpc-accept-encoding"), "identity");
}

TEST_F(GrpcServerTest, RefusesLargeMessages) {
  GrpcServerOptions options;
  options.max_message = 1000;
  start(options);
  EXPECT_EQ(ask(to("/echo"), framed(std::string(1000, 'x'))).status(), "OK");
  // Before the rest of it has come, which is not wanted then.
  auto client = connect();
  const std::int32_t call =
      client->call(to("/echo"), framed(std::string(1001, 'x')).substr(0, 20), true);
  EXPECT_TRUE(client->wait([&] { return client->answers[call].closed; }));
  EXPECT_EQ(client->answers[call].field("grpc-status"), "8");
  EXPECT_EQ(client->answers[call].reset, 0u);
}

TEST_F(GrpcServerTest, BoundsTheHead) {
  GrpcServerOptions options;
  options.max_head = 1000;
  start(options);
  EXPECT_EQ(ask(to("/echo", {{"x", std::string(400, 'y')}}), framed("x")).status(), "OK");
  EXPECT_THAT(ask(to("/echo", {{"x", std::string(1000, 'y')}}), framed("x")).status(),
              StartsWith("reset"));
}

TEST_F(GrpcServerTest, BoundsWhatIsHeldOfMessages) {
  GrpcServerOptions options;
  options.max_message = 1000;
  options.connection_bytes = 1500;
  start(options);
  auto client = connect();
  const std::string half = framed(std::string(1000, 'x')).substr(0, 900);
  const std::int32_t first = client->call(to("/echo"), half, true);
  const std::int32_t second = client->call(to("/echo"), half, true);
  EXPECT_EQ(client->answer(second).field("grpc-status"), "8");
  // There is room for the first one's rest, and for others once it is done.
  client->more(first, framed(std::string(1000, 'x')).substr(900));
  EXPECT_EQ(client->answer(first).status(), "OK");
  EXPECT_EQ(client->answer(client->call(to("/echo"), framed("z"))).status(), "OK");
}

// Time

TEST(GrpcTimeout, IsRead) {
  const auto read = [](std::string_view text) {
    Nanos out = -1;
    return parse_grpc_timeout(text, out) ? out : -1;
  };
  EXPECT_EQ(read("20m"), 20 * kMillisecond);
  EXPECT_EQ(read("1S"), kSecond);
  EXPECT_EQ(read("2M"), 2 * kMinute);
  EXPECT_EQ(read("3H"), 3 * kHour);
  EXPECT_EQ(read("5u"), 5000);
  EXPECT_EQ(read("7n"), 7);
  EXPECT_EQ(read("99999999H"), kNever);
  EXPECT_EQ(read("99999999M"), 99'999'999 * kMinute);
  for (const std::string_view bad : {"", "m", "1", "123456789m", "-1m", "1.5S", "1s", " 1S"}) {
    EXPECT_EQ(read(bad), -1) << bad;
  }
}

TEST(GrpcMessage, IsPrintable) {
  EXPECT_EQ(grpc_message("a b%\n\xff"), "a b%25%0A%FF");
  EXPECT_EQ(grpc_message(std::string(5000, 'x')).size(), 1024u);
}

TEST_F(GrpcServerTest, AClientsDeadlineEndsItsCall) {
  auto client = connect();
  const std::int32_t call = client->call(to("/late", {{"grpc-timeout", "30m"}}), framed("a"));
  EXPECT_EQ(client->answer(call).status(), "4 there was no answer in time");
  answer_late();
  EXPECT_EQ(server_->counters().late, 1u);
}

TEST_F(GrpcServerTest, WhatHasNoTimeLeftIsNotAsked) {
  EXPECT_EQ(ask(to("/echo", {{"grpc-timeout", "0m"}}), framed("a")).status(),
            "4 the deadline has passed");
  EXPECT_EQ(ask(to("/echo", {{"grpc-timeout", "soon"}}), framed("a")).status(),
            "13 grpc-timeout is malformed");
  EXPECT_THAT(seen_, IsEmpty());
}

TEST_F(GrpcServerTest, TimeIsBounded) {
  GrpcServerOptions options;
  options.message_timeout = 30 * kMillisecond;
  options.answer_timeout = 40 * kMillisecond;
  start(options);
  auto client = connect();
  EXPECT_EQ(client->answer(client->call(to("/echo"), "", true)).status(),
            "4 the message did not arrive in time");
  EXPECT_EQ(client->answer(client->call(to("/late"), framed("x"))).status(),
            "4 there was no answer in time");
}

TEST_F(GrpcServerTest, IdleAndSilentConnectionsAreClosed) {
  GrpcServerOptions options;
  options.first_timeout = 30 * kMillisecond;
  options.idle_timeout = 60 * kMillisecond;
  start(options);
  auto silent = connect(false);
  silent->mute = true;
  EXPECT_TRUE(silent->ended());
  auto idle = connect();
  EXPECT_EQ(idle->answer(idle->call(to("/echo"), framed("x"))).status(), "OK");
  EXPECT_TRUE(idle->ended());
  EXPECT_EQ(idle->goaways.size(), 1u);
  EXPECT_EQ(server_->counters().timed_out, 2u);
}

TEST_F(GrpcServerTest, AConnectionThatTakesNoAnswersIsClosed) {
  GrpcServerOptions options;
  options.stall_timeout = 60 * kMillisecond;
  start(options);
  auto client = connect(false);
  client->greet({{NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE, 0}});
  client->call(to("/echo"), framed("x"));
  EXPECT_TRUE(client->ended());
  EXPECT_THAT(seen_, ElementsAre("x"));
}

// Going

TEST_F(GrpcServerTest, AnOldConnectionIsToldToGo) {
  GrpcServerOptions options;
  options.max_age = 50 * kMillisecond;
  options.last_word = 30 * kMillisecond;
  start(options);
  auto client = connect();
  const std::int32_t late = client->call(to("/late"), framed("x"));
  EXPECT_TRUE(client->wait([&] { return client->goaways.size() == 1; }));
  // It may still ask, as it may not have heard.
  EXPECT_EQ(client->goaways[0].first, (1 << 30) - 1 + (1 << 30));
  EXPECT_TRUE(client->wait([&] { return client->goaways.size() == 2; }));
  EXPECT_EQ(client->goaways[1], std::make_pair(late, 0u));
  answer_late();
  EXPECT_EQ(client->answer(late).status(), "OK");
  EXPECT_TRUE(client->ended());
  EXPECT_EQ(server_->counters().aged, 1u);
}

TEST_F(GrpcServerTest, AllAreToldToGo) {
  GrpcServerOptions options;
  options.last_word = 10 * kMillisecond;
  start(options);
  auto idle = connect();
  EXPECT_EQ(idle->answer(idle->call(to("/echo"), framed("x"))).status(), "OK");
  auto stream = connect();
  const std::int32_t call = stream->call(to("/stream"), framed("a"), true);
  EXPECT_TRUE(stream->wait([&] { return stream->answers[call].messages().size() == 1; }));
  server_->drain();
  EXPECT_TRUE(idle->ended());
  EXPECT_THAT(stream->answer(call).status(), StartsWith("14 "));
  EXPECT_TRUE(stream->ended());
  EXPECT_EQ(idle->goaways.size(), 1u);  // nghttp2's client reads no further than the first
  EXPECT_EQ(stream->goaways.size(), 2u);
}

TEST_F(GrpcServerTest, WhoDoesNotGoIsClosed) {
  GrpcServerOptions options;
  options.last_word = 10 * kMillisecond;
  options.grace = 50 * kMillisecond;
  start(options);
  auto client = connect();
  client->call(to("/late"), framed("x"));
  EXPECT_TRUE(client->wait([&] { return late_.size() == 1; }));
  server_->drain();
  EXPECT_TRUE(client->ended());
}

// Room

TEST_F(GrpcServerTest, ConnectionsMakeRoom) {
  GrpcServerOptions options;
  options.evict_after = 20 * kMillisecond;
  start(options, 2);
  auto busy = connect();
  busy->call(to("/late"), framed("x"));
  EXPECT_TRUE(busy->wait([&] { return late_.size() == 1; }));
  auto idle = connect();
  EXPECT_EQ(idle->answer(idle->call(to("/echo"), framed("x"))).status(), "OK");
  auto turned_away = connect();
  EXPECT_TRUE(turned_away->ended());
  ::usleep(30'000);
  turn_();
  auto third = connect();
  EXPECT_TRUE(idle->ended());
  EXPECT_EQ(third->answer(third->call(to("/echo"), framed("x"))).status(), "OK");
  EXPECT_FALSE(busy->gone);
  EXPECT_EQ(server_->counters().turned_away, 1u);
  EXPECT_EQ(server_->counters().evicted, 1u);
}

TEST_F(GrpcServerTest, OpenCallsAreBounded) {
  GrpcServerOptions options;
  options.max_streams = 3;
  start(options);
  auto client = connect();
  std::vector<std::int32_t> calls;
  for (int i = 0; i < 5; ++i) calls.push_back(client->call(to("/late"), framed("x")));
  EXPECT_TRUE(client->wait([&] { return client->answers[calls[4]].closed; }));
  EXPECT_EQ(client->answers[calls[4]].status(), "reset 7");
  EXPECT_EQ(server_->calls(), 3u);
}

// Floods: what brings nothing is taken up to a bound, whoever has it sent.

class GrpcFloodTest : public GrpcServerTest {
 protected:
  /// `times` of it, in pieces; whether the server closed for them.
  bool closes(GrpcClient& client, const std::string& bytes, int times) {
    for (int i = 0; i < times && !client.gone; ++i) {
      client.send_raw(bytes);
      if (i % 100 == 0) {
        client.exchange();
        turn_();
      }
    }
    for (int i = 0; i < 50; ++i) {
      client.exchange();
      turn_();
    }
    return server_->connections() == 0;
  }
  static std::string frame(std::uint8_t type, std::uint8_t flags, std::int32_t stream,
                           const std::string& payload) {
    std::string out;
    for (int shift = 16; shift >= 0; shift -= 8) out += static_cast<char>(payload.size() >> shift);
    out += static_cast<char>(type);
    out += static_cast<char>(flags);
    for (int shift = 24; shift >= 0; shift -= 8) out += static_cast<char>(stream >> shift);
    return out + payload;
  }
};

TEST_F(GrpcFloodTest, OfPings) {
  auto client = connect();
  EXPECT_FALSE(closes(*client, frame(6, 0, 0, "12345678"), 500));
  EXPECT_TRUE(closes(*client, frame(6, 0, 0, "12345678"), 5000));
  EXPECT_EQ(server_->counters().floods, 1u);
  EXPECT_EQ(client->goaways.back().second, static_cast<unsigned>(NGHTTP2_ENHANCE_YOUR_CALM));
}

TEST_F(GrpcFloodTest, OfSettings) {
  auto client = connect();
  client->exchange();
  client->deaf = true;  // it would be told of more than it knows to have asked
  EXPECT_TRUE(closes(*client, frame(4, 0, 0, ""), 5000));
  EXPECT_EQ(server_->counters().floods, 1u);
}

TEST_F(GrpcFloodTest, OfEmptyData) {
  auto client = connect();
  const std::int32_t call = client->call(to("/stream"), framed("a"), true);
  EXPECT_TRUE(client->wait([&] { return client->answers[call].messages().size() == 1; }));
  EXPECT_TRUE(closes(*client, frame(0, 0, call, ""), 5000));
  EXPECT_EQ(server_->counters().floods, 1u);
}

TEST_F(GrpcFloodTest, OfResets) {
  auto client = connect();
  int count = 0;
  while (!client->gone && count < 20'000) {
    const std::int32_t call = client->call(to("/late"), "", true);
    client->exchange();
    client->reset(call);
    ++count;
    client->exchange();
    if (count % 50 == 0) turn_();
  }
  EXPECT_TRUE(client->ended());
  EXPECT_LT(count, 6000);
  EXPECT_EQ(server_->calls(), 0u);
}

TEST_F(GrpcFloodTest, CallsPayForWhatBelongsToThem) {
  auto client = connect();
  for (int i = 0; i < 5000 && !client->gone; ++i) {
    const std::int32_t call = client->call(to("/echo"), framed("x"));
    client->send_raw(frame(6, 0, 0, "12345678"));
    if (i % 50 < 49) continue;
    EXPECT_EQ(client->answer(call).status(), "OK");
  }
  EXPECT_FALSE(client->gone);
}

TEST_F(GrpcServerTest, WhatIsNoHttp2IsClosed) {
  auto plain = connect(false);
  plain->output();  // its own first words, which nobody gets to hear
  plain->send_raw("GET / HTTP/1.1\r\nHost: a\r\n\r\n");
  EXPECT_TRUE(plain->ended());
  EXPECT_EQ(server_->counters().broken, 1u);
}

TEST_F(GrpcServerTest, WhoDoesNotReadIsReadNoMore) {
  GrpcServerOptions options;
  options.max_waiting = 10'000;
  options.connection_bytes = 16u << 20;
  start(options);
  auto client = connect(false);
  client->greet({{NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE, 1 << 30}});
  nghttp2_submit_window_update(client->h2(), NGHTTP2_FLAG_NONE, 0, 1 << 30);
  std::vector<std::int32_t> calls;
  for (int i = 0; i < 200; ++i) {
    calls.push_back(client->call(to("/echo"), framed(std::string(30'000, 'x'))));
  }
  client->deaf = true;
  for (int i = 0; i < 200; ++i) {
    client->exchange();
    turn_();
  }
  EXPECT_LT(seen_.size(), 100u);
  client->deaf = false;
  for (const std::int32_t call : calls) EXPECT_EQ(client->answer(call).status(), "OK");
}

}  // namespace
}  // namespace weir::node
