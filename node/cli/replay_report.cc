#include <weir/node/cli/replay_report.h>

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>

#include <weir/limits/text/duration.h>
#include <weir/limits/text/utf8.h>
#include <weir/node/cli/table.h>

namespace weir::node {
namespace {

using Json = nlohmann::ordered_json;
using Align = Table::Align;

constexpr std::size_t kListedInText = 10;

std::string timestamp(Nanos time) {
  const std::chrono::sys_seconds seconds{std::chrono::seconds(time / kSecond)};
  return fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", seconds);
}

std::string_view spread_name(Spread spread) {
  return spread == Spread::client ? "client" : "request";
}

std::string key_text(const DeniedKey& key) {
  std::string out;
  for (const auto& [name, value] : key.entries) {
    if (!out.empty()) out += ", ";
    out += value;
  }
  return out;
}

std::string counted(std::uint64_t count, std::string_view what) {
  return fmt::format("{} {}{}", with_commas(count), what, count == 1 ? "" : "s");
}

std::string share(std::uint64_t part, std::uint64_t whole) {
  if (whole == 0) return "-";
  return fmt::format("{:.1f}%", 100.0 * static_cast<double>(part) / static_cast<double>(whole));
}

}  // namespace

std::string replay_json(const ReplayOptions& options, const RequestLog& log,
                        const ReplayReport& report) {
  Json out;
  out["requests"] = report.requests;
  out["malformed"] = log.malformed();
  Json rules = Json::array();
  for (const RuleOutcome& rule : report.rules) {
    rules.push_back({{"name", rule.name},
                     {"allowed", rule.allowed},
                     {"denied", rule.denied},
                     {"over_admitted", rule.over_admitted},
                     {"shadow", rule.shadow}});
    if (rule.candidate_denied) rules.back()["candidate_denied"] = *rule.candidate_denied;
  }
  out["rules"] = std::move(rules);
  Json top = Json::array();
  for (const DeniedKey& key : report.top_denied) {
    Json entries = Json::object();
    for (const auto& [name, value] : key.entries) entries[name] = value;
    top.push_back({{"rule", key.rule},
                   {"key", key_text(key)},
                   {"denied", key.denied},
                   {"entries", std::move(entries)}});
  }
  out["top_denied"] = std::move(top);
  out["passed"] = report.passed;
  out["refused"] = report.refused;
  out["unmatched"] = report.unmatched;
  out["domain"] = options.domain;
  out["regions"] = options.regions;
  out["spread"] = spread_name(options.spread);
  out["sync_interval"] = format_duration(options.sync_interval);
  out["first"] = report.requests == 0 ? Json() : Json(timestamp(report.first));
  out["last"] = report.requests == 0 ? Json() : Json(timestamp(report.last));
  Json malformed = Json::array();
  for (const MalformedLine& line : log.malformed_lines()) {
    malformed.push_back({{"line", line.line}, {"reason", line.reason}});
  }
  out["malformed_lines"] = std::move(malformed);
  return out.dump(-1, ' ', false, Json::error_handler_t::replace) + '\n';
}

std::string replay_text(const ReplayOptions& options, const RequestLog& log,
                        const ReplayReport& report, const std::string& source) {
  std::string out =
      fmt::format("{}: {}", internal::printable(source), counted(report.requests, "request"));
  if (report.requests > 0) {
    out += fmt::format(", {} to {}", timestamp(report.first), timestamp(report.last));
  }
  out += fmt::format("\n{}\n", counted(log.malformed(), "malformed line"));
  const auto& lines = log.malformed_lines();
  for (std::size_t i = 0; i < std::min(lines.size(), kListedInText); ++i) {
    out += fmt::format("  line {}: {}\n", lines[i].line, internal::printable(lines[i].reason));
  }
  if (log.malformed() > kListedInText) {
    out += fmt::format("  and {} more\n", with_commas(log.malformed() - kListedInText));
  }
  out += fmt::format("domain {}, {}", internal::printable(options.domain),
                     counted(options.regions, "region"));
  if (options.regions > 1) {
    out += fmt::format(", spread by {}, exchange every {}", spread_name(options.spread),
                       format_duration(options.sync_interval));
  }
  out += fmt::format("\npassed {}, refused {} ({}), matched by no rule {}\n\n",
                     with_commas(report.passed), with_commas(report.refused),
                     share(report.refused, report.requests), with_commas(report.unmatched));

  Table rules({Align::left, Align::right, Align::right, Align::right, Align::right});
  rules.add({"rule", "allowed", "denied", "denied %", "over-admitted"});
  for (const RuleOutcome& rule : report.rules) {
    rules.add({rule.name + (rule.shadow ? " (shadow)" : ""), with_commas(rule.allowed),
               with_commas(rule.denied), share(rule.denied, rule.allowed + rule.denied),
               with_commas(rule.over_admitted)});
  }
  out += rules.text();
  for (const RuleOutcome& rule : report.rules) {
    if (!rule.candidate_denied) continue;
    out += fmt::format("the candidate of {} would have denied {}\n", rule.name,
                       with_commas(*rule.candidate_denied));
  }
  if (report.top_denied.empty()) return out;

  Table top({Align::right, Align::left, Align::left});
  top.add({"denied", "rule", "key"});
  for (const DeniedKey& key : report.top_denied) {
    top.add({with_commas(key.denied), key.rule, key.entries.empty() ? "(all)" : key_text(key)});
  }
  out += "\nmost denied\n" + top.text();
  return out;
}

}  // namespace weir::node
