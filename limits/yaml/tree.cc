#include <weir/limits/yaml/tree.h>

#include <fmt/format.h>
#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/exceptions.h>
#include <yaml-cpp/mark.h>
#include <yaml-cpp/parser.h>

#include <sstream>

#include <weir/limits/text/utf8.h>

namespace weir::yaml {
namespace {

constexpr std::size_t kMaxDepth = 64;
/// yaml-cpp holds every token of a [ ] or { } in memory until it ends, up to 250 bytes for one byte
/// of text. These keep that within about 0.6 GB, and leave room for 100,000 rules in JSON.
constexpr std::size_t kMaxBrackets = 1u << 20;
constexpr std::size_t kMaxIndicators = 4u << 20;
constexpr std::size_t kMaxNodes = 4u << 20;

Position position(const YAML::Mark& mark) {
  return mark.is_null() ? Position{} : Position{mark.line + 1, mark.column + 1};
}

/// Takes yaml-cpp's events. Its own Node is not used: that one loses duplicate keys' positions, and
/// which alias stands for what.
class TreeBuilder final : public YAML::EventHandler {
 public:
  explicit TreeBuilder(std::vector<Node>& nodes) : nodes_(nodes) {}

  /// The last document's root.
  std::uint32_t root() const { return root_; }

  /// The last document was none: yaml-cpp gave it without reading anything.
  bool stuck() const { return stuck_; }

  void OnDocumentStart(const YAML::Mark& mark) override {
    // At a stray comma it would report empty documents for ever.
    if (mark.pos <= last_start_) {
      stuck_ = true;
      throw YAML::ParserException(mark, "unexpected text after the end of a document");
    }
    last_start_ = mark.pos;
    anchors_.clear();
    open_.clear();
    root_ = kNoNode;
  }
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    add(Node::Kind::null, mark, "?", anchor);
  }
  void OnAlias(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    if (anchor >= anchors_.size() || anchors_[anchor] == kNoNode) {
      throw YAML::ParserException(mark, "an alias without its anchor");
    }
    attach(anchors_[anchor]);
  }
  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                const std::string& value) override {
    Node& node = nodes_[add(Node::Kind::scalar, mark, tag, anchor)];
    node.plain = tag != "!";
    node.text = value;
  }
  void OnSequenceStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                       YAML::EmitterStyle::value) override {
    open(Node::Kind::list, mark, tag, anchor);
  }
  void OnSequenceEnd() override { open_.pop_back(); }
  void OnMapStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                  YAML::EmitterStyle::value) override {
    open(Node::Kind::map, mark, tag, anchor);
  }
  void OnMapEnd() override { open_.pop_back(); }

 private:
  void attach(std::uint32_t node) {
    if (open_.empty()) {
      root_ = node;
    } else {
      nodes_[open_.back()].children.push_back(node);
    }
  }

  std::uint32_t add(Node::Kind kind, const YAML::Mark& mark, const std::string& tag,
                    YAML::anchor_t anchor) {
    if (nodes_.size() >= kMaxNodes) throw YAML::ParserException(mark, "too many values");
    const auto index = static_cast<std::uint32_t>(nodes_.size());
    Node& node = nodes_.emplace_back();
    node.kind = kind;
    node.at = position(mark);
    node.tagged = !(tag.empty() || tag == "?" || tag == "!");
    if (anchor != 0) {
      if (anchor >= anchors_.size()) anchors_.resize(anchor + 1, kNoNode);
      anchors_[anchor] = index;
    }
    attach(index);
    return index;
  }

  // The parser announces a collection before it recurses into it, so throwing here bounds its
  // stack.
  void open(Node::Kind kind, const YAML::Mark& mark, const std::string& tag,
            YAML::anchor_t anchor) {
    if (open_.size() >= kMaxDepth) {
      throw YAML::ParserException(mark, fmt::format("nested deeper than {} levels", kMaxDepth));
    }
    open_.push_back(add(kind, mark, tag, anchor));
  }

  std::vector<Node>& nodes_;
  std::vector<std::uint32_t> open_;
  std::vector<std::uint32_t> anchors_;  // by yaml-cpp's number, which starts at 1
  std::uint32_t root_ = kNoNode;
  int last_start_ = -1;
  bool stuck_ = false;
};

/// What yaml-cpp must not see: it takes a byte 4 for the end of the file and the rest for not
/// there, reads what is not UTF-8 as something else, and needs much memory for some small texts.
bool check_bytes(std::string_view text, Flaw& flaw) {
  std::size_t brackets = 0;
  std::size_t indicators = 0;
  Position& at = flaw.at;
  at = {1, 1};
  for (std::size_t i = 0; i < text.size();) {
    const char c = text[i];
    const auto byte = static_cast<unsigned char>(c);
    if (c == '\n') {
      ++at.line;
      at.column = 1;
      ++i;
      continue;
    }
    const std::size_t length = internal::utf8_length(text.substr(i, 4));
    if (length == 0 || (byte < 0x20 && c != '\t' && c != '\r') || byte == 0x7F) {
      flaw.text = fmt::format("UTF-8 text without control characters, got the byte 0x{:02x}", byte);
      return false;
    }
    switch (c) {
      case '[':
      case '{':
        ++brackets;
        [[fallthrough]];
      case ']':
      case '}':
      case ',':
      case ':':
      case '-':
      case '?':
      case '&':
      case '*':
      case '!':
        ++indicators;
        break;
      default:
        break;
    }
    if (brackets > kMaxBrackets || indicators > kMaxIndicators) {
      flaw.text = fmt::format(
          "a smaller file: at most {} of [ and {{, and {} of these and ] }} , : "
          "- ? & * !",
          kMaxBrackets, kMaxIndicators);
      return false;
    }
    ++at.column;
    i += length;
  }
  return true;
}

}  // namespace

std::uint32_t Tree::child(std::uint32_t map, std::string_view key) const {
  const Node& node = nodes[map];
  if (node.kind != Node::Kind::map) return kNoNode;
  for (std::size_t i = 0; i + 1 < node.children.size(); i += 2) {
    if (nodes[node.children[i]].text == key) return node.children[i + 1];
  }
  return kNoNode;
}

std::uint32_t Tree::child(std::uint32_t list, std::size_t item) const {
  const Node& node = nodes[list];
  const bool there = node.kind == Node::Kind::list && item < node.children.size();
  return there ? node.children[item] : kNoNode;
}

std::optional<Flaw> parse(std::string_view text, Tree& out) {
  Flaw flaw;
  if (!check_bytes(text, flaw)) return flaw;
  TreeBuilder builder(out.nodes);
  try {
    std::istringstream stream{std::string(text)};
    YAML::Parser parser(stream);
    while (parser.HandleNextDocument(builder)) {
      if (builder.root() != kNoNode) out.documents.push_back(builder.root());
    }
  } catch (const YAML::Exception& e) {
    if (builder.stuck()) out.documents.pop_back();
    return Flaw{position(e.mark), true, e.msg};
  }
  return std::nullopt;
}

}  // namespace weir::yaml
