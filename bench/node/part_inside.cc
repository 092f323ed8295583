#include <fmt/format.h>
#include <malloc.h>

#include <algorithm>
#include <vector>

#include <weir/bench/keys.h>
#include <weir/bench/machine.h>
#include <weir/bench/node/node_parts.h>
#include <weir/bench/node/pushes.h>
#include <weir/bench/working_node.h>
#include <weir/node/engine/engine.h>
#include <weir/rpc/wire.h>

namespace weir::bench {
namespace {

constexpr const char* kAlgorithms[] = {"token_bucket", "fixed_window"};
constexpr std::size_t kBatch = 2048;
constexpr crdt::PeerIndex kPeers = 4;

crdt::Incarnation writer(crdt::PeerIndex peer) {
  return {7, peer + 1};
}

crdt::ReplicaOptions replica_options() {
  crdt::ReplicaOptions options;
  options.self = {"here", "node-0"};
  for (crdt::PeerIndex i = 0; i < kPeers; ++i) {
    options.peers.push_back({"there", "node-" + std::to_string(i + 1)});
  }
  return options;
}

/// An engine without a disk, whose peers acknowledge what they are sent.
class EngineOfFive {
 public:
  EngineOfFive(const std::shared_ptr<const RuleSet>& rules, std::uint64_t keys, Nanos now)
      : now_(now) {
    node::EngineOptions options;
    options.replica = replica_options();
    options.rules = rules;
    options.max_series = keys;
    options.fresh_incarnation = [] { return crdt::Incarnation{1, 1}; };
    node::EngineEvents events;
    events.send = [this](crdt::PeerIndex peer, const crdt::Message& message) {
      const auto* push = std::get_if<crdt::Push>(&message);
      if (push != nullptr) acks_.push_back({peer, {push->pusher, writer(peer), push->upto}});
    };
    events.reincarnated = [](const crdt::Incarnation&) {};
    events.log = [](const std::string&, const std::string&) {};
    engine_.emplace(std::move(options), nullptr, std::move(events));
    std::string error;
    if (!engine_->start(now_, {}, error)) throw std::runtime_error(error);
    for (crdt::PeerIndex i = 0; i < kPeers; ++i) engine_->peer_up(i, writer(i), now_);
  }

  void count(std::uint64_t first, std::size_t count) {
    for (std::uint64_t key = first; key < first + count; ++key) {
      const Key16 text = key_of(key);
      const Entry entry{"key", text.view()};
      engine_->check({"api", {&entry, 1}, 1}, now_, decision_);
    }
    pump();
  }
  void receive(crdt::PeerIndex peer, const crdt::Push& push) {
    engine_->receive(peer, writer(peer), push, now_);
    if (engine_->status().unabsorbed > 0) throw std::runtime_error("no room in the limiter");
  }
  /// Time goes on until everything is acknowledged.
  void settle() {
    for (int i = 0; i < 400; ++i) pump();
  }
  const crdt::Replica& replica() const { return engine_->replica(); }

 private:
  struct Answer {
    crdt::PeerIndex peer;
    crdt::Ack ack;
  };
  void pump() {
    now_ += 5 * kMillisecond;
    engine_->pump(now_);
    for (const Answer& one : std::exchange(acks_, {})) {
      engine_->receive(one.peer, writer(one.peer), one.ack, now_);
    }
  }

