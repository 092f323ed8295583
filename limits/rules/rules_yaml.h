#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <weir/limits/rules/rule.h>
#include <weir/limits/text/duration.h>

namespace weir {

struct LoadedRules {
  std::shared_ptr<const RuleSet> rules;  ///< null if there were errors
  std::vector<RuleError> errors;      ///< all that were found (the first 1000), in document order
  std::vector<RuleWarning> warnings;  ///< of rules without errors, in document order
  /// Of the file's bytes, 16 hexadecimal digits: to tell versions apart, no proof against forgery.
  /// Empty where none could be read, and from parse_rules.
  std::string version;
};

/// Reads rules from YAML (docs/rules.md has every field). The text may hold several documents, each
/// with one `domain`. Unknown fields are errors. `file` is only for messages.
LoadedRules parse_rules(std::string_view yaml, std::string_view file);

/// The same from a file; one that cannot be read, or is larger than 16 MiB, is an error.
LoadedRules load_rules(const std::string& path);

/// How a rule's window reads: "1m30s", or "month (Europe/Berlin)".
std::string format_window(const Rule& rule);

}  // namespace weir
