// What a request costs on the wire: processor time, throughput and latency of a real node's fronts,
// beside nginx and stock Cap'n Proto, in turns. One JSON object on stdout. See bench/README.md.
#include <fmt/format.h>
#include <kj/exception.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <filesystem>
#include <functional>
#include <map>
#include <thread>
#include <vector>

#include <weir/bench/spread.h>
#include <weir/bench/wire/servers.h>
#include <weir/bench/wire/tls_load.h>
#include <weir/limits/text/strict_options.h>

namespace weir::bench {
namespace {

constexpr unsigned kConnections = 64;
constexpr unsigned kPipelines = 4;
constexpr unsigned kDepth = 16;
constexpr unsigned kCallers = 64;
constexpr RpcShape kSingle{1, 64, 1};
constexpr RpcShape kSpread{4, 16, 1};
constexpr RpcShape kBatches{1, 8, 64};
constexpr double kPacedRate = 10'000;  // a second

struct Options {
  std::string node;
  std::string echo;
  int rounds = 7;
  double seconds = 1.5;  // a turn
  std::string only;
};

/// One thing that is measured, in turns with the others.
struct Case {
  std::string name;   // its figures begin with it
  std::string label;  // for people
  const Process* server;
  bool pinned;
  std::function<Load(double seconds)> run;
};

struct Round {
  double cpu_us = 0;  // of the server, a request
  double rate = 0;    // requests a second
  double p50_us = 0;
  double p99_us = 0;
  double load_share = 0;  // of its processor that the load took
};

/// A folder that goes with its owner.
class Scratch {
 public:
  Scratch()
      : path_(std::filesystem::temp_directory_path() / fmt::format("weir-wire-{}", ::getpid())) {
    std::filesystem::remove_all(path_);
    std::filesystem::create_directories(path_);
  }
  ~Scratch() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  std::string operator/(const std::string& name) const { return path_ / name; }

 private:
  std::filesystem::path path_;
};

/// Everything that is started, and the cases over it.
class Wire {
 public:
  explicit Wire(const Options& options);

  /// A round of every case.
  void turn();
  Json result() const;

 private:
  std::string fresh(const std::string& name) const { return scratch_ / name; }
  Place pinned(const std::string& name) const { return {fresh(name), server_cpu_}; }
  void add(std::string name, std::string label, const Process& server,
           std::function<Load(double)> run, bool pinned = true);
  void add_http(const std::string& name, const std::string& label, const Process& server,
                const HttpTarget& target, bool pinned = true);
  void add_pipelined(const std::string& name, const std::string& label, const Process& server,
                     const HttpTarget& target);
  void add_paced(const std::string& name, const std::string& label, const Process& server,
                 const HttpTarget& target);
  void add_node();
  void add_node_in_memory();
  void add_tls();
  void add_nginx();
  void add_echo();
  void add_workers();
  Round measure(const Case& one) const;
  std::optional<double> ratio(const std::string& name, const std::string& of,
                              double Round::*value) const;
  Json figures() const;

