#pragma once

#include <uv.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <weir/node/fronts/http/http_server.h>

namespace weir::node::test {

/// Answers with what it understood of a request. Requests to "/late…" are answered at
/// answer_late(), the last one first.
class EchoHandler final : public HttpServer::Handler {
 public:
  void handle(std::span<HttpExchange* const> batch) override {
    batches.push_back(batch.size());
    for (HttpExchange* exchange : batch) {
      if (exchange->path().starts_with("/late")) {
        late.push_back(exchange->id());
      } else {
        echo(*exchange);
      }
    }
  }

  void answer_late(HttpServer& server) {
    for (; !late.empty(); late.pop_back()) {
      if (HttpExchange* exchange = server.find(late.back())) echo(*exchange);
    }
  }

  static void echo(HttpExchange& exchange) {
    rpc::Output& out = exchange.begin(200, "text/plain");
    exchange.begin_body();
    fmt::format_to(std::back_inserter(out), "{} {}", exchange.method(), exchange.path());
    if (!exchange.query().empty()) fmt::format_to(std::back_inserter(out), "?{}", exchange.query());
    for (std::size_t i = 0; i < headers().size(); ++i) {
      if (exchange.header(i).data() == nullptr) continue;
      fmt::format_to(std::back_inserter(out), " {}=[{}]{}", headers()[i], exchange.header(i),
                     exchange.repeated(i) ? "+" : "");
    }
    if (!exchange.body().empty()) fmt::format_to(std::back_inserter(out), " <{}>", exchange.body());
    exchange.finish();
  }

  static std::vector<std::string> headers() { return {"content-type", "prefer", "X-Request-Id"}; }

  std::vector<std::size_t> batches;
  std::vector<std::uint64_t> late;
};

/// A server without sockets: requests go in as pieces, answers come out as text.
class PieceServer {
 public:
  PieceServer() {
    uv_loop_init(&loop_);
    HttpServerOptions options;
    options.headers = EchoHandler::headers();
    options.max_body = 2000;
    options.max_batch = 3;
    budget_ = std::make_shared<ConnectionBudget>(8);
    streams_ = std::make_unique<rpc::StreamLoop>(&loop_);
    server_ = std::make_unique<HttpServer>(*streams_, options, handler_, budget_);
  }
  ~PieceServer() {
    server_.reset();
    streams_.reset();
    while (uv_run(&loop_, UV_RUN_NOWAIT) != 0) continue;
    if (uv_loop_close(&loop_) != 0) std::abort();
  }
  PieceServer(const PieceServer&) = delete;
  PieceServer& operator=(const PieceServer&) = delete;

  struct Said {
    std::string text;     ///< all answers, without their dates and without 100 (Continue)
    bool closed = false;  ///< before the other side closed
  };

  /// Sends the pieces over a connection of their own, and closes it.
  Said ask(const std::vector<std::string_view>& pieces) {
    auto line = std::make_shared<Line>();
    server_->accept(std::make_unique<Stream>(line), {});
    for (const std::string_view piece : pieces) {
      wait_for(*line);
      if (line->closed || line->ended) break;
      // The callee may write over what he is given.
      std::string bytes(piece);
      line->user->on_data({bytes.data(), bytes.size()});
      line->flush();
    }
    wait_for(*line);
    Said said{{}, line->closed || line->ended};
    if (!line->closed) line->user->on_end(0);
    wait_for(*line);
    if (!line->closed) std::abort();  // nothing is left to be done, and it is still open
    said.text = plain(line->sent);
    return said;
  }

 private:
  // What both the test and the server's stream see.
  struct Line {
    rpc::ByteStream::User* user = nullptr;
    rpc::Output out;
    std::string sent;
    bool paused = false;
    bool ended = false;  // the server sends no more
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
    void pause() override { line_->paused = true; }
    void resume() override { line_->paused = false; }
    void end() override {
      line_->flush();
      line_->ended = true;
    }
    std::uint64_t last_activity() const override { return 0; }

   private:
    std::shared_ptr<Line> line_;
  };

  // Until everything that was asked is answered.
  void wait_for(Line& line) {
    do {
      handler_.answer_late(*server_);
      uv_run(&loop_, UV_RUN_NOWAIT);
      if (!line.closed) line.flush();
    } while (!handler_.late.empty() || (line.paused && !line.closed));
  }

  static std::string plain(std::string text) {
    constexpr std::string_view kContinue = "HTTP/1.1 100 Continue\r\n\r\n";
    for (std::size_t at; (at = text.find(kContinue)) != std::string::npos;) {
      text.erase(at, kContinue.size());
    }
    std::size_t at = 0;
    while ((at = text.find("\r\nDate: ", at)) != std::string::npos) {
      text.erase(at, text.find("\r\n", at + 2) - at);
    }
    return text;
  }

  uv_loop_t loop_{};
  std::shared_ptr<ConnectionBudget> budget_;
  std::unique_ptr<rpc::StreamLoop> streams_;
  EchoHandler handler_;
  std::unique_ptr<HttpServer> server_;
};

/// `text` cut into pieces of `size` bytes.
inline std::vector<std::string_view> pieces_of(std::string_view text, std::size_t size) {
  std::vector<std::string_view> out;
  for (; !text.empty(); text.remove_prefix(std::min(size, text.size()))) {
    out.push_back(text.substr(0, size));
  }
  return out;
}

}  // namespace weir::node::test
