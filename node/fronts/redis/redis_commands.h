#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weir/node/fronts/redis/redis_batch.h>

namespace weir::node {

/// Commands queued by one MULTI at most, and their bytes.
inline constexpr std::size_t kMaxRedisQueued = 1024;
inline constexpr std::size_t kMaxRedisQueuedBytes = 64u << 10;

/// What one connection's commands mean: what they ask goes into a batch, what they only say of the
/// connection is kept here (protocol version, name, transaction). docs/redis.md says what each
/// command does. For one thread.
class RedisCommands {
 public:
  /// Shows a token; false if it is not known. Without one, forgets what was shown.
  using Authenticate = std::function<bool(std::optional<std::string_view> token)>;

  /// `domain` outlives it. `id` names the connection.
  RedisCommands(std::string_view domain, std::uint64_t id, Authenticate authenticate)
      : domain_(domain), id_(id), authenticate_(std::move(authenticate)) {}

  /// True of a command before which all that was asked must be decided, as it changes who asks.
  static bool changes_caller(std::string_view name);

  /// `arguments`: the command's name and what follows; at least one. Adds one call to `batch`, for
  /// EXEC one and those of its commands. The views must live until the batch is decided.
  void run(std::span<const std::string_view> arguments, RedisBatch& batch);

  /// The connection is to be closed once everything so far was answered.
  bool ends() const { return ends_; }

 private:
  using Arguments = std::span<const std::string_view>;
  struct Command;
  static const Command kCommands[];
  static const Command* find(std::string_view name);

  void queue(Arguments a, const Command* command, RedisBatch& batch);
  bool authenticate(std::string_view token, rpc::Output& out);

  void throttle(Arguments a, RedisBatch& batch);
  void increment(Arguments a, RedisBatch& batch);
  void decrement(Arguments a, RedisBatch& batch);
  void look(Arguments a, RedisBatch& batch);
  void expire(Arguments a, RedisBatch& batch);
  void set(Arguments a, RedisBatch& batch);
  void keys(Arguments a, RedisBatch& batch);
  void multi(Arguments a, RedisBatch& batch);
  void exec(Arguments a, RedisBatch& batch);
  void discard(Arguments a, RedisBatch& batch);
  void watch(Arguments a, RedisBatch& batch);
  void ping(Arguments a, RedisBatch& batch);
  void echo(Arguments a, RedisBatch& batch);
  void quit(Arguments a, RedisBatch& batch);
  void reset(Arguments a, RedisBatch& batch);
  void hello(Arguments a, RedisBatch& batch);
  void auth(Arguments a, RedisBatch& batch);
  void select(Arguments a, RedisBatch& batch);
  void client(Arguments a, RedisBatch& batch);
  void command(Arguments a, RedisBatch& batch);
  void info(Arguments a, RedisBatch& batch);
  void config(Arguments a, RedisBatch& batch);
  void script(Arguments a, RedisBatch& batch);
  void forged(Arguments a, RedisBatch& batch);

  void leave_transaction();

  const std::string_view domain_;
  const std::uint64_t id_;
  const Authenticate authenticate_;
  bool resp3_ = false;
  bool ends_ = false;
  bool queuing_ = false;
  bool spoilt_ = false;  // some command of the transaction was refused
  std::vector<std::vector<std::string>> queued_;
  std::size_t queued_bytes_ = 0;
  std::string name_;
};

}  // namespace weir::node
