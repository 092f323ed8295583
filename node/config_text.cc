#include <weir/node/config_text.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <weir/limits/text/size.h>
#include <weir/limits/text/utf8.h>
#include <weir/limits/yaml/read_file.h>

namespace weir::node {
namespace {

std::string shown(const yaml::Node& node) {
  if (node.tagged) return "one with a YAML tag";
  switch (node.kind) {
    case yaml::Node::Kind::null:
      return "nothing";
    case yaml::Node::Kind::list:
      return "a list";
    case yaml::Node::Kind::map:
      return "a mapping";
    case yaml::Node::Kind::scalar:
      break;
  }
  return internal::quoted_text(node.text, '\'');
}

}  // namespace

std::string ConfigWording::expected(std::string_view what) const {
  return fmt::format("expected {}", what);
}

std::string ConfigWording::expected(std::string_view what, const yaml::Node& got) const {
  return fmt::format("expected {}, got {}", what, shown(got));
}

std::string ConfigWording::a_map(yaml::Words fields) const {
  return fmt::format("a mapping with the fields {}", fmt::join(fields, ", "));
}

std::string ConfigWording::an_integer(bool, std::uint64_t low, std::uint64_t high) const {
  return fmt::format("an integer from {} to {}", low, high);
}

std::string ConfigWording::not_one_of(yaml::Words words, const yaml::Node& got) const {
  return expected(fmt::format("one of {}", fmt::join(words, ", ")), got);
}

std::string ConfigWording::unknown_field(std::string_view, yaml::Words known) const {
  return fmt::format("unknown field; expected one of {}", fmt::join(known, ", "));
}

std::string ConfigWording::repeated(std::string_view kind, yaml::Position) const {
  return fmt::format("repeated {}; expected it once", kind);
}

std::vector<ConfigError> read_config_text(
    std::string_view text, const std::string& file,
    const std::function<void(const yaml::Tree&, const yaml::Value& root,
                             std::vector<yaml::Problem>&)>& read) {
  std::vector<ConfigError> errors;
  const auto fail = [&](yaml::Position at, std::string expected) {
    errors.push_back({file, at.line, at.column, "", std::move(expected)});
    return errors;
  };
  if (text.size() > kMaxConfigFile) {
    return fail({}, fmt::format("larger than {}", format_size(kMaxConfigFile)));
  }
  yaml::Tree tree;
  if (const auto flaw = yaml::parse(text, tree)) {
    return fail(flaw->at, (flaw->is_syntax ? "not YAML: " : "expected ") + flaw->text);
  }
  const std::vector<std::uint32_t>& documents = tree.documents;
  if (documents.empty() || tree.nodes[documents[0]].kind == yaml::Node::Kind::null) {
    return fail({1, 1}, "expected a mapping, got an empty document");
  }
  if (documents.size() > 1) {
    return fail(tree.nodes[documents[1]].at, "expected one document, got several");
  }
  std::vector<yaml::Problem> problems;
  read(tree, {documents[0], ""}, problems);
  for (yaml::Problem& problem : problems) {
    errors.push_back({file, problem.at.line, problem.at.column, std::move(problem.path),
                      std::move(problem.text)});
  }
  std::stable_sort(errors.begin(), errors.end(), [](const ConfigError& a, const ConfigError& b) {
    return std::pair(a.line, a.column) < std::pair(b.line, b.column);
  });
  return errors;
}

bool read_small_file(const std::string& path, std::size_t max, std::string& out,
                     std::string& reason) {
  const int error = internal::read_file(path, max, out);
  if (error == EISDIR) {
    reason = "it is a directory";
  } else if (error == EFBIG) {
    reason = fmt::format("larger than {}", format_size(max));
  } else if (error != 0) {
    reason = std::strerror(error);
  }
  return error == 0;
}

}  // namespace weir::node
