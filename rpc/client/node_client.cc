#include <weir/rpc/client/node_client.h>

#include <kj/debug.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <thread>
#include <utility>

#include <weir/rpc/net/backoff.h>
#include <weir/rpc/net/connection.h>
#include <weir/rpc/net/event_loop.h>
#include <weir/rpc/net/tls_session.h>
#include <weir/rpc/wire.h>

namespace weir::rpc {
namespace {

using Clock = std::chrono::steady_clock;

/// In flight at once; a server sheds calls beyond its own bound (64 by default). What comes
/// meanwhile waits, and checks then travel together.
constexpr std::size_t kMaxBatches = 20;  // of each lane
constexpr std::size_t kMaxSingles = 24;
/// Text in one batch, so that it stays far below the size of a message.
constexpr std::size_t kMaxBatchBytes = 1u << 20;

/// A connection that lived so long starts its back-off anew.
constexpr auto kSettled = std::chrono::seconds(5);
/// How much later than the loop a waiting caller gives up: the loop knows better what went wrong.
constexpr auto kSlack = std::chrono::milliseconds(1);

constexpr const char* kCircuitOpen = "circuit open after missed deadlines";

std::string problem(const CheckItem& item) {
  if (item.domain.size() > kMaxText) return "domain is too long";
  if (item.id.size() > kMaxRequestId) return "id is too long";
  if (item.rule_filter.size() > kMaxRuleFilter) return "too many rules are named";
  if (item.more.size() >= kMaxDescriptors) return "too many descriptors";
  auto wrong = [](const auto& entries) {
    if (entries.size() > kMaxEntries) return "too many descriptor entries";
    for (const auto& [key, value] : entries) {
      if (key.size() > kMaxText || value.size() > kMaxText) return "a descriptor entry is too long";
    }
    return "";
  };
  std::string why = wrong(item.entries);
  for (const CheckDescriptor& each : item.more) {
    if (why.empty()) why = wrong(each.entries);
  }
  return why;
}

std::size_t text_bytes(const CheckItem& item) {
  std::size_t bytes = 64 + item.domain.size() + item.id.size();
  auto add = [&bytes](const auto& entries) {
    for (const auto& [key, value] : entries) bytes += 32 + key.size() + value.size();
  };
  add(item.entries);
  for (const CheckDescriptor& each : item.more) add(each.entries);
  for (const std::string& rule : item.rule_filter) bytes += 16 + rule.size();
  return bytes;
}

std::vector<Reply> failure(std::size_t n, const Error& error) {
  Reply reply;
  reply.error = error;
  return std::vector<Reply>(n, reply);
}

/// One call of a user: used by the client's thread alone once it was submitted.
struct Call {
  virtual ~Call() = default;
  /// Tells the user; called once.
  virtual void end(const Error& error) = 0;

  std::size_t requests = 1;
  Clock::time_point start;
  Clock::time_point deadline;
  bool open = true;
  bool sent = false;
  bool probe = false;  // tries whether the circuit can be closed
};

struct CheckCall final : Call {
  void end(const Error& error) override {
    for (std::size_t i = 0; i < replies.size(); ++i) {
      if (!answered[i]) replies[i].error = error;
    }
    done(std::move(replies));
  }

