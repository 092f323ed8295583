// A decision on a known key allocates nothing, whatever the algorithm and the answer.
#include <gtest/gtest.h>
#include <weir/limits/counted_new.h>
#include <weir/limits/limiter.h>

#include <array>
#include <span>
#include <string>
#include <vector>

namespace weir {
namespace {

constexpr Nanos kNow = 1'000'000 * kMinute;
constexpr int kKeys = 50;

/// Every algorithm, so that a new one does not compile until it is listed.
std::vector<Algorithm> every_algorithm() {
  switch (Algorithm::fixed_window) {
    case Algorithm::fixed_window:
    case Algorithm::sliding_window:
    case Algorithm::sliding_log:
    case Algorithm::token_bucket:
    case Algorithm::leaky_bucket:
      break;
  }
  return {Algorithm::fixed_window, Algorithm::sliding_window, Algorithm::sliding_log,
          Algorithm::token_bucket, Algorithm::leaky_bucket};
}

struct Case {
  Algorithm algorithm;
  int rules;
  std::uint64_t limit;
  std::size_t descriptors = 1;  ///< of a request; the last one meets the first one's series
};

/// Allocations of 10,000 decisions on keys that were each seen before, time passing.
std::uint64_t count(const Case& given) {
  std::vector<Rule> rules;
  for (int i = 0; i < given.rules; ++i) {
    Rule rule;
    rule.domain = "api";
    rule.name = "rule-" + std::to_string(i);
    rule.key = {"api_key"};
    rule.limit = given.limit;
    rule.window = kHour;
    rule.algorithm = given.algorithm;
    rules.push_back(std::move(rule));
  }
  std::vector<RuleError> errors;
  LimiterOptions options;
  options.max_series = 1024;
  Limiter limiter(RuleSet::make(std::move(rules), errors), options);
  std::vector<std::string> keys;
  for (int i = 0; i < kKeys; ++i)
    keys.push_back("a key longer than a small string " + std::to_string(i));
  Decision decision;
  auto ask = [&](int i) {
    std::array<Entry, 4> entries;
    std::array<Descriptor, 4> descriptors;
    for (std::size_t j = 0; j < given.descriptors; ++j) {
      bool again = j > 0 && j + 1 == given.descriptors;
      int key = (i + static_cast<int>(again ? 0 : j)) % kKeys;
      entries[j] = {"api_key", keys[static_cast<std::size_t>(key)]};
      descriptors[j] = {{&entries[j], 1}, 1};
    }
    Request request{"api", {entries.data(), 1}, 1};
    request.more = std::span(descriptors).subspan(1, given.descriptors - 1);
    limiter.check(request, kNow + i * kMicrosecond, decision);
  };
  for (int i = 0; i < 2 * kKeys; ++i) ask(i);
  std::uint64_t before = allocations;
  for (int i = 2 * kKeys; i < 10'000; ++i) ask(i);
  std::uint64_t made = allocations - before;
  EXPECT_EQ(decision.allowed, given.limit > 10'000);
  EXPECT_EQ(decision.statuses.size(), static_cast<std::size_t>(given.rules) * given.descriptors);
  return made;
}

TEST(Allocation, ADecisionOnAKnownKeyAllocatesNothing) {
  for (Algorithm algorithm : every_algorithm()) {
    for (int rules : {1, 4}) {
      for (std::uint64_t limit : {1'000'000u, 2u}) {
        // A log remembers every admission, which takes memory; a denial takes none.
        if (algorithm == Algorithm::sliding_log && limit > 2) continue;
        for (std::size_t descriptors : {1u, 2u, 4u}) {
          EXPECT_EQ(count({algorithm, rules, limit, descriptors}), 0u)
              << to_string(algorithm) << ", " << rules << " rules, limit " << limit << ", "
              << descriptors << " descriptors";
        }
      }
    }
  }
}

TEST(Allocation, TheCounterCounts) {
  std::uint64_t before = allocations;
  auto made = std::make_unique<std::vector<int>>(100);
  EXPECT_EQ(made->size(), 100u);
  EXPECT_EQ(allocations - before, 2u);
}

}  // namespace
}  // namespace weir
