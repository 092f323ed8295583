#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <weir/limits/rules/rules_yaml.h>
#include <weir/limits/text/duration.h>
#include <weir/limits/text/strict_options.h>
#include <weir/limits/text/utf8.h>
#include <weir/node/access/token.h>
#include <weir/node/cli/certs.h>
#include <weir/node/cli/replay.h>
#include <weir/node/cli/replay_report.h>
#include <weir/node/cli/status_view.h>
#include <weir/node/cli/table.h>
#include <weir/node/config_text.h>
#include <weir/node/version.h>
#include <weir/rpc/client/client.h>
#include <weir/rpc/client/node_client.h>
#include <weir/rpc/net/certificates.h>

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
  complain("weir: " + internal::printable(message) + "\n");
  return kError;
}

/// Null after the errors were printed.
std::shared_ptr<const RuleSet> rules_from(const std::string& path, bool with_warnings = false) {
  LoadedRules loaded = load_rules(path);
  for (const RuleError& error : loaded.errors) {
    complain(internal::printable(error.to_string()) + "\n");
  }
  for (const RuleWarning& warning : loaded.warnings) {
    if (with_warnings) complain(internal::printable(warning.to_string()) + "\n");
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
  CLI::App* command = app.add_subcommand(
      "validate", "Check rules files: ok, or every mistake with its line; and warnings");
  command->add_option("RULES", *paths, "Rules files")->required()->type_name("FILE");
  command->footer(
      "Exits with 0 if all is well, else with 2.\n"
      "Example:\n  weir validate rules.yaml");
  command->callback([paths, &result] {
    for (const std::string& path : *paths) {
      if (!rules_from(path, true)) result = kError;
    }
    if (result == kOk) print("ok\n");
  });
}

// TLS, of all commands that ask nodes

struct TlsArguments {
  bool on = false;
  rpc::TlsOptions options;
  std::string name;

  /// False after an error was printed.
  bool apply(rpc::NodeClientOptions& out) const {
    if (!on && options.ca.empty() && options.cert.empty() && name.empty()) return true;
    std::string error;
    if (options.cert.empty() != options.key.empty()) {
      error = "expected --cert and --key together";
    } else {
      out.tls = rpc::TlsContext::make(options, error);
    }
    out.tls_name = name;
    if (out.tls == nullptr) fail(error);
    return out.tls != nullptr;
  }
};

void add_tls_options(CLI::App& command, TlsArguments& tls) {
  command.add_flag("--tls", tls.on, "Speak TLS; any of the next four says so as well");
  command
      .add_option("--ca", tls.options.ca, "Who vouches for nodes; the system's CAs if not given")
      ->type_name("FILE");
  command.add_option("--cert", tls.options.cert, "Certificate to show")->type_name("FILE");
  command.add_option("--key", tls.options.key, "Its private key")->type_name("FILE");
  command
      .add_option("--tls-name", tls.name,
                  "Whom a node's certificate must be of: a URI, a DNS name or an address; the "
                  "node's address if not given")
      ->type_name("NAME");
}

// Tokens, of all commands that ask nodes

struct TokenArguments {
  std::string file;

  /// False after an error was printed.
  bool apply(rpc::NodeClientOptions& out) const {
    if (file.empty()) {
      // Where a token is not seen: on the command line everybody would.
      if (const char* token = std::getenv("WEIR_TOKEN")) out.token = token;
      return true;
    }
    std::string reason;
    if (!read_small_file(file, kMaxToken + 2, out.token, reason)) {
      fail(fmt::format("{}: {}", file, reason));
      return false;
    }
    while (out.token.ends_with('\n') || out.token.ends_with('\r')) out.token.pop_back();
    if (!out.token.empty()) return true;
    fail(file + ": expected a token, got an empty file");
    return false;
  }
};

void add_token_option(CLI::App& command, TokenArguments& token) {
  command
      .add_option("--token-file", token.file,
                  "File with a bearer token to show; WEIR_TOKEN if not given")
      ->type_name("FILE");
}

// weir check, reserve and settle

rpc::NodeClientOptions client_options(const std::string& address, Nanos timeout,
                                      rpc::NodeClientOptions out) {
  out.address = address;
  out.connect_timeout = timeout;
  out.deadline = timeout;
  out.status_deadline = timeout;
  return out;
}

/// What all commands that ask nodes take.
struct NodeArguments {
  std::vector<std::string> nodes = {"127.0.0.1:7401"};
  std::string timeout = "2s";
  std::string rules;
  bool json = false;
  TlsArguments tls;
  TokenArguments token;

  std::string names() const { return fmt::format("{}", fmt::join(nodes, ",")); }
  /// False after an error was printed.
  bool options(ClientOptions& out) const {
    out.nodes = nodes;
    out.rules_interval = 0;
    out.deadline = duration_of(timeout);
    out.connection.connect_timeout = out.deadline;
    if (!tls.apply(out.connection) || !token.apply(out.connection)) return false;
    if (rules.empty()) return true;
    out.rules = rules_from(rules);
    return out.rules != nullptr;
  }
};

struct RequestArguments : NodeArguments {
  std::vector<std::string> entries;
  CheckItem item;

  /// False after an error was printed.
  bool read_entries() {
    for (const std::string& entry : entries) {
      const std::size_t equals = entry.find('=');
      if (equals == std::string::npos || equals == 0) {
        fail(fmt::format("expected key=value, got \"{}\"", entry));
        return false;
      }
      item.entries.emplace_back(entry.substr(0, equals), entry.substr(equals + 1));
    }
    return true;
  }
};

struct CheckArguments : RequestArguments {
  std::uint64_t count = 1;
  bool lease = false;
};

struct ReserveArguments : RequestArguments {
  std::string hold = "1m";
};

struct SettleArguments : NodeArguments {
  std::string ticket;
  std::uint64_t hits = 0;
};

void add_node_options(CLI::App& command, NodeArguments& arguments) {
  command
      .add_option(
          "--nodes,--address", arguments.nodes,
          "Client ports of a region's nodes: each key has its node, and others if that is down")
      ->type_name("IP:PORT")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->capture_default_str();
  command.add_option("--timeout", arguments.timeout, "Longest wait for the answer")
      ->check(duration_option())
      ->capture_default_str();
  command.add_flag("--json", arguments.json, "Print JSON");
  add_tls_options(command, arguments.tls);
  add_token_option(command, arguments.token);
}

void add_request_options(CLI::App& command, RequestArguments& arguments) {
  command.add_option("ENTRY", arguments.entries, "The descriptor's entries")
      ->type_name("KEY=VALUE");
  command.add_option("--domain", arguments.item.domain, "Domain of the rules")
      ->required()
      ->type_name("NAME");
  command
      .add_option("--id", arguments.item.id,
                  "Names the request: sent again with the same id it is not counted again")
      ->type_name("ID");
  command
      .add_option("--rules", arguments.rules,
                  "Rules whose on_failure decides if no node answers in time")
      ->type_name("FILE");
  add_node_options(command, arguments);
}

using Json = nlohmann::ordered_json;

std::string dump(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace) + '\n';
}

