#include <gtest/gtest.h>
#include <weir/limits/algorithms/divisor.h>

#include <random>

namespace weir::internal {
namespace {

void expect_as_hardware(std::uint64_t n, std::uint64_t d) {
  Divisor divisor(d);
  ASSERT_EQ(divisor.floor(n), n / d) << n << " / " << d;
  ASSERT_EQ(divisor.ceil(n), n / d + (n % d != 0)) << n << " / " << d;
}

TEST(Divisor, AtTheEdges) {
  const std::uint64_t most = ~std::uint64_t{0};
  const std::uint64_t edges[] = {
      1,        2,   3, 5, 7, 10, 1000, 3'600'000'000'000, most / 2, most / 2 + 1, most / 2 + 2,
      most - 1, most};
  for (std::uint64_t d : edges) {
    for (std::uint64_t n : edges) {
      expect_as_hardware(n, d);
      expect_as_hardware(0, d);
      // On both sides of a multiple.
      std::uint64_t multiple = most / d * d;
      expect_as_hardware(multiple, d);
      expect_as_hardware(multiple - 1, d);
    }
  }
}

TEST(Divisor, AsTheHardwareForAnySize) {
  std::mt19937_64 random(42);
  for (int i = 0; i < 1'000'000; ++i) {
    std::uint64_t d = random() >> (random() % 64);
    std::uint64_t n = random() >> (random() % 64);
    if (d == 0) continue;
    expect_as_hardware(n, d);
    std::uint64_t multiple = n / d * d;
    expect_as_hardware(multiple, d);
    if (multiple > 0) expect_as_hardware(multiple - 1, d);
  }
}

}  // namespace
}  // namespace weir::internal
