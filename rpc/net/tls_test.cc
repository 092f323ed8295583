#include <fcntl.h>
#include <gtest/gtest.h>
#include <kj/debug.h>
#include <openssl/ssl.h>
#include <sys/socket.h>
#include <unistd.h>
#include <uv.h>

#include <cerrno>
#include <chrono>
#include <functional>
#include <optional>
#include <random>
#include <string>

#include <weir/rpc/net/test_util.h>
#include <weir/rpc/net/tls_session.h>
#include <weir/rpc/net/tls_stream.h>
#include <weir/rpc/net/tls_test_util.h>
#include <weir/rpc/net/uv_stream.h>

namespace weir::rpc {
namespace {

using test::TestCa;
using State = TlsSession::State;

std::string pattern(std::size_t size) {
  std::string out(size, 0);
  for (std::size_t i = 0; i < size; ++i) out[i] = static_cast<char>(i * 31 + i / 257);
  return out;
}

/// Two sessions with a wire in between.
struct Wire {
  std::unique_ptr<TlsSession> client, server;
  Output to_server, to_client;
  std::string at_server, at_client;

  Wire(std::unique_ptr<TlsSession> c, std::unique_ptr<TlsSession> s)
      : client(std::move(c)), server(std::move(s)) {
    client->start(to_server);
  }

