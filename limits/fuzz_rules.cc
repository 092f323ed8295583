// Fuzz target (scripts/fuzz): arbitrary text as a rules file. What is accepted can be compiled and
// decides; what is not is told with its line.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include <weir/limits/limiter.h>
#include <weir/limits/rules/rules_yaml.h>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace weir;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const LoadedRules loaded = parse_rules(text, "rules.yaml");
  if (!loaded.rules) {
    if (loaded.errors.empty()) std::abort();
    return 0;
  }
  LimiterOptions options;
  options.max_series = 1000;
  Limiter limiter(loaded.rules, options);
  const Entry entries[] = {{"key", "a"}, {"ip", "192.0.2.7"}, {"path", "/v1/things"}};
  Request request;
  request.domain = "api";
  request.descriptor = entries;
  constexpr Nanos kNow = 1'700'000'000 * kSecond;
  limiter.check(request, kNow);
  limiter.check(request, kNow + kDay);
  return 0;
}
