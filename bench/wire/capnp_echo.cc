// capnp_echo PORT: stock Cap'n Proto on KJ's own event loop and framing, with weir's schema, as a
// baseline: every check has the same answer, of the size that a node's has.
#include <capnp/rpc-twoparty.h>
#include <kj/async-io.h>

#include <cstdint>
#include <cstdio>

#include <weir.capnp.h>
#include <weir/limits/text/number.h>

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
  std::uint64_t port = 0;
  if (argc != 2 || weir::parse_number(argv[1], port) != weir::Digits::good || port > 65535) {
    std::fprintf(stderr, "usage: capnp_echo PORT\n");
    return 2;
  }
  auto io = kj::setupAsyncIo();
  capnp::TwoPartyServer server(kj::heap<weir::bench::Echo>());
  auto address = io.provider->getNetwork()
                     .parseAddress("127.0.0.1", static_cast<kj::uint>(port))
                     .wait(io.waitScope);
  auto listener = address->listen();
  server.listen(*listener).wait(io.waitScope);
}
