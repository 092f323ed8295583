// What the measurements stand on: keys, distributions, the histogram, the baselines.
#include <gtest/gtest.h>
#include <weir/bench/baselines.h>
#include <weir/bench/histogram.h>
#include <weir/bench/keys.h>
#include <weir/bench/subject.h>

#include <algorithm>
#include <set>
#include <string>

namespace weir::bench {
namespace {

TEST(Keys, AreSixteenHexadecimalDigitsAndDiffer) {
  std::set<std::string> seen;
  for (std::uint64_t i = 0; i < 20'000; ++i) {
    std::string key(key_of(i).view());
    EXPECT_EQ(key.size(), 16u);
    EXPECT_EQ(key.find_first_not_of("0123456789abcdef"), std::string::npos) << key;
    EXPECT_TRUE(seen.insert(key).second) << key;
  }
}

TEST(Keys, ZipfHasTheSharesOfItsDefinition) {
  constexpr std::uint64_t kRanks = 1000;
  double all = 0;
  for (std::uint64_t k = 1; k <= kRanks; ++k) all += std::pow(static_cast<double>(k), -0.99);
  std::vector<double> seen(kRanks);
  Zipf zipf(kRanks, 0.99);
  std::uint64_t seed = 1;
  constexpr int kDraws = 400'000;
  for (int i = 0; i < kDraws; ++i) ++seen.at(zipf(seed));
  for (std::uint64_t rank : {0, 1, 2, 9, 99}) {
    double expected = std::pow(static_cast<double>(rank + 1), -0.99) / all * kDraws;
    EXPECT_NEAR(seen[rank], expected, 5 * std::sqrt(expected)) << rank;
  }
}

TEST(Keys, CostsHaveTheirMedianAndATail) {
  auto costs = draw_costs(1, 100'000);
  std::sort(costs.begin(), costs.end());
  EXPECT_EQ(costs.front(), 1);
  EXPECT_EQ(costs[costs.size() / 2], 1);
  EXPECT_NEAR(costs[costs.size() * 84 / 100], 3, 1);  // e^1, one sigma above
  EXPECT_GT(costs.back(), 20);
}

TEST(Histogram, QuantilesAreWithinAHundredth) {
  Histogram times;
  std::vector<std::uint64_t> values;
  std::uint64_t seed = 1;
  for (int i = 0; i < 50'000; ++i) {
    std::uint64_t value = next_random(seed) >> (next_random(seed) % 63 + 1);
    values.push_back(value);
    times.record(value);
  }
  std::sort(values.begin(), values.end());
  for (double q : {0.0, 0.01, 0.5, 0.9, 0.99, 0.999}) {
    auto exact = static_cast<double>(
        values[static_cast<std::size_t>(q * static_cast<double>(values.size()))]);
    auto got = static_cast<double>(times.quantile(q));
    EXPECT_GE(got, exact) << q;
    EXPECT_LE(got, exact * 1.01 + 1) << q;
  }
  EXPECT_EQ(times.quantile(1), values.back());
  EXPECT_EQ(Histogram().quantile(0.5), 0u);
  Histogram twice = times;
  twice.add(times);
  EXPECT_EQ(twice.count(), 2 * times.count());
  EXPECT_EQ(twice.quantile(0.9), times.quantile(0.9));
}

TEST(Baselines, TheBareTableFindsItsKeysAndNoOthers) {
  for (bool huge : {false, true}) {
    BareTable table(10'000, huge);
    for (std::uint64_t i = 0; i < 10'000; ++i) table.insert(key_of(i));
    std::array<Key16, 16> batch;
    for (std::uint64_t i = 0; i < 20'000; ++i) {
      EXPECT_EQ(table.check(key_of(i), 0), i < 10'000);
      batch[i % 16] = key_of(i);
      if (i % 16 == 15) {
        EXPECT_EQ(table.check_batch(batch), i < 10'000 ? 16u : 0u);
      }
    }
  }
}

template <typename Table>
void expect_a_bucket() {
  Table table(100);
  for (std::uint64_t i = 0; i < 100; ++i) EXPECT_TRUE(table.check(key_of(i), kStart));
  TokenBucket bucket;
  bucket.tokens = 1;
  bucket.last = kStart;
  EXPECT_TRUE(bucket.take(kStart));
  EXPECT_FALSE(bucket.take(kStart));
  EXPECT_TRUE(bucket.take(kStart + 60));  // one token comes every 60 ns
}

TEST(Baselines, TokenBuckets) {
  expect_a_bucket<StdBuckets>();
#ifdef WEIR_BENCH_ABSL
  expect_a_bucket<AbslBuckets>();
#endif
#ifdef WEIR_BENCH_TBB
  expect_a_bucket<TbbBuckets>();
#endif
}

TEST(Baselines, GcraAdmitsItsBurstAndThenItsRate) {
  AtomicGcra gcra(100, 300);
  int burst = 0;
  while (gcra.check(1000)) ++burst;
  EXPECT_EQ(burst, 4);
  EXPECT_FALSE(gcra.check(1099));
  EXPECT_TRUE(gcra.check(1100));
}

TEST(Subject, TakesTheBatchFormWhereThereIsOne) {
  struct WithBatches {
    int batches = 0;
    int singles = 0;
    void check(const Request&, Nanos, Decision&) { ++singles; }
    void check(std::span<const Request>, Nanos, std::span<Decision>) { ++batches; }
  } limiter;
  std::array<Request, 3> requests{};
  std::array<Decision, 3> decisions{};
  check_batch(limiter, requests, kStart, decisions);
  EXPECT_EQ(limiter.batches, 1);
  EXPECT_EQ(limiter.singles, 0);
}

TEST(Subject, ABatchDecidesAsOneAfterTheOther) {
  for (bool generous : {true, false}) {
    Limiter together(key_rules(2, Algorithm::token_bucket, generous), sized(100));
    Limiter apart(key_rules(2, Algorithm::token_bucket, generous), sized(100));
    Caller batches(together);
    Caller singles(apart);
    std::array<Key16, kBatch> keys;
    for (std::size_t i = 0; i < kBatch; ++i) keys[i] = key_of(i % 5);  // each several times
    unsigned expected = 0;
    for (const Key16& key : keys) expected += singles.check(key, kStart);
    EXPECT_EQ(batches.check_batch(keys, kStart), expected);
    EXPECT_EQ(expected, generous ? 16u : 5u);
  }
}

}  // namespace
}  // namespace weir::bench
