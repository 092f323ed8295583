#include <weir/node/control/access_control.h>

#include <cstdlib>
#include <utility>

#include <weir/rpc/net/address.h>

namespace weir::node {
namespace {

constexpr Nanos kLookEvery = 2 * kSecond;
constexpr std::size_t kMostReasons = 20;

}  // namespace

std::vector<ConfigError> unusable_access(const NodeConfig& config) {
  return config.access.empty() ? std::vector<ConfigError>() : load_access(config.access).errors;
}

AccessControl::AccessControl(const NodeConfig& config, Access& access, Log& log,
                             rpc::Background& background)
    : file_(config.access), access_(access), log_(log), background_(background) {
  if (file_.empty()) return;
  seen_ = internal::look_at_file(file_);
  LoadedAccess loaded = load_access(file_);
  if (loaded.table == nullptr) {
    error_ = "access: " + loaded.errors[0].to_string();
  } else {
    access_.replace(std::move(loaded.table));
  }
}

void AccessControl::look(Nanos wall) {
  if (file_.empty() || std::abs(wall - looked_at_) < kLookEvery) return;
  looked_at_ = wall;
  // What was refused may have been half written, or may be readable now, and looks as it did.
  if (!current_ || internal::look_at_file(file_) != seen_) read();
}

void AccessControl::reread() {
  told_.clear();  // whoever asks is told
  if (!file_.empty()) read();
}

void AccessControl::read() {
  if (std::exchange(busy_, true)) return;
  seen_ = internal::look_at_file(file_);
  auto loaded = std::make_shared<LoadedAccess>();
  background_.run([loaded, file = file_] { *loaded = load_access(file); },
                  [this, loaded] {
                    busy_ = false;
                    take(std::move(*loaded));
                  });
}

void AccessControl::take(LoadedAccess loaded) {
  current_ = loaded.table != nullptr;
  if (current_) {
    told_.clear();
    access_.replace(std::move(loaded.table));
    return audit(log_, "file", file_, "access", "done");
  }
  const std::string why = loaded.errors[0].to_string();
  if (std::exchange(told_, why) == why) return;
  audit(log_, "file", file_, "access", "refused: " + why);
  for (const ConfigError& each : loaded.errors) {
    log_.error("access_refused", {{"reason", each.to_string()}});
    if (static_cast<std::size_t>(&each - loaded.errors.data()) + 1 >= kMostReasons) break;
  }
}

void warn_of_listeners(const NodeConfig& config, const AccessTable& table, Log& log) {
  for (const ListenConfig& listen : config.fronts) {
    std::string error;
    const auto address = rpc::parse_address(listen.address, error);
    if (!address || table.is_loopback(*address)) continue;
    if (table.open_to_anonymous()) {
      log.warn("open_to_anonymous", {{"front", listen.front}, {"address", listen.address}});
    } else if (!table.open_to_anyone()) {
      log.warn("nobody_may_call", {{"front", listen.front},
                                   {"address", listen.address},
                                   {"why",
                                    "no access file gives anybody a role who is not on "
                                    "loopback"}});
    }
  }
}

}  // namespace weir::node
