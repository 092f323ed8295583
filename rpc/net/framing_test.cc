#include <weir/rpc/net/framing.h>

#include <capnp/message.h>
#include <capnp/rpc.capnp.h>
#include <capnp/serialize.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <optional>

#include <weir/rpc/net/test_util.h>
#include <weir/rpc/net/uv_stream.h>

namespace weir::rpc {
namespace {

using Bytes = std::vector<unsigned char>;

void put(Bytes& out, std::uint32_t value) {
  for (int i = 0; i < 4; ++i) out.push_back(static_cast<unsigned char>(value >> (8 * i)));
}

/// An rpc::Message of the given kind in standard framing; `padding` bytes of text make it larger.
Bytes message(capnp::rpc::Message::Which kind, std::size_t padding = 0, unsigned segment = 1024) {
  capnp::MallocMessageBuilder builder(segment, capnp::AllocationStrategy::FIXED_SIZE);
  auto root = builder.initRoot<capnp::rpc::Message>();
  if (kind == capnp::rpc::Message::CALL) root.initCall().setQuestionId(1);
  if (kind == capnp::rpc::Message::FINISH) root.initFinish().setQuestionId(1);
  if (kind == capnp::rpc::Message::ABORT) {
    root.initAbort().setReason(std::string(padding, 'x').c_str());
  }
  auto flat = capnp::messageToFlatArray(builder);
  auto bytes = flat.asBytes();
  return {bytes.begin(), bytes.end()};
}

class FramingTest : public ::testing::Test {
 protected:
  FramingTest() {
    int fds[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds), 0);
    peer_ = kj::heap<UvStream>(loop_, kj::AutoCloseFd(fds[0]));
    stream_ = kj::heap<UvStream>(loop_, kj::AutoCloseFd(fds[1]));
    budget_ = std::make_shared<ReadBudget>(1u << 20);
  }
  ~FramingTest() noexcept override {}
  void open(FramingLimits limits = {}) {
    framed_ = kj::heap<FramedStream>(*stream_, loop_.timer(), limits, budget_);
  }
  void send(const Bytes& bytes) {
    sent_.push_back(bytes);
    writes_ = writes_
                  .then([this, i = sent_.size() - 1] {
                    return peer_->write(sent_[i].data(), sent_[i].size());
                  })
                  .eagerlyEvaluate(nullptr);
  }
  using Read = kj::Maybe<kj::Own<capnp::MessageReader>>;
  kj::Promise<Read> read() { return static_cast<capnp::MessageStream&>(*framed_).tryReadMessage(); }
  /// What reading fails with; empty if it does not.
  std::string read_error() {
    std::string out;
    read()
        .then([](Read&&) {}, [&](kj::Exception&& e) { out = e.getDescription().cStr(); })
        .wait(loop_.wait_scope());
    return out;
  }

