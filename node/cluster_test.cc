// Real node processes, real sockets, real LMDB, real kill -9.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <nlohmann/json.hpp>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <filesystem>
#include <fstream>
#include <future>
#include <random>
#include <thread>

#include <cluster/cluster.h>
#include <load/load.h>
#include <weir/rpc/client/client.h>
#include <weir/rpc/peers/peers.h>

namespace weir::examples {
namespace {

constexpr const char* kRules = R"(domain: api
rules:
  - name: counted
    match: {mode: counted}
    key: [key]
    limit: 1000000000000
    window: 365d
    algorithm: fixed_window
    durability: commit
  - name: quick
    match: {mode: quick}
    key: [key]
    limit: 1000000000000
    window: 365d
    algorithm: fixed_window
  - name: bucket
    match: {mode: bucket}
    key: [key]
    limit: 10
    window: 1h
    algorithm: token_bucket
    burst: 10
  - name: rights
    match: {mode: rights}
    key: [key]
    limit: 90
    window: 365d
    enforcement: escrow
  - name: few
    match: {mode: few}
    key: [key]
    limit: 3
    window: 365d
    enforcement: escrow
  - name: parts
    match: {mode: parts}
    key: [key]
    limit: 40
    window: 1s
    algorithm: token_bucket
    burst: 6
    enforcement: escrow
  - name: home
    match: {mode: home}
    key: [key]
    limit: 100
    window: 365d
    enforcement: home
    on_failure: closed
  - name: beside
    match: {mode: home}
    key: [key]
    limit: 1000000
    window: 365d
  - name: home-open
    match: {mode: home-open}
    key: [key]
    limit: 50
    window: 365d
    enforcement: home
)";

class ClusterTest : public ::testing::Test {
 protected:
  ClusterTest()
      : directory_(std::filesystem::temp_directory_path() /
                   fmt::format("weir-cluster-{}-{}", ::getpid(),
                               ::testing::UnitTest::GetInstance()->random_seed())) {}
  ~ClusterTest() override {
    if (!HasFailure()) std::filesystem::remove_all(directory_);
  }

  ClusterOptions options(std::vector<std::string> regions) const {
    ClusterOptions made;
    made.node_program = WEIR_NODE_PROGRAM;
    made.directory = directory_.string();
    made.regions = std::move(regions);
    made.rules = kRules;
    return made;
  }

  static rpc::NodeClientOptions client_options(const std::string& address) {
    rpc::NodeClientOptions made;
    made.address = address;
    made.deadline = 2 * kSecond;
    made.breaker_misses = 0;
    made.backoff_max = 100 * kMillisecond;
    return made;
  }

  static rpc::CheckItem item(const std::string& mode, const std::string& key, std::uint64_t hits) {
    return {"api", {{"mode", mode}, {"key", key}}, hits};
  }

  static std::uint64_t used(const Cluster& cluster, std::size_t node, const std::string& mode,
                            const std::string& key) {
    rpc::NodeClient client(client_options(cluster.client_address(node)));
    Reply reply = client.check(item(mode, key, 0));
    EXPECT_EQ(reply.error.to_string(), "");
    const Status* status = reply.decider();
    return status == nullptr ? 0 : status->limit - status->remaining;
  }

