#include <weir/node/fronts/http/http_front.h>

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <weir/node/access/access_file.h>
#include <weir/node/fronts/http/http_test_client.h>
#include <weir/rpc/net/event_loop.h>
#include <weir/rpc/net/test_util.h>

namespace weir::node {
namespace {

using nlohmann::json;
using test::Client;
using test::Response;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

Status status_of(std::string rule, std::uint64_t limit, std::uint64_t remaining) {
  Status status;
  status.rule = std::move(rule);
  status.limit = status.quota = limit;
  status.remaining = remaining;
  status.reset = 12'500 * kMillisecond;
  status.window = kMinute;
  return status;
}

Reply allowing(std::uint64_t remaining = 41) {
  Reply reply;
  reply.allowed = true;
  reply.deciding = 0;
  reply.statuses = {status_of("per-key", 100, remaining)};
  return reply;
}

Reply denying() {
  Reply reply = allowing();
  reply.allowed = false;
  reply.deciding = 1;
  reply.statuses.push_back(status_of("daily \"x\"", 1000, 0));
  reply.statuses[1].allowed = false;
  reply.statuses[1].retry_after = 1'500 * kMillisecond;
  return reply;
}

Reply failing(ErrorKind kind, std::string_view detail) {
  Reply reply;
  reply.fail(kind, detail);
  return reply;
}

std::string text_of(std::span<const Entry> entries, std::uint64_t hits) {
  std::string out;
  for (const Entry& entry : entries) out += fmt::format(" {}={}", entry.key, entry.value);
  return fmt::format("{} *{}", out, hits);
}

std::string text_of(const Request& request) {
  std::string out(request.domain);
  out += text_of(request.descriptor, request.hits);
  for (const Descriptor& more : request.more) out += text_of(more.entries, more.hits);
  if (!request.id.empty()) out += fmt::format(" id {}", request.id);
  if (request.wants_bound) out += " bound";
  if (request.kind == RequestKind::report) out += " report";
  if (request.kind == RequestKind::refund) out += " refund";
  return out;
}

/// Answers as told, and remembers what it was asked. What concerns the domain or ticket "late" is
/// answered when the test calls what waits.
class FakeService final : public Service {
 public:
  void check(std::span<const Request> requests, std::span<const std::size_t> parts,
             const Caller& caller, CheckDone done) override {
    std::string call;
    for (const Request& request : requests) call += (call.empty() ? "" : ", ") + text_of(request);
    note(std::move(call), caller);
    if (throws) throw std::runtime_error("boom");
    auto shared = std::make_shared<CheckDone>(std::move(done));
    for (std::size_t part = 0; part < parts.size(); ++part) {
      bool is_late = false;
      std::vector<Reply> replies;
      for (const Request& request : requests.first(parts[part])) {
        is_late |= request.domain == "late";
        replies.push_back(decide(request));
      }
      requests = requests.subspan(parts[part]);
      if (!is_late) {
        (*shared)(part, replies);
        continue;
      }
      auto late = std::make_shared<std::vector<Reply>>(std::move(replies));
      waiting.push_back([shared, part, late] { (*shared)(part, *late); });
    }
  }
  void reserve(const Request& request, Nanos timeout, const Caller& caller,
               Done<ReserveReply> done) override {
    note(fmt::format("reserve {} for {} ms", text_of(request), timeout / kMillisecond), caller);
    answer(request.domain == "late", reserved, std::move(done));
  }
  void settle(std::string_view ticket, std::uint64_t hits, const Caller& caller,
              Done<SettleReply> done) override {
    note(fmt::format("settle {} {}", ticket, hits), caller);
    answer(ticket == "late", settled, std::move(done));
  }
  void lease(const Request&, const LeaseTerms&, const Caller&, Done<LeaseReply>) override {
    ADD_FAILURE() << "no front that speaks HTTP leases";
  }
  void rules(std::string_view, const Caller&, Done<RulesReply>) override { ADD_FAILURE(); }
  void status(const Caller&, Done<StatusReply>) override { ADD_FAILURE(); }

  std::function<Reply(const Request&)> decide = [](const Request&) { return allowing(); };
  ReserveReply reserved{allowing(), "00ff-7"};
  SettleReply settled{{}, true, 500, false, false};
  bool throws = false;
  std::vector<std::string> calls;
  std::string from;              // the last caller's address
  std::vector<std::string> who;  // the callers' names
  std::vector<std::function<void()>> waiting;

