#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include <weir/crdt/time.h>
#include <weir/node/access/access.h>
#include <weir/node/fronts/front.h>
#include <weir/node/fronts/http/http_server.h>
#include <weir/node/service/service.h>
#include <weir/rpc/net/event_loop.h>
#include <weir/rpc/net/tls_context.h>

namespace weir::node {

struct RedisFrontOptions {
  std::string domain = "redis";                    ///< of all requests; docs/redis.md
  Access* access = nullptr;                        ///< who may do what; null: nobody is known
  std::shared_ptr<rpc::TlsContext> tls = nullptr;  ///< null: plain
  /// Bytes that may wait to be sent before a connection's commands are read on.
  std::size_t max_waiting = 256u << 10;
  /// From a command's first byte to its last one.
  Nanos command_timeout = 10 * kSecond;
  /// A command that the service has not answered after this long is answered with an error.
  Nanos answer_timeout = 5 * kSecond;
  /// What waits to be sent is not taken for this long: the connection is closed.
  Nanos send_timeout = kMinute;
  /// After the last answer, until the other side has taken it and closes.
  Nanos linger_timeout = 5 * kSecond;
  /// A connection that was idle for at least this long may be closed to make room for another.
  Nanos evict_after = kSecond;
};

struct RedisCounters {
  std::uint64_t accepted = 0;
  std::uint64_t turned_away = 0;  ///< no room and nobody to close for it
  std::uint64_t evicted = 0;      ///< closed to make room
  std::uint64_t timed_out = 0;    ///< closed: half a command, or answers that nobody takes
  std::uint64_t commands = 0;
  std::uint64_t refused = 0;     ///< connections that sent what is no RESP
  std::uint64_t unanswered = 0;  ///< batches, parts of which the service did not answer in time
};

/// Limits for clients of Redis (docs/redis.md), over RESP2 and RESP3. What one read of a connection
/// brings is decided as one batch, and one write answers it, in order. An idle connection stays,
/// until its place is needed.
///
/// For the loop's thread only. The loop and the service outlive it.
class RedisFront final : public Front {
 public:
  /// `budget` is shared with the other workers' fronts.
  RedisFront(rpc::EventLoop& loop, Service& service, RedisFrontOptions options,
             std::shared_ptr<ConnectionBudget> budget);
  ~RedisFront() override;
  RedisFront(const RedisFront&) = delete;
  RedisFront& operator=(const RedisFront&) = delete;

  bool start(const std::string& address, rpc::Sharing sharing, std::string& error) override;
  std::uint16_t port() const override;
  /// Idle connections close, others once they are answered: the protocol has no other way to say
  /// that a client should go.
  void drain() override;
  void stop() override;

  const RedisCounters& counters() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace weir::node
