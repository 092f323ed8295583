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

/// A limiter that counts hits for them.
class Pushes::Counter {
 public:
  Counter(const Pushes& pushes, std::size_t keys) : limiter_(pushes.rules_, options(keys)) {}

  void hit(std::uint64_t key, std::uint64_t hits, Nanos now) {
    const Key16 text = key_of(key);
    const Entry entry{"key", text.view()};
    limiter_.check({"api", {&entry, 1}, hits}, now, decision_);
  }
  std::vector<crdt::OwnCount> take(std::size_t count) {
    std::vector<crdt::OwnCount> out;
    while (limiter_.replica_side().drain(out, count)) {
    }
    if (out.size() != count) throw std::runtime_error("a key was not counted");
    return out;
  }

 private:
  static LimiterOptions options(std::size_t keys) {
    LimiterOptions options;
    options.max_series = keys + 1;
    options.max_request_ids = 0;
    options.max_tickets = 0;
    options.replicated = true;
    options.incarnation = {1, 1};
    return options;
  }
  Limiter limiter_;
  Decision decision_;
};

std::vector<crdt::OwnCount> Pushes::counts(std::uint64_t first, std::size_t count,
                                           Nanos now) const {
  Counter counter(*this, count);
  for (std::uint64_t key = first; key < first + count; ++key) counter.hit(key, 1, now);
  return counter.take(count);
}

std::vector<crdt::OwnCount> Pushes::counts_in_use(std::size_t count, Nanos now) const {
  Counter counter(*this, count);
  const auto keys = static_cast<Nanos>(count);
  for (std::uint64_t key = 0; key < count; ++key) {
    counter.hit(key, 1 + key % 200, now - (keys - static_cast<Nanos>(key)) * kSecond);
  }
  counter.take(count);
  for (std::uint64_t key = 0; key < count; ++key) {
    counter.hit(key, 1, now + static_cast<Nanos>(key) * 250 * kMillisecond / keys);
  }
  return counter.take(count);
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