 private:
  void note(std::string call, const Caller& caller) {
    calls.push_back(std::move(call));
    from = caller.address;
    who.push_back(caller.grant == nullptr ? "?" : caller.grant->name);
  }
  template <typename Answer>
  void answer(bool late, Answer reply, Done<Answer> done) {
    if (!late) return done(reply);
    auto call = std::make_shared<std::pair<Answer, Done<Answer>>>(reply, std::move(done));
    waiting.push_back([call] { call->second(call->first); });
  }
};

std::string post(std::string_view path, std::string_view body, std::string_view fields = {}) {
  return fmt::format(
      "POST {} HTTP/1.1\r\nHost: weir\r\nContent-Type: application/json\r\n{}"
      "Content-Length: {}\r\n\r\n{}",
      path, fields, body.size(), body);
}
std::string check(std::string_view domain, std::uint64_t hits = 1, std::string_view fields = {}) {
  return post("/v1/check", fmt::format(R"({{"domain":"{}","hits":{}}})", domain, hits), fields);
}
std::string settle(std::string_view ticket) {
  return post("/v1/settle", fmt::format(R"({{"ticket":"{}","hits":321}})", ticket));
}

/// Segments with data that a socket has received: as many as writes of the other side, of less than
/// 64 KiB each and over loopback.
std::uint32_t segments_received(int fd) {
  // Linux's tcp_info, of which the C library knows the beginning.
  struct {
    tcp_info known;
    std::uint64_t rates_and_bytes[4];
    std::uint32_t segs_out, segs_in, notsent_bytes, min_rtt, data_segs_in;
  } info{};
  static_assert(sizeof(tcp_info) == 104);
  socklen_t size = sizeof info;
  EXPECT_EQ(::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size), 0);
  return info.data_segs_in;
}

class HttpFrontTest : public testing::Test {
 protected:
  HttpFrontTest() {
    options_.wall = [] { return 1'767'323'045 * kSecond; };
  }
  ~HttpFrontTest() noexcept override {}
  void TearDown() override {
    front_.reset();
    rpc::test::turn(loop_, 2);
    EXPECT_EQ(budget_->open(), 0u);
  }

  void start(const std::string& address = "127.0.0.1:0") {
    front_ = std::make_unique<HttpFront>(loop_, service_, options_, budget_);
    std::string error;
    ASSERT_TRUE(front_->start(address, rpc::Sharing::alone, error)) << error;
    ASSERT_NE(front_->port(), 0);
  }
  std::unique_ptr<Client> client() { return client(rpc::test::local(front_->port())); }
  std::unique_ptr<Client> client(const rpc::Address& to) {
    const int fd = ::socket(to.v6 ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_storage at;
    const socklen_t size = rpc::to_sockaddr(to, at);
    EXPECT_EQ(::connect(fd, reinterpret_cast<sockaddr*>(&at), size), 0);
    ::fcntl(fd, F_SETFL, O_NONBLOCK);
    return std::make_unique<Client>(turn_, fd);
  }
  Response ask(Client& client, std::string_view request) {
    client.send(request);
    const std::optional<Response> response = client.receive(request.starts_with("HEAD"));
    EXPECT_TRUE(response.has_value()) << "closed without an answer";
    return response.value_or(Response{});
  }
  Response ask(std::string_view request) {
    if (front_ == nullptr) start();
    return ask(*client(), request);
  }
  /// Until so many calls wait for an answer.
  void await(std::size_t count) {
    EXPECT_TRUE(rpc::test::eventually(loop_, [&] { return service_.waiting.size() == count; }));
  }
  static json body_of(const std::optional<Response>& response) {
    return json::parse(response.value_or(Response{}).body);
  }
  std::uint64_t remaining(Client& client) { return body_of(client.receive()).at("remaining"); }

  rpc::EventLoop loop_;
  FakeService service_;
  HttpFrontOptions options_;
  std::shared_ptr<ConnectionBudget> budget_ = std::make_shared<ConnectionBudget>(1000);
  std::unique_ptr<HttpFront> front_;
  const std::function<void()> turn_ = [this] { rpc::test::turn(loop_, 1); };
};

// What is asked and what is told.

TEST_F(HttpFrontTest, ReportsAndRefunds) {
  ask(post("/v1/check", R"({"domain":"api","descriptor":{"a":"1"},"hits":3,"kind":"report"})"));
  ask(post("/v1/checks", R"({"checks":[{"domain":"api","kind":"refund"},{"domain":"api"}]})"));
  EXPECT_THAT(service_.calls, ElementsAre("api a=1 *3 report", "api *1 refund, api *1"));
}

TEST_F(HttpFrontTest, AllowsWithHeaders) {
  const Response got =
      ask(post("/v1/check", R"({"domain":"api","descriptor":{"a":"1","b":"2"},"hits":3,
                            "request_id":"r1","over_admission":true})"));
  EXPECT_EQ(got.status, 200);
  EXPECT_THAT(service_.calls, ElementsAre("api a=1 b=2 *3 id r1 bound"));
  EXPECT_EQ(service_.from, "127.0.0.1");
  EXPECT_EQ(got.header("Content-Type"), "application/json");
  EXPECT_EQ(got.header("Cache-Control"), "no-store");
  EXPECT_EQ(got.header("RateLimit-Policy"), "\"per-key\";q=100;w=60");
  EXPECT_EQ(got.header("RateLimit"), "\"per-key\";r=41;t=13");
  EXPECT_EQ(got.header("X-RateLimit-Limit"), "100");
  EXPECT_EQ(got.header("X-RateLimit-Remaining"), "41");
  EXPECT_EQ(got.header("X-RateLimit-Reset"), "13");
  EXPECT_EQ(got.header("Retry-After"), "(absent)");
  const json body = json::parse(got.body);
  EXPECT_EQ(body["allowed"], true);
  EXPECT_EQ(body["rule"], "per-key");
  EXPECT_EQ(body["reset_ms"], 12'500);
}

TEST_F(HttpFrontTest, GatewaysAskByTheHeadOfARequest) {
  options_.forward_auth.headers = {{"x-api-key", "api_key"}};
  const Response passed =
      ask("GET /v1/auth/api HTTP/1.1\r\nHost: weir\r\nX-Forwarded-Uri: /a?b\r\nX-Api-Key: k\r\n"
          "X-Forwarded-For: 192.0.2.7\r\nAuthorization: Bearer of-the-shop\r\n\r\n");
  EXPECT_EQ(passed.status, 200);
  EXPECT_EQ(passed.body, "");
  EXPECT_EQ(passed.header("RateLimit"), "\"per-key\";r=41;t=13");
  EXPECT_THAT(service_.calls,
              ElementsAre("api api_key=k method=GET path=/a host=weir ip=192.0.2.7 *1"));
  service_.decide = [](const Request&) { return denying(); };
  const Response denied =
      ask("POST /v1/auth/api HTTP/1.1\r\nHost: weir\r\nContent-Length: 0\r\n\r\n");
  EXPECT_EQ(denied.status, 429);
  EXPECT_EQ(denied.header("Retry-After"), "2");
  EXPECT_EQ(json::parse(denied.body)["rule"], "daily \"x\"");
  const Response hidden = ask("GET /v1/auth/api?deny=403 HTTP/1.1\r\nHost: weir\r\n\r\n");
  EXPECT_EQ(hidden.status, 403);
  EXPECT_EQ(hidden.header("Retry-After"), "2");
  service_.decide = [](const Request&) { return failing(ErrorKind::unavailable, "stopping"); };
  EXPECT_EQ(ask("GET /v1/auth/api?deny=403 HTTP/1.1\r\nHost: weir\r\n\r\n").status, 503);
  EXPECT_EQ(ask("GET /v1/auth/ HTTP/1.1\r\nHost: weir\r\n\r\n").status, 400);
}

TEST_F(HttpFrontTest, DeniesWithTheDecidingRule) {
  options_.reset = ResetFormat::epoch;
  service_.decide = [](const Request&) { return denying(); };
  const Response got = ask(check("api"));
  EXPECT_EQ(got.status, 429);
  EXPECT_EQ(got.header("Content-Type"), "application/problem+json");
  EXPECT_EQ(got.header("Cache-Control"), "no-store");
  EXPECT_EQ(got.header("RateLimit"), "\"daily \\\"x\\\"\";r=0;t=2");
  EXPECT_EQ(got.header("Retry-After"), "2");
  EXPECT_EQ(got.header("X-RateLimit-Limit"), "1000");
  EXPECT_EQ(got.header("X-RateLimit-Reset"), "1767323047");
  const json body = json::parse(got.body);
  EXPECT_EQ(body["type"], "https://iana.org/assignments/http-problem-types#quota-exceeded");
  EXPECT_EQ(body["violated-policies"], json({"daily \"x\""}));
  EXPECT_EQ(body["retry_after_ms"], 1500);
}

TEST_F(HttpFrontTest, NeverHasNoRetryAfter) {
  service_.decide = [](const Request&) {
    Reply reply = denying();
    reply.statuses[1].retry_after = kNever;
    return reply;
  };
  const Response got = ask(check("api"));
  EXPECT_EQ(got.status, 429);
  EXPECT_EQ(got.header("Retry-After"), "(absent)");
  EXPECT_TRUE(json::parse(got.body).at("retry_after_ms").is_null());
}

TEST_F(HttpFrontTest, SeveralDescriptorsAreOneRequest) {
  service_.decide = [](const Request& request) {
    Reply reply = allowing();
    reply.statuses.push_back(status_of("per-ip", 5, 4));
    reply.statuses[1].descriptor = static_cast<std::uint16_t>(request.descriptors() - 1);
    return reply;
  };
  const Response got = ask(post("/v1/check", R"({"domain":"api","descriptors":[
      {"entries":{"a":"1"},"hits":2},{"entries":{"b":"2","c":"3"}}]})"));
  EXPECT_EQ(got.status, 200);
  EXPECT_THAT(service_.calls, ElementsAre("api a=1 *2 b=2 c=3 *1"));
  EXPECT_EQ(json::parse(got.body)["statuses"][1]["descriptor"], 1);
}

TEST_F(HttpFrontTest, AListIsAnsweredAsAList) {
  service_.decide = [](const Request& request) {
    if (request.domain == "b") return denying();
    if (request.domain == "c") return failing(ErrorKind::unavailable, "stopping");
    return allowing();
  };
  start();
  const auto connection = client();
  const Response got = ask(*connection, post("/v1/checks",
                                             R"({"checks":[{"domain":"a"},{"domain":"b","hits":2},
                                                          {"domain":"c"}]})",
                                             "Prefer: return=minimal\r\n"));
  EXPECT_EQ(got.status, 200);
  EXPECT_THAT(service_.calls, ElementsAre("a *1, b *2, c *1"));
  EXPECT_EQ(got.header("RateLimit"), "(absent)");
  EXPECT_EQ(got.header("Cache-Control"), "no-store");
  const json results = json::parse(got.body).at("results");
  ASSERT_EQ(results.size(), 3u);
  EXPECT_EQ(results[0]["allowed"], true);
  EXPECT_EQ(results[1]["allowed"], false);
  EXPECT_EQ(results[1]["rule"], "daily \"x\"");
  EXPECT_EQ(results[2], json({{"error", "unavailable"}, {"detail", "stopping"}}));

