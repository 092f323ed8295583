#include <weir/limits/replica_side.h>

#include <gtest/gtest.h>
#include <weir/limits/counted_new.h>
#include <weir/limits/test_util.h>

#include <array>
#include <atomic>
#include <map>
#include <string>
#include <thread>
#include <utility>

namespace weir {
namespace {

using test::rule;
using test::set;

constexpr Nanos kNow = 1'000'000 * kMinute;

struct Ask {
  std::vector<Entry> entries;
  Request request;
  Ask(std::vector<Entry> given, std::uint64_t hits) : entries(std::move(given)) {
    request = {"api", entries, hits};
  }
};

/// Descriptors of one entry "key" each, with hits of their own.
struct AskAll {
  std::vector<Entry> entries;
  std::vector<Descriptor> more;
  Request request;
  explicit AskAll(const std::vector<std::pair<std::string_view, std::uint64_t>>& asked) {
    for (const auto& [key, hits] : asked) entries.push_back({"key", key});
    for (std::size_t i = 1; i < asked.size(); ++i)
      more.push_back({{&entries[i], 1}, asked[i].second});
    request = {"api", {entries.data(), 1}, asked[0].second};
    request.more = more;
  }
  AskAll(const AskAll&) = delete;
  AskAll& operator=(const AskAll&) = delete;
};

/// The slot of an own count; the limiter's incarnation is {1, 1}.
crdt::Slot slot_of(const crdt::OwnCount& count) {
  return {{{1, 1}, count.birth}, count.value};
}

TEST(Limiter, NoRuleMeansYes) {
  Limiter limiter(set({rule("a", 1)}), {});
  Decision decision = limiter.check(Ask({{"other", "x"}}, 1).request, kNow);
  EXPECT_TRUE(decision.allowed);
  EXPECT_EQ(decision.decider(), nullptr);
  EXPECT_TRUE(limiter.check({"elsewhere", {}, 1}, kNow).allowed);
}

TEST(Limiter, ADeniedRequestConsumesNothingAnywhere) {
  Limiter limiter(set({rule("wide", 10), rule("narrow", 2)}), {});
  Ask ask({{"key", "k"}}, 1);
  EXPECT_TRUE(limiter.check(ask.request, kNow).allowed);
  EXPECT_TRUE(limiter.check(ask.request, kNow).allowed);
  Decision denied = limiter.check(ask.request, kNow);
  EXPECT_FALSE(denied.allowed);
  ASSERT_NE(denied.decider(), nullptr);
  EXPECT_EQ(denied.decider()->rule, 1u);
  EXPECT_EQ(limiter.used(0, ask.request, kNow), 2u);
  EXPECT_EQ(limiter.used(1, ask.request, kNow), 2u);
}

TEST(Limiter, SeveralDescriptorsPassTogetherOrNotAtAll) {
  Rule wide = rule("wide", 10);
  wide.key = {};
  Limiter limiter(set({rule("narrow", 4), wide}), {});
  Decision decision = limiter.check(AskAll({{"a", 1}, {"b", 3}}).request, kNow);
  EXPECT_TRUE(decision.allowed);
  ASSERT_EQ(decision.statuses.size(), 4u);
  const std::array<std::uint64_t, 4> remaining = {3, 6, 1, 6};
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(decision.statuses[i].descriptor, i / 2);
    EXPECT_EQ(decision.statuses[i].rule, i % 2);
    EXPECT_EQ(decision.statuses[i].remaining, remaining[i]);
  }
  EXPECT_EQ(decision.deciding, 2);
  decision = limiter.check(AskAll({{"c", 1}, {"b", 2}}).request, kNow);
  EXPECT_FALSE(decision.allowed);
  EXPECT_EQ(decision.deciding, 2);
  EXPECT_EQ(limiter.used(0, Ask({{"key", "c"}}, 1).request, kNow), 0u);
  EXPECT_EQ(limiter.used(1, Ask({{"key", "c"}}, 1).request, kNow), 4u);
  EXPECT_EQ(limiter.counters(0).allowed, 3u);
  EXPECT_EQ(limiter.counters(0).denied, 1u);
  EXPECT_EQ(limiter.counters(1).allowed, 4u);
}

TEST(Limiter, DescriptorsThatMeetInASeriesAreDecidedByTheirSum) {
  for (Algorithm algorithm :
       {Algorithm::fixed_window, Algorithm::sliding_log, Algorithm::token_bucket}) {
    Rule post = rule("r", 10, algorithm);
    post.cost_by_method["POST"] = 5;
    Limiter limiter(set({post}), {});
    EXPECT_TRUE(limiter.check(AskAll({{"a", 2}, {"b", 1}, {"a", 3}}).request, kNow).allowed);
    EXPECT_EQ(limiter.used(0, Ask({{"key", "a"}}, 1).request, kNow), 5u);
    Decision decision = limiter.check(AskAll({{"a", 3}, {"a", 3}}).request, kNow);
    EXPECT_FALSE(decision.allowed);
    EXPECT_FALSE(decision.statuses[0].allowed);
    EXPECT_FALSE(decision.statuses[1].allowed);
    EXPECT_EQ(decision.statuses[1].descriptor, 1u);
    // Each at its own cost.
    Entry posted[] = {{"key", "b"}, {"method", "POST"}};
    Descriptor second{posted, 1};
    Ask first({{"key", "b"}}, 4);
    first.request.more = {&second, 1};
    EXPECT_TRUE(limiter.check(first.request, kNow).allowed);
    EXPECT_EQ(limiter.used(0, first.request, kNow), 10u);
    // A sum beyond 64 bits.
    const std::uint64_t most = ~std::uint64_t{0};
    EXPECT_FALSE(limiter.check(AskAll({{"c", most}, {"c", 2}}).request, kNow).allowed);
  }
}

TEST(Limiter, ADescriptorOfNoHitsPeeksBesideTheOthers) {
  Limiter limiter(set({rule("r", 10)}), {});
  Decision decision = limiter.check(AskAll({{"a", 0}, {"b", 4}}).request, kNow);
  EXPECT_TRUE(decision.allowed);
  EXPECT_EQ(decision.statuses[0].remaining, 10u);
  EXPECT_EQ(decision.statuses[1].remaining, 6u);
  EXPECT_EQ(limiter.series_count(), 1u);
}

TEST(Limiter, ARequestIdNamesAllDescriptors) {
  Limiter limiter(set({rule("r", 10)}), {});
  AskAll ask({{"a", 0}, {"b", 4}, {"b", 1}});
  ask.request.id = "id";
  Decision first = limiter.check(ask.request, kNow);
  Decision again = limiter.check(ask.request, kNow);
  EXPECT_TRUE(again.repeated);
  ASSERT_EQ(again.statuses.size(), 3u);
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(again.statuses[i].descriptor, i);
    EXPECT_EQ(again.statuses[i].remaining, first.statuses[i].remaining);
  }
  EXPECT_EQ(limiter.used(0, Ask({{"key", "b"}}, 1).request, kNow), 5u);
}

