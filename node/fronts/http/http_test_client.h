#pragma once

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>

namespace weir::node::test {

/// Long enough for the slowest machine: reached only if a test fails.
inline constexpr auto kPatience = std::chrono::seconds(20);

/// An answer as a client reads it.
struct Response {
  int status = 0;
  std::map<std::string, std::string> headers;
  std::string body;
  std::string header(const std::string& name) const {
    const auto at = headers.find(name);
    return at == headers.end() ? "(absent)" : at->second;
  }
};

/// One end of a connection, driven in the same thread as the loop that serves the other end.
class Client {
 public:
  /// `turn` has the loop turn once. `fd` is connected and does not block; the client closes it.
  Client(const std::function<void()>& turn, int fd) : turn_(turn), fd_(fd) {}
  ~Client() { leave(); }
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  void leave() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }
  void shut_write() { ::shutdown(fd_, SHUT_WR); }

  /// Sends as much as the server takes; the number of bytes.
  std::size_t try_send(std::string_view bytes) {
    const ssize_t count = ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    return count < 0 ? 0 : static_cast<std::size_t>(count);
  }
  void send(std::string_view bytes) {
    wait([&] {
      bytes.remove_prefix(try_send(bytes));
      return bytes.empty() || closed_;
    });
  }

  /// The next response. Empty if the connection ends before one.
  std::optional<Response> receive(bool head = false) {
    std::optional<Response> out;
    wait([&] {
      read();
      return (out = parse(head)).has_value() || closed_;
    });
    return out;
  }
  /// The server has closed, and everything it sent was taken by receive().
  bool closed() {
    wait([&] {
      read();
      return closed_;
    });
    return in_.empty();
  }
  bool closed_now() {
    read();
    return closed_;
  }
  std::string& received() {
    read();
    return in_;
  }

  int fd() const { return fd_; }

  void wait(const std::function<bool()>& condition) {
    const auto until = std::chrono::steady_clock::now() + kPatience;
    while (!condition()) {
      turn_();
      if (std::chrono::steady_clock::now() > until) {
        ADD_FAILURE() << "waited in vain";
        return;
      }
    }
  }

 private:
  // Takes what has arrived.
  void read() {
    char buffer[16 << 10];
    while (fd_ >= 0 && !closed_) {
      const ssize_t count = ::recv(fd_, buffer, sizeof buffer, 0);
      if (count < 0 && errno == EAGAIN) return;
      closed_ = count <= 0;
      if (count > 0) in_.append(buffer, static_cast<std::size_t>(count));
    }
  }

  std::optional<Response> parse(bool head) {
    const std::size_t end = in_.find("\r\n\r\n");
    if (end == std::string::npos) return std::nullopt;
    Response out;
    out.status = std::stoi(in_.substr(9, 3));
    for (std::size_t at = in_.find("\r\n") + 2; at < end + 2;) {
      const std::size_t line_end = in_.find("\r\n", at);
      const std::size_t colon = in_.find(": ", at);
      const std::string name = in_.substr(at, colon - at);
      EXPECT_TRUE(out.headers.emplace(name, in_.substr(colon + 2, line_end - colon - 2)).second)
          << name;
      at = line_end + 2;
    }
    std::size_t length = 0;
    if (!head && out.headers.contains("Content-Length")) {
      length = std::stoul(out.header("Content-Length"));
    }
    if (in_.size() < end + 4 + length) return std::nullopt;
    out.body = in_.substr(end + 4, length);
    in_.erase(0, end + 4 + length);
    return out;
  }

  const std::function<void()>& turn_;
  int fd_;
  std::string in_;
  bool closed_ = false;
};

}  // namespace weir::node::test
