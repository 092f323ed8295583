#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <weir/crdt/message.h>
#include <weir/crdt/replica.h>
#include <weir/limits/rules/rule.h>

namespace weir::bench {

/// What other nodes say that they counted: for a range of keys one hit each, as their limiters
/// would have counted it at `now`.
class Pushes {
 public:
  /// One rule on `key` with this algorithm, as key_rules_text() has it.
  explicit Pushes(const std::string& algorithm);

  const std::shared_ptr<const RuleSet>& rules() const { return rules_; }
  /// Own counts of the keys [first, first + count).
  std::vector<crdt::OwnCount> counts(std::uint64_t first, std::size_t count, Nanos now) const;
  /// The same of keys that were in use before, each for a time of its own, and again within the
  /// 250 ms from `now` on: what a push carries of a node at work.
  std::vector<crdt::OwnCount> counts_in_use(std::size_t count, Nanos now) const;
  /// The next push of `writer`, whose stamps so far reach to `after`, with these counts.
  static crdt::Push push(const crdt::Incarnation& writer, std::uint64_t after,
                         const std::vector<crdt::OwnCount>& counts);

 private:
  class Counter;
  std::shared_ptr<const RuleSet> rules_;
};

}  // namespace weir::bench