  std::vector<CheckItem> items;
  std::vector<Reply> replies;
  std::vector<bool> answered;
  std::size_t unanswered = 0;
  NodeClient::Done done;
};

/// A call that is a message of its own.
struct SingleCall : Call {
  /// How long after its deadline an answer is still of use, and what becomes of it.
  virtual kj::Duration patience() const { return 1 * kj::MILLISECONDS; }
  virtual void came_late() {}
  virtual std::string problem() const = 0;
  /// Sends it; the answer is in the reply once the promise resolves.
  virtual kj::Promise<void> send(schema::Service::Client& service) = 0;
};

inline Error& error_of(ReserveReply& reply) {
  return reply.decision.error;
}
inline Error& error_of(LeaseReply& reply) {
  return reply.decision.error;
}
inline Error& error_of(SettleReply& reply) {
  return reply.error;
}
inline Error& error_of(RulesReply& reply) {
  return reply.error;
}

template <typename Answer>
struct Single : SingleCall {
  void end(const Error& error) override {
    if (!error.empty()) {
      reply = {};
      error_of(reply) = error;
    }
    done(std::move(reply));
  }
  Answer reply;
  std::function<void(Answer)> done;
};

using CallPtr = std::shared_ptr<Call>;
using CheckCallPtr = std::shared_ptr<CheckCall>;
using SingleCallPtr = std::shared_ptr<SingleCall>;

struct Part {
  CheckCallPtr call;
  std::size_t item;
};

using StatusDone = std::function<void(std::string json, const Error& error)>;

kj::StringPtr text(const std::string& s) {
  return kj::StringPtr(s.c_str(), s.size());
}

kj::Duration until(Clock::time_point when) {
  auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(when - Clock::now()).count();
  return std::max<std::int64_t>(0, ns) * kj::NANOSECONDS;
}

void write(const std::vector<std::pair<std::string, std::string>>& entries,
           capnp::List<schema::Entry>::Builder to) {
  for (std::size_t k = 0; k < entries.size(); ++k) {
    to[static_cast<capnp::uint>(k)].setKey(text(entries[k].first));
    to[static_cast<capnp::uint>(k)].setValue(text(entries[k].second));
  }
}

void write(const CheckItem& item, schema::CheckRequest::Builder to) {
  to.setDomain(text(item.domain));
  to.setHits(item.hits);
  if (!item.id.empty()) to.setId(text(item.id));
  if (!item.rule_filter.empty()) {
    auto rule_filter = to.initRuleFilter(static_cast<capnp::uint>(item.rule_filter.size()));
    for (std::size_t k = 0; k < item.rule_filter.size(); ++k) {
      rule_filter.set(static_cast<capnp::uint>(k), text(item.rule_filter[k]));
    }
  }
  if (item.wants_bound) to.setWantsBound(true);
  to.setKind(encode_kind(item.kind));
  if (item.limit.any()) {
    auto limit = to.initLimit();
    limit.setLimit(item.limit.limit);
    limit.setWindowNs(item.limit.window);
    limit.setBurst(item.limit.burst);
  }
  write(item.entries, to.initEntries(static_cast<capnp::uint>(item.entries.size())));
  if (item.more.empty()) return;
  auto more = to.initMore(static_cast<capnp::uint>(item.more.size()));
  for (std::size_t k = 0; k < item.more.size(); ++k) {
    auto descriptor = more[static_cast<capnp::uint>(k)];
    const CheckDescriptor& from = item.more[k];
    descriptor.setHits(from.hits);
    write(from.entries, descriptor.initEntries(static_cast<capnp::uint>(from.entries.size())));
  }
}

Error out_of_time() {
  return {ErrorKind::deadline, "no answer in time"};
}

Error unavailable(const std::string& why) {
  return {ErrorKind::unavailable, why};
}

Error unknown(const std::string& why) {
  return {ErrorKind::unknown, why};
}

/// Why a call that was sent has failed. The node may have counted it, unless it says that it did
/// not begin.
Error failed(const kj::Exception& e) {
  switch (e.getType()) {
    case kj::Exception::Type::DISCONNECTED:
      if (reason(e) == kLeaving) return unavailable(std::string(kLeaving));
      // What TLS says of it is worth telling.
      return unknown(reason(e).starts_with("TLS: ") ? reason(e) : "connection lost");
    case kj::Exception::Type::OVERLOADED:
      return {ErrorKind::overloaded, reason(e)};
    case kj::Exception::Type::UNIMPLEMENTED:
      return {ErrorKind::unsupported, reason(e)};
    default:
      return unknown(reason(e));
  }
}

void copy_decision(schema::CheckResult::Reader in, Reply& out) {
  if (decode(in, out)) return;
  out = {};
  out.error = unknown("malformed answer");
}

std::string copy(capnp::Text::Reader in) {
  return std::string(in.cStr(), in.size());
}

struct ReserveCall final : Single<ReserveReply> {
  std::string problem() const override { return rpc::problem(item); }
  kj::Promise<void> send(schema::Service::Client& service) override {
    auto request = service.reserveRequest();
    write(item, request.initRequest());
    request.setTimeoutNs(timeout);
    return request.send().then([this](capnp::Response<schema::Service::ReserveResults>&& r) {
      copy_decision(r.getResult(), reply.decision);
      reply.ticket = copy(r.getTicket());
    });
  }
  CheckItem item;
  Nanos timeout = 0;
};

struct LeaseCall final : Single<LeaseReply> {
  std::string problem() const override { return rpc::problem(item); }
  kj::Promise<void> send(schema::Service::Client& service) override {
    auto request = service.leaseRequest();
    write(item, request.initRequest());
    request.setMost(most);
    request.setTermNs(term);
    return request.send().then([this](capnp::Response<schema::Service::LeaseResults>&& r) {
      copy_decision(r.getResult(), reply.decision);
      reply.ticket = copy(r.getTicket());
      reply.hits = r.getHits();
      reply.term = r.getTermNs();
      // A node grants no more than it was asked for; less that is not the request's is no lease.
      if (reply.hits > most || reply.hits < item.hits || reply.term > term) reply.ticket.clear();
    });
  }
  kj::Duration patience() const override {
    return late ? 500 * kj::MILLISECONDS : Single::patience();
  }
  void came_late() override {
    if (late && !reply.ticket.empty()) late(std::move(reply));
  }
  CheckItem item;
  std::uint64_t most = 0;
  Nanos term = 0;
  std::function<void(LeaseReply)> late;
};

struct RulesCall final : Single<RulesReply> {
  std::string problem() const override { return {}; }
  kj::Promise<void> send(schema::Service::Client& service) override {
    return service.rulesRequest().send().then(
        [this](capnp::Response<schema::Service::RulesResults>&& r) {
          reply.error = decode_error(r.getErrorKind(), r.getError());
          reply.yaml = copy(r.getYaml());
        });
  }
};

struct SettleCall final : Single<SettleReply> {
  std::string problem() const override {
    return ticket.size() > kMaxTicket ? "ticket is too long" : "";
  }
  kj::Promise<void> send(schema::Service::Client& service) override {
    auto request = service.settleRequest();
    request.setTicket(text(ticket));
    request.setHits(hits);
    return request.send().then([this](capnp::Response<schema::Service::SettleResults>&& r) {
      auto result = r.getResult();
      reply.error = decode_error(result.getErrorKind(), result.getError());
      reply.settled = result.getSettled();
      reply.reserved = result.getReserved();
      reply.lapsed = result.getLapsed();
      reply.degraded = result.getDegraded();
    });
  }
  std::string ticket;
  std::uint64_t hits = 0;
};

/// Requests that travel together.
struct Lane {
  std::deque<Part> queue;   // not yet sent
  std::size_t batches = 0;  // in flight
};

/// Everything that lives on the client's thread.
class Core final : private kj::TaskSet::ErrorHandler {
 public:
  Core(EventLoop& loop, const NodeClientOptions& options, std::atomic<bool>& connected,
       std::atomic<Clock::rep>& open_until);
  ~Core();

