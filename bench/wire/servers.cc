#include <weir/bench/wire/servers.h>

#include <fmt/format.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include <weir/bench/wire/tls_load.h>

namespace weir::bench {
namespace {

constexpr const char* kRules = R"(domain: api
rules:
  - name: per-key
    key: [key]
    limit: 100
    window: 1h
    algorithm: token_bucket
    burst: 100000
    durability: async
)";

constexpr const char* kKeyPlace = "0123456789abcdef";

HttpTarget target_of(std::uint16_t port, std::string request, int status) {
  HttpTarget target;
  target.port = port;
  target.key_at = request.find(kKeyPlace);
  target.request = std::move(request);
  target.status = status;
  target.keys = kWireKeys;
  return target;
}

void write_node_files(const std::string& directory, const NodeServer::Options& options,
                      std::uint16_t peers, std::uint16_t clients, std::uint16_t http) {
  std::filesystem::create_directories(directory);
  std::ofstream(directory + "/rules.yaml") << kRules;
  std::ofstream out(directory + "/node.yaml");
  out << fmt::format(
      "cluster: {{name: wire}}\nregion: local\nnode: local-1\n"
      "listen: {{peers: '127.0.0.1:{}', clients: '127.0.0.1:{}', http: '127.0.0.1:{}'}}\n"
      "rules: rules.yaml\nlog: {{level: warn}}\nstorage: {}\n",
      peers, clients, http, options.storage ? "{path: data, map_size: 8GiB}" : "none");
  if (options.tls) {
    make_certificates(directory);
    out << "tls: {clients: {cert: certs/node.pem, key: certs/node.key, ca: certs/ca.pem, "
           "client_certificate: required}}\n";
  }
  if (options.threads > 0) out << "threads: " << options.threads << "\n";
}

}  // namespace

NodeServer::NodeServer(const std::string& program, const Options& options, const Place& place) {
  auto ports = free_ports(3);
  peers_ = ports[0];
  clients_ = ports[1];
  http_ = ports[2];
  write_node_files(place.directory, options, peers_, clients_, http_);
  process_ = std::make_unique<Process>(
      Process::Options{{program, "--config", "node.yaml"}, place.directory, place.cpu});
  process_->wait_for_port(http_);
  process_->wait_for_port(clients_);
}

bool NodeServer::knows_threads(const std::string& program, const std::string& directory) {
  write_node_files(directory, {true, 2}, 1, 2, 3);
  Process validation({{program, "--config", "node.yaml", "--validate"}, directory, {}});
  return validation.wait() == 0;
}

HttpTarget NodeServer::http(bool minimal) const {
  std::string body = fmt::format(R"({{"domain":"api","descriptor":{{"key":"{}"}}}})", kKeyPlace);
  return target_of(http_,
                   fmt::format("POST /v1/check HTTP/1.1\r\nHost: 127.0.0.1\r\n"
                               "Content-Type: application/json\r\n{}Content-Length: {}\r\n\r\n{}",
                               minimal ? "Prefer: return=minimal\r\n" : "", body.size(), body),
                   200);
}

NginxServer::NginxServer(const std::string& program, const Place& place) : port_(free_ports(1)[0]) {
  const std::string& at = place.directory;
  std::filesystem::create_directories(at);
  std::string temporary;
  for (const char* kind : {"client_body", "proxy", "fastcgi", "uwsgi", "scgi"}) {
    temporary += fmt::format("  {}_temp_path {}/{};\n", kind, at, kind);
  }
  // "return" alone would answer before limit_req is asked: hence the file that is not there.
  std::ofstream(at + "/nginx.conf") << fmt::format(R"(daemon off;
master_process off;
worker_processes 1;
error_log {0}/log crit;
pid {0}/pid;
events {{ worker_connections 1024; }}
http {{
  access_log off;
  keepalive_requests 1000000000;
  keepalive_timeout 3600;
{1}  limit_req_zone $arg_key zone=keys:64m rate=1r/m;
  limit_req_status 429;
  server {{
    listen 127.0.0.1:{2};
    location = /answer {{ return 204; }}
    location = /limited {{
      limit_req zone=keys burst=100000 nodelay;
      try_files /none @allowed;
    }}
    location @allowed {{ return 204; }}
  }}
}}
)",
                                                   at, temporary, port_);
  process_ = std::make_unique<Process>(Process::Options{
      {program, "-p", at, "-e", at + "/log", "-c", at + "/nginx.conf"}, at, place.cpu});
  process_->wait_for_port(port_);
}

std::optional<std::string> NginxServer::find() {
  const char* path = std::getenv("PATH");
  std::stringstream places(std::string(path == nullptr ? "" : path) + ":/usr/sbin");
  for (std::string place; std::getline(places, place, ':');) {
    std::string program = place + "/nginx";
    if (!place.empty() && ::access(program.c_str(), X_OK) == 0) return program;
  }
  return std::nullopt;
}

HttpTarget NginxServer::target(const std::string& path) const {
  return target_of(
      port_, fmt::format("GET {}?key={} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", path, kKeyPlace),
      204);
}

EchoServer::EchoServer(const std::string& program, const Place& place) : port_(free_ports(1)[0]) {
  process_ = std::make_unique<Process>(
      Process::Options{{program, std::to_string(port_)}, place.directory, place.cpu});
  process_->wait_for_port(port_);
}

}  // namespace weir::bench
