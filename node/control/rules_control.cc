#include <weir/node/control/rules_control.h>

#include <utility>

#include <weir/limits/rules/rules_text.h>

namespace weir::node {
namespace {

/// Mistakes of a refused file that are logged.
constexpr std::ptrdiff_t kMaxReasons = 20;

}  // namespace

RulesControl::RulesControl(LoadedRules loaded, Suits suits, Log& log, Nanos wall)
    : rules_(std::move(loaded.rules)), suits_(std::move(suits)), log_(log) {
  status_.version = std::move(loaded.version);
  status_.since = wall;
}

void RulesControl::take(LoadedRules loaded, Nanos wall, const Apply& apply) {
  std::string error;
  if (loaded.rules != nullptr) {
    error = suits_(*loaded.rules);
  } else {
    error = loaded.errors.empty() ? "unknown" : loaded.errors[0].to_string();
  }
  if (!error.empty()) return refuse(loaded, std::move(error), wall);
  status_.last_error.clear();
  if (loaded.version == status_.version) return;
  rules_ = std::move(loaded.rules);
  text_.clear();
  apply(rules_);
  ++status_.reloads;
  status_.version = std::move(loaded.version);
  status_.since = wall;
  log_.info("rules_loaded", {{"version", status_.version}, {"rules", rules_->rules().size()}});
}

void RulesControl::refuse(const LoadedRules& loaded, std::string error, Nanos wall) {
  ++status_.refused;
  for (const RuleError& each : loaded.errors) {
    log_.error("rules_refused", {{"reason", each.to_string()}});
    if (&each - loaded.errors.data() >= kMaxReasons) break;
  }
  if (loaded.errors.empty()) log_.error("rules_refused", {{"reason", error}});
  status_.last_error = std::move(error);
  status_.refused_at = wall;
}

RulesReply RulesControl::answer(std::string_view known) {
  RulesReply reply;
  reply.version = status_.version;
  reply.same = !known.empty() && known == status_.version;
  if (reply.same) return reply;
  if (text_.empty()) text_ = rules_text(*rules_);
  reply.yaml = text_;
  return reply;
}

}  // namespace weir::node
