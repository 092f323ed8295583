#include <weir/crdt/writers.h>

namespace weir::crdt {

std::uint32_t Writers::found(const Incarnation& writer) {
  auto [at, added] = numbers_.try_emplace(writer, 0);
  recent_[writer.lo % recent_.size()] = at->second;
  if (!added) return at->second;
  if (unused_.empty()) {
    at->second = static_cast<std::uint32_t>(writers_.size());
    writers_.emplace_back();
  } else {
    at->second = unused_.back();
    unused_.pop_back();
  }
  writers_[at->second] = {writer, 0, 0};
  return recent_[writer.lo % recent_.size()] = at->second;
}

void Writers::add(std::uint32_t number, std::uint64_t units) {
  ++writers_[number].slots;
  writers_[number].units += units;
}

void Writers::remove(std::uint32_t number, std::uint64_t units) {
  Writer& writer = writers_[number];
  writer.units -= units;
  if (--writer.slots > 0) return;
  numbers_.erase(writer.id);
  writer.id = {};
  unused_.push_back(number);
}

}  // namespace weir::crdt
