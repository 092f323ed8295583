#include "cluster.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <stdexcept>
#include <thread>

#include <weir/limits/text/duration.h>
#include <weir/rpc/client/node_client.h>
#include <weir/rpc/net/certificates.h>

namespace weir::examples {
namespace {

/// Free now; held open until all are chosen, so that no two are the same.
class FreePorts {
 public:
  ~FreePorts() {
    for (int fd : held_) ::close(fd);
  }
  std::uint16_t next() {
    int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    if (fd < 0 || ::bind(fd, reinterpret_cast<sockaddr*>(&address), size) < 0 ||
        ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) < 0) {
      throw std::runtime_error("no free loopback port");
    }
    held_.push_back(fd);
    return ntohs(address.sin_port);
  }

 private:
  std::vector<int> held_;
};

std::string loopback(std::uint16_t port) {
  return "127.0.0.1:" + std::to_string(port);
}

std::string tail(const std::string& path) {
  std::ifstream in(path);
  std::stringstream text;
  text << in.rdbuf();
  std::string whole = text.str();
  return whole.size() <= 2000 ? whole : whole.substr(whole.size() - 2000);
}

}  // namespace

Cluster::Cluster(ClusterOptions options) : options_(std::move(options)) {
  std::filesystem::create_directories(options_.directory);
  FreePorts ports;
  for (std::size_t i = 0; i < options_.regions.size(); ++i) {
    nodes_.push_back({-1, ports.next(), ports.next(), ports.next(), ports.next()});
  }
  for (std::size_t from = 0; from < nodes_.size(); ++from) {
    for (std::size_t to = 0; to < nodes_.size(); ++to) {
      if (from == to) continue;
      Nanos delay = options_.delay_between ? options_.delay_between(from, to) : options_.delay;
      links_.push_back({from, to, std::make_unique<Relay>(0, nodes_[to].peers, delay)});
    }
  }
  std::ofstream(options_.directory + "/rules.yaml") << options_.rules;
  if (options_.tls) make_certificates();
  for (std::size_t i = 0; i < nodes_.size(); ++i) write_config(i);
}

Cluster::~Cluster() {
  for (std::size_t i = 0; i < nodes_.size(); ++i) {
    if (nodes_[i].pid > 0) kill(i, SIGKILL);
  }
}

std::string Cluster::directory_of(std::size_t node) const {
  return options_.directory + "/" + options_.regions[node];
}

std::string Cluster::log_path(std::size_t node) const {
  return directory_of(node) + "/node.log";
}
std::string Cluster::peers_address(std::size_t node) const {
  return loopback(nodes_[node].peers);
}
std::string Cluster::client_address(std::size_t node) const {
  return loopback(nodes_[node].clients);
}
std::string Cluster::http_address(std::size_t node) const {
  return loopback(nodes_[node].http);
}
std::string Cluster::admin_address(std::size_t node) const {
  return loopback(nodes_[node].admin);
}

void Cluster::make_certificates() const {
  const std::string folder = options_.directory + "/certs";
  std::filesystem::create_directories(folder);
  const auto write = [&](const std::string& name, const rpc::Certificate& made) {
    std::ofstream(folder + "/" + name + ".pem") << made.cert;
    std::ofstream(folder + "/" + name + ".key") << made.key;
    std::filesystem::permissions(folder + "/" + name + ".key", std::filesystem::perms::owner_read);
  };
  const Nanos now =
      std::chrono::system_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
  const rpc::Certificate ca = rpc::make_ca({"example CA", {}, now - kHour, now + 400 * kDay});
  write("ca", ca);
  for (const std::string& region : options_.regions) {
    const std::string node = region + "-1";
    write(node, rpc::issue(ca, {node,
                                {rpc::member_uri("example", region, node), "127.0.0.1"},
                                now - kHour,
                                now + 365 * kDay}));
  }
}

