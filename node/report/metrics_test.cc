#include <weir/node/report/metrics.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <sstream>
#include <string>
#include <string_view>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace weir::node {
namespace {

// What a scraper sees: samples by their whole name with labels, and each family's type and help.
struct Scrape {
  std::map<std::string, double> samples;
  std::map<std::string, std::string> types;
  std::map<std::string, std::string> helps;
};

bool is_name(std::string_view text) {
  const auto letter = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
  };
  return !text.empty() && letter(text.front()) &&
         std::all_of(text.begin(), text.end(),
                     [&](char c) { return letter(c) || (c >= '0' && c <= '9'); });
}

// Length of `{name="value",…}` at the start of `text`; 0 if it is malformed.
std::size_t labels_length(std::string_view text) {
  std::size_t at = 0;
  do {
    const std::size_t equals = text.find("=\"", ++at);
    if (equals == std::string_view::npos || !is_name(text.substr(at, equals - at))) return 0;
    for (at = equals + 2; at < text.size() && text[at] != '"'; ++at) {
      if (text[at] != '\\') continue;
      if (++at >= text.size() || std::string_view("\\\"n").find(text[at]) == text.npos) return 0;
    }
    if (++at >= text.size()) return 0;
  } while (text[at] == ',');
  return text[at] == '}' ? at + 1 : 0;
}

// Reads one line of the text format; false if it is none.
bool read_line(const std::string& line, std::string& family, Scrape& out) {
  std::istringstream in(line);
  std::string hash, kind, name, rest;
  if (line.starts_with("# ")) {
    in >> hash >> kind >> name >> std::ws;
    std::getline(in, rest);
    if (!is_name(name) || rest.empty()) return false;
    if (kind == "HELP") return out.helps.emplace(name, rest).second;
    family = name;
    return kind == "TYPE" && (rest == "counter" || rest == "gauge") &&
           out.types.emplace(name, rest).second;
  }
  std::size_t end = line.find_first_of("{ ");
  if (end == std::string::npos || line.substr(0, end) != family) return false;
  if (line[end] == '{') {
    const std::size_t length = labels_length(std::string_view(line).substr(end));
    if (length == 0) return false;
    end += length;
  }
  if (end + 1 >= line.size() || line[end] != ' ') return false;
  std::size_t used = 0;
  const double value = std::stod(line.substr(end + 1), &used);
  return end + 1 + used == line.size() && out.samples.emplace(line.substr(0, end), value).second;
}

Scrape scrape(const NodeMetrics& metrics) {
  Scrape out;
  const std::string text = render_metrics(metrics);
  EXPECT_THAT(text, testing::EndsWith("\n"));
  std::istringstream in(text);
  std::string family;
  for (std::string line; std::getline(in, line);) {
    EXPECT_TRUE(read_line(line, family, out)) << "not a line of the text format: " << line;
  }
  return out;
}

