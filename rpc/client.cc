#include <weir/rpc/client.h>

#include <kj/debug.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <random>
#include <thread>
#include <utility>

#include <weir/rpc/connection.h>
#include <weir/rpc/event_loop.h>
#include <weir/rpc/wire.h>

namespace weir::rpc {
namespace {

using Clock = std::chrono::steady_clock;

/// Batches in flight at once; a server sheds calls beyond its own bound (64 by default). What comes
/// meanwhile waits and travels together.
constexpr std::size_t kMaxBatches = 32;
/// Text in one batch, so that it stays far below the size of a message.
constexpr std::size_t kMaxBatchBytes = 1u << 20;

/// A connection that lived so long starts its back-off anew.
constexpr auto kSettled = std::chrono::seconds(5);
/// How much later than the loop a waiting caller gives up: the loop knows better what went wrong.
constexpr auto kSlack = std::chrono::milliseconds(1);

constexpr const char* kDeadline = "deadline";
constexpr const char* kClosed = "unavailable: client closed";

std::string problem(const CheckItem& item) {
  if (item.domain.size() > kMaxText) return "domain is too long";
  if (item.id.size() > kMaxRequestId) return "id is too long";
  if (item.entries.size() > kMaxEntries) return "too many descriptor entries";
  for (const auto& [key, value] : item.entries) {
    if (key.size() > kMaxText || value.size() > kMaxText) return "a descriptor entry is too long";
  }
  return {};
}

std::size_t text_bytes(const CheckItem& item) {
  std::size_t bytes = 64 + item.domain.size() + item.id.size();
  for (const auto& [key, value] : item.entries) bytes += 32 + key.size() + value.size();
  return bytes;
}

std::vector<CheckReply> failure(std::size_t n, const std::string& error) {
  CheckReply reply;
  reply.error = error;
  return std::vector<CheckReply>(n, reply);
}

/// One call of a user: used by the client's thread alone once it was submitted.
struct Call {
  std::vector<CheckItem> items;
  std::vector<CheckReply> replies;
  std::vector<bool> answered;
  std::size_t unanswered = 0;
  Clock::time_point start;
  Clock::time_point deadline;
  Client::Done done;   // empty once it has been called
  bool probe = false;  // tries whether the circuit can be closed
};

using CallPtr = std::shared_ptr<Call>;

struct Part {
  CallPtr call;
  std::size_t item;
};

/// Told when there is a connection, or why there is none.
using Ready = std::function<void(const std::string& error)>;
using StatusDone = std::function<void(std::string json, std::string error)>;

kj::StringPtr text(const std::string& s) {
  return kj::StringPtr(s.c_str(), s.size());
}

kj::Duration until(Clock::time_point when) {
  auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(when - Clock::now()).count();
  return std::max<std::int64_t>(0, ns) * kj::NANOSECONDS;
}

void write(const CheckItem& item, schema::CheckRequest::Builder to) {
  to.setDomain(text(item.domain));
  to.setHits(item.hits);
  if (!item.id.empty()) to.setId(text(item.id));
  auto entries = to.initEntries(static_cast<capnp::uint>(item.entries.size()));
  for (std::size_t k = 0; k < item.entries.size(); ++k) {
    entries[static_cast<capnp::uint>(k)].setKey(text(item.entries[k].first));
    entries[static_cast<capnp::uint>(k)].setValue(text(item.entries[k].second));
  }
}

std::string unavailable(const std::string& why) {
  return "unavailable: " + why;
}

std::string unavailable(const kj::Exception& e) {
  bool lost = e.getType() == kj::Exception::Type::DISCONNECTED;
  return unavailable(lost ? "connection lost" : reason(e));
}

/// Everything that lives on the client's thread.
class Core final : private kj::TaskSet::ErrorHandler {
 public:
  Core(EventLoop& loop, const ClientOptions& options, std::atomic<bool>& connected);
  ~Core();

  void submit(CallPtr call);
  void status(StatusDone done);
  void reserve(CheckItem item, Nanos timeout, Clock::time_point deadline,
               std::function<void(ReserveReply)> done);
  void settle(std::string ticket, std::uint64_t hits, Clock::time_point deadline,
              std::function<void(SettleReply)> done);

