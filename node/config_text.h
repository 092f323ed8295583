#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include <weir/limits/yaml/reader.h>
#include <weir/limits/yaml/tree.h>
#include <weir/node/config.h>

namespace weir::node {

// What node.yaml and the files beside it have in common: YAML, small, and how mistakes are told.

inline constexpr std::size_t kMaxConfigFile = 1u << 20;
inline constexpr std::size_t kMaxConfigProblems = 1000;

/// Says what is wrong as ConfigError::expected does.
class ConfigWording final : public yaml::Wording {
 public:
  std::string expected(std::string_view what) const override;
  std::string expected(std::string_view what, const yaml::Node& got) const override;
  std::string a_map(yaml::Words fields) const override;
  std::string_view a_key() const override { return "a field name"; }
  std::string an_integer(bool none, std::uint64_t low, std::uint64_t high) const override;
  std::string not_one_of(yaml::Words words, const yaml::Node& got) const override;
  std::string unknown_field(std::string_view name, yaml::Words known) const override;
  std::string repeated(std::string_view kind, yaml::Position first) const override;
  std::string missing(std::string_view) const override { return "required field is missing"; }
  std::string_view no_value() const override { return "expected a value, got nothing"; }
};

/// Has `read` take values out of a text, and returns all that is wrong, in document order. `file`
/// is for messages. Not called if the text is no single YAML document with something in it.
std::vector<ConfigError> read_config_text(
    std::string_view text, const std::string& file,
    const std::function<void(const yaml::Tree&, const yaml::Value& root,
                             std::vector<yaml::Problem>&)>& read);

/// A whole file of at most `max` bytes. False with the reason.
bool read_small_file(const std::string& path, std::size_t max, std::string& out,
                     std::string& reason);

}  // namespace weir::node
