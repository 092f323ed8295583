// Fuzz target (scripts/fuzz): arbitrary bytes as what a gRPC client sends, and arbitrary bytes as
// the message of a call. The first byte says which: of a method's number, a message to it, by a
// client that speaks HTTP/2 well, where neither what is asked nor the answer may depend on how the
// bytes were cut; of another, bytes as they are, behind the words that every client begins with if
// it is even. Whatever comes, nothing of it is left once the connection has ended.
#include <uv.h>

#include <array>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weir/crdt/fuzz_seeds.h>
#include <weir/node/fronts/grpc/grpc_methods.h>
#include <weir/node/fronts/grpc/grpc_test_util.h>
#include <weir/rpc/check.h>

namespace {

using namespace weir;
using node::test::framed;
using node::test::GrpcSession;

constexpr std::array<const char*, 11> kPaths = {
    "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit",
    "/envoy.service.auth.v3.Authorization/Check",
    "/weir.v1.Weir/Check",
    "/weir.v1.Weir/CheckBatch",
    "/weir.v1.Weir/Reserve",
    "/weir.v1.Weir/Settle",
    "/weir.v1.Weir/Lease",
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"};
constexpr std::string_view kGreeting("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0", 33);

void require(bool holds) {
  if (!holds) std::abort();
}

/// Denies now and then, and remembers what it was asked.
class FakeService final : public node::Service {
 public:
  void check(std::span<const Request> requests, std::span<const std::size_t> parts,
             const node::Caller&, CheckDone done) override {
    for (std::size_t part = 0; part < parts.size(); ++part) {
      std::vector<Reply> replies;
      for (const Request& request : requests.first(parts[part])) replies.push_back(decide(request));
      requests = requests.subspan(parts[part]);
      done(part, replies);
    }
  }
  void reserve(const Request& request, Nanos timeout, const node::Caller&,
               Done<ReserveReply> done) override {
    require(timeout >= 0 && timeout <= kDay && request.more.empty());
    ReserveReply reply{decide(request), "ticket"};
    done(reply);
  }
  void settle(std::string_view ticket, std::uint64_t hits, const node::Caller&,
              Done<SettleReply> done) override {
    require(!ticket.empty() && ticket.size() <= rpc::kMaxTicket);
    asked += "settle " + std::string(ticket) + std::to_string(hits);
    SettleReply reply{{}, hits % 2 == 0, hits, false, false};
    done(reply);
  }
  void lease(const Request& request, const LeaseTerms& terms, const node::Caller&,
             Done<LeaseReply> done) override {
    require(terms.term >= 0 && terms.term <= kMaxLeaseTerm);
    LeaseReply reply{decide(request), "ticket", terms.most, terms.term};
    done(reply);
  }
  void rules(std::string_view, const node::Caller&, Done<RulesReply>) override { std::abort(); }
  void status(const node::Caller&, Done<node::StatusReply>) override { std::abort(); }

  std::string asked;

 private:
  Reply decide(const Request& request) {
    require(!request.domain.empty() && request.domain.size() <= rpc::kMaxText);
    require(request.id.size() <= rpc::kMaxRequestId);
    require(request.descriptors() <= kMaxDescriptors);
    asked.append(request.domain).append(request.id);
    std::uint64_t all = 0;
    for (std::size_t i = 0; i < request.descriptors(); ++i) {
      const Request one = request.part(i);
      require(one.descriptor.size() <= rpc::kMaxEntries);
      for (const Entry& entry : one.descriptor) {
        require(!entry.key.empty() && entry.key.size() <= rpc::kMaxText);
        require(entry.value.size() <= rpc::kMaxText);
        asked.append(entry.key).append("=").append(entry.value);
      }
      asked += " *" + std::to_string(one.hits);
      all += one.hits;
    }
    Reply reply;
    if (all % 5 == 4) {
      reply.fail(static_cast<ErrorKind>(1 + all % 9), request.domain);
      return reply;
    }
    reply.allowed = all % 2 == 1;
    reply.deciding = 0;
    Status& status = reply.statuses.emplace_back();
    status.rule = std::string(request.domain);
    status.allowed = reply.allowed;
    status.limit = status.quota = status.remaining = all;
    status.retry_after = all % 3 == 0 ? kNever : kSecond;
    return reply;
  }
};

/// What both the test and the server's stream see.
struct Line {
  rpc::ByteStream::User* user = nullptr;
  rpc::Output out;
  std::string sent;
  bool closed = false;
  void flush() {
    sent += out.view();
    out.clear();
  }
};

class Stream final : public rpc::ByteStream {
 public:
  explicit Stream(std::shared_ptr<Line> line) : line_(std::move(line)) {}
  ~Stream() override {
    line_->flush();
    line_->closed = true;
  }
  void start(User& user) override { line_->user = &user; }
  rpc::Output& out() override { return line_->out; }
  void flush() override { line_->flush(); }
  std::size_t waiting() const override { return line_->out.size(); }
  void pause() override {}
  void resume() override {}
  void end() override {}
  std::uint64_t last_activity() const override { return 0; }

 private:
  std::shared_ptr<Line> line_;
};

class Server {
 public:
  Server() {
    uv_loop_init(&loop_);
    streams_ = std::make_unique<rpc::StreamLoop>(&loop_);
    methods_ = std::make_unique<node::GrpcMethods>(service_, [] { return kSecond; });
    server_ = std::make_unique<node::GrpcServer>(*streams_, node::GrpcServerOptions{}, *methods_,
                                                 std::make_shared<node::ConnectionBudget>(8));
    methods_->serve(*server_);
  }

  /// What a client of these bytes is answered, and what the service was asked for it.
  std::pair<std::string, std::string> ask(std::string_view bytes, std::size_t cut) {
    service_.asked.clear();
    auto line = std::make_shared<Line>();
    server_->accept(std::make_unique<Stream>(line), {});
    for (; !bytes.empty() && !line->closed; bytes.remove_prefix(std::min(cut, bytes.size()))) {
      // The callee may write over what he is given.
      std::string piece(bytes.substr(0, cut));
      line->user->on_data(piece);
      line->flush();
    }
    methods_->tell_health();
    if (!line->closed) line->user->on_end(0);
    uv_run(&loop_, UV_RUN_NOWAIT);
    require(line->closed && server_->calls() == 0 && server_->held() == 0);
    require(server_->connections() == 0);
    return {line->sent, service_.asked};
  }

 private:
  uv_loop_t loop_{};
  FakeService service_;
  std::unique_ptr<rpc::StreamLoop> streams_;
  std::unique_ptr<node::GrpcMethods> methods_;
  std::unique_ptr<node::GrpcServer> server_;
};

Server& server() {
  static auto* const server = new Server;  // to the end: libFuzzer leaves by _exit
  return *server;
}

std::string call_of(const char* path, std::string_view message) {
  GrpcSession client;
  client.greet();
  client.call(GrpcSession::head(path), framed(message));
  return client.output();
}

/// What a well-behaved client of these makes of the answer. A map's entries have no order.
std::string read(const char* path, std::string_view message, const std::string& answer) {
  GrpcSession client;
  client.greet();
  const std::int32_t call = client.call(GrpcSession::head(path), framed(message));
  client.output();
  client.input(answer);
  const node::test::GrpcAnswer& got = client.answers[call];
  return got.status() + " " + std::to_string(got.data.size());
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  crdt::test::FuzzSeeds seeds;
  if (!seeds.wanted()) return 0;
  const auto add = [&](char first, std::string_view rest) {
    const std::string bytes = first + std::string(rest);
    seeds.add(std::as_bytes(std::span(bytes)));
  };
  // RateLimitRequest and weir.v1.CheckRequest: a domain, and descriptors of an entry.
  constexpr std::string_view kEntry = "\x0a\x06\x0a\x01k\x12\x01v";
  const std::string message =
      "\x0a\x03"
      "api\x12\x08" +
      std::string(kEntry);
  for (std::size_t i = 0; i < kPaths.size(); ++i) {
    add(static_cast<char>(i), message);
    add(static_cast<char>(i), "\x0a" + std::string(1, static_cast<char>(message.size())) + message);
    add(100, call_of(kPaths[i], message).substr(kGreeting.size()));
  }
  add(101, call_of(kPaths[0], message));
  GrpcSession many;
  many.greet({{NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE, 10}});
  for (int i = 0; i < 5; ++i) {
    many.call(GrpcSession::head(kPaths[i], {{"grpc-timeout", "20m"}}), framed(message), i == 2);
  }
  many.reset(3);
  add(101, many.output());
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const std::string_view rest(reinterpret_cast<const char*>(data) + 1, size - 1);
  const std::size_t cut = 1 + size % 40;
  if (data[0] >= kPaths.size()) {
    const std::string bytes = (data[0] % 2 == 0 ? std::string(kGreeting) : "") + std::string(rest);
    server().ask(bytes, bytes.size() + 1);
    server().ask(bytes, cut);
    return 0;
  }
  const char* path = kPaths[data[0]];
  const std::string bytes = call_of(path, rest);
  const auto [whole, asked] = server().ask(bytes, bytes.size());
  const auto [pieces, asked_too] = server().ask(bytes, cut);
  require(asked == asked_too);
  require(read(path, rest, whole) == read(path, rest, pieces));
  return 0;
}
