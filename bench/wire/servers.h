#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include <weir/bench/wire/http_load.h>
#include <weir/bench/wire/process.h>
#include <weir/bench/wire/rpc_load.h>

namespace weir::bench {

/// Keys that servers are asked about.
inline constexpr std::uint64_t kWireKeys = 100'000;

/// Where servers run, and on which processor; none: on any.
struct Place {
  std::string directory;
  std::optional<int> cpu;
};

/// A weir node with one rule, a token bucket for each key, that allows all it is asked here, and of
/// which no bucket is full again before its key's next request.
class NodeServer {
 public:
  struct Options {
    bool storage = true;   ///< LMDB; false: in memory
    unsigned threads = 0;  ///< 0: the configuration does not say
    bool tls = false;      ///< of clients, who show certificates: make_certificates()
  };
  NodeServer(const std::string& program, const Options& options, const Place& place);

  /// This node takes `threads` in its configuration.
  static bool knows_threads(const std::string& program, const std::string& directory);

  const Process& process() const { return *process_; }
  std::uint16_t clients() const { return clients_; }
  RpcTarget rpc() const { return {clients_, kWireKeys}; }
  /// POST /v1/check with a JSON body; `minimal` asks for a terse answer.
  HttpTarget http(bool minimal = false) const;

 private:
  std::uint16_t peers_ = 0;
  std::uint16_t clients_ = 0;
  std::uint16_t http_ = 0;
  std::unique_ptr<Process> process_;
};

/// nginx with one worker that only answers (`return 204`), or first asks its limiter for the key in
/// the query (`limit_req`), and then answers the same.
class NginxServer {
 public:
  NginxServer(const std::string& program, const Place& place);

  /// Where Debian puts it, or in the PATH. Nothing if it is not installed.
  static std::optional<std::string> find();

  const Process& process() const { return *process_; }
  HttpTarget return_204() const { return target("/answer"); }
  HttpTarget limit_req() const { return target("/limited"); }

 private:
  HttpTarget target(const std::string& path) const;

  std::uint16_t port_ = 0;
  std::unique_ptr<Process> process_;
};

/// capnp_echo.
class EchoServer {
 public:
  EchoServer(const std::string& program, const Place& place);
  const Process& process() const { return *process_; }
  RpcTarget rpc() const { return {port_, kWireKeys}; }

 private:
  std::uint16_t port_ = 0;
  std::unique_ptr<Process> process_;
};

}  // namespace weir::bench
