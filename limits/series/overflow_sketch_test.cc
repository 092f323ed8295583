#include <weir/limits/series/overflow_sketch.h>

#include <gtest/gtest.h>

#include <map>
#include <random>

namespace weir {
namespace {

constexpr Nanos kNow = 1'000'000 * kHour;

TEST(OverflowSketch, NeverCountsLess) {
  OverflowSketch sketch;
  std::mt19937_64 random(1);
  std::map<std::pair<std::uint64_t, std::int64_t>, std::uint64_t> exact;
  std::uint64_t all = 0;
  for (int i = 0; i < 300'000; ++i) {
    std::uint64_t key = random() % 100'000;
    auto period = static_cast<std::int64_t>(random() % 3);
    std::uint64_t units = random() % 4;
    sketch.add({key, ~key}, period, units, kNow + kMinute, kNow);
    exact[{key, period}] += units;
    all += units;
  }
  std::uint64_t over = 0;
  for (const auto& [key, units] : exact) {
    std::uint64_t estimate = sketch.estimate({key.first, ~key.first}, key.second, kNow);
    ASSERT_GE(estimate, units);
    over = std::max(over, estimate - units);
  }
  EXPECT_LT(over, 3 * all / OverflowSketch::kColumns);
}

TEST(OverflowSketch, ForgetsWhatIsOver) {
  OverflowSketch sketch;
  EXPECT_EQ(sketch.estimate({1, 2}, 3, kNow), 0u);
  sketch.add({1, 2}, 3, 5, kNow + 10, kNow);
  EXPECT_EQ(sketch.estimate({1, 2}, 3, kNow + 9), 5u);
  EXPECT_EQ(sketch.estimate({1, 2}, 4, kNow + 9), 0u);
  EXPECT_EQ(sketch.estimate({1, 2}, 3, kNow + 10), 0u);
  sketch.add({1, 2}, 3, 2, kNow + 20, kNow + 10);
  EXPECT_EQ(sketch.estimate({1, 2}, 3, kNow + 10), 2u);
}

TEST(OverflowSketch, Saturates) {
  OverflowSketch sketch;
  sketch.add({1, 2}, 3, ~std::uint64_t{0}, kNow + 10, kNow);
  sketch.add({1, 2}, 3, 7, kNow + 10, kNow);
  EXPECT_EQ(sketch.estimate({1, 2}, 3, kNow), ~std::uint64_t{0});
}

}  // namespace
}  // namespace weir
