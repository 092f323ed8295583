#include <weir/node/fronts/capnp/service.h>

#include <kj/debug.h>

#include <list>
#include <string_view>
#include <utility>
#include <vector>

#include <weir/limits/limiter.h>
#include <weir/rpc/net/connection.h>
#include <weir/rpc/net/listener.h>
#include <weir/rpc/wire.h>

namespace weir::rpc {
namespace {

/// An answer must fit a message (1M words) with room to spare.
constexpr std::size_t kMaxAnswerBytes = 6u << 20;
/// What a request and its reply take besides text and entries.
constexpr std::size_t kBytesPerRequest =
    sizeof(weir::Request) + 2 * sizeof(CheckReply) + sizeof(std::size_t);
constexpr auto kSweepInterval = 500 * kj::MILLISECONDS;

/// One call's requests, copied out of its message in one piece: while a handler waits for a commit,
/// the message need not stay in memory.
struct Call {
  std::vector<char> text;
  std::vector<weir::Entry> entries;
  std::vector<std::string_view> only;
  std::vector<weir::Request> requests;
  std::vector<std::size_t> position;  // of each request in the call; malformed ones are left out
  std::vector<CheckReply> replies;    // of `requests`
  std::vector<CheckReply> answers;    // of the call
};

/// A list of one.
struct Single {
  schema::CheckRequest::Reader request;
  capnp::uint size() const { return 1; }
  schema::CheckRequest::Reader operator[](capnp::uint) const { return request; }
};

std::string problem(schema::CheckRequest::Reader request) {
  if (request.getDomain().size() > kMaxText) {
    return "domain is longer than " + std::to_string(kMaxText) + " bytes";
  }
  if (request.getId().size() > kMaxRequestId) {
    return "id is longer than " + std::to_string(kMaxRequestId) + " bytes";
  }
  if (request.getOnly().size() > kMaxOnly) {
    return "only more than " + std::to_string(kMaxOnly) + " rules";
  }
  for (auto rule : request.getOnly()) {
    if (rule.size() > kMaxText) return "a rule's name is longer than " + std::to_string(kMaxText);
  }
  auto entries = request.getEntries();
  if (entries.size() > kMaxEntries) {
    return "more than " + std::to_string(kMaxEntries) + " descriptor entries";
  }
  for (auto entry : entries) {
    if (entry.getKey().size() > kMaxText || entry.getValue().size() > kMaxText) {
      return "a descriptor entry is longer than " + std::to_string(kMaxText) + " bytes";
    }
  }
  return {};
}

/// Two passes over a bounded list: the first sizes the memory that the second's views point into.
template <typename Requests>
void load(Requests in, Call& call) {
  std::size_t text = 0;
  std::size_t entries = 0;
  std::size_t only = 0;
  call.answers.resize(in.size());
  for (capnp::uint i = 0; i < in.size(); ++i) {
    auto request = in[i];
    call.answers[i].error = problem(request);
    if (!call.answers[i].error.empty()) continue;
    call.position.push_back(i);
    text += request.getDomain().size() + request.getId().size();
    for (auto entry : request.getEntries()) {
      text += entry.getKey().size() + entry.getValue().size();
      ++entries;
    }
    for (auto rule : request.getOnly()) {
      text += rule.size();
      ++only;
    }
  }
  call.text.reserve(text);
  call.entries.reserve(entries);
  call.only.reserve(only);
  auto keep = [&](capnp::Text::Reader s) {
    std::size_t begin = call.text.size();
    call.text.insert(call.text.end(), s.begin(), s.begin() + s.size());
    return std::string_view(call.text.data() + begin, s.size());
  };
  for (std::size_t i : call.position) {
    auto request = in[static_cast<capnp::uint>(i)];
    auto domain = keep(request.getDomain());
    auto id = keep(request.getId());
    std::size_t first = call.entries.size();
    for (auto entry : request.getEntries()) {
      auto key = keep(entry.getKey());
      call.entries.push_back({key, keep(entry.getValue())});
    }
    std::size_t first_only = call.only.size();
    for (auto rule : request.getOnly()) call.only.push_back(keep(rule));
    call.requests.push_back(
        {domain, std::span(call.entries.data() + first, call.entries.size() - first),
         request.getHits(), id, request.getWantsBound(),
         std::span(call.only.data() + first_only, call.only.size() - first_only)});
  }
  call.replies.resize(call.requests.size());
}

std::size_t answer_bytes(const std::vector<CheckReply>& answers) {
  std::size_t bytes = 64;
  for (const auto& answer : answers) {
    bytes += 48 + answer.error.size();
    for (const auto& status : answer.statuses) bytes += 64 + status.rule.size();
  }
  return bytes;
}

}  // namespace

struct ServiceServer::Impl final : kj::TaskSet::ErrorHandler {
  /// One client's connection. Its capability, and calls in flight, hold references.
  struct Client : kj::Refcounted {
    explicit Client(Impl& s) : server(&s) {}
    Impl* server;  // null once the connection is over
    kj::Own<Connection> connection;
    std::size_t in_flight = 0;
  };

