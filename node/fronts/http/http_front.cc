#include <weir/node/fronts/http/http_front.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>
#include <vector>

#include <weir/node/fronts/http/forward_auth.h>
#include <weir/node/fronts/http/http_json.h>
#include <weir/node/fronts/http/http_listener.h>

namespace weir::node {
namespace {

enum class Route { none, check, checks, reserve, settle, forward_auth };

struct Endpoint {
  std::string_view path;
  Route route;
};
constexpr std::array<Endpoint, 4> kEndpoints = {{{"/v1/check", Route::check},
                                                 {"/v1/checks", Route::checks},
                                                 {"/v1/reserve", Route::reserve},
                                                 {"/v1/settle", Route::settle}}};

// Places in HttpServerOptions::headers.
constexpr std::size_t kContentType = 0;
constexpr std::size_t kPrefer = 1;

Route route_of(const HttpExchange& exchange) {
  for (const Endpoint& endpoint : kEndpoints) {
    if (endpoint.path == exchange.path()) return endpoint.route;
  }
  if (exchange.path().starts_with(kForwardAuthPath)) return Route::forward_auth;
  return Route::none;
}

void respond_problem(HttpExchange& exchange, const BodyError& error) {
  exchange.begin(400, content_type(400));
  append_problem(exchange.begin_body(), error);
  exchange.finish();
}

HttpServerOptions server_options(const HttpFrontOptions& front) {
  HttpServerOptions options = front.server;
  options.access = front.access;
  options.front = "http";
  options.headers = {"content-type", "prefer"};
  return options;
}

}  // namespace

struct HttpFront::Impl final : HttpServer::Handler {
  /// How many of a batch's requests one exchange asked.
  struct Part {
    HttpExchange* exchange = nullptr;
    std::uint64_t id = 0;  // of the exchange
    std::size_t count = 0;
    bool list = false;  // /v1/checks
    bool minimal = false;
  };
  Impl(rpc::EventLoop& loop, Service& s, HttpFrontOptions o,
       std::shared_ptr<ConnectionBudget> budget)
      : service(s),
        options(std::move(o)),
        forwarded(options.forward_auth),
        listener(loop, server_options(options), *this, std::move(budget), options.tls) {}

  void handle(std::span<HttpExchange* const> batch) override;
  bool refuse(HttpExchange& exchange, Route route);
  void gather(HttpExchange& exchange, Route route);
  void decide(const HttpExchange* asked);
  void answer(HttpExchange& exchange, const Part& part, std::span<const Reply> replies);
  void answer(HttpExchange& exchange, const Reply& reply, bool minimal);
  void reserve(HttpExchange& exchange);
  void settle(HttpExchange& exchange);
  void forward_auth(HttpExchange& exchange);

