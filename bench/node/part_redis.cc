#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstring>
#include <fstream>
#include <sstream>
#include <thread>

#include <weir/bench/keys.h>
#include <weir/bench/node/node_parts.h>
#include <weir/bench/wire/links.h>
#include <weir/bench/wire/process.h>

namespace weir::bench {
namespace {

/// A token bucket as services write it: two fields of a hash, and a time to live.
constexpr const char* kScript = R"(
local rate, burst, now = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local held = redis.call('HMGET', KEYS[1], 't', 'at')
local tokens, at = tonumber(held[1]) or burst, tonumber(held[2]) or now
tokens = math.min(burst, tokens + (now - at) * rate)
local allowed = tokens >= 1
if allowed then tokens = tokens - 1 end
redis.call('HSET', KEYS[1], 't', tokens, 'at', now)
redis.call('EXPIRE', KEYS[1], 86400)
return allowed and 1 or 0
)";
constexpr unsigned kDepth = 64;

std::optional<std::string> find_redis() {
  const char* path = std::getenv("PATH");
  std::stringstream places(std::string(path == nullptr ? "" : path) + ":/usr/bin");
  for (std::string place; std::getline(places, place, ':');) {
    std::string program = place + "/redis-server";
    if (!place.empty() && ::access(program.c_str(), X_OK) == 0) return program;
  }
  return std::nullopt;
}

std::string command(const std::vector<std::string>& words) {
  std::string out = fmt::format("*{}\r\n", words.size());
  for (const std::string& word : words) out += fmt::format("${}\r\n{}\r\n", word.size(), word);
  return out;
}

/// One connection that asks for keys, many at a time.
class RedisLoad {
 public:
  explicit RedisLoad(std::uint16_t port) : links_(port, 1) {
    const std::string loaded = lines(command({"SCRIPT", "LOAD", kScript}), 2);
    if (loaded[0] != '$') throw std::runtime_error("redis: " + loaded);
    script_ = loaded.substr(loaded.find('\n') + 1, 40);
  }
  void ask_all(std::uint64_t keys) {
    for (std::uint64_t first = 0; first < keys; first += kDepth) {
      std::string asked;
      const std::uint64_t end = std::min<std::uint64_t>(first + kDepth, keys);
      for (std::uint64_t key = first; key < end; ++key) {
        asked += command({"EVALSHA", script_, "1", "per-key:" + std::string(key_of(key).view()),
                          "0.0001", "100000", "1767225600.123"});
      }
      const std::string answers = lines(asked, end - first);
      if (answers.find(":0") != answers.npos || answers.find('-') != answers.npos) {
        throw std::runtime_error("redis: " + answers);
      }
    }
  }

 private:
  /// Sends, and returns so many lines of answers.
  std::string lines(const std::string& bytes, std::uint64_t count) {
    Link& link = links_.all().front();
    links_.send(link, bytes);
    std::string got;
    while (static_cast<std::uint64_t>(std::count(got.begin(), got.end(), '\n')) < count) {
      links_.wait(100, [&](Link& from) {
        got += from.unread();
        from.take(from.unread().size());
      });
    }
    return got;
  }

  Links links_;
  std::string script_;
};

double resident(const Process& process) {
  std::ifstream in(fmt::format("/proc/{}/statm", process.pid()));
  std::uint64_t size = 0;
  std::uint64_t pages = 0;
  in >> size >> pages;
  return static_cast<double>(pages) * static_cast<double>(::sysconf(_SC_PAGESIZE));
}

void pause(double seconds) {
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

}  // namespace

Json node_redis(const NodeBenchOptions& options) {
  const auto program = find_redis();
  if (!program) throw LeftOut("redis-server is not installed");
  need(options.keys * 300, fmt::format("{} keys in Redis", options.keys));
  const std::uint16_t port = free_ports(1)[0];
  Process redis({{*program, "--port", std::to_string(port), "--bind", "127.0.0.1", "--save", "",
                  "--appendonly", "no"},
                 options.scratch + "/redis",
                 std::nullopt});
  redis.wait_for_port(port);
  RedisLoad load(port);
  const double before = resident(redis);
  load.ask_all(options.keys);
  pause(options.settle_s);
  const double bytes = (resident(redis) - before) / static_cast<double>(options.keys);
  const std::uint64_t cpu = redis.cpu_ns();
  pause(options.rest_s);
  const double idle = static_cast<double>(redis.cpu_ns() - cpu) / (options.rest_s * 1e9) * 100;
  return {
      {"part", "redis"},
      {"keys", options.keys},
      {"figures",
       {{"redis_bytes_per_key", round_to(bytes, 1)}, {"redis_idle_percent", round_to(idle, 3)}}}};
}

}  // namespace weir::bench
