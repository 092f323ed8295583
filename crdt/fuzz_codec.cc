// Fuzz target (scripts/fuzz): arbitrary bytes as a packed delta, from a peer and from a disk.
#include <cstdint>
#include <cstdlib>
#include <span>
#include <string>
#include <vector>

#include <weir/crdt/codec.h>

namespace {

void expect(bool holds) {
  if (!holds) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace weir::crdt;
  const std::span bytes(reinterpret_cast<const std::byte*>(data), size);
  const DeltaBounds bounds{16, 64, 8, 8};
  std::string error;
  Delta small;
  if (decode(bytes, bounds, small, error)) {
    expect(small.cells.size() <= bounds.cells && small.members.size() <= bounds.members);
  }
  Delta delta;
  if (!decode(bytes, delta, error)) {
    expect(!error.empty());
    return 0;
  }
  // What was taken is valid, means the same once it was sent on, and joins with itself to itself.
  std::vector<std::byte> again;
  encode(delta, again);
  Delta twice;
  expect(decode(again, twice, error));
  expect(twice == delta);
  for (Cell& cell : delta.cells) {
    expect(valid(cell));
    const Cell same = cell;
    expect(!join(cell, same) && cell == same);
  }
  return 0;
}
