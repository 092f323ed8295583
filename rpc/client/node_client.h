#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <weir/crdt/time.h>
#include <weir/rpc/check.h>
#include <weir/rpc/net/tls_context.h>

namespace weir::rpc {

struct NodeClientOptions {
  std::string address;                ///< of a node's client port: "127.0.0.1:7401", "[::1]:7401"
  Nanos connect_timeout = kSecond;    ///< TLS handshake included
  Nanos deadline = 5 * kMillisecond;  ///< of every call, from the call to its answer
  Nanos status_deadline = kSecond;    ///< of status()
  Nanos backoff_min = 50 * kMillisecond;  ///< between attempts to connect, with jitter
  Nanos backoff_max = 2 * kSecond;
  /// So many deadlines missed in a row, with no answer in between, open the circuit: calls then
  /// fail at once for breaker_open, after which one call is let through as a probe; if that misses
  /// too, for twice as long, up to breaker_max. 0: no circuit breaker.
  unsigned breaker_misses = 3;
  Nanos breaker_open = 10 * kSecond;
  Nanos breaker_max = 2 * kMinute;
  /// The connection speaks TLS, with what the context says; null: it does not. Files that changed
  /// are read again when it is made anew.
  std::shared_ptr<TlsContext> tls = nullptr;
  /// Whom the node's certificate is of, where TLS is on: a URI, a DNS name or a literal address.
  /// Empty: the address.
  std::string tls_name = {};
  /// A bearer token, told to the node before anything else: who asks. Without TLS whoever sees the
  /// connection sees it. Empty: none.
  std::string token = {};
  std::size_t max_waiting = 65536;  ///< requests not yet answered; beyond, calls fail at once
};

/// Asks a node whether requests may pass. Keeps one connection, which a thread of its own serves
/// and makes anew when it is lost. Requests of concurrent callers travel together. Several nodes,
/// leases and failure policies: client/client.h.
///
/// Thread-safe. No call throws for what happens on the network: errors are in the replies, as
/// Reply::error says. Every call ends within its deadline and counts for the circuit breaker.
/// A request is sent at most once: whether to retry is the caller's choice, and without an id
/// (CheckItem) it may count twice.
///
/// Callbacks are called once, on the client's thread (or at once on the caller's, if the call fails
/// there); they must be quick, and neither throw nor call what waits. A call's deadline is
/// NodeClientOptions::deadline after it, unless one is given.
class NodeClient {
 public:
  explicit NodeClient(NodeClientOptions options);
  /// What is unanswered fails: ErrorKind::unavailable if it was not sent, else
  /// ErrorKind::unknown. No other call may be running.
  ~NodeClient();
  NodeClient(const NodeClient&) = delete;
  NodeClient& operator=(const NodeClient&) = delete;

  using Deadline = std::optional<std::chrono::steady_clock::time_point>;

  /// Waits for the answers, at most for the deadline. One reply per item, in order.
  std::vector<Reply> check(std::span<const CheckItem> items);
  Reply check(const CheckItem& item);

  using Done = std::function<void(std::vector<Reply>)>;
  void check_async(std::vector<CheckItem> items, Done done, Deadline deadline = {});
  std::future<std::vector<Reply>> check_async(std::vector<CheckItem> items);

  /// Reserves `item.hits` as an estimate; see docs/reserve.md. After an error that leaves it open
  /// the node may hold it all the same, for `timeout` (up to a day): send it again with the same id
  /// to learn the ticket.
  ReserveReply reserve(const CheckItem& item, Nanos timeout);
  void reserve_async(CheckItem item, Nanos timeout, std::function<void(ReserveReply)> done,
                     Deadline deadline = {});
  /// Settles a ticket of this node with what was really used. It settles once: after an error that
  /// leaves it open it may be sent again.
  SettleReply settle(const std::string& ticket, std::uint64_t hits);
  void settle_async(std::string ticket, std::uint64_t hits, std::function<void(SettleReply)> done,
                    Deadline deadline = {});
  /// Asks for the item and for a block of at most `most` hits with it, for at most `term`. A block
  /// that is granted after the deadline (by less than half a second) is told to `late`, beside the
  /// error to `done`: its ticket should go back.
  void lease_async(CheckItem item, std::uint64_t most, Nanos term,
                   std::function<void(LeaseReply)> done, Deadline deadline = {},
                   std::function<void(LeaseReply)> late = {});

  /// The rules that the node goes by.
  void rules_async(std::function<void(RulesReply)> done, Deadline deadline = {});

  /// The node's status as JSON. Empty on failure, with the reason in `error`.
  std::string status(Error* error = nullptr);

  /// A connection is up. For tests and status pages; it may be down a moment later.
  bool connected() const;
  /// A call would be sent: a connection is up, and the circuit is closed or due for a probe. Cheap.
  bool usable() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace weir::rpc
