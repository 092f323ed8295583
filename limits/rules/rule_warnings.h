#pragma once

#include <vector>

#include <weir/limits/rules/rule.h>
#include <weir/limits/rules/rule_origin.h>

namespace weir::internal {

/// What is valid in `rules` and most likely not meant, at most kMaxErrors. Not installed.
std::vector<RuleWarning> rule_warnings(const std::vector<Rule>& rules, const RuleOrigin& origin);

}  // namespace weir::internal
