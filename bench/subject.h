#pragma once

// The limiter as the measurements use it: rules, a table of known keys, and one call a decision.

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include <weir/bench/keys.h>
#include <weir/limits/limiter.h>

namespace weir::bench {

/// Where time starts: the beginning of an hour. Measurements pass less than one.
inline constexpr Nanos kStart = 472'222 * kHour;
/// Time that passes between two decisions of one thread.
inline constexpr Nanos kStep = 100;

inline constexpr std::size_t kBatch = 16;

/// Decides a batch, by the limiter's batch form if it has one.
template <typename AnyLimiter>
void check_batch(AnyLimiter& limiter, std::span<const Request> requests, Nanos now,
                 std::span<Decision> out) {
  if constexpr (requires { limiter.check(requests, now, out); }) {
    limiter.check(requests, now, out);
  } else {
    for (std::size_t i = 0; i < requests.size(); ++i) limiter.check(requests[i], now, out[i]);
  }
}

inline std::shared_ptr<const RuleSet> make_rules(std::vector<Rule> rules) {
  std::vector<RuleError> errors;
  auto made = RuleSet::make(std::move(rules), errors);
  if (made == nullptr) throw std::runtime_error(errors.front().to_string());
  return made;
}

/// `count` rules that all match, each with a series per key. `generous`: a limit that no
/// measurement reaches; else every key's first unit uses its limit up for an hour.
inline std::shared_ptr<const RuleSet> key_rules(int count, Algorithm algorithm,
                                                bool generous = true) {
  std::vector<Rule> rules;
  for (int i = 0; i < count; ++i) {
    Rule rule;
    rule.domain = "api";
    rule.name = "rule-" + std::to_string(i);
    rule.key = {"api_key"};
    rule.limit = generous ? 1'000'000'000 : 1;
    rule.window = kHour;
    rule.algorithm = algorithm;
    rules.push_back(std::move(rule));
  }
  return make_rules(std::move(rules));
}

inline LimiterOptions sized(std::uint64_t series) {
  LimiterOptions options;
  options.hash_key = {1, 2, 3};
  options.max_series = series;
  return options;
}

/// One thread's way to a limiter; all its buffers are reused.
class Caller {
 public:
  explicit Caller(Limiter& limiter) : limiter_(limiter) {}

  bool check(const Key16& key, Nanos now, std::uint64_t hits = 1) {
    Entry entry{"api_key", key.view()};
    limiter_.check({"api", {&entry, 1}, hits}, now, decision_);
    return decision_.allowed;
  }
  /// At most kBatch keys. Returns how many were allowed.
  unsigned check_batch(std::span<const Key16> keys, Nanos now) {
    for (std::size_t i = 0; i < keys.size(); ++i) {
      entries_[i] = {"api_key", keys[i].view()};
      requests_[i] = {"api", {&entries_[i], 1}, 1};
    }
    bench::check_batch(limiter_, std::span<const Request>(requests_.data(), keys.size()), now,
                       std::span<Decision>(decisions_.data(), keys.size()));
    unsigned allowed = 0;
    for (std::size_t i = 0; i < keys.size(); ++i) allowed += decisions_[i].allowed;
    return allowed;
  }

 private:
  Limiter& limiter_;
  Decision decision_;
  std::array<Entry, kBatch> entries_{};
  std::array<Request, kBatch> requests_{};
  std::array<Decision, kBatch> decisions_{};
};

/// Makes keys [0, count) known.
inline void fill(Limiter& limiter, std::uint64_t count, Nanos now = kStart) {
  Caller caller(limiter);
  for (std::uint64_t i = 0; i < count; ++i) caller.check(key_of(i), now);
}

}  // namespace weir::bench
