#pragma once

#include <kj/function.h>
#include <sys/socket.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include <weir/rpc/net/address.h>
#include <weir/rpc/net/event_loop.h>
#include <weir/rpc/net/uv_stream.h>

namespace weir::rpc {

/// Whether several sockets of one process listen on an address, so that the kernel spreads
/// connections over them (SO_REUSEPORT).
enum class Sharing : std::uint8_t {
  alone,    ///< one socket
  first,    ///< others follow. An address that is taken is an error, by whoever it is
  further,  ///< after `first`, on the same address
};

/// A non-blocking socket that is bound and listens. -1, with the reason, on failure. `bound` is the
/// address with its real port.
int listen_on(const std::string& address, Sharing sharing, Address& bound, std::string& error);

/// What accepted connections have in common: a peer that vanished without a word is found out in
/// about two minutes.
void keep_alive(int fd);

/// Accepts TCP connections on an EventLoop.
class Listener {
 public:
  /// Given each accepted stream and the address it comes from. The connection counts against the
  /// maximum until the stream is destroyed.
  using OnAccept = kj::Function<void(kj::Own<UvStream> stream, const Address& from)>;
  /// Given each accepted socket, non-blocking, of whoever counts connections on his own.
  using OnSocket = kj::Function<void(kj::AutoCloseFd socket, const Address& from)>;

  struct Counters {
    std::uint64_t accepted = 0;
    std::uint64_t turned_away = 0;  ///< closed at once: the maximum was reached
    std::uint64_t failures = 0;     ///< accept failed; out of descriptors, it tries again later
  };

  /// accept4(2), or what a test puts in its place to make it fail.
  using AcceptCall = int (*)(int fd, sockaddr* from, socklen_t* size, int flags);

  Listener(EventLoop& loop, std::size_t max_connections, OnAccept on_accept,
           AcceptCall accept_call = &::accept4);
  Listener(EventLoop& loop, OnSocket on_socket, AcceptCall accept_call = &::accept4);
  /// Asked when the maximum is reached: true if a connection is being closed to make room, and the
  /// new one is to be taken.
  void when_full(kj::Function<bool(const Address& from)> make_room) {
    make_room_ = kj::mv(make_room);
  }
  /// A new connection costs much, such as a TLS handshake: few are accepted in one turn of the
  /// loop, so that however many wait, those that are there have their share of every turn.
  void accept_few() { accepts_per_turn_ = kFew; }
  ~Listener();
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  /// Binds and listens. Port 0 takes a free one. On failure returns false and says why.
  bool open(const std::string& address, std::string& error) {
    return open(address, Sharing::alone, error);
  }
  bool open(const std::string& address, Sharing sharing, std::string& error);
  /// Stops accepting; accepted connections stay. Idempotent.
  void close();
  /// The same, but takes those that wait to be accepted, up to kMany of them.
  void drain();

  /// What it is bound to; port 0 before open().
  const Address& address() const { return address_; }
  std::uint16_t port() const { return address_.port; }
  std::size_t connections() const { return *connections_; }
  const Counters& counters() const { return counters_; }

  static constexpr int kMany = 64;
  static constexpr int kFew = 4;

 private:
  void accept_some(int most);
  bool room_for(const Address& from);
  void pause();
  void resume();

  EventLoop& loop_;
  std::size_t max_connections_;
  OnSocket on_socket_;
  kj::Maybe<kj::Function<bool(const Address&)>> make_room_;
  AcceptCall accept_call_;
  int accepts_per_turn_ = kMany;
  Address address_;
  kj::AutoCloseFd fd_;
  uv_poll_t* poll_ = nullptr;
  std::shared_ptr<std::size_t> connections_;
  Counters counters_;
  kj::Promise<void> resumption_ = nullptr;
};

}  // namespace weir::rpc
