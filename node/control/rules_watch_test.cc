#include <weir/node/control/rules_watch.h>

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

namespace weir::node {
namespace {

namespace fs = std::filesystem;

std::string rules(int limit) {
  return fmt::format("domain: api\nrules:\n  - name: r\n    limit: {}\n    window: 1m\n", limit);
}

void write(const fs::path& path, const std::string& text) {
  std::ofstream(path) << text;
}

class RulesWatchTest : public ::testing::Test {
 protected:
  RulesWatchTest() : folder_(fs::temp_directory_path() / fmt::format("weir-watch-{}", ::getpid())) {
    fs::create_directories(folder_ / "v1");
    uv_loop_init(&loop_);
  }
  ~RulesWatchTest() override {
    watch_.reset();
    uv_run(&loop_, UV_RUN_DEFAULT);
    EXPECT_EQ(uv_loop_close(&loop_), 0);
    fs::remove_all(folder_);
  }
  void watch(const fs::path& path, std::uint64_t poll_ms = 60'000) {
    watch_ = std::make_unique<RulesWatch>(&loop_, path.string(), RulesWatchOptions{20, poll_ms},
                                          [this](LoadedRules loaded) {
                                            ++reads_;
                                            last_ = std::move(loaded);
                                          });
  }
  /// Runs the loop until the limit that was read is this (0: until it was refused).
  void expect(std::uint64_t limit) {
    uv_timer_t deadline;
    bool late = false;
    uv_timer_init(&loop_, &deadline);
    deadline.data = &late;
    uv_timer_start(
        &deadline, [](uv_timer_t* timer) { *static_cast<bool*>(timer->data) = true; }, 20'000, 0);
    while (!late && (reads_ == 0 || limit_of(last_) != limit)) uv_run(&loop_, UV_RUN_ONCE);
    uv_close(reinterpret_cast<uv_handle_t*>(&deadline), nullptr);
    uv_run(&loop_, UV_RUN_NOWAIT);
    EXPECT_FALSE(late) << "limit " << limit << " was never read; reads: " << reads_;
  }
  static std::uint64_t limit_of(const LoadedRules& loaded) {
    return loaded.rules == nullptr ? 0 : loaded.rules->rules().at(0).limit;
  }

  fs::path folder_;
  uv_loop_t loop_;
  std::unique_ptr<RulesWatch> watch_;
  LoadedRules last_;
  int reads_ = 0;
};

TEST_F(RulesWatchTest, WrittenInPlaceAndRenamedOver) {
  fs::path path = folder_ / "rules.yaml";
  write(path, rules(1));
  watch(path);
  write(path, rules(20));
  expect(20);
  std::string version = last_.version;
  write(folder_ / "new", rules(3));
  fs::rename(folder_ / "new", path);
  expect(3);
  EXPECT_EQ(last_.version.size(), 16u);
  EXPECT_NE(last_.version, version);
}

TEST_F(RulesWatchTest, ASymlinkOnTheWayIsSwapped) {
  fs::create_directories(folder_ / "v2");
  write(folder_ / "v1" / "rules.yaml", rules(1));
  write(folder_ / "v2" / "rules.yaml", rules(2));
  fs::create_directory_symlink("v1", folder_ / "..data");
  fs::create_symlink("..data/rules.yaml", folder_ / "rules.yaml");
  watch(folder_ / "rules.yaml");
  fs::create_directory_symlink("v2", folder_ / "..data_tmp");
  fs::rename(folder_ / "..data_tmp", folder_ / "..data");
  expect(2);
}

TEST_F(RulesWatchTest, ABadFileAndOneThatIsGoneAreToldWithTheirReason) {
  fs::path path = folder_ / "rules.yaml";
  write(path, rules(1));
  watch(path);
  write(path, "domain: api\nrules:\n  - name: r\n    limit: many\n    window: 1m\n");
  expect(0);
  ASSERT_FALSE(last_.errors.empty());
  EXPECT_EQ(last_.errors[0].line, 4);
  fs::remove(path);
  expect(0);
  write(path, rules(7));
  expect(7);
}

TEST_F(RulesWatchTest, ThePollSeesWhatGivesNoSign) {
  write(folder_ / "v1" / "target.yaml", rules(1));
  fs::create_symlink("v1/target.yaml", folder_ / "rules.yaml");
  watch(folder_ / "rules.yaml", 50);
  write(folder_ / "v1" / "target.yaml", rules(123));
  expect(123);
}

TEST_F(RulesWatchTest, AFileThatCouldNotBeReadOnceIsReadLater) {
  fs::path path = folder_ / "rules.yaml";
  write(path, rules(1));
  watch(path, 50);
  uv_run(&loop_, UV_RUN_NOWAIT);
  write(path, rules(9));
  // No descriptor is free.
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit none = before;
  none.rlim_cur = 0;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  expect(0);
  ASSERT_EQ(last_.errors.size(), 1u);
  EXPECT_NE(last_.errors[0].to_string().find("Too many open files"), std::string::npos);
  const int told = reads_;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  expect(9);
  EXPECT_EQ(reads_, told + 1);
}

TEST_F(RulesWatchTest, AskedToItReadsWhatHasNotChanged) {
  fs::path path = folder_ / "rules.yaml";
  write(path, rules(5));
  watch(path);
  watch_->reread();
  watch_->reread();
  expect(5);
}

}  // namespace
}  // namespace weir::node
