#include <algorithm>
#include <cstring>
#include <functional>

#include <fmt/format.h>

#include <weir/node/fronts/http/http_connection.h>

namespace weir::node {
namespace {

/// An Authorization field that proves nothing.
constexpr std::string_view kTwoTokens = "Bearer ";

bool has_body(unsigned status) {
  return status >= 200 && status != 204 && status != 304;
}

}  // namespace

void append_http_status(rpc::Output& out, unsigned status) {
  if (status == 200) return out.append("HTTP/1.1 200 OK\r\n");
  out.append("HTTP/1.1 ");
  out.append_decimal(status);
  out.push_back(' ');
  out.append(http_reason(status));
  out.append("\r\n");
}

std::string_view HttpExchange::host() const {
  return connection_->host();
}

std::string_view HttpExchange::authorization() const {
  const std::size_t at = connection_->server().authorization;
  // Of two, either may be what somebody between has checked.
  return repeated(at) ? kTwoTokens : header(at);
}

const Caller& HttpExchange::caller() const {
  return connection_->session().with_authorization(authorization());
}

const Caller& HttpExchange::connection_caller() const {
  return connection_->session().with_authorization({});
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
  begin(status, kHttpProblemType);
  fmt::format_to(std::back_inserter(begin_body()),
                 R"({{"type":"about:blank","title":"{}","status":{},"detail":"{}"}})", title,
                 status, detail);
  finish();
}

}  // namespace weir::node
