#pragma once

#include <cstddef>

namespace weir::internal {

enum class Pages : unsigned char { plain, huge };

/// Zeros of the system's, page by page as they are touched, or with `populate` at once. With
/// Pages::huge the system is asked for huge pages. @throws std::bad_alloc
void* map_zeros(std::size_t bytes, Pages pages, bool populate);
/// Of map_zeros(); null is nothing.
void unmap_zeros(void* memory, std::size_t bytes);

}  // namespace weir::internal
