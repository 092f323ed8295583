#include <weir/node/fronts/grpc/grpc_methods.h>

#include <google/protobuf/stubs/logging.h>
#include <grpc/health/v1/health.pb.h>
#include <grpc/reflection/v1/reflection.pb.h>

#include <algorithm>
#include <array>
#include <memory>
#include <utility>

#include <fmt/format.h>

#include <weir/node/fronts/grpc/envoy_authz.h>
#include <weir/node/fronts/grpc/envoy_rls.h>
#include <weir/node/fronts/grpc/weir_api.h>
#include <weir/rpc/check.h>

namespace weir::node {

using google::protobuf::Arena;
namespace rls = envoy::service::ratelimit::v3;
namespace authz = envoy::service::auth::v3;
namespace health_v1 = grpc::health::v1;

enum class GrpcMethods::Route : std::uint8_t {
  rate_limit,
  authorize,
  check,
  check_batch,
  reserve,
  settle,
  lease,
  health,
  watch_health,
  reflect,
};

struct GrpcMethods::Method {
  std::string_view path;
  Route route;
  GrpcKind kind = GrpcKind::unary;
};

namespace {

/// Calls that watch the node's health on one loop: each is looked at when it changes.
constexpr std::size_t kMostWatchers = 1024;

/// The library has a line for every message that is malformed: anybody could fill the log.
void be_silent() {
  [[maybe_unused]] static const auto former = google::protobuf::SetLogHandler(nullptr);
}

}  // namespace

GrpcMethods::GrpcMethods(Service& service, std::function<Nanos()> wall)
    : service_(service),
      wall_(std::move(wall)),
      in_block_(std::make_unique<Block>()),
      out_block_(std::make_unique<Block>()),
      in_(in_block_->bytes.data(), in_block_->bytes.size()),
      out_(out_block_->bytes.data(), out_block_->bytes.size()) {
  be_silent();
}

const GrpcMethods::Method* GrpcMethods::method_at(std::string_view path) {
  static constexpr std::array<Method, 11> kMethods = {{
      {"/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit", Route::rate_limit},
      {"/envoy.service.auth.v3.Authorization/Check", Route::authorize},
      {"/weir.v1.Weir/Check", Route::check},
      {"/weir.v1.Weir/CheckBatch", Route::check_batch},
      {"/weir.v1.Weir/Reserve", Route::reserve},
      {"/weir.v1.Weir/Settle", Route::settle},
      {"/weir.v1.Weir/Lease", Route::lease},
      {"/grpc.health.v1.Health/Check", Route::health},
      {"/grpc.health.v1.Health/Watch", Route::watch_health, GrpcKind::streaming},
      {"/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", Route::reflect,
       GrpcKind::streaming},
      {"/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", Route::reflect,
       GrpcKind::streaming},
  }};
  const auto* at = std::find_if(kMethods.begin(), kMethods.end(),
                                [&](const Method& method) { return method.path == path; });
  return at == kMethods.end() ? nullptr : at;
}

GrpcKind GrpcMethods::kind_of(std::string_view& path) {
  const Method* method = method_at(path);
  if (method == nullptr) return GrpcKind::none;
  path = method->path;
  return method->kind;
}

/// Its message, in the batch's arena; null, and the call has failed, if it is none.
template <typename Message>
Message* GrpcMethods::parse(GrpcCall& call) {
  const std::string_view bytes = call.message();
  auto* message = Arena::CreateMessage<Message>(&in_);
  if (message->ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) return message;
  call.fail(GrpcCode::invalid_argument, "the message is malformed");
  return nullptr;
}

template <typename Message, typename Fill>
void GrpcMethods::write(GrpcCall& call, Fill fill) {
  auto* message = Arena::CreateMessage<Message>(&out_);
  fill(*message);
  const std::size_t size = message->ByteSizeLong();
  char* to = call.begin_message().extend(size);
  message->SerializeWithCachedSizesToArray(reinterpret_cast<std::uint8_t*>(to));
  call.end_message();
  out_.Reset();
}

/// Checks that follow one another are decided together; anything else in between keeps its place.
void GrpcMethods::handle(std::span<GrpcCall* const> batch) {
  in_.Reset();
  requests_.clear();
  parts_.clear();
  const GrpcCall* last = nullptr;  // of those that were gathered and wait for decide()
  for (GrpcCall* call : batch) {
    const Route route = method_at(call->path())->route;
    if (route <= Route::check_batch) {
      // They are one caller's: a proxy may send several on one connection.
      if (last != nullptr && last->authorization() != call->authorization()) {
        decide(std::exchange(last, nullptr));
      }
      if (gather(*call, route)) last = call;
      continue;
    }
    decide(std::exchange(last, nullptr));
    switch (route) {
      case Route::reserve:
        reserve(*call);
        break;
      case Route::settle:
        settle(*call);
        break;
      case Route::lease:
        lease(*call);
        break;
      case Route::reflect:
        reflect(*call);
        break;
      default:
        health(*call, route == Route::watch_health);
    }
  }
  decide(last);
}

/// False if the call has failed.
bool GrpcMethods::gather(GrpcCall& call, Route route) {
  switch (route) {
    case Route::rate_limit:
      return gather_one<rls::RateLimitRequest>(call, route, read_rls);
    case Route::authorize:
      return gather_one<authz::CheckRequest>(call, route, read_authz);
    case Route::check:
      return gather_one<v1::CheckRequest>(call, route, read_check);
    default:
      return gather_batch(call);
  }
}

template <typename Message, typename Read>
bool GrpcMethods::gather_one(GrpcCall& call, Route route, Read read) {
  const Message* message = parse<Message>(call);
  if (message == nullptr) return false;
  Request request;
  const GrpcError error = read(*message, in_, request);
  if (!error.empty()) {
    call.fail(error.code, error.text);
    return false;
  }
  requests_.push_back(request);
  parts_.push_back({&call, call.id(), route, 1, request.descriptors(), {}});
  return true;
}

bool GrpcMethods::gather_batch(GrpcCall& call) {
  const auto* message = parse<v1::CheckBatchRequest>(call);
  if (message == nullptr) return false;
  const auto count = static_cast<std::size_t>(message->requests_size());
  if (count == 0 || count > rpc::kMaxRequestsPerCall) {
    call.fail(GrpcCode::invalid_argument,
              fmt::format("requests: expected 1 to {}, got {}", rpc::kMaxRequestsPerCall, count));
    return false;
  }
  Part part{&call, call.id(), Route::check_batch, 0, 0, {}};
  for (std::size_t i = 0; i < count; ++i) {
    Request request;
    GrpcError error = read_check(message->requests(static_cast<int>(i)), in_, request);
    if (error.empty()) {
      requests_.push_back(request);
      ++part.count;
    } else {
      part.malformed.push_back({i, std::move(error.text)});
    }
  }
  if (part.count > 0) {
    parts_.push_back(std::move(part));
    return true;
  }
  answer_batch(call, part, {});
  return false;
}

/// Decides what was gathered, which is one caller's. Most often the service answers at once, and
/// the calls are where they were; those of which something waits are found again by their ids.
void GrpcMethods::decide(const GrpcCall* asked) {
  if (parts_.empty()) return;
  struct State {
    bool returned = false;
    std::vector<Part> parts;
  };
  auto state = std::make_shared<State>();
  sizes_.clear();
  for (const Part& part : parts_) sizes_.push_back(part.count);
  state->parts.swap(parts_);
  service_.check(requests_, sizes_, asked->caller(),
                 [this, state](std::size_t index, std::span<Reply> replies) {
                   const Part& part = state->parts[index];
                   GrpcCall* call = state->returned ? server_->find(part.id) : part.call;
                   if (call != nullptr) answer(*call, part, replies);
                 });
  state->returned = true;
  requests_.clear();
}

void GrpcMethods::answer(GrpcCall& call, const Part& part, std::span<const Reply> replies) {
  if (part.route == Route::check_batch) return answer_batch(call, part, replies);
  const Reply& reply = replies[0];
  // Gateways let pass what fails: what a rule wants closed is a denial to them.
  const bool denies = reply.error.kind == ErrorKind::closed && part.route != Route::check;
  if (!reply.error.empty() && !denies) {
    return call.fail(grpc_code(reply.error.kind), reply.error.detail);
  }
  switch (part.route) {
    case Route::rate_limit:
      write<rls::RateLimitResponse>(
          call, [&](auto& out) { write_rls(reply, part.descriptors, wall_(), out); });
      break;
    case Route::authorize:
      write<authz::CheckResponse>(call, [&](auto& out) { write_authz(reply, wall_(), out); });
      break;
    default:
      write<v1::CheckResponse>(call, [&](auto& out) { write_check(reply, out); });
  }
  call.finish();
}

void GrpcMethods::answer_batch(GrpcCall& call, const Part& part, std::span<const Reply> replies) {
  write<v1::CheckBatchResponse>(call, [&](v1::CheckBatchResponse& out) {
    std::size_t bad = 0;
    for (std::size_t i = 0; i < part.count + part.malformed.size(); ++i) {
      v1::CheckResponse& to = *out.add_responses();
      if (bad < part.malformed.size() && part.malformed[bad].index == i) {
        write_error(ErrorKind::invalid, part.malformed[bad++].why, to);
      } else {
        write_check(replies[i - bad], to);
      }
    }
  });
  call.finish();
}

void GrpcMethods::reserve(GrpcCall& call) {
  const auto* message = parse<v1::ReserveRequest>(call);
  if (message == nullptr) return;
  Request request;
  Nanos timeout = 0;
  const GrpcError error = read_reserve(*message, in_, request, timeout);
  if (!error.empty()) return call.fail(error.code, error.text);
  service_.reserve(request, timeout, call.caller(), [this, id = call.id()](ReserveReply& reply) {
    GrpcCall* asked = server_->find(id);
    if (asked == nullptr) return;
    const Error& failure = reply.decision.error;
    if (!failure.empty()) return asked->fail(grpc_code(failure.kind), failure.detail);
    write<v1::ReserveResponse>(*asked, [&](auto& out) { write_reserve(reply, out); });
    asked->finish();
  });
}

void GrpcMethods::settle(GrpcCall& call) {
  const auto* message = parse<v1::SettleRequest>(call);
  if (message == nullptr) return;
  const GrpcError error = read_settle(*message);
  if (!error.empty()) return call.fail(error.code, error.text);
  service_.settle(message->ticket(), message->hits(), call.caller(),
                  [this, id = call.id()](SettleReply& reply) {
                    GrpcCall* asked = server_->find(id);
                    if (asked == nullptr) return;
                    const Error& failure = reply.error;
                    if (!failure.empty()) {
                      return asked->fail(grpc_code(failure.kind), failure.detail);
                    }
                    if (!reply.settled) {
                      return asked->fail(GrpcCode::not_found,
                                         "no such ticket is open here: it was settled, has timed "
                                         "out, or is another node's");
                    }
                    write<v1::SettleResponse>(*asked, [&](auto& out) { write_settle(reply, out); });
                    asked->finish();
                  });
}

void GrpcMethods::lease(GrpcCall& call) {
  const auto* message = parse<v1::LeaseRequest>(call);
  if (message == nullptr) return;
  Request request;
  LeaseTerms terms;
  const GrpcError error = read_lease(*message, in_, request, terms);
  if (!error.empty()) return call.fail(error.code, error.text);
  service_.lease(request, terms, call.caller(), [this, id = call.id()](LeaseReply& reply) {
    GrpcCall* asked = server_->find(id);
    if (asked == nullptr) return;
    const Error& failure = reply.decision.error;
    if (!failure.empty()) return asked->fail(grpc_code(failure.kind), failure.detail);
    write<v1::LeaseResponse>(*asked, [&](auto& out) { write_lease(reply, out); });
    asked->finish();
  });
}

void GrpcMethods::health(GrpcCall& call, bool watch) {
  if (call.message().data() == nullptr) return;  // who watches may have said his last
  const auto* message = parse<health_v1::HealthCheckRequest>(call);
  if (message == nullptr) return;
  const bool known = message->service().empty() || reflection_.has_service(message->service());
  if (!known && !watch) return call.fail(GrpcCode::not_found, "there is no such service");
  if (watch) {
    const auto is_it = [&](const Watcher& one) { return one.id == call.id(); };
    if (std::any_of(watchers_.begin(), watchers_.end(), is_it)) {
      return call.fail(GrpcCode::internal, "more than one message");
    }
    std::erase_if(watchers_, [&](const Watcher& one) {
      return watchers_.size() >= kMostWatchers && server_->find(one.id) == nullptr;
    });
    if (watchers_.size() >= kMostWatchers) {
      return call.fail(GrpcCode::resource_exhausted, "too many watch");
    }
    // What others were told stays as it is until they are all told.
    watchers_.push_back({call.id(), known});
  }
  write<health_v1::HealthCheckResponse>(call, [&](health_v1::HealthCheckResponse& out) {
    out.set_status(!known    ? health_v1::HealthCheckResponse::SERVICE_UNKNOWN
                   : ready() ? health_v1::HealthCheckResponse::SERVING
                             : health_v1::HealthCheckResponse::NOT_SERVING);
  });
  if (!watch) call.finish();
}

void GrpcMethods::tell_health() {
  const bool is = ready();
  if (std::exchange(told_ready_, is) == is) return;
  std::erase_if(watchers_, [&](const Watcher& one) {
    GrpcCall* call = server_->find(one.id);
    if (call == nullptr) return true;
    if (!one.known) return false;
    write<health_v1::HealthCheckResponse>(*call, [&](health_v1::HealthCheckResponse& out) {
      out.set_status(is ? health_v1::HealthCheckResponse::SERVING
                        : health_v1::HealthCheckResponse::NOT_SERVING);
    });
    return false;
  });
}

void GrpcMethods::drain() {
  draining_ = true;
  tell_health();
}

void GrpcMethods::reflect(GrpcCall& call) {
  if (call.message().data() == nullptr) return call.finish();
  using grpc::reflection::v1::ServerReflectionRequest;
  using grpc::reflection::v1::ServerReflectionResponse;
  const auto* message = parse<ServerReflectionRequest>(call);
  if (message == nullptr) return;
  write<ServerReflectionResponse>(call, [&](auto& out) { reflection_.answer(*message, out); });
}

}  // namespace weir::node
