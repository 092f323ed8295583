#include <weir/rpc/net/framing.h>

#include <capnp/message.h>
#include <capnp/serialize.h>
#include <kj/debug.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>
#include <vector>

namespace weir::rpc {
namespace {

/// Memory taken before any byte of a body has arrived; no less than a message in the buffer takes.
constexpr std::size_t kFirstWords = 8u << 10;
static_assert(kFirstWords * sizeof(capnp::word) >= UvStream::kReadBuffer);
/// FramingLimits::segments may not be more.
constexpr std::uint32_t kMostSegments = 64;
constexpr capnp::ReaderOptions kReaderOptions{1u << 20, 32};

std::uint32_t little_endian(const kj::byte* at) {
  return static_cast<std::uint32_t>(at[0]) | static_cast<std::uint32_t>(at[1]) << 8 |
         static_cast<std::uint32_t>(at[2]) << 16 | static_cast<std::uint32_t>(at[3]) << 24;
}

}  // namespace

/// Where a message lies in the input: its table of segments, and how long it is.
struct FramedStream::Frame {
  const kj::byte* begin = nullptr;
  std::uint32_t segments = 0;
  std::size_t table = 0;  // bytes
  std::size_t words = 0;  // of all segments

  std::uint32_t size_of(std::uint32_t segment) const {
    return little_endian(begin + 4 + segment * 4);
  }
  std::size_t bytes() const { return table + words * sizeof(capnp::word); }

  /// False if the table is not there whole. Throws if it breaks a bound.
  bool find(kj::ArrayPtr<const kj::byte> input, const FramingLimits& limits) {
    if (input.size() < sizeof(capnp::word)) return false;
    begin = input.begin();
    // Checked before one is added to it: 0xFFFFFFFF must not become 0.
    std::uint32_t last = little_endian(begin);
    if (last >= limits.segments) {
      kj::throwFatalException(KJ_EXCEPTION(FAILED, "message has too many segments", last));
    }
    segments = last + 1;
    table = (segments / 2 + 1) * sizeof(capnp::word);
    if (input.size() < table) return false;
    std::uint64_t sum = 0;
    for (std::uint32_t i = 0; i < segments; ++i) sum += size_of(i);
    if (sum > limits.message_words) {
      kj::throwFatalException(
          KJ_EXCEPTION(FAILED, "message is too large", sum, limits.message_words));
    }
    words = sum;
    return true;
  }
};

/// One message being read, then the message. Its memory counts against the budget while it lives.
class FramedStream::Message final : public capnp::MessageReader {
 public:
  Message(const Frame& frame, std::shared_ptr<ReadBudget> budget)
      : capnp::MessageReader(kReaderOptions),
        first_(frame.size_of(0)),
        words_(frame.words),
        budget_(std::move(budget)) {
    for (std::uint32_t i = 1; i < frame.segments; ++i) more_.push_back(frame.size_of(i));
  }
  ~Message() noexcept(false) {
    if (budget_ && charged_ > 0) budget_->give_back(charged_);
  }

  kj::ArrayPtr<const capnp::word> getSegment(kj::uint id) override {
    if (id > more_.size()) return nullptr;
    if (id == 0) return kj::arrayPtr(words_of_.begin(), first_);
    std::size_t begin = first_;
    for (kj::uint i = 0; i + 1 < id; ++i) begin += more_[i];
    return kj::arrayPtr(words_of_.begin() + begin, more_[id - 1]);
  }

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

