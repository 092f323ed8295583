#include <fmt/format.h>
#include <sodium.h>
#include <CLI/CLI.hpp>

#include <cstdio>
#include <ctime>
#include <string>
#include <utility>

#include <weir/limits/rules/rules_yaml.h>
#include <weir/limits/text/strict_options.h>
#include <weir/node/config.h>
#include <weir/node/control/access_control.h>
#include <weir/node/control/certificates.h>
#include <weir/node/daemon.h>
#include <weir/node/restart_backoff.h>
#include <weir/node/version.h>

namespace {

constexpr int kUsage = 2;
constexpr int kFailed = 1;

template <typename Errors>
int report(const Errors& errors) {
  for (const auto& error : errors) fmt::print(stderr, "{}\n", error.to_string());
  return kUsage;
}

weir::Nanos monotonic() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<weir::Nanos>(now.tv_sec) * weir::kSecond + now.tv_nsec;
}

/// Why a node with this configuration cannot start, as far as can be told; empty: it can.
std::string unusable(const weir::node::NodeConfig& config, const weir::RuleSet& rules) {
  std::string why = weir::node::unsuitable(rules, config);
  if (why.empty()) why = weir::node::unusable_storage(config);
  if (why.empty()) why = weir::node::unusable_tls(config);
  return why;
}

/// A node whose clock was set back starts again in this process, as after any stop.
int serve(weir::node::NodeConfig config, weir::LoadedRules rules, weir::node::Log& log) {
  weir::node::RestartBackoff backoff;
  weir::Nanos not_before = 0;
  for (;;) {
    weir::node::Daemon daemon(config, rules, log, not_before);
    std::string error;
    if (!daemon.start(error)) {
      log.error("start_failed", {{"reason", error}});
      return kFailed;
    }
    daemon.run();
    if (!daemon.set_back()) return 0;
    not_before = backoff.started_again(monotonic());
    config = daemon.config();
    rules = weir::load_rules(config.rules);
    if (!rules.rules || !weir::node::unsuitable(*rules.rules, config).empty()) {
      rules = daemon.rules();
    }
  }
}

/// What tests want of the clock, as it was written; empty: nothing.
struct ClockFlags {
  std::string offset;
  std::string offset_for;
  std::string flaps;
};

/// False if something of it cannot be read: why was printed.
bool apply(const ClockFlags& flags, weir::node::NodeConfig& config) {
  if (!flags.offset.empty() && !weir::node::parse_clock_offset(flags.offset, config.clock_offset)) {
    fmt::print(
        stderr,
        "--clock-offset: expected a length of time of at most 366d, such as 350ms or -2s, got "
        "'{}'\n",
        flags.offset);
    return false;
  }
  if (!flags.offset_for.empty()) {
    weir::Nanos length = 0;
    if (!weir::parse_duration(flags.offset_for, length)) {
      fmt::print(stderr, "--clock-offset-for: expected a length of time, such as 5s, got '{}'\n",
                 flags.offset_for);
      return false;
    }
    config.clock_offset_until = monotonic() + length;
  }
  if (!flags.flaps.empty() && !weir::parse_duration(flags.flaps, config.clock_flaps)) {
    fmt::print(stderr, "--clock-flaps: expected a length of time, such as 5s, got '{}'\n",
               flags.flaps);
    return false;
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"A weir node: counts and decides in its region, and merges with the others.",
               "weir-node"};
  std::string path;
  ClockFlags clock;
  bool validate = false;
  app.add_option("--config", path, "The node's configuration, for example node.yaml")->required();
  app.add_flag("--validate", validate, "Check the configuration and the rules, and exit");
  app.add_option("--clock-offset", clock.offset,
                 "For tests: run this far ahead of the wall clock, or behind it (-350ms)")
      ->type_name("DURATION");
  app.add_option("--clock-offset-for", clock.offset_for,
                 "For tests: --clock-offset ends after this long")
      ->type_name("DURATION");
  app.add_option("--clock-flaps", clock.flaps,
                 "For tests: --clock-offset is on and off in turn, for this long each")
      ->type_name("DURATION");
  app.set_version_flag("--version", std::string(weir::node::kVersion));
  weir::strict_numbers(app);
  CLI11_PARSE(app, argc, argv);

  weir::node::LoadedConfig loaded = weir::node::load_config(path);
  if (!loaded.config) return report(loaded.errors);
  if (!apply(clock, *loaded.config)) return kUsage;
  weir::LoadedRules rules = weir::load_rules(loaded.config->rules);
  if (!rules.rules) return report(rules.errors);
  if (validate) {
    for (const weir::RuleWarning& warning : rules.warnings) {
      fmt::print(stderr, "{}\n", warning.to_string());
    }
  }
  if (const std::string why = unusable(*loaded.config, *rules.rules); !why.empty()) {
    fmt::print(stderr, "{}: {}\n", path, why);
    return kUsage;
  }
  if (const auto errors = weir::node::unusable_access(*loaded.config); !errors.empty()) {
    return report(errors);
  }
  if (validate) {
    for (const std::string& file : weir::node::readable_secrets(*loaded.config)) {
      fmt::print(stderr, "{}: warning: every user of this machine can read it\n", file);
    }
    return 0;
  }

  if (sodium_init() < 0) {
    fmt::print(stderr, "weir-node: libsodium cannot start (no source of random numbers?)\n");
    return kFailed;
  }
  weir::node::LogOptions options;
  options.level = loaded.config->log_level;
  options.format = loaded.config->log_format;
  weir::node::Log log(options);
  return serve(*loaded.config, std::move(rules), log);
}
