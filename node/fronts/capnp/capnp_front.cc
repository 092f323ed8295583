#include <weir/node/fronts/capnp/capnp_front.h>

#include <kj/debug.h>

#include <algorithm>
#include <list>
#include <string_view>
#include <utility>
#include <vector>

#include <weir/limits/limiter.h>
#include <weir/node/access/session.h>
#include <weir/rpc/check.h>
#include <weir/rpc/net/address_counts.h>
#include <weir/rpc/net/connection.h>
#include <weir/rpc/net/listener.h>
#include <weir/rpc/net/tls_session.h>
#include <weir/rpc/wire.h>

namespace weir::node {
namespace {

namespace schema = rpc::schema;

/// An answer must fit a message (1M words) with room to spare.
constexpr std::size_t kMaxAnswerBytes = 6u << 20;
/// What a request and its reply take besides text and entries.
constexpr std::size_t kBytesPerRequest = sizeof(Request) + 2 * sizeof(Reply) + sizeof(std::size_t);
/// Requests of several calls that are decided together, before the last call's are added: a read
/// may bring hundreds of calls whose requests take no room in it.
constexpr std::size_t kMostTogether = 256;
constexpr auto kSweepInterval = 500 * kj::MILLISECONDS;
constexpr auto kLetGoInterval = 2 * kj::MILLISECONDS;
/// The ordinal of Service.check.
constexpr std::uint16_t kCheckMethod = 0;

std::string_view view(capnp::Text::Reader text) {
  return {text.begin(), text.size()};
}

/// Requests of one call, or of several that came together, as views into their messages. What is
/// malformed is left out, and has its answer already. Used again for the next ones.
class Batch {
 public:
  struct Malformed {
    std::size_t index = 0;  // in the call
    std::string why;
  };
  /// Of one call: `size` requests, of which those that are well-formed begin at `first`.
  struct Call {
    std::size_t first = 0;
    std::size_t size = 0;
    std::vector<Malformed> malformed;
    std::size_t good() const { return size - malformed.size(); }
  };

  void clear() {
    entries_.clear();
    descriptors_.clear();
    shapes_.clear();
    requests_.clear();
    bytes_ = 0;
  }

  template <typename Requests>
  Call add(Requests in) {
    Call call{requests_.size(), in.size(), {}};
    for (capnp::uint i = 0; i < in.size(); ++i) {
      const std::size_t entries = entries_.size();
      const std::size_t descriptors = descriptors_.size();
      const std::size_t bytes = bytes_;
      std::string why = add_one(in[i]);
      if (why.empty()) continue;
      entries_.resize(entries);
      descriptors_.resize(descriptors);
      bytes_ = bytes;
      call.malformed.push_back({i, std::move(why)});
    }
    bytes_ += in.size() * kBytesPerRequest;
    return call;
  }

  /// All of them. Valid until the next change.
  std::span<const Request> requests() {
    // What spans point to may have moved while the lists grew.
    const Entry* entry = entries_.data();
    Descriptor* descriptor = descriptors_.data();
    for (std::size_t i = 0; i < requests_.size(); ++i) {
      requests_[i].descriptor = {entry, shapes_[i].entries};
      entry += shapes_[i].entries;
      requests_[i].more = {descriptor, shapes_[i].more};
      for (std::size_t k = 0; k < shapes_[i].more; ++k, ++descriptor) {
        descriptor->entries = {entry, descriptor->entries.size()};
        entry += descriptor->entries.size();
      }
    }
    return requests_;
  }
  std::size_t size() const { return requests_.size(); }
  /// About what a copy takes.
  std::size_t bytes() const { return bytes_ + entries_.size() * sizeof(Entry); }

 private:
  struct Shape {
    std::size_t entries = 0;  // of the first descriptor
    std::size_t more = 0;     // further descriptors
  };