void Cluster::write_config(std::size_t node) const {
  std::filesystem::create_directories(directory_of(node));
  std::ofstream out(directory_of(node) + "/node.yaml");
  const std::string& region = options_.regions[node];
  out << "cluster: {name: example" << (options_.tls ? "" : ", secret: not-a-secret-for-real-use")
      << "}\n"
      << "region: " << region << "\nnode: " << region << "-1\n"
      << "listen: {peers: '" << loopback(nodes_[node].peers) << "', clients: '"
      << client_address(node) << "', http: '" << http_address(node) << "', admin: '"
      << admin_address(node) << "'}\nthreads: " << options_.threads << "\n"
      << "rules: ../rules.yaml\nstorage: {path: data, map_size: " << options_.map_size << "}\n"
      << "drain: " << format_duration(options_.drain) << "\n";
  if (nodes_.size() > 1) out << "peers:\n";
  for (const Link& link : links_) {
    if (link.from != node) continue;
    const std::string& to = options_.regions[link.to];
    out << "  - {region: " << to << ", node: " << to << "-1, address: '"
        << loopback(link.relay->port()) << "'}\n";
  }
  if (options_.tls) {
    const std::string files = "{cert: ../certs/" + region + "-1.pem, key: ../certs/" + region +
                              "-1.key, ca: ../certs/ca.pem}";
    out << "tls: {peers: " << files << ", http: " << files << "}\n";
  }
  out << options_.more_config;
}

void Cluster::start(std::size_t node, const std::vector<std::string>& more) {
  std::string config = directory_of(node) + "/node.yaml";
  std::string log = log_path(node);
  std::vector<const char*> arguments{"weir-node", "--config", config.c_str()};
  for (const std::string& argument : options_.more_arguments) arguments.push_back(argument.c_str());
  for (const std::string& argument : more) arguments.push_back(argument.c_str());
  arguments.push_back(nullptr);
  std::vector<char*> environment;
  for (std::string& each : options_.environment) environment.push_back(each.data());
  for (char** each = environ; *each != nullptr; ++each) environment.push_back(*each);
  environment.push_back(nullptr);
  pid_t parent = ::getpid();
  pid_t pid = ::fork();
  if (pid < 0) throw std::runtime_error("fork failed");
  if (pid == 0) {
    // Only async-signal-safe calls: other threads may have held locks at the fork.
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) ::_exit(1);
    int fd = ::open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (fd >= 0) {
      ::dup2(fd, 1);
      ::dup2(fd, 2);
    }
    ::execve(options_.node_program.c_str(), const_cast<char* const*>(arguments.data()),
             environment.data());
    ::_exit(127);
  }
  nodes_[node].pid = pid;
  for (int i = 0; i < 400; ++i) {
    if (!status(node).empty()) return;
    int code = 0;
    if (::waitpid(pid, &code, WNOHANG) == pid) {
      nodes_[node].pid = -1;
      break;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(25));
  }
  throw std::runtime_error("node " + region(node) + " does not answer; its log ends:\n" +
                           tail(log));
}

void Cluster::start_all() {
  for (std::size_t i = 0; i < nodes_.size(); ++i) start(i);
}

void Cluster::kill(std::size_t node, int signal) {
  if (nodes_[node].pid <= 0) return;
  ::kill(nodes_[node].pid, signal);
  if (signal == SIGSTOP || signal == SIGCONT) return;
  int code = 0;
  ::waitpid(nodes_[node].pid, &code, 0);
  nodes_[node].pid = -1;
}

int Cluster::stop(std::size_t node, Nanos patience) {
  pid_t pid = nodes_[node].pid;
  if (pid <= 0) return -1;
  ::kill(pid, SIGTERM);
  for (Nanos waited = 0; waited < patience; waited += 10 * kMillisecond) {
    int code = 0;
    if (::waitpid(pid, &code, WNOHANG) == pid) {
      nodes_[node].pid = -1;
      return WIFEXITED(code) ? WEXITSTATUS(code) : -1;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  kill(node, SIGKILL);
  return -1;
}

void Cluster::cut(std::size_t node) {
  for (Link& link : links_) {
    if (link.from == node || link.to == node) link.relay->cut(true);
  }
}

void Cluster::heal(std::size_t node) {
  for (Link& link : links_) {
    if (link.from == node || link.to == node) link.relay->cut(false);
  }
}

std::string Cluster::status(std::size_t node) const {
  rpc::NodeClientOptions options;
  options.address = client_address(node);
  options.status_deadline = 500 * kMillisecond;
  return rpc::NodeClient(options).status();
}

bool Cluster::converged() const {
  std::string digest;
  for (std::size_t i = 0; i < nodes_.size(); ++i) {
    auto status = nlohmann::json::parse(this->status(i), nullptr, false);
    if (!status.is_object()) return false;
    std::string mine = status.value("digest", "");
    if (i > 0 && mine != digest) return false;
    digest = mine;
    for (const auto& peer : status["peers"]) {
      if (!peer.value("up", false) || peer.value("unacked", 1) != 0) return false;
    }
  }
  return true;
}

}  // namespace weir::examples
