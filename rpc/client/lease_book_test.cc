#include <weir/rpc/client/lease_book.h>

#include <gtest/gtest.h>

namespace weir {
namespace {

using Way = LeaseBook::Way;

LeaseOptions options() {
  LeaseOptions out;
  out.enabled = true;
  out.hot = 2;
  out.first = 4;
  out.most = 100;
  return out;
}

std::shared_ptr<const Reply> reply() {
  return std::make_shared<Reply>();
}

LeaseBook::Grant grant(const std::string& ticket, std::uint64_t hits, Nanos term = kSecond) {
  return {1, ticket, hits, term, reply()};
}

TEST(LeaseBook, AHotKeySpendsItsBlockAndReturnsIt) {
  LeaseBook book(options());
  EXPECT_EQ(book.take("k", 1, 0).way, Way::call);
  LeaseBook::Answer ask = book.take("k", 1, 1);
  EXPECT_EQ(ask.way, Way::lease);
  EXPECT_EQ(ask.most, 4u);
  EXPECT_EQ(book.take("k", 1, 2).way, Way::wait);
  book.granted("k", 1, grant("t", 4), 1, 3);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(book.take("k", 1, 4).way, Way::spent);
  auto returns = book.take_returns(4);
  ASSERT_EQ(returns.size(), 1u);
  EXPECT_EQ(returns[0].ticket, "t");
  EXPECT_EQ(returns[0].node, 1u);
  EXPECT_EQ(returns[0].used, 4u);
  EXPECT_TRUE(book.take_returns(5).empty());
  ask = book.take("k", 1, 5);
  EXPECT_EQ(ask.way, Way::lease);
  EXPECT_EQ(ask.most, 8u);  // it ran out early
  book.granted("k", 1, grant("u", 8), 5, 5);
  // What is left goes back ahead of the end, and is never spent after.
  EXPECT_EQ(book.take("k", 1, 5 + 800 * kMillisecond - 1).way, Way::spent);
  EXPECT_NE(book.take("k", 1, 5 + 800 * kMillisecond).way, Way::spent);
  returns = book.take_returns(kSecond);
  ASSERT_EQ(returns.size(), 1u);
  EXPECT_EQ(returns[0].used, 2u);
  EXPECT_EQ(book.blocks(), 0u);
}

TEST(LeaseBook, UnusedBlocksShrinkUntilThereAreNone) {
  LeaseBook book(options());
  Nanos now = 0;
  std::uint64_t last = 100;
  for (int i = 0; i < 10; ++i) {
    LeaseBook::Answer answer = book.take("k", 1, now);
    if (answer.way == Way::call) answer = book.take("k", 1, now);
    if (answer.way == Way::call) {
      EXPECT_LE(last, 2u);
      // Until it is hot again: as many calls within a term as the first block would have saved.
      book.take("k", 1, now);
      answer = book.take("k", 1, now);
      EXPECT_EQ(answer.way, Way::lease);
      EXPECT_EQ(answer.most, 4u);
      return;
    }
    ASSERT_EQ(answer.way, Way::lease);
    EXPECT_LT(answer.most, last);
    last = answer.most;
    book.granted("k", 1, grant("t", answer.most), now, now);
    now += 2 * kSecond;
    book.take_returns(now);
  }
  FAIL() << "still leases " << last;
}

TEST(LeaseBook, ADenialAnswersItsKeyForAShortTime) {
  LeaseBook book(options());
  book.take("k", 5, 0);
  book.denied("k", 5, reply(), 10 * kSecond, 0);
  EXPECT_EQ(book.take("k", 5, 99 * kMillisecond).way, Way::denied);
  EXPECT_EQ(book.take("k", 6, 99 * kMillisecond).way, Way::denied);
  EXPECT_EQ(book.take("k", 5, 99 * kMillisecond).age, 99 * kMillisecond);
  EXPECT_NE(book.take("k", 4, 99 * kMillisecond).way, Way::denied);  // may fit
  EXPECT_NE(book.take("other", 5, 99 * kMillisecond).way, Way::denied);
  EXPECT_NE(book.take("k", 5, 100 * kMillisecond).way, Way::denied);
  // Not beyond what the node said.
  book.denied("k", 5, reply(), 10, kSecond);
  EXPECT_EQ(book.take("k", 5, kSecond + 9).way, Way::denied);
  EXPECT_NE(book.take("k", 5, kSecond + 10).way, Way::denied);
}

TEST(LeaseBook, AKeyThatCannotBeLeasedIsAskedForAlone) {
  LeaseBook book(options());
  book.take("k", 1, 0);
  EXPECT_EQ(book.take("k", 1, 0).way, Way::lease);
  book.refused("k", false, 0);
  EXPECT_EQ(book.take("k", 1, kSecond - 1).way, Way::call);
  book.take("k", 1, kSecond);
  EXPECT_EQ(book.take("k", 1, kSecond).way, Way::lease);
  book.refused("k", true, kSecond);
  EXPECT_EQ(book.take("k", 1, kSecond).way, Way::lease);
}

TEST(LeaseBook, MemoryIsBoundedAndWhoIsPushedOutReturns) {
  LeaseOptions few = options();
  few.max_keys = 2;
  LeaseBook book(few);
  book.take("a", 1, 0);
  ASSERT_EQ(book.take("a", 1, 0).way, Way::lease);
  book.granted("a", 1, grant("t", 4), 0, 0);
  book.take("b", 1, 0);
  book.take("c", 1, 0);
  EXPECT_EQ(book.keys(), 2u);
  auto returns = book.take_returns(0);
  ASSERT_EQ(returns.size(), 1u);
  EXPECT_EQ(returns[0].used, 1u);
  // One that is being asked for stays.
  ASSERT_EQ(book.take("b", 1, 0).way, Way::lease);
  ASSERT_EQ(book.take("c", 1, 0).way, Way::lease);
  EXPECT_EQ(book.take("d", 1, 0).way, Way::call);
  EXPECT_EQ(book.keys(), 2u);
}

TEST(LeaseBook, AReturnThatFailedIsTriedThreeTimes) {
  LeaseBook book(options());
  book.take("a", 1, 0);
  book.take("a", 1, 0);
  book.granted("a", 1, grant("t", 4), 0, 0);
  book.close_all(1);
  for (int i = 0; i < 3; ++i) {
    auto returns = book.take_returns(1);
    ASSERT_EQ(returns.size(), 1u);
    book.try_again(returns[0]);
  }
  EXPECT_TRUE(book.take_returns(1).empty());
}

}  // namespace
}  // namespace weir
