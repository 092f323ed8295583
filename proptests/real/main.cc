// weir-five: five real nodes, real partitions, kill -9, pauses and wrong clocks, and a checker that
// has noted every call. README.md tells how to read it.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <signal.h>
#include <unistd.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <thread>

#include <weir/limits/text/strict_options.h>
#include <weir/proptests/real/clients.h>
#include <weir/proptests/real/history.h>
#include <weir/proptests/real/network.h>
#include <weir/proptests/real/nodes.h>
#include <weir/proptests/real/schedule.h>

namespace weir::real {
namespace {

using nlohmann::json;

constexpr std::uint32_t kNodes = 5;
constexpr Nanos kStartPatience = 30 * kSecond;
constexpr Nanos kConvergePatience = 30 * kSecond;
constexpr std::size_t kMostShown = 20;

enum Exit { kHeld = 0, kViolated = 1, kError = 2, kSkipped = 77, kInterrupted = 130 };

volatile std::sig_atomic_t interrupted = 0;

struct Interrupted {};

struct Arguments {
  std::string node;
  std::string directory;
  std::string history;
  std::string check;
  std::string sabotage = "none";
  std::uint64_t seed = 0;
  unsigned seconds = 120;
  std::uint32_t clients = 3;
  bool json = false;
  bool keep = false;
};

struct Report {
  std::map<std::string, std::uint64_t> faults;      // by what was done
  std::map<std::string, std::uint64_t> partitions;  // by kind
  std::vector<std::int64_t> offsets;                // ms
  std::optional<double> convergence;                // seconds
  std::uint64_t sessions_lost = 0;
  std::vector<Violation> violations;
};

void say(const std::string& text) {
  fmt::print(stderr, "{}\n", text);
}

double seconds(Nanos length) {
  return static_cast<double>(length) / static_cast<double>(kSecond);
}

class Run {
 public:
  Run(const Arguments& arguments, Report& report)
      : arguments_(arguments),
        report_(report),
        schedule_(make_schedule(arguments.seed, arguments.seconds * kSecond, kNodes)),
        network_(fmt::format("weir-{}", ::getpid()), schedule_.round_trips),
        nodes_(network_,
               {arguments.node, arguments.directory, rules_yaml(arguments.sabotage == "async")}) {}

  History run() {
    history_.nodes = kNodes;
    history_.limit = kQuotaLimit;
    history_.window = kQuotaWindow;
    history_.wall_minus_monotonic =
        std::chrono::system_clock::now().time_since_epoch() / std::chrono::nanoseconds(1) -
        monotonic();
    for (std::uint32_t i = 0; i < kNodes; ++i) start(i, schedule_.first_offsets[i]);
    bool met = wait_for([this] { return agree() || !report_.violations.empty(); }, kStartPatience);
    if (!met || !report_.violations.empty()) {
      throw std::runtime_error("the nodes did not find each other; see " + nodes_.log_path(0));
    }
    Clients clients(network_, arguments_.clients, arguments_.seed);
    began_ = monotonic();
    note_connectivity();
    for (const Step& step : schedule_.steps) {
      sleep_until(began_ + step.at);
      take(step);
    }
    sleep_until(began_ + arguments_.seconds * kSecond);
    network_.heal_all();
    note_connectivity();
    clients.stop();
    history_.operations = clients.take();
    say(fmt::format("{:8.3f} all is healed, no more traffic", since_start()));
    settle();
    history_.runs = nodes_.runs();
    read_logs();
    return std::move(history_);
  }

 private:
  double since_start() const { return seconds(monotonic() - began_); }

  void violate(const std::string& what) {
    say("VIOLATION: " + what);
    report_.violations.push_back({what, {}});
  }

  void poll() {
    if (interrupted != 0) throw Interrupted{};
    for (const std::string& what : nodes_.poll()) violate(what);
  }

  void sleep_until(Nanos when) {
    for (;;) {
      poll();
      Nanos left = when - monotonic();
      if (left <= 0) return;
      std::this_thread::sleep_for(std::chrono::nanoseconds(std::min(left, 20 * kMillisecond)));
    }
  }