TEST(Limiter, ABatchMixesRequestsOfOneAndOfSeveralDescriptors) {
  Limiter limiter(set({rule("r", 5)}), {});
  AskAll several({{"a", 2}, {"b", 1}, {"a", 2}});
  Ask one({{"key", "a"}}, 1);
  std::vector<Request> requests = {several.request, one.request, several.request, one.request};
  std::vector<Decision> out(requests.size());
  // As they are used again: with an earlier answer in them.
  for (Decision& each : out) limiter.check(several.request, kNow - kHour, each);
  limiter.check(requests, kNow, out);
  EXPECT_TRUE(out[0].allowed);
  EXPECT_TRUE(out[1].allowed);
  EXPECT_FALSE(out[2].allowed);
  EXPECT_FALSE(out[3].allowed);
  ASSERT_EQ(out[1].statuses.size(), 1u);
  EXPECT_EQ(out[1].statuses[0].descriptor, 0u);
  EXPECT_EQ(out[2].statuses.size(), 3u);
}

TEST(Limiter, MoreDescriptorsThanAnybodyShouldSend) {
  Rule wide = rule("wide", 1'000'000);
  wide.key = {};
  Limiter limiter(set({rule("narrow", 1'000'000), wide}), {});
  std::vector<std::string> keys;
  for (int i = 0; i < 2000; ++i) keys.push_back(std::to_string(i % 1500));
  std::vector<std::pair<std::string_view, std::uint64_t>> asked;
  for (const std::string& key : keys) asked.emplace_back(key, 1);
  Decision decision = limiter.check(AskAll(asked).request, kNow);
  EXPECT_TRUE(decision.allowed);
  ASSERT_EQ(decision.statuses.size(), 4000u);
  EXPECT_EQ(decision.statuses[3999].descriptor, 1999u);
  EXPECT_EQ(limiter.used(1, Ask({{"key", "0"}}, 1).request, kNow), 2000u);
  EXPECT_EQ(limiter.used(0, Ask({{"key", "0"}}, 1).request, kNow), 2u);
}

TEST(Limiter, TheLongestWaitDecidesADenial) {
  Rule hour = rule("hour", 1);
  hour.window = kHour;
  Limiter limiter(set({rule("minute", 1), hour, rule("free", 100)}), {});
  Ask ask({{"key", "k"}}, 1);
  limiter.check(ask.request, kNow);
  Decision denied = limiter.check(ask.request, kNow);
  EXPECT_EQ(denied.decider()->rule, 1u);
  EXPECT_GE(denied.decider()->retry_after, denied.statuses[0].retry_after);
}

TEST(Limiter, ShadowRulesReportButNeverDenyOrSpendOthers) {
  Rule shadow = rule("shadow", 1);
  shadow.shadow = true;
  Limiter limiter(set({shadow, rule("real", 5)}), {});
  Ask ask({{"key", "k"}}, 1);
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(limiter.check(ask.request, kNow).allowed);
  Decision denied = limiter.check(ask.request, kNow);
  EXPECT_FALSE(denied.allowed);
  EXPECT_EQ(denied.decider()->rule, 1u);
  EXPECT_EQ(limiter.counters(0).denied, 5u);
  EXPECT_EQ(limiter.used(0, ask.request, kNow), 1u);
}

