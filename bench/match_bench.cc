// Which rules a request meets: the index of a RuleSet, beside a scan of the domain's rules.
#include <benchmark/benchmark.h>
#include <weir/crdt/ids.h>
#include <weir/limits/matching/rule_index.h>

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace {

using weir::Rule;

/// A descriptor's keys and values.
using Texts = std::vector<std::pair<std::string, std::string>>;

std::uint64_t random_of(std::size_t i) {
  return weir::crdt::mix64(i + 1, 11);
}

std::string key_of(std::size_t i) {
  return "key-" + std::to_string(random_of(i));
}

/// Four levels deep, each level's paths the beginnings of the next one's.
std::string path_of(std::size_t i) {
  std::string path = "/api/v1";
  const char* const words[] = {"/users", "/orders", "/items", "/reports", "/search", "/billing"};
  for (std::size_t left = i + 1; left > 0; left /= 22) {
    const std::size_t digit = left % 22;
    path += words[digit % 6];
    path += "-" + std::to_string(digit);
  }
  return path;
}

std::string ip_text(std::uint32_t ip) {
  return std::to_string(ip >> 24) + '.' + std::to_string(ip >> 16 & 255) + '.' +
         std::to_string(ip >> 8 & 255) + '.' + std::to_string(ip & 255);
}

/// Five at a time lie in each other, from a /16 to one host.
weir::MatchCidr network_of(std::size_t i) {
  const auto high = static_cast<std::uint32_t>(random_of(i / 5) % 50'000 + 2'560) << 16;
  const unsigned bits[] = {16, 20, 24, 28, 32};
  const std::uint32_t mask = ~std::uint32_t{0} << (32 - bits[i % 5]);
  const auto low = static_cast<std::uint32_t>(random_of(i / 5) >> 32 & 0xFFFF);
  return *weir::parse_cidr(ip_text((high | low) & mask) + '/' + std::to_string(bits[i % 5]));
}

std::string address_in(const weir::MatchCidr& network) {
  std::uint32_t ip = 0;
  for (std::size_t i = 12; i < 16; ++i) ip = ip << 8 | network.network[i];
  return ip_text(ip);
}

const char* method_of(std::size_t i) {
  static constexpr std::array<const char*, 4> methods{"GET", "PUT", "POST", "DELETE"};
  return methods[random_of(i) % methods.size()];
}

struct Set {
  std::string name;
  std::function<Rule(std::size_t)> rule;
  std::function<Texts(std::size_t)> hit;  ///< meets rule i
  std::function<Texts(std::size_t)> miss;
};

Rule rule_with(std::vector<weir::Match> match) {
  Rule rule;
  rule.match = std::move(match);
  return rule;
}

Texts ask(std::string key, std::string path, std::string method, std::string ip) {
  return {{"api_key", std::move(key)},
          {"path", std::move(path)},
          {"method", std::move(method)},
          {"ip", std::move(ip)}};
}

/// Kinds of rule sets, each of any size.
std::vector<Set> sets() {
  using weir::MatchAny;
  using weir::MatchExact;
  using weir::MatchPrefix;
  std::vector<Set> all;
  all.push_back(
      {"exact",
       [](std::size_t i) {
         return rule_with({{"api_key", MatchExact{key_of(i)}}});
       },
       [](std::size_t i) { return ask(key_of(i), path_of(i), "GET", "10.1.2.3"); },
       [](std::size_t i) { return ask("no" + key_of(i), path_of(i), "GET", "10.1.2.3"); }});
  all.push_back(
      {"prefix",
       [](std::size_t i) {
         return rule_with({{"path", MatchPrefix{path_of(i)}}});
       },
       [](std::size_t i) { return ask("k", path_of(i) + "/17/x", "GET", "10.1.2.3"); },
       [](std::size_t i) { return ask("k", "/api/v1/usage" + path_of(i), "GET", "10.1.2.3"); }});
  all.push_back(
      {"cidr",
       [](std::size_t i) {
         return rule_with({{"ip", network_of(i)}});
       },
       [](std::size_t i) { return ask("k", path_of(i), "GET", address_in(network_of(i))); },
       [](std::size_t i) {
         return ask("k", path_of(i), "GET",
                    ip_text(1u << 24 | (static_cast<std::uint32_t>(random_of(i) & 0xFFFFFF))));
       }});
  all.push_back(
      {"combined",
       [](std::size_t i) {
         return rule_with({{"method", MatchExact{method_of(i)}},
                           {"path", MatchPrefix{path_of(i)}},
                           {"ip", network_of(i)}});
       },
       [](std::size_t i) {
         return ask("k", path_of(i) + "/17/x", method_of(i), address_in(network_of(i)));
       },
       [](std::size_t i) { return ask("k", path_of(i) + "/17/x", method_of(i), "1.2.3.4"); }});
  // No entry alone is selective: the square root of the count as tenants, each with as many paths.
  all.push_back(
      {"tenants",
       [](std::size_t i) {
         return rule_with({{"tenant", MatchExact{"t" + std::to_string(i % 317)}},
                           {"path", MatchPrefix{path_of(i / 317)}}});
       },
       [](std::size_t i) {
         return Texts{{"tenant", "t" + std::to_string(i % 317)}, {"path", path_of(i / 317) + "/x"}};
       },
       [](std::size_t i) {
         return Texts{{"tenant", "t" + std::to_string(i % 317)}, {"path", "/" + path_of(i)}};
       }});
  all.push_back({"catch-all-and-exact",
                 [](std::size_t i) {
                   if (i == 0) return rule_with({});
                   return rule_with({{"api_key", MatchExact{key_of(i)}}});
                 },
                 [](std::size_t i) { return ask(key_of(i), path_of(i), "GET", "10.1.2.3"); },
                 [](std::size_t i) { return ask("k", path_of(i), "GET", "10.1.2.3"); }});
  // Every rule applies: what is left is to write them down.
  all.push_back({"any",
                 [](std::size_t) {
                   return rule_with({{"api_key", MatchAny{}}});
                 },
                 [](std::size_t i) { return ask(key_of(i), path_of(i), "GET", "10.1.2.3"); },
                 [](std::size_t) {
                   return Texts{{"path", "/"}};
                 }});
  // Each rule has a list of four keys.
  all.push_back(
      {"in",
       [](std::size_t i) {
         return rule_with({{"api_key", weir::MatchIn{{key_of(4 * i), key_of(4 * i + 1),
                                                      key_of(4 * i + 2), key_of(4 * i + 3)}}}});
       },
       [](std::size_t i) { return ask(key_of(4 * i + 2), path_of(i), "GET", "10.1.2.3"); },
       [](std::size_t i) { return ask("no", path_of(i), "GET", "10.1.2.3"); }});
  all.push_back({"under",
                 [](std::size_t i) {
                   return rule_with({{"path", weir::MatchPath{path_of(i), true, false}}});
                 },
                 [](std::size_t i) { return ask("k", path_of(i) + "/17/x?y", "GET", "10.1.2.3"); },
                 [](std::size_t i) { return ask("k", "/x" + path_of(i), "GET", "10.1.2.3"); }});
  all.push_back(
      {"suffix",
       [](std::size_t i) {
         return rule_with({{"host", weir::MatchSuffix{"." + key_of(i) + ".example.com"}}});
       },
       [](std::size_t i) {
         return Texts{{"host", "www." + key_of(i) + ".example.com"}};
       },
       [](std::size_t i) {
         return Texts{{"host", "www" + key_of(i) + ".example.com"}};
       }});
  all.push_back(
      {"glob",
       [](std::size_t i) {
         return rule_with({{"path", weir::MatchGlob{path_of(i) + "/*/edit"}}});
       },
       [](std::size_t i) { return ask("k", path_of(i) + "/17/edit", "GET", "10.1.2.3"); },
       [](std::size_t i) { return ask("k", path_of(i) + "/17/see", "GET", "10.1.2.3"); }});
  all.push_back(
      {"cidrs",
       [](std::size_t i) {
         return rule_with({{"ip", weir::MatchCidrs{{network_of(2 * i), network_of(2 * i + 1)}}}});
       },
       [](std::size_t i) { return ask("k", path_of(i), "GET", address_in(network_of(2 * i + 1))); },
       [](std::size_t i) {
         return ask("k", path_of(i), "GET",
                    ip_text(1u << 24 | (static_cast<std::uint32_t>(random_of(i) & 0xFFFFFF))));
       }});
  // A tenant's rules, of which most must not hold or are bounds of a number.
  all.push_back(
      {"not-and-numbers",
       [](std::size_t i) {
         return rule_with({{"tenant", MatchExact{"t" + std::to_string(i)}},
                           {"plan", MatchExact{"free"}, true},
                           {"bytes", weir::MatchNumber{1000, 1'000'000}}});
       },
       [](std::size_t i) {
         return Texts{{"tenant", "t" + std::to_string(i)}, {"plan", "x"}, {"bytes", "5000"}};
       },
       [](std::size_t i) {
         return Texts{{"tenant", "t" + std::to_string(i)}, {"plan", "x"}, {"bytes", "50"}};
       }});
  // By a number alone: each rule has a range of its own.
  all.push_back({"ranges",
                 [](std::size_t i) {
                   return rule_with({{"bytes", weir::MatchNumber{1000 * i, 1000 * i + 1999}}});
                 },
                 [](std::size_t i) {
                   return Texts{{"bytes", std::to_string(1000 * i + 500)}};
                 },
                 [](std::size_t) {
                   return Texts{{"bytes", "999999999999"}};
                 }});
  // Hostile: every rule applies by an entry of its own, so that nothing can be found together.
  all.push_back({"absent",
                 [](std::size_t i) {
                   return rule_with({{key_of(i), weir::MatchAbsent{}}});
                 },
                 [](std::size_t) {
                   return Texts{{"path", "/"}};
                 },
                 [](std::size_t i) {
                   return Texts{{key_of(i), "x"}};
                 }});
  return all;
}

std::vector<Rule> make_rules(const Set& set, std::size_t count) {
  std::vector<Rule> rules;
  for (std::size_t i = 0; i < count; ++i) {
    Rule rule = set.rule(i);
    rule.domain = "api";
    rule.name = "rule-" + std::to_string(i);
    rule.limit = 100;
    rules.push_back(std::move(rule));
  }
  return rules;
}

constexpr std::size_t kAsks = 1024;

/// 1024 requests in turn, so that a large index does not come from the first cache.
template <typename Match>
void ask_all(benchmark::State& state, const Set& set, bool hits, Match match) {
  const auto count = static_cast<std::size_t>(state.range(0));
  std::vector<Texts> texts;
  for (std::size_t i = 0; i < kAsks; ++i) {
    const std::size_t rule = random_of(i + 77) % count;
    texts.push_back(hits ? set.hit(rule) : set.miss(rule));
  }
  std::vector<std::vector<weir::Entry>> entries;
  for (const Texts& each : texts) {
    std::vector<weir::Entry>& list = entries.emplace_back();
    for (const auto& [key, value] : each) list.push_back({key, value});
  }
  std::vector<weir::Request> requests;
  for (const auto& each : entries) requests.push_back({"api", each, 1});
  std::vector<std::uint32_t> out;
  out.reserve(count);
  std::size_t at = 0;
  std::size_t found = 0;
  for (auto _ : state) {
    out.clear();
    match(requests[at++ % kAsks], out);
    found += out.size();
  }
  state.counters["found"] = static_cast<double>(found) / static_cast<double>(state.iterations());
}

void index_of(benchmark::State& state, const Set& set, bool hits) {
  const std::vector<Rule> rules = make_rules(set, static_cast<std::size_t>(state.range(0)));
  const weir::RuleIndex index(rules);
  ask_all(state, set, hits, [&](const weir::Request& request, std::vector<std::uint32_t>& out) {
    index.match(request, out);
  });
}

void scan_of(benchmark::State& state, const Set& set, bool hits) {
  const std::vector<Rule> rules = make_rules(set, static_cast<std::size_t>(state.range(0)));
  std::map<std::string, std::vector<std::uint32_t>, std::less<>> by_domain;
  for (std::uint32_t i = 0; i < rules.size(); ++i) by_domain[rules[i].domain].push_back(i);
  ask_all(state, set, hits, [&](const weir::Request& request, std::vector<std::uint32_t>& out) {
    const auto domain = by_domain.find(request.domain);
    if (domain == by_domain.end()) return;
    for (const std::uint32_t rule : domain->second) {
      if (rules[rule].matches(request)) out.push_back(rule);
    }
  });
}

void build_of(benchmark::State& state, const Set& set) {
  const std::vector<Rule> rules = make_rules(set, static_cast<std::size_t>(state.range(0)));
  std::size_t memory = 0;
  for (auto _ : state) {
    const weir::RuleIndex index(rules);
    memory = index.memory();
  }
  state.counters["bytes_per_rule"] =
      static_cast<double>(memory) / static_cast<double>(rules.size());
}

const bool registered = [] {
  static const std::vector<Set> all = sets();
  for (const Set& set : all) {
    for (const bool hits : {true, false}) {
      const std::string what = set.name + (hits ? "/hit" : "/miss");
      for (const int count : {10, 1'000, 10'000, 100'000}) {
        benchmark::RegisterBenchmark(("index/" + what).c_str(), index_of, set, hits)->Arg(count);
        benchmark::RegisterBenchmark(("scan/" + what).c_str(), scan_of, set, hits)->Arg(count);
      }
    }
    benchmark::RegisterBenchmark(("build/" + set.name).c_str(), build_of, set)
        ->Arg(10'000)
        ->Arg(100'000)
        ->Unit(benchmark::kMillisecond);
  }
  return true;
}();

}  // namespace
