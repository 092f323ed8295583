#include <weir/node/setup.h>

#include <sched.h>
#include <sodium.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>

namespace weir::node {
namespace {

crdt::Incarnation random_incarnation() {
  crdt::Incarnation id;
  randombytes_buf(&id, sizeof id);
  return id;
}

/// Series ids depend on series_key, else on the cluster's secret, and on its name where there is
/// neither.
HashKey hash_key(const NodeConfig& config) {
  HashKey key{};
  const std::string& chosen = config.series_key.empty() ? config.secret : config.series_key;
  const std::string& secret = chosen.empty() ? config.cluster : chosen;
  constexpr std::string_view kPurpose = "weir series ids";
  crypto_generichash_state state;
  crypto_generichash_init(&state, nullptr, 0, key.size());
  auto add = [&state](std::string_view text) {
    crypto_generichash_update(&state, reinterpret_cast<const unsigned char*>(text.data()),
                              text.size());
  };
  add(kPurpose);
  add(secret);
  crypto_generichash_final(&state, key.data(), key.size());
  return key;
}

}  // namespace

unsigned usable_cores() {
  cpu_set_t set;
  if (::sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  return static_cast<unsigned>(std::clamp(CPU_COUNT(&set), 1, static_cast<int>(kMaxThreads)));
}

EngineOptions engine_options(const NodeConfig& config, std::shared_ptr<const RuleSet> rules) {
  EngineOptions options;
  options.replica.self = config.self;
  options.shareholders.push_back({config.self, config.weights});
  for (const PeerConfig& peer : config.peers) {
    options.replica.peers.push_back(peer.member);
    options.shareholders.push_back({peer.member, peer.weights});
  }
  options.replica.sync_interval = config.sync_interval;
  options.replica.anti_entropy_interval = config.anti_entropy_interval;
  options.replica.max_skew = config.max_skew;
  options.replica.max_peer_cells = config.max_peer_cells;
  options.replica.max_long_cells = config.max_long_cells;
  randombytes_buf(&options.replica.seed, sizeof options.replica.seed);
  options.rules = std::move(rules);
  options.hash_key = hash_key(config);
  options.max_series = config.max_series;
  options.populate = config.populate;
  options.max_request_ids = config.max_request_ids;
  options.request_id_ttl = config.request_id_ttl;
  options.max_tickets = config.max_tickets;
  options.caller_percent = config.caller_percent;
  randombytes_buf(options.ticket_key.data(), options.ticket_key.size());
  options.max_commit_wait = config.max_commit_wait;
  options.fresh_incarnation = random_incarnation;
  return options;
}

ForwardOptions home_options(const NodeConfig& config) {
  ForwardOptions options;
  options.members.push_back(config.self);
  for (const PeerConfig& peer : config.peers) options.members.push_back(peer.member);
  options.weights = config.home.weights;
  options.deadline = config.home.deadline;
  options.request_id_ttl = config.request_id_ttl;
  return options;
}

storage::LmdbOptions lmdb_options(const NodeConfig& config) {
  storage::LmdbOptions options;
  randombytes_buf(&options.seed, sizeof options.seed);
  options.path = config.storage->path;
  options.cluster = config.cluster;
  options.self = config.self;
  options.map_bytes = config.storage->map_size;
  options.max_skew = config.max_skew;
  return options;
}

}  // namespace weir::node
