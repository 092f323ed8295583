#include <weir/proptests/real/network.h>

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sched.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <thread>

namespace weir::real {
namespace {

constexpr const char* kSpaces = "/var/run/netns";
constexpr std::uint16_t kPeerPort = 7400;

/// Runs `ip` and returns what it complained of; empty if it was content.
std::string try_ip(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "ip");
  std::vector<char*> raw;
  for (std::string& argument : arguments) raw.push_back(argument.data());
  raw.push_back(nullptr);
  std::array<int, 2> pipe{};
  if (::pipe2(pipe.data(), O_CLOEXEC) != 0) return std::strerror(errno);
  pid_t pid = ::fork();
  if (pid == 0) {
    ::setpgid(0, 0);  // Ctrl-C is for us: what removes the namespaces must not die of it
    sigset_t none;
    sigemptyset(&none);
    ::sigprocmask(SIG_SETMASK, &none, nullptr);
    int null = ::open("/dev/null", O_RDWR);
    ::dup2(null, 0);
    ::dup2(pipe[1], 1);
    ::dup2(pipe[1], 2);
    ::execvp("ip", raw.data());
    for (const char* path : {"/usr/sbin/ip", "/sbin/ip", "/usr/bin/ip", "/bin/ip"}) {
      ::execv(path, raw.data());
    }
    ::_exit(127);
  }
  ::close(pipe[1]);
  std::string said;
  std::array<char, 1024> buffer;
  for (;;) {
    ssize_t got = ::read(pipe[0], buffer.data(), buffer.size());
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) break;
    said.append(buffer.data(), static_cast<std::size_t>(got));
  }
  ::close(pipe[0]);
  if (pid < 0) return "fork failed";
  int code = 0;
  while (::waitpid(pid, &code, 0) < 0 && errno == EINTR) continue;
  if (WIFEXITED(code) && WEXITSTATUS(code) == 0) return {};
  if (WIFEXITED(code) && WEXITSTATUS(code) == 127 && said.empty()) {
    return "the command ip is missing (package iproute2)";
  }
  while (said.ends_with('\n')) said.pop_back();
  return fmt::format("{}: {}", fmt::join(arguments, " "), said.empty() ? "failed" : said);
}

void ip(std::vector<std::string> arguments) {
  std::string problem = try_ip(std::move(arguments));
  if (!problem.empty()) throw std::runtime_error(problem);
}

void enter_space(int descriptor) {
  if (::setns(descriptor, CLONE_NEWNET) != 0) {
    throw std::runtime_error(fmt::format("setns: {}", std::strerror(errno)));
  }
}

void within_space(int descriptor, const std::function<void()>& what) {
  std::exception_ptr problem;
  std::thread([&] {
    try {
      enter_space(descriptor);
      what();
    } catch (...) {
      problem = std::current_exception();
    }
  }).join();
  if (problem) std::rethrow_exception(problem);
}

std::string inside(std::uint32_t node) {
  return fmt::format("10.77.{}.2", node + 1);
}

/// What `node` takes for `peer`.
std::string alias(std::uint32_t node, std::uint32_t peer) {
  return fmt::format("10.77.{}.{}", node + 1, 101 + peer);
}

}  // namespace

Network::Network(std::string name, const std::vector<std::vector<Nanos>>& round_trips)
    : name_(std::move(name)), size_(static_cast<std::uint32_t>(round_trips.size())) {
  try {
    make(round_trips);
  } catch (const std::exception& error) {
    remove();
    throw NoNetwork(error.what());
  }
}

Network::~Network() {
  remove();
}

