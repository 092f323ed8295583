#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace weir::yaml {

/// From 1; 0 is "not known".
struct Position {
  int line = 0;
  int column = 0;
};

inline constexpr std::uint32_t kNoNode = std::numeric_limits<std::uint32_t>::max();

struct Node {
  enum class Kind : std::uint8_t { null, scalar, list, map };
  Kind kind = Kind::null;
  bool plain = false;   ///< a scalar without quotes
  bool tagged = false;  ///< carries a tag such as !!int
  Position at;
  std::string text;                     ///< of a scalar
  std::vector<std::uint32_t> children;  ///< of a map: key, value, key, value
};

/// A text's documents, with positions. An alias is one more reference to the node that it stands
/// for, and nothing is expanded. A node may even contain itself, so nobody may walk a tree without
/// a bound.
struct Tree {
  std::vector<Node> nodes;
  std::vector<std::uint32_t> documents;  ///< their roots

  /// A map's value; kNoNode if it has none, or is no map.
  std::uint32_t child(std::uint32_t map, std::string_view key) const;
  /// A list's item; kNoNode if it has none, or is no list.
  std::uint32_t child(std::uint32_t list, std::size_t item) const;
};

/// Why a text, or the rest of it, is no tree.
struct Flaw {
  Position at;
  bool is_syntax = false;
  std::string text;  ///< what YAML's grammar says; of bytes that are no text, what was expected
};

/// The largest text that parse() is made for; its caller sees to it.
inline constexpr std::size_t kMaxText = 16u << 20;

/// Reads `text` up to its first flaw; the documents in front of that are in `out`. A text that has
/// bytes which are no text is not read at all. Memory and depth are bounded, whatever the text is.
std::optional<Flaw> parse(std::string_view text, Tree& out);

}  // namespace weir::yaml
