#include <weir/rpc/net/byte_stream.h>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>
#include <uv.h>

#include <chrono>
#include <functional>
#include <iterator>
#include <string>

#include <weir/rpc/net/output.h>

namespace weir::rpc {
namespace {

// Long enough for the slowest machine: reached only if a test fails.
constexpr auto kPatience = std::chrono::seconds(20);

TEST(Output, GrowsAndShrinks) {
  Output out;
  EXPECT_TRUE(out.empty());
  out.append({});
  out.append("abc");
  out.push_back('d');
  out.append_decimal(18446744073709551615u);
  EXPECT_EQ(out.view(), "abcd18446744073709551615");
  out.drop_front(4);
  out.truncate(3);
  EXPECT_EQ(out.view(), "184");
  for (int i = 0; i < 10'000; ++i) out.append("0123456789");
  EXPECT_EQ(out.size(), 100'003u);
  EXPECT_TRUE(out.view().ends_with("89"));
  Output moved = std::move(out);
  EXPECT_EQ(moved.size(), 100'003u);
  moved = Output();
  EXPECT_EQ(moved.capacity(), 0u);
  const std::string text = "x";
  std::copy(text.begin(), text.end(), std::back_inserter(moved));
  EXPECT_EQ(moved.view(), "x");
}

class ByteStreamTest : public testing::Test, public ByteStream::User {
 protected:
  ByteStreamTest() {
    uv_loop_init(&loop_);
    streams_ = std::make_unique<StreamLoop>(&loop_);
    int ends[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends), 0);
    far_ = ends[0];
    stream_ = make_tcp_stream(*streams_, ends[1]);
  }
  ~ByteStreamTest() override {
    stream_.reset();
    streams_.reset();
    while (uv_run(&loop_, UV_RUN_NOWAIT) != 0) continue;
    EXPECT_EQ(uv_loop_close(&loop_), 0);
    if (far_ >= 0) ::close(far_);
  }

  void on_data(std::span<char> bytes) override {
    got_.append(bytes.data(), bytes.size());
    if (on_data_) on_data_();
  }
  void on_end(int error) override {
    ++ends_;
    error_ = error;
  }
  void on_sent() override { ++sent_; }

  void wait(const std::function<bool()>& condition) {
    const auto until = std::chrono::steady_clock::now() + kPatience;
    while (!condition()) {
      ASSERT_LT(std::chrono::steady_clock::now(), until) << "waited in vain";
      uv_run(&loop_, UV_RUN_NOWAIT);
    }
  }
  void turns(int count) {
    for (int i = 0; i < count; ++i) uv_run(&loop_, UV_RUN_NOWAIT);
  }
  void say(std::string_view text) {
    EXPECT_EQ(::send(far_, text.data(), text.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(text.size()));
  }
  // What is there to be read at the far end; "(end)" if that is all that will come.
  std::string hear() {
    std::string out;
    char buffer[1 << 16];
    for (;;) {
      const ssize_t count = ::recv(far_, buffer, sizeof buffer, 0);
      if (count == 0) return out + "(end)";
      if (count < 0) return out;
      out.append(buffer, static_cast<std::size_t>(count));
    }
  }

  uv_loop_t loop_{};
  std::unique_ptr<StreamLoop> streams_;
  int far_ = -1;
  std::unique_ptr<ByteStream> stream_;
  std::string got_;
  std::function<void()> on_data_;
  int ends_ = 0, error_ = -1, sent_ = 0;
};

TEST_F(ByteStreamTest, AnswersAtTheEndOfARead) {
  on_data_ = [this] {
    stream_->out().append("a");
    EXPECT_EQ(hear(), "");
    stream_->out().append("b");
  };
  stream_->start(*this);
  say("hello");
  wait([&] { return !got_.empty(); });
  EXPECT_EQ(got_, "hello");
  EXPECT_EQ(hear(), "ab");
  EXPECT_EQ(stream_->waiting(), 0u);
}

TEST_F(ByteStreamTest, WritesOutsideOfAReadGoOutBeforeTheLoopSleeps) {
  stream_->start(*this);
  stream_->out().append("late");
  EXPECT_EQ(stream_->waiting(), 4u);
  uv_run(&loop_, UV_RUN_ONCE);
  EXPECT_EQ(hear(), "late");
  // Also if that is written right before it would.
  uv_prepare_t prepare;
  uv_prepare_init(&loop_, &prepare);
  prepare.data = stream_.get();
  uv_prepare_start(&prepare, [](uv_prepare_t* handle) {
    static_cast<ByteStream*>(handle->data)->out().append("x");
    uv_close(reinterpret_cast<uv_handle_t*>(handle), nullptr);
  });
  uv_run(&loop_, UV_RUN_ONCE);
  uv_run(&loop_, UV_RUN_ONCE);
  EXPECT_EQ(hear(), "x");
  stream_->out().append("now");
  stream_->flush();
  EXPECT_EQ(hear(), "now");
}

TEST_F(ByteStreamTest, WaitsForASlowReader) {
  stream_->start(*this);
  const std::string much(4u << 20, 'x');
  stream_->out().append(much);
  stream_->flush();
  EXPECT_GT(stream_->waiting(), 0u);
  stream_->out().append("tail");
  std::string heard;
  wait([&] {
    heard += hear();
    return sent_ > 0;
  });
  heard += hear();
  EXPECT_EQ(heard.size(), much.size() + 4);
  EXPECT_TRUE(heard.ends_with("xtail"));
  EXPECT_EQ(sent_, 1);
  EXPECT_EQ(stream_->waiting(), 0u);
}

TEST_F(ByteStreamTest, Pauses) {
  stream_->start(*this);
  stream_->pause();
  say("a");
  turns(5);
  EXPECT_EQ(got_, "");
  say("b");
  stream_->resume();
  wait([&] { return got_ == "ab"; });
}

TEST_F(ByteStreamTest, PausesFromWithinARead) {
  on_data_ = [this] { stream_->pause(); };
  stream_->start(*this);
  say("a");
  wait([&] { return got_ == "a"; });
  say("b");
  turns(5);
  EXPECT_EQ(got_, "a");
  stream_->resume();
  wait([&] { return got_ == "ab"; });
}

TEST_F(ByteStreamTest, EndsByHalves) {
  stream_->start(*this);
  stream_->out().append("bye");
  stream_->end();
  EXPECT_EQ(hear(), "bye(end)");
  say("still here");
  wait([&] { return got_ == "still here"; });
  ::shutdown(far_, SHUT_WR);
  wait([&] { return ends_ == 1; });
  EXPECT_EQ(error_, 0);
  turns(5);
  EXPECT_EQ(ends_, 1);
}

TEST_F(ByteStreamTest, TheEndComesAfterWhatWaits) {
  stream_->start(*this);
  stream_->out().append(std::string(4u << 20, 'x'));
  stream_->end();
  std::string heard;
  wait([&] {
    heard += hear();
    return heard.ends_with("(end)");
  });
  EXPECT_EQ(heard.size(), (4u << 20) + 5);
}

TEST_F(ByteStreamTest, FailuresAreToldOnceAndNotFromWithinACall) {
  stream_->start(*this);
  ::close(far_);
  far_ = -1;
  stream_->out().append("x");
  stream_->flush();
  EXPECT_EQ(ends_, 0);
  wait([&] { return ends_ == 1; });
  EXPECT_NE(error_, 0);
  stream_->out().append("x");
  stream_->flush();
  stream_->resume();
  stream_->end();
  EXPECT_EQ(stream_->waiting(), 0u);
  turns(5);
  EXPECT_EQ(ends_, 1);
}

TEST_F(ByteStreamTest, MayBeDestroyedFromWithinARead) {
  on_data_ = [this] {
    stream_->out().append("last words");
    stream_.reset();
  };
  stream_->start(*this);
  say("x");
  wait([&] { return stream_ == nullptr; });
  EXPECT_EQ(hear(), "last words(end)");
}

TEST_F(ByteStreamTest, KnowsWhenBytesLastMoved) {
  stream_->start(*this);
  const std::uint64_t begin = stream_->last_activity();
  wait([&] { return streams_->now() > begin + 5; });
  EXPECT_EQ(stream_->last_activity(), begin);
  say("x");
  wait([&] { return !got_.empty(); });
  EXPECT_GT(stream_->last_activity(), begin);
}

TEST_F(ByteStreamTest, BuffersAreUsedAgain) {
  Output first = streams_->take_buffer();
  first.append("x");
  const char* memory = first.data();
  streams_->give_buffer(std::move(first));
  Output again = streams_->take_buffer();
  EXPECT_EQ(again.data(), memory);
  EXPECT_TRUE(again.empty());
}

struct Counter final : Deferred {
  explicit Counter(StreamLoop& streams) : streams_(streams) {}
  ~Counter() { streams_.forget(*this); }
  void run_deferred() noexcept override {
    ++runs;
    if (then) then();
  }
  StreamLoop& streams_;
  std::function<void()> then;
  int runs = 0;
};

TEST_F(ByteStreamTest, DeferredWorkRunsOnce) {
  Counter a(*streams_);
  Counter b(*streams_);
  auto c = std::make_unique<Counter>(*streams_);
  a.then = [&] {
    c.reset();  // before its turn
    if (a.runs < 3) streams_->defer(a);
  };
  streams_->defer(a);
  streams_->defer(b);
  streams_->defer(b);
  streams_->defer(*c);
  streams_->forget(b);
  turns(10);
  EXPECT_EQ(a.runs, 3);
  EXPECT_EQ(b.runs, 0);
  streams_->defer(b);
  turns(2);
  EXPECT_EQ(b.runs, 1);
}

}  // namespace
}  // namespace weir::rpc
