#pragma once

#include <kj/async.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <weir/crdt/ids.h>
#include <weir/crdt/message.h>
#include <weir/crdt/replica.h>
#include <weir/crdt/time.h>
#include <weir/rpc/check.h>
#include <weir/rpc/net/event_loop.h>
#include <weir/rpc/net/tls_context.h>

namespace weir::rpc {

/// What a PeerNetwork tells its node. All calls come on the loop's thread; each may call back into
/// the PeerNetwork, but not destroy it.
class PeerHandler {
 public:
  virtual ~PeerHandler() = default;
  /// The outgoing session to `peer` is ready, and the peer proved this incarnation.
  virtual void peer_up(crdt::PeerIndex peer, const crdt::Incarnation& incarnation) = 0;
  /// That session is over. Follows every peer_up.
  virtual void peer_down(crdt::PeerIndex peer) = 0;
  /// A well-formed message from `peer`, which proved incarnation `from` on its connection. The
  /// sender's message counts as in flight until the promise resolves. The promise is dropped if the
  /// network stops.
  virtual kj::Promise<void> receive(crdt::PeerIndex peer, const crdt::Incarnation& from,
                                    crdt::Message message) = 0;
  /// Someone or something was refused: a handshake (by either side) or a message. Both texts are
  /// printable and bounded.
  virtual void refused(const std::string& who, const std::string& why) = 0;

  /// `from` has this node decide `items`, within the bounds of check.h: each by the rules that its
  /// `rule_filter` names (at least one), here and no further. `done` takes a reply for each item,
  /// in order: once, on the loop's thread, at once or later, in the end also after the network has
  /// stopped. If it is dropped uncalled, `from` takes the requests as perhaps counted. Until it is
  /// called or dropped they count against PeerOptions::max_served. As it is here it refuses.
  virtual void serve(crdt::PeerIndex from, std::vector<CheckItem> items,
                     std::function<void(std::vector<Reply>)> done);
  /// The same for a reservation; `timeout` is within 0 and Limiter::kMaxHold.
  virtual void serve_reserve(crdt::PeerIndex from, CheckItem item, Nanos timeout,
                             std::function<void(ReserveReply)> done);
  /// `ticket` has kMaxTicket bytes at most.
  virtual void serve_settle(crdt::PeerIndex from, std::string ticket, std::uint64_t hits,
                            std::function<void(SettleReply)> done);
};

struct PeerAddress {
  crdt::Member member;
  std::string address;  ///< "10.0.0.2:7400", "[fd00::2]:7400"
  /// Whom its certificate is of, where TLS is on: a URI or a DNS name. Empty: member_uri().
  std::string certificate = {};
};

struct PeerOptions {
  crdt::Member self;
  crdt::Incarnation incarnation;
  std::string cluster;
  std::string secret;  ///< shared by the cluster; whoever knows it is a member. Empty only with tls
  std::string previous_secret;  ///< good as well, while a new one is brought in; may be empty
  /// Mutual TLS on every connection: a member is then who its certificate says. Its
  /// client_certificate is `required`. Null: none.
  std::shared_ptr<TlsContext> tls;
  std::string listen;              ///< "127.0.0.1:7400"; port 0 takes a free one
  std::vector<PeerAddress> peers;  ///< crdt::PeerIndex is the index in here
  std::function<Nanos()> wall;     ///< the wall clock that peers are told; may be empty
  Nanos connect_timeout = 2 * kSecond;
  Nanos handshake_timeout = 5 * kSecond;  ///< of an outgoing session
  Nanos backoff_min = 100 * kMillisecond;
  Nanos backoff_max = 5 * kSecond;
  Nanos ping_interval = kSecond;
  Nanos dead_after = 3 * kSecond;        ///< a session on which nothing arrives for so long
  Nanos message_timeout = 20 * kSecond;  ///< from the first byte of an inbound message to the last
  std::size_t max_in_flight = 64;        ///< messages to one peer that it has not answered
  std::size_t max_in_flight_bytes = 8u << 20;  ///< and their size together
  /// Inbound connections without a proof of who it is; each member's session has a place of its own
  /// beside them. For one more the oldest goes that has said nothing, or the oldest: of those from
  /// the same address if these are as many as one address may have. Who floods it must bring so
  /// many, faster than a member gets its first bytes out, to keep that member waiting.
  std::size_t max_strangers = 128;
  std::size_t max_strangers_of_address = 64;
  Nanos stranger_timeout = 2 * kSecond;  ///< to prove it, about

