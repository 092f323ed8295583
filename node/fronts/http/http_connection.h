#pragma once

// What http_server.cc, http_connection.cc and http_exchange.cc share.

#include <uv.h>

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <weir/node/access/session.h>
#include <weir/node/fronts/http/http_server.h>
#include <weir/node/fronts/http/http_status.h>

namespace weir::node {

using Milliseconds = std::uint64_t;  // of StreamLoop::now()

inline constexpr std::string_view kHttpProblemType = "application/problem+json";

/// Those names, and Authorization behind them.
std::vector<std::string> with_authorization(std::vector<std::string> names);
/// The status line.
void append_http_status(rpc::Output& out, unsigned status);

// A list says what a connection is doing. Each is in the order of the deadlines of those in it: a
// list's connections all wait for equally long.
using Connections = std::list<std::unique_ptr<HttpConnection>>;

struct HttpServer::Impl final : rpc::Deferred {
  Impl(rpc::StreamLoop& stream_loop, HttpServerOptions server_options, Handler& server_handler,
       std::shared_ptr<ConnectionBudget> server_budget);

  void accept(std::unique_ptr<rpc::ByteStream> stream, const rpc::Address& peer);
  bool make_room(const rpc::Address* of);
  bool take(const rpc::Address& peer);
  void stop();

  HttpExchange* take(HttpConnection& connection);
  void release(HttpExchange& exchange);
  std::string_view date();

  void arm(Milliseconds at);
  void on_timer();
  void expire(Milliseconds now);
  void drain_some();
  Milliseconds next_deadline();
  void run_deferred() noexcept override { dead.clear(); }
  template <typename Function>
  void each_idle_list(Function&& function) {
    for (Connections* list : {&fresh, &kept, &draining_kept}) function(*list);
  }

  rpc::StreamLoop& loop;
  const HttpServerOptions options;
  const std::size_t authorization;  // of the names
  const HttpNames names;
  Handler& handler;
  const std::shared_ptr<ConnectionBudget> budget;
  const std::size_t max_batch;
  const Milliseconds idle_timeout, header_timeout, answer_timeout, linger_timeout, evict_after;

  Connections fresh;          // no request has completed yet; the longest idle first
  Connections kept;           // the same for those that completed one
  Connections draining_kept;  // the same for those in the midst of something when drain() came
  Connections waiting;        // for the handler
  Connections lingering;      // refused, until the other side closes
  Connections dead;           // closed: destroyed at the end of the turn
  std::list<HttpConnection*> heads;  // those of which a part of a head has arrived

  std::vector<std::unique_ptr<HttpExchange>> exchanges;
  std::vector<std::uint32_t> free_exchanges;
  std::uint64_t serial = 0;
  std::vector<HttpExchange*> batch;  // being collected or handled

  std::string date_text;
  Milliseconds date_until = 0;
  uv_timer_t* timer;  // freed by libuv's close callback
  Milliseconds armed = ~Milliseconds{0};
  std::size_t connections = 0;
  bool draining = false;
  bool stopped = false;
  Counters counters;
};

// One connection. Its requests' way: on_data → consume → collect (parses; each complete request
// becomes an exchange) → hand_over (the handler answers, or does not yet) → back to consume.
class HttpConnection final : public rpc::ByteStream::User, public rpc::Deferred {
 public:
  using Server = HttpServer::Impl;

  HttpConnection(Server& server, std::unique_ptr<rpc::ByteStream> stream, const rpc::Address& peer)
      : server_(server),
        stream_(std::move(stream)),
        peer_(peer),
        session_(server.options.access, server.options.front, peer),
        decoder_(0) {}
  ~HttpConnection();

  void on_data(std::span<char> bytes) override;
  void on_end(int error) override;
  void on_sent() override;
  void run_deferred() noexcept override { go_on(); }

  void start(Connections::iterator at, Connections& list);
  void close();
  void time_out_head();
  void answer_all(unsigned status, std::string_view detail);
  void drain();

  // For the exchanges.
  bool begin(HttpExchange& exchange);
  void answered();
  void append_head(rpc::Output& out, unsigned status, std::string_view content_type, bool last,
                   bool old);
  rpc::Output& out() { return stream_->out(); }
  Server& server() { return server_; }
  const rpc::Address& peer() const { return peer_; }
  std::string_view host() const { return session_.address(); }
  Session& session();
  void end_writing() { writing_ = false; }

  bool unread() const { return stream_ != nullptr && stream_->unread(); }
  Milliseconds since() const { return since_; }  // of its place in a list
  Milliseconds head_since() const { return head_since_; }

 private:
  enum class Phase : std::uint8_t { head, body, chunks };

  void consume(std::span<char> data, bool borrowed);
  bool collect(std::span<char> data, std::size_t& at);
  HttpExchange* next_request(std::span<char> data, std::size_t& at);
  HttpExchange* parse(std::span<char> rest);
  HttpError begin_body(const HttpHead& head);
  void hand_over();
  void take_back();
  void keep(std::span<char> data, std::size_t begin, std::size_t at, bool borrowed);
  void go_on();
  void settle(bool left_over);
  void enter_heads();
  void leave_heads();
  bool room();
  void wait();
  void completed();
  void refuse();
  void linger();
  void close_when_sent();
  void move_to(Connections& list);

  Server& server_;
  std::unique_ptr<rpc::ByteStream> stream_;  // null: closed
  const rpc::Address peer_;
  Session session_;
  bool certificate_asked_ = false;
  Connections* list_ = nullptr;
  Connections::iterator at_;
  std::list<HttpConnection*>::iterator head_at_;
  Milliseconds since_ = 0;
  Milliseconds head_since_ = 0;

  HttpExchange* first_ = nullptr;  // not answered, or not in its turn; the oldest
  HttpExchange* tail_ = nullptr;
  rpc::Output in_;         // what has arrived and is not done with; most often nothing
  std::size_t in_at_ = 0;  // where in it the next request begins

  // The request that is arriving; places are relative to its first byte.
  HeadScanner scanner_;
  ChunkDecoder decoder_;
  std::size_t size_ = 0;   // its head and body, or with chunks its head
  std::size_t raw_ = 0;    // chunks: looked at so far
  std::size_t plain_ = 0;  // chunks: end of what is decoded
  HttpError error_;        // it can't be served
  Phase phase_ = Phase::head;
  bool skipped_line_ = false;  // an empty line before it
  bool wants_continue_ = false;

  bool in_heads_ = false;
  bool handling_ = false;  // the handler is being called
  bool writing_ = false;   // an answer is being written into out()
  bool closing_ = false;   // after the last answer
  bool closed_at_sent_ = false;
  bool blocked_ = false;  // too much waits to be sent
  bool ended_ = false;    // the other side sends no more
  std::size_t discarded_ = 0;
};

}  // namespace weir::node
