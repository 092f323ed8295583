#include <weir/limits/replica_side.h>

#include <weir/limits/limiter/limiter_impl.h>

namespace weir {

void ReplicaSide::mark_durable(const crdt::OwnCount& count) {
  impl_->mark_durable(count);
}

void ReplicaSide::set_grant_state(const EscrowGrantState& state) {
  impl_->escrow.set_grant_state(state);
}

std::optional<std::uint64_t> ReplicaSide::absorb_rows(const crdt::CellId& cell,
                                                      const EscrowOthers& others) {
  return impl_->absorb_rows(cell, others);
}

std::uint64_t ReplicaSide::give_rights(const crdt::SeriesId& rule, const crdt::CellId& cell,
                                       const crdt::Incarnation& to, std::uint64_t wanted, Nanos now,
                                       bool all) {
  return impl_->give_rights(rule, cell, to, wanted, now, all);
}

std::vector<RightsLeft> ReplicaSide::rights_left(Nanos now, std::size_t max) {
  return impl_->rights_left(now, max);
}

void ReplicaSide::rights_needed(Nanos now, Nanos lead, std::vector<RightsNeed>& out) {
  impl_->rights_needed(now, lead, out);
}

bool ReplicaSide::drain(std::vector<crdt::OwnCount>& out, std::size_t max) {
  return impl_->drain(out, max);
}

bool ReplicaSide::absorb(const crdt::Cell& cell) {
  Growth growth;
  return impl_->absorb(cell, growth);
}

bool ReplicaSide::absorb(const crdt::Cell& cell, Growth& growth) {
  growth = {};
  return impl_->absorb(cell, growth);
}

bool ReplicaSide::restore(const crdt::Cell& cell, Growth& growth) {
  growth = {};
  return impl_->absorb(cell, growth, true);
}

std::size_t ReplicaSide::let_go(std::size_t most, const DurableCount& kept) {
  return impl_->let_go(most, kept);
}

void ReplicaSide::warm(const Request& request, Nanos now, std::vector<crdt::CellId>& out) {
  impl_->warm(request, now, out);
}

void ReplicaSide::reset(const crdt::Cell& cell, const crdt::Slot& gone) {
  impl_->reset(cell, gone);
}

void ReplicaSide::rebase(const crdt::Incarnation& fresh, const DurableCount& durable) {
  impl_->rebase(fresh, durable);
}

}  // namespace weir
