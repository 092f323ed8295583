#include <weir/node/fronts/redis/resp_parser.h>

#include <algorithm>

namespace weir::node {
namespace {

constexpr std::size_t kMaxDigits = 7;
// A connection that rests keeps room for as many arguments.
constexpr std::size_t kKept = 32;

}  // namespace

void RespParser::reset() {
  at_ = expected_ = length_ = 0;
  in_argument_ = false;
  pieces_.clear();
  arguments_.clear();
  if (pieces_.capacity() > kKept) pieces_ = {};
  if (arguments_.capacity() > kKept) arguments_ = {};
  error_ = {};
}

RespParser::State RespParser::fail(std::string_view error) {
  error_ = error;
  return State::bad;
}

RespParser::State RespParser::read(std::string_view bytes) {
  if (bytes.empty()) return State::more;
  return bytes[0] == '*' ? read_array(bytes) : read_line(bytes);
}

/// A count behind the byte at at_, and its CR LF. Moves at_ behind it once all of it is there.
RespParser::State RespParser::number(std::string_view bytes, std::size_t most,
                                     std::string_view what, std::size_t& out) {
  const std::string_view rest = bytes.substr(at_ + 1);
  std::size_t digits = 0;
  std::size_t value = 0;
  while (digits < rest.size() && rest[digits] >= '0' && rest[digits] <= '9') {
    if (digits == kMaxDigits || (digits == 1 && value == 0)) return fail(what);
    value = value * 10 + static_cast<std::size_t>(rest[digits++] - '0');
  }
  if (value > most) return fail(what);
  const std::string_view end = rest.substr(digits, 2);
  if (!std::string_view("\r\n").starts_with(end) || (digits == 0 && !end.empty())) {
    return fail(what);
  }
  if (end.size() < 2) return State::more;
  out = value;
  at_ += 1 + digits + 2;
  return State::command;
}

RespParser::State RespParser::read_array(std::string_view bytes) {
  if (at_ == 0) {
    const State state =
        number(bytes, kMaxRespArguments, "Protocol error: expected an array of 0 to 1024 arguments",
               expected_);
    if (state != State::command) return state;
  }
  while (pieces_.size() < expected_) {
    if (!in_argument_) {
      if (at_ == bytes.size()) return State::more;
      if (bytes[at_] != '$') return fail("Protocol error: expected '$' and a length");
      const State state =
          number(bytes, kMaxRespCommand, "Protocol error: expected an argument of 0 to 65536 bytes",
                 length_);
      if (state != State::command) return state;
      if (at_ + length_ + 2 > kMaxRespCommand) {
        return fail("Protocol error: the command is longer than 65536 bytes");
      }
      in_argument_ = true;
    }
    if (bytes.size() - at_ < length_ + 2) return State::more;
    if (bytes.substr(at_ + length_, 2) != "\r\n") {
      return fail("Protocol error: expected CR LF behind an argument");
    }
    pieces_.push_back({at_, length_});
    at_ += length_ + 2;
    in_argument_ = false;
  }
  return done(bytes);
}

/// at_ is how far no end of the line was found.
RespParser::State RespParser::read_line(std::string_view bytes) {
  const std::size_t end = bytes.substr(0, kMaxRespInline).find('\n', at_);
  if (end == std::string_view::npos) {
    at_ = std::min(bytes.size(), kMaxRespInline);
    if (at_ < kMaxRespInline) return State::more;
    return fail("Protocol error: an inline command is longer than 4096 bytes");
  }
  at_ = end + 1;
  std::string_view line = bytes.substr(0, end);
  if (line.ends_with('\r')) line.remove_suffix(1);
  for (std::size_t i = 0; i < line.size();) {
    const auto byte = static_cast<unsigned char>(line[i]);
    if (byte == ' ' || byte == '\t') {
      ++i;
      continue;
    }
    const std::size_t begin = i;
    for (; i < line.size() && line[i] != ' ' && line[i] != '\t'; ++i) {
      if (line[i] == '"' || line[i] == '\'') {
        return fail("Protocol error: no quotes are read in an inline command");
      }
      if (static_cast<unsigned char>(line[i]) < 0x20 || line[i] == 0x7f) {
        return fail("Protocol error: a control byte in an inline command");
      }
    }
    if (pieces_.size() == kMaxRespArguments) {
      return fail("Protocol error: more than 1024 arguments in an inline command");
    }
    pieces_.push_back({begin, i - begin});
  }
  return done(bytes);
}

RespParser::State RespParser::done(std::string_view bytes) {
  arguments_.clear();
  for (const Piece& piece : pieces_) arguments_.push_back(bytes.substr(piece.begin, piece.size));
  return State::command;
}

}  // namespace weir::node
