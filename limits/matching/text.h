#pragma once

#include <cstdint>
#include <cstring>
#include <string_view>

namespace weir::internal {

/// a == b, inlined: descriptor keys and domains are a few bytes long, and a call of memcmp costs
/// more than comparing them.
inline bool same_text(std::string_view a, std::string_view b) {
  if (a.size() != b.size()) return false;
  std::size_t size = a.size();
  if (size > 16) return std::memcmp(a.data(), b.data(), size) == 0;
  auto differ = [&]<typename Word>(Word, std::size_t at) {
    Word x;
    Word y;
    std::memcpy(&x, a.data() + at, sizeof x);
    std::memcpy(&y, b.data() + at, sizeof y);
    return static_cast<Word>(x ^ y);
  };
  // The first and the last bytes; they may overlap.
  if (size >= 8) return (differ(std::uint64_t{}, 0) | differ(std::uint64_t{}, size - 8)) == 0;
  if (size >= 4) return (differ(std::uint32_t{}, 0) | differ(std::uint32_t{}, size - 4)) == 0;
  if (size == 0) return true;
  return a[0] == b[0] && a[size / 2] == b[size / 2] && a[size - 1] == b[size - 1];
}

}  // namespace weir::internal
