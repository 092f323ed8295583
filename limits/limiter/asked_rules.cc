#include <weir/limits/limiter/asked_rules.h>

#include <algorithm>

#include <weir/crdt/epoch.h>
#include <weir/crdt/ids.h>

namespace weir {

RequestLimit numbers_of(const Rule& rule, const RequestLimit& asked) {
  const auto at_most = [](std::uint64_t number, std::uint64_t most) {
    return number == 0 ? most : std::min(number, most);
  };
  RequestLimit out;
  out.limit = at_most(asked.limit, rule.limit);
  out.window = asked.window == 0
                   ? rule.window
                   : std::clamp(asked.window, std::min(kMillisecond, rule.window), rule.window);
  if (!is_bucket(rule.algorithm)) return out;
  const bool as_limit = asked.burst == 0 && asked.limit != 0;
  out.burst = at_most(as_limit ? out.limit : asked.burst, rule.burst);
  if (out.limit == 0 || out.window <= 0) return out;
  const Uint128 most = static_cast<Uint128>(crdt::kMaxLifetime) * out.limit /
                       (static_cast<Uint128>(out.window) * (1 + rule.max_debt));
  if (most < out.burst) out.burst = std::max<std::uint64_t>(static_cast<std::uint64_t>(most), 1);
  return out;
}

std::size_t AskedRules::place_of(std::uint64_t base, const RequestLimit& numbers) {
  const std::uint64_t one = crdt::mix64(base ^ numbers.limit, numbers.burst);
  return crdt::mix64(one, static_cast<std::uint64_t>(numbers.window)) % kPlaces;
}

}  // namespace weir
