#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include <weir/node/fronts/http/http_server.h>
#include <weir/rpc/net/byte_stream.h>
#include <weir/rpc/net/event_loop.h>
#include <weir/rpc/net/listener.h>
#include <weir/rpc/net/tls_context.h>

namespace weir::node {

/// A listener whose connections, with TLS if there is a context, are served by an HttpServer: what
/// fronts that speak HTTP have in common. For the loop's thread only.
class HttpListener {
 public:
  HttpListener(rpc::EventLoop& loop, HttpServerOptions options, HttpServer::Handler& handler,
               std::shared_ptr<ConnectionBudget> budget,
               std::shared_ptr<rpc::TlsContext> tls = nullptr);
  ~HttpListener() { stop(); }

  bool start(const std::string& address, rpc::Sharing sharing, std::string& error);
  std::uint16_t port() const { return listener_.port(); }
  /// Accepts no more, and has those that are there go.
  void drain();
  void stop();
  HttpServer& server() { return server_; }

 private:
  void accept(int socket, const rpc::Address& from);

  rpc::StreamLoop streams_;
  std::shared_ptr<rpc::TlsContext> tls_;
  HttpServer server_;
  rpc::Listener listener_;
};

/// A problem document (RFC 9457) whose texts may be anything. `fields` are whole header lines.
void respond_problem(HttpExchange& exchange, unsigned status, std::string_view title,
                     std::string_view detail, std::string_view fields = {});

}  // namespace weir::node