 private:
  enum class State { down, connecting, up };

  void taskFailed(kj::Exception&& e) override { KJ_LOG(ERROR, "client task", e); }

  kj::Promise<void> dial();
  kj::Promise<void> serve(kj::Own<UvStream> stream);
  void went_down(const std::string& why);
  kj::Duration next_backoff();

  void flush_later();
  void send_batch();
  void answered(const std::vector<Part>& parts, capnp::List<schema::CheckResult>::Reader results);
  void answer(const Part& part, CheckReply reply);
  void finish(Call& call, const std::string& error);
  void ask_status(StatusDone done);
  void when_up(Ready ready);

  void watch_deadlines();
  void expire();
  void miss(const Call& call, Clock::time_point now);
  void open_circuit(Clock::time_point now);

  EventLoop& loop_;
  const ClientOptions& options_;
  std::atomic<bool>& connected_;
  std::mt19937_64 random_{std::random_device{}()};

  State state_ = State::down;
  std::optional<Address> address_;
  std::string last_error_;
  Nanos backoff_;
  Clock::time_point up_since_;
  kj::Maybe<kj::Own<kj::PromiseFulfiller<void>>> give_up_;

  std::deque<CallPtr> calls_;  // in order of deadlines; finished ones leave with their turn
  std::deque<Part> queue_;     // not yet sent
  std::size_t waiting_ = 0;    // requests of unfinished calls
  std::size_t batches_ = 0;    // in flight
  bool flush_scheduled_ = false;
  bool watching_ = false;
  std::vector<StatusDone> status_waiting_;
  std::vector<Ready> waiting_for_up_;

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

Core::Core(EventLoop& loop, const ClientOptions& options, std::atomic<bool>& connected)
    : loop_(loop),
      options_(options),
      connected_(connected),
      backoff_(options.backoff_min),
      circuit_wait_(options.breaker_open),
      tasks_(*this) {
  address_ = parse_address(options.address, last_error_);
  if (!address_) return;
  state_ = State::connecting;
  dialling_ = dial().eagerlyEvaluate(nullptr);
}

Core::~Core() {
  for (auto& call : calls_) finish(*call, kClosed);
  for (auto& done : status_waiting_) done({}, kClosed);
  for (auto& ready : waiting_for_up_) ready(kClosed);
}

// ---- The connection ----

kj::Promise<void> Core::dial() {
  return kj::evalLater([this] {
           return connect(loop_, *address_, options_.connect_timeout * kj::NANOSECONDS);
         })
      .then([this](kj::Own<UvStream>&& stream) { return serve(kj::mv(stream)); })
      .then([] { return std::string("connection lost"); },
            [](kj::Exception&& e) { return reason(e); })
      .then([this](std::string&& why) {
        went_down(why);
        return loop_.timer().afterDelay(next_backoff());
      })
      .then([this] {
        state_ = State::connecting;
        return dial();
      });
}

kj::Promise<void> Core::serve(kj::Own<UvStream> stream) {
  connection_ = kj::heap<Connection>(loop_, kj::mv(stream), ConnectionLimits{});
  service_ = connection_->bootstrap().castAs<schema::Service>();
  state_ = State::up;
  connected_ = true;
  up_since_ = Clock::now();
  flush_later();
  for (auto& done : std::exchange(status_waiting_, {})) ask_status(std::move(done));
  for (auto& ready : std::exchange(waiting_for_up_, {})) ready({});
  auto paf = kj::newPromiseAndFulfiller<void>();
  give_up_ = kj::mv(paf.fulfiller);
  return connection_->closed().exclusiveJoin(kj::mv(paf.promise));
}

void Core::went_down(const std::string& why) {
  if (state_ == State::up && Clock::now() - up_since_ > kSettled) backoff_ = options_.backoff_min;
  state_ = State::down;
  connected_ = false;
  last_error_ = why;
  service_ = nullptr;
  connection_ = nullptr;
  // What was sent fails with its batch; what was not, here.
  CheckReply reply;
  reply.error = unavailable(why);
  for (const Part& part : std::exchange(queue_, {})) answer(part, reply);
  for (auto& done : std::exchange(status_waiting_, {})) done({}, reply.error);
  for (auto& ready : std::exchange(waiting_for_up_, {})) ready(reply.error);
}

kj::Duration Core::next_backoff() {
  Nanos high = std::max(options_.backoff_min, std::min(options_.backoff_max, backoff_ * 3));
  backoff_ = std::uniform_int_distribution<Nanos>(options_.backoff_min, high)(random_);
  return backoff_ * kj::NANOSECONDS;
}

// ---- Calls ----

void Core::submit(CallPtr call) {
  for (std::size_t i = 0; i < call->items.size(); ++i) {
    std::string wrong = problem(call->items[i]);
    call->answered[i] = !wrong.empty();
    call->replies[i].error = std::move(wrong);
    if (!call->answered[i]) ++call->unanswered;
  }
  waiting_ += call->items.size();
  if (call->unanswered == 0) return finish(*call, "");
  if (circuit_open_ && (probing_ || Clock::now() < circuit_until_)) {
    return finish(*call, unavailable("circuit open after missed deadlines"));
  }
  if (state_ == State::down) return finish(*call, unavailable(last_error_));
  if (waiting_ > options_.max_waiting) {
    return finish(*call, unavailable("too many requests wait for an answer"));
  }
  if (circuit_open_) call->probe = probing_ = true;
  calls_.push_back(call);
  for (std::size_t i = 0; i < call->items.size(); ++i) {
    if (!call->answered[i]) queue_.push_back({call, i});
  }
  watch_deadlines();
  flush_later();
}

/// Requests that arrive in the same turn of the loop travel together.
void Core::flush_later() {
  if (flush_scheduled_) return;
  flush_scheduled_ = true;
  tasks_.add(kj::evalLater([this] {
    flush_scheduled_ = false;
    while (state_ == State::up && batches_ < kMaxBatches && !queue_.empty()) send_batch();
  }));
}

void Core::send_batch() {
  auto parts = std::make_shared<std::vector<Part>>();
  std::size_t bytes = 0;
  Clock::time_point latest{};
  while (!queue_.empty() && parts->size() < kMaxRequestsPerCall) {
    Part& next = queue_.front();
    if (next.call->done) {
      std::size_t size = text_bytes(next.call->items[next.item]);
      if (!parts->empty() && bytes + size > kMaxBatchBytes) break;
      bytes += size;
      latest = std::max(latest, next.call->deadline);
      parts->push_back(std::move(next));
    }
    queue_.pop_front();
  }
  if (parts->empty()) return;

  auto request = KJ_ASSERT_NONNULL(service_).checkRequest(
      capnp::MessageSize{bytes / sizeof(capnp::word) + parts->size() * 8 + 32, 0});
  auto list = request.initRequests(static_cast<capnp::uint>(parts->size()));
  for (std::size_t i = 0; i < parts->size(); ++i) {
    write((*parts)[i].call->items[(*parts)[i].item], list[static_cast<capnp::uint>(i)]);
  }
  ++batches_;
  auto response =
      request.send().then([this, parts](capnp::Response<schema::Service::CheckResults>&& r) {
        answered(*parts, r.getResults());
      });
  // Given up when nobody waits for it any more.
  tasks_.add(response.exclusiveJoin(loop_.timer().afterDelay(until(latest) + 1 * kj::MILLISECONDS))
                 .catch_([this, parts](kj::Exception&& e) {
                   CheckReply reply;
                   reply.error = unavailable(e);
                   for (const Part& part : *parts) answer(part, reply);
                 })
                 .then([this] {
                   --batches_;
                   flush_later();
                 }));
}

void Core::answered(const std::vector<Part>& parts,
                    capnp::List<schema::CheckResult>::Reader results) {
  misses_ = 0;
  circuit_open_ = probing_ = false;
  circuit_wait_ = options_.breaker_open;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    CheckReply reply;
    if (i >= results.size() || !decode(results[static_cast<capnp::uint>(i)], reply)) {
      reply = {};
      reply.error = unavailable("malformed answer");
    }
    answer(parts[i], std::move(reply));
  }
}

void Core::answer(const Part& part, CheckReply reply) {
  Call& call = *part.call;
  if (!call.done || call.answered[part.item]) return;
  call.replies[part.item] = std::move(reply);
  call.answered[part.item] = true;
  if (--call.unanswered == 0) finish(call, "");
}

/// Ends a call; requests that have no answer get `error`.
void Core::finish(Call& call, const std::string& error) {
  if (!call.done) return;
  waiting_ -= call.items.size();
  for (std::size_t i = 0; i < call.replies.size(); ++i) {
    if (!call.answered[i]) call.replies[i].error = error;
  }
  // A probe that ends while the circuit is open has failed.
  if (call.probe && circuit_open_) open_circuit(Clock::now());
  Client::Done done = std::exchange(call.done, nullptr);
  try {
    done(std::move(call.replies));
  } catch (const std::exception& e) {
    KJ_LOG(ERROR, "a callback of check_async() threw", e.what());
  } catch (...) {
    KJ_LOG(ERROR, "a callback of check_async() threw");
  }
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
        (*shared)(std::string(r.getJson().cStr(), r.getJson().size()), {});
      });
  auto late = loop_.timer().afterDelay(options_.status_deadline * kj::NANOSECONDS).then([shared] {
    (*shared)({}, kDeadline);
  });
  tasks_.add(response.exclusiveJoin(kj::mv(late)).catch_([shared](kj::Exception&& e) {
    (*shared)({}, unavailable(e));
  }));
}

