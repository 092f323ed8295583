#include <weir/rpc/net/turn_meter.h>

#include <gtest/gtest.h>

#include <map>
#include <string>
#include <thread>

#include <weir/rpc/net/event_loop.h>

namespace weir::rpc {
namespace {

Nanos fake_cpu = 0;
Nanos fake_steady = 0;

void spend(Nanos time) {
  fake_cpu += time;
  fake_steady += time;
}

/// Reads times that the test sets.
class TurnMeterTest : public testing::Test {
 protected:
  TurnMeterTest() { fake_cpu = fake_steady = 10 * kMinute; }

  Nanos lately(std::string_view what) const { return of(what).lately; }
  Nanos ever(std::string_view what) const { return of(what).ever; }
  LongestTurn of(std::string_view what) const {
    for (const LongestTurn& one : meter.longest()) {
      if (one.what == what) return one;
    }
    return {what, -1, -1};
  }

  TurnMeter meter{{[] { return fake_cpu; }, [] { return fake_steady; }}};
};

TEST_F(TurnMeterTest, KeepsTheLongestOfEachKind) {
  for (Nanos length : {3, 7, 5}) {
    TurnMeter::Scope scope(&meter, "tick");
    spend(length);
  }
  {
    TurnMeter::Scope scope(&meter, "push");
    spend(6);
  }
  EXPECT_EQ(lately("tick"), 7);
  EXPECT_EQ(lately("push"), 6);
  EXPECT_EQ(meter.longest().front().what, "tick");
}

TEST_F(TurnMeterTest, CountsProcessorTimeAndNotWaiting) {
  TurnMeter::Scope scope(&meter, "outer");
  {
    TurnMeter meter_inside{{[] { return fake_cpu; }, [] { return fake_steady; }}};
    {
      TurnMeter::Scope inside(&meter_inside, "stolen");
      spend(2);
      fake_steady += kSecond;
    }
    EXPECT_EQ(meter_inside.longest().front().ever, 2);
  }
}

TEST_F(TurnMeterTest, AnEventCountsAsAWholeUnderItsLongestStep) {
  {
    TurnMeter::Scope scope(&meter, "tick");
    spend(1);
    meter.step("sweep");
    spend(5);
    meter.step("drain");
    spend(3);
    meter.step("sweep");
    spend(1);
  }
  EXPECT_EQ(ever("sweep"), 10);
  EXPECT_EQ(ever("tick"), -1);
  EXPECT_EQ(ever("drain"), -1);
}

TEST_F(TurnMeterTest, AScopeWithinAScopeIsAStep) {
  {
    TurnMeter::Scope scope(&meter, "posted");
    spend(2);
    {
      TurnMeter::Scope inner(&meter, "status");
      spend(3);
    }
    spend(2);
  }
  EXPECT_EQ(ever("posted"), 7) << "2 before and 2 behind are more than the 3 between";
  EXPECT_EQ(ever("status"), -1);
}

TEST_F(TurnMeterTest, MayBeRenamed) {
  {
    TurnMeter::Scope scope(&meter, "message");
    spend(4);
    scope.rename("push");
    spend(1);
  }
  EXPECT_EQ(ever("push"), 5);
  EXPECT_EQ(ever("message"), -1);
}

TEST_F(TurnMeterTest, ATurnIsItsEventsAndTheRest) {
  spend(100);
  meter.turn_ended();
  spend(2);
  for (int i = 0; i < 2; ++i) {
    TurnMeter::Scope scope(&meter, "push");
    spend(3);
  }
  spend(4);
  meter.turn_ended();
  EXPECT_EQ(ever(TurnMeter::kTurn), 12);
  EXPECT_EQ(ever(TurnMeter::kOther), 6);
  EXPECT_EQ(ever("push"), 3);
}

TEST_F(TurnMeterTest, OldOnesAreForgottenButForTheLongestEver) {
  {
    TurnMeter::Scope scope(&meter, "tick");
    spend(9);
  }
  fake_steady += TurnMeter::kSpan;
  {
    TurnMeter::Scope scope(&meter, "tick");
    spend(2);
  }
  EXPECT_EQ(lately("tick"), 9) << "less than two minutes ago";
  fake_steady += TurnMeter::kSpan;
  EXPECT_EQ(lately("tick"), 2);
  {
    TurnMeter::Scope scope(&meter, "tick");
    spend(1);
  }
  EXPECT_EQ(lately("tick"), 2);
  fake_steady += 2 * TurnMeter::kSpan;
  EXPECT_EQ(lately("tick"), 0) << "none of late";
  {
    TurnMeter::Scope scope(&meter, "tick");
    spend(1);
  }
  EXPECT_EQ(lately("tick"), 1);
  EXPECT_EQ(ever("tick"), 9);
}

TEST_F(TurnMeterTest, StepsOutsideOfEventsAreNobodys) {
  meter.step("sweep");
  spend(5);
  EXPECT_TRUE(meter.longest().empty());
  TurnMeter::Scope nothing(nullptr, "tick");
  nothing.rename("push");
}

void burn(Nanos time) {
  const TurnClocks clocks = system_turn_clocks();
  const Nanos end = clocks.cpu() + time;
  while (clocks.cpu() < end) {
  }
}

TEST(TurnMeterOfALoop, FindsTheSlowCallback) {
  EventLoop loop;
  EXPECT_EQ(loop.meter(), nullptr);
  loop.measure_turns();
  uv_timer_t timer;
  uv_timer_init(loop.uv(), &timer);
  timer.data = &loop;
  uv_timer_start(
      &timer,
      [](uv_timer_t* fired) {
        auto& owner = *static_cast<EventLoop*>(fired->data);
        TurnMeter::Scope scope(owner.meter(), "slow");
        burn(30 * kMillisecond);
        owner.stop();
      },
      5, 0);
  loop.post([] { std::this_thread::sleep_for(std::chrono::milliseconds(200)); });
  loop.run();
  uv_close(reinterpret_cast<uv_handle_t*>(&timer), nullptr);
  std::map<std::string, Nanos> longest;
  for (const LongestTurn& one : loop.meter()->longest())
    longest[std::string(one.what)] = one.lately;
  EXPECT_GE(longest["slow"], 30 * kMillisecond);
  EXPECT_LT(longest["posted"], longest["slow"]) << "sleeping takes no processor time";
  EXPECT_LT(longest["other"], longest["slow"]);
}

}  // namespace
}  // namespace weir::rpc
