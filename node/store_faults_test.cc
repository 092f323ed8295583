// A real node whose store fills up, may not grow, is deleted, or is replaced while it runs.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <nlohmann/json.hpp>

#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <cluster/cluster.h>
#include <weir/rpc/client/node_client.h>

namespace weir::examples {
namespace {

constexpr const char* kRules = R"(domain: api
rules:
  - name: quick
    match: {mode: quick}
    key: [key]
    limit: 1000000
    window: 365d
  - name: open
    match: {mode: open}
    key: [key]
    limit: 1000000
    window: 365d
    durability: commit
  - name: closed
    match: {mode: closed}
    key: [key]
    limit: 1000000
    window: 365d
    durability: commit
    on_failure: closed
  - name: brief
    match: {mode: brief}
    key: [key]
    limit: 1000000
    window: 2s
    algorithm: fixed_window
)";

class StoreFaultsTest : public ::testing::Test {
 protected:
  StoreFaultsTest()
      : directory_(std::filesystem::temp_directory_path() /
                   fmt::format("weir-store-{}-{}", ::getpid(),
                               ::testing::UnitTest::GetInstance()->random_seed())) {}
  ~StoreFaultsTest() override {
    if (!HasFailure()) std::filesystem::remove_all(directory_);
  }

  Cluster& start(const std::string& map_size = "64MiB") {
    ClusterOptions made;
    made.node_program = WEIR_NODE_PROGRAM;
    made.directory = directory_.string();
    made.regions = {"eu"};
    made.rules = kRules;
    made.map_size = map_size;
    cluster_.emplace(std::move(made));
    cluster_->start(0);
    return *cluster_;
  }
  std::filesystem::path data() const { return directory_ / "eu" / "data"; }

  std::vector<Reply> check(const std::vector<rpc::CheckItem>& items) const {
    rpc::NodeClientOptions options;
    options.address = cluster_->client_address(0);
    options.deadline = 5 * kSecond;
    return rpc::NodeClient(options).check(items);
  }
  Reply check(const std::string& mode, std::uint64_t hits = 1) const {
    return check({{"api", {{"mode", mode}, {"key", "k"}}, hits}}).front();
  }
  /// Counts new keys until the store has failed.
  void fill(const std::string& mode) {
    for (int keys = 0; keys < 200'000 && failure().empty(); keys += 1000) {
      std::vector<rpc::CheckItem> items;
      for (int i = keys; i < keys + 1000; ++i) {
        items.push_back({"api", {{"mode", mode}, {"key", fmt::format("key {}", i)}}, 1});
      }
      check(items);
    }
  }
  std::uint64_t used(const std::string& mode) {
    const Reply reply = check(mode, 0);
    EXPECT_EQ(reply.error.to_string(), "");
    const Status* status = reply.decider();
    return status == nullptr ? 0 : status->limit - status->remaining;
  }