TEST(Limiter, PeeksConsumeNothingAndMakeNoSeries) {
  Limiter limiter(set({rule("a", 3)}), {});
  Ask peek({{"key", "k"}}, 0);
  Decision decision = limiter.check(peek.request, kNow);
  EXPECT_TRUE(decision.allowed);
  EXPECT_EQ(decision.decider()->remaining, 3u);
  EXPECT_EQ(limiter.series_count(), 0u);
}

TEST(Limiter, CostsMultiplyHits) {
  Rule costly = rule("a", 100);
  costly.cost_by_method["POST"] = 5;
  Limiter limiter(set({costly}), {});
  EXPECT_EQ(
      limiter.check(Ask({{"key", "k"}, {"method", "POST"}}, 3).request, kNow).decider()->remaining,
      85u);
  EXPECT_EQ(
      limiter.check(Ask({{"key", "k"}, {"method", "GET"}}, 3).request, kNow).decider()->remaining,
      82u);
}

TEST(Limiter, KeysDoNotRunTogether) {
  Rule two = rule("a", 1);
  two.key = {"x", "y"};
  Limiter limiter(set({two}), {});
  EXPECT_TRUE(limiter.check(Ask({{"x", "a"}, {"y", "b_c"}}, 1).request, kNow).allowed);
  EXPECT_TRUE(limiter.check(Ask({{"x", "a_b"}, {"y", "c"}}, 1).request, kNow).allowed);
  EXPECT_TRUE(limiter.check(Ask({{"x", "ab"}, {"y", "_c"}}, 1).request, kNow).allowed);
}

TEST(Limiter, TimeNeverRunsBackwards) {
  Limiter limiter(set({rule("a", 1)}), {});
  Ask ask({{"key", "k"}}, 1);
  EXPECT_TRUE(limiter.check(ask.request, kNow).allowed);
  EXPECT_FALSE(limiter.check(ask.request, kNow - kHour).allowed);
}

TEST(Limiter, AFullTableAnswersByPolicy) {
  // Logs do not fit the sketch: while they count nobody gets their place.
  Rule closed = rule("closed", 10, Algorithm::sliding_log);
  closed.on_failure = OnFailure::closed;
  closed.match = {{"mode", MatchExact{"closed"}}};
  Rule open = rule("open", 10, Algorithm::sliding_log);
  open.match = {{"mode", MatchExact{"open"}}};
  LimiterOptions options;
  options.max_series = 1;
  Limiter limiter(set({closed, open}), options);
  EXPECT_TRUE(limiter.check(Ask({{"key", "a"}, {"mode", "open"}}, 1).request, kNow).allowed);
  Decision opened = limiter.check(Ask({{"key", "b"}, {"mode", "open"}}, 1).request, kNow);
  EXPECT_TRUE(opened.allowed);
  EXPECT_TRUE(opened.decider()->degraded);
  EXPECT_FALSE(limiter.check(Ask({{"key", "b"}, {"mode", "closed"}}, 1).request, kNow).allowed);
  EXPECT_EQ(limiter.sweep(kNow + kHour), 1u);
  EXPECT_TRUE(
      limiter.check(Ask({{"key", "b"}, {"mode", "closed"}}, 1).request, kNow + kHour).allowed);
}

TEST(Limiter, WhatIsIdleGivesItsPlaceAndKeepsItsCount) {
  for (Algorithm algorithm :
       {Algorithm::fixed_window, Algorithm::sliding_window, Algorithm::token_bucket}) {
    LimiterOptions options;
    options.max_series = 1000;
    Rule plain = rule("r", 5, algorithm);
    plain.on_failure = OnFailure::closed;
    Limiter limiter(set({plain}), options);
    Nanos now = kNow - kNow % kMinute;
    Ask early({{"key", "early"}}, 5);
    EXPECT_TRUE(limiter.check(early.request, now).allowed);
    Ask busy({{"key", "busy"}}, 1);
    int degraded = 0;
    int refused = 0;
    for (int key = 0; key < 20'000; ++key) {
      std::string name = std::to_string(key);
      Ask ask({{"key", name}}, 1);
      Decision decision = limiter.check(ask.request, now);
      refused += !decision.allowed;
      if (key % 10 != 0) continue;
      Decision mine = limiter.check(busy.request, now);
      degraded += mine.statuses[0].degraded;
    }
    // The sketch holds 19,000 series: some begin with units of others.
    EXPECT_LE(refused, 1000) << to_string(algorithm);
    EXPECT_EQ(degraded, 0) << to_string(algorithm);
    EXPECT_LE(limiter.series_count(), 1000u);
    EXPECT_FALSE(limiter.check(early.request, now).allowed) << to_string(algorithm);
    EXPECT_FALSE(limiter.check(busy.request, now).allowed) << to_string(algorithm);
    EXPECT_TRUE(limiter.check(early.request, now + 3 * kMinute).allowed) << to_string(algorithm);
  }
}

