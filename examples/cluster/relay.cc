#include "relay.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <list>
#include <optional>
#include <stdexcept>
#include <thread>
#include <vector>

#include <weir/rpc/net/address.h>

namespace weir::examples {
namespace {

constexpr std::size_t kMaxQueued = 4u << 20;  // bytes under way in one direction

Nanos steady() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

std::string loopback(std::uint16_t port) {
  return "127.0.0.1:" + std::to_string(port);
}

struct Endpoint {
  sockaddr_storage address{};
  socklen_t size = 0;
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&address); }
};

Endpoint endpoint(const std::string& text) {
  std::string error;
  std::optional<rpc::Address> parsed = rpc::parse_address(text, error);
  if (!parsed) throw std::runtime_error("relay: " + text + ": " + error);
  Endpoint out;
  out.size = rpc::to_sockaddr(*parsed, out.address);
  return out;
}

/// No delay of small writes, and an end for connections whose other side went without a word.
/// Longer than the nodes' own patience, so that it is they who notice first.
void tune(int fd) {
  auto set = [fd](int level, int name, int value) {
    ::setsockopt(fd, level, name, &value, sizeof value);
  };
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, 6);
  set(IPPROTO_TCP, TCP_KEEPINTVL, 2);
  set(IPPROTO_TCP, TCP_KEEPCNT, 3);
  set(IPPROTO_TCP, TCP_USER_TIMEOUT, 12'000);
}

int tcp_socket(int family) {
  int fd = ::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd >= 0) tune(fd);
  return fd;
}

struct Chunk {
  Nanos due = 0;
  std::vector<char> bytes;
  std::size_t sent = 0;
};

/// One direction of a connection.
struct Direction {
  int from = -1;
  int to = -1;
  std::deque<Chunk> queue;
  std::size_t queued = 0;
  bool ended = false;
};

struct Pair {
  std::array<Direction, 2> directions;
  bool dead = false;
  int client() const { return directions[0].from; }
  int server() const { return directions[0].to; }
};

}  // namespace

struct Relay::Impl {
  int listener = -1;
  int wake = -1;
  std::uint16_t port = 0;
  Endpoint target;
  std::optional<Endpoint> source;
  Nanos delay = 0;
  std::atomic<bool> is_cut{false};
  std::atomic<bool> stopping{false};
  bool was_cut = false;
  std::list<Pair> pairs;
  std::thread thread;

  void run() {
    while (!stopping) {
      bool cut_now = is_cut;
      if (was_cut && !cut_now) {
        for (Pair& pair : pairs) pair.dead = true;
      }
      was_cut = cut_now;
      reap();
      wait(cut_now);
      if (stopping || is_cut) continue;
      accept_new();
      for (Pair& pair : pairs) {
        for (Direction& direction : pair.directions) {
          if (!carry(direction)) pair.dead = true;
        }
      }
    }
    for (Pair& pair : pairs) pair.dead = true;
    reap();
  }

  void reap() {
    for (auto pair = pairs.begin(); pair != pairs.end();) {
      if (!pair->dead) {
        ++pair;
        continue;
      }
      // A reset, not a goodbye: a cut network says nothing.
      linger reset{1, 0};
      for (int fd : {pair->client(), pair->server()}) {
        ::setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
        ::close(fd);
      }
      pair = pairs.erase(pair);
    }
  }

  void wait(bool cut_now) {
    std::vector<pollfd> polled{{wake, POLLIN, 0}};
    Nanos next = kNever;
    if (!cut_now) {
      polled.push_back({listener, POLLIN, 0});
      for (const Pair& pair : pairs) {
        for (const Direction& direction : pair.directions) {
          if (!direction.ended && direction.queued < kMaxQueued)
            polled.push_back({direction.from, POLLIN, 0});
          if (direction.queue.empty()) continue;
          if (direction.queue.front().due <= steady()) polled.push_back({direction.to, POLLOUT, 0});
          next = std::min(next, direction.queue.front().due);
        }
      }
    }
    int timeout = -1;
    if (next != kNever) {
      Nanos left = std::max<Nanos>(0, next - steady());
      timeout = left == 0 ? 100 : static_cast<int>(left / kMillisecond + 1);
    }
    ::poll(polled.data(), polled.size(), timeout);
    std::uint64_t count = 0;
    if ((polled[0].revents & POLLIN) != 0 && ::read(wake, &count, sizeof count) < 0) return;
  }

