#include <weir/node/config.h>

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace weir::node {
namespace {

using testing::ElementsAre;
using testing::Pair;

std::vector<std::string> errors(const std::string& yaml, const std::string& file = "node.yaml") {
  const LoadedConfig loaded = parse_config(yaml, file);
  EXPECT_EQ(loaded.config.has_value(), loaded.errors.empty());
  std::vector<std::string> out;
  for (const ConfigError& error : loaded.errors) out.push_back(error.to_string());
  return out;
}

NodeConfig good(const std::string& yaml, const std::string& file = "node.yaml") {
  const LoadedConfig loaded = parse_config(yaml, file);
  for (const ConfigError& error : loaded.errors) ADD_FAILURE() << error.to_string();
  return loaded.config.value_or(NodeConfig{});
}

const std::string kMinimal = R"(cluster: {name: demo}
region: eu-west-1
node: eu-1
rules: rules.yaml
storage: none
)";

TEST(Config, ClockOffsetsHaveASign) {
  Nanos offset = -1;
  EXPECT_TRUE(parse_clock_offset("0s", offset));
  EXPECT_EQ(offset, 0);
  EXPECT_TRUE(parse_clock_offset("350ms", offset));
  EXPECT_EQ(offset, 350 * kMillisecond);
  EXPECT_TRUE(parse_clock_offset("-1s500ms", offset));
  EXPECT_EQ(offset, -1500 * kMillisecond);
  EXPECT_TRUE(parse_clock_offset("-1h", offset));
  EXPECT_EQ(offset, -kHour);
  for (const char* wrong : {"", "-", "--1s", "+1s", "1", "-0s", "367d", "2 s"}) {
    EXPECT_FALSE(parse_clock_offset(wrong, offset)) << wrong;
  }
}

class Folder {
 public:
  Folder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "weir-config-XXXXXX").string();
    path_ = mkdtemp(pattern.data());
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  std::string write(const std::string& name, const std::string& text) const {
    const std::string file = path_ + "/" + name;
    std::ofstream(file, std::ios::binary) << text;
    return file;
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

std::string fronts(const NodeConfig& config) {
  std::string out;
  for (const ListenConfig& one : config.fronts) out += one.front + "=" + one.address + " ";
  return out;
}

TEST(Config, OnlyFrontsThatAreNamedListen) {
  EXPECT_EQ(fronts(good(std::string(kMinimal) + "listen: {http: 127.0.0.1:1}\n")),
            "http=127.0.0.1:1 ");
  EXPECT_THAT(errors(std::string(kMinimal) + "listen: {htpp: 127.0.0.1:1, http: []}\n"),
              ElementsAre(testing::HasSubstr("listen.htpp: unknown field; expected"),
                          testing::HasSubstr("listen.http: expected 1 to 16 addresses, got 0")));
}

TEST(Config, DefaultsBindLoopback) {
  const NodeConfig config = good(kMinimal);
  EXPECT_EQ(config.cluster, "demo");
  EXPECT_EQ(config.self, (crdt::Member{"eu-west-1", "eu-1"}));
  EXPECT_EQ(config.secret, "");
  EXPECT_EQ(config.listen_peers, "127.0.0.1:7400");
  EXPECT_EQ(fronts(config), "admin=127.0.0.1:7403 clients=127.0.0.1:7401 http=127.0.0.1:7402 ");
  EXPECT_EQ(config.threads, 0u);
  EXPECT_TRUE(config.peers.empty());
  EXPECT_EQ(config.rules, "rules.yaml");
  EXPECT_FALSE(config.storage.has_value());
  EXPECT_EQ(config.sync_interval, 250 * kMillisecond);
  EXPECT_EQ(config.anti_entropy_interval, 5 * kSecond);
  EXPECT_EQ(config.commit_interval, 5 * kMillisecond);
  EXPECT_EQ(config.max_skew, kSecond);
  EXPECT_EQ(config.max_series, 1'000'000u);
  EXPECT_EQ(config.max_request_ids, 65'536u);
  EXPECT_EQ(config.request_id_ttl, kMinute);
  EXPECT_EQ(config.max_tickets, 65'536u);
  EXPECT_EQ(config.caller_percent, 25u);
  EXPECT_EQ(config.log_level, LogLevel::info);
  EXPECT_EQ(config.log_format, LogFormat::json);
  EXPECT_EQ(config.http.reset, ResetFormat::seconds);
  EXPECT_EQ(config.http.max_connections, 1024u);
  EXPECT_EQ(config.http.max_body, 64u << 10);
  EXPECT_EQ(config.grpc.max_connections, 1024u);
  EXPECT_EQ(config.grpc.max_message, 64u << 10);
  EXPECT_EQ(config.grpc.max_age, 30 * kMinute);
  EXPECT_EQ(config.redis.domain, "redis");
  EXPECT_EQ(config.redis.max_connections, 1024u);
}

TEST(Config, ReadsEveryField) {
  const NodeConfig config = good(R"(
cluster: {name: demo, secret: "0123456789abcdef"}
region: eu-west-1
node: eu-1
listen: {peers: "[::]:7500", clients: 0.0.0.0:0, http: ["[::1]:7502", 127.0.0.1:7502], admin: 127.0.0.1:7503}
threads: 3
peers:
  - {region: us-east-1, node: us-1, address: 10.0.0.2:7400}
  - {region: us-east-1, node: us-2, address: "[2001:DB8::0:1]:7400"}
rules: conf/rules.yaml
storage: {path: /var/lib/weir, map_size: 512MiB}
sync_interval: 100ms
anti_entropy_interval: 10s
commit_interval: 2ms
max_skew: 500ms
max_series: 42
max_peer_cells: 4200
max_long_cells: 1042
populate: true
max_request_ids: 0
request_id_ttl: 5m
max_tickets: 43
caller_percent: 44
address_percent: 12
access: who.yaml
log: {level: debug, format: text}
http:
  reset: epoch
  max_connections: 7
  max_body: 8KiB
  forward_auth: {trusted_proxies: [10.0.0.0/8, "::1"], headers: {X-API-Key: api_key}}
)",
                                 "/etc/weir/node.yaml");
  EXPECT_EQ(config.secret, "0123456789abcdef");
  EXPECT_EQ(config.http.forward_auth.trusted_proxies,
            (std::vector{*parse_cidr("10.0.0.0/8"), *parse_cidr("::1")}));
  EXPECT_THAT(config.http.forward_auth.headers, ElementsAre(Pair("x-api-key", "api_key")));
  EXPECT_EQ(config.listen_peers, "[::]:7500");
  EXPECT_EQ(fronts(config),
            "clients=0.0.0.0:0 http=[::1]:7502 http=127.0.0.1:7502 admin=127.0.0.1:7503 ");
  EXPECT_EQ(config.threads, 3u);
  ASSERT_EQ(config.peers.size(), 2u);
  EXPECT_EQ(config.peers[0].member, (crdt::Member{"us-east-1", "us-1"}));
  EXPECT_EQ(config.peers[0].address, "10.0.0.2:7400");
  EXPECT_EQ(config.peers[1].address, "[2001:db8::1]:7400");
  EXPECT_EQ(config.rules, "/etc/weir/conf/rules.yaml");
  ASSERT_TRUE(config.storage.has_value());
  EXPECT_EQ(config.storage->path, "/var/lib/weir");
  EXPECT_EQ(config.storage->map_size, 512ull << 20);
  EXPECT_EQ(config.sync_interval, 100 * kMillisecond);
  EXPECT_EQ(config.anti_entropy_interval, 10 * kSecond);
  EXPECT_EQ(config.commit_interval, 2 * kMillisecond);
  EXPECT_EQ(config.max_skew, 500 * kMillisecond);
  EXPECT_EQ(config.max_series, 42u);
  EXPECT_EQ(config.max_peer_cells, 4200u);
  EXPECT_EQ(config.max_long_cells, 1042u);
  EXPECT_TRUE(config.populate);
  EXPECT_EQ(config.max_request_ids, 0u);
  EXPECT_EQ(config.request_id_ttl, 5 * kMinute);
  EXPECT_EQ(config.max_tickets, 43u);
  EXPECT_EQ(config.caller_percent, 44u);
  EXPECT_EQ(config.address_percent, 12u);
  EXPECT_EQ(config.access, "/etc/weir/who.yaml");
  EXPECT_EQ(config.log_level, LogLevel::debug);
  EXPECT_EQ(config.log_format, LogFormat::text);
  EXPECT_EQ(config.http.reset, ResetFormat::epoch);
  EXPECT_EQ(config.http.max_connections, 7u);
  EXPECT_EQ(config.http.max_body, 8u << 10);
}

TEST(Config, StorageTakesItsDefaultSize) {
  const NodeConfig config =
      good("cluster: {name: demo}\nregion: r\nnode: n\nrules: r.yaml\nstorage: {path: data}\n",
           "a/n.yaml");
  EXPECT_EQ(config.storage.value().path, "a/data");
  EXPECT_EQ(config.storage.value().map_size, 64ull << 30);
}

TEST(Config, NamesTheMissingFields) {
  EXPECT_THAT(errors("log: {level: info}\n"),
              ElementsAre("node.yaml:1:1: cluster: required field is missing",
                          "node.yaml:1:1: region: required field is missing",
                          "node.yaml:1:1: node: required field is missing",
                          "node.yaml:1:1: rules: required field is missing",
                          "node.yaml:1:1: storage: required field is missing"));
  EXPECT_THAT(errors("cluster: {}\nregion: r\nnode: n\nrules: r\nstorage: {}\n"),
              ElementsAre("node.yaml:1:10: cluster.name: required field is missing",
                          "node.yaml:5:10: storage.path: required field is missing"));
}

TEST(Config, ReportsAllErrorsInDocumentOrder) {
  EXPECT_THAT(
      errors(R"(cluster: {name: "a b"}
region:
node: [eu-1]
nodes: 3
listen: {http: localhost:7402, grpx: 127.0.0.1:1}
rules: ""
storage: some
sync_interval: 1
max_series: 0x10
max_series: 5
log: {level: loud, format: xml}
http: {reset: minutes, max_connections: 0, max_body: 64KB}
)"),
      ElementsAre(
          "node.yaml:1:17: cluster.name: expected a name of 1 to 64 letters, digits, '-', '_' or "
          "'.', got 'a b'",
          "node.yaml:2:1: region: expected a value, got nothing",
          "node.yaml:3:7: node: expected a name of 1 to 64 letters, digits, '-', '_' or '.', got a "
          "list",
          "node.yaml:4:1: nodes: unknown field; expected one of cluster, region, node, listen, "
          "weight, peers, rules, storage, sync_interval, anti_entropy_interval, commit_interval, "
          "max_commit_wait, max_skew, drain, threads, max_series, populate, max_peer_cells, "
          "max_long_cells, max_request_ids, "
          "request_id_ttl, "
          "max_tickets, caller_percent, address_percent, log, http, grpc, redis, home, access, tls",
          "node.yaml:5:16: listen.http: expected a literal address and a port, such as "
          "127.0.0.1:7400 or [::1]:7400, got 'localhost:7402'",
          "node.yaml:5:32: listen.grpx: unknown field; expected one of peers, admin, clients, "
          "http, "
          "grpc, redis",
          "node.yaml:6:8: rules: expected a path of 1 to 4096 bytes, got ''",
          "node.yaml:7:10: storage: expected none, or a mapping with the fields path, map_size, "
          "got 'some'",
          "node.yaml:8:16: sync_interval: expected a duration from 10ms to 1m, got '1'",
          "node.yaml:9:13: max_series: expected an integer from 1 to 1000000000, got '0x10'",
          "node.yaml:10:1: max_series: repeated field; expected it once",
          "node.yaml:11:14: log.level: expected one of debug, info, warn, error, got 'loud'",
          "node.yaml:11:28: log.format: expected one of json, text, got 'xml'",
          "node.yaml:12:15: http.reset: expected one of seconds, epoch, got 'minutes'",
          "node.yaml:12:41: http.max_connections: expected an integer from 1 to 65536, got '0'",
          "node.yaml:12:54: http.max_body: expected a size from 1KiB to 1MiB, got '64KB'"));
}

TEST(Config, ReadsWhatGrpcIs) {
  const NodeConfig config =
      good(std::string(kMinimal) + "grpc: {max_connections: 8, max_message: 16KiB, max_age: 5m}\n");
  EXPECT_EQ(config.grpc.max_connections, 8u);
  EXPECT_EQ(config.grpc.max_message, 16u << 10);
  EXPECT_EQ(config.grpc.max_age, 5 * kMinute);
}

TEST(Config, ReadsWhatRedisIs) {
  const NodeConfig config =
      good(std::string(kMinimal) + "redis: {domain: limits, max_connections: 9}\n");
  EXPECT_EQ(config.redis.domain, "limits");
  EXPECT_EQ(config.redis.max_connections, 9u);
}

TEST(Config, ADrainMayBeNone) {
  EXPECT_EQ(good(kMinimal).drain, 5 * kSecond);
  EXPECT_EQ(good(std::string(kMinimal) + "drain: 0\n").drain, 0);
  EXPECT_EQ(good(std::string(kMinimal) + "drain: 0s\n").drain, 0);
  EXPECT_EQ(good(std::string(kMinimal) + "drain: 30s\n").drain, 30 * kSecond);
  for (const char* wrong : {"5", "11m", "-1s", "none", "1us"}) {
    EXPECT_THAT(errors(std::string(kMinimal) + "drain: " + wrong + "\n"),
                ElementsAre(testing::HasSubstr("drain: expected 0, or a duration from 1ms to 10m")))
        << wrong;
  }
}

TEST(Config, KeepsItsRanges) {
  const auto with = [](const std::string& line) { return errors(kMinimal + line + "\n"); };
  for (const char* fits :
       {"sync_interval: 10ms", "sync_interval: 1m", "anti_entropy_interval: 1h",
        "commit_interval: 1s", "max_skew: 1ms", "max_series: 1000000000",
        "http: {max_connections: 65536}", "http: {max_body: 1MiB}", "http: {max_body: 1024}",
        "redis: {domain: a b}", "redis: {max_connections: 65536}", "grpc: {max_connections: 65536}",
        "grpc: {max_message: 1MiB}", "grpc: {max_age: 1s}"}) {
    EXPECT_THAT(with(fits), ElementsAre()) << fits;
  }
  for (const char* over : {"sync_interval: 9ms",
                           "sync_interval: 61s",
                           "anti_entropy_interval: 99ms",
                           "commit_interval: 2s",
                           "commit_interval: 0",
                           "max_skew: 61s",
                           "max_series: -1",
                           "populate: 1",
                           "max_series: 0",
                           "max_series: 1e3",
                           "max_series: 1000000001",
                           "max_request_ids: 100000001",
                           "request_id_ttl: 999ms",
                           "request_id_ttl: 25h",
                           "max_tickets: -1",
                           "http: {max_connections: 65537}",
                           "http: {max_body: 1023}",
                           "http: {max_body: 1048577}",
                           "http: {max_body: -1}",
                           "redis: {domain: ''}",
                           "redis: {max_connections: 0}",
                           "grpc: {max_connections: 0}",
                           "grpc: {max_message: 1023}",
                           "grpc: {max_age: 25h}",
                           "grpc: {max_age: 999ms}"}) {
    EXPECT_EQ(with(over).size(), 1u) << over;
  }
}

TEST(Config, MapSizeIsWholePages) {
  const auto with = [](const std::string& size) {
    return errors(
        "cluster: {name: d}\nregion: r\nnode: n\nrules: r\nstorage: {path: d, map_size: " + size +
        "}\n");
  };
  EXPECT_THAT(with("1MiB"), ElementsAre());
  EXPECT_THAT(with("16TiB"), ElementsAre());
  EXPECT_THAT(with("1048577"),
              ElementsAre("node.yaml:5:30: storage.map_size: expected a size from 1MiB to 16TiB, a "
                          "multiple of 4KiB, got '1048577'"));
  EXPECT_EQ(with("17TiB").size(), 1u);
  EXPECT_EQ(with("1023KiB").size(), 1u);
}

TEST(Config, PeersNeedASecret) {
  EXPECT_THAT(errors(kMinimal + "peers: [{region: a, node: b, address: 10.0.0.1:1}]\n"),
              ElementsAre("node.yaml:1:1: cluster.secret: required field is missing: expected "
                          "secret, secret_file or tls.peers, since there are peers"));
  EXPECT_THAT(errors(kMinimal + "peers: []\n"), ElementsAre());
}

TEST(Config, PeersNeedNoSecretIfTheyHaveCertificates) {
  const NodeConfig config =
      good(kMinimal +
               "peers: [{region: a, node: b, address: 10.0.0.1:1, certificate: spiffe://x/b}]\n"
               "tls:\n  peers: {cert: n.pem, key: n.key, ca: /etc/ca.pem, crl: crl.pem}\n",
           "/etc/weir/node.yaml");
  EXPECT_EQ(config.peers[0].certificate, "spiffe://x/b");
  const TlsConfig& tls = config.tls.at("peers");
  EXPECT_EQ(tls.cert, "/etc/weir/n.pem");
  EXPECT_EQ(tls.key, "/etc/weir/n.key");
  EXPECT_EQ(tls.ca, "/etc/ca.pem");
  EXPECT_EQ(tls.crl, "/etc/weir/crl.pem");
  EXPECT_EQ(tls.client_certificate, rpc::ClientCertificate::required);
  EXPECT_FALSE(tls.tls12);
  EXPECT_THAT(config.secret_files, ElementsAre("/etc/weir/n.key"));
}

TEST(Config, Tls) {
  const NodeConfig config =
      good(kMinimal +
           "tls:\n  http: {cert: n.pem, key: n.key, min_version: '1.2'}\n"
           "  clients: {cert: n.pem, key: n.key, ca: ca.pem, client_certificate: optional}\n");
  EXPECT_TRUE(config.tls.at("http").tls12);
  EXPECT_EQ(config.tls.at("http").client_certificate, rpc::ClientCertificate::none);
  EXPECT_EQ(config.tls.at("clients").client_certificate, rpc::ClientCertificate::optional);
  EXPECT_EQ(config.tls.size(), 2u);

  EXPECT_THAT(errors(kMinimal + "tls:\n  peers: {cert: c, key: k}\n"),
              ElementsAre("node.yaml:7:10: tls.peers.ca: required field is missing: expected the "
                          "CA of those who show certificates"));
  EXPECT_THAT(errors(kMinimal + "tls:\n  http: {cert: c, client_certificate: required}\n"),
              ElementsAre("node.yaml:7:9: tls.http.key: required field is missing",
                          "node.yaml:7:9: tls.http.ca: required field is missing: expected the CA "
                          "of those who show certificates"));
  EXPECT_THAT(errors(kMinimal + "tls:\n  http: {cert: c, key: k, crl: l}\n"),
              ElementsAre("node.yaml:7:9: tls.http.crl: expected client_certificate: optional or "
                          "required beside it"));
  EXPECT_THAT(errors(kMinimal + "listen: {admin: 127.0.0.1:1}\ntls:\n  http: {cert: c, key: k}\n"),
              ElementsAre("node.yaml:8:9: tls.http: expected an address in listen.http"));
  EXPECT_THAT(
      errors(kMinimal + "tls:\n  peers: {cert: c, key: k, ca: a, client_certificate: none}\n")
          .front(),
      testing::HasSubstr("tls.peers.client_certificate: unknown field"));
  EXPECT_THAT(errors(kMinimal + "tls:\n  http: {cert: c, key: k, min_version: '1.1'}\n").front(),
              testing::HasSubstr("tls.http.min_version: expected one of 1.3, 1.2"));
}

TEST(Config, ASecretHasAPredecessor) {
  const Folder folder;
  folder.write("old", "an old secret of the cluster\n");
  const std::string file = folder.path() + "/node.yaml";
  const std::string rest = "\nregion: eu\nnode: eu-1\nrules: r\nstorage: none\n";
  const NodeConfig config = good(
      "cluster: {name: demo, secret: 0123456789abcdef, previous_secret_file: old, "
      "series_key: sixteen-bytes-and}" +
          rest,
      file);
  EXPECT_EQ(config.secret, "0123456789abcdef");
  EXPECT_EQ(config.previous_secret, "an old secret of the cluster");
  EXPECT_EQ(config.series_key, "sixteen-bytes-and");
  EXPECT_THAT(config.secret_files, ElementsAre(folder.path() + "/old"));
  EXPECT_THAT(errors("cluster: {name: demo, previous_secret_file: old}" + rest, file),
              ElementsAre(file + ":1:45: cluster: expected a secret beside the previous one"));
  EXPECT_THAT(
      errors("cluster: {name: demo, secret: 0123456789abcdef, previous_secret: 0123456789abcdef, "
             "previous_secret_file: old}" +
                 rest,
             file),
      ElementsAre(file +
                  ":1:106: cluster: expected either previous_secret or previous_secret_file, got "
                  "both"));
}

std::string with_peers(const std::string& peers) {
  return "cluster: {name: demo, secret: 0123456789abcdef}\nregion: eu\nnode: eu-1\nrules: r\n"
         "storage: none\npeers:\n" +
         peers;
}

TEST(Config, PeersAreComplete) {
  EXPECT_THAT(errors(with_peers("  - {region: us, node: us-1}\n"
                                "  - us-2\n"
                                "  - {region: us, node: us-3, address: 10.0.0.3:0, wieght: 3}\n")),
              ElementsAre("node.yaml:7:5: peers[0].address: required field is missing",
                          "node.yaml:8:5: peers[1]: expected a mapping with the fields region, "
                          "node, address, certificate, weight, got 'us-2'",
                          "node.yaml:9:39: peers[2].address: expected a literal address and a "
                          "port, such as 127.0.0.1:7400 or [::1]:7400, got '10.0.0.3:0'",
                          "node.yaml:9:51: peers[2].wieght: unknown field; expected one of region, "
                          "node, address, certificate, weight"));
  EXPECT_THAT(errors(with_peers("  region: us\n")),
              ElementsAre("node.yaml:7:3: peers: expected a list of peers, got a mapping"));
}

TEST(Config, PeersAreTheOthersAndUnique) {
  EXPECT_THAT(errors(with_peers("  - {region: eu, node: eu-1, address: 10.0.0.1:1}\n"
                                "  - {region: us, node: us-1, address: \"[::1]:5\"}\n"
                                "  - {region: us, node: us-1, address: 10.0.0.2:1}\n"
                                "  - {region: us, node: us-2, address: \"[0:0::1]:5\"}\n")),
              ElementsAre("node.yaml:7:5: peers[0]: expected the other members only, but eu/eu-1 "
                          "is this node",
                          "node.yaml:9:5: peers[2]: expected a member of its own, but peers[1] is "
                          "us/us-1 as well",
                          "node.yaml:10:5: peers[3].address: expected an address of its own, but "
                          "peers[1] has [::1]:5 as well"));
}

const std::string kWithPeers = R"(cluster: {name: demo, secret: sixteen bytes it is}
region: eu
node: eu-1
rules: rules.yaml
storage: none
peers:
  - {region: us, node: us-1, address: 10.0.0.1:1}
  - {region: ap, node: ap-1, address: 10.0.0.2:1}
)";

TEST(Config, PromisesNeedADisk) {
  std::vector<RuleError> none;
  Rule rule;
  rule.domain = "api";
  rule.name = "r";
  rule.limit = 1;
  NodeConfig config = good(kWithPeers);
  EXPECT_EQ(unsuitable(*RuleSet::make({rule}, none), config), "");
  rule.durability = Durability::commit;
  EXPECT_EQ(unsuitable(*RuleSet::make({rule}, none), config),
            "rule \"r\" wants durability: commit, but storage is none");
  rule.enforcement = Enforcement::home;
  EXPECT_EQ(unsuitable(*RuleSet::make({rule}, none), config),
            "rule \"r\" wants enforcement: home, which is durable, but storage is none");
  config.storage = StorageConfig{"data"};
  EXPECT_EQ(unsuitable(*RuleSet::make({rule}, none), config), "");
  Rule other = rule;
  other.name = "other";
  rule.series = other.series = 500'000;
  EXPECT_EQ(unsuitable(*RuleSet::make({rule, other}, none), config), "");
  rule.series += 1;
  EXPECT_EQ(unsuitable(*RuleSet::make({rule, other}, none), config),
            "rules want room for 1000001 series, but max_series is 1000000");
}

TEST(Config, AFolderThatCannotBeMadeIsToldBeforeTheStart) {
  namespace fs = std::filesystem;
  const fs::path folder = fs::temp_directory_path() / fmt::format("weir-config-{}", ::getpid());
  fs::create_directories(folder);
  std::ofstream(folder / "file") << "x";
  fs::create_symlink(folder / "nowhere", folder / "dangling");
  NodeConfig config;
  EXPECT_EQ(unusable_storage(config), "");
  auto why = [&](const fs::path& path) {
    config.storage = StorageConfig{path.string()};
    return unusable_storage(config);
  };
  EXPECT_EQ(why(folder), "");
  EXPECT_EQ(why(folder / "new" / "deeper"), "");
  EXPECT_FALSE(fs::exists(folder / "new"));
  EXPECT_EQ(
      why(folder / "file"),
      fmt::format("storage.path: expected a folder that can be made and written, got {0}: {0}: "
                  "it is no folder",
                  (folder / "file").string()));
  EXPECT_THAT(why(folder / "dangling"), testing::HasSubstr("it is a link to nothing"));
  EXPECT_THAT(why(folder / "file" / "x"), testing::HasSubstr("file"));
  EXPECT_THAT(why(folder / std::string(300, 'n')), testing::HasSubstr("File name too long"));
  EXPECT_THAT(why("/proc/version/x"), testing::HasSubstr("/proc/version"));
  fs::remove_all(folder);
}

TEST(Config, Homes) {
  NodeConfig config = good(kWithPeers + "home: {deadline: 2s, weights: {eu: 3, us: 0}}\n");
  EXPECT_EQ(config.home.deadline, 2 * kSecond);
  EXPECT_EQ(config.home.weights, (std::map<std::string, unsigned>{{"eu", 3}, {"us", 0}}));
  EXPECT_EQ(good(kWithPeers).home.deadline, 500 * kMillisecond);
  EXPECT_THAT(errors(kWithPeers + "home: {deadline: 11s, weights: {eu: 101, mars: 1, eu: 2}}\n"),
              ElementsAre("node.yaml:9:18: home.deadline: expected a duration from 1ms to 10s, got "
                          "'11s'",
                          "node.yaml:9:37: home.weights.eu: expected an integer from 0 to 100, got "
                          "'101'",
                          "node.yaml:9:42: home.weights.mars: expected a region of this node or of "
                          "a peer, got 'mars'",
                          "node.yaml:9:51: home.weights.eu: repeated region; expected it once"));
  EXPECT_THAT(errors(kWithPeers + "home: {weights: {eu: 0, us: 0, ap: 0}}\n"),
              ElementsAre("node.yaml:9:18: home.weights: expected a region with a weight above 0"));
}

TEST(Config, AtMostFifteenPeers) {
  std::string peers;
  for (int i = 0; i < 15; ++i) {
    peers += fmt::format("  - {{region: us, node: n{}, address: 10.0.0.{}:1}}\n", i, i);
  }
  EXPECT_THAT(errors(with_peers(peers)), ElementsAre());
  peers += "  - {region: us, node: one-more, address: 10.0.1.1:1}\n";
  EXPECT_THAT(errors(with_peers(peers)),
              ElementsAre("node.yaml:7:3: peers: expected at most 15 peers, got 16"));
}

TEST(Config, ListenersDoNotShareAnAddress) {
  EXPECT_THAT(errors(kMinimal + "listen: {http: 127.0.0.1:7400}\n"),
              ElementsAre("node.yaml:6:9: listen.peers: expected an address of its own, but http "
                          "listens on 127.0.0.1:7400 as well"));
  EXPECT_THAT(errors(kMinimal + "listen: {http: 127.0.0.1:0, clients: 127.0.0.1:0}\n"),
              ElementsAre());
}

std::string with_secret(const std::string& fields) {
  return "cluster: {name: demo, " + fields + "}\nregion: eu\nnode: eu-1\nrules: r\nstorage: none\n";
}

TEST(Config, SecretsAreLongEnoughAndNeverShown) {
  EXPECT_THAT(errors(with_secret("secret: fifteen-bytes!!")),
              ElementsAre("node.yaml:1:31: cluster.secret: expected a secret of 16 to 4096 bytes, "
                          "got 15 bytes"));
  EXPECT_THAT(errors(with_secret("secret: [hidden]")),
              ElementsAre("node.yaml:1:31: cluster.secret: expected text of 16 to 4096 bytes"));
  EXPECT_THAT(errors(with_secret("secret: " + std::string(4097, 'x'))),
              ElementsAre("node.yaml:1:31: cluster.secret: expected a secret of 16 to 4096 bytes, "
                          "got 4097 bytes"));
  EXPECT_EQ(good(with_secret("secret: sixteen-bytes!!!")).secret, "sixteen-bytes!!!");
}

TEST(Config, SecretsComeFromFilesBesideTheConfiguration) {
  Folder folder;
  const std::string file = folder.path() + "/node.yaml";
  folder.write("good", "0123456789abcdef\r\n");
  folder.write("short", "0123456789abcd\n\n");
  folder.write("long", std::string(5000, 'x'));
  EXPECT_EQ(good(with_secret("secret_file: good"), file).secret, "0123456789abcdef");
  EXPECT_EQ(good(with_secret("secret_file: " + folder.path() + "/good"), "x.yaml").secret,
            "0123456789abcdef");
  EXPECT_THAT(errors(with_secret("secret_file: short"), file),
              ElementsAre(file + ":1:36: cluster.secret_file: expected a secret of 16 to 4096 "
                                 "bytes, got 14 bytes"));
  EXPECT_THAT(errors(with_secret("secret_file: none-such"), file),
              ElementsAre(file + ":1:36: cluster.secret_file: expected a readable file, but " +
                          folder.path() + "/none-such: No such file or directory"));
  EXPECT_THAT(errors(with_secret("secret_file: ."), file),
              ElementsAre(testing::EndsWith("it is a directory")));
  EXPECT_THAT(errors(with_secret("secret_file: long"), file),
              ElementsAre(testing::HasSubstr("larger than")));
  EXPECT_THAT(
      errors(with_secret("secret_file: good, secret: 0123456789abcdef"), file),
      ElementsAre(file + ":1:50: cluster: expected either secret or secret_file, got both"));
}

TEST(Config, SaysWhereTheYamlIsBroken) {
  EXPECT_THAT(errors("cluster: {name: demo\nregion: x\n"),
              ElementsAre(testing::MatchesRegex("node.yaml:[23]:[0-9]+: not YAML: .*")));
  EXPECT_THAT(errors(""), ElementsAre("node.yaml:1:1: expected a mapping, got an empty document"));
  EXPECT_THAT(errors("# nothing\n"), testing::SizeIs(1));
  EXPECT_THAT(errors("- a\n"), ElementsAre(testing::StartsWith(
                                   "node.yaml:1:1: expected a mapping with the fields cluster, ")));
  EXPECT_THAT(errors(kMinimal + "---\n" + kMinimal),
              ElementsAre("node.yaml:7:1: expected one document, got several"));
}

TEST(Config, SurvivesHostileDocuments) {
  std::string bomb = "a0: &a0 [x, x]\n";
  for (int i = 1; i < 40; ++i) bomb += fmt::format("a{}: &a{} [*a{}, *a{}]\n", i, i, i - 1, i - 1);
  const std::string hostile[] = {
      std::string(100'000, '['),
      std::string(100'000, '{'),
      kMinimal + "listen: " + std::string(499, '['),
      kMinimal + "listen: " + std::string(300, '[') + std::string(300, ']'),
      std::string(2 << 20, ' '),
      std::string(300, ' ') + "a: 1",
      [] {
        std::string compact;
        for (int i = 0; i < 50'000; ++i) compact += "- ";
        return compact;
      }(),
      bomb,
      "&a [*a]\n",
      "? {a: b}\n: c\n",
      "*nobody\n",
      "!!binary x\n",
      std::string("a\0b: c\n", 7),
      "\xff\xfe\xfd: 1\n",
      "<<: {region: x}\n",
      kMinimal + "listen: *x\n",
      kMinimal + "peers: &p [*p]\n",
  };
  for (const std::string& yaml : hostile) {
    EXPECT_THAT(errors(yaml), testing::Not(testing::IsEmpty())) << yaml.substr(0, 60);
  }
}

TEST(Config, TruncationsNeverCrash) {
  const std::string whole = with_peers("  - {region: us, node: us-1, address: \"[::1]:5\"}\n") +
                            "log: {level: info}\nhttp: {max_body: 8KiB}\n";
  EXPECT_THAT(errors(whole), ElementsAre());
  for (std::size_t n = 0; n < whole.size(); ++n) {
    const LoadedConfig loaded = parse_config(whole.substr(0, n), "node.yaml");
    EXPECT_EQ(loaded.config.has_value(), loaded.errors.empty()) << n;
  }
}

TEST(Config, LoadsFiles) {
  Folder folder;
  const LoadedConfig loaded = load_config(folder.write("node.yaml", kMinimal));
  ASSERT_TRUE(loaded.config.has_value());
  EXPECT_EQ(loaded.config->rules, folder.path() + "/rules.yaml");

  const LoadedConfig none = load_config(folder.path() + "/none.yaml");
  ASSERT_EQ(none.errors.size(), 1u);
  EXPECT_EQ(none.errors[0].to_string(), folder.path() + "/none.yaml: No such file or directory");
  EXPECT_EQ(load_config(folder.path()).errors.size(), 1u);
  const std::string big = folder.write("big.yaml", std::string((1 << 20) + 1, '#'));
  ASSERT_EQ(load_config(big).errors.size(), 1u);
  EXPECT_EQ(load_config(big).errors[0].to_string(), big + ": larger than 1MiB");
}

TEST(Config, WeightsAreNumbersOrChanges) {
  EXPECT_EQ(good(kMinimal).weights, (std::vector<crdt::WeightChange>{{0, 1}}));
  EXPECT_EQ(good(kMinimal + "weight: 3\n").weights, (std::vector<crdt::WeightChange>{{0, 3}}));
  EXPECT_EQ(
      good(kMinimal + "weight: [{weight: 2}, {from: 2026-12-01T00:00:00Z, weight: 0}]\n").weights,
      (std::vector<crdt::WeightChange>{{0, 2}, {1'796'083'200 * kSecond, 0}}));
  EXPECT_THAT(
      errors(kMinimal + "weight: much\n"),
      ElementsAre("node.yaml:6:9: weight: expected an integer from 0 to 1000000, got 'much'"));
  EXPECT_THAT(errors(kMinimal + "weight: []\n"),
              ElementsAre("node.yaml:6:9: weight: expected 1 to 64 changes, got 0"));
  EXPECT_THAT(
      errors(kMinimal +
             "weight:\n  - {from: tomorrow, weight: 1}\n  - {weight: 2}\n  - {from: 5}\n"),
      ElementsAre(
          "node.yaml:7:12: weight[0].from: expected an instant in UTC such as "
          "2026-12-01T00:00:00Z, got 'tomorrow'",
          "node.yaml:8:5: weight[1].from: expected an instant after that of the change before",
          "node.yaml:9:5: weight[2].weight: required field is missing",
          "node.yaml:9:5: weight[2].from: expected an instant after that of the change before",
          "node.yaml:9:12: weight[2].from: expected an instant in UTC such as "
          "2026-12-01T00:00:00Z, got '5'"));
}

TEST(Config, InstantsAreExact) {
  Nanos at = -1;
  EXPECT_TRUE(parse_instant("1970-01-01T00:00:00Z", at));
  EXPECT_EQ(at, 0);
  EXPECT_TRUE(parse_instant("2024-02-29T23:59:59Z", at));
  EXPECT_EQ(at, 1'709'251'199 * kSecond);
  for (const char* wrong :
       {"", "2024-02-29", "2023-02-29T00:00:00Z", "2024-02-29T24:00:00Z", "2024-02-29T00:60:00Z",
        "2024-02-29T00:00:60Z", "2024-02-29 00:00:00Z", "2024-02-29T00:00:00+01:00",
        "1969-12-31T23:59:59Z", "2201-01-01T00:00:00Z", "20a4-02-29T00:00:00Z"}) {
    EXPECT_FALSE(parse_instant(wrong, at)) << wrong;
  }
}

}  // namespace
}  // namespace weir::node
