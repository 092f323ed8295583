#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include <weir/crdt/time.h>
#include <weir/node/fronts/front.h>
#include <weir/node/fronts/grpc/grpc_server.h>
#include <weir/node/service/service.h>
#include <weir/rpc/net/event_loop.h>
#include <weir/rpc/net/tls_context.h>

namespace weir::node {

struct GrpcFrontOptions {
  GrpcServerOptions server = {};                   ///< `access` and `front` are the front's to set
  Access* access = nullptr;                        ///< who may do what; null: nobody is known
  std::shared_ptr<rpc::TlsContext> tls = nullptr;  ///< null: plain, with prior knowledge
  std::function<Nanos()> wall;                     ///< the wall clock, for headers
};

/// gRPC: Envoy's rate limit service and external authorization, weir's own API, health and
/// reflection (docs/grpc.md, docs/envoy.md). What one read of a connection brings is decided as one
/// batch, and one write answers it.
///
/// For the loop's thread only. The loop and the service outlive it.
class GrpcFront final : public Front {
 public:
  /// `budget` is shared with the other workers' fronts.
  GrpcFront(rpc::EventLoop& loop, Service& service, GrpcFrontOptions options,
            std::shared_ptr<ConnectionBudget> budget);
  ~GrpcFront() override;
  GrpcFront(const GrpcFront&) = delete;
  GrpcFront& operator=(const GrpcFront&) = delete;

  bool start(const std::string& address, rpc::Sharing sharing, std::string& error) override;
  std::uint16_t port() const override;
  /// Clients are told to go (GOAWAY), and who watches health, that the node serves no more.
  void drain() override;
  void stop() override;

  const GrpcServer& server() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace weir::node