// ---- Reservations ----

void Core::when_up(Ready ready) {
  if (state_ == State::down) return ready(unavailable(last_error_));
  if (state_ == State::up) return ready({});
  waiting_for_up_.push_back(std::move(ready));
}

void Core::reserve(CheckItem item, Nanos timeout, Clock::time_point deadline,
                   std::function<void(ReserveReply)> done) {
  ReserveReply refused;
  refused.decision.error = problem(item);
  if (!refused.decision.error.empty()) return done(refused);
  when_up([this, item = std::move(item), timeout, deadline,
           done = std::move(done)](const std::string& error) {
    ReserveReply failed;
    failed.decision.error = error;
    // Nobody waits for it any more.
    if (error.empty() && Clock::now() >= deadline) failed.decision.error = kDeadline;
    if (!failed.decision.error.empty()) return done(failed);
    auto request = KJ_ASSERT_NONNULL(service_).reserveRequest();
    write(item, request.initRequest());
    request.setTimeoutNs(timeout);
    auto response =
        request.send().then([done](capnp::Response<schema::Service::ReserveResults>&& r) {
          ReserveReply reply;
          if (!decode(r.getResult(), reply.decision)) {
            reply.decision = {};
            reply.decision.error = unavailable("malformed answer");
          }
          reply.ticket = std::string(r.getTicket().cStr(), r.getTicket().size());
          done(std::move(reply));
        });
    auto late = loop_.timer().afterDelay(until(deadline)).then([done] {
      ReserveReply reply;
      reply.decision.error = kDeadline;
      done(std::move(reply));
    });
    tasks_.add(response.exclusiveJoin(kj::mv(late)).catch_([done](kj::Exception&& e) {
      ReserveReply reply;
      reply.decision.error = unavailable(e);
      done(std::move(reply));
    }));
  });
}