  std::uint32_t first_;
  std::vector<std::uint32_t> more_;  // sizes of the segments after the first
  std::size_t words_;
  std::shared_ptr<ReadBudget> budget_;
  kj::Array<capnp::word> words_of_;
  std::size_t filled_ = 0;
  std::size_t charged_ = 0;
};

FramedStream::FramedStream(UvStream& stream, kj::Timer& timer, FramingLimits limits,
                           std::shared_ptr<ReadBudget> budget)
    : stream_(stream),
      timer_(timer),
      limits_(limits),
      budget_(std::move(budget)),
      read_end_(kj::newPromiseAndFulfiller<void>()) {
  KJ_REQUIRE(limits_.segments <= kMostSegments);
}

kj::Promise<kj::Maybe<capnp::MessageReaderAndFds>> FramedStream::tryReadMessage(
    kj::ArrayPtr<kj::AutoCloseFd>, capnp::ReaderOptions, kj::ArrayPtr<capnp::word>) {
  return read_on();
}

kj::Promise<FramedStream::Incoming> FramedStream::read_on() {
  kj::Promise<Incoming> reading = nullptr;
  KJ_IF_MAYBE (e, kj::runCatchingExceptions([&] { reading = next(); })) {
    return failed(kj::mv(*e));
  }
  return reading;
}

/// Goes over the messages that are whole in the stream's buffer, up to the first that KJ is to see.
kj::Promise<FramedStream::Incoming> FramedStream::next() {
  for (;;) {
    if (queue_full() || (filter_ != nullptr && stream_.buffered() >= UvStream::kWriteHigh)) {
      end_filtering();
      return hold_back();
    }
    auto input = stream_.input();
    Frame frame;
    if (!frame.find(input, limits_)) return wait_for_more();
    if (frame.bytes() > UvStream::kReadBuffer) return read_large(frame);
    if (frame.bytes() > input.size()) return wait_for_more();

    stalled_ = nullptr;
    const auto* words = reinterpret_cast<const capnp::word*>(frame.begin + frame.table);
    std::array<kj::ArrayPtr<const capnp::word>, kMostSegments> segments;
    for (std::uint32_t i = 0; i < frame.segments; ++i) {
      segments[i] = kj::arrayPtr(words, frame.size_of(i));
      words += frame.size_of(i);
    }
    capnp::SegmentArrayMessageReader view(kj::arrayPtr(segments.data(), frame.segments),
                                          kReaderOptions);
    auto root = view.getRoot<capnp::rpc::Message>();
    count(root);
    if (filtered(root)) {
      stream_.take_input(frame.bytes());
      continue;
    }
    end_filtering();
    auto message = kj::heap<Message>(frame, budget_);
    if (message->missing() > 0) {
      auto room = message->room();
      std::memcpy(room.begin(), frame.begin + frame.table, room.size());
      message->filled(room.size());
    }
    stream_.take_input(frame.bytes());
    return Incoming(
        capnp::MessageReaderAndFds{kj::Own<capnp::MessageReader>(kj::mv(message)), nullptr});
  }
}

kj::Promise<FramedStream::Incoming> FramedStream::wait_for_more() {
  end_filtering();
  if (stream_.input().size() > 0 && stalled_ == nullptr) stalled_ = timer_.now();
  return stream_.more_input().then(
      [this](bool more) -> kj::Promise<Incoming> {
        if (more) return read_on();
        if (stream_.input().size() > 0) {
          return failed(KJ_EXCEPTION(DISCONNECTED, "connection ended inside a message"));
        }
        read_end_.fulfiller->fulfill();
        return Incoming(nullptr);
      },
      [this](kj::Exception&& e) { return failed(kj::mv(e)); });
}

/// Waits until the other side has read more of its answers.
kj::Promise<FramedStream::Incoming> FramedStream::hold_back() {
  stalled_ = timer_.now();
  kj::Promise<void> room = nullptr;
  if (queue_full()) {
    auto paf = kj::newPromiseAndFulfiller<void>();
    gate_ = kj::mv(paf.fulfiller);
    room = kj::mv(paf.promise);
  } else {
    room = stream_.when_drained();
  }
  return room.then(
      [this] {
        stalled_ = nullptr;
        return read_on();
      },
      [this](kj::Exception&& e) { return failed(kj::mv(e)); });
}

/// A message that the stream's buffer does not hold.
kj::Promise<FramedStream::Incoming> FramedStream::read_large(const Frame& frame) {
  end_filtering();
  auto message = kj::heap<Message>(frame, budget_);
  stream_.take_input(frame.table);
  if (stalled_ == nullptr) stalled_ = timer_.now();
  return read_body(kj::mv(message))
      .then([this](kj::Own<Message>&& whole) -> kj::Promise<Incoming> {
        stalled_ = nullptr;
        auto root = whole->getRoot<capnp::rpc::Message>();
        count(root);
        bool taken = filtered(root);
        end_filtering();
        if (taken) return next();
        return Incoming(
            capnp::MessageReaderAndFds{kj::Own<capnp::MessageReader>(kj::mv(whole)), nullptr});
      })
      .catch_([this](kj::Exception&& e) { return failed(kj::mv(e)); });
}

kj::Promise<kj::Own<FramedStream::Message>> FramedStream::read_body(kj::Own<Message> message) {
  if (message->missing() == 0) return kj::mv(message);
  auto room = message->room();
  return stream_.tryRead(room.begin(), room.size(), room.size())
      .then([this, want = room.size(),
             message = kj::mv(message)](size_t got) mutable -> kj::Promise<kj::Own<Message>> {
        if (got < want) return KJ_EXCEPTION(DISCONNECTED, "connection ended inside a message");
        message->filled(got);
        return read_body(kj::mv(message));
      });
}

kj::Promise<FramedStream::Incoming> FramedStream::failed(kj::Exception&& e) {
  stalled_ = nullptr;
  read_end_.fulfiller->fulfill();
  kj::runCatchingExceptions([this] { end_filtering(); });
  return kj::mv(e);
}

bool FramedStream::queue_full() {
  KJ_IF_MAYBE (size, queue_size_) {
    return (*size)() > limits_.queued_bytes;
  }
  return false;
}

bool FramedStream::filtered(capnp::rpc::Message::Reader message) {
  if (ignoring_) return true;
  if (filter_ == nullptr) return false;
  filtering_ = true;
  return filter_->received(message);
}

void FramedStream::end_filtering() {
  if (std::exchange(filtering_, false)) filter_->input_ends();
}

void FramedStream::count(capnp::rpc::Message::Reader message) {
  ++messages_read_;
  switch (message.which()) {
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
  if (filter_ != nullptr) show_sent(segments);
  std::size_t bytes = 0;
  for (auto segment : segments) bytes += segment.size() * sizeof(capnp::word);
  return capnp::writeMessage(stream_, segments).then([this, bytes] { note_written(bytes); });
}

kj::Promise<void> FramedStream::writeMessages(
    kj::ArrayPtr<kj::ArrayPtr<const kj::ArrayPtr<const capnp::word>>> messages) {
  if (filter_ != nullptr) {
    for (auto segments : messages) show_sent(segments);
  }
  return capnp::writeMessages(stream_, messages);
}

void FramedStream::show_sent(kj::ArrayPtr<const kj::ArrayPtr<const capnp::word>> segments) {
  capnp::SegmentArrayMessageReader reader(segments);
  filter_->sent(reader.getRoot<capnp::rpc::Message>());
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
