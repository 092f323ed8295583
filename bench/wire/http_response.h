#pragma once

#include <cstddef>
#include <optional>
#include <string_view>

namespace weir::bench {

/// The head of an HTTP/1.1 response.
struct ResponseHead {
  int status = 0;
  std::size_t size = 0;  ///< bytes of head and body
};

/// Reads the response that `bytes` begin with, as far as a load generator must: its status and its
/// length, by Content-Length; a response without one has no body, as 204 has none. Nothing if the
/// head is not complete yet; the body need not be there. Throws std::runtime_error for what is no
/// response, or one in chunks.
std::optional<ResponseHead> read_response(std::string_view bytes);

}  // namespace weir::bench
