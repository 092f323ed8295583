#include <weir/limits/lease.h>

#include <gtest/gtest.h>

#include <weir/limits/test_util.h>

namespace weir {
namespace {

using test::rule;
using test::set;

constexpr Nanos kStart = 400'000 * kHour;

struct Ask {
  std::vector<Entry> entries{{"key", "k"}, {"method", "POST"}};
  Request request;
  explicit Ask(std::uint64_t hits = 1) {
    request.domain = "api";
    request.descriptor = entries;
    request.hits = hits;
  }
};

LeaseTerms terms(std::uint64_t most) {
  return {most, 10 * kSecond, kSecond, 10};
}

TEST(Lease, IsASmallPartOfWhatRemains) {
  Rule costly = rule("costly", 2000);
  costly.cost_by_method = {{"POST", 5}};
  Limiter limiter(set({rule("r", 1000), costly}), {});
  Decision decision;
  Lease lease = grant_lease(limiter, Ask().request, terms(1000), kStart, kStart, decision);
  EXPECT_TRUE(decision.allowed);
  EXPECT_EQ(lease.hits, 40u);  // 2000 / 5 / 10
  EXPECT_EQ(lease.term, 10 * kSecond);
  EXPECT_EQ(limiter.used(0, Ask().request, kStart), 40u);
  EXPECT_EQ(limiter.used(1, Ask().request, kStart), 200u);
  EXPECT_EQ(grant_lease(limiter, Ask().request, terms(7), kStart, kStart, decision).hits, 7u);
  EXPECT_TRUE(limiter.settle(lease.ticket, 3, kStart + kSecond).known);
  EXPECT_EQ(limiter.used(0, Ask().request, kStart), 10u);
  // As one decision each: a lease is no more than its request in what operators see.
  EXPECT_EQ(limiter.counters(0).allowed, 2u);
}

TEST(Lease, WithoutRoomForMoreItIsACheck) {
  Limiter limiter(set({rule("r", 12)}), {});
  Decision decision;
  Lease lease = grant_lease(limiter, Ask().request, terms(100), kStart, kStart, decision);
  EXPECT_FALSE(lease.ticket);
  EXPECT_TRUE(decision.allowed);
  EXPECT_EQ(limiter.used(0, Ask().request, kStart), 1u);
  lease = grant_lease(limiter, Ask(12).request, terms(100), kStart, kStart, decision);
  EXPECT_FALSE(lease.ticket);
  EXPECT_FALSE(decision.allowed);
  EXPECT_EQ(decision.decider()->retry_after, kMinute);
}

TEST(Lease, EndsWithTheWindowByTheNewestClock) {
  Rule sliding = rule("sliding", 1000);
  sliding.algorithm = Algorithm::sliding_window;
  sliding.slots = 6;
  Limiter limiter(set({rule("r", 1000), sliding}), {});
  Decision decision;
  Lease lease = grant_lease(limiter, Ask().request, terms(50), kStart + 7 * kSecond,
                            kStart + 7 * kSecond, decision);
  EXPECT_EQ(lease.term, 3 * kSecond);
  lease = grant_lease(limiter, Ask().request, terms(50), kStart + 7 * kSecond, kStart + 9 * kSecond,
                      decision);
  EXPECT_EQ(lease.term, kSecond);
  lease = grant_lease(limiter, Ask().request, terms(50), kStart + 7 * kSecond,
                      kStart + 10 * kSecond, decision);
  EXPECT_FALSE(lease.ticket);
}

TEST(Lease, NotWhereAHitMustBeAskedFor) {
  Decision decision;
  auto granted = [&](Rule one, Request request) {
    Limiter limiter(set({rule("r", 1000), std::move(one)}), {});
    bool lease = static_cast<bool>(
        grant_lease(limiter, request, terms(50), kStart, kStart, decision).ticket);
    EXPECT_EQ(limiter.used(0, request, kStart), lease ? 50u : request.hits);
    return lease;
  };
  Rule other = rule("other", 1000);
  EXPECT_TRUE(granted(other, Ask().request));
  EXPECT_FALSE(granted(other, Ask(0).request));
  Ask named;
  named.request.id = "id";
  EXPECT_FALSE(granted(other, named.request));
  Entry second{"key", "of another series"};
  Descriptor more{{&second, 1}, 1};
  Ask several;
  several.request.more = {&more, 1};
  EXPECT_FALSE(granted(other, several.request));
  other.durability = Durability::commit;
  EXPECT_FALSE(granted(other, Ask().request));
  other = rule("other", 1000);
  other.algorithm = Algorithm::sliding_log;
  EXPECT_FALSE(granted(other, Ask().request));
  other.algorithm = Algorithm::leaky_bucket;
  EXPECT_FALSE(granted(other, Ask().request));
  other.algorithm = Algorithm::token_bucket;
  EXPECT_TRUE(granted(other, Ask().request));
  other.enforcement = Enforcement::home;
  EXPECT_FALSE(granted(other, Ask().request));
}

TEST(Lease, LeavesTicketsToReservations) {
  LimiterOptions options;
  options.max_tickets = 4;
  Limiter limiter(set({rule("r", 1000)}), options);
  Decision decision;
  for (int i = 0; i < 5; ++i) {
    Lease lease = grant_lease(limiter, Ask().request, terms(2), kStart, kStart, decision);
    EXPECT_EQ(static_cast<bool>(lease.ticket), i < 3);
    EXPECT_TRUE(decision.allowed);
  }
  EXPECT_EQ(limiter.used(0, Ask().request, kStart), 8u);
  EXPECT_EQ(limiter.tickets().refused, 0u);
}

TEST(Lease, OneCallerHoldsItsPartOfALimit) {
  LimiterOptions options;
  options.caller_percent = 25;
  Rule costly = rule("costly", 3000);
  costly.cost_by_method = {{"POST", 2}};
  for (Algorithm algorithm : {Algorithm::fixed_window, Algorithm::token_bucket}) {
    Limiter limiter(set({rule("r", 1000, algorithm), costly}), options);
    Decision decision;
    auto lease = [&](std::uint64_t caller) {
      LeaseTerms wanted = terms(1000);
      wanted.caller = caller;
      return grant_lease(limiter, Ask().request, wanted, kStart, kStart, decision);
    };
    std::uint64_t held = 0;
    Lease last;
    for (int i = 0; i < 30; ++i) {
      Lease more = lease(1);
      EXPECT_TRUE(decision.allowed);
      held += more.hits;
      if (more.ticket) last = more;
    }
    EXPECT_GT(held, 240u);
    EXPECT_LE(held, 250u);
    EXPECT_GT(lease(2).hits, 10u);
    EXPECT_GT(lease(0).hits, 10u);  // nobody's
    EXPECT_FALSE(lease(1).ticket);
    limiter.settle(last.ticket, 0, kStart, 1);
    EXPECT_TRUE(lease(1).ticket);
  }
}

TEST(Lease, OfADeadClientIsChargedInFull) {
  Limiter limiter(set({rule("r", 1000)}), {});
  Decision decision;
  Lease lease = grant_lease(limiter, Ask().request, terms(50), kStart, kStart, decision);
  ASSERT_TRUE(lease.ticket);
  EXPECT_EQ(limiter.settle_due(kStart + 11 * kSecond - 1, 10), 0u);
  EXPECT_EQ(limiter.settle_due(kStart + 11 * kSecond, 10), 1u);
  EXPECT_EQ(limiter.used(0, Ask().request, kStart + 11 * kSecond), 50u);
  EXPECT_FALSE(limiter.settle(lease.ticket, 1, kStart + 11 * kSecond).known);
}

}  // namespace
}  // namespace weir
