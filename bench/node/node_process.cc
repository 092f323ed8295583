#include <weir/bench/node/node_process.h>

#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <thread>
#include <utility>

#include <weir/bench/keys.h>
#include <weir/bench/machine.h>
#include <weir/bench/node/http_ask.h>

namespace weir::bench {
namespace {

constexpr RpcShape kLoad{2, 8, 64};

void pause(double seconds) {
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

double seconds_since(std::uint64_t start) {
  return static_cast<double>(steady_ns() - start) / 1e9;
}

}  // namespace

std::vector<NodePorts> ports_for(std::size_t nodes) {
  const std::vector<std::uint16_t> free = free_ports(4 * nodes);
  std::vector<NodePorts> out;
  for (std::size_t i = 0; i < free.size(); i += 4) {
    out.push_back({free[i], free[i + 1], free[i + 2], free[i + 3]});
  }
  return out;
}

Turns turns_between(const Turns& before, const Turns& after) {
  Turns out;
  for (const auto& [what, ms] : after) {
    const auto was = before.find(what);
    if (was == before.end() || ms > was->second) out[what] = ms;
  }
  return out;
}

BenchNode::BenchNode(Options options) : options_(std::move(options)) {
  std::filesystem::create_directories(options_.directory);
  if (options_.members.empty()) options_.members = ports_for(1);
  write_rules(options_.rules);
  write_config();
}

void BenchNode::write_rules(const std::string& text) const {
  const std::string path = options_.directory + "/rules.yaml";
  std::ofstream(path + ".new") << text;
  std::filesystem::rename(path + ".new", path);
}

void BenchNode::write_config() const {
  std::ofstream out(options_.directory + "/node.yaml");
  out << fmt::format(
      "cluster: {{name: bench, secret: not-a-secret-for-real-use}}\nregion: local\nnode: node-{}\n"
      "listen: {{peers: '127.0.0.1:{}', clients: '127.0.0.1:{}', http: '127.0.0.1:{}', admin: "
      "'127.0.0.1:{}'}}\n"
      "threads: 1\nrules: rules.yaml\nlog: {{level: warn}}\nmax_series: {}\npopulate: {}\nstorage: "
      "{}\n",
      options_.self, ports().peers, ports().clients, ports().http, ports().admin,
      options_.max_series, options_.populate,
      options_.storage ? "{path: data, map_size: 64GiB}" : "none");
  if (options_.members.size() > 1) out << "peers:\n";
  for (std::size_t i = 0; i < options_.members.size(); ++i) {
    if (i == options_.self) continue;
    out << fmt::format("  - {{region: local, node: node-{}, address: '127.0.0.1:{}'}}\n", i,
                       options_.members[i].peers);
  }
}

double BenchNode::start(double patience_seconds) {
  const std::uint64_t from = steady_ns();
  process_ = std::make_unique<Process>(Process::Options{
      {options_.program, "--config", "node.yaml"}, options_.directory, std::nullopt});
  process_->wait_for_port(ports().admin, patience_seconds);
  process_->wait_for_port(ports().clients, patience_seconds);
  process_->wait_for_port(ports().http, patience_seconds);
  return seconds_since(from);
}

Json BenchNode::status() const {
  return Json::parse(http_get(ports().admin, "/v1/status"));
}

std::string BenchNode::metrics() const {
  return http_get(ports().admin, "/metrics");
}

bool BenchNode::allows(std::uint64_t key, std::uint64_t hits) const {
  const Key16 text = key_of(key);
  const Json answer = Json::parse(
      http_post(ports().http, "/v1/check",
                fmt::format(R"({{"domain":"api","hits":{},"descriptor":{{"key":"{}"}}}})", hits,
                            text.view())));
  return answer.at("allowed").get<bool>();
}

Turns BenchNode::turns() const {
  const Json now = status();
  Turns out;
  for (const auto& [what, seconds] : now.at("loop").at("longest_turns_since_start_s").items()) {
    out[what] = round_to(seconds.get<double>() * 1e3, 3);
  }
  return out;
}

std::uint64_t BenchNode::resident_bytes() const {
  std::ifstream in(fmt::format("/proc/{}/statm", process_->pid()));
  std::uint64_t size = 0;
  std::uint64_t resident = 0;
  if (!(in >> size >> resident)) throw std::runtime_error("the node has ended");
  return resident * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
}

void BenchNode::load(std::uint64_t keys, std::uint64_t cells, std::uint64_t first) const {
  RpcLoad(rpc(keys), kLoad).ask_all(first);
  wait(fmt::format("{} cells", cells), 600, [&](const Json& now) {
    const Json& storage = now.at("storage");
    return now.at("cells") == cells && (!storage.contains("backlog") || storage.at("backlog") == 0);
  });
}

void BenchNode::wait(const std::string& what, double patience_seconds,
                     const std::function<bool(const Json&)>& done) const {
  const std::uint64_t from = steady_ns();
  for (;;) {
    Json now = status();
    if (done(now)) return;
    if (seconds_since(from) > patience_seconds) {
      now.erase("rules");
      throw std::runtime_error("waited too long for " + what + ": " + now.dump());
    }
    pause(0.05);
  }
}

double BenchNode::cpu_percent(double seconds) const {
  const std::uint64_t from = steady_ns();
  const std::uint64_t before = cpu_ns();
  pause(seconds);
  return static_cast<double>(cpu_ns() - before) / static_cast<double>(steady_ns() - from) * 100;
}

void BenchNode::wait_at_rest(double patience_seconds) const {
  const std::uint64_t from = steady_ns();
  for (int quiet = 0; quiet < 22 && seconds_since(from) < patience_seconds;) {
    quiet = cpu_percent(0.5) <= 2 ? quiet + 1 : 0;
  }
}

}  // namespace weir::bench
