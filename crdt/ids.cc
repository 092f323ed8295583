#include <weir/crdt/ids.h>

#include <cinttypes>
#include <cstdio>

namespace weir::crdt {
namespace {

std::string hex(std::uint64_t hi, std::uint64_t lo) {
  char text[33];
  std::snprintf(text, sizeof text, "%016" PRIx64 "%016" PRIx64, hi, lo);
  return text;
}

}  // namespace

std::string to_string(const Incarnation& id) {
  return hex(id.hi, id.lo);
}
std::string to_string(const SeriesId& id) {
  return hex(id.hi, id.lo);
}

}  // namespace weir::crdt
