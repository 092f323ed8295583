#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include <weir/crdt/time.h>
#include <weir/node/access/access.h>
#include <weir/node/fronts/front.h>
#include <weir/node/service/service.h>
#include <weir/rpc/net/event_loop.h>
#include <weir/rpc/net/tls_context.h>

namespace weir::node {

struct CapnpLimits {
  std::size_t max_connections = 1024;
  unsigned address_percent = 100;         ///< of them, that one address may have
  Nanos evict_after = kSecond;            ///< who said nothing for so long may have to make room
  std::size_t calls_per_connection = 64;  ///< that wait at once; beyond, calls are shed
  std::size_t calls = 4096;               ///< the same for all connections together
  std::size_t message_bytes = 8u << 20;   ///< one request message
  std::size_t read_bytes = 256u << 20;    ///< request messages being read or served, all together
  Nanos first_message = 10 * kSecond;     ///< a new connection must have sent one by then
  Nanos message_timeout = 20 * kSecond;   ///< from a message's first byte to its last
};

struct CapnpCounters {
  std::uint64_t calls = 0;
  std::uint64_t requests = 0;
  std::uint64_t malformed = 0;  ///< requests that broke a bound, answered with an error
  std::uint64_t shed = 0;       ///< calls refused: too many in flight
  std::uint64_t timed_out = 0;  ///< connections closed for a stalled message or silence
  std::uint64_t accepted = 0;
  std::uint64_t turned_away = 0;
  std::uint64_t evicted = 0;  ///< closed to make room, without having said anything
};

/// Serves clients over Cap'n Proto RPC (interface Service of rpc/weir.capnp; rpc/client/). Clients
/// are not trusted: whatever they send, the node stays up, and every connection's memory is
/// bounded. Who they are says a Session: by where they come from, their certificate, or a token.
///
/// For the loop's thread only. The loop and the service outlive it.
class CapnpFront final : public Front {
 public:
  /// Speaks TLS if there is a context. `access`: null: nobody is known.
  CapnpFront(rpc::EventLoop& loop, Service& service, CapnpLimits limits = {},
             std::shared_ptr<rpc::TlsContext> tls = nullptr, Access* access = nullptr);
  ~CapnpFront() override;
  CapnpFront(const CapnpFront&) = delete;
  CapnpFront& operator=(const CapnpFront&) = delete;

  bool start(const std::string& address, rpc::Sharing sharing, std::string& error) override;
  std::uint16_t port() const override;
  /// Clients are told to go once all that they asked is answered: what they send then they may ask
  /// another node (rpc::kLeaving).
  void drain() override;
  /// Drops unfinished calls and all connections.
  void stop() override;

  std::size_t connections() const;
  CapnpCounters counters() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace weir::node