  // One mistake refuses the list, and names the place.
  const Response bad =
      ask(*connection, post("/v1/checks", R"({"checks":[{"domain":"a"},{"hits":2}]})"));
  EXPECT_EQ(bad.status, 400);
  EXPECT_THAT(body_of(bad)["field"], "checks[1].domain");
  EXPECT_EQ(service_.calls.size(), 1u);
}

TEST_F(HttpFrontTest, ReservesAndSettles) {
  start();
  const auto connection = client();
  Response got =
      ask(*connection, post("/v1/reserve", R"({"domain":"llm","hits":500,"request_id":"r1",
                                               "timeout_ms":9000})"));
  EXPECT_EQ(got.status, 200);
  EXPECT_EQ(got.header("Cache-Control"), "no-store");
  EXPECT_EQ(got.header("RateLimit"), "\"per-key\";r=41;t=13");
  EXPECT_EQ(body_of(got)["ticket"], "00ff-7");
  EXPECT_EQ(service_.calls.back(), "reserve llm *500 id r1 for 9000 ms");
  EXPECT_EQ(service_.from, "127.0.0.1");

  service_.from.clear();
  got = ask(*connection, settle("00ff-7"));
  EXPECT_EQ(got.status, 200);
  EXPECT_EQ(service_.calls.back(), "settle 00ff-7 321");
  EXPECT_EQ(service_.from, "127.0.0.1");
  EXPECT_EQ(body_of(got),
            json::parse(R"({"settled":true,"reserved":500,"lapsed":false,"degraded":false})"));

  service_.settled.settled = false;
  got = ask(*connection, settle("00ff-7"));
  EXPECT_EQ(got.status, 404);
  EXPECT_EQ(body_of(got)["field"], "ticket");
  EXPECT_EQ(ask(*connection, post("/v1/settle", R"({"ticket":"a"})")).status, 400);
  EXPECT_EQ(ask(*connection, post("/v1/reserve", R"({"hits":1})")).status, 400);

  service_.reserved = {denying(), ""};
  got = ask(*connection, post("/v1/reserve", R"({"domain":"llm","hits":500})"));
  EXPECT_EQ(got.status, 429);
  EXPECT_TRUE(body_of(got)["ticket"].is_null());
}

