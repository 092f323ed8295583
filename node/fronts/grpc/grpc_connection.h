#pragma once

// What grpc_server.cc, grpc_connection.cc and grpc_call.cc share.

#include <nghttp2/nghttp2.h>
#include <uv.h>

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include <weir/node/access/session.h>
#include <weir/node/fronts/grpc/grpc_server.h>

namespace weir::node {

/// A grpc-timeout: 1 to 8 digits and a unit. False if it is none.
bool parse_grpc_timeout(std::string_view text, Nanos& out);
/// As grpc-message: bytes that are not printable ASCII, and '%', as %XX; at most 1 KiB of it.
std::string grpc_message(std::string_view text);

// A list says what a connection is doing. Each is in the order of the deadlines of those in it.
using GrpcConnections = std::list<std::unique_ptr<GrpcConnection>>;
using Milliseconds = std::uint64_t;  // of StreamLoop::now()

struct GrpcServer::Impl final : rpc::Deferred {
  Impl(rpc::StreamLoop& stream_loop, GrpcServerOptions server_options, Handler& server_handler,
       std::shared_ptr<ConnectionBudget> server_budget);
  ~Impl();

  void accept(std::unique_ptr<rpc::ByteStream> stream, const rpc::Address& peer);
  bool take(const rpc::Address& peer);
  bool make_room(const rpc::Address* of);
  void drain();
  void stop();

  GrpcCall* take(GrpcConnection& connection, std::int32_t stream);
  void release(GrpcCall& call);
  void set_due(GrpcCall& call, Milliseconds at);
  void clear_due(GrpcCall& call);

  void arm(Milliseconds at);
  void on_timer();
  void expire_calls(Milliseconds now);
  void expire_connections(Milliseconds now);
  Milliseconds next_deadline();
  void run_deferred() noexcept override { dead.clear(); }

  rpc::StreamLoop& loop;
  const GrpcServerOptions options;
  Handler& handler;
  const std::shared_ptr<ConnectionBudget> budget;
  const Milliseconds first_timeout, message_timeout, answer_timeout, idle_timeout, stall_timeout,
      max_age, last_word, grace, evict_after;
  nghttp2_session_callbacks* callbacks = nullptr;
  nghttp2_option* option = nullptr;

  GrpcConnections fresh;  // nothing was said yet; the longest idle first
  GrpcConnections idle;   // no unary call is open
  GrpcConnections busy;   // some is; the one of which none completed for longest first
  GrpcConnections dead;   // closed: destroyed at the end of the turn
  std::multimap<Milliseconds, GrpcConnection*> young;  // when each is told to go
  std::multimap<Milliseconds, GrpcConnection*> going;  // those told so: when it is their next step
  std::multimap<Milliseconds, GrpcCall*> calls_due;    // those that wait for something

  std::vector<std::unique_ptr<GrpcCall>> calls;
  std::vector<std::uint32_t> free_calls;
  std::uint64_t serial = 0;
  std::vector<GrpcCall*> begun;  // in the read that is being taken
  std::vector<GrpcCall*> batch;  // to be handed over
  std::vector<GrpcCall*> round;  // being handed over

  uv_timer_t* timer;  // freed by libuv's close callback
  Milliseconds armed = ~Milliseconds{0};
  std::size_t connections = 0;
  std::size_t held = 0;
  bool draining = false;
  bool stopped = false;
  Counters counters;
};

// One connection. The way of a call: nghttp2's callbacks fill it from what one read brought
// (begin_call, field, head_done, take, ended), hand_over() gives all that are complete to the
// handler, the answers go back to nghttp2 (submit), and pump() takes from it what is to be sent.
class GrpcConnection final : public rpc::ByteStream::User, public rpc::Deferred {
 public:
  using Server = GrpcServer::Impl;

  GrpcConnection(Server& server, std::unique_ptr<rpc::ByteStream> stream, const rpc::Address& peer);
  ~GrpcConnection();

  void on_data(std::span<char> bytes) override;
  void on_end(int error) override;
  void on_sent() override;
  void run_deferred() noexcept override;

  void start(GrpcConnections::iterator at, GrpcConnections& list, Milliseconds go_at);
  void close();
  /// No further call is taken, and it closes once all is sent.
  void finish(std::uint32_t error);
  /// The next step on its way out: it is told to go, takes nothing further, is closed.
  void go();
  void time_out(GrpcCall& call);
  /// It was idle, or stalled, for too long.
  void time_out();

  // For the calls.
  Server& server() { return server_; }
  Session& session() { return session_; }
  void submit(GrpcCall& call);
  void refuse(GrpcCall& call, GrpcCode code, std::string_view text);
  /// Bytes of answers, more of which wait here, or less.
  void unsent_more(std::size_t bytes) { unsent_ += bytes; }
  void unsent_less(std::size_t bytes) { unsent_ -= bytes; }

  const rpc::Address& peer() const { return peer_; }
  Milliseconds since() const { return since_; }  // of its place in a list

  /// nghttp2's callbacks that lead here.
  static void set_callbacks(nghttp2_session_callbacks* callbacks);

 private:
  enum class Stage : std::uint8_t { serving, told_to_go, leaving };
  struct Callbacks;

  // From nghttp2's callbacks.
  bool calm(const nghttp2_frame_hd& frame);
  void begin_call(std::int32_t stream);
  bool field(GrpcCall& call, std::string_view name, std::string_view value);
  void head_done(GrpcCall& call);
  void take(GrpcCall& call, std::string_view bytes);
  void ended(GrpcCall& call);
  void sent(const nghttp2_frame& frame);
  void closed(GrpcCall& call, std::uint32_t error);
  std::size_t read_answer(GrpcCall& call, std::span<std::uint8_t> to, bool& last);

  void refuse_http(GrpcCall& call, const char* status);
  bool check_prefix(GrpcCall& call);
  bool whole(const GrpcCall& call) const;
  bool next_message(GrpcCall& call);
  void queue(GrpcCall& call);
  void hand_over();
  void handled(GrpcCall& call);
  void give_back(GrpcCall& call, std::size_t bytes);
  void watch_begun();
  void submit_head(GrpcCall& call);
  int submit_trailer(GrpcCall& call);
  void pump();
  void close_when_sent();
  void move_to(GrpcConnections& list);

  Server& server_;
  std::unique_ptr<rpc::ByteStream> stream_;  // null: closed
  const rpc::Address peer_;
  Session session_;
  nghttp2_session* h2_ = nullptr;
  GrpcConnections* list_ = nullptr;
  GrpcConnections::iterator at_;
  Milliseconds since_ = 0;
  std::multimap<Milliseconds, GrpcConnection*>* schedule_ = nullptr;
  std::multimap<Milliseconds, GrpcConnection*>::iterator scheduled_;
  GrpcCall* calls_ = nullptr;  // open, the last one first
  std::size_t unary_ = 0;      // of them
  std::size_t held_ = 0;       // bytes of their messages
  std::size_t unsent_ = 0;     // bytes of their answers that nghttp2 has not taken
  double credit_ = 0;          // frames that may bring nothing
  Milliseconds credit_at_ = 0;
  Stage stage_ = Stage::serving;
  bool certificate_asked_ = false;
  bool handling_ = false;  // a read is being taken, which ends with pump()
  bool overdrawn_ = false;
  bool blocked_ = false;  // too much waits to be sent
  bool closed_at_sent_ = false;
  bool timed_out_ = false;
};

}  // namespace weir::node