  EventLoop loop_;
  kj::Own<UvStream> peer_;
  kj::Own<UvStream> stream_;
  std::shared_ptr<ReadBudget> budget_;
  kj::Own<FramedStream> framed_;
  std::vector<Bytes> sent_;
  kj::Promise<void> writes_ = kj::READY_NOW;
};

TEST_F(FramingTest, ReadsMessagesOfAnySegmentCountAndTheEnd) {
  open();
  for (unsigned segment : {1u, 8u, 4096u}) {
    send(message(capnp::rpc::Message::ABORT, 5000, segment));
    auto got = read().wait(loop_.wait_scope());
    auto& reader = *KJ_ASSERT_NONNULL(got);
    EXPECT_EQ(reader.getRoot<capnp::rpc::Message>().getAbort().getReason().size(), 5000u);
  }
  EXPECT_EQ(framed_->messages_read(), 3u);
  peer_->shutdownWrite();
  auto ended = framed_->on_read_end();
  EXPECT_TRUE(read().wait(loop_.wait_scope()) == nullptr);
  ended.wait(loop_.wait_scope());
}

TEST_F(FramingTest, WritesWhatTheStandardReaderReads) {
  open();
  capnp::MallocMessageBuilder builder(4, capnp::AllocationStrategy::FIXED_SIZE);
  builder.initRoot<capnp::rpc::Message>().initAbort().setReason("because");
  static_cast<capnp::MessageStream&>(*framed_).writeMessage(builder).wait(loop_.wait_scope());
  auto got = capnp::readMessage(*peer_).wait(loop_.wait_scope());
  EXPECT_EQ(got->getRoot<capnp::rpc::Message>().getAbort().getReason(), "because");
}

TEST_F(FramingTest, SegmentCountThatWrapsIsRefused) {
  open();
  Bytes hostile;
  put(hostile, 0xffffffff);
  put(hostile, 1);
  send(hostile);
  EXPECT_NE(read_error().find("too many segments"), std::string::npos);
}

TEST_F(FramingTest, SegmentCountIsBounded) {
  FramingLimits limits;
  open(limits);
  Bytes hostile;
  put(hostile, limits.segments);  // one more than allowed
  put(hostile, 0);
  send(hostile);
  EXPECT_NE(read_error().find("too many segments"), std::string::npos);
}

TEST_F(FramingTest, TotalSizeIsBoundedBeforeMemoryIsTaken) {
  Bytes one;
  put(one, 0);
  put(one, 0xffffffff);
  Bytes wrapping;  // two segments whose sum does not fit 32 bits
  put(wrapping, 1);
  put(wrapping, 0xffffffff);
  put(wrapping, 0xffffffff);
  put(wrapping, 0);
  for (const Bytes& hostile : {one, wrapping}) {
    open();
    send(hostile);
    EXPECT_NE(read_error().find("too large"), std::string::npos);
    EXPECT_EQ(budget_->used(), 0u);
  }
}

TEST_F(FramingTest, AHeaderAloneCostsLittle) {
  budget_ = std::make_shared<ReadBudget>(64u << 20);
  open();
  Bytes header;
  put(header, 0);
  put(header, 1u << 20);  // 8 MiB announced, none sent
  send(header);
  auto reading = read();
  test::turn(loop_, 5);
  EXPECT_FALSE(reading.poll(loop_.wait_scope()));
  EXPECT_LE(budget_->used(), 64u << 10);
  EXPECT_FALSE(framed_->stalled_since() == nullptr);
}

TEST_F(FramingTest, LargeMessagesArriveInPieces) {
  budget_ = std::make_shared<ReadBudget>(64u << 20);
  open();
  send(message(capnp::rpc::Message::ABORT, 3'000'000, 500'000));
  {
    auto got = read().wait(loop_.wait_scope());
    EXPECT_EQ(KJ_ASSERT_NONNULL(got)->getRoot<capnp::rpc::Message>().getAbort().getReason().size(),
              3'000'000u);
    EXPECT_GT(budget_->used(), 3'000'000u);
  }
  EXPECT_EQ(budget_->used(), 0u);
  EXPECT_TRUE(framed_->stalled_since() == nullptr);
}

TEST_F(FramingTest, TheBudgetIsShared) {
  open();
  send(message(capnp::rpc::Message::ABORT, 3'000'000, 500'000));  // the budget is 1 MiB
  EXPECT_NE(read_error().find("too much is being read"), std::string::npos);
  EXPECT_EQ(budget_->used(), 0u);
}

TEST_F(FramingTest, EndInsideAMessageIsAnError) {
  auto whole = message(capnp::rpc::Message::ABORT, 100);
  for (std::size_t cut : {std::size_t{3}, std::size_t{8}, whole.size() - 1}) {
    int fds[2];
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds), 0);
    framed_ = nullptr;
    peer_ = kj::heap<UvStream>(loop_, kj::AutoCloseFd(fds[0]));
    stream_ = kj::heap<UvStream>(loop_, kj::AutoCloseFd(fds[1]));
    open();
    peer_->write(whole.data(), cut).wait(loop_.wait_scope());
    peer_->shutdownWrite();
    EXPECT_NE(read_error().find("ended inside a message"), std::string::npos) << cut;
  }
}

TEST_F(FramingTest, UnfinishedCallsAreBounded) {
  FramingLimits limits;
  limits.open_calls = 3;
  open(limits);
  for (int i = 0; i < 20; ++i) {  // finished calls do not count
    send(message(capnp::rpc::Message::CALL));
    send(message(capnp::rpc::Message::FINISH));
    EXPECT_EQ(read_error(), "");
    EXPECT_EQ(read_error(), "");
  }
  for (int i = 0; i < 3; ++i) {
    send(message(capnp::rpc::Message::CALL));
    EXPECT_EQ(read_error(), "");
  }
  send(message(capnp::rpc::Message::CALL));
  EXPECT_NE(read_error().find("too many unfinished calls"), std::string::npos);
}

TEST_F(FramingTest, ReadingWaitsWhileAnswersPileUp) {
  FramingLimits limits;
  limits.queued_bytes = 1000;
  open(limits);
  std::size_t queued = 2000;
  framed_->set_queue_size([&] { return queued; });
  send(message(capnp::rpc::Message::CALL));
  auto reading = read().eagerlyEvaluate(nullptr);
  test::turn(loop_, 5);
  EXPECT_FALSE(reading.poll(loop_.wait_scope()));
  EXPECT_FALSE(framed_->stalled_since() == nullptr);

  queued = 500;
  capnp::MallocMessageBuilder builder;
  builder.initRoot<capnp::rpc::Message>().initAbort().setReason("out");
  static_cast<capnp::MessageStream&>(*framed_).writeMessage(builder).wait(loop_.wait_scope());
  EXPECT_TRUE(reading.wait(loop_.wait_scope()) != nullptr);
  EXPECT_TRUE(framed_->stalled_since() == nullptr);
}

}  // namespace
}  // namespace weir::rpc