  /// What outlives the server while calls unwind.
  struct InFlight : kj::Refcounted {
    std::size_t calls = 0;
  };

  /// A call that is being served, and what it takes of the bounds.
  struct Place {
    Place(Client& c, std::size_t n)
        : client(kj::addRef(c)),
          all(kj::addRef(*c.server->in_flight)),
          budget(c.server->budget),
          bytes(n) {
      ++client->in_flight;
      ++all->calls;
    }
    ~Place() {
      --client->in_flight;
      --all->calls;
      budget->give_back(bytes);
    }
    kj::Own<Client> client;
    kj::Own<InFlight> all;
    std::shared_ptr<ReadBudget> budget;
    std::size_t bytes;
  };

  class ServiceImpl final : public schema::Service::Server {
   public:
    explicit ServiceImpl(kj::Own<Client> client) : client_(kj::mv(client)) {}
    kj::Promise<void> check(CheckContext context) override;
    kj::Promise<void> reserve(ReserveContext context) override;
    kj::Promise<void> settle(SettleContext context) override;
    kj::Promise<void> lease(LeaseContext context) override;
    kj::Promise<void> rules(RulesContext context) override {
      Impl& server = expect_room();
      return server.checking.wrap(server.handler.rules_yaml())
          .then([context](std::string&& yaml) mutable {
            if (yaml.size() > kMaxAnswerBytes) {
              kj::throwFatalException(
                  KJ_EXCEPTION(UNIMPLEMENTED, "the rules are too large to be sent"));
            }
            context.getResults().setYaml(kj::StringPtr(yaml.c_str(), yaml.size()));
          });
    }
    kj::Promise<void> status(StatusContext context) override {
      if (client_->server == nullptr) return KJ_EXCEPTION(DISCONNECTED, "the server is closing");
      context.getResults().setJson(client_->server->handler.status_json().c_str());
      return kj::READY_NOW;
    }

   private:
    /// Throws why no further call can be served.
    Impl& expect_room();
    kj::Own<Place> take_place(const Call& call);
    kj::Own<Client> client_;
  };

  Impl(EventLoop& l, std::string a, ServiceHandler& h, ServiceLimits x)
      : loop(l),
        address(std::move(a)),
        handler(h),
        limits(x),
        budget(std::make_shared<ReadBudget>(x.read_bytes)),
        in_flight(kj::refcounted<InFlight>()),
        listener(l, x.max_connections,
                 [this](kj::Own<UvStream> stream, const Address&) { accept(kj::mv(stream)); }),
        tasks(*this) {}
  ~Impl() { close(); }

  void accept(kj::Own<UvStream> stream);
  void forget(Client& client);
  void close();
  kj::Promise<void> sweep();
  void taskFailed(kj::Exception&& e) override { KJ_LOG(ERROR, "service task", e); }

