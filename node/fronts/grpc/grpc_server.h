#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include <weir/crdt/time.h>
#include <weir/node/access/access.h>
#include <weir/node/fronts/http/http_server.h>
#include <weir/rpc/net/address.h>
#include <weir/rpc/net/byte_stream.h>

namespace weir::node {

class GrpcConnection;

/// gRPC's status codes.
enum class GrpcCode : std::uint8_t {
  ok = 0,
  cancelled = 1,
  unknown = 2,
  invalid_argument = 3,
  deadline_exceeded = 4,
  not_found = 5,
  permission_denied = 7,
  resource_exhausted = 8,
  unimplemented = 12,
  internal = 13,
  unavailable = 14,
  unauthenticated = 16,
};

/// What a method takes and gives.
enum class GrpcKind : std::uint8_t {
  none,       ///< there is no such method
  unary,      ///< a message each way
  streaming,  ///< any number of messages each way
};

/// One call and the way to answer it. For the loop's thread only.
///
/// The answer of a unary call is fail(), or
///   rpc::Output& out = call.begin_message();
///   … append to `out` …
///   call.end_message();
///   call.finish();
/// with no return to the loop in between. The first answer counts; one that comes after it, or
/// after the call is gone, has no effect. A streaming call has any number of messages before
/// finish() or fail(), whenever they come.
class GrpcCall {
 public:
  /// "/package.Service/Method", as the handler knows it.
  std::string_view path() const { return path_at_; }
  /// The message that it was handed over with. Valid during the handler's call. data() is null if a
  /// streaming call is handed over because its client has said its last.
  std::string_view message() const { return message_; }
  /// Its `authorization`, or text that proves nothing.
  std::string_view authorization() const;
  /// Who asks, by the connection and by that. Valid until it is asked of another call of the
  /// connection.
  const Caller& caller() const;
  /// Names the call for GrpcServer::find(). Never used again.
  std::uint64_t id() const { return id_; }

  rpc::Output& begin_message();
  void end_message();
  void finish() { finish(GrpcCode::ok, {}); }
  /// Ends it; `text` may be anything.
  void finish(GrpcCode code, std::string_view text);
  /// Ends it without a message; what was begun is dropped.
  void fail(GrpcCode code, std::string_view text);

 private:
  friend class GrpcConnection;
  friend class GrpcServer;

  enum class Phase : std::uint8_t {
    arriving,  ///< its messages are
    asked,     ///< handed over, and not answered
    finished,  ///< answered; it is being sent
  };

  using Milliseconds = std::uint64_t;  // of StreamLoop::now()

