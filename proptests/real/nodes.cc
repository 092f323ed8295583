#include <weir/proptests/real/nodes.h>

#include <fcntl.h>
#include <fmt/format.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <utility>

namespace weir::real {

Nanos monotonic() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

Nodes::Nodes(const Network& network, NodesOptions options)
    : network_(network), options_(std::move(options)), processes_(network.size()) {
  std::filesystem::create_directories(options_.directory);
  std::ofstream rules(options_.directory + "/rules.yaml");
  rules << options_.rules;
  if (!rules.flush()) throw std::runtime_error("cannot write to " + options_.directory);
  rpc::NodeClientOptions client;
  client.address = kClients;
  client.breaker_misses = 0;
  client.backoff_max = 100 * kMillisecond;
  for (std::uint32_t i = 0; i < network.size(); ++i) {
    write_config(i);
    network.within(i, [&] { processes_[i].client = std::make_unique<rpc::NodeClient>(client); });
  }
}

Nodes::~Nodes() {
  for (std::uint32_t i = 0; i < processes_.size(); ++i) kill(i);
}

std::string Nodes::directory_of(std::uint32_t node) const {
  return fmt::format("{}/n{}", options_.directory, node + 1);
}

std::string Nodes::log_path(std::uint32_t node) const {
  return directory_of(node) + "/node.log";
}

void Nodes::write_config(std::uint32_t node) const {
  std::filesystem::create_directories(directory_of(node));
  std::ofstream out(directory_of(node) + "/node.yaml");
  out << "cluster: {name: five, secret: not-a-secret-for-real-use}\n"
      << fmt::format("region: r{}\nnode: n{}\n", node + 1, node + 1)
      << fmt::format("threads: 2\nlisten: {{peers: '{}', clients: '{}'}}\n",
                     network_.listen_address(node), kClients)
      << "rules: ../rules.yaml\ndrain: 0\nstorage: {path: data, map_size: 1GiB}\npeers:\n";
  for (std::uint32_t peer = 0; peer < processes_.size(); ++peer) {
    if (peer == node) continue;
    out << fmt::format("  - {{region: r{}, node: n{}, address: '{}'}}\n", peer + 1, peer + 1,
                       network_.peer_address(node, peer));
  }
  if (!out.flush()) throw std::runtime_error("cannot write to " + directory_of(node));
}

bool Nodes::all_running() const {
  return std::all_of(processes_.begin(), processes_.end(),
                     [](const Process& process) { return process.state == State::running; });
}

void Nodes::start(std::uint32_t node, Nanos clock_offset) {
  if (processes_[node].state == State::stopping) {
    processes_[node].start_when_down = clock_offset;
  } else if (processes_[node].state == State::down) {
    spawn(node, clock_offset);
  }
}

void Nodes::spawn(std::uint32_t node, Nanos clock_offset) {
  Process& process = processes_[node];
  std::string config = directory_of(node) + "/node.yaml";
  std::string log = log_path(node);
  std::string offset = fmt::format("--clock-offset={}ms", clock_offset / kMillisecond);
  if (clock_offset / kMillisecond == 0) offset = "--clock-offset=0s";
  const char* arguments[] = {"weir-node", "--config", config.c_str(), offset.c_str(), nullptr};
  int space = network_.descriptor(node);
  pid_t parent = ::getpid();
  Run run;
  run.node = node;
  run.begin = monotonic();
  pid_t pid = ::fork();
  if (pid < 0) throw std::runtime_error("fork failed");
  if (pid == 0) {
    // Only async-signal-safe calls: other threads may have held locks at the fork.
    ::setpgid(0, 0);  // Ctrl-C is for us
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    sigset_t none;
    sigemptyset(&none);
    ::sigprocmask(SIG_SETMASK, &none, nullptr);
    if (::getppid() != parent || ::setns(space, CLONE_NEWNET) != 0) ::_exit(126);
    int fd = ::open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (fd >= 0) {
      ::dup2(fd, 1);
      ::dup2(fd, 2);
    }
    ::execv(options_.program.c_str(), const_cast<char* const*>(arguments));
    ::_exit(127);
  }
  process.pid = pid;
  process.state = State::running;
  process.start_when_down.reset();
  process.runs.push_back(std::move(run));
}

void Nodes::ended(Process& process) {
  process.pid = -1;
  process.state = State::down;
}

bool Nodes::kill(std::uint32_t node) {
  Process& process = processes_[node];
  if (process.pid <= 0) return false;
  Run& run = process.runs.back();
  Nanos now = monotonic();
  if (process.state == State::paused) run.pauses.back().second = now;
  run.end = std::min(run.end, now);
  ::kill(process.pid, SIGKILL);
  int code = 0;
  while (::waitpid(process.pid, &code, 0) < 0 && errno == EINTR) continue;
  ended(process);
  return true;
}

bool Nodes::stop(std::uint32_t node) {
  Process& process = processes_[node];
  if (process.state != State::running) return false;
  process.runs.back().end = monotonic();
  process.stop_deadline = process.runs.back().end + options_.stop_patience;
  process.state = State::stopping;
  ::kill(process.pid, SIGTERM);
  return true;
}

bool Nodes::pause(std::uint32_t node) {
  Process& process = processes_[node];
  if (process.state != State::running) return false;
  process.runs.back().pauses.emplace_back(monotonic(), kNever);
  process.state = State::paused;
  ::kill(process.pid, SIGSTOP);
  return true;
}

bool Nodes::resume(std::uint32_t node) {
  Process& process = processes_[node];
  if (process.state != State::paused) return false;
  ::kill(process.pid, SIGCONT);
  process.runs.back().pauses.back().second = monotonic();
  process.state = State::running;
  return true;
}

std::vector<std::string> Nodes::poll() {
  std::vector<std::string> out;
  for (std::uint32_t i = 0; i < processes_.size(); ++i) {
    Process& process = processes_[i];
    if (process.pid <= 0) continue;
    int code = 0;
    if (::waitpid(process.pid, &code, WNOHANG) == process.pid) {
      bool told = process.state == State::stopping;
      bool clean = WIFEXITED(code) && WEXITSTATUS(code) == 0;
      process.runs.back().end = std::min(process.runs.back().end, monotonic());
      process.runs.back().clean = told && clean;
      ended(process);
      if (!told || !clean) {
        out.push_back(fmt::format("node {} ended {}, {} {}; see {}", i + 1,
                                  told ? "when told to stop" : "without being told to",
                                  WIFEXITED(code) ? "exit code" : "signal",
                                  WIFEXITED(code) ? WEXITSTATUS(code) : WTERMSIG(code),
                                  log_path(i)));
      }
    } else if (process.state == State::stopping && monotonic() > process.stop_deadline) {
      out.push_back(
          fmt::format("node {} did not stop within {} s", i + 1, options_.stop_patience / kSecond));
      kill(i);
    }
    if (process.state == State::down && process.start_when_down) {
      spawn(i, *std::exchange(process.start_when_down, std::nullopt));
    }
  }
  return out;
}

void Nodes::lose_disk(std::uint32_t node) {
  std::filesystem::remove_all(directory_of(node) + "/data");
}

std::vector<Run> Nodes::runs() const {
  std::vector<Run> out;
  for (const Process& process : processes_) {
    out.insert(out.end(), process.runs.begin(), process.runs.end());
  }
  return out;
}

std::string Nodes::status(std::uint32_t node) const {
  return processes_[node].client->status();
}

}  // namespace weir::real
