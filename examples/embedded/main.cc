// The limiter inside a service: no node, no network, one call per request.
#include <weir/limits/limiter.h>
#include <weir/limits/rules/rules_yaml.h>

#include <cstdio>
#include <ctime>

namespace {

constexpr const char* kRules = R"(
domain: api
rules:
  - name: per-key
    match: {api_key: any}
    key: [api_key]
    limit: 60
    window: 1m
    algorithm: token_bucket
    burst: 3
)";

weir::Nanos now() {
  timespec time{};
  clock_gettime(CLOCK_REALTIME, &time);
  return static_cast<weir::Nanos>(time.tv_sec) * weir::kSecond + time.tv_nsec;
}

}  // namespace

int main() {
  weir::LoadedRules loaded = weir::parse_rules(kRules, "built-in rules");
  if (!loaded.rules) {
    for (const weir::RuleError& error : loaded.errors) std::puts(error.to_string().c_str());
    return 2;
  }
  weir::Limiter limiter(loaded.rules, {});
  int denied = 0;
  for (int i = 0; i < 5; ++i) {
    weir::Entry descriptor[] = {{"api_key", "alice"}, {"path", "/v1/things"}};
    weir::Decision decision = limiter.check({"api", descriptor, 1}, now());
    const weir::RuleStatus* rule = decision.decider();
    std::printf(
        "request %d: %s, %llu left, try again in %lld ms\n", i + 1,
        decision.allowed ? "pass" : "deny", static_cast<unsigned long long>(rule->remaining),
        static_cast<long long>((rule->retry_after + weir::kMillisecond - 1) / weir::kMillisecond));
    if (!decision.allowed) ++denied;
  }
  return denied == 2 ? 0 : 1;
}