TEST_F(HttpFrontTest, TheTerseForm) {
  start();
  const auto connection = client();
  const std::string prefer = "prefer: respond-async, return=minimal\r\n";
  Response got = ask(*connection, check("api", 1, prefer));
  EXPECT_EQ(got.status, 200);
  EXPECT_EQ(got.body, "");
  EXPECT_EQ(got.header("Content-Length"), "0");
  EXPECT_EQ(got.header("Content-Type"), "(absent)");
  EXPECT_EQ(got.header("RateLimit"), "\"per-key\";r=41;t=13");
  EXPECT_EQ(got.header("Preference-Applied"), "return=minimal");
  EXPECT_EQ(got.header("X-RateLimit-Limit"), "(absent)");

  service_.decide = [](const Request&) { return denying(); };
  got = ask(*connection, check("api", 1, prefer));
  EXPECT_EQ(got.status, 429);
  EXPECT_EQ(got.body, "");
  EXPECT_EQ(got.header("Retry-After"), "2");

  service_.decide = [](const Request&) { return failing(ErrorKind::closed, "disk"); };
  got = ask(*connection, check("api", 1, prefer));
  EXPECT_EQ(got.status, 503);
  EXPECT_EQ(got.header("Preference-Applied"), "(absent)");
  EXPECT_EQ(body_of(got)["detail"], "disk");

  service_.decide = [](const Request&) { return allowing(); };
  got = ask(*connection, check("api", 1, "Prefer: return=representation\r\n"));
  EXPECT_EQ(body_of(got)["remaining"], 41);
}

// What is refused.

