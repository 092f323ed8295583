#include <weir/crdt/escrow.h>

#include <memory>
#include <set>

#include <weir/limits/replica_side.h>

#include "generators.h"
#include "law.h"

namespace weir::laws {
namespace {

using crdt::Cell;
using crdt::Holding;
using crdt::Incarnation;
using crdt::Int128;
using crdt::Shareholder;
using crdt::ShareTable;
using crdt::Succession;
using crdt::WeightChange;

constexpr crdt::Epoch kEpoch{kStart, kStart + kHour};

crdt::Member member_of(std::size_t i) {
  return {"r" + std::to_string(i), "n"};
}

rc::Gen<std::uint32_t> weights() {
  return rc::gen::weightedOneOf<std::uint32_t>(
      {{4, between<std::uint32_t>(0, 3)},
       {2, between<std::uint32_t>(0, 1000)},
       {1, one_of<std::uint32_t>({~std::uint32_t{0}, 1u << 31})}});
}

rc::Gen<std::uint64_t> limits() {
  return rc::gen::weightedOneOf<std::uint64_t>(
      {{4, between<std::uint64_t>(0, 20)},
       {2, between<std::uint64_t>(0, 1'000'000)},
       {1, one_of<std::uint64_t>({kMax, kMax - 1, kMax / 3})}});
}

std::uint64_t sum_of_shares(const ShareTable& table, const crdt::SeriesId& series,
                            std::uint64_t limit, Nanos start) {
  Uint128 sum = 0;
  for (const Shareholder& holder : table.holders()) {
    sum += table.share(holder.member, series, limit, start);
  }
  RC_ASSERT(sum <= limit);
  return static_cast<std::uint64_t>(sum);
}

LAW(22, "shares sum to at most the limit for every epoch and version",
    "a limit smaller than the members", "weights that differ", "a member without weight",
    "nobody with a weight", "the largest limit") {
  auto n = *between<std::size_t>(1, 16).as("members");
  std::vector<Shareholder> holders;
  bool differ = false;
  for (std::size_t i = 0; i < n; ++i) {
    Shareholder holder{member_of(i), {{0, *weights()}}};
    if (*chance(40)) holder.weights.push_back({kStart, *weights()});
    differ |= holder.weights != std::vector<WeightChange>{{}};
    holders.push_back(std::move(holder));
  }
  // As each node reads them from a file of its own: in any order.
  ShareTable table(holders);
  std::reverse(holders.begin(), holders.end());
  ShareTable other(holders);
  auto limit = *limits().as("limit");
  for (Nanos start : {kStart - kHour, kStart, kStart + kHour}) {
    std::uint64_t weight = 0;
    std::set<std::uint32_t> seen;
    for (const Shareholder& holder : holders) {
      weight += holder.weight_at(start);
      seen.insert(holder.weight_at(start));
    }
    reached("weights that differ", seen.size() > 1);
    reached("a member without weight", seen.contains(0) && weight > 0);
    reached("nobody with a weight", weight == 0);
    RC_ASSERT(table.version(start) == other.version(start));
    for (std::uint64_t s = 0; s < 8; ++s) {
      crdt::SeriesId series{s << 61, s};
      // Everything is given out, so that nothing is lost by rounding.
      RC_ASSERT(sum_of_shares(table, series, limit, start) == (weight == 0 ? 0 : limit));
      for (const Shareholder& holder : holders) {
        std::uint64_t share = table.share(holder.member, series, limit, start);
        RC_ASSERT(share == other.share(holder.member, series, limit, start));
        if (weight == 0) continue;
        RC_ASSERT(share >= static_cast<Uint128>(limit) * holder.weight_at(start) / weight);
        RC_ASSERT(holder.weight_at(start) > 0 || share == 0);
        // Never less of a larger limit: nodes that know two limits hold no more than the larger.
        if (limit < kMax) RC_ASSERT(table.share(holder.member, series, limit + 1, start) >= share);
      }
      RC_ASSERT(table.share({"stranger", "n"}, series, limit, start) == 0u);
    }
  }
  reached("a limit smaller than the members", limit > 0 && limit < n);
  reached("the largest limit", limit == kMax);
}

LAW(22, "what does not divide falls to every member for some series", "one unit for all",
    "some units") {
  auto n = *between<std::size_t>(2, 7).as("members");
  auto limit = *between<std::uint64_t>(1, n - 1).as("limit");
  std::vector<Shareholder> holders;
  for (std::size_t i = 0; i < n; ++i) holders.push_back({member_of(i), {{}}});
  ShareTable table(holders);
  auto seed = *between<std::uint64_t>(0, 1000).as("seed");
  std::set<std::size_t> lucky;
  for (std::uint64_t s = 0; s < 400; ++s) {
    crdt::SeriesId series{crdt::mix64(seed, s), s};
    for (std::size_t i = 0; i < n; ++i) {
      if (table.share(member_of(i), series, limit, kStart) > 0) lucky.insert(i);
    }
  }
  RC_ASSERT(lucky.size() == n);
  reached(limit == 1 ? "one unit for all" : "some units");
}

/// Members that spend, transfer, hear of each other in any order and in part, and are born again:
/// no network, no disk, only rows. Keeps all that was ever written, as nobody does.
class Members {
 public:
  Members(std::size_t n, std::uint64_t limit) : limit_(limit) {
    std::vector<Shareholder> holders;
    for (std::size_t i = 0; i < n; ++i) holders.push_back({member_of(i), {{}}});
    shares_ = std::make_unique<ShareTable>(holders);
    truth_.id = {{1, 1}, kEpoch};
    for (std::size_t i = 0; i < n; ++i) {
      nodes_.emplace_back();
      nodes_[i].view.id = truth_.id;
      begin(i);
      nodes_[i].succession.fence_time = -1;
    }
  }

