#pragma once

#include <capnp/message.h>
#include <capnp/rpc.capnp.h>

#include <cstdint>
#include <optional>
#include <vector>

#include <weir/rpc/net/framing.h>

namespace weir::rpc {

/// A method that is served without KJ's RPC system between.
struct DirectMethod {
  std::uint64_t interface = 0;
  std::uint16_t method = 0;
  template <typename Interface>
  static DirectMethod of(std::uint16_t method) {
    return {capnp::typeId<Interface>(), method};
  }
};

/// Answers calls of a DirectMethod. No call may destroy the connection.
class DirectHandler {
 public:
  /// A call, to be answered once through DirectCalls with its id, now or later. Text and data that
  /// the parameters point to stay in memory until calls_end() returns, the reader itself does not.
  /// What it throws ends the connection.
  virtual void call(std::uint32_t id, capnp::AnyPointer::Reader parameters) = 0;
  /// No further call has arrived: those that there were can be decided as one.
  virtual void calls_end() = 0;

 protected:
  ~DirectHandler() = default;
};

/// Serves one method of a connection's bootstrap capability on the messages themselves: no promise,
/// no context and no message of its own for each call, and calls that arrive together are seen
/// together. Everything else is KJ's: other methods, other capabilities, and calls of this method
/// that come behind one that KJ still serves, so that calls are begun in the order in which they
/// were made. So the handler's method must be served by the bootstrap capability as well.
class DirectCalls final : public MessageFilter {
 public:
  /// Calls whose id is `most_open` or more go to KJ; clients number their calls from 0 and use
  /// numbers again. `stream` and `handler` outlive this.
  DirectCalls(UvStream& stream, DirectMethod method, DirectHandler& handler, std::size_t most_open)
      : stream_(stream), method_(method), handler_(handler), most_open_(most_open) {}
  DirectCalls(const DirectCalls&) = delete;
  DirectCalls& operator=(const DirectCalls&) = delete;

  /// Answers a call: `fill(Results::Builder)` writes the results. If it throws, nothing is sent.
  template <typename Results, typename Fill>
  void answer(std::uint32_t id, Fill&& fill) {
    capnp::MallocMessageBuilder message(scratch());
    fill(begin(id, message).initResults().getContent().template initAs<Results>());
    send(id, message);
  }
  /// Answers a call with an exception.
  void fail(std::uint32_t id, const kj::Exception& exception);
  /// Every call that has come is answered, by whoever serves it.
  bool idle() const { return waiting_ == 0 && others_open_ == 0; }
  /// Calls that are not answered yet.
  std::size_t waiting() const { return waiting_; }

  bool received(capnp::rpc::Message::Reader message) override;
  void input_ends() override { handler_.calls_end(); }
  void sent(capnp::rpc::Message::Reader message) override;

 private:
  enum class Call : std::uint8_t {
    none,
    others,    // KJ serves it
    waiting,   // not answered yet
    finished,  // nor answered, but the caller no longer needs it
    answered,  // and the caller has not finished it yet
  };

  /// Memory for one answer after the other, all zero.
  static kj::ArrayPtr<capnp::word> scratch();
  capnp::rpc::Return::Builder begin(std::uint32_t id, capnp::MessageBuilder& message);
  void send(std::uint32_t id, capnp::MessageBuilder& message);
  bool received_call(capnp::rpc::Call::Reader call);
  bool received_finish(std::uint32_t id);
  bool is_bootstrap(capnp::rpc::MessageTarget::Reader target) const;
  Call& at(std::uint32_t id);

  UvStream& stream_;
  DirectMethod method_;
  DirectHandler& handler_;
  std::size_t most_open_;
  std::vector<Call> calls_;                // by id; shorter than the highest that was used
  std::vector<std::uint32_t> bootstraps_;  // ids of questions for the bootstrap capability
  std::vector<std::uint32_t> asked_;       // those of them that KJ has not answered
  std::optional<std::uint32_t> export_;    // what KJ calls the bootstrap capability
  std::size_t others_open_ = 0;            // calls that KJ serves and has not answered
  std::size_t waiting_ = 0;
};

}  // namespace weir::rpc