  /// What is wrong with the store, as /readyz has it; empty: nothing.
  std::string failure() {
    const auto status = nlohmann::json::parse(cluster_->status(0), nullptr, false);
    if (!status.is_object()) return "no status";
    for (const auto& one : status["conditions"]) {
      if (one["name"] != "storage") continue;
      EXPECT_EQ(one["ready"].get<bool>(), one["text"].get<std::string>().empty());
      EXPECT_TRUE(one["alive"].get<bool>());
      return one["text"];
    }
    return "no condition";
  }
  bool eventually(const std::function<bool()>& holds, Nanos patience = 60 * kSecond) {
    for (Nanos waited = 0; waited < patience; waited += 50 * kMillisecond) {
      if (holds()) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    return false;
  }
  bool fails_with(const std::string& why) {
    return eventually([&] { return failure().find(why) != std::string::npos; }, 10 * kSecond);
  }
  bool recovers() {
    return eventually([&] { return failure().empty(); });
  }

  /// While the store is away: what needs no disk is answered, the rest by its on_failure.
  void expect_answers_without() {
    EXPECT_EQ(check("quick").error.to_string(), "");
    const Reply open = check("open");
    EXPECT_TRUE(open.allowed) << open.error.to_string();
    ASSERT_EQ(open.statuses.size(), 1u);
    EXPECT_TRUE(open.statuses[0].degraded);
    EXPECT_EQ(check("closed").error.kind, ErrorKind::closed);
  }
  /// All that was counted is on the disk that it has now.
  void expect_outlives_a_crash() {
    EXPECT_EQ(check("closed").error.to_string(), "");
    const std::uint64_t quick = used("quick");
    const std::uint64_t open = used("open");
    EXPECT_GE(quick, 2u);
    EXPECT_GE(open, 2u);
    EXPECT_EQ(check("closed").error.to_string(), "");  // what came before is durable with it
    cluster_->kill(0, SIGKILL);
    cluster_->start(0);
    EXPECT_EQ(used("quick"), quick);
    EXPECT_EQ(used("open"), open);
  }
  std::string line_of(const std::string& event) const {
    std::ifstream in(cluster_->log_path(0));
    for (std::string line; std::getline(in, line);) {
      if (line.find("\"event\":\"" + event + "\"") != std::string::npos) return line;
    }
    return {};
  }
  void count_once() {
    EXPECT_EQ(check("quick").error.to_string(), "");
    EXPECT_EQ(check("open").error.to_string(), "");
  }

  std::filesystem::path directory_;
  std::optional<Cluster> cluster_;
};

TEST_F(StoreFaultsTest, AFolderThatWasDeletedIsMadeAnew) {
  start();
  count_once();
  std::filesystem::remove_all(data());
  ASSERT_TRUE(fails_with("was deleted or replaced while it was in use")) << failure();
  expect_answers_without();
  ASSERT_TRUE(recovers()) << failure();
  EXPECT_NE(line_of("storage_failed").find("\"level\":\"error\""), std::string::npos);
  EXPECT_NE(line_of("storage_recovered").find("\"level\":\"info\""), std::string::npos);
  expect_outlives_a_crash();
}

TEST_F(StoreFaultsTest, AStoreOfAnotherNodeIsRefusedUntilTheOwnIsBack) {
  start();
  count_once();
  cluster_->kill(0, SIGKILL);
  // Somebody else's.
  const std::filesystem::path folder = directory_ / "eu";
  const std::filesystem::path config = folder / "node.yaml";
  std::filesystem::copy_file(config, folder / "mine.yaml");
  std::filesystem::rename(data(), folder / "mine");
  std::ifstream in(folder / "mine.yaml");
  std::string text(std::istreambuf_iterator<char>(in), {});
  text.replace(text.find("node: eu-1"), 10, "node: eu-2");
  std::ofstream(config) << text;
  cluster_->start(0);
  EXPECT_EQ(cluster_->stop(0), 0);
  std::filesystem::rename(data(), folder / "theirs");
  std::filesystem::rename(folder / "mine", data());
  std::filesystem::copy_file(folder / "mine.yaml", config,
                             std::filesystem::copy_options::overwrite_existing);
  cluster_->start(0);
  EXPECT_EQ(failure(), "");

  std::filesystem::rename(data(), folder / "mine");
  std::filesystem::rename(folder / "theirs", data());
  ASSERT_TRUE(fails_with("was deleted or replaced while it was in use")) << failure();
  expect_answers_without();
  EXPECT_TRUE(eventually([&] { return failure().find("eu-2") != std::string::npos; }, kMinute))
      << failure();
  std::filesystem::rename(data(), folder / "theirs");
  std::filesystem::rename(folder / "mine", data());
  ASSERT_TRUE(recovers()) << failure();
  expect_outlives_a_crash();
}

TEST_F(StoreFaultsTest, AFileThatMayNotGrowIsNotTheNodesEnd) {
  start();
  count_once();
  const auto limit_files = [&](rlim_t bytes) {
    const rlimit limit{bytes, RLIM_INFINITY};
    ASSERT_EQ(::prlimit(cluster_->pid(0), RLIMIT_FSIZE, &limit, nullptr), 0);
  };
  // Its log is a file too, and is as small as that.
  limit_files(64u << 10);
  fill("quick");
  ASSERT_TRUE(fails_with("a file may not grow")) << failure();
  expect_answers_without();
  limit_files(RLIM_INFINITY);
  ASSERT_TRUE(recovers()) << failure();
  expect_outlives_a_crash();
}

TEST_F(StoreFaultsTest, AMapThatIsFullIsRoomAgainOnceWindowsEnd) {
  start("1MiB");
  count_once();
  fill("brief");
  ASSERT_TRUE(fails_with("MAP_FULL")) << failure();
  expect_answers_without();
  ASSERT_TRUE(recovers()) << failure();
  expect_outlives_a_crash();
}

}  // namespace
}  // namespace weir::examples
