#pragma once

#include <capnp/capability.h>
#include <capnp/rpc-twoparty.h>

#include <memory>
#include <optional>
#include <string_view>

#include <weir/rpc/net/direct_calls.h>
#include <weir/rpc/net/framing.h>
#include <weir/rpc/net/uv_stream.h>

namespace weir::rpc {

struct ConnectionLimits {
  FramingLimits framing;
  /// Words of calls being served at once, beyond which nothing more is read. Must be well above
  /// what an honest peer has in flight: over the limit its answers wait too.
  std::size_t flow_words = 4u << 20;
};

/// What a node says last on a connection that it leaves (Connection::leave).
inline constexpr std::string_view kLeaving =
    "this node is stopping, and has not begun what it has not answered";

/// One Cap'n Proto connection: stream, framing and RPC state, taken down in the right order. Not to
/// be destroyed from inside one of its own calls (see retire()).
class Connection {
 public:
  /// Serves `bootstrap` to whoever dialled.
  Connection(EventLoop& loop, kj::Own<UvStream> stream, capnp::Capability::Client bootstrap,
             const ConnectionLimits& limits, std::shared_ptr<ReadBudget> budget);
  /// The dialling side.
  Connection(EventLoop& loop, kj::Own<UvStream> stream, const ConnectionLimits& limits);
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  /// Has `handler`, which must outlive the connection, serve calls of `method` instead of the
  /// bootstrap capability where it can. Before anything is read.
  DirectCalls& serve_directly(DirectMethod method, DirectHandler& handler);
  /// What the other side serves. Dialling side only.
  capnp::Capability::Client bootstrap();
  /// Resolves when the connection is over, for whatever reason; never rejects. Call once.
  kj::Promise<void> closed();

  /// Every call is answered, and the answers wait for nothing but the socket. Of connections that
  /// serve some directly.
  bool idle() { return direct_ && direct_->idle() && queued_bytes() == 0; }
  /// Tells the other side to go, which may take all that has no answer as not begun (kLeaving), and
  /// begins nothing more. Only while idle(). It lasts until the other side closes it, or until it
  /// is destroyed: not at once, or what was said may get lost.
  void leave();

  UvStream& stream() { return *stream_; }
  FramedStream& framing() { return framing_; }
  /// Bytes of messages that wait to be sent.
  std::size_t queued_bytes() { return network_.getCurrentQueueSize(); }
  kj::TimePoint opened() const { return opened_; }

 private:
  Connection(EventLoop& loop, kj::Own<UvStream> stream,
             kj::Maybe<capnp::Capability::Client> bootstrap, const ConnectionLimits& limits,
             std::shared_ptr<ReadBudget> budget, capnp::rpc::twoparty::Side side);

  EventLoop& loop_;
  kj::TimePoint opened_;
  kj::Own<UvStream> stream_;
  std::size_t most_open_;
  FramedStream framing_;
  std::optional<DirectCalls> direct_;
  capnp::TwoPartyVatNetwork network_;
  capnp::RpcSystem<capnp::rpc::twoparty::VatId> rpc_;
};

/// Destroys what it is given in a later event, when none of its calls can be on the stack.
void retire(kj::TaskSet& tasks, kj::Own<Connection> connection);

/// The text of an exception as the other side meant it, without KJ's decoration, at most 512 bytes.
std::string reason(const kj::Exception& e);

}  // namespace weir::rpc
