#pragma once

// What redis_server.cc, redis_connection.cc and redis_front.cc share.

#include <uv.h>

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include <weir/node/access/session.h>
#include <weir/node/fronts/redis/redis_commands.h>
#include <weir/node/fronts/redis/redis_front.h>
#include <weir/node/fronts/redis/resp_parser.h>
#include <weir/rpc/net/byte_stream.h>

namespace weir::node {

class RedisConnection;

using RedisMilliseconds = std::uint64_t;  // of StreamLoop::now()

/// Connections of which one thing is true. Each list is in the order in which they came to it, and
/// so in that of their deadlines.
struct RedisConnections {
  std::list<std::unique_ptr<RedisConnection>> list;
  RedisMilliseconds timeout = 0;  // 0: they may stay
};

/// Commands that are being decided. Shared with what the service calls, which may come when the
/// connection is gone.
struct RedisWork {
  RedisConnection* connection = nullptr;
  RedisBatch batch;
  std::vector<std::size_t> parts;         // requests of those calls that ask
  std::vector<std::uint32_t> part_calls;  // which calls these are
  std::size_t next = 0;                   // the first call whose answer is not written
};

/// Connections of one loop, from wherever they come. For the loop's thread only; the loop must run
/// once more after it is destroyed.
class RedisServer final : public rpc::Deferred {
 public:
  RedisServer(rpc::StreamLoop& loop, Service& service, RedisFrontOptions options,
              std::shared_ptr<ConnectionBudget> budget);
  ~RedisServer() { stop(); }
  RedisServer(const RedisServer&) = delete;
  RedisServer& operator=(const RedisServer&) = delete;

  /// A stream that nobody has started; null is ignored.
  void accept(std::unique_ptr<rpc::ByteStream> stream, const rpc::Address& peer);
  void drain();
  void stop();

  // For the connections.
  void arm(RedisMilliseconds at);
  RedisMilliseconds now() const { return loop.now(); }
  void run_deferred() noexcept override { dead.list.clear(); }

  rpc::StreamLoop& loop;
  Service& service;
  const RedisFrontOptions options;
  const std::shared_ptr<ConnectionBudget> budget;
  RedisConnections fresh;      // has asked nothing yet; the longest idle first
  RedisConnections idle;       // the same of those that have
  RedisConnections arriving;   // a part of a command is there
  RedisConnections waiting;    // for the service
  RedisConnections blocked;    // until the other side takes what it is told
  RedisConnections lingering;  // all is said, until the other side closes
  RedisConnections dead;       // closed: destroyed at the end of the turn
  std::shared_ptr<RedisWork> work = std::make_shared<RedisWork>();  // of who is being read
  RedisCounters counters;
  bool draining = false;

 private:
  bool take(const rpc::Address& peer);
  bool make_room(const rpc::Address* of);
  void on_timer();
  void drain_some();

  std::uint64_t serial_ = 0;
  RedisMilliseconds armed_ = ~RedisMilliseconds{0};
  uv_timer_t* timer_;  // freed by libuv's close callback
  bool stopped_ = false;
};

// One connection. Its commands' way: on_data → consume → collect (parses; each becomes a call of
// the batch) → decide (the service answers, or does not yet) → back to consume.
class RedisConnection final : public rpc::ByteStream::User, public rpc::Deferred {
 public:
  RedisConnection(RedisServer& server, std::unique_ptr<rpc::ByteStream> stream,
                  const rpc::Address& peer, std::uint64_t id);
  ~RedisConnection();

  void start(std::list<std::unique_ptr<RedisConnection>>::iterator at, RedisConnections& list);
  void close();
  void on_deadline();
  /// Closes it if nothing is under way; false if it stays.
  bool drain();

  void on_data(std::span<char> bytes) override;
  void on_end(int error) override;
  void on_sent() override;
  void run_deferred() noexcept override { go_on(); }

  const rpc::Address& peer() const { return peer_; }
  bool unread() const { return stream_ != nullptr && stream_->unread(); }
  RedisMilliseconds since() const { return since_; }

 private:
  bool authenticate(std::optional<std::string_view> token);
  const Caller& caller();
  void consume(std::span<char> data, bool borrowed);
  bool collect(std::span<char> data, std::size_t& at);
  bool decide();
  void told(RedisWork& work, std::size_t part, std::span<Reply> replies);
  void write_known(RedisWork& work);
  void fail_rest(RedisWork& work, std::string_view text);
  void keep(std::span<char> data, std::size_t at, bool borrowed);
  void settle();
  void go_on();
  bool room();
  void linger();
  void close_when_sent();
  void move_to(RedisConnections& list);

  RedisServer& server_;
  std::unique_ptr<rpc::ByteStream> stream_;  // null: closed
  const rpc::Address peer_;
  std::optional<Session> session_;
  bool certificate_asked_ = false;
  RedisCommands commands_;
  RespParser parser_;
  rpc::Output in_;                   // what has arrived and is not done with; most often nothing
  std::shared_ptr<RedisWork> work_;  // the service has not answered all of it yet; else null

  RedisConnections* list_ = nullptr;
  std::list<std::unique_ptr<RedisConnection>>::iterator at_;
  RedisMilliseconds since_ = 0;
  bool asked_ = false;    // something was
  bool bad_ = false;      // what was sent is no RESP
  bool blocked_ = false;  // too much waits to be sent
  bool ended_ = false;    // the other side sends no more
  bool closed_at_sent_ = false;
  std::size_t discarded_ = 0;
};

}  // namespace weir::node
