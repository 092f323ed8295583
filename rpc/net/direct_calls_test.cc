#include <weir/rpc/net/direct_calls.h>

#include <capnp/serialize.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <optional>
#include <string>

#include <weir.capnp.h>

#include <weir/rpc/net/connection.h>
#include <weir/rpc/net/test_util.h>

namespace weir::rpc {
namespace {

using schema::Service;
using Kind = capnp::rpc::Message::Which;

/// The service as KJ serves it. Its settle waits until it is let go.
class Slow final : public Service::Server {
 public:
  explicit Slow(std::vector<std::string>& log) : log_(log) {}
  kj::Promise<void> check(CheckContext context) override {
    auto requests = context.getParams().getRequests();
    std::string domain = requests.size() > 0 ? requests[0].getDomain().cStr() : "none";
    log_.push_back("kj check " + domain);
    context.getResults().initResults(requests.size());
    return kj::READY_NOW;
  }
  kj::Promise<void> status(StatusContext context) override {
    log_.push_back("kj status");
    context.getResults().setJson("{}");
    return kj::READY_NOW;
  }
  kj::Promise<void> settle(SettleContext) override {
    log_.push_back("kj settle");
    auto paf = kj::newPromiseAndFulfiller<void>();
    settling = kj::mv(paf.fulfiller);
    return kj::mv(paf.promise);
  }
  kj::Own<kj::PromiseFulfiller<void>> settling;

 private:
  std::vector<std::string>& log_;
};

/// Answers with as many results as a call has requests, at once or when told to.
class Direct final : public DirectHandler {
 public:
  explicit Direct(std::vector<std::string>& log) : log_(log) {}
  void call(std::uint32_t id, capnp::AnyPointer::Reader parameters) override {
    auto requests = parameters.getAs<Service::CheckParams>().getRequests();
    auto domain = requests.size() > 0 ? requests[0].getDomain() : capnp::Text::Reader("");
    domains_.emplace_back(domain.begin(), domain.size());
    calls.push_back({id, requests.size()});
  }
  void calls_end() override {
    // The text has stayed, though its readers have gone.
    for (std::string_view domain : domains_) log_.push_back("check " + std::string(domain));
    if (!domains_.empty()) log_.push_back("end");
    domains_.clear();
    if (at_once) answer_all();
  }
  void answer_all() {
    for (const Call& one : calls) {
      if (fails) {
        serving->fail(one.id, KJ_EXCEPTION(OVERLOADED, "a test"));
        continue;
      }
      serving->answer<Service::CheckResults>(one.id, [&](Service::CheckResults::Builder results) {
        for (auto result : results.initResults(one.requests)) {
          result.setAllowed(true);
          if (answer_text > 0) result.setError(std::string(answer_text, 'x').c_str());
        }
      });
    }
    calls.clear();
  }
  struct Call {
    std::uint32_t id;
    std::uint32_t requests;
  };
  DirectCalls* serving = nullptr;
  std::vector<Call> calls;
  bool at_once = true;
  bool fails = false;
  std::size_t answer_text = 0;

 private:
  std::vector<std::string>& log_;
  std::vector<std::string_view> domains_;
};

class DirectCallsTest : public ::testing::Test {
 protected:
  DirectCallsTest() : handler_(log_) {
    int fds[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds), 0);
    peer_ = kj::heap<UvStream>(loop_, kj::AutoCloseFd(fds[0]));
    auto slow = kj::heap<Slow>(log_);
    slow_ = slow.get();
    server_ = kj::heap<Connection>(loop_, kj::heap<UvStream>(loop_, kj::AutoCloseFd(fds[1])),
                                   kj::mv(slow), ConnectionLimits{},
                                   std::make_shared<ReadBudget>(8u << 20));
    handler_.serving = &server_->serve_directly(DirectMethod::of<Service>(0), handler_);
  }
  ~DirectCallsTest() noexcept override {}

  /// The other side as a stock client.
  Service::Client client() {
    client_ = kj::heap<Connection>(loop_, kj::mv(peer_), ConnectionLimits{});
    return client_->bootstrap().castAs<Service>();
  }
  auto check(Service::Client& service, const char* domain) {
    auto request = service.checkRequest();
    request.initRequests(1)[0].setDomain(domain);
    return request.send();
  }

