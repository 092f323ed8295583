#include <weir/node/config.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <set>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <yaml-cpp/yaml.h>

#include <weir/limits/rules/rules_yaml.h>
#include <weir/node/utf8.h>
#include <weir/rpc/net/address.h>

namespace weir::node {
namespace {

constexpr std::size_t kMaxFile = 1u << 20;
constexpr std::size_t kMaxName = 64;
constexpr std::size_t kMaxPath = 4096;

struct Unit {
  std::string_view name;
  std::uint64_t bytes;
};
constexpr Unit kUnits[] = {
    {"TiB", 1ull << 40}, {"GiB", 1ull << 30}, {"MiB", 1ull << 20}, {"KiB", 1ull << 10}, {"B", 1}};

bool parse_uint(std::string_view text, std::uint64_t& out) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), out);
  return error == std::errc() && end == text.data() + text.size();
}

// What stands there, for a message: short, printable, on one line.
std::string shown(const YAML::Node& node) {
  if (!node.IsDefined() || node.IsNull()) return "nothing";
  if (node.IsMap()) return "a mapping";
  if (node.IsSequence()) return "a list";
  std::string text = to_valid_utf8(utf8_prefix(node.Scalar(), 80));
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < ' ' || c == '\x7F') c = ' ';
  }
  return fmt::format("'{}'{}", text, node.Scalar().size() > 80 ? "…" : "");
}

class Reader {
 public:
  Reader(std::string file, std::vector<ConfigError>& errors)
      : file_(std::move(file)), errors_(errors) {}

  struct Field {
    const char* name;
    std::function<void(const YAML::Node&, const std::string& path)> read;
    bool required = false;
  };

  void error(const YAML::Mark& mark, const std::string& field, std::string expected) {
    errors_.push_back({file_, mark.is_null() ? 1 : mark.line + 1,
                       mark.is_null() ? 1 : mark.column + 1, field, std::move(expected)});
  }
  void error(const YAML::Node& node, const std::string& field, const std::string& expected) {
    error(node.Mark(), field, fmt::format("expected {}, got {}", expected, shown(node)));
  }

  // Reads a mapping: known fields in document order, every other one is an error.
  void mapping(const YAML::Node& node, const std::string& path, const std::vector<Field>& known) {
    std::vector<std::string_view> names;
    for (const Field& field : known) names.push_back(field.name);
    if (!node.IsMap()) {
      error(node, path, fmt::format("a mapping with the fields {}", fmt::join(names, ", ")));
      return;
    }
    std::set<std::string> seen;
    for (const auto& entry : node) {
      if (!entry.first.IsScalar()) {
        error(entry.first, path, "a field name");
        continue;
      }
      const std::string& name = entry.first.Scalar();
      const std::string at = join(path, to_valid_utf8(utf8_prefix(name, 80)));
      const auto field =
          std::find_if(known.begin(), known.end(), [&](const Field& f) { return name == f.name; });
      if (field == known.end()) {
        error(entry.first.Mark(), at,
              fmt::format("unknown field; expected one of {}", fmt::join(names, ", ")));
      } else if (!seen.insert(name).second) {
        error(entry.first.Mark(), at, "repeated field; expected it once");
      } else if (entry.second.IsNull()) {
        // The parser puts what is not there at the next token, which may be lines away.
        error(entry.first.Mark(), at, "expected a value, got nothing");
      } else {
        field->read(entry.second, at);
      }
    }
    for (const Field& field : known) {
      if (field.required && !seen.contains(field.name)) {
        error(node.Mark(), join(path, field.name), "required field is missing");
      }
    }
  }

  bool text(const YAML::Node& node, const std::string& path, const std::string& what,
            std::size_t max, std::string& out) {
    if (!node.IsScalar() || node.Scalar().empty() || node.Scalar().size() > max ||
        node.Scalar().find('\0') != std::string::npos) {
      error(node, path, fmt::format("{} of 1 to {} bytes", what, max));
      return false;
    }
    out = node.Scalar();
    return true;
  }