  /// Empty, or what is wrong with it: then entries and descriptors of it are left behind.
  std::string add_one(schema::CheckRequest::Reader in) {
    Request request;
    request.domain = view(in.getDomain());
    request.id = view(in.getId());
    request.hits = in.getHits();
    request.wants_bound = in.getWantsBound();
    const std::optional<RequestKind> kind = rpc::decode_kind(in.getKind());
    if (!kind) return "a kind of request that this version does not know";
    request.kind = *kind;
    if (in.hasLimit()) {
      const auto limit = in.getLimit();
      if (limit.getWindowNs() < 0) return "limit.windowNs is below 0";
      request.limit = {limit.getLimit(), limit.getWindowNs(), limit.getBurst()};
    }
    if (request.domain.size() > rpc::kMaxText) {
      return "domain is longer than " + std::to_string(rpc::kMaxText) + " bytes";
    }
    if (request.id.size() > rpc::kMaxRequestId) {
      return "id is longer than " + std::to_string(rpc::kMaxRequestId) + " bytes";
    }
    if (in.getRuleFilter().size() > 0) return "ruleFilter is for members of the cluster";
    const auto entries = in.getEntries();
    const auto more = in.getMore();
    if (more.size() >= kMaxDescriptors) {
      return "more than " + std::to_string(kMaxDescriptors) + " descriptors";
    }
    std::string problem = keep(entries);
    for (auto descriptor : more) {
      if (!problem.empty()) return problem;
      const auto list = descriptor.getEntries();
      problem = keep(list);
      // How many they are; where they are is set once all are there.
      descriptors_.push_back(
          {{static_cast<const Entry*>(nullptr), list.size()}, descriptor.getHits()});
    }
    if (!problem.empty()) return problem;
    requests_.push_back(request);
    shapes_.push_back({entries.size(), more.size()});
    bytes_ += request.domain.size() + request.id.size();
    return {};
  }

  /// Empty, or what is wrong with them.
  std::string keep(capnp::List<schema::Entry>::Reader in) {
    if (in.size() > rpc::kMaxEntries) {
      return "more than " + std::to_string(rpc::kMaxEntries) + " descriptor entries";
    }
    for (auto entry : in) {
      entries_.push_back({view(entry.getKey()), view(entry.getValue())});
      const Entry& kept = entries_.back();
      if (kept.key.size() > rpc::kMaxText || kept.value.size() > rpc::kMaxText) {
        return "a descriptor entry is longer than " + std::to_string(rpc::kMaxText) + " bytes";
      }
      bytes_ += kept.key.size() + kept.value.size();
    }
    return {};
  }

  std::vector<Entry> entries_;
  std::vector<Descriptor> descriptors_;
  std::vector<Shape> shapes_;
  std::vector<Request> requests_;
  std::size_t bytes_ = 0;
};

/// A list of one.
struct Single {
  schema::CheckRequest::Reader request;
  capnp::uint size() const { return 1; }
  schema::CheckRequest::Reader operator[](capnp::uint) const { return request; }
};

std::size_t answer_bytes(std::span<const Reply> replies) {
  std::size_t bytes = 64;
  for (const Reply& reply : replies) {
    bytes += 48 + reply.error.detail.size();
    for (const Status& status : reply.statuses) bytes += 88 + status.rule.size();
  }
  return bytes;
}

Reply invalid(const std::string& why) {
  Reply reply;
  reply.fail(ErrorKind::invalid, why);
  return reply;
}

kj::Exception overloaded(const char* why) {
  return kj::Exception(kj::Exception::Type::OVERLOADED, __FILE__, __LINE__, kj::heapString(why));
}

/// The results of a call of check: `replies` of its well-formed requests, errors for the others.
void write_results(const Batch::Call& call, std::span<const Reply> replies,
                   schema::Service::CheckResults::Builder out) {
  if (answer_bytes(replies) > kMaxAnswerBytes) {
    kj::throwFatalException(
        KJ_EXCEPTION(FAILED, "the answer is too large: send fewer requests in a call"));
  }
  auto results = out.initResults(static_cast<capnp::uint>(call.size));
  std::size_t bad = 0;
  for (std::size_t i = 0; i < call.size; ++i) {
    auto to = results[static_cast<capnp::uint>(i)];
    if (bad < call.malformed.size() && call.malformed[bad].index == i) {
      rpc::encode(invalid(call.malformed[bad++].why), to);
    } else {
      rpc::encode(replies[i - bad], to);
    }
  }
}

}  // namespace

struct CapnpFront::Impl final : kj::TaskSet::ErrorHandler {
  class Checks;

