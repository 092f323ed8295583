// capnp_echo PORT: stock Cap'n Proto on KJ's own event loop and framing, with weir's schema, as a
// baseline: every check has the same answer, of the size that a node's has.
#include <capnp/rpc-twoparty.h>
#include <kj/async-io.h>

#include <cstdio>
#include <cstdlib>

#include <weir.capnp.h>

namespace weir::bench {
namespace {

class Echo final : public rpc::schema::Service::Server {
 protected:
  kj::Promise<void> check(CheckContext context) override {
    auto requests = context.getParams().getRequests();
    auto results = context.getResults().initResults(requests.size());
    for (auto result : results) {
      result.setAllowed(true);
      result.setDeciding(0);
      auto status = result.initStatuses(1)[0];
      status.setRule("per-key");
      status.setLimit(100000);
      status.setRemaining(99999);
      status.setResetNs(36'000'000'000);
      status.setAllowed(true);
    }
    return kj::READY_NOW;
  }
};

}  // namespace
}  // namespace weir::bench

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: capnp_echo PORT\n");
    return 2;
  }
  auto io = kj::setupAsyncIo();
  capnp::TwoPartyServer server(kj::heap<weir::bench::Echo>());
  auto port = static_cast<kj::uint>(std::strtoul(argv[1], nullptr, 10));
  auto address = io.provider->getNetwork().parseAddress("127.0.0.1", port).wait(io.waitScope);
  auto listener = address->listen();
  server.listen(*listener).wait(io.waitScope);
}
