#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include <weir/crdt/time.h>
#include <weir/limits/request.h>
#include <weir/node/fronts/http/http_headers.h>

struct uv_loop_s;

namespace weir::node {

/// What the front asks the node. All calls come from the loop's thread. A call that throws is
/// answered with 500.
class HttpHandler {
 public:
  virtual ~HttpHandler() = default;

  /// Decides. The request's views are valid during the call. `done` is called once, on the loop's
  /// thread, inline or later (when the answer waits for a commit); it may be called, without
  /// effect, when the client, the front or the time to answer is gone.
  virtual void check(const Request& request, std::function<void(const HttpAnswer&)> done) = 0;

  /// The same for a reservation (the answer has a ticket) and its settlement. As they are here they
  /// answer that they can't.
  virtual void reserve(const Request& request, Nanos timeout,
                       std::function<void(const HttpAnswer&)> done);
  virtual void settle(std::string_view ticket, std::uint64_t hits,
                      std::function<void(const HttpSettled&)> done);

  virtual std::string status_json() = 0;
  virtual std::string metrics() = 0;
  /// The process works. False: it should be restarted; says why.
  virtual bool healthy(std::string& why) = 0;
  /// Requests may be sent here. False: not now; says why.
  virtual bool ready(std::string& why) = 0;
};

struct HttpOptions {
  ResetFormat reset = ResetFormat::seconds;
  /// Connections held at once; further ones wait to be accepted. At least 1.
  unsigned max_connections = 1024;
  std::size_t max_body = 64u << 10;  ///< bytes of a request's body; larger ones are answered 413
  /// A connection on which no request completes for this long is closed, however slowly it sends
  /// or reads. Time that the handler takes does not count.
  Nanos idle_timeout = kMinute;
  /// A check that the handler has not answered after this long is answered 503.
  Nanos answer_timeout = 5 * kSecond;
};

/// HTTP/1.1 on a libuv loop, in the loop's own thread: no thread of its own. docs/http.md describes
/// the endpoints. Not thread-safe. Memory per connection is bounded (32 KiB and a body).
///
/// The loop must outlive the front and run once more after stop(), so that libuv closes its
/// handles. SIGPIPE should be ignored by the program.
class HttpFront {
 public:
  /// `address` is literal: "127.0.0.1:7402"; port 0 takes a free one. `loop` and `handler` must
  /// outlive the front.
  HttpFront(uv_loop_s* loop, std::string address, HttpOptions options, HttpHandler& handler);
  ~HttpFront();  ///< stops
  HttpFront(const HttpFront&) = delete;
  HttpFront& operator=(const HttpFront&) = delete;

  /// Listens. False with the reason; may then be called again. Once stopped, it stays stopped.
  bool start(std::string& error);
  /// The real port; 0 before start().
  std::uint16_t port() const;
  /// Answers what waits for the handler with 503 and closes the listener and every connection
  /// before it returns. Must not be called from within a call to the handler. Idempotent.
  void stop();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace weir::node