TEST(Limiter, WhatIsOverGivesItsPlaceWithoutASweep) {
  for (Algorithm algorithm : {Algorithm::fixed_window, Algorithm::sliding_window,
                              Algorithm::sliding_log, Algorithm::token_bucket}) {
    LimiterOptions options;
    options.max_series = 5000;
    Limiter limiter(set({rule("r", 5, algorithm)}), options);
    for (int round = 0; round < 3; ++round) {
      Nanos now = kNow + round * 3 * kMinute;
      int degraded = 0;
      for (int key = 0; key < 4000; ++key) {
        std::string name = std::to_string(round) + "-" + std::to_string(key);
        Ask ask({{"key", name}}, 5);
        Decision decision = limiter.check(ask.request, now);
        ASSERT_TRUE(decision.allowed) << to_string(algorithm) << round << " " << key;
        degraded += decision.statuses[0].degraded;
        ASSERT_FALSE(limiter.check(ask.request, now).allowed)
            << to_string(algorithm) << round << " " << key;
      }
      // A few find none of these where they look, and are counted in the sketch.
      EXPECT_LE(degraded, 40) << to_string(algorithm);
    }
    EXPECT_LE(limiter.series_count(), 5000u);
  }
}

/// However many keys come, none gets more than its limit, whatever the algorithm.
TEST(Limiter, AFullTableCountsOn) {
  for (Algorithm algorithm : {Algorithm::fixed_window, Algorithm::sliding_window,
                              Algorithm::sliding_log, Algorithm::token_bucket}) {
    LimiterOptions options;
    options.max_series = 10;
    Limiter limiter(set({rule("r", 5, algorithm)}), options);
    Nanos start = kNow - kNow % kMinute;
    std::map<std::string, int> admitted;
    for (int round = 0; round < 20; ++round) {
      for (int key = 0; key < 200; ++key) {
        std::string name = std::to_string(key);
        Ask ask({{"key", name}}, 1);
        Decision decision = limiter.check(ask.request, start + round);
        admitted[name] += decision.allowed;
        EXPECT_EQ(decision.allowed, decision.statuses[0].retry_after == 0);
      }
    }
    EXPECT_LE(limiter.series_count(), 10u);
    for (const auto& [key, count] : admitted) EXPECT_EQ(count, 5) << to_string(algorithm);
    // A window later they may again; two where the algorithm looks back.
    Ask ask({{"key", "150"}}, 5);
    EXPECT_TRUE(limiter.check(ask.request, start + 2 * kMinute).allowed) << to_string(algorithm);
    EXPECT_FALSE(limiter.check(ask.request, start + 2 * kMinute).allowed);
  }
}

TEST(Limiter, DrainsWholeTotalsOnceAndAbsorbsOthers) {
  LimiterOptions options;
  options.replicated = true;
  options.incarnation = {1, 1};
  Limiter limiter(set({rule("a", 10)}), options);
  Ask ask({{"key", "k"}}, 3);
  limiter.check(ask.request, kNow);
  limiter.check(ask.request, kNow);
  std::vector<crdt::OwnCount> out;
  EXPECT_FALSE(limiter.replica_side().drain(out, 100));
  ASSERT_EQ(out.size(), 1u);
  EXPECT_EQ(out[0].value, 6u);
  EXPECT_TRUE(out[0].urgent);
  crdt::Cell cell{out[0].cell, {}, {}};
  cell.raise({{1, 1}, 0}, 6);
  cell.raise({{2, 2}, 0}, 2);
  EXPECT_TRUE(limiter.replica_side().absorb(cell));
  out.clear();
  limiter.replica_side().drain(out, 100);
  EXPECT_TRUE(out.empty());
  EXPECT_EQ(limiter.used(0, ask.request, kNow), 8u);
  EXPECT_FALSE(limiter.check(ask.request, kNow).allowed);
}

TEST(Limiter, ABucketThatWasResetForgetsWhatHadDrained) {
  LimiterOptions options;
  options.replicated = true;
  options.incarnation = {1, 1};
  Limiter limiter(set({rule("a", 10, Algorithm::token_bucket)}), options);
  Ask ask({{"key", "k"}}, 6);
  limiter.check(ask.request, kNow);
  std::vector<crdt::OwnCount> out;
  limiter.replica_side().drain(out, 100);
  Nanos later = kNow + kHour;
  crdt::Cell news{out[0].cell, {{{{2, 2}, static_cast<std::uint64_t>(later)}, 3}}, {}};
  news.bucket = {{3, later, static_cast<crdt::DebtTicks>(3 * kMinute)}, later, later + kHour};
  limiter.replica_side().reset(news, slot_of(out[0]));
  EXPECT_EQ(limiter.used(0, ask.request, later), 3u);
  // Three more at the peer are not hidden behind the six that drained.
  news.raise({{2, 2}, static_cast<std::uint64_t>(later)}, 6);
  limiter.replica_side().absorb(news);
  EXPECT_EQ(limiter.used(0, ask.request, later), 6u);
  limiter.check(Ask({{"key", "k"}}, 1).request, later);
  out.clear();
  limiter.replica_side().drain(out, 100);
  ASSERT_EQ(out.size(), 1u);
  EXPECT_EQ(out[0].value, 1u);
  EXPECT_EQ(out[0].birth, static_cast<std::uint64_t>(later));
}

