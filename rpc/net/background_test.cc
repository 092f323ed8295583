#include <weir/rpc/net/background.h>

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <optional>
#include <vector>

#include <weir/rpc/net/test_util.h>

namespace weir::rpc {
namespace {

class BackgroundTest : public testing::Test {
 protected:
  ~BackgroundTest() noexcept override {}
  EventLoop loop_;
  std::optional<Background> background_{std::in_place, loop_};
};

TEST_F(BackgroundTest, WorksInOrderBesideTheLoop) {
  const std::thread::id here = std::this_thread::get_id();
  std::vector<int> worked;
  std::vector<int> told;
  for (int i = 0; i < 10; ++i) {
    background_->run(
        [&, i] {
          EXPECT_NE(std::this_thread::get_id(), here);
          worked.push_back(i);
        },
        [&, i] {
          EXPECT_EQ(std::this_thread::get_id(), here);
          told.push_back(i);
        });
  }
  EXPECT_TRUE(told.empty()) << "in a later turn";
  test::eventually(loop_, [&] { return told.size() == 10; });
  EXPECT_EQ(told, (std::vector<int>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}));
  EXPECT_EQ(worked, told);
}

TEST_F(BackgroundTest, AtItsEndWaitsForWhatIsBeingWorkedOn) {
  std::atomic<bool> begun{false};
  std::atomic<bool> ended{false};
  bool told = false;
  background_->run(
      [&] {
        begun = true;
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        ended = true;
      },
      [&] { told = true; });
  background_->run([] { ADD_FAILURE() << "it came too late"; }, [&] { told = true; });
  while (!begun) std::this_thread::yield();
  background_.reset();
  EXPECT_TRUE(ended);
  EXPECT_FALSE(told);
}

TEST_F(BackgroundTest, NothingIsLeftOfWhatIsDone) {
  auto held = std::make_shared<int>(0);
  bool told = false;
  background_->run([held] {}, [held, &told] { told = true; });
  test::eventually(loop_, [&] { return told && held.use_count() == 1; });
  background_.reset();
}

}  // namespace
}  // namespace weir::rpc
