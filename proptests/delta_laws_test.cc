#include "law.h"
#include "schedules.h"

namespace weir::laws {
namespace {

using crdt::Cell;
using crdt::Delta;

/// Two replicas that hold the same and talk without faults. `a` counts, `b` listens.
struct Pair {
  static constexpr crdt::Incarnation kA{100, 1};
  static constexpr crdt::Incarnation kB{100, 2};
  crdt::Replica a{options(kA), true};
  crdt::Replica b{options(kB), true};

  explicit Pair(const Delta& held) {
    a.restore(held, kStart);
    b.restore(held, kStart);
    a.peer_up(0, kB, kStart);
    b.peer_up(0, kA, kStart);
  }
  static crdt::ReplicaOptions options(crdt::Incarnation incarnation) {
    crdt::ReplicaOptions made;
    made.incarnation = incarnation;
    made.peers = {{"other", "n"}};
    return made;
  }
  std::vector<crdt::Push> flush() {
    a.flush(kStart);
    std::vector<crdt::Push> pushes;
    for (crdt::Envelope& envelope : a.take().messages) {
      if (auto* push = std::get_if<crdt::Push>(&envelope.message))
        pushes.push_back(std::move(*push));
    }
    return pushes;
  }
  /// Delivers, and brings back what b answers. Returns what a sends on top.
  void deliver(const crdt::Push& push) {
    b.receive(0, kA, push, kStart);
    for (const crdt::Envelope& envelope : b.take().messages)
      a.receive(0, kB, envelope.message, kStart);
  }
  /// Flushes and delivers until nothing comes any more. Everything that went over.
  std::vector<crdt::Push> exchange() {
    std::vector<crdt::Push> all;
    for (int i = 0; i < 100; ++i) {
      std::vector<crdt::Push> pushes = flush();
      if (pushes.empty()) return all;
      for (crdt::Push& push : pushes) {
        deliver(push);
        all.push_back(std::move(push));
      }
    }
    RC_FAIL("the stream never ends");
    return all;
  }
};

/// A consumption in a cell by replica `writer`, as its limiter would report it. A bucket's
/// checkpoint counts everything that the cell holds.
crdt::OwnCount consumption(const crdt::Replica& replica, const crdt::CellId& id,
                           std::uint64_t units, Nanos at) {
  crdt::OwnCount own;
  own.cell = id;
  own.birth = id.is_bucket() ? static_cast<std::uint64_t>(kStart - kSecond) : 0;
  const std::optional<Cell> cell = replica.find(id);
  std::uint64_t held = !cell ? 0 : cell->value_of({replica.incarnation(), own.birth});
  std::uint64_t total = !cell ? 0 : cell->total();
  own.value = add_saturated(held, units);
  if (id.is_bucket()) {
    BucketShape shape{10, kSecond, 1000, 1};
    own.bucket =
        consume_bucket(shape, !cell ? crdt::BucketState{} : cell->bucket, total, at, units);
  }
  return own;
}

std::map<crdt::CellId, Cell> cells_in(const crdt::Replica& replica) {
  std::map<crdt::CellId, Cell> all;
  replica.for_each([&](const Cell& cell) { all.emplace(cell.id, cell); });
  return all;
}

LAW(6, "applying a delta equals applying the mutation", "windowed", "bucket",
    "a cell that both knew", "a cell that is new", "a value at its end") {
  Pair pair(*deltas().as("held by both"));
  for (const crdt::CellId& id :
       *rc::gen::nonEmpty(rc::gen::container<std::vector<crdt::CellId>>(cell_ids()))
            .as("counted in")) {
    bool known = pair.a.find(id).has_value();
    crdt::OwnCount own =
        consumption(pair.a, id, *positive_counts(), kStart - *between<Nanos>(0, 2) * kSecond);
    pair.a.count({&own, 1}, kStart);
    reached("windowed", !id.is_bucket());
    reached("bucket", id.is_bucket());
    reached("a cell that both knew", known);
    reached("a cell that is new", !known);
    reached("a value at its end", own.value == kMax);
  }
  RC_ASSERT(!pair.exchange().empty());
  RC_ASSERT(cells_in(pair.b) == cells_in(pair.a));
  RC_ASSERT(pair.b.digest() == pair.a.digest());
}

LAW(7, "the join of a state's parts is the state", "windowed", "bucket", "overlapping parts",
    "an empty part", "a thousand slots") {
  Cell whole = *cells().as("whole");
  std::size_t n = *between<std::size_t>(1, 4).as("parts");
  std::vector<Cell> parts(n);
  for (Cell& part : parts) part.id = whole.id;
  std::uint64_t seed = *between<std::uint64_t>(1, 1'000'000).as("split");
  for (std::size_t i = 0; i < whole.slots.size(); ++i) {
    std::uint64_t roll = (seed * (i + 1) * 2654435761u) >> 7;
    parts[roll % n].slots.push_back(whole.slots[i]);
    if (roll % 3 != 0 || roll % n == (roll / 3) % n) continue;
    parts[(roll / 3) % n].slots.push_back(whole.slots[i]);
    reached("overlapping parts");
  }
  if (whole.id.is_bucket()) {
    // A checkpoint travels with the slots that it counts.
    Cell& with = parts[seed % n];
    for (const crdt::Slot& slot : whole.slots) {
      if (with.total() < whole.bucket.checkpoint.counted) with.raise(slot.id, slot.value);
    }
    with.bucket = whole.bucket;
  }
  Cell joined;
  joined.id = whole.id;
  for (const Cell& part : parts) {
    RC_ASSERT(crdt::valid(part));
    reached("an empty part", part.slots.empty() && !whole.slots.empty());
    crdt::join(joined, part);
  }
  RC_ASSERT(joined == whole);
  reached("windowed", !whole.id.is_bucket());
  reached("bucket", whole.id.is_bucket());
  reached("a thousand slots", whole.slots.size() >= 1000);
}

LAW(7, "a checkpoint that lost its slots on the way claims no more than is present",
    "more than is present", "no more") {
  Cell held = *cells_of(*bucket_ids()).as("held");
  Cell part = *rivals_of(held).as("part");
  if (*chance(70)) part.slots.clear();
  Cell joined = held;
  crdt::join(joined, part);
  RC_ASSERT(joined.bucket.checkpoint.counted <= joined.total());
  std::uint64_t most = std::max(held.bucket.checkpoint.counted, part.bucket.checkpoint.counted);
  RC_ASSERT(joined.bucket.checkpoint.counted == std::min(most, joined.total()));
  reached("more than is present", most > joined.total());
  reached("no more", most <= joined.total());
}

LAW(8, "the delta to an acknowledged state is sufficient and minimal", "windowed", "bucket",
    "counted twice", "beside other writers", "nothing to send", "more than a message holds") {
  Pair pair(*deltas().as("held by both"));
  auto count = [&](const crdt::CellId& id) {
    crdt::OwnCount own = consumption(pair.a, id, *between<std::uint64_t>(1, 9), kStart - kSecond);
    pair.a.count({&own, 1}, kStart);
  };
  for (const crdt::CellId& id :
       *rc::gen::container<std::vector<crdt::CellId>>(cell_ids()).as("counted before"))
    count(id);
  pair.exchange();
  std::vector<crdt::CellId> changes =
      *rc::gen::container<std::vector<crdt::CellId>>(cell_ids()).as("counted since");
  if (*chance(3).as("many more")) {
    for (std::uint64_t i = 0; i < crdt::kMaxDeltaCells + 10; ++i) {
      changes.push_back({{i << 50, 1'000'000 + i}, {kStart, kStart + kHour}});
    }
    reached("more than a message holds");
  }
  std::map<crdt::CellId, int> times;
  for (const crdt::CellId& id : changes) {
    ++times[id];
    if (changes.size() < crdt::kMaxDeltaCells) {
      count(id);
    } else {
      crdt::OwnCount own = consumption(pair.a, id, 3, kStart - kSecond);
      pair.a.count({&own, 1}, kStart);
    }
  }
  std::map<crdt::CellId, int> sent;
  for (const crdt::Push& push : pair.exchange()) {
    RC_ASSERT(push.delta.cells.size() <= crdt::kMaxDeltaCells);
    for (const Cell& cell : push.delta.cells) {
      ++sent[cell.id];
      const Cell held = *pair.a.find(cell.id);
      if (cell.id.is_bucket()) {
        RC_ASSERT(cell == held);
        continue;
      }
      crdt::SlotId own{Pair::kA, 0};
      RC_ASSERT(cell.slots.size() == 1u);
      RC_ASSERT(cell.slots[0].id == own);
      RC_ASSERT(cell.slots[0].value == held.value_of(own));
      reached("beside other writers", held.slots.size() > 1);
    }
  }
  RC_ASSERT(sent.size() == times.size());
  for (const auto& [id, n] : times) {
    RC_ASSERT(sent[id] == 1);
    reached("counted twice", n > 1);
    reached("windowed", !id.is_bucket());
    reached("bucket", id.is_bucket());
  }
  reached("nothing to send", times.empty());
  RC_ASSERT(cells_in(pair.b) == cells_in(pair.a));
  RC_ASSERT(pair.a.peers()[0].unacked == 0u);
}

LAW(9, "grouped and single deltas agree", "several cells", "one cell twice", "buckets") {
  // The same cells as one delta, one by one, and one by one the other way round.
  std::vector<Cell> news;
  for (Cell& cell : *rc::gen::nonEmpty(rc::gen::container<std::vector<Cell>>(cells())).as("news")) {
    if (cell.slots.empty()) continue;
    if (cell.id.is_bucket()) cell.bucket.expiry = kStart + kMinute;
    for (const Cell& other : news) reached("one cell twice", other.id == cell.id);
    reached("buckets", cell.id.is_bucket());
    news.push_back(std::move(cell));
  }
  reached("several cells", news.size() > 1);
  crdt::Replica grouped(Pair::options(Pair::kA), true);
  crdt::Replica single(Pair::options(Pair::kA), true);
  crdt::Replica backward(Pair::options(Pair::kA), true);
  auto give = [&](crdt::Replica& to, std::vector<Cell> cells) {
    to.receive(0, Pair::kB, crdt::Repair{Delta{std::move(cells), {}}, {}}, kStart);
  };
  give(grouped, news);
  for (const Cell& cell : news) give(single, {cell});
  for (auto cell = news.rbegin(); cell != news.rend(); ++cell) give(backward, {*cell});
  RC_ASSERT(cells_in(grouped) == cells_in(single));
  RC_ASSERT(cells_in(grouped) == cells_in(backward));
  RC_ASSERT(grouped.digest() == backward.digest());
  RC_ASSERT(grouped.counters().invalid_cells == 0u);
}

}  // namespace
}  // namespace weir::laws
