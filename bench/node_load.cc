// node_load PART [--quick] [--full] [--keys N]: one measurement of whole nodes, as one JSON object
// on stdout; 77 as exit code if it was left out. scripts/bench --node runs all parts, each in a
// process of its own, and puts them together. See bench/README.md.
#include <fmt/format.h>
#include <kj/exception.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <map>

#include <weir/bench/node/node_parts.h>
#include <weir/limits/text/strict_options.h>

int main(int argc, char** argv) {
  using namespace weir::bench;
  const std::map<std::string, Json (*)(const NodeBenchOptions&)> parts{
      {"memory", node_memory}, {"full", node_full},       {"writers", node_writers},
      {"merge", node_merge},   {"counted", node_counted}, {"store", node_store},
      {"held", node_held},     {"ends", node_ends},       {"rules", node_rules},
      {"redis", node_redis}};
  CLI::App app("One measurement of whole nodes, as JSON");
  std::string part;
  std::string program = WEIR_NODE_PROGRAM;
  std::string scratch = std::filesystem::temp_directory_path();
  bool quick = false;
  bool full = false;
  std::uint64_t keys = 0;
  app.add_option("part", part,
                 "memory, full, writers, merge, counted, store, held, ends, rules, redis")
      ->required()
      ->check(CLI::IsMember(parts));
  app.add_flag("--quick", quick, "a million keys and not ten, shorter rounds");
  app.add_flag("--full", full, "the part full is measured, with 100 million keys or --keys");
  app.add_option("--keys", keys, "instead of ten million, or one");
  app.add_option("--node", program, "weir-node to measure");
  app.add_option("--scratch", scratch, "where stores are: on the disk to measure");
  weir::strict_numbers(app);
  CLI11_PARSE(app, argc, argv);
  NodeBenchOptions options = quick ? NodeBenchOptions::quick() : NodeBenchOptions();
  if (keys > 0) options.keys = keys;
  if (full) options.full_keys = keys > 0 ? keys : 100'000'000;
  options.program = std::filesystem::absolute(program);
  options.scratch = fmt::format("{}/weir-node-bench-{}", scratch, ::getpid());
  int code = 0;
  try {
    if (part == "full" && !full) throw LeftOut("it is measured with --full only");
    std::filesystem::create_directories(options.scratch);
    fmt::print("{}\n", parts.at(part)(options).dump());
  } catch (const LeftOut& why) {
    fmt::print(stderr, "node_load {}: left out, {}\n", part, why.what());
    code = 77;
  } catch (const std::exception& failure) {
    fmt::print(stderr, "node_load {}: {}\n", part, failure.what());
    code = 1;
  } catch (const kj::Exception& failure) {
    fmt::print(stderr, "node_load {}: {}\n", part, failure.getDescription().cStr());
    code = 1;
  }
  std::error_code ignored;
  std::filesystem::remove_all(options.scratch, ignored);
  return code;
}