  void submit(CheckCallPtr call);
  void submit(SingleCallPtr call);
  void status(StatusDone done);

 private:
  enum class State { down, connecting, up };

  void taskFailed(kj::Exception&& e) override { KJ_LOG(ERROR, "client task", e); }

  kj::Promise<void> dial();
  kj::Promise<kj::Own<UvStream>> secure(kj::Own<UvStream> stream);
  kj::Promise<void> introduce(kj::Own<UvStream> stream);
  kj::Promise<void> serve();
  void went_down(const std::string& why);

  bool admit(const CallPtr& call);
  void end(Call& call, const Error& error);
  void flush_later();
  void send_batch(Lane& lane);
  void send_single();
  void answered(const std::vector<Part>& parts, capnp::List<schema::CheckResult>::Reader results);
  void answer(const Part& part, Reply reply);
  void ask_status(StatusDone done);

  void watch_deadlines();
  void expire();
  void heard();
  void miss(const Call& call, Clock::time_point now);
  void open_circuit(Clock::time_point now);

  EventLoop& loop_;
  const NodeClientOptions& options_;
  std::atomic<bool>& connected_;
  std::atomic<Clock::rep>& open_until_;  // the circuit, for other threads; 0: it is closed
  std::mt19937_64 random_{std::random_device{}()};

  State state_ = State::down;
  std::optional<Address> address_;
  std::string last_error_;
  Backoff backoff_;
  Clock::time_point up_since_;
  kj::Maybe<kj::Own<kj::PromiseFulfiller<void>>> give_up_;

  std::multimap<Clock::time_point, CallPtr>
      calls_;                          // by deadline; ended ones leave with their turn
  Lane lanes_[2];                      // isolated requests have the second
  std::deque<SingleCallPtr> singles_;  // not yet sent
  std::size_t waiting_ = 0;            // requests of open calls
  std::size_t singles_in_flight_ = 0;
  bool flush_scheduled_ = false;
  Clock::time_point watching_ = Clock::time_point::max();  // until then nothing expires
  std::vector<StatusDone> status_waiting_;

  unsigned misses_ = 0;
  Clock::time_point last_miss_;
  bool circuit_open_ = false;
  bool probing_ = false;
  Clock::time_point circuit_until_;
  Nanos circuit_wait_;

