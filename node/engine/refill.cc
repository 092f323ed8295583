#include <weir/node/engine/refill.h>

#include <algorithm>
#include <utility>

namespace weir::node {
namespace {

bool before(const crdt::Cell& a, const crdt::Cell& b) {
  return a.id < b.id;
}

}  // namespace

void Refill::prepare(storage::Recovered& disk) {
  std::sort(disk.state.cells.begin(), disk.state.cells.end(), before);
}

Refill::Refill(std::shared_ptr<storage::Recovered> disk) : disk_(std::move(disk)) {}

bool Refill::step(crdt::Replica& replica, Nanos now, std::size_t most) {
  std::vector<crdt::Cell>& cells = disk_->state.cells;
  if (taken_in_ < cells.size() && !rewritten_) {
    take_in(replica, now, most);
  } else if (!rewritten_) {
    rewritten_ =
        replica.rewrite_some(place_, most, [this](const crdt::Cell& cell) { return !has(cell); });
  } else {
    // Memory is given back in pieces, too.
    cells.resize(cells.size() - std::min(most, cells.size()));
  }
  return rewritten_ && cells.empty();
}

void Refill::take_in(crdt::Replica& replica, Nanos now, std::size_t most) {
  const std::vector<crdt::Cell>& cells = disk_->state.cells;
  crdt::Delta piece;
  if (taken_in_ == 0) piece.members = disk_->state.members;
  for (; most > 0 && taken_in_ < cells.size(); --most, ++taken_in_) {
    count_twice(replica, cells[taken_in_]);
    piece.cells.push_back(cells[taken_in_]);
  }
  replica.restore(piece, now);
}

void Refill::count_twice(const crdt::Replica& replica, const crdt::Cell& cell) {
  if (!replica.read(cell.id, held_)) return;
  for (const crdt::Slot& slot : cell.slots) {
    const bool units = cell.id.is_bucket() || slot.id.birth == 0;
    const std::uint64_t known = held_.value_of(slot.id);
    if (!units || slot.value <= known) continue;
    auto member = replica.members().find(slot.id.writer);
    const bool own = member != replica.members().end() && member->second == replica.options().self;
    if (own) counted_twice_ = add_saturated(counted_twice_, slot.value - known);
  }
}

bool Refill::has(const crdt::Cell& cell) const {
  const std::vector<crdt::Cell>& cells = disk_->state.cells;
  auto at = std::lower_bound(cells.begin(), cells.end(), cell, before);
  return at != cells.end() && *at == cell;
}

}  // namespace weir::node
