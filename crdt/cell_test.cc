#include <weir/crdt/cell.h>

#include <gtest/gtest.h>

#include <limits>

namespace weir::crdt {
namespace {

constexpr Incarnation kA{0, 1};
constexpr Incarnation kB{0, 2};
constexpr std::uint64_t kMax = std::numeric_limits<std::uint64_t>::max();

TEST(Epoch, GenerationEndsAtOrAfterTheCellAndWithinAnEighthOrASecond) {
  for (Nanos lifetime :
       {kMillisecond, kSecond, 2 * kSecond, kMinute, 2 * kHour, 62 * kDay, kMaxLifetime}) {
    for (Nanos start : {Nanos{0}, Nanos{1}, 1'700'000'000 * kSecond + 7, kMaxTime}) {
      Epoch epoch{start, start + lifetime};
      ASSERT_TRUE(valid_epoch(epoch));
      Nanos end = generation_of(epoch).end();
      EXPECT_GE(end, epoch.expiry);
      EXPECT_LT(end - epoch.expiry, std::max(kSecond, lifetime / 4 + 1));
    }
  }
}

TEST(Epoch, InvalidOnesAreTold) {
  EXPECT_FALSE(valid_epoch(kBucketEpoch));
  EXPECT_FALSE(valid_epoch({5, 5}));
  EXPECT_FALSE(valid_epoch({-2, 5}));
  EXPECT_FALSE(valid_epoch({0, kMaxLifetime + 1}));
  EXPECT_FALSE(valid_epoch({kMaxTime + 1, kMaxTime + 2}));
  EXPECT_TRUE(generation_of(kBucketEpoch).is_bucket());
  EXPECT_EQ(kBucketGeneration.end(), kNever);
}

TEST(Cell, RaiseOnlyGrowsAndKeepsSlotsSorted) {
  Cell cell{{{1, 1}, {0, kMinute}}, {}, {}};
  EXPECT_TRUE(cell.raise({kB, 0}, 3));
  EXPECT_TRUE(cell.raise({kA, 0}, 5));
  EXPECT_FALSE(cell.raise({kB, 0}, 2));
  EXPECT_FALSE(cell.raise({kB, 0}, 0));
  EXPECT_EQ(cell.total(), 8u);
  EXPECT_TRUE(valid(cell));
}

TEST(Cell, WhatIsGivenBackIsAtMostWhatItsWriterCounted) {
  Cell cell{{{1, 1}, {0, kMinute}}, {}, {}};
  cell.raise({kA, 0}, 5);
  cell.raise({kA, kBackRow}, 3);
  cell.raise({kB, kBackRow}, 9);  // a part without its count
  EXPECT_TRUE(valid(cell));
  EXPECT_EQ(cell.total(), 5u);
  EXPECT_EQ(cell.given_back(), 3u);
  cell.raise({kB, 0}, 4);
  EXPECT_EQ(cell.total(), 9u);
  EXPECT_EQ(cell.given_back(), 7u);
  // A bucket's slots are named by when they were born.
  Cell bucket{{{1, 1}, kBucketEpoch}, {}, {}};
  bucket.raise({kA, kBackRow}, 3);
  EXPECT_EQ(bucket.total(), 3u);
  EXPECT_EQ(bucket.given_back(), 0u);
}

TEST(Cell, TotalSaturates) {
  Cell cell{{{1, 1}, {0, kMinute}}, {}, {}};
  cell.raise({kA, 0}, kMax);
  cell.raise({kB, 0}, 1);
  EXPECT_EQ(cell.total(), kMax);
}

TEST(Cell, APartJoinsAsTheCellDoesThatHoldsIt) {
  for (const Epoch& epoch : {kBucketEpoch, Epoch{0, kMinute}}) {
    Cell whole{{{1, 1}, epoch}, {{{kA, 0}, 5}}, {}};
    if (whole.id.is_bucket()) whole.bucket = {{5, 10, 100}, 10, 20};
    Cell parts = whole;
    Cell news{whole.id, {{{kA, 0}, 6}, {{kB, 0}, 1}}, {}};
    if (whole.id.is_bucket()) news.bucket = {{9, 11, 70}, 11, 21};
    EXPECT_TRUE(join(whole, news));
    EXPECT_TRUE(join(parts, news.slots, news.bucket));
    EXPECT_EQ(whole, parts);
    EXPECT_TRUE(valid(parts));
    EXPECT_FALSE(join(parts, news.slots, news.bucket));
  }
}

TEST(Cell, JoinCutsACheckpointThatClaimsMoreThanItsSlots) {
  Cell cell{{{1, 1}, kBucketEpoch}, {}, {}};
  cell.raise({kA, 1}, 5);
  cell.bucket = {{5, 10, 100}, 10, 20};
  Cell claims{{{1, 1}, kBucketEpoch}, {}, {}};
  claims.bucket = {{50, 11, 70}, 11, 21};
  EXPECT_FALSE(valid(claims));
  join(cell, claims);
  EXPECT_EQ(cell.bucket.checkpoint.counted, 5u);
  EXPECT_TRUE(valid(cell));
}

TEST(Cell, HostileCellsAreInvalid) {
  Cell cell{{{1, 1}, {0, kMinute}}, {{{kA, 0}, 1}}, {}};
  ASSERT_TRUE(valid(cell));
  Cell unsorted = cell;
  unsorted.slots = {{{kB, 0}, 1}, {{kA, 0}, 1}};
  EXPECT_FALSE(valid(unsorted));
  Cell twice = cell;
  twice.slots = {{{kA, 0}, 1}, {{kA, 0}, 2}};
  EXPECT_FALSE(valid(twice));
  Cell born = cell;
  born.slots = {{{kA, 7}, 1}};
  EXPECT_FALSE(valid(born));
  Cell nobody = cell;
  nobody.slots = {{{{}, 0}, 1}};
  EXPECT_FALSE(valid(nobody));
  Cell with_bucket = cell;
  with_bucket.bucket.touched = 1;
  EXPECT_FALSE(valid(with_bucket));
  Cell counts_nothing{{{1, 1}, kBucketEpoch}, {{{kA, 1}, 1}}, {{0, 5, 7}, 5, 9}};
  EXPECT_FALSE(valid(counts_nothing));
}

TEST(Bucket, DrainsExactlyAtTheRate) {
  // 3 per 7 ns: no interval of a whole number of nanoseconds.
  BucketState bucket{{5, 100, 5 * 7}, 100, 1000};
  EXPECT_EQ(debt_at(bucket, 5, 100, 3, 7, 70), 35u);
  EXPECT_EQ(debt_at(bucket, 5, 107, 3, 7, 70), 14u);
  EXPECT_EQ(debt_at(bucket, 5, 111, 3, 7, 70), 2u);
  EXPECT_EQ(debt_at(bucket, 5, 112, 3, 7, 70), 0u);
  EXPECT_EQ(debt_at(bucket, 5, kMaxTime, 3, 7, 70), 0u);
}

TEST(Bucket, UncountedUnitsCountFromTheLastTouch) {
  BucketState bucket{{5, 100, 50}, 105, 1000};
  // At 105 the checkpoint's 50 have drained to 45, and 2 more units of 10 came.
  EXPECT_EQ(debt_at(bucket, 7, 105, 1, 10, 1000), 65u);
  EXPECT_EQ(debt_at(bucket, 7, 115, 1, 10, 1000), 55u);
  // Before the touch (a clock that is behind) nothing of them has drained.
  EXPECT_EQ(debt_at(bucket, 7, 100, 1, 10, 1000), 70u);
}

TEST(Bucket, DebtIsCutBeforeItDrains) {
  BucketState bucket{{1, 100, 10}, 100, 1000};
  EXPECT_EQ(debt_at(bucket, kMax, 100, 1, 10, 200), 200u);
  EXPECT_EQ(debt_at(bucket, kMax, 300, 1, 10, 200), 0u);
}

TEST(Bucket, OwesItsCapOnceTheTotalSaturates) {
  // Counted or not: what came on top shows nowhere.
  BucketState bucket{{kMax, 100, 10}, 105, 1000};
  EXPECT_EQ(debt_at(bucket, kMax, 105, 1, 10, 200), 200u);
  EXPECT_EQ(debt_at(bucket, kMax, 205, 1, 10, 200), 100u);
  bucket.checkpoint.counted = kMax - 1;
  EXPECT_EQ(debt_at(bucket, kMax, 100, 1, 10, 200), 200u);
  EXPECT_EQ(debt_at(bucket, kMax - 1, 105, 1, 10, 200), 5u);
}

}  // namespace
}  // namespace weir::crdt