TEST_F(HttpFrontTest, ErrorKindsAreStatuses) {
  start();
  const auto connection = client();
  const std::pair<ErrorKind, int> kinds[] = {
      {ErrorKind::invalid, 400},     {ErrorKind::unavailable, 503},
      {ErrorKind::overloaded, 503},  {ErrorKind::deadline, 503},
      {ErrorKind::unknown, 503},     {ErrorKind::closed, 503},
      {ErrorKind::unsupported, 501}, {ErrorKind::unauthenticated, 401},
      {ErrorKind::forbidden, 403}};
  for (const auto& [kind, status] : kinds) {
    const Reply reply = failing(kind, "why \"x\"");
    service_.decide = [&](const Request&) { return reply; };
    service_.reserved = {reply, ""};
    service_.settled = {reply.error, false, 0, false, false};
    const char* retry = kind == ErrorKind::overloaded ? "1" : "(absent)";
    for (const std::string& request :
         {check("api"), post("/v1/reserve", R"({"domain":"api"})"), settle("t")}) {
      const Response got = ask(*connection, request);
      EXPECT_EQ(got.status, status) << to_string(kind);
      EXPECT_EQ(got.header("Content-Type"), "application/problem+json");
      EXPECT_EQ(got.header("RateLimit"), "(absent)");
      if (request != settle("t")) {
        EXPECT_EQ(got.header("Retry-After"), retry) << to_string(kind);
      }
      const json body = body_of(got);
      EXPECT_EQ(body["status"], status);
      EXPECT_EQ(body["error"], to_string(kind));
      EXPECT_EQ(body["detail"], "why \"x\"");
    }
  }
}

TEST_F(HttpFrontTest, NamesWhatIsWrong) {
  start();
  const auto connection = client();
  const auto problem = [&](const std::string& request, int status) {
    const Response got = ask(*connection, request);
    EXPECT_EQ(got.status, status) << request;
    EXPECT_EQ(got.header("Content-Type"), "application/problem+json");
    const json body = json::parse(got.body);
    EXPECT_EQ(body["status"], status);
    return body;
  };
  const auto line = [](std::string_view method, std::string_view path) {
    return fmt::format("{} {} HTTP/1.1\r\nHost: w\r\n\r\n", method, path);
  };
  const json hits = problem(post("/v1/check", R"({"domain":"api","hits":-1})"), 400);
  EXPECT_EQ(hits["field"], "hits");
  EXPECT_EQ(hits["detail"], "hits: expected an integer from 0 to 9007199254740992");
  EXPECT_FALSE(problem(post("/v1/check", "{"), 400).contains("field"));
  problem(post("/v1/check", ""), 400);
  problem(post("/v1/checks", "[]"), 400);
  problem(line("GET", "/"), 404);
  problem(line("GET", "/v1/check/"), 404);
  problem(line("GET", "/v1/check%00"), 404);
  problem(line("OPTIONS", "*"), 404);
  problem(post("/nowhere", "{}"), 404);
  for (const char* path : {"/v1/check", "/v1/checks", "/v1/reserve", "/v1/settle"}) {
    for (const char* method : {"GET", "DELETE", "post"}) problem(line(method, path), 405);
    EXPECT_EQ(ask(*connection, line("HEAD", path)).header("Allow"), "POST");
    const std::string bare = fmt::format("POST {} HTTP/1.1\r\nHost: w\r\n", path);
    problem(bare + "Content-Length: 2\r\n\r\n{}", 415);
    problem(bare + "Content-Type: application/x-www-form-urlencoded\r\nContent-Length: 2\r\n\r\n{}",
            415);
  }
  EXPECT_THAT(service_.calls, IsEmpty());
  // The connection was kept through all of it.
  EXPECT_EQ(ask(*connection, post("/v1/check?trace=1", R"({"domain":"api"})")).status, 200);
  EXPECT_EQ(ask(*connection, post("/v1/check", std::string(70'000, ' '))).status, 413);
  EXPECT_TRUE(connection->closed());
}

TEST_F(HttpFrontTest, AServiceThatThrowsIs500AndTheFrontLives) {
  start();
  const auto connection = client();
  service_.throws = true;
  EXPECT_EQ(ask(*connection, check("api")).status, 500);
  service_.throws = false;
  EXPECT_EQ(ask(*connection, check("api")).status, 200);
  EXPECT_THAT(service_.calls, ElementsAre("api *1", "api *1"));
}

// Several at once.

TEST_F(HttpFrontTest, RequestsOfOneReadAreOneCallAndOneWrite) {
  start();
  service_.decide = [](const Request& request) { return allowing(request.hits); };
  const auto connection = client();
  EXPECT_EQ(ask(*connection, check("warm")).status, 200);
  service_.calls.clear();
  std::string many;
  for (std::uint64_t i = 0; i < 20; i += 2) {
    many += check("d", i);
    many += post("/v1/checks", fmt::format(R"({{"checks":[{{"domain":"l","hits":{}}},
                                                      {{"domain":"m"}}]}})",
                                           i + 1));
  }
  const std::uint32_t before = segments_received(connection->fd());
  ASSERT_EQ(connection->try_send(many), many.size());
  for (std::uint64_t i = 0; i < 20; i += 2) {
    EXPECT_EQ(remaining(*connection), i);
    const json results = body_of(connection->receive()).at("results");
    ASSERT_EQ(results.size(), 2u);
    EXPECT_EQ(results[0]["remaining"], i + 1);
    EXPECT_EQ(results[1]["remaining"], 1);
  }
  ASSERT_EQ(service_.calls.size(), 1u);
  EXPECT_THAT(service_.calls[0], HasSubstr("d *0, l *1, m *1, d *2, l *3, m *1, d *4"));
  EXPECT_EQ(segments_received(connection->fd()) - before, 1u);
}

