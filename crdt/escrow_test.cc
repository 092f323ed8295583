#include <weir/crdt/escrow.h>

#include <gtest/gtest.h>

#include <limits>

#include <weir/crdt/codec.h>

namespace weir::crdt {
namespace {

constexpr Incarnation kA{1, 1};
constexpr Incarnation kA2{1, 2};
constexpr Incarnation kB{2, 1};
constexpr Epoch kMinuteEpoch{kHour, kHour + kMinute};

bool is_a(const Incarnation& incarnation) {
  return incarnation.hi == 1;
}

TEST(Escrow, EqualMembersShareEqually) {
  ShareTable table({{{"eu", "a"}, {{}}}, {{"us", "a"}, {{}}}, {{"ap", "a"}, {{}}}});
  std::uint64_t sum = 0;
  for (const char* region : {"eu", "us", "ap"}) {
    std::uint64_t share = table.share({region, "a"}, {7, 7}, 100, 0);
    EXPECT_TRUE(share == 33 || share == 34);
    sum += share;
  }
  EXPECT_EQ(sum, 100u);
  EXPECT_EQ(table.share({"sa", "a"}, {7, 7}, 100, 0), 0u);
}

TEST(Escrow, WeightsHoldFromTheirInstantOn) {
  ShareTable table({{{"eu", "a"}, {{0, 3}}}, {{"us", "a"}, {{0, 0}, {kHour, 1}}}});
  EXPECT_EQ(table.share({"eu", "a"}, {1, 1}, 100, kHour - 1), 100u);
  EXPECT_EQ(table.share({"us", "a"}, {1, 1}, 100, kHour - 1), 0u);
  EXPECT_EQ(table.share({"eu", "a"}, {1, 1}, 100, kHour), 75u);
  EXPECT_EQ(table.share({"us", "a"}, {1, 1}, 100, kHour), 25u);
  EXPECT_EQ(table.version(0), table.version(kHour - 1));
  EXPECT_NE(table.version(0), table.version(kHour));
  ShareTable unaware({{{"eu", "a"}, {{0, 3}}}});
  EXPECT_EQ(table.version(0), unaware.version(0));
  EXPECT_NE(table.version(kHour), unaware.version(kHour));
}

TEST(Escrow, RightsAreSharePlusReceivedLessGivenAndUsed) {
  Cell cell{{{1, 1}, kMinuteEpoch}, {}, {}};
  cell.raise({kA, kUsedRow}, 10);
  cell.raise({kA, transfer_row(kB)}, 5);
  cell.raise({kB, transfer_row(kA)}, 7);
  ASSERT_TRUE(valid(cell));
  EXPECT_TRUE(is_escrow(cell));
  Succession first{{kA}, -1};
  EXPECT_EQ(rights(holding_of(cell, first, is_a), first, kMinuteEpoch, 20), 12);
  // One that took over has the same; one that did not has nothing in a window up to its fence time,
  // and of a later one what the incarnation before it left.
  Succession next{{kA2, kA}, -1};
  EXPECT_EQ(rights(holding_of(cell, next, is_a), next, kMinuteEpoch, 20), 12);
  Succession lost{{kA2}, kHour};
  EXPECT_EQ(rights(holding_of(cell, lost, is_a), lost, kMinuteEpoch, 20), 0);
  Succession later{{kA2}, kHour - 1};
  EXPECT_EQ(rights(holding_of(cell, later, is_a), later, kMinuteEpoch, 20), 5);
}

TEST(Escrow, TransfersThatMakeNoSenseAreRefused) {
  constexpr auto kMost = std::numeric_limits<std::uint64_t>::max();
  EXPECT_EQ(raised_transfer(kA, kB, 3, 8, 100), 8u);
  EXPECT_EQ(raised_transfer(kA, kB, 3, 8, 2), 5u);
  EXPECT_EQ(raised_transfer(kA, kB, kMost - 1, kMost, 100), kMost);
  EXPECT_EQ(raised_transfer(kA, kB, 8, 8, 100), std::nullopt);
  EXPECT_EQ(raised_transfer(kA, kB, 8, 3, 100), std::nullopt);
  EXPECT_EQ(raised_transfer(kA, kB, 3, 8, 0), std::nullopt);
  EXPECT_EQ(raised_transfer(kA, kB, 3, 8, -1), std::nullopt);
  EXPECT_EQ(raised_transfer(kA, kA, 3, 8, 100), std::nullopt);
  EXPECT_EQ(raised_transfer(kA, {}, 3, 8, 100), std::nullopt);
}

TEST(Escrow, TheRegistryTellsWhoTookOverFromWhom) {
  Member member{"eu", "a"};
  Nanos now = 20'000 * kDay;
  Cell before{registry_cell_before(member, now), {}, {}};
  Cell current{registry_cell(member, now), {}, {}};
  ASSERT_TRUE(is_registry(before.id));
  ASSERT_TRUE(is_registry(current.id));
  ASSERT_NE(before.id, current.id);
  EXPECT_FALSE(is_registry({{1, 1}, kMinuteEpoch}));
  before.raise({kA, kFenceRow}, 100);
  current.raise({kA2, kFenceRow}, 200);
  ASSERT_TRUE(valid(current));
  Succession alone = succession_of(kA2, &current, &before);
  EXPECT_EQ(alone.incarnations, (std::vector<Incarnation>{kA2}));
  EXPECT_EQ(alone.fence_time, 199);
  current.raise({kA2, succession_row(kA)}, 1);
  Succession both = succession_of(kA2, &current, &before);
  EXPECT_EQ(both.incarnations, (std::vector<Incarnation>{kA2, kA}));
  EXPECT_EQ(both.fence_time, 99);
  before.raise({kA, kFirstRow}, 1);
  EXPECT_EQ(succession_of(kA2, &current, &before).fence_time, -1);
  // An incarnation that nobody wrote down takes no share at all.
  EXPECT_EQ(succession_of(kB, &current, nullptr).fence_time, kNever);
}

TEST(Escrow, RowsSurviveTheCodec) {
  Delta delta;
  Cell cell{{{1, 1}, kMinuteEpoch}, {}, {}};
  cell.raise({kA, kUsedRow}, 10);
  cell.raise({kA, transfer_row(kB)}, std::numeric_limits<std::uint64_t>::max());
  delta.cells.push_back(cell);
  std::vector<std::byte> bytes;
  encode(delta, bytes);
  Delta back;
  std::string error;
  ASSERT_TRUE(decode(bytes, back, error)) << error;
  EXPECT_EQ(back, delta);
}

}  // namespace
}  // namespace weir::crdt
