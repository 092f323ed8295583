#include <weir/bench/wire/links.h>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>

#include <weir/bench/machine.h>
#include <weir/bench/wire/load.h>

namespace weir::bench {
namespace {

constexpr std::size_t kInput = 256u << 10;

[[noreturn]] void fail(const char* call) {
  throw std::runtime_error(std::string(call) + ": " + std::strerror(errno));
}

}  // namespace

Links::Links(std::uint16_t port, unsigned count)
    : links_(count), events_(count), last_input_(steady_ns()) {
  epoll_ = ::epoll_create1(EPOLL_CLOEXEC);
  if (epoll_ < 0) fail("epoll_create1");
  for (std::size_t i = 0; i < links_.size(); ++i) {
    links_[i].index = i;
    connect(links_[i], port);
  }
}

Links::~Links() {
  for (Link& link : links_) {
    if (link.fd >= 0) ::close(link.fd);
  }
  ::close(epoll_);
}

void Links::connect(Link& link, std::uint16_t port) {
  link.fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  to.sin_port = htons(port);
  if (link.fd < 0 || ::connect(link.fd, reinterpret_cast<const sockaddr*>(&to), sizeof to) != 0) {
    fail("connect");
  }
  int one = 1;
  ::setsockopt(link.fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  link.input.resize(kInput);
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = link.index;
  if (::epoll_ctl(epoll_, EPOLL_CTL_ADD, link.fd, &event) != 0) fail("epoll_ctl");
}

void Links::send(Link& link, std::string_view bytes) {
  while (!bytes.empty()) {
    ssize_t n = ::send(link.fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail("send");
    bytes.remove_prefix(static_cast<std::size_t>(n));
  }
}

int Links::poll(int timeout_ms) {
  int count = ::epoll_wait(epoll_, events_.data(), static_cast<int>(events_.size()), timeout_ms);
  if (count < 0 && errno != EINTR) fail("epoll_wait");
  std::uint64_t now = steady_ns();
  if (count > 0) {
    last_input_ = now;
  } else if (now - last_input_ > kPatienceNs) {
    throw std::runtime_error("no answer for 10 s");
  }
  return count;
}

bool Links::read(Link& link) {
  if (link.begin > 0) {
    std::memmove(link.input.data(), link.input.data() + link.begin, link.end - link.begin);
    link.end -= link.begin;
    link.begin = 0;
  }
  if (link.end == link.input.size()) throw std::runtime_error("an answer too large");
  ssize_t n =
      ::recv(link.fd, link.input.data() + link.end, link.input.size() - link.end, MSG_DONTWAIT);
  if (n == 0) throw std::runtime_error("the server closed a connection");
  if (n < 0) {
    if (errno == EAGAIN || errno == EINTR) return false;
    fail("recv");
  }
  link.end += static_cast<std::size_t>(n);
  return true;
}

}  // namespace weir::bench
