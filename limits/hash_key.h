#pragma once

#include <array>
#include <cstdint>

namespace weir {

/// Secret from which series ids are made. All nodes of a cluster need the same one; whoever knows
/// it can make keys collide.
using HashKey = std::array<std::uint8_t, 16>;

}  // namespace weir
