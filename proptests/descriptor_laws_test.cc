#include <weir/limits/limiter.h>

#include <array>
#include <atomic>
#include <set>
#include <thread>

#include "law.h"
#include "models.h"
#include "schedules.h"

/// Requests of several descriptors.
namespace weir::laws {
namespace {

constexpr std::string_view kKeys[] = {"a", "b", "c", "d"};

/// A request of several descriptors, with the memory that it is a view of.
class Asked {
 public:
  explicit Asked(const std::vector<PlainLimiter::Part>& parts) : entries_(parts.size()) {
    for (std::size_t i = 0; i < parts.size(); ++i) {
      entries_[i] = {{{"key", parts[i].key}, {"method", parts[i].post ? "POST" : "GET"}}};
      if (i > 0) more_.push_back({entries_[i], parts[i].hits});
    }
    request_ = {"api", entries_[0], parts[0].hits};
    request_.more = more_;
  }
  Asked(const Asked&) = delete;
  Asked& operator=(const Asked&) = delete;
  Request& operator*() { return request_; }

 private:
  std::vector<std::array<Entry, 2>> entries_;
  std::vector<Descriptor> more_;
  Request request_;
};

std::vector<PlainLimiter::Part> parts() {
  std::vector<PlainLimiter::Part> made;
  for (std::size_t i = *rc::gen::weightedElement<std::size_t>({{6, 2}, {3, 3}, {1, 1}, {1, 9}});
       i > 0; --i) {
    made.push_back({std::string(kKeys[*choice(4)]),
                    *rc::gen::weightedElement<std::uint64_t>({{6, 1}, {3, 2}, {3, 0}, {1, 7}}),
                    *chance(30)});
  }
  return made;
}

/// Rules of which some have one series for all descriptors, and a model of them.
struct Limited {
  std::vector<Rule> rules;
  PlainLimiter model;
  Limiter limiter;