  const Options& options_;
  Scratch scratch_;
  std::vector<int> cpus_ = allowed_cpus();
  std::optional<int> server_cpu_;
  std::vector<std::unique_ptr<NodeServer>> nodes_;
  std::unique_ptr<NginxServer> nginx_;
  std::unique_ptr<EchoServer> echo_;
  std::vector<Case> cases_;
  std::map<std::string, std::vector<Round>> rounds_;
  std::vector<std::string> notes_;
};

void say(const std::string& line) {
  fmt::print(stderr, "  {}\n", line);
}

Wire::Wire(const Options& options) : options_(options) {
  if (cpus_.size() >= 2) {
    server_cpu_ = cpus_[0];
  } else {
    notes_.push_back("one processor only: servers and load take turns on it");
  }
  add_node();
  add_node_in_memory();
  add_tls();
  add_nginx();
  add_echo();
  add_workers();
}

void Wire::add(std::string name, std::string label, const Process& server,
               std::function<Load(double)> run, bool pinned) {
  if (!options_.only.empty() && name.rfind(options_.only, 0) != 0) return;
  cases_.push_back({std::move(name), std::move(label), &server, pinned, std::move(run)});
}

void Wire::add_http(const std::string& name, const std::string& label, const Process& server,
                    const HttpTarget& target, bool pinned) {
  add(
      name, label, server,
      [target](double seconds) { return HttpLoad(target, kConnections, 1).closed(seconds); },
      pinned);
}

void Wire::add_pipelined(const std::string& name, const std::string& label, const Process& server,
                         const HttpTarget& target) {
  add(name, label, server,
      [target](double seconds) { return HttpLoad(target, kPipelines, kDepth).closed(seconds); });
}

void Wire::add_paced(const std::string& name, const std::string& label, const Process& server,
                     const HttpTarget& target) {
  add(name, label, server, [target](double seconds) {
    return HttpLoad(target, kConnections, 1).open(kPacedRate, seconds);
  });
}

void Wire::add_node() {
  nodes_.push_back(
      std::make_unique<NodeServer>(options_.node, NodeServer::Options{}, pinned("node")));
  const NodeServer& node = *nodes_.back();
  const Process& process = node.process();
  HttpLoad(node.http(), kPipelines, kDepth).ask_all();
  add_http("http", "weir HTTP", process, node.http());
  add_http("http_minimal", "weir HTTP, return=minimal", process, node.http(true));
  add_pipelined("http_pipelined", "weir HTTP, 16 deep", process, node.http());
  add_pipelined("http_pipelined_minimal", "weir HTTP, 16 deep, return=minimal", process,
                node.http(true));
  add_paced("http_paced", "weir HTTP, 10,000 a second", process, node.http());
  RpcTarget rpc = node.rpc();
  add("rpc", "weir RPC", process, [rpc](double s) { return RpcLoad(rpc, kSingle).closed(s); });
  add("rpc_4_connections", "weir RPC, 4 connections", process,
      [rpc](double s) { return RpcLoad(rpc, kSpread).closed(s); });
  add("rpc_kj_caller", "weir RPC, asked by stock Cap'n Proto", process,
      [rpc](double s) { return kj_load(rpc, kSingle, s); });
  add("rpc_batch64", "weir RPC, 64 checks a call", process,
      [rpc](double s) { return RpcLoad(rpc, kBatches).closed(s); });
  add("rpc_client", "weir RPC, through its client library", process,
      [rpc](double s) { return client_load(rpc, kCallers, s); });
}

void Wire::add_node_in_memory() {
  nodes_.push_back(std::make_unique<NodeServer>(options_.node, NodeServer::Options{false, 0},
                                                pinned("node-memory")));
  const NodeServer& node = *nodes_.back();
  const Process& process = node.process();
  HttpLoad(node.http(), kPipelines, kDepth).ask_all();
  add_http("http_memory", "weir HTTP, storage: none", process, node.http());
  add_pipelined("http_pipelined_memory", "weir HTTP, 16 deep, storage: none", process, node.http());
  RpcTarget rpc = node.rpc();
  add("rpc_memory", "weir RPC, storage: none", process,
      [rpc](double s) { return RpcLoad(rpc, kSingle).closed(s); });
  add("rpc_batch64_memory", "weir RPC, 64 checks a call, storage: none", process,
      [rpc](double s) { return RpcLoad(rpc, kBatches).closed(s); });
}

/// Beside the first node, without TLS.
void Wire::add_tls() {
  const std::string folder = fresh("node-tls");
  const NodeServer& plain = *nodes_.front();
  nodes_.push_back(std::make_unique<NodeServer>(options_.node, NodeServer::Options{true, 0, true},
                                                Place{folder, server_cpu_}));
  const NodeServer& node = *nodes_.back();
  auto context = client_context(folder);
  RpcTarget without = plain.rpc();
  RpcTarget with = node.rpc();
  add("tls_rpc_client", "weir RPC over TLS, through its client library", node.process(),
      [with, context](double s) { return client_load(with, kCallers, s, context); });
  add("rpc_client_alone", "weir RPC, one caller of its client library", plain.process(),
      [without](double s) { return client_load(without, 1, s); });
  add("tls_rpc_client_alone", "weir RPC over TLS, one caller of its client library", node.process(),
      [with, context](double s) { return client_load(with, 1, s, context); });
  add("tls_handshake", "mutual TLS handshakes, one after the other", node.process(),
      [port = node.clients(), context](double s) { return handshake_load(port, context, s); });
}

void Wire::add_nginx() {
  auto program = NginxServer::find();
  if (!program) {
    notes_.push_back("nginx is not installed: no return 204 and no limit_req");
    return;
  }
  nginx_ = std::make_unique<NginxServer>(*program, pinned("nginx"));
  const Process& process = nginx_->process();
  HttpLoad(nginx_->limit_req(), kPipelines, kDepth).ask_all();
  add_http("return_204", "nginx return 204", process, nginx_->return_204());
  add_pipelined("return_204_pipelined", "nginx return 204, 16 deep", process, nginx_->return_204());
  add_http("limit_req", "nginx limit_req", process, nginx_->limit_req());
  add_paced("limit_req_paced", "nginx limit_req, 10,000 a second", process, nginx_->limit_req());
}

void Wire::add_echo() {
  echo_ = std::make_unique<EchoServer>(options_.echo, pinned("echo"));
  const Process& process = echo_->process();
  RpcTarget rpc = echo_->rpc();
  add("capnp_echo", "stock Cap'n Proto, a constant answer", process,
      [rpc](double s) { return RpcLoad(rpc, kSingle).closed(s); });
  add("capnp_echo_kj_caller", "stock Cap'n Proto, asked by stock Cap'n Proto", process,
      [rpc](double s) { return kj_load(rpc, kSingle, s); });
  add("capnp_echo_4_connections", "stock Cap'n Proto, 4 connections", process,
      [rpc](double s) { return RpcLoad(rpc, kSpread).closed(s); });
  add("capnp_echo_batch64", "stock Cap'n Proto, 64 answers a call", process,
      [rpc](double s) { return RpcLoad(rpc, kBatches).closed(s); });
}

void Wire::add_workers() {
  if (!NodeServer::knows_threads(options_.node, fresh("threads"))) {
    notes_.push_back("this node has one worker: no figures for two");
    return;
  }
  for (unsigned threads : {1u, 2u}) {
    nodes_.push_back(std::make_unique<NodeServer>(
        options_.node, NodeServer::Options{true, threads},
        Place{fresh(fmt::format("workers-{}", threads)), std::nullopt}));
    const NodeServer& node = *nodes_.back();
    HttpLoad(node.http(), kPipelines, kDepth).ask_all();
    add_http(threads == 1 ? "http_one_worker" : "http_two_workers",
             fmt::format("weir HTTP, {}, not pinned", threads == 1 ? "1 worker" : "2 workers"),
             node.process(), node.http(), false);
  }
}

Round Wire::measure(const Case& one) const {
  bool apart = one.pinned && server_cpu_;
  use_cpus(apart ? std::vector{cpus_[1]} : cpus_);
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  std::uint64_t before = one.server->cpu_ns();
  Load load = one.run(options_.seconds);
  std::uint64_t cpu = one.server->cpu_ns() - before;
  if (load.requests == 0) throw std::runtime_error(one.name + ": nothing was answered");
  auto requests = static_cast<double>(load.requests);
  auto ns = static_cast<double>(load.ns);
  auto us = [&](double q) { return static_cast<double>(load.latency.quantile(q)) / 1000; };
  return {static_cast<double>(cpu) / 1000 / requests, requests * 1e9 / ns, us(0.5), us(0.99),
          static_cast<double>(load.load_cpu_ns) / ns};
}

void Wire::turn() {
  for (const Case& one : cases_) rounds_[one.name].push_back(measure(one));
  use_cpus(cpus_);
}

std::vector<double> values_of(const std::vector<Round>& rounds, double Round::*value) {
  std::vector<double> out;
  for (const Round& round : rounds) out.push_back(round.*value);
  return out;
}

/// Round by round, then the median: a machine that slows down slows both.
std::optional<double> Wire::ratio(const std::string& name, const std::string& of,
                                  double Round::*value) const {
  auto over = rounds_.find(name);
  auto under = rounds_.find(of);
  if (over == rounds_.end() || under == rounds_.end()) return std::nullopt;
  std::vector<double> ratios;
  for (std::size_t i = 0; i < over->second.size(); ++i) {
    ratios.push_back(over->second[i].*value / (under->second[i].*value));
  }
  return median_of(ratios);
}

Json Wire::figures() const {
  Json out;
  auto put = [&](const std::string& name, std::optional<double> value) {
    out[name] = value ? Json(round_to(*value, 3)) : Json(nullptr);
  };
  auto median = [&](const std::string& name, double Round::*value) -> std::optional<double> {
    auto found = rounds_.find(name);
    if (found == rounds_.end()) return std::nullopt;
    return median_of(values_of(found->second, value));
  };
  auto in_ms = [](std::optional<double> us) { return us ? std::optional(*us / 1000) : us; };
  // What is compared from run to run comes first, and is there even where it was not measured.
  for (const char* name :
       {"http", "http_pipelined", "rpc", "rpc_batch64", "return_204", "limit_req", "capnp_echo"}) {
    put(std::string(name) + "_cpu_us", median(name, &Round::cpu_us));
  }
  put("http_vs_return_204", ratio("http", "return_204", &Round::cpu_us));
  put("http_minimal_vs_return_204", ratio("http_minimal", "return_204", &Round::cpu_us));
  put("rpc_vs_capnp_echo", ratio("rpc", "capnp_echo", &Round::cpu_us));
  put("http_p99_ms", in_ms(median("http_paced", &Round::p99_us)));
  put("limit_req_p99_ms", in_ms(median("limit_req_paced", &Round::p99_us)));
  put("http_p99_vs_limit_req", ratio("http_paced", "limit_req_paced", &Round::p99_us));
  put("second_worker_cpu_ratio", ratio("http_two_workers", "http_one_worker", &Round::cpu_us));
  for (const Case& one : cases_) {
    std::string cpu = one.name + "_cpu_us";
    if (!out.contains(cpu)) put(cpu, median(one.name, &Round::cpu_us));
  }
  for (const Case& one : cases_) {
    if (one.name.find("_paced") != std::string::npos) continue;
    out[one.name + "_per_s"] = std::round(*median(one.name, &Round::rate));
  }
  return out;
}

Json Wire::result() const {
  Json rows = Json::array();
  for (const Case& one : cases_) {
    const std::vector<Round>& rounds = rounds_.at(one.name);
    rows.push_back({{"name", one.name},
                    {"label", one.label},
                    {"cpu_us", spread_of(values_of(rounds, &Round::cpu_us))},
                    {"rate", spread_of(values_of(rounds, &Round::rate))},
                    {"p50_us", spread_of(values_of(rounds, &Round::p50_us))},
                    {"p99_us", spread_of(values_of(rounds, &Round::p99_us))},
                    {"load_share", spread_of(values_of(rounds, &Round::load_share))}});
  }
  return {{"part", "wire"},      {"rounds", options_.rounds}, {"seconds", options_.seconds},
          {"keys", kWireKeys},   {"rows", std::move(rows)},   {"notes", notes_},
          {"figures", figures()}};
}

}  // namespace

int run(int argc, char** argv) {
  CLI::App app{"What a request costs on the wire, as JSON"};
  Options options;
  options.node = WEIR_NODE_PROGRAM;
  options.echo = WEIR_ECHO_PROGRAM;
  bool quick = false;
  app.add_flag("--quick", quick, "about a minute in all, and not four");
  app.add_option("--node", options.node, "weir-node to measure");
  auto* rounds =
      app.add_option("--rounds", options.rounds, "turns of each case")->check(CLI::Range(1, 1000));
  auto* seconds =
      app.add_option("--seconds", options.seconds, "a turn")->check(CLI::Range(0.1, 600.0));
  app.add_option("--only", options.only, "only cases whose name begins so");
  weir::strict_numbers(app);
  CLI11_PARSE(app, argc, argv);
  if (quick && rounds->count() == 0) options.rounds = 3;
  if (quick && seconds->count() == 0) options.seconds = 0.8;
  options.node = std::filesystem::absolute(options.node);
  Wire wire(options);
  for (int round = 0; round < options.rounds; ++round) {
    say(fmt::format("round {} of {}", round + 1, options.rounds));
    wire.turn();
  }
  fmt::print("{}\n", wire.result().dump());
  return 0;
}

}  // namespace weir::bench

int main(int argc, char** argv) {
  try {
    return weir::bench::run(argc, argv);
  } catch (const std::exception& error) {
    fmt::print(stderr, "wire_load: {}\n", error.what());
  } catch (const kj::Exception& error) {
    fmt::print(stderr, "wire_load: {}\n", error.getDescription().cStr());
  }
  return 1;
}
