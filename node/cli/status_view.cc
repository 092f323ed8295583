#include <weir/node/cli/status_view.h>

#include <fmt/format.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include <weir/limits/text/duration.h>
#include <weir/limits/text/utf8.h>
#include <weir/node/cli/table.h>

namespace weir::node {
namespace {

using Json = nlohmann::ordered_json;
using Align = Table::Align;

constexpr const char* kMissing = "-";
constexpr double kMaxSeconds = 1e9;

const Json& field(const Json& object, std::string_view name) {
  static const Json kNull;
  if (!object.is_object()) return kNull;
  auto at = object.find(std::string(name));
  return at == object.end() ? kNull : *at;
}

std::string text(const Json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_boolean()) return value.get<bool>() ? "yes" : "no";
  if (value.is_number_unsigned()) return with_commas(value.get<std::uint64_t>());
  if (value.is_number_integer()) return std::to_string(value.get<std::int64_t>());
  if (value.is_number()) return fmt::format("{:g}", value.get<double>());
  return kMissing;
}

std::string text(const Json& object, std::string_view name) {
  return text(field(object, name));
}

std::string seconds(const Json& value) {
  if (!value.is_number()) return kMissing;
  const double length = value.get<double>();
  if (!(length >= 0 && length < kMaxSeconds)) return kMissing;
  return short_duration(static_cast<Nanos>(length * static_cast<double>(kSecond)));
}

/// "+3.02s": how far a clock is ahead.
std::string ahead(const Json& value) {
  if (!value.is_number()) return kMissing;
  const double length = value.get<double>();
  return fmt::format("{}{}", length < 0 ? "-" : "+", seconds(std::abs(length)));
}

std::string name_of(const Json& node) {
  return text(node, "region") + "/" + text(node, "node");
}

std::string storage_of(const Json& status) {
  const Json& storage = field(status, "storage");
  if (!storage.is_object()) return kMissing;
  const Json& ok = field(storage, "ok");
  if (ok.is_boolean() && !ok.get<bool>()) {
    return "failed: " + text(storage, "failure");
  }
  const Json& mode = field(storage, "mode");
  if (mode == "none") return "memory only";
  std::string out = text(mode);
  const Json& commit = field(storage, "last_commit_us");
  if (commit.is_number()) out += fmt::format(", commit {} us", text(commit));
  const Json& holding = field(status, "holding");
  if (holding.is_boolean() && holding.get<bool>()) out += ", behind";
  return out;
}

/// "4.1 ms, sweep": the longest event of the main loop of late.
std::string longest_turn_of(const Json& status) {
  const Json& loop = field(status, "loop");
  const Json& length = field(loop, "longest_turn_s");
  if (!length.is_number()) return kMissing;
  return fmt::format("{:.1f} ms, {}", length.get<double>() * 1e3, text(loop, "longest_turn"));
}

std::string peers_of(const Json& status) {
  const Json& peers = field(status, "peers");
  if (!peers.is_array()) return kMissing;
  std::size_t up = 0;
  for (const Json& peer : peers) up += field(peer, "up") == true ? 1 : 0;
  return fmt::format("{} of {}", up, peers.size());
}

/// The status, or nothing and why.
std::optional<Json> parse(const NodeAnswer& answer, std::string& error) {
  if (!answer.error.empty() || answer.json.empty()) {
    error = answer.error.empty() ? "no answer" : answer.error;
    return std::nullopt;
  }
  Json status = Json::parse(answer.json, nullptr, false);
  if (!status.is_object()) {
    error = "the answer is no JSON object";
    return std::nullopt;
  }
  return status;
}

void add_rules(Table& table, const std::string& node, const Json& status) {
  const Json& rules = field(status, "rules");
  if (!rules.is_array()) return;
  for (const Json& rule : rules) {
    const std::string shadow = field(rule, "shadow") == true ? " (shadow)" : "";
    table.add({text(rule, "domain"), text(rule, "name") + shadow, node, text(rule, "allowed"),
               text(rule, "denied"), text(rule, "degraded"),
               text(rule, "limit") + " per " + text(rule, "window"), text(rule, "algorithm")});
  }
}

/// Requests that no rule met: nothing limits them, perhaps by mistake.
std::string unmet_of(const std::string& node, const Json& status) {
  const Json& unmet = field(status, "unmet");
  std::string out;
  const auto add = [&](std::string_view name, std::string_view what) {
    const Json& count = field(unmet, name);
    if (!count.is_number_unsigned() || count == 0u) return;
    if (!out.empty()) out += ", ";
    out += fmt::format("{} {}", with_commas(count.get<std::uint64_t>()), what);
  };
  add("unknown_domain", "of domains without rules");
  const Json& last = field(unmet, "last_unknown_domain");
  if (!out.empty() && last.is_string()) {
    out += fmt::format(" (last: \"{}\")", internal::printable(last.get<std::string>()));
  }
  add("no_rule", "that no rule of their domain met");
  if (out.empty()) return out;
  return fmt::format("{}: requests passed unlimited: {}\n", internal::printable(node), out);
}

void add_peers(Table& table, const std::string& node, const Json& status) {
  const Json& peers = field(status, "peers");
  if (!peers.is_array()) return;
  for (const Json& peer : peers) {
    const Json& error = field(peer, "last_error");
    table.add({node, name_of(peer), text(peer, "up"), text(peer, "unacked"),
               seconds(field(peer, "caught_up_s")), text(peer, "agrees"),
               ahead(field(peer, "clock_ahead_s")),
               field(peer, "up") == true || !error.is_string() ? "" : text(error)});
  }
}

}  // namespace

