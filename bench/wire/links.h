#pragma once

#include <sys/epoll.h>

#include <cstdint>
#include <string_view>
#include <vector>

namespace weir::bench {

/// One of a load generator's connections, and what has come over it.
struct Link {
  int fd = -1;
  std::size_t index = 0;
  std::vector<char> input{};
  std::size_t begin = 0;
  std::size_t end = 0;

  std::string_view unread() const { return {input.data() + begin, end - begin}; }
  void take(std::size_t bytes) { begin += bytes; }
};

/// Connections to one server, served by one thread. Every call throws std::runtime_error if a
/// connection fails or ends.
class Links {
 public:
  /// Connects to 127.0.0.1:`port`, so many times.
  Links(std::uint16_t port, unsigned count);
  ~Links();
  Links(const Links&) = delete;
  Links& operator=(const Links&) = delete;

  std::vector<Link>& all() { return links_; }
  /// All of it: what is in flight is far less than a socket's buffer, so this never blocks.
  void send(Link& link, std::string_view bytes);
  /// Waits for input, at most `timeout_ms`, and reads it. Calls `on_input(link)` for each that has
  /// some. Throws if nothing has come for kPatienceNs.
  template <typename OnInput>
  void wait(int timeout_ms, OnInput&& on_input) {
    int count = poll(timeout_ms);
    for (int i = 0; i < count; ++i) {
      Link& link = links_[events_[static_cast<std::size_t>(i)].data.u64];
      if (read(link)) on_input(link);
    }
  }

 private:
  void connect(Link& link, std::uint16_t port);
  int poll(int timeout_ms);
  bool read(Link& link);

  int epoll_ = -1;
  std::vector<Link> links_;
  std::vector<epoll_event> events_;
  std::uint64_t last_input_ = 0;
};

}  // namespace weir::bench
