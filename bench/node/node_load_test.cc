#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include <weir/bench/node/node_parts.h>

namespace weir::bench {
namespace {

/// Every part on so few keys that it takes a second or so: that it runs, and what it counts.
class NodeLoad : public testing::Test {
 protected:
  NodeLoad() {
    options_.program = WEIR_NODE_PROGRAM;
    options_.scratch = testing::TempDir() + "/weir-node-load-" + std::to_string(::getpid());
    options_.keys = 3000;
    options_.counted_keys = 3000;
    options_.full_keys = 10'000;
    options_.rules = 50;
    options_.rounds = 1;
    options_.rate = 5000;
    options_.counted_s = 0.2;
    options_.settle_s = 0.2;
    options_.rest_s = 0.2;
    options_.window_s = 2;
    std::filesystem::create_directories(options_.scratch);
  }
  ~NodeLoad() override {
    std::error_code ignored;
    std::filesystem::remove_all(options_.scratch, ignored);
  }
  static double figure(const Json& part, const char* name) {
    return part.at("figures").at(name).get<double>();
  }
  static double longest(const Json& part, const char* scenario) {
    double out = 0;
    for (const auto& [what, ms] : part.at("turns").at(scenario).items()) {
      out = std::max(out, ms.get<double>());
    }
    return out;
  }

  NodeBenchOptions options_;
};

TEST_F(NodeLoad, Memory) {
  const Json part = node_memory(options_);
  EXPECT_GT(figure(part, "bytes_per_key_1w"), 50);
  EXPECT_GE(figure(part, "idle_percent"), 0);
  EXPECT_GT(longest(part, "first use of keys, token_bucket"), 0);
}

TEST_F(NodeLoad, Full) {
  EXPECT_GT(figure(node_full(options_), "rss_100m_gib"), 0);
}

TEST_F(NodeLoad, WritersAndMerges) {
  const Json writers = node_writers(options_);
  EXPECT_EQ(writers.at("rows").size(), 2u);
  EXPECT_GT(figure(writers, "bytes_per_key_5w"), 50);
  const Json merges = node_merge(options_);
  EXPECT_GT(figure(merges, "merge_slots_per_s"), 1000);
  EXPECT_GT(figure(merges, "wire_bytes_per_slot"), 16);
}

TEST_F(NodeLoad, CountedAndStored) {
  const Json counted = node_counted(options_);
  EXPECT_GT(counted.at("counted_us").at("median").get<double>(), 0);
  EXPECT_GT(figure(node_store(options_), "durable_updates_per_s"), 0);
}

TEST_F(NodeLoad, StartAndRepair) {
  const Json part = node_held(options_);
  EXPECT_GT(figure(part, "start_10m_s"), 0);
  EXPECT_GT(figure(part, "repair_10m_s"), 0);
  EXPECT_GT(longest(part, "repair, the empty one"), 0);
  EXPECT_EQ(part.at("turns").size(), 7u);
}

TEST_F(NodeLoad, EndsAndRules) {
  EXPECT_EQ(node_ends(options_).at("turns").size(), 1u);
  EXPECT_GT(longest(node_rules(options_), "status and metrics of 50 rules"), 0);
}

TEST_F(NodeLoad, RedisWhereThereIsOne) {
  try {
    EXPECT_GT(figure(node_redis(options_), "redis_bytes_per_key"), 0);
  } catch (const LeftOut& why) {
    GTEST_SKIP() << why.what();
  }
}

TEST(Turns, AreThoseThatAreLonger) {
  const Turns before{{"tick", 1.0}, {"push", 2.0}};
  const Turns after{{"tick", 1.5}, {"push", 2.0}, {"status", 0.1}};
  EXPECT_EQ(turns_between(before, after), (Turns{{"tick", 1.5}, {"status", 0.1}}));
}

TEST(InChild, GivesBackWhatTheChildSays) {
  EXPECT_EQ(in_child([] { return Json{{"a", 1}}; }), (Json{{"a", 1}}));
  EXPECT_THROW(in_child([]() -> Json { throw std::runtime_error("no"); }), std::runtime_error);
}

}  // namespace
}  // namespace weir::bench
