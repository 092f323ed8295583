#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <weir/crdt/time.h>
#include <weir/node/access/access.h>
#include <weir/node/fronts/http/http_parser.h>
#include <weir/rpc/net/address.h>
#include <weir/rpc/net/address_counts.h>
#include <weir/rpc/net/byte_stream.h>

namespace weir::node {

class HttpConnection;
class HttpServer;

/// How many connections may be open at once, over all servers that share it, and how many of them
/// from one address. Thread-safe.
class ConnectionBudget {
 public:
  enum class Taken : std::uint8_t { yes, all_are, those_of_its_address_are };

  explicit ConnectionBudget(std::size_t max, unsigned address_percent = 100)
      : max_(max),
        max_of_one_(std::clamp<std::size_t>(max * address_percent / 100, 1,
                                            std::max<std::size_t>(max, 1))) {}
  /// One more, unless as many are there as there may be.
  Taken take(const rpc::Address& from) {
    std::lock_guard lock(mutex_);
    if (by_address_.of(from) >= max_of_one_) return Taken::those_of_its_address_are;
    if (open_ >= max_) return Taken::all_are;
    ++open_;
    by_address_.add(from);
    return Taken::yes;
  }
  void give(const rpc::Address& from) {
    std::lock_guard lock(mutex_);
    --open_;
    by_address_.remove(from);
  }
  std::size_t open() const {
    std::lock_guard lock(mutex_);
    return open_;
  }
  std::size_t max() const { return max_; }

 private:
  const std::size_t max_;
  const std::size_t max_of_one_;
  mutable std::mutex mutex_;
  std::size_t open_ = 0;
  rpc::AddressCounts by_address_;
};

/// One request and the way to answer it. For the loop's thread only.
///
/// What the request's views see stays valid until it is answered, but moves to other memory when
/// HttpServer::Handler::handle() returns without an answer: whoever answers later asks again.
///
/// An answer is respond(), or, without a copy of the body,
///   Output& out = exchange.begin(200, "application/json");
///   exchange.field("Allow", "POST");     // or appended to `out` as whole lines with CR LF
///   exchange.begin_body();
///   … append to `out` …
///   exchange.finish();
/// with no return to the loop in between. The first answer counts; one that comes after it, or
/// after the connection is gone, has no effect.
class HttpExchange {
 public:
  std::string_view method() const { return head_.method; }
  /// "/…" or "*", as it was sent: nothing is unescaped.
  std::string_view path() const { return head_.path; }
  /// What follows the first '?'.
  std::string_view query() const { return head_.query; }
  /// The header field with the i-th name of HttpServerOptions::headers, without white space around
  /// it. data() is null if there is none; if it came again this is the first.
  std::string_view header(std::size_t i) const { return head_.fields[i]; }
  bool repeated(std::size_t i) const { return (head_.repeated >> i & 1u) != 0; }
  /// All lines of the head from the request line on, for fields that are wanted seldom.
  std::string_view head() const { return head_text_; }
  std::string_view body() const { return body_; }
  /// Where it comes from, without the port. Only until it is answered, and valid to the end of the
  /// turn.
  std::string_view host() const;

  /// Who asks, by the connection and by what the request's Authorization field says. Valid until it
  /// is asked of another exchange of the connection. Only until it is answered.
  const Caller& caller() const;
  /// Who asks, by the connection alone: of a request whose Authorization field is somebody else's.
  const Caller& connection_caller() const;
  /// That field, or text that proves nothing.
  std::string_view authorization() const;

  /// Names the exchange for HttpServer::find(), also from other threads. Never used again.
  std::uint64_t id() const { return id_; }

  /// Begins an answer: status line, Date, Content-Type if it is not empty, Connection if needed.
  /// Content-Length comes by itself. A body is left out for HEAD, 204 and 304.
  rpc::Output& begin(unsigned status, std::string_view content_type = {});
  /// A header field. Control bytes in the value become spaces.
  void field(std::string_view name, std::string_view value);
  /// Ends the header fields; the body follows.
  rpc::Output& begin_body();
  void finish();
  /// All of it. `fields` are whole header lines with CR LF, or empty.
  void respond(unsigned status, std::string_view content_type, std::string_view body,
               std::string_view fields = {});
  /// A problem document (RFC 9457) with type about:blank. `title` and `detail` must need no
  /// escaping in JSON.
  void respond_problem(unsigned status, std::string_view title, std::string_view detail);

 private:
  friend class HttpConnection;
  friend class HttpServer;

  void rebase(std::string_view from, const char* to);
  void write_length();