  template <typename Condition>
  bool wait_for(Condition condition, Nanos patience) {
    Nanos until = monotonic() + patience;
    do {
      if (condition()) return true;
      sleep_until(monotonic() + 100 * kMillisecond);
    } while (monotonic() < until);
    return false;
  }

  void start(std::uint32_t node, Nanos offset) {
    nodes_.start(node, offset);
    report_.offsets.push_back(offset / kMillisecond);
  }

  void note_connectivity() {
    history_.connectivity.push_back({monotonic(), components(kNodes, network_.dropped())});
  }

  void take(const Step& step) {
    say(fmt::format("{:8.3f} {}", since_start(), to_string(step)));
    bool done = true;
    switch (step.act) {
      case Act::kill:
        done = nodes_.kill(step.node);
        if (arguments_.sabotage == "disk") nodes_.lose_disk(step.node);
        break;
      case Act::stop:
        done = nodes_.stop(step.node);
        break;
      case Act::start:
        start(step.node, step.clock_offset);
        break;
      case Act::pause:
        done = nodes_.pause(step.node);
        break;
      case Act::resume:
        done = nodes_.resume(step.node);
        break;
      case Act::cut:
        network_.cut(step.drops);
        note_connectivity();
        ++report_.partitions[std::string(to_string(step.partition))];
        break;
      case Act::heal:
        network_.heal(step.drops);
        note_connectivity();
        break;
    }
    if (done) ++report_.faults[std::string(to_string(step.act))];
  }

  /// All nodes answer, see each other, owe each other nothing and hold the same.
  bool agree() {
    std::set<std::string> digests;
    why_not_.clear();
    for (std::uint32_t i = 0; i < kNodes; ++i) {
      json status = json::parse(nodes_.status(i), nullptr, false);
      if (!status.is_object()) {
        why_not_ = fmt::format("node {} does not answer", i + 1);
        return false;
      }
      digests.insert(status.value("digest", ""));
      for (const json& peer : status["peers"]) {
        if (peer.value("up", false) && peer.value("unacked", 1) == 0) continue;
        why_not_ = fmt::format("node {} has not told {} everything: {}", i + 1,
                               peer.value("node", "?"), peer.dump());
        return false;
      }
    }
    if (digests.size() == 1) return true;
    why_not_ = fmt::format("digests differ: {}", fmt::join(digests, " "));
    return false;
  }

  /// Asks every node for every counter that was added to. False if one did not answer.
  bool read_all(std::vector<Final>& finals) {
    std::set<std::pair<Counter, std::string>> keys;
    for (const Operation& operation : history_.operations) {
      if (operation.kind == Kind::add && operation.counter != Counter::quota) {
        keys.emplace(operation.counter, operation.key);
      }
    }
    finals.clear();
    for (std::uint32_t i = 0; i < kNodes; ++i) {
      if (!final_clients_[i]) {
        rpc::NodeClientOptions options;
        options.address = Nodes::kClients;
        options.deadline = 2 * kSecond;
        options.breaker_misses = 0;
        network_.within(i, [&] { final_clients_[i] = std::make_unique<rpc::NodeClient>(options); });
      }
      for (const auto& [counter, key] : keys) {
        Operation operation = call(*final_clients_[i], i, counter, key, 0);
        operation.client = arguments_.clients * kNodes;
        final_reads_.push_back(operation);
        if (operation.result != Result::ok) return false;
        finals.push_back({i, counter, key, operation.used});
      }
    }
    return true;
  }

  static bool same(const std::vector<Final>& finals) {
    std::map<std::pair<Counter, std::string>, std::uint64_t> first;
    return std::all_of(finals.begin(), finals.end(), [&first](const Final& final) {
      return first.emplace(std::pair(final.counter, final.key), final.used).first->second ==
             final.used;
    });
  }