std::string status_text(std::span<const NodeAnswer> answers) {
  Table nodes({Align::left, Align::left, Align::left, Align::right, Align::right, Align::right,
               Align::left, Align::left, Align::right, Align::right});
  nodes.add({"address", "node", "version", "uptime", "series", "cells", "peers up", "storage",
             "alarms", "longest turn"});
  Table rules({Align::left, Align::left, Align::left, Align::right, Align::right, Align::right,
               Align::left, Align::left});
  rules.add({"domain", "rule", "node", "allowed", "denied", "degraded", "limit", "algorithm"});
  Table peers({Align::left, Align::left, Align::left, Align::right, Align::right, Align::left,
               Align::right, Align::left});
  peers.add({"node", "peer", "up", "unacked", "lag", "agrees", "its clock", "error"});
  std::string failures;
  std::string unmet;
  for (const NodeAnswer& answer : answers) {
    std::string error;
    const std::optional<Json> status = parse(answer, error);
    if (!status) {
      nodes.add({answer.address, "no status"});
      failures +=
          fmt::format("{}: {}\n", internal::printable(answer.address), internal::printable(error));
      continue;
    }
    const std::string name = name_of(*status);
    nodes.add({answer.address, name, text(*status, "version"), seconds(field(*status, "uptime_s")),
               text(*status, "series"), text(*status, "cells"), peers_of(*status),
               storage_of(*status), text(field(*status, "counters"), "alarms"),
               longest_turn_of(*status)});
    const Json& wrong = field(field(*status, "clock"), "wrong");
    if (wrong.is_string() && !wrong.get<std::string>().empty())
      failures += fmt::format("{}: {}\n", name, text(wrong));
    const Json& conditions = field(*status, "conditions");
    for (const Json& one : conditions.is_array() ? conditions : Json::array()) {
      const Json& what = field(one, "text");
      if (field(one, "name") == "clock" || !what.is_string() || what.get<std::string>().empty()) {
        continue;
      }
      failures += fmt::format("{}: {}: {}\n", name, text(one, "name"), text(what));
    }
    unmet += unmet_of(name, *status);
    add_rules(rules, name, *status);
    add_peers(peers, name, *status);
  }
  std::string out = nodes.text();
  if (!failures.empty()) out += "\n" + failures;
  if (!unmet.empty()) out += "\n" + unmet;
  if (rules.has_rows()) out += "\n" + rules.text();
  if (peers.has_rows()) out += "\n" + peers.text();
  return out;
}

std::string status_json(std::span<const NodeAnswer> answers) {
  const auto dump = [](const Json& json) {
    return json.dump(-1, ' ', false, Json::error_handler_t::replace) + '\n';
  };
  Json nodes = Json::array();
  for (const NodeAnswer& answer : answers) {
    std::string error;
    std::optional<Json> status = parse(answer, error);
    if (status && answers.size() == 1) return dump(*status);
    Json node{{"address", answer.address}};
    if (status) {
      node["status"] = std::move(*status);
    } else {
      node["error"] = error;
    }
    nodes.push_back(std::move(node));
  }
  return dump(answers.size() == 1 ? nodes[0] : Json{{"nodes", std::move(nodes)}});
}

}  // namespace weir::node