  void name(const YAML::Node& node, const std::string& path, std::string& out) {
    const auto allowed = [](char c) {
      return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
             c == '-' || c == '_' || c == '.';
    };
    if (!node.IsScalar() || node.Scalar().empty() || node.Scalar().size() > kMaxName ||
        !std::all_of(node.Scalar().begin(), node.Scalar().end(), allowed)) {
      error(node, path,
            fmt::format("a name of 1 to {} letters, digits, '-', '_' or '.'", kMaxName));
      return;
    }
    out = node.Scalar();
  }

  void address(const YAML::Node& node, const std::string& path, bool any_port, std::string& out) {
    std::optional<rpc::Address> parsed;
    std::string reason;
    if (node.IsScalar()) parsed = rpc::parse_address(node.Scalar(), reason);
    if (!parsed || (!any_port && parsed->port == 0)) {
      error(node, path, "a literal address and a port, such as 127.0.0.1:7400 or [::1]:7400");
      return;
    }
    out = rpc::to_string(*parsed);
  }

  void duration(const YAML::Node& node, const std::string& path, Nanos low, Nanos high,
                Nanos& out) {
    Nanos value = 0;
    if (!node.IsScalar() || !parse_duration(node.Scalar(), value) || value < low || value > high) {
      error(node, path,
            fmt::format("a duration from {} to {}", format_duration(low), format_duration(high)));
      return;
    }
    out = value;
  }

  template <typename T>
  void integer(const YAML::Node& node, const std::string& path, std::uint64_t low,
               std::uint64_t high, T& out) {
    std::uint64_t value = 0;
    if (!node.IsScalar() || !parse_uint(node.Scalar(), value) || value < low || value > high) {
      error(node, path, fmt::format("an integer from {} to {}", low, high));
      return;
    }
    out = static_cast<T>(value);
  }

  template <typename T>
  void size(const YAML::Node& node, const std::string& path, std::uint64_t low, std::uint64_t high,
            std::uint64_t multiple, T& out) {
    std::uint64_t value = 0;
    if (!node.IsScalar() || !parse_size(node.Scalar(), value) || value < low || value > high ||
        value % multiple != 0) {
      std::string expected =
          fmt::format("a size from {} to {}", format_size(low), format_size(high));
      if (multiple > 1) expected += fmt::format(", a multiple of {}", format_size(multiple));
      error(node, path, expected);
      return;
    }
    out = static_cast<T>(value);
  }

  template <typename T>
  void choice(const YAML::Node& node, const std::string& path,
              const std::vector<std::pair<std::string_view, T>>& choices, T& out) {
    std::vector<std::string_view> names;
    for (const auto& [choice_name, value] : choices) {
      if (node.IsScalar() && node.Scalar() == choice_name) {
        out = value;
        return;
      }
      names.push_back(choice_name);
    }
    error(node, path, fmt::format("one of {}", fmt::join(names, ", ")));
  }

 private:
  static std::string join(const std::string& path, const std::string& name) {
    return path.empty() ? name : path + "." + name;
  }

  const std::string file_;
  std::vector<ConfigError>& errors_;
};

// A whole small file. False with the reason.
bool read_file(const std::string& path, std::size_t max, std::string& out, std::string& error) {
  std::error_code code;
  if (std::filesystem::is_directory(path, code)) {
    error = "it is a directory";
    return false;
  }
  errno = 0;
  std::ifstream in(path, std::ios::binary);
  if (!in) {
    error = errno != 0 ? std::strerror(errno) : "cannot be opened";
    return false;
  }
  out.resize(max + 1);
  in.read(out.data(), static_cast<std::streamsize>(out.size()));
  if (in.bad()) {
    error = "cannot be read";
    return false;
  }
  out.resize(static_cast<std::size_t>(in.gcount()));
  if (out.size() > max) {
    error = fmt::format("larger than {}", format_size(max));
    return false;
  }
  return true;
}

