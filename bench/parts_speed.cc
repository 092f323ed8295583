// How long a decision takes: one rule beside the baselines, four rules, a hot key, matching; and
// how often it allocates.
#include <fmt/core.h>
#include <weir/bench/baselines.h>
#include <weir/bench/machine.h>
#include <weir/bench/parts.h>
#include <weir/bench/subject.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>

namespace weir::bench {
namespace {

/// What keeps the compiler from dropping a loop's work.
volatile std::uint64_t sink = 0;

/// How decisions follow each other. `alone`: one begins when the answer to the one before is there,
/// as for a caller who waits for it. `flowing`: the processor may begin with the next ones, and
/// fetch their memory, as soon as it can.
enum class Pace { alone, flowing };

/// One side of a comparison: decides `indices` one after the other, from time `now` on.
struct Contender {
  std::string name;
  std::function<void(std::span<const std::uint32_t> indices, Nanos now, Pace pace)> run;
  bool batches = false;         ///< a batch is never alone
  std::vector<double> ns = {};  ///< per decision, one a round
};

template <typename Check>
void one_by_one(std::span<const std::uint32_t> indices, Nanos now, Pace pace, Check check) {
  std::uint64_t allowed = 0;
  for (std::uint32_t index : indices) {
    allowed += check(key_of(index), now);
    now += kStep;
    if (pace == Pace::alone) wait_for_what_came_before();
  }
  sink = sink + allowed;
}

template <typename Check>
void by_batches(std::span<const std::uint32_t> indices, Nanos now, Check check) {
  std::uint64_t allowed = 0;
  std::array<Key16, kBatch> keys;
  for (std::size_t at = 0; at + kBatch <= indices.size(); at += kBatch) {
    for (std::size_t i = 0; i < kBatch; ++i) keys[i] = key_of(indices[at + i]);
    allowed += check(std::span<const Key16>(keys), now);
    now += kStep * static_cast<Nanos>(kBatch);
  }
  sink = sink + allowed;
}

/// Rounds in which every contender decides the same slice: A B C … A B C …, so that a slow spell
/// of the machine meets all of them. Processor time.
void race(std::vector<Contender>& contenders, const std::vector<std::uint32_t>& indices, int rounds,
          std::size_t slice, Pace pace, Nanos& now) {
  for (Contender& one : contenders) one.ns.clear();
  for (int round = -1; round < rounds; ++round) {
    std::size_t start = static_cast<std::size_t>(round + 1) * slice % (indices.size() - slice);
    auto asked = std::span(indices).subspan(start, slice);
    for (Contender& one : contenders) {
      if (one.batches && pace == Pace::alone) continue;
      std::uint64_t from = thread_cpu_ns();
      one.run(asked, now, pace);
      auto ns = static_cast<double>(thread_cpu_ns() - from);
      if (round >= 0) one.ns.push_back(ns / static_cast<double>(slice));
    }
    now += kStep * static_cast<Nanos>(slice);
  }
}

/// The ratio of two contenders' times, round by round.
std::vector<double> ratios(const Contender& a, const Contender& b) {
  std::vector<double> out;
  for (std::size_t i = 0; i < a.ns.size(); ++i) out.push_back(a.ns[i] / b.ns[i]);
  return out;
}

const Contender* find(const std::vector<Contender>& contenders, std::string_view name) {
  for (const Contender& one : contenders) {
    if (one.name == name) return &one;
  }
  return nullptr;
}

Json rows_of(const std::vector<Contender>& contenders) {
  Json rows = Json::array();
  for (const Contender& one : contenders) {
    if (one.ns.empty()) continue;
    Json row = spread_of(one.ns);
    row["name"] = one.name;
    rows.push_back(row);
  }
  return rows;
}

constexpr std::string_view kTables[] = {"absl flat_hash_map, 64 spin locks",
                                        "std unordered_map, 64 mutexes", "tbb concurrent_hash_map"};

template <typename Table>
void add_table(std::vector<Contender>& contenders, std::string_view name, std::uint64_t keys) {
  say(fmt::format("filling {}", name));
  auto table = std::make_shared<Table>(keys);
  for (std::uint64_t i = 0; i < keys; ++i) table->check(key_of(i), kStart);
  contenders.push_back(
      {std::string(name), [table](std::span<const std::uint32_t> indices, Nanos now, Pace pace) {
         one_by_one(indices, now, pace,
                    [&](const Key16& key, Nanos at) { return table->check(key, at); });
       }});
}

void add_tables(std::vector<Contender>& contenders, std::uint64_t keys) {
#ifdef WEIR_BENCH_ABSL
  add_table<AbslBuckets>(contenders, kTables[0], keys);
#else
  say("without absl: install libabsl-dev for that baseline");
#endif
  add_table<StdBuckets>(contenders, kTables[1], keys);
#ifdef WEIR_BENCH_TBB
  add_table<TbbBuckets>(contenders, kTables[2], keys);
#else
  say("without tbb: install libtbb-dev for that baseline");
#endif
}

void add_bare(std::vector<Contender>& contenders, std::uint64_t keys, bool huge) {
  auto table = std::make_shared<BareTable>(keys, huge);
  for (std::uint64_t i = 0; i < keys; ++i) table->insert(key_of(i));
  std::string pages = huge ? "" : ", 4 KiB pages";
  contenders.push_back(
      {"bare table" + pages, [table](std::span<const std::uint32_t> indices, Nanos now, Pace pace) {
         one_by_one(indices, now, pace,
                    [&](const Key16& key, Nanos at) { return table->check(key, at); });
       }});
  if (!huge) return;
  contenders.push_back({"bare table, batches of 16",
                        [table](std::span<const std::uint32_t> indices, Nanos now, Pace) {
                          by_batches(indices, now, [&](std::span<const Key16> batch, Nanos) {
                            return table->check_batch(batch);
                          });
                        },
                        true});
}

std::string size_name(std::uint64_t keys) {
  return keys % 1'000'000 == 0 ? fmt::format("{}m", keys / 1'000'000)
                               : fmt::format("{}k", keys / 1000);
}

}  // namespace

Json part_single(const PartOptions& options) {
  std::uint64_t keys = options.keys != 0 ? options.keys : 10'000'000;
  need_memory(keys * 600, "one rule beside its baselines");
  int rounds = options.quick ? 5 : 11;
  std::size_t slice = options.quick ? 200'000 : 960'000;

  say(fmt::format("filling weir with {} keys", keys));
  Limiter limiter(key_rules(1, options.algorithm), sized(keys + 1));
  std::uint64_t from = steady_ns();
  fill(limiter, keys);
  double fill_ns = static_cast<double>(steady_ns() - from) / static_cast<double>(keys);
  Caller caller(limiter);
  std::vector<Contender> contenders;
  contenders.push_back({"weir", [&](std::span<const std::uint32_t> indices, Nanos now, Pace pace) {
                          one_by_one(indices, now, pace, [&](const Key16& key, Nanos at) {
                            return caller.check(key, at);
                          });
                        }});
  contenders.push_back({"weir, batches of 16",
                        [&](std::span<const std::uint32_t> indices, Nanos now, Pace) {
                          by_batches(indices, now, [&](std::span<const Key16> batch, Nanos at) {
                            return caller.check_batch(batch, at);
                          });
                        },
                        true});
  add_bare(contenders, keys, true);
  add_bare(contenders, keys, false);
  add_tables(contenders, keys);
  contenders.push_back(
      {"making the key alone", [](std::span<const std::uint32_t> indices, Nanos now, Pace pace) {
         one_by_one(indices, now, pace,
                    [](const Key16& key, Nanos) { return static_cast<bool>(key.text[3] & 1); });
       }});

  Json out;
  out["keys"] = keys;
  out["algorithm"] = to_string(options.algorithm);
  out["ping_pong_ns"] = round_to(ping_pong_ns(), 1);
  out["first_decision_on_a_key_ns"] = round_to(fill_ns, 1);
  Json figures;
  Nanos now = kStart + kSecond;
  for (Draw draw : {Draw::uniform, Draw::zipf}) {
    std::string name = draw == Draw::uniform ? "uniform" : "zipf";
    say(fmt::format("deciding, {}", name));
    auto indices = draw_indices(draw, keys, 7);
    const Contender& weir = *find(contenders, "weir");
    const Contender& bare = *find(contenders, "bare table");
    std::string tail = name + "_" + size_name(keys) + "_vs_bare";
    Json part;
    race(contenders, indices, rounds, slice, Pace::alone, now);
    part["ns"] = rows_of(contenders);
    part["vs_bare"] = spread_of(ratios(weir, bare));
    figures["single_" + tail] = round_to(median_of(ratios(weir, bare)), 3);
    const Contender* best = nullptr;
    for (std::string_view table : kTables) {
      const Contender* one = find(contenders, table);
      if (one != nullptr && (best == nullptr || median_of(one->ns) < median_of(best->ns)))
        best = one;
    }
    part["next_best"] = best->name;
    part["vs_next_best"] = spread_of(ratios(weir, *best));
    if (draw == Draw::uniform) {
      figures["single_vs_next_best"] = round_to(median_of(ratios(weir, *best)), 3);
    }
    race(contenders, indices, rounds, slice, Pace::flowing, now);
    auto batches = ratios(*find(contenders, "weir, batches of 16"),
                          *find(contenders, "bare table, batches of 16"));
    part["flowing_ns"] = rows_of(contenders);
    part["flowing_vs_bare"] = spread_of(ratios(weir, bare));
    part["batch_vs_bare"] = spread_of(batches);
    figures["flowing_" + tail] = round_to(median_of(ratios(weir, bare)), 3);
    figures["batch_" + tail] = round_to(median_of(batches), 3);
    out[name] = part;
  }
  out["figures"] = figures;
  return out;
}

Json part_four_rules(const PartOptions& options) {
  std::uint64_t keys = options.keys != 0 ? options.keys : options.quick ? 1'000'000 : 10'000'000;
  // In series; a series of an unknown table may take this much.
  need_memory(keys * 4 * 300, "four rules");
  const std::array<std::string, 4> dimensions{"user", "address", "path", "tenant"};
  std::vector<Rule> rules;
  for (const std::string& dimension : dimensions) {
    Rule rule;
    rule.domain = "api";
    rule.name = "per-" + dimension;
    rule.key = {dimension};
    rule.limit = 1'000'000'000;  // nobody is denied, though the tenant's bucket fills
    rule.window = kHour;
    rule.algorithm = options.algorithm;
    rules.push_back(std::move(rule));
  }
  Limiter limiter(make_rules(std::move(rules)), sized(keys * 4 + 4));

  struct alignas(128) Asker {  // one a thread; no line is shared
    std::array<std::array<Key16, 4>, kBatch> keys;
    std::array<std::array<Entry, 4>, kBatch> entries;
    std::array<Request, kBatch> requests;
    std::array<Decision, kBatch> decisions;
  };
  auto put = [&](Asker& asker, std::size_t at, const std::array<std::uint64_t, 4>& index) {
    for (std::size_t i = 0; i < 4; ++i) {
      asker.keys[at][i] = key_of(index[i]);
      asker.entries[at][i] = {dimensions[i], asker.keys[at][i].view()};
    }
    asker.requests[at] = {"api", asker.entries[at], 1};
  };
  say(fmt::format("filling weir with 4 x {} keys", keys));
  auto filler = std::make_unique<Asker>();
  for (std::uint64_t i = 0; i < keys; ++i) {
    put(*filler, 0, {i, i, i, i});
    limiter.check(filler->requests[0], kStart, filler->decisions[0]);
  }

  Draw draw = Draw::uniform;
  auto indices = draw_indices(draw, keys, 11);
  std::size_t requests = (options.quick ? 100'000 : 1'000'000) / kBatch * kBatch;
  std::array<Asker, 2> askers;
  // The tenant is always the same: the fourth series is hot, in every request of every thread.
  auto body = [&](int thread, std::size_t batch, Nanos from) {
    std::uint64_t allowed = 0;
    Asker& asker = askers[static_cast<std::size_t>(thread)];
    std::size_t at = static_cast<std::size_t>(thread) * 1'000'003;
    std::size_t mask = indices.size() - 1;
    for (std::size_t i = 0; i < requests; i += batch) {
      for (std::size_t k = 0; k < batch; ++k, at += 3) {
        put(asker, k, {indices[at & mask], indices[(at + 1) & mask], indices[(at + 2) & mask], 0});
      }
      Nanos now = from + static_cast<Nanos>(i) * kStep;
      if (batch == 1) {
        limiter.check(asker.requests[0], now, asker.decisions[0]);
      } else {
        limiter.check(std::span<const Request>(asker.requests.data(), batch), now,
                      std::span<Decision>(asker.decisions.data(), batch));
      }
      for (std::size_t k = 0; k < batch; ++k) allowed += asker.decisions[k].allowed;
    }
    if (allowed != requests) throw std::runtime_error("a request was denied");
  };
  say("deciding");
  struct Way {
    int threads;
    std::size_t batch;
    std::vector<double> per_second = {};
  };
  std::array<Way, 4> ways{{{1, 1}, {2, 1}, {1, kBatch}, {2, kBatch}}};
  Nanos now = kStart + kSecond;
  for (int round = -1; round < 5; ++round) {
    for (Way& way : ways) {
      std::uint64_t ns = run_undisturbed(
          way.threads, [&](int thread) { body(thread, way.batch, now); },
          [&] { now += static_cast<Nanos>(requests) * kStep; });
      if (round < 0) continue;
      way.per_second.push_back(static_cast<double>(requests) * way.threads * 1e9 /
                               static_cast<double>(ns));
    }
  }
  Json out;
  out["keys_per_dimension"] = keys;
  out["algorithm"] = to_string(options.algorithm);
  out["ping_pong_ns"] = round_to(ping_pong_ns(), 1);
  Json rows = Json::array();
  for (const Way& way : ways) {
    Json row = spread_of(way.per_second);
    row["threads"] = way.threads;
    row["batch"] = way.batch;
    rows.push_back(row);
  }
  out["rows"] = rows;
  out["figures"] = {
      {"four_rules_requests_per_s", std::round(median_of(ways[3].per_second))},
      {"four_rules_1t_requests_per_s", std::round(median_of(ways[2].per_second))},
      {"four_rules_2t_single_requests_per_s", std::round(median_of(ways[1].per_second))},
      {"four_rules_1t_single_requests_per_s", std::round(median_of(ways[0].per_second))},
      {"four_rules_keys_per_dimension", keys}};
  return out;
}

Json part_hot(const PartOptions& options) {
  struct Side {
    std::string name;
    std::function<void(std::size_t decisions, Nanos now)> run;  ///< on one thread; any may call it
    std::size_t decisions = 1'000;  ///< a run; then as many as take a while
    std::vector<double> one, two, ratio;
  };
  const Key16 key = key_of(0);
  std::vector<Side> sides;
  std::vector<std::unique_ptr<Limiter>> limiters;
  auto add = [&](std::string name, auto check) {
    sides.push_back({std::move(name),
                     [check](std::size_t decisions, Nanos now) {
                       auto mine = check;
                       std::uint64_t allowed = 0;
                       for (std::size_t i = 0; i < decisions; ++i, now += kStep)
                         allowed += mine(now);
                       sink = sink + allowed;
                     },
                     1'000,
                     {},
                     {},
                     {}});
  };
  auto add_weir = [&](std::string name, Algorithm algorithm) {
    limiters.push_back(std::make_unique<Limiter>(key_rules(1, algorithm), sized(1024)));
    Limiter* limiter = limiters.back().get();
    sides.push_back({std::move(name),
                     [limiter, key](std::size_t decisions, Nanos now) {
                       Caller caller(*limiter);
                       std::uint64_t allowed = 0;
                       for (std::size_t i = 0; i < decisions; ++i, now += kStep) {
                         allowed += caller.check(key, now);
                       }
                       sink = sink + allowed;
                     },
                     1'000,
                     {},
                     {},
                     {}});
  };
  add_weir("weir, token bucket", Algorithm::token_bucket);
  add_weir("weir, fixed window", Algorithm::fixed_window);
  add_weir("weir, sliding window", Algorithm::sliding_window);
  AtomicGcra gcra(1, kHour);
  add("one atomic (GCRA)", [&](Nanos now) { return gcra.check(now); });
#ifdef WEIR_BENCH_ABSL
  AbslBuckets absl_buckets(1);
  add(std::string(kTables[0]), [&](Nanos now) { return absl_buckets.check(key, now); });
#endif
  StdBuckets std_buckets(1);
  add(std::string(kTables[1]), [&](Nanos now) { return std_buckets.check(key, now); });
#ifdef WEIR_BENCH_TBB
  TbbBuckets tbb_buckets(1);
  add(std::string(kTables[2]), [&](Nanos now) { return tbb_buckets.check(key, now); });
#endif

  std::uint64_t run_ns = options.quick ? 15'000'000 : 50'000'000;
  Nanos now = kStart + kSecond;
  for (int round = -2; round < 5; ++round) {
    for (Side& side : sides) {
      double rate[2];
      for (int threads : {1, 2}) {
        std::uint64_t ns = run_undisturbed(
            threads, [&](int) { side.run(side.decisions, now); },
            [&] { now += static_cast<Nanos>(side.decisions) * kStep; });
        rate[threads - 1] = static_cast<double>(side.decisions) * threads / static_cast<double>(ns);
      }
      if (round < 0) {
        side.decisions = static_cast<std::size_t>(rate[0] * static_cast<double>(run_ns));
        continue;
      }
      side.one.push_back(1 / rate[0]);
      side.two.push_back(1 / rate[1]);
      side.ratio.push_back(rate[1] / rate[0]);
    }
  }
  Json rows = Json::array();
  for (const Side& side : sides) {
    rows.push_back({{"name", side.name},
                    {"ns_1t", spread_of(side.one)},
                    {"ns_2t", spread_of(side.two)},
                    {"2t_vs_1t", spread_of(side.ratio)}});
  }

  // Two threads against one limit: neither one admitted too many nor one too few.
  for (Algorithm algorithm :
       {Algorithm::fixed_window, Algorithm::sliding_window, Algorithm::token_bucket}) {
    for (int threads : {1, 2}) {
      Rule rule = key_rules(1, algorithm)->rules()[0];
      constexpr std::uint64_t kDecisions = 200'000;
      rule.limit = kDecisions / 2;
      rule.burst = 0;  // the limit
      Limiter limiter(make_rules({rule}), sized(16));
      std::atomic<std::uint64_t> admitted{0};
      run_threads(threads, [&](int) {
        Caller caller(limiter);
        std::uint64_t mine = 0;
        for (std::size_t i = 0; i < kDecisions; ++i) mine += caller.check(key, kStart);
        admitted += mine;
      });
      if (admitted != rule.limit) {
        throw std::runtime_error(fmt::format("{} from {} threads: {} admitted, the limit is {}",
                                             to_string(algorithm), threads, admitted.load(),
                                             rule.limit));
      }
    }
  }
  Json out;
  out["ping_pong_ns"] = round_to(ping_pong_ns(), 1);
  out["rows"] = rows;
  out["exact"] = true;
  out["figures"] = {{"hot_1t_ns", round_to(median_of(sides[0].one), 1)},
                    {"hot_2t_vs_1t", round_to(median_of(sides[0].ratio), 3)}};
  return out;
}

Json part_match(const PartOptions& options) {
  std::vector<Rule> rules;
  constexpr std::size_t kRules = 10'000;
  for (std::size_t i = 0; i < kRules; ++i) {
    Rule rule;
    rule.domain = "api";
    rule.name = fmt::format("rule-{}", i);
    rule.match = {{"api_key", MatchExact{std::string(key_of(i).view())}}};
    rule.key = {"api_key"};
    rule.limit = 1000;
    rules.push_back(std::move(rule));
  }
  auto set = make_rules(std::move(rules));
  std::size_t count = options.quick ? 2000 : 20'000;
  auto indices = draw_indices(Draw::uniform, kRules, 3, count);
  std::vector<std::uint32_t> matched;
  std::vector<double> ns;
  for (int round = -1; round < 5; ++round) {
    std::uint64_t from = thread_cpu_ns();
    for (std::uint32_t index : indices) {
      Key16 key = key_of(index);
      Entry entry{"api_key", key.view()};
      matched.clear();
      set->match({"api", {&entry, 1}, 1}, matched);
      if (matched.size() != 1 || matched[0] != index) throw std::runtime_error("a wrong match");
    }
    auto took = static_cast<double>(thread_cpu_ns() - from);
    if (round >= 0) ns.push_back(took / static_cast<double>(count));
  }
  Json out;
  out["rules"] = kRules;
  out["ns"] = spread_of(ns);
  out["figures"] = {{"match_10k_rules_ns", round_to(median_of(ns), 1)}};
  return out;
}

Json part_allocations(const PartOptions&) {
  constexpr std::uint64_t kKeys = 1000;
  constexpr std::uint64_t kDecisions = 100'000;
  double most = 0;
  Json rows = Json::array();
  for (Algorithm algorithm :
       {Algorithm::fixed_window, Algorithm::sliding_window, Algorithm::token_bucket}) {
    for (int rules : {1, 4}) {
      for (bool generous : {true, false}) {
        Limiter limiter(key_rules(rules, algorithm, generous), sized(kKeys * 4 + 1));
        Caller caller(limiter);
        for (std::uint64_t i = 0; i < 2 * kKeys; ++i) caller.check(key_of(i % kKeys), kStart);
        std::uint64_t before = allocations();
        for (std::uint64_t i = 0; i < kDecisions; ++i) {
          caller.check(key_of(i % kKeys), kStart + static_cast<Nanos>(i) * kStep);
        }
        double each = static_cast<double>(allocations() - before) / kDecisions;
        most = std::max(most, each);
        rows.push_back({{"algorithm", to_string(algorithm)},
                        {"rules", rules},
                        {"answer", generous ? "allowed" : "denied"},
                        {"allocations", each}});
      }
    }
  }
  Json out;
  out["rows"] = rows;
  out["figures"] = {{"allocations_per_decision", most}};
  return out;
}

}  // namespace weir::bench
