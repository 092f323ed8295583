#include <weir/bench/wire/rpc_load.h>

#include <capnp/message.h>
#include <capnp/rpc-twoparty.h>
#include <capnp/rpc.capnp.h>
#include <capnp/serialize.h>
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

constexpr const char* kKeyPlace = "0123456789abcdef";

/// In standard framing.
std::string framed(capnp::MessageBuilder& message) {
  auto words = capnp::messageToFlatArray(message);
  auto bytes = words.asChars();
  return {bytes.begin(), bytes.size()};
}

std::string bootstrap_message() {
  capnp::MallocMessageBuilder message;
  message.initRoot<capnp::rpc::Message>().initBootstrap().setQuestionId(0);
  return framed(message);
}

std::string finish_message(std::uint32_t id, bool release) {
  capnp::MallocMessageBuilder message;
  auto finish = message.initRoot<capnp::rpc::Message>().initFinish();
  finish.setQuestionId(id);
  finish.setReleaseResultCaps(release);
  return framed(message);
}

std::string call_message(std::uint32_t id, std::uint32_t service, unsigned batch, unsigned hits) {
  capnp::MallocMessageBuilder message(256 + 32 * batch);
  auto call = message.initRoot<capnp::rpc::Message>().initCall();
  call.setQuestionId(id);
  call.initTarget().setImportedCap(service);
  call.setInterfaceId(capnp::typeId<Service>());
  call.setMethodId(0);
  auto parameters = call.initParams().getContent().initAs<Service::CheckParams>();
  for (auto check : parameters.initRequests(batch)) {
    check.setDomain("api");
    check.setHits(hits);
    auto entry = check.initEntries(1)[0];
    entry.setKey("key");
    entry.setValue(kKeyPlace);
  }
  return framed(message);
}

/// Bytes of the frame that `bytes` begin with, or 0 if its head is not there yet. One segment only
/// is expected of answers of this size.
std::size_t frame_size(std::string_view bytes) {
  if (bytes.size() < 8) return 0;
  std::uint32_t head[2];
  std::memcpy(head, bytes.data(), sizeof head);
  if (head[0] > 1) throw std::runtime_error("an answer of more than two segments");
  if (head[0] == 0) return 8 + std::size_t{8} * head[1];
  if (bytes.size() < 16) return 0;
  std::uint32_t second = 0;
  std::memcpy(&second, bytes.data() + 8, sizeof second);
  return 16 + std::size_t{8} * (std::size_t{head[1]} + second);
}

/// What the calls of one turn share.
struct Turn {
  const RpcTarget& target;
  unsigned batch;
  std::uint64_t end;
  std::uint64_t random;
  Load load{};
};

