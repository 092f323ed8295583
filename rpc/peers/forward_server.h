#pragma once

#include <kj/async.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include <weir.capnp.h>

#include <weir/crdt/ids.h>
#include <weir/rpc/peers/peers.h>

namespace weir::rpc {

/// Of one member.
struct ServeLimits {
  std::size_t requests = 8192;    ///< being answered
  std::size_t bytes = 16u << 20;  ///< of memory that they and their answers take
};

struct ServeCounters {
  std::uint64_t requests = 0;   ///< begun, malformed ones included
  std::uint64_t malformed = 0;  ///< that broke a bound
  std::uint64_t shed = 0;       ///< refused: too much was being answered
};

/// Has a PeerHandler answer what other members ask (schema::Link). A member that misbehaves cannot
/// make this node hold more than its limits, however often it connects anew.
///
/// For the loop's thread only. The handler outlives it.
class ForwardServer {
 public:
  template <typename Params, typename Results>
  using Context = capnp::CallContext<Params, Results>;
  using CheckContext = Context<schema::Link::CheckParams, schema::Link::CheckResults>;
  using ReserveContext = Context<schema::Link::ReserveParams, schema::Link::ReserveResults>;
  using SettleContext = Context<schema::Link::SettleParams, schema::Link::SettleResults>;

  ForwardServer(PeerHandler& handler, const ServeLimits& limits, std::size_t peers);

  kj::Promise<void> check(crdt::PeerIndex from, CheckContext context);
  kj::Promise<void> reserve(crdt::PeerIndex from, ReserveContext context);
  kj::Promise<void> settle(crdt::PeerIndex from, SettleContext context);
  /// What is being answered fails. Not from inside a call of the handler.
  void stop() { serving_.cancel("this node is stopping"); }

  const ServeCounters& counters(crdt::PeerIndex from) const { return accounts_[from]->counters; }
  /// Requests of `from` that are being answered.
  std::size_t serving(crdt::PeerIndex from) const { return accounts_[from]->requests; }

 private:
  /// What one member has here. Calls that unwind may outlive the server.
  struct Account : kj::Refcounted {
    std::size_t requests = 0;
    std::size_t bytes = 0;
    ServeCounters counters;
  };
  struct Place;
  struct Checks;

  kj::Own<Place> take_place(crdt::PeerIndex from, std::size_t requests, std::size_t bytes);
  template <typename Reply, typename Ask>
  kj::Promise<Reply> answer_of(Ask&& ask);

  PeerHandler& handler_;
  const ServeLimits limits_;
  std::vector<kj::Own<Account>> accounts_;  // by peer
  kj::Canceler serving_;
};

}  // namespace weir::rpc
