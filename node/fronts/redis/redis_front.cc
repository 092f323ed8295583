#include <weir/node/fronts/redis/redis_front.h>

#include <utility>

#include <weir/node/fronts/redis/redis_server.h>
#include <weir/rpc/net/listener.h>
#include <weir/rpc/net/tls_stream.h>

namespace weir::node {

struct RedisFront::Impl {
  Impl(rpc::EventLoop& loop, Service& service, RedisFrontOptions options,
       std::shared_ptr<ConnectionBudget> budget)
      : streams(loop.uv()),
        tls(options.tls),
        server(streams, service, std::move(options), std::move(budget)),
        listener(loop, [this](kj::AutoCloseFd socket, const rpc::Address& from) {
          accept(socket.release(), from);
        }) {
    if (tls != nullptr) listener.accept_few();
  }

  void accept(int socket, const rpc::Address& from) {
    // Made first: it takes the socket, whatever happens.
    auto stream = rpc::make_tcp_stream(streams, socket);
    if (tls != nullptr && stream != nullptr) {
      auto session = rpc::TlsSession::server(tls, rpc::to_string(from));
      stream = rpc::make_tls_stream(streams, std::move(stream), std::move(session));
    }
    server.accept(std::move(stream), from);
  }

  rpc::StreamLoop streams;
  const std::shared_ptr<rpc::TlsContext> tls;
  RedisServer server;
  rpc::Listener listener;
};

RedisFront::RedisFront(rpc::EventLoop& loop, Service& service, RedisFrontOptions options,
                       std::shared_ptr<ConnectionBudget> budget)
    : impl_(std::make_unique<Impl>(loop, service, std::move(options), std::move(budget))) {}

RedisFront::~RedisFront() {
  stop();
}

bool RedisFront::start(const std::string& address, rpc::Sharing sharing, std::string& error) {
  return impl_->listener.open(address, sharing, error);
}

std::uint16_t RedisFront::port() const {
  return impl_->listener.port();
}

void RedisFront::drain() {
  impl_->server.drain();
  impl_->listener.drain();
}

void RedisFront::stop() {
  impl_->listener.close();
  impl_->server.stop();
}

const RedisCounters& RedisFront::counters() const {
  return impl_->server.counters;
}

}  // namespace weir::node
