#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include <weir/crdt/time.h>
#include <weir/limits/reply.h>
#include <weir/limits/rules/rules_yaml.h>
#include <weir/node/log.h>

namespace weir::node {

/// How the rules in force came to be, and what came after them and was refused.
struct RulesStatus {
  std::string version;
  Nanos since = 0;  ///< wall clock
  std::uint64_t reloads = 0;
  std::uint64_t refused = 0;
  std::string last_error;  ///< of the file as it is, if that was refused
  Nanos refused_at = 0;    ///< wall clock
};

/// The rules in force, and whether others may take their place. Not thread-safe: for the main loop.
class RulesControl {
 public:
  /// Why this node cannot keep a set's promises; empty: it can.
  using Suits = std::function<std::string(const RuleSet&)>;
  /// Has `rules` come into force.
  using Apply = std::function<void(std::shared_ptr<const RuleSet>)>;

  RulesControl(LoadedRules loaded, Suits suits, Log& log, Nanos wall);

  /// What was read after a change. It comes into force as a whole, or is refused as a whole, with
  /// the reasons in the log.
  void take(LoadedRules loaded, Nanos wall, const Apply& apply);

  const std::shared_ptr<const RuleSet>& rules() const { return rules_; }
  const RulesStatus& status() const { return status_; }
  /// For a caller that has version `known`.
  RulesReply answer(std::string_view known);

 private:
  void refuse(const LoadedRules& loaded, std::string error, Nanos wall);

  std::shared_ptr<const RuleSet> rules_;
  Suits suits_;
  Log& log_;
  RulesStatus status_;
  std::string text_;  // of the rules in force, once somebody asked
};

}  // namespace weir::node
