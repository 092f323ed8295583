// Two threads against a sequential oracle: every admission is accounted for.
#include <fmt/core.h>
#include <weir/bench/machine.h>
#include <weir/bench/parts.h>
#include <weir/bench/subject.h>

#include <barrier>
#include <deque>
#include <memory>
#include <utility>

namespace weir::bench {
namespace {

constexpr std::size_t kKeys = 64;

/// One key under one rule, by the definition of its algorithm; shares no code with weir. Costs of
/// one key are all the same, so how many of a phase's requests pass does not depend on their order.
class Oracle {
 public:
  Oracle(Algorithm algorithm, std::uint64_t limit, Nanos window, std::uint64_t burst)
      : algorithm_(algorithm), limit_(limit), window_(window), burst_(burst) {}

  bool take(Nanos now, std::uint64_t cost) {
    auto window = static_cast<std::uint64_t>(window_);
    if (is_bucket(algorithm_)) {
      Uint128 came = static_cast<Uint128>(limit_) * static_cast<std::uint64_t>(now - at_);
      debt_ -= std::min(debt_, came);
      at_ = now;
      Uint128 owed = debt_ + static_cast<Uint128>(cost) * window;
      if (owed > static_cast<Uint128>(burst_) * window) return false;
      debt_ = owed;
      return true;
    }
    if (algorithm_ == Algorithm::sliding_log) {
      while (!log_.empty() && log_.front().first <= now - window_) {
        count_ -= log_.front().second;
        log_.pop_front();
      }
      if (count_ + cost > limit_) return false;
      log_.emplace_back(now, cost);
      count_ += cost;
      return true;
    }
    std::int64_t index = now / window_;
    if (index != index_) {
      before_ = index == index_ + 1 ? count_ : 0;
      count_ = 0;
      index_ = index;
    }
    std::uint64_t weight = algorithm_ == Algorithm::sliding_window
                               ? window - static_cast<std::uint64_t>(now % window_)
                               : 0;
    Uint128 used = static_cast<Uint128>(before_) * weight + static_cast<Uint128>(count_) * window;
    if (used + static_cast<Uint128>(cost) * window > static_cast<Uint128>(limit_) * window) {
      return false;
    }
    count_ += cost;
    return true;
  }

 private:
  Algorithm algorithm_;
  std::uint64_t limit_;
  Nanos window_;
  std::uint64_t burst_;
  std::int64_t index_ = 0;
  std::uint64_t before_ = 0;
  std::uint64_t count_ = 0;
  std::deque<std::pair<Nanos, std::uint64_t>> log_;
  Uint128 debt_ = 0;
  Nanos at_ = 0;
};

Json exact(Algorithm algorithm, std::uint64_t operations) {
  constexpr std::uint64_t kPhases = 200;
  constexpr Nanos kWindow = 2 * kSecond;
  constexpr Nanos kPhaseTime = 274 * kMillisecond;  // no divisor of the window
  std::uint64_t per_phase = operations / kPhases;
  Rule rule;
  rule.domain = "api";
  rule.name = "exact";
  rule.key = {"api_key"};
  rule.window = kWindow;
  rule.algorithm = algorithm;
  // A window sees 7.3 phases of both threads; the rare keys stay below this, the others pass it.
  rule.limit = per_phase * 2 / kKeys * 4;
  if (is_bucket(algorithm)) rule.burst = rule.limit / 3;
  if (algorithm == Algorithm::sliding_log) rule.limit = std::min<std::uint64_t>(rule.limit, 1000);
  Limiter limiter(make_rules({rule}), sized(kKeys * 2));

  // Key k costs 1 + k % 3. Half of the requests are for key 0.
  auto key_at = [](std::uint64_t& seed) {
    std::uint64_t random = next_random(seed);
    return static_cast<std::size_t>(random & 1 ? 0 : (random >> 8) % kKeys);
  };
  auto time_at = [](std::uint64_t phase) {
    return kStart + static_cast<Nanos>(phase) * kPhaseTime;
  };
  using Counts = std::vector<std::array<std::uint64_t, kKeys>>;
  std::array<Counts, 2> admitted{Counts(kPhases), Counts(kPhases)};
  std::barrier phase_ends(2);
  std::uint64_t ns = run_threads(2, [&](int thread) {
    Caller caller(limiter);
    auto seed = static_cast<std::uint64_t>(thread);
    for (std::uint64_t phase = 0; phase < kPhases; ++phase) {
      auto& mine = admitted[static_cast<std::size_t>(thread)][phase];
      for (std::uint64_t i = 0; i < per_phase; ++i) {
        std::size_t key = key_at(seed);
        mine[key] += caller.check(key_of(key), time_at(phase), 1 + key % 3);
      }
      phase_ends.arrive_and_wait();
    }
  });

  std::vector<Oracle> oracles(kKeys, Oracle(algorithm, rule.limit, rule.window, rule.burst));
  std::array<std::uint64_t, 2> seeds{0, 1};
  std::uint64_t passed = 0;
  for (std::uint64_t phase = 0; phase < kPhases; ++phase) {
    std::array<std::uint64_t, kKeys> expected{};
    for (std::uint64_t& seed : seeds) {
      for (std::uint64_t i = 0; i < per_phase; ++i) {
        std::size_t key = key_at(seed);
        expected[key] += oracles[key].take(time_at(phase), 1 + key % 3);
      }
    }
    for (std::size_t key = 0; key < kKeys; ++key) {
      std::uint64_t got = admitted[0][phase][key] + admitted[1][phase][key];
      passed += got;
      if (got == expected[key]) continue;
      throw std::runtime_error(fmt::format("{}, phase {}, key {}: {} admitted, the oracle says {}",
                                           to_string(algorithm), phase, key, got, expected[key]));
    }
  }
  std::uint64_t asked = per_phase * kPhases * 2;
  if (passed == 0 || passed == asked) throw std::runtime_error("only one answer was ever given");
  say(fmt::format("{}: {} of {} admitted, as the oracle says", to_string(algorithm), passed,
                  asked));
  return {{"algorithm", to_string(algorithm)},
          {"operations", asked},
          {"admitted", passed},
          {"seconds", round_to(static_cast<double>(ns) / 1e9, 2)}};
}

}  // namespace

Json part_exact(const PartOptions& options) {
  std::uint64_t operations = options.keys != 0 ? options.keys
                             : options.quick   ? 1'000'000
                                               : 10'000'000;
  Json rows = Json::array();
  for (Algorithm algorithm :
       {Algorithm::fixed_window, Algorithm::sliding_window, Algorithm::sliding_log,
        Algorithm::token_bucket, Algorithm::leaky_bucket}) {
    rows.push_back(exact(algorithm, operations));
  }
  Json out;
  out["rows"] = rows;
  out["figures"] = {{"exact_operations_per_algorithm", rows[0]["operations"]}};
  return out;
}

}  // namespace weir::bench
