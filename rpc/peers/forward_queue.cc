#include <weir/rpc/peers/forward_queue.h>

#include <kj/debug.h>

#include <algorithm>
#include <utility>

#include <weir/rpc/net/connection.h>
#include <weir/rpc/peers/forward_wire.h>

namespace weir::rpc {
namespace {

/// Calls in flight at once. What is asked meanwhile waits, and checks then travel together.
constexpr std::size_t kMaxCalls = 256;
/// Requests and their answers in one call, so that either stays far below the size of a message.
constexpr std::size_t kMaxBatchBytes = 1u << 20;
/// One request and its answer.
constexpr std::size_t kMaxRequestBytes = 2u << 20;
/// Nobody waits longer.
constexpr Nanos kMaxPatience = kHour;

Error unavailable(const std::string& why) {
  return {ErrorKind::unavailable, why};
}

Error unknown(const std::string& why) {
  return {ErrorKind::unknown, why};
}

Error malformed() {
  return unknown("malformed answer");
}

Error& error_of(Reply& reply) {
  return reply.error;
}
Error& error_of(ReserveReply& reply) {
  return reply.decision.error;
}
Error& error_of(SettleReply& reply) {
  return reply.error;
}

/// Tells `done` the reply, or the error if there is one.
template <typename Answer>
void tell(const Error& error, Answer& reply, std::function<void(Answer)>& done) {
  if (!error.empty()) {
    reply = {};
    error_of(reply) = error;
  }
  std::exchange(done, {})(std::move(reply));
}

}  // namespace

struct ForwardQueue::Session {
  explicit Session(schema::Link::Client l) : link(kj::mv(l)) {}

  /// Why a call that was sent has failed. The peer may have counted what was in it, unless it says
  /// that it did not begin.
  Error failed(const kj::Exception& e) {
    switch (e.getType()) {
      case kj::Exception::Type::DISCONNECTED:
        return unknown("connection lost");
      case kj::Exception::Type::OVERLOADED:
        return {ErrorKind::overloaded, reason(e)};
      case kj::Exception::Type::UNIMPLEMENTED:
        older = true;
        return unavailable(kOlder);
      default:
        return unknown(reason(e));
    }
  }

  static constexpr const char* kOlder = "it is of an older version that decides for nobody";
  schema::Link::Client link;
  bool muted = false;
  bool older = false;     // the peer does not know these calls
  std::size_t calls = 0;  // in flight
};

/// One request. `tell` is called once.
struct ForwardQueue::Call {
  virtual ~Call() = default;
  /// Ends it with the answer that it has got, if `error` is empty.
  virtual void tell(const Error& error) = 0;

