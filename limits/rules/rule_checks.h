#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include <weir/limits/rules/rule.h>

namespace weir::internal {

inline constexpr std::size_t kMaxPattern = 256;  ///< bytes of a glob
inline constexpr std::size_t kMaxList = 1024;    ///< values of a list, or networks
inline constexpr std::size_t kMaxReplaces = 64;  ///< names
inline constexpr std::size_t kMaxLabels = 8;
inline constexpr std::size_t kMaxSegments = 64;  ///< of a path in a key

/// Notes what was expected of the field at `path`.
using Fail = std::function<void(std::string_view path, std::string expected)>;

/// What is wrong with one matcher, at `path`. Not of the entry's name.
void check_matcher(const Match& match, std::string_view path, const Fail& fail);

/// What is wrong with the ways in which a rule's key is counted.
void check_key_forms(const Rule& rule, const Fail& fail);

/// What is wrong with what callers and metrics are told of a rule.
void check_told(const Rule& rule, const Fail& fail);

/// Notes what is wrong with how rules stand in each other's place: groups whose rules do not agree
/// on their order, and names that are not there, or that replace each other in a circle.
void check_places(
    const std::vector<Rule>& rules,
    const std::function<void(std::size_t rule, std::string_view path, std::string expected)>& fail);

}  // namespace weir::internal
