#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include <weir/limits/rules/rule.h>

namespace weir {

/// Where a list of rules was read from. RuleSet::make holds all checks of a rule's values; through
/// this it learns what a reader knows and the Rule does not show. Not installed.
class RuleOrigin {
 public:
  enum class State : std::uint8_t {
    unset,       ///< not written, or this origin cannot tell
    set,         ///< written, and in the Rule
    unreadable,  ///< written wrongly or missing, and already reported: not checked further
  };

  virtual ~RuleOrigin() = default;
  /// `field` is one of Rule's members, `default_cost` and `cost_by_method` being called `cost`.
  virtual State state(std::size_t rule, std::string_view field) const = 0;
  /// An error with all filled in but `expected`. `path` is a field, "key[1]" or "match.path".
  virtual RuleError error(std::size_t rule, std::string_view path) const = 0;
  /// What a message about another rule calls this one: "line 12".
  virtual std::string place(std::size_t rule) const = 0;
};

namespace internal {

inline constexpr std::size_t kMaxRules = 100'000;
inline constexpr std::size_t kMaxErrors = 1000;
inline constexpr std::size_t kMaxMethods = 64;

/// What a domain's or rule's name must be, if `name` is not that; else empty.
std::string name_problem(std::string_view name);

}  // namespace internal
}  // namespace weir
