#pragma once

#include <cstddef>
#include <string>

namespace weir::internal {

/// A whole file of at most `max` bytes. 0, or what errno says of the failure: EFBIG if it is
/// larger, EISDIR if it is a directory. `out` is what was read so far.
int read_file(const std::string& path, std::size_t max, std::string& out);

}  // namespace weir::internal
