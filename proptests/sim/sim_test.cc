#include <gtest/gtest.h>

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include <fmt/format.h>

#include <weir/proptests/sim/world.h>

namespace weir::sim {
namespace {

constexpr std::uint64_t kPinnedFrom = 700'000;
constexpr std::uint64_t kPinned = 200;

RunOptions of_seed(std::uint64_t seed) {
  RunOptions options;
  options.seed = seed;
  return options;
}

/// Fails with the shrunk timeline of a violation.
void expect_lawful(const RunOptions& options) {
  RunResult result = run(options);
  if (!result.violated) return;
  RunOptions small = shrink(options, 60);
  small.tail = 40;
  ADD_FAILURE() << report(small, run(small));
}

TEST(Simulation, PinnedSeedsKeepTheLaws) {
  RunStats sum;
  for (std::uint64_t seed = kPinnedFrom; seed < kPinnedFrom + kPinned; ++seed) {
    SCOPED_TRACE(fmt::format("weir-sim --seed {}", seed));
    RunResult result = run(of_seed(seed));
    if (result.violated) expect_lawful(of_seed(seed));
    sum.admitted += result.stats.admitted;
    sum.over_admitted += result.stats.over_admitted;
    sum.reincarnations += result.stats.reincarnations;
    sum.satisfied += result.stats.satisfied;
    for (std::size_t i = 0; i < kFaultKinds; ++i) sum.faults[i] += result.stats.faults[i];
  }
  // What never happened was not tested.
  for (std::size_t i = 0; i < kFaultKinds; ++i) {
    EXPECT_GE(sum.faults[i], 5u) << to_string(static_cast<FaultKind>(i));
  }
  EXPECT_GT(sum.admitted, 10'000u);
  EXPECT_GT(sum.over_admitted, 0u) << "no window was ever contended across a partition";
  EXPECT_GT(sum.reincarnations, 10u);
  EXPECT_GE(sum.satisfied, 3u) << "hardly anybody ever asked for all of an escrow rule's limit";
}

TEST(Simulation, RegressionSeedsKeepTheLaws) {
  std::ifstream file(WEIR_SIM_REGRESSIONS);
  ASSERT_TRUE(file) << WEIR_SIM_REGRESSIONS;
  std::string line;
  std::size_t seeds = 0;
  while (std::getline(file, line)) {
    std::istringstream words(line.substr(0, line.find('#')));
    std::uint64_t seed = 0;
    if (!(words >> seed)) continue;
    ++seeds;
    SCOPED_TRACE(fmt::format("weir-sim --seed {}", seed));
    expect_lawful(of_seed(seed));
  }
  EXPECT_GE(seeds, 10u);
}

TEST(Simulation, TheSameSeedIsTheSameHistory) {
  std::set<std::uint64_t> hashes;
  for (std::uint64_t seed = 1; seed <= 25; ++seed) {
    RunResult first = run(of_seed(seed));
    RunOptions traced = of_seed(seed);
    traced.tail = 10;  // making lines changes nothing
    RunResult second = run(traced);
    EXPECT_EQ(first.hash, second.hash) << "seed " << seed;
    EXPECT_EQ(first.stats.events, second.stats.events) << "seed " << seed;
    EXPECT_FALSE(second.tail.empty());
    hashes.insert(first.hash);
  }
  EXPECT_EQ(hashes.size(), 25u);
}

TEST(Simulation, AFaultLeftOutIsNotInjected) {
  RunOptions options = of_seed(2);
  for (; make_scenario(options.seed).faults.empty(); ++options.seed) {
  }
  std::size_t faults = make_scenario(options.seed).faults.size();
  for (std::size_t i = 0; i < faults; ++i) options.without.insert(i);
  RunResult result = run(options);
  EXPECT_FALSE(result.violated) << result.what;
  for (std::uint64_t count : result.stats.faults) EXPECT_EQ(count, 0u);
}

TEST(Simulation, RealLmdbStoresKeepTheLaws) {
  std::string directory = fmt::format("{}/weir-sim-test-{}",
                                      std::filesystem::temp_directory_path().string(), ::getpid());
  std::uint64_t boots = 0;
  for (std::uint64_t seed = 1; seed <= 6; ++seed) {
    SCOPED_TRACE(fmt::format("weir-sim --lmdb --seed {}", seed));
    RunOptions options = of_seed(seed);
    options.lmdb_dir = directory;
    options.cut_off = 3 * kSecond;
    RunResult result = run(options);
    EXPECT_FALSE(result.violated) << report(options, result);
    if (seed <= 2) {
      EXPECT_EQ(result.hash, run(options).hash);
    }
    boots += result.stats.boots;
  }
  EXPECT_GT(boots, 8u);
  std::filesystem::remove_all(directory);
}

/// A checker that never complains proves nothing: each of these breaks a rule on purpose.
struct Broken {
  Sabotage sabotage;
  const char* name;
  std::set<int> laws;  // any of them may be the first to notice
};

class Checker : public ::testing::TestWithParam<Broken> {};

TEST_P(Checker, NoticesWhatIsBroken) {
  const Broken& broken = GetParam();
  std::size_t noticed = 0;
  for (std::uint64_t seed = 1; seed <= 400 && noticed < 3; ++seed) {
    RunOptions options = of_seed(seed);
    options.sabotage = broken.sabotage;
    options.cut_off = 20 * kSecond;
    RunResult result = run(options);
    if (!result.violated) continue;
    EXPECT_TRUE(broken.laws.contains(result.law))
        << "seed " << seed << ": law " << result.law << ": " << result.what;
    ++noticed;
  }
  EXPECT_EQ(noticed, 3u);
}

INSTANTIATE_TEST_SUITE_P(
    Simulation, Checker,
    ::testing::Values(Broken{Sabotage::lying_store, "LyingStore", {28, 29, 34}},
                      Broken{Sabotage::forgetful_store, "ForgetfulStore", {28, 29, 31, 34}},
                      Broken{Sabotage::ignored_sync_error, "IgnoredSyncError", {28, 29, 31, 34}},
                      Broken{Sabotage::counted_twice, "CountedTwice", {28, 29, 31, 32, 42, 44}},
                      Broken{Sabotage::lost_clock, "LostClock", {11}},
                      Broken{Sabotage::reused_incarnation, "ReusedIncarnation", {30}},
                      Broken{Sabotage::inflating_network, "InflatingNetwork", {29, 31}},
                      Broken{Sabotage::early_ack, "EarlyAck", {34}},
                      Broken{Sabotage::leaky_stop, "LeakyStop", {28, 29, 32}}),
    [](const auto& param) { return std::string(param.param.name); });

TEST(Shrinking, KeepsTheViolationAndDropsFaults) {
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    RunOptions options = of_seed(seed);
    options.sabotage = Sabotage::leaky_stop;
    RunResult result = run(options);
    if (!result.violated || result.scenario.faults.size() < 6) continue;
    RunOptions small = shrink(options, 100);
    small.tail = 20;
    RunResult again = run(small);
    ASSERT_TRUE(again.violated);
    EXPECT_EQ(again.law, result.law);
    EXPECT_LT(result.scenario.faults.size() - small.without.size(),
              result.scenario.faults.size() / 2);
    std::string text = report(small, again);
    EXPECT_NE(text.find(fmt::format("VIOLATION of law {}", result.law)), std::string::npos) << text;
    EXPECT_NE(text.find("fault"), std::string::npos) << text;
    return;
  }
  FAIL() << "no seed with enough faults";
}

}  // namespace
}  // namespace weir::sim