TEST(Limiter, ABucketThatWasResetKeepsWhatWasNotHandedOver) {
  LimiterOptions options;
  options.replicated = true;
  options.incarnation = {1, 1};
  Limiter limiter(set({rule("a", 10, Algorithm::token_bucket)}), options);
  limiter.check(Ask({{"key", "k"}}, 6).request, kNow);
  std::vector<crdt::OwnCount> out;
  limiter.replica_side().drain(out, 100);
  Nanos later = kNow + kHour;
  limiter.check(Ask({{"key", "k"}}, 2).request, later);
  crdt::Cell news{out[0].cell, {{{{2, 2}, static_cast<std::uint64_t>(later)}, 3}}, {}};
  news.bucket = {{3, later, static_cast<crdt::DebtTicks>(3 * kMinute)}, later, later + kHour};
  limiter.replica_side().reset(news, slot_of(out[0]));
  EXPECT_EQ(limiter.used(0, Ask({{"key", "k"}}, 1).request, later), 5u);
  out.clear();
  limiter.replica_side().drain(out, 100);
  ASSERT_EQ(out.size(), 1u);
  EXPECT_EQ(out[0].value, 8u);
}

TEST(Limiter, RebaseLeavesTheDurablePartBehind) {
  for (Algorithm algorithm : {Algorithm::fixed_window, Algorithm::token_bucket}) {
    LimiterOptions options;
    options.replicated = true;
    options.incarnation = {1, 1};
    Limiter limiter(set({rule("a", 10, algorithm)}), options);
    Ask ask({{"key", "k"}}, 6);
    limiter.check(ask.request, kNow);
    std::vector<crdt::OwnCount> out;
    limiter.replica_side().drain(out, 100);
    limiter.replica_side().rebase({2, 2}, [](const crdt::CellId&, const crdt::SlotId& slot) {
      EXPECT_EQ(slot.writer, (crdt::Incarnation{1, 1}));
      return std::uint64_t{4};
    });
    EXPECT_EQ(limiter.used(0, ask.request, kNow), 6u);
    out.clear();
    limiter.replica_side().drain(out, 100);
    ASSERT_EQ(out.size(), 1u);
    EXPECT_EQ(out[0].value, 2u);
  }
}

/// A peer's slot of the bucket in `own`, born a second later.
crdt::Cell begun_by_peer(const crdt::OwnCount& own, std::uint64_t value) {
  crdt::Cell cell;
  cell.id = own.cell;
  Nanos at = kNow + kSecond;
  cell.raise({{7, 7}, static_cast<std::uint64_t>(at)}, value);
  cell.bucket = {{value, at, 0}, at, at + kSecond};
  return cell;
}

TEST(Limiter, ABucketThatWasResetWhileTimeStandsStillGetsAnotherSlot) {
  LimiterOptions options;
  options.replicated = true;
  options.incarnation = {1, 1};
  Limiter limiter(set({rule("a", 10, Algorithm::token_bucket)}), options);
  Ask ask({{"key", "k"}}, 3);
  std::vector<crdt::OwnCount> out;
  ASSERT_TRUE(limiter.check(ask.request, kNow).allowed);
  limiter.replica_side().drain(out, 100);
  limiter.replica_side().reset(begun_by_peer(out.at(0), 1), slot_of(out.at(0)));
  ASSERT_TRUE(limiter.check(Ask({{"key", "k"}}, 2).request, kNow).allowed);
  limiter.replica_side().drain(out, 100);
  ASSERT_EQ(out.size(), 2u);
  EXPECT_EQ(out[1].value, 2u);
  EXPECT_GT(out[1].birth, out[0].birth);
}

/// What the replica resets ends sooner than what a sweep has seen.
TEST(Limiter, ABucketThatWasResetIsForgottenByItsNewEnd) {
  LimiterOptions options;
  options.replicated = true;
  options.incarnation = {1, 1};
  Limiter limiter(set({rule("a", 10, Algorithm::token_bucket)}), options);
  std::vector<crdt::OwnCount> out;
  ASSERT_TRUE(limiter.check(Ask({{"key", "k"}}, 10).request, kNow).allowed);
  limiter.replica_side().drain(out, 100);
  crdt::Cell news = begun_by_peer(out.at(0), 1);
  ASSERT_LT(news.bucket.expiry, out[0].bucket.expiry);
  EXPECT_EQ(limiter.sweep(kNow), 0u);
  limiter.replica_side().reset(news, slot_of(out[0]));
  EXPECT_EQ(limiter.sweep(news.bucket.expiry - 1), 0u);
  EXPECT_EQ(limiter.sweep(news.bucket.expiry), 1u);
}

