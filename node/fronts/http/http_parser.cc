#include <weir/node/fronts/http/http_parser.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>
#include <limits>
#include <stdexcept>

#include <boost/beast/http/basic_parser.hpp>

namespace weir::node {
namespace {

namespace beast = boost::beast;
using beast::http::field;

// A target of kMaxHttpTarget with a method and a version.
constexpr std::size_t kMaxRequestLine = kMaxHttpTarget + 64;

constexpr HttpError kControl = {400, "A control byte is in the head."};
constexpr HttpError kLineEnd = {400, "A line does not end in CR LF."};
constexpr HttpError kRequestLine = {400, "The first line is no request line."};
constexpr HttpError kTargetLength = {414, "The target is too long."};
constexpr HttpError kHeadLength = {431, "The head is larger than 16 KiB."};
constexpr HttpError kFieldCount = {431, "There are more than 100 header fields."};
constexpr HttpError kTarget = {400, "The target is malformed."};
constexpr HttpError kField = {400, "A header field is malformed."};
constexpr HttpError kFold = {400, "A header field is folded."};
constexpr HttpError kHosts = {400, "There must be one Host."};
constexpr HttpError kHost = {400, "Host is malformed."};
constexpr HttpError kLength = {400, "Content-Length is malformed."};
constexpr HttpError kLengths = {400, "There is more than one Content-Length."};
constexpr HttpError kCodings = {400, "There is more than one transfer coding."};
constexpr HttpError kCoding = {501, "The only transfer coding here is chunked."};
constexpr HttpError kBothLengths = {400, "There is Content-Length and Transfer-Encoding."};
constexpr HttpError kOldCoding = {400, "Transfer-Encoding is not for HTTP/1.0."};
constexpr HttpError kExpect = {417, "The only expectation here is 100-continue."};
constexpr HttpError kVersion = {505, "The versions here are HTTP/1.1 and HTTP/1.0."};
constexpr HttpError kConnect = {501, "This is no proxy."};
constexpr HttpError kChunk = {400, "The chunked body is malformed."};
constexpr HttpError kChunkExtras = {400, "Chunk extensions or trailers are too long."};
constexpr HttpError kBody = {413, "The body is too large."};

bool is_decimal(char c) {
  return c >= '0' && c <= '9';
}

bool is_token(char c) {
  static constexpr auto kTable = [] {
    std::array<bool, 256> table{};
    for (unsigned char byte = 33; byte < 127; ++byte) {
      table[byte] = std::string_view("\"(),/:;<=>?@[\\]{}").find(static_cast<char>(byte)) ==
                    std::string_view::npos;
    }
    return table;
  }();
  return kTable[static_cast<unsigned char>(c)];
}

char lower(char c) {
  return c >= 'A' && c <= 'Z' ? static_cast<char>(c + ('a' - 'A')) : c;
}

bool same_text(std::string_view lower_text, std::string_view text) {
  return lower_text.size() == text.size() &&
         std::equal(text.begin(), text.end(), lower_text.begin(),
                    [](char a, char b) { return lower(a) == b; });
}

bool starts_with_text(std::string_view text, std::string_view lower_start) {
  return text.size() >= lower_start.size() &&
         same_text(lower_start, text.substr(0, lower_start.size()));
}

// Whether one of eight bytes is a control byte below the space.
bool any_control(const char* at) {
  std::uint64_t word;
  std::memcpy(&word, at, sizeof word);
  return ((word - 0x2020202020202020u) & ~word & 0x8080808080808080u) != 0;
}

// "… HTTP/d.d"
bool ends_in_version(std::string_view line) {
  if (line.size() < 12) return false;
  const std::string_view version = line.substr(line.size() - 9);
  return version.starts_with(" HTTP/") && is_decimal(version[6]) && version[7] == '.' &&
         is_decimal(version[8]);
}

// What may stand in a host and a port: RFC 3986, without user names.
bool is_host(std::string_view host) {
  return std::all_of(host.begin(), host.end(), [](char c) {
    return is_decimal(c) || (lower(c) >= 'a' && lower(c) <= 'z') ||
           std::string_view("-._~!$&'()*+,;=%:[]").find(c) != std::string_view::npos;
  });
}

HttpError split_target(std::string_view target, HttpHead& out) {
  if (target.size() > kMaxHttpTarget) return kTargetLength;
  if (target.find('#') != std::string_view::npos) return kTarget;
  if (target.front() != '/') {
    if (target == "*" && out.method == "OPTIONS") {
      out.path = target;
      return {};
    }
    const bool http = starts_with_text(target, "http://");
    if (!http && !starts_with_text(target, "https://")) return kTarget;
    target.remove_prefix(http ? 7 : 8);
    const std::size_t end = std::min(target.find_first_of("/?"), target.size());
    if (end == 0 || !is_host(target.substr(0, end))) return kTarget;
    target.remove_prefix(end);
  }
  const std::size_t mark = std::min(target.find('?'), target.size());
  out.path = mark == 0 ? "/" : target.substr(0, mark);
  out.query = mark == target.size() ? std::string_view{} : target.substr(mark + 1);
  return {};
}

// Beast's parser of a head, and what it lets pass but is refused here.
class HeadParser final : public beast::http::basic_parser<true> {
 public:
  HeadParser(std::string_view head, const HttpNames& wanted, HttpHead& out)
      : head_(head), wanted_(wanted), out_(out) {
    header_limit(static_cast<std::uint32_t>(kMaxHttpHead + 1));
    // Who reads the body bounds it. (Without a limit Beast 1.74 refuses every Content-Length.)
    body_limit(std::numeric_limits<std::uint64_t>::max());
  }
  HttpError parse();