void Core::settle(std::string ticket, std::uint64_t hits, Clock::time_point deadline,
                  std::function<void(SettleReply)> done) {
  SettleReply refused;
  if (ticket.size() > kMaxTicket) refused.error = "ticket is too long";
  if (!refused.error.empty()) return done(refused);
  when_up([this, ticket = std::move(ticket), hits, deadline,
           done = std::move(done)](const std::string& error) {
    SettleReply failed;
    failed.error = error;
    if (error.empty() && Clock::now() >= deadline) failed.error = kDeadline;
    if (!failed.error.empty()) return done(failed);
    auto request = KJ_ASSERT_NONNULL(service_).settleRequest();
    request.setTicket(text(ticket));
    request.setHits(hits);
    auto response =
        request.send().then([done](capnp::Response<schema::Service::SettleResults>&& r) {
          auto result = r.getResult();
          SettleReply reply;
          reply.error = std::string(result.getError().cStr(), result.getError().size());
          reply.settled = result.getSettled();
          reply.reserved = result.getReserved();
          reply.lapsed = result.getLapsed();
          reply.degraded = result.getDegraded();
          done(std::move(reply));
        });
    auto late = loop_.timer().afterDelay(until(deadline)).then([done] {
      SettleReply reply;
      reply.error = kDeadline;
      done(std::move(reply));
    });
    tasks_.add(response.exclusiveJoin(kj::mv(late)).catch_([done](kj::Exception&& e) {
      SettleReply reply;
      reply.error = unavailable(e);
      done(std::move(reply));
    }));
  });
}

