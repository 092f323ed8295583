#include <weir/bench/wire/http_load.h>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include <weir/bench/keys.h>
#include <weir/bench/machine.h>
#include <weir/bench/wire/http_response.h>

namespace weir::bench {
namespace {

constexpr std::size_t kInput = 64u << 10;

[[noreturn]] void fail(const char* call) {
  throw std::runtime_error(std::string(call) + ": " + std::strerror(errno));
}

std::uint64_t nanoseconds(double seconds) {
  return static_cast<std::uint64_t>(seconds * 1e9);
}

}  // namespace

HttpLoad::HttpLoad(HttpTarget target, unsigned connections, unsigned depth)
    : target_(std::move(target)),
      depth_(depth),
      random_(steady_ns()),
      connections_(connections),
      events_(connections) {
  epoll_ = ::epoll_create1(EPOLL_CLOEXEC);
  if (epoll_ < 0) fail("epoll_create1");
  for (Connection& connection : connections_) connect(connection);
}

HttpLoad::~HttpLoad() {
  for (Connection& connection : connections_) {
    if (connection.fd >= 0) ::close(connection.fd);
  }
  ::close(epoll_);
}

void HttpLoad::connect(Connection& connection) {
  connection.fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  to.sin_port = htons(target_.port);
  if (connection.fd < 0 ||
      ::connect(connection.fd, reinterpret_cast<const sockaddr*>(&to), sizeof to) != 0) {
    fail("connect");
  }
  int one = 1;
  ::setsockopt(connection.fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  connection.input.resize(kInput);
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.ptr = &connection;
  if (::epoll_ctl(epoll_, EPOLL_CTL_ADD, connection.fd, &event) != 0) fail("epoll_ctl");
}

template <typename NextKey>
void HttpLoad::send(Connection& connection, unsigned count, NextKey&& next_key) {
  output_.clear();
  for (unsigned i = 0; i < count; ++i) {
    output_ += target_.request;
    Key16 key = key_of(next_key());
    std::memcpy(output_.data() + output_.size() - target_.request.size() + target_.key_at,
                key.text.data(), key.text.size());
  }
  connection.unanswered = count;
  send_bytes(connection, output_.data(), output_.size());
}

void HttpLoad::send_random(Connection& connection, unsigned count) {
  send(connection, count, [this] { return next_random(random_) % target_.keys; });
}

// What is in flight on a connection is far less than its socket's buffer, so this never blocks.
void HttpLoad::send_bytes(Connection& connection, const char* bytes, std::size_t size) {
  while (size > 0) {
    ssize_t n = ::send(connection.fd, bytes, size, MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail("send");
    bytes += n;
    size -= static_cast<std::size_t>(n);
  }
}

template <typename Answered>
void HttpLoad::turn(int timeout_ms, Answered&& answered) {
  int count = ::epoll_wait(epoll_, events_.data(), static_cast<int>(events_.size()), timeout_ms);
  if (count < 0 && errno != EINTR) fail("epoll_wait");
  for (int i = 0; i < count; ++i) {
    auto& connection = *static_cast<Connection*>(events_[static_cast<std::size_t>(i)].data.ptr);
    read(connection);
    std::uint64_t now = steady_ns();
    if (take_answers(connection, now) == 0) continue;
    last_answer_ = now;
    if (connection.unanswered == 0) answered(connection);
  }
  if (count <= 0 && steady_ns() - last_answer_ > kPatienceNs) {
    throw std::runtime_error("no answer from port " + std::to_string(target_.port));
  }
}

void HttpLoad::read(Connection& connection) {
  if (connection.begin > 0) {
    std::memmove(connection.input.data(), connection.input.data() + connection.begin,
                 connection.end - connection.begin);
    connection.end -= connection.begin;
    connection.begin = 0;
  }
  if (connection.end == connection.input.size()) throw std::runtime_error("a response too large");
  ssize_t n = ::recv(connection.fd, connection.input.data() + connection.end,
                     connection.input.size() - connection.end, MSG_DONTWAIT);
  if (n == 0) throw std::runtime_error("the server closed a connection");
  if (n < 0) {
    if (errno == EAGAIN || errno == EINTR) return;
    fail("recv");
  }
  connection.end += static_cast<std::size_t>(n);
}

unsigned HttpLoad::take_answers(Connection& connection, std::uint64_t now) {
  unsigned taken = 0;
  while (connection.begin < connection.end) {
    std::string_view bytes(connection.input.data() + connection.begin,
                           connection.end - connection.begin);
    auto head = read_response(bytes);
    if (!head || head->size > bytes.size()) break;
    if (head->status != target_.status) {
      throw std::runtime_error(
          "an answer that is not " + std::to_string(target_.status) + ": " +
          std::string(bytes.substr(0, std::min<std::size_t>(head->size, 2000))));
    }
    if (connection.unanswered == 0) throw std::runtime_error("an answer to no request");
    connection.begin += head->size;
    --connection.unanswered;
    load_.latency.record(now - connection.since);
    ++load_.requests;
    ++taken;
  }
  return taken;
}

Load HttpLoad::closed(double seconds) {
  load_ = {};
  std::uint64_t cpu = thread_cpu_ns();
  std::uint64_t start = last_answer_ = steady_ns();
  std::uint64_t end = start + nanoseconds(seconds);
  std::size_t busy = connections_.size();
  for (Connection& connection : connections_) {
    connection.since = steady_ns();
    send_random(connection, depth_);
  }
  while (busy > 0) {
    turn(100, [&](Connection& connection) {
      if (last_answer_ >= end) {
        --busy;
        return;
      }
      connection.since = last_answer_;
      send_random(connection, depth_);
    });
  }
  load_.ns = last_answer_ - start;
  load_.load_cpu_ns = thread_cpu_ns() - cpu;
  return load_;
}

Load HttpLoad::open(double rate, double seconds) {
  load_ = {};
  std::vector<Connection*> idle;
  for (Connection& connection : connections_) idle.push_back(&connection);
  std::uint64_t seed = 1;
  std::uint64_t cpu = thread_cpu_ns();
  std::uint64_t start = last_answer_ = steady_ns();
  std::uint64_t end = start + nanoseconds(seconds);
  auto gap = [&] { return -std::log(1 - next_unit(seed)) * 1e9 / rate; };
  double due = static_cast<double>(start) + gap();
  std::uint64_t came = static_cast<std::uint64_t>(due);
  while (came < end || idle.size() < connections_.size()) {
    std::uint64_t now = steady_ns();
    while (came <= now && came < end && !idle.empty()) {
      idle.back()->since = came;
      send_random(*idle.back(), 1);
      idle.pop_back();
      due += gap();
      came = static_cast<std::uint64_t>(due);
    }
    turn(0, [&](Connection& connection) { idle.push_back(&connection); });
  }
  load_.ns = last_answer_ - start;
  load_.load_cpu_ns = thread_cpu_ns() - cpu;
  return load_;
}

void HttpLoad::ask_all() {
  std::uint64_t key = 0;
  std::size_t busy = 0;
  last_answer_ = steady_ns();
  auto next = [&](Connection& connection) {
    auto count = static_cast<unsigned>(std::min<std::uint64_t>(depth_, target_.keys - key));
    if (count == 0) {
      --busy;
      return;
    }
    send(connection, count, [&key] { return key++; });
  };
  for (Connection& connection : connections_) {
    ++busy;
    next(connection);
  }
  while (busy > 0) turn(100, next);
}

}  // namespace weir::bench