  EventLoop& loop;
  std::string address;
  ServiceHandler& handler;
  ServiceLimits limits;
  ServiceCounters counters;
  std::shared_ptr<ReadBudget> budget;
  kj::Own<InFlight> in_flight;
  Listener listener;
  kj::Canceler checking;  // promises of handler.check
  std::list<kj::Own<Client>> clients;
  bool open = false;
  kj::TaskSet tasks;
};

kj::Promise<void> ServiceServer::Impl::ServiceImpl::check(CheckContext context) {
  Impl& server = expect_room();
  auto requests = context.getParams().getRequests();
  if (requests.size() > kMaxRequestsPerCall) {
    ++server.counters.malformed;
    return KJ_EXCEPTION(FAILED, "more than 1024 requests in a call");
  }
  auto call = kj::heap<Call>();
  load(requests, *call);
  context.releaseParams();
  auto place = take_place(*call);
  Call& c = *call;
  auto checked =
      server.checking.wrap(c.requests.empty() ? kj::Promise<void>(kj::READY_NOW) : kj::evalNow([&] {
        return server.handler.check(c.requests, c.replies);
      }));
  return checked
      .then([&c, context]() mutable {
        for (std::size_t i = 0; i < c.position.size(); ++i) {
          c.answers[c.position[i]] = std::move(c.replies[i]);
        }
        if (answer_bytes(c.answers) > kMaxAnswerBytes) {
          kj::throwFatalException(
              KJ_EXCEPTION(FAILED, "the answer is too large: send fewer requests in a call"));
        }
        auto results = context.getResults().initResults(static_cast<capnp::uint>(c.answers.size()));
        for (std::size_t i = 0; i < c.answers.size(); ++i) {
          encode(c.answers[i], results[static_cast<capnp::uint>(i)]);
        }
      })
      .attach(kj::mv(place), kj::mv(call));
}

kj::Promise<void> ServiceServer::Impl::ServiceImpl::reserve(ReserveContext context) {
  Impl& server = expect_room();
  Nanos timeout = context.getParams().getTimeoutNs();
  auto call = kj::heap<Call>();
  load(Single{context.getParams().getRequest()}, *call);
  context.releaseParams();
  auto place = take_place(*call);
  auto reply = kj::heap<ReserveReply>();
  if (call->requests.empty()) {
    reply->decision = std::move(call->answers[0]);
  } else if (timeout < 0 || timeout > Limiter::kMaxHold) {
    ++server.counters.malformed;
    reply->decision.error = "timeout is not within 0 and a day";
    call->requests.clear();
  }
  Call& c = *call;
  ReserveReply& r = *reply;
  auto reserved =
      server.checking.wrap(c.requests.empty() ? kj::Promise<void>(kj::READY_NOW) : kj::evalNow([&] {
        return server.handler.reserve(c.requests[0], timeout, r);
      }));
  return reserved
      .then([&r, context]() mutable {
        encode(r.decision, context.getResults().initResult());
        context.getResults().setTicket(kj::StringPtr(r.ticket.c_str(), r.ticket.size()));
      })
      .attach(kj::mv(place), kj::mv(reply), kj::mv(call));
}

kj::Promise<void> ServiceServer::Impl::ServiceImpl::settle(SettleContext context) {
  Impl& server = expect_room();
  auto given = context.getParams().getTicket();
  std::uint64_t hits = context.getParams().getHits();
  auto call = kj::heap<Call>();
  call->answers.resize(1);
  auto reply = kj::heap<SettleReply>();
  bool well_formed = given.size() <= kMaxTicket;
  if (well_formed) {
    call->text.assign(given.begin(), given.begin() + given.size());
    call->requests.resize(1);
  } else {
    reply->error = "ticket is longer than " + std::to_string(kMaxTicket) + " bytes";
  }
  context.releaseParams();
  auto place = take_place(*call);
  Call& c = *call;
  SettleReply& r = *reply;
  auto settled =
      server.checking.wrap(!well_formed ? kj::Promise<void>(kj::READY_NOW) : kj::evalNow([&] {
        return server.handler.settle(std::string_view(c.text.data(), c.text.size()), hits, r);
      }));
  return settled
      .then([&r, context]() mutable {
        auto result = context.getResults().initResult();
        result.setError(kj::StringPtr(r.error.c_str(), r.error.size()));
        result.setSettled(r.settled);
        result.setReserved(r.reserved);
        result.setLapsed(r.lapsed);
        result.setDegraded(r.degraded);
      })
      .attach(kj::mv(place), kj::mv(reply), kj::mv(call));
}

kj::Promise<void> ServiceServer::Impl::ServiceImpl::lease(LeaseContext context) {
  Impl& server = expect_room();
  LeaseTerms terms;
  terms.most = context.getParams().getMost();
  terms.term = context.getParams().getTermNs();
  auto call = kj::heap<Call>();
  load(Single{context.getParams().getRequest()}, *call);
  context.releaseParams();
  auto place = take_place(*call);
  auto reply = kj::heap<LeaseReply>();
  if (call->requests.empty()) reply->decision = std::move(call->answers[0]);
  Call& c = *call;
  LeaseReply& r = *reply;
  auto leased =
      server.checking.wrap(c.requests.empty() ? kj::Promise<void>(kj::READY_NOW) : kj::evalNow([&] {
        return server.handler.lease(c.requests[0], terms, r);
      }));
  return leased
      .then([&r, context]() mutable {
        auto results = context.getResults();
        encode(r.decision, results.initResult());
        results.setTicket(kj::StringPtr(r.ticket.c_str(), r.ticket.size()));
        results.setHits(r.hits);
        results.setTermNs(r.term);
      })
      .attach(kj::mv(place), kj::mv(reply), kj::mv(call));
}

ServiceServer::Impl& ServiceServer::Impl::ServiceImpl::expect_room() {
  Impl* server = client_->server;
  if (server == nullptr) {
    kj::throwFatalException(KJ_EXCEPTION(DISCONNECTED, "the server is closing"));
  }
  if (client_->in_flight >= server->limits.calls_per_connection) {
    ++server->counters.shed;
    kj::throwFatalException(
        KJ_EXCEPTION(OVERLOADED, "shedding: too many calls in flight on this connection"));
  }
  if (server->in_flight->calls >= server->limits.calls) {
    ++server->counters.shed;
    kj::throwFatalException(
        KJ_EXCEPTION(OVERLOADED, "shedding: too many calls in flight on this server"));
  }
  return *server;
}

kj::Own<ServiceServer::Impl::Place> ServiceServer::Impl::ServiceImpl::take_place(const Call& call) {
  Impl& server = *client_->server;
  // The copy counts like the message did.
  std::size_t bytes = call.text.capacity() + call.entries.capacity() * sizeof(weir::Entry) +
                      call.only.capacity() * sizeof(std::string_view) +
                      call.answers.size() * kBytesPerRequest;
  if (!server.budget->take(bytes)) {
    ++server.counters.shed;
    kj::throwFatalException(KJ_EXCEPTION(OVERLOADED, "shedding: too much is being served at once"));
  }
  ++server.counters.calls;
  server.counters.requests += call.answers.size();
  server.counters.malformed += call.answers.size() - call.requests.size();
  return kj::heap<Place>(*client_, bytes);
}

void ServiceServer::Impl::accept(kj::Own<UvStream> stream) {
  ConnectionLimits framing;
  framing.framing.message_words = limits.message_bytes / sizeof(capnp::word);
  auto client = kj::refcounted<Client>(*this);
  client->connection = kj::heap<Connection>(
      loop, kj::mv(stream), kj::heap<ServiceImpl>(kj::addRef(*client)), framing, budget);
  tasks.add(client->connection->closed().then([this, c = kj::addRef(*client)]() mutable {
    if (c->server != nullptr) forget(*c);
  }));
  clients.push_back(kj::mv(client));
}

void ServiceServer::Impl::forget(Client& client) {
  client.server = nullptr;
  retire(tasks, kj::mv(client.connection));
  clients.remove_if([&](const kj::Own<Client>& other) { return other.get() == &client; });
}

void ServiceServer::Impl::close() {
  if (!open) return;
  open = false;
  listener.close();
  checking.cancel("the server is closing");
  while (!clients.empty()) forget(*clients.front());
}

kj::Promise<void> ServiceServer::Impl::sweep() {
  return loop.timer().afterDelay(kSweepInterval).then([this]() -> kj::Promise<void> {
    if (!open) return kj::READY_NOW;
    auto now = loop.timer().now();
    std::vector<Client*> late;
    for (auto& client : clients) {
      Connection& connection = *client->connection;
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

kj::Promise<void> ServiceHandler::reserve(const weir::Request&, Nanos, ReserveReply&) {
  return KJ_EXCEPTION(UNIMPLEMENTED, "reservations are not served here");
}

kj::Promise<std::string> ServiceHandler::rules_yaml() {
  return KJ_EXCEPTION(UNIMPLEMENTED, "rules are not told here");
}

kj::Promise<void> ServiceHandler::lease(const weir::Request&, const LeaseTerms&, LeaseReply&) {
  return KJ_EXCEPTION(UNIMPLEMENTED, "leases are not granted here");
}

kj::Promise<void> ServiceHandler::settle(std::string_view, std::uint64_t, SettleReply&) {
  return KJ_EXCEPTION(UNIMPLEMENTED, "reservations are not served here");
}

ServiceServer::ServiceServer(EventLoop& loop, std::string listen, ServiceHandler& handler,
                             ServiceLimits limits)
    : impl_(std::make_unique<Impl>(loop, std::move(listen), handler, limits)) {}

ServiceServer::~ServiceServer() = default;

bool ServiceServer::start(std::string& error) {
  if (impl_->open) {
    error = "already started";
    return false;
  }
  if (!impl_->listener.open(impl_->address, error)) return false;
  impl_->open = true;
  impl_->tasks.add(impl_->sweep());
  return true;
}

std::uint16_t ServiceServer::port() const {
  return impl_->listener.port();
}

void ServiceServer::close() {
  impl_->close();
}

std::size_t ServiceServer::connections() const {
  return impl_->clients.size();
}

ServiceCounters ServiceServer::counters() const {
  ServiceCounters out = impl_->counters;
  out.accepted = impl_->listener.counters().accepted;
  out.turned_away = impl_->listener.counters().turned_away;
  return out;
}

}  // namespace weir::rpc
