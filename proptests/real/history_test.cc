#include <weir/proptests/real/history.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>
#include <string>
#include <vector>

#include <weir/proptests/real/schedule.h>

namespace weir::real {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

/// Hand-made histories of two nodes and one key; times are small numbers.
struct Story {
  History history;

  Story() {
    history.nodes = 2;
    history.runs = {{0, 0, kNever, false, {}}, {1, 0, kNever, false, {}}};
  }

  Story& call(Nanos start, Nanos end, std::uint32_t node, std::uint64_t hits, Result result,
              std::uint64_t used = 0, Counter counter = Counter::commit) {
    Operation operation;
    operation.start = start;
    operation.end = end;
    operation.node = node;
    operation.kind = hits > 0 ? Kind::add : Kind::read;
    operation.counter = counter;
    operation.key = "k";
    operation.hits = hits;
    operation.result = result;
    operation.used = used;
    history.operations.push_back(operation);
    return *this;
  }
  Story& add(Nanos start, Nanos end, std::uint32_t node, std::uint64_t hits, std::uint64_t used,
             Counter counter = Counter::commit) {
    return call(start, end, node, hits, Result::ok, used, counter);
  }
  Story& unanswered(Nanos start, Nanos end, std::uint32_t node, std::uint64_t hits,
                    Counter counter = Counter::commit) {
    return call(start, end, node, hits, Result::unknown, 0, counter);
  }
  Story& read(Nanos start, Nanos end, std::uint32_t node, std::uint64_t used,
              Counter counter = Counter::commit) {
    return call(start, end, node, 0, Result::ok, used, counter);
  }
  /// Node 0 ends and comes back.
  Story& restart(Nanos end, Nanos begin, bool clean) {
    for (auto run = history.runs.rbegin(); run != history.runs.rend(); ++run) {
      if (run->node != 0) continue;
      run->end = end;
      run->clean = clean;
      break;
    }
    history.runs.push_back({0, begin, kNever, false, {}});
    return *this;
  }
  Story& in_the_end(std::uint64_t first, std::uint64_t second, Counter counter = Counter::commit) {
    history.finals.push_back({0, counter, "k", first});
    history.finals.push_back({1, counter, "k", second});
    return *this;
  }