// ---- Deadlines ----

void Core::watch_deadlines() {
  if (watching_ || calls_.empty()) return;
  watching_ = true;
  tasks_.add(loop_.timer().afterDelay(until(calls_.front()->deadline)).then([this] {
    watching_ = false;
    expire();
    watch_deadlines();
  }));
}

void Core::expire() {
  auto now = Clock::now();
  while (!calls_.empty()) {
    CallPtr call = calls_.front();
    if (call->done) {
      if (call->deadline > now) break;
      if (state_ == State::up) {
        miss(*call, now);
        finish(*call, kDeadline);
      } else {
        finish(*call, unavailable("not connected yet"));
      }
    }
    calls_.pop_front();
  }
  while (!queue_.empty() && !queue_.front().call->done) queue_.pop_front();
}

/// "In a row" means one after the other: calls that were under way together count once.
void Core::miss(const Call& call, Clock::time_point now) {
  if (options_.breaker_misses == 0 || circuit_open_ || call.start < last_miss_) return;
  last_miss_ = now;
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
}

}  // namespace

struct Client::Impl {
  explicit Impl(ClientOptions o);
  ~Impl();
  void submit(std::vector<CheckItem> items, Clock::time_point start, Done done);
  template <typename Reply, typename Start>
  Reply wait(std::string Reply::*error, Start start_on);

  const ClientOptions options;
  std::atomic<bool> connected{false};
  EventLoop* loop = nullptr;  // on the thread's stack; null if the thread could not start one
  Core* core = nullptr;
  std::string start_error;
  std::thread thread;
};

Client::Impl::Impl(ClientOptions o) : options(std::move(o)) {
  std::promise<void> ready;
  auto started = ready.get_future();
  thread = std::thread([this, &ready] {
    bool told = false;
    try {
      EventLoop event_loop;
      Core on_loop(event_loop, options, connected);
      loop = &event_loop;
      core = &on_loop;
      told = true;
      ready.set_value();
      event_loop.run();
    } catch (const kj::Exception& e) {
      start_error = reason(e);
    } catch (const std::exception& e) {
      start_error = e.what();
    }
    if (!told) ready.set_value();
  });
  started.wait();
}

Client::Impl::~Impl() {
  if (loop != nullptr) loop->stop();
  thread.join();
}

void Client::Impl::submit(std::vector<CheckItem> items, Clock::time_point start, Done done) {
  if (items.empty()) return done({});
  if (core == nullptr) return done(failure(items.size(), unavailable(start_error)));
  auto call = std::make_shared<Call>();
  call->replies.resize(items.size());
  call->answered.resize(items.size());
  call->items = std::move(items);
  call->start = start;
  call->deadline = start + std::chrono::nanoseconds(options.deadline);
  call->done = std::move(done);
  loop->post([on = core, call = std::move(call)] { on->submit(call); });
}

Client::Client(ClientOptions options) : impl_(std::make_unique<Impl>(std::move(options))) {}

Client::~Client() = default;

