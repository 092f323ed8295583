#include <weir/node/fronts/grpc/grpc_front.h>

#include <envoy/service/auth/v3/external_auth.pb.h>
#include <envoy/service/ratelimit/v3/rls.pb.h>
#include <fcntl.h>
#include <grpc/health/v1/health.pb.h>
#include <grpc/reflection/v1/reflection.pb.h>
#include <sys/socket.h>
#include <weir/v1/weir.pb.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <weir/node/access/access_file.h>
#include <weir/node/access/token.h>
#include <weir/node/fronts/grpc/grpc_test_util.h>
#include <weir/rpc/net/event_loop.h>
#include <weir/rpc/net/test_util.h>
#include <weir/rpc/net/tls_session.h>
#include <weir/rpc/net/tls_test_util.h>

namespace weir::node {
namespace {

using test::framed;
using test::GrpcAnswer;
using test::GrpcClient;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::IsSupersetOf;
using testing::Pair;
using testing::StartsWith;
using testing::UnorderedElementsAre;
using Fields = test::GrpcSession::Fields;
namespace rls = envoy::service::ratelimit::v3;
namespace authz = envoy::service::auth::v3;
namespace health = grpc::health::v1;
namespace reflection = grpc::reflection::v1;

constexpr auto kRateLimit = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";
constexpr auto kAuthorize = "/envoy.service.auth.v3.Authorization/Check";
constexpr auto kWatch = "/grpc.health.v1.Health/Watch";
constexpr auto kReflect = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo";

Status status_of(std::string rule, std::uint64_t limit, std::uint64_t remaining,
                 std::uint16_t descriptor = 0) {
  Status status;
  status.rule = std::move(rule);
  status.limit = status.quota = limit;
  status.remaining = remaining;
  status.reset = 12'500 * kMillisecond;
  status.window = kMinute;
  status.descriptor = descriptor;
  return status;
}

Reply allowing() {
  Reply reply;
  reply.allowed = true;
  reply.deciding = 0;
  reply.statuses = {status_of("per-key", 100, 41)};
  return reply;
}

Reply denying() {
  Reply reply = allowing();
  reply.allowed = false;
  reply.deciding = 1;
  reply.statuses.push_back(status_of("daily", 1000, 0, 1));
  reply.statuses[1].allowed = false;
  reply.statuses[1].window = kDay;
  reply.statuses[1].retry_after = 1'500 * kMillisecond;
  return reply;
}

Reply failing(ErrorKind kind) {
  Reply reply;
  reply.fail(kind, "why");
  return reply;
}

std::string text_of(const Request& request) {
  std::string out(request.domain);
  for (std::size_t i = 0; i < request.descriptors(); ++i) {
    const Request one = request.part(i);
    for (const Entry& entry : one.descriptor) out += fmt::format(" {}={}", entry.key, entry.value);
    out += fmt::format(" *{}", one.hits);
  }
  if (!request.id.empty()) out += fmt::format(" id {}", request.id);
  if (request.wants_bound) out += " bound";
  if (request.kind == RequestKind::refund) out += " refund";
  if (request.limit.any()) {
    out += fmt::format(" limit {} in {} s", request.limit.limit, request.limit.window / kSecond);
  }
  return out;
}

/// Answers as told, and remembers what it was asked. What concerns the domain "late" is answered
/// when the test calls what waits.
class FakeService final : public Service {
 public:
  bool ready() const override { return is_ready; }
  void check(std::span<const Request> requests, std::span<const std::size_t> parts,
             const Caller& caller, CheckDone done) override {
    std::string call;
    for (const Request& request : requests) call += (call.empty() ? "" : ", ") + text_of(request);
    note(std::move(call), caller);
    auto shared = std::make_shared<CheckDone>(std::move(done));
    for (std::size_t part = 0; part < parts.size(); ++part) {
      auto replies = std::make_shared<std::vector<Reply>>(parts[part], reply);
      const bool late = parts[part] > 0 && requests[0].domain == "late";
      requests = requests.subspan(parts[part]);
      auto tell = [shared, part, replies] { (*shared)(part, *replies); };
      late ? waiting.push_back(tell) : tell();
    }
  }
  void reserve(const Request& request, Nanos timeout, const Caller& caller,
               Done<ReserveReply> done) override {
    note(fmt::format("reserve {} for {} ms", text_of(request), timeout / kMillisecond), caller);
    ReserveReply answer{reply, "00ff-7"};
    done(answer);
  }
  void settle(std::string_view ticket, std::uint64_t hits, const Caller& caller,
              Done<SettleReply> done) override {
    note(fmt::format("settle {} {}", ticket, hits), caller);
    SettleReply answer{{}, ticket != "none", 500, true, false};
    done(answer);
  }
  void lease(const Request& request, const LeaseTerms& terms, const Caller& caller,
             Done<LeaseReply> done) override {
    note(fmt::format("lease {} of {} for {} ms", text_of(request), terms.most,
                     terms.term / kMillisecond),
         caller);
    LeaseReply answer{reply, "00ff-8", 32, 750 * kMillisecond};
    done(answer);
  }
  void rules(std::string_view, const Caller&, Done<RulesReply>) override { ADD_FAILURE(); }
  void status(const Caller&, Done<StatusReply>) override { ADD_FAILURE(); }