  kj::Own<Connection> connection_;
  kj::Maybe<schema::Service::Client> service_;
  kj::TaskSet tasks_;
  kj::Promise<void> dialling_ = nullptr;
};

Core::Core(EventLoop& loop, const NodeClientOptions& options, std::atomic<bool>& connected,
           std::atomic<Clock::rep>& open_until)
    : loop_(loop),
      options_(options),
      connected_(connected),
      open_until_(open_until),
      backoff_({options.backoff_min, options.backoff_max},
               [this](std::uint64_t n) {
                 return std::uniform_int_distribution<std::uint64_t>(0, n - 1)(random_);
               }),
      circuit_wait_(options.breaker_open),
      tasks_(*this) {
  address_ = parse_address(options.address, last_error_);
  if (!address_) return;
  state_ = State::connecting;
  dialling_ = dial().eagerlyEvaluate(nullptr);
}

Core::~Core() {
  const std::string why = "client closed";
  for (auto& [deadline, call] : calls_) end(*call, call->sent ? unknown(why) : unavailable(why));
  for (auto& done : status_waiting_) done({}, unavailable(why));
}

// ---- The connection ----

kj::Promise<void> Core::dial() {
  return kj::evalLater([this] {
           auto limit = options_.connect_timeout * kj::NANOSECONDS;
           auto connected = connect(loop_, *address_, limit);
           if (options_.tls == nullptr) return connected;
           return loop_.timer().timeoutAfter(
               limit, connected.then([this](kj::Own<UvStream>&& s) { return secure(kj::mv(s)); }));
         })
      .then([this](kj::Own<UvStream>&& stream) { return introduce(kj::mv(stream)); })
      .then([this] { return serve(); })
      .then(
          [this] {
            std::string why = connection_->stream().tls_failure();
            return why.empty() ? std::string("connection lost") : why;
          },
          [](kj::Exception&& e) { return reason(e); })
      .then([this](std::string&& why) {
        went_down(why);
        return loop_.timer().afterDelay(backoff_.next() * kj::NANOSECONDS);
      })
      .then([this] {
        state_ = State::connecting;
        return dial();
      });
}

kj::Promise<kj::Own<UvStream>> Core::secure(kj::Own<UvStream> stream) {
  std::string error;
  options_.tls->refresh(error);  // what is refused leaves the former in force
  stream->start_tls(
      TlsSession::client(options_.tls, options_.address,
                         {options_.tls_name.empty() ? host_of(*address_) : options_.tls_name}));
  auto secured = stream->secured();
  return secured.then([stream = kj::mv(stream)]() mutable { return kj::mv(stream); });
}

/// Makes the connection, and says who asks.
kj::Promise<void> Core::introduce(kj::Own<UvStream> stream) {
  connection_ = kj::heap<Connection>(loop_, kj::mv(stream), ConnectionLimits{});
  service_ = connection_->bootstrap().castAs<schema::Service>();
  if (options_.token.empty()) return kj::READY_NOW;
  auto request = KJ_ASSERT_NONNULL(service_).authenticateRequest();
  request.setToken(text(options_.token));
  auto known = request.send().then([](capnp::Response<schema::Service::AuthenticateResults>&& r) {
    const Error error = decode_error(r.getErrorKind(), r.getError());
    if (error.empty()) return;
    kj::throwFatalException(kj::Exception(kj::Exception::Type::FAILED, __FILE__, __LINE__,
                                          kj::heapString(error.to_string().c_str())));
  });
  return loop_.timer().timeoutAfter(options_.connect_timeout * kj::NANOSECONDS, kj::mv(known));
}

kj::Promise<void> Core::serve() {
  state_ = State::up;
  connected_ = true;
  up_since_ = Clock::now();
  flush_later();
  for (auto& done : std::exchange(status_waiting_, {})) ask_status(std::move(done));
  auto paf = kj::newPromiseAndFulfiller<void>();
  give_up_ = kj::mv(paf.fulfiller);
  return connection_->closed().exclusiveJoin(kj::mv(paf.promise));
}

void Core::went_down(const std::string& why) {
  if (state_ == State::up && Clock::now() - up_since_ > kSettled) backoff_.reset();
  state_ = State::down;
  connected_ = false;
  last_error_ = why;
  service_ = nullptr;
  connection_ = nullptr;
  // What was sent fails with its batch; what was not, here.
  Reply reply;
  reply.error = unavailable(why);
  for (Lane& lane : lanes_) {
    for (const Part& part : std::exchange(lane.queue, {})) answer(part, reply);
  }
  for (const SingleCallPtr& call : std::exchange(singles_, {})) end(*call, reply.error);
  for (auto& done : std::exchange(status_waiting_, {})) done({}, reply.error);
}

// ---- Calls ----

/// False if the call has ended: it cannot be sent now.
bool Core::admit(const CallPtr& call) {
  waiting_ += call->requests;
  std::string why;
  if (circuit_open_ && (probing_ || Clock::now() < circuit_until_)) {
    why = kCircuitOpen;
  } else if (state_ == State::down) {
    why = last_error_;
  } else if (waiting_ > options_.max_waiting) {
    why = "too many requests wait for an answer";
  } else if (Clock::now() >= call->deadline) {
    why = "no time is left";
  }
  if (!why.empty()) {
    end(*call, unavailable(why));
    return false;
  }
  if (circuit_open_) call->probe = probing_ = true;
  calls_.emplace(call->deadline, call);
  watch_deadlines();
  flush_later();
  return true;
}

void Core::submit(CheckCallPtr call) {
  for (std::size_t i = 0; i < call->items.size(); ++i) {
    std::string wrong = problem(call->items[i]);
    call->answered[i] = !wrong.empty();
    call->replies[i].error = {ErrorKind::invalid, std::move(wrong)};
    if (!call->answered[i]) ++call->unanswered;
  }
  if (call->unanswered == 0) {
    waiting_ += call->requests;
    return end(*call, {});
  }
  if (!admit(call)) return;
  for (std::size_t i = 0; i < call->items.size(); ++i) {
    if (!call->answered[i]) lanes_[call->items[i].isolated ? 1 : 0].queue.push_back({call, i});
  }
}

void Core::submit(SingleCallPtr call) {
  std::string wrong = call->problem();
  if (!wrong.empty()) {
    waiting_ += call->requests;
    return end(*call, {ErrorKind::invalid, wrong});
  }
  if (admit(call)) singles_.push_back(std::move(call));
}

/// Ends a call. What has no answer yet gets `error`.
void Core::end(Call& call, const Error& error) {
  if (!std::exchange(call.open, false)) return;
  waiting_ -= call.requests;
  // A probe that ends while the circuit is open has failed.
  if (call.probe && circuit_open_) open_circuit(Clock::now());
  try {
    call.end(error);
  } catch (const std::exception& e) {
    KJ_LOG(ERROR, "a client's callback threw", e.what());
  } catch (...) {
    KJ_LOG(ERROR, "a client's callback threw");
  }
}

/// Requests that arrive in the same turn of the loop travel together.
void Core::flush_later() {
  if (flush_scheduled_) return;
  flush_scheduled_ = true;
  tasks_.add(kj::evalLater([this] {
    flush_scheduled_ = false;
    for (Lane& lane : lanes_) {
      while (state_ == State::up && lane.batches < kMaxBatches && !lane.queue.empty()) {
        send_batch(lane);
      }
    }
    while (state_ == State::up && singles_in_flight_ < kMaxSingles && !singles_.empty()) {
      send_single();
    }
  }));
}

void Core::send_batch(Lane& lane) {
  auto parts = std::make_shared<std::vector<Part>>();
  std::size_t bytes = 0;
  Clock::time_point latest{};
  while (!lane.queue.empty() && parts->size() < kMaxRequestsPerCall) {
    Part& next = lane.queue.front();
    if (next.call->open) {
      std::size_t size = text_bytes(next.call->items[next.item]);
      if (!parts->empty() && bytes + size > kMaxBatchBytes) break;
      bytes += size;
      latest = std::max(latest, next.call->deadline);
      next.call->sent = true;
      parts->push_back(std::move(next));
    }
    lane.queue.pop_front();
  }
  if (parts->empty()) return;

  auto request = KJ_ASSERT_NONNULL(service_).checkRequest(
      capnp::MessageSize{bytes / sizeof(capnp::word) + parts->size() * 8 + 32, 0});
  auto list = request.initRequests(static_cast<capnp::uint>(parts->size()));
  for (std::size_t i = 0; i < parts->size(); ++i) {
    write((*parts)[i].call->items[(*parts)[i].item], list[static_cast<capnp::uint>(i)]);
  }
  ++lane.batches;
  auto response =
      request.send().then([this, parts](capnp::Response<schema::Service::CheckResults>&& r) {
        answered(*parts, r.getResults());
      });
  // Given up when nobody waits for it any more.
  tasks_.add(response.exclusiveJoin(loop_.timer().afterDelay(until(latest) + 1 * kj::MILLISECONDS))
                 .catch_([this, parts](kj::Exception&& e) {
                   Reply reply;
                   reply.error = failed(e);
                   for (const Part& part : *parts) answer(part, reply);
                 })
                 .then([this, &lane] {
                   --lane.batches;
                   flush_later();
                 }));
}

void Core::send_single() {
  SingleCallPtr call = std::move(singles_.front());
  singles_.pop_front();
  if (!call->open) return;
  call->sent = true;
  ++singles_in_flight_;
  auto response = call->send(KJ_ASSERT_NONNULL(service_)).then([this, call] {
    if (!call->open) return call->came_late();
    heard();
    end(*call, {});
  });
  tasks_.add(
      response.exclusiveJoin(loop_.timer().afterDelay(until(call->deadline) + call->patience()))
          .catch_([this, call](kj::Exception&& e) { end(*call, failed(e)); })
          .then([this] {
            --singles_in_flight_;
            flush_later();
          }));
}

void Core::answered(const std::vector<Part>& parts,
                    capnp::List<schema::CheckResult>::Reader results) {
  heard();
  for (std::size_t i = 0; i < parts.size(); ++i) {
    Reply reply;
    if (i >= results.size() || !decode(results[static_cast<capnp::uint>(i)], reply)) {
      reply = {};
      reply.error = unknown("malformed answer");
    }
    answer(parts[i], std::move(reply));
  }
}

void Core::answer(const Part& part, Reply reply) {
  CheckCall& call = *part.call;
  if (!call.open || call.answered[part.item]) return;
  call.replies[part.item] = std::move(reply);
  call.answered[part.item] = true;
  if (--call.unanswered == 0) end(call, {});
}

// ---- Status ----

void Core::status(StatusDone done) {
  if (state_ == State::down) return done({}, unavailable(last_error_));
  if (state_ == State::up) return ask_status(std::move(done));
  status_waiting_.push_back(std::move(done));
}

void Core::ask_status(StatusDone done) {
  auto shared = std::make_shared<StatusDone>(std::move(done));
  auto response = KJ_ASSERT_NONNULL(service_).statusRequest().send().then(
      [shared](capnp::Response<schema::Service::StatusResults>&& r) {
        (*shared)(std::string(r.getJson().cStr(), r.getJson().size()),
                  decode_error(r.getErrorKind(), r.getError()));
      });
  auto late = loop_.timer().afterDelay(options_.status_deadline * kj::NANOSECONDS).then([shared] {
    (*shared)({}, out_of_time());
  });
  tasks_.add(response.exclusiveJoin(kj::mv(late)).catch_([shared](kj::Exception&& e) {
    (*shared)({}, failed(e));
  }));
}

// ---- Deadlines ----

void Core::watch_deadlines() {
  if (calls_.empty() || calls_.begin()->first >= watching_) return;
  watching_ = calls_.begin()->first;
  tasks_.add(loop_.timer().afterDelay(until(watching_)).then([this] {
    watching_ = Clock::time_point::max();
    expire();
    watch_deadlines();
  }));
}

void Core::expire() {
  auto now = Clock::now();
  while (!calls_.empty()) {
    CallPtr call = calls_.begin()->second;
    if (call->open) {
      if (call->deadline > now) break;
      if (state_ != State::up) {
        end(*call, unavailable("not connected yet"));
      } else {
        miss(*call, now);
        end(*call, call->sent ? out_of_time() : unavailable("not sent within the deadline"));
      }
    }
    calls_.erase(calls_.begin());
  }
  for (Lane& lane : lanes_) {
    while (!lane.queue.empty() && !lane.queue.front().call->open) lane.queue.pop_front();
  }
  while (!singles_.empty() && !singles_.front()->open) singles_.pop_front();
}

/// The node answers.
void Core::heard() {
  misses_ = 0;
  if (std::exchange(circuit_open_, false)) open_until_ = 0;
  probing_ = false;
  circuit_wait_ = options_.breaker_open;
}

/// "In a row" means one after the other: calls that were under way together count once.
void Core::miss(const Call& call, Clock::time_point now) {
  if (options_.breaker_misses == 0 || circuit_open_ || call.start < last_miss_) return;
  last_miss_ = call.deadline;
  if (++misses_ < options_.breaker_misses) return;
  open_circuit(now);
  // If the server's host is gone, nothing would ever come on this connection.
  KJ_IF_MAYBE (give_up, give_up_) {
    (*give_up)->reject(KJ_EXCEPTION(DISCONNECTED, "no answers"));
  }
}

void Core::open_circuit(Clock::time_point now) {
  misses_ = 0;
  probing_ = false;
  if (circuit_open_) circuit_wait_ = std::min(options_.breaker_max, circuit_wait_ * 2);
  circuit_open_ = true;
  circuit_until_ = now + std::chrono::nanoseconds(circuit_wait_);
  open_until_ = circuit_until_.time_since_epoch().count();
}

}  // namespace

struct NodeClient::Impl {
  explicit Impl(NodeClientOptions o);
  ~Impl();
  void submit(std::vector<CheckItem> items, Clock::time_point start, Clock::time_point deadline,
              Done done);
  /// Sets the rest of `call` and has it made.
  template <typename Made, typename Reply>
  void start(std::shared_ptr<Made> call, Deadline deadline, std::function<void(Reply)> done);
  template <typename Reply, typename Start>
  Reply wait(Start start_call);
  Clock::time_point default_deadline(Clock::time_point start_time) const {
    return start_time + std::chrono::nanoseconds(options.deadline);
  }