  GrpcConnection* connection_ = nullptr;  // null: it is free
  GrpcCall* next_ = nullptr;              // of the connection's
  GrpcCall* before_ = nullptr;
  std::uint64_t id_ = 0;
  std::int32_t stream_ = 0;
  std::string path_;           // as it was sent
  std::string_view path_at_;   // as the handler knows it
  std::string authorization_;  // as the session takes it
  std::string_view message_;
  rpc::Output in_;             // what has arrived of messages
  rpc::Output out_;            // messages of the answer
  std::size_t sent_ = 0;       // of it
  std::size_t whole_ = 0;      // bytes that are whole messages, and not sent
  std::size_t begin_ = 0;      // where in it the last message begins
  std::size_t fields_ = 0;     // bytes of the head
  std::string text_;           // of the status
  Milliseconds deadline_ = 0;  // the client's; 0: none
  std::multimap<Milliseconds, GrpcCall*>::iterator due_;
  GrpcKind kind_ = GrpcKind::none;
  Phase phase_ = Phase::arriving;
  GrpcCode code_ = GrpcCode::ok;
  bool has_due_ = false;
  bool post_ = false;  // of the head: the method
  bool grpc_ = false;  // the content type
  bool bad_timeout_ = false;
  bool has_authorization_ = false;
  bool ended_ = false;       // the client has said its last
  bool told_ended_ = false;  // and the handler knows
  bool queued_ = false;      // it is in the batch
  bool answering_ = false;   // the head of the answer was submitted
};

struct GrpcServerOptions {
  Access* access = nullptr;             ///< who may do what; null: nobody is known
  std::string_view front = {};          ///< Caller::front
  std::size_t max_message = 64u << 10;  ///< bytes of a message; larger ones are refused
  std::uint32_t max_streams = 256;      ///< calls open at once on a connection
  std::size_t max_head = 16u << 10;     ///< bytes of a call's fields, each with 32 more
  /// Bytes of messages that have arrived and are not decided, of a connection and of all: what is
  /// beyond is refused. The same of answers that the client does not take.
  std::size_t connection_bytes = 4u << 20;
  std::size_t all_bytes = 64u << 20;
  /// No more is read or written of a connection while so much waits to be sent.
  std::size_t max_waiting = 256u << 10;
  Nanos first_timeout = 10 * kSecond;    ///< for a connection's first bytes
  Nanos message_timeout = 10 * kSecond;  ///< from a unary call's head to the end of its message
  Nanos answer_timeout = 5 * kSecond;    ///< what the handler has not answered then has failed
  Nanos idle_timeout = 5 * kMinute;      ///< without a unary call
  Nanos stall_timeout = kMinute;         ///< with some, of which none completes
  /// A connection of this age is told to go, so that clients find nodes that came later; up to a
  /// tenth earlier, so that not all go at once.
  Nanos max_age = 30 * kMinute;
  Nanos last_word = 100 * kMillisecond;  ///< from that until nothing further is taken
  Nanos grace = 10 * kSecond;            ///< and until it is closed, whatever is open
  /// A connection that was idle for at least this long may be closed to make room for another.
  Nanos evict_after = kSecond;
};

/// gRPC over HTTP/2 on a libuv loop, over connections that others accept: nghttp2 without I/O of
/// its own. What a connection may cost is bounded, in memory and in time; of frames that bring
/// nothing (PING, SETTINGS, resets, empty DATA) so many are taken as calls that complete pay for,
/// and some more: who sends others is told to calm down and closed. For the loop's thread only.
class GrpcServer {
 public:
  class Handler {
   public:
    /// What there is at that path, which then becomes GrpcCall::path(): it must outlive the server.
    virtual GrpcKind kind_of(std::string_view& path) = 0;
    /// Calls of one connection of which messages arrived in one piece, in order; at least one. Each
    /// unary call comes once, and is answered during the call or later: then by its id, through
    /// GrpcServer::find(). A streaming one comes once a message, and once at the end of them. If
    /// this throws, what is not answered has failed. It must not call stop().
    virtual void handle(std::span<GrpcCall* const> batch) = 0;

   protected:
    ~Handler() = default;
  };

  struct Counters {
    std::uint64_t accepted = 0;
    std::uint64_t turned_away = 0;  ///< no room and nobody to close for it
    std::uint64_t evicted = 0;      ///< closed to make room
    std::uint64_t timed_out = 0;    ///< closed: idle, stalled, or silent from the start
    std::uint64_t aged = 0;         ///< told to go for their age
    std::uint64_t floods = 0;       ///< closed for frames that bring nothing
    std::uint64_t broken = 0;       ///< closed as what they spoke is no HTTP/2
    std::uint64_t calls = 0;        ///< handed to the handler
    std::uint64_t refused = 0;      ///< ended here, as they are no valid calls
    std::uint64_t late = 0;         ///< ended here, as their deadline passed or the handler's time
    std::uint64_t failed = 0;       ///< calls of the handler that threw
  };

  /// `loop` and `handler` must outlive the server; `budget` is shared. The loop must run once more
  /// after stop(), so that libuv closes its handles.
  GrpcServer(rpc::StreamLoop& loop, GrpcServerOptions options, Handler& handler,
             std::shared_ptr<ConnectionBudget> budget);
  ~GrpcServer();  ///< stops
  GrpcServer(const GrpcServer&) = delete;
  GrpcServer& operator=(const GrpcServer&) = delete;

  /// Serves a stream that nobody has started. Where the budget is spent, as HttpServer does.
  void accept(std::unique_ptr<rpc::ByteStream> stream, const rpc::Address& peer);
  /// The call of that id, while it is not answered and its connection is there; else null.
  GrpcCall* find(std::uint64_t id);
  /// Tells every connection to go: what is asked until then is answered.
  void drain();
  /// Closes every connection. Idempotent.
  void stop();

  std::size_t connections() const;
  /// Open calls, and bytes of their messages that are held.
  std::size_t calls() const;
  std::size_t held() const;
  const Counters& counters() const;

 private:
  friend class GrpcConnection;
  friend class GrpcCall;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace weir::node
