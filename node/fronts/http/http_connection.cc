#include <weir/node/fronts/http/http_connection.h>

#include <utility>

#include <fmt/format.h>

namespace weir::node {
namespace {

// After a refusal so much is read and thrown away, so that the client gets to read the answer.
constexpr std::size_t kMaxDiscarded = 1u << 20;
constexpr HttpError kLargeBody = {413, "The body is too large."};
constexpr HttpError kSlowHead = {408, "The head did not arrive in time."};

}  // namespace

HttpConnection::~HttpConnection() {
  server_.loop.forget(*this);
}

Session& HttpConnection::session() {
  // Known once something has arrived.
  if (!std::exchange(certificate_asked_, true)) session_.shows_certificate(stream_->peer_names());
  return session_;
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
  server_.budget->give(peer_);
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
  if (length > server_.options.max_body) return kLargeBody;
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
    if (!e->answered_) e->respond_problem(status, http_reason(status), detail);
    e = next;
  }
}

void HttpConnection::completed() {
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
                  http_reason(error_.status), error_.status, error_.detail);
  closing_ = true;
  append_head(out, error_.status, kHttpProblemType, true, false);
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
  append_http_status(out, status);
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

}  // namespace weir::node