class Parser {
 public:
  Parser(const std::string& file, std::vector<ConfigError>& errors)
      : folder_(std::filesystem::path(file).parent_path()), read_(file, errors) {}

  NodeConfig parse(const YAML::Node& root) {
    using Node = YAML::Node;
    using Path = const std::string&;
    read_.mapping(
        root, "",
        {{"cluster", [&](const Node& n, Path p) { cluster(n, p); }, true},
         {"region", [&](const Node& n, Path p) { read_.name(n, p, config_.self.region); }, true},
         {"node", [&](const Node& n, Path p) { read_.name(n, p, config_.self.node); }, true},
         {"listen", [&](const Node& n, Path p) { listen(n, p); }},
         {"weight", [&](const Node& n, Path p) { weight(n, p, config_.weights); }},
         {"peers", [&](const Node& n, Path p) { peers(n, p); }},
         {"rules", [&](const Node& n, Path p) { path(n, p, config_.rules); }, true},
         {"storage", [&](const Node& n, Path p) { storage(n, p); }, true},
         {"sync_interval",
          [&](const Node& n, Path p) {
            read_.duration(n, p, 10 * kMillisecond, kMinute, config_.sync_interval);
          }},
         {"anti_entropy_interval",
          [&](const Node& n, Path p) {
            read_.duration(n, p, 100 * kMillisecond, kHour, config_.anti_entropy_interval);
          }},
         {"commit_interval",
          [&](const Node& n, Path p) {
            read_.duration(n, p, kMillisecond, kSecond, config_.commit_interval);
          }},
         {"max_commit_wait",
          [&](const Node& n, Path p) {
            read_.duration(n, p, 10 * kMillisecond, kMinute, config_.max_commit_wait);
          }},
         {"max_skew",
          [&](const Node& n, Path p) {
            read_.duration(n, p, kMillisecond, kMinute, config_.max_skew);
          }},
         {"threads", [&](const Node& n,
                         Path p) { read_.integer(n, p, 1, kMaxThreads, config_.threads); }},
         {"max_series", [&](const Node& n,
                            Path p) { read_.integer(n, p, 1, 1'000'000'000, config_.max_series); }},
         {"populate",
          [&](const Node& n, Path p) {
            read_.choice<bool>(n, p, {{"true", true}, {"false", false}}, config_.populate);
          }},
         {"max_request_ids",
          [&](const Node& n, Path p) {
            read_.integer(n, p, 0, 100'000'000, config_.max_request_ids);
          }},
         {"request_id_ttl",
          [&](const Node& n, Path p) {
            read_.duration(n, p, kSecond, kDay, config_.request_id_ttl);
          }},
         {"max_tickets",
          [&](const Node& n, Path p) { read_.integer(n, p, 0, 100'000'000, config_.max_tickets); }},
         {"log", [&](const Node& n, Path p) { log(n, p); }},
         {"http", [&](const Node& n, Path p) { http(n, p); }},
         {"home", [&](const Node& n, Path p) { home(n, p); }}});
    check_members(root);
    return std::move(config_);
  }

 private:
  struct PeerMarks {
    YAML::Node node;
    std::string path;
  };

  void path(const YAML::Node& node, const std::string& at, std::string& out) {
    std::string text;
    if (read_.text(node, at, "a path", kMaxPath, text)) out = (folder_ / text).string();
  }

  void cluster(const YAML::Node& node, const std::string& at) {
    YAML::Mark secret_mark;
    int secrets = 0;
    read_.mapping(
        node, at,
        {{"name",
          [&](const YAML::Node& n, const std::string& p) { read_.name(n, p, config_.cluster); },
          true},
         {"secret",
          [&](const YAML::Node& n, const std::string& p) {
            ++secrets;
            secret_mark = n.Mark();
            secret_named_ = true;
            secret(n, p);
          }},
         {"secret_file", [&](const YAML::Node& n, const std::string& p) {
            ++secrets;
            secret_mark = n.Mark();
            secret_named_ = true;
            secret_file(n, p);
          }}});
    if (secrets > 1) {
      read_.error(secret_mark, at, "expected either secret or secret_file, got both");
    }
  }

  // Its text never gets into a message.
  void secret(const YAML::Node& node, const std::string& at) {
    if (!node.IsScalar()) {
      read_.error(node.Mark(), at,
                  fmt::format("expected text of {} to {} bytes", kMinSecret, kMaxSecret));
      return;
    }
    take_secret(node, at, node.Scalar());
  }

  void secret_file(const YAML::Node& node, const std::string& at) {
    std::string file;
    path(node, at, file);
    if (file.empty()) return;
    std::string bytes;
    std::string reason;
    // Room for the line end that editors leave.
    if (!read_file(file, kMaxSecret + 2, bytes, reason)) {
      read_.error(node.Mark(), at,
                  fmt::format("expected a readable file, but {}: {}", file, reason));
      return;
    }
    while (!bytes.empty() && (bytes.back() == '\n' || bytes.back() == '\r')) bytes.pop_back();
    take_secret(node, at, bytes);
  }

  void take_secret(const YAML::Node& node, const std::string& at, const std::string& bytes) {
    if (bytes.size() < kMinSecret || bytes.size() > kMaxSecret) {
      read_.error(node.Mark(), at,
                  fmt::format("expected a secret of {} to {} bytes, got {} bytes", kMinSecret,
                              kMaxSecret, bytes.size()));
      return;
    }
    config_.secret = bytes;
  }

  void listen(const YAML::Node& node, const std::string& at) {
    if (node.IsMap()) config_.fronts.clear();
    std::map<std::string, std::string> taken;
    std::vector<Reader::Field> fields = {{"peers", [&](const YAML::Node& n, const std::string& p) {
                                    listen_on(n, p, taken, config_.listen_peers);
                                  }}};
    for (std::string_view front : kFronts) {
      fields.push_back({front.data(), [&, front](const YAML::Node& n, const std::string& p) {
                          listen_on(n, p, std::string(front), taken);
                        }});
    }
    read_.mapping(node, at, fields);
    check_free("peers", config_.listen_peers, node, at + ".peers", taken);
  }

  /// One address, or a list of them.
  void listen_on(const YAML::Node& node, const std::string& at, const std::string& front,
                 std::map<std::string, std::string>& taken) {
    if (node.IsSequence() && (node.size() == 0 || node.size() > kMaxListen)) {
      read_.error(node.Mark(), at,
                  fmt::format("expected 1 to {} addresses, got {}", kMaxListen, node.size()));
      return;
    }
    const std::size_t count = node.IsSequence() ? node.size() : 1;
    for (std::size_t i = 0; i < count; ++i) {
      const YAML::Node one = node.IsSequence() ? node[i] : node;
      std::string address;
      listen_on(one, node.IsSequence() ? fmt::format("{}[{}]", at, i) : at, taken, address);
      if (address.empty()) continue;
      check_free(front, address, one, at, taken);
      config_.fronts.push_back({front, address});
    }
  }

  void listen_on(const YAML::Node& node, const std::string& at,
                 std::map<std::string, std::string>&, std::string& out) {
    std::string address;
    read_.address(node, at, true, address);
    if (!address.empty()) out = address;
  }

  /// No two of them listen on one address. Port 0 is a free one each time.
  void check_free(const std::string& name, const std::string& address, const YAML::Node& node,
                  const std::string& at, std::map<std::string, std::string>& taken) {
    std::string reason;
    const std::optional<rpc::Address> parsed = rpc::parse_address(address, reason);
    if (!parsed || parsed->port == 0) return;
    const auto [other, fresh] = taken.emplace(address, name);
    if (fresh) return;
    read_.error(node.Mark(), at,
                fmt::format("expected an address of its own, but {} listens on {} as well",
                            other->second, address));
  }

  /// A number, or a list of changes.
  void weight(const YAML::Node& node, const std::string& at, std::vector<crdt::WeightChange>& out) {
    if (!node.IsSequence()) {
      read_.integer(node, at, 0, kMaxWeight, out[0].weight);
      return;
    }
    if (node.size() == 0 || node.size() > kMaxWeightChanges) {
      read_.error(node.Mark(), at,
                  fmt::format("expected 1 to {} changes, got {}", kMaxWeightChanges, node.size()));
      return;
    }
    out.clear();
    for (std::size_t i = 0; i < node.size(); ++i) {
      const std::string path = fmt::format("{}[{}]", at, i);
      crdt::WeightChange change;
      read_.mapping(node[i], path,
                    {{"from",
                      [&](const YAML::Node& n, const std::string& p) {
                        if (!n.IsScalar() || !parse_instant(n.Scalar(), change.from)) {
                          read_.error(n, p, "an instant in UTC such as 2026-12-01T00:00:00Z");
                        }
                      }},
                     {"weight",
                      [&](const YAML::Node& n, const std::string& p) {
                        read_.integer(n, p, 0, kMaxWeight, change.weight);
                      },
                      true}});
      if (i > 0 && change.from <= out.back().from) {
        read_.error(node[i].Mark(), path + ".from",
                    "expected an instant after that of the change before");
      }
      out.push_back(change);
    }
  }

  void peers(const YAML::Node& node, const std::string& at) {
    if (!node.IsSequence()) {
      read_.error(node, at, "a list of peers");
      return;
    }
    if (node.size() > kMaxPeers) {
      read_.error(node.Mark(), at,
                  fmt::format("expected at most {} peers, got {}", kMaxPeers, node.size()));
      return;
    }
    for (std::size_t i = 0; i < node.size(); ++i) {
      const std::string path = fmt::format("{}[{}]", at, i);
      PeerConfig peer;
      read_.mapping(
          node[i], path,
          {{"region",
            [&](const YAML::Node& n, const std::string& p) {
              read_.name(n, p, peer.member.region);
            },
            true},
           {"node",
            [&](const YAML::Node& n, const std::string& p) { read_.name(n, p, peer.member.node); },
            true},
           {"address",
            [&](const YAML::Node& n, const std::string& p) {
              read_.address(n, p, false, peer.address);
            },
            true},
           {"weight",
            [&](const YAML::Node& n, const std::string& p) { weight(n, p, peer.weights); }}});
      peer.line = node[i].Mark().line + 1;
      peer.column = node[i].Mark().column + 1;
      config_.peers.push_back(std::move(peer));
      peer_marks_.push_back({node[i], path});
    }
  }

  void storage(const YAML::Node& node, const std::string& at) {
    if (node.IsScalar() && node.Scalar() == "none") return;
    if (!node.IsMap()) {
      read_.error(node, at, "none, or a mapping with the fields path, map_size");
      return;
    }
    StorageConfig storage;
    read_.mapping(
        node, at,
        {{"path", [&](const YAML::Node& n, const std::string& p) { path(n, p, storage.path); },
          true},
         {"map_size", [&](const YAML::Node& n, const std::string& p) {
            read_.size(n, p, 1ull << 20, 16ull << 40, 4096, storage.map_size);
          }}});
    config_.storage = std::move(storage);
  }

  void log(const YAML::Node& node, const std::string& at) {
    read_.mapping(node, at,
                  {{"level",
                    [&](const YAML::Node& n, const std::string& p) {
                      read_.choice<LogLevel>(n, p,
                                             {{"debug", LogLevel::debug},
                                              {"info", LogLevel::info},
                                              {"warn", LogLevel::warn},
                                              {"error", LogLevel::error}},
                                             config_.log_level);
                    }},
                   {"format", [&](const YAML::Node& n, const std::string& p) {
                      read_.choice<LogFormat>(
                          n, p, {{"json", LogFormat::json}, {"text", LogFormat::text}},
                          config_.log_format);
                    }}});
  }

  void http(const YAML::Node& node, const std::string& at) {
    read_.mapping(node, at,
                  {{"reset",
                    [&](const YAML::Node& n, const std::string& p) {
                      read_.choice<ResetFormat>(
                          n, p, {{"seconds", ResetFormat::seconds}, {"epoch", ResetFormat::epoch}},
                          config_.http.reset);
                    }},
                   {"max_connections",
                    [&](const YAML::Node& n, const std::string& p) {
                      read_.integer(n, p, 1, 65536, config_.http.max_connections);
                    }},
                   {"max_body", [&](const YAML::Node& n, const std::string& p) {
                      read_.size(n, p, 1024, 1u << 20, 1, config_.http.max_body);
                    }}});
  }

  void home(const YAML::Node& node, const std::string& at) {
    read_.mapping(node, at,
                  {{"deadline",
                    [&](const YAML::Node& n, const std::string& p) {
                      read_.duration(n, p, kMillisecond, 10 * kSecond, config_.home.deadline);
                    }},
                   {"weights", [&](const YAML::Node& n, const std::string& p) { weights(n, p); }}});
  }

  void weights(const YAML::Node& node, const std::string& at) {
    if (!node.IsMap()) {
      read_.error(node, at, "a mapping from regions to weights from 0 to 100");
      return;
    }
    for (const auto& entry : node) {
      std::string region;
      read_.name(entry.first, at, region);
      const std::string path = at + "." + region;
      if (!region.empty() && config_.home.weights.contains(region)) {
        read_.error(entry.first.Mark(), path, "repeated region; expected it once");
      }
      weight_marks_.emplace_back(region, entry.first);
      read_.integer(entry.second, path, 0, 100, config_.home.weights[region]);
    }
  }

  /// A region that is nobody's is a mistake: its share would go to no one without a word.
  void check_weights() {
    bool any = config_.home.weights.empty();
    const auto weight_of = [&](const std::string& region) {
      const auto at = config_.home.weights.find(region);
      return at == config_.home.weights.end() ? 1u : at->second;
    };
    any |= weight_of(config_.self.region) > 0;
    for (const PeerConfig& peer : config_.peers) any |= weight_of(peer.member.region) > 0;
    for (const auto& [region, node] : weight_marks_) {
      const bool known =
          region == config_.self.region || std::any_of(config_.peers.begin(), config_.peers.end(),
                                                       [&name = region](const PeerConfig& peer) {
                                                         return peer.member.region == name;
                                                       });
      if (region.empty() || known) continue;
      read_.error(node, "home.weights." + region, "a region of this node or of a peer");
    }
    if (!any) {
      read_.error(weight_marks_.front().second.Mark(), "home.weights",
                  "expected a region with a weight above 0");
    }
  }

  void check_members(const YAML::Node& root) {
    check_weights();
    if (peer_marks_.empty()) return;
    if (!secret_named_) {
      read_.error(root.Mark(), "cluster.secret",
                  "required field is missing: expected secret or secret_file, since there are "
                  "peers");
    }
    for (std::size_t i = 0; i < config_.peers.size(); ++i) {
      const PeerConfig& peer = config_.peers[i];
      const PeerMarks& mark = peer_marks_[i];
      const bool named = !peer.member.region.empty() && !peer.member.node.empty();
      const std::string shown_name = peer.member.region + "/" + peer.member.node;
      if (named && peer.member == config_.self) {
        read_.error(
            mark.node.Mark(), mark.path,
            fmt::format("expected the other members only, but {} is this node", shown_name));
      }
      for (std::size_t j = 0; j < i; ++j) {
        if (named && peer.member == config_.peers[j].member) {
          read_.error(mark.node.Mark(), mark.path,
                      fmt::format("expected a member of its own, but {} is {} as well",
                                  peer_marks_[j].path, shown_name));
          break;
        }
      }
      for (std::size_t j = 0; j < i; ++j) {
        if (!peer.address.empty() && peer.address == config_.peers[j].address) {
          read_.error(mark.node.Mark(), mark.path + ".address",
                      fmt::format("expected an address of its own, but {} has {} as well",
                                  peer_marks_[j].path, peer.address));
          break;
        }
      }
    }
  }

  const std::filesystem::path folder_;
  Reader read_;
  NodeConfig config_;
  bool secret_named_ = false;
  std::vector<PeerMarks> peer_marks_;
  std::vector<std::pair<std::string, YAML::Node>> weight_marks_;  // by region
};

}  // namespace

std::string ConfigError::to_string() const {
  std::string out = file;
  if (line > 0) out += fmt::format(":{}:{}", line, column);
  if (!field.empty()) out += fmt::format(": {}", field);
  return out + ": " + expected;
}

bool parse_size(std::string_view text, std::uint64_t& out) {
  std::uint64_t factor = 1;
  for (const Unit& unit : kUnits) {
    if (text.ends_with(unit.name)) {
      text.remove_suffix(unit.name.size());
      factor = unit.bytes;
      break;
    }
  }
  std::uint64_t count = 0;
  if (!parse_uint(text, count) || count > (1ull << 63) / factor) return false;
  out = count * factor;
  return true;
}

bool parse_clock_offset(std::string_view text, Nanos& out) {
  if (text == "0s") {
    out = 0;
    return true;
  }
  const bool behind = text.starts_with('-');
  if (behind) text.remove_prefix(1);
  Nanos length = 0;
  if (!parse_duration(text, length) || length > kHour) return false;
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

std::string format_size(std::uint64_t bytes) {
  for (const Unit& unit : kUnits) {
    if (bytes != 0 && unit.bytes > 1 && bytes % unit.bytes == 0) {
      return fmt::format("{}{}", bytes / unit.bytes, unit.name);
    }
  }
  return fmt::format("{}", bytes);
}

LoadedConfig parse_config(std::string_view yaml, const std::string& file) {
  LoadedConfig out;
  if (yaml.size() > kMaxFile) {
    out.errors.push_back({file, 0, 0, "", fmt::format("larger than {}", format_size(kMaxFile))});
    return out;
  }
  try {
    const std::vector<YAML::Node> documents = YAML::LoadAll(std::string(yaml));
    if (documents.empty() || documents[0].IsNull()) {
      out.errors.push_back({file, 1, 1, "", "expected a mapping, got an empty document"});
    } else if (documents.size() > 1) {
      const YAML::Mark mark = documents[1].Mark();
      out.errors.push_back(
          {file, mark.line + 1, mark.column + 1, "", "expected one document, got several"});
    } else {
      NodeConfig config = Parser(file, out.errors).parse(documents[0]);
      config.file = file;
      if (out.errors.empty()) out.config = std::move(config);
    }
  } catch (const YAML::Exception& e) {
    out.errors.push_back(
        {file, e.mark.line + 1, e.mark.column + 1, "", fmt::format("not YAML: {}", e.msg)});
  }
  std::stable_sort(out.errors.begin(), out.errors.end(),
                   [](const ConfigError& a, const ConfigError& b) {
                     return std::pair(a.line, a.column) < std::pair(b.line, b.column);
                   });
  return out;
}

std::string unsuitable(const RuleSet& rules, const NodeConfig& config) {
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

LoadedConfig load_config(const std::string& path) {
  std::string text;
  std::string reason;
  if (!read_file(path, kMaxFile, text, reason)) {
    LoadedConfig out;
    out.errors.push_back({path, 0, 0, "", reason});
    return out;
  }
  return parse_config(text, path);
}

}  // namespace weir::node
