#include <weir/node/cli/table.h>

#include <gtest/gtest.h>

namespace weir::node {
namespace {

TEST(Table, AlignsColumnsByCharacters) {
  Table table({Table::Align::left, Table::Align::right, Table::Align::left});
  table.add({"name", "count", "note"});
  EXPECT_FALSE(table.has_rows());
  table.add({"é", "7", "x"});
  table.add({"longer", "1,000"});
  table.add({"a", "1", "b", "dropped"});
  EXPECT_TRUE(table.has_rows());
  EXPECT_EQ(table.text(1),
            " name    count  note\n"
            " é           7  x\n"
            " longer  1,000\n"
            " a           1  b\n");
}

TEST(Table, CellsCannotControlTheTerminal) {
  Table table({Table::Align::left});
  table.add({"\x1b[2J\n"});
  EXPECT_EQ(table.text(), "\\x1b[2J\\x0a\n");
}

TEST(WithCommas, GroupsThreeDigits) {
  EXPECT_EQ(with_commas(0), "0");
  EXPECT_EQ(with_commas(999), "999");
  EXPECT_EQ(with_commas(1000), "1,000");
  EXPECT_EQ(with_commas(123456), "123,456");
  EXPECT_EQ(with_commas(18446744073709551615u), "18,446,744,073,709,551,615");
}

TEST(ShortDuration, RoundsUpToFewDigits) {
  EXPECT_EQ(short_duration(0), "0s");
  EXPECT_EQ(short_duration(kNever), "never");
  EXPECT_EQ(short_duration(1), "1ns");
  EXPECT_EQ(short_duration(250 * kMillisecond), "250ms");
  EXPECT_EQ(short_duration(250 * kMillisecond + 1), "251ms");
  EXPECT_EQ(short_duration(1500 * kMillisecond), "1.5s");
  EXPECT_EQ(short_duration(1501 * kMillisecond), "1.51s");
  EXPECT_EQ(short_duration(59 * kSecond + 1), "59.1s");
  EXPECT_EQ(short_duration(kMinute), "1m");
  EXPECT_EQ(short_duration(3 * kHour + 1), "3h1m");
  EXPECT_EQ(short_duration(kNever - 1).substr(0, 8), "106751d2");
}

}  // namespace
}  // namespace weir::node
