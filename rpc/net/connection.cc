#include <weir/rpc/net/connection.h>

#include <capnp/message.h>
#include <capnp/serialize.h>

#include <string_view>
#include <utility>

namespace weir::rpc {
namespace {

using Side = capnp::rpc::twoparty::Side;

constexpr capnp::ReaderOptions kReaderOptions{1u << 20, 32};
/// How long a connection that reads no more may still try to send.
constexpr auto kGrace = 250 * kj::MILLISECONDS;

}  // namespace

Connection::Connection(EventLoop& loop, kj::Own<UvStream> stream,
                       kj::Maybe<capnp::Capability::Client> bootstrap,
                       const ConnectionLimits& limits, std::shared_ptr<ReadBudget> budget,
                       Side side)
    : loop_(loop),
      opened_(loop.timer().now()),
      stream_(kj::mv(stream)),
      most_open_(limits.framing.open_calls),
      framing_(*stream_, loop.timer(), limits.framing, std::move(budget)),
      network_(framing_, side, kReaderOptions),
      rpc_(network_, kj::mv(bootstrap)) {
  rpc_.setFlowLimit(limits.flow_words);
}

Connection::Connection(EventLoop& loop, kj::Own<UvStream> stream,
                       capnp::Capability::Client bootstrap, const ConnectionLimits& limits,
                       std::shared_ptr<ReadBudget> budget)
    : Connection(loop, kj::mv(stream), kj::Maybe<capnp::Capability::Client>(kj::mv(bootstrap)),
                 limits, std::move(budget), Side::SERVER) {
  framing_.set_queue_size([this] { return network_.getCurrentQueueSize(); });
}

Connection::Connection(EventLoop& loop, kj::Own<UvStream> stream, const ConnectionLimits& limits)
    : Connection(loop, kj::mv(stream), nullptr, limits, nullptr, Side::CLIENT) {}

DirectCalls& Connection::serve_directly(DirectMethod method, DirectHandler& handler) {
  framing_.set_filter(direct_.emplace(*stream_, method, handler, most_open_));
  return *direct_;
}

capnp::Capability::Client Connection::bootstrap() {
  capnp::word scratch[4] = {};
  capnp::MallocMessageBuilder message(scratch);
  auto vat = message.getRoot<capnp::rpc::twoparty::VatId>();
  vat.setSide(Side::SERVER);
  return rpc_.bootstrap(vat);
}

kj::Promise<void> Connection::closed() {
  // The connection may be gone before this continues.
  auto read_end =
      framing_.on_read_end().then([&timer = loop_.timer()] { return timer.afterDelay(kGrace); });
  return network_.onDisconnect().exclusiveJoin(kj::mv(read_end)).catch_([](kj::Exception&&) {});
}

void Connection::leave() {
  capnp::MallocMessageBuilder message;
  auto abort = message.initRoot<capnp::rpc::Message>().initAbort();
  abort.setReason(kj::heapString(kLeaving.data(), kLeaving.size()));
  abort.setType(capnp::rpc::Exception::Type::DISCONNECTED);
  const kj::Array<capnp::word> words = capnp::messageToFlatArray(message);
  const kj::ArrayPtr<const kj::byte> bytes = words.asBytes();
  stream_->send(kj::arrayPtr(&bytes, 1));
  stream_->shutdownWrite();
  framing_.ignore_input();
}

void retire(kj::TaskSet& tasks, kj::Own<Connection> connection) {
  tasks.add(kj::evalLater([connection = kj::mv(connection)] {}));
}

std::string reason(const kj::Exception& e) {
  std::string_view text(e.getDescription().cStr(), e.getDescription().size());
  constexpr std::string_view kRemote = "remote exception: ";
  if (text.substr(0, kRemote.size()) == kRemote) text.remove_prefix(kRemote.size());
  return std::string(text.substr(0, 512));
}

}  // namespace weir::rpc
