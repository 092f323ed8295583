#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include <weir/crdt/time.h>

namespace weir::examples {

/// Where a relay stands. Addresses are literal, as in rpc/net/address.h.
struct RelayEnds {
  std::string listen;  ///< "10.0.0.1:7400"; port 0 takes a free one
  std::string target;  ///< where connections go on to
  std::string source;  ///< "10.0.0.1:0", where they go on from; empty: as the system chooses
};

/// Carries TCP connections from one address to another, in a thread of its own, with a one-way
/// delay and a switch that cuts the link as a network would: connections hang, then die. A
/// connection whose other side answers nothing for about 12 s is reset.
///
/// Its sockets belong to the network namespace of the thread that made it.
class Relay {
 public:
  /// Throws std::runtime_error if an address is wrong or it cannot listen.
  explicit Relay(const RelayEnds& ends, Nanos delay = 0);
  /// Listens on 127.0.0.1:`port` (0 takes a free one) and carries to 127.0.0.1:`target`. Throws
  /// std::runtime_error if it cannot listen.
  Relay(std::uint16_t port, std::uint16_t target, Nanos delay = 0);
  ~Relay();
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;

  std::uint16_t port() const;
  /// Cut: nothing is carried any more, in either direction; existing connections are reset when the
  /// link heals. Any thread.
  void cut(bool yes);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace weir::examples