  /// One client's connection. Its capability, and calls in flight, hold references.
  struct Client : kj::Refcounted {
    Client(Impl& s, const rpc::Address& peer)
        : front(&s), from(peer), session(s.access, "clients", peer) {}
    /// Who asks.
    const Caller& caller() {
      if (!std::exchange(certificate_asked, true)) {
        const rpc::TlsSession* tls = connection->stream().tls();
        if (tls != nullptr && tls->secured()) session.shows_certificate(tls->peer_names());
      }
      return session.caller();
    }
    Impl* front;  // null once the connection is over
    const rpc::Address from;
    kj::Own<rpc::Connection> connection;
    Session session;
    bool certificate_asked = false;
    bool left = false;  // it was told to go
    std::size_t in_flight = 0;
    kj::Maybe<kj::Own<Checks>> checks;
  };

  /// What outlives the front while calls unwind.
  struct InFlight : kj::Refcounted {
    std::size_t calls = 0;
  };

  /// What a call that waits takes of the bounds.
  struct Place {
    Place(Client& c, std::size_t n, std::size_t how_many = 1)
        : client(kj::addRef(c)),
          all(kj::addRef(*c.front->in_flight)),
          budget(c.front->budget),
          bytes(n),
          calls(how_many) {
      client->in_flight += calls;
      all->calls += calls;
    }
    ~Place() {
      client->in_flight -= calls;
      all->calls -= calls;
      budget->give_back(bytes);
    }
    void less(std::size_t answered) {
      client->in_flight -= answered;
      all->calls -= answered;
      calls -= answered;
    }
    Place(const Place&) = delete;
    Place& operator=(const Place&) = delete;
    kj::Own<Client> client;
    kj::Own<InFlight> all;
    std::shared_ptr<rpc::ReadBudget> budget;
    std::size_t bytes;
    std::size_t calls;
  };

  class ServiceImpl final : public schema::Service::Server {
   public:
    explicit ServiceImpl(kj::Own<Client> client) : client_(kj::mv(client)) {}
    kj::Promise<void> check(CheckContext context) override;
    kj::Promise<void> reserve(ReserveContext context) override;
    kj::Promise<void> settle(SettleContext context) override;
    kj::Promise<void> lease(LeaseContext context) override;
    kj::Promise<void> rules(RulesContext context) override;
    kj::Promise<void> status(StatusContext context) override;
    kj::Promise<void> authenticate(AuthenticateContext context) override;

   private:
    Impl& expect_room(std::size_t requests);
    void take(std::size_t bytes);
    template <typename Start, typename Write>
    kj::Promise<void> answer(std::size_t bytes, Start start, Write write);
    const Caller& caller() { return client_->caller(); }
    kj::Own<Client> client_;
  };

  /// Checks of one client, which KJ's RPC system need not see: those that one read brought are
  /// decided as one batch, and answered by one write.
  class Checks final : public rpc::DirectHandler {
   public:
    explicit Checks(Client& client) : client_(client) {}
    void serve(rpc::Connection& connection) {
      calls_ =
          &connection.serve_directly(rpc::DirectMethod::of<schema::Service>(kCheckMethod), *this);
    }
    void call(std::uint32_t id, capnp::AnyPointer::Reader parameters) override;
    void calls_end() override;

