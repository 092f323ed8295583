// The slow decisions: percentiles beside a working node, and the longest pause at 100 million keys.
#include <fmt/core.h>
#include <weir/bench/baselines.h>
#include <weir/bench/histogram.h>
#include <weir/bench/machine.h>
#include <weir/bench/parts.h>
#include <weir/bench/subject.h>
#include <weir/bench/working_node.h>

#include <chrono>
#include <memory>
#include <thread>

namespace weir::bench {
namespace {

Json percentiles(const std::string& name, const Histogram& times) {
  Json out;
  out["name"] = name;
  out["count"] = times.count();
  out["p50_ns"] = times.quantile(0.5);
  out["p90_ns"] = times.quantile(0.9);
  out["p99_ns"] = times.quantile(0.99);
  out["p999_ns"] = times.quantile(0.999);
  out["p9999_ns"] = times.quantile(0.9999);
  out["max_ns"] = times.max();
  Json curve = Json::array();
  for (double q : {0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.995, 0.999, 0.9995, 0.9999, 0.99999}) {
    curve.push_back({q, times.quantile(q)});
  }
  out["curve"] = curve;
  return out;
}

/// Times single decisions for `seconds`. `check(key, wall)` decides. With a rate (per second) the
/// decisions are due at fixed times and are timed from when they were due, so that one that waits
/// behind a pause counts as slow.
template <typename Check>
void time_decisions(Histogram& out, double seconds, double rate,
                    const std::vector<std::uint32_t>& indices, std::size_t& at, Check check) {
  double tick_ns = ns_per_tick();
  Nanos wall = wall_clock();
  std::uint64_t first = ticks();
  auto span = static_cast<std::uint64_t>(seconds * 1e9 / tick_ns);
  double gap = rate > 0 ? 1e9 / rate / tick_ns : 0;
  std::size_t mask = indices.size() - 1;
  for (std::uint64_t i = 0;; ++i) {
    std::uint64_t due = first + static_cast<std::uint64_t>(static_cast<double>(i) * gap);
    Key16 key = key_of(indices[at++ & mask]);
    std::uint64_t from = ticks();
    while (rate > 0 && from < due) from = ticks();
    if (from - first >= span) return;
    auto since = static_cast<Nanos>(static_cast<double>(from - first) * tick_ns);
    check(key, wall + since);
    std::uint64_t to = ticks();
    std::uint64_t began = rate > 0 ? due : from;
    out.record(static_cast<std::uint64_t>(static_cast<double>(to - began) * tick_ns));
  }
}

}  // namespace

Json part_latency(const PartOptions& options) {
  std::uint64_t keys = options.keys != 0 ? options.keys : options.quick ? 300'000 : 1'000'000;
  constexpr double kRate = 100'000;
  constexpr std::string_view kRateName = "100,000";
  constexpr std::size_t kPeerCells = 500;
  int rounds = options.quick ? 5 : 10;
  need_memory(keys * 3000, "a working node");
  Rule rule = key_rules(1, Algorithm::fixed_window)->rules()[0];
  rule.window = 10 * kSecond;
  WorkingNode node(make_rules({rule}), keys, kPeerCells);
  Limiter alone(make_rules({rule}), sized(keys + 1));

  say(fmt::format("a node and {} keys", keys));
  Decision decision;
  auto ask = [&](const Key16& key, auto&& check) {
    Entry entry{"api_key", key.view()};
    check(Request{"api", {&entry, 1}, 1});
  };
  auto by_node = [&](const Key16& key, Nanos wall) {
    ask(key, [&](const Request& request) { node.engine().check(request, wall, decision); });
  };
  auto by_limiter = [&](const Key16& key, Nanos wall) {
    ask(key, [&](const Request& request) { alone.check(request, wall, decision); });
  };
  for (std::uint64_t i = 0; i < keys; ++i) {
    by_node(key_of(i), wall_clock());
    by_limiter(key_of(i), wall_clock());
  }
  if (!node.settle(30)) say("the node is still writing the first counts");

  auto indices = draw_indices(Draw::zipf, keys, 13);
  std::size_t at = 0;
  Histogram full;
  Histogram paced;
  Histogram limiter;
  Histogram idle;
  for (int round = 0; round < rounds; ++round) {
    say(fmt::format("round {} of {}", round + 1, rounds));
    time_decisions(full, 1, 0, indices, at, by_node);
    time_decisions(paced, 1, kRate, indices, at, by_node);
    time_decisions(limiter, 0.5, 0, indices, at, by_limiter);
    idle.add(idle_histogram(0.5));
  }
  WorkingNode::Background did = node.stop();
  if (did.commits == 0 || did.cells_absorbed == 0 || did.cells_pushed == 0) {
    throw std::runtime_error("nothing went on in the background");
  }
  Json out;
  out["keys"] = keys;
  out["algorithm"] = "fixed_window";
  out["rows"] = {
      percentiles("in a node, as fast as it goes", full),
      percentiles(fmt::format("in a node, {} a second, from when due", kRateName), paced),
      percentiles("the limiter alone", limiter), percentiles("nothing at all", idle)};
  out["background"] = {{"commits", did.commits},
                       {"committed_bytes", did.committed_bytes},
                       {"cells_pushed", did.cells_pushed},
                       {"cells_absorbed", did.cells_absorbed},
                       {"pumps", did.pumps},
                       {"pumps_that_waited_for_the_disk", did.behind}};
  out["figures"] = {{"p999_ns", full.quantile(0.999)},
                    {"p999_idle_ns", idle.quantile(0.999)},
                    {"p999_paced_ns", paced.quantile(0.999)}};
  return out;
}

Json part_memory(const PartOptions& options) {
  std::uint64_t keys = options.keys != 0 ? options.keys : 100'000'000;
  constexpr std::uint64_t kProbe = 500'000;
  constexpr std::uint64_t kReserve = 3ull << 30;
  auto rules = key_rules(1, options.algorithm);
  std::uint64_t each = 0;
  {
    std::uint64_t before = resident_bytes();
    Limiter probe(rules, sized(kProbe));
    fill(probe, kProbe);
    each = (resident_bytes() - before) / kProbe;
  }
  say(fmt::format("a small table takes {} bytes a key", each));
  if (available_bytes() < keys * each + kReserve) {
    throw TooLittleMemory(fmt::format(
        "{} keys of {} bytes and 3 GiB besides are more than the {:.1f} GiB that are left", keys,
        each, static_cast<double>(available_bytes()) / (1 << 30)));
  }

  std::uint64_t before = resident_bytes();
  LimiterOptions sizes = sized(keys);
  sizes.populate = true;
  std::uint64_t started_at = steady_ns();
  Limiter limiter(rules, sizes);
  double populate_s = static_cast<double>(steady_ns() - started_at) / 1e9;
  Caller caller(limiter);
  Histogram filling;
  double tick_ns = ns_per_tick();
  auto timed = [&](Histogram& out, std::uint64_t index, Nanos now) {
    Key16 key = key_of(index);
    std::uint64_t from = ticks();
    caller.check(key, now);
    out.record(static_cast<std::uint64_t>(static_cast<double>(ticks() - from) * tick_ns));
  };
  say(fmt::format("filling weir with {} keys", keys));
  std::uint64_t started = steady_ns();
  for (std::uint64_t i = 0; i < keys; ++i) {
    timed(filling, i, kStart);
    if (i % 1'000'000 == 0 && available_bytes() < kReserve / 2) {
      throw TooLittleMemory(fmt::format("memory is short after {} keys", i));
    }
  }
  double fill_s = static_cast<double>(steady_ns() - started) / 1e9;
  double bytes = static_cast<double>(resident_bytes() - before) / static_cast<double>(keys);
  if (limiter.series_count() != keys) throw std::runtime_error("some keys found no room");

  // Nothing is over yet, so every key stays; but every one is looked at, once a second.
  say("deciding, with sweeps");
  std::atomic<bool> stop{false};
  std::uint64_t sweeps = 0;
  std::thread sweeper([&] {
    while (!stop) {
      limiter.sweep(kStart);
      ++sweeps;
      for (int i = 0; i < 100 && !stop; ++i) {
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
      }
    }
  });
  auto indices = draw_indices(Draw::uniform, keys, 17);
  Histogram steady;
  Histogram idle;
  Nanos now = kStart + kSecond;
  for (int round = 0; round < 10; ++round) {
    std::uint64_t until = steady_ns() + 1'000'000'000;
    for (std::size_t i = 0; steady_ns() < until; ++i, now += kStep) {
      timed(steady, indices[i % indices.size()], now);
    }
    idle.add(idle_histogram(0.5));
  }
  stop = true;
  sweeper.join();
  if (limiter.series_count() != keys) throw std::runtime_error("a sweep took living keys");

  // The time of one decision alone without a timer around each, beside the bare table if there is
  // room.
  std::unique_ptr<BareTable> bare;
  if (available_bytes() > keys * 48 + kReserve) {
    say("filling the bare table");
    bare = std::make_unique<BareTable>(keys, true);
    for (std::uint64_t i = 0; i < keys; ++i) bare->insert(key_of(i));
  }
  std::vector<double> weir_ns;
  std::vector<double> bare_ns;
  std::vector<double> ratio;
  std::uint64_t found = 0;
  for (std::size_t round = 0; round < 5; ++round) {
    auto asked = std::span(indices).subspan(round * 500'000, 500'000);
    std::uint64_t from = thread_cpu_ns();
    for (std::uint32_t index : asked) {
      found += caller.check(key_of(index), now += kStep);
      wait_for_what_came_before();
    }
    weir_ns.push_back(static_cast<double>(thread_cpu_ns() - from) / 500'000);
    if (bare == nullptr) continue;
    from = thread_cpu_ns();
    for (std::uint32_t index : asked) {
      found += bare->check(key_of(index), 0);
      wait_for_what_came_before();
    }
    bare_ns.push_back(static_cast<double>(thread_cpu_ns() - from) / 500'000);
    ratio.push_back(weir_ns.back() / bare_ns.back());
  }
  if (found != 500'000 * (weir_ns.size() + bare_ns.size())) {
    throw std::runtime_error("a known key was denied");
  }
  std::uint64_t longest = std::max(filling.max(), steady.max());
  Json out;
  out["keys"] = keys;
  out["algorithm"] = to_string(options.algorithm);
  out["populate_s"] = round_to(populate_s, 2);
  out["fill_s"] = round_to(fill_s, 1);
  out["sweeps"] = sweeps;
  out["rows"] = {percentiles("first decision on each key", filling),
                 percentiles("known keys, with sweeps", steady),
                 percentiles("nothing at all", idle)};
  out["ns"] = spread_of(weir_ns);
  if (!bare_ns.empty()) {
    out["bare_ns"] = spread_of(bare_ns);
    out["vs_bare"] = spread_of(ratio);
  }
  std::string size = keys % 1'000'000 == 0 ? fmt::format("{}m", keys / 1'000'000)
                                           : fmt::format("{}k", keys / 1000);
  out["figures"] = {
      {"bytes_per_key_" + size, round_to(bytes, 1)},
      {"max_pause_ms_" + size, round_to(static_cast<double>(longest) / 1e6, 3)},
      {"max_pause_idle_ms_" + size, round_to(static_cast<double>(idle.max()) / 1e6, 3)},
      {"single_uniform_" + size + "_ns", round_to(median_of(weir_ns), 1)}};
  if (!ratio.empty())
    out["figures"]["single_uniform_" + size + "_vs_bare"] = round_to(median_of(ratio), 3);
  return out;
}

}  // namespace weir::bench