  void settle() {
    Nanos from = monotonic();
    bool agreed = wait_for(
        [this] {
          return nodes_.all_running() && agree() && read_all(history_.finals) &&
                 same(history_.finals);
        },
        kConvergePatience);
    if (agreed) {
      report_.convergence = seconds(monotonic() - from);
    } else {
      violate(fmt::format("no agreement within {} s: {}", kConvergePatience / kSecond,
                          why_not_.empty() ? "digests are equal, values are not" : why_not_));
      read_all(history_.finals);
    }
    std::move(final_reads_.begin(), final_reads_.end(), std::back_inserter(history_.operations));
  }

  /// No fault of this run is a reason for an error in a node's log.
  void read_logs() {
    for (std::uint32_t i = 0; i < kNodes; ++i) {
      std::ifstream in(nodes_.log_path(i));
      for (std::string line; std::getline(in, line);) {
        json event = json::parse(line, nullptr, false);
        if (!event.is_object()) {
          violate(fmt::format("node {} said: {}", i + 1, line));
        } else if (event.value("level", "") == "error") {
          violate(fmt::format("node {} logged: {}", i + 1, line));
        } else if (event.value("event", "") == "peer_down") {
          ++report_.sessions_lost;
        }
      }
    }
  }

  const Arguments& arguments_;
  Report& report_;
  Schedule schedule_;
  Network network_;
  Nodes nodes_;
  std::unique_ptr<rpc::NodeClient> final_clients_[kNodes];
  std::vector<Operation> final_reads_;
  std::string why_not_;
  History history_;
  Nanos began_ = 0;
};

json totals_json(const Totals& totals) {
  return {{"acknowledged", totals.acknowledged},
          {"attempted", totals.attempted},
          {"counted", totals.counted},
          {"acknowledged_not_counted", totals.lost}};
}

std::string totals_text(const Totals& totals) {
  return fmt::format("{} acknowledged, {} counted, {} attempted", totals.acknowledged,
                     totals.counted, totals.attempted);
}

/// What the checker found in a run.
struct Findings {
  Verdict verdict;
  QuotaReport quota;
  std::map<std::string, std::uint64_t> results;  // by what was answered
  std::map<std::string, std::uint64_t> errors;
  std::size_t shown = 0;  // of the report's violations
};

std::uint64_t faults_of(const Report& report, Act act) {
  auto at = report.faults.find(std::string(to_string(act)));
  return at == report.faults.end() ? 0 : at->second;
}

/// The faults of a run: there are none where a history was only read.
void say_what_was_done(const Report& report) {
  say(fmt::format("faults          {} kill -9, {} clean stops, {} pauses",
                  faults_of(report, Act::kill), faults_of(report, Act::stop),
                  faults_of(report, Act::pause)));
  std::string kinds;
  for (Partition kind : kPartitions) {
    std::string name(to_string(kind));
    auto at = report.partitions.find(name);
    kinds += fmt::format("{} {}, ", at == report.partitions.end() ? 0 : at->second, name);
  }
  say(fmt::format("partitions      {}{} sessions lost", kinds, report.sessions_lost));
  auto [low, high] = std::minmax_element(report.offsets.begin(), report.offsets.end());
  say(fmt::format("clocks          {} starts, {:+d} to {:+d} ms", report.offsets.size(), *low,
                  *high));
}

void say_findings(const Arguments& arguments, const History& history, const Report& report,
                  const Findings& found) {
  const Verdict& verdict = found.verdict;
  const QuotaReport& quota = found.quota;
  const bool ran = !report.offsets.empty();
  const auto count = [&](const char* result) {
    auto at = found.results.find(result);
    return at == found.results.end() ? 0 : at->second;
  };
  if (ran) say(fmt::format("seed            {}, {} s", arguments.seed, arguments.seconds));
  say(fmt::format("operations      {}: {} ok, {} denied, {} unanswered", history.operations.size(),
                  count("ok"), count("denied"), count("unknown")));
  if (ran) say_what_was_done(report);
  say(fmt::format("checked         {} reads, {} adds; {} of them between two runs",
                  verdict.reads_checked, verdict.adds_checked, verdict.between_runs));
  say("commit          " + totals_text(verdict.commit));
  say(fmt::format("async           {}, {} lost to kill -9", totals_text(verdict.async),
                  verdict.async.lost));
  say(
      fmt::format("quota           worst {} of {} in a window while {} components; connected {}; "
                  "{} of {} windows over limit x components",
                  quota.worst_admitted, history.limit, quota.worst_components,
                  quota.worst_connected, quota.over_components, quota.windows));
  if (report.convergence) say(fmt::format("converged       in {:.2f} s", *report.convergence));
  say(fmt::format("violations      {}", report.violations.size()));
  for (std::size_t i = 0; i < found.shown; ++i) {
    say("  " + report.violations[i].what);
    if (!report.violations[i].operation.empty()) say("    " + report.violations[i].operation);
  }
  if (found.shown < report.violations.size()) say("  …");
}

json findings_json(const Arguments& arguments, const History& history, const Report& report,
                   const Findings& found) {
  const Verdict& verdict = found.verdict;
  const QuotaReport& quota = found.quota;
  json shown_violations = json::array();
  for (std::size_t i = 0; i < found.shown; ++i) {
    shown_violations.push_back(report.violations[i].what);
  }
  return {{"seed", arguments.seed},
          {"seconds", arguments.seconds},
          {"operations", found.results},
          {"unanswered_by_error", found.errors},
          {"kills", faults_of(report, Act::kill)},
          {"pauses", faults_of(report, Act::pause)},
          {"clean_stops", faults_of(report, Act::stop)},
          {"partitions", report.partitions},
          {"sessions_lost", report.sessions_lost},
          {"clock_offsets_ms", report.offsets},
          {"reads_checked", verdict.reads_checked},
          {"adds_checked", verdict.adds_checked},
          {"between_runs", verdict.between_runs},
          {"commit", totals_json(verdict.commit)},
          {"async", totals_json(verdict.async)},
          {"quota",
           {{"limit", history.limit},
            {"windows", quota.windows},
            {"over_limit", quota.over_limit},
            {"over_limit_times_components", quota.over_components},
            {"worst_admitted", quota.worst_admitted},
            {"worst_admitted_components", quota.worst_components},
            {"worst_admitted_connected", quota.worst_connected},
            {"worst_ratio_to_limit_times_components", quota.worst_ratio}}},
          {"convergence_s", report.convergence ? json(*report.convergence) : json()},
          {"violations", report.violations.size()},
          {"first_violations", shown_violations}};
}

/// Judges, prints, and returns the exit code.
int conclude(const Arguments& arguments, const History& history, Report& report) {
  CheckOptions options;
  options.adds_may_lag = true;  // nodes run two workers
  Findings found{check(history, options), judge_quota(history), {}, {}, 0};
  std::move(found.verdict.violations.begin(), found.verdict.violations.end(),
            std::back_inserter(report.violations));
  for (const Operation& operation : history.operations) {
    ++found.results[std::string(to_string(operation.result))];
    if (!operation.error.empty()) ++found.errors[operation.error];
  }
  found.shown = std::min(report.violations.size(), kMostShown);
  say_findings(arguments, history, report, found);
  if (arguments.json) {
    fmt::print("{}\n", findings_json(arguments, history, report, found).dump());
  }
  return report.violations.empty() ? kHeld : kViolated;
}

int run_nodes(const Arguments& arguments) {
  struct sigaction action {};
  action.sa_handler = [](int) { interrupted = 1; };
  for (int signal : {SIGINT, SIGTERM, SIGHUP}) ::sigaction(signal, &action, nullptr);
  ::signal(SIGPIPE, SIG_IGN);
  if (::access(arguments.node.c_str(), X_OK) != 0) {
    say("weir-five: --node: no program " + arguments.node);
    return kError;
  }
  std::error_code ignored;
  if (std::filesystem::exists(arguments.directory) &&
      !std::filesystem::is_empty(arguments.directory, ignored)) {
    say("weir-five: --dir: " + arguments.directory + " is not empty");
    return kError;
  }
  if (std::size_t gone = remove_leftovers("weir"); gone > 0) {
    say(fmt::format("removed {} namespaces of runs that were killed", gone));
  }
  say(fmt::format("weir-five --seed {} --seconds {}", arguments.seed, arguments.seconds));
  Report report;
  History history;
  try {
    history = Run(arguments, report).run();
  } catch (const NoNetwork& error) {
    say(fmt::format("weir-five: SKIPPED: no network namespaces here: {}", error.what()));
    say("It needs root (CAP_SYS_ADMIN, CAP_NET_ADMIN), the command ip (package iproute2), and a "
        "kernel with network namespaces and veth.");
    return kSkipped;
  } catch (const Interrupted&) {
    say("weir-five: interrupted");
    return kInterrupted;
  }
  if (!arguments.history.empty()) {
    std::ofstream out(arguments.history);
    write(history, out);
    if (!out.flush()) {
      say("weir-five: cannot write " + arguments.history);
      return kError;
    }
  }
  return conclude(arguments, history, report);
}

int check_only(const Arguments& arguments) {
  std::ifstream in(arguments.check);
  if (!in) {
    say("weir-five: cannot read " + arguments.check);
    return kError;
  }
  Report report;
  return conclude(arguments, read_history(in), report);
}

int run(int argc, char** argv) {
  CLI::App app{
      "Runs five weir-node processes in network namespaces, breaks them as a seed decides, and\n"
      "checks what every client was told. Exits with 0 if all held, 1 after a violation, 77 where\n"
      "namespaces cannot be made.",
      "weir-five"};
  Arguments arguments;
  app.add_option("--node", arguments.node, "The weir-node program")->type_name("FILE");
  auto* seed = app.add_option("--seed", arguments.seed, "Decides the faults; random if left out");
  app.add_option("--seconds", arguments.seconds, "How long there are traffic and faults")
      ->check(CLI::Range(5u, 3600u))
      ->capture_default_str();
  app.add_option("--clients", arguments.clients, "Client threads for each node")
      ->check(CLI::Range(1u, 64u))
      ->capture_default_str();
  app.add_option("--dir", arguments.directory, "Where stores and logs go, new or empty; it stays")
      ->type_name("DIR");
  app.add_option("--history", arguments.history, "Write every call here, as JSON lines")
      ->type_name("FILE");
  app.add_option("--check", arguments.check, "Judge such a file; no run")->type_name("FILE");
  app.add_option("--sabotage", arguments.sabotage,
                 "Break a promise, to see the checker notice: async (commit counters are not "
                 "durable), disk (every kill loses the store)")
      ->check(CLI::IsMember({"none", "async", "disk"}));
  app.add_flag("--keep", arguments.keep, "Keep the directory");
  app.add_flag("--json", arguments.json, "Print the result as JSON on standard output");
  strict_numbers(app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? kHeld : kError;
  }
  if (!arguments.check.empty()) return check_only(arguments);
  if (seed->count() == 0) arguments.seed = std::random_device{}();
  bool own_directory = arguments.directory.empty();
  if (own_directory) {
    arguments.directory =
        (std::filesystem::temp_directory_path() / fmt::format("weir-five-{}", ::getpid())).string();
  }
  int code = kError;
  try {
    code = run_nodes(arguments);
  } catch (const std::exception& error) {
    say(fmt::format("weir-five: {}", error.what()));
  }
  bool wanted = arguments.keep || code == kViolated || code == kError;
  std::error_code ignored;
  if (own_directory && !wanted) {
    std::filesystem::remove_all(arguments.directory, ignored);
  } else if (std::filesystem::exists(arguments.directory, ignored)) {
    say("files           " + arguments.directory);
  }
  return code;
}

}  // namespace
}  // namespace weir::real

int main(int argc, char** argv) {
  return weir::real::run(argc, argv);
}
