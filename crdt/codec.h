#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <weir/crdt/cell.h>

namespace weir::crdt {

/// Packed bytes of a delta, for disks: a table of writers, then cells with variable-length
/// integers. The format is in docs/storage-format.md; kCodecVersion is its first byte.
inline constexpr std::uint8_t kCodecVersion = 1;

/// Largest encoding that decode() accepts.
inline constexpr std::size_t kMaxEncodedDelta = 64u << 20;

/// Appends the encoding of `delta` to `out`.
void encode(const Delta& delta, std::vector<std::byte>& out);

/// Reads a whole encoding. Hostile bytes are safe: every length is checked before memory is taken,
/// every cell with valid(). On failure returns false, names what was wrong in `error`, and leaves
/// `out` unspecified.
bool decode(std::span<const std::byte> bytes, Delta& out, std::string& error);

}  // namespace weir::crdt
