#pragma once

#include <string>

#include <weir/limits/rules/rule.h>

namespace weir {

/// The rules as YAML, in their order; parse_rules() reads the same set back, if every text in it is
/// one that parse_rules accepts. For nodes that tell clients their rules.
std::string rules_text(const RuleSet& rules);

}  // namespace weir
