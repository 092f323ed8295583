#include <fmt/format.h>
#include <unistd.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <weir/limits/rules_yaml.h>
#include <weir/node/replay.h>
#include <weir/node/replay_report.h>
#include <weir/node/status_view.h>
#include <weir/node/table.h>
#include <weir/node/version.h>
#include <weir/rpc/client.h>

namespace weir::node {
namespace {

constexpr int kOk = 0;
constexpr int kDenied = 1;
constexpr int kError = 2;

// Unlike fmt::print these do not throw where nobody can be told.
void print(const std::string& text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
}

void complain(const std::string& text) {
  std::fwrite(text.data(), 1, text.size(), stderr);
}

int fail(const std::string& message) {
  complain("weir: " + printable(message) + "\n");
  return kError;
}

/// Null after the errors were printed.
std::shared_ptr<const RuleSet> rules_from(const std::string& path) {
  LoadedRules loaded = load_rules(path);
  for (const RuleError& error : loaded.errors) {
    complain(printable(error.to_string()) + "\n");
  }
  return loaded.rules;
}

CLI::Validator duration_option() {
  return CLI::Validator(
      [](std::string& text) {
        Nanos parsed = 0;
        return parse_duration(text, parsed)
                   ? std::string()
                   : fmt::format("expected a length of time such as 250ms, got \"{}\"", text);
      },
      "DURATION");
}

Nanos duration_of(const std::string& text) {
  Nanos out = 0;
  parse_duration(text, out);  // the option was validated
  return out;
}

// weir replay

struct ReplayArguments {
  std::string log;
  std::string rules;
  std::string domain;
  std::string spread = "client";
  std::string sync_interval = "250ms";
  ReplayOptions options;
  bool json = false;
};

/// The domain to replay in, or an empty text after an error was printed.
std::string choose_domain(const RuleSet& rules, const std::string& wanted,
                          const std::string& path) {
  std::vector<std::string> domains;
  for (const Rule& rule : rules.rules()) {
    if (std::find(domains.begin(), domains.end(), rule.domain) == domains.end()) {
      domains.push_back(rule.domain);
    }
  }
  if (domains.empty()) {
    fail(path + ": holds no rules");
    return {};
  }
  const std::string list = fmt::format("{}", fmt::join(domains, ", "));
  if (wanted.empty()) {
    if (domains.size() == 1) return domains[0];
    fail(fmt::format("{}: holds several domains, choose one with --domain: {}", path, list));
    return {};
  }
  if (std::find(domains.begin(), domains.end(), wanted) != domains.end()) return wanted;
  fail(fmt::format("{}: has no rules for domain \"{}\"; it holds: {}", path, wanted, list));
  return {};
}

/// Rewrites one line on a terminal, and cleans up behind itself.
class Progress {
 public:
  Progress() : shown_(isatty(STDERR_FILENO) != 0) {}
  ~Progress() { clear(); }
  void show(const std::string& text) {
    if (!shown_) return;
    complain("\r\x1b[K" + text);
    dirty_ = true;
  }
  void clear() {
    if (std::exchange(dirty_, false)) complain("\r\x1b[K");
  }

