#include <weir/node/config.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <set>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/stat.h>
#include <unistd.h>

#include <weir/limits/bounds.h>
#include <weir/limits/text/duration.h>
#include <weir/limits/text/size.h>
#include <weir/limits/text/utf8.h>
#include <weir/limits/yaml/reader.h>
#include <weir/limits/yaml/tree.h>
#include <weir/node/config_text.h>
#include <weir/rpc/net/address.h>

namespace weir::node {
namespace {

constexpr std::size_t kMaxName = 64;
constexpr std::size_t kMaxPath = 4096;
constexpr std::size_t kMaxCertificateName = 2048;
constexpr std::size_t kMaxForwardedHeaders = 16;
constexpr std::string_view kPeers = "peers";

using yaml::Value;

/// What Field::required says here: which one it is stands in front.
constexpr std::string_view kRequired = "it";

class Parser {
 public:
  Parser(const std::string& file, const yaml::Tree& tree, std::vector<yaml::Problem>& problems)
      : folder_(std::filesystem::path(file).parent_path()),
        read_(tree, wording_, problems, kMaxConfigProblems) {}

  NodeConfig parse(const Value& root) {
    read_.mapping(
        root,
        {{"cluster", [this](const Value& v) { return cluster(v); }, kRequired},
         {"region", [this](const Value& v) { return name(v, config_.self.region); }, kRequired},
         {"node", [this](const Value& v) { return name(v, config_.self.node); }, kRequired},
         {"listen", [this](const Value& v) { return listen(v); }},
         {"weight", [this](const Value& v) { return weight(v, config_.weights); }},
         {"peers", [this](const Value& v) { return peers(v); }},
         {"rules", [this](const Value& v) { return path(v, config_.rules); }, kRequired},
         {"storage", [this](const Value& v) { return storage(v); }, kRequired},
         {"sync_interval", duration(10 * kMillisecond, kMinute, config_.sync_interval)},
         {"anti_entropy_interval",
          duration(100 * kMillisecond, kHour, config_.anti_entropy_interval)},
         {"commit_interval", duration(kMillisecond, kSecond, config_.commit_interval)},
         {"max_commit_wait", duration(10 * kMillisecond, kMinute, config_.max_commit_wait)},
         {"max_skew", duration(kMillisecond, kMinute, config_.max_skew)},
         {"drain", [this](const Value& v) { return drain(v); }},
         {"threads", integer(1, kMaxThreads, config_.threads)},
         {"max_series", integer(1, 1'000'000'000, config_.max_series)},
         {"populate",
          [this](const Value& v) {
            return read_.choice<bool>(v, {{"true", true}, {"false", false}}, config_.populate);
          }},
         {"max_peer_cells", integer(1000, 1'000'000'000, config_.max_peer_cells)},
         {"max_long_cells", integer(1000, 1'000'000'000, config_.max_long_cells)},
         {"max_request_ids", integer(0, 100'000'000, config_.max_request_ids)},
         {"request_id_ttl", duration(kSecond, kDay, config_.request_id_ttl)},
         {"max_tickets", integer(0, 100'000'000, config_.max_tickets)},
         {"caller_percent", integer(1, 100, config_.caller_percent)},
         {"address_percent", integer(1, 100, config_.address_percent)},
         {"log", [this](const Value& v) { return log(v); }},
         {"http", [this](const Value& v) { return http(v); }},
         {"grpc", [this](const Value& v) { return grpc(v); }},
         {"redis", [this](const Value& v) { return redis(v); }},
         {"home", [this](const Value& v) { return home(v); }},
         {"access", [this](const Value& v) { return path(v, config_.access); }},
         {"tls", [this](const Value& v) { return tls(v); }}});
    check_weights();
    check_tls();
    check_peers(root);
    return std::move(config_);
  }

 private:
  using Read = std::function<bool(const Value&)>;

  // Kinds of values

  Read duration(Nanos low, Nanos high, Nanos& out) {
    return [this, low, high, &out](const Value& v) {
      const std::string what =
          fmt::format("a duration from {} to {}", format_duration(low), format_duration(high));
      return read_.duration(v, what, low, high, out);
    };
  }

  bool drain(const Value& value) {
    const std::string* text = read_.scalar(value);
    if (text != nullptr && (*text == "0" || *text == "0s")) {
      config_.drain = 0;
      return true;
    }
    return read_.duration(value, "0, or a duration from 1ms to 10m", kMillisecond, 10 * kMinute,
                          config_.drain);
  }

  template <typename T>
  Read integer(std::uint64_t low, std::uint64_t high, T& out) {
    return [this, low, high, &out](const Value& v) { return read_.integer(v, low, high, out); };
  }

  bool name(const Value& value, std::string& out) {
    const auto allowed = [](char c) {
      return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
             c == '-' || c == '_' || c == '.';
    };
    const std::string* text = read_.scalar(value);
    if (text == nullptr || text->empty() || text->size() > kMaxName ||
        !std::all_of(text->begin(), text->end(), allowed)) {
      return read_.expected(
          value, fmt::format("a name of 1 to {} letters, digits, '-', '_' or '.'", kMaxName));
    }
    out = *text;
    return true;
  }

  bool address(const Value& value, bool any_port, std::string& out) {
    const std::string* text = read_.scalar(value);
    std::optional<rpc::Address> parsed;
    std::string reason;
    if (text != nullptr) parsed = rpc::parse_address(*text, reason);
    if (!parsed || (!any_port && parsed->port == 0)) {
      return read_.expected(value,
                            "a literal address and a port, such as 127.0.0.1:7400 or [::1]:7400");
    }
    out = rpc::to_string(*parsed);
    return true;
  }

  bool path(const Value& value, std::string& out) {
    std::string text;
    if (!read_.text(value, "a path", kMaxPath, text)) return false;
    out = (folder_ / text).string();
    return true;
  }

  // Fields

  bool cluster(const Value& value) {
    // Of each of these one way to say it.
    Secret secret{"secret", config_.secret, {}};
    Secret previous{"previous_secret", config_.previous_secret, {}};
    Secret series{"series_key", config_.series_key, {}};
    std::vector<std::string> names;
    std::vector<yaml::Reader::Field> fields = {
        {"name", [this](const Value& v) { return name(v, config_.cluster); }, kRequired}};
    for (const Secret* one : {&secret, &previous, &series}) names.push_back(one->name + "_file");
    std::size_t at = 0;
    for (Secret* one : {&secret, &previous, &series}) {
      fields.push_back({one->name, [this, one](const Value& v) { return secret_text(v, *one); }});
      fields.push_back({names[at++], [this, one](const Value& v) { return secret_file(v, *one); }});
    }
    read_.mapping(value, fields);
    secret_named_ = !secret.from.empty();
    for (const Secret* one : {&secret, &previous, &series}) {
      if (one->from.size() < 2) continue;
      read_.fail(read_.at(one->from.back()), value.path,
                 fmt::format("expected either {0} or {0}_file, got both", one->name));
    }
    if (!previous.from.empty() && !secret_named_) {
      read_.fail(read_.at(previous.from.back()), value.path,
                 "expected a secret beside the previous one");
    }
    return true;
  }

  /// A field of text, or of a file with it.
  struct Secret {
    std::string name;
    std::string& out;
    std::vector<Value> from;  // where it was named
  };

  // Its text never gets into a message.
  bool secret_text(const Value& value, Secret& secret) {
    secret.from.push_back(value);
    const std::string* text = read_.scalar(value);
    if (text != nullptr) return take_secret(value, *text, secret.out);
    return read_.fail(value,
                      fmt::format("expected text of {} to {} bytes", kMinSecret, kMaxSecret));
  }

  bool secret_file(const Value& value, Secret& secret) {
    secret.from.push_back(value);
    std::string file;
    if (!path(value, file)) return false;
    std::string bytes;
    std::string reason;
    // Room for the line end that editors leave.
    if (!read_small_file(file, kMaxSecret + 2, bytes, reason)) {
      return read_.fail(value, fmt::format("expected a readable file, but {}: {}", file, reason));
    }
    config_.secret_files.push_back(file);
    while (!bytes.empty() && (bytes.back() == '\n' || bytes.back() == '\r')) bytes.pop_back();
    return take_secret(value, bytes, secret.out);
  }

  bool take_secret(const Value& value, const std::string& bytes, std::string& out) {
    if (bytes.size() < kMinSecret || bytes.size() > kMaxSecret) {
      return read_.fail(value, fmt::format("expected a secret of {} to {} bytes, got {} bytes",
                                           kMinSecret, kMaxSecret, bytes.size()));
    }
    out = bytes;
    return true;
  }

  bool listen(const Value& value) {
    if (read_.is_map(value)) config_.fronts.clear();
    Value peers;
    std::vector<yaml::Reader::Field> fields = {{"peers", [&](const Value& v) {
                                                  peers = v;
                                                  return address(v, true, config_.listen_peers);
                                                }}};
    for (std::string_view front : kFronts) {
      fields.push_back({front, [this, front](const Value& v) { return front_at(v, front); }});
    }
    read_.mapping(value, fields);
    peers.path = internal::field_path(value.path, "peers");
    if (peers.node == yaml::kNoNode) peers.node = value.node;
    return check_free("peers", config_.listen_peers, peers);
  }

  /// One address, or a list of them.
  bool front_at(const Value& value, std::string_view front) {
    std::vector<Value> all{value};
    if (read_.is_list(value)) {
      all.clear();
      read_.items(value, "", all);
      if (all.empty() || all.size() > kMaxListen) {
        return read_.fail(
            value, fmt::format("expected 1 to {} addresses, got {}", kMaxListen, all.size()));
      }
    }
    for (const Value& one : all) {
      ListenConfig listen{std::string(front), ""};
      if (!address(one, true, listen.address)) continue;
      check_free(front, listen.address, one);
      config_.fronts.push_back(std::move(listen));
    }
    return true;
  }

  /// No two of them listen on one address. Port 0 is a free one each time.
  bool check_free(std::string_view name, const std::string& address, const Value& value) {
    std::string reason;
    const std::optional<rpc::Address> parsed = rpc::parse_address(address, reason);
    if (!parsed || parsed->port == 0) return true;
    const auto [other, fresh] = listening_.emplace(address, name);
    return fresh ||
           read_.fail(value, fmt::format("expected an address of its own, but {} listens on {} as "
                                         "well",
                                         other->second, address));
  }

  /// A number, or a list of changes.
  bool weight(const Value& value, std::vector<crdt::WeightChange>& out) {
    if (!read_.is_list(value)) return read_.integer(value, 0, kMaxWeight, out[0].weight);
    std::vector<Value> changes;
    read_.items(value, "", changes);
    if (changes.empty() || changes.size() > kMaxWeightChanges) {
      return read_.fail(value, fmt::format("expected 1 to {} changes, got {}", kMaxWeightChanges,
                                           changes.size()));
    }
    out.clear();
    for (const Value& item : changes) {
      crdt::WeightChange change;
      read_.mapping(item, {{"from", [&](const Value& v) { return instant(v, change.from); }},
                           {"weight", integer(0, kMaxWeight, change.weight), kRequired}});
      if (!out.empty() && change.from <= out.back().from) {
        read_.fail(read_.at(item), internal::field_path(item.path, "from"),
                   "expected an instant after that of the change before");
      }
      out.push_back(change);
    }
    return true;
  }

  bool instant(const Value& value, Nanos& out) {
    const std::string* text = read_.scalar(value);
    return (text != nullptr && parse_instant(*text, out)) ||
           read_.expected(value, "an instant in UTC such as 2026-12-01T00:00:00Z");
  }

  bool peers(const Value& value) {
    std::vector<Value> items;
    if (!read_.items(value, "a list of peers", items)) return false;
    if (items.size() > kMaxPeers) {
      return read_.fail(value,
                        fmt::format("expected at most {} peers, got {}", kMaxPeers, items.size()));
    }
    for (const Value& item : items) {
      PeerConfig peer;
      read_.mapping(
          item,
          {{"region", [&](const Value& v) { return name(v, peer.member.region); }, kRequired},
           {"node", [&](const Value& v) { return name(v, peer.member.node); }, kRequired},
           {"address", [&](const Value& v) { return address(v, false, peer.address); }, kRequired},
           {"certificate",
            [&](const Value& v) {
              return read_.text(v, "a URI or a DNS name", kMaxCertificateName, peer.certificate);
            }},
           {"weight", [&](const Value& v) { return weight(v, peer.weights); }}});
      peer.line = read_.at(item).line;
      peer.column = read_.at(item).column;
      config_.peers.push_back(std::move(peer));
      peers_.push_back(item);
    }
    return true;
  }

  bool storage(const Value& value) {
    const std::string* text = read_.scalar(value);
    if (text != nullptr && *text == "none") return true;
    if (!read_.is_map(value)) {
      return read_.expected(value, "none, or a mapping with the fields path, map_size");
    }
    StorageConfig storage;
    read_.mapping(value,
                  {{"path", [&](const Value& v) { return path(v, storage.path); }, kRequired},
                   {"map_size", [&](const Value& v) {
                      return read_.size(v, 1ull << 20, 16ull << 40, 4096, storage.map_size);
                    }}});
    config_.storage = std::move(storage);
    return true;
  }

  bool log(const Value& value) {
    read_.mapping(value, {{"level",
                           [this](const Value& v) {
                             return read_.choice<LogLevel>(v,
                                                           {{"debug", LogLevel::debug},
                                                            {"info", LogLevel::info},
                                                            {"warn", LogLevel::warn},
                                                            {"error", LogLevel::error}},
                                                           config_.log_level);
                           }},
                          {"format", [this](const Value& v) {
                             return read_.choice<LogFormat>(
                                 v, {{"json", LogFormat::json}, {"text", LogFormat::text}},
                                 config_.log_format);
                           }}});
    return true;
  }

  bool http(const Value& value) {
    read_.mapping(value, {{"reset",
                           [this](const Value& v) {
                             return read_.choice<ResetFormat>(
                                 v,
                                 {{"seconds", ResetFormat::seconds}, {"epoch", ResetFormat::epoch}},
                                 config_.http.reset);
                           }},
                          {"max_connections", integer(1, 65536, config_.http.max_connections)},
                          {"max_body",
                           [this](const Value& v) {
                             return read_.size(v, 1024, 1u << 20, 1, config_.http.max_body);
                           }},
                          {"forward_auth", [this](const Value& v) { return forward_auth(v); }}});
    return true;
  }

  bool redis(const Value& value) {
    read_.mapping(value, {{"domain",
                           [this](const Value& v) {
                             return read_.text(v, "a domain", weir::kMaxName, config_.redis.domain);
                           }},
                          {"max_connections", integer(1, 65536, config_.redis.max_connections)}});
    return true;
  }

  bool forward_auth(const Value& value) {
    read_.mapping(value,
                  {{"trusted_proxies", [this](const Value& v) { return trusted_proxies(v); }},
                   {"headers", [this](const Value& v) { return forwarded_headers(v); }}});
    return true;
  }

  bool trusted_proxies(const Value& value) {
    std::vector<Value> items;
    if (!read_.items(value, "a list of networks", items)) return false;
    auto& out = config_.http.forward_auth.trusted_proxies.emplace();
    for (const Value& item : items) {
      const std::string* text = read_.scalar(item);
      const std::optional<MatchCidr> cidr = text == nullptr ? std::nullopt : parse_cidr(*text);
      if (cidr) {
        out.push_back(*cidr);
      } else {
        read_.expected(item, "a network such as 10.0.0.0/8, with no bits set behind the prefix");
      }
    }
    return true;
  }

  bool forwarded_headers(const Value& value) {
    if (!read_.is_map(value)) {
      return read_.expected(value, "a mapping from header fields to entries: {x-api-key: api_key}");
    }
    std::vector<yaml::Reader::Member> members;
    read_.entries(value, "header field", members);
    auto& out = config_.http.forward_auth.headers;
    for (const auto& member : members) {
      std::string field;
      std::string entry;
      if (!name(member.key, field) || !name(member.value, entry)) continue;
      for (char& c : field) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
      constexpr std::array<std::string_view, 4> kOwn = {"method", "path", "host", "ip"};
      if (std::find(kOwn.begin(), kOwn.end(), entry) != kOwn.end()) {
        read_.expected(member.value,
                       "another name than method, path, host and ip, which are there");
      } else if (out.size() == kMaxForwardedHeaders) {
        read_.expected(member.key, fmt::format("at most {} header fields", kMaxForwardedHeaders));
        return true;
      } else {
        out.emplace_back(std::move(field), std::move(entry));
      }
    }
    return true;
  }

  bool grpc(const Value& value) {
    read_.mapping(value, {{"max_connections", integer(1, 65536, config_.grpc.max_connections)},
                          {"max_message",
                           [this](const Value& v) {
                             return read_.size(v, 1024, 1u << 20, 1, config_.grpc.max_message);
                           }},
                          {"max_age", duration(kSecond, kDay, config_.grpc.max_age)}});
    return true;
  }

  bool home(const Value& value) {
    read_.mapping(value, {{"deadline", duration(kMillisecond, 10 * kSecond, config_.home.deadline)},
                          {"weights", [this](const Value& v) { return weights(v); }}});
    return true;
  }

  bool tls(const Value& value) {
    std::vector<yaml::Reader::Field> fields = {
        {kPeers, [this](const Value& v) { return tls_of(v, kPeers); }}};
    for (std::string_view front : kFronts) {
      fields.push_back({front, [this, front](const Value& v) { return tls_of(v, front); }});
    }
    read_.mapping(value, fields);
    return true;
  }

  bool tls_of(const Value& value, std::string_view use) {
    TlsConfig one;
    const bool peers = use == kPeers;
    std::vector<yaml::Reader::Field> fields = {
        {"cert", [&](const Value& v) { return path(v, one.cert); }, kRequired},
        {"key", [&](const Value& v) { return path(v, one.key); }, kRequired},
        {"ca", [&](const Value& v) { return path(v, one.ca); }},
        {"crl", [&](const Value& v) { return path(v, one.crl); }},
        {"min_version", [&](const Value& v) {
           return read_.choice<bool>(v, {{"1.3", false}, {"1.2", true}}, one.tls12);
         }}};
    if (peers) {
      one.client_certificate = rpc::ClientCertificate::required;
    } else {
      fields.push_back({"client_certificate", [&](const Value& v) {
                          return read_.choice<rpc::ClientCertificate>(
                              v,
                              {{"none", rpc::ClientCertificate::none},
                               {"optional", rpc::ClientCertificate::optional},
                               {"required", rpc::ClientCertificate::required}},
                              one.client_certificate);
                        }});
    }
    read_.mapping(value, fields);
    const auto field = [&](const char* name, const char* text) {
      read_.fail(read_.at(value), internal::field_path(value.path, name), text);
    };
    // The system's CAs vouch for anybody.
    if (one.ca.empty() && one.client_certificate != rpc::ClientCertificate::none) {
      field("ca", "required field is missing: expected the CA of those who show certificates");
    }
    if (!one.crl.empty() && one.client_certificate == rpc::ClientCertificate::none) {
      field("crl", "expected client_certificate: optional or required beside it");
    }
    config_.secret_files.push_back(one.key);
    tls_.push_back(value);
    config_.tls.emplace(use, std::move(one));
    return true;
  }

  bool weights(const Value& value) {
    if (!read_.is_map(value)) {
      return read_.expected(value, "a mapping from regions to weights from 0 to 100");
    }
    std::vector<yaml::Reader::Member> entries;
    read_.entries(value, "region", entries);
    for (const auto& entry : entries) {
      std::string region;
      if (!name(entry.key, region)) continue;
      weights_.push_back(entry.key);
      read_.integer(entry.value, 0, 100, config_.home.weights[region]);
    }
    return true;
  }

  // All together

  /// A region that is nobody's is a mistake: its share would go to no one without a word.
  void check_weights() {
    if (weights_.empty()) return;
    std::set<std::string> regions{config_.self.region};
    for (const PeerConfig& peer : config_.peers) regions.insert(peer.member.region);
    for (const Value& region : weights_) {
      if (regions.contains(*read_.scalar(region))) continue;
      read_.expected(region, "a region of this node or of a peer");
    }
    const bool any = std::any_of(regions.begin(), regions.end(), [this](const std::string& region) {
      const auto at = config_.home.weights.find(region);
      return at == config_.home.weights.end() || at->second > 0;
    });
    if (any) return;
    read_.fail(read_.at(weights_.front()), "home.weights",
               "expected a region with a weight above 0");
  }

  /// What is said of a front that does not listen was meant for something else.
  void check_tls() {
    for (const Value& value : tls_) {
      const std::string_view use = std::string_view(value.path).substr(value.path.rfind('.') + 1);
      const bool listens =
          use == kPeers || std::any_of(config_.fronts.begin(), config_.fronts.end(),
                                       [&](const ListenConfig& one) { return one.front == use; });
      if (!listens) read_.fail(value, fmt::format("expected an address in listen.{}", use));
    }
  }

  void check_peers(const Value& root) {
    if (peers_.empty()) return;
    if (!secret_named_ && !config_.tls.contains(kPeers)) {
      read_.fail(read_.at(root), "cluster.secret",
                 "required field is missing: expected secret, secret_file or tls.peers, since "
                 "there are peers");
    }
    const auto named = [](const PeerConfig& peer) {
      return !peer.member.region.empty() && !peer.member.node.empty();
    };
    for (std::size_t i = 0; i < config_.peers.size(); ++i) {
      const PeerConfig& peer = config_.peers[i];
      const std::string shown = peer.member.region + "/" + peer.member.node;
      if (named(peer) && peer.member == config_.self) {
        read_.fail(peers_[i],
                   fmt::format("expected the other members only, but {} is this node", shown));
      }
      if (const Value* other = earlier(
              i, [&](const PeerConfig& one) { return named(peer) && one.member == peer.member; })) {
        read_.fail(peers_[i], fmt::format("expected a member of its own, but {} is {} as well",
                                          other->path, shown));
      }
      if (const Value* other = earlier(i, [&](const PeerConfig& one) {
            return !peer.address.empty() && one.address == peer.address;
          })) {
        read_.fail(read_.at(peers_[i]), internal::field_path(peers_[i].path, "address"),
                   fmt::format("expected an address of its own, but {} has {} as well", other->path,
                               peer.address));
      }
    }
  }

  /// The first peer in front of `index` that is such a one; null if there is none.
  const Value* earlier(std::size_t index, const std::function<bool(const PeerConfig&)>& is) const {
    for (std::size_t i = 0; i < index; ++i) {
      if (is(config_.peers[i])) return &peers_[i];
    }
    return nullptr;
  }

  const std::filesystem::path folder_;
  const ConfigWording wording_;
  yaml::Reader read_;
  NodeConfig config_;
  bool secret_named_ = false;
  std::map<std::string, std::string> listening_;  // who listens on an address
  std::vector<Value> tls_;                        // of config_.tls
  std::vector<Value> peers_;                      // of config_.peers, index by index
  std::vector<Value> weights_;                    // the regions that home.weights names
};

}  // namespace

std::string ConfigError::to_string() const {
  std::string out = file;
  if (line > 0) out += fmt::format(":{}:{}", line, column);
  if (!field.empty()) out += fmt::format(": {}", field);
  return out + ": " + expected;
}

bool parse_clock_offset(std::string_view text, Nanos& out) {
  if (text == "0s") {
    out = 0;
    return true;
  }
  const bool behind = text.starts_with('-');
  if (behind) text.remove_prefix(1);
  Nanos length = 0;
  if (!parse_duration(text, length)) return false;
  out = behind ? -length : length;
  return true;
}

bool parse_instant(std::string_view text, Nanos& out) {
  constexpr std::string_view kShape = "dddd-dd-ddTdd:dd:ddZ";
  if (text.size() != kShape.size()) return false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    bool digit = text[i] >= '0' && text[i] <= '9';
    if (kShape[i] == 'd' ? !digit : text[i] != kShape[i]) return false;
  }
  auto number = [&](std::size_t at, std::size_t digits) {
    int value = 0;
    for (char c : text.substr(at, digits)) value = value * 10 + (c - '0');
    return value;
  };
  std::chrono::year_month_day day{std::chrono::year(number(0, 4)),
                                  std::chrono::month(static_cast<unsigned>(number(5, 2))),
                                  std::chrono::day(static_cast<unsigned>(number(8, 2)))};
  int hour = number(11, 2);
  int minute = number(14, 2);
  int second = number(17, 2);
  if (!day.ok() || hour > 23 || minute > 59 || second > 59) return false;
  auto seconds = std::chrono::sys_days(day).time_since_epoch() + std::chrono::hours(hour) +
                 std::chrono::minutes(minute) + std::chrono::seconds(second);
  std::int64_t count = std::chrono::duration_cast<std::chrono::seconds>(seconds).count();
  if (count < 0 || count > kMaxTime / kSecond) return false;
  out = count * kSecond;
  return true;
}

LoadedConfig parse_config(std::string_view text, const std::string& file) {
  LoadedConfig out;
  out.errors = read_config_text(
      text, file,
      [&](const yaml::Tree& tree, const Value& root, std::vector<yaml::Problem>& problems) {
        NodeConfig config = Parser(file, tree, problems).parse(root);
        config.file = file;
        if (problems.empty()) out.config = std::move(config);
      });
  return out;
}

std::string unsuitable(const RuleSet& rules, const NodeConfig& config) {
  std::uint64_t guaranteed = 0;
  for (const Rule& rule : rules.rules()) guaranteed += rule.series;
  if (guaranteed > config.max_series) {
    return fmt::format("rules want room for {} series, but max_series is {}", guaranteed,
                       config.max_series);
  }
  for (const Rule& rule : rules.rules()) {
    // Rights that are kept in memory end with it: no more of them are spent than there are.
    const bool in_memory =
        rule.durability == Durability::async ||
        (rule.enforcement == Enforcement::escrow && rule.durability == Durability::reserve);
    if (config.storage || in_memory) continue;
    return fmt::format("rule \"{}\" wants {}, but storage is none", rule.name,
                       rule.enforcement == Enforcement::home
                           ? "enforcement: home, which is durable"
                           : fmt::format("durability: {}", to_string(rule.durability)));
  }
  return {};
}

std::string unusable_storage(const NodeConfig& config) {
  if (!config.storage) return {};
  const std::string& path = config.storage->path;
  const auto wrong = [&path](const std::filesystem::path& where, const std::string& why) {
    return fmt::format(
        "storage.path: expected a folder that can be made and written, got {}: {}: {}", path,
        where.string(), why);
  };
  // The first folder on the way up that is there: the others would be made in it.
  std::error_code failure;
  std::filesystem::path at = std::filesystem::absolute(path, failure);
  for (;;) {
    const auto found = std::filesystem::status(at, failure);
    if (std::filesystem::is_directory(found)) break;
    if (std::filesystem::exists(found)) return wrong(at, "it is no folder");
    if (found.type() != std::filesystem::file_type::not_found) return wrong(at, failure.message());
    if (std::filesystem::is_symlink(std::filesystem::symlink_status(at, failure))) {
      return wrong(at, "it is a link to nothing");
    }
    if (!at.has_relative_path()) return wrong(at, "it is not there");
    at = at.parent_path();
  }
  if (::access(at.c_str(), R_OK | W_OK | X_OK) == 0) return {};
  return wrong(at, std::strerror(errno));
}

std::vector<std::string> readable_secrets(const NodeConfig& config) {
  std::vector<std::string> out;
  for (const std::string& file : config.secret_files) {
    struct stat found {};
    if (::stat(file.c_str(), &found) == 0 && (found.st_mode & S_IROTH) != 0) out.push_back(file);
  }
  return out;
}

LoadedConfig load_config(const std::string& path) {
  std::string text;
  std::string reason;
  if (!read_small_file(path, kMaxConfigFile, text, reason)) {
    LoadedConfig out;
    out.errors.push_back({path, 0, 0, "", reason});
    return out;
  }
  return parse_config(text, path);
}

}  // namespace weir::node
