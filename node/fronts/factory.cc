#include <weir/node/fronts/factory.h>

#include <algorithm>
#include <array>

#include <weir/node/fronts/admin/admin_front.h>
#include <weir/node/fronts/capnp/capnp_front.h>
#include <weir/node/fronts/grpc/grpc_front.h>
#include <weir/node/fronts/http/http_front.h>
#include <weir/node/fronts/redis/redis_front.h>

namespace weir::node {
namespace {

using Made = std::unique_ptr<Front>;

Made make_http(const FrontContext& context) {
  const HttpConfig& config = context.config.http;
  if (context.shared == nullptr) {
    context.shared =
        std::make_shared<ConnectionBudget>(config.max_connections, context.config.address_percent);
  }
  HttpFrontOptions options;
  options.reset = config.reset;
  options.server.max_body = config.max_body;
  options.wall = context.wall;
  options.tls = context.tls;
  options.access = context.access;
  options.forward_auth.headers = config.forward_auth.headers;
  if (config.forward_auth.trusted_proxies) {
    options.forward_auth.trusted_proxies = *config.forward_auth.trusted_proxies;
  }
  return std::make_unique<HttpFront>(context.loop, *context.service, std::move(options),
                                     std::static_pointer_cast<ConnectionBudget>(context.shared));
}

Made make_grpc(const FrontContext& context) {
  const GrpcConfig& config = context.config.grpc;
  if (context.shared == nullptr) {
    context.shared =
        std::make_shared<ConnectionBudget>(config.max_connections, context.config.address_percent);
  }
  GrpcFrontOptions options;
  options.server.max_message = config.max_message;
  options.server.max_age = config.max_age;
  options.wall = context.wall;
  options.tls = context.tls;
  options.access = context.access;
  return std::make_unique<GrpcFront>(context.loop, *context.service, std::move(options),
                                     std::static_pointer_cast<ConnectionBudget>(context.shared));
}

Made make_redis(const FrontContext& context) {
  const RedisConfig& config = context.config.redis;
  if (context.shared == nullptr) {
    context.shared =
        std::make_shared<ConnectionBudget>(config.max_connections, context.config.address_percent);
  }
  RedisFrontOptions options;
  options.domain = config.domain;
  options.tls = context.tls;
  options.access = context.access;
  return std::make_unique<RedisFront>(context.loop, *context.service, std::move(options),
                                      std::static_pointer_cast<ConnectionBudget>(context.shared));
}

struct Kind {
  std::string_view name;
  FrontPlace place;
  Made (*make)(const FrontContext&);
};

/// One line a protocol.
constexpr std::array kKinds = {
    Kind{"admin", FrontPlace::main_loop,
         [](const FrontContext& c) -> Made {
           return std::make_unique<AdminFront>(c.loop, *c.operations, c.access, c.tls);
         }},
    Kind{"clients", FrontPlace::worker,
         [](const FrontContext& c) -> Made {
           return std::make_unique<CapnpFront>(
               c.loop, *c.service, CapnpLimits{.address_percent = c.config.address_percent}, c.tls,
               c.access);
         }},
    Kind{"http", FrontPlace::worker, make_http},
    Kind{"grpc", FrontPlace::worker, make_grpc},
    Kind{"redis", FrontPlace::worker, make_redis},
};

constexpr bool same_names() {
  return std::equal(kKinds.begin(), kKinds.end(), kFronts.begin(), kFronts.end(),
                    [](const Kind& kind, std::string_view name) { return kind.name == name; });
}
static_assert(same_names(), "kFronts of node/config.h, in the same order");

const Kind& kind_of(std::string_view name) {
  return *std::find_if(kKinds.begin(), kKinds.end(),
                       [&](const Kind& kind) { return kind.name == name; });
}

}  // namespace

FrontPlace place_of(std::string_view name) {
  return kind_of(name).place;
}

std::unique_ptr<Front> make_front(std::string_view name, const FrontContext& context) {
  return kind_of(name).make(context);
}

}  // namespace weir::node
