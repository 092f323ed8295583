#include <weir/node/report/background.h>

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <optional>
#include <vector>

#include <weir/rpc/net/test_util.h>

namespace weir::node {
namespace {

class BackgroundTest : public testing::Test {
 protected:
  ~BackgroundTest() noexcept override {}
  rpc::EventLoop loop_;
  std::optional<Background> background_{std::in_place, loop_};
};

TEST_F(BackgroundTest, MakesThemInOrderBesideTheLoop) {
  const std::thread::id here = std::this_thread::get_id();
  std::vector<std::string> told;
  for (int i = 0; i < 10; ++i) {
    background_->run(
        [here, i] {
          EXPECT_NE(std::this_thread::get_id(), here);
          return std::to_string(i);
        },
        [&, here](std::string text) {
          EXPECT_EQ(std::this_thread::get_id(), here);
          told.push_back(std::move(text));
        });
  }
  EXPECT_TRUE(told.empty()) << "in a later turn";
  rpc::test::eventually(loop_, [&] { return told.size() == 10; });
  for (std::size_t i = 0; i < told.size(); ++i) EXPECT_EQ(told[i], std::to_string(i));
}

TEST_F(BackgroundTest, AtItsEndWaitsForTheOneThatIsBeingMade) {
  std::atomic<bool> begun{false};
  std::atomic<bool> go{false};
  bool told = false;
  auto token = std::make_shared<int>(0);
  background_->run(
      [&] {
        begun = true;
        while (!go) std::this_thread::yield();
        return std::string();
      },
      [&, token](std::string) { told = true; });
  background_->run([] { return std::string(); }, [&, token](std::string) { told = true; });
  while (!begun) std::this_thread::yield();
  go = true;
  background_.reset();
  EXPECT_FALSE(told);
  EXPECT_LE(token.use_count(), 3) << "the loop may still hold both";
}

TEST_F(BackgroundTest, WithoutWorkThereIsNoThread) {
  background_.reset();
}

}  // namespace
}  // namespace weir::node