  HttpConnection* connection_ = nullptr;  // null: answered, or the connection is gone
  HttpExchange* next_ = nullptr;          // the connection's next request
  HttpHead head_;
  std::string_view head_text_;
  std::string_view body_;
  std::uint64_t id_ = 0;
  rpc::Output* out_ = nullptr;  // where the answer is written, while it is
  std::size_t begin_ = 0;       // where in it the answer begins
  std::size_t body_at_ = 0;     // and its body; 0: not yet
  unsigned status_ = 0;
  bool answered_ = false;  // but not yet in its turn
  bool last_ = false;      // of its batch
  rpc::Output early_;      // an answer that is not yet in its turn
};

struct HttpServerOptions {
  Access* access = nullptr;     ///< who may do what; null: nobody is known
  std::string_view front = {};  ///< Caller::front
  /// Names of the header fields that the handler wants; at most kMaxHttpNames - 1, in any case.
  std::vector<std::string> headers;
  std::size_t max_body = 64u << 10;  ///< bytes of a request's body; larger ones are answered 413
  /// Requests that are handed over at once. Where answers are large, few: after each batch the
  /// connection is read on only if at most max_waiting bytes wait to be sent.
  std::size_t max_batch = 64;
  std::size_t max_waiting = 256u << 10;
  /// A connection on which no request completes for this long is closed, however slowly it sends
  /// or reads. Time that the handler takes does not count.
  Nanos idle_timeout = kMinute;
  /// From a request's first byte to the end of its head.
  Nanos header_timeout = 10 * kSecond;
  /// A request that the handler has not answered after this long is answered 503.
  Nanos answer_timeout = 5 * kSecond;
  /// After a refusal, until the other side has taken it and closes.
  Nanos linger_timeout = 5 * kSecond;
  /// A connection that was idle for at least this long may be closed to make room for another.
  Nanos evict_after = kSecond;
};

/// HTTP/1.1 and 1.0 on a libuv loop, over connections that others accept. It parses strictly
/// (http_parser.h), keeps the order of answers, and bounds what a connection may cost: memory (none
/// but some hundred bytes while it rests) and time. For the loop's thread only, except where said.
///
/// A request that is refused here is answered with a problem document, and the connection closed;
/// up to 1 MiB that still arrives is thrown away, so that the client gets to read the answer.
class HttpServer {
 public:
  class Handler {
   public:
    /// Requests of one connection that arrived in one piece, in order; at least one. Each is
    /// answered during the call or later: then by its id, through HttpServer::find(). If this
    /// throws, what is not answered is answered 500. It must not call stop().
    virtual void handle(std::span<HttpExchange* const> batch) = 0;

   protected:
    ~Handler() = default;
  };

  struct Counters {
    std::uint64_t accepted = 0;
    std::uint64_t turned_away = 0;  ///< no room and nobody to close for it
    std::uint64_t evicted = 0;      ///< closed to make room
    std::uint64_t timed_out = 0;    ///< closed: idle, or slow to send a head
    std::uint64_t requests = 0;     ///< handed to the handler
    std::uint64_t refused = 0;      ///< answered here, as they are no valid requests
    std::uint64_t failed = 0;       ///< calls of the handler that threw
    std::uint64_t unanswered = 0;   ///< answered 503, as the handler did not
  };

  /// `loop` and `handler` must outlive the server; `budget` is shared. The loop must run once more
  /// after stop(), so that libuv closes its handles. Throws if `options.headers` has too many.
  HttpServer(rpc::StreamLoop& loop, HttpServerOptions options, Handler& handler,
             std::shared_ptr<ConnectionBudget> budget);
  ~HttpServer();  ///< stops
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  /// Serves a connected, non-blocking TCP socket, which it takes. If the budget is spent, one of
  /// its own connections makes room: the one that has been idle longest among those that never
  /// completed a request, else among all. If there is none the new one is closed. Where it is the
  /// address's part that is spent, one of that address does, of those that were idle longest.
  void accept(int fd, const rpc::Address& peer);
  /// The same for a stream that nobody has started.
  void accept(std::unique_ptr<rpc::ByteStream> stream, const rpc::Address& peer);

  /// The exchange of that id, while it is not answered and its connection is there; else null.
  HttpExchange* find(std::uint64_t id);

  /// From now on answers say that the connection closes, and those that are idle close, some in
  /// each turn.
  void drain();
  /// Answers what waits for the handler with 503 and closes every connection. Idempotent.
  void stop();

  std::size_t connections() const;
  const Counters& counters() const;

 private:
  friend class HttpConnection;
  friend class HttpExchange;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace weir::node
