#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weir/crdt/escrow.h>
#include <weir/crdt/ids.h>
#include <weir/crdt/time.h>
#include <weir/limits/rules/rule.h>
#include <weir/node/log.h>
#include <weir/rpc/net/tls_context.h>

namespace weir::node {

struct PeerConfig {
  crdt::Member member;
  std::string address;                             ///< literal, "10.0.0.2:7400"
  std::string certificate;                         ///< rpc::PeerAddress::certificate
  std::vector<crdt::WeightChange> weights = {{}};  ///< its part of escrow rules' limits
  int line = 0;                                    ///< where the file names it
  int column = 0;
};

/// Rules with enforcement: home. docs/home.md
struct HomeConfig {
  Nanos deadline = 500 * kMillisecond;           ///< of a forwarded request
  std::map<std::string, unsigned> weights = {};  ///< by region, 0 to 100; 1 if not named
};

struct StorageConfig {
  std::string path;                      ///< a directory
  std::uint64_t map_size = 64ull << 30;  ///< bytes of address space, a multiple of 4096
};

/// What X-RateLimit-Reset counts: seconds from now, or the Unix time in seconds.
enum class ResetFormat : std::uint8_t { seconds, epoch };

/// What gateways ask by forwarding requests (node/fronts/http/forward_auth.h).
struct ForwardAuthConfig {
  std::optional<std::vector<MatchCidr>> trusted_proxies;  ///< none: loopback
  /// Header fields, in lower case, and the entries that they become.
  std::vector<std::pair<std::string, std::string>> headers;
};

struct HttpConfig {
  ResetFormat reset = ResetFormat::seconds;
  unsigned max_connections = 1024;
  std::size_t max_body = 64u << 10;  ///< bytes
  ForwardAuthConfig forward_auth;
};

struct GrpcConfig {
  unsigned max_connections = 1024;
  std::size_t max_message = 64u << 10;  ///< bytes
  Nanos max_age = 30 * kMinute;         ///< of a connection
};

struct RedisConfig {
  std::string domain = "redis";  ///< of all requests
  unsigned max_connections = 1024;
};

/// TLS of the peers, or of a front. Paths as in NodeConfig; what they are is in rpc::TlsOptions.
struct TlsConfig {
  std::string cert;
  std::string key;
  std::string ca;
  std::string crl;
  rpc::ClientCertificate client_certificate = rpc::ClientCertificate::none;
  bool tls12 = false;
};

/// Names of fronts in `listen`, in the order in which they start. node/fronts/factory.cc makes
/// them.
inline constexpr std::array<std::string_view, 5> kFronts = {"admin", "clients", "http", "grpc",
                                                            "redis"};

/// One address that a front listens on.
struct ListenConfig {
  std::string front;  ///< of kFronts
  std::string address;
};

/// node.yaml (docs/configuration.md has every field), checked. Paths are absolute or relative to
/// the working directory: those of the file have its folder in front. Addresses are literal.
struct NodeConfig {
  std::string cluster;
  /// At least kMinSecret bytes; empty only if there are no peers, or they have certificates.
  std::string secret;
  std::string previous_secret;            ///< rpc::PeerOptions::previous_secret
  std::string series_key;                 ///< what series ids depend on; empty: on the secret
  std::vector<std::string> secret_files;  ///< that were named, private keys included
  crdt::Member self;
  std::string listen_peers = "127.0.0.1:7400";
  /// Fronts and their addresses. A front that `listen` does not name does not listen.
  std::vector<ListenConfig> fronts = {
      {"admin", "127.0.0.1:7403"}, {"clients", "127.0.0.1:7401"}, {"http", "127.0.0.1:7402"}};
  unsigned threads = 0;           ///< workers that answer requests; 0: as many as there are cores
  std::vector<PeerConfig> peers;  ///< every other member of the cluster
  std::vector<crdt::WeightChange> weights = {{}};  ///< this node's part, as its peers know it
  std::string rules;
  std::optional<StorageConfig> storage;  ///< none: in memory only
  Nanos sync_interval = 250 * kMillisecond;
  Nanos anti_entropy_interval = 5 * kSecond;
  Nanos commit_interval = 5 * kMillisecond;
  Nanos max_commit_wait = kSecond;
  Nanos max_skew = kSecond;
  /// From the signal to stop until the node takes no more requests.
  Nanos drain = 5 * kSecond;
  std::uint64_t max_series = 1'000'000;
  bool populate = false;                      ///< LimiterOptions::populate
  std::uint64_t max_peer_cells = 20'000'000;  ///< ReplicaOptions::max_peer_cells
  std::uint64_t max_long_cells = 65'536;      ///< the same
  std::uint64_t max_request_ids = 65'536;
  Nanos request_id_ttl = kMinute;
  std::uint64_t max_tickets = 65'536;
  unsigned caller_percent = 25;   ///< LimiterOptions::caller_percent
  unsigned address_percent = 75;  ///< of a front's connections: what one address may have of them
  LogLevel log_level = LogLevel::info;
  LogFormat log_format = LogFormat::json;
  HttpConfig http;
  GrpcConfig grpc;
  RedisConfig redis;
  HomeConfig home;
  std::string access;  ///< the access file (access/access_file.h); empty: loopback alone may call
  std::map<std::string, TlsConfig, std::less<>> tls;  ///< of "peers" and of kFronts; others: none
  std::string file;                                   ///< where it was read from, for messages
  /// Added to what the wall clock says. For tests: `weir-node --clock-offset` sets it, no file
  /// does.
  Nanos clock_offset = 0;
  Nanos clock_offset_until = kNever;  ///< on CLOCK_MONOTONIC; from then on it is 0
  Nanos clock_flaps = 0;              ///< if not 0: it is on and off in turn, for so long each
};

inline constexpr std::size_t kMinSecret = 16;
inline constexpr std::size_t kMaxSecret = 4096;
inline constexpr std::size_t kMaxPeers = 15;
inline constexpr unsigned kMaxThreads = 256;
inline constexpr std::size_t kMaxListen = 16;  ///< addresses of one front
inline constexpr std::uint32_t kMaxWeight = 1'000'000;
inline constexpr std::size_t kMaxWeightChanges = 64;

struct ConfigError {
  std::string file;
  int line = 0;          ///< from 1; 0 if the file could not be read
  int column = 0;        ///< from 1
  std::string field;     ///< "peers[2].address"; empty for the document
  std::string expected;  ///< what should stand there, and what does. Never a secret
  /// "node.yaml:12:5: peers[2].address: expected …"
  std::string to_string() const;
};

struct LoadedConfig {
  std::optional<NodeConfig> config;  ///< empty if there were errors
  std::vector<ConfigError> errors;   ///< all that were found, in document order
};

/// Reads a configuration. Unknown and repeated fields are errors. `file` is for messages, and its
/// folder is what relative paths start from. Reads files of secrets if they are named, nothing
/// else.
LoadedConfig parse_config(std::string_view text, const std::string& file);

/// The same from a file; one that cannot be read, or is larger than 1 MiB, is an error.
LoadedConfig load_config(const std::string& path);

/// Which promise of these rules a node with this configuration cannot keep; empty: it keeps all.
std::string unsuitable(const RuleSet& rules, const NodeConfig& config);

/// Why the storage's folder can be neither made nor written by this process, as far as can be told
/// without doing it; empty: it can, or nothing is stored.
std::string unusable_storage(const NodeConfig& config);

/// Files of secrets and private keys that every user of this machine may read.
std::vector<std::string> readable_secrets(const NodeConfig& config);

/// "350ms", "-1s500ms", "0s": a length of time (parse_duration), with a sign in
/// front if it is behind. False if `text` is anything else.
bool parse_clock_offset(std::string_view text, Nanos& out);

/// "2026-12-01T00:00:00Z": an instant in UTC, from 1970 to 2200. False if `text` is anything else.
bool parse_instant(std::string_view text, Nanos& out);

}  // namespace weir::node
