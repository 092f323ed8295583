#include <weir/node/fronts/grpc/grpc_connection.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include <utility>

namespace weir::node {
namespace {

constexpr std::size_t kPrefix = 5;  // of a message: a flag and a length
/// Frames that bring nothing: so many at once, so many a second, and so many for each call that
/// completes. A client whose deadlines all pass while the node stands still resets all it has open.
constexpr double kMostCredit = 2000;
constexpr double kCreditPerSecond = 100;
constexpr double kCreditPerCall = 2;
/// Windows of a connection for what it sends: a client with several large messages under way is
/// not slowed down; what is held of them is bounded elsewhere.
constexpr std::int32_t kConnectionWindow = 1 << 20;
/// Of two tokens, either may be what somebody between has checked.
constexpr std::string_view kTwoTokens = "Bearer ";

std::string_view view(const std::uint8_t* bytes, std::size_t size) {
  return {reinterpret_cast<const char*>(bytes), size};
}

std::uint8_t* bytes_of(std::string_view text) {
  // nghttp2 only reads them.
  return reinterpret_cast<std::uint8_t*>(const_cast<char*>(text.data()));  // NOLINT
}

/// A field whose texts outlive the call; `lasting` if they outlive the session.
nghttp2_nv nv(std::string_view name, std::string_view value, bool lasting = true) {
  return {bytes_of(name), bytes_of(value), name.size(), value.size(),
          static_cast<std::uint8_t>(lasting ? NGHTTP2_NV_FLAG_NO_COPY_NAME |
                                                  NGHTTP2_NV_FLAG_NO_COPY_VALUE
                                            : NGHTTP2_NV_FLAG_NO_COPY_NAME)};
}

std::size_t length_of(const rpc::Output& prefix) {
  std::size_t size = 0;
  for (std::size_t i = 1; i < kPrefix; ++i) {
    size = size << 8 | static_cast<unsigned char>(prefix.data()[i]);
  }
  return size;
}

bool is_grpc(std::string_view content_type) {
  constexpr std::string_view kType = "application/grpc";
  if (!content_type.starts_with(kType)) return false;
  content_type.remove_prefix(kType.size());
  return content_type.empty() || content_type.front() == ';' || content_type == "+proto" ||
         content_type.starts_with("+proto;");
}

}  // namespace

/// What nghttp2 calls. It knows nothing of exceptions: want of memory ends the connection.
struct GrpcConnection::Callbacks {
  template <typename Function>
  static int guarded(Function&& function) noexcept {
    try {
      return function() ? 0 : NGHTTP2_ERR_CALLBACK_FAILURE;
    } catch (...) {
      return NGHTTP2_ERR_CALLBACK_FAILURE;
    }
  }
  static GrpcConnection& of(void* user) { return *static_cast<GrpcConnection*>(user); }
  static GrpcCall* call_of(nghttp2_session* session, std::int32_t stream) {
    return static_cast<GrpcCall*>(nghttp2_session_get_stream_user_data(session, stream));
  }

