#include <weir/limits/limiter/reservations.h>

#include <gtest/gtest.h>

#include <atomic>
#include <set>
#include <thread>
#include <utility>
#include <vector>

namespace weir {
namespace {

constexpr Nanos kNow = 1'000'000 * kMinute;

Hold hold(std::uint64_t series, std::uint64_t units, std::uint16_t descriptor = 0,
          std::uint64_t per_hit = 1) {
  Hold made;
  made.series = {series, series};
  made.units = units;
  made.descriptor = descriptor;
  made.per_hit = per_hit;
  return made;
}

/// Keeps what is settled.
struct Settling {
  std::vector<std::pair<std::uint64_t, std::uint64_t>> holds = {};  // series, cost
  SettledHold answer = {};
  auto each() {
    return [this](const Hold& held, std::uint64_t cost) {
      holds.emplace_back(held.series.hi, cost);
      return answer;
    };
  }
};

Ticket open(Reservations& reservations, std::vector<Hold> holds, Nanos timeout = kMinute,
            std::uint64_t hits = 1) {
  EXPECT_TRUE(reservations.keep_room());
  return reservations.open(std::move(holds), hits, kNow, timeout);
}

TEST(Reservations, ATicketIsSettledOnceWithWhatItCost) {
  Reservations reservations(10);
  Settling settling;
  Ticket ticket = open(reservations, {hold(1, 6, 0, 2), hold(2, 5, 1, 5), hold(3, 7, 2, 7)}, 0, 3);
  ASSERT_TRUE(ticket);
  std::vector<std::uint64_t> actual{4, 0};
  Settled settled = reservations.settle(ticket, actual, settling.each());
  EXPECT_TRUE(settled.known);
  EXPECT_EQ(settled.hits, 3u);
  EXPECT_FALSE(settled.lapsed);
  EXPECT_FALSE(settled.wants_commit);
  // Of the third descriptor nothing is said: as held.
  EXPECT_EQ(settling.holds, (decltype(settling.holds){{1, 8}, {2, 0}, {3, 7}}));
  EXPECT_FALSE(reservations.settle(ticket, actual, settling.each()).known);
  EXPECT_FALSE(reservations.settle({99}, actual, settling.each()).known);
  EXPECT_EQ(settling.holds.size(), 3u);
  EXPECT_EQ(reservations.counters().open, 0u);
}

TEST(Reservations, ACostThatCannotBeSaidSaturates) {
  Reservations reservations(1);
  Settling settling;
  std::uint64_t most = ~std::uint64_t{0};
  reservations.settle(open(reservations, {hold(1, 1, 0, 3)}), {&most, 1}, settling.each());
  EXPECT_EQ(settling.holds[0].second, most);
  Hold limited = hold(1, 1, 0, 3);
  limited.most = 100;
  reservations.settle(open(reservations, {limited}), {&most, 1}, settling.each());
  EXPECT_EQ(settling.holds[1].second, 100u);
}

TEST(Reservations, WhatOneHoldSaysTheWholeSays) {
  Reservations reservations(10);
  Settling settling;
  settling.answer = {true, true};
  Settled settled = reservations.settle(open(reservations, {hold(1, 1)}), {}, settling.each());
  EXPECT_TRUE(settled.lapsed);
  EXPECT_TRUE(settled.wants_commit);
}

TEST(Reservations, AtMostSoManyAreOpen) {
  Reservations reservations(2);
  Settling settling;
  Ticket first = open(reservations, {hold(1, 1)});
  ASSERT_TRUE(reservations.keep_room());
  EXPECT_FALSE(reservations.keep_room());
  reservations.give_room_back();
  open(reservations, {hold(2, 1)});
  EXPECT_FALSE(reservations.keep_room());
  reservations.settle(first, {}, settling.each());
  EXPECT_TRUE(reservations.keep_room());
  TicketCounters counters = reservations.counters();
  EXPECT_EQ(counters.open, 2u);
  EXPECT_EQ(counters.most, 2u);
  EXPECT_EQ(counters.refused, 2u);
  EXPECT_EQ(counters.timed_out, 0u);
  EXPECT_FALSE(Reservations(0).keep_room());
}

TEST(Reservations, OneCallerHasItsPartOfThem) {
  Reservations reservations(10, 3);
  Settling settling;
  const TicketHolder one{1};
  const TicketHolder other{17};  // of the same shard
  std::vector<Ticket> tickets;
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(reservations.keep_room(one));
    tickets.push_back(reservations.open({hold(1, 1)}, 1, kNow, kMinute, one));
  }
  EXPECT_FALSE(reservations.keep_room(one));
  EXPECT_EQ(reservations.counters().open, 3u);
  EXPECT_EQ(reservations.counters().refused, 1u);
  ASSERT_TRUE(reservations.keep_room(other));
  reservations.give_room_back(other);
  for (int i = 0; i < 7; ++i) ASSERT_TRUE(reservations.keep_room());  // nobody's
  EXPECT_FALSE(reservations.keep_room(other));
  reservations.settle(tickets[0], {}, settling.each(), 1);
  ASSERT_TRUE(reservations.keep_room(one));
  reservations.give_room_back(one);
  EXPECT_EQ(reservations.settle_due(kNow + kMinute, 10, settling.each()), 2u);
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(reservations.keep_room(one));
  EXPECT_FALSE(reservations.keep_room(one));
}

TEST(Reservations, WhatACallerLeasesIsKnownWhileItIsOpen) {
  Reservations reservations(10);
  Settling settling;
  const TicketHolder lease{5, true};
  auto take = [&](std::vector<Hold> holds, TicketHolder holder) {
    EXPECT_TRUE(reservations.keep_room(holder));
    return reservations.open(std::move(holds), 1, kNow, kMinute, holder);
  };
  Ticket first = take({hold(1, 4), hold(2, 5)}, lease);
  take({hold(1, 10)}, {5});        // reserved, not leased
  take({hold(1, 10)}, {6, true});  // another's
  Ticket second = take({hold(1, 3)}, lease);
  EXPECT_EQ(reservations.leased(5, {1, 1}), 7u);
  EXPECT_EQ(reservations.leased(5, {2, 2}), 5u);
  EXPECT_EQ(reservations.leased(5, {3, 3}), 0u);
  EXPECT_EQ(reservations.leased(7, {1, 1}), 0u);
  reservations.settle(first, {}, settling.each(), 5);
  EXPECT_EQ(reservations.leased(5, {1, 1}), 3u);
  EXPECT_EQ(reservations.leased(5, {2, 2}), 0u);
  reservations.settle(second, {}, settling.each(), 5);
  EXPECT_EQ(reservations.leased(5, {1, 1}), 0u);
  reservations.settle_all(settling.each());
  EXPECT_EQ(reservations.leased(6, {1, 1}), 0u);
}

TEST(Reservations, AreSettledByTheirCallerOnly) {
  Reservations reservations(10);
  Settling settling;
  for (std::uint64_t owner : {0, 7}) {
    ASSERT_TRUE(reservations.keep_room({owner}));
    const Ticket ticket = reservations.open({hold(1, 4)}, 4, kNow, kMinute, {owner});
    for (std::uint64_t other : {8, owner == 0 ? 7 : 0}) {
      EXPECT_FALSE(reservations.settle(ticket, {}, settling.each(), other).known);
    }
    EXPECT_TRUE(settling.holds.empty());
    EXPECT_TRUE(reservations.settle(ticket, {}, settling.each(), owner).known);
    settling.holds.clear();
  }
}

TEST(Reservations, WhatTimesOutIsSettledAsHeld) {
  Reservations reservations(10);
  Settling settling;
  open(reservations, {hold(1, 5, 0, 9)}, kSecond);
  open(reservations, {hold(2, 6)}, -kSecond);               // at once
  open(reservations, {hold(3, 7)}, 2 * Limiter::kMaxHold);  // no later than that
  EXPECT_EQ(reservations.settle_due(kNow - 1, 10, settling.each()), 0u);
  EXPECT_EQ(reservations.settle_due(kNow, 10, settling.each()), 1u);
  EXPECT_EQ(reservations.settle_due(kNow + kSecond - 1, 10, settling.each()), 0u);
  EXPECT_EQ(reservations.settle_due(kNow + kSecond, 10, settling.each()), 1u);
  EXPECT_EQ(reservations.settle_due(kNow + Limiter::kMaxHold, 10, settling.each()), 1u);
  EXPECT_EQ(settling.holds, (decltype(settling.holds){{2, 6}, {1, 5}, {3, 7}}));
  EXPECT_EQ(reservations.counters().timed_out, 3u);
}

TEST(Reservations, AreDueInTheOrderOfTheirDeadlinesWithinAShard) {
  Reservations reservations(100);
  std::set<std::uint64_t> numbers;
  std::vector<std::uint64_t> shards;
  for (std::uint64_t i = 0; i < 64; ++i) {
    Nanos timeout = static_cast<Nanos>(i * 37 % 64);
    Hold held = hold(i, static_cast<std::uint64_t>(timeout));
    Ticket ticket = open(reservations, {held}, timeout);
    numbers.insert(ticket.number);
    shards.push_back(ticket.number % 16);
  }
  EXPECT_EQ(numbers.size(), 64u);
  EXPECT_FALSE(numbers.contains(0));
  Settling settling;
  EXPECT_EQ(reservations.settle_due(kNow + 31, 10, settling.each()), 10u);  // at most so many
  EXPECT_EQ(reservations.settle_due(kNow + 31, 100, settling.each()), 22u);
  std::vector<std::uint64_t> last(16);
  for (const auto& [series, timeout] : settling.holds) {
    EXPECT_LE(timeout, 31u);
    EXPECT_LE(last[shards[series]], timeout);
    last[shards[series]] = timeout;
  }
  reservations.settle_all(settling.each());
  EXPECT_EQ(settling.holds.size(), 64u);
  EXPECT_EQ(reservations.counters().open, 0u);
  EXPECT_EQ(reservations.counters().timed_out, 32u);  // nobody waited for the rest
}

TEST(Reservations, OfTwoThreadsThatSettleATicketOneDoes) {
  Reservations reservations(1000);
  std::vector<Ticket> tickets;
  for (std::uint64_t i = 0; i < 1000; ++i) tickets.push_back(open(reservations, {hold(i, 1)}, 0));
  std::atomic<int> settled{0};
  auto count = [&](const Hold&, std::uint64_t) {
    ++settled;
    return SettledHold{};
  };
  std::thread other([&] {
    for (Ticket ticket : tickets) reservations.settle(ticket, {}, count);
  });
  reservations.settle_due(kNow, 1000, count);
  other.join();
  EXPECT_EQ(settled, 1000);
  EXPECT_EQ(reservations.counters().open, 0u);
}

}  // namespace
}  // namespace weir
