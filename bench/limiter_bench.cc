// What a decision costs, beside what the same work costs without weir: a mutex around an
// std::unordered_map of token buckets.
#include <benchmark/benchmark.h>
#include <weir/crdt/ids.h>
#include <weir/limits/limiter.h>

#include <algorithm>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

constexpr weir::Nanos kNow = 1'700'000'000 * weir::kSecond;

std::vector<std::string> make_keys(std::size_t count) {
  std::vector<std::string> keys;
  for (std::size_t i = 0; i < count; ++i) keys.push_back("key-" + std::to_string(i));
  return keys;
}

std::shared_ptr<const weir::RuleSet> make_rules(int count, weir::Algorithm algorithm) {
  std::vector<weir::Rule> rules;
  for (int i = 0; i < count; ++i) {
    weir::Rule rule;
    rule.domain = "api";
    rule.name = "rule-" + std::to_string(i);
    rule.key = {"api_key"};
    rule.limit = 1'000'000'000;
    rule.algorithm = algorithm;
    rules.push_back(std::move(rule));
  }
  std::vector<weir::RuleError> errors;
  return weir::RuleSet::make(std::move(rules), errors);
}

/// The baseline.
class MutexMap {
 public:
  bool check(const std::string& key, double now) {
    std::lock_guard lock(mutex_);
    auto [at, fresh] = buckets_.try_emplace(key, Bucket{kCapacity, now});
    Bucket& bucket = at->second;
    bucket.tokens = std::min(kCapacity, bucket.tokens + (now - bucket.last) * kRate);
    bucket.last = now;
    if (bucket.tokens < 1) return false;
    bucket.tokens -= 1;
    return true;
  }

 private:
  static constexpr double kCapacity = 1e9;
  static constexpr double kRate = 1e9 / 60;
  struct Bucket {
    double tokens;
    double last;
  };
  std::mutex mutex_;
  std::unordered_map<std::string, Bucket> buckets_;
};

void BM_MutexMap(benchmark::State& state) {
  static std::unique_ptr<MutexMap> map;
  static std::vector<std::string> keys;
  if (state.thread_index() == 0) {
    keys = make_keys(static_cast<std::size_t>(state.range(0)));
    map = std::make_unique<MutexMap>();
    for (const std::string& key : keys) map->check(key, 0);
  }
  std::uint64_t at = static_cast<std::uint64_t>(state.thread_index());
  for (auto _ : state) {
    at = weir::crdt::mix64(at + 1, 7);
    benchmark::DoNotOptimize(map->check(keys[at % keys.size()], 1));
  }
  state.SetItemsProcessed(state.iterations());
}

void limiter_loop(benchmark::State& state, int rules, weir::Algorithm algorithm) {
  static std::unique_ptr<weir::Limiter> limiter;
  static std::vector<std::string> keys;
  weir::Decision decision;
  if (state.thread_index() == 0) {
    keys = make_keys(static_cast<std::size_t>(state.range(0)));
    weir::LimiterOptions options;
    options.max_series = keys.size() * static_cast<std::size_t>(rules) + 1;
    limiter = std::make_unique<weir::Limiter>(make_rules(rules, algorithm), options);
    for (const std::string& key : keys) {
      weir::Entry entry{"api_key", key};
      limiter->check({"api", {&entry, 1}, 1}, kNow, decision);
    }
  }
  std::uint64_t at = static_cast<std::uint64_t>(state.thread_index());
  for (auto _ : state) {
    at = weir::crdt::mix64(at + 1, 7);
    weir::Entry entry{"api_key", keys[at % keys.size()]};
    limiter->check({"api", {&entry, 1}, 1}, kNow, decision);
    benchmark::DoNotOptimize(decision.allowed);
  }
  state.SetItemsProcessed(state.iterations());
}

void BM_FixedWindow(benchmark::State& state) {
  limiter_loop(state, 1, weir::Algorithm::fixed_window);
}
void BM_TokenBucket(benchmark::State& state) {
  limiter_loop(state, 1, weir::Algorithm::token_bucket);
}
void BM_FourRules(benchmark::State& state) {
  limiter_loop(state, 4, weir::Algorithm::token_bucket);
}

// Keys: one that is hot, and a table that does not fit any cache.
BENCHMARK(BM_MutexMap)->Arg(1)->Arg(1'000'000)->ThreadRange(1, 2);
BENCHMARK(BM_FixedWindow)->Arg(1)->Arg(1'000'000)->ThreadRange(1, 2);
BENCHMARK(BM_TokenBucket)->Arg(1)->Arg(1'000'000)->ThreadRange(1, 2);
BENCHMARK(BM_FourRules)->Arg(1)->Arg(1'000'000)->ThreadRange(1, 2);

}  // namespace
