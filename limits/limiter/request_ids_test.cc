#include <weir/limits/limiter/request_ids.h>

#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

namespace weir {
namespace {

constexpr Nanos kNow = 1'000'000 * kMinute;

/// True if the id was new, and is remembered with `number`.
bool first_time(RequestIds& ids, std::string_view domain, std::string_view id, Nanos now,
                std::uint64_t number = 1) {
  bool fresh = false;
  RequestIds::Answer answer;
  answer.ticket.number = number;
  ids.once(domain, id, now, [&](const RequestIds::Answer* known) {
    fresh = known == nullptr;
    if (known != nullptr) answer = *known;
    return &answer;
  });
  return fresh;
}

TEST(RequestIds, AnIdIsKnownUntilItsTimeIsOver) {
  RequestIds ids({}, 10, kSecond);
  EXPECT_TRUE(first_time(ids, "a", "x", kNow));
  EXPECT_FALSE(first_time(ids, "a", "x", kNow + kSecond - 1));
  EXPECT_TRUE(first_time(ids, "a", "x", kNow + kSecond));
  EXPECT_FALSE(first_time(ids, "a", "x", kNow + kSecond + 1));
  EXPECT_EQ(ids.repeated(), 2u);
  EXPECT_EQ(ids.evicted(), 0u);
  EXPECT_EQ(ids.size(), 1u);
}

TEST(RequestIds, DomainAndIdDoNotRunTogether) {
  RequestIds ids({}, 10, kSecond);
  EXPECT_TRUE(first_time(ids, "ab", "c", kNow));
  EXPECT_TRUE(first_time(ids, "a", "bc", kNow));
  EXPECT_TRUE(first_time(ids, "", "abc", kNow));
  EXPECT_EQ(ids.size(), 3u);
}

TEST(RequestIds, WhatIsNotToBeRememberedIsNot) {
  RequestIds ids({}, 10, kSecond);
  for (int i = 0; i < 2; ++i) {
    ids.once("a", "x", kNow, [](const RequestIds::Answer* known) -> const RequestIds::Answer* {
      EXPECT_EQ(known, nullptr);
      return nullptr;
    });
  }
  EXPECT_EQ(ids.size(), 0u);
}

TEST(RequestIds, TheOldestGoFirst) {
  RequestIds ids({}, 3, kSecond);
  for (const char* id : {"1", "2", "3"}) EXPECT_TRUE(first_time(ids, "a", id, kNow));
  EXPECT_FALSE(first_time(ids, "a", "1", kNow));  // not younger for that
  EXPECT_TRUE(first_time(ids, "a", "4", kNow));
  EXPECT_EQ(ids.evicted(), 1u);
  EXPECT_EQ(ids.size(), 3u);
  EXPECT_FALSE(first_time(ids, "a", "2", kNow));
  EXPECT_TRUE(first_time(ids, "a", "1", kNow));
}

TEST(RequestIds, RoomForNone) {
  RequestIds ids({}, 0, kSecond);
  EXPECT_TRUE(first_time(ids, "a", "x", kNow));
  EXPECT_TRUE(first_time(ids, "a", "x", kNow));
  EXPECT_EQ(ids.size(), 0u);
}

TEST(RequestIds, ExpiredOnesLeave) {
  RequestIds ids({}, 1 << 16, kSecond);
  for (int i = 0; i < 1000; ++i) first_time(ids, "a", std::to_string(i), kNow + i);
  ids.expire(kNow + kSecond + 499);
  EXPECT_EQ(ids.size(), 500u);
  ids.expire(kNow + kSecond + 1000);
  EXPECT_EQ(ids.size(), 0u);
}

TEST(RequestIds, ALargeTableKeepsAboutWhatItHasRoomFor) {
  constexpr int kRoom = 1 << 15;
  RequestIds ids({}, kRoom, kMinute);
  for (int i = 0; i < kRoom * 9 / 10; ++i) first_time(ids, "a", std::to_string(i), kNow);
  EXPECT_EQ(ids.evicted(), 0u);
  for (int i = 0; i < kRoom; ++i) first_time(ids, "b", std::to_string(i), kNow);
  EXPECT_LE(ids.size(), static_cast<std::size_t>(kRoom));
  EXPECT_TRUE(first_time(ids, "a", "0", kNow));
}

TEST(RequestIds, OfTwoThreadsOneIsTheFirst) {
  constexpr int kIds = 2000;
  RequestIds ids({}, kIds * 2, kMinute);
  std::atomic<int> first{0};
  auto run = [&] {
    for (int i = 0; i < kIds; ++i) first += first_time(ids, "a", std::to_string(i), kNow);
  };
  std::thread other(run);
  run();
  other.join();
  EXPECT_EQ(first, kIds);
}

}  // namespace
}  // namespace weir