  Nanos now_;
  std::vector<Answer> acks_;
  Decision decision_;
  std::optional<node::Engine> engine_;
};

/// Bytes of a key that this node and four others have counted, each once.
Json five_writers(const std::string& algorithm, std::uint64_t keys) {
  const Pushes pushes(algorithm);
  const Nanos now = wall_clock();
  pushes.counts(0, kBatch, now);
  ::malloc_trim(0);
  const std::uint64_t before = resident_bytes();
  EngineOfFive engine(pushes.rules(), keys, now);
  for (std::uint64_t first = 0; first < keys; first += kBatch) {
    engine.count(first, std::min<std::uint64_t>(kBatch, keys - first));
  }
  for (crdt::PeerIndex peer = 0; peer < kPeers; ++peer) {
    for (std::uint64_t first = 0; first < keys; first += kBatch) {
      const auto counts = pushes.counts(first, std::min<std::uint64_t>(kBatch, keys - first), now);
      engine.receive(peer, Pushes::push(writer(peer), first, counts));
    }
  }
  engine.settle();
  std::size_t slots = 0;
  engine.replica().for_each([&](const crdt::Cell& cell) { slots += cell.slots.size(); });
  if (slots != 5 * keys) throw std::runtime_error(fmt::format("{} slots of {} keys", slots, keys));
  ::malloc_trim(0);
  const auto bytes = static_cast<double>(resident_bytes() - before);
  return {{"algorithm", algorithm},
          {"bytes_per_key", round_to(bytes / static_cast<double>(keys), 1)}};
}

/// Pushes of four peers, one after the other over all keys, into an empty replica.
Json merges(const std::string& algorithm, std::uint64_t keys) {
  const Pushes pushes(algorithm);
  const Nanos now = wall_clock();
  crdt::ReplicaOptions options = replica_options();
  options.incarnation = {1, 1};
  crdt::Replica replica(std::move(options), true);
  for (crdt::PeerIndex i = 0; i < kPeers; ++i) replica.peer_up(i, writer(i), now);
  replica.take();
  std::vector<double> slots_per_s;
  std::uint64_t all = 0;
  for (crdt::PeerIndex peer = 0; peer < kPeers; ++peer) {
    std::uint64_t spent = 0;
    for (std::uint64_t first = 0; first < keys; first += kBatch) {
      const auto counts = pushes.counts(first, std::min<std::uint64_t>(kBatch, keys - first), now);
      const crdt::Push push = Pushes::push(writer(peer), first, counts);
      const std::uint64_t from = thread_cpu_ns();
      replica.receive(peer, writer(peer), push, now);
      const crdt::Outbox out = replica.take();
      spent += thread_cpu_ns() - from;
      if (out.changed.size() != counts.size())
        throw std::runtime_error("a push changed too little");
    }
    slots_per_s.push_back(static_cast<double>(keys) * 1e9 / static_cast<double>(spent));
    all += spent;
  }
  std::vector<std::byte> encoded;
  std::string error;
  const crdt::Push push = Pushes::push(writer(0), 0, pushes.counts_in_use(1000, now));
  if (!rpc::encode_bytes(push, encoded, error)) throw std::runtime_error(error);
  return {
      {"algorithm", algorithm},
      {"new_cells_per_s", std::round(slots_per_s.front())},
      {"known_cells_per_s", std::round(slots_per_s.back())},
      {"slots_per_s", std::round(4.0 * static_cast<double>(keys) * 1e9 / static_cast<double>(all))},
      {"wire_bytes_per_slot", static_cast<double>(encoded.size()) / 1000}};
}

double extreme(const Json& rows, const char* field, bool largest) {
  std::vector<double> values;
  for (const Json& row : rows) values.push_back(row.at(field).get<double>());
  return largest ? *std::max_element(values.begin(), values.end())
                 : *std::min_element(values.begin(), values.end());
}

}  // namespace

Json node_writers(const NodeBenchOptions& options) {
  need(options.counted_keys * 1500, fmt::format("{} keys of five writers", options.counted_keys));
  Json rows = Json::array();
  for (const char* algorithm : kAlgorithms) {
    rows.push_back(in_child([&] { return five_writers(algorithm, options.counted_keys); }));
  }
  const double most = extreme(rows, "bytes_per_key", true);
  return {{"part", "writers"},
          {"keys", options.counted_keys},
          {"rows", std::move(rows)},
          {"figures", {{"bytes_per_key_5w", most}}}};
}

Json node_merge(const NodeBenchOptions& options) {
  need(options.keys * 900, fmt::format("a replica of {} cells of four writers", options.keys));
  Json rows = Json::array();
  for (const char* algorithm : kAlgorithms) {
    rows.push_back(in_child([&] { return merges(algorithm, options.keys); }));
  }
  const double slowest = extreme(rows, "slots_per_s", false);
  const double widest = extreme(rows, "wire_bytes_per_slot", true);
  return {{"part", "merge"},
          {"keys", options.keys},
          {"rows", std::move(rows)},
          {"figures", {{"merge_slots_per_s", slowest}, {"wire_bytes_per_slot", widest}}}};
}

}  // namespace weir::bench
