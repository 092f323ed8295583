#include <weir/node/fronts/grpc/grpc_connection.h>

#include <cstring>

namespace weir::node {
namespace {

constexpr std::size_t kPrefix = 5;  // a flag and a length
constexpr std::size_t kMaxStatusText = 1024;

}  // namespace

bool parse_grpc_timeout(std::string_view text, Nanos& out) {
  if (text.size() < 2 || text.size() > 9) return false;
  Nanos number = 0;
  for (const char c : text.substr(0, text.size() - 1)) {
    if (c < '0' || c > '9') return false;
    number = number * 10 + (c - '0');
  }
  switch (text.back()) {
    case 'H':
      out = number > kNever / kHour ? kNever : number * kHour;
      return true;
    case 'M':
      out = number * kMinute;
      return true;
    case 'S':
      out = number * kSecond;
      return true;
    case 'm':
      out = number * kMillisecond;
      return true;
    case 'u':
      out = number * 1000;
      return true;
    case 'n':
      out = number;
      return true;
    default:
      return false;
  }
}

std::string grpc_message(std::string_view text) {
  constexpr std::string_view kDigits = "0123456789ABCDEF";
  std::string out;
  for (const char c : text.substr(0, kMaxStatusText)) {
    if (c >= ' ' && c <= '~' && c != '%') {
      out += c;
      continue;
    }
    const auto byte = static_cast<unsigned char>(c);
    out += {'%', kDigits[byte >> 4], kDigits[byte & 15u]};
  }
  return out;
}

std::string_view GrpcCall::authorization() const {
  return has_authorization_ ? std::string_view(authorization_) : std::string_view();
}

const Caller& GrpcCall::caller() const {
  return connection_->session().with_authorization(authorization());
}

rpc::Output& GrpcCall::begin_message() {
  if (connection_ == nullptr || phase_ == Phase::finished) {
    // Too late: it is written all the same, and nobody reads it.
    static thread_local rpc::Output scrap;
    scrap.clear();
    return scrap;
  }
  begin_ = out_.size();
  std::memset(out_.extend(kPrefix), 0, kPrefix);
  return out_;
}

void GrpcCall::end_message() {
  if (connection_ == nullptr || phase_ == Phase::finished) return;
  const std::size_t size = out_.size() - begin_ - kPrefix;
  for (std::size_t i = 0; i < 4; ++i) {
    out_.data()[begin_ + 1 + i] = static_cast<char>(size >> (24 - 8 * i));
  }
  whole_ += out_.size() - begin_;
  connection_->unsent_more(out_.size() - begin_);
  if (kind_ != GrpcKind::streaming) return;
  // A client that does not read what it asked for.
  if (out_.size() - sent_ > connection_->server().options.max_waiting) {
    whole_ -= out_.size() - begin_;
    connection_->unsent_less(out_.size() - begin_);
    out_.truncate(begin_);
    return finish(GrpcCode::resource_exhausted, "answers are not read");
  }
  connection_->submit(*this);
}

void GrpcCall::finish(GrpcCode code, std::string_view text) {
  if (connection_ == nullptr || phase_ == Phase::finished) return;
  out_.truncate(sent_ + whole_);  // what was begun and not ended
  phase_ = Phase::finished;
  code_ = code;
  text_ = text;
  connection_->server().clear_due(*this);
  connection_->submit(*this);
}

void GrpcCall::fail(GrpcCode code, std::string_view text) {
  if (connection_ == nullptr || phase_ == Phase::finished) return;
  if (!answering_) {
    connection_->unsent_less(whole_);
    out_.clear();
    whole_ = 0;
  }
  finish(code, text);
}

}  // namespace weir::node
