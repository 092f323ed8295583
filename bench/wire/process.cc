#include <weir/bench/wire/process.h>

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <charconv>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <stdexcept>
#include <thread>

namespace weir::bench {
namespace {

sockaddr_in loopback(std::uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port);
  return address;
}

bool takes_connections(std::uint16_t port) {
  int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in to = loopback(port);
  bool connected = fd >= 0 && ::connect(fd, reinterpret_cast<const sockaddr*>(&to), sizeof to) == 0;
  if (fd >= 0) ::close(fd);
  return connected;
}

cpu_set_t set_of(const std::vector<int>& cpus) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (int cpu : cpus) CPU_SET(cpu, &set);
  return set;
}

/// Between fork and exec: only async-signal-safe calls, as other threads may have held locks.
[[noreturn]] void become(char* const* arguments, const char* directory, const cpu_set_t* cpus,
                         pid_t parent) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent || ::chdir(directory) != 0) ::_exit(126);
  if (cpus != nullptr) ::sched_setaffinity(0, sizeof *cpus, cpus);
  int log = ::open("log", O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (log >= 0) {
    ::dup2(log, 1);
    ::dup2(log, 2);
  }
  ::execv(arguments[0], arguments);
  ::_exit(127);
}

}  // namespace

Process::Process(Options options) : options_(std::move(options)) {
  std::filesystem::create_directories(options_.directory);
  std::vector<char*> arguments;
  for (std::string& each : options_.command) arguments.push_back(each.data());
  arguments.push_back(nullptr);
  cpu_set_t one = set_of(options_.cpu ? std::vector{*options_.cpu} : std::vector<int>{});
  pid_t parent = ::getpid();
  pid_ = ::fork();
  if (pid_ < 0) throw std::runtime_error("fork failed");
  if (pid_ == 0) {
    become(arguments.data(), options_.directory.c_str(), options_.cpu ? &one : nullptr, parent);
  }
}

Process::~Process() {
  if (pid_ <= 0) return;
  ::kill(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
}

void Process::wait_for_port(std::uint16_t port, double patience_seconds) {
  const int tries = static_cast<int>(patience_seconds * 200);
  for (int i = 0; i < tries; ++i) {
    if (takes_connections(port)) return;
    int status = 0;
    if (::waitpid(pid_, &status, WNOHANG) == pid_) {
      pid_ = -1;
      break;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  throw std::runtime_error(options_.command[0] + " does not answer; its output ends:\n" +
                           log_end());
}

int Process::wait() {
  int status = 0;
  ::waitpid(pid_, &status, 0);
  pid_ = -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

std::uint64_t Process::cpu_ns() const {
  clockid_t clock{};
  timespec time{};
  if (::clock_getcpuclockid(pid_, &clock) == 0 && ::clock_gettime(clock, &time) == 0) {
    return static_cast<std::uint64_t>(time.tv_sec) * 1'000'000'000 +
           static_cast<std::uint64_t>(time.tv_nsec);
  }
  std::ifstream in("/proc/" + std::to_string(pid_) + "/stat");
  std::string line;
  std::getline(in, line);
  auto ticks = ticks_of_stat(line);
  if (!ticks) throw std::runtime_error(options_.command[0] + " has ended:\n" + log_end());
  return *ticks * 1'000'000'000 / static_cast<std::uint64_t>(::sysconf(_SC_CLK_TCK));
}

std::string Process::log_end() const {
  std::ifstream in(options_.directory + "/log");
  std::stringstream text;
  text << in.rdbuf();
  std::string all = text.str();
  return all.size() <= 2000 ? all : all.substr(all.size() - 2000);
}

std::optional<std::uint64_t> ticks_of_stat(std::string_view line) {
  // The second field is the program's name in brackets, and may hold spaces and brackets itself.
  std::size_t name_end = line.rfind(')');
  if (name_end == std::string_view::npos) return std::nullopt;
  std::istringstream rest{std::string(line.substr(name_end + 1))};
  std::vector<std::string> fields{std::istream_iterator<std::string>(rest), {}};
  constexpr std::size_t kUser = 11;  // of the fields behind the name
  constexpr std::size_t kSystem = 12;
  if (fields.size() <= kSystem) return std::nullopt;
  std::uint64_t sum = 0;
  for (const std::string& field : {fields[kUser], fields[kSystem]}) {
    std::uint64_t ticks = 0;
    const char* end = field.data() + field.size();
    auto [at, error] = std::from_chars(field.data(), end, ticks);
    if (error != std::errc() || at != end) return std::nullopt;
    sum += ticks;
  }
  return sum;
}

std::vector<std::uint16_t> free_ports(std::size_t count) {
  std::vector<std::uint16_t> ports;
  std::vector<int> held;  // open until all are chosen, so that no two are the same
  for (std::size_t i = 0; i < count; ++i) {
    int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address = loopback(0);
    socklen_t size = sizeof address;
    if (fd < 0 || ::bind(fd, reinterpret_cast<sockaddr*>(&address), size) != 0 ||
        ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
      throw std::runtime_error("no free port on 127.0.0.1");
    }
    held.push_back(fd);
    ports.push_back(ntohs(address.sin_port));
  }
  for (int fd : held) ::close(fd);
  return ports;
}

std::vector<int> allowed_cpus() {
  cpu_set_t allowed;
  std::vector<int> out;
  if (::sched_getaffinity(0, sizeof allowed, &allowed) != 0) return out;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &allowed)) out.push_back(cpu);
  }
  return out;
}

void use_cpus(const std::vector<int>& cpus) {
  cpu_set_t set = set_of(cpus);
  ::sched_setaffinity(0, sizeof set, &set);
}

}  // namespace weir::bench
