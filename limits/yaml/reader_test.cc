#include <weir/limits/yaml/reader.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>

#include <weir/limits/yaml/read_file.h>

namespace weir::yaml {
namespace {

using ::testing::ElementsAre;

/// As short as it can be.
class Terse final : public Wording {
 public:
  std::string expected(std::string_view what) const override { return std::string(what); }
  std::string expected(std::string_view what, const Node& got) const override {
    return std::string(what) + ", not '" + got.text + "'";
  }
  std::string a_map(Words) const override { return "map"; }
  std::string_view a_key() const override { return "key"; }
  std::string an_integer(bool none, std::uint64_t, std::uint64_t) const override {
    return none ? "number" : "number in range";
  }
  std::string not_one_of(Words words, const Node&) const override { return listed(words); }
  std::string unknown_field(std::string_view name, Words known) const override {
    return "unknown" + did_you_mean(name, known);
  }
  std::string repeated(std::string_view kind, Position first) const override {
    return std::string(kind) + " of line " + std::to_string(first.line);
  }
  std::string missing(std::string_view what) const override { return std::string(what); }
};

/// What reading `text` gives: "line:column path text", or "flaw line:column".
class Reading {
 public:
  explicit Reading(std::string_view text, std::size_t most = 10)
      : flaw(parse(text, tree_)), read(tree_, wording_, problems_, most) {
    if (!flaw) root = {tree_.documents.at(0), ""};
  }
  std::vector<std::string> problems() const {
    std::vector<std::string> out;
    for (const Problem& problem : problems_) {
      out.push_back(std::to_string(problem.at.line) + ":" + std::to_string(problem.at.column) +
                    " " + problem.path + " " + problem.text);
    }
    return out;
  }

 private:
  Tree tree_;
  Terse wording_;
  std::vector<Problem> problems_;

 public:
  std::optional<Flaw> flaw;
  Reader read;
  Value root;
};

TEST(Reader, SaysWhichFieldsAreBadAndWhere) {
  Reading in("good: 1\nbad: x\nbda: 2\ngood: 3\n");
  std::uint64_t good = 0;
  std::uint64_t bad = 7;
  const auto fields = in.read.mapping(
      in.root, {{"good", [&](const Value& v) { return in.read.integer(v, 0, 9, good); }},
                {"bad", [&](const Value& v) { return in.read.integer(v, 0, 9, bad); }},
                {"gone", [](const Value&) { return true; }, "something"},
                {"optional", [](const Value&) { return true; }}});
  EXPECT_TRUE(fields.is_map);
  EXPECT_THAT(fields.bad, ElementsAre("bad", "gone"));
  EXPECT_EQ(good, 1u);
  EXPECT_EQ(bad, 7u);
  EXPECT_THAT(in.problems(),
              ElementsAre("4:1 good field of line 1", "2:6 bad number, not 'x'",
                          "3:1 bda unknown; did you mean \"bad\"?", "1:1 gone something"));
}

TEST(Reader, ReadsScalarsOrLeavesThemAlone) {
  Reading in("[10, '10', 010, 99999999999999999999, 5m, 4KiB, b, [], !!int 3, \"a\\0\"]");
  std::vector<Value> items;
  ASSERT_TRUE(in.read.items(in.root, "list", items));
  EXPECT_EQ(items.at(4).path, "[4]");
  std::uint64_t number = 0;
  EXPECT_TRUE(in.read.integer(items[0], 10, 10, number));
  EXPECT_EQ(number, 10u);
  for (std::size_t i : {1, 2, 3, 6, 7, 8}) EXPECT_FALSE(in.read.integer(items[i], 0, 9, number));
  Nanos length = 0;
  EXPECT_TRUE(in.read.duration(items[4], "length", kSecond, kHour, length));
  EXPECT_EQ(length, 5 * kMinute);
  EXPECT_FALSE(in.read.duration(items[4], "length", kHour, kDay, length));
  std::uint64_t bytes = 0;
  EXPECT_TRUE(in.read.size(items[5], 1, 8192, 4096, bytes));
  EXPECT_EQ(bytes, 4096u);
  EXPECT_FALSE(in.read.size(items[0], 1, 8192, 4096, bytes));
  int choice = 0;
  EXPECT_TRUE(in.read.choice<int>(items[6], {{"a", 1}, {"b", 2}}, choice));
  EXPECT_EQ(choice, 2);
  EXPECT_FALSE(in.read.choice<int>(items[7], {{"a", 1}, {"b", 2}}, choice));
  std::string text = "as it was";
  EXPECT_FALSE(in.read.text(items[9], "text", 10, text));
  EXPECT_FALSE(in.read.text(items[3], "text", 10, text));
  EXPECT_EQ(text, "as it was");
}

TEST(Reader, StopsAtItsLastProblem) {
  Reading in("[a, b, c]", 2);
  std::vector<Value> items;
  ASSERT_TRUE(in.read.items(in.root, "list", items));
  std::uint64_t number = 0;
  for (const Value& item : items) in.read.integer(item, 0, 9, number);
  EXPECT_TRUE(in.read.full());
  EXPECT_EQ(in.problems().size(), 2u);
}

TEST(Reader, AliasesDoNotMakeMuchOfALittle) {
  std::string text = "[&a " + std::string(1u << 20, 'x');
  for (int i = 0; i < 40; ++i) text += ", *a";
  Reading in(text + "]");
  std::vector<Value> items;
  in.read.items(in.root, "list", items);
  EXPECT_EQ(items.size(), 32u);
  EXPECT_TRUE(in.read.full());
  EXPECT_THAT(in.problems(), ElementsAre("1:2  at most 32 MiB when aliases are expanded"));
}

TEST(Tree, ATextEndsAtItsFirstFlaw) {
  Reading bytes("a: \x01");
  ASSERT_TRUE(bytes.flaw);
  EXPECT_FALSE(bytes.flaw->is_syntax);
  EXPECT_EQ(bytes.flaw->at.column, 4);
  Tree tree;
  const std::optional<Flaw> flaw = parse("a: 1\n---\nb: c: d\n", tree);
  ASSERT_TRUE(flaw);
  EXPECT_TRUE(flaw->is_syntax);
  EXPECT_EQ(flaw->at.line, 3);
  ASSERT_EQ(tree.documents.size(), 1u);
  EXPECT_NE(tree.child(tree.documents[0], "a"), kNoNode);
  EXPECT_EQ(tree.child(tree.documents[0], "b"), kNoNode);
  EXPECT_EQ(tree.child(tree.documents[0], std::size_t{0}), kNoNode);
}

TEST(ReadFile, SaysWhyItCannot) {
  const std::string path =
      (std::filesystem::temp_directory_path() / ("weir_reader_test." + std::to_string(getpid())))
          .string();
  std::ofstream(path) << "12345";
  std::string out;
  EXPECT_EQ(internal::read_file(path, 5, out), 0);
  EXPECT_EQ(out, "12345");
  EXPECT_EQ(internal::read_file(path, 4, out), EFBIG);
  EXPECT_GT(out.size(), 4u);
  std::filesystem::remove(path);
  EXPECT_EQ(internal::read_file(path, 5, out), ENOENT);
  EXPECT_EQ(internal::read_file("/tmp", 5, out), EISDIR);
}

}  // namespace
}  // namespace weir::yaml