NodeMetrics example() {
  NodeMetrics metrics;
  metrics.version = "0.1.0";
  metrics.cluster = "demo";
  metrics.region = "eu";
  metrics.node = "eu-1";
  metrics.start_time_seconds = 1'767'323'045.5;
  metrics.series = 12;
  metrics.max_series = 1000;
  metrics.cells = 34;
  metrics.requests_over_budget = 21;
  metrics.reports_over_budget = 22;
  metrics.clock_ok = false;
  metrics.namesake = true;
  metrics.clock_set_back_seconds = 3600.5;
  metrics.request_ids = {35, 36, 37};
  metrics.tickets = {38, 39, 40};
  metrics.unmet = {41, 42};
  metrics.turns = {{"sweep", 0.0041}, {"turn", 0.0052}};
  metrics.rules_file = {"0123456789abcdef", 1'767'323'046.5, 41, 42, false};
  metrics.rules = {
      {"api", "per-key", 100, 7, 2, 5, false, 43, 44, 45, 46},
      {"api", "trial", 50, 9, 0, 0, true, 0, 0, 0, 0, std::nullopt, {{"team", "a\"b"}}}};
  metrics.peers = {{"us/us-1", true, 5, 0.25, -0.125, 3, true, 8, 9},
                   {"ap/ap-1", false, 0, {}, {}, 0}};
  metrics.tls = {{"http", 13, 4, 5, false, {{"ca.pem", -0.5}}}};
  metrics.storage = StorageMetrics{true, 10, 20, 4096, 1, 0.004, 11, 12};
  metrics.home = HomeMetrics{13, 14, 15, 16};
  metrics.escrow = EscrowMetrics{true, false, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61};
  metrics.replica = {1, 2, 3, 4};
  return metrics;
}

TEST(Metrics, RendersEveryFigure) {
  const Scrape page = scrape(example());
  const std::map<std::string, double> expected = {
      {"weir_build_info{version=\"0.1.0\",cluster=\"demo\",region=\"eu\",node=\"eu-1\"}", 1},
      {"process_start_time_seconds", 1'767'323'045.5},
      {"weir_series", 12},
      {"weir_series_limit", 1000},
      {"weir_cells", 34},
      {"weir_caller_over_budget_total{what=\"waiting\"}", 21},
      {"weir_caller_over_budget_total{what=\"status\"}", 22},
      {"weir_clock_ok", 0},
      {"weir_namesake", 1},
      {"weir_clock_set_back_seconds", 3600.5},
      {"weir_request_ids", 35},
      {"weir_request_ids_repeated_total", 36},
      {"weir_request_ids_evicted_total", 37},
      {"weir_unmet_requests_total{reason=\"no_rule\"}", 41},
      {"weir_unmet_requests_total{reason=\"unknown_domain\"}", 42},
      {"weir_tickets", 38},
      {"weir_tickets_timed_out_total", 39},
      {"weir_tickets_refused_total", 40},
      {"weir_loop_turn_longest_seconds{what=\"sweep\"}", 0.0041},
      {"weir_loop_turn_longest_seconds{what=\"turn\"}", 0.0052},
      {"weir_rule_info{domain=\"api\",rule=\"trial\",team=\"a\\\"b\"}", 1},
      {"weir_rules_info{version=\"0123456789abcdef\"}", 1},
      {"weir_rules_loaded_time_seconds", 1'767'323'046.5},
      {"weir_rules_current", 0},
      {"weir_rules_reloads_total", 41},
      {"weir_rules_refused_total", 42},
      {"weir_rule_series{domain=\"api\",rule=\"per-key\"}", 44},
      {"weir_rule_series{domain=\"api\",rule=\"trial\"}", 0},
      {"weir_rule_series_guaranteed{domain=\"api\",rule=\"per-key\"}", 45},
      {"weir_rule_series_guaranteed{domain=\"api\",rule=\"trial\"}", 0},
      {"weir_rule_series_refused_total{domain=\"api\",rule=\"per-key\"}", 46},
      {"weir_rule_series_refused_total{domain=\"api\",rule=\"trial\"}", 0},
      {"weir_rule_decisions_total{domain=\"api\",rule=\"per-key\",verdict=\"allowed\"}", 100},
      {"weir_rule_decisions_total{domain=\"api\",rule=\"per-key\",verdict=\"denied\"}", 7},
      {"weir_rule_decisions_total{domain=\"api\",rule=\"per-key\",verdict=\"shadow_denied\"}", 0},
      {"weir_rule_decisions_total{domain=\"api\",rule=\"trial\",verdict=\"allowed\"}", 50},
      {"weir_rule_decisions_total{domain=\"api\",rule=\"trial\",verdict=\"denied\"}", 0},
      {"weir_rule_decisions_total{domain=\"api\",rule=\"trial\",verdict=\"shadow_denied\"}", 9},
      {"weir_rule_degraded_total{domain=\"api\",rule=\"per-key\"}", 2},
      {"weir_rule_degraded_total{domain=\"api\",rule=\"trial\"}", 0},
      {"weir_storage_waiting_requests", 11},
      {"weir_storage_shed_requests_total", 12},
      {"weir_home_forwarded_total", 13},
      {"weir_home_served_total", 14},
      {"weir_home_refused_total", 15},
      {"weir_home_degraded_total", 16},
      {"weir_rule_exhausted_locally_total{domain=\"api\",rule=\"per-key\"}", 5},
      {"weir_rule_exhausted_locally_total{domain=\"api\",rule=\"trial\"}", 0},
      {"weir_escrow_open", 1},
      {"weir_escrow_whole", 0},
      {"weir_escrow_requests_sent_total", 50},
      {"weir_escrow_requests_served_total", 51},
      {"weir_escrow_requests_refused_total", 52},
      {"weir_escrow_units_given_total", 53},
      {"weir_escrow_units_received_total", 54},
      {"weir_escrow_versions_differ_total", 55},
      {"weir_escrow_forwarded_total", 56},
      {"weir_escrow_forwards_total", 57},
      {"weir_escrow_forwards_admitted_total", 58},
      {"weir_escrow_forwards_failed_total", 59},
      {"weir_escrow_forwards_suppressed_total", 60},
      {"weir_escrow_forwards_served_total", 61},
      {"weir_over_admission_worst_case_units{domain=\"api\",rule=\"per-key\"}", 43},
      {"weir_over_admission_worst_case_units{domain=\"api\",rule=\"trial\"}", 0},
      {"weir_peer_up{peer=\"us/us-1\"}", 1},
      {"weir_peer_up{peer=\"ap/ap-1\"}", 0},
      {"weir_peer_unacked_changes{peer=\"us/us-1\"}", 5},
      {"weir_peer_unacked_changes{peer=\"ap/ap-1\"}", 0},
      {"weir_peer_lag_seconds{peer=\"us/us-1\"}", 0.25},
      {"weir_peer_clock_skew_seconds{peer=\"us/us-1\"}", -0.125},
      {"weir_peer_two_of_name{peer=\"us/us-1\"}", 1},
      {"weir_peer_two_of_name{peer=\"ap/ap-1\"}", 0},
      {"weir_peer_dropped_messages_total{peer=\"us/us-1\"}", 3},
      {"weir_peer_dropped_messages_total{peer=\"ap/ap-1\"}", 0},
      {"weir_peer_withheld_slots_total{peer=\"us/us-1\"}", 8},
      {"weir_peer_withheld_slots_total{peer=\"ap/ap-1\"}", 0},
      {"weir_peer_refused_cells_total{peer=\"us/us-1\"}", 9},
      {"weir_peer_refused_cells_total{peer=\"ap/ap-1\"}", 0},
      {"weir_certificate_expiry_seconds{use=\"http\",file=\"ca.pem\"}", -0.5},
      {"weir_certificates_current{use=\"http\"}", 0},
      {"weir_tls_handshakes_total{use=\"http\",result=\"full\"}", 9},
      {"weir_tls_handshakes_total{use=\"http\",result=\"resumed\"}", 4},
      {"weir_tls_handshakes_total{use=\"http\",result=\"failed\"}", 5},
      {"weir_storage_ok", 1},
      {"weir_storage_commits_total", 10},
      {"weir_storage_records_total", 20},
      {"weir_storage_written_bytes_total", 4096},
      {"weir_storage_backlog_writes", 1},
      {"weir_storage_last_commit_duration_seconds", 0.004},
      {"weir_replica_late_cells_total", 1},
      {"weir_replica_future_cells_total", 2},
      {"weir_replica_invalid_cells_total", 3},
      {"weir_replica_alarms_total", 4},
  };
  EXPECT_EQ(page.samples, expected);
}

TEST(Metrics, NamesFollowConventions) {
  const Scrape page = scrape(example());
  EXPECT_EQ(page.types.size(), page.helps.size());
  for (const auto& [name, type] : page.types) {
    EXPECT_THAT(name, testing::AnyOf(testing::StartsWith("weir_"),
                                     testing::StrEq("process_start_time_seconds")));
    EXPECT_EQ(type == "counter", name.ends_with("_total")) << name;
    ASSERT_TRUE(page.helps.contains(name)) << name;
    EXPECT_GT(page.helps.at(name).size(), 10u) << name;
  }
}

TEST(Metrics, LeavesOutWhatIsNotThere) {
  NodeMetrics metrics = example();
  metrics.storage.reset();
  metrics.rules.clear();
  metrics.peers.clear();
  metrics.tls.clear();
  for (const auto& [name, value] : scrape(metrics).samples) {
    EXPECT_THAT(name, testing::Not(testing::StartsWith("weir_storage")));
    EXPECT_THAT(name, testing::Not(testing::StartsWith("weir_rule_")));
    EXPECT_THAT(name, testing::Not(testing::StartsWith("weir_peer")));
    EXPECT_THAT(name, testing::Not(testing::StartsWith("weir_tls")));
    EXPECT_THAT(name, testing::Not(testing::StartsWith("weir_cert")));
  }
}

TEST(Metrics, AFailedStoreIsVisible) {
  NodeMetrics metrics = example();
  metrics.storage->ok = false;
  EXPECT_EQ(scrape(metrics).samples.at("weir_storage_ok"), 0);
}

TEST(Metrics, EscapesLabels) {
  NodeMetrics metrics = example();
  metrics.rules = {{"a\"b\\c\nd", "\xff\xc3\xa9", 1, 0, 0, false}};
  const Scrape page = scrape(metrics);
  EXPECT_EQ(page.samples.at("weir_rule_degraded_total{domain=\"a\\\"b\\\\c\\nd\","
                            "rule=\"\uFFFDé\"}"),
            0);
}

TEST(Metrics, LargeCountsKeepTheirDigits) {
  NodeMetrics metrics = example();
  metrics.rules[0].allowed = (1ull << 53) - 1;
  EXPECT_EQ(scrape(metrics).samples.at(
                "weir_rule_decisions_total{domain=\"api\",rule=\"per-key\",verdict=\"allowed\"}"),
            9007199254740991.0);
}

}  // namespace
}  // namespace weir::node
