#include <weir/limits/text/number.h>

#include <gtest/gtest.h>

namespace weir {
namespace {

TEST(Numbers, AreDigitsAndNothingElse) {
  std::uint64_t out = 7;
  for (const char* text : {"", "-1", "+1", " 1", "1 ", "010", "00", "0x5", "1e3", "1_000", "1'000",
                           "1.0", "0b1", "one", "\xd9\xa1"}) {
    EXPECT_EQ(parse_number(text, out), Digits::none) << text;
  }
  EXPECT_EQ(parse_number("18446744073709551616", out), Digits::too_many);
  EXPECT_EQ(parse_number("99999999999999999999999", out), Digits::too_many);
  EXPECT_EQ(out, 7u);
  EXPECT_EQ(parse_number("0", out), Digits::good);
  EXPECT_EQ(out, 0u);
  EXPECT_EQ(parse_number("18446744073709551615", out), Digits::good);
  EXPECT_EQ(out, ~std::uint64_t{0});
}

}  // namespace
}  // namespace weir
