#include <weir/node/fronts/http/http_front.h>

#include <microhttpd.h>
#include <sys/socket.h>
#include <unistd.h>
#include <uv.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <exception>
#include <list>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <weir/node/fronts/http/http_json.h>
#include <weir/rpc/net/address.h>

namespace weir::node {
namespace {

// A body above the limit is read and thrown away up to here, so that the client gets to read its
// 413; one above both is cut off.
constexpr std::size_t kMaxDiscarded = 1u << 20;
// MHD's pool of one connection: request line, headers and the answer's headers.
constexpr std::size_t kConnectionMemory = 32u << 10;
constexpr int kListenBacklog = 511;
constexpr int kStopRounds = 16;
constexpr const char* kJson = "application/json";
constexpr const char* kProblem = "application/problem+json";

enum class Route { check, reserve, settle, status, metrics, health, ready };

struct Endpoint {
  std::string_view path;
  Route route;
  bool post;
};
constexpr std::array<Endpoint, 7> kEndpoints = {{{"/v1/check", Route::check, true},
                                                 {"/v1/reserve", Route::reserve, true},
                                                 {"/v1/settle", Route::settle, true},
                                                 {"/v1/status", Route::status, false},
                                                 {"/metrics", Route::metrics, false},
                                                 {"/healthz", Route::health, false},
                                                 {"/readyz", Route::ready, false}}};

struct Reply {
  unsigned status = 200;
  std::string content_type = kJson;
  std::string body;
  std::vector<HttpHeader> headers;
};

Reply problem(unsigned status, std::string_view title, std::string_view detail,
              std::string_view field = {}) {
  return {status, kProblem, problem_json(status, title, detail, field), {}};
}

Reply bad_request(const BodyError& error) {
  const std::string detail =
      error.field.empty() ? error.expected : error.field + ": " + error.expected;
  return problem(400, "Bad request", detail, error.field);
}

Reply stopping_reply() {
  Reply reply = problem(503, "Service unavailable", "This node is stopping.");
  reply.headers.emplace_back("Connection", "close");
  return reply;
}

Nanos monotonic() {
  return static_cast<Nanos>(uv_hrtime());
}

// A listening, non-blocking socket, or -1.
int listen_on(const rpc::Address& address, std::string& error) {
  sockaddr_storage name{};
  const socklen_t length = rpc::to_sockaddr(address, name);
  const int fd = ::socket(name.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) {
    error = std::strerror(errno);
    return -1;
  }
  const int on = 1;
  ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (::bind(fd, reinterpret_cast<const sockaddr*>(&name), length) != 0 ||
      ::listen(fd, kListenBacklog) != 0) {
    error = std::strerror(errno);
    ::close(fd);
    return -1;
  }
  return fd;
}

std::uint16_t port_of(int fd) {
  sockaddr_storage name{};
  socklen_t length = sizeof(name);
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&name), &length) != 0) return 0;
  return rpc::from_sockaddr(name).port;
}

}  // namespace

struct HttpFront::Impl {
  struct Connection;
  using Connections = std::list<Connection*>;
  struct Exchange;
  using Exchanges = std::list<std::shared_ptr<Exchange>>;

  // One TCP connection. Lives from MHD's "started" to its "closed".
  struct Connection {
    MHD_Connection* handle = nullptr;
    Nanos since = 0;  // last progress
    bool listed = false;
    Connections::iterator at;  // in idle_ if listed, else in busy_
  };

  // One request. MHD's per-request pointer owns it; whoever answers later holds it weakly.
  struct Exchange {
    Impl* impl = nullptr;
    MHD_Connection* handle = nullptr;
    const Endpoint* endpoint = nullptr;
    std::string method;
    std::string body;
    std::size_t received = 0;
    bool dispatched = false;
    bool suspended = false;
    std::optional<Reply> reply;
    Nanos deadline = 0;
    Exchanges::iterator at;  // in waiting_, while suspended
  };

  // libuv closes handles in a later turn of the loop: they outlive the front.
  struct Handles {
    uv_poll_t poll{};
    uv_timer_t timer{};
    int open = 0;
    Impl* impl = nullptr;
    static void closed(uv_handle_t* handle) {
      auto* self = static_cast<Handles*>(handle->data);
      if (--self->open == 0) delete self;
    }
  };

