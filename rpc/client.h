#pragma once

#include <cstddef>
#include <functional>
#include <future>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <weir/crdt/time.h>
#include <weir/rpc/check.h>

namespace weir::rpc {

struct ClientOptions {
  std::string address;  ///< of a node's client port: "127.0.0.1:7401", "[::1]:7401"
  Nanos connect_timeout = kSecond;
  Nanos deadline = 5 * kMillisecond;      ///< of every check, from the call to its answer
  Nanos status_deadline = kSecond;        ///< of status()
  Nanos backoff_min = 50 * kMillisecond;  ///< between attempts to connect, with jitter
  Nanos backoff_max = 2 * kSecond;
  /// So many deadlines missed in a row, with no answer in between, open the circuit: calls then
  /// fail at once for breaker_open, after which one call is let through as a probe; if that misses
  /// too, for twice as long, up to breaker_max. 0: no circuit breaker.
  unsigned breaker_misses = 3;
  Nanos breaker_open = 10 * kSecond;
  Nanos breaker_max = 2 * kMinute;
  std::size_t max_waiting = 65536;  ///< requests not yet answered; beyond, calls fail at once
};

/// Asks a node whether requests may pass. Keeps one connection, which a thread of its own serves
/// and makes anew when it is lost. Requests of concurrent callers travel together.
///
/// Thread-safe. No call throws for what happens on the network: errors are CheckReply::error,
/// either "deadline" (the node may or may not have counted the request) or "unavailable: …" (it was
/// not sent, or the node refused it), or what was wrong with the request. A request is sent at most
/// once: whether to retry is the caller's choice, and without an id (CheckItem) it may count twice.
class Client {
 public:
  explicit Client(ClientOptions options);
  /// What is unanswered fails with "unavailable: client closed". No other call may be running.
  ~Client();
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  /// Waits for the answers, at most for the deadline. One reply per item, in order.
  std::vector<CheckReply> check(std::span<const CheckItem> items);
  CheckReply check(const CheckItem& item);

  /// `done` is called once, on the client's thread (or at once on the caller's, if the call fails
  /// there); it must be quick, and neither throw nor call check().
  using Done = std::function<void(std::vector<CheckReply>)>;
  void check_async(std::vector<CheckItem> items, Done done);
  std::future<std::vector<CheckReply>> check_async(std::vector<CheckItem> items);

  /// Reserves `item.hits` as an estimate; see docs/reserve.md. Waits for the answer, at most for
  /// the deadline. After an error the node may hold it all the same, for `timeout` (up to a day):
  /// send it again with the same id to learn the ticket.
  ReserveReply reserve(const CheckItem& item, Nanos timeout);
  /// Settles a ticket of this node with what was really used. After "deadline" it may be settled.
  SettleReply settle(const std::string& ticket, std::uint64_t hits);

  /// The node's status as JSON. Empty on failure, with the reason in `error`.
  std::string status(std::string* error = nullptr);

  /// A connection is up. For tests and status pages; it may be down a moment later.
  bool connected() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace weir::rpc
