#include <weir/bench/node/http_ask.h>

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <stdexcept>

#include <weir/bench/wire/http_response.h>

namespace weir::bench {
namespace {

class Socket {
 public:
  explicit Socket(std::uint16_t port) : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    to.sin_port = htons(port);
    timeval minute{60, 0};
    ::setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &minute, sizeof minute);
    if (fd_ < 0 || ::connect(fd_, reinterpret_cast<const sockaddr*>(&to), sizeof to) != 0) {
      ::close(fd_);
      throw std::runtime_error(fmt::format("nobody listens on port {}", port));
    }
  }
  ~Socket() { ::close(fd_); }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

std::string ask(std::uint16_t port, const std::string& request) {
  Socket socket(port);
  if (::send(socket.get(), request.data(), request.size(), MSG_NOSIGNAL) !=
      static_cast<ssize_t>(request.size())) {
    throw std::runtime_error("a request was not sent");
  }
  std::string answer;
  char bytes[64 << 10];
  for (;;) {
    const ssize_t n = ::recv(socket.get(), bytes, sizeof bytes, 0);
    if (n <= 0) throw std::runtime_error("no whole answer: " + answer.substr(0, 500));
    answer.append(bytes, static_cast<std::size_t>(n));
    const auto head = read_response(answer);
    if (!head || answer.size() < head->size) continue;
    return answer.substr(answer.find("\r\n\r\n") + 4);
  }
}

}  // namespace

std::string http_get(std::uint16_t port, std::string_view path) {
  return ask(port, fmt::format("GET {} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", path));
}

std::string http_post(std::uint16_t port, std::string_view path, std::string_view json) {
  return ask(port, fmt::format("POST {} HTTP/1.1\r\nHost: 127.0.0.1\r\n"
                               "Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{}",
                               path, json.size(), json));
}

}  // namespace weir::bench
