#pragma once

#include <cstdint>
#include <string>

#include <weir/rpc/net/listener.h>

namespace weir::node {

/// One protocol on one loop: bytes in, bytes out. For that loop's thread only.
class Front {
 public:
  virtual ~Front() = default;
  /// Listens. On failure returns false and says why.
  virtual bool start(const std::string& address, rpc::Sharing sharing, std::string& error) = 0;
  /// What it listens on; 0 before start().
  virtual std::uint16_t port() const = 0;
  /// Takes no more connections, and has clients go where the protocol has a way to say so. What is
  /// asked meanwhile is answered.
  virtual void drain() = 0;
  /// Closes everything; what is unanswered stays so. Not from inside a call of the front.
  /// Idempotent.
  virtual void stop() = 0;
};

}  // namespace weir::node