  Impl(uv_loop_t* loop, std::string address, HttpOptions options, HttpHandler& handler)
      : loop_(loop), address_(std::move(address)), options_(options), handler_(handler) {}

  bool start(std::string& error);
  void stop();

  // Driving MHD.
  void run();
  void schedule();
  void arm(Nanos wait);
  void expire();
  void close_handles();

  // One request's way.
  MHD_Result received(MHD_Connection* handle, const char* url, const char* method, const char* data,
                      std::size_t* size, void** slot);
  void begin(Exchange& exchange, std::string_view url, const char* method);
  bool refuse_early(const Exchange& exchange) const;
  void dispatch(const std::shared_ptr<Exchange>& exchange);
  void dispatch_post(const std::shared_ptr<Exchange>& exchange);
  void dispatch_settle(const std::shared_ptr<Exchange>& exchange);
  Reply answer_reply(const HttpAnswer& answer) const;
  void complete(Exchange& exchange, Reply reply);
  void suspend(const std::shared_ptr<Exchange>& exchange);
  static MHD_Result queue(MHD_Connection* handle, const Reply& reply);

  // Idle connections, the one without progress for longest first.
  static Connection* connection_of(MHD_Connection* handle);
  void list(Connection& connection);
  void unlist(Connection& connection);

  static MHD_Result on_request(void* self, MHD_Connection* handle, const char* url,
                               const char* method, const char* version, const char* data,
                               std::size_t* size, void** slot);
  // Paths are compared as they come: "/v1/check%00" is another one than "/v1/check".
  static std::size_t on_unescape(void*, MHD_Connection*, char* text) { return std::strlen(text); }
  static void on_completed(void* self, MHD_Connection* handle, void** slot,
                           MHD_RequestTerminationCode why);
  static void on_connection(void* self, MHD_Connection* handle, void** context,
                            MHD_ConnectionNotificationCode what);

  uv_loop_t* const loop_;
  const std::string address_;
  const HttpOptions options_;
  HttpHandler& handler_;
  MHD_Daemon* daemon_ = nullptr;
  Handles* handles_ = nullptr;
  std::uint16_t port_ = 0;
  bool stopping_ = false;
  bool again_ = false;  // MHD has work that its epoll descriptor does not show
  std::size_t exchanges_ = 0;
  Connections idle_;
  Connections busy_;   // wait for the handler, or are being closed
  Exchanges waiting_;  // suspended; the earliest deadline first
};

bool HttpFront::Impl::start(std::string& error) {
  if (daemon_ != nullptr || stopping_) {
    error = "the HTTP front was started before";
    return false;
  }
  const std::optional<rpc::Address> address = rpc::parse_address(address_, error);
  if (!address) return false;
  std::string reason;
  const int fd = listen_on(*address, reason);
  if (fd < 0) {
    error = fmt::format("{}: {}", address_, reason);
    return false;
  }
  const unsigned flags = MHD_USE_EPOLL | MHD_ALLOW_SUSPEND_RESUME;
  daemon_ =
      MHD_start_daemon(flags, 0, nullptr, nullptr, &Impl::on_request, this,                  //
                       MHD_OPTION_LISTEN_SOCKET, static_cast<MHD_socket>(fd),                //
                       MHD_OPTION_CONNECTION_LIMIT, std::max(1u, options_.max_connections),  //
                       MHD_OPTION_CONNECTION_MEMORY_LIMIT, kConnectionMemory,                //
                       MHD_OPTION_STRICT_FOR_CLIENT, 1,                                      //
                       MHD_OPTION_UNESCAPE_CALLBACK, &Impl::on_unescape, nullptr,            //
                       MHD_OPTION_NOTIFY_COMPLETED, &Impl::on_completed, this,               //
                       MHD_OPTION_NOTIFY_CONNECTION, &Impl::on_connection, this,             //
                       MHD_OPTION_END);
  if (daemon_ == nullptr) {
    ::close(fd);
    error = fmt::format("{}: cannot start the HTTP server", address_);
    return false;
  }
  port_ = port_of(fd);
  const MHD_DaemonInfo* info = MHD_get_daemon_info(daemon_, MHD_DAEMON_INFO_EPOLL_FD);

  handles_ = new Handles;
  handles_->impl = this;
  handles_->timer.data = handles_;
  uv_timer_init(loop_, &handles_->timer);
  ++handles_->open;
  handles_->poll.data = handles_;
  int failed = info == nullptr ? UV_ENOTSUP : uv_poll_init(loop_, &handles_->poll, info->epoll_fd);
  if (failed == 0) {
    ++handles_->open;
    failed = uv_poll_start(&handles_->poll, UV_READABLE, [](uv_poll_t* poll, int, int) {
      static_cast<Handles*>(poll->data)->impl->run();
    });
  }
  if (failed != 0) {
    close_handles();
    MHD_stop_daemon(daemon_);
    daemon_ = nullptr;
    port_ = 0;
    error = fmt::format("{}: {}", address_, uv_strerror(failed));
    return false;
  }
  run();
  return true;
}

