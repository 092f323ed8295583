#pragma once

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include <weir/rpc/net/address.h>
#include <weir/rpc/net/event_loop.h>

namespace weir::rpc::test {

/// Generous: for things that must happen, however slow the machine.
inline constexpr auto kPatience = std::chrono::seconds(30);

/// Turns the loop until `condition` holds. False if it never did.
inline bool eventually(EventLoop& loop, const std::function<bool()>& condition) {
  auto end = std::chrono::steady_clock::now() + kPatience;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    loop.timer().afterDelay(2 * kj::MILLISECONDS).wait(loop.wait_scope());
  }
  return true;
}

/// Turns the loop for a while.
inline void turn(EventLoop& loop, int milliseconds) {
  loop.timer().afterDelay(milliseconds * kj::MILLISECONDS).wait(loop.wait_scope());
}

/// A blocking TCP socket for talking to servers byte by byte.
class RawSocket {
 public:
  explicit RawSocket(const Address& to) {
    fd_ = ::socket(to.v6 ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_storage at;
    socklen_t size = to_sockaddr(to, at);
    connected_ = ::connect(fd_, reinterpret_cast<sockaddr*>(&at), size) == 0;
    timeval wait{5, 0};
    ::setsockopt(fd_, SOL_SOCKET, SO_SNDTIMEO, &wait, sizeof wait);
  }
  ~RawSocket() { ::close(fd_); }
  RawSocket(const RawSocket&) = delete;
  RawSocket& operator=(const RawSocket&) = delete;

  bool connected() const { return connected_; }
  bool send(const std::vector<unsigned char>& bytes) {
    return ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL) ==
           static_cast<ssize_t>(bytes.size());
  }
  /// The other side has ended the connection: what it still had to say is read and dropped.
  bool ended() {
    for (;;) {
      char buffer[4096];
      ssize_t n = ::recv(fd_, buffer, sizeof buffer, MSG_DONTWAIT);
      if (n > 0) continue;
      return n == 0 || (errno != EAGAIN && errno != EWOULDBLOCK);
    }
  }
  int fd() const { return fd_; }

 private:
  int fd_ = -1;
  bool connected_ = false;
};

inline Address local(std::uint16_t port) {
  Address out;
  out.ip = {127, 0, 0, 1};
  out.port = port;
  return out;
}

/// A listening socket that never accepts: whoever connects to it hangs.
class DeafServer {
 public:
  DeafServer() {
    fd_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_storage at;
    socklen_t size = to_sockaddr(local(0), at);
    EXPECT_EQ(::bind(fd_, reinterpret_cast<sockaddr*>(&at), size), 0);
    EXPECT_EQ(::listen(fd_, 16), 0);
    size = sizeof at;
    EXPECT_EQ(::getsockname(fd_, reinterpret_cast<sockaddr*>(&at), &size), 0);
    port_ = from_sockaddr(at).port;
  }
  ~DeafServer() { ::close(fd_); }
  std::uint16_t port() const { return port_; }
  std::string address() const { return "127.0.0.1:" + std::to_string(port_); }

 private:
  int fd_ = -1;
  std::uint16_t port_ = 0;
};

/// Silences and keeps what KJ logs.
class KjLog final : public kj::ExceptionCallback {
 public:
  void logMessage(kj::LogSeverity severity, const char*, int, int, kj::String&& text) override {
    if (severity >= kj::LogSeverity::ERROR) errors.emplace_back(text.cStr());
  }
  std::vector<std::string> errors;
};

}  // namespace weir::rpc::test
