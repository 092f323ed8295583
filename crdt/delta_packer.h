#pragma once

#include <cstddef>
#include <map>
#include <utility>

#include <weir/crdt/cell.h>
#include <weir/crdt/message.h>

namespace weir::crdt {

/// Fills deltas that keep to the bounds of one message, and names the writers of what they carry.
class DeltaPacker {
 public:
  /// `members` outlives it.
  explicit DeltaPacker(const std::map<Incarnation, Member>& members) : members_(&members) {}
  bool fits(const Cell& cell) const {
    return delta_.cells.empty() ||
           (delta_.cells.size() < kMaxDeltaCells && slots_ + cell.slots.size() <= kMaxDeltaSlots);
  }
  void add(Cell cell) {
    slots_ += cell.slots.size();
    for (const Slot& slot : cell.slots) name(slot.id.writer);
    delta_.cells.push_back(std::move(cell));
  }
  bool empty() const { return delta_.empty(); }
  Delta take() {
    slots_ = 0;
    named_ = {};
    return std::exchange(delta_, {});
  }

 private:
  void name(const Incarnation& writer) {
    if (writer == named_) return;
    named_ = writer;
    if (delta_.members.contains(writer)) return;
    auto member = members_->find(writer);
    if (member != members_->end()) delta_.members.insert(*member);
  }

  const std::map<Incarnation, Member>* members_;
  Delta delta_;
  std::size_t slots_ = 0;
  Incarnation named_;  // the last writer
};

}  // namespace weir::crdt
