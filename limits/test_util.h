#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <weir/limits/rules/rule.h>

/// What tests of several folders need to make rules.
namespace weir::test {

/// Of domain "api", by the entry "key".
inline Rule rule(std::string name, std::uint64_t limit,
                 Algorithm algorithm = Algorithm::fixed_window) {
  Rule made;
  made.domain = "api";
  made.name = std::move(name);
  made.key = {"key"};
  made.limit = limit;
  made.algorithm = algorithm;
  return made;
}

/// A failure of the test that calls it if they are not valid.
inline std::shared_ptr<const RuleSet> set(std::vector<Rule> rules) {
  std::vector<RuleError> errors;
  auto made = RuleSet::make(std::move(rules), errors);
  for (const RuleError& error : errors) ADD_FAILURE() << error.to_string();
  return made;
}

}  // namespace weir::test