  /// The other side by hand.
  template <typename Fill>
  void send(Fill&& fill) {
    capnp::MallocMessageBuilder message(1u << 15);
    fill(message.initRoot<capnp::rpc::Message>());
    auto words = capnp::messageToFlatArray(message);
    auto bytes = words.asBytes();
    peer_->write(bytes.begin(), bytes.size()).wait(loop_.wait_scope());
  }
  void send_bootstrap(std::uint32_t id = 0) {
    send([&](auto message) { message.initBootstrap().setQuestionId(id); });
  }
  void send_check(std::uint32_t id, const char* domain, std::uint32_t requests = 1,
                  std::optional<std::uint32_t> imported = {}) {
    send([&](auto message) {
      auto call = message.initCall();
      call.setQuestionId(id);
      call.setInterfaceId(capnp::typeId<Service>());
      auto target = call.initTarget();
      if (imported) {
        target.setImportedCap(*imported);
      } else {
        target.initPromisedAnswer().setQuestionId(0);
      }
      auto all =
          call.initParams().getContent().template initAs<Service::CheckParams>().initRequests(
              requests);
      if (requests > 0) all[0].setDomain(domain);
    });
  }
  void send_finish(std::uint32_t id) {
    send([&](auto message) { message.initFinish().setQuestionId(id); });
  }
  kj::Own<capnp::MessageReader> receive() {
    return capnp::readMessage(*peer_).wait(loop_.wait_scope());
  }
  bool ended() {
    bool over = false;
    server_->closed().then([&] { over = true; }).wait(loop_.wait_scope());
    return over;
  }

