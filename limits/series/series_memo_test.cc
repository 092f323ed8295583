#include <gtest/gtest.h>
#include <weir/limits/series/series_memo.h>

#include <random>
#include <string>

namespace weir {
namespace {

/// Tells texts and owners apart, and counts how often it was asked.
struct Counted {
  std::uint64_t owner;
  int* calls;
  crdt::SeriesId operator()(std::string_view text) const {
    ++*calls;
    return {std::hash<std::string_view>{}(text), owner};
  }
};

TEST(SeriesMemo, HashesAKeyThatComesBackOnce) {
  SeriesMemo memo;
  int calls = 0;
  for (int i = 0; i < 100; ++i) {
    for (const char* text :
         {"", "a", "1234567", "12345678", "9b2f6c1e-0d1a-4a57-93f0-7b1f0c2d4e11"}) {
      EXPECT_EQ(memo.id_of(1, text, Counted{1, &calls}).hi, std::hash<std::string_view>{}(text));
    }
  }
  EXPECT_LE(calls, 5 + 2 * 99);  // two of five may share a place
}

TEST(SeriesMemo, NeverTakesOneForAnother) {
  SeriesMemo memo;
  std::mt19937_64 random(3);
  int calls = 0;
  for (int i = 0; i < 200'000; ++i) {
    // Texts that differ in one byte in the middle, of every length around the longest.
    std::string text(random() % (SeriesMemo::kMaxText + 4), 'x');
    if (!text.empty()) text[text.size() / 2] = static_cast<char>('a' + random() % 3);
    std::uint64_t owner = 1 + random() % 3;
    crdt::SeriesId id = memo.id_of(owner, text, Counted{owner, &calls});
    ASSERT_EQ(id.hi, std::hash<std::string_view>{}(text)) << text;
    ASSERT_EQ(id.lo, owner);
  }
}

}  // namespace
}  // namespace weir