 private:
  using Code = beast::error_code;
  using Text = beast::string_view;
  static std::string_view view(Text text) { return {text.data(), text.size()}; }

  void refuse(HttpError error, Code& code) {
    error_ = error;
    code = beast::http::error::bad_value;
  }
  bool folded(std::string_view name, std::string_view value) const;
  HttpError on_field(field name, std::string_view value);
  HttpError on_content_length(std::string_view value);
  HttpError on_transfer_encoding(std::string_view value);
  HttpError finish();

  void on_request_impl(beast::http::verb, Text method, Text target, int version,
                       Code& code) override;
  void on_field_impl(field id, Text name, Text value, Code& code) override;
  void on_response_impl(int, Text, int, Code&) override {}
  void on_header_impl(Code&) override {}
  void on_body_init_impl(const boost::optional<std::uint64_t>&, Code&) override {}
  std::size_t on_body_impl(Text body, Code&) override { return body.size(); }
  void on_chunk_header_impl(std::uint64_t, Text, Code&) override {}
  std::size_t on_chunk_body_impl(std::uint64_t, Text body, Code&) override { return body.size(); }
  void on_finish_impl(Code&) override {}

  const std::string_view head_;
  const HttpNames& wanted_;
  HttpHead& out_;
  HttpError error_;
  std::size_t fields_ = 0;
  unsigned hosts_ = 0;
};

HttpError HeadParser::parse() {
  Code code;
  const std::size_t used = put(boost::asio::const_buffer(head_.data(), head_.size()), code);
  if (error_) return error_;
  if (!code && used == head_.size()) return finish();
  using beast::http::error;
  if (code == error::bad_version) {
    // The scanner has seen that there is a version; more than a target may stand before it.
    const std::string_view line = head_.substr(0, head_.find('\r'));
    const bool served = line.ends_with("/1.1") || line.ends_with("/1.0");
    return served ? kTarget : kVersion;
  }
  if (code == error::bad_method) return kRequestLine;
  if (code == error::bad_target) return kTarget;
  if (code == error::bad_content_length) return kLength;
  return kField;
}

void HeadParser::on_request_impl(beast::http::verb, Text method, Text target, int version,
                                 Code& code) {
  out_.method = view(method);
  out_.http_1_0 = version == 10;
  HttpError error = out_.method == "CONNECT" ? kConnect : split_target(view(target), out_);
  if (error) refuse(error, code);
}

// Beast joins folded lines: into memory of its own, or it skips empty ones.
bool HeadParser::folded(std::string_view name, std::string_view value) const {
  const char* begin = name.data() + name.size() + 1;
  const char* end = head_.data() + head_.size();
  if (std::less<>()(value.data(), begin) || std::less<>()(end, value.data())) return true;
  return std::find(begin, value.data(), '\r') != value.data();
}

void HeadParser::on_field_impl(field id, Text name_text, Text value_text, Code& code) {
  const std::string_view name = view(name_text);
  const std::string_view value = view(value_text);
  HttpError error;
  if (++fields_ > kMaxHttpFields) {
    error = kFieldCount;
  } else if (folded(name, value)) {
    error = kFold;
  } else {
    error = on_field(id, value);
  }
  if (error) return refuse(error, code);
  wanted_.find(name, [&](unsigned i) {
    if (out_.fields[i].data() == nullptr) {
      out_.fields[i] = value;
    } else {
      out_.repeated |= 1u << i;
    }
  });
}

HttpError HeadParser::on_field(field name, std::string_view value) {
  switch (name) {
    case field::host:
      if (++hosts_ > 1) return kHosts;
      return is_host(value) ? HttpError{} : kHost;
    case field::content_length:
      return on_content_length(value);
    case field::transfer_encoding:
      return on_transfer_encoding(value);
    case field::expect:
      if (!same_text("100-continue", value)) return kExpect;
      out_.expect_continue = true;
      return {};
    default:
      return {};
  }
}

// Beast has seen to it that the numbers in it are numbers, but takes "5, 5".
HttpError HeadParser::on_content_length(std::string_view value) {
  if (out_.content_length) return kLengths;
  if (value.find(',') != std::string_view::npos) return kLengths;
  if (value.empty() || value.size() > 19 || !std::all_of(value.begin(), value.end(), is_decimal)) {
    return kLength;
  }
  std::uint64_t length = 0;
  for (const char digit : value) length = length * 10 + static_cast<std::uint64_t>(digit - '0');
  out_.content_length = length;
  return {};
}

HttpError HeadParser::on_transfer_encoding(std::string_view value) {
  if (out_.chunked) return kCodings;
  if (!same_text("chunked", value)) {
    return value.find(',') == std::string_view::npos || !starts_with_text(value, "chunked")
               ? kCoding
               : kCodings;
  }
  out_.chunked = true;
  return {};
}

HttpError HeadParser::finish() {
  if (hosts_ == 0 && !out_.http_1_0) return kHosts;
  if (out_.chunked && out_.content_length) return kBothLengths;
  if (out_.chunked && out_.http_1_0) return kOldCoding;
  if (out_.http_1_0) out_.expect_continue = false;
  out_.keep_alive = keep_alive();
  return {};
}

}  // namespace

HttpError HeadScanner::scan(std::string_view data) {
  // Within the first line its own limit counts.
  const bool first = line_ == 0;
  const std::size_t limit = first ? kMaxRequestLine : kMaxHttpHead;
  const std::size_t size = std::min(data.size(), limit);
  if (at_ == 0 && size > 0 && !is_token(data.front())) return kRequestLine;
  std::size_t at = at_;
  while (at < size) {
    if (at + 8 <= size && !any_control(data.data() + at)) {
      at += 8;
      continue;
    }
    const auto byte = static_cast<unsigned char>(data[at]);
    if (byte >= ' ' || byte == '\t') {
      ++at;
      continue;
    }
    if (byte == '\n') return kLineEnd;
    if (byte != '\r') return kControl;
    if (at + 1 == size) break;
    if (data[at + 1] != '\n') return kLineEnd;
    if (HttpError error = end_line(data, at)) return error;
    if (end_ != 0) return {};
    at += 2;
    at_ = static_cast<std::uint32_t>(at);
    if (first) return scan(data);
  }
  at_ = static_cast<std::uint32_t>(at);
  if (size == limit) return first ? kTargetLength : kHeadLength;
  return {};
}

HttpError HeadScanner::end_line(std::string_view data, std::size_t at) {
  if (line_ == 0) {
    if (!ends_in_version(data.substr(0, at))) return kRequestLine;
  } else if (at == line_) {
    end_ = static_cast<std::uint32_t>(at + 2);
  }
  line_ = static_cast<std::uint32_t>(at + 2);
  return {};
}

HttpNames::HttpNames(std::vector<std::string> names) : names_(std::move(names)) {
  if (names_.size() > kMaxHttpNames) throw std::invalid_argument("too many header names");
  for (std::size_t i = 0; i < names_.size(); ++i) {
    std::transform(names_[i].begin(), names_[i].end(), names_[i].begin(), lower);
    by_length_[names_[i].size() & 31] |= static_cast<std::uint16_t>(1u << i);
  }
}

bool HttpNames::same(std::string_view lower_name, std::string_view any) {
  return same_text(lower_name, any);
}

HttpError parse_head(std::string_view head, const HttpNames& wanted, HttpHead& out) {
  out = HttpHead{};
  return HeadParser(head, wanted, out).parse();
}

HttpError ChunkDecoder::decode(std::span<char> data, std::size_t& raw, std::size_t& plain) {
  while (raw < data.size() && state_ != State::done) {
    if (state_ != State::data) {
      if (HttpError error = step(data[raw])) return error;
      ++raw;
      continue;
    }
    const auto count = static_cast<std::size_t>(std::min<std::uint64_t>(left_, data.size() - raw));
    std::memmove(data.data() + plain, data.data() + raw, count);
    raw += count;
    plain += count;
    left_ -= count;
    if (left_ == 0) state_ = State::data_cr;
  }
  return {};
}

// One byte of what is not data.
HttpError ChunkDecoder::step(char byte) {
  const auto expect = [&](char wanted, State next) {
    if (byte != wanted) return kChunk;
    state_ = next;
    return HttpError{};
  };
  const bool control = (static_cast<unsigned char>(byte) < ' ' && byte != '\t') || byte == 127;
  switch (state_) {
    case State::size:
    case State::digits: {
      const char c = lower(byte);
      const bool letter = c >= 'a' && c <= 'f';
      if (is_decimal(c) || letter) {
        if (++digits_ > 16) return kChunk;
        left_ = left_ * 16 + static_cast<std::uint64_t>(letter ? c - 'a' + 10 : c - '0');
        state_ = State::digits;
        return {};
      }
      if (state_ == State::size) return kChunk;
      if (byte == ';') {
        state_ = State::extension;
        return {};
      }
      return expect('\r', State::size_lf);
    }
    case State::extension:
      if (byte == '\r') return expect('\r', State::size_lf);
      return control ? kChunk : ++extras_ > kMaxHttpChunkExtras ? kChunkExtras : HttpError{};
    case State::size_lf:
      if (left_ > max_body_ - total_) return byte == '\n' ? kBody : kChunk;
      total_ += left_;
      digits_ = 0;
      return expect('\n', left_ == 0 ? State::line : State::data);
    case State::data_cr:
      return expect('\r', State::data_lf);
    case State::data_lf:
      return expect('\n', State::size);
    case State::line:
      if (byte == '\r') return expect('\r', State::last_lf);
      if (!is_token(byte)) return kChunk;
      state_ = State::trailer;
      return ++extras_ > kMaxHttpChunkExtras ? kChunkExtras : HttpError{};
    case State::trailer:
      if (byte == ':') {
        state_ = State::value;
      } else if (!is_token(byte)) {
        return kChunk;
      }
      return ++extras_ > kMaxHttpChunkExtras ? kChunkExtras : HttpError{};
    case State::value:
      if (byte == '\r') return expect('\r', State::trailer_lf);
      return control ? kChunk : ++extras_ > kMaxHttpChunkExtras ? kChunkExtras : HttpError{};
    case State::trailer_lf:
      return expect('\n', State::line);
    case State::last_lf:
      return expect('\n', State::done);
    case State::data:
    case State::done:
      break;
  }
  return {};
}

}  // namespace weir::node