  std::vector<std::string> verdict(Nanos settled = 1000) const {
    std::vector<std::string> out;
    for (const Violation& violation : check(history, {settled}).violations) {
      out.push_back(violation.what);
    }
    return out;
  }
};

TEST(History, OfOneClientIsFine) {
  Story story;
  story.add(10, 20, 0, 3, 3).read(30, 40, 0, 3).add(50, 60, 0, 2, 5).read(70, 80, 1, 0);
  story.read(90, 95, 1, 5).in_the_end(5, 5);
  EXPECT_THAT(story.verdict(), ElementsAre());
  Verdict verdict = check(story.history);
  EXPECT_EQ(verdict.reads_checked, 3u);
  EXPECT_EQ(verdict.adds_checked, 2u);
  EXPECT_EQ(verdict.commit.acknowledged, 5u);
  EXPECT_EQ(verdict.commit.attempted, 5u);
  EXPECT_EQ(verdict.commit.counted, 5u);
}

TEST(History, OfSeveralWorkersOnlyReadsAreExact) {
  CheckOptions options;
  options.adds_may_lag = true;
  Story story;
  story.add(10, 20, 0, 3, 90).add(30, 40, 0, 2, 2).read(50, 60, 0, 5).in_the_end(5, 5);
  EXPECT_TRUE(check(story.history, options).violations.empty());
  EXPECT_FALSE(check(story.history).violations.empty());
  Story lost;
  lost.add(10, 20, 0, 3, 3).read(50, 60, 0, 2).in_the_end(3, 3);
  EXPECT_FALSE(check(lost.history, options).violations.empty());
}

TEST(History, ConcurrentCallsMayOrMayNotSeeEachOther) {
  for (std::uint64_t seen : {0u, 3u}) {
    Story story;
    story.add(10, 30, 0, 3, 3).read(20, 40, 0, seen);
    EXPECT_THAT(story.verdict(), ElementsAre()) << seen;
  }
  Story touching;  // one begins when the other ends
  touching.add(10, 30, 0, 3, 3).read(30, 40, 0, 0);
  EXPECT_THAT(touching.verdict(), ElementsAre());
}

TEST(History, UnansweredMayHaveHappened) {
  for (std::uint64_t total : {3u, 7u}) {
    Story story;
    story.add(10, 20, 0, 3, 3).unanswered(30, 40, 0, 4).read(50, 60, 0, total);
    story.in_the_end(total, total);
    EXPECT_THAT(story.verdict(), ElementsAre()) << total;
  }
}

TEST(History, AnUnansweredAddMayHappenLate) {
  Story story;
  story.unanswered(10, 20, 0, 4).read(30, 40, 0, 0).read(50, 60, 0, 4);
  EXPECT_THAT(story.verdict(), ElementsAre());
}

TEST(History, ALostAcknowledgedAddIsSeenByTheNextRead) {
  Story story;
  story.add(10, 20, 0, 3, 3).restart(25, 27, false).read(30, 40, 0, 0);
  EXPECT_THAT(
      story.verdict(),
      ElementsAre("commit k at node 1: 0 is below 3: acknowledged here before and not to be "
                  "lost"));
}

TEST(History, ALostAcknowledgedAddIsSeenByTheNextAdd) {
  Story story;
  story.add(10, 20, 0, 3, 3).restart(25, 27, false).add(30, 40, 0, 1, 1);
  EXPECT_THAT(story.verdict(), ElementsAre(HasSubstr("1 is below 4")));
}

TEST(History, ALostAcknowledgedAddIsSeenInTheEnd) {
  Story story;
  story.add(10, 20, 0, 3, 3).add(10, 20, 1, 4, 4).in_the_end(6, 6);
  EXPECT_THAT(story.verdict(), ElementsAre("commit k: 6 in the end, of 7 that were acknowledged "
                                           "and not to be lost"));
  EXPECT_EQ(check(story.history).commit.lost, 1u);
}

TEST(History, ALossIsToldOnceAndAgainWhenItGrows) {
  Story story;
  story.add(10, 20, 0, 3, 3).restart(25, 27, false).read(30, 40, 0, 2).read(50, 60, 0, 2);
  story.add(70, 80, 0, 4, 6).restart(85, 87, false).read(90, 95, 0, 2);
  EXPECT_THAT(story.verdict(), ElementsAre(HasSubstr("2 is below 3"), HasSubstr("2 is below 7")));
}

TEST(History, ADoubleCountIsSeen) {
  Story story;
  story.add(10, 20, 0, 3, 3).restart(25, 27, false).read(30, 40, 0, 6).in_the_end(6, 6);
  EXPECT_THAT(story.verdict(), ElementsAre(HasSubstr("6 is above 3"),
                                           "commit k: 6 in the end, of 3 that were attempted"));
}

TEST(History, AValueFromTheFutureIsSeen) {
  Story story;
  story.add(10, 20, 0, 3, 3).read(30, 40, 1, 5).add(50, 60, 0, 2, 5);
  EXPECT_THAT(story.verdict(), ElementsAre("commit k at node 2: 5 is above 3: all that anybody had "
                                           "attempted"));
}

TEST(History, AnAddThatDoesNotCountItselfIsSeen) {
  Story story;
  story.add(10, 20, 0, 3, 0);
  EXPECT_THAT(story.verdict(), ElementsAre(HasSubstr("0 is below 3")));
}

TEST(History, DeniedAddsCountNothing) {
  Story story;
  story.call(10, 20, 0, 3, Result::denied).read(30, 40, 0, 3);
  EXPECT_THAT(story.verdict(), ElementsAre(HasSubstr("denied by a rule that never denies"),
                                           HasSubstr("3 is above 0")));
}

TEST(History, WithinARunNothingGoesBackwards) {
  Story story;
  story.add(10, 20, 1, 5, 5).read(30, 40, 0, 5).read(50, 60, 0, 4);
  EXPECT_THAT(story.verdict(), ElementsAre("commit k at node 1: 4 is below 5: told here before, "
                                           "with what was acknowledged since"));
}

TEST(History, WhatWasToldAndWhatWasAcknowledgedSinceAddUp) {
  Story story;
  story.add(10, 20, 1, 5, 5).read(30, 40, 0, 5).add(50, 60, 0, 2, 7).read(70, 80, 0, 6);
  EXPECT_THAT(story.verdict(), ElementsAre(HasSubstr("6 is below 7: told here before")));
}

TEST(History, AnAddUnderWayWhenAValueWasToldIsNotAddedToIt) {
  Story story;  // the read may have seen the add that ends after it
  story.add(10, 20, 0, 5, 5).add(25, 60, 0, 2, 7).read(30, 40, 0, 7).read(70, 80, 0, 7);
  EXPECT_THAT(story.verdict(), ElementsAre());
}

TEST(History, AKillMayForgetWhatPeersHadTold) {
  Story story;
  story.add(10, 20, 1, 5, 5).read(30, 40, 0, 5).restart(45, 47, false).read(50, 60, 0, 0);
  EXPECT_THAT(story.verdict(), ElementsAre());
}

TEST(History, ACleanStopForgetsNothing) {
  Story story;
  story.add(10, 20, 1, 5, 5).read(30, 40, 0, 5).restart(45, 47, true).read(50, 60, 0, 0);
  EXPECT_THAT(story.verdict(), ElementsAre(HasSubstr("0 is below 5: told here before")));
}

TEST(History, AsyncMayLoseToAKillWhatHadNotSettled) {
  Story story;
  story.add(10, 20, 0, 3, 3, Counter::async).restart(25, 27, false);
  story.read(30, 40, 0, 0, Counter::async).in_the_end(0, 0, Counter::async);
  EXPECT_THAT(story.verdict(), ElementsAre());
  EXPECT_EQ(check(story.history).async.lost, 3u);
  EXPECT_THAT(story.verdict(5), ElementsAre(HasSubstr("0 is below 3"), HasSubstr("0 in the end")));
}

TEST(History, APausedProcessSettlesNothing) {
  Story story;
  story.add(10, 20, 0, 3, 3, Counter::async).restart(45, 47, false);
  story.history.runs[0].pauses = {{22, 44}};
  story.read(50, 60, 0, 0, Counter::async);
  EXPECT_THAT(story.verdict(5), ElementsAre());
}

TEST(History, AsyncKeepsWhatItAcknowledgedInThisRun) {
  Story story;
  story.restart(5, 7, false).add(10, 20, 0, 3, 3, Counter::async);
  story.read(30, 40, 0, 2, Counter::async);
  EXPECT_THAT(story.verdict(), ElementsAre(HasSubstr("2 is below 3: acknowledged")));
}

TEST(History, AsyncKeepsWhatItAcknowledgedBeforeACleanStop) {
  Story story;
  story.add(10, 20, 0, 3, 3, Counter::async).restart(25, 27, true);
  story.read(30, 40, 0, 2, Counter::async).in_the_end(2, 2, Counter::async);
  EXPECT_THAT(story.verdict(), ElementsAre(HasSubstr("2 is below 3"), HasSubstr("2 in the end")));
}

TEST(History, ACallAcrossARestartClaimsLittle) {
  Story story;  // either process may have answered
  story.add(10, 20, 0, 3, 3, Counter::async).restart(25, 35, false);
  story.read(30, 40, 0, 0, Counter::async);
  EXPECT_THAT(story.verdict(), ElementsAre());
  EXPECT_EQ(check(story.history).between_runs, 1u);
}

TEST(History, InTheEndAllAgree) {
  Story story;
  story.add(10, 20, 0, 3, 3).unanswered(30, 40, 0, 4).in_the_end(3, 7);
  EXPECT_THAT(story.verdict(), ElementsAre("commit k: the nodes do not agree in the end: 3 7"));
  story.history.finals.pop_back();
  EXPECT_THAT(story.verdict(), ElementsAre("commit k: not all nodes told it in the end"));
}

TEST(History, QuotasAreReportedByComponents) {
  History history;
  history.nodes = 2;
  history.limit = 10;
  history.window = 10 * kSecond;
  history.wall_minus_monotonic = 1000 * kSecond;
  history.connectivity = {{0, 1}, {25 * kSecond, 2}, {29 * kSecond, 1}};
  auto admit = [&](std::int64_t window, std::uint64_t hits, Result result) {
    Operation operation;
    operation.kind = Kind::add;
    operation.counter = Counter::quota;
    operation.key = "q";
    operation.hits = hits;
    operation.result = result;
    operation.window = window;
    history.operations.push_back(operation);
  };
  admit(100, 11, Result::ok);  // at 0 to 10 s of the monotonic clock
  admit(100, 5, Result::denied);
  admit(102, 9, Result::ok);  // at 20 to 30 s
  admit(102, 9, Result::ok);
  admit(103, 5, Result::unknown);
  QuotaReport report = judge_quota(history);
  EXPECT_EQ(report.windows, 2u);
  EXPECT_EQ(report.over_limit, 2u);
  EXPECT_EQ(report.over_components, 1u);
  EXPECT_EQ(report.worst_admitted, 18u);
  EXPECT_EQ(report.worst_components, 2u);
  EXPECT_EQ(report.worst_connected, 11u);
  EXPECT_DOUBLE_EQ(report.worst_ratio, 1.1);
}

TEST(History, LinesAreReadBack) {
  Story story;
  story.add(10, 20, 0, 3, 3).unanswered(30, 40, 1, 4).restart(45, 47, true).in_the_end(3, 7);
  story.history.runs[0].pauses = {{22, 24}};
  story.history.operations[1].error = "deadline";
  story.history.connectivity = {{5, 2}};
  std::stringstream once;
  write(story.history, once);
  History again = read_history(once);
  std::stringstream twice;
  write(again, twice);
  EXPECT_EQ(once.str(), twice.str());
  EXPECT_EQ(again.operations.size(), 2u);
  std::stringstream wrong("{\"t\":\"op\"}\n");
  EXPECT_THROW(read_history(wrong), std::runtime_error);
}

TEST(Schedule, IsDecidedByTheSeed) {
  Schedule schedule = make_schedule(7, 120 * kSecond, 5);
  EXPECT_EQ(to_string(schedule), to_string(make_schedule(7, 120 * kSecond, 5)));
  EXPECT_NE(to_string(schedule), to_string(make_schedule(8, 120 * kSecond, 5)));
}

TEST(Schedule, HealsWhatItBreaksAndKeepsClocksTogether) {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    Schedule schedule = make_schedule(seed, 120 * kSecond, 5);
    std::vector<int> down(5);
    int cuts = 0;
    Nanos last = 0;
    for (const Step& step : schedule.steps) {
      ASSERT_GE(step.at, last);
      ASSERT_LE(step.at, 120 * kSecond);
      last = step.at;
      switch (step.act) {
        case Act::kill:
        case Act::stop:
        case Act::pause:
          ASSERT_EQ(down[step.node]++, 0) << "seed " << seed;
          break;
        case Act::start:
          ASSERT_LE(std::abs(step.clock_offset), kMaxClockOffset);
          [[fallthrough]];
        case Act::resume:
          ASSERT_EQ(--down[step.node], 0) << "seed " << seed;
          break;
        case Act::cut:
          cuts += static_cast<int>(step.drops.size());
          break;
        case Act::heal:
          cuts -= static_cast<int>(step.drops.size());
          break;
      }
    }
    EXPECT_EQ(cuts, 0);
    EXPECT_EQ(down, std::vector<int>(5));
  }
}

TEST(Schedule, CountsComponents) {
  EXPECT_EQ(components(5, {}), 1u);
  EXPECT_EQ(components(5, {{0, 1}, {1, 0}}), 1u);  // both still reach the rest
  EXPECT_EQ(components(3, {{0, 1}, {0, 2}}), 2u);  // node 0 hears, but is not heard
  EXPECT_EQ(components(2, {{0, 1}, {1, 0}}), 2u);
}

}  // namespace
}  // namespace weir::real
