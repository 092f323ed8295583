#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include <weir/crdt/time.h>

namespace weir::examples {

/// Carries TCP connections from a loopback port to another, in a thread of its own, with a one-way
/// delay and a switch that cuts the link as a network would: connections hang, then die.
class Relay {
 public:
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
