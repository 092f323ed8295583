#include <weir/node/fronts/http/http_server.h>

#include <unistd.h>
#include <uv.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <ctime>
#include <exception>
#include <functional>
#include <list>
#include <utility>

#include <fmt/format.h>

namespace weir::node {
namespace {

// After a refusal so much is read and thrown away, so that the client gets to read the answer.
constexpr std::size_t kMaxDiscarded = 1u << 20;
// Connections that drain() looks at in one turn.
constexpr int kDrainsPerTurn = 256;
// An exchange's id: where it stands among all, and how many there were before it.
constexpr unsigned kSlotBits = 22;
constexpr std::uint64_t kSlotMask = (1u << kSlotBits) - 1;

constexpr std::string_view kProblemType = "application/problem+json";
constexpr HttpError kSlowHead = {408, "The head did not arrive in time."};

using Milliseconds = std::uint64_t;  // of StreamLoop::now()

Milliseconds milliseconds(Nanos length) {
  return static_cast<Milliseconds>((std::max<Nanos>(length, 0) + kMillisecond - 1) / kMillisecond);
}

std::string_view reason(unsigned status) {
  switch (status) {
    case 200:
      return "OK";
    case 201:
      return "Created";
    case 202:
      return "Accepted";
    case 204:
      return "No Content";
    case 304:
      return "Not Modified";
    case 400:
      return "Bad Request";
    case 401:
      return "Unauthorized";
    case 403:
      return "Forbidden";
    case 404:
      return "Not Found";
    case 405:
      return "Method Not Allowed";
    case 406:
      return "Not Acceptable";
    case 408:
      return "Request Timeout";
    case 409:
      return "Conflict";
    case 412:
      return "Precondition Failed";
    case 413:
      return "Content Too Large";
    case 414:
      return "URI Too Long";
    case 415:
      return "Unsupported Media Type";
    case 417:
      return "Expectation Failed";
    case 422:
      return "Unprocessable Content";
    case 428:
      return "Precondition Required";
    case 429:
      return "Too Many Requests";
    case 431:
      return "Request Header Fields Too Large";
    case 500:
      return "Internal Server Error";
    case 501:
      return "Not Implemented";
    case 502:
      return "Bad Gateway";
    case 503:
      return "Service Unavailable";
    case 504:
      return "Gateway Timeout";
    case 505:
      return "HTTP Version Not Supported";
    default:
      return "Status";
  }
}

bool has_body(unsigned status) {
  return status >= 200 && status != 204 && status != 304;
}

void append_status(rpc::Output& out, unsigned status) {
  if (status == 200) return out.append("HTTP/1.1 200 OK\r\n");
  out.append("HTTP/1.1 ");
  out.append_decimal(status);
  out.push_back(' ');
  out.append(reason(status));
  out.append("\r\n");
}

// The Date field, as a line.
std::string date_line(std::time_t now) {
  constexpr const char* kDays[] = {"Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat"};
  constexpr const char* kMonths[] = {"Jan", "Feb", "Mar", "Apr", "May", "Jun",
                                     "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"};
  std::tm utc{};
  gmtime_r(&now, &utc);
  return fmt::format("Date: {}, {:02} {} {} {:02}:{:02}:{:02} GMT\r\n", kDays[utc.tm_wday],
                     utc.tm_mday, kMonths[utc.tm_mon], utc.tm_year + 1900, utc.tm_hour, utc.tm_min,
                     utc.tm_sec);
}

}  // namespace

// A list says what a connection is doing. Each is in the order of the deadlines of those in it: a
// list's connections all wait for equally long.
using Connections = std::list<std::unique_ptr<HttpConnection>>;

struct HttpServer::Impl final : rpc::Deferred {
  Impl(rpc::StreamLoop& stream_loop, HttpServerOptions server_options, Handler& server_handler,
       std::shared_ptr<ConnectionBudget> server_budget);