 private:
  bool shown_;
  bool dirty_ = false;
};

int run_replay(ReplayArguments& arguments) {
  ReplayOptions& options = arguments.options;
  options.rules = rules_from(arguments.rules);
  if (!options.rules) return kError;
  options.domain = choose_domain(*options.rules, arguments.domain, arguments.rules);
  if (options.domain.empty()) return kError;
  options.spread = arguments.spread == "client" ? Spread::client : Spread::request;
  options.sync_interval = duration_of(arguments.sync_interval);

  const bool standard_input = arguments.log == "-";
  const std::string source = standard_input ? "standard input" : arguments.log;
  std::ifstream file;
  if (!standard_input) {
    file.open(arguments.log, std::ios::binary);
    if (!file) return fail(fmt::format("{}: {}", source, std::strerror(errno)));
  } else {
    std::ios::sync_with_stdio(false);
  }
  Progress progress;
  RequestLog log(options.rules->rules());
  std::string error;
  const auto read = [&](std::uint64_t lines) {
    progress.show(fmt::format("read {} lines", with_commas(lines)));
  };
  if (!log.read(standard_input ? std::cin : file, error, read)) {
    progress.clear();
    return fail(fmt::format("{}: {}", source, error));
  }
  if (log.records().empty() && log.malformed() == 0) {
    progress.clear();
    return fail(fmt::format("{}: holds no requests: it is empty", source));
  }
  const std::size_t total = log.records().size();
  options.progress = [&](std::uint64_t done) {
    progress.show(fmt::format("replayed {}%", done * 100 / total));
  };
  const ReplayReport report = replay(options, log);
  progress.clear();
  print(arguments.json ? replay_json(options, log, report)
                       : replay_text(options, log, report, source));
  return kOk;
}

void add_replay(CLI::App& app, int& result) {
  auto arguments = std::make_shared<ReplayArguments>();
  CLI::App* command = app.add_subcommand(
      "replay",
      "Try rules on an access log: what they would have allowed and denied, and how far several\n"
      "regions would have gone over");
  command
      ->add_option("ACCESS_LOG", arguments->log,
                   "Access log in Combined format; - is standard input")
      ->required()
      ->type_name("FILE");
  command->add_option("--rules", arguments->rules, "Rules to try")->required()->type_name("FILE");
  command->add_option("--domain", arguments->domain, "Domain of the rules, if there are several")
      ->type_name("NAME");
  command->add_option("--regions", arguments->options.regions, "Regions that share the traffic")
      ->check(CLI::Range(1u, kMaxRegions))
      ->capture_default_str();
  command
      ->add_option("--spread", arguments->spread,
                   "client: each client ip stays in one region; request: round robin")
      ->check(CLI::IsMember({"client", "request"}))
      ->capture_default_str();
  command
      ->add_option("--sync-interval", arguments->sync_interval,
                   "How often regions exchange their counts, in the log's time")
      ->check(duration_option())
      ->capture_default_str();
  command->add_option("--top", arguments->options.top, "Most denied keys to show")
      ->check(CLI::Range(0, 100000))
      ->capture_default_str();
  command->add_flag("--json", arguments->json, "Print JSON");
  command->footer(
      "Example:\n  weir replay --rules rules.yaml --regions 3 access.log\n"
      "  zcat access.log.*.gz | weir replay --rules rules.yaml --json -");
  command->callback([arguments, &result] { result = run_replay(*arguments); });
}

// weir validate

void add_validate(CLI::App& app, int& result) {
  auto paths = std::make_shared<std::vector<std::string>>();
  CLI::App* command =
      app.add_subcommand("validate", "Check rules files: ok, or every mistake with its line");
  command->add_option("RULES", *paths, "Rules files")->required()->type_name("FILE");
  command->footer(
      "Exits with 0 if all is well, else with 2.\n"
      "Example:\n  weir validate rules.yaml");
  command->callback([paths, &result] {
    for (const std::string& path : *paths) {
      if (!rules_from(path)) result = kError;
    }
    if (result == kOk) print("ok\n");
  });
}

// weir check

struct CheckArguments {
  std::string address = "127.0.0.1:7401";
  std::string timeout = "2s";
  std::vector<std::string> entries;
  rpc::CheckItem item;
  bool json = false;
};

rpc::ClientOptions client_options(const std::string& address, Nanos timeout) {
  rpc::ClientOptions out;
  out.address = address;
  out.connect_timeout = timeout;
  out.deadline = timeout;
  out.status_deadline = timeout;
  return out;
}

nlohmann::ordered_json wait_json(Nanos wait) {
  if (wait == kNever) return nullptr;
  return static_cast<double>(wait) / static_cast<double>(kSecond);
}

std::string check_json(const rpc::CheckReply& reply) {
  using Json = nlohmann::ordered_json;
  Json rules = Json::array();
  for (const rpc::CheckStatus& status : reply.statuses) {
    rules.push_back({{"rule", status.rule},
                     {"allowed", status.allowed},
                     {"limit", status.limit},
                     {"remaining", status.remaining},
                     {"reset_s", wait_json(status.reset)},
                     {"retry_after_s", wait_json(status.retry_after)},
                     {"delay_s", wait_json(status.delay)},
                     {"shadow", status.shadow},
                     {"degraded", status.degraded}});
  }
  const rpc::CheckStatus* decider = reply.decider();
  const Json out{{"allowed", reply.allowed},
                 {"repeated", reply.repeated},
                 {"delay_s", wait_json(reply.delay())},
                 {"decided_by", decider == nullptr ? Json() : Json(decider->rule)},
                 {"rules", std::move(rules)}};
  return out.dump(-1, ' ', false, Json::error_handler_t::replace) + '\n';
}

std::string check_text(const rpc::CheckReply& reply) {
  std::string out = reply.allowed ? "allowed" : "denied";
  if (reply.repeated) out += " before";
  if (const rpc::CheckStatus* decider = reply.decider()) {
    out += " by " + printable(decider->rule);
    if (!reply.allowed) {
      out += decider->retry_after == kNever
                 ? std::string(": this cost can never pass")
                 : ", retry after " + short_duration(decider->retry_after);
    } else if (reply.delay() > 0) {
      out += ", forward after " + short_duration(reply.delay());
    }
  } else {
    out += ": no enforced rule matches";
  }
  out += '\n';
  if (reply.statuses.empty()) return out;
  using Align = Table::Align;
  Table table({Align::left, Align::left, Align::right, Align::right, Align::right, Align::right});
  table.add({"rule", "says", "limit", "remaining", "reset", "retry after"});
  for (const rpc::CheckStatus& status : reply.statuses) {
    std::string says = status.allowed ? "allowed" : "denied";
    if (status.shadow) says += " (shadow)";
    if (status.degraded) says += " (not counted)";
    table.add({status.rule, says, with_commas(status.limit), with_commas(status.remaining),
               short_duration(status.reset),
               status.allowed ? std::string("-") : short_duration(status.retry_after)});
  }
  return out + table.text();
}

int run_check(CheckArguments& arguments) {
  for (const std::string& entry : arguments.entries) {
    const std::size_t equals = entry.find('=');
    if (equals == std::string::npos || equals == 0) {
      return fail(fmt::format("expected key=value, got \"{}\"", entry));
    }
    arguments.item.entries.emplace_back(entry.substr(0, equals), entry.substr(equals + 1));
  }
  rpc::Client client(client_options(arguments.address, duration_of(arguments.timeout)));
  const rpc::CheckReply reply = client.check(arguments.item);
  if (!reply.error.empty()) return fail(fmt::format("{}: {}", arguments.address, reply.error));
  print(arguments.json ? check_json(reply) : check_text(reply));
  return reply.allowed ? kOk : kDenied;
}

void add_check(CLI::App& app, int& result) {
  auto arguments = std::make_shared<CheckArguments>();
  CLI::App* command =
      app.add_subcommand("check", "Ask a node whether a request may pass, and count it");
  command->add_option("ENTRY", arguments->entries, "The descriptor's entries")
      ->type_name("KEY=VALUE");
  command->add_option("--address", arguments->address, "The node's client port")
      ->type_name("IP:PORT")
      ->capture_default_str();
  command->add_option("--domain", arguments->item.domain, "Domain of the rules")
      ->required()
      ->type_name("NAME");
  command->add_option("--hits", arguments->item.hits, "Units to ask for; 0 asks without counting")
      ->capture_default_str();
  command
      ->add_option("--id", arguments->item.id,
                   "Names the request: sent again with the same id it is not counted again")
      ->type_name("ID");
  command->add_option("--timeout", arguments->timeout, "Longest wait for the answer")
      ->check(duration_option())
      ->capture_default_str();
  command->add_flag("--json", arguments->json, "Print JSON");
  command->footer(
      "Exits with 0 if allowed, 1 if denied, 2 on an error.\n"
      "Example:\n  weir check --domain api api_key=k7 method=GET path=/v1/items");
  command->callback([arguments, &result] { result = run_check(*arguments); });
}

// weir status

struct StatusArguments {
  std::vector<std::string> addresses = {"127.0.0.1:7401"};
  std::string timeout = "2s";
  std::string interval = "1s";
  bool watch = false;
  bool json = false;
};

volatile std::sig_atomic_t interrupted = 0;

/// One answer per client. They are asked at the same time: a dead one costs its timeout once.
std::vector<NodeAnswer> ask(const std::vector<std::string>& addresses,
                            std::vector<std::unique_ptr<rpc::Client>>& clients) {
  std::vector<NodeAnswer> answers(clients.size());
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < clients.size(); ++i) {
    threads.emplace_back([&, i] {
      answers[i].address = addresses[i];
      answers[i].json = clients[i]->status(&answers[i].error);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return answers;
}

void sleep_unless_interrupted(Nanos length) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::nanoseconds(length);
  while (interrupted == 0 && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::min<std::chrono::steady_clock::duration>(
        std::chrono::milliseconds(50), end - std::chrono::steady_clock::now()));
  }
}

int run_status(const StatusArguments& arguments) {
  std::vector<std::unique_ptr<rpc::Client>> clients;
  for (const std::string& address : arguments.addresses) {
    clients.push_back(
        std::make_unique<rpc::Client>(client_options(address, duration_of(arguments.timeout))));
  }
  if (arguments.watch) {
    std::signal(SIGINT, [](int) { interrupted = 1; });
    std::signal(SIGTERM, [](int) { interrupted = 1; });
  }
  const bool terminal = isatty(STDOUT_FILENO) != 0;
  bool complete = true;
  do {
    const std::vector<NodeAnswer> answers = ask(arguments.addresses, clients);
    complete = std::all_of(answers.begin(), answers.end(),
                           [](const NodeAnswer& answer) { return !answer.json.empty(); });
    const std::string text = arguments.json ? status_json(answers) : status_text(answers);
    // Home and clear what follows: without the flicker of clearing first.
    if (arguments.watch && !arguments.json) print(terminal ? "\x1b[H\x1b[J" : "");
    print(text);
    if (arguments.watch && !arguments.json && !terminal) print("\n");
    std::fflush(stdout);
    if (arguments.watch) sleep_unless_interrupted(duration_of(arguments.interval));
  } while (arguments.watch && interrupted == 0 && std::ferror(stdout) == 0);
  return complete ? kOk : kError;
}

void add_status(CLI::App& app, int& result) {
  auto arguments = std::make_shared<StatusArguments>();
  CLI::App* command =
      app.add_subcommand("status", "Show what nodes have decided and how they are connected");
  command
      ->add_option("--address", arguments->addresses,
                   "A node's client port; repeat it for several nodes")
      ->type_name("IP:PORT")
      ->capture_default_str();
  command->add_flag("--watch", arguments->watch, "Again and again, until interrupted");
  command->add_option("--interval", arguments->interval, "Time between two looks with --watch")
      ->check(duration_option())
      ->capture_default_str();
  command->add_option("--timeout", arguments->timeout, "Longest wait for a node")
      ->check(duration_option())
      ->capture_default_str();
  command->add_flag("--json", arguments->json, "Print JSON, one line each time");
  command->footer(
      "Exits with 2 if a node did not answer.\n"
      "Example:\n  weir status --address 10.0.0.1:7401 --address 10.0.1.1:7401 --watch");
  command->callback([arguments, &result] { result = run_status(*arguments); });
}

int run(int argc, char** argv) {
  CLI::App app{"Quotas that hold across regions: try rules, ask nodes.", "weir"};
  app.set_version_flag("--version", std::string(kVersion));
  app.require_subcommand(1);
  app.footer("\"weir COMMAND --help\" explains a command.\nExample:\n  weir validate rules.yaml");
  int result = kOk;
  add_replay(app, result);
  add_check(app, result);
  add_status(app, result);
  add_validate(app, result);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? kOk : kError;
  }
  // Output that did not reach its file (a full disk, a closed pipe) is no success.
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
    return fail(std::string("standard output: ") + std::strerror(errno));
  }
  return result;
}

}  // namespace
}  // namespace weir::node

int main(int argc, char** argv) {
  try {
    return weir::node::run(argc, argv);
  } catch (const std::exception& error) {
    return weir::node::fail(error.what());
  }
}