  static bool converges(const Cluster& cluster, Nanos patience = 60 * kSecond) {
    for (Nanos waited = 0; waited < patience; waited += 100 * kMillisecond) {
      if (cluster.converged()) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
    return false;
  }

  std::filesystem::path directory_;
};

std::string http(const std::string& address, const std::string& request) {
  auto colon = address.find(':');
  int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(static_cast<std::uint16_t>(std::stoi(address.substr(colon + 1))));
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  std::string answer;
  if (::connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof to) == 0) {
    if (::send(fd, request.data(), request.size(), MSG_NOSIGNAL) > 0) {
      char buffer[4096];
      for (ssize_t got; (got = ::recv(fd, buffer, sizeof buffer, 0)) > 0;) {
        answer.append(buffer, static_cast<std::size_t>(got));
      }
    }
  }
  ::close(fd);
  return answer;
}

std::string http_get(const std::string& address, const std::string& path) {
  return http(address, "GET " + path + " HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
}

std::string http_check(const std::string& address, const std::string& body) {
  return http(address, fmt::format("POST /v1/check HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
                                   "Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{}",
                                   body.size(), body));
}

/// Checks over one connection that is kept, and made anew after an answer that closes it.
class KeptHttp {
 public:
  explicit KeptHttp(const std::string& address)
      : port_(static_cast<std::uint16_t>(std::stoi(address.substr(address.find(':') + 1)))) {}
  ~KeptHttp() { close(); }
  KeptHttp(const KeptHttp&) = delete;
  KeptHttp& operator=(const KeptHttp&) = delete;

  /// The status; 0: no answer.
  int check(const std::string& mode, const std::string& key) {
    if (!hold()) return 0;
    const std::string body =
        fmt::format(R"({{"domain":"api","descriptor":{{"mode":"{}","key":"{}"}}}})", mode, key);
    const std::string request = fmt::format(
        "POST /v1/check HTTP/1.1\r\nHost: x\r\nPrefer: return=minimal\r\n"
        "Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{}",
        body.size(), body);
    std::string answer;
    char buffer[4096];
    if (::send(fd_, request.data(), request.size(), MSG_NOSIGNAL) > 0) {
      // An answer in brief has no body.
      while (answer.find("\r\n\r\n") == std::string::npos) {
        const ssize_t got = ::recv(fd_, buffer, sizeof buffer, 0);
        if (got <= 0) break;
        answer.append(buffer, static_cast<std::size_t>(got));
      }
    }
    if (answer.size() < 12) return close(), 0;
    if (answer.find("Connection: close") != std::string::npos) close();
    return std::stoi(answer.substr(9, 3));
  }

  /// Connects if it is not, or not any more.
  bool hold() {
    char byte = 0;
    if (fd_ >= 0 && ::recv(fd_, &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 0) close();
    if (fd_ >= 0) return true;
    fd_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_port = htons(port_);
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (::connect(fd_, reinterpret_cast<sockaddr*>(&to), sizeof to) != 0) close();
    return fd_ >= 0;
  }

 private:
  void close() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }

  std::uint16_t port_;
  int fd_ = -1;
};

/// Sends increments to one node until told to stop, and keeps books.
struct Sender {
  const Cluster& cluster;
  std::size_t node;
  std::atomic<std::uint64_t>& acknowledged;
  std::uint64_t wanted;
  std::map<std::string, std::uint64_t> acked{};
  std::map<std::string, std::uint64_t> attempted{};

  void run(const rpc::NodeClientOptions& options) {
    rpc::NodeClient client(options);
    std::mt19937_64 random(node + 1);
    while (acknowledged < wanted) {
      std::vector<rpc::CheckItem> items;
      for (int i = 0; i < 25; ++i) {
        std::string key = "k" + std::to_string(random() % 200);
        items.push_back({"api", {{"mode", "counted"}, {"key", key}}, 1});
        ++attempted[key];
      }
      std::vector<Reply> replies = client.check(items);
      bool failed = false;
      for (std::size_t i = 0; i < items.size(); ++i) {
        if (replies[i].error.empty() && replies[i].allowed) {
          ++acked[items[i].entries[1].second];
          ++acknowledged;
        }
        failed |= !replies[i].error.empty();
      }
      if (failed) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  }
};

TEST_F(ClusterTest, TheLiveBoundGrowsWhileARegionIsCutOff) {
  Cluster cluster(options({"eu", "us"}));
  cluster.start_all();
  rpc::NodeClient eu(client_options(cluster.client_address(0)));
  rpc::NodeClient us(client_options(cluster.client_address(1)));
  rpc::CheckItem ask = item("quick", "k", 1);
  EXPECT_FALSE(eu.check(ask).decider()->over_admission);
  ask.wants_bound = true;
  auto bound = [&] { return eu.check(ask).decider()->over_admission.value_or(~0ull); };
  auto consume = [&](int times) {
    for (int i = 0; i < times; ++i) {
      EXPECT_TRUE(us.check(item("quick", "k", 10)).allowed);
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  };
  consume(150);  // 3 s at about 500 units a second
  EXPECT_LT(bound(), 1000u);
  cluster.cut(1);
  consume(100);
  // What it admitted meanwhile, of which nothing is known here.
  std::uint64_t after_two = bound();
  EXPECT_GE(after_two, 600u);
  consume(50);
  EXPECT_GT(bound(), after_two);
  cluster.heal(1);
  ASSERT_TRUE(converges(cluster));
  EXPECT_LT(bound(), after_two);
}

TEST_F(ClusterTest, RulesChangeWhileANodeRuns) {
  Cluster cluster(options({"eu"}));
  cluster.start_all();
  std::filesystem::path file = directory_ / "rules.yaml";
  rpc::NodeClient client(client_options(cluster.client_address(0)));
  EXPECT_TRUE(client.check(item("bucket", "k", 10)).allowed);
  EXPECT_FALSE(client.check(item("bucket", "k", 1)).allowed);
  auto rules_file = [&] { return nlohmann::json::parse(cluster.status(0)).at("rules_file"); };
  std::string first = rules_file().at("version");
  auto wait_for = [&](auto seen) {
    for (int i = 0; i < 200 && !seen(); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    EXPECT_TRUE(seen());
  };
  std::string changed = kRules;
  changed.replace(changed.find("burst: 10"), 9, "burst: 15");
  std::ofstream(directory_ / "new.yaml") << changed;
  std::filesystem::rename(directory_ / "new.yaml", file);
  wait_for([&] { return rules_file().at("version") != first; });
  EXPECT_TRUE(client.check(item("bucket", "k", 5)).allowed);
  EXPECT_FALSE(client.check(item("bucket", "k", 1)).allowed);
  std::string second = rules_file().at("version");

  std::ofstream(file) << "domain: api\nrules:\n  - name: r\n    limit: 1e3\n    window: 1m\n";
  wait_for([&] { return rules_file().at("refused") == 1; });
  EXPECT_NE(rules_file().at("last_error").get<std::string>().find("rules.yaml:4:12"),
            std::string::npos);
  EXPECT_EQ(rules_file().at("version"), second);
  EXPECT_FALSE(client.check(item("bucket", "k", 1)).allowed);

  std::ofstream(file) << changed;
  wait_for([&] { return !rules_file().contains("last_error"); });
  ::kill(cluster.pid(0), SIGHUP);
  EXPECT_EQ(rules_file().at("version"), second);
  EXPECT_EQ(rules_file().at("reloads"), 1);
}

TEST_F(ClusterTest, EveryAcknowledgedIncrementOutlivesKillNine) {
  constexpr std::uint64_t kWanted = 50'000;
  Cluster cluster(options({"eu", "us", "ap"}));
  cluster.start_all();
  std::atomic<std::uint64_t> acknowledged{0};
  std::vector<Sender> senders;
  for (std::size_t i = 0; i < cluster.size(); ++i) {
    senders.push_back({cluster, i, acknowledged, kWanted});
  }
  std::vector<std::thread> threads;
  for (Sender& sender : senders) {
    threads.emplace_back([&sender, this] {
      sender.run(client_options(sender.cluster.client_address(sender.node)));
    });
  }
  // Kills spread over the run by progress, not by time: a fast machine must not finish before.
  std::mt19937_64 random(7);
  int kills = 0;
  for (std::uint64_t mark = kWanted / 12; mark < kWanted; mark += kWanted / 12) {
    while (acknowledged < mark) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    std::this_thread::sleep_for(std::chrono::milliseconds(random() % 40));
    std::size_t victim = random() % cluster.size();
    cluster.kill(victim, SIGKILL);
    ++kills;
    std::this_thread::sleep_for(std::chrono::milliseconds(random() % 200));
    cluster.start(victim);
  }
  for (std::thread& thread : threads) thread.join();
  ASSERT_TRUE(converges(cluster)) << cluster.status(0) << cluster.status(1) << cluster.status(2);

  std::map<std::string, std::uint64_t> acked;
  std::map<std::string, std::uint64_t> attempted;
  for (const Sender& sender : senders) {
    for (const auto& [key, count] : sender.acked) acked[key] += count;
    for (const auto& [key, count] : sender.attempted) attempted[key] += count;
  }
  std::uint64_t unanswered = 0;
  for (const auto& [key, count] : attempted) {
    unanswered += count - acked[key];
    std::uint64_t first = used(cluster, 0, "counted", key);
    EXPECT_GE(first, acked[key]) << key;
    EXPECT_LE(first, count) << key;
    for (std::size_t i = 1; i < cluster.size(); ++i) {
      EXPECT_EQ(used(cluster, i, "counted", key), first) << key << " at node " << i;
    }
  }
  fmt::print("{} acknowledged, {} unanswered, {} kills\n", acknowledged.load(), unanswered, kills);
  for (std::size_t i = 0; i < cluster.size(); ++i) EXPECT_EQ(cluster.stop(i), 0);
}

TEST_F(ClusterTest, ACleanStopCommitsWhatWasNotYet) {
  Cluster cluster(options({"eu"}));
  cluster.start(0);
  rpc::NodeClient client(client_options(cluster.client_address(0)));
  for (int i = 0; i < 200; ++i)
    ASSERT_EQ(client.check(item("quick", "k", 3)).error.to_string(), "");
  auto began = std::chrono::steady_clock::now();
  EXPECT_EQ(cluster.stop(0), 0);
  std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
  fmt::print("stopped after {:.3f} s\n", took.count());
  cluster.start(0);
  EXPECT_EQ(used(cluster, 0, "quick", "k"), 600u);
}

TEST_F(ClusterTest, WhatANodeThatStoppedCountedIsElsewhere) {
  ClusterOptions seldom = options({"eu", "us"});
  seldom.more_config = "sync_interval: 1m\n";
  Cluster cluster(std::move(seldom));
  cluster.start_all();
  const auto is_up = [&] {
    const auto status = nlohmann::json::parse(cluster.status(0), nullptr, false);
    return status.is_object() && status["peers"][0]["up"].get<bool>();
  };
  for (int i = 0; i < 200 && !is_up(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  std::vector<rpc::CheckItem> items;
  for (int i = 0; i < 1000; ++i) items.push_back(item("quick", "k" + std::to_string(i % 500), 50));
  rpc::NodeClient client(client_options(cluster.client_address(0)));
  for (const Reply& reply : client.check(items)) ASSERT_EQ(reply.error.to_string(), "");
  EXPECT_EQ(used(cluster, 1, "quick", "k0"), 0u);
  EXPECT_EQ(cluster.stop(0), 0);
  std::uint64_t seen = 0;
  for (int i = 0; i < 500; ++i) seen += used(cluster, 1, "quick", "k" + std::to_string(i));
  EXPECT_EQ(seen, 50'000u);
}

TEST_F(ClusterTest, ANodeThatDrainsIsNotReadyAndAnswers) {
  ClusterOptions slow = options({"eu"});
  slow.drain = kMinute;
  Cluster cluster(std::move(slow));
  cluster.start(0);
  rpc::NodeClient client(client_options(cluster.client_address(0)));
  ASSERT_EQ(client.check(item("quick", "k", 1)).error.to_string(), "");
  ::kill(cluster.pid(0), SIGTERM);
  std::string ready;
  for (int i = 0; i < 100 && ready.find("503") == std::string::npos; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    ready = http_get(cluster.admin_address(0), "/readyz");
  }
  EXPECT_NE(ready.find("stopping: stopping soon, and still answering"), std::string::npos) << ready;
  EXPECT_NE(http_get(cluster.admin_address(0), "/healthz").find("200"), std::string::npos);
  EXPECT_EQ(client.check(item("quick", "k", 1)).error.to_string(), "");
  EXPECT_EQ(KeptHttp(cluster.http_address(0)).check("quick", "k"), 200);
  // A second signal does not wait.
  EXPECT_EQ(cluster.stop(0), 0);
  cluster.start(0);
  EXPECT_EQ(used(cluster, 0, "quick", "k"), 3u);
}

/// Keys in turn, a hundred requests a second, until it is over.
struct Traffic {
  std::atomic<bool> over{false};
  std::atomic<std::uint64_t> passed{0};

  static std::string key(int i) { return "k" + std::to_string(i % 20); }

  void every_10ms(const std::function<void(int)>& ask) const {
    auto next = std::chrono::steady_clock::now();
    for (int i = 0; !over; ++i) {
      ask(i);
      std::this_thread::sleep_until(next += std::chrono::milliseconds(10));
    }
  }

  /// Tells what did not pass.
  std::vector<std::string> by_client(const Cluster& cluster) {
    ClientOptions settings;
    for (std::size_t i = 0; i < cluster.size(); ++i) {
      settings.nodes.push_back(cluster.client_address(i));
    }
    settings.deadline = 2 * kSecond;
    settings.route_by = {"key"};
    Client client(settings);
    while (client.connected() < cluster.size()) std::this_thread::yield();
    std::vector<std::string> wrong;
    every_10ms([&](int i) {
      const std::string mode = i % 2 == 0 ? "quick" : "counted";
      const ClientReply reply = client.check({"api", {{"mode", mode}, {"key", key(i)}}, 1});
      const bool good = reply.error.empty() && reply.allowed && !reply.degraded;
      passed += good;
      if (!good) wrong.push_back(reply.error.to_string() + reply.cause.to_string());
    });
    return wrong;
  }

  /// As a balancer that probes each node every 30 ms.
  std::vector<std::string> by_http(const Cluster& cluster) {
    std::vector<std::unique_ptr<KeptHttp>> nodes;
    std::vector<bool> ready(cluster.size(), true);
    for (std::size_t i = 0; i < cluster.size(); ++i) {
      nodes.push_back(std::make_unique<KeptHttp>(cluster.http_address(i)));
    }
    std::vector<std::string> wrong;
    every_10ms([&](int i) {
      const std::size_t probed = static_cast<std::size_t>(i) % nodes.size();
      ready[probed] =
          http_get(cluster.admin_address(probed), "/readyz").find(" 200 ") != std::string::npos;
      std::size_t node = static_cast<std::size_t>(i / 3) % nodes.size();
      for (std::size_t tries = 0; tries < nodes.size() && !ready[node]; ++tries) {
        node = (node + 1) % nodes.size();
      }
      const int status = nodes[node]->check("quick", key(i));
      passed += status == 200;
      if (status != 200) wrong.push_back(fmt::format("{} from {}", status, cluster.region(node)));
    });
    return wrong;
  }
};

TEST_F(ClusterTest, ARollingRestartShowsNobodyAnError) {
  ClusterOptions short_drain = options({"eu", "us", "ap"});
  short_drain.drain = kSecond / 2;
  Cluster cluster(std::move(short_drain));
  cluster.start_all();
  ASSERT_TRUE(converges(cluster));
  Traffic traffic;
  std::vector<std::string> wrong[2];
  std::thread by_client([&] { wrong[0] = traffic.by_client(cluster); });
  std::thread by_http([&] { wrong[1] = traffic.by_http(cluster); });
  for (std::size_t i = 0; i < cluster.size(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    EXPECT_EQ(cluster.stop(i), 0);
    cluster.start(i);
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  traffic.over = true;
  by_client.join();
  by_http.join();
  EXPECT_EQ(wrong[0], std::vector<std::string>{});
  EXPECT_EQ(wrong[1], std::vector<std::string>{});
  fmt::print("{} passed\n", traffic.passed.load());
  ASSERT_TRUE(converges(cluster));
  std::uint64_t counted = 0;
  for (int i = 0; i < 20; ++i) {
    counted += used(cluster, 0, "quick", Traffic::key(i));
    counted += used(cluster, 0, "counted", Traffic::key(i));
  }
  EXPECT_EQ(counted, traffic.passed);
}

TEST_F(ClusterTest, ABucketSurvivesARestartAndIsSharedByRegions) {
  Cluster cluster(options({"eu", "us"}));
  cluster.start_all();
  {
    rpc::NodeClient client(client_options(cluster.client_address(0)));
    EXPECT_TRUE(client.check(item("bucket", "k", 8)).allowed);
  }
  ASSERT_TRUE(converges(cluster));
  std::this_thread::sleep_for(std::chrono::milliseconds(700));
  rpc::NodeClient other(client_options(cluster.client_address(1)));
  Reply denied = other.check(item("bucket", "k", 5));
  EXPECT_FALSE(denied.allowed);
  ASSERT_NE(denied.decider(), nullptr);
  EXPECT_GT(denied.decider()->retry_after, 17 * kMinute);
  cluster.kill(0, SIGKILL);
  cluster.start(0);
  rpc::NodeClient again(client_options(cluster.client_address(0)));
  EXPECT_FALSE(again.check(item("bucket", "k", 5)).allowed);
  EXPECT_TRUE(again.check(item("bucket", "k", 1)).allowed);
}

TEST_F(ClusterTest, ARegionThatWasCutOffCatchesUp) {
  Cluster cluster(options({"eu", "us", "ap"}));
  cluster.start_all();
  ASSERT_TRUE(converges(cluster));
  cluster.cut(2);
  std::vector<std::unique_ptr<rpc::NodeClient>> clients;
  for (std::size_t i = 0; i < 3; ++i) {
    clients.push_back(std::make_unique<rpc::NodeClient>(client_options(cluster.client_address(i))));
    for (int k = 0; k < 100; ++k) {
      ASSERT_EQ(clients[i]->check(item("quick", "k" + std::to_string(k), 1)).error.to_string(), "");
    }
  }
  std::this_thread::sleep_for(std::chrono::seconds(1));
  EXPECT_EQ(used(cluster, 2, "quick", "k7"), 1u);
  EXPECT_EQ(used(cluster, 0, "quick", "k7"), 2u);
  cluster.heal(2);
  ASSERT_TRUE(converges(cluster));
  for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(used(cluster, i, "quick", "k7"), 3u);
}

TEST_F(ClusterTest, ASplitBucketIsWholeWhereDemandIs) {
  Cluster cluster(options({"eu", "us", "ap"}));
  cluster.start_all();
  rpc::NodeClient client(client_options(cluster.client_address(1)));
  // By this clock. A node's may have stood still for its disk, and catch up: a second at most.
  using Clock = std::chrono::steady_clock;
  Clock::time_point begin = Clock::now();
  std::uint64_t admitted = 0;
  auto ask_for = [&](std::chrono::seconds time) {
    std::uint64_t before = admitted;
    for (Clock::time_point end = Clock::now() + time; Clock::now() < end;) {
      Reply reply = client.check(item("parts", "k", 1));
      EXPECT_EQ(reply.error.to_string(), "");
      admitted += reply.allowed;
      std::this_thread::sleep_for(std::chrono::milliseconds(reply.allowed ? 1 : 5));
      double passed = std::chrono::duration<double>(Clock::now() - begin).count();
      EXPECT_LE(static_cast<double>(admitted), 6 + 40 * (passed + 1));
    }
    return admitted - before;
  };
  // Its share is 2 of 6 and a third of the rate: 13 a second. A machine that is busy may take its
  // time, but then more than two thirds of all arrive.
  std::uint64_t most = 0;
  for (int i = 0; i < 15 && most < 80; ++i) most = std::max(most, ask_for(std::chrono::seconds(3)));
  EXPECT_GE(most, 80u);
}

TEST_F(ClusterTest, RightsReachDemandAndNeverMoreThanThereAre) {
  Cluster cluster(options({"eu", "us", "ap"}));
  cluster.start_all();
  std::vector<std::unique_ptr<rpc::NodeClient>> clients;
  for (std::size_t i = 0; i < 3; ++i) {
    clients.push_back(std::make_unique<rpc::NodeClient>(client_options(cluster.client_address(i))));
  }
  std::uint64_t spent = 0;
  auto spend = [&](std::size_t node) {
    Reply reply = clients[node]->check(item("rights", "k", 1));
    spent += reply.error.empty() && reply.allowed;
    return reply;
  };
  auto pause = [] { std::this_thread::sleep_for(std::chrono::milliseconds(50)); };
  auto whole = [&](std::size_t node) {
    return nlohmann::json::parse(cluster.status(node)).at("escrow").at("whole").get<bool>();
  };
  auto wait_for_all = [&] {
    for (int i = 0; i < 1200 && !(whole(0) && whole(1) && whole(2)); ++i) pause();
    for (std::size_t node = 0; node < 3; ++node) EXPECT_TRUE(whole(node)) << node;
  };
  // Nobody ever heard of any of them, so each has its share of the window that is open.
  wait_for_all();
  for (int i = 0; i < 10; ++i) EXPECT_TRUE(spend(0).allowed);
  EXPECT_EQ(spent, 10u);
  // Crashed and back, it is believed once the others have said that its disk held everything.
  cluster.kill(0, SIGKILL);
  cluster.start(0);
  clients[0] = std::make_unique<rpc::NodeClient>(client_options(cluster.client_address(0)));
  wait_for_all();
  // All the demand is in one region now, also for what eu had left but for its reserve.
  for (int i = 0; i < 2400 && spent < 89; ++i) {
    Reply reply = spend(2);
    ASSERT_EQ(reply.error.to_string(), "");
    if (!reply.allowed) pause();
  }
  EXPECT_GE(spent, 89u);
  for (std::size_t i = 0; i < 60; ++i) {
    spend(i % 3);
    pause();
  }
  EXPECT_LE(spent, 90u);
  EXPECT_FALSE(spend(1).allowed);
}

TEST_F(ClusterTest, ANodeThatIsStoppedLeavesItsRightsToTheOthers) {
  Cluster cluster(options({"eu", "us", "ap"}));
  cluster.start_all();
  auto escrow = [&](std::size_t node) {
    return nlohmann::json::parse(cluster.status(node)).at("escrow");
  };
  auto wait_for_all = [&] {
    for (std::size_t node = 0; node < cluster.size(); ++node) {
      for (int i = 0; i < 1200 && !escrow(node).at("whole").get<bool>(); ++i) {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
      }
      EXPECT_TRUE(escrow(node).at("whole").get<bool>()) << node;
    }
  };
  wait_for_all();
  std::uint64_t spent = 0;
  auto spend = [&](rpc::NodeClient& client, int tries, std::uint64_t until) {
    for (; tries > 0 && spent < until; --tries) {
      Reply reply = client.check(item("rights", "k", 1));
      spent += reply.error.empty() && reply.allowed;
      if (!reply.allowed) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
  };
  {
    rpc::NodeClient eu(client_options(cluster.client_address(0)));
    spend(eu, 5, 90);
  }
  rpc::NodeClient us(client_options(cluster.client_address(1)));
  spend(us, 1, 90);
  EXPECT_EQ(spent, 6u);
  ASSERT_TRUE(converges(cluster));
  auto began = std::chrono::steady_clock::now();
  EXPECT_EQ(cluster.stop(0), 0);
  std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
  fmt::print("stopped after {:.3f} s\n", took.count());
  EXPECT_LT(took.count(), 1.0);
  // Of its 30 units 5 are used; the others have the rest at once, but for what ap keeps in reserve.
  EXPECT_EQ(escrow(1).at("units_received"), 25);
  spend(us, 400, 80);
  EXPECT_EQ(spent, 80u);
  // Back, it gets what is left by asking.
  cluster.start(0);
  wait_for_all();
  rpc::NodeClient again(client_options(cluster.client_address(0)));
  spend(again, 400, 88);
  EXPECT_GE(spent, 88u);
  for (int i = 0; i < 20; ++i) {
    spend(again, 1, 100);
    spend(us, 1, 100);
  }
  EXPECT_LE(spent, 90u);
}

TEST_F(ClusterTest, ALimitBelowTheNumberOfNodesIsUsedUpFromOneOfThem) {
  Cluster cluster(options({"eu", "us", "ap", "sa", "af"}));
  cluster.start_all();
  auto escrow = [&](std::size_t node) {
    return nlohmann::json::parse(cluster.status(node)).at("escrow");
  };
  for (std::size_t node = 0; node < cluster.size(); ++node) {
    for (int i = 0; i < 1200 && !escrow(node).at("whole").get<bool>(); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    ASSERT_TRUE(escrow(node).at("whole").get<bool>()) << node;
  }
  rpc::NodeClient eu(client_options(cluster.client_address(0)));
  // One after the other, and without a second try: the first three of each key pass.
  constexpr int kKeys = 20;
  std::vector<double> took;
  for (int k = 0; k < kKeys; ++k) {
    std::string key = "k" + std::to_string(k);
    for (int i = 0; i < 6; ++i) {
      rpc::CheckItem asked = item("few", key, 1);
      asked.id = fmt::format("{}-{}", key, i);
      auto began = std::chrono::steady_clock::now();
      Reply reply = eu.check(asked);
      std::chrono::duration<double, std::milli> lasted = std::chrono::steady_clock::now() - began;
      EXPECT_EQ(reply.error.to_string(), "");
      EXPECT_EQ(reply.allowed, i < 3) << key << " " << i;
      if (i >= 3) continue;
      took.push_back(lasted.count());
      Reply again = eu.check(asked);
      EXPECT_TRUE(again.allowed && again.repeated) << again.error.to_string();
    }
  }
  std::sort(took.begin(), took.end());
  fmt::print("admitted in {:.1f} ms (median), {:.1f} ms at most\n", took[took.size() / 2],
             took.back());
  EXPECT_LT(took.back(), 1000);
  // A flood beyond the limit is no flood of questions.
  auto asked_before = escrow(0).at("forwards").get<std::uint64_t>();
  std::vector<rpc::CheckItem> flood(500, item("few", "k0", 1));
  for (int i = 0; i < 20; ++i) {
    for (const Reply& reply : eu.check(flood)) EXPECT_FALSE(reply.allowed);
  }
  EXPECT_LE(escrow(0).at("forwards").get<std::uint64_t>(), asked_before + 10);
  // Another node knows as well that nothing is left, or learns it from those it asks.
  rpc::NodeClient af(client_options(cluster.client_address(4)));
  for (int k = 0; k < kKeys; ++k) {
    EXPECT_FALSE(af.check(item("few", "k" + std::to_string(k), 1)).allowed);
  }
  // The same over HTTP.
  for (int i = 0; i < 5; ++i) {
    std::string answer = http_check(cluster.http_address(0),
                                    R"({"domain":"api","descriptor":{"mode":"few","key":"http"}})");
    EXPECT_EQ(answer.find("\"allowed\":true") != std::string::npos, i < 3) << answer;
  }
  std::string metrics = http_get(cluster.admin_address(0), "/metrics");
  EXPECT_NE(metrics.find("weir_escrow_whole 1"), std::string::npos);
  EXPECT_NE(metrics.find("weir_escrow_forwards_admitted_total "), std::string::npos);
}

TEST_F(ClusterTest, AHomeDecidesForAllRegions) {
  Cluster cluster(options({"eu", "us", "ap"}));
  cluster.start_all();
  std::vector<std::unique_ptr<rpc::NodeClient>> clients;
  for (std::size_t i = 0; i < 3; ++i) {
    clients.push_back(std::make_unique<rpc::NodeClient>(client_options(cluster.client_address(i))));
  }
  // Nodes that started first have yet to find the others.
  auto connected = [&] {
    std::vector<rpc::CheckItem> peeks;
    for (int k = 0; k < 50; ++k) peeks.push_back(item("home", "peek" + std::to_string(k), 0));
    for (auto& client : clients) {
      for (const Reply& reply : client->check(peeks)) {
        if (!reply.error.empty()) return false;
      }
    }
    return true;
  };
  for (int i = 0; i < 200 && !connected(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  // All regions at once: exactly the limit passes, of whichever key.
  constexpr int kKeys = 4;
  std::atomic<int> allowed[kKeys] = {};
  std::atomic<int> errors{0};
  std::vector<std::thread> threads;
  for (auto& client : clients) {
    threads.emplace_back([&, &from = *client] {
      for (int i = 0; i < 60; ++i) {
        std::vector<rpc::CheckItem> items;
        for (int k = 0; k < kKeys; ++k) items.push_back(item("home", "h" + std::to_string(k), 1));
        std::vector<Reply> replies = from.check(items);
        for (int k = 0; k < kKeys; ++k) {
          errors += !replies[static_cast<std::size_t>(k)].error.empty();
          allowed[k] += replies[static_cast<std::size_t>(k)].allowed;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(errors, 0);
  for (const auto& count : allowed) EXPECT_EQ(count, 100);
  // What is counted beside it is what passed, in all regions together.
  ASSERT_TRUE(converges(cluster));
  Reply peek = clients[0]->check(item("home", "h0", 0));
  ASSERT_EQ(peek.statuses.size(), 2u) << peek.error.to_string();
  EXPECT_EQ(peek.statuses[0].remaining, 0u);
  EXPECT_EQ(peek.statuses[1].limit - peek.statuses[1].remaining, 100u);
  auto status = nlohmann::json::parse(cluster.status(0), nullptr, false);
  ASSERT_TRUE(status.is_object());
  EXPECT_GT(status["home"]["forwarded"].get<int>() + status["home"]["served"].get<int>(), 100);

  // One region goes: its keys are denied where a rule fails closed, the others go on.
  cluster.kill(2, SIGKILL);
  int unavailable = 0;
  int counted = 0;
  int open = 0;
  for (int k = 0; k < 30; ++k) {
    Reply reply = clients[0]->check(item("home", "new" + std::to_string(k), 1));
    unavailable += reply.error.to_string().find("closed: rule \"home\"") == 0;
    counted += reply.allowed;
    reply = clients[0]->check(item("home-open", "new" + std::to_string(k), 1));
    EXPECT_TRUE(reply.allowed) << reply.error.to_string();
    ASSERT_EQ(reply.statuses.size(), 1u);
    open += reply.statuses[0].degraded;
  }
  EXPECT_EQ(unavailable + counted, 30);
  EXPECT_GT(unavailable, 0);
  EXPECT_GT(counted, 0);
  EXPECT_GT(open, 0);
  // The same over HTTP.
  int refused = 0;
  int passed = 0;
  for (int k = 0; k < 30; ++k) {
    std::string answer = http_check(
        cluster.http_address(0),
        fmt::format(R"({{"domain":"api","descriptor":{{"mode":"home","key":"http{}"}}}})", k));
    refused += answer.find("503") != std::string::npos &&
               answer.find("\"error\":\"closed\"") != std::string::npos;
    passed += answer.find("\"limit\":100,\"remaining\":99") != std::string::npos;
  }
  EXPECT_GT(refused, 0);
  EXPECT_EQ(refused + passed, 30);
  // It comes back and has forgotten nothing.
  cluster.start(2);
  ASSERT_TRUE(converges(cluster));
  for (int k = 0; k < kKeys; ++k) {
    rpc::CheckItem one = item("home", "h" + std::to_string(k), 1);
    Reply reply;
    for (int i = 0; i < 100; ++i) {
      reply = clients[0]->check(one);
      if (reply.error.empty()) break;
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
    EXPECT_EQ(reply.error.to_string(), "");
    EXPECT_FALSE(reply.allowed) << k;
  }
}

TEST_F(ClusterTest, AHomeThatLostItsDiskAdmitsNoMore) {
  Cluster cluster(options({"eu", "us", "ap"}));
  cluster.start_all();
  std::vector<std::unique_ptr<rpc::NodeClient>> clients;
  for (std::size_t i = 0; i < cluster.size(); ++i) {
    clients.push_back(std::make_unique<rpc::NodeClient>(client_options(cluster.client_address(i))));
  }
  const auto ask = [&](const std::string& key, std::uint64_t hits) {
    int passed = 0;
    for (const auto& client : clients) passed += client->check(item("home", key, hits)).allowed;
    return passed;
  };
  // Once all have heard of each other.
  for (int i = 0; i < 200 && ask("k0", 0) < 3; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  const auto served = [&] {
    return nlohmann::json::parse(cluster.status(0)).at("home").at("served").get<int>();
  };
  std::string key;  // of the first node
  for (int i = 0; key.empty() && i < 100; ++i) {
    const int before = served();
    ask("k" + std::to_string(i), 0);
    if (served() == before + 2) key = "k" + std::to_string(i);
  }
  ASSERT_NE(key, "");
  int passed = 0;
  for (int i = 0; i < 20; ++i) passed += ask(key, 1);
  EXPECT_EQ(passed, 60);
  cluster.kill(0, SIGKILL);
  std::filesystem::remove_all(directory_ / "eu" / "data");
  cluster.start(0);
  for (int i = 0; i < 100; ++i) {
    passed += ask(key, 1);
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
  }
  EXPECT_LE(passed, 100);
  Reply reply = clients[1]->check(item("home", key, 1));
  EXPECT_EQ(reply.error.kind, ErrorKind::closed) << reply.error.to_string();
  // Of a rule that is open the home decides from what came back.
  EXPECT_TRUE(clients[0]->check(item("home-open", key, 1)).error.empty());
  // With its disk it goes on at once.
  cluster.kill(1, SIGKILL);
  cluster.start(1);
  int others = 0;
  for (int i = 1; i < 60; ++i) others += ask("other" + std::to_string(i), 1) > 0;
  EXPECT_GT(others, 0);
}

TEST_F(ClusterTest, ARuleGetsAHomeWhileNodesRun) {
  ClusterOptions merged = options({"eu", "us"});
  const std::string at = "    enforcement: home\n    on_failure: closed\n";
  const std::size_t place = merged.rules.find(at);
  merged.rules.erase(place, at.size());
  merged.rules.erase(merged.rules.find("    enforcement: home\n"), 22);
  Cluster cluster(merged);
  cluster.start_all();
  auto loaded = [&](std::size_t node) {
    auto status = nlohmann::json::parse(cluster.status(node), nullptr, false);
    return status.is_object() && status["rules_file"].value("reloads", 0) == 1;
  };
  EXPECT_FALSE(nlohmann::json::parse(cluster.status(0)).contains("home"));
  std::ofstream(directory_ / "rules.yaml") << kRules;
  for (std::size_t node = 0; node < 2; ++node) {
    for (int i = 0; i < 200 && !loaded(node); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    ASSERT_TRUE(loaded(node));
  }
  rpc::NodeClient eu(client_options(cluster.client_address(0)));
  rpc::NodeClient us(client_options(cluster.client_address(1)));
  int allowed = 0;
  for (int i = 0; i < 200; ++i) {
    Reply reply;
    for (int tries = 0; tries < 100; ++tries) {
      reply = (i % 2 == 0 ? eu : us).check(item("home", "k", 1));
      if (reply.error.empty()) break;  // nodes have yet to find each other's client ports
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    ASSERT_EQ(reply.error.to_string(), "");
    allowed += reply.allowed;
  }
  EXPECT_EQ(allowed, 100);
}

TEST_F(ClusterTest, OperatorsSeeANode) {
  Cluster cluster(options({"eu"}));
  cluster.start(0);
  EXPECT_NE(http_get(cluster.admin_address(0), "/healthz").find("200"), std::string::npos);
  EXPECT_NE(http_get(cluster.admin_address(0), "/readyz").find("200"), std::string::npos);
  std::string metrics = http_get(cluster.admin_address(0), "/metrics");
  EXPECT_NE(metrics.find("weir_"), std::string::npos);
  EXPECT_NE(metrics.find("rule=\"counted\""), std::string::npos);
  auto status = nlohmann::json::parse(cluster.status(0), nullptr, false);
  ASSERT_TRUE(status.is_object());
  EXPECT_EQ(status["region"], "eu");
  EXPECT_EQ(status["storage"]["ok"], true);
}

TEST_F(ClusterTest, AClockOffsetShiftsTheNodesTime) {
  ClusterOptions shifted = options({"eu"});
  shifted.more_arguments = {"--clock-offset", "-90s"};
  Cluster cluster(std::move(shifted));
  cluster.start(0);
  auto status = nlohmann::json::parse(cluster.status(0), nullptr, false);
  ASSERT_TRUE(status.is_object());
  Nanos behind = wall_clock() - status["now_ns"].get<Nanos>();
  EXPECT_NEAR(static_cast<double>(behind), 90e9, 5e9);
}

TEST_F(ClusterTest, AClockThatWasAheadStopsNobody) {
  Cluster cluster(options({"eu"}));
  const std::uint64_t limit = 6;  // per second and key
  auto passes = [&](const std::string& key) {
    rpc::NodeClient client(client_options(cluster.client_address(0)));
    std::uint64_t passed = 0;
    for (std::uint64_t i = 0; i < 2 * limit; ++i)
      passed += client.check(item("parts", key, 1)).allowed;
    return passed;
  };
  auto recovers = [&](const std::string& key) {
    for (int i = 0; i < 100; ++i) {
      if (passes(key) > 0) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
    return false;
  };
  auto clock_of = [&] { return nlohmann::json::parse(cluster.status(0))["clock"]; };

  // Over a stop.
  cluster.start(0, {"--clock-offset", "1h"});
  EXPECT_TRUE(recovers("a"));
  cluster.stop(0);
  cluster.start(0);
  EXPECT_TRUE(recovers("b"));
  EXPECT_NEAR(clock_of()["set_back_s"].get<double>(), 3600, 60);
  cluster.stop(0);

  // While it runs: it goes on in the same process.
  cluster.start(0, {"--clock-offset", "30d", "--clock-offset-for", "2s"});
  EXPECT_TRUE(recovers("c"));
  bool noticed = false;
  for (int i = 0; i < 100 && !noticed; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    auto status = nlohmann::json::parse(cluster.status(0), nullptr, false);
    noticed = status.is_object() && status["clock"]["set_back_s"].get<double>() > 86'400;
  }
  EXPECT_TRUE(noticed);
  EXPECT_TRUE(recovers("d"));
}

TEST_F(ClusterTest, AClockThatFlapsDoesNotRestartTheNodeEachTime) {
  Cluster cluster(options({"eu"}));
  cluster.start(0, {"--clock-offset", "1h", "--clock-flaps", "1500ms"});
  bool told = false;
  for (const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(11);
       std::chrono::steady_clock::now() < end;) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    const std::string ready = http_get(cluster.admin_address(0), "/readyz");
    told |= ready.find("the clock was set back again") != std::string::npos;
  }
  EXPECT_TRUE(told);
  std::ifstream log(cluster.log_path(0));
  std::size_t restarts = 0;
  for (std::string line; std::getline(log, line);) {
    restarts += line.find(R"("event":"clock_set_back")") != std::string::npos;
  }
  EXPECT_GE(restarts, 1u);
  EXPECT_LE(restarts, 2u);
}

TEST_F(ClusterTest, ClocksThatDifferAreSeen) {
  Cluster cluster(options({"eu", "us", "ap"}));
  cluster.start(0);
  cluster.start(1);
  cluster.start(2, {"--clock-offset", "3s"});
  auto until = [&](auto holds) {
    for (int i = 0; i < 100; ++i) {
      if (holds()) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
    return false;
  };
  auto ready = [&](std::size_t node) { return http_get(cluster.admin_address(node), "/readyz"); };
  EXPECT_TRUE(until([&] { return ready(2).find("503") != std::string::npos; }));
  EXPECT_NE(ready(2).find("off from 2 of 2 peers"), std::string::npos) << ready(2);
  EXPECT_NE(ready(0).find("200"), std::string::npos) << ready(0);
  EXPECT_TRUE(until([&] {
    const std::string metrics = http_get(cluster.admin_address(0), "/metrics");
    const std::string name = "weir_peer_clock_skew_seconds{peer=\"ap/ap-1\"} ";
    const std::size_t at = metrics.find(name);
    return at != std::string::npos &&
           std::abs(std::stod(metrics.substr(at + name.size())) - 3) < 0.5;
  }));
}

TEST_F(ClusterTest, AStoreHasOneOwner) {
  Cluster cluster(options({"eu"}));
  cluster.start(0);
  std::string config = (directory_ / "eu" / "node.yaml").string();
  std::string command = std::string(WEIR_NODE_PROGRAM) + " --config " + config + " 2>&1";
  FILE* pipe = ::popen(command.c_str(), "r");
  ASSERT_NE(pipe, nullptr);
  std::string text;
  char buffer[1024];
  while (std::fgets(buffer, sizeof buffer, pipe) != nullptr) text += buffer;
  EXPECT_NE(::pclose(pipe), 0);
  EXPECT_NE(text.find("start_failed"), std::string::npos) << text;
}

/// Dials a node as one that is no member, again and again.
class Stranger final : public rpc::PeerHandler {
 public:
  explicit Stranger(const std::string& peers_address) {
    thread_ = std::thread([this, peers_address] {
      rpc::EventLoop loop;
      rpc::PeerOptions settings;
      settings.self = {"nowhere", "nobody"};
      settings.incarnation = {1, 2};
      settings.cluster = "example";
      settings.secret = "not the secret of this cluster";
      settings.listen = "127.0.0.1:0";
      settings.peers = {{{"eu", "eu-1"}, peers_address}};
      settings.backoff_min = settings.backoff_max = kMillisecond;
      rpc::PeerNetwork network(loop, settings, *this);
      std::string error;
      EXPECT_TRUE(network.start(error)) << error;
      loop_ = &loop;
      ready_.set_value();
      loop.run();
      network.stop();
    });
    ready_.get_future().wait();
  }
  ~Stranger() override {
    loop_->stop();
    thread_.join();
  }
  void peer_up(crdt::PeerIndex, const crdt::Incarnation&) override {}
  void peer_down(crdt::PeerIndex) override {}
  kj::Promise<void> receive(crdt::PeerIndex, const crdt::Incarnation&, crdt::Message) override {
    return kj::READY_NOW;
  }
  void refused(const std::string&, const std::string&) override { ++refusals; }

  std::atomic<std::uint64_t> refusals{0};

 private:
  std::promise<void> ready_;
  rpc::EventLoop* loop_ = nullptr;
  std::thread thread_;
};

TEST_F(ClusterTest, StrangersKeepNoMemberOutAndFillNoLog) {
  Cluster cluster(options({"eu", "us"}));
  cluster.start_all();
  ASSERT_TRUE(converges(cluster));
  const std::string address = cluster.peers_address(0);
  const auto before = std::filesystem::file_size(cluster.log_path(0));
  {
    Stranger one(address);
    Stranger two(address);
    for (int i = 0; i < 100 && one.refusals + two.refusals < 500; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    EXPECT_GE(one.refusals + two.refusals, 500u);
  }
  EXPECT_LT(std::filesystem::file_size(cluster.log_path(0)) - before, 10'000u);

  // Silent connections, each made anew once it is closed.
  std::atomic<bool> over{false};
  std::thread silent([&] {
    std::deque<KeptHttp> held;
    for (int i = 0; i < 100; ++i) held.emplace_back(address);
    while (!over) {
      for (KeptHttp& one : held) one.hold();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  cluster.kill(1, SIGKILL);
  cluster.start(1);
  EXPECT_TRUE(converges(cluster, 5 * kSecond)) << cluster.status(1);
  over = true;
  silent.join();
}

TEST_F(ClusterTest, TwoNodesOfOneNameAreTold) {
  Cluster cluster(options({"eu", "us"}));
  cluster.start_all();
  ASSERT_TRUE(converges(cluster));
  // A copy of us, with another folder and other ports.
  const std::filesystem::path folder = directory_ / "us" / "copy";
  std::filesystem::create_directories(folder);
  std::ifstream in(directory_ / "us" / "node.yaml");
  std::ofstream out(folder / "node.yaml");
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with("listen:")) line = "listen: {peers: '127.0.0.1:0', admin: '127.0.0.1:0'}";
    if (line.starts_with("rules:")) line = "rules: ../../rules.yaml";
    out << line << "\n";
  }
  out.close();
  const std::string command =
      fmt::format("exec '{}' --config '{}' 2>'{}'", WEIR_NODE_PROGRAM,
                  (folder / "node.yaml").string(), (folder / "node.log").string());
  const pid_t copy = ::fork();
  ASSERT_GE(copy, 0);
  if (copy == 0) {
    ::execl("/bin/sh", "sh", "-c", command.c_str(), nullptr);
    ::_exit(127);
  }
  const auto ready = [&](std::size_t node) {
    return http_get(cluster.admin_address(node), "/readyz");
  };
  const auto text_of = [](const std::filesystem::path& file) {
    std::ifstream text(file);
    return std::string(std::istreambuf_iterator<char>(text), {});
  };
  const std::string theirs = R"("event":"two_of_one_name","member":"us/us-1","seen_by":"eu/eu-1")";
  bool told = false;
  for (int i = 0; i < 300 && !told; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    told = ready(0).find("names: two nodes run as us/us-1") != std::string::npos &&
           text_of(cluster.log_path(1)).find(theirs) != std::string::npos &&
           text_of(folder / "node.log").find(theirs) != std::string::npos;
  }
  EXPECT_TRUE(told) << ready(0) << text_of(folder / "node.log");
  EXPECT_NE(text_of(cluster.log_path(0)).find(R"("event":"two_of_one_name","member":"us/us-1"})"),
            std::string::npos);
  EXPECT_NE(http_get(cluster.admin_address(0), "/metrics")
                .find("weir_peer_two_of_name{peer=\"us/us-1\"} 1"),
            std::string::npos);
  ::kill(copy, SIGKILL);
  ::waitpid(copy, nullptr, 0);
}

}  // namespace
}  // namespace weir::examples