  Service& service;
  HttpFrontOptions options;
  BodyReader reader;
  ForwardAuthReader forwarded;
  std::vector<Part> parts;  // of the batch that is being read
  std::vector<std::size_t> sizes;
  HttpListener listener;
};

/// Checks that follow one another are decided together; anything else in between keeps its place.
void HttpFront::Impl::handle(std::span<HttpExchange* const> batch) {
  reader.clear();
  parts.clear();
  const HttpExchange* last = nullptr;  // of those that were gathered and wait for decide()
  for (HttpExchange* exchange : batch) {
    const Route route = route_of(*exchange);
    if (refuse(*exchange, route)) continue;
    if (route == Route::check || route == Route::checks) {
      // They are one caller's: a proxy may send several on one connection.
      if (last != nullptr && last->authorization() != exchange->authorization()) decide(last);
      gather(*exchange, route);
      last = parts.empty() ? nullptr : parts.back().exchange;
      continue;
    }
    decide(std::exchange(last, nullptr));
    if (route == Route::reserve) {
      reserve(*exchange);
    } else if (route == Route::settle) {
      settle(*exchange);
    } else {
      forward_auth(*exchange);
    }
  }
  decide(last);
}

/// Answers what is no request to an endpoint; true if it did.
bool HttpFront::Impl::refuse(HttpExchange& exchange, Route route) {
  if (route == Route::none) {
    node::respond_problem(exchange, 404, "Not Found", "There is no such endpoint.");
  } else if (route == Route::forward_auth) {
    return false;
  } else if (exchange.method() != "POST") {
    node::respond_problem(exchange, 405, "Method not allowed", "Expected POST.", "Allow: POST\r\n");
  } else if (!is_json_content_type(exchange.header(kContentType))) {
    node::respond_problem(exchange, 415, "Unsupported media type",
                          "Expected Content-Type: application/json.");
  } else {
    return false;
  }
  return true;
}

void HttpFront::Impl::gather(HttpExchange& exchange, Route route) {
  Part part;
  part.exchange = &exchange;
  part.id = exchange.id();
  part.list = route == Route::checks;
  part.minimal = !part.list && exchange.header(kPrefer).data() != nullptr &&
                 wants_minimal(exchange.header(kPrefer));
  const std::size_t before = reader.size();
  const bool good = part.list ? reader.checks(exchange.body()) : reader.check(exchange.body());
  if (!good) return respond_problem(exchange, reader.error());
  part.count = reader.size() - before;
  parts.push_back(part);
}

/// Has what was gathered decided. Mostly that is done at once, and the exchanges are where they
/// were; those of which something waits are found again by their ids.
void HttpFront::Impl::decide(const HttpExchange* asked) {
  if (parts.empty()) return;
  struct State {
    bool returned = false;
    std::vector<Part> parts;  // `exchange` is good until the service has returned
  };
  auto state = std::make_shared<State>();
  sizes.clear();
  for (const Part& part : parts) sizes.push_back(part.count);
  state->parts.swap(parts);
  service.check(reader.requests(), sizes, asked->caller(),
                [this, state](std::size_t index, std::span<Reply> replies) {
                  const Part& part = state->parts[index];
                  HttpExchange* exchange =
                      state->returned ? listener.server().find(part.id) : part.exchange;
                  if (exchange != nullptr) answer(*exchange, part, replies);
                });
  state->returned = true;
  reader.clear();
}

void HttpFront::Impl::answer(HttpExchange& exchange, const Part& part,
                             std::span<const Reply> replies) {
  if (!part.list) return answer(exchange, replies[0], part.minimal);
  exchange.begin(200, content_type(200));
  exchange.field("Cache-Control", "no-store");
  append_answers(exchange.begin_body(), replies);
  exchange.finish();
}

void HttpFront::Impl::answer(HttpExchange& exchange, const Reply& reply, bool minimal) {
  const unsigned status = http_status(reply);
  if (minimal && reply.error.empty()) {
    append_minimal_headers(exchange.begin(status), reply);
    exchange.begin_body();
    return exchange.finish();
  }
  rpc::Output& out = exchange.begin(status, content_type(status));
  exchange.field("Cache-Control", "no-store");
  append_rate_limit_headers(out, reply, options.reset, options.wall());
  append_answer(exchange.begin_body(), reply);
  exchange.finish();
}

void HttpFront::Impl::reserve(HttpExchange& exchange) {
  reader.clear();
  if (!reader.reserve(exchange.body())) return respond_problem(exchange, reader.error());
  service.reserve(reader.requests()[0], reader.timeout(), exchange.caller(),
                  [this, id = exchange.id()](ReserveReply& reply) {
                    HttpExchange* asked = listener.server().find(id);
                    if (asked == nullptr) return;
                    const unsigned status = http_status(reply.decision);
                    rpc::Output& out = asked->begin(status, content_type(status));
                    asked->field("Cache-Control", "no-store");
                    append_rate_limit_headers(out, reply.decision, options.reset, options.wall());
                    append_reserved(asked->begin_body(), reply);
                    asked->finish();
                  });
  reader.clear();
}

void HttpFront::Impl::settle(HttpExchange& exchange) {
  SettleBody body;
  if (!reader.settle(exchange.body(), body)) return respond_problem(exchange, reader.error());
  service.settle(body.ticket, body.hits, exchange.caller(),
                 [this, id = exchange.id()](SettleReply& reply) {
                   HttpExchange* asked = listener.server().find(id);
                   if (asked == nullptr) return;
                   const unsigned status = http_status(reply);
                   asked->begin(status, content_type(status));
                   asked->field("Cache-Control", "no-store");
                   if (status == 401) asked->field("WWW-Authenticate", "Bearer");
                   append_settled(asked->begin_body(), reply);
                   asked->finish();
                 });
}

/// A gateway looks at the status, and passes headers on, and sometimes the body of a denial.
void HttpFront::Impl::forward_auth(HttpExchange& exchange) {
  const auto request =
      forwarded.read(exchange.head(), exchange.method(), exchange.path(), exchange.host());
  if (!request) {
    exchange.begin(400, content_type(400));
    append_problem(exchange.begin_body(), BodyError{{}, forwarded.error()});
    return exchange.finish();
  }
  const std::size_t one = 1;
  // An Authorization field is that of the gateway's client, and for what stands behind it.
  service.check({&*request, 1}, {&one, 1}, exchange.connection_caller(),
                [this, id = exchange.id(), denial = denial_status_of(exchange.query())](
                    std::size_t, std::span<Reply> replies) {
                  HttpExchange* asked = listener.server().find(id);
                  if (asked == nullptr) return;
                  const Reply& reply = replies[0];
                  const bool denied = reply.error.empty() && !reply.allowed;
                  const unsigned status = denied && denial != 0 ? denial : http_status(reply);
                  rpc::Output& out =
                      asked->begin(status, status == 200 ? "" : content_type(status));
                  asked->field("Cache-Control", "no-store");
                  append_rate_limit_headers(out, reply, options.reset, options.wall());
                  rpc::Output& body = asked->begin_body();
                  if (status != 200) append_answer(body, reply);
                  asked->finish();
                });
}

HttpFront::HttpFront(rpc::EventLoop& loop, Service& service, HttpFrontOptions options,
                     std::shared_ptr<ConnectionBudget> budget)
    : impl_(std::make_unique<Impl>(loop, service, std::move(options), std::move(budget))) {}

HttpFront::~HttpFront() = default;

bool HttpFront::start(const std::string& address, rpc::Sharing sharing, std::string& error) {
  return impl_->listener.start(address, sharing, error);
}

std::uint16_t HttpFront::port() const {
  return impl_->listener.port();
}

void HttpFront::drain() {
  impl_->listener.drain();
}

void HttpFront::stop() {
  impl_->listener.stop();
}

HttpServer::Counters HttpFront::counters() const {
  return impl_->listener.server().counters();
}

}  // namespace weir::node