   private:
    struct Call {
      std::uint32_t id = 0;
      Batch::Call requests;
    };
    void answer(const Call& call, std::span<const Reply> replies);

    Client& client_;
    rpc::DirectCalls* calls_ = nullptr;
    Batch batch_;
    std::vector<Call> pending_;
    std::vector<std::size_t> sizes_;
  };

  Impl(rpc::EventLoop& l, Service& s, CapnpLimits x, std::shared_ptr<rpc::TlsContext> context,
       Access* who)
      : loop(l),
        service(s),
        access(who),
        limits(x),
        tls(std::move(context)),
        budget(std::make_shared<rpc::ReadBudget>(x.read_bytes)),
        in_flight(kj::refcounted<InFlight>()),
        listener(l, x.max_connections,
                 [this](kj::Own<rpc::UvStream> stream, const rpc::Address& from) {
                   accept(kj::mv(stream), from);
                 }),
        tasks(*this) {
    listener.when_full([this](const rpc::Address&) { return make_room(nullptr); });
    if (tls != nullptr) listener.accept_few();
  }
  ~Impl() { stop(); }

  /// Why no further call of that client is taken; null: it is.
  const char* full(const Client& client) const {
    if (client.in_flight >= limits.calls_per_connection) {
      return "too many calls in flight on this connection";
    }
    return in_flight->calls >= limits.calls ? "too many calls in flight on this server" : nullptr;
  }
  void accept(kj::Own<rpc::UvStream> stream, const rpc::Address& from);
  void forget(Client& client);
  bool make_room(const rpc::Address* of);
  void stop();
  kj::Promise<void> sweep();
  kj::Promise<void> let_go();
  void taskFailed(kj::Exception&& e) override { KJ_LOG(ERROR, "client connection", e); }

