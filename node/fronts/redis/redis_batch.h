#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <weir/crdt/time.h>
#include <weir/limits/reply.h>
#include <weir/limits/request.h>
#include <weir/rpc/net/output.h>

namespace weir::node {

/// How a command that asks about keys is told what came of it.
enum class RedisAnswer : std::uint8_t {
  throttle,    ///< CL.THROTTLE
  count,       ///< INCR, DECR: the count
  value,       ///< GET: the count as text, or nil
  ttl,         ///< TTL: seconds
  pttl,        ///< PTTL: milliseconds
  expire,      ///< EXPIRE: 1 if there is a count, and its window is that long
  set,         ///< SET NX EX: OK or nil
  set_peek,    ///< the same with the value 0, which counts nothing
  given_back,  ///< DEL: how many keys' counts were given back
  exists,      ///< EXISTS: how many keys have a count
};

/// One command in turn: what it asks, or the answer that it has already.
struct RedisCall {
  RedisAnswer answer = RedisAnswer::throttle;
  bool resp3 = false;
  bool done = false;           ///< `text` is the answer
  std::uint32_t requests = 0;  ///< of the batch's
  std::uint64_t number = 0;    ///< hits
  Nanos window = 0;            ///< that EXPIRE or SET names
  rpc::Output text = {};
};

/// The commands that are decided together, in order. Views in it are of the bytes that were read,
/// or of `kept`.
struct RedisBatch {
  std::vector<RedisCall> calls;
  std::vector<Request> requests;  ///< one key each: its only entry is the one of `entries`
  std::vector<Entry> entries;
  std::deque<std::vector<std::string>> kept;  ///< commands of transactions

  bool empty() const { return calls.empty(); }
  void clear();
  /// A call whose answer is known, for the caller to write.
  rpc::Output& tell();
  /// A call that asks; its requests follow by ask().
  RedisCall& begin(RedisAnswer answer, bool resp3);
  /// One more request of the last call. `domain` and `key` are views.
  void ask(std::string_view domain, std::string_view key, std::uint64_t hits,
           RequestKind kind = RequestKind::check, const RequestLimit& limit = {});
  /// The requests, with their entries in place. Valid until the batch changes.
  std::span<const Request> finish();
};

/// Appends what a command is told; as many replies as it asked.
void append_answer(rpc::Output& out, const RedisCall& call, std::span<const Reply> replies);

/// Whole seconds as redis-cell tells them: of a length of 1 ms or more it takes those that are full
/// and adds one, so that 2 s are told as 3.
std::uint64_t redis_cell_seconds(Nanos length);

}  // namespace weir::node
