#include <weir/rpc/net/framing.h>

#include <capnp/message.h>
#include <capnp/rpc.capnp.h>
#include <kj/debug.h>

#include <algorithm>
#include <cstring>
#include <vector>

namespace weir::rpc {
namespace {

/// Memory taken before any byte of a body has arrived.
constexpr std::size_t kFirstWords = 8u << 10;

std::uint32_t little_endian(const kj::byte* at) {
  return static_cast<std::uint32_t>(at[0]) | static_cast<std::uint32_t>(at[1]) << 8 |
         static_cast<std::uint32_t>(at[2]) << 16 | static_cast<std::uint32_t>(at[3]) << 24;
}

}  // namespace

/// One message being read, then the message. Its memory counts against the budget while it lives.
class FramedStream::Message final : public capnp::MessageReader {
 public:
  Message(capnp::ReaderOptions reader_options, std::vector<std::uint32_t> sizes, std::size_t words,
          std::shared_ptr<ReadBudget> budget)
      : capnp::MessageReader(reader_options),
        sizes_(std::move(sizes)),
        words_(words),
        budget_(budget) {}
  ~Message() noexcept(false) {
    if (budget_ && charged_ > 0) budget_->give_back(charged_);
  }

  kj::ArrayPtr<const capnp::word> getSegment(kj::uint id) override {
    if (id >= sizes_.size()) return nullptr;
    std::size_t begin = 0;
    for (kj::uint i = 0; i < id; ++i) begin += sizes_[i];
    return kj::arrayPtr(words_of_.begin() + begin, sizes_[id]);
  }

  std::size_t words() const { return words_; }
  std::size_t missing() const { return words_ * sizeof(capnp::word) - filled_; }
  /// Where the next bytes go, and how many of them memory has been taken for. Grows by doubling, so
  /// a header alone costs little.
  kj::ArrayPtr<kj::byte> room() {
    std::size_t have = words_of_.size() * sizeof(capnp::word);
    if (filled_ == have) grow(std::min(words_, std::max(kFirstWords, words_of_.size() * 2)));
    auto bytes = words_of_.asBytes();
    return bytes.slice(filled_, bytes.size());
  }
  void filled(std::size_t bytes) { filled_ += bytes; }

 private:
  void grow(std::size_t words) {
    std::size_t bytes = words * sizeof(capnp::word);
    if (budget_ && !budget_->take(bytes - charged_)) {
      kj::throwFatalException(KJ_EXCEPTION(OVERLOADED, "too much is being read at once"));
    }
    charged_ = bytes;
    auto larger = kj::heapArray<capnp::word>(words);
    if (filled_ > 0) std::memcpy(larger.begin(), words_of_.begin(), filled_);
    words_of_ = kj::mv(larger);
  }

