#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include <weir/crdt/time.h>
#include <weir/node/fronts/front.h>
#include <weir/node/fronts/http/forward_auth.h>
#include <weir/node/fronts/http/http_headers.h>
#include <weir/node/fronts/http/http_server.h>
#include <weir/node/service/service.h>
#include <weir/rpc/net/event_loop.h>
#include <weir/rpc/net/tls_context.h>

namespace weir::node {

struct HttpFrontOptions {
  ResetFormat reset = ResetFormat::seconds;
  HttpServerOptions server = {};  ///< `headers` and such are the front's to set
  ForwardAuthOptions forward_auth = {};
  Access* access = nullptr;                        ///< who may do what; null: nobody is known
  std::shared_ptr<rpc::TlsContext> tls = nullptr;  ///< null: plain
  std::function<Nanos()> wall;  ///< the wall clock, for X-RateLimit-Reset as an instant
};

/// Checks, reservations and settlements as JSON over HTTP/1.1 (docs/http.md). What one read of a
/// connection brings is decided as one batch, and one write answers it.
///
/// For the loop's thread only. The loop and the service outlive it.
class HttpFront final : public Front {
 public:
  /// `budget` is shared with the other workers' fronts.
  HttpFront(rpc::EventLoop& loop, Service& service, HttpFrontOptions options,
            std::shared_ptr<ConnectionBudget> budget);
  ~HttpFront() override;
  HttpFront(const HttpFront&) = delete;
  HttpFront& operator=(const HttpFront&) = delete;

  bool start(const std::string& address, rpc::Sharing sharing, std::string& error) override;
  std::uint16_t port() const override;
  void drain() override;
  /// What waits for an answer is answered with 503.
  void stop() override;

  HttpServer::Counters counters() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace weir::node
