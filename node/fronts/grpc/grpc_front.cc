#include <weir/node/fronts/grpc/grpc_front.h>

#include <uv.h>

#include <utility>

#include <weir/node/fronts/grpc/grpc_methods.h>
#include <weir/node/uv_handle.h>
#include <weir/rpc/net/listener.h>
#include <weir/rpc/net/tls_stream.h>

namespace weir::node {
namespace {

/// How late those who watch health may be told.
constexpr std::uint64_t kHealthMs = 250;

GrpcServerOptions server_options(const GrpcFrontOptions& front) {
  GrpcServerOptions options = front.server;
  options.access = front.access;
  options.front = "grpc";
  return options;
}

}  // namespace

struct GrpcFront::Impl {
  Impl(rpc::EventLoop& loop, Service& service, GrpcFrontOptions options,
       std::shared_ptr<ConnectionBudget> budget)
      : streams(loop.uv()),
        tls(std::move(options.tls)),
        methods(service, std::move(options.wall)),
        server(streams, server_options(options), methods, std::move(budget)),
        listener(loop, [this](kj::AutoCloseFd socket, const rpc::Address& from) {
          accept(socket.release(), from);
        }) {
    methods.serve(server);
    uv_timer_init(loop.uv(), timer.get());
    timer.get()->data = this;
    uv_timer_start(
        timer.get(),
        [](uv_timer_t* handle) { static_cast<Impl*>(handle->data)->methods.tell_health(); },
        kHealthMs, kHealthMs);
  }

  void accept(int socket, const rpc::Address& from) {
    // Made first: it takes the socket, whatever happens.
    auto stream = rpc::make_tcp_stream(streams, socket);
    if (tls != nullptr) {
      auto session = rpc::TlsSession::server(tls, rpc::to_string(from));
      stream = rpc::make_tls_stream(streams, std::move(stream), std::move(session));
    }
    server.accept(std::move(stream), from);
  }

  rpc::StreamLoop streams;
  const std::shared_ptr<rpc::TlsContext> tls;
  GrpcMethods methods;
  GrpcServer server;
  UvHandle<uv_timer_t> timer;
  rpc::Listener listener;
};

GrpcFront::GrpcFront(rpc::EventLoop& loop, Service& service, GrpcFrontOptions options,
                     std::shared_ptr<ConnectionBudget> budget)
    : impl_(std::make_unique<Impl>(loop, service, std::move(options), std::move(budget))) {}

GrpcFront::~GrpcFront() = default;

bool GrpcFront::start(const std::string& address, rpc::Sharing sharing, std::string& error) {
  return impl_->listener.open(address, sharing, error);
}

std::uint16_t GrpcFront::port() const {
  return impl_->listener.port();
}

void GrpcFront::drain() {
  impl_->methods.drain();
  // Those who come last may ask, too.
  impl_->server.drain();
  impl_->listener.drain();
}

void GrpcFront::stop() {
  impl_->listener.close();
  impl_->server.stop();
}

const GrpcServer& GrpcFront::server() const {
  return impl_->server;
}

}  // namespace weir::node