  std::vector<std::uint32_t> sizes_;
  std::size_t words_;
  std::shared_ptr<ReadBudget> budget_;
  kj::Array<capnp::word> words_of_;
  std::size_t filled_ = 0;
  std::size_t charged_ = 0;
};

FramedStream::FramedStream(kj::AsyncIoStream& stream, kj::Timer& timer, FramingLimits limits,
                           std::shared_ptr<ReadBudget> budget)
    : stream_(stream),
      timer_(timer),
      limits_(limits),
      budget_(std::move(budget)),
      read_end_(kj::newPromiseAndFulfiller<void>()) {}

kj::Promise<kj::Maybe<capnp::MessageReaderAndFds>> FramedStream::tryReadMessage(
    kj::ArrayPtr<kj::AutoCloseFd> fds, capnp::ReaderOptions options,
    kj::ArrayPtr<capnp::word> scratch) {
  KJ_IF_MAYBE (size, queue_size_) {
    if ((*size)() > limits_.queued_bytes) {
      stalled_ = timer_.now();
      auto paf = kj::newPromiseAndFulfiller<void>();
      gate_ = kj::mv(paf.fulfiller);
      return paf.promise.then([this, fds, options, scratch] {
        stalled_ = nullptr;
        return tryReadMessage(fds, options, scratch);
      });
    }
  }
  return kj::evalNow([&] { return read_header(); })
      .then([this](kj::Maybe<kj::Own<Message>>&& message) -> kj::Maybe<capnp::MessageReaderAndFds> {
        stalled_ = nullptr;
        KJ_IF_MAYBE (m, message) {
          ++messages_read_;
          inspect(**m);
          return capnp::MessageReaderAndFds{kj::Own<capnp::MessageReader>(kj::mv(*m)), nullptr};
        }
        read_end_.fulfiller->fulfill();
        return nullptr;
      })
      .catch_([this](kj::Exception&& e) -> kj::Promise<kj::Maybe<capnp::MessageReaderAndFds>> {
        stalled_ = nullptr;
        read_end_.fulfiller->fulfill();
        return kj::mv(e);
      });
}

kj::Promise<kj::Maybe<kj::Own<FramedStream::Message>>> FramedStream::read_header() {
  return stream_.tryRead(header_, 1, sizeof header_)
      .then([this](size_t got) -> kj::Promise<kj::Maybe<kj::Own<Message>>> {
        if (got == 0) return kj::Maybe<kj::Own<Message>>(nullptr);
        auto rest = [this]() -> kj::Promise<kj::Maybe<kj::Own<Message>>> {
          // Checked before one is added to it: 0xFFFFFFFF must not become 0.
          std::uint32_t last = little_endian(header_);
          if (last >= limits_.segments) {
            return KJ_EXCEPTION(FAILED, "message has too many segments", last);
          }
          return read_sizes(last + 1, little_endian(header_ + 4));
        };
        if (got == sizeof header_) return rest();
        stalled_ = timer_.now();
        return stream_.tryRead(header_ + got, sizeof header_ - got, sizeof header_ - got)
            .then([got, rest](size_t more) mutable -> kj::Promise<kj::Maybe<kj::Own<Message>>> {
              if (got + more < sizeof header_) {
                return KJ_EXCEPTION(DISCONNECTED, "connection ended inside a message");
              }
              return rest();
            });
      });
}

kj::Promise<kj::Maybe<kj::Own<FramedStream::Message>>> FramedStream::read_sizes(
    std::uint32_t segments, std::uint32_t first) {
  auto start =
      [this](std::vector<std::uint32_t> sizes) -> kj::Promise<kj::Maybe<kj::Own<Message>>> {
    std::uint64_t words = 0;
    for (std::uint32_t size : sizes) words += size;
    if (words > limits_.message_words) {
      return KJ_EXCEPTION(FAILED, "message is too large", words, limits_.message_words);
    }
    capnp::ReaderOptions options;
    options.traversalLimitInWords = 1u << 20;
    options.nestingLimit = 32;
    auto message = kj::heap<Message>(options, std::move(sizes), words, budget_);
    return read_body(kj::mv(message)).then([](kj::Own<Message>&& whole) {
      return kj::Maybe<kj::Own<Message>>(kj::mv(whole));
    });
  };
  if (segments == 1) return start({first});

  // The table of the other segments' sizes, padded to a whole word.
  std::size_t bytes = (segments & ~1u) * 4;
  auto table = kj::heapArray<kj::byte>(bytes);
  auto to = table.begin();
  if (stalled_ == nullptr) stalled_ = timer_.now();
  return stream_.tryRead(to, bytes, bytes)
      .then([table = kj::mv(table), segments, first, bytes,
             start](size_t got) mutable -> kj::Promise<kj::Maybe<kj::Own<Message>>> {
        if (got < bytes) return KJ_EXCEPTION(DISCONNECTED, "connection ended inside a message");
        std::vector<std::uint32_t> sizes{first};
        for (std::uint32_t i = 0; i + 1 < segments; ++i) {
          sizes.push_back(little_endian(table.begin() + i * 4));
        }
        return start(std::move(sizes));
      });
}

kj::Promise<kj::Own<FramedStream::Message>> FramedStream::read_body(kj::Own<Message> message) {
  if (message->missing() == 0) return kj::mv(message);
  auto room = message->room();
  if (stalled_ == nullptr) stalled_ = timer_.now();
  return stream_.tryRead(room.begin(), room.size(), room.size())
      .then([this, want = room.size(),
             message = kj::mv(message)](size_t got) mutable -> kj::Promise<kj::Own<Message>> {
        if (got < want) return KJ_EXCEPTION(DISCONNECTED, "connection ended inside a message");
        message->filled(got);
        return read_body(kj::mv(message));
      });
}

void FramedStream::inspect(capnp::MessageReader& message) {
  switch (message.getRoot<capnp::rpc::Message>().which()) {
    case capnp::rpc::Message::CALL:
    case capnp::rpc::Message::BOOTSTRAP:
      if (++open_calls_ > limits_.open_calls) {
        kj::throwFatalException(KJ_EXCEPTION(FAILED, "too many unfinished calls", open_calls_));
      }
      break;
    case capnp::rpc::Message::FINISH:
      if (open_calls_ > 0) --open_calls_;
      break;
    default:
      break;
  }
}

kj::Promise<void> FramedStream::writeMessage(
    kj::ArrayPtr<const int>, kj::ArrayPtr<const kj::ArrayPtr<const capnp::word>> segments) {
  std::size_t bytes = 0;
  for (auto segment : segments) bytes += segment.size() * sizeof(capnp::word);
  return capnp::writeMessage(stream_, segments).then([this, bytes] { note_written(bytes); });
}

kj::Promise<void> FramedStream::writeMessages(
    kj::ArrayPtr<kj::ArrayPtr<const kj::ArrayPtr<const capnp::word>>> messages) {
  return capnp::writeMessages(stream_, messages);
}

// The message just written still counts as queued until its promise is gone.
void FramedStream::note_written(std::size_t bytes) {
  KJ_IF_MAYBE (gate, gate_) {
    KJ_IF_MAYBE (size, queue_size_) {
      if ((*size)() > limits_.queued_bytes + bytes) return;
    }
    auto fulfiller = kj::mv(*gate);
    gate_ = nullptr;
    fulfiller->fulfill();
  }
}

kj::Promise<void> FramedStream::end() {
  stream_.shutdownWrite();
  return kj::READY_NOW;
}

}  // namespace weir::rpc
