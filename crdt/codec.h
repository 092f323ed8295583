#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include <weir/crdt/cell.h>

namespace weir::crdt {

/// Packed bytes of a delta, for messages and for disks: tables of what is named often, then the
/// cells in runs of those that are alike. docs/encoded-delta.md has the format; kCodecVersion is
/// its first byte.
inline constexpr std::uint8_t kCodecVersion = 2;

/// Largest encoding that decode() accepts.
inline constexpr std::size_t kMaxEncodedDelta = 64u << 20;

/// What a delta that decode() accepts has at most.
struct DeltaBounds {
  std::size_t cells = std::numeric_limits<std::size_t>::max();
  std::size_t slots = std::numeric_limits<std::size_t>::max();
  std::size_t writers = std::numeric_limits<std::size_t>::max();
  std::size_t members = std::numeric_limits<std::size_t>::max();
};

/// Appends the encoding of `delta` to `out`. Cells keep their order.
void encode(const Delta& delta, std::vector<std::byte>& out);

/// Reads a whole encoding. Hostile bytes are safe: every count is checked before memory is taken,
/// which is at most some forty times the bytes, and every cell with valid(). On failure returns
/// false, names what was wrong in `error`, and leaves `out` unspecified.
bool decode(std::span<const std::byte> bytes, const DeltaBounds& bounds, Delta& out,
            std::string& error);

/// The same from a disk: without bounds, and of version 1 too, which a store may still hold.
bool decode(std::span<const std::byte> bytes, Delta& out, std::string& error);

}  // namespace weir::crdt
