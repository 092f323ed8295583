#include <weir/node/engine/over_admission.h>

#include <algorithm>

namespace weir::node {

void OverAdmission::heard(crdt::PeerIndex peer, Nanos now) {
  speaker_ = peer;
  Peer& state = peers_[peer];
  state.heard_at = std::max(state.heard_at, now);
  if (state.span_from == 0) state.span_from = now;
  Nanos passed = now - state.span_from;
  if (passed < kSpan) return;
  for (auto& [rule, rate] : state.rates) {
    rate.before = passed < 2 * kSpan ? rate.now : 0;
    rate.now = 0;
  }
  state.span_from = now;
}

void OverAdmission::grew(const crdt::SeriesId& rule, std::uint64_t units) {
  if (speaker_ == kNobody || units == 0) return;
  std::uint64_t& sum = peers_[speaker_].rates[rule].now;
  sum = add_saturated(sum, units);
}

std::uint64_t OverAdmission::worst_case(const crdt::SeriesId& rule, Nanos now) const {
  std::uint64_t sum = 0;
  for (const Peer& peer : peers_) {
    auto found = peer.rates.find(rule);
    if (found == peer.rates.end() || now <= peer.heard_at) continue;
    const Rate& rate = found->second;
    Nanos over = peer.heard_at - peer.span_from + (rate.before > 0 ? kSpan : 0);
    auto units = static_cast<Uint128>(add_saturated(rate.now, rate.before));
    // At least a second, or a burst in its first millisecond would be taken for a rate.
    auto span = static_cast<std::uint64_t>(std::max(over, kSecond));
    Uint128 unseen = (units * static_cast<std::uint64_t>(now - peer.heard_at) + span - 1) / span;
    sum = add_saturated(sum,
                        static_cast<std::uint64_t>(std::min<Uint128>(unseen, ~std::uint64_t{0})));
  }
  return sum;
}

void OverAdmission::sweep() {
  for (Peer& peer : peers_) {
    std::erase_if(peer.rates,
                  [](const auto& one) { return one.second.now == 0 && one.second.before == 0; });
  }
}

}  // namespace weir::node
