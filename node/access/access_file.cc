#include <weir/node/access/access_file.h>

#include <algorithm>
#include <optional>
#include <utility>

#include <weir/limits/yaml/reader.h>
#include <weir/limits/yaml/tree.h>
#include <weir/node/config_text.h>

namespace weir::node {
namespace {

using yaml::Value;

constexpr std::size_t kMaxName = 2048;  // of a certificate: a URI
constexpr std::size_t kMaxDomain = 1024;
constexpr std::string_view kRequired = "it";

class Parser {
 public:
  Parser(const yaml::Tree& tree, std::vector<yaml::Problem>& problems)
      : read_(tree, wording_, problems, kMaxConfigProblems) {}

  AccessTable parse(const Value& root) {
    read_.mapping(
        root, {{"tokens", [this](const Value& v) { return each(v, "a list of tokens", kToken); }},
               {"certificates",
                [this](const Value& v) { return each(v, "a list of certificates", kCertificate); }},
               {"anonymous",
                [this](const Value& v) { return each(v, "a list of networks", kAnonymous); }}});
    return std::move(table_);
  }

 private:
  enum Kind { kToken, kCertificate, kAnonymous };

  bool each(const Value& value, std::string_view what, Kind kind) {
    std::vector<Value> items;
    if (!read_.items(value, what, items)) return false;
    for (const Value& item : items) one(item, kind);
    return true;
  }

  void one(const Value& item, Kind kind) {
    Grant grant;
    std::optional<TokenHash> hash;
    std::vector<MatchCidr> from;
    std::vector<yaml::Reader::Field> fields;
    if (kind == kAnonymous) {
      fields.push_back({"from", [&](const Value& v) { return networks(v, from); }, kRequired});
    } else {
      fields.push_back(
          {"name", [&](const Value& v) { return read_.text(v, "a name", kMaxName, grant.name); },
           kRequired});
    }
    if (kind == kToken) {
      fields.push_back({"hash", [&](const Value& v) { return token_hash(v, hash); }, kRequired});
    }
    fields.push_back({"check", [&](const Value& v) { return domains(v, grant); }});
    fields.push_back({"read", [&](const Value& v) { return yes_or_no(v, grant.read); }});
    fields.push_back({"admin", [&](const Value& v) { return yes_or_no(v, grant.admin); }});
    const std::size_t before = read_.problems();
    read_.mapping(item, fields);
    if (read_.problems() > before) return;
    std::sort(grant.check.begin(), grant.check.end());
    auto shared = std::make_shared<Grant>(std::move(grant));
    if (kind == kAnonymous) {
      for (const MatchCidr& network : from) table_.add_anonymous(network, shared);
    } else if (kind == kToken) {
      shared->proof = Proof::token;
      if (!table_.add_token(*hash, shared)) read_.fail(item, "repeated hash; expected it once");
    } else {
      shared->proof = Proof::certificate;
      if (!table_.add_certificate(shared)) read_.fail(item, "repeated name; expected it once");
    }
  }

  bool yes_or_no(const Value& value, bool& out) {
    return read_.choice<bool>(value, {{"true", true}, {"false", false}}, out);
  }

  bool token_hash(const Value& value, std::optional<TokenHash>& out) {
    const std::string* text = read_.scalar(value);
    if (text != nullptr) out = parse_token_hash(*text);
    // What stands there may be the token itself: it is not repeated.
    return out || read_.fail(value,
                             "expected blake2b: and 64 hexadecimal digits, as weir token "
                             "prints them");
  }

  /// "all", or a list of domains.
  bool domains(const Value& value, Grant& grant) {
    const std::string* text = read_.scalar(value);
    if (text != nullptr && *text == "all") {
      grant.check_all = true;
      return true;
    }
    if (!read_.is_list(value)) return read_.expected(value, "all, or a list of domains");
    std::vector<Value> items;
    read_.items(value, "", items);
    for (const Value& item : items) {
      std::string domain;
      if (read_.text(item, "a domain", kMaxDomain, domain)) grant.check.push_back(domain);
    }
    return true;
  }

  bool networks(const Value& value, std::vector<MatchCidr>& out) {
    std::vector<Value> items;
    if (!read_.items(value, "a list of networks", items)) return false;
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

  const ConfigWording wording_;
  yaml::Reader read_;
  AccessTable table_;
};

}  // namespace

LoadedAccess parse_access(std::string_view text, const std::string& file) {
  LoadedAccess out;
  AccessTable table;
  out.errors = read_config_text(
      text, file,
      [&](const yaml::Tree& tree, const Value& root, std::vector<yaml::Problem>& problems) {
        table = Parser(tree, problems).parse(root);
      });
  if (out.errors.empty()) out.table = std::make_shared<const AccessTable>(std::move(table));
  return out;
}

LoadedAccess load_access(const std::string& path) {
  std::string text;
  std::string reason;
  if (read_small_file(path, kMaxConfigFile, text, reason)) return parse_access(text, path);
  LoadedAccess out;
  out.errors.push_back({path, 0, 0, "", reason});
  return out;
}

}  // namespace weir::node