  bool open = false;
  bool sent = false;
  bool probe = false;
  std::size_t bytes = 256;
  Nanos start = 0;
  Open::iterator place;  // while it is open
};

struct ForwardQueue::CheckCall final : Call {
  void tell(const Error& error) override { weir::rpc::tell(error, reply, done); }
  CheckItem item;
  Reply reply;
  std::function<void(Reply)> done;
};

/// A request that is a call of its own.
struct ForwardQueue::SingleCall : Call {
  /// Sends it; once the promise resolves, the answer is here.
  virtual kj::Promise<void> send(schema::Link::Client& link) = 0;
};

struct ForwardQueue::ReserveCall final : SingleCall {
  void tell(const Error& error) override { weir::rpc::tell(error, reply, done); }
  kj::Promise<void> send(schema::Link::Client& link) override {
    auto request = link.reserveRequest(capnp::MessageSize{bytes / sizeof(capnp::word) + 32, 0});
    encode(item, request.initRequest());
    request.setTimeoutNs(timeout);
    return request.send().then([this](capnp::Response<schema::Link::ReserveResults>&& r) {
      if (decode_answer(r, most_statuses(item), reply)) return;
      reply = {};
      reply.decision.error = malformed();
    });
  }
  CheckItem item;
  Nanos timeout = 0;
  ReserveReply reply;
  std::function<void(ReserveReply)> done;
};

struct ForwardQueue::SettleCall final : SingleCall {
  void tell(const Error& error) override { weir::rpc::tell(error, reply, done); }
  kj::Promise<void> send(schema::Link::Client& link) override {
    auto request = link.settleRequest();
    request.setTicket(kj::StringPtr(ticket.c_str(), ticket.size()));
    request.setHits(hits);
    return request.send().then([this](capnp::Response<schema::Link::SettleResults>&& r) {
      if (decode_answer(r.getResult(), reply)) return;
      reply = {};
      reply.error = malformed();
    });
  }
  std::string ticket;
  std::uint64_t hits = 0;
  SettleReply reply;
  std::function<void(SettleReply)> done;
};

ForwardQueue::ForwardQueue(kj::Timer& timer, const ForwardLimits& limits,
                           std::function<bool()> room)
    : timer_(timer),
      limits_(limits),
      room_(std::move(room)),
      circuit_(limits.circuit),
      tasks_(*this) {}

void ForwardQueue::taskFailed(kj::Exception&& e) {
  KJ_LOG(ERROR, "forwarded request", e);
}

// ---- Requests ----

void ForwardQueue::check(CheckItem item, Nanos patience, std::function<void(Reply)> done) {
  auto call = std::make_shared<CheckCall>();
  call->item = std::move(item);
  call->bytes = forwarded_bytes(call->item);
  call->done = std::move(done);
  submit(call, patience, problem(call->item));
}

void ForwardQueue::reserve(CheckItem item, Nanos timeout, Nanos patience,
                           std::function<void(ReserveReply)> done) {
  auto call = std::make_shared<ReserveCall>();
  call->item = std::move(item);
  call->bytes = forwarded_bytes(call->item);
  call->timeout = timeout;
  call->done = std::move(done);
  submit(call, patience, problem(call->item));
}

void ForwardQueue::settle(std::string ticket, std::uint64_t hits, Nanos patience,
                          std::function<void(SettleReply)> done) {
  auto call = std::make_shared<SettleCall>();
  call->ticket = std::move(ticket);
  call->hits = hits;
  call->done = std::move(done);
  submit(call, patience, call->ticket.size() > kMaxTicket ? "ticket is too long" : "");
}

/// Why a request of so many bytes cannot be sent now.
ForwardQueue::Obstacle ForwardQueue::obstacle(std::size_t bytes) const {
  using enum ErrorKind;
  if (session_ == nullptr || session_->muted) return {unavailable, "not connected"};
  if (session_->older) return {unavailable, Session::kOlder};
  if (!circuit_.passes(now())) return {unavailable, "circuit open after missed deadlines"};
  if (bytes > kMaxRequestBytes) return {unavailable, "the request is too large for another node"};
  if (open_.size() >= limits_.requests || queue_.size() >= limits_.requests ||
      bytes_ + bytes > limits_.bytes) {
    return {overloaded, "too many requests wait for an answer"};
  }
  if (!room_()) return {overloaded, "too much waits to be sent"};
  return {};
}

void ForwardQueue::submit(const CallPtr& call, Nanos patience, const std::string& wrong) {
  Error error;
  if (!wrong.empty()) {
    error = {ErrorKind::invalid, wrong};
  } else if (patience <= 0) {
    error = unavailable("no time is left");
  } else if (Obstacle found = obstacle(call->bytes); found.kind != ErrorKind::none) {
    error = {found.kind, found.why};
  }
  if (!error.empty()) {
    ++counters_.unsent;
    return call->tell(error);
  }
  call->open = true;
  call->probe = circuit_.begin();
  call->start = now();
  call->place = open_.emplace(call->start + std::min(patience, kMaxPatience), call);
  bytes_ += call->bytes;
  queue_.push_back(call);
  watch_deadlines();
  flush_later();
}

/// Ends a request that is open, with its answer if `error` is empty.
void ForwardQueue::end(Call& call, const Error& error) {
  if (!std::exchange(call.open, false)) return;
  CallPtr keep = std::move(call.place->second);
  open_.erase(call.place);
  bytes_ -= call.bytes;
  if (!call.sent) ++counters_.unsent;
  if (call.probe) circuit_.probe_failed(now());  // no answer has closed the circuit before
  call.tell(error);
}

// ---- Sessions ----

void ForwardQueue::session_up(schema::Link::Client link) {
  session_ = std::make_shared<Session>(kj::mv(link));
  circuit_ = Circuit(limits_.circuit);
}

void ForwardQueue::mute() {
  if (session_ != nullptr) session_->muted = true;
}

void ForwardQueue::session_down(const std::string& why) {
  session_ = nullptr;
  queue_.clear();
  // Whoever is told may ask again, which ends at once.
  while (!open_.empty()) {
    Call& call = *open_.begin()->second;
    if (call.sent) ++counters_.failed;
    end(call, call.sent ? unknown(why) : unavailable(why));
  }
}

// ---- Sending ----

void ForwardQueue::flush_later() {
  if (flush_scheduled_) return;
  flush_scheduled_ = true;
  tasks_.add(kj::evalLater([this] { flush(); }));
}

void ForwardQueue::flush() {
  flush_scheduled_ = false;
  while (!queue_.empty() && session_ != nullptr && !session_->muted &&
         session_->calls < kMaxCalls) {
    if (auto single = std::dynamic_pointer_cast<SingleCall>(queue_.front())) {
      queue_.pop_front();
      if (single->open) send_single(single);
    } else {
      send_batch();
    }
  }
}

void ForwardQueue::mark_sent(Call& call) {
  call.sent = true;
  ++counters_.sent;
}

/// The checks in front, as many as one call takes.
void ForwardQueue::send_batch() {
  Batch batch;
  std::size_t bytes = 0;
  Nanos latest = 0;
  while (!queue_.empty() && batch.size() < kMaxRequestsPerCall) {
    auto call = std::dynamic_pointer_cast<CheckCall>(queue_.front());
    if (call == nullptr) break;
    if (call->open) {
      if (!batch.empty() && bytes + call->bytes > kMaxBatchBytes) break;
      bytes += call->bytes;
      latest = std::max(latest, call->place->first);
      mark_sent(*call);
      batch.push_back(std::move(call));
    }
    queue_.pop_front();
  }
  if (batch.empty()) return;
  std::vector<CallPtr> calls(batch.begin(), batch.end());
  auto answer = kj::evalNow([&] {
    auto request = session_->link.checkRequest(
        capnp::MessageSize{bytes / sizeof(capnp::word) + batch.size() * 8 + 32, 0});
    auto list = request.initRequests(static_cast<capnp::uint>(batch.size()));
    for (std::size_t i = 0; i < batch.size(); ++i) {
      encode(batch[i]->item, list[static_cast<capnp::uint>(i)]);
    }
    return request.send().then(
        [this, batch = std::move(batch)](capnp::Response<schema::Link::CheckResults>&& r) {
          answered(batch, r.getResults());
        });
  });
  await(kj::mv(answer), latest, std::move(calls));
}

void ForwardQueue::send_single(const std::shared_ptr<SingleCall>& call) {
  mark_sent(*call);
  auto answer = kj::evalNow([&] { return call->send(session_->link); }).then([this, call] {
    if (!call->open) return;  // too late
    circuit_.answered();
    end(*call, {});
  });
  await(kj::mv(answer), call->place->first, {call});
}

/// Ends the calls if the answer does not, and is given up when nobody waits for it any more.
void ForwardQueue::await(kj::Promise<void> answer, Nanos latest, std::vector<CallPtr> calls) {
  ++session_->calls;
  const kj::Duration patience = (latest - now()) * kj::NANOSECONDS + 1 * kj::MILLISECONDS;
  tasks_.add(answer.exclusiveJoin(timer_.afterDelay(patience))
                 .catch_([this, session = session_, calls = std::move(calls)](kj::Exception&& e) {
                   const Error why = session->failed(e);
                   for (const CallPtr& call : calls) {
                     if (call->open) ++counters_.failed;
                     end(*call, why);
                   }
                 })
                 .then([this, session = session_] {
                   --session->calls;
                   if (!queue_.empty()) flush_later();
                 }));
}

void ForwardQueue::answered(const Batch& batch, capnp::List<schema::CheckResult>::Reader results) {
  circuit_.answered();
  for (capnp::uint i = 0; i < batch.size(); ++i) {
    CheckCall& call = *batch[i];
    if (!call.open) continue;
    const bool good =
        i < results.size() && decode_answer(results[i], most_statuses(call.item), call.reply);
    end(call, good ? Error() : malformed());
  }
}

// ---- Deadlines ----

void ForwardQueue::watch_deadlines() {
  if (open_.empty() || open_.begin()->first >= watching_) return;
  const Nanos at = watching_ = open_.begin()->first;
  tasks_.add(timer_.afterDelay((at - now()) * kj::NANOSECONDS).then([this, at] {
    if (at != watching_) return;  // an earlier one took over
    watching_ = kNever;
    expire();
    watch_deadlines();
  }));
}

void ForwardQueue::expire() {
  const Nanos time = now();
  while (!open_.empty() && open_.begin()->first <= time) {
    Call& call = *open_.begin()->second;
    if (call.sent) {
      ++counters_.missed;
      circuit_.missed(call.start, call.place->first, time);
    }
    end(call, call.sent ? Error{ErrorKind::deadline, "no answer in time"}
                        : unavailable("not sent within the deadline"));
  }
}

}  // namespace weir::rpc
