#pragma once

#include <kj/async.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <weir/crdt/ids.h>
#include <weir/crdt/message.h>
#include <weir/crdt/replica.h>
#include <weir/crdt/time.h>
#include <weir/rpc/net/event_loop.h>

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
};

struct PeerAddress {
  crdt::Member member;
  std::string address;  ///< "10.0.0.2:7400", "[fd00::2]:7400"
};

struct PeerOptions {
  crdt::Member self;
  crdt::Incarnation incarnation;
  std::string cluster;
  std::string secret;              ///< shared by the cluster; whoever knows it is a member
  std::string listen;              ///< "127.0.0.1:7400"; port 0 takes a free one
  std::vector<PeerAddress> peers;  ///< crdt::PeerIndex is the index in here
  Nanos connect_timeout = 2 * kSecond;
  Nanos handshake_timeout = 5 * kSecond;
  Nanos backoff_min = 100 * kMillisecond;
  Nanos backoff_max = 5 * kSecond;
  Nanos ping_interval = kSecond;
  Nanos dead_after = 3 * kSecond;        ///< a session on which nothing arrives for so long
  Nanos message_timeout = 20 * kSecond;  ///< from the first byte of an inbound message to the last
  std::size_t max_in_flight = 64;        ///< messages to one peer that it has not answered
  std::size_t max_in_flight_bytes = 8u << 20;  ///< and their size together
  std::size_t max_inbound = 64;                ///< connections, strangers included
};

struct LinkStatus {
  bool up = false;                ///< the outgoing session
  crdt::Incarnation incarnation;  ///< what the peer proved there; zero if down
  bool heard = false;             ///< an inbound session from this peer is live
  std::uint64_t sessions = 0;     ///< outgoing sessions since the start
  std::uint64_t sent = 0;         ///< messages
  std::uint64_t dropped = 0;      ///< no session, too much in flight, or out of bounds
  std::uint64_t rejected = 0;     ///< refused by the peer, or lost with the session
  std::uint64_t received = 0;
  std::uint64_t refused = 0;  ///< inbound messages that were not well-formed
  std::size_t in_flight = 0;
  std::size_t in_flight_bytes = 0;
  std::string last_error;  ///< of the outgoing side
};

/// Authenticated links to the other members of a cluster (docs/protocol.md). Every node dials every
/// other and sends on the connections it dialled; accepted ones only receive. Delivery is not
/// promised: the sync protocol tolerates loss, so nothing is queued for a peer that is away or
/// slow.
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
  /// Goes on as `fresh`: what is up goes down, and sessions are made anew. The handler hears
  /// peer_down and then peer_up in later turns; nothing is sent or received in between.
  void set_incarnation(const crdt::Incarnation& fresh);
  /// Ends all sessions; peer_down is called for those that are up. Idempotent.
  void stop();

  LinkStatus status(crdt::PeerIndex peer) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace weir::rpc
