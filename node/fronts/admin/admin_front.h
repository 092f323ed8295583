#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include <weir/node/access/access.h>
#include <weir/node/fronts/front.h>
#include <weir/node/service/service.h>
#include <weir/rpc/net/event_loop.h>
#include <weir/rpc/net/tls_context.h>

namespace weir::node {

/// What operators and orchestrators ask over HTTP (docs/http.md): GET /v1/status, /metrics,
/// /healthz and /readyz. On a listener of its own, so that no number of clients keeps them out, and
/// on the main loop. For its thread only; the loop and the operations outlive it.
class AdminFront final : public Front {
 public:
  /// Status and metrics are for those who may read (null: for nobody), probes are for all. Speaks
  /// TLS if there is a context.
  AdminFront(rpc::EventLoop& loop, Operations& operations, Access* access,
             std::shared_ptr<rpc::TlsContext> tls = nullptr);
  ~AdminFront() override;

  bool start(const std::string& address, rpc::Sharing sharing, std::string& error) override;
  std::uint16_t port() const override;
  /// Goes on answering: that a node is not ready is for it to say.
  void drain() override {}
  void stop() override;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace weir::node