  void accept(std::unique_ptr<rpc::ByteStream> stream, const rpc::Address& peer);
  bool make_room();
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
      : server_(server), stream_(std::move(stream)), peer_(peer), decoder_(0) {}
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
  void end_writing() { writing_ = false; }

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
  rpc::Address peer_;
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
  bool completed_ = false;
  bool closing_ = false;  // after the last answer
  bool closed_at_sent_ = false;
  bool blocked_ = false;  // too much waits to be sent
  bool ended_ = false;    // the other side sends no more
  std::size_t discarded_ = 0;
};

HttpConnection::~HttpConnection() {
  server_.loop.forget(*this);
}

void HttpConnection::start(Connections::iterator at, Connections& list) {
  at_ = at;
  list_ = &list;
  since_ = server_.loop.now();
  server_.arm(since_ + server_.idle_timeout);
  stream_->start(*this);
}

// To the end of the list: those that come later have later deadlines.
void HttpConnection::move_to(Connections& list) {
  since_ = server_.loop.now();
  list.splice(list.end(), *list_, at_);
  list_ = &list;
}

// The object itself lives to the end of the turn, as this may be called from within its functions.
void HttpConnection::close() {
  if (stream_ == nullptr) return;
  stream_.reset();
  while (first_ != nullptr) server_.release(*std::exchange(first_, first_->next_));
  leave_heads();
  in_ = {};
  move_to(server_.dead);
  --server_.connections;
  server_.budget->give();
  server_.loop.forget(*this);
  server_.loop.defer(server_);
}

void HttpConnection::on_data(std::span<char> bytes) {
  if (list_ == &server_.lingering) {
    discarded_ += bytes.size();
    if (discarded_ > kMaxDiscarded) close();
    return;
  }
  // Whole requests are served where they were read. Only what is left is copied.
  if (in_.empty()) return consume(bytes, true);
  in_.append({bytes.data(), bytes.size()});
  consume({in_.data(), in_.size()}, false);
}

void HttpConnection::consume(std::span<char> data, bool borrowed) {
  std::size_t at = borrowed ? 0 : in_at_;
  for (bool full = true; full;) {
    const std::size_t begin = at;
    full = collect(data, at);
    if (!server_.batch.empty()) hand_over();
    if (stream_ == nullptr) return;
    if (first_ != nullptr) {
      keep(data, begin, at, borrowed);
      return wait();
    }
    if (closing_ || error_) break;
    if (full && !room()) {
      blocked_ = true;
      stream_->pause();
      break;
    }
  }
  const bool left_over = at < data.size();
  keep(data, at, at, borrowed);
  settle(left_over);
}

// After everything that could be answered was answered.
void HttpConnection::settle(bool left_over) {
  if (closing_) return left_over ? linger() : close_when_sent();
  if (error_) return refuse();
  if (blocked_) return;
  if (ended_) return close_when_sent();
  // Only if the client still waits for it.
  if (wants_continue_ && phase_ != Phase::head && in_.size() == scanner_.end()) {
    stream_->out().append("HTTP/1.1 100 Continue\r\n\r\n");
  }
  wants_continue_ = false;
  if (phase_ == Phase::head && !in_.empty()) enter_heads();
}

// Keeps what begins at `begin`: requests that are being answered, and what follows from `at` on.
void HttpConnection::keep(std::span<char> data, std::size_t begin, std::size_t at, bool borrowed) {
  std::size_t end = data.size();
  if (phase_ == Phase::chunks) {
    end = at + plain_;
    raw_ = plain_;
  }
  if (!borrowed) {
    in_.truncate(end);
    in_at_ = at;
    if (first_ == nullptr) {
      in_.drop_front(at);
      in_at_ = 0;
      if (in_.empty()) in_ = {};
    }
    return;
  }
  if (begin == end) return;
  const std::string_view kept{data.data() + begin, end - begin};
  in_.append(kept);
  in_at_ = at - begin;
  for (HttpExchange* e = first_; e != nullptr; e = e->next_) e->rebase(kept, in_.data());
}

// Puts the requests of `data` from `at` on into the batch, and moves `at` behind them. True if the
// batch is full.
bool HttpConnection::collect(std::span<char> data, std::size_t& at) {
  std::vector<HttpExchange*>& batch = server_.batch;
  batch.clear();
  while (!closing_) {
    if (batch.size() >= server_.max_batch) return true;
    HttpExchange* exchange = next_request(data, at);
    if (exchange == nullptr) return false;
    (first_ == nullptr ? first_ : tail_->next_) = exchange;
    tail_ = exchange;
    batch.push_back(exchange);
    closing_ = !exchange->head_.keep_alive;
  }
  return false;
}

// Null if it has not arrived, or can't be served: then there is an error_.
HttpExchange* HttpConnection::next_request(std::span<char> data, std::size_t& at) {
  std::span<char> rest = data.subspan(at);
  HttpExchange* exchange = nullptr;
  if (error_) return nullptr;
  if (phase_ == Phase::head) {
    if (!skipped_line_ && !rest.empty() && rest[0] == '\r') {
      if (rest.size() == 1) return nullptr;
      skipped_line_ = rest[1] == '\n';
      at += skipped_line_ ? 2 : 0;
      rest = data.subspan(at);
    }
    error_ = scanner_.scan({rest.data(), rest.size()});
    if (error_ || scanner_.end() == 0) return nullptr;
    leave_heads();
    exchange = parse(rest);
    if (exchange == nullptr) return nullptr;
    error_ = begin_body(exchange->head_);
  }
  bool complete = rest.size() >= size_;
  if (phase_ == Phase::chunks && !error_) {
    error_ = decoder_.decode(rest, raw_, plain_);
    complete = decoder_.done();
  }
  if (error_ || !complete) {
    if (exchange != nullptr) server_.release(*exchange);
    return nullptr;
  }
  if (exchange == nullptr) exchange = parse(rest);
  const std::size_t head = scanner_.end();
  const bool chunks = phase_ == Phase::chunks;
  exchange->body_ = {rest.data() + head, (chunks ? plain_ : size_) - head};
  at += chunks ? raw_ : size_;
  scanner_ = {};
  phase_ = Phase::head;
  skipped_line_ = wants_continue_ = false;
  return exchange;
}

HttpExchange* HttpConnection::parse(std::span<char> rest) {
  HttpExchange* exchange = server_.take(*this);
  exchange->head_text_ = {rest.data(), scanner_.end()};
  error_ = parse_head(exchange->head_text_, server_.names, exchange->head_);
  if (!error_) return exchange;
  server_.release(*exchange);
  return nullptr;
}

HttpError HttpConnection::begin_body(const HttpHead& head) {
  const std::uint64_t length = head.content_length.value_or(0);
  if (length > server_.options.max_body) return {413, "The body is too large."};
  size_ = scanner_.end() + static_cast<std::size_t>(length);
  phase_ = Phase::body;
  if (head.chunked) {
    phase_ = Phase::chunks;
    decoder_ = ChunkDecoder(server_.options.max_body);
    raw_ = plain_ = size_;
  }
  wants_continue_ = head.expect_continue;
  return {};
}

void HttpConnection::hand_over() {
  server_.batch.back()->last_ = true;
  server_.counters.requests += server_.batch.size();
  handling_ = true;
  bool failed = false;
  try {
    server_.handler.handle(server_.batch);
  } catch (...) {
    failed = true;
  }
  take_back();
  if (failed) {
    ++server_.counters.failed;
    answer_all(500, "The request could not be handled.");
  }
  handling_ = false;
  if (first_ == nullptr) completed();
}

// Drops answers that the handler began and did not finish.
void HttpConnection::take_back() {
  for (HttpExchange* e = first_; e != nullptr; e = e->next_) {
    if (e->out_ != nullptr) e->out_->truncate(e->begin_);
    e->out_ = nullptr;
  }
  writing_ = false;
}

void HttpConnection::answer_all(unsigned status, std::string_view detail) {
  // An answer ends the exchange: the next one is read before.
  for (HttpExchange* e = first_; e != nullptr;) {
    HttpExchange* next = e->next_;
    if (!e->answered_) e->respond_problem(status, reason(status), detail);
    e = next;
  }
}

void HttpConnection::completed() {
  completed_ = true;
  if (server_.draining) closing_ = true;
  move_to(server_.draining ? server_.draining_kept : server_.kept);
  server_.arm(since_ + server_.idle_timeout);
}

void HttpConnection::wait() {
  stream_->pause();
  if (list_ == &server_.waiting) return;
  move_to(server_.waiting);
  server_.arm(since_ + server_.answer_timeout);
}

// The last of a batch was answered after the handler's call.
void HttpConnection::go_on() {
  if (stream_ == nullptr || first_ != nullptr) return;
  if (!blocked_) stream_->resume();
  if (!blocked_) consume({in_.data(), in_.size()}, false);
  if (stream_ != nullptr) stream_->flush();
}

void HttpConnection::enter_heads() {
  if (in_heads_) return;
  in_heads_ = true;
  head_since_ = server_.loop.now();
  head_at_ = server_.heads.insert(server_.heads.end(), this);
  server_.arm(head_since_ + server_.header_timeout);
}

void HttpConnection::leave_heads() {
  if (std::exchange(in_heads_, false)) server_.heads.erase(head_at_);
}

bool HttpConnection::room() {
  if (stream_->waiting() <= server_.options.max_waiting) return true;
  stream_->flush();
  return stream_->waiting() <= server_.options.max_waiting;
}

void HttpConnection::on_sent() {
  if (closed_at_sent_) return close();
  if (!std::exchange(blocked_, false)) return;
  go_on();
}

void HttpConnection::on_end(int error) {
  ended_ = true;
  if (error != 0) return close();
  // What was asked is still answered, as the other side may have closed its half only.
  if (first_ == nullptr && !blocked_ && !closed_at_sent_) close_when_sent();
}

void HttpConnection::close_when_sent() {
  stream_->flush();
  if (stream_->waiting() == 0) return close();
  closed_at_sent_ = true;
  stream_->pause();
}

void HttpConnection::refuse() {
  ++server_.counters.refused;
  rpc::Output& out = stream_->out();
  const std::string body =
      fmt::format(R"({{"type":"about:blank","title":"{}","status":{},"detail":"{}"}})",
                  reason(error_.status), error_.status, error_.detail);
  closing_ = true;
  append_head(out, error_.status, kProblemType, true, false);
  out.append(fmt::format("Content-Length: {}\r\n\r\n", body.size()));
  if (!std::string_view(in_.data(), in_.size()).starts_with("HEAD ")) out.append(body);
  linger();
}

void HttpConnection::linger() {
  in_ = {};
  leave_heads();
  if (ended_) return close_when_sent();
  stream_->end();
  stream_->resume();
  move_to(server_.lingering);
  server_.arm(since_ + server_.linger_timeout);
}

void HttpConnection::time_out_head() {
  error_ = kSlowHead;
  refuse();
}

// Of those that rest. What is in the midst of something closes once that is answered.
void HttpConnection::drain() {
  if (in_.empty() && first_ == nullptr && stream_->waiting() == 0) return close();
  Connections& to = server_.draining_kept;
  to.splice(to.end(), *list_, at_);
  list_ = &to;
}

// True if the answer may be written into out(), as it is its turn.
bool HttpConnection::begin(HttpExchange& exchange) {
  if (&exchange != first_ || writing_) return false;
  writing_ = true;
  return true;
}

void HttpConnection::answered() {
  while (first_ != nullptr && first_->answered_) {
    HttpExchange* exchange = std::exchange(first_, first_->next_);
    if (!exchange->early_.empty()) stream_->out().append(exchange->early_.view());
    server_.release(*exchange);
  }
  if (first_ != nullptr || handling_) return;
  completed();
  server_.loop.defer(*this);
}

void HttpConnection::append_head(rpc::Output& out, unsigned status, std::string_view content_type,
                                 bool last, bool old) {
  append_status(out, status);
  out.append(server_.date());
  if (!content_type.empty()) {
    out.append("Content-Type: ");
    out.append(content_type);
    out.append("\r\n");
  }
  if (last && (closing_ || server_.draining)) {
    out.append("Connection: close\r\n");
  } else if (old) {
    out.append("Connection: keep-alive\r\n");
  }
}

const rpc::Address& HttpExchange::peer() const {
  return connection_->peer();
}

// What it sees in `from` is at `to` now.
void HttpExchange::rebase(std::string_view from, const char* to) {
  const auto move = [&](std::string_view& view) {
    // A path may be a constant.
    if (std::less<>()(view.data(), from.data()) ||
        std::less<>()(from.data() + from.size(), view.data())) {
      return;
    }
    view = {to + (view.data() - from.data()), view.size()};
  };
  move(head_.method);
  move(head_.path);
  move(head_.query);
  for (std::string_view& field : head_.fields) {
    if (field.data() != nullptr) move(field);
  }
  move(head_text_);
  move(body_);
}

rpc::Output& HttpExchange::begin(unsigned status, std::string_view content_type) {
  // What nobody waits for is written all the same, and dropped.
  static thread_local rpc::Output dropped;
  status_ = status;
  body_at_ = 0;
  if (connection_ == nullptr || answered_) {
    dropped.clear();
    out_ = &dropped;
    begin_ = 0;
    return dropped;
  }
  if (connection_->begin(*this)) {
    out_ = &connection_->out();
  } else {
    if (early_.capacity() == 0) early_ = connection_->server().loop.take_buffer();
    out_ = &early_;
  }
  begin_ = out_->size();
  connection_->append_head(*out_, status, content_type, last_, head_.http_1_0 && head_.keep_alive);
  return *out_;
}

void HttpExchange::field(std::string_view name, std::string_view value) {
  out_->append(name);
  out_->append(": ");
  char* at = out_->extend(value.size());
  for (const char c : value) {
    const auto byte = static_cast<unsigned char>(c);
    *at++ = byte < ' ' || byte == 127 ? ' ' : c;
  }
  out_->append("\r\n");
}

// Content-Length comes last, with room for three digits; write_length() makes it as many as it
// takes, once the body is there.
rpc::Output& HttpExchange::begin_body() {
  if (has_body(status_)) out_->append("Content-Length: 000\r\n");
  out_->append("\r\n");
  body_at_ = out_->size();
  return *out_;
}

void HttpExchange::write_length() {
  constexpr std::size_t kRoom = 3;
  constexpr std::size_t kLineEnds = 4;
  const std::size_t size = out_->size() - body_at_;
  const fmt::format_int text(size);
  const std::size_t digits = text.size();
  const std::size_t digits_at = body_at_ - kLineEnds - kRoom;
  if (digits > kRoom) out_->extend(digits - kRoom);
  char* at = out_->data() + digits_at;
  if (digits != kRoom) std::memmove(at + digits, at + kRoom, size + kLineEnds);
  std::memcpy(at, text.data(), digits);
  if (digits < kRoom) out_->truncate(out_->size() - (kRoom - digits));
  body_at_ = digits_at + digits + kLineEnds;
}

void HttpExchange::finish() {
  if (body_at_ == 0) begin_body();
  const bool early = out_ == &early_;
  if (connection_ == nullptr || answered_) {
    out_ = nullptr;
    return;
  }
  if (has_body(status_)) write_length();
  if (head_.method == "HEAD" || !has_body(status_)) out_->truncate(body_at_);
  out_ = nullptr;
  answered_ = true;
  if (!early) connection_->end_writing();
  connection_->answered();
}

void HttpExchange::respond(unsigned status, std::string_view content_type, std::string_view body,
                           std::string_view fields) {
  begin(status, content_type).append(fields);
  begin_body().append(body);
  finish();
}

void HttpExchange::respond_problem(unsigned status, std::string_view title,
                                   std::string_view detail) {
  begin(status, kProblemType);
  fmt::format_to(std::back_inserter(begin_body()),
                 R"({{"type":"about:blank","title":"{}","status":{},"detail":"{}"}})", title,
                 status, detail);
  finish();
}

HttpServer::Impl::Impl(rpc::StreamLoop& stream_loop, HttpServerOptions server_options,
                       Handler& server_handler, std::shared_ptr<ConnectionBudget> server_budget)
    : loop(stream_loop),
      options(std::move(server_options)),
      names(options.headers),
      handler(server_handler),
      budget(std::move(server_budget)),
      max_batch(std::max<std::size_t>(options.max_batch, 1)),
      idle_timeout(milliseconds(options.idle_timeout)),
      header_timeout(milliseconds(options.header_timeout)),
      answer_timeout(milliseconds(options.answer_timeout)),
      linger_timeout(milliseconds(options.linger_timeout)),
      evict_after(milliseconds(options.evict_after)),
      timer(new uv_timer_t{}) {
  timer->data = this;
  uv_timer_init(loop.uv(), timer);
}

void HttpServer::Impl::accept(std::unique_ptr<rpc::ByteStream> stream, const rpc::Address& peer) {
  if (stream == nullptr || stopped) return;
  if (!budget->take() && !(make_room() && budget->take())) {
    ++counters.turned_away;
    return;
  }
  ++counters.accepted;
  ++connections;
  Connections& list = draining ? draining_kept : fresh;
  list.push_back(std::make_unique<HttpConnection>(*this, std::move(stream), peer));
  list.back()->start(std::prev(list.end()), list);
}

bool HttpServer::Impl::make_room() {
  for (Connections* list : {&lingering, &fresh, &kept}) {
    if (list->empty() || loop.now() < list->front()->since() + evict_after) continue;
    ++counters.evicted;
    list->front()->close();
    return true;
  }
  return false;
}

HttpExchange* HttpServer::Impl::take(HttpConnection& connection) {
  if (free_exchanges.empty()) {
    free_exchanges.push_back(static_cast<std::uint32_t>(exchanges.size()));
    exchanges.push_back(std::make_unique<HttpExchange>());
  }
  const std::uint32_t slot = free_exchanges.back();
  free_exchanges.pop_back();
  HttpExchange* exchange = exchanges[slot].get();
  exchange->id_ = ++serial << kSlotBits | slot;
  exchange->connection_ = &connection;
  exchange->next_ = nullptr;
  exchange->out_ = nullptr;
  exchange->answered_ = exchange->last_ = false;
  return exchange;
}

void HttpServer::Impl::release(HttpExchange& exchange) {
  exchange.connection_ = nullptr;
  if (exchange.early_.capacity() != 0) loop.give_buffer(std::move(exchange.early_));
  exchange.early_ = {};
  free_exchanges.push_back(static_cast<std::uint32_t>(exchange.id_ & kSlotMask));
}

std::string_view HttpServer::Impl::date() {
  if (loop.now() >= date_until) {
    std::timespec now{};
    clock_gettime(CLOCK_REALTIME, &now);
    date_text = date_line(now.tv_sec);
    date_until = loop.now() + milliseconds(kSecond - now.tv_nsec);
  }
  return date_text;
}

// The timer goes off at the earliest deadline there was when it was set. Most have moved on by
// then, so a request costs no timer.
void HttpServer::Impl::arm(Milliseconds at) {
  if (at >= armed || stopped) return;
  armed = at;
  const Milliseconds now = loop.now();
  uv_timer_start(
      timer, [](uv_timer_t* handle) { static_cast<Impl*>(handle->data)->on_timer(); },
      at > now ? at - now : 0, 0);
}

void HttpServer::Impl::on_timer() {
  armed = ~Milliseconds{0};
  if (draining) drain_some();
  expire(loop.now());
  arm(next_deadline());
}

void HttpServer::Impl::expire(Milliseconds now) {
  while (!heads.empty() && heads.front()->head_since() + header_timeout <= now) {
    ++counters.timed_out;
    heads.front()->time_out_head();
  }
  each_idle_list([&](Connections& list) {
    while (!list.empty() && list.front()->since() + idle_timeout <= now) {
      ++counters.timed_out;
      list.front()->close();
    }
  });
  while (!waiting.empty() && waiting.front()->since() + answer_timeout <= now) {
    ++counters.unanswered;
    waiting.front()->answer_all(503, "The answer took too long.");
  }
  while (!lingering.empty() && lingering.front()->since() + linger_timeout <= now) {
    lingering.front()->close();
  }
}

Milliseconds HttpServer::Impl::next_deadline() {
  Milliseconds first = ~Milliseconds{0};
  const auto add = [&](const Connections& list, Milliseconds timeout) {
    if (!list.empty()) first = std::min(first, list.front()->since() + timeout);
  };
  each_idle_list([&](Connections& list) { add(list, idle_timeout); });
  add(waiting, answer_timeout);
  add(lingering, linger_timeout);
  if (!heads.empty()) first = std::min(first, heads.front()->head_since() + header_timeout);
  return draining && !(fresh.empty() && kept.empty()) ? loop.now() : first;
}

void HttpServer::Impl::drain_some() {
  for (int i = 0; i < kDrainsPerTurn && !(fresh.empty() && kept.empty()); ++i) {
    Connections& list = fresh.empty() ? kept : fresh;
    list.front()->drain();
  }
}

void HttpServer::Impl::stop() {
  if (std::exchange(stopped, true)) return;
  draining = true;
  while (!waiting.empty()) waiting.front()->answer_all(503, "This node is stopping.");
  for (Connections* list : {&fresh, &kept, &draining_kept, &waiting, &lingering}) {
    while (!list->empty()) list->front()->close();
  }
  loop.forget(*this);
  dead.clear();
  uv_timer_stop(timer);
  uv_close(reinterpret_cast<uv_handle_t*>(timer),
           [](uv_handle_t* handle) { delete reinterpret_cast<uv_timer_t*>(handle); });
}

HttpServer::HttpServer(rpc::StreamLoop& loop, HttpServerOptions options, Handler& handler,
                       std::shared_ptr<ConnectionBudget> budget)
    : impl_(std::make_unique<Impl>(loop, std::move(options), handler, std::move(budget))) {}

HttpServer::~HttpServer() {
  stop();
}

void HttpServer::accept(int fd, const rpc::Address& peer) {
  if (impl_->stopped) {
    ::close(fd);
    return;
  }
  accept(rpc::make_tcp_stream(impl_->loop, fd), peer);
}

void HttpServer::accept(std::unique_ptr<rpc::ByteStream> stream, const rpc::Address& peer) {
  impl_->accept(std::move(stream), peer);
}

HttpExchange* HttpServer::find(std::uint64_t id) {
  const std::uint64_t slot = id & kSlotMask;
  if (slot >= impl_->exchanges.size()) return nullptr;
  HttpExchange* exchange = impl_->exchanges[slot].get();
  return exchange->id_ == id && exchange->connection_ != nullptr && !exchange->answered_ ? exchange
                                                                                         : nullptr;
}

void HttpServer::drain() {
  if (std::exchange(impl_->draining, true)) return;
  impl_->arm(impl_->loop.now());
}

void HttpServer::stop() {
  impl_->stop();
}

std::size_t HttpServer::connections() const {
  return impl_->connections;
}

const HttpServer::Counters& HttpServer::counters() const {
  return impl_->counters;
}

}  // namespace weir::node