std::vector<CheckReply> Client::check(std::span<const CheckItem> items) {
  auto start = Clock::now();
  if (std::this_thread::get_id() == impl_->thread.get_id()) {
    return failure(items.size(), unavailable("check() from the client's own thread"));
  }
  struct Answer {
    std::mutex mutex;
    std::condition_variable ready;
    std::optional<std::vector<CheckReply>> replies;
  };
  auto answer = std::make_shared<Answer>();
  impl_->submit({items.begin(), items.end()}, start, [answer](std::vector<CheckReply> replies) {
    std::lock_guard lock(answer->mutex);
    answer->replies = std::move(replies);
    answer->ready.notify_one();
  });
  // The loop keeps the deadline too; it is not relied on.
  std::unique_lock lock(answer->mutex);
  bool in_time = answer->ready.wait_until(
      lock, start + std::chrono::nanoseconds(impl_->options.deadline) + kSlack,
      [&] { return answer->replies.has_value(); });
  return in_time ? std::move(*answer->replies) : failure(items.size(), kDeadline);
}

CheckReply Client::check(const CheckItem& item) {
  return std::move(check(std::span(&item, 1)).front());
}

void Client::check_async(std::vector<CheckItem> items, Done done) {
  impl_->submit(std::move(items), Clock::now(), std::move(done));
}

std::future<std::vector<CheckReply>> Client::check_async(std::vector<CheckItem> items) {
  auto promise = std::make_shared<std::promise<std::vector<CheckReply>>>();
  auto future = promise->get_future();
  check_async(std::move(items), [promise](std::vector<CheckReply> replies) {
    promise->set_value(std::move(replies));
  });
  return future;
}

/// Has `start_on(core, deadline, done)` called on the client's thread and waits for its reply.
template <typename Reply, typename Start>
Reply Client::Impl::wait(std::string Reply::*error, Start start_on) {
  Reply failed;
  auto deadline = Clock::now() + std::chrono::nanoseconds(options.deadline);
  if (core == nullptr) {
    failed.*error = unavailable(start_error);
    return failed;
  }
  if (std::this_thread::get_id() == thread.get_id()) {
    failed.*error = unavailable("a call that waits, from the client's own thread");
    return failed;
  }
  auto promise = std::make_shared<std::promise<Reply>>();
  auto future = promise->get_future();
  loop->post([on = core, promise, deadline, start_on = std::move(start_on)] {
    start_on(*on, deadline, [promise](Reply reply) { promise->set_value(std::move(reply)); });
  });
  if (future.wait_until(deadline + kSlack) == std::future_status::ready) return future.get();
  failed.*error = kDeadline;
  return failed;
}

ReserveReply Client::reserve(const CheckItem& item, Nanos timeout) {
  struct Answer {
    std::string error;
    ReserveReply reply;
  };
  Answer answer = impl_->wait<Answer>(
      &Answer::error, [item, timeout](Core& core, Clock::time_point deadline, auto done) {
        core.reserve(item, timeout, deadline, [done](ReserveReply reply) {
          done({{}, std::move(reply)});
        });
      });
  if (!answer.error.empty()) answer.reply.decision.error = answer.error;
  return std::move(answer.reply);
}

SettleReply Client::settle(const std::string& ticket, std::uint64_t hits) {
  return impl_->wait<SettleReply>(
      &SettleReply::error, [ticket, hits](Core& core, Clock::time_point deadline, auto done) {
        core.settle(ticket, hits, deadline, done);
      });
}

std::string Client::status(std::string* error) {
  std::string unwanted;
  std::string& why = error != nullptr ? *error : unwanted;
  why.clear();
  if (impl_->core == nullptr) {
    why = unavailable(impl_->start_error);
    return {};
  }
  if (std::this_thread::get_id() == impl_->thread.get_id()) {
    why = unavailable("status() from the client's own thread");
    return {};
  }
  using Answer = std::pair<std::string, std::string>;
  auto promise = std::make_shared<std::promise<Answer>>();
  auto future = promise->get_future();
  impl_->loop->post([on = impl_->core, promise] {
    on->status([promise](std::string json, std::string e) {
      promise->set_value({std::move(json), std::move(e)});
    });
  });
  if (future.wait_for(std::chrono::nanoseconds(impl_->options.status_deadline) + kSlack) !=
      std::future_status::ready) {
    why = kDeadline;
    return {};
  }
  Answer answer = future.get();
  why = answer.second;
  return answer.first;
}

bool Client::connected() const {
  return impl_->connected;
}

}  // namespace weir::rpc
