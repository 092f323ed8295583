#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include <weir/crdt/ids.h>
#include <weir/crdt/replica.h>
#include <weir/crdt/time.h>

namespace weir::node {

/// How much each rule may be over its limit at most, as far as this node can tell now: for each
/// peer the time since it was last heard, times the rate at which that peer lately consumed of the
/// rule. That is what it may have admitted meanwhile of which nothing is known here; a peer that
/// cannot be reached goes on, as far as anyone knows, as it did.
///
/// Fed from what is absorbed, never by a decision. Not thread-safe.
class OverAdmission {
 public:
  /// A rate is that of the last kSpan, or twice as much.
  static constexpr Nanos kSpan = 5 * kSecond;

  explicit OverAdmission(std::size_t peers) : peers_(peers) {}

  /// A message of this peer is looked at: what grows until done() is its news.
  void heard(crdt::PeerIndex peer, Nanos now);
  void done() { speaker_ = kNobody; }
  /// `units` of a rule were absorbed. Nobody's news, if no message is looked at: of a restored
  /// state that says nothing of a rate.
  void grew(const crdt::SeriesId& rule, std::uint64_t units);
  /// Units, rounded up. `rule` as in Limiter::rule_identity.
  std::uint64_t worst_case(const crdt::SeriesId& rule, Nanos now) const;
  /// Forgets rates of rules that nobody uses any more.
  void sweep();

 private:
  static constexpr std::size_t kNobody = ~std::size_t{0};
  struct Rate {
    std::uint64_t now = 0;     // units in the current span
    std::uint64_t before = 0;  // and in the one before
  };
  struct Peer {
    Nanos heard_at = 0;  // 0: never
    Nanos span_from = 0;
    std::map<crdt::SeriesId, Rate> rates;
  };

  std::vector<Peer> peers_;
  std::size_t speaker_ = kNobody;
};

}  // namespace weir::node
