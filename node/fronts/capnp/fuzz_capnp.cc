// Fuzz target (scripts/fuzz): arbitrary bytes as what a client sends in a session over Cap'n Proto,
// to a real front over a real socket. Whatever it sends, the front ends the session once the client
// has, and answers the next one.
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include <weir/crdt/fuzz_seeds.h>
#include <weir/node/fronts/capnp/capnp_front.h>
#include <weir/node/fronts/capnp/test_service.h>
#include <weir/rpc/net/connection.h>
#include <weir/rpc/net/test_util.h>
#include <weir/rpc/wire.h>

namespace {

using namespace weir;
using rpc::Connection;
namespace net = rpc::test;

void expect(bool holds) {
  if (!holds) std::abort();
}

class Handler final : public node::test::ServiceHandler {
 public:
  kj::Promise<void> check(std::span<const Request> requests, std::span<Reply> replies) override {
    for (std::size_t i = 0; i < requests.size(); ++i) {
      expect(requests[i].descriptors() <= kMaxDescriptors);
      replies[i].allowed = true;
      replies[i].statuses.emplace_back().rule = std::string(requests[i].domain);
    }
    return kj::READY_NOW;
  }
};

class Server {
 public:
  Server() : front_(loop_, service_) {
    std::string error;
    expect(front_.start("127.0.0.1:0", rpc::Sharing::alone, error));
  }

  void send(const std::vector<unsigned char>& bytes) {
    net::RawSocket socket(net::local(front_.port()));
    socket.send(bytes);
    ::shutdown(socket.fd(), SHUT_WR);
    expect(net::eventually(loop_, [&] { return socket.ended(); }));
  }

  /// What a client says that calls `ask` on what the front serves.
  template <typename Ask>
  void record(crdt::test::FuzzSeeds& seeds, Ask ask) {
    int fds[2];
    expect(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds) == 0);
    {
      Connection client(loop_, kj::heap<rpc::UvStream>(loop_, kj::AutoCloseFd(fds[0])),
                        rpc::ConnectionLimits{});
      auto call = ask(client.bootstrap().castAs<rpc::schema::Service>());
      net::turn(loop_, 10);
      std::byte buffer[8192];
      const ssize_t n = ::recv(fds[1], buffer, sizeof buffer, MSG_DONTWAIT);
      if (n > 0) seeds.add({buffer, static_cast<std::size_t>(n)});
    }
    ::close(fds[1]);
  }

 private:
  net::KjLog log_;
  rpc::EventLoop loop_;
  Handler handler_;
  node::test::TestService service_{handler_};
  node::CapnpFront front_;
};

template <typename Item>
void fill(Item item) {
  item.setDomain("api");
  auto entries = item.initEntries(2);
  for (auto entry : entries) {
    entry.setKey("key");
    entry.setValue("value");
  }
  item.setHits(1);
}

Server& server() {
  static auto* const server = new Server;  // to the end: libFuzzer leaves by _exit
  return *server;
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  crdt::test::FuzzSeeds seeds;
  if (!seeds.wanted()) return 0;
  server().record(seeds, [](rpc::schema::Service::Client service) {
    auto request = service.checkRequest();
    for (auto item : request.initRequests(3)) fill(item);
    return request.send().ignoreResult().eagerlyEvaluate(nullptr);
  });
  server().record(seeds, [](rpc::schema::Service::Client service) {
    auto request = service.reserveRequest();
    fill(request.initRequest());
    return request.send().ignoreResult().eagerlyEvaluate(nullptr);
  });
  server().record(seeds, [](rpc::schema::Service::Client service) {
    return service.statusRequest().send().ignoreResult().eagerlyEvaluate(nullptr);
  });
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  server().send({data, data + size});
  return 0;
}