struct KjConnection {
  explicit KjConnection(kj::Own<kj::AsyncIoStream> s)
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

RpcLoad::RpcLoad(const RpcTarget& target, const RpcShape& shape)
    : target_(target),
      shape_(shape),
      random_(steady_ns()),
      links_(target.port, shape.connections),
      connections_(shape.connections) {
  for (Link& link : links_.all()) open(link);
}

void RpcLoad::open(Link& link) {
  Connection& connection = connections_[link.index];
  links_.send(link, bootstrap_message());
  bool opened = false;
  while (!opened) {
    links_.wait(100, [&](Link& from) {
      std::size_t size = frame_size(from.unread());
      if (size == 0 || from.unread().size() < size) return;
      capnp::FlatArrayMessageReader reader(
          kj::arrayPtr(reinterpret_cast<const capnp::word*>(from.unread().data()), size / 8));
      auto answer = reader.getRoot<capnp::rpc::Message>().getReturn();
      connection.service = answer.getResults().getCapTable()[0].getSenderHosted();
      from.take(size);
      opened = true;
    });
  }
  links_.send(link, finish_message(0, false));
  for (std::uint32_t id = 0; id < shape_.in_flight; ++id) {
    Message call{call_message(id, connection.service, shape_.batch, target_.hits)};
    for (std::size_t at = 0; (at = call.bytes.find(kKeyPlace, at)) != std::string::npos; ++at) {
      call.keys_at.push_back(at);
    }
    connection.calls.push_back(std::move(call));
    connection.finishes.push_back({finish_message(id, true)});
  }
  connection.since.resize(shape_.in_flight);
}

void RpcLoad::append_call(Connection& connection, std::uint32_t id, std::uint64_t now) {
  Message& call = connection.calls[id];
  for (std::size_t at : call.keys_at) {
    Key16 key = key_of((in_order_ ? next_key_++ : next_random(random_)) % target_.keys);
    std::memcpy(call.bytes.data() + at, key.text.data(), key.text.size());
  }
  output_ += call.bytes;
  connection.since[id] = now;
}

std::uint32_t RpcLoad::read_answer(std::string_view frame) {
  capnp::FlatArrayMessageReader reader(kj::arrayPtr(
      reinterpret_cast<const capnp::word*>(frame.data()), frame.size() / sizeof(capnp::word)));
  auto message = reader.getRoot<capnp::rpc::Message>();
  if (!message.isReturn() || !message.getReturn().isResults()) {
    throw std::runtime_error("no results: " + std::string(kj::str(message).cStr()));
  }
  auto answer = message.getReturn();
  auto results = answer.getResults().getContent().getAs<Service::CheckResults>().getResults();
  for (auto result : results) {
    if (!result.getAllowed()) {
      throw std::runtime_error(std::string("a check was not allowed: ") + kj::str(result).cStr());
    }
  }
  load_.requests += results.size();
  return answer.getAnswerId();
}

template <typename Answered>
void RpcLoad::take_answers(Link& link, std::uint64_t now, Answered&& answered) {
  Connection& connection = connections_[link.index];
  output_.clear();
  for (;;) {
    std::size_t size = frame_size(link.unread());
    if (size == 0 || link.unread().size() < size) break;
    std::uint32_t id = read_answer(link.unread().substr(0, size));
    link.take(size);
    load_.latency.record(now - connection.since.at(id));
    output_ += connection.finishes[id].bytes;
    if (answered(id)) append_call(connection, id, now);
  }
  links_.send(link, output_);
}

template <typename Over>
Load RpcLoad::again_and_again(Over&& over) {
  load_ = {};
  std::uint64_t cpu = thread_cpu_ns();
  std::uint64_t start = steady_ns();
  std::uint64_t now = start;
  for (Link& link : links_.all()) {
    output_.clear();
    for (std::uint32_t id = 0; id < shape_.in_flight; ++id) {
      append_call(connections_[link.index], id, steady_ns());
    }
    links_.send(link, output_);
  }
  unsigned open = shape_.connections * shape_.in_flight;
  while (open > 0) {
    links_.wait(100, [&](Link& link) {
      now = steady_ns();
      take_answers(link, now, [&](std::uint32_t) {
        if (!over(now - start)) return true;
        --open;
        return false;
      });
    });
  }
  load_.ns = now - start;
  load_.load_cpu_ns = thread_cpu_ns() - cpu;
  return load_;
}

Load RpcLoad::closed(double seconds) {
  const auto span = static_cast<std::uint64_t>(seconds * 1e9);
  return again_and_again([span](std::uint64_t passed) { return passed >= span; });
}

Load RpcLoad::ask_all(std::uint64_t first) {
  in_order_ = true;
  next_key_ = first;
  Load load = again_and_again([this](std::uint64_t) { return next_key_ >= target_.keys; });
  in_order_ = false;
  return load;
}

Load RpcLoad::paced(double rate, double seconds) {
  struct Free {
    Link* link;
    std::uint32_t id;
  };
  std::vector<Free> free;
  for (Link& link : links_.all()) {
    for (std::uint32_t id = 0; id < shape_.in_flight; ++id) free.push_back({&link, id});
  }
  const std::size_t all = free.size();
  load_ = {};
  std::uint64_t cpu = thread_cpu_ns();
  std::uint64_t start = steady_ns();
  std::uint64_t now = start;
  std::uint64_t end = start + static_cast<std::uint64_t>(seconds * 1e9);
  const double gap = 1e9 * shape_.batch / rate;
  for (double due = static_cast<double>(start); now < end || free.size() < all;) {
    while (now < end && static_cast<double>(now) >= due && !free.empty()) {
      Free one = free.back();
      free.pop_back();
      output_.clear();
      append_call(connections_[one.link->index], one.id, now);
      links_.send(*one.link, output_);
      due += gap;
    }
    // Not longer than a millisecond: the next call may be due.
    links_.wait(1, [&](Link& link) {
      take_answers(link, steady_ns(), [&](std::uint32_t id) {
        free.push_back({&link, id});
        return false;
      });
    });
    now = steady_ns();
  }
  load_.ns = now - start;
  load_.load_cpu_ns = thread_cpu_ns() - cpu;
  return load_;
}

Load kj_load(const RpcTarget& target, const RpcShape& shape, double seconds) {
  auto io = kj::setupAsyncIo();
  auto address =
      io.provider->getNetwork().parseAddress("127.0.0.1", target.port).wait(io.waitScope);
  Turn turn{target, shape.batch, 0, steady_ns()};
  std::vector<std::unique_ptr<KjConnection>> connections;
  for (unsigned i = 0; i < shape.connections; ++i) {
    connections.push_back(std::make_unique<KjConnection>(address->connect().wait(io.waitScope)));
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

Load client_load(const RpcTarget& target, unsigned in_flight, double seconds,
                 std::shared_ptr<rpc::TlsContext> tls) {
  rpc::NodeClientOptions options;
  options.address = "127.0.0.1:" + std::to_string(target.port);
  options.tls = std::move(tls);
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
