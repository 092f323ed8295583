#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <weir/limits/rules/rule.h>
#include <weir/rpc/check.h>
#include <weir/rpc/client/lease_book.h>
#include <weir/rpc/client/node_client.h>

namespace weir {

using rpc::CheckItem;

struct ClientOptions {
  /// Client ports of a region's nodes: "10.0.0.1:7401". At least one.
  std::vector<std::string> nodes;
  Nanos deadline = 5 * kMillisecond;  ///< of every call, from the call to its answer
  /// How the connection to each node behaves: connecting, back-off, circuit breaker (by default 3
  /// missed deadlines open it for 10 s, then one probe, doubling). Address and deadline are
  /// ignored.
  rpc::NodeClientOptions connection = {};
  /// Descriptor entries whose values choose the node. Empty: the key of the first rule that
  /// matches, if `rules` are given or learned, else the whole descriptor. Best is what the rules
  /// count by: then most keys are counted by one node.
  std::vector<std::string> route_by = {};
  /// What decides when no node answers in time: each rule's on_failure. Null: they are learned from
  /// the nodes, and asked for again every `rules_interval`; until they are known (rules_known())
  /// nothing decides then, and the reply has an error.
  std::shared_ptr<const RuleSet> rules = nullptr;
  Nanos rules_interval = 30 * kSecond;  ///< 0: they are not learned
  /// Requests with one of these descriptor entries pass when no node answers, whatever the rules.
  std::vector<std::pair<std::string, std::string>> allowlist = {};
  /// An open rule then lets limit / fallback_parts * 1.2 pass here. 0: as many as there are nodes.
  unsigned fallback_parts = 0;
  LeaseOptions leases = {};
};

enum class Source : std::uint8_t {
  node,        ///< a node answered this request
  lease,       ///< from a block that a node had granted
  remembered,  ///< the denial that a node gave lately
  fallback,    ///< no node answered in time
};

struct ClientReply : Reply {
  Source source = Source::node;
  /// Not as the rules ask for: no node decided, or one did without its disk or its room.
  bool degraded = false;
  /// Denied although no rule counted it out: "limiter_unavailable".
  std::string reason = {};
  Error cause = {};  ///< source fallback: why no node answered
};

struct Reservation {
  ClientReply decision;
  std::string ticket;  ///< names its node too; empty if nothing is held
};

struct ClientCounters {
  std::uint64_t by_node = 0;  ///< decisions, by source
  std::uint64_t by_lease = 0;
  std::uint64_t remembered = 0;
  std::uint64_t by_fallback = 0;
  std::uint64_t degraded = 0;   ///< decisions that were
  std::uint64_t calls = 0;      ///< of any kind to any node, retries included
  std::uint64_t failovers = 0;  ///< calls to a node that was not the first choice
  std::uint64_t retries = 0;    ///< calls to the same node, of a request with an id
  std::size_t leased_blocks = 0;
};

/// Asks a region's nodes whether requests may pass: the client library.
///
/// Each request goes to the node that its key chooses (rendezvous hash, ClientOptions::route_by).
/// If that one surely did not count it (it is down, its circuit is open, it sheds load), to the
/// next one, while the deadline allows. If it may have counted it, the request is sent again only
/// if it has an id, and only there; else the rules' failure policy decides.
///
/// With leases on, a hot key's requests are let pass here from blocks that its node holds for this
/// client, and denials answer the same key for up to 100 ms. See LeaseOptions; requests with an id
/// and peeks are always asked for.
///
/// Thread-safe. No call takes longer than its deadline (and a millisecond of slack); none throws
/// for what happens on the network. Callbacks are called once, on a thread of the client's or at
/// once; they must be quick and neither throw nor call what waits.
class Client {
 public:
  /// Connects in the background. Throws std::invalid_argument if there are no nodes.
  explicit Client(ClientOptions options);
  /// Returns leases (which takes up to 250 ms if a node does not answer). No other call may be
  /// running; what is unanswered is answered as if no node did.
  ~Client();
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  ClientReply check(const CheckItem& item);
  std::vector<ClientReply> check(std::span<const CheckItem> items);
  using Done = std::function<void(ClientReply)>;
  void check_async(CheckItem item, Done done);
  std::future<ClientReply> check_async(CheckItem item);

  /// Reserves `item.hits` as an estimate (docs/reserve.md).
  Reservation reserve(const CheckItem& item, Nanos timeout);
  void reserve_async(CheckItem item, Nanos timeout, std::function<void(Reservation)> done);
  /// Settles it with what was really used, at the node that gave the ticket.
  SettleReply settle(const std::string& ticket, std::uint64_t hits);
  void settle_async(std::string ticket, std::uint64_t hits, std::function<void(SettleReply)> done);

  /// Rules were given, or learned from a node.
  bool rules_known() const;
  ClientCounters counters() const;
  /// Nodes to which a connection is up.
  std::size_t connected() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace weir
