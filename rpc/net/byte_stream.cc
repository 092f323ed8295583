#include <weir/rpc/net/byte_stream.h>

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>
#include <uv.h>

#include <cerrno>
#include <utility>

namespace weir::rpc {
namespace {

// What a spare buffer has at first, what it may have grown to, and how many are kept.
constexpr std::size_t kBuffer = 16u << 10;
constexpr std::size_t kLargestSpare = 64u << 10;
constexpr std::size_t kSpares = 64;

class TcpStream final : public ByteStream, private Deferred {
 public:
  TcpStream(StreamLoop& loop, int fd, uv_poll_t* poll)
      : loop_(loop), poll_(poll), fd_(fd), last_activity_(loop.now()) {
    poll_->data = this;
  }
  ~TcpStream() override;

  void start(User& user) override {
    user_ = &user;
    arm(UV_READABLE);
  }
  Output& out() override {
    if (out_.capacity() == 0) out_ = loop_.take_buffer();
    // During a read the output goes out at its end; while some waits, when the socket takes it.
    if (!reading_ && (armed_ & UV_WRITABLE) == 0) loop_.defer(*this);
    return out_;
  }
  void flush() override {
    if ((armed_ & UV_WRITABLE) == 0) send_out();
  }
  std::size_t waiting() const override { return out_.size() - sent_; }
  void pause() override { paused_ = true; }
  void resume() override {
    paused_ = false;
    if (!ended_ && user_ != nullptr) arm(armed_ | UV_READABLE);
  }
  void end() override {
    end_wanted_ = true;
    flush();
  }
  bool unread() const override {
    int waiting = 0;
    return ::ioctl(fd_, FIONREAD, &waiting) == 0 && waiting > 0;
  }
  std::uint64_t last_activity() const override { return last_activity_; }

 private:
  void run_deferred() noexcept override;
  void on_poll(int status, int events) noexcept;
  void read_some();
  void send_out();
  void arm(int events);
  void fail(int error);

  StreamLoop& loop_;
  uv_poll_t* poll_;  // freed by libuv's close callback, after this object
  User* user_ = nullptr;
  bool* gone_ = nullptr;  // set while a callback runs: tells it that the stream was destroyed
  Output out_;
  std::size_t sent_ = 0;  // bytes of out_ that went out
  int fd_;
  int armed_ = 0;
  int error_ = 0;
  bool reading_ = false;  // on_data runs
  bool paused_ = false;
  bool ended_ = false;  // the other side sends no more, or the connection failed
  bool told_ = false;   // on_end was called
  bool end_wanted_ = false;
  std::uint64_t last_activity_;
};

TcpStream::~TcpStream() {
  if (gone_ != nullptr) *gone_ = true;
  if (out_.capacity() != 0) {
    if ((armed_ & UV_WRITABLE) == 0) send_out();  // a last try for what is there to be said
    if (out_.capacity() != 0) loop_.give_buffer(std::move(out_));
  }
  loop_.forget(*this);  // last: a failure defers
  uv_close(reinterpret_cast<uv_handle_t*>(poll_),
           [](uv_handle_t* handle) { delete reinterpret_cast<uv_poll_t*>(handle); });
  ::close(fd_);
}

void TcpStream::arm(int events) {
  if (events == armed_ || error_ != 0) return;
  armed_ = events;
  const int failed = events == 0
                         ? uv_poll_stop(poll_)
                         : uv_poll_start(poll_, events, [](uv_poll_t* poll, int status, int got) {
                             static_cast<TcpStream*>(poll->data)->on_poll(status, got);
                           });
  if (failed < 0) fail(-failed);
}

// Told to the user at the end of the turn: this may run within one of his calls.
void TcpStream::fail(int error) {
  if (error_ != 0) return;
  error_ = error;
  ended_ = true;
  out_.clear();
  sent_ = 0;
  armed_ = 0;
  uv_poll_stop(poll_);
  loop_.defer(*this);
}

void TcpStream::on_poll(int status, int events) noexcept {
  if (status < 0) return fail(ECONNRESET);  // libuv has stopped polling
  if ((events & UV_READABLE) != 0) {
    bool gone = false;
    gone_ = &gone;
    read_some();
    if (gone) return;
    gone_ = nullptr;
  }
  if ((events & UV_WRITABLE) != 0 && error_ == 0) {
    send_out();
    if (waiting() == 0 && error_ == 0) user_->on_sent();
  }
}

void TcpStream::read_some() {
  // Reading is switched off only when more arrives meanwhile: most often nothing does.
  if (paused_ || ended_) return arm(armed_ & ~UV_READABLE);
  bool& gone = *gone_;
  const std::span<char> buffer = loop_.read_buffer();
  const ssize_t count = ::recv(fd_, buffer.data(), buffer.size(), 0);
  if (count < 0) {
    if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) fail(errno);
    return;
  }
  if (count == 0) {
    ended_ = told_ = true;
    arm(armed_ & ~UV_READABLE);
    return user_->on_end(0);
  }
  last_activity_ = loop_.now();
  reading_ = true;
  user_->on_data(buffer.first(static_cast<std::size_t>(count)));
  if (gone) return;
  reading_ = false;
  if (out_.capacity() != 0) flush();
}

void TcpStream::send_out() {
  if (error_ != 0) return out_.clear();
  while (waiting() > 0) {
    const ssize_t count = ::send(fd_, out_.data() + sent_, waiting(), MSG_NOSIGNAL);
    if (count >= 0) {
      sent_ += static_cast<std::size_t>(count);
      last_activity_ = loop_.now();
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      // A buffer that never runs empty must not keep what went out.
      if (sent_ * 2 >= out_.size()) {
        out_.drop_front(sent_);
        sent_ = 0;
      }
      return arm(armed_ | UV_WRITABLE);
    } else if (errno != EINTR) {
      return fail(errno);
    }
  }
  if (out_.capacity() != 0) {
    out_.clear();
    sent_ = 0;
    loop_.give_buffer(std::move(out_));
  }
  if (end_wanted_) ::shutdown(fd_, SHUT_WR);
  arm(armed_ & ~UV_WRITABLE);
}

void TcpStream::run_deferred() noexcept {
  if (error_ == 0) flush();
  if (error_ != 0 && !told_) {
    told_ = true;
    user_->on_end(error_);
  }
}

}  // namespace

