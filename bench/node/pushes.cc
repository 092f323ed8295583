#include <weir/bench/node/pushes.h>

#include <stdexcept>

#include <weir/bench/keys.h>
#include <weir/bench/node/node_parts.h>
#include <weir/limits/replica_side.h>
#include <weir/limits/rules/rules_yaml.h>

namespace weir::bench {

std::string key_rules_text(const std::string& algorithm) {
  std::string text = "domain: api\nrules:\n  - {name: per-key, key: [key], window: 1d, algorithm: ";
  text += algorithm;
  text += algorithm == "token_bucket" ? ", limit: 10, burst: 2000" : ", limit: 100000";
  return text + ", durability: async}\n";
}

Pushes::Pushes(const std::string& algorithm) {
  LoadedRules loaded = parse_rules(key_rules_text(algorithm), "rules.yaml");
  if (loaded.rules == nullptr) throw std::runtime_error(loaded.errors[0].to_string());
  rules_ = loaded.rules;
}

std::vector<crdt::OwnCount> Pushes::counts(std::uint64_t first, std::size_t count,
                                           Nanos now) const {
  LimiterOptions options;
  options.max_series = count + 1;
  options.max_request_ids = 0;
  options.max_tickets = 0;
  options.replicated = true;
  options.incarnation = {1, 1};
  Limiter limiter(rules_, options);
  Decision decision;
  for (std::uint64_t key = first; key < first + count; ++key) {
    const Key16 text = key_of(key);
    const Entry entry{"key", text.view()};
    limiter.check({"api", {&entry, 1}, 1}, now, decision);
  }
  std::vector<crdt::OwnCount> out;
  while (limiter.replica_side().drain(out, count)) {
  }
  if (out.size() != count) throw std::runtime_error("a key was not counted");
  return out;
}

crdt::Push Pushes::push(const crdt::Incarnation& writer, std::uint64_t after,
                        const std::vector<crdt::OwnCount>& counts) {
  crdt::Push push;
  push.pusher = writer;
  push.after = after;
  push.upto = after + counts.size();
  push.base = after == 0;
  for (const crdt::OwnCount& count : counts) {
    push.delta.cells.push_back({count.cell, {{{writer, count.birth}, count.value}}, count.bucket});
  }
  push.delta.members[writer] = {"there", "node-" + std::to_string(writer.lo)};
  return push;
}

}  // namespace weir::bench