void HttpFront::Impl::close_handles() {
  Handles* handles = std::exchange(handles_, nullptr);
  handles->impl = nullptr;
  uv_timer_stop(&handles->timer);
  // Counted before the first close: the callbacks come later, but all of them must be waited for.
  const bool polling = handles->open == 2;
  uv_close(reinterpret_cast<uv_handle_t*>(&handles->timer), &Handles::closed);
  if (polling) {
    uv_poll_stop(&handles->poll);
    uv_close(reinterpret_cast<uv_handle_t*>(&handles->poll), &Handles::closed);
  }
}

void HttpFront::Impl::stop() {
  if (daemon_ == nullptr || stopping_) return;
  stopping_ = true;
  const MHD_socket listener = MHD_quiesce_daemon(daemon_);
  if (listener != MHD_INVALID_SOCKET) ::close(listener);
  while (!waiting_.empty()) complete(*waiting_.front(), stopping_reply());
  // The answers are small and go into the sockets' buffers at once; whoever does not take them, or
  // is still sending a request, is cut off.
  for (int i = 0; i < kStopRounds && exchanges_ > 0; ++i) MHD_run(daemon_);
  // A request that completed in those rounds was answered at once, so nothing is suspended now.
  close_handles();
  MHD_stop_daemon(daemon_);
  daemon_ = nullptr;
  port_ = 0;
}

void HttpFront::Impl::run() {
  expire();
  again_ = false;
  MHD_run(daemon_);
  schedule();
}

