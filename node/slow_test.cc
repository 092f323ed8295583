// Real nodes that are slow instead of dead: stopped, or with a disk that stalls. Callers must get
// their answer in time all the same, and the node must not grow.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <thread>

#include <cluster/cluster.h>
#include <weir/limits/rules/rules_yaml.h>
#include <weir/rpc/client/client.h>

namespace weir::examples {
namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kRules = R"(domain: api
rules:
  - name: quick
    match: {mode: quick}
    key: [key]
    limit: 1000000000
    window: 365d
  - name: costly
    match: {mode: costly}
    key: [key]
    limit: 1000000000
    window: 365d
    durability: commit
    on_failure: closed
)";

/// Far more than a deadline, far less than a stall: machines that run tests are busy.
constexpr auto kTolerance = std::chrono::milliseconds(400);

class SlowTest : public ::testing::Test {
 protected:
  SlowTest()
      : directory_(std::filesystem::temp_directory_path() /
                   fmt::format("weir-slow-{}", ::getpid())) {}
  ~SlowTest() override { std::filesystem::remove_all(directory_); }

  ClusterOptions options(std::vector<std::string> regions) const {
    ClusterOptions made;
    made.node_program = WEIR_NODE_PROGRAM;
    made.directory = directory_.string();
    made.regions = std::move(regions);
    made.rules = kRules;
    made.more_config = "max_commit_wait: 300ms\n";
    return made;
  }

  static ClientOptions client_options(std::vector<std::string> nodes) {
    ClientOptions made;
    made.nodes = std::move(nodes);
    made.deadline = 20 * kMillisecond;
    made.rules = parse_rules(kRules, "rules.yaml").rules;
    return made;
  }
  /// One that goes on asking, whatever it missed.
  static ClientOptions stubborn(const std::string& node) {
    ClientOptions out = client_options({node});
    out.connection.breaker_misses = 0;
    return out;
  }

  static CheckItem item(const std::string& mode, const std::string& key) {
    return {"api", {{"mode", mode}, {"key", key}}, 1};
  }

  static std::size_t resident_kib(pid_t pid) {
    std::ifstream status(fmt::format("/proc/{}/status", pid));
    for (std::string line; std::getline(status, line);) {
      if (line.starts_with("VmRSS:")) return std::stoul(line.substr(6));
    }
    return 0;
  }

  std::filesystem::path directory_;
};

/// Calls one after the other, and how long they took.
struct Caller {
  Client& client;
  std::vector<Clock::duration> took{};
  std::vector<ClientReply> replies{};

  void call(const CheckItem& item) {
    auto start = Clock::now();
    replies.push_back(client.check(item));
    took.push_back(Clock::now() - start);
  }
  std::string text() {
    std::sort(took.begin(), took.end());
    auto us = [&](double q) {
      auto at = static_cast<std::size_t>(q * static_cast<double>(took.size() - 1));
      return std::chrono::duration_cast<std::chrono::microseconds>(took[at]).count();
    };
    return fmt::format("{} calls: p50 {} us, p99 {} us, max {} us", took.size(), us(0.5), us(0.99),
                       us(1));
  }
  std::size_t by(Source source) const {
    return static_cast<std::size_t>(std::count_if(
        replies.begin(), replies.end(), [&](const ClientReply& r) { return r.source == source; }));
  }
};

