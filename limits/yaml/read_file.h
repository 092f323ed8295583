#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace weir::internal {

/// A whole file of at most `max` bytes. 0, or what errno says of the failure: EFBIG if it is
/// larger, EISDIR if it is a directory. `out` is what was read so far.
int read_file(const std::string& path, std::size_t max, std::string& out);

/// What a change of a file changes: which file it is, how large, and when it was written. All zero
/// if there is none.
using FileLook = std::array<std::int64_t, 6>;
FileLook look_at_file(const std::string& path);

}  // namespace weir::internal
