#pragma once

#include <cstddef>
#include <string_view>
#include <vector>

namespace weir::node {

/// Bounds of one command, as a client sends it.
inline constexpr std::size_t kMaxRespCommand = 64u << 10;  ///< bytes, with all lengths and ends
inline constexpr std::size_t kMaxRespInline = 4u << 10;    ///< bytes of an inline command's line
inline constexpr std::size_t kMaxRespArguments = 1024;     ///< the command's name included

/// Reads a client's side of RESP: commands as arrays of bulk strings
/// (`*2\r\n$3\r\nGET\r\n$1\r\na\r\n`) or as lines of words (`GET a`). Strict: lengths are decimal
/// digits without a leading zero, and every end is CR LF; an inline line may end in LF alone, as
/// with Redis. Of an inline command no quotes are read.
///
/// It keeps where it is, so that a command that arrives byte by byte is read once.
class RespParser {
 public:
  enum class State { more, command, bad };

  /// Reads on in `bytes`, which begin where the command begins: those that were given before, and
  /// those that have arrived since. The same result however they were cut.
  /// `command`: size() bytes are one; arguments() are views of them, and there are none if it says
  /// nothing (an empty line, `*0`). `bad`: error() says why, and nothing after it can be read.
  State read(std::string_view bytes);
  /// The next command begins.
  void reset();

  std::size_t size() const { return at_; }
  const std::vector<std::string_view>& arguments() const { return arguments_; }
  std::string_view error() const { return error_; }

 private:
  struct Piece {
    std::size_t begin;
    std::size_t size;
  };
  State read_array(std::string_view bytes);
  State read_line(std::string_view bytes);
  State number(std::string_view bytes, std::size_t most, std::string_view what, std::size_t& out);
  State done(std::string_view bytes);
  State fail(std::string_view error);

  std::size_t at_ = 0;        // what is before it was read
  std::size_t expected_ = 0;  // arguments; 0: not known yet
  std::size_t length_ = 0;    // of the argument that is arriving
  bool in_argument_ = false;
  std::vector<Piece> pieces_;
  std::vector<std::string_view> arguments_;
  std::string_view error_;
};

}  // namespace weir::node
