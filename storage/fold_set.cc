#include <weir/storage/fold_set.h>

#include <algorithm>
#include <tuple>

namespace weir::storage {

void FoldSet::add(crdt::Cell&& cell) {
  Part& part = parts_[cell.id.series.hi >> (64 - kPartBits)];
  const auto place = static_cast<std::uint32_t>(part.cells.size());
  const auto [at, added] = part.places.try_emplace(cell.id, place);
  if (added) {
    part.cells.push_back(std::move(cell));
    ++size_;
  } else {
    crdt::join(part.cells[at->second], cell);
  }
}

void FoldSet::begin(Part& part) {
  taking_.cells = std::exchange(part, Part(hash_)).cells;
  order_.clear();
  next_ = 0;
  for (std::uint32_t i = 0; i < taking_.cells.size(); ++i) {
    const crdt::CellId& id = taking_.cells[i].id;
    order_.push_back({crdt::generation_of(id.epoch), id.series.hi, i});
  }
  std::sort(order_.begin(), order_.end(), [&](const Place& a, const Place& b) {
    return std::tie(a.generation, a.series, taking_.cells[a.cell].id) <
           std::tie(b.generation, b.series, taking_.cells[b.cell].id);
  });
}

std::pair<crdt::Generation, crdt::Cell> FoldSet::take() {
  while (next_ == order_.size()) begin(parts_[next_part_++]);
  const Place& place = order_[next_++];
  --size_;
  if (size_ == 0) next_part_ = 0;
  return {place.generation, std::move(taking_.cells[place.cell])};
}

}  // namespace weir::storage