TEST_F(HttpFrontTest, WhatIsRefusedKeepsItsPlace) {
  start();
  service_.decide = [](const Request& request) { return allowing(request.hits); };
  const auto connection = client();
  const std::string many = check("a", 1) + post("/v1/check", "{") + check("b", 2) +
                           "GET /v1/check HTTP/1.1\r\nHost: w\r\n\r\n" + check("c", 3) +
                           post("/nowhere", "{}");
  ASSERT_EQ(connection->try_send(many), many.size());
  EXPECT_EQ(remaining(*connection), 1u);
  EXPECT_EQ(connection->receive().value_or(Response{}).status, 400);
  EXPECT_EQ(remaining(*connection), 2u);
  EXPECT_EQ(connection->receive().value_or(Response{}).status, 405);
  EXPECT_EQ(remaining(*connection), 3u);
  EXPECT_EQ(connection->receive().value_or(Response{}).status, 404);
  EXPECT_THAT(service_.calls, ElementsAre("a *1, b *2, c *3"));
}

TEST_F(HttpFrontTest, ReservationsAreAskedInTheirTurn) {
  start();
  const auto connection = client();
  const std::string many = check("a") + check("b") + post("/v1/reserve", R"({"domain":"r"})") +
                           post("/v1/reserve", "{}") + settle("t") + check("c");
  ASSERT_EQ(connection->try_send(many), many.size());
  std::vector<int> statuses;
  for (int i = 0; i < 6; ++i) {
    statuses.push_back(connection->receive().value_or(Response{}).status);
  }
  EXPECT_THAT(statuses, ElementsAre(200, 200, 200, 400, 200, 200));
  EXPECT_THAT(service_.calls,
              ElementsAre("a *1, b *1", "reserve r *1 for 60000 ms", "settle t 321", "c *1"));
}

TEST_F(HttpFrontTest, ALargeAnswerArrivesWhole) {
  start();
  std::string list = R"({"checks":[{"domain":"0"})";
  for (int i = 1; i < 256; ++i) list += R"(,{"domain":"d"})";
  list += "]}";
  constexpr int kLists = 20;
  const auto connection = client();
  std::string many;
  for (int i = 0; i < kLists; ++i) many += post("/v1/checks", list);
  connection->send(many);
  std::size_t bytes = 0;
  for (int i = 0; i < kLists; ++i) {
    const std::optional<Response> got = connection->receive();
    EXPECT_EQ(body_of(got).at("results").size(), 256u);
    bytes += got->body.size();
  }
  EXPECT_GT(bytes, 1u << 20);
}

TEST_F(HttpFrontTest, ManyConnectionsInterleave) {
  start();
  std::vector<std::unique_ptr<Client>> clients;
  for (int i = 0; i < 64; ++i) clients.push_back(client());
  for (int round = 0; round < 4; ++round) {
    const bool late = round % 2 == 1;
    for (auto& each : clients) ASSERT_NE(each->try_send(check(late ? "late" : "now")), 0u);
    if (late) {
      await(clients.size());
      for (auto& answer : std::exchange(service_.waiting, {})) answer();
    }
    for (auto& each : clients) EXPECT_EQ(each->receive().value_or(Response{}).status, 200);
  }
}

// Answers that come in a later turn.

TEST_F(HttpFrontTest, LateAnswersComeWhenTheyAreReady) {
  start();
  const auto one = client();
  const auto two = client();
  const auto three = client();
  one->send(check("late"));
  await(1);
  two->send(check("late", 1, "Prefer: return=minimal\r\n"));
  await(2);
  three->send(post("/v1/checks", R"({"checks":[{"domain":"x"},{"domain":"late"}]})"));
  await(3);
  // Others are served meanwhile, in the memory that those calls used.
  EXPECT_EQ(ask(check("another", 5)).status, 200);
  EXPECT_EQ(one->received() + two->received() + three->received(), "");

  service_.waiting[2]();
  EXPECT_EQ(body_of(three->receive()).at("results").size(), 2u);
  service_.waiting[1]();
  EXPECT_EQ(two->receive().value_or(Response{}).header("Preference-Applied"), "return=minimal");
  EXPECT_EQ(one->received(), "");
  service_.waiting[0]();
  EXPECT_EQ(remaining(*one), 41u);
  EXPECT_EQ(ask(*one, check("now")).status, 200);
}

