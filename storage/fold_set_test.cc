#include <weir/storage/fold_set.h>

#include <gtest/gtest.h>

#include <map>
#include <random>

#include <weir/storage/test_util.h>

namespace weir::storage {
namespace {

using testing::Model;

/// Cells of `series` series in a few windows and as buckets; many come again with more.
crdt::Cell random_cell(std::mt19937_64& random, std::uint64_t series) {
  std::uint64_t number = random() % series + 1;
  std::uint64_t writer = random() % 3;
  std::uint64_t value = random() % 50 + 1;
  Nanos start = static_cast<Nanos>(random() % 4) * kMinute;
  if (random() % 3 == 0) {
    return testing::bucket(number, 1, writer, value, kHour + static_cast<Nanos>(value), kDay);
  }
  return testing::windowed(number, {start, start + kMinute}, {{writer, value}});
}

/// Takes everything, and sees that the keys of each generation rise.
Model take_all(FoldSet& set) {
  Model taken;
  std::map<crdt::Generation, crdt::CellId> last;
  for (std::size_t left = set.size(); left > 0; --left) {
    EXPECT_EQ(set.size(), left);
    auto [generation, cell] = set.take();
    EXPECT_EQ(generation, crdt::generation_of(cell.id.epoch));
    auto [at, first] = last.try_emplace(generation, cell.id);
    EXPECT_TRUE(first || at->second < cell.id) << "the keys of a table do not rise";
    at->second = cell.id;
    EXPECT_TRUE(taken.emplace(cell.id, std::move(cell)).second) << "taken twice";
  }
  EXPECT_TRUE(set.empty());
  return taken;
}

TEST(FoldSet, TakesTheJoinOfWhatWasAddedInOrder) {
  std::mt19937_64 random(7);
  FoldSet set(1);
  for (std::uint64_t series : {1, 40, 3000, 3}) {
    Model model;
    for (int i = 0; i < 5000; ++i) {
      crdt::Cell cell = random_cell(random, series);
      testing::join_into(model, {{cell}, {}});
      set.add(std::move(cell));
    }
    EXPECT_EQ(set.size(), model.size());
    EXPECT_EQ(take_all(set), model);
  }
}

TEST(FoldSet, SeriesThatBeginAlikeAreToldApart) {
  FoldSet set(1);
  Model model;
  for (std::uint64_t hi : {std::uint64_t{0}, ~std::uint64_t{0}}) {
    for (std::uint64_t lo = 40; lo > 0; --lo) {
      crdt::Cell cell = testing::windowed(1, {0, kMinute}, {{1, lo}});
      cell.id.series = {hi, lo};
      testing::join_into(model, {{cell}, {}});
      set.add(std::move(cell));
    }
  }
  EXPECT_EQ(take_all(set), model);
}

}  // namespace
}  // namespace weir::storage
