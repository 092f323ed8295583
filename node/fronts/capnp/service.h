#pragma once

#include <kj/async.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include <weir/crdt/time.h>
#include <weir/limits/lease.h>
#include <weir/limits/request.h>
#include <weir/rpc/check.h>
#include <weir/rpc/net/event_loop.h>

namespace weir::rpc {

/// What answers a ServiceServer's clients. All calls come on the loop's thread.
class ServiceHandler {
 public:
  virtual ~ServiceHandler() = default;
  /// Fills replies[i] for requests[i]. Both spans and all text in them stay valid until the promise
  /// resolves or is dropped (when the server is closed; not when a client goes away). A rejected
  /// promise fails the whole call.
  virtual kj::Promise<void> check(std::span<const weir::Request> requests,
                                  std::span<CheckReply> replies) = 0;
  virtual std::string status_json() = 0;
  /// The rules in force, as YAML (rules_text).
  virtual kj::Promise<std::string> rules_yaml();
  /// Fill `reply`, which, like all text, stays valid as above. As they are here they refuse.
  virtual kj::Promise<void> reserve(const weir::Request& request, Nanos timeout,
                                    ReserveReply& reply);
  virtual kj::Promise<void> settle(std::string_view ticket, std::uint64_t hits, SettleReply& reply);
  /// Only `most` and `term` of the terms are the client's.
  virtual kj::Promise<void> lease(const weir::Request& request, const LeaseTerms& terms,
                                  LeaseReply& reply);
};

struct ServiceLimits {
  std::size_t max_connections = 1024;
  std::size_t calls_per_connection = 64;  ///< in flight at once; beyond, calls are shed
  std::size_t calls = 4096;               ///< the same for all connections together
  std::size_t message_bytes = 8u << 20;   ///< one request message
  std::size_t read_bytes = 256u << 20;    ///< request messages being read or served, all together
  Nanos first_message = 10 * kSecond;     ///< a new connection must have sent one by then
  Nanos message_timeout = 20 * kSecond;   ///< from a message's first byte to its last
};

struct ServiceCounters {
  std::uint64_t calls = 0;
  std::uint64_t requests = 0;
  std::uint64_t malformed = 0;  ///< requests that broke a bound, answered with an error
  std::uint64_t shed = 0;       ///< calls refused: too many in flight
  std::uint64_t timed_out = 0;  ///< connections closed for a stalled message or silence
  std::uint64_t accepted = 0;
  std::uint64_t turned_away = 0;
};

/// Serves checks to clients (rpc/client/node_client.h). Clients are not trusted: whatever they
/// send, the node stays up, and every connection's memory is bounded. They are not authenticated
/// either, so it belongs on loopback or a private network.
///
/// For the loop's thread only. The loop and the handler outlive it. Not to be destroyed or closed
/// from inside a handler's call.
class ServiceServer {
 public:
  ServiceServer(EventLoop& loop, std::string listen, ServiceHandler& handler,
                ServiceLimits limits = {});
  ~ServiceServer();
  ServiceServer(const ServiceServer&) = delete;
  ServiceServer& operator=(const ServiceServer&) = delete;

  /// Listens. On failure returns false and says why.
  bool start(std::string& error);
  std::uint16_t port() const;
  /// Stops accepting, drops unfinished calls and all connections. Idempotent.
  void close();

  std::size_t connections() const;
  ServiceCounters counters() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace weir::rpc
