#include <weir/bench/wire/tls_load.h>

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <stdexcept>

#include <weir/bench/machine.h>
#include <weir/rpc/net/certificates.h>
#include <weir/rpc/net/tls_session.h>

namespace weir::bench {
namespace {

/// A blocking connection to loopback.
class Socket {
 public:
  explicit Socket(std::uint16_t port) : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_port = htons(port);
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (::connect(fd_, reinterpret_cast<sockaddr*>(&to), sizeof to) != 0) {
      throw std::runtime_error("cannot connect");
    }
  }
  ~Socket() { ::close(fd_); }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;

  void send(rpc::Output& out) {
    if (out.empty()) return;
    if (::send(fd_, out.data(), out.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(out.size())) {
      throw std::runtime_error("cannot send");
    }
    out.clear();
  }
  std::size_t receive(std::span<char> to) {
    const ssize_t got = ::recv(fd_, to.data(), to.size(), 0);
    return got > 0 ? static_cast<std::size_t>(got) : 0;
  }
  void shut() { ::shutdown(fd_, SHUT_WR); }

 private:
  int fd_;
};

void shake_hands(std::uint16_t port, const std::shared_ptr<rpc::TlsContext>& context) {
  Socket socket(port);
  auto session = rpc::TlsSession::client(context, "node", {"127.0.0.1"});
  std::array<char, 16384> buffer;
  rpc::Output out;
  session->start(out);
  for (;;) {
    session->read({}, out);
    if (session->state() == rpc::TlsSession::State::failed) {
      throw std::runtime_error(session->why());
    }
    if (session->secured()) session->close(out);
    socket.send(out);
    if (session->secured()) break;
    const std::size_t got = socket.receive(buffer);
    if (got == 0) throw std::runtime_error("the node ended the handshake");
    session->receive(std::span(buffer).first(got));
  }
  // The node's part is done once it has seen that, and closes as well.
  socket.shut();
  while (socket.receive(buffer) > 0) {
  }
}

}  // namespace

void make_certificates(const std::string& directory) {
  const std::string folder = directory + "/certs/";
  std::filesystem::create_directories(folder);
  const Nanos now =
      std::chrono::system_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
  const rpc::Certificate ca = rpc::make_ca({"bench CA", {}, now - kHour, now + kDay});
  std::ofstream(folder + "ca.pem") << ca.cert;
  for (const char* name : {"node", "client"}) {
    const rpc::Certificate made = rpc::issue(ca, {name, {"127.0.0.1"}, now - kHour, now + kDay});
    std::ofstream(folder + name + ".pem") << made.cert;
    std::ofstream(folder + name + ".key") << made.key;
  }
}

std::shared_ptr<rpc::TlsContext> client_context(const std::string& directory) {
  const std::string folder = directory + "/certs/";
  rpc::TlsOptions options;
  options.cert = folder + "client.pem";
  options.key = folder + "client.key";
  options.ca = folder + "ca.pem";
  std::string error;
  auto made = rpc::TlsContext::make(options, error);
  if (made == nullptr) throw std::runtime_error(error);
  return made;
}

Load handshake_load(std::uint16_t port, const std::shared_ptr<rpc::TlsContext>& context,
                    double seconds) {
  Load load;
  const std::uint64_t cpu = thread_cpu_ns();
  const std::uint64_t start = steady_ns();
  std::uint64_t now = start;
  const std::uint64_t end = start + static_cast<std::uint64_t>(seconds * 1e9);
  while (now < end) {
    shake_hands(port, context);
    const std::uint64_t then = steady_ns();
    load.latency.record(then - now);
    ++load.requests;
    now = then;
  }
  load.ns = now - start;
  load.load_cpu_ns = thread_cpu_ns() - cpu;
  return load;
}

}  // namespace weir::bench
