#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <iterator>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weir/crdt/time.h>
#include <weir/limits/yaml/tree.h>

namespace weir::yaml {

/// One value of a document, and the path that messages give it: "peers[2].address".
struct Value {
  std::uint32_t node = kNoNode;
  std::string path;
};

/// Something that is wrong, where, and in the words of its kind of file.
struct Problem {
  Position at;
  std::string path;
  std::string text;
};

using Words = std::span<const std::string_view>;

/// How a kind of file says what is wrong.
class Wording {
 public:
  virtual ~Wording() = default;
  virtual std::string expected(std::string_view what) const = 0;
  virtual std::string expected(std::string_view what, const Node& got) const = 0;
  /// What a map is called; `fields` are those that it may have, if they are known.
  virtual std::string a_map(Words fields) const = 0;
  virtual std::string_view a_key() const = 0;
  /// What a whole number is called where there is `none`, or one out of its range.
  virtual std::string an_integer(bool none, std::uint64_t low, std::uint64_t high) const = 0;
  virtual std::string not_one_of(Words words, const Node& got) const = 0;
  virtual std::string unknown_field(std::string_view name, Words known) const = 0;
  /// `kind` is what the key is: "field".
  virtual std::string repeated(std::string_view kind, Position first) const = 0;
  virtual std::string missing(std::string_view what) const = 0;
  /// Of a field with a name and no value, where that is wrong whatever the field is; else empty.
  virtual std::string_view no_value() const { return {}; }
};

/// Takes values out of a tree, and notes all that is wrong with them. A function that returns bool
/// says whether the value was good; if it was not, that is noted, and `out` stays as it was.
///
/// What is read in all is bounded, so that aliases cannot make much of a small file. Not
/// thread-safe.
class Reader {
 public:
  /// Notes at most `most` problems.
  Reader(const Tree& tree, const Wording& wording, std::vector<Problem>& problems, std::size_t most)
      : tree_(tree), wording_(wording), problems_(problems), most_(most) {}

  // Problems

  /// There is no point in reading on.
  bool full() const { return stopped_ || problems_.size() >= most_; }
  std::size_t problems() const { return problems_.size(); }
  void fail(Position at, std::string_view path, std::string text);
  /// These two return false, as what was read is no good.
  bool fail(const Value& value, std::string text);
  bool expected(const Value& value, std::string_view what);

  // Values as they are

  const Node& node(const Value& value) const { return tree_.nodes[value.node]; }
  Position at(const Value& value) const { return node(value).at; }
  bool is_list(const Value& value) const { return is(value, Node::Kind::list); }
  bool is_map(const Value& value) const { return is(value, Node::Kind::map); }
  /// Of a scalar without a tag; null if it is anything else.
  const std::string* scalar(const Value& value) const;

  // Maps and lists

  struct Field {
    std::string_view name;
    std::function<bool(const Value&)> read;
    std::string_view required = {};  ///< what is missing without it; empty: it may be left out
  };
  struct Fields {
    bool is_map = false;
    std::vector<std::string_view> bad;  ///< those that are wrong, and those that are missing
  };
  /// Reads the fields that are known; others, and those that come again, are noted.
  Fields mapping(const Value& value, std::span<const Field> known);
  Fields mapping(const Value& value, std::initializer_list<Field> known) {
    return mapping(value, std::span(known.begin(), known.size()));
  }

  struct Member {
    std::string_view name;
    Value key;  ///< its path is that of the value
    Value value;
  };
  /// A map whose keys may be any text. What comes again, or is no text, is noted and left out.
  /// `kind` says what the keys are.
  bool entries(const Value& map, std::string_view kind, std::vector<Member>& out);
  /// A list; `what` says what it lists.
  bool items(const Value& list, std::string_view what, std::vector<Value>& out);

  // Scalars

  bool text(const Value& value, std::string_view what, std::string& out);
  /// Of 1 to `most` bytes, none of them NUL.
  bool text(const Value& value, std::string_view what, std::size_t most, std::string& out);
  /// In decimal digits, without quotes and without a zero in front.
  bool integer(const Value& value, std::uint64_t low, std::uint64_t high, std::uint64_t& out);
  template <typename T>
  bool integer(const Value& value, std::uint64_t low, std::uint64_t high, T& out) {
    std::uint64_t wide = 0;
    if (!integer(value, low, high, wide)) return false;
    out = static_cast<T>(wide);
    return true;
  }
  bool duration(const Value& value, std::string_view what, Nanos low, Nanos high, Nanos& out);
  /// Bytes; a multiple of `multiple`.
  bool size(const Value& value, std::uint64_t low, std::uint64_t high, std::uint64_t multiple,
            std::uint64_t& out);
  /// One of some words, each of which stands for something.
  template <typename T>
  using Choice = std::pair<std::string_view, T>;
  template <typename T>
  bool choice(const Value& value, std::span<const Choice<T>> choices, T& out) {
    std::vector<std::string_view> words;
    for (const auto& [word, meaning] : choices) words.push_back(word);
    const std::size_t which = choose(value, words);
    if (which == words.size()) return false;
    out = choices[which].second;
    return true;
  }
  template <typename T>
  bool choice(const Value& value, std::initializer_list<Choice<T>> choices, T& out) {
    return choice(value, std::span(choices.begin(), choices.size()), out);
  }

 private:
  bool is(const Value& value, Node::Kind kind) const {
    return node(value).kind == kind && !node(value).tagged;
  }
  const Node& enter(std::uint32_t index);
  std::size_t choose(const Value& value, Words words);

  const Tree& tree_;
  const Wording& wording_;
  std::vector<Problem>& problems_;
  const std::size_t most_;
  std::size_t expanded_ = 0;
  bool stopped_ = false;
};

/// "a, b or c".
std::string listed(Words words);

/// `; did you mean "x"?`, or nothing if no word is near.
std::string did_you_mean(std::string_view text, Words words);

}  // namespace weir::yaml