bool connects(const Client& client, std::size_t nodes) {
  for (int i = 0; i < 500 && client.connected() < nodes; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return client.connected() == nodes;
}

TEST_F(SlowTest, AStoppedNodeCostsDeadlinesUntilItsCircuitOpens) {
  Cluster cluster(options({"eu", "us"}));
  cluster.start_all();
  Client client(client_options({cluster.client_address(0), cluster.client_address(1)}));
  ASSERT_TRUE(connects(client, 2));
  Caller before{client};
  for (int k = 0; k < 100; ++k) before.call(item("quick", "k" + std::to_string(k)));
  EXPECT_EQ(before.by(Source::node), 100u);

  cluster.kill(0, SIGSTOP);
  Caller during{client};
  for (int k = 0; k < 300; ++k) during.call(item("quick", "k" + std::to_string(k % 100)));
  fmt::print("healthy  {}\nstopped  {}, {} of them without a node\n", before.text(), during.text(),
             during.by(Source::fallback));
  EXPECT_LT(during.took.back(), std::chrono::milliseconds(20) + kTolerance);
  // A few missed their deadline; then the other node answered for this one.
  EXPECT_GE(during.by(Source::fallback), 1u);
  EXPECT_LE(during.by(Source::fallback), 20u);
  EXPECT_GE(during.by(Source::node), 280u);
  EXPECT_GT(client.counters().failovers, 0u);
  cluster.kill(0, SIGCONT);
}

TEST_F(SlowTest, TheOnlyNodeStoppedLeavesTheRulesToDecide) {
  Cluster cluster(options({"eu"}));
  cluster.start(0);
  Client client(client_options({cluster.client_address(0)}));
  ASSERT_TRUE(connects(client, 1));
  cluster.kill(0, SIGSTOP);
  Caller during{client};
  for (int k = 0; k < 200; ++k) {
    during.call(item(k % 2 == 0 ? "quick" : "costly", "k" + std::to_string(k)));
    const ClientReply& reply = during.replies.back();
    EXPECT_TRUE(reply.degraded);
    EXPECT_EQ(reply.allowed, k % 2 == 0);
    EXPECT_EQ(reply.reason, k % 2 == 0 ? "" : "limiter_unavailable");
  }
  fmt::print("stopped  {}\n", during.text());
  EXPECT_LT(during.took.back(), std::chrono::milliseconds(20) + kTolerance);
  EXPECT_EQ(client.counters().degraded, 200u);
  cluster.kill(0, SIGCONT);
}

TEST_F(SlowTest, AStalledDiskNeitherHoldsCallersNorGrows) {
  ClusterOptions with_stall = options({"eu"});
  std::string stall = (directory_ / "stall").string();
  // A node built with ASan wants its run-time first, and works without that.
  with_stall.environment = {"LD_PRELOAD=" WEIR_STALL_LIBRARY, "WEIR_STALL=" + stall,
                            "ASAN_OPTIONS=verify_asan_link_order=0"};
  Cluster cluster(std::move(with_stall));
  cluster.start(0);
  ClientOptions patient = client_options({cluster.client_address(0)});
  patient.deadline = 2 * kSecond;
  Client slow(patient);
  ASSERT_TRUE(connects(slow, 1));
  EXPECT_EQ(slow.check(item("costly", "k")).source, Source::node);
  std::size_t resident = resident_kib(cluster.pid(0));

  std::ofstream(stall) << "now";
  // What comes now waits for the disk: beyond max_commit_wait, others are turned away.
  Client client(client_options({cluster.client_address(0)}));
  ASSERT_TRUE(connects(client, 1));
  Client waiting(stubborn(cluster.client_address(0)));
  ASSERT_TRUE(connects(waiting, 1));
  auto end = Clock::now() + std::chrono::seconds(3);
  std::atomic<std::uint64_t> flooded{0};
  std::thread flood([&] {  // as fast as it goes, with a deadline like any other's
    Client many(stubborn(cluster.client_address(0)));
    std::vector<CheckItem> items(1000, item("costly", "flood"));
    while (Clock::now() < end) {
      many.check(items);
      flooded += items.size();
    }
  });
  Caller quick{client};
  Caller costly{waiting};
  std::size_t shed = 0;
  while (Clock::now() < end) {
    quick.call(item("quick", "k"));
    costly.call(item("costly", "k"));
    shed += costly.replies.back().cause.to_string().find("overloaded: ") == 0;
    EXPECT_FALSE(costly.replies.back().allowed);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  flood.join();
  std::size_t grown = resident_kib(cluster.pid(0));
  auto status = nlohmann::json::parse(cluster.status(0), nullptr, false);
  ASSERT_TRUE(status.is_object());
  fmt::print(
      "disk stalled: rules that need no disk {}; those that do {}, {} shed\n"
      "resident before {} KiB, after {} flooded requests {} KiB; {} wait\n",
      quick.text(), costly.text(), shed, resident, flooded.load(), grown,
      status["waiting_for_commit"].get<int>());
  EXPECT_LT(quick.took.back(), std::chrono::milliseconds(20) + kTolerance);
  EXPECT_LT(costly.took.back(), std::chrono::milliseconds(20) + kTolerance);
  EXPECT_GT(shed, 0u);
  EXPECT_GT(status["shed"].get<std::uint64_t>(), 0u);
  EXPECT_LE(status["waiting_for_commit"].get<std::size_t>(), 102'000u);
  EXPECT_LT(grown, resident + 400 * 1024);

  std::filesystem::remove(stall);
  ClientReply reply;
  for (int i = 0; i < 100; ++i) {
    reply = slow.check(item("costly", "k"));
    if (reply.source == Source::node) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  EXPECT_EQ(reply.source, Source::node) << reply.cause.to_string();
  EXPECT_TRUE(reply.allowed);
}

}  // namespace
}  // namespace weir::examples
