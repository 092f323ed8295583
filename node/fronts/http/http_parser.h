#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace weir::node {

/// What is wrong with a request: the status that answers it, and why. Status 0: nothing.
struct HttpError {
  unsigned status = 0;
  std::string_view detail;  ///< static text, printable, without quotes
  explicit operator bool() const { return status != 0; }
};

inline constexpr std::size_t kMaxHttpHead = 16u << 10;  ///< bytes up to the empty line, it included
inline constexpr std::size_t kMaxHttpTarget = 8u << 10;
inline constexpr std::size_t kMaxHttpFields = 100;
inline constexpr std::size_t kMaxHttpNames = 16;

/// Finds where a request's head ends, in pieces as they arrive; each byte is looked at once. What
/// it says depends on the bytes only, not on how they were cut. It refuses what can't become a
/// head: control bytes, a line that does not end in CR LF, a first line that is no request line,
/// one that is too long. parse_head() checks the rest.
class HeadScanner {
 public:
  /// `data` begins with the request's first byte and holds at least what it held last time.
  HttpError scan(std::string_view data);
  /// The head's length, once it is complete; 0 before.
  std::size_t end() const { return end_; }

 private:
  HttpError end_line(std::string_view data, std::size_t at);
  std::uint32_t at_ = 0;    // looked at so far
  std::uint32_t line_ = 0;  // where the current line begins
  std::uint32_t end_ = 0;
};

/// Names of header fields that somebody wants to see. At most kMaxHttpNames, in any case.
class HttpNames {
 public:
  HttpNames() = default;
  explicit HttpNames(std::vector<std::string> names);
  std::size_t size() const { return names_.size(); }
  /// Calls `found(i)` for the i-th name if `name` is that one.
  template <typename Found>
  void find(std::string_view name, Found&& found) const {
    for (unsigned left = by_length_[name.size() & 31]; left != 0; left &= left - 1) {
      const auto i = static_cast<unsigned>(__builtin_ctz(left));
      if (same(names_[i], name)) found(i);
    }
  }

 private:
  static bool same(std::string_view lower, std::string_view any);
  std::vector<std::string> names_;
  std::array<std::uint16_t, 32> by_length_{};
};

/// A request's head. Views into the text that was parsed.
struct HttpHead {
  std::string_view method;
  std::string_view path;   ///< "/…" or "*", as it was sent; of an absolute-form target its path
  std::string_view query;  ///< what follows the first '?'
  bool http_1_0 = false;
  bool keep_alive = true;
  bool chunked = false;
  bool expect_continue = false;
  std::optional<std::uint64_t> content_length;
  /// The values of the names that are wanted, without white space around them; of a field that
  /// comes again the first. data() is null if there is none.
  std::array<std::string_view, kMaxHttpNames> fields;
  std::uint32_t repeated = 0;  ///< bit i: the i-th name came again
};

/// Parses one whole head, as HeadScanner found it. `out` holds nothing of use if there is an error.
HttpError parse_head(std::string_view head, const HttpNames& wanted, HttpHead& out);

/// Takes the chunked coding off a body, in pieces as they arrive, in place. What it says depends on
/// the bytes only, not on how they were cut. Chunk extensions and trailers are checked for form,
/// bounded (kMaxHttpChunkExtras) and dropped.
class ChunkDecoder {
 public:
  explicit ChunkDecoder(std::uint64_t max_body) : max_body_(max_body) {}

  /// Decodes the body in `data`, from `raw` on, to `plain` on (plain <= raw), and moves both.
  /// Unless done() everything has been looked at: raw is then data.size().
  HttpError decode(std::span<char> data, std::size_t& raw, std::size_t& plain);
  bool done() const { return state_ == State::done; }

 private:
  enum class State : std::uint8_t {
    size,        // before the first digit of a chunk's size
    digits,      // within the size
    extension,   // after ';'
    size_lf,     // after the line's CR
    data,        // left_ bytes of it
    data_cr,     //
    data_lf,     //
    line,        // at the beginning of a trailer, or of the empty line
    trailer,     // in a trailer's name
    value,       // in its value
    trailer_lf,  //
    last_lf,     // after the CR of the empty line
    done
  };
  HttpError step(char byte);

  std::uint64_t max_body_;
  std::uint64_t left_ = 0;   // of the chunk; its size while that is read
  std::uint64_t total_ = 0;  // bytes of all chunks so far
  std::uint32_t extras_ = 0;
  std::uint8_t digits_ = 0;
  State state_ = State::size;
};

inline constexpr std::size_t kMaxHttpChunkExtras = 4u << 10;

}  // namespace weir::node
