#pragma once

#include <cstdint>
#include <vector>

#include <weir/limits/rules/rule.h>

namespace weir {

/// Which of the rules that match a descriptor apply: of a group the first, and none that another
/// one replaces. Not installed; RuleSet has one.
///
/// A shadow rule takes no other one's place. It applies beside the others where it would be the
/// first of its group and no rule in force replaces it.
///
/// Immutable and thread-safe.
class RuleChoice {
 public:
  /// Names in Rule::replaces that no rule of the domain has are passed over.
  explicit RuleChoice(const std::vector<Rule>& rules);

  /// There are no groups, and no rule replaces another.
  bool empty() const { return placed_.empty(); }

  /// Takes the others out of matched[first …], which are in ascending order and stay so.
  void apply(std::vector<std::uint32_t>& matched, std::size_t first) const;

 private:
  struct Placed {
    std::uint32_t group = 0;         // from 1; 0: in none
    std::uint32_t place = 0;         // in the group, the first has the lowest
    std::uint32_t replaces = 0;      // the first, in replaced_
    std::uint32_t replaces_end = 0;  // one behind the last
    bool shadow = false;
  };
  std::vector<Placed> placed_;  // by rule, or none
  std::vector<std::uint32_t> replaced_;
};

/// How exact a rule's match is. Of two, the greater one is more exact.
struct Exactness {
  std::size_t values = 0;    ///< entries that must have a value, or one of several
  std::size_t patterns = 0;  ///< entries that must lie in something: a network, a path, a prefix …
  std::size_t length = 0;    ///< how much those say: bytes, or of networks bits
  std::size_t others = 0;    ///< further conditions: any, absent, numbers, not
  auto operator<=>(const Exactness&) const = default;
};
Exactness exactness_of(const Rule& rule);

}  // namespace weir