  void accept_new() {
    for (;;) {
      int client = ::accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
      if (client < 0) return;
      tune(client);
      int server = tcp_socket(target.address.ss_family);
      bool failed = source && ::bind(server, source->get(), source->size) < 0;
      if (failed || (::connect(server, target.get(), target.size) < 0 && errno != EINPROGRESS)) {
        ::close(client);
        if (server >= 0) ::close(server);
        continue;
      }
      Pair pair;
      pair.directions[0].from = pair.directions[1].to = client;
      pair.directions[0].to = pair.directions[1].from = server;
      pairs.push_back(std::move(pair));
    }
  }

  /// False if the connection broke.
  bool carry(Direction& direction) const {
    std::array<char, 65536> buffer;
    while (!direction.ended && direction.queued < kMaxQueued) {
      ssize_t got = ::recv(direction.from, buffer.data(), buffer.size(), 0);
      if (got < 0) {
        if (errno == EAGAIN || errno == EINTR || errno == ENOTCONN) break;
        return false;
      }
      if (got == 0) {
        direction.ended = true;
        break;
      }
      direction.queue.push_back({steady() + delay, {buffer.data(), buffer.data() + got}, 0});
      direction.queued += static_cast<std::size_t>(got);
    }
    while (!direction.queue.empty() && direction.queue.front().due <= steady()) {
      Chunk& chunk = direction.queue.front();
      ssize_t put = ::send(direction.to, chunk.bytes.data() + chunk.sent,
                           chunk.bytes.size() - chunk.sent, MSG_NOSIGNAL);
      if (put < 0) return errno == EAGAIN || errno == EINTR || errno == ENOTCONN;
      chunk.sent += static_cast<std::size_t>(put);
      direction.queued -= static_cast<std::size_t>(put);
      if (chunk.sent < chunk.bytes.size()) break;
      direction.queue.pop_front();
    }
    return !(direction.ended && direction.queue.empty());
  }
};

Relay::Relay(std::uint16_t port, std::uint16_t target, Nanos delay)
    : Relay(RelayEnds{loopback(port), loopback(target), {}}, delay) {}

Relay::Relay(const RelayEnds& ends, Nanos delay) : impl_(std::make_unique<Impl>()) {
  Endpoint listen = endpoint(ends.listen);
  impl_->target = endpoint(ends.target);
  if (!ends.source.empty()) impl_->source = endpoint(ends.source);
  impl_->delay = delay;
  impl_->listener = tcp_socket(listen.address.ss_family);
  impl_->wake = ::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  int one = 1;
  ::setsockopt(impl_->listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  if (::bind(impl_->listener, listen.get(), listen.size) < 0 || ::listen(impl_->listener, 64) < 0 ||
      ::getsockname(impl_->listener, listen.get(), &listen.size) < 0) {
    std::string why = std::strerror(errno);
    ::close(impl_->listener);
    ::close(impl_->wake);
    throw std::runtime_error("relay cannot listen on " + ends.listen + ": " + why);
  }
  impl_->port = rpc::from_sockaddr(listen.address).port;
  impl_->thread = std::thread([this] { impl_->run(); });
}

Relay::~Relay() {
  impl_->stopping = true;
  std::uint64_t one = 1;
  if (::write(impl_->wake, &one, sizeof one) == sizeof one) impl_->thread.join();
  ::close(impl_->listener);
  ::close(impl_->wake);
}

std::uint16_t Relay::port() const {
  return impl_->port;
}

void Relay::cut(bool yes) {
  impl_->is_cut = yes;
  std::uint64_t one = 1;
  if (::write(impl_->wake, &one, sizeof one) < 0) return;
}

}  // namespace weir::examples