  /// What one peer is asked to decide (PeerNetwork::ask), beside the messages.
  std::size_t max_asked = 4096;            ///< requests that have no answer yet
  std::size_t max_asked_bytes = 2u << 20;  ///< on the wire, with what the answers may take
  /// So many deadlines missed in a row, with no answer in between, open the circuit: requests then
  /// fail at once for ask_pause, after which one is let through as a probe; if that misses too, for
  /// twice as long, up to ask_pause_max. A new session closes it. 0: no circuit breaker.
  unsigned ask_misses = 3;
  Nanos ask_pause = kSecond;
  Nanos ask_pause_max = 10 * kSecond;
  /// What one peer has this node decide (PeerHandler::serve); beyond, its calls are shed.
  std::size_t max_served = 8192;             ///< requests being answered
  std::size_t max_served_bytes = 16u << 20;  ///< memory that they and their answers take
};

struct LinkStatus {
  bool up = false;                ///< the outgoing session
  crdt::Incarnation incarnation;  ///< what the peer proved there; zero if down
  bool heard = false;             ///< an inbound session from this peer is live
  /// Within the last minute two live nodes proved that they are this member.
  bool two_of_name = false;
  /// This peer has seen the same of this node's name.
  bool sees_namesake = false;
  std::uint64_t sessions = 0;  ///< outgoing sessions since the start
  std::uint64_t sent = 0;      ///< messages
  std::uint64_t dropped = 0;   ///< no session, too much in flight, or out of bounds
  std::uint64_t rejected = 0;  ///< refused by the peer, or lost with the session
  std::uint64_t received = 0;
  std::uint64_t refused = 0;  ///< inbound messages that were not well-formed
  std::size_t in_flight = 0;
  std::size_t in_flight_bytes = 0;
  std::string last_error;  ///< of the outgoing side
  /// How far the peer's wall clock is ahead of PeerOptions::wall, by the quickest of the last few
  /// pings of this session: right to within half of the time that it took (`skew_error`).
  std::optional<Nanos> skew;
  Nanos skew_error = 0;
  bool refuses = false;  ///< that was the peer's word: it will not have us, or is another one

  std::uint64_t asked = 0;       ///< requests sent (PeerNetwork::ask)
  std::uint64_t ask_unsent = 0;  ///< failed without being sent
  std::uint64_t ask_missed = 0;  ///< sent, and not answered in time
  std::uint64_t ask_failed = 0;  ///< sent, and lost with the session, or shed by the peer
  std::size_t asking = 0;        ///< without an answer now
  std::uint64_t served = 0;      ///< requests of the peer, malformed ones included
  std::uint64_t serve_malformed = 0;
  std::uint64_t serve_shed = 0;  ///< refused: too much of the peer's was being answered
  std::size_t serving = 0;       ///< being answered now
};

/// Authenticated links to the other members of a cluster (docs/protocol.md). Every node dials every
/// other and sends on the connections it dialled; accepted ones only receive, and answer what they
/// are asked. Delivery of messages is not promised: the sync protocol tolerates loss, so nothing is
/// queued for a peer that is away or slow.
///
/// For the loop's thread only. The loop and the handler outlive it.
class PeerNetwork {
 public:
  PeerNetwork(EventLoop& loop, PeerOptions options, PeerHandler& handler);
  ~PeerNetwork();
  PeerNetwork(const PeerNetwork&) = delete;
  PeerNetwork& operator=(const PeerNetwork&) = delete;

  /// Listens and starts dialling. False, with a reason, if the options are wrong or the address is
  /// taken; nothing runs then.
  bool start(std::string& error);
  /// The port it listens on.
  std::uint16_t port() const;
  /// Sends one message, or drops and counts it. Returns whether it was sent.
  bool send(crdt::PeerIndex peer, const crdt::Message& message);
  /// Has `peer` decide `item`, by the rules that `item.rule_filter` names. `done` is called once,
  /// on the loop's thread, perhaps at once, and at the latest after `patience` (an hour at most) or
  /// when the network stops; it must not throw, and may call anything here, but not destroy the
  /// network. What is asked in one turn of the loop travels together, in the order of asking, and
  /// apart from the messages' bounds.
  ///
  /// A reply's error says whether the request may have been counted (ErrorKind): `unavailable` or
  /// `overloaded` if it was not sent, or the peer did not begin with it; `deadline` or `unknown` if
  /// it was sent and nothing more is known; `invalid` if it breaks a bound; else what the peer
  /// says. It is sent once: whether to ask again is the caller's choice.
  void ask(crdt::PeerIndex peer, CheckItem item, Nanos patience, std::function<void(Reply)> done);
  /// Has it reserve (docs/reserve.md), for `timeout`. After an error that leaves it open the peer
  /// may hold it all the same.
  void ask_reserve(crdt::PeerIndex peer, CheckItem item, Nanos timeout, Nanos patience,
                   std::function<void(ReserveReply)> done);
  /// Has it settle a ticket that it gave. It settles once: it may be sent again.
  void ask_settle(crdt::PeerIndex peer, std::string ticket, std::uint64_t hits, Nanos patience,
                  std::function<void(SettleReply)> done);
  /// A request to `peer` would be sent now: its session is up, not too much is unanswered, and the
  /// circuit is closed or due for a probe. Cheap.
  bool askable(crdt::PeerIndex peer) const;
  /// Goes on as `fresh`: what is up goes down, and sessions are made anew. The handler hears
  /// peer_down and then peer_up in later turns; nothing is sent or received in between.
  void set_incarnation(const crdt::Incarnation& fresh);
  /// Ends all sessions; peer_down is called for those that are up, and what was asked is told that
  /// it has no answer. Idempotent.
  void stop();

  LinkStatus status(crdt::PeerIndex peer) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace weir::rpc