Json wait_json(Nanos wait) {
  if (wait == kNever) return nullptr;
  return static_cast<double>(wait) / static_cast<double>(kSecond);
}

const char* source_name(Source source) {
  switch (source) {
    case Source::node:
      return "node";
    case Source::lease:
      return "lease";
    case Source::remembered:
      return "remembered";
    case Source::fallback:
      return "fallback";
  }
  return "unknown";
}

Json check_json(const ClientReply& reply) {
  Json rules = Json::array();
  for (const Status& status : reply.statuses) {
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
  const Status* decider = reply.decider();
  Json out{{"allowed", reply.allowed},
           {"repeated", reply.repeated},
           {"delay_s", wait_json(reply.delay())},
           {"given_back", reply.given_back},
           {"decided_by", decider == nullptr ? Json() : Json(decider->rule)},
           {"source", source_name(reply.source)},
           {"degraded", reply.degraded},
           {"rules", std::move(rules)}};
  if (!reply.reason.empty()) out["reason"] = reply.reason;
  if (!reply.cause.empty()) out["cause"] = reply.cause.to_string();
  return out;
}

std::string check_text(const ClientReply& reply) {
  std::string out = reply.allowed ? "allowed" : "denied";
  if (reply.given_back > 0) out += fmt::format(", {} given back", with_commas(reply.given_back));
  if (reply.repeated) out += " before";
  if (const Status* decider = reply.decider()) {
    out += " by " + internal::printable(decider->rule);
    if (!reply.allowed) {
      out += decider->retry_after == kNever
                 ? std::string(": this cost can never pass")
                 : ", retry after " + short_duration(decider->retry_after);
    } else if (reply.delay() > 0) {
      out += ", forward after " + short_duration(reply.delay());
    }
  } else if (!reply.reason.empty()) {
    out += ": " + reply.reason;
  } else {
    out += ": no enforced rule matches";
  }
  out += '\n';
  if (!reply.cause.empty())
    out += "degraded: " + internal::printable(reply.cause.to_string()) + '\n';
  if (reply.statuses.empty()) return out;
  using Align = Table::Align;
  Table table({Align::left, Align::left, Align::right, Align::right, Align::right, Align::right});
  table.add({"rule", "says", "limit", "remaining", "reset", "retry after"});
  for (const Status& status : reply.statuses) {
    std::string says = status.allowed ? "allowed" : "denied";
    if (status.shadow) says += " (shadow)";
    if (status.degraded) says += " (not counted)";
    table.add({status.rule, says, with_commas(status.limit), with_commas(status.remaining),
               short_duration(status.reset),
               status.allowed ? std::string("-") : short_duration(status.retry_after)});
  }
  return out + table.text();
}

/// The same request several times, one after the other.
int run_many(const CheckArguments& arguments, Client& client) {
  std::uint64_t allowed = 0;
  for (std::uint64_t i = 0; i < arguments.count; ++i) {
    const ClientReply reply = client.check(arguments.item);
    if (!reply.error.empty()) {
      return fail(
          fmt::format("{}: {} (request {})", arguments.names(), reply.error.to_string(), i + 1));
    }
    allowed += reply.allowed;
  }
  const ClientCounters counters = client.counters();
  if (arguments.json) {
    print(dump({{"requests", arguments.count},
                {"allowed", allowed},
                {"denied", arguments.count - allowed},
                {"calls", counters.calls},
                {"by_lease", counters.by_lease},
                {"degraded", counters.degraded}}));
  } else {
    print(fmt::format(
        "{} of {} allowed, with {} calls to nodes{}\n", with_commas(allowed),
        with_commas(arguments.count), with_commas(counters.calls),
        counters.degraded > 0 ? fmt::format("; {} degraded", with_commas(counters.degraded)) : ""));
  }
  return allowed == arguments.count ? kOk : kDenied;
}

int run_check(CheckArguments& arguments) {
  if (!arguments.read_entries()) return kError;
  ClientOptions options;
  if (!arguments.options(options)) return kError;
  options.leases.enabled = arguments.lease;
  Client client(std::move(options));
  if (arguments.count > 1) return run_many(arguments, client);
  const ClientReply reply = client.check(arguments.item);
  if (!reply.error.empty())
    return fail(fmt::format("{}: {}", arguments.names(), reply.error.to_string()));
  print(arguments.json ? dump(check_json(reply)) : check_text(reply));
  return reply.allowed ? kOk : kDenied;
}

void add_check(CLI::App& app, int& result) {
  auto arguments = std::make_shared<CheckArguments>();
  CLI::App* command =
      app.add_subcommand("check", "Ask a node whether a request may pass, and count it");
  add_request_options(*command, *arguments);
  command->add_option("--hits", arguments->item.hits, "Units to ask for; 0 asks without counting")
      ->capture_default_str();
  command
      ->add_option("--kind", arguments->item.kind,
                   "report: count what was used, whatever the limits say; refund: give it back")
      ->transform(
          CLI::Transformer(std::map<std::string, RequestKind>{{"check", RequestKind::check},
                                                              {"report", RequestKind::report},
                                                              {"refund", RequestKind::refund}})
              .description("check, report or refund"));
  command->add_option("--count", arguments->count, "Ask so many times, one after the other")
      ->check(CLI::Range(std::uint64_t{1}, std::uint64_t{1'000'000'000}))
      ->capture_default_str();
  command->add_flag("--lease", arguments->lease,
                    "With --count: take leases, so that most requests need no call");
  command->footer(
      "Exits with 0 if allowed, 1 if denied, 2 on an error.\n"
      "Example:\n  weir check --domain api api_key=k7 method=GET path=/v1/items\n"
      "  weir check --nodes 10.0.0.1:7401,10.0.0.2:7401 --lease --count 10000 --domain api "
      "api_key=k7");
  command->callback([arguments, &result] { result = run_check(*arguments); });
}

int run_reserve(ReserveArguments& arguments) {
  if (!arguments.read_entries()) return kError;
  ClientOptions options;
  if (!arguments.options(options)) return kError;
  Client client(std::move(options));
  const Reservation held = client.reserve(arguments.item, duration_of(arguments.hold));
  const ClientReply& reply = held.decision;
  if (!reply.error.empty())
    return fail(fmt::format("{}: {}", arguments.names(), reply.error.to_string()));
  if (arguments.json) {
    Json out = check_json(reply);
    out["ticket"] = held.ticket.empty() ? Json() : Json(held.ticket);
    print(dump(out));
  } else {
    print(check_text(reply));
    if (reply.allowed) {
      print(held.ticket.empty() ? "nothing is held\n"
                                : "ticket " + internal::printable(held.ticket) + "\n");
    }
  }
  return reply.allowed ? kOk : kDenied;
}

void add_reserve(CLI::App& app, int& result) {
  auto arguments = std::make_shared<ReserveArguments>();
  CLI::App* command =
      app.add_subcommand("reserve", "Hold an estimate, to be settled with what was really used");
  add_request_options(*command, *arguments);
  command->add_option("--hits", arguments->item.hits, "Units to hold")->required();
  command->add_option("--for", arguments->hold, "Settled in full after this time")
      ->check(duration_option())
      ->capture_default_str();
  command->footer(
      "Exits with 0 if allowed, 1 if denied, 2 on an error.\n"
      "Example:\n  weir reserve --domain llm --hits 500 user=u1");
  command->callback([arguments, &result] { result = run_reserve(*arguments); });
}

int run_settle(SettleArguments& arguments) {
  const std::size_t at = arguments.ticket.rfind('@');
  if (at == std::string::npos) {
    if (arguments.nodes.size() != 1) return fail("expected one node, or a ticket that names it");
    arguments.ticket += "@" + arguments.nodes[0];
  } else {
    arguments.nodes = {arguments.ticket.substr(at + 1)};
  }
  ClientOptions options;
  if (!arguments.options(options)) return kError;
  Client client(std::move(options));
  const SettleReply reply = client.settle(arguments.ticket, arguments.hits);
  if (!reply.error.empty())
    return fail(fmt::format("{}: {}", arguments.names(), reply.error.to_string()));
  if (arguments.json) {
    print(dump({{"settled", reply.settled},
                {"reserved", reply.reserved},
                {"lapsed", reply.lapsed},
                {"degraded", reply.degraded}}));
  } else if (!reply.settled) {
    print("not open: settled before, timed out, or of another boot of the node\n");
  } else {
    print(fmt::format("settled: {} of {} held{}{}\n", with_commas(arguments.hits),
                      with_commas(reply.reserved),
                      reply.lapsed ? "; some window was over, where nothing was counted" : "",
                      reply.degraded ? "; not durable, as storage has failed" : ""));
  }
  return reply.settled ? kOk : kDenied;
}

void add_settle(CLI::App& app, int& result) {
  auto arguments = std::make_shared<SettleArguments>();
  CLI::App* command = app.add_subcommand("settle", "Settle a reservation with what was used");
  command->add_option("TICKET", arguments->ticket, "As \"weir reserve\" printed it")->required();
  command->add_option("--hits", arguments->hits, "Units used; 0 gives all back")->required();
  add_node_options(*command, *arguments);
  command->footer(
      "Exits with 0 if it is settled, 1 if there is no such ticket, 2 on an error.\n"
      "Example:\n  weir settle --hits 321 03cb6fcdd4c4077819dffcf7c4f17e83-1@127.0.0.1:7401");
  command->callback([arguments, &result] { result = run_settle(*arguments); });
}

// weir status

struct StatusArguments {
  std::vector<std::string> addresses = {"127.0.0.1:7401"};
  std::string timeout = "2s";
  std::string interval = "1s";
  bool watch = false;
  bool json = false;
  TlsArguments tls;
  TokenArguments token;
};

volatile std::sig_atomic_t interrupted = 0;

/// One answer per client. They are asked at the same time: a dead one costs its timeout once.
std::vector<NodeAnswer> ask(const std::vector<std::string>& addresses,
                            std::vector<std::unique_ptr<rpc::NodeClient>>& clients) {
  std::vector<NodeAnswer> answers(clients.size());
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < clients.size(); ++i) {
    threads.emplace_back([&, i] {
      answers[i].address = addresses[i];
      Error error;
      answers[i].json = clients[i]->status(&error);
      answers[i].error = error.to_string();
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
  std::vector<std::unique_ptr<rpc::NodeClient>> clients;
  rpc::NodeClientOptions options;
  if (!arguments.tls.apply(options) || !arguments.token.apply(options)) return kError;
  for (const std::string& address : arguments.addresses) {
    clients.push_back(std::make_unique<rpc::NodeClient>(
        client_options(address, duration_of(arguments.timeout), options)));
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
  add_tls_options(*command, arguments->tls);
  add_token_option(*command, arguments->token);
  command->footer(
      "Exits with 2 if a node did not answer.\n"
      "Example:\n  weir status --address 10.0.0.1:7401 --address 10.0.1.1:7401 --watch");
  command->callback([arguments, &result] { result = run_status(*arguments); });
}

// weir certs

struct CertsArguments {
  std::string dir = "certs";
  std::string name = "weir trial CA";
  std::string cluster, region, node;
  std::vector<std::string> names;
  unsigned days = 0;
  bool replace = false;

  CertFolder folder() const {
    return {dir, std::chrono::system_clock::now().time_since_epoch() / std::chrono::nanoseconds(1)};
  }
};

/// One kind of `weir certs`, which does `work` and says which file it made.
CLI::App* add_certs_command(CLI::App& certs, const std::shared_ptr<CertsArguments>& arguments,
                            const char* name, const char* help, unsigned days, int& result,
                            std::string (*work)(const CertsArguments&)) {
  CLI::App* command = certs.add_subcommand(name, help);
  command->add_option("--dir", arguments->dir, "Folder of the CA and of what it issues")
      ->capture_default_str();
  arguments->days = days;
  command->add_option("--days", arguments->days, "How long it is good")
      ->check(CLI::Range(1u, 36500u))
      ->capture_default_str();
  command->callback([arguments, &result, work] {
    print(work(*arguments) + "\n");
    result = kOk;
  });
  return command;
}

void add_certs(CLI::App& app, int& result) {
  CLI::App* certs =
      app.add_subcommand("certs", "Make a CA and certificates, for trying out and for tests");
  certs->require_subcommand(1);
  certs->footer(
      "Example:\n  weir certs ca\n  weir certs node --cluster demo --region eu --node eu-1\n"
      "  weir certs client --name web\n  weir certs revoke --name web");
  const auto fresh = [] { return std::make_shared<CertsArguments>(); };

  auto ca = fresh();
  CLI::App* command = add_certs_command(
      *certs, ca, "ca", "A CA: ca.pem, and ca.key, which is to be kept from everybody", 3650,
      result, [](const CertsArguments& a) {
        a.folder().make_ca(a.name, a.days);
        return a.folder().file("ca.pem");
      });
  command->add_option("--name", ca->name, "What it calls itself")->capture_default_str();

  auto node = fresh();
  command = add_certs_command(
      *certs, node, "node",
      "A node's certificate, NODE.pem and NODE.key, for weir://CLUSTER/REGION/NODE", 365, result,
      [](const CertsArguments& a) {
        std::vector<std::string> names = {rpc::member_uri(a.cluster, a.region, a.node)};
        names.insert(names.end(), a.names.begin(), a.names.end());
        a.folder().issue(a.node, names, a.days, a.replace);
        return a.folder().file(a.node + ".pem");
      });
  command->add_option("--cluster", node->cluster, "cluster.name of node.yaml")->required();
  command->add_option("--region", node->region, "Its region")->required();
  command->add_option("--node", node->node, "Its name")->required();
  node->names = {"127.0.0.1", "localhost"};
  command
      ->add_option("--san", node->names,
                   "What clients call it, for clients and http: addresses, DNS names, URIs")
      ->type_name("NAME")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->capture_default_str();
  command->add_flag("--replace", node->replace, "In place of those that are there");

  auto client = fresh();
  command =
      add_certs_command(*certs, client, "client",
                        "A client's certificate, NAME.pem and NAME.key, for "
                        "weir://clients/NAME",
                        365, result, [](const CertsArguments& a) {
                          a.folder().issue(a.name, {"weir://clients/" + a.name}, a.days, a.replace);
                          return a.folder().file(a.name + ".pem");
                        });
  client->name.clear();
  command->add_option("--name", client->name, "What it is called")->required();
  command->add_flag("--replace", client->replace, "In place of those that are there");

  auto revoke = fresh();
  command = add_certs_command(*certs, revoke, "revoke",
                              "Adds NAME.pem to crl.pem; without a name it only makes crl.pem", 30,
                              result, [](const CertsArguments& a) {
                                a.folder().revoke(a.name, a.days);
                                return a.folder().file("crl.pem");
                              });
  revoke->name.clear();
  command->add_option("--name", revoke->name, "The node or the client");
}

// weir token

void add_token(CLI::App& app, int& result) {
  auto name = std::make_shared<std::string>();
  CLI::App* command = app.add_subcommand(
      "token",
      "Make a token: it comes to standard output, its line for the access file to\n"
      "standard error");
  command->add_option("--name", *name, "Whom it is for")->required()->type_name("NAME");
  command->footer(
      "Nothing but its hash is kept: who loses it makes another one.\n"
      "Example:\n  weir token --name gateway > gateway.token");
  command->callback([name, &result] {
    const std::string token = make_token();
    const nlohmann::json quoted = *name;  // YAML reads JSON's strings
    complain(fmt::format("  - {{name: {}, hash: \"{}\", check: all}}\n", quoted.dump(),
                         to_string(hash_token(token))));
    print(token + "\n");
    result = kOk;
  });
}

int run(int argc, char** argv) {
  CLI::App app{"Quotas that hold across regions: try rules, ask nodes.", "weir"};
  app.set_version_flag("--version", std::string(kVersion));
  app.require_subcommand(1);
  app.footer("\"weir COMMAND --help\" explains a command.\nExample:\n  weir validate rules.yaml");
  int result = kOk;
  add_replay(app, result);
  add_check(app, result);
  add_reserve(app, result);
  add_settle(app, result);
  add_status(app, result);
  add_validate(app, result);
  add_certs(app, result);
  add_token(app, result);
  strict_numbers(app);
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
