#include <weir/node/fronts/http/http_listener.h>

#include <utility>

#include <weir/node/fronts/http/http_json.h>
#include <weir/rpc/net/tls_stream.h>

namespace weir::node {

HttpListener::HttpListener(rpc::EventLoop& loop, HttpServerOptions options,
                           HttpServer::Handler& handler, std::shared_ptr<ConnectionBudget> budget,
                           std::shared_ptr<rpc::TlsContext> tls)
    : streams_(loop.uv()),
      tls_(std::move(tls)),
      server_(streams_, std::move(options), handler, std::move(budget)),
      listener_(loop, [this](kj::AutoCloseFd socket, const rpc::Address& from) {
        accept(socket.release(), from);
      }) {
  if (tls_ != nullptr) listener_.accept_few();
}

void HttpListener::accept(int socket, const rpc::Address& from) {
  if (tls_ == nullptr) return server_.accept(socket, from);
  // Made first: it takes the socket, whatever happens.
  auto below = rpc::make_tcp_stream(streams_, socket);
  auto session = rpc::TlsSession::server(tls_, rpc::to_string(from));
  server_.accept(rpc::make_tls_stream(streams_, std::move(below), std::move(session)), from);
}

bool HttpListener::start(const std::string& address, rpc::Sharing sharing, std::string& error) {
  return listener_.open(address, sharing, error);
}

void HttpListener::drain() {
  // Those who come last may ask once.
  server_.drain();
  listener_.drain();
}

void HttpListener::stop() {
  listener_.close();
  server_.stop();
}

void respond_problem(HttpExchange& exchange, unsigned status, std::string_view title,
                     std::string_view detail, std::string_view fields) {
  exchange.begin(status, content_type(status)).append(fields);
  append_problem(exchange.begin_body(), status, title, detail);
  exchange.finish();
}

}  // namespace weir::node
