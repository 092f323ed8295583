#include <weir/bench/wire/rpc_load.h>

#include <capnp/rpc-twoparty.h>
#include <kj/async-io.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include <weir.capnp.h>

#include <weir/bench/keys.h>
#include <weir/bench/machine.h>
#include <weir/rpc/client/node_client.h>

namespace weir::bench {
namespace {

using Service = rpc::schema::Service;

/// What the calls of one turn share.
struct Turn {
  const RpcTarget& target;
  unsigned batch;
  std::uint64_t end;
  std::uint64_t random;
  Load load{};
};

struct Connection {
  explicit Connection(kj::Own<kj::AsyncIoStream> s)
      : stream(kj::mv(s)), client(*stream), service(client.bootstrap().castAs<Service>()) {}
  kj::Own<kj::AsyncIoStream> stream;
  capnp::TwoPartyClient client;
  Service::Client service;
};

/// Calls again and again until the turn is over.
kj::Promise<void> call(Turn& turn, Service::Client& service) {
  if (steady_ns() >= turn.end) return kj::READY_NOW;
  auto request = service.checkRequest();
  auto checks = request.initRequests(turn.batch);
  for (auto check : checks) {
    Key16 key = key_of(next_random(turn.random) % turn.target.keys);
    check.setDomain("api");
    auto entry = check.initEntries(1)[0];
    entry.setKey("key");
    std::memcpy(entry.initValue(16).begin(), key.text.data(), 16);
  }
  std::uint64_t asked = steady_ns();
  return request.send()
      .then([&turn, asked](capnp::Response<Service::CheckResults>&& response) {
        for (auto result : response.getResults()) {
          if (!result.getAllowed()) {
            throw std::runtime_error(std::string("a check was not allowed: ") +
                                     result.getError().cStr());
          }
          ++turn.load.requests;
        }
        turn.load.latency.record(steady_ns() - asked);
      })
      .then([&turn, &service] { return call(turn, service); });
}

/// One caller of the client library after the other has its answer on the library's thread, so what
/// they share needs no lock.
struct Callers {
  rpc::NodeClient& client;
  const RpcTarget& target;
  std::uint64_t end;
  std::uint64_t random;
  std::atomic<unsigned> left;
  std::string error{};
  std::uint64_t started_cpu = 0;
  Load load{};

  void ask() {
    Key16 key = key_of(next_random(random) % target.keys);
    std::uint64_t asked = steady_ns();
    client.check_async(
        {rpc::CheckItem{"api", {{"key", std::string(key.view())}}, 1}},
        [this, asked](std::vector<Reply> replies) { answered(replies[0], asked); },
        std::chrono::steady_clock::now() + std::chrono::nanoseconds(kPatienceNs));
  }
  void answered(const Reply& reply, std::uint64_t asked) {
    std::uint64_t now = steady_ns();
    if (!reply.allowed) {
      error = "a check was not allowed: " + reply.error.to_string();
      end = 0;
    }
    load.latency.record(now - asked);
    ++load.requests;
    if (now < end) return ask();
    load.load_cpu_ns = thread_cpu_ns() - started_cpu;
    --left;
  }
};

}  // namespace

Load rpc_load(const RpcTarget& target, const RpcShape& shape, double seconds) {
  auto io = kj::setupAsyncIo();
  auto address =
      io.provider->getNetwork().parseAddress("127.0.0.1", target.port).wait(io.waitScope);
  Turn turn{target, shape.batch, 0, steady_ns()};
  std::vector<std::unique_ptr<Connection>> connections;
  for (unsigned i = 0; i < shape.connections; ++i) {
    connections.push_back(std::make_unique<Connection>(address->connect().wait(io.waitScope)));
    connections.back()->service.whenResolved().wait(io.waitScope);
  }
  std::uint64_t span = static_cast<std::uint64_t>(seconds * 1e9);
  std::uint64_t cpu = thread_cpu_ns();
  std::uint64_t start = steady_ns();
  turn.end = start + span;
  auto calls = kj::heapArrayBuilder<kj::Promise<void>>(shape.connections * shape.in_flight);
  for (auto& connection : connections) {
    for (unsigned i = 0; i < shape.in_flight; ++i) calls.add(call(turn, connection->service));
  }
  io.provider->getTimer()
      .timeoutAfter((span + kPatienceNs) * kj::NANOSECONDS, kj::joinPromises(calls.finish()))
      .wait(io.waitScope);
  turn.load.ns = steady_ns() - start;
  turn.load.load_cpu_ns = thread_cpu_ns() - cpu;
  return turn.load;
}

Load client_load(const RpcTarget& target, unsigned in_flight, double seconds) {
  rpc::NodeClientOptions options;
  options.address = "127.0.0.1:" + std::to_string(target.port);
  rpc::NodeClient client(options);
  for (int i = 0; i < 1000 && !client.connected(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  if (!client.connected()) throw std::runtime_error("no connection to " + options.address);
  std::uint64_t start = steady_ns();
  auto end = start + static_cast<std::uint64_t>(seconds * 1e9);
  Callers callers{client, target, end, start, in_flight};
  // Every caller begins on the library's thread, with the answer to a first check.
  for (unsigned i = 0; i < in_flight; ++i) {
    client.check_async({rpc::CheckItem{"api", {{"key", "first"}}, 1}},
                       [&callers, i](std::vector<Reply>) {
                         if (i == 0) callers.started_cpu = thread_cpu_ns();
                         callers.ask();
                       });
  }
  while (callers.left > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  if (!callers.error.empty()) throw std::runtime_error(callers.error);
  callers.load.ns = steady_ns() - start;
  return callers.load;
}

}  // namespace weir::bench
