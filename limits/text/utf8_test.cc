#include <weir/limits/text/utf8.h>

#include <gtest/gtest.h>

namespace weir::internal {
namespace {

TEST(Utf8, LengthsOfWhatIsWellFormed) {
  EXPECT_EQ(utf8_length("a"), 1u);
  EXPECT_EQ(utf8_length("é"), 2u);
  EXPECT_EQ(utf8_length("水x"), 3u);
  EXPECT_EQ(utf8_length("\xf0\x9f\x8c\x8a"), 4u);
  for (const char* bad : {"", "\x80", "\xc0\xaf", "\xc3", "\xe0\x80\xaf", "\xed\xa0\x80",
                          "\xe2\x82", "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\xff"}) {
    EXPECT_EQ(utf8_length(bad), 0u) << bad;
  }
}

TEST(Utf8, CleanTextHasNoControlCharacters) {
  EXPECT_TRUE(is_clean_text(""));
  EXPECT_TRUE(is_clean_text("a b é 水"));
  for (const char* bad : {"a\n", "\x7f", "\x1b[2J", "a\xff"})
    EXPECT_FALSE(is_clean_text(bad)) << bad;
}

TEST(Utf8, PrefixesDoNotCutACharacter) {
  EXPECT_EQ(utf8_prefix("abc", 3), "abc");
  EXPECT_EQ(utf8_prefix("abc", 2), "ab");
  EXPECT_EQ(utf8_prefix("aé", 2), "a");
  EXPECT_EQ(utf8_prefix("a水", 3), "a");
  EXPECT_EQ(utf8_prefix("a水", 4), "a水");
  // More continuation bytes than a character has are no text.
  EXPECT_EQ(utf8_prefix("\x80\x80\x80\x80\x80\x80", 5).size(), 5u);
}

TEST(Utf8, PrintableTextCannotControlATerminal) {
  EXPECT_EQ(printable("plain é 水"), "plain é 水");
  EXPECT_EQ(printable("\x7f\t"), "\\x7f\\x09");
  EXPECT_EQ(printable("\xc2\x9b\xc2\xa0"), "\\x9b\xc2\xa0");
  EXPECT_EQ(printable("a\xff\xc2"), "a\uFFFD\uFFFD");
}

TEST(Utf8, QuotedTextIsEscapedAndCut) {
  EXPECT_EQ(quoted_text("a\"b\\c'"), "\"a\\\"b\\\\c'\"");
  EXPECT_EQ(quoted_text("it's", '\''), "'it\\'s'");
  EXPECT_EQ(quoted_text("a\nb\xff\xc2\x9b"), "\"a\\x0ab\\xff\\x9b\"");
  EXPECT_EQ(quoted_text(std::string(65, 'x')), '"' + std::string(64, 'x') + "\"...");
  EXPECT_EQ(quoted_text("水水", '"', 4), "\"水水\"");
  EXPECT_EQ(quoted_text("水水水", '"', 4), "\"水水\"...");
}

TEST(Utf8, FieldPaths) {
  EXPECT_EQ(field_path("", "limit"), "limit");
  EXPECT_EQ(field_path("rules[3]", "limit"), "rules[3].limit");
  EXPECT_EQ(field_path("a", "b\n"), "a.\"b\\x0a\"");
  EXPECT_EQ(field_path("a", std::string(65, 'x')), "a.\"" + std::string(64, 'x') + "\"...");
}

}  // namespace
}  // namespace weir::internal