// libuv closes handles in a later turn of the loop: they outlive the StreamLoop.
struct StreamLoop::Handle {
  uv_idle_t idle{};
};

StreamLoop::StreamLoop(uv_loop_t* loop)
    : loop_(loop), handle_(new Handle), read_(new char[kReadBuffer]) {
  handle_->idle.data = this;
  uv_idle_init(loop, &handle_->idle);
}

StreamLoop::~StreamLoop() {
  uv_idle_stop(&handle_->idle);
  handle_->idle.data = handle_;
  uv_close(reinterpret_cast<uv_handle_t*>(&handle_->idle),
           [](uv_handle_t* handle) { delete static_cast<Handle*>(handle->data); });
}

std::uint64_t StreamLoop::now() const {
  return uv_now(loop_);
}

// An idle handle keeps libuv from sleeping, and runs first in the next turn: so output is not held
// back, wherever in a turn it was written.
void StreamLoop::defer(Deferred& deferred) {
  if (deferred.queued_at_ != Deferred::kNotQueued) return;
  deferred.queued_at_ = deferred_.size();
  deferred_.push_back(&deferred);
  if (deferred_.size() == 1) {
    uv_idle_start(&handle_->idle,
                  [](uv_idle_t* idle) { static_cast<StreamLoop*>(idle->data)->run_deferred(); });
  }
}

void StreamLoop::forget(Deferred& deferred) {
  const std::size_t at = std::exchange(deferred.queued_at_, Deferred::kNotQueued);
  if (at == Deferred::kNotQueued) return;
  // It stands in the list that is waiting, or in the one that is being run.
  if (at < deferred_.size() && deferred_[at] == &deferred) deferred_[at] = nullptr;
  if (at < running_.size() && running_[at] == &deferred) running_[at] = nullptr;
}

void StreamLoop::run_deferred() {
  // What is deferred meanwhile runs in the next turn.
  running_.swap(deferred_);
  uv_idle_stop(&handle_->idle);
  for (std::size_t i = 0; i < running_.size(); ++i) {
    Deferred* deferred = running_[i];
    if (deferred == nullptr) continue;
    deferred->queued_at_ = Deferred::kNotQueued;
    deferred->run_deferred();
  }
  running_.clear();
}

Output StreamLoop::take_buffer() {
  Output buffer;
  if (spare_.empty()) {
    buffer.reserve(kBuffer);
  } else {
    buffer = std::move(spare_.back());
    spare_.pop_back();
  }
  return buffer;
}

void StreamLoop::give_buffer(Output buffer) {
  if (buffer.capacity() > kLargestSpare || spare_.size() >= kSpares) return;
  buffer.clear();
  spare_.push_back(std::move(buffer));
}

std::unique_ptr<ByteStream> make_tcp_stream(StreamLoop& loop, int fd) {
  auto poll = std::make_unique<uv_poll_t>();
  if (uv_poll_init(loop.uv(), poll.get(), fd) != 0) {
    ::close(fd);
    return nullptr;
  }
  const int one = 1;  // fails harmlessly on sockets that are not TCP
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  return std::make_unique<TcpStream>(loop, fd, poll.release());
}

}  // namespace weir::rpc
