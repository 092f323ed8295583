#include <weir/rpc/net/direct_calls.h>

#include <capnp/serialize.h>
#include <kj/debug.h>

#include <algorithm>
#include <array>

namespace weir::rpc {
namespace {

/// A first segment with room for the answer to some hundred checks.
constexpr std::size_t kScratchWords = 4096;
/// Of the scratch a message takes what it needs, so a second segment is rare.
constexpr std::size_t kMostSegments = 16;
/// Questions for the bootstrap capability that calls may refer to; an honest client has one.
constexpr std::size_t kMostBootstraps = 8;

bool erase(std::vector<std::uint32_t>& from, std::uint32_t id) {
  auto found = std::find(from.begin(), from.end(), id);
  if (found == from.end()) return false;
  from.erase(found);
  return true;
}

}  // namespace

bool DirectCalls::received(capnp::rpc::Message::Reader message) {
  switch (message.which()) {
    case capnp::rpc::Message::BOOTSTRAP: {
      std::uint32_t id = message.getBootstrap().getQuestionId();
      if (id < most_open_) at(id) = Call::others;
      if (bootstraps_.size() < kMostBootstraps) bootstraps_.push_back(id);
      asked_.push_back(id);
      return false;
    }
    case capnp::rpc::Message::CALL:
      return received_call(message.getCall());
    case capnp::rpc::Message::FINISH:
      return received_finish(message.getFinish().getQuestionId());
    default:
      return false;
  }
}

bool DirectCalls::received_call(capnp::rpc::Call::Reader call) {
  std::uint32_t id = call.getQuestionId();
  bool direct = others_open_ == 0 && id < most_open_ &&
                call.getInterfaceId() == method_.interface &&
                call.getMethodId() == method_.method && call.getSendResultsTo().isCaller() &&
                is_bootstrap(call.getTarget());
  if (id < most_open_ && at(id) != Call::none) {
    // KJ says what is wrong with an id that it has open itself.
    if (at(id) != Call::others) {
      kj::throwFatalException(KJ_EXCEPTION(FAILED, "the id of a call is in use", id));
    }
    direct = false;
  }
  if (!direct) {
    ++others_open_;
    if (id < most_open_) at(id) = Call::others;
    return false;
  }
  at(id) = Call::waiting;
  ++waiting_;
  handler_.call(id, call.getParams().getContent());
  return true;
}

bool DirectCalls::received_finish(std::uint32_t id) {
  if (id >= most_open_ || at(id) == Call::none || at(id) == Call::others) {
    if (id < most_open_) at(id) = Call::none;
    erase(bootstraps_, id);
    return false;
  }
  Call& call = at(id);
  if (call == Call::finished) {
    kj::throwFatalException(KJ_EXCEPTION(FAILED, "a call is finished twice", id));
  }
  call = call == Call::waiting ? Call::finished : Call::none;
  return true;
}

bool DirectCalls::is_bootstrap(capnp::rpc::MessageTarget::Reader target) const {
  if (target.isImportedCap()) return export_ && target.getImportedCap() == *export_;
  if (!target.isPromisedAnswer()) return false;
  auto promised = target.getPromisedAnswer();
  return promised.getTransform().size() == 0 &&
         std::find(bootstraps_.begin(), bootstraps_.end(), promised.getQuestionId()) !=
             bootstraps_.end();
}

void DirectCalls::sent(capnp::rpc::Message::Reader message) {
  if (!message.isReturn()) return;
  auto answer = message.getReturn();
  if (!erase(asked_, answer.getAnswerId())) {
    if (others_open_ > 0) --others_open_;
    return;
  }
  if (!answer.isResults()) return;
  auto capabilities = answer.getResults().getCapTable();
  if (capabilities.size() == 1 && capabilities[0].isSenderHosted()) {
    export_ = capabilities[0].getSenderHosted();
  }
}

void DirectCalls::fail(std::uint32_t id, const kj::Exception& exception) {
  capnp::MallocMessageBuilder message(scratch());
  auto to = begin(id, message).initException();
  to.setReason(exception.getDescription());
  to.setType(static_cast<capnp::rpc::Exception::Type>(exception.getType()));
  send(id, message);
}

kj::ArrayPtr<capnp::word> DirectCalls::scratch() {
  alignas(8) static thread_local std::array<capnp::word, kScratchWords> words{};
  return kj::arrayPtr(words.data(), words.size());
}

capnp::rpc::Return::Builder DirectCalls::begin(std::uint32_t id, capnp::MessageBuilder& message) {
  auto answer = message.initRoot<capnp::rpc::Message>().initReturn();
  answer.setAnswerId(id);
  return answer;
}

void DirectCalls::send(std::uint32_t id, capnp::MessageBuilder& message) {
  Call& call = at(id);
  KJ_REQUIRE(call == Call::waiting || call == Call::finished, "answered twice", id);
  auto segments = message.getSegmentsForOutput();
  KJ_REQUIRE(segments.size() <= kMostSegments, "an answer in too many pieces");
  call = call == Call::waiting ? Call::answered : Call::none;
  --waiting_;
  std::array<std::uint32_t, kMostSegments + 2> table{};
  std::array<kj::ArrayPtr<const kj::byte>, kMostSegments + 1> pieces;
  table[0] = static_cast<std::uint32_t>(segments.size() - 1);
  for (std::size_t i = 0; i < segments.size(); ++i) {
    table[i + 1] = static_cast<std::uint32_t>(segments[i].size());
    pieces[i + 1] = segments[i].asBytes();
  }
  pieces[0] = kj::arrayPtr(reinterpret_cast<const kj::byte*>(table.data()),
                           (segments.size() / 2 + 1) * sizeof(capnp::word));
  stream_.send(kj::arrayPtr(pieces.data(), segments.size() + 1));
}

DirectCalls::Call& DirectCalls::at(std::uint32_t id) {
  if (id >= calls_.size()) calls_.resize(std::min<std::size_t>(most_open_, id + 64));
  return calls_[id];
}

}  // namespace weir::rpc