  std::size_t size() const { return nodes_.size(); }
  std::uint64_t share(std::size_t i) const {
    return shares_->share(member_of(i), truth_.id.series, limit_, kEpoch.start);
  }
  bool own(std::size_t i, const Incarnation& incarnation) const { return incarnation.hi == i + 1; }
  Int128 rights_of(std::size_t i, const Cell& cell) const {
    Holding holding =
        crdt::holding_of(cell, nodes_[i].succession,
                         [&](const Incarnation& incarnation) { return own(i, incarnation); });
    return crdt::rights(holding, nodes_[i].succession, kEpoch, share(i));
  }
  Int128 own_view(std::size_t i) const { return rights_of(i, nodes_[i].view); }
  Int128 global(std::size_t i) const { return rights_of(i, truth_); }
  const Incarnation& incarnation(std::size_t i) const {
    return nodes_[i].succession.incarnations.front();
  }
  Uint128 used() const {
    Uint128 sum = 0;
    for (const crdt::Slot& slot : truth_.slots) {
      if (slot.id.birth == crdt::kUsedRow) sum += slot.value;
    }
    return sum;
  }
  const Cell& truth() const { return truth_; }
  const Cell& view(std::size_t i) const { return nodes_[i].view; }

  bool spend(std::size_t i, std::uint64_t units) {
    if (static_cast<Int128>(units) > own_view(i)) return false;
    crdt::SlotId slot{incarnation(i), crdt::kUsedRow};
    write(i, slot, nodes_[i].view.value_of(slot) + units);
    return true;
  }
  /// `from` serves a request of what was `to`'s incarnation when it asked.
  bool serve(std::size_t from, const Incarnation& to, std::uint64_t wanted) {
    crdt::SlotId slot{incarnation(from), crdt::transfer_row(to)};
    auto value = crdt::raised_transfer(incarnation(from), to, nodes_[from].view.value_of(slot),
                                       wanted, own_view(from));
    if (!value) return false;
    write(from, slot, *value);
    return true;
  }
  std::uint64_t received(std::size_t from, const Incarnation& to) const {
    return truth_.value_of({incarnation(from), crdt::transfer_row(to)});
  }
  void hear(std::size_t i, std::size_t from, std::size_t slot) {
    const Cell& other = nodes_[from].view;
    if (slot >= other.slots.size()) {
      crdt::join(nodes_[i].view, other);
    } else {
      nodes_[i].view.raise(other.slots[slot].id, other.slots[slot].value);
    }
  }
  /// Another incarnation; with its predecessor's disk it may take over.
  void reborn(std::size_t i, bool disk) {
    Succession before = nodes_[i].succession;
    if (!disk) nodes_[i].view.slots.clear();
    begin(i);
    if (!disk) return;
    Succession& after = nodes_[i].succession;
    after.incarnations.insert(after.incarnations.end(), before.incarnations.begin(),
                              before.incarnations.end());
    after.fence_time = before.fence_time;
  }

