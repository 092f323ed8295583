#include <weir/node/fronts/redis/redis_batch.h>

#include <algorithm>
#include <limits>

#include <fmt/format.h>

#include <weir/node/fronts/redis/resp_text.h>

namespace weir::node {
namespace {

constexpr std::string_view kKey = "key";

std::uint64_t sum(std::uint64_t a, std::uint64_t b) {
  return a > std::numeric_limits<std::uint64_t>::max() - b
             ? std::numeric_limits<std::uint64_t>::max()
             : a + b;
}

std::uint64_t used(const Status& status) {
  return status.limit - std::min(status.limit, status.remaining);
}

/// The rule that is told of: the one that decided, or, if only rules in shadow matched, the first.
const Status* told(const Reply& reply) {
  if (const Status* decider = reply.decider()) return decider;
  return reply.statuses.empty() ? nullptr : &reply.statuses[0];
}

void append_failure(rpc::Output& out, const Error& error) {
  if (error.kind == ErrorKind::unauthenticated) {
    return append_resp_error(out, "NOAUTH " + error.detail);
  }
  if (error.kind == ErrorKind::forbidden) return append_resp_error(out, "NOPERM " + error.detail);
  append_resp_error(out, "ERR " + error.to_string());
}

void append_throttle(rpc::Output& out, const Reply& reply, const Status& status) {
  append_resp_array(out, 5);
  append_resp_integer(out, reply.allowed ? 0 : 1);
  append_resp_integer(out, status.limit);
  append_resp_integer(out, status.remaining);
  if (reply.allowed || status.retry_after == kNever) {
    append_resp_minus_one(out);
  } else {
    append_resp_integer(out, redis_cell_seconds(status.retry_after));
  }
  append_resp_integer(out, redis_cell_seconds(status.reset));
}

/// Rounded up, so that after as long the window is over.
std::uint64_t whole(Nanos length, Nanos unit) {
  return length <= 0 ? 0 : (static_cast<std::uint64_t>(length) - 1) / unit + 1;
}

void append_ttl(rpc::Output& out, const Status& status, Nanos unit) {
  if (used(status) == 0) return out.append(":-2\r\n");
  append_resp_integer(out, whole(status.reset, unit));
}

/// Says so if the window that the command names is another than the rule's.
bool refuse_window(rpc::Output& out, std::string_view command, const Status& status, Nanos window) {
  if (window == status.window) return false;
  append_resp_error(
      out, status.window == 0
               ? fmt::format("ERR the window of rule '{}' has no fixed length: leave out {}",
                             status.rule, command)
               : fmt::format("ERR the window of rule '{}' is {} ms: {} must name as much",
                             status.rule, status.window / kMillisecond, command));
  return true;
}

void append_set(rpc::Output& out, const RedisCall& call, const Reply& reply, const Status& status) {
  if (refuse_window(out, "EX or PX", status, call.window)) return;
  const bool peek = call.answer == RedisAnswer::set_peek;
  if (!peek && status.limit != 1) {
    return append_resp_error(
        out, fmt::format("ERR rule '{}' has limit {}: SET … NX needs a limit of 1, or the value 0",
                         status.rule, status.limit));
  }
  if (peek ? used(status) == 0 : reply.allowed) {
    append_resp_simple(out, "OK");
  } else {
    append_resp_nil(out, call.resp3);
  }
}

void append_value(rpc::Output& out, const RedisCall& call, const Status& status) {
  const std::uint64_t count = used(status);
  if (count == 0) return append_resp_nil(out, call.resp3);
  append_resp_bulk(out, std::to_string(count));
}

void append_one(rpc::Output& out, const RedisCall& call, const Reply& reply, const Status& status) {
  switch (call.answer) {
    case RedisAnswer::throttle:
      return append_throttle(out, reply, status);
    case RedisAnswer::count:
      return append_resp_integer(out, sum(used(status), reply.allowed ? 0 : call.number));
    case RedisAnswer::value:
      return append_value(out, call, status);
    case RedisAnswer::ttl:
      return append_ttl(out, status, kSecond);
    case RedisAnswer::pttl:
      return append_ttl(out, status, kMillisecond);
    case RedisAnswer::expire:
      if (!refuse_window(out, "EXPIRE", status, call.window)) {
        append_resp_integer(out, call.number == 0 || used(status) == 0 ? 0 : 1);
      }
      return;
    case RedisAnswer::set:
    case RedisAnswer::set_peek:
      return append_set(out, call, reply, status);
    case RedisAnswer::given_back:
    case RedisAnswer::exists:
      return;
  }
}

}  // namespace

std::uint64_t redis_cell_seconds(Nanos length) {
  if (length < kMillisecond) return 0;
  return static_cast<std::uint64_t>(length / kSecond) + 1;
}

void RedisBatch::clear() {
  calls.clear();
  requests.clear();
  entries.clear();
  kept.clear();
}

rpc::Output& RedisBatch::tell() {
  RedisCall& call = calls.emplace_back();
  call.done = true;
  return call.text;
}

RedisCall& RedisBatch::begin(RedisAnswer answer, bool resp3) {
  RedisCall& call = calls.emplace_back();
  call.answer = answer;
  call.resp3 = resp3;
  return call;
}

void RedisBatch::ask(std::string_view domain, std::string_view key, std::uint64_t hits,
                     RequestKind kind, const RequestLimit& limit) {
  Request& request = requests.emplace_back();
  request.domain = domain;
  request.hits = hits;
  request.kind = kind;
  request.limit = limit;
  entries.push_back({kKey, key});
  ++calls.back().requests;
}

std::span<const Request> RedisBatch::finish() {
  for (std::size_t i = 0; i < requests.size(); ++i) requests[i].descriptor = {&entries[i], 1};
  return requests;
}

void append_answer(rpc::Output& out, const RedisCall& call, std::span<const Reply> replies) {
  std::uint64_t keys = 0;
  for (const Reply& reply : replies) {
    if (!reply.error.empty()) return append_failure(out, reply.error);
    const Status* status = told(reply);
    if (status == nullptr) {
      return append_resp_error(out, "ERR no rule limits this key (docs/redis.md: which rule)");
    }
    if (call.answer == RedisAnswer::given_back) {
      keys += reply.given_back != 0 ? 1 : 0;
    } else if (call.answer == RedisAnswer::exists) {
      keys += used(*status) != 0 ? 1 : 0;
    } else {
      append_one(out, call, reply, *status);
    }
  }
  if (call.answer == RedisAnswer::given_back || call.answer == RedisAnswer::exists) {
    append_resp_integer(out, keys);
  }
}

}  // namespace weir::node