  const NodeClientOptions options;
  std::atomic<bool> connected{false};
  std::atomic<Clock::rep> open_until{0};
  EventLoop* loop = nullptr;  // on the thread's stack; null if the thread could not start one
  Core* core = nullptr;
  std::string start_error;
  std::thread thread;
};

NodeClient::Impl::Impl(NodeClientOptions o) : options(std::move(o)) {
  std::promise<void> ready;
  auto started = ready.get_future();
  thread = std::thread([this, &ready] {
    bool reported = false;
    try {
      EventLoop event_loop;
      Core on_loop(event_loop, options, connected, open_until);
      loop = &event_loop;
      core = &on_loop;
      reported = true;
      ready.set_value();
      event_loop.run();
    } catch (const kj::Exception& e) {
      start_error = reason(e);
    } catch (const std::exception& e) {
      start_error = e.what();
    }
    if (!reported) ready.set_value();
  });
  started.wait();
}

NodeClient::Impl::~Impl() {
  if (loop != nullptr) loop->stop();
  thread.join();
}

void NodeClient::Impl::submit(std::vector<CheckItem> items, Clock::time_point start_time,
                              Clock::time_point deadline, Done done) {
  if (items.empty()) return done({});
  if (core == nullptr) return done(failure(items.size(), unavailable(start_error)));
  auto call = std::make_shared<CheckCall>();
  call->requests = items.size();
  call->replies.resize(items.size());
  call->answered.resize(items.size());
  call->items = std::move(items);
  call->start = start_time;
  call->deadline = deadline;
  call->done = std::move(done);
  loop->post([on = core, call = std::move(call)] { on->submit(call); });
}

template <typename Made, typename Reply>
void NodeClient::Impl::start(std::shared_ptr<Made> call, Deadline deadline,
                             std::function<void(Reply)> done) {
  call->start = Clock::now();
  call->deadline = deadline.value_or(default_deadline(call->start));
  call->done = std::move(done);
  if (core == nullptr) return call->end(unavailable(start_error));
  loop->post([on = core, call = SingleCallPtr(std::move(call))] { on->submit(call); });
}

NodeClient::NodeClient(NodeClientOptions options)
    : impl_(std::make_unique<Impl>(std::move(options))) {}

NodeClient::~NodeClient() = default;

std::vector<Reply> NodeClient::check(std::span<const CheckItem> items) {
  auto start = Clock::now();
  if (std::this_thread::get_id() == impl_->thread.get_id()) {
    return failure(items.size(), unavailable("check() from the client's own thread"));
  }
  struct Answer {
    std::mutex mutex;
    std::condition_variable ready;
    std::optional<std::vector<Reply>> replies;
  };
  auto answer = std::make_shared<Answer>();
  const auto deadline = impl_->default_deadline(start);
  impl_->submit({items.begin(), items.end()}, start, deadline,
                [answer](std::vector<Reply> replies) {
                  std::lock_guard lock(answer->mutex);
                  answer->replies = std::move(replies);
                  answer->ready.notify_one();
                });
  // The loop keeps the deadline too; it is not relied on.
  std::unique_lock lock(answer->mutex);
  bool in_time = answer->ready.wait_until(lock, deadline + kSlack,
                                          [&] { return answer->replies.has_value(); });
  return in_time ? std::move(*answer->replies) : failure(items.size(), out_of_time());
}

Reply NodeClient::check(const CheckItem& item) {
  return std::move(check(std::span(&item, 1)).front());
}

void NodeClient::check_async(std::vector<CheckItem> items, Done done, Deadline deadline) {
  auto start = Clock::now();
  impl_->submit(std::move(items), start, deadline.value_or(impl_->default_deadline(start)),
                std::move(done));
}

std::future<std::vector<Reply>> NodeClient::check_async(std::vector<CheckItem> items) {
  auto promise = std::make_shared<std::promise<std::vector<Reply>>>();
  auto future = promise->get_future();
  check_async(std::move(items),
              [promise](std::vector<Reply> replies) { promise->set_value(std::move(replies)); });
  return future;
}

/// Has `start_call(done, deadline)` called and waits for the reply. Null: it did not come.
template <typename Reply, typename Start>
Reply NodeClient::Impl::wait(Start start_call) {
  auto deadline = default_deadline(Clock::now());
  auto promise = std::make_shared<std::promise<Reply>>();
  auto future = promise->get_future();
  start_call([promise](Reply reply) { promise->set_value(std::move(reply)); }, deadline);
  if (future.wait_until(deadline + kSlack) == std::future_status::ready) return future.get();
  return {};
}

ReserveReply NodeClient::reserve(const CheckItem& item, Nanos timeout) {
  ReserveReply failed_reply;
  if (std::this_thread::get_id() == impl_->thread.get_id()) {
    failed_reply.decision.error = unavailable("a call that waits, from the client's own thread");
    return failed_reply;
  }
  auto reply = impl_->wait<std::optional<ReserveReply>>([&](auto done, Clock::time_point deadline) {
    reserve_async(item, timeout, std::move(done), deadline);
  });
  failed_reply.decision.error = out_of_time();
  return reply ? std::move(*reply) : failed_reply;
}

void NodeClient::reserve_async(CheckItem item, Nanos timeout,
                               std::function<void(ReserveReply)> done, Deadline deadline) {
  auto call = std::make_shared<ReserveCall>();
  call->item = std::move(item);
  call->timeout = timeout;
  impl_->start(std::move(call), deadline, std::move(done));
}

SettleReply NodeClient::settle(const std::string& ticket, std::uint64_t hits) {
  SettleReply failed_reply;
  if (std::this_thread::get_id() == impl_->thread.get_id()) {
    failed_reply.error = unavailable("a call that waits, from the client's own thread");
    return failed_reply;
  }
  auto reply = impl_->wait<std::optional<SettleReply>>([&](auto done, Clock::time_point deadline) {
    settle_async(ticket, hits, std::move(done), deadline);
  });
  failed_reply.error = out_of_time();
  return reply ? std::move(*reply) : failed_reply;
}

void NodeClient::settle_async(std::string ticket, std::uint64_t hits,
                              std::function<void(SettleReply)> done, Deadline deadline) {
  auto call = std::make_shared<SettleCall>();
  call->ticket = std::move(ticket);
  call->hits = hits;
  impl_->start(std::move(call), deadline, std::move(done));
}

void NodeClient::lease_async(CheckItem item, std::uint64_t most, Nanos term,
                             std::function<void(LeaseReply)> done, Deadline deadline,
                             std::function<void(LeaseReply)> late) {
  auto call = std::make_shared<LeaseCall>();
  call->item = std::move(item);
  call->most = most;
  call->term = term;
  call->late = std::move(late);
  impl_->start(std::move(call), deadline, std::move(done));
}

void NodeClient::rules_async(std::function<void(RulesReply)> done, Deadline deadline) {
  impl_->start(std::make_shared<RulesCall>(), deadline, std::move(done));
}

std::string NodeClient::status(Error* error) {
  Error unwanted;
  Error& why = error != nullptr ? *error : unwanted;
  why = {};
  if (impl_->core == nullptr) {
    why = unavailable(impl_->start_error);
    return {};
  }
  if (std::this_thread::get_id() == impl_->thread.get_id()) {
    why = unavailable("status() from the client's own thread");
    return {};
  }
  using Answer = std::pair<std::string, Error>;
  auto promise = std::make_shared<std::promise<Answer>>();
  auto future = promise->get_future();
  impl_->loop->post([on = impl_->core, promise] {
    on->status([promise](std::string json, const Error& e) {
      promise->set_value({std::move(json), e});
    });
  });
  if (future.wait_for(std::chrono::nanoseconds(impl_->options.status_deadline) + kSlack) !=
      std::future_status::ready) {
    why = out_of_time();
    return {};
  }
  Answer answer = future.get();
  why = answer.second;
  return answer.first;
}

bool NodeClient::connected() const {
  return impl_->connected;
}

bool NodeClient::usable() const {
  if (!impl_->connected) return false;
  const Clock::rep until = impl_->open_until;
  return until == 0 || Clock::now().time_since_epoch().count() >= until;
}

}  // namespace weir::rpc
