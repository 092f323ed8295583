#include <weir/rpc/net/uv_stream.h>

#include <fcntl.h>
#include <kj/debug.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include <weir/rpc/net/tls_session.h>

namespace weir::rpc {
namespace {

/// A drained output buffer larger than this gives its memory back.
constexpr size_t kKeepCapacity = 1u << 20;

/// Where encrypted bytes are read into on their way into a session, by all streams of a thread.
kj::ArrayPtr<kj::byte> cipher_buffer() {
  thread_local auto buffer = kj::heapArray<kj::byte>(UvStream::kReadBuffer);
  return buffer;
}

}  // namespace

/// What stands between the socket and the buffers.
struct UvStream::Tls {
  std::unique_ptr<TlsSession> session;
  std::vector<kj::byte> plain;  // written, and not encrypted yet
  Output sealed;                // encrypted, on its way to out_
};

kj::Exception system_error(const char* call, int error) {
  auto type = kj::Exception::Type::FAILED;
  switch (error) {
    case ECONNREFUSED:
    case ECONNRESET:
    case ECONNABORTED:
    case EPIPE:
    case ETIMEDOUT:
    case EHOSTUNREACH:
    case ENETUNREACH:
    case ENETDOWN:
    case ENETRESET:
    case EHOSTDOWN:
    case ENOTCONN:
      type = kj::Exception::Type::DISCONNECTED;
      break;
    case EMFILE:
    case ENFILE:
    case ENOBUFS:
    case ENOMEM:
      type = kj::Exception::Type::OVERLOADED;
      break;
    default:
      break;
  }
  return kj::Exception(type, __FILE__, __LINE__, kj::str(call, ": ", std::strerror(error)));
}

UvStream::UvStream(EventLoop& loop, kj::AutoCloseFd fd)
    : loop_(loop), fd_(kj::mv(fd)), poll_(new uv_poll_t{}), last_received_(loop.timer().now()) {
  if (int code = uv_poll_init(loop.uv(), poll_, fd_.get()); code < 0) {
    delete poll_;
    kj::throwFatalException(KJ_EXCEPTION(FAILED, "uv_poll_init", uv_strerror(code)));
  }
  poll_->data = this;
  int one = 1;  // fails harmlessly on sockets that are not TCP
  ::setsockopt(fd_.get(), IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
}

UvStream::~UvStream() noexcept(false) {
  send_out();  // a last try for what a closing connection still had to say
  if (dirty_) loop_.forget(*this);
  uv_close(reinterpret_cast<uv_handle_t*>(poll_),
           [](uv_handle_t* h) { delete reinterpret_cast<uv_poll_t*>(h); });
}

kj::Promise<size_t> UvStream::tryRead(void* buffer, size_t min, size_t max) {
  return read_more(static_cast<kj::byte*>(buffer), min, max, 0);
}

bool UvStream::unread() const {
  int waiting = 0;
  return ::ioctl(fd_.get(), FIONREAD, &waiting) == 0 && waiting > 0;
}

/// How much came (0: the end), or a negative errno; -EAGAIN if the socket has to be waited for.
ssize_t UvStream::receive(kj::byte* to, size_t size) {
  return tls_ ? receive_tls(to, size) : receive_raw(to, size);
}

/// The same, by one recv(2).
ssize_t UvStream::receive_raw(kj::byte* to, size_t size) {
  if (std::exchange(emptied_, false) && !failed_) return -EAGAIN;
  ssize_t n = 0;
  do {
    n = ::recv(fd_.get(), to, size, 0);
  } while (n < 0 && errno == EINTR);
  if (n < 0) {
    if (errno != EAGAIN && errno != EWOULDBLOCK) return -errno;
    return failed_ ? -ECONNRESET : -EAGAIN;
  }
  if (n > 0) {
    read_any_ = true;
    last_received_ = loop_.timer().now();
  }
  // Polling tells when there is more, or the end, without a call that finds nothing.
  emptied_ = n > 0 && static_cast<size_t>(n) < size;
  return n;
}

ssize_t UvStream::receive_tls(kj::byte* to, size_t size) {
  TlsSession& session = *tls_->session;
  for (;;) {
    const bool was_secured = session.secured();
    const size_t got = session.read({reinterpret_cast<char*>(to), size}, tls_->sealed);
    take_sealed();
    after_append();
    const bool now_secured = !was_secured && session.secured();
    // What waited for this.
    if (now_secured && (armed_ & UV_WRITABLE) == 0) send_out();
    if (got > 0) return static_cast<ssize_t>(got);
    if (now_secured && size == 0) return 0;
    if (session.state() == TlsSession::State::ended) return 0;
    if (session.state() == TlsSession::State::failed) return -EPROTO;
    auto buffer = cipher_buffer();
    const ssize_t n = receive_raw(buffer.begin(), buffer.size());
    if (n == 0) return session.end() ? 0 : -ECONNRESET;
    if (n < 0) return n;
    session.receive({reinterpret_cast<const char*>(buffer.begin()), static_cast<size_t>(n)});
  }
}

kj::Exception UvStream::read_error(ssize_t result) const {
  std::string why = tls_failure();
  if (why.empty()) return system_error("recv", static_cast<int>(-result));
  return kj::Exception(kj::Exception::Type::DISCONNECTED, __FILE__, __LINE__, kj::str(why.c_str()));
}

void UvStream::start_tls(std::unique_ptr<TlsSession> session) {
  tls_ = std::make_unique<Tls>();
  tls_->session = std::move(session);
  tls_->session->start(tls_->sealed);
  take_sealed();
  after_append();
}

kj::Promise<void> UvStream::secured() {
  const ssize_t n = receive(nullptr, 0);
  if (n == -EAGAIN) return when_readable().then([this] { return secured(); });
  if (n < 0) return read_error(n);
  if (!tls_->session->secured()) return read_error(-ECONNRESET);
  return kj::READY_NOW;
}

const TlsSession* UvStream::tls() const {
  return tls_ ? tls_->session.get() : nullptr;
}

std::string UvStream::tls_failure() const {
  return tls_ && tls_->session->state() == TlsSession::State::failed ? tls_->session->why()
                                                                     : std::string();
}

std::size_t UvStream::unsealed() const {
  return tls_->plain.size();
}

/// Encrypts what was written, unless the handshake is yet to be done.
void UvStream::seal() {
  TlsSession& session = *tls_->session;
  if (session.can_write()) {
    session.write({reinterpret_cast<const char*>(tls_->plain.data()), tls_->plain.size()},
                  tls_->sealed);
  } else if (!session.secured() && session.state() != TlsSession::State::failed) {
    return;
  }
  tls_->plain.clear();
  if (tls_->plain.capacity() > kKeepCapacity) tls_->plain.shrink_to_fit();
  if (shutdown_wanted_) session.close(tls_->sealed);
  take_sealed();
}

void UvStream::take_sealed() {
  Output& sealed = tls_->sealed;
  if (sealed.empty()) return;
  const auto* bytes = reinterpret_cast<const kj::byte*>(sealed.data());
  if (write_error_ == 0) out_.insert(out_.end(), bytes, bytes + sealed.size());
  sealed.clear();
  if (sealed.capacity() > kReadBuffer) sealed = {};
}

kj::Promise<size_t> UvStream::read_more(kj::byte* to, size_t min, size_t max, size_t done) {
  for (;;) {
    if (size_t have = in_end_ - in_begin_; have > 0) {
      size_t n = std::min(have, max);
      std::memcpy(to, in_.begin() + in_begin_, n);
      in_begin_ += n;
      to += n;
      max -= n;
      done += n;
      min -= std::min(n, min);
    }
    if (min == 0) return done;

    bool direct = min >= kReadBuffer;
    if (!direct) make_room();
    ssize_t n = direct ? receive(to, max) : receive(in_.begin(), kReadBuffer);
    if (n == 0) return done;  // the end
    if (n == -EAGAIN) {
      return when_readable().then(
          [this, to, min, max, done] { return read_more(to, min, max, done); });
    }
    if (n < 0) return read_error(n);
    auto got = static_cast<size_t>(n);
    if (direct) {
      to += got;
      max -= got;
      done += got;
      min -= std::min(got, min);
    } else {
      in_end_ = got;
    }
  }
}

kj::ArrayPtr<const kj::byte> UvStream::input() {
  if (in_begin_ % 8 != 0) make_room();
  return kj::arrayPtr(in_.begin() + in_begin_, in_end_ - in_begin_);
}

/// What is left of the input moves to the buffer's front. False if it fills the buffer.
bool UvStream::make_room() {
  if (in_ == nullptr) in_ = kj::heapArray<kj::byte>(kReadBuffer);
  if (in_begin_ > 0) std::memmove(in_.begin(), in_.begin() + in_begin_, in_end_ - in_begin_);
  in_end_ -= in_begin_;
  in_begin_ = 0;
  return in_end_ < kReadBuffer;
}

kj::Promise<bool> UvStream::more_input() {
  KJ_REQUIRE(make_room(), "the input buffer is full");
  ssize_t n = receive(in_.begin() + in_end_, kReadBuffer - in_end_);
  if (n == -EAGAIN) return when_readable().then([this] { return more_input(); });
  if (n < 0) return read_error(n);
  in_end_ += static_cast<size_t>(n);
  return n > 0;
}

kj::Promise<void> UvStream::write(const void* buffer, size_t size) {
  auto piece = kj::arrayPtr(static_cast<const kj::byte*>(buffer), size);
  return write(kj::arrayPtr(&piece, 1));
}

kj::Promise<void> UvStream::write(kj::ArrayPtr<const kj::ArrayPtr<const kj::byte>> pieces) {
  send(pieces);
  return when_drained();
}

void UvStream::send(kj::ArrayPtr<const kj::ArrayPtr<const kj::byte>> pieces) {
  if (write_error_ != 0) return;
  for (auto piece : pieces) append(piece);
  after_append();
}

kj::Promise<void> UvStream::when_drained() {
  if (write_error_ != 0) return system_error("send", write_error_);
  if (buffered() < kWriteHigh) return kj::READY_NOW;
  auto paf = kj::newPromiseAndFulfiller<void>();
  drained_.push_back(kj::mv(paf.fulfiller));
  return kj::mv(paf.promise);
}

void UvStream::append(kj::ArrayPtr<const kj::byte> bytes) {
  std::vector<kj::byte>& out = tls_ ? tls_->plain : out_;
  out.insert(out.end(), bytes.begin(), bytes.end());
}

void UvStream::after_append() {
  bool waiting = (armed_ & UV_WRITABLE) != 0;
  if (buffered() >= kWriteHigh) {
    if (!waiting) send_out();
  } else if (buffered() > 0 && !waiting && !dirty_) {
    dirty_ = true;
    loop_.flush_later(*this);
  }
}

void UvStream::flush() noexcept {
  dirty_ = false;
  send_out();
}

void UvStream::send_out() {
  if (tls_) seal();
  while (sent_ < out_.size()) {
    ssize_t n = ::send(fd_.get(), out_.data() + sent_, out_.size() - sent_, MSG_NOSIGNAL);
    if (n >= 0) {
      sent_ += static_cast<size_t>(n);
      continue;
    }
    if (errno == EINTR) continue;
    if (errno == EAGAIN || errno == EWOULDBLOCK) {
      if (failed_) return fail_writes(ECONNRESET);
      // A buffer that never runs empty must not keep what went out.
      if (sent_ >= kWriteHigh && sent_ * 2 >= out_.size()) {
        out_.erase(out_.begin(), out_.begin() + static_cast<std::ptrdiff_t>(sent_));
        sent_ = 0;
      }
      arm(armed_ | UV_WRITABLE);
      if (buffered() < kWriteHigh) wake_drained();
      return;
    }
    return fail_writes(errno);
  }
  out_.clear();
  sent_ = 0;
  if (out_.capacity() > kKeepCapacity) out_.shrink_to_fit();
  const bool in_handshake =
      tls_ && tls_->session->state() == TlsSession::State::handshaking;  // output may wait for it
  if (shutdown_wanted_ && !in_handshake) ::shutdown(fd_.get(), SHUT_WR);
  if (buffered() < kWriteHigh) wake_drained();
}

void UvStream::wake_drained() {
  for (auto& waiter : std::exchange(drained_, {})) waiter->fulfill();
}

void UvStream::fail_writes(int error) {
  write_error_ = error;
  out_ = {};
  sent_ = 0;
  for (auto& waiter : std::exchange(drained_, {})) waiter->reject(system_error("send", error));
}

void UvStream::shutdownWrite() {
  shutdown_wanted_ = true;
  if ((armed_ & UV_WRITABLE) == 0) send_out();
}

void UvStream::abortRead() {
  ::shutdown(fd_.get(), SHUT_RD);
}

void UvStream::getsockopt(int level, int option, void* value, kj::uint* length) {
  socklen_t size = *length;
  KJ_SYSCALL(::getsockopt(fd_.get(), level, option, value, &size));
  *length = size;
}

void UvStream::setsockopt(int level, int option, const void* value, kj::uint length) {
  KJ_SYSCALL(::setsockopt(fd_.get(), level, option, value, length));
}

kj::Promise<void> UvStream::when_readable() {
  auto paf = kj::newPromiseAndFulfiller<void>();
  readable_ = kj::mv(paf.fulfiller);
  arm(armed_ | UV_READABLE);
  return kj::mv(paf.promise);
}

kj::Promise<void> UvStream::when_writable() {
  auto paf = kj::newPromiseAndFulfiller<void>();
  writable_ = kj::mv(paf.fulfiller);
  arm(armed_ | UV_WRITABLE);
  return kj::mv(paf.promise);
}

void UvStream::wake(Fulfiller& waiter) {
  KJ_IF_MAYBE (w, waiter) {
    auto fulfiller = kj::mv(*w);
    waiter = nullptr;
    fulfiller->fulfill();
  }
}

void UvStream::arm(int events) {
  if (failed_) {
    wake(readable_);
    wake(writable_);
    return;
  }
  if (events == armed_) return;
  armed_ = events;
  int code = events == 0 ? uv_poll_stop(poll_)
                         : uv_poll_start(poll_, events, [](uv_poll_t* h, int status, int got) {
                             static_cast<UvStream*>(h->data)->on_poll(status, got);
                           });
  if (code < 0) {
    failed_ = true;
    armed_ = 0;
    wake(readable_);
    wake(writable_);
  }
}

void UvStream::on_poll(int status, int events) {
  if (status < 0) {
    // The socket has an error; libuv has stopped polling. The next recv or send tells which.
    failed_ = true;
    armed_ = 0;
    wake(readable_);
    wake(writable_);
    send_out();
    return;
  }
  int keep = armed_;
  if ((events & UV_READABLE) != 0) {
    // Staying armed spares a system call per message. With nobody reading it would fire for ever.
    if (readable_ == nullptr) keep &= ~UV_READABLE;
    wake(readable_);
  }
  if ((events & UV_WRITABLE) != 0) {
    keep &= ~UV_WRITABLE;
    wake(writable_);
  }
  arm(keep);
  if ((events & UV_WRITABLE) != 0) send_out();
}

kj::Promise<kj::Own<UvStream>> connect(EventLoop& loop, const Address& address,
                                       kj::Duration timeout) {
  int raw =
      ::socket(address.v6 ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (raw < 0) return system_error("socket", errno);
  kj::AutoCloseFd fd(raw);
  sockaddr_storage to;
  socklen_t size = to_sockaddr(address, to);
  if (::connect(raw, reinterpret_cast<sockaddr*>(&to), size) < 0 && errno != EINPROGRESS) {
    return system_error("connect", errno);
  }
  auto stream = kj::heap<UvStream>(loop, kj::mv(fd));
  auto ready = stream->when_writable();
  return loop.timer().timeoutAfter(
      timeout,
      ready.then([stream = kj::mv(stream), raw]() mutable -> kj::Promise<kj::Own<UvStream>> {
        int error = 0;
        socklen_t length = sizeof error;
        ::getsockopt(raw, SOL_SOCKET, SO_ERROR, &error, &length);
        if (error != 0) return system_error("connect", error);
        // A dial to a free local port can be given that very port as its source, and then the
        // socket is connected to itself.
        sockaddr_storage here{};
        sockaddr_storage there{};
        socklen_t here_size = sizeof here;
        socklen_t there_size = sizeof there;
        if (::getsockname(raw, reinterpret_cast<sockaddr*>(&here), &here_size) != 0 ||
            ::getpeername(raw, reinterpret_cast<sockaddr*>(&there), &there_size) != 0) {
          return system_error("connect", errno);
        }
        if (from_sockaddr(here) == from_sockaddr(there))
          return system_error("connect", ECONNREFUSED);
        return kj::mv(stream);
      }));
}

}  // namespace weir::rpc
