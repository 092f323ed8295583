#include <weir/crdt/cell_table.h>

#include <gtest/gtest.h>

#include <map>
#include <set>

#include <weir/crdt/cell.h>

namespace weir::crdt {
namespace {

struct Held {
  Cell cell;
  int value = 0;
};

CellId id_of(std::uint64_t number) {
  return {{number, number}, kBucketEpoch};
}

/// A map that is slow and surely right, beside the table.
struct Pair {
  explicit Pair(std::uint64_t different) : hashes(different) {}
  std::uint64_t hash(std::uint64_t number) const { return mix64(number, 7) % hashes; }
  void add(std::uint64_t number, int value) {
    Held& held = table.add(hash(number), id_of(number));
    held.value = value;
    expected[number] = &held;
    values[number] = value;
  }
  void erase(std::uint64_t number) {
    table.erase(hash(number), *expected.at(number));
    expected.erase(number);
  }
  void compare(std::uint64_t numbers) const {
    ASSERT_EQ(table.size(), expected.size());
    std::set<const Held*> walked;
    for (const Held& held : table) walked.insert(&held);
    ASSERT_EQ(walked.size(), expected.size());
    for (std::uint64_t number = 0; number < numbers; ++number) {
      const Held* held = table.find(hash(number), id_of(number));
      auto at = expected.find(number);
      ASSERT_EQ(held, at == expected.end() ? nullptr : at->second) << number;
      if (held != nullptr) {
        ASSERT_EQ(held->value, values.at(number));
        ASSERT_TRUE(walked.contains(held));
      }
    }
  }

  std::uint64_t hashes;
  CellTable<Held> table;
  std::map<std::uint64_t, const Held*> expected;
  std::map<std::uint64_t, int> values;
};

TEST(CellTable, HoldsWhatAMapHoldsHoweverHashesFall) {
  for (std::uint64_t hashes :
       {std::uint64_t{1}, std::uint64_t{3}, std::uint64_t{40}, ~std::uint64_t{0}}) {
    Pair pair(hashes);
    std::uint64_t random = hashes;
    constexpr std::uint64_t kNumbers = 60;
    for (int step = 0; step < 4000; ++step) {
      random = mix64(random + 0x9E3779B97F4A7C15ull, 1);
      std::uint64_t number = random % kNumbers;
      // Fills and empties in turns, so that it grows and shrinks.
      bool fill = (step / 500) % 2 == 0;
      if (!pair.expected.contains(number)) {
        if (fill || (random >> 32) % 8 == 0) pair.add(number, step);
      } else if (!fill || (random >> 32) % 8 == 0) {
        pair.erase(number);
      }
      if (step % 20 == 0) pair.compare(kNumbers);
    }
  }
}

TEST(CellTable, FetchingFindsByTheHashAlone) {
  CellTable<Held> table;
  table.fetch(5);
  EXPECT_EQ(table.fetch_entry(5), nullptr);
  const Held& held = table.add(5, id_of(1));
  table.fetch(5);
  EXPECT_EQ(table.fetch_entry(5), &held);
  EXPECT_EQ(table.fetch_entry(6), nullptr);
  EXPECT_EQ(table.find(5, id_of(2)), nullptr);
}

}  // namespace
}  // namespace weir::crdt
