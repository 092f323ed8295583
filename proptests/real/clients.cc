#include <weir/proptests/real/clients.h>

#include <fmt/format.h>

#include <chrono>
#include <ctime>
#include <random>

#include <weir/proptests/real/nodes.h>

namespace weir::real {
namespace {

constexpr std::uint32_t kSharedKeys = 3;
constexpr std::uint32_t kQuotaKeys = 2;

Nanos wall() {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  return static_cast<Nanos>(now.tv_sec) * kSecond + now.tv_nsec;
}

}  // namespace

std::string rules_yaml(bool commit_is_async) {
  constexpr const char* kText = R"(domain: five
rules:
  - name: commit
    match: {{counter: commit}}
    key: [key]
    limit: 1000000000000
    window: 365d
    durability: {}
    on_failure: closed
  - name: async
    match: {{counter: async}}
    key: [key]
    limit: 1000000000000
    window: 365d
    on_failure: closed
  - name: quota
    match: {{counter: quota}}
    key: [key]
    limit: {}
    window: {}s
    on_failure: closed
)";
  return fmt::format(fmt::runtime(kText), commit_is_async ? "async" : "commit", kQuotaLimit,
                     kQuotaWindow / kSecond);
}

Operation call(rpc::NodeClient& client, std::uint32_t node, Counter counter, const std::string& key,
               std::uint64_t hits) {
  Operation out;
  out.node = node;
  out.counter = counter;
  out.key = key;
  out.hits = hits;
  out.kind = hits > 0 ? Kind::add : Kind::read;
  rpc::CheckItem item{"five", {{"counter", std::string(to_string(counter))}, {"key", key}}, hits};
  out.start = monotonic();
  Reply reply = client.check(item);
  out.end = monotonic();
  const Status* status = reply.decider();
  if (!reply.error.empty() || status == nullptr || status->degraded) {
    out.error = !reply.error.empty() ? reply.error.to_string()
                : status == nullptr  ? "no rule"
                                     : "degraded";
    return out;
  }
  out.result = reply.allowed ? Result::ok : Result::denied;
  out.used = status->limit - status->remaining;
  // A window ends at a multiple of its length of the node's clock, which is near ours.
  if (counter == Counter::quota) {
    out.window = (wall() + status->reset + kQuotaWindow / 2) / kQuotaWindow - 1;
  }
  return out;
}

Clients::Clients(const Network& network, std::uint32_t per_node, std::uint64_t seed)
    : count_(per_node * network.size()), workers_(count_) {
  rpc::NodeClientOptions options;
  options.address = Nodes::kClients;
  options.deadline = 2 * kSecond;
  options.breaker_misses = 0;  // a node that was killed comes back, and is wanted at once
  options.backoff_max = 100 * kMillisecond;
  for (std::uint32_t i = 0; i < count_; ++i) {
    workers_[i].number = i;
    workers_[i].node = i % network.size();
    network.within(workers_[i].node,
                   [&] { workers_[i].client = std::make_unique<rpc::NodeClient>(options); });
  }
  for (Worker& worker : workers_) {
    worker.thread = std::thread([this, &worker, seed] { run(worker, seed); });
  }
}

Clients::~Clients() {
  stop();
}

void Clients::stop() {
  stopping_ = true;
  for (Worker& worker : workers_) {
    if (worker.thread.joinable()) worker.thread.join();
  }
}

std::vector<Operation> Clients::take() {
  std::vector<Operation> out;
  for (Worker& worker : workers_) {
    out.insert(out.end(), std::make_move_iterator(worker.operations.begin()),
               std::make_move_iterator(worker.operations.end()));
    worker.operations.clear();
  }
  return out;
}

void Clients::run(Worker& worker, std::uint64_t seed) {
  std::seed_seq seeds{static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32),
                      worker.number};
  std::mt19937_64 random(seeds);
  auto below = [&random](std::uint64_t n) { return static_cast<std::uint32_t>(random() % n); };
  const std::string own = fmt::format("client-{}", worker.number);
  bool answered = true;
  while (!stopping_) {
    std::uint32_t kind = below(100);
    Counter counter = kind < 20 ? Counter::quota : kind < 60 ? Counter::commit : Counter::async;
    // While a node is away it is only read from: every unanswered add makes the checks weaker.
    bool add = answered && (counter == Counter::quota || below(100) < 60);
    std::string key;
    if (counter == Counter::quota) {
      key = fmt::format("quota-{}", below(kQuotaKeys));
    } else if (add) {
      key = below(2) == 0 ? own : fmt::format("shared-{}", below(kSharedKeys));
    } else {
      std::uint32_t which = below(3);
      key = which == 0   ? own
            : which == 1 ? fmt::format("shared-{}", below(kSharedKeys))
                         : fmt::format("client-{}", below(count_));
    }
    std::uint64_t hits = !add ? 0 : counter == Counter::quota ? 1 + below(3) : 1 + below(5);
    Operation operation = call(*worker.client, worker.node, counter, key, hits);
    operation.client = worker.number;
    answered = operation.result != Result::unknown;
    worker.operations.push_back(std::move(operation));
    std::this_thread::sleep_for(std::chrono::milliseconds(answered ? below(16) : 40));
  }
}

}  // namespace weir::real