void Network::make(const std::vector<std::vector<Nanos>>& round_trips) {
  if (::geteuid() != 0) {
    throw std::runtime_error("not root: network namespaces need CAP_SYS_ADMIN and CAP_NET_ADMIN");
  }
  const std::string wan = name_ + "-wan";
  std::vector<std::string> names{wan};
  for (std::uint32_t i = 0; i < size_; ++i) names.push_back(space(i));
  for (const std::string& one : names) {
    ip({"netns", "add", one});
    made_.push_back(one);
    int fd = ::open(fmt::format("{}/{}", kSpaces, one).c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) throw std::runtime_error(fmt::format("{}: {}", one, std::strerror(errno)));
    descriptors_.push_back(fd);
    ip({"-n", one, "link", "set", "lo", "up"});
    // Or a blackhole route would refuse what comes from its address, too.
    within_space(fd, [] {
      for (const char* which : {"all", "default"}) {
        std::ofstream(fmt::format("/proc/sys/net/ipv4/conf/{}/rp_filter", which)) << "0\n";
      }
    });
  }
  for (std::uint32_t i = 0; i < size_; ++i) {
    const std::string here = fmt::format("n{}", i + 1);
    ip({"-n", wan, "link", "add", here, "type", "veth", "peer", "name", "wan", "netns", space(i)});
    ip({"-n", space(i), "addr", "add", inside(i) + "/24", "dev", "wan"});
    ip({"-n", space(i), "link", "set", "wan", "up"});
    for (std::uint32_t peer = 0; peer < size_; ++peer) {
      if (peer != i) ip({"-n", wan, "addr", "add", alias(i, peer) + "/24", "dev", here});
    }
    ip({"-n", wan, "link", "set", here, "up"});
  }
  within_space(descriptors_[0], [&] {
    for (std::uint32_t from = 0; from < size_; ++from) {
      for (std::uint32_t to = 0; to < size_; ++to) {
        if (from == to) continue;
        examples::RelayEnds ends{peer_address(from, to), listen_address(to),
                                 alias(to, from) + ":0"};
        relays_.push_back(std::make_unique<examples::Relay>(ends, round_trips[from][to] / 2));
      }
    }
  });
}

void Network::remove() noexcept {
  relays_.clear();
  for (int fd : descriptors_) ::close(fd);
  descriptors_.clear();
  // Nodes first: with the last end of a link the link is gone.
  for (auto name = made_.rbegin(); name != made_.rend(); ++name) {
    std::string problem = try_ip({"netns", "del", *name});
    if (!problem.empty()) fmt::print(stderr, "weir-five: {}\n", problem);
  }
  made_.clear();
}

std::string Network::space(std::uint32_t node) const {
  return fmt::format("{}-n{}", name_, node + 1);
}

std::string Network::listen_address(std::uint32_t node) const {
  return fmt::format("{}:{}", inside(node), kPeerPort);
}

std::string Network::peer_address(std::uint32_t from, std::uint32_t to) const {
  return fmt::format("{}:{}", alias(from, to), kPeerPort);
}

void Network::within(std::uint32_t node, const std::function<void()>& what) const {
  within_space(descriptor(node), what);
}

void Network::route(const char* verb, const Drop& drop) const {
  ip({"-n", space(drop.first), "route", verb, "blackhole", alias(drop.first, drop.second)});
}

void Network::cut(const std::vector<Drop>& drops) {
  for (const Drop& drop : drops) {
    if (dropped_.contains(drop)) continue;
    route("add", drop);
    dropped_.insert(drop);
  }
}

void Network::heal(const std::vector<Drop>& drops) {
  for (const Drop& drop : drops) {
    if (!dropped_.contains(drop)) continue;
    route("del", drop);
    dropped_.erase(drop);
  }
}

void Network::heal_all() {
  heal({dropped_.begin(), dropped_.end()});
}

std::size_t remove_leftovers(const std::string& prefix) {
  std::error_code ignored;
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(kSpaces, ignored)) {
    std::string name = entry.path().filename().string();
    if (!name.starts_with(prefix + "-")) continue;
    const char* begin = name.data() + prefix.size() + 1;
    const char* end = name.data() + name.size();
    pid_t pid = 0;
    auto [rest, error] = std::from_chars(begin, end, pid);
    if (error != std::errc() || rest == end || *rest != '-' || pid <= 0) continue;
    if (::kill(pid, 0) != 0 && errno == ESRCH) names.push_back(name);
  }
  std::size_t removed = 0;
  for (const std::string& name : names) {
    if (try_ip({"netns", "del", name}).empty()) ++removed;
  }
  return removed;
}

}  // namespace weir::real
