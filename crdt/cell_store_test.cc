#include <weir/crdt/cell_store.h>

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>

namespace weir::crdt {
namespace {

TEST(CellArena, GivesEachRecordRoomOfItsOwn) {
  CellArena arena;
  std::mt19937_64 random(1);
  std::map<RecordRef, std::pair<std::size_t, std::byte>> held;
  for (int step = 0; step < 60'000; ++step) {
    if (held.empty() || random() % 5 < 3) {
      std::size_t size = 24 + (random() % 50 == 0 ? random() % 20'000 : random() % 200);
      auto mark = static_cast<std::byte>(random());
      RecordRef ref = arena.allocate(size);
      ASSERT_NE(ref, 0u);
      ASSERT_GE(arena.room(ref), size);
      ASSERT_EQ(arena.room(ref), CellArena::room_for(size));
      ASSERT_TRUE(held.emplace(ref, std::pair(size, mark)).second);
      std::fill_n(arena.at(ref), size, mark);
    } else {
      auto at = held.lower_bound(static_cast<RecordRef>(random()));
      if (at == held.end()) at = held.begin();
      auto [size, mark] = at->second;
      for (std::size_t i = 0; i < size; ++i) ASSERT_EQ(arena.at(at->first)[i], mark);
      arena.free(at->first);
      held.erase(at);
    }
  }
  for (const auto& [ref, unused] : held) arena.free(ref);
  EXPECT_EQ(arena.bytes(), 0u);
}

TEST(CellArena, WastesLittle) {
  CellArena arena;
  for (int i = 0; i < 1'000'000; ++i) arena.allocate(33);
  EXPECT_LT(arena.bytes(), 1'000'000u * 42);
}

/// An index beside a multimap.
struct Pair {
  CellIndex index;
  std::multimap<std::uint32_t, RecordRef> expected;

  void insert(std::uint32_t hash, RecordRef ref) {
    index.insert(hash, ref);
    expected.emplace(hash, ref);
  }
  void erase(std::multimap<std::uint32_t, RecordRef>::iterator at) {
    index.erase(at->first, at->second);
    expected.erase(at);
  }
  void compare() const {
    ASSERT_EQ(index.size(), expected.size());
    std::set<RecordRef> walked;
    index.walk(
        0, [](RecordRef) {}, [&](RecordRef ref) { return walked.insert(ref).second; });
    ASSERT_EQ(walked.size(), expected.size());
    for (const auto& [hash, ref] : expected) {
      ASSERT_TRUE(walked.contains(ref));
      ASSERT_EQ(index.find(hash, [&](RecordRef other) { return other == ref; }), ref);
      ASSERT_EQ(index.find(hash, [](RecordRef) { return false; }), 0u);
    }
  }
};

TEST(CellIndex, FindsWhatItHolds) {
  for (std::uint64_t hashes : {1ull, 7ull, 1'000ull, 1ull << 32}) {
    std::mt19937_64 random(hashes);
    Pair pair;
    RecordRef next = 1;
    for (int step = 0; step < 6'000; ++step) {
      // It grows, and shrinks again.
      bool grows = (step / 1'000) % 2 == 0;
      if (pair.expected.empty() || random() % 10 < (grows ? 8u : 2u)) {
        std::uint64_t spread = hashes == 1 ? ~0ull >> 32 : (1ull << 32) / hashes;
        pair.insert(static_cast<std::uint32_t>(random() % hashes * spread), next++);
      } else {
        auto at = pair.expected.lower_bound(static_cast<std::uint32_t>(random()));
        pair.erase(at == pair.expected.end() ? pair.expected.begin() : at);
      }
      if (step % 300 == 0) {
        ASSERT_NO_FATAL_FAILURE(pair.compare());
      }
    }
    ASSERT_NO_FATAL_FAILURE(pair.compare());
    std::size_t left = pair.expected.size();
    std::set<RecordRef> taken;
    while (RecordRef ref = pair.index.take_last()) taken.insert(ref);
    EXPECT_EQ(taken.size(), left);
    EXPECT_EQ(pair.index.size(), 0u);
  }
}

TEST(CellIndex, AWalkThatWasInterruptedMissesNothingThatStayed) {
  std::mt19937_64 random(5);
  Pair pair;
  for (RecordRef ref = 1; ref <= 2'000; ++ref) {
    pair.insert(static_cast<std::uint32_t>(random()), ref);
  }
  std::set<RecordRef> stayed;
  for (const auto& [hash, ref] : pair.expected) stayed.insert(ref);
  std::set<RecordRef> walked;
  RecordRef next = 10'000;
  for (std::uint64_t at = 0; at != CellIndex::kEnd;) {
    int visits = 0;
    at = pair.index.walk(
        at, [](RecordRef) {},
        [&](RecordRef ref) {
          if (++visits > 37) return false;
          walked.insert(ref);
          return true;
        });
    for (int i = 0; i < 100; ++i) pair.insert(static_cast<std::uint32_t>(random()), next++);
    auto gone = std::next(pair.expected.begin(),
                          static_cast<std::ptrdiff_t>(random() % pair.expected.size()));
    stayed.erase(gone->second);
    pair.erase(gone);
  }
  for (RecordRef ref : stayed) EXPECT_TRUE(walked.contains(ref));
}

Incarnation writer(std::uint64_t number) {
  return {number + 1, number * 7 + 1};
}

/// Cells beside a map of them, changed alike.
struct Store {
  CellStore store{42};
  std::map<CellId, Cell> expected;

  void join(const Cell& part) {
    RecordRef ref = store.find(part.id);
    ASSERT_EQ(ref != 0, expected.contains(part.id));
    Cell& cell = expected[part.id];
    cell.id = part.id;
    ASSERT_EQ(store.join(ref, part.id, part.slots, part.bucket), crdt::join(cell, part));
    ASSERT_EQ(ref, store.find(part.id));
  }

  void compare() const {
    ASSERT_EQ(store.size(), expected.size());
    std::map<Group, std::uint64_t> digests;
    std::map<Incarnation, std::uint64_t> units;
    std::size_t with_rows = 0;
    for (const auto& [id, cell] : expected) {
      HeldCell held;
      ASSERT_NE(store.find(id), 0u);
      ASSERT_EQ(store.id(store.find(id)), id);
      store.read(store.find(id), held);
      ASSERT_EQ(held.cell, cell);
      digests[group_of(id)] += digest_of(cell);
      bool rows = false;
      for (const Slot& slot : cell.slots) {
        bool row = !id.is_bucket() && slot.id.birth != 0;
        rows |= row && slot.id.birth != kBackRow;
        units[slot.id.writer] += !row || slot.id.birth == 1 ? slot.value : 0;
      }
      with_rows += rows;
      ASSERT_EQ(store.with_rows().contains(id), rows);
    }
    ASSERT_EQ(store.with_rows().size(), with_rows);
    std::size_t groups = 0;
    store.for_each_group([&](const Group& group, std::size_t, std::uint64_t digest) {
      ++groups;
      EXPECT_EQ(digests.at(group), digest);
    });
    ASSERT_EQ(groups, digests.size());
    std::map<Incarnation, std::uint64_t> told;
    store.writers().for_each([&](const Incarnation& id, std::uint64_t sum) { told[id] = sum; });
    ASSERT_EQ(told, units);
  }
};

Cell any_part(std::mt19937_64& random) {
  Cell cell;
  cell.id.series = {random() % 3 << 62, random() % 40};
  bool bucket = random() % 2 == 0;
  if (!bucket) {
    Nanos unit = random() % 2 == 0 ? kSecond : 1;
    auto start = static_cast<Nanos>(random() % 3) * unit;
    cell.id.epoch = {start, start + static_cast<Nanos>(1 + random() % 2) * 100 * unit};
  }
  for (std::uint64_t i = 0; i < random() % 4; ++i) {
    std::uint64_t birth = bucket ? random() % 3 * 1'000 : random() % 8 == 0 ? random() % 5 : 0;
    if (!bucket && random() % 40 == 0) birth = ~std::uint64_t{0} - random() % 4;
    std::uint64_t value = random() % 20 == 0 ? random() : random() % 300;
    cell.raise({writer(random() % 6), birth}, value);
  }
  if (bucket) {
    BucketState& state = cell.bucket;
    state.touched = static_cast<Nanos>(random() % 5'000'000);
    state.expiry = state.touched + static_cast<Nanos>(random() % (1u << 30));
    state.checkpoint.counted = random() % 2 == 0 ? cell.total() : random() % 100;
    state.checkpoint.at = random() % 2 == 0 ? state.touched : static_cast<Nanos>(random() % 9'000);
    state.checkpoint.debt = static_cast<DebtTicks>(random() % 1'000) << (random() % 100);
  }
  return cell;
}

TEST(CellStore, HoldsWhatAMapOfCellsWouldHold) {
  std::mt19937_64 random(3);
  Store pair;
  for (int step = 0; step < 20'000; ++step) {
    ASSERT_NO_FATAL_FAILURE(pair.join(any_part(random)));
    if (step % 400 == 0) {
      ASSERT_NO_FATAL_FAILURE(pair.compare());
    }
    if (step % 50 == 0 && !pair.expected.empty()) {
      auto at = std::next(pair.expected.begin(),
                          static_cast<std::ptrdiff_t>(random() % pair.expected.size()));
      if (!at->first.is_bucket()) continue;
      RecordRef ref = pair.store.find(at->first);
      pair.store.set_stamp(ref, 5);
      pair.store.clear(ref);
      ASSERT_EQ(pair.store.stamp(ref), 0u);
      at->second.slots.clear();
      at->second.bucket = {};
    }
  }
}

TEST(CellStore, KeepsTheStampAndTheOwnSlotWhileACellGrows) {
  CellStore store(1);
  CellId id{{1, 2}, kBucketEpoch};
  RecordRef ref = 0;
  Slot own{{writer(0), 500}, 1};
  store.join(ref, id, {&own, 1}, {{1, 600, 7}, 600, 900}, &own.id);
  store.set_stamp(ref, kMaxStamp);
  for (std::uint64_t i = 1; i < 300; ++i) {
    Slot slot{{writer(i), i}, i << 30};
    store.join(ref, id, {&slot, 1}, {});
    HeldCell held;
    store.read(ref, held);
    ASSERT_EQ(held.own, own.id);
    ASSERT_EQ(held.cell.slots.size(), i + 1);
    ASSERT_EQ(store.stamp(ref), kMaxStamp);
    ASSERT_EQ(store.find(id), ref);
  }
}

TEST(CellStore, AnEndedGenerationIsGoneAtOnceAndFreedInPieces) {
  CellStore store(1);
  for (std::uint64_t i = 0; i < 3'000; ++i) {
    CellId id{{i << 52, i}, {0, (i % 3 == 0 ? 9 : 1) * kSecond}};
    RecordRef ref = 0;
    Slot slot{{writer(i % 4), 0}, 1};
    store.join(ref, id, {&slot, 1}, {});
    store.set_stamp(ref, i + 1);
  }
  std::size_t bytes = store.bytes();
  store.end(4 * kSecond);
  EXPECT_EQ(store.size(), 1'000u);
  EXPECT_EQ(store.find({{std::uint64_t{1} << 52, 1}, {0, kSecond}}), 0u);
  std::set<std::uint64_t> stamps;
  auto freed = [&](std::uint64_t stamp, RecordRef) { stamps.insert(stamp); };
  EXPECT_TRUE(store.free_ended(700, freed));
  EXPECT_EQ(stamps.size(), 700u);
  EXPECT_TRUE(store.free_ended(700, freed));
  EXPECT_FALSE(store.free_ended(700, freed));
  EXPECT_EQ(stamps.size(), 2'000u);
  store.end(100 * kSecond);
  EXPECT_FALSE(store.free_ended(5'000, freed));
  EXPECT_EQ(store.size(), 0u);
  EXPECT_LT(store.bytes(), bytes / 4);
  int writers = 0;
  store.writers().for_each([&](const Incarnation&, std::uint64_t) { ++writers; });
  EXPECT_EQ(writers, 0);
}

TEST(CellStore, ABucketIsDueWhenTheEndComesThatItHad) {
  CellStore store(1);
  for (std::uint64_t i = 0; i < 500; ++i) {
    RecordRef ref = 0;
    Slot slot{{writer(0), 0}, 1};
    Nanos end = static_cast<Nanos>(1 + i % 10) * kSecond;
    store.join(ref, {{0, i}, kBucketEpoch}, {&slot, 1}, {{}, 1, end});
  }
  // Records that move keep their place.
  for (std::uint64_t i = 0; i < 500; i += 2) {
    CellId id{{0, i}, kBucketEpoch};
    RecordRef ref = store.find(id);
    Slot slot{{writer(1), ~std::uint64_t{0}}, ~std::uint64_t{0} >> 3};
    store.join(ref, id, {&slot, 1}, {{}, 1, 20 * kSecond});
  }
  EXPECT_EQ(store.take_due_bucket(kSecond), 0u);
  std::size_t dropped = 0;
  std::size_t again = 0;
  while (RecordRef ref = store.take_due_bucket(11 * kSecond)) {
    HeldCell held;
    store.read(ref, held);
    if (held.cell.bucket.expiry > 11 * kSecond) {
      store.put_bucket(ref, held.cell.bucket.expiry);
      ++again;
    } else {
      store.drop_bucket(ref);
      ++dropped;
    }
  }
  EXPECT_EQ(dropped, 250u);
  EXPECT_EQ(again, 250u);
  while (RecordRef ref = store.take_due_bucket(100 * kSecond)) store.drop_bucket(ref);
  EXPECT_EQ(store.size(), 0u);
  EXPECT_LT(store.bytes(), 1'000u);  // an empty index
}

TEST(CellStore, ACellWithOneWriterIsSmall) {
  CellStore windows(1);
  CellStore buckets(1);
  std::mt19937_64 random(1);
  constexpr Nanos kNow = 1'700'000'000 * kSecond;
  for (std::uint64_t i = 0; i < 200'000; ++i) {
    SeriesId series{random(), random()};
    Slot slot{{writer(0), 0}, random() % 100 + 1};
    RecordRef ref = 0;
    windows.join(ref, {series, {kNow, kNow + kMinute}}, {&slot, 1}, {});
    slot.id.birth = static_cast<std::uint64_t>(kNow + static_cast<Nanos>(random() % 60) * kSecond);
    Nanos touched = static_cast<Nanos>(slot.id.birth) + static_cast<Nanos>(random() % kMinute);
    ref = 0;
    buckets.join(ref, {series, kBucketEpoch}, {&slot, 1},
                 {{slot.value, touched, static_cast<DebtTicks>(slot.value) * kMinute},
                  touched,
                  touched + kMinute});
  }
  EXPECT_LT(windows.bytes() / 200'000, 56u);
  EXPECT_LT(buckets.bytes() / 200'000, 78u);
}

TEST(CellStore, LifetimesBeyondThoseThatHaveANumber) {
  CellStore store(1);
  constexpr Nanos kNow = 1'700'000'000 * kSecond;
  const Slot slot{{writer(0), 0}, 1};
  const Slot born{{writer(0), 7}, 1};
  std::vector<RecordRef> refs;
  for (std::uint64_t i = 1; i <= 600; ++i) {
    const Nanos lifetime = static_cast<Nanos>(i) * kSecond;
    RecordRef ref = 0;
    store.join(ref, {{i, i}, {kNow, kNow + lifetime}}, {&slot, 1}, {});
    refs.push_back(ref);
    ref = 0;
    store.join(ref, {{i, i}, kBucketEpoch}, {&born, 1}, {{1, kNow, 5}, kNow, kNow + lifetime + 1});
    refs.push_back(ref);
  }
  HeldCell held;
  for (std::uint64_t i = 1; i <= 600; ++i) {
    const Nanos lifetime = static_cast<Nanos>(i) * kSecond;
    store.read(refs[2 * i - 2], held);
    EXPECT_EQ(held.cell.id, (CellId{{i, i}, {kNow, kNow + lifetime}}));
    EXPECT_EQ(store.find(held.cell.id), refs[2 * i - 2]);
    store.read(refs[2 * i - 1], held);
    EXPECT_EQ(held.cell.bucket, (BucketState{{1, kNow, 5}, kNow, kNow + lifetime + 1}));
  }
}

}  // namespace
}  // namespace weir::crdt
