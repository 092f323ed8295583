#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <weir/bench/wire/links.h>
#include <weir/bench/wire/load.h>
#include <weir/rpc/net/tls_context.h>

namespace weir::bench {

struct RpcTarget {
  std::uint16_t port = 0;  ///< on 127.0.0.1
  std::uint64_t keys = 0;  ///< of which each check has one, at random
  unsigned hits = 1;       ///< of each check; 0 asks and consumes nothing
};

struct RpcShape {
  unsigned connections = 1;
  unsigned in_flight = 1;  ///< calls on each of them
  unsigned batch = 1;      ///< checks in a call
};

/// Asks over Cap'n Proto RPC, in one thread, as cheaply as it can: the messages are those of a
/// standard client (a call, and its finish once it is answered), each a copy of one with another
/// key in it. Each call is made anew once it is answered; those that one read has answered go out
/// together. A latency is that of a call; requests are counted in checks. Every call throws
/// std::runtime_error, or kj::Exception, if a check fails or is denied.
class RpcLoad {
 public:
  /// Connects, and asks for the service.
  RpcLoad(const RpcTarget& target, const RpcShape& shape);
  Load closed(double seconds);
  /// As many checks a second, whole calls at even distances; a call that is due waits while as many
  /// as the shape says are unanswered.
  Load paced(double rate, double seconds);
  /// Each key from `first` on once, in the order of the indices; the last calls may go on with the
  /// first keys.
  Load ask_all(std::uint64_t first = 0);

 private:
  struct Message {
    std::string bytes;
    std::vector<std::size_t> keys_at{};
  };
  struct Connection {
    std::uint32_t service = 0;     // its number
    std::vector<Message> calls{};  // by id
    std::vector<Message> finishes{};
    std::vector<std::uint64_t> since{};
  };

  void open(Link& link);
  void append_call(Connection& connection, std::uint32_t id, std::uint64_t now);
  /// Takes what has been answered, and tells `answered(id)` of each call; where that says so the
  /// call is made anew.
  template <typename Answered>
  void take_answers(Link& link, std::uint64_t now, Answered&& answered);
  /// Calls are made anew until `over(ns since the first one)`.
  template <typename Over>
  Load again_and_again(Over&& over);
  std::uint32_t read_answer(std::string_view frame);

  RpcTarget target_;
  RpcShape shape_;
  std::uint64_t random_;
  bool in_order_ = false;       // of the keys' indices
  std::uint64_t next_key_ = 0;  // then
  Links links_;
  std::vector<Connection> connections_;  // by link
  std::string output_;
  Load load_;
};

/// The same with a stock client: KJ's RPC system on KJ's own event loop.
Load kj_load(const RpcTarget& target, const RpcShape& shape, double seconds);

/// Asks through the client library's connection to a node, which puts the checks of concurrent
/// callers into one call: `in_flight` callers with one check each. Throws std::runtime_error if a
/// check fails or is denied. `tls`: null for none.
Load client_load(const RpcTarget& target, unsigned in_flight, double seconds,
                 std::shared_ptr<rpc::TlsContext> tls = nullptr);

}  // namespace weir::bench
