#pragma once

#include <capnp/rpc.capnp.h>
#include <capnp/serialize-async.h>
#include <kj/async-io.h>
#include <kj/function.h>
#include <kj/timer.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include <weir/rpc/net/uv_stream.h>

namespace weir::rpc {

/// Memory that the messages being read on several connections may take together.
class ReadBudget {
 public:
  explicit ReadBudget(std::size_t bytes) : limit_(bytes) {}
  bool take(std::size_t bytes) {
    if (bytes > limit_ - used_) return false;
    used_ += bytes;
    return true;
  }
  void give_back(std::size_t bytes) { used_ -= bytes; }
  std::size_t used() const { return used_; }

 private:
  std::size_t limit_;
  std::size_t used_ = 0;
};

struct FramingLimits {
  /// Words (8 bytes) in one message, all segments together.
  std::size_t message_words = 1u << 20;
  std::uint32_t segments = 64;  ///< at most 64
  /// Calls the other side may leave open (made, and not finished). KJ keeps a little for each.
  std::size_t open_calls = 4096;
  /// No further message is read while more than this many bytes of answers wait to be sent.
  std::size_t queued_bytes = 1u << 20;
};

/// Sees the messages of a connection before KJ's RPC system does, and may keep some from it. No
/// call may destroy the stream. What it throws ends the connection.
class MessageFilter {
 public:
  /// True: it is dealt with, and KJ never sees it. What the message points to stays in memory until
  /// input_ends() returns, the reader itself does not.
  virtual bool received(capnp::rpc::Message::Reader message) = 0;
  /// No further message is there whole: what was received can be acted upon. Called after each
  /// stretch of messages, also before an exception or the end.
  virtual void input_ends() = 0;
  /// KJ sends this one.
  virtual void sent(capnp::rpc::Message::Reader message) = 0;

 protected:
  ~MessageFilter() = default;
};

/// Cap'n Proto messages over a byte stream, in the standard framing, from a peer that is not
/// trusted: KJ's own reader takes memory for whatever a header claims, and in this version
/// mishandles a segment count of 2^32. Here the header is checked first, memory is taken as bytes
/// arrive, and all bounds reject the read, which ends the connection.
class FramedStream final : public capnp::MessageStream {
 public:
  /// `stream` and `timer` outlive this. `budget` may be null.
  FramedStream(UvStream& stream, kj::Timer& timer, FramingLimits limits,
               std::shared_ptr<ReadBudget> budget);

  kj::Promise<kj::Maybe<capnp::MessageReaderAndFds>> tryReadMessage(
      kj::ArrayPtr<kj::AutoCloseFd> fds, capnp::ReaderOptions options,
      kj::ArrayPtr<capnp::word> scratch) override;
  kj::Promise<void> writeMessage(
      kj::ArrayPtr<const int> fds,
      kj::ArrayPtr<const kj::ArrayPtr<const capnp::word>> segments) override;
  kj::Promise<void> writeMessages(
      kj::ArrayPtr<kj::ArrayPtr<const kj::ArrayPtr<const capnp::word>>> messages) override;
  kj::Maybe<int> getSendBufferSize() override { return nullptr; }
  kj::Promise<void> end() override;

  /// How many bytes of output wait in front of this stream; without it reading is never held back.
  void set_queue_size(kj::Function<std::size_t()> size) { queue_size_ = kj::mv(size); }
  /// From the next message on; `filter` outlives this. Output that it sends itself holds reading
  /// back too.
  void set_filter(MessageFilter& filter) { filter_ = &filter; }
  /// Messages that come later are thrown away, without a word to KJ or the filter.
  void ignore_input() { ignoring_ = true; }
  /// From the next message on.
  void set_message_words(std::size_t words) { limits_.message_words = words; }

  /// Since when the other side has owed us something: the rest of a message, or reading its
  /// answers. Null if it owes nothing.
  kj::Maybe<kj::TimePoint> stalled_since() const { return stalled_; }
  std::uint64_t messages_read() const { return messages_read_; }
  /// Resolves when nothing more can be read: the end, an error, or a broken bound. Call once.
  kj::Promise<void> on_read_end() { return kj::mv(read_end_.promise); }

 private:
  class Message;
  struct Frame;
  using Incoming = kj::Maybe<capnp::MessageReaderAndFds>;

  kj::Promise<Incoming> read_on();
  kj::Promise<Incoming> next();
  kj::Promise<Incoming> wait_for_more();
  kj::Promise<Incoming> hold_back();
  kj::Promise<Incoming> read_large(const Frame& frame);
  kj::Promise<kj::Own<Message>> read_body(kj::Own<Message> message);
  kj::Promise<Incoming> failed(kj::Exception&& e);
  bool queue_full();
  void count(capnp::rpc::Message::Reader message);
  bool filtered(capnp::rpc::Message::Reader message);
  void end_filtering();
  void show_sent(kj::ArrayPtr<const kj::ArrayPtr<const capnp::word>> segments);
  void note_written(std::size_t bytes);

  UvStream& stream_;
  kj::Timer& timer_;
  FramingLimits limits_;
  std::shared_ptr<ReadBudget> budget_;
  kj::Maybe<kj::Function<std::size_t()>> queue_size_;
  kj::Maybe<kj::Own<kj::PromiseFulfiller<void>>> gate_;
  kj::Maybe<kj::TimePoint> stalled_;
  kj::PromiseFulfillerPair<void> read_end_;
  MessageFilter* filter_ = nullptr;
  bool ignoring_ = false;
  bool filtering_ = false;  // the filter has received what no input_ends() followed yet
  std::uint64_t messages_read_ = 0;
  std::size_t open_calls_ = 0;
};

}  // namespace weir::rpc