/// Such a bucket is over before its second is, and is asked for at no replica then.
TEST(Limiter, ABucketThatWasLetGoAndIsOverGetsAnotherSlot) {
  LimiterOptions options;
  options.replicated = true;
  options.incarnation = {1, 1};
  options.max_series = 2;  // one is in no part
  Rule quick = rule("a", 10, Algorithm::token_bucket);
  quick.window = 10 * kMillisecond;
  Limiter limiter(set({quick}), options);
  std::map<std::pair<crdt::CellId, std::uint64_t>, std::uint64_t> held;
  std::vector<crdt::OwnCount> out;
  auto consume = [&](std::string_view key, Nanos now) {
    ASSERT_TRUE(limiter.check(Ask({{"key", key}}, 1).request, now).allowed);
    out.clear();
    limiter.replica_side().drain(out, 100);
    ASSERT_EQ(out.size(), 1u);
    EXPECT_GT(out[0].value, std::exchange((held[{out[0].cell, out[0].birth}]), out[0].value));
  };
  auto kept = [&](const crdt::CellId& id, const crdt::SlotId& slot) {
    return held[{id, slot.birth}];
  };
  consume("one", kNow);
  consume("two", kNow);
  std::size_t gone = limiter.replica_side().let_go(100'000, kept);
  gone += limiter.replica_side().let_go(100'000, kept);
  ASSERT_EQ(gone, 1u);
  consume("one", kNow + kSecond / 2);
  consume("two", kNow + kSecond / 2);
}

TEST(Limiter, ABucketIsForgottenOnceItIsFull) {
  LimiterOptions options;
  options.replicated = true;
  options.incarnation = {1, 1};
  Limiter limiter(set({rule("a", 10, Algorithm::token_bucket)}), options);
  std::vector<crdt::OwnCount> out;
  ASSERT_TRUE(limiter.check(Ask({{"key", "k"}}, 1).request, kNow).allowed);
  limiter.replica_side().drain(out, 100);
  EXPECT_EQ(limiter.sweep(kNow), 0u);
  ASSERT_TRUE(limiter.check(Ask({{"key", "k"}}, 9).request, kNow + kSecond).allowed);
  limiter.replica_side().drain(out, 100);
  Nanos full = out.at(1).bucket.expiry;
  ASSERT_GT(full, out[0].bucket.expiry);
  EXPECT_EQ(limiter.sweep(full - 1), 0u);
  EXPECT_EQ(limiter.sweep(full), 1u);
}

TEST(Limiter, AnOwnCountComesWithACheckpointThatCountsIt) {
  LimiterOptions options;
  options.replicated = true;
  options.incarnation = {1, 1};
  Limiter limiter(set({rule("a", 10, Algorithm::token_bucket)}), options);
  Ask ask({{"key", "k"}}, 3);
  std::vector<crdt::OwnCount> out;
  ASSERT_TRUE(limiter.check(ask.request, kNow).allowed);
  limiter.replica_side().drain(out, 100);
  ASSERT_TRUE(limiter.check(ask.request, kNow).allowed);
  // The peer counts more units, but none of these.
  limiter.replica_side().absorb(begun_by_peer(out.at(0), 9));
  limiter.replica_side().drain(out, 100);
  ASSERT_EQ(out.size(), 2u);
  EXPECT_EQ(out[1].value, 6u);
  EXPECT_EQ(out[1].bucket.checkpoint.counted, 6u);
  EXPECT_EQ(out[1].bucket.checkpoint.at, kNow);
}

TEST(Limiter, AKnownKeyAllocatesNothing) {
  Rule bucket = rule("bucket", 1'000'000, Algorithm::token_bucket);
  bucket.burst = 1'000'000;
  Rule sliding = rule("sliding", 1'000'000, Algorithm::sliding_window);
  Limiter limiter(set({rule("fixed", 1'000'000), bucket, sliding, rule("small", 3)}), {});
  Ask ask({{"key", "a key that is longer than any small string"}}, 1);
  Decision decision;
  for (int i = 0; i < 10; ++i) limiter.check(ask.request, kNow, decision);
  std::uint64_t before = allocations;
  for (int i = 0; i < 1000; ++i) limiter.check(ask.request, kNow, decision);
  EXPECT_EQ(allocations - before, 0u);
}

TEST(Limiter, TwoThreadsOnOneKeyAdmitExactlyTheLimit) {
  for (Algorithm algorithm :
       {Algorithm::fixed_window, Algorithm::sliding_window, Algorithm::token_bucket}) {
    Rule shared = rule("shared", 20'000, algorithm);
    Rule narrow = rule("narrow", 15'000, algorithm);
    narrow.match = {{"side", MatchExact{"a"}}};
    Limiter limiter(set({shared, narrow}), {});
    std::atomic<std::uint64_t> admitted{0};
    auto run = [&](std::string_view side) {
      Ask ask({{"key", "hot"}, {"side", side}}, 1);
      Decision decision;
      std::uint64_t mine = 0;
      for (int i = 0; i < 40'000; ++i) {
        limiter.check(ask.request, kNow, decision);
        mine += decision.allowed;
      }
      admitted += mine;
    };
    std::thread other([&] { run("a"); });
    run("b");
    other.join();
    EXPECT_EQ(admitted.load(), 20'000u);
    Ask peek({{"key", "hot"}, {"side", "a"}}, 0);
    EXPECT_EQ(limiter.used(0, peek.request, kNow), 20'000u);
    EXPECT_LE(limiter.used(1, peek.request, kNow), 15'000u);
  }
}

TEST(Limiter, ALeakyBucketTellsHowLongToWait) {
  Rule leaky = rule("leaky", 60, Algorithm::leaky_bucket);  // one a second
  leaky.burst = 3;
  Rule slower = rule("slower", 30, Algorithm::leaky_bucket);
  Rule trial = rule("trial", 1, Algorithm::leaky_bucket);
  trial.shadow = true;
  trial.burst = 5;
  Limiter limiter(set({leaky, slower, trial}), {});
  Ask ask({{"key", "k"}}, 1);
  EXPECT_EQ(limiter.check(ask.request, kNow).delay(), 0);
  Decision second = limiter.check(ask.request, kNow);
  EXPECT_EQ(second.statuses[0].delay, kSecond);
  EXPECT_EQ(second.statuses[1].delay, 2 * kSecond);
  EXPECT_EQ(second.statuses[2].delay, kMinute);
  EXPECT_EQ(second.delay(), 2 * kSecond);
  EXPECT_EQ(second.statuses[0].limit, 3u);
  EXPECT_EQ(second.statuses[0].remaining, 1u);
  EXPECT_TRUE(limiter.check(ask.request, kNow).allowed);
  Decision full = limiter.check(ask.request, kNow);
  EXPECT_FALSE(full.allowed);
  EXPECT_EQ(full.delay(), 0);
  EXPECT_EQ(full.statuses[0].retry_after, kSecond);
  EXPECT_EQ(limiter.used(0, ask.request, kNow + kSecond), 2u);
}

TEST(Limiter, ABucketThatIsNotSharedCountsBeyond64Bits) {
  Rule bucket = rule("bucket", ~std::uint64_t{0} / 4, Algorithm::token_bucket);
  bucket.window = kMillisecond;
  bucket.burst = std::uint64_t{1} << 43;  // the largest whose debt fits into 64 bits
  Limiter limiter(set({bucket}), {});
  Entry key[] = {{"key", "k"}};
  Decision decision;
  // A burst comes back in 2 ns.
  for (Nanos i = 0; i <= (Nanos{1} << 21); ++i) {
    limiter.check({"api", key, bucket.burst}, kNow + 2 * i, decision);
    ASSERT_TRUE(decision.allowed);
  }
}

TEST(Limiter, ADegradedLeakyBucketDelaysNothing) {
  LimiterOptions options;
  options.max_series = 0;
  Limiter limiter(set({rule("leaky", 60, Algorithm::leaky_bucket)}), options);
  Ask ask({{"key", "k"}}, 1);
  limiter.check(ask.request, kNow);
  Decision decision = limiter.check(ask.request, kNow);
  EXPECT_TRUE(decision.statuses[0].degraded);
  EXPECT_EQ(decision.delay(), 0);
}

TEST(Limiter, ALogRemembersEachAdmission) {
  LimiterOptions options;
  options.replicated = true;
  options.incarnation = {1, 1};
  Limiter limiter(set({rule("log", 3, Algorithm::sliding_log)}), options);
  Ask ask({{"key", "k"}}, 1);
  EXPECT_TRUE(limiter.check(ask.request, kNow).allowed);
  EXPECT_TRUE(limiter.check(ask.request, kNow).allowed);
  EXPECT_TRUE(limiter.check(ask.request, kNow + 7).allowed);
  EXPECT_EQ(limiter.check(ask.request, kNow + 10).statuses[0].retry_after, kMinute - 10);
  std::vector<crdt::OwnCount> counts;
  limiter.replica_side().drain(counts, 10);
  ASSERT_EQ(counts.size(), 2u);
  EXPECT_EQ(counts[0].cell.epoch, (crdt::Epoch{kNow, kNow + kMinute}));
  EXPECT_EQ(counts[0].value, 2u);
  EXPECT_EQ(counts[1].cell.epoch, (crdt::Epoch{kNow + 7, kNow + 7 + kMinute}));
  // A peer's admission between them, which the own second one then waits for too.
  crdt::Cell cell;
  cell.id = {limiter.series_of(0, ask.request), {kNow + 5, kNow + 5 + kMinute}};
  cell.raise({{2, 2}, 0}, 1);
  limiter.replica_side().absorb(cell);
  EXPECT_EQ(limiter.used(0, ask.request, kNow + 10), 4u);
  EXPECT_EQ(limiter.check(ask.request, kNow + kMinute).statuses[0].remaining, 0u);
  EXPECT_EQ(limiter.check(ask.request, kNow + kMinute + 4).statuses[0].retry_after, 1);
  EXPECT_EQ(limiter.used(0, ask.request, kNow + kMinute + 4), 3u);
  EXPECT_EQ(limiter.sweep(kNow + 3 * kMinute), 0u);
  counts.clear();
  limiter.replica_side().drain(counts, 10);
  EXPECT_EQ(limiter.sweep(kNow + 3 * kMinute), 1u);
}

TEST(Limiter, ACalendarsUnitAndZoneArePartOfWhatCounts) {
  auto monthly = [](CalendarUnit unit, std::string zone, std::uint64_t limit) {
    Rule made = rule("quota", limit);
    made.calendar = CalendarWindow{unit, std::move(zone)};
    return Limiter(set({made}), {}).series_of(0, Ask({{"key", "k"}}, 1).request);
  };
  crdt::SeriesId berlin = monthly(CalendarUnit::month, "Europe/Berlin", 5);
  EXPECT_EQ(monthly(CalendarUnit::month, "Europe/Berlin", 6), berlin);
  EXPECT_NE(monthly(CalendarUnit::month, "Europe/Paris", 5), berlin);
  EXPECT_NE(monthly(CalendarUnit::year, "Europe/Berlin", 5), berlin);
}

TEST(Limiter, AMonthEndsInItsZone) {
  Rule monthly = rule("quota", 2);
  monthly.calendar = CalendarWindow{CalendarUnit::month, "Europe/Berlin"};
  Limiter limiter(set({monthly}), {});
  Ask ask({{"key", "k"}}, 1);
  Nanos end = 1'743'458'400 * kSecond;  // 31 March 2025 22:00 UTC, midnight in Berlin
  EXPECT_TRUE(limiter.check(ask.request, end - 30 * kDay).allowed);
  EXPECT_TRUE(limiter.check(ask.request, end - kHour).allowed);
  Decision denied = limiter.check(ask.request, end - 1);
  EXPECT_FALSE(denied.allowed);
  EXPECT_EQ(denied.statuses[0].retry_after, 1);
  EXPECT_EQ(denied.statuses[0].reset, 1);
  Decision fresh = limiter.check(ask.request, end);
  EXPECT_TRUE(fresh.allowed);
  EXPECT_EQ(fresh.statuses[0].reset, 30 * kDay);
}

TEST(Limiter, CountsRequestsThatNoRuleMet) {
  Rule other = test::rule("other", 5);
  Limiter limiter(test::set({test::rule("r", 5), other}), {});
  Entry key{"key", "k"};
  Entry user{"user", "u"};
  Decision decision;
  auto check = [&](std::string_view domain, const Entry& entry, std::string_view id = {}) {
    limiter.check({domain, {&entry, 1}, 1, id}, kMinute, decision);
    EXPECT_TRUE(decision.allowed);
  };
  check("api", key);
  EXPECT_EQ(limiter.unmet().no_rule, 0u);
  EXPECT_EQ(limiter.unmet().unknown_domain, 0u);
  check("api", user);
  check("apj", key);
  check("apk", user, "id");
  EXPECT_FALSE(limiter.reserve({"apl", {&key, 1}, 1}, kMinute, kSecond, decision));
  EXPECT_FALSE(limiter.reserve({"api", {&user, 1}, 1}, kMinute, kSecond, decision));
  EXPECT_EQ(limiter.unmet().no_rule, 2u);
  EXPECT_EQ(limiter.unmet().unknown_domain, 3u);
  EXPECT_EQ(limiter.unmet().last_unknown_domain, "apl");
  // Rules that are named are asked about for another node.
  const std::string_view filter[] = {"gone"};
  Request named{"apj", {&key, 1}, 1};
  named.rule_filter = filter;
  limiter.check(named, kMinute, decision);
  EXPECT_EQ(limiter.unmet().unknown_domain, 3u);
  std::vector<Request> several{{"api", {&user, 1}, 1}, {"api", {&key, 1}, 1}, {"x", {&key, 1}, 1}};
  std::vector<Decision> decisions(3);
  limiter.check(several, kMinute, decisions);
  EXPECT_EQ(limiter.unmet().no_rule, 3u);
  EXPECT_EQ(limiter.unmet().last_unknown_domain, "x");
}

/// What docs/rules.md and `weir validate` say of a key that always asks.
TEST(Limiter, ASlidingWindowOfASmallLimitHoldsBack) {
  constexpr int kWindows = 20;
  auto passed = [](std::uint64_t limit, Algorithm algorithm, std::uint32_t slots, bool strict) {
    Rule sliding = rule("r", limit, algorithm);
    sliding.slots = slots;
    sliding.strict = strict;
    Limiter limiter(set({sliding}), {});
    Ask ask({{"key", "k"}}, 1);
    std::uint64_t count = 0;
    for (Nanos at = 0; at < kWindows * kMinute; at += kSecond / 4) {
      count += limiter.check(ask.request, kNow + at).allowed;
    }
    return count;
  };
  EXPECT_EQ(passed(1, Algorithm::sliding_window, 1, false), kWindows / 2u);
  EXPECT_LE(passed(2, Algorithm::sliding_window, 1, false), kWindows + 1u);
  for (std::uint64_t limit = 3; limit <= 10; ++limit) {
    const std::uint64_t count = passed(limit, Algorithm::sliding_window, 1, false);
    EXPECT_LE(count, (limit - 1) * kWindows + 1) << limit;
    EXPECT_GE(count, (limit - 1) * kWindows * 9 / 10) << limit;
  }
  EXPECT_LE(passed(50, Algorithm::sliding_window, 1, true), 50u * kWindows / 2);
  EXPECT_GE(passed(1, Algorithm::sliding_window, 15, true), kWindows * 9u / 10);
  EXPECT_EQ(passed(1, Algorithm::sliding_log, 1, false), kWindows * 1u);
}

}  // namespace
}  // namespace weir
