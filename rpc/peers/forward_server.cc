#include <weir/rpc/peers/forward_server.h>

#include <kj/debug.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include <weir/limits/limiter.h>
#include <weir/rpc/peers/forward_wire.h>
#include <weir/rpc/wire.h>

namespace weir::rpc {
namespace {

/// An answer must fit a message (1M words) with room to spare.
constexpr std::size_t kMaxAnswerBytes = 6u << 20;
/// What a call takes besides its requests.
constexpr std::size_t kCallBytes = 2048;
/// What a request takes that is refused.
constexpr std::size_t kRefusedBytes = sizeof(Reply) + 128;

kj::StringPtr text(const std::string& s) {
  return kj::StringPtr(s.c_str(), s.size());
}

}  // namespace

/// What a call takes of its member's limits.
struct ForwardServer::Place {
  Place(Account& a, std::size_t n, std::size_t b) : account(kj::addRef(a)), requests(n), bytes(b) {
    account->requests += requests;
    account->bytes += bytes;
    account->counters.requests += requests;
  }
  ~Place() {
    account->requests -= requests;
    account->bytes -= bytes;
  }
  Place(const Place&) = delete;
  Place& operator=(const Place&) = delete;

  kj::Own<Account> account;
  std::size_t requests;
  std::size_t bytes;
};

struct ForwardServer::Checks {
  std::vector<CheckItem> items;
  std::vector<std::size_t> position;  // of each item in the call; malformed ones are left out
  std::vector<Reply> answers;         // of the call
};

ForwardServer::ForwardServer(PeerHandler& handler, const ServeLimits& limits, std::size_t peers)
    : handler_(handler), limits_(limits) {
  for (std::size_t i = 0; i < peers; ++i) accounts_.push_back(kj::refcounted<Account>());
}

/// Throws if that is too much.
kj::Own<ForwardServer::Place> ForwardServer::take_place(crdt::PeerIndex from, std::size_t requests,
                                                        std::size_t bytes) {
  Account& account = *accounts_[from];
  if (account.requests + requests > limits_.requests || account.bytes + bytes > limits_.bytes) {
    account.counters.shed += requests;
    kj::throwFatalException(
        KJ_EXCEPTION(OVERLOADED, "shedding: too many requests of this member are being answered"));
  }
  return kj::heap<Place>(account, requests, bytes);
}

/// Has `ask` called with what takes the reply.
template <typename Reply, typename Ask>
kj::Promise<Reply> ForwardServer::answer_of(Ask&& ask) {
  auto paf = kj::newPromiseAndFulfiller<Reply>();
  auto fulfiller = std::make_shared<kj::Own<kj::PromiseFulfiller<Reply>>>(kj::mv(paf.fulfiller));
  return serving_.wrap(kj::evalNow([&]() -> kj::Promise<Reply> {
    ask([fulfiller](Reply reply) { (*fulfiller)->fulfill(kj::mv(reply)); });
    return kj::mv(paf.promise);
  }));
}

kj::Promise<void> ForwardServer::check(crdt::PeerIndex from, CheckContext context) {
  auto requests = context.getParams().getRequests();
  if (requests.size() > kMaxRequestsPerCall) {
    ++accounts_[from]->counters.malformed;
    return KJ_EXCEPTION(FAILED, "more than 1024 requests in a call");
  }
  auto call = kj::heap<Checks>();
  call->answers.resize(requests.size());
  std::size_t bytes = kCallBytes;
  for (capnp::uint i = 0; i < requests.size(); ++i) {
    const std::string wrong = problem(requests[i]);
    if (wrong.empty()) {
      call->position.push_back(i);
      bytes += served_bytes(requests[i]);
    } else {
      call->answers[i].fail(ErrorKind::invalid, wrong);
      bytes += kRefusedBytes;
    }
  }
  auto place = take_place(from, requests.size(), bytes);
  place->account->counters.malformed += requests.size() - call->position.size();
  for (std::size_t i : call->position) {
    call->items.push_back(decode(requests[static_cast<capnp::uint>(i)]));
  }
  context.releaseParams();
  kj::Promise<std::vector<Reply>> replies = std::vector<Reply>();
  if (!call->items.empty()) {
    replies = answer_of<std::vector<Reply>>(
        [&](auto done) { handler_.serve(from, std::move(call->items), std::move(done)); });
  }
  Checks& c = *call;
  return replies
      .then([&c, context](std::vector<Reply>&& got) mutable {
        if (got.size() != c.position.size()) {
          kj::throwFatalException(KJ_EXCEPTION(FAILED, "it was not answered"));
        }
        std::size_t size = 0;
        for (std::size_t i = 0; i < got.size(); ++i) {
          c.answers[c.position[i]] = std::move(got[i]);
        }
        for (const Reply& answer : c.answers) size += answer_bytes(answer);
        if (size > kMaxAnswerBytes) {
          kj::throwFatalException(KJ_EXCEPTION(FAILED, "the answer is too large"));
        }
        auto results = context.getResults(capnp::MessageSize{size / sizeof(capnp::word) + 32, 0})
                           .initResults(static_cast<capnp::uint>(c.answers.size()));
        for (std::size_t i = 0; i < c.answers.size(); ++i) {
          encode(c.answers[i], results[static_cast<capnp::uint>(i)]);
        }
      })
      .attach(kj::mv(place), kj::mv(call));
}

kj::Promise<void> ForwardServer::reserve(crdt::PeerIndex from, ReserveContext context) {
  auto request = context.getParams().getRequest();
  const Nanos timeout = context.getParams().getTimeoutNs();
  std::string wrong = problem(request);
  if (wrong.empty() && (timeout < 0 || timeout > Limiter::kMaxHold)) {
    wrong = "timeout is not within 0 and a day";
  }
  auto place =
      take_place(from, 1, kCallBytes + (wrong.empty() ? served_bytes(request) : kRefusedBytes));
  if (!wrong.empty()) {
    ++place->account->counters.malformed;
    Reply refused;
    refused.fail(ErrorKind::invalid, wrong);
    encode(refused, context.getResults().initResult());
    return kj::READY_NOW;
  }
  CheckItem item = decode(request);
  context.releaseParams();
  return answer_of<ReserveReply>([&](auto done) {
           handler_.serve_reserve(from, std::move(item), timeout, std::move(done));
         })
      .then([context](ReserveReply&& reply) mutable {
        if (answer_bytes(reply.decision) > kMaxAnswerBytes) {
          kj::throwFatalException(KJ_EXCEPTION(FAILED, "the answer is too large"));
        }
        encode(reply.decision, context.getResults().initResult());
        context.getResults().setTicket(text(reply.ticket));
      })
      .attach(kj::mv(place));
}

kj::Promise<void> ForwardServer::settle(crdt::PeerIndex from, SettleContext context) {
  auto ticket = context.getParams().getTicket();
  const std::uint64_t hits = context.getParams().getHits();
  auto place = take_place(from, 1, kCallBytes);
  if (ticket.size() > kMaxTicket) {
    ++place->account->counters.malformed;
    SettleReply refused;
    refused.error = {ErrorKind::invalid, "ticket is too long"};
    encode(refused, context.getResults().initResult());
    return kj::READY_NOW;
  }
  std::string name(ticket.begin(), ticket.size());
  context.releaseParams();
  return answer_of<SettleReply>([&](auto done) {
           handler_.serve_settle(from, std::move(name), hits, std::move(done));
         })
      .then([context](SettleReply&& reply) mutable {
        encode(reply, context.getResults().initResult());
      })
      .attach(kj::mv(place));
}

}  // namespace weir::rpc