  EventLoop loop_;
  std::vector<std::string> log_;
  Direct handler_;
  Slow* slow_ = nullptr;
  kj::Own<UvStream> peer_;
  kj::Own<Connection> server_;
  kj::Own<Connection> client_;
};

using Log = std::vector<std::string>;

TEST_F(DirectCallsTest, AStockClientsCallsAreServedAndTheOthersAreKJs) {
  auto service = client();
  // The first before it knows what the bootstrap capability is called, the second after that.
  for (int i = 0; i < 2; ++i) {
    auto response = check(service, "api").wait(loop_.wait_scope());
    ASSERT_EQ(response.getResults().size(), 1u);
    EXPECT_TRUE(response.getResults()[0].getAllowed());
    EXPECT_EQ(service.statusRequest().send().wait(loop_.wait_scope()).getJson(), "{}");
  }
  EXPECT_EQ(log_, (Log{"check api", "end", "kj status", "check api", "end", "kj status"}));
  EXPECT_EQ(handler_.serving->waiting(), 0u);
}

TEST_F(DirectCallsTest, CallsThatArriveTogetherAreSeenTogether) {
  auto service = client();
  service.whenResolved().wait(loop_.wait_scope());
  auto a = check(service, "a");
  auto b = check(service, "b");
  auto c = check(service, "c");
  a.wait(loop_.wait_scope());
  b.wait(loop_.wait_scope());
  c.wait(loop_.wait_scope());
  EXPECT_EQ(log_, (Log{"check a", "check b", "check c", "end"}));
}

TEST_F(DirectCallsTest, CallsBeginInTheirOrderWhoeverServesThem) {
  auto service = client();
  service.whenResolved().wait(loop_.wait_scope());
  auto before = check(service, "before");
  auto settle = service.settleRequest().send();
  auto behind = check(service, "behind");
  before.wait(loop_.wait_scope());
  behind.wait(loop_.wait_scope());
  EXPECT_EQ(log_, (Log{"check before", "end", "kj settle", "kj check behind"}));
  slow_->settling->fulfill();
  settle.wait(loop_.wait_scope());
  check(service, "later").wait(loop_.wait_scope());
  EXPECT_EQ(log_.back(), "end");
}

TEST_F(DirectCallsTest, AnswersMayComeLateAndToNobody) {
  handler_.at_once = false;
  auto service = client();
  auto kept = check(service, "kept");
  {
    auto dropped = check(service, "dropped");
    test::turn(loop_, 5);
    EXPECT_EQ(handler_.serving->waiting(), 2u);
  }
  test::turn(loop_, 5);
  EXPECT_EQ(handler_.serving->waiting(), 2u) << "an answer is owed to a call that is finished, too";
  handler_.answer_all();
  EXPECT_EQ(kept.wait(loop_.wait_scope()).getResults().size(), 1u);
  EXPECT_EQ(handler_.serving->waiting(), 0u);
  handler_.at_once = true;
  for (int i = 0; i < 3; ++i) check(service, "again").wait(loop_.wait_scope());
}

TEST_F(DirectCallsTest, FailuresArriveWithTheirType) {
  handler_.fails = true;
  auto service = client();
  auto type = kj::Exception::Type::FAILED;
  std::string why;
  check(service, "api")
      .then([](auto&&) {},
            [&](kj::Exception&& e) {
              type = e.getType();
              why = reason(e);
            })
      .wait(loop_.wait_scope());
  EXPECT_EQ(type, kj::Exception::Type::OVERLOADED);
  EXPECT_EQ(why, "a test");
}

TEST_F(DirectCallsTest, CallsAndAnswersOfAnySize) {
  auto service = client();
  for (std::uint32_t requests : {0u, 1u, 200u, 20'000u}) {
    handler_.answer_text = requests > 1000 ? 0 : 100;
    auto request = service.checkRequest();
    auto all = request.initRequests(requests);
    for (auto one : all) one.setDomain("api");
    auto response = request.send().wait(loop_.wait_scope());
    EXPECT_EQ(response.getResults().size(), requests);
  }
  EXPECT_EQ(log_.size(), 8u);
  EXPECT_EQ(log_[0], "check ");
}

TEST_F(DirectCallsTest, ManyThousandCallsLeaveNothingBehind) {
  auto service = client();
  for (int round = 0; round < 40; ++round) {
    auto builder = kj::heapArrayBuilder<kj::Promise<void>>(250);
    for (int i = 0; i < 250; ++i) builder.add(check(service, "api").ignoreResult());
    kj::joinPromises(builder.finish()).wait(loop_.wait_scope());
  }
  EXPECT_EQ(std::count(log_.begin(), log_.end(), "check api"), 10'000)
      << "more than FramingLimits::open_calls in all, never that many at once";
}

TEST_F(DirectCallsTest, ACallsIdIsFreeOnlyOnceItIsFinished) {
  send_bootstrap();
  send_check(1, "first");
  test::turn(loop_, 5);
  EXPECT_EQ(log_, (Log{"check first", "end"}));
  send_finish(1);
  send_check(1, "second");
  test::turn(loop_, 5);
  EXPECT_EQ(log_.size(), 4u);
  send_check(1, "third");
  EXPECT_TRUE(ended());
  EXPECT_EQ(log_.size(), 4u);
}

TEST_F(DirectCallsTest, AFinishTooManyEndsTheConnection) {
  handler_.at_once = false;
  send_bootstrap();
  send_check(1, "api");
  send_finish(1);
  send_finish(1);
  EXPECT_TRUE(ended());
}

TEST_F(DirectCallsTest, OtherTargetsAndNumbersAreKJs) {
  send_bootstrap();
  auto bootstrap = receive();
  auto answer = bootstrap->getRoot<capnp::rpc::Message>().getReturn();
  std::uint32_t exported = answer.getResults().getCapTable()[0].getSenderHosted();
  send_check(1, "imported", 1, exported);
  send_check(100'000, "high", 1, exported);
  test::turn(loop_, 5);
  EXPECT_EQ(log_, (Log{"check imported", "end", "kj check high"}));
  send_finish(0);  // nobody's answer any more
  send_check(2, "promised");
  EXPECT_TRUE(ended());
  EXPECT_EQ(log_.size(), 3u);
}

TEST_F(DirectCallsTest, WhoDoesNotReadIsNotRead) {
  handler_.answer_text = 2000;
  send_bootstrap();
  std::uint32_t sent = 0;
  for (; sent < 4000 && peer_->buffered() < 10'000; ++sent) {
    send_check(sent % 2000 + 1, "api");
    send_finish(sent % 2000 + 1);
    test::turn(loop_, 0);
  }
  EXPECT_LT(sent, 4000u) << "it goes on reading";
  EXPECT_LE(server_->stream().buffered(), UvStream::kWriteHigh + 64 * 3000);
  EXPECT_TRUE(server_->framing().stalled_since() != nullptr);
  std::size_t answers = 0;
  while (answers < sent) answers += receive()->getRoot<capnp::rpc::Message>().isReturn();
  EXPECT_EQ(std::count(log_.begin(), log_.end(), "check api"), sent);
}

}  // namespace
}  // namespace weir::rpc