 private:
  struct Node {
    Cell view;
    Succession succession;
  };
  void begin(std::size_t i) { nodes_[i].succession = {{{i + 1, ++incarnations_}}, kEpoch.start}; }
  void write(std::size_t i, const crdt::SlotId& slot, std::uint64_t value) {
    nodes_[i].view.raise(slot, value);
    truth_.raise(slot, value);
  }

  std::uint64_t limit_;
  std::unique_ptr<ShareTable> shares_;
  std::vector<Node> nodes_;
  Cell truth_;
  std::uint64_t incarnations_ = 0;
};

struct Asked {
  Incarnation incarnation;
  std::size_t donor = 0;
  std::uint64_t wanted = 0;
};

/// One random event. Returns what was asked, so that it can be asked again.
void happen(Members& members, std::vector<Asked>& asked, bool lose_disks = true) {
  std::size_t i = *between<std::size_t>(0, members.size() - 1);
  std::size_t j = *between<std::size_t>(0, members.size() - 1);
  switch (*choice(10)) {
    case 0:
    case 1:
    case 2:
      reached("spent", members.spend(i, *between<std::uint64_t>(1, 6)));
      return;
    case 3:
    case 4: {
      Asked request{members.incarnation(i), j,
                    members.received(j, members.incarnation(i)) + *between<std::uint64_t>(1, 6)};
      asked.push_back(request);
      reached("transferred", members.serve(request.donor, request.incarnation, request.wanted));
      return;
    }
    case 5: {
      if (asked.empty()) return;
      const Asked& again = asked[*between<std::size_t>(0, asked.size() - 1)];
      reached("an old request again", !members.serve(again.donor, again.incarnation, again.wanted));
      return;
    }
    case 6:
      if (!*chance(20)) return;
      {
        bool disk = !lose_disks || *chance(50);
        members.reborn(i, disk);
        reached(disk ? "taken over" : "a lost disk");
      }
      return;
    default:
      members.hear(i, j, *between<std::size_t>(0, 12));
  }
}

LAW(23, "over rows alone, total used never exceeds the limit", "spent", "transferred",
    "an old request again", "taken over", "a lost disk", "all used") {
  auto limit = *between<std::uint64_t>(0, 60).as("limit");
  Members members(*between<std::size_t>(1, 5).as("members"), limit);
  std::vector<Asked> asked;
  auto steps = *between<int>(0, 120).as("steps");
  for (int step = 0; step < steps; ++step) {
    happen(members, asked);
    RC_ASSERT(members.used() <= limit);
  }
  reached("all used", limit > 0 && members.used() == limit);
}

LAW(24, "own-view rights never exceed global rights", "spent", "transferred",
    "an old request again", "taken over", "a lost disk", "less than there is") {
  Members members(*between<std::size_t>(1, 5).as("members"),
                  *between<std::uint64_t>(0, 60).as("limit"));
  std::vector<Asked> asked;
  auto steps = *between<int>(0, 120).as("steps");
  for (int step = 0; step < steps; ++step) {
    happen(members, asked);
    for (std::size_t i = 0; i < members.size(); ++i) {
      RC_ASSERT(members.own_view(i) <= members.global(i));
      RC_ASSERT(members.own_view(i) >= 0);
      reached("less than there is", members.own_view(i) < members.global(i));
    }
  }
}

LAW(25, "rights are conserved: shares are what is left and what was used", "spent", "transferred",
    "an old request again", "taken over") {
  auto limit = *between<std::uint64_t>(0, 60).as("limit");
  Members members(*between<std::size_t>(1, 5).as("members"), limit);
  std::vector<Asked> asked;
  auto steps = *between<int>(0, 120).as("steps");
  for (int step = 0; step < steps; ++step) {
    happen(members, asked, false);
    Int128 left = 0;
    for (std::size_t i = 0; i < members.size(); ++i) left += members.global(i);
    RC_ASSERT(left + static_cast<Int128>(members.used()) == static_cast<Int128>(limit));
  }
  // Once everybody has heard of everything, each knows exactly what it has.
  for (int round = 0; round < 2; ++round) {
    for (std::size_t i = 0; i < members.size(); ++i) {
      for (std::size_t j = 0; j < members.size(); ++j) members.hear(i, j, ~std::size_t{0});
    }
  }
  for (std::size_t i = 0; i < members.size(); ++i) {
    RC_ASSERT(members.own_view(i) == members.global(i));
  }
}

LAW(26, "a duplicated transfer or request creates nothing", "a request again",
    "a request that a later one has overtaken", "to oneself", "more than there is",
    "of an incarnation that is gone") {
  auto limit = *between<std::uint64_t>(0, 60).as("limit");
  Members once(*between<std::size_t>(2, 4).as("members"), limit);
  Members often(once.size(), limit);
  std::vector<Asked> asked;
  for (int step = *between<int>(0, 60).as("steps"); step > 0; --step) {
    std::size_t i = *between<std::size_t>(0, once.size() - 1);
    std::size_t j = *between<std::size_t>(0, once.size() - 1);
    if (*chance(10)) {
      once.reborn(i, true);
      often.reborn(i, true);
    }
    Asked request{once.incarnation(i), j, *between<std::uint64_t>(0, 40)};
    bool served = once.serve(request.donor, request.incarnation, request.wanted);
    RC_ASSERT(often.serve(request.donor, request.incarnation, request.wanted) == served);
    reached("to oneself", i == j);
    RC_ASSERT(i != j || !served);
    reached("more than there is", request.wanted > limit);
    // Everything that was asked before comes once more, in any order: a row that is there already
    // is not raised, and what a donor could not give, it can't give now.
    asked.push_back(request);
    for (int again = *between<int>(0, 3); again > 0; --again) {
      const Asked& old = asked[*between<std::size_t>(0, asked.size() - 1)];
      std::uint64_t held = often.received(old.donor, old.incarnation);
      bool gone = true;
      for (std::size_t m = 0; m < often.size(); ++m)
        gone &= often.incarnation(m) != old.incarnation;
      reached("of an incarnation that is gone", gone);
      reached("a request that a later one has overtaken", held > old.wanted);
      reached("a request again");
      if (held < old.wanted && often.own_view(old.donor) > 0) continue;
      RC_ASSERT(!often.serve(old.donor, old.incarnation, old.wanted));
      RC_ASSERT(often.received(old.donor, old.incarnation) == held);
    }
    // The same rows, and hearing of them any number of times adds nothing.
    for (int k = 0; k < 2; ++k) often.hear(i, j, ~std::size_t{0});
    once.hear(i, j, ~std::size_t{0});
    RC_ASSERT(often.truth() == once.truth());
    RC_ASSERT(often.view(i) == once.view(i));
  }
}

LAW(27, "join, leave and reconfiguration mint nothing in an open epoch", "a member joins",
    "a member leaves", "another limit", "a window that was open") {
  auto n = *between<std::size_t>(2, 7).as("members");
  Nanos change = kStart + 2 * kHour;
  std::vector<Shareholder> before;
  std::vector<Shareholder> after;
  for (std::size_t i = 0; i < n; ++i) {
    Shareholder holder{member_of(i), {{0, *between<std::uint32_t>(0, 3)}}};
    before.push_back(holder);
    std::uint32_t weight = *between<std::uint32_t>(0, 3);
    holder.weights.push_back({change, weight});
    after.push_back(holder);
    reached("a member joins", before[i].weights[0].weight == 0 && weight > 0);
    reached("a member leaves", before[i].weights[0].weight > 0 && weight == 0);
  }
  ShareTable old_table(before);
  ShareTable new_table(after);
  auto limit = *limits().as("limit");
  auto other = *chance(50) ? limit : *limits().as("another limit");
  reached("another limit", limit != other);
  // Nodes learn of it one by one, before its instant.
  auto knows = *rc::gen::container<std::vector<bool>>(n, rc::gen::arbitrary<bool>());
  auto limits_known = *rc::gen::container<std::vector<bool>>(n, rc::gen::arbitrary<bool>());
  for (Nanos start = kStart - kHour; start <= change + kHour; start += kHour) {
    bool all_know = start >= change;
    crdt::SeriesId series{static_cast<std::uint64_t>(start), 7};
    Uint128 sum = 0;
    for (std::size_t i = 0; i < n; ++i) {
      const ShareTable& table = all_know || knows[i] ? new_table : old_table;
      std::uint64_t mine = limits_known[i] ? other : limit;
      sum += table.share(member_of(i), series, mine, start);
      RC_ASSERT(all_know || table.version(start) == old_table.version(start));
    }
    reached("a window that was open", start < change);
    RC_ASSERT(sum <= std::max(limit, other));
  }
}

LAW(27, "of a window that a later incarnation has a share of, nothing is given",
    "the last that may be", "too far ahead", "the current one") {
  Rule rule;
  rule.domain = "api";
  rule.name = "rights";
  rule.key = {"key"};
  rule.limit = *between<std::uint64_t>(2, 40).as("limit");
  rule.window = *one_of<Nanos>({kSecond, kMinute}).as("window");
  rule.enforcement = Enforcement::escrow;
  rule.durability = Durability::reserve;
  rule.on_failure = OnFailure::closed;
  LimiterOptions options;
  options.replicated = true;
  options.incarnation = {1, 1};
  options.self = member_of(0);
  options.shares = std::make_shared<const ShareTable>(
      std::vector<Shareholder>{{member_of(0), {{}}}, {member_of(1), {{}}}});
  Limiter limiter(rule_set({rule}), options);
  EscrowGrantState state;
  state.ahead = *between<Nanos>(1, 200).as("ahead") * kMillisecond * 50;
  limiter.replica_side().set_grant_state(state);
  // What it asks for itself names the rule and its windows.
  std::vector<Entry> entries{{"key", "k"}};
  RC_ASSERT(!limiter.check({"api", entries, rule.limit}, kStart).allowed);
  std::vector<RightsNeed> needs;
  limiter.replica_side().rights_needed(kStart, 0, needs);
  RC_ASSERT(needs.size() == 1u);
  crdt::CellId id = needs[0].cell;
  Nanos windows = *between<Nanos>(2, 12).as("windows later") * rule.window;
  id.epoch = {id.epoch.start + windows, id.epoch.expiry + windows};
  // An incarnation that begins at `now` has its share of what starts after now + ahead.
  Nanos apart = *one_of<Nanos>({-rule.window / 2, 0, 1, state.ahead - 1, state.ahead,
                                state.ahead + 1, 3 * state.ahead})
                     .as("until it starts");
  Nanos now = id.epoch.start - apart;
  std::uint64_t given = limiter.replica_side().give_rights(needs[0].rule, id, {2, 1}, 1, now);
  RC_ASSERT((given > 0) == (apart <= state.ahead));
  reached("the last that may be", apart == state.ahead);
  reached("too far ahead", apart > state.ahead);
  reached("the current one", apart <= 0);
}

}  // namespace
}  // namespace weir::laws