  rpc::EventLoop& loop;
  Service& service;
  Access* access;
  CapnpLimits limits;
  std::shared_ptr<rpc::TlsContext> tls;
  CapnpCounters counters;
  Batch batch;
  std::shared_ptr<rpc::ReadBudget> budget;
  kj::Own<InFlight> in_flight;
  rpc::Listener listener;
  std::list<kj::Own<Client>> clients;  // the oldest first
  rpc::AddressCounts by_address;
  bool open = false;
  bool draining = false;
  kj::TaskSet tasks;
};

/// Calls `start(done)`, and has `write(answer)` fill the results when `done` is told. Where that is
/// before `start` returns, as it nearly always is, nothing is kept; else the call takes its place
/// among those that wait.
template <typename Start, typename Write>
kj::Promise<void> CapnpFront::Impl::ServiceImpl::answer(std::size_t bytes, Start start,
                                                        Write write) {
  struct State {
    explicit State(Write&& w) : write(std::move(w)) {}
    Write write;
    bool answered = false;
    kj::Maybe<kj::Exception> failure;
    kj::Maybe<kj::Own<kj::PromiseFulfiller<void>>> waits;
  };
  Impl& front = *client_->front;
  if (!front.budget->take(bytes)) {
    ++front.counters.shed;
    return overloaded("too much is being served at once");
  }
  auto place = kj::heap<Place>(*client_, bytes);
  auto state = std::make_shared<State>(std::move(write));
  start([state](auto&& answer) {
    state->answered = true;
    KJ_IF_MAYBE (waits, state->waits) {
      // The client, or the front, has gone: nobody is told, and the results may be gone too.
      if (!(*waits)->isWaiting()) return;
      KJ_IF_MAYBE (failure, kj::runCatchingExceptions([&] { state->write(answer); })) {
        (*waits)->reject(kj::mv(*failure));
      } else {
        (*waits)->fulfill();
      }
    } else {
      state->failure = kj::runCatchingExceptions([&] { state->write(answer); });
    }
  });
  if (state->answered) {
    KJ_IF_MAYBE (failure, state->failure) {
      return kj::mv(*failure);
    }
    return kj::READY_NOW;
  }
  auto waits = kj::newPromiseAndFulfiller<void>();
  state->waits = kj::mv(waits.fulfiller);
  return waits.promise.attach(kj::mv(place));
}

kj::Promise<void> CapnpFront::Impl::ServiceImpl::check(CheckContext context) {
  auto requests = context.getParams().getRequests();
  Impl& front = expect_room(requests.size());
  if (requests.size() > rpc::kMaxRequestsPerCall) {
    ++front.counters.malformed;
    return KJ_EXCEPTION(FAILED, "more than 1024 requests in a call");
  }
  Batch& asked = front.batch;
  asked.clear();
  const Batch::Call call = asked.add(requests);
  front.counters.malformed += call.malformed.size();
  return answer(
      asked.bytes(),
      [&](auto done) {
        const std::size_t all[] = {call.good()};
        front.service.check(asked.requests(), all, caller(),
                            [done = std::move(done)](
                                std::size_t, std::span<Reply> replies) mutable { done(replies); });
      },
      [context, call](std::span<Reply> replies) mutable {
        write_results(call, replies, context.getResults());
      });
}

kj::Promise<void> CapnpFront::Impl::ServiceImpl::reserve(ReserveContext context) {
  Impl& front = expect_room(1);
  const Nanos timeout = context.getParams().getTimeoutNs();
  Batch& asked = front.batch;
  asked.clear();
  const Batch::Call call = asked.add(Single{context.getParams().getRequest()});
  const std::span<const Request> requests = asked.requests();
  auto write = [context](ReserveReply& reply) mutable {
    rpc::encode(reply.decision, context.getResults().initResult());
    context.getResults().setTicket(kj::StringPtr(reply.ticket.c_str(), reply.ticket.size()));
  };
  ReserveReply refused;
  if (!call.malformed.empty()) {
    refused.decision = invalid(call.malformed[0].why);
  } else if (timeout < 0 || timeout > Limiter::kMaxHold) {
    refused.decision = invalid("timeout is not within 0 and a day");
  } else if (!requests[0].more.empty()) {
    refused.decision = invalid("a reservation takes one descriptor");
  } else {
    return answer(
        asked.bytes(),
        [&](auto done) { front.service.reserve(requests[0], timeout, caller(), std::move(done)); },
        write);
  }
  ++front.counters.malformed;
  write(refused);
  return kj::READY_NOW;
}

kj::Promise<void> CapnpFront::Impl::ServiceImpl::settle(SettleContext context) {
  Impl& front = expect_room(1);
  auto ticket = context.getParams().getTicket();
  auto write = [context](SettleReply& reply) mutable {
    auto result = context.getResults().initResult();
    const std::string& detail = reply.error.detail;
    result.setError(kj::StringPtr(detail.c_str(), detail.size()));
    result.setErrorKind(rpc::encode_kind(reply.error.kind));
    result.setSettled(reply.settled);
    result.setReserved(reply.reserved);
    result.setLapsed(reply.lapsed);
    result.setDegraded(reply.degraded);
  };
  if (ticket.size() > rpc::kMaxTicket) {
    ++front.counters.malformed;
    SettleReply refused;
    refused.error = {ErrorKind::invalid,
                     "ticket is longer than " + std::to_string(rpc::kMaxTicket) + " bytes"};
    write(refused);
    return kj::READY_NOW;
  }
  return answer(
      ticket.size() + kBytesPerRequest,
      [&](auto done) {
        front.service.settle(view(ticket), context.getParams().getHits(), caller(),
                             std::move(done));
      },
      write);
}

kj::Promise<void> CapnpFront::Impl::ServiceImpl::lease(LeaseContext context) {
  Impl& front = expect_room(1);
  LeaseTerms terms;
  terms.most = context.getParams().getMost();
  terms.term = context.getParams().getTermNs();
  Batch& asked = front.batch;
  asked.clear();
  const Batch::Call call = asked.add(Single{context.getParams().getRequest()});
  const std::span<const Request> requests = asked.requests();
  auto write = [context](LeaseReply& reply) mutable {
    auto results = context.getResults();
    rpc::encode(reply.decision, results.initResult());
    results.setTicket(kj::StringPtr(reply.ticket.c_str(), reply.ticket.size()));
    results.setHits(reply.hits);
    results.setTermNs(reply.term);
  };
  if (!call.malformed.empty()) {
    ++front.counters.malformed;
    LeaseReply refused;
    refused.decision = invalid(call.malformed[0].why);
    write(refused);
    return kj::READY_NOW;
  }
  return answer(
      asked.bytes(),
      [&](auto done) { front.service.lease(requests[0], terms, caller(), std::move(done)); },
      write);
}

kj::Promise<void> CapnpFront::Impl::ServiceImpl::rules(RulesContext context) {
  Impl& front = expect_room(0);
  auto known = context.getParams().getKnown();
  if (known.size() > rpc::kMaxText) return KJ_EXCEPTION(FAILED, "known is too long");
  return answer(
      kBytesPerRequest,
      [&](auto done) { front.service.rules(view(known), caller(), std::move(done)); },
      [context](RulesReply& reply) mutable {
        if (reply.error.kind == ErrorKind::unauthenticated ||
            reply.error.kind == ErrorKind::forbidden) {
          context.getResults().setError(reply.error.detail.c_str());
          return context.getResults().setErrorKind(rpc::encode_kind(reply.error.kind));
        }
        if (!reply.error.empty()) {
          kj::throwFatalException(KJ_EXCEPTION(UNIMPLEMENTED, reply.error.detail.c_str()));
        }
        if (reply.yaml.size() > kMaxAnswerBytes) {
          kj::throwFatalException(
              KJ_EXCEPTION(UNIMPLEMENTED, "the rules are too large to be sent"));
        }
        auto results = context.getResults();
        results.setYaml(kj::StringPtr(reply.yaml.c_str(), reply.yaml.size()));
        results.setVersion(kj::StringPtr(reply.version.c_str(), reply.version.size()));
        results.setSame(reply.same);
      });
}

kj::Promise<void> CapnpFront::Impl::ServiceImpl::status(StatusContext context) {
  Impl& front = expect_room(0);
  return answer(
      kBytesPerRequest, [&](auto done) { front.service.status(caller(), std::move(done)); },
      [context](StatusReply& reply) mutable {
        auto results = context.getResults();
        results.setJson(reply.json.c_str());
        results.setError(reply.error.detail.c_str());
        results.setErrorKind(rpc::encode_kind(reply.error.kind));
      });
}

kj::Promise<void> CapnpFront::Impl::ServiceImpl::authenticate(AuthenticateContext context) {
  expect_room(0);
  client_->caller();  // the certificate comes first, and the token counts instead
  if (client_->session.shows_token(view(context.getParams().getToken()))) return kj::READY_NOW;
  const Error error = deny(client_->session.caller(), "authenticate");
  context.getResults().setError(error.detail.c_str());
  context.getResults().setErrorKind(rpc::encode_kind(error.kind));
  return kj::READY_NOW;
}

/// Throws why no further call can be served; counts one that is.
CapnpFront::Impl& CapnpFront::Impl::ServiceImpl::expect_room(std::size_t requests) {
  Impl* front = client_->front;
  if (front == nullptr) {
    kj::throwFatalException(KJ_EXCEPTION(DISCONNECTED, "the server is closing"));
  }
  if (const char* full = front->full(*client_)) {
    ++front->counters.shed;
    kj::throwFatalException(overloaded(full));
  }
  ++front->counters.calls;
  front->counters.requests += requests;
  return *front;
}

void CapnpFront::Impl::Checks::call(std::uint32_t id, capnp::AnyPointer::Reader parameters) {
  // It may have been forgotten in this turn, and goes with its connection in a later event.
  if (client_.front == nullptr) return;
  Impl& front = *client_.front;
  auto requests = parameters.getAs<schema::Service::CheckParams>().getRequests();
  ++front.counters.calls;
  front.counters.requests += requests.size();
  if (requests.size() > rpc::kMaxRequestsPerCall) {
    ++front.counters.malformed;
    return calls_->fail(id, KJ_EXCEPTION(FAILED, "more than 1024 requests in a call"));
  }
  // Of this read's calls nobody knows yet whether they will wait.
  const char* full = front.full(client_);
  if (full != nullptr) {
    ++front.counters.shed;
    return calls_->fail(id, overloaded(full));
  }
  pending_.push_back({id, batch_.add(requests)});
  front.counters.malformed += pending_.back().requests.malformed.size();
  if (pending_.size() >= front.limits.calls_per_connection || batch_.size() >= kMostTogether) {
    calls_end();
  }
}

/// Decides what `call` gathered. Where something waits, all of these calls do, and take their
/// places among those that are bounded.
void CapnpFront::Impl::Checks::calls_end() {
  if (pending_.empty() || client_.front == nullptr) return;
  Impl& front = *client_.front;
  const std::size_t bytes = batch_.bytes();
  std::vector<Call> calls = std::exchange(pending_, {});
  if (!front.budget->take(bytes)) {
    front.counters.shed += calls.size();
    for (const Call& call : calls) {
      calls_->fail(call.id, overloaded("too much is being served at once"));
    }
    batch_.clear();
    return;
  }
  struct State {
    std::vector<Call> calls;
    bool returned = false;
    kj::Maybe<kj::Own<Place>> place;  // of those that wait
  };
  auto state = std::make_shared<State>();
  sizes_.clear();
  for (const Call& call : calls) sizes_.push_back(call.requests.good());
  state->calls = std::move(calls);
  std::size_t waiting = state->calls.size();
  front.service.check(batch_.requests(), sizes_, client_.caller(),
                      [this, state, &waiting](std::size_t index, std::span<Reply> replies) {
                        if (state->returned) {
                          // With its client went what `this` is part of.
                          auto& place = *KJ_ASSERT_NONNULL(state->place);
                          if (place.client->front == nullptr) return;
                          place.less(1);
                        } else {
                          --waiting;
                        }
                        answer(state->calls[index], replies);
                      });
  state->returned = true;
  if (waiting > 0) {
    state->place = kj::heap<Place>(client_, bytes, waiting);
  } else {
    front.budget->give_back(bytes);
  }
  batch_.clear();
}

void CapnpFront::Impl::Checks::answer(const Call& call, std::span<const Reply> replies) {
  KJ_IF_MAYBE (failure, kj::runCatchingExceptions([&] {
                 calls_->answer<schema::Service::CheckResults>(
                     call.id, [&](schema::Service::CheckResults::Builder out) {
                       write_results(call.requests, replies, out);
                     });
               })) {
    calls_->fail(call.id, *failure);
  }
}

void CapnpFront::Impl::accept(kj::Own<rpc::UvStream> stream, const rpc::Address& from) {
  const std::size_t most =
      std::max<std::size_t>(1, limits.max_connections * limits.address_percent / 100);
  if (by_address.of(from) >= most && !make_room(&from)) {
    ++counters.turned_away;
    return;
  }
  rpc::ConnectionLimits framing;
  framing.framing.message_words = limits.message_bytes / sizeof(capnp::word);
  auto client = kj::refcounted<Client>(*this, from);
  if (tls != nullptr) stream->start_tls(rpc::TlsSession::server(tls, rpc::to_string(from)));
  client->connection = kj::heap<rpc::Connection>(
      loop, kj::mv(stream), kj::heap<ServiceImpl>(kj::addRef(*client)), framing, budget);
  client->checks = kj::heap<Checks>(*client);
  KJ_ASSERT_NONNULL(client->checks)->serve(*client->connection);
  tasks.add(client->connection->closed().then([this, c = kj::addRef(*client)]() mutable {
    if (c->front != nullptr) forget(*c);
  }));
  by_address.add(from);
  clients.push_back(kj::mv(client));
}

/// Closes the oldest connection on which nothing was asked yet, of that address if there is one.
bool CapnpFront::Impl::make_room(const rpc::Address* of) {
  const auto now = loop.timer().now();
  for (kj::Own<Client>& client : clients) {
    rpc::Connection& connection = *client->connection;
    if (now - connection.opened() < limits.evict_after * kj::NANOSECONDS) return false;
    if (connection.framing().messages_read() > 0) continue;
    if (of != nullptr && !rpc::AddressCounts::same(client->from, *of)) continue;
    ++counters.evicted;
    forget(*client);
    return true;
  }
  return false;
}

void CapnpFront::Impl::forget(Client& client) {
  client.front = nullptr;
  by_address.remove(client.from);
  retire(tasks, kj::mv(client.connection));
  clients.remove_if([&](const kj::Own<Client>& other) { return other.get() == &client; });
}

void CapnpFront::Impl::stop() {
  if (!open) return;
  open = false;
  listener.close();
  while (!clients.empty()) forget(*clients.front());
}

/// Connections that stay silent, or stop in the middle of a message, are closed.
kj::Promise<void> CapnpFront::Impl::sweep() {
  return loop.timer().afterDelay(kSweepInterval).then([this]() -> kj::Promise<void> {
    if (!open) return kj::READY_NOW;
    auto now = loop.timer().now();
    std::vector<Client*> late;
    for (auto& client : clients) {
      rpc::Connection& connection = *client->connection;
      if (connection.framing().messages_read() == 0 &&
          now - connection.opened() > limits.first_message * kj::NANOSECONDS) {
        late.push_back(client.get());
        continue;
      }
      KJ_IF_MAYBE (since, connection.framing().stalled_since()) {
        if (now - *since > limits.message_timeout * kj::NANOSECONDS) late.push_back(client.get());
      }
    }
    counters.timed_out += late.size();
    for (Client* client : late) forget(*client);
    return sweep();
  });
}

/// Each client is told to go once it waits for nothing.
kj::Promise<void> CapnpFront::Impl::let_go() {
  if (!open) return kj::READY_NOW;
  for (auto& client : clients) {
    if (client->left || !client->connection->idle()) continue;
    client->left = true;
    client->connection->leave();
  }
  return loop.timer().afterDelay(kLetGoInterval).then([this] { return let_go(); });
}

CapnpFront::CapnpFront(rpc::EventLoop& loop, Service& service, CapnpLimits limits,
                       std::shared_ptr<rpc::TlsContext> tls, Access* access)
    : impl_(std::make_unique<Impl>(loop, service, limits, std::move(tls), access)) {}

CapnpFront::~CapnpFront() = default;

bool CapnpFront::start(const std::string& address, rpc::Sharing sharing, std::string& error) {
  if (impl_->open) {
    error = "already started";
    return false;
  }
  if (!impl_->listener.open(address, sharing, error)) return false;
  impl_->open = true;
  impl_->tasks.add(impl_->sweep());
  return true;
}

std::uint16_t CapnpFront::port() const {
  return impl_->listener.port();
}

void CapnpFront::drain() {
  if (!impl_->open || std::exchange(impl_->draining, true)) return;
  impl_->listener.drain();
  impl_->tasks.add(impl_->let_go());
}

void CapnpFront::stop() {
  impl_->stop();
}

std::size_t CapnpFront::connections() const {
  return impl_->clients.size();
}

CapnpCounters CapnpFront::counters() const {
  CapnpCounters out = impl_->counters;
  out.accepted = impl_->listener.counters().accepted;
  out.turned_away += impl_->listener.counters().turned_away;
  return out;
}

}  // namespace weir::node