  Reply reply = allowing();
  bool is_ready = true;
  std::vector<std::string> calls;
  std::vector<std::string> who;  // the callers' names
  std::vector<std::function<void()>> waiting;

 private:
  void note(std::string call, const Caller& caller) {
    calls.push_back(std::move(call));
    who.push_back(caller.grant == nullptr ? "?" : caller.grant->name);
  }
};

class GrpcFrontTest : public testing::Test {
 protected:
  GrpcFrontTest() {
    options_.wall = [] { return 1'767'323'045 * kSecond; };
  }
  ~GrpcFrontTest() noexcept override {}
  void TearDown() override {
    client_.reset();
    front_.reset();
    rpc::test::turn(loop_, 2);
    EXPECT_EQ(budget_->open(), 0u);
  }

  void start() {
    front_ = std::make_unique<GrpcFront>(loop_, service_, options_, budget_);
    std::string error;
    ASSERT_TRUE(front_->start("127.0.0.1:0", rpc::Sharing::alone, error)) << error;
    ASSERT_NE(front_->port(), 0);
  }
  int dial() {
    if (front_ == nullptr) start();
    const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_storage at;
    const socklen_t size = rpc::to_sockaddr(rpc::test::local(front_->port()), at);
    EXPECT_EQ(::connect(fd, reinterpret_cast<sockaddr*>(&at), size), 0);
    ::fcntl(fd, F_SETFL, O_NONBLOCK);
    return fd;
  }
  GrpcClient& client() {
    if (client_ == nullptr) {
      client_ = std::make_unique<GrpcClient>(turn_, dial());
      client_->greet();
    }
    return *client_;
  }
  template <typename Message>
  std::int32_t send(const std::string& path, const Message& message, Fields more = {}) {
    return client().call(GrpcClient::head(path, std::move(more)),
                         framed(message.SerializeAsString()));
  }
  template <typename Answer>
  Answer receive(std::int32_t call) {
    const GrpcAnswer& got = client().answer(call);
    EXPECT_EQ(got.status(), "OK");
    Answer out;
    EXPECT_EQ(got.messages().size(), 1u);
    if (!got.messages().empty()) {
      EXPECT_TRUE(out.ParseFromString(got.messages()[0]));
    }
    return out;
  }
  template <typename Answer, typename Message>
  Answer ask(const std::string& path, const Message& message) {
    return receive<Answer>(send(path, message));
  }
  template <typename Message>
  std::string failure(const std::string& path, const Message& message) {
    return client().answer(send(path, message)).status();
  }

  rpc::EventLoop loop_;
  FakeService service_;
  GrpcFrontOptions options_;
  std::shared_ptr<ConnectionBudget> budget_ = std::make_shared<ConnectionBudget>(1000);
  std::unique_ptr<GrpcFront> front_;
  std::unique_ptr<GrpcClient> client_;
  const std::function<void()> turn_ = [this] { rpc::test::turn(loop_, 1); };
};

using Entries = std::vector<std::pair<std::string, std::string>>;

envoy::extensions::common::ratelimit::v3::RateLimitDescriptor descriptor(const Entries& entries) {
  envoy::extensions::common::ratelimit::v3::RateLimitDescriptor out;
  for (const auto& [key, value] : entries) {
    auto& entry = *out.add_entries();
    entry.set_key(key);
    entry.set_value(value);
  }
  return out;
}

rls::RateLimitRequest rate_limit(const std::string& domain, const std::vector<Entries>& all) {
  rls::RateLimitRequest out;
  out.set_domain(domain);
  for (const Entries& entries : all) *out.add_descriptors() = descriptor(entries);
  return out;
}

template <typename Headers>
std::map<std::string, std::string> headers_of(const Headers& headers) {
  std::map<std::string, std::string> out;
  for (const auto& header : headers) out[header.key()] = header.value();
  return out;
}

// Envoy's rate limit service

TEST_F(GrpcFrontTest, DescriptorsAreOneRequest) {
  auto request = rate_limit("api", {{{"user", "ann"}, {"user", "bob"}}, {{"ip", "\xff\n"}}, {}});
  request.mutable_descriptors(1)->mutable_hits_addend()->set_value(7);
  request.mutable_descriptors(2)->mutable_hits_addend()->set_value(0);
  request.set_hits_addend(3);
  const auto got = ask<rls::RateLimitResponse>(kRateLimit, request);
  EXPECT_THAT(service_.calls, ElementsAre("api user=ann user=bob *3 ip=\xff\n *7 *0"));
  EXPECT_EQ(got.overall_code(), rls::RateLimitResponse::OK);
  ASSERT_EQ(got.statuses_size(), 3);
  EXPECT_EQ(got.statuses(0).code(), rls::RateLimitResponse::OK);
  EXPECT_EQ(got.statuses(0).limit_remaining(), 41u);
  EXPECT_EQ(got.statuses(0).duration_until_reset().seconds(), 13);
  EXPECT_EQ(got.statuses(0).current_limit().name(), "per-key");
  EXPECT_EQ(got.statuses(0).current_limit().requests_per_unit(), 100u);
  EXPECT_EQ(got.statuses(0).current_limit().unit(), rls::RateLimitResponse::RateLimit::MINUTE);
  // No rule met the others.
  EXPECT_EQ(got.statuses(1).code(), rls::RateLimitResponse::OK);
  EXPECT_FALSE(got.statuses(1).has_current_limit());
  EXPECT_EQ(got.response_headers_to_add_size(), 0);
  EXPECT_EQ(got.raw_body(), "");
  const auto& metadata = got.dynamic_metadata().fields();
  EXPECT_EQ(metadata.at("rule").string_value(), "per-key");
  EXPECT_EQ(metadata.at("remaining").number_value(), 41);
  EXPECT_FALSE(metadata.at("degraded").bool_value());
}

TEST_F(GrpcFrontTest, AHitIsOneIfNothingIsSaid) {
  ask<rls::RateLimitResponse>(kRateLimit, rate_limit("api", {{{"a", "b"}}}));
  EXPECT_THAT(service_.calls, ElementsAre("api a=b *1"));
}

TEST_F(GrpcFrontTest, ADenialHasHeadersAndABody) {
  service_.reply = denying();
  const auto got =
      ask<rls::RateLimitResponse>(kRateLimit, rate_limit("api", {{{"a", "b"}}, {{"c", "d"}}}));
  EXPECT_EQ(got.overall_code(), rls::RateLimitResponse::OVER_LIMIT);
  ASSERT_EQ(got.statuses_size(), 2);
  EXPECT_EQ(got.statuses(0).code(), rls::RateLimitResponse::OK);
  EXPECT_EQ(got.statuses(1).code(), rls::RateLimitResponse::OVER_LIMIT);
  EXPECT_EQ(got.statuses(1).duration_until_reset().seconds(), 2);
  EXPECT_EQ(got.statuses(1).current_limit().unit(), rls::RateLimitResponse::RateLimit::DAY);
  EXPECT_THAT(
      headers_of(got.response_headers_to_add()),
      UnorderedElementsAre(
          Pair("Content-Type", "application/problem+json"), Pair("RateLimit", "\"daily\";r=0;t=2"),
          Pair("RateLimit-Policy", "\"daily\";q=1000;w=86400,\"per-key\";q=100;w=60"),
          Pair("Retry-After", "2")));
  EXPECT_THAT(got.raw_body(), HasSubstr("Quota exceeded"));
  EXPECT_EQ(got.dynamic_metadata().fields().at("rule").string_value(), "daily");
}

TEST_F(GrpcFrontTest, AStatusTellsTheRuleThatMatters) {
  service_.reply.statuses = {status_of("a", 10, 5), status_of("b", 1u << 31, 3),
                             status_of("shadow", 10, 0)};
  service_.reply.statuses[1].quota = 1ull << 40;
  service_.reply.statuses[2].shadow = true;
  service_.reply.statuses[2].allowed = false;
  auto got = ask<rls::RateLimitResponse>(kRateLimit, rate_limit("api", {{{"a", "b"}}}));
  EXPECT_EQ(got.statuses(0).current_limit().name(), "b");
  EXPECT_EQ(got.statuses(0).current_limit().requests_per_unit(), 0xffffffffu);
  service_.reply = denying();
  service_.reply.statuses[1].descriptor = 0;
  service_.reply.statuses[1].retry_after = kNever;
  service_.reply.statuses[1].window = 10 * kSecond;
  got = ask<rls::RateLimitResponse>(kRateLimit, rate_limit("api", {{{"a", "b"}}}));
  EXPECT_EQ(got.statuses(0).current_limit().name(), "daily");
  EXPECT_EQ(got.statuses(0).current_limit().unit(), rls::RateLimitResponse::RateLimit::UNKNOWN);
  EXPECT_FALSE(got.statuses(0).has_duration_until_reset());
}

TEST_F(GrpcFrontTest, RequestsBringLimitsAndGiveHitsBack) {
  auto request = rate_limit("api", {{{"a", "b"}}});
  request.mutable_descriptors(0)->mutable_limit()->set_requests_per_unit(5);
  request.mutable_descriptors(0)->mutable_limit()->set_unit(envoy::type::v3::HOUR);
  ask<rls::RateLimitResponse>(kRateLimit, request);
  request = rate_limit("api", {{{"a", "b"}}, {{"c", "d"}}});
  for (auto& descriptor : *request.mutable_descriptors()) descriptor.set_is_negative_hits(true);
  ask<rls::RateLimitResponse>(kRateLimit, request);
  EXPECT_THAT(service_.calls,
              ElementsAre("api a=b *1 limit 5 in 3600 s", "api a=b *1 c=d *1 refund"));
}

TEST_F(GrpcFrontTest, WhatWeirDoesNotDoIsRefused) {
  auto request = rate_limit("api", {{{"a", "b"}}, {{"a", "b"}}});
  request.mutable_descriptors(1)->mutable_limit()->set_requests_per_unit(5);
  EXPECT_THAT(failure(kRateLimit, request), StartsWith("12 descriptors[1].limit: "));
  request = rate_limit("api", {{{"a", "b"}}, {{"a", "b"}}});
  request.mutable_descriptors(1)->set_is_negative_hits(true);
  EXPECT_THAT(failure(kRateLimit, request), StartsWith("12 descriptors[1].is_negative_hits: "));
  request = rate_limit("api", {{{"a", "b"}}});
  request.mutable_descriptors(0)->mutable_limit()->set_requests_per_unit(5);
  EXPECT_THAT(failure(kRateLimit, request), StartsWith("3 descriptors[0].limit: "));
  EXPECT_THAT(service_.calls, IsEmpty());
}

TEST_F(GrpcFrontTest, BoundsAreKept) {
  EXPECT_THAT(failure(kRateLimit, rate_limit("", {{{"a", "b"}}})), StartsWith("3 domain: "));
  EXPECT_THAT(failure(kRateLimit, rate_limit(std::string(4097, 'x'), {{{"a", "b"}}})),
              StartsWith("3 domain: "));
  EXPECT_THAT(failure(kRateLimit, rate_limit("api", {})), StartsWith("3 descriptors: "));
  EXPECT_THAT(failure(kRateLimit, rate_limit("api", std::vector<Entries>(17))),
              StartsWith("3 descriptors: expected 1 to 16, got 17"));
  EXPECT_THAT(failure(kRateLimit, rate_limit("api", {Entries(65, {"a", "b"})})),
              StartsWith("3 descriptors[0]: "));
  EXPECT_THAT(failure(kRateLimit, rate_limit("api", {{}, {{"a", std::string(4097, 'x')}}})),
              StartsWith("3 descriptors[1].entries[0]: "));
  EXPECT_THAT(failure(kRateLimit, rate_limit("api", {{{"", "b"}}})),
              StartsWith("3 descriptors[0].entries[0]: "));
  const std::int32_t call = client().call(GrpcClient::head(kRateLimit), framed("\xff\xff"));
  EXPECT_EQ(client().answer(call).status(), "3 the message is malformed");
  EXPECT_THAT(service_.calls, IsEmpty());
}

TEST_F(GrpcFrontTest, ErrorsAreStatuses) {
  const auto request = rate_limit("api", {{{"a", "b"}}});
  for (const auto& [kind, code] :
       std::vector<std::pair<ErrorKind, int>>{{ErrorKind::invalid, 3},
                                              {ErrorKind::unavailable, 14},
                                              {ErrorKind::overloaded, 8},
                                              {ErrorKind::deadline, 4},
                                              {ErrorKind::unknown, 2},
                                              {ErrorKind::unsupported, 12},
                                              {ErrorKind::unauthenticated, 16},
                                              {ErrorKind::forbidden, 7}}) {
    service_.reply = failing(kind);
    EXPECT_EQ(failure(kRateLimit, request), fmt::format("{} why", code));
  }
  // Envoy lets pass what fails.
  service_.reply = failing(ErrorKind::closed);
  const auto got = ask<rls::RateLimitResponse>(kRateLimit, request);
  EXPECT_EQ(got.overall_code(), rls::RateLimitResponse::OVER_LIMIT);
  EXPECT_EQ(got.dynamic_metadata().fields().at("error").string_value(), "closed");
}

TEST_F(GrpcFrontTest, WhatOneReadBringsIsDecidedTogether) {
  std::vector<std::int32_t> calls;
  for (int i = 0; i < 3; ++i) {
    calls.push_back(send(kRateLimit, rate_limit("api", {{{"a", std::to_string(i)}}})));
  }
  for (const std::int32_t call : calls) receive<rls::RateLimitResponse>(call);
  EXPECT_THAT(service_.calls, ElementsAre("api a=0 *1, api a=1 *1, api a=2 *1"));
}

TEST_F(GrpcFrontTest, SomeAnswersComeLater) {
  const auto late = send(kRateLimit, rate_limit("late", {{{"a", "b"}}}));
  EXPECT_TRUE(client().wait([&] { return service_.waiting.size() == 1; }));
  const auto gone = send(kRateLimit, rate_limit("late", {{{"a", "b"}}}));
  EXPECT_TRUE(client().wait([&] { return service_.waiting.size() == 2; }));
  client().reset(gone);
  receive<rls::RateLimitResponse>(send(kRateLimit, rate_limit("api", {{{"a", "b"}}})));
  for (const auto& tell : service_.waiting) tell();
  EXPECT_EQ(receive<rls::RateLimitResponse>(late).overall_code(), rls::RateLimitResponse::OK);
}

// Envoy's external authorization

authz::CheckRequest authorization(const std::map<std::string, std::string>& extensions) {
  authz::CheckRequest out;
  auto& attributes = *out.mutable_attributes();
  auto& http = *attributes.mutable_request()->mutable_http();
  http.set_method("GET");
  http.set_path("/a/b?c=d");
  http.set_host("example.org");
  (*http.mutable_headers())["x-api-key"] = "k\xfe";
  attributes.mutable_source()->mutable_address()->mutable_socket_address()->set_address("10.1.2.3");
  for (const auto& [key, value] : extensions) {
    (*attributes.mutable_context_extensions())[key] = value;
  }
  return out;
}

TEST_F(GrpcFrontTest, AttributesAreEntries) {
  const auto got = ask<authz::CheckResponse>(
      kAuthorize, authorization({{"domain", "api"}, {"hits", "3"}, {"header.key", "x-api-key"}}));
  EXPECT_THAT(service_.calls,
              ElementsAre("api key=k\xfe method=GET path=/a/b host=example.org ip=10.1.2.3 *3"));
  EXPECT_EQ(got.status().code(), 0);
  std::map<std::string, std::string> headers;
  for (const auto& option : got.ok_response().response_headers_to_add()) {
    headers[option.header().key()] = option.header().value();
  }
  EXPECT_EQ(headers["RateLimit"], "\"per-key\";r=41;t=13");
  EXPECT_EQ(headers["X-RateLimit-Remaining"], "41");
}

TEST_F(GrpcFrontTest, ExtensionsAreEntriesToo) {
  ask<authz::CheckResponse>(
      kAuthorize, authorization({{"domain", "api"}, {"ip", "none"}, {"header.x", "absent"}}));
  EXPECT_THAT(service_.calls,
              ElementsAre("api ip=none method=GET path=/a/b host=example.org ip=10.1.2.3 *1"));
}

TEST_F(GrpcFrontTest, ADenialReachesTheClient) {
  service_.reply = denying();
  auto got = ask<authz::CheckResponse>(kAuthorize, authorization({{"domain", "api"}}));
  EXPECT_EQ(got.status().code(), 7);
  EXPECT_EQ(got.denied_response().status().code(), envoy::type::v3::TooManyRequests);
  EXPECT_THAT(got.denied_response().body(), HasSubstr("Quota exceeded"));
  bool retry_after = false;
  for (const auto& option : got.denied_response().headers()) {
    retry_after |= option.header().key() == "Retry-After" && option.header().value() == "2";
  }
  EXPECT_TRUE(retry_after);
  service_.reply = failing(ErrorKind::closed);
  got = ask<authz::CheckResponse>(kAuthorize, authorization({{"domain", "api"}}));
  EXPECT_EQ(got.denied_response().status().code(), envoy::type::v3::ServiceUnavailable);
}

TEST_F(GrpcFrontTest, ExtensionsThatMakeNoSenseAreRefused) {
  EXPECT_THAT(failure(kAuthorize, authorization({})), StartsWith("3 context_extensions.domain: "));
  EXPECT_THAT(failure(kAuthorize, authorization({{"domain", "api"}, {"hits", "-1"}})),
              StartsWith("3 context_extensions.hits: "));
}

// weir's own API

v1::CheckRequest checking(const std::string& domain, std::uint64_t hits = 1) {
  v1::CheckRequest out;
  out.set_domain(domain);
  auto& one = *out.add_descriptors();
  if (hits != 1) one.set_hits(hits);
  auto& entry = *one.add_entries();
  entry.set_key("k");
  entry.set_value("v");
  return out;
}

TEST_F(GrpcFrontTest, Checks) {
  service_.reply = denying();
  service_.reply.statuses[0].over_admission = 9;
  auto request = checking("api", 0);
  *request.add_descriptors() = checking("", 5).descriptors(0);
  request.set_request_id("r1");
  request.set_over_admission(true);
  const auto got = ask<v1::CheckResponse>("/weir.v1.Weir/Check", request);
  EXPECT_THAT(service_.calls, ElementsAre("api k=v *0 k=v *5 id r1 bound"));
  EXPECT_FALSE(got.allowed());
  EXPECT_EQ(got.deciding(), 1u);
  EXPECT_FALSE(got.has_error());
  ASSERT_EQ(got.statuses_size(), 2);
  EXPECT_EQ(got.statuses(0).rule(), "per-key");
  EXPECT_TRUE(got.statuses(0).allowed());
  EXPECT_EQ(got.statuses(0).over_admission(), 9u);
  EXPECT_FALSE(got.statuses(0).has_retry_after());
  EXPECT_EQ(got.statuses(1).retry_after().seconds(), 1);
  EXPECT_EQ(got.statuses(1).retry_after().nanos(), 500'000'000);
  EXPECT_EQ(got.statuses(1).window().seconds(), 86'400);
  EXPECT_EQ(got.statuses(1).descriptor(), 1u);
  EXPECT_FALSE(got.statuses(1).has_over_admission());
  service_.reply = failing(ErrorKind::closed);
  EXPECT_EQ(failure("/weir.v1.Weir/Check", request), "14 why");
}

TEST_F(GrpcFrontTest, ABatchAnswersEachInItsPlace) {
  v1::CheckBatchRequest batch;
  *batch.add_requests() = checking("one");
  batch.add_requests();
  *batch.add_requests() = checking("two");
  auto got = ask<v1::CheckBatchResponse>("/weir.v1.Weir/CheckBatch", batch);
  EXPECT_THAT(service_.calls, ElementsAre("one k=v *1, two k=v *1"));
  ASSERT_EQ(got.responses_size(), 3);
  EXPECT_TRUE(got.responses(0).allowed());
  EXPECT_EQ(got.responses(1).error().kind(), v1::INVALID);
  EXPECT_THAT(got.responses(1).error().detail(), StartsWith("domain: "));
  EXPECT_TRUE(got.responses(2).allowed());
  service_.reply = failing(ErrorKind::overloaded);
  got = ask<v1::CheckBatchResponse>("/weir.v1.Weir/CheckBatch", batch);
  EXPECT_EQ(got.responses(0).error().kind(), v1::OVERLOADED);
  batch.clear_requests();
  EXPECT_THAT(failure("/weir.v1.Weir/CheckBatch", batch), StartsWith("3 requests: "));
  batch.add_requests();
  got = ask<v1::CheckBatchResponse>("/weir.v1.Weir/CheckBatch", batch);
  EXPECT_EQ(got.responses(0).error().kind(), v1::INVALID);
}

TEST_F(GrpcFrontTest, ReservesAndSettles) {
  v1::ReserveRequest request;
  *request.mutable_request() = checking("api", 500);
  EXPECT_EQ(ask<v1::ReserveResponse>("/weir.v1.Weir/Reserve", request).ticket(), "00ff-7");
  request.mutable_timeout()->set_seconds(2);
  EXPECT_TRUE(ask<v1::ReserveResponse>("/weir.v1.Weir/Reserve", request).decision().allowed());
  request.mutable_timeout()->set_seconds(86'401);
  EXPECT_THAT(failure("/weir.v1.Weir/Reserve", request), StartsWith("3 timeout: "));
  request.clear_timeout();
  *request.mutable_request()->add_descriptors() = checking("").descriptors(0);
  EXPECT_THAT(failure("/weir.v1.Weir/Reserve", request), StartsWith("3 request.descriptors: "));
  v1::SettleRequest settle;
  EXPECT_THAT(failure("/weir.v1.Weir/Settle", settle), StartsWith("3 ticket: "));
  settle.set_ticket("00ff-7");
  settle.set_hits(321);
  const auto settled = ask<v1::SettleResponse>("/weir.v1.Weir/Settle", settle);
  EXPECT_EQ(settled.reserved(), 500u);
  EXPECT_TRUE(settled.lapsed());
  settle.set_ticket("none");
  EXPECT_THAT(failure("/weir.v1.Weir/Settle", settle), StartsWith("5 no such ticket"));
  EXPECT_THAT(service_.calls,
              ElementsAre("reserve api k=v *500 for 60000 ms", "reserve api k=v *500 for 2000 ms",
                          "settle 00ff-7 321", "settle none 321"));
}

TEST_F(GrpcFrontTest, Leases) {
  v1::LeaseRequest request;
  *request.mutable_request() = checking("api");
  request.set_most(64);
  request.mutable_term()->set_nanos(500'000'000);
  const auto got = ask<v1::LeaseResponse>("/weir.v1.Weir/Lease", request);
  EXPECT_THAT(service_.calls, ElementsAre("lease api k=v *1 of 64 for 500 ms"));
  EXPECT_EQ(got.ticket(), "00ff-8");
  EXPECT_EQ(got.hits(), 32u);
  EXPECT_EQ(got.term().nanos(), 750'000'000);
  request.mutable_term()->set_seconds(61);
  EXPECT_THAT(failure("/weir.v1.Weir/Lease", request), StartsWith("3 term: "));
}

// Who calls

TEST_F(GrpcFrontTest, ATokenSaysWhoCalls) {
  Access access;
  const LoadedAccess parsed =
      parse_access(fmt::format("tokens: [{{name: gateway, hash: \"{}\", check: all}}]",
                               to_string(hash_token("secret"))),
                   "access.yaml");
  ASSERT_NE(parsed.table, nullptr);
  access.replace(parsed.table);
  options_.access = &access;
  const auto request = rate_limit("api", {{{"a", "b"}}});
  const Fields token = {{"authorization", "Bearer secret"}};
  const auto first = send(kRateLimit, request, token);
  const auto second = send(kRateLimit, request);
  receive<rls::RateLimitResponse>(first);
  receive<rls::RateLimitResponse>(second);
  EXPECT_THAT(service_.who, ElementsAre("gateway", ""));
  Fields two = token;
  two.push_back({"authorization", "Bearer other"});
  client().answer(send(kRateLimit, request, two));
  EXPECT_THAT(service_.who.back(), testing::Ne("gateway"));
}

// Health

health::HealthCheckRequest about(const std::string& name) {
  health::HealthCheckRequest out;
  out.set_service(name);
  return out;
}

std::vector<int> told(const GrpcAnswer& answer) {
  std::vector<int> out;
  for (const std::string& message : answer.messages()) {
    health::HealthCheckResponse one;
    EXPECT_TRUE(one.ParseFromString(message));
    out.push_back(one.status());
  }
  return out;
}

TEST_F(GrpcFrontTest, HealthIsTold) {
  const std::string check = "/grpc.health.v1.Health/Check";
  EXPECT_EQ(ask<health::HealthCheckResponse>(check, about("")).status(), 1);
  EXPECT_EQ(ask<health::HealthCheckResponse>(check, about("weir.v1.Weir")).status(), 1);
  EXPECT_EQ(failure(check, about("weir.v2.Weir")), "5 there is no such service");
  service_.is_ready = false;
  EXPECT_EQ(ask<health::HealthCheckResponse>(check, about("")).status(), 2);
}

TEST_F(GrpcFrontTest, HealthIsWatched) {
  const auto call = send(kWatch, about(""));
  const auto unknown = send(kWatch, about("nothing"));
  EXPECT_TRUE(client().wait([&] { return told(client().answers[call]).size() == 1; }));
  service_.is_ready = false;
  EXPECT_TRUE(client().wait([&] { return told(client().answers[call]).size() == 2; }));
  service_.is_ready = true;
  EXPECT_TRUE(client().wait([&] { return told(client().answers[call]).size() == 3; }));
  front_->drain();
  EXPECT_THAT(client().answer(call).status(), StartsWith("14 "));
  EXPECT_THAT(told(client().answer(call)), ElementsAre(1, 2, 1, 2));
  EXPECT_THAT(told(client().answer(unknown)), ElementsAre(3));
  EXPECT_TRUE(client().ended());
}

// Reflection

TEST_F(GrpcFrontTest, SchemasAreTold) {
  reflection::ServerReflectionRequest request;
  request.set_list_services("*");
  const auto call =
      client().call(GrpcClient::head(kReflect), framed(request.SerializeAsString()), true);
  EXPECT_TRUE(client().wait([&] { return client().answers[call].messages().size() == 1; }));
  request.set_file_containing_symbol("envoy.service.ratelimit.v3.RateLimitService.ShouldRateLimit");
  client().more(call, framed(request.SerializeAsString()), true);
  request.set_file_by_filename("weir/v1/weir.proto");
  client().more(call, framed(request.SerializeAsString()), true);
  request.set_file_containing_symbol("nothing.at.all");
  client().more(call, framed(request.SerializeAsString()));
  const GrpcAnswer& got = client().answer(call);
  EXPECT_EQ(got.status(), "OK");
  std::vector<reflection::ServerReflectionResponse> answers;
  for (const std::string& message : got.messages()) {
    EXPECT_TRUE(answers.emplace_back().ParseFromString(message));
  }
  ASSERT_EQ(answers.size(), 4u);
  std::vector<std::string> services;
  for (const auto& service : answers[0].list_services_response().service()) {
    services.push_back(service.name());
  }
  EXPECT_THAT(services,
              UnorderedElementsAre("envoy.service.auth.v3.Authorization",
                                   "envoy.service.ratelimit.v3.RateLimitService",
                                   "grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection",
                                   "grpc.reflection.v1alpha.ServerReflection", "weir.v1.Weir"));
  // With all that it imports.
  EXPECT_EQ(answers[1].file_descriptor_response().file_descriptor_proto_size(), 7);
  EXPECT_EQ(answers[2].file_descriptor_response().file_descriptor_proto_size(), 2);
  EXPECT_EQ(answers[3].error_response().error_code(), 5);
}

// TLS

TEST_F(GrpcFrontTest, SpeaksTls) {
  rpc::test::TestCa ca;
  ca.issue("node", {"node.example"});
  ca.issue("client", {"weir://clients/envoy"});
  std::string error;
  rpc::TlsOptions server = ca.options("node", rpc::ClientCertificate::required);
  server.alpn = {"h2"};
  options_.tls = rpc::TlsContext::make(server, error);
  ASSERT_NE(options_.tls, nullptr) << error;
  Access access;
  access.replace(
      parse_access("certificates: [{name: \"weir://clients/envoy\", check: all}]", "a").table);
  options_.access = &access;
  rpc::TlsOptions mine = ca.options("client");
  mine.alpn = {"h2"};
  const auto context = rpc::TlsContext::make(mine, error);
  ASSERT_NE(context, nullptr) << error;
  const auto tls = rpc::TlsSession::client(context, "node", {"node.example"});
  const int fd = dial();
  test::GrpcSession client;
  client.greet();
  const auto call = client.call(GrpcClient::head(kRateLimit),
                                framed(rate_limit("api", {{{"a", "b"}}}).SerializeAsString()));
  rpc::Output out;
  tls->start(out);
  EXPECT_TRUE(rpc::test::eventually(loop_, [&] {
    if (tls->can_write()) {
      if (const std::string bytes = client.output(); !bytes.empty()) tls->write(bytes, out);
    }
    const ssize_t sent = ::send(fd, out.data(), out.size(), MSG_NOSIGNAL);
    if (sent > 0) out.drop_front(static_cast<std::size_t>(sent));
    char buffer[16 << 10];
    const ssize_t count = ::recv(fd, buffer, sizeof buffer, 0);
    if (count > 0) {
      tls->receive({buffer, static_cast<std::size_t>(count)});
      char plain[16 << 10];
      for (std::size_t size; (size = tls->read(plain, out)) > 0;) client.input({plain, size});
    }
    return client.answers[call].closed;
  }));
  EXPECT_EQ(client.answers[call].status(), "OK");
  EXPECT_EQ(tls->alpn(), "h2");
  EXPECT_THAT(service_.who, ElementsAre("weir://clients/envoy"));
  ::close(fd);
}

}  // namespace
}  // namespace weir::node