TEST_F(HttpFrontTest, LateAndImmediateAnswersKeepTheOrder) {
  start();
  service_.decide = [](const Request& request) { return allowing(request.hits); };
  const auto connection = client();
  // Two calls of checks, as a settlement is in between; then a late one of each other kind.
  const std::string many = check("now", 1) + check("late", 2) + settle("t") + check("now", 3) +
                           post("/v1/reserve", R"({"domain":"late"})") + settle("late") +
                           check("now", 4) + check("late", 5);
  ASSERT_EQ(connection->try_send(many + check("next", 6)), many.size() + check("next").size());
  await(4);
  // What waits holds back what was asked after it, and nothing that was asked before.
  EXPECT_EQ(remaining(*connection), 1u);
  rpc::test::turn(loop_, 5);
  EXPECT_EQ(connection->received(), "");
  EXPECT_THAT(service_.calls, ElementsAre("now *1, late *2", "settle t 321", "now *3",
                                          "reserve late *1 for 60000 ms", "settle late 321",
                                          "now *4, late *5, next *6"));
  service_.waiting[3]();
  service_.waiting[1]();
  rpc::test::turn(loop_, 5);
  EXPECT_EQ(connection->received(), "");
  service_.waiting[0]();
  EXPECT_EQ(remaining(*connection), 2u);
  EXPECT_EQ(body_of(connection->receive())["settled"], true);
  EXPECT_EQ(remaining(*connection), 3u);
  EXPECT_EQ(body_of(connection->receive())["ticket"], "00ff-7");
  rpc::test::turn(loop_, 5);
  EXPECT_EQ(connection->received(), "");
  service_.waiting[2]();
  EXPECT_EQ(body_of(connection->receive())["settled"], true);
  for (std::uint64_t i = 4; i < 7; ++i) EXPECT_EQ(remaining(*connection), i);
}

TEST_F(HttpFrontTest, AnAnswerOutlivesItsClient) {
  start();
  auto gone = client();
  gone->send(check("late", 1) + post("/v1/reserve", R"({"domain":"late"})") + settle("late"));
  await(3);
  gone->leave();
  EXPECT_TRUE(rpc::test::eventually(loop_, [&] { return budget_->open() == 0; }));
  // Another's requests take the place of those in the server.
  const auto other = client();
  other->send(check("late", 7) + check("late") + check("late"));
  await(6);
  for (int i = 0; i < 3; ++i) service_.waiting[static_cast<std::size_t>(i)]();
  rpc::test::turn(loop_, 5);
  EXPECT_EQ(other->received(), "");
  for (int i = 3; i < 6; ++i) service_.waiting[static_cast<std::size_t>(i)]();
  for (int i = 0; i < 3; ++i) EXPECT_EQ(remaining(*other), 41u);
}

TEST_F(HttpFrontTest, AClientThatSendsNoMoreGetsItsLateAnswer) {
  start();
  const auto connection = client();
  connection->send(check("late"));
  connection->shut_write();
  await(1);
  rpc::test::turn(loop_, 5);
  service_.waiting[0]();
  EXPECT_EQ(remaining(*connection), 41u);
  EXPECT_TRUE(connection->closed());
}

TEST_F(HttpFrontTest, AServiceThatNeverAnswersIs503) {
  options_.server.answer_timeout = 30 * kMillisecond;
  start();
  const auto connection = client();
  EXPECT_EQ(ask(*connection, check("late")).status, 503);
  EXPECT_EQ(front_->counters().unanswered, 1u);
  service_.waiting[0]();  // too late
  EXPECT_EQ(ask(*connection, check("now")).status, 200);
  // One that is dropped unanswered is no different.
  connection->send(check("late"));
  await(2);
  service_.waiting.clear();
  EXPECT_EQ(connection->receive().value_or(Response{}).status, 503);
}