  static std::vector<Rule> drawn() {
    std::vector<Rule> rules;
    for (std::size_t i = *between<std::size_t>(1, 4).as("rules"); i > 0; --i) {
      rules.push_back(*rules_named("r" + std::to_string(i)).as("rule"));
      if (*chance(40)) rules.back().key = {};
      if (*chance(50) && !rules.back().calendar) rules.back().window = 10 * kSecond;
    }
    return rules;
  }
  static LimiterOptions options() {
    LimiterOptions options;
    options.replicated = *chance(30).as("replicated");
    options.incarnation = {1, 1};
    return options;
  }
  static std::vector<std::map<std::string, Nanos>> phases(const std::vector<Rule>& rules,
                                                          Limiter& limiter) {
    std::vector<std::map<std::string, Nanos>> phases(rules.size());
    for (std::uint32_t i = 0; i < rules.size(); ++i) {
      for (std::string_view key : kKeys) {
        Entry entry{"key", key};
        Nanos phase =
            window_shape(limiter.rules()->rules()[i], limiter.series_of(i, {"api", {&entry, 1}, 1}))
                .phase;
        phases[i][rules[i].key.empty() ? "" : std::string(key)] = phase;
      }
    }
    return phases;
  }
  Limited(std::vector<Rule> given, const LimiterOptions& options)
      : rules(std::move(given)), model(rules, {}, kStart), limiter(rule_set(rules), options) {
    model = PlainLimiter(rules, phases(rules, limiter), kStart);
  }
};

LAW(42,
    "a request of several descriptors is all or nothing, each series asked for the sum of what "
    "they cost there",
    "a series twice", "each fits and the sum does not", "a peek beside a cost", "a sum that passes",
    "the last descriptor denied", "a shadow rule that would deny", "more than the quick way takes",
    "in a batch", "sent again by its id", "one alone, as one of several would be") {
  Limited limited(Limited::drawn(), Limited::options());
  Limiter& limiter = limited.limiter;
  Decision decision;
  for (int step = *between(1, 25).as("requests"); step > 0; --step) {
    Nanos now = limited.model.now() +
                *rc::gen::weightedOneOf<Nanos>({{4, between<Nanos>(0, 300 * kMillisecond)},
                                                {2, between<Nanos>(0, 3 * kSecond)},
                                                {1, between<Nanos>(0, 40 * kSecond)}});
    std::vector<PlainLimiter::Part> asked = parts();
    // What one descriptor after the other would be told, were it not for the others.
    PlainLimiter copy = limited.model;
    bool each_fits = true;
    for (const PlainLimiter::Part& part : asked) {
      PlainLimiter fresh = limited.model;
      each_fits &= fresh.check_all({part}, now).allowed;
    }
    bool in_turn = true;
    for (const PlainLimiter::Part& part : asked) in_turn &= copy.check_all({part}, now).allowed;
    PlainLimiter::Answer expected = limited.model.check_all(asked, now);
    RC_ASSERT(expected.allowed == in_turn);

    Asked request(asked);
    std::string id = *chance(30) ? std::to_string(step) : std::string();
    (*request).id = id;
    bool batch = *chance(30);
    if (batch) {
      limiter.check({&*request, 1}, now, {&decision, 1});
    } else {
      limiter.check(*request, now, decision);
    }
    RC_ASSERT(decision.allowed == expected.allowed);
    RC_ASSERT(decision.statuses.size() == asked.size() * limited.rules.size());
    const RuleStatus* decider = nullptr;
    for (std::size_t i = 0; i < decision.statuses.size(); ++i) {
      const RuleStatus& status = decision.statuses[i];
      RC_ASSERT(status.descriptor == i / limited.rules.size());
      RC_ASSERT(status.rule == i % limited.rules.size());
      RC_ASSERT(status.allowed == expected.rules[i]);
      RC_ASSERT(status.remaining == expected.remaining[i]);
      reached("a shadow rule that would deny", status.shadow && !status.allowed);
      if (status.shadow || status.allowed != decision.allowed) continue;
      bool before =
          decider == nullptr || (status.allowed ? status.remaining < decider->remaining
                                                : status.retry_after > decider->retry_after);
      if (before) decider = &status;
    }
    RC_ASSERT(decision.decider() == decider);
    if (!id.empty() && decision.allowed) {
      Decision again = limiter.check(*request, now);
      bool consumed = again.repeated;
      for (std::size_t i = 0; i < again.statuses.size() && consumed; ++i) {
        RC_ASSERT(again.statuses[i].descriptor == decision.statuses[i].descriptor);
        RC_ASSERT(again.statuses[i].remaining == decision.statuses[i].remaining);
      }
      if (!consumed) limited.model.check_all(asked, now);  // nothing, once more
      reached("sent again by its id", consumed);
    }
    std::set<std::string> keys;
    bool peeks = false;
    bool costs = false;
    for (const PlainLimiter::Part& part : asked) {
      keys.insert(part.key);
      (part.hits == 0 ? peeks : costs) = true;
    }
    bool twice = keys.size() < asked.size();
    bool last = !decision.allowed;
    for (std::size_t i = 0; i + limited.rules.size() < decision.statuses.size(); ++i) {
      last &= decision.statuses[i].allowed || decision.statuses[i].shadow;
    }
    reached("a series twice", twice);
    reached("each fits and the sum does not", each_fits && !decision.allowed);
    reached("a sum that passes", twice && decision.allowed && costs);
    reached("a peek beside a cost", peeks && costs && decision.allowed);
    reached("the last descriptor denied", last && asked.size() > 1);
    reached("more than the quick way takes", decision.statuses.size() > 8 && decision.allowed);
    reached("in a batch", batch);
    reached("one alone, as one of several would be", asked.size() == 1);
  }
}

LAW(42, "several descriptors are all or nothing also under concurrency, in any order",
    "a full wide rule", "a full narrow rule", "buckets", "windows", "both threads passed",
    "a series twice") {
  auto algorithm =
      *one_of<Algorithm>({Algorithm::fixed_window, Algorithm::sliding_window,
                          Algorithm::token_bucket, Algorithm::leaky_bucket, Algorithm::sliding_log})
           .as("algorithm");
  auto made = [&](std::string name, std::uint64_t limit, std::vector<std::string> key) {
    Rule rule;
    rule.domain = "api";
    rule.name = std::move(name);
    rule.key = std::move(key);
    rule.limit = limit;
    rule.algorithm = algorithm;
    return rule;
  };
  std::uint64_t wide = *between<std::uint64_t>(1, 800).as("wide limit");
  std::uint64_t narrow = *between<std::uint64_t>(1, 300).as("narrow limit");
  bool whole = *chance(50).as("a rule that every descriptor meets");
  std::vector<Rule> rules{made("narrow", narrow, {"key"})};
  if (whole) rules.push_back(made("wide", wide, {}));
  Limiter limiter(rule_set(rules), {});
  // Each thread has the same descriptors in an order of its own.
  std::array<std::vector<PlainLimiter::Part>, 2> asked;
  for (std::size_t i = *between<std::size_t>(2, 4).as("descriptors"); i > 0; --i) {
    asked[0].push_back({std::string(kKeys[*choice(4)]), *between<std::uint64_t>(1, 2), false});
  }
  asked[1].assign(asked[0].rbegin(), asked[0].rend());
  std::array<std::uint64_t, 2> passed{};
  std::atomic<int> ready{0};
  auto run = [&](std::size_t thread) {
    Asked request(asked[thread]);
    Decision decision;
    ++ready;
    for (int spins = 0; ready < 2; ++spins) {
      if (spins > 2000) std::this_thread::yield();
    }
    for (int i = 0; i < 150; ++i) {
      limiter.check(*request, kStart, decision);
      if (decision.allowed) ++passed[thread];
    }
  };
  std::thread other(run, 1);
  run(0);
  other.join();
  std::map<std::string, std::uint64_t> units;
  std::uint64_t all = 0;
  for (const PlainLimiter::Part& part : asked[0]) {
    units[part.key] += part.hits * (passed[0] + passed[1]);
    all += part.hits * (passed[0] + passed[1]);
  }
  for (const auto& [key, consumed] : units) {
    Entry entry{"key", key};
    RC_ASSERT(limiter.used(0, {"api", {&entry, 1}, 1}, kStart) == consumed);
    RC_ASSERT(consumed <= narrow);
    reached("a full narrow rule", consumed == narrow);
  }
  if (whole) {
    RC_ASSERT(limiter.used(1, {"api", {}, 1}, kStart) == all);
    RC_ASSERT(all <= wide);
    reached("a full wide rule", all == wide);
  }
  reached("buckets", is_bucket(algorithm));
  reached("windows", !is_bucket(algorithm));
  reached("both threads passed", passed[0] > 0 && passed[1] > 0);
  reached("a series twice", units.size() < asked[0].size());
}

}  // namespace
}  // namespace weir::laws