  static void read(TlsSession& session, Output& out, std::string& got) {
    char buffer[3000];
    while (std::size_t n = session.read(buffer, out)) got.append(buffer, n);
  }
  static void carry(Output& from, TlsSession& to, Output& back, std::string& got,
                    std::size_t step) {
    const std::string bytes(from.view());
    from.clear();
    for (std::size_t at = 0; at < bytes.size(); at += step) {
      to.receive({bytes.data() + at, std::min(step, bytes.size() - at)});
      read(to, back, got);
    }
  }
  /// Until nobody has anything to say.
  void run(std::size_t step = 1 << 20) {
    while (!to_server.empty() || !to_client.empty()) {
      carry(to_server, *server, to_client, at_server, step);
      carry(to_client, *client, to_server, at_client, step);
    }
  }
};

class TlsTest : public testing::Test {
 protected:
  TlsTest() {
    ca.issue("node", {"weir://demo/eu/eu-1", "node.example", "127.0.0.1"});
    ca.issue("client", {"weir://demo/client/web"});
    as_server = ca.context("node");
    as_client = ca.context("");
  }
  Wire wire(std::vector<std::string> names = {}) {
    return {TlsSession::client(as_client, "node", std::move(names)),
            TlsSession::server(as_server, "stranger")};
  }
  TestCa ca;
  std::shared_ptr<TlsContext> as_server, as_client;
};

TEST_F(TlsTest, CarriesBytesBothWaysInPiecesOfAnySize) {
  for (std::size_t step : {1, 7, 4096, 1 << 20}) {
    Wire w = wire();
    w.run(step);
    ASSERT_TRUE(w.client->secured() && w.server->secured()) << w.client->why() << w.server->why();
    const std::string there = pattern(50'000);
    const std::string back = pattern(40'001);
    w.client->write(there, w.to_server);
    w.server->write(back, w.to_client);
    w.run(step);
    EXPECT_EQ(w.at_server, there);
    EXPECT_EQ(w.at_client, back);
    EXPECT_EQ(w.client->description().substr(0, 7), "TLSv1.3");
    EXPECT_EQ(w.client->exporter("EXPORTER-test"), w.server->exporter("EXPORTER-test"));
    EXPECT_NE(w.client->exporter("EXPORTER-test"), w.client->exporter("EXPORTER-other"));
  }
}

TEST_F(TlsTest, SaysThatItEnds) {
  Wire w = wire();
  w.run();
  w.client->write("last", w.to_server);
  w.client->close(w.to_server);
  EXPECT_FALSE(w.client->can_write());
  w.run();
  EXPECT_EQ(w.at_server, "last");
  EXPECT_EQ(w.server->state(), State::ended);
  EXPECT_TRUE(w.server->end());
  w.server->write("answer", w.to_client);  // half closed: this side still may
  w.run();
  EXPECT_EQ(w.at_client, "answer");

  Wire cut = wire();
  cut.run();
  EXPECT_FALSE(cut.server->end());
  EXPECT_EQ(cut.server->why(), "TLS: the connection ended without a word");
}

TEST_F(TlsTest, KnowsNamesOfEveryKind) {
  for (const char* name : {"weir://demo/eu/eu-1", "node.example", "127.0.0.1"}) {
    Wire w = wire({"weir://demo/eu/other", name});
    w.run();
    EXPECT_TRUE(w.client->secured()) << w.client->why();
    EXPECT_TRUE(w.client->peer_is(name));
  }
  for (const char* name : {"weir://demo/eu/eu-2", "weir://demo/eu/eu-1/", "other.example",
                           "127.0.0.2", "eu-1", "node"}) {
    Wire w = wire({name});
    w.run();
    EXPECT_EQ(w.client->state(), State::failed);
    EXPECT_EQ(w.client->why(),
              "TLS: its certificate is of weir://demo/eu/eu-1, node.example, 127.0.0.1, expected " +
                  std::string(name));
    EXPECT_EQ(w.server->why(), "TLS: the other side refused: bad certificate") << name;
  }
}

TEST_F(TlsTest, TakesAWildcardForNobody) {
  ca.issue("node", {"*.example", "weir://demo/eu/*"});
  as_server = ca.context("node");
  for (const char* name : {"node.example", "weir://demo/eu/eu-1"}) {
    Wire w = wire({name});
    w.run();
    EXPECT_EQ(w.client->state(), State::failed) << name;
  }
}

TEST_F(TlsTest, RefusesCertificatesThatAreNotGood) {
  const TestCa other("another CA");
  other.issue("node", {"node.example"});
  ca.issue("expired", {"node.example"}, test::wall_now() - 2 * kHour, test::wall_now() - kHour);
  ca.issue("early", {"node.example"}, test::wall_now() + kHour, test::wall_now() + 2 * kHour);
  const auto check = [&](std::shared_ptr<TlsContext> server, const std::string& why,
                         const std::string& told) {
    Wire w(TlsSession::client(as_client, "node", {"node.example"}),
           TlsSession::server(std::move(server), "stranger"));
    w.run();
    EXPECT_EQ(w.client->why(), why);
    EXPECT_EQ(w.server->why(), told);
  };
  check(other.context("node"),
        "TLS: its certificate of node.example is of a CA that is unknown here",
        "TLS: the other side refused: unknown CA");
  check(ca.context("expired"), "TLS: its certificate of node.example has expired",
        "TLS: the other side refused: certificate expired");
  check(ca.context("early"), "TLS: its certificate of node.example is not valid yet",
        "TLS: the other side refused: bad certificate");
}

TEST_F(TlsTest, LooksUpWhatIsRevoked) {
  const Certificate bad = ca.issue("bad", {"node.example"});
  ca.revoke({bad.cert});
  TlsOptions options = ca.options("");
  options.crl = ca.path("crl.pem");
  as_client = TestCa::make(options);
  Wire good = wire({"node.example"});
  good.run();
  EXPECT_TRUE(good.client->secured()) << good.client->why();
  as_server = ca.context("bad");
  Wire revoked = wire({"node.example"});
  revoked.run();
  EXPECT_EQ(revoked.client->why(), "TLS: its certificate of node.example is revoked");
  EXPECT_EQ(revoked.server->why(), "TLS: the other side refused: certificate revoked");

  ca.revoke({}, test::wall_now() - kMinute);
  as_client = TestCa::make(options);
  as_server = ca.context("node");
  Wire old = wire({"node.example"});
  old.run();
  EXPECT_EQ(old.client->why(), "TLS: the list of revoked certificates has expired");
}

TEST_F(TlsTest, AsksClientsForCertificates) {
  as_server = ca.context("node", ClientCertificate::required);
  Wire none = wire();
  none.run();
  EXPECT_EQ(none.server->why(), "TLS: it showed no certificate");
  EXPECT_EQ(none.client->why(), "TLS: the other side refused: certificate required");

  as_client = ca.context("client");
  Wire one = wire();
  one.run();
  ASSERT_TRUE(one.server->secured()) << one.server->why();
  EXPECT_EQ(one.server->peer_names(), std::vector<std::string>{"weir://demo/client/web"});
  EXPECT_TRUE(one.server->peer_is("weir://demo/client/web"));
  EXPECT_FALSE(one.server->peer_is("weir://demo/client/we"));

  as_server = ca.context("node", ClientCertificate::optional);
  as_client = ca.context("");
  Wire open = wire();
  open.run();
  EXPECT_TRUE(open.server->secured());
  EXPECT_TRUE(open.server->peer_names().empty());
}

TEST_F(TlsTest, AgreesOnAProtocol) {
  TlsOptions server = ca.options("node");
  server.alpn = {"h2", "http/1.1"};
  as_server = TestCa::make(server);
  for (const auto& [offered, agreed] :
       std::vector<std::pair<std::vector<std::string>, std::string>>{
           {{"http/1.1", "h2"}, "h2"}, {{"http/1.1"}, "http/1.1"}, {{}, ""}}) {
    TlsOptions options = ca.options("");
    options.alpn = offered;
    as_client = TestCa::make(options);
    Wire w = wire();
    w.run();
    EXPECT_TRUE(w.server->secured()) << w.server->why();
    EXPECT_EQ(w.server->alpn(), agreed);
    EXPECT_EQ(w.client->alpn(), agreed);
  }
  TlsOptions strange = ca.options("");
  strange.alpn = {"smtp"};
  as_client = TestCa::make(strange);
  Wire w = wire();
  w.run();
  EXPECT_EQ(w.client->state(), State::failed);
  EXPECT_EQ(w.server->state(), State::failed);
}

TEST_F(TlsTest, RefusesWhatIsNoTls) {
  for (const std::string& text :
       {std::string("GET / HTTP/1.1\r\nHost: x\r\n\r\n"), std::string(64, '\0'),
        std::string("\x16\x03\x01\xff\xff") + pattern(70'000)}) {
    auto session = TlsSession::server(as_server, "stranger");
    Output out;
    session->receive({text.data(), text.size()});
    EXPECT_EQ(session->read({}, out), 0u);
    EXPECT_EQ(session->state(), State::failed);
    EXPECT_EQ(session->why().substr(0, 5), "TLS: ");
  }
  EXPECT_EQ(as_server->counters().failed, 3u);
}

// Whatever becomes of the bytes on the way, nothing arrives that was not sent.
TEST_F(TlsTest, DeliversNothingThatWasChanged) {
  std::mt19937 random(7);
  const std::string sent = pattern(3000);
  for (int round = 0; round < 300; ++round) {
    Wire w = wire();
    bool in_handshake = round % 2 == 0;
    if (!in_handshake) {
      w.run();
      w.client->write(sent, w.to_server);
    }
    const std::size_t at = random() % w.to_server.size();
    const char was = w.to_server.data()[at];
    w.to_server.data()[at] = static_cast<char>(was ^ (1 << random() % 8));
    w.run();
    if (in_handshake) {
      w.client->write(sent, w.to_server);
      w.run();
    }
    EXPECT_EQ(w.at_server, sent.substr(0, w.at_server.size()));
    EXPECT_TRUE(in_handshake || w.at_server.size() < sent.size());
  }
}

TEST_F(TlsTest, TakesOldVersionsOnlyIfTold) {
  TlsOptions options = ca.options("");
  options.tls12 = true;
  as_client = TestCa::make(options);
  SSL_CTX_set_max_proto_version(as_client->current().get(), TLS1_2_VERSION);
  Wire refused = wire();
  refused.run();
  EXPECT_EQ(refused.client->why(), "TLS: the other side refused: protocol version");
  EXPECT_EQ(refused.server->state(), State::failed);

  options = ca.options("node");
  options.tls12 = true;
  as_server = TestCa::make(options);
  Wire w = wire();
  w.run();
  ASSERT_TRUE(w.server->secured()) << w.server->why();
  EXPECT_EQ(w.server->description().substr(0, 13), "TLSv1.2 ECDHE");
  w.client->write("old", w.to_server);
  w.run();
  EXPECT_EQ(w.at_server, "old");
}

TEST_F(TlsTest, ReadsFilesAgainAndKeepsTheOldOnesWhereTheNewAreBad) {
  std::string error;
  EXPECT_EQ(as_server->refresh(error), TlsContext::Refreshed::unchanged);
  Wire before = wire({"node.example"});
  before.run();
  ASSERT_TRUE(before.client->secured());

  const Certificate fresh = ca.issue("node", {"fresh.example"});
  EXPECT_EQ(as_server->refresh(error), TlsContext::Refreshed::taken);
  EXPECT_EQ(as_server->certificates()[0].names, std::vector<std::string>{"fresh.example"});
  Wire after = wire({"fresh.example"});
  after.run();
  EXPECT_TRUE(after.client->secured()) << after.client->why();

  ca.write("node.pem", "nonsense");
  EXPECT_EQ(as_server->refresh(error), TlsContext::Refreshed::refused);
  EXPECT_EQ(error, ca.path("node.pem") + ": expected PEM certificates");
  EXPECT_EQ(as_server->refresh(error), TlsContext::Refreshed::refused);  // and tried again
  Wire kept = wire({"fresh.example"});
  kept.run();
  EXPECT_TRUE(kept.client->secured());

  ca.write("node.pem", fresh.cert);
  ca.write("node.key", ca.ca().key);
  EXPECT_EQ(as_server->refresh(error), TlsContext::Refreshed::refused);
  EXPECT_EQ(error,
            ca.path("node.key") + ": is not the key of the certificate in " + ca.path("node.pem"));
  ca.write("node.key", fresh.key);
  EXPECT_EQ(as_server->refresh(error), TlsContext::Refreshed::taken);

  // What was there goes on.
  before.client->write("still", before.to_server);
  before.run();
  EXPECT_EQ(before.at_server, "still");
}

TEST_F(TlsTest, NamesTheFileThatCannotBeUsed) {
  std::string error;
  TlsOptions options = ca.options("node");
  options.key = ca.path("none");
  EXPECT_EQ(TlsContext::make(options, error), nullptr);
  EXPECT_EQ(error, ca.path("none") + ": No such file or directory");
  options = ca.options("node");
  options.key = ca.path("node.pem");
  EXPECT_EQ(TlsContext::make(options, error), nullptr);
  EXPECT_EQ(error, ca.path("node.pem") + ": expected a PEM private key that is not encrypted");
  options = ca.options("node");
  options.crl = ca.path("ca.pem");
  EXPECT_EQ(TlsContext::make(options, error), nullptr);
  EXPECT_EQ(error, ca.path("ca.pem") + ": expected PEM certificate revocation lists");
  ca.write("junk", ca.ca().cert + "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n");
  options = ca.options("node");
  options.ca = ca.path("junk");
  EXPECT_EQ(TlsContext::make(options, error), nullptr);
  EXPECT_EQ(error, ca.path("junk") + ": expected PEM certificates, but the one after 1 is none");
}

TEST_F(TlsTest, ReportsFailuresAtABoundedRate) {
  int reports = 0;
  std::string last;
  TlsOptions options = ca.options("node");
  options.on_failure = [&](const std::string& who, const std::string& why) {
    ++reports;
    last = who + ": " + why;
  };
  as_server = TestCa::make(options);
  for (int i = 0; i < 100; ++i) {
    auto session = TlsSession::server(as_server, "10.0.0.1");
    Output out;
    session->receive(std::string("GET / HTTP/1.1\r\n"));
    session->read({}, out);
  }
  EXPECT_EQ(as_server->counters().failed, 100u);
  EXPECT_GE(reports, static_cast<int>(kTlsReportsAtOnce));
  EXPECT_LE(reports, static_cast<int>(kTlsReportsAtOnce) + 5);
  EXPECT_EQ(last, "10.0.0.1: TLS: it speaks no TLS");
}

// ---- ByteStream ----

struct Recorder final : ByteStream::User {
  void on_data(std::span<char> bytes) override {
    got.append(bytes.data(), bytes.size());
    if (on_bytes) on_bytes();
  }
  void on_end(int failure) override {
    ++ends;
    error = failure;
  }
  void on_sent() override { ++sent; }
  std::string got;
  std::function<void()> on_bytes;
  int ends = 0;
  int error = -1;
  int sent = 0;
};

class TlsStreamTest : public TlsTest {
 protected:
  TlsStreamTest() {
    uv_loop_init(&loop_);
    streams_ = std::make_unique<StreamLoop>(&loop_);
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends_), 0);
    server_ = make_tls_stream(*streams_, make_tcp_stream(*streams_, ends_[1]),
                              TlsSession::server(as_server, "stranger"), 500);
  }
  ~TlsStreamTest() override {
    server_.reset();
    client_.reset();
    streams_.reset();
    while (uv_run(&loop_, UV_RUN_NOWAIT) != 0) continue;
    EXPECT_EQ(uv_loop_close(&loop_), 0);
    if (client_fd_is_ours_) ::close(ends_[0]);
  }
  void dial() {
    client_fd_is_ours_ = false;
    client_ = make_tls_stream(*streams_, make_tcp_stream(*streams_, ends_[0]),
                              TlsSession::client(as_client, "node", {"node.example"}));
    client_->start(at_client_);
  }
  void wait(const std::function<bool()>& condition) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (!condition()) {
      ASSERT_LT(std::chrono::steady_clock::now(), until) << "waited in vain";
      uv_run(&loop_, UV_RUN_NOWAIT);
    }
  }

  uv_loop_t loop_{};
  std::unique_ptr<StreamLoop> streams_;
  int ends_[2] = {-1, -1};
  bool client_fd_is_ours_ = true;
  Recorder at_server_, at_client_;
  std::unique_ptr<ByteStream> server_, client_;
};

TEST_F(TlsStreamTest, CarriesMuchBothWays) {
  server_->start(at_server_);
  dial();
  const std::string much = pattern(3'000'000);
  client_->out().append(much);  // waits for the handshake
  at_server_.on_bytes = [this] { server_->out().append("+"); };
  wait([&] { return at_server_.got.size() == much.size(); });
  EXPECT_EQ(at_server_.got, much);
  EXPECT_GE(at_client_.sent + 1, 1);
  wait([&] { return client_->waiting() == 0; });
  at_server_.on_bytes = nullptr;
  server_->out().append(much);
  wait([&] { return at_client_.got.size() > much.size(); });
  EXPECT_TRUE(at_client_.got.ends_with(much));
  client_->end();
  wait([&] { return at_server_.ends == 1; });
  EXPECT_EQ(at_server_.error, 0);
  server_->out().append("bye");
  server_->end();
  wait([&] { return at_client_.ends == 1; });
  EXPECT_EQ(at_client_.error, 0);
  EXPECT_TRUE(at_client_.got.ends_with("bye"));
}

TEST_F(TlsStreamTest, TellsOnceWhatWaitedForTheHandshakeIsSent) {
  server_->start(at_server_);
  dial();
  client_->out().append("early");
  wait([&] { return at_server_.got == "early"; });
  EXPECT_EQ(at_client_.sent, 1);
}

TEST_F(TlsStreamTest, GivesNothingToAUserThatPauses) {
  server_->start(at_server_);
  dial();
  const std::string much = pattern(400'000);
  at_server_.on_bytes = [this] { server_->pause(); };
  client_->out().append(much);
  std::size_t turns = 0;
  while (at_server_.got.size() < much.size()) {
    const std::size_t had = at_server_.got.size();
    for (int i = 0; i < 20; ++i) uv_run(&loop_, UV_RUN_NOWAIT);
    EXPECT_LE(at_server_.got.size() - had, StreamLoop::kReadBuffer);
    server_->resume();
    ASSERT_LT(++turns, 1000u);
  }
  EXPECT_EQ(at_server_.got, much);
}

TEST_F(TlsStreamTest, TakesAnEndWithoutAWordForAFailure) {
  server_->start(at_server_);
  dial();
  client_->out().append("x");
  wait([&] { return at_server_.got == "x"; });
  ::shutdown(ends_[0], SHUT_WR);
  wait([&] { return at_server_.ends == 1; });
  EXPECT_EQ(at_server_.error, ECONNRESET);
}

TEST_F(TlsStreamTest, RefusesGarbageAndSilence) {
  server_->start(at_server_);
  const std::string text = "GET / HTTP/1.1\r\n\r\n";
  EXPECT_GT(::send(ends_[0], text.data(), text.size(), 0), 0);
  wait([&] { return at_server_.ends == 1; });
  EXPECT_EQ(at_server_.error, EPROTO);
  EXPECT_EQ(at_server_.got, "");
}

TEST_F(TlsStreamTest, EndsAHandshakeThatTakesTooLong) {
  server_->start(at_server_);
  wait([&] { return at_server_.ends == 1; });
  EXPECT_EQ(at_server_.error, EPROTO);
  EXPECT_EQ(as_server->counters().failed, 1u);
}

TEST_F(TlsStreamTest, MayBeDestroyedWithinItsCallbacks) {
  server_->start(at_server_);
  dial();
  at_server_.on_bytes = [this] {
    server_->out().append("gone");
    server_.reset();
  };
  client_->out().append("x");
  wait([&] { return at_client_.ends == 1; });
  EXPECT_EQ(at_client_.got, "gone");
  EXPECT_EQ(at_client_.error, 0);
}

// ---- UvStream ----

struct UvPair {
  UvPair(EventLoop& loop, std::unique_ptr<TlsSession> client, std::unique_ptr<TlsSession> server) {
    int fds[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds), 0);
    a = kj::heap<UvStream>(loop, kj::AutoCloseFd(fds[0]));
    b = kj::heap<UvStream>(loop, kj::AutoCloseFd(fds[1]));
    if (client) a->start_tls(std::move(client));
    if (server) b->start_tls(std::move(server));
  }
  kj::Own<UvStream> a, b;
};

std::string failure_of(EventLoop& loop, kj::Promise<void> promise) {
  std::string text;
  promise.catch_([&](kj::Exception&& e) { text = e.getDescription().cStr(); })
      .wait(loop.wait_scope());
  return text;
}

class TlsUvTest : public TlsTest {
 protected:
  ~TlsUvTest() noexcept override = default;
  UvPair pair(std::vector<std::string> names = {}) {
    return UvPair(loop, TlsSession::client(as_client, "node", std::move(names)),
                  TlsSession::server(as_server, "stranger"));
  }
  EventLoop loop;
};

TEST_F(TlsUvTest, CarriesMuchBothWays) {
  UvPair both = pair();
  auto there = both.b->secured();
  both.a->secured().wait(loop.wait_scope());
  there.wait(loop.wait_scope());
  const std::string much = pattern(2'000'000);
  for (auto [from, to] :
       {std::pair(both.a.get(), both.b.get()), std::pair(both.b.get(), both.a.get())}) {
    std::string got(much.size(), 0);
    auto reading = to->tryRead(got.data(), got.size(), got.size());
    from->write(much.data(), 1000).wait(loop.wait_scope());
    auto writing = from->write(much.data() + 1000, much.size() - 1000);
    EXPECT_EQ(reading.wait(loop.wait_scope()), much.size());
    writing.wait(loop.wait_scope());
    EXPECT_EQ(got, much);
    EXPECT_EQ(from->buffered(), 0u);
  }
}

TEST_F(TlsUvTest, WritesBeforeTheHandshakeWaitAndReadingDrivesIt) {
  UvPair both = pair();
  both.a->write("early", 5).wait(loop.wait_scope());
  both.a->shutdownWrite();
  char got[16] = {};
  auto answer = both.a->tryRead(got + 8, 1, 8);
  EXPECT_EQ(both.b->tryRead(got, 5, 8).wait(loop.wait_scope()), 5u);
  EXPECT_EQ(std::string(got, 5), "early");
  EXPECT_EQ(both.b->tryRead(got, 1, 8).wait(loop.wait_scope()), 0u);
  both.b->write("late", 4).wait(loop.wait_scope());
  EXPECT_EQ(answer.wait(loop.wait_scope()), 4u);
}

TEST_F(TlsUvTest, ShowsWhatIsThereFromAMultipleOfEight) {
  UvPair both = pair();
  auto more = both.b->more_input();
  both.a->write("0123456789abcdef", 16).wait(loop.wait_scope());
  auto drive = both.a->secured();
  EXPECT_TRUE(more.wait(loop.wait_scope()));
  drive.wait(loop.wait_scope());
  EXPECT_EQ(both.b->input().size(), 16u);
  both.b->take_input(8);
  EXPECT_EQ(std::memcmp(both.b->input().begin(), "89abcdef", 8), 0);
}

TEST_F(TlsUvTest, HoldsWritersBack) {
  UvPair both = pair();
  auto there = both.b->secured();
  both.a->secured().wait(loop.wait_scope());
  there.wait(loop.wait_scope());
  const std::string much = pattern(8u << 20);
  bool written = false;
  auto writing = both.a->write(much.data(), much.size())
                     .then([&] { written = true; })
                     .eagerlyEvaluate(nullptr);
  test::turn(loop, 30);
  EXPECT_FALSE(written);
  EXPECT_GE(both.a->buffered(), UvStream::kWriteHigh);
  std::string got(much.size(), 0);
  EXPECT_EQ(both.b->tryRead(got.data(), got.size(), got.size()).wait(loop.wait_scope()),
            much.size());
  writing.wait(loop.wait_scope());
  EXPECT_TRUE(written);
  EXPECT_EQ(got, much);
}

TEST_F(TlsUvTest, SaysWhatWasWrongOnBothSides) {
  UvPair both = pair({"other.example"});
  auto there = both.b->secured().then(
      [] { return std::string(); },
      [](kj::Exception&& e) { return std::string(e.getDescription().cStr()); });
  EXPECT_EQ(failure_of(loop, both.a->secured()),
            "TLS: its certificate is of weir://demo/eu/eu-1, node.example, 127.0.0.1, expected "
            "other.example");
  EXPECT_EQ(there.wait(loop.wait_scope()), "TLS: the other side refused: bad certificate");
}

TEST_F(TlsUvTest, TakesAnEndWithoutAWordForAFailure) {
  UvPair both = pair();
  auto there = both.b->secured();
  both.a->secured().wait(loop.wait_scope());
  there.wait(loop.wait_scope());
  ::shutdown(KJ_ASSERT_NONNULL(both.a->getFd()), SHUT_WR);
  char got[8];
  EXPECT_EQ(failure_of(loop, both.b->tryRead(got, 1, 8).ignoreResult()),
            "TLS: the connection ended without a word");
}

TEST_F(TlsUvTest, RefusesPlainBytes) {
  int fds[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds), 0);
  UvStream stream(loop, kj::AutoCloseFd(fds[0]));
  kj::AutoCloseFd far(fds[1]);
  stream.start_tls(TlsSession::server(as_server, "stranger"));
  const std::string words(256, '\0');
  ASSERT_GT(::send(far.get(), words.data(), words.size(), 0), 0);
  EXPECT_EQ(failure_of(loop, stream.more_input().ignoreResult()), "TLS: it speaks no TLS");
}

}  // namespace
}  // namespace weir::rpc