// Arms the timer for whatever comes first: work that MHD has left, a deadline, an idle connection.
void HttpFront::Impl::schedule() {
  const Nanos now = monotonic();
  Nanos wait = again_ ? 0 : kNever;
  MHD_UNSIGNED_LONG_LONG timeout = 0;
  if (MHD_get_timeout(daemon_, &timeout) == MHD_YES) {
    wait = std::min(
        wait, static_cast<Nanos>(std::min<MHD_UNSIGNED_LONG_LONG>(timeout, 60'000)) * kMillisecond);
  }
  if (!waiting_.empty()) wait = std::min(wait, waiting_.front()->deadline - now);
  if (!idle_.empty()) wait = std::min(wait, idle_.front()->since + options_.idle_timeout - now);
  if (wait == kNever) {
    uv_timer_stop(&handles_->timer);
  } else {
    arm(wait);
  }
}

void HttpFront::Impl::arm(Nanos wait) {
  uv_update_time(loop_);
  uv_timer_start(
      &handles_->timer, [](uv_timer_t* timer) { static_cast<Handles*>(timer->data)->impl->run(); },
      milliseconds_rounded_up(wait), 0);
}

void HttpFront::Impl::expire() {
  const Nanos now = monotonic();
  while (!waiting_.empty() && waiting_.front()->deadline <= now) {
    complete(*waiting_.front(),
             problem(503, "Service unavailable", "The answer was not durable in time."));
  }
  while (!idle_.empty() && idle_.front()->since + options_.idle_timeout <= now) {
    Connection& connection = *idle_.front();
    unlist(connection);
    // MHD has no call to close a connection; it notices that the socket is shut.
    const MHD_ConnectionInfo* info =
        MHD_get_connection_info(connection.handle, MHD_CONNECTION_INFO_CONNECTION_FD);
    if (info != nullptr) ::shutdown(info->connect_fd, SHUT_RDWR);
  }
}

HttpFront::Impl::Connection* HttpFront::Impl::connection_of(MHD_Connection* handle) {
  const MHD_ConnectionInfo* info =
      MHD_get_connection_info(handle, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
  return info == nullptr ? nullptr : static_cast<Connection*>(info->socket_context);
}

void HttpFront::Impl::list(Connection& connection) {
  connection.since = monotonic();
  idle_.splice(idle_.end(), connection.listed ? idle_ : busy_, connection.at);
  connection.listed = true;
}

void HttpFront::Impl::unlist(Connection& connection) {
  if (!connection.listed) return;
  busy_.splice(busy_.end(), idle_, connection.at);
  connection.listed = false;
}

void HttpFront::Impl::on_connection(void* self, MHD_Connection* handle, void** context,
                                    MHD_ConnectionNotificationCode what) {
  auto* impl = static_cast<Impl*>(self);
  if (what == MHD_CONNECTION_NOTIFY_STARTED) {
    auto connection = std::make_unique<Connection>();
    connection->handle = handle;
    connection->at = impl->busy_.insert(impl->busy_.end(), connection.get());
    impl->list(*connection);
    *context = connection.release();
  } else if (auto* connection = static_cast<Connection*>(*context)) {
    (connection->listed ? impl->idle_ : impl->busy_).erase(connection->at);
    delete connection;
    *context = nullptr;
    // At its limit MHD looks away from the listener, and back only at a run after this one.
    impl->again_ = true;
  }
}

MHD_Result HttpFront::Impl::on_request(void* self, MHD_Connection* handle, const char* url,
                                       const char* method, const char*, const char* data,
                                       std::size_t* size, void** slot) {
  // Nothing may unwind into C: what cannot be answered is cut off.
  try {
    return static_cast<Impl*>(self)->received(handle, url, method, data, size, slot);
  } catch (...) {
    return MHD_NO;
  }
}

void HttpFront::Impl::on_completed(void* self, MHD_Connection* handle, void** slot,
                                   MHD_RequestTerminationCode) {
  auto* impl = static_cast<Impl*>(self);
  if (auto* owner = static_cast<std::shared_ptr<Exchange>*>(*slot)) {
    --impl->exchanges_;
    delete owner;
    *slot = nullptr;
  }
  if (Connection* connection = connection_of(handle)) impl->list(*connection);
}

MHD_Result HttpFront::Impl::received(MHD_Connection* handle, const char* url, const char* method,
                                     const char* data, std::size_t* size, void** slot) {
  if (*slot == nullptr) {
    auto exchange = std::make_shared<Exchange>();
    exchange->impl = this;
    exchange->handle = handle;
    begin(*exchange, url, method);
    const bool refused = refuse_early(*exchange);
    *slot = new std::shared_ptr<Exchange>(std::move(exchange));
    ++exchanges_;
    if (!refused) return MHD_YES;
    return queue(handle, problem(413, "Content too large",
                                 fmt::format("The body may have {} bytes.", options_.max_body)));
  }
  const std::shared_ptr<Exchange> exchange = *static_cast<std::shared_ptr<Exchange>*>(*slot);
  if (*size != 0) {
    exchange->received += *size;
    if (exchange->received > options_.max_body + kMaxDiscarded) return MHD_NO;
    if (exchange->received <= options_.max_body && exchange->endpoint != nullptr &&
        exchange->endpoint->post) {
      exchange->body.append(data, *size);
    }
    *size = 0;
    return MHD_YES;
  }
  if (!exchange->dispatched) {
    exchange->dispatched = true;
    dispatch(exchange);
    if (!exchange->reply) {
      suspend(exchange);
      return MHD_YES;
    }
  }
  if (!exchange->reply) return MHD_NO;
  return queue(handle, *exchange->reply);
}

void HttpFront::Impl::begin(Exchange& exchange, std::string_view url, const char* method) {
  exchange.method = method;
  const auto endpoint = std::find_if(kEndpoints.begin(), kEndpoints.end(),
                                     [&](const Endpoint& e) { return e.path == url; });
  if (endpoint != kEndpoints.end()) exchange.endpoint = &*endpoint;
}

// True if the body is not worth reading: the client waits to be asked for it, or it is far too
// large. Answered now, the connection closes after the answer.
bool HttpFront::Impl::refuse_early(const Exchange& exchange) const {
  const char* text =
      MHD_lookup_connection_value(exchange.handle, MHD_HEADER_KIND, MHD_HTTP_HEADER_CONTENT_LENGTH);
  if (text == nullptr) return false;
  const std::string_view digits(text);
  std::uint64_t length = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), length);
  if (error == std::errc::result_out_of_range) return true;
  if (error != std::errc() || end == digits.data() || length <= options_.max_body) return false;
  return length > options_.max_body + kMaxDiscarded ||
         MHD_lookup_connection_value(exchange.handle, MHD_HEADER_KIND, MHD_HTTP_HEADER_EXPECT) !=
             nullptr;
}

void HttpFront::Impl::dispatch(const std::shared_ptr<Exchange>& exchange) {
  if (stopping_) return complete(*exchange, stopping_reply());
  if (exchange->received > options_.max_body) {
    return complete(*exchange,
                    problem(413, "Content too large",
                            fmt::format("The body may have {} bytes.", options_.max_body)));
  }
  if (exchange->endpoint == nullptr) {
    return complete(*exchange, problem(404, "Not found", "There is no such endpoint."));
  }
  const bool post = exchange->endpoint->post;
  const bool allowed =
      post ? exchange->method == "POST" : exchange->method == "GET" || exchange->method == "HEAD";
  if (!allowed) {
    const char* allow = post ? "POST" : "GET, HEAD";
    Reply reply = problem(405, "Method not allowed", fmt::format("Expected {}.", allow));
    reply.headers.emplace_back("Allow", allow);
    return complete(*exchange, std::move(reply));
  }
  try {
    std::string why;
    switch (exchange->endpoint->route) {
      case Route::check:
      case Route::reserve:
      case Route::settle:
        return dispatch_post(exchange);
      case Route::status:
        return complete(*exchange, {200, kJson, handler_.status_json(), {}});
      case Route::metrics:
        return complete(*exchange,
                        {200, "text/plain; version=0.0.4; charset=utf-8", handler_.metrics(), {}});
      case Route::health:
      case Route::ready: {
        const bool health = exchange->endpoint->route == Route::health;
        if (health ? handler_.healthy(why) : handler_.ready(why)) {
          return complete(*exchange, {200, "text/plain; charset=utf-8", "ok\n", {}});
        }
        return complete(*exchange, problem(503, health ? "Not healthy" : "Not ready", why));
      }
    }
  } catch (const std::exception& e) {
    complete(*exchange, problem(500, "Internal error", e.what()));
  }
}

void HttpFront::Impl::dispatch_post(const std::shared_ptr<Exchange>& exchange) {
  const char* type =
      MHD_lookup_connection_value(exchange->handle, MHD_HEADER_KIND, MHD_HTTP_HEADER_CONTENT_TYPE);
  if (type == nullptr || !is_json_content_type(type)) {
    return complete(*exchange, problem(415, "Unsupported media type",
                                       "Expected Content-Type: application/json."));
  }
  if (exchange->endpoint->route == Route::settle) return dispatch_settle(exchange);
  const bool reserve = exchange->endpoint->route == Route::reserve;
  CheckBody body;
  BodyError error;
  if (!(reserve ? parse_reserve : parse_check)(exchange->body, body, error)) {
    return complete(*exchange, bad_request(error));
  }
  std::vector<Entry> entries;
  entries.reserve(body.descriptor.size());
  for (const auto& [key, value] : body.descriptor) entries.push_back({key, value});
  const Request request{body.domain, entries, body.hits, body.request_id, body.over_admission};
  auto done = [weak = std::weak_ptr<Exchange>(exchange)](const HttpAnswer& answer) {
    const std::shared_ptr<Exchange> waiting = weak.lock();
    if (waiting == nullptr) return;
    waiting->impl->complete(*waiting, waiting->impl->answer_reply(answer));
  };
  if (reserve) {
    handler_.reserve(request, body.timeout, std::move(done));
  } else {
    handler_.check(request, std::move(done));
  }
}

void HttpFront::Impl::dispatch_settle(const std::shared_ptr<Exchange>& exchange) {
  SettleBody body;
  BodyError error;
  if (!parse_settle(exchange->body, body, error)) {
    return complete(*exchange, bad_request(error));
  }
  handler_.settle(
      body.ticket, body.hits,
      [weak = std::weak_ptr<Exchange>(exchange)](const HttpSettled& settled) {
        const std::shared_ptr<Exchange> waiting = weak.lock();
        if (waiting == nullptr) return;
        Reply reply;
        if (!settled.error.empty()) {
          reply = problem(503, "Service unavailable", settled.error);
        } else if (!settled.known) {
          reply =
              problem(404, "Unknown ticket",
                      "No such ticket is open here: it was settled, has timed out, or is another "
                      "node's.",
                      "ticket");
        } else {
          reply.body = settled_json(settled);
        }
        waiting->impl->complete(*waiting, std::move(reply));
      });
}

Reply HttpFront::Impl::answer_reply(const HttpAnswer& answer) const {
  if (!answer.error.empty()) return problem(503, "Service unavailable", answer.error);
  Reply reply;
  reply.status = answer.allowed ? 200 : 429;
  reply.content_type = answer.allowed ? kJson : kProblem;
  reply.body = answer_json(answer);
  reply.headers = rate_limit_headers(answer, options_.reset);
  return reply;
}

// The first answer counts.
void HttpFront::Impl::complete(Exchange& exchange, Reply reply) {
  if (exchange.reply) return;
  exchange.reply = std::move(reply);
  if (!exchange.suspended) return;
  exchange.suspended = false;
  MHD_Connection* handle = exchange.handle;
  if (Connection* connection = connection_of(handle)) list(*connection);
  waiting_.erase(exchange.at);  // may be the last owner but MHD's: it still holds one
  MHD_resume_connection(handle);
  // Resumed at MHD's next run, of which nothing else reminds the loop.
  again_ = true;
  arm(0);
}

void HttpFront::Impl::suspend(const std::shared_ptr<Exchange>& exchange) {
  exchange->suspended = true;
  exchange->deadline = monotonic() + options_.answer_timeout;
  exchange->at = waiting_.insert(waiting_.end(), exchange);
  if (Connection* connection = connection_of(exchange->handle)) unlist(*connection);
  MHD_suspend_connection(exchange->handle);
}

MHD_Result HttpFront::Impl::queue(MHD_Connection* handle, const Reply& reply) {
  MHD_Response* response = MHD_create_response_from_buffer(
      reply.body.size(), const_cast<char*>(reply.body.data()), MHD_RESPMEM_MUST_COPY);
  if (response == nullptr) return MHD_NO;
  MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE, reply.content_type.c_str());
  MHD_add_response_header(response, MHD_HTTP_HEADER_CACHE_CONTROL, "no-store");
  for (const auto& [name, value] : reply.headers) {
    MHD_add_response_header(response, name.c_str(), value.c_str());
  }
  const MHD_Result queued = MHD_queue_response(handle, reply.status, response);
  MHD_destroy_response(response);
  return queued;
}

void HttpHandler::reserve(const Request&, Nanos, std::function<void(const HttpAnswer&)> done) {
  HttpAnswer answer;
  answer.error = "reservations are not served here";
  done(answer);
}

void HttpHandler::settle(std::string_view, std::uint64_t,
                         std::function<void(const HttpSettled&)> done) {
  HttpSettled settled;
  settled.error = "reservations are not served here";
  done(settled);
}

HttpFront::HttpFront(uv_loop_s* loop, std::string address, HttpOptions options,
                     HttpHandler& handler)
    : impl_(std::make_unique<Impl>(loop, std::move(address), options, handler)) {}

HttpFront::~HttpFront() {
  stop();
}

bool HttpFront::start(std::string& error) {
  return impl_->start(error);
}

std::uint16_t HttpFront::port() const {
  return impl_->port_;
}

void HttpFront::stop() {
  impl_->stop();
}

}  // namespace weir::node