  static int begin_frame(nghttp2_session*, const nghttp2_frame_hd* frame, void* user) {
    return of(user).calm(*frame) ? 0 : NGHTTP2_ERR_CALLBACK_FAILURE;
  }
  static int begin_headers(nghttp2_session*, const nghttp2_frame* frame, void* user) {
    if (frame->headers.cat != NGHTTP2_HCAT_REQUEST) return 0;
    return guarded([&] {
      of(user).begin_call(frame->hd.stream_id);
      return true;
    });
  }
  static int header(nghttp2_session* session, const nghttp2_frame* frame, const std::uint8_t* name,
                    std::size_t name_size, const std::uint8_t* value, std::size_t value_size,
                    std::uint8_t, void* user) {
    GrpcCall* call = call_of(session, frame->hd.stream_id);
    if (call == nullptr) return 0;
    bool fits = true;
    const int result = guarded([&] {
      fits = of(user).field(*call, view(name, name_size), view(value, value_size));
      return true;
    });
    return result == 0 && !fits ? NGHTTP2_ERR_TEMPORAL_CALLBACK_FAILURE : result;
  }
  static int frame_received(nghttp2_session* session, const nghttp2_frame* frame, void* user) {
    const bool head = frame->hd.type == NGHTTP2_HEADERS;
    if (!head && frame->hd.type != NGHTTP2_DATA) return 0;
    GrpcCall* call = call_of(session, frame->hd.stream_id);
    if (call == nullptr) return 0;
    return guarded([&] {
      if (head && frame->headers.cat == NGHTTP2_HCAT_REQUEST) of(user).head_done(*call);
      if ((frame->hd.flags & NGHTTP2_FLAG_END_STREAM) != 0) of(user).ended(*call);
      return true;
    });
  }
  static int data(nghttp2_session* session, std::uint8_t, std::int32_t stream,
                  const std::uint8_t* bytes, std::size_t size, void* user) {
    GrpcCall* call = call_of(session, stream);
    if (call == nullptr) return 0;
    return guarded([&] {
      of(user).take(*call, view(bytes, size));
      return true;
    });
  }
  static int frame_sent(nghttp2_session*, const nghttp2_frame* frame, void* user) {
    of(user).sent(*frame);
    return 0;
  }
  static int stream_closed(nghttp2_session* session, std::int32_t stream, std::uint32_t error,
                           void* user) {
    if (GrpcCall* call = call_of(session, stream)) of(user).closed(*call, error);
    return 0;
  }
  static ssize_t read(nghttp2_session*, std::int32_t, std::uint8_t* to, std::size_t size,
                      std::uint32_t* flags, nghttp2_data_source* source, void* user) {
    auto& call = *static_cast<GrpcCall*>(source->ptr);
    bool last = false;
    const std::size_t count = of(user).read_answer(call, {to, size}, last);
    if (last) {
      *flags |= NGHTTP2_DATA_FLAG_EOF | NGHTTP2_DATA_FLAG_NO_END_STREAM;
      if (of(user).submit_trailer(call) != 0) return NGHTTP2_ERR_CALLBACK_FAILURE;
    } else if (count == 0) {
      return NGHTTP2_ERR_DEFERRED;
    }
    return static_cast<ssize_t>(count);
  }
};

void GrpcConnection::set_callbacks(nghttp2_session_callbacks* callbacks) {
  nghttp2_session_callbacks_set_on_begin_frame_callback(callbacks, Callbacks::begin_frame);
  nghttp2_session_callbacks_set_on_begin_headers_callback(callbacks, Callbacks::begin_headers);
  nghttp2_session_callbacks_set_on_header_callback(callbacks, Callbacks::header);
  nghttp2_session_callbacks_set_on_frame_recv_callback(callbacks, Callbacks::frame_received);
  nghttp2_session_callbacks_set_on_data_chunk_recv_callback(callbacks, Callbacks::data);
  nghttp2_session_callbacks_set_on_frame_send_callback(callbacks, Callbacks::frame_sent);
  nghttp2_session_callbacks_set_on_stream_close_callback(callbacks, Callbacks::stream_closed);
}

GrpcConnection::GrpcConnection(Server& server, std::unique_ptr<rpc::ByteStream> stream,
                               const rpc::Address& peer)
    : server_(server),
      stream_(std::move(stream)),
      peer_(peer),
      session_(server.options.access, server.options.front, peer),
      credit_(kMostCredit),
      credit_at_(server.loop.now()) {
  if (nghttp2_session_server_new2(&h2_, server.callbacks, this, server.option) != 0) {
    throw std::bad_alloc();
  }
  const auto window = static_cast<std::uint32_t>(
      std::max<std::size_t>(server.options.max_message + kPrefix, 65'535));
  const std::array<nghttp2_settings_entry, 3> settings = {
      {{NGHTTP2_SETTINGS_MAX_CONCURRENT_STREAMS, server.options.max_streams},
       {NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE, window},
       {NGHTTP2_SETTINGS_MAX_HEADER_LIST_SIZE,
        static_cast<std::uint32_t>(server.options.max_head)}}};
  nghttp2_submit_settings(h2_, NGHTTP2_FLAG_NONE, settings.data(), settings.size());
  nghttp2_session_set_local_window_size(h2_, NGHTTP2_FLAG_NONE, 0, kConnectionWindow);
}

GrpcConnection::~GrpcConnection() {
  server_.loop.forget(*this);
  nghttp2_session_del(h2_);
}

void GrpcConnection::start(GrpcConnections::iterator at, GrpcConnections& list,
                           Milliseconds go_at) {
  at_ = at;
  list_ = &list;
  since_ = server_.loop.now();
  schedule_ = &server_.young;
  scheduled_ = schedule_->emplace(go_at, this);
  server_.arm(std::min(go_at, since_ + server_.first_timeout));
  stream_->start(*this);
}

// To the end of the list: those that come later have later deadlines.
void GrpcConnection::move_to(GrpcConnections& list) {
  since_ = server_.loop.now();
  list.splice(list.end(), *list_, at_);
  list_ = &list;
}

// The object itself lives to the end of the turn, as this may be called from within its functions.
void GrpcConnection::close() {
  if (stream_ == nullptr) return;
  stream_.reset();
  while (calls_ != nullptr) closed(*calls_, NGHTTP2_CANCEL);
  if (schedule_ != nullptr) schedule_->erase(scheduled_);
  schedule_ = nullptr;
  move_to(server_.dead);
  --server_.connections;
  server_.budget->give(peer_);
  server_.loop.forget(*this);
  server_.loop.defer(server_);
}

// What a read brings

void GrpcConnection::on_data(std::span<char> bytes) {
  if (closed_at_sent_) return;
  // Known once something has arrived.
  if (!std::exchange(certificate_asked_, true)) session_.shows_certificate(stream_->peer_names());
  if (list_ == &server_.fresh) {
    move_to(server_.idle);
    server_.arm(since_ + server_.idle_timeout);
  }
  server_.batch.clear();
  server_.begun.clear();
  handling_ = true;
  const ssize_t taken = nghttp2_session_mem_recv(
      h2_, reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size());
  // Also if it failed behind them.
  hand_over();
  watch_begun();
  handling_ = false;
  if (taken >= 0) return pump();
  const bool flood = overdrawn_ || taken == NGHTTP2_ERR_FLOODED;
  ++(flood ? server_.counters.floods : server_.counters.broken);
  finish(flood ? NGHTTP2_ENHANCE_YOUR_CALM : NGHTTP2_PROTOCOL_ERROR);
}

/// False if there were too many frames that bring nothing.
bool GrpcConnection::calm(const nghttp2_frame_hd& frame) {
  const bool ends = (frame.flags & NGHTTP2_FLAG_END_STREAM) != 0;
  if (frame.type == NGHTTP2_HEADERS) return true;
  if (frame.type == NGHTTP2_DATA && (frame.length > 0 || ends)) return true;
  const Milliseconds now = server_.loop.now();
  const double since = static_cast<double>(now - std::exchange(credit_at_, now)) / 1000;
  credit_ = std::min(credit_ + since * kCreditPerSecond, kMostCredit) - 1;
  overdrawn_ = credit_ < 0;
  return !overdrawn_;
}

void GrpcConnection::begin_call(std::int32_t stream) {
  GrpcCall* call = server_.take(*this, stream);
  call->next_ = calls_;
  if (calls_ != nullptr) calls_->before_ = call;
  calls_ = call;
  nghttp2_session_set_stream_user_data(h2_, stream, call);
  server_.begun.push_back(call);
}

/// A field of a call's head, or of what follows its messages, which says nothing. False if there
/// are too many.
bool GrpcConnection::field(GrpcCall& call, std::string_view name, std::string_view value) {
  call.fields_ += name.size() + value.size() + 32;
  if (call.fields_ > server_.options.max_head) {
    ++server_.counters.refused;
    return false;
  }
  if (call.kind_ != GrpcKind::none || call.phase_ != GrpcCall::Phase::arriving) return true;
  if (name == ":path") {
    call.path_ = value;
  } else if (name == ":method") {
    call.post_ = value == "POST";
  } else if (name == "content-type") {
    call.grpc_ = is_grpc(value);
  } else if (name == "grpc-timeout") {
    Nanos timeout = 0;
    call.bad_timeout_ = !parse_grpc_timeout(value, timeout);
    // Rounded up, and within what a clock in milliseconds can be.
    call.deadline_ = server_.loop.now() +
                     static_cast<Milliseconds>(std::min(timeout, kDay) / kMillisecond) +
                     (timeout % kMillisecond != 0 ? 1 : 0);
  } else if (name == "authorization") {
    call.authorization_ = call.has_authorization_ ? kTwoTokens : value;
    call.has_authorization_ = true;
  }
  return true;
}

void GrpcConnection::head_done(GrpcCall& call) {
  std::string_view path = call.path_;
  const GrpcKind kind = server_.handler.kind_of(path);
  call.path_at_ = path;
  if (!call.post_) return refuse_http(call, "405");
  if (!call.grpc_) return refuse_http(call, "415");
  if (kind == GrpcKind::none) return refuse(call, GrpcCode::unimplemented, "unknown method");
  if (call.bad_timeout_) return refuse(call, GrpcCode::internal, "grpc-timeout is malformed");
  if (unsent_ > server_.options.connection_bytes) {
    return refuse(call, GrpcCode::resource_exhausted, "answers are not read");
  }
  call.kind_ = kind;
  if (kind != GrpcKind::unary || unary_++ > 0) return;
  move_to(server_.busy);
  server_.arm(since_ + server_.stall_timeout);
}

void GrpcConnection::take(GrpcCall& call, std::string_view bytes) {
  if (call.phase_ == GrpcCall::Phase::finished) return;
  const GrpcServerOptions& options = server_.options;
  if (held_ + bytes.size() > options.connection_bytes ||
      server_.held + bytes.size() > options.all_bytes) {
    return refuse(call, GrpcCode::resource_exhausted, "too many messages are under way");
  }
  call.in_.append(bytes);
  held_ += bytes.size();
  server_.held += bytes.size();
  if (!check_prefix(call)) return;
  if (call.kind_ == GrpcKind::streaming && whole(call)) queue(call);
}

/// Refuses the call if what has arrived of its messages cannot be the beginning of some.
bool GrpcConnection::check_prefix(GrpcCall& call) {
  if (call.in_.empty()) return true;
  if (call.in_.data()[0] == 1) {
    refuse(call, GrpcCode::unimplemented, "compressed messages are not taken");
  } else if (call.in_.data()[0] != 0) {
    refuse(call, GrpcCode::internal, "a message begins with an unknown flag");
  } else if (call.in_.size() < kPrefix) {
    return true;
  } else if (length_of(call.in_) > server_.options.max_message) {
    refuse(call, GrpcCode::resource_exhausted,
           "a message is larger than " + std::to_string(server_.options.max_message) + " bytes");
  } else if (call.kind_ == GrpcKind::unary && call.in_.size() > kPrefix + length_of(call.in_)) {
    refuse(call, GrpcCode::internal, "more than one message");
  } else {
    return true;
  }
  return false;
}

bool GrpcConnection::whole(const GrpcCall& call) const {
  return call.in_.size() >= kPrefix && call.in_.size() >= kPrefix + length_of(call.in_);
}

/// The client has said its last.
void GrpcConnection::ended(GrpcCall& call) {
  call.ended_ = true;
  if (call.phase_ == GrpcCall::Phase::finished) return;
  if (call.kind_ == GrpcKind::unary && !whole(call)) {
    return refuse(call, GrpcCode::internal,
                  call.in_.empty() ? "there is no message" : "the message is cut short");
  }
  queue(call);
}

void GrpcConnection::queue(GrpcCall& call) {
  if (!std::exchange(call.queued_, true)) server_.batch.push_back(&call);
}

/// What it is handed over with next. False if there is nothing.
bool GrpcConnection::next_message(GrpcCall& call) {
  if (call.phase_ == GrpcCall::Phase::finished) return false;
  if (call.deadline_ != 0 && call.deadline_ <= server_.loop.now()) {
    ++server_.counters.late;
    call.fail(GrpcCode::deadline_exceeded, "the deadline has passed");
    return false;
  }
  if (whole(call)) {
    call.message_ = {call.in_.data() + kPrefix, length_of(call.in_)};
    return check_prefix(call);
  }
  if (!call.ended_ || std::exchange(call.told_ended_, true)) return false;
  call.message_ = {};
  if (call.in_.empty()) return true;
  refuse(call, GrpcCode::internal, "the message is cut short");
  return false;
}

void GrpcConnection::hand_over() {
  // A streaming call comes again as long as it has messages.
  while (!server_.batch.empty()) {
    server_.round.clear();
    for (GrpcCall* call : server_.batch) {
      call->queued_ = false;
      if (next_message(*call)) server_.round.push_back(call);
    }
    server_.batch.clear();
    if (server_.round.empty()) return;
    server_.counters.calls += server_.round.size();
    bool failed = false;
    try {
      server_.handler.handle(server_.round);
    } catch (...) {
      failed = true;
      ++server_.counters.failed;
    }
    for (GrpcCall* call : server_.round) {
      if (failed) call->fail(GrpcCode::internal, "the call could not be handled");
      handled(*call);
    }
  }
}

void GrpcConnection::handled(GrpcCall& call) {
  const bool ended = call.message_.data() == nullptr;
  call.message_ = {};
  if (call.kind_ == GrpcKind::unary) {
    give_back(call, call.in_.size());
    if (call.phase_ == GrpcCall::Phase::finished) return;
    call.phase_ = GrpcCall::Phase::asked;
    const Milliseconds most = server_.loop.now() + server_.answer_timeout;
    server_.set_due(call, call.deadline_ == 0 ? most : std::min(most, call.deadline_));
    return;
  }
  if (ended) return;
  give_back(call, kPrefix + length_of(call.in_));
  if (call.phase_ == GrpcCall::Phase::finished) return;
  if (check_prefix(call) && (whole(call) || call.ended_)) queue(call);
}

/// The first bytes of its messages are done with.
void GrpcConnection::give_back(GrpcCall& call, std::size_t bytes) {
  call.in_.drop_front(bytes);
  held_ -= bytes;
  server_.held -= bytes;
}

/// Calls that have begun and whose message is not there yet.
void GrpcConnection::watch_begun() {
  for (GrpcCall* call : server_.begun) {
    if (call->connection_ != this || call->has_due_) continue;
    const bool finished = call->phase_ == GrpcCall::Phase::finished;
    if (finished || (call->kind_ == GrpcKind::streaming && call->deadline_ == 0)) continue;
    const Milliseconds most = call->kind_ == GrpcKind::streaming
                                  ? ~Milliseconds{0}
                                  : server_.loop.now() + server_.message_timeout;
    server_.set_due(*call, call->deadline_ == 0 ? most : std::min(most, call->deadline_));
  }
}

void GrpcConnection::time_out(GrpcCall& call) {
  ++server_.counters.late;
  const bool arriving = call.kind_ == GrpcKind::unary && call.phase_ == GrpcCall::Phase::arriving;
  call.fail(GrpcCode::deadline_exceeded,
            arriving ? "the message did not arrive in time" : "there was no answer in time");
}

/// Is no valid call.
void GrpcConnection::refuse(GrpcCall& call, GrpcCode code, std::string_view text) {
  ++server_.counters.refused;
  call.fail(code, text);
}

void GrpcConnection::refuse_http(GrpcCall& call, const char* status) {
  ++server_.counters.refused;
  call.phase_ = GrpcCall::Phase::finished;
  call.answering_ = true;
  const nghttp2_nv head = nv(":status", status);
  nghttp2_submit_response(h2_, call.stream_, &head, 1, nullptr);
}

// Answers

/// There is more of its answer.
void GrpcConnection::submit(GrpcCall& call) {
  if (!std::exchange(call.answering_, true)) {
    submit_head(call);
  } else {
    nghttp2_session_resume_data(h2_, call.stream_);
  }
  if (!handling_) server_.loop.defer(*this);
}

void GrpcConnection::submit_head(GrpcCall& call) {
  const nghttp2_nv status = nv(":status", "200");
  const nghttp2_nv type = nv("content-type", "application/grpc");
  if (call.phase_ != GrpcCall::Phase::finished || !call.out_.empty()) {
    const std::array<nghttp2_nv, 2> head = {status, type};
    nghttp2_data_provider provider{};
    provider.source.ptr = &call;
    provider.read_callback = Callbacks::read;
    nghttp2_submit_response(h2_, call.stream_, head.data(), head.size(), &provider);
    return;
  }
  const std::string code = std::to_string(static_cast<int>(call.code_));
  const std::string text = grpc_message(call.text_);
  const std::array<nghttp2_nv, 5> head = {status, type, nv("grpc-accept-encoding", "identity"),
                                          nv("grpc-status", code, false),
                                          nv("grpc-message", text, false)};
  nghttp2_submit_response(h2_, call.stream_, head.data(), head.size(), nullptr);
}

int GrpcConnection::submit_trailer(GrpcCall& call) {
  if (call.code_ == GrpcCode::ok) {
    const nghttp2_nv status = nv("grpc-status", "0");
    return nghttp2_submit_trailer(h2_, call.stream_, &status, 1);
  }
  const std::string code = std::to_string(static_cast<int>(call.code_));
  const std::string text = grpc_message(call.text_);
  const std::array<nghttp2_nv, 2> trailer = {nv("grpc-status", code, false),
                                             nv("grpc-message", text, false)};
  return nghttp2_submit_trailer(h2_, call.stream_, trailer.data(), trailer.size());
}

/// Fills `to` with what comes next. `last`: that was all there will be.
std::size_t GrpcConnection::read_answer(GrpcCall& call, std::span<std::uint8_t> to, bool& last) {
  const std::size_t count = std::min(to.size(), call.out_.size() - call.sent_);
  if (count > 0) std::memcpy(to.data(), call.out_.data() + call.sent_, count);
  call.sent_ += count;
  call.whole_ -= count;
  unsent_ -= count;
  const bool all = call.sent_ == call.out_.size();
  last = all && call.phase_ == GrpcCall::Phase::finished;
  if (all) {
    call.out_.clear();
    call.sent_ = 0;
  }
  return count;
}

void GrpcConnection::sent(const nghttp2_frame& frame) {
  if (frame.hd.type == NGHTTP2_RST_STREAM) {
    // A client may provoke them as well as send them.
    credit_ -= 1;
  } else if (frame.hd.type == NGHTTP2_HEADERS && (frame.hd.flags & NGHTTP2_FLAG_END_STREAM) != 0) {
    // It is answered already: the rest of the call is not wanted.
    const GrpcCall* call = Callbacks::call_of(h2_, frame.hd.stream_id);
    if (call == nullptr || call->ended_) return;
    nghttp2_submit_rst_stream(h2_, NGHTTP2_FLAG_NONE, frame.hd.stream_id, NGHTTP2_NO_ERROR);
  }
}

void GrpcConnection::closed(GrpcCall& call, std::uint32_t error) {
  const bool completed = call.phase_ == GrpcCall::Phase::finished && error == NGHTTP2_NO_ERROR;
  const bool unary = call.kind_ == GrpcKind::unary;
  nghttp2_session_set_stream_user_data(h2_, call.stream_, nullptr);
  std::erase(server_.batch, &call);
  (call.before_ == nullptr ? calls_ : call.before_->next_) = call.next_;
  if (call.next_ != nullptr) call.next_->before_ = call.before_;
  held_ -= call.in_.size();
  server_.held -= call.in_.size();
  unsent_ -= call.whole_;
  server_.release(call);
  if (unary) --unary_;
  if (completed) credit_ = std::min(credit_ + kCreditPerCall, kMostCredit);
  if (!unary || stream_ == nullptr || (!completed && unary_ > 0)) return;
  move_to(unary_ > 0 ? server_.busy : server_.idle);
  if (unary_ == 0) server_.arm(since_ + server_.idle_timeout);
}

// What goes out

void GrpcConnection::pump() {
  if (stream_ == nullptr || blocked_ || closed_at_sent_) return;
  const std::size_t most = server_.options.max_waiting;
  for (;;) {
    if (stream_->waiting() > most) stream_->flush();
    if (stream_->waiting() > most) {
      blocked_ = true;
      return stream_->pause();
    }
    const std::uint8_t* bytes = nullptr;
    const ssize_t size = nghttp2_session_mem_send(h2_, &bytes);
    if (size < 0) return close();
    if (size == 0) break;
    stream_->out().append(view(bytes, static_cast<std::size_t>(size)));
  }
  if (nghttp2_session_want_read(h2_) == 0 && nghttp2_session_want_write(h2_) == 0)
    close_when_sent();
}

void GrpcConnection::run_deferred() noexcept {
  pump();
  if (stream_ != nullptr) stream_->flush();
}

void GrpcConnection::on_sent() {
  if (closed_at_sent_) return close();
  if (!std::exchange(blocked_, false)) return;
  stream_->resume();
  run_deferred();
}

void GrpcConnection::on_end(int) {
  // A client that has closed its half does not wait for answers.
  close();
}

void GrpcConnection::finish(std::uint32_t error) {
  if (stream_ == nullptr || closed_at_sent_) return;
  nghttp2_session_terminate_session(h2_, error);
  pump();
  if (stream_ != nullptr && !blocked_) close_when_sent();
}

// Whoever does not take what is left either has had his time twice.
void GrpcConnection::time_out() {
  if (std::exchange(timed_out_, true)) return close();
  finish(NGHTTP2_NO_ERROR);
  if (stream_ != nullptr) move_to(*list_);
}

void GrpcConnection::close_when_sent() {
  if (stream_ == nullptr || closed_at_sent_) return;
  stream_->flush();
  if (stream_->waiting() == 0) return close();
  closed_at_sent_ = true;
  stream_->pause();
}

void GrpcConnection::go() {
  schedule_->erase(scheduled_);
  schedule_ = nullptr;
  if (stage_ == Stage::leaving) return close();
  Milliseconds next = server_.loop.now();
  if (stage_ == Stage::serving) {
    stage_ = Stage::told_to_go;
    nghttp2_submit_shutdown_notice(h2_);
    next += server_.last_word;
  } else {
    stage_ = Stage::leaving;
    nghttp2_submit_goaway(h2_, NGHTTP2_FLAG_NONE, nghttp2_session_get_last_proc_stream_id(h2_),
                          NGHTTP2_NO_ERROR, nullptr, 0);
    next += server_.grace;
    for (GrpcCall* call = calls_; call != nullptr; call = call->next_) {
      if (call->kind_ == GrpcKind::streaming) {
        call->fail(GrpcCode::unavailable, "this connection ends: ask again on another");
      }
    }
  }
  schedule_ = &server_.going;
  scheduled_ = schedule_->emplace(next, this);
  server_.arm(next);
  run_deferred();
}

}  // namespace weir::node