TEST_F(HttpFrontTest, DoesNotSpinWhileItWaits) {
  start();
  const auto waiting = client();
  const auto idle = client();
  EXPECT_EQ(ask(*idle, check("now")).status, 200);
  waiting->send(check("late"));
  await(1);
  const auto cpu = [] {
    rusage usage{};
    ::getrusage(RUSAGE_THREAD, &usage);
    return (usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1000 +
           (usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1000;
  };
  const auto before = cpu();
  rpc::test::turn(loop_, 300);
  EXPECT_LT(cpu() - before, 100);
  service_.waiting[0]();
  EXPECT_EQ(waiting->receive().value_or(Response{}).status, 200);
}

// Its beginning and its end.

TEST_F(HttpFrontTest, StopAnswersWhatWaits) {
  start();
  const auto one = client();
  const auto two = client();
  const auto idle = client();
  const auto partial = client();
  const auto unread = client();
  EXPECT_EQ(ask(*unread, check("now")).status, 200);
  EXPECT_EQ(ask(*idle, check("now")).status, 200);
  one->send(check("late"));
  two->send(check("late") + settle("late"));
  partial->send(check("now").substr(0, 80));
  await(3);
  const std::size_t asked = service_.calls.size();
  const rpc::Address address = rpc::test::local(front_->port());
  ASSERT_NE(unread->try_send(check("now")), 0u);  // arrives while the front stops
  front_->stop();
  front_->stop();
  for (auto& answer : service_.waiting) answer();  // nobody's any more

  const Response got = one->receive().value_or(Response{});
  EXPECT_EQ(got.status, 503);
  EXPECT_EQ(got.header("Connection"), "close");
  EXPECT_TRUE(one->closed());
  EXPECT_EQ(two->receive().value_or(Response{}).status, 503);
  EXPECT_EQ(two->receive().value_or(Response{}).status, 503);
  EXPECT_TRUE(two->closed());
  EXPECT_TRUE(idle->closed());
  EXPECT_TRUE(partial->closed());
  EXPECT_TRUE(unread->closed());
  EXPECT_EQ(service_.calls.size(), asked);
  EXPECT_FALSE(rpc::test::RawSocket(address).connected());
}

TEST_F(HttpFrontTest, DrainSendsClientsAway) {
  start();
  const auto idle = client();
  const auto waiting = client();
  const auto sending = client();
  EXPECT_EQ(ask(*idle, check("now")).header("Connection"), "(absent)");
  waiting->send(check("late"));
  sending->send(check("now").substr(0, 80));
  await(1);
  const rpc::Address address = rpc::test::local(front_->port());
  front_->drain();
  EXPECT_TRUE(idle->closed());
  EXPECT_FALSE(rpc::test::RawSocket(address).connected());
  // What is asked meanwhile is answered.
  sending->send(check("now").substr(80));
  Response got = sending->receive().value_or(Response{});
  EXPECT_EQ(got.status, 200);
  EXPECT_EQ(got.header("Connection"), "close");
  EXPECT_TRUE(sending->closed());
  service_.waiting[0]();
  got = waiting->receive().value_or(Response{});
  EXPECT_EQ(got.status, 200);
  EXPECT_EQ(got.header("Connection"), "close");
  EXPECT_TRUE(waiting->closed());
  EXPECT_EQ(budget_->open(), 0u);
}

TEST_F(HttpFrontTest, StartSaysWhyItFails) {
  start();
  const std::string taken = "127.0.0.1:" + std::to_string(front_->port());
  HttpFront second(loop_, service_, options_, budget_);
  std::string error;
  EXPECT_FALSE(second.start(taken, rpc::Sharing::alone, error));
  EXPECT_THAT(error, HasSubstr("Address already in use"));
  EXPECT_EQ(second.port(), 0);
  EXPECT_FALSE(second.start("localhost:1", rpc::Sharing::alone, error));
  EXPECT_THAT(error, HasSubstr("expected an address such as 127.0.0.1:7400"));
  // A failed start may be tried again.
  front_->stop();
  EXPECT_TRUE(second.start(taken, rpc::Sharing::alone, error)) << error;
  EXPECT_EQ(ask(*client(rpc::test::local(second.port())), check("now")).status, 200);
}

TEST_F(HttpFrontTest, ATokenSaysWhoAsksOfEachRequest) {
  const std::string one = make_token();
  const std::string two = make_token();
  const LoadedAccess loaded =
      parse_access(fmt::format("tokens:\n- {{name: one, hash: '{}'}}\n- {{name: two, hash: '{}'}}",
                               to_string(hash_token(one)), to_string(hash_token(two))),
                   "access");
  Access access;
  access.replace(loaded.table);
  options_.access = &access;
  start();
  const auto connection = client();
  const auto with = [](const std::string& token) {
    return "Authorization: Bearer " + token + "\r\n";
  };
  // In one piece, as a proxy may send them.
  connection->send(check("a", 1, with(one)) + check("b", 1, with(one)) + check("c", 1, with(two)) +
                   check("d") + check("e", 1, with(two) + with(one)));
  for (int i = 0; i < 5; ++i) connection->receive();
  EXPECT_THAT(service_.calls, ElementsAre("a *1, b *1", "c *1", "d *1", "e *1"));
  EXPECT_THAT(service_.who, ElementsAre("one", "two", "", "?"));
}

TEST_F(HttpFrontTest, CallersOverIpv6HaveTheirAddress) {
  start("[::1]:0");
  rpc::Address six;
  six.v6 = true;
  six.ip[15] = 1;
  six.port = front_->port();
  EXPECT_EQ(ask(*client(six), check("now")).status, 200);
  EXPECT_EQ(service_.from, "::1");
}

TEST_F(HttpFrontTest, WorkersShareTheirConnections) {
  budget_ = std::make_shared<ConnectionBudget>(1);
  start();
  HttpFront other(loop_, service_, options_, budget_);
  std::string error;
  ASSERT_TRUE(other.start("127.0.0.1:0", rpc::Sharing::alone, error)) << error;
  const auto one = client();
  EXPECT_EQ(ask(*one, check("now")).status, 200);
  EXPECT_TRUE(client(rpc::test::local(other.port()))->closed());
  EXPECT_EQ(other.counters().turned_away, 1u);
  one->leave();
  EXPECT_TRUE(rpc::test::eventually(loop_, [&] { return budget_->open() == 0; }));
  EXPECT_EQ(ask(*client(rpc::test::local(other.port())), check("now")).status, 200);
}

}  // namespace
}  // namespace weir::node
