#pragma once

#include <cstdint>

#include <weir/bench/wire/load.h>

namespace weir::bench {

struct RpcTarget {
  std::uint16_t port = 0;  ///< on 127.0.0.1
  std::uint64_t keys = 0;  ///< of which each check has one, at random
};

struct RpcShape {
  unsigned connections = 1;
  unsigned in_flight = 1;  ///< calls on each of them
  unsigned batch = 1;      ///< checks in a call
};

/// Asks with stock Cap'n Proto on KJ's own event loop: `in_flight` calls on each of so many
/// connections, each with `batch` checks, made anew as soon as it is answered. A latency is that of
/// a call; requests are counted in checks. Throws std::runtime_error, or kj::Exception, if a check
/// fails or is denied.
Load rpc_load(const RpcTarget& target, const RpcShape& shape, double seconds);

/// Asks through the client library's connection to a node, which puts the checks of concurrent
/// callers into one call: `in_flight` callers with one check each. Throws std::runtime_error if a
/// check fails or is denied.
Load client_load(const RpcTarget& target, unsigned in_flight, double seconds);

}  // namespace weir::bench
