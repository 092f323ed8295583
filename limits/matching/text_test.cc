#include <gtest/gtest.h>
#include <weir/limits/matching/text.h>

#include <string>

namespace weir::internal {
namespace {

TEST(SameText, TellsEveryByteOfEveryLengthApart) {
  EXPECT_TRUE(same_text({}, ""));
  for (std::size_t size = 0; size < 40; ++size) {
    std::string a(size, 'a');
    std::string b = a;
    EXPECT_TRUE(same_text(a, b)) << size;
    EXPECT_FALSE(same_text(a, b + 'a')) << size;
    for (std::size_t i = 0; i < size; ++i) {
      b[i] = 'b';
      EXPECT_FALSE(same_text(a, b)) << size << " bytes, at " << i;
      b[i] = 'a';
    }
  }
}

}  // namespace
}  // namespace weir::internal
