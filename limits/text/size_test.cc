#include <weir/limits/text/size.h>

#include <gtest/gtest.h>

#include <utility>

namespace weir {
namespace {

TEST(Sizes, ParseAndFormat) {
  const std::pair<const char*, std::uint64_t> sizes[] = {{"0", 0},
                                                         {"1", 1},
                                                         {"4095", 4095},
                                                         {"4KiB", 4096},
                                                         {"1023KiB", 1023u << 10},
                                                         {"1MiB", 1u << 20},
                                                         {"64GiB", 64ull << 30},
                                                         {"16TiB", 16ull << 40}};
  for (const auto& [text, bytes] : sizes) {
    std::uint64_t out = 1;
    EXPECT_TRUE(parse_size(text, out)) << text;
    EXPECT_EQ(out, bytes);
    EXPECT_EQ(format_size(bytes), text);
  }
  std::uint64_t out = 0;
  EXPECT_TRUE(parse_size("5B", out));
  EXPECT_EQ(out, 5u);
  for (const char* text : {"", "KiB", "-1", "+1", "1 KiB", "1kib", "1KB", "1.5GiB", "0x10", "1Ki",
                           "064KiB", "99999999999999999999", "8388609TiB"}) {
    EXPECT_FALSE(parse_size(text, out)) << text;
  }
}

}  // namespace
}  // namespace weir
