#include <weir/rpc/net/listener.h>

#include <kj/debug.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>

namespace weir::rpc {
namespace {

constexpr int kBacklog = 511;
constexpr auto kBackOff = 100 * kj::MILLISECONDS;

}  // namespace

void keep_alive(int fd) {
  int on = 1;
  int idle = 60;
  int interval = 15;
  int count = 4;
  ::setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof interval);
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &count, sizeof count);
}

int listen_on(const std::string& text, Sharing sharing, Address& bound, std::string& error) {
  auto address = parse_address(text, error);
  if (!address) return -1;
  auto fail = [&](const char* call) {
    error = "cannot listen on " + text + ": " + call + ": " + std::strerror(errno);
    return -1;
  };
  int raw =
      ::socket(address->v6 ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (raw < 0) return fail("socket");
  kj::AutoCloseFd fd(raw);
  int one = 1;
  ::setsockopt(raw, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  auto share = [&] { return ::setsockopt(raw, SOL_SOCKET, SO_REUSEPORT, &one, sizeof one) == 0; };
  if (sharing == Sharing::further && !share()) return fail("setsockopt");
  sockaddr_storage at;
  socklen_t size = to_sockaddr(*address, at);
  if (::bind(raw, reinterpret_cast<sockaddr*>(&at), size) != 0) return fail("bind");
  // Only after it is bound: two processes that both shared from the start would each get a part of
  // the connections, and neither would be told that the address is taken.
  if (sharing == Sharing::first && !share()) return fail("setsockopt");
  if (::listen(raw, kBacklog) != 0) return fail("listen");
  size = sizeof at;
  if (::getsockname(raw, reinterpret_cast<sockaddr*>(&at), &size) != 0) return fail("getsockname");
  bound = from_sockaddr(at);
  return fd.release();
}

Listener::Listener(EventLoop& loop, std::size_t max_connections, OnAccept on_accept,
                   AcceptCall accept_call)
    : loop_(loop),
      max_connections_(max_connections),
      on_socket_([this, on_accept = kj::mv(on_accept)](kj::AutoCloseFd socket,
                                                       const Address& from) mutable {
        if (*connections_ >= max_connections_ && !room_for(from)) {
          ++counters_.turned_away;
          return;
        }
        auto stream = kj::heap<UvStream>(loop_, kj::mv(socket));
        ++*connections_;
        ++counters_.accepted;
        on_accept(stream.attach(kj::defer([count = connections_] { --*count; })), from);
      }),
      accept_call_(accept_call),
      connections_(std::make_shared<std::size_t>(0)) {}

Listener::Listener(EventLoop& loop, OnSocket on_socket, AcceptCall accept_call)
    : loop_(loop),
      max_connections_(0),
      on_socket_([this, on_socket = kj::mv(on_socket)](kj::AutoCloseFd socket,
                                                       const Address& from) mutable {
        ++counters_.accepted;
        on_socket(kj::mv(socket), from);
      }),
      accept_call_(accept_call),
      connections_(std::make_shared<std::size_t>(0)) {}

Listener::~Listener() {
  close();
}

bool Listener::room_for(const Address& from) {
  KJ_IF_MAYBE (make_room, make_room_) {
    return (*make_room)(from);
  }
  return false;
}

bool Listener::open(const std::string& text, Sharing sharing, std::string& error) {
  Address bound;
  int raw = listen_on(text, sharing, bound, error);
  if (raw < 0) return false;
  kj::AutoCloseFd fd(raw);
  auto* poll = new uv_poll_t{};
  if (int code = uv_poll_init(loop_.uv(), poll, raw); code < 0) {
    delete poll;
    error = "cannot listen on " + text + ": " + uv_strerror(code);
    return false;
  }
  close();
  poll->data = this;
  poll_ = poll;
  fd_ = kj::mv(fd);
  address_ = bound;
  resume();
  return true;
}

void Listener::close() {
  resumption_ = nullptr;
  if (poll_ == nullptr) return;
  uv_close(reinterpret_cast<uv_handle_t*>(poll_),
           [](uv_handle_t* h) { delete reinterpret_cast<uv_poll_t*>(h); });
  poll_ = nullptr;
  fd_ = nullptr;
}

void Listener::drain() {
  if (poll_ != nullptr) accept_some(kMany);
  close();
}

void Listener::accept_some(int most) {
  for (int i = 0; i < most && poll_ != nullptr; ++i) {
    sockaddr_storage from{};
    socklen_t size = sizeof from;
    int raw = accept_call_(fd_.get(), reinterpret_cast<sockaddr*>(&from), &size,
                           SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (raw < 0) {
      if (errno == EAGAIN || errno == EWOULDBLOCK) return;
      // The connection died while it waited, or the call was interrupted: the next may be fine.
      if (errno == EINTR || errno == ECONNABORTED || errno == EPROTO) continue;
      ++counters_.failures;
      return pause();
    }
    kj::AutoCloseFd fd(raw);
    keep_alive(raw);
    // Called by libuv: nothing may be thrown through it.
    auto failed = kj::runCatchingExceptions([&] { on_socket_(kj::mv(fd), from_sockaddr(from)); });
    KJ_IF_MAYBE (e, failed) {
      ++counters_.failures;
      KJ_LOG(ERROR, "an accepted connection could not be set up", *e);
    }
  }
}

// Out of descriptors or memory: the socket stays readable, so polling on would only spin.
void Listener::pause() {
  uv_poll_stop(poll_);
  resumption_ =
      loop_.timer().afterDelay(kBackOff).then([this] { resume(); }).eagerlyEvaluate(nullptr);
}

void Listener::resume() {
  uv_poll_start(poll_, UV_READABLE, [](uv_poll_t* h, int status, int) {
    auto& self = *static_cast<Listener*>(h->data);
    if (status < 0) {
      ++self.counters_.failures;
      self.pause();
    } else {
      self.accept_some(self.accepts_per_turn_);
    }
  });
}

}  // namespace weir::rpc
