// weir-load: skewed traffic against one or more nodes.
#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <chrono>
#include <thread>

#include <weir/limits/text/strict_options.h>

#include "load.h"

using namespace weir::examples;

int main(int argc, char** argv) {
  CLI::App app{"Sends skewed traffic to weir nodes and tells what they answered.", "weir-load"};
  std::vector<std::string> addresses;
  std::string log;
  std::size_t keys = 1000;
  double skew = 0.99;
  unsigned seconds = 10;
  LoadOptions options;
  app.add_option("--address", addresses, "Client ports, for example 127.0.0.1:7401")->required();
  app.add_option("--domain", options.domain, "Domain of the rules")->capture_default_str();
  app.add_option("--key", options.key, "Descriptor entry to set")->capture_default_str();
  app.add_option("--keys", keys, "How many keys")->check(CLI::Range(1, 10'000'000));
  app.add_option("--zipf", skew, "Skew; 0 is uniform")->check(CLI::Range(0.0, 5.0));
  app.add_option("--log", log, "Use the client addresses of this access log as keys instead");
  app.add_option("--rate", options.per_second, "Requests a second and address")
      ->check(CLI::Range(1, 1'000'000))
      ->capture_default_str();
  app.add_option("--batch", options.batch, "Requests in one call")->check(CLI::Range(1, 1024));
  app.add_option("--seconds", seconds, "How long")->check(CLI::Range(1, 3600));
  weir::strict_numbers(app);
  CLI11_PARSE(app, argc, argv);

  if (!log.empty()) {
    options.keys = keys_of_log(log);
    if (options.keys.empty()) {
      fmt::print(stderr, "weir-load: {}: no access log lines\n", log);
      return 2;
    }
  } else {
    ZipfKeys zipf(keys, skew, 1);
    for (int i = 0; i < 200'000; ++i) options.keys.push_back(fmt::format("key-{}", zipf.next()));
  }
  std::vector<std::unique_ptr<Load>> loads;
  for (const std::string& address : addresses) {
    options.address = address;
    loads.push_back(std::make_unique<Load>(options));
  }
  for (unsigned i = 0; i < seconds; ++i) {
    std::this_thread::sleep_for(std::chrono::seconds(1));
    for (std::size_t k = 0; k < loads.size(); ++k) {
      fmt::print("{:>3} s  {}  admitted {}  denied {}  unanswered {}\n", i + 1, addresses[k],
                 loads[k]->admitted(), loads[k]->denied(), loads[k]->unknown());
    }
    std::fflush(stdout);
  }
  std::uint64_t answered = 0;
  for (auto& load : loads) {
    load->stop();
    answered += load->admitted() + load->denied();
  }
  return answered > 0 ? 0 : 1;
}
