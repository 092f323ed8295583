#include <weir/node/fronts/admin/admin_front.h>

#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weir/node/fronts/http/http_headers.h>
#include <weir/node/fronts/http/http_json.h>
#include <weir/node/fronts/http/http_listener.h>
#include <weir/node/fronts/http/http_server.h>

namespace weir::node {
namespace {

/// Scrapers and probes are few.
constexpr std::size_t kMaxConnections = 64;
/// Of one address: somebody else has room for a probe.
constexpr unsigned kAddressPercent = 75;
constexpr std::string_view kText = "text/plain; charset=utf-8";

constexpr std::string_view kJson = "application/json";
constexpr std::string_view kMetrics = "text/plain; version=0.0.4; charset=utf-8";

/// 503 with what stands against it; else 200, and what is wrong all the same.
void answer_probe(HttpExchange& exchange, const std::vector<Condition>& conditions,
                  bool Condition::*good, const char* title) {
  std::string against;
  std::string beside;
  for (const Condition& one : conditions) {
    if (one.text.empty()) continue;
    std::string& list = one.*good ? beside : against;
    list.append(list.empty() ? "" : "; ").append(one.name).append(": ").append(one.text);
  }
  if (!against.empty()) return respond_problem(exchange, 503, title, against);
  exchange.respond(200, kText, beside.empty() ? "ok\n" : "ok, but " + beside + "\n");
}

void respond_denied(HttpExchange& exchange, const Error& error) {
  const unsigned status = http_status(error.kind);
  respond_problem(exchange, status, status == 401 ? "Unauthorized" : "Forbidden", error.detail,
                  status == 401 ? kChallenge : std::string_view());
}

}  // namespace

struct AdminFront::Impl final : HttpServer::Handler {
  struct Endpoint {
    std::string_view path;
    std::string_view what;  // for the meter of the loop's turns
    bool open;              // to those who may not read
    void (*answer)(Impl&, HttpExchange&);
  };
  static const std::array<Endpoint, 4> kEndpoints;

  Impl(rpc::EventLoop& on, Operations& node, Access* access, std::shared_ptr<rpc::TlsContext> tls);

  void handle(std::span<HttpExchange* const> batch) override {
    for (HttpExchange* exchange : batch) answer(*exchange);
  }
  void answer(HttpExchange& exchange);
  /// What answers an exchange, in this turn or a later one.
  Operations::Text responder(const HttpExchange& exchange, std::string_view what,
                             std::string_view type);

  rpc::EventLoop& loop;
  Operations& operations;
  HttpListener listener;
  std::shared_ptr<const bool> alive = std::make_shared<const bool>(true);
};

namespace {

HttpServerOptions options(Access* access) {
  HttpServerOptions out;
  out.access = access;
  out.front = "admin";
  out.max_body = 1024;
  // Answers are large: one at a time.
  out.max_batch = 1;
  // Places are few, and a probe says at once what it wants: who does not makes room at any time.
  out.evict_after = 0;
  return out;
}

}  // namespace

/// One line an endpoint.
constexpr std::array<AdminFront::Impl::Endpoint, 4> AdminFront::Impl::kEndpoints = {{
    {"/v1/status", "status", false,
     [](Impl& front, HttpExchange& exchange) {
       front.operations.status_json(front.responder(exchange, "status", kJson));
     }},
    {"/metrics", "metrics", false,
     [](Impl& front, HttpExchange& exchange) {
       front.operations.metrics(front.responder(exchange, "metrics", kMetrics));
     }},
    {"/healthz", "probe", true,
     [](Impl& front, HttpExchange& exchange) {
       answer_probe(exchange, front.operations.conditions(), &Condition::alive, "Not healthy");
     }},
    {"/readyz", "probe", true,
     [](Impl& front, HttpExchange& exchange) {
       answer_probe(exchange, front.operations.conditions(), &Condition::ready, "Not ready");
     }},
}};

AdminFront::Impl::Impl(rpc::EventLoop& on, Operations& node, Access* access,
                       std::shared_ptr<rpc::TlsContext> tls)
    : loop(on),
      operations(node),
      listener(on, options(access), *this,
               std::make_shared<ConnectionBudget>(kMaxConnections, kAddressPercent),
               std::move(tls)) {}

void AdminFront::Impl::answer(HttpExchange& exchange) {
  const auto endpoint =
      std::find_if(kEndpoints.begin(), kEndpoints.end(),
                   [&](const Endpoint& one) { return one.path == exchange.path(); });
  if (endpoint == kEndpoints.end()) {
    return respond_problem(exchange, 404, "Not Found", "There is no such endpoint.");
  }
  if (exchange.method() != "GET" && exchange.method() != "HEAD") {
    return respond_problem(exchange, 405, "Method not allowed", "Expected GET, HEAD.",
                           "Allow: GET, HEAD\r\n");
  }
  if (!endpoint->open && !exchange.caller().may_read()) {
    return respond_denied(exchange,
                          deny(exchange.caller(), "read the " + std::string(endpoint->what)));
  }
  rpc::TurnMeter::Scope turn(loop.meter(), endpoint->what);
  endpoint->answer(*this, exchange);
}

Operations::Text AdminFront::Impl::responder(const HttpExchange& exchange, std::string_view what,
                                             std::string_view type) {
  return [this, there = std::weak_ptr<const bool>(alive), id = exchange.id(), what,
          type](const std::string& text) {
    if (there.expired()) return;
    rpc::TurnMeter::Scope turn(loop.meter(), what);
    HttpExchange* asked = listener.server().find(id);
    if (asked != nullptr) asked->respond(200, type, text);
  };
}

AdminFront::AdminFront(rpc::EventLoop& loop, Operations& operations, Access* access,
                       std::shared_ptr<rpc::TlsContext> tls)
    : impl_(std::make_unique<Impl>(loop, operations, access, std::move(tls))) {}

AdminFront::~AdminFront() = default;

bool AdminFront::start(const std::string& address, rpc::Sharing sharing, std::string& error) {
  return impl_->listener.start(address, sharing, error);
}

std::uint16_t AdminFront::port() const {
  return impl_->listener.port();
}

void AdminFront::stop() {
  impl_->listener.stop();
}

}  // namespace weir::node
