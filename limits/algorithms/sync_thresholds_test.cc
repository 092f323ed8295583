#include <gtest/gtest.h>
#include <weir/limits/algorithms/sync_thresholds.h>

#include <limits>

namespace weir {
namespace {

constexpr std::uint64_t kMax = std::numeric_limits<std::uint64_t>::max();

TEST(SyncThresholds, HalfFourFifthsAndTheLimit) {
  for (std::uint64_t limit : {10ull, 1000ull, 1'000'000ull, 1ull << 62}) {
    EXPECT_FALSE(crosses_sync_threshold(0, limit / 2 - 1, limit));
    EXPECT_TRUE(crosses_sync_threshold(limit / 2 - 1, limit / 2, limit));
    EXPECT_FALSE(crosses_sync_threshold(limit / 2, limit / 2 + 1, limit));
    EXPECT_TRUE(crosses_sync_threshold(limit / 2, limit - limit / 5, limit));
    EXPECT_TRUE(crosses_sync_threshold(limit - 1, limit, limit));
    EXPECT_FALSE(crosses_sync_threshold(limit, limit + 1, limit));
  }
  EXPECT_TRUE(crosses_sync_threshold(1, 2, 3));
  EXPECT_FALSE(crosses_sync_threshold(0, 5, 0));
  EXPECT_TRUE(crosses_sync_threshold(kMax - 1, kMax, kMax));
}

TEST(SyncThresholds, TheLastTenthIsFine) {
  EXPECT_TRUE(crosses_sync_threshold(91, 92, 100));
  EXPECT_FALSE(crosses_sync_threshold(88, 89, 100));
  // About 100 steps of 1/1024.
  std::uint64_t crossed = 0;
  for (std::uint64_t used = 90'000; used < 100'000; ++used) {
    crossed += crosses_sync_threshold(used, used + 1, 100'000);
  }
  EXPECT_EQ(crossed, 10'000u / (100'000u / kFineSteps) + 1);
}

TEST(SyncThresholds, AreNeverPassedUnseen) {
  for (std::uint64_t limit = 1; limit < 60; ++limit) {
    for (std::uint64_t before = 0; before < limit + 2; ++before) {
      for (std::uint64_t after = before; after < limit + 3; ++after) {
        bool single = false;
        for (std::uint64_t at = before; at < after; ++at)
          single |= crosses_sync_threshold(at, at + 1, limit);
        EXPECT_EQ(crosses_sync_threshold(before, after, limit), single) << before << ' ' << after;
      }
    }
  }
}

}  // namespace
}  // namespace weir
